"""How the tensors of a batch are nested: what sessions take, and what they say of the rest."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import pytest

from gradfuse import ArgumentError
from gradfuse.training.nesting import flat, leaves_of_call, names_in

State = collections.namedtuple("State", "h c")


@dataclasses.dataclass
class Both:
    h: int
    c: int


HIDDEN = {"entries": [["h", "hidden.h"], ["c", "hidden.c"]]}
NESTING = {
    "arguments": [["x", "x"], ["pair", ["pair.0", {"value": None}]], ["hidden", HIDDEN], ["flag", {"value": True}]],
    "keywords": False,
}
WANTED = {"x": 1, "pair.0": 2, "hidden.h": 3, "hidden.c": 4}


def test_names() -> None:
    assert list(names_in(NESTING)) == list(WANTED)


@pytest.mark.parametrize(
    "given",
    [
        (1, (2, None), {"h": 3, "c": 4}, True),
        [1, [2, None], State(3, 4)],
        (1, (2, None), Both(3, 4)),
        (1, (2, None), (3, 4)),
        {"x": 1, "pair": (2, None), "hidden": State(3, 4)},
        {"x": 1, "pair.0": 2, "hidden.h": 3, "hidden.c": 4},
    ],
)
def test_what_is_taken(given: Any) -> None:
    assert leaves_of_call(NESTING, given, "inputs") == WANTED


@pytest.mark.parametrize(
    "given, message",
    [
        ((1, (2, None)), "inputs are 2; expected 4: x, pair, hidden, flag"),
        ((1, 2, State(3, 4)), "inputs pair is int; expected a tuple of 2"),
        ((1, (2,), State(3, 4)), "inputs pair is of 1 parts; expected a tuple of 2"),
        ((1, (2, 5), State(3, 4)), "inputs pair.1 is 5; expected None, as in the exported step"),
        ((1, (2, None), {"h": 3}), "inputs hidden lacks 'c'; expected h, c"),
        ((1, (2, None), {"h": 3, "c": 4, "d": 5}), "inputs hidden has 'd'; expected h, c"),
        ((1, (2, None), State(3, 4), 1), "inputs flag is 1; expected True, as in the exported step"),
        ({"x": 1, "pair": (2, None)}, "inputs lack 'hidden.h'; expected x, pair.0, hidden.h, hidden.c"),
        ({"y": 1}, "inputs lack 'x'; expected x, pair.0, hidden.h, hidden.c"),
        (WANTED | {"y": 1}, "inputs have 'y'; expected x, pair.0, hidden.h, hidden.c"),
    ],
)
def test_what_is_refused(given: Any, message: str) -> None:
    with pytest.raises(ArgumentError) as error:
        leaves_of_call(NESTING, given, "inputs")
    assert str(error.value) == message


@pytest.mark.parametrize("given", [(1,), {"x": 1}])
def test_what_a_call_would_have_other_defaults_for_is_not_left_out(given: Any) -> None:
    nesting = {"arguments": [["x", "x"], ["flag", {"value": True}]], "keywords": False, "needed": ["flag"]}
    with pytest.raises(ArgumentError, match="inputs lack 'flag'; expected True, as in the exported step"):
        leaves_of_call(nesting, given, "inputs")
    for whole in ((1, True), {"x": 1, "flag": True}):
        assert leaves_of_call(nesting, whole, "inputs") == {"x": 1}


def test_constants_within_an_argument_are_not_left_out() -> None:
    entries = [["image", "image"], ["flip", {"value": True}], ["mask", {"value": None}]]
    nesting = {"arguments": [["x", {"entries": entries}]], "keywords": False}
    assert leaves_of_call(nesting, ({"image": 1, "flip": True},), "inputs") == {"image": 1}
    with pytest.raises(ArgumentError, match="inputs x lacks 'flip'; expected image, flip, mask"):
        leaves_of_call(nesting, ({"image": 1},), "inputs")


def test_arguments_by_name_are_given_by_name() -> None:
    nesting = {"arguments": [["x", "x"]], "keywords": True}
    assert leaves_of_call(nesting, {"x": 1}, "inputs") == {"x": 1}
    with pytest.raises(ArgumentError, match="inputs are tuple; expected a dictionary of x"):
        leaves_of_call(nesting, (1,), "inputs")


def test_nothing_is_none_or_an_empty_tuple() -> None:
    assert leaves_of_call(flat(()), None, "targets") == leaves_of_call(flat(()), (), "targets") == {}
    with pytest.raises(ArgumentError, match="targets are 1; expected none"):
        leaves_of_call(flat(()), 1, "targets")


def test_long_lists_of_names_are_cut() -> None:
    with pytest.raises(ArgumentError, match=r"expected 200: x0, x1, x2, x3, x4, x5, x6, x7 and 192 more$"):
        leaves_of_call(flat([f"x{index}" for index in range(200)]), (1, 2), "inputs")
