"""Gradient rules against onnx's own node tests: derivatives along random directions, by differences in float64."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx.parser
import pytest
from node_tests import Case, cases, compare, floats, run

from gradfuse import ArgumentError, ModelError, differentiate
from gradfuse.differentiation.coverage import differentiable

NO_RULE = "no gradient rule for this operator"

REFUSED: Mapping[str, str] = {
    **dict.fromkeys(("OptionalGetElement", "Unique"), NO_RULE),
    "BatchNormalization": "the result depends on its running statistics",
    "DequantizeLinear": "it has a block_size",
    "CumProd": "its axis is no constant",
    "DynamicQuantizeLinear": "rounding to integers has no derivative",
    "Resize": "it keeps the aspect ratio",
    "Scan": "it is of opset 8, with a batch axis",
    "MaxUnpool": "it has an output_shape",
}
"""Operators with cases that are errors, and what these say."""

RANDOM = {"Bernoulli", "Dropout"}
"""onnx's evaluator draws other numbers than onnxruntime: `test_dropout_multiplies_by_its_own_mask` is for them."""

AT_A_KINK = {
    *("test_acosh_example", "test_elu_example", "test_leakyrelu_example", "test_selu_example", "test_softsign_example"),
    *("test_thresholdedrelu_example", "test_l1normalization_axis_last", "test_l2normalization_axis_0", "test_pow"),
    *("test_maxpool_3d_dilations", "test_maxpool_3d_dilations_use_ref_impl", "test_hardmax_one_hot", "test_sign"),
    *("test_reduce_min_default_axes_keepdims_example", "test_floor_example", "test_round"),
    *("test_batchnorm_example", "test_range_float_type_positive_delta"),
    *("test_basic_deform_conv_with_padding", "test_basic_deform_conv_without_padding"),
    *("test_deform_conv_with_mask_bias", "test_deform_conv_with_multiple_offset_groups"),
    *("test_roialign_aligned_false", "test_roialign_mode_max"),
    "test_gridsample_aligncorners_true",
    "test_gridsample_bilinear",
    "test_gridsample_bilinear_align_corners_1_additional_1",
    "test_gridsample_nearest",
    "test_gridsample_nearest_align_corners_0_additional_1",
    "test_gridsample_nearest_align_corners_1_additional_1",
    "test_gridsample_volumetric_bilinear_align_corners_0",
    "test_gridsample_volumetric_bilinear_align_corners_1",
    "test_gridsample_volumetric_nearest_align_corners_0",
    "test_gridsample_volumetric_nearest_align_corners_1",
}
"""Their inputs lie where a derivative jumps, or is too steep for differences: these are taken nearby."""

NOT_FINITE = {
    *("test_cast_FLOAT_to_DOUBLE", "test_cast_DOUBLE_to_FLOAT"),
    *("test_castlike_FLOAT_to_DOUBLE", "test_castlike_DOUBLE_to_FLOAT"),
}
"""Their inputs hold NaN and infinities, in whose place others are taken."""

OTHER_OUTPUTS = {
    *("test_resize_downsample_scales_linear_align_corners", "test_resize_downsample_scales_cubic_align_corners"),
}
"""onnxruntime computes something else than the test expects: compared are inputs nearby."""

NOT_COMPARED: Mapping[str, str] = {
    **dict.fromkeys(
        (
            "test_attention_4d_with_past_and_present_qk_matmul_bias_3d_mask_causal",
            "test_attention_4d_with_past_and_present_qk_matmul_bias_4d_mask_causal",
        ),
        "an output holds -inf, of which there is no difference",
    ),
    **dict.fromkeys(
        ("test_mod_float_edge_cases_fmod_0_float32", "test_mod_float_edge_cases_fmod_0_float64"),
        "the quotients are integers or infinite, where the remainder jumps",
    ),
}
"""Why a case cannot be compared."""

