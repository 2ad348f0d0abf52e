#include "gradfuse/ops/linear_cross_entropy.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <mutex>
#include <type_traits>
#include <utility>
#include <vector>

#include "kernels/cpu/flush_subnormals.h"
#include "kernels/cpu/matrix_products.h"
#include "kernels/cpu/targets.h"
#include "kernels/cross_entropy.h"
#include "kernels/dispatch.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/linear_cross_entropy.cc"
#include "kernels/cpu/foreach_target.h"
#include "kernels/cpu/vector_math-inl.h"

// What the loops of all instruction sets share.
#ifndef GRADFUSE_LINEAR_CROSS_ENTROPY_SHARED
#define GRADFUSE_LINEAR_CROSS_ENTROPY_SHARED
namespace gradfuse::cpu {
namespace {

// Of a row's logits in one block of classes.
template <class Real>
struct PartialSums {
  Real max;
  Real sum;  // of exp(logit - max)
};

// What is subtracted ahead of exp: where all logits are -inf, as those of classes that a bias excludes, nothing.
template <class Real>
Real ShiftOf(Real max) {
  return max == -std::numeric_limits<Real>::infinity() ? 0 : max;
}

// What the gradients of a row's logits need beside them: exp(logit - max) scale - shift weight.
template <class Real>
struct RowTerms {
  Real max;
  Real scale;
  Real shift;
};

}  // namespace
}  // namespace gradfuse::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace gradfuse::cpu::HWY_NAMESPACE {
namespace {

// Makes logits of products: adds a bias, which may be null, and caps them, unless the cap is 0.
template <class Real>
void FinishLogits(const Real* bias, Real softcap, int64_t count, Real* logits) {
  const TagOf<Real> d;
  if (bias != nullptr) {
    ForEachVector(d, count, [&](int64_t c, auto at) HWY_ATTR {
      Store(at, Load(at, d, logits + c) + Load(at, d, bias + c), d, logits + c);
    });
  }
  if (softcap == 0) return;
  if constexpr (std::is_same_v<Real, float>) {
    const auto cap = hn::Set(d, softcap);
    const auto inverse = hn::Set(d, 1 / softcap);
    ForEachVector(d, count, [&](int64_t c, auto at) HWY_ATTR {
      Store(at, cap * Tanh(d, Load(at, d, logits + c) * inverse), d, logits + c);
    });
  } else {
    for (int64_t c = 0; c < count; ++c) logits[c] = softcap * std::tanh(logits[c] / softcap);
  }
}

template <class Real>
PartialSums<Real> SumsOf(const Real* logits, int64_t count) {
  const TagOf<Real> d;
  Real max = -std::numeric_limits<Real>::infinity();
  auto maxima = hn::Set(d, max);
  ForEachVector(d, count, [&](int64_t c, auto at) HWY_ATTR {
    if constexpr (std::is_same_v<decltype(at), Part>) {
      for (int64_t rest = c; rest < count; ++rest) max = std::max(max, logits[rest]);
    } else {
      maxima = hn::Max(Load(at, d, logits + c), maxima);
    }
  });
  Real lanes[hn::MaxLanes(TagOf<Real>())];
  hn::StoreU(maxima, d, lanes);
  for (const Real lane : lanes) max = std::max(max, lane);
  const auto of_all = hn::Set(d, ShiftOf(max));
  auto sum = hn::Zero(d);
  ForEachVector(d, count, [&](int64_t c, auto at) HWY_ATTR {
    const auto power = Exp<Real>(d, Load(at, d, logits + c) - of_all);
    if constexpr (std::is_same_v<decltype(at), Part>) {
      sum = sum + hn::IfThenElseZero(hn::FirstN(d, at.lanes), power);
    } else {
      sum = sum + power;
    }
  });
  return {max, hn::ReduceSum(d, sum)};
}

template <class Real>
double WeightedSum(const Real* logits, const Real* weight, int64_t count) {
  const TagOf<Real> d;
  auto sum = hn::Zero(d);
  ForEachVector(d, count, [&](int64_t c, auto at) HWY_ATTR {
    const auto logit = Load(at, d, logits + c);
    sum = sum + (weight == nullptr ? logit : logit * Load(at, d, weight + c));
  });
  return hn::ReduceSum(d, sum);
}

// `weight` may be null where the shift is the same for all classes. Gradients may be written over logits.
template <class Real>
void GradientsOf(const RowTerms<Real>& row, const Real* logits, const Real* weight, Real softcap, int64_t count,
                 Real* gradients) {
  const TagOf<Real> d;
  const auto max = hn::Set(d, row.max);
  const auto scale = hn::Set(d, row.scale);
  const auto shift = hn::Set(d, row.shift);
  const auto one = hn::Set(d, Real{1});
  const auto inverse = hn::Set(d, softcap == 0 ? Real{0} : 1 / softcap);
  ForEachVector(d, count, [&](int64_t c, auto at) HWY_ATTR {
    const auto logit = Load(at, d, logits + c);
    const auto shifted = weight == nullptr ? shift : shift * Load(at, d, weight + c);
    auto grad = hn::MulSub(Exp<Real>(d, logit - max), scale, shifted);
    if (softcap != 0) {
      const auto capped = logit * inverse;
      grad = grad * hn::NegMulAdd(capped, capped, one);
    }
    Store(at, grad, d, gradients + c);
  });
}

template <class Real>
void AddRow(const Real* row, int64_t count, Real* sums) {
  const TagOf<Real> d;
  ForEachVector(d, count, [&](int64_t c, auto at) HWY_ATTR {
    Store(at, Load(at, d, sums + c) + Load(at, d, row + c), d, sums + c);
  });
}

template <class From, class To>
void CopyRow(const From* from, int64_t count, To* to) {
  const TagOf<To> d;
  ForEachVector(d, count, [&](int64_t i, auto at) HWY_ATTR { Store(at, Load(at, d, from + i), d, to + i); });
}

}  // namespace
}  // namespace gradfuse::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace gradfuse::cpu {
namespace {

constexpr int64_t kClasses = 256;  // of a block
constexpr int64_t kRows = 240;     // of a block: whole tiles of every instruction set
// Of a task that has the gradient of the input: its part of the weights stays in the second-level cache.
constexpr int64_t kRowsOfInput = 120;
constexpr int64_t kFeatures = 256;
constexpr int64_t kProductsPerByte = 4;  // that take as long as a byte that is moved
constexpr int64_t kTileRows = 12;        // a whole number of tiles
// Logits that take no more are kept from the first pass to the second; more where they are those of few rows.
constexpr int64_t kUsuallyKept = 32 << 20;
constexpr int64_t kMostKept = 128 << 20;
// What the blocks of classes take that are between the two halves of the second pass.
constexpr int64_t kMostBetween = 16 << 20;
constexpr int64_t kMostTogether = 64;

// Memory of tasks, which those that come later use again.
template <class Memory>
class Pool {
 public:
  class Loan {
   public:
    explicit Loan(Pool& pool) : pool_(pool) {
      const std::lock_guard<std::mutex> lock(pool_.mutex_);
      if (pool_.free_.empty()) return;
      memory_ = std::move(pool_.free_.back());
      pool_.free_.pop_back();
    }
    ~Loan() {
      const std::lock_guard<std::mutex> lock(pool_.mutex_);
      pool_.free_.push_back(std::move(memory_));
    }
    Loan(const Loan&) = delete;
    Loan& operator=(const Loan&) = delete;
    Memory* operator->() { return &memory_; }

