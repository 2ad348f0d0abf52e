"""Polynomials with float64 coefficients, and the arithmetic of their coefficients and exponents.

A :class:`Poly` is a sum of terms, each a coefficient times a :data:`Monomial`: a product of powers of atoms, which are
numbers here (see atoms.py). This module adds and scales polynomials. What needs to know the atoms is elsewhere.

Invariants: no coefficient is 0, no polynomial has more than `TERM_LIMIT` terms, the factors of a monomial are in the
order of their atoms, and an exponent that is whole is an int. A coefficient keeps its digits: what overflows,
underflows, or would vanish beside a much larger number raises :class:`TooComplex`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from fractions import Fraction
from functools import lru_cache

Exponent = int | Fraction
Monomial = tuple[tuple[int, Exponent], ...]
"""The atoms of a product, as numbers in increasing order, each with its exponent."""
Pattern = tuple[int, tuple[object, ...]]
"""The number of a pattern (see patterns.py), and the tensors that stand in its places."""

ONE: Monomial = ()
TERM_LIMIT = 64
"""Terms that a polynomial may have. A value that needs more is opaque."""
_CANCELS = 1e-7  # relative size below which a difference of float32 constants is rounding
_ABSORBED = 1e-9  # relative size below which a number would lose its digits in a sum
_SMALLEST = 2.0**-1022  # numbers nearer to 0 have fewer digits
_EXACT = 2.0**53  # float64 has every integer up to here
_EXPONENT_LIMIT = 1 << 20
_DENOMINATOR_LIMIT = 1_000_000


class TooComplex(Exception):
    """A polynomial outgrew a limit, or an operation has no rule. The value is then opaque."""


class Poly:
    """An immutable polynomial.

    Two polynomials are equal if they have the same monomials, and coefficients that agree to six digits (integers:
    exactly).

    Raises:
        TooComplex: there are too many terms, or a coefficient is infinite or next to nothing.
    """

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
        self._free: frozenset[int] | None = None  # filled by Atoms.free
        self.pattern = pattern

    @property
    def key(self) -> frozenset[tuple[Monomial, float]]:
        """What equality compares: the terms, with coefficients to six digits."""
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
        """The value if the polynomial is a whole number, else None."""
        value = self.constant
        return int(value) if value is not None and value == int(value) else None

    def __add__(self, other: Poly) -> Poly:
        if not other.terms:
            return self
        if not self.terms:
            return other
        return collected(itertools.chain(self.terms.items(), other.terms.items()))

    def __neg__(self) -> Poly:
        return self.scaled(-1.0)

    def __sub__(self, other: Poly) -> Poly:
        return self + (-other)

    def scaled(self, factor: float) -> Poly:
        """The polynomial times a number."""
        return self if factor == 1.0 else Poly({m: times(c, factor) for m, c in self.terms.items()})

    def close_to(self, other: Poly, tolerance: float) -> bool:
        """Whether both have the same monomials, and coefficients that agree to the relative tolerance."""
        if self.terms.keys() != other.terms.keys():
            return False
        return all(
            abs(c - other.terms[m]) <= tolerance * max(abs(c), abs(other.terms[m])) for m, c in self.terms.items()
        )


@lru_cache(1 << 12)
def number(value: float) -> Poly:
    """The polynomial that is a number."""
    return Poly({ONE: float(value)})


ZERO = number(0)
UNIT = number(1)


def collected(items: Iterable[tuple[Monomial, float]]) -> Poly:
    """The sum of terms. What cancels up to rounding is zero, as sums of float32 constants need not meet exactly."""
    sums: dict[Monomial, float] = {}
    peaks: dict[Monomial, float] = {}  # the largest coefficients of terms that met, where these are not all integers
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


def times(a: float, b: float) -> float:
    """The product of two coefficients, which is 0 only where one of them is.

    Raises:
        TooComplex: it is too small for float64.
    """
    product = a * b
    if product == 0.0 and a != 0.0 and b != 0.0:
        raise TooComplex(f"a coefficient of {a} times {b}")
    return product


def raised(c: float, exponent: Exponent) -> float:
    """A coefficient to a power.

    Raises:
        TooComplex: it overflows, or is too small for float64.
    """
    try:
        result: float = float(c) ** float(exponent)
    except OverflowError:
        raise TooComplex(f"a coefficient of {c} to the {exponent}") from None
    if result == 0.0:
        raise TooComplex(f"a coefficient of {c} to the {exponent}")
    return result


def plain_exponent(e: Exponent) -> Exponent:
    """The exponent, as an int if it is whole.

    Raises:
        TooComplex: it is too large or has too many digits.
    """
    if not -_EXPONENT_LIMIT <= e <= _EXPONENT_LIMIT or (isinstance(e, Fraction) and e.denominator > _EXACT):
        raise TooComplex("an exponent of many digits")
    return e if type(e) is int else int(e) if e == int(e) else e


def as_exponent(c: float) -> Exponent:
    """A constant as an exponent: a simple fraction if it is one but for rounding, else with all of its digits."""
    near = Fraction(c).limit_denominator(_DENOMINATOR_LIMIT)
    return plain_exponent(near if abs(near - Fraction(c)) <= abs(c) * 1e-9 else Fraction(c))


def digits(c: float) -> str:
    """A coefficient as text."""
    return str(int(c)) if _is_exact(c) else f"{c:.6g}"


def _is_exact(c: float) -> bool:
    """Whether the number is an integer that float64 has not rounded."""
    return -_EXACT < c < _EXACT and c == int(c)


def _six_digits(c: float) -> float:
    return c if _is_exact(c) else float(f"{c:.6g}")
