"""`gradfuse.differentiate`: a model and the gradients of one of its outputs, as one model."""

from __future__ import annotations

import itertools
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnx_ir as ir

from gradfuse.custom_ops import DOMAIN, VERSION
from gradfuse.differentiation import padding, sequences
from gradfuse.differentiation.contrib import share_packed_weights
from gradfuse.differentiation.convolutions import fuse_convolutions
from gradfuse.differentiation.dependence import Repeated, is_branches, repeated
from gradfuse.differentiation.expansion import expand
from gradfuse.differentiation.fused_attention import LEFT, fuse_attention
from gradfuse.differentiation.linear_cross_entropy import fuse_heads, join_heads
from gradfuse.differentiation.normalization import fold_relus
from gradfuse.differentiation.reverse import gradients
from gradfuse.differentiation.rules import CONSTANT, FLOATS, constant_of, entry_of
from gradfuse.differentiation.tensors import Tape, Tensor
from gradfuse.errors import ArgumentError, listed
from gradfuse.models import reading
from gradfuse.models.conversion import inline_functions, raise_opset
from gradfuse.models.inlining import Names, captured_by, graphs_of, inline, put_branch, values_of
from gradfuse.models.memory import collection_paused
from gradfuse.models.propagation import Facts
from gradfuse.models.tensors import with_small_tensors_in_memory
from gradfuse.passes import shapes
from gradfuse.training.step import GRADIENT_SUFFIX

if TYPE_CHECKING:
    from gradfuse.models.reading import ModelLike

OLDEST_OPSET = 17
"""Older models are raised to it."""

_OLD_GROUPS_OPSET, _GROUPS_OPSET = 18, 21
"""GroupNormalization of the first is deprecated for that of the second."""

PREFIX = "gradient/"

METADATA_KEY = "gradfuse.gradients"
"""The metadata key for the name of each gradient output, by the name that it was taken with respect to."""

_BY_RANK = frozenset({"RotaryEmbedding"})
"""Operators that ONNX defines by others as the rank of their input is."""

_SMALL = 64
"""How many elements a constant has at most that a shape may depend on."""


def differentiate(
    model: ModelLike,
    wrt: Sequence[str],
    of: str | None = None,
    seeds: Mapping[str, str] | None = None,
) -> Any:
    """Add the gradients of an output to a model.

    Args:
        model: a path, an `onnx.ModelProto`, an `onnx_ir.Model` or a `torch.onnx.ONNXProgram`.
        wrt: names of float inputs or initializers.
        of: the name of a float output; None: the only one. Without a seed it must have one element.
        seeds: output -> the name of a new input of its shape and type: the gradients are those of the sum of these
            outputs, each multiplied by its seed (a vector-Jacobian product).

    Returns:
        The model, of the same kind, with an output `<name>.grad` for each name, of its shape and type, after its own
        outputs and in the order of `wrt`. If the model already has that name, it is `<name>.grad_2`. The model's
        metadata `gradfuse.gradients` has all these names, as JSON. The nodes of the forward model keep their names. The
        result can be differentiated again.

    Raises:
        ArgumentError: a name is unknown or not a float, `of` is ambiguous, or the output does not depend on a name.
        ModelError: the model cannot be read, or a node in between has no gradient rule; the text is one line.
    """
    with collection_paused():
        return _differentiated(reading.load(model), wrt, of, seeds)


