#include "gradfuse/ops/gru_recurrence.h"

#include "aclnnop/aclnn_gru_recurrence.h"
#include "capi/plan.h"

using Args = gradfuse::GruRecurrenceArgs;

aclnnStatus aclnnGruRecurrenceGetWorkspaceSize(const aclTensor* input, const aclTensor* initialH,
                                               const aclTensor* weight, const aclTensor* biasOptional, bool reverse,
                                               aclTensor* hidden, aclTensor* gates, uint64_t* workspaceSize,
                                               aclOpExecutor** executor) {
  return gradfuse::capi::Prepare<Args>(
      __func__, {input, initialH, weight, biasOptional, hidden, gates}, [&](Args& args) { args.reverse = reverse; },
      workspaceSize, executor);
}

GRADFUSE_DEFINE_SECOND_PHASE(GruRecurrence)
