"""Masks of dropout that a hash of a seed decides, as exported steps write them, read back from their nodes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from gradfuse.custom_ops import draws
from gradfuse.passes.reading.forms import Forms


@dataclass(frozen=True)
class Draw:
    """Which draw of a step a mask is.

    Attributes:
        seed: the seed of the step.
        layer: the number of the draw.
        before: what is added to that number, if anything is.
        threshold: the least of 31 random bits that are kept.
    """

    seed: ir.Value
    layer: int
    before: ir.Value | None
    threshold: int


def draw_of(forms: Forms, kept: ir.Value) -> Draw | None:
    """Return the draw that decides a mask of booleans, one an element in row-major order; None of another value."""
    if kept.dtype != ir.DataType.BOOL:
        return None
    walk = _Walk(forms)
    try:
        return walk.mask(kept)
    except _Other:
        return None


class _Other(Exception):
    """Nodes compute something else."""


class _Walk:
    """The way up through the nodes of `draws.KEPT`, whatever of it was computed ahead of time."""

    def __init__(self, forms: Forms) -> None:
        self._forms = forms

    def mask(self, kept: ir.Value) -> Draw:
        line = self._input(kept, "Reshape")
        bits, threshold = self._drawn(line)
        high, shift = self._inputs(self._input(bits, "Cast"), "BitShift")
        self._require(self._number(shift) == 1)
        word = self._times(self._input(high, "Cast"), draws.FACTORS[2])
        word = self._times(self._mixed(word, 1), draws.FACTORS[1])
        seed, layer, before = None, 0, None
        for one in self._terms(word):
            if self._is_place(one):
                continue
            self._require(seed is None)
            seed, layer, before = self._key(one)
        if seed is None:
            raise _Other
        return Draw(seed, layer, before, threshold)

    def _drawn(self, line: ir.Value) -> tuple[ir.Value, int]:
        """Return the drawn bits and the threshold; files of earlier versions compare with the threshold itself."""
        node = line.producer()
        earlier = node is not None and node.op_type == "GreaterOrEqual"
        bits, limit = self._inputs(line, "GreaterOrEqual" if earlier else "Greater")
        number = self._number(limit)
        if number is None:
            raise _Other
        return bits, number if earlier else number + 1

    def _key(self, value: ir.Value) -> tuple[ir.Value, int, ir.Value | None]:
        """Read what the hashes of a draw begin with."""
        shifted, half = self._inputs(self._input(value, "Cast"), "Sub")
        terms, whole = self._inputs(shifted, "Mod")
        self._require(self._number(half) == draws.WORD // 2 and self._number(whole) == draws.WORD)
        constant, seed, before = -draws.WORD // 2, None, None
        for term in self._terms(terms):
            number = self._number(term)
            if number is not None:
                constant += number
                continue
            factor, inner = self._product(term)
            if factor == draws.SEED_FACTOR:
                seed, span = self._inputs(inner, "Mod")
                self._require(self._number(span) == draws.WORD // 2)
                continue
            self._require(factor == draws.LAYER_FACTOR)
            for part in self._terms(inner):
                first = self._number(part)
                if first is not None:
                    constant += first * draws.LAYER_FACTOR
                else:
                    self._require(before is None)
                    before = part
        self._require(seed is not None and constant % draws.LAYER_FACTOR == 0 and constant >= 0)
        assert seed is not None
        return seed, constant // draws.LAYER_FACTOR, before

    def _is_place(self, value: ir.Value) -> bool:
        """Whether a value is the hash of each element's place, before the seed comes in."""
        array = self._array(value)
        if array is not None:
            return array.ndim == 1 and array.dtype == np.int32 and np.array_equal(array, _places(array.size))
        try:
            place = self._times(self._mixed(value, 0), draws.FACTORS[0])
        except _Other:
            return False
        array = self._array(place)
        if array is not None:
            return array.ndim == 1 and np.array_equal(array, np.arange(array.size))
        first, _, step = self._inputs(place, "Range")
        return self._number(first) == 0 and self._number(step) == 1

    def _mixed(self, value: ir.Value, round_: int) -> ir.Value:
        """Return the word of which the xor with itself, shifted to the right, is a value."""
        first, second = self._inputs(self._input(value, "Cast"), "BitwiseXor")
        for bits, high in ((first, second), (second, first)):
            node = high.producer()
            if node is not None and node.op_type == "BitShift" and node.inputs[0] is bits:
                self._require(self._number(node.inputs[1]) == draws.SHIFTS[round_])
                return self._input(bits, "Cast")
        raise _Other

    def _times(self, value: ir.Value, factor: int) -> ir.Value:
        found, other = self._product(value)
        self._require(found % draws.WORD == factor)
        return other

    def _product(self, value: ir.Value) -> tuple[int, ir.Value]:
        """Return the constant and the other factor of a product."""
        first, second = self._inputs(value, "Mul")
        for one, other in ((first, second), (second, first)):
            number = self._number(one)
            if number is not None:
                return number, other
        raise _Other

    def _terms(self, value: ir.Value) -> list[ir.Value]:
        node = value.producer()
        if node is None or node.domain or node.op_type != "Add":
            return [value]
        return [term for one in self._inputs(value, "Add") for term in self._terms(one)]

    def _inputs(self, value: ir.Value, op_type: str) -> list[ir.Value]:
        node = value.producer()
        if node is None or node.domain or node.op_type != op_type:
            raise _Other
        found = [one for one in node.inputs if one is not None]
        self._require(len(found) == len(node.inputs))
        return found

    def _input(self, value: ir.Value, op_type: str) -> ir.Value:
        return self._inputs(value, op_type)[0]

    def _array(self, value: ir.Value | None) -> npt.NDArray[np.generic] | None:
        return self._forms.constant(value)

    def _number(self, value: ir.Value | None) -> int | None:
        """Return the integer that a value always is."""
        array = self._array(value)
        if array is not None:
            return int(array.item()) if array.size == 1 else None
        node = None if value is None else value.producer()
        if node is None or node.domain or node.op_type not in ("Cast", "Mul", "Sub"):
            return None
        numbers = [number for one in node.inputs if (number := self._number(one)) is not None]
        if len(numbers) < len(node.inputs):
            return None
        if node.op_type == "Cast":
            # To an integer type that has the number, or it would be another one.
            to = node.attributes.get_int("to", 0)
            held = to in (ir.DataType.INT32, ir.DataType.INT64) and -(2**31) <= numbers[0] < 2**31
            return numbers[0] if held else None
        return numbers[0] * numbers[1] if node.op_type == "Mul" else numbers[0] - numbers[1]

    @staticmethod
    def _require(holds: bool) -> None:
        if not holds:
            raise _Other


def _places(count: int) -> npt.NDArray[np.int32]:
    """The hashes of places as int32, which is how products wrap around."""
    word = np.arange(count, dtype=np.uint32) * np.uint32(draws.FACTORS[0])
    return (word ^ (word >> np.uint32(draws.SHIFTS[0]))).view(np.int32)