def _differentiated(
    loaded: reading.LoadedModel, wrt: Sequence[str], of: str | None, seeds: Mapping[str, str] | None
) -> Any:
    work = prepared(loaded)
    values = {str(value.name): value for value in (*work.graph.inputs, *work.graph.initializers.values())}
    chosen = _chosen(values, wrt)
    expand_on_the_way(work, chosen.values())
    outputs = _outputs(work.graph, of, seeds)
    tape = Tape(free_prefix(work.graph), work.opset_imports[""])
    given = {value: _seed(work.graph, tape, value, name) for value, name in outputs.items()}
    found = gradients(work.graph, tape, given, list(chosen.values()))
    work.graph.extend(tape.nodes)
    missing = [name for name, value in chosen.items() if value not in found]
    if missing:
        named = " or ".join(repr(output.name) for output in outputs)
        raise ArgumentError(f"differentiate: {named} does not depend on {listed(missing)}; expected what it depends on")
    taken = {value.name for value in values_of(work.graph)}
    names: dict[str, str] = {}
    for name, value in chosen.items():
        numbered = (f"{name}{GRADIENT_SUFFIX}_{number}" for number in itertools.count(2))
        free = itertools.chain([name + GRADIENT_SUFFIX], numbered)
        names[name] = next(one for one in free if one not in taken)
        taken.add(names[name])
        work.graph.outputs.append(named_output(work.graph, found[value], names[name], value))
    work.metadata_props[METADATA_KEY] = json.dumps(names)
    return loaded.restore(work)


def prepared(loaded: reading.LoadedModel) -> ir.Model:
    """Return the model with its functions inlined, in an opset that rules are written for, and with shapes."""
    return completed(inlined(loaded))


def inlined(loaded: reading.LoadedModel) -> ir.Model:
    """Return the model with its functions inlined; large tensors stay in files where they are much.

    Raises:
        ModelError: a function cannot be inlined.
    """
    model = with_small_tensors_in_memory(loaded.ir)
    inline_functions(model)
    return model


def completed(model: ir.Model) -> ir.Model:
    """Bring a model without functions to an opset that rules are written for, and give it shapes; return it."""
    groups = any(node.op_type == "GroupNormalization" and not node.domain for node in model.graph.all_nodes())
    raise_opset(model, _GROUPS_OPSET if groups and model.opset_imports[""] >= _OLD_GROUPS_OPSET else OLDEST_OPSET)
    # Constants among the initializers have shapes; what lacks one is asked for.
    for value in model.graph.initializers.values():
        if value.const_value is not None:
            value.dtype = value.const_value.dtype
            value.shape = ir.Shape(value.const_value.shape.numpy())
    _expand_functions(model)
    if any(node.op_type in sequences.OPERATORS and not node.domain for node in model.graph.all_nodes()):
        infer(model)
        sequences.without_sequences(model.graph, free_prefix(model.graph, "parts/"), model.opset_imports[""])
    _put_constants_in(model.graph)
    _fold_branches(model)
    _infer_turns(model)
    padding.make_explicit(model.graph, free_prefix(model.graph, "padding/"))
    return model


def expand_on_the_way(model: ir.Model, wrt: Collection[ir.Value]) -> None:
    """Put others in the place of operators that depend on some values, and that have an expansion."""
    if expand(model.graph, wrt, free_prefix(model.graph, "expanded/"), model.opset_imports[""]):
        if any(node.domain == DOMAIN for node in model.graph):
            model.opset_imports[DOMAIN] = VERSION
        infer(model)


def append_gradients(
    model: ir.Model,
    of: ir.Value,
    wrt: Sequence[ir.Value],
    *,
    fuse: bool,
    scale: tuple[ir.Value, float] | None = None,
    kept: Collection[ir.Value] | None = None,
    sizes: Mapping[str, int] = MappingProxyType({}),
) -> dict[ir.Value, Tensor]:
    """Append the gradients of a scalar to a graph in which all operators on the way have rules; return them.

    Args:
        model: the model.
        of: the scalar.
        wrt: what its gradients are taken by.
        fuse: whether operators of the domain `aclnn` may stand in them, and for what the scalar is computed by.
        scale: a float32 scalar and a number, whose product the gradients are multiplied by.
        kept: the values that are outputs at the end; None: the graph's outputs.
        sizes: what named dimensions are taken to be where that decides what is faster.
    """
    graph = model.graph
    if fuse:
        left = fuse_attention(graph, free_prefix(graph, "attention/"), model.opset_imports[""], wrt, sizes)
        model.meta.setdefault(LEFT, []).extend(left)
        outputs = set(graph.outputs if kept is None else kept)
        if fuse_heads(graph, free_prefix(graph, "head/"), model.opset_imports[""], wrt, outputs, sizes):
            model.opset_imports[DOMAIN] = VERSION
            infer(model)
    tape = Tape(free_prefix(graph), model.opset_imports[""])
    seed = tape.constant(np.ones([1] * len(of.shape or ())), of.dtype or ir.DataType.FLOAT)
    if scale is not None:
        seed = seed * (tape.of(scale[0]) * scale[1]).cast(seed.dtype)
    found = gradients(graph, tape, {of: seed}, wrt)
    graph.extend(tape.nodes)
    if fuse:
        fold_relus(graph)
        fuse_convolutions(graph)
        share_packed_weights(graph)
        join_heads(graph)
    return found


