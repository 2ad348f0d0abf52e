"""`TrainingSession`: training steps in stock onnxruntime, whose parameters never leave the device.

This module needs neither torch nor the exporter. Where onnx or onnx_ir is missing, as on a device, it trains steps of
files with onnxruntime and numpy alone.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import gc
import importlib.util
import os
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt

from gradfuse import deferred, library
from gradfuse.errors import ArgumentError, GradfuseError, ModelError, listed
from gradfuse.models import files, ort_values, tensor_files
from gradfuse.models.arrays import Arrays
from gradfuse.models.memory import arrays_mapped, collection_paused
from gradfuse.models.plain_reading import PlainModel, with_values
from gradfuse.runtime import find_files_in, import_onnxruntime, is_of_onnxruntime, reason, session_of, session_options
from gradfuse.training import checkpoints
from gradfuse.training.arguments import (
    TensorType,
    array_like,
    as_array,
    checked_providers,
    contiguous,
    in_short,
    require_in_range,
    require_path,
    require_shapes,
)
from gradfuse.training.hyperparameters import HYPERPARAMETERS, LEARNING_RATE, hyperparameter_of, require_values
from gradfuse.training.nesting import flat, leaves_of_call
from gradfuse.training.sharing import Shared, Sides, require_common, shareable
from gradfuse.training.step import (
    AVERAGE,
    COUNTS,
    GRADIENT_SUFFIX,
    LOSS,
    N_AVERAGED,
    UPDATED_SUFFIX,
    TrainingStep,
    load_plain,
    load_with_files,
)

if TYPE_CHECKING:
    import onnx
    import onnx_ir as ir

    from gradfuse.models import tensors, writing
    from gradfuse.training import batch_checks
else:
    onnx, ir = deferred.Module("onnx"), deferred.Module("onnx_ir")
    tensors, writing = deferred.Module("gradfuse.models.tensors"), deferred.Module("gradfuse.models.writing")
    batch_checks = deferred.Module("gradfuse.training.batch_checks")

_P = ParamSpec("_P")
_R = TypeVar("_R")
_S = TypeVar("_S", bound="TrainingSession")

_WHO = "TrainingSession"
_DEVICES = {"CUDAExecutionProvider": "cuda"}
"""The device of a session's tensors, by its first execution provider; otherwise the CPU."""
_SMALL = 2**16
"""Below this many bytes, a session keeps a second copy of what it begins with."""


