"""`RecomputePass`: a training step within a memory budget, by recomputing activations in the backward pass.

Copies of forward nodes do the recomputation. They begin at views of kept values, whose shape is computed from an empty
slice of a value that the backward pass has just made. So no graph optimizer of a runtime can merge a copy with the
original, and none can run early; the view costs no memory, and no number changes.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from gradfuse import custom_ops
from gradfuse.errors import ArgumentError, ModelError, listed
from gradfuse.models.inlining import graphs_of
from gradfuse.models.scalars import whole
from gradfuse.models.tensors import copy_model
from gradfuse.passes import shapes
from gradfuse.passes.matching.cost import ASSUMED_DIM, NODE
from gradfuse.passes.reading.nodes import DRAWS
from gradfuse.passes.report import bytes_text

if TYPE_CHECKING:
    from gradfuse.checking.order import Observed

SMALL = 4096
"""Values of at most this many bytes are always kept."""
OPERATION = 0.25
"""Bytes that move in the time of one multiplication and addition, half of that each."""

_UNITS = {"": 1, "B": 1, **{f"{p}B": 1000**i for i, p in enumerate("KMGT", 1)}}
_UNITS |= {f"{p}iB": 1024**i for i, p in enumerate("KMGT", 1)}
_VIEWS = frozenset({"Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity"})
"""Operators whose result is the memory of their first input in onnxruntime."""
_IN_PLACE = frozenset(
    {
        *("Add", "Sub", "Mul", "Div", "Neg", "Abs", "Exp", "Log", "Sqrt", "Relu", "Sigmoid", "Tanh", "Erf", "Clip"),
        *("LeakyRelu", "Elu", "Not", "And", "Or", "Softmax", "LogSoftmax"),
    }
)
"""Operators whose result takes the memory of an input of its size that nothing reads any more."""
OVERWRITING = frozenset(
    {
        *("BatchNormBackward", "CrossEntropyLossGrad", "EmbeddingDenseBackwardAdd", "LayerNormBackward", "Pointwise"),
        "ScaledMaskedSoftmaxBackward",
    }
)
"""Operators of gradfuse whose kernels do so with their first result."""
_BLOCKED = "com.microsoft.nchwc"
"""The domain of onnxruntime's operators on blocks of channels."""
"""Operators that give other numbers when they run again."""

_PRODUCTS = frozenset({"MatMul", "Gemm", "FusedMatMul", "Conv"})
_INTO_PRODUCTS = frozenset({"Transpose", "Mul", "Div", "Add", "Relu"})
"""Operators that onnxruntime takes into products beside them, which changes roundings: nothing comes between."""

_MOST_LEFT_OUT = 100
"""How many of the values that the plan of the least memory keeps it is tried without."""
_ATTEMPTS = 6
"""How many plans are tried, each with less memory than the last, until one is within the budget as it is run."""

Key = tuple[int, bool]
"""Number of a value, and whether it is a copy's."""


@dataclasses.dataclass(frozen=True)
class Recomputation:
    """What a memory budget did to a step. Bytes are those of values that a run computes, without inputs and outputs.

    Attributes:
        budget: the most bytes that were allowed.
        before: predicted bytes at the peak, without the budget.
        after: predicted bytes at the peak now.
        nodes: how many nodes run twice.
        extra_time: predicted time of these, as a fraction of the time of the step without them.
    """

    budget: int
    before: int
    after: int
    nodes: int
    extra_time: float

    def __str__(self) -> str:
        return (
            f"memory {bytes_text(self.before)} -> {bytes_text(self.after)} of {bytes_text(self.budget)}; "
            f"{self.nodes} nodes run twice, {self.extra_time:.1%} more time, as predicted"
        )


def parse_budget(budget: object, who: str) -> int | float:
    """Return a budget as bytes (int) or as a fraction of what the step would take (float).

    Args:
        budget: bytes as an integer, a text such as "512MiB" or "0.5", or a share above 0 and up to 1.
        who: what the message names first.

    Raises:
        ArgumentError: it is none of these.
    """
    if isinstance(budget, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?i?B|)\s*", budget)
        if match is not None and match[2] in _UNITS:
            number = float(match[1])
            if match[2] or (number > 1 and number.is_integer()):
                number, budget = number * _UNITS[match[2]], None
                if number >= 1:
                    return int(number)
            elif 0 < number <= 1:
                return number
    elif (number_of_bytes := whole(budget)) is not None and number_of_bytes > 0:
        return number_of_bytes
    elif isinstance(budget, float) and 0 < budget <= 1:
        return budget
    raise ArgumentError(
        f"{who}: memory_budget is {budget!r}; expected bytes, a text such as '512MiB', or a share above 0.0 up to 1.0"
    )


