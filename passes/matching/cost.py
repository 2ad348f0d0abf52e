"""The cost model: what nodes move in memory, and how long they take, in one run of stock onnxruntime.

docs/cost-model.md explains the constants and compares the predictions with measurements.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from gradfuse import custom_ops
from gradfuse.passes.matching.graphs import VIEWS
from gradfuse.passes.matching.scaled_products import ABSORBED
from gradfuse.passes.matching.site import Site
from gradfuse.passes.reading import attribute

ASSUMED_DIM = 64
"""The size that a symbolic dimension is taken to have."""
NODE = 4096
"""Bytes that move in the time that starting a node takes."""
POWER = 128
"""Bytes that move in the time that Pow takes for one element, unless it squares or cubes."""
SCATTERED = 128
"""Bytes that move in the time that ScatterElements takes for one update."""

_FREE = VIEWS - {"Transpose", "Expand"}
# What onnxruntime's CPU provider computes in 16 bits. For the rest it casts to float32 and back.
_IN_HALF = {
    *("Cast", "Transpose", "Expand", "Concat", "Slice", "Split", "Gather", "GatherElements", "GatherND"),
    *("ScatterElements", "ScatterND", "ConstantOfShape", "Max", "Min"),
}
_HALF = {ir.DataType.FLOAT16, ir.DataType.BFLOAT16}


@dataclass(frozen=True)
class Cost:
    """A prediction for some nodes: the bytes that they move, and the bytes that would move in the time they take."""

    bytes: int
    equivalent: int

    def pays(self, before: Cost) -> bool:
        """Whether nodes of this cost are faster than nodes of the other, and move no more bytes."""
        return self.bytes <= before.bytes and self.equivalent < before.equivalent

    def against(self, before: Cost) -> str:
        """Why it does not pay, for a report."""
        if self.bytes > before.bytes:
            return f"would move {self.bytes - before.bytes} bytes more"
        return f"would take as long as moving {self.equivalent} bytes, for {before.equivalent} now"


def cost_of(site: Site, nodes: Sequence[ir.Node], symbols: Mapping[str, int] | None = None) -> Cost:
    """The predicted cost of one run of these nodes, with these sizes for symbolic dimensions."""
    sizes = symbols or {}
    in_float32 = {n for n in nodes if n.domain == "" and n.op_type not in _IN_HALF | VIEWS}
    moved = equivalent = 0.0
    cast: set[ir.Value] = set()
    for node in nodes:
        fused = node.domain == custom_ops.DOMAIN
        if ABSORBED in node.meta:
            continue
        if node.op_type == "Constant" or (not fused and all(v is None or _is_constant(v) for v in node.inputs)):
            continue  # onnxruntime folds it when it makes the session.
        equivalent += NODE
        if node.op_type in _FREE and not fused:
            continue
        if not fused:
            again, delay = _beside_operands(site, node, sizes)
            moved += again
            equivalent += again + delay
        for value in (*node.inputs, *node.outputs):
            if value is None or value.dtype in (None, ir.DataType.UNDEFINED, ir.DataType.STRING):
                continue
            each = value.dtype.itemsize
            if value.dtype in _HALF and node in in_float32:
                each = 4
                ends = [value.producer(), *(u.node for u in value.uses())]
                outside = value.is_graph_output() or any(n not in in_float32 for n in ends)
                if outside and value not in cast and not _is_constant(value):
                    cast.add(value)
                    each += 2 + 4  # The cast reads two bytes and writes four, or the other way round.
            count = _elements(site, value, sizes)
            moved += count * each
            equivalent += count * each
    return Cost(int(moved), int(equivalent))


def _beside_operands(site: Site, node: ir.Node, sizes: Mapping[str, int]) -> tuple[float, float]:
    """What a node moves more than each operand once, and the further time it takes, in bytes."""
    if node.op_type == "Pow":
        exponent = site.forms.constant(node.inputs[1])
        is_small = exponent is not None and exponent.size == 1 and exponent.item() in (2, 3)
        return 0.0, 0.0 if is_small else POWER * _elements(site, node.outputs[0], sizes)
    updates = node.inputs[2] if node.op_type in {"ScatterElements", "ScatterND"} else None
    if updates is None or updates.dtype is None:
        return 0.0, 0.0
    count = _elements(site, updates, sizes)
    # A reduction reads the elements that it updates once more.
    again = 0.0 if attribute(node, "reduction", "none") == "none" else count * updates.dtype.itemsize
    return again, SCATTERED * count if node.op_type == "ScatterElements" else 0.0


def _elements(site: Site, value: ir.Value, sizes: Mapping[str, int]) -> float:
    """The number of elements of a value, with the assumed size for symbolic dimensions without one."""
    atoms = site.algebra.atoms
    count = 1.0
    if site.knows(value):
        for size in site.extents(value):
            count *= sum(
                c * math.prod(sizes.get(str(atoms[a].args[0]), ASSUMED_DIM) ** int(e) for a, e in m)
                for m, c in size.terms.items()
            )
    elif value.shape is not None:
        count = math.prod(d if isinstance(d, int) else sizes.get(str(d.value), ASSUMED_DIM) for d in value.shape)
    return count


def _is_constant(value: ir.Value) -> bool:
    if value.is_graph_input():
        return False
    node = value.producer()
    return value.const_value is not None if node is None else node.op_type == "Constant" and node.domain == ""
