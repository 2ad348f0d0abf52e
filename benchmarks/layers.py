"""Training steps of one layer, in standard operators: what `payoff.py` measures of operators that whole steps have.

`fuse` finds an operator in such a step with all that it needs there, and nothing else takes much time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnx.numpy_helper
import onnx.parser
from regions import Array

import gradfuse


@dataclass(frozen=True)
class LayerStep:
    """A training step.

    Args:
        operator: what is in it, decomposed.
        name: of the layer, and its sizes.
        body: nodes from the inputs to `loss`, in the syntax of onnx.parser.
        inputs: their shapes.
        parameters: theirs.
        options: of `build_training_step`.
    """

    operator: str
    name: str
    body: str
    inputs: Mapping[str, tuple[int, ...]]
    parameters: Mapping[str, tuple[int, ...]]
    options: dict[str, Any] = field(default_factory=dict)

    def model(self) -> onnx.ModelProto:
        rng = np.random.default_rng(0)
        declared = ", ".join(f"float[{','.join(map(str, shape))}] {name}" for name, shape in self.inputs.items())
        model = onnx.parser.parse_model(
            f'<ir_version: 10, opset_import: ["": 23]> layer ({declared}) => (float loss) {{ {self.body} }}'
        )
        for name, shape in self.parameters.items():
            value = np.ones(shape) if name == "variance" else 0.1 * rng.standard_normal(shape)
            model.graph.initializer.append(onnx.numpy_helper.from_array(value.astype(np.float32), name))
        step = gradfuse.build_training_step(model, None, fuse=False, **self.options).model
        for k, node in enumerate(step.graph.node):
            node.name = node.name or f"{node.op_type}_{k}"
        return step


def values(model: onnx.ModelProto) -> dict[str, Array]:
    """A value for each input: its default, or random numbers of which none is negative, as second moments are not."""
    given = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    rng = np.random.default_rng(1)
    found = {}
    for value in model.graph.input:
        kind = onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        shape = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        found[value.name] = given.get(value.name, np.asarray(abs(rng.standard_normal(shape)), kind))
    return found


_LOSS = "product = Mul(y, target) loss = ReduceSum<keepdims=0>(product)"


def _convolution(
    batch: int, channels: int, filters: int, size: int, kernel: int, stride: int, groups: int
) -> LayerStep:
    out = (size + 2 * (kernel // 2) - kernel) // stride + 1
    pads = ",".join([str(kernel // 2)] * 4)
    kind = "depthwise" if groups > 1 else f"{kernel} x {kernel}" + (f" stride {stride}" if stride > 1 else "")
    return LayerStep(
        "ConvolutionBackward",
        f"{kind}, {batch} x {channels} to {filters}, {size} x {size}",
        f"x = Add(image, shift) y = Conv<pads=[{pads}], strides=[{stride},{stride}], group={groups}>(x, w) {_LOSS}",
        {"image": (batch, channels, size, size), "target": (batch, filters, out, out)},
        {"shift": (channels, 1, 1), "w": (filters, channels // groups, kernel, kernel)},
    )


def _batch_norm(batch: int, channels: int, size: int, *, relu: bool) -> LayerStep:
    norm = "BatchNormalization(x, scale, bias, mean, variance)"
    shape = (batch, channels, size, size)
    return LayerStep(
        "BatchNormBackward",
        f"{batch} x {channels} x {size} x {size}" + (" with ReLU" if relu else ""),
        f"x = Add(image, shift) {f'normal = {norm} y = Relu(normal)' if relu else f'y = {norm}'} {_LOSS}",
        {"image": shape, "target": shape},
        {"shift": (channels, 1, 1), **dict.fromkeys(("scale", "bias", "mean", "variance"), (channels,))},
        {"train_batch_norm": True},
    )


def _layer_norm(rows: int, columns: int, *, simplified: bool) -> LayerStep:
    kind, operands = ("RMSNormalization", "x, scale") if simplified else ("LayerNormalization", "x, scale, bias")
    shape = (rows, columns)
    return LayerStep(
        "LayerNormBackward",
        f"{rows} x {columns}" + (" without a mean" if simplified else ""),
        f"x = Add(rows, shift) y = {kind}({operands}) {_LOSS}",
        {"rows": shape, "target": shape},
        dict.fromkeys(("shift", "scale") if simplified else ("shift", "scale", "bias"), (columns,)),
    )


def _update(rows: int, columns: int) -> LayerStep:
    return LayerStep(
        "ApplyAdamW",
        f"{rows} x {columns}",
        f"y = Identity(w) {_LOSS}",
        {"target": (rows, columns)},
        {"w": (rows, columns)},
        {"optimizer": gradfuse.optimizers.AdamW(lr=1e-3)},
    )


def _activation(operator: str, node: str, name: str, rows: int, columns: int) -> LayerStep:
    shape = (rows, columns)
    return LayerStep(
        operator,
        f"{name}, {rows} x {columns}",
        f"x = Add(rows, shift) y = {node} {_LOSS}",
        {"rows": shape, "target": shape},
        {"shift": (columns,)},
    )


def _max_pool(batch: int, channels: int, size: int, kernel: int, stride: int) -> LayerStep:
    pad = (kernel - 1) // 2
    out = (size + 2 * pad - kernel) // stride + 1
    window = f"kernel_shape=[{kernel},{kernel}], strides=[{stride},{stride}], pads=[{','.join([str(pad)] * 4)}]"
    return LayerStep(
        "MaxPoolBackward",
        f"pool {kernel} x {kernel} stride {stride}, {batch} x {channels} x {size} x {size}",
        f"x = Add(image, shift) y = MaxPool<{window}>(x) {_LOSS}",
        {"image": (batch, channels, size, size), "target": (batch, channels, out, out)},
        {"shift": (channels, 1, 1)},
    )


def _momentum(rows: int, columns: int) -> LayerStep:
    return LayerStep(
        "ApplySgd",
        f"SGD, {rows} x {columns}",
        f"y = Identity(w) {_LOSS}",
        {"target": (rows, columns)},
        {"w": (rows, columns)},
        {"optimizer": gradfuse.optimizers.SGD(lr=1e-2, momentum=0.9, weight_decay=1e-4)},
    )


def layer_steps() -> Iterator[LayerStep]:
    """From what fits the first cache to what fits none."""
    for kernel, stride, channels, filters, groups in (
        (3, 1, 16, 16, 1),
        (3, 1, 64, 64, 1),
        (3, 2, 64, 128, 1),
        (3, 1, 256, 256, 1),
        (1, 1, 64, 24, 1),
        (1, 1, 256, 256, 1),
        (3, 1, 64, 64, 64),
    ):
        for batch, size in ((1, 4), (2, 8), (8, 16), (8, 56)):
            if batch * size * size * channels < 2**21:
                yield _convolution(batch, channels, filters, size, kernel, stride, groups)
    for batch, channels, size in ((2, 4, 4), (2, 16, 8), (8, 64, 8), (32, 16, 32), (16, 96, 24), (16, 64, 48)):
        for relu in (False, True):
            yield _batch_norm(batch, channels, size, relu=relu)
    for rows, columns in ((2, 8), (16, 64), (128, 192), (512, 256), (2048, 1024), (8192, 1024)):
        for simplified in (False, True):
            yield _layer_norm(rows, columns, simplified=simplified)
    for rows, columns in ((1, 16), (16, 64), (128, 128), (256, 1024), (1024, 1024), (4096, 2048)):
        yield _update(rows, columns)
        yield _momentum(rows, columns)
    for rows, columns in ((2, 8), (16, 64), (128, 256), (512, 1024), (4096, 2048)):
        yield _activation("GeluBackward", "Gelu(x)", "GELU", rows, columns)
        yield _activation("GeluBackward", 'Gelu<approximate="tanh">(x)', "GELU by tanh", rows, columns)
        yield _activation("ThresholdBackward", "Relu(x)", "ReLU", rows, columns)
    for batch, channels, size in ((1, 4, 8), (2, 16, 16), (8, 64, 28), (16, 64, 56)):
        for kernel, stride in ((2, 2), (3, 2), (3, 1)):
            yield _max_pool(batch, channels, size, kernel, stride)
