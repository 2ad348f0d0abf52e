#include "kernels/ctc_common.h"

#include <cmath>
#include <limits>
#include <string>
#include <type_traits>

#include "kernels/checks.h"

namespace gradfuse {
namespace {

std::string At(const char* name, int64_t index) { return std::string(name) + "[" + std::to_string(index) + "]"; }

// The lengths of all items, as far as the host can read them. They bound every later access to targets.
Status CheckLengths(const Tensor& log_probs, const Tensor& targets, const Tensor& input_lengths,
                    const Tensor& target_lengths) {
  const int64_t steps = log_probs.shape[0];
  const int64_t items = log_probs.shape[1];
  for (int64_t item = 0; item < items && input_lengths.on_host; ++item) {
    const int64_t input_length = input_lengths.Data<int64_t>()[item];
    GRADFUSE_EXPECT(input_length >= 0 && input_length <= steps, At("input_lengths", item), std::to_string(input_length),
                    "a length in [0, " + std::to_string(steps) + "]");
  }
  if (!target_lengths.on_host) return {};
  const bool joined = targets.shape.rank() == 1;
  const int64_t longest = joined ? targets.shape[0] : targets.shape[1];
  int64_t total = 0;
  for (int64_t item = 0; item < items; ++item) {
    const int64_t target_length = target_lengths.Data<int64_t>()[item];
    GRADFUSE_EXPECT(target_length >= 0 && target_length <= longest, At("target_lengths", item),
                    std::to_string(target_length),
                    "a length in [0, " + std::to_string(longest) + "], as targets is " + Describe(targets));
    total += target_length;  // cannot overflow: bounded by the size of targets, item by item
    GRADFUSE_EXPECT(!joined || total <= longest, "targets", Describe(targets),
                    "at least " + std::to_string(total) + " labels, the sum of target_lengths");
  }
  GRADFUSE_EXPECT(!joined || total == longest, "targets", Describe(targets),
                  std::to_string(total) + " labels, the sum of target_lengths");
  return {};
}

template <class T>
Status CheckLabels(const Tensor& targets, const Tensor& target_lengths, int64_t classes) {
  const T* labels = targets.Data<T>();
  const int64_t* lengths = target_lengths.Data<int64_t>();
  const int64_t items = target_lengths.shape[0];
  int64_t joined = 0;
  for (int64_t item = 0; item < items; ++item) {
    const int64_t first = FirstLabel(targets, item, joined);
    for (int64_t index = first; index < first + lengths[item]; ++index) {
      const double label = ToDouble(labels[index]);
      if (label >= 0 && label < static_cast<double>(classes) && label == std::floor(label)) continue;
      const std::string place = targets.shape.rank() == 2 ? std::to_string(item) + "," + std::to_string(index - first)
                                                          : std::to_string(index);
      return Refuse("targets[" + place + "]", Describe(label), "a class in [0, " + std::to_string(classes) + ")");
    }
    joined += lengths[item];
  }
  return {};
}

}  // namespace

Status CheckCtc(const Tensor& log_probs, const Tensor& targets, const Tensor& input_lengths,
                const Tensor& target_lengths, int64_t blank, int64_t zero_infinity) {
  GRADFUSE_EXPECT(log_probs.shape.rank() == 3, "log_probs", Describe(log_probs), "3 dimensions (T,N,C)");
  const Shape per_item{log_probs.shape[1]};
  const int64_t classes = log_probs.shape[2];
  constexpr int64_t kMostClasses = std::numeric_limits<int32_t>::max();  // vectors look classes up by 32 bits
  GRADFUSE_EXPECT(classes <= kMostClasses, "log_probs", Describe(log_probs),
                  "at most " + std::to_string(kMostClasses) + " classes");
  GRADFUSE_EXPECT(blank >= 0 && blank < classes, "blank", std::to_string(blank),
                  "a class in [0, " + std::to_string(classes) + ")");
  GRADFUSE_RETURN_IF_ERROR(CheckFlag("zero_infinity", zero_infinity));
  GRADFUSE_EXPECT(
      targets.shape.rank() == 1 || (targets.shape.rank() == 2 && targets.shape[0] == per_item[0]), "targets",
      Describe(targets),
      "shape (" + std::to_string(per_item[0]) + ",S), a row an item, or all labels joined in one dimension");
  GRADFUSE_RETURN_IF_ERROR(CheckShape("input_lengths", input_lengths, per_item, ", one length an item"));
  GRADFUSE_RETURN_IF_ERROR(CheckShape("target_lengths", target_lengths, per_item, ", one length an item"));
  GRADFUSE_RETURN_IF_ERROR(CheckLengths(log_probs, targets, input_lengths, target_lengths));
  if (!(targets.on_host && target_lengths.on_host)) return {};
  return WithTargetType(targets.dtype, [&](auto type) {
    return CheckLabels<std::remove_cv_t<std::remove_pointer_t<decltype(type)>>>(targets, target_lengths, classes);
  });
}

}  // namespace gradfuse
