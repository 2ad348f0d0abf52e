"""Every reader has samples in the test file of its family, and says what it looks at beside operands."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
from onnx_ir.passes.common import ShapeInferencePass
from reader_samples import Sample, model_of, s, scalar, x

from gradfuse.passes.reading import Forms, ort_training
from gradfuse.passes.reading.registry import READERS, Reader

# The outputs are axes, which the readers of reductions find in the shapes.
_NEVER_READ = {(ort_training.DOMAIN, "BroadcastGradientArgs")}
_READ = sorted(READERS.keys() - _NEVER_READ)


@cache
def _read(family: str) -> list[Sample]:
    """The samples in the test file of a family of readers."""
    samples: list[Sample] = runpy.run_path(str(Path(__file__).with_name(f"test_{family}.py")))["READ"]
    return samples


def _samples(key: tuple[str, str]) -> list[Sample]:
    """The samples of an operator, beside those of its reader's family."""
    family = READERS[key].read.__module__.rpartition(".")[2]
    return [sample for sample in _read(family) if (sample.domain, sample.op) == key]


@pytest.mark.parametrize("key", _READ, ids="{0[0]}{0[1]}".format)
def test_every_reader_has_samples(key: tuple[str, str]) -> None:
    assert _samples(key)


class _Spy:
    """Which outputs of a node are asked for their shapes, and whether producers of its inputs are asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, node: ir.Node) -> None:
        shape, producer = ir.Value.shape, ir.Value.producer
        self.output_shape = self.producers = False

        def spied_shape(value: ir.Value) -> Any:
            self.output_shape |= value in node.outputs
            return shape.fget(value)  # type: ignore[attr-defined]

        def spied_producer(value: ir.Value) -> ir.Node | None:
            self.producers |= value in node.inputs
            return producer(value)

        monkeypatch.setattr(ir.Value, "shape", property(spied_shape))
        monkeypatch.setattr(ir.Value, "producer", spied_producer)


def _looks(key: tuple[str, str]) -> Iterator[tuple[bool, bool]]:
    """Whether a reader looks at shapes of outputs, and at producers of inputs, for each sample of an operator."""
    for sample in _samples(key):
        model = ShapeInferencePass(strict_mode=False)(ir.from_proto(model_of(sample)[0])).model
        forms = Forms(model.graph)
        node = [*model.graph][-1]
        forms.looked_at_output = forms.looked_at_producer = False
        with pytest.MonkeyPatch.context() as monkeypatch:
            spy = _Spy(monkeypatch, node)
            READERS[key].read(forms, node)
        noted = forms.looked_at_output, forms.looked_at_producer
        assert (spy.output_shape, spy.producers) == noted, f"{sample}: look through forms.output and forms.producer"
        yield noted


@pytest.mark.parametrize("read", dict.fromkeys(READERS[key].read for key in _READ), ids=lambda read: read.__name__)
def test_readers_declare_what_they_look_at(read: Any) -> None:
    own = {key: reader for key, reader in READERS.items() if reader.read is read}
    looks = [look for key in own if key not in _NEVER_READ for look in _looks(key)]
    for reader in own.values():
        assert any(output_shape for output_shape, _ in looks) == reader.uses_output_shape
        assert any(producers for _, producers in looks) == reader.uses_producers


@pytest.mark.parametrize(
    ("sample", "flag"),
    [
        (s("Range", scalar(1), scalar(8), scalar(3)), "uses_output_shape"),
        (s("ReduceSum", x(4, 3), "AxesOfSizeOne", shapes=[(1, 3)], noop_with_empty_axes=1), "uses_producers"),
    ],
    ids=str,
)
def test_a_reader_that_does_not_declare_what_it_looks_at_is_an_error(
    monkeypatch: pytest.MonkeyPatch, sample: Sample, flag: str
) -> None:
    key = (sample.domain, sample.op)
    monkeypatch.setitem(READERS, key, Reader(READERS[key].read, uses_output_shape=False, uses_producers=False))
    graph = ir.from_proto(model_of(sample)[0]).graph
    with pytest.raises(RuntimeError, match=f"the reader of {sample.op} must be registered with {flag}=True"):
        Forms(graph)
