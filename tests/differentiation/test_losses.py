"""The losses of `gradfuse.losses` that take numbers of the output's shape, beside torch.nn's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradfuse import ArgumentError, ModelError, TrainingSession, build_training_step, losses
from gradfuse.testing import assert_gradients_close

pytestmark = pytest.mark.usefixtures("inference_in_process")

GENERATOR = torch.Generator().manual_seed(0)
X, W = torch.randn(6, 2, generator=GENERATOR), torch.randn(2, 3, generator=GENERATOR)
SHARES = torch.rand(6, 3, generator=GENERATOR).softmax(1)
ONE_HOT = F.one_hot(torch.tensor([0, 2, 1, 1, 0, 2]), 3).float()
SIGNS, COUNTS = ONE_HOT * 2 - 1, torch.tensor([0.0, 1, 5]).repeat(6, 1)
WEIGHT = [1.0, 2.0, 0.5]

BODIES: dict[str, Callable[[Tensor], Tensor]] = {
    "p = Identity(z)": lambda z: z,
    "p = Softmax<axis = 1>(z)": lambda z: z.softmax(1),
    "p = LogSoftmax<axis = 1>(z)": lambda z: z.log_softmax(1),
    "p = Softplus(z)": lambda z: F.softplus(z),
}
RAW, SOFTMAX, LOG_SOFTMAX, POSITIVE = BODIES


def of_probabilities(p: Tensor, target: Tensor) -> Tensor:
    return -(target * p.log()).sum(1).mean()


CASES: list[tuple[str, Any, Any, Tensor]] = [
    (RAW, losses.CrossEntropyLoss(soft_targets=True), nn.CrossEntropyLoss(), SHARES),
    (RAW, losses.CrossEntropyLoss("sum", soft_targets=True), nn.CrossEntropyLoss(reduction="sum"), ONE_HOT),
    (
        RAW,
        losses.CrossEntropyLoss(weight=WEIGHT, label_smoothing=0.2, soft_targets=True),
        lambda p, y: F.cross_entropy(p, y, torch.tensor(WEIGHT).to(p), label_smoothing=0.2),
        SHARES,
    ),
    (SOFTMAX, "categorical_crossentropy", of_probabilities, ONE_HOT),
    (LOG_SOFTMAX, "kl_div", nn.KLDivLoss(reduction="batchmean"), ONE_HOT),
    (LOG_SOFTMAX, losses.KLDivLoss(), nn.KLDivLoss(reduction="mean"), SHARES),
    (
        LOG_SOFTMAX,
        losses.KLDivLoss("sum", log_target=True),
        nn.KLDivLoss(reduction="sum", log_target=True),
        SHARES.log(),
    ),
    (RAW, "smooth_l1", nn.SmoothL1Loss(), SHARES),
    (RAW, losses.SmoothL1Loss("sum", beta=0.3), nn.SmoothL1Loss(reduction="sum", beta=0.3), SHARES),
    (RAW, losses.SmoothL1Loss(beta=0), nn.SmoothL1Loss(beta=0), SHARES),
    (RAW, "soft_margin", nn.SoftMarginLoss(), SIGNS),
    (RAW, "poisson_nll", nn.PoissonNLLLoss(), COUNTS),
    (POSITIVE, losses.PoissonNLLLoss("sum", log_input=False), nn.PoissonNLLLoss(False, reduction="sum"), COUNTS),
]


@pytest.mark.parametrize("case", range(len(CASES)))
@pytest.mark.parametrize("fuse", [True, False])
def test_losses_are_torchs(case: int, fuse: bool) -> None:
    body, loss, by_torch, target = CASES[case]
    model = onnx.parser.parse_model(
        f'<ir_version: 9, opset_import: ["": 18]> g (float[N, 2] x) => (float[N, 3] p) {{ z = MatMul(x, w) {body} }}'
    )
    model.graph.initializer.append(onnx.numpy_helper.from_array(W.numpy(), "w"))
    session = TrainingSession(build_training_step(model, loss, fuse=fuse))
    actual = np.float32(session.step(X, target))
    results = []
    for dtype in (torch.float32, torch.float64):
        w = W.to(dtype, copy=True).requires_grad_()
        value = by_torch(BODIES[body](X.to(dtype) @ w), target.to(dtype))
        results.append((value.detach(), torch.autograd.grad(value, w)[0]))
    terms = float(max(1.0, *(abs(one).max() for one in results[1])))
    assert_gradients_close(actual, results[0][0], results[1][0], np.float32, terms=terms)
    assert_gradients_close(session.gradients["w"], results[0][1], results[1][1], np.float32, terms=terms)


@pytest.mark.parametrize(
    ("loss", "by_torch", "target"),
    [
        ("bce_with_logits", F.binary_cross_entropy_with_logits, SHARES),
        (
            losses.BCEWithLogitsLoss("sum", pos_weight=WEIGHT),
            nn.BCEWithLogitsLoss(reduction="sum", pos_weight=torch.tensor(WEIGHT).double()),
            ONE_HOT,
        ),
        ("soft_margin", lambda p, y: F.softplus(-p * y).mean(), SIGNS),
    ],
)
@pytest.mark.parametrize("size", [0.0, 1.0, 1000.0])
@pytest.mark.parametrize("opset", [17, 18])
def test_losses_of_float64_are_torchs(loss: Any, by_torch: Any, target: Tensor, size: float, opset: int) -> None:
    """onnxruntime has no Softplus of float64, and its body, which ONNX has from opset 18 on, is soon infinite."""
    model = onnx.parser.parse_model(
        f'<ir_version: 9, opset_import: ["": {opset}]> g (double[N, 2] x) => (double[N, 3] p) {{ p = MatMul(x, w) }}'
    )
    model.graph.initializer.append(onnx.numpy_helper.from_array(W.double().numpy(), "w"))
    session = TrainingSession(build_training_step(model, loss))
    x, w = X.double() * size, W.double().requires_grad_()
    value = by_torch(x @ w, target.double())
    np.testing.assert_allclose(session.step(x, target.double()), value.item(), rtol=1e-13)
    expected = torch.autograd.grad(value, w)[0].numpy()
    np.testing.assert_allclose(session.gradients["w"], expected, rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize(
    ("kind", "options", "text"),
    [
        (losses.SmoothL1Loss, {"beta": -1.0}, "SmoothL1Loss: beta is -1.0; expected a number from 0 on"),
        (losses.KLDivLoss, {"reduction": "none"}, "reduction is 'none'; expected 'mean' or 'sum' or 'batchmean'"),
        # The first argument of torch's.
        (losses.NLLLoss, {"reduction": torch.ones(3)}, "NLLLoss: reduction is torch.Tensor; expected 'mean' or 'sum'"),
        (
            losses.CrossEntropyLoss,
            {"soft_targets": True, "ignore_index": 1},
            "ignore_index is 1 with soft_targets, which are no classes; expected one or the other",
        ),
    ],
)
def test_options_out_of_range(kind: Any, options: dict[str, Any], text: str) -> None:
    with pytest.raises(ArgumentError, match=text):
        kind(**options)


def untied(body: str) -> onnx.ModelProto:
    """Return a model whose output shares no named size with its input, as those of tf2onnx and skl2onnx."""
    text = f"g (float[A, 2] x) => (float[B, 3] p) {{ z = MatMul(x, w) {body} }}"
    model = onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["": 18]> {text}')
    model.graph.initializer.append(onnx.numpy_helper.from_array(W.numpy(), "w"))
    return model


def loss_of_model() -> onnx.ModelProto:
    text = "(float[N, C] p, float[N, C] y) => (float l) { d = Sub(p, y) a = Abs(d) l = ReduceMean<keepdims = 0>(a) }"
    return onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["": 18]> loss {text}')


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize(
    ("body", "loss", "target", "fit"),
    [
        (RAW, "mse", SHARES[:1], SHARES),
        (POSITIVE, "poisson_nll", COUNTS[:1], COUNTS),
        (LOG_SOFTMAX, "kl_div", SHARES[:1], SHARES),
        (SOFTMAX, "categorical_crossentropy", ONE_HOT[:1], ONE_HOT),
        ("p = Sigmoid(z)", "bce", ONE_HOT[:1], ONE_HOT),
        (RAW, "cross_entropy", torch.tensor([2]), torch.zeros(6, dtype=torch.int64)),
        (RAW, losses.CrossEntropyLoss(label_smoothing=0.1), torch.tensor([2]), torch.zeros(6, dtype=torch.int64)),
        (RAW, losses.CrossEntropyLoss(weight=WEIGHT), torch.tensor([2]), torch.zeros(6, dtype=torch.int64)),
        (LOG_SOFTMAX, "nll", torch.tensor([2]), torch.zeros(6, dtype=torch.int64)),
        (RAW, {"p": "l1"}, SHARES[:1], SHARES),
        (RAW, loss_of_model(), SHARES[:1], SHARES),
    ],
)
def test_targets_are_not_broadcast(body: str, loss: Any, target: Tensor, fit: Tensor, fuse: bool) -> None:
    session = TrainingSession(build_training_step(untied(body), loss, fuse=fuse))
    with pytest.raises(ModelError, match=r"TrainingSession\.step: "):
        session.step(X, {"p": target} if isinstance(loss, dict) else target)
    assert np.isfinite(session.step(X, {"p": fit} if isinstance(loss, dict) else fit))


def test_the_error_names_the_target() -> None:
    session = TrainingSession(build_training_step(untied(RAW), "mse"))
    with pytest.raises(ModelError, match="target and p of different sizes along axis 0, expected equal ones"):
        session.step(X, SHARES[:1])


@pytest.mark.parametrize(
    ("loss", "text"),
    [
        (losses.CrossEntropyLoss(weight=[1.0, 2.0]), "CrossEntropyLoss 2 weights along axis 1; expected 3"),
        (losses.CrossEntropyLoss(weight=[1.0] * 4), "CrossEntropyLoss 4 weights along axis 1; expected 3"),
        (losses.CrossEntropyLoss(weight=[2.0], soft_targets=True), "CrossEntropyLoss 1 weights along axis 1"),
        (losses.NLLLoss(weight=2.0), r"weight has shape \[\]; expected one number per class"),
        (losses.BCEWithLogitsLoss(pos_weight=[1.0, 2.0]), "BCEWithLogitsLoss 2 weights along axis 1; expected 3"),
        (losses.BCEWithLogitsLoss(pos_weight=[[[1.0]]]), r"pos_weight has shape \[1, 1, 1\]; expected at most 2"),
    ],
)
def test_weights_fit_the_output(loss: losses.Loss, text: str) -> None:
    with pytest.raises(ArgumentError, match=text):
        build_training_step(untied(RAW), loss)


def test_weights_fit_sizes_of_the_batch() -> None:
    text = "g (float[N, C] x) => (float[N, C] p) <float[1] w = {2}> { p = Mul(x, w) }"
    model = onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["": 18]> {text}')
    session = TrainingSession(build_training_step(model, losses.CrossEntropyLoss(weight=WEIGHT), trainable=["w"]))
    labels = torch.zeros(6, dtype=torch.int64)
    with pytest.raises(ModelError, match="p of another size than the weights along axis 1, expected 3"):
        session.step(X, labels)
    assert np.isfinite(session.step(SHARES, labels))


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("declared", ["N", "2"])
def test_rows_that_the_model_declares_wrong(declared: str, fuse: bool) -> None:
    """Two steps of each item are rows of the output, which is declared as if it had one of each, or of one item."""
    text = f"g (float[N, 2, 2] x) => (float[{declared}, 3] p) {{ r = Reshape(x, s) z = MatMul(r, w) p = Add(z, b) }}"
    model = onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["": 18]> {text}')
    model.graph.value_info.append(
        onnx.helper.make_tensor_value_info(
            "r", onnx.TensorProto.FLOAT, [int(declared) if declared.isdigit() else declared, 2]
        )
    )
    bias = np.ones((1, 3), np.float32)
    tensors = {"w": W.numpy(), "b": bias, "s": np.array([-1, 2])}
    model.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in tensors.items())
    session = TrainingSession(build_training_step(model, "mse", fuse=fuse))
    for items in (3, 1):
        x, target = X[: 2 * items], SHARES[: 2 * items]
        with pytest.raises(ModelError, match="target and p of different sizes along axis 0"):
            session.step(x.reshape(items, 2, 2), target[:1])
        actual = np.float32(session.step(x.reshape(items, 2, 2), target))
        results = []
        for dtype in (torch.float32, torch.float64):
            w, b = W.to(dtype, copy=True).requires_grad_(), torch.tensor(bias, dtype=dtype, requires_grad=True)
            value = F.mse_loss(x.to(dtype) @ w + b, target.to(dtype))
            results.append((value.detach(), *torch.autograd.grad(value, (w, b))))
        assert_gradients_close(actual, results[0][0], results[1][0], np.float32, terms=10)
        assert_gradients_close(session.gradients["w"], results[0][1], results[1][1], np.float32, terms=10)
        assert_gradients_close(session.gradients["b"], results[0][2], results[1][2], np.float32, terms=10)


@pytest.mark.parametrize("fuse", [True, False])
def test_one_selected_row_is_not_compared_with_all(fuse: bool) -> None:
    """The rows that a mask selects are declared as if they were all."""
    text = "g (float[N, 2] x, bool[N] m) => (float[N, 3] p) { r = Compress<axis = 0>(x, m) p = MatMul(r, w) }"
    model = onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["": 18]> {text}')
    model.graph.initializer.append(onnx.numpy_helper.from_array(W.numpy(), "w"))
    session = TrainingSession(build_training_step(model, "mse", fuse=fuse))
    with pytest.raises(ModelError, match="target and p of different sizes along axis 0"):
        session.step((X, np.arange(6) == 2), SHARES)
    assert np.isfinite(session.step((X, np.ones(6, bool)), SHARES))
