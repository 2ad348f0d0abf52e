"""What a model keeps on its way through `fuse` and back through `expand`: its results, and all that is not replaced."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import small_models
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from producers import COMMITTED, Case, cases, run, with_seeds

import gradfuse
from gradfuse import ModelError, expand, fuse
from gradfuse.testing import assert_gradients_close

Array = np.ndarray[Any, Any]


def _cases() -> list[Any]:
    """The cases that onnxruntime runs; those beyond the committed selection for the slow sweep."""
    committed = {f"{p.parent.name}/{p.stem}" for p in COMMITTED.glob("*/*.onnx")}
    return [
        pytest.param(c, id=str(c), marks=() if str(c) in committed else pytest.mark.slow) for c in cases() if c.runs
    ]


def checks(model: onnx.ModelProto) -> dict[str, bool]:
    """Which of onnx's own checks a model passes."""
    passed = {}
    for name, check in (
        ("checker", lambda: onnx.checker.check_model(model, full_check=True)),
        ("shapes", lambda: onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True)),
    ):
        try:
            check()
            passed[name] = True
        except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError):
            passed[name] = False
    return passed


def assert_computes_as(model: onnx.ModelProto, wanted: onnx.ModelProto, feeds: Mapping[str, Array]) -> None:
    """The same outputs in the same order, beyond what rounding may do, in stock onnxruntime without the library."""
    expected, got = run(wanted, feeds), run(model, feeds)
    assert list(got) == list(expected)
    largest = max(float(np.abs(a.astype(np.float64)).max(initial=0)) for a in expected.values())
    for name, value in expected.items():
        terms = (4 if value.dtype == np.float32 else 32) * largest
        assert_gradients_close(got[name], value, value.astype(np.float64), value.dtype, terms=terms)


def operators(model: onnx.ModelProto) -> Counter[str]:
    """The fused operators of a model, with their attributes and the number of inputs that are there."""
    nodes = [node for graph in ir.from_proto(model).graphs() for node in graph if node.domain == "aclnn"]
    return Counter(
        f"{node.op_type}{sorted((a.name, a.value) for a in node.attributes.values())}, "
        f"{sum(v is not None for v in node.inputs)} inputs"
        for node in nodes
    )


def seeded(path: Path) -> onnx.ModelProto:
    return ir.to_proto(with_seeds(ir.load(path)))


@pytest.mark.parametrize("case", _cases())
@pytest.mark.sampled(every=2)
def test_corpus_survives_the_way_there_and_back(case: Case) -> None:
    model = seeded(case.path)
    passes = checks(model)
    result = fuse(model, policy="all")
    fused = result.model
    if not result.report.fusions:
        assert fused == model
        assert expand(model) == model
        return
    again = fuse(fused, policy="all")
    assert not again.report.fusions
    assert again.model.SerializeToString(deterministic=True) == fused.SerializeToString(deterministic=True)
    plain = expand(fused)
    assert {n.domain for n in plain.graph.node} <= {""}
    assert operators(fuse(plain, policy="all").model) == operators(fused)
    for rewritten in (fused, plain):
        assert {name for name, ok in passes.items() if ok} <= {name for name, ok in checks(rewritten).items() if ok}
        assert_keeps(rewritten, model)
        assert_computes_as(rewritten, model, case.arrays("in"))


ROWS = [64, 32]
CROSS_ENTROPY = {
    f"{reduction}, {smoothing}, {len(weight)} weights": (
        "CrossEntropyLossGrad",
        [("f", [64] if reduction == "none" else []), ("f", ROWS), ("i", [64]), *weight],
        {"reduction": reduction, "label_smoothing": smoothing, "ignore_index": ignored},
    )
    for reduction, (smoothing, ignored), weight in itertools.product(
        ("mean", "sum", "none"), ((0.0, -100), (0.125, 3)), ([], [("w", [32])])
    )
}
ATTENTION = [("f", [2, 4, 16, 16])] * 2
NODES: dict[str, tuple[str, list[tuple[str, list[int]]], dict[str, Any]]] = {
    **CROSS_ENTROPY,
    **{f"error, {k}": ("MseLossBackward", [("f", []), ("f", ROWS), ("f", ROWS)], {"reduction": k}) for k in range(3)},
    "no mask": ("ScaledMaskedSoftmaxBackward", ATTENTION, {}),
    "scaled": ("ScaledMaskedSoftmaxBackward", ATTENTION, {"scale": 0.25}),
    "mask": ("ScaledMaskedSoftmaxBackward", [*ATTENTION, ("m", [2, 4, 16, 16])], {"scale": 0.25}),
    "broadcast mask": ("ScaledMaskedSoftmaxBackward", [*ATTENTION, ("m", [2, 1, 16, 16])], {}),
    "ends": ("GroupedBiasAddGrad", [("f", ROWS), ("e", [4])], {}),
    "no ends": ("GroupedBiasAddGrad", [("f", [4, 16, 32])], {}),
}


