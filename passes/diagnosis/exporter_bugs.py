"""Known bugs of exporters and of onnxruntime, as far as the graph itself shows them.

There is one small function per bug; its docstring says what causes the bug. A function reports only what the graph
proves: if the graph may be meant as it is, it says nothing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np
import onnx
import onnx_ir as ir

from gradfuse import custom_ops
from gradfuse.passes.algebra import ONE, UNIT, Poly
from gradfuse.passes.matching import TOLERANCE, Context, ContextPass, Site, names_of
from gradfuse.passes.reading import Order, attribute, ort_training
from gradfuse.passes.report import ExporterBug

_LOSSES = {"NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss"}


@dataclass(frozen=True)
class Exported:
    """What a detector looks at: one graph after the rewriting, and its model."""

    model: ir.Model
    site: Site

    @property
    def versions(self) -> Mapping[str, int]:
        """The opsets that the graph's operators are of."""
        for function in self.model.functions.values():
            if function.graph is self.site.graph:
                return function.opset_imports
        return self.model.opset_imports


Detector = Callable[[Exported], Iterator[tuple[str, str]]]
DETECTORS: dict[str, Detector] = {}
"""By the name of the bug: the function that yields the node and the text of each place where the graph has it."""


def detects(bug: str) -> Callable[[Detector], Detector]:
    """Adds a function to the detectors."""

    def add(detector: Detector) -> Detector:
        DETECTORS[bug] = detector
        return detector

    return add


class FindExporterBugsPass(ContextPass):
    """Adds the exporter bugs that the model has to the warnings of the report, behind the passes that fuse."""

    def run(self, context: Context) -> bool:
        nodes: dict[tuple[str, str], list[str]] = {}
        for site in context.sites():
            for bug, detector in DETECTORS.items():
                for node, text in detector(Exported(context.model, site)):
                    nodes.setdefault((bug, text), []).append(node)
        for (bug, text), (node, *others) in nodes.items():
            more = f" (and at {len(others)} more nodes)" if others else ""
            context.report.warnings.append(ExporterBug(bug, node, text + more))
        return False


@detects("mean-without-divisor")
def _mean_without_divisor(exported: Exported) -> Iterator[tuple[str, str]]:
    """torch.onnx.export translates `aten.nll_loss_forward` with a total weight of 1, where its backward needs the sum
    of the weights. The gradient of a mean is then the gradient of the sum. The loss itself is right.

    The sign of it is a cross entropy gradient of a sum whose factor is what the output multiplies the mean loss by. If
    the user's own factor holds 1 / N, it differs from that. With one element, mean and sum are the same.
    """
    site = exported.site
    losses = [n for n in site.graph if n.domain == "" and n.op_type in _LOSSES and len(n.inputs) > 1]
    losses = [n for n in losses if attribute(n, "reduction", "mean") == "mean" and not _one_row(n)]
    if not losses:
        return
    for node in site.graph:
        if (node.domain, node.op_type) != (custom_ops.DOMAIN, "CrossEntropyLossGrad"):
            continue
        if attribute(node, "reduction", "mean") != "sum":
            continue
        gradient = site.forms.get(_behind_casts(site, node.inputs[0]))
        read = [_tensors(site, v) for v in node.inputs[1:3]]
        for loss in losses:
            if gradient is None or read != [_tensors(site, v) for v in loss.inputs[:2]]:
                continue
            tolerance = 8 * TOLERANCE.get(node.outputs[0].dtype or ir.DataType.FLOAT, 0.0)
            if any(gradient.poly.close_to(factor, tolerance) for factor in _factors(site, loss.outputs[0])):
                (name,) = names_of([loss])
                text = (
                    f"the loss is a mean, but its gradient ({node.name} when fused) has no divisor: every gradient is "
                    "too large by the number of rows (or the sum of their weights), a known bug of torch.onnx.export; "
                    "decompose before the export (core_aten_decompositions) or use gradfuse.export_training_step"
                )
                yield name, text
                break


def _one_row(loss: ir.Node) -> bool:
    """Whether the mean goes over one element, without a weight."""
    target = loss.inputs[1]
    weighted = len(loss.inputs) > 2 and loss.inputs[2] is not None
    return not weighted and target is not None and target.shape is not None and all(d == 1 for d in target.shape)


def _behind_casts(site: Site, value: ir.Value | None) -> ir.Value:
    """What a value that the rewriting made was made from, before changes of type and shape."""
    assert value is not None
    while value not in site.position and (node := value.producer()) is not None and node.inputs[0] is not None:
        value = node.inputs[0]
    return value


