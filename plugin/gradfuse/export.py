"""A PyTorch training step as one ONNX model: parameters and a batch in, the loss and every gradient out.

The way of a step: trace module and loss with `torch.export`, derive the joint forward and backward program, decompose
what has no ONNX translation, translate with `torch.onnx.export`, make parameters inputs, fuse, and compare loss and
gradients with PyTorch's own on the batch. torch is imported only when a step is exported.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import json
import logging
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir

from gradfuse import model_io
from gradfuse.errors import ExportError, ModelError
from gradfuse.model_io import one_line

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from gradfuse.passes.report import Report

    TensorOrTensors = Tensor | Sequence[Tensor]

OPSET = 20
"""Default-domain opset of exported steps: the newest that onnxruntime 1.18 runs whole."""

LOSS = "loss"
GRADIENT_SUFFIX = ".grad"
UPDATED_SUFFIX = ".updated"
METADATA_KEY = "gradfuse.training_step"

_WHO = "export_training_step"
_Arrays = dict[str, npt.NDArray[Any]]


@dataclasses.dataclass(frozen=True, eq=False)
class TrainingStep:
    """One training step, without the optimizer, as an ONNX model.

    Inputs of the model, by name: every trainable parameter (as in `module.named_parameters()`; those of a loss module
    begin with `loss.`), every buffer that the step changes (as in `module.named_buffers()`), and the tensors of the
    batch. Outputs: `loss`, a scalar; `<parameter>.grad` for each trainable parameter, in its shape and type, zeros
    where the loss does not depend on it; `<buffer>.updated` for each buffer that the step changes. Frozen parameters
    and the other buffers are constants of the model.

    Attributes:
        model: the model; fused, if it was exported so.
        parameters: name -> value of the trainable parameters at export; what to feed in the first step.
        buffers: name -> value of the buffers that the step changes; empty in most models without batch normalisation.
        input_names: the names of the batch's inputs: those of the arguments of `module.forward`.
        target_names: the names of the batch's targets: those of the arguments of the loss after its first.
        report: the report of `gradfuse.fuse`; None for a step that was exported with `fuse=False` or loaded.
    """

    model: onnx.ModelProto
    parameters: _Arrays
    buffers: _Arrays
    input_names: tuple[str, ...]
    target_names: tuple[str, ...]
    report: Report | None = None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write model, parameters and buffers as one ONNX file, whole or not at all.

        Parameters and buffers are stored as default values of the inputs of their names: an onnxruntime session of the
        file uses them wherever they are not fed. Beyond 2 GB the tensors are in `<path>.data`.

        Raises:
            ModelError: the file cannot be written.
        """
        model = ir.from_proto(self.model)
        defaults = {**self.parameters, **self.buffers}
        for value in model.graph.inputs:
            if value.name in defaults:
                value.const_value = ir.tensor(defaults[value.name], name=value.name)
                model.graph.register_initializer(value)
        model_io.save(model, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> TrainingStep:
        """Read a step that `save` wrote.

        Raises:
            ModelError: the file cannot be read, or is an ONNX model but no saved training step.
        """
        model = model_io.with_tensors_in_memory(model_io.load(path).ir)
        try:
            stored = json.loads(model.metadata_props[METADATA_KEY])
            names = {key: tuple(stored[key]) for key in ("parameters", "buffers", "inputs", "targets")}
            values = {name: model.graph.initializers.pop(name) for name in names["parameters"] + names["buffers"]}
            arrays = {name: np.array(value.const_value) for name, value in values.items()}
        except (KeyError, ValueError, TypeError) as error:
            raise ModelError(f"{os.fspath(path)}: is not a training step saved by gradfuse: {error!r}") from error
        for value in values.values():
            value.const_value = None
        return cls(
            ir.to_proto(model),
            {name: arrays[name] for name in names["parameters"]},
            {name: arrays[name] for name in names["buffers"]},
            names["inputs"],
            names["targets"],
        )


def export_training_step(
    module: nn.Module,
    loss: Callable[..., Tensor],
    batch: tuple[TensorOrTensors, TensorOrTensors],
    *,
    dynamic_shapes: Any = None,
    fuse: bool = True,
) -> TrainingStep:
    """Export loss and gradients of a module on a batch as one ONNX model, checked against PyTorch.

    The module is traced in the mode it is in, train or eval, and is left as it was: parameters, buffers, `.grad`, mode
    and random state. If onnxruntime is installed, the model (and the fused one) runs on the batch; loss, gradients and
    updated buffers must then be as near to a float64 run of the module as PyTorch's own, but for a few roundings.

    Args:
        module: the module; its parameters that require gradients are the trainable ones. Tied parameters are one input
            under the first of their names, with the summed gradient.
        loss: a module or function; `loss(output, *targets)` is a scalar (shape ()).
        batch: `(inputs, targets)`, each a tensor or a tuple of tensors; `inputs` are the positional arguments of the
            module. Values matter only for the comparison, shapes are fixed unless `dynamic_shapes` says otherwise.
        dynamic_shapes: which axes may vary, as for `torch.export.export`: `(inputs, targets)` like the batch, for each
            tensor `{axis: torch.export.Dim or its name as a string}`, a sequence with one entry an axis, or None; or a
            dictionary from the names of `input_names` and `target_names` to the same. None: all fixed.
        fuse: whether `TrainingStep.model` is fused.

    Raises:
        ExportError: torch is not installed, an argument is not as above, the step draws random numbers (dropout in
            training mode), PyTorch cannot trace it, an operator has no ONNX translation (it is named), or an output
            differs from PyTorch's (it is named, with the largest difference). The text is one line.
    """
    try:
        import onnxscript  # noqa: F401
        import torch
    except ImportError as error:
        raise ExportError(f"{_WHO}: {error.name} is not installed; expected what gradfuse[torch] installs") from error
    step = _Step.of(module, loss, batch)
    dims = _dynamic_shapes(dynamic_shapes, step)
    with torch.random.fork_rng(), _restored(module), _restored(loss), torch.enable_grad():
        native = step.run()
        program = _joint_program(step, native, dims)
        model = _to_onnx(program, step, native)
        _name_interface(model, step, native, dims)
        reference = _float64_run(step)
    plain = ir.to_proto(model)
    _compare(plain, step, native, reference, "exported")
    report = None
    if fuse:
        from gradfuse.fusion import fuse as fuse_model

        result = fuse_model(plain)
        plain, report = result.model, result.report
        _compare(plain, step, native, reference, "fused")
    changed = native.changed
    return TrainingStep(
        plain,
        {name: to_numpy(step.state[name]) for name in step.trainable},
        {name: to_numpy(step.state[name]) for name in changed},
        step.input_names,
        step.target_names,
        report,
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

    @classmethod
    def of(cls, module: Any, loss: Any, batch: Any) -> _Step:
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

        taken = {LOSS, *state, *(name + GRADIENT_SUFFIX for name in trainable), *(b + UPDATED_SUFFIX for b in buffers)}
        expected = len(state) + len(trainable) + len(buffers) + 1
        if len(taken) != expected:
            raise ExportError(f"{_WHO}: a parameter or buffer has the name of an output, such as {LOSS!r}; rename it")
        input_names = _argument_names(module.forward, 0, len(inputs), "input", taken)
        called = loss.forward if isinstance(loss, nn.Module) else loss
        target_names = _argument_names(called, 1, len(targets), "target", taken)
        return cls(module, loss, inputs, targets, state, places, trainable, tuple(buffers), input_names, target_names)

    @property
    def batch(self) -> dict[str, Tensor]:
        """The tensors of the batch by their names."""
        return dict(zip(self.input_names + self.target_names, self.inputs + self.targets, strict=True))

    def apply(
        self, state: Mapping[str, Tensor], inputs: Sequence[Tensor], targets: Sequence[Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss with `state` in place of the module's tensors, and the buffers as the run left them."""
        for name, tensor in state.items():
            for place in self.places[name]:
                place.entries[place.key] = tensor
        output = self.module(*inputs)
        value = self.loss(output, *targets)
        return value, {name: self.places[name][0].entries[self.places[name][0].key] for name in self.buffers}

    def run(self, cast: Callable[[Tensor], Tensor] | None = None) -> _Outcome:
        """Run forward and backward eagerly on copies of all tensors, changed by `cast` first."""
        import torch

        def copy(tensor: Tensor) -> Tensor:
            copied = tensor.detach().clone()
            return cast(copied) if cast is not None else copied

        state = {name: copy(tensor) for name, tensor in self.state.items()}
        leaves = {name: state[name].requires_grad_() for name in self.trainable}
        inputs, targets = tuple(map(copy, self.inputs)), tuple(map(copy, self.targets))
        versions = {name: tensor._version for name, tensor in state.items()}
        before = {name: state[name].clone() for name in self.buffers}
        try:
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
    """Return the program (used parameters, other tensors, inputs, targets) -> (loss, *updated buffers, *gradients)."""
    import torch
    from torch.export.experimental import _export_forward_backward
    from torch.nn.attention import SDPBackend, sdpa_kernel

    used = tuple(native.gradients)
    others = tuple(name for name in step.state if name not in native.gradients)
    shared = _with_shared_gradients(native)

    class Traced(torch.nn.Module):
        def forward(self, used_values: Any, other_values: Any, inputs: Any, targets: Any) -> Any:
            state = dict(zip(others, other_values, strict=True)) | dict(zip(used, used_values, strict=True))
            # A graph must not write into its inputs: copies take the updates and are returned.
            state |= {name: state[name].clone() for name in step.buffers}
            state |= {name: state[name].unsqueeze(0).squeeze(0) for name in shared}
            value, after = step.apply(state, [one.clone() for one in inputs], [one.clone() for one in targets])
            return (value, *(after[name] for name in native.changed))

    def copies(names: Sequence[str]) -> tuple[Tensor, ...]:
        return tuple(step.state[name].detach().clone() for name in names)

    arguments = (
        tuple(tensor.requires_grad_() for tensor in copies(used)),
        copies(others),
        tuple(tensor.detach() for tensor in step.inputs),
        tuple(tensor.detach() for tensor in step.targets),
    )
    shapes = ((None,) * len(used), (None,) * len(others), dims.inputs, dims.targets)
    try:
        # The other attention kernels have backward operators that no exporter knows.
        with _quiet(), sdpa_kernel(SDPBackend.MATH):
            exported = torch.export.export(Traced(), arguments, dynamic_shapes=shapes)
            joint = _export_forward_backward(exported)
    except Exception as error:
        # torch.export has no common base class for what it refuses.
        raise ExportError(f"{_WHO}: torch.export cannot trace the step: {one_line(error)}") from error
    _refuse_random_operators(joint)
    with _quiet():
        return _decomposed(_with_user_outputs(joint))


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

    for node in program.graph.nodes:
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            raise ExportError(
                f"{_WHO}: the step draws random numbers ({node.target}), so that it cannot be compared with PyTorch; "
                "expected a deterministic step: set dropout to 0 or its module to eval()"
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
    """Decompose the backward operators that torch.onnx.export does not know."""
    from gradfuse import backward_decompositions

    table = backward_decompositions.table()
    if not any(node.target in table for node in program.graph.nodes):
        return program
    try:
        decomposed: torch.export.ExportedProgram = program.run_decompositions(table)
    except Exception as error:
        raise ExportError(f"{_WHO}: torch cannot decompose the backward pass: {one_line(error)}") from error
    return decomposed


def _to_onnx(program: torch.export.ExportedProgram, step: _Step, native: _Outcome) -> ir.Model:
    """Translate a joint program; frozen parameters and unchanged buffers become initializers, and it is optimized."""
    import torch
    from onnxscript import optimizer

    try:
        with _quiet():
            exported = torch.onnx.export(
                program, (), dynamo=True, opset_version=OPSET, optimize=False, verbose=False, external_data=False
            )
    except Exception as error:
        # The chain of causes ends at the operator, whose name is what helps.
        raise ExportError(f"{_WHO}: {_untranslated(error)}") from error
    if exported is None:
        raise ExportError(f"{_WHO}: torch.onnx.export gives no model")
    model = exported.model
    others = [name for name in step.state if name not in native.gradients]
    values = list(model.graph.inputs)[len(native.gradients) : len(native.gradients) + len(others)]
    for name, value in zip(others, values, strict=True):
        if name not in step.trainable and name not in native.changed:
            model.graph.inputs.remove(value)
            value.name = name
            value.const_value = ir.tensor(to_numpy(step.state[name]), name=name)
            model.graph.register_initializer(value)
    # Only now: before, the optimizer would have taken the parameters for constants.
    with _quiet():
        optimizer.optimize(model)
    return model


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
    inputs = dict(zip((*used, *others, *step.batch), graph.inputs, strict=True))
    results = (LOSS, *(name + UPDATED_SUFFIX for name in changed), *(name + GRADIENT_SUFFIX for name in used))
    produced = dict(zip(results, graph.outputs, strict=True))
    for name in step.trainable:
        if name not in used:
            produced[name + GRADIENT_SUFFIX] = _zeros_like(graph, inputs[name])
    graph.inputs[:] = [inputs[name] for name in (*step.trainable, *changed, *step.batch)]
    wanted = (
        LOSS,
        *(name + GRADIENT_SUFFIX for name in step.trainable),
        *(name + UPDATED_SUFFIX for name in changed),
    )
    graph.outputs.clear()
    for name in wanted:
        value = produced[name]
        if value.is_graph_input() or value.is_initializer() or value.is_graph_output():
            # A value can have one name only, and inputs, parameters and the outputs before this one keep theirs.
            copy = ir.node("Identity", [value])
            copy.outputs[0].type, copy.outputs[0].shape = value.type, value.shape
            graph.append(copy)
            value = copy.outputs[0]
        produced[name] = value
        graph.outputs.append(value)

    final = {id(value): name for name, value in (inputs | {name: produced[name] for name in wanted}).items()}
    for value in _values(graph):
        if id(value) not in final and value.name in final.values():
            value.name = f"{value.name}_inner"
    for name, value in (inputs | {name: produced[name] for name in wanted}).items():
        value.name = name
    _name_dimensions(graph, inputs, dims.names)
    for value in _values(graph):
        value.metadata_props.clear()
    for node in graph.all_nodes():
        # Stack traces hold the paths of the exporting machine.
        node.metadata_props.clear()
        node.doc_string = None
    model.metadata_props.clear()
    graph.metadata_props.clear()
    graph.name = type(step.module).__name__
    graph.doc_string = None
    stored = {
        "parameters": step.trainable,
        "buffers": changed,
        "inputs": step.input_names,
        "targets": step.target_names,
    }
    model.metadata_props[METADATA_KEY] = json.dumps(stored)


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
        for axis, label in axes.items():
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


def to_numpy(tensor: Tensor) -> npt.NDArray[Any]:
    """Return a tensor's values as an array of their own, bfloat16 as `ml_dtypes.bfloat16`."""
    import torch

    values = tensor.detach().cpu().clone().contiguous()
    if values.dtype == torch.bfloat16:
        import ml_dtypes

        return values.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
    return np.asarray(values.numpy())


def _float64_run(step: _Step) -> _Outcome | None:
    """Run the step in float64, or return None where the module insists on another type."""

    def widen(tensor: Tensor) -> Tensor:
        return tensor.double() if tensor.is_floating_point() else tensor

    try:
        return step.run(widen)
    except ExportError:
        return None


def _named(outcome: _Outcome, changed: Sequence[str]) -> _Arrays:
    """Return the outputs of a step by their names in the model, as float64."""
    tensors = {LOSS: outcome.loss}
    tensors |= {name + GRADIENT_SUFFIX: tensor for name, tensor in outcome.gradients.items()}
    tensors |= {name + UPDATED_SUFFIX: outcome.buffers[name] for name in changed}
    return {name: tensor.detach().cpu().double().numpy() for name, tensor in tensors.items()}


def _compare(model: onnx.ModelProto, step: _Step, native: _Outcome, exact: _Outcome | None, which: str) -> None:
    """Run a model on the batch in stock onnxruntime and compare every output with PyTorch.

    An output passes if max|actual - exact| <= 16 max|native - exact| + 64 eps max|exact| + 8 eps G, with eps the
    spacing of the parameters' type at 1 and G the largest output of the step: what should be 0 can be no better than
    the terms that cancel in it.
    """
    feeds = {name: to_numpy(tensor) for name, tensor in (step.state | step.batch).items()}
    results = _run(model, feeds, which)
    if results is None:
        return
    own = _named(native, native.changed)
    reference = _named(exact, native.changed) if exact is not None else own
    import torch

    types = [step.state[name].dtype for name in step.trainable]
    eps = max(torch.finfo(dtype).eps for dtype in types)
    scale = max((_magnitude(array) for array in reference.values()), default=0.0)
    for name, array in results.items():
        zeros = np.zeros(array.shape)
        wanted = reference.get(name, zeros)
        if array.shape != wanted.shape:
            raise ExportError(
                f"{_WHO}: output {name!r} of the {which} model has shape {array.shape}; expected {wanted.shape}"
            )
        error = _difference(array.astype(np.float64), wanted)
        bound = 16 * _difference(own.get(name, zeros), wanted) + 64 * eps * _magnitude(wanted) + 8 * eps * scale
        if not error <= bound:
            raise ExportError(
                f"{_WHO}: output {name!r} of the {which} model differs from PyTorch by {error:.3g}; "
                f"expected at most {bound:.3g}"
            )


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


def _run(model: onnx.ModelProto, feeds: Mapping[str, npt.NDArray[Any]], which: str) -> _Arrays | None:
    """Run a model in onnxruntime, in float32 where that lacks its 16-bit kernels; None without onnxruntime."""
    try:
        import onnxruntime  # noqa: F401
    except ImportError:
        warnings.warn(f"{_WHO}: onnxruntime is not installed, so the model was not compared with PyTorch", stacklevel=4)
        return None
    from gradfuse.execution import Session, float_types, widened

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
