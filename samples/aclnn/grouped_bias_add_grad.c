/* Five rows in three groups, the second of them empty; then the same rows without the last as two groups of two. */
#include "aclnnop/aclnn_grouped_bias_add_grad.h"
#include "sample.h"

int main(void) {
  aclrtStream stream = Begin();

  const float grad_y[] = {1, 10, 2, 20, 3, 30, 4, 40, 5, 50};
  const int64_t ends[] = {2, 2, 5};
  const int64_t rows[] = {5, 2}, groups_of_rows[] = {2, 2, 2}, groups[] = {3}, three[] = {3, 2}, two[] = {2, 2};
  DeviceTensor flat = MakeTensor(grad_y, ACL_FLOAT, 2, rows);
  DeviceTensor equal = MakeTensor(grad_y, ACL_FLOAT, 3, groups_of_rows);
  DeviceTensor group_idx = MakeTensor(ends, ACL_INT64, 1, groups);
  DeviceTensor out_of_three = MakeTensor(NULL, ACL_FLOAT, 2, three);
  DeviceTensor out_of_two = MakeTensor(NULL, ACL_FLOAT, 2, two);

  uint64_t workspace_size = 0;
  aclOpExecutor* executor;
  EXPECT_SUCCESS(aclnnGroupedBiasAddGradGetWorkspaceSize(flat.tensor, group_idx.tensor, out_of_three.tensor,
                                                         &workspace_size, &executor));
  RunAndWait(aclnnGroupedBiasAddGrad, workspace_size, executor, stream);
  PrintRows(out_of_three, 2);
  EXPECT_SUCCESS(
      aclnnGroupedBiasAddGradGetWorkspaceSize(equal.tensor, NULL, out_of_two.tensor, &workspace_size, &executor));
  RunAndWait(aclnnGroupedBiasAddGrad, workspace_size, executor, stream);
  PrintRows(out_of_two, 2);

  FreeTensor(flat);
  FreeTensor(equal);
  FreeTensor(group_idx);
  FreeTensor(out_of_three);
  FreeTensor(out_of_two);
  End(stream);
  return 0;
}