def _tensors(site: Site, value: ir.Value | None) -> frozenset[object] | None:
    form = None if value is None else site.forms.get(_behind_casts(site, value))
    return None if form is None else site.algebra.tensors(form.poly)


def _factors(site: Site, loss: ir.Value) -> Iterator[Poly]:
    """What the outputs of the graph multiply a loss by, if they add it to nothing but other losses."""
    own = site.forms.get(loss)
    if own is None or len(own.poly) != 1:
        return
    ((monomial, coefficient),) = own.poly.terms.items()
    for output in site.graph.outputs:
        form = site.forms.get(output)
        if output is loss:
            yield UNIT
        elif form is not None and not form.sizes:
            held = {m: c / coefficient for m, c in form.poly.terms.items() if set(monomial) <= set(m)}
            if held and monomial != ONE:
                yield site.algebra.divide_monomial(Poly(held), monomial)


@detects("loss-type")
def _loss_type(exported: Exported) -> Iterator[tuple[str, str]]:
    """torch.onnx.export writes ONNX's loss operators for scores in bfloat16 and for targets that are probabilities.
    They take neither: targets must be class indices."""
    for node in exported.site.graph:
        if node.domain or node.op_type not in _LOSSES or len(node.inputs) < 2:
            continue
        scores, target = (None if v is None else v.dtype for v in node.inputs[:2])
        (name,) = names_of([node])
        if target in TOLERANCE:
            yield name, f"{node.op_type} takes class indices, but its target is {_text(target)}: {_PROBABILITIES}"
        elif scores == ir.DataType.BFLOAT16:
            yield name, f"{node.op_type} does not take bfloat16: cast the scores to float32, or {_DECOMPOSE}"


_DECOMPOSE = "decompose before the export (exported_program.run_decompositions())"
_PROBABILITIES = "write the loss for probabilities as -(target * log_softmax(scores)).sum(), which exports"


@detects("dropped-label-smoothing")
def _dropped_label_smoothing(exported: Exported) -> Iterator[tuple[str, str]]:
    """torch.onnx.export leaves out the label smoothing of `aten.cross_entropy_loss`. The node's metadata has the call,
    with the smoothing."""
    for node in exported.site.graph:
        call = _CROSS_ENTROPY.search(str(node.metadata_props.get("pkg.torch.onnx.fx_node", "")))
        if node.domain or node.op_type not in _LOSSES or call is None:
            continue
        if float(call[1]):
            (name,) = names_of([node])
            text = f"the label smoothing of {call[1]} was lost in the export, a known bug of torch.onnx.export"
            yield name, f"{text}; {_DECOMPOSE}"


# The sixth argument of aten.cross_entropy_loss(self, target, weight, reduction, ignore_index, label_smoothing).
_CROSS_ENTROPY = re.compile(r"aten\.cross_entropy_loss\.default\]\(args = \((?:[^,()]+, ){5}([0-9.eE+-]+)\)")


@detects("lost-updates")
def _lost_updates(exported: Exported) -> Iterator[tuple[str, str]]:
    """onnxruntime's CPU kernel of ScatterND divides the index tuples among its threads and takes no lock. Of two
    updates of one element, one may get lost (its issues 18048 and 23396; seen in 1.18.1 and 1.31.1). This holds for
    every reduction and all types but float16 and bfloat16, which the kernel refuses. ScatterElements uses one
    thread."""
    order = Order(exported.site.forms)
    for node in exported.site.graph:
        if node.domain or node.op_type != "ScatterND" or attribute(node, "reduction", "none") == "none":
            continue
        data, indices, updates = node.inputs
        if indices is None or data is None or data.dtype in _WITHOUT_REDUCTION or _is_serial(exported.site, updates):
            continue
        if not order.names_apart(indices):
            (name,) = names_of([node])
            yield (
                name,
                (
                    "onnxruntime's CPU kernel of ScatterND loses updates where an index comes twice, once they have "
                    f"{_PARALLEL_UPDATES:,} elements and there is more than one thread (onnxruntime issues 18048 and "
                    "23396): write it as ScatterElements, as gradfuse.export_training_step does, or set "
                    "intra_op_num_threads to 1"
                ),
            )


_WITHOUT_REDUCTION = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
_PARALLEL_UPDATES = 210_000
"""From this number of elements on, onnxruntime's cost model uses a second thread."""


def _is_serial(site: Site, updates: ir.Value | None) -> bool:
    """Whether the updates of a ScatterND are known to be too few for a second thread."""
    form = None if updates is None else site.forms.get(updates)
    sizes = [None] if form is None else [size.integer for size in form.sizes]
    return math.prod(math.inf if n is None else n for n in sizes) < _PARALLEL_UPDATES


