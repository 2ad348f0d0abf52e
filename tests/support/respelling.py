"""Ways to write a node otherwise: the same numbers by other operators, and views that change nothing.

`respelled` writes some nodes of a model otherwise. `python tests/support/respelling.py OPERATOR COUNT [FIRST]` does so
to graphs of tests/corpus that hold an operator, and prints what `fuse` no longer matches, each as small as it gets.
"""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from producers import COMMITTED

from gradfuse import fuse

GRAPHS = {
    "CrossEntropyLossGrad": ("torch_export_fb/ce_mean_f32", "torch_makefx/ce_mean_smooth", "tf2onnx/one_hot"),
    "MseLossBackward": ("torch_export_fb/mse_handwritten_pow_dyn", "tf2onnx/squared_error", "jax_layers/squared_error"),
    "ScaledMaskedSoftmaxBackward": ("torch_aot/attn_nomask", "torch_export_fb/attn_mulmask", "tf2onnx/attention"),
    "LayerNormBackward": ("torch_layers/layer_norm.core", "tf2onnx/layer_norm", "jax_layers/layer_norm"),
    "BatchNormBackward": ("tf2onnx/batch_norm", "jax_layers/batch_norm", "jax_layers/batch_norm_images"),
    "GeluBackward": ("torch_layers/gelu.core", "torch_layers/gelu_tanh.core", "jax_layers/gelu"),
    "EmbeddingDenseBackward": ("torch_layers/embedding.core", "jax_layers/embedding", "jax_layers/embedding_one_hot"),
    "ThresholdBackward": ("torch_layers/relu.core", "torch_layers/relu.joint"),
    "ApplyAdamW": ("torch_layers/adam.foreach", "torch_layers/adamw.single", "jax_layers/adam", "jax_layers/adamw"),
    "ApplySgd": ("torch_layers/sgd.foreach", "torch_layers/sgd_nesterov.single", "tf2onnx/momentum"),
}
"""Graphs of tests/corpus that hold an operator."""

_FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE)
_NOT_DISTRIBUTED = ("LayerNormBackward", "BatchNormBackward", "ApplyAdamW", "ApplySgd")
"""Operators whose rules look for a product of a difference, or a sum, that a graph computes."""
Change = tuple[str, int]
"""A rule, and which of the nodes that it has a way for."""


class _Writer:
    """A node of a graph, and what takes its place."""

    def __init__(self, model: onnx.ModelProto, node: onnx.NodeProto, rng: random.Random, prefix: str) -> None:
        self.model, self.node, self.rng, self.prefix = model, node, rng, prefix
        self.nodes: list[onnx.NodeProto] = []
        inferred = onnx.shape_inference.infer_shapes(model, data_prop=True).graph
        self.types: dict[str, int] = {}
        self.shapes: dict[str, list[int | None]] = {}
        for value in (*inferred.value_info, *inferred.input, *inferred.output):
            given = value.type.tensor_type
            self.types[value.name] = given.elem_type
            if given.HasField("shape"):
                self.shapes[value.name] = [d.dim_value if d.HasField("dim_value") else None for d in given.shape.dim]
        for tensor in model.graph.initializer:
            self.types[tensor.name], self.shapes[tensor.name] = tensor.data_type, list(tensor.dims)

    @property
    def out(self) -> str:
        return str(self.node.output[0])

    @property
    def is_float(self) -> bool:
        return self.types.get(self.out) in _FLOATS

    def op(self, kind: str, *inputs: str, out: str | None = None, **attributes: Any) -> str:
        name = out or f"{self.prefix}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, inputs, [name], **attributes))
        return name

    def ints(self, *values: int) -> str:
        return self._constant(np.asarray(values, np.int64))

    def number(self, value: float) -> str:
        return self._constant(np.asarray(value, helper.tensor_dtype_to_np_dtype(self.types[self.out])))

    def _constant(self, array: np.ndarray[Any, Any]) -> str:
        name = f"{self.prefix}_constant_{len(self.nodes)}_{len(self.model.graph.initializer)}"
        tensor = numpy_helper.from_array(array, name)
        if self.rng.random() < 0.5:
            self.model.graph.initializer.append(tensor)
        else:
            self.nodes.append(helper.make_node("Constant", [], [name], value=tensor))
        return name

    def constant(self, name: str) -> np.ndarray[Any, Any] | None:
        for tensor in self.model.graph.initializer:
            if tensor.name == name:
                return numpy_helper.to_array(tensor)
        made = self.made_by(name)
        if made is None or made.op_type != "Constant" or made.attribute[0].name != "value":
            return None
        return numpy_helper.to_array(made.attribute[0].t)

    def made_by(self, name: str) -> onnx.NodeProto | None:
        return next((node for node in self.model.graph.node if name in node.output), None)

    def axes(self) -> list[int] | None:
        """The axes of a reduction, from 0 on; None where they are not known."""
        shape = self.shapes.get(self.node.input[0])
        given = next((list(a.ints) for a in self.node.attribute if a.name == "axes"), None)
        if len(self.node.input) > 1:
            array = self.constant(self.node.input[1])
            given = None if array is None else [int(axis) for axis in array]
        return None if shape is None or given is None else [axis % len(shape) for axis in given]

    def keeps(self) -> int:
        return next((int(a.i) for a in self.node.attribute if a.name == "keepdims"), 1)

    def reduced(self, kind: str, axes: Sequence[int], keepdims: int, out: str | None = None) -> str:
        opset = next(entry.version for entry in self.model.opset_import if not entry.domain)
        if kind == "ReduceSum" or opset >= 18:
            return self.op(kind, self.node.input[0], self.ints(*axes), keepdims=keepdims, out=out)
        return self.op(kind, self.node.input[0], axes=axes, keepdims=keepdims, out=out)


