"""How the tensors of a batch are nested: in tuples, lists, dictionaries and objects, as a module takes them.

A nesting is data that JSON can hold: the name of a tensor; a list of nestings, for tuples and lists; `{"entries":
[[key, nesting], ...]}` for dictionaries and attributes of objects; or `{"value":
x}` for anything but a tensor. That of all inputs, or of all targets, is
`{"arguments": [[name, nesting], ...], "keywords": bool}`: the arguments of a call; with `"needed": [name, ...]`, those
without tensors that may not be left out, as the call would take other defaults.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

from gradfuse.errors import ArgumentError, few
from gradfuse.training.arguments import in_short


def flat(names: Sequence[str]) -> dict[str, Any]:
    """Return the nesting of tensors that are arguments themselves."""
    return {"arguments": [[name, name] for name in names], "keywords": False}


def names_in(nesting: Any) -> Iterator[str]:
    """Yield the names of the tensors in a nesting, in its order."""
    if isinstance(nesting, str):
        yield nesting
    elif isinstance(nesting, list):
        for one in nesting:
            yield from names_in(one)
    else:
        for _, one in nesting.get("arguments", nesting.get("entries", [])):
            yield from names_in(one)


def leaves_of_call(nesting: Any, given: Any, where: str) -> dict[str, Any]:
    """Return name -> what is given for the tensor.

    Args:
        nesting: that of the arguments of a call.
        given: the arguments: a tuple or list of them, a single one, or a dictionary by their names or by those of the
            tensors.
        where: what messages begin with.

    Raises:
        ArgumentError: it is nested in another way.
    """
    arguments = dict(nesting["arguments"])
    found: dict[str, Any] = {}
    if isinstance(given, Mapping):
        every, unknown = list(names_in(nesting)), []
        for key, one in given.items():
            if key in arguments:
                found |= leaves(arguments[key], one, f"{where} {key}")
            elif key in every:
                found[key] = one
            else:
                unknown.append(key)
        missing = [name for name in every if name not in found]
        if missing or unknown:
            fault = f"lack {missing[0]!r}" if missing else f"have {in_short(unknown[0])}"
            raise ArgumentError(f"{where} {fault}; expected {few(every) or 'none'}")
        _require_needed(nesting, given, where)
        return found
    if nesting["keywords"]:
        raise ArgumentError(f"{where} are {type(given).__name__}; expected a dictionary of {few(arguments)}")
    values = list(given) if isinstance(given, (tuple, list)) else [] if given is None else [given]
    if len(values) > len(arguments) or any(any(names_in(one)) for one in list(arguments.values())[len(values) :]):
        # Trailing arguments that are not tensors may be left out, as in a call whose defaults they are.
        wanted = f"{len(arguments)}: {few(arguments)}" if arguments else "none"
        raise ArgumentError(f"{where} are {len(values)}; expected {wanted}")
    _require_needed(nesting, list(arguments)[: len(values)], where)
    for (name, one), value in zip(arguments.items(), values, strict=False):
        if isinstance(one, str):
            found[one] = value
        else:
            found |= leaves(one, value, f"{where} {name}")
    return found


def _require_needed(nesting: Any, given: Container[str], where: str) -> None:
    for name in nesting.get("needed", ()):
        if name not in given:
            one = dict(nesting["arguments"])[name]
            wanted = f"{one['value']!r}, as in" if "value" in one else "what it was in"
            raise ArgumentError(f"{where} lack {name!r}; expected {wanted} the exported step")


def _is_none(nesting: Any) -> bool:
    """Whether there is nothing but None in a nesting."""
    if isinstance(nesting, str):
        return False
    if isinstance(nesting, dict) and "value" in nesting:
        return nesting["value"] is None
    return all(map(_is_none, nesting if isinstance(nesting, list) else (one for _, one in nesting["entries"])))


def leaves(nesting: Any, given: Any, where: str) -> dict[str, Any]:
    """Return name -> what is given for the tensor, of one argument or a part of it.

    Raises:
        ArgumentError: it is nested in another way, or what is no tensor differs.
    """
    if isinstance(nesting, str):
        return {nesting: given}
    found: dict[str, Any] = {}
    if isinstance(nesting, list):
        if not isinstance(given, (tuple, list)) or len(given) != len(nesting):
            got = f"of {len(given)} parts" if isinstance(given, (tuple, list)) else type(given).__name__
            raise ArgumentError(f"{where} is {got}; expected a tuple of {len(nesting)}")
        for index, (one, value) in enumerate(zip(nesting, given, strict=True)):
            found |= leaves(one, value, f"{where}.{index}")
    elif "entries" in nesting:
        keys = [key for key, _ in nesting["entries"]]
        if isinstance(given, (tuple, list)) and len(given) == len(keys):
            # A named tuple, or one without names.
            given = dict(zip(keys, given, strict=True))
        if isinstance(given, Mapping) and (other := [key for key in given if key not in keys]):
            raise ArgumentError(f"{where} has {in_short(other[0])}; expected {few(map(str, keys))}")
        for key, one in nesting["entries"]:
            lacks = key not in given if isinstance(given, Mapping) else not hasattr(given, str(key))
            if lacks and _is_none(one):
                continue
            if lacks:
                raise ArgumentError(f"{where} lacks {key!r}; expected {few(map(str, keys))}")
            value = given[key] if isinstance(given, Mapping) else getattr(given, str(key))
            found |= leaves(one, value, f"{where}.{key}")
    elif type(given) is not type(nesting["value"]) or given != nesting["value"]:
        raise ArgumentError(f"{where} is {in_short(given)}; expected {nesting['value']!r}, as in the exported step")
    return found
