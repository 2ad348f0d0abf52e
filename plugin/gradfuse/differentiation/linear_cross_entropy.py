"""The head of a classifier, a linear layer whose results a cross entropy alone reads, by one operator.

It takes the place of the loss ahead of the gradients, so that no tensor of rows times classes is left.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from gradfuse.custom_ops import DOMAIN
from gradfuse.custom_ops.operator import NOTHING_IGNORED
from gradfuse.differentiation.dependence import depending
from gradfuse.differentiation.rules import FLOATS, Call, Gradient, constant_of, gradient
from gradfuse.differentiation.tensors import Tape, Tensor
from gradfuse.passes.reading import attribute

OPERATOR = "LinearCrossEntropy"

FEWEST_CLASSES, FEWEST_ROWS = 4096, 128
"""From which numbers on the operator is faster than products and a softmax, or saves memory for as much time."""

FEWEST_LOGITS = 2**25
"""From which number on their tensor is larger than what the operator takes for itself, 32 to 128 MiB."""
_ASSUMED_ROWS = 512
_ROWS_BY_FEATURE = 2
_OUTPUTS = 5
_LOSS, _GRADIENTS, _LOGSUMEXP = 0, (1, 2, 3), 4
_OF_INPUTS = {0: 1, 1: 2, 3: 3}
"""The output that is the gradient of an input, by the input's index."""
_GRAD_LOSS, _GRAD_LOGSUMEXP = 5, 6
_ROUNDING = 1e-6
_NEARBY = 16  # values that a target is computed of
_PRODUCTS = ("MatMul", "Einsum")
_LOSSES = ("SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss")
LOG_SUMS = {("", "ReduceLogSumExp")}
"""Domains and names of the operators that give the logarithm of a sum of exponentials."""
_VIEWS = ("Reshape", "Slice", "Identity", "Flatten", "Squeeze", "Unsqueeze")


@gradient(OPERATOR, domain=DOMAIN, limits="its loss and logsumexp", fixed=(4, _GRAD_LOSS, _GRAD_LOGSUMEXP))
def linear_cross_entropy(call: Call) -> Iterator[Gradient]:
    of_loss, of_logsumexp = (call.dy[index] for index in (_LOSS, _LOGSUMEXP))
    if any(call.dy[k] is not None for k in _GRADIENTS):
        raise call.error("a gradient is taken of its gradients; expected of its loss and logsumexp alone")
    mask = [0] * _OUTPUTS
    for index, output in _OF_INPUTS.items():
        mask[output] = int(index in call.needed)
    given = [call.input(index) for index in range(_GRAD_LOSS)]
    if of_loss is None:
        loss = call.y[_LOSS]
        assert loss is not None
        of_loss = loss.zeros()
    given += [of_loss] if of_logsumexp is None else [of_loss, of_logsumexp]
    options = {name: call.attribute(name) for name in ("reduction", "ignore_index", "label_smoothing", "softcap")}
    found = call.tape.parts(OPERATOR, _OUTPUTS, *given, domain=DOMAIN, **options, output_mask=mask)
    for index in range(4):
        yield found[_OF_INPUTS[index]] if index in call.needed else None


def fuse_heads(
    graph: ir.Graph,
    prefix: str,
    opset: int,
    wrt: Collection[ir.Value],
    kept: Collection[ir.Value],
    sizes: Mapping[str, int],
) -> bool:
    """Put `aclnn::LinearCrossEntropy` in the place of losses of linear layers with many classes; return if it did.

    Found are `SoftmaxCrossEntropyLoss`, `NegativeLogLikelihoodLoss` of a `LogSoftmax`, its decomposition by PyTorch,
    and log-probabilities that `GatherElements` picks. They are behind `MatMul`, `Gemm` or `Einsum`, with views, wider
    types, a factor and a cap on the logits in between. Logarithms of sums of exponentials over the classes, as of a
    z-loss, may read the logits too.

    Args:
        graph: the graph, with types and shapes.
        prefix: what the names of new nodes begin with; nothing else in the graph begins with it.
        opset: the version of the default domain.
        wrt: what gradients will be taken by.
        kept: the values that will be read by something else than the graph's nodes.
        sizes: what named dimensions are taken to be where that decides what is faster.
    """
    learning: set[ir.Value] | None = None
    found = False
    _write_log_softmaxes(graph, prefix, opset, kept)
    for number, node in enumerate(list(graph)):
        if node.domain or node.op_type not in ("LogSoftmax", *_LOSSES):
            continue
        head = _Reader(kept).head(node)
        if head is None or not head.pays(sizes):
            continue
        if learning is None:
            learning = depending(list(graph), wrt)[0]
        if head.loss.weight in learning:
            continue
        tape = Tape(f"{prefix}{number}/", opset)
        results = head.written(tape)
        last = head.loss.value.producer()
        assert last is not None
        graph.insert_before(last, tape.nodes)
        for one, result in zip((last, *head.log_sums), results, strict=True):
            _become(one, result.value)
        if head.log_sums:
            graph.sort()
        found = True
    return found


