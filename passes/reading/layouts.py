"""Forms, and what becomes of their dimensions in views and broadcasts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gradfuse.passes.algebra import UNIT, ZERO, Algebra, Poly
from gradfuse.passes.reading.nodes import Opaque

Group = tuple[Poly, ...]
"""The sizes of the index variables that make up one dimension, outermost first; none for a dimension of size 1."""


@dataclass(frozen=True)
class Form:
    """A tensor: `poly` is an element, by index variables 0, 1, ..., which `groups` deals out to the dimensions."""

    groups: tuple[Group, ...]
    poly: Poly

    @property
    def sizes(self) -> Group:
        """The size of each index variable."""
        return tuple(size for group in self.groups for size in group)

    def variables(self, axis: int) -> range:
        """The variables of a dimension."""
        start = sum(len(group) for group in self.groups[:axis])
        return range(start, start + len(self.groups[axis]))


def groups_of_sizes(sizes: Iterable[Poly]) -> tuple[Group, ...]:
    """One variable for each dimension whose size is not 1."""
    return tuple(() if size.constant == 1 else (size,) for size in sizes)


def dims_in(algebra: Algebra, sizes: Iterable[Poly]) -> frozenset[str]:
    """The names of the dimensions that sizes are functions of."""
    atoms = (algebra.atoms[a] for size in sizes for m in size.terms for a, _ in m)
    return frozenset(str(atom.args[0]) for atom in atoms if atom.kind == "dim")


class Layouts:
    """Forms regrouped, permuted and broadcast, in one algebra."""

    def __init__(self, algebra: Algebra) -> None:
        self.algebra = algebra
        self.met: dict[str, Poly] | None = None
        """Where a broadcast shows what a cut dimension is, it is noted here by name, unless this is None."""
        self._cuts: dict[str, Poly] = {}

    def extent(self, group: Group) -> Poly:
        """The size of a dimension."""
        return group[0] if len(group) == 1 else self.algebra.product(group)

    def quotient(self, a: Poly, b: Poly) -> Poly | None:
        """The size a / b; None where that is not known to be an integer."""
        q = self.algebra.ratio(a, b)
        if q is None or any(c != int(c) for c in q.terms.values()):
            return None
        return None if any(e < 0 for m in q.terms for _, e in m) else q

    # Indices

    def position(self, form: Form, axis: int) -> Poly:
        """The index of an element along a dimension."""
        return self.assembled(form.variables(axis), form.sizes)

    def assembled(self, pieces: Sequence[int], sizes: Sequence[Poly], start: int = 0) -> Poly:
        """The index that the pieces (outermost first) of a list of sizes make up, whose variables begin at `start`."""
        index, stride = ZERO, UNIT
        for piece in reversed(pieces):
            index = index + self.algebra.mul(stride, self.algebra.var(start + piece))
            stride = self.algebra.mul(stride, sizes[piece])
        return index

    # Views

    def moved(self, form: Form, order: Sequence[int | None]) -> Form:
        """Dimensions permuted, dropped (they must have size 1) and put in (None, of size 1)."""
        names: dict[int, Poly] = {}
        groups: list[Group] = []
        start = 0
        for axis in order:
            group: Group = () if axis is None else form.groups[axis]
            if axis is not None:
                for k, v in enumerate(form.variables(axis)):
                    names[v] = self.algebra.var(start + k)
            groups.append(group)
            start += len(group)
        return Form(tuple(groups), self.algebra.substitute(form.poly, names))

    def regrouped(self, form: Form, sizes: Sequence[Poly], reshaped: bool = False) -> Form:
        """The form in dimensions of these sizes, row-major; `reshaped` as for `refine`."""
        wanted = [s for s in sizes if s.constant != 1]
        own_sizes = form.sizes
        if list(own_sizes) == wanted:
            return Form(groups_of_sizes(sizes), form.poly)
        common, own, new = self.refine(own_sizes, wanted, reshaped)
        poly = self.algebra.substitute(form.poly, {v: self.assembled(p, common) for v, p in enumerate(own)})
        parts = iter(new)
        groups = tuple(() if s.constant == 1 else tuple(common[k] for k in next(parts)) for s in sizes)
        return Form(groups, poly)

    def refine(
        self, a: Sequence[Poly], b: Sequence[Poly], reshaped: bool = False
    ) -> tuple[list[Poly], list[list[int]], list[list[int]]]:
        """The coarsest variables of which both lists of sizes are made, and the pieces of each of their members.

        `reshaped` says that a node of the graph makes one layout of the other, so that their products are equal: two
        sizes that are left over beside equal ones are equal as well. Raises Opaque where there are no such variables.
        """
        if len(a) == len(b) and all(s == t for s, t in zip(a, b, strict=True)):
            return list(a), [[k] for k in range(len(a))], [[k] for k in range(len(a))]
        common: list[Poly] = []
        left, right = list(a), list(b)
        pieces: tuple[list[list[int]], list[list[int]]] = ([[] for _ in a], [[] for _ in b])
        while left and right:
            s, t = left[-1], right[-1]
            k = len(common)
            pieces[0][len(left) - 1].append(k)
            pieces[1][len(right) - 1].append(k)
            if s == t or (reshaped and _agree_but_for_the_last(left, right)):
                common.append(s)
                left.pop()
                right.pop()
            elif (q := self.quotient(s, t)) is not None:
                common.append(t)
                left[-1] = q
                right.pop()
            elif (q := self.quotient(t, s)) is not None:
                common.append(s)
                right[-1] = q
                left.pop()
            else:
                raise Opaque("layouts do not align")
        if left or right:
            raise Opaque("layouts do not align")
        last = len(common) - 1
        flipped = [[[last - k for k in reversed(p)] for p in side] for side in pieces]
        return common[::-1], flipped[0], flipped[1]

    # Broadcasts

    def broadcast(self, forms: Sequence[Form]) -> tuple[tuple[Group, ...], list[Poly]]:
        """The forms by the variables of the shape that they broadcast to (NumPy's rules).

        Of sizes that nothing proves equal, one may be 1 at run time: the index of what is then repeated is 0.
        """
        rank = max(len(f.groups) for f in forms)
        names: list[dict[int, Poly]] = [{} for _ in forms]
        groups: list[Group] = []
        start = 0
        for axis in range(rank):
            present = [(n, f, axis - rank + len(f.groups)) for n, f in enumerate(forms)]
            present = [(n, f, k) for n, f, k in present if k >= 0 and f.groups[k]]
            common: Group = ()
            for _, f, k in present:
                common = self._joined(common, f.groups[k])
            for n, f, k in present:
                names[n] |= self._placed(f, k, common, start)
            groups.append(common)
            start += len(common)
        return tuple(groups), [self.algebra.substitute(f.poly, m) for f, m in zip(forms, names, strict=True)]

    def repeated(self, form: Form, sizes: Sequence[Poly]) -> Poly | None:
        """An element of the form, its variables repeated to these sizes; None where that takes more than one way."""
        if len(form.sizes) != len(sizes):
            return None
        names: dict[int, Poly] = {}
        for v, (own, size) in enumerate(zip(form.sizes, sizes, strict=True)):
            if own != size:
                if not set(self.algebra.parts(own)) < set(self.algebra.parts(size)):
                    return None
                names[v] = self.algebra.mul(self.algebra.wide(own), self.algebra.var(v))
        return self.algebra.substitute(form.poly, names)

    def cut(self, size: Poly, end: Poly) -> None:
        """Say that a size is that of elements 0, 1, ... of a dimension of more than one, ahead of an end.

        It is the end, or less, and 1 only where the end is. Beside a dimension of the size of the end it is the end, or
        the two would not broadcast.
        """
        for name in dims_in(self.algebra, [size]):
            if size == self.algebra.dim(name) and name not in dims_in(self.algebra, [end]):
                self._cuts[name] = end

    def demand(self, a: Poly, b: Poly) -> None:
        """Say that an operation fails where two sizes differ: if both are symbols, they are one."""
        pair = [next(iter(names)) for size in (a, b) if len(names := dims_in(self.algebra, [size])) == 1]
        if self.met is None or len(pair) < 2 or [a, b] != [self.algebra.dim(name) for name in pair]:
            return
        kept, other = sorted(pair)
        if kept != other and not self.algebra.derived.keys() & {kept, other}:
            self.met.setdefault(other, self.algebra.dim(kept))

    def _is_cut(self, a: Group, b: Group) -> bool:
        """Whether the first dimension is one that was cut at the size of the second."""
        if len(a) != 1 or not b:
            return False
        for name in dims_in(self.algebra, a):
            if a[0] == self.algebra.dim(name) and self._cuts.get(name) == self.extent(b):
                if self.met is not None:
                    self.met[name] = self.extent(b)
                return True
        return False

    def _joined(self, a: Group, b: Group) -> Group:
        """The variables of a dimension that two broadcast to."""
        if not a:
            return b
        try:
            return tuple(self.refine(a, b)[0])
        except Opaque:
            if self._is_cut(a, b):
                return b
            if self._is_cut(b, a):
                return a
            s, t = self.extent(a), self.extent(b)
            size = self.algebra.broadcast_size(s, t)
            if None not in (s.constant, t.constant) or (len(a) > 1 and size != s) or (len(b) > 1 and size != t):
                raise
            return a if size == s else b if size == t else (size,)

    def _placed(self, form: Form, axis: int, common: Group, start: int) -> dict[int, Poly]:
        """The variables of a dimension by those of the one that it is broadcast to, which begin at `start`."""
        group, variables = form.groups[axis], form.variables(axis)
        try:
            _, own, _ = self.refine(group, common)
        except Opaque:
            if len(group) > 1:
                raise
            index = self.assembled(range(len(common)), common, start)
            if self._is_cut(group, common):
                return {variables[0]: index}
            return {variables[0]: self.algebra.mul(self.algebra.wide(group[0]), index)}
        return {v: self.assembled(pieces, common, start) for v, pieces in zip(variables, own, strict=True)}


def _agree_but_for_the_last(a: Sequence[Poly], b: Sequence[Poly]) -> bool:
    return len(a) == len(b) and all(s == t for s, t in zip(a[:-1], b[:-1], strict=True))
