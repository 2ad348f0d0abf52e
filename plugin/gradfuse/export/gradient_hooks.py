"""Hooks on the gradients of parameters, `Parameter.register_hook`, in exported steps.

PyTorch calls them once in each backward pass, in the order in which they were registered, with the whole gradient of
the loss by the parameter. They are traced behind the forward pass, for gradients that are not known yet: see
`own_gradients`. This module imports torch.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from gradfuse import _torch_private as private
from gradfuse.errors import ExportError
from gradfuse.export import explaining, own_gradients
from gradfuse.export.leaves import WrittenData
from gradfuse.export.reporting import kind, refusal

_GRAD: Any = Tensor.grad
_OF_GRAD = (_GRAD.__get__, _GRAD.__set__, _GRAD.__delete__)


@dataclasses.dataclass(frozen=True)
class Hook:
    """A hook of the user.

    Attributes:
        function: takes a gradient, and returns what takes its place; None: it stays, as the hook may have changed it.
        name: the parameter.
    """

    function: Callable[[Tensor], Any]
    name: str

    def __str__(self) -> str:
        return f"the hook {explaining.of_callable(self.function)} on the gradient of {self.name!r}"


def of_parameter(name: str, parameter: Tensor) -> tuple[Hook, ...]:
    """Return the hooks on the gradient of a parameter, in the order in which PyTorch calls them.

    Raises:
        ExportError: one of its hooks is called after the gradient is added to `.grad`.
    """
    for function in private.post_accumulate_hooks(parameter):
        raise refusal(
            f"parameter {name!r} has the hook {explaining.of_callable(function)} by "
            "register_post_accumulate_grad_hook; expected none: take it away by remove() of its handle. To update in "
            "it, give the optimizer to export_training_step; to change the gradient, use register_hook"
        )
    return tuple(Hook(function, name) for function in private.gradient_hooks(parameter))


class Calls:
    """Calls hooks with the tensors of a run or a trace wherever they read those of the module.

    Args:
        originals: the tensors of module and loss, by name.
        now: returns the one that is in the place of such a tensor.

    Attributes:
        aliases: what hooks have read that may have the memory of such a tensor, and is another one.
    """

    def __init__(self, originals: Mapping[str, Tensor], now: Callable[[str], Tensor]) -> None:
        self._names = {id(tensor): name for name, tensor in originals.items()}
        self._memory = {private.storage(tensor) for tensor in originals.values()}
        self._now = now
        self.aliases: list[tuple[Tensor, Hook]] = []

    def call(self, hook: Hook, gradient: Tensor) -> Tensor | None:
        """Return what a hook gives.

        Raises:
            ExportError: it fails, or reads `.grad`.
        """
        try:
            with _InTheirPlaces(functools.partial(self._current, hook), hook):
                result = self._current(hook, hook.function(gradient))
        except ExportError:
            raise
        except Exception as error:
            # A user's hook may raise anything.
            traced = private.is_traced(gradient)
            what = "cannot be traced, as it is Python code on numbers that a graph does not know" if traced else "fails"
            advice = "; expected operators on tensors, as torch.where in the place of if" if traced else ""
            raise refusal(f"{hook} {what}: {explaining.reason(error)}{advice}") from error
        if result is not None and not isinstance(result, Tensor):
            raise refusal(f"{hook} returns {kind(result)}; expected a tensor or None")
        return result

    def _current(self, hook: Hook, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        name = self._names.get(id(value))
        if name is not None:
            return self._now(name)
        if not private.is_traced(value) and value.layout == torch.strided and private.storage(value) in self._memory:
            self.aliases.append((value, hook))
        return value


class _InTheirPlaces(TorchFunctionMode):
    """Puts other tensors into the places of some arguments of all functions, and refuses to read `.grad`."""

    def __init__(self, current: Callable[[Any], Any], hook: Hook) -> None:
        super().__init__()
        self._current, self._hook = current, hook

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _OF_GRAD:
            raise refusal(
                f"{self._hook} reads or sets .grad, which a backward pass fills in no order that the code decides; "
                "expected a function of the gradient that it is given"
            )
        args, kwargs = private.map_tensors(self._current, (args, kwargs or {}))
        return func(*args, **kwargs)


class Running:
    """Registers hooks for one run of a step in PyTorch, and watches them.

    Args:
        hooks: parameter -> its hooks.
        calls: calls them.
        state: all tensors of the run, by name.
        share: by how much the gradients of the loss are divided before they are added up in `.grad`.
        spoils: whether hooks get copies, and the gradients themselves are NaN from then on if a hook writes into them.

    Attributes:
        written: whether one has written into the gradient that it was given.
        in_backward: whether the loss is known, and its backward pass may begin.
    """

    def __init__(
        self, hooks: Mapping[str, Sequence[Hook]], calls: Calls, state: Mapping[str, Tensor], share: int, spoils: bool
    ) -> None:
        self.written = False
        self.in_backward = False
        self._hooks, self._calls, self._state, self._share, self._spoils = hooks, calls, state, share, spoils

    def register(self) -> None:
        """Register the hooks with the parameters of the run."""
        for name, hooks in self._hooks.items():
            leaf: Any = self._state[name]
            if self._share != 1:
                leaf.register_hook(lambda gradient: gradient / self._share)
            for hook in hooks:
                leaf.register_hook(lambda gradient, hook=hook: self._called(hook, gradient))
            if self._share != 1:
                leaf.register_hook(lambda gradient: gradient * self._share)

    def _called(self, hook: Hook, gradient: Tensor) -> Tensor | None:
        if not self.in_backward:
            raise refusal(
                f"{hook} is called within the step, which takes a derivative by {hook.name!r} itself; expected hooks "
                "on parameters that only the loss is differentiated by"
            )
        given = gradient.clone() if self._spoils else gradient
        version, versions = private.version(given), self._versions()
        drawn, written = torch.get_rng_state(), WrittenData()
        with written:
            result = self._calls.call(hook, given)
        if not torch.equal(drawn, torch.get_rng_state()):
            raise refusal(f"{hook} draws random numbers, which no seed of the step determines; expected none")
        for name, before in versions.items():
            if private.version(self._state[name]) != before or self._state[name] in written:
                raise refusal(
                    f"{hook} writes into {name!r}; expected a function of the gradient, which changes nothing else"
                )
        changed = private.version(given) != version or given in written
        if result is None and not changed:
            raise refusal(
                f"{hook} returns None and only looks at it, which an exported step does not do; expected none: take it "
                "away by remove() of its handle, and look at session.gradients of a step that has no optimizer"
            )
        self.written |= changed
        if not self._spoils:
            return result
        if changed and gradient.layout == torch.strided:
            gradient.fill_(torch.nan)
        return given if result is None else result

    def _versions(self) -> dict[str, int]:
        return {name: private.version(tensor) for name, tensor in self._state.items()}


def traced(
    hooks: Mapping[str, Sequence[Hook]], calls: Calls, leaves: Mapping[str, Tensor], share: int
) -> tuple[Tensor, ...]:
    """Return what hooks make of the gradients of parameters, while a step is traced.

    Args:
        hooks: parameter -> its hooks.
        calls: calls them.
        leaves: the parameters that have a gradient; those with hooks are numbered in this order.
        share: as for `Running`.
    """
    results = []
    with own_gradients.apart():
        for name, leaf in leaves.items():
            if name not in hooks:
                continue
            gradient = own_gradients.of_leaf(leaf, len(results))
            gradient = gradient if share == 1 else gradient / share
            for hook in hooks[name]:
                changed = calls.call(hook, gradient)
                gradient = gradient if changed is None else changed
            results.append(gradient if share == 1 else gradient * share)
    return tuple(results)