@pytest.mark.parametrize("real", ["FLOAT", "FLOAT16"])
@pytest.mark.parametrize("name", NODES)
def test_a_node_that_is_expanded_is_found_again(name: str, real: str) -> None:
    op, inputs, attributes = NODES[name]
    types = {"f": real, "w": "FLOAT", "i": "INT64", "e": "INT32", "m": "BOOL"}
    given = [
        helper.make_tensor_value_info(f"x{k}", TensorProto.DataType.Value(types[kind]), shape)
        for k, (kind, shape) in enumerate(inputs)
    ]
    node = helper.make_node(op, [v.name for v in given], ["y"], domain="aclnn", **attributes)
    shape = [4, 32] if op == "GroupedBiasAddGrad" else inputs[1][1]
    result = helper.make_tensor_value_info("y", TensorProto.DataType.Value(real), shape)
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("aclnn", 1)]
    model = helper.make_model(helper.make_graph([node], "g", given, [result]), opset_imports=opsets, ir_version=10)
    found = fuse(expand(model), policy="all").model
    assert {n.op_type for n in found.graph.node} <= {op, "Constant"}  # which a body may have and not use
    (again,) = (n for n in found.graph.node if n.domain)
    assert (again.op_type, list(again.input), list(again.output)) == (op, list(node.input), ["y"])
    chosen = {a.name: onnx.helper.get_attribute_value(a) for a in again.attribute}
    assert {k: chosen[k].decode() if isinstance(chosen[k], bytes) else chosen[k] for k in attributes} == attributes


# What a model carries beside its computation


def assert_keeps(rewritten: onnx.ModelProto, model: onnx.ModelProto) -> None:
    """All of the model but the nodes that were replaced, with what only they read, is in the rewritten model."""
    for name in ("producer_name", "producer_version", "domain", "model_version", "doc_string"):
        assert getattr(rewritten, name) == getattr(model, name)
    assert rewritten.ir_version in (model.ir_version, 10)
    assert {(o.domain, o.version) for o in model.opset_import} <= {
        (o.domain, o.version) for o in rewritten.opset_import
    }
    assert {(p.key, p.value) for p in model.metadata_props} <= {(p.key, p.value) for p in rewritten.metadata_props}
    functions = {(f.domain, f.name, f.overload): f for f in rewritten.functions}
    for function in model.functions:
        assert canonical(functions[function.domain, function.name, function.overload]) == canonical(function)
    assert_graph_keeps(rewritten.graph, model.graph)


def assert_graph_keeps(rewritten: onnx.GraphProto, graph: onnx.GraphProto) -> None:
    assert (rewritten.name, rewritten.doc_string) == (graph.name, graph.doc_string)
    assert list(rewritten.metadata_props) == list(graph.metadata_props)
    assert list(rewritten.input) == list(graph.input)
    assert list(rewritten.output) == list(graph.output)
    assert list(rewritten.quantization_annotation) == list(graph.quantization_annotation)
    outputs = {out: n for n in graph.node for out in n.output}
    for node in rewritten.node:
        source = outputs.get(node.output[0])
        if source is not None and source.op_type == node.op_type and source.name == node.name:
            assert canonical(node) == canonical(source)
    infos = {v.name: v for v in graph.value_info}
    for info in rewritten.value_info:
        assert info == infos.get(info.name, info)
    tensors = {t.name: t for t in rewritten.initializer}
    read = {name for n in graph.node for name in n.input}
    inputs = {i.name for i in graph.input}
    for tensor in graph.initializer:
        # An initializer that only replaced nodes read goes with them; one that is an input or that nothing reads stays.
        if tensor.name in tensors:
            assert tensors[tensor.name] == tensor
        else:
            assert tensor.name in read and tensor.name not in inputs


