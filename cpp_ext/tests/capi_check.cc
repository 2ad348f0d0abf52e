// Asks of the C API what needs no other oracle than itself, on whatever device there is: mistakes are errors, views of
// any strides give what dense tensors give, runs do not depend on what is destroyed before them. Prints the results of
// all operators, and what went wrong. Tests run it with sanitizers, in valgrind and with several numbers of threads.

#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "acl/acl.h"
#include "aclnnop/aclnn_cross_entropy_loss_grad.h"
#include "aclnnop/aclnn_ctc_loss.h"
#include "aclnnop/aclnn_grouped_bias_add_grad.h"
#include "aclnnop/aclnn_mse_loss_backward.h"
#include "capi_ops.inc"  // by device/capi_ops.py

namespace {

int failures = 0;

void Expect(bool holds, const char* what, int line) {
  if (holds) return;
  std::printf("line %d: %s\n    the last error is: %s\n", line, what, aclGetRecentErrMsg());
  ++failures;
}

#define EXPECT(condition) Expect((condition), #condition, __LINE__)
#define EXPECT_ERROR(call, code, text)                            \
  do {                                                            \
    EXPECT((call) == (code));                                     \
    EXPECT(std::strstr(aclGetRecentErrMsg(), (text)) != nullptr); \
  } while (false)

constexpr int kNull = ACLNN_ERR_PARAM_NULLPTR;
constexpr int kInvalid = ACLNN_ERR_PARAM_INVALID;

bool OnCpu() {
  const char* device = std::getenv("GRADFUSE_DEVICE");
  return device == nullptr || std::strcmp(device, "cpu") == 0;
}

using Dims = std::vector<int64_t>;

int64_t Count(const Dims& dims) {
  int64_t count = 1;
  for (const int64_t dim : dims) count *= dim;
  return count;
}

// Numbers that look random, in [0, 1).
std::vector<double> Numbers(int64_t count, uint32_t seed) {
  std::vector<double> numbers;
  for (int64_t i = 0; i < count; ++i) {
    seed = seed * 1664525 + 1013904223;
    numbers.push_back(static_cast<double>(seed >> 8) / (1 << 24));
  }
  return numbers;
}

// A tensor in device memory of its own: dense, or with its dimensions in reverse order and gaps between the elements.
class Placed {
 public:
  Placed(aclDataType type, const Dims& dims, const std::vector<double>& values, bool dense)
      : type_(type), dims_(dims), strides_(dims.size()), offset_(dense ? 0 : 3) {
    int64_t stride = dense ? 1 : 2;
    for (size_t i = 0; i < dims.size(); ++i) {
      const size_t axis = dense ? dims.size() - 1 - i : i;
      strides_[axis] = stride;
      stride *= dims[axis];
    }
    // Of a tensor without elements there is memory, too.
    storage_ = std::max<int64_t>(offset_ + stride, 1);
    host_.assign(static_cast<size_t>(storage_) * Size(), 0x5a);
    for (int64_t i = 0; i < Count(dims); ++i) Put(At(i), values.empty() ? -7 : values[static_cast<size_t>(i)]);
    EXPECT(aclrtMalloc(&memory_, host_.size(), ACL_MEM_MALLOC_HUGE_FIRST) == ACL_SUCCESS);
    EXPECT(aclrtMemcpy(memory_, host_.size(), host_.data(), host_.size(), ACL_MEMCPY_HOST_TO_DEVICE) == ACL_SUCCESS);
    tensor_ =
        aclCreateTensor(dims.data(), dims.size(), type, strides_.data(), offset_, ACL_FORMAT_ND, &storage_, 1, memory_);
    EXPECT(tensor_ != nullptr);
  }
  ~Placed() {
    Destroy();
    EXPECT(aclrtFree(memory_) == ACL_SUCCESS);
  }
  Placed(const Placed&) = delete;
  Placed& operator=(const Placed&) = delete;

  aclTensor* tensor() const { return tensor_; }
  void* memory() const { return memory_; }

  void Destroy() {
    if (tensor_ != nullptr) EXPECT(aclDestroyTensor(tensor_) == ACL_SUCCESS);
    tensor_ = nullptr;
  }

