"""Labels and indices out of range: a step refuses what PyTorch refuses, fused or not, with a session and without."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradfuse
from gradfuse import ArgumentError, GradfuseError, TrainingSession, TrainingStep

pytestmark = pytest.mark.usefixtures("inference_in_process")

ROWS, CLASSES = 5, 3


class Calling(nn.Module):
    """Calls a function with a weight, (5, 3), and the inputs."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.linspace(-1, 1, ROWS * CLASSES).reshape(ROWS, CLASSES))
        self.function = function

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(self.w, *inputs)


def runs_in_onnxruntime(step: TrainingStep, batch: dict[str, Any]) -> bool:
    """Whether onnxruntime without gradfuse's library runs the step."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(step.model.SerializeToString(), options)
    feeds = {**step.parameters, **step.buffers, **step.optimizer_state, **step.hyperparameters, **batch}
    try:
        session.run(None, feeds)
    except Exception as error:
        assert re.search("out.of.(range|data bounds)|invalid index", str(error), re.IGNORECASE)
        return False
    return True


def runs_in_torch(function: Callable[..., Tensor], inputs: Sequence[Tensor]) -> bool:
    try:
        Calling(function)(*inputs)
    except (IndexError, RuntimeError):
        return False
    return True


PAIR = torch.tensor([0, 2])
GRID = torch.tensor([[0, 1, 2], [2, 1, 0]])
FUNCTIONS: dict[str, tuple[Callable[..., Tensor], Tensor]] = {
    "embedding": (lambda w, i: F.embedding(i, w), PAIR),
    "embedding of int32": (lambda w, i: F.embedding(i, w), PAIR.int()),
    "embedding with padding": (lambda w, i: F.embedding(i, w, padding_idx=1), GRID),
    "embedding bag": (lambda w, i: F.embedding_bag(i, w), GRID),
    "index_select": (lambda w, i: w.index_select(1, i), PAIR),
    "gather": (lambda w, i: w.gather(0, i), GRID),
    "take_along_dim": (lambda w, i: w.take_along_dim(i, 0), GRID),
    "one_hot": (lambda w, i: F.one_hot(i, ROWS).float() @ w, PAIR),
    "scatter_add": (lambda w, i: torch.zeros(ROWS, CLASSES).scatter_add(0, i, w[:2]), GRID),
    "index_add": (lambda w, i: torch.zeros(ROWS, CLASSES).index_add(0, i, w[:2]), PAIR),
    "indexing": (lambda w, i: w[i], PAIR),
    "shifted": (lambda w, i: F.embedding(i + 1, w), PAIR),
    "modulo": (lambda w, i: F.embedding(i % ROWS, w), PAIR),
    "next tokens": (
        lambda w, i: F.cross_entropy(F.embedding(i[:, :-1], w).reshape(-1, 3), i[:, 1:].reshape(-1)).reshape(1), GRID,
    ),
    "cross entropy": (lambda w, i: F.cross_entropy(w[:2], i).reshape(1), PAIR),
    "cross entropy with weights": (
        lambda w, i: F.cross_entropy(w[:2], i, weight=torch.tensor([1.0, 2.0, 3.0])).reshape(1), PAIR,
    ),
    "smoothed cross entropy": (lambda w, i: F.cross_entropy(w[:2], i, label_smoothing=0.1).reshape(1), PAIR),
    "cross entropy of images": (
        lambda w, i: F.cross_entropy(w[:4].reshape(1, 2, 2, 3).permute(0, 3, 1, 2), i[None, :, :2]).reshape(1), GRID,
    ),
    "cross entropy of one row": (lambda w, i: F.cross_entropy(w[0], i[0]).reshape(1), PAIR),
    "another ignored label": (lambda w, i: F.cross_entropy(w[:2], i, ignore_index=-1).reshape(1), PAIR),
    "an ignored label behind the classes": (lambda w, i: F.cross_entropy(w[:2], i, ignore_index=7).reshape(1), PAIR),
    "nll": (lambda w, i: F.nll_loss(F.log_softmax(w[:2], 1), i).reshape(1), PAIR),
    "multi margin": (lambda w, i: F.multi_margin_loss(w[:2], i).reshape(1), PAIR),
}  # fmt: skip
COMPUTED = ("shifted", "next tokens", "indexing", "cross entropy of images", "cross entropy of one row")
"""Of these the index is no whole input, so that only the model can check it."""
SOME = ("embedding", "shifted", "cross entropy", "next tokens", "another ignored label")


def require_as_in_torch(name: str, fuse: bool) -> None:
    function, index = FUNCTIONS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step = gradfuse.export_training_step(
            Calling(function), lambda output: output.square().sum(), (index, ()), fuse=fuse, evaluation=False
        )
    session, refused = TrainingSession(step), 0
    for value in (0, 2, -1, -3, -100, 3, 7, 100):
        changed = index.clone()
        changed.reshape(-1)[0] = value
        wanted = runs_in_torch(function, [changed])
        assert runs_in_onnxruntime(step, {step.input_names[0]: changed.numpy()}) == wanted, value
        if wanted:
            session.step(changed, ())
            continue
        refused += 1
        with pytest.raises(GradfuseError) as raised:
            session.step(changed, ())
        assert "\n" not in str(raised.value)
        if name not in COMPUTED:
            assert isinstance(raised.value, ArgumentError) and f"is {value}; expected 0 to" in str(raised.value)
    assert refused >= (0 if name in ("take_along_dim", "modulo") else 2)


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("name", SOME)
@pytest.mark.sampled(every=2)
def test_a_step_refuses_the_indices_that_torch_refuses(name: str, fuse: bool) -> None:
    require_as_in_torch(name, fuse)


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name not in SOME])
def test_a_step_refuses_the_indices_that_torch_refuses_of_other_operators(name: str) -> None:
    require_as_in_torch(name, False)


FORWARD = """<ir_version: 9, opset_import: ["": 18]> forward (float[N,2] x) => (float[N,3] y)
    <float[2,3] w = {1, 2, 3, 4, 5, 6}> { y = MatMul(x, w) }"""
X = np.array([[1, 2], [3, 4]], np.float32)
LOSSES: dict[str, Any] = {
    "cross_entropy": "cross_entropy",
    "nll": "nll",
    "weights": gradfuse.losses.CrossEntropyLoss(weight=[1.0, 2.0, 3.0]),
    "smoothing": gradfuse.losses.CrossEntropyLoss(label_smoothing=0.1),
    "ignored": gradfuse.losses.CrossEntropyLoss(ignore_index=-1),
    "ignored class": gradfuse.losses.NLLLoss(ignore_index=1),
    "model": """<ir_version: 9, opset_import: ["": 18]> loss (float[N,3] y, int32[N] label) => (float l) {
        l = SoftmaxCrossEntropyLoss(y, label) }""",
}


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.sampled(every=3)
def test_a_loss_refuses_labels_out_of_range(name: str, fuse: bool) -> None:
    loss = onnx.parser.parse_model(LOSSES[name]) if name == "model" else LOSSES[name]
    step = gradfuse.build_training_step(onnx.parser.parse_model(FORWARD), loss, fuse=fuse)
    session, (target,) = TrainingSession(step), step.target_names
    dtype, ignored = (np.int32, None) if name == "model" else (np.int64, getattr(loss, "ignore_index", -100))
    for value in (0, 1, 2, -1, -3, -100, 3, 100):
        labels = np.array([0, value], dtype)
        fits = 0 <= value < CLASSES or value == ignored
        assert runs_in_onnxruntime(step, {"x": X, target: labels}) == fits, value
        if fits:
            session.step(X, labels)
            continue
        with pytest.raises(ArgumentError) as raised:
            session.step(X, labels)
        rest = "" if ignored in (None, 1) else f", or {ignored}, which is ignored"
        assert str(raised.value) == f"TrainingSession.step: '{target}'[1] is {value}; expected 0 to 2{rest}"


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("classes", ["C", "M"], ids=["named", "unknown"])
def test_a_loss_refuses_labels_out_of_range_where_a_batch_decides_the_number_of_classes(
    classes: str, fuse: bool
) -> None:
    forward = f"""<ir_version: 9, opset_import: ["": 18]> forward (float[N,2] x, float[N,C] z) => (float[N,{classes}] y)
        <float[1,2] w = {{1, 2}}> {{ s = Mul(x, w) r = ReduceSum(s) y = Mul(r, z) }}"""
    step = gradfuse.build_training_step(onnx.parser.parse_model(forward), "cross_entropy", fuse=fuse)
    for value in (0, 2, -1, -3, 3, -100):
        batch = {"x": X, "z": np.ones((2, CLASSES), np.float32), step.target_names[0]: np.array([1, value])}
        assert runs_in_onnxruntime(step, batch) == (value in (0, 2, -100)), value


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("case", ["autocast", "classes are items"])
def test_labels_are_checked_under_autocast_and_where_the_batch_is_the_classes(case: str, fuse: bool) -> None:
    module = nn.Linear(4, 3)
    loss = nn.CrossEntropyLoss() if case == "autocast" else lambda y, label: F.cross_entropy(y @ y.t(), label)
    options: dict[str, Any] = {"autocast": torch.float16}
    if case != "autocast":
        options = {"dynamic_shapes": ({0: "items"}, {0: "items"})}
    x = torch.randn(3, 4)
    step = gradfuse.export_training_step(module, loss, (x, torch.arange(3)), fuse=fuse, **options)
    for value in (0, 2, -1, -3, 3, -100):
        batch = {step.input_names[0]: x.numpy(), step.target_names[0]: np.array([1, value, 0])}
        assert runs_in_onnxruntime(step, batch) == (value in (0, 2, -100)), value


def test_indices_of_an_onnx_model_may_be_negative() -> None:
    """They count from the end there, by ONNX's definition."""
    model = onnx.parser.parse_model("""<ir_version: 9, opset_import: ["": 18]> forward (int64[N] x) => (float[N,2] y)
        <float[3,2] w = {1, 2, 3, 4, 5, 6}> { y = Gather(w, x) }""")
    session = TrainingSession(gradfuse.build_training_step(model, "mse"))
    target = np.zeros((2, 2), np.float32)
    loss = session.step(np.array([0, -1]), target)
    gradient = session.gradients["w"]
    assert session.step(np.array([0, 2]), target) == loss
    assert np.array_equal(session.gradients["w"], gradient) and gradient[2].all()