@detects("empty-graph")
def _empty_graph(exported: Exported) -> Iterator[tuple[str, str]]:
    """torch.onnx.export keeps only the outputs of an ExportedProgram that are labelled as the user's. It drops the loss
    and the gradients of a joint program, and with them all that computes them."""
    graph = exported.site.graph
    if graph is exported.model.graph and all(v.producer() is None for v in graph.outputs):
        outputs = "it has no outputs" if not graph.outputs else "no output depends on a node"
        yield (
            str(graph.name or "the graph"),
            (
                f"the graph computes nothing ({outputs}): torch.onnx.export drops loss and gradients of a joint "
                "program; label them as user outputs before the export, or use gradfuse.export_training_step"
            ),
        )


@detects("contradictory-shapes")
def _contradictory_shapes(exported: Exported) -> Iterator[tuple[str, str]]:
    """jax2onnx writes a product that contracts the first axis of its left operand as Gemm without transA. If both axes
    happen to have the same size, the result is wrong and nothing shows it."""
    for node in exported.site.graph:
        if node.domain or node.op_type not in ("Gemm", "MatMul") or len(node.inputs) < 2:
            continue
        shapes = [None if v is None or v.shape is None else list(v.shape) for v in node.inputs[:2]]
        if any(s is None or len(s) != 2 for s in shapes):
            continue
        a, b = (s for s in shapes if s is not None)
        if attribute(node, "transA", 0):
            a.reverse()
        if attribute(node, "transB", 0):
            b.reverse()
        if isinstance(a[1], int) and isinstance(b[0], int) and a[1] != b[0]:
            (name,) = names_of([node])
            text = f"{node.op_type} multiplies [{a[0]}, {a[1]}] by [{b[0]}, {b[1]}], which contradict each other"
            if a[0] == b[0]:
                text += "; it lacks a transposition of its first input, a known bug of jax2onnx: transpose it there"
            yield name, text


@detects("invalid-types")
def _invalid_types(exported: Exported) -> Iterator[tuple[str, str]]:
    """Exporters write nodes of half precision with an operand that stayed float32 (the bias of a Gemm by jax2onnx, the
    gradient of a loss by onnxruntime-training), operators with types that they do not take (Einsum with bfloat16), and
    float class indices (probability targets, differentiated by onnx-ad). No runtime loads such a node."""
    version = exported.versions.get("", 0)
    for node in exported.site.graph:
        bound: dict[str, ir.DataType] = {}
        formals = _formals(node.domain, node.op_type, version, len(node.inputs))
        for value, (name, parameter, accepted) in zip(node.inputs, formals, strict=False):
            dtype = value.type.dtype if value is not None and isinstance(value.type, ir.TensorType) else None
            if dtype in (None, ir.DataType.UNDEFINED):
                continue
            text = None
            if accepted and _onnx_name(dtype) not in accepted:
                text = f"{node.op_type} does not take {_text(dtype)} as {name}"
            elif bound.setdefault(parameter, dtype) != dtype:
                text = f"{node.op_type} has inputs of {_text(bound[parameter])} and {_text(dtype)}, not of one type"
            if text is not None:
                yield (
                    names_of([node])[0],
                    f"{text}; no runtime loads that: export in another type, or add a Cast",
                )
                break


@cache
def _onnx_name(dtype: ir.DataType) -> str:
    names = {ir.DataType.FLOAT: "float", ir.DataType.DOUBLE: "double"}
    return f"tensor({names.get(dtype, _text(dtype))})"


@cache
def _formals(domain: str, op_type: str, version: int, count: int) -> list[tuple[str, str, frozenset[str]]]:
    """Name, type parameter and accepted types of each input. Losses have a detector of their own."""
    if domain == ort_training.DOMAIN and op_type == "SoftmaxCrossEntropyLossGrad":
        return [("dY", "T", frozenset()), ("log_prob", "T", frozenset())]
    if domain or op_type in _LOSSES:
        return []
    try:
        schema = onnx.defs.get_schema(op_type, version, "")
    except onnx.defs.SchemaError:
        return []
    accepted = {c.type_param_str: frozenset(c.allowed_type_strs) for c in schema.type_constraints}
    formals = list(schema.inputs)
    if formals and formals[-1].option == onnx.defs.OpSchema.FormalParameterOption.Variadic:
        formals += formals[-1:] * (count - len(formals))
    return [
        (
            f.name,
            f.type_str if f.type_str in accepted and f.is_homogeneous else f"{f.name} {k}",
            accepted.get(f.type_str, frozenset([f.type_str])),
        )
        for k, f in enumerate(formals)
    ]


def _text(dtype: ir.DataType | None) -> str:
    return "unknown" if dtype is None else np.dtype(dtype.numpy()).name
