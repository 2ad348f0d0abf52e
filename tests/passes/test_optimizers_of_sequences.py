"""Optimizers of onnxruntime-training over sequences that a graph lists become an update for each parameter."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import TensorProto, helper

import gradfuse
from gradfuse import explain, fuse
from gradfuse.testing import assert_gradients_close

pytestmark = pytest.mark.usefixtures("inference_in_process")

Array = npt.NDArray[Any]

SHAPES = {"w": (3, 2), "b": (4,)}
STEP, RATE = 3, 0.1
SEQUENCES = {"AdamWOptimizer": ("weights", "gradients", "first", "second"), "SGDOptimizerV2": ("weights", "gradients")}


def graph(
    optimizer: str = "AdamWOptimizer", *, signal: bool = False, nodes: str = "", results: str = "", **attributes: Any
) -> onnx.ModelProto:
    """Its new tensors are outputs, as `nodes` and `results` say, or each by SequenceAt; and whether it did anything."""
    sequences = SEQUENCES[optimizer]
    inputs = [f"float[{','.join(map(str, shape))}] {s}_{name}" for s in sequences for name, shape in SHAPES.items()]
    inputs += ["float[1] rate", "int64[1] count"] if optimizer == "AdamWOptimizer" else ["float[1] rate"]
    inputs += ["bool[1] signal"] if signal else []
    made = [f"{s} = SequenceConstruct({', '.join(f'{s}_{name}' for name in SHAPES)})" for s in sequences]
    updated = [s for s in sequences if s != "gradients"]
    given = ["rate", *(["count"] if optimizer == "AdamWOptimizer" else []), *sequences, *(["signal"] if signal else [])]
    options = ", ".join(f"{key} = {value}" for key, value in attributes.items())
    made.append(
        f"flag, {', '.join(f'new_{s}' for s in updated)} = com.microsoft.{optimizer}"
        f"{f'<{options}>' if options else ''}({', '.join(given)})"
    )
    if not nodes:
        for k, (name, shape) in enumerate(SHAPES.items()):
            made.append(f"at_{name} = Constant<value_int = {k - len(SHAPES) * (k % 2)}>()")
            made += [f"{s}_{name}_new = SequenceAt(new_{s}, at_{name})" for s in updated]
            results += "".join(f"float[{','.join(map(str, shape))}] {s}_{name}_new, " for s in updated)
    text = (
        f'<ir_version: 8, opset_import: ["": 17, "com.microsoft": 1]> '
        f"update ({', '.join(inputs)}) => ({results} bool[1] flag) {{ {' '.join(made)} {nodes} }}"
    )
    return onnx.parser.parse_model(text)


def feeds(model: onnx.ModelProto) -> dict[str, Array]:
    numbers = np.random.default_rng(0)
    found: dict[str, Array] = {"rate": np.asarray([RATE], np.float32), "count": np.asarray([STEP])}
    found["signal"] = np.asarray([True])
    for sequence in SEQUENCES["AdamWOptimizer"]:
        for name, shape in SHAPES.items():
            array = numbers.standard_normal(shape).astype(np.float32)
            found[f"{sequence}_{name}"] = np.abs(array) if sequence == "second" else array
    return {value.name: found[value.name] for value in model.graph.input}


def run(model: onnx.ModelProto, given: dict[str, Array], *, registered: bool) -> dict[str, Any]:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    if registered:
        gradfuse.register(options)
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return dict(zip([one.name for one in session.get_outputs()], session.run(None, given), strict=True))


def by_torch(given: dict[str, Array], dtype: torch.dtype, optimizer: str, **options: Any) -> dict[str, Array]:
    result: dict[str, Array] = {}
    for name in SHAPES:
        tensors = {s: torch.tensor(given[f"{s}_{name}"], dtype=dtype) for s in SEQUENCES[optimizer]}
        parameter = torch.nn.Parameter(tensors["weights"])
        parameter.grad = tensors["gradients"]
        if optimizer == "AdamWOptimizer":
            adam = torch.optim.AdamW([parameter], lr=RATE, **options)
            moments = {"exp_avg": tensors["first"], "exp_avg_sq": tensors["second"]}
            adam.state[parameter] = {"step": torch.tensor(float(STEP - 1)), **moments}
            adam.step()
            result |= {f"{s}_{name}_new": m.numpy() for s, m in zip(("first", "second"), moments.values(), strict=True)}
        else:
            torch.optim.SGD([parameter], lr=RATE).step()
        result[f"weights_{name}_new"] = parameter.detach().numpy()
    return result


@pytest.mark.parametrize("signal", [False, True])
@pytest.mark.parametrize(
    ("optimizer", "attributes", "options"),
    [
        ("AdamWOptimizer", {}, {"weight_decay": 1e-2}),
        (
            "AdamWOptimizer",
            {"alpha": 0.8, "beta": 0.99, "epsilon": 1e-6, "weight_decay": 0.1},
            {"betas": (0.8, 0.99), "eps": 1e-6, "weight_decay": 0.1},
        ),
        ("SGDOptimizerV2", {}, {}),
    ],
    ids=["AdamW", "AdamW with options", "SGD"],
)
def test_each_parameter_has_an_update(
    optimizer: str, attributes: dict[str, Any], options: dict[str, Any], signal: bool
) -> None:
    model = graph(optimizer, signal=signal, **attributes)
    result = fuse(model, policy="all")
    assert [f.op for f in result.report.fusions] == [{"A": "ApplyAdamW", "S": "ApplySgd"}[optimizer[0]]] * len(SHAPES)
    assert {node.domain for node in result.model.graph.node} == {"", "aclnn"}
    assert not {"SequenceConstruct", "SequenceAt"}.intersection(node.op_type for node in result.model.graph.node)
    onnx.checker.check_model(result.model, full_check=True)
    given = feeds(model)
    exact, native = (by_torch(given, dtype, optimizer, **options) for dtype in (torch.float64, torch.float32))
    for registered in (False, True):
        got = run(result.model, given, registered=registered)
        np.testing.assert_array_equal(got.pop("flag"), [True])
        assert got.keys() == exact.keys()
        for name, array in exact.items():
            assert_gradients_close(got[name], native[name], array, np.float32, terms=4.0)
        if signal:
            got = run(result.model, given | {"signal": np.asarray([False])}, registered=registered)
            np.testing.assert_array_equal(got.pop("flag"), [False])
            for name, array in got.items():
                np.testing.assert_array_equal(array, given[name.removesuffix("_new")])


def test_new_tensors_stay_a_sequence_where_one_is_read() -> None:
    nodes = """
        length = SequenceLength(new_weights)  first_of = Constant<value_int = 0>()
        again = SequenceAt(new_weights, first_of)  more = SequenceAt(new_weights, first_of)
    """
    model = graph(nodes=nodes, results="seq(float) new_first, int64 length, float[3,2] again, float[3,2] more,")
    result = fuse(model, policy="all")
    assert len(result.report.fusions) == len(SHAPES)
    given = feeds(model)
    exact, native = (
        by_torch(given, dtype, "AdamWOptimizer", weight_decay=1e-2) for dtype in (torch.float64, torch.float32)
    )
    got = run(result.model, given, registered=False)
    assert got["length"] == len(SHAPES)
    wanted = ["weights_w_new", "weights_w_new", "first_w_new", "first_b_new"]
    for actual, name in zip([got["again"], got["more"], *got["new_first"]], wanted, strict=True):
        assert_gradients_close(actual, native[name], exact[name], np.float32, terms=4.0)


def test_the_optimizer_stays_where_only_the_cost_decides() -> None:
    model = graph()
    assert not fuse(model).report.fusions
    (region,) = explain(model).regions
    assert (region.op, region.status) == ("ApplyAdamW", "unprofitable")
    assert 'the policy "all" takes it, and stock onnxruntime has no AdamWOptimizer' in region.reason


def changed(old: str, new: str) -> onnx.ModelProto:
    text = onnx.printer.to_text(graph()).replace(" (", "(")
    assert old in text
    return onnx.parser.parse_model(text.replace(old, new))


CLIPPED = """whole = SequenceConstruct(gradients_w, gradients_b)
    gradients = com.microsoft.InplaceClipGradNorm(whole)"""
STAYING = {
    "its sequences have 1 and 2 and 2 and 2 tensors": changed("(weights_w, weights_b)", "(weights_w)"),
    "'weights_w' and what belongs to it have several shapes": changed("first_w, first_b)", "first_b, first_w)"),
    "something else reads the sequence 'weights'": graph(nodes="seen = SequenceLength(weights)", results="int64 seen,"),
    "InplaceClipGradNorm makes one of its sequences": changed(
        "gradients = SequenceConstruct(gradients_w, gradients_b)", CLIPPED
    ),
}


@pytest.mark.parametrize("reason", STAYING)
def test_explain_says_why_an_optimizer_stays(reason: str) -> None:
    assert not fuse(STAYING[reason], policy="all").report.fusions
    (region,) = (one for one in explain(STAYING[reason]).regions if one.op == "ApplyAdamW")
    assert region.status == "unmatched" and reason in region.reason, region


def test_states_of_another_type_stay() -> None:
    model = graph()
    for value in model.graph.input:
        if value.name.startswith("second"):
            value.type.tensor_type.elem_type = TensorProto.DOUBLE
    del model.graph.output[:]
    model.graph.output.append(helper.make_tensor_value_info("flag", TensorProto.BOOL, [1]))
    (region,) = explain(model).regions
    assert "not all of its tensors are float32" in region.reason