Rule = Callable[[_Writer], str | None]
"""Writes a node otherwise; None where it has no way."""


def _turned_comparison(w: _Writer) -> str:
    other = {"Less": "Greater", "Greater": "Less", "LessOrEqual": "GreaterOrEqual", "GreaterOrEqual": "LessOrEqual"}
    return w.op(other[w.node.op_type], *w.node.input[::-1], out=w.out)


def _turned_branches(w: _Writer) -> str:
    condition, taken, other = w.node.input
    return w.op("Where", w.op("Not", condition), other, taken, out=w.out)


def _square(w: _Writer) -> str | None:
    exponent = w.constant(w.node.input[1])
    if exponent is None or exponent.size != 1 or exponent.item() != 2:
        return None
    return w.op("Mul", w.node.input[0], w.node.input[0], out=w.out)


def _mean_as_sum(w: _Writer) -> str | None:
    axes, sizes = w.axes(), w.shapes.get(w.node.input[0])
    if axes is None or sizes is None or not all(sizes[axis] for axis in axes):
        return None
    count = int(np.prod([sizes[axis] or 0 for axis in axes]))
    total = w.reduced("ReduceSum", axes, w.keeps())
    by_product = w.rng.random() < 0.5
    return w.op("Mul" if by_product else "Div", total, w.number(1 / count if by_product else count), out=w.out)


def _dimensions_apart(w: _Writer) -> str | None:
    axes = w.axes()
    if axes is None:
        return None
    total = w.reduced(w.node.op_type, axes, 1 - w.keeps())
    return w.op("Unsqueeze" if w.keeps() else "Squeeze", total, w.ints(*axes), out=w.out)


def _distributed(w: _Writer) -> str | None:
    for factor, other in (w.node.input, w.node.input[::-1]):
        made = w.made_by(factor)
        if made is not None and made.op_type in ("Add", "Sub"):
            return w.op(made.op_type, *(w.op("Mul", term, other) for term in made.input), out=w.out)
    return None


def _reassociated(w: _Writer) -> str | None:
    for first, last in (w.node.input, w.node.input[::-1]):
        made = w.made_by(first)
        if made is not None and made.op_type == w.node.op_type:
            return w.op(made.op_type, made.input[0], w.op(made.op_type, made.input[1], last), out=w.out)
    return None


def _added_in_turn(w: _Writer) -> str | None:
    total, *rest = w.node.input
    for k, term in enumerate(rest):
        total = w.op("Add", total, term, out=w.out if k == len(rest) - 1 else None)
    return total if rest else None


_OF_FLOATS: list[tuple[str, tuple[str, ...], Rule]] = [
    ("commuted", ("Add", "Mul"), lambda w: w.op(w.node.op_type, *w.node.input[::-1], out=w.out)),
    ("sum of a negative", ("Sub",), lambda w: w.op("Add", w.node.input[0], w.op("Neg", w.node.input[1]), out=w.out)),
    ("negative difference", ("Sub",), lambda w: w.op("Neg", w.op("Sub", *w.node.input[::-1]), out=w.out)),
    ("inverse", ("Div",), lambda w: w.op("Mul", w.node.input[0], w.op("Reciprocal", w.node.input[1]), out=w.out)),
    ("square", ("Pow",), _square),
    ("mean as sum", ("ReduceMean",), _mean_as_sum),
    ("dimensions apart", ("ReduceSum", "ReduceMean"), _dimensions_apart),
    ("negative by product", ("Neg",), lambda w: w.op("Mul", w.node.input[0], w.number(-1), out=w.out)),
    ("negative by difference", ("Neg",), lambda w: w.op("Sub", w.number(0), w.node.input[0], out=w.out)),
    ("root by power", ("Sqrt",), lambda w: w.op("Pow", w.node.input[0], w.number(0.5), out=w.out)),
    ("inverse by quotient", ("Reciprocal",), lambda w: w.op("Div", w.number(1), w.node.input[0], out=w.out)),
    ("long sum", ("Add",), lambda w: w.op("Sum", *w.node.input, out=w.out)),
    ("added in turn", ("Sum",), _added_in_turn),
    ("distributed", ("Mul",), _distributed),
    ("reassociated", ("Add", "Mul"), _reassociated),
]
_OF_ANY: list[tuple[str, tuple[str, ...], Rule]] = [
    ("comparison turned", ("Less", "LessOrEqual", "Greater", "GreaterOrEqual"), _turned_comparison),
    ("branches turned", ("Where",), _turned_branches),
]


