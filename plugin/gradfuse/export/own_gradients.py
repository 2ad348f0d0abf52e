"""Functions with a backward pass of their own, `torch.autograd.Function`, in exported steps.

While a step is traced, the backward pass of such a function is traced along with its forward pass, for gradients of the
outputs that are not known yet:

    y_k' = own_output(y_k, c_k, x_1', ...)    c_k = cotangent(y_k)    x_i' = own_input(x_i, backward(ctx, c_1, ...)[i])

Once gradients are written, that of x_i is what the backward pass gives, whatever that of x_i' is, and the gradient of
y_k' takes the place of c_k.

Likewise hooks on gradients are traced for gradients that are not known yet:

    c = gradient_of(x, number)    hooked_gradient(hook(c), x, number)

The latter is an output of the program until gradients are written. That of a parameter then takes the place of c, and
is what the hook gives. Where code registers a hook with a tensor y that it computes, hooked(y, number) takes the place
of y: the gradient of this takes the place of c, and y gets what the hook gives. This module imports torch.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from gradfuse import _torch_private as private
from gradfuse.differentiation.rules import Call, Gradient, gradient, no_gradient
from gradfuse.errors import ExportError
from gradfuse.export import explaining
from gradfuse.export.reporting import refusal
from gradfuse.export.translation import LOCAL_DOMAIN

_COTANGENT, _INPUT, _OUTPUT = "Cotangent", "OwnInput", "OwnOutput"
_HOOKED, _GRADIENT_OF, _HOOKED_GRADIENT, _PASSED_ON = "Hooked", "GradientOf", "HookedGradient", "PassedOn"
_NUMBERED = (_COTANGENT, _HOOKED, _GRADIENT_OF, _HOOKED_GRADIENT)
_NUMBER = "number"
_KNOWN = "gradfuse.known_gradient"
"""In the `meta` of an `OwnOutput` or `Hooked`: the gradient of its result."""

_library: Any = torch.library.Library("gradfuse", "FRAGMENT")  # type: ignore[no-untyped-call]
for _schema in (
    "cotangent(Tensor output, int number) -> Tensor",
    "own_input(Tensor input, Tensor gradient) -> Tensor",
    "own_output(Tensor output, Tensor cotangent, Tensor[] inputs) -> Tensor",
    "hooked(Tensor input, int number) -> Tensor",
    "gradient_of(Tensor input, int number) -> Tensor",
    "hooked_gradient(Tensor gradient, Tensor input, int number) -> Tensor",
):
    _library.define(_schema)
    _name = f"gradfuse::{_schema.partition('(')[0]}"
    torch.library.register_fake(_name, lambda first, *_: torch.empty_like(first), lib=_library)
    # Decompositions compute what depends on constants of the module alone.
    _library.impl(_name, lambda first, *_: first.clone(), "CompositeExplicitAutograd")

_numbers = itertools.count()
"""No two cotangents are the same."""


@contextlib.contextmanager
def traced() -> Iterator[None]:
    """Let functions with a backward pass of their own be traced with it."""
    with private.functions_applied_by(_applied), _no_gradient_in_inference_mode():
        yield


@contextlib.contextmanager
def by_formula(untouched: Collection[type]) -> Iterator[None]:
    """Let functions with a backward pass of their own be traced with the gradients of their forward pass, but for some.

    Code that takes derivatives itself asks for those of functions before anything is known of the step's. That a
    backward pass gives the same is seen when the step is compared with PyTorch.
    """
    with private.functions_applied_by(_of_forward, untouched), _no_gradient_in_inference_mode():
        yield


@contextlib.contextmanager
def _no_gradient_in_inference_mode() -> Iterator[None]:
    """Let `torch.inference_mode` be traced as what it is to gradients."""
    owner: Any = torch.inference_mode
    originals = {name: getattr(owner, name) for name in ("__enter__", "__exit__")}

    def enter(self: Any) -> None:
        self.before = torch.is_grad_enabled()
        torch.set_grad_enabled(not self.mode)

    def leave(self: Any, *error: Any) -> None:
        torch.set_grad_enabled(self.before)

    owner.__enter__, owner.__exit__ = enter, leave
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(owner, name, original)


class _Unrecorded(TorchFunctionMode):
    """Lets what turns gradients on and off have its effect without a trace in the program."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is private.SET_GRAD_ENABLED:
            return private.set_grad_enabled_unseen(*args)
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def apart() -> Iterator[None]:
    """Let what is traced be no part of what the loss is differentiated through."""
    with _Unrecorded(), torch.no_grad():
        yield


