"""One node of each operator that `to_stock` replaces, and what it computes according to PyTorch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
import onnxruntime
import torch
from onnx import helper
from torch import Tensor
from torch.nn import functional as F

from gradfuse.ort_training import operators
from gradfuse.testing import assert_gradients_close

Array = npt.NDArray[Any]
Tensors = Sequence[Tensor]
DOMAIN = "com.microsoft"


@dataclasses.dataclass(frozen=True)
class OperatorCase:
    """A node with its inputs.

    Attributes:
        op_type: the operator.
        values: what inputs and results depend on; float64 ones are used in the type that is asked for.
        inputs: values -> inputs of the node, None for those left out.
        results: values -> outputs of the node.
        attributes: of the node.
        domain: of the operator.
        pooled: attributes of the MaxPool node that the second input comes from; its input is the first value.
    """

    op_type: str
    values: Tensors
    inputs: Callable[..., Sequence[Tensor | None]]
    results: Callable[..., Tensors]
    attributes: dict[str, Any] = dataclasses.field(default_factory=dict)
    domain: str = DOMAIN
    pooled: dict[str, Any] | None = None

    def __str__(self) -> str:
        return "-".join([self.op_type, *(f"{name}={value}" for name, value in self.attributes.items())])

    def evaluated(self, dtype: torch.dtype) -> tuple[list[Tensor | None], list[Tensor]]:
        """Return the inputs and the results, computed in a type from the values in float32."""
        values = [value.float().to(dtype) if value.is_floating_point() else value for value in self.values]
        return list(self.inputs(*values)), list(self.results(*values))

    def require_replacement(self, native: Sequence[Array], opset: int) -> None:
        """Assert that what takes the node's place is as near to PyTorch in float64 as other results in float32 are."""
        proto, feeds = self.model()
        model = ir.from_proto(proto)
        model.opset_imports[""] = opset
        operators.replace(model.graph, "model")
        assert not [node for node in model.graph if node.domain == DOMAIN or node.op_type == self.op_type]
        del model.opset_imports[DOMAIN]
        replaced = ir.to_proto(model)
        onnx.checker.check_model(replaced, full_check=True)
        session = onnxruntime.InferenceSession(replaced.SerializeToString(), providers=["CPUExecutionProvider"])
        names = [value.name for value in proto.graph.output]
        outputs = session.run(names, feeds)
        for actual, other, exact in zip(outputs, native, self.evaluated(torch.float64)[1], strict=True):
            if exact.is_floating_point():
                assert_gradients_close(actual, other, exact, np.float32)
            else:
                # Axes have no order.
                assert sorted(actual) == sorted(other) == sorted(exact.tolist())

    def model(self) -> tuple[onnx.ModelProto, dict[str, Array]]:
        """Return a model of the node, and what to feed."""
        inputs, results = self.evaluated(torch.float32)
        feeds = {f"input_{k}": value.detach().numpy() for k, value in enumerate(inputs) if value is not None}
        names = [f"input_{k}" if value is not None else "" for k, value in enumerate(inputs)]
        outputs = [f"output_{k}" for k in range(len(results))]
        nodes = []
        if self.pooled is not None:
            feeds["pooled"] = self.values[0].float().numpy()
            nodes.append(helper.make_node("MaxPool", ["pooled"], ["maxima", "places"], **self.pooled))
            names.append("places")
        nodes.append(helper.make_node(self.op_type, names, outputs, "node", domain=self.domain, **self.attributes))
        graph = helper.make_graph(
            nodes,
            "one_node",
            [_described(name, array) for name, array in feeds.items()],
            [_described(name, result.detach().numpy()) for name, result in zip(outputs, results, strict=True)],
        )
        opsets = [helper.make_opsetid("", 17), helper.make_opsetid(DOMAIN, 1)]
        return helper.make_model(graph, ir_version=8, opset_imports=opsets), feeds


def _described(name: str, array: Array) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)


