"""Training steps within a memory budget."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir

from gradfuse.models.arrays import Arrays, to_numpy
from gradfuse.models.tensors import to_mapped_proto, to_proto
from gradfuse.passes.recompute import RecomputePass
from gradfuse.training.in_place import with_ordered_updates
from gradfuse.training.step import LOSS, TrainingStep


def within_budget(
    step: TrainingStep,
    budget: int | float | str | Mapping[str, int],
    sizes: Mapping[str, int] | None,
    who: str,
    batch: Mapping[str, Any] | None = None,
) -> TrainingStep:
    """Return a bit-identical step that keeps within a memory budget when sessions run it.

    Args:
        step: the step; it stays as it is.
        budget: as of `RecomputePass`.
        sizes: symbolic dimension of the batch -> its size.
        who: what a message names first.
        batch: inputs and targets -> their arrays, for comparing the bits; None: random ones.

    Raises:
        GradfuseError: as of `RecomputePass`.
    """

    def as_run(model: ir.Model) -> ir.Model:
        return with_ordered_updates(to_proto(model), step.own_names).model

    feeds: Arrays = {**step.initial_values, **(batch or {})}
    recompute = RecomputePass(budget, sizes, step.own_name(LOSS), who, feeds=feeds, as_run=as_run)
    model = ir.from_proto(step.model)
    recompute(model)
    return dataclasses.replace(step, model=to_mapped_proto(model), recomputation=recompute.report)


def recomputing(
    step: TrainingStep, budget: int | float | str | Mapping[str, int], arrays: Sequence[Any], who: str
) -> TrainingStep:
    """Return `within_budget` of a step on a batch, whose sizes are those of the symbolic dimensions.

    Args:
        step: the step.
        budget: as of `within_budget`; or, to recompute what `torch.utils.checkpoint` wraps, as of `RecomputePass`.
        arrays: the tensors of the batch, inputs and then targets.
        who: what a message names first.

    Raises:
        GradfuseError: as of `within_budget`.
    """
    names = (*step.input_names, *step.target_names)
    batch = {name: to_numpy(tensor) for name, tensor in zip(names, arrays, strict=True)}
    sizes = {
        dim.dim_param: batch[value.name].shape[axis]
        for value in step.model.graph.input
        if value.name in batch
        for axis, dim in enumerate(value.type.tensor_type.shape.dim)
        if dim.dim_param
    }
    return within_budget(step, budget, sizes, who, batch)
