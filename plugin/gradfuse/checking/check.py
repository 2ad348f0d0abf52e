"""`check`: runs two models on the same random inputs and compares what they compute."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from gradfuse.checking import bounds
from gradfuse.checking.execution import FLOATS, Session, float_types, widened
from gradfuse.checking.inputs import Analyses, random_inputs
from gradfuse.checking.random_outputs import random_outputs
from gradfuse.checking.reference import ReferenceSession, moved
from gradfuse.checking.report import CheckReport, OutputReport
from gradfuse.errors import ArgumentError, ModelError
from gradfuse.models import reading, scatters
from gradfuse.models.arrays import Arrays
from gradfuse.models.tensors import copy_model, tensor_bytes

if TYPE_CHECKING:
    from gradfuse.models.reading import LoadedModel, ModelLike

_Array = npt.NDArray[Any]

_NUDGES = 3
"""How many runs tell what moving every input and weight by one rounding does."""
_RESIZES = frozenset({"Resize", "Upsample"})
"""Operators whose other inputs than the first are scales, on which the size of the output depends."""
_ATTEMPTS = 8
"""Sizes that a model cannot run with, as it has constants of one size only, are drawn again, so often at most."""
_LARGEST_COPY_BYTES = 2**29
"""Of models with larger tensors no copies are made."""


def check(a: ModelLike, b: ModelLike, runs: int = 3, *, seed: int = 0) -> CheckReport:
    """Run two models on the same random inputs in stock onnxruntime and compare every output.

    Each element of the second model's output may differ from the reference by

        16 noise + 4 (eps |reference| + eps_a max|reference|)

    with eps the machine epsilon of the output's type and eps_a that of the arithmetic (float32 for 16-bit types). The
    reference is the first model run in float64 if that is possible, else the first model itself. The noise is what
    rounding does to the first model: its own error against the reference, and its change when every input and weight is
    moved by one rounding; see `gradfuse.testing.peer_error`. NaN and infinities must be in the same places; integers
    and booleans must be equal.

    A larger difference may come from a decision within rounding: an activation near 0, or a choice between two close
    values. The first model then runs in float64 with the result of every arithmetic node moved by up to 64 roundings,
    up to 16 times, so that such a decision falls either way; a difference may be larger by 4 times the largest change.

    Both models are also compared in float64, where rounding hides nothing. There a difference may be 4 (eps |reference|
    + eps_a max|reference|) plus 64 times the effect of moving by one rounding without flipping a decision. (This is the
    median of three runs moved by 2^-10 of a rounding, times 2^10.) A larger one is compared again on inputs a
    thousandth larger or smaller, where no constant's rounding puts an activation on the other side of a kink.

    Notes in the report say what limits the check: operators without 16-bit kernels in onnxruntime run in float32,
    outputs that depend on random operators are not compared, and models with a ScatterND of which onnxruntime may lose
    updates run in one thread.

    Args:
        a: the model to trust: a path, `onnx.ModelProto`, `onnx_ir.Model` or `torch.onnx.ONNXProgram`.
        b: the model to judge, with inputs and outputs of the same names, types and order.
        runs: how many runs, each with its own inputs, and its own sizes of symbolic dimensions.
        seed: equal seeds give equal inputs.

    Raises:
        ModelError: a model cannot be read or run, or the models' inputs or outputs do not agree.
        ArgumentError: `runs` is less than 1.
    """
    if runs < 1:
        raise ArgumentError(f"check: runs is {runs}; expected at least 1")
    first, second = reading.load(a), reading.load(b)
    _require_same_interface(first, second)
    pair = _Pair(first, second, seed)
    random_names = random_outputs(first.ir) | random_outputs(second.ir)

    worst: dict[str, OutputReport] = {}
    compared: set[str] = set()
    for run in range(runs):
        for name, (report, finite) in pair.compare(run, random_names).items():
            if finite:
                compared.add(name)
            if name not in worst or _excess(report) > _excess(worst[name]):
                worst[name] = report
    notes = list(pair.notes)
    if random_names:
        notes.append(f"outputs that depend on random operators: {', '.join(sorted(random_names))}")
    empty = [name for name, report in worst.items() if report.comparable and name not in compared]
    if empty:
        notes.append(f"outputs without a finite element in any run: {', '.join(empty)}")
    outputs = tuple(worst.values())
    return CheckReport(ok=all(output.ok for output in outputs), runs=runs, outputs=outputs, notes=tuple(notes))


class _Pair:
    """The sessions of two models, in types that onnxruntime has kernels for, and those that tell what rounding does."""

    def __init__(self, first: LoadedModel, second: LoadedModel, seed: int) -> None:
        self._seed = seed
        self._source = first.source
        self._symbolic = any(value.shape is not None and not value.shape.is_static() for value in _inputs(first.ir))
        self.notes: list[str] = []
        if any(scatters.reduces_by_scatter_nd(model) for model in (first.ir, second.ir)):
            self.notes.append("ScatterND with a reduction: run in one thread, as onnxruntime loses updates in several")
        # The spacing of the models' own type if they run in a wider one.
        self._eps = 0.0
        narrow = (float_types(first.ir) | float_types(second.ir)) & {ir.DataType.FLOAT16, ir.DataType.BFLOAT16}
        try:
            self._open(first.ir, second.ir, first.source, second.source)
        except ModelError:
            if not narrow:
                raise
            self._eps = max(bounds.spacing(dtype.numpy()) for dtype in narrow)
            wide = [widened(model, ir.DataType.FLOAT) for model in (first.ir, second.ir)]
            self._open(wide[0], wide[1], first.source, second.source)
            self.notes.append("onnxruntime has no kernels for the models' 16-bit types: compared in float32")
        small = tensor_bytes(first.ir) <= _LARGEST_COPY_BYTES
        self._reference = self._open_reference(first) if small else None
        self._other_reference: ReferenceSession | None = None
        if self._reference is not None and tensor_bytes(second.ir) <= _LARGEST_COPY_BYTES:
            self._other_reference = ReferenceSession(second.ir, second.source)
        kernels = bounds.ROUNDINGS_OF_NARROW_KERNELS if narrow else bounds.ROUNDINGS_OF_KERNELS
        types = float_types(first.ir) | float_types(second.ir)
        widest = max((bounds.spacing(dtype.numpy()) for dtype in types), default=0.0)
        # These are costly: they are opened, and run, only when a decision needs them.
        self._moved_by_kernels, self._moved_by_constants = (
            functools.cache(functools.partial(_moved_session, first, roundings * widest))
            for roundings in (kernels, bounds.SMALL_ROUNDING)
        )
        weights = (value.const_value for value in self._model.graph.initializers.values())
        self._rounded = self._first
        if small and any(weight is not None and _is_nudged(weight) for weight in weights):
            # Sizes may follow from weights, so that the model is not valid with others.
            with contextlib.suppress(ModelError):
                self._rounded = Session(self._with_nudged_weights(np.random.default_rng([seed])), first.source)

    def _open(self, first: ir.Model, second: ir.Model, first_source: str, second_source: str) -> None:
        self._model = first
        self._analyses: Analyses = {}
        self._first = Session(first, first_source)
        self._second = Session(second, second_source)
        # Some kernels turn out to be missing only when they should run.
        self._run_both(0)

    def _open_reference(self, first: LoadedModel) -> ReferenceSession | None:
        if float_types(first.ir) <= {ir.DataType.DOUBLE}:
            return None
        session = ReferenceSession(first.ir, first.source)
        try:
            session.run(self._run_both(0)[0])
        except ModelError:
            return None
        return session

    def _run_both(self, run: int) -> tuple[Arrays, Arrays, Arrays]:
        """Return random inputs that both models can run on, and the outputs of each."""
        reasons: list[ModelError] = []
        for attempt in range(_ATTEMPTS if self._symbolic else 1):
            rng = np.random.default_rng([self._seed, run, attempt])
            try:
                feeds = random_inputs(self._model, rng, attempt=attempt, known=self._analyses)
            except ModelError as error:
                raise ModelError(f"{self._source}: {error}") from error
            try:
                expected = self._first.run(feeds)
            except ModelError as error:
                reasons.append(error)
                continue
            try:
                return feeds, expected, self._second.run(feeds)
            except ModelError as error:
                reasons.insert(0, error)
                note = f"the second model does not run on sizes that the first runs on: {error}"
                if not any(known.startswith(note[:60]) for known in self.notes):
                    self.notes.append(note)
        raise reasons[0]

    def compare(self, run: int, random_names: set[str]) -> dict[str, tuple[OutputReport, bool]]:
        """Return, for each output, its report and whether any finite element was compared."""
        feeds, expected, actual = self._run_both(run)
        exact = self._reference.run(feeds) if self._reference is not None else {}
        by_kernels = _MovedRuns(self._moved_by_kernels, feeds, exact)
        in_float64 = self._compare_in_float64(feeds, exact, expected)
        rng = np.random.default_rng([self._seed, run])
        nudged = self._nudged_runs(feeds, rng)
        result = {}
        for name, value in expected.items():
            if name in random_names:
                result[name] = OutputReport(name, str(value.dtype), 0.0, 0.0, True, comparable=False), False
                continue
            others = [outputs[name] for outputs in nudged]
            found = [bounds.worst(value, actual[name], exact.get(name), others, self._eps, by_kernels.changes(name))]
            if name in in_float64 and by_kernels.explain(name, value, self._eps):
                found.append(in_float64[name])
            error, bound = max(found, key=lambda one: bounds.ratio(*one))
            finite = not value.size or not bounds.is_float(value) or bool(np.isfinite(value.astype(np.float64)).any())
            result[name] = OutputReport(name, str(value.dtype), error, bound, error <= bound), finite
        return result

    def _nudged_runs(self, feeds: Arrays, rng: np.random.Generator) -> list[Arrays]:
        """Return outputs of the first model when inputs and weights are moved by one rounding, where it runs on them.

        It may not: indices and sizes may follow from floats.
        """
        runs: list[Arrays] = []
        for _ in range(_NUDGES):
            with contextlib.suppress(ModelError):
                runs.append(self._rounded.run({name: self._nudge(array, rng) for name, array in feeds.items()}))
        return runs

    def _compare_in_float64(self, feeds: Arrays, exact: Arrays, expected: Arrays) -> dict[str, tuple[float, float]]:
        """Return the worst error and bound of each output of the models in float64; none where they do not run so."""
        if self._reference is None or self._other_reference is None:
            return {}
        try:
            other = self._other_reference.run(feeds)
        except ModelError:
            return {}
        found: dict[str, tuple[float, float]] = {}
        numbers = itertools.chain([(feeds, exact, other)], self._elsewhere(feeds))
        for these, wanted, got in itertools.islice(numbers, 1 + bounds.OTHER_NUMBERS):
            by_constants = _MovedRuns(self._moved_by_constants, these, wanted)
            for name in wanted:
                if name not in found or bounds.ratio(*found[name]) > 1:
                    eps = (
                        max(bounds.spacing(expected[name].dtype), self._eps) if bounds.is_float(expected[name]) else 0.0
                    )
                    one = bounds.worst_in_float64(wanted[name], got[name], eps, by_constants.changes(name))
                    found[name] = min(found.get(name, one), one, key=lambda pair: bounds.ratio(*pair))
            if all(bounds.ratio(*pair) <= 1 for pair in found.values()):
                break
        return found

    def _elsewhere(self, feeds: Arrays) -> Iterator[tuple[Arrays, Arrays, Arrays]]:
        """Yield inputs that are a thousandth larger or smaller, and the outputs of both models in float64."""
        assert self._reference is not None and self._other_reference is not None
        for seed in range(bounds.OTHER_NUMBERS):
            rng = np.random.default_rng([self._seed, seed])
            these = {
                name: np.asarray(array.astype(np.float64) * (1 + bounds.OTHER_SIZE * rng.uniform(-1, 1, array.shape)))
                if bounds.is_float(array)
                else array
                for name, array in feeds.items()
            }
            with contextlib.suppress(ModelError):
                yield these, self._reference.run(these), self._other_reference.run(these)

    def _nudge(self, array: _Array, rng: np.random.Generator) -> _Array:
        """Move every finite float by one spacing of its type, up or down; leave other arrays as they are."""
        if not bounds.is_float(array):
            return array
        factor = 1.0 + max(bounds.spacing(array.dtype), self._eps) * rng.choice([-1.0, 1.0], array.shape)
        with np.errstate(over="ignore"):
            moved = (array.astype(np.float64) * factor).astype(array.dtype)
        return np.asarray(np.where(np.isfinite(moved.astype(np.float64)), moved, array))

    def _with_nudged_weights(self, rng: np.random.Generator) -> ir.Model:
        copy = copy_model(self._model)
        for value in copy.graph.initializers.values():
            tensor = value.const_value
            is_setting = any(node.op_type in _RESIZES and index > 0 for node, index in value.uses())
            if tensor is not None and _is_nudged(tensor) and not is_setting:
                value.const_value = ir.tensor(self._nudge(tensor.numpy(), rng), dtype=tensor.dtype, name=tensor.name)
        return copy


def _moved_session(model: LoadedModel, size: float) -> ReferenceSession:
    return ReferenceSession(moved(model.ir, size), model.source)


def _is_nudged(weight: ir.TensorProtocol) -> bool:
    return weight.dtype in FLOATS and weight.size > 1


class _MovedRuns:
    """A model's outputs on some inputs when its arithmetic is moved; runs are made when they are needed."""

    def __init__(self, open_session: Callable[[], ReferenceSession], feeds: Arrays, exact: Arrays) -> None:
        self._open_session = open_session
        self._feeds = feeds
        self._exact = exact
        self._runs: list[Arrays] = []

    def changes(self, name: str) -> Iterator[_Array]:
        """Yield what is added to an output in each run, in float64; for integers, whether an element has changed."""
        if name not in self._exact:
            return
        exact = self._exact[name]
        for index in range(bounds.MOVED_RUNS):
            if index == len(self._runs):
                try:
                    self._runs.append(self._open_session().run(self._feeds))
                except ModelError:
                    # A moved value that a node refuses, or an operator that cannot be moved.
                    self._runs.append({})
            other = self._runs[index].get(name)
            if other is None or other.shape != exact.shape:
                continue
            if exact.dtype.kind in "fc":
                with np.errstate(invalid="ignore"):
                    yield np.asarray(other - exact)
            else:
                yield np.asarray(other != exact)

    def explain(self, name: str, own: _Array, own_eps: float) -> bool:
        """Return whether an output is as far from the float64 one as rounding may put it."""
        exact = self._exact[name]
        if not bounds.is_float(own) or own.shape != exact.shape:
            return own.shape == exact.shape
        with np.errstate(invalid="ignore"):
            off = np.abs(own.astype(np.float64) - exact)
        largest, size = bounds.magnitude(off), bounds.magnitude(exact)
        if largest <= bounds.TRUSTED_ROUNDINGS * max(bounds.spacing(own.dtype), own_eps) * size:
            return True
        return any(largest <= bounds.MOVED_SHARE * bounds.magnitude(change) for change in self.changes(name))


