"""Training steps of models whose batch was fixed, and `gradfuse make-batch-dynamic`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
import torch
from command_runs import Run
from onnx import numpy_helper
from rows import assert_rows_agree

from gradfuse import ArgumentError, ModelError, TrainingSession, build_training_step
from gradfuse.optimizers import SGD
from gradfuse.testing import assert_gradients_close

pytestmark = pytest.mark.usefixtures("inference_in_process")

BATCH, WIDTH, HIDDEN, CLASSES = 6, 5, 4, 3


class _Classifier(torch.nn.Module):
    """A token ahead of a sequence, an LSTM from given states, and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.token = torch.nn.Parameter(torch.randn(1, 1, WIDTH))
        self.state = torch.nn.Parameter(torch.randn(1, 1, HIDDEN))
        self.recurrent = torch.nn.LSTM(WIDTH, HIDDEN)
        self.head = torch.nn.Linear(4 * HIDDEN, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = torch.cat([self.token.expand(len(x), -1, -1), x], 1).transpose(0, 1)
        state = self.state.expand(-1, len(x), -1).contiguous()
        y, _ = self.recurrent(rows, (state, state))
        result: torch.Tensor = self.head(y.transpose(0, 1).reshape(len(x), -1))
        return result


def _written(module: _Classifier, batch: int) -> onnx.ModelProto:
    """What an exporter that knows the batch makes of the module: gates are in ONNX's order."""
    text = f"""
        <ir_version: 8, opset_import: ["": 17]>
        g (float[{batch},3,{WIDTH}] x) => (float[{batch},{CLASSES}] y)
        <int64[3] e={{{batch},1,{WIDTH}}}, int64[3] s={{1,{batch},{HIDDEN}}}, int64[2] f={{{batch},{4 * HIDDEN}}},
         int64[1] one={{1}}>
        {{t = Expand(token, e) r = Concat <axis=1> (t, x) q = Transpose <perm=[1,0,2]> (r) h = Expand(state, s)
          v = LSTM <hidden_size={HIDDEN}> (q, weight, recurrence, bias, , h, h) u = Squeeze(v, one)
          p = Transpose <perm=[1,0,2]> (u) k = Reshape(p, f) y = Gemm <transB=1> (k, head, shift)}}"""
    model = onnx.parser.parse_model(text)
    order = np.concatenate([np.arange(HIDDEN) + gate * HIDDEN for gate in (0, 3, 1, 2)])
    state = {name: tensor.detach().numpy() for name, tensor in module.named_parameters()}
    lstm = {name.rpartition(".")[2]: array[order][None] for name, array in state.items() if "recurrent" in name}
    tensors = {
        "token": state["token"],
        "state": state["state"],
        "weight": lstm["weight_ih_l0"],
        "recurrence": lstm["weight_hh_l0"],
        "bias": np.concatenate([lstm["bias_ih_l0"], lstm["bias_hh_l0"]], 1),
        "head": state["head.weight"],
        "shift": state["head.bias"],
    }
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in tensors.items())
    return model


@pytest.mark.parametrize("batch", [1, 4])
def test_a_step_of_a_fixed_batch_trains_at_another_one_as_in_torch(batch: int) -> None:
    torch.manual_seed(0)
    module = _Classifier()
    step = build_training_step(
        _written(module, batch), "cross_entropy", trainable=["token", "state", "head", "shift"], dynamic_batch=True
    )
    x, target = torch.randn(BATCH, 3, WIDTH), torch.arange(BATCH) % CLASSES
    session = TrainingSession(step)
    loss = session.step(x.numpy(), target.numpy())

    def gradients(dtype: torch.dtype) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        copy = _Classifier().to(dtype)
        copy.load_state_dict(module.state_dict())
        result = torch.nn.functional.cross_entropy(copy(x.to(dtype)), target)
        result.backward()  # type: ignore[no-untyped-call]
        named = {"token": copy.token, "state": copy.state, "head": copy.head.weight, "shift": copy.head.bias}
        return result.detach(), {name: p.grad for name, p in named.items() if p.grad is not None}

    (native_loss, native), (exact_loss, exact) = gradients(torch.float32), gradients(torch.float64)
    assert_gradients_close(np.float32(loss), native_loss, exact_loss, np.float32)
    assert set(session.gradients) == set(native)
    for name, array in session.gradients.items():
        terms = BATCH * exact[name].abs().max().numpy()
        assert_gradients_close(array, native[name], exact[name], np.float32, terms=terms)
    assert session.evaluate(x[:2].numpy()).shape == (2, CLASSES)


