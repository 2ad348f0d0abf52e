"""Adapters of PEFT and onnxruntime into sessions and into each other, and folders that compute something else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import safetensors.numpy
from command_runs import Run
from onnx import helper, numpy_helper

import gradfuse
from gradfuse import ArgumentError, GradfuseError, ModelError, TrainingSession, add_lora, add_lora_inputs
from gradfuse.optimizers import AdamW
from gradfuse.testing import assert_gradients_close

pytestmark = pytest.mark.usefixtures("inference_in_process")

IN, OUT, RANK = 12, 5, 4
TERMS = 100.0
"""What the sums of the products add up, at most: 12 terms of a few units, and B A x."""
MODULE = "layers.0.proj"
CONFIG = {"peft_type": "LORA", "r": RANK, "lora_alpha": 8, "target_modules": ["proj"]}


def _base() -> onnx.ModelProto:
    weight = np.random.default_rng(0).standard_normal((IN, OUT)).astype(np.float32)
    nodes = [helper.make_node("MatMul", ["x", f"{MODULE}.weight"], ["y"])]
    x = helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["N", IN])
    y = helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["N", OUT])
    graph = helper.make_graph(nodes, "g", [x], [y], [numpy_helper.from_array(weight, f"{MODULE}.weight")])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def _folder(path: Path, tensors: dict[str, Any] | None = None, **config: Any) -> str:
    """Write a folder as PEFT does, and return its path."""
    rng = np.random.default_rng(1)
    names = {"lora_A.weight": (RANK, IN), "lora_B.weight": (OUT, RANK)}
    arrays = {
        f"base_model.model.{MODULE}.{name}": rng.standard_normal(shape).astype(np.float32)
        for name, shape in names.items()
    }
    path.mkdir(exist_ok=True)
    safetensors.numpy.save_file(arrays | (tensors or {}), path / "adapter_model.safetensors")
    (path / "adapter_config.json").write_text(json.dumps(CONFIG | config))
    return str(path)


def _session(alpha: float, rank: int = RANK) -> TrainingSession:
    model = add_lora(_base(), ["proj"], rank=rank, alpha=alpha)
    step = gradfuse.build_training_step(model, "mse", trainable=["*.lora_*"], optimizer=AdamW(lr=1e-3))
    return TrainingSession(step)


def test_pickled_adapters_are_not_read(tmp_path: Path) -> None:
    path = _folder(tmp_path / "peft")
    (tmp_path / "peft" / "adapter_model.safetensors").rename(tmp_path / "peft" / "adapter_model.bin")
    with pytest.raises(ModelError, match=r"adapters in adapter_model\.bin.*expected adapter_model\.safetensors"):
        gradfuse.load_adapter(_session(8), path)


def _expected(path: str, x: Any, scale: float, dtype: Any) -> Any:
    """What PEFT computes: x W + scale * x A^T B^T."""
    stored = safetensors.numpy.load_file(f"{path}/adapter_model.safetensors")
    a, b = (stored[f"base_model.model.{MODULE}.lora_{one}.weight"].astype(dtype) for one in "AB")
    weight = numpy_helper.to_array(_base().graph.initializer[0]).astype(dtype)
    return x.astype(dtype) @ weight + dtype(scale) * (x.astype(dtype) @ a.T @ b.T)


SETTINGS = [
    ({}, 2.0),
    ({"use_rslora": True}, 4.0),
    ({"alpha_pattern": {"proj": 12}}, 3.0),
    ({"alpha_pattern": {"other": 12, r"layers\.\d+\.proj": 6}}, 1.5),
]


@pytest.mark.parametrize(("config", "scale"), SETTINGS)
def test_a_session_and_onnxruntime_compute_what_peft_does(config: dict[str, Any], scale: float, tmp_path: Path) -> None:
    path = _folder(tmp_path / "peft", **config)
    x = np.random.default_rng(2).standard_normal((7, IN)).astype(np.float32)
    wanted = _expected(path, x, scale, np.float64), _expected(path, x, scale, np.float32)
    session = _session(scale * RANK)
    gradfuse.load_adapter(session, path)
    assert_gradients_close(session.evaluate(x), wanted[1], wanted[0], np.float32, terms=TERMS)

    file = str(tmp_path / "a.onnx_adapter")
    served = add_lora_inputs(_base(), ["proj"])
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    server = onnxruntime.InferenceSession(served.SerializeToString(), options)
    for base in (_base(), served, None):
        gradfuse.convert_adapter(path, file, base=base)
        adapter, run = onnxruntime.LoraAdapter(), onnxruntime.RunOptions()
        adapter.Load(file)
        run.add_active_adapter(adapter)
        assert_gradients_close(server.run(None, {"x": x}, run)[0], wanted[1], wanted[0], np.float32, terms=TERMS)

    # And back: its B has the scale in it.
    gradfuse.convert_adapter(file, tmp_path / "back", base=_base())
    assert_gradients_close(
        _expected(str(tmp_path / "back"), x, 1, np.float32), wanted[1], wanted[0], np.float32, terms=TERMS
    )
    other = _session(scale * RANK)
    gradfuse.load_adapter(other, file)
    assert_gradients_close(other.evaluate(x), wanted[1], wanted[0], np.float32, terms=TERMS)


def test_training_goes_on_from_what_save_adapter_wrote(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    x, y = rng.standard_normal((9, IN)).astype(np.float32), rng.standard_normal((9, OUT)).astype(np.float32)
    first, second = _session(8), _session(8)
    for _ in range(3):
        first.step(x, y)
    gradfuse.save_adapter(first, tmp_path / "peft", within="layers")
    gradfuse.load_adapter(second, tmp_path / "peft", within="layers")
    assert all(np.array_equal(array, first.state_dict()[name]) for name, array in second.state_dict().items())


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "DoRA": ({"use_dora": True}, {}, "use_dora"),
    "PiSSA": ({"init_lora_weights": "pissa_niter_4"}, {}, "init_lora_weights"),
    "another method": ({"peft_type": "IA3"}, {}, "peft_type"),
    "a bias": ({}, {"base_model.model.layers.0.proj.bias": np.zeros(OUT, np.float32)}, "proj.bias"),
    "B of another rank": ({}, {f"base_model.model.{MODULE}.lora_B.weight": np.zeros((OUT, 3), np.float32)}, "rank"),
    "a convolution": ({}, {f"base_model.model.{MODULE}.lora_A.weight": np.zeros((4, 2, 3), np.float32)}, "matrix"),
    "no alpha": ({"lora_alpha": None}, {}, "lora_alpha"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_computes_something_else_is_refused(name: str, tmp_path: Path) -> None:
    config, tensors, text = REFUSED[name]
    path, session = _folder(tmp_path / "peft", tensors, **config), _session(8)
    before = session.state_dict()
    with pytest.raises(ModelError, match=text):
        gradfuse.load_adapter(session, path)
    with pytest.raises(ModelError, match=text):
        gradfuse.convert_adapter(path, tmp_path / "a.onnx_adapter")
    assert not (tmp_path / "a.onnx_adapter").exists()
    assert all(np.array_equal(array, before[key]) for key, array in session.state_dict().items())


def test_another_scale_rank_or_module_is_refused(tmp_path: Path) -> None:
    path = _folder(tmp_path / "peft")
    with pytest.raises(ArgumentError, match=r"scaled by 2 .*alpha=8"):
        gradfuse.load_adapter(_session(4), path)
    with pytest.raises(ArgumentError, match="rank 4"):
        gradfuse.load_adapter(_session(4, rank=2), path)
    with pytest.raises(ArgumentError, match="same modules"):
        gradfuse.load_adapter(_session(8), path, within="model")
    narrow = _base()
    narrow.graph.initializer[0].CopyFrom(numpy_helper.from_array(np.ones((IN, 6), np.float32), f"{MODULE}.weight"))
    narrow.graph.output[0].type.tensor_type.shape.dim[1].dim_value = 6
    with pytest.raises(ArgumentError, match="12 to 6"):
        gradfuse.convert_adapter(path, tmp_path / "a.onnx_adapter", base=narrow)
    with pytest.raises(GradfuseError, match="expected one"):
        gradfuse.convert_adapter(path, tmp_path / "folder")


def test_adapters_behind_attention_are_refused(tmp_path: Path) -> None:
    name = "base_model.model.att.base_layer.out_proj.lora_A.weight"
    path = _folder(tmp_path / "peft", {name: np.ones((RANK, IN), np.float32)})
    with pytest.raises(ModelError, match=r"out_proj\.lora_A\.weight' of MultiheadAttention, to whose weight PEFT adds"):
        gradfuse.load_adapter(_session(8), path)


def test_a_file_for_a_base_has_its_types(tmp_path: Path) -> None:
    """Folders are often of 16 bits, and onnxruntime takes no other type than the input's."""
    rng = np.random.default_rng(2)
    a, b = rng.standard_normal((RANK, IN)), rng.standard_normal((OUT, RANK))
    stored = {"lora_A.weight": a.astype(np.float16), "lora_B.weight": b.astype(np.float16)}
    path = _folder(tmp_path / "peft", {f"base_model.model.{MODULE}.{name}": one for name, one in stored.items()})
    for number, base in enumerate((_base(), add_lora_inputs(_base(), [MODULE]))):
        file = str(tmp_path / f"{number}.onnx_adapter")
        gradfuse.convert_adapter(path, file, base=base)
        found = onnxruntime.AdapterFormat.read_adapter(file).get_parameters()
        assert {one.numpy().dtype for one in found.values()} == {np.dtype(np.float32)}
    gradfuse.convert_adapter(path, tmp_path / "plain.onnx_adapter")
    found = onnxruntime.AdapterFormat.read_adapter(str(tmp_path / "plain.onnx_adapter")).get_parameters()
    assert {one.numpy().dtype for one in found.values()} == {np.dtype(np.float16)}


