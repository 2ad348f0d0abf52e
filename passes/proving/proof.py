"""The test of a match by numbers: the subgraph and the fused op run side by side on numbers chosen to tell them apart.

The proof of a match is algebra. This test is arithmetic, and shares no code with it but the list of values at which a
form begins. From these *leaves* on, onnx's reference evaluator runs the nodes of the original and of the rewrite in
float64, fused nodes by the bodies of their operators. The leaves are random and adversarial: peaked values, zeros, NaNs
and infinities, numbers near the constants of the graph, ignored targets, masks of all ones and all zeros. Every
symbolic dimension has size 0, 1, 2 and more, beside others of other sizes. What the original does not take is left
out.

A fused value must agree wherever the original is finite. Where it is not, because the original computes 0 x NaN or
0 x Inf in a mask, an ignored row or a one-hot, the fused value may be zero. It may also be what the original gives with
any finite number in the place of the NaN, or with a huge one in the place of the infinity.

No operator is named here. What the test knows of one is in its `gradfuse.custom_ops.Operator`.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from gradfuse.passes.proving import shrinking
from gradfuse.passes.proving.evaluation import evaluator_of
from gradfuse.passes.proving.region import Region
from gradfuse.passes.proving.samples import MOVES, Sample, Samples, variants
from gradfuse.passes.proving.shrinking import Table
from gradfuse.passes.proving.verdicts import Refuted, Unproved

if TYPE_CHECKING:
    from gradfuse.passes.matching import Rewrite, Site

Array = npt.NDArray[Any]

_PROVED: set[bytes] = set()
_MOST_PROVED = 10_000


def prove(site: Site, rewrite: Rewrite, tolerance: float) -> None:
    """Run a rewrite against the subgraph that it is to replace; their constants may differ by the relative tolerance.

    Equal subgraphs, such as those of the layers of a network, are run once: the result stays for this process.

    Raises:
        Refuted: the two differ: the rule is wrong.
        Unproved: the two could not be compared.
    """
    Proof(Region(site, rewrite), tolerance).run()


@dataclass(frozen=True)
class _Run:
    """What one sample gave; `others` is the original on the numbers of `samples.variants`."""

    original: Array
    fused: Array
    others: list[Array]
    sample: Sample

    @property
    def scale(self) -> float:
        return float(np.abs(self.original[np.isfinite(self.original)]).max(initial=0.0))

    @property
    def typical(self) -> float:
        finite = np.abs(self.original[np.isfinite(self.original)])
        return float(np.median(finite)) if finite.size else 0.0


_E = TypeVar("_E", bound=Exception)


def _without_frames(error: _E) -> _E:
    """Return an exception that does not keep alive what was in memory where it was raised, nor do those it is from."""
    one: BaseException | None = error
    while one is not None:
        one.__traceback__ = None
        one = one.__cause__ or one.__context__
    return error


class Proof:
    """One match on the bench."""

    def __init__(self, region: Region, tolerance: float) -> None:
        self.region = region
        self.samples = Samples(region)
        self.tolerance = tolerance

    def run(self) -> None:
        """Raise the verdict on the region, if there is any; it is looked up where an equal region had one before."""
        refused, key = self.region.site.refused, self._key()
        if key in _PROVED:
            return
        if key not in refused:
            verdict = self._verdict()
            if verdict is None:
                if len(_PROVED) >= _MOST_PROVED:
                    _PROVED.clear()
                _PROVED.add(key)
                return
            # Only here, as its text has names of this model.
            refused[key] = verdict
        raise refused[key]

    def _key(self) -> bytes:
        """Return what a verdict depends on: the region, and the sizes that all samples have in it."""
        return self.region.key(self.tolerance, self.samples.sizes())

    def _verdict(self) -> Exception | None:
        try:
            self._compare()
        except (Refuted, Unproved) as verdict:
            return _without_frames(verdict)
        return None

    def _compare(self) -> None:
        evaluator, original = (evaluator_of(m) for m in (self.region.model, self.region.original))
        problem: Exception | None = None
        rewrite = self.region.rewrite
        attempts = shrinking.attempts(self.samples.elements, self.region.static_sizes)
        if rewrite.linear:
            attempts = shrinking.given(self.samples.elements, rewrite.table)
        for table, rescale in attempts:
            try:
                self._compare_at(evaluator, original, table, rescale)
                return
            except Refuted as error:
                # In other sizes the constants of the graph may be wrong.
                problem = Unproved(f"in smaller sizes the original is {error}") if table else _without_frames(error)
            except Unproved as error:
                problem = _without_frames(error)
        assert problem is not None
        raise problem

    def _compare_at(self, evaluator: Any, original: Any, table: Table, rescale: bool) -> None:
        """Compare in one way to shrink: every sample that the original takes must agree, and one must be no zero."""
        names = self.region.names
        constants = {names[v]: shrinking.resized(a, table, rescale) for v, a in self.region.constants.items()}
        runs: list[_Run] = []
        failure = ""
        for sample in self.samples.of(constants.values()):
            leaves: dict[str, Array] | None = None
            with np.errstate(all="ignore"), warnings.catch_warnings():
                # Of a mean over nothing, which some samples ask for.
                warnings.simplefilter("ignore", RuntimeWarning)
                try:
                    leaves = self.samples.feeds(sample, table)
                    plain, fused = (np.asarray(a) for a in evaluator.run(None, constants | leaves))
                    others = [
                        np.asarray(original.run(None, constants | feeds)[0])
                        for feeds in variants(sample, leaves, constants, self.tolerance)
                    ]
                except Exception as error:  # The evaluator raises whatever its NumPy code raises.
                    failure = (str(error) or repr(error)).splitlines()[0]
                    if leaves is not None and not sample.is_empty and _takes(original, constants | leaves):
                        raise Unproved(
                            f"the operator does not take what the original takes ({self._at(sample)})"
                        ) from error
                    continue
                runs.append(_Run(plain, fused, others, sample))
        if not runs:
            raise Unproved(f"it cannot be run: {failure}")
        # Of all runs, as in some of them all may be what rounding leaves of a difference.
        scale = max((r.scale for r in runs if not r.sample.is_near), default=0.0)
        typical = float(np.median([r.typical for r in runs if not r.sample.is_near] or [0.0]))
        for run in runs:
            with np.errstate(all="ignore"):
                self._require_agreement(run, scale, typical)
        if scale == 0.0:
            raise Unproved("no run gave a finite number other than zero")

    def _require_agreement(self, run: _Run, scale: float, typical: float) -> None:
        """Compare one run; of all with ordinary numbers `scale` is the largest value, and `typical` a usual one."""
        original, fused, sample = run.original, run.fused, run.sample
        empty, near = sample.is_empty, sample.is_near
        if original.shape != fused.shape:
            raise (Unproved if empty else Refuted)(
                f"of shape {original.shape}, fused {fused.shape} ({self._at(sample)})"
            )
        bound: Array = np.full(original.shape, 4 * self.tolerance * (max(run.scale, scale) if near else scale))
        if self.region.rewrite.elementwise and not near:
            # One element says nothing of the size of others: a quotient by a small number may be huge.
            # Where all are alike, they may be what is left of a difference.
            bound = 4 * self.tolerance * (np.abs(original) + max(run.typical, typical))
        if near:
            # Among large numbers a difference may be what rounding leaves, of constants too, or a condition turn.
            bound = bound + MOVES * np.abs(original - run.others[0])

        def close(a: Array) -> Array:
            return np.asarray(np.abs(a - fused) <= bound)

        right = close(original)
        free = ~np.isfinite(fused) | (fused == 0) | near
        not_finite = bool(run.others) and not near
        if not_finite:
            *numbers, limit = (close(a) for a in run.others)
            free |= np.logical_and.reduce(numbers) | limit
            if self.region.operator.spreads_nan:
                right |= np.isnan(fused) & _in_line_with_nan(original)
        right |= ~np.isfinite(original) & free
        right |= near & ~np.isfinite(bound)
        if not right.all():
            wrong = ~right & np.isfinite(original)
            at = tuple(int(i) for i in np.argwhere(wrong if wrong.any() else ~right)[0])
            text = f"{original[at]:.9g} at {list(at)}, fused {fused[at]:.9g} ({self._at(sample)})"
            # Near constants it may be a small term that the rule took for rounding.
            if wrong.any() and not (not_finite or empty or near):
                raise Refuted(text)
            # As x / k * k is, where k is 0: the rule is right for all numbers that the graph is made for.
            raise Unproved(f"the original is {text}")

    def _at(self, sample: Sample) -> str:
        sizes = "".join(f", {d} = {n}" for d, n in zip(self.region.dims, sample.sizes, strict=True))
        return f"{sample.style} values{sizes}, seed {sample.seed}"


def _takes(model: Any, feeds: Mapping[str, Array]) -> bool:
    try:
        model.run(None, feeds)
    except Exception:  # The evaluator raises whatever its NumPy code raises.
        return False
    return True


def _in_line_with_nan(array: Array) -> Array:
    """The elements that share a line along some dimension with a NaN."""
    nan = np.isnan(array)
    for axis in range(nan.ndim):
        nan = nan | np.isnan(array).any(axis, keepdims=True)
    return np.asarray(nan)
