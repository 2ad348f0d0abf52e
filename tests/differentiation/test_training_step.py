"""Training steps from ONNX models: losses, gradients and updates against PyTorch, and what is refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable
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
from gradfuse import ArgumentError, ModelError, TrainingSession, TrainingStep, build_training_step, losses, optimizers
from gradfuse.testing import assert_gradients_close

CLASSES = 5


def forward(module: nn.Module, x: Tensor) -> onnx.ModelProto:
    """The module by plain torch.onnx.export, with a dynamic batch and the names of its parameters."""
    program = torch.onnx.export(module, (x,), dynamo=True, optimize=False, dynamic_shapes=({0: "batch"},))
    assert program is not None
    return program.model_proto


def network() -> nn.Module:
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Conv2d(2, 4, 3, stride=2, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16, CLASSES),
    ).eval()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    return module


X = torch.randn(6, 2, 8, 8, generator=torch.Generator().manual_seed(1))
TARGETS = torch.tensor([0, 4, 2, -100, 1, 1])
WEIGHT = torch.tensor([1.0, 0.5, 2.0, 1.5, 0.1])
NUMBERS = torch.rand(6, CLASSES, generator=torch.Generator().manual_seed(2))

LOSSES: dict[str, tuple[Any, Callable[[Tensor], Tensor], Tensor]] = {
    "cross_entropy": ("cross_entropy", lambda y: F.cross_entropy(y, TARGETS), TARGETS),
    "cross entropy, all options": (
        losses.CrossEntropyLoss("sum", WEIGHT.tolist(), 1, 0.2),
        lambda y: F.cross_entropy(
            y, TARGETS.clamp(0), WEIGHT.to(y), reduction="sum", ignore_index=1, label_smoothing=0.2
        ),
        TARGETS.clamp(0),
    ),
    "cross entropy, smoothed mean": (
        losses.CrossEntropyLoss(weight=WEIGHT.tolist(), label_smoothing=0.1),
        lambda y: F.cross_entropy(y, TARGETS, WEIGHT.to(y), label_smoothing=0.1),
        TARGETS,
    ),
    "nll": (
        losses.NLLLoss(weight=WEIGHT.tolist()),
        lambda y: F.nll_loss(y, TARGETS, WEIGHT.to(y)),
        TARGETS,
    ),
    "mse": ("mse", lambda y: F.mse_loss(y, NUMBERS.to(y)), NUMBERS),
    "l1": ("l1", lambda y: F.l1_loss(y, NUMBERS.to(y)), NUMBERS),
    "huber": (losses.HuberLoss(delta=0.5), lambda y: F.huber_loss(y, NUMBERS.to(y), delta=0.5), NUMBERS),
    "bce_with_logits": (
        losses.BCEWithLogitsLoss(pos_weight=[1.0, 2.0, 3.0, 4.0, 5.0]),
        lambda y: F.binary_cross_entropy_with_logits(y, NUMBERS.to(y), pos_weight=torch.arange(1.0, 6.0).to(y)),
        NUMBERS,
    ),
}


def gradients(step: TrainingStep, x: Tensor, target: Tensor) -> tuple[float, dict[str, Any]]:
    session = TrainingSession(step)
    loss = session.step(x.numpy(), target.numpy())
    return loss, dict(session.gradients)


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.sampled(every=2)
def test_loss_and_gradients_are_those_of_torch(name: str, fuse: bool) -> None:
    loss, by_torch, target = LOSSES[name]
    module = network()
    step = build_training_step(forward(module, X), loss, fuse=fuse)
    actual, found = gradients(step, X, target)

    def of(dtype: torch.dtype) -> tuple[float, dict[str, Any]]:
        copy = network().to(dtype)
        result = by_torch(copy(X.to(dtype)))
        result.backward()  # type: ignore[no-untyped-call]
        return result.item(), {n: p.grad.numpy() for n, p in copy.named_parameters() if p.grad is not None}

    (native_loss, native), (exact_loss, exact) = of(torch.float32), of(torch.float64)
    assert found.keys() == exact.keys()
    assert abs(actual - exact_loss) <= 2 * abs(native_loss - exact_loss) + 1e-6 * abs(exact_loss)
    for parameter, gradient in found.items():
        largest = float(np.abs(exact[parameter]).max())
        assert_gradients_close(gradient, native[parameter], exact[parameter], np.dtype(np.float32), terms=16 * largest)


@pytest.mark.parametrize(
    "ours, theirs",
    [
        (optimizers.SGD(lr=0.1, momentum=0.9, nesterov=True), lambda p: torch.optim.SGD(p, 0.1, 0.9, nesterov=True)),
        (optimizers.Adam(lr=0.01, weight_decay=0.1), lambda p: torch.optim.Adam(p, 0.01, weight_decay=0.1)),
        (optimizers.AdamW(lr=0.01, amsgrad=True), lambda p: torch.optim.AdamW(p, 0.01, amsgrad=True)),
    ],
)
def test_training_follows_torch(ours: Any, theirs: Callable[[Any], torch.optim.Optimizer]) -> None:
    module = network()
    session = TrainingSession(build_training_step(forward(module, X), "cross_entropy", optimizer=ours))
    optimizer = theirs(module.parameters())
    for _ in range(5):
        loss = F.cross_entropy(module(X), TARGETS)
        assert abs(session.step(X.numpy(), TARGETS.numpy()) - loss.item()) <= 1e-4
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    evaluated = session.evaluate(X.numpy())
    assert np.abs(np.asarray(evaluated) - module(X).detach().numpy()).max() <= 1e-3


def test_what_is_trained_is_chosen_by_names_and_patterns() -> None:
    model = forward(network(), X)
    assert set(build_training_step(model, "cross_entropy", trainable=["5.*"]).parameters) == {"5.weight", "5.bias"}
    step = build_training_step(model, "cross_entropy", frozen=["*.bias", "0.weight"])
    assert set(step.parameters) == {"1.weight", "5.weight"}


def test_a_saved_step_trains_without_torch_objects(tmp_path: Any) -> None:
    step = build_training_step(forward(network(), X), "cross_entropy", optimizer=optimizers.SGD(lr=0.1))
    step.save(tmp_path / "step.onnx")
    first, second = TrainingSession(step), TrainingSession(tmp_path / "step.onnx")
    for _ in range(2):
        assert first.step(X.numpy(), TARGETS.numpy()) == second.step(X.numpy(), TARGETS.numpy())


MODEL = """<ir_version: 10, opset_import: ["": 18]>
g (float[N, 3] x) => (float[N, 2] y) <float[3, 2] w = {1, 2, 3, 4, 5, 6}, int64[1] k = {0}, float s = {2}> {
    a = MatMul(x, w)
    b = Mul(a, s)
    y = %s(b)
}"""


@pytest.mark.parametrize(
    "change, named, message",
    [
        ({"loss": "crossentropy"}, {}, "loss is 'crossentropy'; expected one of cross_entropy, mse"),
        ({}, {"trainable": ["v"]}, "trainable has 'v', which matches nothing; expected float initializers"),
        ({}, {"trainable": ["k"]}, "trainable has 'k', which is INT64; expected float initializers"),
        ({}, {"frozen": ["*"]}, "no float initializer is left to train"),
        ({"op": "ArgMax"}, {}, "the model has no float output"),
        ({"op": "Floor"}, {}, "the loss depends on no float initializer"),
        ({}, {"accumulate": 2}, "accumulate is given without an optimizer"),
        ({}, {"max_grad_norm": "1"}, "max_grad_norm is '1'; expected a positive number or None"),
        ({}, {"check": 3}, "check is 3; expected True, False or a batch"),
        ({}, {"trainable": [3]}, "trainable has 3; expected names or patterns"),
        ({"loss": "ctc"}, {}, "CTCLoss expected at least 3 dimensions"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(change: dict[str, str], named: dict[str, Any], message: str) -> None:
    text = (MODEL % change.get("op", "Relu")).replace("k = {0}", "k = {0}")
    if change.get("op") == "ArgMax":
        text = text.replace("(float[N, 2] y)", "(int64[1, 2] y)")
    model = onnx.parser.parse_model(text)
    with pytest.raises(ArgumentError, match=message) as error:
        build_training_step(model, change.get("loss", "mse"), **named)
    assert "\n" not in str(error.value)


def test_an_operator_without_a_rule_is_named() -> None:
    model = onnx.parser.parse_model(MODEL % "Relu")
    model.graph.node[1].CopyFrom(onnx.helper.make_node("Unique", ["a"], ["b"], axis=0, name="here"))
    with pytest.raises(ModelError, match=r"Unique \(node 'here'\): no gradient rule.*'a' depends on it"):
        build_training_step(model, "mse")


def test_single_numbers_train_only_where_they_are_named() -> None:
    model = onnx.parser.parse_model(MODEL % "Relu")
    assert set(build_training_step(model, "mse").parameters) == {"w"}
    assert set(build_training_step(model, "mse", trainable=["s", "w"]).parameters) == {"s", "w"}


def test_the_gradient_of_an_input_and_a_vector_jacobian_product() -> None:
    model = onnx.parser.parse_model(MODEL % "Tanh")
    result = gradfuse.differentiate(model, ["x", "w"], seeds={"y": "v"})
    onnx.checker.check_model(result, full_check=True)
    assert [o.name for o in result.graph.output] == ["y", "x.grad", "w.grad"]
    assert [i.name for i in result.graph.input] == ["x", "v"]
    assert [n.output[0] for n in result.graph.node][:3] == ["a", "b", "y"]


def test_differentiate_refuses_what_is_not_there() -> None:
    model = onnx.parser.parse_model(MODEL % "Relu")
    for arguments, message in (
        ({"wrt": ["z"]}, "wrt has 'z'; expected inputs or initializers"),
        ({"wrt": ["k"]}, "'k' is INT64; expected a float type"),
        ({"wrt": ["x"]}, "output 'y' has shape .*; expected a scalar, or seeds"),
        ({"wrt": "x"}, "wrt is 'x'; expected a list of names"),
        ({"wrt": ["x"], "of": "a"}, "'a' is no output"),
        ({"wrt": ["x"], "seeds": {"y": "x"}}, "the seed 'x' is taken"),
    ):
        with pytest.raises(ArgumentError, match=message):
            gradfuse.differentiate(model, **arguments)


@pytest.mark.parametrize("fuse", (True, False))
@pytest.mark.parametrize("relu", (True, False))
@pytest.mark.parametrize("asked", (True, False))
def test_batch_norm_trains_as_in_torch(fuse: bool, relu: bool, asked: bool) -> None:
    """Where `train_batch_norm` asks for it, and where the model was exported in training mode."""

    def module() -> nn.Module:
        torch.manual_seed(0)
        activation = nn.ReLU() if relu else nn.Tanh()
        parts = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4, momentum=0.3), activation, nn.BatchNorm2d(4))
        return nn.Sequential(*parts, nn.Flatten(), nn.Linear(144, CLASSES))

    model, sgd = forward(module().eval(), X), optimizers.SGD(lr=0.1)
    if not asked:
        for node in model.graph.node:
            if node.op_type == "BatchNormalization":
                node.attribute.append(onnx.helper.make_attribute("training_mode", 1))
                node.output.extend(f"{node.output[0]}_{statistic}" for statistic in ("mean", "var"))
    step = build_training_step(model, "cross_entropy", optimizer=sgd, train_batch_norm=asked, fuse=fuse)
    assert len(step.buffers) == 4
    gates = [len(node.input) > 5 for node in step.model.graph.node if node.op_type == "BatchNormBackward"]
    assert gates == ([False, relu] if fuse else [])
    session = TrainingSession(step)

    def trained(dtype: torch.dtype) -> tuple[nn.Module, float]:
        copy = module().to(dtype)
        optimizer = torch.optim.SGD(copy.parameters(), lr=0.1)
        for _ in range(3):
            loss = F.cross_entropy(copy(X.to(dtype)), TARGETS)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        return copy, loss.item()

    (native, _), (exact, exact_loss) = trained(torch.float32), trained(torch.float64)
    for _ in range(3):
        loss = session.step(X.numpy(), TARGETS.numpy())
    assert abs(loss - exact_loss) <= 1e-4
    state, buffers = session.state_dict(), [name for name in native.state_dict() if "running" in name]
    wanted = {name: native.state_dict()[name].numpy() for name in buffers}
    float64 = {name: exact.state_dict()[name].numpy() for name in buffers}
    for name in buffers:
        # Three steps multiply what rounding differs in.
        assert_gradients_close(state[name], wanted[name], float64[name], np.float32, terms=64)
    evaluated = np.asarray(session.evaluate(X.numpy()))
    assert np.abs(evaluated - native.eval()(X).detach().numpy()).max() <= 1e-3


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("axis, rank", [(0, 0), (0, 1), (-2, 2), (1, 1)])
def test_looked_up_rows_have_the_gradients_of_torch(fuse: bool, axis: int, rank: int) -> None:
    """Indices from the end too, which ONNX allows and an embedding does not."""
    indices = torch.tensor([[0, -1, 3], [-5, 3, 3]])[(0,) * (2 - rank)]
    kind = f"int64[{','.join(map(str, indices.shape))}]" if rank else "int64"
    model = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : 17]> lookup ({kind} i) => (float y) '
        f"<float[5, 6] w> {{ rows = Gather<axis = {axis}>(w, i)  squares = Mul(rows, rows)  "
        "y = ReduceSum<keepdims = 0>(squares) }"
    )
    weight = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))
    model.graph.initializer.append(onnx.numpy_helper.from_array(weight.numpy(), "w"))
    step = build_training_step(model, None, fuse=fuse)
    operators = [node.op_type for node in step.model.graph.node if node.domain == "aclnn"]
    assert operators == (["EmbeddingDenseBackward"] if fuse and axis != 1 else [])
    leaf = weight.double().requires_grad_()
    rows = leaf[indices] if axis != 1 else leaf[:, indices]
    (rows * rows).sum().backward()  # type: ignore[no-untyped-call]
    session = TrainingSession(step)
    session.step(indices.numpy(), ())
    assert leaf.grad is not None
    assert_gradients_close(session.gradients["w"], leaf.grad.float(), leaf.grad, torch.float32)


def test_running_statistics_do_not_train() -> None:
    model = forward(network(), X)
    for name in ("1.running_mean", "1.running_*"):
        with pytest.raises(ArgumentError, match="is a running statistic of BatchNormalization"):
            build_training_step(model, "cross_entropy", trainable=[name])
    step = build_training_step(model, "cross_entropy")
    assert "1.running_mean" not in step.parameters and not step.buffers


IN_SUBGRAPHS = """<ir_version: 10, opset_import: ["": 18]>
g (float[N, 3] x, bool c) => (float[N, 3] y) <float[3, 3] w = {1, 2, 3, 4, 5, 6, 7, 8, 9}, float[3] b = {1, 2, 3}> {
    a = MatMul(x, w)
    y = %s
}"""
BRANCHES = """If (c) <
    then_branch = then () => (float[N, 3] t) { t = Add(a, b) },
    else_branch = otherwise () => (float[N, 3] o) { o = Identity(a) }
