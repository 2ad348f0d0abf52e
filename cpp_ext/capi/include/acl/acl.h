/* Devices, memory, streams and tensors for the two-phase operators in aclnnop/. For C and C++.
 *
 * Functions that give a status give ACL_SUCCESS, or else aclGetRecentErrMsg() says what was wrong. No function owns
 * memory or arrays that are handed to it after it has returned, and every function may be called from any thread.
 *
 * The second phase of an operator, aclnn<Operator>, runs what executor holds, once: it is then gone. What is on a
 * stream runs in order. Device memory of at least the size that the first phase gave, workspace, belongs to the run
 * until the stream has come past it.
 */
#ifndef GRADFUSE_ACL_ACL_H_
#define GRADFUSE_ACL_ACL_H_

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Around declarations of functions in C that a library shows. */
#ifdef __cplusplus
#define ACL_BEGIN_DECLS _Pragma("GCC visibility push(default)") extern "C" {
#define ACL_END_DECLS \
  }                   \
  _Pragma("GCC visibility pop")
#else
#define ACL_BEGIN_DECLS _Pragma("GCC visibility push(default)")
#define ACL_END_DECLS _Pragma("GCC visibility pop")
#endif

ACL_BEGIN_DECLS

typedef int aclError;
typedef int32_t aclnnStatus;

enum {
  ACL_SUCCESS = 0,
  ACL_ERROR_INVALID_PARAM = 100000,
  ACL_ERROR_UNINITIALIZE = 100001,      /* aclFinalize without aclInit */
  ACL_ERROR_REPEAT_INITIALIZE = 100002, /* aclInit a second time */
  ACL_ERROR_BAD_ALLOC = 200000,
  ACL_ERROR_FAILURE = 500005,       /* something that ran earlier on a stream has failed, or the device has */
  ACLNN_ERR_PARAM_NULLPTR = 161001, /* a required pointer is null */
  ACLNN_ERR_PARAM_INVALID = 161002, /* a type, rank, shape or value is none that the operator takes */
  ACLNN_ERR_RUNTIME_ERROR = 361001  /* out of memory, or the device has failed */
};

typedef enum {
  ACL_DT_UNDEFINED = -1,
  ACL_FLOAT = 0,
  ACL_FLOAT16 = 1,
  ACL_INT8 = 2,
  ACL_INT32 = 3,
  ACL_UINT8 = 4,
  ACL_INT16 = 6,
  ACL_INT64 = 9,
  ACL_DOUBLE = 11,
  ACL_BOOL = 12,
  ACL_BF16 = 27
} aclDataType;

typedef enum {
  ACL_FORMAT_UNDEFINED = -1,
  ACL_FORMAT_NCHW = 0,
  ACL_FORMAT_NHWC = 1,
  ACL_FORMAT_ND = 2 /* the only one that operators take */
} aclFormat;

/* How memory is divided into pages makes no difference here. */
typedef enum {
  ACL_MEM_MALLOC_HUGE_FIRST = 0,
  ACL_MEM_MALLOC_HUGE_ONLY = 1,
  ACL_MEM_MALLOC_NORMAL_ONLY = 2
} aclrtMemMallocPolicy;

typedef enum {
  ACL_MEMCPY_HOST_TO_HOST = 0,
  ACL_MEMCPY_HOST_TO_DEVICE = 1,
  ACL_MEMCPY_DEVICE_TO_HOST = 2,
  ACL_MEMCPY_DEVICE_TO_DEVICE = 3
} aclrtMemcpyKind;

typedef struct aclTensor aclTensor;
typedef struct aclIntArray aclIntArray;
typedef struct aclOpExecutor aclOpExecutor; /* one planned run of an operator */
typedef void* aclrtStream;                  /* NULL: on the CPU, run before the call returns */

/* What the last function that failed in this thread says about it, in one line; "" where none has. Valid until the next
 * call in this thread. */
const char* aclGetRecentErrMsg(void);

/* Once in a process. There is no configuration: configPath may be NULL. */
aclError aclInit(const char* configPath);
/* Gives up the executors that were never run. */
aclError aclFinalize(void);

/* Devices are numbered from 0; the CPU has the number 0 only. */
aclError aclrtSetDevice(int32_t deviceId);
aclError aclrtResetDevice(int32_t deviceId);

aclError aclrtCreateStream(aclrtStream* stream);
/* Waits for what is on the stream. */
aclError aclrtDestroyStream(aclrtStream stream);
/* Waits for what is on the stream, and says what of it has failed since the last call. */
aclError aclrtSynchronizeStream(aclrtStream stream);

/* Memory of the device, aligned to 256 bytes. A size of 0 is refused. */
aclError aclrtMalloc(void** devPtr, size_t size, aclrtMemMallocPolicy policy);
aclError aclrtFree(void* devPtr);
/* Copies count bytes, at most destMax, and waits for them; it does not wait for streams. */
aclError aclrtMemcpy(void* dst, size_t destMax, const void* src, size_t count, aclrtMemcpyKind kind);

/* A view of memory that stays the caller's: element i0, i1, ... lies offset + i0 stride[0] + i1 stride[1] + ...
 * elements after tensorData. Strides are not negative. storageDims is the shape of what lies at tensorData, which the
 * view must not leave. NULL where the arguments describe no tensor. */
aclTensor* aclCreateTensor(const int64_t* viewDims, uint64_t viewDimsNum, aclDataType dataType, const int64_t* stride,
                           int64_t offset, aclFormat format, const int64_t* storageDims, uint64_t storageDimsNum,
                           void* tensorData);
/* Whatever was planned with the tensor can still run. A tensor that was destroyed before is refused; NULL is none to
 * destroy. The same holds for arrays. */
aclnnStatus aclDestroyTensor(const aclTensor* tensor);

/* A copy of the values. NULL where the arguments describe no array. */
aclIntArray* aclCreateIntArray(const int64_t* value, uint64_t size);
aclnnStatus aclDestroyIntArray(const aclIntArray* array);

ACL_END_DECLS

#endif
