"""Polynomials over interned atoms: the algebra that canonical forms are written in.

A :class:`Poly` is a sum of monomials with float64 coefficients. A monomial is a product of powers of *atoms*:

========  ======================================  ===================================================
kind      args                                    stands for
========  ======================================  ===================================================
var       (variable,)                             an index variable, as a number
dim       (name,)                                 a symbolic dimension
tensor    (tensor, index, index, ...)             an element of a tensor, each index a Poly
exp       (monomial,)                             e to the monomial
log       (Poly,)                                 the natural logarithm
pow       (Poly,)                                 a primitive sum of several terms, so that it can have any exponent
sum       (sizes, monomial)                       the sum of the monomial over bound variables
eq, lt    (Poly,)                                 1 where the Poly is zero (negative), else 0
inside    (index, size)                           1 where 0 <= index < size, both Polys, else 0
wide      (size,)                                 0 where the size, a Poly, is 1, else 1
========  ======================================  ===================================================

A coefficient is a number as float64 has them: what would overflow, or underflow to 0 or to a number of fewer digits, is
:class:`TooComplex`. Integers, and what stands in an index or a condition, are compared digit by digit.

Equal mathematics gives equal polynomials as far as these rules go: products distribute over sums, exp and log turn
sums into products and back, factors that do not depend on a bound variable leave its sum, an indicator is its own
square, ``[j = x] f(j)`` is ``[j = x] f(x)``, and its sum over j < n is ``inside(x, n) f(x)``.

Variables are integers: 0, 1, ... are the free ones of a value, in the order of its dimensions; negative ones are
bound by sums, numbered by the height of the sum so that no substitution captures one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any, NamedTuple

Exponent = int | Fraction
Monomial = tuple[tuple[int, Exponent], ...]
Pattern = tuple[int, tuple[object, ...]]
"""The number of a pattern (see patterns.py), and the tensors that stand in its places."""

ONE: Monomial = ()
TERM_LIMIT = 64
_CANCELS = 1e-7  # relative size below which a difference of float32 constants is rounding
_ABSORBED = 1e-9  # relative size below which a number would lose its digits in a sum
_SMALLEST = 2.0**-1022  # numbers nearer to 0 have fewer digits
_EXACT = 2.0**53  # float64 has every integer up to here
_EXPONENT_LIMIT = 1 << 20
_DENOMINATOR_LIMIT = 1_000_000
_SUM_WIDTH = 8  # bound variables that one sum atom may have
_NOTHING: frozenset[Any] = frozenset()
_DEPTH_LIMIT = 64  # atoms within each other, as in the exponential of an exponential
_RANK, _POSITION = -6_000_000, -7_000_000  # variables of a sum over positions: the number of a position, the position


class TooComplex(Exception):
    """A polynomial outgrew the term limit, or an operation has no rule; the value is then taken as opaque."""


class Poly:
    """An immutable polynomial. `key` identifies it up to rounding of the coefficients to six digits."""

    __slots__ = ("_free", "_hash", "_key", "pattern", "terms")

    def __init__(self, terms: Mapping[Monomial, float], pattern: Pattern | None = None) -> None:
        self.terms: dict[Monomial, float] = {m: c for m, c in terms.items() if c != 0.0}
        if len(self.terms) > TERM_LIMIT:
            raise TooComplex(f"{len(self.terms)} terms")
        for c in self.terms.values():
            if not _SMALLEST <= abs(c) < math.inf:
                raise TooComplex(f"a coefficient of {c}")
        self._key: frozenset[tuple[Monomial, float]] | None = None
        self._hash: int | None = None
        self._free: frozenset[int] | None = None
        self.pattern = pattern

    @property
    def key(self) -> frozenset[tuple[Monomial, float]]:
        if self._key is None:
            self._key = frozenset([(m, _six_digits(c)) for m, c in self.terms.items()])
        return self._key

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = hash(self.key)
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, Poly) and len(self.terms) == len(other.terms) and self.key == other.key

    def __bool__(self) -> bool:
        return bool(self.terms)

    def __len__(self) -> int:
        return len(self.terms)

    @property
    def constant(self) -> float | None:
        """The value if the polynomial is a number, else None."""
        terms = self.terms
        if not terms:
            return 0.0
        return terms.get(ONE) if len(terms) == 1 else None

    @property
    def integer(self) -> int | None:
        value = self.constant
        return int(value) if value is not None and value == int(value) else None

    def __add__(self, other: Poly) -> Poly:
        if not other.terms:
            return self
        if not self.terms:
            return other
        return _collected(itertools.chain(self.terms.items(), other.terms.items()))

    def __neg__(self) -> Poly:
        return self.scaled(-1.0)

    def __sub__(self, other: Poly) -> Poly:
        return self + (-other)

    def scaled(self, factor: float) -> Poly:
        return self if factor == 1.0 else Poly({m: times(c, factor) for m, c in self.terms.items()})

    def close_to(self, other: Poly, tolerance: float) -> bool:
        """Same monomials, with coefficients that agree to the relative tolerance."""
        if self.terms.keys() != other.terms.keys():
            return False
        return all(
            abs(c - other.terms[m]) <= tolerance * max(abs(c), abs(other.terms[m])) for m, c in self.terms.items()
        )


def times(a: float, b: float) -> float:
    """The product, which is 0 only where a factor is.

    Raises:
        TooComplex: it is too small for float64.
    """
    product = a * b
    if product == 0.0 and a != 0.0 and b != 0.0:
        raise TooComplex(f"a coefficient of {a} times {b}")
    return product


@lru_cache(1 << 12)
def number(value: float) -> Poly:
    return Poly({ONE: float(value)})


ZERO = number(0)
UNIT = number(1)


class Atom:
    """An interned factor of monomials.

    `free` are the variables that it depends on, `tensors` the tensors that it reads at any depth, `poly` is the factor
    alone, `depth` says how many atoms stand within each other, and `ranged` whether one of them is an "inside".
    `indicator` says that it is a condition, worth 0 or 1, and `idempotent` that it is its own square.
    """

    __slots__ = (
        *("args", "depth", "free", "height", "id", "idempotent", "indicator", "kind", "poly", "positive", "ranged"),
        "tensors",
    )

    def __init__(self, id: int, kind: str, args: tuple[Any, ...]) -> None:
        self.id = id
        self.poly = Poly({((id, 1),): 1.0})
        self.kind = kind
        self.args = args
        self.free: frozenset[int] = frozenset()
        self.tensors: frozenset[object] = frozenset()
        self.height = 0
        self.depth = 0
        self.indicator = kind in ("eq", "lt", "inside")
        self.idempotent = self.indicator or kind == "wide"
        self.ranged = kind == "inside"
        self.positive = kind in ("exp", "dim")


class DerivedSize(NamedTuple):
    """What a dimension is that the graph computes from others.

    `kind` is "broadcast", of several sizes that are equal where they are not 1; or "slice", of one size, from `start`
    to `stop` by `step` as Python has it.
    """

    kind: str
    sizes: tuple[Poly, ...]
    start: int = 0
    stop: int = 0
    step: int = 1

    def of(self, sizes: Sequence[int]) -> int:
        """The size, for sizes that the graph can run with."""
        if self.kind == "slice":
            return len(range(sizes[0])[self.start : self.stop : self.step])
        return 0 if 0 in sizes else max(sizes)


class Positions(NamedTuple):
    """The name of the tensor of the positions, in order, at which a condition holds, as NonZero gives them.

    `condition` is that of variable 0, from 0 up to `size`; it holds `times` times.
    """

    condition: Poly
    size: Poly
    times: Poly

    def __str__(self) -> str:
        return "positions"


class Algebra:
    """The table of atoms of one analysis, and the operations on polynomials over them."""

    def __init__(self) -> None:
        self.atoms: list[Atom] = []
        self._table: dict[tuple[Any, ...], int] = {}
        self._variables: dict[int, Poly] = {}
        self._equalities: set[int] = set()
        self._boolean_tensors: set[object] = set()
        self._integers: set[object] = set()
        self._positions: dict[Positions, int] = {}
        self._opened: dict[tuple[int, ...], Poly] = {}
        self._substituted: dict[tuple[int, tuple[tuple[int, Poly], ...]], Poly] = {}
        self._pattern_numbers: dict[object, int] = {}
        self._atom_patterns: dict[int, Pattern] = {}
        self._atoms_by_pattern: dict[Pattern, int] = {}
        self._wide: set[int] = set()
        self.derived: dict[str, DerivedSize] = {}
        """The dimensions that are computed from others, by name."""

    # Atoms

    def _intern(self, kind: str, *args: Any) -> Atom:
        key = _key(kind, args)
        found = self._table.get(key)
        if found is not None:
            return self.atoms[found]
        atom = Atom(len(self.atoms), kind, args)
        inner: Iterable[Monomial] = ()
        if kind == "var":
            atom.free = frozenset(args)
        elif kind in ("exp", "sum"):
            monomial = args[-1]
            atom.free = self.free_of_monomial(monomial)
            inner = (monomial,)
            atom.height = self.height_of(monomial) + (kind == "sum")
            if kind == "sum":
                atom.free = frozenset(v for v in atom.free if v >= 0 or v not in self.bound_of(atom))
                atom.positive = all(self.atoms[a].positive for a, _ in monomial)
        else:
            polys = [a for a in args if isinstance(a, Poly)]
            atom.free = frozenset().union(*(self.free(p) for p in polys))
            inner = [m for p in polys for m in p.terms]
            atom.height = max((self.height_of(m) for m in inner), default=0)
            if kind == "tensor":
                atom.indicator = atom.idempotent = args[0] in self._boolean_tensors
                atom.tensors = frozenset(args[:1])
        parts = [self.atoms[a] for a in {a for m in inner for a, _ in m}]
        atom.depth = 1 + max((part.depth for part in parts), default=0)
        if atom.depth > _DEPTH_LIMIT:
            raise TooComplex(f"{atom.depth} functions within each other")
        atom.tensors = atom.tensors.union(*[part.tensors for part in parts])
        atom.ranged = atom.ranged or any(part.ranged for part in parts)
        if kind == "eq":
            self._equalities.add(atom.id)
        elif kind == "wide":
            self._wide.add(atom.id)
        self.atoms.append(atom)
        self._table[key] = atom.id
        return atom

    def height_of(self, monomial: Monomial) -> int:
        return max((self.atoms[a].height for a, _ in monomial), default=0)

    def bound_of(self, atom: Atom) -> tuple[int, ...]:
        """The bound variables of a sum atom."""
        first = -1 - (atom.height - 1) * _SUM_WIDTH
        return tuple(first - k for k in range(len(atom.args[0])))

    def of(self, atom: Atom, exponent: Exponent = 1) -> Poly:
        return atom.poly if exponent == 1 else Poly({((atom.id, exponent),): 1.0})

    def var(self, variable: int) -> Poly:
        found = self._variables.get(variable)
        if found is None:
            found = self._variables[variable] = self.of(self._intern("var", variable))
        return found

    def _variable_of(self, poly: Poly) -> int | None:
        """The variable that a polynomial is, if it is one alone."""
        if len(poly.terms) != 1:
            return None
        ((m, c),) = poly.terms.items()
        if len(m) != 1 or m[0][1] != 1 or c != 1.0 or self.atoms[m[0][0]].kind != "var":
            return None
        variable: int = self.atoms[m[0][0]].args[0]
        return variable

    def dim(self, name: str) -> Poly:
        return self.of(self._intern("dim", name))

    def _derived(self, size: DerivedSize) -> Poly:
        limits = "" if size.kind == "broadcast" else f", {size.start}:{size.stop}:{size.step}"
        name = f"{size.kind}({', '.join(self.text(s) for s in size.sizes)}{limits})"
        self.derived[name] = size
        atom = self._intern("dim", name)
        # A part of a dimension may be empty.
        atom.positive = size.kind == "broadcast"
        return self.of(atom)

    def slice_size(self, size: Poly, start: int, stop: int, step: int) -> Poly:
        """The number of elements in a slice, as Python has it, of a dimension."""
        total = size.integer
        if total is not None:
            return number(len(range(total)[start:stop:step]))
        return self._derived(DerivedSize("slice", (size,), start, stop, step))

    def broadcast_size(self, *sizes: Poly) -> Poly:
        """The size that dimensions, each of which is 1 or the same as the others, give together."""
        parts = {self.text(p): p for s in sizes for p in self.parts(s) if p != UNIT}
        for s in (*sizes, *(p for p in parts.values() if p.constant is not None)):
            if s.constant is not None and s != UNIT:
                return s
        if len(parts) < 2:
            return next(iter(parts.values()), UNIT)
        return self._derived(DerivedSize("broadcast", tuple(parts[name] for name in sorted(parts))))

    def parts(self, size: Poly) -> tuple[Poly, ...]:
        """The sizes that a size is the common one of; of any other, itself."""
        if len(size.terms) == 1:
            ((m, c),) = size.terms.items()
            if c == 1.0 and len(m) == 1 and m[0][1] == 1 and self.atoms[m[0][0]].kind == "dim":
                definition = self.derived.get(self.atoms[m[0][0]].args[0])
                if definition is not None and definition.kind == "broadcast":
                    return definition.sizes
        return (size,)

    def wide(self, size: Poly) -> Poly:
        """0 where the size is 1, else 1: an index times this stays in a dimension that is 1 and so repeated."""
        if size.constant is not None:
            return ZERO if size == UNIT else UNIT
        return self.of(self._intern("wide", size))

    def _narrowed(self, powers: dict[int, Exponent]) -> None:
        """Takes out of a product what follows from its other factors: what is not 1 stays so when it is broadcast."""
        wide = [(a, {self.text(p) for p in self.parts(self.atoms[a].args[0])}) for a in powers if a in self._wide]
        for a, own in wide:
            if any(b != a and parts < own for b, parts in wide):
                del powers[a]

    def tensor(self, tensor: object, indices: Iterable[Poly], boolean: bool = False, integer: bool = False) -> Poly:
        """An element of an opaque tensor. Where an index is a choice between indices, so is the element."""
        indices = tuple(indices)
        if boolean:
            self._boolean_tensors.add(tensor)
        if integer:
            self._integers.add(tensor)
        if isinstance(tensor, Positions):
            k = self._positions.setdefault(tensor, len(self._positions))
            if indices == (self.var(_RANK - k),):
                return self.var(_POSITION - k)
            if not indices[0] and self.substitute(tensor.condition, {0: ZERO}) == UNIT:
                return ZERO
        for position, index in enumerate(indices):
            condition = self._some_indicator(index)
            if condition is not None:
                pick = [
                    self.tensor(
                        tensor, (*indices[:position], self.given(index, condition, case), *indices[position + 1 :])
                    )
                    for case in (True, False)
                ]
                return self._choice(condition, *pick)
        return self.of(self._intern("tensor", tensor, *indices))

    # Patterns

    def pattern(self, poly: Poly) -> Pattern:
        """What is left of a polynomial without the names of the tensors that it reads, and these names."""
        found = poly.pattern
        if found is None:
            places: dict[object, int] = {}
            terms = tuple([(c, *self._placed(m, places)) for m, c in poly.terms.items()])
            found = (self._pattern_number(terms), tuple(places))
            # Numbers are shared by all algebras, each of which counts its patterns for itself.
            if poly.constant is None:
                poly.pattern = found
        return found

    def joint_pattern(self, polys: Iterable[Poly]) -> tuple[tuple[int, ...], ...]:
        """The patterns of several polynomials, and which of the tensors in them are the same."""
        places: dict[object, int] = {}
        patterns = [self.pattern(p) for p in polys]
        return tuple([(n, *[places.setdefault(t, len(places)) for t in tensors]) for n, tensors in patterns])

    def pattern_of_atom(self, a: int) -> Pattern:
        """The pattern of a factor; one that reads no tensor is its own."""
        found = self._atom_patterns.get(a)
        if found is None:
            atom = self.atoms[a]
            found = self._atom_patterns[a] = self._find_pattern(atom) if atom.tensors else (-1 - a, ())
            self._atoms_by_pattern[found] = a
        return found

    def atom_of_pattern(self, pattern: Pattern) -> int | None:
        """The factor that has a pattern, if there is one."""
        return self._atoms_by_pattern.get(pattern)

    def intern_renamed(self, atom: Atom, args: tuple[Any, ...], pattern: Pattern) -> int:
        """The factor that differs from another by the names of tensors only."""
        key = _key(atom.kind, args)
        found = self._table.get(key)
        if found is None:
            found = self._table[key] = len(self.atoms)
            new = Atom(found, atom.kind, args)
            new.free, new.height, new.depth = atom.free, atom.height, atom.depth
            new.indicator, new.idempotent = atom.indicator, atom.idempotent
            new.positive, new.ranged = atom.positive, atom.ranged
            new.tensors = frozenset(pattern[1])
            self.atoms.append(new)
            if atom.kind == "eq":
                self._equalities.add(found)
        self._atom_patterns[found] = pattern
        self._atoms_by_pattern[pattern] = found
        return found

    def _find_pattern(self, atom: Atom) -> Pattern:
        places: dict[object, int] = {}
        key: list[object] = [atom.kind]
        parts: Iterable[Poly] = atom.args
        if atom.kind == "tensor":
            tensor, *parts = atom.args
            places[tensor] = 0
            key += (tensor in self._boolean_tensors, tensor in self._integers)
        elif atom.kind in ("exp", "sum"):
            key += self._placed(atom.args[-1], places)
            parts = atom.args[0] if atom.kind == "sum" else ()
        for part in parts:
            number, tensors = self.pattern(part)
            key.append((number, *[places.setdefault(t, len(places)) for t in tensors]))
        return self._pattern_number(tuple(key)), tuple(places)

    def _placed(self, monomial: Monomial, places: dict[object, int]) -> list[tuple[object, ...]]:
        factors: list[tuple[object, ...]] = []
        for a, e in monomial:
            number, tensors = self.pattern_of_atom(a)
            factors.append((number, e, *[places.setdefault(t, len(places)) for t in tensors]))
        return factors

    def _pattern_number(self, key: object) -> int:
        return self._pattern_numbers.setdefault(key, len(self._pattern_numbers))

    # Structure

    def free_of_monomial(self, monomial: Monomial) -> frozenset[int]:
        atoms = self.atoms
        if len(monomial) == 1:
            return atoms[monomial[0][0]].free
        return _NOTHING.union(*[atoms[a].free for a, _ in monomial])

    def free(self, poly: Poly) -> frozenset[int]:
        found = poly._free
        if found is None:
            atoms = self.atoms
            found = poly._free = _NOTHING.union(*[atoms[a].free for m in poly.terms for a, _ in m])
        return found

    def tensors(self, poly: Poly) -> frozenset[object]:
        """The tensors that a polynomial reads, at any depth."""
        if poly.pattern is not None:
            return frozenset(poly.pattern[1])
        return _NOTHING.union(*[self.atoms[a].tensors for m in poly.terms for a, _ in m])

    def has_variable_factor(self, poly: Poly) -> bool:
        """Whether an index variable is a factor of a term, as a number."""
        return any(self.atoms[a].kind == "var" for m in poly.terms for a, _ in m)

    def _some_indicator(self, poly: Poly) -> Atom | None:
        for monomial in poly.terms:
            for a, _ in monomial:
                if self.atoms[a].indicator:
                    return self.atoms[a]
        return None

    def indicators(self, poly: Poly) -> list[Atom]:
        """The conditions among the factors of a polynomial's terms."""
        return [self.atoms[a] for a in sorted({a for m in poly.terms for a, _ in m}) if self.atoms[a].indicator]

    def given(self, poly: Poly, condition: Atom, case: bool) -> Poly:
        """The polynomial where the indicator is known to be 1 or 0."""
        kept = []
        for m, c in poly.terms.items():
            if any(a == condition.id for a, _ in m):
                if not case:
                    continue
                m = tuple(f for f in m if f[0] != condition.id)
            kept.append((m, c))
        return _collected(kept)

    def _choice(self, condition: Atom, yes: Poly, no: Poly) -> Poly:
        return no + self.mul(self.of(condition), yes - no)

    # Arithmetic

    def mul(self, a: Poly, b: Poly) -> Poly:
        constant = a.constant
        if constant is not None:
            return b.scaled(constant)
        constant = b.constant
        if constant is not None:
            return a.scaled(constant)
        if len(a) * len(b) > 16 * TERM_LIMIT:
            raise TooComplex("product")
        total = ZERO
        plain: list[tuple[Monomial, float]] = []
        for m, c in a.terms.items():
            for n, d in b.terms.items():
                product = self._times(m, n)
                simplified = self._select(product)
                if simplified is None:
                    plain.append((product, times(c, d)))
                else:
                    total = total + simplified.scaled(times(c, d))
        return total + _collected(plain)

    def product(self, polys: Iterable[Poly]) -> Poly:
        result = UNIT
        for p in polys:
            result = self.mul(result, p)
        return result

    def _times(self, m: Monomial, n: Monomial) -> Monomial:
        powers: dict[int, Exponent] = dict(m)
        for a, e in n:
            known = powers.get(a)
            if known is None:
                powers[a] = e
            elif known + e == 0:
                del powers[a]
            else:
                powers[a] = 1 if known + e > 0 and self.atoms[a].idempotent else _plain(known + e)
        if len(self._wide) > 1 and sum(a in self._wide for a in powers) > 1:
            self._narrowed(powers)
        return tuple(sorted(powers.items()))

    def _select(self, monomial: Monomial) -> Poly | None:
        """[v = x] f(v) as [v = x] f(x), [x = 1] [x = 2] as 0; None where nothing changes."""
        equalities = [self.atoms[a] for a, _ in monomial if a in self._equalities]
        if any(self.exclude_each_other(a, b) for a, b in itertools.combinations(equalities, 2)):
            return ZERO
        for a in [atom.id for atom in equalities]:
            # Always the same variable of an equation, or two of them would replace each other forever.
            v, x = self._eliminated(self.atoms[a])
            if x is None:
                continue
            rest = tuple(f for f in monomial if f[0] != a)
            if v in self.free_of_monomial(rest):
                return self.mul(self.of(self.atoms[a]), self.substitute(Poly({rest: 1.0}), {v: x}))
        return None

    def exclude_each_other(self, a: Atom, b: Atom) -> bool:
        """Whether two indicators say of one thing that it is two numbers."""
        return any((a.args[0] - b.args[0].scaled(sign)).constant not in (None, 0.0) for sign in (1.0, -1.0))

    def _eliminated(self, eq: Atom) -> tuple[int, Poly | None]:
        """The highest variable that the indicator says to be x, and x."""
        for v in sorted(eq.free, reverse=True):
            x = self.solve(eq, v)
            if x is not None:
                return v, x
        return -1, None

    def solve(self, eq: Atom, variable: int) -> Poly | None:
        """The x for which the indicator says `variable == x`; None where it is not of that form."""
        poly: Poly = eq.args[0]
        rest: dict[Monomial, float] = {}
        slope = 0.0
        for m, c in poly.terms.items():
            if (
                len(m) == 1
                and m[0][1] == 1
                and self.atoms[m[0][0]].args == (variable,)
                and self.atoms[m[0][0]].kind == "var"
            ):
                slope = c
            else:
                rest[m] = c
        x = Poly(rest)
        if abs(slope) != 1.0 or variable in self.free(x):
            return None
        return x.scaled(-slope)

    def divide_monomial(self, poly: Poly, monomial: Monomial) -> Poly:
        inverse = tuple((a, -e) for a, e in monomial)
        return _collected((self._times(m, inverse), c) for m, c in poly.terms.items())

    def common(self, poly: Poly) -> Monomial:
        """The largest monomial that divides every term."""
        common: dict[int, Exponent] | None = None
        for m in poly.terms:
            if common is None:
                common = dict(m)
                continue
            powers = dict(m)
            shared: dict[int, Exponent] = {}
            for a in common.keys() | powers.keys():
                if (e := min(common.get(a, 0), powers.get(a, 0))) != 0:
                    shared[a] = e
            common = shared
        return tuple(sorted((common or {}).items()))

    def content(self, poly: Poly) -> tuple[float, Monomial, Poly]:
        """poly = coefficient * monomial * primitive; the primitive part leads with coefficient 1."""
        if not poly:
            return 0.0, ONE, ZERO
        monomial = self.common(poly)
        reduced = self.divide_monomial(poly, monomial) if monomial else poly
        lead = reduced.terms[min(reduced.terms)]
        return lead, monomial, reduced.scaled(_raised(lead, -1))

    def ratio(self, poly: Poly, by: Poly) -> Poly | None:
        """poly / by where that is a single term, else None."""
        c, m, p = self.content(poly)
        d, n, q = self.content(by)
        if not by or not p.close_to(q, 1e-5):
            return None
        return Poly({self._times(m, tuple((a, -e) for a, e in n)): times(c, _raised(d, -1))})

    def power(self, poly: Poly, exponent: Exponent) -> Poly:
        exponent = _plain(exponent)
        if exponent == 1:
            return poly
        if exponent == 0:
            return UNIT
        if not poly:
            if exponent > 0:
                return ZERO
            raise TooComplex("division by zero")
        if exponent < 0 and self._is_condition(poly):
            raise TooComplex("division by a condition")
        if len(poly) == 1:
            ((m, c),) = poly.terms.items()
            if not isinstance(exponent, int) and (c < 0 or not all(self.atoms[a].positive for a, _ in m)):
                return self.of(self._intern("pow", poly), exponent)
            raised = tuple(
                (a, e) if self.atoms[a].idempotent and exponent > 0 else (a, _plain(e * exponent)) for a, e in m
            )
            return Poly({raised: _raised(c, exponent)})
        if isinstance(exponent, int) and exponent in (2, 3) and len(poly) <= 4:
            return self.mul(poly, self.power(poly, exponent - 1))
        c, m, primitive = self.content(poly)
        if not isinstance(exponent, int) and (c < 0 or m):
            return self.of(self._intern("pow", poly), exponent)
        outside = self.power(Poly({m: c}), exponent)
        return self.mul(outside, self.of(self._intern("pow", primitive), exponent))

    def _is_condition(self, poly: Poly) -> bool:
        """Whether the polynomial is 0 wherever a condition does not hold, or holds."""
        if len(poly) == 1:
            return any(self.atoms[a].idempotent for m in poly.terms for a, _ in m)
        return any(not self.given(poly, atom, case) for atom in self.indicators(poly) for case in (True, False))

    def exponentiate(self, poly: Poly, exponent: float) -> Poly:
        return self.power(poly, _as_exponent(exponent))

    def exp(self, poly: Poly) -> Poly:
        scale = 1.0
        factors = UNIT
        for m, c in poly.terms.items():
            if m == ONE:
                if not -700.0 < c < 700.0:
                    raise TooComplex(f"e to the {c}")
                scale = math.exp(c)
                continue
            exponent = _as_exponent(c)
            atom = self.atoms[m[0][0]]
            # The logarithm of what may be negative is NaN, and so must its exponential be.
            if len(m) == 1 and m[0][1] == 1 and atom.kind == "log" and self.is_positive(atom.args[0]):
                factors = self.mul(factors, self.power(atom.args[0], exponent))
            else:
                factors = self.mul(factors, self.of(self._intern("exp", m), exponent))
        return factors.scaled(scale)

    def log(self, poly: Poly) -> Poly:
        if len(poly) != 1:
            return self.of(self._intern("log", poly))
        ((m, c),) = poly.terms.items()
        if c <= 0:
            return self.of(self._intern("log", poly))
        result = number(math.log(c))
        for a, e in m:
            atom = self.atoms[a]
            if atom.kind == "exp":
                result = result + Poly({atom.args[0]: float(e)})
            elif atom.positive:
                result = result + self.of(self._intern("log", self.of(atom))).scaled(float(e))
            else:
                return self.of(self._intern("log", poly))
        return result

    # Conditions

    def equal_zero(self, poly: Poly) -> Poly:
        """1 where poly is 0, else 0."""
        if poly.constant is not None:
            return UNIT if poly.constant == 0 else ZERO
        condition = self._some_indicator(poly)
        if condition is not None:
            return self._choice(
                condition, *(self.equal_zero(self.given(poly, condition, case)) for case in (True, False))
            )
        if not self.tensors(poly) and any(self._is_not_negative(p - UNIT) for p in (poly, -poly)):
            return ZERO  # an index that is compared with a negative number
        lead = poly.terms[max(poly.terms)]
        return self.of(self._intern("eq", poly.scaled(math.copysign(1.0, lead))))

    def less_than_zero(self, poly: Poly) -> Poly:
        """1 where poly is negative, else 0."""
        if poly.constant is not None:
            return UNIT if poly.constant < 0 else ZERO
        if self._is_not_negative(poly):
            return ZERO
        if self._is_not_negative(number(-1) - poly):
            return UNIT
        condition = self._some_indicator(poly)
        if condition is not None:
            return self._choice(
                condition, *(self.less_than_zero(self.given(poly, condition, case)) for case in (True, False))
            )
        if poly.terms.get(ONE, 0.0) < 0 and self.is_integer(poly):
            # x < 0 or -1 - x < 0: of these opposites, the one whose constant is not negative.
            return UNIT - self.of(self._intern("lt", number(-1) - poly))
        return self.of(self._intern("lt", poly))

    def tested_below_zero(self, poly: Poly) -> bool:
        """Whether the graph compares elements of the tensor that the polynomial is one of with a number below 0."""
        own = [self.atoms[a] for m in poly.terms for a, _ in m]
        if len(own) != 1 or own[0].kind != "tensor" or any(self.tensors(index) for index in own[0].args[1:]):
            return False
        for a in self._equalities:
            terms = dict(self.atoms[a].args[0].terms)
            offset = terms.pop(ONE, 0.0)
            ((m, c),) = terms.items() if len(terms) == 1 else ((ONE, 0.0),)
            if offset * c > 0 and len(m) == 1 and self.atoms[m[0][0]].args[:1] == own[0].args[:1]:
                return True
        return False

    def end_of(self, poly: Poly) -> tuple[int, Poly] | None:
        """The v and n of a condition [v < n] on an index variable and a size; None for what is no such condition."""
        indicators = self.indicators(poly)
        if len(indicators) != 1 or indicators[0].kind != "lt" or poly != indicators[0].poly:
            return None
        for v in indicators[0].free:
            size = self.var(v) - indicators[0].args[0]
            if not self.free(size) and not self.tensors(size):
                return v, size
        return None

    def inside(self, index: Poly, size: Poly) -> Poly:
        """1 where the index is at least 0 and below the size, else 0."""
        if index.constant is not None and size.constant is not None:
            return UNIT if 0 <= index.constant < size.constant else ZERO
        condition = self._some_indicator(index)
        if condition is not None:
            return self._choice(
                condition, *(self.inside(self.given(index, condition, case), size) for case in (True, False))
            )
        return self.of(self._intern("inside", index, size))

    def is_integer(self, poly: Poly) -> bool:
        """Whether the polynomial is a sum of products of integers."""
        return all(
            c == int(c) and all(e == int(e) and e > 0 and self._is_integer_atom(self.atoms[a]) for a, e in m)
            for m, c in poly.terms.items()
        )

    def is_count(self, poly: Poly) -> bool:
        """Whether the polynomial is an integer made of indices, dimensions and numbers of conditions that hold."""
        atoms = (self.atoms[a] for m in poly.terms for a, _ in m)
        return self.is_integer(poly) and all(atom.indicator or atom.kind in ("var", "dim", "sum") for atom in atoms)

    def _is_integer_atom(self, atom: Atom) -> bool:
        if atom.kind == "sum":
            return all(e > 0 and self._is_integer_atom(self.atoms[a]) for a, e in atom.args[1])
        return (
            atom.idempotent or atom.kind in ("var", "dim") or (atom.kind == "tensor" and atom.args[0] in self._integers)
        )

    def _is_not_negative(self, poly: Poly) -> bool:
        """Whether index variables and dimensions from 0 on, and counts up to their number, leave nothing negative."""
        lowest = ZERO
        for m, c in poly.terms.items():
            kinds = {self.atoms[a].kind for a, _ in m}
            if kinds <= {"var", "dim"}:
                if kinds and "var" in kinds:
                    if c < 0:
                        return False
                    continue
                lowest = lowest + Poly({m: c})
                continue
            atom = self.atoms[m[0][0]]
            counts = atom.kind == "sum" and all(self.atoms[a].indicator for a, _ in atom.args[1])
            if len(m) != 1 or m[0][1] != 1 or not (atom.indicator or counts):
                return False
            if c < 0:
                lowest = lowest + (self.product(atom.args[0]) if counts else UNIT).scaled(c)
        return all(c >= 0 for c in lowest.terms.values())

    def is_positive(self, poly: Poly) -> bool:
        """Whether every factor of every term is positive."""
        return all(c > 0 and all(self.atoms[a].positive for a, _ in m) for m, c in poly.terms.items())

    def is_boolean(self, poly: Poly) -> bool:
        try:
            return self.mul(poly, poly) == poly
        except TooComplex:
            return False

    # Sums and substitution

    def sum(self, poly: Poly, variables: Mapping[int, Poly], valid: Mapping[int, Poly] | None = None) -> Poly:
        """The sum over index variables; `variables` gives their sizes, `valid` the sizes of all other free variables.

        ``sum_j [j = x] f(j)`` is ``f(x)`` where x is provably in range, and ``inside(x, n) f(x)`` where it is data: a
        one-hot row of an index that is out of range is all zeros. Otherwise the sum stays.
        """
        sizes = dict(valid or {}) | dict(variables)
        for m, c in poly.terms.items() if self._positions else ():
            moved = self._over_positions(Poly({m: c}), variables)
            if moved is not None:
                rest = Poly({n: d for n, d in poly.terms.items() if n != m})
                return self.sum(*moved, valid) + self.sum(rest, variables, valid)
        split = self._split_range(poly, variables)
        if split is not None:
            v, condition, at = split
            below = condition.args[0].terms[self._only(v)] > 0
            low = self.sum(self.given(poly, condition, below), {**variables, v: at}, valid)
            if at == variables[v]:
                return low
            high = self.substitute(self.given(poly, condition, not below), {v: self.var(v) + at})
            return low + self.sum(high, {**variables, v: variables[v] - at}, valid)
        result = ZERO
        for m, c in poly.terms.items():
            result = result + self._sum_monomial(m, dict(variables), sizes).scaled(c)
        return result

    def _over_positions(self, term: Poly, variables: Mapping[int, Poly]) -> tuple[Poly, dict[int, Poly]] | None:
        """A sum over the positions of a condition as one over all positions, times the condition; and its variables.

        None where no variable is but the number of a position.
        """
        names = [name for name in self.tensors(term) if isinstance(name, Positions)]
        for name in sorted(names, key=self._positions.__getitem__):
            rank, position = _RANK - self._positions[name], self.var(_POSITION - self._positions[name])
            for v, size in variables.items():
                if size != name.times or v not in self.free(term):
                    continue
                # The position of number `rank` is the variable `position`: see tensor().
                moved = self.substitute(term, {v: self.var(rank)})
                if rank not in self.free(moved):
                    left = {w: s for w, s in variables.items() if w != v}
                    holds = self.substitute(name.condition, {0: position})
                    return self.mul(holds, moved), left | {_POSITION - self._positions[name]: name.size}
        return None

    def _only(self, variable: int) -> Monomial:
        ((m, _),) = self.var(variable).terms.items()
        return m

    def _split_range(self, poly: Poly, variables: Mapping[int, Poly]) -> tuple[int, Atom, Poly] | None:
        """A condition v < n or v > n, and the number of v below the change; None where no v has one in its range."""
        for atom in sorted({a for m in poly.terms for a, _ in m}):
            condition = self.atoms[atom]
            if condition.kind != "lt" or len(condition.free) != 1 or not condition.free & variables.keys():
                continue
            (v,) = condition.free
            terms = dict(condition.args[0].terms)
            slope, offset = terms.pop(self._only(v), 0.0), terms.pop(ONE, 0.0)
            if terms or abs(slope) != 1.0 or offset != int(offset):
                continue
            at = -offset if slope > 0 else offset + 1
            above = (variables[v] - number(at)).terms.values()
            if at > 0 and all(c > 0 for c in above):
                return v, condition, number(at)
            if at > 0 and all(c < 0 for c in above):
                return v, condition, variables[v]
        return None

    def _sum_monomial(self, monomial: Monomial, variables: dict[int, Poly], sizes: Mapping[int, Poly]) -> Poly:
        for a, _ in monomial:
            if a not in self._equalities:
                continue
            atom = self.atoms[a]
            for v in atom.free & variables.keys():
                x = self.solve(atom, v)
                inside = None if x is None else self._inside(x, variables[v], sizes)
                if x is not None and inside is not None:
                    rest = Poly({tuple(f for f in monomial if f[0] != a): 1.0})
                    left = {w: s for w, s in variables.items() if w != v}
                    return self.sum(self.mul(inside, self.substitute(rest, {v: x})), left, sizes)
        free = self.free_of_monomial(monomial)
        times = UNIT
        for v in [v for v in variables if v not in free]:
            times = self.mul(times, variables.pop(v))
        inner = tuple(f for f in monomial if self.atoms[f[0]].free & variables.keys())
        outer = tuple(f for f in monomial if f not in inner)
        if not variables:
            return self.mul(times, Poly({outer: 1.0}))
        # Independent factors are sums of their own.
        groups = self._components(inner, set(variables))
        result = self.mul(times, Poly({outer: 1.0}))
        for names, factors in groups:
            result = self.mul(result, self._sum_atom(factors, {v: variables[v] for v in names}))
        return result

    def _components(self, monomial: Monomial, variables: set[int]) -> list[tuple[set[int], Monomial]]:
        groups: list[tuple[set[int], list[tuple[int, Exponent]]]] = []
        for f in monomial:
            names = set(self.atoms[f[0]].free & variables)
            factors = [f]
            rest = []
            for g in groups:
                if g[0] & names:
                    names |= g[0]
                    factors += g[1]
                else:
                    rest.append(g)
            groups = [*rest, (names, factors)]
        return [(names, tuple(sorted(factors))) for names, factors in groups]

    def _sum_atom(self, monomial: Monomial, variables: dict[int, Poly]) -> Poly:
        # A sum within the sum joins it, so that the order of summation leaves no trace.
        if len(monomial) == 1 and monomial[0][1] == 1 and self.atoms[monomial[0][0]].kind == "sum":
            inner = self.atoms[monomial[0][0]]
            names = dict(zip(self.bound_of(inner), inner.args[0], strict=True))
            fresh = {v: -1_000_000 - k for k, v in enumerate(names)}
            opened = self.substitute(Poly({inner.args[1]: 1.0}), {v: self.var(f) for v, f in fresh.items()})
            return self.sum(opened, variables | {fresh[v]: s for v, s in names.items()})
        if len(variables) > 4:
            raise TooComplex("sum over more than four variables")
        height = self.height_of(monomial) + 1
        first = -1 - (height - 1) * _SUM_WIDTH
        candidates = []
        for order in itertools.permutations(variables):
            renamed = self.substitute(Poly({monomial: 1.0}), {v: self.var(first - k) for k, v in enumerate(order)})
            if len(renamed) != 1 or self.height_of(next(iter(renamed.terms))) != height - 1:
                raise TooComplex("a summand that its variables' names change")
            ((m, c),) = renamed.terms.items()
            candidates.append((m, c, tuple(variables[v] for v in order)))
        m, c, sizes = candidates[0]
        if len(candidates) > 1:
            # The choice does not depend on the names of tensors, unless the candidates differ by nothing else.
            m, c, sizes = min(candidates, key=lambda candidate: (self._shape_of(candidate[0]), candidate[0]))
        return self.of(self._intern("sum", sizes, m)).scaled(c)

    def _shape_of(self, monomial: Monomial) -> list[tuple[int, Exponent]]:
        return sorted([(self.pattern_of_atom(a)[0], e) for a, e in monomial])

    def opened(self, atom: Atom, variables: Iterable[int]) -> Poly:
        """The summand of a sum atom, with the given variables in place of the bound ones."""
        key = (atom.id, *variables)
        known = self._opened.get(key)
        if known is None:
            names = {b: self.var(v) for b, v in zip(self.bound_of(atom), key[1:], strict=True)}
            known = self._opened[key] = self.substitute(Poly({atom.args[1]: 1.0}), names)
        return known

    def inside_proven(self, index: Poly, size: Poly, sizes: Mapping[int, Poly]) -> bool:
        """Whether the index is at least 0 and below the size for all values of its variables, of the given sizes."""
        return self._inside(index, size, sizes) == UNIT

    def _inside(self, x: Poly, size: Poly, sizes: Mapping[int, Poly]) -> Poly | None:
        """1 where the index is in range: 1 if that is known, an indicator for data, None if it cannot be told."""
        if x.constant is not None:
            limit = size.constant
            return UNIT if x.constant >= 0 and (limit is None or x.constant < limit) else None
        low, high = ZERO, ZERO
        for m, c in x.terms.items():
            kinds = {self.atoms[a].kind for a, _ in m}
            if kinds & {"tensor", "sum", "pow"}:
                return self.inside(x, size)
            v = [a for a, _ in m if self.atoms[a].kind == "var"]
            if not v:
                low, high = low + Poly({m: c}), high + Poly({m: c})
                continue
            variable = self.atoms[v[0]].args[0]
            if len(v) > 1 or (v[0], 1) not in m or c < 0 or variable not in sizes:
                return None
            factor = self.divide_monomial(Poly({m: c}), ((v[0], 1),))
            high = high + self.mul(factor, sizes[variable] - UNIT)
        spare = size - UNIT - high
        proven = all(c >= 0 for c in low.terms.values()) and all(c >= 0 for c in spare.terms.values())
        return UNIT if proven else None

    def assuming_inside(self, poly: Poly, index: Poly, size: Poly) -> Poly:
        """The polynomial where every `inside` of the index is 1, whatever its variables are called, at any depth."""
        known: dict[int, Poly] = {}

        def is_index(x: Poly) -> bool:
            mine, others = sorted(self.free(index)), self.free(x)
            if len(mine) != len(others):
                return False
            orders = itertools.permutations(others)
            return any(
                x == self.substitute(index, {v: self.var(w) for v, w in zip(mine, order, strict=True)})
                for order in orders
            )

        def of_atom(atom: Atom) -> Poly:
            if not atom.ranged:
                return atom.poly
            found = known.get(atom.id)
            if found is None:
                fulfilled = atom.kind == "inside" and atom.args[1] == size and is_index(atom.args[0])
                found = known[atom.id] = UNIT if fulfilled else self._rebuilt(atom, of)
            return found

        def of(p: Poly) -> Poly:
            if not any(self.atoms[a].ranged for m in p.terms for a, _ in m):
                return p
            result = ZERO
            for m, c in p.terms.items():
                factors = (self.power(of_atom(self.atoms[a]), e) for a, e in m)
                result = result + self.product(factors).scaled(c)
            return result

        return of(poly)

    def substitute(self, poly: Poly, names: Mapping[int, Poly]) -> Poly:
        """Every free variable of `names` replaced at once."""
        free = self.free(poly)
        names = {v: p for v, p in names.items() if v in free and p != self.var(v)}
        if not names:
            return poly
        result = ZERO
        kept: dict[Monomial, float] = {}
        plain: list[tuple[Monomial, float]] = []
        for m, c in poly.terms.items():
            if self.free_of_monomial(m).isdisjoint(names):
                kept[m] = c
                continue
            single = self._substituted_monomial(m, c, names)
            if single is not None:
                plain.append(single)
                continue
            term = number(c)
            for a, e in m:
                atom = self.atoms[a]
                changed = self._substitute_atom(atom, names) if atom.free & names.keys() else self.of(atom)
                term = self.mul(term, changed if e == 1 else self.power(changed, e))
            result = result + term
        return result + _collected(plain) + Poly(kept)

    def _substituted_monomial(
        self, monomial: Monomial, coefficient: float, names: Mapping[int, Poly]
    ) -> tuple[Monomial, float] | None:
        """The term with its variables replaced, where that is a term without equalities, so that nothing selects."""
        result = ONE
        for a, e in monomial:
            atom = self.atoms[a]
            factor: Monomial = ((a, e),)
            if not atom.free.isdisjoint(names):
                changed = self._substitute_atom(atom, names)
                if e != 1:
                    changed = self.power(changed, e)
                if len(changed.terms) != 1:
                    return None
                ((factor, c),) = changed.terms.items()
                coefficient = times(coefficient, c)
            if not self._equalities.isdisjoint([b for b, _ in factor]):
                return None
            result = self._times(result, factor) if result else factor
        return result, coefficient

    def _substitute_atom(self, atom: Atom, names: Mapping[int, Poly]) -> Poly:
        relevant = tuple(sorted(((v, p) for v, p in names.items() if v in atom.free), key=lambda i: i[0]))
        key = (atom.id, relevant)
        known = self._substituted.get(key)
        if known is None:
            new = dict(relevant)
            if atom.kind == "var":
                known = new[atom.args[0]]
            else:
                renamed = self._renamed_sum(atom, new) if atom.kind == "sum" else None
                known = self._rebuilt(atom, lambda p: self.substitute(p, new)) if renamed is None else renamed
            self._substituted[key] = known
        return known

    def _rebuilt(self, atom: Atom, change: Callable[[Poly], Poly]) -> Poly:
        """The atom with its arguments changed."""
        match atom.kind:
            case "tensor":
                return self.tensor(atom.args[0], [change(p) for p in atom.args[1:]])
            case "exp":
                return self.exp(change(Poly({atom.args[0]: 1.0})))
            case "log":
                return self.log(change(atom.args[0]))
            case "pow":
                return change(atom.args[0])
            case "eq":
                return self.equal_zero(change(atom.args[0]))
            case "lt":
                return self.less_than_zero(change(atom.args[0]))
            case "inside":
                return self.inside(change(atom.args[0]), atom.args[1])
            case "sum":
                # Bound variables step aside first: what comes in may hold sums of the same height.
                fresh = {b: -2_000_000 - atom.height * _SUM_WIDTH - k for k, b in enumerate(self.bound_of(atom))}
                opened = self.substitute(Poly({atom.args[1]: 1.0}), {b: self.var(f) for b, f in fresh.items()})
                sizes = {fresh[b]: s for b, s in zip(self.bound_of(atom), atom.args[0], strict=True)}
                return self.sum(change(opened), sizes)
            case _:
                raise AssertionError(atom.kind)

    def _renamed_sum(self, atom: Atom, names: Mapping[int, Poly]) -> Poly | None:
        """A sum over one variable whose free variables get other names, which moves nothing into or out of it."""
        targets = {self._variable_of(p) for p in names.values()}
        if len(atom.args[0]) != 1 or None in targets or len(targets) != len(names):
            return None
        if targets & (atom.free - names.keys()):
            return None
        changed = self.substitute(Poly({atom.args[1]: 1.0}), names)
        if len(changed.terms) != 1:
            return None
        ((monomial, c),) = changed.terms.items()
        return self._intern("sum", atom.args[0], monomial).poly.scaled(c)

    # For reports and for people

    def text(self, poly: Poly) -> str:
        """The polynomial as text, for messages."""
        if not poly:
            return "0"
        return " + ".join(
            (f"{_digits(c)} " if c != 1.0 or m == ONE else "") + " ".join(self._factor(a, e) for a, e in m)
            for m, c in sorted(poly.terms.items())
        )

    def _factor(self, a: int, e: Exponent) -> str:
        atom = self.atoms[a]
        match atom.kind:
            case "var":
                base = f"v{atom.args[0]}"
            case "dim":
                base = str(atom.args[0])
            case "tensor":
                base = f"{atom.args[0]}[{', '.join(self.text(p) for p in atom.args[1:])}]"
            case "sum":
                names = ",".join(f"v{v}" for v in self.bound_of(atom))
                base = f"sum_{names}({self.text(Poly({atom.args[1]: 1.0}))})"
            case "exp":
                base = f"exp({self.text(Poly({atom.args[0]: 1.0}))})"
            case "eq":
                base = f"[{self.text(atom.args[0])} = 0]"
            case "lt":
                base = f"[{self.text(atom.args[0])} < 0]"
            case "inside":
                base = f"[0 <= {self.text(atom.args[0])} < {self.text(atom.args[1])}]"
            case "wide":
                base = f"[{self.text(atom.args[0])} != 1]"
            case kind:
                base = f"{kind}({self.text(atom.args[0])})"
        return base if e == 1 else f"{base}^{e}"


