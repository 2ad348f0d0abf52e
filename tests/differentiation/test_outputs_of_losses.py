"""What a loss is taken of: probabilities instead of logits, several outputs, and a loss of a newer opset."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gradfuse import ArgumentError, TrainingSession, build_training_step, losses
from gradfuse.testing import assert_gradients_close

pytestmark = pytest.mark.usefixtures("inference_in_process")

X = torch.randn(5, 2, generator=torch.Generator().manual_seed(0))
W = torch.tensor([[1.0, -2, 0.5], [0.3, 1, -1]])
CLASSES = torch.tensor([0, 2, 1, 1, 2])
SHARES = torch.rand(5, 3, generator=torch.Generator().manual_seed(1))
WEIGHT = [1.0, 2.0, 0.5]


def ending(body: str) -> onnx.ModelProto:
    model = onnx.parser.parse_model(
        f'<ir_version: 9, opset_import: ["": 18]> g (float[N, 2] x) => (float[N, 3] p) {{ z = MatMul(x, w) {body} }}'
    )
    model.graph.initializer.append(onnx.numpy_helper.from_array(W.numpy(), "w"))
    return model


def affine(p: Tensor) -> Tensor:
    return p * 0.5 + 0.125


AFFINE = "h = Constant<value_float = 0.5>() e = Constant<value_float = 0.125>() r = Mul(q, h) p = Add(r, e)"
CASES: dict[str, tuple[str, Any, Callable[[Tensor], Tensor], Tensor]] = {
    "softmax": (
        "p = Softmax<axis = 1>(z)",
        "sparse_categorical_crossentropy",
        lambda z: F.nll_loss(z.softmax(1).log(), CLASSES),
        CLASSES,
    ),
    "softmax, passed on and weighted": (
        "q = Softmax(z) p = Identity(q)",
        losses.CrossEntropyLoss("sum", weight=WEIGHT, from_logits=False),
        lambda z: F.nll_loss(z.softmax(1).log(), CLASSES, torch.tensor(WEIGHT).to(z), reduction="sum"),
        CLASSES,
    ),
    "a softmax of other numbers": (
        "q = Softmax(z) s = Mul(q, q) t = ReduceSum<keepdims = 1>(s, a) p = Div(s, t)",
        losses.CrossEntropyLoss(from_logits=False),
        lambda z: F.cross_entropy(2 * z.log_softmax(1), CLASSES),
        CLASSES,
    ),
    "sigmoid": ("p = Sigmoid(z)", "bce", lambda z: F.binary_cross_entropy(z.sigmoid(), SHARES.to(z)), SHARES),
    "a share of a sigmoid": (
        f"q = Sigmoid(z) {AFFINE}",
        losses.BCELoss("sum"),
        lambda z: F.binary_cross_entropy(affine(z.sigmoid()), SHARES.to(z), reduction="sum"),
        SHARES,
    ),
}


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_losses_of_probabilities_are_torchs(name: str, fuse: bool) -> None:
    body, loss, by_torch, target = CASES[name]
    model = ending(body)
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([1]), "a"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        session = TrainingSession(build_training_step(model, loss, fuse=fuse))
    actual = session.step(X.numpy(), target.numpy())

    def gradient(dtype: torch.dtype) -> tuple[float, Any]:
        w = W.to(dtype, copy=True).requires_grad_()
        value = by_torch(X.to(dtype) @ w)
        value.backward()  # type: ignore[no-untyped-call]
        assert w.grad is not None
        return value.item(), w.grad.numpy()

    (_, native), (wanted, exact) = gradient(torch.float32), gradient(torch.float64)
    assert abs(actual - wanted) <= 1e-5 * max(1.0, abs(wanted))
    assert_gradients_close(session.gradients["w"], native, exact, np.float32, terms=16 * np.abs(exact).max())


def test_a_probability_of_zero_counts_as_in_torch() -> None:
    model = ending("l = Constant<value_float = 0.0>() u = Constant<value_float = 1.0>() p = Clip(z, l, u)")
    session = TrainingSession(build_training_step(model, "bce"))
    loss = session.step(X.numpy(), SHARES.numpy())
    p = (X @ W).clip(0, 1)
    assert (p == 0).any() and (p == 1).any()
    assert abs(loss - F.binary_cross_entropy(p, SHARES).item()) <= 1e-4
    assert np.isfinite(session.gradients["w"]).all()


@pytest.mark.parametrize(
    "end, loss, message",
    [
        ("Softmax", "cross_entropy", r"'p' is probabilities.*ends in Softmax.*from_logits=False\)"),
        ("LogSoftmax", "cross_entropy", r"'p' is log-probabilities.*losses\.NLLLoss\(\)"),
        ("Sigmoid", "cross_entropy", "ends in Sigmoid; CrossEntropyLoss takes logits"),
        ("Sigmoid", "bce_with_logits", r"ends in Sigmoid; BCEWithLogitsLoss takes logits.*losses\.BCELoss\(\)"),
        ("Softmax", "nll", "NLLLoss takes log-probabilities"),
    ],
)
def test_a_loss_behind_the_wrong_end_is_warned_of(end: str, loss: str, message: str) -> None:
    with pytest.warns(UserWarning, match=message):
        build_training_step(ending(f"q = {end}(z) p = Identity(q)"), loss)


BOX_AND_CLASS = """<ir_version: 9, opset_import: ["": 17]> g (float[N, 2] x) => (float[N, 2] box, float[N, 2] cls)
<float[2, 2] a = {1, 2, 3, 4}, float[2, 2] b = {1, 0, 0, 1}> { box = MatMul(x, a) cls = MatMul(x, b) }"""


def both(first: str, second: str, *more: str) -> onnx.ModelProto:
    inputs = ", ".join(f"float[N, 2] {name}" for name in (first, second, *more, "target_box"))
    return onnx.parser.parse_model(
        f'<ir_version: 9, opset_import: ["": 17]> l ({inputs}, int64[N] target) => (float loss) '
        f"{{ d = Sub({first}, target_box) q = Mul(d, d) u = ReduceMean<keepdims = 0>(q) "
        f"v = SoftmaxCrossEntropyLoss({second}, target) loss = Add(u, v) }}"
    )


@pytest.mark.parametrize("order", [("box", "cls"), ("cls", "box")])
def test_a_loss_takes_outputs_under_their_names(order: tuple[str, str]) -> None:
    loss = both(*order)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step = build_training_step(onnx.parser.parse_model(BOX_AND_CLASS), loss)
    assert step.target_names == ("target_box", "target") and step.parameters.keys() == {"a", "b"}
    session = TrainingSession(step)
    target, labels = torch.ones(5, 2), torch.tensor([0, 1, 1, 0, 1])
    session.step(X.numpy(), {"target_box": target.numpy(), "target": labels.numpy()})

    def gradients(dtype: torch.dtype) -> dict[str, Any]:
        leaves = {
            "box": torch.tensor([[1.0, 2], [3, 4]], dtype=dtype, requires_grad=True),
            "cls": torch.eye(2, dtype=dtype, requires_grad=True),
        }
        outputs = {name: X.to(dtype) @ leaf for name, leaf in leaves.items()}
        value = F.mse_loss(outputs[order[0]], target.to(dtype)) + F.cross_entropy(outputs[order[1]], labels)
        value.backward()  # type: ignore[no-untyped-call]
        return {name: leaf.grad.numpy() for name, leaf in leaves.items() if leaf.grad is not None}

    native, exact = gradients(torch.float32), gradients(torch.float64)
    for name, output in (("a", "box"), ("b", "cls")):
        terms = 16 * np.abs(exact[output]).max()
        assert_gradients_close(session.gradients[name], native[output], exact[output], np.float32, terms=terms)


def test_a_loss_of_one_output_of_several_is_told_of() -> None:
    model = onnx.parser.parse_model(BOX_AND_CLASS)
    with pytest.warns(
        UserWarning, match="takes the output 'box' alone, and targets 'other'.*'cls' are left out.*names"
    ):
        build_training_step(model, both("box", "other"))
    with pytest.raises(ArgumentError, match="takes 'cls' behind 'other' or 'box'; expected outputs of the model first"):
        build_training_step(model, both("box", "other", "cls"))


def test_a_model_is_raised_to_the_opset_of_its_loss() -> None:
    """The evaluation model stays as it is."""
    model = onnx.parser.parse_model(
        '<ir_version: 9, opset_import: ["": 17]> g (float[N, 2] x) => (float[N, 2] y) '
        "<float[2, 2] w = {1, 2, 3, 4}> { z = MatMul(x, w) r = ReduceMean<axes = [1]>(z) y = Mul(z, r) }"
    )
    loss = onnx.parser.parse_model(
        '<ir_version: 9, opset_import: ["": 18]> l (float[N, 2] o, float[N, 1] t) => (float loss) '
        "{ a, b = Split<axis = 1, num_outputs = 2>(o) d = Sub(a, t) q = Mul(d, b) loss = ReduceMean<keepdims = 0>(q) }"
    )
    step = build_training_step(model, loss)
    onnx.checker.check_model(step.model)
    assert step.evaluation_model is not None
    assert [entry.version for entry in step.evaluation_model.opset_import if not entry.domain] == [17]
    session = TrainingSession(step)
    actual = session.step(X.numpy(), np.ones((5, 1), np.float32))

    def by_torch(dtype: torch.dtype) -> tuple[float, Any]:
        w = torch.tensor([[1.0, 2], [3, 4]], dtype=dtype, requires_grad=True)
        z = X.to(dtype) @ w
        y = z * z.mean(1, keepdim=True)
        value = ((y[:, :1] - 1) * y[:, 1:]).mean()
        value.backward()  # type: ignore[no-untyped-call]
        assert w.grad is not None
        return value.item(), w.grad.numpy()

    (_, native), (wanted, exact) = by_torch(torch.float32), by_torch(torch.float64)
    assert abs(actual - wanted) <= 1e-5 * abs(wanted)
    assert_gradients_close(session.gradients["w"], native, exact, np.float32, terms=16 * np.abs(exact).max())
