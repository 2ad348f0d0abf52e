"""16-bit types within a step of wider types, and small integers: onnxruntime computes them differently, or not at
all."""

from __future__ import annotations

import math
from collections.abc import Sequence

import onnx_ir as ir

from gradfuse import custom_ops
from gradfuse.custom_ops import functions
from gradfuse.custom_ops.elementwise import MAX_RANK
from gradfuse.models.inlining import captured_by, values_of
from gradfuse.passes.shapes import infer
from gradfuse.training.step import LOSS

_NARROW, _WIDE = (ir.DataType.BFLOAT16, ir.DataType.FLOAT16), ir.DataType.FLOAT
_KEPT = frozenset(("Cast", "Constant", "Identity", "Shape", "Size"))
"""Operators that every runtime runs on 16-bit types."""
_MOVES = frozenset(
    """
    CastLike Concat Flatten Gather GatherElements GatherND If Loop Reshape Scan Slice Split Squeeze Transpose Unsqueeze
    """.split()
)
"""Operators that move numbers without computing: onnxruntime's CPU kernels of these take bfloat16."""

_LACKING = frozenset(("Size",))
"""What onnxruntime's CPU provider does with float16 only."""
_CONVOLUTIONS = {"Convolution": 1, "ConvolutionBackward": 2}
"""The operators of gradfuse on convolutions, and the place of the weight among their inputs."""
_FEWEST = 4096
"""Of how many numbers on a cast is done by gradfuse's operator: with fewer, starting a node takes most of the time."""
_DECIDING = frozenset(
    """
    ArgMax ArgMin Ceil Equal Floor Greater GreaterOrEqual Less LessOrEqual Mod NonZero Round Sign TopK Unique
    """.split()
)
"""Operators whose results jump: what they read is rounded everywhere, or equal numbers would not be equal."""
_VIEWS = frozenset(("Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze"))

_INTEGERS = {
    "Pow": frozenset((ir.DataType.INT8, ir.DataType.UINT8, ir.DataType.INT16)),
    **dict.fromkeys(("Where", "Max", "Min"), frozenset((ir.DataType.INT16,))),
}
"""Integers that an operator of ONNX does not take, or onnxruntime has no kernel for; int32 wraps around as they do."""


def compute_wider(model: ir.Model, *, narrow: bool) -> None:
    """Let operators on 16 bits compute in float32 and round each result, as PyTorch's kernels for CPUs do.

    Not where the step itself is narrow: such a model is for a device. Small integers become int32 in any step.

    Args:
        model: the model, which is changed.
        narrow: whether the step itself is of 16 bits.
    """
    for graph in model.graphs():
        for node in list(graph):
            types = {value.dtype for value in (*node.inputs, *node.outputs) if value is not None}
            if node.domain:
                continue
            for small in _NARROW:
                if small in types and node.op_type not in _KEPT and not narrow:
                    _compute_wider(graph, node, small, _WIDE)
            for integer in types & _INTEGERS.get(node.op_type, frozenset()):
                assert integer is not None
                _compute_wider(graph, node, integer, ir.DataType.INT32)


def has_bfloat16(model: ir.Model) -> bool:
    """Whether some value of a model is known to be bfloat16."""
    return any(value.dtype == ir.DataType.BFLOAT16 for value in values_of(model.graph))


def widen_bfloat16(model: ir.Model, *, fuse: bool) -> None:
    """Let arithmetic on bfloat16 that onnxruntime's CPU provider has no kernels for be in float32, between casts.

    What only moves numbers stays narrow, and so do most operators of gradfuse; with `fuse`, products of matrices become
    one of them. A result that is used in float32 in its own pass, forward or backward, is not rounded on the way; what
    the backward pass takes from the forward pass is kept in bfloat16, in which it takes half of the memory.
    """
    every = [node for graph in model.graphs() for node in graph]
    # Bodies of functions that were inlined have no types.
    untyped = {value for node in every for value in node.outputs if value.dtype is None}
    untyped |= {value for graph in model.graphs() for value in graph.inputs if value.dtype is None}
    if untyped:
        infer(model, untyped)
    if fuse:
        products = [node for node in every if _is_product(node)]
        convolutions = [node for node in every if node.op_type == "Conv" and not node.domain]
        swaps = [value.producer() for node in products for value in node.inputs if value is not None]
        known = [node for node in (*products, *convolutions, *swaps) if node is not None]
        infer(model, {value for node in known for value in (*node.inputs, *node.outputs) if value is not None})
        for node in products:
            if node.outputs[0].dtype == ir.DataType.BFLOAT16:
                _fuse_product(node)
        for node in convolutions:
            if node.outputs[0].dtype == ir.DataType.BFLOAT16:
                _fuse_convolution(node)
        for graph in model.graphs():
            for node in list(graph):
                if node.op_type in _CONVOLUTIONS and node.domain == custom_ops.DOMAIN:
                    _round_in_convolution(node)
    for graph in model.graphs():
        for node in list(graph):
            types = {value.dtype for value in (*node.inputs, *node.outputs) if value is not None}
            if ir.DataType.BFLOAT16 in types and not node.domain and node.op_type not in (_KEPT | _MOVES) - _LACKING:
                _compute_wider(graph, node, ir.DataType.BFLOAT16, _WIDE)
    _name_apart(model)
    _skip_roundings(model.graph)
    if fuse:
        _round_in_products(model.graph)
        functions.attach(model)


