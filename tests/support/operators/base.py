"""What tests know of an operator beyond its `OPERATOR`: PyTorch's answer, and arguments, good and bad."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gradfuse.testing import assert_gradients_close

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Sample:
    """Arguments of an operator.

    Attributes:
        inputs: in the order of the schema, None for an absent one; those at the end may be left out.
        attributes: those that are not at their defaults.
        terms: the magnitude of what sums add up, see `assert_gradients_close`.
    """

    inputs: Sequence[Tensor | None]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    terms: Tensor | float = 0.0

    def with_inputs(self, inputs: Sequence[Tensor | None]) -> Sample:
        """The same attributes for other inputs."""
        return Sample(inputs, self.attributes, self.terms)


@dataclass(frozen=True)
class Samples:
    """What the tests of all operators ask of one; each module of this package has a `SAMPLES`.

    Attributes:
        oracle: PyTorch's answer: a tensor or several, for the inputs, the attributes by name and the keyword `dtype`.
            `torch.float64` gives the reference (inputs are widened first). The type of the inputs gives PyTorch's own
            result in it, which an implementation must not be worse than; where PyTorch has no CPU kernel for that
            type, the computation runs in float32 and is rounded once.
        strided: inputs of any strides that are not negative, of small random sizes, in a type.
        sized: inputs in a type whose dynamic dimensions grow with a number from 3 up.
        valid: small float32 inputs that are accepted.
        invalid: arguments near those of `valid` that must be refused, in C and in onnxruntime alike.
        dtypes: the types of T in which results are held against PyTorch's.
        typical: inputs in a type that between them reach every branch; by default two of `sized`.
        parts: inputs in a type that are so large that the kernel for CPUs takes them in parts; by default none.
        rows: inputs whose rows, along which kernels have their loops, are of a length; by default those of `sized`.
        empty: arguments without elements, and the shapes of the outputs, which are 0 where they have elements.
    """

    oracle: Callable[..., Tensor | tuple[Tensor, ...]]
    strided: Callable[[random.Random, torch.dtype], Sample]
    sized: Callable[[int, torch.dtype], Sample]
    valid: Callable[[], Sample]
    invalid: Callable[[], Iterator[Sample]]
    dtypes: Sequence[torch.dtype] = FLOATS
    typical: Callable[[torch.dtype], Sequence[Sample]] | None = None
    parts: Callable[[torch.dtype], Sequence[Sample]] = lambda _: ()
    rows: Callable[[int, torch.dtype], Sequence[Sample]] | None = None
    empty: Sequence[tuple[Sample, Sequence[tuple[int, ...]]]] = ()

    def all_typical(self, dtype: torch.dtype) -> Sequence[Sample]:
        """What `typical` gives, or what stands for it."""
        return self.typical(dtype) if self.typical else [self.sized(size, dtype) for size in (5, 70)]

    def all_rows(self, length: int, dtype: torch.dtype) -> Sequence[Sample]:
        """What `rows` gives, or what stands for it."""
        return self.rows(length, dtype) if self.rows else [self.sized(length, dtype)]

    def expected(self, sample: Sample, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """PyTorch's outputs in a type."""
        return as_tuple(self.oracle(*sample.inputs, **sample.attributes, dtype=dtype))

    def assert_close(self, outputs: Sequence[Tensor], sample: Sample, dtype: torch.dtype) -> None:
        """Assert that outputs are as near to PyTorch's in float64 as PyTorch's own for inputs of the type.

        Integers are the same.
        """
        native, reference = (self.expected(sample, type_) for type_ in (dtype, torch.float64))
        terms = sample.terms.numpy() if isinstance(sample.terms, Tensor) else sample.terms
        for output, other, exact in zip(outputs, native, reference, strict=True):
            if not other.is_floating_point():
                torch.testing.assert_close(output, other, rtol=0, atol=0)
                continue
            assert_gradients_close(output, other, exact, other.dtype, terms=terms)


def activation_type(activation: Tensor, dtype: torch.dtype) -> torch.dtype:
    """The type of results of type A, which activations have, where those of type T are of `dtype`."""
    return torch.bfloat16 if activation.dtype == torch.bfloat16 and dtype != torch.float64 else dtype


def as_tuple(outputs: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The outputs of an operator of any number of them."""
    return outputs if isinstance(outputs, tuple) else (outputs,)


@dataclass(frozen=True)
class Changes:
    """Samples that differ from a valid one in little."""

    valid: Callable[[], Sample]

    def changed(self, index: int, *values: Tensor, **attributes: Any) -> Iterator[Sample]:
        """With each of some values for one input."""
        for value in values:
            inputs = list(self.valid().inputs)
            inputs += [None] * (index + 1 - len(inputs))
            inputs[index] = value
            yield Sample(inputs, {**self.valid().attributes, **attributes})

    def retyped(self, index: int, *dtypes: torch.dtype) -> Iterator[Sample]:
        """With one input in each of some types."""
        return self.changed(index, *(self._input(index).to(dtype) for dtype in dtypes))

    def all_retyped(self, indices: Sequence[int], *dtypes: torch.dtype) -> Iterator[Sample]:
        """With some inputs, all of them, in each of some types."""
        for dtype in dtypes:
            inputs = list(self.valid().inputs)
            for index in indices:
                inputs[index] = self._input(index).to(dtype)
            yield Sample(inputs, self.valid().attributes)

    def reshaped(self, index: int, *shapes: tuple[int, ...], **attributes: Any) -> Iterator[Sample]:
        """With one input, of zeros, in each of some shapes."""
        dtype = self._input(index).dtype
        return self.changed(index, *(torch.zeros(shape, dtype=dtype) for shape in shapes), **attributes)

    def with_attributes(self, name: str, *values: Any) -> Iterator[Sample]:
        """With each of some values for one attribute."""
        for value in values:
            yield Sample(self.valid().inputs, {**self.valid().attributes, name: value})

    def without(self, *indices: int) -> Iterator[Sample]:
        """Without each of some inputs."""
        for index in indices:
            inputs = list(self.valid().inputs)
            inputs[index] = None
            yield Sample(inputs, self.valid().attributes)

    def _input(self, index: int) -> Tensor:
        value = self.valid().inputs[index]
        assert value is not None
        return value
