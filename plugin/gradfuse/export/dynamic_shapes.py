"""The argument `dynamic_shapes` of `export_training_step`, normalised from its accepted forms.

This module imports torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from torch.export import Dim

from gradfuse.errors import few
from gradfuse.export.arguments import Arguments
from gradfuse.export.reporting import kind, refusal
from gradfuse.export.torch_step import TorchStep
from gradfuse.training.nesting import names_in

AxisNames = dict[str, dict[int, str]]
"""Tensor of the batch -> axis -> name of the dimension."""

_WANTED = "expected (inputs, targets) like the batch, or a dictionary by name"


@dataclasses.dataclass(frozen=True)
class DynamicShapes:
    """The dynamic axes of a batch.

    Attributes:
        inputs: for each input what `torch.export.export` takes.
        targets: for each target likewise.
        names: the names of the dynamic dimensions in the ONNX model.
        automatic: the tensors and axes of those that may turn out static, as Dim.AUTO says.
    """

    inputs: tuple[Any, ...]
    targets: tuple[Any, ...]
    names: AxisNames
    automatic: frozenset[tuple[str, int]]

    @classmethod
    def of(cls, given: Any, step: TorchStep) -> DynamicShapes:
        """Read the argument; strings become dynamic dimensions.

        Raises:
            ExportError: it has another form, or names a tensor or an axis that does not exist.
        """
        inputs, targets = _parts(given, step)
        names: AxisNames = {}
        automatic: set[tuple[str, int]] = set()
        specifications: list[Any] = []
        for (name, tensor), given_axes in zip(step.batch.items(), (*inputs, *targets), strict=True):
            axes = dict(given_axes) if isinstance(given_axes, Mapping) else dict(enumerate(given_axes or ()))
            specification = {}
            for axis, dim in axes.items():
                if not isinstance(axis, int) or not 0 <= axis < tensor.dim():
                    raise refusal(f"dynamic_shapes of {name!r} has axis {axis!r}; expected 0 to {tensor.dim() - 1}")
                if dim is None or isinstance(dim, int) or dim is Dim.STATIC:
                    specification[axis] = dim
                    continue
                specification[axis] = Dim.DYNAMIC if isinstance(dim, str) else dim
                if dim is Dim.AUTO:
                    automatic.add((name, axis))
                label = dim if isinstance(dim, str) else getattr(dim, "__name__", None)
                names.setdefault(name, {})[axis] = label or ("batch" if axis == 0 else f"{name}_{axis}")
            specifications.append(specification or None)
        split = len(step.inputs)
        return cls(
            inputs=tuple(specifications[:split]),
            targets=tuple(specifications[split:]),
            names=names,
            automatic=frozenset(automatic),
        )


def _parts(given: Any, step: TorchStep) -> tuple[Sequence[Any], Sequence[Any]]:
    """Return what is given for each input and for each target."""
    if given is None:
        return (None,) * len(step.inputs), (None,) * len(step.targets)
    parts = step.given_inputs, step.given_targets
    if isinstance(given, Mapping):
        known = [name for part in parts for name in (*part.names, *dict(part.nesting["arguments"]))]
        unknown = [name for name in given if name not in known]
        if unknown:
            names = few(map(repr, sorted(step.batch)))
            raise refusal(f"dynamic_shapes names {unknown[0]!r}; expected names among [{names}]")
        return _by_name(parts[0], given), _by_name(parts[1], given)
    if isinstance(given, (tuple, list)) and len(given) == 2:
        inputs, targets = (_arguments(part, one) for part, one in zip(parts, given, strict=True))
        if any(len(one) != len(part.nesting["arguments"]) for part, one in zip(parts, (inputs, targets), strict=True)):
            raise refusal(f"dynamic_shapes is for {len(inputs)} inputs and {len(targets)} targets; {_WANTED}")
        return _each(parts[0], inputs), _each(parts[1], targets)
    raise refusal(f"dynamic_shapes is {kind(given)}; {_WANTED}")


def _by_name(part: Arguments, given: Mapping[Any, Any]) -> list[Any]:
    found: dict[str, Any] = {}
    for name, nesting in part.nesting["arguments"]:
        found |= _of_tensors(nesting, given.get(name), name)
    return [given.get(name, found[name]) for name in part.names]


def _arguments(part: Arguments, given: Any) -> Sequence[Any]:
    """Return what is given for each argument of a part of the batch."""
    arguments = dict(part.nesting["arguments"])
    if isinstance(given, Mapping) and given and all(isinstance(key, str) for key in given):
        unknown = [name for name in given if name not in arguments]
        if unknown:
            raise refusal(f"dynamic_shapes names {unknown[0]!r}; expected names among [{few(map(repr, arguments))}]")
        return [given.get(name) for name in arguments]
    # What is given for one tensor may stand alone.
    listed = isinstance(given, (tuple, list)) and any(isinstance(one, (Mapping, tuple, list)) for one in given)
    if len(arguments) == 1 and not listed:
        return (given,)
    return (None,) * len(arguments) if given is None else tuple(given)


def _each(part: Arguments, given: Sequence[Any]) -> list[Any]:
    """Return what is given for each tensor, of what is given for each argument."""
    found: dict[str, Any] = {}
    for (name, nesting), one in zip(part.nesting["arguments"], given, strict=True):
        found |= _of_tensors(nesting, one, name)
    return [found[name] for name in part.names]


def _of_tensors(nesting: Any, given: Any, where: str) -> dict[str, Any]:
    """Return what is given for each tensor within an argument; for None, that none of its axes may vary."""
    if isinstance(nesting, str):
        return {nesting: given}
    if given is None:
        return dict.fromkeys(names_in(nesting))
    if "value" in nesting:
        return {}
    parts = list(enumerate(nesting)) if isinstance(nesting, list) else nesting["entries"]
    if isinstance(given, (tuple, list)) and len(given) == len(parts):
        values = list(given)
    elif isinstance(given, Mapping) and isinstance(nesting, dict) and all(key in dict(parts) for key in given):
        values = [given.get(key) for key, _ in parts]
    else:
        raise refusal(f"dynamic_shapes of {where!r} is {kind(given)}; expected {len(parts)} parts, as the batch has")
    found: dict[str, Any] = {}
    for (key, one), value in zip(parts, values, strict=True):
        found |= _of_tensors(one, value, f"{where}.{key}")
    return found
