"""Training steps from ONNX models: losses that are models, scaled losses, and the check of gradients."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx.parser
import onnxscript
import pytest
import torch
import torch.nn.functional as F
from command_runs import Run
from onnxscript import script

from gradfuse import ArgumentError, CheckError, ModelError, TrainingSession, build_training_step, losses, optimizers
from gradfuse.differentiation import reverse
from gradfuse.testing import assert_gradients_close

NET = """<ir_version: 10, opset_import: ["": 18]>
net (float[N, 3] x) => (float[N, 4] y) <float[3, 5] w = {%s}, float[5] b = {0, 0, 0, 0, 0}, float[5, 4] v = {%s}> {
    a = MatMul(x, w)
    h = Add(a, b)
    r = Relu(h)
    y = MatMul(r, v)
}"""
X = torch.randn(7, 3, generator=torch.Generator().manual_seed(0))
CLASSES = torch.arange(7) % 4


def net() -> onnx.ModelProto:
    numbers = torch.randn(35, generator=torch.Generator().manual_seed(1)).tolist()
    return onnx.parser.parse_model(NET % (", ".join(map(str, numbers[:15])), ", ".join(map(str, numbers[15:]))))


def by_torch(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return (x @ w + b).relu() @ v


types: Any = onnxscript
op: Any = onnxscript.opset18
Logits: Any = types.FLOAT["N", "C"]
Classes: Any = types.INT64["N"]


@script()
def focal(logits: Logits, classes: Classes, gamma: float = 2.0):  # type: ignore[no-untyped-def]
    log_probs = op.LogSoftmax(logits, axis=1)
    picked = op.GatherElements(log_probs, op.Unsqueeze(classes, op.Constant(value_ints=[1])), axis=1)
    return op.Neg(op.ReduceMean((1.0 - op.Exp(picked)) ** gamma * picked, keepdims=0))


@script()
def log_cosh(output, goal):  # type: ignore[no-untyped-def]
    return op.ReduceMean(op.Log(op.Cosh(output - goal)), keepdims=0)


def focal_by_torch(y: torch.Tensor) -> torch.Tensor:
    picked = y.log_softmax(1).gather(1, CLASSES[:, None])
    return -((1 - picked.exp()) ** 2 * picked).mean()


GOAL = torch.linspace(-1, 1, 28).reshape(7, 4)
LOSSES: dict[str, tuple[Any, list[str], Any, torch.Tensor]] = {
    "a function with types": (focal, ["classes"], focal_by_torch, CLASSES),
    "a function without types": (log_cosh, ["goal"], lambda y: (y - GOAL.to(y)).cosh().log().mean(), GOAL),
    "a model": (
        log_cosh.to_model_proto(),  # type: ignore[no-untyped-call]
        ["goal"],
        lambda y: (y - GOAL.to(y)).cosh().log().mean(),
        GOAL,
    ),
    **{
        f"a model of opset {opset}": (
            onnx.parser.parse_model(
                f"""<ir_version: 8, opset_import: ["": {opset}]>
                l (float[M, C] out, float[M, C] target) => (float loss) <float[1] scale = {{3}}> {{
                    d = Sub(out, target)  s = Mul(d, d)  m = Mul(s, scale)  loss = ReduceMean <keepdims = 0> (m)
                }}"""
            ),
            ["target"],
            lambda y: 3 * F.mse_loss(y, GOAL.to(y)),
            GOAL,
        )
        for opset in (13, 18)
    },
}


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_may_be_a_model_or_a_function(name: str, fuse: bool, tmp_path: Path) -> None:
    loss, targets, of_output, target = LOSSES[name]
    before = loss.SerializeToString() if isinstance(loss, onnx.ModelProto) else None
    step = build_training_step(net(), loss, fuse=fuse, check=True)
    assert before is None or loss.SerializeToString() == before
    assert (step.input_names, list(step.target_names), set(step.parameters)) == (("x",), targets, {"w", "b", "v"})
    session = TrainingSession(step)
    actual = session.step(X.numpy(), target.numpy())

    def wanted(dtype: torch.dtype) -> tuple[float, dict[str, Any]]:
        values = {k: torch.tensor(a).to(dtype).requires_grad_() for k, a in step.parameters.items()}
        result = of_output(by_torch(X.to(dtype), **values))
        result.backward()
        return result.item(), {k: value.grad.numpy() for k, value in values.items() if value.grad is not None}

    (native_loss, native), (exact_loss, exact) = wanted(torch.float32), wanted(torch.float64)
    assert abs(actual - exact_loss) <= 4 * abs(native_loss - exact_loss) + 1e-6 * abs(exact_loss)
    for k, gradient in session.gradients.items():
        assert_gradients_close(gradient, native[k], exact[k], np.float32, terms=16 * float(np.abs(exact[k]).max()))


def test_a_file_with_a_loss_is_taken_by_the_command_line(run: Run, tmp_path: Path) -> None:
    model, loss, target = tmp_path / "net.onnx", tmp_path / "loss.onnx", tmp_path / "step.onnx"
    onnx.save(net(), model)
    onnx.save(LOSSES["a model of opset 13"][0], loss)
    sgd = ["--optimizer", "sgd", "--lr", "0.01", "--grad-scaler", "1024"]
    code, output, errors = run("training-step", model, target, "--loss", loss, "--check", *sgd)
    assert (code, errors) == (0, "") and "inputs x; targets target" in output
    session = TrainingSession(target)
    assert session.ort_values["loss_scale"].numpy() == 1024
    found = [session.step(X.numpy(), GOAL.numpy()) for _ in range(10)]
    assert found[-1] < found[0]
    before = loss.read_bytes()
    assert run("training-step", model, loss, "--loss", loss)[0] == 2 and loss.read_bytes() == before


def test_averages_and_inputs_are_options_of_the_command_line(run: Run, tmp_path: Path) -> None:
    model, target = tmp_path / "net.onnx", tmp_path / "step.onnx"
    onnx.save(net(), model)
    adam = ["--loss", "mse", "--optimizer", "adamw", "--frozen", "w", "--frozen-inputs"]
    every = [*adam, "--ema", "0.5", "--run-time", "weight_decay", "--run-time", "betas"]
    code, _, errors = run("training-step", model, target, *every)
    assert (code, errors) == (0, "")
    session = TrainingSession(target)
    session.weight_decay, session.betas = 0.5, (0.8, 0.9)
    assert "w" in session.state_dict() and session.ort_values["n_averaged"].numpy() == 0
    for more, message in (
        (["--ema", "1.5"], "EMA: decay is 1.5; expected a number from 0 to below 1"),
        (["--run-time", "decay"], "run_time has 'decay'; expected names among 'weight_decay'"),
    ):
        code, _, errors = run("training-step", model, target, *adam, *more)
        assert code == 2 and message in errors and len(errors.splitlines()) == 1


def _loss(text: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 18]> l {text}')


@pytest.mark.parametrize(
    "loss, message",
    [
        ("(float[N] out) => (float l) { l = ReduceSum <keepdims = 0> (out) }", r"the loss takes shape \[N\]; the outp"),
        (
            "(float[N, 5] out) => (float l) { l = ReduceSum <keepdims = 0> (out) }",
            "the loss takes shape .*; the output",
        ),
        (
            "(double[N, C] out) => (double l) { l = ReduceSum <keepdims = 0> (out) }",
            "the loss takes DOUBLE; the output",
        ),
        (
            "(float[N, C] o) => (float[N, 1] l) { l = ReduceSum (o, axis) }",
            "the loss gives FLOAT of shape .*; expected",
        ),
        ("(float[N, C] out) => (int64 l) { l = Size (out) }", "the loss gives INT64 of shape .*; expected a float"),
        ("(float[N, C] out) => (float[N, C] l) { l = Identity (out) }", "the loss gives FLOAT of shape"),
        (
            "(float[N, C] o) => (float l, float[N, C] k) { l = ReduceSum <keepdims = 0> (o) k = Neg (o) }",
            "2 outputs; exp",
        ),
        (
            "(float[N, C] o, float x) => (float l) { k = ReduceSum <keepdims = 0> (o) l = Mul (k, x) }",
            "a value 'x' alre",
        ),
    ],
)
def test_a_loss_that_does_not_fit_is_refused(loss: str, message: str) -> None:
    model = _loss(loss)
    if "axis" in loss:
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([1]), "axis"))
    with pytest.raises(ArgumentError, match=message) as error:
        build_training_step(net(), model)
    assert "\n" not in str(error.value)


def test_other_things_are_no_losses(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"loss is function; expected a name, an object of "):
        build_training_step(net(), lambda output, target: output)
    with pytest.raises(ModelError, match=r"does not exist|no such file|cannot read"):
        build_training_step(net(), tmp_path / "none.onnx")
    with pytest.raises(ArgumentError, match="loss is 'mean'; expected one of"):
        build_training_step(net(), "mean")


@pytest.mark.parametrize("theirs", [True, False])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_scaled_loss_trains_as_in_torch(theirs: bool, accumulate: int) -> None:
    """From a scale at which gradients overflow, so that updates are skipped until it is small enough."""
    options = {"init_scale": 2.0**127, "growth_interval": 2, "backoff_factor": 0.25}
    scaler = torch.amp.GradScaler("cpu", **options)  # type: ignore[arg-type]
    given: Any = torch.amp.GradScaler("cpu", **options) if theirs else optimizers.GradScaler(**options)  # type: ignore[arg-type]
    adam = optimizers.Adam(lr=0.01)
    step = build_training_step(
        net(), "mse", optimizer=adam, grad_scaler=given, accumulate=accumulate, max_grad_norm=0.5, check=True
    )
    session = TrainingSession(step)
    values = {k: torch.tensor(a).requires_grad_() for k, a in step.parameters.items()}
    optimizer = torch.optim.Adam(values.values(), lr=0.01)
    scales = []
    for k in range(24):
        x = X * (1 + k % 3)
        actual = session.step(x.numpy(), GOAL.numpy())
        loss = F.mse_loss(by_torch(x, **values), GOAL)
        scaler.scale(loss / accumulate).backward()  # type: ignore[no-untyped-call]
        assert abs(actual - loss.item()) <= 1e-5 * abs(loss.item())
        if (k + 1) % accumulate == 0:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(values.values(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert session.ort_values["loss_scale"].numpy() == scaler.get_scale()
        scales.append(scaler.get_scale())
    assert min(scales) < scales[0] and len(set(scales)) > 3
    for name, value in values.items():
        assert np.abs(session.state_dict()[name] - value.detach().numpy()).max() <= 1e-5


def test_scalers_that_do_not_fit_are_refused() -> None:
    for options in ({"init_scale": 0.0}, {"growth_factor": 1.0}, {"backoff_factor": 1.0}, {"growth_interval": 0}):
        with pytest.raises(ArgumentError, match=f"GradScaler: {next(iter(options))} is "):
            optimizers.GradScaler(**options)
    with pytest.raises(ArgumentError, match="grad_scaler is given without an optimizer; expected both or neither"):
        build_training_step(net(), "mse", grad_scaler=optimizers.GradScaler())
    with pytest.raises(ArgumentError, match=r"grad_scaler is float; expected gradfuse.optimizers.GradScaler or torch"):
        build_training_step(net(), "mse", optimizer=optimizers.SGD(lr=1), grad_scaler=2.0)
    off: Any = torch.amp.GradScaler("cpu", enabled=False)
    step = build_training_step(net(), "mse", optimizer=optimizers.SGD(lr=1), grad_scaler=off)
    assert "loss_scale" not in step.optimizer_state


def wrong(monkeypatch: pytest.MonkeyPatch, name: str, change: Any) -> None:
    """Let the gradient of an initializer be what `change` makes of it."""
    plain = reverse.gradients

    def changed(*arguments: Any) -> Any:
        found = plain(*arguments)
        return {value: change(one) if value.name == name else one for value, one in found.items()}

    monkeypatch.setattr(sys.modules["gradfuse.differentiation.differentiate"], "gradients", changed)


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("loss", ["mse", "cross_entropy"])
@pytest.mark.parametrize("name", ["w", "b", "v"])
def test_a_gradient_that_is_wrong_by_one_percent_is_found(
    name: str, loss: str, fuse: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_training_step(net(), loss, fuse=fuse, check=True)
    wrong(monkeypatch, name, lambda gradient: gradient * 1.01)
    with pytest.raises(CheckError, match=f"check: the gradient of '{name}' is not that of the loss: along") as error:
        build_training_step(net(), loss, fuse=fuse, check=True)
    assert "\n" not in str(error.value)
    found = re.search(r"gives (\S+); differences give (\S+)", str(error.value))
    assert found is not None
    # Along a direction that the gradient has a part in, which is right, and one that is not.
    assert float(found[1]) != float(found[2])
    build_training_step(net(), loss, fuse=fuse)


@pytest.mark.parametrize(
    "change",
    [
        lambda g: g.zeros() + 0.0,
        lambda g: -g,
        lambda g: g.tape.concat(
            [g.slice(*(g.tape.ints(k) for k in (2, 5, 0))), g.slice(*(g.tape.ints(k) for k in (0, 2, 0)))]
        ),
        lambda g: g + 1e-3,
    ],
    ids=["zeros", "other sign", "other order", "an offset"],
)
def test_other_wrong_gradients_are_found_too(change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong(monkeypatch, "b", change)
    with pytest.raises(CheckError, match="the gradient of 'b'"):
        build_training_step(net(), "mse", check=True)


def test_the_smallest_gradient_of_many_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that changes the loss a hundred thousand times less than others."""
    model = net()
    shrink = onnx.helper.make_node("Mul", ["b", "tiny"], ["b.small"])
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(1e-5, np.float32), "tiny"))
    model.graph.node.insert(0, shrink)
    model.graph.node[2].input[1] = "b.small"
    build_training_step(model, "mse", check=True)
    wrong(monkeypatch, "b", lambda gradient: gradient * 1.01)
    with pytest.raises(CheckError, match="the gradient of 'b'"):
        build_training_step(model, "mse", check=True)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_models_of_16_bits_are_checked_in_float64(dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    code = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    model = net()
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.elem_type = code
    for k, initializer in enumerate(model.graph.initializer):
        array = onnx.numpy_helper.to_array(initializer).astype(dtype)
        model.graph.initializer[k].CopyFrom(onnx.numpy_helper.from_array(array, initializer.name))
    step = build_training_step(model, "mse", check=True)
    assert step.parameters["w"].dtype == dtype
    wrong(monkeypatch, "w", lambda gradient: gradient * 1.01)
    with pytest.raises(CheckError, match="the gradient of 'w'"):
        build_training_step(model, "mse", check=True)


def test_a_batch_is_given_where_random_ones_do_not_fit() -> None:
    """The batch has to be 7: its product with a matrix of 7 columns."""
    model = net()
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones((2, 7), np.float32), "mixing"))
    model.graph.node.append(onnx.helper.make_node("MatMul", ["mixing", "y"], ["z"]))
    del model.graph.output[:]
    model.graph.output.append(onnx.helper.make_tensor_value_info("z", 1, [2, 4]))
    with pytest.raises(ModelError, match=r"check: .*cannot run"):
        build_training_step(model, "mse", frozen=["mixing"], check=True)
    batch = {"x": X.numpy(), "target": np.zeros((2, 4), np.float32)}
    build_training_step(model, "mse", frozen=["mixing"], check=batch)
    with pytest.raises(ArgumentError, match="check has 'x'; expected arrays of 'x', 'target'"):
        build_training_step(model, "mse", frozen=["mixing"], check={"x": X.numpy()})


