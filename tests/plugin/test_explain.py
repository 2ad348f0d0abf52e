"""`explain` names each backward region once, truly, and with a reason where it stays, and what is wrong in a graph."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import onnx
import onnx.parser
import onnx_ir as ir
import onnxruntime as ort
import pytest
import small_models
import torch
from graphs import GraphBuilder
from onnx import TensorProto
from producers import Case, cases

from gradfuse import Explanation, ModelError, custom_ops, explain, fuse
from gradfuse.testing import assert_gradients_close

BACKWARD = {name for name in custom_ops.OPS if name.endswith(("Grad", "Backward")) or name.startswith("Apply")}

# What a case whose own loss or bias cannot be fused must be told, by a part of its name.
TOLD = {
    "gba_2d": ("GroupedBiasAddGrad", "nothing proves sorted"),
    "ce_prob_targets": ("CrossEntropyLossGrad", "probability targets"),
    "ctc_": ("CtcLossBackward", "a recursion of 8 steps in log space"),
}
# The loop over the groups outgrows the analysis; the wrong types of its loss are a warning; no row there is grouped.
NOT_TOLD = {"onnx_ad/gba_2d_mask_loop_dyn"}
NOT_FOUND = {"jax2onnx_gemmfix/gba_2d_repeat", "onnx_ad/ce_handwritten_lse_dyn", "onnx_ad/ce_handwritten_onehot_dyn"}
# In bfloat16 and not to be run as they are; a float32 copy differs from the producer's gradients.
WRONG_IN_BFLOAT16 = {"torch_aot/ce_mean_bf16", "torch_makefx/ce_mean_bf16", "torch_makefx/ce_mean_bf16_dyn"}


@pytest.mark.long
@pytest.mark.usefixtures("inference_in_process")
@pytest.mark.parametrize("case", cases(), ids=str)
def test_every_region_of_a_graph_is_named_once_and_where_it_is_wrong(case: Case) -> None:
    model = ir.load(case.path)
    try:
        explanation = explain(model)
    except ModelError:
        return
    report = fuse(case.path, bodies=False).report
    assert_warned_where_it_is_wrong(case, {warning.bug for warning in report.warnings})
    regions = explanation.regions
    # What it says of fuse is what fuse does.
    assert explanation.warnings == tuple(report.warnings)
    assert Counter(r.op for r in regions if r.status == "fuses") == Counter(f.op for f in report.fusions)
    assert sum(r.bytes_saved or 0 for r in regions if r.status == "fuses") == sum(f.bytes_saved for f in report.fusions)
    named = {r.op for r in regions if str(case) in NOT_FOUND or r.status != "unmatched"}
    assert set(case.expect) <= named, str(explanation)
    for part, (op, reason) in TOLD.items():
        if part in case.name and not case.expect and str(case) not in NOT_TOLD:
            is_told = any(r.op == op and r.status == "unmatched" and reason in r.reason for r in regions)
            # Sums over groups in any order are those of an embedding.
            is_embedding = part == "gba_2d" and any(r.op == "EmbeddingDenseBackward" for r in regions)
            assert is_told or is_embedding, str(explanation)
    # One entry a region: no node is replaced twice, and no region lies in one of the same operator.
    nodes = [(r.op, n) for r in regions if r.status != "unmatched" for n in r.nodes]
    assert len(nodes) == len(set(nodes))
    assert len({(r.op, r.node) for r in regions}) == len(regions)
    names = {n.name or n.outputs[0].name for n in model.graph.all_nodes()}
    for region in regions:
        assert region.op in BACKWARD and region.node in names
        assert (region.reason == "") == (region.status == "fuses")
        assert (region.rule == "") == (region.status == "unmatched")


def assert_warned_where_it_is_wrong(case: Case, bugs: set[str]) -> None:
    if case.runs and case.agrees:
        # The producer's arrays are too small to lose updates; others of the model's shapes need not be.
        assert bugs <= {"lost-updates"}
    # The graphs of torch that run and differ are those without a divisor, and those that draw random numbers.
    wrong = case.producer.startswith("torch") and case.runs and not case.agrees and "dropout" not in case.name
    assert ("mean-without-divisor" in bugs) == (wrong or str(case) in WRONG_IN_BFLOAT16)
    refused = False
    if not case.runs and case.producer != "ort_training":
        try:
            ort.InferenceSession(str(case.path), providers=["CPUExecutionProvider"])
        except Exception as error:
            refused = "Type Error" in str(error)
    assert bool({"loss-type", "invalid-types"} & bugs) == refused


def parsed(text: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 20]> {text}')


def test_a_match_says_what_would_be_done_and_does_nothing(tmp_path: Path) -> None:
    model = small_models.cross_entropy()
    before = model.SerializeToString()
    path = tmp_path / "step.onnx"
    onnx.save(model, path)
    of_proto, of_path, of_ir = explain(model), explain(path), explain(ir.from_proto(model))
    assert model.SerializeToString() == before and path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["step.onnx"]
    assert of_proto == of_path == of_ir
    (region,) = of_proto.regions
    assert (region.op, region.status, region.rule) == ("CrossEntropyLossGrad", "fuses", "cross-entropy-backward")
    assert region.node == "logits_grad" and {"logits_grad", "scattered", "prob"} <= set(region.nodes)
    assert region.bytes_saved is not None and region.bytes_saved > 0


def test_a_model_that_is_fused_has_the_operator_already() -> None:
    (region,) = explain(fuse(small_models.attention()).model).regions
    assert (region.op, region.status) == ("ScaledMaskedSoftmaxBackward", "fused")


def test_a_model_without_a_backward_pass_has_none() -> None:
    explanation = explain(small_models.forward())
    assert explanation.regions == () and explanation.warnings == ()
    assert str(explanation).startswith("no backward region")


def test_what_is_left_for_its_cost_is_taken_by_the_policy_all() -> None:
    g = GraphBuilder()
    x, y = (g.input(n, TensorProto.FLOAT, (6, 4)) for n in "xy")
    d = g.op("Sub", x, y)
    loss = g.op("ReduceSum", g.op("Mul", d, d), keepdims=0)
    grad = g.op("Mul", d, g.constant(2.0))
    g.output(loss)
    g.output(grad)
    (region,) = explain(g.model()).regions
    assert (region.op, region.status) == ("MseLossBackward", "unprofitable")
    assert region.bytes_saved is not None and region.bytes_saved <= 0 and 'the policy "all" takes it' in region.reason
    assert not fuse(g.model()).report.fusions
    (taken,) = fuse(g.model(), policy="all").report.fusions
    assert (taken.bytes_saved, taken.replaced, taken.rule) == (region.bytes_saved, region.nodes, region.rule)


def test_float64_is_no_type_of_the_operators() -> None:
    text = small_models.ATTENTION.replace("float[", "double[")
    for name, value in (("zero", "0.0"), ("low", "-1e30"), ("scale", "0.5")):
        text = text.replace(
            f"{name} = Constant <value_float = {value}>", f"{name} = Constant <value = double {{{value}}}>"
        )
    model = onnx.parser.parse_model(text)
    (region,) = explain(model).regions
    assert (region.op, region.node, region.status) == ("ScaledMaskedSoftmaxBackward", "scores_grad", "unmatched")
    assert "float64" in region.reason
    assert not fuse(model, policy="all").report.fusions


def rows_by_index(groups: int) -> onnx.ModelProto:
    return parsed(f"""m (float[6,4] dy, int64[6,1] index) => (float[{groups},4] r) {{
        zero = Constant<value_float=0.0>()  shape = Constant<value_ints=[{groups},4]>()
        zeros = Expand(zero, shape)  computed = Neg(index)
        r = ScatterND<reduction="add">(zeros, computed, dy)
    }}""")


def test_an_arbitrary_index_is_no_proof_of_order_nor_of_a_look_up() -> None:
    regions = explain(rows_by_index(3)).regions
    assert {(region.status, region.node) for region in regions} == {("unmatched", "r")}
    reasons = {region.op: region.reason for region in regions}
    assert "nothing proves sorted" in reasons["GroupedBiasAddGrad"]
    assert "may count from the end" in reasons["EmbeddingDenseBackward"]


def test_more_groups_than_the_operator_takes() -> None:
    one_hot = """m (float[6,4] dy, int64[6] index) => (float[3000,4] r) {
        depth = Constant<value_int=3000>()  values = Constant<value_floats=[0.0,1.0]>()
        computed = Neg(index)  hot = OneHot(computed, depth, values)  turned = Transpose<perm=[1,0]>(hot)
        r = MatMul(turned, dy)
    }"""
    for model in (parsed(one_hot), parsed(one_hot.replace("3000", "2048"))):
        (region,) = (r for r in explain(model).regions if r.op != "EmbeddingDenseBackward")
        assert (region.op, region.node) == ("GroupedBiasAddGrad", "r") and "nothing proves sorted" in region.reason
        assert ("3000 groups, more than 2048" in region.reason) == ("3000" in str(model))


def test_the_forward_product_with_a_one_hot_is_no_sum_over_groups() -> None:
    text = """m (float[3,4] bias, int64[6] index) => (float[6,4] r) {
        depth = Constant<value_int=3>()  values = Constant<value_floats=[0.0,1.0]>()
        hot = OneHot(index, depth, values)
        r = MatMul(hot, bias)
    }"""
    assert explain(parsed(text)).regions == ()


def test_a_loop_over_groups_of_rows() -> None:
    (region,) = explain(
        parsed("""m (float[9,4] dy, int64[3] ends) => (float[groups,4] sums) {
        count = Constant<value_int=3>()  goes_on = Constant<value = bool {1}>()  start = Constant<value_ints=[0]>()
        last, sums = Loop <body = one (int64 i, bool going, int64[1] begin) => (bool go, int64[1] end, float[4] total) {
            axis = Constant<value_ints=[0]>()  k = Unsqueeze(i, axis)
            go = Identity(going)  end = Gather(ends, k)
            rows = Slice(dy, begin, end, axis)  total = ReduceSum<keepdims = 0>(rows, axis)
        }> (count, goes_on, start)
    }""")
    ).regions
    assert (region.op, region.status) == (
        "GroupedBiasAddGrad",
        "unmatched",
    ) and "a loop over the groups" in region.reason


SCAN = """m (float[2,5] start, float[7,2,5] emissions, float[2,5] w) => (float[2,5] last, float[2,5] w_grad) {
    last = Scan <num_scan_inputs = 1, body = step (float[2,5] alpha, float[2,5] emission) => (float[2,5] next) {
        pads = Constant<value_ints=[0,1,0,-1]>()
        moved = Pad(alpha, pads)
        stay = Exp(alpha)  move = Exp(moved)  both = Add(stay, move)  summed = FUNCTION(both)
        next = Add(summed, emission)
    }> (start, emissions)
    w_grad = Mul(last, w)
}"""


def test_a_recursion_in_log_space_in_a_scan() -> None:
    (region,) = explain(parsed(SCAN.replace("FUNCTION", "Log"))).regions
    assert (region.op, region.status) == ("CtcLossBackward", "unmatched") and "a Scan in log space" in region.reason
    assert explain(parsed(SCAN.replace("FUNCTION", "Tanh"))).regions == ()


def test_cross_entropy_over_several_axes() -> None:
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 11]>
        m (float[2,4,5] x, int64[2] t) => (float[2,4,5] d) {
            p = Softmax<axis = 1>(x)  depth = Constant<value = int64 {20}>()
            shape = Constant<value = int64[3] {2,4,5}>()
            values = Constant<value = float[2] {0.0, 1.0}>()  hot = OneHot(t, depth, values)
            target = Reshape(hot, shape)  d = Sub(p, target)
        }""")
    (region,) = explain(model).regions
    assert region.op == "CrossEntropyLossGrad" and "several axes together" in region.reason


