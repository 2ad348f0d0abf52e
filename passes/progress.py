"""Progress of long work, for whoever wants to show it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias, TypeVar

Progress: TypeAlias = Callable[[str, int, int], None]
"""Called now and then with what is being done, how many nodes of a graph are done, and how many it has."""

_EVERY = 256
_Item = TypeVar("_Item")


def counted(items: Sequence[_Item], what: str, progress: Progress | None) -> Iterator[_Item]:
    """The items, one by one; reports them to `progress` as they go by."""
    for k, item in enumerate(items):
        if progress is not None and k % _EVERY == 0:
            progress(what, k, len(items))
        yield item
    if progress is not None:
        progress(what, len(items), len(items))
