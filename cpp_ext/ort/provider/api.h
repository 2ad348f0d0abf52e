#pragma once

#include <onnxruntime_c_api.h>

#include <cstddef>
#include <cstdint>

// The parts of ONNX Runtime's API for execution providers that came with version 1.24, for builds with the headers of
// 1.23. The runtime's structs only ever grow at their ends, so that each is the older one and the new members after it.
// Members of 1.24 that the provider does not use are there as `unused`: addresses that keep the others in their places.
namespace gradfuse::ort {

constexpr uint32_t kProviderApi = 24;
static_assert(ORT_API_VERSION >= 23,
              "The execution provider needs the headers of ONNX Runtime 1.23 or newer: set GRADFUSE_ORT_INCLUDE_DIR");

#if ORT_API_VERSION >= 24

using ProviderApi = OrtEpApi;
using Provider = OrtEp;
using ProviderFactory = OrtEpFactory;
using KernelImpl = OrtKernelImpl;
using KernelRegistry = OrtKernelRegistry;
using KernelDefBuilder = OrtKernelDefBuilder;
using KernelDef = OrtKernelDef;
using DataType = OrtDataType;

#else

struct KernelRegistry;
struct KernelDefBuilder;
struct KernelDef;
struct DataType;

struct KernelImpl {
  uint32_t ort_version_supported;
  uint32_t flags;
  OrtStatus*(ORT_API_CALL* Compute)(KernelImpl*, OrtKernelContext*);
  void(ORT_API_CALL* Release)(KernelImpl*);
  void* unused[2];
};
static_assert(sizeof(KernelImpl) == 2 * sizeof(uint32_t) + 4 * sizeof(void*));

using KernelCreate = OrtStatus*(ORT_API_CALL*)(void* state, const OrtKernelInfo*, KernelImpl**);

struct ProviderApi : OrtEpApi {
  OrtStatus*(ORT_API_CALL* CreateHardwareDevice)(OrtHardwareDeviceType, uint32_t vendor_id, uint32_t device_id,
                                                 const char* vendor_name, const OrtKeyValuePairs* metadata,
                                                 OrtHardwareDevice**);
  void(ORT_API_CALL* ReleaseHardwareDevice)(OrtHardwareDevice*);
  OrtStatus*(ORT_API_CALL* CreateKernelRegistry)(KernelRegistry**);
  void(ORT_API_CALL* ReleaseKernelRegistry)(KernelRegistry*);
  OrtStatus*(ORT_API_CALL* KernelRegistry_AddKernel)(KernelRegistry*, const KernelDef*, KernelCreate, void* state);
  OrtStatus*(ORT_API_CALL* CreateKernelDefBuilder)(KernelDefBuilder**);
  void(ORT_API_CALL* ReleaseKernelDefBuilder)(KernelDefBuilder*);
  OrtStatus*(ORT_API_CALL* KernelDefBuilder_SetOperatorType)(KernelDefBuilder*, const char*);
  OrtStatus*(ORT_API_CALL* KernelDefBuilder_SetDomain)(KernelDefBuilder*, const char*);
  OrtStatus*(ORT_API_CALL* KernelDefBuilder_SetSinceVersion)(KernelDefBuilder*, int first, int last);
  OrtStatus*(ORT_API_CALL* KernelDefBuilder_SetExecutionProvider)(KernelDefBuilder*, const char*);
  OrtStatus*(ORT_API_CALL* KernelDefBuilder_SetInputMemType)(KernelDefBuilder*, size_t index, OrtMemType);
  OrtStatus*(ORT_API_CALL* KernelDefBuilder_SetOutputMemType)(KernelDefBuilder*, size_t index, OrtMemType);
  OrtStatus*(ORT_API_CALL* KernelDefBuilder_AddTypeConstraint)(KernelDefBuilder*, const char*, const DataType* const*,
                                                               size_t count);
  void* unused[2];  // aliases of inputs and outputs
  OrtStatus*(ORT_API_CALL* KernelDefBuilder_Build)(KernelDefBuilder*, KernelDef**);
  void(ORT_API_CALL* ReleaseKernelDef)(KernelDef*);
  void* unused_too[6];  // what a kernel's definition says
  OrtStatus*(ORT_API_CALL* GetTensorDataType)(ONNXTensorElementDataType, const DataType**);
  OrtStatus*(ORT_API_CALL* EpGraphSupportInfo_LookUpKernel)(OrtEpGraphSupportInfo*, const OrtNode*, const KernelDef**);
};
static_assert(sizeof(ProviderApi) == sizeof(OrtEpApi) + 26 * sizeof(void*));

struct Provider : OrtEp {
  OrtStatus*(ORT_API_CALL* GetKernelRegistry)(OrtEp*, const KernelRegistry**);
  void* unused;  // whether runs may be concurrent: null for yes
};
static_assert(sizeof(Provider) == sizeof(OrtEp) + 2 * sizeof(void*));

struct ProviderFactory : OrtEpFactory {
  void* unused[2];  // why a device is of no use, and memory of graphics: null for neither
  OrtStatus*(ORT_API_CALL* GetNumCustomOpDomains)(OrtEpFactory*, size_t*);
  OrtStatus*(ORT_API_CALL* GetCustomOpDomains)(OrtEpFactory*, OrtCustomOpDomain**, size_t);
};
static_assert(sizeof(ProviderFactory) == sizeof(OrtEpFactory) + 4 * sizeof(void*));

#endif

}  // namespace gradfuse::ort
