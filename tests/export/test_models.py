"""Models of the kinds that are trained, exported whole: at other sizes than exported they give PyTorch's gradients."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import pytest
import torch
from training_models import MODELS, Model, autograd, run

from gradfuse import export_training_step, library
from gradfuse.testing import assert_gradients_close

pytestmark = pytest.mark.long

# What the others have in common with these is seen by `make test-slow`.
QUICK = {"GPT", "GRU with CTC", "convolutions with CTC", "experts, ends compared"}


@pytest.mark.parametrize(
    "model",
    [pytest.param(model, id=name, marks=[] if name in QUICK else pytest.mark.slow) for name, model in MODELS.items()],
)
def test_a_model_trains_at_any_size(model: Model) -> None:
    torch.manual_seed(0)
    module = model.module()
    step = export_training_step(module, model.loss, model.batch(2, 6), dynamic_shapes=model.dynamic_shapes)
    onnx.checker.check_model(step.model, full_check=True)
    dims = {d.dim_param for value in step.model.graph.input for d in value.type.tensor_type.shape.dim} - {""}
    assert dims == {name for axes in model.dynamic for name in axes.values()}
    fused = Counter(node.op_type for node in step.model.graph.node if node.domain == "aclnn")
    assert set(model.fused) <= set(fused)

    batch = model.batch(3, 9)
    native = autograd(module, model.loss, batch, torch.float32, step)
    exact = autograd(module, model.loss, batch, torch.float64, step)
    # Roundings of one layer pass through the next ones, so that the largest gradient of the step measures them all.
    terms = 4 * max(np.abs(array).max() for name, array in exact.items() if name.endswith(".grad"))
    assert library.find_library() is not None
    for kernels in (True, False):
        results = run(step, batch, kernels=kernels)
        assert {"loss", *(f"{name}.grad" for name in step.parameters)} <= set(results)
        for name, result in results.items():
            if np.issubdtype(exact[name].dtype, np.floating):
                assert_gradients_close(result, native[name], exact[name], np.float32, terms=terms)
            else:
                np.testing.assert_array_equal(result, exact[name])
