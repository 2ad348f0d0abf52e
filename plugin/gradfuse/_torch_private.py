"""Every private API of PyTorch that gradfuse uses; no other module uses one.

`tests/plugin/test_torch_private.py` has a test for each function, which says what the API is for and fails where a new
version of PyTorch lacks it or behaves differently. ATen operators whose names begin with an underscore are not here:
they are what traced programs consist of. This module imports torch.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import re
import sys
import traceback
import types
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from types import CodeType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.export.graph_signature import (
    ExportGraphSignature,
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
    SymIntArgument,
    TensorArgument,
)
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    import onnx_ir as ir

__all__ = ["TorchDispatchMode"]


# Modules, tensors and optimizers.


def parameter_entries(module: nn.Module) -> dict[str, Tensor | None]:
    """Return the dictionary in which a module keeps its own parameters; assigning to it replaces them."""
    return module._parameters  # type: ignore[return-value]


def buffer_entries(module: nn.Module) -> dict[str, Tensor | None]:
    """Return the dictionary in which a module keeps its own buffers; assigning to it replaces them."""
    return module._buffers


def unwrapped(owner: Any) -> Any:
    """Return the module or function that one stands for: compiled, or on several devices."""
    inside: Any = owner
    while True:
        if isinstance(inside, torch._dynamo.OptimizedModule):
            inside = inside._orig_mod
        elif isinstance(inside, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            inside = inside.module
        elif not isinstance(inside, nn.Module) and hasattr(inside, "_torchdynamo_orig_callable"):
            inside = inside._torchdynamo_orig_callable
        else:
            return inside


def version(tensor: Tensor) -> int:
    """Return a number that grows with each change of a tensor in place."""
    return tensor._version


def like_in_python(tensor: Tensor, original: Tensor) -> None:
    """Let a tensor be in Python what another one is: of its class, with its attributes, which both then share.

    A tensor of a trace is a parameter if the other one is, and has copies of the attributes.
    """
    if type(tensor) in (Tensor, type(original)):
        tensor.__dict__ = original.__dict__
        if type(tensor) is not type(original):
            tensor.__class__ = type(original)
        return
    held = vars(tensor)
    for name, value in vars(original).items():
        held.setdefault(name, value)
    if isinstance(original, torch.nn.Parameter):
        # What `isinstance` asks for.
        tensor._is_param = True


def gradient_hooks(tensor: Tensor) -> list[Callable[[Tensor], Any]]:
    """Return what `register_hook` has registered with a tensor, in the order in which PyTorch calls it."""
    return list((tensor._backward_hooks or {}).values())


def post_accumulate_hooks(parameter: Tensor) -> list[Callable[[Tensor], Any]]:
    """Return what `register_post_accumulate_grad_hook` has registered with a parameter."""
    hooks: Any = parameter._post_accumulate_grad_hooks
    return list((hooks or {}).values())


def backward_hooks(module: nn.Module) -> list[Callable[..., Any]]:
    """Return the hooks on the backward pass of a module."""
    return [*module._backward_pre_hooks.values(), *module._backward_hooks.values()]


def backward_hooks_of_all() -> list[Callable[..., Any]]:
    """Return the hooks on the backward passes of all modules, as of `register_module_full_backward_hook`."""
    every = nn.modules.module
    return [*every._global_backward_pre_hooks.values(), *every._global_backward_hooks.values()]


@contextlib.contextmanager
def idle_conversions() -> Iterator[None]:
    """Let `module.to(dtype)` and similar calls do nothing where all tensors have that type and device already.

    Modules that take care of the type of a part in `forward` could not be traced: their parameters are then no
    parameters, which cannot be swapped.
    """
    original = nn.Module._apply

    def apply(self: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        tensors = [*self.parameters(recurse), *self.buffers(recurse)]
        changed = [(tensor, fn(tensor)) for tensor in tensors]
        if all((a.dtype, a.device, a.shape) == (b.dtype, b.device, b.shape) for a, b in changed):
            return self
        result: nn.Module = original(self, fn, recurse)  # type: ignore[no-untyped-call]
        return result

    nn.Module._apply = apply  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module._apply = original  # type: ignore[method-assign]


def batch_norm_class() -> Any:
    """Return the class that all of PyTorch's batch normalisations are of."""
    return nn.modules.batchnorm._BatchNorm


def adaptive_softmax_output(output: Tensor, loss: Tensor) -> Any:
    """Return what the forward pass of `nn.AdaptiveLogSoftmaxWithLoss` does."""
    return nn.modules.adaptive._ASMoutput(output, loss)


def has_step_of_its_own(optimizer: torch.optim.Optimizer) -> bool:
    """Tell whether the object has another step than its class; a scheduler of learning rates puts a wrapper there."""
    step = vars(optimizer).get("step")
    if getattr(step, "_wrapped_by_lr_sched", False):
        step = getattr(step, "__wrapped__", step)
    return step is not None and step is not type(optimizer).step


def step_hooks(optimizer: torch.optim.Optimizer) -> list[Callable[..., Any]]:
    """Return what runs before or after each step of an optimizer, for it alone or for all."""
    from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

    # A class that wraps another optimizer may leave out Optimizer.__init__, which makes these.
    own = vars(optimizer)
    before = (_global_optimizer_pre_hooks, own.get("_optimizer_step_pre_hooks", {}))
    after = (own.get("_optimizer_step_post_hooks", {}), _global_optimizer_post_hooks)
    return [hook for hooks in (*before, *after) for hook in hooks.values()]


@contextlib.contextmanager
def modes_asked_for(ask: Callable[[nn.Module | None], None]) -> Iterator[None]:
    """Call a function whenever code asks for the mode of a module, or, with None, for that of autograd."""

    def training(module: nn.Module) -> bool:
        ask(module)
        return bool(vars(module)["training"])

    def set_training(module: nn.Module, value: bool) -> None:
        vars(module)["training"] = value

    def is_grad_enabled() -> bool:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if not caller.startswith("torch.") or caller.startswith(("torch.nn.", "torch.utils.checkpoint")):
            ask(None)
        return original()

    original = torch.is_grad_enabled
    # A property goes ahead of the attributes of modules.
    nn.Module.training = property(training, set_training)  # type: ignore[assignment]
    torch.is_grad_enabled = is_grad_enabled
    try:
        with _AutogradAsked(ask):
            yield
    finally:
        del nn.Module.training
        torch.is_grad_enabled = original


