"""Large arrays by sums of their elements: what is compared of them takes less memory than they do."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

LARGEST = 2**20
"""Arrays of more elements are condensed."""
SUMS = 2**16
_ROWS = 64
"""So many elements of each sum are added up at once."""


def condensed(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return an array, or `SUMS` sums of its elements in float64 if it has more than `LARGEST`.

    Element i is in sum i mod `SUMS`, with a random sign that its place alone decides (a count sketch: Charikar, Chen,
    Farach-Colton, "Finding frequent items in data streams"). It is linear: the sums of a difference are the difference
    of the sums. An error of one element moves its sum by as much. Errors of several cancel only by chance, and those
    of rounding add up to about the root of their number. Elements that are not finite make their sums so.
    """
    flat = array.reshape(-1)
    if flat.size <= LARGEST or flat.dtype.kind in "biuc":
        return array
    signs = np.random.Generator(np.random.Philox(key=0))
    sums = np.zeros(SUMS)
    with np.errstate(invalid="ignore"):
        for begin in range(0, flat.size, SUMS * _ROWS):
            part = flat[begin : begin + SUMS * _ROWS].astype(np.float64)
            negative = np.unpackbits(np.frombuffer(signs.bytes(SUMS * _ROWS // 8), np.uint8), count=part.size)
            np.negative(part, out=part, where=negative.view(np.bool_))
            whole = part.size // SUMS * SUMS
            sums += part[:whole].reshape(-1, SUMS).sum(0)
            sums[: part.size - whole] += part[whole:]
    return sums