   private:
    Pool& pool_;
    Memory memory_;
  };

 private:
  std::mutex mutex_;
  std::vector<Memory> free_;
};

template <class Real>
Real* Reserve(Lines<Real>& lines, int64_t count) {
  if (lines.data() == nullptr) lines = Lines<Real>(count);
  return lines.data();
}

// The rows that are computed are cut into blocks, and so are the classes. In a first pass, tasks that have a block of
// classes each compute its logits, row block by row block, and what the logsumexp of each row needs of them. In the
// second, they compute the gradients of the logits, and from these that of the block's weights; then, for some blocks
// of classes at a time, tasks that have some rows each add up the gradient of the input.
//
// The second pass finds the logits of the first where those of some blocks of rows may be kept: these are then done
// with before the next are begun. Else it computes them again, for all rows together, as the weights and their gradient
// would have to be moved too often. Nothing depends on how many threads share the tasks.
template <class T>
class LinearCrossEntropy {
  using Real = ComputeType<T>;

 public:
  LinearCrossEntropy(const LinearCrossEntropyArgs& args, const ParallelFor& parallel)
      : args_(args),
        parallel_(parallel),
        features_(args.Features()),
        classes_(args.Classes()),
        blocks_(CeilDiv(classes_, kClasses)),
        weight_(args.weight ? args.weight->Data<Real>() : nullptr),
        softcap_(args.softcap),
        smooths_(args.label_smoothing != 0),
        coefficients_(CoefficientsOf(args, classes_, weight_)) {
    const auto* target = args.target.Data<int64_t>();
    for (int64_t row = 0; row < args.Rows(); ++row) {
      if (args.TakesAllRows() || target[row] != args.ignore_index) kept_.push_back(row);
    }
    if (args.linear_bias) {
      bias_ = Lines<Real>(classes_);
      GRADFUSE_DISPATCH(CopyRow<T, Real>)(args.linear_bias->Data<T>(), classes_, bias_.data());
    }
  }