_DISCRETE = {"tensor", "eq", "lt", "inside", "wide"}


def _key(kind: str, args: Iterable[Any]) -> tuple[Any, ...]:
    """What an atom is known by. A condition is true or false, an index right or wrong: there nothing is rounded."""
    if kind not in _DISCRETE:
        return (kind, *args)
    return (kind, *[frozenset(a.terms.items()) if isinstance(a, Poly) else a for a in args])


def _plain(e: Exponent) -> Exponent:
    if not -_EXPONENT_LIMIT <= e <= _EXPONENT_LIMIT or (isinstance(e, Fraction) and e.denominator > _EXACT):
        raise TooComplex("an exponent of many digits")
    return e if type(e) is int else int(e) if e == int(e) else e


def _raised(c: float, exponent: Exponent) -> float:
    """A coefficient to a power."""
    try:
        result: float = float(c) ** float(exponent)
    except OverflowError:
        raise TooComplex(f"a coefficient of {c} to the {exponent}") from None
    if result == 0.0:
        raise TooComplex(f"a coefficient of {c} to the {exponent}")
    return result


def _is_exact(c: float) -> bool:
    """Whether the number is an integer that is no rounded one."""
    return -_EXACT < c < _EXACT and c == int(c)


def _six_digits(c: float) -> float:
    return c if _is_exact(c) else float(f"{c:.6g}")


