"""New nodes beside the graph: constants, shapes, and tensors laid out as an operator wants them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from gradfuse import custom_ops
from gradfuse.passes.algebra import ONE, UNIT, Poly, number
from gradfuse.passes.matching.graphs import TOLERANCE
from gradfuse.passes.matching.rewrite import Mismatch, Rewrite
from gradfuse.passes.matching.site import Site

_ALLOWZERO_OPSET = 14

Layout = Sequence[Sequence[int]]
"""Dimensions as lists of index variables, outermost first."""


class Builder:
    """Makes the nodes of one rewrite. They stay beside the graph until the rewrite is accepted."""

    def __init__(self, site: Site, root: ir.Value) -> None:
        self.site = site
        self.root = root
        self.nodes: list[ir.Node] = []
        self._initializers: list[ir.Value] = []

    def op(
        self,
        op_type: str,
        inputs: Sequence[ir.Value],
        dtype: ir.DataType | None,
        sizes: Sequence[Poly] | None = None,
        *,
        domain: str = "",
        **attributes: int | float | str | Sequence[int],
    ) -> ir.Value:
        """The output of a new node; `sizes` are its dimensions."""
        name = self.site.names.fresh(op_type)
        node = ir.Node(domain, op_type, inputs, ir.convenience.convert_attributes(attributes), name=name)
        out = node.outputs[0]
        out.name = name
        if dtype is not None:
            out.type = ir.TensorType(dtype)
        if sizes is not None:
            out.shape = ir.Shape([self._dim(s) for s in sizes])
            self.site.set_extents(out, sizes)
        self.nodes.append(node)
        return out

    def _dim(self, size: Poly) -> int | ir.SymbolicDim:
        n = size.integer
        if n is not None:
            return n
        text = self.site.algebra.text(size)
        return ir.SymbolicDim(text if text.isidentifier() else None)

    def constant(self, array: np.ndarray, dtype: ir.DataType) -> ir.Value:
        """A constant of this type; Mismatch if the type cannot hold it."""
        if dtype in TOLERANCE:
            rounded = array.astype(dtype.numpy()).astype(np.float64)
            if not np.allclose(rounded, array, rtol=TOLERANCE[dtype], atol=0.0, equal_nan=True):
                raise Mismatch(f"a constant {float(array.flat[0]):.6g} is no number of type {dtype.name}")
        tensor = ir.tensor(array.astype(dtype.numpy()), dtype=dtype, name=self.site.names.fresh("constant"))
        value = ir.Value(name=tensor.name, shape=ir.Shape(array.shape), type=ir.TensorType(dtype), const_value=tensor)
        self.site.set_extents(value, [number(n) for n in array.shape])
        self._initializers.append(value)
        return value

    def ints(self, values: Sequence[int]) -> ir.Value:
        """An int64 vector."""
        return self.constant(np.asarray(values, np.int64), ir.DataType.INT64)

    def cast(self, value: ir.Value, dtype: ir.DataType) -> ir.Value:
        """The value in this type."""
        if value.dtype == dtype:
            return value
        return self.op("Cast", [value], dtype, self.site.extents(value), to=int(dtype))

    def reshape(self, value: ir.Value, sizes: Sequence[Poly]) -> ir.Value:
        """The value in row-major order as dimensions of these sizes."""
        if list(sizes) == self.site.extents(value):
            return value
        symbolic = [k for k, s in enumerate(sizes) if s.integer is None]
        unknown = [k for k in symbolic if self._factors(sizes[k]) is None]
        if len(symbolic) < 2 or unknown or self.site.opset < _ALLOWZERO_OPSET:
            inferred = next(iter((*unknown, *symbolic)), None)
            return self.op("Reshape", [value, self.shape(sizes, inferred)], value.dtype, sizes)
        # With allowzero, a size that is 0 at run time means 0, and not "as in the input".
        return self.op("Reshape", [value, self.shape(sizes)], value.dtype, sizes, allowzero=1)

    def shape(self, sizes: Sequence[Poly], inferred: int | None = None) -> ir.Value:
        """The sizes as an int64 vector, with -1 for the inferred one."""
        known = [-1 if k == inferred else s.integer for k, s in enumerate(sizes)]
        constants = [n for n in known if n is not None]
        if len(constants) == len(known):
            return self.ints(constants)
        parts = [self._extent(s) if n is None else self.ints([n]) for n, s in zip(known, sizes, strict=True)]
        return self.op("Concat", parts, ir.DataType.INT64, [number(len(sizes))], axis=0)

    def _factors(self, size: Poly) -> list[tuple[ir.Value, int]] | None:
        """Dimensions of values whose product is a size."""
        found = self.site.donor(size, self.root)
        if found is not None:
            return [found]
        ((m, c),) = size.terms.items() if len(size) == 1 else ((ONE, 0.0),)
        parts = [self.site.donor(self.site.algebra.of(self.site.algebra.atoms[a]), self.root) for a, e in m if e == 1]
        known = [part for part in parts if part is not None]
        return known if known and c == 1.0 and len(known) == len(m) else None

    def _extent(self, size: Poly) -> ir.Value:
        """A symbolic size as an int64 vector of one element."""
        found = self._factors(size)
        if found is None:
            raise Mismatch(f"a dimension {self.site.algebra.text(size)} is in no shape")
        integers = ir.DataType.INT64
        parts = [self.op("Shape", [value], integers, [UNIT], start=axis, end=axis + 1) for value, axis in found]
        product = parts[0]
        for part in parts[1:]:
            product = self.op("Mul", [product, part], integers, [UNIT])
        return product

    def arange(self, start: int, size: Poly) -> ir.Value:
        """start, start + 1, ... as an int64 vector of this size."""
        if size.integer is not None:
            return self.ints(range(start, start + size.integer))
        first, one = (self.constant(np.asarray(n), ir.DataType.INT64) for n in (start, 1))
        count = self.op("Squeeze", [self._extent(size)], ir.DataType.INT64, [])
        end = self.op("Add", [count, first], ir.DataType.INT64, [])
        return self.op("Range", [first, end, one], ir.DataType.INT64, [size])

    def below(self, end: Poly, size: Poly) -> ir.Value:
        """A boolean vector that says which of 0, ..., size - 1 are below the end."""
        integers = ir.DataType.INT64
        first, step = (self.constant(np.asarray(n), integers) for n in (0, 1))
        indices = self.op("Range", [first, self.reshape(self.shape([size]), []), step], integers, [size])
        return self.op("Less", [indices, self.shape([end])], ir.DataType.BOOL, [size])

    def arrange(self, value: ir.Value, variables: Sequence[int], layout: Layout, sizes: Mapping[int, Poly]) -> ir.Value:
        """The value with its dimensions in another order and other groups, repeated along those it lacks.

        Args:
            value: its row-major elements run over `variables`.
            variables: index variables, outermost first.
            layout: the variables of each dimension of the result.
            sizes: the size of each variable.
        """
        value = self._repeated(value, [sizes[v] for v in variables])
        target = [v for group in layout for v in group]
        own = [v for v in target if v in variables]
        if own != list(variables):
            value = self.reshape(value, [sizes[v] for v in variables])
            order = [list(variables).index(v) for v in own]
            value = self.op("Transpose", [value], value.dtype, [sizes[v] for v in own], perm=order)
        if len(target) > len(own):
            value = self.reshape(value, [sizes[v] if v in own else UNIT for v in target])
            full = [sizes[v] for v in target]
            value = self.op("Expand", [value, self.shape(full)], value.dtype, full)
        return self.reshape(value, [self.site.algebra.product(sizes[v] for v in group) for group in layout])

    def _repeated(self, value: ir.Value, sizes: Sequence[Poly]) -> ir.Value:
        """A value of the graph, repeated where its variables may have size 1 beside others of these sizes."""
        form = self.site.forms.get(value) if value in self.site.position else None
        if form is None or len(form.sizes) != len(sizes) or list(form.sizes) == list(sizes):
            return value
        others = []
        for own, size in zip(form.sizes, sizes, strict=True):
            parts = self.site.algebra.parts(own)
            rest = [part for part in self.site.algebra.parts(size) if own != size and part not in parts]
            if len(rest) > 1:
                raise Mismatch("which of several dimensions are 1 is not known")
            others += rest or [UNIT]
        value = self.reshape(value, form.sizes)
        return self.op("Expand", [value, self.shape(others)], value.dtype, sizes)

    def fused(
        self,
        operator: str,
        inputs: Sequence[ir.Value],
        sizes: Sequence[Poly],
        **attributes: int | float | str | Sequence[int],
    ) -> ir.Value:
        """The output of a new node of a fused operator, in the root's type."""
        return self.op(operator, inputs, self.root.dtype, sizes, domain=custom_ops.DOMAIN, **attributes)

    def fused_whole(
        self,
        operator: str,
        inputs: Sequence[ir.Value | None],
        outputs: Sequence[Sequence[Poly] | None],
        **attributes: int | float | str | Sequence[int],
    ) -> tuple[ir.Value, ...]:
        """All outputs of a new node of a fused operator, of these dimensions if known, in the root's type."""
        name = self.site.names.fresh(operator)
        given = ir.convenience.convert_attributes(attributes)
        node = ir.Node(custom_ops.DOMAIN, operator, inputs, given, num_outputs=len(outputs), name=name)
        for k, (out, sizes) in enumerate(zip(node.outputs, outputs, strict=True)):
            out.name = name if k == 0 else self.site.names.fresh(operator)
            out.type = None if self.root.dtype is None else ir.TensorType(self.root.dtype)
            if sizes is not None:
                out.shape = ir.Shape([self._dim(s) for s in sizes])
                self.site.set_extents(out, sizes)
        self.nodes.append(node)
        return tuple(node.outputs)

    def rewrite(self, rule: str, fused: Sequence[ir.Value], output: ir.Value) -> Rewrite:
        """The rewrite of the root by the nodes made so far: which of them are fused, and what replaces the root."""
        nodes = [node for value in fused if (node := value.producer()) is not None]
        return Rewrite(nodes[0].op_type, rule, self.root, self.nodes, nodes, output)

    def discard(self, kept: int = 0) -> None:
        """Drops the nodes made so far, but for the first ones."""
        for node in self.nodes[kept:]:
            for k in range(len(node.inputs)):
                node.replace_input_with(k, None)
        del self.nodes[kept:]

    def commit(self, anchor: ir.Node) -> None:
        """Makes the constants in use part of the graph, which the nodes are about to be, before the anchor."""
        for value in self._initializers:
            if any(u.node in self.nodes for u in value.uses()):
                self._add_constant(value, anchor)

    def _add_constant(self, value: ir.Value, anchor: ir.Node) -> None:
        if not self.site.is_function:
            self.site.graph.register_initializer(value)
            return
        # Functions have no initializers.
        node = ir.node("Constant", [], {"value": value.const_value}, outputs=[value])
        self.site.graph.insert_before(anchor, node)