def join_heads(graph: ir.Graph) -> None:
    """Let one node give a head's loss and gradients, where the gradient of the loss does not follow from the loss."""
    nodes = list(graph)
    position = {node: index for index, node in enumerate(nodes)}
    for backward in nodes:
        if not _is_head(backward) or _mask(backward)[_LOSS]:
            continue
        forward = next(
            (n for n in nodes[: position[backward]] if _is_head(n) and _is_forward(n) and _same(n, backward)), None
        )
        grad_loss = backward.inputs[_GRAD_LOSS]
        # What depends on the logsumexp comes behind it.
        if forward is None or grad_loss is None or _mask(forward)[_LOGSUMEXP]:
            continue
        for node in _behind(grad_loss, position, position[forward]):
            _read_size_of_target(node, forward)
        between = _behind(grad_loss, position, position[forward])
        if forward in between:
            continue
        loss, joined = forward.outputs[_LOSS], backward.outputs[_LOSS]
        joined.type, joined.shape = loss.type, loss.shape
        backward.attributes["output_mask"] = ir.AttrInt64s("output_mask", [1, *_mask(backward)[1:]])
        moved = [node for node in nodes if node in between] + [backward]
        graph.remove(moved)
        graph.insert_before(forward, moved)
        name, loss.name = loss.name, None
        ir.convenience.replace_all_uses_with(loss, joined, replace_graph_outputs=True)
        joined.name = name
        graph.remove(forward, safe=True)


def _write_log_softmaxes(graph: ir.Graph, prefix: str, opset: int, kept: Collection[ir.Value]) -> None:
    """Write logarithms of probabilities by hand, and losses that are logarithms of sums less a logit, by `LogSoftmax`.

    Only where the logits are read by nothing else, and have so many classes that a head may be found.
    """
    for number, node in enumerate(list(graph)):
        logits = node.inputs[0] if node.inputs else None
        if node.domain or node.op_type not in ("Sub", "GatherElements") or logits is None or logits in kept:
            continue
        dims, sums = _dims(logits), _log_sums(logits)
        if not dims or not isinstance(dims[-1], int) or dims[-1] < FEWEST_CLASSES or logits is node.inputs[1]:
            continue
        of_rows = next((one.outputs[0] for one in sums if _dims(one.outputs[0]) == (*dims[:-1], 1)), None)
        if of_rows is None or {use.node for use in logits.uses()} != {node, *sums}:
            continue
        if node.op_type == "Sub" and node.inputs[1] is of_rows:
            node.op_type = "LogSoftmax"
            node.attributes["axis"] = ir.AttrInt64("axis", len(dims) - 1)
            node.resize_inputs(1)
        elif node.op_type == "GatherElements" and attribute(node, "axis", 0) % len(dims) == len(dims) - 1:
            index = node.inputs[1]
            assert index is not None
            tape = Tape(f"{prefix}logits{number}/", opset)
            log_prob = tape.of(logits).op("LogSoftmax", axis=len(dims) - 1)
            log_prob.value.shape = logits.shape
            picked = log_prob.op("GatherElements", tape.of(index), axis=len(dims) - 1)
            picked.value.shape = node.outputs[0].shape
            result = picked + tape.of(of_rows)
            graph.insert_before(node, tape.nodes)
            _become(node, result.value)
            # The sums may be behind it.
            graph.sort()


def _become(node: ir.Node, result: ir.Value) -> None:
    """Let a node give a value: its own stays, as others may know it."""
    node.domain, node.op_type = "", "Identity"
    node.attributes.clear()
    node.resize_inputs(1)
    node.replace_input_with(0, result)


def _is_head(node: ir.Node) -> bool:
    return node.op_type == OPERATOR and node.domain == DOMAIN


def _mask(node: ir.Node) -> list[int]:
    return list(attribute(node, "output_mask", [1, 1, 1, 1, 0]))


def _is_forward(node: ir.Node) -> bool:
    mask = _mask(node)
    return bool(mask[_LOSS]) and not any(mask[index] for index in _GRADIENTS)


def _same(forward: ir.Node, backward: ir.Node) -> bool:
    given = [*forward.inputs, *[None] * _GRAD_LOSS][:_GRAD_LOSS]
    return given == list(backward.inputs[:_GRAD_LOSS])


