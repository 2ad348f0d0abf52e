"""The toy operator's tests run in the copy of the project that `test_one_more_operator.py` makes."""

from __future__ import annotations

collect_ignore = ["toy_op"]
