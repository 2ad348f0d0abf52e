"""Gradients of layer and RMS normalization: in nodes, and by one operator in fused steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import onnx
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gradfuse import TrainingSession, build_training_step
from gradfuse.testing import assert_gradients_close

Normalize = Callable[[Tensor, dict[str, Tensor]], Tensor]

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(5, 3, 8, generator=GENERATOR)
T = torch.randn(5, 3, 8, generator=GENERATOR)
EPS = 2.0**-16  # the same in float32, of which type attributes are
LAYER_NORM = f"LayerNormalization <epsilon = {EPS}>"


def check(
    nodes: str,
    shapes: Mapping[str, tuple[int, ...]],
    normalize: Normalize,
    operators: int,
    *,
    fuse: bool = True,
    opset: int = 17,
    dtype: torch.dtype = torch.float32,
    sizes: str = "N, 3, 8",
    **options: Any,
) -> onnx.ModelProto:
    """Hold the gradients of the sum of a normalization's result times `t` against PyTorch's; return the step's model.

    `nodes` compute `y` of `h`, which is a product of the input, and of initializers of `shapes`. With `operators` of
    the step's nodes the gradients are computed.
    """
    kind = {torch.float32: "float", torch.float64: "double", torch.float16: "float16"}[dtype]
    model = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : {opset}, "com.microsoft": 1]> normalized ({kind}[{sizes}] x, '
        f"{kind}[{sizes}] t) => ({kind} loss) {{ h = MatMul(x, a)  {nodes}  by_t = Mul(y, t)  "
        "loss = ReduceSum<keepdims = 0>(by_t) }"
    )
    generator = torch.Generator().manual_seed(1)
    values = {
        name: torch.randn(shape, generator=generator).to(dtype) for name, shape in {"a": (8, 8), **shapes}.items()
    }
    for name, value in values.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(value.numpy(), name))
    step = build_training_step(model, None, fuse=fuse, **options)
    found = [node for node in step.model.graph.node if node.op_type == "LayerNormBackward"]
    assert len(found) == operators
    session = TrainingSession(step)
    session.step((X.to(dtype).numpy(), T.to(dtype).numpy()), ())

    def gradients(work: torch.dtype) -> dict[str, Tensor]:
        leaves = {name: value.to(work, copy=True).requires_grad_() for name, value in values.items()}
        (normalize(X.to(dtype).to(work) @ leaves["a"], leaves) * T.to(dtype).to(work)).sum().backward()  # type: ignore[no-untyped-call]
        return {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}

    native, exact = gradients(dtype), gradients(torch.float64)
    assert session.gradients.keys() == exact.keys()
    for name, gradient in session.gradients.items():
        # A sum over all rows, of terms that went through products and a normalization.
        terms = float(exact[name].abs().max()) * 8
        assert_gradients_close(gradient, native[name], exact[name], dtype, terms=terms)
    return step.model


def layer_norm(axis: int, biased: bool) -> Normalize:
    def normalize(h: Tensor, given: dict[str, Tensor]) -> Tensor:
        inner = h.shape[axis:]
        return F.layer_norm(h, inner, given["w"].expand(inner), given["b"].expand(inner) if biased else None, EPS)

    return normalize


def rms_norm(h: Tensor, given: dict[str, Tensor]) -> Tensor:
    return F.rms_norm(h, (8,), given["w"], EPS)


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("axis", [-1, -2, 0, 2])
@pytest.mark.parametrize("biased", [True, False])
def test_layer_normalization(fuse: bool, axis: int, biased: bool) -> None:
    inner = tuple(X.shape[axis:])
    shapes = {"w": inner, "b": inner} if biased else {"w": inner}
    nodes = f"y = LayerNormalization <axis = {axis}, epsilon = {EPS}> (h, w{', b' if biased else ''})"
    check(nodes, shapes, layer_norm(axis, biased), int(fuse), fuse=fuse, sizes="5, 3, 8")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_other_types(dtype: torch.dtype) -> None:
    """onnxruntime gives the statistics of float64 in float32, which is too little."""
    model = check(
        f"y = {LAYER_NORM} (h, w, b)", {"w": (8,), "b": (8,)}, layer_norm(-1, True), 1, dtype=dtype,
    )  # fmt: skip
    (forward,) = (node for node in model.graph.node if node.op_type == "LayerNormalization")
    assert len(forward.output) == (1 if dtype == torch.float64 else 3)


@pytest.mark.parametrize("shape", [(1,), (3, 8), (1, 8), (5, 1, 1)], ids=str)
def test_a_weight_that_broadcasts(shape: tuple[int, ...]) -> None:
    """Its gradient is a sum over other axes than the operator's: `fuse` finds that of the input in the nodes."""

    def normalize(h: Tensor, given: dict[str, Tensor]) -> Tensor:
        return F.layer_norm(h, (8,), None, None, EPS) * given["w"]

    check(f"y = {LAYER_NORM} (h, w)", {"w": shape}, normalize, 1, sizes="5, 3, 8")


