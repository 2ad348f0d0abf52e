"""What a module's Python code asks of its tensors: truth values, which a traced program cannot answer, and lengths.

A graph has no branches, so torch.export refuses `if tensor:`. Two kinds of them do not choose what is computed, and are
decided while a step is traced as they are when PyTorch runs it on the batch:

- A check, `if not valid.all(): raise ValueError(...)`: when its condition is turned around, the function that asks
  raises an error.
- A condition on whether numbers are finite, from `torch.isfinite`, `isnan` or `isinf`: the exported step is for numbers
  that are.

Besides, `nonzero` is taken to find something where it does on the batch, and the user is told.

This module imports torch.
"""

from __future__ import annotations

import builtins
import contextlib
import dataclasses
import dis
import inspect
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from types import CodeType, TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from gradfuse.export import _torch_private as private
from gradfuse.export import explaining
from gradfuse.export.dropout import SeededDropout
from gradfuse.export.reporting import WHO, refusal
from gradfuse.export.sizes_in_tensors import SizesInTensors
from gradfuse.export.torch_step import TorchStep
from gradfuse.export.translation import lengths_as_tensors
from gradfuse.training.step import DROPOUT_SEED

_FINITE = ("isfinite", "isnan", "isinf")
_RANDOM = ("rand", "rand_like", "bernoulli", "uniform_")
_KEEPS = frozenset(
    """
    all any logical_not logical_and logical_or _is_all_true __invert__ __and__ __or__ bitwise_not bitwise_and bitwise_or
    lt le gt ge __lt__ __le__ __gt__ __ge__ item
    """.split()
)
"""Functions whose results are of the kind of their arguments."""

_ASKS = (torch.Tensor.__bool__, torch.Tensor.item)
_SELECTS = (torch.masked_select, torch.Tensor.masked_select, torch.Tensor.__getitem__)

_MOST = 64
"""More branches than that are not looked at one by one."""

Place = tuple[CodeType, int]
"""Where code asks: a function, and the offset of the instruction in it."""


@dataclasses.dataclass(frozen=True)
class Branches:
    """The branches on values that a module takes when PyTorch runs it.

    Attributes:
        decided: those that do not choose what is computed -> how they go.
        open: the others, as texts for messages.
        random: those of the others that depend on a random number.
        found: where `nonzero` finds something each time.
        assumed: those of them that were met when the step was traced.
    """

    decided: Mapping[Place, bool]
    open: tuple[str, ...]
    random: tuple[str, ...]
    found: frozenset[Place]
    assumed: set[Place] = dataclasses.field(default_factory=set)


def branches_of(step: TorchStep) -> Branches:
    """Run the forward pass of a step, and look at each of its branches.

    Raises:
        ExportError: the step draws random numbers by numpy, which would be constants of the exported step.
    """
    before = _numpy_state()
    observed = _Observed(None)
    _run(step, observed)
    if _numpy_state() != before:
        raise refusal(
            "the module draws random numbers by numpy, which an exported step would repeat in every call; expected "
            f"torch's random numbers or none{_settings(step)}"
        )
    decided: dict[Place, bool] = {}
    texts: list[str] = []
    random: list[str] = []
    for place, (answers, kinds) in list(observed.asked.items())[:_MOST]:
        if len(answers) == 1 and ("finite" in kinds or _is_check(step, place)):
            decided[place] = next(iter(answers))
            continue
        texts.append(_text(place))
        if "random" in kinds:
            random.append(_text(place))
    found = frozenset(place for place, counts in observed.found.items() if all(counts))
    return Branches(decided, tuple(texts), tuple(random), found)


def refuse_open(step: TorchStep, branches: Branches, error: BaseException) -> None:
    """Refuse a step that torch.export could not trace, if values of tensors are why.

    Raises:
        ExportError: the error comes from a branch that chooses what is computed, or from a number that is taken out of
            a tensor.
    """
    where = explaining.place(error)
    text, place, advice = "the value of a tensor", where, "torch.where or the like"
    if where in branches.random:
        text, advice = "a random number", f"a module that always computes the same{_settings(step)}"
    elif where not in branches.open:
        if not private.is_about_data(error):
            return
        text, advice = "numbers that it takes out of tensors", "sizes and branches that follow from shapes alone"
    raise refusal(
        f"torch.export cannot trace the step: the module decides by {text} what it computes"
        f"{f', in {place}' if place else ''}, and a graph has no branches; expected {advice}"
    )


