"""Values as sums of products of others, read no further than a rule asks: the arithmetic of updates.

The forms of :mod:`gradfuse.passes.reading` read a value down to the inputs of the graph. An update stands at the end of
a whole network, and is made of few values of it. Here a value is a sum of terms, each a number times powers of *keys*:
values that are taken as they are, and corrections ``1 - base ** count`` of the bias of moving averages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from gradfuse.passes.algebra import UNIT
from gradfuse.passes.matching.site import Site
from gradfuse.passes.reading import is_float

_WIDE = (ir.DataType.FLOAT, ir.DataType.DOUBLE)
_COUNTS = (*_WIDE, ir.DataType.INT32, ir.DataType.INT64)
"""The types that hold every number of steps; narrower ones wrap around, or stay where 1 more rounds to the same."""
_VIEWS_OF_NUMBERS = {"Squeeze", "Unsqueeze", "Reshape", "Flatten", "Expand"}
_SUMS = {"Add", "Sub", "Neg", "Sum", "Identity"}
_NEUTRAL = {"Add": 0.0, "Sub": 0.0, "Mul": 1.0, "Div": 1.0, "Pow": 1.0}
_COMPARISONS = ("Less", "LessOrEqual", "Greater", "GreaterOrEqual")
_LARGEST = 2**31 - 1  # number of steps that is told from others
_DECIMALS = 7  # of the base of a power whose logarithm was rounded
_LOST = 2.0**-23  # by rounding a logarithm
_NODES = 96  # that are read for one value
_PRODUCTS = 16  # of terms


class TooLong(Exception):
    """A value is made of more than an update is."""


@dataclass(frozen=True)
class Count:
    """A single number of the graph plus a whole number."""

    value: ir.Value
    more: int


@dataclass(frozen=True)
class Power:
    """A constant to the power of a count."""

    base: float
    count: Count


@dataclass(frozen=True)
class Correction:
    """1 less a power."""

    power: Power


Key = ir.Value | Power | Correction
Factors = frozenset[tuple[Key, float]]
"""Keys with their exponents."""
Terms = Mapping[Factors, float]
"""Products of keys, each with the number that it is multiplied by."""

_ONE: Factors = frozenset()


def plain(site: Site, value: ir.Value) -> ir.Value:
    """The value behind nodes that keep all of its digits: wider types, other shapes of a single number, 0 more."""
    value = site.first(value)
    while (node := value.producer()) is not None and node.domain == "" and node.graph is site.graph:
        source = node.inputs[0] if node.inputs else None
        if source is None or not is_float(source):
            break
        if (picked := _picked(site, node, value)) is not None:
            value = picked
            continue
        keeps = node.op_type == "Identity" or (node.op_type in ("Cast", "CastLike") and value.dtype in _WIDE)
        views = node.op_type in _VIEWS_OF_NUMBERS and is_single(site, source) and is_single(site, value)
        if not keeps and not views:
            same = _unchanged(site, node)
            if same is None:
                break
            source = same
        value = site.first(source)
    return value


def _picked(site: Site, node: ir.Node, value: ir.Value) -> ir.Value | None:
    """The single number that a node takes out of others in a row; None for other nodes."""
    if node.op_type not in ("Gather", "Slice", "Split") or not is_single(site, value):
        return None
    row = plain(site, node.inputs[0]) if node.inputs[0] is not None else None
    joined = None if row is None else row.producer()
    if joined is None or joined.domain or joined.op_type != "Concat" or joined.graph is not site.graph:
        return None
    parts = [part for part in joined.inputs if part is not None and is_single(site, part)]
    place: float | None = None
    if node.op_type == "Split":
        # Of parts that are single numbers too.
        sizes = [is_single(site, output) for output in node.outputs]
        place = float(node.outputs.index(value)) if len(sizes) == len(parts) and all(sizes) else None
    elif node.inputs[1] is not None:
        place = constant(site, node.inputs[1])
    if len(parts) < len(joined.inputs) or place is None or not place.is_integer():
        return None
    return parts[int(place)] if -len(parts) <= place < len(parts) else None


def _unchanged(site: Site, node: ir.Node) -> ir.Value | None:
    """What a node adds 0 to, or multiplies by 1 or raises to it; None for others."""
    neutral = _NEUTRAL.get(node.op_type)
    if neutral is None or len(node.inputs) != 2 or None in node.inputs:
        return None
    orders = [node.inputs, node.inputs[::-1]] if node.op_type in ("Add", "Mul") else [node.inputs]
    for value, other in orders:
        assert value is not None and other is not None
        out = node.outputs[0]
        same = value.dtype == out.dtype and site.knows(value) and site.knows(out)
        if same and site.extents(value) == site.extents(out) and constant(site, other) == neutral:
            return value
    return None


def is_single(site: Site, value: ir.Value) -> bool:
    """Whether a value has one element."""
    return site.knows(value) and all(size == UNIT for size in site.extents(value))


def constant(site: Site, value: ir.Value) -> float | None:
    """The number that all elements of a constant are; None for other values."""
    array = site.forms.constant(value)
    if array is None or array.dtype.kind == "b" or array.size == 0 or not np.all(array == array.flat[0]):
        return None
    number = float(array.flat[0])
    return number if np.isfinite(number) else None


def chosen(site: Site, node: ir.Node) -> ir.Value | None:
    """What a Where takes whose condition is always the same, and everywhere; None for other nodes."""
    if node.op_type != "Where" or node.domain or node.inputs[0] is None:
        return None
    form = site.forms.get(node.inputs[0])
    condition = None if form is None else form.poly.constant
    return None if condition is None else node.inputs[1 if condition else 2]


def count_of(site: Site, value: ir.Value) -> Count | None:
    """A single number that constants were added to, in types that hold every count; None if there is none."""
    more = 0
    while value.dtype in _COUNTS:
        value = site.first(value)
        node = value.producer()
        if node is None or node.domain or node.graph is not site.graph:
            break
        views = node.op_type in _VIEWS_OF_NUMBERS and is_single(site, value)
        if (views or node.op_type in ("Cast", "Identity")) and node.inputs[0] is not None:
            value = node.inputs[0]
            continue
        if (counted := _below_largest(site, node)) is not None:
            value = counted
            continue
        if node.op_type != "Add":
            break
        operands = [v for v in node.inputs if v is not None]
        steps = [(other, constant(site, own)) for own, other in zip(operands, reversed(operands), strict=True)]
        known = [(other, step) for other, step in steps if step is not None]
        if len(known) != 1 or not known[0][1].is_integer():
            break
        value, more = known[0][0], more + int(known[0][1])
    return Count(value, more) if value.dtype in _COUNTS and is_single(site, value) else None


def _below_largest(site: Site, node: ir.Node) -> ir.Value | None:
    """The count that a node keeps from being larger than its type holds; None for other nodes.

    Powers of what moving averages keep are 0 by then.
    """
    if node.op_type != "Where" or len(node.inputs) != 3 or None in node.inputs:
        return None
    condition, *branches = node.inputs
    test, taken = condition.producer() if condition is not None else None, True
    while test is not None and not test.domain and test.op_type in ("Not", "Identity") and test.inputs[0] is not None:
        taken ^= test.op_type == "Not"
        test = test.inputs[0].producer()
    if test is None or test.domain or test.op_type not in _COMPARISONS or None in test.inputs:
        return None
    for before, limit in (test.inputs, test.inputs[::-1]):
        assert before is not None and limit is not None
        is_small = (test.op_type in ("Less", "LessOrEqual")) == (before is test.inputs[0])
        counted, most = branches if is_small == taken else branches[::-1]
        assert counted is not None and most is not None
        above = counted.producer()
        is_next = above is not None and not above.domain and above.op_type == "Add" and before in above.inputs
        numbers = [constant(site, limit), constant(site, most)]
        if is_next and all(n is not None and n >= _LARGEST for n in numbers):
            return counted
    return None


def terms_of(site: Site, value: ir.Value, stops: Collection[ir.Value]) -> Terms:
    """A value as a sum of products.

    Args:
        site: its graph.
        value: the value.
        stops: values that are taken as they are.

    Raises:
        TooLong: it is made of too many nodes.
    """
    return _Reading(site, stops).terms(value)


class _Reading:
    def __init__(self, site: Site, stops: Collection[ir.Value]) -> None:
        self._site = site
        self._stops = stops
        self._known: dict[ir.Value, Terms] = {}

    def terms(self, value: ir.Value) -> Terms:
        value = plain(self._site, value)
        if value not in self._known:
            self._known[value] = {}
            if len(self._known) > _NODES:
                raise TooLong
            self._known[value] = self._read(value)
        return self._known[value]

    def _read(self, value: ir.Value) -> Terms:
        own: Terms = {_of(value): 1.0}
        node = value.producer()
        if value in self._stops:
            return own
        number = constant(self._site, value)
        if number is not None:
            return {_ONE: number} if number else {}
        if node is None or node.domain or node.graph is not self._site.graph or value.dtype not in _WIDE:
            # Narrower types round by an amount at which another order of the arithmetic gives other numbers.
            return own
        inputs = [v for v in node.inputs if v is not None]
        match node.op_type, len(inputs):
            case "Add" | "Sum", _:
                return _corrected(_added((self.terms(v), 1.0) for v in inputs))
            case "Sub", 2:
                return _corrected(_added([(self.terms(inputs[0]), 1.0), (self.terms(inputs[1]), -1.0)]))
            case "Neg", 1:
                return _added([(self.terms(inputs[0]), -1.0)])
            case "Mul", 2:
                return multiplied(self.terms(inputs[0]), self.terms(inputs[1])) or own
            case "Div", 2:
                return multiplied(self.terms(inputs[0]), self._to_the(inputs[1], -1.0)) or own
            case "Reciprocal", 1:
                return self._to_the(inputs[0], -1.0)
            case "Sqrt", 1:
                return self._to_the(inputs[0], 0.5)
            case "Pow", 2:
                return self._power(*inputs) or own
            case "Exp", 1:
                return self._exponential(inputs[0]) or own
            case "Where", 3 if (taken := chosen(self._site, node)) is not None:
                return self.terms(taken)
        return own

    def _power(self, base: ir.Value, exponent: ir.Value) -> Terms | None:
        number, power = constant(self._site, base), constant(self._site, exponent)
        if power == 2.0:
            return multiplied(self.terms(base), self.terms(base))
        if power in (-1.0, 0.5, -0.5):
            return self._to_the(base, power)
        count = count_of(self._site, exponent) if number is not None else None
        return None if number is None or count is None else {_of(Power(number, count)): 1.0}

    def _exponential(self, exponent: ir.Value) -> Terms | None:
        """A constant to the power of a count, written as e to the power of its logarithm times the count."""
        node = plain(self._site, exponent).producer()
        if node is None or node.domain or node.op_type != "Mul" or None in node.inputs:
            return None
        operands = [value for value in node.inputs if value is not None]
        for logarithm, value in (operands, operands[::-1]):
            number, count = constant(self._site, logarithm), count_of(self._site, value)
            if number is not None and number < 0 and count is not None:
                base = math.exp(number)
                short = round(base, _DECIMALS)
                if 0 < short < 1 and abs(math.log(short) - number) <= _LOST * abs(number):
                    base = short
                return {_of(Power(base, count)): 1.0}
        return None

    def _to_the(self, value: ir.Value, exponent: float) -> Terms:
        """A power of a value; that of the value itself where its parts have none."""
        terms = self.terms(value)
        if len(terms) == 1:
            ((factors, number),) = terms.items()
            if exponent == -1.0 or _has_root(factors, number):
                return {frozenset((key, e * exponent) for key, e in factors): number**exponent}
        return {_of(plain(self._site, value), exponent): 1.0}


def _of(key: Key, exponent: float = 1.0) -> Factors:
    return frozenset([(key, exponent)])


def _has_root(factors: Factors, number: float) -> bool:
    """Whether the root of a product is the product of the roots: at most one of them may be negative."""
    others = [e for key, e in factors if not isinstance(key, Correction)]
    return number > 0 and len(others) <= 1 and all(e == 1.0 for e in others)


def _added(parts: Iterable[tuple[Terms, float]]) -> Terms:
    total: dict[Factors, float] = {}
    for terms, factor in parts:
        for factors, number in terms.items():
            before = total.get(factors, 0.0)
            total[factors] = after = before + factor * number
            # What is left of equal numbers is rounding.
            if abs(after) <= 1e-9 * abs(before):
                del total[factors]
    return total


def multiplied(first: Terms, second: Terms) -> Terms | None:
    """The product of two sums; None where it has too many terms."""
    if len(first) * len(second) > _PRODUCTS:
        return None
    return _added([({product(a, b): x * y}, 1.0) for a, x in first.items() for b, y in second.items()])


def product(*parts: Factors) -> Factors:
    """The product of products of keys."""
    powers: dict[Key, float] = {}
    for part in parts:
        for key, exponent in part:
            powers[key] = powers.get(key, 0.0) + exponent
    return frozenset((key, exponent) for key, exponent in powers.items() if exponent)


def _corrected(terms: Terms) -> Terms:
    """1 - base ** count, or its opposite, as one key."""
    number = terms.get(_ONE)
    if number not in (1.0, -1.0) or len(terms) != 2:
        return terms
    ((factors, other),) = ((f, n) for f, n in terms.items() if f != _ONE)
    ((key, exponent), *rest) = factors
    if not isinstance(key, Power) or rest or exponent != 1.0 or other != -number:
        return terms
    return {_of(Correction(key)): number}


def parts_of_sum(site: Site, value: ir.Value, is_part: Callable[[ir.Value], bool], most: int) -> list[ir.Value]:
    """What a value is the sum or difference of, or a multiple of, the value itself first; about `most` of them."""
    found = [site.first(value)]
    for own in found:
        node = own.producer()
        if node is None or node.domain or len(found) >= most:
            continue
        inputs = [v for v in node.inputs if v is not None]
        if node.op_type in ("Mul", "Div"):
            varying = [v for v in inputs if constant(site, v) is None]
            inputs = varying if len(varying) == 1 and (node.op_type == "Mul" or varying[0] is inputs[0]) else []
        elif node.op_type not in _SUMS:
            continue
        new = dict.fromkeys(site.first(v) for v in inputs)
        found += [v for v in new if v not in found and is_part(v)]
    return found