def _put_constants_in(graph: ir.Graph) -> None:
    """Copy small constants of integers into the branches and bodies that read them, which onnx infers by themselves."""
    prefix, number = free_prefix(graph, "constant/"), 0
    for node in list(graph.all_nodes()):
        arrays = {value: constant_of(value) for value in captured_by(node)}
        for body in graphs_of(node):
            copies: dict[ir.Value, ir.Value] = {}
            for inner in list(body.all_nodes()):
                for index, value in enumerate(inner.inputs):
                    array = None if value is None else arrays.get(value)
                    if value is None or array is None or array.size > _SMALL or array.dtype != np.int64:
                        continue
                    if value not in copies:
                        number += 1
                        copy = ir.node("Constant", [], {"value": ir.tensor(array)}, name=f"{prefix}{number}")
                        copies[value] = copy.outputs[0]
                        copy.outputs[0].name = copy.name
                        body.insert_before(body[0], copy)
                    inner.replace_input_with(index, copies[value])


def infer(model: ir.Model) -> None:
    """Give all values of a model the types and shapes that follow, and note which integers are constants."""
    _infer_once(model)
    _infer_turns(model)


def _infer_once(model: ir.Model) -> Facts:
    facts = shapes.infer(model, [v for node in model.graph.all_nodes() for v in node.outputs])
    for value in facts.elements:
        array = facts.constant(value) if value.producer() is not None else None
        if array is not None and array.dtype.kind in "biu":
            value.meta[CONSTANT] = array
    return facts


def _fold_branches(model: ir.Model) -> None:
    """Put the branch that is always taken in the place of every If whose condition follows from constants and sizes."""
    while True:
        facts = _infer_once(model)
        names = Names(model.graph)
        folded = False
        for node in list(model.graph.all_nodes()):
            condition = facts.constant(node.inputs[0]) if is_branches(node) else None
            if condition is not None and isinstance(node.graph, ir.Graph):
                name = "then_branch" if condition.reshape(()) else "else_branch"
                put_branch(node.graph, node, node.attributes[name].as_graph(), names)
                folded = True
        if not folded:
            return


def _infer_turns(model: ir.Model) -> None:
    """Give the inputs of loops' bodies the types and shapes around them, as far as no iteration changes the shape."""
    tried: set[ir.Value] = set()
    while True:
        loops = [loop for node in model.graph.all_nodes() if (loop := repeated(node)) is not None]
        guessed = []
        for loop in loops:
            for k, (first, start) in enumerate(loop.starts()):
                first.type = first.type or (start.type if start is not None else None)
                if first.shape is not None or first in tried or start is None or start.shape is None:
                    continue
                first.shape = start.shape
                guessed.append((first, loop.body.outputs[loop.ahead + k] if k < loop.carried else first))
        if not guessed:
            return
        tried.update(first for first, _ in guessed)
        unknown = [v for loop in loops for node in loop.body.all_nodes() for v in node.outputs if v.shape is None]
        while True:
            shapes.infer(model, unknown)
            weakened = [_weakened(first, last) for first, last in guessed]
            if not any(weakened):
                break
            for value in unknown:
                value.shape = None
        given = [_give_results(loop, tried) for loop in loops]
        if any(given):
            _infer_once(model)


