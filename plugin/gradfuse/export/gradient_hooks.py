"""Hooks on gradients, `Tensor.register_hook`, in exported steps.

PyTorch calls them once in each backward pass, in the order in which they were registered, with the whole gradient of
the loss by a parameter, or by what the step's code registers them with. They are traced behind the forward pass, for
gradients that are not known yet: see `own_gradients`. This module imports torch.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

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
        place: what it is registered with, or where, for messages.
    """

    function: Callable[[Tensor], Any]
    place: str

    def __str__(self) -> str:
        return f"the hook {explaining.of_callable(self.function)} {self.place}"

    @property
    def kind(self) -> Kind:
        return Kind(explaining.code_of(self.function), str(self))

    @classmethod
    def registered_here(cls, function: Callable[[Tensor], Any]) -> Hook:
        """Return one that the user's code registers with what it computes."""
        return cls(function, f"that is registered in {explaining.current_place()}")


@dataclasses.dataclass(frozen=True)
class Kind:
    """What the hooks have in common that the same code registers in several runs."""

    code: Any
    text: str

    def __str__(self) -> str:
        return self.text


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
    return tuple(Hook(function, f"on the gradient of {name!r}") for function in private.gradient_hooks(parameter))


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

    def call(self, hook: Hook, gradient: Tensor, written: WrittenData | None = None) -> Tensor | None:
        """Return what a hook gives.

        Args:
            hook: the hook.
            gradient: its argument.
            written: notes what is written into; None: nobody looks.

        Raises:
            ExportError: it fails, reads `.grad`, or writes into other tensors than the gradient.
        """
        places = _InTheirPlaces(functools.partial(self._current, hook), hook, gradient)
        try:
            with places:
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
        for tensor, version in places.read:
            if written is not None and (private.version(tensor) != version or tensor in written):
                name = next((name for name in self._names.values() if self._now(name) is tensor), None)
                what = repr(name) if name is not None else f"a tensor of shape {tuple(tensor.shape)}"
                raise refusal(
                    f"{hook} writes into {what}; expected a function of the gradient, which changes nothing else"
                )
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
    """Puts other tensors into the places of some arguments of a hook's functions, and refuses to read `.grad`."""

    def __init__(self, current: Callable[[Any], Any], hook: Hook, gradient: Tensor) -> None:
        super().__init__()
        self._current, self._hook = current, hook
        self._own = {id(gradient): gradient}
        self._read: dict[int, tuple[Tensor, int]] = {}

    @property
    def read(self) -> list[tuple[Tensor, int]]:
        """What it has been called with, but for the gradient and what was made of that; and the versions of these."""
        return list(self._read.values())

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _OF_GRAD:
            raise refusal(
                f"{self._hook} reads or sets .grad, which a backward pass fills in no order that the code decides; "
                "expected a function of the gradient that it is given"
            )
        args, kwargs = private.map_tensors(self._current, (args, kwargs or {}))
        for one in private.tensors_in((args, kwargs)):
            has_version = isinstance(one, Tensor) and not private.is_traced(one) and not one.is_inference()
            if has_version and id(one) not in self._own:
                self._read.setdefault(id(one), (one, private.version(one)))
        result = func(*args, **kwargs)
        made = (one for one in private.tensors_in(result) if isinstance(one, Tensor) and id(one) not in self._read)
        self._own |= {id(one): one for one in made}
        return result


