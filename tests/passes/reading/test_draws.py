"""Masks of dropout are found by their nodes, also as earlier versions wrote them."""

from __future__ import annotations

import onnx
import onnx.inliner
import onnx_ir as ir
import pytest

from gradfuse.custom_ops import draws
from gradfuse.passes.reading import Forms
from gradfuse.passes.reading.draws import draw_of

NEWER = """    single = Constant<value_int=1>()
    below_limit = Sub(limit, single)
    highest_dropped = Cast<to=6>(below_limit)
    kept_line = Greater(drawn, highest_dropped)
"""
EARLIER = draws.MASK.replace(NEWER, "    kept_line = GreaterOrEqual(drawn, limit)\n").replace(
    "drawn = Cast<to=6>(high_2)", "drawn = Cast<to=7>(high_2)"
)


def mask(text: str, threshold: int) -> ir.Model:
    """A model that gives the mask of draw 3."""
    function = onnx.parser.parse_function(f'<domain: "draws", opset_import: ["": 18]>{text}')
    model = onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["": 18, "draws": 1]>
        graph (int64 seed, float[4, 8] input) => (bool[4, 8] kept) {{
            kept = draws.DropoutMask<layer = 3, threshold = {threshold}>(seed, input)
        }}"""
    )
    model.functions.append(function)
    return ir.from_proto(onnx.inliner.inline_local_functions(model))


@pytest.mark.parametrize("threshold", [0, 1, 2**29, 2**31 - 1, 2**31])
@pytest.mark.parametrize("text", [draws.MASK, EARLIER], ids=["now", "earlier"])
def test_the_draw_of_a_mask_is_read(text: str, threshold: int) -> None:
    model = mask(text, threshold)
    draw = draw_of(Forms(model.graph), model.graph.outputs[0])
    assert draw is not None
    assert (draw.layer, draw.threshold) == (3, threshold)
    assert draw.seed is model.graph.inputs[0]


@pytest.mark.parametrize(
    ("nodes", "others"),
    [
        ("Greater(drawn", "Less(drawn"),
        ("Greater(drawn", "GreaterOrEqual(high_2"),
        ("highest_dropped = Cast<to=6>", "highest_dropped = Cast<to=3>"),  # int8 has another number
    ],
)
def test_what_is_almost_a_mask_is_none(nodes: str, others: str) -> None:
    assert nodes in draws.MASK
    model = mask(draws.MASK.replace(nodes, others), 2**29)
    assert draw_of(Forms(model.graph), model.graph.outputs[0]) is None


def test_the_earlier_text_is_another() -> None:
    assert "GreaterOrEqual" in EARLIER and "highest_dropped" not in EARLIER