def canonical(message: Any) -> Any:
    """A node or function without a difference between an empty field and none, and with attributes in order of name."""
    copy = type(message)()
    copy.CopyFrom(message)
    for node in copy.node if isinstance(copy, onnx.FunctionProto) else [copy]:
        for name in ("domain", "overload", "doc_string", "name"):
            if not getattr(node, name):
                node.ClearField(name)
        attributes = sorted(node.attribute, key=lambda a: a.name)
        del node.attribute[:]
        node.attribute.extend(attributes)
    return copy


def decorated() -> onnx.ModelProto:
    """An attention's backward pass with everything around it that ONNX has a field for."""
    model = small_models.attention()
    model.producer_name, model.producer_version = "maker", "1.2"
    model.domain, model.model_version, model.doc_string = "org.example", 7, "a model"
    model.metadata_props.add(key="licence", value="none")
    model.opset_import.extend([helper.make_opsetid("example", 3), helper.make_opsetid("ai.onnx.ml", 3)])
    graph = model.graph
    graph.doc_string = "a graph"
    graph.metadata_props.add(key="graph", value="yes")
    for k, node in enumerate(graph.node):
        node.name, node.doc_string = f"node{k}", f"doc {k}"
        node.metadata_props.add(key="place", value=str(k))
    for value in (*graph.input, *graph.output):
        value.doc_string = f"doc of {value.name}"
        value.metadata_props.add(key="value", value=value.name)
    shape: list[int | str | None] = ["b", 3, "s", "s"]
    graph.value_info.append(helper.make_tensor_value_info("masked", TensorProto.FLOAT, shape, doc_string="scores"))
    graph.value_info[-1].metadata_props.add(key="value", value="masked")
    graph.initializer.append(numpy_helper.from_array(np.ones(3, np.float32), "unused"))
    graph.initializer.append(numpy_helper.from_array(np.arange(4, dtype=np.float32), "default"))
    graph.input.append(helper.make_tensor_value_info("default", TensorProto.FLOAT, [4]))
    for name in ("prob", "scores_grad"):
        annotation = graph.quantization_annotation.add(tensor_name=name)
        annotation.quant_parameter_tensor_names.add(key="SCALE_TENSOR", value="unused")
    inner = helper.make_graph(
        [helper.make_node("Neg", ["prob"], ["inner"])],
        "inner_graph",
        [],
        [helper.make_tensor_value_info("inner", TensorProto.FLOAT, shape)],
    )
    custom = helper.make_node(
        "Custom", ["prob", "scores_grad"], ["custom"], "custom_node", domain="example", weights=[1.5, 2.5], body=inner
    )
    custom.attribute.append(helper.make_attribute("graphs", [inner]))
    custom.attribute.append(helper.make_attribute("tensor", numpy_helper.from_array(np.ones(2, np.int8), "t")))
    graph.node.append(custom)
    graph.output.append(helper.make_tensor_value_info("custom", TensorProto.FLOAT, [2]))
    opsets = [helper.make_opsetid("", 20)]
    for overload, op in (("first", "Identity"), ("second", "Neg")):
        function = helper.make_function(
            "example", "Local", ["a"], ["b"], [helper.make_node(op, ["a"], ["b"])], opsets, overload=overload
        )
        function.doc_string = f"the {overload}"
        function.metadata_props.add(key="function", value=overload)
        model.functions.append(function)
    leaky = helper.make_node("LeakyRelu", ["a"], ["b"])
    leaky.attribute.append(onnx.AttributeProto(name="alpha", ref_attr_name="slope", type=onnx.AttributeProto.FLOAT))
    model.functions.append(helper.make_function("example", "Leaky", ["a"], ["b"], [leaky], opsets, ["slope"]))
    onnx.checker.check_model(model)
    return model


@pytest.mark.parametrize("kind", ["proto", "path", "command"])
def test_everything_around_a_match_is_kept(kind: str, tmp_path: Path) -> None:
    model = decorated()
    source, middle, target = (tmp_path / name for name in ("in.onnx", "fused.onnx", "out.onnx"))
    onnx.save(model, source)
    if kind == "command":
        from gradfuse import cli

        assert cli.run(["fuse", str(source), str(middle), "--policy", "all"]) == 0
        assert cli.run(["expand", str(middle), str(target)]) == 0
        fused, plain = onnx.load(middle), onnx.load(target)
    else:
        fused = fuse(model if kind == "proto" else source, policy="all").model
        plain = expand(fused)
    assert [n.op_type for n in fused.graph.node if n.domain == "aclnn"] == ["ScaledMaskedSoftmaxBackward"]
    for rewritten in (fused, plain):
        onnx.checker.check_model(rewritten)
        assert_keeps(rewritten, model)
        names = {t.name for t in rewritten.graph.initializer}
        assert {"unused", "default"} <= names
        assert canonical(rewritten.graph.node[-1]) == canonical(model.graph.node[-1])
    assert "aclnn" not in {o.domain for o in plain.opset_import}
    assert [p.key for p in plain.metadata_props] == ["licence"]


