"""Any optimizer of PyTorch, by a trace of its own step. This module imports torch.

The step of each kind of parameter (one shape, type, group and state) is traced once, as a function of the parameter,
its gradient, its state, the learning rate and the number of steps done. What Python computes with numbers, such as a
bias correction, is traced in float64. Where the code asks whether something holds, of the number of steps or of values,
it is traced once for each answer, and the model chooses.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import inspect
import math
import numbers
import operator
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.overrides import TorchFunctionMode

from gradfuse import _torch_private as private
from gradfuse.errors import ExportError
from gradfuse.export import explaining, host_draws, onnx_model, standins, traced_functions, tracing
from gradfuse.export.python_state import PythonState
from gradfuse.export.reporting import WHO, quiet, refusal
from gradfuse.export.simplifying import simplify
from gradfuse.models.arrays import to_numpy
from gradfuse.training import narrow_types
from gradfuse.training.nodes import GraphTensor
from gradfuse.training.optimizers import ACCUMULATED_GRADIENT
from gradfuse.training.rules import Rule, Slot, StateType
from gradfuse.training.step import AVERAGE, GRADIENT_SUFFIX, UPDATED_SUFFIX

_PROBED = 3
"""So many steps tell which state counts them."""
_PATHS = 64
"""So many combinations of answers the code of a step may ask for."""
_OF_IMPLEMENTATION = 2.0**-30
"""By so much two implementations of a step may differ in float64."""
_NARROW = (torch.float16, torch.bfloat16)
_IMPLEMENTATION = {"foreach": False, "fused": None, "capturable": False}
"""Options that choose an implementation alone, and the one that is traced."""
_OWN = ("state", "param_groups")
"""Attributes of an optimizer that each twin has for itself."""
_OF_GROUP, _OF_ALL = "group_", "optimizer_"
"""Begin the names of the numbers that an optimizer keeps in the parameter group, or in attributes of its own, as states
of each parameter."""
_RESERVED = frozenset((ACCUMULATED_GRADIENT, AVERAGE, *(one[1:] for one in (GRADIENT_SUFFIX, UPDATED_SUFFIX))))
"""What follows a parameter's name in inputs and outputs of a step already."""
_OF_LISTS = "_foreach_"
"""Begins the names of functions of lists of tensors."""
aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class Traced:
    """The updates of an optimizer.

    Attributes:
        rules: parameter -> its rule.
        state: `<parameter>.<state>` -> array, where it is not zeros.
        steps: parameter -> the number of steps done, where its state counts them.
        begun: the other parameters that have a state.
    """

    rules: Mapping[str, Rule]
    state: Mapping[str, Any]
    steps: Mapping[str, int]
    begun: frozenset[str]


@dataclasses.dataclass(frozen=True, eq=False)
class TracedRule(Rule):
    """A rule that was traced.

    Attributes:
        counters: the names under which the optimizer keeps the number of steps itself.
        finds_vectors: whether singular vectors or eigenvectors are found in the step, of which others are as right.
    """

    counters: tuple[str, ...] = ()
    finds_vectors: bool = False


def traced(optimizer: torch.optim.Optimizer, names: Mapping[int, str], run_time: Sequence[str] = ()) -> Traced:
    """Trace the step of an optimizer.

    Args:
        optimizer: the optimizer; it is not changed.
        names: `id` of each parameter that it trains -> its name.
        run_time: the options of its groups that are inputs of the step.

    Raises:
        ExportError: its step cannot be exported: the text says why.
    """
    _require_traceable(optimizer)
    changing: dict[int, set[str]] = defaultdict(set)
    uncounted: dict[int, set[str]] = defaultdict(set)
    while True:
        try:
            return _traced(optimizer, names, run_time, changing, uncounted)
        except _NumberError as error:
            changes = isinstance(error, _ChangesNumberError)
            for index, key in error.found:
                (changing if changes else uncounted)[index].add(key)
            if changes:
                # With these, the rest may count.
                uncounted.clear()


def _traced(
    optimizer: torch.optim.Optimizer,
    names: Mapping[int, str],
    run_time: Sequence[str],
    changing: Mapping[int, Collection[str]],
    uncounted: Mapping[int, Collection[str]],
) -> Traced:
    """Trace the step of an optimizer.

    Args:
        changing: parameter group -> numbers in it, or in attributes, that change, whether in the first steps or later.
        uncounted: parameter group -> state that is no number of steps, though the first ones add 1 to it.
    """
    kinds: dict[Any, list[_Kind]] = defaultdict(list)
    of: dict[str, _Kind] = {}
    state: dict[str, Any] = {}
    counts: dict[str, dict[str, float]] = {}
    begun = set()
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if not parameter.requires_grad:
                continue
            name, held = names[id(parameter)], _held(optimizer, parameter)
            if parameter.dtype in _NARROW and not _is_of_torch(optimizer):
                raise _refused(
                    optimizer,
                    f"parameter {name!r} is {parameter.dtype}, of whose rounding its step may keep account; expected "
                    "parameters in float32 or float64",
                )
            key = index, tuple(parameter.shape), parameter.dtype, parameter.device, _signature(held)
            kind = next((one for one in kinds[key] if one.has_constants_of(held)), None)
            if kind is None:
                kind = _Kind.of(
                    optimizer,
                    index,
                    parameter,
                    name,
                    run_time=run_time,
                    changing=changing[index],
                    uncounted=uncounted[index],
                )
                kinds[key].append(kind)
            of[name] = kind
            begin = kind.begin | held
            # Some begin with a number where a tensor will be.
            state |= {
                f"{name}.{one}": _array(begin[one]).astype(own.dtype.numpy(), copy=False)
                for one, own in kind.states.items()
                if one in begin
            }
            counts[name] = {one: float(begin[one]) for one in kind.counters}
            if held and not kind.counters and not kind.first_differs:
                begun.add(name)
    done = _steps_done(of, counts)
    every = [kind for alike in kinds.values() for kind in alike]
    outside = _reachable(optimizer)
    try:
        if len(of) > 1:
            _require_separate(optimizer, of, names)
    except ExportError:
        # What is kept elsewhere may be why.
        _require_unchanged(optimizer, outside.changed())
        raise
    for kind in every:
        for option in run_time:
            if _OF_GROUP + option in (*kind.states, *kind.counters):
                raise _refused(
                    optimizer, f"run_time has {option!r}, which its step changes; expected what it leaves alone"
                )
    rules = dict(zip(every, _rules(optimizer, every, run_time), strict=True))
    if any(rule.finds_vectors for rule in rules.values()):
        _require_any_vectors(optimizer, of, names)
    if not _is_of_torch(optimizer):
        _require_by_value(optimizer, names)
        _require_implementation(optimizer)
    with outside.kept():
        _require_unchanged(optimizer, outside.changed())
    steps = {name: done for name, kind in of.items() if kind.counters}
    return Traced({name: rules[kind] for name, kind in of.items()}, state, steps, frozenset(begun))


def _reachable(optimizer: torch.optim.Optimizer) -> PythonState:
    """Return what a step can reach beside options and attributes: of its class, globals, variables of functions."""
    kept = [*vars(optimizer).values(), *(one for group in optimizer.param_groups for one in group.values())]
    functions = [one for one in kept if callable(one) and not isinstance(one, (type, Tensor, nn.Module))]
    roots = {getattr(one, "__name__", type(one).__name__): one for one in functions}
    return PythonState({type(optimizer).__name__: type(optimizer), **roots})


def _require_unchanged(optimizer: torch.optim.Optimizer, changed: Sequence[str]) -> None:
    """Refuse an optimizer whose step changes something again that steps have changed: what is not a cache."""
    if not changed:
        return
    again = _reachable(optimizer)
    with again.kept():
        copies, states = _copies(optimizer)
        _take_steps(optimizer, twin(optimizer, _groups(optimizer, copies), states, _rates(optimizer)))
        for name in again.changed():
            # Of an iterator, it is now the place that changes.
            for one in {name, name.removesuffix(".at")}.intersection(changed):
                raise _refused(optimizer, f"its step changes {one}; expected changes of state alone")


def _drawn() -> Any:
    """Return what changes when random numbers are drawn."""
    return host_draws.states(), to_numpy(torch.get_rng_state()).tobytes()


def _steps_done(of: Mapping[str, _Kind], counts: Mapping[str, Mapping[str, float]]) -> int:
    """Return the number of steps done.

    Args:
        of: parameter -> its kind.
        counts: parameter -> where its counters begin.

    Raises:
        _NoCounterError: a counter has another one, and counts for itself.
    """
    begin = Counter(count for of_one in counts.values() for count in of_one.values() if count >= 0 and count % 1 == 0)
    # A first step that is one of its own is told by the number of steps, which is 0 where nothing counts.
    is_new = any(kind.first_differs and not kind.counters for kind in of.values())
    done = 0.0 if is_new or not begin else begin.most_common(1)[0][0]
    others = [(of[name].index, key) for name, one in counts.items() for key, count in one.items() if count != done]
    if others:
        raise _NoCounterError(*others)
    return int(done)


