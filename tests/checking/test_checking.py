"""check: equal models pass, different ones fail, whatever their types; and what cannot be told is said."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest
import small_models
from onnx import TensorProto, helper

import gradfuse
from gradfuse import ArgumentError, ModelError

SOFTMAX_BACKWARD = """
<ir_version: 10, opset_import: ["" : 20]>
g (TYPE[n, 7] y, TYPE[n, 7] g) => (TYPE[n, 7] d)
{
    axis = Constant <value = int64[1] {-1}> ()
    t = Mul (y, g)
    r = ReduceSum <keepdims = 1> (t, axis)
    u = Mul (y, r)
    d = Sub (t, u)
}
"""
OTHER_WAY = SOFTMAX_BACKWARD.replace("u = Mul (y, r)", "u = Sub (g, r)").replace("d = Sub (t, u)", "d = Mul (y, u)")
TYPES = ["float16", "bfloat16", "float", "double"]


def parsed(text: str, dtype: str = "float") -> onnx.ModelProto:
    return onnx.parser.parse_model(text.replace("TYPE", dtype))


@pytest.mark.parametrize("dtype", TYPES)
def test_the_same_by_another_way_passes(dtype: str) -> None:
    report = gradfuse.check(parsed(SOFTMAX_BACKWARD, dtype), parsed(OTHER_WAY, dtype))
    assert report.ok and report.runs == 3
    assert [output.name for output in report.outputs] == ["d"]
    assert all(output.error <= output.bound for output in report.outputs)


WRONG: dict[str, Callable[[str], str]] = {
    "sign": lambda text: text.replace("Sub (g, r)", "Sub (r, g)"),
    "missing term": lambda text: text.replace("u = Sub (g, r)", "u = Identity (g)"),
    "missing factor": lambda text: text.replace("d = Mul (y, u)", "d = Identity (u)"),
    "wrong axis": lambda text: text.replace("{-1}", "{0}"),
    "wrong operand": lambda text: text.replace("Sub (g, r)", "Sub (y, r)"),
}


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("case", WRONG)
def test_another_function_fails(case: str, dtype: str) -> None:
    report = gradfuse.check(parsed(SOFTMAX_BACKWARD, dtype), parsed(WRONG[case](OTHER_WAY), dtype), runs=1)
    assert not report.ok and not report.outputs[0].ok
    assert report.outputs[0].error > report.outputs[0].bound


def test_a_difference_in_a_small_element_fails() -> None:
    text = """<ir_version: 10, opset_import: ["" : 20]> g (float[2] x) => (float[2] y)
    <float[2] c = {1.0, SMALL}> { y = Mul (x, c) }"""
    a, b = (parsed(text.replace("SMALL", small)) for small in ("0.001", "0.0011"))
    assert gradfuse.check(a, a).ok and not gradfuse.check(a, b).ok


def test_a_gradient_that_cancels_to_nothing_is_compared_with_its_rounding() -> None:
    # The sum of a softmax's gradient over its row is 0; what is left depends on the order of rounding.
    a, b = (
        parsed(text.replace("(TYPE[n, 7] d)", "(TYPE[n] s)").replace("}\n", "s = ReduceSum <keepdims = 0> (d, axis) }"))
        for text in (SOFTMAX_BACKWARD, OTHER_WAY)
    )
    assert gradfuse.check(a, b).ok


def test_bfloat16_without_kernels_is_compared_in_float32_and_said_so() -> None:
    text = """<ir_version: 10, opset_import: ["" : 20]>
    g (bfloat16[n, 4] x, bfloat16[4, 3] w) => (bfloat16[n, 3] y) { z = MatMul (x, w) y = Relu (z) }"""
    report = gradfuse.check(parsed(text), parsed(text))
    assert report.ok and "compared in float32" in " ".join(report.notes)
    wrong = gradfuse.check(parsed(text), parsed(text.replace("y = Relu (z)", "y = Neg (z)")))
    assert not wrong.ok


def test_nan_and_infinities_must_be_in_the_same_places() -> None:
    text = """<ir_version: 10, opset_import: ["" : 20]> g (float[9] x) => (float[9] y)
    { zero = Sub (x, x) one = Exp (zero) y = OP }"""
    a = parsed(text.replace("OP", "Div (one, zero)"))
    assert gradfuse.check(a, a).ok
    assert "outputs without a finite element in any run: y" in gradfuse.check(a, a).notes
    for other in ("Div (zero, zero)", "Identity (one)"):
        b = parsed(text.replace("OP", other))
        assert not gradfuse.check(a, b).ok and not gradfuse.check(b, a).ok


def test_integers_and_truth_values_must_be_equal() -> None:
    text = """<ir_version: 10, opset_import: ["" : 20]> g (float[n, 6] x) => (int64[n] i, bool[n, 6] b)
    { i = ArgMax <axis = 1, keepdims = 0> (x) zero = Constant <value_float = 0.0> () b = CMP (x, zero) }"""
    a = parsed(text.replace("CMP", "Greater"))
    assert gradfuse.check(a, a).ok
    report = gradfuse.check(a, parsed(text.replace("CMP", "Less").replace("ArgMax", "ArgMin")))
    assert [output.ok for output in report.outputs] == [False, False]


def test_shapes_must_be_equal() -> None:
    text = """<ir_version: 10, opset_import: ["" : 20]> g (float[n, 6] x) => (float[a, b] y) { y = OP (x) }"""
    assert not gradfuse.check(parsed(text.replace("OP", "Identity")), parsed(text.replace("OP", "Transpose"))).ok


RANDOM = """<ir_version: 10, opset_import: ["" : 20]> g (float[n, 6] x) => (float[n, 6] y, float[n, 6] z)
{ half = Constant <value_float = 0.5> () train = Constant <value = bool {1}> ()
  dropped = Dropout (x, half, train) y = Neg (dropped) z = Exp (x) }"""


def test_outputs_that_depend_on_random_operators_are_not_compared() -> None:
    report = gradfuse.check(parsed(RANDOM), parsed(RANDOM))
    assert report.ok
    assert [(output.name, output.comparable) for output in report.outputs] == [("y", False), ("z", True)]
    assert "outputs that depend on random operators: y" in report.notes
    assert not gradfuse.check(parsed(RANDOM), parsed(RANDOM.replace("Exp", "Sqrt"))).ok


def test_updates_that_onnxruntime_would_lose_are_kept_by_one_thread() -> None:
    scatter = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["" : 20]>
        g (float[4,16] x, int64[30000,1] i, float[30000,16] u) => (float[4,16] y)
        { y = ScatterND <reduction = "add"> (x, i, u) }""")
    report = gradfuse.check(scatter, scatter, runs=1)
    assert report.ok and "run in one thread" in report.notes[0]


