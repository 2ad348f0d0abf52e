"""Dropout and other draws of random numbers in a forward model, as hashes of a seed that is a buffer of the step."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir

from gradfuse.custom_ops.draws import MASK, UNIFORM, threshold
from gradfuse.differentiation.rules import constant_of
from gradfuse.differentiation.tensors import Tape, Tensor
from gradfuse.errors import ArgumentError
from gradfuse.models.conversion import raise_opset
from gradfuse.models.inlining import inline, values_of
from gradfuse.training.step import DROPOUT_SEED

OLDEST_OPSET = 18
"""The oldest whose operators the hashes are written in."""

_DOMAIN = "gradfuse.draws"
_DRAWS = ("Dropout", "Bernoulli", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike")
_TRAINING = 2


def in_new_opset(model: ir.Model) -> ir.Model:
    """Return a model without functions, raised to `OLDEST_OPSET` if it draws numbers and is older.

    Raises:
        ModelError: a node has no equivalent in it.
    """
    opset = model.opset_imports[""]
    first = next(_draws(model.graph), None)
    if first is None or opset >= OLDEST_OPSET:
        return model
    raise_opset(model, OLDEST_OPSET)
    return model


def seed_draws(model: ir.Model, tape: Tape) -> dict[str, Tensor]:
    """Let a seed determine what the nodes of a graph draw; what they give keeps its name.

    Element i of the n-th draw is a function of (seed, n, i), as in steps exported from PyTorch, where the n-th dropout
    drops the same elements. Draws within loops and branches stay as they are, and so does Multinomial.

    Args:
        model: the model, which gets the seed as an initializer of 0.
        tape: where nodes are written.

    Returns:
        The seed's name, and the seed of the next step; nothing where nothing is drawn.

    Raises:
        ArgumentError: the model has a value of the seed's name.
    """
    graph = model.graph
    nodes = list(_draws(graph))
    if not nodes:
        return {}
    if any(value.name == DROPOUT_SEED for value in values_of(graph)):
        raise ArgumentError(f"the model has a value {DROPOUT_SEED!r}; expected that name to be free: dropout needs it")
    number = ir.tensor(np.zeros((), np.int64), name=DROPOUT_SEED)
    seed = ir.Value(name=DROPOUT_SEED, type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape([]), const_value=number)
    graph.register_initializer(seed)
    layers = iter(range(2 * len(nodes)))
    for node in nodes:
        begin = len(tape.nodes)
        results = _drawn(node, tape, tape.of(seed), layers)
        graph.insert_before(node, tape.nodes[begin:])
        for old, result in zip(node.outputs, results, strict=False):
            new = result.value
            name = old.name
            new.shape = new.shape if new.shape is not None else old.shape
            ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
            old.name, new.name = f"{tape.prefix}drawn/{name}", name
        graph.remove(node, safe=True)
    drawn = {node.op_type for node in tape.nodes if node.domain == _DOMAIN}
    for text in (MASK, UNIFORM):
        proto = onnx.parser.parse_function(f'<domain: "{_DOMAIN}", opset_import: ["": {OLDEST_OPSET}]>{text}')
        function = ir.serde.deserialize_function(proto)
        function.opset_imports[""] = model.opset_imports[""]
        if function.name in drawn:
            model.functions[function.identifier()] = function
    inline(model, lambda function: function.domain == _DOMAIN)
    begin = len(tape.nodes)
    after = tape.of(seed) + 1
    graph.extend(tape.nodes[begin:])
    return {DROPOUT_SEED: after}


def turn_off_dropout(graph: ir.Graph) -> None:
    """Let Dropout be the identity where it always drops."""
    for node in graph.all_nodes():
        if node.op_type == "Dropout" and not node.domain and _training(node):
            node.replace_input_with(_TRAINING, None)


def _draws(graph: ir.Graph) -> Iterator[ir.Node]:
    """Yield the nodes of a graph that draw numbers."""
    for node in graph:
        if node.op_type in _DRAWS and not node.domain and (node.op_type != "Dropout" or _training(node) is not False):
            yield node


def _training(node: ir.Node) -> bool | None:
    """Whether a Dropout drops; None where that is known at run time."""
    given = node.inputs[_TRAINING] if len(node.inputs) > _TRAINING else None
    if given is None:
        return False
    known = constant_of(given)
    return None if known is None else bool(known)


def _drawn(node: ir.Node, tape: Tape, seed: Tensor, layers: Iterator[int]) -> tuple[Tensor, ...]:
    """Return what takes the place of a node's outputs."""

    def uniform(like: Tensor) -> Tensor:
        return tape.op("UniformNumbers", seed, like, domain=_DOMAIN, dtype=ir.DataType.FLOAT, layer=next(layers))

    if node.op_type == "Dropout":
        return _dropped(node, tape, seed, layers)
    attributes = node.attributes
    first = node.inputs[0] if node.inputs else None
    if first is None:
        like = tape.op("ConstantOfShape", tape.ints(*attributes["shape"].as_ints()), dtype=ir.DataType.FLOAT)
    else:
        like = tape.of(first)
    given = attributes.get("dtype")
    dtype = ir.DataType(given.as_int()) if given is not None else like.dtype
    if node.op_type == "Bernoulli":
        return ((uniform(like) < like.cast(ir.DataType.FLOAT)).cast(dtype),)

    def number(name: str, default: float) -> float:
        return attributes[name].as_float() if name in attributes else default

    if node.op_type.startswith("RandomUniform"):
        low, high = number("low", 0.0), number("high", 1.0)
        return ((uniform(like) * (high - low) + low).cast(dtype),)
    # Box and Muller's transform of two uniform numbers.
    radius, angle = uniform(like), uniform(like)
    normal = ((1.0 - radius).op("Log") * -2.0).sqrt() * (angle * (2 * math.pi)).op("Cos")
    return ((normal * number("scale", 1.0) + number("mean", 0.0)).cast(dtype),)


def _dropped(node: ir.Node, tape: Tape, seed: Tensor, layers: Iterator[int]) -> tuple[Tensor, ...]:
    value, ratio, training = [*node.inputs, None][:3]
    assert value is not None and training is not None
    x = tape.of(value)
    share = np.float32(0.5) if ratio is None else constant_of(ratio)
    layer = next(layers)
    if share is not None:
        p = float(share)
        kept = tape.op(
            "DropoutMask", seed, x, domain=_DOMAIN, dtype=ir.DataType.BOOL, layer=layer, threshold=threshold(p)
        )
        dropped = x * kept.cast(x.dtype) * (1 / (1 - p) if p < 1 else 0.0)
    else:
        assert ratio is not None
        given = tape.of(ratio)
        numbers = tape.op("UniformNumbers", seed, x, domain=_DOMAIN, dtype=ir.DataType.FLOAT, layer=layer)
        kept = numbers.op("GreaterOrEqual", given.cast(ir.DataType.FLOAT))
        dropped = x * kept.cast(x.dtype) / (1 - given.cast(x.dtype))
    if _training(node) is None:
        drops = tape.of(training)
        dropped, kept = drops.where(dropped, x), drops.op("Not").op("Or", kept)
    return dropped, kept
