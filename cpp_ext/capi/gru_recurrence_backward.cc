#include "gradfuse/ops/gru_recurrence_backward.h"

#include "aclnnop/aclnn_gru_recurrence_backward.h"
#include "capi/plan.h"

using Args = gradfuse::GruRecurrenceBackwardArgs;

aclnnStatus aclnnGruRecurrenceBackwardGetWorkspaceSize(const aclTensor* gradHidden, const aclTensor* initialH,
                                                       const aclTensor* hidden, const aclTensor* gates,
                                                       const aclTensor* weight, bool reverse, aclTensor* gradInput,
                                                       aclTensor* gradInitialH, aclTensor* gradRecurrent,
                                                       uint64_t* workspaceSize, aclOpExecutor** executor) {
  return gradfuse::capi::Prepare<Args>(
      __func__, {gradHidden, initialH, hidden, gates, weight, gradInput, gradInitialH, gradRecurrent},
      [&](Args& args) { args.reverse = reverse; }, workspaceSize, executor);
}

GRADFUSE_DEFINE_SECOND_PHASE(GruRecurrenceBackward)