def test_random_operators_in_branches_are_seen() -> None:
    text = """<ir_version: 10, opset_import: ["" : 20]> g (bool c, float[3] x) => (float[3] y)
    { y = If (c) <then_branch = a () => (float[3] p) { p = RandomNormalLike (x) },
                  else_branch = b () => (float[3] q) { q = Neg (x) }> }"""
    assert not gradfuse.check(parsed(text), parsed(text)).outputs[0].comparable


def test_dropout_outside_training_is_compared() -> None:
    text = RANDOM.replace("bool {1}", "bool {0}")
    assert all(output.comparable for output in gradfuse.check(parsed(text), parsed(text)).outputs)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            lambda t: t.replace("float[n, 4] x", "float[n, 4] z").replace("(x, w)", "(z, w)").replace("(x)", "(z)"),
            "the inputs are z, target, w; expected x, target, w",
        ),
        (
            lambda t: t.replace("(float loss, ", "(float other, ").replace("loss =", "other ="),
            "the outputs are other, w_grad; expected loss, w_grad",
        ),
        (lambda t: t.replace("int64[n] target", "int32[n] target"), "input 'target' has type INT32; expected INT64"),
        (lambda t: t.replace("float[4, 5] w)", "float[4, 6] w)"), r"input 'w' has shape \[4,6\]; expected \[4,5\]"),
    ],
)
def test_other_inputs_and_outputs_are_refused_in_one_line(change: Callable[[str], str], reason: str) -> None:
    with pytest.raises(ModelError, match=reason) as failure:
        gradfuse.check(small_models.cross_entropy(), parsed(change(small_models.CROSS_ENTROPY)))
    assert "\n" not in str(failure.value)


def test_a_model_that_onnxruntime_cannot_load_is_named_with_the_reason() -> None:
    unknown = parsed(
        """<ir_version: 10, opset_import: ["" : 20, "nobody" : 1]>
        g (float[3] x) => (float[3] y) { y = nobody.Thing (x) }"""
    )
    with pytest.raises(ModelError, match=r"^ModelProto: onnxruntime cannot load the model: .*Thing.*$") as failure:
        gradfuse.check(unknown, unknown)
    assert "\n" not in str(failure.value)


