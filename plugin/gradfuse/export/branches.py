"""Truth values and lengths of tensors in a module's Python code, which a traced program does not know.

A graph has no branches, so torch.export refuses `if tensor:`. Four kinds of them do not choose what is computed, and
are decided while a step is traced as they are when PyTorch runs it on the batch:

- A check, `if not valid.all(): raise ValueError(...)`: if its condition is negated, the function that tests it raises
  an error.
- A condition on whether numbers are finite, from `torch.isfinite`, `isnan` or `isinf`: the exported step assumes that
  they are.
- Whether the mask of `nn.Transformer` is the causal one, which only chooses a kernel.
- Whether a mask selects anything, where the code that this guards does nothing otherwise (see `emptiness`).

Besides, `nonzero` is assumed to find something if it does on the batch, and a warning says so.

This module imports torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import dis
import inspect
import re
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import CodeType, FrameType, TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from gradfuse import _torch_private as private
from gradfuse.export import (
    adaptive_softmax,
    batch_norms,
    built_in,
    dropout,
    explaining,
    host_draws,
    inner_derivatives,
    own_gradients,
)
from gradfuse.export.dropout import SeededDropout
from gradfuse.export.emptiness import (
    Guards,
    answering,
    are_selected_alike,
    failing_otherwise,
    guards_of,
    idle_answers,
    selected_by,
)
from gradfuse.export.fixed_numbers import FixedNumbers, is_fixed
from gradfuse.export.observing import ASKS, Place, are_close, caller, callers, calling_frame, forward, line_of, offset
from gradfuse.export.reporting import WHO, refusal
from gradfuse.export.rewriting import CannotSelectError, MoreToRewriteError
from gradfuse.export.selections import Decisions, DrawsForNothing, Found, Line, Selections, Trial, Written
from gradfuse.export.sizes_in_tensors import SizesInTensors
from gradfuse.export.sparse_matrices import SparseProducts
from gradfuse.export.torch_step import TRIED_SEED, Outcome, TorchStep
from gradfuse.export.traced_functions import INSTEAD, bincount, exceeds_minlength, indexed, is_mask
from gradfuse.training.step import DROPOUT_SEED

_FINITE = ("isfinite", "isnan", "isinf")
_RANDOM = (
    "rand rand_like randn randn_like randint bernoulli bernoulli_ uniform_ normal normal_ exponential_ randperm".split()
)
_ROUNDS = 16
"""The result of a decision may decide the next one; longer chains are left alone."""

_SEEDS_AT_RANDOM, _SEEDS_OF_EXTREMES = 40, 2**20
"""How many seeds are tried until all random decisions have gone both ways, and how many for a rare one."""
_MOST_COMPARED = 4
"""With how many of them a model is compared with PyTorch."""

_KEEPS = frozenset(
    """
    all any logical_not logical_and logical_or _is_all_true __invert__ __and__ __or__ bitwise_not bitwise_and bitwise_or
    lt le gt ge __lt__ __le__ __gt__ __ge__ item
    """.split()
)
"""Functions whose results are of the kind of their arguments."""

_INDEXED = (torch.Tensor.__getitem__, torch.Tensor.__setitem__)
_TAKEN = frozenset("tolist bincount item __int__ __float__ __bool__".split())
"""Functions that take numbers out of tensors, and truth values, or count."""
_SIZES = frozenset("len numel size shape".split())
"""Names by which code asks for sizes."""

_SELECTS = (torch.masked_select, torch.Tensor.masked_select, torch.Tensor.__getitem__)

_TRIALS = 6
"""How many times a loop is run with some iterations left out at random, to compare."""

_CONVERTS = re.compile(r"\b(float|int|math\.\w+)\(")
"""Calls that take numbers of Python alone."""

_MOST = 64
"""The most branches that are examined one by one."""

_MOST_SELECTED = 16
"""The most branches on values whose both sides are computed."""

_CALLERS = 3
"""How many functions, from the one that selects on, may guard a selection."""


@dataclasses.dataclass(frozen=True)
class Branches:
    """The branches on values that a module takes when PyTorch runs it.

    Attributes:
        decided: those that do not choose what is computed -> how they go.
        idle: those of them that are whether masks are empty.
        guards: conditions on sizes of what masks select, which go as if that were something.
        open: the others, as texts for messages.
        random: those of the others that depend on a random number.
        found: where `nonzero` finds something each time.
        exceeding: lines in which `bincount` gives more counts than its `minlength`.
        selections: the functions that compute both sides of what they decide by random numbers.
        chances: where those decide that are the module's own.
        items: where a random number is taken out of a tensor, and stays one.
        finite: those of `decided` that choose what is computed where numbers are not finite.
        assumed: those of `found` and `finite` that were met when the step was traced.
    """

    decided: Mapping[Place, bool]
    idle: Mapping[Place, bool]
    guards: Guards
    open: tuple[str, ...]
    random: tuple[str, ...]
    found: frozenset[Place]
    exceeding: Collection[Line]
    selections: Selections
    chances: frozenset[Place]
    items: frozenset[Place]
    finite: frozenset[Place]
    assumed: set[Place] = dataclasses.field(default_factory=set)

    def computes_more(self, step: TorchStep) -> bool:
        """Whether the traced step computes what PyTorch leaves out for some batches."""
        return self.guarded or bool(self.selections.codes) or adaptive_softmax.is_in(step)

    @property
    def guarded(self) -> bool:
        """Whether it runs code on empty masks that a condition guards."""
        return bool(self.idle or self.guards.answers)

    @contextlib.contextmanager
    def told(self, step: TorchStep) -> Iterator[None]:
        """Let a module run what guards the use of empty masks."""
        with self.guards.installed(step), answering(self.idle), DrawsForNothing():
            yield


def branches_of(step: TorchStep) -> Branches:
    """Run the forward pass of a step, and look at each of its branches."""
    observed = _observed(step)
    guards = guards_of(step, observed.selecting)
    if guards.others or not guards.answers:
        asking = dataclasses.replace(guards, others=[*guards.answers, *guards.others] if guards.others else [])
        branches = _branches(step, observed, Guards(), asking)
        if branches.selections.codes or not guards.answers:
            return branches
    with guards.installed(step):
        return _branches(step, _observed(step), guards, Guards())


def _observed(step: TorchStep) -> _Observed:
    none = Selections()
    observed = _Observed()
    try:
        _run(step, observed, none)
    except Exception:
        # A user's module may raise anything where it gets a tensor for a number.
        observed = _Observed(items=False)
        _run(step, observed, none)
    return observed


def _branches(step: TorchStep, observed: _Observed, guards: Guards, asking: Guards) -> Branches:
    none = Selections()
    chances = _of_chance(step, observed, none)
    looped = set(map(_text, observed.looped))
    selections, observed = _selected(step, observed)
    decided, idle = _decided(step, observed, selections)
    values = [place for place in observed.asked if place not in decided and not _is_of_chance(observed, place)]
    if 0 < len(values) + len(asking.others) <= _MOST_SELECTED and not selections.codes:
        by_values = _selected_by_values(step, observed, values, decided, asking)
        selections, observed, decided = by_values or (selections, observed, decided)
    left = [place for place in observed.asked if place not in decided]
    return Branches(
        decided=decided,
        idle=idle,
        guards=guards,
        open=tuple(map(_text, left)),
        random=tuple(_text(place) for place in left if "random" in observed.asked[place][1]),
        found=frozenset(
            place
            for place, counts in observed.found.items()
            if all(counts)
            and _text(place) not in looped
            and place[0] not in guards.codes.values()
            and not (selections.gated and place[0] in selections.codes.values())
        ),
        exceeding=observed.exceeding,
        selections=selections,
        chances=frozenset(chances),
        items=frozenset(observed.items),
        finite=frozenset(
            place
            for place in decided
            if "finite" in observed.asked[place][1]
            and explaining.is_users(place[0].co_filename)
            and not _is_check(step, place, len(observed.asked[place][0]), none)
        ),
    )


def _decided(
    step: TorchStep, observed: _Observed, selections: Selections
) -> tuple[dict[Place, bool], dict[Place, bool]]:
    """Return how the branches go that do not choose what is computed, and those of them that are about empty masks."""
    decided = {
        place: answers[0]
        for place, (answers, kinds) in list(observed.asked.items())[:_MOST]
        if len({*answers}) == 1 and ("finite" in kinds or _is_check(step, place, len(answers), selections))
    }
    kernels = private.decisions_of_kernels()
    decided |= {place: False for place in observed.asked if place[0] in kernels}
    checks = private.checks_of_distributions()
    decided |= {
        place: answers[0]
        for place, (answers, _) in observed.asked.items()
        if place[0] in checks and len({*answers}) == 1
    }
    asking = [place for place in observed.asked if place not in decided and not _is_of_chance(observed, place)]
    idle = idle_answers(step, asking)
    return decided | idle, idle


def _is_of_chance(observed: _Observed, place: Place) -> bool:
    return "random" in observed.asked[place][1]


def _selected_by_values(
    step: TorchStep, observed: _Observed, values: Sequence[Place], decided: Mapping[Place, bool], asking: Guards
) -> tuple[Selections, _Observed, dict[Place, bool]] | None:
    """Return the functions that compute both sides of branches on values; None: they cannot, or give something else.

    Args:
        step: the step.
        observed: what its own functions ask.
        values: where these branches are.
        decided: how other branches go.
        asking: those on numbers, as `others`.

    Returns:
        The functions, what is asked besides, and how branches go in them.
    """
    lines = {line_of(place): answer for place, answer in decided.items()}
    numbers = {code: frozenset(place for one, place in asking.others if one is code) for code, _ in asking.others}
    assumed = failing_otherwise(step, asking)
    asking = dataclasses.replace(asking, others=[guard for guard in asking.others if guard not in assumed])
    answers_of = {(code.co_filename, *place): answer for (code, place), answer in assumed.items()}
    selections, last = Selections(numbers=numbers, assumed=answers_of, gated=True), observed
    places: list[tuple[CodeType, int | None]] = [(place[0], line_of(place)[1]) for place in values]
    places += [(code, line) for code, (line, _) in asking.others if (code, line) not in places]
    written: Sequence[Written] = ()
    try:
        for _ in range(_ROUNDS):
            selections = selections.including(step, places)
            last = _Observed(items=observed.takes_items)
            more = None
            try:
                written = _run(step, last, selections)
            except MoreToRewriteError as error:
                more = error.place
            answers = {place: lines[line_of(place)] for place in last.asked if line_of(place) in lines}
            places = [(place[0], line_of(place)[1]) for place in last.asked if place not in answers]
            if not places and more is not None:
                places = [more]
            if not places:
                break
    except (Exception, CannotSelectError):
        # A user's module may raise anything where it gets tensors for numbers.
        return None
    selections = selections.surveyed(written)
    if places or not are_selected_alike(step, selections, values, asking):
        return None
    return selections, last, answers


def _of_chance(step: TorchStep, observed: _Observed, selections: Selections) -> list[Place]:
    """Return the branches on random numbers that choose what is computed."""
    random = [(place, answers) for place, (answers, kinds) in observed.asked.items() if "random" in kinds]
    return [
        place
        for place, answers in random
        if not (len({*answers}) == 1 and _is_check(step, place, len(answers), selections))
    ]


def _selected(step: TorchStep, observed: _Observed) -> tuple[Selections, _Observed]:
    """Return the functions that compute both sides of branches on random numbers, and what is asked besides.

    Args:
        step: the step.
        observed: what its own functions ask, which is returned where their branches have no such form.
    """
    selections, last = Selections(), observed
    written: Sequence[Written] = ()
    try:
        for _ in range(_ROUNDS):
            places = [*_of_chance(step, last, selections), *last.loops]
            if not places:
                selections = selections.surveyed(written)
                if observed.loops and not _leave_out_alike(step, selections):
                    break
                return selections, last
            selections = selections.including(step, [(place[0], line_of(place)[1]) for place in places])
            last = _Observed(items=observed.takes_items)
            written = _run(step, last, selections)
    except (Exception, CannotSelectError):
        # A user's module may raise anything where it gets tensors for numbers.
        pass
    return Selections(), observed


def _leave_out_alike(step: TorchStep, selections: Selections) -> bool:
    """Whether what a loop leaves out by selections is as if it had no such rounds, with the real tensors of the batch.

    A round may write where no selection is seen, as into objects of its own.
    """
    compared = False
    for seed in range(_TRIALS):
        outcomes = []
        for skips in (True, False):
            try:
                with (
                    dropout.EqualDropout(step.state.get(DROPOUT_SEED)),
                    host_draws.as_tensors(),
                    selections.installed(step, Trial(seed, skips)) as decisions,
                ):
                    outcomes.append(forward(step))
            except Exception:
                # A user's module may raise anything where nothing is found.
                if skips:
                    break
                raise
        else:
            (value, after), (other, others) = outcomes
            pairs = [(value, other), *((after[name], others[name]) for name in after)]
            if not all(are_close(*pair) for pair in pairs):
                return False
            compared |= decisions.left_out > 0
    return compared


def seeds_of(step: TorchStep, branches: Branches) -> list[int]:
    """Return seeds with which PyTorch takes both ways of the branches on random numbers, each of them if possible.

    Raises:
        ExportError: one place in the code takes the same way with all seeds that were tried.
    """
    if not branches.chances:
        return [TRIED_SEED]
    ways: dict[int, set[tuple[Place, int, bool]]] = {}
    seen: set[tuple[Place, int, bool]] = set()
    for seed in _tried_seeds(step):
        observed = _Observed(items=bool(branches.items))
        _run(step.with_seed(seed), observed, Selections())
        ways[seed] = {
            (place, number, answer)
            for place, (answers, _) in observed.asked.items()
            if place in branches.chances
            for number, answer in enumerate(answers)
        }
        seen |= ways[seed]
        if all((place, number, not answer) in seen for place, number, answer in seen):
            break
    for place in branches.chances:
        if len({answer for one, _, answer in seen if one == place}) == 1:
            raise refusal(
                f"the decision by a random number in {_text(place)} went the same way with all seeds, so that the "
                f"other one cannot be compared with PyTorch; expected one that is less rare{settings(step)}"
            )
    chosen: list[int] = []
    while seen and len(chosen) < _MOST_COMPARED:
        best = max(ways, key=lambda seed: len(ways[seed] & seen))
        chosen.append(best)
        seen -= ways[best]
    return chosen


def _tried_seeds(step: TorchStep) -> Iterator[int]:
    """Yield seeds, at last those with which single draws give their least and largest numbers of very many."""
    yield from range(TRIED_SEED, TRIED_SEED + _SEEDS_AT_RANDOM)
    with SeededDropout(torch.tensor(TRIED_SEED)) as drawn:
        forward(step)
    for layer in drawn.single[:_MOST]:
        yield from dropout.extreme_seeds(TRIED_SEED, _SEEDS_OF_EXTREMES, layer)


def refuse_open(step: TorchStep, branches: Branches, error: BaseException) -> None:
    """Refuse a step that torch.export could not trace, if values of tensors are why.

    Raises:
        ExportError: the error comes from a branch that chooses what is computed, or from a number that is taken out of
            a tensor.
    """
    where = explaining.place(error)
    text, place, advice = "the value of a tensor", where, "torch.where or the like"
    if where in branches.random:
        text, advice = "a random number", f"a module that always computes the same{settings(step)}"
    elif where not in branches.open:
        if not private.is_about_data(error) and not isinstance(error, CannotSelectError):
            return
        text = "numbers that it takes out of tensors"
        advice = "sizes and branches that follow from shapes, or from buffers of the module that no step changes"
        if _CONVERTS.search(explaining.source_line(error)):
            advice += "; or x.item(), which may be computed with by operators and torch's functions"
    raise refusal(
        f"torch.export cannot trace the step: the module decides by {text} what it computes"
        f"{f', in {place}' if place else ''}, and a graph has no branches; expected {advice}"
    )


def warn_of_assumptions(branches: Branches) -> None:
    """Warn the user of what was assumed of all batches."""
    for place in branches.assumed:
        about_finite = f"whether numbers are finite in {_text(place)} is taken to be the same in all batches"
        found = f"nonzero in {_text(place)} is taken to find at least one element, as it does in this batch"
        warnings.warn(f"{WHO}: {about_finite if place in branches.finite else found}", stacklevel=4)


@contextlib.contextmanager
def answered(
    step: TorchStep,
    branches: Branches,
    state: Mapping[str, Tensor],
    changed: Collection[str],
    *,
    differentiates: bool,
) -> Iterator[None]:
    """Let a module be traced: decide its checks, let `len` give symbolic lengths, and `to` do nothing where it can.

    Args:
        step: the step.
        branches: the branches on values that it takes.
        state: the traced tensors of buffers, among others.
        changed: those that the step changes; the numbers of the others are constants.
        differentiates: whether the step takes derivatives itself.
    """
    fixed = [
        (state[name], step.state[name])
        for name in step.buffers
        if name not in (*changed, *step.frozen_inputs) and is_fixed(step.state[name])
    ]
    own = own_gradients.by_formula(inner_derivatives.FUNCTIONS) if differentiates else own_gradients.traced()
    with private.idle_conversions(), batch_norms.cumulative(), adaptive_softmax.traced(), own:
        with branches.guards.installed(step), both_sides(step, branches) as decisions:
            with _Decided(branches, fixed, decisions):
                yield


@contextlib.contextmanager
def both_sides(step: TorchStep, branches: Branches) -> Iterator[Decisions]:
    """Let a module compute both sides of what it decides by random numbers, or does for what it finds."""
    with contextlib.ExitStack() as entered:
        for one in (host_draws.as_tensors(), built_in.replaced(step)):
            entered.enter_context(one)
        decisions = entered.enter_context(branches.selections.installed(step))
        entered.enter_context(_Items(branches.items))
        yield decisions


def run_both_sides(step: TorchStep, branches: Branches) -> Outcome:
    """Run a step in PyTorch with both sides of what it decides, and with what guards empty masks.

    The outcome counts the dropouts of both, and has the gradients of all parameters.
    """
    # What a side has saved for its gradient is put back for the other one.
    saved = torch.autograd.graph.saved_tensors_hooks(Tensor.clone, lambda tensor: tensor)
    told = branches.told(step) if branches.guarded and step.within is None else contextlib.nullcontext()
    with told, adaptive_softmax.traced(), both_sides(step, branches) as decisions, saved:
        outcome = step.run()
    undrawn = 0 if branches.guarded else decisions.found.undrawn
    return dataclasses.replace(outcome, dropouts=outcome.dropouts + undrawn)


class _Items(TorchFunctionMode):
    """Leave random numbers in tensors where code takes them out."""

    def __init__(self, places: Collection[Place]) -> None:
        super().__init__()
        self._places = places

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.item and caller() in self._places:
            return _as_item(args[0])
        return func(*args, **(kwargs or {}))


class _Decided(TorchFunctionMode):
    """Answer the branches that are decided, and call functions in operators whose gradients are known.

    Sizes that are computed by tensors stay sizes. What the same mask selects has one size.
    """

    def __init__(self, branches: Branches, fixed: Sequence[tuple[Tensor, Tensor]], decisions: Decisions) -> None:
        super().__init__()
        self._branches = branches
        self._decisions = decisions
        self._selected: dict[tuple[int, int], tuple[Tensor, Any]] = {}
        self._sizes = SizesInTensors()
        self._fixed = FixedNumbers(fixed)
        self._products = SparseProducts()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        place = caller()
        if func in ASKS and place in self._branches.decided:
            if place in self._branches.finite:
                self._branches.assumed.add(place)
            return self._branches.decided[place]
        if func is torch.Tensor.item and place in self._branches.items:
            return _as_item(args[0])
        if func in ASKS and place in self._branches.chances:
            # Unlike torch's own error it cannot be caught by a module.
            raise CannotSelectError("a condition")
        if func is torch.Tensor.item and args[0].requires_grad:
            # A number of Python has no gradient.
            args = (args[0].detach(),)
        if self._products.takes(func, args, kwargs or {}):
            return self._products.called(func, args, kwargs or {})
        func = INSTEAD.get(func, func)
        if func is bincount and line_of(place) in self._branches.exceeding:
            func = torch.bincount
        result = self._fixed.called(self._called, func, args, kwargs or {})
        if func in _SELECTS and len(args) == 2 and is_mask(args[1]):
            self._count(args[1], result.shape[0])
        if place in self._branches.found and isinstance(result, Tensor) and not self._decisions.open:
            private.assume(result.shape[0] > 0)
            self._branches.assumed.add(place)
        return result

    def _called(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if function in _INDEXED:
            args = indexed(args, self._positions)
        return self._sizes.called(function, args, kwargs)

    def _positions(self, mask: Tensor) -> tuple[Tensor, ...]:
        """Return where a mask is true, as an index of each of its axes."""
        found = mask.nonzero()
        self._count(mask, found.shape[0])
        return found.unbind(1)

    def _count(self, mask: Tensor, count: Any) -> None:
        """Note how many elements a mask selects."""
        # With the mask itself, so that no other gets its id; written into, it is another one.
        _, known = self._selected.setdefault((id(mask), mask._version), (mask, count))
        if known is not count:
            private.assume(count == known)


class _Observed(TorchFunctionMode):
    """Note where code asks for the truth value of a tensor, and answer one place the other way round.

    Args:
        turned: that place; None: all answers are true.
        times: how often it asks; the run ends once the code there has gone on without an error as often.
        items: whether random numbers that are taken out of tensors stay tensors.

    Attributes:
        asked: place -> the answers, and of which kinds the tensors are.
        selecting: the code of functions that select by masks or take out numbers, of those that call them, and of those
            that ask for sizes afterwards.
        loops: where code loops over what `nonzero` finds in a vector.
        looped: where that `nonzero` is.
        found: place of a `nonzero` -> whether it found something, each time.
        exceeding: lines in which `bincount` gives more counts than its `minlength`.
        items: where random numbers are taken out of tensors, and stay tensors.
    """

    def __init__(self, turned: Place | None = None, times: int = 0, *, items: bool = True) -> None:
        super().__init__()
        self.asked: dict[Place, tuple[list[bool], set[str]]] = {}
        self.found: dict[Place, list[bool]] = {}
        self.exceeding: set[Line] = set()
        self.selecting: set[CodeType] = set()
        self.loops: set[Place] = set()
        self.looped: set[Place] = set()
        self.items: set[Place] = set()
        self.takes_items = items
        self._turned, self._times = turned, times
        self._asking: list[FrameType] = []
        # With the tensor itself, so that no other gets its id.
        self._kinds: dict[int, tuple[str, Any]] = {}
        self._vectors = Found()
        self._found_in: dict[int, Place] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._asking and len(self._asking) >= self._times and not self._still_asks():
            raise _NoErrorError
        name = getattr(func, "__name__", "")
        known = {self._kinds.get(id(one), (None,))[0] for one in args if isinstance(one, Tensor)}
        if func is torch.Tensor.item and known == {"random"} and self.takes_items and _is_inexact(args[0]):
            self.items.add(caller())
            func = _as_item
        if func is torch.Tensor.unbind and (vector := self._vectors.vector(args[0])) is not None:
            if (place := _looping()) is not None:
                self.loops.add(place)
                self.looped.add(self._found_in[id(vector)])
        with self._vectors:
            result = func(*args, **(kwargs or {}))
        kind = None
        if name in _FINITE:
            kind = "finite"
        elif name in _RANDOM or known == {"random"}:
            kind = "random"
        elif name in _KEEPS or func is torch.Tensor.__bool__:
            kind = next((self._kinds[id(one)][0] for one in args if id(one) in self._kinds), None)
        if selected_by(func, args) or name in _TAKEN:
            self.selecting |= callers(_CALLERS)
        elif self.selecting and not _SIZES.isdisjoint(calling_frame().f_code.co_names):
            # Of what was selected before.
            self.selecting |= callers(1)
        if func is torch.Tensor.__bool__ or (func is torch.Tensor.item and isinstance(result, bool)):
            place = caller()
            answers, kinds = self.asked.setdefault(place, ([], set()))
            answers.append(result)
            kinds.update([] if kind is None else [kind])
            if place != self._turned:
                return result
            self._asking.append(calling_frame())
            return not result
        if name == "bincount" and exceeds_minlength(result, *args, **(kwargs or {})):
            self.exceeding.add(line_of(caller()))
        if name == "nonzero" and isinstance(result, Tensor):
            self.found.setdefault(caller(), []).append(result.shape[0] > 0)
        if name in ("nonzero", "where"):
            self._found_in[id(args[0])] = caller()
        if kind is not None:
            self._kinds[id(result)] = kind, result
        return result

    def _still_asks(self) -> bool:
        """Whether a function that got the other answer has not returned."""
        frame = inspect.currentframe()
        while frame is not None and frame not in self._asking:
            frame = frame.f_back
        return frame is not None


class _NoErrorError(BaseException):
    """Ends a run that has shown that an answer raises no error; modules do not catch it."""


def _as_item(tensor: Tensor) -> Tensor:
    """Return the only number of a tensor as one that counts as Python's number in arithmetic."""
    number = tensor.reshape([])
    return number if number.dtype == torch.bool else number.double()


