"""gradfuse's operators in PyTorch: importing this registers them as ``torch.ops.aclnn``.

`import gradfuse` imports it too, where torch has been imported before.
"""

from gradfuse.torch.functional import cross_entropy, ctc_loss, grouped_bias_add, scaled_masked_softmax
from gradfuse.torch.modules import CrossEntropyLoss, CTCLoss
from gradfuse.torch.ops import register_ops
from gradfuse.torch.optimizers import Adam8bit, AdamW8bit

__all__ = [
    "Adam8bit",
    "AdamW8bit",
    "CTCLoss",
    "CrossEntropyLoss",
    "cross_entropy",
    "ctc_loss",
    "grouped_bias_add",
    "scaled_masked_softmax",
]

register_ops()