def test_a_model_that_onnxruntime_cannot_run_is_named_with_the_reason() -> None:
    text = """<ir_version: 10, opset_import: ["" : 20]> g (float[n] x, float[m] z) => (float[k] y)
    { s = Constant <value = int64[1] {1000}> () a = Reshape (x, s) y = Add (a, z) }"""
    with pytest.raises(ModelError, match=r"^ModelProto: onnxruntime cannot run the model: .*Reshape.*$"):
        gradfuse.check(parsed(text), parsed(text))


def test_sizes_that_a_model_cannot_run_with_are_drawn_again() -> None:
    # Two names for what must be one size, as exporters write them.
    text = """<ir_version: 10, opset_import: ["" : 20]>
    g (float[n, 3] x, float[m, 3] z) => (float[n, 3] y) { y = Add (x, z) }"""
    assert gradfuse.check(parsed(text), parsed(text)).ok


@pytest.mark.parametrize(
    "text",
    [
        "(float[1, 1, 2, 2] x) => (y) <float[4] s = {1, 1, 1, 2}, int64[2] axes = {0, 1}> "
        '{ z = Resize <mode = "nearest"> (x, , s) y = Squeeze(z, axes) }',
        "(float[4] x) => (y) <float[2] s = {2, 2}> { sizes = Cast <to = 7> (s) y = Reshape(x, sizes) }",
    ],
)
def test_sizes_that_follow_from_weights_are_not_moved_by_a_rounding(text: str) -> None:
    model = parsed(f'<ir_version: 9, opset_import: ["": 18]> g {text}')
    model.graph.output[0].CopyFrom(helper.make_tensor_value_info("y", TensorProto.FLOAT, None))
    for seed in range(4):
        assert gradfuse.check(model, model, seed=seed).ok


def test_too_few_runs_are_refused() -> None:
    with pytest.raises(ArgumentError, match="check: runs is 0; expected at least 1"):
        gradfuse.check(small_models.forward(), small_models.forward(), runs=0)


def test_all_kinds_of_models_are_taken(tmp_path: str) -> None:
    proto = small_models.forward()
    path = f"{tmp_path}/model.onnx"
    onnx.save(proto, path)
    assert gradfuse.check(path, ir.from_proto(proto)).ok


def test_a_fused_model_passes_with_and_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    proto = small_models.cross_entropy()
    fused = gradfuse.fuse(proto).model
    assert "CrossEntropyLossGrad" in {node.op_type for node in fused.graph.node}
    assert gradfuse.check(proto, fused).ok
    monkeypatch.setattr("gradfuse.library.find_library", lambda: None)
    assert gradfuse.check(proto, fused).ok
    assert gradfuse.check(fused, proto).ok


def test_a_fused_node_with_a_wrong_attribute_fails() -> None:
    proto = small_models.cross_entropy()
    fused = gradfuse.fuse(proto).model
    node = next(node for node in fused.graph.node if node.op_type == "CrossEntropyLossGrad")
    reduction = next(attribute for attribute in node.attribute if attribute.name == "reduction")
    reduction.s = b"mean"
    assert not gradfuse.check(proto, fused).ok


def test_a_model_with_large_tensors_is_run_from_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradfuse.checking.execution._LARGE", 0)
    assert gradfuse.check(small_models.forward(500), small_models.forward(500)).ok


def test_the_report_is_data_and_text() -> None:
    good = gradfuse.check(small_models.cross_entropy(), small_models.cross_entropy())
    assert str(good).splitlines()[0] == "same outputs in 3 random runs" == good.summary()
    assert json.loads(json.dumps(good.to_dict(), allow_nan=False))["ok"] is True
    bad = gradfuse.check(parsed(SOFTMAX_BACKWARD), parsed(WRONG["sign"](OTHER_WAY)), runs=1)
    assert "WRONG" in str(bad) and "1 of 1 outputs differ" in bad.summary() and "\n" not in bad.summary()
    shape = gradfuse.check(
        *(
            parsed(f"""<ir_version: 10, opset_import: ["" : 20]> g (float[n, 6] x) => (float[a, b] y)
    {{ y = {op} (x) }}""")
            for op in ("Identity", "Transpose")
        )
    )
    assert shape.to_dict()["outputs"][0]["error"] is None and np.isinf(shape.outputs[0].error)


