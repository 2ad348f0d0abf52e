// The entrance for ONNX Runtime: SessionOptions.register_custom_ops_library.

#include <string>

#include "gradfuse/signature.h"
#include "kernels/cpu/targets.h"
#include "ort/api.h"
#include "ort/domain.h"
#include "ort/shared_allocator.h"

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
    ort::UseMemoryPool(api, version, options);
    // Where the execution provider of this library was chosen before, it has brought the domain.
    int chosen = 0;
    ort::ThrowIfError(api, api.HasSessionConfigEntry(options, "ep.gradfusecudaexecutionprovider.cuda_device", &chosen));
    if (chosen != 0) return {};
    ort::ThrowIfError(api, api.AddCustomOpDomain(options, ort::DomainFor(api, version)));
    return {};
  });
}