def _name_apart(model: ir.Model) -> None:
    """Rename what has the name of a value of another graph: each graph names what it gets for itself."""
    taken = {*model.graph.initializers, *(value.name for value in model.graph.inputs)}
    taken |= {value.name for node in model.graph for value in node.outputs}
    for graph in model.graphs():
        if graph is model.graph:
            continue
        for number, value in enumerate(value for node in graph for value in node.outputs):
            if value.name in taken:
                value.name = f"{value.name}/{graph.name}/{number}/{len(taken)}"
            taken.add(value.name)


def cast_by_vectors(model: ir.Model) -> None:
    """Make casts between float32 and bfloat16 `CastBfloat16`, but for small ones and those of constants.

    What onnxruntime folds, or finds to be undone by another cast, is to be a Cast: call this last.
    """
    graph = model.graph
    casts = [
        node for node in graph if _casts(node, _WIDE, ir.DataType.BFLOAT16) or _casts(node, ir.DataType.BFLOAT16, _WIDE)
    ]
    infer(model, {node.outputs[0] for node in casts})
    for node in casts:
        source, result = node.inputs[0], node.outputs[0]
        assert source is not None
        shape = result.shape
        if source.is_initializer() or shape is None or len(shape) > MAX_RANK:
            continue
        if math.prod(size for size in shape if isinstance(size, int)) < _FEWEST and shape.is_static():
            continue
        fused = ir.node(
            "CastBfloat16",
            [source],
            attributes={"to": result.dtype},
            domain=custom_ops.DOMAIN,
            outputs=[ir.Value(name=result.name, type=result.type, shape=shape)],
        )
        graph.insert_before(node, fused)
        ir.convenience.replace_all_uses_with(result, fused.outputs[0], replace_graph_outputs=True)
        graph.remove(node, safe=True)
    functions.attach(model)


def _is_product(node: ir.Node) -> bool:
    return not node.domain and node.op_type in ("MatMul", "Gemm")


def _fuse_product(node: ir.Node) -> None:
    """Make a product of matrices a `FusedMatmul`, which takes factors as they are before a transposition."""
    (product,), graph = node.outputs, node.graph
    assert isinstance(graph, ir.Graph)
    factors, bias = list(node.inputs[:2]), node.inputs[2] if len(node.inputs) > 2 else None
    if node.attributes.get_float("alpha", 1.0) != 1 or node.attributes.get_float("beta", 1.0) != 1:
        return
    if product.shape is None or (
        bias is not None and (bias.shape is None or tuple(bias.shape) != tuple(product.shape)[-1:])
    ):
        return
    transposed = [node.attributes.get_int("transA", 0), node.attributes.get_int("transB", 0)]
    for index, factor in enumerate(factors):
        if factor is None or factor.shape is None or len(factor.shape) < 2:
            return
        swap = factor.producer()
        if swap is not None and _swaps_last_axes(swap, len(factor.shape)):
            factors[index], transposed[index] = swap.inputs[0], 1 - transposed[index]
    swapped = _only_swap(product) if bias is None else None
    if swapped is not None:
        # (a b)' = b' a'
        factors, transposed = factors[::-1], [1 - flag for flag in reversed(transposed)]
        *batch, rows, columns = product.shape
        product = swapped.outputs[0]
        product.shape = ir.Shape([*batch, columns, rows])
    fused = ir.node(
        "FusedMatmul",
        factors if bias is None else [*factors, bias],
        attributes=dict(zip(("trans_a", "trans_b"), transposed, strict=True)),
        domain=custom_ops.DOMAIN,
        outputs=[ir.Value(name=product.name, type=product.type, shape=product.shape)],
    )
    former = [value.producer() for value in node.inputs if value is not None]
    graph.insert_before(node, fused)
    ir.convenience.replace_all_uses_with(product, fused.outputs[0], replace_graph_outputs=True)
    if swapped is not None:
        graph.remove(swapped, safe=True)
    graph.remove(node, safe=True)
    for swap in former:
        if swap is not None and swap.op_type == "Transpose" and swap.graph is not None:
            (value,) = swap.outputs
            if not value.uses() and not value.is_graph_output():
                swap.graph.remove(swap, safe=True)


