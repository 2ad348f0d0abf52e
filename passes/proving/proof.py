"""The second proof of a match: the subgraph and the fused op run side by side on numbers chosen to tell them apart.

The first proof is algebra; this one is arithmetic and shares no code with it but the list of values at which a form
begins. From these *leaves* on, the nodes of the original and of the rewrite are run by onnx's reference evaluator in
float64, fused nodes by the bodies of their operators, on random and adversarial leaves: peaked values, zeros, NaNs and
infinities, numbers near the constants of the graph, ignored targets, masks of all ones and all zeros, and with every
symbolic dimension of size 0, 1, 2 and more beside others of other sizes. What the original does not take is left out.

A fused value must agree wherever the original is finite. Where it is not, because the original computes 0 x NaN or
0 x Inf in a mask, an ignored row or a one-hot, the fused value may be zero, or what the original gives with any finite
number in the place of the NaN, or with a huge one in the place of the infinity.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir

from gradfuse import custom_ops
from gradfuse.custom_ops import functions
from gradfuse.custom_ops.operator import OLDEST_OPSET
from gradfuse.errors import ArgumentError
from gradfuse.passes.algebra import Poly
from gradfuse.passes.reading import FLOATS, attribute, axes_of_size_one, has_reader, is_broadcast_axes, ort_training

if TYPE_CHECKING:
    from gradfuse.passes.matching import Rewrite, Site

Array = npt.NDArray[Any]

NODE_LIMIT = 2_000  # of a subgraph that is run; the matched ones have tens
ELEMENT_LIMIT = 1 << 18  # of all leaves together; larger static sizes are shrunk
FULL_LIMIT = 1 << 21  # of all leaves, where no shrinking keeps the subgraph valid
_ATTEMPTS = 9
_KEPT_SIZE = 8  # static sizes up to this are never shrunk
_REPLACEMENTS = ((-1.5, 2.25), (2.5, -0.75), (math.nan, 300.0))  # for NaN and infinity; the last is a limit
_DIMS = ((3, 5, 2, 4, 7, 6), (2, 3, 4, 2, 5, 3))
_BY_ROWS = ("CrossEntropyLossGrad", "ScaledMaskedSoftmaxBackward")
_VARIED = 6  # symbols that are given sizes one by one
_NEAR = 4  # constants near which numbers are chosen, on both sides of 0 and at the inverse
_LARGEST = {
    ir.DataType.FLOAT16: 65504.0,
    ir.DataType.BFLOAT16: 3.38e38,
    ir.DataType.FLOAT: 3.4e38,
    ir.DataType.DOUBLE: 1.7e308,
}
_MOVES = 64  # times the change that small moves of numbers make is taken for rounding
_WOBBLE = 2.0**-40  # relative change of numbers that shows what rounding does


class Refuted(Exception):
    """The fused op computed something else than the subgraph that it was to replace."""


class Unproved(Exception):
    """The subgraph could not be run, gave nothing that could be compared, or no number where the fused op gives one."""


@dataclass(frozen=True)
class Sample:
    """One run: the sizes of symbolic dimensions in order of appearance, and how leaves are filled."""

    sizes: tuple[int, ...]
    style: str
    seed: int


@dataclass
class Region:
    """The nodes that compute two values, the leaves that they begin at, and the constants among their inputs."""

    nodes: list[ir.Node] = field(default_factory=list)
    leaves: list[ir.Value] = field(default_factory=list)
    shapes: dict[ir.Value, list[Poly]] = field(default_factory=dict)
    constants: dict[ir.Value, Array] = field(default_factory=dict)
    names: dict[ir.Value, str] = field(default_factory=dict)


def prove(site: Site, rewrite: Rewrite, tolerance: float) -> None:
    """Run a rewrite against the subgraph that it is to replace; their constants may differ by the relative tolerance.

    Equal subgraphs, such as those of the layers of a network, are run once per site.

    Raises:
        Refuted: the two differ: the rule is wrong.
        Unproved: the two could not be compared.
    """
    Proof(site, rewrite, tolerance).run()


@dataclass(frozen=True)
class _Run:
    """What one sample gave; `others` is the original on the numbers of `_variants`."""

    original: Array
    fused: Array
    others: list[Array]
    sample: Sample

    @property
    def scale(self) -> float:
        return float(np.abs(self.original[np.isfinite(self.original)]).max(initial=0.0))


class Proof:
    """One match on the bench."""

    def __init__(self, site: Site, rewrite: Rewrite, tolerance: float) -> None:
        self.site = site
        self.rewrite = rewrite
        self.region = _collect(site, rewrite)
        self.dims = self._dims()
        (self.operator,) = {node.op_type for node in rewrite.fused}
        self.tolerance = tolerance
        self.proto = self._model()
        self.original = _ending_at(self.proto, self.region.names[rewrite.root])

    def run(self) -> None:
        key = self._key()
        if key not in self.site.proofs:
            self.site.proofs[key] = self._verdict()
        verdict = self.site.proofs[key]
        if verdict is not None:
            raise verdict

    # The model

    def _dims(self) -> list[str]:
        """The symbols in the sizes of leaves, in order of appearance."""
        found: dict[str, None] = {}
        todo = [size for value in self.region.leaves for size in self._extents(value)]
        todo += [size for vector in self.region.shapes.values() for size in vector]
        while todo:
            for monomial in todo.pop(0).terms:
                for a, _ in monomial:
                    atom = self.site.algebra.atoms[a]
                    if atom.kind != "dim":
                        raise Unproved("a size is no function of dimensions")
                    derived = self.site.algebra.derived.get(atom.args[0])
                    if derived is None:
                        found[str(atom.args[0])] = None
                    else:
                        todo += derived.sizes
        return list(found)

    def _model(self) -> onnx.ModelProto:
        names = self.region.names
        bodies: dict[str, onnx.FunctionProto] = {}
        protos: list[onnx.NodeProto] = []
        for node in self.region.nodes:
            proto = onnx.NodeProto(op_type=node.op_type, domain=node.domain)
            proto.input.extend("" if v is None else names[v] for v in node.inputs)
            proto.output.extend(names[v] for v in node.outputs)
            if node.op_type == "OneHot" and not node.domain:
                # onnx's evaluator wants the depth without dimensions.
                depth = f"depth_{len(protos)}"
                protos.append(onnx.helper.make_node("Squeeze", [proto.input[1]], [depth]))
                proto.input[1] = depth
            proto.attribute.extend(ir.serde.serialize_attribute(a) for a in node.attributes.values())
            _to_float64(proto)
            if node.domain == custom_ops.DOMAIN:
                body = _body(node, self.site.opset, len(bodies))
                bodies[body.name] = body
                proto.op_type = body.name
                given = {a.name for a in proto.attribute}
                proto.attribute.extend(
                    onnx.helper.make_attribute(a.name, a.default)
                    for a in custom_ops.OPS[node.op_type].attributes
                    if a.name not in given
                )
            protos.append(proto)
        inputs = [*self.region.leaves, *self.region.shapes, *self.region.constants]
        graph = onnx.helper.make_graph(
            protos,
            "match",
            [onnx.helper.make_tensor_value_info(names[v], onnx.TensorProto.DOUBLE, None) for v in inputs],
            [
                onnx.helper.make_tensor_value_info(names[v], onnx.TensorProto.DOUBLE, None)
                for v in (self.rewrite.root, self.rewrite.output)
            ],
        )
        domains = {"": self.site.opset, custom_ops.DOMAIN: custom_ops.VERSION, ort_training.DOMAIN: 1}
        return onnx.helper.make_model(
            graph,
            functions=list(bodies.values()),
            opset_imports=[onnx.helper.make_opsetid(d, v) for d, v in domains.items()],
        )

    def _key(self) -> bytes:
        """What a verdict depends on: equal for the same subgraph at another place, or with other names."""
        digest = hashlib.sha256(self.proto.SerializeToString(deterministic=True))
        digest.update(repr((self.tolerance, len(self.dims))).encode())
        # Symbols are told by sizes that no tensor has.
        env = {dim: 10**9 + k for k, dim in enumerate(self.dims)}
        for value in self.region.leaves:
            sizes = [_evaluated(self.site, s, env) for s in self._extents(value)]
            digest.update(repr((value.dtype, sizes, self._same_as(value), value in self.rewrite.ends)).encode())
        for vector in self.region.shapes.values():
            digest.update(repr([_evaluated(self.site, s, env) for s in vector]).encode())
        for array in self.region.constants.values():
            digest.update(repr((array.dtype, array.shape)).encode() + array.tobytes())
        return digest.digest()

    def _extents(self, value: ir.Value) -> list[Poly]:
        return _extents(self.site, value)

    def _same_as(self, value: ir.Value) -> int:
        """The first leaf that holds the same numbers."""
        form = self.site.forms.form(value)
        for k, leaf in enumerate(self.region.leaves):
            other = self.site.forms.form(leaf)
            if leaf is value or (other.groups == form.groups and other.poly == form.poly):
                return k
        return -1

    # The runs

    def _verdict(self) -> Exception | None:
        try:
            self._compare()
        except (Refuted, Unproved) as verdict:
            return verdict
        return None

    def _compare(self) -> None:
        from onnx.reference import ReferenceEvaluator

        operators = ort_training.reference_ops()
        evaluator, original = (ReferenceEvaluator(m, new_ops=operators) for m in (self.proto, self.original))
        problem: Exception | None = None
        for table, rescale in self._attempts():
            try:
                self._compare_at(evaluator, original, table, rescale)
                return
            except Refuted as error:
                # In other sizes the constants of the graph may be wrong.
                problem = Unproved(f"in smaller sizes the original is {error}") if table else error
            except Unproved as error:
                problem = error
        assert problem is not None
        raise problem

    def _attempts(self) -> Iterator[tuple[Mapping[int, int], bool]]:
        """Ways to run: the sizes to replace, and whether constants go with them."""
        for table in self._tables():
            yield table, False
            if table:
                yield table, True

    def _tables(self) -> Iterator[Mapping[int, int]]:
        """Ways to replace the large static sizes by small ones; empty for the sizes as they are.

        There are several, for what the constants of a graph say about its sizes may hold in one of them only.
        """
        count = self._elements({})
        if count <= ELEMENT_LIMIT:
            yield {}
            return
        sizes = self._static_sizes()
        large = sorted((n for n in sizes if n > _KEPT_SIZE), reverse=True)
        some = [_shrunk(sizes, sizes - {n}) for n in reversed(large)] + [_shrunk(sizes, {n}) for n in large]
        affordable = [t for t in (_shrunk(sizes, sizes), *some, {}) if self._elements(t) <= FULL_LIMIT]
        if not affordable:
            raise Unproved(f"{count} elements are too many to run, and cannot be made fewer")
        yield from affordable[:_ATTEMPTS]

    def _elements(self, table: Mapping[int, int]) -> int:
        env = dict(zip(self.dims, self._base(_DIMS[0]), strict=True))
        return sum(
            math.prod(_evaluated(self.site, s, env, table) for s in self._extents(v)) for v in self.region.leaves
        )

    def _static_sizes(self) -> set[int]:
        values = [*self.region.leaves]
        integers = [a for a in self.region.constants.values() if a.dtype.kind in "iu" and a.size <= 64]
        found = {int(n) for a in integers for n in a.flat if n > 1}
        values += [v for node in self.region.nodes for v in node.outputs if self.site.forms.get(v) is not None]
        for value in values:
            form = self.site.forms.get(value)
            if form is not None:
                found |= {n for s in (*form.sizes, *self._extents(value)) if (n := s.integer) is not None and n > 1}
        return found

    def _compare_at(self, evaluator: Any, original: Any, table: Mapping[int, int], rescale: bool) -> None:
        constants = {self.region.names[v]: _resized(a, table, rescale) for v, a in self.region.constants.items()}
        runs: list[_Run] = []
        failure: Exception | None = None
        for sample in self._samples(constants.values()):
            env = dict(zip(self.dims, sample.sizes, strict=True))
            leaves: dict[str, Array] | None = None
            with np.errstate(all="ignore"), warnings.catch_warnings():
                # Of a mean over nothing, which some samples ask for.
                warnings.simplefilter("ignore", RuntimeWarning)
                try:
                    leaves = self._leaves(sample, env, table)
                    plain, fused = (np.asarray(a) for a in evaluator.run(None, constants | leaves))
                    others = [
                        np.asarray(original.run(None, constants | feeds)[0])
                        for feeds in _variants(sample, leaves, constants, self.tolerance)
                    ]
                except Exception as error:  # The evaluator raises whatever its NumPy code raises.
                    failure = error
                    if leaves is not None and 0 not in sample.sizes and self._runs(original, constants | leaves):
                        raise Unproved(
                            f"the operator does not take what the original takes ({self._at(sample)})"
                        ) from error
                    continue
                runs.append(_Run(plain, fused, others, sample))
        if not runs:
            raise Unproved(f"it cannot be run: {(str(failure) or repr(failure)).splitlines()[0]}")
        # Of all runs, as in some of them all may be what rounding leaves of a difference.
        scale = max((r.scale for r in runs if not r.sample.style.startswith("near")), default=0.0)
        for run in runs:
            with np.errstate(all="ignore"):
                self._require_agreement(run, scale)
        if scale == 0.0:
            raise Unproved("no run gave a finite number other than zero")

    def _runs(self, original: Any, feeds: Mapping[str, Array]) -> bool:
        try:
            original.run(None, feeds)
        except Exception:  # The evaluator raises whatever its NumPy code raises.
            return False
        return True

    def _require_agreement(self, run: _Run, scale: float) -> None:
        """`scale`: the largest value of runs with numbers of ordinary size."""
        original, fused, sample = run.original, run.fused, run.sample
        empty = 0 in sample.sizes
        if original.shape != fused.shape:
            raise (Unproved if empty else Refuted)(
                f"of shape {original.shape}, fused {fused.shape} ({self._at(sample)})"
            )
        near = sample.style.startswith("near")
        bound: Array = np.full(original.shape, 4 * self.tolerance * (max(run.scale, scale) if near else scale))
        if near:
            # Among large numbers a difference may be what rounding leaves, of constants too, or a condition turn.
            bound = bound + _MOVES * np.abs(original - run.others[0])

        def close(a: Array) -> Array:
            return np.asarray(np.abs(a - fused) <= bound)

        right = close(original)
        free = ~np.isfinite(fused) | (fused == 0) | near
        not_finite = bool(run.others) and not near
        if not_finite:
            *finite, limit = (close(a) for a in run.others)
            free |= np.logical_and.reduce(finite) | limit
            if self.operator in _BY_ROWS:
                # A row that has a NaN may be NaN.
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
        sizes = "".join(f", {d} = {n}" for d, n in zip(self.dims, sample.sizes, strict=True))
        return f"{sample.style} values{sizes}, seed {sample.seed}"

    # What is tried

    def _base(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """A size for each symbol: the same for those that meet in an elementwise operation, else another one."""
        firsts = list(range(len(self.dims)))
        for derived in self.site.algebra.derived.values():
            names = [self.site.algebra.text(s) for s in derived.sizes] if derived.kind == "broadcast" else []
            met = [k for k, dim in enumerate(self.dims) if dim in names]
            joined = {firsts[k] for k in met}
            firsts = [min(joined) if f in joined else f for f in firsts]
        return tuple(sizes[f % len(sizes)] for f in firsts)

    def _samples(self, constants: Iterable[Array]) -> Iterator[Sample]:
        count = len(self.dims)
        base, other = (self._base(d) for d in _DIMS)
        # Of targets there may be no more than rows, whichever symbol comes first.
        bases = list(dict.fromkeys((base, tuple(sorted(base, reverse=True)), (_DIMS[0][0],) * count)))
        for sizes in bases:
            for seed, style in enumerate(("normal", "peaked", "sparse", "positive", "uniform")):
                yield Sample(sizes, style, seed)
        floats = [k for k, v in enumerate(self.region.leaves) if v.dtype in FLOATS]
        for k in floats[:4]:
            yield from (Sample(s, f"not finite {k} once", 10 + k) for s in bases)
            yield from (Sample(s, f"not finite {k} often", 14 + k + n) for n in (0, 100) for s in (bases[0], bases[-1]))
        if any(v.dtype not in FLOATS for v in self.region.leaves):
            styles = enumerate(("all true", "all false"))
            yield from (Sample(s, style, 20 + k) for k, style in styles for s in bases)
        yield from (
            Sample(s, f"near {x!r}", 60 + k)
            for k, x in enumerate(_places(constants))
            for s in {*bases[:1], *bases[-1:]}
        )
        if count:
            yield Sample(other, "normal", 30)
            yield from (Sample((n,) * count, "normal", 30 + n) for n in (1, 2))
            for k in range(min(count, _VARIED)):
                yield from (Sample((*s[:k], 1, *s[k + 1 :]), "normal", 40 + k) for s in bases)
                yield Sample((*base[:k], 2, *base[k + 1 :]), "normal", 46 + k)
                yield Sample((*(1,) * k, base[k], *(1,) * (count - k - 1)), "normal", 52 + k)
            yield from (Sample((*base[:k], 0, *base[k + 1 :]), "normal", 80 + k) for k in range(min(count, 3)))

    def _leaves(self, sample: Sample, env: Mapping[str, int], table: Mapping[int, int]) -> dict[str, Array]:
        rng = np.random.default_rng(sample.seed)
        feeds: dict[str, Array] = {}
        arrays: list[Array] = []
        for k, value in enumerate(self.region.leaves):
            shape = [_evaluated(self.site, s, env, table) for s in self._extents(value)]
            same = self._same_as(value)
            array = arrays[same] if same < k else self._filled(k, value, shape, sample, rng, env, table)
            arrays.append(array)
            feeds[self.region.names[value]] = array
        for value, vector in self.region.shapes.items():
            sizes = np.asarray([_evaluated(self.site, s, env, table) for s in vector], np.int64)
            scalar = value.shape is not None and len(value.shape) == 0
            feeds[self.region.names[value]] = sizes.reshape(()) if scalar else sizes
        return feeds

    def _filled(
        self,
        k: int,
        value: ir.Value,
        shape: Sequence[int],
        sample: Sample,
        rng: np.random.Generator,
        env: Mapping[str, int],
        table: Mapping[int, int],
    ) -> Array:
        if value.dtype == ir.DataType.BOOL:
            if sample.style in ("all true", "all false"):
                return np.full(shape, sample.style == "all true")
            return rng.random(shape) < 0.5
        if value.dtype in FLOATS:
            return _floats(shape, sample.style, rng, k, _LARGEST[value.dtype])
        assert value.dtype is not None
        integers = np.dtype(value.dtype.numpy())
        if value in self.rewrite.ends:
            rows = self.rewrite.ends[value]
            count = _evaluated(self.site, rows, env, table)
            ends = np.sort(rng.integers(0, count, shape, endpoint=True))
            ends[..., -1:] = count
            return ends.astype(integers)
        if self.operator != "CrossEntropyLossGrad":
            # Numbers that are compared, or ends of groups.
            if sample.style == "normal" or sample.style.endswith("once"):
                return rng.integers(0, 2, shape).astype(integers)
            if sample.style == "peaked" or sample.style.endswith("often"):
                return rng.choice(self._compared(integers), shape).astype(integers)
            if sample.style == "sparse" and self.operator == "GroupedBiasAddGrad":
                # Counts that add up to nothing, and starts in no order.
                return rng.integers(-_KEPT_SIZE, _KEPT_SIZE, shape, endpoint=True).astype(integers)
            return np.sort(rng.integers(0, 1 << 20, shape), axis=None).reshape(shape).astype(integers)
        labels = self._labels(env, table)
        if sample.style in ("all true", "all false"):
            return np.full(shape, labels[-1 if sample.style == "all true" else 0], integers)
        return rng.choice(labels, shape).astype(integers)

    def _labels(self, env: Mapping[str, int], table: Mapping[int, int]) -> list[int]:
        """The classes, and the number that is ignored where the original tests for it."""
        classes, ignored = 1, []
        for node in self.rewrite.fused:
            logits = node.inputs[1]
            assert logits is not None
            classes = _evaluated(self.site, self.site.extents(logits)[1], env, table)
            ignored.append(attribute(node, "ignore_index", -100))
        # A match that ignores what is no target's number may bring it as a constant.
        ignored = [n for n in ignored if n != np.iinfo(np.int64).min]
        picks = [n for n in range(classes) if n not in ignored]
        return picks + [table.get(n, n) for n in ignored if self._tests(n) or not picks]

    def _compared(self, dtype: np.dtype[Any]) -> list[int]:
        """Integers for which conditions may hold, and others for which they may not; groups are none below 0."""
        if self.operator == "GroupedBiasAddGrad":
            return [0, 1]
        arrays = [a for a in self.region.constants.values() if a.dtype.kind in "iu" and a.size == 1]
        limits = np.iinfo(dtype)
        found = {0, 1, *(int(a.flat[0]) for a in arrays)}
        return sorted(n for n in found if limits.min <= n <= limits.max)

    def _tests(self, number: int) -> bool:
        """Whether the original compares with this number."""
        return any(
            a.dtype.kind in "iu" and a.size == 1 and int(a.reshape(())) == number
            for a in self.region.constants.values()
        )


def _collect(site: Site, rewrite: Rewrite) -> Region:
    region = Region()
    own = set(rewrite.nodes)
    done: set[ir.Node] = set()

    def is_leaf(value: ir.Value, node: ir.Node | None) -> bool:
        if node is None or value in rewrite.frontier:
            return True
        if node.domain == "" and node.op_type in ("Shape", "Size"):
            # What the graph computes a shape that is not known from is run with the rest.
            return site.forms.vector(value) is not None
        if node in own:
            return False
        if node.domain == "" and node.op_type in ("TopK", "ReduceMax"):
            # Rules rely on the order that a sort makes; and where a maximum is infinite, so is a number that it is of.
            return False
        if node.domain == custom_ops.DOMAIN:
            # What an earlier match put in is run by its body; of one that the model came with nothing is known.
            return value in site.forms.opaque
        if not has_reader(node):
            return True
        if rewrite.frontier:
            return False
        if is_broadcast_axes(node):
            return any(site.forms.vector(v) is None for v in node.inputs)
        if node.op_type == "NonZero":
            # Axes that are found by their size are no numbers to choose freely; the number of positions is.
            return axes_of_size_one(site.forms, value) is None
        return value in site.forms.opaque

    stack: list[tuple[ir.Value, bool]] = [(rewrite.output, False), (rewrite.root, False)]
    while stack:
        value, entered = stack.pop()
        node = value.producer()
        if entered:
            assert node is not None
            if node not in done:
                done.add(node)
                region.nodes.append(node)
                for v in node.outputs:
                    region.names.setdefault(v, f"v{len(region.names)}")
            continue
        if value in region.names or node in done:
            continue
        array = site.forms.constant(value)
        if array is not None:
            region.names[value] = f"v{len(region.names)}"
            region.constants[value] = array.astype(np.float64) if value.dtype in FLOATS else array
        elif is_leaf(value, node):
            region.names[value] = f"v{len(region.names)}"
            vector = site.forms.vector(value) if value not in rewrite.frontier else None
            if vector is None:
                region.leaves.append(value)
            else:
                region.shapes[value] = vector
        else:
            assert node is not None
            if len(done) > NODE_LIMIT:
                raise Unproved(f"more than {NODE_LIMIT} nodes")
            stack.append((value, True))
            stack.extend((v, False) for v in node.inputs if v is not None)
    return region


def _body(node: ir.Node, opset: int, number: int) -> onnx.FunctionProto:
    """The body of a fused node's operator, computing in float64, under a name of its own."""
    operator = custom_ops.OPS[node.op_type]
    try:
        call = functions.described(operator, node)
        variant = operator.variant(call, max(opset, OLDEST_OPSET))
    except ArgumentError as error:
        raise Refuted(f"something that the fused op refuses: {error}") from None
    body = operator.function(variant)
    body.name = f"{operator.name}_{number}"
    todo = list(body.node)
    while todo:
        inner = todo.pop()
        for given in inner.attribute:
            todo.extend(given.g.node)
            if inner.op_type == "Constant" and given.name == "value_float":
                value = call.attributes[given.ref_attr_name] if given.ref_attr_name else given.f
                tensor = onnx.numpy_helper.from_array(np.asarray(value, np.float64))
                given.CopyFrom(onnx.helper.make_attribute("value", tensor))
        _to_float64(inner)
    return body


