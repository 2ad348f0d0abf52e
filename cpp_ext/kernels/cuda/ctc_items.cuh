#pragma once

#include "gradfuse/ops/ctc_loss.h"
#include "kernels/cuda/device.cuh"

// What the two CTC kernels know of their items: lengths and labels, whatever type and layout they come in, and checked,
// so that nothing that follows accesses memory out of bounds.
namespace gradfuse::cuda {

struct CtcItem {
  int64_t input_length;   // in [0, T]
  int64_t target_length;  // in [0, longest]
  int64_t first_label;    // in targets
  int64_t is_bad;         // it has a length or a label that is out of range: its results are NaN
};

// Lengths that are in host memory reach the device as arguments of a kernel: no copy has to wait, and none reads memory
// that the caller may free.
struct CtcHostLengths {
  static constexpr int kCount = 256;
  int64_t values[kCount];
};

struct CtcItems {
  int64_t steps;
  int64_t items;
  int64_t classes;
  int64_t blank;
  int64_t longest;  // room for the labels of an item
  const void* targets;
  DType target_type;
  bool joined;
  int64_t target_count;  // all labels, or those of an item's row
  const int64_t* input_lengths;
  const int64_t* target_lengths;
  int32_t* fault;
  int32_t targets_place;
  int32_t input_lengths_place;
  int32_t target_lengths_place;
  // Workspace.
  CtcItem* item;           // (N,)
  int64_t* labels;         // (N, longest)
  int64_t* copied_inputs;  // (N,) of lengths that the host has
  int64_t* copied_targets;
};

namespace ctc {

constexpr int kThreads = 256;

// Kernels that two files have must be templates.
template <class Void>
__global__ void CopyLengths(CtcHostLengths lengths, int64_t count, int64_t* out) {
  for (int64_t index = threadIdx.x; index < count; index += blockDim.x) out[index] = lengths.values[index];
}

template <class Void>
__global__ void __launch_bounds__(kThreads) FillItems(const __grid_constant__ CtcItems items) {
  const auto clamped = [&](int64_t length) { return length < 0 ? 0 : length < items.longest ? length : items.longest; };
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t index = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; index < items.items;
       index += stride) {
    const int64_t input_length = items.input_lengths[index];
    const int64_t target_length = items.target_lengths[index];
    CtcItem item{input_length, clamped(target_length), index * items.target_count, 0};
    if (input_length < 0 || input_length > items.steps) {
      item.input_length = input_length < 0 ? 0 : items.steps;
      item.is_bad = 1;
      SetFault(items.fault, items.input_lengths_place);
    }
    if (item.target_length != target_length) {
      item.is_bad = 1;
      SetFault(items.fault, items.target_lengths_place);
    }
    if (items.joined) {
      item.first_label = 0;
      for (int64_t other = 0; other < index; ++other) item.first_label += clamped(items.target_lengths[other]);
      const int64_t end = item.first_label + item.target_length;
      if (end > items.target_count) item.is_bad = 1;
      if (end > items.target_count || (index + 1 == items.items && end != items.target_count)) {
        SetFault(items.fault, items.targets_place);
      }
    }
    if (item.is_bad != 0) item.target_length = 0;
    items.item[index] = item;
  }
}

template <class Label>
__device__ double ValueOf(Label label) {
  return static_cast<double>(label);
}
template <>
__device__ inline double ValueOf(Half label) {
  return Widen(label);
}

template <class Label>
__global__ void __launch_bounds__(kThreads) FillLabels(const __grid_constant__ CtcItems items) {
  const Label* targets = static_cast<const Label*>(items.targets);
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t task = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; task < items.items * items.longest;
       task += stride) {
    const int64_t index = task / items.longest;
    const int64_t place = task - index * items.longest;
    if (place >= items.item[index].target_length) continue;
    const double value = ValueOf(targets[items.item[index].first_label + place]);
    const auto label = static_cast<int64_t>(value >= 0 && value < static_cast<double>(items.classes) ? value : -1.0);
    const bool fits = label >= 0 && static_cast<double>(label) == value;
    items.labels[task] = fits ? label : 0;
    if (!fits) {
      items.item[index].is_bad = 1;
      SetFault(items.fault, items.targets_place);
    }
  }
}

