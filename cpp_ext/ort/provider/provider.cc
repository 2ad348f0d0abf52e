#include "ort/provider/provider.h"

#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ort/custom_op.h"
#include "ort/domain.h"
#include "ort/provider/gpu.h"
#include "ort/provider/match.h"
#include "ort/provider/stream.h"

#ifndef GRADFUSE_VERSION
#error "GRADFUSE_VERSION is what plugin/gradfuse/__init__.py says: whoever compiles this file has to define it"
#endif

namespace gradfuse::ort {
namespace {

constexpr char kPciBusIdKey[] = "pci_bus_id";     // of a hardware device's metadata
constexpr char kDeviceNameKey[] = "device_name";  // of both

class Factory : public ProviderFactory {
 public:
  Factory(const OrtApi& api, uint32_t version, const OrtLogger* logger);
  ~Factory() = default;
  Factory(const Factory&) = delete;
  Factory& operator=(const Factory&) = delete;

  static Factory& From(OrtEpFactory* factory) { return *static_cast<Factory*>(factory); }

  const OrtApi& api() const { return api_; }
  const ProviderApi& provider_api() const { return provider_api_; }
  const KernelRegistry* kernels() const { return kernels_.get(); }
  // The memory of a GPU; null for what is none of ours, such as the host's.
  GpuMemory* MemoryOf(const OrtMemoryDevice* device) const;
  bool IsHost(const OrtMemoryDevice* device) const {
    return provider_api_.MemoryDevice_GetDeviceType(device) == OrtMemoryInfoDeviceType_CPU;
  }
  // Copies a tensor between host and a GPU, or on a GPU, in the order of a stream. What is copied to the host, or
  // without a stream, is there when this returns: ONNX Runtime does not wait for every output of a node in a subgraph.
  void CopyTensor(const OrtValue* from, OrtValue* to, void* stream) const;

 private:
  Status FindDevices(const OrtHardwareDevice* const* hardware, size_t hardware_count, OrtEpDevice** devices,
                     size_t max_devices, size_t& count);
  Status CheckOptions(const OrtSessionOptions* options, const OrtKeyValuePairs* metadata) const;
  const OrtHardwareDevice* NewHardwareDevice(const gpu::Info& gpu);
  Owned<OrtEpDevice> NewDevice(const OrtHardwareDevice* hardware, const gpu::Info& gpu, int number);
  GpuMemory& MemoryOf(int gpu);
  void AddCopyKernel(const char* op, OrtMemType input, OrtMemType output);

  const OrtApi& api_;
  const ProviderApi& provider_api_;
  const OrtLogger* logger_;
  OrtCustomOpDomain* domain_;  // lives forever
  Owned<KernelRegistry> kernels_;
  std::vector<Owned<OrtHardwareDevice>> hardware_;  // that ONNX Runtime has not found itself
  std::map<int, std::unique_ptr<GpuMemory>> memories_;
};

// Strings by key, until they are handed over.
class KeyValuePairs {
 public:
  explicit KeyValuePairs(const OrtApi& api) : api_(api), pairs_(nullptr, api.ReleaseKeyValuePairs) {
    OrtKeyValuePairs* pairs = nullptr;
    api.CreateKeyValuePairs(&pairs);
    pairs_.reset(pairs);
  }

  void Add(const char* key, const std::string& value) { api_.AddKeyValuePair(pairs_.get(), key, value.c_str()); }
  const OrtKeyValuePairs* get() const { return pairs_.get(); }

 private:
  const OrtApi& api_;
  Owned<OrtKeyValuePairs> pairs_;
};

// Copies tensors outside of a session's graph: its inputs, outputs and constants, and those of I/O bindings.
class Transfer : public OrtDataTransferImpl {
 public:
  explicit Transfer(const Factory& factory) : OrtDataTransferImpl{}, factory_(factory) {
    ort_version_supported = kProviderApi;
    Release = [](OrtDataTransferImpl* self) noexcept { delete static_cast<Transfer*>(self); };
    CanCopy = [](const OrtDataTransferImpl* self, const OrtMemoryDevice* from, const OrtMemoryDevice* to) noexcept {
      const Factory& ours = static_cast<const Transfer*>(self)->factory_;
      const GpuMemory* const source = ours.MemoryOf(from);
      const GpuMemory* const target = ours.MemoryOf(to);
      // Not from GPU to GPU: what that takes differs from machine to machine.
      if (source != nullptr && target != nullptr) return source == target;
      return (source != nullptr && ours.IsHost(to)) || (target != nullptr && ours.IsHost(from));
    };
    CopyTensors = [](OrtDataTransferImpl* self, const OrtValue** from, OrtValue** to, OrtSyncStream** streams,
                     size_t count) noexcept {
      const Factory& ours = static_cast<Transfer*>(self)->factory_;
      return Guarded(ours.api(), [&]() -> Status {
        for (size_t index = 0; index < count; ++index) {
          OrtSyncStream* stream = streams == nullptr ? nullptr : streams[index];
          ours.CopyTensor(from[index], to[index],
                          stream == nullptr ? nullptr : ours.api().SyncStream_GetHandle(stream));
        }
        return {};
      });
    };
  }