def gradient(
    op_type: str,
    forward: Callable[..., Tensor],
    values: Tensors,
    inputs: Callable[..., Sequence[Tensor | None]],
    wanted: int = 1,
    **options: Any,
) -> OperatorCase:
    """A case whose results are the gradients of `forward(*values)` with respect to the first `wanted` values.

    `inputs` gets the gradient that arrives, then what `forward` gives, then the values.
    """
    generator = torch.Generator().manual_seed(7)
    dy = torch.randn(forward(*values).shape, generator=generator, dtype=torch.float64)

    def results(dy: Tensor, *values: Tensor) -> Tensors:
        leaves = [value.detach().requires_grad_() for value in values[:wanted]]
        return torch.autograd.grad(forward(*leaves, *values[wanted:]), leaves, dy)

    def with_forward(dy: Tensor, *values: Tensor) -> Sequence[Tensor | None]:
        return inputs(dy, forward(*values), *values)

    return OperatorCase(op_type, [dy, *values], with_forward, results, **options)


def normal(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + 10 * len(shape) + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def _ints(*values: int) -> Tensor:
    return torch.tensor(values)


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.5 * x)


def _rms(x: Tensor, scale: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean((1, 2), keepdim=True) + 1e-3) * scale


def _inverse_rms(x: Tensor) -> Tensor:
    return torch.rsqrt(x.pow(2).mean((1, 2), keepdim=True) + 1e-3)


def _layer_norm_inputs(dy: Tensor, y: Tensor, x: Tensor, scale: Tensor, bias: Tensor) -> Tensors:
    var, mean = torch.var_mean(x, -1, correction=0, keepdim=True)
    return dy, x, scale, mean, torch.rsqrt(var + 1e-5)


def _batch_statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    var, mean = torch.var_mean(x, (0, 2, 3), correction=0)
    return mean, var


