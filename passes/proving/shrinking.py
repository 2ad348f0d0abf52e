"""Small numbers for the large static sizes of a subgraph, as a graph of a real model is too large to be run.

A *table* maps each size that is replaced to a smaller one. The constants of a graph often repeat its sizes (the shape
of a Reshape, the 1 / N of a mean), so they are replaced as well. Which of them are sizes is a guess. There are several
ways to guess, and one that works is enough: wrong ones make a subgraph that fails or that differs from the fused op.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from gradfuse.passes.proving.verdicts import Unproved

Table = Mapping[int, int]

ELEMENT_LIMIT = 1 << 18  # of all leaves together; larger static sizes are shrunk
FULL_LIMIT = 1 << 21  # of all leaves, where no shrinking keeps the subgraph valid
LINEAR_LIMIT = 1 << 18  # of all leaves, where convolutions are run
KEPT_SIZE = 8  # static sizes up to this are never shrunk
_ATTEMPTS = 9


def attempts(elements: Callable[[Table], int], sizes: Callable[[], set[int]]) -> Iterator[tuple[Table, bool]]:
    """Yield ways to run a subgraph: the sizes to replace, and whether floats that are made of sizes go with them.

    The table is empty where the sizes are small enough as they are.

    Args:
        elements: how many elements the leaves have in the sizes of a table.
        sizes: the static sizes of the subgraph; asked for only where they are too large.

    Raises:
        Unproved: the subgraph is too large in every table.
    """
    for table in _tables(elements, sizes):
        yield table, False
        if table:
            yield table, True


def given(elements: Callable[[Table], int], table: Table) -> Iterator[tuple[Table, bool]]:
    """Yield the ways to run a subgraph of which a rule knows smaller sizes, as :func:`attempts`.

    Raises:
        Unproved: it is too large, with these sizes and without.
    """
    count = elements(table)
    if count > LINEAR_LIMIT:
        raise Unproved(f"{count} elements are too many to run, and cannot be made fewer")
    yield table, False


def _tables(elements: Callable[[Table], int], sizes: Callable[[], set[int]]) -> Iterator[Table]:
    count = elements({})
    if count <= ELEMENT_LIMIT:
        yield {}
        return
    known = sizes()
    large = sorted((n for n in known if n > KEPT_SIZE), reverse=True)
    some = [_shrunk(known, known - {n}) for n in reversed(large)] + [_shrunk(known, {n}) for n in large]
    affordable = [t for t in (_shrunk(known, known), *some, {}) if elements(t) <= FULL_LIMIT]
    if not affordable:
        raise Unproved(f"{count} elements are too many to run, and cannot be made fewer")
    yield from affordable[:_ATTEMPTS]


def _shrunk(sizes: set[int], free: set[int]) -> dict[int, int]:
    """A table for the large sizes that are free. It keeps their order, products and sums as far as it can."""
    table = {1: 1}
    latest = KEPT_SIZE + 1
    for n in sorted(sizes):
        if n <= KEPT_SIZE or n not in free:
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


def resized(array: npt.NDArray[Any], table: Table, rescale: bool) -> npt.NDArray[Any]:
    """Return a constant in the small sizes: its dimensions, integers that are sizes, and floats made of sizes."""
    if not table:
        return array
    array = array[tuple(slice(0, table.get(n, n)) for n in array.shape)]
    if array.dtype.kind in "iu":
        return np.asarray([table.get(int(n), int(n)) for n in array.flat], array.dtype).reshape(array.shape)
    if rescale and array.dtype.kind == "f" and array.size and np.all(array == array.flat[0]):
        return np.full(array.shape, _rescaled(float(array.flat[0]), table))
    return array


def _rescaled(number: float, table: Table) -> float:
    """The number for the small sizes, if it is a round one times or over large ones, as 2 / N is."""

    def is_round(x: float) -> bool:
        return abs(float(f"{x:.1e}") - x) <= 1e-6 * abs(x)

    large = sorted(table, reverse=True)[:6]
    different = (chosen for count in (1, 2, 3) for chosen in itertools.combinations(large, count))
    repeated = (chosen for count in (2, 3) for chosen in itertools.combinations_with_replacement(large, count))
    for chosen in itertools.chain(different, repeated):
        for power in (1, -1):
            if is_round(number * math.prod(n**power for n in chosen)) and not is_round(number):
                return number * math.prod((n / table[n]) ** power for n in chosen)
    return number
