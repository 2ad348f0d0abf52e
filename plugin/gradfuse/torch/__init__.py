"""gradfuse's operators in PyTorch: importing this registers them as ``torch.ops.aclnn``.

`import gradfuse` imports it too, where torch has been imported before.
"""

from gradfuse.torch.functional import ctc_loss, grouped_bias_add, scaled_masked_softmax
from gradfuse.torch.modules import CTCLoss
from gradfuse.torch.ops import register

__all__ = ["CTCLoss", "ctc_loss", "grouped_bias_add", "scaled_masked_softmax"]

register()
