"""PyTorch's operators as nodes of the domain `aclnn`: a translation table for `torch.onnx.export`.

torch and onnxscript are imported when a table is made.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gradfuse.custom_ops import OPS
from gradfuse.custom_ops.functions import described
from gradfuse.custom_ops.operator import DOMAIN, Operator
from gradfuse.errors import ExportError

if TYPE_CHECKING:
    import onnx
    import torch

LOCAL_DOMAIN = "gradfuse.export"
"""The domain of functions that stand for operators of a traced program until the model is optimized."""

OPSET_OF_FUNCTIONS = 18
"""The version of the default domain that these are written in."""
_NONE, _MEAN = 0, 1
"""ATen's numbers of reductions."""


def onnx_translation_table() -> dict[Any, Callable[..., Any]]:
    """Return what `torch.onnx.export` takes as `custom_translation_table`: overloads -> functions that emit nodes.

    - `aten._ctc_loss` and `aten._ctc_loss_backward` become `CtcLoss` and `CtcLossBackward`. With lengths in tensors,
      torch.export needs fake kernels to trace them, which are registered as long as the table lives.
    - `aten.mse_loss_backward` becomes `MseLossBackward`.
    - `torch.ops.aclnn` operators, where they are registered, become the nodes of their operators.
    - `aten.nll_loss_forward` gives the total weight that a mean divides by, which torch.onnx leaves at 1.
    - `aten.masked_select` becomes `Compress`, and `prims.view_of`, which decompositions leave, `Identity`.

    The nodes have no function bodies yet: `gradfuse.fuse` adds them to the exported program, and inserts the operators
    that replace several ATen operators (the gradients of cross entropy, of softmax with scale and mask, and of grouped
    biases).

    Raises:
        ExportError: torch or onnxscript is not installed.
    """
    try:
        import onnxscript  # noqa: F401
        import torch
    except ImportError as error:
        raise ExportError(
            f"onnx_translation_table: {error.name} is not installed; expected what gradfuse[torch] installs"
        ) from error
    kernels = _fake_kernels()
    aten, own = torch.ops.aten, getattr(torch.ops, DOMAIN)
    table: dict[Any, Callable[..., Any]] = {
        aten.nll_loss_forward.default: nll_loss_forward,
        aten.masked_select.default: masked_select,
        torch.ops.prims.view_of.default: view_of,
    }
    for operator in OPS.values():
        function = _node_of(operator, kernels)
        for name in operator.aten:
            packet, overload = name.split(".")
            table[getattr(getattr(aten, packet), overload)] = function
        if hasattr(own, operator.stem):
            table[getattr(own, operator.stem).default] = function
    return always_chosen(table)


