"""Attributes with a number for each spatial dimension, or one for all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gradfuse.custom_ops.operator import Call, Value

MOST_SPATIAL = 3
_MOST = 2**31 - 1


def numbers_of(value: Value) -> tuple[int, ...]:
    """The value of an attribute that is a list of integers."""
    assert isinstance(value, tuple)
    return value


def per_axis(numbers: Sequence[int], spatial: int) -> list[int]:
    """A number for each of some spatial dimensions."""
    return list(numbers) * spatial if len(numbers) == 1 else list(numbers)


def paddings(numbers: Sequence[int], spatial: int) -> tuple[list[int], list[int]]:
    """What is added at the beginning and at the end of each spatial dimension."""
    if len(numbers) == 2 * spatial:
        return list(numbers[:spatial]), list(numbers[spatial:])
    return per_axis(numbers, spatial), per_axis(numbers, spatial)


def spatial_of(call: Call, lists: Mapping[str, int]) -> int | None:
    """The number of spatial dimensions, as far as inputs and the attributes of these names tell."""
    ranks = {name: len(one.shape) for name, one in call.inputs.items() if name != "bias" and one.shape is not None}
    for name, rank in ranks.items():
        if not 3 <= rank <= MOST_SPATIAL + 2:
            raise call.error(name, f"of rank {rank}", "rank 3 to 5: (N, C, ...)")
        first = next(iter(ranks))
        if rank != ranks[first]:
            raise call.error(name, f"of rank {rank}", f"rank {ranks[first]}, as {first}")
    if ranks:
        return next(iter(ranks.values())) - 2
    lengths = {len(numbers_of(call.attributes[name])) for name in lists if name != "padding"} - {1}
    return lengths.pop() if len(lengths) == 1 else None


def check_numbers(call: Call, spatial: int | None, lists: Mapping[str, int]) -> None:
    """Raise ArgumentError for attributes with too many or too few numbers, or one below the least of its attribute."""
    for name, least in lists.items():
        numbers = numbers_of(call.attributes[name])
        if spatial is not None:
            lengths = sorted({1, spatial, *([2 * spatial] if name == "padding" else [])})
            if len(numbers) not in lengths:
                raise call.error(name, list(numbers), f"{' or '.join(map(str, lengths))} numbers")
        if not numbers or not all(least <= number <= _MOST for number in numbers):
            raise call.error(name, list(numbers), f"numbers from {least} to {_MOST}")
