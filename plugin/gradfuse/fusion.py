"""`fuse` puts fused backward operators in the place of the subgraphs that compute them; `expand` takes them out."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from gradfuse import custom_ops
from gradfuse.checking.check import check as check_models
from gradfuse.custom_ops import functions
from gradfuse.errors import CheckError, ModelError
from gradfuse.models import reading
from gradfuse.models.conversion import inline_functions
from gradfuse.models.inlining import inline
from gradfuse.models.memory import collection_paused
from gradfuse.models.tensors import copy_model
from gradfuse.passes.matching import Policy
from gradfuse.passes.pipeline import default_pipeline
from gradfuse.passes.progress import Progress
from gradfuse.passes.report import Report

if TYPE_CHECKING:
    import onnx_ir as ir


VERSION_KEY = "gradfuse.version"
"""The key of a fused model's metadata that names the gradfuse which fused it."""


@dataclass(frozen=True)
class FuseResult:
    """What :func:`fuse` returns.

    Attributes:
        model: the fused model, of the kind that was given (a path gives a ModelProto).
        report: what was done.
    """

    model: Any
    report: Report


def fuse(
    model: Any,
    only: Collection[str] | None = None,
    skip: Collection[str] | None = None,
    policy: Policy = "profitable",
    check: int = 0,
    *,
    pointwise: bool = False,
    bodies: bool = True,
    progress: Progress | None = None,
) -> FuseResult:
    """Replaces decomposed backward subgraphs by fused operators of the domain `aclnn`.

    The result runs on the kernels if gradfuse's library is registered (:func:`gradfuse.register`). Otherwise it runs on
    standard operators, by the function bodies that it carries. The argument is not changed.

    Args:
        model: a path, an onnx.ModelProto, an onnx_ir.Model or a torch.onnx.ONNXProgram.
        only: names of the operators to fuse; all of them if None.
        skip: names of operators to leave alone.
        policy: "profitable" takes what is predicted to be faster, and never adds memory traffic; "all" takes every
            legal match.
        check: the number of runs on random inputs in which to compare the fused model with the original.
        pointwise: whether to fuse chains of elementwise nodes, too, in forward and backward pass: those that save at
            least a megabyte of memory traffic. Training steps of :func:`gradfuse.export_training_step` and
            :func:`gradfuse.build_training_step` have them fused.
        bodies: whether to attach the function bodies; without them the model needs the library.
        progress: called regularly with what is being done, how many nodes are done, and how many there are.

    Raises:
        ModelError: the model cannot be read.
        ArgumentError: an unknown operator or policy.
        CheckError: a run of the fused model differed from the original's beyond the bounds of :func:`gradfuse.check`.
    """
    with collection_paused():
        loaded = reading.load(model)
        fused, report = fuse_loaded(loaded, only, skip, policy, pointwise=pointwise, bodies=bodies, progress=progress)
        result = fused.restore(fused.ir)
    if check > 0 and report.fusions:
        outcome = check_models(model, result, runs=check)
        if not outcome.ok:
            raise CheckError(f"the fused model differs from the original: {outcome}", report=outcome)
    return FuseResult(result, report)


def fuse_loaded(
    loaded: reading.LoadedModel,
    only: Collection[str] | None = None,
    skip: Collection[str] | None = None,
    policy: Policy = "profitable",
    *,
    pointwise: bool = False,
    sizes: Mapping[str, int] | None = None,
    bodies: bool = True,
    progress: Progress | None = None,
) -> tuple[reading.LoadedModel, Report]:
    """:func:`fuse` on a model that has been loaded, which it may rewrite in place; `sizes`: of symbolic dimensions."""
    # A computation that is spread over functions, or in one whose tensors have no shapes, shows in the whole graph.
    whole = without_functions(loaded.ir)

    def run(model: ir.Model) -> Report:
        pipeline = default_pipeline(policy, only, skip, progress, pointwise=pointwise, sizes=sizes)
        pipeline(model)
        return pipeline.report

    fused, report = loaded.ir, run(loaded.ir)
    if whole is not None:
        inlined = run(whole)
        if is_better(inlined, report, loaded.ir):
            fused, report = whole, replace(inlined, before=report.before)
    if report.fusions or any(functions.aclnn_nodes(fused)):
        # Fused nodes that the model came with, as from gradfuse.onnx_translation_table, need bodies as well.
        fused.metadata_props[VERSION_KEY] = _version()
        if bodies:
            functions.attach(fused)
    elif loaded.older is not None:
        fused = loaded.older
    return replace(loaded, ir=fused), report


