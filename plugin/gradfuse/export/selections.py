"""Decisions by random numbers, such as layerdrop, as selections: both sides are computed, and a draw chooses.

A graph has no branches, but it can compute a layer and then take or leave its result. So functions that decide by a
random number are rewritten while a step is traced (see `rewriting`): each decision runs both of its sides from the same
values, and every variable that they bind or change in place becomes `torch.where` of both. What cannot be selected this
way, such as lists of different lengths or tensors of different shapes, must not be used afterwards.

A loop over what `nonzero` finds in a vector, such as the experts that got tokens, is a decision for each element.

PyTorch draws no numbers for the side that it does not take. So a side is enclosed in two operators, from which the
number of each draw follows. This module imports torch.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import inspect
import operator
from collections.abc import Callable, Collection, ItemsView, Iterable, Iterator, Mapping, Sequence, ValuesView
from types import CodeType, FrameType, MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from gradfuse import _torch_private as private
from gradfuse.export import dropout, explaining, of_nothing, rewriting, size_numbers
from gradfuse.export.chosen import (
    UNFOLDED,
    Choice,
    Either,
    Maybe,
    Some,
    as_tensor,
    element_of,
    holds_some,
    is_filled,
    unfolded,
)
from gradfuse.export.functions import functions_of, is_within, outermost
from gradfuse.export.leaves import WrittenData
from gradfuse.export.rewriting import CannotSelectError, MoreToRewriteError
from gradfuse.export.torch_step import TorchStep
from gradfuse.training.step import DROPOUT_SEED

_MOST_CANDIDATES = 256
"""Loops over what is found among more elements are left alone."""

_VECTORS = frozenset("flatten squeeze view reshape".split())
"""Functions that may make a vector of the column of indices that `nonzero` finds."""

_SELECTING = frozenset("nonzero argwhere where masked_select __getitem__ unique repeat_interleave".split())

_LEFT_OUT = object()
"""What stands for an element that a list does not have."""

_DROPOUTS = frozenset(("dropout", "dropout_"))

Line = tuple[str, int]
"""A file, and a line of it."""

_Exists = tuple[int, bool]
"""The id of the condition under which something is not None, and whether it holds."""

Spot = tuple[str, int, int]
"""File, line and column of a condition on numbers."""

Ways = Mapping[Line | Spot, bool | None]
"""How conditions go in a run that have other answers there; None: the other way round."""


@dataclasses.dataclass(frozen=True)
class Written:
    """What the sides of a decision change in place, by name.

    Attributes:
        buffers: buffers of the step.
        variables: tensors that variables of the function hold.
        fails: whether the first side is never taken, because it raises an error.
    """

    buffers: frozenset[str] = frozenset()
    variables: frozenset[str] = frozenset()
    fails: bool = False


@dataclasses.dataclass(frozen=True)
class Trial:
    """A run in which loops leave out some of what was found.

    Attributes:
        seed: determines which.
        skips: whether they skip iterations, as PyTorch does, or use selections.
    """

    seed: int
    skips: bool


@dataclasses.dataclass(frozen=True)
class Selections:
    """Functions that compute both sides of what they decide by random numbers.

    Attributes:
        codes: the code of each -> the code that replaces it.
        lines: the code of each -> the lines in which it decides.
        numbers: the code of some -> line and column of conditions in them on numbers, which become tensors.
        assumed: conditions on numbers that are no decisions -> how they go.
        written: for each decision, in order, what its sides write; None: it is to be found out.
        gated: whether gradients of a side that is not taken end where it begins, as they may be NaN there.
    """

    codes: Mapping[CodeType, CodeType] = dataclasses.field(default_factory=dict)
    lines: Mapping[CodeType, frozenset[int]] = dataclasses.field(default_factory=dict)
    numbers: Mapping[CodeType, frozenset[tuple[int, int]]] = dataclasses.field(default_factory=dict)
    assumed: Mapping[Spot, bool] = dataclasses.field(default_factory=dict)
    written: tuple[Written, ...] | None = None
    gated: bool = False

    def including(self, step: TorchStep, places: Sequence[tuple[CodeType, int | None]]) -> Selections:
        """Return the same with decisions of a step in these lines of functions, which may be rewritten ones.

        None stands for no line: the function takes values that depend on decisions of others.

        Raises:
            rewriting.CannotRewriteError: one of them cannot be rewritten, or is rewritten already.
        """
        lines = dict(self.lines)
        asked_for = outermost([(self._original(code), line) for code, line in places], step)
        functions = functions_of([old for old, _ in asked_for], step)
        for old, line in asked_for:
            known = self.lines.get(old)
            if not functions[id(old)] or (known is not None and (line is None or line in known)):
                raise rewriting.CannotRewriteError
            lines[old] = lines.get(old, frozenset()) | (set() if line is None else {line})
        codes = {
            old: self.codes[old]
            if self.lines.get(old) == asked
            else rewriting.rewritten(old, asked, self.numbers.get(old, frozenset()), size_numbers.NAMES)
            for old, asked in lines.items()
        }
        return dataclasses.replace(self, codes=codes, lines=lines)

    def _original(self, code: CodeType) -> CodeType:
        """Return the code that was replaced by one, or by that around it; if none was, itself."""
        return next((old for old, new in self.codes.items() if is_within(code, new)), code)

    def surveyed(self, written: Sequence[Written]) -> Selections:
        """Return the same with what the sides of each decision write."""
        return dataclasses.replace(self, written=tuple(written))

    @contextlib.contextmanager
    def installed(
        self, step: TorchStep, trial: Trial | None = None, ways: Ways = MappingProxyType({})
    ) -> Iterator[Decisions]:
        """Let the functions compute both sides; some decisions go other ways."""
        functions = functions_of(self.codes, step)
        changed = [(function, code) for code in self.codes for function in functions[id(code)]]
        namespaces = [function.__globals__ for function, _ in changed]
        found = Found()
        decisions = Decisions(
            step, self.written, found, trial, self.assumed, self.codes.values(), gated=self.gated, ways=ways
        )
        try:
            for namespace in namespaces:
                namespace[rewriting.HELPER] = decisions
            for function, code in changed:
                function.__code__ = self.codes[code]
            noted = decisions.written_data if decisions.surveys else contextlib.nullcontext()
            with found, noted, size_numbers.called_in(namespaces):
                try:
                    yield decisions
                finally:
                    decisions.close_sides()
        finally:
            for function, code in changed:
                function.__code__ = code
            for namespace in namespaces:
                namespace.pop(rewriting.HELPER, None)


class Found(TorchFunctionMode):
    """Maps indices that `nonzero` has found to the vector.

    Attributes:
        undrawn: how many dropouts had empty inputs, for which PyTorch draws no numbers.
        sizes: those of all that was selected by values.
    """

    def __init__(self) -> None:
        super().__init__()
        self.undrawn = 0
        self.sizes: list[Any] = []
        # With the indices themselves, so that no other tensor gets their id; written into, they are others.
        self._vectors: dict[int, tuple[Tensor, Tensor, tuple[int, int]]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        first = args[0] if args and isinstance(args[0], Tensor) else None
        vector = None
        if name in _DROPOUTS and first is not None:
            self.undrawn += _is_undrawn(*args, **(kwargs or {}))
        if name == "nonzero" or (name == "where" and len(args) == 1 and not kwargs):
            vector = first if first is not None and first.dim() == 1 else None
        elif name in _VECTORS and isinstance(result, Tensor) and result.dim() == 1:
            vector = self.vector(first)
        indices = result[0] if isinstance(result, tuple) and result else result
        if name in _SELECTING and isinstance(indices, Tensor):
            self.sizes += indices.shape
        if vector is not None and isinstance(indices, Tensor):
            self._vectors[id(indices)] = indices, vector, (private.version(indices), private.version(vector))
        return result

    def vector(self, indices: Any) -> Tensor | None:
        """Return the vector in which these indices were found; None: they are others, or it is long."""
        if id(indices) not in self._vectors:
            return None
        _, vector, versions = self._vectors[id(indices)]
        if (private.version(indices), private.version(vector)) != versions:
            return None
        size = vector.shape[0]
        return vector if isinstance(size, int) and 0 < size <= _MOST_CANDIDATES else None


class DrawsForNothing(TorchFunctionMode):
    """Let a dropout of an empty tensor draw a number, as that of an exported step does, whatever is in its input."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if getattr(func, "__name__", "") in _DROPOUTS and isinstance(args[0] if args else None, Tensor):
            if _is_undrawn(*args, **named):
                torch.empty(1).bernoulli_(0.5)
        return func(*args, **named)


