#include "capi/executor.h"

#include <cstring>
#include <optional>
#include <string>

#include "capi/device.h"
#include "capi/error.h"
#include "capi/handle_table.h"

namespace gradfuse::capi {
namespace {

using Executors = HandleTable<std::unique_ptr<Executor>, HandleKind::kExecutor>;

// A call that is refused leaves the executor as it is.
void ExpectFits(const Executor& executor, const char* op, const void* workspace, uint64_t workspace_bytes) {
  if (std::strcmp(executor.op(), op) != 0) {
    throw Error(ACLNN_ERR_PARAM_INVALID,
                std::string("executor is one of ") + executor.op() + "; expected one of " + op);
  }
  const uint64_t needed = executor.workspace_bytes();
  if (workspace_bytes < needed) {
    throw Error(ACLNN_ERR_PARAM_INVALID, "workspaceSize is " + std::to_string(workspace_bytes) +
                                             "; expected at least " + std::to_string(needed));
  }
  if (needed > 0) {
    const std::string wanted = std::to_string(needed) + " bytes of device memory";
    ExpectPointer(workspace, "workspace", wanted.c_str(), ACLNN_ERR_PARAM_NULLPTR);
  }
}

}  // namespace

aclOpExecutor* AddExecutor(std::unique_ptr<Executor> executor) {
  return static_cast<aclOpExecutor*>(Executors::Shared().Add(std::move(executor)));
}

void DropExecutors() { Executors::Shared().Clear(); }

aclnnStatus Execute(const char* function, const char* op, void* workspace, uint64_t workspace_bytes,
                    aclOpExecutor* handle, aclrtStream stream) noexcept {
  return GuardedOp(function, [&] {
    ExpectPointer(handle, "executor", "an executor of aclnn...GetWorkspaceSize", ACLNN_ERR_PARAM_NULLPTR);
    Device& device = Device::Current();
    device.ExpectStream(stream);
    std::optional<std::unique_ptr<Executor>> executor = Executors::Shared().Take(
        handle, [&](const auto& found) { ExpectFits(*found, op, workspace, workspace_bytes); });
    if (!executor) {
      throw Error(ACLNN_ERR_PARAM_INVALID,
                  "executor is unknown or already used; expected an unused executor from aclnn...GetWorkspaceSize");
    }
    device.Execute(std::move(*executor), static_cast<char*>(workspace), stream);
  });
}

}  // namespace gradfuse::capi
