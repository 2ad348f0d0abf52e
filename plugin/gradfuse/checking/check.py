"""Do two models compute the same? They are run on random inputs and compared within the rounding that is due."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from gradfuse.checking.execution import FLOATS, Session, float_types, widened
from gradfuse.checking.inputs import Analyses, random_inputs
from gradfuse.checking.reference import ReferenceSession, moved
from gradfuse.errors import ArgumentError, ModelError
from gradfuse.models import reading, scatters
from gradfuse.models.arrays import Arrays
from gradfuse.models.tensors import copy_model, tensor_bytes
from gradfuse.testing import peer_error

if TYPE_CHECKING:
    from gradfuse.models.reading import LoadedModel, ModelLike

__all__ = ["CheckReport", "OutputReport", "check", "random_inputs"]

_Array = npt.NDArray[Any]

NOISE_FACTOR = 16
"""A difference may be this many times what rounding does to the first model's own result."""
ROUNDINGS = 4
"""So many roundings to the output's type, and to the type of the arithmetic, are granted besides."""

MOVED_SHARE = 4
"""A difference may be so many times what becomes of a result when arithmetic is moved by several roundings."""

_NUDGES = 3
_MOVED_RUNS = 16
# Kernels that add up in another order come this far apart; in 16 bits, sums are made in float32.
_ROUNDINGS_OF_KERNELS, _ROUNDINGS_OF_NARROW_KERNELS = 64, 4
# In float64 nothing rounds but the constants of a model. They are judged by a change so small that it decides nothing
# near a kink, as many times larger.
_ROUNDINGS_OF_CONSTANTS, _SMALL_ROUNDING, _SMALL_RUNS = 64, 2.0**-10, 3
# Where a constant's rounding does decide, it does not on numbers of another size.
_OTHER_NUMBERS, _OTHER_SIZE = 2, 1e-3
# Sizes that a model cannot run with, as it has constants of one size only, are drawn again.
_ATTEMPTS = 8
_LARGEST_COPY_BYTES = 2**29
# Beyond so many roundings the float64 copy computes something else, and cannot judge.
_TRUSTED_ROUNDINGS = 2**14

_RANDOM_OPS = frozenset(
    {"Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"}
)

_finfo: Any = ml_dtypes.finfo


@dataclasses.dataclass(frozen=True)
class OutputReport:
    """One output of two models: where its error was largest, in units of the bound, over all runs.

    Attributes:
        name: the output.
        dtype: its element type.
        error: |second - reference|; infinite where only one of the two is NaN or infinite, or if shapes differ.
        bound: what the error may be there.
        ok: no element was out of bounds; True too where `comparable` is False.
        comparable: False for an output that depends on an operator that draws random numbers.
    """

    name: str
    dtype: str
    error: float
    bound: float
    ok: bool
    comparable: bool = True