def _to_float64(node: onnx.NodeProto) -> None:
    """Make a node's floats float64."""
    if node.op_type == "ConstantOfShape" and not node.attribute:
        node.attribute.append(onnx.helper.make_attribute("value", onnx.numpy_helper.from_array(np.zeros(1))))
    for given in node.attribute:
        if given.name == "to" and ir.DataType(given.i) in FLOATS:
            given.i = onnx.TensorProto.DOUBLE
        elif given.type == onnx.AttributeProto.TENSOR and ir.DataType(given.t.data_type) in FLOATS:
            array = onnx.numpy_helper.to_array(given.t).astype(np.float64)
            given.t.CopyFrom(onnx.numpy_helper.from_array(array))


def _extents(site: Site, value: ir.Value) -> list[Poly]:
    if site.forms.get(value) is None:
        raise Unproved(f"the shape of {value.name} is unknown")
    return site.extents(value)


def _evaluated(site: Site, size: Poly, env: Mapping[str, int], table: Mapping[int, int] | None = None) -> int:
    total = 0
    for monomial, c in size.terms.items():
        factor = int(c)
        term = table.get(factor, factor) if table else factor
        for a, e in monomial:
            name = str(site.algebra.atoms[a].args[0])
            derived = site.algebra.derived.get(name)
            sizes = [] if derived is None else [_evaluated(site, s, env, table) for s in derived.sizes]
            term *= (env.get(name, 1) if derived is None else derived.of(sizes)) ** int(e)
        total += term
    if total < 0:
        raise Unproved("a size is negative")
    return total


