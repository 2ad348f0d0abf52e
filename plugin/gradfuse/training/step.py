"""A training step as data: the ONNX model, the values that training starts from, and the file that holds both.

This module needs neither torch nor onnxruntime, and to read a step on a device neither onnx nor onnx_ir.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import json
import os
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from gradfuse import deferred
from gradfuse.errors import GradfuseError, ModelError, one_line
from gradfuse.models import files, plain_reading, tensor_files
from gradfuse.models.arrays import Arrays

if TYPE_CHECKING:
    import onnx
    import onnx_ir as ir

    from gradfuse.models import reading, tensors, writing, zeros
    from gradfuse.passes.recompute import Recomputation
    from gradfuse.passes.report import Report
else:
    ir = deferred.Module("onnx_ir")
    reading, tensors, writing, zeros = (
        deferred.Module(f"gradfuse.models.{name}") for name in ("reading", "tensors", "writing", "zeros")
    )

LOSS = "loss"
GRADIENT_SUFFIX = ".grad"
UPDATED_SUFFIX = ".updated"
STEP = "step"
AVERAGE = "average"
N_AVERAGED = "n_averaged"
MICRO_STEP = "micro_step"
GROWTH_TRACKER = "growth_tracker"
COUNTS = (STEP, N_AVERAGED, MICRO_STEP, GROWTH_TRACKER)
"""What counts calls and updates, from 0 on."""
DROPOUT_SEED = "dropout_seed"
METADATA_KEY = "gradfuse.training_step"

_WHO = "TrainingStep"
_EVALUATION = ".eval"
_VALUES = ".safetensors"
_EVALUATION_FILE, _VALUES_FILE = "evaluation_model", "values"
"""Where the metadata name the files beside a step."""
_INDEX_RANGES = "index_ranges"
_FROZEN = "frozen"
_READ = "read"
"""Where the metadata name the parameters and frozen weights that the loss depends on."""
_CHECKSUMS = "checksums"
"""Where the metadata have a checksum of each constant."""
_TENSORS = ("parameters", "buffers", _FROZEN, "optimizer_state", "hyperparameters", "constants")
"""The fields of a step that hold arrays by name; all but the constants are inputs of its model."""


@dataclasses.dataclass(frozen=True)
class IndexRange:
    """What an input's elements may be: from 0 to below `size`, or `ignored`."""

    size: int
    ignored: int | None