def test_dropout_is_told(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"lora_dropout 0\.1"):
        gradfuse.load_adapter(_session(8), _folder(tmp_path / "peft", lora_dropout=0.1))


def test_a_module_whose_name_ends_another_is_found(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    weights = {f"{name}.weight": rng.standard_normal((IN, IN)).astype(np.float32) for name in ("block.fc", "fc")}
    nodes = [
        helper.make_node("MatMul", ["x", "block.fc.weight"], ["h"]),
        helper.make_node("MatMul", ["h", "fc.weight"], ["y"]),
    ]
    x, y = (helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["N", IN]) for name in "xy")
    tensors = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    graph = helper.make_graph(nodes, "g", [x], [y], tensors)
    base = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    step = gradfuse.build_training_step(add_lora(base, ["block.fc", "fc"], RANK), "mse", trainable=["*.lora_*"])
    gradfuse.save_adapter(TrainingSession(step), tmp_path / "folder")
    for model in (base, add_lora_inputs(base, ["block.fc", "fc"])):
        target = tmp_path / "a.onnx_adapter"
        gradfuse.convert_adapter(tmp_path / "folder", target, base=model)
        found = onnxruntime.AdapterFormat.read_adapter(str(target)).get_parameters()
        assert sorted(found) == sorted(step.parameters)
        target.unlink()