@pytest.mark.parametrize(("tokens", "status"), [(4, "unmatched"), (256, "fuses")])
def test_attention_of_few_tokens(tokens: int, status: str) -> None:
    """Of few, its softmax is fused, and the reason why the rest is not is told."""
    whole = f"float[1,2,{tokens},8]"
    given, results = (", ".join(f"{whole} {name}" for name in names) for names in ("qkvg", ("o", "dq", "dk", "dv")))
    model = parsed(f"""m ({given}) => ({results}) {{
        kt = Transpose<perm = [0,1,3,2]>(k)  vt = Transpose<perm = [0,1,3,2]>(v)  last = Constant<value_ints = [-1]>()
        s = MatMul(q, kt)  p = Softmax<axis = -1>(s)  o = MatMul(p, v)  pt = Transpose<perm = [0,1,3,2]>(p)
        dv = MatMul(pt, g)  dp = MatMul(g, vt)  w = Mul(dp, p)  total = ReduceSum(w, last)  less = Sub(dp, total)
        ds = Mul(p, less)  dq = MatMul(ds, k)  dst = Transpose<perm = [0,1,3,2]>(ds)  dk = MatMul(dst, q)
    }}""")
    statuses = {region.op: region for region in explain(model).regions}
    region = statuses["ScaledDotProductAttentionBackward"]
    assert region.status == status
    assert ("4 x 4 scores" in region.reason) == (tokens == 4)
    assert ("ScaledMaskedSoftmaxBackward" in statuses) == (tokens == 4)