@dataclasses.dataclass(frozen=True, eq=False)
class TrainingStep:
    """One training step as an ONNX model, with or without the optimizer.

    Inputs of the model, by name: every trainable parameter (as in `module.named_parameters()`; those of a loss module
    begin with `loss.`), every buffer that the step changes (as in `module.named_buffers()`), the state of the optimizer
    and its learning rates, and the tensors of the batch. Frozen parameters and the other buffers are constants of the
    model, unless they are asked for as inputs.

    Outputs: `loss`, a scalar, what the loss returns beside it, and `<buffer>.updated` for each buffer that the step
    changes. Without an optimizer also `<parameter>.grad` for each trainable parameter, in its shape and type, zeros if
    the loss does not depend on it. With one, `<parameter>.updated` and `<state>.updated` for all that it changes: feed
    them in the next step.

    Attributes:
        model: the model; fused, if it was exported so.
        parameters: name -> value of the trainable parameters at export; feed them in the first step.
        buffers: name -> value of the buffers that the step changes; empty in most models without batch normalisation.
            A step with dropout has one more, `dropout_seed`, int64 of shape (), which decides what is dropped.
        frozen: name -> value of the weights that no step changes, if they are inputs; empty unless requested with
            `frozen_inputs`.
        input_names: the names of the batch's inputs: those of the arguments of `module.forward`.
        target_names: the names of the batch's targets: those of the arguments of the loss after its first.
        report: the report of `gradfuse.fuse`; None for a step that was exported with `fuse=False` or loaded.
        optimizer_state: name -> value of the optimizer's state before the first step: `<parameter>.<state>` with
            torch's names of states (`momentum_buffer`, `exp_avg`, ...), in the shape and type of the parameter; `step`,
            int64 of shape (), if the optimizer counts steps; empty without an optimizer.
        hyperparameters: name -> value of the inputs that no step changes: `learning_rate`, float32 of shape (), and
            `learning_rate.1`, ... for the parameter groups after the first; and those of `run_time`, float64, as
            `weight_decay`, `weight_decay.1`, ...; empty without an optimizer.
        constants: name -> value of the frozen parameters and of the buffers that no step changes, unless these are
            inputs.
        state_dict_names: each name of the module's `state_dict()` (and of the loss's, after `loss.`) -> the parameter,
            buffer or constant that has its value. Tied parameters are several names for one.
        evaluation_model: the module alone, in eval mode. Its inputs are those of the parameters and buffers that it
            uses, and the batch's inputs; its outputs are the module's, in the order of `torch.utils._pytree`. None if
            it was not requested.
        nesting: how the tensors of "inputs" and "targets" are nested, in the form of `gradfuse.training.nesting`;
            without an entry, each tensor is an argument itself.
        index_ranges: name of an input of the batch -> the ranges that each of its elements must lie in, for labels and
            indices: a session refuses others, as PyTorch does.
        own_names: for tensors of yours whose name the step also uses for its own, such as "loss" or "step": that name
            -> the name of the step's own. Empty in most steps.
        output_names: the names of the step's outputs beside its loss, such as an accuracy, and the requested gradients
            `<input>.grad` of the batch.
        carried: the names of the buffers that `carrying` made from inputs.
        recomputation: what a memory budget did; None for a step that was made without one or loaded.
    """

    model: onnx.ModelProto
    parameters: Arrays
    buffers: Arrays
    input_names: tuple[str, ...]
    target_names: tuple[str, ...]
    report: Report | None = None
    optimizer_state: Arrays = dataclasses.field(default_factory=dict)
    hyperparameters: Arrays = dataclasses.field(default_factory=dict)
    constants: Arrays = dataclasses.field(default_factory=dict)
    state_dict_names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    evaluation_model: onnx.ModelProto | None = None
    nesting: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    index_ranges: Mapping[str, Sequence[IndexRange]] = dataclasses.field(default_factory=dict)
    own_names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    output_names: tuple[str, ...] = ()
    carried: tuple[str, ...] = ()
    recomputation: Recomputation | None = None
    frozen: Arrays = dataclasses.field(default_factory=dict)

    @property
    def initial_values(self) -> Arrays:
        """Name -> value of each input of the model except the batch: feed them in the first step."""
        return self.parameters | self.buffers | self.frozen | self.optimizer_state | self.hyperparameters

    def own_name(self, name: str) -> str:
        """Return the step's name for an input or output of its own, such as "loss", "step" or "weight.grad"."""
        return self.own_names.get(name, name)

    def carrying(self, state: Mapping[str, str], begin: Mapping[str, Any] | None = None) -> TrainingStep:
        """Return the step with inputs turned into buffers: each call takes what the last one returned for them.

        No gradient flows into an earlier call, as in truncated backpropagation through time. A session keeps these
        buffers, saves them in checkpoints, and resets them with `TrainingSession.reset_carried`.

        Args:
            state: input of the batch -> the output of the step that is its next value, such as a hidden state that the
                loss returns; of the same type and shape, whose sizes are fixed.
            begin: input -> its initial array; zeros by default.

        Raises:
            ArgumentError: there is no such input or output, types or shapes differ, or a size may vary.
        """
        from gradfuse.training.carrying import carrying

        return carrying(self, state, begin)

    def save(
        self,
        path: str | os.PathLike[str],
        *,
        defaults: bool = True,
        inputs: Iterable[str] = (),
        force: bool = False,
    ) -> None:
        """Write the step as one ONNX file, whole or not at all, and its evaluation model beside it.

        Parameters, buffers, frozen weights that are inputs, optimizer state and hyperparameters are stored as default
        values of the inputs of their names: an onnxruntime session of the file uses them unless they are fed. For state
        that is zero, as before the first step, the file stores only the shape: a sparse default value without elements.
        Beyond 2 GB the tensors are in `<path>.data`. The evaluation model of `step.onnx` is `step.eval.onnx`.

        With `defaults=False` these inputs have no default values, because onnxruntime-web takes none. The values of
        `step.onnx` are then in `step.safetensors`, by the names of the inputs: feed them in the first step.

        Args:
            path: the file to write. A step that exists there is replaced, with its evaluation model, data and values.
            defaults: whether the values are stored as default values of inputs.
            inputs: files that the step was made from, which must stay as they are.
            force: replace an evaluation model, a file of values or a data file that does not belong to a step at
                `path`.

        Raises:
            ModelError: a file cannot be written, or would replace something other than a step: a folder, a pipe, a
                device, one of the inputs, or, without `force`, another evaluation model, file of values or data file.
            GradfuseError: `defaults` is False, and safetensors is not installed.
        """
        model = ir.from_proto(self.model)
        read = _inputs_of(model.graph, self.own_name(LOSS))
        by_name = {str(value.name): value for value in model.graph.inputs}
        for field in _TENSORS:
            arrays = getattr(self, field)
            empty = zeros.all_zeros(arrays) if field == "optimizer_state" else ()
            for name, array in arrays.items():
                if name in by_name:
                    tensor = ir.tensor(array, name=name)
                    if name in empty:
                        tensor = zeros.Zeros(name, tensor.dtype, array.shape)
                    by_name[name].const_value = tensor
                    model.graph.register_initializer(by_name[name])
                elif name not in model.graph.initializers:
                    # The exporter has folded this constant into others.
                    _free_name(model.graph, name)
                    tensor = ir.tensor(array, name=name)
                    value = ir.Value(name=name, type=ir.TensorType(tensor.dtype), const_value=tensor)
                    value.shape = ir.Shape(array.shape)
                    model.graph.register_initializer(value)
        values: Arrays = {}
        if not defaults:
            for name, value in by_name.items():
                if model.graph.initializers.pop(name, None) is not None and value.const_value is not None:
                    values[name], value.const_value = value.const_value.numpy(), None
        evaluation, beside = _evaluation_path(path), _values_path(path)
        model.metadata_props[METADATA_KEY] = json.dumps(
            {field: list(getattr(self, field)) for field in _TENSORS}
            | {
                "inputs": self.input_names,
                "targets": self.target_names,
                "state_dict": dict(self.state_dict_names),
                "nesting": dict(self.nesting),
                _INDEX_RANGES: {
                    name: [[one.size, one.ignored] for one in ranges] for name, ranges in self.index_ranges.items()
                },
                "own_names": dict(self.own_names),
                "outputs": self.output_names,
                "carried": self.carried,
                # Not buffers: a normalisation by the batch's statistics has the running ones as inputs.
                _READ: [name for name in (*self.parameters, *self.frozen) if name in read],
                _CHECKSUMS: {name: _checksum(array) for name, array in self.constants.items()},
                _EVALUATION_FILE: None if self.evaluation_model is None else os.path.basename(evaluation),
                _VALUES_FILE: None if defaults else os.path.basename(beside),
            }
        )
        inputs = list(inputs)
        # All before anything is written: a step without what belongs to it would be incomplete.
        if self.evaluation_model is not None:
            _require_own(path, evaluation, _EVALUATION_FILE, "the evaluation model", inputs, force)
        writers: dict[str, Callable[[str], None]] = {}
        if not defaults:
            if files.same(path, beside):
                raise ModelError(f"{os.fspath(path)}: is where its values belong; expected another ending, as .onnx")
            _require_own(path, beside, _VALUES_FILE, "the values of the step", inputs, force)
            content = tensor_files.content(values, _WHO)
            writers[os.path.basename(beside)] = functools.partial(_write, content)
        writing.save(model, path, inputs=inputs, force=force, beside=writers)
        written = _written_tensors(path) if tensors.data_files(model) else {}
        if self.evaluation_model is not None:
            evaluated = ir.from_proto(self.evaluation_model)
            shares = _refer_to_data(evaluated, model, written, path)
            writing.save(evaluated, evaluation, keep_references=shares, inputs=inputs, force=force)
        for proto in (self.model, self.evaluation_model):
            # A step that replaces the file it was read from finds its tensors in the new one.
            for tensor in () if proto is None else proto.graph.initializer:
                if tensor.name in written and files.same(_location(tensor), files.data_path(path)):
                    new = written[tensor.name]
                    tensor.CopyFrom(ir.to_proto(tensors.moved(new, os.path.abspath(new.path))))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> TrainingStep:
        """Read a step that `save` wrote. Its evaluation model is None if the file is missing.

        Raises:
            ModelError: the file cannot be read, or is an ONNX model but not a saved training step; or the file of its
                values is missing, damaged or of another step.
            GradfuseError: the step was saved with `defaults=False`, and safetensors is not installed.
        """
        step, _ = load_with_files(path)
        return step

    def require_consistent(self, who: str) -> None:
        """Refuse a step whose fields and models are not of one step.

        Args:
            who: what the message names first.

        Raises:
            ModelError: an input of the model has no value, or two; a name of the batch or of `state_dict_names` stands
                for nothing; or there is no loss; or a name cannot be in a checkpoint.
        """
        evaluation = self.evaluation_model
        self._require_names(
            who,
            [value.name for value in self.model.graph.input],
            [value.name for value in self.model.graph.output],
            [] if evaluation is None else [value.name for value in evaluation.graph.input],
        )

    def _require_names(
        self, who: str, inputs: Collection[str], outputs: Collection[str], evaluation_inputs: Collection[str]
    ) -> None:
        """Do the work of `require_consistent`, given the names of the inputs and outputs of the models."""
        held = [name for field in _TENSORS[:-1] for name in getattr(self, field)]
        # Checkpoints have these names.
        tensor_files.require_names([*held, *self.state_dict_names], who)
        given = collections.Counter([*held, *self.input_names, *self.target_names])
        sources = {*self.parameters, *self.buffers, *self.frozen, *self.constants}
        for name in inputs:
            if name not in given:
                raise ModelError(f"{who}: the step has no value for the input {name!r}; expected one")
        for name, count in given.items():
            if name not in inputs:
                raise ModelError(f"{who}: the step has {name!r}, which is no input of its model; expected only inputs")
            if count > 1:
                raise ModelError(f"{who}: the step has {name!r} in {count} places; expected one")
        loss = self.own_name(LOSS)
        for name in (loss, *self.output_names):
            if name not in outputs:
                raise ModelError(f"{who}: the model of the step has no output {name!r}; expected one")
        for name, source in self.state_dict_names.items():
            if source not in sources:
                raise ModelError(f"{who}: the step has no value for {name!r} of its state_dict; expected one")
        known = {*self.parameters, *self.buffers, *self.frozen, *self.input_names}
        unknown = [name for name in evaluation_inputs if name not in known]
        if unknown:
            raise ModelError(f"{who}: the evaluation model takes {unknown[0]!r}; expected what the step has")


