/* The loss of one item of two steps with one label, and its gradient. */
#include "aclnnop/aclnn_ctc_loss.h"
#include "aclnnop/aclnn_ctc_loss_backward.h"
#include "sample.h"

int main(void) {
  aclrtStream stream = Begin();

  const float log_half = -0.693147181f;
  const float log_probs[] = {log_half, log_half, log_half, log_half}; /* blank and one label, at each step */
  const float grad_out[] = {1};
  const int64_t label[] = {1}, input_length[] = {2}, target_length[] = {1};
  const int64_t steps[] = {2, 1, 2}, one[] = {1}, row[] = {1, 1}, states[] = {1, 2, 3};
  DeviceTensor grad = MakeTensor(grad_out, ACL_FLOAT, 1, one);
  DeviceTensor probs = MakeTensor(log_probs, ACL_FLOAT, 3, steps);
  DeviceTensor targets = MakeTensor(label, ACL_INT64, 2, row);
  DeviceTensor loss = MakeTensor(NULL, ACL_FLOAT, 1, one);
  DeviceTensor alpha = MakeTensor(NULL, ACL_FLOAT, 3, states);
  DeviceTensor out = MakeTensor(NULL, ACL_FLOAT, 3, steps);
  aclIntArray* input_lengths = aclCreateIntArray(input_length, 1);
  aclIntArray* target_lengths = aclCreateIntArray(target_length, 1);

  uint64_t workspace_size = 0;
  aclOpExecutor* executor;
  EXPECT_SUCCESS(aclnnCtcLossGetWorkspaceSize(probs.tensor, targets.tensor, input_lengths, target_lengths, 0, false,
                                              loss.tensor, alpha.tensor, &workspace_size, &executor));
  RunAndWait(aclnnCtcLoss, workspace_size, executor, stream);
  PrintRows(loss, 1); /* of four ways through the steps three give the label: -log(3/4) */
  EXPECT_SUCCESS(aclnnCtcLossBackwardGetWorkspaceSize(grad.tensor, probs.tensor, targets.tensor, input_lengths,
                                                      target_lengths, loss.tensor, alpha.tensor, 0, false, out.tensor,
                                                      &workspace_size, &executor));
  RunAndWait(aclnnCtcLossBackward, workspace_size, executor, stream);
  PrintRows(out, 2);

  EXPECT_SUCCESS(aclDestroyIntArray(input_lengths));
  EXPECT_SUCCESS(aclDestroyIntArray(target_lengths));
  FreeTensor(grad);
  FreeTensor(probs);
  FreeTensor(targets);
  FreeTensor(loss);
  FreeTensor(alpha);
  FreeTensor(out);
  End(stream);
  return 0;
}