@pytest.mark.parametrize("place", ["graph", "body"])
def test_sparse_initializers_are_kept_as_dense_ones(place: str) -> None:
    model = decorated()
    values = numpy_helper.from_array(np.ones(2, np.float32), "sparse")
    sparse = helper.make_sparse_tensor(values, numpy_helper.from_array(np.array([1, 3]), ""), [5])

    def graph_of(model: onnx.ModelProto) -> onnx.GraphProto:
        if place == "graph":
            return model.graph
        body: onnx.GraphProto = next(a.g for a in model.graph.node[-1].attribute if a.name == "body")
        return body

    graph_of(model).sparse_initializer.append(sparse)
    dense = next(t for t in graph_of(fuse(model).model).initializer if t.name == "sparse")
    np.testing.assert_array_equal(numpy_helper.to_array(dense), np.array([0, 1, 0, 1, 0], np.float32), strict=True)


@pytest.mark.parametrize("place", ["attribute", "training_info"])
def test_what_could_not_be_kept_is_refused(place: str) -> None:
    model = decorated()
    values = numpy_helper.from_array(np.ones(2, np.float32), "sparse")
    sparse = helper.make_sparse_tensor(values, numpy_helper.from_array(np.array([1, 3]), ""), [5])
    if place == "attribute":
        model.graph.node[-1].attribute.append(helper.make_attribute("odd", sparse))
    else:
        model.training_info.add().algorithm.name = "algorithm"
    with pytest.raises(ModelError, match=r"has training_info|odd is a sparse tensor") as failure:
        fuse(model)
    assert "\n" not in str(failure.value)


# External data


@pytest.mark.parametrize("width", [8, 600_000], ids=["small", "large"])
def test_external_data_is_kept(width: int, tmp_path: Path) -> None:
    model = small_models.attention()
    weights = np.arange(width, dtype=np.float32)
    model.graph.initializer.append(numpy_helper.from_array(weights, "weights"))
    model.graph.node.append(helper.make_node("Neg", ["weights"], ["negative"]))
    model.graph.output.append(helper.make_tensor_value_info("negative", TensorProto.FLOAT, [width]))
    source = small_models.save_with_external_data(model, tmp_path / "in.onnx", "weights.bin")
    before = (tmp_path / "weights.bin").stat()
    loaded = ir.load(source)
    fused = fuse(loaded, policy="all").model
    plain = expand(fused)
    for rewritten in (fused, plain):
        tensor = rewritten.graph.initializers["weights"].const_value
        assert isinstance(tensor, ir.ExternalTensor)
        assert (tensor.location, tensor.offset, tensor.length) == ("weights.bin", 0, 4 * width)
        np.testing.assert_array_equal(tensor.numpy(), weights)
    after = (tmp_path / "weights.bin").stat()
    assert (after.st_mtime_ns, after.st_size) == (before.st_mtime_ns, before.st_size)


# Where a match may stand

SOFTMAX = """
  weighted = Mul(g, prob)
  last = Constant<value_ints=[-1]>()
  total = ReduceSum(weighted, last)
  share = Mul(prob, total)
  grad = Sub(weighted, share)
"""
HEADER = '<ir_version: 10, opset_import: ["": 20]>\n'