def load_with_files(path: str | os.PathLike[str]) -> tuple[TrainingStep, list[str]]:
    """Read a step that `TrainingStep.save` wrote, and return it with the files that its training begins with.

    Raises:
        ModelError, GradfuseError: as for `TrainingStep.load`.
    """
    loaded, defaults = reading.load_with_defaults(path)
    model = loaded.ir
    initializers = model.graph.initializers
    with _stored_step(path, model.metadata_props) as stored:
        del model.metadata_props[METADATA_KEY]
        names = stored.names
        if stored.values_file is not None:
            defaults |= _read_values(path, stored.values_file, model, names)
        arrays: dict[str, Any] = {
            field: {n: defaults[n] if n in defaults else _array(initializers, n, path) for n in own}
            for field, own in names.items()
        }
    stored.require_unchanged(path, arrays["constants"])
    for field, own in names.items():
        for name in own:
            value = initializers.get(name)
            if value is not None and (field != "constants" or not value.uses()):
                del initializers[name]
                value.const_value = None
    for value in model.graph.inputs:
        if value.name in defaults and all(value.name not in own for own in names.values()):
            value.const_value = ir.tensor(defaults[value.name], name=value.name)
            model.graph.register_initializer(value)
    evaluation_model = None
    if stored.evaluation_file is not None:
        beside = os.path.join(os.path.dirname(path), stored.evaluation_file)
        if os.path.exists(beside):
            evaluation_model = tensors.to_mapped_proto(reading.load(beside).ir)
    step = TrainingStep(
        model=tensors.to_mapped_proto(model), evaluation_model=evaluation_model, **arrays, **stored.fields
    )
    step.require_consistent(os.fspath(path))
    read = _inputs_of(model.graph, step.own_name(LOSS))
    for name in stored.read:
        if name not in read:
            raise ModelError(
                f"{os.fspath(path)}: the loss does not depend on {name!r} any more; "
                "expected the model as it was saved, which another program has changed"
            )
    return step, _read_from(path, stored.values_file)


