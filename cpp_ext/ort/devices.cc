#include "ort/devices.h"

#include <type_traits>

#include "gradfuse/op_table.h"
#ifdef GRADFUSE_HAVE_CUDA
#include "ort/cuda_device.h"
#endif

namespace gradfuse::ort {

void AppendAllCustomOps(const OrtApi& api, uint32_t version, std::vector<std::unique_ptr<CustomOp>>& ops) {
  ForEachOp(OpTable(), [&](auto* null) {
    using Args = std::remove_pointer_t<decltype(null)>;
    AppendCustomOps<Args, CpuDevice>(api, version, ops);
#ifdef GRADFUSE_HAVE_CUDA
    AppendCustomOps<Args, CudaDevice>(api, version, ops);
    AppendCustomOps<Args, ProviderDevice>(api, version, ops);
#endif
  });
}

}  // namespace gradfuse::ort