def _mixing(batch: int) -> onnx.ModelProto:
    return onnx.parser.parse_model(f"""
        <ir_version: 8, opset_import: ["": 17]>
        g (float[{batch},2,2] x, float[2,4] z) => (float[{batch},3] y)
        <int64[2] s={{{batch},4}}, float[4,3] w={{1,0,0, 0,1,0, 0,0,1, 1,1,1}}, float[1,4] c={{1,2,3,4}}>
        {{f = Reshape(x, s) m = ReduceMean <axes=[0]> (z) h = Add(f, m) g = Add(h, c) y = MatMul(g, w)}}""")


def test_axes_and_refusals_are_those_of_make_batch_dynamic() -> None:
    with pytest.raises(ArgumentError, match=r"build_training_step: the batch is 1 in 'x' and 2 at axis 0 of 'z'"):
        build_training_step(_mixing(1), "mse", dynamic_batch=True)
    with pytest.raises(ModelError, match=r"build_training_step: the batch of 2 stays fixed: ReduceMean \(output 'm'\)"):
        build_training_step(_mixing(2), "mse", dynamic_batch=True)
    with pytest.raises(ArgumentError, match="dynamic_batch is 4; expected True, or a dictionary"):
        build_training_step(_mixing(1), "mse", dynamic_batch=4)  # type: ignore[arg-type]
    step = build_training_step(
        _mixing(1), "mse", optimizer=SGD(lr=1e-3), dynamic_batch={"z": None}, check=True, trainable=["w", "c"]
    )
    session = TrainingSession(step)
    x, z, y = (np.ones(shape, np.float32) for shape in ((5, 2, 2), (2, 4), (5, 3)))
    assert session.step((x, z), y) > session.step((x, z), y)


def test_the_command_line(run: Run, tmp_path: Path) -> None:
    source, target, step = (tmp_path / name for name in ("fixed.onnx", "free.onnx", "step.onnx"))
    onnx.save(_mixing(1), source)
    code, output, errors = run("make-batch-dynamic", source, target, "--axis", "z=none")
    assert (code, errors) == (0, "") and output == "inputs x [batch,2,2], z [2,4]\noutputs y [batch,3]\n"
    assert assert_rows_agree(_mixing(1), onnx.load(target), {"z": None}) == {"y"}
    code, _, errors = run("training-step", source, step, "--loss", "mse", "--dynamic-batch", "--batch-axis", "z=none")
    assert (code, errors) == (0, "")
    (x,) = (value for value in onnx.load(step).graph.input if value.name == "x")
    assert x.type.tensor_type.shape.dim[0].dim_param == "batch"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["make-batch-dynamic", "fixed.onnx", "out.onnx"], "2 at axis 0 of 'z'"),
        (["make-batch-dynamic", "fixed.onnx", "out.onnx", "--axis", "z"], "--axis is 'z'; expected INPUT=AXIS"),
        (["make-batch-dynamic", "fixed.onnx", "out.onnx", "--axis", "z=one"], "--axis is 'z=one'; expected"),
        (["make-batch-dynamic", "fixed.onnx", "fixed.onnx"], "the same file as IN.onnx"),
        (["training-step", "fixed.onnx", "out.onnx", "--batch-axis", "z=none"], "without --dynamic-batch"),
        (["training-step", "fixed.onnx", "out.onnx", "--loss", "mse", "--dynamic-batch"], "2 at axis 0 of 'z'"),
    ],
)
def test_bad_arguments_are_one_line(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[Any], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    onnx.save(_mixing(1), "fixed.onnx")
    code, output, errors = run(*arguments)
    assert code == 2 and output == "" and message in errors and errors.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["fixed.onnx"]