@dataclasses.dataclass(frozen=True)
class PlainStep:
    """A step of a file as a device has it that has neither onnx nor onnx_ir.

    Attributes:
        step: the step, whose models are None.
        model: its model.
        evaluation_model: likewise; None where the step has none, or its file is missing.
        files: those that training begins with.
    """

    step: TrainingStep
    model: plain_reading.PlainModel
    evaluation_model: plain_reading.PlainModel | None
    files: list[str]


def load_plain(path: str | os.PathLike[str]) -> PlainStep:
    """Read a step that `TrainingStep.save` wrote, without onnx and onnx_ir.

    Raises:
        ModelError: as for `TrainingStep.load`, and where the file has tensors that are stored otherwise.
        GradfuseError: as for `TrainingStep.load`, or a tensor has a type that numpy does not have.
    """
    model = plain_reading.read(path)
    arrays: dict[str, Any] = {}
    with _stored_step(path, model.metadata) as stored:
        values: Arrays = {}
        if stored.values_file is not None:
            read, _ = tensor_files.read(_beside(path, stored.values_file), _WHO, f"the values of {os.fspath(path)}")
            values = {name: _compact(array) for name, array in read.items() if name in model.inputs}
        for field, own in stored.names.items():
            for name in own:
                if stored.values_file is not None and name in model.inputs and name not in values:
                    beside, of = _beside(path, stored.values_file), os.fspath(path)
                    raise ModelError(f"{beside}: {name!r} is missing; expected all values of {of}")
            try:
                arrays[field] = {name: values[name] if name in values else model.array(name) for name in own}
            except KeyError as error:
                raise _no_value(path, str(error.args[0])) from error
    stored.require_unchanged(path, arrays["constants"])
    evaluation_model = None
    if stored.evaluation_file is not None and os.path.exists(_beside(path, stored.evaluation_file)):
        evaluation_model = plain_reading.read(_beside(path, stored.evaluation_file))
    model = dataclasses.replace(model, path=os.path.abspath(model.path))
    if evaluation_model is not None:
        evaluation_model = dataclasses.replace(evaluation_model, path=os.path.abspath(evaluation_model.path))
    # Nothing reads the model: onnxruntime has it.
    step = TrainingStep(model=None, **arrays, **stored.fields)  # type: ignore[arg-type]
    step._require_names(
        os.fspath(path), model.inputs, model.outputs, () if evaluation_model is None else evaluation_model.inputs
    )
    return PlainStep(step, model, evaluation_model, _read_from(path, stored.values_file))