 private:
  const Factory& factory_;
};

// The kernel of the nodes that ONNX Runtime puts where a tensor crosses the border of a node of ours.
class CopyKernel : public KernelImpl {
 public:
  explicit CopyKernel(const Factory& factory) : KernelImpl{}, factory_(factory) {
    ort_version_supported = kProviderApi;
    Release = [](KernelImpl* self) noexcept { delete static_cast<CopyKernel*>(self); };
    Compute = [](KernelImpl* self, OrtKernelContext* context) noexcept {
      const Factory& ours = static_cast<CopyKernel*>(self)->factory_;
      return Guarded(ours.api(), [&]() -> Status { return Copy(ours, context); });
    };
  }

 private:
  static Status Copy(const Factory& ours, OrtKernelContext* context) {
    const OrtApi& api = ours.api();
    const OrtValue* from = nullptr;
    ThrowIfError(api, api.KernelContext_GetInput(context, 0, &from));
    const std::vector<int64_t> dims = DimsOf(api, from);
    OrtValue* to = nullptr;
    ThrowIfError(api, api.KernelContext_GetOutput(context, 0, dims.data(), dims.size(), &to));
    void* stream = nullptr;
    ThrowIfError(api, api.KernelContext_GetGPUComputeStream(context, &stream));
    ours.CopyTensor(from, to, stream);
    return {};
  }

  const Factory& factory_;
};

// The provider in one session: it takes the nodes that it has kernels for, each for itself.
class SessionProvider : public Provider {
 public:
  explicit SessionProvider(const Factory& factory) : Provider{}, factory_(factory) {
    ort_version_supported = kProviderApi;
    GetName = [](const OrtEp*) noexcept { return kProviderName; };
    GetKernelRegistry = [](OrtEp* self, const KernelRegistry** kernels) noexcept -> OrtStatus* {
      *kernels = static_cast<SessionProvider*>(self)->factory_.kernels();
      return nullptr;
    };
    GetCapability = [](OrtEp* self, const OrtGraph* graph, OrtEpGraphSupportInfo* claimed) noexcept {
      const Factory& ours = static_cast<SessionProvider*>(self)->factory_;
      return Guarded(ours.api(), [&]() -> Status {
        Claim(ours, graph, claimed);
        return {};
      });
    };
  }

 private:
  static void Claim(const Factory& ours, const OrtGraph* graph, OrtEpGraphSupportInfo* claimed) {
    const OrtApi& api = ours.api();
    size_t count = 0;
    ThrowIfError(api, api.Graph_GetNumNodes(graph, &count));
    std::vector<const OrtNode*> nodes(count);
    ThrowIfError(api, api.Graph_GetNodes(graph, nodes.data(), count));
    for (const OrtNode* node : nodes) {
      const char* domain = nullptr;
      ThrowIfError(api, api.Node_GetDomain(node, &domain));
      if (std::strcmp(domain, kDomain) != 0) continue;
      const KernelDef* kernel = nullptr;
      ThrowIfError(api, ours.provider_api().EpGraphSupportInfo_LookUpKernel(claimed, node, &kernel));
      if (kernel == nullptr) continue;
      ThrowIfError(api, ours.provider_api().EpGraphSupportInfo_AddSingleNode(claimed, node));
    }
  }

