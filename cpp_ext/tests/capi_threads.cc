// The C API from many threads at once, and with the argument "fork" from a child of fork. Prints what went wrong.

#ifndef _WIN32
#include <sys/wait.h>
#include <unistd.h>
#endif

#include <atomic>
#include <cstdio>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "acl/acl.h"
#include "aclnnop/aclnn_mse_loss_backward.h"

namespace {

std::atomic<int> failures{0};

void Expect(bool holds, const char* what, int line) {
  if (holds) return;
  std::printf("line %d: %s\n    the last error is: %s\n", line, what, aclGetRecentErrMsg());
  ++failures;
}

#define EXPECT(condition) Expect((condition), #condition, __LINE__)

constexpr int64_t kRows = 200;
constexpr int64_t kColumns = 200;

// Tensors of one size, self and target apart by a number, so that the gradient is known.
struct Problem {
  explicit Problem(float difference_) : difference(difference_) {
    const std::vector<float> grad(kRows * kColumns, 3);
    const std::vector<float> self(kRows * kColumns, 10 + difference);
    const std::vector<float> target(kRows * kColumns, 10);
    const std::vector<float>* const values[] = {&grad, &self, &target, &grad};
    const int64_t dims[] = {kRows, kColumns};
    const int64_t strides[] = {1, kRows};  // so that both phases have more to do
    const size_t bytes = grad.size() * sizeof(float);
    for (int i = 0; i < 4; ++i) {
      EXPECT(aclrtMalloc(&memory[i], bytes, ACL_MEM_MALLOC_HUGE_FIRST) == ACL_SUCCESS);
      EXPECT(aclrtMemcpy(memory[i], bytes, values[i]->data(), bytes, ACL_MEMCPY_HOST_TO_DEVICE) == ACL_SUCCESS);
      tensors[i] = aclCreateTensor(dims, 2, ACL_FLOAT, strides, 0, ACL_FORMAT_ND, dims, 2, memory[i]);
    }
    Plan();
    EXPECT(aclrtMalloc(&workspace, workspace_size, ACL_MEM_MALLOC_HUGE_FIRST) == ACL_SUCCESS);
  }
  ~Problem() {
    for (int i = 0; i < 4; ++i) {
      EXPECT(aclDestroyTensor(tensors[i]) == ACL_SUCCESS);
      EXPECT(aclrtFree(memory[i]) == ACL_SUCCESS);
    }
    EXPECT(aclrtFree(workspace) == ACL_SUCCESS);
  }

  void Plan() {
    EXPECT(aclnnMseLossBackwardGetWorkspaceSize(tensors[0], tensors[1], tensors[2], 0, tensors[3], &workspace_size,
                                                &executor) == ACL_SUCCESS);
  }
  aclnnStatus Start(aclrtStream stream) { return aclnnMseLossBackward(workspace, workspace_size, executor, stream); }
  void ExpectResult() {
    std::vector<float> result(kRows * kColumns);
    const size_t bytes = result.size() * sizeof(float);
    EXPECT(aclrtMemcpy(result.data(), bytes, memory[3], bytes, ACL_MEMCPY_DEVICE_TO_HOST) == ACL_SUCCESS);
    EXPECT(result == std::vector<float>(kRows * kColumns, 2 * 3 * difference));
  }

