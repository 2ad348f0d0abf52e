#include "gradfuse/ops/lstm_recurrence_backward.h"

#include "aclnnop/aclnn_lstm_recurrence_backward.h"
#include "capi/plan.h"

using Args = gradfuse::LstmRecurrenceBackwardArgs;

aclnnStatus aclnnLstmRecurrenceBackwardGetWorkspaceSize(const aclTensor* gradHidden, const aclTensor* gradCellOptional,
                                                        const aclTensor* initialC, const aclTensor* cell,
                                                        const aclTensor* gates, const aclTensor* weight, bool reverse,
                                                        aclTensor* gradInput, aclTensor* gradInitialH,
                                                        aclTensor* gradInitialC, uint64_t* workspaceSize,
                                                        aclOpExecutor** executor) {
  return gradfuse::capi::Prepare<Args>(
      __func__, {gradHidden, gradCellOptional, initialC, cell, gates, weight, gradInput, gradInitialH, gradInitialC},
      [&](Args& args) { args.reverse = reverse; }, workspaceSize, executor);
}

GRADFUSE_DEFINE_SECOND_PHASE(LstmRecurrenceBackward)
