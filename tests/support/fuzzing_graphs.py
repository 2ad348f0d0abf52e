"""Whether gradients of ONNX models agree with differences, whatever exporter wrote the model (random_graphs.py).

:func:`judged` takes a model through `differentiate`, `build_training_step` with and without `fuse`, and `fuse`. The
derivatives are central differences of the model as it was written, in float64. :func:`smallest` reduces a failing
model.

    python tests/support/fuzzing_graphs.py SEED            the verdict on a model; --small makes it small first

sweeping.py runs many.
"""

from __future__ import annotations

import argparse
import functools
import random
import re
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
from differences import directions
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from random_graphs import WIDTH, WORDS, Drawn, drawn
from sweeping import Outcome

import gradfuse
from gradfuse.errors import GradfuseError
from gradfuse.models import inference, inference_worker

Array = npt.NDArray[Any]
Arrays = dict[str, Array]

SIZES = ({"N": 2, "T": 3, "A": 2, "B": 3}, {"N": 2, "T": 3, "A": 1, "B": 3}, {"N": 3, "T": 4, "A": 3, "B": 1})
"""Those of the first are the fixed ones, where a model has such."""
SMALL_SIZES = ({"N": 1, "T": 3, "A": 1, "B": 3}, {"N": 2, "T": 1, "A": 1, "B": 1}, {"N": 1, "T": 1, "A": 1, "B": 1})
_STEP = 1e-4
_MOST_CHECKED = 8
"""How many parameters of a model are moved at most; which is random."""


class Invalid(Exception):
    """onnxruntime does not take the model as it was written, or gives no numbers."""


@dataclass
class Verdict:
    """The verdict on a model.

    Attributes:
        failures: lines that begin with the kind: wrong, unable, traceback, mistake, invalid, changed, unmeant.
        refusals: the texts of refusals, each with the way that it is of.
        derivatives: how many derivatives were compared.
    """

    seed: int
    failures: list[str] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)
    derivatives: int = 0
    unclear: int = 0

    @property
    def kinds(self) -> set[str]:
        return {line.split(":")[0] for line in self.failures}


def _session(model: onnx.ModelProto, *, library: bool = False, optimized: bool = True) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    if not optimized:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    if library:
        gradfuse.register(options)
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


# The model in float64, with all its floats as inputs


def _sorted(nodes: Iterable[onnx.NodeProto], known: set[str]) -> list[onnx.NodeProto]:
    """Nodes in the order in which they can be computed."""
    waiting, result = list(nodes), []
    made = {name for node in waiting for name in node.output}
    while waiting:
        ready = [n for n in waiting if all(i not in made or i in known for i in _read(n))]
        if not ready:
            raise Invalid("the nodes have no order")
        result += ready
        known = known | {name for node in ready for name in node.output}
        waiting = [n for n in waiting if all(n is not r for r in ready)]
    return result


def _read(node: onnx.NodeProto) -> set[str]:
    found = set(node.input)
    for attribute in node.attribute:
        if attribute.type == onnx.AttributeProto.GRAPH:
            inner = attribute.g
            own = {name for n in inner.node for name in n.output} | {v.name for v in inner.input}
            own |= {t.name for t in inner.initializer}
            for n in inner.node:
                found |= _read(n) - own
    return found


