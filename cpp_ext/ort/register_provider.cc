// The entrances for ONNX Runtime's onnxruntime.register_execution_provider_library.

#include <atomic>
#include <string>

#include "gradfuse/signature.h"
#include "ort/api.h"
#include "ort/domain.h"
#if defined(GRADFUSE_HAVE_CUDA) || defined(GRADFUSE_SIMT)
#include "ort/provider/provider.h"
#define GRADFUSE_HAVE_PROVIDER
#endif

struct OrtEpFactory;  // which headers before 1.22 do not know

// Makes the one factory of this library; none where it was built without CUDA kernels.
extern "C" __attribute__((visibility("default"))) OrtStatus* CreateEpFactories(const char*, const OrtApiBase* base,
                                                                               const OrtLogger* logger,
                                                                               OrtEpFactory** factories,
                                                                               size_t max_factories, size_t* count) {
  using namespace gradfuse;
  const uint32_t version = ort::ApiVersion(base->GetVersionString());
  const OrtApi& api = *base->GetApi(version);
  *count = 0;
  return ort::Guarded(api, [&]() -> Status {
#ifdef GRADFUSE_HAVE_PROVIDER
    GRADFUSE_EXPECT(ort::MinorVersion(base->GetVersionString()) >= ort::kProviderApi,
                    std::string(ort::kProviderName) + ": onnxruntime", base->GetVersionString(),
                    "1." + std::to_string(ort::kProviderApi) + " or newer");
    GRADFUSE_EXPECT(max_factories >= 1, std::string(ort::kProviderName) + ": room for factories", "0", "1");
    factories[0] = ort::NewProviderFactory(api, version, logger);
    *count = 1;
#else
    static_cast<void>(factories);
    static_cast<void>(max_factories);
    // ONNX Runtime asks a library without factories again.
    static std::atomic<bool> told{false};
    if (told.exchange(true)) return {};
    ort::ThrowIfError(api, api.Logger_LogMessage(
                               logger, ORT_LOGGING_LEVEL_WARNING,
                               "GradfuseCudaExecutionProvider offers no device: gradfuse was built without CUDA kernels",
                               ORT_FILE, __LINE__, "CreateEpFactories"));
#endif
    return {};
  });
}

extern "C" __attribute__((visibility("default"))) OrtStatus* ReleaseEpFactory(OrtEpFactory* factory) {
#ifdef GRADFUSE_HAVE_PROVIDER
  gradfuse::ort::DeleteProviderFactory(factory);
#else
  static_cast<void>(factory);
#endif
  return nullptr;
}
