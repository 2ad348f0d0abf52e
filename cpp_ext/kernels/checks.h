#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "gradfuse/signature.h"

// What operators check of single arguments.
namespace gradfuse {

// Whether a tensor, if it is there, has this shape. `why` stands behind the shape in the message.
inline Status CheckShape(const char* name, const Tensor& tensor, const Shape& shape, const char* why = "") {
  GRADFUSE_EXPECT(tensor.shape == shape, name, Describe(tensor), Describe(tensor.dtype, shape) + why);
  return {};
}
inline Status CheckShape(const char* name, const std::optional<Tensor>& tensor, const Shape& shape,
                         const char* why = "") {
  return tensor ? CheckShape(name, *tensor, shape, why) : Status();
}

inline Status CheckFlag(const char* name, int64_t flag) {
  GRADFUSE_EXPECT(flag == 0 || flag == 1, name, std::to_string(flag), "0 or 1");
  return {};
}

// Whether output_mask has a flag for each of the outputs.
inline Status CheckMask(const std::vector<int64_t>& mask, size_t outputs) {
  const bool fits =
      mask.size() == outputs && std::all_of(mask.begin(), mask.end(), [](int64_t one) { return one == 0 || one == 1; });
  GRADFUSE_EXPECT(fits, "output_mask", Describe(mask), std::to_string(outputs) + " numbers, 0 or 1");
  return {};
}

// The shapes of outputs, without elements where the mask asks for none.
inline std::vector<Shape> Masked(const std::vector<int64_t>& mask, std::vector<Shape> shapes) {
  for (size_t output = 0; output < shapes.size(); ++output) {
    if (mask[output] == 0) shapes[output] = {0};
  }
  return shapes;
}

}  // namespace gradfuse