def test_a_step_that_was_refused_changes_nothing_and_evaluation_refuses_the_same(tmp_path: Path) -> None:
    module = Calling(lambda w, i: F.embedding(i, w))
    step = gradfuse.export_training_step(
        module, nn.CrossEntropyLoss(), (PAIR, PAIR), torch.optim.SGD(module.parameters(), 0.1), fuse=False
    )
    path = tmp_path / "step.onnx"
    step.save(path)
    session = TrainingSession(path)
    session.step(PAIR, PAIR)
    before = session.state_dict()
    name, (target,) = step.input_names[0], step.target_names
    for labels, indices, wanted in ((PAIR - 1, PAIR, f"'{target}'[0] is -1"), (PAIR, PAIR + 3, f"'{name}'[1] is 5")):
        with pytest.raises(ArgumentError) as raised:
            session.step(indices, labels)
        assert wanted in str(raised.value) and "\n" not in str(raised.value)
    with pytest.raises(ArgumentError, match=rf"evaluate: '{name}'\[0\] is -1; expected 0 to 4"):
        session.evaluate(PAIR - 1)
    assert session.step_count == 1 and np.array_equal(session.state_dict()["w"], before["w"])


def test_several_indices_are_computed_from_the_same_inputs() -> None:
    class Picks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor, i: Tensor) -> tuple[Tensor, Tensor]:
            return self.scale * x.index_select(0, i + 1), self.scale * x.index_select(0, i.flip(0) + 1)

    module, x, i = Picks(), torch.randn(6, 4), torch.tensor([0, 1, 4])
    step = gradfuse.export_training_step(
        module,
        lambda output, y: (output[0] * y).sum() + output[1].square().sum(),
        ((x, i), torch.ones(4)),
        dynamic_shapes=(({0: "rows"}, {0: "picked"}), None),
    )
    session = TrainingSession(step)
    first, second = module(x, i)
    wanted = float((first.sum() + second.square().sum()).detach())
    assert abs(session.step((x, i), torch.ones(4)) - wanted) <= 64 * np.finfo(np.float32).eps * abs(wanted)
    with pytest.raises(GradfuseError, match="out of"):
        session.step((x, torch.tensor([0, 1, 5])), torch.ones(4))


