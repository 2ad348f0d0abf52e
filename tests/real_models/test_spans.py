"""SpecAugment masks of transformers' speech models, drawn by a seed: as random as numpy's, the same as in PyTorch."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch
from real_models.step_cases import CASES
from torch import Tensor
from training_models import autograd, run

from gradfuse import export_training_step
from gradfuse.export import dropout, host_draws
from gradfuse.testing import assert_gradients_close
from gradfuse.training.step import DROPOUT_SEED

pytestmark = pytest.mark.models

DRAWS = 2000
LENGTH, SPAN = 30, 4


@pytest.mark.parametrize("share, ends, least", [(0.3, None, 0), (0.1, (30, 17), 2), (0.9, (30, 3), 0)])
def test_spans_lie_where_numpy_draws_them(share: float, ends: tuple[int, ...] | None, least: int) -> None:
    from transformers.models.wav2vec2 import modeling_wav2vec2

    mask = None if ends is None else (torch.arange(LENGTH) < torch.tensor(ends).unsqueeze(1)).long()

    def masked() -> Tensor:
        shape = (2, LENGTH)
        return torch.as_tensor(modeling_wav2vec2._compute_mask_indices(shape, share, SPAN, mask, least)).double()

    np.random.seed(0)
    wanted = torch.stack([masked() for _ in range(DRAWS)])
    for traced in (False, True):
        with dropout.SeededDropout(torch.tensor(3)), host_draws.as_tensors() if traced else contextlib.nullcontext():
            drawn = torch.stack([masked() for _ in range(DRAWS)])
        # Five standard deviations of the difference of two means; also of neighbours that are both masked.
        for one, other in ((drawn, wanted), (drawn[..., 1:] * drawn[..., :-1], wanted[..., 1:] * wanted[..., :-1])):
            spread = (other.var(0) / DRAWS * 2).sqrt()
            assert ((one.mean(0) - other.mean(0)).abs() <= 5 * spread + 1e-12).all()
        assert (drawn.sum(-1).mean() - wanted.sum(-1).mean()).abs() <= 5 * (wanted.sum(-1).var() / DRAWS).sqrt() + 1e-12


def test_a_speech_model_trains_with_masks_and_is_evaluated_without() -> None:
    case = CASES["Wav2Vec2ForCTC"]
    torch.manual_seed(0)
    module, loss = case.module()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    step = export_training_step(
        module, loss, case.tensors(3, 8), optimizer, dynamic_shapes=case.dynamic_shapes(), fuse=False
    )
    assert step.evaluation_model is not None
    assert "BitShift" not in {node.op_type for node in step.evaluation_model.graph.node}
    plain = export_training_step(module, loss, case.tensors(3, 8), dynamic_shapes=case.dynamic_shapes())
    losses = set()
    batch = case.tensors(5, 11)
    for seed in range(4):
        plain.buffers[DROPOUT_SEED] = np.array(seed)
        results = run(plain, batch, kernels=True)
        native, exact = (autograd(module, loss, batch, dtype, plain) for dtype in (torch.float32, torch.float64))
        wanted = exact["loss"].astype(np.float64)
        assert_gradients_close(results["loss"], native["loss"], wanted, np.float32, terms=8 * wanted)
        losses.add(float(results["loss"]))
    assert len(losses) > 1
