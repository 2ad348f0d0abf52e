#pragma once

#include <cstdint>
#include <memory>

namespace gradfuse::cuda {

// A number that starts at 0, for Queue::fault: in host memory that the device writes to directly, so that the host can
// look at it at any time without waiting.
struct DeleteFault {
  void operator()(int32_t* fault) const;
};
using Fault = std::unique_ptr<int32_t, DeleteFault>;

// Null where there is no such memory to be had: then faults stay unreported.
Fault NewFault();

}  // namespace gradfuse::cuda
