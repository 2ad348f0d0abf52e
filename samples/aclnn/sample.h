/* What the programs beside this file share. */
#ifndef GRADFUSE_SAMPLES_ACLNN_SAMPLE_H_
#define GRADFUSE_SAMPLES_ACLNN_SAMPLE_H_

#include <stdio.h>
#include <stdlib.h>

#include "acl/acl.h"

/* Ends the program where a call does not succeed. */
#define EXPECT_SUCCESS(call)                                   \
  do {                                                         \
    const int code = (call);                                   \
    if (code != ACL_SUCCESS) {                                 \
      fprintf(stderr, "%d: %s\n", code, aclGetRecentErrMsg()); \
      exit(1);                                                 \
    }                                                          \
  } while (0)

/* A tensor in device memory of its own. */
typedef struct {
  void* memory;
  size_t bytes;
  aclTensor* tensor;
} DeviceTensor;

static size_t SizeOf(aclDataType type) {
  switch (type) {
    case ACL_BOOL: return 1;
    case ACL_FLOAT16:
    case ACL_BF16: return 2;
    case ACL_FLOAT:
    case ACL_INT32: return 4;
    default: return 8;
  }
}

/* A dense tensor with the values at `data`; without, its memory is not set. */
static DeviceTensor MakeTensor(const void* data, aclDataType type, uint64_t rank, const int64_t* dims) {
  DeviceTensor made = {NULL, SizeOf(type), NULL};
  int64_t strides[8];
  int64_t stride = 1;
  for (uint64_t axis = rank; axis-- > 0;) {
    strides[axis] = stride;
    stride *= dims[axis];
  }
  made.bytes *= (size_t)stride;
  EXPECT_SUCCESS(aclrtMalloc(&made.memory, made.bytes, ACL_MEM_MALLOC_HUGE_FIRST));
  if (data != NULL) {
    EXPECT_SUCCESS(aclrtMemcpy(made.memory, made.bytes, data, made.bytes, ACL_MEMCPY_HOST_TO_DEVICE));
  }
  made.tensor = aclCreateTensor(dims, rank, type, strides, 0, ACL_FORMAT_ND, dims, rank, made.memory);
  if (made.tensor == NULL) {
    fprintf(stderr, "%s\n", aclGetRecentErrMsg());
    exit(1);
  }
  return made;
}

static void FreeTensor(DeviceTensor tensor) {
  EXPECT_SUCCESS(aclDestroyTensor(tensor.tensor));
  EXPECT_SUCCESS(aclrtFree(tensor.memory));
}

/* A second phase of any operator. */
typedef aclnnStatus (*SecondPhase)(void*, uint64_t, aclOpExecutor*, aclrtStream);

/* Runs what the first phase has planned, and waits for it. */
static void RunAndWait(SecondPhase second_phase, uint64_t workspace_size, aclOpExecutor* executor, aclrtStream stream) {
  void* workspace = NULL;
  if (workspace_size > 0) EXPECT_SUCCESS(aclrtMalloc(&workspace, workspace_size, ACL_MEM_MALLOC_HUGE_FIRST));
  EXPECT_SUCCESS(second_phase(workspace, workspace_size, executor, stream));
  EXPECT_SUCCESS(aclrtSynchronizeStream(stream));
  if (workspace_size > 0) EXPECT_SUCCESS(aclrtFree(workspace));
}

/* Prints a tensor of floats, a row a line. */
static void PrintRows(DeviceTensor tensor, int64_t columns) {
  const size_t count = tensor.bytes / sizeof(float);
  float* values = malloc(tensor.bytes);
  if (values == NULL) exit(1);
  EXPECT_SUCCESS(aclrtMemcpy(values, tensor.bytes, tensor.memory, tensor.bytes, ACL_MEMCPY_DEVICE_TO_HOST));
  for (size_t i = 0; i < count; ++i) printf("%.6f%c", values[i], (i + 1) % (size_t)columns == 0 ? '\n' : ' ');
  free(values);
}

static aclrtStream Begin(void) {
  aclrtStream stream;
  EXPECT_SUCCESS(aclInit(NULL));
  EXPECT_SUCCESS(aclrtSetDevice(0));
  EXPECT_SUCCESS(aclrtCreateStream(&stream));
  return stream;
}

static void End(aclrtStream stream) {
  EXPECT_SUCCESS(aclrtDestroyStream(stream));
  EXPECT_SUCCESS(aclrtResetDevice(0));
  EXPECT_SUCCESS(aclFinalize());
}

#endif
