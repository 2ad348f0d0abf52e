"""`expand` is the reverse of `fuse`: standard operators only, and the same outputs."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from producers import COMMITTED, Case, cases, run

from gradfuse import expand, fuse
from gradfuse.testing import assert_gradients_close


def _committed() -> list[Case]:
    names = {f"{p.parent.name}/{p.stem}" for p in COMMITTED.glob("*/*.onnx")}
    return [c for c in cases() if str(c) in names and c.runs and "dropout" not in c.name]


@pytest.mark.parametrize("case", _committed(), ids=str)
def test_expand_of_fuse_computes_as_the_model(case: Case) -> None:
    model = onnx.load(case.path)
    fused = fuse(model, policy="all", bodies=False).model
    before = fused.SerializeToString()
    expanded = expand(fused)
    assert fused.SerializeToString() == before
    onnx.checker.check_model(expanded, full_check=True)
    assert {node.domain for node in expanded.graph.node} <= {""}
    assert not expanded.functions
    assert "aclnn" not in {entry.domain for entry in expanded.opset_import}
    assert [o.name for o in expanded.graph.output] == [o.name for o in model.graph.output]
    feeds = case.arrays("in")
    wanted, got = run(model, feeds), run(expanded, feeds)
    largest = max(float(np.abs(a.astype(np.float64)).max(initial=0)) for a in wanted.values())
    for name, value in wanted.items():
        terms = (4 if value.dtype == np.float32 else 32) * largest
        assert_gradients_close(got[name], value, value.astype(np.float64), value.dtype, terms=terms)


def test_expand_gives_the_kind_of_model_back_and_leaves_others_alone() -> None:
    model = onnx.load(_committed()[0].path)
    assert isinstance(expand(ir.from_proto(model)), ir.Model)
    assert expand(model) == model