def _only_swap(product: ir.Value) -> ir.Node | None:
    """The node that swaps the last axes of a product, if nothing else reads it."""
    uses, producer = list(product.uses()), product.producer()
    if len(uses) != 1 or product.is_graph_output() or product.shape is None or producer is None:
        return None
    swap = uses[0].node
    return swap if swap.graph is producer.graph and _swaps_last_axes(swap, len(product.shape)) else None


def _swaps_last_axes(node: ir.Node, rank: int) -> bool:
    perm = node.attributes.get_ints("perm", range(rank)[::-1]) if node.op_type == "Transpose" else ()
    return not node.domain and list(perm) == [*range(rank - 2), rank - 1, rank - 2]


def _fuse_convolution(node: ir.Node) -> None:
    """Make a Conv of known rank with explicit padding a `Convolution`."""
    (result,), graph = node.outputs, node.graph
    assert isinstance(graph, ir.Graph)
    image = node.inputs[0]
    if image is None or image.shape is None or node.attributes.get_string("auto_pad", "NOTSET") != "NOTSET":
        return
    names = {"strides": "stride", "pads": "padding", "dilations": "dilation"}
    lists = {new: node.attributes.get_ints(old) for old, new in names.items()}
    fused = ir.node(
        "Convolution",
        node.inputs,
        attributes={
            **{name: list(numbers) for name, numbers in lists.items() if numbers is not None},
            "groups": node.attributes.get_int("group", 1),
        },
        domain=custom_ops.DOMAIN,
        outputs=[ir.Value(name=result.name, type=result.type, shape=result.shape)],
    )
    graph.insert_before(node, fused)
    ir.convenience.replace_all_uses_with(result, fused.outputs[0], replace_graph_outputs=True)
    graph.remove(node, safe=True)


def _round_in_convolution(node: ir.Node) -> None:
    """Let a convolution of bfloat16 numbers round its weight itself, and give the weight's gradient in float32."""
    graph, place = node.graph, _CONVOLUTIONS[node.op_type]
    assert isinstance(graph, ir.Graph)
    weight, of_weight = node.inputs[place], [place, *range(place + 1, len(node.inputs))]
    rounding = None if weight is None else weight.producer()
    if rounding is None or not _casts(rounding, _WIDE, ir.DataType.BFLOAT16):
        return
    for index in of_weight:
        value = node.inputs[index]
        if value is None:
            continue
        former = value.producer()
        if former is not None and _casts(former, _WIDE, ir.DataType.BFLOAT16):
            node.replace_input_with(index, former.inputs[0])
            _remove_unread(former)
        else:
            cast = _cast(value, _WIDE)
            graph.insert_before(node, cast)
            node.replace_input_with(index, cast.outputs[0])
    node.attributes["factors_in_bfloat16"] = ir.AttrInt64("factors_in_bfloat16", 1)
    for value in node.outputs[1:]:
        _give_wide(graph, node, value)


def _give_wide(graph: ir.Graph, node: ir.Node, value: ir.Value) -> None:
    """Make a bfloat16 result of a node float32; what reads it in bfloat16 reads it rounded."""
    uses, is_output = list(value.uses()), value.is_graph_output()
    value.type = ir.TensorType(_WIDE)
    for widening, index in uses:
        if widening.op_type == "Cast" and not widening.domain and widening.outputs[0].dtype == _WIDE and not is_output:
            _become(value, widening)
        else:
            rounding = _cast(value, ir.DataType.BFLOAT16)
            graph.insert_after(node, rounding)
            widening.replace_input_with(index, rounding.outputs[0])


def _become(value: ir.Value, cast: ir.Node) -> None:
    """Let a value take the place of a cast's result, as an output of the graph too."""
    (result,), graph = cast.outputs, cast.graph
    assert isinstance(graph, ir.Graph)
    name, is_output = result.name, result.is_graph_output()
    if is_output and value.is_graph_output():
        return
    if value.shape is None:
        value.shape = result.shape
    ir.convenience.replace_all_uses_with(result, value, replace_graph_outputs=True)
    graph.remove(cast, safe=True)
    if is_output:
        value.name = name


