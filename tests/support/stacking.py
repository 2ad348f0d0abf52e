"""Large models for benchmarks and tests: copies of real training graphs, side by side or one after the other."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import onnx

CORPUS = Path(__file__).parents[1] / "corpus"

BLOCKS = (
    "torch_export_fb/gpt_block_ce_dyn",
    "torch_makefx/sgd_step_ce_mean_f32",
    "torch_makefx/attn_dropout",
    "torch_export_fb/attn_mulmask",
    "torch_export_fb/attn_maskedfill_f16_dyn",
    "torch_aot/attn_nomask",
    "torch_makefx/ce_mean_smooth",
    "torch_export_fb/ce_mean_smooth_weight_ignore_input_dyn",
    "torch_export_fb/ce_seg_nchw_ignore255_dyn",
    "torch_makefx/ce_mean_weight_ignore_inductor",
    "torch_export_fb/gba_2d_static_split",
    "torch_export_fb/gba_2d_ends_cmp_dyn",
    "torch_export_fb/mse_handwritten_pow_dyn",
    "torch_export_fb/mse_mean_f16",
)
"""Graphs of one opset with static and symbolic shapes, which hold all operators that are found in pieces."""


def block(name: str) -> onnx.ModelProto:
    """A graph of the committed corpus."""
    return onnx.load(CORPUS / f"{name}.onnx")


def stacked(blocks: Sequence[onnx.ModelProto], nodes: int, *, chained: bool, shapes: bool = True) -> onnx.ModelProto:
    """Copies of the blocks, one after the other, with unique names, until there are at least `nodes` nodes.

    Args:
        blocks: models of one opset.
        nodes: how many nodes at least; the last copy is whole.
        chained: whether a parameter of a copy is an output of the same block's copy ahead, where one has its type and
            shape: training steps in a row. Else the copies stand side by side.
        shapes: whether the values between the nodes keep their types and shapes.
    """
    model = onnx.ModelProto(ir_version=max(b.ir_version for b in blocks))
    model.opset_import.append(onnx.helper.make_opsetid("", blocks[0].opset_import[0].version))
    graph = model.graph
    graph.name = "stacked"
    outputs: list[list[onnx.ValueInfoProto]] = [[] for _ in blocks]
    copies = 0
    while len(graph.node) < nodes:
        which = copies % len(blocks)
        outputs[which] = _append(graph, blocks[which].graph, f"c{copies}.", outputs[which] if chained else [], shapes)
        copies += 1
    return model


def _append(
    graph: onnx.GraphProto,
    block: onnx.GraphProto,
    prefix: str,
    offered: Sequence[onnx.ValueInfoProto],
    shapes: bool,
) -> list[onnx.ValueInfoProto]:
    """Adds a copy of the block to the graph, with values from those offered, and gives its outputs."""
    names = {"": ""}
    left = list(offered)
    for name, kind in _parameters(block):
        found = next((k for k, v in enumerate(left) if _kind(v) == kind), None)
        if found is not None:
            names[name] = left.pop(found).name

    def renamed(name: str) -> str:
        return names.setdefault(name, prefix + name)

    for node in block.node:
        new = graph.node.add()
        new.CopyFrom(node)
        new.name = prefix + node.name
        new.input[:] = [renamed(n) for n in node.input]
        new.output[:] = [renamed(n) for n in node.output]
    for target, values in ((graph.input, block.input), (graph.value_info, block.value_info if shapes else ())):
        for value in values:
            if renamed(value.name).startswith(prefix):
                _add(target, value, renamed(value.name))
    for tensor in block.initializer:
        if renamed(tensor.name).startswith(prefix):
            initializer = graph.initializer.add()
            initializer.CopyFrom(tensor)
            initializer.name = renamed(tensor.name)
    first = len(graph.output)
    for value in block.output:
        _add(graph.output, value, renamed(value.name))
    return list(graph.output[first:])


def _parameters(block: onnx.GraphProto) -> Iterator[tuple[str, tuple[object, ...]]]:
    """The parameters: inputs, but for the batch, and the initializers that the producers named after the module."""
    for value in block.input:
        if value.type.tensor_type.shape.dim and not value.name.startswith("batch"):
            yield value.name, _kind(value)
    for tensor in block.initializer:
        if tensor.dims and tensor.name.startswith("m."):
            yield tensor.name, (tensor.data_type, *tensor.dims)


def _kind(value: onnx.ValueInfoProto) -> tuple[object, ...]:
    kind = value.type.tensor_type
    return (kind.elem_type, *(dim.dim_param or dim.dim_value for dim in kind.shape.dim))


def _add(target: object, value: onnx.ValueInfoProto, name: str) -> None:
    new = target.add()  # type: ignore[attr-defined]
    new.CopyFrom(value)
    new.name = name


def with_external_weights(model: onnx.ModelProto, folder: Path, gigabytes: int) -> Path:
    """The model with layers whose weights are external data of a number of GiB, saved in a folder.

    The data file is sparse: it has that size, and takes no space on a disk whose file system knows holes. Each weight
    begins with a 1, as a tensor that is one number all over is no weight.
    """
    width = 8192
    graph = model.graph
    value = graph.input.add()
    value.CopyFrom(onnx.helper.make_tensor_value_info("features", onnx.TensorProto.FLOAT, [1, width]))
    size = 4 * width * width
    count = gigabytes * 2**30 // size
    for k in range(count):
        weight = graph.initializer.add(
            name=f"layer{k}.weight", data_type=onnx.TensorProto.FLOAT, data_location=onnx.TensorProto.EXTERNAL
        )
        weight.dims[:] = [width, width]
        for key, text in (("location", "weights.bin"), ("offset", k * size), ("length", size)):
            weight.external_data.add(key=key, value=str(text))
        source = "features" if k == 0 else f"layer{k - 1}"
        graph.node.append(onnx.helper.make_node("MatMul", [source, weight.name], [f"layer{k}"], name=f"layer{k}"))
    graph.output.append(onnx.helper.make_tensor_value_info(f"layer{count - 1}", onnx.TensorProto.FLOAT, [1, width]))
    with open(folder / "weights.bin", "wb") as data:
        os.truncate(data.fileno(), count * size)
        for k in range(count):
            data.seek(k * size)
            data.write(np.float32(1).tobytes())
    path = folder / "model.onnx"
    onnx.save(model, path)
    return path
