#include "gradfuse/ops/cast_bfloat16.h"

#include <algorithm>

#include "kernels/cpu/streaming.h"
#include "kernels/cpu/targets.h"
#include "kernels/dispatch.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/cast_bfloat16.cc"
#include "kernels/cpu/foreach_target.h"
#include "kernels/cpu/vectors-inl.h"

HWY_BEFORE_NAMESPACE();
namespace gradfuse::cpu::HWY_NAMESPACE {
namespace {

template <class From, class To, bool kStreams>
void Casts(const From* from, int64_t count, To* to) {
  const TagOf<float> d;
  ForEachVectorInto<Sink<kStreams, Sweep>>(
      to, d, count, [&](int64_t i, auto at) HWY_ATTR { Store(at, Load(at, d, from + i), d, to + i); });
}

}  // namespace
}  // namespace gradfuse::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace gradfuse::cpu {
namespace {

template <class From, class To>
void RunTyped(const CastBfloat16Args& args, const ParallelFor& parallel) {
  constexpr int64_t kPart = 32768;
  const From* const from = args.self.Data<From>();
  To* const to = args.output.MutableData<To>();
  const int64_t total = args.self.NumElements();
  const int64_t bytes = args.self.NumBytes() + args.output.NumBytes();
  const bool streams = bytes >= StreamBytes();
  const auto casts = streams ? GRADFUSE_DISPATCH(Casts<From, To, true>) : GRADFUSE_DISPATCH(Casts<From, To, false>);
  parallel(CeilDiv(total, kPart), bytes, [&](int64_t part) {
    const StreamFence fence(streams);
    const int64_t begin = part * kPart;
    casts(from + begin, std::min(kPart, total - begin), to + begin);
  });
}

}  // namespace

void Run(const CastBfloat16Args& args, const ParallelFor& parallel) {
  if (args.self.NumElements() == 0) return;
  args.self.dtype == DType::kFloat32 ? RunTyped<float, BFloat16>(args, parallel)
                                     : RunTyped<BFloat16, float>(args, parallel);
}

}  // namespace gradfuse::cpu
#endif  // HWY_ONCE