def _batch_norm(x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    return F.batch_norm(x, None, None, scale, bias, training=True, eps=1e-3)


def _batch_norm_inputs(dy: Tensor, y: Tensor, x: Tensor, scale: Tensor, bias: Tensor) -> Tensors:
    mean, var = _batch_statistics(x)
    return dy, x, scale, mean, torch.rsqrt(var + 1e-3)


def _batch_norm_results(x: Tensor, scale: Tensor, bias: Tensor, old_mean: Tensor, old_var: Tensor) -> Tensors:
    mean, var = _batch_statistics(x)
    return (
        _batch_norm(x, scale, bias),
        0.75 * old_mean + 0.25 * mean,
        0.75 * old_var + 0.25 * var,
        mean,
        torch.rsqrt(var + 1e-3),
    )


def _cross_entropies() -> list[OperatorCase]:
    cases = []
    target = _ints(1, 0, 3, 2, 1)
    for reduction in ("mean", "sum", "none"):
        for weight in (None, normal(4).abs()):
            for ignore_index in (None, 1):
                attributes = {"reduction": reduction} | ({} if ignore_index is None else {"ignore_index": ignore_index})

                def forward(
                    logits: Tensor, *rest: Tensor, reduction: str = reduction, ignored: int | None = ignore_index
                ) -> Tensor:
                    weight = rest[0] if rest else None
                    label = target.reshape(5, *(1,) * (logits.dim() - 2)).expand(5, *logits.shape[2:])
                    ignored = -100 if ignored is None else ignored
                    return F.cross_entropy(logits, label, weight, reduction=reduction, ignore_index=ignored)

                def inputs(dy: Tensor, y: Tensor, logits: Tensor, *rest: Tensor) -> Tensors:
                    label = target.reshape(5, *(1,) * (logits.dim() - 2)).expand(5, *logits.shape[2:])
                    return dy, logits.log_softmax(1), label.contiguous(), *rest

                shape = (5, 4, 2) if weight is None else (5, 4)
                values = [normal(*shape), *([] if weight is None else [weight])]
                case = gradient("SoftmaxCrossEntropyLossGrad", forward, values, inputs, attributes=attributes)
                cases.append(case)
    # No row counts.
    ignored = target.clone().fill_(-100)
    cases.append(
        gradient(
            "SoftmaxCrossEntropyLossGrad",
            lambda logits: F.cross_entropy(logits, ignored),
            [normal(5, 4)],
            lambda dy, y, logits: [dy, logits.log_softmax(1), ignored],
            attributes={"reduction": "mean", "ignore_index": -100},
        )
    )
    return cases


def _convolutions() -> list[OperatorCase]:
    cases = []
    shapes: list[tuple[Tensor, Tensor, dict[str, Any]]] = [
        (normal(2, 3, 7), normal(4, 3, 3), {}),
        (normal(2, 4, 6, 7), normal(6, 2, 3, 2), {"stride": (2, 3), "padding": (1, 0), "groups": 2}),
        (normal(1, 2, 9, 5), normal(3, 2, 2, 3), {"stride": (2, 1), "padding": (0, 2), "dilation": (3, 2)}),
    ]
    for x, w, options in shapes:
        axes = x.dim() - 2
        function: Callable[..., Tensor] = F.conv1d if axes == 1 else F.conv2d
        stride, padding, dilation = (
            list(options.get(name, (default,) * axes))
            for name, default in (("stride", 1), ("padding", 0), ("dilation", 1))
        )
        attributes = {
            "strides": stride,
            "pads": padding * 2,
            "dilations": dilation,
            "group": options.get("groups", 1),
            "kernel_shape": list(w.shape[2:]),
        }

        def forward(x: Tensor, w: Tensor, b: Tensor, call: Any = function, options: dict[str, Any] = options) -> Tensor:
            result: Tensor = call(x, w, b, **options)
            return result

        values = [x, w, normal(w.shape[0])]
        cases.append(gradient("ConvGrad", forward, values, lambda dy, y, x, w, b: [dy, x, w], 3, attributes=attributes))
    return cases


def _max_pool() -> OperatorCase:
    def forward(x: Tensor) -> Tensor:
        return F.max_pool2d(x, (3, 2), (2, 1), (1, 0))

    x = normal(2, 3, 6, 5)
    dy = normal(*forward(x).shape)

    def results(x: Tensor, dy: Tensor) -> Tensors:
        leaf = x.detach().requires_grad_()
        return torch.autograd.grad(forward(leaf), [leaf], dy)

    window = {"kernel_shape": [3, 2], "strides": [2, 1], "pads": [1, 0, 1, 0]}
    return OperatorCase("MaxPoolGrad", [x, dy], lambda x, dy: [dy], results, window, "", window)


def _cases() -> list[OperatorCase]:
    x, wide = normal(4, 6), normal(2, 3, 4, 5)
    index = torch.tensor([[2, 0], [2, 1], [0, 2]])
    mask = normal(4, 6, seed=3) > 0

    def of_y(dy: Tensor, y: Tensor, *rest: Tensor) -> Tensors:
        return dy, y

    def of_x(dy: Tensor, y: Tensor, x: Tensor) -> Tensors:
        return dy, x

    def shape_and(*rest: Tensor) -> Callable[..., Tensors]:
        return lambda dy, y, x: (dy, torch.tensor(x.shape), *rest)

    return [
        gradient("ReluGrad", F.relu, [x], of_y),
        gradient("LeakyReluGrad", lambda x: F.leaky_relu(x, 0.3), [x], of_y, attributes={"alpha": 0.3}),
        gradient("SigmoidGrad", torch.sigmoid, [x], of_y),
        gradient("TanhGrad", torch.tanh, [x], of_y),
        gradient("GeluGrad", F.gelu, [x], of_x),
        gradient("FastGeluGrad", lambda x: F.gelu(x, approximate="tanh"), [x], of_x),
        gradient("QuickGeluGrad", _quick_gelu, [x], of_x, attributes={"alpha": 1.5}),
        OperatorCase("Gelu", [x], lambda x: [x], lambda x: [F.gelu(x)]),
        OperatorCase("FastGelu", [x], lambda x: [x], lambda x: [F.gelu(x, approximate="tanh")]),
        OperatorCase("QuickGelu", [x], lambda x: [x], lambda x: [_quick_gelu(x)], {"alpha": 1.5}),
        gradient("SoftmaxGrad_13", lambda x: x.softmax(1), [wide], of_y, attributes={"axis": 1}),
        gradient("LogSoftmaxGrad_13", lambda x: x.log_softmax(-1), [wide], of_y, attributes={"axis": -1}),
        *_cross_entropies(),
        gradient(
            "LayerNormalizationGrad",
            lambda x, scale, bias: F.layer_norm(x, (5,), scale, bias, 1e-5),
            [wide, normal(5), normal(5)],
            _layer_norm_inputs,
            3,
            attributes={"axis": -1},
        ),
        gradient(
            "SimplifiedLayerNormalizationGrad",
            _rms,
            [normal(3, 4, 5), normal(4, 5)],
            lambda dy, y, x, scale: [dy, x, scale, _inverse_rms(x)],
            2,
            attributes={"axis": 1},
        ),
        OperatorCase(
            "SimplifiedLayerNormalization",
            [normal(3, 4, 5), normal(4, 5)],
            lambda x, scale: [x, scale],
            lambda x, scale: [_rms(x, scale), _inverse_rms(x)],
            {"axis": 1, "epsilon": 1e-3},
            domain="",
        ),
        OperatorCase(
            "BatchNormInternal",
            [wide, normal(3), normal(3), normal(3), normal(3).abs()],
            lambda *values: values,
            _batch_norm_results,
            {"epsilon": 1e-3, "momentum": 0.75, "training_mode": 1},
        ),
        gradient(
            "BatchNormalizationGrad",
            _batch_norm,
            [wide, normal(3), normal(3)],
            _batch_norm_inputs,
            3,
            attributes={"epsilon": 1e-3},
        ),
        *_convolutions(),
        _max_pool(),
        gradient(
            "DropoutGrad",
            lambda x: x * mask / 0.7,
            [x],
            lambda dy, y, x: [dy, mask, torch.tensor(0.3), torch.tensor(True)],
        ),
        gradient(
            "GatherGrad",
            lambda x: x[:, index],
            [normal(2, 3, 4)],
            lambda dy, y, x: [torch.tensor(x.shape), index, dy],
            attributes={"axis": 1},
        ),
        gradient(
            "GatherGrad",
            lambda x: x[_ints(4, -1, 0, 4)],
            [normal(5, 2)],
            lambda dy, y, x: [torch.tensor(x.shape), _ints(4, -1, 0, 4), dy],
            attributes={"axis": 0},
        ),
        gradient(
            "GatherElementsGrad", lambda x: x.gather(0, index), [normal(3, 2)], shape_and(index), attributes={"axis": 0}
        ),
        gradient(
            "GatherNDGrad",
            lambda x: x[index[:, 0], index[:, 1]],
            [normal(3, 3, 2)],
            lambda dy, y, x: [torch.tensor(x.shape), index, dy],
        ),
        gradient(
            "SliceGrad",
            lambda x: x[:, 1:6:2],
            [normal(3, 7)],
            shape_and(_ints(1), _ints(6), _ints(1), _ints(2)),
        ),
        OperatorCase(
            "ConcatTraining",
            [normal(2, 3), normal(2, 5)],
            lambda a, b: [a, b],
            lambda a, b: [torch.cat([a, b], 1), _ints(3, 5)],
            {"axis": 1},
        ),
        OperatorCase(
            "SplitTraining",
            [normal(6, 2)],
            lambda x: [x, _ints(1, 3, 2)],
            lambda x: x.split([1, 3, 2]),
            {"axis": 0},
        ),
        OperatorCase("Scale", [x], lambda x: [x, torch.tensor(3)], lambda x: [x / 3], {"scale_down": 1}),
        OperatorCase("Scale", [x, normal(1)], lambda x, f: [x, f[0]], lambda x, f: [x * f[0]]),
        OperatorCase(
            "FusedMatMul",
            [normal(2, 5, 3), normal(2, 4, 5)],
            lambda a, b: [a, b],
            lambda a, b: [0.5 * a.transpose(1, 2) @ b.transpose(1, 2)],
            {"transA": 1, "transB": 1, "alpha": 0.5},
        ),
        gradient("DivGrad", torch.div, [x, x + 4 * torch.sign(x)], lambda dy, y, a, b: [dy, a, b], 2),
        gradient("DivGrad", torch.div, [normal(3, 1, 2), normal(4, 1).abs() + 1], lambda dy, y, a, b: [dy, a, b], 2),
        *(
            OperatorCase(
                "BroadcastGradientArgs",
                [],
                lambda a=a, b=b: [_ints(*a), _ints(*b)],
                lambda axes=axes: [torch.tensor(part, dtype=torch.int64) for part in axes],
            )
            for a, b, axes in (
                ((2, 3), (2, 3), ((), ())),
                ((4, 1, 3), (5, 1), ((1,), (2, 0))),
                ((1,), (2, 1), ((0,), ())),
                ((2, 1, 0), (1, 1), ((), (0, 2))),
            )
        ),
    ]


CASES = _cases()
