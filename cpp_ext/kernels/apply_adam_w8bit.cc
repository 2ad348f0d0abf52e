#include "gradfuse/ops/apply_adam_w8bit.h"

#include "kernels/adam_w_checks.h"
#include "kernels/dispatch.h"
#include "kernels/update_checks.h"

namespace gradfuse {
namespace {

Status CheckScale(const char* name, const Tensor& scale, const Tensor& parameter) {
  const Shape wanted{CeilDiv(parameter.NumElements(), ApplyAdamW8bitArgs::kBlock)};
  GRADFUSE_EXPECT(scale.shape == wanted, name, Describe(scale),
                  Describe(DType::kFloat32, wanted) + ", one for 256 elements");
  return {};
}

Status CheckCodes(const char* name, const Tensor& codes, const Tensor& parameter) {
  GRADFUSE_EXPECT(codes.shape == parameter.shape, name, Describe(codes), Describe(DType::kUInt8, parameter.shape));
  return {};
}

}  // namespace

Status Check(const ApplyAdamW8bitArgs& args) {
  GRADFUSE_RETURN_IF_ERROR(CheckLayout(args));
  GRADFUSE_RETURN_IF_ERROR(CheckTensor("gradient", args.gradient, args.parameter));
  GRADFUSE_RETURN_IF_ERROR(CheckCodes("exp_avg", args.exp_avg, args.parameter));
  GRADFUSE_RETURN_IF_ERROR(CheckCodes("exp_avg_sq", args.exp_avg_sq, args.parameter));
  GRADFUSE_RETURN_IF_ERROR(CheckScale("exp_avg_scale", args.exp_avg_scale, args.parameter));
  GRADFUSE_RETURN_IF_ERROR(CheckScale("exp_avg_sq_scale", args.exp_avg_sq_scale, args.parameter));
  return CheckAdamW(args);
}

std::vector<Shape> OutputShapes(const ApplyAdamW8bitArgs& args) {
  const Shape& whole = args.parameter.shape;
  const Shape& blocks = args.exp_avg_scale.shape;
  return {whole, whole, whole, blocks, blocks};
}

}  // namespace gradfuse