def test_a_bias_that_broadcasts() -> None:
    check(f"y = {LAYER_NORM} (h, w, b)", {"w": (8,), "b": (1,)}, layer_norm(-1, True), 1)


def test_a_weight_whose_size_is_not_known() -> None:
    """It may be 1 at run time where the other is not."""
    nodes = "zero = Constant <value_ints = [0]> ()  k = NonZero(w)  i = Squeeze(k, zero)  v = Gather(w, i)"
    check(f"{nodes}  y = {LAYER_NORM} (h, v)", {"w": (8,)}, layer_norm(-1, False), 1)


@pytest.mark.parametrize("output", ["m", "r"])
def test_a_result_that_depends_on_the_statistics(output: str) -> None:
    """Their gradients are nodes; `fuse` finds that of the result beside them."""

    def normalize(h: Tensor, given: dict[str, Tensor]) -> Tensor:
        mean = h.mean(-1, keepdim=True)
        rstd = 1 / ((h - mean).square().mean(-1, keepdim=True) + EPS).sqrt()
        return (h - mean) * rstd * given["w"] + (mean if output == "m" else rstd)

    check(f"n, m, r = {LAYER_NORM} (h, w)  y = Add(n, {output})", {"w": (8,)}, normalize, 1)


def test_statistics_that_the_model_has_already() -> None:
    """They are read as they are, whatever else reads them."""
    nodes = f"n, m, r = {LAYER_NORM} (h, w)  i = Cast<to = 7>(r)  f = Cast<to = 1>(i)  y = Add(n, f)"

    def normalize(h: Tensor, given: dict[str, Tensor]) -> Tensor:
        rstd = 1 / (h.var(-1, unbiased=False, keepdim=True) + EPS).sqrt()
        return layer_norm(-1, False)(h, given) + rstd.detach().trunc()

    model = check(nodes, {"w": (8,)}, normalize, 1)
    (forward,) = (node for node in model.graph.node if node.op_type == "LayerNormalization")
    (backward,) = (node for node in model.graph.node if node.op_type == "LayerNormBackward")
    assert list(backward.input[3:]) == list(forward.output[1:])


@pytest.mark.parametrize("frozen", ["a", "w", "b"])
def test_only_what_is_wanted_is_computed(frozen: str) -> None:
    nodes, shapes = f"y = {LAYER_NORM} (h, w, b)", {"w": (8,), "b": (8,)}

    def normalize(h: Tensor, given: dict[str, Tensor]) -> Tensor:
        given = {name: value.detach() if name == frozen else value for name, value in given.items()}
        return layer_norm(-1, True)(h.detach() if frozen == "a" else h, given)

    trainable = [name for name in ("a", "w", "b") if name != frozen]
    model = check(nodes, shapes, normalize, 1, trainable=trainable)
    (backward,) = (node for node in model.graph.node if node.op_type == "LayerNormBackward")
    (mask,) = (list(one.ints) for one in backward.attribute if one.name == "output_mask")
    assert mask == [int(name != frozen) for name in ("a", "w", "b")]


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("op, opset", [("SimplifiedLayerNormalization", 17), ("RMSNormalization", 23)])
def test_rms_normalization(fuse: bool, op: str, opset: int) -> None:
    check(f"y = {op} <epsilon = {EPS}> (h, w)", {"w": (8,)}, rms_norm, int(fuse), fuse=fuse, opset=opset)


def test_rms_normalization_in_float64() -> None:
    nodes = f"y = SimplifiedLayerNormalization <epsilon = {EPS}> (h, w)"
    check(nodes, {"w": (8,)}, rms_norm, 1, dtype=torch.float64)


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("simplified", [True, False])
@pytest.mark.parametrize("with_sum", [True, False])
def test_skip_layer_normalization(fuse: bool, simplified: bool, with_sum: bool) -> None:
    op = "com.microsoft.Skip" + ("SimplifiedLayerNormalization" if simplified else "LayerNormalization")
    shapes = {"w": (8,), "c": (8,)} if simplified else {"w": (8,), "b": (8,), "c": (8,)}
    result = "Add(n, s)" if with_sum else "Identity(n)"
    nodes = f'n, "", "", s = {op} <epsilon = {EPS}> (h, x, {", ".join(shapes)})  y = {result}'

    def normalize(h: Tensor, given: dict[str, Tensor]) -> Tensor:
        total = h + X.to(h) + given["c"]
        norm = rms_norm(total, given) if simplified else layer_norm(-1, True)(total, given)
        return norm + total if with_sum else norm

    check(nodes, shapes, normalize, int(fuse), fuse=fuse)


def test_inputs_far_from_zero() -> None:
    """The mean is float32, and the gradient as good as PyTorch's, whose mean is as well."""

    def normalize(h: Tensor, given: dict[str, Tensor]) -> Tensor:
        return layer_norm(-1, False)(h + 100, given)

    check(
        f"k = Constant <value_float = 100.0> ()  far = Add(h, k)  y = {LAYER_NORM} (far, w)",
        {"w": (8,)}, normalize, 1,
    )  # fmt: skip
