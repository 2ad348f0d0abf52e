"""The batch of a step as the arguments of a call, and as tensors with names. This module imports torch."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gradfuse import _torch_private as private
from gradfuse.errors import few
from gradfuse.export.reporting import kind, refusal
from gradfuse.training.nesting import names_in


@dataclasses.dataclass(frozen=True)
class Arguments:
    """The arguments of a call, nested in tuples, lists, dictionaries and objects that PyTorch knows to flatten.

    Attributes:
        tensors: the tensors in them, in PyTorch's order.
        names: the names of these: those of the arguments, and `hidden.0`, `image.mask` for what is within one.
        nesting: where they are, as `gradfuse.training.nesting` has it.
    """

    tensors: tuple[Tensor, ...]
    names: tuple[str, ...]
    nesting: Any
    _leaves: tuple[Any, ...]
    _unflatten: Callable[[list[Any]], Any]

    @classmethod
    def of(
        cls, given: Any, which: str, function: Callable[..., Any], skipped: int, default: str, taken: set[str]
    ) -> Arguments:
        """Read one part of a batch.

        Args:
            given: a dictionary of arguments by name, a tuple or list of them, a single one, or None: there are none.
            which: what it is, for messages.
            function: what is called with them.
            skipped: how many arguments of it go ahead.
            default: what an argument is called whose name is not known.
            taken: names that no tensor may have; it grows.

        Raises:
            ExportError: there is something that is no tensor.
        """
        # Such as what transformers' tokenizers give.
        keywords = dict(given) if isinstance(given, Mapping) else {}
        single = not isinstance(given, (tuple, list))
        positional = () if isinstance(given, Mapping) or given is None else (given,) if single else tuple(given)
        places, unflatten = private.flattened_with_keys((positional, keywords))
        arguments = [*argument_names(function, skipped, len(positional), default, taken), *keywords]
        tensors, names = [], []
        nestings: dict[tuple[Any, ...], Any] = {}
        for keys, leaf in places:
            first = arguments[keys[1]] if keys[0] == 0 else keys[1]
            if not all(isinstance(key, (int, str)) for key in keys):
                raise refusal(f"{which} of the batch have the keys {keys[1:]}; expected strings or whole numbers")
            if not isinstance(leaf, Tensor):
                if not (leaf is None or isinstance(leaf, (bool, str))):
                    raise refusal(f"{which} of the batch hold {kind(leaf)}; expected tensors{_advice(leaf)}")
                nestings[keys] = {"value": leaf}
                continue
            if leaf.layout != torch.strided:
                raise refusal(
                    f"{which} of the batch hold {first!r}, which is {leaf.layout}; expected a dense tensor: keep a "
                    "constant matrix as a buffer of the module, and make another by torch.sparse_coo_tensor of its "
                    "indices, values and size"
                )
            if len(keys) == 2 and keys[0] == 0:
                name = str(first)
            else:
                name = ".".join(map(str, (first, *keys[2:])))
                while name in taken:
                    name = f"{default}_{name}"
                taken.add(name)
            nestings[keys] = name
            names.append(name)
            # torch.export guards what a view shares with its base, and cannot check that.
            tensors.append(leaf.detach().clone())
        own = (*((0, index) for index in range(len(positional))), *((1, key) for key in keywords))
        nested = [_nested({keys[2:]: one for keys, one in nestings.items() if keys[:2] == place}) for place in own]
        defaults = _defaults(function, skipped, len(positional), list(keywords))
        nesting = {
            "arguments": [[str(name), one] for name, one in zip(arguments, nested, strict=True)],
            "keywords": bool(keywords),
            "needed": [
                str(name)
                for name, one, default in zip(arguments, nested, defaults, strict=True)
                if not (any(names_in(one)) or _is_default(one, default))
            ],
        }
        return cls(tuple(tensors), tuple(names), nesting, tuple(leaf for _, leaf in places), unflatten)

    def call(self, function: Callable[..., Any], first: Sequence[Any], tensors: Sequence[Tensor]) -> Any:
        """Call a function with other tensors in the same places, after its first arguments."""
        rest = iter(tensors)
        positional, keywords = self._unflatten(
            [next(rest) if isinstance(leaf, Tensor) else leaf for leaf in self._leaves]
        )
        return function(*first, *positional, **keywords)

    def require_taken(self, function: Callable[..., Any], skipped: int, what: str, which: str) -> None:
        """Refuse arguments that a function does not take, before it runs.

        Raises:
            ExportError: there are too many or too few.
        """
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError):
            # A function of C's.
            return
        try:
            self.call(signature.bind, (None,) * skipped, self.tensors)
        except TypeError as error:
            given = few(name for name, _ in self.nesting["arguments"]) or "none"
            wanted = few(list(signature.parameters)[skipped:]) or "none"
            if skipped and "missing" in str(error):
                # As torch's losses of pairs and triplets.
                wanted += "; of several outputs it gets one tuple: lambda outputs, *targets: loss(*outputs, *targets)"
            raise refusal(
                f"{what} does not take the {which} of the batch, {given}: {error}; expected {wanted}"
            ) from error


def _advice(leaf: Any) -> str:
    """Return how to hand over what is no tensor, for messages."""
    if isinstance(leaf, (int, float)):
        return ", as torch.tensor(x)"
    return f": call torch.export.register_dataclass({type(leaf).__name__})" if dataclasses.is_dataclass(leaf) else ""


def argument_names(
    function: Callable[..., Any], skip: int, count: int, default: str, taken: set[str]
) -> tuple[str, ...]:
    """Name `count` positional arguments of a function after the first `skip`, unlike any in `taken`, which grows."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    known = [parameter.name for parameter in parameters if parameter.kind in positional][skip:]
    names = []
    for index in range(count):
        name = known[index] if index < len(known) else f"{default}_{index}" if count > 1 else default
        while name in taken:
            name = f"{default}_{name}"
        taken.add(name)
        names.append(name)
    return tuple(names)


def _defaults(function: Callable[..., Any], skip: int, count: int, keywords: Sequence[str]) -> list[Any]:
    """Return what `count` positional arguments after the first `skip`, and keywords, are if they are left out.

    None for those that may not be left out: nothing else is computed then.
    """
    parameters: Mapping[str, inspect.Parameter] = {}
    with contextlib.suppress(TypeError, ValueError):  # A function of C's.
        parameters = inspect.signature(function).parameters
    known = {
        name: None if parameter.default is inspect.Parameter.empty else parameter.default
        for name, parameter in parameters.items()
    }
    found = list(known.values())[skip : skip + count]
    return [*found, *[None] * (count - len(found)), *map(known.get, keywords)]


def _is_default(nesting: Any, default: Any) -> bool:
    """Whether an argument without tensors is what it is if it is left out."""
    value = nesting.get("value", nesting) if isinstance(nesting, dict) else nesting
    return type(value) is type(default) and bool(value == default)


def _nested(leaves: Mapping[tuple[Any, ...], Any]) -> Any:
    """Return the nesting of leaves that are given by their keys, from outside on."""
    if () in leaves:
        return leaves[()]
    parts: dict[Any, dict[tuple[Any, ...], Any]] = {}
    for keys, one in leaves.items():
        parts.setdefault(keys[0], {})[keys[1:]] = one
    if all(isinstance(key, private.Index) for key in parts):
        return [_nested(part) for part in parts.values()]
    return {"entries": [[key, _nested(part)] for key, part in parts.items()]}