class Running:
    """Watches the hooks of one run of a step in PyTorch.

    Args:
        calls: calls them.
        share: by how much the gradients of the loss are divided before they are added up in `.grad`.
        spoils: whether hooks get copies, and the gradients themselves are NaN from then on if a hook writes into them.

    Attributes:
        writing: those that have written into the gradient that they were given.
        changing: of which kinds those are that have changed a gradient.
        in_backward: whether the loss is known, and its backward pass may begin.
    """

    def __init__(self, calls: Calls, share: int, spoils: bool) -> None:
        self.writing: list[Hook] = []
        self.changing: set[Kind] = set()
        self.in_backward = False
        self._calls, self._share, self._spoils = calls, share, spoils
        self._called: dict[int, int] = {}

    def register(self, hooks: Mapping[str, Sequence[Hook]], leaves: Mapping[str, Tensor]) -> None:
        """Register the hooks of parameters."""
        for name, own in hooks.items():
            for hook in own:
                leaves[name].register_hook(functools.partial(self.called, hook))  # type: ignore[no-untyped-call]

    def called(self, hook: Hook, gradient: Tensor, *, observes: bool = False) -> Tensor | None:
        """Call a hook with the gradient that it gets in PyTorch, and return the gradient of the whole loss.

        Args:
            hook: the hook.
            gradient: that of the whole loss.
            observes: whether it may only look at it.
        """
        whole = self._share == 1
        given = gradient.clone() if self._spoils else gradient if whole else gradient / self._share
        version, drawn, written = private.version(given), torch.get_rng_state(), WrittenData()
        with written:
            result = self._calls.call(hook, given, written)
        changed = private.version(given) != version or given in written
        if result is None and not changed:
            if observes:
                return None
            raise refusal(
                f"{hook} returns None and only looks at it, which an exported step does not do; expected none: take it "
                "away by remove() of its handle, and look at session.gradients of a step that has no optimizer"
            )
        if not torch.equal(drawn, torch.get_rng_state()):
            raise refusal(f"{hook} draws random numbers, which no seed of the step determines; expected none")
        if not self.in_backward:
            raise refusal(
                f"{hook} is called within the step, which takes a derivative there itself; expected hooks that PyTorch "
                "calls for the gradient of the loss alone"
            )
        self._called[id(hook)] = self._called.get(id(hook), 0) + 1
        if self._called[id(hook)] > 1:
            raise refusal(
                f"{hook} is called several times in one backward pass, as a torch.autograd.Function has one of its own "
                "within; expected hooks that PyTorch calls once, with the whole gradient"
            )
        self.writing += [hook] if changed else []
        self.changing.add(hook.kind)
        if self._spoils and changed and gradient.layout == torch.strided:
            gradient.fill_(torch.nan)
        result = given if result is None else result
        return result if whole or self._spoils else result * self._share


_REGISTER_HOOK: Any = Tensor.register_hook
_GRAD_FN: Any = Tensor.grad_fn


class InForward(TorchFunctionMode):
    """Watches hooks that the step's code registers with what it computes, in a run in PyTorch.

    Args:
        running: watches those of parameters.
        probed: those that `probe` takes the place of.
    """

    def __init__(self, running: Running, probed: Collection[Kind]) -> None:
        super().__init__()
        self._running, self._probed = running, probed
        self._registered: list[Kind] = []
        self._probes = 0

    @property
    def registered(self) -> tuple[Kind, ...]:
        """Those that change gradients, in the order in which they were registered."""
        return tuple(one for one in self._registered if one in self._running.changing)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _GRAD_FN.__get__ and {"register_hook", "register_prehook"} & {*explaining.names_here()}:
            raise refusal(
                f"the step registers a hook with grad_fn, in {explaining.current_place()}; expected register_hook of "
                "the tensor itself"
            )
        if func is not _REGISTER_HOOK or len(args) != 2:
            return func(*args, **(kwargs or {}))
        tensor, function = args
        hook, is_leaf = Hook.registered_here(function), tensor.is_leaf
        self._registered.append(hook.kind)
        if hook.kind in self._probed:
            factor = probe(self._probes)
            self._probes += 1
            return func(tensor, lambda gradient: gradient * factor)

        def called(gradient: Tensor) -> Tensor | None:
            changed = self._running.called(hook, gradient, observes=True)
            if changed is not None and is_leaf:
                raise refusal(
                    f"{hook} changes the gradient of a parameter or another tensor that the step does not compute, "
                    "once more in each call; expected it registered once with a parameter, outside of forward"
                )
            return changed

        return func(tensor, called)


