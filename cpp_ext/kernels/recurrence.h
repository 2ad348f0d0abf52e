#pragma once

#include <string>

#include "gradfuse/signature.h"
#include "gradfuse/tensor.h"
#include "kernels/checks.h"

namespace gradfuse {

// The sizes of a recurrent layer: of a sequence (T, N, gates H).
struct RecurrenceSizes {
  RecurrenceSizes(const Shape& sequence, int64_t gates)
      : steps(sequence[0]), batch(sequence[1]), units(sequence[2] / gates) {}

  int64_t steps;
  int64_t batch;
  int64_t units;
};

// Where in a sequence step t is: from the last to the first with reverse.
class StepPlaces {
 public:
  StepPlaces(int64_t steps, bool reverse) : last_(steps - 1), reverse_(reverse) {}

  int64_t At(int64_t t) const { return reverse_ ? last_ - t : t; }

 private:
  int64_t last_;
  bool reverse_;
};

// Whether `sequence` has three dimensions, of which the last is divided into gates.
inline Status CheckSequence(const char* name, const Tensor& sequence, int64_t gates) {
  GRADFUSE_EXPECT(sequence.shape.rank() == 3 && sequence.shape[2] % gates == 0, name, Describe(sequence),
                  gates == 1 ? "3 dimensions (T,N,H)" : "3 dimensions (T,N," + std::to_string(gates) + " H)");
  return {};
}

}  // namespace gradfuse
