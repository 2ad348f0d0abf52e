#pragma once

#include "gradfuse/parallel.h"
#include "gradfuse/queue.h"
#include "gradfuse/status.h"
#include "gradfuse/tensor.h"

namespace gradfuse {

// Copies the elements of a tensor to another of the same type and shape, of rank 8 or less. Strides must not be
// negative, and the tensors must not overlap. Where several elements of `to` share a place, it gets the value of one of
// them.
namespace cpu {
void StridedCopy(const Tensor& from, const MutableTensor& to, const ParallelFor& parallel);
}
namespace cuda {
Status StridedCopy(const Tensor& from, const MutableTensor& to, const Queue& queue);
}

}  // namespace gradfuse
