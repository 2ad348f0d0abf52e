"""What the updates of all optimizers have: a parameter, a rate, and a gradient that may be scaled and regularized."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from gradfuse.passes.matching.builder import Builder
from gradfuse.passes.matching.rewrite import Mismatch
from gradfuse.passes.matching.site import Site
from gradfuse.passes.matching.terms import Correction, Factors, constant, is_single, plain, terms_of

VIEWS = {"Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Expand"}
_OF_PRODUCTS: tuple[str, ...] = ("Mul", "Neg")
_OF_SUMS = (*_OF_PRODUCTS, "Add", "Sub", "Sum", "Div")
ARITHMETIC = {"Add", "Sub", "Mul", "Div", "Neg", "Sum", "Reciprocal", "Sqrt", "Pow", "Where", "Cast", "Identity"}


def uncast(root: ir.Value) -> ir.Value:
    """What a result is before it is cast to the type of the parameter."""
    node = root.producer()
    if node is not None and node.op_type in ("Cast", "CastLike") and not node.domain and node.inputs[0] is not None:
        return node.inputs[0]
    return root


def behind(site: Site, root: ir.Value, limit: int) -> Iterator[ir.Value]:
    """The values of the root's shape that it is computed from by arithmetic, the nearest first."""
    todo, seen = [root], {root}
    for value in todo:
        yield value
        node = value.producer()
        if node is None or node.domain or node.graph is not site.graph or node.op_type not in ARITHMETIC:
            continue
        for other in (site.first(value) for value in node.inputs if value is not None):
            if other in seen or len(todo) >= limit or not site.knows(other):
                continue
            if site.extents(other) == site.extents(root) and constant(site, other) is None:
                seen.add(other)
                todo.append(other)


def without_numbers(site: Site, value: ir.Value, through: Collection[str] = ("Mul", "Div")) -> ir.Value:
    """A value without the single numbers that it is multiplied or divided by."""
    while True:
        value = plain(site, value)
        node = value.producer()
        if node is None or node.domain or node.op_type not in through or is_single(site, value):
            return value
        factors = [v for v in node.inputs if v is not None and not is_single(site, v) and constant(site, v) is None]
        if len(factors) != 1 or (node.op_type == "Div" and factors[0] is not node.inputs[0]):
            return value
        value = factors[0]


def computed_rates(site: Site, root: ir.Value, limit: int, is_decayed: Callable[[ir.Value], bool]) -> list[ir.Value]:
    """Single numbers that terms of a sum are multiplied by, where the graph computes them as sums or powers.

    So are learning rates of a schedule in the graph, which `terms_of` would take apart. Bias corrections are not.

    Args:
        site: the graph.
        root: the sum.
        limit: how many nodes are looked at.
        is_decayed: tells what may be multiplied by 1 less a multiple of the rate, which is none.
    """
    if is_single(site, root):
        return []
    found: list[ir.Value] = []
    todo = [uncast(root)]
    for below in todo:
        value = plain(site, below)
        node = value.producer()
        if node is None or node.domain or node.graph is not site.graph or constant(site, value) is not None:
            continue
        inputs = [v for v in node.inputs if v is not None]
        passing, single = _OF_SUMS, is_single(site, value)
        corrected = single and any(isinstance(key, Correction) for f in terms_of(site, value, []) for key, _ in f)
        if single:
            passing = (*_OF_PRODUCTS, "Div") if corrected else _OF_PRODUCTS
        elif node.op_type == "Mul" and any(is_decayed(plain(site, v)) for v in inputs):
            continue
        if node.op_type in passing and len(todo) < limit:
            todo += [v for v in (inputs[:1] if single and node.op_type == "Div" else inputs) if v not in todo]
        elif single and not corrected:
            found.append(value)
    return found


@dataclass(frozen=True)
class Rate:
    """The learning rate: a number times values that are single numbers."""

    factors: Factors
    number: float

    @property
    def values(self) -> list[tuple[ir.Value, int]]:
        """The values, each with its exponent, 1."""
        return [(key, 1) for key, _ in self.factors if isinstance(key, ir.Value)]


