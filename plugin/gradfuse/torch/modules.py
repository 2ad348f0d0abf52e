"""Modules, to be used as those of torch.nn."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradfuse.torch.functional import cross_entropy, ctc_loss


class CrossEntropyLoss(torch.nn.CrossEntropyLoss):
    """Cross entropy: `torch.nn.CrossEntropyLoss` with a backward pass of one operator, see :func:`cross_entropy`."""

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(input, target, self.weight, self.ignore_index, self.reduction, self.label_smoothing)


class CTCLoss(torch.nn.CTCLoss):
    """Connectionist temporal classification loss: `torch.nn.CTCLoss` on our kernels, see :func:`ctc_loss`."""

    def forward(
        self,
        log_probs: Tensor,
        targets: Tensor,
        input_lengths: Tensor | Sequence[int] | int,
        target_lengths: Tensor | Sequence[int] | int,
    ) -> Tensor:
        return ctc_loss(
            log_probs, targets, input_lengths, target_lengths, self.blank, self.reduction, self.zero_infinity
        )
