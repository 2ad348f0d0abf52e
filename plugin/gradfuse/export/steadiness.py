"""A step must compute the same whenever it runs on the same tensors: what changes would be a constant of the model.

Such a change comes from a counter, a clock, a random generator, or values kept from earlier batches. The step
is run twice, from the same tensors and the same state of PyTorch's, numpy's and Python's own generators, but with all
else in Python as the first run left it. Where the code changes something there, it is also run with later numbers, and
with other tensors, as if it were new and as if it had run before. This module imports torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import math
import os
import random
import sys
import time
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from gradfuse import _torch_private as private
from gradfuse.errors import ExportError, few
from gradfuse.export import branches, clocks, dropout, explaining, host_draws, ties
from gradfuse.export.outside import Outside
from gradfuse.export.python_state import Number, PythonState
from gradfuse.export.recording import Call, Recorded
from gradfuse.export.reporting import WHO, refusal
from gradfuse.export.shared_memory import Aliases, refuse_shared
from gradfuse.export.torch_step import Outcome, TorchStep
from gradfuse.training.step import GRADIENT_SUFFIX, LOSS

_LATER = (10, 150, 1_500, 15_000, 62_999_999, 63_000_000)
"""Counts of calls to try: beyond most thresholds, and multiples of most numbers that code divides by."""
_MORE_RUNS, _MORE_SECONDS = 20, 1.0
"""How many more runs, as far as the time goes, where code changes something: what follows from it may do so late."""
_LEAST_ROUNDS = 2
"""How many rounds of calls there are at least, one call on tensors of each kind: what is the least follows from one."""
_TIMES = (
    datetime.timedelta(days=40, hours=7, minutes=13, seconds=17),
    datetime.timedelta(days=150, hours=13, minutes=31, seconds=29),
)
_ROUNDINGS, _ROUNDINGS_OF_LARGEST = 64, 8
"""By how many roundings of an output, and of the largest one, two runs may differ."""
_ROUNDINGS_OF_OPERATOR, _MOST_OF_OPERATOR = 2048, 0.25
"""By how much of its largest number the result of one operator may, if its operands are the same."""
_NAMED = 3
_HELD, _FEW = 37, 16

_EXPECTED = (
    "expected numbers that follow from batch, parameters and buffers: draws by torch.rand and the like without a "
    "generator, no clock, and a buffer for what is to change from step to step"
)


def first_run(step: TorchStep, state: PythonState, *, frozen_inputs: bool = False) -> Outcome:
    """Run a step, and require that every run gives the same results.

    Args:
        step: the step.
        state: Python's state; it is as before at the end.
        frozen_inputs: whether frozen weights may change between steps.

    Raises:
        ExportError: it would not, it fails, or what it changes shares memory with something else.
    """
    try:
        times: list[str | None] = []
        watched = clocks.later(datetime.timedelta(0), state.clocks, lambda: times.append(explaining.current_place()))
        with _same_process(), _Seeding() as seeding, watched, Aliases(step) as aliases, _TracesOfUpdates() as traces:
            # Elsewhere than where an earlier call, which seeds them, has left them.
            random.random()
            np.random.random()
            before = host_draws.states()
            # Held, as the caller of a step may hold a batch, which code can ask for by a weak reference.
            held: list[Tensor] = []
            first = step.run(held=held)
            state.mark()
            draws = host_draws.states() != before
        if first.writing_hooks:
            _require_separate_gradients(step, first)
        live = step.with_frozen_inputs(first.changed) if frozen_inputs else step
        refuse_shared(live, first)
        aliases.refuse(live, first)
        if draws and not _seeds_itself(step):
            places = _Sources.of(step, state).text("draws")
            raise refusal(
                f"the module draws random numbers by numpy or by Python{places and f':{places}'}, which an exported "
                f"step would repeat in every call; expected torch's random numbers or none{branches.settings(step)}"
            )
        changed = state.changed()
        begin = time.monotonic()
        outside, later = Outside(), Outside()
        with _Seeding() as seeding_again, _elsewhere_in_memory(), ties.Ties() as found, outside.noted():
            second = _again(step, changed)
        seconds = time.monotonic() - begin
        del held
        own_draws, numbers = state.draws(), state.numbers()
        _compare(step, state, first, second, changed)
        if outside.files or outside.objects:
            with later.noted():
                _compare(step, state, first, _again(step, changed), changed)
        if own_draws:
            # However seldom something else follows from them.
            raise _refused(step, state, "the exported step would use the same numbers in each call", None, changed)
        if traces.places:
            _compare_updated(step, state, first, traces.places)
        # What numpy and Python draw by a seed of theirs is the same; torch's draws are the step's own.
        of_draws = seeding.seeds if not draws else [seed for seed in seeding.seeds if seed.startswith("torch")]
        if of_draws and seeding.seeds == seeding_again.seeds and first.dropouts:
            raise refusal(
                f"the step seeds a generator of random numbers, in {seeding.place}, and draws the same ones in each "
                "call; an exported step draws others: expected no seed, or a buffer with the numbers"
            )
        if changed or state.is_endless:
            for _ in _more_runs(_MORE_SECONDS - seconds, least=int(state.is_endless)):
                _compare(step, state, first, _again(step, changed), changed)
        if any(times):
            _compare_at_other_times(step, state, first, changed)
        if changed:
            _compare_later(step, state, first, numbers)
            _compare_on_others(step, state, first, changed)
        text = _of_ties(step, first, found)
        if text is not None:
            raise refusal(text)
        asked = outside.changing(later)
        if asked:
            warnings.warn(
                f"{WHO}: the step asks for what may be another thing in each call, and is not kept in Python: "
                f"{_listed(asked)}; what follows from it is a constant of the exported step",
                stacklevel=4,
            )
        return first
    finally:
        state.restore()


def _require_separate_gradients(step: TorchStep, first: Outcome) -> None:
    """Refuse hooks that write into gradients whose memory other gradients share, as those of the terms of a sum do.

    Raises:
        ExportError: what they write changes more than what they return.
    """
    with _same_process():
        spoilt = step.run(spoils=True)
    if _differ(step, _outputs(first), _outputs(spoilt)):
        raise refusal(
            f"a hook writes into a gradient that has the memory of another gradient: {few(first.writing_hooks)}; "
            "expected hooks that return a new tensor, as gradient.clamp in the place of gradient.clamp_"
        )


def tied(step: TorchStep) -> str | None:
    """Return the message about a step whose results depend on a choice among equal numbers; None if they do not."""
    try:
        with ties.Ties() as found:
            first = _run(step)
        return _of_ties(step, first, found)
    except ExportError:
        return None


def _of_ties(step: TorchStep, first: Outcome, found: ties.Ties) -> str | None:
    """Return what to say where the results of a run follow from a choice among equal numbers that was found in it."""
    if found.place is None:
        return None
    try:
        with ties.OtherChoices():
            other = _run(step)
    except ExportError:
        return None
    if not _differ(step, _outputs(first), _outputs(other)):
        return None
    return (
        f"{found.operator} chooses between equal numbers, in {found.place}, for which PyTorch defines no order, and "
        "the step's results follow from that; expected numbers that differ, if only on this batch"
    )


def _seeds_itself(step: TorchStep) -> bool:
    """Whether the generators of numpy and Python end where they ended before: the step seeds them in each call."""
    with _same_process():
        step.run()
        ended = host_draws.states()
        step.run()
        return host_draws.states() == ended


def settled(step: TorchStep, first: Outcome, state: PythonState) -> TorchStep:
    """Return the step with buffers as a run has left them that take another shape in it, as tables made when needed.

    Args:
        step: the step.
        first: what a run of it gave.
        state: Python's state; it is as before at the end.

    Raises:
        ExportError: the results are others then, or such a buffer may follow from the batch or from parameters, which
            are others when training begins.
    """
    made = {name: first.buffers[name] for name in first.changed if first.buffers[name].shape != step.state[name].shape}
    if not made:
        return step
    later = dataclasses.replace(step, state=step.state | made)
    state.restore()
    second = _run(later)
    if _differ(step, _outputs(first), _outputs(second)):
        goes_on = any(second.buffers[name].shape != tensor.shape for name, tensor in made.items())
        raise _of_made(step, made, "computes something else then", goes_on=goes_on)
    varied: set[str] = set()
    for other in (step.with_others(), _with_distant(step)):
        state.restore()
        try:
            again = _run(other).buffers
        except Exception:
            # Tensors that the module refuses.
            continue
        if not all(torch.equal(again[name], tensor) for name, tensor in made.items()):
            raise _of_made(step, made, "computes it from the batch or from parameters")
        values, others = (one.state | one.batch for one in (step, other))
        varied |= {name for name in values if not torch.equal(values[name], others[name])}
    state.restore()
    fixed = next((name for name in (*step.trainable, *step.batch) if name not in varied), None)
    if fixed is not None:
        raise _of_made(step, made, f"may compute it from {fixed!r}, of which no other values could be tried")
    return later


def _of_made(step: TorchStep, made: Mapping[str, Tensor], why: str, *, goes_on: bool = False) -> ExportError:
    """Return the refusal of buffers that take another shape, and perhaps go on doing so."""
    name, tensor = next(iter(made.items()))
    before, after = tuple(step.state[name].shape), tuple(tensor.shape)
    how = "" if goes_on else ", as after a run of the module before the export"
    return refusal(
        f"the step turns buffer {name!r} of shape {before} into one of {after} and {why}; expected a buffer that keeps "
        f"its shape{how}"
    )


def require_same(run: Callable[[], dict[str, Any]], step: TorchStep, state: PythonState) -> None:
    """Require that what the module of a step gives in evaluation mode is the same in each call.

    Args:
        run: returns arrays by name.
        step: the step.
        state: Python's state; the attributes of modules stay as the runs leave them.

    Raises:
        ExportError: it is not.
    """
    outputs, before = [], state.changed()
    for _ in range(2):
        with _same_process():
            outputs.append({name: torch.as_tensor(one) for name, one in run().items()})
    if _differ(step, *outputs):
        found = _first_difference(step, _recorded(run), _recorded(run))
        if found is not None:
            what = "the module computes something else each time that it runs in eval mode"
            raise _refused(step, state, what, found, [one for one in state.changed() if one not in before])


def _run(
    step: TorchStep,
    updated: Mapping[str, Tensor | None] = types.MappingProxyType({}),
    held: list[Tensor] | None = None,
) -> Outcome:
    with _same_process():
        return step.run(updated=updated, held=held)


def _more_runs(seconds: float, least: int = 0) -> Iterator[int]:
    """Yield numbers as long as there is time for one more run, and `least` numbers at least."""
    end = time.monotonic() + seconds
    for number in range(_MORE_RUNS):
        if number < least or time.monotonic() < end:
            yield number


def _updated(step: TorchStep, first: Outcome) -> dict[str, Tensor | None]:
    """Return the names of the tensors that change from step to step, and their gradients."""
    return {**dict.fromkeys((*step.trainable, *first.changed)), **first.gradients}


def _again(step: TorchStep, changed: list[str]) -> Outcome:
    try:
        return _run(step)
    except ExportError as error:
        text = str(error).removeprefix(f"{WHO}: ")
        names = f" after it has changed {_listed(changed)}" if changed else ""
        raise refusal(f"the step fails when it runs a second time{names}: {text}") from error


def _compare(step: TorchStep, state: PythonState, first: Outcome, second: Outcome, changed: list[str]) -> None:
    """Compare the first run with one in the state that it has left."""
    if not _differ(step, _outputs(first), _outputs(second)):
        return

    state.restore()
    held: list[Tensor] = []
    fresh = _recorded(lambda: _run(step, held=held))
    # Else threads add up in another order, and the rest follows from that.
    for _ in _more_runs(_MORE_SECONDS, least=1):
        found = _first_difference(step, fresh, _recorded(lambda: _run(step)))
        if found is not None or state.is_stuck:
            raise _refused(step, state, "the step computes something else each time that it runs", found, changed)


def _compare_updated(step: TorchStep, state: PythonState, first: Outcome, places: list[str]) -> None:
    """Compare with a step whose tensors have been updated in place, to the values that they have."""

    def run() -> Outcome:
        state.restore()
        return _run(step, _updated(step, first))

    if _differ(step, _outputs(first), _outputs(run())):
        state.restore()
        found = _first_difference(step, _recorded(lambda: _run(step)), _recorded(run))
        if found is not None:
            raise refusal(
                f"the step computes something else after an update{_in(found.place)}, as it reads {_listed(places)}; "
                f"{_EXPECTED}"
            )


def _compare_at_other_times(step: TorchStep, state: PythonState, first: Outcome, changed: list[str]) -> None:
    """Compare with runs at another time of another day: a day and an hour stay long."""
    for by in _TIMES:
        with clocks.later(by, state.clocks):
            try:
                other = _run(step)
            except ExportError:
                continue
        if _differ(step, _outputs(first), _outputs(other)):

            def run(by: datetime.timedelta = by) -> None:
                with clocks.later(by, state.clocks):
                    _run(step)

            recorded = [_recorded(lambda: _run(step)), _recorded(run)]
            found = _first_difference(step, *recorded)
            if found is not None:
                raise _refused(step, state, "the step computes something else at another time", found, changed)


def _compare_later(step: TorchStep, state: PythonState, first: Outcome, numbers: Sequence[Number]) -> None:
    """Compare with runs in which the numbers that two runs have changed are those of later calls."""
    for count in _LATER if numbers else ():

        def set_numbers(count: int = count) -> None:
            for _, before, now, put in numbers:
                put((now - before) * count // 2 if _is_whole(before, now) else before + (now - before) * count / 2)

        set_numbers()
        try:
            other = _run(step)
        except ExportError:
            # A number may be the index of something.
            continue
        if not _differ(step, _outputs(first), _outputs(other)):
            continue

        state.restore()
        fresh = _recorded(lambda: _run(step))
        set_numbers()
        found = _first_difference(step, fresh, _recorded(lambda: _run(step)))
        if found is not None or state.is_stuck:
            changed = [name for name, *_ in numbers]
            raise _refused(step, state, "the step computes something else in later calls", found, changed)
    state.restore()


def _compare_on_others(step: TorchStep, state: PythonState, first: Outcome, changed: list[str]) -> None:
    """Compare a step that is new with one that has run before, on tensors that this has not seen.

    Some earlier calls draw other random numbers, as what they keep may be such. The calls have two kinds of tensors in
    turn, as the step may compare what it keeps of several ones, such as the last losses, or keep the least of them.
    """
    others, drawing = step.with_others(), first.dropouts > 0
    turns = [step.with_dropout_seed(), others, step] if drawing else [step, others]

    def call(number: int) -> Outcome:
        turn = turns[number % len(turns)]
        # PyTorch counts updates: who keeps something until a parameter is written into asks for that.
        return _run(turn, _updated(step, new) if turn is others else {})

    try:
        state.restore()
        new = _run(others)
        state.restore()
        results = {id(others): new, id(step): first}
        for number in _more_runs(_MORE_SECONDS, least=_LEAST_ROUNDS * len(turns)):
            expected, found = results.get(id(turns[number % len(turns)])), call(number)
            if expected is not None and _differ(step, _outputs(expected), _outputs(found)):
                break
        else:
            return
    except ExportError:
        # Tensors that the module refuses.
        return
    state.restore()
    fresh = _recorded(lambda: _run(turns[number % len(turns)]))
    state.restore()
    for earlier in range(number):
        call(earlier)
    difference = _first_difference(step, fresh, _recorded(lambda: call(number)))
    if difference is not None:
        raise _refused(step, state, "the step keeps something of an earlier call", difference, changed)


def _with_distant(step: TorchStep) -> TorchStep:
    """Return a step with larger parameters and batch, and indices of 0, or of 1 where all are 0."""
    state = {name: (step.state[name].detach() + 1).requires_grad_() for name in step.trainable}

    def distant(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point():
            return tensor.detach() + 1
        if tensor.dtype == torch.bool:
            return ~tensor
        return torch.zeros_like(tensor) if tensor.any() else torch.ones_like(tensor)

    inputs, targets = (tuple(map(distant, part)) for part in (step.inputs, step.targets))
    return dataclasses.replace(step, state=step.state | state, inputs=inputs, targets=targets)


def _is_whole(*numbers: Any) -> bool:
    return all(isinstance(one, int) for one in numbers)


_OF_UPDATES: dict[Any, str] = {getattr(Tensor, name).__get__: name for name in ("_version", "grad")}
"""Attributes, beside its numbers, that an update changes in a tensor."""


class _TracesOfUpdates(TorchFunctionMode):
    """Records where the user's code reads attributes that an update changes in a tensor.

    Attributes:
        places: what it reads, and where.
    """

    def __init__(self) -> None:
        super().__init__()
        self.places: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = _OF_UPDATES.get(func)
        place = explaining.current_place() if name is not None else None
        if place is not None and f"{name} in {place}" not in self.places:
            self.places.append(f"{name} in {place}")
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _elsewhere_in_memory() -> Iterator[None]:
    """Move tensors and other objects to other addresses than before: code may use their `id`."""
    held = [[object(), torch.empty(_FEW)] for _ in range(_HELD)]
    yield
    held.clear()


@contextlib.contextmanager
def _same_process() -> Iterator[None]:
    """Put back the states of the process's own generators of random numbers at the end."""
    with torch.random.fork_rng(devices=[]), host_draws.kept():
        yield