>"""
LOOP = """Loop <body = body (int64 k, bool more, float[N, 3] s) => (bool on, float[N, 3] t) {
    on = Identity(more) t = Add(s, b)
}> (n, c, a)"""


def test_what_subgraphs_read_from_around_them_is_not_lost() -> None:
    """`b` is an input of no node of the graph itself."""
    model = onnx.parser.parse_model(IN_SUBGRAPHS % LOOP)
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(2), "n"))
    found = gradfuse.differentiate(model, ["b"], seeds={"y": "v"})
    assert [output.name for output in found.graph.output] == ["y", "b.grad"]
    model = onnx.parser.parse_model(IN_SUBGRAPHS % BRANCHES)
    step = build_training_step(model, "mse", optimizer=optimizers.SGD(lr=0.1))
    assert set(step.parameters) == {"w", "b"}
    session = TrainingSession(step)
    x, target = np.ones((2, 3), np.float32), np.zeros((2, 3), np.float32)
    for taken in (False, True):
        before = session.state_dict()
        session.step({"x": x, "c": np.array(taken)}, target)
        after = session.state_dict()
        assert (after["w"] != before["w"]).all()
        assert (after["b"] != before["b"]).all() == taken


def test_a_parameter_that_is_used_twice_gets_the_gradients_of_both() -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 18]>
        g (float[N, 3] x) => (float[N, 3] y) <float[3, 3] w = {1, 2, 3, 4, 5, 6, 7, 8, 9}> {
            a = MatMul(x, w)
            b = Tanh(a)
            y = MatMul(b, w)
        }"""
    )
    step = build_training_step(model, "mse", fuse=False)
    x, target = torch.randn(4, 3), torch.randn(4, 3)
    _, found = gradients(step, x, target)

    def by_torch(dtype: torch.dtype) -> Any:
        w = torch.arange(1.0, 10.0, dtype=dtype).reshape(3, 3).requires_grad_()
        F.mse_loss((x.to(dtype) @ w).tanh() @ w, target.to(dtype)).backward()  # type: ignore[no-untyped-call]
        assert w.grad is not None
        return w.grad.numpy()

    native, exact = by_torch(torch.float32), by_torch(torch.float64)
    assert_gradients_close(found["w"], native, exact, np.float32, terms=16 * np.abs(exact).max())