def _floats(shape: Sequence[int], style: str, rng: np.random.Generator, k: int, largest: float) -> Array:
    values = rng.standard_normal(shape)
    match style.split():
        case ["near", place]:
            x = float(place)
            values = np.choose(rng.integers(0, 3, shape), [np.full(shape, x), x + values, x * (1 + values / 2)])
            return np.clip(np.asarray(values, np.float64), -largest, largest)
        case ["peaked"]:
            values *= 30.0
        case ["sparse"]:
            values[rng.random(shape) < 0.5] = 0.0
        case ["positive"]:
            values = np.abs(values) + 0.1
        case ["uniform"]:
            values = np.full(shape, float(values.flat[0]) if values.size else 0.0)
        case ["not", "finite", which, "once"] if int(which) == k and values.size:
            values.flat[rng.integers(values.size)] = np.nan
            values.flat[rng.integers(values.size)] = rng.choice([np.inf, -np.inf])
        case ["not", "finite", which, "often"] if int(which) == k:
            values = np.where(rng.random(shape) < 0.3, rng.choice([np.nan, np.inf, -np.inf], shape), values)
    return np.asarray(values, np.float64)


def _places(constants: Iterable[Array]) -> list[float]:
    """The numbers near which the constants of a graph matter, where those of ordinary size do not reach them."""
    scalars = {float(a.flat[0]) for a in constants if a.dtype.kind == "f" and a.size and (a == a.flat[0]).all()}
    apart = {abs(c) for c in scalars if math.isfinite(c) and not (c == 0 or 0.1 < abs(c) < 2)}
    chosen = sorted(apart, key=lambda c: abs(math.log(c)), reverse=True)[:_NEAR]
    return list(dict.fromkeys(x for c in chosen for x in ((c, -c) if c > 1 else (1 / c, -1 / c))))