def probe(number: int) -> float:
    """Return the number by which a hook multiplies gradients where it is seen whether it is in its place."""
    return _PROBES[number % len(_PROBES)]


_PROBES = (0.5, 2.0, 0.75, 1.25, 1.5)


class Registered(TorchFunctionMode):
    """Marks what the step's code registers hooks with, while it is traced.

    Args:
        changing: the hooks to mark, in the order of their registration; others only look at gradients.
        first: the number of the first one.

    """

    def __init__(self, changing: Sequence[Kind], first: int) -> None:
        super().__init__()
        self._changing, self._first = changing, first
        self._found: list[tuple[Hook, Tensor, Mapping[int, Any]]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not _REGISTER_HOOK or len(args) != 2:
            return func(*args, **(kwargs or {}))
        tensor, function = args
        hook = Hook.registered_here(function)
        # Nobody calls it.
        held: OrderedDict[int, Any] = OrderedDict()
        handle = RemovableHandle(held)
        held[handle.id] = function
        if hook.kind in self._changing:
            with own_gradients.apart():
                marked = own_gradients.HOOKED(tensor, self._first + len(self._found))
            self._found.append((hook, marked, held))
        return handle

    def traced(self, calls: Calls, share: int) -> list[Tensor]:
        """Return what the hooks make of gradients.

        Raises:
            ExportError: other hooks were registered than in PyTorch's run.
        """
        found = [hook.kind for hook, *_ in self._found]
        for one in dict.fromkeys((*self._changing, *found)):
            times, wanted = found.count(one), self._changing.count(one)
            if times != wanted:
                raise refusal(
                    f"{one} is registered {times} times when the step is traced, and {wanted} times when PyTorch runs "
                    "it; expected as often"
                )
        return [
            _changed(marked, self._first + number, [hook], calls, share)
            for number, (hook, marked, held) in enumerate(self._found)
            # Its handle may have removed it.
            if held
        ]


def traced(
    hooks: Mapping[str, Sequence[Hook]], registered: Registered, calls: Calls, leaves: Mapping[str, Tensor], share: int
) -> tuple[Tensor, ...]:
    """Return what hooks make of gradients, while a step is traced.

    Args:
        hooks: parameter -> its hooks.
        registered: those that the step's code has registered.
        calls: calls them.
        leaves: the parameters that have a gradient.
        share: as for `Running`.
    """
    with own_gradients.apart():
        of_leaves = [
            _changed(leaf, number, hooks[name], calls, share)
            for number, (name, leaf) in enumerate(leaves.items())
            if name in hooks
        ]
        return (*of_leaves, *registered.traced(calls, share))


def _changed(tensor: Tensor, number: int, hooks: Sequence[Hook], calls: Calls, share: int) -> Tensor:
    def change(gradient: Tensor) -> Tensor:
        for hook in hooks:
            given = gradient if share == 1 else gradient / share
            result = calls.call(hook, given)
            result = given if result is None else result
            gradient = result if share == 1 else result * share
        return gradient

    return own_gradients.changed_gradient(tensor, number, change)


def put_in_place(program: ExportedProgram) -> ExportedProgram:
    """Return a decomposed program in which all that is computed of a tensor with hooks goes through what marks it.

    Of several hooks the first one gets the gradient first.
    """
    graph = program.graph
    marks = [node for node in graph.nodes if node.target is own_gradients.HOOKED]
    places = [node for node in graph.nodes if node.op == "placeholder"]
    later = set(marks)
    for mark in marks:
        later.discard(mark)
        tensor = mark.args[0]
        tensor.replace_all_uses_with(
            mark, delete_user_cb=lambda user, mark=mark: user is not mark and user not in later
        )
        (places[-1] if tensor.op == "placeholder" else tensor).append(mark)
    return private.with_graph(program, graph) if marks else program