@pytest.mark.parametrize("name", ["loss", "w.grad", "target"])
def test_what_a_node_computes_may_have_any_name(name: str) -> None:
    model = onnx.parser.parse_model(MODEL % "Relu")
    steps = [build_training_step(model, "mse")]
    model.graph.node[0].output[0] = model.graph.node[1].input[0] = name
    steps.append(build_training_step(model, "mse"))
    shape = [dim.dim_value or 2 for dim in model.graph.input[0].type.tensor_type.shape.dim]
    sessions = [TrainingSession(step) for step in steps]
    x = np.ones(shape, np.float32)
    target = np.zeros(np.shape(sessions[0].evaluate(x)), np.float32)
    assert sessions[0].step(x, target) == sessions[1].step(x, target)
    assert (sessions[0].gradients["w"] == sessions[1].gradients["w"]).all()


def test_merged_vectors_are_warned_of_and_unknown_operators_are_named() -> None:
    """As torch.onnx.export's optimizer merges biases of equal value; a tied weight is no such case."""
    text = """
        <ir_version: 9, opset_import: ["": 18]> m (float[N, 3] x) => (float[N, 3] y)
        <float[3, 3] w = {1, 0, 0, 0, 1, 0, 0, 0, 1}, float[3] zeros = {0, 0, 0}, float[3] own = {0, 0, 0}>
        { a = MatMul(x, w) b = Add(a, zeros) c = MatMul(b, w) d = Add(c, zeros) y = Add(d, own) }
    """
    with pytest.warns(UserWarning, match=r"several nodes read 'zeros'; each trains as one tensor"):
        gradfuse.build_training_step(onnx.parser.parse_model(text), "mse")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gradfuse.build_training_step(onnx.parser.parse_model(text), "mse", frozen=["zeros"])
    unknown = onnx.parser.parse_model(
        text.replace('"": 18]', '"": 18, "other": 1]').replace("Add(a, zeros)", "other.Op(a)")
    )
    with pytest.raises(
        gradfuse.ModelError, match=r"^other::Op \(node ''\): no gradient rule for this operator of domain"
    ):
        gradfuse.build_training_step(unknown, "mse")