  void Run() {
    const auto kept = static_cast<int64_t>(kept_.size());
    const int64_t step = RowsAtOnce(kept);
    if (args_.Wants(3)) bias_sums_.resize(static_cast<size_t>(classes_));
    for (begin_ = 0; begin_ < kept || begin_ == 0; begin_ += step) {
      rows_ = std::min(step, kept - begin_);
      RunRows();
    }
    Finish();
  }

 private:
  struct Scratch {
    Lines<Real> right;     // the weights of a block of classes
    Lines<Real> left;      // the gradients of a block of logits
    Lines<Real> gradient;  // of the weights of a block of classes, where it is not of type T
    Lines<Real> logits;    // of a block
  };

  // How many rows are done with before the next are begun; sets whether their logits are kept.
  int64_t RowsAtOnce(int64_t kept) {
    const int64_t size = blocks_ * kClasses * static_cast<int64_t>(sizeof(Real));  // of a row's logits
    const int64_t most = size * kRows <= kMostKept ? std::max(kRows, kUsuallyKept / size) : kUsuallyKept / size;
    // Sums of gradients that are rounded to 16 bits in between would lose what PyTorch has.
    keeps_ = kept <= most || (std::is_same_v<T, Real> && most >= kRows);
    if (!keeps_ || kept == 0) return std::max<int64_t>(kept, 1);
    const int64_t parts = CeilDiv(kept, most);
    return std::min(most, CeilDiv(CeilDiv(kept, parts), kTileRows) * kTileRows);
  }

  void RunRows() {
    const bool of_input = args_.Wants(1);
    const bool of_weight = args_.Wants(2);
    const bool of_bias = args_.Wants(3);
    if (begin_ == 0) {
      const int64_t between = ((keeps_ ? 0 : rows_) + features_) * kClasses * static_cast<int64_t>(sizeof(Real));
      together_ =
          std::clamp<int64_t>(kMostBetween / std::max<int64_t>(between, 1), 1, std::min(kMostTogether, blocks_));
      logits_ = Lines<Real>((keeps_ ? blocks_ : together_) * rows_ * kClasses);
    }
    PackInput(of_weight);
    FirstPass();
    AddLosses();
    if (of_input || of_weight || of_bias) SecondPass();
    if (of_input) WriteGradInput();
  }