PLACES = {
    "the root is a graph output": (
        "m (float[4,5] z, float[4,5] g) => (float[4,5] grad) { prob = Softmax<axis=1>(z) " + SOFTMAX + "}"
    ),
    "the root is several outputs, by way of identities, in an order of their own": (
        "m (float[4,5] z, float[4,5] g) => (float[4,5] b, float[4,5] grad, float[4,5] prob, float[4,5] a) "
        "{ prob = Softmax<axis=1>(z) " + SOFTMAX + " a = Identity(grad) b = Identity(grad) }"
    ),
    "the root is used twice by one node": (
        "m (float[4,5] z, float[4,5] g) => (float[4,5] r) "
        "{ prob = Softmax<axis=1>(z) " + SOFTMAX + " r = Mul(grad, grad) }"
    ),
    "all in a branch, with inputs from the outer graph": (
        "m (float[4,5] z, float[4,5] g, bool c) => (float[4,5] r) { prob = Softmax<axis=1>(z) r = If(c) "
        "<then_branch = yes () => (float[4,5] y) {" + SOFTMAX + " y = Neg(grad) }, "
        "else_branch = no () => (float[4,5] n) { n = Neg(g) }> }"
    ),
    "half in the outer graph": (
        "m (float[4,5] z, float[4,5] g, bool c) => (float[4,5] r) { y = Abs(z) r = If(c) "
        "<then_branch = yes () => (float[4,5] n) { part = Constant<value_float=0.1>() d = Sub(y, g) "
        "grad = Mul(d, part) n = Neg(grad) }, else_branch = no () => (float[4,5] o) { o = Neg(g) }> }"
    ),
    "the result is only used in a branch": (
        "m (float[4,5] z, float[4,5] g, bool c) => (float[4,5] r) { prob = Softmax<axis=1>(z) "
        + SOFTMAX
        + " r = If(c) "
        "<then_branch = yes () => (float[4,5] y) { y = Neg(grad) }, "
        "else_branch = no () => (float[4,5] n) { n = Neg(g) }> }"
    ),
    "the result is the output of a branch": (
        "m (float[4,5] z, float[4,5] g, bool c) => (float[4,5] r) { prob = Softmax<axis=1>(z) r = If(c) "
        "<then_branch = yes () => (float[4,5] grad) {" + SOFTMAX + "}, "
        "else_branch = no () => (float[4,5] n) { n = Neg(g) }> }"
    ),
    "in a branch of a branch": (
        "m (float[4,5] z, float[4,5] g, bool c) => (float[4,5] r) { prob = Softmax<axis=1>(z) r = If(c) "
        "<then_branch = yes () => (float[4,5] y) { y = If(c) <then_branch = inner () => (float[4,5] grad) {"
        + SOFTMAX
        + "}, else_branch = other () => (float[4,5] o) { o = Abs(g) }> }, "
        "else_branch = no () => (float[4,5] n) { n = Neg(g) }> }"
    ),
    "in the body of a loop": (
        "m (float[4,5] z, float[4,5] g0, bool c) => (float[4,5] r) { prob = Softmax<axis=1>(z) "
        "trips = Constant<value_int=3>() r = Loop(trips, c, g0) "
        "<body = step (int64 i, bool on, float[4,5] g) => (bool again, float[4,5] grad) "
        "{ again = Identity(on) " + SOFTMAX + "}> }"
    ),
    "in the body of a scan": (
        "m (float[3,4,5] z, float[4,5] g0) => (float[4,5] r, float[3,4,5] all) { r, all = Scan<num_scan_inputs=1, "
        "body = step (float[4,5] g, float[4,5] row) => (float[4,5] grad, float[4,5] kept) "
        "{ prob = Softmax<axis=1>(row) " + SOFTMAX + " kept = Neg(grad) }>(g0, z) }"
    ),
}


def feeds_of(model: onnx.ModelProto) -> dict[str, Array]:
    rng = np.random.default_rng(0)
    feeds: dict[str, Array] = {}
    for value in model.graph.input:
        shape = [d.dim_value or 4 for d in value.type.tensor_type.shape.dim]
        boolean = value.type.tensor_type.elem_type == TensorProto.BOOL
        feeds[value.name] = np.full(shape, True) if boolean else rng.normal(size=shape).astype(np.float32)
    return feeds


@pytest.mark.parametrize("place", PLACES)
def test_a_match_is_fused_wherever_it_stands(place: str) -> None:
    model = onnx.parser.parse_model(HEADER + PLACES[place])
    onnx.checker.check_model(model, full_check=True)
    result = fuse(model, policy="all")
    assert result.report.fusions
    if not place.startswith("half"):  # what the outer graph computes is not known in a branch
        assert {f.op for f in result.report.fusions} == {"ScaledMaskedSoftmaxBackward"}
    assert fuse(result.model, policy="all").model == result.model
    plain = expand(result.model)
    for rewritten in (result.model, plain):
        assert checks(rewritten) == {"checker": True, "shapes": True}
        assert [o.name for o in rewritten.graph.output] == [o.name for o in model.graph.output]
        for condition in (True, False) if "c" in {i.name for i in model.graph.input} else (True,):
            feeds = feeds_of(model)
            if "c" in feeds:
                feeds["c"] = np.asarray(condition)
            assert_computes_as(rewritten, model, feeds)
    assert not [n for g in ir.from_proto(plain).graphs() for n in g if n.domain == "aclnn"]


