#pragma once

#include <cstdint>
#include <optional>

#include "gradfuse/parallel.h"
#include "gradfuse/tensor.h"
#include "kernels/convolution_geometry.h"
#include "kernels/cpu/task_memory.h"

// The sums of convolutions.h for factors that are rounded to bfloat16, with the processor's instruction for
// pairs of such numbers: of two channels that are summed over, or of two items of the batch. The loops are those for
// float, which holds a pair in its bits.
namespace gradfuse::cpu {

// A weight in pairs of channels: of the large side's for a convolution of that, or of the small side's.
class PairedWeight {
 public:
  PairedWeight(const ConvolutionGeometry& g, const Tensor& weight, bool of_large, const ParallelFor& parallel);

  // Whether there is such an instruction, channels can be paired, and all numbers, which zeros of the padding may meet,
  // are finite.
  bool is_there() const { return is_there_; }
  const float* data() const { return pairs_ ? pairs_->data() : nullptr; }

 private:
  std::optional<KeptMemory<float>> pairs_;
  bool is_there_ = false;
};

// With a weight that is there.
void ConvolutionOfPairs(const ConvolutionGeometry& g, const Tensor& large, const PairedWeight& weight,
                        const float* bias, bool relu, float* out, const ParallelFor& parallel);
void TransposedConvolutionOfPairs(const ConvolutionGeometry& g, const Tensor& small, const PairedWeight& weight,
                                  float* out, const ParallelFor& parallel);

// Returns false where there is no such instruction, there are no items to pair, or a number is not finite.
bool GradWeightOfPairs(const ConvolutionGeometry& g, const Tensor& small, const Tensor& large, float* out,
                       const ParallelFor& parallel);

}  // namespace gradfuse::cpu
