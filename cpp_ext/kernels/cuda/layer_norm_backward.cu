#include "gradfuse/ops/layer_norm_backward.h"
#include "kernels/cuda/device.cuh"
#include "kernels/layer_norm.h"

namespace gradfuse::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kAddedTogether = 64;  // terms that a thread adds up before they are in double
constexpr int kRowsPerBlock = 64;   // that a thread adds up for weight and bias

template <class T>
struct Params {
  using Real = ComputeType<T>;

  const T* grad_output;
  const T* input;
  const T* weight;   // or null
  const Real* mean;  // or null
  const Real* rstd;
  T* grad_input;  // these three: or null
  T* grad_weight;
  T* grad_bias;
  int64_t rows;
  int64_t size;
  int64_t blocks;  // of rows
  Divisor by_size;
  // Workspace: (blocks, size) each.
  Real* weight_sums;
  Real* bias_sums;
};

// A block of threads has a row.
template <class T>
__global__ void __launch_bounds__(kThreads) OfInput(const __grid_constant__ Params<T> params) {
  using Real = ComputeType<T>;
  for (int64_t row = blockIdx.x; row < params.rows; row += gridDim.x) {
    const T* grad_output = params.grad_output + row * params.size;
    const T* input = params.input + row * params.size;
    const Real mean = params.mean != nullptr ? params.mean[row] : Real{0};
    double grads = 0;
    double products = 0;
    for (int64_t begin = threadIdx.x; begin < params.size; begin += kAddedTogether * kThreads) {
      Real grad_sum = 0;
      Real product_sum = 0;
      for (int turn = 0; turn < kAddedTogether; ++turn) {
        const int64_t i = begin + turn * kThreads;
        if (i >= params.size) break;
        const Real weight = params.weight != nullptr ? Widen(params.weight[i]) : Real{1};
        const Real grad = weight * Widen(grad_output[i]);
        grad_sum += grad;
        product_sum += grad * (Widen(input[i]) - mean);
      }
      grads += grad_sum;
      products += product_sum;
    }
    grads = SumOverBlock<kThreads>(grads);
    products = SumOverBlock<kThreads>(products);
    const Real scale = params.rstd[row];
    const double rstd = scale;
    const auto count = static_cast<double>(params.size);
    const auto slope = static_cast<Real>(-rstd * rstd * rstd * (products / count));
    const auto offset = params.mean != nullptr ? static_cast<Real>(-rstd * (grads / count)) : Real{0};
    for (int64_t i = threadIdx.x; i < params.size; i += kThreads) {
      const Real weight = params.weight != nullptr ? Widen(params.weight[i]) : Real{1};
      const Real rest = slope * (Widen(input[i]) - mean) + offset;
      params.grad_input[row * params.size + i] = Narrow<T>(scale * (weight * Widen(grad_output[i])) + rest);
    }
  }
}

// A thread has a column of a block of rows.
template <class T>
__global__ void __launch_bounds__(kThreads) AddRows(const __grid_constant__ Params<T> params) {
  using Real = ComputeType<T>;
  const int64_t total = params.blocks * params.size;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t index = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; index < total; index += stride) {
    int64_t block;
    int64_t column;
    params.by_size.Divide(index, block, column);
    Real of_weight = 0;
    Real of_bias = 0;
    for (int turn = 0; turn < kRowsPerBlock; ++turn) {
      const int64_t row = block * kRowsPerBlock + turn;
      if (row >= params.rows) break;
      const Real grad = Widen(params.grad_output[row * params.size + column]);
      const Real mean = params.mean != nullptr ? params.mean[row] : Real{0};
      of_weight += grad * ((Widen(params.input[row * params.size + column]) - mean) * params.rstd[row]);
      of_bias += grad;
    }
    params.weight_sums[index] = of_weight;
    params.bias_sums[index] = of_bias;
  }
}

// A thread has a column of all blocks.
template <class T>
__global__ void __launch_bounds__(kThreads) AddBlocks(const __grid_constant__ Params<T> params) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t column = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; column < params.size;
       column += stride) {
    double of_weight = 0;
    double of_bias = 0;
    for (int64_t block = 0; block < params.blocks; ++block) {
      of_weight += params.weight_sums[block * params.size + column];
      of_bias += params.bias_sums[block * params.size + column];
    }
    if (params.grad_weight != nullptr) params.grad_weight[column] = Narrow<T>(static_cast<ComputeType<T>>(of_weight));
    if (params.grad_bias != nullptr) params.grad_bias[column] = Narrow<T>(static_cast<ComputeType<T>>(of_bias));
  }
}

bool WantsSums(const LayerNormBackwardArgs& args) { return args.output_mask[1] != 0 || args.output_mask[2] != 0; }

template <class T>
Params<T> ParamsOf(const LayerNormBackwardArgs& args, Workspace& workspace) {
  using Real = ComputeType<T>;
  const NormalizedRows rows(args.input.shape, args.axis);
  Params<T> params{};
  params.rows = rows.count;
  params.size = rows.size;
  params.blocks = CeilDiv(rows.count, kRowsPerBlock);
  params.grad_output = args.grad_output.Data<T>();
  params.input = args.input.Data<T>();
  params.weight = args.weight ? args.weight->Data<T>() : nullptr;
  params.mean = args.mean ? args.mean->Data<Real>() : nullptr;
  params.rstd = args.rstd.Data<Real>();
  params.grad_input = args.output_mask[0] != 0 ? args.grad_input.MutableData<T>() : nullptr;
  params.grad_weight = args.output_mask[1] != 0 ? args.grad_weight.MutableData<T>() : nullptr;
  params.grad_bias = args.output_mask[2] != 0 ? args.grad_bias.MutableData<T>() : nullptr;
  if (params.size > 0) params.by_size = Divisor(params.size);
  if (WantsSums(args)) {
    params.weight_sums = workspace.Array<Real>(params.blocks * params.size);
    params.bias_sums = workspace.Array<Real>(params.blocks * params.size);
  }
  return params;
}

template <class T>
Status RunTyped(const LayerNormBackwardArgs& args, const Queue& queue) {
  Workspace workspace(queue.workspace);
  const Params<T> params = ParamsOf<T>(args, workspace);
  if (params.size == 0) return {};
  // First, as the gradient of the input may be written over grad_output.
  if (WantsSums(args)) {
    const int64_t threads = params.blocks * params.size;
    GRADFUSE_RETURN_IF_ERROR(Launch(queue, AddRows<T>, CeilDiv(threads, kThreads), kThreads, params));
    GRADFUSE_RETURN_IF_ERROR(Launch(queue, AddBlocks<T>, CeilDiv(params.size, kThreads), kThreads, params));
  }
  if (params.grad_input == nullptr) return {};
  return Launch(queue, OfInput<T>, params.rows, kThreads, params);
}

}  // namespace

int64_t WorkspaceBytes(const LayerNormBackwardArgs& args) {
  Workspace workspace(nullptr);
  WithFloatType(args.input.dtype, [&](auto type) { ParamsOf<decltype(type)>(args, workspace); });
  return workspace.bytes();
}

Status Run(const LayerNormBackwardArgs& args, const Queue& queue) {
  return WithFloatType(args.input.dtype, [&](auto type) { return RunTyped<decltype(type)>(args, queue); });
}

}  // namespace gradfuse::cuda