  int64_t RowBlocks() const { return CeilDiv(rows_, kRows); }
  int64_t RowsOf(int64_t block) const { return std::min(kRows, rows_ - block * kRows); }
  int64_t ClassesOf(int64_t block) const { return std::min(kClasses, classes_ - block * kClasses); }
  int64_t Cost() const { return rows_ * classes_ * features_ / kProductsPerByte; }
  const T* WeightsOf(int64_t block) const { return args_.linear_weight.Data<T>() + block * kClasses * features_; }
  // The logits of a block of classes (rows, kClasses), and later their gradients, packed as a left factor.
  Real* LogitsOf(int64_t block) const {
    return logits_.data() + (keeps_ ? block : block % together_) * rows_ * kClasses;
  }

  // The input is packed as the left factor of the logits and as the right one of the gradient of the weights.
  void PackInput(bool of_weight) {
    const int64_t width = PackedRightSize<Real>(1, features_);
    left_ = Lines<Real>(rows_ * features_);
    if (of_weight) right_ = Lines<Real>(rows_ * width);
    const auto copy = GRADFUSE_DISPATCH(CopyRow<T, Real>);
    parallel_(RowBlocks(), args_.input.NumBytes(), [&](int64_t block) {
      const int64_t first = block * kRows;
      const int64_t count = RowsOf(block);
      std::vector<Real> gathered(static_cast<size_t>(count * features_));
      for (int64_t row = 0; row < count; ++row) {
        copy(args_.input.Data<T>() + RowAt(first + row) * features_, features_, gathered.data() + row * features_);
      }
      const Matrix<Real> rows{gathered.data(), features_, 1};
      PackLeft(rows, count, features_, left_.data() + first * features_);
      if (of_weight) PackRight(rows, count, features_, right_.data() + first * width);
    });
  }

  const Real* PackWeights(int64_t block, Scratch& scratch) const {
    Real* const packed = Reserve(scratch.right, PackedRightSize<Real>(features_, kClasses));
    PackRight(Matrix<T>{WeightsOf(block), 1, features_}, features_, ClassesOf(block), packed);
    return packed;
  }

  // Writes the logits of a block of rows and one of classes.
  void ComputeLogits(const Real* weights, int64_t row_block, int64_t block, Real* logits) const {
    MultiplyPacked(left_.data() + row_block * kRows * features_, weights, RowsOf(row_block), ClassesOf(block),
                   features_, logits, kClasses, /*adds=*/false);
    if (bias_.data() == nullptr && softcap_ == 0) return;
    const auto finish = GRADFUSE_DISPATCH(FinishLogits<Real>);
    const Real* const bias = bias_.data() == nullptr ? nullptr : bias_.data() + block * kClasses;
    for (int64_t row = 0; row < RowsOf(row_block); ++row) {
      finish(bias, softcap_, ClassesOf(block), logits + row * kClasses);
    }
  }

  void FirstPass() {
    sums_.resize(static_cast<size_t>(blocks_ * rows_));
    if (smooths_) weighted_.resize(sums_.size());
    target_logits_.resize(static_cast<size_t>(rows_));
    const auto sums_of = GRADFUSE_DISPATCH(SumsOf<Real>);
    const auto weighted_sum = GRADFUSE_DISPATCH(WeightedSum<Real>);
    parallel_(blocks_, Cost(), [&](int64_t block) {
      const FlushSubnormals flush;
      typename Pool<Scratch>::Loan scratch(pool_);
      const Real* const weights = PackWeights(block, *scratch.operator->());
      const int64_t first = block * kClasses;
      const int64_t count = ClassesOf(block);
      for (int64_t row_block = 0; row_block < RowBlocks(); ++row_block) {
        Real* logits =
            keeps_ ? LogitsOf(block) + row_block * kRows * kClasses : Reserve(scratch->logits, kRows * kClasses);
        ComputeLogits(weights, row_block, block, logits);
        for (int64_t row = row_block * kRows; row < row_block * kRows + RowsOf(row_block); ++row, logits += kClasses) {
          const auto place = static_cast<size_t>(block * rows_ + row);
          sums_[place] = sums_of(logits, count);
          if (smooths_) weighted_[place] = weighted_sum(logits, weight_ ? weight_ + first : nullptr, count);
          const int64_t label = LabelOf(row) - first;
          if (label >= 0 && label < count) target_logits_[static_cast<size_t>(row)] = logits[label];
        }
      }
    });
  }