def _excess(report: OutputReport) -> float:
    return bounds.ratio(report.error, report.bound)


def _require_same_interface(first: LoadedModel, second: LoadedModel) -> None:
    for what, values in (("input", _inputs), ("output", lambda model: list(model.graph.outputs))):
        mine, theirs = values(first.ir), values(second.ir)
        names, other_names = [value.name for value in mine], [value.name for value in theirs]
        if names != other_names:
            raise ModelError(f"{second.source}: the {what}s are {_listed(other_names)}; expected {_listed(names)}")
        for value, other in zip(mine, theirs, strict=True):
            if value.dtype is not None and other.dtype is not None and value.dtype != other.dtype:
                raise ModelError(
                    f"{second.source}: {what} {value.name!r} has type {other.dtype}; expected {value.dtype}"
                )
            if what == "input" and not _same_shape(value.shape, other.shape):
                raise ModelError(
                    f"{second.source}: input {value.name!r} has shape {other.shape}; expected {value.shape}"
                )


def _inputs(model: ir.Model) -> list[ir.Value]:
    return [value for value in model.graph.inputs if value.name not in model.graph.initializers]


def _listed(names: list[str | None]) -> str:
    return ", ".join(str(name) for name in names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _same_shape(first: ir.Shape | None, second: ir.Shape | None) -> bool:
    if first is None or second is None:
        return True
    if len(first) != len(second):
        return False
    return all(m == n for m, n in zip(first, second, strict=True) if isinstance(m, int) and isinstance(n, int))