@pytest.mark.parametrize("overload", ["", "special"])
def test_a_match_in_a_function_is_fused_and_the_other_functions_stay(overload: str) -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 20, "local": 1, "other": 1]>
        m (float[4,5] z, float[4,5] g) => (float[4,5] o) { r = local.Gradient(z, g)  o = other.Twice(r) }
        <domain: "local", opset_import: ["": 20]>
        Gradient (z, up) => (grad) { g = Abs(up)  prob = Softmax<axis=1>(z) """
        + SOFTMAX
        + """}
        <domain: "other", opset_import: ["": 18]>
        Twice (x) => (y) { y = Add(x, x) }"""
    )
    model.functions[0].overload = model.graph.node[0].overload = overload
    names = ("weighted", "total", "share", "grad", "prob", "g")
    shapes = {name: [4, 1] if name == "total" else [4, 5] for name in names}
    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()]
    model.functions[0].value_info.extend(infos)
    onnx.checker.check_model(model, full_check=True)
    result = fuse(model, policy="all")
    assert [f.op for f in result.report.fusions] == ["ScaledMaskedSoftmaxBackward"]
    plain = expand(result.model)
    for rewritten in (result.model, plain):
        onnx.checker.check_model(rewritten, full_check=True)
        functions = {f.name: f for f in rewritten.functions}
        assert canonical(functions["Twice"]) == canonical(model.functions[1])
        assert functions["Gradient"].overload == overload
        assert_computes_as(rewritten, model, feeds_of(model))
    assert [o.domain for f in plain.functions for o in f.opset_import] == ["", ""]


@settings(max_examples=30)
@given(
    keep=st.sets(st.sampled_from(["weighted", "total", "share", "masked_grad", "scaled_grad", "prob", "scaled"])),
    order=st.randoms(use_true_random=False),
)
def test_outputs_keep_their_names_and_order_whichever_they_are(keep: set[str], order: Any) -> None:
    model = small_models.attention()
    shapes: dict[str, list[int | str | None]] = {"total": ["b", 3, "s", 1]}
    for name in sorted(keep - {"prob"}):
        shape = shapes.get(name, ["b", 3, "s", "s"])
        model.graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, shape))
    outputs = list(model.graph.output)
    order.shuffle(outputs)
    del model.graph.output[:]
    model.graph.output.extend(outputs)
    result = fuse(model, policy="all")
    assert {f.op for f in result.report.fusions} == {"ScaledMaskedSoftmaxBackward"}
    feeds: dict[str, Array] = {
        name: np.linspace(-1, 1, 2 * 3 * 16, dtype=np.float32).reshape(2, 3, 4, 4) for name in ("scores", "grad")
    }
    feeds["mask"] = np.triu(np.ones((2, 1, 4, 4), np.bool_), 1)
    for rewritten in (result.model, expand(result.model)):
        onnx.checker.check_model(rewritten, full_check=True)
        assert list(rewritten.graph.output) == outputs
        assert_computes_as(rewritten, model, feeds)


def test_a_library_of_kernels_computes_what_the_bodies_do() -> None:
    """The reverse is checked against the kernels too, because expand's graphs have the bodies' arithmetic."""
    import onnxruntime as ort

    model = small_models.attention()
    fused = fuse(model, policy="all").model
    options = ort.SessionOptions()
    gradfuse.register(options)
    rng = np.random.default_rng(1)
    feeds: dict[str, Array] = {k: rng.normal(size=(2, 3, 4, 4)).astype(np.float32) for k in ("scores", "grad")}
    feeds["mask"] = rng.random((2, 1, 4, 4)) < 0.3
    names = [o.name for o in model.graph.output]
    kernels = ort.InferenceSession(fused.SerializeToString(), options).run(names, feeds)
    for name, got in zip(names, kernels, strict=True):
        wanted = run(expand(fused), feeds)[name]
        assert_gradients_close(got, wanted, wanted.astype(np.float64), np.float32, terms=4.0)
