"""Whether `fuse` preserves the results of graphs that are almost backward passes (almost.py).

:func:`judged` fuses a graph with both policies and runs the original and the fused model for many run-time sizes and
inputs, with the library and by the bodies of the operators.

    python tests/support/fuzzing.py SEED            the verdict on one graph; --save FILE writes it, and --text shows it
    python tests/support/fuzzing.py FIRST LAST       the failures among many, and the counts
"""

from __future__ import annotations

import argparse
import random
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx
import onnxruntime as ort
from almost import NUMPY_TYPES, Array, Graph, Input, Invalid, drawn
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

import gradfuse
from gradfuse.models import inference, inference_worker

LARGEST_SIZE = 5
RUNS = 14

# Inputs


def _sizes(symbols: Sequence[str], rng: random.Random) -> Iterator[dict[str, int]]:
    """Sizes of the symbols: all 1, one of them 1, all equal, all different, and random ones."""
    yield {s: 2 + k % 4 for k, s in enumerate(symbols)}
    if not symbols:
        while True:
            yield {}
    yield dict.fromkeys(symbols, 3)
    yield dict.fromkeys(symbols, 1)
    for one in symbols:
        yield {s: 1 if s == one else 3 for s in symbols}
    for other in symbols if len(symbols) > 1 else ():
        yield {s: 4 if s == other else 1 for s in symbols}
    while True:
        yield {s: rng.randint(1, LARGEST_SIZE) for s in symbols}


_MODES = (
    ("zeros", "ties", "large", "near", "nan", "inf", "spread"),
    ("zeros", "ties", "small", "subnormal", "near", "nan", "inf", "spread"),
)
"""How the numbers of a run are drawn. Huge and tiny numbers are not mixed: the order of products would decide."""


def _feed(
    given: Input, sizes: Mapping[str, int], graph: Graph, rng: np.random.Generator, edge: bool, modes: Sequence[str]
) -> Array:
    shape = [d if isinstance(d, int) else sizes[d] for d in given.value.shape]
    kind = NUMPY_TYPES[given.value.kind]
    limit = given.limit if isinstance(given.limit, int) else sizes.get(given.limit, 3)
    match given.role:
        case "mask":
            return np.asarray(rng.random(shape) < rng.choice([0.0, 0.4, 0.4, 1.0]))
        case "target":
            t = rng.integers(0, limit, shape)
            if graph.ignore and limit:
                t = np.where(rng.random(shape) < 0.3, graph.ignore[0], t)
            if edge and rng.random() < 0.3:
                t = np.where(rng.random(shape) < 0.3, rng.choice([-1, -limit, limit - 1, 0, -100]), t)
            return np.asarray(t, kind)
        case "length":
            return np.asarray(rng.integers(0, limit + 1, shape), kind)
        case "ends":
            ends = np.sort(rng.integers(0, limit + 1, shape))
            if ends.size:
                ends[-1] = limit
            return np.asarray(ends, kind)
    x = rng.standard_normal(shape)
    if given.role == "positive":
        x = np.abs(x) + 0.1
    if given.role == "probabilities":
        x = np.exp(x)
        x = x / x.sum(-1, keepdims=True) if x.ndim else x
    if given.role == "log":
        x = np.exp(x)
        x = np.log(x / x.sum(-1, keepdims=True)) if x.ndim else x
    if edge and rng.random() < 0.6:
        at = rng.random(shape) < 0.3
        mode = rng.choice(modes)
        # The inverse of a sum of weights that are next to nothing overflows.
        match "spread" if given.role == "positive" and mode in ("large", "small", "subnormal") else mode:
            case "zeros":
                x = np.where(at, x, 0.0)
            case "ties":
                x = np.full(shape, x.flat[0] if x.size else 0.0)
            case "large":
                x = x * rng.choice([1e30, 1e37, 1e4])
            case "small":
                x = x * 1e-30
            case "subnormal":
                x = x * 1e-41
            case "near":
                near = [c for c in graph.constants if abs(c) >= 100] or graph.constants or [1.0]
                x = x + rng.choice(near) * rng.choice([1, -1])
            case "nan":
                x = np.where(at, np.nan, x)
            case "inf":
                # A softmax is defined for logits of -inf, not for +inf.
                x = np.where(at, -np.inf if given.role == "logits" else rng.choice([np.inf, -np.inf]), x)
            case _:
                x = x * 30
    if kind is np.float16:
        x = np.where(np.isfinite(x), np.clip(x, -6e4, 6e4), x)
    return np.asarray(x, kind)