class _AutogradAsked(TorchFunctionMode):
    """Calls a function with None whenever code asks a tensor what autograd knows of it."""

    def __init__(self, ask: Callable[[nn.Module | None], None]) -> None:
        super().__init__()
        self._ask = ask

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _ABOUT_AUTOGRAD:
            self._ask(None)
        return func(*args, **(kwargs or {}))


_ABOUT_AUTOGRAD = tuple(getattr(Tensor, name).__get__ for name in ("requires_grad", "is_leaf", "grad_fn", "grad"))


def graph_leaves(value: Tensor) -> Iterator[Tensor]:
    """Yield the leaf tensors that autograd would add the gradients of `value` to."""
    for node in autograd_nodes(value):
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            yield leaf


def autograd_nodes(value: Tensor) -> Iterator[Any]:
    """Yield the nodes of autograd's graph that a tensor depends on."""
    pending, seen = [value.grad_fn], set()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        pending.extend(function for function, _ in node.next_functions)


def own_functions(value: Tensor) -> list[str]:
    """Return the names of the `torch.autograd.Function`s of others than torch that a loss depends on."""
    found: dict[str, None] = {}
    for node in autograd_nodes(value):
        function = getattr(type(node), "_forward_cls", None)
        if function is not None and not function.__module__.startswith("torch."):
            found[function.__qualname__] = None
    return list(found)


SET_GRAD_ENABLED = torch._C._set_grad_enabled
"""What `torch.no_grad` and similar contexts call."""


def set_grad_enabled_unseen(enabled: bool) -> None:
    """Turn gradients on or off without a trace in what is traced."""
    with torch._C.DisableTorchFunction():
        torch._C._set_grad_enabled(enabled)


@contextlib.contextmanager
def without_autocast() -> Iterator[None]:
    """Turn autocast off without a trace in what is traced, as backward passes run."""
    before = torch.is_autocast_enabled("cpu")
    torch.set_autocast_enabled("cpu", False)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cpu", before)


def innermost(tensor: Tensor) -> Tensor:
    """Return the tensor that one stands for below all functions of torch.func."""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return tensor


@contextlib.contextmanager
def gradients_off_unseen() -> Iterator[None]:
    """Turn gradients off without a trace in what is traced."""
    before = torch.is_grad_enabled()
    set_grad_enabled_unseen(False)
    try:
        yield
    finally:
        set_grad_enabled_unseen(before)