def require_others_left_alone(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str], updated: Collection[str]
) -> None:
    """Refuse an optimizer of one's own that changes parameters which have no gradient, or are frozen.

    The step of a model leaves them as they are, which is what the optimizers of PyTorch do.

    Args:
        optimizer: the optimizer; it is not changed.
        names: `id` of each tensor of the module and the loss -> its name.
        updated: the names of the parameters that have gradients.
    """
    every = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    others = [one for one in every if not one.requires_grad or names.get(id(one)) not in updated]
    if _is_of_torch(optimizer) or not others:
        return
    copies, states = _copies(optimizer)
    for one in others:
        copies[one] = one.detach().clone().requires_grad_(one.requires_grad)
        states[copies[one]] = _copied_state(_own_state(optimizer, one), one, copies[one], {})
    _take_steps(optimizer, twin(optimizer, _groups(optimizer, copies), states, _rates(optimizer)))
    for one in others:
        if not _same(copies[one].detach(), one.detach()):
            what = repr(names[id(one)]) if id(one) in names else f"a parameter of shape {tuple(one.shape)}"
            raise _refused(
                optimizer,
                f"its step updates {what}, which has no gradient; expected a step that leaves it alone, or an "
                "optimizer without it",
            )


def state_of(optimizer: torch.optim.Optimizer, index: int, parameter: Tensor) -> dict[str, Any]:
    """Return what a parameter has in its state, one by one, and the numbers in its group and in attributes."""
    group = optimizer.param_groups[index]
    kept = {_OF_GROUP + key: value for key, value in group.items() if _is_number(value)}
    kept |= {_OF_ALL + key: value for key, value in _numbers(optimizer).items()}
    return kept | _leaves(optimizer.state[parameter])


def set_state(optimizer: torch.optim.Optimizer, index: int, parameter: Tensor, state: Mapping[str, Any]) -> None:
    """Give a parameter some of what `state_of` returns."""
    own = optimizer.state[parameter]
    named, of_group, of_all = _divided({**_leaves(own), **state})
    own.update(_filled(own, named))
    optimizer.param_groups[index].update(of_group)
    vars(optimizer).update(of_all)


def mapped(state: Mapping[Any, Any], function: Callable[[Any], Any]) -> dict[Any, Any]:
    """Return a state of what a function makes of its tensors and numbers, also in lists and dictionaries."""
    return _filled(state, {key: function(one) for key, one in _leaves(state).items()})


def _divided(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return the state that a parameter has itself, the options that its group keeps, and the attributes."""
    found: dict[str, dict[str, Any]] = {_OF_GROUP: {}, _OF_ALL: {}, "": {}}
    for key, value in state.items():
        prefix = next(one for one in found if key.startswith(one))
        found[prefix][key.removeprefix(prefix)] = value
    return found[""], found[_OF_GROUP], found[_OF_ALL]


def _leaves(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return what is in a state, and in the lists and dictionaries there, as `buffers.0`; None is nothing."""
    found: dict[Any, Any] = {}
    for key, value in state.items():
        inner = _items(value)
        if inner:
            found |= {f"{key}.{name}": one for name, one in _leaves(inner).items()}
        elif value is not None:
            found[key] = value
    return found


def _filled(state: Mapping[Any, Any], leaves: Mapping[str, Any]) -> dict[Any, Any]:
    """Return a state like another one with other leaves; where there is none, it keeps its own."""

    def filled(value: Any, name: str) -> Any:
        inner = _items(value)
        if not inner:
            return leaves.get(name, value)
        results = {key: filled(one, f"{name}.{key}") for key, one in inner.items()}
        if not isinstance(value, Mapping):
            made = list(results.values())
            return deque(made, value.maxlen) if isinstance(value, deque) else type(value)(made)
        result = copy.copy(value)
        result.update(results)  # type: ignore[attr-defined]
        return result

    return {key: filled(value, key) for key, value in state.items()}


def _items(value: Any) -> Mapping[Any, Any]:
    """Return what a list, tuple or dictionary has, by its place or key; nothing for another value."""
    if isinstance(value, dict):
        return value
    return dict(enumerate(value)) if type(value) in (list, tuple, deque) else {}


def twin(
    optimizer: torch.optim.Optimizer,
    groups: Mapping[int, Sequence[Tensor]],
    states: Mapping[Any, Any],
    rates: Mapping[int, Any],
    implementation: Mapping[str, Any] = _IMPLEMENTATION,
) -> torch.optim.Optimizer:
    """Return an optimizer of the same kind that has other parameters. A step of it leaves the first one alone.

    Args:
        optimizer: the optimizer.
        groups: parameter group -> the parameters that have its options, but for those that choose an implementation.
            The others are empty: code may find something by the place of a group.
        states: their states, where there are some.
        rates: parameter group -> the learning rate, where it is another one.
        implementation: the options that choose an implementation.
    """
    result: torch.optim.Optimizer = object.__new__(type(optimizer))
    for key, value in vars(optimizer).items():
        # A scheduler's wrapper of step would step the optimizer itself.
        if key != "step":
            vars(result)[key] = value if key in _OWN else _copy_of(value)
    result.param_groups = []
    for index, group in enumerate(optimizer.param_groups):
        options = {key: one for key, one in group.items() if key != "params"}
        options |= {key: one for key, one in implementation.items() if key in options}
        options = {key: _copy_of(one) for key, one in options.items()}
        rate = rates.get(index, options["lr"])
        result.param_groups.append({**options, "lr": rate, "params": list(groups.get(index, ()))})
    result.state = defaultdict(dict, {parameter: state for parameter, state in states.items() if state})
    return result


@dataclasses.dataclass(frozen=True, eq=False)
class _Kind:
    """What parameters that are updated alike have in common.

    Attributes:
        index: their parameter group.
        like: one of them.
        held: the names of the state that they have.
        begin: what more they begin with, by name: what the optimizer makes in the first step, before it uses it, and
            numbers of the parameter group.
        constants: state that no step changes.
        states: the names of tensors and numbers that steps change -> their types.
        rounded: those that are bfloat16 in PyTorch, and float32 of the same values in the model.
        forms: the state, in which lists and dictionaries are, as it is before the first step and after it.
        numbers: those of them that are numbers of Python.
        counters: the names of what counts the steps.
        counts_in_python: those of them that are numbers of Python.
        first_differs: whether the first step does something else than those after it, such as to begin with the
            gradient, or with the learning rate of then.
        began_otherwise: the same, of a parameter that has no state yet.
    """

    index: int
    like: Tensor
    held: frozenset[str]
    begin: dict[str, Any]
    constants: dict[str, Any]
    states: dict[str, StateType]
    rounded: frozenset[str]
    forms: tuple[dict[str, Any], dict[str, Any]]
    numbers: frozenset[str]
    counters: tuple[str, ...]
    first_differs: bool
    began_otherwise: bool

    @classmethod
    def of(
        cls,
        optimizer: torch.optim.Optimizer,
        index: int,
        parameter: Tensor,
        name: str,
        *,
        run_time: Sequence[str],
        changing: Collection[str],
        uncounted: Collection[str],
    ) -> _Kind:
        """Find out by a few steps of copies which state a parameter gets; the rest is as for `_traced`."""
        held = _held(optimizer, parameter)
        probe = functools.partial(_Probe.of, optimizer, index, parameter, changing=changing)
        drawn = _drawn()
        first = probe(held)
        if _drawn() != drawn:
            with _Draws() as draws:
                probe(held)
            raise _refused(
                optimizer,
                f"its step draws random numbers by {draws.operator}; expected none, or, if only the first step draws, "
                "an optimizer that has taken it",
            )
        if first.sharing is not None and not _same(probe(held, apart=True).after, first.after):
            one, other = first.sharing
            raise _refused(
                optimizer,
                f"state {one!r} of {name!r} shares its memory with {f'state {other!r}' if other else 'the parameter'}, "
                "and one changes by the other; expected memory of its own, as of clone()",
            )
        changes: list[dict[str, Any]] = [{"seed": 1}, {"faster": 0.5}, {"moved": 0.5}]
        changes += [{"options": run_time}] if run_time else []
        others = [probe(held, **one) for one in changes]

        def differs(first: _Probe, others: Sequence[_Probe], held: Mapping[str, Any]) -> bool:
            # What is not put in under its name, as by a copy of the dictionary, begins in an unknown way.
            is_seen = first.after[0][1].keys() <= held.keys() | first.begun.keys()
            if not is_seen or not all(_same(first.begun, one.begun) for one in others):
                return True
            return not _same(probe({**held, **first.begun}, begun=first.put).after[0], first.after[0])

        first_differs = differs(first, others, held)
        began_otherwise = first_differs or (
            bool(held) and differs(probe({}), [probe({}, **one) for one in changes], {})
        )
        there = {_OF_GROUP + key for key, value in optimizer.param_groups[index].items() if value is not None}
        there |= {_OF_ALL + key for key, value in _attributes(optimizer).items() if value is not None}
        lasting = functools.reduce(operator.and_, (after.keys() for _, after in first.after))
        for key in (key for _, after in first.after for key in after.keys() - lasting):
            whole = next((one for one in first.form if f"{key}.".startswith(f"{one}.")), key)
            raise _refused(
                optimizer,
                f"state {whole!r} of {name!r} is {type(first.form.get(whole)).__name__}; expected tensors and numbers, "
                "and as many after each step",
            )
        constants, states, counters = {}, {}, []
        for key, last in first.after[-1][1].items():
            what = f"state {key!r} of {name!r}"
            is_taken = key in _RESERVED or (key in held and str(key).startswith((_OF_GROUP, _OF_ALL)))
            if not isinstance(key, str) or is_taken:
                raise _refused(optimizer, f"{what} has a name that the step needs; expected another one")
            values: list[Any] = [(held | first.begun).get(key), *(after.get(key) for _, after in first.after)]
            elsewhere = [one.after[-1][1].get(key) for one in others]
            if key not in uncounted and all(one.counts(key, held) for one in (first, *others)):
                counters.append(key)
            elif (
                isinstance(last, Tensor)
                or key.startswith((_OF_GROUP, _OF_ALL))
                or (_is_number(last) and not all(_same(one, last) for one in (*values[1:], *elsewhere)))
            ):
                if not all(_is_tensor_or_number(one) and _type(one) == _type(last) for one in values[1:]):
                    raise _refused(optimizer, f"{what} changes its shape or type; expected neither")
                states[key] = _type(last)
            elif not _holds_tensors(last) and all(_same(one, last) for one in values[1:]):
                constants[key] = last
            else:
                raise _refused(optimizer, f"{what} is {type(last).__name__}; expected tensors and numbers")
        # What is put in before the first step is there in it as well.
        of_others = (_OF_GROUP, _OF_ALL)
        kept = {*counters, *(key for key in states if not first_differs or key.startswith(of_others))}
        python = frozenset(key for key, one in first.after[-1][1].items() if not isinstance(one, Tensor))
        return cls(
            index=index,
            like=parameter,
            held=frozenset(held) | (there & first.begun.keys()),
            begin={key: one for key, one in first.begun.items() if key in kept},
            constants=constants,
            states=states,
            rounded=frozenset(
                key
                for key, one in first.after[-1][1].items()
                if isinstance(one, Tensor) and one.dtype == torch.bfloat16
            ),
            forms=(_own_state(optimizer, parameter), first.form),
            numbers=python,
            counters=tuple(counters),
            first_differs=first_differs,
            began_otherwise=began_otherwise,
        )

    def has_constants_of(self, held: Mapping[str, Any]) -> bool:
        """Whether what a parameter has and no step changes is as for this kind."""
        return all(_same(held.get(key, value), value) for key, value in self.constants.items())

    @property
    def dtype(self) -> torch.dtype:
        """The type that is computed in."""
        return torch.float32 if self.like.dtype in _NARROW else self.like.dtype

    def examples(self) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """Return a parameter, a gradient and the state, in the types that are computed in."""
        parameter = self.like.detach().to(self.dtype)
        state = []
        for own in self.states.values():
            array = torch.zeros(own.shape, dtype=_TYPES[own.dtype], device=self.like.device)
            state.append(array.float() if array.dtype in _NARROW else array)
        return parameter, torch.zeros_like(parameter), tuple(state)


@dataclasses.dataclass(frozen=True)
class _Probe:
    """A few steps of a copy of a parameter.

    Attributes:
        begun: name -> value of the state that was not there, as it was first put there.
        put: the same of the parameter's own state, with its lists and dictionaries.
        after: the parameter and its state after each step.
        form: the state after the last one, with its lists and dictionaries.
        sharing: the names of two tensors of the state that share memory; the parameter has none.
    """

    begun: dict[str, Any]
    put: dict[str, Any]
    after: list[tuple[Tensor, dict[str, Any]]]
    form: dict[str, Any]
    sharing: tuple[str, str] | None

    def counts(self, key: str, held: Mapping[str, Any]) -> bool:
        """Tell whether each step added 1 to a number, which was there or was put there."""
        return _counts([(dict(held) | self.begun).get(key), *(state.get(key) for _, state in self.after)])

    @classmethod
    def of(
        cls,
        optimizer: torch.optim.Optimizer,
        index: int,
        parameter: Tensor,
        held: Mapping[str, Any],
        *,
        changing: Collection[str],
        seed: int = 0,
        faster: float = 0.0,
        moved: float = 0.0,
        options: Sequence[str] = (),
        begun: Mapping[str, Any] | None = None,
        apart: bool = False,
    ) -> _Probe:
        generator = torch.Generator().manual_seed(seed)
        tensor = (parameter.detach() + moved).requires_grad_()
        rate = float(optimizer.param_groups[index]["lr"]) + faster
        other = twin(optimizer, {index: [tensor]}, {}, {index: rate})
        other.state = _States(_Watched)
        own, of_group, of_all = _divided(held)
        if own:
            other.state[tensor] = _Watched(copy.deepcopy({**_own_state(optimizer, parameter), **(begun or {})}))
            set_state(other, index, tensor, _copied_state(own, parameter, tensor, {}))
        sharing = _sharing({"": tensor} | _leaves(other.state[tensor])) if own else None
        group = other.param_groups[index]
        group.update({key: _halved(group[key]) for key in options if key in group} | of_group)
        vars(other).update(of_all)
        after, kept = [], [_kept(other, group)]
        for _ in range(_PROBED):
            tensor.grad = torch.randn(tensor.shape, generator=generator).to(tensor.device, tensor.dtype)
            if apart and tensor in other.state:
                set_state(other, index, tensor, mapped(_leaves(other.state[tensor]), _cloned))
            take_step(optimizer, other)
            sharing = sharing or _sharing({"": tensor} | _leaves(other.state[tensor]))
            form = copy.deepcopy(dict(other.state[tensor]))
            after.append((tensor.detach().clone(), _leaves(form)))
            kept.append(_kept(other, group))
        there = {}
        for key in kept[-1]:
            values: list[Any] = [one.get(key) for one in kept]
            if key not in changing and all(_same(values[0], one) for one in values[1:]):
                continue
            if values[0] is None and _counts([0, *values[1:]]):
                values[0] = values[1] - 1
            if key == _OF_GROUP + "lr" or not all(map(_is_number, values[values[0] is None :])):
                raise _changes(optimizer, key)
            if values[0] is not None:
                there[key] = values[0]
            for (_, state), one in zip(after, values[1:], strict=True):
                state[key] = one
        put = dict(other.state[tensor].begun)
        found = _leaves(put)
        for key, value in found.items():
            counted = [state.get(key) for _, state in after]
            if _is_number(value) and value == counted[0] and _counts([0, *counted]):
                # `state.get(key, 0) + 1` was put there.
                found[key] = value - 1
        return cls(found | there, _filled(put, found), after, form, sharing)


def _kept(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], copied: Callable[[Any], Any] | None = None
) -> dict[str, Any]:
    """Return copies of the options of a group and of the optimizer's attributes."""
    options = {_OF_GROUP + key: value for key, value in _unowned(group).items()}
    attributes = {_OF_ALL + key: value for key, value in _attributes(optimizer).items()}
    return {key: (copied or _copy_of)(value) for key, value in (options | attributes).items()}


