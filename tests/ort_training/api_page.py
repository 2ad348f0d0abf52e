"""The names of onnxruntime-training 1.19.2's Python API, and what its example on the page does.

Usage: .venv-ort-training/bin/python tests/ort_training/api_page.py EXAMPLE RESULT.json

Runs the example in this folder, on a model, and writes the names that the page must have, and learning rates.
"""

from __future__ import annotations

import inspect
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnxruntime
from onnxruntime.training import amp, api, artifacts, onnxblock, optim
from onnxruntime.training.api import checkpoint_state

MODEL = """
    <ir_version: 8, opset_import: ["": 17]>
    classifier (float[N, 4] x) => (float[N, 3] logits)
        <float[4, 3] weight = {1, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0}, float[3] bias = {0, 0, 0}>
    {
        product = MatMul(x, weight)
        logits = Add(product, bias)
    }
"""


def members(owner: type) -> list[str]:
    """The public methods and properties, and those that operators and len() call."""
    special = ("__call__", "__getitem__", "__setitem__", "__contains__", "__iter__", "__len__")
    return [f"{owner.__name__}.{name}" for name in vars(owner) if not name.startswith("_") or name in special]


def public(module: ModuleType, prefix: str) -> list[str]:
    """The classes and functions of a module, and what it takes from others of onnxruntime-training."""
    names = []
    for name in dir(module):
        value = getattr(module, name)
        if name.startswith("_") or (isinstance(value, ModuleType) and name not in ("config", "lr_scheduler")):
            continue
        origin = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", "") or ""
        if origin.startswith("onnxruntime.training"):
            names.append(prefix + name)
    return names


def names() -> list[str]:
    found = list(inspect.signature(artifacts.generate_artifacts).parameters)
    found += [f"{kind.__name__}.{one.name}" for kind in (artifacts.LossType, artifacts.OptimType) for one in kind]
    classes = (api.CheckpointState, checkpoint_state.Parameters, checkpoint_state.Parameter)
    for owner in (*classes, checkpoint_state.Properties, api.Module, api.Optimizer, api.LinearLRScheduler):
        found += members(owner)
    for owner in (onnxblock.Block, onnxblock.ForwardBlock, onnxblock.TrainingBlock):
        found += [owner.__name__, *(name for name in members(owner) if "__" not in name)]
    found += public(onnxblock, "") + public(onnxblock.blocks, "blocks.")
    found += public(onnxblock.loss, "loss.") + public(onnxblock.optim, "optim.")
    found += public(optim, "optim.") + public(amp, "amp.")
    found += [name for name in onnxruntime.training.__all__ if name not in ("amp", "artifacts", "optim")]
    return found


def rates(warmup: int, total: int, x: Any, labels: Any) -> list[float]:
    """The learning rates of ten updates."""
    module = api.Module("training_model.onnx", api.CheckpointState.load_checkpoint("checkpoint"))
    optimizer, result = api.Optimizer("optimizer_model.onnx", module), []
    schedule = api.LinearLRScheduler(optimizer, warmup, total, 0.1)
    for _ in range(10):
        module(x, labels)
        schedule.step()
        result.append(optimizer.get_learning_rate())
        optimizer.step()
    return result


def main(example: str, result: str) -> None:
    rng = np.random.default_rng(0)
    x, labels = rng.standard_normal((8, 4)).astype(np.float32), rng.integers(0, 3, 8)
    given: dict[str, Any] = {"model": onnx.parser.parse_model(MODEL), "batches": [(x, labels)] * 30}
    # A new version of onnx writes optimizer models that 1.19.2 refuses.
    save = onnx.save

    def with_known_version(model: onnx.ModelProto, path: Any, *rest: Any, **options: Any) -> None:
        model.ir_version = min(model.ir_version, 8)
        save(model, path, *rest, **options)

    onnx.save = with_known_version  # type: ignore[assignment]
    exec(Path(example).read_text(encoding="utf-8"), given)
    served = onnxruntime.InferenceSession("served.onnx", providers=["CPUExecutionProvider"])
    state = given["state"]
    found = {"names": names(), "loss": float(given["loss"]), "served": served.run(None, {"x": x})[0].tolist()}
    found["weight"] = state.parameters["weight"].data.tolist()
    found["rates"] = {"as documented": rates(3, 8, x, labels), "exchanged": rates(8, 3, x, labels)}
    Path(result).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
