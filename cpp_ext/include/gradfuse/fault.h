#pragma once

#include <cstdint>
#include <memory>

namespace gradfuse::cuda {

// The number behind Queue::fault, 0 at first. It is in host memory that the device writes to directly, so that the host
// can look at it at any time without waiting.
struct DeleteFault {
  void operator()(int32_t* fault) const;
};
using Fault = std::unique_ptr<int32_t, DeleteFault>;

// Returns null if there is no such memory. Faults then go unreported.
Fault NewFault();

}  // namespace gradfuse::cuda