class Exact:
    """A model in float64: its outputs as a function of inputs and of all its float tensors, by their names."""

    def __init__(self, drawn: Drawn, *, statistics_apart: bool = False) -> None:
        """Read a model.

        Args:
            drawn: the model.
            statistics_apart: whether running statistics are tensors of their own where they are something else as well.
        """
        wide = onnx.ModelProto()
        wide.CopyFrom(drawn.model)
        wide.ir_version = max(wide.ir_version, 8)
        for opset in wide.opset_import:
            opset.domain = "" if opset.domain == "ai.onnx" else opset.domain
        graph = wide.graph
        self.values: Arrays = {}
        initializers = {t.name for t in graph.initializer}
        inputs = [v for v in graph.input if v.name not in initializers]
        del graph.input[:]
        graph.input.extend(inputs)
        del graph.value_info[:]
        for tensor in list(graph.initializer):
            if tensor.data_type == TensorProto.FLOAT:
                self.values[tensor.name] = numpy_helper.to_array(tensor)
                graph.initializer.remove(tensor)
        nodes = self._nodes(drawn.model.graph.node, drawn.standard)
        del graph.node[:]
        graph.node.extend(nodes)
        if statistics_apart:
            self._take_statistics_apart(wide)
        for function in wide.functions:
            nodes = self._nodes(function.node, drawn.standard, inside=True)
            del function.node[:]
            function.node.extend(nodes)
        for holder, imports in ((graph, wide.opset_import), *((f, f.opset_import) for f in wide.functions)):
            for node in holder.node if any(one.domain == "" and one.version >= 21 for one in imports) else ():
                if node.op_type == "GroupNormalization" and not node.domain:
                    # It computes in float32 otherwise, which is noise in differences.
                    node.attribute.append(helper.make_attribute("stash_type", int(TensorProto.DOUBLE)))
        for name in self.values:
            graph.input.append(helper.make_tensor_value_info(name, TensorProto.DOUBLE, None))
        for value in (*graph.input, *graph.output):
            if value.type.tensor_type.elem_type == TensorProto.FLOAT:
                value.type.tensor_type.elem_type = TensorProto.DOUBLE
            value.type.tensor_type.ClearField("shape")
        self.outputs = [value.name for value in graph.output]
        self._wide = wide
        self._evaluator: Any = None
        try:
            self._evaluator = _session(wide, optimized=False)
        except Exception:
            self._evaluator = ReferenceEvaluator(wide)

    def _nodes(
        self, nodes: Iterable[onnx.NodeProto], standard: Mapping[str, list[onnx.NodeProto]], inside: bool = False
    ) -> list[onnx.NodeProto]:
        """Nodes in float64; float Constants outside of functions become inputs."""
        flat: list[onnx.NodeProto] = []
        for node in nodes:
            flat += standard.get(node.output[0], [node]) if node.domain == "com.microsoft" else [node]
        result = []
        for node in flat:
            node_in_64 = onnx.NodeProto()
            node_in_64.CopyFrom(node)
            node_in_64.domain = "" if node.domain == "ai.onnx" else node.domain
            floats = [a for a in node.attribute if a.type == onnx.AttributeProto.TENSOR]
            if node.op_type == "Constant" and floats and floats[0].t.data_type == TensorProto.FLOAT and not inside:
                self.values[node.output[0]] = numpy_helper.to_array(floats[0].t)
                continue
            for attribute in node_in_64.attribute:
                if attribute.name in ("to", "dtype") and attribute.i == TensorProto.FLOAT:
                    attribute.i = TensorProto.DOUBLE
                if attribute.type == onnx.AttributeProto.TENSOR and attribute.t.data_type == TensorProto.FLOAT:
                    array = numpy_helper.to_array(attribute.t).astype(np.float64)
                    attribute.t.CopyFrom(numpy_helper.from_array(array, attribute.t.name))
                if attribute.type == onnx.AttributeProto.GRAPH:
                    self._inner(attribute.g, standard, inside)
            if node.op_type == "BatchNormalization" and not any(a.name == "training_mode" for a in node.attribute):
                # onnx.reference takes a share of the batch's statistics in opset 9, where its momentum is not 1.
                kept = [a for a in node_in_64.attribute if a.name != "momentum"]
                del node_in_64.attribute[:]
                node_in_64.attribute.extend([*kept, helper.make_attribute("momentum", 1.0)])
            result.append(node_in_64)
        return _sorted(result, set()) if not inside else result

    def _take_statistics_apart(self, model: onnx.ModelProto) -> None:
        sources = {node.output[0]: node.input[0] for node in model.graph.node if node.op_type == "Identity"}
        # The inputs of calls, too, that a function has as statistics.
        places: dict[tuple[str, str], list[int]] = {("", "BatchNormalization"): [3, 4]}
        for function in model.functions:
            read = [node.input[k] for node in function.node if node.op_type == "BatchNormalization" for k in (3, 4)]
            places[function.domain, function.name] = [k for k, name in enumerate(function.input) if name in read]
        for node in model.graph.node:
            for k in places.get((node.domain, node.op_type), ()):
                name = node.input[k]
                while name in sources:
                    name = sources[name]
                node.input[k] = f"{name}/statistic"
                self.values[node.input[k]] = self.values[name]

    def _inner(self, graph: onnx.GraphProto, standard: Mapping[str, list[onnx.NodeProto]], inside: bool) -> None:
        for tensor in list(graph.initializer):
            if tensor.data_type == TensorProto.FLOAT:
                self.values[tensor.name] = numpy_helper.to_array(tensor)
                graph.initializer.remove(tensor)
        nodes = self._nodes(graph.node, standard, inside)
        del graph.node[:]
        graph.node.extend(nodes)
        del graph.value_info[:]
        for value in (*graph.input, *graph.output):
            if value.type.tensor_type.elem_type == TensorProto.FLOAT:
                value.type.tensor_type.elem_type = TensorProto.DOUBLE

    def output(self, feeds: Mapping[str, Array]) -> Array:
        every = {name: np.asarray(array, np.float64) for name, array in self.values.items()}
        every |= {n: np.asarray(a, np.float64 if a.dtype.kind == "f" else a.dtype) for n, a in feeds.items()}
        with np.errstate(all="ignore"):
            try:
                return np.asarray(self._evaluator.run(None, every)[0])
            except Exception:
                # Some kernels of onnxruntime find out when they run that they have no float64.
                if isinstance(self._evaluator, ReferenceEvaluator):
                    raise
                self._evaluator = ReferenceEvaluator(self._wide)
                return np.asarray(self._evaluator.run(None, every)[0])

    def along(self, of: Callable[[Array], float], feeds: Arrays, ways: Mapping[str, Array]) -> tuple[float, float]:
        """The derivative along directions of tensors, by five points, and how far it may be off; NaN at a kink."""
        at = {name: (feeds[name] if name in feeds else self.values[name]).astype(np.float64) for name in ways}

        def differences(step: float) -> tuple[float, float]:
            """By five points, and how far the slopes of the two sides are apart."""
            low, left, here, right, high = (
                of(self.output({**feeds, **{name: at[name] + k * step * way for name, way in ways.items()}}))
                for k in (-2, -1, 0, 1, 2)
            )
            return (low - 8 * left + 8 * right - high) / (12 * step), abs(right - 2 * here + left) / step

        (far, apart), (near, still_apart) = differences(4 * _STEP), differences(_STEP)
        doubt, scale = abs(far - near), max(abs(near), 1e-2)
        # Where a function bends, its slopes come together with the step; at a kink they do not.
        is_kink = still_apart > 1e-4 * scale and still_apart > 0.5 * apart
        return (float("nan") if is_kink or doubt > 1e-4 * scale else near), doubt