def test_random_inputs_fit_windows_and_targets() -> None:
    """Windows may be larger than the first sizes that are tried, and targets have the sizes of the output."""
    numbers = ", ".join(f"{np.sin(k):.3f}" for k in range(25))
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 18]> m (float[N, 1, H, W] x) => (float[N, 1, A, B] y)
        <float[1, 1, 5, 5] w = {{{numbers}}}> {{
            c = Conv(x, w)  y = AveragePool <kernel_shape = [3, 3], strides = [2, 2]> (c)
        }}"""
    )
    build_training_step(model, "mse", check=True)


def test_what_float32_rounds_is_no_wrong_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large number is added and taken away again, in an operator that is known in float32 alone."""
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 18, "com.microsoft": 1]> m (float[N, 3] x) => (float[N, 3] y)
        <float[3] w = {1.25, -0.5, 2}, float large = {20000}> {
            p = Mul(x, w)  g = com.microsoft.QuickGelu <alpha = 1.702> (p)  a = Add(g, large)  y = Sub(a, large)
        }"""
    )
    build_training_step(model, "mse", check=True, fuse=False)
    wrong(monkeypatch, "w", lambda gradient: gradient * 1.5)
    with pytest.raises(CheckError, match="the gradient of 'w'"):
        build_training_step(model, "mse", check=True, fuse=False)


def test_masks_of_the_least_number_are_no_error() -> None:
    """Rows that are masked throughout: their probabilities are equal, and gradients go through the sums."""
    least = float(np.finfo(np.float32).min)
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 18]>
        m (float[N, 3] x, bool[N, 1] hidden) => (float[N, 4] y)
            <float[3, 4] w = {{1, 2, 3, -4, 5, 6, 1, 2, -3, 4, 5, 6}}, float zero = {{0}}, float least = {{{least}}}> {{
            scores = MatMul(x, w)  mask = Where(hidden, least, zero)  sum = Add(scores, mask)  y = Softmax(sum)
        }}"""
    )
    batch = {"x": X.numpy(), "hidden": np.arange(7)[:, None] % 2 == 0, "target": np.zeros((7, 4), np.float32)}
    build_training_step(model, "mse", check=batch)


