"""Operands whose sizes have names of their own, and are 1 at run time in one of them: gradients of their shapes."""

from __future__ import annotations

from collections.abc import Callable

import onnx
import pytest
import torch
from autograd import model_of, numbers, require_torchs
from torch import Tensor

from gradfuse import ArgumentError, TrainingSession, build_training_step
from gradfuse.testing import assert_gradients_close

pytestmark = pytest.mark.usefixtures("inference_in_process")

TWO: dict[str, tuple[str, Callable[[Tensor, Tensor], Tensor]]] = {
    "Add": ("y = Add(a, b)", lambda a, b: a + b),
    "Div": ("e = Exp(b)  y = Div(a, e)", lambda a, b: a / b.exp()),
    "Pow": ("e = Exp(a)  y = Pow(e, b)", lambda a, b: a.exp() ** b),
    "Mod": ("e = Exp(b)  y = Mod<fmod = 1>(a, e)", lambda a, b: torch.fmod(a, b.exp())),
    "Min": ("y = Min(a, b)", lambda a, b: torch.minimum(a, b)),
    "Max": ("y = Max(a, b)", lambda a, b: torch.maximum(a, b)),
    "Sum": ("y = Sum(a, b, b)", lambda a, b: a + 2 * b),
    "Mean": ("y = Mean(a, b)", lambda a, b: (a + b) / 2),
    "PRelu": ("y = PRelu(a, b)", lambda a, b: torch.where(a > 0, a, a * b)),
    "Where": (
        "z = Constant<value = float {0}>()  p = Greater(a, z)  y = Where(p, a, b)",
        lambda a, b: a.where(a > 0, b),
    ),
    "Expand": ("s = Shape(b)  e = Expand(a, s)  y = Mul(e, b)", lambda a, b: a * b),
    "Einsum": ('y = Einsum<equation = "ab,ab->ab">(a, b)', lambda a, b: a * b),
}


@pytest.mark.parametrize("behind", [False, True], ids=["output", "behind"])
@pytest.mark.parametrize(
    ("a", "b"), [((3, 4), (3, 4)), ((1, 4), (3, 4)), ((3, 4), (1, 4)), ((3, 1), (1, 4)), ((1, 1), (3, 4))]
)
@pytest.mark.parametrize("name", TWO)
def test_two_operands(name: str, a: tuple[int, int], b: tuple[int, int], behind: bool) -> None:
    """With another operand behind the result, whose size may be that of either."""
    body, by_torch = TWO[name]
    inputs, output = "float[A,B] a, float[C,D] b", "float[E,F] y"
    feeds = {"a": numbers(*a), "b": numbers(*b, seed=1)}
    if not behind:
        require_torchs(model_of(inputs, body, output=output), feeds, by_torch, ["a", "b"])
        return
    # Of the sizes of the first operand, which are not those of the result.
    feeds["c"] = numbers(*a, seed=2)
    model = model_of(f"{inputs}, float[A,B] c", f"{body.replace('y =', 'h =')}  y = Mul(h, c)", output=output)
    require_torchs(model, feeds, lambda a, b, c: by_torch(a, b) * c, ["a", "b", "c"])


@pytest.mark.parametrize("size", ["8", "h"])
def test_a_name_that_stands_for_two_sizes_of_the_output_says_nothing(size: str) -> None:
    """torch's older exporter makes one up for the batch and the height of a padded convolution."""
    model = model_of(f"float[n,2,{size},7] x", "y = Conv<pads = [1,1,1,1]>(x, w)", output="float[c,3,c,d] y")
    w, x = numbers(3, 2, 3, 3, seed=1), numbers(4, 2, 8, 7)
    model.graph.initializer.append(onnx.numpy_helper.from_array(w, "w"))
    target = numbers(4, 3, 8, 7, seed=2)
    session = TrainingSession(build_training_step(model, "mse"))
    session.step(x, target)

    def gradient(dtype: torch.dtype) -> Tensor:
        leaf = torch.tensor(w, dtype=dtype, requires_grad=True)
        output = torch.nn.functional.conv2d(torch.tensor(x, dtype=dtype), leaf, padding=1)
        torch.nn.functional.mse_loss(output, torch.tensor(target, dtype=dtype)).backward()  # type: ignore[no-untyped-call]
        assert leaf.grad is not None
        return leaf.grad

    native, exact = gradient(torch.float32), gradient(torch.float64)
    largest = float(exact.abs().max())
    assert_gradients_close(session.gradients["w"], native, exact, torch.float32, terms=16 * largest)
    with pytest.raises(ArgumentError, match=r"'target' is float32 of shape \(4, 3, 8, 6\); expected float32"):
        session.step(x, target[..., :6])


