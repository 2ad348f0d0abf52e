"""Operators of onnxruntime-training, written in standard ones, against PyTorch."""

from __future__ import annotations

import onnx_ir as ir
import pytest
import torch
from ort_training.operator_cases import CASES

from gradfuse import ModelError, fuse
from gradfuse.ort_training import operators

# These use operators that opset 18 has changed.
_OF_BOTH_OPSETS = ("Normalization", "BatchNorm", "Split")


@pytest.mark.parametrize(
    ("index", "opset"),
    [
        pytest.param(index, opset, id=f"{index}-{case.op_type}-{opset}")
        for index, case in enumerate(CASES)
        for opset in (17, 18)
        if opset == 17 or any(part in case.op_type for part in _OF_BOTH_OPSETS)
    ],
)
def test_replacement_is_as_near_as_pytorch(index: int, opset: int) -> None:
    native = [result.numpy() for result in CASES[index].evaluated(torch.float32)[1]]
    CASES[index].require_replacement(native, opset)


@pytest.mark.parametrize("attributes", ['reduction = "sum"', "ignore_index = 1", 'reduction = "sum", ignore_index = 1'])
@pytest.mark.parametrize("weight", ["", ", float[4] weight"])
def test_what_replaces_the_gradient_of_cross_entropy_is_fused(attributes: str, weight: str) -> None:
    model = ir.from_onnx_text(f"""
        <ir_version: 8, opset_import: ["" : 17, "com.microsoft" : 1]>
        g (float dy, float[n, 4] logits, int64[n] label {weight}) => (float[n, 4] dx) <float[n, 4] log_prob>
        {{
            log_prob = LogSoftmax <axis = 1> (logits)
            dx = com.microsoft.SoftmaxCrossEntropyLossGrad <{attributes}> (dy, log_prob, label{weight and ", weight"})
        }}
    """)
    operators.replace(model.graph, "m.onnx")
    del model.opset_imports["com.microsoft"]
    assert [fusion.op for fusion in fuse(model, policy="all").report.fusions] == ["CrossEntropyLossGrad"]


def test_every_replacement_has_a_case() -> None:
    assert {(case.domain, case.op_type) for case in CASES} == set(operators.REPLACEMENTS)


def test_all_that_cannot_be_replaced_is_named_at_once() -> None:
    model = ir.from_onnx_text("""
        <ir_version: 8, opset_import: ["" : 17, "com.microsoft" : 1]>
        g (float[2, 3] x, float[3, 2] w) => (float[2, 2] a, float[2, 3] b, float[2, 3] c, float[2, 3] d)
        {
            a = com.microsoft.FusedMatMul <transBatchA = 1> (x, w)
            b = com.microsoft.ReluGrad (x, x)
            c = com.microsoft.LSTMGrad (x)
            d = AveragePoolGrad (x)
        }
    """)
    expected = "AveragePoolGrad, FusedMatMul (it transposes batch axes), LSTMGrad"
    with pytest.raises(ModelError) as caught:
        operators.replace(model.graph, "m.onnx")
    assert (
        str(caught.value) == f"m.onnx: has operators of onnxruntime-training that gradfuse cannot replace: {expected}"
    )