def inputs_of(model: onnx.ModelProto, sizes: Mapping[str, int], seed: int) -> Arrays:
    """The inputs of a model at some sizes."""
    numbers = np.random.default_rng([seed, *sizes.values()])
    n, t, a, b = sizes["N"], sizes["T"], sizes["A"], sizes["B"]
    found: Arrays = {}
    for value in model.graph.input:
        match value.name:
            case "x":
                found["x"] = numbers.standard_normal((n, t, WIDTH)).astype(np.float32)
            case "z":
                found["z"] = numbers.standard_normal((a, b, WIDTH)).astype(np.float32)
            case "row":
                last = value.type.tensor_type.shape.dim[2].dim_value
                found["row"] = numbers.standard_normal((a, 1, last)).astype(np.float32)
            case "words":
                found["words"] = numbers.integers(0, WORDS, (n, t))
    return found


# Losses


def target_of(loss: str, output: Array, seed: int) -> Array | None:
    numbers = np.random.default_rng(seed)
    if not loss:
        return None
    if loss == "cross_entropy":
        return np.asarray(numbers.integers(0, WIDTH, (output.shape[0], *output.shape[2:])))
    if loss == "bce_with_logits":
        return np.asarray(numbers.random(output.shape) < 0.5, np.float32)
    return numbers.standard_normal(output.shape).astype(np.float32)


def loss_of(loss: str, y: Array | None, o: Array) -> float:
    """A loss by numpy in float64."""
    if y is None:
        return float(o.sum())
    if loss == "cross_entropy":
        shifted = o - o.max(1, keepdims=True)
        logs = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
        return float(-np.take_along_axis(logs, np.expand_dims(y, 1), 1).mean())
    d = o - y
    match loss:
        case "mse":
            return float((d * d).mean())
        case "l1":
            return float(np.abs(d).mean())
        case "huber":
            return float(np.where(np.abs(d) < 1, 0.5 * d * d, np.abs(d) - 0.5).mean())
        case _:
            return float((np.logaddexp(0, o) - o * y).mean())


# Verdicts


