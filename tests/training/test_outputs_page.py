"""What docs/outputs.md shows works."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

PAGE = (Path(__file__).parents[2] / "docs" / "outputs.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


@pytest.mark.long
def test_the_examples_run_one_after_the_other() -> None:
    torch.manual_seed(0)
    names: dict[str, Any] = {}
    assert len(EXAMPLES) == 5
    for example in EXAMPLES:
        exec(example, names)
    judge, deceiver = (names[name].state_dict() for name in ("judge", "deceiver"))
    for name, array in judge.items():
        np.testing.assert_array_equal(deceiver[name], array)
        begun = names["judging"].parameters[name]
        assert not np.array_equal(array, begun)
