"""Gradients of a tensor whose parts are used: they are joined where they make up the whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import onnx
import onnx.parser
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gradfuse import differentiate
from gradfuse.testing import assert_gradients_close

pytestmark = pytest.mark.usefixtures("inference_in_process")

SHAPE = (4, 6, 5)
Cut = tuple[int, int, int]
"""Start, end and axis of a slice."""


def model_of(cuts: list[Cut], dims: str = "4, 6, 5") -> onnx.ModelProto:
    """The sum of the sines of slices, each times another number."""
    lines = []
    for k, (start, end, axis) in enumerate(cuts):
        names = {"starts": start, "ends": end, "axes": axis}
        lines += [f"{name}{k} = Constant<value_ints = [{number}]>()" for name, number in names.items()]
        lines.append(f"part{k} = Slice(x, starts{k}, ends{k}, axes{k})  sine{k} = Sin(part{k})")
        lines.append(f"weight{k} = Constant<value_float = {k + 1}.0>()  weighted{k} = Mul(sine{k}, weight{k})")
        lines.append(f"sum{k} = ReduceSum<keepdims = 0>(weighted{k})")
    terms = ", ".join(f"sum{k}" for k in range(len(cuts)))
    text = f"""<ir_version: 10, opset_import: ["": 18]>
        parts (float[{dims}] x) => (float y) {{ {" ".join(lines)} y = Sum({terms}) }}"""
    return onnx.parser.parse_model(text)


def by_torch(cuts: list[Cut]) -> Callable[[Tensor], Tensor]:
    def value(x: Tensor) -> Tensor:
        parts = [x[(slice(None),) * (axis % 3) + (slice(start, end),)] for start, end, axis in cuts]
        return torch.stack([(k + 1) * part.sin().sum() for k, part in enumerate(parts)]).sum()

    return value


def require_torchs(model: onnx.ModelProto, value: Callable[[Tensor], Tensor]) -> Counter[str]:
    """Compare the gradient of x with torch's; return how many nodes of an operator there are."""
    from producers import run

    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
    found = differentiate(model, ["x"])
    native, exact = (torch.autograd.grad(value(one.requires_grad_()), one)[0] for one in (x.clone(), x.double()))
    terms = max(1.0, float(exact.abs().max()))
    assert_gradients_close(run(found, {"x": x.numpy()})["x.grad"], native, exact, np.float32, terms=terms)
    return Counter(node.op_type for node in found.graph.node)


@pytest.mark.parametrize(
    "cuts, joined, padded",
    [
        ([(0, 2, 1), (2, 6, 1)], 1, 0),
        ([(2, 6, 1), (0, 2, 1)], 1, 0),
        ([(0, 1, 0), (1, 3, 0), (3, 4, 0)], 1, 0),
        ([(-2, 100, 2), (0, 3, -1)], 1, 0),
        ([(0, 3, 1), (3, 6, 1), (0, 3, 1), (3, 6, 1)], 2, 0),
        ([(0, 3, 1), (3, 6, 1), (1, 4, 1)], 1, 1),
        ([(0, 3, 1), (3, 5, 1)], 0, 2),
        ([(0, 3, 1), (2, 6, 1)], 0, 2),
        ([(1, 3, 1), (3, 6, 1)], 0, 2),
        ([(0, 2, 0), (2, 5, 2)], 0, 2),
        ([(0, 100, 1), (0, 3, 1), (3, 6, 1)], 1, 0),
    ],
)
def test_parts_are_joined(cuts: list[Cut], joined: int, padded: int) -> None:
    counts = require_torchs(model_of(cuts), by_torch(cuts))
    assert (counts["Concat"], counts["Pad"]) == (joined, padded)


@given(st.lists(st.tuples(st.integers(-7, 6), st.integers(-7, 8), st.integers(-3, 2)), min_size=1, max_size=5))
@settings(max_examples=60, deadline=None)
def test_any_parts_have_their_gradients(cuts: list[Cut]) -> None:
    require_torchs(model_of(cuts), by_torch(cuts))


def test_parts_of_unknown_sizes_have_their_gradients() -> None:
    cuts = [(0, 2, 1), (2, 6, 1)]
    require_torchs(model_of(cuts, "4, N, 5"), by_torch(cuts))


def test_rows_that_are_taken_one_by_one_are_joined() -> None:
    """As `unbind` does: queries, keys and values in one tensor."""
    rows = "".join(
        f"place{k} = Constant<value_int = {place}>()  row{k} = Gather<axis = 0>(x, place{k})  sine{k} = Sin(row{k})"
        for k, place in enumerate([2, 0, -1, 1])
    )
    text = f"""<ir_version: 10, opset_import: ["": 18]>
        rows (float[4, 6, 5] x) => (float y) {{
            {rows} p = Mul(sine0, sine1)  q = Mul(sine2, sine3)  r = Mul(p, q)  y = ReduceSum<keepdims = 0>(r)
        }}"""

    def value(x: Tensor) -> Tensor:
        return x.sin().prod(0).sum()

    counts = require_torchs(onnx.parser.parse_model(text), value)
    assert (counts["Concat"], counts["Pad"]) == (1, 0)


@pytest.mark.parametrize("times", [2, 3])
def test_a_part_that_is_added_several_times_counts_each_time(times: int) -> None:
    text = f"""<ir_version: 10, opset_import: ["": 18]>
        parts (float[4, 6, 5] x) => (float y) {{
            several = Sum({", ".join(["x"] * times)})
            zero = Constant<value_ints = [0]>()  two = Constant<value_ints = [2]>()  four = Constant<value_ints = [4]>()
            head = Slice(several, zero, two, zero)  tail = Slice(x, two, four, zero)
            sine = Sin(head)  cosine = Cos(tail)  product = Mul(sine, cosine)  y = ReduceSum<keepdims = 0>(product)
        }}"""

    def value(x: Tensor) -> Tensor:
        return ((x * times)[:2].sin() * x[2:].cos()).sum()

    require_torchs(onnx.parser.parse_model(text), value)
