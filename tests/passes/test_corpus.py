"""Every graph of the corpus: what it must be fused to, and that it computes the same afterwards."""

from __future__ import annotations

from collections import Counter

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest
from producers import Case, cases, in_float32, run, with_seeds

from gradfuse import fuse
from gradfuse.custom_ops import functions
from gradfuse.testing import assert_gradients_close

BFLOAT16_EPS = 2.0**-7
PARTS = 8


@pytest.mark.usefixtures("inference_in_process")
@pytest.mark.parametrize("case", cases(), ids=str)
@pytest.mark.sampled(every=2)
def test_graph_is_fused_as_expected_and_stays_right(case: Case) -> None:
    model = ir.load(case.path)
    result = fuse(model, policy="all", bodies=False)
    fused = {f.op for f in result.report.fusions}
    assert set(case.expect) <= fused, result.report
    assert [o.name for o in result.model.graph.outputs] == [o.name for o in model.graph.outputs]
    if not fused:
        assert ir.to_proto(result.model) == ir.to_proto(ir.load(case.path))
        return

    bfloat16 = any(v.dtype == ir.DataType.BFLOAT16 for v in model.graph.inputs)
    if not case.runs and not bfloat16:
        return  # The graph as it stands is not valid, or needs the operators of another build.
    feeds, produced = case.arrays("in"), case.arrays("out")
    models = [model, result.model]
    if bfloat16:
        models = [in_float32(m) for m in models]
        feeds = {k: a.astype(np.float32) if a.dtype == ml_dtypes.bfloat16 else a for k, a in feeds.items()}
    functions.attach(models[1])
    plain, rewritten = (ir.to_proto(with_seeds(m)) for m in models)
    onnx.checker.check_model(rewritten, full_check=True)
    wanted, got = run(plain, feeds), run(rewritten, feeds)
    # Gradients that are zero but for rounding (a bias ahead of a softmax) are rounding of the size of the others.
    largest = max(float(np.abs(a.astype(np.float64)).max(initial=0)) for a in wanted.values())
    for name, value in wanted.items():
        reference = produced[name] if case.agrees and case.runs else value
        reference = reference.astype(np.float64).reshape(value.shape)
        if bfloat16:
            # The plain graph's constants are rounded to bfloat16; the fused op's are not.
            np.testing.assert_allclose(got[name], reference, rtol=0, atol=BFLOAT16_EPS * largest)
        else:
            terms = (4 if value.dtype == np.float32 else 32) * largest
            assert_gradients_close(got[name], value, reference, value.dtype, terms=terms)


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.sampled(every=PARTS)
def test_graphs_without_the_shapes_of_their_values_are_fused_alike(part: int) -> None:
    """A part of the corpus at a time: ONNX leaves it to exporters whether they write them."""
    for case in cases()[part::PARTS]:
        model = onnx.load(case.path)
        with_shapes = Counter(f.op for f in fuse(model, policy="all", bodies=False).report.fusions)
        del model.graph.value_info[:]
        without = fuse(model, policy="all").report
        assert Counter(f.op for f in without.fusions) == with_shapes, case