def always_chosen(table: Mapping[Any, Callable[..., Any]]) -> dict[Any, Callable[..., Any]]:
    """Return a translation table whose functions torch.onnx.export takes for every call of an operator.

    Up to PyTorch 2.10 it compares a call with the parameters that a function shows, and takes its own translation where
    names or types are others. These functions show none.
    """

    def without_parameters(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def translate(*arguments: Any, **named: Any) -> Any:
            return function(*arguments, **named)

        vars(translate)["__signature__"] = inspect.Signature()
        return translate

    return {overload: without_parameters(function) for overload, function in table.items()}


def _node_of(operator: Operator, kernels: torch.library.Library) -> Callable[..., Any]:
    """Return the function that emits an operator's node for arguments in the order of its inputs and attributes."""
    kinds = {a.name: type(a.default) for a in operator.attributes}
    names = [*(i.name for i in operator.inputs), *kinds]

    def translate(*arguments: Any, **named: Any) -> Any:
        given = dict(zip(names, arguments, strict=False)) | named
        inputs = [given.get(i.name) for i in operator.inputs]
        attributes = {
            name: tuple(map(int, given[name])) if kind is tuple else kind(given[name])
            for name, kind in kinds.items()
            if name in given
        }
        while inputs[-1] is None:
            inputs.pop()
        from gradfuse.custom_ops import opset

        outputs = getattr(opset, operator.name)(*inputs, **attributes)
        node = (outputs[0] if isinstance(outputs, Sequence) else outputs).producer()
        # Raises a clear error instead of giving an invalid model.
        operator.infer(described(operator, node))
        return outputs

    translate.__name__ = operator.stem
    # The fake kernels are unregistered with the last function that needs them.
    vars(translate)["kernels"] = kernels
    return translate


@contextlib.contextmanager
def lengths_as_tensors() -> Iterator[None]:
    """Let CTC losses that are called under it be of a batch with lengths in tensors, as they can be traced."""
    import torch
    from torch.overrides import TorchFunctionMode

    class LengthsAsTensors(TorchFunctionMode):
        """With lists, PyTorch makes a tensor that cannot be traced."""

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            if getattr(func, "__name__", "") == "ctc_loss":
                args = [taken(one) for one in args]
                kwargs = {name: taken(one) for name, one in kwargs.items()}
                log_probs = args[0] if args else kwargs.get("log_probs")
                if isinstance(log_probs, torch.Tensor) and log_probs.dim() == 2:
                    return of_one(func, args, kwargs)
            return func(*args, **kwargs)

    def of_one(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the loss of a sequence by that of a batch of one."""
        names = ("log_probs", "targets", "input_lengths", "target_lengths")
        given = dict(zip(names, args, strict=False)) | {name: kwargs[name] for name in names if name in kwargs}
        others = {name: one for name, one in kwargs.items() if name not in names}
        log_probs, targets, *lengths = (given[name] for name in names)
        batch = (log_probs.unsqueeze(1), targets.reshape(1, -1), *(one.reshape(1) for one in lengths))
        loss = func(*batch, *args[len(names) :], **others)
        return loss.squeeze(0) if loss.dim() else loss

    def taken(argument: Any) -> Any:
        if isinstance(argument, (list, tuple)):
            return torch.tensor(argument)
        # The operator has them in int64 alone.
        is_integer = isinstance(argument, torch.Tensor) and not argument.is_floating_point()
        return argument.to(torch.int64) if is_integer else argument

    with LengthsAsTensors():
        yield


@contextlib.contextmanager
def traceable_ctc() -> Iterator[None]:
    """Let torch.export trace CTC losses, with lengths in tensors."""
    kernels = _fake_kernels()
    yield
    del kernels


def _fake_kernels() -> torch.library.Library:
    """Register the fake kernels that PyTorch lacks for its CTC operators; they are there while the library lives."""
    import torch

    from gradfuse import _torch_private as private

    def ctc_loss(log_probs: Any, targets: Any, input_lengths: Any, target_lengths: Any, *attributes: Any) -> Any:
        steps, items = log_probs.shape[0], log_probs.shape[1]
        # 2 max(target_lengths) + 1. It is not the size of an output of aten.ctc_loss, which torch.export keeps.
        states = private.unchecked_size(log_probs)
        return log_probs.new_empty((items,)), log_probs.new_empty((items, steps, states))

    def ctc_loss_backward(grad: Any, log_probs: Any, *others: Any) -> Any:
        return torch.empty_like(log_probs)

    kernels: torch.library.Library = torch.library.Library("aten", "FRAGMENT")  # type: ignore[no-untyped-call]
    # Traces may be nested. From 2.13 on PyTorch takes the last of several kernels without being asked to.
    take_the_last: Any = {"lib": kernels, "allow_override": True}
    torch.library.register_fake("aten::_ctc_loss.Tensor", ctc_loss, **take_the_last)
    torch.library.register_fake("aten::_ctc_loss_backward.Tensor", ctc_loss_backward, **take_the_last)
    return kernels


def nll_loss_forward(self: Any, target: Any, weight: Any, reduction: int, ignore_index: int) -> Any:
    """aten::nll_loss_forward: the loss, and the sum of the weights of the rows that count.

    `self` is (N, C) or (C) log-probabilities, `target` (N) or () classes; `reduction` is 0 none, 1 mean, 2 sum. Unlike
    ONNX's NegativeLogLikelihoodLoss it takes bfloat16 too. The total weight of reduction none is 0, as PyTorch's.
    """
    from onnxscript import opset18

    op: Any = opset18
    last = op.Constant(value_ints=[-1])
    ignored = op.Equal(target, op.Constant(value_int=ignore_index))
    used = op.Where(ignored, op.Constant(value_int=0), target)
    picked = op.Squeeze(op.GatherElements(self, op.Unsqueeze(used, last), axis=-1), last)
    zero = op.CastLike(op.Constant(value_float=0.0), self)
    one = op.CastLike(op.Constant(value_float=1.0), self)
    row_weight = op.Where(ignored, zero, one if weight is None else op.Gather(weight, used))
    losses = op.Where(ignored, zero, op.Neg(op.Mul(picked, row_weight)))
    if reduction == _NONE:
        return losses, op.Identity(zero)
    total = op.ReduceSum(row_weight, keepdims=0)
    loss = op.ReduceSum(losses, keepdims=0)
    return (op.Div(loss, total) if reduction == _MEAN else loss), total


def masked_select(self: Any, mask: Any) -> Any:
    """aten::masked_select: the elements of `self` where `mask` is true, (K), both of any shapes that broadcast."""
    from onnxscript import opset18

    op: Any = opset18
    line = op.Constant(value_ints=[-1])
    selected = op.Expand(self, op.Shape(mask))
    condition = op.Expand(mask, op.Shape(selected))
    return op.Compress(op.Reshape(selected, line), op.Reshape(condition, line))


def reshape(self: Any, shape: Sequence[Any]) -> Any:
    """aten::reshape: `self` in another shape, in which 0 is a size: torch.onnx takes it for that of the tensor."""
    from onnxscript import opset18

    op: Any = opset18
    last = op.Constant(value_ints=[-1])
    sizes = [op.Constant(value_ints=[one]) if isinstance(one, int) else op.Reshape(one, last) for one in shape]
    return op.Reshape(self, op.Concat(*sizes, axis=0) if sizes else op.Constant(value_ints=[]), allowzero=1)


def view_of(a: Any) -> Any:
    """prims::view_of: the tensor itself, of any shape and type."""
    from onnxscript import opset18

    op: Any = opset18
    return op.Identity(a)


def grid_sampler_3d(input: Any, grid: Any, interpolation_mode: int, padding_mode: int, align_corners: bool) -> Any:
    """aten::grid_sampler_3d: as in two dimensions, for (N, C, D, H, W) and (N, outD, outH, outW, 3)."""
    from onnxscript import opset20

    op: Any = opset20
    return op.GridSample(
        input,
        grid,
        mode=("linear", "nearest")[interpolation_mode],
        padding_mode=("zeros", "border", "reflection")[padding_mode],
        align_corners=int(align_corners),
    )


def function_caller(text: str) -> Callable[..., Any]:
    """Return a translation that calls an ONNX function, given as text, which becomes a function of the model.

    The exporter's optimizer inlines such functions.
    """
    import onnx

    return caller(
        onnx.parser.parse_function(f'<domain: "{LOCAL_DOMAIN}", opset_import: ["": {OPSET_OF_FUNCTIONS}]>{text}')
    )


def caller(proto: onnx.FunctionProto) -> Callable[..., Any]:
    """Return a translation that calls an ONNX function, under its name in `LOCAL_DOMAIN`."""
    import onnx_ir as ir

    from gradfuse import _torch_private as private

    proto.domain = LOCAL_DOMAIN

    def call(*arguments: Any, **attributes: Any) -> Any:
        function = ir.serde.deserialize_function(proto)
        outputs = private.results_of_translation(len(function.outputs))
        node = ir.node(function.name, list(arguments), attributes=attributes, domain=LOCAL_DOMAIN, outputs=outputs)
        private.record_call(function, node)
        return node.outputs if len(outputs) > 1 else node.outputs[0]

    return call