def _read_size_of_target(node: ir.Node, head: ir.Node) -> None:
    """Let what asks for the shape of losses of rows ask for that of the target: it needs no losses."""
    target = head.inputs[2]
    if node.op_type not in ("Shape", "Size") or node.domain or node.inputs[0] is None or target is None:
        return
    dims = _dims(node.inputs[0])
    if node.inputs[0] is head.outputs[_LOSS] and attribute(head, "reduction", "mean") == "none":
        node.replace_input_with(0, target)
    elif dims is not None and None not in dims:
        # The target may be a view of what was given.
        same = next((value for value in _made_of(target) if _dims(value) == dims), None)
        if same is not None:
            node.replace_input_with(0, same)


def _made_of(value: ir.Value) -> Iterator[ir.Value]:
    """Yield a target, and those nearby that it is computed of."""
    values = [value]
    for one in values:
        yield one
        node = one.producer()
        if node is not None and len(values) < _NEARBY:
            values += [source for source in node.inputs if source is not None]


def _behind(value: ir.Value, position: dict[ir.Node, int], first: int) -> set[ir.Node]:
    """Return the nodes from a position on that a value depends on."""
    found: set[ir.Node] = set()
    values = [value]
    while values:
        node = values.pop().producer()
        if node is None or node in found or position.get(node, -1) < first:
            continue
        found.add(node)
        values += [one for one in node.inputs if one is not None]
    return found


@dataclasses.dataclass(frozen=True)
class _Loss:
    """A loss that was found.

    Attributes:
        value: what it gives.
        logits: (*, C), where `logits_last`, else (N, C, *).
        target: the classes.
        weight: C weights of classes, in any shape, or None.
        reduction, ignore_index, label_smoothing: as of the operator.
        reduced: what is done to the losses of rows: nodes with one input that changes.
        views: what regroups rows behind the log-softmax, the last first.
        picked: whether `value` is the log-probabilities of the classes, the opposite of losses, and counts classes
            below 0 from the end.
    """

    value: ir.Value
    logits: ir.Value
    target: ir.Value
    weight: ir.Value | None
    reduction: str
    ignore_index: int
    label_smoothing: float = 0.0
    reduced: Sequence[ir.Node] = ()
    views: Sequence[ir.Node] = ()
    picked: bool = False


