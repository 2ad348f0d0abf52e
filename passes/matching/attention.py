"""Attention that a graph writes out, softmax(scale Q K^T, masked) V, however it is spelled: its parts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from gradfuse.models.tensors import array_of
from gradfuse.passes.algebra import UNIT, ZERO, Poly, TooComplex
from gradfuse.passes.matching.rewrite import Mismatch
from gradfuse.passes.matching.written_softmax import Same, WrittenSoftmax, softmax_of
from gradfuse.passes.reading import Form, Forms, Opaque
from gradfuse.passes.reading.draws import Draw, draw_of
from gradfuse.passes.reading.nodes import FLOATS, Unreadable, attribute, constant_of, through_casts

Dims = tuple[int | str | None, ...]

FEWEST_SCORES = 128 * 128
"""The scores of a head from which on the operator is faster than products and a softmax, and saves memory."""

NOTHING_BESIDE = -1e8
"""A score this low has no share beside a score of any usual size: its exponential is 0."""
NOTHING_BESIDE_ANY = -1e30
"""No score of finite queries and keys is lower, short of overflow."""
_REGROUPING = ("Reshape", "Squeeze", "Unsqueeze", "Flatten")
_LEAST = float(np.finfo(np.float32).min)
_ROUNDING = 1e-6


@dataclass(frozen=True)
class Term:
    """What is done to the scores of a shape: something is added, or some of them are replaced.

    Attributes:
        value: what is added, or the condition.
        dims: the dimensions of the scores there.
        factor: what the scores are multiplied by afterwards.
        fill: what takes the place of scores; None: `value` is added.
        shows: whether scores stay where the condition holds, or where it does not.
    """

    value: ir.Value
    dims: Dims
    factor: float
    fill: float | None = None
    shows: bool = True


@dataclass
class Written:
    """Attention as a graph writes it.

    Attributes:
        last: the product of probabilities and values.
        softmax: the nodes of the softmax, the last first.
        products: the product of queries and keys.
        query, turned_key, value: queries (*, L, E), keys (*, E, S) and values (*, S, Ev), as the products take them.
        scale: what scores are multiplied by.
        terms: what is done to them, the last first.
        shapes: the dimensions of probabilities and scores wherever they have others.
        draw: which draw decides what dropout keeps; None: there is none.
        safe: whether a row that sees nothing gives zeros, and not NaN.
    """

    last: ir.Node
    softmax: Sequence[ir.Node]
    products: ir.Node
    query: ir.Value
    turned_key: ir.Value
    value: ir.Value
    scale: float
    terms: list[Term]
    shapes: list[Dims]
    draw: Draw | None
    safe: bool


@dataclass(frozen=True)
class Masks:
    """What each row sees.

    Attributes:
        causal: 0, or 1 and 2 as the operator's attribute.
        shown: booleans, all of which must hold where a row sees a key, with the dimensions of the scores; each with
            whether it holds where the value is true, or where it is false.
        added: what is added to the scores, with their dimensions and a factor of it.
        uniform: whether rows that see nothing see everything alike, as what takes the place of scores is finite.
        may_see_nothing: whether a row may see nothing at all.
    """

    causal: int = 0
    shown: Sequence[tuple[ir.Value, Dims, bool]] = ()
    added: Sequence[tuple[ir.Value, Dims, float]] = ()
    uniform: bool = False
    may_see_nothing: bool = False


def pays(rows: int, keys: int) -> bool:
    """Whether the operator is worth it for this many queries and keys."""
    return rows * keys >= FEWEST_SCORES


def dims_of(value: ir.Value) -> Dims | None:
    """Return the dimensions of a value: sizes, names, or None where nothing is known."""
    if value.shape is None:
        return None
    return tuple(dim if isinstance(dim, int) else dim.value for dim in value.shape)


def is_candidate(node: ir.Node) -> bool:
    """Whether a node may be the product of probabilities and values."""
    return node.op_type == "MatMul" and not node.domain


def written(forms: Forms, last: ir.Node, same: Same = lambda value: value) -> Written | None:
    """Return the attention of which a node is the last product; None where it is none.

    Args:
        forms: those of the graph.
        last: the node.
        same: gives the first value with the same elements in the same dimensions.

    Raises:
        Mismatch: it is attention but for something that the operator does not do.
    """
    probabilities, value = last.inputs
    if probabilities is None or value is None:
        return None
    shapes: list[Dims] = []
    zeroed: list[tuple[ir.Value, bool]] = []
    way = _to_softmax(forms, probabilities, shapes, zeroed, same)
    if way is None:
        return None
    softmax, gain, kept = way
    scores = softmax.scores
    terms: list[Term] = []
    found = _to_products(forms, scores, 1.0, shapes, terms, same)
    if found is None:
        return None
    products, scale = found
    query, turned_key = products.inputs
    assert query is not None and turned_key is not None
    draw = None
    if len(kept) > 1:
        raise Mismatch("its probabilities are dropped more than once")
    if kept:
        draw = draw_of(forms, kept[0])
        if draw is None:
            raise Mismatch("its probabilities are multiplied by a mask that is no dropout's")
    wanted = 1.0 if draw is None else 1.0 / (1.0 - draw.threshold / 2**31)
    if abs(gain - wanted) > _ROUNDING * wanted:
        raise Mismatch(f"its probabilities are multiplied by {gain:.6g}")
    types = {one.dtype for one in (query, turned_key, value, last.outputs[0])}
    if len(types) != 1 or not types <= FLOATS:
        raise Mismatch("its queries, keys and values are of several types")
    safe = softmax.safe
    if zeroed:
        terms, safe = _without_rows_that_see_nothing(forms, softmax, terms, *zeroed[0]), True
    return Written(last, softmax.nodes, products, query, turned_key, value, scale, terms, shapes, draw, safe)


def _to_softmax(
    forms: Forms, value: ir.Value, shapes: list[Dims], zeroed: list[tuple[ir.Value, bool]], same: Same
) -> tuple[WrittenSoftmax, float, list[ir.Value]] | None:
    """Return the softmax of which a value is a multiple, the factor, and booleans that it is multiplied by.

    `zeroed` gets a condition under which elements are kept, or made 0.
    """
    gain, kept = 1.0, list[ir.Value]()
    while True:
        value = same(value)
        _note(shapes, value)
        node = value.producer()
        if node is None:
            return None
        softmax = softmax_of(forms, node, same)
        if softmax is not None:
            return softmax, gain, kept
        source = _through_view(node)
        if source is not None:
            value = source
            continue
        if node.op_type == "Where" and not node.domain and not zeroed:
            condition, chosen, rest_ = node.inputs
            assert condition is not None and chosen is not None and rest_ is not None
            shows = _number(forms, rest_) == 0.0
            if not shows and _number(forms, chosen) != 0.0:
                return None
            zeroed.append((condition, shows))
            value = chosen if shows else rest_
            continue
        product = factors(forms, node)
        if product is None:
            return None
        number, rest = product
        gain *= number
        if len(rest) == 2:
            masks = [_boolean(one) for one in rest]
            if (masks[0] is None) == (masks[1] is None):
                return None
            kept += [one for one in masks if one is not None]
            rest = [one for one, mask in zip(rest, masks, strict=True) if mask is None]
        (value,) = rest


def _without_rows_that_see_nothing(
    forms: Forms, softmax: WrittenSoftmax, terms: list[Term], condition: ir.Value, keeps: bool
) -> list[Term]:
    """Return what is done to scores, where afterwards probabilities become 0 that are of rows that see nothing.

    Raises:
        Mismatch: those are other ones.
    """
    largest = None if keeps else _largest_where_infinite(forms, condition)
    if largest is not None and through_casts(largest) is through_casts(softmax.scores):
        return terms
    tested = None if keeps else _read(condition, "IsNaN")[0]
    if tested is not None and through_casts(tested).producer() is softmax.nodes[0]:
        return terms
    if len(terms) == 1:
        (term,) = terms
        if term.fill == -math.inf and keeps and term.shows and _sees_or_all(term.value, condition):
            return [Term(condition, term.dims, term.factor, term.fill)]
        if term.fill is None and term.factor > 0 and largest is not None:
            if through_casts(largest) is through_casts(term.value):
                return terms
    raise Mismatch("its probabilities are masked")


def _largest_where_infinite(forms: Forms, condition: ir.Value) -> ir.Value | None:
    """Return the value whose largest number in a row is -inf where a condition holds; None for other conditions."""
    first, second = _read(condition, "Equal")
    is_least = second is not None and _number(forms, second) == -math.inf
    return _read(first, "ReduceMax")[0] if is_least else None


def _sees_or_all(condition: ir.Value, shown: ir.Value) -> bool:
    """Whether a condition is that another one holds, or holds nowhere in the row."""
    for nowhere in _read(condition, "Or"):
        count, _ = _read(_read(nowhere, "Not")[0], "Greater")
        number = _read(_read(count, "ReduceSum")[0], "Cast")[0]
        if number is shown and shown in _read(condition, "Or"):
            return True
    return False


def _read(value: ir.Value | None, op_type: str) -> Sequence[ir.Value | None]:
    """Return the two first inputs of the node of some operator that computes a value; None in place of missing ones."""
    node = None if value is None else value.producer()
    found = () if node is None or node.domain or node.op_type != op_type else node.inputs
    return [*found, None, None][:2]


def _to_products(
    forms: Forms, value: ir.Value, factor: float, shapes: list[Dims], terms: list[Term], same: Same
) -> tuple[ir.Node, float] | None:
    """Return the product of queries and keys that scores are made of, and their factor; note what is done to them.

    Raises:
        Mismatch: something is done to them that the operator does not do.
    """
    while True:
        value = same(value)
        _note(shapes, value)
        node = value.producer()
        if node is None:
            return None
        if is_candidate(node):
            return node, factor
        dims = dims_of(value)
        if dims is None:
            return None
        source = _through_view(node)
        if source is not None:
            value = source
            continue
        if node.domain:
            return None
        if node.op_type in ("Add", "Sub", "Sum") and len(node.inputs) == 2:
            first, second = node.inputs
            if first is not None and first is second and node.op_type != "Sub":
                factor, value = 2.0 * factor, first
                continue
            for own, other, sign in _operands(node):
                if dims_of(own) != dims:
                    continue
                before = len(shapes), len(terms)
                terms.append(Term(other, dims, factor * sign))
                found = _to_products(forms, own, factor, shapes, terms, same)
                if found is not None:
                    return found
                del shapes[before[0] :], terms[before[1] :]
            return None
        if node.op_type == "Where":
            condition, chosen, rest = node.inputs
            assert condition is not None and chosen is not None and rest is not None
            for scores, filling, shows in ((chosen, rest, True), (rest, chosen, False)):
                fill = _fill(forms, filling)
                if fill is not None and fill < 0 < factor and dims_of(scores) == dims:
                    terms.append(Term(condition, dims, factor, fill * factor, shows))
                    value = scores
                    break
            else:
                return None
            continue
        if node.op_type == "Tanh":
            raise Mismatch("its scores are capped")
        product = factors(forms, node)
        if product is None:
            return None
        if len(product[1]) > 1:
            if any(dims_of(one) == dims and _to_products(forms, one, 1.0, [], [], same) for one in product[1]):
                raise Mismatch("its scale is a tensor")
            return None
        factor *= product[0]
        (value,) = product[1]


def _operands(node: ir.Node) -> Iterator[tuple[ir.Value, ir.Value, float]]:
    first, second = node.inputs
    if first is None or second is None:
        return
    yield first, second, -1.0 if node.op_type == "Sub" else 1.0
    if node.op_type != "Sub":
        yield second, first, 1.0


def factors(forms: Forms, node: ir.Node) -> tuple[float, list[ir.Value]] | None:
    """Return the numbers and the tensors of which a node computes the product; None of another node."""
    if node.op_type == "Neg" and not node.domain and node.inputs[0] is not None:
        return -1.0, [node.inputs[0]]
    if node.domain or node.op_type not in ("Mul", "Div") or None in node.inputs:
        return None
    first, second = (one for one in node.inputs if one is not None)
    dims = dims_of(node.outputs[0])
    numbers = [
        None if dims_of(other) != dims else _number(forms, one) for one, other in ((first, second), (second, first))
    ]
    if numbers[1] is not None and (node.op_type == "Mul" or numbers[1]):
        return numbers[1] if node.op_type == "Mul" else 1.0 / numbers[1], [first]
    if node.op_type == "Div":
        return None
    return (1.0, [first, second]) if numbers[0] is None else (numbers[0], [second])


def _number(forms: Forms, value: ir.Value) -> float | None:
    """Return the number that every element of a value always is."""
    node = value.producer()
    while node is not None and node.op_type in ("Cast", "CastLike", "Identity") and not node.domain and node.inputs[0]:
        if value.dtype not in FLOATS or node.inputs[0].dtype not in FLOATS:
            break
        value = node.inputs[0]
        node = value.producer()
    array = forms.constant(value)
    if array is None:
        form = forms.get(value)
        return None if form is None or value.dtype not in FLOATS else form.poly.constant
    if array.size == 0 or not is_real(array):
        return None
    first = array.flat[0]
    return float(first) if array.size == 1 or bool((array == first).all()) else None


def _fill(forms: Forms, value: ir.Value) -> float | None:
    """Return the number that takes the place of scores; the least one of a type as that of float32."""
    number = _number(forms, value)
    if number is None or value.dtype is None or math.isinf(number):
        return number
    return _LEAST if number <= value.dtype.min else number


def is_real(array: npt.NDArray[Any]) -> bool:
    return array.dtype.kind in "fiu" or array.dtype == ml_dtypes.bfloat16


def _boolean(value: ir.Value) -> ir.Value | None:
    """Return the booleans that a value is, as 0 and 1."""
    node = value.producer()
    while node is not None and not node.domain and node.op_type in ("Cast", "Identity"):
        source = node.inputs[0]
        if source is None:
            return None
        if source.dtype == ir.DataType.BOOL:
            return source
        node = source.producer()
    return None


def _through_view(node: ir.Node) -> ir.Value | None:
    """Return what a node gives in another type, or with other dimensions ahead of the rows and keys; None of others."""
    source = node.inputs[0] if node.inputs else None
    if node.domain or source is None:
        return None
    if node.op_type == "Identity" or (
        node.op_type == "Cast" and source.dtype in FLOATS and node.outputs[0].dtype in FLOATS
    ):
        return source
    before, after = dims_of(source), dims_of(node.outputs[0])
    if before is None or after is None:
        return None
    if node.op_type == "Transpose":
        perm = attribute(node, "perm", range(len(before))[::-1])
        above = source.producer()
        if above is not None and above.op_type == "Transpose" and not above.domain:
            inner = attribute(above, "perm", range(len(before))[::-1])
            if [inner[axis] for axis in perm] == sorted(perm):
                return above.inputs[0]
        moved = [axis for axis in perm if before[axis] != 1]
        return source if moved == sorted(moved) else None
    if node.op_type == "Expand" and before == after and None not in before:
        return source
    if node.op_type not in _REGROUPING:
        return None
    same = _regrouped_back(source, after)
    if same is not None:
        return same
    ends = _ends(before)
    return source if ends == _ends(after) and len(ends) == 2 and None not in ends else None


def _regrouped_back(value: ir.Value, dims: Dims) -> ir.Value | None:
    """Return what has some dimensions, and the same elements in their order as a value that is regrouped from it."""
    while None not in dims and (node := value.producer()) is not None:
        source = node.inputs[0] if node.inputs else None
        if source is None or node.domain or node.op_type not in _REGROUPING:
            break
        if dims_of(source) == dims:
            return source
        value = source
    return None


def _ends(dims: Dims) -> Dims:
    """Return the last two of the dimensions that are not 1."""
    return tuple(dim for dim in dims if dim != 1)[-2:]


def _note(shapes: list[Dims], value: ir.Value) -> None:
    """Note a shape whose last dimensions are (L, S)."""
    dims = dims_of(value)
    if dims is not None and dims not in shapes and dims[-2:] == _ends(dims):
        shapes.append(dims)


# Masks


def masks(forms: Forms, found: Written, lowest: float = NOTHING_BESIDE) -> Masks:
    """Return what each row of an attention sees.

    Args:
        forms: the forms of the graph.
        found: the attention.
        lowest: a finite number hides a key only if it is no higher.

    Raises:
        Mismatch: the operator has no mask that does the same.
    """
    reader = _MaskReader(forms, lowest)
    for term in found.terms:
        reader.read(term)
    return reader.result()


@dataclass
class _MaskReader:
    forms: Forms
    lowest: float
    causal: set[int] = field(default_factory=set)
    causal_is_hard: bool = True
    shown: list[tuple[ir.Value, Dims, bool]] = field(default_factory=list)
    hard: set[bool] = field(default_factory=set)
    low: list[tuple[int, tuple[ir.Value, Dims, float]]] = field(default_factory=list)
    added: list[tuple[ir.Value, Dims, float]] = field(default_factory=list)

    def read(self, term: Term) -> None:
        if term.fill is None:
            before = len(self.added)
            addends = list(_addends(term.value))
            for value in addends:
                self._add(dataclasses.replace(term, value=value))
            if len(self.added) - before == len(addends):
                self.added[before:] = [(_unexpanded(term.value), term.dims, term.factor)]
            return
        self._show(term.value, term.dims, term.shows, term.fill)

    def result(self) -> Masks:
        # Beside another mask, a row may be one in which what is added is low everywhere.
        if self.shown or self.added:
            self.added += [one for _, one in self.low]
        else:
            self.causal.update(kind for kind, _ in self.low)
        if len(self.causal) > 1:
            raise Mismatch("two masks of its rows contradict each other")
        causal = next(iter(self.causal), 0)
        if not self.shown and not self.added:
            return Masks(causal=causal)
        if causal and not self.causal_is_hard and self.added:
            raise Mismatch("rows that see nothing are not alike: a finite number takes the place of scores")
        if len(self.hard) > 1 or (self.shown and causal and self.causal_is_hard is not next(iter(self.hard))):
            raise Mismatch("several numbers take the place of its scores")
        if False in self.hard:
            if self.added:
                raise Mismatch("a finite number takes the place of its scores, and something is added")
            return Masks(causal=causal, shown=self.shown, uniform=True)
        open_ = any(not self._shows_all_rows(*one) for one in self.shown) or bool(self.shown and causal)
        open_ = open_ or any(not self._is_finite(value) for value, *_ in self.added)
        return Masks(causal=causal, shown=self.shown, added=self.added, may_see_nothing=open_)

    def _show(self, condition: ir.Value, dims: Dims, shows: bool, fill: float) -> None:
        """Note that a number takes the place of scores where a condition holds, or where it does not."""
        if fill > self.lowest:
            raise Mismatch(f"{fill:.6g} takes the place of its scores; expected at most {self.lowest:.0e}")
        is_hard = math.isinf(fill)
        for one, holds in _conjuncts(condition, shows):
            form = self.forms.get(one)
            if form is not None and form.poly == (UNIT if holds else ZERO):
                continue
            kind = self._triangle(one, _itself if holds else _opposite, partial(_held, holds))
            if kind:
                self.causal.add(kind)
                self.causal_is_hard = self.causal_is_hard and is_hard
            else:
                self.shown.append((one, dims, holds))
                self.hard.add(is_hard)

    def _add(self, term: Term) -> None:
        value, factor = term.value, term.factor
        if value.dtype not in FLOATS:
            raise Mismatch("what is added to its scores is no float")
        dims = dims_of(value)
        form = self.forms.get(value)
        if form is not None and form.poly == ZERO:
            return
        if dims is None or len(dims) > len(term.dims):
            raise Mismatch("the shape of what is added to its scores is unknown")
        condition = self._choice(value, factor)
        if condition is not None:
            self._show(condition[0], term.dims, condition[1], -math.inf)
            return
        if factor > 0:
            for low in (-math.inf, None):
                kind = self._triangle(
                    value, partial(self._shown_by, value, low, factor), partial(_where_zero, low, self.lowest / factor)
                )
                if kind and low is None:
                    self.low.append((kind, (value, term.dims, factor)))
                elif kind:
                    self.causal.add(kind)
                if kind:
                    return
        self.added.append((value, term.dims, factor))

    def _choice(self, value: ir.Value, factor: float) -> tuple[ir.Value, bool] | None:
        """Return the condition where 0 is added and -inf elsewhere, and True; or False where it is the other way."""
        node = value.producer()
        if node is None or node.domain or node.op_type != "Where" or None in node.inputs or factor <= 0:
            return None
        condition, *parts = (one for one in node.inputs if one is not None)
        numbers = tuple(_number(self.forms, part) for part in parts)
        if numbers == (0.0, -math.inf):
            return condition, True
        return (condition, False) if numbers == (-math.inf, 0.0) else None

    def _shown_by(self, value: ir.Value, low: float | None, factor: float, added: Poly) -> Poly | None:
        """Return where 0 is added, for an addend that is else -inf, or where that is None, a very low number."""
        algebra = self.forms.algebra
        if low is None:
            numbers = set(added.terms.values())
            if len(numbers) != 1 or not (number := numbers.pop()) * factor <= self.lowest:
                return None
            return UNIT - added.scaled(1 / number)
        assert value.dtype is not None
        infinite = self.forms.constants.form(np.asarray(low, value.dtype.numpy())).poly
        (monomial,) = infinite.terms
        if len(added) != 1 or not monomial:
            return None
        hidden = algebra.divide_monomial(added, monomial)
        return None if algebra.tensors(hidden) else UNIT - hidden

    def _triangle(
        self,
        value: ir.Value,
        shown_by: Callable[[Poly], Poly | None],
        shown_in: Callable[[npt.NDArray[Any]], npt.NDArray[Any] | None],
    ) -> int:
        """Return 1 if each row l sees keys up to l, 2 if up to l + S - L, for masks of (*, L, S); else 0.

        Args:
            value: the mask.
            shown_by: from an element of it, where a key is seen.
            shown_in: the same, from a table.
        """
        try:
            form = self.forms.form(value)
            if len(form.groups) < 2 or any(len(group) != 1 for group in form.groups[-2:]):
                return 0
            table = self._table(value)
            seen = None if table is None else shown_in(table)
            if seen is not None:
                # The mask is its upper left part, or the whole.
                rows, keys = seen.shape
                if np.array_equal(seen, np.tri(rows, keys, dtype=np.bool_)):
                    return 1
                whole = rows <= keys and (dims_of(value) or ())[-2:] == seen.shape
                return 2 if whole and np.array_equal(seen, np.tri(rows, keys, keys - rows, dtype=np.bool_)) else 0
            shown = shown_by(form.poly)
            return 0 if shown is None else self._kind(form, shown)
        except (Opaque, TooComplex, Unreadable):
            return 0

    def _kind(self, form: Form, shown: Poly) -> int:
        algebra = self.forms.algebra
        rank = len(form.groups)
        (row,), (column,) = form.variables(rank - 2), form.variables(rank - 1)
        ahead = self.forms.extent(form.groups[-1]) - self.forms.extent(form.groups[-2])
        hidden = UNIT - shown
        for kind, offset in ((1, ZERO), (2, ahead)):
            if hidden == algebra.less_than_zero(algebra.var(row) - algebra.var(column) + offset):
                # Rows ahead of the first key would see nothing.
                return kind if kind == 1 or (ahead.constant is not None and ahead.constant >= 0) else 0
        return 0

    def _table(self, value: ir.Value) -> npt.NDArray[Any] | None:
        """Return a table of constants of which a value is the upper left part; None where it is none."""
        constant, node = constant_of(value), value.producer()
        if constant is not None:
            if len(constant.shape) < 2 or not constant.size:
                return None
            array = array_of(constant)
            tables = array.reshape(-1, *array.shape[-2:])
            return (
                tables[0] if 1 not in array.shape[-2:] and all((one == tables[0]).all() for one in tables[1:]) else None
            )
        if node is None or node.domain or not node.inputs or node.inputs[0] is None:
            return None
        if node.op_type in ("Identity", "Unsqueeze", "Squeeze"):
            table = self._table(node.inputs[0])
            after = dims_of(value)
            return table if after is not None and 1 not in after[-2:] else None
        if node.op_type == "Slice":
            starts = self.forms.constant(node.inputs[1])
            steps = self.forms.constant(node.inputs[4]) if len(node.inputs) > 4 else np.ones(1)
            if starts is None or np.any(starts) or steps is None or np.any(steps != 1):
                return None
            return self._table(node.inputs[0])
        if node.op_type in ("Not", "Cast"):
            table = self._table(node.inputs[0])
            if table is None or value.dtype is None:
                return None
            return np.logical_not(table) if node.op_type == "Not" else table.astype(value.dtype.numpy())
        if node.op_type in ("Equal", "Greater", "Less") and node.inputs[1] is not None:
            number, table = _number(self.forms, node.inputs[1]), self._table(node.inputs[0])
            if number is None or table is None or table.dtype == np.bool_:
                return None
            compare = {"Equal": np.equal, "Greater": np.greater, "Less": np.less}[node.op_type]
            found: npt.NDArray[Any] = compare(table, number)
            return found
        return None

    def _shows_all_rows(self, value: ir.Value, dims: Dims, holds: bool) -> bool:
        """Whether each row of a constant mask sees some key."""
        array = self.forms.constant(value)
        return array is not None and array.ndim > 0 and bool((array == holds).any(axis=-1).all())

    def _is_finite(self, value: ir.Value) -> bool:
        """Whether a mask has no infinities, as far as that is sure."""
        array = self.forms.constant(value)
        if array is not None:
            return not is_real(array) or bool(np.isfinite(array.astype(np.float64)).all())
        node = value.producer()
        if node is None or node.domain:
            return value.dtype not in FLOATS
        read = [one for one in node.inputs if one is not None]
        if node.op_type in ("Reshape", "Unsqueeze", "Squeeze", "Expand", "Identity", "Transpose", "Slice", "Cast"):
            return self._is_finite(read[0])
        if node.op_type in ("Mul", "Sub", "Add", "Where", "Neg"):
            return all(self._is_finite(one) for one in read)
        return value.dtype not in FLOATS


def _itself(shown: Poly) -> Poly:
    return shown


def _opposite(hidden: Poly) -> Poly:
    return UNIT - hidden


def _held(holds: bool, table: npt.NDArray[Any]) -> npt.NDArray[Any] | None:
    return table == holds if table.dtype == np.bool_ else None


def _where_zero(low: float | None, lowest: float, table: npt.NDArray[Any]) -> npt.NDArray[Any] | None:
    """Return where a table has 0, if it is else -inf, or, if `low` is None, at most `lowest`."""
    if not is_real(table):
        return None
    numbers = table if table.dtype == np.float64 else table.astype(np.float32)
    is_low = numbers == -math.inf if low is not None else numbers <= lowest
    return numbers == 0 if ((numbers == 0) | is_low).all() else None


def _unexpanded(value: ir.Value) -> ir.Value:
    node = value.producer()
    expands = node is not None and node.op_type == "Expand" and not node.domain
    return node.inputs[0] if node is not None and expands and node.inputs[0] is not None else value


def _addends(value: ir.Value) -> Iterator[ir.Value]:
    """Yield the tensors of which one is the sum."""
    node = value.producer()
    if node is not None and not node.domain and node.inputs and node.inputs[0] is not None:
        if node.op_type == "Add" and node.inputs[1] is not None:
            yield from _addends(node.inputs[0])
            yield from _addends(node.inputs[1])
            return
        if node.op_type in ("Identity", "Cast", "CastLike", "Expand") and node.inputs[0].dtype == value.dtype:
            yield from _addends(node.inputs[0])
            return
    yield value


def _conjuncts(condition: ir.Value, holds: bool) -> Iterator[tuple[ir.Value, bool]]:
    """Yield conditions of which all must hold, or not hold, for another one to hold, or not to hold."""
    node = condition.producer()
    if node is not None and not node.domain and None not in node.inputs:
        read = [one for one in node.inputs if one is not None]
        if node.op_type == "Not":
            yield from _conjuncts(read[0], not holds)
            return
        if node.op_type == ("And" if holds else "Or"):
            for one in read:
                yield from _conjuncts(one, holds)
            return
        if node.op_type in ("Expand", "Identity"):
            yield from _conjuncts(read[0], holds)
            return
    yield condition, holds
