"""Graphs written otherwise: each is fused with the right numbers, or `explain` says why it is not.

    python tests/support/respelling_sweep.py 1000 [KIND ...]     of each operator, or of those that are named

Outcomes go into build/respelled/KIND.log, and seeds that are there are not run again. At the end, as with a count of 0,
a table has what came of all seeds in the logs. `--show` prints the refusals too.
"""

from __future__ import annotations

import argparse
import random
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
from respelling import Change, changes_of, respelled
from respelling_samples import KINDS, UNFUSED, Array, Sample, as_small_as_it_is, samples
from sweeping import Log, Outcome, Sweep

import gradfuse
from gradfuse.testing import assert_gradients_close

_ALL_OPERATORS = 10
"""In one of this many cases other operators are fused too."""
_WITH = {"ScaledDotProductAttentionBackward": ("ScaledDotProductAttention",)}
_WRONG = 1e-3
"""How far a graph that is written otherwise may be from the exact results, in their largest."""


def outcome(kind: str, seed: int) -> Outcome:
    """What came of a sample with some changes, by a seed."""
    sample = samples(kind)[seed % len(samples(kind))]
    result = Outcome(seed, {"made": 1})
    changes = changes_of(random.Random(f"{kind} {seed}"))
    try:
        with as_small_as_it_is(kind):
            _try(kind, sample, changes, result)
    except Exception:
        result.failures.append(f"{kind} {seed} {sample.name}: {traceback.format_exc(limit=-3)}")
    return result


def _try(kind: str, sample: Sample, changes: Sequence[Change], result: Outcome) -> None:
    model, done = respelled(sample.model, changes, result.seed)
    where = f"{kind} {result.seed} {sample.name} ({'; '.join(done)})"
    plain = _run(model, sample.feeds)
    for name, exact in sample.exact.items():
        far = float(np.abs(plain[name] - exact).max(initial=0))
        if not far <= _WRONG * max(1.0, float(np.abs(exact).max(initial=0))):
            result.failures.append(f"{where}: the changes make another {name}, {far:g} off")
            return
    fused = _fused(kind, model, result.seed) if kind not in UNFUSED or result.seed % _ALL_OPERATORS == 0 else None
    if fused is not None:
        _check(where, sample, plain, fused, result)
    if fused is not None and 0 < sample.count <= sum(fusion.op == kind for fusion in fused.report.fusions):
        result.counts["matched"] = 1
        return
    regions = gradfuse.explain(model).regions
    reasons = [region.reason for region in regions if region.op == kind and region.status == "unmatched"]
    if reasons:
        result.counts["refused"] = 1
        result.refusals.append(reasons[0])
    else:
        shortest = fewest(kind, sample, changes, result.seed)
        result.failures.append(f"{kind} {result.seed} {sample.name}: lost without a reason by {'; '.join(shortest)}")


def _check(where: str, sample: Sample, plain: Mapping[str, Array], fused: gradfuse.FuseResult, result: Outcome) -> None:
    """Adds what is wrong with the numbers of a fused model, or with a rule, to the failures."""
    if any(miss.bug for miss in fused.report.near_misses):
        result.failures.append(f"{where}: {fused.report}")
    got = _run(fused.model, sample.feeds)
    largest = max(1.0, *(float(np.abs(array).max(initial=0)) for array in sample.exact.values()))
    for name, exact in sample.exact.items():
        try:
            if exact.dtype != np.float64:
                np.testing.assert_array_equal(got[name], exact)
                continue
            assert_gradients_close(got[name], plain[name], exact, np.float32, terms=4 * largest)
        except AssertionError as error:
            result.failures.append(f"{where}: {name}: {error}")


def fewest(kind: str, sample: Sample, changes: Sequence[Change], seed: int) -> list[str]:
    """The fewest of the changes with which the operator is not fused as often as in the sample."""
    kept = list(changes)
    for change in changes:
        fewer = [one for one in kept if one is not change]
        report = _fused(kind, respelled(sample.model, fewer, seed)[0], seed).report
        if sum(fusion.op == kind for fusion in report.fusions) < sample.count:
            kept = fewer
    return respelled(sample.model, kept, seed)[1]


def _fused(kind: str, model: onnx.ModelProto, seed: int) -> gradfuse.FuseResult:
    """The model with the operator, and in one of ten cases with all others."""
    only = None if seed % _ALL_OPERATORS == 0 else [kind, *_WITH.get(kind, ())]
    return gradfuse.fuse(model, None if kind in UNFUSED else only, policy="all", bodies=False)


def _run(model: onnx.ModelProto, feeds: Mapping[str, Array]) -> dict[str, Array]:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    gradfuse.register(options)
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    results = session.run(None, {one.name: feeds[one.name] for one in session.get_inputs()})
    return dict(zip([one.name for one in session.get_outputs()], results, strict=True))


def table(outcomes: Mapping[str, Sweep]) -> str:
    """A line an operator: graphs made, matched, refused with a reason, and failures."""
    columns = ("made", "matched", "refused", "failures")
    width = max(map(len, outcomes))
    lines = ["  ".join([" " * width, *(f"{column:>8}" for column in columns)])]
    for kind, sweep in outcomes.items():
        counts = [*(sweep.counts[column] for column in columns[:-1]), len(sweep.failures)]
        lines.append("  ".join([kind.ljust(width), *(f"{count:>8}" for count in counts)]))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("count", type=int, help="how many of each operator; 0: show what the logs have")
    parser.add_argument("kinds", nargs="*", metavar="KIND")
    parser.add_argument("--logs", type=Path, default=Path("build") / "respelled")
    parser.add_argument("--show", action="store_true", help="print the refusals, each with one of its seeds")
    args = parser.parse_args()
    from gradfuse.models import inference, inference_worker

    inference.ask = inference_worker.infer
    found: dict[str, Sweep] = {}
    for kind in args.kinds or KINDS:
        log = Log(args.logs / f"{kind}.log")
        for seed in range(args.count):
            if seed not in log.outcomes:
                log.add(outcome(kind, seed))
                print(*log.outcomes[seed].failures, sep="\n", end="\n" * bool(log.outcomes[seed].failures), flush=True)
        found[kind] = Sweep.of(log.outcomes.values())
    if args.show:
        for kind, sweep in found.items():
            print(f"{kind}\n{sweep}\n")
    print(table(found))


if __name__ == "__main__":
    main()