def _digits(c: float) -> str:
    return str(int(c)) if _is_exact(c) else f"{c:.6g}"


def _as_exponent(c: float) -> Exponent:
    """A constant as an exponent: a fraction that it is but for rounding, else all of its digits."""
    near = Fraction(c).limit_denominator(_DENOMINATOR_LIMIT)
    return _plain(near if abs(near - Fraction(c)) <= abs(c) * 1e-9 else Fraction(c))


def _collected(items: Iterable[tuple[Monomial, float]]) -> Poly:
    """The sum of the terms; what cancels up to rounding is zero, as sums of float32 constants need not meet exactly."""
    sums: dict[Monomial, float] = {}
    peaks: dict[Monomial, float] = {}  # of the terms that met and are no integers
    for m, c in items:
        known = sums.get(m)
        if known is None:
            sums[m] = c
            continue
        sums[m] = known + c
        if m in peaks or not (_is_exact(known) and _is_exact(c)):
            peak = peaks[m] = max(peaks.get(m) or abs(known), abs(c))
            if c and abs(c) < _ABSORBED * peak:
                raise TooComplex(f"a coefficient of {c} beside one of {peak}")
            if known and abs(known) < _ABSORBED * abs(c):
                raise TooComplex(f"a coefficient of {known} beside one of {c}")
    if not peaks:
        return Poly(sums)
    return Poly({m: c for m, c in sums.items() if abs(c) > _CANCELS * peaks.get(m, 0.0)})
