"""Traces the forward pass of a step, in operators that torch.onnx can translate and that rules can differentiate.

This module imports torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from gradfuse import _torch_private as private
from gradfuse.errors import ExportError
from gradfuse.export import (
    batch_norms,
    branches,
    decomposing,
    dropout,
    explaining,
    gradient_hooks,
    indices,
    inner_derivatives,
    layouts,
    onnx_model,
    pools,
    promotion,
    recurrences,
    splits,
    standins,
    windows,
)
from gradfuse.export.decompositions import (
    backward,
    complex_numbers,
    elementwise,
    forward,
    in_float32,
    in_float64,
    logarithms,
)
from gradfuse.export.dynamic_shapes import DynamicShapes
from gradfuse.export.other_sizes import OtherSizes
from gradfuse.export.packed_sequences import padded
from gradfuse.export.python_state import PythonState
from gradfuse.export.reporting import quiet, refusal
from gradfuse.export.rewriting import CannotSelectError
from gradfuse.export.size_numbers import SizeNumbers
from gradfuse.export.torch_step import Outcome, TorchStep
from gradfuse.export.translation import lengths_as_tensors
from gradfuse.export.watching import Watch
from gradfuse.models.memory import collection_paused
from gradfuse.training.step import DROPOUT_SEED

_Trace = tuple[ExportedProgram, Watch | None]


@collection_paused()
def forward_program(
    step: TorchStep,
    native: Outcome,
    shapes: DynamicShapes,
    taken: branches.Branches,
    sizes: explaining.Sizes,
    state: PythonState,
    *,
    fuse: bool,
    evaluation: bool,
) -> tuple[ExportedProgram, int]:
    """Trace the program (used parameters, other tensors, batch) -> (loss, *changed buffers, *outputs, *hooked).

    Used are the parameters that the loss depends on, and the last results are what hooks make of their gradients. If
    the loss is scaled, the scale is one more input, and the scaled loss, divided by the number of accumulated
    gradients, is an output ahead of the loss.

    Returns also how many outputs follow: the tensors that the module returns, if these are what it returns in
    evaluation mode but for the dropouts, which are marked.

    Args:
        step: the step.
        native: what PyTorch's own run of it gave.
        shapes: its dynamic dimensions.
        taken: the branches on values that it takes.
        sizes: tells the user what is taken to be so of sizes.
        state: Python's state; the step is traced as if it had not run before.
        fuse: whether operators of gradfuse may stand in it.
        evaluation: whether the outputs of the module are wanted.

    Raises:
        ExportError: PyTorch cannot trace the step, or it draws random numbers that no seed determines.
    """
    if native.hooks and native.differentiates:
        raise refusal(
            f"{native.hooks[0]} changes a gradient in a step that takes derivatives itself; expected one or the other"
        )
    used = tuple(native.gradients)
    others = unused(step, native)

    def copies(names: Sequence[str]) -> tuple[Tensor, ...]:
        return tuple(step.state[name].detach().clone() for name in names)

    batch = tuple(one.detach().requires_grad_(name in step.differentiated) for name, one in step.batch.items())
    arguments: tuple[Any, ...] = (
        tuple(tensor.requires_grad_() for tensor in copies(used)),
        copies(others),
        batch[: len(step.inputs)],
        batch[len(step.inputs) :],
    )
    dims: tuple[Any, ...] = ((None,) * len(used), (None,) * len(others), shapes.inputs, shapes.targets)
    if step.scales_loss:
        arguments += (torch.ones((), device=step.inputs[0].device),)
        dims += ((None,),)
    numbers = SizeNumbers()
    shared = evaluation and not native.differentiates and _may_share(step, shapes, taken)

    def trace(inputs: tuple[Tensor, ...], targets: tuple[Tensor, ...]) -> _Trace:
        given = (*arguments[:2], inputs, targets, *arguments[4:])
        watch = None

        def once() -> ExportedProgram:
            nonlocal watch
            watch = Watch(step.module) if shared else None
            with quiet(), sizes.noted(), state.fresh():
                return private.exported(_Traced(step, native, taken, watch), given, dims)

        program = numbers.traced(step, sizes, once)
        for node in reversed(program.graph.nodes):
            # What raised an error has no value; see `selections`.
            if private.has_result(node) and node.meta.get("val") is None and not node.users:
                program.graph.erase_node(node)
        return program, watch

    try:
        traced = trace(*arguments[2:4])
    except ExportError:
        raise
    except (Exception, CannotSelectError) as error:
        # torch.export has no common base class for what it refuses.
        known = explaining.untraceable(step)
        if known is not None:
            raise refusal(known) from error
        branches.refuse_open(step, taken, error)
        explained = sizes.explain(step, error)
        if native.differentiates and explained is None and private.is_about_varying_sizes(error):
            raise refusal(
                "an axis that may vary becomes a constant where the step takes derivatives; expected torch.func.jvp in "
                "the place of torch.autograd.forward_ad, vmap of other operators, or static axes"
            ) from error
        raise refusal(explained or f"torch.export cannot trace the step: {explaining.reason(error)}") from error
    program, watch = _general(step, traced, shapes, sizes, trace)
    constant = sizes.explain_constants(step, program, shapes)
    if constant is not None:
        raise refusal(explaining.untraceable(step) or constant)
    branches.warn_of_assumptions(taken)
    sizes.assumed = sizes.warn(step, program, shapes)
    sizes.others = OtherSizes.of(step, program, shapes, (*used, *others, *step.batch))
    returned = 0
    if watch is not None:
        returned = len(watch.outputs)
        if not watch.mark_dropouts(program, (*used, *others), step.input_names):
            program, returned = private.with_fewer_outputs(program, returned), 0
    standins.keep_stops(program)
    indices.mark(program)
    differentiates, narrow = native.differentiates, step.is_for_narrow_device
    try:
        program = decomposed(program, fuse=fuse, batch_norm=True, narrow=narrow, differentiates=differentiates)
    except ExportError as error:
        known = explaining.untraceable(step)
        if known is None:
            raise
        raise refusal(known) from error
    _refuse_random_operators(step, program)
    return program, returned


def _general(
    step: TorchStep,
    traced: _Trace,
    shapes: DynamicShapes,
    sizes: explaining.Sizes,
    trace: Callable[[tuple[Tensor, ...], tuple[Tensor, ...]], _Trace],
) -> _Trace:
    """Trace a step once more with a batch that is 1 longer, if its code treats multiples of a number as a special case.

    Code that pads to whole blocks does so for any length, unless it is traced with whole blocks. That the same is
    computed for these is seen when the model is compared with PyTorch on the batch.
    """
    names = sizes.of_multiples(step, traced[0], shapes) if sizes.general else set()
    if not names:
        return traced

    def longer(name: str, tensor: Tensor) -> Tensor:
        for axis, label in shapes.names.get(name, {}).items():
            if label in names:
                tensor = torch.cat([tensor, tensor.narrow(axis, tensor.shape[axis] - 1, 1)], axis)
        return tensor.detach()

    batch = [longer(name, tensor) for name, tensor in step.batch.items()]
    try:
        general = trace(tuple(batch[: len(step.inputs)]), tuple(batch[len(step.inputs) :]))
    except (Exception, CannotSelectError):
        # A longer batch may be refused for any reason.
        return traced
    if not sizes.is_general(step, general[0]) or sizes.explain_constants(step, general[0], shapes) is not None:
        return traced
    sizes.made_general = True
    return general


def _may_share(step: TorchStep, shapes: DynamicShapes, taken: branches.Branches) -> bool:
    """Whether the trace of a step may be that of its module in evaluation mode too."""
    decides = taken.decided or taken.open or taken.found or taken.selections.codes or taken.items
    return step.autocast is None and not shapes.automatic and not decides


@collection_paused()
def decomposed(
    program: ExportedProgram, *, fuse: bool, batch_norm: bool, narrow: bool, differentiates: bool
) -> ExportedProgram:
    """Return a program without the operators that torch.onnx.export does not know, or translates wrongly.

    Args:
        program: a traced program.
        fuse: whether recurrent layers become operators of gradfuse.
        batch_norm: whether batch normalisation in training mode does, until its gradient is written.
        narrow: whether operators on 16 bits are left to a device that has them.
        differentiates: whether it takes derivatives itself, so that backward passes are among its operators.

    Raises:
        ExportError: PyTorch fails to decompose it.
    """
    # In one pass, as each takes seconds: also what torch.onnx.export would decompose.
    with quiet():
        table = private.decompositions_of_export(onnx_model.OPSET, onnx_model.translations().keys())
    table.update(torch.export.default_decompositions())
    if differentiates:
        table.update(backward.table())
    table.update(forward.table())
    table.update(forward.of_numbers(table))
    table.update(in_float64.table(table))
    if not narrow:
        table.update(in_float32.table(table))
    table.update(complex_numbers.table(table))
    for operator in (*standins.KEPT, *(batch_norms.KEPT if batch_norm else ())):
        table.pop(operator, None)
    table.update(elementwise.by_sizes(table))
    layouts.copy_where_needed(program)
    logarithms.choose_sigmoids(program)
    try:
        # Attention kernels are left for products and softmax, whose gradients fuse.
        with quiet(), sdpa_kernel(SDPBackend.MATH):
            program = decomposing.decompose(program, table)
            program = gradient_hooks.put_in_place(program)
            complex_numbers.read_parts(program)
            if fuse:
                recurrences.fuse_recurrences(program)
            if batch_norm:
                batch_norms.fuse_batch_norms(program, relu=fuse)
                # What does not fit the operator.
                rest = {key: one for key, one in forward.table().items() if key in batch_norms.KEPT}
                if any(node.target in rest for node in program.graph.nodes):
                    program = decomposing.decompose(program, rest | in_float64.table({}))
            layouts.forget_layouts(program)
            promotion.cast_operands(program)
            promotion.bound_by_floats(program)
            promotion.compute_sizes(program)
            promotion.divide_downwards(program)
            promotion.round_sizes(program)
            promotion.normalise_in_one_type(program)
            if not narrow:
                promotion.compute_with_numbers(program)
            decomposing.leave_out_checks(program)
    except Exception as error:
        # A decomposition may raise anything.
        raise refusal(f"torch cannot decompose the step: {explaining.reason(error)}") from error
    return program


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

    def __init__(self, step: TorchStep, native: Outcome, taken: branches.Branches, watch: Watch | None) -> None:
        super().__init__()
        # In a tuple, as the module must not own the tensors of the step's module.
        names = tuple(native.gradients), unused(step, native)
        self._traced = (step, native, taken, watch, *names)

    def forward(self, used_values: Any, other_values: Any, inputs: Any, targets: Any, *scale: Any) -> Any:
        step, native, taken, watch, used, others = self._traced
        state = dict(zip(others, other_values, strict=True)) | dict(zip(used, used_values, strict=True))

        def apply(
            state: dict[str, Tensor], inputs: Sequence[Tensor], targets: Sequence[Tensor]
        ) -> tuple[Tensor, Any, Any, tuple[Tensor, ...]]:
            # A graph must not write into its inputs: copies take the updates and are returned.
            state |= {name: state[name].clone() for name in step.buffers}
            answered = branches.answered(step, taken, state, native.changed, differentiates=native.differentiates)
            scanned = contextlib.nullcontext() if native.differentiates else recurrences.scanned()
            packed = contextlib.nullcontext() if native.differentiates else padded()
            registered = gradient_hooks.Registered(native.hooks, len(used) + len(step.differentiated))
            frozen = (
                contextlib.nullcontext() if native.differentiates else _FrozenMeanwhile([state[one] for one in used])
            )
            with (
                lengths_as_tensors(),
                frozen,
                scanned,
                pools.sized(),
                splits.sized(),
                windows.sized(),
                answered,
                packed,
            ):
                with registered if native.hooks else contextlib.nullcontext():
                    results = step.apply(
                        state, list(map(Tensor.clone, inputs)), list(map(Tensor.clone, targets)), watch
                    )
                # PyTorch calls hooks when buffers have their new values.
                leaves = {name: state[name] for name in used}
                hooked = gradient_hooks.traced(step.hooks, registered, step.calls, leaves, step.share_of_hooks)
                return *results, hooked

        if native.differentiates:
            value, after, extra, hooked = inner_derivatives.traced(apply, state, step.trainable, inputs, targets)
        else:
            value, after, extra, hooked = apply(state, inputs, targets)
        accumulate = step.optimizer.accumulate if step.optimizer is not None else 1
        losses = (value / accumulate * scale[0], value.detach()) if scale else (value,)
        outputs = () if watch is None else watch.outputs
        own = (*(after[name] for name in native.changed), *(extra[name] for name in native.outputs))
        return (*losses, *own, *hooked, *outputs)


class _FrozenMeanwhile(TorchFunctionMode):
    """Stops the gradients of parameters where code reads them while it has frozen them, as a GAN does with one network.

    Where the step takes derivatives itself, `inner_derivatives` does so.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        super().__init__()
        self._parameters = parameters
        self._frozen: set[int] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _FREEZES:
            result = func(*args, **kwargs)
            self._frozen = {id(one) for one in self._parameters if not one.requires_grad}
            return result
        if self._frozen and not getattr(func, "__name__", "").startswith("__get__"):
            args, kwargs = private.map_tensors(self._stopped, (args, kwargs))
        return func(*args, **kwargs)

    def _stopped(self, tensor: Tensor) -> Tensor:
        if id(tensor) not in self._frozen:
            return tensor
        stopped: Tensor = standins.STOP_GRADIENT(tensor)
        return stopped


_FREEZES = (Tensor.requires_grad_, Tensor.requires_grad.__set__)  # type: ignore[attr-defined]


def _refuse_random_operators(step: TorchStep, program: ExportedProgram) -> None:
    for node in program.graph.nodes:
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            raise refusal(
                f"the step draws random numbers by {node.target}{explaining.called(step, str(node.target))} which no "
                "seed determines; expected dropout, torch.rand, torch.randn and the like alone"
            )
