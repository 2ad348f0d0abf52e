"""Types and shapes that an exporter left out: what follows by our own rules, and the rest by onnx."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import onnx
import onnx_ir as ir

from gradfuse.errors import WorkerError
from gradfuse.models import inference
from gradfuse.models.inlining import graphs_of
from gradfuse.models.propagation import Facts, Size, Sizes, size_of

# Larger initializers are data, which no shape depends on.
_LARGEST_INITIALIZER_BYTES = 1000

_ROUNDS = 8
"""So often, at most, onnx is asked about what there is no rule for: what it says may be what a rule waits for."""


def infer(model: ir.Model, values: Collection[ir.Value]) -> Facts:
    """Give values of a model the types and shapes that follow; what is not known of them stays as it is.

    Rules of our own come first (models.propagation), and onnx is asked about the rest. Declared shapes that contradict
    what follows from the inputs are replaced.

    Returns:
        What is known of all values.

    Raises:
        WorkerError: the process that infers fails for a reason that is not the model.
    """
    asked: dict[ir.Value, tuple[ir.DataType | None, Sizes | None]] = {}
    facts = Facts(model)
    if _free_contradicted(model, facts):
        facts = Facts(model)
    for _ in range(_ROUNDS):
        missing = _missing(model, facts)
        if not missing:
            break
        found = _asked_of_onnx(model, facts, missing)
        new = {value: one for value, one in found.items() if asked.get(value) != one}
        if not new:
            break
        asked |= new
        facts = Facts(model, asked)
    for value in values:
        _take(value, facts)
    return facts


def _free_contradicted(model: ir.Model, facts: Facts) -> bool:
    """Make sizes of outputs anonymous whose name stands for different ones; return whether there are any.

    torch's older exporter makes up names, and may give one to two axes: what is not known would be taken to be equal.
    """
    of_inputs = {size_of(dim) for value in model.graph.inputs for dim in value.shape or ()}
    sizes: dict[Size, set[Size]] = {}
    outputs = [value for value in model.graph.outputs if value.producer() is not None and value.shape is not None]
    for value in outputs:
        assert value.shape is not None
        for dim, size in zip(value.shape, facts.shapes.get(value, ()), strict=False):
            sizes.setdefault(size_of(dim), set()).add(size)
    wrong = {name for name, found in sizes.items() if isinstance(name, str) and len(found) > 1} - of_inputs
    for value in outputs:
        assert value.shape is not None
        if not wrong.isdisjoint(map(size_of, value.shape)):
            value.shape = ir.Shape([None if size_of(dim) in wrong else dim for dim in value.shape])
    return bool(wrong)


def _missing(model: ir.Model, facts: Facts) -> set[ir.Value]:
    """Return the named results in a model's graphs whose type or rank is not known."""
    results = (value for graph in model.graphs() for node in graph for value in node.outputs if value.name)
    return {value for value in results if value not in facts.dtypes or value not in facts.shapes}


def _asked_of_onnx(
    model: ir.Model, facts: Facts, missing: Collection[ir.Value]
) -> dict[ir.Value, tuple[ir.DataType | None, Sizes | None]]:
    """Return what onnx says of values."""
    found: dict[ir.Value, tuple[ir.DataType | None, Sizes | None]] = {}
    try:
        inferred = inference.infer(_prepared(model, facts))
        if inferred is None:
            return {}
        graphs = list(model.graphs())
        known = [_declared(inferred.graph)] if len(graphs) == 1 else _of_graphs(inferred)
        for graph, of_graph in zip(graphs, known, strict=False):
            for name, value in ir.convenience.create_value_mapping(graph).items():
                if value in missing and name in of_graph:
                    one = of_graph[name]
                    read = one if isinstance(one, ir.Value) else ir.serde.deserialize_value_info_proto(one, None)
                    found[value] = read.dtype, None if read.shape is None else [size_of(dim) for dim in read.shape]
    except WorkerError:
        raise
    except Exception:  # To clone, serialise and read a malformed model may raise anything.
        return {}
    return found


def _declared(graph: onnx.GraphProto) -> Mapping[str, onnx.ValueInfoProto | ir.Value]:
    """Return what a graph says of its values: to read all of it takes longer."""
    return {info.name: info for infos in (graph.input, graph.output, graph.value_info) for info in infos}


def _of_graphs(model: onnx.ModelProto) -> list[Mapping[str, onnx.ValueInfoProto | ir.Value]]:
    """Return the values of a model's graph and of those within it."""
    return [ir.convenience.create_value_mapping(graph) for graph in ir.from_proto(model).graphs()]


