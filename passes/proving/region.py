"""The subgraph that a rewrite replaces, cut out together with the new nodes, as a model that NumPy runs in float64."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir

from gradfuse import custom_ops
from gradfuse.custom_ops import functions
from gradfuse.errors import ArgumentError
from gradfuse.passes.algebra import UNIT, Poly, number
from gradfuse.passes.proving.verdicts import Refuted, Unproved
from gradfuse.passes.reading import FLOATS, axes_of_size_one, has_reader, is_broadcast_axes, is_float, ort_training
from gradfuse.passes.reading.draws import draw_of

if TYPE_CHECKING:
    from gradfuse.passes.matching import Rewrite, Site

ELEMENTS = 12
"""The elements of tensors where all is elementwise."""
_SHAPES = {"Expand": 1, "Reshape": 1, "Tile": 1, "ConstantOfShape": 0}
"""Operators that read a shape, or numbers of repetitions, with the place of that input."""
_SHAPING = {
    *("Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Expand", "Tile"),
    *("Slice", "Split", "Concat", "Shape", "Size"),
}
_NEAR = 64  # values ahead of one
_STEPS_BACK = 3  # from a value to what it is computed from
NODE_LIMIT = 2_000  # of a subgraph that is run; the matched ones have tens


class Region:
    """The nodes that compute the root of a rewrite and the output of its fused nodes.

    Attributes:
        site, rewrite: where the subgraph is, and what replaces it.
        operator: what the fused nodes are.
        nodes: in an order in which they can run.
        leaves: the values that the nodes begin at.
        shapes: values that hold sizes, with these sizes.
        constants: the constants among the inputs; floats in float64.
        names: what the values are called in `model`.
        dims: the symbols in the sizes of leaves, in order of appearance.

    Raises:
        Unproved: there are too many nodes, or a size is not known.
        Refuted: the operator does not accept the inputs or attributes of a fused node.
    """

    def __init__(self, site: Site, rewrite: Rewrite) -> None:
        self.site = site
        self.rewrite = rewrite
        self._whole = site.extents(rewrite.root)
        self.frontier = _free(site, rewrite)
        (operator,) = {node.op_type for node in rewrite.fused}
        self.operator = custom_ops.OPS[operator]
        self.nodes: list[ir.Node] = []
        self.leaves: list[ir.Value] = []
        self.shapes: dict[ir.Value, list[Poly]] = {}
        self.constants: dict[ir.Value, npt.NDArray[Any]] = {}
        self.names: dict[ir.Value, str] = {}
        self._collect()
        self._require_shapes()
        self.dims = self._dims()
        self.model = self._model()

    # Sizes

    def extents(self, value: ir.Value) -> list[Poly]:
        """Return the sizes of the dimensions of a value."""
        if self.site.forms.get(value) is None:
            raise Unproved(f"the shape of {value.name} is unknown")
        extents = self.site.extents(value)
        if self._is_of_any_shape and self._is_whole(value):
            # Any shape stands for all, so that equal updates of many parameters are run once.
            return [number(ELEMENTS)]
        return extents

    def _is_whole(self, value: ir.Value) -> bool:
        extents = self.site.extents(value)
        return extents == self._whole and any(size != UNIT for size in extents)

    @cached_property
    def _is_of_any_shape(self) -> bool:
        """Whether no node changes the dimensions of a tensor of the root's shape."""
        read = (v for node in self.nodes if node.op_type in _SHAPING for v in node.inputs[:1] if v is not None)
        return self.rewrite.elementwise and not any(self.site.knows(v) and self._is_whole(v) for v in read)

    def size(self, size: Poly, env: Mapping[str, int], table: Mapping[int, int] | None = None) -> int:
        """Return the number that a size is, for these sizes of symbols and these replacements of static sizes."""
        derived, bases = self.site.algebra.derived, self.site.algebra.bases
        todo = self._symbols(size)
        symbols = sorted({base for name in todo for base in bases.get(name, (name,))})
        key = tuple((name, env.get(name, 1)) for name in symbols), None if table is None else tuple(table.items())
        # Without recursion, and each of them once: sizes derive from one another from layer to layer.
        known = self.site.derived_sizes.setdefault(key, {})
        while todo:
            name = todo[-1]
            if name in known:
                todo.pop()
                continue
            definition = derived.get(name)
            inner = () if definition is None else definition.sizes
            missing = [n for s in inner for n in self._symbols(s) if n not in known]
            todo += missing
            if not missing:
                sizes = [self._number(s, known, table) for s in inner]
                known[name] = env.get(name, 1) if definition is None else definition.of(sizes)
        return self._number(size, known, table)

    def _symbols(self, size: Poly) -> list[str]:
        return [str(self.site.algebra.atoms[a].args[0]) for monomial in size.terms for a, _ in monomial]

    def _number(self, size: Poly, known: Mapping[str, int], table: Mapping[int, int] | None) -> int:
        total = 0
        for monomial, c in size.terms.items():
            factor = int(c)
            term = table.get(factor, factor) if table else factor
            for a, e in monomial:
                term *= known[str(self.site.algebra.atoms[a].args[0])] ** int(e)
            total += term
        if total < 0:
            raise Unproved("a size is negative")
        return total

    def static_sizes(self) -> set[int]:
        """Return the sizes that are numbers, of all values that have a form."""
        values = [*self.leaves]
        integers = [a for a in self.constants.values() if a.dtype.kind in "iu" and a.size <= 64]
        found = {int(n) for a in integers for n in a.flat if n > 1}
        values += [v for node in self.nodes for v in node.outputs if self.site.forms.get(v) is not None]
        for value in values:
            form = self.site.forms.get(value)
            if form is not None:
                found |= {n for s in (*form.sizes, *self.extents(value)) if (n := s.integer) is not None and n > 1}
        return found

    def same_as(self, value: ir.Value) -> int:
        """Return the place of the first leaf that holds the same numbers."""
        form = self.site.forms.form(value)
        for k, leaf in enumerate(self.leaves):
            other = self.site.forms.form(leaf)
            if leaf is value or (other.groups == form.groups and other.poly == form.poly):
                return k
        return -1

    def _dims(self) -> list[str]:
        found: dict[str, None] = {}
        seen: set[str] = set()
        todo = deque(size for value in self.leaves for size in self.extents(value))
        todo += [size for vector in self.shapes.values() for size in vector]
        while todo:
            for monomial in todo.popleft().terms:
                for a, _ in monomial:
                    atom = self.site.algebra.atoms[a]
                    if atom.kind != "dim":
                        raise Unproved("a size is no function of dimensions")
                    name = str(atom.args[0])
                    derived = self.site.algebra.derived.get(name)
                    if derived is None:
                        found[name] = None
                    elif name not in seen:
                        seen.add(name)
                        todo += derived.sizes
        return list(found)

    # Cutting out

    def _collect(self) -> None:
        """Walk from both results up to the leaves, without recursion: a node comes after all that it reads."""
        forms, rewrite = self.site.forms, self.rewrite
        own = set(rewrite.nodes)
        done: set[ir.Node] = set()
        stack: list[tuple[ir.Value, bool]] = [(rewrite.output, False), (rewrite.root, False)]
        while stack:
            value, entered = stack.pop()
            node = value.producer()
            if entered:
                assert node is not None
                if node not in done:
                    done.add(node)
                    self.nodes.append(node)
                    for v in node.outputs:
                        self._name(v)
                continue
            if value in self.names or node in done:
                continue
            array = forms.constant(value)
            if array is not None:
                self._name(value)
                self.constants[value] = self._widened(value, array)
            elif self._is_leaf(value, node, own):
                self._name(value)
                vector = forms.vector(value) if value not in self.frontier else None
                if vector is None:
                    self.leaves.append(value)
                else:
                    self.shapes[value] = vector
            else:
                assert node is not None
                if len(done) > NODE_LIMIT:
                    raise Unproved(f"more than {NODE_LIMIT} nodes")
                stack.append((value, True))
                stack.extend((v, False) for v in node.inputs if v is not None)

    def _require_shapes(self) -> None:
        """Raise Unproved where a leaf is a shape: other numbers in it make tensors of any size."""
        leaves = set(self.leaves)
        for node in self.nodes:
            place = _SHAPES.get(node.op_type) if not node.domain else None
            shape = node.inputs[place] if place is not None and len(node.inputs) > place else None
            if shape in leaves:
                raise Unproved(f"the shape {str(shape.name)!r} is not known")

    def _widened(self, value: ir.Value, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        if value.dtype not in FLOATS:
            return array
        if self.rewrite.elementwise and value.dtype == ir.DataType.FLOAT and array.size == 1:
            # 0.999 is meant, not 0.99900001: 1 less its power is another number.
            return np.asarray([float(str(n)) for n in array.flat]).reshape(array.shape)
        return array.astype(np.float64)

    def _name(self, value: ir.Value) -> None:
        self.names.setdefault(value, f"v{len(self.names)}")

    def _is_leaf(self, value: ir.Value, node: ir.Node | None, own: set[ir.Node]) -> bool:
        forms, frontier = self.site.forms, self.frontier
        if node is None or value in frontier:
            return True
        if node.domain == "" and node.op_type in ("Shape", "Size"):
            # What the graph computes a shape that is not known from is run with the rest.
            return forms.vector(value) is not None
        if node in own or node in self.rewrite.runs or node in forms.looked_through:
            return False
        if draw_of(forms, value) is not None:
            # Of the bits behind a mask there are as many as a graph says, in whatever size it is run.
            return True
        if node.domain == "" and node.op_type in ("TopK", "ReduceMax"):
            # Rules rely on the order that a sort makes; and where a maximum is infinite, so is one of its numbers.
            return False
        if node.domain == custom_ops.DOMAIN:
            # What an earlier match put in is run by its body; nothing is known of one that the model came with.
            return value in forms.opaque
        if not has_reader(node) or (node.op_type == "Conv" and value in forms.opaque):
            return True
        if frontier:
            return False
        if is_broadcast_axes(node):
            return any(forms.vector(v) is None for v in node.inputs)
        if node.op_type == "NonZero":
            # Axes that are found by their size are no numbers to choose freely; the number of positions is.
            return axes_of_size_one(forms, value) is None
        return value in forms.opaque

    # The model

    def _model(self) -> onnx.ModelProto:
        names = self.names
        bodies: dict[str, onnx.FunctionProto] = {}
        protos: list[onnx.NodeProto] = []
        for node in self.nodes:
            proto = onnx.NodeProto(op_type=node.op_type, domain=node.domain)
            proto.input.extend("" if v is None else names[v] for v in node.inputs)
            proto.input.extend(names[v] for v in ort_training.further_inputs(node))
            proto.output.extend(names[v] for v in node.outputs)
            if node.op_type == "OneHot" and not node.domain:
                # onnx's evaluator wants the depth without dimensions.
                depth = f"depth_{len(protos)}"
                protos.append(onnx.helper.make_node("Squeeze", [proto.input[1]], [depth]))
                proto.input[1] = depth
            # The shape of a kernel follows from the kernel, which may be run in a smaller one.
            given = [a for a in node.attributes.values() if a.name != "kernel_shape" or "Conv" not in node.op_type]
            proto.attribute.extend(ir.serde.serialize_attribute(a) for a in given)
            _to_float64(proto)
            if node.domain == custom_ops.DOMAIN:
                body = _body(node, self.site.opset, len(bodies))
                bodies[body.name] = body
                proto.op_type = body.name
                present = {a.name for a in proto.attribute}
                proto.attribute.extend(
                    onnx.helper.make_attribute(a.name, a.default)
                    for a in custom_ops.OPS[node.op_type].attributes
                    if a.name not in present
                )
            protos.append(proto)
        inputs = [*self.leaves, *self.shapes, *self.constants]
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

    @cached_property
    def original(self) -> onnx.ModelProto:
        """The model without the fused nodes and their output."""
        output = self.names[self.rewrite.root]
        part = onnx.ModelProto()
        part.CopyFrom(self.model)
        needed, nodes = {output}, []
        for node in reversed(self.model.graph.node):
            if needed.intersection(node.output):
                needed.update(node.input)
                nodes.append(node)
        del part.graph.node[:], part.graph.output[:]
        part.graph.node.extend(reversed(nodes))
        part.graph.output.extend(o for o in self.model.graph.output if o.name == output)
        return part

    def key(self, tolerance: float, sizes: Iterable[Sequence[int]]) -> bytes:
        """Return what a verdict depends on: equal for the same subgraph elsewhere, in other models, with other names.

        Args:
            tolerance: that of the test.
            sizes: those of the symbols, in order, in each sample.
        """
        digest = hashlib.sha256(self.model.SerializeToString(deterministic=True))
        digest.update(repr((tolerance, len(self.dims))).encode())
        for value in self.leaves:
            kind = [value in holders for holders in _kinds(self.rewrite)]
            digest.update(repr((value.dtype, self.same_as(value), *kind)).encode())
        inputs = [v for node in self.rewrite.fused for v in node.inputs if v is not None and self.site.forms.get(v)]
        tensors = [self.extents(value) for value in (*self.leaves, *inputs)] + [*self.shapes.values()]
        # In the first, symbols are told by sizes that no tensor has.
        for numbers in (range(10**9, 10**9 + len(self.dims)), *sizes):
            env = dict(zip(self.dims, numbers, strict=True))
            digest.update(repr([[self._size_or_none(s, env) for s in tensor] for tensor in tensors]).encode())
        for array in self.constants.values():
            digest.update(repr((array.dtype, array.shape)).encode() + array.tobytes())
        return digest.digest()

    def _size_or_none(self, size: Poly, env: Mapping[str, int]) -> int | None:
        try:
            return self.size(size, env)
        except Unproved:
            return None


def _free(site: Site, rewrite: Rewrite) -> frozenset[ir.Value]:
    """The values that a match takes as given, as far as they may be any numbers.

    Where the root also reads what one of them is computed from, that is given in its place.
    """
    if rewrite.independent:
        return frozenset(rewrite.frontier)
    filled = {*rewrite.ends, *rewrite.counts, *rewrite.positive}
    found = set(rewrite.frontier)
    # A graph may compute one of them twice. What is equal is filled with the same numbers, if these may be any.
    found |= {equal for value in found - filled for equal in site.equal(value) if equal is not rewrite.root}
    for _ in range(_STEPS_BACK):
        reached, todo = {rewrite.root}, [rewrite.root]
        while todo and len(reached) <= NODE_LIMIT:
            node = todo.pop().producer()
            if node is None or node.graph is not site.graph:
                continue
            new = {v for v in node.inputs if v is not None and v not in reached and v not in found}
            reached |= new
            todo += new
        bound = {v: _varying_inputs(site, v) for v in found - filled}
        tied = [v for v, inputs in bound.items() if not reached.isdisjoint(inputs)]
        if not tied:
            break
        found.difference_update(tied)
        inputs = {v for value in tied for v in bound[value]}
        found.update(v for v in inputs if not _is_made_of(v, found))
    return frozenset(found)


def _is_made_of(value: ir.Value, others: Collection[ir.Value]) -> bool:
    """Whether some of the others are near ahead of a value."""
    todo, seen = [value], {value}
    for one in todo:
        node = one.producer()
        new = [] if node is None else [v for v in node.inputs if v is not None and v not in seen]
        if any(v in others for v in new):
            return True
        if len(todo) + len(new) <= _NEAR:
            seen.update(new)
            todo += new
    return False


def _varying_inputs(site: Site, value: ir.Value) -> list[ir.Value]:
    """What a value is computed from by an operator of ONNX, without numbers and sizes."""
    node = value.producer()
    if node is None or node.domain or node.graph is not site.graph or value not in site.position:
        return []
    inputs = [v for v in node.inputs if v is not None and not _is_given(site, v)]
    return inputs if all(is_float(v) and site.knows(v) for v in inputs) else []


def _is_given(site: Site, value: ir.Value) -> bool:
    """Whether a value is made of constants and sizes alone."""
    if site.forms.constant(value) is not None:
        return True
    form = site.forms.get(value)
    return form is not None and not site.algebra.tensors(form.poly)


def _kinds(rewrite: Rewrite) -> list[Container[ir.Value]]:
    """The sets of leaves that are filled in ways of their own."""
    return [rewrite.ends, rewrite.counts, rewrite.positive]


def _body(node: ir.Node, opset: int, number: int) -> onnx.FunctionProto:
    """The body of a fused node's operator, computing in float64, under a name of its own."""
    operator = custom_ops.OPS[node.op_type]
    try:
        call = functions.described(operator, node)
        variant = operator.variant(call, max(opset, operator.oldest_opset))
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
