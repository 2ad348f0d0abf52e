#include "gradfuse/ops/pointwise.h"

#include <memory>
#include <string>

#include "kernels/dropout.h"
#include "kernels/pointwise_program.h"

namespace gradfuse {
namespace {

// "(2, 3)".
std::string SizesOf(const Shape& shape) {
  std::string text = "(";
  for (int axis = 0; axis < shape.rank(); ++axis) text += (axis ? ", " : "") + std::to_string(shape[axis]);
  return text + ")";
}

bool BroadcastsTo(const Shape& shape, const Shape& whole) {
  const int missing = whole.rank() - shape.rank();
  if (missing < 0) return false;
  for (int axis = 0; axis < shape.rank(); ++axis) {
    if (shape[axis] != 1 && shape[axis] != whole[axis + missing]) return false;
  }
  return true;
}

Status CheckPresence(const PointwiseArgs& args, const PointwiseProgram& program) {
  for (int index = 1; index < PointwiseArgs::kInputs; ++index) {
    const bool is_there = args.Input(index) != nullptr;
    const std::string name = "x" + std::to_string(index);
    GRADFUSE_EXPECT(is_there || !program.reads[index], name, "absent", "a tensor, as expression reads it");
    GRADFUSE_EXPECT(!is_there || program.reads[index], name, "given", "absent, as expression does not read it");
  }
  if (program.draws()) {
    GRADFUSE_EXPECT(args.seed, "seed", "absent", "a tensor, as expression has Kept()");
    return {};
  }
  GRADFUSE_EXPECT(!args.seed, "seed", "given", "absent, as expression has no Kept()");
  GRADFUSE_EXPECT(!args.drawn, "drawn", "given", "absent, as expression has no Kept()");
  GRADFUSE_EXPECT(args.dropout_threshold == 0, "dropout_threshold", std::to_string(args.dropout_threshold),
                  "0, as expression has no Kept()");
  GRADFUSE_EXPECT(args.draw == 0, "draw", std::to_string(args.draw), "0, as expression has no Kept()");
  return {};
}

}  // namespace

Status Check(const PointwiseArgs& args) {
  GRADFUSE_RETURN_IF_ERROR(CheckLayout(args));
  std::shared_ptr<const PointwiseProgram> program;
  GRADFUSE_RETURN_IF_ERROR(FindProgram(args.expression, program));
  GRADFUSE_RETURN_IF_ERROR(CheckDropout(args));
  GRADFUSE_RETURN_IF_ERROR(CheckPresence(args, *program));
  for (int index = 1; index < PointwiseArgs::kInputs; ++index) {
    const Tensor* const input = args.Input(index);
    if (input == nullptr) continue;
    GRADFUSE_EXPECT(BroadcastsTo(input->shape, args.x0.shape), "x" + std::to_string(index),
                    "of shape " + SizesOf(input->shape),
                    "one that broadcasts to " + SizesOf(args.x0.shape) + ", the shape of x0");
  }
  return {};
}

std::vector<Shape> OutputShapes(const PointwiseArgs& args) {
  std::shared_ptr<const PointwiseProgram> program;
  std::vector<Shape> shapes(PointwiseArgs::kOutputs, Shape{0});
  if (!FindProgram(args.expression, program).ok()) return shapes;
  for (size_t output = 0; output < shapes.size(); ++output) {
    if (program->assigns[output]) shapes[output] = args.x0.shape;
  }
  return shapes;
}

}  // namespace gradfuse