def _skip_roundings(graph: ir.Graph) -> None:
    """Let what computes with a rounded result in float32 read the result.

    Not where the forward pass rounds what the backward pass reads: that is kept in bfloat16, and what is in float32 is
    not to be there as long. A runtime rounds as soon as something in the forward pass reads it.
    """
    forward = _forward_pass(graph)
    for rounding in list(graph):
        if not _casts(rounding, _WIDE, ir.DataType.BFLOAT16):
            continue
        rounded, source = rounding.outputs[0], rounding.inputs[0]
        assert source is not None
        # The rounding itself may be for the backward pass alone.
        is_forward = (source.producer() or rounding) in forward
        if is_forward and source.producer() is not None and _is_read_behind(rounded, forward):
            continue
        for widening in {use.node for use in rounded.uses()}:
            if widening.graph is not graph or not _casts(widening, ir.DataType.BFLOAT16, _WIDE):
                continue
            for user, index in list(widening.outputs[0].uses()):
                if user.graph is graph and is_forward == (user in forward) and not _decides(user):
                    user.replace_input_with(index, source)
            _remove_unread(widening)
        _remove_unread(rounding)


def _decides(node: ir.Node) -> bool:
    """Whether a node's results jump, as those of a comparison do."""
    to_whole = node.op_type == "Cast" and not node.outputs[0].dtype.is_floating_point()  # type: ignore[union-attr]
    return not node.domain and (node.op_type in _DECIDING or to_whole)


def _is_read_behind(value: ir.Value, forward: set[ir.Node]) -> bool:
    """Whether the backward pass reads a value, or a view or a wider copy of it."""
    return any(
        _is_read_behind(node.outputs[0], forward)
        if node in forward and (_is_view(node, index) or _casts(node, ir.DataType.BFLOAT16, _WIDE))
        else node not in forward
        for node, index in value.uses()
    )


def _remove_unread(cast: ir.Node) -> None:
    (value,) = cast.outputs
    if cast.graph is not None and not value.uses() and not value.is_graph_output():
        cast.graph.remove(cast, safe=True)


def _round_in_products(graph: ir.Graph) -> None:
    """Let products round their factors themselves, where that takes less time than casts of their own.

    A right factor that is cast for one product alone is rounded by that, and a weight by each product: a copy in
    bfloat16 would be there from the forward pass to the backward pass. A product of at least twice as many columns as
    the left factor has, as of a language model's head, is given in float32 if only such is read.
    """
    forward = _forward_pass(graph)
    for node in list(graph):
        if node.op_type != "FusedMatmul" or node.domain != custom_ops.DOMAIN:
            continue
        views = _views_of(node.inputs[0])
        left = _before_rounding(node, views[-1].inputs[0] if views else node.inputs[0], forward)
        right = _before_rounding(node, node.inputs[1], forward)
        bias = node.inputs[2] if len(node.inputs) > 2 else None
        widenings = _widenings(node.outputs[0]) if left is not None and _is_wide(node) else None
        if widenings:
            node.replace_input_with(0, _viewed(left, views, node))
            if bias is not None:
                cast = _cast(bias, _WIDE)
                graph.insert_before(node, cast)
                node.replace_input_with(2, cast.outputs[0])
            _widen_views(node.outputs[0])
            for cast in widenings:
                (value,) = cast.inputs
                assert value is not None
                ir.convenience.replace_all_uses_with(cast.outputs[0], value)
                graph.remove(cast, safe=True)
        if right is not None and (right.producer() is None or len(node.inputs[1].uses()) == 1):  # type: ignore[union-attr]
            node.replace_input_with(1, right)
        elif not widenings:
            continue
        node.attributes["factors_in_bfloat16"] = ir.AttrInt64("factors_in_bfloat16", 1)
    for node in reversed(list(graph)):
        is_left_over = node.op_type in _VIEWS | {"Cast"} and not node.outputs[0].uses()
        if is_left_over and not node.outputs[0].is_graph_output():
            graph.remove(node, safe=True)


def _views_of(value: ir.Value | None) -> list[ir.Node]:
    """The nodes, from the last one on, that make a value a view of another."""
    found: list[ir.Node] = []
    while value is not None and (node := value.producer()) is not None and _is_view(node):
        found.append(node)
        value = node.inputs[0]
    return found


def _viewed(value: ir.Value | None, views: Sequence[ir.Node], before: ir.Node) -> ir.Value | None:
    """The same views of another value, in nodes of their own."""
    for view in reversed(views):
        assert value is not None and before.graph is not None
        (old,) = view.outputs
        copy = ir.node(view.op_type, [value, *view.inputs[1:]], attributes=dict(view.attributes))
        copy.outputs[0].type, copy.outputs[0].shape = ir.TensorType(_WIDE), old.shape
        before.graph.insert_before(before, copy)
        (value,) = copy.outputs
    return value


