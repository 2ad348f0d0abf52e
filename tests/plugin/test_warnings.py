"""Warnings point to the line of the caller."""

from __future__ import annotations

from typing import Any

import onnx.parser
import pytest

import gradfuse

MODEL = """<ir_version: 9, opset_import: ["": 17]> g (float[N, 2] x) => (float[N, 2] p)
<float[2, 2] a = {1, 2, 3, 4}> { z = MatMul(x, a)  p = Softmax(z) }"""


@pytest.mark.parametrize("loss", ["cross_entropy", {"p": "cross_entropy"}, ["cross_entropy"]])
def test_of_a_softmax_behind_which_a_loss_takes_logits(loss: Any) -> None:
    with pytest.warns(UserWarning, match="CrossEntropyLoss takes logits") as caught:
        gradfuse.build_training_step(onnx.parser.parse_model(MODEL), loss)
    assert {warning.filename for warning in caught} == {__file__}