def test_equal_seeds_give_equal_reports() -> None:
    a, b = parsed(SOFTMAX_BACKWARD), parsed(OTHER_WAY)
    assert gradfuse.check(a, b, seed=3) == gradfuse.check(a, b, seed=3)


KINKS = {
    "relu": "zero = Constant <value_float = 0.0> () c = Greater (h, zero) m = Cast <to = 1> (c)",
    "clip": """low = Constant <value_float = -0.5> () high = Constant <value_float = 0.5> ()
        above = Greater (h, low) below = Less (h, high) c = And (above, below) m = Cast <to = 1> (c)""",
    "abs": "m = Sign (h)",
    "topk": """k = Constant <value_ints = [8]> () largest, at = TopK (h, k) z = Sub (h, h) s = Shape (at)
        o = ConstantOfShape <value = float[1] {1.0}> (s) m = ScatterElements <axis = 1> (z, at, o)""",
    "where": "third = Constant <value_float = 0.3> () c = Less (h, third) m = Where (c, h, third)",
}
"""What a function of the activations h, (2048, 32), multiplies a gradient by."""
WAYS = {
    "whole": "h = MatMul (x, w)",
    "in halves": """sizes = Constant <value_ints = [32, 32]> () x0, x1 = Split <axis = 1> (x, sizes)
        w0, w1 = Split <axis = 0> (w, sizes) h0 = MatMul (x0, w0) h1 = MatMul (x1, w1) h = Add (h1, h0)""",
}


def with_kink(kink: str, way: str, factor: float = 1.0) -> onnx.ModelProto:
    return parsed(f"""<ir_version: 10, opset_import: ["" : 20]>
    g (float[2048, 64] x, float[64, 32] w, float[2048, 32] grad) => (float[64, 32] w_grad)
    {{ {WAYS[way]} {KINKS[kink]} factor = Constant <value_float = {factor}> () scaled = Mul (grad, factor)
       inner = Mul (scaled, m) x_t = Transpose <perm = [1, 0]> (x) w_grad = MatMul (x_t, inner) }}""")


@pytest.mark.parametrize("kink", KINKS)
def test_activations_near_a_kink_neither_fail_nor_hide_an_error_of_a_hundredth(kink: str) -> None:
    first = with_kink(kink, "whole")
    assert gradfuse.check(first, with_kink(kink, "in halves"), runs=1).ok
    assert not gradfuse.check(first, with_kink(kink, "in halves", 1.01), runs=1).ok


_CHECKED = """
import sys, threading, gradfuse
from gradfuse.checking import check
check._LARGEST_COPY_BYTES = 0
gradfuse.check(*sys.argv[1:], runs=1)

def anonymous():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon"))

def watch():
    while not done.wait(0.001):
        seen.append(anonymous())

seen, done, before = [], threading.Event(), anonymous()
watching = threading.Thread(target=watch)
watching.start()
assert gradfuse.check(*sys.argv[1:], runs=1).ok
done.set()
watching.join()
print(max(seen) - before)
"""


def test_weights_in_files_are_not_copied(tmp_path: Path) -> None:
    """As of models of which no copy is made for a run in float64."""
    size, count = 2**11, 6
    bytes_of_one = 4 * size * size
    nodes = [helper.make_node("MatMul", [f"h{k}", f"w{k}"], [f"h{k + 1}"]) for k in range(count)]
    ends = [helper.make_tensor_value_info(f"h{k}", TensorProto.FLOAT, [2, size]) for k in (0, count)]
    with (tmp_path / "weights").open("wb") as file:
        file.truncate(count * bytes_of_one)
    weights = []
    for k in range(count):
        weights.append(TensorProto(name=f"w{k}", data_type=TensorProto.FLOAT, dims=[size, size]))
        weights[-1].data_location = TensorProto.EXTERNAL
        for key, value in (("location", "weights"), ("offset", k * bytes_of_one), ("length", bytes_of_one)):
            weights[-1].external_data.add(key=key, value=str(value))
    graph = helper.make_graph(nodes, "products", ends[:1], ends[1:], weights)
    paths = [tmp_path / "a.onnx", tmp_path / "b.onnx"]
    for path in paths:
        onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10), path)
    command = [sys.executable, "-c", _CHECKED, *map(str, paths)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(result.stdout) * 2**10 < count * bytes_of_one / 4