HOOKED = torch.ops.gradfuse.hooked.default
"""Takes the place of a tensor with a hook: the tensor and the number of the hook."""


def changed_gradient(tensor: Tensor, number: int, change: Callable[[Tensor], Tensor]) -> Tensor:
    """Return what hooks make of the gradient of a tensor, as an output of the program for `change_gradients`.

    Args:
        tensor: a parameter, or what `HOOKED` gives.
        number: of a parameter, which of the gradients is its own, counted from 0; larger ones for others.
        change: what the hooks do.
    """
    own = torch.ops.gradfuse
    changed: Tensor = own.hooked_gradient(change(own.gradient_of(tensor, number)), tensor, number)
    return changed


class _Context:
    """What the forward pass of a function hands to its backward pass."""

    def __init__(self, needs_input_grad: tuple[bool, ...]) -> None:
        self.needs_input_grad = needs_input_grad
        self.saved_tensors: tuple[Any, ...] = ()
        self.materialize_grads = True
        self.non_differentiable: tuple[Any, ...] = ()

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors

    def save_for_forward(self, *tensors: Any) -> None:
        pass

    def mark_non_differentiable(self, *tensors: Any) -> None:
        self.non_differentiable = tensors

    def set_materialize_grads(self, value: bool) -> None:
        self.materialize_grads = value

    def mark_dirty(self, *tensors: Any) -> None:
        raise refusal(
            "a torch.autograd.Function writes into its input, which cannot be traced; expected one that returns a new "
            "tensor"
        )


