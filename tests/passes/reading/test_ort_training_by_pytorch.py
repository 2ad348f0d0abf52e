"""What operators of onnxruntime-training are for the passes, as forms and as arrays, against PyTorch in float64."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from evaluation import Array, Evaluation
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from ort_training.operator_cases import CASES, OperatorCase, gradient, normal
from producers import run
from torch import Tensor
from torch.nn import functional as F

from gradfuse import explain, fuse
from gradfuse.custom_ops import functions
from gradfuse.passes.reading import Forms, has_reader, ort_training
from gradfuse.testing import assert_gradients_close

TARGET = torch.tensor([1, 0, 3, 2, 1])
INDEX = torch.tensor([[2], [0], [2]])
MORE = [
    gradient("SoftmaxGrad", lambda x: x.flatten(1).softmax(1).view_as(x), [normal(2, 3, 4)], lambda dy, y, x: (dy, y)),
    gradient(
        "LogSoftmaxGrad",
        lambda x: x.log_softmax(2),
        [normal(2, 3, 4)],
        lambda dy, y, x: (dy, y),
        attributes={"axis": 2},
    ),
    *(
        gradient(
            "SoftmaxCrossEntropyLossInternalGrad",
            lambda z, *w, how=how: F.cross_entropy(z, TARGET, w[0] if w else None, reduction=how, ignore_index=1),
            [normal(5, 4), *weight],
            lambda dy, y, z, *w: [dy, z.log_softmax(1), TARGET, w[0] if w else None, torch.tensor(1)],
            attributes={"reduction": how},
        )
        for how in ("mean", "sum", "none")
        for weight in ([], [normal(4).abs()])
    ),
    OperatorCase(
        "SoftmaxCrossEntropyLossInternalGrad",
        [normal(5, 4), normal(5, 4, seed=1)],
        lambda z, more: [torch.ones((), dtype=z.dtype), z.log_softmax(1), TARGET, None, None, more],
        lambda z, more: [(z.softmax(1) - F.one_hot(TARGET, 4)) / 5 + more],
    ),
    gradient(
        "GatherNDGrad",
        lambda x: x[torch.arange(3), INDEX[:, 0]],
        [normal(3, 4, 2)],
        lambda dy, y, x: [torch.tensor(x.shape), INDEX, dy],
        attributes={"batch_dims": 1},
    ),
    gradient(
        "SliceGrad",
        lambda x: x[1:4, -3:],
        [normal(5, 7)],
        lambda dy, y, x: [dy, torch.tensor(x.shape), torch.tensor([1, -3]), torch.tensor([4, 99])],
    ),
    OperatorCase(
        "FusedMatMul",
        [normal(2, 5, 3), normal(4, 3)],
        lambda a, b: [a, b],
        lambda a, b: [a @ b.transpose(0, 1)],
        {"transB": 1},
    ),
]
READ = [case for case in (*CASES, *MORE) if case.op_type in ort_training.ON_ARRAYS]
RUN = [*READ, *(case for case in CASES if case.op_type in ort_training.WITHOUT_FORM)]
CONSTANTS = {
    "GatherElementsGrad": {1},
    "GatherGrad": {0},
    "GatherNDGrad": {0},
    "SliceGrad": {1, 2, 3, 4, 5},
    "SplitTraining": {1},
    "SoftmaxCrossEntropyLossInternalGrad": {4},
}
"""Inputs that exporters write as constants, and that say where the others go."""


def _model(case: OperatorCase) -> tuple[onnx.ModelProto, dict[str, Array], list[Tensor]]:
    """A model of the node in float64, what to feed, and what PyTorch has for its outputs."""
    inputs, results = case.evaluated(torch.float64)
    arrays = {f"input_{k}": value.detach().numpy() for k, value in enumerate(inputs) if value is not None}
    names = [f"input_{k}" if value is not None else "" for k, value in enumerate(inputs)]
    constant = {f"input_{k}" for k in CONSTANTS.get(case.op_type, ())} & arrays.keys()
    outputs = [f"output_{k}" for k in range(len(results))]
    graph = helper.make_graph(
        [helper.make_node(case.op_type, names, outputs, "node", domain=case.domain, **case.attributes)],
        "one_node",
        [_described(name, arrays[name]) for name in arrays if name not in constant],
        [_described(name, result.detach().numpy()) for name, result in zip(outputs, results, strict=True)],
        [numpy_helper.from_array(arrays[name], name) for name in sorted(constant)],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(ort_training.DOMAIN, 1)]
    feeds = {name: array for name, array in arrays.items() if name not in constant}
    return helper.make_model(graph, ir_version=8, opset_imports=opsets), feeds, results


def _described(name: str, array: Array) -> onnx.ValueInfoProto:
    dtype = TensorProto.DOUBLE if array.dtype.kind == "f" else helper.np_dtype_to_tensor_dtype(array.dtype)
    return helper.make_tensor_value_info(name, dtype, array.shape)


@pytest.mark.parametrize("case", RUN, ids=str)
def test_arrays_are_those_of_pytorch(case: OperatorCase) -> None:
    model, feeds, expected = _model(case)
    with np.errstate(invalid="ignore"):
        got = ReferenceEvaluator(model, new_ops=ort_training.reference_ops()).run(None, feeds)
    for array, exact in zip(got, expected, strict=True):
        np.testing.assert_allclose(np.sort(array) if array.ndim == 1 else array, _sorted(exact), rtol=1e-12, atol=1e-14)


def _sorted(exact: Tensor) -> Array:
    """Axes have no order."""
    array = exact.detach().numpy()
    return np.sort(array) if array.ndim == 1 else array


def _in_range(case: OperatorCase) -> bool:
    """Whether indices are what forms take them for: none from the end, and some label that counts."""
    return all(array.dtype.kind != "i" or (array >= 0).all() for array in _model(case)[1].values())


@pytest.mark.parametrize("case", [c for c in READ if c.op_type != "BroadcastGradientArgs" and _in_range(c)], ids=str)
def test_forms_are_those_of_pytorch(case: OperatorCase) -> None:
    proto, feeds, expected = _model(case)
    graph = ir.from_proto(proto).graph
    forms = Forms(graph)
    (node,) = graph
    assert has_reader(node)
    tensors: dict[object, Array] = {name: array.squeeze() for name, array in feeds.items()}
    for value, exact in zip(node.outputs, expected, strict=True):
        form = forms.get(value)
        assert form is not None
        if value in forms.opaque:
            assert case.op_type in ("ConcatTraining", "FusedMatMul", "SliceGrad"), forms.why_opaque(node)
            continue
        result = Evaluation(forms.algebra, tensors, {}).form(form)
        np.testing.assert_allclose(result, exact.detach().numpy(), rtol=1e-9, atol=1e-12)


SHAPES = {
    "equal": ("n, 3", "n, 3"),
    "one row": ("1, 3", "n, 3"),
    "no rows": ("3", "n, 3"),
    "one column of one row": ("1, 1", "n, 3"),
    "rows or one row": ("4, 3", "n, 3"),
    "two sizes that are not related": ("n, 3", "m, 3"),
    "one size that may be the other": ("n, 3", "4, 3"),
}
UNREAD = {"two sizes that are not related", "one size that may be the other"}


@pytest.mark.parametrize("sizes", [{"n": 4, "m": 4}, {"n": 1, "m": 4}, {"n": 4, "m": 1}, {"n": 1, "m": 1}], ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_broadcasting_is_undone_as_sizes_demand(name: str, sizes: dict[str, int]) -> None:
    own, other = SHAPES[name]
    shapes = [tuple(sizes.get(n, 0) or int(n) for n in text.split(", ")) for text in (own, other)]
    if any(a != b and 1 not in (a, b) for a, b in zip(*(shape[::-1] for shape in shapes), strict=False)):
        return  # The shapes do not broadcast.
    whole = np.broadcast_shapes(*shapes)
    model = ir.from_onnx_text(f"""
        <ir_version: 8, opset_import: ["" : 17, "com.microsoft" : 1]>
        g (float[{own}] a, float[{other}] b, float[{other}] x) => (float[p, q] y)
        {{
            left = Shape (a)
            right = Shape (b)
            axes, others = com.microsoft.BroadcastGradientArgs (left, right)
            y = ReduceSum <keepdims = 1, noop_with_empty_axes = 1> (x, axes)
        }}
    """)
    forms = Forms(model.graph)
    (y,) = model.graph.outputs
    form = forms.get(y)
    assert form is not None
    assert (y in forms.opaque) == (name in UNREAD)
    if y in forms.opaque or whole != shapes[1]:
        return
    x = np.random.default_rng(0).normal(size=whole)
    missing = len(whole) - len(shapes[0])
    stretched = tuple(k for k, n in enumerate(whole) if k < missing or (shapes[0][k - missing] == 1 and n != 1))
    got = Evaluation(forms.algebra, {"x": x}, sizes).form(form)
    np.testing.assert_allclose(got.reshape(-1), x.sum(stretched).reshape(-1), rtol=1e-12)


def _loss_of_rows(rows: str, factors: str) -> ir.Model:
    return ir.from_onnx_text(f"""
        <ir_version: 8, opset_import: ["" : 17, "com.microsoft" : 1]>
        g (float[batch, 4, 5] x, int64[{rows}] labels, float[{factors}] factor) => (float[batch, 4, 5] dx)
        <int64[2] flat = {{-1, 5}}>
        {{
            scores = Reshape (x, flat)
            loss, log_prob = SoftmaxCrossEntropyLoss <reduction = "none"> (scores, labels)
            rows = com.microsoft.SoftmaxCrossEntropyLossGrad <reduction = "none"> (factor, log_prob, labels)
            shape = Shape (x)
            dx = Reshape (rows, shape)
        }}
    """)


def test_labels_have_as_many_rows_as_scores() -> None:
    result = fuse(_loss_of_rows("tokens", "tokens"), policy="all")
    assert [fusion.op for fusion in result.report.fusions] == ["CrossEntropyLossGrad"], result.report
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 4, 5, generator=generator, dtype=torch.float64).requires_grad_()
    labels, factor = torch.randint(0, 5, (12,), generator=generator), torch.rand(12, generator=generator)
    (exact,) = torch.autograd.grad(F.cross_entropy(x.view(-1, 5), labels, reduction="none"), [x], factor.double())
    functions.attach(result.model)
    feeds = {"x": x.detach().float().numpy(), "labels": labels.numpy(), "factor": factor.numpy()}
    got = run(ir.to_proto(result.model), feeds)["dx"]
    assert_gradients_close(got, exact.float(), exact, np.float32)


def test_what_only_labels_are_known_to_have_is_said_of_nothing_else() -> None:
    report = fuse(_loss_of_rows("batch", "batch"), policy="all").report
    assert not report.fusions
    assert not any(miss.bug for miss in report.near_misses)
    (region,) = explain(_loss_of_rows("batch", "batch")).regions
    assert region.op == "CrossEntropyLossGrad" and "SoftmaxCrossEntropyLossGrad" in region.reason


@pytest.mark.parametrize(
    "node",
    [
        "LogSoftmaxGrad_13 <axis = 0> (dy, y)",
        "LogSoftmaxGrad <axis = 0> (dy, y)",
        'SoftmaxCrossEntropyLossInternalGrad <reduction = "sum"> (one, y, labels, , , more)',
    ],
)
def test_what_is_almost_cross_entropy_is_left_alone(node: str) -> None:
    model = ir.from_onnx_text(f"""
        <ir_version: 8, opset_import: ["" : 17, "com.microsoft" : 1]>
        g (float[6, 5] x, int64[6] labels, float[6, 5] more) => (float[6, 5] dx)
        <int64[2] shape = {{6, 5}}, int64[1] last = {{1}}, float one = {{1}},
         float[6, 1] ones = {{-1, -1, -1, -1, -1, -1}}>
        {{
            y = LogSoftmax <axis = 1> (x)
            index = Unsqueeze (labels, last)
            dy = com.microsoft.GatherElementsGrad <axis = 1> (ones, shape, index)
            dx = com.microsoft.{node}
        }}
    """)
    report = fuse(model, policy="all").report
    assert not report.fusions
    assert not any(miss.bug for miss in report.near_misses)