def is_better(inlined: Report, report: Report, model: ir.Model) -> bool:
    """Whether there is more gain without functions, or as much by more fusions; more fusions, if opsets differ."""
    count, other = len(inlined.fusions), len(report.fusions)
    holders: list[ir.Graph | ir.Function] = [model.graph, *model.functions.values()]
    if len({one.opset_imports.get("") for one in holders} - {None}) > 1:
        return count > other
    # What the policy "all" takes at a loss is no reason against it.
    gain, others = (sum(max(one.bytes_saved, 0) for one in r.fusions) for r in (inlined, report))
    return (gain, count) > (others, other)


def without_functions(model: ir.Model) -> ir.Model | None:
    """A copy of the model whose own functions are put in the place of their calls.

    None where it has none, or they cannot be put there.
    """
    if all(domain == custom_ops.DOMAIN for domain, *_ in model.functions):
        return None
    copy = copy_model(model)
    try:
        inline_functions(copy, lambda function: function.domain != custom_ops.DOMAIN)
    except ModelError:
        return None
    return copy


def expand(model: Any) -> Any:
    """Replaces fused operators by standard ones: the reverse of :func:`fuse`.

    Every node of the domain `aclnn` becomes the function body of its operator, whether the model carries bodies or not.
    A model without such nodes is returned as it is. The argument is not changed. :func:`fuse` recognizes the bodies,
    and fuses them again.

    Args:
        model: a path, an onnx.ModelProto, an onnx_ir.Model or a torch.onnx.ONNXProgram.

    Returns:
        The model, of the kind that was given (a path gives a ModelProto).

    Raises:
        ModelError: the model cannot be read.
        ArgumentError: a node has inputs or attributes that its operator does not accept.
    """
    loaded = reading.load(model)
    functions.attach(loaded.ir)
    results = {(node.graph, out.name): out for node in functions.aclnn_nodes(loaded.ir) for out in node.outputs}
    bodies = {key for key in loaded.ir.functions if key[0] == custom_ops.DOMAIN and key[1] in custom_ops.OPS}
    inline(loaded.ir, lambda function: function.identifier() in bodies)
    for graph in (*loaded.ir.graphs(), *(f.graph for f in loaded.ir.functions.values())):
        for value in (out for node in graph for out in node.outputs):
            if (old := results.get((graph, value.name))) is not None:
                # The new value comes from the body, and has the old one's name only.
                value.type, value.shape, value.doc_string = old.type, old.shape, old.doc_string
                value.metadata_props.update(old.metadata_props)
                value.meta.update(old.meta)
    functions.strip(loaded.ir)
    # The domain stays while it has nodes that are no operators of ours.
    if all(domain != custom_ops.DOMAIN for domain, *_ in loaded.ir.functions):
        holders: list[ir.Graph | ir.Function] = [loaded.ir.graph, *loaded.ir.functions.values()]
        for holder in holders:
            if all(node.domain != custom_ops.DOMAIN for node in functions.every_node(holder)):
                holder.opset_imports.pop(custom_ops.DOMAIN, None)
    loaded.ir.metadata_props.pop(VERSION_KEY, None)
    return loaded.restore(loaded.ir)


def _version() -> str:
    from gradfuse import __version__

    return __version__