@dataclasses.dataclass(frozen=True)
class _Head:
    """A loss and the linear layer ahead of it.

    Attributes:
        loss: the loss.
        x, weight, bias: (*, H), (C, H) or (H, C), (C).
        turned: whether the weight is (H, C).
        views: what is between the results of the layer and the logits and regroups rows, in order.
        factor, softcap: what the results are multiplied with, and then capped by; 0: they are not.
        classes, features: C and H.
        log_sums: the nodes that give the logarithm of the sum of the exponentials of each row's logits.
    """

    loss: _Loss
    x: ir.Value
    weight: ir.Value
    bias: ir.Value | None
    turned: bool
    views: Sequence[ir.Node]
    factor: float
    softcap: float
    classes: int
    features: int
    log_sums: Sequence[ir.Node] = ()

    def pays(self, sizes: Mapping[str, int]) -> bool:
        """Whether the operator is worth it; a weight that must be copied for it has to be small beside the logits.

        Args:
            sizes: what named dimensions are taken to be.
        """
        dims = [sizes.get(dim) if isinstance(dim, str) else dim for dim in (_dims(self.loss.logits) or ())[:-1]]
        known = [dim for dim in dims if dim is not None]
        rows = math.prod(known) if len(known) == len(dims) else None
        if self.classes < FEWEST_CLASSES or (rows is not None and rows < FEWEST_ROWS):
            return False
        if self.classes * (_ASSUMED_ROWS if rows is None else rows) < FEWEST_LOGITS:
            return False
        copied = self.turned or self.weight.dtype != self.loss.logits.dtype
        return not copied or (_ASSUMED_ROWS if rows is None else rows) >= _ROWS_BY_FEATURE * self.features

    def written(self, tape: Tape) -> list[Tensor]:
        """Write the operator, and what reduces its losses; return the result, and those of `log_sums`."""
        loss, dtype = self.loss, self.loss.logits.dtype
        assert dtype is not None
        x = tape.of(self.x).cast(dtype)
        for view in self.views:
            if view.op_type == "Slice":
                x = x.op("Slice", *(None if one is None else tape.of(one) for one in view.inputs[1:]))
        dims = _dims(x.value)
        x = x if dims is not None and len(dims) == 2 else x.reshape([-1, self.features])
        weight, target = tape.of(self.weight).cast(dtype), tape.of(loss.target).cast(ir.DataType.INT64)
        if self.turned:
            weight = weight.transpose([1, 0])
        bias = None if self.bias is None else tape.of(self.bias).cast(dtype)
        if self.factor != 1.0:
            x = x * self.factor
            # The operator adds the bias behind the factor.
            bias = None if bias is None else bias * self.factor
        shape = _dims(loss.target)
        flat = target if shape is not None and len(shape) == 1 else target.reshape([-1])
        if loss.picked:
            flat = (flat < 0).where(flat + self.classes, flat)
        of_classes = None
        if loss.weight is not None:
            wide = ir.DataType.DOUBLE if x.dtype == ir.DataType.DOUBLE else ir.DataType.FLOAT
            of_classes = tape.of(loss.weight).cast(wide).reshape([-1])
        inputs: list[Tensor | None] = [x, weight, flat, bias, of_classes]
        while inputs[-1] is None:
            inputs.pop()
        options: dict[str, Any] = {"ignore_index": loss.ignore_index, "reduction": loss.reduction}
        if loss.label_smoothing:
            options["label_smoothing"] = loss.label_smoothing
        if self.softcap:
            options["softcap"] = self.softcap
        mask = [1, 0, 0, 0, int(bool(self.log_sums))]
        outputs = tape.parts(OPERATOR, _OUTPUTS, *inputs, domain=DOMAIN, **options, output_mask=mask)
        result = outputs[_LOSS]
        rows = (_dims(x.value) or (None,))[0]
        result.value.shape = ir.Shape([rows] if loss.reduction == "none" else [])
        if loss.reduction == "none" and flat is not target:
            result = result.reshape(target.shape())
        if loss.picked:
            result = -result
        for node in loss.reduced:
            others = [None if one is None else tape.of(one) for one in node.inputs[1:]]
            result = result.op(node.op_type, *others, **{k: a.value for k, a in node.attributes.items()})
            result.value.shape = node.outputs[0].shape
        results = [result]
        for node in self.log_sums:
            (given,) = node.outputs
            sums = outputs[_LOGSUMEXP]
            sums.value.shape = ir.Shape([rows])
            of_node = sums.reshape(self._shape(given, tape))
            of_node.value.shape = given.shape
            results.append(of_node)
        return results

    def _shape(self, sums: ir.Value, tape: Tape) -> list[int] | Tensor:
        """Return the shape of logarithms of sums: of the layer's input, without its features, or of known numbers."""
        dims = _dims(sums) or ()
        sizes = [dim if isinstance(dim, int) else -1 for dim in dims]
        if sizes.count(-1) <= 1:
            return sizes
        rows = _of_same_rows(self.x, dims)
        assert rows is not None
        shape = tape.of(rows).op("Shape", end=-1)
        return tape.concat([shape, tape.ints(1)]) if len(dims) == len(_dims(rows) or ()) else shape


