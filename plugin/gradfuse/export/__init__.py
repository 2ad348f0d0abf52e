"""`export_training_step`: a PyTorch training step as one ONNX model.

Importing this package is cheap: torch and the modules that do the work are imported when a step is exported.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from gradfuse.errors import ExportError, GradfuseError

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from gradfuse.export.dynamic_shapes import DynamicShapes
    from gradfuse.export.explaining import Sizes
    from gradfuse.export.reporting import Parts
    from gradfuse.export.torch_step import TorchStep
    from gradfuse.models.arrays import Arrays
    from gradfuse.models.spilling import Shelf
    from gradfuse.optimizers import Average, GradScaler
    from gradfuse.passes.progress import Progress
    from gradfuse.training.optimizers import Optimizer
    from gradfuse.training.step import TrainingStep

_ALONE = threading.RLock()
"""Held by an export: tracing changes functions and settings of the whole process."""


def export_training_step(
    module: nn.Module,
    loss: Callable[..., Any] | None,
    batch: Any,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    *,
    dynamic_shapes: Any = None,
    fuse: bool = True,
    max_grad_norm: float | None = None,
    accumulate: int = 1,
    autocast: torch.dtype | None = None,
    grad_scaler: torch.amp.GradScaler | GradScaler | None = None,
    average: Average | None = None,
    run_time: Iterable[str] = (),
    frozen_inputs: bool = False,
    evaluation: bool | None = None,
    float64: bool = True,
    verify: Literal["full", "quick"] = "full",
    input_gradients: Sequence[str] = (),
    progress: Progress | bool = False,
    memory_budget: int | float | str | None = None,
) -> TrainingStep:
    """Export a training step of a module on a batch as one ONNX model, verified against PyTorch.

    The steps of an export:

    1. Trace module and loss, and decompose the operators that have no ONNX translation, or a wrong one.
    2. Translate the program, with parameters and changed buffers as inputs.
    3. Append the gradients, by the rules of `gradfuse.differentiate`.
    4. Verify the model on the batch, fuse it, and verify it again.
    5. Add the optimizer's update, and verify that as well.

    To verify a model, onnxruntime runs it (if it is installed: otherwise a warning says that nothing was compared).
    Loss, gradients, updated buffers and parameters must be as close to a float64 run of PyTorch as PyTorch's own
    results are, except for rounding in this step. The model also runs in float64, where the results must be practically
    equal. With `dynamic_shapes`, it is compared at other sizes too.

    The module is traced in the mode it is in, train or eval. Module, loss and optimizer are left unchanged:
    parameters, buffers, `.grad`, mode, random state, and what their code keeps in Python. In training mode, a hash of
    the buffer `dropout_seed` decides what dropout drops and what `torch.rand` and similar functions draw. Each step
    adds 1 to it. The comparison with PyTorch uses the same numbers.

    Threads may export at the same time: one waits for the other. Sessions wait for no export.

    Args:
        module: the module; its parameters that require gradients are the trainable ones. Tied parameters are one input
            under the first of their names, with the summed gradient.
        loss: a module or function; `loss(output, *targets)` is a tensor of one element, or (such a tensor, {name:
            tensor}): the others are outputs of the step. None: the module computes the loss itself. It is what the
            module returns, or its entry or attribute `loss`, or the first element of its tuple.
        batch: `(inputs, targets)`: the arguments of the module, and those of the loss after its first. Each is a
            tensor, a tuple of arguments, or a dictionary of them by name; None: there are none. Arguments may be nested
            in tuples, lists, dictionaries and named tuples, and hold None, booleans and strings, which are constants of
            the step. Values of tensors matter only for the comparison. Shapes are fixed unless `dynamic_shapes` says
            otherwise. With `loss=None` there are no targets, and a dictionary is the inputs alone.
        optimizer: an optimizer over parameters of the module or the loss. Its update becomes part of the model, and
            starts from the optimizer's state. Subclasses, your own, and those of torch.optim that docs/training.md does
            not list otherwise are traced; their step must update each parameter on its own, by tensor arithmetic. As in
            PyTorch, parameters that it does not have, that require no gradient, or that the loss does not depend on,
            stay as they are. In a list of optimizers, each has parameters of its own; their parameter groups are those
            of the step, in order. None: the model ends at the gradients.
        dynamic_shapes: which axes may vary, as for `torch.export.export`: `(inputs, targets)` like the batch, for each
            tensor `{axis: torch.export.Dim or its name as a string}`, a sequence with one entry per axis, or None; or a
            dictionary from the names of `input_names` and `target_names` to the same. None: all fixed.
        fuse: whether to fuse `TrainingStep.model`, with the optimizer's update as operators. If not, it consists of
            standard operators only.
        max_grad_norm: gradients are clipped as by `torch.nn.utils.clip_grad_norm_(parameters, max_grad_norm)` over the
            optimizer's parameters. None: they are not.
        accumulate: over how many calls the gradients are averaged for one update; the other calls change only buffers.
        autocast: module and loss run under `torch.autocast` with this type, float16 or bfloat16; parameters and update
            keep their types. None: no autocast.
        grad_scaler: the loss is scaled as with this `torch.amp.GradScaler`, starting from its state, or this
            `gradfuse.optimizers.GradScaler`, and an update whose gradients are not finite is skipped. None, or one that
            is not enabled: the loss is not scaled.
        average: `gradfuse.optimizers.EMA` or `SWA`: the optimizer's parameters are averaged over its updates, for
            `TrainingSession.evaluate(averaged=True)` and the like. None: they are not.
        run_time: which hyperparameters are inputs beside the learning rate, so that sessions may change them between
            updates: "weight_decay", "betas", "eps", "momentum", "alpha" (of RMSprop), "rho" (of Adadelta), by
            parameter group; and "max_grad_norm". All but the last, and the weight decay of SGD, Adam and AdamW, replace
            the operators that update in one pass by plain nodes.
        frozen_inputs: whether frozen parameters, and the floating-point buffers of `state_dict()` that no step changes,
            are inputs too, so that `TrainingSession.load_state_dict` and `load` can replace them; otherwise they are
            constants.
        evaluation: whether to export `TrainingStep.evaluation_model`, without autocast. None: if there is an
            optimizer, and the module has one; else a warning says why it is left out.
        float64: whether the update computes its scalars, such as Adam's bias correction, in float64, as PyTorch does.
            False, with `fuse=False`: in float32, a few roundings apart, for runtimes without float64, such as WebGPU.
        verify: "quick" leaves out float64, which takes a third of an export's time and half of its memory: it misses
            errors within rounding. "full" raises an error if memory is too small for it.
        input_gradients: names of tensors of the batch, by `input_names` or `target_names`, whose gradients become
            outputs `<name>.grad` of the step, in their shapes and types.
        progress: called before each part of the export with the part's name, how many parts are done, and how many
            there are; during a long one, every second, with the fraction done. True: show a bar if standard error is a
            terminal.
        memory_budget: the most memory that a run on the batch may take beside parameters, state and batch: bytes, a
            text such as "512MiB", or a fraction, up to 1.0, of what it would take. The step recomputes activations, and
            must give the same bits as without. None: keep all activations.

    Raises:
        ExportError: torch is not installed; an argument is not as above; the step draws random numbers that no seed
            determines, or its results change from run to run; tensors that it changes share memory; PyTorch cannot
            trace it; an operator has no ONNX translation (it is named); or an output differs from PyTorch's (it is
            named, with the largest difference). The text is one line.
    """
    try:
        import onnxscript  # noqa: F401
        import torch
    except ImportError as error:
        raise ExportError(
            f"export_training_step: {error.name} is not installed; expected what gradfuse[torch] installs"
        ) from error
    from gradfuse import _torch_private as private
    from gradfuse.export import explaining, verifying
    from gradfuse.export import optimizer as optimizers
    from gradfuse.export.dynamic_shapes import DynamicShapes
    from gradfuse.export.reporting import WHO, Parts, mistakes_named, refusal
    from gradfuse.export.torch_step import TorchStep
    from gradfuse.models import spilling
    from gradfuse.models.memory import SMALL, sparing
    from gradfuse.passes.recompute import parse_budget
    from gradfuse.training import budget as budgets
    from gradfuse.training.optimizers import run_time_names

    updating, at_run_time = optimizers.every(optimizer), run_time_names(run_time, refusal)
    options = max_grad_norm, accumulate, grad_scaler, average, at_run_time
    if not updating and options != (None, 1, None, None, ()):
        raise refusal(
            "optimizer is None; expected one with max_grad_norm, accumulate, grad_scaler, average or run_time"
        )
    if not float64 and fuse:
        raise refusal("float64 is False; expected fuse=False with it, as bodies of fused operators are in float64")
    if memory_budget is not None:
        memory_budget = parse_budget(memory_budget, WHO)
    if autocast not in (None, torch.float16, torch.bfloat16):
        raise refusal(f"autocast is {autocast}; expected torch.float16, torch.bfloat16 or None")
    if verify not in ("full", "quick"):
        raise refusal(f"verify is {verify!r}; expected 'full' or 'quick'")
    if not verifying.has_onnxruntime():
        warnings.warn(f"{WHO}: onnxruntime is not installed, so the model was not compared with PyTorch", stacklevel=2)

    def describe(names: Mapping[int, str]) -> Optimizer | None:
        if not updating:
            return None
        return optimizers.described(
            updating,
            names,
            max_grad_norm=max_grad_norm,
            accumulate=accumulate,
            grad_scaler=grad_scaler,
            average=average,
            float64=float64,
            run_time=at_run_time,
        )

    once = private.operators_collected_once()
    large = _bytes(module) > SMALL
    spared, bar = sparing(large), Parts.shown(progress, large)
    # Tensors made in inference mode take no gradients.
    usual = torch.inference_mode(False) if torch.is_inference_mode_enabled() else contextlib.nullcontext()
    with _ALONE, mistakes_named(), bar as parts, spared as save_memory, once, usual, spilling.shelf() as shelf:
        if torch.compiler.is_exporting():
            raise refusal("a step is exported while another is traced; expected no export in its module or loss")
        step = TorchStep.of(module, loss, batch, describe, autocast, input_gradients, at_run_time)
        shapes = DynamicShapes.of(dynamic_shapes, step)
        # What is computed for multiples as well must be seen.
        sizes = explaining.Sizes(general=verifying.has_onnxruntime())
        make = functools.partial(
            _exported,
            step,
            shapes,
            updating,
            shelf,
            save_memory,
            frozen_inputs=frozen_inputs,
            fuse=fuse,
            evaluation=evaluation,
            verify=verify,
        )
        try:
            # What the module sets in variables of the context is gone at the end.
            exported, checkpointed = contextvars.copy_context().run(make, sizes, parts)
        except ExportError:
            if not sizes.made_general:
                raise
            # What other lengths than multiples of a number compute is not what those of the batch do.
            rerun = explaining.Sizes(general=False)
            exported, checkpointed = contextvars.copy_context().run(make, rerun, parts)
        if memory_budget is None and not (any(checkpointed.values()) and verifying.has_onnxruntime()):
            return exported
        parts.begin("choosing what to compute again")
        arrays = [tensor.detach().cpu() for tensor in (*step.inputs, *step.targets)]
        if memory_budget is not None:
            return budgets.recomputing(exported, memory_budget, arrays, WHO)
        try:
            return budgets.recomputing(exported, checkpointed, arrays, WHO)
        except GradfuseError as error:
            warnings.warn(f"what torch.utils.checkpoint wraps is not computed again: {error}", stacklevel=2)
            return exported


def _exported(
    step: TorchStep,
    shapes: DynamicShapes,
    updating: Sequence[torch.optim.Optimizer],
    shelf: Shelf,
    save_memory: Callable[[], None],
    sizes: Sizes,
    parts: Parts,
    *,
    frozen_inputs: bool,
    fuse: bool,
    evaluation: bool | None,
    verify: str,
) -> tuple[TrainingStep, Mapping[str, int]]:
    """Export a step whose arguments have been read; and return what is checkpointed, as `checkpoints.taken_out`."""
    import onnx_ir as ir

    from gradfuse.differentiation.differentiate import free_prefix
    from gradfuse.differentiation.fused_attention import LEFT
    from gradfuse.export import (
        branches,
        checkpoints,
        comparing_sizes,
        indices,
        onnx_model,
        steadiness,
        tracing,
        verifying,
        watching,
    )
    from gradfuse.export.evaluation import evaluation_model
    from gradfuse.export.optimizer import require_others_left_alone
    from gradfuse.export.python_state import PythonState
    from gradfuse.export.reporting import WHO
    from gradfuse.export.torch_step import TRIED_SEED, FrozenChangedError, undisturbed
    from gradfuse.models.scatters import replace_scatter_nd
    from gradfuse.models.tensors import copy_model
    from gradfuse.training import batch_checks, narrow_types
    from gradfuse.training.names import finished
    from gradfuse.training.optimizers import LOSS_SCALE
    from gradfuse.training.step import GRADIENT_SUFFIX, TrainingStep

    wants_evaluation = bool(updating) if evaluation is None else evaluation
    in_float64 = verify == "full"
    python = PythonState.of(step)
    with python.kept(), undisturbed(step):
        parts.begin("running the step in PyTorch")
        with verifying.memory_watched(step, shelf, save_memory) if in_float64 else contextlib.nullcontext():
            try:
                native = steadiness.first_run(step, python, frozen_inputs=frozen_inputs)
            except FrozenChangedError as error:
                step = step.with_changing(error.names)
                native = steadiness.first_run(step, python, frozen_inputs=frozen_inputs)
            settled = steadiness.settled(step, native, python)
            if settled is not step:
                step, native = settled, steadiness.first_run(settled, python, frozen_inputs=frozen_inputs)
        if frozen_inputs:
            step = step.with_frozen_inputs(native.changed)
        if native.dropouts:
            step, native = step.with_dropout_seed(), native.with_dropout_seed()
        own = verifying.own_outputs(native)
        native = native.without_values()
        parts.begin("tracing")
        taken = branches.branches_of(step)
        if taken.computes_more(step):
            if native.dropouts and taken.guarded and not taken.selections.codes:
                # What code leaves out draws no numbers, and those that follow would be others.
                step = dataclasses.replace(step, within=functools.partial(taken.told, step))
            try:
                more = branches.run_both_sides(step, taken)
            except FrozenChangedError as error:
                # Written into by a side that this batch does not take.
                step = step.with_changing(error.names)
                taken = branches.branches_of(step)
                more = branches.run_both_sides(step, taken)
            own = verifying.own_outputs(more) if step.within is not None else own
            native = more.without_values()
        # Of what only some batches have a gradient of too.
        described = None if step.optimizer is None else step.optimizer.restricted(native.gradients, WHO)
        require_others_left_alone(updating, {id(one): name for name, one in step.state.items()}, native.gradients)
        with verifying.traced_as_run(step):
            program, returned = tracing.forward_program(
                step, native, shapes, taken, sizes, python, fuse=fuse, evaluation=wants_evaluation
            )
        tracing.connect_dropout(program, step, native)
        if returned:
            watching.count_without_dropouts(program)
        checkpointed = checkpoints.taken_out(program)
        order = (*native.gradients, *tracing.unused(step, native))
        free = {*step.trainable, *native.changed, *step.frozen_inputs}
        parts.begin("translating")
        translated, shared = onnx_model.translate(program, step), None
        # It holds copies of all tensors.
        del program
        names = (*order, *step.batch, *((LOSS_SCALE,) if step.scales_loss else ()))
        batch = {value: name for value, name in zip(translated.graph.inputs, names, strict=True) if name in step.batch}
        checks = batch_checks.checks_of(indices.taken_out(translated), batch)
        if returned:
            translated, module = watching.divided(translated, returned)
            shared = module, names
        with_probes = copy_model(translated) if native.hooks else None
        translated = onnx_model.completed(translated, step, order, free, len(native.gradients), fuse=fuse)
        onnx_model.arrange_step(translated, step, native, shapes)
        parts.begin("running the step in float64")
        truths = [
            verifying.truth_of(step, native, seed, own if seed == TRIED_SEED else None, in_float64=in_float64)
            for seed in branches.seeds_of(step, taken)
        ]
        if with_probes is not None:
            verifying.compare_hooks(with_probes, step, native, order, free, shapes)
        parts.begin("exporting the evaluation model")
        evaluating = None
        if wants_evaluation:
            try:
                evaluating = evaluation_model(
                    step, shapes, native, sizes, shared, python, fuse=fuse, in_float64=in_float64
                )
            except ExportError as error:
                if evaluation or sizes.made_general:
                    raise
                text = str(error).removeprefix(f"{WHO}: ")
                warnings.warn(f"{WHO}: the evaluation model is left out: {text}", stacklevel=3)

    exported = ir.to_proto(translated)
    unfused, which = None, "exported"
    if fuse:
        parts.begin("comparing the exported model with PyTorch")
        unfused = translated
        # Added up in a fixed order, as in the step that is returned.
        replace_scatter_nd(unfused)
        with verifying.traced_as_run(step):
            for truth in truths:
                truth.compare(unfused, which)
        parts.begin("fusing")
        (model, report), which = onnx_model.fused(exported, step.batch), "fused"
        report.near_misses[:0] = translated.meta.get(LEFT, ())
    else:
        model, report = onnx_model.plain(exported), None
    if step.is_bfloat16_on_cpu:
        narrow_types.widen_bfloat16(model, fuse=fuse)

    parts.begin(f"comparing the {which} model with PyTorch")
    # Opened once for all comparisons.
    opened = verifying.Opened(model, which, as_it_is=step.is_bfloat16_on_cpu)
    gradients: Arrays | None = None if described is None else {}
    for index, truth in enumerate(truths):
        with contextlib.nullcontext() if fuse else verifying.traced_as_run(step):
            truth.compare(model, which, opened, gradients if index == 0 else None)
    complete = model
    moments: Arrays = {}
    hyperparameters: Arrays = {}
    if described is not None and gradients is not None:
        parts.begin("comparing the update with PyTorch")
        moments, hyperparameters = described.initial_state(truths[0].values()), described.hyperparameters()
        complete, update = onnx_model.with_optimizer(model, step, described, fuse=fuse)
        state = moments | hyperparameters
        verifying.compare_update(update, gradients, opened, truths[0], described, updating, state)
    parts.begin("running the model in float64")
    for truth in truths:
        with contextlib.nullcontext() if fuse else verifying.traced_as_run(step):
            truth.compare_in_float64(model, which, unfused)
    comparing_sizes.compare(truths[0], model, opened, sizes.others, shapes, which)
    size_checks = comparing_sizes.checks_of(truths[0], model, opened, sizes, sizes.assumed, shapes, which)

    if step.is_bfloat16_on_cpu:
        narrow_types.widen_bfloat16(complete, fuse=fuse)
        if fuse:
            narrow_types.cast_by_vectors(complete)
    prefix = free_prefix(complete.graph, "checks/")[:-1]
    batch_checks.append(complete, checks, prefix, size_checks)
    constants = [name for name in step.state if name not in free]
    exported_step = TrainingStep(
        model=ir.to_proto(complete),
        parameters=_arrays(step.state, step.trainable),
        buffers=_arrays(step.state, native.changed),
        input_names=step.input_names,
        target_names=step.target_names,
        report=report,
        optimizer_state=moments,
        hyperparameters=hyperparameters,
        constants=_arrays(step.state, constants),
        frozen=_arrays(step.state, step.frozen_inputs),
        state_dict_names=step.state_dict_names,
        evaluation_model=evaluating,
        nesting={"inputs": step.given_inputs.nesting, "targets": step.given_targets.nesting},
        index_ranges=batch_checks.ranges_of(checks),
        output_names=(*native.outputs, *(name + GRADIENT_SUFFIX for name in step.differentiated)),
    )
    return finished(exported_step, step.aside), checkpointed


def _bytes(module: Any) -> int:
    """Return how much parameters and buffers take."""
    import torch

    from gradfuse import _torch_private as private

    tensors = [*module.parameters(), *module.buffers()] if isinstance(module, torch.nn.Module) else []
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if not private.is_lazy(tensor))


def _arrays(tensors: Mapping[str, Tensor], names: Iterable[str]) -> Arrays:
    from gradfuse.models.arrays import to_numpy

    return {name: to_numpy(tensors[name]) for name in names}
