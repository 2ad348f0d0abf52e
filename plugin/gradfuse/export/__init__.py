"""A PyTorch training step as one ONNX model: parameters and a batch in, the loss and every gradient or update out.

The way of a step: trace module and loss with `torch.export`, derive the joint forward and backward program, decompose
what has no ONNX translation, translate with `torch.onnx.export`, make parameters inputs, fuse, and compare loss and
gradients with PyTorch's own on the batch. Then the optimizer's update is put in, and compared with PyTorch's as well.
torch is imported only when a step is exported.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import logging
import re
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir

from gradfuse import fusion
from gradfuse.checking.reference import ReferenceSession
from gradfuse.custom_ops import functions
from gradfuse.errors import ExportError, GradfuseError, ModelError, one_line
from gradfuse.export.translation import onnx_translation_table, traceable_ctc
from gradfuse.models.arrays import Arrays, to_numpy
from gradfuse.models.scatters import reduces_by_scatter_nd, replace_scatter_nd
from gradfuse.training import optimizers
from gradfuse.training.step import DROPOUT_SEED, GRADIENT_SUFFIX, LOSS, UPDATED_SUFFIX, TrainingStep

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    TensorOrTensors = Tensor | Sequence[Tensor]

OPSET = 20
"""Default-domain opset of exported steps: the newest that onnxruntime 1.18 runs whole."""

_WHO = "export_training_step"

_MOVED_RUNS = 16
"""So many runs at most are made with moved results, to see what rounding may do to a step."""
_MOVED_SHARE = 4
"""An error may be so many times the largest change in such a run."""
# Kernels that add up in another order come this far apart, which also decides what is near a kink; in 16 bits, sums are
# made in float32.
_ROUNDINGS_OF_KERNELS, _ROUNDINGS_OF_NARROW_KERNELS = 64, 4
# In float64 nothing rounds but the constants of the model. They are judged by a change so small that it decides nothing
# near a kink, as many times larger.
_ROUNDINGS_OF_CONSTANTS, _SMALL_ROUNDING, _SMALL_RUNS = 64, 2.0**-10, 3
# Where a constant's rounding does decide, it does not on numbers of another size.
_OTHER_NUMBERS, _OTHER_SIZE = 2, 1e-3

_TRIED_SEED = 1_234_567_891


def export_training_step(
    module: nn.Module,
    loss: Callable[..., Tensor],
    batch: tuple[TensorOrTensors, TensorOrTensors],
    optimizer: torch.optim.Optimizer | None = None,
    *,
    dynamic_shapes: Any = None,
    fuse: bool = True,
    max_grad_norm: float | None = None,
    accumulate: int = 1,
    autocast: torch.dtype | None = None,
    grad_scaler: torch.amp.GradScaler | None = None,
    evaluation: bool | None = None,
) -> TrainingStep:
    """Export a training step of a module on a batch as one ONNX model, checked against PyTorch.

    The module is traced in the mode it is in, train or eval, and is left as it was: parameters, buffers, `.grad`, mode
    and random state; so is the optimizer. If onnxruntime is installed, the model (and the fused one) runs on the batch;
    loss, gradients, updated buffers and the optimizer's update must then be as near to a float64 run as PyTorch's own,
    but for what rounding does to this step; the model also runs in float64, where it must be as good as equal. Dropout
    in training mode drops what a hash of the buffer `dropout_seed` says, which a step adds 1 to; PyTorch is compared
    with on the same masks.

    Args:
        module: the module; its parameters that require gradients are the trainable ones. Tied parameters are one input
            under the first of their names, with the summed gradient.
        loss: a module or function; `loss(output, *targets)` is a scalar (shape ()).
        batch: `(inputs, targets)`, each a tensor or a tuple of tensors; `inputs` are the positional arguments of the
            module. Values matter only for the comparison, shapes are fixed unless `dynamic_shapes` says otherwise.
        optimizer: `torch.optim.SGD`, `Adam` or `AdamW` over trainable parameters of the module or the loss. Its update
            becomes part of the model, beginning at the state that it has. As in PyTorch, parameters that it does not
            have, or that the loss does not depend on, stay as they are. None: the model ends at the gradients.
        dynamic_shapes: which axes may vary, as for `torch.export.export`: `(inputs, targets)` like the batch, for each
            tensor `{axis: torch.export.Dim or its name as a string}`, a sequence with one entry an axis, or None; or a
            dictionary from the names of `input_names` and `target_names` to the same. None: all fixed.
        fuse: whether `TrainingStep.model` is fused. If not, it is made of standard operators alone.
        max_grad_norm: gradients are clipped as by `torch.nn.utils.clip_grad_norm_(parameters, max_grad_norm)` over the
            optimizer's parameters. None: they are not.
        accumulate: of how many calls the gradients are averaged for one update; other calls change buffers only.
        autocast: module and loss run under `torch.autocast` with this type, float16 or bfloat16; parameters and update
            stay as they are. None: in their own types.
        grad_scaler: the loss is scaled as with this `torch.amp.GradScaler`, beginning at the state that it has, and an
            update whose gradients are not finite is left out. None, or one that is not enabled: it is not scaled.
        evaluation: whether to export `TrainingStep.evaluation_model`, without autocast; None: if there is an
            optimizer.

    Raises:
        ExportError: torch is not installed, an argument is not as above, the step draws random numbers other than for
            dropout, PyTorch cannot trace it, an operator has no ONNX translation (it is named), or an output differs
            from PyTorch's (it is named, with the largest difference). The text is one line.
    """
    try:
        import onnxscript  # noqa: F401
        import torch
    except ImportError as error:
        raise ExportError(f"{_WHO}: {error.name} is not installed; expected what gradfuse[torch] installs") from error
    if optimizer is None and (max_grad_norm is not None or accumulate != 1 or grad_scaler is not None):
        raise ExportError(f"{_WHO}: optimizer is None; expected one with max_grad_norm, accumulate or grad_scaler")
    if autocast not in (None, torch.float16, torch.bfloat16):
        raise ExportError(f"{_WHO}: autocast is {autocast}; expected torch.float16, torch.bfloat16 or None")

    def describe(names: Mapping[int, str]) -> optimizers.Optimizer | None:
        if optimizer is None:
            return None
        return optimizers.from_torch(
            optimizer,
            names,
            _WHO,
            max_grad_norm=max_grad_norm,
            accumulate=accumulate,
            grad_scaler=grad_scaler,
        )

    step = _Step.of(module, loss, batch, describe, autocast)
    dims = _dynamic_shapes(dynamic_shapes, step)
    evaluation_model = None
    with _undisturbed(step):
        native = step.run()
        if native.dropouts:
            step = step.with_dropout_seed()
            native = step.run()
        described = None if step.optimizer is None else step.optimizer.restricted(native.gradients, _WHO)
        program = _joint_program(step, native, dims)
        order = (*native.gradients, *(name for name in step.state if name not in native.gradients))
        free = {*step.trainable, *native.changed}
        model = _to_onnx(program, step, order, free)
        _name_interface(model, step, native, dims)
        truth = _truth(step, native)
        if evaluation or (evaluation is None and optimizer is not None):
            evaluation_model = _evaluation_model(step, dims, native.changed)
    exported = ir.to_proto(model) if fuse else fusion.expand(ir.to_proto(model))
    plain = _in_order(exported)
    truth.compare(plain, "exported")
    report = None
    if fuse:
        unfused = plain
        result = fusion.fuse(exported)
        plain, report = _in_order(result.model), result.report
        if not reduces_by_scatter_nd(ir.from_proto(plain)):
            report.warnings = [warning for warning in report.warnings if warning.bug != "lost-updates"]
        truth.compare(plain, "fused")
        try:
            truth.compare_in_float64(plain, "fused")
        except ExportError:
            truth.compare_in_float64(unfused, "exported")
            raise
    else:
        truth.compare_in_float64(plain, "exported")
    parameters = {name: to_numpy(step.state[name]) for name in step.trainable}
    state: Arrays = {}
    hyperparameters: Arrays = {}
    if described is not None and optimizer is not None:
        state, hyperparameters = described.initial_state(parameters), described.hyperparameters()
        model = ir.from_proto(plain)
        optimizers.append(model, described, step.batch)
        _remove_unused_nodes(model)
        plain = ir.to_proto(model)
        _compare_update(plain, truth.step, described, optimizer, state | hyperparameters)
    changed = native.changed
    return TrainingStep(
        plain,
        parameters,
        {name: to_numpy(step.state[name]) for name in changed},
        step.input_names,
        step.target_names,
        report,
        state,
        hyperparameters,
        {name: to_numpy(step.state[name]) for name in step.state if name not in (*step.trainable, *changed)},
        step.state_dict_names,
        evaluation_model,
    )


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where a parameter or buffer lives: one entry of `_parameters` or `_buffers` of a submodule."""

    entries: dict[str, Any]
    key: str