class _Reader:
    """Reads losses and linear layers whose results nothing else reads."""

    def __init__(self, kept: Collection[ir.Value]) -> None:
        self._kept = kept

    def head(self, node: ir.Node) -> _Head | None:
        if node.op_type in _LOSSES:
            loss = self._of_operator(node)
        else:
            loss = self._decomposed(node) or self._gathered(node)
        return None if loss is None else self._linear(loss)

    def _only(self, value: ir.Value, *op_types: str) -> ir.Node | None:
        """Return the only node that reads a value, as its first input, if it is one of these operators."""
        uses = list(value.uses())
        if len(uses) != 1 or value in self._kept:
            return None
        node, index = uses[0].node, uses[0].idx
        return node if not node.domain and node.op_type in op_types and index == 0 else None

    def _only_of_logits(self, logits: ir.Value, op_type: str) -> ir.Node | None:
        """Return the only node that reads logits, as its first input, beside logarithms of sums."""
        readers = {use.node for use in logits.uses()}.difference(_log_sums(logits))
        if len(readers) != 1 or logits in self._kept:
            return None
        (node,) = readers
        places = [use.idx for use in logits.uses() if use.node is node]
        return node if not node.domain and node.op_type == op_type and places == [0] else None

    def _of_operator(self, node: ir.Node) -> _Loss | None:
        logits, target = node.inputs[:2]
        weight = node.inputs[2] if len(node.inputs) > 2 else None
        if any(output.uses() or output in self._kept for output in node.outputs[1:]):
            return None
        dims = None if logits is None else _dims(logits)
        if logits is None or target is None or dims is None:
            return None
        if len(dims) > 2:
            turned = self._classes_last(logits)
            if turned is None or self._only(logits, node.op_type) is None:
                return None
            logits = turned
        elif len(dims) != 2:
            return None
        if self._only_of_logits(logits, "Transpose" if len(dims) > 2 else node.op_type) is None:
            return None
        ignored = attribute(node, "ignore_index", NOTHING_IGNORED)
        loss = _Loss(node.outputs[0], logits, target, weight, attribute(node, "reduction", "mean"), ignored)
        return loss if node.op_type == _LOSSES[0] else self._ahead_of_log_softmax(loss)

    def _ahead_of_log_softmax(self, loss: _Loss) -> _Loss | None:
        """Return a loss whose logits are log-probabilities as one of what these are of."""
        views: list[ir.Node] = []
        value, classes = loss.logits, (_dims(loss.logits) or (None,))[-1]
        while (node := value.producer()) is not None and not node.domain and isinstance(classes, int):
            if value is not loss.logits and (len(list(value.uses())) != 1 or value in self._kept):
                return None
            source = node.inputs[0] if node.inputs else None
            rank = 0 if source is None or source.shape is None else len(source.shape)
            if source is None or self._only_of_logits(source, node.op_type) is None:
                return None
            if node.op_type == "LogSoftmax" and rank and attribute(node, "axis", -1) % rank == rank - 1:
                return dataclasses.replace(loss, logits=source, views=views)
            if node.op_type not in _VIEWS or not self._keeps_rows(node, classes):
                return None
            views.append(node)
            value = source
        return None

    def _gathered(self, node: ir.Node) -> _Loss | None:
        """Read log-probabilities along the last dimension of which one a row is picked, and nothing else is read."""
        logits, log_prob = node.inputs[0], node.outputs[0]
        dims = _dims(log_prob)
        if logits is None or not dims or attribute(node, "axis", -1) % len(dims) != len(dims) - 1:
            return None
        gather = self._only(log_prob, "GatherElements")
        if gather is None or self._only_of_logits(logits, "LogSoftmax") is None:
            return None
        index = gather.inputs[1]
        if index is None or attribute(gather, "axis", 0) % len(dims) != len(dims) - 1:
            return None
        # Of fewer rows than there are log-probabilities, the first ones of each dimension would be meant.
        if _dims(index) != (*dims[:-1], 1) or None in dims:
            return None
        return _Loss(gather.outputs[0], logits, index, None, "none", NOTHING_IGNORED, picked=True)

    @staticmethod
    def _classes_last(value: ir.Value) -> ir.Value | None:
        """Return the (N, *, C) of which a (N, C, *) is the transpose."""
        node, rank = value.producer(), len(_dims(value) or ())
        perm = [0, rank - 1, *range(1, rank - 1)]
        if node is None or node.domain or node.op_type != "Transpose" or list(attribute(node, "perm", [])) != perm:
            return None
        return node.inputs[0]

    def _decomposed(self, node: ir.Node) -> _Loss | None:
        """Read what PyTorch makes of a cross entropy: the losses of rows, and maybe their smoothing."""
        logits, log_prob = node.inputs[0], node.outputs[0]
        dims = _dims(log_prob)
        if logits is None or not dims or self._only_of_logits(logits, "LogSoftmax") is None:
            return None
        views: list[ir.Node] = []
        axis, classes = attribute(node, "axis", -1) % len(dims), dims[-1]
        if len(dims) > 2 and axis == len(dims) - 1 and isinstance(classes, int):
            view = self._only(log_prob, "Reshape")
            if view is None or log_prob in self._kept or not self._keeps_rows(view, classes):
                return None
            views, log_prob = [view], view.outputs[0]
            dims, axis = _dims(log_prob) or (), len(_dims(log_prob) or ()) - 1
        is_image = len(dims) > 2
        if is_image:
            turned = self._classes_last(logits)
            if turned is None or self._only_of_logits(turned, "Transpose") is None:
                return None
            logits = turned
            view = self._only(log_prob, "Reshape")
            # The loss of images is taken of (N, C, L) as well.
            if view is not None and _dims(view.outputs[0]) == (*dims[:2], 1, *dims[2:]) and len(dims) == 3:
                log_prob = view.outputs[0]
        if axis != 1 or len(dims) < 2:
            return None
        if log_prob in self._kept:
            return None
        readers: dict[str, tuple[ir.Node, ir.Value | None]] = {}
        for use in log_prob.uses():
            weighed = [(use.node, None)] if use.node.op_type != "Mul" else self._weighing(use.node, dims[1])
            for reader, weight in weighed:
                if reader.domain or reader.op_type in readers:
                    return None
                readers[reader.op_type] = reader, weight
        if not readers or readers.keys() not in ({"GatherElements"}, {"GatherElements", "ReduceSum"}):
            return None
        gather, weight = readers["GatherElements"]
        picked = self._picked(gather)
        if picked is None or (is_image and len(readers) > 1):
            return None
        losses, target, is_ignored, ignored = picked
        loss = _Loss(losses, logits, target, weight, "none", ignored, views=views)
        if len(readers) == 1:
            return loss
        total, of_all = readers["ReduceSum"]
        return self._smoothed(loss, total, is_ignored, dims[1]) if _are_equal(weight, of_all) else None

    def _weighing(self, node: ir.Node, classes: Any) -> list[tuple[ir.Node, ir.Value | None]]:
        """Return the nodes that read a product with weights of classes, and these; nothing of another product."""
        weight = node.inputs[1]
        if node.domain or not _is_row(weight, classes) or node.outputs[0] in self._kept:
            return [(node, None)]
        return [(use.node, weight) for use in node.outputs[0].uses()]

    def _picked(self, gather: ir.Node) -> tuple[ir.Value, ir.Value, ir.Value, int] | None:
        """Return the losses of rows, their classes, which of these are ignored and what stands for them."""
        index = gather.inputs[1]
        if attribute(gather, "axis", 0) != 1 or index is None:
            return None
        label = _source(index, "Unsqueeze")
        squeezed = self._only(gather.outputs[0], "Squeeze")
        negative = None if squeezed is None else self._only(squeezed.outputs[0], "Neg")
        chosen = None if label is None else label.producer()
        if negative is None or chosen is None or chosen.op_type != "Where" or chosen.domain:
            return None
        counted, target, other = chosen.inputs
        equal = None if counted is None else _source(counted, "Not")
        test = None if equal is None else equal.producer()
        if test is None or test.op_type != "Equal" or test.inputs[0] is not target or target is None:
            return None
        ignored = _number(test.inputs[1])
        uses = list(negative.outputs[0].uses())
        if len(uses) != 1 or ignored is None or _number(other) is None or negative.outputs[0] in self._kept:
            return None
        masked = uses[0].node
        if masked.op_type != "Where" or masked.inputs[0] is not counted or uses[0].idx != 1:
            return None
        dims = _dims(target)
        if _number(masked.inputs[2]) != 0 or not dims or equal is None or _dims(masked.outputs[0]) != dims:
            return None
        return masked.outputs[0], target, equal, int(ignored)

    def _smoothed(self, loss: _Loss, total: ir.Node, is_ignored: ir.Value, classes: Any) -> _Loss | None:
        """Read (1 - s) reduced losses + s / C reduced sums of all log-probabilities."""
        axes = None if len(total.inputs) < 2 or total.inputs[1] is None else constant_of(total.inputs[1])
        if axes is None or axes.tolist() not in ([1], [-1]) or attribute(total, "keepdims", 1):
            return None
        negative = self._only(total.outputs[0], "Neg")
        if negative is None or negative.outputs[0] in self._kept or not isinstance(classes, int):
            return None
        uses = list(negative.outputs[0].uses())
        if len(uses) != 1 or uses[0].node.op_type != "Where" or uses[0].idx != 2:
            return None
        masked = uses[0].node
        if masked.inputs[0] is not is_ignored or _number(masked.inputs[1]) != 0:
            return None
        (sharp, sharp_nodes), (smooth, smooth_nodes) = self._weighed(loss.value), self._weighed(masked.outputs[0])
        if sharp is None or smooth is None or len(sharp_nodes) != len(smooth_nodes):
            return None
        for one, other in zip(sharp_nodes[:-1], smooth_nodes[:-1], strict=True):
            if one.op_type != other.op_type or one.inputs[1:] != other.inputs[1:] or one.attributes != other.attributes:
                return None
        ends = [nodes[-1].outputs[0] for nodes in (sharp_nodes, smooth_nodes)]
        adding = self._only(ends[0], "Add") or self._only(ends[1], "Add")
        if adding is None or set(adding.inputs) != set(ends) or any(end in self._kept for end in ends):
            return None
        smoothing = float(f"{smooth * classes:.6g}")
        if abs(smoothing + sharp - 1) > _ROUNDING or not 0 <= smoothing <= 1:
            return None
        if not _fits(smoothing, loss.logits.dtype):
            return None
        return dataclasses.replace(
            loss, value=adding.outputs[0], label_smoothing=smoothing, reduced=tuple(sharp_nodes[:-1])
        )

    def _weighed(self, losses: ir.Value) -> tuple[float | None, list[ir.Node]]:
        """Return the number that losses are multiplied with, and the nodes from them to the product."""
        nodes: list[ir.Node] = []
        value = losses
        while (node := self._only(value, "ReduceSum", "ReduceMean", "Div", "Mul")) is not None and len(nodes) < 3:
            nodes.append(node)
            if node.op_type == "Mul":
                return _number(node.inputs[1]), nodes
            value = node.outputs[0]
        return None, nodes

    def _linear(self, loss: _Loss) -> _Head | None:
        dims = _dims(loss.logits)
        classes = None if dims is None else dims[-1]
        if not isinstance(classes, int) or loss.logits.dtype not in FLOATS:
            return None
        views = list(loss.views)
        factor, softcap, value = 1.0, 0.0, loss.logits
        log_sums: list[ir.Node] = []
        while (node := value.producer()) is not None and not node.domain:
            of_value = _log_sums(value)
            if value is not loss.logits and (len(list(value.uses())) - len(of_value) != 1 or value in self._kept):
                return None
            # The operator gives those of the logits of its rows alone.
            changed = factor != 1.0 or softcap or value.dtype != loss.logits.dtype
            if of_value and (changed or any(view.op_type == "Slice" for view in views)):
                return None
            log_sums += of_value
            if (read := self._layer(node, classes)) is not None:
                x, weight, bias, turned, features = read
                order = list(reversed(views))
                if not _slices_first(order):
                    # Rows are chosen along axes of the layer's input, which has them ahead of a view of it.
                    rows = _of_same_rows(x, (_dims(order[0].outputs[0]) or ())[:-1])
                    if order[0].op_type != "Reshape" or rows is None or not _slices_first(order[1:]):
                        return None
                    x, order = rows, order[1:]
                if any(one.outputs[0] in self._kept or not _fits_rows(one.outputs[0], x) for one in log_sums):
                    return None
                return _Head(loss, x, weight, bias, turned, order, factor, softcap, classes, features, log_sums)
            source = node.inputs[0] if node.inputs else None
            if node.op_type in _VIEWS and source is not None and self._keeps_rows(node, classes):
                views.append(node)
                value = source
            elif node.op_type == "Cast" and source is not None and _is_as_wide(node.outputs[0], source):
                value = source
            elif (scaled := _scaled(node)) is not None:
                number, source = scaled
                above = source.producer()
                if not softcap and above is not None and above.op_type == "Tanh" and not above.domain:
                    inner = None if above.inputs[0] is None else above.inputs[0].producer()
                    divided = None if inner is None else _scaled(inner)
                    own = list(source.uses()), list(above.inputs[0].uses()) if above.inputs[0] is not None else []
                    if factor != 1.0 or divided is None or abs(divided[0] * number - 1) > _ROUNDING:
                        return None
                    if any(len(uses) != 1 for uses in own) or source in self._kept or above.inputs[0] in self._kept:
                        return None
                    softcap, value = abs(number), divided[1]
                    if not _fits(softcap, loss.logits.dtype):
                        return None
                else:
                    factor, value = factor * number, source
            else:
                return None
        return None

    def _keeps_rows(self, node: ir.Node, classes: int) -> bool:
        source = node.inputs[0]
        before, after = None if source is None else _dims(source), _dims(node.outputs[0])
        if not before or not after or before[-1] != classes or after[-1] != classes:
            return False
        if node.op_type != "Slice":
            return True
        axes = constant_of(node.inputs[3]) if len(node.inputs) > 3 and node.inputs[3] is not None else None
        return axes is not None and all(axis % len(before) != len(before) - 1 for axis in axes.tolist())

    def _layer(self, node: ir.Node, classes: int) -> tuple[ir.Value, ir.Value, ir.Value | None, bool, int] | None:
        """Return input, weight, bias, whether the weight is (H, C), and H."""
        bias: ir.Value | None = None
        turned = True
        if node.op_type == "Add":
            products = [one.producer() if one is not None else None for one in node.inputs]
            index = next((k for k, one in enumerate(products) if one is not None and one.op_type in _PRODUCTS), None)
            if index is None or not _is_row(node.inputs[1 - index], classes, rank=1):
                return None
            bias, inner = node.inputs[1 - index], products[index]
            result = node.inputs[index]
            if inner is None or result is None or len(list(result.uses())) != 1 or result in self._kept:
                return None
            node = inner
        if node.op_type == "Gemm":
            if attribute(node, "alpha", 1.0) != 1.0 or attribute(node, "transA", 0):
                return None
            bias = node.inputs[2] if len(node.inputs) > 2 else None
            if bias is not None and (attribute(node, "beta", 1.0) != 1.0 or not _is_row(bias, classes, rank=1)):
                return None
            turned = not attribute(node, "transB", 0)
        elif node.op_type == "Einsum":
            order = _order_of_einsum(node)
            if order is None:
                return None
            turned = order
        elif node.op_type != "MatMul":
            return None
        x, weight = node.inputs[:2]
        above = None if weight is None else weight.producer()
        if turned and above is not None and above.op_type == "Transpose" and not above.domain:
            # Of a matrix it swaps the two axes, whatever it says.
            weight, turned = above.inputs[0], False
        dims = None if weight is None else _dims(weight)
        if x is None or weight is None or dims is None or len(dims) != 2:
            return None
        features = dims[0 if turned else 1]
        if dims[1 if turned else 0] != classes or not isinstance(features, int) or not features:
            return None
        return x, weight, bias, turned, features


