"""Traces a step as one program of its forward and backward pass, in operators that torch.onnx can translate.

This module imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.nn.attention import SDPBackend, sdpa_kernel

from gradfuse.errors import one_line
from gradfuse.export import _torch_private as private
from gradfuse.export import batch_norms, branches, dropout, layouts, max_pools, recurrences
from gradfuse.export.decompositions import backward
from gradfuse.export.dynamic_shapes import DynamicShapes
from gradfuse.export.reporting import quiet, refusal
from gradfuse.export.torch_step import Outcome, TorchStep
from gradfuse.training.step import DROPOUT_SEED


def joint_program(step: TorchStep, native: Outcome, shapes: DynamicShapes, taken: branches.Branches) -> ExportedProgram:
    """Trace the program (used parameters, other tensors, inputs, targets) -> (loss, *changed buffers, *gradients).

    Used are the parameters that the loss depends on. If the loss is scaled, the scale is one more input, and the
    scaled loss, divided by the number of accumulated gradients, is an output ahead of the loss; the gradients are those
    of the scaled loss.

    Args:
        step: the step.
        native: what PyTorch's own run of it gave.
        shapes: its dynamic dimensions.
        taken: the branches on values that it takes.

    Raises:
        ExportError: PyTorch cannot trace the step, or it draws random numbers that no seed determines.
    """
    used = tuple(native.gradients)
    others = unused(step, native)

    def copies(names: Sequence[str]) -> tuple[Tensor, ...]:
        return tuple(step.state[name].detach().clone() for name in names)

    arguments: tuple[Any, ...] = (
        tuple(tensor.requires_grad_() for tensor in copies(used)),
        copies(others),
        tuple(tensor.detach() for tensor in step.inputs),
        tuple(tensor.detach() for tensor in step.targets),
    )
    dims: tuple[Any, ...] = ((None,) * len(used), (None,) * len(others), shapes.inputs, shapes.targets)
    if step.scales_loss:
        arguments += (torch.ones((), device=step.inputs[0].device),)
        dims += ((None,),)
    try:
        # The other attention kernels have backward operators that no exporter knows.
        with quiet(), sdpa_kernel(SDPBackend.MATH), recurrences.scanned():
            forward = torch.export.export(_Traced(step, native, taken), arguments, dynamic_shapes=dims)
            program = private.with_backward(forward, (*batch_norms.KEPT, *backward.KEPT))
    except Exception as error:
        # torch.export has no common base class for what it refuses.
        branches.refuse_open(step, taken)
        raise refusal(f"torch.export cannot trace the step: {one_line(error)}") from error
    branches.warn_of_assumptions(taken)
    _refuse_random_operators(program)
    try:
        with quiet():
            return private.with_user_outputs(program)
    except ValueError as error:
        raise refusal("torch.export gives a program without a signature") from error


def decomposed(program: ExportedProgram, *, fuse: bool) -> ExportedProgram:
    """Return a program without the operators that torch.onnx.export does not know.

    Args:
        program: a program.
        fuse: whether operators of gradfuse may stand in it.

    Raises:
        ExportError: PyTorch fails to decompose it.
    """
    if fuse:
        recurrences.fuse_recurrences(program)
        max_pools.fuse_max_pools(program)
    table = {**backward.table(), **(backward.fused_table() if fuse else {}), **dropout.table()}
    if not any(node.target in table for node in program.graph.nodes):
        return program
    try:
        with quiet():
            layouts.forget_layouts(program)
            if fuse:
                batch_norms.fuse_batch_norms(program)
            result: ExportedProgram = program.run_decompositions(table)
            return result
    except Exception as error:
        # A decomposition may raise anything.
        raise refusal(f"torch cannot decompose the step: {one_line(error)}") from error


def connect_dropout(program: ExportedProgram, step: TorchStep, native: Outcome) -> None:
    """Number the dropouts of a decomposed program, and connect them with their seed.

    Raises:
        ExportError: the program draws other random numbers than the dropouts that PyTorch has run.
    """
    drawn = len(dropout.masks(program.graph))
    if drawn != native.dropouts:
        raise refusal(
            f"the step draws random numbers in {drawn} operators, but {native.dropouts} when PyTorch runs it on the "
            "CPU; expected as many"
        )
    others = unused(step, native)
    if DROPOUT_SEED in others:
        dropout.connect(program, len(native.gradients) + others.index(DROPOUT_SEED))


def unused(step: TorchStep, native: Outcome) -> tuple[str, ...]:
    """Return the names of the buffers, and of the parameters that the loss does not depend on."""
    return tuple(name for name in step.state if name not in native.gradients)


class _Traced(nn.Module):
    """The forward pass of a step, as a function of all its tensors."""

    def __init__(self, step: TorchStep, native: Outcome, taken: branches.Branches) -> None:
        super().__init__()
        # In a tuple, as the module must not own the tensors of the step's module.
        names = tuple(native.gradients), unused(step, native), _with_shared_gradients(native)
        self._traced = (step, native, taken, *names)

    def forward(self, used_values: Any, other_values: Any, inputs: Any, targets: Any, *scale: Any) -> Any:
        step, native, taken, used, others, shared = self._traced
        state = dict(zip(others, other_values, strict=True)) | dict(zip(used, used_values, strict=True))
        # A graph must not write into its inputs: copies take the updates and are returned.
        state |= {name: state[name].clone() for name in step.buffers}
        state |= {name: state[name].unsqueeze(0).squeeze(0) for name in shared}
        with branches.answered(step, taken):
            value, after = step.apply(state, [one.clone() for one in inputs], [one.clone() for one in targets])
        accumulate = step.optimizer.accumulate if step.optimizer is not None else 1
        losses = (value / accumulate * scale[0], value.detach()) if scale else (value,)
        return (*losses, *(after[name] for name in native.changed))


def _with_shared_gradients(native: Outcome) -> list[str]:
    """Return the parameters whose gradient is the very tensor of an earlier one's, as those of a and b in a + b.

    torch.export miscounts gradients that are one node; a view of the parameter makes them two.
    """
    seen: set[int] = set()
    shared = []
    for name, gradient in native.gradients.items():
        if gradient.data_ptr() in seen:
            shared.append(name)
        seen.add(gradient.data_ptr())
    return shared


def _refuse_random_operators(program: ExportedProgram) -> None:
    known = dropout.table()
    for node in program.graph.nodes:
        if node.target in known:
            continue
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            raise refusal(
                f"the step draws random numbers by {node.target}, so that it cannot be compared with PyTorch; expected "
                "dropout, torch.rand, torch.randn and their kin alone"
            )
