"""Conditions whether anything is selected, around code that does nothing where nothing is.

`if mask.any(): out[mask] = expert(x[mask])` computes the same without its condition, and so does a loop over experts
without `if index.numel() == 0: continue`. That is tried: with masks that select nothing, PyTorch gives the same loss,
buffers and gradients whether it runs that code or not. This module imports torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import itertools
import math
import operator
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from types import CodeType, MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from gradfuse.export import built_in, dropout, host_draws, rewriting, size_numbers
from gradfuse.export.functions import functions_of, is_within, outermost
from gradfuse.export.observing import (
    ASKS,
    Place,
    Sturdy,
    are_close,
    caller,
    calling_frame,
    forward,
    line_of,
    position,
    with_gradients,
)
from gradfuse.export.rewriting import CannotSelectError
from gradfuse.export.selections import Line, Selections, Spot, Ways, going
from gradfuse.export.torch_step import TorchStep
from gradfuse.export.traced_functions import is_mask
from gradfuse.training.step import DROPOUT_SEED

_AT_RANDOM, _ALONE = 3, 6
"""How many times a step is run with some masks emptied at random, and with one alone at most."""

_CHOOSE = frozenset("topk argmax argmin max min multinomial".split())
"""Functions that give indices, by which code may group."""

_COUNT = frozenset("bincount count_nonzero sum histc".split())
_TAKE = frozenset("getitem view reshape flatten squeeze to long int".split())
"""Functions that count, and those that pass counts on."""

_COMPARISONS = {
    "gt": operator.gt,
    "ge": operator.ge,
    "lt": operator.lt,
    "le": operator.le,
    "eq": operator.eq,
    "ne": operator.ne,
}
_LARGE = 2**62

_MOST_ALONE = 16
"""The most masks that are emptied or filled alone where that is needed."""

_MOST = 16
"""The most guards that are tried one by one."""

_Where = tuple[str, int, int]
"""File, line and column of a call."""

Made = tuple[_Where, int]
"""Where a tensor was made, and which of those made there it is."""


@dataclasses.dataclass(frozen=True)
class _Change:
    """What is other in a run than in the module's own.

    Attributes:
        masks: the masks that are emptied.
        lines: where all masks that are made are emptied as well.
        full: whether these select all instead.
        first: whether these select their first element alone.
        turns: whether the first element of each mask is turned the other way round.
        grouped: the share of elements that go into one group, where code groups them by an index.
    """

    masks: Collection[Made] = ()
    lines: Collection[_Where] = ()
    full: bool = False
    first: bool = False
    turns: bool = False
    grouped: float = 0.0


Guard = tuple[CodeType, tuple[int, int]]
"""A function, before it was rewritten, and where its condition is: line and column."""


@dataclasses.dataclass(frozen=True)
class Guards:
    """Conditions on numbers of Python, such as sizes, that go as if something were selected.

    Attributes:
        codes: the code of each function that has some -> its code that asks.
        answers: how they go; all others are as the module has them.
        others: those that choose what is computed.
    """

    codes: Mapping[CodeType, CodeType] = dataclasses.field(default_factory=dict)
    answers: Mapping[Guard, bool] = dataclasses.field(default_factory=dict)
    others: Collection[Guard] = ()

    @contextlib.contextmanager
    def installed(
        self, step: TorchStep, ways: Ways = MappingProxyType({})
    ) -> Iterator[Mapping[Guard, Sequence[_Condition]]]:
        """Let the functions ask; yield how their conditions on numbers go, some of them other ways."""
        found: dict[Guard, list[_Condition]] = defaultdict(list)
        functions = functions_of(self.codes, step)
        originals = {id(code): code for code in self.codes}
        changed = [(function, originals[key]) for key, several in functions.items() for function in several]
        try:
            for function, code in changed:
                function.__globals__.setdefault(rewriting.GUARDS, _Asked(self, found, ways))
                function.__code__ = self.codes[code]
            with size_numbers.called_in([function.__globals__ for function, _ in changed]):
                yield found
        finally:
            for function, code in changed:
                function.__code__ = code
                function.__globals__.pop(rewriting.GUARDS, None)


class _Asked:
    """What rewritten functions call."""

    def __init__(self, guards: Guards, found: dict[Guard, list[_Condition]], ways: Ways) -> None:
        self._answers, self._ways = guards.answers, ways
        self._found = found
        self._functions = {new: old for old, new in guards.codes.items()}

    def _function(self, code: CodeType) -> CodeType:
        """Return the function that was rewritten, of its code or of what is within."""
        if code not in self._functions:
            self._functions[code] = next(old for new, old in self._functions.items() if is_within(code, new))
        return self._functions[code]

    def asks(self, value: Any, number: Any, line: int, column: int, name: str) -> Any:
        frame = inspect.currentframe()
        assert frame is not None and frame.f_back is not None
        guard = self._function(frame.f_back.f_code), (line, column)
        if guard in self._answers:
            return self._answers[guard]
        answer = value if name == "truth" else _COMPARISONS[name](value, number)
        if type(value) not in _NUMBERS or type(number) not in _NUMBERS:
            return answer
        answer = going(bool(answer), self._ways, (guard[0].co_filename, line, column))
        of_none, of_one, of_many = (_answer(name, count, number) for count in (0, 1, _LARGE))
        counts = type(value) is type(number) is int and value >= 0 and of_none != of_one == of_many
        self._found[guard].append(_Condition((value, number), answer, of_one if counts else None))
        return answer


_NUMBERS = (int, float)


@dataclasses.dataclass(frozen=True)
class _Condition:
    """How a condition on numbers went.

    Attributes:
        numbers: these.
        answer: how it went.
        of_some: how it goes for all numbers but 0, if it is whether a count is 0; None: it is another one.
    """

    numbers: tuple[float, float]
    answer: bool
    of_some: bool | None

    @property
    def is_of_none(self) -> bool:
        """Whether it is whether a count is 0, and that was 0."""
        return self.of_some is not None and self.numbers[0] == 0


def _answer(name: str, count: int, number: float) -> bool:
    return bool(count) if name == "truth" else bool(_COMPARISONS[name](count, number))


def guards_of(step: TorchStep, selecting: Collection[CodeType]) -> Guards:
    """Return the conditions on sizes, and on other numbers, that only guard code without an effect on empty masks.

    Args:
        step: the step.
        selecting: the code of the functions that select by masks, or call such.
    """
    codes = {}
    for code, _ in outermost([(code, None) for code in selecting], step):
        with contextlib.suppress(rewriting.CannotRewriteError):
            codes[code] = rewriting.with_guards(code, size_numbers.NAMES)
    guards = Guards(codes)
    if not codes:
        return guards
    run = _tried(step, guards, _Change(), _forward_alone)
    if run is None or not run.conditions:
        return Guards()
    empty = _tried(step, guards, _Change(run.masks), _forward_alone) if run.masks else None
    wanted = {guard: bool(found[0].of_some) for guard, found in _zeros(empty, all).items()}
    trials = [run, empty]
    if run.groups:
        grouped = _tried(step, guards, _Change(grouped=1.0), _forward_alone)
        wanted |= {guard: bool(found[0].of_some) for guard, found in _zeros(grouped, any).items()}
        trials.append(grouped)
    if not wanted or _agree(step, Guards(codes, wanted), run.masks):
        together = Guards(codes, wanted)
    else:
        each = [Guards(codes, {guard: answer}) for guard, answer in list(wanted.items())[:_MOST]]
        agreeing = [one for one in each if _agree(step, one, run.masks)] if len(wanted) > 1 else []
        together = Guards(codes, {guard: answer for one in agreeing for guard, answer in one.answers.items()})
        together = together if _agree(step, together, run.masks) else Guards(codes)
    others = [_Change(), _Change(lines=run.times), _Change(lines=run.times, full=True)]
    counted = {name: step.state[name] + 1 for name in step.buffers if step.state[name].numel() == 1}
    other = dataclasses.replace(step.with_others(), state=step.with_others().state | counted)
    trials += [_tried(other, guards, change, _forward_alone) for change in others]
    trials.append(_tried(step, guards, _Change(turns=True), _forward_alone))
    varying = _varying(trials)
    return dataclasses.replace(together, others=[guard for guard in varying if guard not in together.answers])


def _varying(trials: Sequence[_Trial | None]) -> list[Guard]:
    """Return the conditions whose numbers follow from values: they differ between runs, which have equal sizes.

    So do numbers that such conditions compare too where a condition is asked in some runs alone, as that of an `elif`.
    """
    run = [trial.conditions for trial in trials if trial is not None]
    found: dict[Guard, set[tuple[tuple[float, float], ...]]] = defaultdict(set)
    for conditions in run:
        for guard, several in conditions.items():
            found[guard].add(tuple(one.numbers for one in several))
    varying = [guard for guard, several in found.items() if len(several) > 1]
    others = [guard for guard in found if guard not in varying and not all(guard in conditions for conditions in run)]
    return [*varying, *(guard for guard in others if all(_is_among(guard, varying, one) for one in run))]


def _is_among(guard: Guard, others: Sequence[Guard], conditions: Mapping[Guard, Sequence[_Condition]]) -> bool:
    """Whether other conditions in the same function compare the numbers of one, if a run asks for it."""
    known = {one.numbers[0] for other in others if other[0] is guard[0] for one in conditions.get(other, ())}
    return all(one.numbers[0] in known for one in conditions.get(guard, ()))


def _zeros(trial: _Trial | None, which: Callable[[Iterable[bool]], bool]) -> dict[Guard, Sequence[_Condition]]:
    """Return the conditions whose numbers, all or any, are 0 in a run."""
    conditions = {} if trial is None else trial.conditions
    return {guard: found for guard, found in conditions.items() if which(one.is_of_none for one in found)}


def _agree(step: TorchStep, guards: Guards, masks: Sequence[Made]) -> bool:
    """Whether a step computes the same with empty masks if conditions are told that there is something."""
    seen: set[Guard] = set()
    for change in _choices(masks, groups=True) if guards.answers else ():
        natural = _tried(step, Guards(guards.codes), change, _outcome)
        if natural is None or not _are_finite(natural.outcome):
            continue
        told = _tried(step, guards, change, _outcome)
        if told is None:
            return False
        if not _are_same_masks(change, natural.times, told.times):
            continue
        if not natural.is_close(told):
            return False
        seen |= {guard for guard, found in natural.conditions.items() if any(one.is_of_none for one in found)}
    return bool(guards.answers) and seen >= guards.answers.keys()


@dataclasses.dataclass(frozen=True)
class _Trial:
    """What a step computes, which masks it selects by, how many whole numbers it made where, whether it groups by an
    index, and how its conditions go."""

    outcome: Mapping[str, Tensor]
    masks: Sequence[Made]
    times: Mapping[_Where, int]
    groups: bool
    conditions: Mapping[Guard, Sequence[_Condition]]

    def is_close(self, other: _Trial) -> bool:
        return all(are_close(tensor, other.outcome[name]) for name, tensor in self.outcome.items())


def _tried(
    step: TorchStep, guards: Guards, change: _Change, run: Callable[[TorchStep], Mapping[str, Tensor]]
) -> _Trial | None:
    """Run a step with a change; None: it fails."""
    try:
        with guards.installed(step) as found, _Masks(change) as masks:
            outcome = run(step)
    except Exception:
        # A user's module may raise anything where nothing is selected.
        return None
    return _Trial(outcome, list(masks.selected), masks.times, masks.groups, dict(found))


def _choices(masks: Sequence[Made], *, groups: bool) -> list[_Change]:
    """Return which masks are emptied: all, one alone, as the guarded code may use others, and some at random.

    Besides, if wanted, what is grouped by an index goes into one group, all and some at random. Each change is there
    once: of one mask, those at random are none or all.
    """
    changes: list[_Change] = []
    for change in _every_choice(masks, groups=groups):
        if change not in changes:
            changes.append(change)
    return changes


def _every_choice(masks: Sequence[Made], *, groups: bool) -> Iterator[_Change]:
    if masks:
        yield _Change(tuple(masks))
        yield _Change(lines={line for line, _ in masks})
    for mask in masks[:: max(1, -(-len(masks) // _ALONE))]:
        yield _Change((mask,))
    for seed in range(_AT_RANDOM if masks else 0):
        chosen = torch.rand(len(masks), generator=torch.Generator().manual_seed(seed)) < 0.5
        yield _Change(tuple(mask for mask, one in zip(masks, chosen, strict=True) if one))
    if groups:
        yield from (_Change(grouped=share) for share in (1.0, 0.5))


def idle_answers(step: TorchStep, places: Iterable[Place]) -> dict[Place, bool]:
    """Return how conditions go in which code asks for nothing but whether masks are empty, if they are not.

    Args:
        step: the step.
        places: where it asks for the truth values of tensors.

    Returns:
        The answers of those places that only guard code without an effect on empty masks.
    """
    asking = list(places)
    if not asking:
        return {}
    observed = _Masks()
    try:
        with observed:
            _forward_alone(step)
    except Exception:
        # A user's module may raise anything.
        return {}
    found: dict[Place, bool] = {}
    about: dict[Place, list[Made]] = {}
    for place in asking:
        asked = observed.asked.get(place, [])
        known = [one for one in asked if one is not None]
        answers = {answer for _, answer in known}
        if len(known) == len(asked) and len(answers) == 1:
            (found[place],) = answers
            about[place] = list(dict.fromkeys(mask for mask, _ in known if mask is not None))
    # Where conditions are joined, one alone may not change what is computed, and hide what the next one asks.
    together = list(dict.fromkeys([*(mask for masks in about.values() for mask in masks), *observed.masks]))
    idle = {
        place: answer for place, answer in found.items() if _are_idle(step, {place: answer}, about[place], together)
    }
    return idle if len(idle) < 2 or _are_idle(step, idle, together) else {}


def answering(answers: Mapping[Place, bool]) -> TorchFunctionMode:
    """Let conditions at these places go so, in PyTorch."""
    return _Masks(answers=answers)


def _are_idle(
    step: TorchStep, answers: Mapping[Place, bool], masks: Sequence[Made], others: Sequence[Made] = ()
) -> bool:
    """Whether a step computes the same with empty masks, also with these others, if code is told that none is empty."""
    compared = False
    changes = [(change, False) for change in _choices(masks, groups=True)]
    changes += [(change, True) for change in (_Change(others), _Change(lines={line for line, _ in others})) if others]
    for change, may_fail in changes:
        outcomes, natural, told = [], _Masks(change), _Masks(change, answers)
        for run in (natural, told):
            try:
                with run:
                    outcomes.append(_outcome(step))
            except Exception:
                # A user's module may raise anything where nothing is selected.
                break
        if len(outcomes) < 2:
            if may_fail and not outcomes:
                continue
            return False
        own, other = outcomes
        if not _are_finite(own) or not _are_same_masks(change, natural.times, told.times):
            continue
        if not all(are_close(tensor, other[name]) for name, tensor in own.items()):
            return False
        went = all(natural.answered[place] == {True, False} for place in answers)
        compared |= went or bool(change.masks or change.lines)
    return compared


def failing_otherwise(step: TorchStep, asking: Guards) -> dict[Guard, bool]:
    """Return how checks go: conditions whether there is anything, after which a step fails if there is nothing."""
    guards = Guards(asking.codes)
    wanted = [
        guard
        for guard in asking.others
        if _fails(step, guards, _Change(), {(guard[0].co_filename, *guard[1]): None})[1]
    ]
    run = _tried(step, guards, _Change(), _forward_alone) if wanted else None
    if run is None:
        return {}
    of_some = {guard: found[0].of_some for guard, found in run.conditions.items() if not found[0].is_of_none}
    wanted = [guard for guard in wanted if of_some.get(guard) is not None]
    ways: dict[Guard, set[tuple[bool, bool]]] = defaultdict(set)
    for change in (_Change(), _Change(run.masks, full=True), *_choices(run.masks, groups=run.groups)):
        conditions, fails = _fails(step, guards, change)
        for guard in wanted:
            ways[guard] |= {(one.answer, fails) for one in conditions.get(guard, ())}
    return {
        guard: answer
        for guard, answer in of_some.items()
        if answer is not None and (not answer, True) in ways[guard] and (not answer, False) not in ways[guard]
    }


def _fails(
    step: TorchStep, guards: Guards, change: _Change, ways: Ways = MappingProxyType({})
) -> tuple[Mapping[Guard, Sequence[_Condition]], bool]:
    """Return how conditions go in a run, and whether it fails."""
    with guards.installed(step, ways) as found, _Masks(change, ways=ways):
        try:
            _outcome(step)
        except Exception:
            # A user's module may raise anything.
            return found, True
    return found, False


def are_selected_alike(step: TorchStep, selections: Selections, places: Collection[Place], asking: Guards) -> bool:
    """Whether a step that computes both sides of conditions gives what the condition's own side gives.

    Each condition must have gone both ways: with masks that are empty, that select all, or turned the other way round.

    Args:
        step: the step.
        selections: the functions that compute both sides.
        places: where the conditions on tensors are.
        asking: those on numbers, as `others`.
    """
    observed = _Masks()
    try:
        with observed:
            _forward_alone(step)
    except Exception:
        # A user's module may raise anything.
        return False
    meant = [one[0] for place in places for one in observed.asked.get(place, []) if one is not None]
    masks = [made for made in dict.fromkeys([*meant, *observed.selected]) if made is not None]
    changes = [_Change(), _Change(masks, full=True)]
    changes += [one for one in _choices(masks, groups=observed.groups) if one not in changes]
    # Functions that ask for numbers have other code.
    lines = {line_of(place) for place in places}
    conditions: dict[Line | Guard, Line | Spot] = {line: line for line in lines}
    conditions |= {(code, place): (code.co_filename, *place) for code, place in asking.others}
    wanted = {(one, answer) for one in conditions for answer in (False, True)}
    seen: set[tuple[Line | Guard, bool]] = set()

    def is_alike(change: _Change, ways: Ways) -> bool:
        """Compare one run, and note how conditions have gone in it."""
        natural = _Masks(change, ways=ways)
        try:
            with Guards(asking.codes).installed(step, ways) as found, natural:
                outcome = _outcome(step)
        except Exception:
            # A user's module may raise anything where nothing is selected.
            return True
        if not _are_finite(outcome):
            return True
        try:
            with built_in.replaced(step), selections.installed(step, ways=ways), _Masks(change) as selected:
                both = _outcome(step)
        except (Exception, CannotSelectError):
            # The side that is not taken may fail.
            return False
        if not _are_same_masks(change, natural.times, selected.times):
            return True
        if not all(are_close(tensor, both[name]) for name, tensor in outcome.items()):
            return False
        seen.update((line_of(place), answer) for place, answers in natural.answered.items() for answer in answers)
        seen.update((guard, one.answer) for guard, several in found.items() for one in several)
        return True

    if not all(is_alike(change, {}) for change in changes[:1]):
        return False
    own = {place: [answer for answer in (False, True) if (one, answer) in seen] for one, place in conditions.items()}
    together: dict[Line, dict[Line | Spot, None]] = defaultdict(dict)
    for place in own:
        together[place[:2]][place] = None
    # Besides, those within sides that the batch does not take.
    decided = [(code.co_filename, line) for code, several in selections.lines.items() for line in several]
    own |= {line: [] for line in decided if line not in together}
    trials: Iterable[tuple[_Change, Ways]] = itertools.chain(
        ((change, {}) for change in changes[1:]),
        ((_Change(), ways) for ways in together.values()),
        ((_Change(), ways) for ways in _joint_ways(own)),
    )
    if not all(is_alike(*trial) for trial in trials):
        return False
    trials = itertools.chain(
        # As those above may miss what several conditions, one after the other, are about.
        ((_Change([mask], full=full), {}) for mask in observed.masks[:_MOST_ALONE] for full in (False, True)),
        ((_Change(tuple(observed.masks), first=True), {}) for _ in observed.masks[:1]),
        # As those of an `elif`, which is asked if the one before goes the other way round.
        (
            (_Change(), dict.fromkeys(turned))
            for count in (1, 2)
            for turned in itertools.combinations(conditions.values(), count)
            if not {conditions[one] for one, _ in wanted - seen}.isdisjoint(turned)
        ),
    )
    return all(wanted <= seen or is_alike(*trial) for trial in trials) and wanted <= seen


def _joint_ways(own: Mapping[Line | Spot, Sequence[bool]]) -> Iterator[Ways]:
    """Yield how conditions go in runs in which each two of them go all four ways: what two sides do may matter jointly.

    Args:
        own: how each has gone in the module's own run; runs that differ from it by one condition are left out.
    """
    places = list(own)
    count = next(one for one in itertools.count(1) if math.comb(one, one // 2) >= len(places))
    # No set of this size holds another one.
    sets = list(itertools.combinations(range(count), count // 2))
    rows = [dict.fromkeys(places, way) for way in (False, True)]
    if len(places) > 1:
        rows += [{place: number in one for place, one in zip(places, sets, strict=False)} for number in range(count)]
    for ways in rows:
        if sum(own[place] != [way] for place, way in ways.items()) > 1 or any(len(one) > 1 for one in own.values()):
            yield ways


def _are_same_masks(change: _Change, times: Mapping[_Where, int], others: Mapping[_Where, int]) -> bool:
    """Whether two runs have emptied the same masks: not if one has left out code that makes some of them."""
    return all(times.get(line) == others.get(line) for line, _ in change.masks)


def _are_finite(outcome: Mapping[str, Tensor]) -> bool:
    return all(bool(torch.isfinite(tensor).all()) for tensor in outcome.values())


def _forward_alone(step: TorchStep) -> dict[str, Tensor]:
    with Sturdy(), dropout.EqualDropout(step.state.get(DROPOUT_SEED)), host_draws.as_tensors():
        loss, after = forward(step)
    return {**after, "loss": loss}


def _outcome(step: TorchStep) -> dict[str, Tensor]:
    with Sturdy(), dropout.EqualDropout(step.state.get(DROPOUT_SEED)), host_draws.as_tensors():
        return with_gradients(step)


def selected_by(func: Any, args: tuple[Any, ...]) -> list[Tensor]:
    """Return the masks by which a call selects."""
    name = getattr(func, "__name__", "")
    if name in ("nonzero", "argwhere") or (name == "where" and len(args) == 1):
        return [args[0]] if args else []
    if name not in ("__getitem__", "__setitem__", "masked_select") or len(args) < 2:
        return []
    indices = args[1] if isinstance(args[1], tuple) else (args[1],)
    return [one for one in indices if is_mask(one)]


def _are_counts(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() and tensor.numel() > 0 and bool((tensor >= 0).all())


_UNCHANGED = _Change()


class _Masks(TorchFunctionMode):
    """Note which conditions are whether a mask is empty; empty some masks, and answer some conditions.

    Attributes:
        asked: place -> the mask of each condition, if it is about one and not about another count, and how it goes if
            that is not empty; None: it is another one.
        selected: the masks by which something is selected.
        masks: all masks that are made, which may select nothing themselves.
        groups: whether something is chosen by an index, or counted by one.
        answered: place -> how its conditions went.
        times: where tensors of whole numbers were made -> how many.

    Args:
        change: what is other than in the module's own run.
        answers: how conditions at some places go.
        ways: how conditions go at some.
    """

    def __init__(
        self,
        change: _Change = _UNCHANGED,
        answers: Mapping[Place, bool] | None = None,
        ways: Ways = MappingProxyType({}),
    ) -> None:
        super().__init__()
        self.answered: dict[Place, set[bool]] = defaultdict(set)
        self.groups = False
        self._change, self._ways = change, ways
        self.asked: dict[Place, list[tuple[Made | None, bool] | None]] = {}
        self.selected: dict[Made, None] = {}
        self.masks: list[Made] = []
        self._emptied, self._answers = frozenset(change.masks), answers or {}
        self.times: Counter[_Where] = Counter()
        # Each with the tensor itself, so that no other gets its id.
        self._made: dict[int, tuple[Made, Tensor]] = {}
        self._counts: dict[int, tuple[Made | None, Tensor]] = {}
        self._conditions: dict[int, tuple[Made | None, bool, Tensor]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = (self._made[id(one)][0] for one in selected_by(func, args) if id(one) in self._made)
        self.selected |= dict.fromkeys(known)
        name = getattr(func, "__name__", "").strip("_")
        if name == "bincount" and not self.groups:
            self._group(args[0], 1)
        result = func(*args, **(kwargs or {}))
        if name in _CHOOSE:
            index = result[-1] if isinstance(result, tuple) else result
            self._group(index, index.shape[-1] if name == "topk" and index.dim() > 1 else 1)
        if func in ASKS and (func is not torch.Tensor.item or isinstance(result, bool)):
            place = caller()
            self.asked.setdefault(place, []).append(self._meaning(args[0]))
            answer = self._answers.get(place, going(result, self._ways, line_of(place)) if self._ways else result)
            self.answered[place].add(answer)
            return answer
        if isinstance(result, Tensor) and not result.is_floating_point() and not result.is_complex():
            self._note_made(result, position(calling_frame()))
            self._note_meaning(name, args, kwargs, result)
        return result

    def _group(self, index: Any, several: int) -> None:
        """Let all choose what the first one does, if a run is about that; each chooses several."""
        if not isinstance(index, Tensor) or index.dtype != torch.int64 or not index.numel():
            return
        self.groups = True
        if self._change.grouped:
            # Backward passes have saved it.
            rows = index.data.view(-1, several)
            draws = torch.rand(len(rows), generator=torch.Generator().manual_seed(len(rows)))
            rows[draws < self._change.grouped] = rows[0].clone()

    def _note_made(self, result: Tensor, line: _Where) -> None:
        self.times[line] += 1
        made = line, self.times[line]
        if is_mask(result):
            self.masks.append(made)
            if self._change.turns and result.numel():
                result[(0,) * result.dim()] ^= True
        if (made in self._emptied or line in self._change.lines) and (
            result.dtype == torch.bool or not self._change.full
        ):
            result.fill_(self._change.full)
            if self._change.first and result.dtype == torch.bool and result.numel():
                result[(0,) * result.dim()] = True
        self._made[id(result)] = made, result

    def _note_meaning(self, name: str, args: tuple[Any, ...], kwargs: Any, result: Tensor) -> None:
        first: Any = args[0] if args else None
        made, _ = self._made.get(id(first), (None, None))
        if (name in _COUNT and _are_counts(result)) or (name in _TAKE and id(first) in self._counts):
            self._counts[id(result)] = None, result
        if name in ("any", "sum", "count_nonzero") and len(args) == 1 and not kwargs and made is not None:
            if name == "any":
                self._conditions[id(result)] = made, True, result
            elif name == "count_nonzero" or first.dtype == torch.bool:
                self._counts[id(result)] = made, result
        elif name in ("logical_not", "invert") and (condition := self._meaning(first)) is not None:
            self._conditions[id(result)] = condition[0], not condition[1], result
        elif name in _COMPARISONS and id(first) in self._counts and isinstance(args[1], (int, float)):
            of_none, of_one, of_many = (_COMPARISONS[name](count, args[1]) for count in (0, 1, _LARGE))
            if of_none != of_one == of_many:
                self._conditions[id(result)] = self._counts[id(first)][0], of_one, result

    def _meaning(self, tensor: Any) -> tuple[Made | None, bool] | None:
        """Return the mask that a condition is about, if it is about one, and whether it holds if that is not empty."""
        if id(tensor) in self._counts:
            return self._counts[id(tensor)][0], True
        return self._conditions[id(tensor)][:2] if id(tensor) in self._conditions else None
