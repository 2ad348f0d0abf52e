"""Data-parallel training: ranks compute gradients of their shares in onnxruntime, and average them.

Each rank is a process with a batch of its own. `torch.distributed` adds the gradients up, with gloo on CPUs and NCCL on
GPUs, and every rank makes the same update. Importing this module imports torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import math
import os
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import onnx
import torch
import torch.distributed as dist
from torch import Tensor

from gradfuse.errors import ArgumentError, GradfuseError, ModelError, one_line
from gradfuse.models.arrays import Arrays
from gradfuse.models.memory import collection_paused
from gradfuse.models.ort_values import is_bfloat16
from gradfuse.models.tensors import serialized
from gradfuse.runtime import is_of_onnxruntime, reason
from gradfuse.training.arguments import TensorType, in_short, require_path
from gradfuse.training.session import TrainingSession, alone
from gradfuse.training.splitting import Halves, fingerprint, split
from gradfuse.training.step import DROPOUT_SEED, LOSS, MICRO_STEP, UPDATED_SUFFIX, TrainingStep, load_with_files

__all__ = ["DataParallelSession", "LostRankError"]

_R = TypeVar("_R")

_WHO = "DataParallelSession"
_REDUCTIONS = ("mean", "sum")
_SEEDS_APART = 0x4F1BBCDD
"""Between the seeds of two ranks: the golden section of their range, whose multiples are far from each other."""
_ALIGNMENT = 64
"""Bytes; each gradient begins at a multiple."""
_KINDS = ("step", "any_rank", "load", "load_state_dict")
"""What ranks do together: a call of one meets the same call of all others."""
_OPEN = "a call has not come to its end on this rank, so that ranks may differ"


class LostRankError(GradfuseError):
    """Another rank has ended, or does not answer in time. The session can no longer train."""


@dataclasses.dataclass(frozen=True)
class _Report:
    """What a rank tells all others in a call: numbers, as one tensor of float64 holds them."""

    kind: int
    done: int
    failed: bool = False
    weight: float = 0.0
    """What its loss and gradients count for; NaN: nothing tells, but they count alike where shapes are the same."""
    loss: float = 0.0
    shapes: int = 0
    """A checksum of the shapes of its batch; 0 where it has none."""
    hyperparameters: int = 0
    """A checksum of their values, such as its learning rates."""
    flag: bool = False

    @classmethod
    def of(cls, numbers: Sequence[float]) -> _Report:
        kind, done, failed, weight, loss, shapes, hyperparameters, flag = numbers
        return cls(int(kind), int(done), bool(failed), weight, loss, int(shapes), int(hyperparameters), bool(flag))


class _Bucket:
    """Tensors of one type, in one piece of memory each rank, that are added up over ranks at once.

    Args:
        types: the tensors by name.
        dtype: their type; 16 bits are added up in float32.
        device: where they are.
        keeps: whether several calls are added up before the ranks are.
    """

    def __init__(self, types: Mapping[str, TensorType], dtype: torch.dtype, device: torch.device, keeps: bool) -> None:
        sizes = {name: math.prod(int(size or 0) for size in known.shape) for name, known in types.items()}
        step = _ALIGNMENT // dtype.itemsize
        starts = dict(zip(sizes, np.cumsum([0, *(-(-size // step) * step for size in sizes.values())]), strict=False))
        count = max(1, sum(-(-size // step) * step for size in sizes.values()))
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        self._written = torch.zeros(count, dtype=dtype, device=device)
        self.total = self._written if wide == dtype and not keeps else torch.zeros(count, dtype=wide, device=device)
        self._read = self.total if wide == dtype else self._written
        self.written, self.read = (
            {
                name: flat[int(starts[name]) : int(starts[name]) + size].view([int(n or 0) for n in types[name].shape])
                for name, size in sizes.items()
            }
            for flat in (self._written, self._read)
        )

    def add(self, factor: float | None) -> None:
        """Add what was written, times a factor, to the total; None: nothing was."""
        if self.total is self._written:
            if factor is None:
                self.total.zero_()
            elif factor != 1:
                self.total.mul_(factor)
        elif factor is not None:
            self.total.add_(self._written, alpha=factor)

    def finish(self) -> None:
        """Let what is read be the total, and begin another one."""
        if self._read is not self.total:
            self._read.copy_(self.total)

    def begin(self) -> None:
        """Begin another total."""
        if self.total is not self._written:
            self.total.zero_()


class DataParallelSession(TrainingSession):
    """Trains one step on many processes (ranks), each with its own share of every batch.

    Each rank computes loss and gradients of its share in onnxruntime. They are averaged over all ranks, each weighted
    by what its loss is a mean over, and every rank makes the same update: parameters are those of one process that has
    the whole batch, except for rounding. It works like `TrainingSession`, with these differences:

    - All ranks begin with the first rank's parameters, buffers, optimizer state and hyperparameters.
    - Running statistics, as of batch normalisation, are averaged over ranks likewise; each rank normalises with the
      statistics of its share. Integer buffers are taken from the first rank that has rows.
    - Dropout and other draws differ between ranks.
    - `max_grad_norm` clips by the norm of the averaged gradients, and `accumulate` adds up on each rank: the ranks
      exchange gradients once an update. Gradients of 16 bits are added up in float32.
    - `outputs` are those of this rank's share. Without an optimizer in the step, `gradients` are the averaged ones.
    - `save` and `save_evaluation_model` write on the first rank alone.

    Call `step`, `load`, `load_state_dict` and `any_rank` on all ranks, in the same order. Everything else is local. If
    a rank's batch is refused, every rank raises, and nothing changes. After a `LostRankError` the session is as it was
    before the call, except that accumulated gradients are lost: it can only be saved.

    Args:
        step: a step, or the path of one that `TrainingStep.save` wrote, the same on every rank. On ranks other than the
            first it may be None: the first rank sends them its own.
        process_group: the group of `torch.distributed`; None: all processes.
        providers: as for `TrainingSession`.
        session_options: likewise; None: as there, with the cores of a machine divided by `LOCAL_WORLD_SIZE`, which
            torchrun sets.
        reduction: how the loss reduces its rows, "mean" or "sum". Losses and gradients of ranks are averaged or summed.
        timeout: after how many seconds without an answer another rank is lost; None: the group's timeout.

    Raises:
        ArgumentError: an argument is not accepted, or the ranks have different steps.
        ModelError: as for `TrainingSession`, or the step has no gradients that could be averaged.
        GradfuseError: likewise, or there is no process group, the step carries state from call to call, or another rank
            has failed.
        LostRankError: another rank has ended.

    """

    def __init__(
        self,
        step: TrainingStep | str | os.PathLike[str] | None,
        process_group: Any = None,
        *,
        providers: Sequence[Any] | None = None,
        session_options: Any = None,
        reduction: str = "mean",
        timeout: float | None = None,
    ) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise GradfuseError(f"{_WHO}: there is no process group; expected torch.distributed.init_process_group()")
        self._group: Any = dist.group.WORLD if process_group is None else process_group
        self._rank, self._world = dist.get_rank(self._group), dist.get_world_size(self._group)
        if self._rank < 0:
            raise ArgumentError(f"{_WHO}: this process is not in process_group; expected a group that it belongs to")
        if timeout is not None and not (isinstance(timeout, int | float) and 0 < timeout < math.inf):
            raise ArgumentError(f"{_WHO}: timeout is {in_short(timeout)}; expected a positive number of seconds")
        if reduction not in _REDUCTIONS:
            raise ArgumentError(f"{_WHO}: reduction is {in_short(reduction)}; expected 'mean' or 'sum'")
        self._waiting = () if timeout is None else (datetime.timedelta(seconds=timeout),)
        self._sums = reduction == "sum"
        self._lost = ""
        """Why no other rank can be reached any more."""
        self._is_open = False
        """Whether a call has not come to its end, so that ranks may differ."""
        self._pending = 0
        """The calls since the last update."""
        self._updates = 0
        self._has_averaged = False
        self._update: Any = None
        self._update_bindings: list[Any] = []
        self._buckets: list[_Bucket] = []
        self._statistics: list[_Bucket] = []
        self._counts: dict[str, Tensor] = {}
        """Buffers that are no floats, as a step gives them."""

        problem: GradfuseError | None = None
        files: list[str] = []
        try:
            if step is None and self._rank == 0:
                raise ArgumentError(f"{_WHO}: step is None on the first rank; expected a TrainingStep or a path there")
            if isinstance(step, str | os.PathLike):
                with collection_paused():
                    step, files = load_with_files(step)
            if not isinstance(step, TrainingStep | None):
                raise ArgumentError(f"{_WHO}: step is {type(step).__name__}; expected a TrainingStep or a path")
        except GradfuseError as error:
            problem = error
        absent = self._told(step is None, problem)
        given = step if isinstance(step, TrainingStep) else None
        step = self._sent_by_first(given) if any(absent) else given
        assert step is not None
        made = ""
        try:
            self._halves = self._split(step)
            super().__init__(self._halves.step, providers, session_options=session_options)
            made = fingerprint(step)
        except GradfuseError as error:
            problem = error
        others = self._told((made, reduction), problem)
        for rank, other in enumerate(others):
            if other != others[0]:
                what = "step" if other[0] != others[0][0] else "reduction"
                raise ArgumentError(f"{_WHO}: rank {rank} has another {what} than rank 0; expected one for all ranks")
        self._whole = step if not files else None
        self._read_files(files)
        self._synchronize()

    @property
    def rank(self) -> int:
        """Which rank of the group this process is, from 0 on."""
        return self._rank

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return self._world

    @property
    def training_step(self) -> TrainingStep:
        """The step, with the values that training started from: the argument, or what is read from its path again.

        Raises:
            ModelError: the file cannot be read, or is not the one that the session was made from.
        """
        return self._step_of_file() if self._whole is None else self._whole

    @alone
    def step(self, inputs: Any, targets: Any = None, *, weight: float | None = None) -> float:
        """Run one step on all ranks, and return the loss of the whole batch.

        Args:
            inputs: this rank's share of the batch, as for `TrainingSession.step`. Numbers of rows may differ between
                ranks if the step was exported with a dynamic batch. None, or no rows: this rank contributes nothing.
            targets: likewise.
            weight: the weight of this share's loss: what its mean divides by, such as a number of labels. None: with
                one target, the number of its elements without those that the loss ignores; otherwise the size that all
                tensors of the batch have in common. If there is none, shares of one shape count equally, and others are
                refused. A loss with class weights needs the sum of the weights of its labels.

        Raises:
            ArgumentError: as for `TrainingSession.step`; the weight is unknown; no rank has rows; or hyperparameters
                differ.
            ModelError: onnxruntime fails to run the step.
            GradfuseError: another rank has failed, or is at another call. Then nothing changes, on any rank.
            LostRankError: another rank has ended, or does not answer in time.
        """
        self._require_no_step()
        self._require_usable("step")
        report = _Report(_KINDS.index("step"), self.step_count, hyperparameters=self._checksum_of_hyperparameters())
        problem: GradfuseError | None = None
        self._has_run = self._has_averaged = False
        try:
            self._is_stepping = True
            with self._opened():
                try:
                    report = self._run_share(inputs, targets, weight, report)
                except GradfuseError as error:
                    problem, report = error, dataclasses.replace(report, failed=True)
                with self._unchanged():
                    reports = self._meet(report, problem)
                return self._average_and_update(reports)
        finally:
            # Not by __setattr__, a call that a signal's handler may end before it has done anything.
            self.__dict__["_is_stepping"] = False

    @alone
    def any_rank(self, flag: bool) -> bool:
        """Return whether a flag is true on any rank, on all of them: whether one was asked to stop, or has more data.

        Raises:
            GradfuseError: another rank is at another call.
            LostRankError: another rank has ended, or does not answer in time.
        """
        self._require_usable("any_rank")
        report = _Report(_KINDS.index("any_rank"), self.step_count, flag=bool(flag))
        return any(one.flag for one in self._meet(report))

    @property
    @alone
    def gradients(self) -> Arrays:
        """The gradients of the last step, averaged over ranks, by parameter: of a step that has no optimizer.

        Raises:
            GradfuseError: the step has an optimizer; or none was run yet, or the last one has failed.
        """
        if self._update is not None or not self._has_averaged:
            why = "no step was run, or the last one has failed"
            if self._update is not None:
                why = "the step has an optimizer, and gives no gradients"
            raise GradfuseError(f"{_WHO}.gradients: {why}")
        found = {name: tensor for bucket in self._buckets for name, tensor in bucket.read.items()}
        return {name: found[name].cpu().numpy().copy() for name in self._given}

    @alone
    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Set parameters and buffers of all ranks to what the first rank gives, as for `TrainingSession`.

        Args:
            state_dict: as for `TrainingSession.load_state_dict`; that of other ranks than the first is not read.
            strict: likewise.

        Raises:
            ArgumentError: as for `TrainingSession.load_state_dict`, on all ranks.
            GradfuseError: another rank is at another call.
            LostRankError: another rank has ended, or does not answer in time.
        """
        inherited = super().load_state_dict
        self._by_first("load_state_dict", lambda: inherited(state_dict, strict))

    @alone
    def load(self, path: str | os.PathLike[str]) -> dict[str, Any]:
        """Read a file as `TrainingSession.load` does, on the first rank, for all of them.

        Raises:
            ArgumentError, ModelError, GradfuseError: as for `TrainingSession.load`, on all ranks; or another rank is at
                another call.
            LostRankError: another rank has ended, or does not answer in time.
        """
        inherited = super().load

        def read() -> tuple[dict[str, Any], int]:
            extra = inherited(path)
            return extra, self.step_count

        extra, count = self._by_first("load", read)
        self._steps_before = count - self._runs
        self._pending = 0
        for bucket in self._buckets:
            bucket.begin()
        return extra

    def save(
        self,
        path: str | os.PathLike[str],
        *,
        optimizer: bool = True,
        wait: bool = True,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        """Write a file as `TrainingSession.save` does, on the first rank; other ranks write nothing.

        A `TrainingSession` of the same step reads it, too.

        Raises:
            ArgumentError, ModelError: as for `TrainingSession.save`.
            GradfuseError: likewise, or the step accumulates gradients, and an update is not complete.
        """
        if self._is_open:
            raise GradfuseError(f"{_WHO}.save: {_OPEN}; expected it after whole calls")
        if self._pending and optimizer:
            done = f"{self._pending} of {self._accumulate} calls of an update are done"
            raise GradfuseError(f"{_WHO}.save: {done}; expected it between updates")
        if self._rank == 0:
            super().save(path, optimizer=optimizer, wait=wait, extra=extra)
        else:
            require_path(path, f"{_WHO}.save")

    def save_evaluation_model(self, path: str | os.PathLike[str], *, averaged: bool = False) -> None:
        """Write the module in eval mode as `TrainingSession.save_evaluation_model` does, on the first rank alone.

        Raises:
            ArgumentError, GradfuseError, ModelError: as for `TrainingSession.save_evaluation_model`.
        """
        if self._rank == 0:
            super().save_evaluation_model(path, averaged=averaged)
        else:
            require_path(path, f"{_WHO}.save_evaluation_model")

    @property
    def _side(self) -> int:
        return self._updates % 2

    def _split(self, step: TrainingStep) -> Halves:
        if step.carried:
            what = f"the step carries {step.carried[0]!r} from call to call, which would be another on each rank"
            raise GradfuseError(f"{_WHO}: {what}; expected a step before TrainingStep.carrying")
        step.require_consistent(_WHO)
        return split(step, _WHO)

    def _default_options(self) -> Any:
        options = super()._default_options()
        here = os.environ.get("LOCAL_WORLD_SIZE", "")
        if here.isdecimal() and int(here) > 1 and hasattr(os, "sched_getaffinity"):
            options.intra_op_num_threads = max(1, len(os.sched_getaffinity(0)) // int(here))
        return options

    def _training_session(self) -> tuple[Any, frozenset[str], str | None]:
        """Return a session of the gradients, the names of inputs of which there is one tensor, and None.

        What the gradients' half changes is averaged over ranks first, and written then.
        """
        kind, index = self._device
        if kind == "cpu" and dist.get_backend(self._group) == "nccl":
            wanted = "one of gloo, or CUDAExecutionProvider first in providers"
            raise ArgumentError(f"{_WHO}: process_group is of nccl, which has no tensors on CPUs; expected {wanted}")
        self._place = torch.device(kind, index) if kind != "cpu" else torch.device("cpu")
        halves, step = self._halves, self._step
        session = self._inference_session(halves.gradients)
        self._given, self._taken, self._accumulate = halves.given, halves.taken, halves.accumulate
        self._accumulators = halves.accumulators
        types = {value.name: TensorType.of(value) for value in halves.step.model.graph.input}
        narrow = next((name for name, known in types.items() if is_bfloat16(known.dtype)), None)
        if narrow is not None:
            raise GradfuseError(f"{_WHO}: {narrow!r} is bfloat16, which ranks do not exchange; expected other types")
        outputs = {str(value.name) for value in halves.gradients.graph.outputs}
        changed = {name: types[name] for name in step.buffers if step.own_name(name + UPDATED_SUFFIX) in outputs}
        in_place = frozenset(changed)
        if halves.update is not None:
            self._update, updated, _ = self._updating_session(serialized(halves.update))
            in_place |= updated
        self._buckets = self._made({name: types[name] for name in halves.given}, halves.accumulate > 1)
        floats = {name: known for name, known in changed.items() if known.dtype.kind == "f"}
        self._statistics = self._made(floats, False)
        for name in changed.keys() - floats.keys():
            sizes = [int(size or 0) for size in types[name].shape]
            self._counts[name] = torch.zeros(sizes, dtype=_torch_type(types[name].dtype), device=self._place)
        self._counts = {name: self._counts[name] for name in changed if name in self._counts}
        self._share_loss = torch.zeros((), dtype=_torch_type(self._type_of_loss().dtype))
        self._seed = step.own_name(DROPOUT_SEED) if step.own_name(DROPOUT_SEED) in step.buffers else None
        self._share_seed = self._new_value([], np.int64, *self._device) if self._seed is not None else None
        self._inputs_of_gradients = [str(value.name) for value in halves.gradients.graph.inputs]
        update = halves.update
        self._inputs_of_update = [] if update is None else [str(value.name) for value in update.graph.inputs]
        self._outputs_of_update = set() if update is None else {str(value.name) for value in update.graph.outputs}
        # onnxruntime has the models by now.
        del self._halves
        return session, in_place, None

    def _type_of_loss(self) -> TensorType:
        loss = self._step.own_name(LOSS)
        return next(TensorType.of(value) for value in self._step.model.graph.output if value.name == loss)

    def _made(self, types: Mapping[str, TensorType], keeps: bool) -> list[_Bucket]:
        by_type: dict[np.dtype[Any], dict[str, TensorType]] = {}
        for name, known in types.items():
            by_type.setdefault(known.dtype, {})[name] = known
        return [_Bucket(own, _torch_type(dtype), self._place, keeps) for dtype, own in by_type.items()]

    def _binding(self, read: Mapping[str, Any], written: Mapping[str, Any], changed: Any) -> Any:
        """Return a binding of the gradients' half, and make one of the update's half."""
        step = self._step
        binding = self._new_binding(self._session)
        for name in self._inputs_of_gradients:
            if name == self._seed:
                binding.bind_ortvalue_input(name, self._share_seed)
            elif name in read:
                binding.bind_ortvalue_input(name, read[name])
        for name, tensor in self._of_all(self._buckets, "written"):
            _bind(binding.bind_output, self._given[name], tensor)
        for name, tensor in (*self._of_all(self._statistics, "written"), *self._counts.items()):
            _bind(binding.bind_output, step.own_name(name + UPDATED_SUFFIX), tensor)
        _bind(binding.bind_output, step.own_name(LOSS), self._share_loss)
        if self._update is not None:
            update = self._new_binding(self._update)
            gradients = {self._taken[name]: tensor for name, tensor in self._of_all(self._buckets, "read")}
            for name in self._inputs_of_update:
                if name in gradients:
                    _bind(update.bind_input, name, gradients[name])
                else:
                    update.bind_ortvalue_input(name, read[name])
            for name in changed:
                if step.own_name(name + UPDATED_SUFFIX) in self._outputs_of_update:
                    update.bind_ortvalue_output(step.own_name(name + UPDATED_SUFFIX), written[name])
            self._update_bindings.append(update)
        return binding

    @staticmethod
    def _of_all(buckets: Sequence[_Bucket], which: str) -> Iterator[tuple[str, Tensor]]:
        for bucket in buckets:
            yield from getattr(bucket, which).items()

    def _tensors(self, optimizer: bool, *, copy: bool = False) -> Arrays:
        # They are zero between updates; a TrainingSession needs them.
        added = self._accumulators if optimizer else {}
        return super()._tensors(optimizer, copy=copy) | {name: np.zeros_like(array) for name, array in added.items()}

    def _read_checkpoint(self, path: str | os.PathLike[str], where: str) -> tuple[Arrays, int, dict[str, Any]]:
        tensors, count, extra = super()._read_checkpoint(path, where)
        begun = tensors.get(self._step.own_name(MICRO_STEP)) if self._accumulators else None
        if begun is not None and np.any(begun):
            what = f"{begun} of {self._accumulate} calls of an update are done in it"
            raise ModelError(f"{os.fspath(path)}: {what}; expected a file that was saved between updates")
        return {name: array for name, array in tensors.items() if name not in self._accumulators}, count, extra

    def _run_share(self, inputs: Any, targets: Any, weight: float | None, report: _Report) -> _Report:
        """Compute loss and gradients of this rank's share, and return its weight."""
        if weight is not None and not (isinstance(weight, int | float | np.number) and 0 <= weight < math.inf):
            raise ArgumentError(f"{_WHO}.step: weight is {in_short(weight)}; expected a finite number from 0 on")
        if inputs is None:
            self._background.raise_error()
            return report
        feeds = self._batch(inputs, targets)
        weight = self._weight_of(feeds) if weight is None else float(weight)
        if weight == 0 or (self._step.input_names and self._is_empty(feeds)):
            return report
        self._require_filled(f"{_WHO}.step", feeds, self._inputs)
        if self._seed is not None:
            common = self.ort_values[self._seed].numpy()
            assert self._share_seed is not None
            self._share_seed.update_inplace(np.asarray(common + self._rank * _SEEDS_APART))
        binding = self._last_binding = self._bindings[self._side]
        for name in self._step.output_names:
            binding.bind_output(name)
        self._run_half(self._session, binding, feeds)
        self._has_run = True
        shapes = zlib.crc32(repr([(name, array.shape) for name, array in feeds.items()]).encode()) + 1
        return dataclasses.replace(report, weight=weight, loss=float(self._share_loss), shapes=shapes)

    def _run_half(self, session: Any, binding: Any, feeds: Arrays) -> None:
        if self._place.type == "cuda":
            # onnxruntime has a stream of its own, for whose end it waits.
            torch.cuda.current_stream(self._place).synchronize()
        try:
            self._run(session, binding, feeds)
        except Exception as error:
            if not is_of_onnxruntime(error):
                raise
            raise ModelError(f"{_WHO}.step: onnxruntime cannot run the model: {reason(error)}") from error

    def _weight_of(self, feeds: Arrays) -> float:
        """Return what the loss of a batch is a mean over; NaN if unknown."""
        step = self._step
        labelled = [name for name in step.target_names if name in feeds]
        if len(labelled) == 1:
            target = feeds[labelled[0]]
            ignored = {one.ignored for one in step.index_ranges.get(labelled[0], ()) if one.ignored is not None}
            return float(target.size - sum(np.count_nonzero(target == number) for number in ignored))
        varying = [{dim for dim in self._inputs[name].shape if isinstance(dim, str)} for name in feeds]
        common = set.intersection(*varying)
        if len(common) != 1:
            return math.nan
        (dim,) = common
        name, array = next(iter(feeds.items()))
        return float(array.shape[self._inputs[name].shape.index(dim)])

    def _average_and_update(self, reports: Sequence[_Report]) -> float:
        """Average loss, gradients and buffers over ranks, and update parameters once enough was added up."""
        weights = _weights(reports)
        whole = sum(weights)
        losses = [weight * one.loss for weight, one in zip(weights, reports, strict=True) if weight]
        share = weights[self._rank] / whole
        mean = share if self._has_run else None
        factor = 1.0 if self._sums and self._has_run else mean
        first = next(rank for rank, weight in enumerate(weights) if weight)
        for bucket in self._buckets:
            bucket.add(factor)
        for bucket in self._statistics:
            bucket.add(mean)
        counts = [tensor.reshape(-1).to(torch.int64) for tensor in self._counts.values()]
        flat = torch.cat(counts) if counts else None
        if flat is not None and self._rank != first:
            flat.zero_()
        is_due = self._pending + 1 == self._accumulate
        # All that may fail because of others is done before anything changes.
        totals = [bucket.total for bucket in (*self._statistics, *(self._buckets if is_due else ()))]
        with self._unchanged():
            for total in totals if flat is None else [*totals, flat]:
                self._wait(functools.partial(dist.all_reduce, total, group=self._group, async_op=True))
        self._set_buffers(flat, first)
        if is_due:
            for bucket in self._buckets:
                bucket.finish()
            if self._update is not None:
                self._run_half(self._update, self._update_bindings[self._side], {})
                self._updates += 1
            for bucket in self._buckets:
                bucket.begin()
        self._pending = 0 if is_due else self._pending + 1
        self._has_averaged = True
        loss = sum(one.loss for one in reports if one.weight) if self._sums else sum(losses) / whole
        self._loss.update_inplace(np.asarray(loss, self._type_of_loss().dtype))
        self._progress = self._runs + 1, False
        return float(self._loss.numpy())

    def _set_buffers(self, counts: Tensor | None, first: int) -> None:
        """Set buffers to what was averaged, and those that are no floats to the counts of the first rank with rows."""
        found: Arrays = {}
        for bucket in self._statistics:
            bucket.finish()
            found |= {name: tensor.cpu().numpy() for name, tensor in bucket.read.items()}
        if counts is not None:
            parts = torch.split(counts, [tensor.numel() for tensor in self._counts.values()])
            for (name, tensor), part in zip(self._counts.items(), parts, strict=True):
                value = part - first * _SEEDS_APART if name == self._seed else part
                found[name] = value.to(tensor.dtype).reshape(tensor.shape).cpu().numpy()
        self._assign(found)
        for bucket in self._statistics:
            bucket.begin()

    def _meet(self, report: _Report, problem: GradfuseError | None = None) -> list[_Report]:
        """Tell all ranks what this one does, and return what all do.

        Raises:
            GradfuseError: not all do the same, or one has failed; `problem` where it was this one. All ranks raise.
        """
        numbers = [float(number) for number in dataclasses.astuple(report)]
        own = torch.tensor(numbers, dtype=torch.float64, device=self._place)
        every = torch.empty(self._world, len(numbers), dtype=torch.float64, device=self._place)
        self._wait(lambda: dist.all_gather(list(every.unbind()), own, group=self._group, async_op=True))
        reports = [_Report.of(row) for row in every.tolist()]
        if problem is not None:
            raise problem
        where = f"{_WHO}.{_KINDS[report.kind]}"
        for rank, one in enumerate(reports):
            if one.kind != report.kind:
                raise GradfuseError(f"{where}: rank {rank} calls {_KINDS[one.kind]}; expected one call on all ranks")
            if one.done != report.done:
                what = f"rank {rank} has done {one.done} steps, and rank {self._rank} {report.done}"
                raise GradfuseError(f"{where}: {what}; expected the same calls on all ranks")
        failed = [str(rank) for rank, one in enumerate(reports) if one.failed]
        if failed:
            raise GradfuseError(f"{where}: rank {', '.join(failed)} has failed; nothing is changed on any rank")
        if _KINDS[report.kind] == "step":
            _require_one_batch(reports, where)
        return reports

    def _by_first(self, name: str, action: Callable[[], _R]) -> _R:
        """Do on the first rank what changes a session, and let all others be as it is."""
        self._require_usable(name)
        with self._opened():
            with self._unchanged():
                self._meet(_Report(_KINDS.index(name), self.step_count))
                content: list[Any] = [(None, None)]
                if self._rank == 0:
                    try:
                        content = [(action(), None)]
                    except GradfuseError as error:
                        content = [(None, error)]
                self._send(content)
                result, refused = content[0]
                if refused is not None:
                    raise refused
            self._synchronize()
            done: _R = result
            return done

    @contextlib.contextmanager
    def _opened(self) -> Iterator[None]:
        """Note that a call has begun: whatever raises within, such as Ctrl-C, may leave this rank behind others."""
        self._is_open = True
        yield
        self._is_open = False

    @contextlib.contextmanager
    def _unchanged(self) -> Iterator[None]:
        """Let errors within be those of a call that changes nothing, on any rank."""
        try:
            yield
        except GradfuseError:
            self._is_open = False
            raise

    def _synchronize(self) -> None:
        """Set all values to the first rank's."""
        for name, value in self.ort_values.items():
            array = np.array(value.numpy())
            content = torch.from_numpy(array.reshape(-1).view(np.uint8)).to(self._place)
            if content.numel():
                self._wait(functools.partial(dist.broadcast, content, self._first, self._group, async_op=True))
                self._assign({name: content.cpu().numpy().view(array.dtype).reshape(array.shape)})

    @property
    def _first(self) -> int:
        return 0 if self._group is dist.group.WORLD else dist.get_global_rank(self._group, 0)

    def _told(self, value: _R, problem: GradfuseError | None) -> list[_R]:
        """Return what each rank says while the session is made; all raise if one has a problem."""
        every: list[Any] = [None] * self._world
        told = value, "" if problem is None else str(problem)
        self._guard(lambda: dist.all_gather_object(every, told, group=self._group))
        if problem is not None:
            raise problem
        for rank, (_, text) in enumerate(every):
            if text:
                raise GradfuseError(f"{_WHO}: rank {rank} has failed: {text}")
        return [one for one, _ in every]

    def _sent_by_first(self, step: TrainingStep | None) -> TrainingStep:
        """Return the first rank's step on those that have none."""
        content: list[Any] = [None]
        if self._rank == 0:
            assert step is not None
            models = [model for model in (step.model, step.evaluation_model) if model is not None]
            outside = any(
                tensor.data_location == onnx.TensorProto.EXTERNAL
                for model in models
                for tensor in model.graph.initializer
            )
            # What a report refers to stays here.
            content = [None if outside else dataclasses.replace(step, report=None, recomputation=None)]
        self._send(content)
        if content[0] is None:
            what = "the first rank's step has weights in files, and is not sent"
            raise ArgumentError(f"{_WHO}: {what}; expected the path of a saved step on every rank")
        received: TrainingStep = content[0]
        return received if step is None else step

    def _send(self, content: list[Any]) -> None:
        self._guard(lambda: dist.broadcast_object_list(content, self._first, group=self._group))

    def _wait(self, start: Callable[[], Any]) -> None:
        """Start something that ranks do together, and wait for its end."""
        self._guard(lambda: start().wait(*self._waiting))

    def _guard(self, action: Callable[[], Any]) -> None:
        """Do something with other ranks; gloo and NCCL have no common class for their errors."""
        try:
            action()
        except RuntimeError as error:
            # gloo puts a line of its sources ahead, and advice behind.
            self._lost = re.sub(r"^\[[^\]]*\] |\.? This is typically caused .*$", "", one_line(error))
            raise LostRankError(f"{_WHO}: another rank has ended or does not answer: {self._lost}") from error

    def _require_usable(self, name: str) -> None:
        if self._lost:
            raise LostRankError(f"{_WHO}.{name}: another rank has ended or does not answer: {self._lost}")
        if self._is_open:
            raise GradfuseError(f"{_WHO}.{name}: {_OPEN}; expected a new session on all ranks")

    def _checksum_of_hyperparameters(self) -> int:
        names = self._step.hyperparameters
        return zlib.crc32(b"".join(np.asarray(self.ort_values[name].numpy()).tobytes() for name in names))


def _weights(reports: Sequence[_Report]) -> list[float]:
    """Return the weight of each rank."""
    return [float(bool(one.shapes)) if math.isnan(one.weight) else one.weight for one in reports]


def _require_one_batch(reports: Sequence[_Report], where: str) -> None:
    """Refuse shares that do not make a batch; all ranks find the same."""
    for rank, one in enumerate(reports):
        if one.hyperparameters != reports[0].hyperparameters:
            what = f"rank {rank} has other hyperparameters than rank 0, such as a learning rate"
            raise ArgumentError(f"{where}: {what}; expected the same on all ranks")
    known = [one for one in reports if one.shapes]
    if not known:
        raise ArgumentError(f"{where}: no rank has rows; expected at least one that has")
    unknown = [math.isnan(one.weight) for one in known]
    if any(unknown) and (not all(unknown) or len({one.shapes for one in known}) > 1):
        what = "the shares have different shapes, and the step does not tell what its loss is a mean over"
        raise ArgumentError(f"{where}: {what}; expected weight on all ranks")


def _torch_type(dtype: np.dtype[Any]) -> torch.dtype:
    return torch.from_numpy(np.zeros(0, dtype)).dtype


def _bind(bind: Callable[..., None], name: str, tensor: Tensor) -> None:
    """Bind a tensor of torch, in its own memory, which somebody has to keep."""
    dtype = torch.empty(0, dtype=tensor.dtype).numpy().dtype
    bind(name, tensor.device.type, tensor.device.index or 0, dtype, tuple(tensor.shape), tensor.data_ptr())
