"""State that a step takes and gives, carried from call to call, such as the hidden states of recurrent layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from gradfuse.errors import ArgumentError, listed
from gradfuse.models.arrays import Arrays
from gradfuse.training.nesting import flat, names_in
from gradfuse.training.step import UPDATED_SUFFIX, TrainingStep

_WHO = "TrainingStep.carrying"


def carrying(step: TrainingStep, state: Mapping[str, str], begin: Mapping[str, Any] | None) -> TrainingStep:
    """Return a step as `TrainingStep.carrying` describes it."""
    if not isinstance(state, Mapping) or not state:
        raise ArgumentError(f"{_WHO}: state is {state!r}; expected a dictionary: input -> output")
    unknown = [name for name in begin or {} if name not in state]
    if unknown:
        raise ArgumentError(f"{_WHO}: begin has {unknown[0]!r}; expected inputs that are carried, {listed(state)}")
    model = ir.from_proto(step.model)
    graph = model.graph
    inputs = {str(value.name): value for value in graph.inputs}
    outputs = {str(value.name): value for value in graph.outputs}
    buffers: Arrays = {}
    for name, source in state.items():
        if name not in step.input_names:
            raise ArgumentError(
                f"{_WHO}: {name!r} is no input of the batch; expected one of {listed(step.input_names)}"
            )
        if source not in step.output_names:
            known = listed(step.output_names) if step.output_names else "those that the loss returns, or outputs="
            raise ArgumentError(f"{_WHO}: {source!r} is no output of the step; expected one of {known}")
        value, result = inputs[name], outputs[source]
        assert value.dtype is not None
        shape = [] if value.shape is None else list(value.shape)
        sizes = [dim for dim in shape if isinstance(dim, int)]
        if value.shape is None or len(sizes) < len(shape):
            raise ArgumentError(f"{_WHO}: {name!r} has the shape {value.shape}; expected sizes that do not vary")
        if result.dtype != value.dtype or not _fits(result.shape, sizes):
            got = f"{result.dtype} of shape {result.shape}"
            raise ArgumentError(
                f"{_WHO}: {source!r} is {got}; expected {value.dtype} of shape {value.shape}, as {name!r}"
            )
        first = np.asarray((begin or {}).get(name, np.zeros(sizes, value.dtype.numpy())))
        if first.dtype != value.dtype.numpy() or list(first.shape) != sizes:
            got = f"{first.dtype} of shape {list(first.shape)}"
            raise ArgumentError(f"{_WHO}: begin of {name!r} is {got}; expected {value.dtype} of shape {value.shape}")
        updated = f"{name}{UPDATED_SUFFIX}"
        if any(one.name == updated for node in graph for one in node.outputs) or updated in inputs:
            raise ArgumentError(f"{_WHO}: the step has a value {updated!r}; expected that name to be free")
        copy = ir.node("Identity", [result], name=f"{updated}.identity")
        copy.outputs[0].name, copy.outputs[0].type, copy.outputs[0].shape = updated, value.type, value.shape
        graph.append(copy)
        graph.outputs.append(copy.outputs[0])
        buffers[name] = np.array(first)
    left = set(state.values())
    for source in left:
        graph.outputs.remove(outputs[source])
    nesting = step.nesting.get("inputs") or flat(step.input_names)
    return dataclasses.replace(
        step,
        model=ir.to_proto(model),
        buffers=step.buffers | buffers,
        input_names=tuple(name for name in step.input_names if name not in state),
        output_names=tuple(name for name in step.output_names if name not in left),
        nesting={**step.nesting, "inputs": _without(nesting, state)},
        index_ranges={name: ranges for name, ranges in step.index_ranges.items() if name not in state},
        carried=(*step.carried, *state),
    )


def _fits(shape: ir.Shape | None, sizes: list[int]) -> bool:
    """Whether a shape may be of these sizes; onnxruntime sees to it where it is not known."""
    if shape is None:
        return True
    return len(shape) == len(sizes) and all(
        not isinstance(dim, int) or dim == size for dim, size in zip(shape, sizes, strict=True)
    )


def _without(nesting: Any, names: Collection[str]) -> dict[str, Any]:
    """Return the nesting of arguments without those that hold some tensors."""
    kept = []
    for argument, one in nesting["arguments"]:
        within = list(names_in(one))
        if not within or not any(name in names for name in within):
            kept.append([argument, one])
        elif not all(name in names for name in within):
            rest = listed(name for name in within if name not in names)
            raise ArgumentError(f"{_WHO}: a part of {argument!r} is carried, and {rest} are not; expected all or none")
    return {**nesting, "arguments": kept}