def _variants(
    sample: Sample, leaves: Mapping[str, Array], constants: Mapping[str, Array], tolerance: float
) -> list[dict[str, Array]]:
    """The leaves with other numbers: for those that are not finite, or changed by about what rounding does."""
    if sample.style.startswith("not finite"):
        return [_replaced(leaves, *numbers) for numbers in _REPLACEMENTS]
    if not sample.style.startswith("near"):
        return []
    rng = np.random.default_rng(sample.seed)
    sizes = [(leaves, _WOBBLE), (constants, tolerance / _MOVES)]
    return [
        {
            name: a * (1 + size * rng.choice([-1.0, 1.0], a.shape)) if a.dtype.kind == "f" else a
            for arrays, size in sizes
            for name, a in arrays.items()
        }
    ]


def _ending_at(model: onnx.ModelProto, output: str) -> onnx.ModelProto:
    """The model with the nodes and the output alone that one value needs."""
    part = onnx.ModelProto()
    part.CopyFrom(model)
    needed, nodes = {output}, []
    for node in reversed(model.graph.node):
        if needed.intersection(node.output):
            needed.update(node.input)
            nodes.append(node)
    del part.graph.node[:], part.graph.output[:]
    part.graph.node.extend(reversed(nodes))
    part.graph.output.extend(o for o in model.graph.output if o.name == output)
    return part