def test_a_size_is_named_once_in_a_refusal() -> None:
    model = model_of("float[n,n] x", "y = MatMul(x, w)", output="float[n,2] y")
    model.graph.initializer.append(onnx.numpy_helper.from_array(numbers(3, 2), "w"))
    session = TrainingSession(build_training_step(model, "mse"))
    with pytest.raises(ArgumentError, match=r"expected float32 of shape \(n, n\), n = 3$"):
        session.step(numbers(3, 4), numbers(3, 2))


EINSUMS = [
    ("ab,bc->ac", (2, 1), (3, 2)),
    ("ab,bc->ac", (2, 3), (1, 2)),
    ("ab,cb->ac", (2, 3), (2, 1)),
    ("ab,ab->a", (2, 1), (2, 3)),
    ("ab,ab->", (2, 3), (1, 1)),
    ("ab,a->b", (1, 3), (2,)),
    ("...a,a->...", (2, 1), (3,)),
    ("...ab,...bc->...ac", (1, 2, 3), (4, 3, 2)),
    ("...ab,...bc->...ac", (4, 2, 3), (1, 3, 2)),
    ("...ab,bc->...ac", (5, 1, 2, 3), (3, 2)),
    ("b,...ab->...a", (1,), (4, 2, 3)),
]


@pytest.mark.parametrize("named", [True, False], ids=["names", "numbers"])
@pytest.mark.parametrize(("equation", "a", "b"), EINSUMS)
def test_einsum(equation: str, a: tuple[int, ...], b: tuple[int, ...], named: bool) -> None:
    dims = [",".join(f"{n}{k}" if named else str(size) for k, size in enumerate(s)) for n, s in (("A", a), ("B", b))]
    body = f'h = Einsum<equation = "{equation}">(a, b)  e = Exp(h)  y = ReduceSum<keepdims = 0>(e)'
    model = model_of(f"float[{dims[0]}] a, float[{dims[1]}] b", body, output="float y")
    feeds = {"a": numbers(*a) / 2, "b": numbers(*b, seed=1) / 2}
    require_torchs(model, feeds, lambda a, b: torch.einsum(equation, a, b).exp().sum(), ["a", "b"])


def test_einsum_of_three() -> None:
    model = model_of(
        "float[A,B] a, float[C,D] b, float[E,F] c",
        'h = Einsum<equation = "ab,ab,ab->b">(a, b, c)  y = ReduceSum<keepdims = 0>(h)',
        output="float y",
    )
    feeds = {"a": numbers(1, 3), "b": numbers(2, 1, seed=1), "c": numbers(2, 3, seed=2)}
    require_torchs(model, feeds, lambda a, b, c: (a * b * c).sum(), ["a", "b", "c"])


@pytest.mark.parametrize(
    ("scale", "bias"), [((4,), (4,)), ((3, 4), (1,)), ((1, 4), (3, 1)), ((2, 3, 4), (1, 1, 4)), ((1,), (3, 4))]
)
@pytest.mark.parametrize("named", [True, False], ids=["names", "numbers"])
def test_layer_normalization(scale: tuple[int, ...], bias: tuple[int, ...], named: bool) -> None:
    sizes = [(2, 3, 4), scale, bias]
    dims = [
        ",".join(f"{n}{k}" if named else str(size) for k, size in enumerate(s))
        for n, s in zip("xsb", sizes, strict=True)
    ]
    inputs = ", ".join(f"float[{one}] {name}" for one, name in zip(dims, ("x", "w", "b"), strict=True))
    model = model_of(inputs, "y = LayerNormalization(x, w, b)", output="float[A,B,C] y")
    feeds = {"x": numbers(*sizes[0]), "w": numbers(*scale, seed=1), "b": numbers(*bias, seed=2)}
    require_torchs(
        model, feeds, lambda x, w, b: torch.nn.functional.layer_norm(x, x.shape[-1:]) * w + b, ["x", "w", "b"]
    )


@pytest.mark.parametrize("aligned", [0, 1])
@pytest.mark.parametrize("size", [(2, 3, 6, 7), (2, 3, 4, 5, 6)])
@pytest.mark.parametrize("given", ["constant", "input"])
def test_affine_grids(size: tuple[int, ...], aligned: int, given: str) -> None:
    axes = len(size) - 2
    listed = ", ".join(map(str, size))
    output = ",".join(map(str, (size[0], *size[2:], axes)))
    model = model_of(
        f"float[N,{axes},{axes + 1}] theta" + (f", int64[{len(size)}] size" if given == "input" else ""),
        f"y = AffineGrid<align_corners = {aligned}>(theta, size)",
        opset=20,
        output=f"float[{output}] y",
        constants=f"int64[{len(size)}] size = {{{listed}}}" if given == "constant" else "",
    )
    feeds = {"theta": numbers(size[0], axes, axes + 1)}
    if given == "input":
        feeds["size"] = torch.tensor(size).numpy()

    def by_torch(theta: Tensor, size: Tensor | None = None) -> Tensor:
        return torch.nn.functional.affine_grid(theta, list(sizes), align_corners=bool(aligned))

    sizes = size
    require_torchs(model, feeds, by_torch, ["theta"])