template <class Void>
Status Copy(const Queue& queue, const Tensor& lengths, int64_t* out) {
  for (int64_t first = 0; first < lengths.NumElements(); first += CtcHostLengths::kCount) {
    CtcHostLengths part;
    const int64_t count = std::min<int64_t>(lengths.NumElements() - first, CtcHostLengths::kCount);
    std::copy_n(lengths.Data<int64_t>() + first, count, part.values);
    GRADFUSE_RETURN_IF_ERROR(Launch(queue, CopyLengths<Void>, 1, kThreads, part, count, out + first));
  }
  return {};
}

}  // namespace ctc

// Of arguments of either op; `longest` bounds target_lengths, `place` is that of log_probs in the op's signature.
template <class Args>
CtcItems CtcItemsOf(const Args& args, int64_t longest, int32_t place, Workspace& workspace) {
  CtcItems items{};
  items.steps = args.log_probs.shape[0];
  items.items = args.log_probs.shape[1];
  items.classes = args.log_probs.shape[2];
  items.blank = args.blank;
  items.targets = args.targets.data;
  items.target_type = args.targets.dtype;
  items.joined = args.targets.shape.rank() == 1;
  items.target_count = args.targets.shape[items.joined ? 0 : 1];
  items.longest = std::min(longest, items.target_count);
  items.targets_place = place + 1;
  items.input_lengths_place = place + 2;
  items.target_lengths_place = place + 3;
  items.item = workspace.Array<CtcItem>(items.items);
  items.labels = workspace.Array<int64_t>(items.items * items.longest);
  items.copied_inputs = workspace.Array<int64_t>(args.input_lengths.on_host ? items.items : 0);
  items.copied_targets = workspace.Array<int64_t>(args.target_lengths.on_host ? items.items : 0);
  items.input_lengths = args.input_lengths.on_host ? items.copied_inputs : args.input_lengths.template Data<int64_t>();
  items.target_lengths =
      args.target_lengths.on_host ? items.copied_targets : args.target_lengths.template Data<int64_t>();
  return items;
}

// Fills what CtcItems points to.
template <class Args>
Status FillCtcItems(const Args& args, const CtcItems& items, const Queue& queue) {
  if (args.input_lengths.on_host) {
    GRADFUSE_RETURN_IF_ERROR(ctc::Copy<void>(queue, args.input_lengths, items.copied_inputs));
  }
  if (args.target_lengths.on_host) {
    GRADFUSE_RETURN_IF_ERROR(ctc::Copy<void>(queue, args.target_lengths, items.copied_targets));
  }
  GRADFUSE_RETURN_IF_ERROR(
      Launch(queue, ctc::FillItems<void>, CeilDiv(items.items, ctc::kThreads), ctc::kThreads, items));
  const int64_t blocks = CeilDiv(items.items * items.longest, ctc::kThreads);
  switch (items.target_type) {
    case DType::kInt32: return Launch(queue, ctc::FillLabels<int32_t>, blocks, ctc::kThreads, items);
    case DType::kBool: return Launch(queue, ctc::FillLabels<uint8_t>, blocks, ctc::kThreads, items);
    case DType::kFloat32: return Launch(queue, ctc::FillLabels<float>, blocks, ctc::kThreads, items);
    case DType::kFloat16: return Launch(queue, ctc::FillLabels<Half>, blocks, ctc::kThreads, items);
    default: return Launch(queue, ctc::FillLabels<int64_t>, blocks, ctc::kThreads, items);
  }
}

}  // namespace gradfuse::cuda
