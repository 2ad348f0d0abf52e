"""Gradients of small models against torch.autograd in float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx.parser
import torch
from node_tests import run
from torch import Tensor

from gradfuse import differentiate
from gradfuse.testing import assert_gradients_close

Array = npt.NDArray[Any]
ByTorch = Callable[..., Tensor]


def model_of(
    inputs: str, body: str, opset: int = 18, output: str | None = None, constants: str = ""
) -> onnx.ModelProto:
    """A model in onnx's text format whose output has the shape that onnx infers, unless it is given."""
    text = f'<ir_version: 10, opset_import: ["": {opset}]> g ({inputs}) => ({output or "float[] y"}) '
    text += f"<{constants}> {{ {body} }}" if constants else f"{{ {body} }}"
    model = onnx.parser.parse_model(text)
    return onnx.shape_inference.infer_shapes(model) if output is None else model


def numbers(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).uniform(-2, 2, shape).astype(np.float32)


def require_torchs(
    model: onnx.ModelProto,
    feeds: Mapping[str, Array],
    by_torch: ByTorch,
    wrt: Sequence[str],
    *,
    has_kernel: bool = True,
) -> None:
    """Compare outputs and a vector-Jacobian product with torch's; what is no float is only passed on.

    Where onnxruntime has a kernel for the operator, the model itself is run as well.
    """
    fed = {value.name for value in model.graph.input}
    outputs = by_torch(**{name: torch.tensor(array) for name, array in feeds.items()})
    seed = numbers(*outputs.shape, seed=9)
    found = run(differentiate(model, wrt, seeds={"y": "seed"}), {**feeds, "seed": seed}, by_onnx=False)
    y = found["y"]
    if has_kernel:
        y = run(model, {name: a for name, a in feeds.items() if name in fed}, by_onnx=False)["y"]
        # What takes the place of an operator computes the same.
        assert np.allclose(found["y"], y, rtol=1e-4, atol=1e-4)
    given = {name: torch.tensor(array) for name, array in feeds.items()}

    def gradients(dtype: torch.dtype) -> tuple[Tensor, dict[str, Array]]:
        tensors = {n: t.to(dtype, copy=True) if t.is_floating_point() else t for n, t in given.items()}
        leaves = {name: tensors[name].requires_grad_() for name in wrt}
        output = by_torch(**tensors)
        output.backward(torch.tensor(seed).to(dtype))  # type: ignore[no-untyped-call]
        grads = {name: leaves[name].grad for name in wrt}
        return output, {n: g.numpy() for n, g in grads.items() if g is not None}

    (_, native), (exact_y, exact) = gradients(torch.float32), gradients(torch.float64)
    assert y.shape == exact_y.shape and np.allclose(y, exact_y.detach().numpy(), atol=1e-4)
    for name in wrt:
        # A sum adds up as many terms as there are outputs, at most.
        terms = float(np.abs(exact[name]).max(initial=0)) * 16
        assert_gradients_close(
            found[f"{name}.grad"], native[name].astype(np.float32), exact[name], np.float32, terms=terms
        )


def shaped(*shapes: tuple[int, ...]) -> dict[str, Array]:
    return {name: numbers(*shape, seed=k) for k, (name, shape) in enumerate(zip("abc", shapes, strict=False))}
