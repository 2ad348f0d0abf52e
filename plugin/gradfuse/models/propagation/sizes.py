"""Sizes: numbers, names of dimensions, or None where nothing is known."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import onnx_ir as ir

Size: TypeAlias = "int | str | None"
Sizes: TypeAlias = "list[Size]"
Product: TypeAlias = "tuple[int, list[str]]"
"""A number, and the names that it is multiplied by, sorted."""

_FREE = frozenset({"", "?", "-1", "*", "None", "none"})
"""What exporters call dimensions of which they know nothing: two of them need not be equal."""


class Unknown(Exception):
    """A rule does not know what a node gives."""


def declared(shape: ir.Shape) -> Sizes:
    """Return the sizes of a declared shape: what is no name and no size is free."""
    return [size_of(dim) for dim in shape]


def size_of(dim: object) -> Size:
    """Return what a dimension of a model says of its size."""
    if isinstance(dim, int):
        return dim if dim >= 0 else None
    name = getattr(dim, "value", None)
    return name if isinstance(name, str) and name not in _FREE else None


def broadcast(*shapes: Sequence[Size]) -> Sizes:
    """Return the sizes that shapes are broadcast to, None where it is not known which of two sizes is 1."""
    found: Sizes = [1] * max(map(len, shapes), default=0)
    for shape in shapes:
        for axis, size in enumerate(shape, len(found) - len(shape)):
            before = found[axis]
            if before == 1 or (isinstance(size, int) and size != 1):
                found[axis] = size
            elif size != 1 and not isinstance(before, int) and size != before:
                found[axis] = None
    return found


def product(sizes: Iterable[Size]) -> Product | None:
    """Return a product as a number and the names it is multiplied by; None where a factor is unknown."""
    number, names = 1, []
    for size in sizes:
        if size is None:
            return None
        if isinstance(size, int):
            number *= size
        else:
            names.append(size)
    return number, sorted(names)


def product_of(sizes: Iterable[Size]) -> Size:
    """A product of sizes as one size, where it is a number or a name."""
    found = product(sizes)
    if found is None:
        return None
    number, names = found
    return number if number == 0 or not names else names[0] if number == 1 and len(names) == 1 else None


def quotient_of(whole: Sequence[Size], part: Sequence[Size]) -> Size:
    """What a product of sizes is divided by another."""
    left, others = [*whole], []
    for size in part:
        if size in left and size is not None:
            left.remove(size)
        else:
            others.append(size)
    above, below = product(left), product(others)
    if above is None or below is None or not below[0]:
        return None
    names = [*above[1]]
    for name in below[1]:
        if name not in names:
            return None
        names.remove(name)
    number, rest = divmod(above[0], below[0])
    if rest:
        return None
    return number if not names else names[0] if number == 1 and len(names) == 1 else None


def normal_axis(axis: int, rank: int) -> int:
    if not -rank <= axis < max(rank, 1):
        raise Unknown
    return axis % max(rank, 1)


def letter_sizes(term: str, sizes: Sequence[Size]) -> tuple[Sizes, dict[str, Size]]:
    """Return the sizes that `...` stands for in a term of an Einsum, and those of its letters.

    Raises:
        Unknown: the term has another number of letters.
    """
    letters = term.replace("...", "")
    ahead = len(term.partition("...")[0]) if "..." in term else len(letters)
    count = len(sizes) - len(letters)
    if count < 0 or (count and "..." not in term):
        raise Unknown
    own = [*sizes[:ahead], *sizes[ahead + count :]]
    return [*sizes[ahead : ahead + count]], dict(zip(letters, own, strict=True))
