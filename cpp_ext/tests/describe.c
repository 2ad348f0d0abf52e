/* Prints what a function of a library that is loaded at run time says: describe LIBRARY FUNCTION */
#include <stdio.h>
#include <string.h>
#ifdef _WIN32
#include <windows.h>
#else
#include <dlfcn.h>
#endif

typedef const char* (*Function)(void);

static void* Find(const char* library, const char* name) {
#ifdef _WIN32
  const HMODULE loaded = LoadLibraryA(library);
  return loaded ? (void*)GetProcAddress(loaded, name) : NULL;
#else
  void* const loaded = dlopen(library, RTLD_NOW);
  if (loaded == NULL) fprintf(stderr, "%s\n", dlerror());
  return loaded ? dlsym(loaded, name) : NULL;
#endif
}

int main(int count, char** arguments) {
  if (count != 3) return 2;
  void* const address = Find(arguments[1], arguments[2]);
  if (address == NULL) return 1;
  Function function;
  memcpy(&function, &address, sizeof function);
  puts(function());
  return 0;
}