def alone(method: Callable[Concatenate[_S, _P], _R]) -> Callable[Concatenate[_S, _P], _R]:
    """Let a method of a session run in one thread at a time, and to its end before another one begins."""

    @functools.wraps(method)
    def locked(self: _S, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        with self._lock:
            return method(self, *args, **kwargs)

    return locked


class TrainingSession:
    """Trains a step in stock onnxruntime, 1.18 or newer.

    Parameters, buffers and optimizer state are bound to the session on its device. On the CPU, operators of gradfuse's
    library that update parameters write them in place. Everything else has two sets of tensors: each step reads one and
    writes the other, and the next step swaps the two, so that nothing is copied between steps.

    Several threads may share a session: a call waits until the call of another thread is done.

    Args:
        step: a step, or the path of one that `TrainingStep.save` wrote.
        providers: onnxruntime's execution providers, as for `onnxruntime.InferenceSession`; None: the CPU.
        session_options: an `onnxruntime.SessionOptions`, used as it is; None: the default ones, with gradfuse's kernels
            registered if there is a compiled library.
        share_with: a session whose parameters and buffers of the same names this one shares: both read and train one
            tensor, which keeps its value from there. Each session has its own optimizer state, learning rates and
            dropout seed. Sessions that share something run one at a time.

    Raises:
        ModelError: the file cannot be read, an input has no value, or onnxruntime cannot load the model.
        ArgumentError: a value of the step has another type or shape than its input; or `share_with` has nothing in
            common with the step, something of another type or shape, or trains what is a constant of the other.
        GradfuseError: onnxruntime is not installed; or the model has bfloat16 inputs or outputs, and is not for a CPU,
            or onnxruntime is too old for that.

    """

    @arrays_mapped()
    def __init__(
        self,
        step: TrainingStep | str | os.PathLike[str],
        providers: Sequence[Any] | None = None,
        *,
        session_options: Any = None,
        share_with: TrainingSession | None = None,
    ) -> None:
        onnxruntime = import_onnxruntime()
        if not isinstance(share_with, TrainingSession | None):
            raise ArgumentError(f"{_WHO}: share_with is {type(share_with).__name__}; expected a TrainingSession")
        # A signal's handler may ask for something while its thread runs a step.
        self._lock: Any = threading.RLock() if share_with is None else share_with._lock
        self._new_value = onnxruntime.OrtValue.ortvalue_from_shape_and_type
        self._providers = checked_providers(providers, _WHO)
        self._device = _device(self._providers[0])
        self._has_kernels = session_options is None and library.find_library() is not None
        self._options = self._default_options() if session_options is None else session_options
        if not isinstance(step, TrainingStep | str | os.PathLike):
            raise ArgumentError(f"{_WHO}: step is {type(step).__name__}; expected a TrainingStep or a path")
        self._files: list[str] = []
        """The files that the step was read from, its own first."""
        self._identities: dict[str, str] = {}
        """Files that nothing may replace -> what they are now: these, and those that have weights of the step."""
        self._plain: tuple[PlainModel, PlainModel | None] | None = None
        """The step's model and the evaluation model, if onnx or onnx_ir is missing."""
        if not isinstance(step, TrainingStep):
            with collection_paused():
                if _has_onnx():
                    step, read_from = load_with_files(step)
                else:
                    read = load_plain(step)
                    step, read_from, self._plain = read.step, read.files, (read.model, read.evaluation_model)
            self._read_files(read_from)
        # A step in memory finds its weights also in a file that it has replaced itself.
        self._identities = dict.fromkeys(_data_files(step), "") | self._identities
        self._step = step
        self._optimizer_state = frozenset(step.optimizer_state)
        self._evaluation: Any = None
        self._frozen = self._no_frozen_weights()
        """The weights that are inputs of onnxruntime's sessions, though not of the step's models; None: none may be."""
        self._lifted: dict[int, tuple[str, ...]] = {}
        """Sessions of onnxruntime, by `id` -> these inputs of theirs."""
        if self._plain is not None:
            model, evaluation = self._plain
            quantises = b"QuantizeLinear" in model.message
            self._keep_pairs(quantises and session_options is None)
            self._inputs, outputs = _types(model)
            in_place: frozenset[str] = frozenset()
            begun: str | None = None
            self._session = self._plain_session(model)
            # onnxruntime has the message by now.
            self._plain = dataclasses.replace(model, message=b""), evaluation
        else:
            step.require_consistent(_WHO)
            quantises = any(node.op_type == "QuantizeLinear" for node in step.model.graph.node)
            self._keep_pairs(quantises and session_options is None)
            with collection_paused():
                self._session, in_place, begun = self._training_session()
            graph = step.model.graph
            self._inputs = {value.name: TensorType.of(value) for value in graph.input}
            outputs = {value.name: TensorType.of(value) for value in graph.output}

        batch = {*step.input_names, *step.target_names}
        names = [name for name in self._inputs if name not in batch]
        changed = [name for name in names if step.own_name(name + UPDATED_SUFFIX) in outputs]
        self._shared: Shared | None = None
        self._shareable = frozenset(shareable(step))
        self._written_elsewhere = frozenset(changed) - in_place
        self._changed = frozenset(changed)
        given = {} if share_with is None else self._values_of(share_with)
        kept = {
            name: given[name]
            if name in given and name not in self._written_elsewhere
            else self._allocate(name, self._inputs[name], self._device)
            for name in names
        }
        other = {
            name: self._allocate(name, self._inputs[name], self._device) for name in changed if name not in in_place
        }
        self._values: tuple[dict[str, Any], dict[str, Any]] = kept, {**kept, **other}
        loss = step.own_name(LOSS)
        # A program that infers shapes may have given the output another one.
        self._loss = self._allocate(loss, TensorType(outputs[loss].dtype, ()), ("cpu", 0))
        gradients = {name: step.own_name(name + GRADIENT_SUFFIX) for name in step.parameters}
        self._gradients = {
            name: self._allocate(output, outputs[output], self._device)
            for name, output in gradients.items()
            if output in outputs
        }
        self._begun: tuple[str, Any] | None = None
        """The output that a run writes before it updates anything in place, and its tensor."""
        if begun is not None:
            self._begun = begun, self._allocate(begun, TensorType(np.dtype(np.float32), ()), ("cpu", 0))
        self._not_begun = _no_result(np.dtype(np.float32))
        self._is_torn = False
        """Whether a step has failed between its updates."""
        self._last_binding: Any = None
        """What the last step ran with."""
        self._bindings = [self._binding(read, written, changed) for read, written in (self._values, self._values[::-1])]
        self._progress = 0, False
        """How many steps were done before the one that was begun last, and whether its end is not noted yet."""
        self._is_stepping = False
        self._steps_before = 0
        """The steps done by other sessions before `load`, less those that this one had done by then."""
        self._no_loss = _no_result(outputs[loss].dtype)
        self._background = checkpoints.BackgroundWork(self)
        self._has_run = False
        self._filled: dict[bool, Collection[str | None]] = {}
        self._beginning: Arrays = {}
        """What `load` resets and the file need not be read for: small arrays, and zeros."""
        values = step.initial_values
        if self._files:
            # onnxruntime has the model by now, and the session what it takes of the values.
            model_of_none = step.model if self._plain is not None else onnx.ModelProto()
            empty: dict[str, Any] = {"parameters": {}, "frozen": {}, "optimizer_state": {}, "report": None}
            if self._frozen:
                empty["constants"] = self._frozen.shared_with(step.constants)
                empty["evaluation_model"] = self._without_frozen(step.evaluation_model)
            self._step = dataclasses.replace(step, model=model_of_none, **empty)
        named = set(step.state_dict_names.values())
        del step
        if self._files and self._frozen:
            # onnx_ir's models are cycles, which hold the messages that they were read from.
            gc.collect()
        self._begin_with(values, kept, given, kept.keys() - named)
        if share_with is not None:
            self._share(share_with, given)

    def _begin_with(
        self, values: Arrays, kept: Collection[str], given: Collection[str], reset: Collection[str]
    ) -> None:
        """Set tensors but for those that are given, and note those that `load` resets; takes them out of `values`."""
        for name in kept:
            # One after the other: a large one that nothing else holds is given back at once.
            array = values.pop(name)
            if name not in given:
                self._assign({name: self._fitting(name, array, "training_step")})
            if not self._files or name not in reset:
                continue
            if array.nbytes < _SMALL:
                self._beginning[name] = np.array(array)
            elif not array.any():
                self._beginning[name] = np.zeros(array.shape, array.dtype)

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_") and not isinstance(getattr(type(self), name, None), property):
            raise AttributeError(f"{_WHO} has no attribute {name!r}; expected {listed(HYPERPARAMETERS, most=9)}")
        super().__setattr__(name, value)

    @property
    def training_step(self) -> TrainingStep:
        """The step, with the values that training started from: the argument, or what is read from its path again.

        Raises:
            ModelError: the file cannot be read, or is not the one that the session was made from.
        """
        return self._step_of_file() if self._files else self._step

    @alone
    def step(self, inputs: Any, targets: Any = None) -> float:
        """Run one step and return the loss.

        Args:
            inputs: the batch's inputs: an array or torch tensor, a tuple of them, nested as the module's arguments are,
                or a dictionary from the names of these or from `training_step.input_names`; in the types and shapes of
                the model.
            targets: the batch's targets, likewise by `training_step.target_names`; None: there are none.

        Raises:
            ArgumentError: a tensor is missing, or has another type or shape; a label or index is out of range, as far
                as PyTorch refuses it; or all inputs are empty, or an axis for which kernels of onnxruntime are not made
                for that.
            ModelError: onnxruntime fails to run the step; then nothing changes, except that `gradients` are lost. In
                steps of more than 16 MiB of parameters and state, memory may also run out between updates: then only
                `load` makes the session usable again. Or an earlier `save(wait=False)` has failed.
            GradfuseError: a signal's handler calls it while its thread is in a step; or an earlier step has failed
                between its updates.

        If a signal's handler raises an exception meanwhile, as on Ctrl-C or a time limit, the step is either done or
        not begun, also for calls that the handler makes; `step_count` tells which.
        """
        self._require_no_step()
        self._require_whole("step")
        feeds = self._batch(inputs, targets)
        names = self._step.input_names
        if names and self._is_empty(feeds):
            # The mean of nothing is NaN, which would stay in running statistics.
            first = feeds[names[0]]
            got = TensorType(first.dtype, first.shape)
            raise ArgumentError(f"{_WHO}.step: {names[0]!r} is {got}; expected at least one element")
        self._require_filled(f"{_WHO}.step", feeds, self._inputs)
        self._has_run = False
        try:
            self._is_stepping = True
            self._run_and_count(feeds)
            self._has_run = True
            return float(ort_values.array_of(self._loss))
        finally:
            # Not by __setattr__, a call that a signal's handler may end before it has done anything.
            self.__dict__["_is_stepping"] = False

    @property
    @alone
    def step_count(self) -> int:
        """How many calls of `step` are done, including those before the checkpoint that `load` has read."""
        return self._steps_before + self._runs

    @alone
    def evaluate(self, inputs: Any, *, averaged: bool = False) -> Any:
        """Return the module's output in eval mode, with the current parameters and buffers.

        Args:
            inputs: as for `step`.
            averaged: whether to use the averages of the parameters instead.

        Returns:
            An array, or a tuple of them if the module returns several tensors.

        Raises:
            ArgumentError: a tensor is missing, or has another type or shape; an index is out of range; or an axis is
                empty for which kernels of onnxruntime are not made for that.
            GradfuseError: the step was exported without an evaluation model, or its file is missing; or without
                averages; or an earlier step has failed between its updates.
            ModelError: onnxruntime cannot load or run it; or an earlier `save(wait=False)` has failed.
        """
        self._background.raise_error()
        self._require_whole("evaluate")
        known, results_of = self._evaluation_types()
        feeds = self._batch_of(inputs, self._step.input_names, "evaluate", "inputs", known)
        require_shapes(f"{_WHO}.evaluate", feeds, known)
        require_in_range(f"{_WHO}.evaluate", feeds, self._step.index_ranges)
        self._require_filled(f"{_WHO}.evaluate", feeds, known, evaluates=True)
        if self._evaluation is None:
            with collection_paused():
                self._evaluation = self._evaluation_session()
        binding, averages = self._new_binding(self._evaluation), self._averages("evaluate") if averaged else {}
        values = self.ort_values
        for name in known:
            if name in averages:
                ort_values.bind(binding, name, averages[name])
            elif name not in feeds:
                binding.bind_ortvalue_input(name, values[name])
        for name in results_of:
            binding.bind_output(name)
        try:
            self._run(self._evaluation, binding, feeds)
        except Exception as error:
            if not is_of_onnxruntime(error):
                raise
            raise _not_run("evaluate", error) from error
        results = [_copied(value) for value in binding.get_outputs()]
        return results[0] if len(results) == 1 else tuple(results)

    @alone
    def reset_carried(self) -> None:
        """Reset the state that the step carries from call to call to its initial values, as at the start of a sequence.

        Raises:
            GradfuseError: the step carries nothing.
        """
        if not self._step.carried:
            raise GradfuseError(
                f"{_WHO}.reset_carried: the step carries nothing; expected one of TrainingStep.carrying"
            )
        self._assign({name: self._step.buffers[name] for name in self._step.carried})

    @property
    @alone
    def gradients(self) -> Arrays:
        """The gradients of the last step, by parameter, if the step has no optimizer.

        Raises:
            GradfuseError: the step has an optimizer; or no step was run yet, or the last one has failed.
        """
        if not self._gradients or not self._has_run:
            why = "the step has an optimizer, and gives no gradients"
            if self._gradients:
                why = "no step was run, or the last one has failed"
            raise GradfuseError(f"{_WHO}.gradients: {why}")
        return {name: _copied(value) for name, value in self._gradients.items()}

    @property
    @alone
    def outputs(self) -> Arrays:
        """The last step's outputs beside its loss, by the names of `training_step.output_names`.

        Raises:
            GradfuseError: the step has no such outputs; or no step was run yet, or the last one has failed.
        """
        names = self._step.output_names
        if not names or not self._has_run:
            why = "no step was run, or the last one has failed" if names else "the step gives nothing but its loss"
            raise GradfuseError(f"{_WHO}.outputs: {why}")
        values = self._last_binding.get_outputs()[-len(names) :]
        return {name: _copied(value) for name, value in zip(names, values, strict=True)}

    @property
    def learning_rate(self) -> float | tuple[float, ...]:
        """The learning rate, or a tuple with one per parameter group if the step has several.

        A number sets it for all groups, a sequence one per group.

        Raises:
            GradfuseError: the step has no optimizer.
            ArgumentError: what is set are no numbers, another number of them, or not all of them finite and at least 0.
        """
        found: float | tuple[float, ...] = self._get(LEARNING_RATE)
        return found

    @learning_rate.setter
    def learning_rate(self, value: float | Sequence[float]) -> None:
        self._set(LEARNING_RATE, value)

    @property
    def weight_decay(self) -> float | tuple[float, ...]:
        """The weight decay, set and read as `learning_rate`, of the parameter groups whose optimizer has one.

        Raises:
            GradfuseError: the step was made without it in `run_time`.
            ArgumentError: as for `learning_rate`.
        """
        found: float | tuple[float, ...] = self._get("weight_decay")
        return found

    @weight_decay.setter
    def weight_decay(self, value: float | Sequence[float]) -> None:
        self._set("weight_decay", value)

    @property
    def betas(self) -> tuple[float, ...] | tuple[tuple[float, ...], ...]:
        """The two betas of Adam and the like: a pair for all parameter groups that have them, or a pair for each.

        Raises:
            GradfuseError: the step was made without them in `run_time`.
            ArgumentError: what is set are no such pairs, or not all numbers are at least 0 and below 1.
        """
        found: tuple[float, ...] | tuple[tuple[float, ...], ...] = self._get("betas")
        return found

    @betas.setter
    def betas(self, value: Sequence[float] | Sequence[Sequence[float]]) -> None:
        self._set("betas", value)

    @property
    def eps(self) -> float | tuple[float, ...]:
        """The number that is added to denominators, otherwise as `weight_decay`."""
        found: float | tuple[float, ...] = self._get("eps")
        return found

    @eps.setter
    def eps(self, value: float | Sequence[float]) -> None:
        self._set("eps", value)

    @property
    def momentum(self) -> float | tuple[float, ...]:
        """The momentum of SGD and RMSprop, otherwise as `weight_decay`."""
        found: float | tuple[float, ...] = self._get("momentum")
        return found

    @momentum.setter
    def momentum(self, value: float | Sequence[float]) -> None:
        self._set("momentum", value)

    @property
    def alpha(self) -> float | tuple[float, ...]:
        """The smoothing of RMSprop, otherwise as `weight_decay`."""
        found: float | tuple[float, ...] = self._get("alpha")
        return found

    @alpha.setter
    def alpha(self, value: float | Sequence[float]) -> None:
        self._set("alpha", value)

    @property
    def rho(self) -> float | tuple[float, ...]:
        """The smoothing of Adadelta, from 0 to 1, otherwise as `weight_decay`."""
        found: float | tuple[float, ...] = self._get("rho")
        return found

    @rho.setter
    def rho(self, value: float | Sequence[float]) -> None:
        self._set("rho", value)

    @property
    def max_grad_norm(self) -> float:
        """The norm that gradients are clipped to: a positive number; infinity does not clip.

        Raises:
            GradfuseError: the step was made without it in `run_time`.
            ArgumentError: what is set is no positive number.
        """
        found: float = self._get("max_grad_norm")
        return found

    @max_grad_norm.setter
    def max_grad_norm(self, value: float) -> None:
        self._set("max_grad_norm", value)

    @property
    @alone
    def ort_values(self) -> dict[str, Any]:
        """The `onnxruntime.OrtValue` of each parameter, buffer, state and hyperparameter, by its name in the model.

        They are the session's own, not copies: later steps write into them.
        """
        values = self._values[self._side]
        if self._shared is None:
            return values
        return values | {name: value for name, value in self._shared.values.items() if name in self._shareable}

    @alone
    def state_dict(self, *, averaged: bool = False) -> Arrays:
        """Return copies of all parameters and buffers under the names of the torch module's `state_dict()`.

        They include tied names, frozen parameters and constant buffers, and those of a loss module, which begin with
        `loss.`.

        Args:
            averaged: whether to use the averages of the parameters instead; before the first average these are the
                parameters themselves.

        Raises:
            GradfuseError: the step was exported without averages; or an earlier step has failed between its updates.
        """
        self._require_whole("state_dict")
        step, averages = self._step, self._averages("state_dict") if averaged else {}

        def copied(source: str) -> npt.NDArray[Any]:
            if source in step.constants or source in averages:
                return np.array(step.constants[source] if source in step.constants else averages[source])
            return _copied(self.ort_values[source])

        return {name: copied(source) for name, source in step.state_dict_names.items()}

    @alone
    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Set parameters and buffers; the optimizer's state stays as it is.

        Args:
            state_dict: arrays or torch tensors, as `state_dict` or the torch module's `state_dict()` gives them.
            strict: whether every tensor must be there, under one of its names.

        Raises:
            ArgumentError: a name is unknown or missing, a type or shape differs, two tied names have different values,
                or a constant of the model has another value. Then nothing changes.
        """
        arrays = self._tensors_of(state_dict, "load_state_dict", strict)
        if self._device[0] == "cpu":
            # Views of `ort_values` would change while they are read.
            values = self.ort_values
            own = sorted(_extent(ort_values.array_of(values[name])) for name in arrays)
            arrays |= {name: np.array(array) for name, array in arrays.items() if _begins_within(array, own)}
        self._assign(arrays)

    @alone
    def save(
        self,
        path: str | os.PathLike[str],
        *,
        optimizer: bool = True,
        wait: bool = True,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        """Write a safetensors file to resume training from: at any time the old file or the new one is there, whole.

        It holds `state_dict()` and, under the names of the model's inputs, what resuming needs: the optimizer's state,
        buffers and the seed of dropout, and hyperparameters; in its metadata `step_count` and `extra`. The file is
        written beside `path`, synced to the disk, and renamed, so that neither a killed process nor a power cut leaves
        half of it.

        Args:
            path: the file.
            optimizer: False leaves out all but `state_dict()` and `extra`.
            wait: False returns as soon as everything is copied, and a thread writes the copies while training goes on.
                Until the file is there this takes the memory of all parameters, buffers and optimizer state once more:
                three times the parameters' with Adam. The next call of `step`, `evaluate`, `save`, `load` or `wait`
                raises an error of the thread. One file is written at a time: the next `save` waits for the previous
                one, and so does the end of the program.
            extra: what `load` is to return, such as the state of a random number generator: anything that JSON can
                hold; tuples come back as lists.

        Raises:
            ArgumentError: `path` is not a path, or JSON cannot hold `extra`.
            ModelError: the file cannot be written, or is the one of the step; or an earlier `save(wait=False)` has
                failed.
            GradfuseError: safetensors is not installed; or an earlier step has failed between its updates.
        """
        where = f"{_WHO}.save"
        require_path(path, where)
        text = checkpoints.text_of(self.step_count if optimizer else None, {} if extra is None else extra, where)
        tensor_files.safetensors_numpy(where)
        files.require_free(path, self._identities)
        self._require_whole("save")
        self._background.wait()
        if wait:
            checkpoints.write(path, self._tensors(optimizer), text, self._identities, where)
            return
        tensors, kept = self._tensors(optimizer, copy=True), list(self._identities)
        # Relative to the folder of now.
        path = os.path.abspath(path)
        self._background.start(lambda: checkpoints.write(path, tensors, text, kept, where))

    @alone
    def save_evaluation_model(self, path: str | os.PathLike[str], *, averaged: bool = False) -> None:
        """Write the module in eval mode as an ONNX file, with the current parameters and buffers.

        Its inputs and outputs are those of `evaluate`; any runtime can serve it. The file is written whole or not at
        all; beyond 2 GB the tensors are in `<path>.data`.

        Args:
            path: the file.
            averaged: whether to use the averages of the parameters instead.

        Raises:
            ArgumentError: `path` is no path.
            GradfuseError: the step was exported without an evaluation model, or its file is missing; or without
                averages; or an earlier step has failed between its updates.
            ModelError: the file cannot be written, or is the one of the step.
        """
        require_path(path, f"{_WHO}.save_evaluation_model")
        self._require_whole("save_evaluation_model")
        if self._plain is not None:
            self._save_plain_evaluation_model(path, self._plain[1])
            return
        model = self._whole_evaluation_model("save_evaluation_model")
        if self._frozen is not None:
            self._frozen.put_back(model)
        graph, averages = model.graph, self._averages("save_evaluation_model") if averaged else {}
        values = self.ort_values
        for value in [value for value in graph.inputs if value.name in values]:
            name = str(value.name)
            array = averages[name] if name in averages else _copied(values[name])
            value.const_value = ir.tensor(array, name=value.name)
            graph.inputs.remove(value)
            graph.register_initializer(value)
        writing.save(model, path, inputs=self._identities)

    def wait(self) -> None:
        """Wait until `save(wait=False)` has written its file to the disk.

        Raises:
            ModelError: it could not be written.
        """
        self._background.wait()

    @alone
    def load(self, path: str | os.PathLike[str]) -> dict[str, Any]:
        """Read a safetensors file: one that `save` wrote, or the torch module's `state_dict()`.

        With the optimizer's state, resuming is bit-identical, given the same model, kernels and number of threads.
        Without it, the optimizer starts as it does in `training_step`, and so do buffers that are not in
        `state_dict()`; `step_count` becomes 0.

        Returns:
            What `save` was given as `extra`; otherwise an empty dictionary.

        Raises:
            ArgumentError: `path` is no path.
            ModelError: the file cannot be read, or does not hold what the step needs (as for `load_state_dict`, or
                only a part of the optimizer's state). Nothing is changed then. Or an earlier `save(wait=False)` has
                failed.
            GradfuseError: safetensors is not installed.
        """
        where = f"{_WHO}.load"
        require_path(path, where)
        self._background.wait()
        tensors, step_count, extra = self._read_checkpoint(path, where)
        named = set(self._step.state_dict_names.values())
        own = [name for name in self.ort_values if name not in named]
        try:
            stored = {name: tensors.pop(name) for name in own if name in tensors}
            if stored and len(stored) < len(own):
                missing = next(name for name in own if name not in stored)
                raise ArgumentError(f"{_WHO}.load: {missing!r} is missing; expected all of the optimizer's state")
            loaded = self._tensors_of(tensors, "load", True)
            loaded |= {name: self._fitting(name, array, "load") for name, array in stored.items()}
        except ArgumentError as error:
            raise ModelError(f"{os.fspath(path)}: {error}") from error
        if not stored and own:
            begin = self._beginning if set(own) <= self._beginning.keys() else self.training_step.initial_values
            loaded |= {name: self._fitting(name, begin[name], "training_step") for name in own}
        self._assign(loaded, step_count - self._runs)
        self._is_torn = False
        return extra

    def _read_checkpoint(self, path: str | os.PathLike[str], where: str) -> tuple[Arrays, int, dict[str, Any]]:
        """Return the tensors of a checkpoint, the steps done, and the user's `extra`."""
        return checkpoints.read(path, where)

    def _read_files(self, paths: Sequence[str]) -> None:
        """Note which files the step was read from."""
        self._files = list(paths)
        self._identities |= {path: files.identity(path) if os.path.exists(path) else "" for path in paths}

    def _step_of_file(self) -> TrainingStep:
        """Return the step with its values, which the session does not keep if they are in a file."""
        self._require_same_files()
        return TrainingStep.load(self._files[0]) if self._plain is None else load_plain(self._files[0]).step

    def _require_same_files(self) -> None:
        """Refuse files that are not those that the session was made from, such as those of a newer step."""
        for path, identity in self._identities.items():
            if identity and os.path.exists(path) and files.identity(path) != identity:
                raise ModelError(f"{_WHO}: {path} has changed since; expected the file that the session was made from")

    def _averages(self, method: str) -> Arrays:
        """Return copies of the averages by the names of the parameters, in their types; none before the first one."""
        step, values = self._step, self.ort_values
        counter = step.own_name(N_AVERAGED)
        if counter not in self._optimizer_state:
            raise GradfuseError(f"{_WHO}.{method}: the step has no averages; expected one exported with `average`")
        if not values[counter].numpy():
            return {}
        names = {name: step.own_name(f"{name}.{AVERAGE}") for name in values}
        return {
            name: _copied(values[other]).astype(self._inputs[name].dtype, copy=False)
            for name, other in names.items()
            if other in self._optimizer_state
        }

    def _evaluation_model(self, method: str) -> onnx.ModelProto:
        model = self._step.evaluation_model
        if model is None:
            raise _no_evaluation_model(method)
        return model

    def _whole_evaluation_model(self, method: str) -> ir.Model:
        model = ir.from_proto(self._evaluation_model(method))
        if tensors.data_files(model):
            self._require_same_files()
        return model

    def _evaluation_types(self) -> tuple[dict[str, TensorType], list[str]]:
        """Return the inputs of the evaluation model, and the names of its outputs."""
        if self._plain is not None:
            if self._plain[1] is None:
                raise _no_evaluation_model("evaluate")
            inputs, outputs = _types(self._plain[1])
            return inputs, list(outputs)
        graph = self._evaluation_model("evaluate").graph
        frozen = self._frozen or ()
        types = {value.name: TensorType.of(value) for value in graph.input if value.name not in frozen}
        return types, [value.name for value in graph.output]

    def _evaluation_session(self) -> Any:
        if self._plain is not None and self._plain[1] is not None:
            if self._plain[1].has_files:
                self._require_same_files()
            return self._plain_session(self._plain[1])
        return self._inference_session(self._whole_evaluation_model("evaluate"))

    def _save_plain_evaluation_model(self, path: str | os.PathLike[str], model: PlainModel | None) -> None:
        method = "save_evaluation_model"
        if model is None:
            raise _no_evaluation_model(method)
        folder = os.path.dirname(os.path.abspath(model.path))
        if model.has_files and os.path.dirname(os.path.realpath(path)) != os.path.realpath(folder):
            what = f"{os.fspath(path)} is in another folder than the weights of {model.path}"
            raise GradfuseError(f"{_WHO}.{method}: {what}; expected a path beside them, or onnx and onnx_ir installed")
        if model.has_files:
            self._require_same_files()
        values = self.ort_values
        kept = {name: _copied(values[name]) for name in model.inputs if name in values}
        files.write_file(path, with_values(model, kept), self._identities)

    def _keep_pairs(self, kept: bool) -> None:
        """Keep onnxruntime from fusing QuantizeLinear and DequantizeLinear pairs into integer products, if asked."""
        if kept:
            # Products of 8-bit integers overflow on x86-64 processors without VNNI.
            self._options.add_session_config_entry("session.disable_quant_qdq", "1")

    def _plain_session(self, model: PlainModel) -> Any:
        """Return a session of a model that was read without onnx."""
        if model.has_files:
            find_files_in(os.path.dirname(os.path.abspath(model.path)), self._options)
        return session_of(model.message, _WHO, self._options, self._providers)

    def _tensors(self, optimizer: bool, *, copy: bool = False) -> Arrays:
        """Return what a checkpoint holds, by name; unless copied it may be the memory that the next step changes."""
        step, values = self._step, self.ort_values
        needed = set(values) if optimizer else {*step.state_dict_names.values()} & set(values)
        arrays = {name: _copied(values[name]) if copy else ort_values.array_of(values[name]) for name in needed}
        by_name = {
            name: step.constants[source] if source in step.constants else arrays[source]
            for name, source in step.state_dict_names.items()
        }
        # Buffers too: some are not part of the module's state_dict.
        return by_name | arrays if optimizer else by_name

    def _default_options(self) -> Any:
        options = session_options()
        if library.find_library() is None:
            return options
        if self._providers == ["CPUExecutionProvider"]:
            library.register_with_memory_pool(options)
            weakref.finalize(self, library.trim_memory_pool).atexit = False
        else:
            library.register(options)
        return options

    def _training_session(self) -> tuple[Any, frozenset[str], str | None]:
        """Return `_updating_session` of the step."""
        return self._updating_session(self._step.model)

    def _updating_session(self, proto: onnx.ModelProto) -> tuple[Any, frozenset[str], str | None]:
        """Return a session of a model with updates, and `in_place` and `begun` of its `Ordered` model."""
        from gradfuse.training.in_place import BARRIER, with_ordered_updates
        from gradfuse.training.tied_gradients import ADD

        if self._providers == ["CPUExecutionProvider"]:
            ordered = with_ordered_updates(proto, self._step.own_names)
            try:
                if ordered.in_place:
                    return self._inference_session(ordered.model), ordered.in_place, ordered.begun
            except ModelError as error:
                # Options without gradfuse's library: its function bodies run.
                if not any(operator in str(error) for operator in (BARRIER, ADD)):
                    raise
        return self._inference_session(ir.from_proto(proto)), frozenset(), None

    def _inference_session(self, model: ir.Model) -> Any:
        from gradfuse.checking.execution import inference_session

        lifted = () if self._frozen is None else self._frozen.lift(model)
        session = inference_session(model, _WHO, self._options, self._providers)
        self._lifted[id(session)] = lifted
        return session

    def _no_frozen_weights(self) -> Any:
        """Return an empty `FrozenWeights`; None where weights are no inputs: on devices, and without onnx_ir."""
        if self._plain is not None or self._providers != ["CPUExecutionProvider"]:
            return None
        from gradfuse.training.frozen import FrozenWeights

        return FrozenWeights()

    def _without_frozen(self, proto: onnx.ModelProto | None) -> onnx.ModelProto | None:
        """Return an evaluation model in which weights that are frozen in the step's model too are inputs."""
        if proto is None:
            return None
        model = ir.from_proto(proto)
        self._frozen.lift(model, known=True)
        rest: onnx.ModelProto = ir.to_proto(model)
        return rest

    def _new_binding(self, session: Any) -> Any:
        """Return a binding of a session, with the frozen weights that it reads."""
        binding = session.io_binding()
        if self._frozen is not None:
            self._frozen.bind(binding, self._lifted.get(id(session), ()))
        return binding

    def _binding(self, read: Mapping[str, Any], written: Mapping[str, Any], changed: Iterable[str]) -> Any:
        """Return a binding of a step that reads some values and writes what changes into others."""
        binding = self._new_binding(self._session)
        for name, value in read.items():
            binding.bind_ortvalue_input(name, value)
        for name in changed:
            binding.bind_ortvalue_output(self._step.own_name(name + UPDATED_SUFFIX), written[name])
        for name, value in self._gradients.items():
            binding.bind_ortvalue_output(self._step.own_name(name + GRADIENT_SUFFIX), value)
        binding.bind_ortvalue_output(self._step.own_name(LOSS), self._loss)
        if self._begun is not None:
            binding.bind_ortvalue_output(*self._begun)
        return binding

    def _allocate(self, name: str, tensor: TensorType, device: tuple[str, int]) -> Any:
        shape = [size for size in tensor.shape if isinstance(size, int)]
        if len(shape) < len(tensor.shape):
            raise ModelError(f"{_WHO}: {name!r} is {tensor} in the model of the step; expected sizes that are known")
        return ort_values.allocate(self._new_value, shape, tensor.dtype, device, f"{_WHO}: {name!r}")

    def _assign(self, arrays: Mapping[str, npt.NDArray[Any]], steps_before: int | None = None) -> None:
        """Set values, and how many steps were done before those of this session if that is given."""
        # What has to be copied is copied before anything is changed.
        values = self.ort_values
        copies = [(values[name], contiguous(array)) for name, array in arrays.items()]

        def write() -> None:
            for value, array in copies:
                ort_values.write(value, array)
            if steps_before is not None:
                self._steps_before = steps_before

        try:
            write()
        except BaseException:
            # Of a signal's handler: all is written before it goes on.
            write()
            raise

    def _values_of(self, other: TrainingSession) -> dict[str, Any]:
        """Return the tensors that this session has in common with another one, and those that share with it."""
        if self._device != other._device:
            raise ArgumentError(
                f"{_WHO}: share_with is on {other._device}; expected {self._device}, as the providers say"
            )
        members = [other] if other._shared is None else other._shared.members
        require_common(f"{_WHO}: share_with", self._sides(), [one._sides() for one in members])
        values = other.ort_values if other._shared is None else other._shared.values
        return {name: values[name] for name in self._shareable if name in values}

    def _sides(self) -> Sides:
        types = {name: self._inputs[name] for name in self._inputs if name in self._shareable}
        return Sides(types, tuple(self._step.constants), self._changed)

    def _share(self, other: TrainingSession, given: Mapping[str, Any]) -> None:
        if other._shared is None:
            values = other.ort_values
            other._shared = Shared(other, {name: values[name] for name in other._shareable})
        self._shared = other._shared
        own = self._values[0]
        self._shared.join(self, {name: own[name] for name in self._shareable if name not in given})

    @property
    def _side(self) -> int:
        """Which of the two sets of tensors is as it is now."""
        return self._runs % 2

    @property
    def _runs(self) -> int:
        """The steps that this session has done; whether they are even tells which of the two sets is next."""
        before, is_open = self._progress
        # Handlers run before or after onnxruntime, never within: with a loss, the step has run to its end.
        return before + int(is_open and ort_values.array_of(self._loss).tobytes() != self._no_loss.tobytes())

    def _run_and_count(self, feeds: Arrays) -> None:
        """Run the step; it is done as a whole or not at all, whatever a signal's handler raises and when."""
        runs = self._runs
        # Each assignment is one instruction of the interpreter, so that no handler runs in the middle of it.
        self._progress = runs, False
        ort_values.write(self._loss, self._no_loss)
        if self._begun is not None:
            self._begun[1].update_inplace(self._not_begun)
        self._progress = runs, True
        try:
            binding = self._last_binding = self._bindings[runs % 2]
            self._bind_shared(binding, self._values[(runs + 1) % 2])
            for name in self._step.output_names:
                # Anew in each step: what it gave last may be of another size.
                binding.bind_output(name)
            self._run(self._session, binding, feeds)
        except Exception as error:
            if not is_of_onnxruntime(error):
                raise
            self._progress = runs, False
            self._is_torn = self._begun is not None and self._begun[1].numpy().tobytes() != self._not_begun.tobytes()
            raise _not_run("step", error) from error
        self._progress = runs + 1, False

    def _bind_shared(self, binding: Any, written: Mapping[str, Any]) -> None:
        """Bind what other sessions have in common with this one, as they left it."""
        if self._shared is None:
            return
        values = {name: value for name, value in self._shared.values.items() if name in self._shareable}
        for name, value in values.items():
            binding.bind_ortvalue_input(name, value)
            if name in self._changed:
                output = written[name] if name in self._written_elsewhere else value
                binding.bind_ortvalue_output(self._step.own_name(name + UPDATED_SUFFIX), output)
        self._shared.begin(self, {name: written[name] for name in self._written_elsewhere if name in values})

    def _run(self, session: Any, binding: Any, feeds: Arrays) -> None:
        for name, array in feeds.items():
            ort_values.bind(binding, name, array)
        session.run_with_iobinding(binding)

    def _require_no_step(self) -> None:
        if self._is_stepping if self._shared is None else self._shared.is_stepping:
            raise GradfuseError(
                f"{_WHO}.step: is called within a step, by a signal's handler; expected a call after it"
            )

    def _require_whole(self, method: str) -> None:
        """Refuse parameters of which a step that failed has updated only some."""
        sharing = [self] if self._shared is None else self._shared.members
        if any(one._is_torn for one in sharing):
            raise GradfuseError(
                f"{_WHO}.{method}: a step has failed after it had updated some parameters; "
                "expected `load` of a checkpoint first, or a new session"
            )

    def _batch(self, inputs: Any, targets: Any) -> Arrays:
        """Return the batch of a step by names, checked."""
        self._background.raise_error()
        feeds = self._batch_of(inputs, self._step.input_names, "step", "inputs", self._inputs)
        feeds |= self._batch_of(targets, self._step.target_names, "step", "targets", self._inputs)
        require_shapes(f"{_WHO}.step", feeds, self._inputs)
        require_in_range(f"{_WHO}.step", feeds, self._step.index_ranges)
        return feeds

    def _require_filled(
        self, where: str, feeds: Arrays, known: Mapping[str, TensorType], *, evaluates: bool = False
    ) -> None:
        """Refuse axes of size 0 that kernels of onnxruntime are not made for."""
        if all(array.size for array in feeds.values()):
            return
        filled = self._filled_dimensions(evaluates)
        for name, array in feeds.items():
            for axis, size in enumerate(array.shape):
                if size == 0 and known[name].shape[axis] in filled:
                    raise ArgumentError(
                        f"{where}: {name!r} is {TensorType(array.dtype, array.shape)}; expected at least one element "
                        f"along axis {axis}, as onnxruntime's kernels are not made for none"
                    )

    def _filled_dimensions(self, evaluates: bool) -> Collection[str | None]:
        """Return the names of dimensions of the batch that may not be 0 in a step, or when it evaluates."""
        if evaluates not in self._filled:
            if self._plain is not None:
                dims = {dim for known in self._inputs.values() for dim in known.shape if not isinstance(dim, int)}
                self._filled[evaluates] = dims
            else:
                model = self._evaluation_model("evaluate") if evaluates else self.training_step.model
                self._filled[evaluates] = batch_checks.filled_dimensions(
                    ir.from_proto(model), kernels=self._has_kernels
                )
        return self._filled[evaluates]

    def _is_empty(self, feeds: Arrays) -> bool:
        """Whether no input of a batch has an element."""
        return not any(feeds[name].size for name in self._step.input_names)

    def _batch_of(
        self, given: Any, names: Sequence[str], method: str, what: str, known: Mapping[str, TensorType]
    ) -> Arrays:
        """Return a part of the batch by names."""
        where = f"{_WHO}.{method}"
        values = leaves_of_call(self._step.nesting.get(what) or flat(names), given, f"{where}: {what}")
        return {name: contiguous(array_like(known[name], values[name], f"{where}: {name!r}")) for name in names}

    def _hyperparameters_of(self, hyperparameter: str) -> list[str]:
        """Return the names of the inputs that hold a hyperparameter, in the order of the parameter groups."""
        names = [name for name in self._step.hyperparameters if self._held_by(name) == hyperparameter]
        if not names:
            why = "no optimizer"
            if self._step.hyperparameters:
                why = f"no such input; expected a step with {hyperparameter!r} in run_time"
            raise GradfuseError(f"{_WHO}.{hyperparameter}: the step has {why}")
        return names

    def _held_by(self, name: str) -> str:
        """Return the hyperparameter that an input holds."""
        named = {other: own for own, other in self._step.own_names.items()}
        return hyperparameter_of(named.get(name, name))

    @alone
    def _get(self, hyperparameter: str) -> Any:
        values = [self.ort_values[name].numpy().tolist() for name in self._hyperparameters_of(hyperparameter)]
        values = [tuple(value) if isinstance(value, list) else value for value in values]
        return values[0] if len(values) == 1 else tuple(values)

    @alone
    def _set(self, hyperparameter: str, value: Any) -> None:
        names, one = self._hyperparameters_of(hyperparameter), HYPERPARAMETERS[hyperparameter].shape
        where, kind = f"{_WHO}: {hyperparameter}", "two numbers" if one else "a number"
        wanted = kind if len(names) == 1 else f"{kind} or {'two' if one else 'one'} each of {len(names)}"
        array = as_array(value, where, wanted)
        if array.dtype.kind not in "fiu" or array.shape not in (one, (len(names), *one)):
            raise ArgumentError(f"{where} is {in_short(value)}; expected {wanted}")
        with np.errstate(over="ignore"):
            array = np.broadcast_to(array, (len(names), *one)).astype(self._inputs[names[0]].dtype)
        require_values(hyperparameter, array, f"{where} is {in_short(value)}")
        self._assign(dict(zip(names, map(np.asarray, array), strict=True)))

    def _tensors_of(self, state_dict: Mapping[str, Any], method: str, strict: bool) -> Arrays:
        """Return parameters and buffers by their names in the model, all checked."""
        step, where = self._step, f"{_WHO}.{method}"
        if not isinstance(state_dict, Mapping):
            got = type(state_dict).__name__
            raise ArgumentError(f"{where}: state_dict is {got}; expected a mapping of names to arrays")
        unknown = [name for name in state_dict if name not in step.state_dict_names]
        if unknown:
            raise ArgumentError(f"{where}: {in_short(unknown[0])} is unknown; expected the names of state_dict()")
        found = {step.state_dict_names[name] for name in state_dict}
        missing = [name for name, source in step.state_dict_names.items() if source not in found]
        if strict and missing:
            raise ArgumentError(f"{where}: {missing[0]!r} is missing; expected all names of state_dict()")
        arrays: Arrays = {}
        for name, source in step.state_dict_names.items():
            if name not in state_dict:
                continue
            known = step.constants.get(source)
            wanted = self._inputs[source] if known is None else TensorType(known.dtype, known.shape)
            array = array_like(wanted, state_dict[name], f"{where}: {name!r}")
            if known is not None:
                if not (array.dtype == known.dtype and _are_equal(array, known)):
                    raise ArgumentError(
                        f"{where}: {name!r} is a constant of the model; expected its value, or a step made with "
                        "frozen_inputs=True"
                    )
                continue
            array = self._fitting(source, array, method, name)
            if source in arrays and not _are_equal(arrays[source], array):
                raise ArgumentError(f"{where}: {name!r} differs from {source!r}; expected equal values, as tied")
            arrays[source] = array
        return arrays

    def _fitting(self, name: str, value: Any, method: str, shown: str | None = None) -> npt.NDArray[Any]:
        """Return the value of an input of the model, checked."""
        where, known, shown = f"{_WHO}.{method}", self._inputs[name], shown or name
        array = array_like(known, value, f"{where}: {shown!r}")
        require_shapes(where, {shown: array}, {shown: known})
        if name in self._step.hyperparameters:
            require_values(self._held_by(name), array, f"{where}: {shown!r} is {array}")
        elif name in self._optimizer_state and name in map(self._step.own_name, COUNTS) and array < 0:
            raise ArgumentError(f"{where}: {shown!r} is {array}; expected a count from 0 on")
        return array


def _has_onnx() -> bool:
    return all(importlib.util.find_spec(name) is not None for name in ("onnx", "onnx_ir"))


def _types(model: PlainModel) -> tuple[dict[str, TensorType], dict[str, TensorType]]:
    """Return the inputs and outputs of a model."""
    inputs, outputs = (
        {name: TensorType.of_plain(name, value, _WHO) for name, value in of.items()}
        for of in (model.inputs, model.outputs)
    )
    return inputs, outputs


def _are_equal(one: npt.NDArray[Any], other: npt.NDArray[Any]) -> bool:
    """Whether arrays of one type have the same numbers, NaN included."""
    return np.array_equal(one, other, equal_nan=one.dtype.kind in "fc" or ort_values.is_bfloat16(one.dtype))


def _extent(array: npt.NDArray[Any]) -> tuple[int, int]:
    """Return where the memory of an array without gaps begins and ends."""
    begin = array.__array_interface__["data"][0]
    return begin, begin + array.nbytes


def _begins_within(array: npt.NDArray[Any], extents: Sequence[tuple[int, int]]) -> bool:
    """Whether the first element of an array is within one of these, which are sorted and apart."""
    begin = array.__array_interface__["data"][0]
    place = bisect.bisect_right(extents, begin, key=lambda extent: extent[0]) - 1
    return place >= 0 and begin < extents[place][1]


def _data_files(step: TrainingStep) -> set[str]:
    """Return the files that have weights of a step's models."""
    tensors = (t for model in (step.model, step.evaluation_model) if model is not None for t in model.graph.initializer)
    return {entry.value for tensor in tensors for entry in tensor.external_data if entry.key == "location"}


def _no_evaluation_model(method: str) -> GradfuseError:
    wanted = "one exported with it, and its file beside the step's"
    return GradfuseError(f"{_WHO}.{method}: the step has no evaluation model; expected {wanted}")


def _device(provider: Any) -> tuple[str, int]:
    name, options = (provider, {}) if isinstance(provider, str) else provider
    return _DEVICES.get(name, "cpu"), int(options.get("device_id", 0)) if name in _DEVICES else 0


def _not_run(method: str, error: Exception) -> ModelError:
    """Return what is raised in the place of one of onnxruntime's exceptions, whose classes share no public base."""
    return ModelError(f"{_WHO}.{method}: onnxruntime cannot run the model: {reason(error)}")


def _copied(value: Any) -> npt.NDArray[Any]:
    # On the CPU newer versions of onnxruntime give a view of the memory that a later step writes into.
    return np.array(ort_values.array_of(value))


def _no_result(dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Return a number that no arithmetic gives: a signalling NaN, shape ()."""
    bits = {2: 0x7D00, 4: 0x7FA00000, 8: 0x7FF4000000000000}[dtype.itemsize]
    if ort_values.is_bfloat16(dtype):
        bits = 0x7FA0
    return np.array(bits, f"uint{8 * dtype.itemsize}").view(dtype)