class RecomputePass(ir.passes.InPlacePass):
    """Keeps a training step within a memory budget, by recomputing activations.

    A budget limits the peak bytes of computed values, without inputs and outputs, in the order in which onnxruntime
    runs the nodes of the step. The step is run there once as it is, and once for each plan: if a plan takes more,
    another follows, and results that are not bit-identical are refused.

    Nodes that draw numbers without a seed, or have subgraphs, are not run twice.

    Args:
        budget: bytes as an integer, a text such as "512MiB", or a share above 0 and up to 1 of what the step takes. Or
            names of values -> the part of the forward pass that they belong to: each part is computed again from what
            it reads of others, as what `torch.utils.checkpoint` wraps, but for part 0. Other values go by their
            readers. If that saves nothing, or bits would be others, nothing is recomputed.
        sizes: symbolic dimension of the inputs -> its size.
        loss: the name of the output that the gradients differentiate.
        feeds: input -> the array to run the step on; by default floats are random, and integers 0.
        as_run: returns the model that onnxruntime is given for one; None: the model itself.

    Attributes:
        report: what the last call did.

    Raises:
        ArgumentError: the budget is invalid; a dimension that bytes depend on has no size; the smallest possible peak,
            which the text names, is larger; or results would not be bit-identical.
        GradfuseError: onnxruntime is not installed.
        ModelError: onnxruntime cannot run the step.
    """

    def __init__(
        self,
        budget: int | float | str | Mapping[str, int],
        sizes: Mapping[str, int] | None = None,
        loss: str = "loss",
        who: str = "",
        *,
        feeds: Mapping[str, npt.NDArray[Any]] | None = None,
        as_run: Callable[[ir.Model], ir.Model] | None = None,
    ) -> None:
        super().__init__()
        self._who = who or type(self).__name__
        self._wrapped = dict(budget) if isinstance(budget, Mapping) else None
        self._budget = 1.0 if isinstance(budget, Mapping) else parse_budget(budget, self._who)
        self._sizes, self._loss = dict(sizes or {}), loss
        self._feeds, self._as_run = dict(feeds or {}), as_run or (lambda model: model)
        self.report: Recomputation | None = None

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        dims = {str(d.value) for v in model.graph.inputs for d in v.shape or () if isinstance(d, ir.SymbolicDim)}
        unknown = next((name for name in self._sizes if name not in dims), None)
        if unknown is not None:
            raise ArgumentError(f"{self._who}: sizes name {unknown!r}; expected dimensions of inputs: {sorted(dims)}")
        for name, size in self._sizes.items():
            if (whole(size) or 0) < 1:
                raise ArgumentError(f"{self._who}: the size of {name!r} is {size!r}; expected a positive integer")
        known, assumed = _shapes(model, self._sizes)
        if assumed and not isinstance(self._budget, float):
            raise ArgumentError(
                f"{self._who}: the dimension {assumed[0]!r} has no size, which a budget in bytes depends on; "
                "expected its size, or a share such as 0.5"
            )
        if not any(value.name == self._loss for value in model.graph.outputs):
            raise ArgumentError(f"{self._who}: the model has no output {self._loss!r}; expected a training step")
        feeds = _random(model, known) | self._feeds
        try:
            plain, before = self._observed(model, feeds, known)
            others = self._others(model, feeds, known)
        except ModelError as error:
            if not assumed:
                raise
            what = f"where the sizes of {listed(assumed)} are taken to be {ASSUMED_DIM}; expected their sizes"
            raise ModelError(f"{error}, {what}") from error
        budget = int(self._budget * before) if isinstance(self._budget, float) else self._budget
        self.report = Recomputation(budget, before, before, 0, 0.0)
        if self._wrapped is not None:
            return ir.passes.PassResult(model, self._recomputes_wrapped(model, plain, before, feeds, known, others))
        if before <= budget:
            return ir.passes.PassResult(model, False)
        asked, least, wrong = budget, before, None
        for _ in range(_ATTEMPTS):
            copy = copy_model(model)
            loss = next(value for value in copy.graph.outputs if value.name == self._loss)
            # The order of the file may need less than the one that onnxruntime chooses.
            found = []
            for places in (_places(copy.graph, plain.model.graph), None):
                steps = _Step(copy.graph, known, loss, places)
                found.append((_choose(steps, steps.plan(frozenset(steps.candidates)), asked), steps))
            plan, steps = min(found, key=lambda one: (max(one[0].peak, asked), one[0].extra))
            _rewrite(copy.graph, steps, plan)
            now, after = self._observed(copy, feeds, known)
            other = _other_bits(plain, now) or self._other_bits(copy, others, known)
            wrong = wrong or other
            least = least if other is not None else min(least, after)
            if other is None and after <= budget:
                model.graph = copy.graph
                count = sum(is_copy for _, is_copy in plan.order)
                self.report = Recomputation(budget, before, after, count, plan.extra / steps.time)
                return ir.passes.PassResult(model, True)
            if plan.peak > asked:
                break
            asked = plan.peak - max(after - budget, plan.peak // 64)
        why = "" if wrong is None else f"; with less, {wrong!r} has other bits"
        raise ArgumentError(
            f"{self._who}: memory_budget is {bytes_text(budget)}; "
            f"the least that was found possible is {bytes_text(least)} ({least}){why}"
        )

    def _recomputes_wrapped(
        self,
        model: ir.Model,
        plain: Observed,
        before: int,
        feeds: Mapping[str, npt.NDArray[Any]],
        known: Mapping[str, tuple[int, ...]],
        others: _Run | None,
    ) -> bool:
        """Recompute what is to be; whether that saves memory."""
        assert self._wrapped is not None
        copy = copy_model(model)
        loss = next(value for value in copy.graph.outputs if value.name == self._loss)
        steps = _Step(copy.graph, known, loss, _places(copy.graph, plain.model.graph))
        plan = steps.plan(frozenset(steps.candidates - steps.wrapped(self._wrapped)))
        if not plan.again:
            return False
        _rewrite(copy.graph, steps, plan)
        now, after = self._observed(copy, feeds, known)
        if after >= before or _other_bits(plain, now) or self._other_bits(copy, others, known):
            return False
        model.graph = copy.graph
        count = sum(is_copy for _, is_copy in plan.order)
        self.report = Recomputation(after, before, after, count, plan.extra / steps.time)
        return True

    def _others(
        self, model: ir.Model, feeds: Mapping[str, npt.NDArray[Any]], known: Mapping[str, tuple[int, ...]]
    ) -> _Run | None:
        """Return a run on another batch where a value is narrower than float32, if the step runs on it.

        Of such values onnxruntime may round a copy elsewhere, which a batch that the model has learned does not show.
        """
        narrow = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
        casts = (node.attributes.get("to") for node in model.graph.all_nodes() if node.op_type == "Cast")
        if not any(to is not None and ir.DataType(to.as_int()) in narrow for to in casts):
            return None
        rng = np.random.default_rng(0)
        # What is in range stays so.
        shuffled = {name: rng.permuted(array.ravel()).reshape(array.shape) for name, array in feeds.items()}
        try:
            return _Run(shuffled, self._observed(model, shuffled, known)[0])
        except ModelError:
            return None

    def _other_bits(self, model: ir.Model, run: _Run | None, known: Mapping[str, tuple[int, ...]]) -> str | None:
        """Return an output that has other bits than in a run; None if there is none."""
        return None if run is None else _other_bits(run.found, self._observed(model, run.feeds, known)[0])

    def _observed(
        self, model: ir.Model, feeds: Mapping[str, npt.NDArray[Any]], known: Mapping[str, tuple[int, ...]]
    ) -> tuple[Observed, int]:
        """Return what onnxruntime makes of a model, and the most bytes of its values."""
        from gradfuse.checking.order import observed

        found = observed(self._as_run(model), feeds, self._who)
        return found, peak_of(found.model, self._sizes, known)


@dataclasses.dataclass(frozen=True)
class _Run:
    """A batch, and what was found of the run on it."""

    feeds: Mapping[str, npt.NDArray[Any]]
    found: Observed


def _other_bits(one: Observed, other: Observed) -> str | None:
    """Return an output that two runs have other bits of; None if there is none."""
    return next((name for name, digest in one.digests.items() if other.digests[name] != digest), None)


def peak_of(
    model: ir.Model, sizes: Mapping[str, int] | None = None, known: Mapping[str, tuple[int, ...]] | None = None
) -> int:
    """Return the most bytes of computed values that are there at a time, with nodes run in the order of the graph.

    `known` has shapes of values by name, for those that do not follow in the graph.
    """
    found, _ = _shapes(model, sizes or {})
    graph = model.graph
    steps = _Step(graph, {**(known or {}), **found}, graph.outputs[0])
    return steps.peak([(index, False) for index in range(len(steps.nodes))], ())


def _random(model: ir.Model, known: Mapping[str, tuple[int, ...]]) -> dict[str, npt.NDArray[Any]]:
    """Return arrays for the inputs of a model that have no default."""
    rng = np.random.default_rng(0)
    arrays: dict[str, npt.NDArray[Any]] = {}
    for value in model.graph.inputs:
        shape, dtype = known.get(str(value.name)), value.dtype
        if value.const_value is None and shape is not None and dtype is not None:
            numbers = np.abs(rng.standard_normal(shape)) if dtype.is_floating_point() else np.zeros(shape)
            arrays[str(value.name)] = numbers.astype(dtype.numpy())
    return arrays


def _places(graph: ir.Graph, run: ir.Graph) -> dict[ir.Node, int]:
    """Return the places of a graph's nodes in the order in which a runtime runs what it has made of the graph."""
    known = {str(value.name): place for place, node in enumerate(run) for value in node.outputs}
    places: dict[ir.Node, int] = {}
    for node in graph:
        own = [known[str(value.name)] for value in node.outputs if value.name in known]
        before = [places[maker] for value in _read_by(node) if (maker := value.producer()) in places]
        places[node] = max([*own, *before], default=-1)
    return places


@dataclasses.dataclass(frozen=True)
class _Plan:
    order: list[tuple[int, bool]]
    """Nodes by number, and whether it is their copy that runs."""
    again: frozenset[int]
    """Numbers of the values that copies make."""
    peak: int
    extra: float


class _Step:
    """A step's graph as numbers, for many plans."""

    def __init__(
        self,
        graph: ir.Graph,
        known: Mapping[str, tuple[int, ...]],
        loss: ir.Value,
        places: Mapping[ir.Node, int] | None = None,
    ) -> None:
        self.nodes = sorted(graph, key=lambda node: 0 if places is None else places[node])
        outside = list(dict.fromkeys([*graph.inputs, *graph.initializers.values()]))
        self.values = [*outside, *(value for node in self.nodes for value in node.outputs)]
        self.number = {value: index for index, value in enumerate(self.values)}
        self.known = known
        self.reads = [[self.number[v] for v in _read_by(node) if v in self.number] for node in self.nodes]
        self.makes = [[self.number[v] for v in node.outputs] for node in self.nodes]
        self.maker = {value: index for index, made in enumerate(self.makes) for value in made}
        self.size = [_bytes(value, known.get(str(value.name))) for value in self.values]
        self.root = list(range(len(self.values)))
        self.own = [index >= len(outside) and not v.is_graph_output() for index, v in enumerate(self.values)]
        constant = {self.number[value] for value in graph.initializers.values() if not value.is_graph_input()}
        for node, read, made in zip(self.nodes, self.reads, self.makes, strict=True):
            if node.domain == "" and node.op_type in _VIEWS and self.own[made[0]] and node.inputs[0] is not None:
                self.root[made[0]] = self.root[self.number[node.inputs[0]]]
            if constant.issuperset(read) and node.op_type not in DRAWS:
                constant.update(made)  # Folded when a session is made.
        for value in range(len(self.values)):
            self.own[value] = self.own[value] and self.root[value] == value and value not in constant
        self.cost = [self._cost(index) for index in range(len(self.nodes))]
        self.time = sum(self.cost)
        self.forward = self._ancestors(loss)
        self.early = {self.nodes[index] for index in self.forward}
        self.candidates = {
            value
            for index in self.forward
            for value in self.makes[index]
            if self.own[value] and self.size[value] > SMALL and self._repeats(index)
        }
        self.scaled = {value for value in self.candidates if self._is_scaled(self.nodes[self.maker[value]])}
        """Multiples by constants, which are computed wherever they are read: products take the factor in."""
        self.candidates -= {value for value in self.candidates - self.scaled if self._would_be_fused(value)}
        self.first = [index for index in range(len(self.nodes)) if index in self.forward]
        self.late = [index for index in range(len(self.nodes)) if index not in self.forward]

    def _cost(self, index: int) -> float:
        """The bytes that would move in the time that a node takes."""
        node = self.nodes[index]
        if node.domain == "" and node.op_type in _VIEWS:
            return NODE
        moved = sum(self.size[value] for value in (*self.reads[index], *self.makes[index]))
        return NODE + moved + OPERATION * self._operations(index)

    def _operations(self, index: int) -> float:
        node = self.nodes[index]
        shape = [None if v is None else self.known.get(str(v.name)) for v in (*node.inputs[:3], *node.outputs[:1])]
        a, b, out = shape[0] if shape else None, shape[1] if len(shape) > 2 else None, shape[-1]
        if a is None or b is None or out is None:
            return 0.0
        count = math.prod(out)
        if node.op_type in ("MatMul", "Gemm", "FusedMatMul") and a and b:
            inner = math.prod(a) * math.prod(b) / max(1, math.prod(out)) if len(a) == len(b) == 2 else a[-1] ** 2
            return 2.0 * count * math.sqrt(inner)
        if node.op_type == "ConvolutionBackward" and shape[2] is not None:
            return 4.0 * math.prod(a) * math.prod(shape[2][1:])  # As much for either gradient as the convolution.
        if node.op_type.startswith("Conv"):
            return 2.0 * count * math.prod(b[1:])
        if node.op_type.lower().startswith("matmulnbits"):
            return 2.0 * count * a[-1]
        if node.op_type == "LinearCrossEntropy":
            return 6.0 * math.prod(a) * b[0]  # Three products.
        if node.op_type.endswith("Recurrence"):
            return 2.0 * math.prod(a) * out[-1]
        if "Attention" in node.op_type and len(a) > 1:
            return 4.0 * math.prod(a) * b[-2]
        return 0.0

    def _is_scaled(self, node: ir.Node) -> bool:
        small = any(v is not None and self.known.get(str(v.name)) in ((), (1,)) for v in node.inputs)
        return node.domain == "" and node.op_type in ("Mul", "Div") and small

    def _would_be_fused(self, value: int) -> bool:
        """Whether onnxruntime would fuse the maker of a value with its reader if the backward pass did not read it."""
        producer = self.values[value].producer()
        readers = {use.node for use in self.values[value].uses()}
        early = [node for node in readers if node in self.early]
        return producer is not None and len(readers) > len(early) == 1 and _are_joined(producer, early[0])

    def wrapped(self, parts: Mapping[str, int]) -> set[int]:
        """Return the candidates that nodes of their own part alone read in the forward pass."""
        part: dict[ir.Node, int] = {}
        for index in reversed(self.first):
            node = self.nodes[index]
            known = {parts[str(value.name)] for value in node.outputs if value.name in parts}
            readers = {use.node for value in node.outputs for use in value.uses()} & self.early
            found = known or {part[reader] for reader in readers}
            part[node] = found.pop() if len(found) == 1 else 0

        def is_inner(value: int) -> bool:
            own = part[self.nodes[self.maker[value]]]
            return own != 0 and all(part[u.node] == own for u in self.values[value].uses() if u.node in self.early)

        return {value for value in self.candidates if is_inner(value)}

    def _ancestors(self, value: ir.Value) -> frozenset[int]:
        found: set[int] = set()
        rest = [self.maker.get(self.number[value])]
        while rest:
            index = rest.pop()
            if index is not None and index not in found:
                found.add(index)
                rest += [self.maker.get(read) for read in self.reads[index]]
        return frozenset(found)

    def _repeats(self, index: int) -> bool:
        """Whether a node gives the same bits once more, and can begin at a view of an input."""
        node = self.nodes[index]
        if node.op_type in DRAWS or graphs_of(node):
            return False
        return any(v is not None and self.known.get(str(v.name)) and _is_number(v) for v in node.inputs)

    def plan(self, kept: frozenset[int]) -> _Plan:
        """Return the plan in which the backward pass finds what is kept, and all else is computed once more."""
        order = [(index, False) for index in self.first]
        again: set[int] = set()
        copied: set[int] = set()

        def needed(index: int) -> Iterator[int]:
            for value in self.reads[index]:
                root, maker = self.root[value], self.maker.get(value)
                if maker in self.forward and root in self.candidates and root not in kept:
                    assert maker is not None
                    if maker not in copied:
                        yield maker

        for index in self.late:
            stack = [index]
            while stack:
                missing = list(needed(stack[-1]))
                if missing:
                    stack.extend(missing)
                    continue
                done = stack.pop()
                if done == index:
                    order.append((done, False))
                elif done not in copied:
                    copied.add(done)
                    again.update(v for v in self.makes[done] if self.root[v] in self.candidates - kept)
                    order.append((done, True))
        peak = self.peak(order, again)
        return _Plan(order, frozenset(again), peak, sum(self.cost[index] for index in copied))

    def peak(self, order: Sequence[tuple[int, bool]], again: Collection[int]) -> int:
        """Return the most bytes that are there at a time, where the backward pass reads some values of copies."""
        last: dict[Key, int] = {}
        for place, (index, is_copy) in enumerate(order):
            late = is_copy or index not in self.forward
            for value in self.reads[index]:
                last[self.root[value], late and value in again] = place
        dying: dict[int, list[Key]] = {}
        for key, place in last.items():
            dying.setdefault(place, []).append(key)
        total = most = 0
        alive: dict[Key, int] = {}
        for place, (index, is_copy) in enumerate(order):
            made = {(v, is_copy): self.size[v] for v in self.makes[index] if self.own[v]}
            gone = [alive[key] for key in dying.get(place, ()) if key in alive]
            new, first = sum(made.values()), made.get((self.makes[index][0], is_copy))
            if first in gone and _is_in_place(self.nodes[index]):
                new -= first
            most = max(most, total + new)
            for key in dying.get(place, ()):
                total -= alive.pop(key, 0)
            for key, size in made.items():
                if last.get(key, -1) > place:
                    alive[key] = size
                    total += size
        return most

    def cuts(self, count: int) -> frozenset[int]:
        """Return the values that cross the narrowest cuts of the forward pass into `count` parts of equal bytes."""
        crossing, sums = self._crossing
        chosen: set[int] = set()
        for part in range(1, count):
            low, high = ((part + shift) / count * sums[-1] for shift in (-0.5, 0.5))
            places = range(bisect.bisect_left(sums, low), min(bisect.bisect_right(sums, high), len(sums)))
            if places:
                chosen |= min((crossing[place] for place in places), key=lambda s: sum(self.size[v] for v in s))
        return frozenset(chosen)

    @functools.cached_property
    def _crossing(self) -> tuple[list[frozenset[int]], list[int]]:
        last = {self.root[value]: place for place, index in enumerate(self.first) for value in self.reads[index]}
        alive: set[int] = set()
        crossing, sums = [], []
        total = 0
        for place, index in enumerate(self.first):
            made = {value for value in self.makes[index] if value in self.candidates}
            total += sum(self.size[value] for value in made)
            alive = {value for value in alive | made if last.get(value, -1) > place}
            crossing.append(frozenset(alive))
            sums.append(total)
        return crossing, sums


def _choose(steps: _Step, everything: _Plan, budget: int) -> _Plan:
    """Return the plan of the least further time within a budget or, if there is none, of the least memory.

    The forward pass is divided into parts, of which only the borders are kept. The end of the last, which the backward
    pass would compute again at once, is kept as far as that takes no more memory. Then as much more is kept as fits:
    what takes long to compute for its bytes first. If no division is within the budget, the one of the least memory is
    tried without one value after the other, the largest first.
    """
    if everything.peak <= budget:
        return everything
    free = steps.candidates - steps.scaled
    by_price = sorted(free, key=lambda v: -steps.cost[steps.maker[v]] / steps.size[v])
    place = {index: place for place, index in enumerate(steps.first)}
    from_the_end = sorted(free, key=lambda v: -place[steps.maker[v]])
    best: _Plan | None = None
    least, least_kept = everything, frozenset(steps.candidates)
    counts = {number for i in range(12) for number in (2**i, 3 * 2**i) if number <= len(steps.first) // 2}
    for count in sorted({1, *counts}):
        borders = steps.cuts(count) - steps.scaled
        plan = steps.plan(borders)
        end, plan = _most_kept(steps, plan, borders, from_the_end, max(plan.peak, budget))
        kept = borders.union(from_the_end[:end])
        if plan.peak > budget:
            if (plan.peak, plan.extra) < (least.peak, least.extra):
                least, least_kept = plan, kept
            continue
        _, plan = _most_kept(steps, plan, kept, by_price, budget)
        if best is None or plan.extra < best.extra:
            best = plan
    if best is not None:
        return best
    for value in sorted(least_kept, key=lambda v: -steps.size[v])[:_MOST_LEFT_OUT]:
        tried = steps.plan(least_kept - {value})
        if tried.peak < least.peak:
            least, least_kept = tried, least_kept - {value}
        if least.peak <= budget:
            return _most_kept(steps, least, least_kept, by_price, budget)[1]
    return least


def _most_kept(steps: _Step, plan: _Plan, kept: frozenset[int], more: Sequence[int], budget: int) -> tuple[int, _Plan]:
    """Return how many of further values can be kept, the first ones first, and the plan of the least further time."""
    low, high = 0, len(more)
    while high - low > 1:
        middle = (low + high) // 2
        tried = steps.plan(kept.union(more[:middle]))
        if tried.peak <= budget:
            low, plan = middle, tried if tried.extra <= plan.extra else plan
        else:
            high = middle
    return low, plan


def _rewrite(graph: ir.Graph, steps: _Step, plan: _Plan) -> None:
    """Put the copies of a plan into a graph, and order it so that a runtime has to follow the plan."""
    order = _Order(graph, steps, plan)
    nodes: list[ir.Node] = []
    for index, is_copy in plan.order:
        nodes += order.copied(index) if is_copy else order.original(index)
    graph.remove(steps.nodes)
    graph.extend(nodes)


class _Order:
    """Makes the nodes of a plan one after the other."""

    def __init__(self, graph: ir.Graph, steps: _Step, plan: _Plan) -> None:
        self._graph, self._steps, self._plan = graph, steps, plan
        names = {str(value.name) for part in (graph, *graph.subgraphs()) for value in _values(part)}
        self._prefix = next(p for p in _prefixes() if not any(name.startswith(p) for name in names))
        self._copies: dict[ir.Value, ir.Value] = {}
        self._count = 0
        self._sinks: dict[ir.Node, None] = {}
        """Nodes of the backward pass whose results nothing has read so far."""
        self._latest = next(
            n for n in map(steps.nodes.__getitem__, reversed(steps.first)) if any(map(_may_be_read, n.outputs))
        )
        self._empty: list[ir.Value] | None = None
        self._views: dict[ir.Value, ir.Value] = {}
        self._shapes: dict[int, ir.Value] = {}
        self._constants: dict[str, ir.Value] = {}
        self._seen: set[ir.Node] = set()
        """Nodes of the backward pass that run by now."""
        heights: dict[ir.Node, int] = {}
        for node in reversed(steps.nodes):
            above = (heights.get(use.node, 0) for value in node.outputs for use in value.uses())
            heights[node] = 1 + max(above, default=0)
        most, self._spine = 0, set()
        for index in reversed(steps.late):
            node = steps.nodes[index]
            if heights[node] >= most:
                most = heights[node]
                self._spine.add(node)

    def original(self, index: int) -> list[ir.Node]:
        node = self._steps.nodes[index]
        if index in self._steps.forward:
            return [node]
        made: list[ir.Node] = []
        for position, value in enumerate(node.inputs):
            if value in self._copies:
                node.replace_input_with(position, self._copies[value])
        own = [value.producer() for value in node.inputs if value is not None]
        waiting = [sink for sink in self._sinks if sink not in own]
        if node in self._spine and any(map(self._holds_much, waiting)) and not _gives_output(node):
            late = (i for i, v in enumerate(node.inputs) if v is not None and v.producer() in self._seen)
            begin = next((i for i in late if self._can_begin(node, node.inputs[i])), None)
            if begin is not None:
                value = node.inputs[begin]
                assert value is not None
                made = self._gate(value)
                node.replace_input_with(begin, made[-1].outputs[0])
        for producer in own:
            if producer is not None:
                self._sinks.pop(producer, None)
        self._seen.add(node)
        # Updates, and what is added to another gradient in place, run when a session says.
        if any(map(_may_be_read, node.outputs)) and not _updates(node) and not _is_added(node):
            self._latest, self._empty, self._views = node, None, {}
            self._sinks[node] = None
        return [*made, node]

    def _holds_much(self, node: ir.Node) -> bool:
        steps = self._steps
        read = (steps.size[steps.number[v]] for v in node.inputs if v in steps.number)
        return 256 * max(read, default=0) > self._plan.peak

    def _can_begin(self, node: ir.Node, value: ir.Value | None) -> bool:
        if value is None or not self._steps.known.get(str(value.name)) or not _is_number(value):
            return False
        producer = value.producer()
        return producer is None or not _are_joined(producer, node)

    def copied(self, index: int) -> list[ir.Node]:
        """Return the copy of a node; one that reads no copy begins at a view of what is kept."""
        node, made = self._steps.nodes[index], []
        # One view of a value for all copies, as a pattern that onnxruntime fuses may read it more than once.
        inputs = [
            None if v is None else (self._copies if self._is_again(v) else self._views).get(v, v) for v in node.inputs
        ]
        if all(new is old for new, old in zip(inputs, node.inputs, strict=True)):

            def rank(position: int) -> tuple[bool, bool, bool]:
                value = node.inputs[position]
                assert value is not None
                return not self._can_begin(node, value), value.is_initializer(), value.producer() is None

            able = [i for i, v in enumerate(node.inputs) if v is not None and _is_number(v)]
            able = [i for i in able if self._steps.known.get(str(node.inputs[i].name))]  # type: ignore[union-attr]
            begin = min(able, key=rank)
            value = node.inputs[begin]
            assert value is not None
            made = self._gate(value)
            inputs[begin] = self._views[value] = made[-1].outputs[0]
        attributes = list(node.attributes.values())
        copy = ir.Node(
            node.domain, node.op_type, inputs, attributes, overload=node.overload, num_outputs=len(node.outputs),
            name=self._name(f"{node.name}"), version=node.version,
        )  # fmt: skip
        for old, new in zip(node.outputs, copy.outputs, strict=True):
            if old.name:
                new.name = self._name(str(old.name))
            new.type, new.shape = old.type, old.shape
            if self._is_again(old):
                self._copies[old] = new
        return [*made, copy]

    def _is_again(self, value: ir.Value | None) -> bool:
        return value is not None and self._steps.number.get(value, -1) in self._plan.again

    def _gate(self, value: ir.Value) -> list[ir.Node]:
        """Return nodes of which the last is a view of a value that waits for all that has run so far."""
        rank = len(self._steps.known[str(value.name)])
        made: list[ir.Node] = []
        if self._empty is None:
            self._empty, self._shapes = [], {}
            for node in dict.fromkeys([*self._sinks, self._latest]):
                ready = next(one for one in node.outputs if _may_be_read(one))
                for op, more, attributes in (
                    ("Reshape", [self._constant("flat", [-1])], {}),
                    ("Slice", [self._constant("none", [0])] * 2, {}),
                    ("Cast", [], {"to": ir.DataType.INT64}),
                ):
                    made.append(self._node(op, [ready, *more], attributes))
                    ready = made[-1].outputs[0]
                self._empty.append(ready)
            self._sinks.clear()
        if rank not in self._shapes:
            # A 0 in the shape of Reshape is the size that there is.
            made.append(self._node("Concat", [self._constant(f"same{rank}", [0] * rank), *self._empty], {"axis": 0}))
            self._shapes[rank] = made[-1].outputs[0]
        made.append(self._node("Reshape", [value, self._shapes[rank]], {}))
        made[-1].outputs[0].type, made[-1].outputs[0].shape = value.type, value.shape
        return made

    def _node(self, op: str, inputs: Sequence[ir.Value], attributes: Mapping[str, object]) -> ir.Node:
        node = ir.node(op, inputs, dict(attributes), name=self._name(op))  # type: ignore[arg-type]
        node.outputs[0].name = self._name(op)
        return node

    def _name(self, name: str) -> str:
        self._count += 1
        return f"{self._prefix}{name}_{self._count}"

    def _constant(self, name: str, numbers: list[int]) -> ir.Value:
        if name not in self._constants:
            tensor = ir.tensor(np.array(numbers, np.int64), name=f"{self._prefix}{name}")
            value = ir.Value(name=tensor.name, type=ir.TensorType(tensor.dtype), const_value=tensor)
            value.shape = ir.Shape([len(numbers)])
            self._graph.register_initializer(value)
            self._constants[name] = value
        return self._constants[name]


def _prefixes() -> Iterator[str]:
    yield "again/"
    number = 2
    while True:
        yield f"again{number}/"
        number += 1


def _gives_output(node: ir.Node) -> bool:
    return any(value.is_graph_output() for value in node.outputs)


def _updates(node: ir.Node) -> bool:
    operator = custom_ops.OPS.get(node.op_type) if node.domain == custom_ops.DOMAIN else None
    return operator is not None and operator.updates


def _is_added(node: ir.Node) -> bool:
    """Whether a node is the gradient of an embedding, and a term of a sum alone."""
    readers = [use.node for value in node.outputs for use in value.uses()]
    return node.op_type == "EmbeddingDenseBackward" and len(readers) == 1 and readers[0].op_type in ("Add", "Sum")


def _is_number(value: ir.Value) -> bool:
    return bool(value.name) and value.dtype not in (None, ir.DataType.UNDEFINED, ir.DataType.STRING)


def _is_in_place(node: ir.Node) -> bool:
    """Whether the first result of a node may take the memory of an input."""
    return node.op_type in {"": _IN_PLACE, custom_ops.DOMAIN: OVERWRITING}.get(node.domain, ())


def _are_joined(producer: ir.Node, node: ir.Node) -> bool:
    """Whether onnxruntime may make one operator of two, of which one computes a product or a normalization."""
    both = (producer.op_type, node.op_type)
    return both == ("Add", "LayerNormalization") or any(
        one in _PRODUCTS and other in _INTO_PRODUCTS for one, other in (both, both[::-1])
    )


def _may_be_read(value: ir.Value) -> bool:
    """Whether one more reader of a value changes nothing."""
    producer = value.producer()
    return _is_number(value) and (producer is None or not any(_are_joined(producer, use.node) for use in value.uses()))


def _bytes(value: ir.Value, shape: Sequence[int] | None) -> int:
    if shape is None or not _is_number(value) or value.dtype is None:
        return 0
    return math.ceil(math.prod(shape) * value.dtype.itemsize)


def _write_in_standard(node: ir.Node) -> None:
    """Make a node on blocks of channels a standard one, whose shapes follow, where there is one."""
    last = node.attributes.get("channels_last")
    if last is not None and last.as_int():
        return  # Dimensions change places.
    node.domain = ""
    if node.op_type in ("ReorderInput", "ReorderOutput"):
        node.op_type = "Identity"
        node.attributes.clear()


def _values(graph: ir.Graph) -> Iterator[ir.Value]:
    yield from graph.inputs
    yield from graph.initializers.values()
    for node in graph:
        yield from node.outputs


def _read_by(node: ir.Node) -> list[ir.Value]:
    """Return the values that a node reads, in its subgraphs too."""
    inner = graphs_of(node)
    nodes = [node, *(one for graph in inner for one in graph.all_nodes())]
    read = [value for one in nodes for value in one.inputs if value is not None]
    return list(dict.fromkeys([*read, *(value for graph in inner for value in graph.outputs)]))


def _shapes(model: ir.Model, sizes: Mapping[str, int]) -> tuple[dict[str, tuple[int, ...]], list[str]]:
    """Return the shapes of the values of a graph by name, and the dimensions of inputs whose sizes are not known.

    Values whose types are not declared, as those that onnxruntime's optimizations make, get the types that follow.
    """
    copy = copy_model(model)
    assumed: dict[str, None] = {}
    for value in copy.graph.inputs:
        if value.shape is not None:
            names = [str(dim.value) for dim in value.shape if isinstance(dim, ir.SymbolicDim)]
            assumed |= dict.fromkeys(name for name in names if name not in sizes)
            dims = [dim if isinstance(dim, int) else sizes.get(str(dim.value), ASSUMED_DIM) for dim in value.shape]
            value.shape = ir.Shape(dims)
    values = [value for node in copy.graph for value in node.outputs]
    for value in values:
        if value.shape is not None and not value.shape.is_static():
            value.shape = None
    for node in copy.graph:
        if node.domain == _BLOCKED:
            _write_in_standard(node)
    shapes.infer(copy, values)
    found = {}
    for own, value in zip(_values(model.graph), _values(copy.graph), strict=True):
        if own.dtype is None and value.dtype is not None:
            own.dtype = value.dtype
        if value.shape is not None:
            found[str(value.name)] = tuple(dim if isinstance(dim, int) else ASSUMED_DIM for dim in value.shape)
    return found, list(assumed)
