#include "gradfuse/ops/max_pool_backward.h"

#include <algorithm>

#include "kernels/checks.h"
#include "kernels/max_pool_geometry.h"
#include "kernels/spatial_numbers.h"

namespace gradfuse {
namespace {

// From the first element of a window to the last, along a spatial dimension.
int64_t Reach(const MaxPoolBackwardArgs& args, int axis) {
  return At(args.dilation, axis) * (At(args.kernel_size, axis) - 1);
}

// The windows along a spatial dimension. None begins behind the input.
int64_t Windows(const MaxPoolBackwardArgs& args, int spatial, int axis) {
  const int64_t size = args.input.shape[axis + 2];
  const int64_t begin = At(args.padding, axis);
  const int64_t stride = At(args.stride, axis);
  const int64_t room = size + begin + PaddingAtEnd(args.padding, spatial, axis) - Reach(args, axis) - 1;
  if (args.ceil_mode == 0) return room < 0 ? 0 : room / stride + 1;
  if (room <= -stride) return 0;
  // Of a room from 1 - stride to 0 the quotient is 0, as it is when rounded up.
  const int64_t count = (room <= 0 ? 0 : (room - 1) / stride + 1) + 1;
  return (count - 1) * stride >= size + begin ? count - 1 : count;
}

}  // namespace

Status Check(const MaxPoolBackwardArgs& args) {
  GRADFUSE_RETURN_IF_ERROR(CheckLayout(args));
  const int rank = args.input.shape.rank();
  const int spatial = rank - 2;
  GRADFUSE_EXPECT(spatial >= 1 && spatial <= MaxPoolBackwardArgs::kMaxSpatial, "input", Describe(args.input),
                  "3 to 5 dimensions (N,C,...)");
  GRADFUSE_RETURN_IF_ERROR(CheckFlag("ceil_mode", args.ceil_mode));
  GRADFUSE_RETURN_IF_ERROR(CheckNumbers("kernel_size", args.kernel_size, spatial, false, 1));
  GRADFUSE_RETURN_IF_ERROR(CheckNumbers("stride", args.stride, spatial, false, 1));
  GRADFUSE_RETURN_IF_ERROR(CheckNumbers("padding", args.padding, spatial, true, 0));
  GRADFUSE_RETURN_IF_ERROR(CheckNumbers("dilation", args.dilation, spatial, false, 1));
  Shape output = args.input.shape;
  for (int axis = 0; axis < spatial; ++axis) {
    const int64_t most = std::max(At(args.padding, axis), PaddingAtEnd(args.padding, spatial, axis));
    GRADFUSE_EXPECT(most <= Reach(args, axis), "padding", Describe(args.padding), "less than a window reaches");
    const int64_t size = args.input.shape[axis + 2];
    GRADFUSE_EXPECT(size <= kMostInSpace, "input", Describe(args.input),
                    "at most 2147483647 elements along each spatial dimension");
    output[axis + 2] = Windows(args, spatial, axis);
    GRADFUSE_EXPECT(size >= 1 && output[axis + 2] >= 1, "input", Describe(args.input),
                    "spatial dimensions that a window fits into");
  }
  return CheckShape("grad_output", args.grad_output, output, ", an element for each window of input");
}

std::vector<Shape> OutputShapes(const MaxPoolBackwardArgs& args) { return {args.input.shape}; }

MaxPoolGeometry::MaxPoolGeometry(const MaxPoolBackwardArgs& args) : planes(args.input.shape[0] * args.input.shape[1]) {
  const int spatial = args.input.shape.rank() - 2;
  for (int i = 0; i < kSpatial; ++i) {
    const int axis = i - (kSpatial - spatial);
    const bool is_there = axis >= 0;
    windows[i] = is_there ? args.grad_output.shape[axis + 2] : 1;
    sizes[i] = is_there ? args.input.shape[axis + 2] : 1;
    kernel[i] = is_there ? At(args.kernel_size, axis) : 1;
    stride[i] = is_there ? At(args.stride, axis) : 1;
    padding[i] = is_there ? At(args.padding, axis) : 0;
    dilation[i] = is_there ? At(args.dilation, axis) : 1;
    window_count *= windows[i];
    plane_size *= sizes[i];
  }
}

}  // namespace gradfuse
