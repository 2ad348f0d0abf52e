#include "gradfuse/ops/lstm_recurrence.h"

#include <algorithm>
#include <type_traits>
#include <vector>

#include "kernels/cpu/recurrence.h"
#include "kernels/cpu/targets.h"
#include "kernels/dispatch.h"
#include "kernels/recurrence.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/lstm_recurrence.cc"
#include "kernels/cpu/foreach_target.h"
#include "kernels/cpu/recurrence-inl.h"

// What the loops of all instruction sets share.
#ifndef GRADFUSE_LSTM_RECURRENCE_SHARED
#define GRADFUSE_LSTM_RECURRENCE_SHARED
namespace gradfuse::cpu {
namespace {

// A step, of all items and units. The states are float32: those of other types have them beside the results.
template <class T>
struct LstmStep {
  const T* input;
  const float* bias;
  const float* panels;
  const float* h_before;
  const float* c_before;
  float* h_after;
  float* c_after;
  T* hidden;
  T* cell;
  T* gates;
  int64_t units;
};

}  // namespace
}  // namespace gradfuse::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace gradfuse::cpu::HWY_NAMESPACE {
namespace {

template <class T>
void RunLstmStep(const LstmStep<T>& step, int64_t panel, int64_t first_row, int64_t rows) {
  const RowTag d;
  const int64_t units = step.units;
  const int64_t first = panel * kRowLanes;
  const auto activate = [&](auto at, int64_t row, const float* sums) HWY_ATTR {
    const int64_t gate_place = row * 4 * units + first;
    const auto sum = [&](int64_t gate) HWY_ATTR {
      const auto shifted =
          Load(at, d, step.input + gate_place + gate * units) + Load(at, d, step.bias + gate * units + first);
      return shifted + hn::LoadU(d, sums + gate * kRowLanes);
    };
    const auto store = [&](int64_t gate, hn::Vec<RowTag> value)
                           HWY_ATTR { Store(at, value, d, step.gates + gate_place + gate * units); };
    const int64_t place = row * units + first;
    const auto input_gate = Sigmoid(d, sum(0));
    const auto forget_gate = Sigmoid(d, sum(1));
    const auto new_cell = Tanh(d, sum(2));
    const auto output_gate = Sigmoid(d, sum(3));
    store(0, input_gate);
    store(1, forget_gate);
    store(2, new_cell);
    store(3, output_gate);
    const auto cell = hn::MulAdd(forget_gate, Load(at, d, step.c_before + place), input_gate * new_cell);
    const auto hidden = output_gate * Tanh(d, cell);
    Store(at, cell, d, step.c_after + place);
    Store(at, hidden, d, step.h_after + place);
    if constexpr (!std::is_same_v<T, float>) {
      Store(at, cell, d, step.cell + place);
      Store(at, hidden, d, step.hidden + place);
    }
  };
  const float* weights = step.panels + panel * units * 4 * kRowLanes;
  MultiplyRows<4>(rows, step.h_before + first_row * units, units, units, weights,
                  [&](int64_t row, const float* sums) HWY_ATTR {
                    ForEachVector(d, std::min<int64_t>(kRowLanes, units - first),
                                  [&](int64_t, auto at) HWY_ATTR { activate(at, first_row + row, sums); });
                  });
}

}  // namespace
}  // namespace gradfuse::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace gradfuse::cpu {
namespace {

template <class T>
void RunTyped(const LstmRecurrenceArgs& args, const ParallelFor& parallel) {
  const RecurrenceSizes size(args.input.shape, 4);
  const int64_t units = size.units;
  const int64_t state = size.batch * units;
  if (state == 0 || size.steps == 0) return;
  const int64_t lanes = GRADFUSE_DISPATCH(RowLanes)();
  const int64_t panels = CeilDiv(units, lanes);
  std::vector<float> packed(static_cast<size_t>(panels * lanes * 4 * units));
  const auto pack = GRADFUSE_DISPATCH(PackByUnits<T, 4>);
  parallel(panels, args.weight.NumBytes(),
           [&](int64_t panel) { pack(args.weight.Data<T>(), units, panel, packed.data()); });
  const std::vector<float> bias = Widened<T>(args.bias, 4 * units);
  HandedOn<T> h(args.initial_h, args.hidden, state);
  HandedOn<T> c(args.initial_c, args.cell, state);
  const StepPlaces places(size.steps, args.reverse != 0);
  const auto run = GRADFUSE_DISPATCH(RunLstmStep<T>);
  RecurrentTasks(size.steps, size.batch, units, 4, panels)
      .Run(parallel, [&](int64_t t, int64_t panel, int64_t first_row, int64_t rows) {
        const int64_t place = places.At(t);
        const int64_t before = places.At(t - 1);
        run({args.input.Data<T>() + place * 4 * state, bias.data(), packed.data(), h.Before(t, before),
             c.Before(t, before), h.After(t, place), c.After(t, place), args.hidden.MutableData<T>() + place * state,
             args.cell.MutableData<T>() + place * state, args.gates.MutableData<T>() + place * 4 * state, units},
            panel, first_row, rows);
      });
}

}  // namespace

void Run(const LstmRecurrenceArgs& args, const ParallelFor& parallel) {
  WithShortFloatType(args.input.dtype, [&](auto type) { RunTyped<decltype(type)>(args, parallel); });
}

}  // namespace gradfuse::cpu
#endif  // HWY_ONCE
