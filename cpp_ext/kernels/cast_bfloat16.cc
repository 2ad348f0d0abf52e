#include "gradfuse/ops/cast_bfloat16.h"

namespace gradfuse {

Status Check(const CastBfloat16Args& args) {
  GRADFUSE_RETURN_IF_ERROR(CheckLayout(args));
  GRADFUSE_EXPECT(args.to == args.Wanted(), "to", std::to_string(args.to),
                  std::to_string(args.Wanted()) + ", as self is " + Name(args.self.dtype));
  return {};
}

std::vector<Shape> OutputShapes(const CastBfloat16Args& args) { return {args.self.shape}; }

}  // namespace gradfuse