def _give_results(loop: Repeated, kept: Collection[ir.Value]) -> bool:
    """Give results of a Loop that have no shape those within its body; return whether there are any.

    Of its carried values, those in `kept` have a shape that no iteration changes.
    """
    if loop.node.op_type != "Loop":
        return False
    firsts = loop.body.inputs[loop.first :]
    given = False
    for k, value in enumerate(loop.node.outputs):
        inner = firsts[k] if k < loop.carried else loop.body.outputs[loop.ahead + k]
        if value.shape is None and inner.shape is not None and (inner in kept or k >= loop.carried):
            value.shape = ir.Shape(inner.shape if k < loop.carried else [None, *inner.shape])
            given = True
    return given


def _weakened(first: ir.Value, last: ir.Value) -> bool:
    """Take from a shape what another one does not have; return whether it was more than that one."""
    if first.shape is None:
        return False
    shape = None
    if last.shape is not None and len(last.shape) == len(first.shape):
        shape = ir.Shape([a if a == b else None for a, b in zip(first.shape, last.shape, strict=True)])
    weakened = shape != first.shape
    first.shape = shape
    return weakened


def _expand_functions(model: ir.Model) -> None:
    """Put standard operators in the place of those that have no rule but that ONNX defines by others."""
    for _ in range(4):  # a body may use others again
        called = False
        without = [n for n in model.graph.all_nodes() if entry_of(n) is None and n.domain in ("", "ai.onnx")]
        untyped = any(value is not None and value.dtype is None for node in without for value in node.inputs)
        if untyped or any(node.op_type in _BY_RANK for node in without):
            infer(model)  # A body may depend on the types of the inputs, and what is declared of ranks be wrong.
        for index, node in enumerate(without):
            function = None if node.overload else _body(node, model.opset_imports[""])
            if function is not None:
                node.overload = function.overload = f"{PREFIX}{index}"
                function.domain, function.name = node.domain, node.op_type
                model.functions[function.identifier()] = function
                called = True
        if not called:
            return
        inline(model, lambda function: function.overload.startswith(PREFIX))


def _body(node: ir.Node, opset: int) -> ir.Function | None:
    try:
        schema: Any = onnx.defs.get_schema(node.op_type, opset, "")
    except onnx.defs.SchemaError:
        return None
    types = [onnx.TypeProto() if value is None else ir.serde.serialize_value(value).type for value in node.inputs]
    content = b""
    # onnx has no body for an opset in which an operator of the body gained a type.
    for version in range(opset, schema.since_version - 1, -1):
        if schema.has_context_dependent_function:
            content = schema.get_context_dependent_function_with_opset_version(
                version, ir.to_proto(node).SerializeToString(), [t.SerializeToString() for t in types]
            )
        elif schema.has_function:
            content = schema.get_function_with_opset_version(version)
        if content:
            break
    if not content:
        return None
    function = onnx.FunctionProto.FromString(content)
    if not all(_has_same_form(inner, version, opset) for inner in function.node):
        return None
    for name in function.attribute:
        # A body refers to attributes by name, and knows no defaults.
        default = schema.attributes[name].default_value
        if name not in node.attributes and default.name:
            node.attributes.add(ir.serde.deserialize_attribute(default))
    # Outputs that this use of the operator leaves out may have no node in it: another one stands in for them.
    given = {*function.input, *(name for inner in function.node for name in inner.output)}
    stand_in = next(name for name in function.output if name in given)
    function.output[:] = [name if name in given else stand_in for name in function.output]
    body = ir.serde.deserialize_function(function)
    # It holds from its own version on, up to that of the next body.
    body.opset_imports[""] = opset
    return body