# Verdicts


@dataclass
class Verdict:
    """The verdict on a graph. `failures` are lines: what, policy, with or without the library, sizes, run."""

    seed: int
    fused: bool = False
    ran: int = 0
    skipped: int = 0
    refused: int = 0
    failures: list[str] = field(default_factory=list)
    operators: tuple[str, ...] = ()


def _session(model: onnx.ModelProto, library: bool = False, optimized: bool = True) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    if not optimized:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    if library:
        gradfuse.register(options)
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


_REFUSALS = ("expected a class in", "target_out_of_range", "group_idx[", "group_ends_decrease")
"""In the errors of kernels and of function bodies, for targets that are not a class and ends that decrease."""


def judged(graph: Graph) -> Verdict:
    """Fuses and compares.

    Raises:
        Invalid: onnxruntime does not take the graph, or no sizes for it.
    """
    verdict = Verdict(graph.seed)
    try:
        original = _session(graph.model, optimized=False)
    except Exception as error:
        raise Invalid(str(error)) from error
    fused: list[tuple[str, onnx.ModelProto]] = []
    for policy in ("all", "profitable"):
        try:
            result = gradfuse.fuse(graph.model, policy=policy)
        except Exception:
            line = traceback.format_exc().strip().splitlines()
            verdict.failures.append(f"traceback: {policy}: {line[-1]} at {line[-3].strip()}")
            continue
        verdict.failures += [
            f"bug: {policy}: {m.rule} at {m.node}: {m.reason}" for m in result.report.near_misses if m.bug
        ]
        if not result.report.fusions and not result.report.near_misses:
            break  # Matches that the policy "all" does not find cannot be profitable.
        if result.report.fusions:
            verdict.fused = True
            verdict.operators = tuple(f.op for f in result.report.fusions)
            if all(result.model != other for _, other in fused):
                fused.append((policy, result.model))
    if not fused:
        return verdict
    sessions: list[tuple[str, ort.InferenceSession]] = []
    for policy, model in fused:
        for library in (True, False):
            name = f"{policy}, {'library' if library else 'bodies'}"
            try:
                sessions.append((name, _session(model, library)))
            except Exception as error:
                verdict.failures.append(f"unable: {name}: no session: {_line(error)}")
    exact = _Exact(graph.model, graph.constants)
    rng = random.Random(graph.seed)
    for run, sizes in zip(range(RUNS), _sizes(graph.symbols, rng), strict=False):
        numbers = np.random.default_rng([graph.seed, run])
        edge = run % 2 == 1 or run > RUNS // 2
        feeds = {i.value.name: _feed(i, sizes, graph, numbers, edge, _MODES[run // 2 % 2]) for i in graph.inputs}
        try:
            wanted = original.run(None, feeds)
        except Exception:
            verdict.skipped += 1
            continue
        verdict.ran += 1
        bounds: list[tuple[Array, float]] | None = None
        for name, session in list(sessions):
            place = f"{name}, sizes {sizes}, run {run}"
            try:
                got = session.run(None, feeds)
            except Exception as error:
                if _may_refuse(graph, feeds, sizes) and any(t in str(error) for t in _REFUSALS):
                    verdict.refused += 1
                    continue
                verdict.failures.append(f"unable: {place}: {_line(error)}")
                sessions.remove((name, session))
                continue
            bounds = bounds or exact.bounds(feeds, wanted)
            by_rows = not {"CrossEntropyLossGrad", "ScaledMaskedSoftmaxBackward"}.isdisjoint(verdict.operators)
            wrong = _difference(got, wanted, bounds, by_rows)
            if wrong and exact.is_half:
                # Which nodes are computed in float32 may be other ones in the fused model.
                nearest = list(wanted)
                for other in exact.by_node(feeds):
                    nearest = [_nearest(g, n, o) for g, n, o in zip(got, nearest, other, strict=True)]
                if not _difference(got, nearest, bounds, by_rows):
                    continue
            if wrong and "other function" in graph.changes and _has_non_finite(feeds):
                continue  # A comparison makes a number of a NaN that a masked product has, and the operator has not.
            if wrong:
                verdict.failures.append(f"wrong: {place}: {wrong}")
                sessions.remove((name, session))
    if not verdict.ran:
        raise Invalid("onnxruntime takes no sizes")
    return verdict


def _line(error: Exception) -> str:
    return str(error).strip().replace("\n", " ")[-200:]


def _may_refuse(graph: Graph, feeds: Mapping[str, Array], sizes: Mapping[str, int]) -> bool:
    """Whether an operator may find targets that are no class, or ends that fall: the graph or the inputs make such."""
    if graph.changes:
        return True
    for given in graph.inputs:
        if given.role == "target":
            t = feeds[given.value.name]
            classes = given.limit if isinstance(given.limit, int) else sizes[given.limit]
            if np.any(((t < 0) | (t >= classes)) & ~np.isin(t, graph.ignore)):
                return True
    return False


class _Exact:
    """The original in float64, and how far rounding may take the outputs from that."""

    def __init__(self, model: onnx.ModelProto, constants: Sequence[float]) -> None:
        wide, self._noise = in_float64(model)
        try:
            self._session = _session(wide, optimized=False)
        except Exception:
            self._session = ReferenceEvaluator(wide)
        self._model = model
        half = any(i.type.tensor_type.elem_type == TensorProto.FLOAT16 for i in model.graph.input)
        half = half or any(n.op_type == "Cast" and n.attribute[0].i == TensorProto.FLOAT16 for n in model.graph.node)
        double = any(i.type.tensor_type.elem_type == TensorProto.DOUBLE for i in model.graph.input)
        self.is_half = half
        self.eps = 1e-3 if half else 2.2e-16 if double else 1.2e-7
        self.subnormal = 6e-8 if half else 0.0 if double else 1.4e-45
        # Factors may come after a product that has become subnormal.
        factors = np.prod([max(abs(c), 1.0) for c in constants if np.isfinite(c)], initial=1.0)
        self.tiny = max(3e-5 if half else 1e-300 if double else 1e-36, float(64 * self.subnormal * factors))

    def by_node(self, feeds: Mapping[str, Array]) -> list[list[Array]]:
        """The original with the result of every node in its own type, where onnxruntime computes some in float32.

        Once by onnx's evaluator, and once by onnxruntime with a second use of every node, which makes it round others.
        """
        results: list[list[Array]] = []
        with np.errstate(all="ignore"):
            by_onnx = ReferenceEvaluator(_with_scalar_depths(self._model)).run(None, dict(feeds))
        results.append([np.asarray(a) for a in by_onnx])
        inferred = onnx.shape_inference.infer_shapes(self._model).graph
        watched = onnx.ModelProto()
        watched.CopyFrom(self._model)
        watched.graph.output.extend(v for v in inferred.value_info if v.type.tensor_type.elem_type)
        results.append(_session(watched, optimized=False).run(None, dict(feeds))[: len(self._model.graph.output)])
        return results

    def bounds(self, feeds: Mapping[str, Array], wanted: Sequence[Array]) -> list[tuple[Array, float]]:
        """For each output the exact value, and how far a value may be from it.

        That is what the original's own rounding does, or rounding the inputs and the result of every node.
        """
        rng = np.random.default_rng(0)

        def rounded(shape: Sequence[int]) -> Array:
            return np.asarray(1 + self.eps * rng.choice([-1.0, 1.0], shape))

        def near_to(a: Array) -> Array:
            if a.dtype.kind != "f":
                return a
            return np.asarray(a * rounded(a.shape) + np.where(a == 0, 0.0, self.subnormal * rounded(a.shape)))

        wide = {n: a.astype(np.float64) if a.dtype.kind == "f" else a for n, a in feeds.items()}
        try:
            exact = self._run(wide | {n: np.ones(()) for n in self._noise})
            near = [
                self._run({n: near_to(a) for n, a in wide.items()} | {n: rounded(()) for n in self._noise})
                for _ in range(2)
            ]
        except Exception:
            exact, near = [a.astype(np.float64) for a in wanted], []
        result = []
        for k, (value, e) in enumerate(zip(wanted, exact, strict=True)):
            with np.errstate(all="ignore"):
                errors = [np.abs(value.astype(np.float64) - e), *(np.abs(n[k] - e) for n in near)]
            bound = 32 * sum(_largest(error) for error in errors) + 64 * self.eps * _largest(e) + self.tiny
            result.append((e, bound))
        return result

    def _run(self, feeds: Mapping[str, Array]) -> list[Array]:
        with np.errstate(all="ignore"):
            return [np.asarray(a) for a in self._session.run(None, dict(feeds))]


def _largest(array: Array) -> float:
    finite = array[np.isfinite(array)] if array.dtype.kind == "f" else array
    return float(np.abs(finite).max(initial=0))


def _nearest(array: Array, a: Array, b: Array) -> Array:
    """For each element, the one of two arrays that is closer to a third; a NaN is close to a NaN."""
    with np.errstate(all="ignore"):
        nearer = np.where(np.isnan(array), np.isnan(a), np.abs(array - a) <= np.abs(array - b))
        return np.asarray(np.where(nearer, a, b))


def _has_non_finite(feeds: Mapping[str, Array]) -> bool:
    return not all(np.isfinite(a).all() for a in feeds.values() if a.dtype.kind == "f")


def _in_line_with_nan(array: Array) -> Array:
    """The elements that share a line along some dimension with a NaN."""
    nan = np.isnan(array)
    lines = nan.copy()
    for axis in range(nan.ndim):
        lines |= nan.any(axis, keepdims=True)
    return lines


def _difference(
    got: Sequence[Array], wanted: Sequence[Array], bounds: Sequence[tuple[Array, float]], by_rows: bool
) -> str:
    """The worst difference that rounding does not explain; empty if there is none.

    Where the original is finite, the fused value must be, but in a row that has a NaN: a softmax whose maximum is not
    subtracted is NaN at an infinite logit alone, the operators are in all of its row (docs/canonical-form.md). Where
    the original is not finite, the fused value may be zero, as masked elements and ignored rows are, or what the
    original computes in float64, or no number either.
    """
    for k, (g, w, (e, bound)) in enumerate(zip(got, wanted, bounds, strict=True)):
        if g.shape != w.shape or g.dtype != w.dtype:
            return f"output {k} is {g.dtype}{list(g.shape)} for {w.dtype}{list(w.shape)}"
        if g.dtype.kind != "f":
            if not np.array_equal(g, w):
                return f"output {k} differs"
            continue
        with np.errstate(all="ignore"):
            value = g.astype(np.float64)
            near = np.isfinite(g) & (np.fmin(np.abs(value - e), np.abs(value - w.astype(np.float64))) <= bound)
        # What is infinite in float64 was divided by what rounding has left of a 0.
        near |= np.isfinite(w) & ~np.isfinite(e) & ~np.isnan(g)
        # So may be what is infinite in an output whose bound is beyond all its values, or beyond the largest number.
        near |= np.isinf(g) & (bound > min(_largest(e), float(np.finfo(g.dtype).max)))
        # The order of products decides on which side of the largest number a value ends that is near to it.
        near |= np.isinf(g) & (np.sign(g) == np.sign(e)) & (np.abs(e) > np.finfo(g.dtype).max / 64)
        if by_rows:
            near |= np.isnan(g) & _in_line_with_nan(w)
        wrong = np.isfinite(w) & ~near
        invented = ~np.isfinite(w) & (np.abs(e) <= np.finfo(g.dtype).max) & np.isfinite(g) & (g != 0) & ~near
        for which, found in (("", wrong), ("invented, ", invented)):
            if found.any():
                at = tuple(int(i) for i in np.argwhere(found)[0])
                return (
                    f"output {k}, {which}{list(at)}: {g[at]:.6g} for {w[at]:.6g}, exact {e[at]:.6g}, bound {bound:.3g}"
                )
    return ""


def _with_scalar_depths(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model as onnx's evaluator takes it: the depth of a OneHot has no dimensions there."""
    result = onnx.ModelProto()
    result.CopyFrom(model)
    del result.graph.node[:]
    for node in model.graph.node:
        if node.op_type == "OneHot":
            result.graph.node.append(helper.make_node("Squeeze", [node.input[1]], [f"{node.output[0]}_depth"]))
        result.graph.node.append(node)
        if node.op_type == "OneHot":
            result.graph.node[-1].input[1] = f"{node.output[0]}_depth"
    return result


def in_float64(model: onnx.ModelProto) -> tuple[onnx.ModelProto, list[str]]:
    """The model with float64 in the place of all other float types, and inputs that its floats are multiplied by."""
    wide = _with_scalar_depths(model)
    floats = (TensorProto.FLOAT, TensorProto.FLOAT16)

    def widened(tensor: onnx.TensorProto) -> None:
        if tensor.data_type in floats:
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float64), tensor.name))

    for tensor in wide.graph.initializer:
        widened(tensor)
    for value in (*wide.graph.input, *wide.graph.output):
        if value.type.tensor_type.elem_type in floats:
            value.type.tensor_type.elem_type = TensorProto.DOUBLE
    for node in wide.graph.node:
        for a in node.attribute:
            if a.name in ("to", "dtype") and a.i in floats:
                a.i = TensorProto.DOUBLE
            if a.type == onnx.AttributeProto.TENSOR:
                widened(a.t)
    inferred = onnx.shape_inference.infer_shapes(wide).graph
    types = {v.name: v.type.tensor_type.elem_type for v in (*inferred.value_info, *inferred.output)}
    noise: list[str] = []
    nodes = [*wide.graph.node]
    del wide.graph.node[:]
    for node in nodes:
        wide.graph.node.append(node)
        own = wide.graph.node[-1]
        # What is cast is exact, as are integers that take a detour through floats.
        for k, name in enumerate(node.output if node.op_type != "Cast" else ()):
            if types.get(name) == TensorProto.DOUBLE:
                noise.append(f"noise_{len(noise)}")
                own.output[k] = f"{name}_exact"
                wide.graph.node.append(helper.make_node("Mul", [own.output[k], noise[-1]], [name]))
                wide.graph.input.append(helper.make_tensor_value_info(noise[-1], TensorProto.DOUBLE, []))
    return wide, noise


# Many


@dataclass
class Sweep:
    """The counts of many graphs, and their failures as lines that start with the seed."""

    counts: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def run(self, seeds: Iterable[int]) -> Sweep:
        for seed in seeds:
            try:
                verdict = judged(drawn(seed))
            except Invalid:
                self.counts["invalid"] += 1
                continue
            self.counts["graphs"] += 1
            self.counts["fused"] += verdict.fused
            self.counts.update(f"fused {op}" for op in set(verdict.operators))
            self.counts["runs"] += verdict.ran
            self.counts["sizes not taken by the original"] += verdict.skipped
            self.counts["refused as documented"] += verdict.refused
            for kind in ("wrong", "unable", "traceback", "bug"):
                self.counts[kind] += any(line.startswith(kind) for line in verdict.failures)
            self.failures += [f"{seed}: {line}" for line in verdict.failures]
        return self

    def __str__(self) -> str:
        return ", ".join(f"{name} {count}" for name, count in self.counts.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("seeds", type=int, nargs="+")
    parser.add_argument("--save")
    parser.add_argument("--text", action="store_true")
    args = parser.parse_args()
    # The checker has inferred the shapes of each graph in this process before.
    inference.ask = inference_worker.infer
    if len(args.seeds) == 2:
        begin = time.perf_counter()
        sweep = Sweep()
        for seed in range(*args.seeds):
            before = len(sweep.failures)
            sweep.run([seed])
            for line in sweep.failures[before:]:
                print(line, flush=True)
        print(sweep)
        print(f"{time.perf_counter() - begin:.1f} s")
        return
    graph = drawn(args.seeds[0])
    print("changes:", ", ".join(graph.changes))
    if args.save:
        onnx.save(graph.model, args.save)
    if args.text:
        print(onnx.printer.to_text(graph.model))
    verdict = judged(graph)
    print(verdict)


if __name__ == "__main__":
    main()