@dataclasses.dataclass(frozen=True)
class _StoredStep:
    """What the metadata of a step say.

    Attributes:
        names: the names of the tensors that each field of a step has.
        fields: the fields of a step that have no tensors.
        read: the names of the weights that the loss depends on; files of older versions name none.
        checksums: those of constants, by name; files of older versions have none.
        evaluation_file: the name of the file of the evaluation model.
        values_file: the name of the file of the values.
    """

    names: dict[str, tuple[str, ...]]
    fields: dict[str, Any]
    read: tuple[str, ...]
    checksums: dict[str, int]
    evaluation_file: str | None
    values_file: str | None

    def require_unchanged(self, path: str | os.PathLike[str], constants: Arrays) -> None:
        """Refuse constants with other values than the step had: other tensors are computed of them, in two models."""
        for name, checksum in self.checksums.items():
            if name in constants and _checksum(constants[name]) != checksum:
                raise ModelError(
                    f"{os.fspath(path)}: {name!r} has other values than the step was made with; expected these, or a "
                    "step made with frozen_inputs=True"
                )


@contextlib.contextmanager
def _stored_step(path: str | os.PathLike[str], metadata: Mapping[str, str]) -> Iterator[_StoredStep]:
    """Yield what the metadata of a model say of the step that it is.

    Raises:
        ModelError: they say nothing, or what is read under it is not as they say.
    """
    if METADATA_KEY not in metadata:
        raise ModelError(
            f"{os.fspath(path)}: is not a training step saved by gradfuse: its metadata has no {METADATA_KEY!r}"
        )
    try:
        stored = json.loads(metadata[METADATA_KEY])
        input_names, target_names = _names(stored["inputs"]), _names(stored["targets"])
        fields = {
            "input_names": input_names,
            "target_names": target_names,
            "state_dict_names": dict(stored["state_dict"]),
            "index_ranges": _ranges(stored.get(_INDEX_RANGES, {}), {*input_names, *target_names}),
            # Steps of older versions have none.
            "nesting": dict(stored.get("nesting", {})),
            "own_names": dict(stored.get("own_names", {})),
            "output_names": _names(stored.get("outputs", [])),
        }
        names = {field: _names(stored.get(field, []) if field == _FROZEN else stored[field]) for field in _TENSORS}
        fields["carried"] = tuple(name for name in _names(stored.get("carried", [])) if name in names["buffers"])
        read = _names(stored.get(_READ, []))
        beside = (_file_beside(stored, key) for key in (_EVALUATION_FILE, _VALUES_FILE))
        yield _StoredStep(names, fields, read, dict(stored.get(_CHECKSUMS, {})), *beside)
    except (KeyError, ValueError, TypeError, RecursionError) as error:
        if isinstance(error, GradfuseError):
            raise
        reason = one_line(ValueError(repr(error)))
        raise ModelError(f"{os.fspath(path)}: is not a training step saved by gradfuse: {reason}") from error


