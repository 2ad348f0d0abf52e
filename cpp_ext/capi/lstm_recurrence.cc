#include "gradfuse/ops/lstm_recurrence.h"

#include "aclnnop/aclnn_lstm_recurrence.h"
#include "capi/plan.h"

using Args = gradfuse::LstmRecurrenceArgs;

aclnnStatus aclnnLstmRecurrenceGetWorkspaceSize(const aclTensor* input, const aclTensor* initialH,
                                                const aclTensor* initialC, const aclTensor* weight,
                                                const aclTensor* biasOptional, bool reverse, aclTensor* hidden,
                                                aclTensor* cell, aclTensor* gates, uint64_t* workspaceSize,
                                                aclOpExecutor** executor) {
  return gradfuse::capi::Prepare<Args>(
      __func__, {input, initialH, initialC, weight, biasOptional, hidden, cell, gates},
      [&](Args& args) { args.reverse = reverse; }, workspaceSize, executor);
}

GRADFUSE_DEFINE_SECOND_PHASE(LstmRecurrence)
