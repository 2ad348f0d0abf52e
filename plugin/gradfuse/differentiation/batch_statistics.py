"""BatchNormalization of a forward model as it is in training: by the batch's mean and variance."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import onnx_ir as ir

from gradfuse.custom_ops.batch_norm_backward import MAX_RANK
from gradfuse.differentiation.normalization import BY_BATCH, mean
from gradfuse.differentiation.parameters import statistic_name
from gradfuse.differentiation.rules import error_of
from gradfuse.differentiation.stored import Reader, Store, array_of
from gradfuse.differentiation.tensors import Tape, Tensor

_MEAN, _VARIANCE = 3, 4


def leave_training_mode(graph: ir.Graph) -> list[ir.Node]:
    """Put nodes into inference mode whose new running statistics go nowhere; return them.

    PyTorch's older exporter leaves the statistics so when it exports a model in training mode.
    """
    found = []
    for node in graph:
        mode = node.attributes.get("training_mode")
        if node.op_type != "BatchNormalization" or node.domain or mode is None or not mode.as_int():
            continue
        given = [node.inputs[index] for index in (_MEAN, _VARIANCE)]
        if any(value is None or value.name not in graph.initializers for value in given):
            continue
        if any(value.uses() or value.is_graph_output() for value in node.outputs[1:]):
            continue
        node.attributes.pop("training_mode")
        node.resize_outputs(1)
        found.append(node)
    return found


def nodes_in_inference_mode(graph: ir.Graph) -> list[ir.Node]:
    """Return the nodes that normalise by statistics of the model.

    Raises:
        ModelError: one is in a subgraph.
    """
    return list(_nodes(graph))


def separate_statistics(store: Store, nodes: Iterable[ir.Node]) -> None:
    """Give each layer of some nodes in inference mode running statistics of its own.

    Exporters merge initializers that are equal, as those of layers that were not trained yet are. A layer that is
    called several times has one.

    Raises:
        ModelError: statistics are no initializers.
    """
    readers: dict[ir.Value, list[Reader]] = {}
    for node in nodes:
        for index in (_MEAN, _VARIANCE):
            value = node.inputs[index]
            if value is None or value.const_value is None or value.name not in store.graph.initializers:
                raise error_of(node, f"its input {index} is no initializer; expected one with train_batch_norm=True")
            readers.setdefault(value, []).append((node, index))
    for value, found in readers.items():
        for layer in store.layers(value, found)[1:]:
            copy = store.put(array_of(value), store.fresh(statistic_name(store, *layer[0])))
            for node, index in layer:
                node.replace_input_with(index, copy)


def use_batch_statistics(graph: ir.Graph, nodes: Iterable[ir.Node], tape: Tape, *, fuse: bool) -> dict[str, Tensor]:
    """Normalise by the mean and variance of the batch, which are computed ahead of each node.

    The nodes stay in inference mode: onnxruntime's kernel for training mode writes the new running statistics over the
    old ones, which are still read.

    Args:
        graph: the graph of a forward model.
        nodes: those of its nodes that do, in inference mode.
        tape: where nodes are written.
        fuse: whether the gradient of a node may be `aclnn::BatchNormBackward`.

    Returns:
        The name of each running statistic, and its new value, which is that of torch: the running variance is updated
        by the unbiased one, where ONNX takes the other.

    Raises:
        ModelError: the rank of a node's input is not known.
    """
    updated: dict[str, Tensor] = {}
    for node in nodes:
        begin = len(tape.nodes)
        x, value, old = tape.of(_given(node, 0)), _given(node, 0), [_given(node, k) for k in (_MEAN, _VARIANCE)]
        if value.shape is None:
            raise error_of(node, f"the rank of {value.name!r} is unknown; expected a model with shapes")
        rank = len(value.shape)
        others = [axis for axis in range(rank) if axis != 1]
        middle = mean(x, others)
        centred = x - middle
        spread = mean(centred * centred, others).reshape([-1])
        middle = middle.reshape([-1])
        count = x.op("Size").cast(x.dtype) / middle.op("Size").cast(x.dtype)
        unbiased = spread * (count / (count - 1).op("Max", 1.0))
        found = node.attributes.get("momentum")
        momentum = 0.9 if found is None else found.as_float()
        for statistic, batch in zip(old, (middle, unbiased), strict=True):
            # A layer that is called again goes on from what it has.
            kept = updated.get(str(statistic.name), tape.of(statistic))
            updated[str(statistic.name)] = kept * momentum + batch.cast(kept.dtype) * (1 - momentum)
        for index, batch in zip((_MEAN, _VARIANCE), (middle, spread), strict=True):
            node.replace_input_with(index, batch.cast(tape.of(_given(node, index)).dtype).value)
        types = {_given(node, index).dtype for index in range(len(node.inputs))}
        if fuse and len(types) == 1 and 2 <= rank <= MAX_RANK:
            node.meta[BY_BATCH] = True
        graph.insert_before(node, tape.nodes[begin:])
    tape.nodes.clear()
    return updated


def _given(node: ir.Node, index: int) -> ir.Value:
    value = node.inputs[index]
    assert value is not None
    return value


def _nodes(graph: ir.Graph) -> Iterator[ir.Node]:
    for node in graph.all_nodes():
        mode = node.attributes.get("training_mode")
        if node.op_type != "BatchNormalization" or node.domain or (mode is not None and mode.as_int()):
            continue
        if node.graph is not graph:
            raise error_of(node, "is in a subgraph; expected none with train_batch_norm=True")
        yield node