def _replaced(leaves: Mapping[str, Array], nan: float, infinity: float) -> dict[str, Array]:
    """The leaves with numbers in the place of NaNs and infinities."""
    return {
        name: np.nan_to_num(a, nan=nan, posinf=infinity, neginf=-infinity) if a.dtype.kind == "f" else a
        for name, a in leaves.items()
    }


def _in_line_with_nan(array: Array) -> Array:
    """The elements that share a line along some dimension with a NaN."""
    nan = np.isnan(array)
    for axis in range(nan.ndim):
        nan = nan | np.isnan(array).any(axis, keepdims=True)
    return np.asarray(nan)


def _shrunk(sizes: set[int], free: set[int]) -> dict[int, int]:
    """Small numbers for the large ones that are free: their order, products and sums kept as far as that goes."""
    table = {1: 1}
    latest = _KEPT_SIZE + 1
    for n in sorted(sizes):
        if n <= _KEPT_SIZE or n not in free:
            table[n] = n
            continue
        factor = next((m for m in sorted(table, reverse=True) if 1 < m < n and n % m == 0 and n // m in table), None)
        part = next((m for m in sorted(table, reverse=True) if n - m in table), None)
        if factor is not None:
            table[n] = table[factor] * table[n // factor]
        elif part is not None:
            table[n] = table[part] + table[n - part]
        else:
            table[n] = latest
        latest = max(latest, table[n]) + 2
    return {n: small for n, small in table.items() if n != small}


def _rescaled(number: float, table: Mapping[int, int]) -> float:
    """The number for the small sizes, if it is a round one times or over large ones, as 2 / N is."""

    def is_round(x: float) -> bool:
        return abs(float(f"{x:.1e}") - x) <= 1e-6 * abs(x)

    large = sorted(table, reverse=True)[:6]
    for count in (1, 2, 3):
        for chosen in itertools.combinations(large, count):
            for power in (1, -1):
                if is_round(number * math.prod(n**power for n in chosen)) and not is_round(number):
                    return number * math.prod((n / table[n]) ** power for n in chosen)
    return number


def _resized(array: Array, table: Mapping[int, int], rescale: bool) -> Array:
    """A constant in the small sizes: its dimensions, integers that are sizes, and floats that are made of sizes."""
    if not table:
        return array
    array = array[tuple(slice(0, table.get(n, n)) for n in array.shape)]
    if array.dtype.kind in "iu":
        return np.asarray([table.get(int(n), int(n)) for n in array.flat], array.dtype).reshape(array.shape)
    if rescale and array.dtype.kind == "f" and array.size and np.all(array == array.flat[0]):
        return np.full(array.shape, _rescaled(float(array.flat[0]), table))
    return array
