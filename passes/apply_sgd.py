"""ApplySgd: the update of a parameter and its momentum by SGD."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir

from gradfuse.passes.algebra import ZERO
from gradfuse.passes.matching import Builder, Mismatch, Rewrite, Site
from gradfuse.passes.matching.optimizer_pass import OptimizerPass, single
from gradfuse.passes.matching.terms import Factors, Terms, TooLong, constant, is_single, plain, product, terms_of
from gradfuse.passes.matching.updates import (
    Rate,
    behind,
    computed_rates,
    regularized,
    require_types,
    results_of,
    single_number,
    uncast,
    unscaled,
    without_numbers,
)

_SUMS = ("Add", "Sub", "Sum")
_TERMS = 6  # of an update, among which the parameter is looked for
_NODES_OF_MOMENTUM = 4  # from a momentum to the next
_NEAR_BUFFER = 12  # nodes behind a root among which the momentum is looked for
_ROUNDING = 2.0**-22
_DECAYED = "it shrinks the parameter beside its step, and the operator's weight decay is part of the gradient"


class FuseApplySgdPass(OptimizerPass):
    """Finds P = p - lr d for a p that is given to the graph, where d is

    1. a momentum B = mu b + g, for a b that is given to the graph and a constant mu;
    2. with the same B, g + mu B: Nesterov's;
    3. g, where P is a result of the graph.

    Or, as Keras writes it, P = p + V with a velocity V = mu v - lr g, or p + mu V - lr g. The operator has these with a
    learning rate of -1 and lr in the scale of the gradient.

    lr is a product of single numbers, which nodes may compute. p, b, g are of P's shape and type, and what is in
    between of float32. g may be another gradient plus a multiple of p, and that be multiplied by single numbers. P and
    B are replaced together.

    SGDOptimizerV2 of onnxruntime-training is the same for each of its parameters, without a momentum.
    """

    operator = "ApplySgd"
    optimizer = "SGDOptimizerV2"
    sequences = (1, 2)
    signal = 3
    flagged = 0
    linear = False

    def propose(self, site: Site, builder: Builder, root: ir.Value) -> Rewrite | None:
        with contextlib.suppress(TooLong):
            for parameter in _parameters(site, root):
                found = _with_momentum(site, root, parameter) or _without_momentum(site, root, parameter)
                if found is not None:
                    return _bound(site, builder, root, found)
        return None

    def _require(self, node: ir.Node) -> None:
        """It has no options."""

    def _numbers(self, site: Site, builder: Builder, node: ir.Node) -> list[ir.Value]:
        return [single(site, builder, node.inputs[0], "rate")]

    def _updated(self, site: Site, builder: Builder, node: ir.Node, inputs: Sequence[ir.Value]) -> tuple[ir.Value, ...]:
        sizes = [site.extents(inputs[0]), [ZERO]]
        return builder.fused_whole(self.operator, inputs, sizes, momentum=0.0, weight_decay=0.0, nesterov=0)


@dataclass(frozen=True)
class _Momentum:
    """The new momentum: the factor times what it was, plus the gradient times the sign."""

    value: ir.Value
    before: ir.Value
    factor: float
    gradient: ir.Value
    sign: int = 1


@dataclass(frozen=True)
class _Update:
    """`is_velocity`: the momentum is what is added to the parameter."""

    parameter: ir.Value
    gradient: ir.Value
    rate: Rate
    momentum: _Momentum | None
    nesterov: bool
    is_velocity: bool = False


def _is_given(value: ir.Value) -> bool:
    return value.is_graph_input() or value.is_initializer()


def _parameters(site: Site, root: ir.Value) -> list[ir.Value]:
    """What a sum may be the update of: its terms that are given to the graph."""
    node = uncast(root).producer()
    if node is None or node.domain or node.op_type not in _SUMS:
        return []
    # What is given to the body of a loop changes from iteration to iteration.
    if not site.is_main or not site.knows(root):
        return []
    terms = [plain(site, value) for value in node.inputs if value is not None]
    for term in terms:
        above = term.producer()
        if above is not None and not above.domain and above.op_type in _SUMS and len(terms) < _TERMS:
            terms += [plain(site, value) for value in above.inputs if value is not None]
    terms += [without_numbers(site, value) for value in terms]
    return [v for v in dict.fromkeys(terms) if _is_given(v) and site.knows(v) and site.extents(v) == site.extents(root)]


def _given_in(site: Site, root: ir.Value, parameter: ir.Value) -> Iterator[ir.Value]:
    """What is given to the graph, beside the parameter, of that an update is made as a sum of products."""
    with contextlib.suppress(TooLong):
        terms = terms_of(site, uncast(root), [parameter])
        keys = dict.fromkeys(key for factors in terms for key, _ in factors)
        yield from (key for key in keys if isinstance(key, ir.Value) and _is_given(key) and key is not parameter)


def _results_of(site: Site, state: ir.Value, root: ir.Value) -> list[ir.Value]:
    """Results of the graph that a few nodes compute of a state, as a new momentum is."""
    if not site.knows(state) or site.extents(state) != site.extents(root):
        return []
    found, near = dict[ir.Value, None](), dict.fromkeys([state])
    for _ in range(_NODES_OF_MOMENTUM):
        near = dict.fromkeys(value for one in near for use in one.uses() for value in use.node.outputs)
        found.update((value, None) for value in near if value.is_graph_output() and site.is_ahead(value, root))
    return [value for value in found if site.knows(value) and site.extents(value) == site.extents(root)]


def _with_momentum(site: Site, root: ir.Value, parameter: ir.Value) -> _Update | None:
    # The momentum itself, where it is distributed in the update.
    outside = [value for state in _given_in(site, root, parameter) for value in _results_of(site, state, root)]
    rates = computed_rates(site, root, _NEAR_BUFFER, lambda value: value is parameter)
    for candidate in dict.fromkeys((*behind(site, root, _NEAR_BUFFER), *outside)):
        value = plain(site, candidate)
        for momentum in _momenta(site, value):
            if momentum.before is parameter or value is uncast(root):
                continue
            gradient = momentum.gradient
            steps = dict(terms_of(site, uncast(root), [parameter, value, gradient, *rates]))
            kept = steps.pop(frozenset([(parameter, 1.0)]), 0.0)
            steps = _along(momentum, steps)
            others = [factors for factors in steps if (parameter, 1.0) not in factors]
            if kept != 1.0 or len(others) < len(steps):
                if 0 < kept <= 1 and len(others) == 1 and (value, 1.0) in others[0]:
                    raise Mismatch(_DECAYED)
                continue
            if (found := _along_velocity(parameter, momentum, steps)) is not None:
                return found
            if momentum.sign < 0:
                continue
            along_each = {
                key: _rate(site, factors, number, key)
                for factors, number in steps.items()
                for key in (value, gradient)
                if (key, 1.0) in factors
            }
            if len(along_each) != len(steps) or value not in along_each:
                continue
            along = along_each[value]
            if len(along_each) == 1:
                return _Update(parameter, gradient, along, momentum, nesterov=False)
            ahead = along_each[gradient]
            off = abs(along.number - ahead.number * momentum.factor)
            if along.factors != ahead.factors or off > _ROUNDING * along.number:
                raise Mismatch("its step along the momentum is not that of Nesterov's")
            return _Update(parameter, gradient, ahead, momentum, nesterov=True)
    return None


def _along(momentum: _Momentum, steps: Terms) -> dict[Factors, float]:
    """Steps along the momentum, where the graph has them along what it was and the gradient."""
    result = dict(steps)
    for factors, number in steps.items():
        if (momentum.before, 1.0) in factors:
            rate, along = product(factors, frozenset([(momentum.before, -1.0)])), number / momentum.factor
            del result[factors]
            for key, more in ((momentum.value, along), (momentum.gradient, -along * momentum.sign)):
                own = product(rate, frozenset([(key, 1.0)]))
                result[own] = total = result.get(own, 0.0) + more
                if abs(total) <= _ROUNDING * abs(along):
                    del result[own]
    return result


def _along_velocity(parameter: ir.Value, momentum: _Momentum, steps: Terms) -> _Update | None:
    """The update whose steps are the momentum itself, or Nesterov's of it."""
    own, gradient = frozenset([(momentum.value, 1.0)]), frozenset([(momentum.gradient, 1.0)])
    rate = Rate(frozenset(), -1.0)
    if steps == {own: 1.0}:
        return _Update(parameter, momentum.gradient, rate, momentum, nesterov=False, is_velocity=True)
    if steps.keys() != {own, gradient} or steps[gradient] != momentum.sign:
        return None
    if abs(steps[own] - momentum.factor) > _ROUNDING:
        return None
    return _Update(parameter, momentum.gradient, rate, momentum, nesterov=True, is_velocity=True)