@dataclasses.dataclass(frozen=True)
class CheckReport:
    """What `check` found.

    Attributes:
        ok: every comparable output agrees in every run.
        runs: how many runs with random inputs were made.
        outputs: one entry an output, in the model's order.
        notes: what limits the check: outputs that are random, types that were replaced, threads that were left out.
    """

    ok: bool
    runs: int
    outputs: tuple[OutputReport, ...]
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the report as data for JSON; an error or bound that is not finite is None."""
        result = dataclasses.asdict(self)
        for output in result["outputs"]:
            for key in ("error", "bound"):
                output[key] = output[key] if math.isfinite(output[key]) else None
        return result

    def __str__(self) -> str:
        runs = f"{self.runs} random run{'s' if self.runs != 1 else ''}"
        lines = [f"same outputs in {runs}" if self.ok else f"outputs differ in {runs}"]
        width = max([len(output.name) for output in self.outputs] or [0])
        for output in self.outputs:
            if not output.comparable:
                lines.append(f"  {output.name:{width}}  {output.dtype:8}  random, not compared")
                continue
            figures = f"error {output.error:8.2e}  bound {output.bound:8.2e}{'' if output.ok else '  WRONG'}"
            lines.append(f"  {output.name:{width}}  {output.dtype:8}  {figures}")
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])

    def summary(self) -> str:
        """Return one line: the verdict, and the worst output where it is a bad one."""
        wrong = [output for output in self.outputs if not output.ok]
        if not wrong:
            return str(self).split("\n", 1)[0]
        worst = max(wrong, key=lambda output: output.error / output.bound if output.bound else math.inf)
        return (
            f"{len(wrong)} of {len(self.outputs)} outputs differ in {self.runs} random runs: {worst.name!r} by "
            f"{worst.error:.3g}; expected at most {worst.bound:.3g}"
        )


def check(a: ModelLike, b: ModelLike, runs: int = 3, *, seed: int = 0) -> CheckReport:
    """Run two models on the same random inputs in stock onnxruntime and compare every output.

    Each element of the second model's output may differ from the reference by

        16 noise + 4 (eps |reference| + eps_a max|reference|)

    with eps the spacing of the output's type at 1 and eps_a that of the arithmetic (float32 for 16-bit types). The
    reference is the first model run in float64 where that can be, else the first model itself. The noise is what
    rounding does to the first model: its own error against the reference, and its change when every input and weight is
    moved by one rounding; see `gradfuse.testing.peer_error`. NaN and infinities must be in the same
    places; integers and truth values must be equal.

    Where that is exceeded, a decision may lie within rounding: an activation near 0, two values of which one is chosen.
    The first model is then run in float64 with the result of every arithmetic node moved by up to 64 roundings, up to
    16 times, which puts such a decision either way; a difference may be 4 times the largest change more.

    Besides, both models are compared in float64, where rounding hides nothing: there a difference may be
    4 (eps |reference| + eps_a max|reference|) and 64 times what moving by one rounding does where it decides nothing.
    (The median of three runs moved by 2^-10 of a rounding, taken 2^10 times.) What exceeds it is compared again on
    inputs a thousandth larger or smaller, on which no constant's rounding puts an activation on the other side.

    Where onnxruntime lacks kernels for a 16-bit type, both are run in
    float32, and a note says so. Outputs that depend on random operators are not compared, and a note says so. Models
    with a ScatterND of which onnxruntime may lose updates are run in one thread, and a note says so.

    Args:
        a: the model to trust: a path, `onnx.ModelProto`, `onnx_ir.Model` or `torch.onnx.ONNXProgram`.
        b: the model to judge, with inputs and outputs of the same names, types and order.
        runs: how many runs, each with inputs of its own and sizes of its own where dimensions are symbolic.
        seed: equal seeds give equal inputs.

    Raises:
        ModelError: a model cannot be read or run, or inputs or outputs of the two do not agree.
        ArgumentError: `runs` is less than 1.
    """
    if runs < 1:
        raise ArgumentError(f"check: runs is {runs}; expected at least 1")
    first, second = reading.load(a), reading.load(b)
    _require_same_interface(first, second)
    pair = _Pair(first, second, seed)
    random_names = _random_outputs(first.ir) | _random_outputs(second.ir)

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
    return CheckReport(all(output.ok for output in outputs), runs, outputs, tuple(notes))


class _Pair:
    """The sessions of the two models, in types that onnxruntime has kernels for, and those that tell the rounding."""

    def __init__(self, first: LoadedModel, second: LoadedModel, seed: int) -> None:
        self._seed = seed
        self._source = first.source
        self._symbolic = any(value.shape is not None and not value.shape.is_static() for value in _inputs(first.ir))
        self.notes: list[str] = []
        if any(scatters.reduces_by_scatter_nd(model) for model in (first.ir, second.ir)):
            self.notes.append("ScatterND with a reduction: run in one thread, as onnxruntime loses updates in several")
        # The spacing of the models' own type, where they are run in a wider one.
        self._eps = 0.0
        narrow = (float_types(first.ir) | float_types(second.ir)) & {ir.DataType.FLOAT16, ir.DataType.BFLOAT16}
        try:
            self._open(first.ir, second.ir, first.source, second.source)
        except ModelError:
            if not narrow:
                raise
            self._eps = max(float(_finfo(dtype.numpy()).eps) for dtype in narrow)
            wide = [widened(model, ir.DataType.FLOAT) for model in (first.ir, second.ir)]
            self._open(wide[0], wide[1], first.source, second.source)
            self.notes.append("onnxruntime has no kernels for the models' 16-bit types: compared in float32")
        small = tensor_bytes(first.ir) <= _LARGEST_COPY_BYTES
        self._reference = self._open_reference(first) if small else None
        self._other_reference: ReferenceSession | None = None
        if self._reference is not None and tensor_bytes(second.ir) <= _LARGEST_COPY_BYTES:
            self._other_reference = ReferenceSession(second.ir, second.source)
        kernels = _ROUNDINGS_OF_NARROW_KERNELS if narrow else _ROUNDINGS_OF_KERNELS
        types = float_types(first.ir) | float_types(second.ir)
        spacing = max((float(_finfo(dtype.numpy()).eps) for dtype in types), default=0.0)
        # As runs are costly, only those are made that a decision needs.
        self._moved_by_kernels, self._moved_by_constants = (
            ReferenceSession(moved(first.ir, roundings * spacing), first.source)
            for roundings in (kernels, _SMALL_ROUNDING)
        )
        rng = np.random.default_rng([seed])
        self._rounded = Session(self._with_nudged_weights(rng), first.source) if small else self._first

    def _open(self, first: ir.Model, second: ir.Model, first_source: str, second_source: str) -> None:
        self._model = first
        self._analyses: Analyses = {}
        self._first = Session(first, first_source)
        self._second = Session(second, second_source)
        # Some kernels are only found missing when they are to run.
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
                feeds = random_inputs(self._model, rng, one_size=attempt % 2 == 1, known=self._analyses)
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
        nudged = [
            self._rounded.run({name: self._nudge(array, rng) for name, array in feeds.items()}) for _ in range(_NUDGES)
        ]
        result = {}
        for name, value in expected.items():
            if name in random_names:
                result[name] = OutputReport(name, str(value.dtype), 0.0, 0.0, True, comparable=False), False
                continue
            others = [outputs[name] for outputs in nudged]
            found = [_worst(value, actual[name], exact.get(name), others, self._eps, by_kernels.changes(name))]
            if name in in_float64 and by_kernels.explain(name, value, self._eps):
                found.append(in_float64[name])
            error, bound = max(found, key=lambda one: _ratio(*one))
            finite = not value.size or not _is_float(value) or bool(np.isfinite(value.astype(np.float64)).any())
            result[name] = OutputReport(name, str(value.dtype), error, bound, error <= bound), finite
        return result

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
        for these, wanted, got in itertools.islice(numbers, 1 + _OTHER_NUMBERS):
            by_constants = _MovedRuns(self._moved_by_constants, these, wanted)
            for name in wanted:
                if name not in found or _ratio(*found[name]) > 1:
                    eps = max(float(_finfo(expected[name].dtype).eps), self._eps) if _is_float(expected[name]) else 0.0
                    one = _worst_in_float64(wanted[name], got[name], eps, by_constants.changes(name))
                    found[name] = min(found.get(name, one), one, key=lambda pair: _ratio(*pair))
            if all(_ratio(*pair) <= 1 for pair in found.values()):
                break
        return found

    def _elsewhere(self, feeds: Arrays) -> Iterator[tuple[Arrays, Arrays, Arrays]]:
        """Yield inputs that are a thousandth larger or smaller, and the outputs of both models in float64."""
        assert self._reference is not None and self._other_reference is not None
        for seed in range(_OTHER_NUMBERS):
            rng = np.random.default_rng([self._seed, seed])
            these = {
                name: np.asarray(array.astype(np.float64) * (1 + _OTHER_SIZE * rng.uniform(-1, 1, array.shape)))
                if _is_float(array)
                else array
                for name, array in feeds.items()
            }
            with contextlib.suppress(ModelError):
                yield these, self._reference.run(these), self._other_reference.run(these)

    def _nudge(self, array: _Array, rng: np.random.Generator) -> _Array:
        """Move every finite float by one spacing of its type, up or down; leave other arrays as they are."""
        if not _is_float(array):
            return array
        factor = 1.0 + max(float(_finfo(array.dtype).eps), self._eps) * rng.choice([-1.0, 1.0], array.shape)
        with np.errstate(over="ignore"):
            moved = (array.astype(np.float64) * factor).astype(array.dtype)
        return np.asarray(np.where(np.isfinite(moved.astype(np.float64)), moved, array))

    def _with_nudged_weights(self, rng: np.random.Generator) -> ir.Model:
        copy = copy_model(self._model)
        for value in copy.graph.initializers.values():
            tensor = value.const_value
            if tensor is not None and tensor.dtype in FLOATS and tensor.size > 1:
                value.const_value = ir.tensor(self._nudge(tensor.numpy(), rng), dtype=tensor.dtype, name=tensor.name)
        return copy


class _MovedRuns:
    """What becomes of a model's outputs on some inputs when its arithmetic is moved; runs are made as needed."""

    def __init__(self, session: ReferenceSession, feeds: Arrays, exact: Arrays) -> None:
        self._session = session
        self._feeds = feeds
        self._exact = exact
        self._runs: list[Arrays] = []

    def changes(self, name: str) -> Iterator[_Array]:
        """Yield what is added to an output in each run, in float64; for integers, whether an element has changed."""
        if name not in self._exact:
            return
        exact = self._exact[name]
        for index in range(_MOVED_RUNS):
            if index == len(self._runs):
                try:
                    self._runs.append(self._session.run(self._feeds))
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
        if not _is_float(own) or own.shape != exact.shape:
            return own.shape == exact.shape
        with np.errstate(invalid="ignore"):
            off = np.abs(own.astype(np.float64) - exact)
        largest, size = _largest(off), _largest(exact)
        if largest <= _TRUSTED_ROUNDINGS * max(float(_finfo(own.dtype).eps), own_eps) * size:
            return True
        return any(largest <= MOVED_SHARE * _largest(change) for change in self.changes(name))