  const Factory& factory_;
};

Factory::Factory(const OrtApi& api, uint32_t version, const OrtLogger* logger)
    : ProviderFactory{},
      api_(api),
      provider_api_(*static_cast<const ProviderApi*>(api.GetEpApi())),
      logger_(logger),
      domain_(DomainFor(api, version)),
      kernels_(nullptr, provider_api_.ReleaseKernelRegistry) {
  KernelRegistry* kernels = nullptr;
  ThrowIfError(api, provider_api_.CreateKernelRegistry(&kernels));
  kernels_.reset(kernels);
  AddCopyKernel("MemcpyFromHost", OrtMemTypeCPUInput, OrtMemTypeDefault);
  AddCopyKernel("MemcpyToHost", OrtMemTypeDefault, OrtMemTypeCPUOutput);

  ort_version_supported = kProviderApi;
  GetName = [](const OrtEpFactory*) noexcept { return kProviderName; };
  GetVendor = [](const OrtEpFactory*) noexcept { return "gradfuse"; };
  GetVendorId = [](const OrtEpFactory*) noexcept { return kNvidia; };
  GetVersion = [](const OrtEpFactory*) noexcept { return GRADFUSE_VERSION; };
  GetSupportedDevices = [](OrtEpFactory* self, const OrtHardwareDevice* const* hardware, size_t hardware_count,
                           OrtEpDevice** devices, size_t max_devices, size_t* count) noexcept {
    *count = 0;
    return Guarded(From(self).api_, [&]() -> Status {
      return From(self).FindDevices(hardware, hardware_count, devices, max_devices, *count);
    });
  };
  CreateEp = [](OrtEpFactory* self, const OrtHardwareDevice* const*, const OrtKeyValuePairs* const* metadata,
                size_t count, const OrtSessionOptions* options, const OrtLogger*, OrtEp** provider) noexcept {
    return Guarded(From(self).api_, [&]() -> Status {
      GRADFUSE_EXPECT(count == 1, std::string(kProviderName) + ": the number of devices", std::to_string(count),
                      "1: a session runs on one GPU");
      GRADFUSE_RETURN_IF_ERROR(From(self).CheckOptions(options, metadata[0]));
      *provider = std::make_unique<SessionProvider>(From(self)).release();
      return {};
    });
  };
  ReleaseEp = [](OrtEpFactory*, OrtEp* provider) noexcept { delete static_cast<SessionProvider*>(provider); };
  CreateAllocator = [](OrtEpFactory* self, const OrtMemoryInfo* info, const OrtKeyValuePairs*,
                       OrtAllocator** allocator) noexcept {
    return Guarded(From(self).api_, [&]() -> Status {
      // One for all sessions: it lives as long as the factory.
      *allocator = From(self).MemoryOf(From(self).provider_api_.MemoryInfo_GetMemoryDevice(info));
      return {};
    });
  };
  ReleaseAllocator = [](OrtEpFactory*, OrtAllocator*) noexcept {};
  CreateDataTransfer = [](OrtEpFactory* self, OrtDataTransferImpl** transfer) noexcept {
    return Guarded(From(self).api_, [&]() -> Status {
      *transfer = std::make_unique<Transfer>(From(self)).release();
      return {};
    });
  };
  IsStreamAware = [](const OrtEpFactory*) noexcept { return true; };
  CreateSyncStreamForDevice = [](OrtEpFactory* self, const OrtMemoryDevice* device, const OrtKeyValuePairs*,
                                 OrtSyncStreamImpl** stream) noexcept {
    return Guarded(From(self).api_, [&]() -> Status {
      *stream = NewSyncStream(From(self).api_, *From(self).MemoryOf(device));
      return {};
    });
  };
  GetNumCustomOpDomains = [](OrtEpFactory*, size_t* count) noexcept -> OrtStatus* {
    *count = 1;
    return nullptr;
  };
  GetCustomOpDomains = [](OrtEpFactory* self, OrtCustomOpDomain** domains, size_t) noexcept -> OrtStatus* {
    domains[0] = From(self).domain_;
    return nullptr;
  };
}

void Factory::AddCopyKernel(const char* op, OrtMemType input, OrtMemType output) {
  KernelDefBuilder* builder = nullptr;
  ThrowIfError(api_, provider_api_.CreateKernelDefBuilder(&builder));
  const Owned<KernelDefBuilder> owner(builder, provider_api_.ReleaseKernelDefBuilder);
  // All that inputs and outputs of our operators can be.
  std::vector<const DataType*> types;
  for (DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kFloat64, DType::kInt32, DType::kInt64,
                      DType::kBool, DType::kUInt8}) {
    ThrowIfError(api_, provider_api_.GetTensorDataType(ToOnnx(dtype), &types.emplace_back()));
  }
  ThrowIfError(api_, provider_api_.KernelDefBuilder_SetOperatorType(builder, op));
  ThrowIfError(api_, provider_api_.KernelDefBuilder_SetDomain(builder, ""));
  ThrowIfError(api_, provider_api_.KernelDefBuilder_SetSinceVersion(builder, 1, 1));
  ThrowIfError(api_, provider_api_.KernelDefBuilder_SetExecutionProvider(builder, kProviderName));
  ThrowIfError(api_, provider_api_.KernelDefBuilder_SetInputMemType(builder, 0, input));
  ThrowIfError(api_, provider_api_.KernelDefBuilder_SetOutputMemType(builder, 0, output));
  ThrowIfError(api_, provider_api_.KernelDefBuilder_AddTypeConstraint(builder, "T", types.data(), types.size()));
  KernelDef* kernel = nullptr;
  ThrowIfError(api_, provider_api_.KernelDefBuilder_Build(builder, &kernel));
  const Owned<KernelDef> kernel_owner(kernel, provider_api_.ReleaseKernelDef);
  const auto create = [](void* self, const OrtKernelInfo*, KernelImpl** made) noexcept {
    const Factory& ours = *static_cast<Factory*>(self);
    return Guarded(ours.api_, [&]() -> Status {
      *made = std::make_unique<CopyKernel>(ours).release();
      return {};
    });
  };
  ThrowIfError(api_, provider_api_.KernelRegistry_AddKernel(kernels_.get(), kernel, create, this));
}

Status Factory::FindDevices(const OrtHardwareDevice* const* hardware, size_t hardware_count, OrtEpDevice** devices,
                            size_t max_devices, size_t& count) {
  std::string why_none;
  const std::vector<gpu::Info> gpus = gpu::List(why_none);
  if (gpus.empty()) {
    const std::string message = std::string(kProviderName) + " offers no device: " + why_none;
    return Succeeded(api_, api_.Logger_LogMessage(logger_, ORT_LOGGING_LEVEL_WARNING, message.c_str(), ORT_FILE,
                                                  __LINE__, __func__))
               ? Status()
               : Status(StatusCode::kFailed, message);
  }
  std::vector<const OrtHardwareDevice*> found;
  std::vector<std::string> places;
  for (size_t index = 0; index < hardware_count; ++index) {
    if (api_.HardwareDevice_Type(hardware[index]) != OrtHardwareDeviceType_GPU) continue;
    if (api_.HardwareDevice_VendorId(hardware[index]) != kNvidia) continue;
    const char* place = api_.GetKeyValue(api_.HardwareDevice_Metadata(hardware[index]), kPciBusIdKey);
    found.push_back(hardware[index]);
    places.emplace_back(place == nullptr ? "" : place);
  }
  std::vector<const OrtHardwareDevice*> device_of(gpus.size(), nullptr);
  const std::vector<int> matches = gpu::Match(places, gpus);
  for (size_t index = 0; index < found.size(); ++index) {
    if (matches[index] >= 0) device_of[static_cast<size_t>(matches[index])] = found[index];
  }
  std::vector<Owned<OrtEpDevice>> made;
  for (size_t number = 0; number < gpus.size() && number < max_devices; ++number) {
    const OrtHardwareDevice* device = device_of[number];
    if (device == nullptr) device = NewHardwareDevice(gpus[number]);
    made.push_back(NewDevice(device, gpus[number], static_cast<int>(number)));
  }
  // ONNX Runtime releases them, but not where this fails.
  for (Owned<OrtEpDevice>& device : made) devices[count++] = device.release();
  return {};
}

// Every device brings its number as an option, the only one that there is.
Status Factory::CheckOptions(const OrtSessionOptions* options, const OrtKeyValuePairs* metadata) const {
  OrtKeyValuePairs* entries = nullptr;
  ThrowIfError(api_, api_.GetSessionOptionsConfigEntries(options, &entries));
  const Owned<OrtKeyValuePairs> owner(entries, api_.ReleaseKeyValuePairs);
  const char* const* keys = nullptr;
  const char* const* values = nullptr;
  size_t count = 0;
  api_.GetKeyValuePairs(entries, &keys, &values, &count);
  const size_t prefix = std::strlen(kOptionPrefix);
  for (size_t index = 0; index < count; ++index) {
    if (std::strncmp(keys[index], kOptionPrefix, prefix) != 0) continue;
    const std::string name = std::string(kProviderName) + ": option " + (keys[index] + prefix);
    GRADFUSE_EXPECT(std::strcmp(keys[index] + prefix, kGpuKey) == 0, name, values[index],
                    "no option: the provider has none");
    const char* gpu = api_.GetKeyValue(metadata, kGpuKey);
    GRADFUSE_EXPECT(std::strcmp(values[index], gpu) == 0, name, values[index],
                    std::string(gpu) + ", the number of the chosen device");
  }
  return {};
}

// For a GPU that CUDA sees and ONNX Runtime does not: containers often hide the files in which it looks for them.
const OrtHardwareDevice* Factory::NewHardwareDevice(const gpu::Info& gpu) {
  KeyValuePairs metadata(api_);
  metadata.Add(kPciBusIdKey, gpu.pci_bus_id);
  metadata.Add(kDeviceNameKey, gpu.name);
  OrtHardwareDevice* hardware = nullptr;
  ThrowIfError(api_, provider_api_.CreateHardwareDevice(OrtHardwareDeviceType_GPU, kNvidia, 0, "NVIDIA", metadata.get(),
                                                        &hardware));
  return hardware_.emplace_back(Owned<OrtHardwareDevice>(hardware, provider_api_.ReleaseHardwareDevice)).get();
}

Owned<OrtEpDevice> Factory::NewDevice(const OrtHardwareDevice* hardware, const gpu::Info& gpu, int number) {
  KeyValuePairs options(api_);
  options.Add(kGpuKey, std::to_string(number));
  KeyValuePairs metadata(api_);
  metadata.Add(kGpuKey, std::to_string(number));
  metadata.Add(kDeviceNameKey, gpu.name);
  OrtEpDevice* device = nullptr;
  ThrowIfError(api_, provider_api_.CreateEpDevice(this, hardware, metadata.get(), options.get(), &device));
  Owned<OrtEpDevice> owner(device, provider_api_.ReleaseEpDevice);
  ThrowIfError(api_, provider_api_.EpDevice_AddAllocatorInfo(device, MemoryOf(number).info()));
  return owner;
}

GpuMemory& Factory::MemoryOf(int gpu) {
  std::unique_ptr<GpuMemory>& memory = memories_[gpu];
  if (memory == nullptr) {
    OrtMemoryInfo* info = nullptr;
    ThrowIfError(api_, api_.CreateMemoryInfo_V2("GradfuseCuda", OrtMemoryInfoDeviceType_GPU, kNvidia, gpu,
                                                OrtDeviceMemoryType_DEFAULT, 0, OrtDeviceAllocator, &info));
    memory = std::make_unique<GpuMemory>(api_, gpu, Owned<OrtMemoryInfo>(info, api_.ReleaseMemoryInfo));
  }
  return *memory;
}

GpuMemory* Factory::MemoryOf(const OrtMemoryDevice* device) const {
  if (provider_api_.MemoryDevice_GetDeviceType(device) != OrtMemoryInfoDeviceType_GPU ||
      provider_api_.MemoryDevice_GetVendorId(device) != kNvidia ||
      provider_api_.MemoryDevice_GetMemoryType(device) != OrtDeviceMemoryType_DEFAULT) {
    return nullptr;
  }
  const auto found = memories_.find(static_cast<int>(provider_api_.MemoryDevice_GetDeviceId(device)));
  return found == memories_.end() ? nullptr : found->second.get();
}

void Factory::CopyTensor(const OrtValue* from, OrtValue* to, void* stream) const {
  size_t bytes = 0;
  ThrowIfError(api_, api_.GetTensorSizeInBytes(from, &bytes));
  if (bytes == 0) return;
  const void* source = DataOf(api_, from);
  void* target = nullptr;
  ThrowIfError(api_, api_.GetTensorMutableData(to, &target));
  if (target == nullptr) throw OrtError(std::string(kProviderName) + ": out of memory");
  GpuMemory* memory = MemoryOf(provider_api_.Value_GetMemoryDevice(to));
  if (memory == nullptr) memory = MemoryOf(provider_api_.Value_GetMemoryDevice(from));
  if (memory == nullptr) throw OrtError(std::string(kProviderName) + ": neither side of a copy is on its GPU");
  const gpu::Selection selection(memory->gpu());
  void* const order = stream != nullptr ? stream : OwnStream(memory->gpu());
  gpu::Copy(target, source, bytes, order);
  if (stream == nullptr || IsHost(provider_api_.Value_GetMemoryDevice(to))) gpu::Synchronize(order);
}

}  // namespace

OrtEpFactory* NewProviderFactory(const OrtApi& api, uint32_t version, const OrtLogger* logger) {
  return new Factory(api, version, logger);
}

void DeleteProviderFactory(OrtEpFactory* factory) { delete static_cast<Factory*>(factory); }

}  // namespace gradfuse::ort