def test_what_draws_numbers_without_a_seed_is_not_checked() -> None:
    text = "g () => (float[7, 3] noise) { noise = RandomNormal<shape = [7, 3]>() }"
    drawn = onnx.parser.parse_graph(text)
    other = onnx.parser.parse_graph(text)
    model = net()
    model.graph.node.insert(0, onnx.helper.make_node("If", ["c"], ["noise"], then_branch=drawn, else_branch=other))
    model.graph.input.append(onnx.helper.make_tensor_value_info("c", onnx.TensorProto.BOOL, []))
    model.graph.node.insert(1, onnx.helper.make_node("Add", ["x", "noise"], ["noisy"]))
    model.graph.node[2].input[0] = "noisy"
    with pytest.raises(ArgumentError, match="check: the loss depends on random numbers; expected none"):
        build_training_step(model, "mse", check=True)


@pytest.mark.parametrize("kind, gates", [("LSTM", 4), ("GRU", 3)])
@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("steps", [0, 1, 3])
@pytest.mark.sampled(every=3)
def test_the_last_state_of_no_steps_is_the_first(kind: str, gates: int, direction: str, steps: int) -> None:
    count = 2 if direction == "bidirectional" else 1
    rng = np.random.default_rng(0)
    arrays = {
        "w": rng.standard_normal((count, gates * 3, 2)),
        "r": rng.standard_normal((count, gates * 3, 3)),
        "k": rng.standard_normal(3),
    }
    options = ", linear_before_reset = 1" if kind == "GRU" else ""
    shape = f"float[{count}, 4, 3]"
    model = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 18]> m (float[T, 4, 2] x, {shape} h) => ({shape} y) {{'
        f'  all, last = {kind} <hidden_size = 3, direction = "{direction}"{options}> (x, w, r, , , h)'
        "  y = Mul(last, k) }"
    )
    for name, array in arrays.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(array.astype(np.float32), name))
    step = build_training_step(model, losses.MSELoss("sum"), check=steps == 3)
    assert any("Recurrence" in node.op_type for node in step.model.graph.node)
    session = TrainingSession(step)
    x, h = (rng.standard_normal(size).astype(np.float32) for size in ((steps, 4, 2), (count, 4, 3)))
    loss = session.step((x, h), np.zeros((count, 4, 3), np.float32))
    wanted = np.square(h * arrays["k"])
    assert (abs(loss - wanted.sum()) <= 1e-5 * loss) == (steps == 0)
    for name in ("w", "r"):
        assert session.gradients[name].any() == (steps > 0)
    if not steps:
        assert np.abs(session.gradients["k"] - 2 * (wanted / arrays["k"]).sum((0, 1))).max() <= 1e-4


