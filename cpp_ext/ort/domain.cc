#include "ort/domain.h"

#include <algorithm>
#include <cstdio>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "kernels/embedding_dense_backward_add.h"
#include "ort/custom_op.h"
#include "ort/devices.h"
#include "ort/optimization_barrier.h"

namespace gradfuse::ort {

uint32_t MinorVersion(const char* runtime_version) {
  unsigned major = 0;
  unsigned minor = 0;
  // NOLINTNEXTLINE(bugprone-unchecked-string-to-number-conversion): no version has numbers that do not fit
  if (std::sscanf(runtime_version, "%u.%u", &major, &minor) != 2) return 0;
  return major > 1 ? std::numeric_limits<uint32_t>::max() : minor;
}

uint32_t ApiVersion(const char* runtime_version) {
  const uint32_t minor = MinorVersion(runtime_version);
  return minor == 0 ? kOldest : std::min<uint32_t>(minor, ORT_API_VERSION);
}

OrtCustomOpDomain* DomainFor(const OrtApi& api, uint32_t version) {
  struct Registration {
    std::vector<std::unique_ptr<CustomOp>> ops;
    Owned<OrtCustomOpDomain> domain;  // refers to ops
  };
  static std::mutex mutex;
  // Never destroyed: a session may outlive the destruction of static objects.
  static auto& registrations = *new std::map<const OrtApi*, Registration>;
  const std::lock_guard<std::mutex> lock(mutex);
  if (const auto found = registrations.find(&api); found != registrations.end()) return found->second.domain.get();

  Registration made{{}, {nullptr, api.ReleaseCustomOpDomain}};
  AppendAllCustomOps(api, version, made.ops);
  made.ops.push_back(MakeOptimizationBarrier(api, version));
  AppendCustomOps<EmbeddingDenseBackwardAddArgs, CpuDevice>(api, version, made.ops);
  OrtCustomOpDomain* domain = nullptr;
  ThrowIfError(api, api.CreateCustomOpDomain(kDomain, &domain));
  made.domain.reset(domain);
  for (const auto& op : made.ops) ThrowIfError(api, api.CustomOpDomain_Add(domain, op.get()));
  registrations.emplace(&api, std::move(made));
  return domain;
}

}  // namespace gradfuse::ort