LOG_SUMS = {
    "Softplus": "gap = Sub(moved{0}, a{0})  soft{0} = Softplus(gap)  sum{0} = Add(a{0}, soft{0})",
    "ReduceLogSumExp": """one{0} = Unsqueeze(a{0}, axes)  two{0} = Unsqueeze(moved{0}, axes)
        both{0} = Concat<axis = 0>(one{0}, two{0})  sum{0} = ReduceLogSumExp<keepdims = 0>(both{0}, axes)""",
    "LogSoftmax": """one{0} = Unsqueeze(a{0}, axes)  two{0} = Unsqueeze(moved{0}, axes)
        both{0} = Concat<axis = 0>(one{0}, two{0})  logs{0} = LogSoftmax<axis = 0>(both{0})
        first{0} = Gather(logs{0}, zero)  sum{0} = Sub(a{0}, first{0})""",
}


@pytest.mark.parametrize("way", [*LOG_SUMS, "of probabilities"])
@pytest.mark.parametrize("trains", [True, False])
def test_a_recursion_over_alignments_that_is_unrolled(way: str, trains: bool) -> None:
    """Its gradient is an output, in another order of dimensions; without it, it is a forward pass."""
    product = "whole{0} = Add(a{0}, moved{0})  p{0} = Mul(whole{0}, row{0})  n{0} = ReduceSum(p{0}, last)"
    step = LOG_SUMS.get(way, product).replace("gap", "gap{0}")
    end = "b{0} = Div(p{0}, n{0})" if way == "of probabilities" else "b{0} = Add(sum{0}, row{0})"
    lines = ["a1 = Gather(x, zero)"]
    for k in range(1, 6):
        lines += [
            f"k{k} = Constant<value_int = {k}>()  row{k} = Gather(x, k{k})  moved{k} = Pad(a{k}, pads)",
            f"{step.format(k)}  {end.format(k)}".replace(f"b{k}", f"a{k + 1}"),
        ]
    text = f"""m (float[6,2,5] x) => (float[2,5] result, float[2,6,5] x_grad) {{
        pads = Constant<value_ints = [0,1,0,-1]>()  axes = Constant<value_ints = [0]>()
        last = Constant<value_ints = [1]>()  zero = Constant<value_int = 0>()
        {"  ".join(lines)}
        result = Identity(a6)  turned = Transpose<perm = [1, 0, 2]>(x)
        state = Unsqueeze({"a6" if trains else "a1"}, last)  x_grad = Mul(turned, state)
    }}"""
    regions = [region for region in explain(parsed(text)).regions if region.op == "CtcLossBackward"]
    assert [region.status for region in regions] == ["unmatched"] * trains
    assert all(" steps " in one.reason and ("probabilities" in one.reason) == (way in one.reason) for one in regions)


