/* The gradient of two rows of attention scores, one of them masked at its end. */
#include "aclnnop/aclnn_scaled_masked_softmax_backward.h"
#include "sample.h"

int main(void) {
  aclrtStream stream = Begin();

  const float grad_output[] = {1, 2, 3, 1, 2, 3};
  const float y[] = {0.5f, 0.25f, 0.25f, 0.5f, 0.5f, 0};
  const bool mask[] = {false, false, false, false, false, true};
  const int64_t dims[] = {1, 1, 2, 3};
  DeviceTensor grad = MakeTensor(grad_output, ACL_FLOAT, 4, dims);
  DeviceTensor softmax = MakeTensor(y, ACL_FLOAT, 4, dims);
  DeviceTensor masked = MakeTensor(mask, ACL_BOOL, 4, dims);
  DeviceTensor out = MakeTensor(NULL, ACL_FLOAT, 4, dims);

  uint64_t workspace_size = 0;
  aclOpExecutor* executor;
  EXPECT_SUCCESS(aclnnScaledMaskedSoftmaxBackwardGetWorkspaceSize(grad.tensor, softmax.tensor, masked.tensor, 0.5,
                                                                  false, out.tensor, &workspace_size, &executor));
  RunAndWait(aclnnScaledMaskedSoftmaxBackward, workspace_size, executor, stream);
  PrintRows(out, 3);

  FreeTensor(grad);
  FreeTensor(softmax);
  FreeTensor(masked);
  FreeTensor(out);
  End(stream);
  return 0;
}
