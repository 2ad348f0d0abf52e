#include "gradfuse/ops/gru_recurrence.h"

#include <algorithm>
#include <type_traits>
#include <vector>

#include "kernels/cpu/recurrence.h"
#include "kernels/cpu/targets.h"
#include "kernels/dispatch.h"
#include "kernels/recurrence.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/gru_recurrence.cc"
#include "kernels/cpu/foreach_target.h"
#include "kernels/cpu/recurrence-inl.h"

// What the loops of all instruction sets share.
#ifndef GRADFUSE_GRU_RECURRENCE_SHARED
#define GRADFUSE_GRU_RECURRENCE_SHARED
namespace gradfuse::cpu {
namespace {

// A step, of all items and units. The state is float32: other types have it beside the result.
template <class T>
struct GruStep {
  const T* input;
  const float* bias;
  const float* panels;
  const float* h_before;
  float* h_after;
  T* hidden;
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
void RunGruStep(const GruStep<T>& step, int64_t panel, int64_t first_row, int64_t rows) {
  const RowTag d;
  const int64_t units = step.units;
  const int64_t first = panel * kRowLanes;
  const auto activate = [&](auto at, int64_t row, const float* sums) HWY_ATTR {
    const auto input = [&](int64_t gate)
                           HWY_ATTR { return Load(at, d, step.input + (row * 3 + gate) * units + first); };
    const auto recurrent = [&](int64_t gate) HWY_ATTR {
      return hn::LoadU(d, sums + gate * kRowLanes) + Load(at, d, step.bias + gate * units + first);
    };
    const auto store = [&](int64_t gate, hn::Vec<RowTag> value)
                           HWY_ATTR { Store(at, value, d, step.gates + (row * 4 + gate) * units + first); };
    const int64_t place = row * units + first;
    const auto reset = Sigmoid(d, input(0) + recurrent(0));
    const auto update = Sigmoid(d, input(1) + recurrent(1));
    const auto new_recurrent = recurrent(2);
    const auto new_state = Tanh(d, hn::MulAdd(reset, new_recurrent, input(2)));
    store(0, reset);
    store(1, update);
    store(2, new_state);
    store(3, new_recurrent);
    const auto hidden = hn::MulAdd(update, Load(at, d, step.h_before + place) - new_state, new_state);
    Store(at, hidden, d, step.h_after + place);
    if constexpr (!std::is_same_v<T, float>) Store(at, hidden, d, step.hidden + place);
  };
  const float* weights = step.panels + panel * units * 3 * kRowLanes;
  MultiplyRows<3>(rows, step.h_before + first_row * units, units, units, weights,
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
void RunTyped(const GruRecurrenceArgs& args, const ParallelFor& parallel) {
  const RecurrenceSizes size(args.input.shape, 3);
  const int64_t units = size.units;
  const int64_t state = size.batch * units;
  if (state == 0 || size.steps == 0) return;
  const int64_t lanes = GRADFUSE_DISPATCH(RowLanes)();
  const int64_t panels = CeilDiv(units, lanes);
  std::vector<float> packed(static_cast<size_t>(panels * lanes * 3 * units));
  const auto pack = GRADFUSE_DISPATCH(PackByUnits<T, 3>);
  parallel(panels, args.weight.NumBytes(),
           [&](int64_t panel) { pack(args.weight.Data<T>(), units, panel, packed.data()); });
  const std::vector<float> bias = Widened<T>(args.bias, 3 * units);
  HandedOn<T> h(args.initial_h, args.hidden, state);
  const StepPlaces places(size.steps, args.reverse != 0);
  const auto run = GRADFUSE_DISPATCH(RunGruStep<T>);
  RecurrentTasks(size.steps, size.batch, units, 3, panels)
      .Run(parallel, [&](int64_t t, int64_t panel, int64_t first_row, int64_t rows) {
        const int64_t place = places.At(t);
        run({args.input.Data<T>() + place * 3 * state, bias.data(), packed.data(), h.Before(t, places.At(t - 1)),
             h.After(t, place), args.hidden.MutableData<T>() + place * state,
             args.gates.MutableData<T>() + place * 4 * state, units},
            panel, first_row, rows);
      });
}

}  // namespace

void Run(const GruRecurrenceArgs& args, const ParallelFor& parallel) {
  WithShortFloatType(args.input.dtype, [&](auto type) { RunTyped<decltype(type)>(args, parallel); });
}

}  // namespace gradfuse::cpu
#endif  // HWY_ONCE
