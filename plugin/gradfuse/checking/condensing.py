"""Large arrays by sums of their elements: what is compared of them takes less memory than they do."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

LARGEST = 2**18
"""Arrays of more elements are condensed."""
SUMS = 2**16
_ROWS = 4
"""How many elements of each sum are added up at once."""
_SIGNS = 1.0 - 2.0 * np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1)
"""The signs of eight elements by a random byte."""


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
    bits = np.random.Generator(np.random.Philox(key=0))
    sums = np.zeros(SUMS)
    count = SUMS * _ROWS
    # One piece of memory for all parts, which stays in the cache.
    memory = np.empty(count)
    with np.errstate(invalid="ignore"):
        for begin in range(0, flat.size, count):
            part = flat[begin : begin + count]
            signs = _SIGNS[np.frombuffer(bits.bytes(count // 8), np.uint8)].reshape(-1)
            signed = np.multiply(part, signs[: part.size], out=memory[: part.size])
            whole = part.size // SUMS * SUMS
            sums += signed[:whole].reshape(-1, SUMS).sum(0)
            sums[: part.size - whole] += signed[whole:]
    return sums