def _attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the attributes of an optimizer, and the numbers that it has of its class, until a step changes them."""
    numbers = {
        key: value for one in reversed(type(optimizer).__mro__) for key, value in vars(one).items() if _is_number(value)
    }
    return numbers | _unowned(vars(optimizer))


def _halved(option: Any) -> Any:
    """Return another value that an option may have: 0.25 for 0."""
    return tuple(map(_halved, option)) if isinstance(option, (tuple, list)) else option * 0.5 or 0.25


def _cloned(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _copy_but_tensor(value: Any) -> Any:
    return value if isinstance(value, (Tensor, torch.Generator)) else _copy_of(value)


def _changes(optimizer: torch.optim.Optimizer, key: str) -> ExportError:
    return _refused(optimizer, f"its step {_told_of_change(key)}")


def _told_of_change(key: str, when: str = "") -> str:
    """Say that a step changes an option of a group or an attribute."""
    if key.startswith(_OF_ALL):
        return (
            f"changes its attribute {key.removeprefix(_OF_ALL)!r}{when}; expected changes of state alone, or of numbers"
        )
    return (
        f"changes the option {key.removeprefix(_OF_GROUP)!r} of its parameter group{when}; expected changes of "
        f"{'' if when else 'state and of '}numbers alone"
    )


def _own_state(optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Any]:
    """Return the state of a parameter, with its lists and dictionaries."""
    return {key: value for key, value in optimizer.state.get(parameter, {}).items() if value is not None}


def _copied_state(
    state: Mapping[str, Any], parameter: Tensor, tensor: Tensor, copied: dict[int, Any]
) -> dict[str, Any]:
    """Return a deep copy of a parameter's state for another tensor. What shares memory in the state does in the copy.

    Args:
        state: the state.
        parameter: the parameter.
        tensor: what takes its place.
        copied: `id` of what was copied before -> its copy; more are put in.
    """
    for one in _leaves(state).values():
        if isinstance(one, Tensor) and one.shape == parameter.shape and _share_memory(one, parameter):
            copied[id(one)] = tensor.detach()
    return copy.deepcopy(dict(state), copied)


def _share_memory(one: Tensor, other: Tensor) -> bool:
    pointers = one.untyped_storage().data_ptr(), other.untyped_storage().data_ptr()
    return bool(one.numel()) and pointers[0] == pointers[1]


def _sharing(tensors: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the names of two tensors in one memory."""
    known: dict[int, str] = {}
    for name, one in tensors.items():
        if isinstance(one, Tensor) and one.numel():
            other = known.setdefault(one.untyped_storage().data_ptr(), name)
            if other != name:
                return name, other
    return None