_ROUNDED_RUNS, _ROUNDINGS = 3, 4
"""How many runs show how gradients round; errors may be this many times as large."""


def _rounded(array: Array, rng: np.random.Generator) -> Array:
    """An array with each float one rounding elsewhere."""
    if array.dtype.kind != "f":
        return array
    return np.asarray(np.nextafter(array, rng.choice([-np.inf, np.inf], array.shape).astype(array.dtype)))


def _largest(array: Array) -> float:
    return float(np.abs(array).max(initial=0))


class _Judge:
    """A model at all sizes that it takes, with what it computes exactly."""

    def __init__(self, drawn: Drawn, brief: bool) -> None:
        self.drawn = drawn
        self.brief = brief
        self.verdict = Verdict(drawn.seed)
        self._given = onnx.ModelProto()
        self._given.CopyFrom(drawn.model)
        try:
            original = _session(drawn.model)
        except Exception as error:
            raise Invalid(_line(error)) from error
        try:
            self.exact = Exact(drawn)
        except Exception as error:
            raise Invalid(f"not in float64: {_line(error)}") from error
        self.exact_of_steps = self.exact
        if "merged" in drawn.habits and "batch norm" in drawn.pieces:
            self.exact_of_steps = Exact(drawn, statistics_apart=True)
        self._objection = _objection(drawn.model, full_check=False)
        self._inference = _objection(drawn.model, full_check=True)
        self.cases: list[tuple[Arrays, Array, Array]] = []
        rng = random.Random(drawn.seed)
        sizes = [SIZES[0]] if "fixed sizes" in drawn.habits else [*SIZES, rng.choice(SMALL_SIZES)]
        if brief:
            sizes = [sizes[0], *rng.sample(sizes[1:], len(sizes) > 1)]
        for one in sizes:
            feeds = inputs_of(drawn.model, one, drawn.seed)
            try:
                got = original.run(None, feeds)[0]
            except Exception:
                continue
            try:
                exact = self.exact.output(feeds)
            except Exception as error:
                raise Invalid(f"not in float64: {_line(error)}") from error
            if not np.isfinite(got).all() or not np.isfinite(exact).all():
                continue
            if got.shape != exact.shape or _largest(got - exact) > 1e-3 * (1 + _largest(exact)):
                raise Invalid("onnxruntime and the float64 model compute different things")
            self.cases.append((feeds, got, exact))
        if not self.cases:
            raise Invalid("no sizes are taken")

    def fail(self, line: str) -> None:
        self.verdict.failures.append(line)

    def attempt(self, way: str, make: Callable[[], Any]) -> Any:
        """Do something of gradfuse's, which must leave the model as it is; None where it is refused or fails."""
        result = self._attempted(way, make)
        if self.drawn.model != self._given:
            self.fail(f"changed: {way}: the model that was given")
            self.drawn.model.CopyFrom(self._given)
        return result

    def _attempted(self, way: str, make: Callable[[], Any]) -> Any:
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                result = make()
        except GradfuseError as error:
            self.verdict.refusals.append(f"{way}: {error}")
            if "mistake in gradfuse" in str(error) or "\n" in str(error):
                self.fail(f"mistake: {way}: {_line(error)}")
            return None
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{where.filename.rsplit('/', 1)[-1]}:{where.lineno}"
            self.fail(f"traceback: {way}: {type(error).__name__} in {place}: {_line(error)}")
            return None
        self.warned = [str(w.message) for w in caught if "build_training_step" in str(w.message)]
        return result

    def opened(self, way: str, model: onnx.ModelProto) -> Any:
        """A session on a model that the checker takes, with inference where it infers the original."""
        text = _objection(model, full_check=not self._inference)
        # A model that onnxruntime accepts, but the checker does not, may stay so when it is fused.
        if text and text != self._objection and not (way == "fuse" and self._objection):
            self.fail(f"invalid: {way}: {text}")
        try:
            return _session(model, library=True)
        except Exception as error:
            self.fail(f"unable: {way}: no session: {_line(error)}")
            return None

    def same(self, way: str, got: Array, original: Array, exact: Array) -> bool:
        """Whether an output is the original's."""
        if got.shape != original.shape:
            self.fail(f"wrong: {way}: the output has shape {got.shape}; expected {original.shape}")
            return False
        bound = 16 * _largest(original - exact) + 64 * 1.2e-7 * _largest(exact) + 1e-6
        if not _largest(got - exact) <= bound:
            self.fail(f"wrong: {way}: the output is off by {_largest(got - exact):.3g} of {_largest(exact):.3g}")
            return False
        return True

    def gradients(
        self,
        way: str,
        exact: Exact,
        of: Callable[[Array], float],
        feeds: Arrays,
        found: Mapping[str, Array],
        number: int,
        again: Callable[[Arrays], Mapping[str, Array]] | None = None,
    ) -> None:
        """Compare gradients with differences.

        What rounding of the inputs changes in the gradients, as `again` gives them, is what rounding in between may.
        """
        rng = np.random.default_rng([self.drawn.seed, number])
        # What a function gives as a constant is no float tensor of the model's own graph.
        names = [name for name in found if name in feeds or name in exact.values]
        if len(names) > _MOST_CHECKED and not self.brief:
            names = list(rng.choice(names, _MOST_CHECKED, replace=False))
        gradients: Arrays = {}
        for name in names:
            wanted_shape = feeds[name].shape if name in feeds else exact.values[name].shape
            gradient = found[name].astype(np.float64)
            if gradient.shape != wanted_shape:
                self.fail(f"wrong: {way}: the gradient of {name!r} has shape {gradient.shape}; expected {wanted_shape}")
            elif gradient.size:
                gradients[name] = gradient
        ways = {name: directions(gradient.shape, 1, rng)[0] for name, gradient in gradients.items()}
        # One direction of all tensors sees an error in any.
        for moved in [list(ways)] if self.brief and ways else [[name] for name in ways]:
            wanted, doubt = exact.along(of, feeds, {name: ways[name] for name in moved})
            if not np.isfinite(wanted):
                self.verdict.unclear += 1
                continue
            self.verdict.derivatives += len(moved)
            got = sum(float((gradients[name] * ways[name]).sum()) for name in moved)
            sizes = [max(_largest(gradients[n]), 1e-2) * np.sqrt(gradients[n].size) for n in moved]
            bound = 3e-4 * max(float(np.linalg.norm(sizes)), abs(wanted)) + 2 * doubt
            if not abs(got - wanted) <= bound and again is not None:
                for _ in range(_ROUNDED_RUNS):
                    other = again({name: _rounded(array, rng) for name, array in feeds.items()})
                    by_other = sum(float((other[name].astype(np.float64) * ways[name]).sum()) for name in moved)
                    bound = max(bound, _ROUNDINGS * abs(by_other - got))
            if not abs(got - wanted) <= bound:
                of_all = ", ".join(map(repr, moved))
                self.fail(f"wrong: {way}: the derivative of {of_all} is {got:.6g}; {wanted:.6g} by differences")