  int64_t RowAt(int64_t row) const { return kept_[static_cast<size_t>(begin_ + row)]; }
  // -1 of rows that are ignored.
  int64_t LabelOf(int64_t row) const {
    const int64_t label = args_.target.Data<int64_t>()[RowAt(row)];
    return label == args_.ignore_index ? -1 : label;
  }

  // The largest logit of a row, and the logarithm of the sum of exp(logit - max).
  std::pair<Real, double> LogSumOf(int64_t row) const {
    Real max = -std::numeric_limits<Real>::infinity();
    const auto at = [&](int64_t block) -> const PartialSums<Real>& {
      return sums_[static_cast<size_t>(block * rows_ + row)];
    };
    for (int64_t block = 0; block < blocks_; ++block) max = std::max(max, at(block).max);
    double sum = 0;
    for (int64_t block = 0; block < blocks_; ++block) {
      sum += at(block).sum * std::exp(static_cast<double>(ShiftOf(at(block).max)) - ShiftOf(max));
    }
    return {max, std::log(sum)};
  }

  void AddLosses() {
    const bool per_row = args_.reduction == "none";
    const bool of_loss = args_.Wants(0);
    const T* const grad_loss = args_.grad_loss ? args_.grad_loss->Data<T>() : nullptr;
    const T* const grad_logsumexp = args_.grad_logsumexp ? args_.grad_logsumexp->Data<T>() : nullptr;
    T* const out = args_.loss.MutableData<T>();
    if (of_loss && per_row && begin_ == 0) std::fill(out, out + args_.Rows(), T{});
    terms_.resize(static_cast<size_t>(rows_));
    target_grads_.resize(static_cast<size_t>(rows_));
    const double smoothing = args_.label_smoothing;
    const double weight_sum = coefficients_.weight_sum;
    for (int64_t row = 0; row < rows_; ++row) {
      const auto place = static_cast<size_t>(row);
      const auto [max, log_sum] = LogSumOf(row);
      if (args_.Wants(4)) {
        args_.logsumexp.MutableData<T>()[RowAt(row)] = FromCompute<T>(static_cast<Real>(max + log_sum));
      }
      const double h = grad_logsumexp == nullptr ? 0 : ToCompute(grad_logsumexp[RowAt(row)]);
      if (LabelOf(row) < 0) {
        terms_[place] = {max, static_cast<Real>(h / std::exp(log_sum)), 0};
        continue;
      }
      const double label_weight = weight_ ? weight_[LabelOf(row)] : 1;
      const double log_prob = static_cast<double>(target_logits_[place]) - max - log_sum;
      double loss = -(1 - smoothing) * label_weight * log_prob;
      if (smooths_) {
        double weighted = 0;
        for (int64_t block = 0; block < blocks_; ++block) {
          weighted += weighted_[static_cast<size_t>(block * rows_ + row)];
        }
        loss += smoothing / static_cast<double>(classes_) * (weight_sum * (max + log_sum) - weighted);
      }
      total_ += loss;
      if (of_loss && per_row) out[RowAt(row)] = FromCompute<T>(static_cast<Real>(loss));
      const double g = grad_loss == nullptr ? 1 : ToCompute(grad_loss[per_row ? RowAt(row) : 0]);
      const double q = coefficients_.target * g * label_weight;
      const double s = smooths_ ? coefficients_.smoothing * g : 0;
      const double scale = (smooths_ ? q + s * weight_sum : q) + h;
      terms_[place] = {max, static_cast<Real>(scale / std::exp(log_sum)), static_cast<Real>(s)};
      // exp(log_prob) - 1 would cancel where the label is likely.
      double grad = q * std::expm1(log_prob);
      if (smooths_) grad += s * (std::exp(log_prob) * weight_sum - label_weight);
      if (grad_logsumexp != nullptr) grad += h * std::exp(log_prob);
      if (softcap_ != 0) {
        const double capped = target_logits_[place] / static_cast<double>(softcap_);
        grad *= 1 - capped * capped;
      }
      target_grads_[place] = static_cast<Real>(grad);
    }
  }