class _Seeding:
    """Notes where the user's code seeds the process's own generators of random numbers.

    Attributes:
        place: where it does; None: it does not.
        seeds: which ones.
    """

    _SEEDS = ((torch, "manual_seed"), (torch.random, "manual_seed"), (random, "seed"), (np.random, "seed"))

    def __init__(self) -> None:
        self.place: str | None = None
        self.seeds: list[str] = []
        self._kept = [(module, name, getattr(module, name)) for module, name in self._SEEDS]

    def __enter__(self) -> _Seeding:
        for module, name, original in self._kept:
            setattr(module, name, functools.partial(self._seed, module.__name__, original))
        return self

    def __exit__(self, *_: object) -> None:
        for module, name, original in self._kept:
            setattr(module, name, original)

    def _seed(self, of: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        place = explaining.current_place()
        if place is not None:
            self.place = self.place or place
            self.seeds.append(f"{of}: {args} {kwargs}")
        return original(*args, **kwargs)


def _outputs(outcome: Outcome) -> dict[str, Tensor]:
    gradients = outcome.gradients | outcome.input_gradients
    named = {name + GRADIENT_SUFFIX: one for name, one in gradients.items()}
    return {LOSS: outcome.loss, **outcome.outputs, **named, **outcome.buffers}


def _differ(step: TorchStep, first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    """Whether outputs differ by more than rounding."""
    if first.keys() != second.keys():
        return True
    eps = step.eps_of_activations
    scale: float | None = None
    for name, a in first.items():
        b = second[name]
        if a.shape != b.shape or a.dtype != b.dtype:
            return True
        if not torch.equal(a, b):
            if not a.is_floating_point():
                return True
            if scale is None:
                # Most runs are bit-identical, and need none.
                scale = max(_magnitude(one) for one in first.values() if one.is_floating_point())
            bound = eps * (_ROUNDINGS * _magnitude(a) + _ROUNDINGS_OF_LARGEST * scale)
            # NaN in both is no difference.
            if bool((a.isnan() != b.isnan()).any()) or _magnitude(a.double() - b.double()) > bound:
                return True
    return False


def _magnitude(tensor: Tensor) -> float:
    if not tensor.numel():
        return 0.0
    largest = float(tensor.detach().abs().max())
    if math.isfinite(largest):
        return largest
    return float(tensor.detach().double().nan_to_num(0.0, 0.0, 0.0).abs().max())


def _recorded(run: Callable[[], object]) -> list[Call]:
    """Run a step, and return what its operators do."""
    recorded = Recorded()
    with recorded:
        run()
    return recorded.calls


def _first_difference(step: TorchStep, first: list[Call], second: list[Call]) -> Call | None:
    """Return the first call of an operator that differs between two runs; None: by no more than rounding."""
    share = min(_ROUNDINGS_OF_OPERATOR * step.eps_of_activations, _MOST_OF_OPERATOR)
    for a, b in zip(first, second, strict=False):
        if (a.name, a.numbers, len(a.results)) != (b.name, b.numbers, len(b.results)):
            return b
        for one, other in zip(a.results, b.results, strict=True):
            if one.shape != other.shape:
                return b
            if not torch.equal(one, other):
                is_close = _magnitude(one - other) <= share * _magnitude(one)
                return b if not is_close or bool((one.isnan() != other.isnan()).any()) else None
    longer, count = max(first, second, key=len), min(len(first), len(second))
    return longer[count] if len(longer) > count else None


def _refused(step: TorchStep, state: PythonState, what: str, found: Call | None, changed: list[str]) -> ExportError:
    """Return the refusal of a step that changes, with the call in which it does, if that is known."""
    sources = _Sources.of(step, state)
    draws, times = sources.text("draws"), sources.text("clocks")
    changed = [one for one in changed if f" {one} in " not in draws]
    causes = [f"draws random numbers by{draws}"] if draws else []
    causes += [f"changes {_listed(changed)} in Python"] if changed else []
    causes += [f"asks for the time by{times}"] if times else []
    why = f", as it {' and '.join(causes)}" if causes else ""
    return refusal(f"{what}{'' if found is None else _in(found.place)}{why}; {_EXPECTED}")


def _listed(names: list[str]) -> str:
    return ", ".join(names[:_NAMED]) + (" and others" if len(names) > _NAMED else "")


def _in(place: str | None) -> str:
    return f", in {place}" if place is not None else ""


class _Sources:
    """Where the code of a step draws random numbers that torch's own generator does not give, or asks for the time.

    Args:
        state: knows the generators of the code.
    """

    def __init__(self, state: PythonState) -> None:
        self._found: dict[str, dict[str, None]] = {"draws": {}, "clocks": {}}
        self._state = state
        self._generators = self._states()
        self._last: tuple[types.CodeType, int] | None = None

    @classmethod
    def of(cls, step: TorchStep, state: PythonState) -> _Sources:
        found = cls(state)
        # A debugger, or what measures coverage, is left alone.
        if sys.getprofile() is None and sys.gettrace() is None:
            # The run itself has been judged before.
            with contextlib.suppress(ExportError), _OwnGenerators(found._note), _same_process():
                sys.settrace(found._traced)
                sys.setprofile(found._called)
                try:
                    step.run()
                finally:
                    sys.setprofile(None)
                    sys.settrace(None)
        return found

    def text(self, kind: str) -> str:
        """Return which functions give these, and where, as the end of a clause."""
        calls = list(self._found[kind])
        return f" {_listed(calls)}" if calls else ""

    def _traced(self, frame: types.FrameType, event: str, _: Any) -> Any:
        """See after each line of the user's code whether a generator is elsewhere."""
        if not explaining.is_users(frame.f_code.co_filename):
            return None
        states = self._states()
        for name, one in states.items():
            if one != self._generators.get(name) and self._last is not None:
                self._found["draws"][f"{name} in {explaining.text_of(*self._last)}"] = None
        self._generators = states
        self._last = frame.f_code, frame.f_lineno
        return self._traced

    def _states(self) -> dict[str, Any]:
        by_python, by_numpy = host_draws.states()
        return {"Python's generator": by_python, "numpy's generator": by_numpy, **self._state.generators()}

    def _called(self, frame: types.FrameType, event: str, function: Any) -> None:
        """See calls of functions in C."""
        owner = getattr(function, "__self__", None) if event == "c_call" else None
        is_clock = owner is time or (isinstance(owner, type) and issubclass(owner, datetime.date))
        if owner is not None and is_clock and function.__name__ in clocks.ASKED:
            self._note("clocks", f"{owner.__name__}.{function.__name__}")
        elif event == "c_call" and function is os.urandom:
            self._note("draws", "os.urandom")

    def _note(self, kind: str, name: str) -> None:
        place = explaining.current_place()
        if place is not None:
            self._found[kind][f"{name} in {place}"] = None


class _OwnGenerators(private.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes where operators draw by a generator that is not PyTorch's own."""

    def __init__(self, note: Callable[[str, str], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tell = note

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if dropout.own_generator(args, kwargs or {}) is not None:
            self._tell("draws", "a torch.Generator")
        return func(*args, **(kwargs or {}))