def _log_sums(logits: ir.Value) -> list[ir.Node]:
    """Return the nodes that give the logarithm of the sum of exponentials over the last dimension alone."""
    rank = len(_dims(logits) or ())
    found = []
    for use in logits.uses():
        node = use.node
        if (node.domain, node.op_type) not in LOG_SUMS or use.idx:
            continue
        axes = attribute(node, "axes", None)
        if axes is None and len(node.inputs) > 1 and node.inputs[1] is not None:
            axes = constant_of(node.inputs[1])
        if axes is not None and [axis % rank for axis in list(axes)] == [rank - 1]:
            found.append(node)
    return found


def _fits_rows(sums: ir.Value, x: ir.Value) -> bool:
    """Whether a shape is known, but for one size, or is that of a layer's input without its features."""
    dims = _dims(sums)
    if dims is None or sum(not isinstance(dim, int) for dim in dims) <= 1:
        return dims is not None
    return _of_same_rows(x, dims) is not None


def _slices_first(views: Sequence[ir.Node]) -> bool:
    """Whether no view regroups rows ahead of a slice of them."""
    kinds = [view.op_type == "Slice" for view in views if view.op_type != "Identity"]
    return kinds == sorted(kinds, reverse=True)


def _of_same_rows(x: ir.Value, dims: tuple[int | str | None, ...]) -> ir.Value | None:
    """Return a layer's input, or what it is a view of, whose sizes but the last are `dims`, or these but a last 1."""
    value: ir.Value | None = x
    while value is not None and (given := _dims(value)) is not None and None not in given:
        if dims in (given[:-1], (*given[:-1], 1)):
            return value
        value = _source(value, "Reshape")
    return None