@pytest.mark.parametrize("fuse", [pytest.param(True, marks=pytest.mark.long), False])
def test_one_value_per_channel_is_refused_by_batch_normalisation_as_in_torch(fuse: bool) -> None:
    """The running variance would be NaN, for good."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2), nn.BatchNorm1d(2)]
    module = nn.Sequential(*layers)
    x, y = torch.randn(4, 4), torch.randn(4, 2)
    optimizer = torch.optim.AdamW(module.parameters())
    shapes = ({0: "rows"}, {0: "rows"})
    step = gradfuse.export_training_step(module, F.mse_loss, (x, y), optimizer, dynamic_shapes=shapes, fuse=fuse)
    session = TrainingSession(step)
    before = session.state_dict()
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        module(x[:1])
    with pytest.raises(gradfuse.ModelError, match="batch normalisation of one value per channel, expected more"):
        session.step(x[:1], y[:1])
    for name, value in session.state_dict().items():
        np.testing.assert_array_equal(value, before[name])
    loss = F.mse_loss(module(x[:2]), y[:2]).item()
    assert session.step(x[:2], y[:2]) == pytest.approx(loss, rel=1e-5)
    # An image has many.
    images = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(18, 2))
    batch = (torch.randn(4, 1, 3, 3), y)
    step = gradfuse.export_training_step(images, F.mse_loss, batch, dynamic_shapes=shapes, fuse=fuse)
    TrainingSession(step).step(batch[0][:1], y[:1])