def judged(drawn: Drawn, *, brief: bool = False) -> Verdict:
    """Take a model through all ways.

    Args:
        drawn: the model.
        brief: whether one of the steps is built, for two sizes, and all tensors are moved at once.

    Raises:
        Invalid: onnxruntime does not take the model as it was written.
    """
    judge = _Judge(drawn, brief)
    _differentiated(judge)
    _trained(judge)
    _fused(judge)
    return judge.verdict


def _objection(model: onnx.ModelProto, *, full_check: bool) -> str:
    """What onnx's checker says against a model; empty if nothing."""
    checked = onnx.ModelProto()
    checked.CopyFrom(model)
    for value in (*checked.graph.input, *checked.graph.output):
        for dim in value.type.tensor_type.shape.dim:
            # Inference ends the process on a size of -1 that is sliced from its end.
            if dim.dim_value < 0:
                dim.Clear()
    try:
        onnx.checker.check_model(checked, full_check=full_check)
    except Exception as error:
        return _line(error)
    return ""


def _differentiated(judge: _Judge) -> None:
    drawn = judge.drawn
    rng = random.Random(f"{drawn.seed}/wrt")
    floats = [v.name for v in drawn.model.graph.input if v.type.tensor_type.elem_type == TensorProto.FLOAT]
    present = {t.name for t in drawn.model.graph.initializer}
    wrt = list(dict.fromkeys([*floats, *(name for name in drawn.weights if name in present)]))
    wrt = rng.sample(wrt, min(len(wrt), 4))
    output = drawn.model.graph.output[0].name
    result = None
    while wrt and result is None:
        before = len(judge.verdict.refusals)
        result = judge.attempt(
            "differentiate", lambda: gradfuse.differentiate(drawn.model, wrt, seeds={output: "seed"})
        )
        if result is None:
            text = judge.verdict.refusals[-1] if len(judge.verdict.refusals) > before else ""
            apart = [name for name in wrt if f"does not depend on {name!r}" in text]
            if not apart:
                return
            judge.verdict.refusals.pop()
            wrt.remove(apart[0])
    if result is None:
        return
    session = judge.opened("differentiate", result)
    if session is None:
        return
    for number, (feeds, original, exact) in enumerate(judge.cases):
        way = f"differentiate, {_shown(feeds)}"
        seed = np.random.default_rng(number).standard_normal(original.shape).astype(np.float32)
        try:
            names = [o.name for o in session.get_outputs()]
            found = dict(zip(names, session.run(None, {**feeds, "seed": seed}), strict=True))
        except Exception as error:
            judge.fail(f"unable: {way}: {_line(error)}")
            return
        if not judge.same(way, found[output], original, exact):
            return
        gradients = {name: found[f"{name}.grad"] for name in wrt}
        of = functools.partial(_product, seed)

        def again(moved: Arrays, seed: Array = seed, session: Any = session) -> Mapping[str, Array]:
            outputs = [f"{name}.grad" for name in wrt]
            return dict(zip(wrt, session.run(outputs, {**moved, "seed": seed}), strict=True))

        judge.gradients(way, judge.exact, of, feeds, gradients, number, again)