def _is_undrawn(
    input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, *, train: bool | None = None
) -> bool:
    """Whether a dropout, with the arguments of either of PyTorch's functions, would draw if there were elements."""
    drops = training if train is None else train
    return drops and 0 < p < 1 and private.known_true(input.numel() == 0)


@dataclasses.dataclass(frozen=True)
class _Chosen:
    """Whether a candidate is one of those that a loop is over."""

    condition: Tensor


class Decisions:
    """What rewritten functions call.

    Attributes:
        written: for each decision that was made what its sides write.
        surveys: whether that is to be found out.
        written_data: what notes writes that PyTorch's versions do not tell, as that is found out.
        open: how many loops over what was found are within one of their iterations.
        left_out: how many rounds a trial has left out.
        gated: whether gradients of a side that is not taken end where it begins, once that is found out.
        gates: whether they do.
    """

    def __init__(
        self,
        step: TorchStep,
        written: Sequence[Written] | None,
        found: Found,
        trial: Trial | None = None,
        assumed: Mapping[Spot, bool] | None = None,
        codes: Iterable[CodeType] = (),
        *,
        gated: bool = False,
        ways: Ways = MappingProxyType({}),
    ) -> None:
        self.step = step
        self._ways = ways
        self._assumed = assumed or {}
        self._codes = list(codes)
        self.gated = gated
        self.gates = gated and written is not None
        self._sides: list[contextlib.ExitStack] = []
        # What is known in them of what may be None, and what follows of it from conditions.
        self._known: list[frozenset[_Exists]] = []
        self._follows: dict[int, tuple[Tensor, frozenset[_Exists], frozenset[_Exists]]] = {}
        self._conditions: list[Tensor] = []
        self.left_out = 0
        self._trial = trial
        # The rounds that are open, each as the number of its loop in the round around it, and its own; and how many
        # loops have begun in a round.
        self._round: tuple[int, ...] = ()
        self._loops: dict[tuple[int, ...], int] = {}
        self.open = 0
        self.found = found
        self.surveys = written is None
        self.written_data = WrittenData()
        self.written = [] if written is None else list(written)
        self._count = 0

    def version(self, tensor: Tensor) -> int:
        """Return a number that grows with each write into a tensor, while it is found out what sides write."""
        return private.version(tensor) + self.written_data.writes_into(tensor)

    def held(self, variables: Mapping[str, Any]) -> list[tuple[Any, int | None]]:
        """Return what sides must leave as it is, in variables, lists and modules: objects, and versions of tensors."""
        modules = [one for one in (self.step.module, self.step.loss) if isinstance(one, torch.nn.Module)]
        held: list[Any] = []
        for value in (*variables.values(), *(vars(part) for one in modules for part in one.modules())):
            if isinstance(value, Tensor):
                held.append(value)
            elif isinstance(value, (list, set)):
                held += [value, *value]
            elif isinstance(value, dict):
                held += [value, *value.keys(), *value.values()]
        return [(one, self.version(one) if isinstance(one, Tensor) else None) for one in held]

    def begun(self) -> int:
        """Return the number of a decision that begins."""
        if self.surveys:
            self.written.append(Written())
        self._count += 1
        return self._count - 1

    def buffers(self, number: int) -> Collection[str]:
        """Return the buffers that the sides of a decision may write."""
        return self.step.buffers if self.surveys else self.written[number].buffers

    def variables(self, number: int, before: Mapping[str, Any]) -> Collection[str]:
        """Return the variables whose tensors the sides of a decision may change in place."""
        return before.keys() if self.surveys else self.written[number].variables

    def note(
        self, number: int, *, buffers: Collection[str] = (), variables: Collection[str] = (), fails: bool = False
    ) -> None:
        """Note what a side has written, or that it fails."""
        known = self.written[number]
        self.written[number] = Written(
            known.buffers.union(buffers), known.variables.union(variables), known.fails or fails
        )

    def begin(self, test: Any, names: Sequence[str], before: Mapping[str, Any]) -> _Decision:
        return _Decision(self, test, names, before)

    def open_side(self, taken: Tensor, written: Iterable[Tensor], known: frozenset[_Exists]) -> None:
        """Let gradients of what is used from here on, but is not written into, end where a condition does not hold."""
        if self.gated:
            self._known.append(known)
            self._sides.append(contextlib.ExitStack())
            self._sides[-1].enter_context(_Side(taken, written, gates=self.gates))

    def close_side(self) -> None:
        if self.gated:
            self._sides.pop().close()
            self._known.pop()

    def close_sides(self) -> None:
        """Close those that an error has left open."""
        while self._sides:
            self._sides.pop().close()

    def candidates(self, found: Any) -> Iterator[tuple[Any, Any]]:
        """Yield what a loop is over, and ahead of each whether it is."""
        vector = self.found.vector(found)
        if vector is None:
            yield from unfolded(found) if type(found) in UNFOLDED else ((True, one) for one in found)
            return
        chosen = vector.detach() != 0
        around = self._round
        self._loops[around] = loop = self._loops.get(around, 0) + 1
        if self._trial is not None:
            # The same ones whether the loops of rounds that are left out have run or not.
            generator = torch.Generator().manual_seed(abs(hash((self._trial.seed, *around, loop))))
            kept = torch.rand(len(chosen), generator=generator) < 0.5
            self.left_out += int((chosen & ~kept).sum())
            chosen = chosen & kept
        for index in range(len(chosen)):
            row = torch.tensor(index if found.dim() == 1 else [index])
            self._round = (*around, loop, index)
            if self._trial is None or not self._trial.skips:
                yield _Chosen(chosen[index]), row
            elif chosen[index]:
                yield True, row
        self._round = around

    def over(self, values: Any, line: int) -> Any:
        """Return what a loop or a list that decides nothing so far goes through.

        Raises:
            MoreToRewriteError: that has elements under conditions.
        """
        if isinstance(values, (ItemsView, ValuesView)):
            elements = [one[1] if isinstance(values, ItemsView) else one for one in values]
        else:
            elements = values
        if isinstance(values, dict) and holds_some(values):
            raise CannotSelectError("the keys of a dictionary")
        if holds_some(elements):
            frame = inspect.currentframe()
            assert frame is not None and frame.f_back is not None
            raise MoreToRewriteError("a list", (frame.f_back.f_code, line))
        return values

    def element(self, values: Any, index: Any) -> Any:
        """Return an element of a list, which may have some under conditions, or of something else."""
        return element_of(values, index) if isinstance(values, list) and holds_some(values) else values[index]

    def augmented(self, name: str, value: Any, other: Any) -> Any:
        """Return what `value += other` gives, for any operator; only tensors are changed in place."""
        within = getattr(operator, f"__i{name}__" if isinstance(value, Tensor) else f"__{name}__")
        return within(value, other)

    def asks(self, value: Any, number: Any, line: int, column: int, name: str) -> Any:
        """Return a condition on a number, or on two, as a tensor, unless it is assumed."""
        spot = _calling_line()[0], line, column
        known = self._assumed.get(spot)
        if known is not None:
            return known
        if holds_some(value) and name == "truth":
            return self.condition(value)
        compared, other = (as_tensor(one, None) for one in (value, number))
        if compared is None or other is None:
            raise CannotSelectError("a condition")
        condition = compared != 0 if name == "truth" else getattr(operator, name)(compared, other)
        return self._going(condition, spot)

    def condition(self, value: Any) -> Any:
        """Return what is tested, as it goes in this run."""
        if holds_some(value):
            return is_filled(value)
        if self._ways and isinstance(value, Tensor) and value.numel() == 1:
            return self._going(value, _calling_line())
        return value

    def _going(self, condition: Tensor, place: Line | Spot) -> Tensor:
        if place not in self._ways:
            return condition
        way = self._ways[place]
        return condition.reshape([]) == 0 if way is None else torch.full([], way)

    def is_none(self, value: Any) -> Any:
        """Return whether something is None, as a tensor if that depends on decisions."""
        if not isinstance(value, Maybe):
            return value is None
        test = ~value.condition
        self._note(test, {(id(value.condition), False)}, {(id(value.condition), True)})
        # With the condition itself, so that no other gets its id.
        self._conditions.append(value.condition)
        return test

    def _note(self, test: Any, if_true: Collection[_Exists], if_false: Collection[_Exists]) -> None:
        """Note what follows from a condition, and from its opposite, of what may be None."""
        if isinstance(test, Tensor):
            self._follows[id(test)] = test, frozenset(if_true), frozenset(if_false)

    def follows(self, test: Any, side: bool) -> frozenset[_Exists]:
        """Return what is known of what may be None in a side of a condition."""
        _, if_true, if_false = self._follows.get(id(test), (None, frozenset(), frozenset()))
        return if_true if side else if_false

    def narrowed(self, value: Any) -> Any:
        """Return what is a value or None as what it is in the sides that are open, if that is known."""
        if not isinstance(value, Maybe):
            return value
        known = frozenset().union(*self._known)
        if (id(value.condition), True) in known:
            return value.value
        return None if (id(value.condition), False) in known else value

    def operand(self, value: Any) -> Any:
        """Return what an operator takes: NaN for None, of which Python raises an error."""
        return value.or_nothing() if isinstance(value, Maybe) else value

    def returned(self, value: Any) -> Any:
        """Return what a function returns: to the step, NaN for None, of which PyTorch has no gradient."""
        if not isinstance(value, Maybe):
            return value
        frame = _caller_of_function()
        if frame is None or not explaining.is_users(frame.f_code.co_filename):
            return value.or_nothing()
        if not any(is_within(frame.f_code, code) for code in self._codes):
            # It may ask whether it is None, and not use it.
            raise MoreToRewriteError("None", (frame.f_code, None))
        return value

    def got(self, value: Any, default: Any) -> Any:
        """Return what a dictionary has for a key; the default if it has none."""
        return (
            Choice(value.condition, by_values=True).of("get", value.value, default)
            if isinstance(value, Some)
            else value
        )

    def negated(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return not value
        result = value.logical_not()
        self._note(result, self.follows(value, False), self.follows(value, True))
        return result

    def both(self, value: Any, other: Callable[[], Any]) -> Any:
        return self._joined(value, other, True) if isinstance(value, Tensor) else value and other()

    def any(self, value: Any, other: Callable[[], Any]) -> Any:
        return self._joined(value, other, False) if isinstance(value, Tensor) else value or other()

    def _joined(self, value: Tensor, other: Callable[[], Any], goes_on: bool) -> Any:
        """Return `value and other()` if that goes on to the other one where the value holds; or `value or other()`."""
        second: Any = None

        def evaluated() -> Any:
            nonlocal second
            second = other()
            return second

        sides = (evaluated, lambda: False) if goes_on else (lambda: True, evaluated)
        result = self.either(value, *sides)
        known = self.follows(value, goes_on) | self.follows(second, goes_on)
        self._note(result, known if goes_on else (), () if goes_on else known)
        return result

    def kept(self, test: Any, element: Callable[[], Any]) -> Any:
        """Return an element of a list that is there if a condition holds."""
        decision, value = self.begin(test, (), {}), _LEFT_OUT
        for side in decision:
            if side:
                value = element()
            decision.leave({})
        return Some("a list", value, decision.condition) if isinstance(test, Tensor) else value

    def listed(self, values: Sequence[Any]) -> list[Any]:
        """Return those that are there."""
        return [one for one in values if one is not _LEFT_OUT]

    def either(self, test: Any, first: Callable[[], Any], second: Callable[[], Any]) -> Any:
        value = None
        decision = self.begin(test, ("value",), {})
        for side in decision:
            value = first() if side else second()
            if decision.leave({"value": value}):
                value = decision["value"]
        return value


class _Side(TorchFunctionMode):
    """Stops gradients where a side of a decision begins, unless it is taken.

    The gradient that goes into a side that is not taken is 0, but 0 / 0 comes out of the mean of nothing. What fails
    for nothing gives something in such a side.
    """

    def __init__(self, taken: Tensor, written: Iterable[Tensor], *, gates: bool) -> None:
        super().__init__()
        self._taken, self._gates_all = taken, gates
        # With the tensors themselves, so that no others get their ids. What is written into stays what it is.
        self._inside = {id(tensor): tensor for tensor in written}
        self._gates: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name.startswith("__get__") or name == "__set__":
            return func(*args, **kwargs)
        func = of_nothing.instead(func, args, kwargs, self._taken)
        if not self._gates_all:
            return func(*args, **kwargs)
        if _writes(name) and args and isinstance(args[0], Tensor):
            self._inside[id(args[0])] = args[0]
        args, kwargs = private.map_tensors(self._gate, (args, kwargs))
        result = func(*args, **kwargs)
        private.map_tensors(self._noted, result)
        return result

    def _noted(self, tensor: Tensor) -> Tensor:
        self._inside[id(tensor)] = tensor
        return tensor

    def _gate(self, tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point() or not tensor.requires_grad or id(tensor) in self._inside:
            return tensor
        if id(tensor) not in self._gates:
            self._gates[id(tensor)] = tensor, torch.where(self._taken, tensor, tensor.detach())
        return self._gates[id(tensor)][1]


def _writes(name: str) -> bool:
    """Whether a function of torch writes into its first argument."""
    return name in ("__setitem__", *_AUGMENTS) or (name.endswith("_") and not name.endswith("__"))


_AUGMENTS = frozenset(name for name in dir(Tensor) if name.startswith("__i") and f"__{name[3:]}" in dir(Tensor))
"""The methods of `+=` and the like."""


class _Decision:
    """One decision, whose sides are run one after the other.

    Attributes:
        condition: a tensor of one truth value, once the first side has begun.

    Args:
        all: the decisions that it is one of.
        test: a tensor of one element or a candidate, for a selection; anything else is decided as Python does.
        names: the variables that the sides bind.
        before: all variables ahead of it.
    """

    def __init__(self, all: Decisions, test: Any, names: Sequence[str], before: Mapping[str, Any]) -> None:
        self._all = all
        self._step = all.step
        self._draws = DROPOUT_SEED in all.step.state
        self._of_candidate = isinstance(test, _Chosen)
        self._test = test.condition if isinstance(test, _Chosen) else test
        self._names = names
        self._before = dict(before)
        self._values: Mapping[str, Any] = {}
        self._sides: list[tuple[Mapping[str, Any], dict[str, Tensor]]] = []

    def __iter__(self) -> Iterator[bool]:
        if not isinstance(self._test, Tensor):
            yield bool(self._test)
            return
        if self._test.numel() != 1:
            raise CannotSelectError("a condition")
        is_condition = self._test.dtype == torch.bool and not self._test.dim()
        self.condition = self._test if is_condition else self._test.detach().reshape([]).bool()
        self._choice = Choice(self.condition, by_values=self._all.gated)
        self._containers = [(one, _contents(one)) for one in _containers(self._before.values())]
        self._after: list[list[Any]] = []
        self._number = self._all.begun()
        self._buffers = {name: self._step.places[name][0].tensor() for name in self._all.buffers(self._number)}
        held = {name: self._before.get(name) for name in self._all.variables(self._number, self._before)}
        self._variables = {name: tensor for name, tensor in held.items() if isinstance(tensor, Tensor)}
        self._contents = {name: tensor.clone() for name, tensor in self._variables.items()}
        self._of_first: dict[str, Tensor] = {}
        self._failed = False
        self._all.open += self._of_candidate
        self._sizes = len(self._all.found.sizes)
        for side in (True, False):
            self._held = self._all.held(self._before) if self._all.surveys else []
            self._copies = {name: tensor.clone() for name, tensor in self._buffers.items()}
            self._versions = {name: self._all.version(tensor) for name, tensor in self._copies.items()}
            self._step.place(self._copies)
            self._taken = self.condition if side else self.condition.logical_not()
            if self._draws:
                dropout.begin_side(self._taken)
            if self._all.gates:
                for name, tensor in self._variables.items():
                    if tensor.is_floating_point() and tensor.requires_grad:
                        before = self._contents[name]
                        tensor.copy_(torch.where(self._taken, before, before.detach()))
            self._all.open_side(self._taken, self._variables.values(), self._all.follows(self._test, side))
            yield side

    def failed(self) -> None:
        """Take the error that is raised for one of a candidate that is never chosen, as PyTorch would raise it.

        An error may come from what is empty as the candidate is not chosen in this batch. So it counts if it is raised
        with the real tensors, and again while sizes are symbolic.
        """
        if not self._of_candidate or not (self._all.surveys or self._all.written[self._number].fails):
            raise
        if self._all.surveys and bool(self.condition):
            raise
        self._failed = True

    def leave(self, after: Mapping[str, Any]) -> bool:
        """End a side with these variables; return whether they are to be bound anew."""
        if not isinstance(self._test, Tensor):
            return False
        self._all.close_side()
        if self._draws:
            dropout.end_side(self._taken)
        changed = self._changed()
        self._after.append([_contents(one) for one, _ in self._containers])
        for container, before in self._containers:
            _fill(container, before)
        if not self._sides and self._failed != self._all.written[self._number].fails:
            if not self._all.surveys:
                raise CannotSelectError("what is empty")
            self._all.note(self._number, fails=True)
        if self._all.surveys and not _are_same(self._held, self._all.held(self._before), changed.values()):
            raise CannotSelectError("something that is changed in place")
        self._sides.append(({name: after[name] for name in self._names if name in after}, self._written()))
        if len(self._sides) == 1:
            self._of_first = {} if self._failed else {name: tensor.clone() for name, tensor in changed.items()}
            for name, tensor in changed.items():
                tensor.copy_(self._contents[name])
            self._values = self._before
            return True
        for name in {**self._of_first, **changed}:
            tensor = self._variables[name]
            tensor.copy_(self._choice.of(name, self._of_first.get(name, self._contents[name]), tensor.clone()))
        for (container, before), *after in zip(self._containers, *self._after, strict=True):
            _fill(container, self._merged(before, *after))
        self._all.open -= self._of_candidate
        if self._of_candidate and not all(map(private.may_be_zero, self._all.found.sizes[self._sizes :])):
            raise CannotSelectError("what is empty")
        (first, one), (second, other) = self._sides
        if self._failed:
            first, one = second, other
        self._step.place(
            self._buffers
            | {
                name: self._choice.of(name, one.get(name, self._buffers[name]), other.get(name, self._buffers[name]))
                for name in (*one, *other)
            }
        )
        self._values = {
            name: self._choice.of(name, first[name], second[name])
            for name in self._names
            if name in first and name in second
        }
        return True

    def __getitem__(self, name: str) -> Any:
        return self._values[name] if name in self._values else Either(name)

    def _merged(self, before: Any, first: Any, second: Any) -> Any:
        """Return what is in a list or dictionary, from what was in it ahead and after each side."""
        if self._failed:
            first = second
        merge = self._choice.of_dictionaries if isinstance(before, dict) else self._choice.of_lists
        return merge("a list or dictionary that is changed", before, first, second)

    def _changed(self) -> dict[str, Tensor]:
        """Return the variables whose tensors a side has changed in place."""
        if not self._all.surveys:
            return self._variables
        versions = {id(value): version for value, version in self._held}
        changed = {
            name: tensor
            for name, tensor in self._variables.items()
            if self._all.version(tensor) != versions[id(tensor)] or not torch.equal(tensor, self._contents[name])
        }
        self._all.note(self._number, variables=changed)
        return changed

    def _written(self) -> dict[str, Tensor]:
        """Return the buffers that a side has written, as it left them."""
        after = {name: self._step.places[name][0].tensor() for name in self._buffers}
        if self._all.surveys:
            # Also those that hold what they held, as a counter that is set to 0 in a fresh module.
            after = {
                name: tensor
                for name, tensor in after.items()
                if tensor is not self._copies[name]
                or self._all.version(tensor) != self._versions[name]
                or not torch.equal(tensor, self._buffers[name])
            }
            self._all.note(self._number, buffers=after)
        return after


def going(answer: bool, ways: Ways, place: Line | Spot) -> bool:
    """Return how a condition goes in a run that has other answers in some places."""
    way = ways.get(place, answer)
    return not answer if way is None else way


def _calling_line() -> Line:
    """Return where the code is that this module was called by."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    return ("", 0) if frame is None else (frame.f_code.co_filename, frame.f_lineno)


def _caller_of_function() -> FrameType | None:
    """Return the frame that called the function which called this module: a user's, or gradfuse's own."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    frame = None if frame is None else frame.f_back
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "torch":
        frame = frame.f_back
    return frame


def _containers(values: Iterable[Any], depth: int = 2) -> list[Any]:
    """Return lists and dictionaries among values, and those within."""
    found: dict[int, Any] = {}
    for one in values:
        if type(one) in (list, dict, collections.defaultdict, collections.OrderedDict):
            found[id(one)] = one
            inner = one.values() if isinstance(one, dict) else one
            found |= {id(part): part for part in (_containers(inner, depth - 1) if depth else ())}
    return list(found.values())


def _contents(container: Any) -> Any:
    return dict(container) if isinstance(container, dict) else list(container)


def _fill(container: Any, contents: Any) -> None:
    """Let a list or dictionary hold this, unless it does."""
    if isinstance(container, dict):
        if list(container) != list(contents) or any(container[key] is not one for key, one in contents.items()):
            container.clear()
            container.update(contents)
    elif len(container) != len(contents) or any(
        one is not other for one, other in zip(container, contents, strict=True)
    ):
        container[:] = contents


def _are_same(
    before: Sequence[tuple[Any, int | None]], after: Sequence[tuple[Any, int | None]], changed: Collection[Tensor]
) -> bool:
    """Whether all is as it was, but for what is in some tensors."""
    known = {id(tensor) for tensor in changed}
    return len(before) == len(after) and all(
        one is other and (version == now or id(one) in known)
        for (one, version), (other, now) in zip(before, after, strict=True)
    )
