/* What a call of the C API costs: both phases of aclnnMseLossBackward on a tensor of one element, without a stream, in
 * processor time. Prints the best and the median of many rounds. */
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "acl/acl.h"
#include "aclnnop/aclnn_mse_loss_backward.h"

enum { kRounds = 51, kCalls = 2000 };

static double Now(void) {
  struct timespec time;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return (double)time.tv_sec * 1e9 + (double)time.tv_nsec;
}

static int Compare(const void* a, const void* b) {
  const double first = *(const double*)a;
  const double second = *(const double*)b;
  return (first > second) - (first < second);
}

int main(void) {
  const int64_t one = 1;
  float* memory;
  aclTensor* tensors[4];
  double times[kRounds];
  if (aclInit(NULL) != ACL_SUCCESS || aclrtMalloc((void**)&memory, 4 * sizeof(float), ACL_MEM_MALLOC_HUGE_FIRST) != 0) {
    fprintf(stderr, "%s\n", aclGetRecentErrMsg());
    return 1;
  }
  for (int i = 0; i < 4; ++i) {
    memory[i] = (float)i;
    tensors[i] = aclCreateTensor(&one, 1, ACL_FLOAT, &one, 0, ACL_FORMAT_ND, &one, 1, memory + i);
  }
  for (int round = 0; round < kRounds; ++round) {
    const double begin = Now();
    for (int call = 0; call < kCalls; ++call) {
      uint64_t workspace_size;
      aclOpExecutor* executor;
      if (aclnnMseLossBackwardGetWorkspaceSize(tensors[0], tensors[1], tensors[2], 1, tensors[3], &workspace_size,
                                               &executor) != ACL_SUCCESS ||
          aclnnMseLossBackward(NULL, workspace_size, executor, NULL) != ACL_SUCCESS) {
        fprintf(stderr, "%s\n", aclGetRecentErrMsg());
        return 1;
      }
    }
    times[round] = (Now() - begin) / kCalls;
  }
  qsort(times, kRounds, sizeof times[0], Compare);
  printf("both phases on one element: %.0f ns at best, %.0f ns in the median\n", times[0], times[kRounds / 2]);

  for (int i = 0; i < 4; ++i) aclDestroyTensor(tensors[i]);
  aclrtFree(memory);
  aclFinalize();
  return 0;
}
