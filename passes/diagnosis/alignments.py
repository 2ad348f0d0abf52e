"""CTC losses that are written out: a recursion over time of the sums over all alignments, in log space or not."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import onnx_ir as ir

from gradfuse.passes.diagnosis.gradients import CONTRACTIONS, has_gradient
from gradfuse.passes.matching import TOLERANCE, Site, names_of
from gradfuse.passes.reading.nodes import constant_of
from gradfuse.passes.report import NearMiss

_SHIFTS = {"Pad", "Concat", "Slice", "Split", "Gather", "ScatterND", "ScatterElements"}
_LOG_SUMS = {"Log", "ReduceLogSumExp", "Softplus", "LogSoftmax"}
_SUMS = {"Add", "Sum"}
_STEPS = 3  # fewer sums of shifted results in a row are no recursion, if none is of what is shifted and what is not
_OF_PROBABILITIES = "of probabilities"
_CTC = (
    "as CTC has it: a CTC loss that is written out is not matched, as its backward depends on how it was written; "
    "put aclnn::CtcLoss and CtcLossBackward into the graph when it is exported"
)


@dataclass(frozen=True)
class _Chain:
    """What a value is made of, as far as it is the state of a recursion.

    Attributes:
        steps: the sums behind each other.
        shifted: whether the state was shifted since the last of them, and whether it was not: one of the two, or both.
        twofold: how many steps are sums of what was shifted and of what was not.
        starts: what was shifted ahead of the first of them.
    """

    steps: tuple[ir.Node, ...] = ()
    shifted: frozenset[bool] = frozenset({False})
    twofold: int = 0
    starts: frozenset[ir.Value] = frozenset()


def written_out(site: Site) -> Iterator[NearMiss]:
    """Recursions that are unrolled over time, or in a Loop or Scan: the forward of CTC, where its gradient is, too."""
    for chains, space in ((_sums_of_logarithms(site.graph), "in log space"), (_sums(site.graph), _OF_PROBABILITIES)):
        longest = max(chains.values(), key=lambda one: (len(one.steps), one.twofold), default=_Chain())
        # The first one may make probabilities of the scores.
        steps = longest.steps[1:] if longest.steps and longest.steps[0].op_type == "LogSoftmax" else longest.steps
        long_enough = len(steps) > _STEPS or (len(steps) == _STEPS and longest.twofold > 0)
        if long_enough and _is_loss(site, {v for node in steps for v in node.outputs}, space):
            *_, last = names = names_of(steps)
            reason = f"a recursion of {len(names)} steps {space}, {_CTC}"
            yield NearMiss(last, "CtcLossBackward", reason, nodes=names)
    for node in site.graph:
        bodies = [attr.as_graph() for attr in node.attributes.values() if attr.type == ir.AttributeType.GRAPH]
        for body in bodies if node.op_type in ("Loop", "Scan") else ():
            if _is_recursion_of_logarithms(body):
                yield NearMiss(names_of([node])[0], "CtcLossBackward", f"a {node.op_type} in log space, {_CTC}")
            elif _is_recursion_of_sums(body) and _is_loss(site, set(node.outputs), _OF_PROBABILITIES):
                yield NearMiss(names_of([node])[0], "CtcLossBackward", f"a {node.op_type} {_OF_PROBABILITIES}, {_CTC}")


def _is_loss(site: Site, values: set[ir.Value], space: str) -> bool:
    """Whether the gradient of something depends on the values, and a logarithm or a quotient of probabilities does."""
    if space == _OF_PROBABILITIES:
        later = set(values)
        for node in site.graph:
            if any(v in later for v in node.inputs):
                if node.op_type in ("Log", "Div"):
                    break
                later.update(node.outputs)
        else:
            return False
    return has_gradient(site, values)


def _joined(chains: Iterable[_Chain]) -> _Chain:
    """The longest of some chains, with what was shifted in any of those of its length."""
    known = list(chains)
    longest = max(known, key=lambda one: (len(one.steps), True in one.shifted, one.twofold), default=_Chain())
    same = [one for one in known if len(one.steps) == len(longest.steps)]
    shifted, starts = (frozenset[Any]().union(*(getattr(one, name) for one in same)) for name in ("shifted", "starts"))
    return replace(longest, shifted=shifted or longest.shifted, starts=starts)


def _is_shift(node: ir.Node) -> bool:
    """Whether a node may move states by some places, as a product with a constant matrix does as well."""
    if node.op_type in _SHIFTS:
        return True
    return node.op_type == "MatMul" and any(v is not None and constant_of(v) is not None for v in node.inputs)


def _sums_of_logarithms(graph: ir.Graph) -> dict[ir.Value, _Chain]:
    """The chains of sums of exponentials of shifted logarithms."""
    chains: dict[ir.Value, _Chain] = {}
    for node in graph:
        known = [chains[v] for v in node.inputs if v is not None and v in chains]
        one = _joined(known)
        if node.op_type in CONTRACTIONS and not _is_shift(node):
            continue
        if node.op_type in _LOG_SUMS and (True in one.shifted or not one.steps):
            one = _Chain((*one.steps, node), frozenset({False}), one.twofold + (len(one.shifted) > 1))
        elif _is_shift(node):
            one = replace(one, shifted=frozenset({True}))
        if one.steps:
            chains.update(dict.fromkeys(node.outputs, one))
    return chains


def _sums(graph: ir.Graph) -> dict[ir.Value, _Chain]:
    """The chains of sums of what is shifted and what is not, each of which is multiplied with something."""
    chains: dict[ir.Value, _Chain] = {}
    for node in graph:
        inputs = [v for v in node.inputs if v is not None]
        known = [chains[v] for v in inputs if v in chains]
        if node.op_type in CONTRACTIONS and not _is_shift(node):
            continue
        one = _joined(known)
        if _is_shift(node):
            moved = frozenset(() if one.steps else inputs)
            one = replace(one, shifted=frozenset({True}), starts=one.starts | moved)
        elif not known:
            continue
        elif not one.steps and any(v in k.starts for k in known for v in inputs):
            one = replace(one, shifted=frozenset({False, True}))
        elif node.op_type == "Mul" and len(one.shifted) > 1:
            one = _Chain((*one.steps, node), frozenset({False}), one.twofold + 1, one.starts)
        if len(one.shifted) > 1 and node.op_type not in _SUMS | {"Identity", "Cast", "Unsqueeze", "Squeeze", "Reshape"}:
            continue
        chains.update(dict.fromkeys(node.outputs, one))
    return chains


def _is_recursion_of_logarithms(body: ir.Graph) -> bool:
    """Whether the body of a Loop or Scan gives a state as the sum of exponentials of shifted states."""
    state = {v: False for v in body.inputs if v.dtype in TOLERANCE}
    summed: set[ir.Value] = set()
    for node in body:
        known = [v for v in node.inputs if v is not None and v in state]
        is_sum = node.op_type in _LOG_SUMS and any(state[v] for v in known)
        if known:
            shifted = any(state[v] for v in known) or _is_shift(node)
            state.update(dict.fromkeys(node.outputs, shifted))
        if is_sum or any(v in summed for v in node.inputs):
            summed.update(node.outputs)
    return any(v in summed for v in body.outputs)


def _is_recursion_of_sums(body: ir.Graph) -> bool:
    """Whether the body of a Loop or Scan gives a state as a multiple of the sum of a state and of what was shifted."""
    chains = _sums(body)
    found = [chains[v] for v in body.outputs if v in chains]
    return any(one.steps and not one.starts.isdisjoint(body.inputs) for one in found)
