"""Random inputs: in the ranges that the graph asks for."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import onnx.parser
import onnx_ir as ir
import pytest
import small_models

from gradfuse import ModelError
from gradfuse.checking.inputs import random_inputs


def model(signature: str, body: str, initializers: str = "", domains: str = "") -> ir.Model:
    opsets = '"" : 20, "aclnn" : 1, "com.microsoft" : 1'
    text = f"<ir_version: 10, opset_import: [{opsets}]> g ({signature}) => (float o) {initializers} {{ {body} }}"
    return ir.from_proto(onnx.parser.parse_model(text))


def draws(graph: ir.Model, name: str, count: int = 30) -> npt.NDArray[Any]:
    return np.concatenate([random_inputs(graph, np.random.default_rng(k))[name].ravel() for k in range(count)])


INDEXED = {
    "Gather": ("int64[6] i, float[7, 3] x", "o = Gather <axis = 1> (x, i)", 3),
    "GatherElements": ("int64[6, 2] i, float[7, 3] x", "o = GatherElements <axis = 0> (x, i)", 7),
    "ScatterElements": (
        "int64[6, 2] i, float[7, 3] x",
        "u = Cast <to = 1> (i) o = ScatterElements <axis = 1> (x, i, u)",
        3,
    ),
    "GatherND": ("int64[6, 1] i, float[7, 3] x", "o = GatherND (x, i)", 7),
    "OneHot": (
        "int64[6] i",
        "d = Constant <value_int = 4> () v = Constant <value_floats = [0.0, 1.0]> () o = OneHot (i, d, v)",
        4,
    ),
    "NegativeLogLikelihoodLoss": ("int64[6] i, float[6, 5] x", "o = NegativeLogLikelihoodLoss (x, i)", 5),
    "SoftmaxCrossEntropyLoss": ("int64[6] i, float[6, 5] x", "o = SoftmaxCrossEntropyLoss (x, i)", 5),
    "CrossEntropyLossGrad": (
        "int64[6] i, float[6, 5] x, float g",
        'o = aclnn.CrossEntropyLossGrad <reduction = "sum"> (g, x, i)',
        5,
    ),
    "training": (
        "int64[6] i, float[6, 5] x, float g",
        'o = com.microsoft.SoftmaxCrossEntropyLossGrad <reduction = "sum"> (g, x, i)',
        5,
    ),
    "through other shapes and types": (
        "int32[6] i, float[7, 3] x",
        "one = Constant <value = int64[1] {1}> () a = Cast <to = 7> (i) b = Unsqueeze (a, one) c = Transpose (b) "
        "o = Gather (x, c)",
        7,
    ),
    "the narrowest of two": ("int64[6] i, float[7, 3] x", "a = Gather (x, i) o = Gather <axis = 1> (a, i)", 3),
    "one hot by comparison": (
        "int64[6, 1] i",
        "c = Constant <value = int64[4] {0, 1, 2, 3}> () e = Equal (i, c) o = Cast <to = 1> (e)",
        4,
    ),
}


@pytest.mark.parametrize("case", INDEXED)
def test_indices_cover_what_they_index(case: str) -> None:
    signature, body, size = INDEXED[case]
    assert set(draws(model(signature, body), "i").tolist()) == set(range(size))


GUARDED = """
one = Constant <value = int64[1] {1}> () zero = Constant <value = int64 {0}> ()
ignored = Constant <value = int64 {-100}> ()
column = Unsqueeze (i, one) is_ignored = Equal (column, ignored) keep = Not (is_ignored)
safe = Where (keep, column, zero) o = GatherElements <axis = 1> (x, safe)
"""


def test_ignored_targets_occur_where_the_graph_guards_them() -> None:
    values = draws(model("int64[6] i, float[6, 5] x", GUARDED), "i")
    assert set(values.tolist()) == {-100, 0, 1, 2, 3, 4}
    assert (values == -100).mean() < 0.5


def test_some_target_is_never_ignored() -> None:
    graph = model("int64[2] i, float[2, 5] x", GUARDED)
    for seed in range(100):
        assert random_inputs(graph, np.random.default_rng(seed))["i"].max() >= 0


def test_ignored_targets_do_not_occur_where_they_would_be_used_as_they_are() -> None:
    body = GUARDED.replace("GatherElements <axis = 1> (x, safe)", "GatherElements <axis = 1> (x, column)")
    assert set(draws(model("int64[6] i, float[6, 5] x", body), "i").tolist()) == {0, 1, 2, 3, 4}


def test_ignore_index_of_a_loss_occurs() -> None:
    graph = model("int64[6] i, float[6, 5] x", "o = NegativeLogLikelihoodLoss <ignore_index = 255> (x, i)")
    assert set(draws(graph, "i").tolist()) == {255, 0, 1, 2, 3, 4}


@pytest.mark.parametrize(
    "body",
    [
        "r = Constant <value = int64[9, 1] {0, 1, 2, 3, 4, 5, 6, 7, 8}> () c = GreaterOrEqual (r, i) "
        "o = Cast <to = 1> (c)",
        "o = aclnn.GroupedBiasAddGrad (x, i)",
    ],
)
def test_group_ends_do_not_decrease_and_end_at_the_number_of_rows(body: str) -> None:
    graph = model("int64[4] i, float[9, 3] x", body)
    for seed in range(20):
        ends = random_inputs(graph, np.random.default_rng(seed))["i"]
        assert (np.diff(ends) >= 0).all() and ends.min() >= 0 and ends[-1] == 9


@pytest.mark.parametrize("targets", ["int64[3, 4] t", "int64[5] t"])
def test_ctc_lengths_admit_an_alignment(targets: str) -> None:
    graph = model(
        f"float[8, 3, 6] lp, {targets}, int64[3] n, int64[3] l",
        "o, a = aclnn.CtcLoss <blank = 0, zero_infinity = 0> (lp, t, n, l)",
    )
    for seed in range(20):
        feeds = random_inputs(graph, np.random.default_rng(seed))
        assert (0 <= feeds["n"]).all() and (feeds["n"] <= 8).all() and (feeds["l"] >= 0).all()
        assert (1 <= feeds["t"]).all() and (feeds["t"] < 6).all()
        if feeds["t"].ndim == 2:
            assert (feeds["l"] <= 4).all() and (2 * feeds["l"] - 1 <= feeds["n"]).all()
        else:
            assert feeds["l"].sum() == 5


def test_dimensions_of_one_name_get_one_size_and_others_another() -> None:
    graph = model("float[n, m, n] x, float[m, 3] y, float[k] z", "o = ReduceSum (x)")
    graph.graph.inputs[2].shape = ir.Shape(["2*n"])
    seen = set()
    for seed in range(20):
        feeds = random_inputs(graph, np.random.default_rng(seed))
        n, m, last = feeds["x"].shape
        assert n == last and feeds["y"].shape == (m, 3) and feeds["z"].shape == (2 * n,)
        assert n != m and min(n, m) >= 2
        seen.add(n)
    assert len(seen) > 1


def test_one_size_for_all_when_asked() -> None:
    graph = model("float[n, m] x", "o = ReduceSum (x)")
    shape = random_inputs(graph, np.random.default_rng(0), attempt=1)["x"].shape
    assert shape[0] == shape[1]


def test_every_row_of_a_mask_holds_both_values() -> None:
    graph = model("bool[2, 1, 5, 2] k", "o = Cast <to = 1> (k)")
    for seed in range(20):
        mask = random_inputs(graph, np.random.default_rng(seed))["k"]
        assert mask.any(axis=-1).all() and not mask.all(axis=-1).any()


def test_types_are_those_of_the_model_and_floats_are_standard_normal() -> None:
    graph = model(
        "float16[200] a, bfloat16[200] b, double[200] c, int32[3] d, uint8[3] e, complex64[3] f",
        "o = Cast <to = 1> (a)",
    )
    feeds = random_inputs(graph, np.random.default_rng(0))
    assert [str(feeds[name].dtype) for name in "abcdef"] == "float16 bfloat16 float64 int32 uint8 complex64".split()
    for name in "abc":
        values = feeds[name].astype(np.float64)
        assert abs(values.mean()) < 0.3 and 0.8 < values.std() < 1.2


def test_logarithms_and_roots_get_positive_values() -> None:
    graph = model("float[50] x, float[50] y", "a = Log (x) b = Sqrt (y) o = Add (a, b)")
    feeds = random_inputs(graph, np.random.default_rng(0))
    assert feeds["x"].min() > 0 and feeds["y"].min() > 0


STEPS = {
    "power": "b = Constant <value_float = 0.9> () o = Pow (b, s)",
    "power of the next": (
        "b = Constant <value_float = 0.9> () n = Constant <value_float = 1.0> () t = Add (s, n) o = Pow (b, t)"
    ),
    "integer": "n = Constant <value_float = 1.0> () t = Add (n, s) k = Cast <to = 7> (t) o = Cast <to = 1> (k)",
}


@pytest.mark.parametrize("body", STEPS.values(), ids=STEPS)
def test_steps_of_an_optimizer_are_whole_numbers(body: str) -> None:
    steps = draws(model("float s", body), "s")
    assert len(np.unique(steps)) > 1 and (steps >= 1).all() and (steps % 1 == 0).all()
    assert (draws(model("float[64] s", body.replace("o =", "all =") + " o = ReduceSum (all)"), "s") % 1 != 0).any()


def test_equal_seeds_give_equal_inputs_and_others_do_not() -> None:
    graph = ir.from_proto(small_models.cross_entropy())
    first, second, third = (random_inputs(graph, np.random.default_rng(seed)) for seed in (1, 1, 2))
    assert all(np.array_equal(first[name], second[name]) for name in first)
    assert not np.array_equal(first["w"], third["w"])


def test_initializers_and_the_model_are_left_alone() -> None:
    proto = small_models.cross_entropy()
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.ones((4, 5), np.float32), "w"))
    graph = ir.from_proto(proto)
    before = ir.to_proto(graph).SerializeToString(deterministic=True)
    assert list(random_inputs(graph, np.random.default_rng(0))) == ["x", "target"]
    assert ir.to_proto(graph).SerializeToString(deterministic=True) == before


@pytest.mark.parametrize(
    ("signature", "reason"),
    [("string[3] s", "input 's' has type .*; expected a tensor of numbers"), ("seq(float) s", "input 's' has type")],
)
def test_inputs_that_are_no_numbers_are_refused(signature: str, reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        random_inputs(model(signature, "o = Constant <value_float = 1.0> ()"), np.random.default_rng(0))


@pytest.mark.parametrize(
    "name", ["a b", "", "(", "9**9**9**9", "N**N", "1" * 400, "x" * 1000, "N/(N-N)", "f''", "é", "a,b", "max(", "-"]
)
def test_any_name_of_a_dimension_is_one_size(name: str) -> None:
    graph = ir.to_proto(model("float[N, 3] x, float[N] y", "o = Relu (y)"))
    for value in graph.graph.input:
        value.type.tensor_type.shape.dim[0].dim_param = name
    feeds = random_inputs(ir.from_proto(graph), np.random.default_rng(0))
    assert feeds["x"].shape == (len(feeds["y"]), 3)


def test_expressions_of_dimensions_are_computed() -> None:
    feeds = random_inputs(
        model("float[N] a, float[M] b, float['2*N + M//2'] c".replace("'", '"'), "o = Relu (a)"),
        np.random.default_rng(0),
    )
    assert len(feeds["c"]) == 2 * len(feeds["a"]) + len(feeds["b"]) // 2


@pytest.mark.parametrize("shape", ["1099511627776, 5", "4611686018427387904, 4611686018427387904, 0"])
def test_inputs_that_no_memory_holds_are_refused(shape: str) -> None:
    with pytest.raises(ModelError, match=r"input 'x' has shape .*; expected inputs of at most"):
        random_inputs(model(f"float[{shape}] x", "o = Relu (x)"), np.random.default_rng(0))


def test_values_that_no_memory_holds_are_refused() -> None:
    body = "s = Constant <value_ints = [4398046511104]> () o = ConstantOfShape (s)"
    with pytest.raises(ModelError, match=r"ConstantOfShape .*'o' has shape \(4398046511104,\); expected at most"):
        random_inputs(model("float[2] x", body), np.random.default_rng(0))
