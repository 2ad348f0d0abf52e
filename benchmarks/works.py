"""The work that `ops.py` measures: each operator on tensors of a size, and how its peers do the same."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import onnx
import onnx.helper
import onnx.parser
import torch
from torch import Tensor

Inputs = dict[str, Tensor]

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "float64": torch.float64}
_NAMES = {torch.int64: "int64", torch.bool: "bool", **{dtype: name for name, dtype in DTYPES.items()}}
_OPSET = 20
_PART = 1 << 20  # elements of an output that are compared with float64

aten = torch.ops.aten


@dataclass(frozen=True)
class Work:
    """An operator on tensors of one size.

    Args:
        operator: its name, and a layout where it has several: "GroupedBiasAddGrad 3-D".
        size: S fits the second-level cache, M is tens of MiB, L hundreds; D is CtcLoss with few classes.
        case: what is special about the data; "" if nothing is.
        dtype: the element type T.
        bytes: the least that must be read and written.
        reads: how many large tensors are read.
        writes: whether a large tensor is written.
        inputs: makes the operator's inputs, in its order.
        output: the shape of the first output, which is what is compared.
        fresh: what PyTorch does for it with `peer_inputs`, giving a new tensor.
        preallocated: the same into a given tensor; None where PyTorch has no such form.
        reference: a part of the output in float64.
        part: which part that is.
        plain: the nodes that exporters write for it, in float32, from `peer_inputs` to a value named "result"; None
            where none writes any, and the operator's own function body is what stock onnxruntime runs.
        peer_inputs: what PyTorch and exporters start from, of the operator's inputs: what the forward pass has for
            them is there before their gradient begins.
        attributes: of the operator.
        more_outputs: names and shapes of the outputs after the first.
    """

    operator: str
    size: str
    case: str
    dtype: str
    bytes: int
    reads: int
    writes: bool
    inputs: Callable[[], Inputs]
    output: tuple[int, ...]
    fresh: Callable[[Inputs], Tensor]
    preallocated: Callable[[Inputs, Tensor], object] | None
    reference: Callable[[Inputs, Any], Tensor]
    part: Any
    plain: str | None = None
    peer_inputs: Callable[[Inputs], Inputs] = dict
    attributes: dict[str, Any] = field(default_factory=dict)
    more_outputs: dict[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return "/".join(filter(None, (self.operator, self.size, self.case, self.dtype)))


def fused_model(work: Work, inputs: Inputs) -> onnx.ModelProto:
    """The operator as the one node of a model."""
    outputs = {"out": work.output, **work.more_outputs}
    op_type = work.operator.split()[0]
    node = onnx.helper.make_node(op_type, list(inputs), list(outputs), domain="aclnn", **work.attributes)
    given = [_declared(name, _NAMES[value.dtype], value.shape) for name, value in inputs.items()]
    made = [_declared(name, work.dtype, shape) for name, shape in outputs.items()]
    imports = [onnx.helper.make_opsetid("", _OPSET), onnx.helper.make_opsetid("aclnn", 1)]
    graph = onnx.helper.make_graph([node], "main", given, made)
    return onnx.helper.make_model(graph, opset_imports=imports, ir_version=10)


def plain_model(work: Work, inputs: Inputs) -> onnx.ModelProto:
    """The nodes of exporters; other floats than float32 are cast on their way in and out, as onnxruntime's CPU must."""
    assert work.plain is not None
    casts = "".join(f"{name} = Cast<to=1>({name}_in)\n" for name, x in inputs.items() if x.is_floating_point())
    given = [
        f"{_onnx_name(_NAMES[x.dtype])}[{_dims(x.shape)}] {name}{'_in' if x.is_floating_point() else ''}"
        for name, x in inputs.items()
    ]
    return onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["": {_OPSET}]>
        main ({", ".join(given)}) => ({_onnx_name(work.dtype)}[{_dims(work.output)}] out) {{
        {casts} {work.plain}
        out = Cast<to={_element(work.dtype)}>(result) }}""")


def _dims(shape: Sequence[int]) -> str:
    return ",".join(map(str, shape))


def _onnx_name(dtype: str) -> str:
    return {"float32": "float", "float64": "double"}.get(dtype, dtype)


def _element(dtype: str) -> int:
    return int(onnx.TensorProto.DataType.Value(_onnx_name(dtype).upper()))


def _declared(name: str, dtype: str, shape: Sequence[int]) -> onnx.ValueInfoProto:
    return onnx.helper.make_tensor_value_info(name, _element(dtype), list(shape))


def works(*, full: bool) -> Iterator[Work]:
    """Every work; without `full`, those of ordinary data in sizes S and M (CTC: D too)."""
    for dtype in ("float32", "bfloat16", "float16"):
        for work in _of_dtype(dtype):
            if full or (work.size in "SM" and not work.case and dtype != "float16"):
                yield work
    for dtype in ("float32", "float64"):
        for size, shape in CTC.items():
            if full or (size in "SMD" and dtype == "float32"):
                yield _ctc_loss(size, dtype, *shape)
                yield _ctc_loss_backward(size, dtype, *shape)


CROSS_ENTROPY = {"S": (128, 1000), "M": (256, 32000), "L": (768, 128256)}
MSE = {"S": (256, 512), "M": (4096, 1024), "L": (96 << 10, 1024)}
SOFTMAX = {"S": (1, 8, 128, 128), "M": (2, 12, 512, 512), "L": (2, 8, 2048, 2048)}
GROUPED = {"S": (512, 512, 16), "M": (8192, 1024, 128), "L": (65536, 2048, 128)}  # rows, columns, groups
GROUPED_3D = {"S": (8, 64, 512), "M": (64, 128, 1024), "L": (128, 512, 2048)}
CTC = {"S": (50, 4, 64, 10), "M": (400, 16, 1024, 60), "L": (800, 32, 4096, 100), "D": (1500, 32, 32, 200)}
"""T, N, C and the length of the targets."""


def _of_dtype(dtype: str) -> Iterator[Work]:
    for size, shape in CROSS_ENTROPY.items():
        yield cross_entropy(size, "", dtype, shape)
    for size, shape in MSE.items():
        yield _mse(size, "", dtype, (), shape, shape)
    for size, shape4 in SOFTMAX.items():
        yield _softmax(size, dtype, shape4)
    for size, grouped in GROUPED.items():
        yield _grouped(size, "", dtype, grouped)
    for size, shape3 in GROUPED_3D.items():
        yield _grouped_3d(size, dtype, shape3)
    rows, classes = CROSS_ENTROPY["L"]
    yield cross_entropy("L", "odd classes", dtype, (rows, classes + 1))
    yield cross_entropy("L", "log-probs of -100", dtype, (rows, classes))
    yield cross_entropy("L", "ignored rows", dtype, (rows, classes))
    large = MSE["L"]
    yield _mse("L", "full gradient", dtype, large, large, large)
    yield _mse("L", "row target", dtype, (), large, (1, large[1]))
    yield _mse("L", "column target", dtype, (), large, (large[0], 1))
    yield _grouped("L", "one group", dtype, (*GROUPED["L"][:2], 1))
    yield _grouped("L", "mostly empty groups", dtype, (*GROUPED["L"][:2], 2048))


def _normal(shape: Sequence[int], dtype: str, seed: int) -> Tensor:
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed)).to(DTYPES[dtype])


def _rows(shape: Sequence[int]) -> slice:
    return slice(0, max(1, _PART // math.prod(shape[1:])))


def cross_entropy(size: str, case: str, dtype: str, shape: tuple[int, int]) -> Work:
    rows, classes = shape
    width = DTYPES[dtype].itemsize

    def inputs() -> Inputs:
        target = torch.randint(0, classes, (rows,), generator=torch.Generator().manual_seed(1))
        if case == "ignored rows":
            target.fill_(-100)
        if case == "log-probs of -100":
            # What a trained model gives: one class has all of the probability.
            log_prob = torch.full(shape, -100.0) + torch.rand(shape)
            log_prob.scatter_(1, target[:, None], 0.0)
        else:
            log_prob = torch.randn(shape, generator=torch.Generator().manual_seed(0)).log_softmax(1)
        one = torch.ones((), dtype=DTYPES[dtype])
        return {"grad_loss": one, "log_prob": log_prob.to(DTYPES[dtype]), "target": target}

    def with_total(given: Inputs) -> Inputs:
        return {**given, "total_weight": torch.tensor(float((given["target"] != -100).sum()), dtype=DTYPES[dtype])}

    def fresh(given: Inputs) -> Tensor:
        grad, log_prob, target, total = given.values()
        grad = aten.nll_loss_backward(grad, log_prob, target, None, 1, -100, total)
        out: Tensor = aten._log_softmax_backward_data(grad, log_prob, 1, log_prob.dtype)
        return out

    def preallocated(given: Inputs, out: Tensor) -> None:
        grad, log_prob, target, total = given.values()
        middle = scratch.setdefault("grad", torch.empty_like(out))
        aten.nll_loss_backward.grad_input(grad, log_prob, target, None, 1, -100, total, grad_input=middle)
        aten._log_softmax_backward_data.out(middle, log_prob, 1, log_prob.dtype, out=out)

    scratch: dict[str, Tensor] = {}

    def reference(given: Inputs, part: slice) -> Tensor:
        target = given["target"][part]
        wanted = given["log_prob"][part].double().exp()
        kept = target != -100
        wanted[kept, target[kept]] = torch.expm1(given["log_prob"][part].double()[kept, target[kept]])
        wanted[~kept] = 0
        return wanted / max(int((given["target"] != -100).sum()), 1)

    plain = f"""
        axis = Constant<value_ints=[1]>()
        shape = Constant<value_ints=[{rows}, {classes}]>()
        column = Constant<value_ints=[{rows}, 1]>()
        zero = Constant<value_float=0.0>()
        zeros = Expand(zero, shape)
        share = Constant<value_float={-1 / rows}>()
        shares = Expand(share, column)
        label = Unsqueeze(target, axis)
        minus_one_hot = ScatterElements<axis=1>(zeros, label, shares)
        scaled = Mul(minus_one_hot, grad_loss)
        total = ReduceSum<keepdims=1>(scaled, axis)
        p = Exp(log_prob)
        product = Mul(p, total)
        result = Sub(scaled, product)
    """
    least = (1 if case == "ignored rows" else 2) * rows * classes * width
    # Exporters handle ignored rows by some more nodes, which are not written down here.
    shown = None if case == "ignored rows" else plain
    operator = "CrossEntropyLossGrad"
    common = (inputs, shape, fresh, preallocated, reference, _rows(shape), shown)
    work = Work(operator, size, case, dtype, least, 1, True, *common)
    return replace(work, attributes={"reduction": "mean"}, peer_inputs=with_total)


def _mse(size: str, case: str, dtype: str, *shapes: tuple[int, ...]) -> Work:
    output = np.broadcast_shapes(*shapes)
    names = ("grad_output", "self", "target")
    count = math.prod(shapes[1])

    def inputs() -> Inputs:
        return {name: _normal(shape, dtype, seed) for seed, (name, shape) in enumerate(zip(names, shapes, strict=True))}

    def fresh(given: Inputs) -> Tensor:
        grad, own, target = given.values()
        out: Tensor = aten.mse_loss_backward(grad, own, target.expand(output), 1)
        return out

    def preallocated(given: Inputs, out: Tensor) -> None:
        grad, own, target = given.values()
        aten.mse_loss_backward.grad_input(grad, own, target.expand(output), 1, grad_input=out)

    def reference(given: Inputs, part: slice) -> Tensor:
        grad, own, target = (x.expand(output)[part].double() for x in given.values())
        return 2 * (own - target) * grad / count

    plain = f"""
        difference = Sub(self, target)
        scale = Constant<value_float={2 / count}>()
        scaled = Mul(difference, scale)
        result = Mul(scaled, grad_output)
    """
    least = sum(math.prod(shape) for shape in (*shapes, output)) * DTYPES[dtype].itemsize
    reads = sum(shape == output for shape in shapes)
    common = (inputs, output, fresh, preallocated, reference, _rows(output), plain)
    return Work("MseLossBackward", size, case, dtype, least, reads, True, *common)


def _softmax(size: str, dtype: str, shape: tuple[int, int, int, int]) -> Work:
    batch, _, queries, keys = shape
    scale = 0.125

    def inputs() -> Inputs:
        generator = torch.Generator().manual_seed(2)
        mask = torch.rand((batch, 1, queries, keys), generator=generator) < 0.3
        y = torch.randn(shape, generator=generator).masked_fill(mask, -torch.inf).softmax(-1)
        return {"grad_output": _normal(shape, dtype, 0), "y": y.to(DTYPES[dtype]), "mask": mask}

    def fresh(given: Inputs) -> Tensor:
        grad, y, mask = given.values()
        raw: Tensor = aten._softmax_backward_data(grad, y, -1, y.dtype)
        return (raw * scale).masked_fill(mask, 0.0)

    def preallocated(given: Inputs, out: Tensor) -> None:
        grad, y, mask = given.values()
        aten._softmax_backward_data.out(grad, y, -1, y.dtype, grad_input=out)
        out.mul_(scale).masked_fill_(mask, 0.0)

    def reference(given: Inputs, part: Any) -> Tensor:
        grad, y = given["grad_output"][part].double(), given["y"][part].double()
        mask = given["mask"].expand(shape)[part]
        return (scale * y * (grad - (grad * y).sum(-1, keepdim=True))).masked_fill(mask, 0.0)

    plain = f"""
        last = Constant<value_ints=[-1]>()
        product = Mul(grad_output, y)
        total = ReduceSum<keepdims=1>(product, last)
        weighted = Mul(y, total)
        raw = Sub(product, weighted)
        scale = Constant<value_float={scale}>()
        scaled = Mul(raw, scale)
        zero = Constant<value_float=0.0>()
        result = Where(mask, zero, scaled)
    """
    least = 3 * math.prod(shape) * DTYPES[dtype].itemsize + batch * queries * keys
    part = (slice(0, 1), slice(0, 1), slice(0, max(1, _PART // keys)))
    common = (inputs, shape, fresh, preallocated, reference, part, plain)
    work = Work("ScaledMaskedSoftmaxBackward", size, "", dtype, least, 2, True, *common)
    return replace(work, attributes={"scale": scale})


def _grouped(size: str, case: str, dtype: str, sizes: tuple[int, int, int]) -> Work:
    rows, columns, groups = sizes

    def inputs() -> Inputs:
        if case == "mostly empty groups":
            ends = torch.full((groups,), rows // 2)
            ends[: groups // 2] = rows // 3
        else:
            ends = torch.randint(0, rows + 1, (groups,), generator=torch.Generator().manual_seed(3)).sort().values
        ends[-1] = rows
        return {"grad_y": _normal((rows, columns), dtype, 0), "group_idx": ends}

    def index(given: Inputs) -> Tensor:
        ends = given["group_idx"]
        return torch.repeat_interleave(torch.arange(groups), torch.diff(ends, prepend=ends.new_zeros(1)))

    def with_index(given: Inputs) -> Inputs:
        return {"grad_y": given["grad_y"], "index": index(given)}

    def fresh(given: Inputs) -> Tensor:
        grad, own = given.values()
        return torch.index_add(grad.new_zeros(groups, columns), 0, own, grad)

    def preallocated(given: Inputs, out: Tensor) -> None:
        grad, own = given.values()
        torch.index_add(out.zero_(), 0, own, grad, out=out)

    def reference(given: Inputs, part: Any) -> Tensor:
        own = given["grad_y"][part].double()
        return own.new_zeros(groups, own.shape[1]).index_add(0, index(given), own)

    plain = f"""
        shape = Constant<value_ints=[{groups}, {columns}]>()
        zero = Constant<value_float=0.0>()
        zeros = Expand(zero, shape)
        last = Constant<value_ints=[-1]>()
        place = Unsqueeze(index, last)
        result = ScatterND<reduction="add">(zeros, place, grad_y)
    """
    least = (rows + groups) * columns * DTYPES[dtype].itemsize
    part = (slice(None), slice(0, max(1, _PART // rows)))
    common = ((groups, columns), fresh, preallocated, reference, part, plain)
    work = Work("GroupedBiasAddGrad", size, case, dtype, least, 1, False, inputs, *common)
    return replace(work, peer_inputs=with_index)


def _grouped_3d(size: str, dtype: str, shape: tuple[int, int, int]) -> Work:
    groups, rows, columns = shape

    def reference(given: Inputs, part: Any) -> Tensor:
        groups_of, columns_of = part
        return given["grad_y"][groups_of, :, columns_of].double().sum(1)

    plain = """
        axis = Constant<value_ints=[1]>()
        result = ReduceSum<keepdims=0>(grad_y, axis)
    """
    return Work(
        operator="GroupedBiasAddGrad 3-D",
        size=size,
        case="",
        dtype=dtype,
        bytes=groups * (rows + 1) * columns * DTYPES[dtype].itemsize,
        reads=1,
        writes=False,
        inputs=lambda: {"grad_y": _normal(shape, dtype, 0)},
        output=(groups, columns),
        fresh=lambda given: given["grad_y"].sum(1),
        preallocated=lambda given, out: torch.sum(given["grad_y"], 1, out=out),
        reference=reference,
        part=(slice(None), slice(0, max(1, _PART // (groups * rows)))),
        plain=plain,
    )


def _ctc_inputs(dtype: str, steps: int, items: int, classes: int, labels: int) -> Inputs:
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn((steps, items, classes), generator=generator, dtype=DTYPES[dtype])
    return {
        "log_probs": logits.log_softmax(2),
        "targets": torch.randint(1, classes, (items, labels), generator=generator),
        "input_lengths": torch.full((items,), steps),
        "target_lengths": torch.full((items,), labels),
    }


def _ctc_loss(size: str, dtype: str, steps: int, items: int, classes: int, labels: int) -> Work:
    width = DTYPES[dtype].itemsize
    states = 2 * labels + 1

    def forward(*given: Tensor) -> Tensor:
        nll: Tensor = aten._ctc_loss(*given, 0, False)[0]
        return nll

    def reference(given: Inputs, part: slice) -> Tensor:
        log_probs, *others = given.values()
        return forward(log_probs[:, part].double(), *(x[part] for x in others))

    return Work(
        operator="CtcLoss",
        size=size,
        case="",
        dtype=dtype,
        bytes=(min(classes, states) + states) * steps * items * width,
        reads=1,
        writes=True,
        inputs=lambda: _ctc_inputs(dtype, steps, items, classes, labels),
        output=(items,),
        fresh=lambda given: forward(*given.values()),
        preallocated=None,
        reference=reference,
        part=slice(0, 2),
        more_outputs={"log_alpha": (items, steps, states)},
    )


def _ctc_loss_backward(size: str, dtype: str, steps: int, items: int, classes: int, labels: int) -> Work:
    width = DTYPES[dtype].itemsize

    def inputs() -> Inputs:
        given = _ctc_inputs(dtype, steps, items, classes, labels)
        nll, log_alpha = aten._ctc_loss(*given.values(), 0, False)
        grad = torch.ones(items, dtype=DTYPES[dtype])
        return {"grad_out": grad, **given, "neg_log_likelihood": nll, "log_alpha": log_alpha}

    def fresh(given: Inputs) -> Tensor:
        out: Tensor = aten._ctc_loss_backward(*given.values(), 0, False)
        return out

    def reference(given: Inputs, part: Any) -> Tensor:
        _, items_of = part
        grad, log_probs, *others = given.values()
        others = [x[items_of].double() if x.is_floating_point() else x[items_of] for x in others]
        wide = (grad[items_of].double(), log_probs[:, items_of].double(), *others)
        out: Tensor = aten._ctc_loss_backward(*wide, 0, False)
        return out

    return Work(
        operator="CtcLossBackward",
        size=size,
        case="",
        dtype=dtype,
        bytes=(2 * classes + 2 * labels + 1) * steps * items * width,
        reads=1,
        writes=True,
        inputs=inputs,
        output=(steps, items, classes),
        fresh=fresh,
        preallocated=None,
        reference=reference,
        part=(slice(None), slice(0, 2)),
    )
