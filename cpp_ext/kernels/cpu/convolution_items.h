#pragma once

#include <cstdint>

#include "gradfuse/parallel.h"
#include "kernels/convolution_geometry.h"
#include "kernels/cpu/convolution_tiles.h"

// The sums of convolutions.h with several items of the batch packed side by side: a row of places is then as many whole
// vectors, whatever its width, and no zeros between rows are multiplied.
namespace gradfuse::cpu {

// Whether that saves more zeros than it adds for items that are not there, and what is packed stays small.
bool PaysByItems(const ConvolutionGeometry& g);

// Returns false where a number is not finite: it may have met the zeros of the padding, and results may be wrong.
template <class T>
bool ConvolutionOfItems(const ConvolutionGeometry& g, const T* large, const T* weight, const Finishes<T>& finishes,
                        T* out, const ParallelFor& parallel);
template <class T>
bool TransposedConvolutionOfItems(const ConvolutionGeometry& g, const T* small, const T* weight, T* out,
                                  const ParallelFor& parallel);
template <class T>
bool GradWeightOfItems(const ConvolutionGeometry& g, const T* small, const T* large, T* out,
                       const ParallelFor& parallel);

}  // namespace gradfuse::cpu