def _take(value: ir.Value, facts: Facts) -> None:
    """Give a value its type and shape; a name of a size that the model has is kept where it says no less."""
    if value in facts.dtypes:
        value.dtype = facts.dtypes[value]
    sizes = facts.shapes.get(value)
    if sizes is None:
        return
    given = value.shape
    if given is not None and len(given) == len(sizes):
        kept = zip(given, sizes, strict=True)
        sizes = [a if (a := size_of(dim)) is not None and not _says_more(b, a, facts) else b for dim, b in kept]
    value.shape = ir.Shape(sizes)


def _says_more(size: Size, than: Size, facts: Facts) -> bool:
    """Whether a size that follows says more of a dimension than what the model declares, or contradicts it."""
    known = isinstance(size, int) or (isinstance(than, int) and size not in facts.invented)
    return known or facts.contradicts(size, than)


def _prepared(model: ir.Model, facts: Facts) -> onnx.ModelProto:
    """A copy of the model for onnx: standard operators stand for onnxruntime's, and what is known is an input.

    The model itself stays as it is, to the order in which the uses of a value are listed.
    """
    copy = model.clone()
    _take_known_out(model, copy, facts)
    for graph in (copy.graph, *(f.graph for f in copy.functions.values())):
        for node in list(graph.all_nodes()):
            if node.op_type == "ConvGrad" and node.domain == "com.microsoft" and len(node.outputs) > 2:
                _put_bias(node)
            if node.op_type == "EmbedLayerNormalization" and node.domain == "com.microsoft" and len(node.inputs) > 2:
                _put_embeddings(node)
            stand_in = _stand_in(node) or _stand_in_of_attention(node)
            if stand_in is not None:
                if stand_in[0] == "MatMul":
                    copy.graph.inputs.extend(v for v in stand_in[1][1:] if v is not None)
                _become(node, *stand_in)
    _take_large_initializers_out(copy.graph)
    _note_names(copy.graph, facts)
    return ir.to_proto(copy)


def _take_known_out(model: ir.Model, copy: ir.Model, facts: Facts) -> None:
    """Let inputs and constants stand for nodes of a copy whose results are known."""
    own = copy.graph
    known_nodes: list[ir.Node] = []
    for node, twin in zip(list(model.graph), list(own), strict=True):
        results = list(zip(node.outputs, twin.outputs, strict=True))
        for value, result in results:
            if value in facts.dtypes and value in facts.shapes:
                result.type, result.shape = ir.TensorType(facts.dtypes[value]), ir.Shape(facts.shapes[value])
        named = [value for value in node.outputs if value.name]
        if not all(value in facts.dtypes and value in facts.shapes for value in named) or graphs_of(node):
            continue
        known_nodes.append(twin)
        for value, result in results:
            if not value.name:
                continue
            array = facts.constant(value)
            tensor = None if array is None else ir.tensor(array, dtype=facts.dtypes[value], name=value.name)
            new = ir.Value(name=result.name, type=result.type, shape=result.shape, const_value=tensor)
            result.replace_all_uses_with(new, replace_graph_outputs=True)
            if tensor is None:
                own.inputs.append(new)
            else:
                own.register_initializer(new)
    own.remove(known_nodes)


def _note_names(graph: ir.Graph, facts: Facts) -> None:
    """Let an input have all names of sizes: onnx gives a size that it does not know a name that it does not find."""
    names = sorted(facts.names())
    if names:
        values = {value.name for value in (*graph.inputs, *graph.initializers.values())}
        values.update(value.name for node in graph.all_nodes() for value in node.outputs)
        name = "sizes"
        while name in values:
            name += "_"
        graph.inputs.append(ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(names)))


def _take_large_initializers_out(graph: ir.Graph) -> None:
    for name, value in list(graph.initializers.items()):
        tensor = value.const_value
        if tensor is not None:
            value.shape = ir.Shape(tensor.shape.numpy()) if value.shape is None else value.shape
            value.dtype = tensor.dtype if value.dtype is None else value.dtype
        if not value.is_graph_input():
            graph.inputs.append(value)
        if tensor is None or tensor.nbytes > _LARGEST_INITIALIZER_BYTES:
            del graph.initializers[name]


def _put_bias(node: ir.Node) -> None:
    """Put a vector of the weight's first dimension in the place of the gradient of a convolution's bias."""
    weight = node.inputs[2]
    if weight is None:
        return
    rows = ir.node("Flatten", [weight], {"axis": 1})
    places = ir.node("ArgMax", [rows.outputs[0]], {"axis": 1, "keepdims": 0})
    rows.outputs[0].name, places.outputs[0].name = (f"{node.outputs[2].name} of ConvGrad/{kind}" for kind in "ab")
    _replace(node, 2, [rows, places, ir.node("CastLike", [places.outputs[0], weight])])