  // The values of a tensor of float or bfloat16; what lies between them must not have changed.
  std::vector<float> Read() const {
    std::vector<char> now(host_.size());
    EXPECT(aclrtMemcpy(now.data(), now.size(), memory_, now.size(), ACL_MEMCPY_DEVICE_TO_HOST) == ACL_SUCCESS);
    std::vector<float> values(static_cast<size_t>(Count(dims_)));
    std::vector<char> gaps = now;
    for (size_t i = 0; i < values.size(); ++i) {
      const size_t at = static_cast<size_t>(At(static_cast<int64_t>(i))) * Size();
      // A bfloat16 is the upper half of a float.
      std::memcpy(reinterpret_cast<char*>(&values[i]) + sizeof(float) - Size(), &now[at], Size());
      std::memcpy(&gaps[at], &host_[at], Size());
    }
    EXPECT(gaps == host_);
    return values;
  }

 private:
  size_t Size() const {
    switch (type_) {
      case ACL_BOOL:
      case ACL_UINT8: return 1;
      case ACL_BF16: return 2;
      case ACL_FLOAT:
      case ACL_INT32: return 4;
      default: return 8;
    }
  }
  int64_t At(int64_t index) const {
    int64_t at = offset_;
    for (size_t axis = dims_.size(); axis-- > 0;) {
      at += index % dims_[axis] * strides_[axis];
      index /= dims_[axis];
    }
    return at;
  }
  void Put(int64_t at, double value) {
    char* place = host_.data() + static_cast<size_t>(at) * Size();
    const auto number = static_cast<float>(value);
    const auto narrow = static_cast<int32_t>(value);
    const auto wide = static_cast<int64_t>(value);
    switch (type_) {
      case ACL_BOOL: *place = value > 0.5; break;
      case ACL_UINT8: *place = static_cast<char>(static_cast<uint8_t>(value)); break;
      case ACL_FLOAT: std::memcpy(place, &number, sizeof number); break;
      case ACL_BF16: std::memcpy(place, reinterpret_cast<const char*>(&number) + 2, 2); break;
      case ACL_INT32: std::memcpy(place, &narrow, sizeof narrow); break;
      default: std::memcpy(place, &wide, sizeof wide); break;
    }
  }

  aclDataType type_;
  Dims dims_;
  Dims strides_;
  int64_t offset_;
  int64_t storage_;
  std::vector<char> host_;
  void* memory_ = nullptr;
  aclTensor* tensor_ = nullptr;
};

class IntArray {
 public:
  explicit IntArray(const Dims& values) : array_(aclCreateIntArray(values.data(), values.size())) {}
  ~IntArray() { EXPECT(aclDestroyIntArray(array_) == ACL_SUCCESS); }
  IntArray(const IntArray&) = delete;
  IntArray& operator=(const IntArray&) = delete;
  const aclIntArray* array() const { return array_; }

 private:
  aclIntArray* array_;
};

class Workspace {
 public:
  explicit Workspace(uint64_t size) {
    if (size > 0) EXPECT(aclrtMalloc(&memory_, size, ACL_MEM_MALLOC_HUGE_FIRST) == ACL_SUCCESS);
  }
  ~Workspace() {
    if (memory_ != nullptr) EXPECT(aclrtFree(memory_) == ACL_SUCCESS);
  }
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;
  void* memory() const { return memory_; }

 private:
  void* memory_ = nullptr;
};

struct Planned {
  uint64_t workspace_size = 0;
  aclOpExecutor* executor = nullptr;
};

using SecondPhase = aclnnStatus (*)(void*, uint64_t, aclOpExecutor*, aclrtStream);

// An input of an op, with the place of its values in CAPI_OPS_VALUES, or an output.
struct Operand {
  aclDataType type;
  Dims dims;
  int64_t first_value = -1;
};

// An op with its inputs and outputs: plans it with tensors of some layout.
struct Op {
  const char* name;
  std::vector<Operand> tensors;  // inputs, then outputs
  std::function<aclnnStatus(const std::vector<std::unique_ptr<Placed>>&, Planned&)> first_phase;
  SecondPhase second_phase;
  std::vector<std::vector<double>> values;  // of the inputs