def _product(seed: Array, o: Array) -> float:
    return float((o * seed).sum())


def _trained(judge: _Judge) -> None:
    drawn = judge.drawn
    for fuse in [drawn.seed % 2 == 0] if judge.brief else (False, True):
        way = f"build_training_step, fuse={fuse}"
        optimizer = gradfuse.optimizers.SGD(lr=1.0) if drawn.seed % 3 == 0 else None
        step = judge.attempt(
            way,
            functools.partial(
                gradfuse.build_training_step, drawn.model, drawn.loss or None, optimizer=optimizer, fuse=fuse
            ),
        )
        if step is None:
            continue
        judge.opened(way, step.model)
        if step.evaluation_model is not None:
            judge.opened(f"{way}, evaluation model", step.evaluation_model)
        _judge_parameters(judge, way, step)
        session = None
        for number, (feeds, original, exact) in enumerate(judge.cases):
            place = f"{way}, {_shown(feeds)}"
            target = target_of(drawn.loss, exact, drawn.seed)
            try:
                if session is None or optimizer is not None:
                    session = gradfuse.TrainingSession(step)
                inputs = tuple(feeds[name] for name in step.input_names)
                evaluated = np.asarray(_first(session.evaluate(inputs)))
                loss = session.step(inputs, () if target is None else target)
            except GradfuseError as error:
                judge.fail(f"unable: {place}: {_line(error)}")
                break
            except Exception as error:
                judge.fail(f"traceback: {place}: {type(error).__name__}: {_line(error)}")
                break
            if not judge.same(f"{place}, evaluation", evaluated, original, exact):
                break
            of = functools.partial(loss_of, drawn.loss, target)
            expected = [np.asarray(of(o)) for o in (original.astype(np.float64), exact)]
            if not judge.same(f"{place}, loss", np.asarray(loss), *expected):
                break
            if optimizer is None:
                gradients = session.gradients
            else:
                after = session.state_dict()
                gradients = {n: np.asarray(a, np.float64) - after[n] for n, a in step.parameters.items()}
            before = len(judge.verdict.failures)
            found = _of_merged(judge, step, gradients)

            def again(
                moved: Arrays, session: Any = session, step: Any = step, target: Array | None = target
            ) -> Mapping[str, Array]:
                session.step(tuple(moved[name] for name in step.input_names), () if target is None else target)
                return _of_merged(judge, step, session.gradients)

            judge.gradients(place, judge.exact_of_steps, of, feeds, found, number, again if optimizer is None else None)
            if len(judge.verdict.failures) > before:
                break


def _of_merged(judge: _Judge, step: Any, gradients: Mapping[str, Array]) -> Mapping[str, Array]:
    """Gradients by the names of the model that was given, where tensors that an exporter merged have been divided."""
    if "merged" not in judge.drawn.habits:
        return gradients
    values, found = judge.exact_of_steps.values, {name: np.asarray(a, np.float64) for name, a in gradients.items()}
    for name in [name for name in found if name not in values]:
        own = step.parameters[name]
        source = next((n for n in values if n in step.parameters and np.array_equal(values[n], own)), None)
        gradient = found.pop(name)
        if source is not None and source in found:
            found[source] = found[source] + gradient
    return found