def _momenta(site: Site, value: ir.Value) -> list[_Momentum]:
    """A value as a momentum, in each way to read it as one."""
    node = value.producer()
    is_turned = node is not None and node.op_type == "Neg" and not node.domain
    if node is not None and is_turned and node.inputs[0] is not None:
        # The negative of a difference is the difference with swapped operands.
        node = plain(site, node.inputs[0]).producer()
    kinds = ("Sub",) if is_turned else ("Add", "Sum", "Sub")
    if node is None or node.domain or node.op_type not in kinds or len(node.inputs) != 2:
        return []
    found = []
    is_difference = node.op_type == "Sub"
    orders = [node.inputs[:: -1 if is_turned else 1]] if is_difference else [node.inputs, node.inputs[::-1]]
    for kept, other in orders:
        if kept is None or other is None:
            continue
        terms = terms_of(site, kept, [])
        if len(terms) != 1:
            continue
        ((factors, number),) = terms.items()
        if len(factors) == 1 and 0 < number < 1:
            ((before, exponent),) = factors
            if isinstance(before, ir.Value) and exponent == 1.0 and _is_given(before):
                found.append(_Momentum(value, before, number, plain(site, other), -1 if is_difference else 1))
    return found


def _without_momentum(site: Site, root: ir.Value, parameter: ir.Value) -> _Update | None:
    if not any(value.is_graph_output() for value in _results(root)):
        return None
    node = uncast(root).producer()
    assert node is not None
    others = [value for value in node.inputs if value is not None and plain(site, value) is not parameter]
    if len(others) != 1 or len(node.inputs) != 2:
        return None
    # What the gradient is divided by is its scale; a learning rate is a factor.
    gradient = without_numbers(site, others[0], ["Mul"])
    rates = computed_rates(site, root, _NEAR_BUFFER, lambda value: value is parameter)
    steps = dict(terms_of(site, uncast(root), [parameter, gradient, *rates]))
    if gradient is parameter or steps.pop(frozenset([(parameter, 1.0)]), 0.0) != 1.0 or len(steps) != 1:
        return None
    ((factors, number),) = steps.items()
    if (gradient, 1.0) not in factors or constant(site, gradient) is not None:
        return None
    try:
        rate = _rate(site, factors, number, gradient)
    except Mismatch:
        # An ordinary sum.
        return None
    return _Update(parameter, gradient, rate, None, nesterov=False) if rate.factors or rate.number != 1 else None