def _replace(node: ir.Node, output: int, new: Sequence[ir.Node]) -> None:
    """Put the last of some nodes in the place of an output of a node, if it is there."""
    graph, value = node.graph, node.outputs[output]
    assert graph is not None
    if value.name:
        last = new[-1].outputs[0]
        last.name, value.name = value.name, f"{value.name} of {node.op_type}"
        graph.insert_after(node, new)
        value.replace_all_uses_with(last, replace_graph_outputs=True)


def _put_embeddings(node: ir.Node) -> None:
    """Put what has their types in the place of the results of embedding: normalised, lengths, and their sum."""
    ids, words = node.inputs[0], node.inputs[2]
    largest = ir.node("ArgMax", [ids], {"axis": 1, "keepdims": 0})
    largest.outputs[0].name = f"{node.outputs[0].name} of {node.op_type}/largest"
    lengths = ir.node("Cast", [largest.outputs[0]], {"to": int(ir.DataType.INT32)})
    for output, kin in zip(range(len(node.outputs)), (None, lengths, None), strict=False):
        _replace(node, output, [largest, kin] if kin else [ir.node("Gather", [words, ids])])


def _become(node: ir.Node, op_type: str, inputs: Sequence[ir.Value | None], attributes: Mapping[str, ir.Attr]) -> None:
    node.domain, node.op_type = "", op_type
    node.resize_inputs(len(inputs))
    for k, value in enumerate(inputs):
        node.replace_input_with(k, value)
    node.attributes.clear()
    node.attributes.update(attributes)


def _stand_in(node: ir.Node) -> tuple[str, Sequence[ir.Value | None], Mapping[str, ir.Attr]] | None:
    """Operator, inputs and attributes of a standard node whose outputs have the types and shapes of the node's."""
    inputs, name = node.inputs, node.op_type
    if node.domain != "com.microsoft" or not inputs:
        return None
    if name == "FusedMatMul" and len(inputs) == 2:
        flags = [node.attributes.get(flag) for flag in ("transA", "transB", "transBatchA", "transBatchB")]
        trans_a, trans_b, *batches = (flag is not None and bool(flag.value) for flag in flags)
        left, right = "ji" if trans_a else "ij", "kj" if trans_b else "jk"
        # onnx has no ellipsis for operands of different ranks.
        by_matrix = _rank(inputs[1]) == 2 and not trans_a
        equation = f"...j,{right}->...k" if by_matrix else f"...{left},...{right}->...ik"
        return None if any(batches) else ("Einsum", inputs, {"equation": ir.AttrString("equation", equation)})
    return None


def _stand_in_of_attention(
    node: ir.Node,
) -> tuple[str, Sequence[ir.Value | None], Mapping[str, ir.Attr]] | None:
    """As `_stand_in`, of what onnxruntime's optimizer fuses; a MatMul comes with a matrix that is no value yet."""
    inputs, name = node.inputs, node.op_type
    if node.domain != "com.microsoft" or not inputs:
        return None
    if name == "FusedConv":
        fused = ("activation", "activation_params")
        return "Conv", inputs[:3], {key: a for key, a in node.attributes.items() if key not in fused}
    if name == "RotaryEmbedding":
        return "Identity", inputs[:1], {}
    if name == "MultiHeadAttention" and len(inputs) > 2 and inputs[1] is not None and inputs[2] is not None:
        return "Einsum", [inputs[0], inputs[2]], {"equation": ir.AttrString("equation", "bsh,blv->bsv")}
    if name == "GroupQueryAttention":
        if len(inputs) > 2 and inputs[1] is not None:
            return "Identity", inputs[:1], {}
        return "MatMul", [inputs[0], _matrix(node, None)], {}
    if name == "Attention" and len(inputs) > 1:
        sizes = node.attributes.get("qkv_hidden_sizes")
        weights = None if inputs[1] is None else inputs[1].shape
        columns = None if weights is None or len(weights) != 2 else weights[1]
        width = columns // 3 if isinstance(columns, int) else None
        return "MatMul", [inputs[0], _matrix(node, sizes.as_ints()[2] if sizes is not None else width)], {}
    return None


def _matrix(node: ir.Node, columns: int | None) -> ir.Value:
    """A matrix that turns the input of a node into its output."""
    like = node.inputs[0]
    dtype = None if like is None else like.dtype
    # Without a type nothing is inferred; the values that follow get theirs from elsewhere.
    kind = ir.TensorType(dtype or ir.DataType.FLOAT)
    return ir.Value(name=f"{node.outputs[0].name}/matrix", type=kind, shape=ir.Shape([None, columns]))


def _rank(value: ir.Value | None) -> int | None:
    node = None if value is None else value.producer()
    if value is not None and value.shape is not None:
        return len(value.shape)
    perm = node.attributes.get("perm") if node is not None and node.op_type == "Transpose" else None
    return None if perm is None else len(perm.as_ints())
