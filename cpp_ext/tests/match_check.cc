// Prints which GPUs hardware devices are taken for: tests/cpp_ext/test_execution_provider.py says what is right.

#include <cstdio>
#include <string>
#include <vector>

#include "ort/provider/match.h"

namespace {

void Show(const char* what, const std::vector<std::string>& hardware, const std::vector<std::string>& gpus) {
  std::vector<gradfuse::gpu::Info> infos;
  for (const std::string& place : gpus) infos.push_back({"GPU", place});
  std::printf("%s:", what);
  for (int gpu : gradfuse::gpu::Match(hardware, infos)) std::printf(" %d", gpu);
  std::printf("\n");
}

}  // namespace

int main() {
  Show("same order", {"0000:17:00.0", "0000:65:00.0"}, {"0000:17:00.0", "0000:65:00.0"});
  Show("other order", {"0000:17:00.0", "0000:65:00.0"}, {"0000:65:00.0", "0000:17:00.0"});
  Show("other spelling", {"0000:ca:00.0"}, {"00000000:CA:00.0"});
  Show("hidden from CUDA", {"0000:17:00.0", "0000:65:00.0"}, {"0000:65:00.0"});
  Show("parts of one GPU", {"0000:17:00.0"}, {"0000:17:00.0", "0000:17:00.0"});
  Show("one of each, place unknown", {""}, {"0000:17:00.0"});
  Show("two devices, places unknown", {"", ""}, {"0000:17:00.0"});
  Show("no GPU", {"0000:17:00.0"}, {});
  Show("no device", {}, {"0000:17:00.0"});
}
