"""The module of a step alone, in eval mode, as an ONNX model. This module imports torch."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from gradfuse import _torch_private as private
from gradfuse.checking.condensing import condensed
from gradfuse.differentiation.differentiate import free_prefix
from gradfuse.errors import ExportError
from gradfuse.export import (
    branches,
    checkpoints,
    comparing_sizes,
    dropout,
    explaining,
    inner_derivatives,
    onnx_model,
    pools,
    recurrences,
    splits,
    steadiness,
    tracing,
)
from gradfuse.export.dropout import SeededDropout
from gradfuse.export.dynamic_shapes import DynamicShapes
from gradfuse.export.other_sizes import OtherSizes
from gradfuse.export.packed_sequences import padded
from gradfuse.export.python_state import PythonState
from gradfuse.export.reporting import kind, quiet, refusal, without_warnings
from gradfuse.export.rounding import WideSparse
from gradfuse.export.size_numbers import SizeNumbers
from gradfuse.export.torch_step import TRIED_SEED, Outcome, TorchStep
from gradfuse.export.translation import lengths_as_tensors
from gradfuse.export.verifying import Opened, Truth
from gradfuse.models.arrays import Arrays, to_numpy
from gradfuse.models.scatters import replace_scatter_nd
from gradfuse.training import batch_checks, narrow_types
from gradfuse.training.step import DROPOUT_SEED


def evaluation_model(
    step: TorchStep,
    shapes: DynamicShapes,
    outcome: Outcome,
    sizes: explaining.Sizes,
    shared: tuple[ir.Model, Sequence[str]] | None,
    state: PythonState,
    *,
    fuse: bool,
    in_float64: bool = True,
) -> onnx.ModelProto:
    """Export the module as a model of the parameters and buffers that it uses, and leave it in eval mode.

    Its outputs are the tensors that the module returns, also those within tuples and dictionaries. What is of another
    type is left out, such as a cache of keys and values. Where the module draws random numbers in eval mode too, the
    seed of the step decides them: draws are counted from 0 on, as if there were no dropout.

    Args:
        step: the step; the loss and autocast are left out.
        shapes: its dynamic dimensions.
        outcome: what PyTorch's own run of it gave. The buffers that the step changes are inputs, as trainable
            parameters and the step's frozen inputs are; all others constants.
        sizes: tells the user what is taken to be so of sizes.
        shared: a translated model with these outputs and the names of its inputs, parameters and buffers first, if the
            step gives one.
        state: Python's state, which is as before at the end.
        fuse: whether operators of gradfuse may stand in it.
        in_float64: whether it is compared in float64 as well.

    Raises:
        ExportError: PyTorch cannot trace the module, it computes something else each time that it runs, or an output
            differs from PyTorch's.
    """
    step.module.eval()
    step = step.with_seed(TRIED_SEED)
    changed = outcome.changed
    try:
        inside = outcome.differentiates and _differentiates(step)
        with quiet(), torch.set_grad_enabled(inside):
            runs: list[tuple[Arrays, int]] = []

            def run() -> Arrays:
                runs.append(_run_and_count(step, lambda tensor: tensor, inside))
                return runs[-1][0]

            steadiness.require_same(run, step, state)
            native, draws = runs[0]
            if draws and DROPOUT_SEED not in step.state:
                raise refusal(
                    "the module draws random numbers in eval mode, but none in training, so that the step has no seed "
                    "for them; expected none in eval mode, or in both"
                )
            program = _traced(step, shapes, changed, sizes, state, inside) if shared is None else None
    except ExportError:
        raise
    except Exception as error:
        # A user's module may raise anything, and torch.export has no common base class for what it refuses.
        raise refusal(f"torch.export cannot trace the module in eval mode: {explaining.reason(error)}") from error
    assumed = sizes.assumed
    if program is not None:
        assumed = sizes.warn(step, program, shapes)
        shared = _translated(step, program, inside), (*step.state, *step.input_names)
    assert shared is not None
    model, names = shared
    free = [name for name in step.state if name in (*step.trainable, *changed, *step.frozen_inputs)]
    model = onnx_model.completed(model, step, [name for name in names if name in step.state], free, fuse=fuse)
    left = [name for name in names if name in free or name not in step.state]
    onnx_model.arrange_evaluation(model, step, left, native, shapes)
    replace_scatter_nd(model)
    # Without the step's autocast.
    own = dataclasses.replace(step, autocast=None)
    if own.is_bfloat16_on_cpu:
        narrow_types.widen_bfloat16(model, fuse=fuse)

    def run_anew(step: TorchStep, cast: Callable[[Tensor], Tensor]) -> Arrays:
        with state.fresh(), WideSparse(), without_warnings():
            step.module.eval()
            outputs = _run_and_count(step, cast, inside)[0]
        step.module.eval()
        return outputs

    truth = Truth.of(own, native, run_anew, tuple(free), in_float64=in_float64)
    opened = Opened(model, "evaluation", as_it_is=own.is_bfloat16_on_cpu)
    truth.compare(model, "evaluation", opened)
    truth.compare_in_float64(model, "evaluation")
    others = sizes.others if program is None else OtherSizes.of(step, program, shapes, (*step.state, *step.input_names))
    comparing_sizes.compare(truth, model, opened, others, shapes, "evaluation")
    size_checks = comparing_sizes.checks_of(truth, model, opened, sizes, assumed, shapes, "evaluation")
    batch_checks.append_to_evaluation(model, size_checks, free_prefix(model.graph, "checks/")[:-1])
    if own.is_bfloat16_on_cpu and fuse:
        narrow_types.cast_by_vectors(model)
    proto: onnx.ModelProto = ir.to_proto(model)
    return proto


def _traced(
    step: TorchStep,
    shapes: DynamicShapes,
    changed: Sequence[str],
    sizes: explaining.Sizes,
    state: PythonState,
    inside: bool,
) -> ExportedProgram:
    """Trace the program (tensors of the step, inputs) -> the tensors that the module returns."""
    arguments = tuple(tensor.detach().clone() for tensor in step.state.values()), step.inputs
    dims = ((None,) * len(step.state), shapes.inputs)
    with torch.enable_grad():
        # The loss, which runs as well, may take derivatives of what the module gives.
        taken = branches.branches_of(step)

    def once() -> ExportedProgram:
        with sizes.noted(), state.fresh():
            step.module.eval()
            return private.exported(_Traced(step, taken, changed, inside), arguments, dims)

    program = SizeNumbers().traced(step, sizes, once)
    step.module.eval()
    return program


def _translated(step: TorchStep, program: ExportedProgram, inside: bool) -> ir.Model:
    narrow = step.is_for_narrow_device
    program = tracing.decomposed(program, fuse=False, batch_norm=False, narrow=narrow, differentiates=inside)
    if DROPOUT_SEED in step.state:
        dropout.connect(program, list(step.state).index(DROPOUT_SEED))
    checkpoints.taken_out(program)
    return onnx_model.translate(program, step)


class _Traced(nn.Module):
    """The module of a step, as a function of all tensors of the step."""

    def __init__(self, step: TorchStep, taken: branches.Branches, changed: Sequence[str], inside: bool) -> None:
        super().__init__()
        # In a tuple, as this module must not own the tensors of the other.
        self._traced = (step, taken, changed, inside)

    def forward(self, values: Any, inputs: Any) -> Any:
        step, taken, changed, inside = self._traced

        def outputs(state: Mapping[str, Tensor], inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
            # A graph must not write into its inputs.
            copies = {name: value.clone() if name in step.buffers else value for name, value in state.items()}
            answered = branches.answered(step, taken, copies, changed, differentiates=inside)
            scanned = contextlib.nullcontext() if inside else recurrences.scanned()
            packed = contextlib.nullcontext() if inside else padded()
            with lengths_as_tensors(), scanned, pools.sized(), splits.sized(), answered, packed:
                return _outputs(step, copies, inputs)

        state = dict(zip(step.state, values, strict=True))
        if inside:
            traced: tuple[Tensor, ...] = inner_derivatives.traced(outputs, state, step.trainable, inputs)
            return traced
        return outputs(state, inputs)


def _outputs(step: TorchStep, state: Mapping[str, Tensor], inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    step.place(state)
    leaves = private.tensors_in(step.call_module([one.clone() for one in inputs]))
    tensors = tuple(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
    if not tensors:
        raise TypeError(f"it returns {kind(leaves[0]) if leaves else 'nothing'}; expected tensors")
    return tensors


def _differentiates(step: TorchStep) -> bool:
    """Whether the module takes derivatives itself, which it cannot under `no_grad`."""
    with quiet(), private.derivatives_noted() as noted:
        _run_and_count(step, lambda tensor: tensor, True)
    return bool(noted)


def _run_and_count(step: TorchStep, cast: Callable[[Tensor], Tensor], inside: bool) -> tuple[Arrays, int]:
    """Return what the module gives, by the names of the model's outputs, as float64, and how often it draws numbers.

    Args:
        step: the step, with its module in eval mode.
        cast: is applied to all tensors first.
        inside: whether the module takes derivatives itself.
    """
    grad, seeded = torch.set_grad_enabled(inside), SeededDropout(step.state.get(DROPOUT_SEED))
    with grad, lengths_as_tensors(), seeded as drawn:
        state = {name: cast(tensor.detach().clone()) for name, tensor in step.state.items()}
        for name in step.trainable if inside else ():
            state[name].requires_grad_()
        leaves = _outputs(step, state, [cast(tensor.detach()) for tensor in step.inputs])
    results = [f"output_{index}" for index in range(len(leaves))] if len(leaves) > 1 else ["output"]
    results = [f"{name}_" if name in {*step.state, *step.batch} else name for name in results]
    outputs = {
        name: condensed(to_numpy(leaf.detach(), copy=False)).astype(np.float64, copy=False)
        for name, leaf in zip(results, leaves, strict=True)
    }
    return outputs, drawn.count
