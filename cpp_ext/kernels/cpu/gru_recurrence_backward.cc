#include "gradfuse/ops/gru_recurrence_backward.h"

#include <algorithm>
#include <type_traits>
#include <vector>

#include "kernels/cpu/recurrence.h"
#include "kernels/cpu/targets.h"
#include "kernels/dispatch.h"
#include "kernels/recurrence.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/gru_recurrence_backward.cc"
#include "kernels/cpu/foreach_target.h"
#include "kernels/cpu/recurrence-inl.h"

// What the loops of all instruction sets share.
#ifndef GRADFUSE_GRU_RECURRENCE_BACKWARD_SHARED
#define GRADFUSE_GRU_RECURRENCE_BACKWARD_SHARED
namespace gradfuse::cpu {
namespace {

// A step, of all items and units. The gradient of its recurrent part goes on in float32.
template <class T>
struct GruBackwardStep {
  const T* grad_hidden;
  const T* h_before;
  const T* gates;
  const float* later;  // the gradient of the recurrent part of the step behind; null at the last
  const float* panels;
  float* grad_kept;  // of the state before, past the gates; comes in as what the step behind gives
  float* grad_gates;
  T* grad_input;
  T* grad_recurrent;
  int64_t units;
};

// What is behind the first step: the gradient of the first state.
template <class T>
struct GruBackwardEnd {
  const float* later;
  const float* panels;
  const float* grad_kept;
  T* grad_initial_h;
  int64_t units;
};

}  // namespace
}  // namespace gradfuse::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace gradfuse::cpu::HWY_NAMESPACE {
namespace {

template <class T>
void RunGruBackwardStep(const GruBackwardStep<T>& step, int64_t panel, int64_t first_row, int64_t rows) {
  const RowTag d;
  const int64_t units = step.units;
  const auto one = hn::Set(d, 1.0f);
  const auto use = [&](int64_t row, int64_t unit, hn::Vec<RowTag> from_later, auto at) HWY_ATTR {
    const int64_t place = row * units + unit;
    const auto gate = [&](int64_t k) HWY_ATTR { return Load(at, d, step.gates + (row * 4 + k) * units + unit); };
    const auto place_of = [&](int64_t k) HWY_ATTR { return (row * 3 + k) * units + unit; };
    const auto store = [&](int64_t k, hn::Vec<RowTag> value) HWY_ATTR {
      Store(at, value, d, step.grad_gates + place_of(k));
      if constexpr (!std::is_same_v<T, float>) Store(at, value, d, step.grad_recurrent + place_of(k));
    };
    const auto reset = gate(0);
    const auto update = gate(1);
    const auto new_state = gate(2);
    const auto kept = Load(at, d, step.grad_kept + place);
    const auto grad = Load(at, d, step.grad_hidden + place) + (kept + from_later);
    const auto moved = Load(at, d, step.h_before + place) - new_state;
    const auto grad_update = grad * moved * (update * (one - update));
    const auto grad_new = grad * (one - update) * hn::NegMulAdd(new_state, new_state, one);
    const auto grad_reset = grad_new * gate(3) * (reset * (one - reset));
    Store(at, grad_reset, d, step.grad_input + place_of(0));
    Store(at, grad_update, d, step.grad_input + place_of(1));
    Store(at, grad_new, d, step.grad_input + place_of(2));
    store(0, grad_reset);
    store(1, grad_update);
    store(2, grad_new * reset);
    Store(at, grad * update, d, step.grad_kept + place);
  };
  ForEachOfPanel(units, 3 * units, step.later, step.panels, panel, first_row, rows, use);
}

template <class T>
void RunGruBackwardEnd(const GruBackwardEnd<T>& end, int64_t panel, int64_t first_row, int64_t rows) {
  const RowTag d;
  const auto use = [&](int64_t row, int64_t unit, hn::Vec<RowTag> from_later, auto at) HWY_ATTR {
    const int64_t place = row * end.units + unit;
    Store(at, Load(at, d, end.grad_kept + place) + from_later, d, end.grad_initial_h + place);
  };
  ForEachOfPanel(end.units, 3 * end.units, end.later, end.panels, panel, first_row, rows, use);
}

}  // namespace
}  // namespace gradfuse::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace gradfuse::cpu {
namespace {

template <class T>
void RunTyped(const GruRecurrenceBackwardArgs& args, const ParallelFor& parallel) {
  const RecurrenceSizes size(args.grad_hidden.shape, 1);
  const int64_t units = size.units;
  const int64_t state = size.batch * units;
  if (state == 0) return;
  const int64_t width = GRADFUSE_DISPATCH(GradientPanelUnits)();
  const int64_t panels = CeilDiv(units, width);
  std::vector<float> packed(static_cast<size_t>(panels * width * 3 * units));
  const auto pack = GRADFUSE_DISPATCH(PackColumns<T>);
  parallel(panels, args.weight.NumBytes(),
           [&](int64_t panel) { pack(args.weight.Data<T>(), 3 * units, units, panel, packed.data()); });
  HandedOn<T> gates(args.grad_recurrent, 3 * state);
  std::vector<float> grad_kept(static_cast<size_t>(state));
  // From the end of the sequence on.
  const StepPlaces places(size.steps, args.reverse == 0);
  const auto run = GRADFUSE_DISPATCH(RunGruBackwardStep<T>);
  const auto end = GRADFUSE_DISPATCH(RunGruBackwardEnd<T>);
  const auto at = [](const Tensor& tensor, int64_t place, int64_t count) { return tensor.Data<T>() + place * count; };
  RecurrentTasks(size.steps + 1, size.batch, units, 3, panels)
      .Run(parallel, [&](int64_t t, int64_t panel, int64_t first_row, int64_t rows) {
        const float* later = t == 0 ? nullptr : gates.Before(t, places.At(t - 1));
        if (t == size.steps) {
          end({later, packed.data(), grad_kept.data(), args.grad_initial_h.MutableData<T>(), units}, panel, first_row,
              rows);
          return;
        }
        const int64_t place = places.At(t);
        const bool is_first = t + 1 == size.steps;
        run({at(args.grad_hidden, place, state),
             is_first ? args.initial_h.Data<T>() : at(args.hidden, places.At(t + 1), state),
             at(args.gates, place, 4 * state), later, packed.data(), grad_kept.data(), gates.After(t, place),
             args.grad_input.MutableData<T>() + place * 3 * state,
             args.grad_recurrent.MutableData<T>() + place * 3 * state, units},
            panel, first_row, rows);
      });
}

}  // namespace

void Run(const GruRecurrenceBackwardArgs& args, const ParallelFor& parallel) {
  WithShortFloatType(args.grad_hidden.dtype, [&](auto type) { RunTyped<decltype(type)>(args, parallel); });
}

}  // namespace gradfuse::cpu
#endif  // HWY_ONCE
