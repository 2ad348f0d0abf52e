"""Tensors that several sessions share, as the two steps of a GAN share the weights of both networks."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from gradfuse.errors import ArgumentError
from gradfuse.training.arguments import TensorType
from gradfuse.training.step import DROPOUT_SEED, TrainingStep

if TYPE_CHECKING:
    from gradfuse.training.session import TrainingSession


def shareable(step: TrainingStep) -> tuple[str, ...]:
    """Return the names of the parameters, buffers and frozen weights that are inputs of a step.

    What it carries and its seed are each session's own.
    """
    own = {step.own_name(DROPOUT_SEED), *step.carried}
    return tuple(name for name in (*step.parameters, *step.buffers, *step.frozen) if name not in own)


class Shared:
    """Where the tensors that sessions share are.

    A session writes some of them in place and others into memory of its own, where all sessions then read them.
    """

    def __init__(self, first: TrainingSession, values: Mapping[str, Any]) -> None:
        self.members = [first]
        self._state: tuple[Mapping[str, Any], tuple[TrainingSession, int, Mapping[str, Any]] | None] = values, None
        """Where they were before the step that was begun last: whose that is, how many it had done, what it writes."""

    @property
    def is_stepping(self) -> bool:
        """Whether one of the sessions is in a step."""
        return any(session._is_stepping for session in self.members)

    @property
    def values(self) -> Mapping[str, Any]:
        """The current `onnxruntime.OrtValue` of each tensor."""
        values, begun = self._state
        if begun is None:
            return values
        session, runs, written = begun
        return {**values, **written} if session._runs > runs else values

    def begin(self, session: TrainingSession, written: Mapping[str, Any]) -> None:
        """Note that a session begins a step, which writes some tensors elsewhere."""
        self._state = self.values, (session, session._runs, written)

    def join(self, session: TrainingSession, values: Mapping[str, Any]) -> None:
        """Add a session with tensors that no other one has."""
        self.members.append(session)
        self._state = {**self.values, **values}, None


@dataclasses.dataclass(frozen=True)
class Sides:
    """What a session may share: types and shapes by name, what is a constant of its step, and what this changes."""

    types: Mapping[str, TensorType]
    constants: Collection[str]
    changed: Collection[str]


def require_common(where: str, own: Sides, others: Iterable[Sides]) -> None:
    """Refuse a step that cannot share the tensors of others; `where` is what messages begin with.

    Raises:
        ArgumentError: nothing is common, a tensor has another type or shape, or one step has it as a constant that
            another one changes.
    """
    common = False
    for other in others:
        for name, wanted in other.types.items():
            got = own.types.get(name, wanted)
            common |= name in own.types
            if got != wanted:
                raise ArgumentError(f"{where}: {name!r} is {got}; expected {wanted}, as in the other session")
        for one, by in ((own, other), (other, own)):
            stale = next((name for name in one.constants if name in by.changed), None)
            if stale is not None:
                raise ArgumentError(
                    f"{where}: {stale!r} is a constant of one step, and another one trains it; expected it to require "
                    "a gradient in both, with an optimizer that has it in one, or frozen_inputs=True"
                )
    if not common:
        raise ArgumentError(f"{where}: no parameter or buffer is of both steps; expected common names")