  std::vector<std::unique_ptr<Placed>> Place(bool dense) const {
    std::vector<std::unique_ptr<Placed>> placed;
    for (size_t i = 0; i < tensors.size(); ++i) {
      placed.push_back(std::make_unique<Placed>(tensors[i].type, tensors[i].dims,
                                                i < values.size() ? values[i] : std::vector<double>(), dense));
    }
    return placed;
  }
};

// Every op, with the values that were written for it.
std::vector<Op> AllOps() {
  std::vector<Op> ops{CAPI_OPS};
  std::FILE* const file = std::fopen(CAPI_OPS_VALUES, "rb");
  EXPECT(file != nullptr);
  for (Op& op : ops) {
    for (const Operand& operand : op.tensors) {
      if (operand.first_value < 0) continue;
      std::vector<double> values(static_cast<size_t>(Count(operand.dims)));
      EXPECT(std::fseek(file, static_cast<long>(operand.first_value) * static_cast<long>(sizeof(double)), SEEK_SET) ==
             0);
      EXPECT(std::fread(values.data(), sizeof(double), values.size(), file) == values.size());
      op.values.push_back(values);
    }
  }
  std::fclose(file);
  return ops;
}

Op Mse() {
  const Dims whole{200, 200};
  return {"MseLossBackward",
          {{ACL_FLOAT, whole}, {ACL_FLOAT, {200, 1}}, {ACL_FLOAT, {200}}, {ACL_FLOAT, whole}},
          [](const auto& t, Planned& p) {
            return aclnnMseLossBackwardGetWorkspaceSize(t[0]->tensor(), t[1]->tensor(), t[2]->tensor(), 0,
                                                        t[3]->tensor(), &p.workspace_size, &p.executor);
          },
          aclnnMseLossBackward,
          {Numbers(40000, 1), Numbers(200, 2), Numbers(200, 3)}};
}

Op CrossEntropy() {
  const Dims whole{200, 200};
  std::vector<double> classes;
  for (int row = 0; row < 200; ++row) classes.push_back(row % 7 == 0 ? -100 : row % 200);
  return {"CrossEntropyLossGrad",
          {{ACL_FLOAT, {}}, {ACL_FLOAT, whole}, {ACL_INT64, {200}}, {ACL_FLOAT, {200}}, {ACL_FLOAT, whole}},
          [](const auto& t, Planned& p) {
            char reduction[] = "mean";
            return aclnnCrossEntropyLossGradGetWorkspaceSize(t[0]->tensor(), t[1]->tensor(), t[2]->tensor(),
                                                             t[3]->tensor(), nullptr, nullptr, reduction, -100, 0.125,
                                                             0, t[4]->tensor(), &p.workspace_size, &p.executor);
          },
          aclnnCrossEntropyLossGrad,
          {{1}, Numbers(40000, 4), classes, Numbers(200, 5)}};
}

Op Ctc() {
  // Uniform log probabilities of 4 classes.
  const std::vector<double> log_probs(5 * 2 * 4, -1.3862943611);
  return {"CtcLoss",
          {{ACL_FLOAT, {5, 2, 4}}, {ACL_INT64, {2, 2}}, {ACL_FLOAT, {2}}, {ACL_FLOAT, {2, 5, 5}}},
          [](const auto& t, Planned& p) {
            const IntArray inputs({5, 4});
            const IntArray targets({2, 1});
            return aclnnCtcLossGetWorkspaceSize(t[0]->tensor(), t[1]->tensor(), inputs.array(), targets.array(), 0,
                                                false, t[2]->tensor(), t[3]->tensor(), &p.workspace_size, &p.executor);
          },
          aclnnCtcLoss,
          {log_probs, {1, 2, 3, 0}}};
}

// Runs an op, with its tensors destroyed before it runs; gives the values of its last output.
std::vector<float> Run(const Op& op, bool dense, aclrtStream stream) {
  const auto placed = op.Place(dense);
  Planned planned;
  EXPECT(op.first_phase(placed, planned) == ACL_SUCCESS);
  for (const auto& tensor : placed) tensor->Destroy();
  const Workspace workspace(planned.workspace_size);
  EXPECT(!OnCpu() || (planned.workspace_size > 0) == !dense);
  EXPECT(op.second_phase(workspace.memory(), planned.workspace_size, planned.executor, stream) == ACL_SUCCESS);
  EXPECT(aclrtSynchronizeStream(stream) == ACL_SUCCESS);
  return placed.back()->Read();
}

void CheckLayouts(aclrtStream stream) {
  std::vector<Op> ops = AllOps();
  for (const Op& op : {Mse(), CrossEntropy(), Ctc()}) ops.push_back(op);
  for (const Op& op : ops) {
    const std::vector<float> dense = Run(op, true, nullptr);
    EXPECT(std::memcmp(dense.data(), Run(op, false, stream).data(), dense.size() * sizeof(float)) == 0);
    uint64_t hash = 1469598103934665603u;
    for (const float value : dense) {
      uint32_t bits;
      std::memcpy(&bits, &value, sizeof bits);
      hash = (hash ^ bits) * 1099511628211u;
    }
    std::printf("%s: %.6g ... %.6g, %016" PRIx64 "\n", op.name, static_cast<double>(dense.front()),
                static_cast<double>(dense.back()), hash);
  }
}

void CheckExecutors(aclrtStream stream) {
  const Op mse = Mse();
  const auto placed = mse.Place(false);
  Planned planned;
  EXPECT(mse.first_phase(placed, planned) == ACL_SUCCESS);
  const uint64_t size = planned.workspace_size;
  aclOpExecutor* const executor = planned.executor;
  const Workspace workspace(size + 1);
  int something = 0;

  EXPECT_ERROR(aclnnMseLossBackward(workspace.memory(), size, nullptr, stream), kNull, "executor is a null pointer");
  EXPECT_ERROR(aclnnMseLossBackward(workspace.memory(), size, reinterpret_cast<aclOpExecutor*>(&something), stream),
               kInvalid, "executor is unknown or already used");
  EXPECT_ERROR(aclnnMseLossBackward(nullptr, size, executor, stream), kNull, "workspace is a null pointer");
  EXPECT_ERROR(aclnnMseLossBackward(workspace.memory(), size - 1, executor, stream), kInvalid, "workspaceSize is");
  EXPECT_ERROR(aclnnMseLossBackward(nullptr, 0, executor, stream), kInvalid, "workspaceSize is 0");
  EXPECT_ERROR(aclnnGroupedBiasAddGrad(workspace.memory(), size, executor, stream), kInvalid,
               "executor is one of MseLossBackward");
  // What was refused can still run, in memory that begins anywhere.
  char* const odd = static_cast<char*>(workspace.memory()) + 1;
  EXPECT(aclnnMseLossBackward(odd, size, executor, stream) == ACL_SUCCESS);
  EXPECT_ERROR(aclnnMseLossBackward(odd, size, executor, stream), kInvalid, "already used");
  EXPECT(aclrtSynchronizeStream(stream) == ACL_SUCCESS);
  EXPECT_ERROR(aclnnMseLossBackward(odd, size, executor, stream), kInvalid, "already used");

  // Those that nobody runs are given up by aclFinalize.
  EXPECT(mse.first_phase(placed, planned) == ACL_SUCCESS);
  EXPECT(aclFinalize() == ACL_SUCCESS);
  EXPECT_ERROR(aclnnMseLossBackward(odd, size, planned.executor, stream), kInvalid, "executor is unknown");
  EXPECT_ERROR(aclFinalize(), ACL_ERROR_UNINITIALIZE, "without aclInit");
  EXPECT(aclInit(nullptr) == ACL_SUCCESS);
  EXPECT_ERROR(aclInit(nullptr), ACL_ERROR_REPEAT_INITIALIZE, "a second time");
}

// A handle whose object is gone, or of another kind, is refused wherever it is given, and nothing else is harmed.
void CheckHandles(aclrtStream stream) {
  const Op ctc = Ctc();
  const auto placed = ctc.Place(true);
  const int64_t lengths[] = {5, 4, 2, 1};
  const aclIntArray* const inputs = aclCreateIntArray(lengths, 2);
  const aclIntArray* const targets = aclCreateIntArray(lengths + 2, 2);
  const uint64_t untouched_size = 77;
  aclOpExecutor* const untouched = reinterpret_cast<aclOpExecutor*>(uintptr_t{77});
  const auto plan = [&](const aclTensor* log_probs, const aclIntArray* input_lengths, aclTensor* alpha) {
    Planned planned{untouched_size, untouched};
    const aclnnStatus status =
        aclnnCtcLossGetWorkspaceSize(log_probs, placed[1]->tensor(), input_lengths, targets, 0, false,
                                     placed[2]->tensor(), alpha, &planned.workspace_size, &planned.executor);
    EXPECT((status == ACL_SUCCESS) == (planned.executor != untouched));
    EXPECT(status == ACL_SUCCESS || planned.workspace_size == untouched_size);
    return status;
  };
  const aclTensor* const log_probs = placed[0]->tensor();
  aclTensor* const alpha = placed[3]->tensor();
  EXPECT(plan(log_probs, inputs, alpha) == ACL_SUCCESS);

  const int64_t one = 1;
  float number = 0;
  const auto create = [&] { return aclCreateTensor(&one, 1, ACL_FLOAT, &one, 0, ACL_FORMAT_ND, &one, 1, &number); };
  aclTensor* const gone = create();
  EXPECT(aclDestroyTensor(gone) == ACL_SUCCESS);
  aclIntArray* const gone_array = aclCreateIntArray(lengths, 2);
  EXPECT(aclDestroyIntArray(gone_array) == ACL_SUCCESS);
  aclTensor* const successor = create();
  aclIntArray* const successor_array = aclCreateIntArray(lengths, 2);
  Planned run;
  EXPECT(ctc.first_phase(placed, run) == ACL_SUCCESS);
  const Workspace workspace(run.workspace_size);
  EXPECT(ctc.second_phase(workspace.memory(), run.workspace_size, run.executor, stream) == ACL_SUCCESS);
  EXPECT(aclrtSynchronizeStream(stream) == ACL_SUCCESS);
  Planned other;
  EXPECT(ctc.first_phase(placed, other) == ACL_SUCCESS);

  char memory[256] = {};
  const void* const no_tensors[] = {gone,           gone_array, successor_array, inputs, run.executor,
                                    other.executor, memory,     memory + 1,      &gone,  reinterpret_cast<void*>(-1)};
  for (const void* handle : no_tensors) {
    const auto* const tensor = static_cast<const aclTensor*>(handle);
    EXPECT_ERROR(aclDestroyTensor(tensor), kInvalid,
                 "aclDestroyTensor: tensor is unknown or already destroyed; expected one of aclCreateTensor");
    EXPECT_ERROR(plan(tensor, inputs, alpha), kInvalid,
                 "log_probs is unknown or already destroyed; expected one of aclCreateTensor");
    EXPECT_ERROR(plan(log_probs, inputs, const_cast<aclTensor*>(tensor)), kInvalid,
                 "log_alpha is unknown or already destroyed");
  }
  const void* const no_arrays[] = {gone_array,     gone,   successor,  alpha, run.executor,
                                   other.executor, memory, memory + 1, &gone, reinterpret_cast<void*>(-1)};
  for (const void* handle : no_arrays) {
    const auto* const array = static_cast<const aclIntArray*>(handle);
    EXPECT_ERROR(aclDestroyIntArray(array), kInvalid,
                 "aclDestroyIntArray: array is unknown or already destroyed; expected one of aclCreateIntArray");
    EXPECT_ERROR(plan(log_probs, array, alpha), kInvalid,
                 "input_lengths is unknown or already destroyed; expected one of aclCreateIntArray");
  }
  for (const void* handle : {static_cast<const void*>(alpha), static_cast<const void*>(inputs)}) {
    auto* const executor = reinterpret_cast<aclOpExecutor*>(const_cast<void*>(handle));
    EXPECT_ERROR(aclnnCtcLoss(workspace.memory(), run.workspace_size, executor, stream), kInvalid,
                 "executor is unknown");
    if (OnCpu()) {
      EXPECT_ERROR(aclrtSynchronizeStream(const_cast<void*>(handle)), ACL_ERROR_INVALID_PARAM,
                   "stream is unknown or already destroyed");
      EXPECT_ERROR(aclrtDestroyStream(const_cast<void*>(handle)), ACL_ERROR_INVALID_PARAM,
                   "stream is unknown or already destroyed");
    }
  }
  // What is there stays so.
  EXPECT(aclnnCtcLoss(workspace.memory(), run.workspace_size, other.executor, stream) == ACL_SUCCESS);
  EXPECT(aclrtSynchronizeStream(stream) == ACL_SUCCESS);
  EXPECT(plan(log_probs, inputs, alpha) == ACL_SUCCESS);
  EXPECT(plan(log_probs, successor_array, alpha) == ACL_SUCCESS);
  EXPECT(aclDestroyTensor(successor) == ACL_SUCCESS);
  for (const aclIntArray* array : {inputs, targets, static_cast<const aclIntArray*>(successor_array)}) {
    EXPECT(aclDestroyIntArray(array) == ACL_SUCCESS);
    EXPECT_ERROR(aclDestroyIntArray(array), kInvalid, "already destroyed");
  }
}

// Tensors of 2^50 elements in the memory of one: copied before all shapes are found right, they would take 2^53 bytes.
void CheckShapesComeFirst() {
  const int64_t rows = int64_t{1} << 50;
  const int64_t few = 4;
  const int64_t zeros[] = {0, 0};
  const int64_t one = 1;
  int64_t element = 0;
  const auto create = [&](const Dims& dims, aclDataType type) {
    return aclCreateTensor(dims.data(), dims.size(), type, zeros, 0, ACL_FORMAT_ND, &one, 1, &element);
  };
  const auto refusal_of = [&](const Dims& log_prob, const Dims& target, const Dims& out, aclDataType out_type) {
    aclTensor* const tensors[] = {create({}, ACL_FLOAT), create(log_prob, ACL_FLOAT), create(target, ACL_INT64),
                                  create(out, out_type)};
    Planned planned;
    char reduction[] = "mean";
    EXPECT(aclnnCrossEntropyLossGradGetWorkspaceSize(tensors[0], tensors[1], tensors[2], nullptr, nullptr, nullptr,
                                                     reduction, -100, 0, 0, tensors[3], &planned.workspace_size,
                                                     &planned.executor) == kInvalid);
    for (const aclTensor* tensor : tensors) EXPECT(aclDestroyTensor(tensor) == ACL_SUCCESS);
    return std::string(aclGetRecentErrMsg());
  };
  const std::string name = "aclnnCrossEntropyLossGradGetWorkspaceSize: ";
  EXPECT(refusal_of({few, few}, {rows}, {few, few}, ACL_FLOAT) ==
         name + "target is int64(1125899906842624); expected int64(4), one class a row of log_prob");
  EXPECT(refusal_of({rows, few}, {rows}, {few, few}, ACL_FLOAT) ==
         name + "grad_input is float32(4,4); expected float32(1125899906842624,4)");
  EXPECT(refusal_of({rows, few}, {rows}, {rows, few}, ACL_FLOAT16) ==
         name + "grad_input is float16(1125899906842624,4); expected float32(1125899906842624,4)");
}

// Outputs in each other's memory: dense ones are refused, those between each other's elements hold their values.
void CheckOutputsThatMeet(aclrtStream stream) {
  const Op ctc = Ctc();
  const auto apart = ctc.Place(true);
  Planned planned;
  EXPECT(ctc.first_phase(apart, planned) == ACL_SUCCESS);
  const Workspace first(planned.workspace_size);
  EXPECT(ctc.second_phase(first.memory(), planned.workspace_size, planned.executor, stream) == ACL_SUCCESS);
  EXPECT(aclrtSynchronizeStream(stream) == ACL_SUCCESS);

  const Dims loss_dims{2};
  const Dims alpha_dims{2, 5, 5};
  const IntArray inputs({5, 4});
  const IntArray targets({2, 1});
  const Placed memory(ACL_FLOAT, {100}, std::vector<double>(100, -7), true);
  const int64_t room = 100;
  const auto plan = [&](const Dims& loss_strides, const Dims& alpha_strides, int64_t alpha_offset) {
    aclTensor* const loss = aclCreateTensor(loss_dims.data(), 1, ACL_FLOAT, loss_strides.data(), 0, ACL_FORMAT_ND,
                                            &room, 1, memory.memory());
    aclTensor* const alpha = aclCreateTensor(alpha_dims.data(), 3, ACL_FLOAT, alpha_strides.data(), alpha_offset,
                                             ACL_FORMAT_ND, &room, 1, memory.memory());
    const aclnnStatus status =
        aclnnCtcLossGetWorkspaceSize(apart[0]->tensor(), apart[1]->tensor(), inputs.array(), targets.array(), 0, false,
                                     loss, alpha, &planned.workspace_size, &planned.executor);
    EXPECT(aclDestroyTensor(loss) == ACL_SUCCESS);
    EXPECT(aclDestroyTensor(alpha) == ACL_SUCCESS);
    return status;
  };
  EXPECT_ERROR(plan({1}, {25, 5, 1}, 1), kInvalid,
               "log_alpha is in the memory of neg_log_likelihood; expected memory of its own");
  EXPECT(plan({1}, {25, 5, 1}, 2) == ACL_SUCCESS);
  EXPECT(plan({2}, {50, 10, 2}, 1) == ACL_SUCCESS);
  const Workspace second(planned.workspace_size);
  EXPECT(aclnnCtcLoss(second.memory(), planned.workspace_size, planned.executor, stream) == ACL_SUCCESS);
  EXPECT(aclrtSynchronizeStream(stream) == ACL_SUCCESS);
  const std::vector<float> loss = apart[2]->Read();
  const std::vector<float> alpha = apart[3]->Read();
  std::vector<float> expected(100, -7);
  for (size_t i = 0; i < loss.size(); ++i) expected[2 * i] = loss[i];
  for (size_t i = 0; i < alpha.size(); ++i) expected[2 * i + 1] = alpha[i];
  std::vector<float> values(100);
  EXPECT(aclrtMemcpy(values.data(), 400, memory.memory(), 400, ACL_MEMCPY_DEVICE_TO_HOST) == ACL_SUCCESS);
  EXPECT(std::memcmp(values.data(), expected.data(), 400) == 0);
}

// Values that become bad after they were planned with, on a stream: an error when the host waits, once.
void CheckValuesThatChange(aclrtStream stream) {
  const Op op = CrossEntropy();
  const auto placed = op.Place(true);
  Planned planned;
  EXPECT(op.first_phase(placed, planned) == ACL_SUCCESS);
  const int64_t bad = 200;
  EXPECT(aclrtMemcpy(placed[2]->memory(), sizeof bad, &bad, sizeof bad, ACL_MEMCPY_HOST_TO_DEVICE) == ACL_SUCCESS);
  const Workspace workspace(planned.workspace_size);
  EXPECT(op.second_phase(workspace.memory(), planned.workspace_size, planned.executor, stream) == ACL_SUCCESS);
  EXPECT_ERROR(aclrtSynchronizeStream(stream), kInvalid, OnCpu() ? "target[0] is 200" : "target is out of range");
  EXPECT(aclrtSynchronizeStream(stream) == ACL_SUCCESS);
  if (OnCpu()) {
    EXPECT(placed[4]->Read() == std::vector<float>(40000, -7.f));  // nothing is written
    EXPECT_ERROR(op.first_phase(placed, planned), kInvalid, "target[0] is 200");
  }
}

void CheckMemory() {
  char host[64] = {};
  void* memory = nullptr;
  EXPECT_ERROR(aclrtMalloc(nullptr, 1, ACL_MEM_MALLOC_HUGE_FIRST), ACL_ERROR_INVALID_PARAM, "devPtr is a null pointer");
  EXPECT_ERROR(aclrtMalloc(&memory, 0, ACL_MEM_MALLOC_HUGE_FIRST), ACL_ERROR_INVALID_PARAM, "size is 0");
  EXPECT_ERROR(aclrtFree(nullptr), ACL_ERROR_INVALID_PARAM, "devPtr is a null pointer");
  EXPECT(aclrtMalloc(&memory, 32, ACL_MEM_MALLOC_NORMAL_ONLY) == ACL_SUCCESS);
  EXPECT(reinterpret_cast<uintptr_t>(memory) % 256 == 0);
  EXPECT(aclrtMemcpy(memory, 32, host, 32, ACL_MEMCPY_HOST_TO_DEVICE) == ACL_SUCCESS);
  EXPECT(aclrtMemcpy(nullptr, 0, nullptr, 0, ACL_MEMCPY_HOST_TO_DEVICE) == ACL_SUCCESS);
  EXPECT_ERROR(aclrtMemcpy(memory, 31, host, 32, ACL_MEMCPY_HOST_TO_DEVICE), ACL_ERROR_INVALID_PARAM,
               "at most destMax");
  EXPECT_ERROR(aclrtMemcpy(memory, 32, nullptr, 32, ACL_MEMCPY_HOST_TO_DEVICE), ACL_ERROR_INVALID_PARAM,
               "src is a null");
  EXPECT_ERROR(aclrtMemcpy(nullptr, 32, host, 32, ACL_MEMCPY_HOST_TO_DEVICE), ACL_ERROR_INVALID_PARAM, "dst is a null");
  if (OnCpu()) {
    char* const inside = static_cast<char*>(memory) + 8;
    EXPECT_ERROR(aclrtFree(inside), ACL_ERROR_INVALID_PARAM, "no memory of aclrtMalloc");
    EXPECT(aclrtMemcpy(inside, 24, host, 24, ACL_MEMCPY_HOST_TO_DEVICE) == ACL_SUCCESS);
    EXPECT_ERROR(aclrtMemcpy(inside, 64, host, 25, ACL_MEMCPY_HOST_TO_DEVICE), ACL_ERROR_INVALID_PARAM, "the 24 bytes");
    EXPECT_ERROR(aclrtMemcpy(host, 64, inside, 25, ACL_MEMCPY_DEVICE_TO_HOST), ACL_ERROR_INVALID_PARAM, "the 24 bytes");
    EXPECT_ERROR(aclrtMemcpy(host, 64, host, 8, ACL_MEMCPY_DEVICE_TO_HOST), ACL_ERROR_INVALID_PARAM,
                 "src is no memory");
    EXPECT_ERROR(aclrtMemcpy(host, 64, memory, 8, ACL_MEMCPY_HOST_TO_DEVICE), ACL_ERROR_INVALID_PARAM,
                 "dst is no memory");
    EXPECT(aclrtMemcpy(host, 64, host + 8, 8, ACL_MEMCPY_HOST_TO_HOST) == ACL_SUCCESS);
    EXPECT_ERROR(aclrtSetDevice(1), ACL_ERROR_INVALID_PARAM, "deviceId is 1; expected 0");
    EXPECT_ERROR(aclrtSynchronizeStream(host), ACL_ERROR_INVALID_PARAM, "stream is unknown or already destroyed");
  }
  EXPECT(aclrtFree(memory) == ACL_SUCCESS);
  if (OnCpu()) EXPECT_ERROR(aclrtFree(memory), ACL_ERROR_INVALID_PARAM, "freed before");
  EXPECT(aclDestroyTensor(nullptr) == ACL_SUCCESS);
  EXPECT(aclDestroyIntArray(nullptr) == ACL_SUCCESS);
}

// Runs follow each other in order: each reads what the one before it has written.
void CheckOrder(aclrtStream stream) {
  const Dims dims{1000};
  const Placed factor(ACL_FLOAT, dims, std::vector<double>(1000, 1), true);
  const Placed zero(ACL_FLOAT, dims, std::vector<double>(1000, 0), true);
  const Placed value(ACL_FLOAT, dims, std::vector<double>(1000, 1), true);
  std::vector<std::unique_ptr<Workspace>> workspaces;
  for (int step = 0; step < 20; ++step) {
    Planned planned;
    EXPECT(aclnnMseLossBackwardGetWorkspaceSize(factor.tensor(), value.tensor(), zero.tensor(), 0, value.tensor(),
                                                &planned.workspace_size, &planned.executor) == ACL_SUCCESS);
    workspaces.push_back(std::make_unique<Workspace>(planned.workspace_size));
    EXPECT(aclnnMseLossBackward(workspaces.back()->memory(), planned.workspace_size, planned.executor, stream) ==
           ACL_SUCCESS);
  }
  EXPECT(aclrtSynchronizeStream(stream) == ACL_SUCCESS);
  EXPECT(value.Read() == std::vector<float>(1000, 1 << 20));
}

}  // namespace

int main() {
  EXPECT(std::strcmp(aclGetRecentErrMsg(), "") == 0);
  EXPECT(aclInit(nullptr) == ACL_SUCCESS);
  EXPECT(aclrtSetDevice(0) == ACL_SUCCESS);
  aclrtStream stream = nullptr;
  EXPECT_ERROR(aclrtCreateStream(nullptr), ACL_ERROR_INVALID_PARAM, "stream is a null pointer");
  EXPECT(aclrtCreateStream(&stream) == ACL_SUCCESS);
  CheckLayouts(stream);
  CheckExecutors(stream);
  CheckHandles(stream);
  CheckShapesComeFirst();
  CheckOutputsThatMeet(stream);
  CheckValuesThatChange(stream);
  CheckMemory();
  CheckOrder(stream);
  EXPECT(aclrtDestroyStream(stream) == ACL_SUCCESS);
  if (OnCpu()) EXPECT_ERROR(aclrtDestroyStream(stream), ACL_ERROR_INVALID_PARAM, "already destroyed");
  EXPECT(aclrtResetDevice(0) == ACL_SUCCESS);
  EXPECT(aclFinalize() == ACL_SUCCESS);
  std::printf("%d failures\n", failures);
  return failures == 0 ? 0 : 1;
}