def _applied(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return what a function gives, so that gradients go through its own backward pass."""
    if private.has_setup_context(function):
        bound = inspect.signature(function.forward).bind(*args, **kwargs)
        bound.apply_defaults()
        args, kwargs = bound.args, bound.kwargs
    enabled = torch.is_grad_enabled()
    needs = tuple(enabled and isinstance(one, Tensor) and one.requires_grad for one in args)
    context = _Context(needs)
    with apart():
        if private.has_setup_context(function):
            outputs = function.forward(*args, **kwargs)
            function.setup_context(context, args, outputs)
        else:
            outputs = function.forward(context, *args, **kwargs)
        every = outputs if isinstance(outputs, tuple) else (outputs,)
        if not any(needs) or _takes_gradients(function):
            return outputs
        unmarked = [any(one is other for other in context.non_differentiable) for one in every]
        differentiable = [
            isinstance(one, Tensor) and one.is_floating_point() and not without
            for one, without in zip(every, unmarked, strict=True)
        ]
        cotangents = [
            torch.ops.gradfuse.cotangent(one, next(_numbers))
            if has
            else torch.zeros_like(one)
            if isinstance(one, Tensor)
            else None
            for one, has in zip(every, differentiable, strict=True)
        ]
        backward = function.backward if private.has_backward(function) else function.vjp
        try:
            with private.without_autocast():
                found = backward(context, *cotangents)
        except ExportError:
            raise
        except Exception as error:
            # A user's function may raise anything.
            raise refusal(
                f"{function.__name__} has a backward pass of its own, which cannot be traced: "
                f"{explaining.reason(error)}; expected PyTorch's operators instead, with detach() as in "
                "x + (f(x) - x).detach()"
            ) from error
        gradients = found if isinstance(found, tuple) else (found,)
    # With the gradients that these have.
    inputs = [
        torch.ops.gradfuse.own_input(one, _like(given, one))
        for one, given, needed in zip(args, gradients, needs, strict=False)
        if needed and given is not None
    ]
    results = tuple(
        torch.ops.gradfuse.own_output(one, cotangent, inputs) if has else one
        for one, cotangent, has in zip(every, cotangents, differentiable, strict=True)
    )
    return results if isinstance(outputs, tuple) else results[0]


def _of_forward(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    if not private.has_setup_context(function):
        return function.forward(_Context((True,) * len(args)), *args, **kwargs)
    bound = inspect.signature(function.forward).bind(*args, **kwargs)
    bound.apply_defaults()
    return function.forward(*bound.args, **bound.kwargs)


def _takes_gradients(function: Any) -> bool:
    """Whether a backward pass lets PyTorch differentiate a function that it runs again, as to spare memory.

    Its gradient is that of the operators of the forward pass, which is compared with PyTorch on the batch.
    """
    names = set(inspect.unwrap(function.backward).__code__.co_names)
    return "enable_grad" in names or {"autograd", "grad"} <= names or {"autograd", "backward"} <= names


def _like(gradient: Tensor, tensor: Tensor) -> Tensor:
    """Return a gradient as PyTorch takes it: summed to the shape of the tensor, and in its type."""
    with apart():
        shape: Any = tensor.shape
        return (gradient if gradient.shape == tensor.shape else gradient.sum_to_size(shape)).to(tensor.dtype)


def translations() -> dict[Any, Callable[..., Any]]:
    """Return the functions that emit the nodes, for `custom_translation_table`."""

    def node_of(name: str) -> Callable[..., Any]:
        def translate(first: Any, *others: Any) -> Any:
            inputs = [value for one in others for value in (one if isinstance(one, Sequence) else [one])]
            # That of a cotangent is there only so that it is one of a kind.
            attributes = {_NUMBER: inputs.pop()} if name in _NUMBERED else {}
            results = private.results_of_translation(1)
            node = ir.node(name, [first, *inputs], attributes=attributes, domain=LOCAL_DOMAIN, outputs=results)
            private.record_node(node)
            return node.outputs[0]

        return translate

    own = torch.ops.gradfuse
    return {
        own.cotangent.default: node_of(_COTANGENT),
        own.own_input.default: node_of(_INPUT),
        own.own_output.default: node_of(_OUTPUT),
        HOOKED: node_of(_HOOKED),
        own.gradient_of.default: node_of(_GRADIENT_OF),
        own.hooked_gradient.default: node_of(_HOOKED_GRADIENT),
    }


no_gradient(_COTANGENT, domain=LOCAL_DOMAIN)
no_gradient(_GRADIENT_OF, domain=LOCAL_DOMAIN)
no_gradient(_HOOKED_GRADIENT, domain=LOCAL_DOMAIN)


@gradient(_HOOKED, domain=LOCAL_DOMAIN)
def _of_hooked(call: Call) -> Iterator[Gradient]:
    (dy,) = call.dy
    assert dy is not None
    call.node.meta[_KNOWN] = dy.value
    passed = call.tape.op(_PASSED_ON, dy, domain=LOCAL_DOMAIN, **{_NUMBER: call.attribute(_NUMBER)})
    passed.value.shape = call.node.outputs[0].shape
    yield passed


@gradient(_INPUT, domain=LOCAL_DOMAIN, fixed=(1,))
def _of_input(call: Call) -> Iterator[Gradient]:
    yield call.x[1]


@gradient(_OUTPUT, domain=LOCAL_DOMAIN, fixed=(0, 1))
def _of_output(call: Call) -> Iterator[Gradient]:
    (dy,) = call.dy
    assert dy is not None
    call.node.meta[_KNOWN] = dy.value
    yield None
    yield None
    for one in call.x[2:]:
        # What it is does not matter: see `_of_input`.
        yield None if one is None else one.zeros()


def change_gradients(graph: ir.Graph, count: int, probe: Callable[[int], float] | None = None) -> None:
    """Put what hooks give into the places of gradients, and take what stands for that out of the outputs.

    Args:
        graph: has gradients as its last outputs.
        count: how many these are.
        probe: where code has registered hooks with what it computes, they multiply by these numbers instead.
    """
    results = {_number(node): node for node in graph if _is(node, _HOOKED_GRADIENT)}
    hooked = [node for node in graph if _is(node, _HOOKED)]
    if not results and not hooked:
        return
    # A step that takes derivatives itself marks that no gradient goes through them.
    marks = [mark for node in results.values() for mark in node.outputs[0].consumers()]
    taken = {node.outputs[0] for node in (*results.values(), *marks)}
    graph.outputs[:] = [value for value in graph.outputs if value not in taken]
    graph.remove(marks, safe=True)
    first = len(graph.outputs) - count
    known = dict(enumerate(graph.outputs[first:]))
    # The loss may not depend on one of them.
    known |= {_number(node): node.meta.get(_KNOWN) or _zeros_like(graph, node.outputs[0]) for node in hooked}
    for node in [node for node in graph if _is(node, _GRADIENT_OF)]:
        _replace(graph, node, known[_number(node)])
    for node in [node for node in graph if _is(node, _PASSED_ON)]:
        number, value = _number(node), node.inputs[0]
        # Its handle may have removed a hook.
        if number in results:
            value = results[number].inputs[0] if probe is None else _times(graph, value, probe(number))
        assert value is not None
        _replace(graph, node, value)
    for number, node in results.items():
        result = node.inputs[0]
        assert result is not None
        if number < count:
            graph.outputs[first + number] = result
        graph.remove(node, safe=True)
    graph.sort()


def _is(node: ir.Node, op_type: str) -> bool:
    return (node.domain, node.op_type) == (LOCAL_DOMAIN, op_type)


def _number(node: ir.Node) -> int:
    number = node.attributes.get_int(_NUMBER)
    assert number is not None
    return number


def _replace(graph: ir.Graph, node: ir.Node, value: ir.Value) -> None:
    ir.convenience.replace_all_uses_with(node.outputs[0], value, replace_graph_outputs=True)
    graph.remove(node, safe=True)


def _times(graph: ir.Graph, value: ir.Value | None, number: float) -> ir.Value:
    assert value is not None and value.dtype is not None
    factor = ir.tensor(np.array(number, dtype=value.dtype.numpy()), dtype=value.dtype)
    constant = ir.node("Constant", [], attributes={"value": factor})
    product = ir.node("Mul", [value, constant.outputs[0]])
    constant.outputs[0].type = product.outputs[0].type = value.type
    product.outputs[0].shape = value.shape
    graph.extend([constant, product])
    return product.outputs[0]


def _zeros_like(graph: ir.Graph, value: ir.Value) -> ir.Value:
    shape = ir.node("Shape", [value])
    assert value.dtype is not None
    zero = ir.tensor(np.zeros(1, dtype=value.dtype.numpy()), dtype=value.dtype)
    zeros = ir.node("ConstantOfShape", shape.outputs, attributes={"value": zero})
    shape.outputs[0].type = ir.TensorType(ir.DataType.INT64)
    zeros.outputs[0].type, zeros.outputs[0].shape = value.type, value.shape
    graph.extend([shape, zeros])
    return zeros.outputs[0]


def resolve(model: ir.Model) -> None:
    """Take what stands for backward passes out of a model whose gradients are written, and put these gradients in."""
    graph = model.graph
    nodes = [node for node in graph.all_nodes() if node.domain == LOCAL_DOMAIN]
    for node in nodes:
        if node.op_type == _OUTPUT and (known := node.meta.get(_KNOWN)) is not None:
            cotangent = node.inputs[1]
            assert cotangent is not None
            ir.convenience.replace_all_uses_with(cotangent, known)
    for node in nodes:
        if node.op_type in (_INPUT, _OUTPUT, _COTANGENT, _HOOKED):
            value = node.inputs[0]
            assert value is not None
            if node.op_type == _COTANGENT and node.outputs[0].uses():
                # Of an output that the loss does not depend on.
                value = _zeros_like(graph, value)
            ir.convenience.replace_all_uses_with(node.outputs[0], value, replace_graph_outputs=True)
            assert node.graph is not None
            node.graph.remove(node, safe=True)
    if nodes:
        graph.sort()
