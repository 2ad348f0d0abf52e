"""Training graphs of other producers: the committed selection, and the whole corpus where it lies beside the clone."""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort

COMMITTED = Path(__file__).parents[1] / "corpus"
WHOLE = Path(__file__).parents[3] / "shared" / "corpus"

_RANDOM = {"Dropout", "RandomUniform", "RandomUniformLike", "RandomNormal", "RandomNormalLike", "Bernoulli"}


@dataclass(frozen=True)
class Case:
    folder: Path
    producer: str
    name: str
    expect: tuple[str, ...]
    runs: bool
    agrees: bool

    @property
    def path(self) -> Path:
        return self.folder / self.producer / f"{self.name}.onnx"

    def __str__(self) -> str:
        return f"{self.producer}/{self.name}"

    def arrays(self, kind: str) -> dict[str, np.ndarray[Any, Any]]:
        """The producer's arrays: `kind` is "in" or "out"."""
        found = {}
        with np.load(self.path.with_suffix(".npz")) as file:
            for key in file.files:
                if key.startswith(f"{kind}."):
                    name, _, bits = key.removeprefix(f"{kind}.").partition("#")
                    found[name] = file[key].view(ml_dtypes.bfloat16) if bits == "bf16" else file[key]
        return found


def cases() -> list[Case]:
    """The whole corpus if it is there, else the committed selection. CI must have the whole."""
    if os.environ.get("CI") == "true" and not WHOLE.is_dir():
        raise FileNotFoundError(f"{WHOLE}: the corpus must be there under CI")
    folder = WHOLE if WHOLE.is_dir() else COMMITTED
    with (folder / "index.csv").open() as file:
        return [
            Case(
                folder,
                row["producer"],
                row["case"],
                tuple(filter(None, row["expect"].split("+"))),
                row["runs_on_stock_onnxruntime"] == "yes",
                row["agrees_with_producer"] == "yes",
            )
            for row in csv.DictReader(file)
        ]


def in_float32(model: ir.Model) -> ir.Model:
    """The model with float32 in the place of bfloat16, for which onnxruntime's CPU provider has few kernels."""
    source, target = ir.DataType.BFLOAT16, ir.DataType.FLOAT

    def changed(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
        return ir.tensor(tensor.numpy().astype(np.float32), name=tensor.name) if tensor.dtype == source else tensor

    values = [*model.graph.inputs, *model.graph.initializers.values()]
    for node in model.graph.all_nodes():
        values += node.outputs
        for name, attr in list(node.attributes.items()):
            if attr.type == ir.AttributeType.TENSOR:
                node.attributes[name] = ir.AttrTensor(name, changed(attr.value))
            elif name in ("to", "dtype") and attr.value == source:
                node.attributes[name] = ir.AttrInt64(name, int(target))
    for value in values:
        if value.const_value is not None:
            value.const_value = changed(value.const_value)
        if value.dtype == source:
            value.dtype = target
    return model


def with_seeds(model: ir.Model) -> ir.Model:
    """The model with a fixed seed at each random node, by its name, so that two models draw the same numbers."""
    for node in model.graph.all_nodes():
        if node.op_type in _RANDOM:
            seed = sum(str(node.name).encode())
            node.attributes["seed"] = (
                ir.AttrInt64("seed", seed) if node.op_type == "Dropout" else ir.AttrFloat32("seed", float(seed))
            )
    return model


def run(model: onnx.ModelProto, feeds: Mapping[str, np.ndarray[Any, Any]]) -> dict[str, np.ndarray[Any, Any]]:
    """The model's outputs in stock onnxruntime, without the library."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = [i.name for i in session.get_inputs()]
    outputs = session.run(None, {n: feeds[n] for n in names})
    return dict(zip([o.name for o in session.get_outputs()], outputs, strict=True))