def _read_from(path: str | os.PathLike[str], values_file: str | None) -> list[str]:
    """Return the files that a step's training begins with, wherever the process goes on."""
    path = os.path.abspath(path)
    found = [file for of in (path, _evaluation_path(path)) for file in (of, files.data_path(of))]
    return found if values_file is None else [*found, _beside(path, values_file)]


def _written_tensors(path: str | os.PathLike[str]) -> dict[str, ir.ExternalTensor]:
    """Return the tensors that a step has in its data file."""
    # Of a link, the folder is that of its target.
    values = ir.load(os.path.realpath(path)).graph.initializers.values()
    return {str(v.name): v.const_value for v in values if isinstance(v.const_value, ir.ExternalTensor)}


def _refer_to_data(
    evaluation: ir.Model, model: ir.Model, written: Mapping[str, ir.ExternalTensor], path: str | os.PathLike[str]
) -> bool:
    """Let the tensors in files that a model shares with a step be those of the step's data file; whether all are.

    Args:
        evaluation: the model, which is changed.
        model: the step that was written.
        written: its tensors in the data file.
        path: where it was written.
    """
    own = {place: name for name, v in model.graph.initializers.items() if (place := _place(v.const_value)) is not None}
    for value in evaluation.graph.initializers.values():
        place = _place(value.const_value)
        tensor = None if place is None else written.get(own.get(place, ""))
        if tensor is not None:
            value.const_value = tensors.moved(tensor, str(tensor.location), str(tensor.base_dir), str(value.name))
    found = tensors.data_files(evaluation)
    return bool(found) and all(files.same(one, files.data_path(path)) for one in found)


def _location(tensor: onnx.TensorProto) -> str:
    """Return the file that a tensor is in; "" for one that is in none."""
    return next((entry.value for entry in tensor.external_data if entry.key == "location"), "")


def _place(tensor: ir.TensorProtocol | None) -> tuple[str, int | None, int | None] | None:
    """Return where in a file a tensor is; None for one that is in none."""
    return (tensor.path, tensor.offset, tensor.length) if isinstance(tensor, ir.ExternalTensor) else None


def _evaluation_path(path: str | os.PathLike[str]) -> str:
    root, extension = os.path.splitext(path)
    return root + _EVALUATION + extension


def _values_path(path: str | os.PathLike[str]) -> str:
    return os.path.splitext(os.path.realpath(path))[0] + _VALUES


def _beside(path: str | os.PathLike[str], name: str) -> str:
    return os.path.join(os.path.dirname(os.path.realpath(path)), name)


def _require_own(
    path: str | os.PathLike[str], other: str, key: str, wanted: str, inputs: Iterable[str], force: bool
) -> None:
    """Refuse to replace a file that does not belong to the step that is at `path` now.

    Args:
        path: where the step is written.
        other: where the file is written that belongs to it.
        key: where the step's metadata name the file.
        wanted: what the file is to be, for the message.
        inputs: files that must stay as they are.
        force: whether a file of something else is replaced.
    """
    files.require_regular(other, wanted)
    files.require_other(other, inputs, wanted)
    if os.path.exists(other) and not force and _stored_name(path, key) != os.path.basename(other):
        raise ModelError(
            f"{other}: exists and does not belong to a step at {os.fspath(path)}; "
            f"expected a path for {wanted}, or force"
        )


