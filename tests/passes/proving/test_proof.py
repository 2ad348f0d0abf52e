"""A match is run with numbers before it is taken: a wrong proposal is dropped and reported, whatever its size.

The rules are made wrong here one way after the other: the node that a rule makes is changed before it is proved.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from graphs import parsed
from producers import COMMITTED, Case, cases, run
from quantised import quantised

from gradfuse import build_training_step, fuse
from gradfuse.passes.matching import Rewrite, Site, fuse_pass
from gradfuse.passes.proving import Refuted, proof

Change = Callable[[ir.Node], bool]


def _attribute(name: str, change: Callable[[Any], Any]) -> Change:
    def apply(node: ir.Node) -> bool:
        found = node.attributes.get(name)
        if found is None:
            return False
        node.attributes[name] = ir.convenience.convert_attribute(name, change(found.value))
        return True

    return apply


def _swapped(a: int, b: int) -> Change:
    def apply(node: ir.Node) -> bool:
        if len(node.inputs) <= b:
            return False
        first, second = node.inputs[a], node.inputs[b]
        assert first is not None and second is not None
        same = first is second or (first.const_value is not None and second.const_value is not None)
        node.replace_input_with(a, second)
        node.replace_input_with(b, first)
        return not same

    return apply


def _dropped(position: int) -> Change:
    def apply(node: ir.Node) -> bool:
        if len(node.inputs) <= position:
            return False
        node.resize_inputs(position)
        return True

    return apply


WRONG: dict[str, tuple[str, Change]] = {
    "scale": ("ScaledMaskedSoftmaxBackward", _attribute("scale", lambda x: 1.5 * x)),
    "no mask": ("ScaledMaskedSoftmaxBackward", _dropped(2)),
    "y and gradient": ("ScaledMaskedSoftmaxBackward", _swapped(0, 1)),
    "reduction of a loss": (
        "CrossEntropyLossGrad",
        _attribute("reduction", lambda x: "sum" if x == "mean" else "mean"),
    ),
    "ignored class": ("CrossEntropyLossGrad", _attribute("ignore_index", lambda x: 1)),
    "smoothing": ("CrossEntropyLossGrad", _attribute("label_smoothing", lambda x: x + 0.2)),
    "no weights": ("CrossEntropyLossGrad", _dropped(3)),
    "sign of a difference": ("MseLossBackward", _swapped(1, 2)),
    "reduction of an error": ("MseLossBackward", _attribute("reduction", {1: 2, 2: 1, 0: 1}.get)),
    "equal groups": ("GroupedBiasAddGrad", _dropped(1)),
}


def _cases(operator: str) -> list[Case]:
    committed = {f"{p.parent.name}/{p.stem}" for p in COMMITTED.glob("*/*.onnx")}
    return [c for c in cases() if str(c) in committed and operator in c.expect]


@pytest.mark.long
@pytest.mark.parametrize("name", WRONG)
def test_wrong_rule_is_reported_and_changes_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    operator, change = WRONG[name]
    refused: list[str] = []

    def proved(site: Site, rewrite: Rewrite, tolerance: float) -> None:
        if rewrite.operator == operator and change(rewrite.fused[0]):
            with pytest.raises(Refuted) as error:
                proof.prove(site, rewrite, tolerance)
            refused.append(str(rewrite.fused[0].name))
            raise error.value
        proof.prove(site, rewrite, tolerance)

    monkeypatch.setattr(fuse_pass, "prove", proved)
    reported = total = 0
    for case in _cases(operator):
        refused.clear()
        result = fuse(case.path, policy="all")
        assert not {f.node for f in result.report.fusions}.intersection(refused), case
        reported += sum(m.bug for m in result.report.near_misses)
        if not result.report.fusions:
            assert result.model.graph.node == onnx.load(case.path).graph.node, case
        total += len(refused)
    assert reported == total > 0


@pytest.mark.long
def test_no_rule_is_refuted_on_the_corpus() -> None:
    names = {f"{p.parent.name}/{p.stem}" for p in COMMITTED.glob("*/*.onnx")}
    for case in cases():
        if str(case) in names:
            report = fuse(case.path, policy="all").report
            assert not [m for m in report.near_misses if m.bug or "numbers" in m.reason], case


LARGE = {
    "CrossEntropyLossGrad": """m (float[8192,50257] z, int64[8192] t) => (float[8192,50257] r) {
      l = LogSoftmax<axis=1>(z)  axis = Constant<value_ints=[1]>()  u = Unsqueeze(t, axis)
      blank = ConstantOfShape<value = float[1] {0.0}>(shape)
      minus = ConstantOfShape<value = float[1] {-0.0001220703125}>(column)
      m = ScatterElements<axis=1>(blank, u, minus)
      s = ReduceSum(m, axis)  e = Exp(l)  es = Mul(e, s)  r = Sub(m, es)
    }""",
    "ScaledMaskedSoftmaxBackward": """m (float[32,2048,2048] z, float[32,2048,2048] g, bool[2,1,2048,2048] k)
        => (float[2,16,2048,2048] r) {
      y = Softmax<axis=2>(z)  t = Mul(g, y)  axis = Constant<value_ints=[2]>()
      s = ReduceSum(t, axis)  u = Mul(y, s)  d = Sub(t, u)
      heads = Constant<value_ints=[2,16,2048,2048]>()  four = Reshape(d, heads)
      zero = Constant<value_float=0.0>()  m = Where(k, four, zero)
      scale = Constant<value_float=0.125>()  r = Mul(m, scale)
    }""",
    "ScaledMaskedSoftmaxBackward of a batch": """m (float[B,4,1020,1020] z, float[Q,1020,1020] g, bool[B,1,1020,1020] k)
        => (float[B,4,1020,1020] r) {
      heads = Shape(z)  four = Reshape(g, heads)
      y = Softmax<axis=-1>(z)  t = Mul(four, y)  axis = Constant<value_ints=[-1]>()
      s = ReduceSum(t, axis)  u = Mul(y, s)  d = Sub(t, u)
      zero = Constant<value_float=0.0>()  m = Where(k, zero, d)
      scale = Constant<value_float=0.0313112>()  r = Mul(m, scale)
    }""",
    "MseLossBackward": """m (float[4096,12288] x, float[4096,12288] t) => (float[4096,12288] r) {
      d = Sub(x, t)  c = Constant<value_float=3.973642985026042e-08>()  r = Mul(d, c)
    }""",
    "GroupedBiasAddGrad": """m (float[65536,4096] g) => (float[3,4096] r) {
      a, b, c = Split<axis=0>(g, parts)  axis = Constant<value_ints=[0]>()
      p = ReduceSum<keepdims=1>(a, axis)  q = ReduceSum<keepdims=1>(b, axis)  s = ReduceSum<keepdims=1>(c, axis)
      r = Concat<axis=0>(p, q, s)
    }""",
}
SIZES = {"shape": [8192, 50257], "column": [8192, 1], "parts": [20000, 30000, 15536]}


def _large(name: str) -> onnx.ModelProto:
    text = LARGE[name]
    head, body = text.split("{", 1)
    constants = "".join(
        f"{name} = Constant<value_ints={values}>()  " for name, values in SIZES.items() if f"{name})" in text
    )
    return parsed(f"{head}{{ {constants}{body}")


@pytest.mark.parametrize("name", LARGE)
def test_large_static_sizes_are_proved_small(name: str) -> None:
    report = fuse(_large(name), policy="all").report
    assert [f.op for f in report.fusions] == name.split()[:1], report


def test_memory_stays_small(tmp_path: Path) -> None:
    """The tensors of these graphs have up to 1.6 GiB, and several of them are alive at a time."""
    paths = []
    for name in LARGE:
        paths.append(str(tmp_path / f"{name}.onnx"))
        onnx.save(_large(name), paths[-1])
    script = (
        "import sys\nfrom gradfuse import fuse\n"
        "assert all(fuse(p, policy='all').report.fusions for p in sys.argv[1:])\n"
        "print(next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", script, *paths], check=True, env=environment, capture_output=True, text=True
    )
    # In KiB; getrusage would count what the process was forked from.
    assert int(done.stdout) < 1 << 19


@pytest.fixture
def proved(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The operators whose proofs are run, where nothing has been proved before."""
    names: list[str] = []
    verdict = proof.Proof._verdict

    def noted(self: proof.Proof) -> Exception | None:
        names.append(self.region.operator.name)
        return verdict(self)

    monkeypatch.setattr(proof.Proof, "_verdict", noted)
    monkeypatch.setattr(proof, "_PROVED", set())
    return names


