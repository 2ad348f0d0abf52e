#include "capi/cuda_faults.h"

#include <string>
#include <utility>

#include "capi/error.h"

namespace gradfuse::capi {

int32_t* CudaFaults::CellOf(const void* stream, const Executor& executor) {
  const std::lock_guard lock(mutex_);
  std::vector<Cell>& cells = cells_[stream];
  for (const Cell& cell : cells) {
    if (cell.op == executor.op()) return cell.fault.get();
  }
  cells.push_back({executor.op(), executor.input_name(), cuda::NewFault()});
  return cells.back().fault.get();
}

void CudaFaults::ThrowAny(const void* stream) {
  std::string found;
  const std::lock_guard lock(mutex_);
  const auto cells = cells_.find(stream);
  if (cells == cells_.end()) return;
  for (const Cell& cell : cells->second) {
    // The device writes it behind the compiler's back.
    volatile int32_t* fault = cell.fault.get();
    if (fault == nullptr || *fault == 0) continue;
    if (found.empty()) found = std::string(cell.op) + ": " + cell.input_name(*fault);
    *fault = 0;
  }
  if (found.empty()) return;
  throw Error(ACLNN_ERR_PARAM_INVALID, found + " is out of range; expected values that the operator takes");
}

void CudaFaults::Forget(const void* stream) {
  const std::lock_guard lock(mutex_);
  cells_.erase(stream);
}

}  // namespace gradfuse::capi