def _is_inexact(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.dtype == torch.bool


def _run(step: TorchStep, observed: _Observed, selections: Selections) -> list[Written]:
    """Run the forward pass, and let a mode observe it; return what the sides of selections write."""
    seeded = SeededDropout(step.state.get(DROPOUT_SEED))
    with seeded, host_draws.as_tensors(), built_in.replaced(step), observed, selections.installed(step) as decisions:
        forward(step)
    return decisions.written


def _is_check(step: TorchStep, place: Place, times: int, selections: Selections) -> bool:
    """Whether code that asks some times raises an error, in the very function, when the answer is the other one."""
    try:
        _run(step, _Observed(place, times), selections)
    except _NoErrorError:
        return False
    except Exception as error:
        # A user's module may raise anything.
        traceback = _last(error.__traceback__)
        if traceback is None or traceback.tb_frame.f_code is not place[0]:
            return False
        return place[0].co_code[traceback.tb_lasti] == dis.opmap["RAISE_VARARGS"]
    return False


def _looping() -> Place | None:
    """Return where the loop is over the tensor that is split into its rows; None: it is no loop."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not torch.Tensor.__iter__.__code__:
        frame = frame.f_back
    return None if frame is None or frame.f_back is None else (frame.f_back.f_code, offset(frame.f_back))


def _last(traceback: TracebackType | None) -> TracebackType | None:
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    return traceback


def _text(place: Place) -> str:
    return explaining.text_of(place[0], line_of(place)[1])


_OFF: Mapping[str, Callable[[Any], object]] = {
    "layerdrop": lambda value: 0.0,
    "apply_spec_augment": lambda value: False,
}


def settings(step: TorchStep) -> str:
    """Return the settings of the configurations of transformers that make a module draw such numbers, for messages."""
    found: dict[str, object] = {}
    for module in step.module.modules():
        config = getattr(module, "config", None)
        for name, value in getattr(config, "__dict__", {}).items():
            off = next((off for key, off in _OFF.items() if name.endswith(key)), None)
            if off is not None and value:
                found[name] = off(value)
    if not found:
        return ""
    return f" (make the model with {', '.join(f'{name}={value}' for name, value in found.items())})"