def _has_same_form(node: onnx.NodeProto, version: int, opset: int) -> bool:
    """Tell whether a node of an opset is written in the same way in a newer one, which may have further options."""
    old, new = (onnx.defs.get_schema(node.op_type, one, node.domain) for one in (version, opset))
    further = [value for name, value in new.attributes.items() if name not in old.attributes]
    return (
        set(old.attributes) <= set(new.attributes)
        and not any(attribute.required for attribute in further)
        and [value.name for value in old.inputs] == [value.name for value in new.inputs][: len(old.inputs)]
        and new.min_input <= old.min_input
    )


def free_prefix(graph: ir.Graph, stem: str = PREFIX) -> str:
    """Return a prefix that no name in the graph begins with."""
    names = [v.name for node in graph.all_nodes() for v in node.outputs] + [v.name for v in graph.inputs]
    prefix, number = stem, 1
    while any(name is not None and name.startswith(prefix) for name in names):
        number += 1
        prefix = f"{stem[:-1]}_{number}/"
    return prefix


def named_output(graph: ir.Graph, tensor: Tensor, name: str, like: ir.Value) -> ir.Value:
    """Return the tensor under a name, with the type and shape of another value."""
    value = tensor.value
    if value.producer() is None or value.is_graph_output():
        node = ir.node("Identity", [value], name=f"{name}.identity")
        graph.append(node)
        value = node.outputs[0]
    value.name = name
    value.type, value.shape = like.type, like.shape
    return value


def _outputs(graph: ir.Graph, of: str | None, seeds: Mapping[str, str] | None) -> dict[ir.Value, str | None]:
    """Return the outputs that are differentiated, with the names of their seeds."""
    outputs = {str(value.name): value for value in graph.outputs}
    if seeds:
        if of is not None:
            raise ArgumentError("differentiate: of and seeds are both given; expected one of them")
        asked: dict[str, str | None] = dict(seeds)
    elif of is None:
        if len(outputs) != 1:
            raise ArgumentError(f"differentiate: of is None; expected one of {listed(outputs)}")
        asked = dict.fromkeys(outputs)
    else:
        asked = {of: None}
    taken = {value.name for value in values_of(graph)}
    for name, seed in asked.items():
        value = outputs.get(name)
        if value is None:
            raise ArgumentError(f"differentiate: {name!r} is no output; expected one of {listed(outputs)}")
        if value.dtype not in FLOATS:
            raise ArgumentError(f"differentiate: output {name!r} is {value.dtype}; expected a float type")
        if seed is None and (value.shape is None or any(dim != 1 for dim in value.shape)):
            shape = "unknown" if value.shape is None else str(value.shape)
            raise ArgumentError(f"differentiate: output {name!r} has shape {shape}; expected a scalar, or seeds")
        if seed in taken:
            raise ArgumentError(f"differentiate: the seed {seed!r} is taken by the model; expected a new name")
    return {outputs[name]: seed for name, seed in asked.items()}


def _seed(graph: ir.Graph, tape: Tape, value: ir.Value, name: str | None) -> Tensor:
    dtype = value.dtype
    assert dtype is not None
    if name is not None:
        seed = ir.Value(name=name, type=ir.TensorType(dtype), shape=value.shape)
        graph.inputs.append(seed)
        return tape.of(seed)
    assert value.shape is not None
    return tape.constant(np.ones([1] * len(value.shape)), dtype)


def _chosen(values: Mapping[str, ir.Value], wrt: Iterable[str]) -> dict[str, ir.Value]:
    if isinstance(wrt, str):
        raise ArgumentError(f"differentiate: wrt is {wrt!r}; expected a list of names")
    chosen = {}
    for name in wrt:
        value = values.get(name)
        if value is None:
            raise ArgumentError(f"differentiate: wrt has {name!r}; expected inputs or initializers of the model")
        if value.dtype not in FLOATS:
            raise ArgumentError(f"differentiate: {name!r} is {value.dtype}; expected a float type")
        chosen[name] = value
    if not chosen:
        raise ArgumentError("differentiate: wrt is empty; expected names of inputs or initializers")
    return chosen
