#include "gradfuse/ops/lstm_recurrence_backward.h"

#include <algorithm>
#include <type_traits>
#include <vector>

#include "kernels/cpu/recurrence.h"
#include "kernels/cpu/targets.h"
#include "kernels/dispatch.h"
#include "kernels/recurrence.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/lstm_recurrence_backward.cc"
#include "kernels/cpu/foreach_target.h"
#include "kernels/cpu/recurrence-inl.h"

// What the loops of all instruction sets share.
#ifndef GRADFUSE_LSTM_RECURRENCE_BACKWARD_SHARED
#define GRADFUSE_LSTM_RECURRENCE_BACKWARD_SHARED
namespace gradfuse::cpu {
namespace {

// A step, of all items and units. The gradient of its gates goes on in float32.
template <class T>
struct LstmBackwardStep {
  const T* grad_hidden;
  const T* grad_cell;  // or null
  const T* cell_before;
  const T* cell;
  const T* gates;
  const float* later;  // the gradient of the gates of the step behind; null at the last
  const float* panels;
  float* grad_cell_before;  // comes in as what the step behind gives
  float* grad_gates;
  T* grad_input;
  int64_t units;
};

// What is behind the first step: the gradients of the first states.
template <class T>
struct LstmBackwardEnd {
  const float* later;
  const float* panels;
  const float* grad_cell_before;
  T* grad_initial_h;
  T* grad_initial_c;
  int64_t units;
};

}  // namespace
}  // namespace gradfuse::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace gradfuse::cpu::HWY_NAMESPACE {
namespace {

template <class T>
void RunLstmBackwardStep(const LstmBackwardStep<T>& step, int64_t panel, int64_t first_row, int64_t rows) {
  const RowTag d;
  const int64_t units = step.units;
  const auto one = hn::Set(d, 1.0f);
  const auto use = [&](int64_t row, int64_t unit, hn::Vec<RowTag> from_later, auto at) HWY_ATTR {
    const int64_t place = row * units + unit;
    const int64_t gate_place = row * 4 * units + unit;
    const auto gate = [&](int64_t k) HWY_ATTR { return Load(at, d, step.gates + gate_place + k * units); };
    const auto store = [&](int64_t k, hn::Vec<RowTag> value) HWY_ATTR {
      Store(at, value, d, step.grad_gates + gate_place + k * units);
      if constexpr (!std::is_same_v<T, float>) Store(at, value, d, step.grad_input + gate_place + k * units);
    };
    const auto input_gate = gate(0);
    const auto forget_gate = gate(1);
    const auto new_cell = gate(2);
    const auto output_gate = gate(3);
    const auto shown = Tanh(d, Load(at, d, step.cell + place));
    const auto grad_hidden = Load(at, d, step.grad_hidden + place) + from_later;
    const auto grad_shown = grad_hidden * output_gate;
    auto grad_cell = Load(at, d, step.grad_cell_before + place);
    if (step.grad_cell != nullptr) grad_cell = grad_cell + Load(at, d, step.grad_cell + place);
    grad_cell = hn::MulAdd(grad_shown, hn::NegMulAdd(shown, shown, one), grad_cell);
    store(0, grad_cell * new_cell * (input_gate * (one - input_gate)));
    store(1, grad_cell * Load(at, d, step.cell_before + place) * (forget_gate * (one - forget_gate)));
    store(2, grad_cell * input_gate * hn::NegMulAdd(new_cell, new_cell, one));
    store(3, grad_hidden * shown * (output_gate * (one - output_gate)));
    Store(at, grad_cell * forget_gate, d, step.grad_cell_before + place);
  };
  ForEachOfPanel(units, 4 * units, step.later, step.panels, panel, first_row, rows, use);
}

template <class T>
void RunLstmBackwardEnd(const LstmBackwardEnd<T>& end, int64_t panel, int64_t first_row, int64_t rows) {
  const RowTag d;
  const auto use = [&](int64_t row, int64_t unit, hn::Vec<RowTag> from_later, auto at) HWY_ATTR {
    const int64_t place = row * end.units + unit;
    Store(at, from_later, d, end.grad_initial_h + place);
    Store(at, Load(at, d, end.grad_cell_before + place), d, end.grad_initial_c + place);
  };
  ForEachOfPanel(end.units, 4 * end.units, end.later, end.panels, panel, first_row, rows, use);
}

}  // namespace
}  // namespace gradfuse::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace gradfuse::cpu {
namespace {

template <class T>
void RunTyped(const LstmRecurrenceBackwardArgs& args, const ParallelFor& parallel) {
  const RecurrenceSizes size(args.grad_hidden.shape, 1);
  const int64_t units = size.units;
  const int64_t state = size.batch * units;
  if (state == 0) return;
  const int64_t width = GRADFUSE_DISPATCH(GradientPanelUnits)();
  const int64_t panels = CeilDiv(units, width);
  std::vector<float> packed(static_cast<size_t>(panels * width * 4 * units));
  const auto pack = GRADFUSE_DISPATCH(PackColumns<T>);
  parallel(panels, args.weight.NumBytes(),
           [&](int64_t panel) { pack(args.weight.Data<T>(), 4 * units, units, panel, packed.data()); });
  HandedOn<T> gates(args.grad_input, 4 * state);
  std::vector<float> grad_cell_before(static_cast<size_t>(state));
  // From the end of the sequence on.
  const StepPlaces places(size.steps, args.reverse == 0);
  const auto run = GRADFUSE_DISPATCH(RunLstmBackwardStep<T>);
  const auto end = GRADFUSE_DISPATCH(RunLstmBackwardEnd<T>);
  const auto at = [](const Tensor& tensor, int64_t place, int64_t count) { return tensor.Data<T>() + place * count; };
  RecurrentTasks(size.steps + 1, size.batch, units, 4, panels)
      .Run(parallel, [&](int64_t t, int64_t panel, int64_t first_row, int64_t rows) {
        const float* later = t == 0 ? nullptr : gates.Before(t, places.At(t - 1));
        if (t == size.steps) {
          end({later, packed.data(), grad_cell_before.data(), args.grad_initial_h.MutableData<T>(),
               args.grad_initial_c.MutableData<T>(), units},
              panel, first_row, rows);
          return;
        }
        const int64_t place = places.At(t);
        const bool is_first = t + 1 == size.steps;
        run({at(args.grad_hidden, place, state), args.grad_cell ? at(*args.grad_cell, place, state) : nullptr,
             is_first ? args.initial_c.Data<T>() : at(args.cell, places.At(t + 1), state), at(args.cell, place, state),
             at(args.gates, place, 4 * state), later, packed.data(), grad_cell_before.data(), gates.After(t, place),
             args.grad_input.MutableData<T>() + place * 4 * state, units},
            panel, first_row, rows);
      });
}

}  // namespace

void Run(const LstmRecurrenceBackwardArgs& args, const ParallelFor& parallel) {
  WithShortFloatType(args.grad_hidden.dtype, [&](auto type) { RunTyped<decltype(type)>(args, parallel); });
}

}  // namespace gradfuse::cpu
#endif  // HWY_ONCE