  void Finish() {
    if (args_.Wants(0) && args_.reduction != "none") {
      *args_.loss.MutableData<T>() = FromCompute<T>(static_cast<Real>(total_ / coefficients_.denominator));
    }
    for (size_t c = 0; c < bias_sums_.size(); ++c) {
      args_.grad_bias.MutableData<T>()[c] = FromCompute<T>(static_cast<Real>(bias_sums_[c]));
    }
  }

  void SecondPass() {
    const bool of_input = args_.Wants(1);
    if (of_input && begin_ == 0) {
      grad_input_ = Lines<Real>(rows_ * features_);
      packed_weights_ = Lines<Real>(together_ * PackedRightSize<Real>(kClasses, features_));
    }
    const int64_t parts = CeilDiv(features_, kFeatures);
    for (int64_t first = 0; first < blocks_; first += together_) {
      const int64_t count = std::min(together_, blocks_ - first);
      parallel_(count, 2 * Cost() * count / blocks_, [&](int64_t index) { OfClasses(first + index); });
      if (!of_input) continue;
      parallel_(CeilDiv(rows_, kRowsOfInput) * parts, Cost() * count / blocks_,
                [&](int64_t task) { OfInput(first, count, task / parts * kRowsOfInput, task % parts * kFeatures); });
    }
  }

  Real* PackedWeightsOf(int64_t block) const {
    return packed_weights_.data() + block % together_ * PackedRightSize<Real>(kClasses, features_);
  }

  // The gradients of the logits of a block of classes, and from them those of its weights and biases.
  void OfClasses(int64_t block) {
    const FlushSubnormals flush;
    typename Pool<Scratch>::Loan loan(pool_);
    Scratch& scratch = *loan.operator->();
    const auto gradients_of = GRADFUSE_DISPATCH(GradientsOf<Real>);
    const auto add_row = GRADFUSE_DISPATCH(AddRow<Real>);
    const int64_t first = block * kClasses;
    const int64_t count = ClassesOf(block);
    const int64_t width = PackedRightSize<Real>(1, features_);
    const bool of_weight = args_.Wants(2);
    const bool of_bias = args_.Wants(3);
    const Real* const weights = keeps_ ? nullptr : PackWeights(block, scratch);
    if (args_.Wants(1)) {
      for (int64_t feature = 0; feature < features_; feature += kFeatures) {
        PackRight(Matrix<T>{WeightsOf(block) + feature, features_, 1}, count, std::min(kFeatures, features_ - feature),
                  PackedWeightsOf(block) + feature * kClasses);
      }
    }
    Real* gradient = nullptr;
    if (of_weight) {
      if constexpr (std::is_same_v<T, Real>) {
        gradient = args_.grad_weight.MutableData<T>() + first * features_;
      } else {
        gradient = Reserve(scratch.gradient, kClasses * features_);
      }
      if (rows_ == 0) std::fill(gradient, gradient + count * features_, Real{0});
    }
    const bool weighted = smooths_ && weight_ != nullptr;
    for (int64_t row_block = 0; row_block < RowBlocks(); ++row_block) {
      const int64_t row_count = RowsOf(row_block);
      Real* const packed = LogitsOf(block) + row_block * kRows * kClasses;
      Real* const gradients = Reserve(scratch.logits, kRows * kClasses);
      if (!keeps_) ComputeLogits(weights, row_block, block, gradients);
      Real sums[kClasses] = {};
      for (int64_t i = 0; i < row_count; ++i) {
        const auto row = static_cast<size_t>(row_block * kRows + i);
        Real* const line = gradients + i * kClasses;
        const Real* const from = keeps_ ? packed + i * kClasses : line;
        gradients_of(terms_[row], from, weighted ? weight_ + first : nullptr, softcap_, count, line);
        const int64_t label = LabelOf(static_cast<int64_t>(row)) - first;
        if (label >= 0 && label < count) line[label] = target_grads_[row];
        if (of_bias) add_row(line, count, sums);
      }
      for (int64_t i = 0; args_.Wants(1) && i < row_count; i += kRowsOfInput) {
        PackLeft(Matrix<Real>{gradients + i * kClasses, kClasses, 1}, std::min(kRowsOfInput, row_count - i), count,
                 packed + i * kClasses);
      }
      for (int64_t c = 0; of_bias && c < count; ++c) bias_sums_[static_cast<size_t>(first + c)] += sums[c];
      if (!of_weight) continue;
      Real* const left = Reserve(scratch.left, kClasses * kRows);
      PackLeft(Matrix<Real>{gradients, 1, kClasses}, count, row_count, left);
      MultiplyPacked<Real>(left, right_.data() + row_block * kRows * width, count, features_, row_count, gradient,
                           features_, row_block > 0 || begin_ > 0);
    }
    if constexpr (!std::is_same_v<T, Real>) {
      if (of_weight) {
        GRADFUSE_DISPATCH(CopyRow<Real, T>)(gradient, count * features_,
                                            args_.grad_weight.MutableData<T>() + first * features_);
      }
    }
  }