def _results(root: ir.Value) -> list[ir.Value]:
    """The root, and nodes that select between it and something else."""
    nodes = [use.node for use in root.uses()]
    return [root, *(n.outputs[0] for n in nodes if n.op_type in ("Where", "Identity", "Cast") and not n.domain)]


def _rate(site: Site, factors: Factors, number: float, direction: ir.Value) -> Rate:
    """The step size along a direction.

    Raises:
        Mismatch: it is not a product of single numbers, or ascends.
    """
    rate = product(factors, frozenset([(direction, -1.0)]))
    if number >= 0 or not all(isinstance(key, ir.Value) and e == 1.0 and is_single(site, key) for key, e in rate):
        raise Mismatch("its step is not the gradient or momentum times a learning rate")
    return Rate(rate, -number)


def _bound(site: Site, builder: Builder, root: ir.Value, found: _Update) -> Rewrite:
    if found.is_velocity and found.momentum is not None:
        # The learning rate is in it, and so would be in the decay.
        gradient, scale = unscaled(site, found.gradient, constants=True)
        penalty, scale = 0.0, replace(scale, number=scale.number * found.momentum.sign)
    else:
        gradient, penalty = regularized(site, found.gradient, found.parameter)
        gradient, scale = unscaled(site, gradient)
    tensors = {"parameter": found.parameter, "gradient": gradient}
    computed = [uncast(root)]
    if found.momentum is not None:
        tensors["momentum"] = found.momentum.before
        computed.append(found.momentum.value)
    require_types(site, root, tensors, computed)
    inputs: list[ir.Value | None] = [
        found.parameter,
        gradient,
        single_number(builder, found.rate.values, found.rate.number),
    ]
    is_scaled = bool(scale.values) or scale.number != 1
    if found.momentum is not None or is_scaled:
        inputs.append(tensors.get("momentum"))
    if is_scaled:
        inputs.append(single_number(builder, scale.values, scale.number))
    sizes = site.extents(root)
    new = builder.fused_whole(
        FuseApplySgdPass.operator,
        inputs,
        [sizes, [ZERO] if found.momentum is None else sizes],
        momentum=0.0 if found.momentum is None else found.momentum.factor,
        weight_decay=penalty,
        nesterov=int(found.nesterov),
    )
    singles = [value for value, _ in (*found.rate.values, *scale.values)]
    others = () if found.momentum is None else results_of(site, found.momentum.value, root.dtype)
    return replace(
        builder.rewrite("sgd-update", [new[0]], new[0]),
        frontier=(*tensors.values(), *singles),
        others=tuple((value, new[1]) for value in others),
        elementwise=True,
    )