def test_the_command_converts(run: Run, tmp_path: Path) -> None:
    path = _folder(tmp_path / "peft")
    onnx.save(_base(), tmp_path / "base.onnx")
    file = tmp_path / "a.onnx_adapter"
    result = run("convert-adapter", path, file, "--base", tmp_path / "base.onnx")
    assert result[0] == 0 and file.exists(), result
    result = run("convert-adapter", tmp_path / "none", file)
    assert result[0] == 2 and "adapter_config.json" in result[2]


def test_peft_itself_agrees(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    import torch

    class Module(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList([torch.nn.ModuleDict({"proj": torch.nn.Linear(IN, OUT, bias=False)})])

        def forward(self, x: torch.Tensor) -> Any:
            return self.layers[0]["proj"](x)  # type: ignore[index]

    module = Module()
    weight = numpy_helper.to_array(_base().graph.initializer[0])
    module.layers[0]["proj"].weight.data = torch.from_numpy(weight.T.copy())  # type: ignore[index]
    adapted = peft.get_peft_model(
        module, peft.LoraConfig(r=RANK, lora_alpha=8, target_modules=["proj"], use_rslora=True)
    )
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    adapted.save_pretrained(tmp_path / "peft")
    session = _session(4 * RANK)
    gradfuse.load_adapter(session, tmp_path / "peft")
    x = torch.randn(7, IN)
    native, exact = adapted(x).detach(), adapted.double()(x.double()).detach()
    assert_gradients_close(session.evaluate(x), native, exact, np.float32, terms=TERMS)