def warn_of_assumptions(branches: Branches) -> None:
    """Tell the user what was taken to be so in all batches."""
    for place in branches.assumed:
        warnings.warn(
            f"{WHO}: nonzero in {_text(place)} is taken to find at least one element, as it does in this batch",
            stacklevel=4,
        )


@contextlib.contextmanager
def answered(step: TorchStep, branches: Branches) -> Iterator[None]:
    """Let a module be traced: decide its checks, let `len` give symbolic lengths, and `to` do nothing where it can."""
    with _symbolic_len(step), private.idle_conversions(), _Decided(branches):
        yield


class _Decided(TorchFunctionMode):
    """Answer the branches that are decided, and sample grids in operators whose gradients are known.

    Sizes that are computed by tensors stay sizes. What the same mask selects has one size.
    """

    def __init__(self, branches: Branches) -> None:
        super().__init__()
        self._branches = branches
        self._selected: dict[tuple[int, int], tuple[Tensor, Any]] = {}
        self._sizes = SizesInTensors()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        place = _caller()
        if func in _ASKS and place in self._branches.decided:
            return self._branches.decided[place]
        func = _IN_OTHER_OPERATORS.get(func, func)
        result = self._sizes.called(func, args, kwargs or {})
        if func in _SELECTS and len(args) == 2 and isinstance(args[1], Tensor) and args[1].dtype == torch.bool:
            # With the mask itself, so that no other gets its id; written into, it is another one.
            key = id(args[1]), args[1]._version
            _, count = self._selected.setdefault(key, (args[1], result.shape[0]))
            if count is not result.shape[0]:
                private.assume(result.shape[0] == count)
        if place in self._branches.found and isinstance(result, Tensor):
            private.assume(result.shape[0] > 0)
            self._branches.assumed.add(place)
        return result


