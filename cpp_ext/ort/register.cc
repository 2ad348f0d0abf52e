// The entrance for ONNX Runtime: SessionOptions.register_custom_ops_library.

#include <algorithm>
#include <cstdio>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "kernels/cpu/targets.h"
#include "ort/api.h"
#include "ort/custom_op.h"
#include "ort/devices.h"

namespace gradfuse::ort {
namespace {

constexpr char kDomain[] = "aclnn";
constexpr uint32_t kOldest = 18;  // minor version of the oldest ONNX Runtime that has all that is called
static_assert(ORT_API_VERSION >= kOldest, "onnxruntime_c_api.h is too old");

// The newest API that both the headers of this build and the runtime know.
uint32_t ApiVersion(const char* runtime_version) {
  unsigned major = 0;
  unsigned minor = 0;
  if (std::sscanf(runtime_version, "%u.%u", &major, &minor) != 2) return kOldest;
  return major > 1 ? ORT_API_VERSION : std::min<uint32_t>(minor, ORT_API_VERSION);
}

// The domain and its ops, made once for a runtime: sessions refer to them for as long as they live.
OrtCustomOpDomain* DomainFor(const OrtApi& api, uint32_t version) {
  struct Registration {
    OrtCustomOpDomain* domain = nullptr;
    std::vector<std::unique_ptr<CustomOp>> ops;
  };
  static std::mutex mutex;
  // Never destroyed: a session may outlive the destruction of static objects.
  static auto& registrations = *new std::map<const OrtApi*, Registration>;
  const std::lock_guard<std::mutex> lock(mutex);
  if (const auto found = registrations.find(&api); found != registrations.end()) return found->second.domain;

  Registration made;
  AppendAllCustomOps(api, version, made.ops);
  ThrowIfError(api, api.CreateCustomOpDomain(kDomain, &made.domain));
  for (const auto& op : made.ops) ThrowIfError(api, api.CustomOpDomain_Add(made.domain, op.get()));
  return registrations.emplace(&api, std::move(made)).first->second.domain;
}

}  // namespace
}  // namespace gradfuse::ort

extern "C" __attribute__((visibility("default"))) OrtStatus* ORT_API_CALL RegisterCustomOps(OrtSessionOptions* options,
                                                                                            const OrtApiBase* base) {
  using namespace gradfuse;
  const char* runtime_version = base->GetVersionString();
  const uint32_t version = ort::ApiVersion(runtime_version);
  const OrtApi& api = *base->GetApi(version);
  return ort::Guarded(api, [&]() -> Status {
    GRADFUSE_EXPECT(version >= ort::kOldest, "gradfuse: onnxruntime", runtime_version,
                    "1." + std::to_string(ort::kOldest) + " or newer");
    GRADFUSE_RETURN_IF_ERROR(cpu::CheckTargetVariable());
    ort::ThrowIfError(api, api.AddCustomOpDomain(options, ort::DomainFor(api, version)));
    return {};
  });
}