LONG = {"test_lppool_3d_default"}
"""onnx's evaluator takes a minute for it."""

MOVED = AT_A_KINK | NOT_FINITE | OTHER_OUTPUTS

PAGE = Path(__file__).parents[2] / "docs" / "onnx-training.md"


def _deterministic() -> dict[str, Case]:
    return {name: case for name, case in cases().items() if case.op_type not in RANDOM}


def _names() -> list[Any]:
    """All cases, of which the first of each operator is in the suite, and those that are listed above."""
    seen: Counter[str] = Counter()
    names = []
    for name, case in _deterministic().items():
        seen[case.op_type] += 1
        in_suite = (seen[case.op_type] == 1 or name in MOVED or name in NOT_COMPARED) and name not in LONG
        names.append(pytest.param(name, marks=[] if in_suite else pytest.mark.slow))
    return names


def _agrees(case: Case) -> bool:
    """Whether a case can be compared as it is, and agrees."""
    try:
        compare(case)
    except (AssertionError, ValueError):
        return False
    return True


@pytest.mark.usefixtures("inference_in_process")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", _names())
def test_gradients_are_those_of_differences(name: str, record_property: Any) -> None:
    case = cases()[name]
    record_property("operator", case.op_type)
    if name in NOT_COMPARED:
        record_property("outcome", NOT_COMPARED[name])
        assert not _agrees(case) and not _agrees(case.moved())
        return
    if name in MOVED:
        assert not _agrees(case)
        case = case.moved()
    try:
        compare(case)
        record_property("outcome", "compared")
    except ModelError as error:
        record_property("outcome", "refused")
        assert case.op_type in REFUSED and re.search(REFUSED[case.op_type], str(error)), error
        assert "\n" not in str(error)


@pytest.mark.parametrize("operator", REFUSED)
def test_what_is_refused_still_is(operator: str) -> None:
    """An operator that got its rule must leave the table."""
    assert any(_refused(case) for case in cases().values() if case.op_type == operator)


def _refused(case: Case) -> bool:
    for name in case.wrt:
        outputs = floats(case.model.graph.output)
        try:
            differentiate(case.model, [name], seeds={output: f"seed_{output}" for output in outputs})
        except ModelError as error:
            return re.search(REFUSED[case.op_type], str(error)) is not None
        except ArgumentError:
            continue
    return False


def test_dropout_multiplies_by_its_own_mask() -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 18]>
        g (float[64] x, float ratio, bool training) => (float[64] y) {
            y = Dropout <seed: int = 3> (x, ratio, training)
        }"""
    )
    gradients = differentiate(model, ["x"], seeds={"y": "v"})
    x, v = np.linspace(1, 2, 64, dtype=np.float32), np.linspace(-1, 1, 64, dtype=np.float32)
    for training in (True, False):
        feeds = {"x": x, "v": v, "ratio": np.asarray(0.25, np.float32), "training": np.asarray(training)}
        found = run(gradients, feeds, by_onnx=False)
        assert np.abs(found["x.grad"] - v * found["y"] / x).max() <= 1e-6
        assert (found["y"] == 0).any() == training


def test_the_list_has_what_node_tests_compare() -> None:
    """What is listed has no case without a rule, and what is not listed none that agrees."""
    listed = {one.name for one in differentiable() if not one.domain}
    without = {operator for operator, message in REFUSED.items() if message == NO_RULE}
    assert not listed & without
    tested = {case.op_type for case in cases().values()}
    assert {one.name for one in differentiable() if one.by == "body"} <= tested


def test_the_page_gives_the_share() -> None:
    found = re.search(r"Of (\d+) node tests .*?, (\d+) agree", PAGE.read_text().replace("\n", " "))
    assert found is not None
    total, agree = map(int, found.groups())
    assert total == len(_deterministic())
    refused = sum(_refused(case) for case in _deterministic().values() if case.op_type in REFUSED)
    assert agree == total - len(NOT_COMPARED) - refused