def test_the_text_and_the_data_say_the_same() -> None:
    explanation: Explanation = explain(small_models.attention())
    (region,) = explanation.regions
    assert str(region) in str(explanation) and region.node in str(region) and region.rule in str(region)
    data = json.loads(json.dumps(explanation.to_dict()))
    assert data["regions"][0]["op"] == region.op and tuple(data["regions"][0]["nodes"]) == region.nodes
    assert data["warnings"] == []


def test_nodes_without_names_go_by_their_outputs() -> None:
    model = small_models.attention()
    for node in model.graph.node:
        node.ClearField("name")
    (region,) = explain(model).regions
    assert region.node == "scores_grad" and "weighted" in region.nodes


@pytest.mark.parametrize("function", [explain, fuse])
def test_a_cycle_is_no_model(function: object) -> None:
    model = small_models.cross_entropy()
    model.graph.node[1].input[0] = "share"
    assert callable(function)
    with pytest.raises(ModelError, match="is not a valid ONNX model"):
        function(ir.from_proto(model))
    with pytest.raises(ModelError):
        function(model)


@pytest.mark.parametrize(("gates", "operator"), [(3, "GruRecurrenceBackward"), (4, "LstmRecurrenceBackward")])
@pytest.mark.parametrize("steps", [2, 4])
def test_recurrences_that_are_written_out_are_named(gates: int, operator: str, steps: int) -> None:
    width = 4 * gates
    parts = ", ".join(f"part{{0}}_{k}" for k in range(gates))
    lines = ["h0 = Identity(x)"]
    for k in range(steps):
        lines += [
            f"gates{k} = MatMul(h{k}, w)  {parts.format(k)} = Split<axis = 1, num_outputs = {gates}>(gates{k})",
            f"open{k} = Sigmoid(part{k}_0)  new{k} = Tanh(part{k}_1)  h{k + 1} = Mul(open{k}, new{k})",
        ]
    lines.append(f"turned = Transpose<perm = [1, 0]>(h{steps})  dw = MatMul(turned, gates{steps - 1})")
    model = parsed(f"g (float[2,4] x, float[4,{width}] w) => (float[4,{width}] dw) {{ {' '.join(lines)} }}")
    regions = [region for region in explain(model).regions if region.op == operator]
    assert [region.status for region in regions] == ["unmatched"] * (steps > 2)
    assert all(f"{steps} products by one weight" in region.reason for region in regions)