@contextlib.contextmanager
def derivatives_noted() -> Iterator[list[None]]:
    """Note each time that code takes a derivative, backward or forward, in the list that is given."""
    from torch._functorch import eager_transforms

    noted: list[None] = []
    engine: Any = torch.autograd
    backward, forward = engine._engine_run_backward, eager_transforms._jvp_with_argnums

    def note(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            noted.append(None)
            return original(*args, **kwargs)

        return call

    engine._engine_run_backward = note(backward)
    eager_transforms._jvp_with_argnums = note(forward)
    try:
        yield noted
    finally:
        engine._engine_run_backward, eager_transforms._jvp_with_argnums = backward, forward


_MOST_DERIVATIVES = 2
"""In one another within `vmap`, where one is in forward mode."""


@contextlib.contextmanager
def derivatives_limited(refuse: Callable[[], Exception]) -> Iterator[None]:
    """Raise what is given where derivatives of torch.func nest so deep within `vmap` that PyTorch's backward crashes.

    Of three in one another with one in forward mode the process ends, once a dispatch mode looks on.
    """
    from torch._functorch import eager_transforms

    functorch, kinds = torch._C._functorch, torch._C._functorch.TransformType
    names = ("_grad_increment_nesting", "_jvp_increment_nesting")
    originals = {name: getattr(eager_transforms, name) for name in names}

    def limited(name: str) -> Callable[[], Any]:
        def call() -> Any:
            own = kinds.Jvp if name == names[1] else kinds.Grad
            around = [one.key() for one in functorch.get_interpreter_stack() or ()]
            taken = [own, *(one for one in around if one in (kinds.Grad, kinds.Jvp))]
            level = originals[name]()
            # jacfwd has a vmap of its own. Behind the call, as PyTorch leaves the level whatever happens.
            batched = around.count(kinds.Vmap) > taken.count(kinds.Jvp) > 0
            if batched and len(taken) > _MOST_DERIVATIVES:
                raise refuse()
            return level

        return call

    for name in names:
        setattr(eager_transforms, name, limited(name))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(eager_transforms, name, original)


@contextlib.contextmanager
def forward_mode_by_reverse() -> Iterator[None]:
    """Let `torch.func.jvp`, `jacfwd` and `hessian` differentiate backward passes: J v is the derivative of J^T u by u.

    Forward mode itself cannot be traced for sizes that vary.
    """
    from torch._functorch import eager_transforms

    original = eager_transforms._jvp_with_argnums

    def jvp(
        func: Callable[..., Any], primals: Any, tangents: Any, argnums: Any, *, strict: bool = False, has_aux: bool
    ) -> Any:
        places = range(len(primals)) if argnums is None else (argnums,) if isinstance(argnums, int) else argnums
        places = [place % len(primals) for place in places]
        given = tangents if isinstance(tangents, tuple) else (tangents,)

        def of(*chosen: Any) -> Any:
            args = list(primals)
            for place, one in zip(places, chosen, strict=True):
                args[place] = one
            return func(*args)

        taken: Any = torch.func.vjp(of, *(primals[place] for place in places), has_aux=has_aux)
        value, pull, *aux = taken
        pulled: Any = torch.func.vjp(pull, _pytree.tree_map(torch.zeros_like, value))
        (tangent,) = pulled[1](given)
        return (value, tangent, *aux)

    eager_transforms._jvp_with_argnums = jvp
    try:
        yield
    finally:
        eager_transforms._jvp_with_argnums = original


@contextlib.contextmanager
def gradients_batched_by_vmap() -> Iterator[None]:
    """Let `torch.autograd.grad(is_grads_batched=True)` run under `torch.func.vmap`: its own cannot be traced."""
    from torch import _vmap_internals

    original = _vmap_internals._vmap

    def batch(func: Callable[..., Any], *_: Any, **__: Any) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            found: list[int] = []

            def without_none(*rows: Any) -> Any:
                results = func(*rows)
                found[:] = [len(results), *(place for place, one in enumerate(results) if one is not None)]
                return tuple(one for one in results if one is not None)

            results = torch.func.vmap(without_none)(*args)
            count, *places = found
            known = dict(zip(places, results, strict=True))
            return tuple(known.get(place) for place in range(count))

        return call

    _vmap_internals._vmap = batch
    try:
        yield
    finally:
        _vmap_internals._vmap = original


@contextlib.contextmanager
def batched_by(rules: Mapping[Any, Callable[..., Any]]) -> Iterator[None]:
    """Let `vmap` batch operators by other rules than PyTorch's own.

    Args:
        rules: operator or overload, such as `torch.ops.aten.cat` -> its rule, as for `torch.library.register_vmap`.
    """
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    try:
        with warnings.catch_warnings():
            # Of a kernel that takes the place of another one.
            warnings.simplefilter("ignore")
            for operator, rule in rules.items():
                torch.library.register_vmap(str(operator).replace(".", "::", 1), rule, lib=library)
        yield
    finally:
        library._destroy()


def below_autograd(
    function: Callable[..., tuple[Tensor, ...]], tensors: Sequence[Tensor], differentiable: Sequence[bool]
) -> torch.fx.GraphModule:
    """Return a function of tensors that are traced in operators below autograd, with what it differentiates.

    Args:
        function: the function.
        tensors: those that it is called with, of a trace that notes nothing of the call.
        differentiable: which of them are leaves that require gradients.
    """
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.utils._python_dispatch import _disable_current_modes

    fake = next(one.fake_mode for one in tensors if isinstance(one, FakeTensor))
    with _disable_current_modes(), fake, pre_dispatch_hidden():
        leaves = [one.detach().requires_grad_(requires) for one, requires in zip(tensors, differentiable, strict=True)]
        return make_fx(function)(*leaves)


@contextlib.contextmanager
def pre_dispatch_hidden() -> Iterator[None]:
    """Take the mode of torch.export that notes calls of functions away, and leave the others."""
    from torch.fx.experimental.proxy_tensor import PreDispatchTorchFunctionMode

    overrides: Any = torch.overrides
    before = list(overrides._get_current_function_mode_stack())

    def become(modes: Sequence[Any]) -> None:
        for _ in range(len(overrides._get_current_function_mode_stack())):
            overrides._pop_mode()
        for mode in modes:
            overrides._push_mode(mode)

    become([mode for mode in before if not isinstance(mode, PreDispatchTorchFunctionMode)])
    try:
        yield
    finally:
        become(before)


def has_setup_context(function: Any) -> bool:
    """Tell whether the forward pass of a `torch.autograd.Function` gets no context."""
    return function.setup_context is not torch.autograd.function._SingleLevelFunction.setup_context


def has_backward(function: Any) -> bool:
    """Tell whether the backward pass of a `torch.autograd.Function` is called so, not `vjp`."""
    return function.backward is not torch.autograd.function._SingleLevelFunction.backward


@contextlib.contextmanager
def functions_applied_by(
    apply: Callable[[Any, tuple[Any, ...], Mapping[str, Any]], Any], untouched: Collection[type] = ()
) -> Iterator[None]:
    """Let `apply` of every `torch.autograd.Function` be another function, of the class, its arguments and named ones.

    Those that are `untouched` keep theirs. Code may hold the method of a class from before: up to PyTorch 2.13 it is
    found again by its code; later ones are found among the globals of modules alone.
    """
    owner: Any = torch.autograd.Function
    original = vars(owner)["apply"]
    has_code = hasattr(original, "__func__")
    code: Any = original.__func__.__code__ if has_code else None

    def as_is(function: Any, *args: Any, **kwargs: Any) -> Any:
        if not has_code:
            return original.__get__(None, function)(*args, **kwargs)
        own = original.__func__
        return types.FunctionType(code, own.__globals__, closure=own.__closure__)(function, *args, **kwargs)

    def applied(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        return as_is(function, *args, **kwargs) if function in untouched else apply(function, args, kwargs)

    def held_globally() -> Iterator[tuple[dict[str, Any], str, Any]]:
        for names in [vars(module) for module in list(sys.modules.values()) if isinstance(module, types.ModuleType)]:
            for name, value in list(names.items()):
                if type(value) is types.BuiltinMethodType and value.__name__ == "apply":
                    if isinstance(value.__self__, type) and issubclass(value.__self__, owner):
                        yield names, name, value

    held = [] if has_code else list(held_globally())
    _APPLYING.append(applied)
    if has_code:
        original.__func__.__code__ = _Applied.apply.__code__
    else:
        of_class: Any = _Applied.apply
        owner.apply = classmethod(of_class)
    for names, name, method in held:
        names[name] = method.__self__.apply
    try:
        yield
    finally:
        if has_code:
            original.__func__.__code__ = code
        else:
            owner.apply = original
        for names, name, method in held:
            names[name] = method
        _APPLYING.pop()


_APPLYING: list[Callable[[Any, tuple[Any, ...], Mapping[str, Any]], Any]] = []


class _Applied:
    def apply(cls, *args: Any, **kwargs: Any) -> Any:
        # Like the code that it takes the place of, it knows its class, and no other variables from around it.
        __class__  # type: ignore[name-defined]  # noqa: B018
        from gradfuse._torch_private import _APPLYING

        return _APPLYING[-1](cls, args, kwargs)


@contextlib.contextmanager
def checkpoints_replaced(around: Callable[[Any], contextlib.AbstractContextManager[None]]) -> Iterator[None]:
    """Let `torch.utils.checkpoint` call functions as if there were none, in a context that is made of the arguments."""
    from torch.utils import checkpoint

    module: Any = checkpoint
    # PyTorch 2.14 gives this one the arguments as a tuple and a dictionary.
    name = "_checkpoint_without_reentrant_generator"
    name = f"{name}_impl" if hasattr(module, f"{name}_impl") else name
    originals = module.CheckpointFunction, getattr(module, name)

    class Called:
        @staticmethod
        def apply(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
            # Without an argument that needs one, there is no gradient of anything within, and PyTorch warns of it.
            module.check_backward_validity(args)
            has_gradients = any(isinstance(one, torch.Tensor) and one.requires_grad for one in args)
            with around(args), contextlib.nullcontext() if has_gradients else torch.no_grad():
                return function(*args)

    def generator(function: Any, preserve_rng_state: Any, context_fn: Any = None, *args: Any, **kwargs: Any) -> Any:
        with context_fn()[0] if context_fn is not None else contextlib.nullcontext(), around((args, kwargs)):
            yield

    def generator_of_parts(function: Any, args: Any, kwargs: Any, *, context_fn: Any = None, **options: Any) -> Any:
        return generator(function, None, context_fn, *args, **kwargs)

    module.CheckpointFunction = Called
    setattr(module, name, generator_of_parts if name.endswith("_impl") else generator)
    try:
        yield
    finally:
        module.CheckpointFunction = originals[0]
        setattr(module, name, originals[1])


# Operators and trees of tensors.


def forward_mode_is_on() -> bool:
    """Tell whether forward-mode derivatives are being taken."""
    return torch.autograd.forward_ad._current_level >= 0


def is_operator(target: Any) -> bool:
    """Tell whether what a node of a traced program calls is an overload of an operator."""
    return isinstance(target, torch._ops.OpOverload)


def operator_name(overload: Any) -> str:
    """Return the qualified name of an operator without its overload, such as "aten::add"."""
    return str(overload._schema.name)


def is_mutable(overload: Any) -> bool:
    """Tell whether an operator writes into one of its arguments."""
    return bool(overload._schema.is_mutable)


def has_result(node: torch.fx.Node) -> bool:
    """Tell whether a node of a traced program calls an operator that returns something."""
    target: Any = node.target
    return node.op == "call_function" and is_operator(target) and bool(target._schema.returns)


def schema_arguments(schema: str) -> list[Any]:
    """Parse the schema of an operator, and return its arguments, each with `name`, `type` and `default_value`."""
    return list(torch._C.parse_schema(schema).arguments)


def tensors_in(tree: Any) -> list[Any]:
    """Return the leaves of nested tuples, lists, dictionaries and data classes in the order that PyTorch flattens them.

    PyTorch flattens the dictionaries and data classes that it was told of alone.
    """

    def has_parts(leaf: Any) -> bool:
        return isinstance(leaf, Mapping) or (dataclasses.is_dataclass(leaf) and not isinstance(leaf, type))

    def parts(leaf: Any) -> list[Any]:
        if isinstance(leaf, Mapping):
            return list(leaf.values())
        return [getattr(leaf, field.name, None) for field in dataclasses.fields(leaf)]

    leaves = _pytree.tree_leaves(tree)
    if not any(map(has_parts, leaves)):
        return leaves
    return [part for leaf in leaves for part in (tensors_in(parts(leaf)) if has_parts(leaf) else (leaf,))]


class Index(int):
    """Where something is in a tuple or a list; keys of dictionaries may be numbers too."""


def flattened_with_keys(tree: Any) -> tuple[list[tuple[tuple[Any, ...], Any]], Callable[[list[Any]], Any]]:
    """Return the leaves of nested tuples, lists, dictionaries and more, with their keys, and what puts others there."""
    leaves, specification = _pytree.tree_flatten_with_path(tree)

    def key(one: Any) -> Any:
        if isinstance(one, _pytree.SequenceKey):
            return Index(one.idx)
        return one.key if isinstance(one, _pytree.MappingKey) else getattr(one, "name", str(one))

    places = [(tuple(map(key, path)), leaf) for path, leaf in leaves]
    return places, lambda values: _pytree.tree_unflatten(values, specification)


def flattened(tree: Any) -> tuple[list[Any], Callable[[Sequence[Any]], Any]]:
    """Return the leaves of nested tuples, lists and dictionaries, and what puts others there."""
    leaves, specification = _pytree.tree_flatten(tree)
    return leaves, lambda values: _pytree.tree_unflatten(list(values), specification)


def map_tensors(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """Return nested tuples, lists and dictionaries with a function applied to their tensors."""
    return _pytree.tree_map_only(Tensor, function, tree)


# Traced programs.


def exported(module: nn.Module, arguments: tuple[Any, ...], dims: Any) -> torch.export.ExportedProgram:
    """Trace a module.

    Functions of torch that insist on Python's booleans take no condition on symbolic sizes, such as `is_causal=n > 1`:
    where the module calls one, it is traced with such conditions taken as they are for these arguments.
    """
    try:
        return torch.export.export(module, arguments, dynamic_shapes=dims)
    except Exception as error:
        # torch.export has no common base class for what it refuses.
        if "must be bool, not SymBool" not in str(error):
            raise
    with decided_comparisons():
        return torch.export.export(module, arguments, dynamic_shapes=dims)


@contextlib.contextmanager
def decided_comparisons() -> Iterator[None]:
    """Let comparisons of symbolic sizes that are no code of torch give Python's booleans."""
    names = ("__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__")
    originals = {name: vars(torch.SymInt)[name] for name in names}

    def decided(original: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        def compare(self: Any, other: Any) -> Any:
            result = original(self, other)
            caller = sys._getframe(1).f_globals.get("__name__", "").partition(".")[0]
            known = isinstance(result, torch.SymBool) and result.node.has_hint()
            return bool(result) if known and caller not in ("torch", "sympy") else result

        return compare

    for name, original in originals.items():
        setattr(torch.SymInt, name, decided(original))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(torch.SymInt, name, original)


@contextlib.contextmanager
def translations_read_once() -> Iterator[None]:
    """Let torch.onnx.export read the sources of its translations once in a process, not in each call."""
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    original = vars(ONNXRegistry)["from_torchlib"]

    def from_torchlib(**options: int) -> ONNXRegistry:
        key = tuple(options.items())
        if key not in _REGISTRIES:
            with sources_unread():
                _REGISTRIES[key] = original.__get__(None, ONNXRegistry)(**options)
        # The export adds the translations of its caller.
        registry: ONNXRegistry = copy.copy(_REGISTRIES[key])
        registry.functions = {operator: [*found] for operator, found in registry.functions.items()}
        return registry

    ONNXRegistry.from_torchlib = staticmethod(from_torchlib)  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        ONNXRegistry.from_torchlib = original  # type: ignore[method-assign]


@contextlib.contextmanager
def operators_collected_once() -> Iterator[None]:
    """Let PyTorch look up all composite operators once, not for each namespace in each decomposition.

    That takes a third of the time of a small export. Operators that are registered meanwhile are decomposed.
    """
    from torch._export import utils

    original = getattr(utils, "_materialize_cpp_cia_ops", None)
    if original is None:
        yield
        return
    utils._materialize_cpp_cia_ops = functools.cache(original)
    try:
        yield
    finally:
        utils._materialize_cpp_cia_ops = original


@contextlib.contextmanager
def sources_unread() -> Iterator[None]:
    """Let a registry be made without parsing the source of each translation, of which its domain alone is asked."""
    try:
        from onnxscript.values import TracedOnnxFunction

        traced: Any = TracedOnnxFunction
        original = vars(traced)["function_ir"]
    except (ImportError, KeyError):
        yield
        return

    def signature(self: Any) -> Any:
        return types.SimpleNamespace(domain=self.domain)

    traced.function_ir = property(signature)
    try:
        yield
    finally:
        traced.function_ir = original


def decompositions_of_export(opset: int, translated: Collection[Any]) -> dict[Any, Callable[..., Any]]:
    """Return what torch.onnx.export decomposes, by overload, beside overloads with translations of one's own."""
    from torch.onnx._internal.exporter import _decomp
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    with translations_read_once():
        registry = ONNXRegistry.from_torchlib(opset_version=opset)
    known = {*_decomp.get_onnx_implemented_overloads(registry), *translated}
    return _decomp.create_onnx_friendly_decomposition_table(known)


def operators_without_translation(
    program: torch.export.ExportedProgram, opset: int, translated: Collection[Any]
) -> list[str]:
    """Return the overloads in a program that torch.onnx.export neither translates nor decomposes, by name."""
    from torch.onnx._internal.exporter import _decomp
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    with translations_read_once():
        registry = ONNXRegistry.from_torchlib(opset_version=opset)
    known = {*_decomp.get_onnx_implemented_overloads(registry), *translated}
    known.update(_decomp.create_onnx_friendly_decomposition_table(known))
    modules = [module for module in program.graph_module.modules() if isinstance(module, torch.fx.GraphModule)]
    found = [node.target for module in modules for node in module.graph.nodes if is_operator(node.target)]
    return [str(target) for target in dict.fromkeys(found) if target not in known]


@contextlib.contextmanager
def decomposed_once() -> Iterator[None]:
    """Let torch.onnx.export decompose programs only where they hold something that it decomposes."""
    from torch.onnx._internal.exporter import _decomp, _fx_passes

    original = _fx_passes.decompose_with_registry

    def decompose_with_registry(program: Any, registry: Any) -> Any:
        table = _decomp.create_onnx_friendly_decomposition_table(set(_decomp.get_onnx_implemented_overloads(registry)))
        graphs = [module.graph for module in program.graph_module.modules() if hasattr(module, "graph")]
        if any(node.target in table for graph in graphs for node in graph.nodes):
            return original(program, registry)
        return program

    _fx_passes.decompose_with_registry = decompose_with_registry  # type: ignore[assignment]
    try:
        yield
    finally:
        _fx_passes.decompose_with_registry = original


@contextlib.contextmanager
def promoted_by_known_types() -> Iterator[None]:
    """Let torch.onnx.export find by the types of a traced program where it promotes some, without tracing it again."""
    try:
        from torch.onnx._internal.fx.passes import type_promotion

        interpreter: Any = type_promotion._TypePromotionInterpreter
        original, rule_of = interpreter.run_node, type_promotion.get_type_promotion_rule
    except (ImportError, AttributeError):
        yield
        return

    def run_node(self: Any, n: torch.fx.Node) -> Any:
        if n.op != "call_function" or n.meta.get("val") is None:
            return original(self, n)
        rule = rule_of(n, self.type_promotion_table)
        if rule is not None:
            with self._set_current_node(n):
                self._maybe_promote_node(n, rule)
        return n.meta["val"]

    interpreter.run_node = run_node
    try:
        yield
    finally:
        interpreter.run_node = original


NUMBER = "gradfuse.number"
"""Where constants of float32 have the number of Python that they stand for, in the metadata of their values."""


@contextlib.contextmanager
def numbers_remembered() -> Iterator[None]:
    """Let constants that torch.onnx.export makes of numbers remember them: what it casts to float64 was rounded."""
    try:
        from torch.onnx._internal.exporter import _building as building

        original = building._get_or_create_constant
    except (ImportError, AttributeError):
        yield
        return

    def constant(constant_farm: Any, arg: Any, dtype: Any, opset: Any) -> Any:
        value = original(constant_farm, arg, dtype, opset)
        if isinstance(arg, float) and dtype is not None and dtype.name == "FLOAT":
            value.meta[NUMBER] = arg
        return value

    building._get_or_create_constant = constant
    try:
        yield
    finally:
        building._get_or_create_constant = original


_REGISTRIES: dict[tuple[tuple[str, int], ...], Any] = {}


def known_decompositions(overloads: Iterable[Any]) -> Mapping[Any, Callable[..., Any]]:
    """Return PyTorch's own decompositions of operators."""
    from torch._decomp import get_decompositions

    return get_decompositions(list(overloads))


def decisions_of_kernels() -> Collection[CodeType]:
    """Return the functions that look at values only to choose a kernel: False is always right."""
    from torch.nn.modules import transformer

    return (transformer._detect_is_causal_mask.__code__,)


def checks_of_distributions() -> Collection[CodeType]:
    """Return the functions that look at values only to tell whether arguments of a distribution are right."""
    from torch.distributions import constraints

    found = (value for value in vars(constraints).values() if isinstance(value, type))
    return frozenset(kind.check.__code__ for kind in found if hasattr(kind, "check"))


def known_true(condition: Any) -> bool:
    """Tell whether a condition on sizes is known to be true, without restricting symbols to what makes it so."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return bool(statically_known_true(condition))


def remember_item(tensor: Tensor, number: Any) -> None:
    """Let the number that comes out of a tensor of a traced program, of shape (), be this one."""
    if isinstance(tensor, FakeTensor):
        tensor.item_memo = number


def assume(condition: Any) -> None:
    """Let what is traced take a condition on symbolic sizes to be true."""
    torch._check(condition)  # type: ignore[no-untyped-call]


def expression(size: Any) -> Any:
    """Return what a size is by the symbols of a traced program, which can be compared; a number is itself."""
    return size.node.expr if isinstance(size, (torch.SymInt, torch.SymFloat, torch.SymBool)) else size


def follows_from_values(size: Any) -> bool:
    """Tell whether a size or number depends on the numbers in tensors, as the count of what a mask selects does."""
    if not isinstance(size, (torch.SymInt, torch.SymFloat)):
        return False
    from torch.utils._sympy.symbol import SymT, symbol_is_type

    kinds = (SymT.UNBACKED_INT, SymT.UNBACKED_FLOAT)
    return any(symbol_is_type(symbol, kinds) for symbol in size.node.expr.free_symbols)


def may_be_zero(size: Any) -> bool:
    """Tell whether tracing has assumed nothing of a size that would not hold if what is found were nothing."""
    if not isinstance(size, torch.SymInt):
        return True
    environment = size.node.shape_env
    found = [symbol for symbol in size.node.expr.free_symbols if environment.is_unbacked_symint(symbol)]
    for symbol in found:
        asserted = [one.expr for one in environment.deferred_runtime_asserts.get(symbol, ())]
        holds = [
            one.xreplace(dict.fromkeys(filter(environment.is_unbacked_symint, one.free_symbols), 0)) for one in asserted
        ]
        # A condition may be neither true nor false.
        if environment.var_to_range[symbol].lower > 0 or not all(one == True for one in holds):  # noqa: E712
            return False
    return True


def storage(tensor: Tensor) -> int:
    """Return what tensors that share memory have in common, those of traced programs and of vmap too."""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return int(tensor.untyped_storage()._cdata)


def is_symbolic(value: Any) -> bool:
    """Whether a number, or one of a slice, is one of a traced program that is not known."""
    if isinstance(value, slice):
        return any(map(is_symbolic, (value.start, value.stop, value.step)))
    return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))


@contextlib.contextmanager
def untraced() -> Iterator[None]:
    """Let functions of torch run on tensors as they do outside of what is traced."""
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield


def is_traced(value: Any) -> bool:
    """Whether a value is a tensor of a traced program, whose numbers are not known."""
    if not isinstance(value, Tensor):
        return False
    return type(value) not in (Tensor, nn.Parameter) or is_wrapped(value) or torch._is_functional_tensor(value)


def is_lazy(tensor: Any) -> bool:
    """Whether a parameter or a buffer of a lazy module has no shape yet."""
    return bool(torch.nn.parameter.is_lazy(tensor))


def is_made_of_others(tensor: Tensor) -> bool:
    """Whether a tensor holds no numbers itself but other tensors, as those of quantised weights and several devices."""
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    return bool(is_traceable_wrapper_subclass(tensor))


def is_wrapped(tensor: Tensor) -> bool:
    """Whether a tensor stands for others within a function of torch.func, such as `vmap`."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def written_arguments(overload: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the arguments of a call that an operator writes into, by its schema."""
    arguments = overload._schema.arguments
    given = {one.name: value for one, value in zip(arguments, args, strict=False)} | dict(kwargs)
    writes = [one.name for one in arguments if one.alias_info is not None and one.alias_info.is_write]
    return [given[name] for name in writes if given.get(name) is not None]


def with_fewer_outputs(program: torch.export.ExportedProgram, count: int) -> torch.export.ExportedProgram:
    """Return a traced program without its last outputs, of which all are tensors in one tuple."""
    graph = copy.deepcopy(program.graph)
    output = graph.output_node()
    output.args = (output.args[0][: len(output.args[0]) - count],)
    kept = len(output.args[0])
    signature = copy.deepcopy(program.graph_signature)
    del signature.output_specs[kept:]
    (entry, *_) = program.module_call_graph
    assert entry.signature is not None
    call = dataclasses.replace(entry.signature, out_spec=_pytree.tree_structure((0,) * kept))
    return torch.export.ExportedProgram(
        torch.fx.GraphModule(program.graph_module, graph),
        graph,
        signature,
        program.state_dict,
        program.range_constraints,
        [torch.export.ModuleCallEntry(entry.fqn, call)],
        program.example_inputs,
        program.constants,
        verifiers=program.verifiers,
    )


def program_of(graph: torch.fx.Graph, like: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """Return a program of a graph of operators that gives tensors, in which sizes have another program's ranges."""
    places = [node for node in graph.nodes if node.op == "placeholder"]
    outputs: Any = graph.output_node().args[0]
    specification = _pytree.tree_structure(((0,) * len(places), {})), _pytree.tree_structure((0,) * len(outputs))
    names = [node.name for node in places]
    inputs = [
        (SymIntArgument if isinstance(node.meta["val"], torch.SymInt) else TensorArgument)(node.name) for node in places
    ]
    call = torch.export.ModuleCallSignature([], [], *specification, names)
    signature = ExportGraphSignature(
        [InputSpec(InputKind.USER_INPUT, one, None) for one in inputs],
        [OutputSpec(OutputKind.USER_OUTPUT, TensorArgument(node.name), None) for node in outputs],
    )
    return torch.export.ExportedProgram(
        torch.fx.GraphModule({}, graph),
        graph,
        signature,
        {},
        like.range_constraints,
        [torch.export.ModuleCallEntry("", call)],
        verifiers=like.verifiers,
    )


def with_graph(program: torch.export.ExportedProgram, graph: torch.fx.Graph) -> torch.export.ExportedProgram:
    """Return a program with another graph, of the same inputs and as many outputs."""
    signature = copy.deepcopy(program.graph_signature)
    outputs: Any = graph.output_node().args[0]
    for spec, node in zip(signature.output_specs, outputs, strict=True):
        if isinstance(node, torch.fx.Node):
            spec.arg = dataclasses.replace(spec.arg, name=node.name)
    return torch.export.ExportedProgram(
        torch.fx.GraphModule(program.graph_module, graph),
        graph,
        signature,
        program.state_dict,
        program.range_constraints,
        program.module_call_graph,
        program.example_inputs,
        program.constants,
    )


@contextlib.contextmanager
def when_a_size_becomes_constant(note: Callable[[], None]) -> Iterator[None]:
    """Call a function whenever the traced code makes a size of an input that may vary a constant."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    original = ShapeEnv._set_replacement

    def set_replacement(self: ShapeEnv, a: Any, tgt: Any, msg: str) -> None:
        if tgt.is_Integer and a not in self.replacements and a in self.var_to_sources:
            note()
        original(self, a, tgt, msg)

    ShapeEnv._set_replacement = set_replacement  # type: ignore[method-assign]
    try:
        yield
    finally:
        ShapeEnv._set_replacement = original  # type: ignore[method-assign]


def assumed_multiples(program: torch.export.ExportedProgram) -> list[tuple[str, int, str, int, str]]:
    """Return which sizes of inputs tracing took to be multiples of a number: by branches that ask for it.

    Returns:
        For each the source of the size, such as "L['x'].size()[1]", the number, and file, line and function of the
        branch.
    """
    import sympy  # type: ignore[import-untyped]
    from torch.utils._sympy.functions import Mod, PythonMod

    environment = shape_environment(program)
    found = []
    for guard in environment.guards if environment is not None else []:
        expression, frame = guard.expr, guard.sloc.framework_loc
        if not isinstance(expression, sympy.Eq) or expression.rhs != 0 or not hasattr(frame, "filename"):
            continue
        remainder = expression.lhs
        if not isinstance(remainder, (Mod, PythonMod)):
            continue
        symbol, number = remainder.args
        for source in sources_of(environment, symbol)[:1] if number.is_Integer else []:
            found.append((source, int(number), frame.filename, int(frame.lineno or 0), str(frame.name)))
    return found


@contextlib.contextmanager
def when_sizes_are_asked_for(note: Callable[[Any], None]) -> Iterator[None]:
    """Call a function with what stands for a place in the traced code, whenever that may ask for a size."""
    from torch.fx.experimental.symbolic_shapes import SLoc  # type: ignore[attr-defined]

    original = SLoc.__init__

    def init(self: SLoc, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        note(self)

    SLoc.__init__ = init  # type: ignore[method-assign]
    try:
        yield
    finally:
        SLoc.__init__ = original  # type: ignore[method-assign]


def set_place(location: Any, frame: types.FrameType) -> None:
    """Set the place that `when_sizes_are_asked_for` noted to a frame."""
    summary = traceback.FrameSummary(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
    object.__setattr__(location, "framework_loc", summary)


@contextlib.contextmanager
def when_a_condition_is_decided(note: Callable[[Any, Any], None]) -> Iterator[None]:
    """Call a function with a condition on sizes and what knows its symbols, whenever the traced code decides by one.

    Those are among them that torch.export takes for granted, as it traces sizes from 2 on.
    """
    from torch.fx.experimental import symbolic_shapes
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    original = ShapeEnv.evaluate_expr

    def evaluate_expr(self: ShapeEnv, orig_expr: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, orig_expr, *args, **kwargs)
        if getattr(orig_expr, "is_Relational", False) or getattr(orig_expr, "is_Boolean", False):
            note(orig_expr, self)
        return result

    # Else torch would take this module for what asks.
    evaluate_expr.__code__ = evaluate_expr.__code__.replace(co_filename=symbolic_shapes.__file__)
    ShapeEnv.evaluate_expr = evaluate_expr  # type: ignore[method-assign]
    try:
        yield
    finally:
        ShapeEnv.evaluate_expr = original  # type: ignore[method-assign]


_MOST_NUMBERS, _LARGEST_SIZE = 8, 1 << 24


@dataclasses.dataclass(frozen=True)
class SizeCondition:
    """What tracing took to be so of the sizes of inputs, as it is in the example.

    Attributes:
        sources: its symbols -> their sources, such as "L['x'].size()[1]".
        expression: the condition.
        location: what `when_sizes_are_asked_for` noted.
        filename, line, function: where it is asked for, in torch or outside.
    """

    sources: Mapping[str, str]
    expression: Any
    location: Any
    filename: str
    line: int
    function: str

    def holds(self, sizes: Mapping[str, int]) -> bool:
        """Tell whether it is so for sizes, by symbol. It is not so where it divides by 0, or sizes are below 0."""
        import sympy

        numbers = {one: sympy.Integer(sizes[str(one)]) for one in self.expression.free_symbols}
        try:
            # `subs` takes long for large expressions.
            return bool(self.expression.xreplace(numbers))
        except (ZeroDivisionError, AssertionError):
            # Some of torch's functions take no number below 0.
            return False

    def special(self, known: Mapping[str, int] | None = None) -> list[int]:
        """Return sizes of one symbol at which it may be otherwise than at others: by the numbers in it.

        Args:
            known: the sizes of all other symbols.
        """
        import sympy

        sizes = known or {}
        given = {one: sympy.Integer(sizes[str(one)]) for one in self.expression.free_symbols if str(one) in sizes}
        expression = self.expression.xreplace(given) if given else self.expression
        if not expression.free_symbols:
            return []
        atoms = expression.atoms(sympy.Rational)
        numbers = sorted({abs(number) for one in atoms for number in (int(one.p), int(one.q))})[:_MOST_NUMBERS]
        pairs = [(one, other) for one in numbers for other in numbers]
        found = {*numbers, *(one * other for one, other in pairs), *(one + other for one, other in pairs)}
        found |= {one // other for one, other in pairs if other} | {one - other for one, other in pairs}
        return sorted({size + near for size in found for near in (-1, 0, 1) if 2 <= size + near < _LARGEST_SIZE})

    @property
    def is_specialised(self) -> bool:
        """Whether what is computed from sizes was taken to be the number that it is in the example."""
        import sympy

        sides = self.expression.args if isinstance(self.expression, sympy.Eq) else ()
        return any(one.is_Integer for one in sides) and any(one.atoms(sympy.Function) for one in sides)

    @property
    def is_strict(self) -> bool:
        import sympy

        return isinstance(self.expression, (sympy.StrictLessThan, sympy.StrictGreaterThan))

    @property
    def has_remainder(self) -> bool:
        from torch.utils._sympy.functions import Mod, PythonMod

        return bool(self.expression.has(Mod, PythonMod))

    def text(self, names: Mapping[str, str]) -> str:
        """Return it in Python, with names for the symbols."""
        import sympy
        from torch.utils._sympy.printers import PythonPrinter

        named = {one: sympy.Symbol(names[str(one)], integer=True) for one in self.expression.free_symbols}
        return str(PythonPrinter().doprint(self.expression.xreplace(named)))


def conditions_on_sizes(program: torch.export.ExportedProgram) -> list[SizeCondition]:
    """Return what tracing took to be so of sizes, by branches that ask for it."""
    environment = shape_environment(program)
    found = []
    for guard in environment.guards if environment is not None else []:
        frame = guard.sloc.framework_loc
        sources = {str(symbol): sources_of(environment, symbol) for symbol in guard.expr.free_symbols}
        if sources and all(sources.values()) and hasattr(frame, "filename"):
            named = {symbol: one[0] for symbol, one in sources.items()}
            found.append(
                SizeCondition(named, guard.expr, guard.sloc, frame.filename, int(frame.lineno or 0), str(frame.name))
            )
    return found


def sizes_that_stay(program: torch.export.ExportedProgram) -> list[tuple[str, Any, str, int, str]]:
    """Return which sizes of inputs a traced program takes to be near their own: by a count of theirs that is constant.

    torch.export takes `range(size // 2)` for a condition on the size, and keeps it to itself.

    Returns:
        For each the source of the size, such as "L['x'].size()[1]", and of the condition what
        `when_sizes_are_asked_for` noted, file, line and function.
    """
    import sympy

    found = []
    environment = shape_environment(program)
    for guard in environment.guards if environment is not None else []:
        frame, symbols = guard.sloc.framework_loc, list(guard.expr.free_symbols)
        if not isinstance(guard.expr, sympy.Eq) or len(symbols) != 1 or not hasattr(frame, "filename"):
            continue
        sources, size = sources_of(environment, symbols[0]), example_size(environment, symbols[0])
        if not sources or size is None or any(guard.expr.subs(symbols[0], size * by) == sympy.true for by in (2, 3, 5)):
            continue
        found.append((sources[0], guard.sloc, frame.filename, int(frame.lineno or 0), str(frame.name)))
    return found


def shape_environment(program: torch.export.ExportedProgram) -> Any:
    """Return what knows the symbols of a traced program's sizes; None for a program without tensors."""
    values = (node.meta.get("val") for node in program.graph.nodes)
    return next((value.fake_mode.shape_env for value in values if hasattr(value, "fake_mode")), None)


def sources_of(environment: Any, symbol: Any) -> list[str]:
    """Return the sources of a symbol in what `shape_environment` gave, such as "L['x'].size()[1]"."""
    names = [source.name for source in environment.var_to_sources.get(symbol, [])]
    # In PyTorch 2.9 these are methods.
    return [str(name() if callable(name) else name) for name in names]


def example_size(environment: Any, symbol: Any) -> Any:
    """Return the size that a symbol has in the example, by what `shape_environment` gave; None if it has none."""
    # Up to PyTorch 2.10 all of them are in the second.
    values = getattr(environment, "backed_var_to_val", None)
    return (environment.var_to_val if values is None else values).get(symbol)


def conditions(tensors: Sequence[Tensor]) -> list[Any]:
    """Return the conditions on symbolic sizes that are known where tensors are traced, as expressions."""
    environment = next((one.fake_mode.shape_env for one in tensors if isinstance(one, FakeTensor)), None)
    return [] if environment is None else [guard.expr for guard in environment.guards]


def is_about_data(error: BaseException) -> bool:
    """Tell whether torch.export failed as a size or a branch depends on the values of tensors."""
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    return isinstance(error, GuardOnDataDependentSymNode)


def is_about_varying_sizes(error: BaseException) -> bool:
    """Tell whether torch.export failed as a size that may vary was made a constant."""
    return str(error).startswith("Constraints violated")


@contextlib.contextmanager
def as_if_exported() -> Iterator[None]:
    """Let code that asks whether torch.export traces it get to hear that it does."""
    flags = ("_is_compiling_flag", "_is_exporting_flag")
    before = [getattr(torch.compiler, flag) for flag in flags]
    try:
        for flag in flags:
            setattr(torch.compiler, flag, True)
        yield
    finally:
        for flag, value in zip(flags, before, strict=True):
            setattr(torch.compiler, flag, value)


@contextlib.contextmanager
def nothing_compiled() -> Iterator[None]:
    """Let functions of torch.compile run as they are written, also where torch.export traces what calls them."""
    if "torch._dynamo" not in sys.modules:
        yield
        return
    with torch.compiler.set_stance("force_eager"), torch._dynamo.config.patch(error_on_nested_fx_trace=False):
        yield


def unchecked_size(fake: Any) -> Any:
    """Return a new symbolic size for a fake kernel, which need not be the size of one of its outputs."""
    with fake.fake_mode.shape_env.ignore_fresh_unbacked_symbols():
        return torch.library.get_ctx().new_dynamic_size()


# torch.onnx.export.


def results_of_translation(count: int) -> list[ir.Value]:
    """Return values for the outputs of a node, with which other translations can do arithmetic."""
    from onnxscript import evaluator
    from torch.onnx._internal.exporter import _tensors

    # In a translation, the evaluator is the one of torch.onnx.
    recorder: Any = evaluator.default()
    return [_tensors.SymbolicTensor(recorder.opset) for _ in range(count)]


def record_call(function: ir.Function, call: ir.Node) -> None:
    """Add a node, and the function that it calls, to the model that torch.onnx.export is making."""
    from onnxscript import evaluator

    # In a translation, the evaluator is the one of torch.onnx.
    recorder: Any = evaluator.default()
    recorder.functions[function.identifier()] = function
    recorder.nodes.append(call)


def record_node(node: ir.Node) -> None:
    """Add a node to the model that torch.onnx.export is making."""
    from onnxscript import evaluator

    # In a translation, the evaluator is the one of torch.onnx.
    recorder: Any = evaluator.default()
    recorder.nodes.append(node)


def untranslated_operator(error: BaseException) -> str | None:
    """Return the operator for which torch.onnx.export has no translation, if that is why it failed.

    Args:
        error: one of the chain of exceptions that torch.onnx.export raised.
    """
    found = re.search(r"No ONNX function found for <OpOverload\(op='([\w.]+)', overload='(\w+)'\)>", str(error))
    return None if found is None else f"{found[1]}.{found[2]}"


def untranslated_node(error: BaseException) -> str | None:
    """Return the name of the node that torch.onnx.export failed at, if that is what it says.

    Args:
        error: one of the chain of exceptions that torch.onnx.export raised.
    """
    found = re.match(r"Error when translating node %(\w+) :", str(error))
    return None if found is None else found[1]


def whole_part(number: torch.SymFloat, numerator: Any, divisor: Any) -> torch.SymInt:
    """Return the whole part of a quotient of whole numbers, as expressions, as a size of the program of a number."""
    from torch.utils._sympy.functions import FloorDiv

    whole = numerator if divisor == 1 else FloorDiv(numerator, divisor)
    made: torch.SymInt = number.node.shape_env.create_symintnode(whole, hint=None)
    return made
