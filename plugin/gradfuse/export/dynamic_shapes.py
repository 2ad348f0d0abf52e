"""The argument `dynamic_shapes` of `export_training_step`, brought from its accepted forms into one.

This module imports torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from torch.export import Dim

from gradfuse.export.reporting import kind, refusal
from gradfuse.export.torch_step import TorchStep

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
            ExportError: it has another form, or names a tensor or an axis that is not there.
        """
        inputs, targets = _parts(given, step)
        if len(inputs) != len(step.inputs) or len(targets) != len(step.targets):
            raise refusal(f"dynamic_shapes is for {len(inputs)} inputs and {len(targets)} targets; {_WANTED}")
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
    if isinstance(given, Mapping):
        unknown = sorted(set(given) - set(step.batch))
        if unknown:
            raise refusal(f"dynamic_shapes names {unknown[0]!r}; expected names among {sorted(step.batch)}")
        return [given.get(name) for name in step.input_names], [given.get(name) for name in step.target_names]
    if isinstance(given, (tuple, list)) and len(given) == 2:
        inputs, targets = given
        return _each(inputs, len(step.inputs)), _each(targets, len(step.targets))
    raise refusal(f"dynamic_shapes is {kind(given)}; {_WANTED}")


def _each(part: Any, count: int) -> Sequence[Any]:
    # What is given for one tensor may stand alone.
    listed = isinstance(part, (tuple, list)) and any(isinstance(one, (Mapping, tuple, list)) for one in part)
    if count == 1 and not listed:
        return (part,)
    return (None,) * count if part is None else part
