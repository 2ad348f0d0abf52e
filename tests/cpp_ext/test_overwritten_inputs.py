"""Kernels may write over an input that nothing else reads: the results are those beside an input that is kept."""

from __future__ import annotations

from typing import Any

import onnxruntime as ort
import pytest
import torch
from backends import ONNX_TYPES, to_ort_value
from cpp_ext.single_node import library_of
from onnx import TensorProto, helper
from operators import SAMPLES, Sample
from torch import Tensor

from gradfuse.custom_ops import DOMAIN, OPS
from gradfuse.passes.recompute import OVERWRITING

OVERWRITTEN = {op: 1 if op == "CrossEntropyLossGrad" else 0 for op in sorted(OVERWRITING & OPS.keys())}
"""Operator -> index of the input; the first output has its shape. tests/training/test_in_place.py has the one that
no file has."""


def outputs_of(op: str, sample: Sample, *, kept: bool) -> list[Tensor]:
    """Run an operator on a copy of the input, which onnxruntime may reuse, or which is an output too."""
    index, names = OVERWRITTEN[op], [input.name for input in OPS[op].inputs]
    given = {name: value for name, value in zip(names, sample.inputs, strict=False) if value is not None}
    copied = names[index]
    outputs = [output.name for output in OPS[op].outputs]
    wide = given[copied].dtype == torch.bfloat16
    t, shape = ONNX_TYPES[given[copied].dtype], list(given[copied].shape)
    given[copied] = given[copied].permute([*reversed(range(len(shape)))]).contiguous()
    nodes = [
        helper.make_node("Transpose", [copied], ["copy"]),
        helper.make_node(
            op,
            ["copy" if name == copied else name if name in given else "" for name in names],
            outputs,
            domain=DOMAIN,
            **sample.attributes,
        ),
        # Memory of an output of the graph is never another's.
        *(
            helper.make_node("Cast", [name], [f"{name}_result"], to=TensorProto.FLOAT if wide else t)
            for name in outputs
        ),
    ]
    kept_copy = [helper.make_node("Cast", ["copy"], ["copy_result"], to=TensorProto.FLOAT if wide else t)]
    results = [f"{name}_result" for name in outputs] + ["copy_result"] * kept
    graph = helper.make_graph(
        nodes + kept_copy * kept,
        "graph",
        [helper.make_tensor_value_info(n, ONNX_TYPES[v.dtype], list(v.shape)) for n, v in given.items()],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT if wide else t, None) for name in results],
        # onnxruntime reuses memory only where it knows that the sizes are equal.
        value_info=[helper.make_tensor_value_info(outputs[0], t, shape)],
    )
    model = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 18), helper.make_opsetid(DOMAIN, 1)], ir_version=8
    )
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.register_custom_ops_library(library_of("cpu"))
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    feeds = {name: to_ort_value(value) for name, value in given.items()}
    return [torch.from_numpy(out) for out in session.run(results[: len(outputs)], feeds)]


def large(op: str, dtype: torch.dtype) -> list[Sample]:
    """Rows that several threads share, and tensors of which streaming stores would be used."""
    if op != "CrossEntropyLossGrad":
        return []
    torch.manual_seed(0)
    log_prob = torch.randn(130, 40_000).log_softmax(1).to(dtype)
    target = torch.randint(0, 40_000, (130,))
    attributes: list[dict[str, Any]] = [{"reduction": "mean"}, {"reduction": "sum", "label_smoothing": 0.25}]
    return [Sample([torch.tensor(1.0, dtype=dtype), log_prob, target], one) for one in attributes]


@pytest.mark.parametrize(
    "op, dtype", [(op, dtype) for op in OVERWRITTEN for dtype in SAMPLES[op].dtypes], ids=lambda value: str(value)
)
def test_the_results_are_those_beside_an_input_that_is_kept(op: str, dtype: torch.dtype) -> None:
    samples = [*SAMPLES[op].all_typical(dtype), SAMPLES[op].sized(11, dtype), *SAMPLES[op].all_rows(1001, dtype)]
    for sample in [*samples, *large(op, dtype)]:
        if not sample.attributes.get("output_mask", [1])[0]:
            continue
        beside, over = (outputs_of(op, sample, kept=kept) for kept in (True, False))
        for one, two in zip(beside, over, strict=True):
            assert torch.equal(one.nan_to_num(7.0), two.nan_to_num(7.0))
            assert torch.equal(one.isnan(), two.isnan())