UNTYPED_OPTIMIZERS: Any = optimizers
UNTYPED_LOSSES: Any = losses
UNTYPED_BUILD: Any = build_training_step


def test_numbers_may_be_of_any_kind() -> None:
    """As they come from configurations, from numpy and as tensors."""
    plain, others = (
        UNTYPED_BUILD(
            net(),
            {"y": UNTYPED_LOSSES.HuberLoss(delta=delta)},
            optimizer=UNTYPED_OPTIMIZERS.AdamW(lr=lr, betas=betas, weight_decay=decay),
            max_grad_norm=norm,
            accumulate=calls,
            grad_scaler=UNTYPED_OPTIMIZERS.GradScaler(init_scale=scale, growth_interval=interval),
            average=UNTYPED_OPTIMIZERS.EMA(decay=decay, every=calls),
            loss_weights={"y": scale},
        )
        for delta, lr, betas, decay, norm, calls, scale, interval in (
            (0.5, 0.25, (0.5, 0.75), 0.5, 1.0, 2, 8.0, 3),
            (
                np.float32(0.5),
                torch.tensor(0.25),
                [np.float32(0.5), 0.75],
                np.float16(0.5),
                np.int64(1),
                np.int64(2),
                np.array(8),
                np.int32(3),
            ),
        )
    )
    assert plain.model == others.model
    assert plain.hyperparameters == others.hyperparameters
    assert plain.optimizer_state.keys() == others.optimizer_state.keys()


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: UNTYPED_OPTIMIZERS.AdamW(lr="0.1"), "AdamW: lr is '0.1'; expected a number"),
        (lambda: UNTYPED_OPTIMIZERS.SGD(lr=None), "SGD: lr is None; expected a number"),
        (lambda: UNTYPED_OPTIMIZERS.Adam(betas=(0.9,)), r"Adam: betas is \(0.9,\); expected two numbers"),
        (lambda: UNTYPED_OPTIMIZERS.Adam(betas=0.9), "Adam: betas is 0.9; expected two numbers"),
        (lambda: UNTYPED_OPTIMIZERS.GradScaler(growth_interval=2.5), "growth_interval is 2.5; expected a whole number"),
        (lambda: UNTYPED_LOSSES.HuberLoss(delta="1"), "HuberLoss: delta is '1'; expected a number"),
        (lambda: UNTYPED_LOSSES.CrossEntropyLoss(ignore_index=-1.0), "ignore_index is -1.0; expected a whole number"),
        (
            lambda: UNTYPED_BUILD(net(), UNTYPED_LOSSES.NLLLoss(weight=["a", "b"])),
            r"NLLLoss: weight is \['a', 'b'\]; expected numbers",
        ),
        (
            lambda: UNTYPED_BUILD(net(), UNTYPED_LOSSES.NLLLoss(weight=torch.ones(3, requires_grad=True))),
            "NLLLoss: weight is torch.Tensor: Can't call numpy",
        ),
        (
            lambda: UNTYPED_BUILD(net(), UNTYPED_LOSSES.MSELoss),
            "loss is the class gradfuse.losses.MSELoss; expected a name, an object",
        ),
        (
            lambda: UNTYPED_BUILD(net(), "mse", optimizer=UNTYPED_OPTIMIZERS.SGD),
            "optimizer is the class gradfuse.optimizers.SGD; expected one of",
        ),
        (
            lambda: UNTYPED_BUILD(net(), "mse", memory_budget=np.int64(2**30), memory_sizes={"N": "2"}),
            "the size of 'N' is '2'; expected a positive integer",
        ),
    ],
)
def test_what_is_no_number_is_one_line(make: Any, text: str) -> None:
    with pytest.raises(ArgumentError, match=text):
        make()
