#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <type_traits>

#include "gradfuse/parallel.h"
#include "gradfuse/tensor.h"
#include "kernels/convolution_checks.h"
#include "kernels/convolution_geometry.h"
#include "kernels/cpu/convolution_pairs.h"
#include "kernels/cpu/convolutions.h"
#include "kernels/cpu/operands.h"
#include "kernels/cpu/task_memory.h"
#include "kernels/dispatch.h"

// The sums of convolutions.h of tensors: of pairs of bfloat16 where the processor multiplies these, else of numbers
// that are widened or rounded. What is converted is in memory for a part of the batch at a time.
namespace gradfuse::cpu {

// Some items of a tensor of (N, ...).
template <class AnyTensor>
AnyTensor ItemsOf(const AnyTensor& tensor, int64_t first, int64_t count) {
  using Byte = std::conditional_t<std::is_same_v<AnyTensor, Tensor>, const char, char>;
  AnyTensor items = tensor;
  items.shape[0] = count;
  if (first > 0) items.data = static_cast<Byte*>(tensor.data) + first * (tensor.NumBytes() / tensor.shape[0]);
  return items;
}

// Of an operator with activations of type A and a weight of type T.
template <class A, class T>
class ConvolutionProducts {
 public:
  using Real = ComputeType<A>;

  template <class Args>
  ConvolutionProducts(const Args& args, const ConvolutionGeometry& geometry, const ParallelFor& parallel)
      : g_(geometry),
        parallel_(parallel),
        weight_(args.weight),
        rounds_(args.factors_in_bfloat16 != 0),
        multiplies_weight_(MultipliesBFloat16(args, args.input, args.weight)),
        multiplies_sides_(MultipliesBFloat16(args, args.input, args.input)) {}

  // The large side's convolution, with a bias, or null, added to each channel, and with `relu` at least 0; or the small
  // side's transposed one.
  void Convolve(bool of_large, const Tensor& side, const Real* bias, bool relu, const MutableTensor& out) const {
    std::optional<PairedWeight> pairs;
    if constexpr (std::is_same_v<Real, float>) {
      if (multiplies_weight_) pairs.emplace(g_, weight_, of_large, parallel_);
    }
    const bool has_pairs = pairs && pairs->is_there();
    std::optional<Operand<Real>> numbers;
    if (!has_pairs) numbers.emplace(weight_, parallel_, rounds_);
    ForEachPart(side.NumBytes() + out.NumElements() * static_cast<int64_t>(sizeof(Real)), 1,
                [&](const ConvolutionGeometry& g, int64_t first) {
                  const Tensor from = ItemsOf(side, first, g.batch);
                  const MutableTensor to = ItemsOf(out, first, g.batch);
                  const Result<A> result(to);
                  if constexpr (std::is_same_v<Real, float>) {
                    if (has_pairs) {
                      of_large ? ConvolutionOfPairs(g, from, *pairs, bias, relu, result.data(), parallel_)
                               : TransposedConvolutionOfPairs(g, from, *pairs, result.data(), parallel_);
                    }
                  }
                  if (!has_pairs) {
                    const Operand<Real> input(from, parallel_, rounds_);
                    of_large ? Convolution(g, input.data(), numbers->data(), bias, relu, result.data(), parallel_)
                             : TransposedConvolution(g, input.data(), numbers->data(), result.data(), parallel_);
                  }
                  if (!of_large) {
                    Finish(bias, relu, g.batch * to.shape[1], to.shape[1], g.large_size, result.data());
                  }
                  result.Finish(parallel_);
                });
  }

  // The weight's sums of products of both sides.
  void Correlate(const Tensor& small, const Tensor& large, const MutableTensor& out) const {
    const Result<T> result(out);
    const int64_t count = out.NumElements();
    std::optional<KeptMemory<Real>> more;
    // An even number of items, for pairs of them.
    ForEachPart(small.NumBytes() + large.NumBytes(), 2, [&](const ConvolutionGeometry& g, int64_t first) {
      if (first > 0 && !more) more.emplace(count);
      Real* const sums = first == 0 ? result.data() : more->data();
      const Tensor s = ItemsOf(small, first, g.batch);
      const Tensor l = ItemsOf(large, first, g.batch);
      bool is_done = false;
      if constexpr (std::is_same_v<Real, float>) {
        is_done = multiplies_sides_ && GradWeightOfPairs(g, s, l, sums, parallel_);
      }
      if (!is_done) {
        const Operand<Real> small_numbers(s, parallel_, rounds_);
        const Operand<Real> large_numbers(l, parallel_, rounds_);
        GradWeight(g, small_numbers.data(), large_numbers.data(), sums, parallel_);
      }
      if (first > 0) Add(more->data(), count, result.data());
    });
    result.Finish(parallel_);
  }

 private:
  // Calls body(geometry, first) for parts of the batch, of which `bytes` are converted; of a multiple of items.
  template <class Body>
  void ForEachPart(int64_t bytes, int64_t multiple, const Body& body) const {
    constexpr int64_t kBytes = 4 << 20;
    const bool converts = rounds_ || !std::is_same_v<A, Real>;
    ConvolutionGeometry part = g_;
    if (!converts || g_.batch == 0) return body(part, 0);
    const int64_t parts = std::clamp<int64_t>(CeilDiv(bytes, kBytes), 1, g_.batch);
    const int64_t items = CeilDiv(CeilDiv(g_.batch, parts), multiple) * multiple;
    for (int64_t first = 0; first < g_.batch; first += items) {
      part.batch = std::min(items, g_.batch - first);
      body(part, first);
    }
  }

  // Adds each channel's bias, if not null, to its plane, and with `relu` sets numbers below 0 to 0.
  void Finish(const Real* bias, bool relu, int64_t planes, int64_t channels, int64_t size, Real* out) const {
    if (bias == nullptr && !relu) return;
    parallel_(planes, 2 * planes * size * static_cast<int64_t>(sizeof(Real)), [&](int64_t plane) {
      const Real added = bias == nullptr ? Real{} : bias[plane % channels];
      Real* const to = out + plane * size;
      for (int64_t i = 0; i < size; ++i) {
        const Real value = to[i] + added;
        to[i] = relu && value < 0 ? Real{} : value;
      }
    });
  }

  void Add(const Real* from, int64_t count, Real* sums) const {
    constexpr int64_t kTask = 16384;
    parallel_(CeilDiv(count, kTask), 3 * count * static_cast<int64_t>(sizeof(Real)), [&](int64_t task) {
      for (int64_t i = task * kTask; i < std::min(count, (task + 1) * kTask); ++i) sums[i] += from[i];
    });
  }

  const ConvolutionGeometry& g_;
  const ParallelFor& parallel_;
  const Tensor& weight_;
  bool rounds_;
  bool multiplies_weight_;  // as bfloat16; and both sides
  bool multiplies_sides_;
};

}  // namespace gradfuse::cpu