  // Adds some blocks of classes to a part of the gradient of the input.
  void OfInput(int64_t first_block, int64_t count, int64_t row, int64_t feature) {
    const FlushSubnormals flush;
    for (int64_t block = first_block; block < first_block + count; ++block) {
      MultiplyPacked<Real>(LogitsOf(block) + row * kClasses, PackedWeightsOf(block) + feature * kClasses,
                           std::min(kRowsOfInput, rows_ - row), std::min(kFeatures, features_ - feature),
                           ClassesOf(block), grad_input_.data() + row * features_ + feature, features_, block > 0);
    }
  }

  void WriteGradInput() {
    T* const out = args_.grad_input.MutableData<T>();
    const auto copy = GRADFUSE_DISPATCH(CopyRow<Real, T>);
    if (begin_ == 0) std::fill(out, out + args_.Rows() * features_, T{});
    for (int64_t row = 0; row < rows_; ++row) {
      copy(grad_input_.data() + row * features_, features_, out + RowAt(row) * features_);
    }
  }

  const LinearCrossEntropyArgs& args_;
  const ParallelFor& parallel_;
  int64_t features_;
  int64_t classes_;
  int64_t blocks_;  // of classes
  const Real* weight_;
  Real softcap_;
  bool smooths_;
  CrossEntropyCoefficients coefficients_;
  std::vector<int64_t> kept_;  // the rows that are computed
  int64_t begin_ = 0;          // of those of them that are done at once
  int64_t rows_ = 0;           // how many these are
  bool keeps_ = false;         // their logits
  int64_t together_ = 1;       // blocks of classes in the second pass
  Lines<Real> bias_;
  Lines<Real> left_;   // the input
  Lines<Real> right_;  // the same
  Lines<Real> logits_;
  Lines<Real> packed_weights_;
  Lines<Real> grad_input_;
  std::vector<PartialSums<Real>> sums_;  // (blocks, rows)
  std::vector<double> weighted_;         // (blocks, rows): sums of logits times weights
  std::vector<Real> target_logits_;
  std::vector<RowTerms<Real>> terms_;
  std::vector<Real> target_grads_;
  std::vector<double> bias_sums_;
  double total_ = 0;
  Pool<Scratch> pool_;
};

}  // namespace

void Run(const LinearCrossEntropyArgs& args, const ParallelFor& parallel) {
  WithFloatType(args.input.dtype, [&](auto type) { LinearCrossEntropy<decltype(type)>(args, parallel).Run(); });
}

}  // namespace gradfuse::cpu
#endif  // HWY_ONCE