def results_of(site: Site, average: ir.Value, dtype: ir.DataType | None) -> list[ir.Value]:
    """What stands for a new moving average in the type of the parameter: a result of the graph, if one does."""
    if average.dtype == dtype:
        found = site.equal(average)
    else:
        readers = [use.node for value in site.equal(average) for use in value.uses() if use.node.graph is site.graph]
        casts = [node for node in readers if node.op_type in ("Cast", "CastLike") and not node.domain]
        found = [node.outputs[0] for node in casts if node.outputs[0].dtype == dtype]
    return [value for value in found if value.is_graph_output()][:1] or found[:1]


def require_types(site: Site, root: ir.Value, tensors: Mapping[str, ir.Value], computed: Sequence[ir.Value]) -> None:
    """Raises Mismatch unless the tensors are of the root's type and shape, and what is between them of float32."""
    for value in computed:
        if value.dtype == ir.DataType.DOUBLE:
            raise Mismatch("its type is float64; only float32, float16 and bfloat16 are fused")
        if value.dtype != ir.DataType.FLOAT:
            raise Mismatch(f"it is computed in {type_name(value)}; the operator computes in float32")
    for name, value in tensors.items():
        if not site.knows(value) or site.extents(value) != site.extents(root):
            raise Mismatch(f"its {name} has another shape")
        if value.dtype != root.dtype:
            raise Mismatch(f"its {name} is {type_name(value)}, and the result {type_name(root)}")


def type_name(value: ir.Value) -> str:
    return "of no known type" if value.dtype is None else value.dtype.name.lower()


def regularized(site: Site, gradient: ir.Value, parameter: ir.Value) -> tuple[ir.Value, float]:
    """The gradient without the multiple of the parameter that was added to it, and what that was multiplied by."""
    node = gradient.producer()
    if node is None or node.domain or node.op_type != "Add" or len(node.inputs) != 2:
        return gradient, 0.0
    for other, own in (node.inputs, node.inputs[::-1]):
        if own is None or other is None:
            continue
        terms = terms_of(site, own, [parameter])
        decay = terms.get(frozenset([(parameter, 1.0)]), 0.0)
        if len(terms) == 1 and decay > 0:
            return plain(site, other), decay
    return gradient, 0.0


@dataclass(frozen=True)
class Scale:
    """What a gradient is multiplied by first: a number, and powers of single numbers of the graph."""

    values: tuple[tuple[ir.Value, int], ...]
    number: float


def unscaled(site: Site, gradient: ir.Value, *, constants: bool = False) -> tuple[ir.Value, Scale]:
    """A gradient before it was multiplied or divided by single numbers, or negated.

    Constants stay in it, unless they are asked for: they belong to what computes the gradient.
    """
    values: list[tuple[ir.Value, int]] = []
    number, scaled = 1.0, gradient
    while (node := scaled.producer()) is not None and not node.domain and node.graph is site.graph:
        if node.op_type == "Neg" and node.inputs[0] is not None:
            number, scaled = -number, plain(site, node.inputs[0])
            continue
        if node.op_type not in ("Mul", "Div") or len(node.inputs) != 2:
            break
        singles = [v for v in node.inputs if v is not None and is_single(site, v)]
        factors = [v for v in singles if constants or constant(site, v) is None]
        others = [v for v in node.inputs if v is not None and v not in factors]
        if len(factors) != 1 or len(others) != 1 or constant(site, others[0]) is not None:
            break
        if node.op_type == "Div" and factors[0] is node.inputs[0]:
            break
        exponent = -1 if node.op_type == "Div" else 1
        known = constant(site, factors[0])
        if known is None:
            values.append((plain(site, factors[0]), exponent))
        elif known:
            number *= known**exponent
        else:
            break
        scaled = plain(site, others[0])
    return scaled, Scale(tuple(values), number)


def single_number(builder: Builder, values: Sequence[tuple[ir.Value, int]], number: float) -> ir.Value:
    """The product of single numbers, each to the power of 1 or -1, in float32 and without dimensions."""
    float32 = ir.DataType.FLOAT
    result: ir.Value | None = None
    if number != 1 or not values or values[0][1] < 0:
        result = builder.constant(np.asarray(number), float32)
    for value, exponent in values:
        own = builder.reshape(builder.cast(value, float32), [])
        if result is None:
            result = own
        else:
            result = builder.op("Mul" if exponent > 0 else "Div", [result, own], float32, [])
    assert result is not None
    return result
