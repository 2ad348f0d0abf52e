#include "ort/provider/match.h"

#include <array>
#include <cstdio>
#include <optional>

namespace gradfuse::gpu {
namespace {

// Domain, bus, device and function.
using Place = std::array<unsigned, 4>;

std::optional<Place> Parse(const std::string& pci_bus_id) {
  Place place;
  if (std::sscanf(pci_bus_id.c_str(), "%x:%x:%x.%x", &place[0], &place[1], &place[2], &place[3]) == 4) return place;
  return std::nullopt;
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