  float difference;
  void* memory[4] = {};
  aclTensor* tensors[4] = {};
  uint64_t workspace_size = 0;
  aclOpExecutor* executor = nullptr;
  void* workspace = nullptr;
};

void WorkAlone(int thread) {
  aclrtStream stream = nullptr;
  EXPECT(aclrtSetDevice(0) == ACL_SUCCESS);
  EXPECT(aclrtCreateStream(&stream) == ACL_SUCCESS);
  {
    Problem problem(static_cast<float>(thread));
    for (int round = 0; round < 4; ++round) {
      if (round > 0) problem.Plan();
      EXPECT(problem.Start(round % 2 == 0 ? stream : nullptr) == ACL_SUCCESS);
      // Each thread has its own last error.
      const int64_t negative = -1 - thread;
      EXPECT(aclCreateTensor(&negative, 1, ACL_FLOAT, &negative, 0, ACL_FORMAT_ND, &negative, 1, nullptr) == nullptr);
      EXPECT(std::string(aclGetRecentErrMsg()).find("is " + std::to_string(negative)) != std::string::npos);
      EXPECT(aclrtSynchronizeStream(stream) == ACL_SUCCESS);
      problem.ExpectResult();
    }
  }
  EXPECT(aclrtDestroyStream(stream) == ACL_SUCCESS);
}

template <class Body>
void InThreads(int count, const Body& body) {
  std::vector<std::thread> threads;
  for (int thread = 0; thread < count; ++thread) threads.emplace_back([&, thread] { body(thread); });
  for (std::thread& thread : threads) thread.join();
}

// Of all who run one executor, one does. Streams can be shared, and destroyed while they have work.
void ShareOne() {
  aclrtStream stream = nullptr;
  EXPECT(aclrtCreateStream(&stream) == ACL_SUCCESS);
  Problem problem(5);
  std::atomic<int> started{0};
  InThreads(4, [&](int) {
    if (problem.Start(stream) == ACL_SUCCESS) ++started;
    EXPECT(aclrtSynchronizeStream(stream) == ACL_SUCCESS);
  });
  EXPECT(started == 1);
  problem.Plan();
  EXPECT(problem.Start(stream) == ACL_SUCCESS);
  EXPECT(aclrtDestroyStream(stream) == ACL_SUCCESS);
  problem.ExpectResult();
}

// Of all who destroy one tensor or array, one does; who plans with it meanwhile finds all of it, or nothing.
void ShareHandles() {
  constexpr int kThreads = 8;
  constexpr int kRounds = 200;
  const int64_t one = 1;
  float number = 1;
  const auto create = [&] { return aclCreateTensor(&one, 1, ACL_FLOAT, &one, 0, ACL_FORMAT_ND, &one, 1, &number); };
  const aclTensor* const kept = create();
  aclTensor* shared[kRounds];
  aclIntArray* arrays[kRounds];
  for (int round = 0; round < kRounds; ++round) {
    shared[round] = create();
    arrays[round] = aclCreateIntArray(&one, 1);
  }
  std::atomic<int> destroyed{0};
  std::atomic<int> destroyed_arrays{0};
  InThreads(kThreads, [&](int thread) {
    for (int round = 0; round < kRounds; ++round) {
      aclTensor* const own = create();
      if ((round + thread) % 2 == 0) {
        uint64_t size = 0;
        aclOpExecutor* executor = nullptr;
        const aclnnStatus status =
            aclnnMseLossBackwardGetWorkspaceSize(kept, shared[round], kept, 0, own, &size, &executor);
        EXPECT(status == ACL_SUCCESS || status == ACLNN_ERR_PARAM_INVALID);
      }
      if (aclDestroyTensor(shared[round]) == ACL_SUCCESS) ++destroyed;
      if (aclDestroyIntArray(arrays[round]) == ACL_SUCCESS) ++destroyed_arrays;
      EXPECT(aclDestroyTensor(own) == ACL_SUCCESS);
      EXPECT(aclDestroyTensor(own) == ACLNN_ERR_PARAM_INVALID);
    }
  });
  EXPECT(destroyed == kRounds);
  EXPECT(destroyed_arrays == kRounds);
  EXPECT(aclDestroyTensor(kept) == ACL_SUCCESS);
}

// Rows of an output that share their memory are not written by several threads at once.
void ShareRows() {
  Problem problem(2);
  const int64_t dims[] = {kRows, kColumns};
  const int64_t strides[] = {0, 1};
  EXPECT(aclDestroyTensor(problem.tensors[3]) == ACL_SUCCESS);
  problem.tensors[3] = aclCreateTensor(dims, 2, ACL_FLOAT, strides, 0, ACL_FORMAT_ND, dims + 1, 1, problem.memory[3]);
  for (int round = 0; round < 20; ++round) {  // until a thread of the pool has been quick enough to help
    problem.Plan();
    EXPECT(problem.Start(nullptr) == ACL_SUCCESS);
  }
  std::vector<float> row(kColumns);
  const size_t bytes = row.size() * sizeof(float);
  EXPECT(aclrtMemcpy(row.data(), bytes, problem.memory[3], bytes, ACL_MEMCPY_DEVICE_TO_HOST) == ACL_SUCCESS);
  EXPECT(row == std::vector<float>(kColumns, 2 * 3 * 2));
}

#ifdef _WIN32
void Fork() {}  // which Windows has not
#else
// Children of a process with threads, streams and a plan have what they need.
void Fork() {
  aclrtStream stream = nullptr;
  EXPECT(aclrtCreateStream(&stream) == ACL_SUCCESS);
  Problem problem(1);
  EXPECT(problem.Start(stream) == ACL_SUCCESS);
  EXPECT(aclrtSynchronizeStream(stream) == ACL_SUCCESS);
  problem.Plan();
  const pid_t child = fork();
  if (child == 0) {
    EXPECT(problem.Start(stream) == ACLNN_ERR_PARAM_INVALID);
    EXPECT(std::strstr(aclGetRecentErrMsg(), "the process that forked") != nullptr);
    EXPECT(aclrtSynchronizeStream(stream) == ACL_ERROR_INVALID_PARAM);
    EXPECT(aclrtDestroyStream(stream) == ACL_SUCCESS);
    EXPECT(problem.Start(nullptr) == ACL_SUCCESS);
    problem.ExpectResult();
    InThreads(2, WorkAlone);
    std::fflush(stdout);
    _exit(failures);
  }
  EXPECT(problem.Start(stream) == ACL_SUCCESS);
  EXPECT(aclrtDestroyStream(stream) == ACL_SUCCESS);
  problem.ExpectResult();
  int status = -1;
  EXPECT(waitpid(child, &status, 0) == child);
  EXPECT(status == 0);
}
#endif

}  // namespace

int main(int argc, char** argv) {
  EXPECT(aclInit(nullptr) == ACL_SUCCESS);
  if (argc > 1 && std::strcmp(argv[1], "fork") == 0) {
    Fork();
  } else {
    InThreads(8, WorkAlone);
    ShareOne();
    ShareHandles();
    ShareRows();
  }
  EXPECT(aclFinalize() == ACL_SUCCESS);
  std::printf("%d failures\n", failures.load());
  return failures == 0 ? 0 : 1;
}