def _dims(value: ir.Value) -> tuple[int | str | None, ...] | None:
    return None if value.shape is None else tuple(d if isinstance(d, int) else d.value for d in value.shape)


def _source(value: ir.Value, op_type: str) -> ir.Value | None:
    """Return the first input of the node that gives a value, if it is this operator."""
    node = value.producer()
    return node.inputs[0] if node is not None and node.op_type == op_type and not node.domain else None


def _number(value: ir.Value | None) -> float | None:
    """Return the number that a value is, all of it; None of others."""
    array = None if value is None else constant_of(value)
    return None if array is None or array.size != 1 else float(np.asarray(array, np.float64).reshape(()))


def _fits(number: float, dtype: ir.DataType | None) -> bool:
    """Whether an attribute, which has float32's digits, has those of a number that tensors of a type need."""
    return dtype != ir.DataType.DOUBLE or float(np.float32(number)) == number


def _are_equal(one: ir.Value | None, other: ir.Value | None) -> bool:
    arrays = [None if value is None else constant_of(value) for value in (one, other)]
    return one is other or (arrays[0] is not None and arrays[1] is not None and np.array_equal(arrays[0], arrays[1]))


def _scaled(node: ir.Node) -> tuple[float, ir.Value] | None:
    """Return a finite factor other than 0 and what a node multiplies with it."""
    if node.domain or node.op_type not in ("Mul", "Div"):
        return None
    first, second = node.inputs
    number = _number(second)
    if node.op_type == "Mul" and number is None:
        first, number = second, _number(first)
    if first is None or not number or not math.isfinite(number):
        return None
    return (1 / number if node.op_type == "Div" else number), first