def test_the_roi_align_of_an_older_opset_stays_as_it_was() -> None:
    """Its default changed in opset 16, which models are raised beyond."""
    text = """
        <ir_version: 9, opset_import: ["": 15]>
        m (float[1, 1, 4, 4] x, float[R, 4] rois, int64[R] item) => (float[R, 1, 2, 2] y) <float[1] w = {2}>
        { found = RoiAlign<output_height=2, output_width=2>(x, rois, item) y = Mul(found, w) }
    """
    model = onnx.parser.parse_model(text)
    x = np.arange(16, dtype=np.float32).reshape(1, 1, 4, 4)
    feeds = {"x": x, "rois": np.array([[0, 0, 3, 3]], np.float32), "item": np.zeros(1, np.int64)}
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (wanted,) = session.run(None, feeds)
    step = build_training_step(model, "mse", fuse=False)
    loss = TrainingSession(step).step(tuple(feeds.values()), wanted)
    assert float(loss) == 0.0


def test_what_all_losses_have_is_no_loss() -> None:
    with pytest.raises(TypeError, match="abstract"):
        losses.Loss()  # type: ignore[abstract]


def test_the_model_that_is_given_stays_as_it_is() -> None:
    """Weights of names that the step has, and those in a body, whose names change where they become parameters."""
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 15]>
        g (float[N, 2] x, int64 n) => (float[N, 2] z) <float[2] step = {1.5, 2.5}, bool go = {1}> {
            loss = Mul(x, step)
            z = Loop(n, go, loss) <
                body = turn (int64 i, bool more, float[N, 2] v) => (bool again, float[N, 2] w)
                <float[2] k = {0.25, 0.75}> { again = Identity(more) w = Mul(v, k) }
            >
        }""")
    before = model.SerializeToString(deterministic=True)
    assert set(build_training_step(model, "mse").parameters) == {"step", "k"}
    assert model.SerializeToString(deterministic=True) == before