class _Observed(TorchFunctionMode):
    """Note where code asks for the truth value of a tensor, and answer one place the other way round.

    Args:
        turned: that place; None: all answers are true.

    Attributes:
        asked: place -> the answers, and of which kinds the tensors are.
        found: place of a `nonzero` -> whether it found something, each time.
    """

    def __init__(self, turned: Place | None) -> None:
        super().__init__()
        self.asked: dict[Place, tuple[set[bool], set[str]]] = {}
        self.found: dict[Place, list[bool]] = {}
        self._turned = turned
        # With the tensor itself, so that no other gets its id.
        self._kinds: dict[int, tuple[str, Any]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        kind = None
        if name in _FINITE:
            kind = "finite"
        elif name in _RANDOM:
            kind = "random"
        elif name in _KEEPS or func is torch.Tensor.__bool__:
            kind = next((self._kinds[id(one)][0] for one in args if id(one) in self._kinds), None)
        if func is torch.Tensor.__bool__ or (func is torch.Tensor.item and isinstance(result, bool)):
            place = _caller()
            answers, kinds = self.asked.setdefault(place, (set(), set()))
            answers.add(result)
            kinds.update([] if kind is None else [kind])
            return not result if place == self._turned else result
        if name == "nonzero" and isinstance(result, Tensor):
            self.found.setdefault(_caller(), []).append(result.shape[0] > 0)
        if kind is not None:
            self._kinds[id(result)] = kind, result
        return result


def _grid_sample(
    input: Tensor, grid: Tensor, mode: str = "bilinear", padding_mode: str = "zeros", align_corners: Any = None
) -> Tensor:
    modes, paddings = ("bilinear", "nearest", "bicubic"), ("zeros", "border", "reflection")
    return _grid_sampler(input, grid, modes.index(mode), paddings.index(padding_mode), bool(align_corners))


def _grid_sampler(input: Tensor, grid: Tensor, mode: int, padding: int, align_corners: bool) -> Tensor:
    if input.dim() != _AXES_OF_PICTURES or mode == _BICUBIC:
        return torch.grid_sampler(input, grid, mode, padding, align_corners)
    overload = torch.ops.aten.grid_sampler_2d.default
    sampled: Tensor = private.known_decompositions([overload])[overload](input, grid, mode, padding, align_corners)
    if mode == _NEAREST and grid.requires_grad:
        # PyTorch's gradient of the grid is zeros, where none would be refused.
        sampled = sampled + 0.0 * grid.sum()
    return sampled


_NEAREST, _BICUBIC = 1, 2
_AXES_OF_PICTURES = 4

_IN_OTHER_OPERATORS: Mapping[Any, Callable[..., Tensor]] = {
    torch.nn.functional.grid_sample: _grid_sample,
    torch.grid_sampler: _grid_sampler,
}
"""Functions whose gradients are operators that no exporter knows -> the same in operators that have others."""


def _run(step: TorchStep, observed: _Observed) -> None:
    """Run the forward pass on copies of all tensors."""

    def copies(tensors: Any) -> list[Tensor]:
        return [tensor.detach().clone() for tensor in tensors]

    state = dict(zip(step.state, copies(step.state.values()), strict=True))
    for name in step.trainable:
        state[name].requires_grad_()
    with lengths_as_tensors(), SeededDropout(state.get(DROPOUT_SEED)), observed:
        step.apply(state, copies(step.inputs), copies(step.targets))


def _is_check(step: TorchStep, place: Place) -> bool:
    """Whether code raises an error, in the very function that asks, when the answer is the other one."""
    try:
        _run(step, _Observed(place))
    except Exception as error:
        # A user's module may raise anything.
        traceback = _last(error.__traceback__)
        if traceback is None or traceback.tb_frame.f_code is not place[0]:
            return False
        return place[0].co_code[traceback.tb_lasti] == dis.opmap["RAISE_VARARGS"]
    return False


def _caller() -> Place:
    """Return where the code is that called the mode whose method calls this."""
    frame = inspect.currentframe()
    for _ in range(2):
        assert frame is not None
        frame = frame.f_back
    assert frame is not None
    return frame.f_code, frame.f_lasti


def _last(traceback: TracebackType | None) -> TracebackType | None:
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    return traceback


def _text(place: Place) -> str:
    code, offset = place
    lines = [line for start, end, line in code.co_lines() if start <= offset < end]
    return explaining.text_of(code, lines[0] if lines and lines[0] is not None else code.co_firstlineno)


_OFF: Mapping[str, Callable[[Any], object]] = {
    "layerdrop": lambda value: 0.0,
    "apply_spec_augment": lambda value: False,
}


def _settings(step: TorchStep) -> str:
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


def _numpy_state() -> tuple[bytes, int]:
    _, keys, position, *_ = np.random.get_state(legacy=True)
    return np.asarray(keys).tobytes(), int(position)


@contextlib.contextmanager
def _symbolic_len(step: TorchStep) -> Iterator[None]:
    """Let `len(tensor)` in the packages of module and loss be what `tensor.shape[0]` is.

    Python insists on an integer of `len`, which makes a dynamic size a constant of the traced program.
    """
    owners: list[Any] = [step.loss]
    for owner in (step.module, step.loss):
        owners += [type(module) for module in owner.modules()] if isinstance(owner, torch.nn.Module) else []
    packages = {str(getattr(owner, "__module__", "")).partition(".")[0] for owner in owners} - {"torch", "builtins", ""}
    namespaces = [
        vars(module)
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] in packages and hasattr(module, "__dict__") and "len" not in vars(module)
    ]
    for namespace in namespaces:
        namespace["len"] = _len
    try:
        yield
    finally:
        for namespace in namespaces:
            namespace.pop("len", None)


def _len(value: Any) -> Any:
    if isinstance(value, Tensor) and value.dim():
        return value.shape[0]
    return builtins.len(value)