def _stored_name(path: str | os.PathLike[str], key: str) -> str | None:
    """Return the file that belongs to the step at `path`; None if there is no step, or it has none."""
    try:
        stored = json.loads(reading.read_metadata(path).get(METADATA_KEY, "{}"))
    except (ModelError, ValueError, RecursionError):
        return None
    name = stored.get(key) if isinstance(stored, dict) else None
    return name if isinstance(name, str) else None


def _file_beside(stored: Mapping[str, Any], key: str) -> str | None:
    """Return the name of a file beside the step, from the step's metadata.

    Raises:
        ValueError: it would be in another folder.
        TypeError: it is no name.
    """
    name = stored.get(key)
    if name is not None and _names([name]) != (os.path.basename(name),):
        raise ValueError(f"its {key.replace('_', ' ')} is {name!r}; expected a file beside it")
    return name


def _read_values(
    path: str | os.PathLike[str], name: str, model: ir.Model, names: Mapping[str, Collection[str]]
) -> Arrays:
    """Return the values of inputs that are in a file beside the step; what else that file has is left out."""
    beside = _beside(path, name)
    stored, _ = tensor_files.read(beside, _WHO, f"the values of {os.fspath(path)}")
    inputs = {str(value.name): value for value in model.graph.inputs}
    for field in _TENSORS:
        for needed in names[field]:
            if needed in inputs and needed not in stored:
                raise ModelError(f"{beside}: {needed!r} is missing; expected all values of {os.fspath(path)}")
    values = {key: _compact(array) for key, array in stored.items() if key in inputs}
    for key, array in values.items():
        dtype, shape = inputs[key].dtype, inputs[key].shape
        got = ir.DataType.from_numpy(array.dtype)
        if got != dtype or shape is None or not _fits(array.shape, shape):
            raise ModelError(f"{beside}: {key!r} is {got}{list(array.shape)}; expected {dtype}{shape}")
    return values


def _fits(sizes: Sequence[int], shape: ir.Shape) -> bool:
    return len(sizes) == len(shape) and all(
        isinstance(dim, ir.SymbolicDim) or size == dim for size, dim in zip(sizes, shape, strict=True)
    )


def _write(content: bytes, path: str) -> None:
    with open(path, "wb") as file:
        file.write(content)


def _inputs_of(graph: ir.Graph, output: str) -> set[str]:
    """Return the names of the inputs of a graph that an output depends on."""
    from gradfuse.training.in_place import ancestors, read_by

    nodes = {node for value in graph.outputs if value.name == output for node in ancestors(value)}
    read = {value for node in nodes for value in read_by(node)}
    return {str(value.name) for value in graph.inputs if value in read}


def _array(initializers: Mapping[str, ir.Value], name: str, path: str | os.PathLike[str]) -> npt.NDArray[Any]:
    """Return a copy of an initializer's elements."""
    value = initializers.get(name)
    if value is None or value.const_value is None:
        raise _no_value(path, name)
    return _compact(np.array(value.const_value.numpy()))


def _checksum(array: npt.NDArray[Any]) -> int:
    return zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def _no_value(path: str | os.PathLike[str], name: str) -> ModelError:
    """Return what is raised where a program that has written the file anew has left a value out."""
    return ModelError(
        f"{os.fspath(path)}: has no value for {name!r}; expected one, as {METADATA_KEY!r} in its metadata says"
    )


def _compact(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return an array that takes no memory where it is zeros that nobody writes, as an optimizer's first state."""
    return array if np.any(array) else np.zeros(array.shape, array.dtype)


def _ranges(stored: Any, names: Collection[str]) -> dict[str, tuple[IndexRange, ...]]:
    if not isinstance(stored, dict) or not set(names) >= stored.keys():
        raise TypeError(f"{stored!r} are no ranges of inputs of the batch")
    found = {name: tuple(IndexRange(size, ignored) for size, ignored in ranges) for name, ranges in stored.items()}
    for one in (one for ranges in found.values() for one in ranges):
        if type(one.size) is not int or type(one.ignored) not in (int, type(None)):
            raise TypeError(f"{one} has other things than numbers")
    return found


def _names(stored: Any) -> tuple[str, ...]:
    if not isinstance(stored, list) or not all(isinstance(name, str) for name in stored):
        raise TypeError(f"{stored!r} are no names")
    return tuple(stored)


def _free_name(graph: ir.Graph, name: str) -> None:
    """Give another name to a node's output that has this one."""
    for node in graph.all_nodes():
        for value in node.outputs:
            if value.name == name:
                value.name = f"{name}_inner"