def _turned(w: _Writer, x: str) -> str | None:
    rank = len(w.shapes.get(w.out, ()))
    order = list(range(rank))
    w.rng.shuffle(order)
    if rank < 2:
        return None
    return w.op("Transpose", w.op("Transpose", x, perm=order), perm=[order.index(k) for k in range(rank)], out=w.out)


def _flattened(w: _Writer, x: str) -> str | None:
    sizes = w.shapes.get(w.out)
    if not sizes:
        return None
    whole = w.op("Shape", x) if None in sizes else w.ints(*(size or 0 for size in sizes))
    return w.op("Reshape", w.op("Reshape", x, w.ints(-1)), whole, out=w.out)


def _unsqueezed(w: _Writer, x: str) -> str:
    place = w.ints(w.rng.choice([0, -1]))
    return w.op("Squeeze", w.op("Unsqueeze", x, place), place, out=w.out)


AFTER: dict[str, Callable[[_Writer, str], str | None]] = {
    "identity": lambda w, x: w.op("Identity", x, out=w.out),
    "cast to its type": lambda w, x: w.op("Cast", x, to=w.types[w.out], out=w.out),
    "plus 0": lambda w, x: w.op("Add", x, w.number(0), out=w.out),
    "times 1": lambda w, x: w.op("Mul", w.number(1), x, out=w.out),
    "twice negative": lambda w, x: w.op("Neg", w.op("Neg", x), out=w.out),
    "half of twice": lambda w, x: w.op("Mul", w.op("Add", x, x), w.number(0.5), out=w.out),
    "expanded to its shape": lambda w, x: w.op("Expand", x, w.op("Shape", x), out=w.out),
    "turned": _turned,
    "flattened": _flattened,
    "unsqueezed": _unsqueezed,
}
"""What leaves a value as it is."""

RULES: dict[str, tuple[tuple[str, ...], Rule]] = {name: (kinds, rule) for name, kinds, rule in (*_OF_FLOATS, *_OF_ANY)}
_FOR_FLOATS = {name for name, *_ in _OF_FLOATS}


def _written(writer: _Writer, name: str) -> bool:
    """Whether a rule has a way to write the node."""
    node = writer.node
    if node.domain or len(node.output) != 1 or any(a.type == onnx.AttributeProto.GRAPH for a in node.attribute):
        return False
    if name in AFTER:
        if node.op_type == "Constant" or not writer.is_float:
            return False
        before = copy.deepcopy(node)
        before.output[0] = f"{writer.prefix}_before"
        writer.nodes.append(before)
        return AFTER[name](writer, before.output[0]) is not None
    kinds, rule = RULES[name]
    return node.op_type in kinds and (writer.is_float or name not in _FOR_FLOATS) and rule(writer) is not None


def respelled(model: onnx.ModelProto, changes: Sequence[Change], seed: int) -> tuple[onnx.ModelProto, list[str]]:
    """The model with the changes that there was a way for, and those, each with its node."""
    changed, done = copy.deepcopy(model), []
    for k, (name, place) in enumerate(changes):
        nodes = list(changed.graph.node)
        for step in range(len(nodes)):
            at = (place + step) % len(nodes)
            writer = _Writer(changed, nodes[at], random.Random(f"{seed} {k}"), f"respelled_{k}")
            if _written(writer, name):
                done.append(f"{name}: {nodes[at].op_type} {nodes[at].output[0]}")
                nodes[at : at + 1] = writer.nodes
                del changed.graph.node[:]
                changed.graph.node.extend(nodes)
                break
    return changed, done


def changes_of(rng: random.Random) -> list[Change]:
    return [(rng.choice([*RULES, *AFTER]), rng.randrange(1000)) for _ in range(rng.choice([1, 2, 3, 4, 6]))]


def lost(operator: str, seed: int) -> tuple[str, list[str]] | None:
    """A graph and the fewest changes with which the operator is no longer found in it; None where it is found."""
    name = GRAPHS[operator][seed % len(GRAPHS[operator])]
    model = onnx.load(COMMITTED / f"{name}.onnx")
    changes = changes_of(random.Random(seed))
    if operator in _NOT_DISTRIBUTED:
        changes = [change for change in changes if change[0] != "distributed"]

    def found(some: Sequence[Change]) -> bool:
        report = fuse(respelled(model, some, seed)[0], policy="all", bodies=False).report
        assert not any(miss.bug for miss in report.near_misses), report
        return operator in {fusion.op for fusion in report.fusions}

    if found(changes):
        return None
    for change in list(changes):
        fewer = [one for one in changes if one is not change]
        if not found(fewer):
            changes = fewer
    return name, respelled(model, changes, seed)[1]


def main(operator: str, count: str, first: str = "0") -> None:
    missing = [found for seed in range(int(first), int(first) + int(count)) if (found := lost(operator, seed))]
    for name, changes in missing:
        print(name, "; ".join(changes))
    print(f"{operator}: found in {int(count) - len(missing)} of {count}")


if __name__ == "__main__":
    main(*sys.argv[1:])