@dataclasses.dataclass(frozen=True)
class _Outcome:
    """What one run of a step gives."""

    loss: Tensor
    gradients: dict[str, Tensor]
    """Of the trainable parameters that the loss depends on."""
    buffers: dict[str, Tensor]
    """All buffers as the run left them."""
    changed: tuple[str, ...]
    """The buffers that the run changed."""
    dropouts: int
    """How many dropouts there were."""


@dataclasses.dataclass(frozen=True)
class _Step:
    """A module and a loss as a function of all their tensors and a batch."""

    module: nn.Module
    loss: Callable[..., Tensor]
    inputs: tuple[Tensor, ...]
    targets: tuple[Tensor, ...]
    state: dict[str, Tensor]
    """Parameters, then buffers, each once, by the first of its names."""
    places: dict[str, list[_Place]]
    trainable: tuple[str, ...]
    buffers: tuple[str, ...]
    input_names: tuple[str, ...]
    target_names: tuple[str, ...]
    state_dict_names: dict[str, str]
    """Each name of the `state_dict()` of module and loss -> the name in `state`."""
    optimizer: optimizers.Optimizer | None
    autocast: torch.dtype | None

    @classmethod
    def of(
        cls,
        module: Any,
        loss: Any,
        batch: Any,
        describe: Callable[[Mapping[int, str]], optimizers.Optimizer | None],
        autocast: torch.dtype | None,
    ) -> _Step:
        """Check the arguments of `export_training_step` and collect what the step consists of."""
        from torch import nn

        if not isinstance(module, nn.Module):
            raise ExportError(f"{_WHO}: module is {type(module).__name__}; expected torch.nn.Module")
        if not callable(loss):
            raise ExportError(f"{_WHO}: loss is {type(loss).__name__}; expected a module or function")
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            raise ExportError(f"{_WHO}: batch is {_kind(batch)}; expected (inputs, targets)")
        inputs, targets = (_tensors(part, which) for part, which in zip(batch, ("inputs", "targets"), strict=True))

        state: dict[str, Tensor] = {}
        names: dict[int, str] = {}
        places: dict[str, list[_Place]] = {}
        buffers: list[str] = []
        # A loss module's tensors come under a prefix; those it shares with the module keep the module's names.
        owners = [("", module), *([("loss.", loss)] if isinstance(loss, nn.Module) else [])]
        for kind in ("_parameters", "_buffers"):
            for prefix, owner in owners:
                for path, submodule in owner.named_modules():
                    entries = getattr(submodule, kind)
                    for key, tensor in entries.items():
                        if tensor is None:
                            continue
                        if id(tensor) not in names:
                            name = prefix + (f"{path}.{key}" if path else key)
                            if name in state:
                                raise ExportError(f"{_WHO}: module and loss both have a tensor {name!r}; rename one")
                            names[id(tensor)] = name
                            state[name] = tensor
                            buffers.extend([name] if kind == "_buffers" else [])
                        places.setdefault(names[id(tensor)], []).append(_Place(entries, key))
        trainable = tuple(name for name, tensor in state.items() if tensor.requires_grad and name not in buffers)
        if not trainable:
            raise ExportError(f"{_WHO}: module has no parameter that requires a gradient; expected at least one")
        for name in trainable:
            # The step runs on copies, which have none of them.
            if state[name]._backward_hooks or state[name]._post_accumulate_grad_hooks:
                raise ExportError(f"{_WHO}: parameter {name!r} has a hook on its gradient; expected none")

        optimizer = describe({key: name for key, name in names.items() if name in trainable})
        added = [] if optimizer is None else optimizer.input_names()
        reserved = [LOSS, *(name + GRADIENT_SUFFIX for name in trainable)]
        reserved += [name + UPDATED_SUFFIX for name in (*(trainable if optimizer else ()), *buffers)]
        reserved += [*added, *(name + UPDATED_SUFFIX for name in added)]
        clash = next((name for name in state if name in reserved), None)
        if clash is not None:
            raise ExportError(f"{_WHO}: the parameter or buffer {clash!r} has the name of an output; rename it")
        taken = {*state, *reserved}
        input_names = _argument_names(module.forward, 0, len(inputs), "input", taken)
        called = loss.forward if isinstance(loss, nn.Module) else loss
        target_names = _argument_names(called, 1, len(targets), "target", taken)
        state_dict_names = {
            prefix + name: names[id(tensor)]
            for prefix, owner in owners
            for name, tensor in owner.state_dict(keep_vars=True).items()
            if id(tensor) in names
        }
        return cls(
            module,
            loss,
            inputs,
            targets,
            state,
            places,
            trainable,
            tuple(buffers),
            input_names,
            target_names,
            state_dict_names,
            optimizer,
            autocast,
        )

    def with_dropout_seed(self) -> _Step:
        """Return the step with the seed of its dropouts as one more buffer."""
        import torch

        if DROPOUT_SEED in {*self.state, *self.batch}:
            raise ExportError(f"{_WHO}: a tensor has the name {DROPOUT_SEED!r}, which dropout needs; rename it")
        seed = torch.zeros((), dtype=torch.int64)
        places = self.places | {DROPOUT_SEED: [_Place({DROPOUT_SEED: seed}, DROPOUT_SEED)]}
        return dataclasses.replace(
            self, state=self.state | {DROPOUT_SEED: seed}, places=places, buffers=(*self.buffers, DROPOUT_SEED)
        )

    def tried(self, native: _Outcome) -> _Step:
        """Return the step with a seed and counters that differ from each other, as fresh ones, all 0, do not."""
        counters = [
            name
            for name in native.changed
            if not native.buffers[name].is_floating_point()
            and native.buffers[name].dim() == 0
            and bool(native.buffers[name] == self.state[name] + 1)
        ]
        state = {
            name: self.state[name] + (_TRIED_SEED if name == DROPOUT_SEED else number)
            for number, name in enumerate(counters, 2)
        }
        return dataclasses.replace(self, state=self.state | state)

    @property
    def batch(self) -> dict[str, Tensor]:
        """The tensors of the batch by their names."""
        return dict(zip(self.input_names + self.target_names, self.inputs + self.targets, strict=True))

    def apply(
        self, state: Mapping[str, Tensor], inputs: Sequence[Tensor], targets: Sequence[Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss with `state` in place of the module's tensors, and the buffers as the run left them."""
        import torch

        self.place(state)
        device = next(iter(state.values())).device.type
        with torch.autocast(device, self.autocast) if self.autocast is not None else contextlib.nullcontext():
            output = self.module(*inputs)
            value = self.loss(output, *targets)
        after = {name: self.places[name][0].entries[self.places[name][0].key] for name in self.buffers}
        if DROPOUT_SEED in after:
            after[DROPOUT_SEED] = after[DROPOUT_SEED] + 1
        return value, after

    @property
    def eps(self) -> float:
        """The spacing at 1 of the widest-spaced type among the trainable parameters."""
        import torch

        return max(torch.finfo(self.state[name].dtype).eps for name in self.trainable)

    @property
    def eps_of_activations(self) -> float:
        """The same, or that of autocast where it is more."""
        import torch

        return max(self.eps, 0.0 if self.autocast is None else torch.finfo(self.autocast).eps)

    @property
    def scales_loss(self) -> bool:
        return self.optimizer is not None and self.optimizer.loss_scaling is not None

    def place(self, state: Mapping[str, Tensor]) -> None:
        """Put `state` in the place of the tensors of module and loss."""
        for name, tensor in state.items():
            for place in self.places[name]:
                place.entries[place.key] = tensor

    def run(self, cast: Callable[[Tensor], Tensor] | None = None) -> _Outcome:
        """Run forward and backward eagerly on copies of all tensors, changed by `cast` first."""
        import torch

        from gradfuse.export.dropout import SeededDropout

        def copy(tensor: Tensor) -> Tensor:
            copied = tensor.detach().clone()
            return cast(copied) if cast is not None else copied

        state = {name: copy(tensor) for name, tensor in self.state.items()}
        leaves = {name: state[name].requires_grad_() for name in self.trainable}
        inputs, targets = tuple(map(copy, self.inputs)), tuple(map(copy, self.targets))
        versions = {name: tensor._version for name, tensor in state.items()}
        before = {name: state[name].clone() for name in self.buffers}
        try:
            with SeededDropout(state.get(DROPOUT_SEED)) as drawn:
                value, after = self.apply(state, inputs, targets)
        except Exception as error:
            # A user's module may raise anything.
            raise ExportError(f"{_WHO}: the module or the loss fails on the batch: {one_line(error)}") from error
        if not isinstance(value, torch.Tensor) or value.dim() != 0:
            raise ExportError(f"{_WHO}: loss returns {_kind(value)}; expected a scalar tensor, of shape ()")
        if not value.requires_grad:
            raise ExportError(f"{_WHO}: loss depends on no trainable parameter; expected a differentiable loss")
        _refuse_foreign_leaves(value, leaves)
        for name, tensor in state.items():
            if name not in self.buffers and tensor._version != versions[name]:
                raise ExportError(
                    f"{_WHO}: the step changes parameter {name!r} in place; expected changes of buffers only"
                )
        try:
            gradients = torch.autograd.grad(value, tuple(leaves.values()), allow_unused=True)
        except RuntimeError as error:
            raise ExportError(f"{_WHO}: PyTorch's own backward pass fails: {one_line(error)}") from error
        for name, gradient in zip(leaves, gradients, strict=True):
            if gradient is not None and gradient.layout != torch.strided:
                raise ExportError(f"{_WHO}: the gradient of {name!r} is {gradient.layout}; expected torch.strided")
        return _Outcome(
            value.detach(),
            {name: gradient for name, gradient in zip(leaves, gradients, strict=True) if gradient is not None},
            {name: tensor.detach() for name, tensor in after.items()},
            # Kernels that write running statistics do not count versions.
            tuple(
                name
                for name, tensor in after.items()
                if (tensor is not state[name] or tensor._version != versions[name])
                or not torch.equal(tensor, before[name])
            ),
            drawn.count,
        )


def _kind(value: object) -> str:
    shape = getattr(value, "shape", None)
    return type(value).__name__ + (f" of shape {tuple(shape)}" if shape is not None else "")


def _tensors(part: Any, which: str) -> tuple[Tensor, ...]:
    import torch

    tensors = tuple(part) if isinstance(part, (tuple, list)) else (part,)
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            raise ExportError(f"{_WHO}: {which} of the batch hold {_kind(tensor)}; expected tensors")
    return tensors


def _argument_names(
    function: Callable[..., Any], skip: int, count: int, default: str, taken: set[str]
) -> tuple[str, ...]:
    """Name `count` positional arguments of a function after the first `skip`, unlike any in `taken`, which grows."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    known = [parameter.name for parameter in parameters if parameter.kind in positional][skip:]
    names = []
    for index in range(count):
        name = known[index] if index < len(known) else f"{default}_{index}" if count > 1 else default
        while name in taken:
            name = f"{default}_{name}"
        taken.add(name)
        names.append(name)
    return tuple(names)


def _refuse_foreign_leaves(value: Tensor, leaves: Mapping[str, Tensor]) -> None:
    """Refuse a loss that depends on trainable tensors registered nowhere: their gradients would be missing."""
    known = {id(leaf) for leaf in leaves.values()}
    pending, seen = [value.grad_fn], set()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) not in known:
            raise ExportError(
                f"{_WHO}: loss depends on a trainable tensor of shape {tuple(leaf.shape)} that is no parameter of the "
                "module or the loss; expected a loss that is a module with this parameter"
            )
        pending.extend(function for function, _ in node.next_functions)


@contextlib.contextmanager
def _undisturbed(step: _Step) -> Iterator[None]:
    """Let a step be run and traced, and leave module, loss and PyTorch's random state as they were."""
    import torch

    owners = _restored(step.module), _restored(step.loss)
    with torch.random.fork_rng(), owners[0], owners[1], torch.enable_grad(), traceable_ctc():
        yield


@contextlib.contextmanager
def _restored(owner: object) -> Iterator[None]:
    """Put back every attribute, parameter and buffer entry of a module and its submodules at the end."""
    import torch

    modules = list(owner.modules()) if isinstance(owner, torch.nn.Module) else []
    kept = [(vars(module), dict(vars(module))) for module in modules]
    kept += [
        (entries, dict(entries))
        for module in modules
        for entries in (module._parameters, module._buffers, module._modules)
    ]
    try:
        yield
    finally:
        for entries, before in kept:
            entries.clear()
            entries.update(before)


_AxisNames = dict[str, dict[int, str]]


@dataclasses.dataclass(frozen=True)
class _Dims:
    """Dynamic axes: as torch.export takes them, and the names that the ONNX model gets for them."""

    inputs: tuple[Any, ...]
    targets: tuple[Any, ...]
    names: _AxisNames


def _dynamic_shapes(given: Any, step: _Step) -> _Dims:
    """Bring the accepted forms of `dynamic_shapes` into one, with strings made dynamic dimensions."""
    from torch.export import Dim

    wanted = f"{_WHO}: dynamic_shapes is {{}}; expected (inputs, targets) like the batch, or a dictionary by name"
    inputs: Sequence[Any] = (None,) * len(step.inputs)
    targets: Sequence[Any] = (None,) * len(step.targets)
    if isinstance(given, Mapping):
        unknown = sorted(set(given) - set(step.batch))
        if unknown:
            raise ExportError(f"{_WHO}: dynamic_shapes names {unknown[0]!r}; expected names among {sorted(step.batch)}")
        inputs, targets = ([given.get(name) for name in names] for names in (step.input_names, step.target_names))
    elif isinstance(given, (tuple, list)) and len(given) == 2:
        parts = []
        for part, tensors in zip(given, (step.inputs, step.targets), strict=True):
            # With one tensor, its specification may stand by itself.
            listed = isinstance(part, (tuple, list)) and any(isinstance(one, (Mapping, tuple, list)) for one in part)
            single = len(tensors) == 1 and not listed
            parts.append((part,) if single else (None,) * len(tensors) if part is None else part)
        inputs, targets = parts
    elif given is not None:
        raise ExportError(wanted.format(_kind(given)))
    if len(inputs) != len(step.inputs) or len(targets) != len(step.targets):
        raise ExportError(wanted.format(f"for {len(inputs)} inputs and {len(targets)} targets"))

    names: _AxisNames = {}
    specifications: list[Any] = []
    for (name, tensor), given_axes in zip(step.batch.items(), (*inputs, *targets), strict=True):
        axes = dict(given_axes) if isinstance(given_axes, Mapping) else dict(enumerate(given_axes or ()))
        specification = {}
        for axis, dim in axes.items():
            if not isinstance(axis, int) or not 0 <= axis < tensor.dim():
                raise ExportError(
                    f"{_WHO}: dynamic_shapes of {name!r} has axis {axis!r}; expected 0 to {tensor.dim() - 1}"
                )
            if dim is None or isinstance(dim, int) or dim is Dim.STATIC:
                specification[axis] = dim
                continue
            specification[axis] = Dim.DYNAMIC if isinstance(dim, str) else dim
            label = dim if isinstance(dim, str) else getattr(dim, "__name__", None)
            names.setdefault(name, {})[axis] = label or ("batch" if axis == 0 else f"{name}_{axis}")
        specifications.append(specification or None)
    split = len(step.inputs)
    return _Dims(tuple(specifications[:split]), tuple(specifications[split:]), names)


def _joint_program(step: _Step, native: _Outcome, dims: _Dims) -> torch.export.ExportedProgram:
    """Return the program (used parameters, other tensors, inputs, targets) -> (loss, *updated buffers, *gradients).

    Where the loss is scaled, the scale is one more input, and the scaled loss, divided by how many gradients are added
    up, is an output ahead of the loss; the gradients are its.
    """
    import torch
    from torch.export.experimental import _export_forward_backward
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from gradfuse.export import dropout, recurrences

    used = tuple(native.gradients)
    others = tuple(name for name in step.state if name not in native.gradients)
    shared = _with_shared_gradients(native)
    accumulate = step.optimizer.accumulate if step.optimizer is not None else 1

    class Traced(torch.nn.Module):
        def forward(self, used_values: Any, other_values: Any, inputs: Any, targets: Any, *scale: Any) -> Any:
            state = dict(zip(others, other_values, strict=True)) | dict(zip(used, used_values, strict=True))
            # A graph must not write into its inputs: copies take the updates and are returned.
            state |= {name: state[name].clone() for name in step.buffers}
            state |= {name: state[name].unsqueeze(0).squeeze(0) for name in shared}
            value, after = step.apply(state, [one.clone() for one in inputs], [one.clone() for one in targets])
            losses = (value / accumulate * scale[0], value.detach()) if scale else (value,)
            return (*losses, *(after[name] for name in native.changed))

    def copies(names: Sequence[str]) -> tuple[Tensor, ...]:
        return tuple(step.state[name].detach().clone() for name in names)

    arguments: tuple[Any, ...] = (
        tuple(tensor.requires_grad_() for tensor in copies(used)),
        copies(others),
        tuple(tensor.detach() for tensor in step.inputs),
        tuple(tensor.detach() for tensor in step.targets),
    )
    shapes: tuple[Any, ...] = ((None,) * len(used), (None,) * len(others), dims.inputs, dims.targets)
    if step.scales_loss:
        arguments += (torch.ones((), device=step.inputs[0].device),)
        shapes += ((None,),)
    try:
        # The other attention kernels have backward operators that no exporter knows.
        with _quiet(), sdpa_kernel(SDPBackend.MATH), recurrences.scanned():
            exported = torch.export.export(Traced(), arguments, dynamic_shapes=shapes)
            joint = _export_forward_backward(exported)
    except Exception as error:
        # torch.export has no common base class for what it refuses.
        raise ExportError(f"{_WHO}: torch.export cannot trace the step: {one_line(error)}") from error
    _refuse_random_operators(joint)
    with _quiet():
        program = _decomposed(_with_user_outputs(joint))
    drawn = len(dropout.masks(program.graph))
    if drawn != native.dropouts:
        raise ExportError(
            f"{_WHO}: the step draws random numbers in {drawn} operators, of which {native.dropouts} are dropouts on "
            "the CPU; expected no others"
        )
    if DROPOUT_SEED in others:
        dropout.connect(program, len(used) + others.index(DROPOUT_SEED))
    return program


def _with_shared_gradients(native: _Outcome) -> list[str]:
    """Return the parameters whose gradient is the very tensor of an earlier one's, as those of a and b in a + b.

    torch.export loses count of gradients that are one node; a view of the parameter makes them two.
    """
    seen: set[int] = set()
    shared = []
    for name, gradient in native.gradients.items():
        if gradient.data_ptr() in seen:
            shared.append(name)
        seen.add(gradient.data_ptr())
    return shared


def _refuse_random_operators(program: torch.export.ExportedProgram) -> None:
    import torch

    from gradfuse.export.dropout import DROPOUTS

    for node in program.graph.nodes:
        if node.target in DROPOUTS:
            continue
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            raise ExportError(
                f"{_WHO}: the step draws random numbers ({node.target}), so that it cannot be compared with PyTorch; "
                "expected a step that draws none but for dropout"
            )


def _with_user_outputs(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """Mark loss and gradients as outputs for the user: torch.onnx.export drops outputs of any other kind silently."""
    from torch.export.graph_signature import ConstantArgument, OutputKind, OutputSpec
    from torch.utils import _pytree

    signature = program.graph_signature
    specs = [OutputSpec(OutputKind.USER_OUTPUT, spec.arg, None) for spec in signature.output_specs]
    signature = dataclasses.replace(signature, output_specs=specs)
    calls = list(program.module_call_graph)
    if calls[0].signature is None:
        raise ExportError(f"{_WHO}: torch.export gives a program without a signature")
    _, out_spec = _pytree.tree_flatten(tuple(range(len(specs))))
    # Nameless, as decompositions rename the nodes and do not follow the names of gradients.
    outputs = [ConstantArgument(name="", value=None) for _ in specs]
    calls[0] = dataclasses.replace(
        calls[0], signature=dataclasses.replace(calls[0].signature, outputs=outputs, out_spec=out_spec)
    )
    program._module_call_graph = calls
    return program._update(program.graph_module, signature)


def _decomposed(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """Decompose the operators that torch.onnx.export does not know."""
    from gradfuse.export import dropout
    from gradfuse.export.decompositions import backward

    table = {**backward.table(), **dropout.table()}
    if not any(node.target in table for node in program.graph.nodes):
        return program
    try:
        decomposed: torch.export.ExportedProgram = program.run_decompositions(table)
    except Exception as error:
        raise ExportError(f"{_WHO}: torch cannot decompose the step: {one_line(error)}") from error
    return decomposed


def _to_onnx(
    program: torch.export.ExportedProgram, step: _Step, order: Sequence[str], free: Collection[str]
) -> ir.Model:
    """Translate a program whose first inputs are the tensors `order` of a step, and optimize it.

    Those that are not among `free`, frozen parameters and unchanged buffers, become initializers.
    """
    import torch
    from onnxscript import optimizer

    from gradfuse.export import dropout, recurrences

    table = {**onnx_translation_table(), **recurrences.translations(), **dropout.translations()}
    try:
        with _quiet():
            exported = torch.onnx.export(
                program,
                (),
                dynamo=True,
                opset_version=OPSET,
                custom_translation_table=table,
                optimize=False,
                verbose=False,
                external_data=False,
            )
    except Exception as error:
        # The chain of causes ends at the operator, whose name is what helps.
        raise ExportError(f"{_WHO}: {_untranslated(error)}") from error
    if exported is None:
        raise ExportError(f"{_WHO}: torch.onnx.export gives no model")
    model = exported.model
    for name, value in zip(order, list(model.graph.inputs), strict=False):
        if name not in free:
            model.graph.inputs.remove(value)
            value.name = name
            value.const_value = ir.tensor(to_numpy(step.state[name]), name=name)
            model.graph.register_initializer(value)
    # Only now: before, the optimizer would have taken the parameters for constants.
    with _quiet():
        optimizer.optimize(model)
    functions.attach(model)
    return model


def _in_order(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Return a model that adds up what belongs to one index in a fixed order."""
    model = ir.from_proto(proto)
    replace_scatter_nd(model)
    return ir.to_proto(model)


def _remove_unused_nodes(model: ir.Model) -> None:
    from onnx_ir.passes.common import RemoveUnusedNodesPass

    RemoveUnusedNodesPass()(model)


def _evaluation_model(step: _Step, dims: _Dims, changed: Sequence[str]) -> onnx.ModelProto:
    """Return the module alone, as a model of the parameters and buffers that it uses, and leave it in eval mode."""
    import torch
    from torch.utils import _pytree

    from gradfuse.export import recurrences

    def outputs(state: Mapping[str, Tensor], inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        step.place(state)
        leaves = _pytree.tree_leaves(step.module(*(one.clone() for one in inputs)))
        for leaf in leaves:
            if not isinstance(leaf, torch.Tensor):
                raise TypeError(f"it returns {_kind(leaf)}; expected tensors")
        return tuple(leaves)

    class Traced(torch.nn.Module):
        def forward(self, values: Any, inputs: Any) -> Any:
            # A graph must not write into its inputs.
            copies = (
                value.clone() if name in step.buffers else value for name, value in zip(names, values, strict=True)
            )
            return outputs(dict(zip(names, copies, strict=True)), inputs)

    def run(step: _Step, cast: Callable[[Tensor], Tensor]) -> Arrays:
        with torch.no_grad():
            state = {name: cast(tensor.detach().clone()) for name, tensor in step.state.items()}
            leaves = outputs(state, [cast(tensor.detach()) for tensor in step.inputs])
        results = [f"output_{index}" for index in range(len(leaves))] if len(leaves) > 1 else ["output"]
        results = [f"{name}_" if name in {*step.state, *step.batch} else name for name in results]
        return {name: leaf.cpu().double().numpy() for name, leaf in zip(results, leaves, strict=True)}

    names = tuple(step.state)
    arguments = tuple(tensor.detach().clone() for tensor in step.state.values()), step.inputs
    step.module.eval()
    try:
        with _quiet(), torch.no_grad():
            native = run(step, lambda tensor: tensor)
            with recurrences.scanned():
                program = torch.export.export(Traced(), arguments, dynamic_shapes=((None,) * len(names), dims.inputs))
    except Exception as error:
        # A user's module may raise anything, and torch.export has no common base class for what it refuses.
        raise ExportError(f"{_WHO}: torch.export cannot trace the module in eval mode: {one_line(error)}") from error
    free = [name for name in names if name in step.trainable or name in changed]
    with _quiet():
        program = _decomposed(program)
    model = _to_onnx(program, step, names, free)
    graph = model.graph
    inputs = dict(zip((*free, *step.input_names), graph.inputs, strict=True))
    results = list(graph.outputs)
    graph.outputs.clear()
    interface = dict(inputs)
    for name, value in zip(native, results, strict=True):
        interface[name] = _add_output(graph, value)
    graph.inputs[:] = [value for name, value in inputs.items() if value.uses() or name in step.input_names]
    _rename(graph, interface)
    _name_dimensions(graph, inputs, dims.names)
    _drop_notes(model, type(step.module).__name__)
    proto = _in_order(ir.to_proto(model))
    truth = _Truth.of(dataclasses.replace(step, autocast=None), native, run, tuple(free))
    truth.compare(proto, "evaluation")
    truth.compare_in_float64(proto, "evaluation")
    return proto


def _untranslated(error: BaseException) -> str:
    """Return what stopped torch.onnx.export: the operator without a translation if it was one."""
    text, cause = one_line(error), error.__cause__ or error.__context__
    while cause is not None:
        found = re.search(r"No ONNX function found for <OpOverload\(op='([\w.]+)', overload='(\w+)'\)>", str(cause))
        if found is not None:
            return f"{found[1]}.{found[2]} has no ONNX translation"
        text, cause = one_line(cause), cause.__cause__ or cause.__context__
    return f"torch.onnx.export cannot translate the step: {text}"


def _name_interface(model: ir.Model, step: _Step, native: _Outcome, dims: _Dims) -> None:
    """Order and name inputs, outputs and symbolic dimensions, complete the gradients, drop the exporter's notes."""
    graph = model.graph
    changed, used = native.changed, tuple(native.gradients)
    others = [name for name in step.state if name not in used and (name in step.trainable or name in changed)]
    scale = (optimizers.LOSS_SCALE,) if step.scales_loss else ()
    inputs = dict(zip((*used, *others, *step.batch, *scale), graph.inputs, strict=True))
    results = (
        *(f"scaled_{LOSS}" for _ in scale),
        LOSS,
        *(name + UPDATED_SUFFIX for name in changed),
        *(name + GRADIENT_SUFFIX for name in used),
    )
    produced = dict(zip(results, graph.outputs, strict=True))
    for name in step.trainable:
        if name not in used:
            produced[name + GRADIENT_SUFFIX] = _zeros_like(graph, inputs[name])
    graph.inputs[:] = [inputs[name] for name in (*step.trainable, *changed, *scale, *step.batch)]
    wanted = (
        LOSS,
        *(name + GRADIENT_SUFFIX for name in step.trainable),
        *(name + UPDATED_SUFFIX for name in changed),
    )
    graph.outputs.clear()
    for name in wanted:
        produced[name] = _add_output(graph, produced[name])

    _rename(graph, inputs | {name: produced[name] for name in wanted})
    _name_dimensions(graph, inputs, dims.names)
    _drop_notes(model, type(step.module).__name__)


def _rename(graph: ir.Graph, names: Mapping[str, ir.Value]) -> None:
    """Give values the names of the interface; others that have one of them get another."""
    chosen = {id(value) for value in names.values()}
    for value in _values(graph):
        if id(value) not in chosen and value.name in names:
            value.name = f"{value.name}_inner"
    for name, value in names.items():
        value.name = name


def _drop_notes(model: ir.Model, name: str) -> None:
    """Name the graph, and drop what the exporter notes about its source."""
    graph = model.graph
    for value in _values(graph):
        value.metadata_props.clear()
    for node in graph.all_nodes():
        # Stack traces hold the paths of the exporting machine.
        node.metadata_props.clear()
        node.doc_string = None
    model.metadata_props.clear()
    graph.metadata_props.clear()
    graph.name = name
    graph.doc_string = None


def _add_output(graph: ir.Graph, value: ir.Value) -> ir.Value:
    """Make a value an output of the graph and return it, or a copy where it cannot be one under a name of its own."""
    if value.is_graph_input() or value.is_initializer() or value.is_graph_output():
        # A value can have one name only, and inputs, parameters and the outputs before this one keep theirs.
        copy = ir.node("Identity", [value])
        copy.outputs[0].type, copy.outputs[0].shape = value.type, value.shape
        graph.append(copy)
        value = copy.outputs[0]
    graph.outputs.append(value)
    return value


def _zeros_like(graph: ir.Graph, value: ir.Value) -> ir.Value:
    """Append nodes that make zeros in the static shape and the type of a value."""
    assert value.dtype is not None and value.shape is not None
    shape = ir.node("Constant", [], attributes={"value_ints": list(value.shape.numpy())})
    zero = ir.tensor(np.zeros(1, dtype=value.dtype.numpy()), dtype=value.dtype)
    zeros = ir.node("ConstantOfShape", [shape.outputs[0]], attributes={"value": zero})
    zeros.outputs[0].type, zeros.outputs[0].shape = ir.TensorType(value.dtype), value.shape
    graph.extend([shape, zeros])
    return zeros.outputs[0]


def _values(graph: ir.Graph) -> Iterator[ir.Value]:
    yield from graph.inputs
    yield from graph.initializers.values()
    for node in graph.all_nodes():
        yield from node.outputs


def _name_dimensions(graph: ir.Graph, inputs: Mapping[str, ir.Value], names: _AxisNames) -> None:
    """Replace the tracer's symbols in all shapes by the names that the user gave to the axes of the batch."""
    symbols: dict[str, str] = {}
    for name, axes in names.items():
        for axis, label in axes.items() if name in inputs else ():
            shape = inputs[name].shape
            dim = shape[axis] if shape is not None else None
            if isinstance(dim, ir.SymbolicDim) and dim.value is not None:
                symbols.setdefault(dim.value, label)
    if not symbols:
        return
    pattern = re.compile("|".join(rf"\b{re.escape(symbol)}\b" for symbol in symbols))
    for value in _values(graph):
        if value.shape is None or value.shape.is_static():
            continue
        value.shape = ir.Shape(
            pattern.sub(lambda found: symbols[found[0]], dim.value)
            if isinstance(dim, ir.SymbolicDim) and dim.value is not None
            else dim
            for dim in value.shape
        )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch's and onnxscript's warnings and log lines about their own insides off the user's terminal."""
    loggers = [logging.getLogger(name) for name in ("torch", "torch.onnx", "torch.export", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _widen(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def _named(outcome: _Outcome, changed: Sequence[str]) -> Arrays:
    """Return the outputs of a step by their names in the model, as float64."""
    tensors = {LOSS: outcome.loss}
    tensors |= {name + GRADIENT_SUFFIX: tensor for name, tensor in outcome.gradients.items()}
    tensors |= {name + UPDATED_SUFFIX: outcome.buffers[name] for name in changed}
    return {name: tensor.detach().cpu().double().numpy() for name, tensor in tensors.items()}


_Run = Callable[["_Step", "Callable[[Tensor], Tensor]"], Arrays]
"""The outputs of a step whose tensors a function changes first."""


def _truth(step: _Step, native: _Outcome) -> _Truth:
    """Return what PyTorch says of a step on its batch, with a seed and counters other than 0 where it runs on them."""

    def run(step: _Step, cast: Callable[[Tensor], Tensor]) -> Arrays:
        with _undisturbed(step):
            return _named(step.run(cast), native.changed)

    tried = step.tried(native)
    try:
        own = run(tried, lambda tensor: tensor)
    except ExportError:
        # A counter may be the index of something.
        tried, own = step, _named(native, native.changed)
    return _Truth.of(tried, own, run, (*step.trainable, *native.changed))


@dataclasses.dataclass(frozen=True)
class _Truth:
    """What PyTorch computes, and what rounding does to it: the measure of a model's outputs."""

    step: _Step
    own: Arrays
    """The outputs in the step's own types."""
    exact: Arrays | None
    """The outputs in float64; None where the module insists on another type."""
    kernels: _Spread
    """What the rounding of another runtime's kernels may do."""
    constants: _Spread
    """What the rounding of a model's constants may do."""
    run: _Run
    free: tuple[str, ...]
    """The tensors of the step that are inputs of the model."""

    @classmethod
    def of(cls, step: _Step, own: Arrays, run: _Run, free: tuple[str, ...]) -> _Truth:
        """Make it of the outputs in the step's own types, and of what runs the step."""
        exact: Arrays | None
        try:
            exact = run(step, _widen)
        except Exception:
            # A user's module may raise anything.
            exact = None
        reference = own if exact is None else exact

        def moved(roundings: float, seed: int) -> Arrays:
            from gradfuse.export.rounding import Rounding

            with Rounding(roundings * step.eps_of_activations, seed) as rounding:
                return run(step, lambda tensor: rounding.moved(tensor if exact is None else _widen(tensor)))

        narrow = step.eps_of_activations > np.finfo(np.float32).eps
        kernels = _ROUNDINGS_OF_NARROW_KERNELS if narrow else _ROUNDINGS_OF_KERNELS
        spreads = _Spread(moved, kernels, reference), _Spread(moved, _SMALL_ROUNDING, reference)
        return cls(step, own, exact, *spreads, run, free)

    def elsewhere(self, seed: int) -> _Truth:
        """Return the same for parameters, buffers and a batch that are a thousandth larger or smaller."""
        from gradfuse.export.rounding import Rounding

        rounding = Rounding(_OTHER_SIZE, seed)
        state = {name: rounding.moved(self.step.state[name].detach()) for name in self.free}
        inputs, targets = (
            tuple(rounding.moved(tensor.detach()) for tensor in part) for part in (self.step.inputs, self.step.targets)
        )
        step = dataclasses.replace(self.step, state=self.step.state | state, inputs=inputs, targets=targets)
        return _Truth.of(step, self.run(step, lambda tensor: tensor), self.run, self.free)

    def compare(self, model: onnx.ModelProto, which: str) -> None:
        """Run a model in stock onnxruntime and compare every output, by its name, with PyTorch.

        An output passes if max|actual - exact| <= 16 max|native - exact| + 64 eps max|exact| + 8 eps G, with eps the
        spacing of the parameters' type at 1 and G the largest output of the step: what should be 0 can be no better
        than the terms that cancel in it. If not, max|actual - exact| may be 4 max|moved - exact| more, with the largest
        of up to 16 runs in which every result of arithmetic is moved by up to 64 roundings: an activation that
        rounding may put on the other side of a kink lies there in half of them. Integers must be equal.
        """
        results = _run(model, self._feeds(model), which)
        if results is None:
            return
        reference = self.own if self.exact is None else self.exact
        eps = self.step.eps
        scale = max((_magnitude(array) for array in reference.values()), default=0.0)
        for name, array in results.items():
            wanted = self._wanted(reference, name, array, which)
            bound = 16 * _difference(self.own.get(name, wanted), wanted) + 64 * eps * _magnitude(wanted)
            bound = bound + 8 * eps * scale if array.dtype.kind not in "biu" else 0.0
            error = _difference(array.astype(np.float64), wanted)
            if error > bound:
                bound += _MOVED_SHARE * self.kernels.largest(name, (error - bound) / _MOVED_SHARE)
            _require(error <= bound, name, which, error, bound)

    def compare_in_float64(self, model: onnx.ModelProto, which: str) -> None:
        """Run a model in float64 and compare every output with PyTorch's float64: no rounding hides what it means.

        An output passes if max|actual - exact| <= 64 eps max|exact| + 64 max|moved - exact|, where results are moved by
        up to one rounding to the step's own types, in which the model's constants are. (They are moved by 2^-10 of
        that, which decides nothing near a kink, and the change is taken 2^10 times; it is the median of three runs.)
        What does not pass must pass at parameters and a batch that are a thousandth larger or smaller: a constant whose
        rounding moves an activation over a kink will not do so there. Without float64 kernels for the model, or a
        float64 run of the module, nothing is compared.
        """
        if self.exact is None or self.step.eps <= np.finfo(np.float64).eps:
            return
        try:
            session = ReferenceSession(ir.from_proto(model), f"{_WHO}: the {which} model")
            results = session.run(self._feeds(model))
        except GradfuseError:
            return
        try:
            self._judge_in_float64(results, which)
        except ExportError as error:
            for seed in range(_OTHER_NUMBERS):
                try:
                    other = self.elsewhere(seed)
                    other._judge_in_float64(session.run(other._feeds(model)), which)
                    return
                except Exception:
                    # Refused again, or numbers that the module does not take.
                    continue
            raise error

    def _judge_in_float64(self, results: Arrays, which: str) -> None:
        assert self.exact is not None
        eps = self.step.eps
        for name, array in results.items():
            wanted = self._wanted(self.exact, name, array, which)
            error = _difference(array.astype(np.float64), wanted)
            bound = 64 * eps * _magnitude(wanted) if array.dtype.kind == "f" else 0.0
            if error > bound:
                bound += _ROUNDINGS_OF_CONSTANTS / _SMALL_ROUNDING * self.constants.usual(name)
            _require(error <= bound, name, f"{which} (float64)", error, bound)

    def _feeds(self, model: onnx.ModelProto) -> Arrays:
        feeds = {name: to_numpy(tensor) for name, tensor in (self.step.state | self.step.batch).items()}
        if self.step.optimizer is not None:
            # At this scale the gradients are those of the loss itself.
            feeds[optimizers.LOSS_SCALE] = np.array(self.step.optimizer.accumulate, dtype=np.float32)
        return {value.name: feeds[value.name] for value in model.graph.input}

    def _wanted(self, reference: Arrays, name: str, array: npt.NDArray[Any], which: str) -> npt.NDArray[Any]:
        wanted = reference.get(name, np.zeros(array.shape))
        if array.shape != wanted.shape:
            raise ExportError(
                f"{_WHO}: output {name!r} of the {which} model has shape {array.shape}; expected {wanted.shape}"
            )
        return wanted


class _Spread:
    """How far each output goes from the exact one when results are moved by a number of roundings."""

    def __init__(self, moved: Callable[[float, int], Arrays], roundings: float, reference: Arrays) -> None:
        self._moved = moved
        self._roundings = roundings
        self._reference = reference
        self._changes: list[dict[str, float]] = []

    def largest(self, name: str, enough: float) -> float:
        """Return the largest change of an output; no more runs are made than it takes to see one that is enough."""
        largest = 0.0
        for run in range(_MOVED_RUNS):
            largest = max(largest, self._change(run, name))
            if largest >= enough:
                break
        return largest

    def usual(self, name: str) -> float:
        """Return the median change of an output."""
        return sorted(self._change(run, name) for run in range(_SMALL_RUNS))[_SMALL_RUNS // 2]

    def _change(self, run: int, name: str) -> float:
        while run >= len(self._changes):
            try:
                outputs = self._moved(self._roundings, len(self._changes))
            except Exception:
                # Values that a user's module refuses.
                outputs = self._reference
            with np.errstate(invalid="ignore"):
                changes = {key: _magnitude(outputs[key] - wanted) for key, wanted in self._reference.items()}
            self._changes.append(changes)
        return self._changes[run].get(name, 0.0)


def _require(within: bool, name: str, which: str, error: float, bound: float) -> None:
    if not within:
        raise ExportError(
            f"{_WHO}: output {name!r} of the {which} model differs from PyTorch by {error:.3g}; "
            f"expected at most {bound:.3g}"
        )


def _compare_update(
    model: onnx.ModelProto,
    step: _Step,
    described: optimizers.Optimizer,
    optimizer: torch.optim.Optimizer,
    state: Arrays,
) -> None:
    """Compare the update that a model makes of its gradients with the one that the optimizer itself makes of them.

    A parameter passes if max|actual - exact| <= 16 max|native - exact| + 16 eps (max|exact| + max|change|), where the
    exact one is a float64 run of the optimizer. The gradients are those of the model, as Adam makes a change of full
    size from a gradient that is nothing but rounding.
    """
    import torch

    # A copy of the model in which the gradients are outputs too.
    observed = ir.from_proto(model)
    values = {str(value.name): value for value in _values(observed.graph)}
    watched = {name: values[name + GRADIENT_SUFFIX] for name in described.parameters}
    for value in watched.values():
        _add_output(observed.graph, value)
    feeds = {name: to_numpy(tensor) for name, tensor in (step.state | step.batch).items()} | state
    if optimizers.MICRO_STEP in feeds:
        # The call that makes the update.
        feeds[optimizers.MICRO_STEP] = np.array(described.accumulate - 1, dtype=np.int64)
    results = _run(ir.to_proto(observed), feeds, "updating")
    if results is None:
        return
    # By which the model's gradients are larger than those that the optimizer gets in PyTorch.
    scale = float(state.get(optimizers.LOSS_SCALE, described.accumulate))
    gradients = {
        name: torch.tensor(results[name + GRADIENT_SUFFIX].astype(np.float64)) / scale for name in described.parameters
    }
    skipped = described.loss_scaling is not None and not all(one.isfinite().all() for one in gradients.values())
    names = {id(tensor): name for name, tensor in step.state.items()}

    def updated(dtype: torch.dtype | None) -> Arrays:
        groups = []
        copies = {}
        for group in optimizer.param_groups:
            members = []
            for parameter in group["params"]:
                name = names[id(parameter)]
                twin_parameter = parameter.detach().to(dtype or parameter.dtype, copy=True).cpu()
                if name in gradients:
                    twin_parameter.grad = gradients[name].to(twin_parameter.dtype)
                copies[name] = twin_parameter
                members.append(twin_parameter)
            # The rate as the model has it, and an implementation that runs anywhere.
            rate = float(np.float32(group["lr"]))
            chosen = {"lr": rate, "foreach": None, "fused": None, "capturable": False}
            groups.append({**group, **chosen, "params": members})
        create: Any = type(optimizer)
        twin = create(groups)
        state_dict = deepcopy(optimizer.state_dict())
        twin.load_state_dict({**state_dict, "param_groups": twin.state_dict()["param_groups"]})
        if described.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(list(copies.values()), described.max_grad_norm)
        if not skipped:
            twin.step()
        return {name: copies[name].double().numpy() for name in gradients}

    own, reference = updated(None), updated(torch.float64)
    for name, wanted in reference.items():
        before = to_numpy(step.state[name]).astype(np.float64)
        output = name + UPDATED_SUFFIX
        eps = torch.finfo(step.state[name].dtype).eps
        error = _difference(results[output].astype(np.float64), wanted)
        size = _magnitude(wanted) + _magnitude(wanted - before)
        bound = 16 * _difference(own[name], wanted) + 16 * eps * size
        _require(error <= bound, output, "updating", error, bound)


def _magnitude(array: npt.NDArray[Any]) -> float:
    finite = np.abs(array[np.isfinite(array)])
    return float(finite.max()) if finite.size else 0.0


def _difference(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> float:
    """Return the largest absolute difference; NaN beside NaN and an infinity beside itself are none."""
    if a.size == 0:
        return 0.0
    with np.errstate(invalid="ignore"):
        differences = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, np.abs(a - b))
    return float(np.where(np.isnan(differences), np.inf, differences).max())


def _run(model: onnx.ModelProto, feeds: Mapping[str, npt.NDArray[Any]], which: str) -> Arrays | None:
    """Run a model in onnxruntime, in float32 where that lacks its 16-bit kernels; None without onnxruntime."""
    try:
        import onnxruntime  # noqa: F401
    except ImportError:
        warnings.warn(f"{_WHO}: onnxruntime is not installed, so the model was not compared with PyTorch", stacklevel=4)
        return None
    from gradfuse.checking.execution import Session, float_types, widened

    loaded = ir.from_proto(model)
    source = f"{_WHO}: the {which} model"
    needed = {value.name: feeds[value.name] for value in model.graph.input}
    narrow = {ir.DataType.FLOAT16, ir.DataType.BFLOAT16}
    try:
        return Session(loaded, source).run(needed)
    except ModelError as error:
        if not float_types(loaded) & narrow:
            raise ExportError(str(error)) from error
    wide = {
        name: array.astype(np.float32) if ir.DataType.from_numpy(array.dtype) in narrow else array
        for name, array in needed.items()
    }
    try:
        return Session(widened(loaded, ir.DataType.FLOAT), source).run(wide)
    except ModelError as error:
        raise ExportError(str(error)) from error