def test_what_is_spread_over_functions_is_found_as_fuse_finds_it() -> None:
    """The functions may be of another opset than the model."""
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 18, "f": 1]>
        mse (float[N,K] x, float[N,K] t) => (float[N,K] dx) { d = f.less (x, t)  dx = f.mean (d) }
        <domain: "f", opset_import: ["": 17]> less (a, b) => (c) { c = Sub (a, b) }
        <domain: "f", opset_import: ["": 17]> mean (d) => (e) {
            n = Size (d)  m = Cast <to = 1> (n)  two = Constant <value = float {2}> ()  u = Mul (d, two)  e = Div (u, m)
        }""")
    fused = fuse(model)
    (region,) = explain(model).regions
    assert region.status == "fuses" and [one.op for one in fused.report.fusions] == [region.op] == ["MseLossBackward"]
    x, t = (torch.randn(3, 4, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    (result,) = ort.InferenceSession(fused.model.SerializeToString()).run(None, {"x": x.numpy(), "t": t.numpy()})

    def by_torch(dtype: torch.dtype) -> torch.Tensor:
        leaf = x.detach().to(dtype, copy=True).requires_grad_()
        torch.nn.functional.mse_loss(leaf, t.to(dtype)).backward()  # type: ignore[no-untyped-call]
        assert leaf.grad is not None
        return leaf.grad

    assert_gradients_close(result, by_torch(torch.float32), by_torch(torch.float64), torch.float32)


def test_a_comparison_with_a_constant_is_none_with_maxima() -> None:
    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["": 20]>
        net (float[2, 3] x) => (float[2, 3] y) {
            number = Constant<value_float = 1.0>()
            same = Equal(x, number)
            y = Where(same, number, x)
        }
    """)
    assert not explain(model).regions
