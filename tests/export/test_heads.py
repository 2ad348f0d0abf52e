"""Heads, linear layers with a cross entropy, in training steps: where they are one operator. Exports check numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradfuse import TrainingSession, TrainingStep, build_training_step, export_training_step, losses
from gradfuse.differentiation import linear_cross_entropy
from gradfuse.differentiation.linear_cross_entropy import FEWEST_CLASSES, FEWEST_ROWS
from gradfuse.testing import assert_gradients_close

CLASSES, WIDTH = FEWEST_CLASSES, 4
SHAPE = (2, FEWEST_ROWS // 2 + 1)
Loss = Callable[[Tensor, Tensor], Tensor]


@pytest.fixture(autouse=True)
def _few_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the operator stand where it saves no memory yet."""
    monkeypatch.setattr(linear_cross_entropy, "FEWEST_LOGITS", 0)


class NarrowLinear(nn.Linear):
    """A layer under autocast, whose results are made wide again for the loss."""

    def forward(self, input: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            narrow = super().forward(input)
        return narrow.float()


class Model(nn.Module):
    """An embedding, a layer, and a head whose results a function changes."""

    def __init__(
        self, head: nn.Module | None = None, *, tied: bool = False, after: Callable[[Tensor], Any] | None = None
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.layer = nn.Embedding(CLASSES if tied else 9, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES, bias=False) if head is None else head
        if tied:
            self.head.weight = self.embedding.weight
        self.after = after or (lambda logits: logits)

    def forward(self, tokens: Tensor) -> Any:
        return self.after(self.head(self.layer(self.embedding(tokens)).tanh()))


def of_tokens(**options: Any) -> Loss:
    return lambda logits, target: F.cross_entropy(logits.reshape(-1, logits.shape[-1]), target.reshape(-1), **options)


def masked(logits: Tensor, target: Tensor) -> Tensor:
    losses = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none")
    counts = (target.flatten() % 3 != 0).to(losses.dtype)
    return (losses * counts).sum() / counts.sum()


def exported(model: nn.Module, loss: Loss, **options: Any) -> TrainingStep:
    generator = torch.Generator().manual_seed(0)
    tokens, target = torch.randint(0, 9, SHAPE, generator=generator), torch.randint(0, CLASSES, SHAPE)
    target[0, 1] = -100 if "ignored" in options else target[0, 1]
    options.pop("ignored", None)
    return export_training_step(model, loss, (tokens, target), **options)


def nodes(step: TrainingStep, *op_types: str) -> list[onnx.NodeProto]:
    return [node for node in step.model.graph.node if node.op_type in op_types]


def assert_one_head(step: TrainingStep) -> onnx.NodeProto:
    """One operator gives the loss and all gradients, and nothing has an element for each row and class."""
    (head,) = nodes(step, "LinearCrossEntropy")
    assert_no_logits(step)
    return head


def assert_no_logits(step: TrainingStep) -> None:
    assert not nodes(step, "LogSoftmax", "GatherElements", "CrossEntropyLossGrad", "SoftmaxCrossEntropyLoss")
    for value in step.model.graph.value_info:
        dims = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        assert dims[-1:] != [CLASSES] or len(dims) == 1


def of_each_token(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.transpose(1, 2), target)


def by_log_probabilities(logits: Tensor, target: Tensor) -> Tensor:
    return F.nll_loss(logits.log_softmax(-1).flatten(0, 1), target.flatten())


def picked(logits: Tensor, target: Tensor) -> Tensor:
    return -logits.log_softmax(-1).gather(-1, target.unsqueeze(-1)).squeeze(-1).mean()


KINDS: dict[str, tuple[Model, Loss, dict[str, Any]]] = {
    "plain": (Model(), of_tokens(), {}),
    "ignored rows": (Model(), of_tokens(reduction="sum"), {"ignored": True}),
    "a bias": (Model(nn.Linear(WIDTH, CLASSES)), of_tokens(ignore_index=3), {}),
    "tied": (Model(tied=True), of_tokens(), {}),
    "smoothed": (Model(), of_tokens(label_smoothing=0.25), {"ignored": True}),
    "weighted": (Model(), of_tokens(weight=torch.rand(CLASSES), label_smoothing=0.1, reduction="sum"), {}),
    "weights of rows": (Model(), masked, {}),
    "capped": (Model(after=lambda x: 30 * (x / 30).tanh()), of_tokens(), {}),
    "scaled": (Model(nn.Linear(WIDTH, CLASSES), after=lambda x: x * 0.5), of_tokens(), {}),
    "shifted": (Model(after=lambda x: x[:, :-1]), lambda x, t: of_tokens()(x, t[:, 1:]), {}),
    "classes in the middle": (Model(), of_each_token, {"ignored": True}),
    "log-probabilities": (Model(), by_log_probabilities, {"ignored": True}),
    "picked log-probabilities": (Model(), picked, {}),
    "under autocast": (Model(NarrowLinear(WIDTH, CLASSES)), of_tokens(), {}),
    "a part of the loss": (Model(), lambda x, t: 0.5 * of_tokens()(x, t) + 1.0, {}),
    "any batch": (Model(), of_tokens(), {"dynamic_shapes": ({0: "b", 1: "t"}, {0: "b", 1: "t"})}),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sampled(every=3)
def test_a_head_is_one_operator(kind: str) -> None:
    model, loss, options = KINDS[kind]
    step = exported(model, loss, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), **options)
    assert_one_head(step)


def z_loss(logits: Tensor, target: Tensor) -> Tensor:
    return of_tokens()(logits, target) + 1e-2 * logits.logsumexp(-1).square().mean()


def masked_z_loss(logits: Tensor, target: Tensor) -> Tensor:
    rows, labels = logits.flatten(0, 1), target.flatten()
    counts = (labels != -100).to(logits.dtype)
    sums = torch.logsumexp(rows, dim=-1, keepdim=True)
    return F.cross_entropy(rows, labels, reduction="sum") / counts.sum() + (sums[:, 0] ** 2 * counts).mean()


def by_hand(logits: Tensor, target: Tensor) -> Tensor:
    sums = logits.logsumexp(-1)
    return (sums - logits.gather(-1, target.unsqueeze(-1)).squeeze(-1)).mean() + (sums * sums).mean()


def by_difference(logits: Tensor, target: Tensor) -> Tensor:
    sums = logits.logsumexp(-1, keepdim=True)
    return sums.square().mean() - (logits - sums).gather(-1, target.unsqueeze(-1)).mean()


Z_LOSSES: dict[str, tuple[Model, Loss, dict[str, Any]]] = {
    "of tokens": (Model(), z_loss, {}),
    "of rows that are not ignored": (Model(tied=True), masked_z_loss, {"ignored": True}),
    "of capped logits": (Model(after=lambda x: 30 * (x / 30).tanh()), z_loss, {}),
    "of shifted tokens": (Model(after=lambda x: x[:, :-1]), lambda x, t: z_loss(x, t[:, 1:]), {}),
    "of classes in the middle": (Model(), lambda x, t: of_each_token(x, t) + x.logsumexp(-1).square().mean(), {}),
    "by log-probabilities": (Model(), lambda x, t: picked(x, t) + x.logsumexp(-1).square().mean(), {}),
    "of a logit's distance": (Model(), by_hand, {}),
    "of differences": (Model(), by_difference, {}),
    "of shifted tokens of any batch": (
        Model(after=lambda x: x[:, :-1].flatten(0, 1)),
        lambda x, t: z_loss(x, t[:, 1:]),
        {"dynamic_shapes": ({0: "b", 1: "t"}, {0: "b", 1: "t"})},
    ),
    "of any batch": (
        Model(nn.Linear(WIDTH, CLASSES)), z_loss, {"dynamic_shapes": ({0: "b", 1: "t"}, {0: "b", 1: "t"})}
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", Z_LOSSES)
@pytest.mark.sampled(every=3)
def test_a_z_loss_needs_no_logits(kind: str) -> None:
    """One operator gives the loss and the logarithms of sums, from which the other has its gradient."""
    model, loss, options = Z_LOSSES[kind]
    step = exported(model, loss, **options)
    assert len(nodes(step, "LinearCrossEntropy")) == 2
    assert_no_logits(step)


def test_the_loss_of_linear_layer_and_cross_entropy_exports() -> None:
    """F.linear_cross_entropy: the weight is the loss's own."""
    if not hasattr(F, "linear_cross_entropy"):
        pytest.skip("this PyTorch has no linear_cross_entropy")

    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.weight = nn.Linear(3, WIDTH), nn.Parameter(torch.randn(CLASSES, WIDTH))

        def forward(self, x: Tensor, target: Tensor) -> Tensor:
            options = torch.nn.LinearCrossEntropyOptions()
            return F.linear_cross_entropy(self.layer(x), self.weight, target, options=options)

    batch = (torch.randn(FEWEST_ROWS, 3), torch.randint(0, CLASSES, (FEWEST_ROWS,)))
    shapes = ({0: "rows"}, {0: "rows"}), ()
    step = export_training_step(Head(), lambda loss: loss, (batch, ()), dynamic_shapes=shapes)
    assert_one_head(step)


def test_a_gradient_that_follows_from_the_loss_is_taken_apart_from_it() -> None:
    step = exported(Model(), lambda x, t: of_tokens()(x, t).square())
    assert len(nodes(step, "LinearCrossEntropy")) == 2


def test_a_slice_behind_a_view_stays_as_it_is() -> None:
    """Of the rows that a view has regrouped, the input has no slice."""
    model = Model(after=lambda x: x[:, 1:].reshape(-1, 8, CLASSES)[1:])
    rows = SHAPE[1] // 8 * 16
    step = export_training_step(
        model, of_tokens(), (torch.zeros(2, SHAPE[1] // 8 * 8 + 1).long(), torch.ones(rows - 8).long())
    )
    assert not nodes(step, "LinearCrossEntropy")


def test_losses_with_classes_in_the_middle() -> None:
    """SoftmaxCrossEntropyLoss of (N, C, L), for the results (N, L, C) of a layer."""
    model = onnx.parser.parse_model(
        f'<ir_version: 9, opset_import: ["": 18]> head (float[2, {FEWEST_ROWS}, 3] x)'
        f"=> (float[2, {CLASSES}, {FEWEST_ROWS}] y) {{ turned = Transpose<perm = [1, 0]>(weight)"
        f"logits = MatMul(x, turned)  y = Transpose<perm = [0, 2, 1]>(logits) }}"
    )
    weight = torch.randn(CLASSES, 3, generator=torch.Generator().manual_seed(0))
    model.graph.initializer.append(onnx.numpy_helper.from_array(weight.numpy(), "weight"))
    x, target = torch.randn(2, FEWEST_ROWS, 3), torch.randint(0, CLASSES, (2, FEWEST_ROWS))
    step = build_training_step(model, losses.CrossEntropyLoss(ignore_index=7))
    assert_one_head(step)
    session = TrainingSession(step)
    session.step(x.numpy(), target.numpy())
    found = []
    for work in (torch.float32, torch.float64):
        leaf = weight.to(work, copy=True).requires_grad_()
        loss = F.cross_entropy((x.to(work) @ leaf.T).transpose(1, 2), target, ignore_index=7)
        found.append(torch.autograd.grad(loss, leaf)[0])
    native, exact = found
    terms = 10 * float(exact.abs().max())
    assert_gradients_close(session.gradients["weight"], native, exact, torch.float32, terms=terms)


PICKED = """
    label = Constant<value_ints = [-1]>()  index = Unsqueeze(target, label)  logp = LogSoftmax<axis = -1>(logits)
    chosen = GatherElements<axis = 2>(logp, index)  each = Neg(chosen)
    loss = ReduceMean<keepdims = 0>(each)
"""


def model_of_loss(body: str, equation: str, *shape: int) -> tuple[onnx.ModelProto, Tensor]:
    """A model that gives its loss, with a head by Einsum, and its weight."""
    model = onnx.parser.parse_model(
        f'<ir_version: 9, opset_import: ["": 18]> head (float[2, {FEWEST_ROWS}, 3] x, int64[2, {FEWEST_ROWS}] target)'
        f'=> (float loss) {{ logits = Einsum<equation = "{equation}">(x, weight) {body} }}'
    )
    weight = torch.randn(*shape, generator=torch.Generator().manual_seed(0))
    model.graph.initializer.append(onnx.numpy_helper.from_array(weight.numpy(), "weight"))
    return model, weight


@pytest.mark.parametrize(("equation", "shape"), [("abc,cd->abd", (3, CLASSES)), ("...h,vh->...v", (CLASSES, 3))])
def test_picked_log_probabilities_of_an_einsum(equation: str, shape: tuple[int, int]) -> None:
    """As JAX writes heads; a class below 0 counts from the end."""
    model, weight = model_of_loss(PICKED, equation, *shape)
    x, target = torch.randn(2, FEWEST_ROWS, 3), torch.randint(-CLASSES, CLASSES, (2, FEWEST_ROWS))
    step = build_training_step(model, None)
    assert_one_head(step)
    session = TrainingSession(step)
    session.step((x.numpy(), target.numpy()))
    found = []
    for work in (torch.float32, torch.float64):
        leaf = weight.to(work, copy=True).requires_grad_()
        logits = torch.einsum(equation, x.to(work), leaf)
        loss = -logits.log_softmax(-1).gather(-1, target.remainder(CLASSES).unsqueeze(-1)).mean()
        found.append(torch.autograd.grad(loss, leaf)[0])
    native, exact = found
    assert_gradients_close(
        session.gradients["weight"], native, exact, torch.float32, terms=10 * float(exact.abs().max())
    )


ALMOST = {
    "of fewer rows": PICKED.replace("Unsqueeze(target, label)", "Unsqueeze(some, label)").replace(
        "index =",
        f"zero = Constant<value_ints = [0]>()  end = Constant<value_ints = [{FEWEST_ROWS - 1}]>()"
        "  one = Constant<value_ints = [1]>()  some = Slice(target, zero, end, one)  index =",
    ),
    "along the rows": PICKED.replace("GatherElements<axis = 2>", "GatherElements<axis = 1>"),
    "of a softmax along rows": PICKED.replace("LogSoftmax<axis = -1>", "LogSoftmax<axis = 1>"),
    "read by something else": PICKED.replace(
        "loss = ReduceMean<keepdims = 0>(each)",
        "own = ReduceMean<keepdims = 0>(each)  all = ReduceMax<keepdims = 0>(logp)  loss = Add(own, all)",
    ),
}


@pytest.mark.parametrize("body", ALMOST.values(), ids=ALMOST.keys())
def test_what_is_almost_a_head_stays(body: str) -> None:
    model, _ = model_of_loss(body, "abc,cd->abd", 3, CLASSES)
    assert not nodes(build_training_step(model, None), "LinearCrossEntropy")


def small(logits: Tensor) -> Tensor:
    return logits[..., : CLASSES - 1]


@pytest.mark.parametrize(
    "model, loss, options",
    [
        (Model(), lambda x, t: of_tokens()(x, t) + x.square().mean(), {}),
        (Model(), lambda x, t: of_tokens()(x, t) + (x / 2).logsumexp(-1).mean(), {}),
        (Model(), lambda x, t: of_tokens()(x, t) + x.logsumexp(1).mean(), {}),
        (Model(), lambda x, t: of_tokens()(x[:, :-1], t[:, 1:]) + x.logsumexp(-1).mean(), {}),
        (Model(), of_tokens(), {"fuse": False}),
        (Model(after=small), lambda x, t: of_tokens()(x, t.clamp(max=CLASSES - 2)), {}),
        (Model(nn.Linear(WIDTH, CLASSES - 1)), lambda x, t: of_tokens()(x, t.clamp(max=CLASSES - 2)), {}),
    ],
    ids=(
        *("read by something else", "read with a temperature", "read along the tokens", "read by more rows"),
        *("not fused", "some classes", "few classes"),
    ),
)
@pytest.mark.sampled(every=2)
def test_other_heads_stay_as_they_are(model: Model, loss: Loss, options: dict[str, Any]) -> None:
    step = exported(model, loss, **options)
    assert not nodes(step, "LinearCrossEntropy") and nodes(step, "LogSoftmax")


def test_few_logits_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_cross_entropy, "FEWEST_LOGITS", SHAPE[0] * SHAPE[1] * CLASSES + 1)
    assert not nodes(exported(Model(), of_tokens()), "LinearCrossEntropy")


def test_few_rows_stay_as_they_are() -> None:
    step = export_training_step(Model(), of_tokens(), (torch.zeros(1, 5).long(), torch.zeros(1, 5).long()))
    assert not nodes(step, "LinearCrossEntropy")


def test_the_evaluation_model_gives_logits() -> None:
    step = exported(Model(), of_tokens(), evaluation=True)
    assert_one_head(step)
    assert step.evaluation_model is not None
    assert [node.op_type for node in step.evaluation_model.graph.node][-1] == "MatMul"


def test_labels_out_of_range_are_refused() -> None:
    session = TrainingSession(exported(Model(), of_tokens()))
    tokens = np.zeros(SHAPE, np.int64)
    with pytest.raises(Exception, match=rf"target.* is {CLASSES}|out of range|expected 0 to {CLASSES - 1}"):
        session.step(tokens, np.full(SHAPE, CLASSES))


def test_a_z_loss_of_an_onnx_model() -> None:
    rows = FEWEST_ROWS
    model = onnx.parser.parse_model(
        f"""<ir_version: 9, opset_import: ["": 18]>
        head (double[{rows}, {WIDTH}] x, int64[{rows}] target, double[{CLASSES}, {WIDTH}] weight) => (double loss) {{
            turned = Transpose<perm = [1, 0]>(weight)  logits = MatMul(x, turned)
            entropy = SoftmaxCrossEntropyLoss<reduction = "mean">(logits, target)
            axes = Constant<value_ints = [1]>()  sums = ReduceLogSumExp<keepdims = 0>(logits, axes)
            squares = Mul(sums, sums)  z = ReduceMean<keepdims = 0>(squares)  loss = Add(entropy, z)
        }}"""
    )
    x, weight = torch.randn(rows, WIDTH).double(), torch.randn(CLASSES, WIDTH).double().requires_grad_()
    target = torch.randint(0, CLASSES, (rows,))
    model.graph.initializer.append(onnx.numpy_helper.from_array(weight.detach().numpy(), "weight"))
    del model.graph.input[2:]
    step = build_training_step(model, None)
    assert len(nodes(step, "LinearCrossEntropy")) == 2
    session = TrainingSession(step)
    loss = session.step((x.numpy(), target.numpy()))
    expected = F.cross_entropy(x @ weight.T, target) + (x @ weight.T).logsumexp(1).square().mean()
    (gradient,) = torch.autograd.grad(expected, weight)
    expected = expected.detach()
    assert_gradients_close(np.asarray(loss, np.float64), expected, expected, torch.float64)
    terms = 10 * float(gradient.abs().max())
    assert_gradients_close(session.gradients["weight"], gradient, gradient, torch.float64, terms=terms)


@pytest.mark.parametrize("dtype", (torch.float64, torch.float32))
@pytest.mark.parametrize("turned", (False, True))
@pytest.mark.parametrize("reduction", ("mean", "sum"))
def test_heads_of_onnx_models(turned: bool, reduction: str, dtype: torch.dtype) -> None:
    rows, kind = FEWEST_ROWS, {torch.float32: "float", torch.float64: "double"}[dtype]
    product = (
        "weight_t = Transpose<perm = [1, 0]>(weight) y = MatMul(h, weight_t)" if turned else "y = MatMul(h, weight)"
    )
    model = onnx.parser.parse_model(
        f'<ir_version: 9, opset_import: ["": 18]> head ({kind}[{rows}, 3] x) => ({kind}[{rows}, {CLASSES}] logits) '
        f"{{ h = MatMul(x, layer)  {product}  logits = Add(y, bias) }}"
    )
    generator = torch.Generator().manual_seed(0)
    shapes = {"layer": (3, WIDTH), "weight": (CLASSES, WIDTH) if turned else (WIDTH, CLASSES), "bias": (CLASSES,)}
    values = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}
    for name, value in values.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(value.numpy(), name))
    x, target = torch.randn(rows, 3, generator=generator).to(dtype), torch.randint(0, CLASSES, (rows,))
    target[4] = -100
    step = build_training_step(model, losses.CrossEntropyLoss(reduction=reduction))
    assert_one_head(step)
    session = TrainingSession(step)
    loss = session.step(x.numpy(), target.numpy())

    def by_pytorch(work: torch.dtype) -> tuple[Tensor, dict[str, Tensor]]:
        leaves = {name: value.to(work, copy=True).requires_grad_() for name, value in values.items()}
        weight = leaves["weight"].T if turned else leaves["weight"]
        logits = x.to(work) @ leaves["layer"] @ weight + leaves["bias"]
        found = F.cross_entropy(logits, target, reduction=reduction)
        return found.detach(), dict(zip(leaves, torch.autograd.grad(found, tuple(leaves.values())), strict=True))

    (native_loss, native), (exact_loss, exact) = by_pytorch(dtype), by_pytorch(torch.float64)
    assert_gradients_close(np.asarray(loss, values["bias"].numpy().dtype), native_loss, exact_loss, dtype)
    for name, gradient in session.gradients.items():
        terms = 10 * float(exact[name].abs().max())
        assert_gradients_close(gradient, native[name], exact[name], dtype, terms=terms)