def _judge_parameters(judge: _Judge, way: str, step: Any) -> None:
    """All weights train that are initializers; what else does is none of the model's numbers."""
    drawn = judge.drawn
    if "merged" in drawn.habits or judge.warned:
        return
    for name in step.parameters:
        # A weight in a node of a function has the function's name for it.
        is_inside = name not in judge.exact.values and step.parameters[name].size > 1
        if name not in drawn.weights and not is_inside:
            judge.fail(f"unmeant: {way}: {name!r} trains, which is a number or a mask")
            return


def _fused(judge: _Judge) -> None:
    drawn = judge.drawn
    result = judge.attempt("fuse", lambda: gradfuse.fuse(drawn.model, policy="all"))
    if result is None:
        return
    session = judge.opened("fuse", result.model)
    if session is None:
        return
    for feeds, original, exact in judge.cases:
        way = f"fuse, {_shown(feeds)}"
        try:
            got = session.run(None, feeds)[0]
        except Exception as error:
            judge.fail(f"unable: {way}: {_line(error)}")
            return
        judge.same(way, got, original, exact)


def _first(outputs: Any) -> Any:
    return outputs[0] if isinstance(outputs, (tuple, list)) else outputs


def _shown(feeds: Arrays) -> str:
    return " ".join(f"{name}{list(array.shape)}" for name, array in feeds.items())


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[-300:]


# Small ones


def smallest(seed: int, kind: str) -> Drawn:
    """Return a model that fails in a way, or is refused for a reason, without all that is not needed."""
    without: set[int] = set()
    plain: set[str] = set()

    def still(without: set[int], plain: set[str]) -> bool:
        try:
            verdict = judged(drawn(seed, without, plain))
        except Exception:
            return False
        return any(kind == label(line) for line in verdict.failures) or any(kind == reason(r) for r in verdict.refusals)

    for name in drawn(seed).drawn_habits:
        if still(without, plain | {name}):
            plain.add(name)
    for k in range(drawn(seed).drawn_pieces):
        if still(without | {k}, plain):
            without.add(k)
    return drawn(seed, without, plain)


def label(line: str) -> str:
    """The kind and way of a failure."""
    kind, way = line.split(": ")[:2]
    return f"{kind}: {way.split(',')[0]}"


def reason(text: str) -> str:
    """The reason of a refusal without names and numbers."""
    text = re.sub(r"'[^']*'", "'...'", text)
    text = re.sub(r"\d+(\.\d+)?(e[+-]?\d+)?", "0", text)
    return text[:160]


# Many


def outcome(seed: int, *, brief: bool = False) -> Outcome:
    """The verdict on the model of a seed."""
    case = drawn(seed)
    try:
        verdict = judged(case, brief=brief)
    except Invalid as error:
        return Outcome(seed, {"invalid": 1}, [f"not taken by onnxruntime: {reason(str(error))[:90]}"])
    counts = {
        "models": 1,
        "derivatives": verdict.derivatives,
        "at kinks": verdict.unclear,
        "with refusals": int(bool(verdict.refusals)),
        **dict.fromkeys(verdict.kinds, 1),
    }
    made_of = f"opset {case.model.opset_import[0].version}; {', '.join(case.pieces)}; {', '.join(case.habits)}"
    failures = [f"{seed}: {made_of}: {line}" for line in verdict.failures]
    return Outcome(seed, counts, [reason(text) for text in verdict.refusals], failures)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("seed", type=int)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--save")
    args = parser.parse_args()
    # Models that the checker does not survive are none of these.
    inference.ask = inference_worker.infer
    case = drawn(args.seed)
    verdict = judged(case)
    if args.small and (verdict.failures or verdict.refusals):
        kind = label(verdict.failures[0]) if verdict.failures else reason(verdict.refusals[0])
        case = smallest(args.seed, kind)
        verdict = judged(case)
    print(onnx.printer.to_text(case.model))
    print(case.pieces, case.habits, case.loss)
    if args.save:
        onnx.save(case.model, args.save)
    print(verdict)


if __name__ == "__main__":
    main()
