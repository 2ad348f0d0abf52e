#pragma once

#include <exception>
#include <string>
#include <utility>

#include "acl/acl.h"
#include "gradfuse/status.h"

namespace gradfuse::aclnn {

// What a function of the C API gives back, and why.
class Error : public std::exception {
 public:
  Error(int code, std::string message) : code_(code), message_(std::move(message)) {}
  int code() const { return code_; }
  const char* what() const noexcept override { return message_.c_str(); }

 private:
  int code_;
  std::string message_;
};

// Throws an Error where `status` is one.
void ThrowIfError(const Status& status);

// Throws an Error of `code` where `pointer` is null.
inline void ExpectPointer(const void* pointer, const char* name, const char* wanted, int code) {
  if (pointer == nullptr) throw Error(code, std::string(name) + " is a null pointer; expected " + wanted);
}

// Keeps `<function>: <what the exception that is being handled says>` for aclGetRecentErrMsg, and gives its code.
int HandleException(const char* function, int code_of_no_memory, int code_of_others) noexcept;

// Runs the body of a C function: no exception leaves it.
template <class Body>
aclError Guarded(const char* function, const Body& body) noexcept {
  try {
    body();
    return ACL_SUCCESS;
  } catch (...) {
    return HandleException(function, ACL_ERROR_BAD_ALLOC, ACL_ERROR_FAILURE);
  }
}

// The same for the functions of operators.
template <class Body>
aclnnStatus GuardedOp(const char* function, const Body& body) noexcept {
  try {
    body();
    return ACL_SUCCESS;
  } catch (...) {
    return HandleException(function, ACLNN_ERR_RUNTIME_ERROR, ACLNN_ERR_RUNTIME_ERROR);
  }
}

}  // namespace gradfuse::aclnn
