#pragma once

#include <cstdint>

#include "gradfuse/parallel.h"
#include "kernels/convolution_geometry.h"

// The three sums of products of a convolution, of float and double. Nothing is multiplied with padding.
namespace gradfuse::cpu {

// The small side: out[n,m,o] = bias[m] + sum over c, k of large[n,c,o stride - padding + k dilation] weight[m,c,k].
// `bias` may be null. With relu it is at least 0.
template <class T>
void Convolution(const ConvolutionGeometry& g, const T* large, const T* weight, const T* bias, bool relu, T* out,
                 const ParallelFor& parallel);

// The large side: out[n,c,o stride - padding + k dilation] = sum over m, o, k of small[n,m,o] weight[m,c,k].
template <class T>
void TransposedConvolution(const ConvolutionGeometry& g, const T* small, const T* weight, T* out,
                           const ParallelFor& parallel);

// The weight: out[m,c,k] = sum over n, o of small[n,m,o] large[n,c,o stride - padding + k dilation].
template <class T>
void GradWeight(const ConvolutionGeometry& g, const T* small, const T* large, T* out, const ParallelFor& parallel);

}  // namespace gradfuse::cpu