def _largest(array: _Array) -> float:
    finite = np.abs(array[np.isfinite(array)])
    return float(finite.max()) if finite.size else 0.0


def _worst(
    expected: _Array,
    actual: _Array,
    exact: _Array | None,
    nudged: list[_Array],
    own_eps: float,
    changes: Iterator[_Array],
) -> tuple[float, float]:
    """Return the error and the bound of the element whose error is largest in units of its bound."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return math.inf, 0.0
    if expected.size == 0:
        return 0.0, 0.0
    if expected.dtype.kind in "biuOUS":
        different = _undecided(np.asarray(actual != expected), changes)
        if expected.dtype.kind in "OUS" or not different.any():
            return float(different.any()), 0.0
        off = np.abs(actual.astype(np.float64) - expected.astype(np.float64))
        return float(off[different].max()), 0.0
    if expected.dtype.kind == "c":
        moves = list(changes)
        parts = [
            _worst(
                part(expected),
                part(actual),
                None if exact is None else part(exact),
                [part(n) for n in nudged],
                own_eps,
                iter([part(change) for change in moves]),
            )
            for part in (np.real, np.imag)
        ]
        return max(parts, key=lambda part: _ratio(*part))
    limits = _finfo(expected.dtype)
    eps = max(float(limits.eps), own_eps)
    own, got = expected.astype(np.float64), actual.astype(np.float64)
    finite = np.isfinite(own)
    same = (got == own) | (np.isnan(got) & np.isnan(own))
    reference = np.where(finite, own, 0.0)
    if exact is not None and exact.shape == own.shape:
        known = np.where(finite & np.isfinite(exact), exact, reference)
        if np.abs(known - reference).max() <= _TRUSTED_ROUNDINGS * eps * np.abs(reference).max():
            reference = known
    noise = peer_error(np.where(finite, own, 0.0), reference)
    for other in nudged:
        if other.shape == own.shape:
            with np.errstate(invalid="ignore"):
                change = reference + np.where(finite, other.astype(np.float64) - own, 0.0)
            noise = np.maximum(noise, peer_error(change, reference))
    bound = NOISE_FACTOR * noise + _roundings(reference, eps) + ROUNDINGS * float(limits.smallest_subnormal)
    with np.errstate(invalid="ignore"):
        error = np.where(finite, np.abs(got - reference), np.where(same, 0.0, np.inf))
    return _judged(error, bound, reference, changes)


def _worst_in_float64(exact: _Array, actual: _Array, eps: float, changes: Iterator[_Array]) -> tuple[float, float]:
    """Return the same for outputs of two models in float64, whose constants are in a type of spacing `eps` at 1."""
    if actual.shape != exact.shape or exact.size == 0 or exact.dtype.kind not in "biuf":
        return 0.0, 0.0
    if exact.dtype.kind in "biu":
        return float(_undecided(np.asarray(actual != exact), changes).any()), 0.0
    finite = np.isfinite(exact)
    same = (actual == exact) | (np.isnan(actual) & np.isnan(exact))
    reference = np.where(finite, exact, 0.0)
    with np.errstate(invalid="ignore"):
        error = np.where(finite, np.abs(actual - reference), np.where(same, 0.0, np.inf))
    error = np.where(np.isnan(error), np.inf, error)
    bound = _roundings(reference, eps) + float(np.finfo(np.float32).tiny)
    if (error > bound).any():
        small = [peer_error(_plus(reference, change), reference) for change in itertools.islice(changes, _SMALL_RUNS)]
        if small:
            bound = bound + _ROUNDINGS_OF_CONSTANTS / _SMALL_ROUNDING * np.median(small, axis=0)
    at = int((error / bound).argmax())
    return float(error.ravel()[at]), float(bound.ravel()[at])


def _plus(reference: _Array, change: _Array) -> _Array:
    return np.asarray(reference + np.where(np.isfinite(change), change, 0.0))


def _roundings(reference: _Array, eps: float) -> _Array:
    largest = np.abs(reference).max()
    return np.asarray(ROUNDINGS * (eps * np.abs(reference) + min(eps, float(np.finfo(np.float32).eps)) * largest))


def _undecided(different: _Array, changes: Iterator[_Array]) -> _Array:
    """Return those of the differences of integers that are in no element that moving the arithmetic changes."""
    if different.any():
        for changed in changes:
            different = different & ~changed
            if not different.any():
                break
    return different


def _judged(error: _Array, bound: _Array, reference: _Array, changes: Iterator[_Array]) -> tuple[float, float]:
    """Return error and bound of the worst element, where each bound may be exceeded by what moving may do there."""
    error = np.where(np.isnan(error), np.inf, error)
    granted = np.zeros(reference.shape)
    while (error > bound + granted).any():
        change = next(changes, None)
        if change is None:
            break
        granted = np.maximum(granted, MOVED_SHARE * peer_error(_plus(reference, change), reference))
    bound = bound + granted
    at = int((error / bound).argmax())
    return float(error.ravel()[at]), float(bound.ravel()[at])


def _ratio(error: float, bound: float) -> float:
    return error / bound if bound else (math.inf if error else 0.0)


def _excess(report: OutputReport) -> float:
    return _ratio(report.error, report.bound)


def _is_float(array: _Array) -> bool:
    return array.dtype.kind == "f" or array.dtype == ml_dtypes.bfloat16


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


def _random_outputs(model: ir.Model) -> set[str]:
    """Return the names of the outputs that depend on a node that draws random numbers."""
    random_functions: set[ir.OperatorIdentifier] = set()
    # One round for each level of calls.
    for _ in model.functions:
        random_functions |= {
            key
            for key, function in model.functions.items()
            if any(_draws(n, random_functions) for n in function.all_nodes())
        }
    tainted: set[ir.Value | None] = set()
    for node in model.graph:
        if any(_draws(n, random_functions) or not tainted.isdisjoint(n.inputs) for n in _with_subgraphs(node)):
            tainted.update(node.outputs)
    return {str(value.name) for value in model.graph.outputs if value in tainted}


def _with_subgraphs(node: ir.Node) -> Iterator[ir.Node]:
    yield node
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH and not attribute.is_ref():
            yield from attribute.as_graph().all_nodes()
        elif attribute.type == ir.AttributeType.GRAPHS and not attribute.is_ref():
            for graph in attribute.as_graphs():
                yield from graph.all_nodes()


def _draws(node: ir.Node, random_functions: set[ir.OperatorIdentifier]) -> bool:
    if node.op_identifier() in random_functions:
        return True
    if node.domain not in ("", "com.microsoft"):
        return False
    if node.op_type != "Dropout":
        return node.op_type in _RANDOM_OPS
    mode = node.inputs[2] if len(node.inputs) > 2 else None
    if mode is None:
        return False
    constant = ir.convenience.get_const_tensor(mode)
    return constant is None or bool(constant.numpy().any())