class _Watched(dict[str, Any]):
    """The state of a parameter; it keeps what is put under each name first."""

    def __init__(self, state: Mapping[str, Any] | None = None) -> None:
        super().__init__(state or {})
        self.begun: dict[str, Any] = {}

    def __setitem__(self, key: str, value: Any) -> None:
        if self.get(key) is None:
            self.begun[key] = copy.deepcopy(value)
        super().__setitem__(key, value)

    def setdefault(self, key: str, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def __ior__(self, other: Any) -> _Watched:  # type: ignore[override,misc]
        self.update(other)
        return self

    def update(self, *args: Any, **kwargs: Any) -> None:
        for key, value in dict(*args, **kwargs).items():
            self[key] = value


class _States(defaultdict[Any, Any]):
    """The states of an optimizer, which may put a whole dictionary in."""

    def __missing__(self, key: Any) -> Any:
        _require_parameter(key)
        return super().__missing__(key)

    def setdefault(self, key: Any, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        _require_parameter(key)
        if not isinstance(value, _Watched):
            state = _Watched()
            state.update(value)
            value = state
        super().__setitem__(key, value)


def _require_parameter(key: Any) -> None:
    if not isinstance(key, Tensor):
        raise TypeError(f"it keeps {key!r} in its state beside what parameters have; expected numbers in their groups")


class _Draws(private.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Finds by what random numbers are drawn.

    Attributes:
        operator: the last operator that drew some, or who did otherwise.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operator = "Python or numpy"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags and (kwargs or {}).get("generator") is None:
            self.operator = str(func)
        return func(*args, **(kwargs or {}))


class _CannotTraceError(Exception):
    """The code of a step does something that no graph can."""


class _NumberError(Exception):
    """Numbers turn out to be others than the first steps let expect.

    Args:
        found: the group, and the name of the number.
    """

    def __init__(self, *found: tuple[int, str]) -> None:
        super().__init__(found)
        self.found = found


class _ChangesNumberError(_NumberError):
    """A step changes options of a parameter group, or attributes, which the first steps did not."""


class _NoCounterError(_NumberError):
    """States are no numbers of steps: they begin elsewhere than others, or do not always grow by 1."""


_OF_DATA = {func: traced_functions.INSTEAD[func] for func in (Tensor.data.__get__, Tensor.data.__set__)}  # type: ignore[attr-defined]
"""Reading and setting `.data`, which torch.export does not see."""


class _Numbers(TorchFunctionMode):
    """Lets tensors of shape () stand for what Python computes with numbers, and answers what the code asks of tensors.

    Args:
        answers: the first answers; those to all further questions are True.

    Attributes:
        conditions: what was asked, in order, as tensors of shape ().
    """

    def __init__(self, answers: Sequence[bool]) -> None:
        super().__init__()
        self._answers = answers
        self.conditions: list[Tensor] = []
        self._numbers: dict[int, Tensor] = {}

    def number(self, tensor: Tensor) -> Tensor:
        """Return a tensor as a number: in place, Python changes none."""
        # Kept, so that no other one gets its identity.
        self._numbers[id(tensor)] = tensor
        return tensor

    def of_keys(self) -> dict[str, Any]:
        """Return what tensors have in place of a hash: numbers that are looked up by one would not be found."""
        original: Any = Tensor.__hash__

        def hashed(tensor: Tensor) -> int:
            frame = inspect.currentframe() if id(tensor) in self._numbers else None
            caller = None if frame is None else frame.f_back
            if caller is not None and explaining.is_users(caller.f_code.co_filename):
                raise _CannotTraceError("looks up its count, the rate or another number in a set or a dictionary")
            return int(original(tensor))

        return {"__hash__": hashed}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _OF_DATA:
            return _OF_DATA[func](*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name == "_set_grad_enabled" and args[0] == torch.is_grad_enabled():
            # torch.export makes a part of the program of each.
            return None
        if name == "__bool__":
            return self._answer(args[0] != 0)
        if name == "item":
            value = args[0].reshape(())
            return self.number(value.to(torch.float64, copy=True) if value.is_floating_point() else value.clone())
        if name == "__deepcopy__":
            return args[0] if id(args[0]) in self._numbers else args[0].clone()
        if name in _COMPARISONS:
            return self._answer(_COMPARISONS[name](*args, **kwargs))
        if name == "tensor" and args and (id(args[0]) in self._numbers or isinstance(args[0], (list, tuple))):
            return self._of_numbers(func, *args, **kwargs)
        if name in ("__getitem__", "__setitem__") and id(args[1]) in self._numbers:
            place = (args[1].long() % len(args[0])).reshape(1)
            if name == "__getitem__":
                return args[0].index_select(0, place).squeeze(0)
            args = (args[0], place, args[2])
        if name in _CONVERSIONS:
            raise _CannotTraceError(f"takes {_CONVERSIONS[name]} of its state, its gradient or the rate")
        tensors = [one for one in (*args, *kwargs.values()) if isinstance(one, Tensor)]
        of_numbers = [one for one in tensors if id(one) in self._numbers]
        plain = name.strip("_")
        in_place = name.endswith("_") and not name.endswith("__")
        if tensors and all(not one.dim() and one.dtype not in (torch.float32, *_NARROW) for one in tensors):
            # Numbers alone: Python's are of 64 bits.
            if len(of_numbers) == len(tensors) and plain in _IN_PLACE:
                func = _IN_PLACE[plain]
            if len(of_numbers) == len(tensors) and plain in _OF_BITS and any(map(torch.is_floating_point, tensors)):
                # Whole numbers of Python's are float64 here.
                return self.number(_OF_BITS[plain](*args))
            divisor = args[_DIVISORS[plain]] if plain in _DIVISORS else None
            if isinstance(divisor, Tensor) and _expects_division_by_zero() and self._answer(divisor == 0):
                raise ZeroDivisionError
            if _is_arithmetic(plain):
                args = tuple(map(_wide, args))
            if plain in _SCALED and (plain == "lerp" or _SCALED[plain] in kwargs):
                return _scaled(plain, args, {key: _wide(one) for key, one in kwargs.items()}, in_place)
            result = func(*args, **kwargs)
            counts = isinstance(result, Tensor) and len(of_numbers) == len(tensors) and plain != "as_tensor"
            return self.number(result) if counts else result
        if any(one.dtype == torch.float64 and one.dim() for one in tensors):
            args = tuple(map(_wide, args)) if _is_arithmetic(plain) else args
            kwargs = {key: _wide(one) for key, one in kwargs.items()} if plain in _SCALED else kwargs
        if plain in _SCALED and (plain == "lerp" or isinstance(kwargs.get(_SCALED[plain]), Tensor)):
            return _scaled(plain, args, kwargs, in_place)
        if plain in ("fill", "full_like") and of_numbers:
            value = (args[1:] or tuple(kwargs.pop(key) for key in ("fill_value", "value") if key in kwargs))[0]
            like = args[0] if plain == "fill" else torch.empty_like(args[0], **kwargs)
            return like.copy_(value.expand(like.shape))
        others = [one.dtype for one in tensors if id(one) not in self._numbers and one.is_floating_point()]
        if of_numbers and others and plain != "copy":
            # In the type of the tensors, as kernels compute with numbers.
            dtype = functools.reduce(torch.promote_types, others)

            def narrowed(one: Any) -> Any:
                return one.to(dtype) if id(one) in self._numbers and one.is_floating_point() else one

            args, kwargs = tuple(map(narrowed, args)), {key: narrowed(one) for key, one in kwargs.items()}
        return func(*args, **kwargs)

    def _answer(self, condition: Tensor) -> bool:
        """Tell whether something holds, in the present trace."""
        asked = len(self.conditions)
        self.conditions.append(condition.reshape(()))
        if asked == _PATHS:
            raise _CannotTraceError("asks again and again whether something holds")
        return self._answers[asked] if asked < len(self._answers) else True

    def _of_numbers(self, func: Any, data: Any, **options: Any) -> Tensor:
        """Make a tensor of numbers: func is `torch.tensor`."""
        parts = list(data) if isinstance(data, (list, tuple)) else [data]
        if not any(id(one) in self._numbers for one in parts):
            return func(data, **options)  # type: ignore[no-any-return]
        parts = [one if isinstance(one, Tensor) else torch.tensor(one, dtype=torch.float64) for one in parts]
        made = torch.stack([one.to(torch.float64) for one in parts]) if isinstance(data, (list, tuple)) else parts[0]
        return made.to(options.get("device"), options.get("dtype") or torch.get_default_dtype(), copy=True)

    def of_numpy(self) -> dict[str, Any]:
        """Return what functions of numpy ask of tensors: they compute with numbers."""

        def computed(tensor: Tensor, ufunc: Any, method: str, *operands: Any, **options: Any) -> Tensor:
            function = getattr(torch, _OF_NUMPY.get(ufunc.__name__, ""), None)
            are_numbers = all(id(one) in self._numbers or not isinstance(one, (Tensor, np.ndarray)) for one in operands)
            if function is None or method != "__call__" or options or not are_numbers:
                raise _CannotTraceError(f"takes numpy.{ufunc.__name__}() of its state, its gradient or the rate")
            return self.number(function(*(torch.as_tensor(one, dtype=torch.float64) for one in operands)))

        return {"__array_ufunc__": computed}

    def of_lists(self) -> dict[str, Any]:
        """Return functions of lists of tensors in the place of torch's, which take no tensors for numbers."""

        def taking(name: str) -> Callable[..., Any]:
            return lambda *args, **kwargs: self._of_lists(name.removeprefix(_OF_LISTS), args, kwargs)

        return {name: taking(name) for name in _OF_NO_TENSORS}

    def _of_lists(self, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        """Call a function of lists of tensors on one tensor after another."""
        plain = name.strip("_")
        if plain in ("addcdiv", "addcmul") and len(args) == 4:
            args, kwargs = args[:3], kwargs | {"value": args[3]}
        if plain in _BOUNDS and not isinstance(args[1], (list, tuple)):
            name, plain = name.replace(plain, _BOUNDS[plain]), _BOUNDS[plain]
        function = getattr(Tensor, name, None) or getattr(Tensor, plain)
        if not isinstance(args[0], (list, tuple)):
            function = getattr(torch, plain)
        results = []
        for index in range(max((len(one) for one in args if isinstance(one, (list, tuple))), default=0)):
            each = [one[index] if isinstance(one, (list, tuple)) else one for one in args]
            named = {key: one[index] if isinstance(one, (list, tuple)) else one for key, one in kwargs.items()}
            result = self.__torch_function__(function, (), tuple(each), named)
            results.append(each[0].copy_(result) if name.endswith("_") and result is not each[0] else result)
        return None if name.endswith("_") else results


def _of_no_tensors(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of lists of tensors that takes empty ones too: other groups of a twin have no parameters."""

    def called(*args: Any, **kwargs: Any) -> Any:
        are_empty = any(isinstance(one, (list, tuple)) and not one for one in args)
        return [] if are_empty else function(*args, **kwargs)

    return called


_OF_NO_TENSORS = {name: _of_no_tensors(getattr(torch, name)) for name in dir(torch) if name.startswith(_OF_LISTS)}


def _expects_division_by_zero() -> bool:
    """Whether the code of the step that is running names Python's error, to catch it."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not _Trace._run.__code__:
        if "ZeroDivisionError" in frame.f_code.co_names and explaining.is_users(frame.f_code.co_filename):
            return True
        frame = frame.f_back
    return False


def _wide(one: Any) -> Any:
    """Return a number that is no whole one as a tensor of 64 bits: as a constant it would be translated in 32."""
    return torch.tensor(one, dtype=torch.float64) if type(one) is float else one


def _scaled(plain: str, args: Sequence[Any], kwargs: Mapping[str, Any], in_place: bool) -> Any:
    """Compute what takes a number beside its tensors, which may be a tensor of shape ()."""
    # Python passes them by place or by name.
    first, second, *rest = (*args, *(kwargs[key] for key in ("end", "other", "tensor1") if key in kwargs))
    if not isinstance(second, Tensor):
        second = torch.full((), second, dtype=first.dtype, device=first.device)
    rest += [kwargs[key] for key in ("weight", "tensor2") if key in kwargs]
    dtype = first.dtype if in_place else torch.promote_types(first.dtype, second.dtype)
    second = second.to(dtype)
    if plain == "lerp":
        weight = rest[0].to(dtype) if isinstance(rest[0], Tensor) else rest[0]
        share, remainder = weight, 1 - weight
        if dtype == torch.float64:
            share, remainder = _wide(share), _wide(remainder)
        change = second - first
        # From the nearer end.
        if isinstance(weight, Tensor):
            result = torch.where(weight.abs() < 0.5, first + change * share, second - change * remainder)
        else:
            result = first + change * share if abs(weight) < 0.5 else second - change * remainder
    else:
        factor = kwargs[_SCALED[plain]]
        term = second * (factor.to(dtype) if isinstance(factor, Tensor) else factor)
        if plain in ("addcdiv", "addcmul"):
            term = term / rest[0].to(dtype) if plain == "addcdiv" else term * rest[0].to(dtype)
        result = first - term if plain in ("sub", "subtract") else first + term
    return first.copy_(result) if in_place else result


_CONVERSIONS = {
    "__float__": "float()",
    "__int__": "int()",
    "__index__": "int()",
    "__complex__": "complex()",
    **dict.fromkeys(("__format__", "__repr__"), "the text"),
    "tolist": "tolist()",
    "numpy": "numpy()",
    "__array__": "numpy()",
}
_BOUNDS = {"maximum": "clamp_min", "minimum": "clamp_max"}
"""What lists of tensors are compared with a number by -> what a tensor is."""
_COMPARISONS: dict[str, Callable[..., Tensor]] = {
    "is_nonzero": lambda one: one != 0,
    "allclose": lambda *args, **kwargs: torch.isclose(*args, **kwargs).all(),
    "equal": lambda one, other: (one == other).all() if one.shape == other.shape else torch.zeros((), dtype=torch.bool),
}
"""Functions of tensors that give True or False -> the same as a tensor."""
_OF_NUMPY = {
    one: one
    for one in "add subtract multiply sqrt square exp expm1 log log1p log2 log10 floor ceil trunc minimum maximum sin "
    "cos tan sinh cosh tanh reciprocal sign".split()
}
_OF_NUMPY |= {
    "power": "pow",
    "float_power": "pow",
    "absolute": "abs",
    "fabs": "abs",
    "negative": "neg",
    "divide": "div",
}
"""Functions of numpy that compute with numbers -> those of torch."""
_SCALED = {
    "add": "alpha",
    "sub": "alpha",
    "subtract": "alpha",
    "addcdiv": "value",
    "addcmul": "value",
    "lerp": "weight",
}
"""Functions that take a number beside tensors -> what it is called."""
_IN_PLACE: dict[str, Any] = {
    "iadd": Tensor.add,
    "isub": Tensor.sub,
    "imul": Tensor.mul,
    "itruediv": Tensor.div,
    "idiv": Tensor.div,
    "ipow": Tensor.pow,
    "imod": Tensor.remainder,
    "ifloordiv": Tensor.floor_divide,
}
"""What Python computes by statements such as `x += 1` -> the same as an expression."""


def _by_bits(function: Callable[[Any, Any], Tensor]) -> Callable[[Any, Any], Tensor]:
    def of_whole(*numbers: Any) -> Tensor:
        return function(*(one.long() if isinstance(one, Tensor) else one for one in numbers)).double()

    return of_whole


_OF_BITS: dict[str, Callable[..., Tensor]] = {
    "invert": lambda number: -number - 1,
    "bitwise_not": lambda number: -number - 1,
    "lshift": lambda number, by: number * 2.0**by,
    "rshift": lambda number, by: torch.floor(number * 2.0**-by),
    "rlshift": lambda by, number: number * 2.0**by,
    "rrshift": lambda by, number: torch.floor(number * 2.0**-by),
    "and": _by_bits(torch.bitwise_and),
    "or": _by_bits(torch.bitwise_or),
    "xor": _by_bits(torch.bitwise_xor),
}
_OF_BITS |= {f"bitwise_{name}": _OF_BITS[name] for name in ("and", "or", "xor")}
_OF_BITS |= {f"i{name}": _OF_BITS[name] for name in ("and", "or", "xor", "lshift", "rshift")}
"""What Python computes with the bits of whole numbers."""
_DIVISORS = {
    **dict.fromkeys("truediv div true_divide itruediv idiv floordiv floor_divide mod remainder".split(), 1),
    **dict.fromkeys("rtruediv rdiv rfloordiv rmod".split(), 0),
}
"""What divides -> the place of the divisor."""
_ARITHMETIC = frozenset(
    "add sub mul div truediv true_divide pow mod remainder floordiv floor_divide maximum minimum "
    "lt le gt ge eq ne less greater".split()
)


def _is_arithmetic(name: str) -> bool:
    return name in _ARITHMETIC or name.removeprefix("r") in _ARITHMETIC or name.removeprefix("i") in _ARITHMETIC


_TYPES = {
    ir.DataType.DOUBLE: torch.float64,
    ir.DataType.FLOAT: torch.float32,
    ir.DataType.FLOAT16: torch.float16,
    ir.DataType.BFLOAT16: torch.bfloat16,
    ir.DataType.INT64: torch.int64,
    ir.DataType.INT32: torch.int32,
    ir.DataType.INT16: torch.int16,
    ir.DataType.INT8: torch.int8,
    ir.DataType.UINT8: torch.uint8,
    ir.DataType.BOOL: torch.bool,
}
_AS_IF_RUN = {"is_compiling": lambda: False, "is_exporting": lambda: False}
"""What code that asks whether it is traced gets to hear."""
_OF_MATH = (
    "sqrt pow exp expm1 log1p log2 log10 floor ceil trunc fmod copysign hypot isnan isinf isfinite sin cos tan "
    "sinh cosh tanh"
).split()


@contextlib.contextmanager
def _replaced(owner: Any, attributes: Mapping[str, Any]) -> Iterator[None]:
    """Give a module other attributes for a while."""
    before = {name: getattr(owner, name) for name in attributes if hasattr(owner, name)}
    try:
        for name, value in attributes.items():
            setattr(owner, name, value)
        yield
    finally:
        for name in attributes:
            if name in before:
                setattr(owner, name, before[name])
            else:
                delattr(owner, name)


def _of_tensors() -> dict[str, Any]:
    """Return functions of Python's `math` that take tensors as well."""

    def taking(original: Callable[..., Any], of_tensors: Callable[..., Any]) -> Callable[..., Any]:
        def function(*args: Any) -> Any:
            if not any(isinstance(one, Tensor) for one in args):
                return original(*args)
            return of_tensors(
                *(one.to(torch.float64) if isinstance(one, Tensor) else _wide(float(one)) for one in args)
            )

        return function

    def logarithm(x: Tensor, base: Tensor | None = None) -> Tensor:
        return torch.log(x) if base is None else torch.log(x) / torch.log(base)

    functions: dict[str, Any] = {name: getattr(torch, name) for name in _OF_MATH}
    functions.update(log=logarithm, fabs=torch.abs)
    return {name: taking(getattr(math, name), function) for name, function in functions.items()}


def _rounded(number: Tensor, digits: int | None = None) -> Tensor:
    if digits:
        raise _CannotTraceError("takes round() to some digits of its state, its gradient or the rate")
    return torch.round(number)


_AS_NUMBERS: dict[str, Any] = {
    "__divmod__": lambda number, other: (number // other, number % other),
    "__rdivmod__": lambda number, other: (other // number, other % number),
    "__round__": _rounded,
}
"""What Python asks of numbers that tensors do not have."""


class _Steps(nn.Module):
    """The steps of all kinds of parameters, as a function of all their tensors."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, kinds: Sequence[_Kind], places: Sequence[Sequence[_Place]]
    ) -> None:
        super().__init__()
        # In a tuple, as the module must not own the tensors.
        self._of = (optimizer, kinds, places)

    def forward(
        self, count: Tensor, rates: Sequence[Tensor], options: Sequence[Sequence[Tensor]], given: Sequence[Any]
    ) -> Any:
        optimizer, kinds, places = self._of
        return [
            _Trace(
                optimizer,
                kind,
                count,
                rates[kind.index],
                dict(zip(places[kind.index], options[kind.index], strict=True)),
                *tensors,
            ).merged()
            for kind, tensors in zip(kinds, given, strict=True)
        ]


_Place = tuple[str, int | None]
"""A number of an option: its name, and which of several it is."""


def _places(group: Mapping[str, Any], names: Sequence[str]) -> list[_Place]:
    """Return the numbers of some options that a group has."""
    found: list[_Place] = []
    for name in (name for name in names if name in group):
        several = isinstance(group[name], (tuple, list))
        found += [(name, index) for index in range(len(group[name]))] if several else [(name, None)]
    return found


def _joined(numbers: Mapping[_Place, Any]) -> dict[str, Any]:
    """Return options of their numbers."""
    found: dict[str, Any] = {}
    for (name, index), number in numbers.items():
        found[name] = number if index is None else (*found.get(name, ()), number)
    return found


@dataclasses.dataclass(frozen=True)
class _Trace:
    """The step of one kind of parameters while it is traced, as often as its code asks for.

    Attributes:
        optimizer: the optimizer.
        kind: the kind.
        count: the number of steps done, in float64.
        rate: the learning rate, in float64.
        options: numbers of options that are inputs, in float64.
        parameter: the parameter.
        gradient: its gradient.
        state: its state, in the order of the kind.
    """

    optimizer: torch.optim.Optimizer
    kind: _Kind
    count: Tensor
    rate: Tensor
    options: Mapping[_Place, Tensor]
    parameter: Tensor
    gradient: Tensor
    state: Sequence[Tensor]

    def merged(self) -> list[Tensor]:
        """Return the parameter after a step, its state and its counters, whatever the code's questions are answered.

        Where the code raises an error, the parameter is NaN.
        """
        later = self._explored([], is_first=False, left=[_PATHS])
        if isinstance(later, Exception):
            raise later
        if not self.kind.first_differs:
            return later
        begin = next((float(self.kind.begin[key]) for key in self.kind.counters if key in self.kind.begin), 0.0)
        first = self._explored([], is_first=True, left=[_PATHS])
        if isinstance(first, Exception):
            raise first
        changed = 1 + len(self.kind.states)
        chosen = _chosen(self.count == begin, first[:changed], later[:changed])
        assert not isinstance(chosen, Exception)
        return [*chosen, *later[changed:]]

    def _explored(self, answers: list[bool], *, is_first: bool, left: list[int]) -> list[Tensor] | Exception:
        left[0] -= 1
        if left[0] < 0:
            raise _CannotTraceError(f"asks for more than {_PATHS} combinations of answers whether something holds")
        results, conditions = self._run(answers, is_first)
        for index in reversed(range(len(answers), len(conditions))):
            asked = [*answers, *(True for _ in range(len(answers), index)), False]
            results = _chosen(conditions[index], results, self._explored(asked, is_first=is_first, left=left))
        return results

    def _run(self, answers: Sequence[bool], is_first: bool) -> tuple[list[Tensor] | Exception, list[Tensor]]:
        kind = self.kind
        # torch.export itself takes functions of `math` for those that it knows.
        with (
            _Numbers(answers) as python,
            _replaced(math, _of_tensors()),
            _replaced(torch, python.of_lists()),
            _replaced(Tensor, python.of_keys() | python.of_numpy() | _AS_NUMBERS),
        ):
            given = {key: self.count.clone() for key in kind.counters}
            given |= {key: one.clone() for key, one in zip(kind.states, self.state, strict=True)}
            state = {key: python.number(one) if key in kind.numbers else one for key, one in given.items()}
            state |= copy.deepcopy(kind.constants)
            if is_first:
                state = {key: one for key, one in state.items() if key in kind.held}
            tensor = self.parameter.clone()
            tensor.grad = self.gradient.clone()
            rates = {kind.index: python.number(self.rate.clone())}
            own, of_group, of_all = _divided(state)
            other = twin(self.optimizer, {kind.index: [tensor]}, {}, rates)
            form = _filled(kind.forms[0 if is_first else 1], own)
            if form:
                other.state[tensor] = form
            inputs = _joined({place: python.number(one.clone()) for place, one in self.options.items()})
            group = other.param_groups[kind.index]
            group.update(inputs | of_group)
            vars(other).update(of_all)
            before = _kept(other, group, copied=_copy_but_tensor)
            drawn = host_draws.states()
            try:
                other.step()
            except Exception as error:
                is_users = isinstance(error, ZeroDivisionError) or explaining.is_raised_by_user(error)
                if not python.conditions or not is_users:
                    raise
                return error, python.conditions
            after = _leaves(other.state[tensor])
        if host_draws.states() != drawn:
            raise _CannotTraceError("draws random numbers by Python or numpy; expected none")
        fixed = {_OF_GROUP + key for key in ("lr", *inputs)}
        for key, value in _kept(other, group, copied=_copy_but_tensor).items():
            if key in given:
                after[key] = value
            elif not _same(value, before.get(key)):
                if key not in fixed and _is_number(before.get(key)):
                    raise _ChangesNumberError((kind.index, key))
                raise _CannotTraceError(_told_of_change(key, " in later steps"))
        known = {*kind.counters, *kind.states, *kind.constants}
        for key, value in after.items():
            if key not in known or (key in kind.constants and not _same(value, kind.constants[key])):
                raise _CannotTraceError(f"changes the state {key!r} in later steps only; expected it in the first ones")
        results: list[Tensor] = [tensor]
        for key in (*kind.states, *kind.counters):
            like = given[key]
            value = after[key]
            if not isinstance(value, Tensor):
                value = torch.full((), value, dtype=like.dtype, device=like.device)
            if value.shape != like.shape:
                raise _CannotTraceError(f"changes the shape of the state {key!r}; expected the same in all steps")
            if key in kind.rounded:
                value = value.to(torch.bfloat16)
            results.append(value.to(like.dtype))
        return results, python.conditions


def _chosen(
    condition: Tensor, results: Sequence[Tensor] | Exception, others: Sequence[Tensor] | Exception
) -> list[Tensor] | Exception:
    """Return results where a condition holds and others where it does not; NaN for the first where that is an error."""
    if isinstance(results, Exception):
        return results if isinstance(others, Exception) else _chosen(~condition, others, results)
    if isinstance(others, Exception):
        first, *rest = results
        return [torch.where(condition, first, first.new_full((), math.nan)), *rest]
    return [torch.where(condition, one, other) for one, other in zip(results, others, strict=True)]


def _rules(optimizer: torch.optim.Optimizer, kinds: Sequence[_Kind], run_time: Sequence[str]) -> list[TracedRule]:
    """Return the rules of all kinds, of one trace."""
    groups = optimizer.param_groups
    given = tuple(kind.examples() for kind in kinds)
    number = torch.zeros((), dtype=torch.float64)
    places = [_places(group, run_time) for group in groups]
    numbers = tuple(tuple(number.clone() for _ in of_group) for of_group in places)
    arguments = (number, tuple(number.clone() for _ in groups), numbers, given)
    try:
        with torch.no_grad(), quiet(), _replaced(torch.compiler, _AS_IF_RUN), private.nothing_compiled():
            program = torch.export.export(_Steps(optimizer, kinds, places), arguments, strict=False)
    except _NumberError:
        raise
    except _CannotTraceError as error:
        raise _refused(optimizer, f"its step {error}") from error
    except Exception as error:
        # torch.export has no common base class for what it refuses.
        raise _refused(optimizer, f"its step cannot be traced: {explaining.reason(error)}") from error
    for node in program.graph.nodes:
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            raise _refused(optimizer, f"its step draws random numbers by {node.target}; expected none")
    program = tracing.decomposed(program, fuse=False, batch_norm=False, narrow=False, differentiates=False)
    _require_counted(program, kinds)
    try:
        model = onnx_model.translate(program, None)
    except ExportError as error:
        raise _refused(optimizer, f"its step: {str(error).removeprefix(f'{WHO}: ')}") from error
    finds_vectors = any(node.op_type == "Rotated" for node in model.graph.all_nodes())
    standins.put_bodies_in(model)
    simplify(model)
    narrow_types.compute_wider(model, narrow=False)
    for node in model.graph.all_nodes():
        if node.domain:
            raise _refused(optimizer, f"its step computes {node.op_type}; expected arithmetic of tensors")
    inputs, outputs = iter(model.graph.inputs), iter(model.graph.outputs)
    count, rates = next(inputs), [next(inputs) for _ in groups]
    options = [[next(inputs) for _ in of_group] for of_group in places]
    # The step of a parameter that is not new is the same whatever their number; with it, checkpoints fit.
    is_new = any(kind.first_differs for kind in kinds)
    rules = []
    for kind in kinds:
        taken = [next(inputs) for _ in range(2 + len(kind.states))]
        results = [next(outputs) for _ in range(1 + len(kind.states) + len(kind.counters))]
        taken = [count, rates[kind.index], *options[kind.index], *taken]
        update = functools.partial(_copied, kind, model.graph, places[kind.index], taken, results)
        plain = StateType(_type(kind.like).dtype, tuple(kind.like.shape))
        rules.append(
            TracedRule(
                states=_always(tuple(kind.states)),
                counts_steps=_always(bool(kind.counters) or (kind.first_differs if is_new else kind.began_otherwise)),
                update=update,
                state_types={key: own for key, own in kind.states.items() if own != plain},
                counters=kind.counters,
                finds_vectors=finds_vectors,
            )
        )
    return rules


def _copied(
    kind: _Kind,
    graph: ir.Graph,
    places: Sequence[_Place],
    taken: Sequence[ir.Value],
    results: Sequence[ir.Value],
    options: Mapping[str, Any],
    rate: GraphTensor,
    step: GraphTensor | None,
    slot: Slot,
) -> tuple[GraphTensor, dict[str, GraphTensor]]:
    """Append copies of a traced update's nodes: a rule's update."""
    # Of a kind that counts nothing, the trace does not read the count.
    counted = slot.parameter.nodes.constant(0.0, ir.DataType.DOUBLE) if step is None else step
    numbers = [options[name] if index is None else options[name][index] for name, index in places]
    tensors = [counted, rate, *numbers, slot.parameter, slot.gradient, *(slot.state[key] for key in kind.states)]
    given = {}
    for value, tensor in zip(taken, tensors, strict=True):
        assert value.dtype is not None
        given[value] = tensor.cast(value.dtype)
    parameter, *state = slot.parameter.nodes.copied(graph, given, results[: 1 + len(kind.states)])
    return parameter, dict(zip(kind.states, state, strict=True))


def _always(value: Any) -> Callable[[Mapping[str, Any]], Any]:
    return lambda options: value


def _require_counted(program: ExportedProgram, kinds: Sequence[_Kind]) -> None:
    """Raise `_NoCounterError` for a counter that does not grow by 1 each time."""
    signature = program.graph_signature
    constants = signature.inputs_to_lifted_tensor_constants
    count = next(node for node in program.graph.nodes if node.name == signature.user_inputs[0])
    outputs = iter(program.graph.output_node().args[0])
    copies = (aten.clone.default, aten._to_copy.default, aten.alias.default, aten.detach.default)

    def original(node: Any) -> Any:
        while isinstance(node, torch.fx.Node) and node.target in copies:
            node = node.args[0]
        return node

    def is_one(node: Any) -> bool:
        node = original(node)
        if isinstance(node, torch.fx.Node):
            return node.name in constants and bool((program.constants[constants[node.name]] == 1).all())
        return bool(node == 1)

    def counts(node: Any) -> bool:
        node = original(node)
        if not isinstance(node, torch.fx.Node):
            return False
        if node.target is aten.where.self:
            return counts(node.args[1]) and counts(node.args[2])
        if node.target not in (aten.add.Tensor, aten.add.Scalar):
            return False
        first, second = map(original, node.args[:2])
        return (first is count and is_one(second)) or (second is count and is_one(first))

    others: list[tuple[int, str]] = []
    for kind in kinds:
        results = [next(outputs) for _ in range(1 + len(kind.states) + len(kind.counters))]
        named = zip(kind.counters, results[1 + len(kind.states) :], strict=True)
        others += [(kind.index, key) for key, node in named if not counts(node)]
    if others:
        raise _NoCounterError(*others)


def _require_traceable(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer whose step takes a function, or that keeps tensors elsewhere than in its state."""
    for name, parameter in list(inspect.signature(type(optimizer).step).parameters.items())[1:]:
        if parameter.default is parameter.empty and parameter.kind not in (
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
        ):
            raise _refused(optimizer, f"its step needs {name}; expected one of the gradients alone")
    for index, group in enumerate(optimizer.param_groups):
        if "lr" not in group:
            raise _refused(optimizer, f"parameter group {index} has no option 'lr'; expected the learning rate there")
        if group["lr"] is None:
            raise _refused(optimizer, f"the lr of parameter group {index} is None; expected a number")
    for key, value in _unowned(vars(optimizer)).items():
        if isinstance(value, torch.optim.Optimizer):
            raise _refused(
                optimizer,
                f"it wraps {type(value).__name__} in its attribute {key!r}; expected a step that updates the "
                "parameters itself, as of a subclass of that",
            )
        if _holds_tensors(value):
            raise _refused(optimizer, f"it has tensors in its attribute {key!r}; expected them in its state")


def _is_of_torch(optimizer: torch.optim.Optimizer) -> bool:
    return f"{type(optimizer).__module__}.".startswith("torch.optim.")


def _require_separate(optimizer: torch.optim.Optimizer, of: Mapping[str, _Kind], names: Mapping[int, str]) -> None:
    """Refuse an optimizer that updates a parameter otherwise when it has others besides, early or late."""
    copies, states = _copies(optimizer)
    rates = _rates(optimizer)
    alone = {}
    kinds = {one: of[names[id(parameter)]] for parameter, one in copies.items()}
    for kind in dict.fromkeys(of.values()):
        like = copies[kind.like]
        one = like.detach().clone().requires_grad_()
        one.grad = None if like.grad is None else like.grad.clone()
        # The learning rates of other groups are no matter either.
        own = {index: rate if index == kind.index else 2 * rate for index, rate in rates.items()}
        other = twin(optimizer, {kind.index: [one]}, {one: _copied_state(states[like], like, one, {})}, own)
        _take_steps(optimizer, other)
        _take_late_steps(optimizer, other, {one: kind})
        alone[kind] = one.detach(), dict(other.state[one]), _unowned(other.param_groups[kind.index]), _numbers(other)
    whole = twin(optimizer, _groups(optimizer, copies), states, rates)
    _take_steps(optimizer, whole)
    _take_late_steps(optimizer, whole, kinds)
    options = list(map(_unowned, whole.param_groups))
    for kind, (*updated, attributes) in alone.items():
        for key, value in _numbers(whole).items():
            if not _same(value, attributes.get(key)):
                raise _refused(optimizer, f"its step {_told_of_change(_OF_ALL + key)} that each step changes once")
        like = copies[kind.like]
        if not _same([like.detach(), dict(whole.state[like]), options[kind.index]], updated):
            raise _refused(
                optimizer,
                f"its step updates {names[id(kind.like)]!r} otherwise when it has other parameters besides; expected "
                "updates of each parameter by itself",
            )


def _numbers(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {key: value for key, value in _attributes(optimizer).items() if _is_number(value)}


def _take_steps(optimizer: torch.optim.Optimizer, other: torch.optim.Optimizer) -> None:
    """Run some steps of a twin, with multiples of its gradients: what a step keeps may tell in later ones alone."""
    # Large ones and small ones, as some are clipped, whose steps do not add up to none.
    for factor in (1.0, 1e4, -1e-8, -1e4):
        for group in other.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad = parameter.grad * factor
        take_step(optimizer, other)


_LATE = (199, 5039)
"""So many steps are done before late ones: the next are multiples of many numbers."""


def _take_late_steps(
    optimizer: torch.optim.Optimizer, other: torch.optim.Optimizer, kinds: Mapping[Tensor, _Kind]
) -> None:
    """Run steps of a twin of an optimizer of one's own as if it had taken many, as far as it counts them."""
    if _is_of_torch(optimizer):
        return
    for done in _LATE:
        for parameter, kind in kinds.items():
            state = state_of(other, kind.index, parameter)
            later = {key: state[key] + (done - int(state[key])) for key in kind.counters}
            set_state(other, kind.index, parameter, later)
        for _ in range(2):
            take_step(optimizer, other)


class _OtherSigns(private.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Gives some singular vectors and eigenvectors the other sign, which is as right."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._generator = torch.Generator().manual_seed(0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is aten._linalg_eigh.default:
            values, vectors = result
            return values, vectors * self._signs(vectors)
        if func is aten._linalg_svd.default:
            u, values, v = result
            signs = self._signs(u if u.shape[-1] >= v.shape[-2] else v.transpose(-1, -2))
            return u * signs[: u.shape[-1]], values, v * signs[: v.shape[-2], None]
        return result

    def _signs(self, vectors: Tensor) -> Tensor:
        signs = torch.randint(0, 2, vectors.shape[-1:], generator=self._generator) * 2 - 1
        return signs.to(vectors.device, vectors.dtype)


def _require_any_vectors(optimizer: torch.optim.Optimizer, of: Mapping[str, _Kind], names: Mapping[int, str]) -> None:
    """Refuse an optimizer whose updates depend on the signs of the singular vectors or eigenvectors that it finds."""
    updated = []
    for signs in (contextlib.nullcontext(), _OtherSigns()):
        copies, states = _copies(optimizer)
        kinds = {one: of[names[id(parameter)]] for parameter, one in copies.items()}
        whole = twin(optimizer, _groups(optimizer, copies), states, _rates(optimizer))
        with signs:
            _take_steps(optimizer, whole)
            _take_late_steps(optimizer, whole, kinds)
        updated.append(copies)
    for parameter, one in updated[0].items():
        bound = torch.finfo(one.dtype).eps ** 0.5 * float(one.detach().nan_to_num().abs().sum())
        if not torch.allclose(one, updated[1][parameter], rtol=0.0, atol=bound, equal_nan=True):
            raise _refused(
                optimizer,
                f"its step updates {names[id(parameter)]!r} otherwise where singular vectors or eigenvectors have "
                "other signs, which differ by machine; expected updates that do not depend on them",
            )


def _require_by_value(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> None:
    """Refuse an optimizer that updates parameters otherwise than copies of them: copies are what is traced."""
    copies, states = _copies(optimizer)
    copied: dict[int, Any] = {}
    own = {parameter: _copied_state(states[one], one, parameter, copied) for parameter, one in copies.items()}
    rates = _rates(optimizer)
    take_step(optimizer, twin(optimizer, _groups(optimizer, copies), states, rates))
    # A step may put other memory into a parameter.
    before = {parameter: (parameter.data, parameter.detach().clone(), parameter.grad) for parameter in copies}
    generator = torch.Generator().manual_seed(0)
    updated = {}
    try:
        for parameter in copies:
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.device, parameter.dtype)
        take_step(optimizer, twin(optimizer, _groups(optimizer, {one: one for one in copies}), own, rates))
        updated = {parameter: _same(parameter.detach(), one.detach()) for parameter, one in copies.items()}
    finally:
        for parameter, (data, values, gradient) in before.items():
            parameter.data, parameter.grad = data, gradient
            data.copy_(values)
    for parameter, is_same in updated.items():
        if not is_same:
            raise _refused(
                optimizer,
                f"its step updates {names[id(parameter)]!r} otherwise than a copy of it, as by its identity or an "
                "attribute that it has; expected rules that follow from values and options: put it in a parameter "
                "group with options of its own",
            )


def _require_implementation(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that computes something else by another implementation than the one that is traced."""
    chosen = {
        f"{key}={group[key]}"
        for group in optimizer.param_groups
        for key, traced in _IMPLEMENTATION.items()
        if key in group and group[key] is not traced
    }
    updated = []
    for implementation in ({}, _IMPLEMENTATION) if chosen else ():
        copies, states = _copies(optimizer)
        wide = {one: one.detach().double().requires_grad_() for one in copies.values()}
        states = {wide[one]: mapped(state, functools.partial(_widened, like=one)) for one, state in states.items()}
        for one, other in wide.items():
            other.grad = None if one.grad is None else one.grad.double()
        groups = _groups(optimizer, {parameter: wide[one] for parameter, one in copies.items()})
        twins = twin(optimizer, groups, states, _rates(optimizer), implementation)
        try:
            with private.nothing_compiled(), _replaced(torch, _OF_NO_TENSORS):
                twins.step()
        except Exception:
            # What PyTorch itself cannot run, as on a CPU, cannot be compared.
            return
        updated.append([other.detach() for other in wide.values()])
    for one, other in zip(*updated, strict=True):
        if not torch.allclose(one, other, rtol=_OF_IMPLEMENTATION, atol=_OF_IMPLEMENTATION, equal_nan=True):
            raise _refused(
                optimizer,
                f"its step computes something else with {' and '.join(sorted(chosen))} than with foreach=False, which "
                "is traced; expected foreach=False in its parameter groups",
            )


def _widened(value: Any, like: Tensor) -> Any:
    return value.double() if isinstance(value, Tensor) and value.dtype == like.dtype else value


def _copies(optimizer: torch.optim.Optimizer) -> tuple[dict[Tensor, Tensor], dict[Tensor, dict[str, Any]]]:
    """Return a copy of each parameter that is trained, with a random gradient, and the states of the copies."""
    generator = torch.Generator().manual_seed(0)
    copies, states = {}, {}
    copied: dict[int, Any] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad:
                one = copies[parameter] = parameter.detach().clone().requires_grad_()
                one.grad = torch.randn(one.shape, generator=generator).to(one.device, one.dtype)
                states[one] = _copied_state(_own_state(optimizer, parameter), parameter, one, copied)
    return copies, states


def _groups(optimizer: torch.optim.Optimizer, others: Mapping[Tensor, Tensor]) -> dict[int, list[Tensor]]:
    """Return the parameters that take the places of others, by their groups."""
    groups = {
        index: [others[parameter] for parameter in group["params"] if parameter in others]
        for index, group in enumerate(optimizer.param_groups)
    }
    return {index: parameters for index, parameters in groups.items() if parameters}


def _rates(optimizer: torch.optim.Optimizer) -> dict[int, float]:
    # At 0, as before a warmup, nothing would be seen.
    return {index: float(group["lr"]) or 0.01 for index, group in enumerate(optimizer.param_groups)}


def take_step(optimizer: torch.optim.Optimizer, other: torch.optim.Optimizer) -> None:
    """Run a step of a twin.

    Raises:
        ExportError: it fails.
    """
    try:
        with private.nothing_compiled(), _replaced(torch, _OF_NO_TENSORS):
            other.step()
    except Exception as error:
        # A user's optimizer may raise anything.
        raise _refused(optimizer, f"its step fails: {explaining.reason(error)}") from error


def _refused(optimizer: torch.optim.Optimizer, text: str) -> ExportError:
    return refusal(f"optimizer is {type(optimizer).__name__}: {text}")


def _held(optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Any]:
    """Return the state of a parameter that there is, one by one."""
    return _leaves(optimizer.state.get(parameter, {}))


def _unowned(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in attributes.items() if key not in (*_OWN, "params")}


def _signature(state: Mapping[str, Any]) -> Any:
    """Return what decides how a parameter with a state is updated, beside its tensors and counters."""

    def told(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.dtype, value.shape
        return type(value) if _is_number(value) else repr(value)

    return tuple((key, told(value)) for key, value in sorted(state.items(), key=lambda item: str(item[0])))


def _counts(values: Sequence[Any]) -> bool:
    return all(map(_is_number, values)) and all(
        float(value) == float(values[0]) + done for done, value in enumerate(values)
    )


def _is_number(value: Any) -> bool:
    """Tell whether something is a number, of Python or as a tensor of shape ()."""
    if isinstance(value, Tensor):
        return not value.dim() and value.dtype not in (torch.bool, torch.complex64, torch.complex128)
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _is_tensor_or_number(value: Any) -> bool:
    return isinstance(value, Tensor) or _is_number(value)


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_holds_tensors, value.values())) or any(map(_holds_tensors, value))
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return any(map(_holds_tensors, value))
    return isinstance(value, (Tensor, nn.Module, torch.optim.Optimizer))


def _copy_of(value: Any, depth: int = 3) -> Any:
    """Return a deep copy, but for what cannot be copied, such as locks and files."""
    if isinstance(value, torch.Generator):
        # A deep copy is made of tensors, which fails in a trace.
        return value.clone_state()
    try:
        return copy.deepcopy(value)
    except Exception:
        # A class may raise anything.
        if not depth or not hasattr(value, "__dict__") or isinstance(value, type):
            return value
    result = object.__new__(type(value))
    vars(result).update({key: _copy_of(one, depth - 1) for key, one in vars(value).items()})
    return result


def _same(one: Any, other: Any, compared: frozenset[tuple[int, int]] = frozenset()) -> bool:
    """Tell whether two values are alike. Pairs in `compared` are parts of each other, and are compared elsewhere."""
    if one is other or (id(one), id(other)) in compared:
        return True
    same = functools.partial(_same, compared=compared | {(id(one), id(other))})
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if not {type(one), type(other)} <= {Tensor, nn.Parameter}:
            # In a trace, which has no values.
            return False
        return one.dtype == other.dtype and to_numpy(one).tobytes() == to_numpy(other).tobytes()
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, (list, tuple, deque)) and isinstance(other, (list, tuple, deque)):
        return len(one) == len(other) and all(map(same, one, other))
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        return bool(one.dtype == other.dtype and one.shape == other.shape) and one.tobytes() == other.tobytes()
    if isinstance(one, torch.Generator):
        return same(one.get_state(), other.get_state())
    equality: Any = type(one).__eq__
    if equality is object.__eq__:
        # A copy of such an object is never equal to it.
        return hasattr(one, "__dict__") and same(vars(one), vars(other))
    return bool(one == other) or (one != one and other != other)


def _array(value: Any) -> Any:
    """Return a tensor or number as an array of numpy, which has no bfloat16."""
    if not isinstance(value, Tensor):
        return to_numpy(torch.tensor(value, dtype=torch.float64))
    return to_numpy(value.float() if value.dtype == torch.bfloat16 else value)


def _type(value: Any) -> StateType:
    array = _array(value)
    return StateType(ir.DataType.from_numpy(array.dtype), tuple(array.shape))
