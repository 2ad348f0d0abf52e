/* The gradient of a mean cross entropy over three rows, one of which is ignored. */
#include "aclnnop/aclnn_cross_entropy_loss_grad.h"
#include "sample.h"

int main(void) {
  aclrtStream stream = Begin();

  const float grad_loss[] = {1};
  /* Logarithms of the probabilities 1/2, 1/4, 1/4; 1/4, 1/4, 1/2; 1/4, 1/2, 1/4. */
  const float log_half = -0.693147181f, log_quarter = -1.386294361f;
  const float log_prob[] = {log_half, log_quarter, log_quarter, log_quarter, log_quarter,
                            log_half, log_quarter, log_half,    log_quarter};
  const int64_t target[] = {0, -100, 2};
  const int64_t rows_and_classes[] = {3, 3}, rows[] = {3};
  DeviceTensor grad = MakeTensor(grad_loss, ACL_FLOAT, 0, NULL);
  DeviceTensor prob = MakeTensor(log_prob, ACL_FLOAT, 2, rows_and_classes);
  DeviceTensor classes = MakeTensor(target, ACL_INT64, 1, rows);
  DeviceTensor out = MakeTensor(NULL, ACL_FLOAT, 2, rows_and_classes);

  char reduction[] = "mean";
  uint64_t workspace_size = 0;
  aclOpExecutor* executor;
  EXPECT_SUCCESS(aclnnCrossEntropyLossGradGetWorkspaceSize(grad.tensor, prob.tensor, classes.tensor, NULL, NULL, NULL,
                                                           reduction, -100, 0.0, 0.0, out.tensor, &workspace_size,
                                                           &executor));
  RunAndWait(aclnnCrossEntropyLossGrad, workspace_size, executor, stream);
  PrintRows(out, 3);

  FreeTensor(grad);
  FreeTensor(prob);
  FreeTensor(classes);
  FreeTensor(out);
  End(stream);
  return 0;
}
