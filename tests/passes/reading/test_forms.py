"""The canonical form of every value of real training graphs, evaluated, against what onnxruntime computes."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import onnxruntime as ort
import pytest
import stacking
from evaluation import Array, Evaluation, constants, squeezed
from onnx_ir.passes.common import ShapeInferencePass
from producers import COMMITTED, Case, cases
from variants import FEEDS, GRAPHS, Build, built

from gradfuse.passes.algebra import Algebra
from gradfuse.passes.reading import Form, Forms


def _committed() -> list[Case]:
    names = {f"{p.parent.name}/{p.stem}" for p in COMMITTED.glob("*/*.onnx")}
    return [c for c in cases() if str(c) in names and c.runs and "dropout" not in c.name]


def _compared(model: ir.Model, feeds: Mapping[str, Array]) -> tuple[int, int]:
    """How many values have a form that onnxruntime agrees with, of how many; any that it does not is an error."""
    model = ShapeInferencePass(strict_mode=False)(model).model
    forms = Forms(model.graph)
    feeds = {str(v.name): feeds[str(v.name)] for v in model.graph.inputs}
    outputs = {o.name for o in model.graph.outputs}
    values = [v for n in model.graph for v in n.outputs if v.name]
    typed = [v for v in values if v.dtype is not None and (v.shape is not None or v.name in outputs)]
    model.graph.outputs.extend(v for v in typed if v.name not in outputs)
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    got = dict(zip([o.name for o in session.get_outputs()], session.run(None, feeds), strict=True))

    dims = {}
    for value in (*model.graph.inputs, *typed):
        array = feeds.get(str(value.name), got.get(str(value.name)))
        assert array is not None
        for axis, (d, n) in enumerate(zip(value.shape or (), np.shape(array), strict=False)):
            if isinstance(d, ir.SymbolicDim):
                dims[f"?{value.name}.{axis}" if d.value is None else str(d.value)] = n
    named = [(v, (got | feeds)[str(v.name)]) for v in (*typed, *model.graph.inputs)]
    named += [(v, a) for v in model.graph.initializers.values() if (a := forms.constant(v)) is not None]
    tensors: dict[object, Array] = {v.name: squeezed(a, v) for v, a in named}
    evaluation = Evaluation(forms.algebra, tensors | constants(forms, model.graph), dims)
    for (_, groups), name in forms._names.items():
        sizes = [int(evaluation.poly(size, {}).item()) for group in groups for size in group]
        if np.size(tensors.get(name, 0.0)) != np.prod(sizes):
            # What an index out of range would pick: nothing is known of it, and a form has it times 0.
            evaluation = evaluation.with_tensor(name, np.random.default_rng(0).standard_normal(sizes))

    # The forms see through casts: where a part of the graph is in half precision, all of it may be rounded to it.
    eps = 1e-3 if any(v.dtype == ir.DataType.FLOAT16 for v in typed) else 1.2e-7
    compared = 0
    for value in typed:
        form = forms.get(value)
        array = got[str(value.name)].astype(np.float64)
        if form is None or not np.all(np.isfinite(array)) or _is_opaque(forms.algebra, form):
            continue
        with np.errstate(all="ignore"):
            worth = evaluation.form(form)
        if np.all(np.isfinite(worth)):
            bound = 64 * eps * max(1.0, float(np.abs(array).max(initial=0)))
            np.testing.assert_allclose(worth, array, rtol=0, atol=bound, err_msg=str(value.name))
            compared += 1
    return compared, len(typed)


@pytest.mark.parametrize("case", _committed(), ids=str)
def test_forms_are_worth_what_onnxruntime_computes(case: Case) -> None:
    compared, count = _compared(ir.load(case.path), case.arrays("in"))
    assert compared >= count / 6


@pytest.mark.parametrize(("operator", "name", "build"), GRAPHS, ids=[f"{o}: {n}" for o, n, _ in GRAPHS])
def test_forms_of_further_operators(operator: str, name: str, build: Build) -> None:
    assert _compared(ir.from_proto(built(build)), FEEDS)[0]


LAYERS = ("torch_export_fb/gpt_block_ce_dyn", "torch_export_fb/ce_mean_smooth_weight_ignore_input_dyn")


@pytest.mark.parametrize("case", [c for c in _committed() if str(c) in LAYERS], ids=str)
def test_forms_of_equal_layers_on_tensors_of_their_own(case: Case) -> None:
    block = onnx.load(case.path)
    model = stacking.stacked([block], 2 * len(block.graph.node), chained=False)
    first = case.arrays("in")
    second = {k: np.asarray(1.5 * a, a.dtype) if a.dtype.kind == "f" else a[::-1] for k, a in first.items() if a.ndim}
    feeds = {f"c0.{k}": a for k, a in first.items()} | {f"c1.{k}": a for k, a in (first | second).items()}
    compared, count = _compared(ir.from_proto(model), feeds)
    assert compared >= count / 6


def test_forms_of_nodes_that_differ_by_which_operands_are_the_same() -> None:
    pairs = [f"{name}{op} = {op}({a}, {b})" for name, a, b in _PAIRS for op in ("Sub", "Mul", "Div", "Concat")]
    text = "\n".join(pairs).replace("Concat(", "Concat<axis=0>(")
    names = [pair.partition(" ")[0] for pair in pairs]
    outputs = ", ".join(f"float[{6 if name.endswith('Concat') else 3}, 3] {name}" for name in names)
    head = '<ir_version: 8, opset_import: ["": 18]> g '
    model = onnx.parser.parse_model(f"{head}(float[3, 3] x, float[3, 3] y, float[3, 3] z) => ({outputs}) {{ {text} }}")
    rng = np.random.default_rng(0)
    feeds = {name: rng.normal(size=(3, 3)).astype(np.float32) for name in "xyz"}
    assert _compared(ir.from_proto(model), feeds)[0] >= 3 * len(_PAIRS)


_PAIRS = [("a", "x", "y"), ("b", "y", "x"), ("c", "x", "x"), ("d", "z", "z"), ("e", "y", "z"), ("f", "aMul", "z")]


def test_forms_of_nodes_that_differ_by_the_sign_of_indices() -> None:
    text = """<ir_version: 8, opset_import: ["": 18]> g (float[100] x) => (float[80] y, float[80] z)
        { i = Identity(a) u = Gather(x, i) y = Exp(u) j = Identity(b) v = Gather(x, j) z = Exp(v) }"""
    model = onnx.parser.parse_model(text)
    rng = np.random.default_rng(0)
    indices = {"a": rng.integers(0, 100, 80), "b": rng.integers(-100, 0, 80)}
    model.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in indices.items())
    assert _compared(ir.from_proto(model), {"x": rng.normal(size=100).astype(np.float32)})[0] == 2


def test_forms_of_a_graph_do_not_depend_on_those_of_another() -> None:
    feeds = {name: np.arange(100, dtype=np.float32) for name in ("x", "y")}

    def of_products(*factors: float) -> tuple[int, int]:
        outputs = ", ".join(f"float[100] z{k}" for k in range(len(factors)))
        nodes = "\n".join(f"z{k} = Mul(xy, c{k})" for k in range(len(factors)))
        text = f'<ir_version: 8, opset_import: ["": 18]> g (float[100] x, float[100] y) => ({outputs})'
        model = onnx.parser.parse_model(f"{text} {{ xy = Mul(x, y) {nodes} }}")
        constants = [np.full(100, factor, np.float32) for factor in factors]
        model.graph.initializer.extend(onnx.numpy_helper.from_array(c, f"c{k}") for k, c in enumerate(constants))
        return _compared(ir.from_proto(model), feeds)

    assert of_products(5.125) == (2, 2)
    assert of_products(7.25, 5.125) == (3, 3)


@pytest.mark.parametrize("product", ["MatMul(x, v)", "MatMul(v, x)", "MatMul(x, of_some_rank)"])
def test_forms_of_sizes_beside_a_product_with_a_vector(product: str) -> None:
    model = onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["": 18]>
        g (float[a, b, 5, 5] x, float[5] v, int64[n] shape) => (float[a, b, 5] y, int64[1] first, int64[1] second)
        {{ of_some_rank = Reshape(v, shape) y = {product}
           first = Shape<start = 0, end = 1>(x) second = Shape<start = 1, end = 2>(x) }}""")
    feeds = {"x": np.ones((2, 3, 5, 5), np.float32), "v": np.ones(5, np.float32), "shape": np.asarray([5])}
    assert _compared(ir.from_proto(model), feeds)[0] == 2


def _is_opaque(algebra: Algebra, form: Form) -> bool:
    """Whether the form is only a name."""
    monomials = list(form.poly.terms)
    return len(monomials) == 1 and len(monomials[0]) == 1 and algebra.atoms[monomials[0][0][0]].kind == "tensor"
