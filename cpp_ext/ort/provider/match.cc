#include "ort/provider/match.h"

#include <array>
#include <cstdio>
#include <optional>

namespace gradfuse::gpu {
namespace {

// Domain, bus, device and function.
using Place = std::array<unsigned, 4>;

std::optional<Place> Parse(const std::string& pci_bus_id) {
  unsigned domain = 0;
  unsigned bus = 0;
  unsigned device = 0;
  unsigned function = 0;
  // NOLINTNEXTLINE(bugprone-unchecked-string-to-number-conversion): numbers that do not fit are no GPU's
  if (std::sscanf(pci_bus_id.c_str(), "%x:%x:%x.%x", &domain, &bus, &device, &function) != 4) return std::nullopt;
  return Place{domain, bus, device, function};
}

}  // namespace

std::vector<int> Match(const std::vector<std::string>& hardware, const std::vector<Info>& gpus) {
  std::vector<int> matches(hardware.size(), -1);
  std::vector<bool> taken(gpus.size(), false);
  for (size_t device = 0; device < hardware.size(); ++device) {
    const std::optional<Place> place = Parse(hardware[device]);
    for (size_t gpu = 0; place && gpu < gpus.size(); ++gpu) {
      // Parts of one GPU share its place.
      if (taken[gpu] || Parse(gpus[gpu].pci_bus_id) != place) continue;
      matches[device] = static_cast<int>(gpu);
      taken[gpu] = true;
      break;
    }
  }
  if (hardware.size() == 1 && gpus.size() == 1 && !Parse(hardware[0])) matches[0] = 0;
  return matches;
}

}  // namespace gradfuse::gpu