def _is_as_wide(value: ir.Value, source: ir.Value) -> bool:
    """Whether a value has all numbers of the floats that it is converted from."""
    own, before = value.dtype, source.dtype
    if own not in FLOATS or before not in FLOATS or own is None or before is None:
        return False
    return own == before or own.itemsize > before.itemsize


def _order_of_einsum(node: ir.Node) -> bool | None:
    """Return whether an `Einsum` is a product with a matrix (H, C), False for (C, H); None of another one."""
    given, _, result = attribute(node, "equation", "").replace(" ", "").partition("->")
    rows, _, matrix = given.partition(",")
    labels = rows.removeprefix("...")
    if len(node.inputs) != 2 or len(matrix) != 2 or not f"{labels}{matrix}".isalpha() or not labels:
        return None
    for turned, (summed, kept) in ((True, matrix), (False, matrix[::-1])):
        if labels[-1] == summed and result == rows[:-1] + kept and len({*labels, kept}) == len(labels) + 1:
            return turned
    return None


def _is_row(value: ir.Value | None, size: Any, rank: int = 2) -> bool:
    """Whether a value has an element for each of the last dimension's `size`, and at most `rank` dimensions."""
    dims = None if value is None else _dims(value)
    return bool(dims) and dims is not None and len(dims) <= rank and dims[-1] == size and {*dims[:-1]} <= {1}