def _widen_views(value: ir.Value) -> None:
    """Make a value float32, and all views of it."""
    value.type = ir.TensorType(_WIDE)
    for node, index in value.uses():
        if _is_view(node, index):
            _widen_views(node.outputs[0])


def _is_view(node: ir.Node, index: int = 0) -> bool:
    """Whether a node gives a view of its input at an index."""
    return node.op_type in _VIEWS and not node.domain and index == 0


def _before_rounding(node: ir.Node, factor: ir.Value | None, forward: set[ir.Node]) -> ir.Value | None:
    """What a factor is rounded from, unless the backward pass would keep it in float32 for that; else None."""
    rounding = None if factor is None else factor.producer()
    if rounding is None or not _casts(rounding, _WIDE, ir.DataType.BFLOAT16):
        return None
    source = rounding.inputs[0]
    assert source is not None
    return source if source.producer() is None or (rounding in forward) == (node in forward) else None


def _is_wide(node: ir.Node) -> bool:
    """Whether a product has at least twice as many columns as its left factor, which is not transposed."""
    left, product = node.inputs[0], node.outputs[0]
    if node.attributes.get_int("trans_a", 0) or left is None or left.shape is None or product.shape is None:
        return False
    columns, depth = product.shape[-1], left.shape[-1]
    return isinstance(columns, int) and isinstance(depth, int) and columns >= 2 * depth


def _widenings(value: ir.Value) -> list[ir.Node] | None:
    """The casts to float32 that a value's uses are, perhaps behind views of it; None where there are other uses.

    Of a shape the type does not matter. What a branch or a loop reads stays as it is.
    """
    producer = value.producer()
    if value.is_graph_output() or producer is None:
        return None
    found: list[ir.Node] = []
    for node, index in value.uses():
        if node.graph is not producer.graph:
            return None
        if _casts(node, ir.DataType.BFLOAT16, _WIDE) and not node.outputs[0].is_graph_output():
            if any(map(_decides, node.outputs[0].consumers())):
                return None
            found.append(node)
        elif _is_view(node, index):
            behind = _widenings(node.outputs[0])
            if behind is None:
                return None
            found += behind
        elif node.op_type != "Shape" or node.domain:
            return None
    return found


def _forward_pass(graph: ir.Graph) -> set[ir.Node]:
    """Return the nodes of a graph that the loss depends on."""
    found: set[ir.Node] = set()
    waiting = [value for value in graph.outputs if value.name == LOSS]
    while waiting:
        node = waiting.pop().producer()
        if node is not None and node not in found:
            found.add(node)
            waiting += [*(value for value in node.inputs if value is not None), *captured_by(node)]
    return found


def _casts(node: ir.Node, source: ir.DataType, to: ir.DataType) -> bool:
    """Whether a node casts from one type to the other."""
    value = node.inputs[0] if node.op_type == "Cast" and not node.domain else None
    return value is not None and value.dtype == source and node.outputs[0].dtype == to


def _compute_wider(graph: ir.Graph, node: ir.Node, narrow: ir.DataType, wide: ir.DataType) -> None:
    for index, value in enumerate(node.inputs):
        if value is not None and value.dtype == narrow:
            cast = _cast(value, wide)
            graph.insert_before(node, cast)
            node.replace_input_with(index, cast.outputs[0])
    for name, attribute in list(node.attributes.items()):
        if attribute.type == ir.AttributeType.TENSOR and attribute.as_tensor().dtype == narrow:
            numbers = attribute.as_tensor().numpy().astype(wide.numpy())
            node.attributes[name] = ir.AttrTensor(name, ir.tensor(numbers))
        elif name == "dtype" and attribute.type == ir.AttributeType.INT and attribute.as_int() == narrow:
            node.attributes[name] = ir.AttrInt64(name, int(wide))
    for value in node.outputs:
        if value.dtype == narrow:
            value.type = ir.TensorType(wide)  # Others may have the same object.
            cast = _cast(value, narrow)
            graph.insert_after(node, cast)
            if value.is_graph_output():
                cast.outputs[0].name, value.name = value.name, f"{value.name}/{wide.name.lower()}"
            ir.convenience.replace_all_uses_with(value, cast.outputs[0], replace_graph_outputs=True)
            cast.replace_input_with(0, value)


def _cast(value: ir.Value, dtype: ir.DataType) -> ir.Node:
    cast = ir.node("Cast", [value], attributes={"to": dtype})
    cast.outputs[0].type, cast.outputs[0].shape = ir.TensorType(dtype), value.shape
    return cast