def test_equal_blocks_are_run_once(proved: list[str]) -> None:
    block = """
      y{k} = Softmax<axis=1>(z{k})  t{k} = Mul(g{k}, y{k})  s{k} = ReduceSum(t{k}, axis)
      u{k} = Mul(y{k}, s{k})  r{k} = Sub(t{k}, u{k})
    """
    count = 12
    inputs = ", ".join(f"float[4,5] z{k}, float[4,5] g{k}" for k in range(count))
    outputs = ", ".join(f"float[4,5] r{k}" for k in range(count))
    body = "".join(block.format(k=k) for k in range(count))
    model = parsed(f"m ({inputs}) => ({outputs}) {{ axis = Constant<value_ints=[1]>() {body} }}")
    for _ in range(2):
        assert len(fuse(model, policy="all").report.fusions) == count
        assert len(proved) == 1


@pytest.mark.parametrize("batch", ["2", "N"])
def test_layers_behind_quantised_products_are_run_once(batch: str, proved: list[str]) -> None:
    """Their sizes are known: the products keep those of what they multiply, and reshapes with 0 and -1 pass them on."""
    layer = """
      p{k} = com.microsoft.MatMulNBits<K=16, N=16, bits=4, block_size=16>(x{k}, w_Q4, w_scales)
      f{k} = Add(p{k}, b{k})  h{k} = Reshape(f{k}, heads)  a{k} = Transpose<perm=[0,2,1,3]>(h{k})
      t{k} = Transpose<perm=[0,2,3,1]>(h{k})  m{k} = MatMul(a{k}, t{k})  s{k} = Softmax(m{k})  v{k} = MatMul(s{k}, a{k})
      j{k} = Transpose<perm=[0,2,1,3]>(v{k})  x{next} = Reshape(j{k}, joined)
    """
    count, weight = 4, quantised(16, 16)
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 18, "com.microsoft": 1]>
        m (float[{batch},T,16] x0) => (float[{batch},T,16] y)
        <int64[4] heads = {{0,-1,2,8}}, int64[3] joined = {{0,0,16}}> {{
        {"".join(layer.format(k=k, next=k + 1) for k in range(count))} y = Identity(x{count}) }}"""
    )
    ones = np.arange(16, dtype=np.float32)
    model.graph.initializer.extend(onnx.numpy_helper.from_array(ones, f"b{k}") for k in range(count))
    model.graph.initializer.extend(weight.initializers())
    step = build_training_step(model, "mse", trainable=[f"b{k}" for k in range(count)])
    assert step.report is not None
    assert [f.op for f in step.report.fusions].count("ScaledMaskedSoftmaxBackward") == count
    assert proved.count("ScaledMaskedSoftmaxBackward") == 1


def test_ignored_rows_stay_zero_behind_an_infinite_factor() -> None:
    """The factor has a dimension of its own, so it stays outside of the fused op: 0 x Inf would be NaN."""
    model = parsed("""m (float[4,5] z, int64[4] t, float[3] f) => (float[4,5,3] r) {
      axis = Constant<value_ints=[1]>()  last = Constant<value_ints=[2]>()
      l = LogSoftmax<axis=1>(z)  p = Exp(l)  u = Unsqueeze(t, axis)
      ignored = Constant<value_int=-100>()  e = Equal(u, ignored)
      zero = Constant<value_int=0>()  i = Where(e, zero, u)
      classes = Constant<value_ints=[0,1,2,3,4]>()  h = Equal(i, classes)  oh = Cast<to=1>(h)
      d = Sub(p, oh)  d3 = Unsqueeze(d, last)  q = Mul(d3, f)
      e3 = Unsqueeze(e, last)  nothing = Constant<value_float=0.0>()  r = Where(e3, nothing, q)
    }""")
    result = fuse(model, policy="all")
    assert [f.op for f in result.report.fusions] == ["CrossEntropyLossGrad"]
    rng = np.random.default_rng(0)
    feeds = {
        "z": rng.standard_normal((4, 5)).astype(np.float32),
        "t": np.array([1, -100, 4, -100]),
        "f": np.array([1.0, np.inf, np.nan], np.float32),
    }
    got, wanted = run(result.model, feeds)["r"], run(model, feeds)["r"]
    assert np.array_equal(np.isnan(got), np.isnan(wanted))
    assert not got[1].any() and not got[3].any()


def test_a_division_that_may_be_by_zero_stays() -> None:
    """x / k * k is x, but NaN where k is 0."""
    model = parsed("""m (float[4,5] z, float[4,5] g, float k) => (float[4,5] r) {
      y = Softmax<axis=1>(z)  t = Mul(g, y)  axis = Constant<value_ints=[1]>()
      s = ReduceSum(t, axis)  u = Mul(y, s)  d = Sub(t, u)  q = Div(d, k)  r = Mul(q, k)
    }""")
    report = fuse(model, policy="all").report
    assert "r" not in {name for f in report.fusions for name in f.replaced}
    (miss,) = [m for m in report.near_misses if "numbers" in m.reason]
    assert "nan" in miss.reason and not miss.bug


def test_what_a_sort_orders_is_in_order_in_the_proof_too() -> None:
    model = parsed("""m (float[batch,4] x) => (float[4,4] sums) <int64[batch] group, int64[batch,1] column> {
      chosen = ArgMax<axis=1, keepdims=0>(x)  count = Shape(chosen)  group, order = TopK<largest=0>(chosen, count)
      last = Constant<value_ints=[-1]>()  column = Unsqueeze(group, last)  rows = Exp(x)
      shape = Constant<value_ints=[4,4]>()  zeros = ConstantOfShape(shape)
      sums = ScatterND<reduction="add">(zeros, column, rows)
    }""")
    report = fuse(model, policy="all").report
    assert [fusion.op for fusion in report.fusions] == ["GroupedBiasAddGrad"]
    assert not any(miss.bug for miss in report.near_misses)


def test_a_shape_that_is_not_known_is_not_drawn() -> None:
    """Random numbers in it would make tensors of any size. In the model without functions the shape is known."""
    text = """<ir_version: 10, opset_import: ["": 20, "local": 1]>
    g (float[4,1] x, float[4,1] goal) => (float[4,1] y) {
        shape = local.Sizes(x)  again = Expand(x, shape)  d = Sub(again, goal)
        k = Constant<value_float = 0.5>()  y = Mul(d, k)
    }
    <domain: "local", opset_import: ["": 20]> Sizes (a) => (sizes) { sizes = Shape(a) }"""
    tracemalloc.start()
    try:
        result = fuse(onnx.parser.parse_model(text), policy="all")
        assert tracemalloc.get_traced_memory()[1] < 1 << 27
    finally:
        tracemalloc.stop()
    assert [one.op for one in result.report.fusions] == ["MseLossBackward"], result.report
