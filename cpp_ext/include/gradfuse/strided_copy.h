#pragma once

#include "gradfuse/parallel.h"
#include "gradfuse/queue.h"
#include "gradfuse/status.h"
#include "gradfuse/tensor.h"

namespace gradfuse {

// Copies the elements of a tensor to another of its type and shape, of rank 8 or less. Strides of both may be any that
// are not negative; the memory of one does not overlap that of the other. Elements of `to` that lie at one place get
// the value of one of them.
namespace cpu {
void StridedCopy(const Tensor& from, const MutableTensor& to, const ParallelFor& parallel);
}
namespace cuda {
Status StridedCopy(const Tensor& from, const MutableTensor& to, const Queue& queue);
}

}  // namespace gradfuse
