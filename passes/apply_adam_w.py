"""ApplyAdamW: the update of a parameter and its two moving averages by Adam or AdamW."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import onnx_ir as ir

from gradfuse.custom_ops import DOMAIN
from gradfuse.passes.matching import TOLERANCE, Builder, Mismatch, Rewrite, Site, names_of
from gradfuse.passes.matching.optimizer_pass import OptimizerPass, number, single
from gradfuse.passes.matching.terms import (
    Correction,
    Count,
    Factors,
    Key,
    Power,
    Terms,
    TooLong,
    constant,
    count_of,
    is_single,
    multiplied,
    plain,
    product,
    terms_of,
)
from gradfuse.passes.matching.updates import (
    ARITHMETIC,
    VIEWS,
    Rate,
    behind,
    computed_rates,
    regularized,
    require_types,
    results_of,
    single_number,
    type_name,
    uncast,
    unscaled,
    without_numbers,
)
from gradfuse.passes.reading import attribute, is_float
from gradfuse.passes.report import NearMiss

_NEAR_ROOT = 40  # nodes behind a root among which the root of the second moment and the first moment are looked for
_NEAR_SQUARE = 10  # nodes behind the second moment among which the gradient is looked for
_MANY = 1 << 40  # steps, after which a beta of seven decimals to their power is 0
_KEPT = (
    "epsilon is added to a root that is corrected by something else than 1 less a beta to the power of a count of "
    "steps, as where powers of the betas are states; the operator takes a count"
)
_DECIMALS = 7
_ROUNDING = 2.0**-23
_ONE: Factors = frozenset()
_NO_AVERAGES = (
    "it has a root of a moving average, but the averages are not read as those of one gradient and of its square: "
    "each is a number times what it was plus a number times the gradient, or its square"
)


class FuseApplyAdamWPass(OptimizerPass):
    """Finds, in a value P, the root of V = beta2 v + (1 - beta2) g^2, and with g the mean M = beta1 m + (1 - beta1) g;

    1. P = K p - S M / (A sqrt(V) + B), where all but p, M and V are single numbers;
    2. S / A = lr sqrt(1 - beta2^t) / (1 - beta1^t) and B / A = epsilon sqrt(1 - beta2^t), with t one more than a count;
       or B / A = epsilon, and S / A is taken for the rate, of so many steps that the operator corrects nothing;
    3. K = 1, or K = 1 - lr weight_decay, or g = weight_decay p + another gradient;
    4. p, m, v and the gradient are of P's shape and type, and what is in between of float32.

    P, M and V are replaced together. A gradient that is multiplied by single numbers gives gradient_scale.

    AdamWOptimizer of onnxruntime-training, in the mode that is PyTorch's, is the same for each of its parameters.
    """

    operator = "ApplyAdamW"
    optimizer = "AdamWOptimizer"
    sequences = (2, 3, 4, 5)
    signal = 6
    flagged = 1
    linear = False

    def propose(self, site: Site, builder: Builder, root: ir.Value) -> Rewrite | None:
        with contextlib.suppress(TooLong):
            found = _moments(site, root)
            return None if found is None else _bound(site, builder, root, found)
        return None

    def _require(self, node: ir.Node) -> None:
        if not attribute(node, "correct_bias", 1):
            raise Mismatch("it does not correct the bias of its averages")
        if attribute(node, "adam_mode", 0):
            raise Mismatch("its epsilon stays out of the correction, and its weights decay last")

    def _numbers(self, site: Site, builder: Builder, node: ir.Node) -> list[ir.Value]:
        rate, counted = (single(site, builder, node.inputs[k], name) for k, name in enumerate(("rate", "count")))
        one = builder.constant(np.ones((), np.int64), ir.DataType.INT64)
        # It counts the current step, the operator only previous ones.
        return [rate, builder.op("Sub", [counted, one], ir.DataType.INT64, [])]

    def _updated(self, site: Site, builder: Builder, node: ir.Node, inputs: Sequence[ir.Value]) -> tuple[ir.Value, ...]:
        return builder.fused_whole(
            self.operator,
            inputs,
            [site.extents(inputs[0])] * 3,
            beta1=number(node, "alpha", 0.9),
            beta2=number(node, "beta", 0.999),
            epsilon=number(node, "epsilon", 1e-8),
            weight_decay=number(node, "weight_decay", 1e-2),
            decoupled_weight_decay=1,
        )

    def unmatched(self, site: Site) -> Iterator[NearMiss]:
        """Results that a root of a moving average is part of, and no moving average of a gradient."""
        for value in site.graph.outputs if site.is_main else ():
            node = value.producer()
            if value.dtype in TOLERANCE and node is not None and node.domain != DOMAIN and site.knows(value):
                if node.op_type in ("Add", "Sub", "Sum") and _is_near(site, value):
                    yield NearMiss(names_of([node])[0], self.operator, _NO_AVERAGES)


def _is_near(site: Site, value: ir.Value) -> bool:
    """Whether a sum has a root of a moving average of its shape in it, of what is given to the graph."""
    for one in behind(site, value, _NEAR_ROOT):
        node = one.producer()
        if node is None or not _is_root(site, node) or node.inputs[0] is None:
            continue
        with contextlib.suppress(TooLong):
            for factors, kept in terms_of(site, without_numbers(site, node.inputs[0]), []).items():
                # Bias corrections may be factors of it, too.
                keys = [
                    key for key, e in factors if e == 1.0 and isinstance(key, ir.Value) and not is_single(site, key)
                ]
                if 0 < kept < 1 and len(keys) == 1 and keys[0].is_graph_input():
                    return site.knows(keys[0]) and site.extents(keys[0]) == site.extents(value)
    return False


@dataclass(frozen=True)
class _Average:
    """A moving average: (1 - share) times what it was, plus share times what is new."""

    value: ir.Value
    before: ir.Value
    share: float
    kept: float

    def beta(self) -> float:
        """What is kept of it, as the operator has it: to seven decimals.

        Raises:
            Mismatch: it has more, or the shares are not those of an average.
        """
        beta = round(self.kept, _DECIMALS)
        off = (abs(self.kept - beta), abs(self.share - (1 - beta)))
        # Each is a constant in float32, or 1 less one.
        if not 0 < beta < 1 or max(off) > _ROUNDING or (off[0] > _ROUNDING * beta and off[1] > _ROUNDING * (1 - beta)):
            raise Mismatch(f"its weights {self.kept:.9g} and {self.share:.9g} are no beta of 7 decimals and the rest")
        return beta


@dataclass(frozen=True)
class _Moments:
    """The new moving averages of an update, and the gradient that both are made of."""

    gradient: ir.Value
    mean: _Average
    square: _Average


def _moments(site: Site, root: ir.Value) -> _Moments | None:
    """The moving averages that a value has in a quotient; None where it has none."""
    node = uncast(root).producer()
    if node is None or node.domain or node.op_type not in ("Add", "Sub", "Sum"):
        return None
    if root not in site.reached("roots", partial(_is_root, site), ARITHMETIC | VIEWS | {"CastLike"}):
        return None
    near = list(behind(site, root, _NEAR_ROOT))
    for value in near:
        node = value.producer()
        if node is None or not _is_root(site, node) or node.inputs[0] is None:
            continue
        squared = without_numbers(site, node.inputs[0])
        above = squared.producer()
        if above is not None and above.op_type == "Max" and not above.domain:
            if any(v is not None and _square(site, plain(site, v)) is not None for v in above.inputs):
                raise Mismatch("it divides by the root of the largest second moment so far (amsgrad)")
            continue
        found = _square(site, squared)
        if found is None:
            continue
        gradient, square = found
        averages = (_average(site, plain(site, candidate), gradient, 1.0) for candidate in near)
        means = [mean for mean in averages if mean is not None]
        if means:
            # A multiple of an average, such as by the learning rate, is none.
            whole = (mean for mean in means if abs(mean.kept + mean.share - 1) <= _ROUNDING)
            return _Moments(gradient, next(whole, means[0]), square)
        raise Mismatch(
            "it divides by a root of an average of squares, and has no average of what is squared as a factor"
        )
    return None


def _is_root(site: Site, node: ir.Node) -> bool:
    if node.op_type == "Pow" and not node.domain and node.inputs[1] is not None:
        return constant(site, node.inputs[1]) in (0.5, -0.5)
    return node.op_type == "Sqrt" and not node.domain


def _square(site: Site, value: ir.Value) -> tuple[ir.Value, _Average] | None:
    """A gradient of whose squares a value is a moving average."""
    for candidate in behind(site, value, _NEAR_SQUARE):
        gradient = plain(site, candidate)
        average = _average(site, value, gradient, 2.0)
        if average is not None:
            return gradient, average
    return None


def _average(site: Site, value: ir.Value, gradient: ir.Value, power: float) -> _Average | None:
    """A value as a moving average of a power of the gradient."""
    if value is gradient:
        return None
    terms = terms_of(site, value, [gradient])
    if len(terms) > 2:
        terms = _gathered(site, value, gradient, power) or terms
    share = terms.get(frozenset([(gradient, power)]), 0.0)
    if len(terms) != 2 or not 0 < share < 1:
        return None
    ((factors, kept),) = ((f, n) for f, n in terms.items() if f != frozenset([(gradient, power)]))
    if len(factors) != 1 or not 0 < kept < 1:
        return None
    ((before, exponent),) = factors
    if not isinstance(before, ir.Value) or exponent != 1.0 or before is gradient:
        return None
    return _Average(value, before, share, kept)


def _gathered(site: Site, value: ir.Value, gradient: ir.Value, power: float) -> Terms | None:
    """A value as a sum with a multiple of a power of the gradient, where the graph has that term by term."""
    own = terms_of(site, gradient, [])
    whole = own if power == 1.0 else multiplied(own, own)
    terms = terms_of(site, value, [])
    if whole is None or len(own) < 2 or not whole.keys() <= terms.keys():
        return None
    shares = [terms[factors] / number for factors, number in whole.items()]
    if max(shares) - min(shares) > _ROUNDING * max(map(abs, shares)):
        return None
    return {frozenset([(gradient, power)]): shares[0], **{f: n for f, n in terms.items() if f not in whole}}


@dataclass(frozen=True)
class _Update:
    """A value as the update of a parameter, in terms of the operator."""

    parameter: ir.Value
    rate: Rate
    epsilon: float
    decay: float
    count: Count | None  # None where the rate has the bias corrections, or there are none


def _update(site: Site, root: ir.Value, found: _Moments, betas: tuple[float, float]) -> _Update:
    """The root as an update by these moving averages.

    Raises:
        Mismatch: it is another one.
    """
    try:
        return _update_at(site, root, found, betas, [])
    except Mismatch:
        rates = computed_rates(site, root, _NEAR_ROOT, lambda v: v.is_graph_input() or v.is_initializer())
        if rates:
            with contextlib.suppress(Mismatch):
                return _update_at(site, root, found, betas, rates)
        raise


def _update_at(
    site: Site, root: ir.Value, found: _Moments, betas: tuple[float, float], rates: Collection[ir.Value]
) -> _Update:
    """As `_update`, with factors of the learning rate that are taken as they are."""
    mean, square = found.mean.value, found.square.value
    terms = terms_of(site, uncast(root), [mean, square, *rates])
    steps = [(f, n) for f, n in terms.items() if any(key is mean for key, _ in f)]
    rest = {f: n for f, n in terms.items() if (f, n) not in steps}
    if len(steps) != 1 or (mean, 1.0) not in steps[0][0]:
        raise Mismatch("it is no single multiple of the mean of the gradients")
    ((factors, number),) = steps
    factors = product(factors, frozenset([(mean, -1.0)]))

    # number M factors / (A sqrt(V) + B) as (number factors / A) M / (sqrt(V) + B / A).
    added: tuple[Factors, float] = _ONE, 0.0
    if (square, -0.5) in factors:
        factors = product(factors, frozenset([(square, 0.5)]))
    else:
        divisor, parts = _divisor(site, factors, square)
        ((own, of_root),) = ((f, n) for f, n in parts.items() if (square, 0.5) in f)
        ((other, of_rest),) = ((f, n) for f, n in parts.items() if f != own)
        inverse = product(frozenset((key, -e) for key, e in own), frozenset([(square, 0.5)]))
        factors = product(factors, frozenset([(divisor, 1.0)]), inverse)
        number /= of_root
        added = product(other, inverse), of_rest / of_root

    corrected = any(isinstance(key, Correction) for key, _ in factors)
    if added == (_ONE, added[1]) and (added[1] > 0 or not corrected):
        return _with_own_rate(site, root, factors, number, added[1], rest)
    if any(isinstance(key, ir.Value) for key, _ in added[0]) and not corrected:
        raise Mismatch(_KEPT)
    count = _count(factors)
    first, second = (Correction(Power(base, count)) for base in _bases(factors, betas))
    rate = product(factors, frozenset([(first, 1.0)]), frozenset([(second, -0.5)]))
    if number >= 0 or not all(isinstance(key, ir.Value) and e == 1.0 and is_single(site, key) for key, e in rate):
        raise Mismatch("its step is not the learning rate with both bias corrections")
    if added[1] < 0 or (added[1] and added[0] != frozenset([(second, 0.5)])):
        raise Mismatch("epsilon is not added to the corrected root")
    chosen = Rate(rate, -number)
    parameter, decay = _decayed(rest, chosen)
    return _Update(parameter, chosen, added[1], decay, count)


def _with_own_rate(site: Site, root: ir.Value, factors: Factors, number: float, epsilon: float, rest: Terms) -> _Update:
    """An update by a root plus a number, neither of them corrected: the corrections, if any, are part of the rate.

    Keras and TensorFlow have it so, with powers of the betas as states.
    """
    if number >= 0 or not all(_is_of_rate(site, key, e) for key, e in factors):
        raise Mismatch("its step is not a learning rate")
    rate = Rate(factors, -number)
    try:
        parameter, decay = _decayed(rest, rate)
    except Mismatch:
        # Decayed by the learning rate without the corrections, the parameter is a value of its own.
        node = uncast(root).producer()
        added = [] if node is None else [value for value in node.inputs if value is not None]
        start = next((value for value in added if terms_of(site, value, []) == rest), None)
        if start is None:
            raise
        parameter, decay = start, 0.0
    return _Update(parameter, rate, epsilon, decay, None)


def _is_of_rate(site: Site, key: Key, exponent: float) -> bool:
    single = isinstance(key, Correction) or (isinstance(key, ir.Value) and is_single(site, key))
    return single and abs(exponent) in (0.5, 1.0)


def _divisor(site: Site, factors: Factors, square: ir.Value) -> tuple[ir.Value, Terms]:
    """The sum of the root and epsilon that a product is divided by, and its two terms."""
    for key, exponent in factors:
        if isinstance(key, ir.Value) and exponent == -1.0:
            parts = terms_of(site, key, [square])
            if len(parts) == 2 and sum((square, 0.5) in f for f in parts) == 1:
                return key, parts
            roots = [own for f in parts for own, e in f if isinstance(own, ir.Value) and e == 0.5]
            if any((square, 1.0) in f for own in roots for f in terms_of(site, own, [square])):
                raise Mismatch(_KEPT)
    raise Mismatch("it is divided by something else than a root of the mean of the squares and epsilon")


def _count(factors: Factors) -> Count:
    counts = {key.power.count for key, _ in factors if isinstance(key, Correction)}
    if len(counts) != 1:
        raise Mismatch("its bias corrections are missing, or are not of one count of steps")
    (count,) = counts
    if count.more != 1:
        raise Mismatch(f"its bias corrections are for {count.more} more than the steps that are counted, not for 1")
    return count


def _bases(factors: Factors, betas: tuple[float, float]) -> tuple[float, float]:
    """The bases of the corrections as they are in the graph: the betas, in float64 or float32."""
    bases = {key.power.base for key, _ in factors if isinstance(key, Correction)}
    found = [base for beta in betas for base in bases if base in (beta, float(np.float32(beta)))]
    if len(found) != 2 or bases != set(found):
        text = " and ".join(f"{base:.9g}" for base in sorted(bases))
        raise Mismatch(f"its bias corrections are those of {text}, its betas {betas[0]:.9g} and {betas[1]:.9g}")
    return found[0], found[1]


def _decayed(terms: Terms, rate: Rate) -> tuple[ir.Value, float]:
    """The parameter, and its decoupled weight decay: what terms say that are p, or (1 - rate decay) p."""
    pairs = [(key, f, n) for f, n in terms.items() if len(f) == 1 for key, e in f if e == 1.0]
    alone = [(key, f, n) for key, f, n in pairs if isinstance(key, ir.Value)]
    if len(alone) != 1 or len(terms) > 2:
        raise Mismatch("what it is added to is no parameter, decayed by the learning rate")
    ((parameter, own, kept),) = alone
    others = [(f, n) for f, n in terms.items() if f != own]
    if others:
        ((factors, number),) = others
        if kept == 1.0 and factors == product(own, rate.factors) and number < 0:
            return parameter, -number / rate.number
    elif kept == 1.0:
        return parameter, 0.0
    elif 0 < kept < 1 and not rate.factors:
        return parameter, _shortest((1 - kept) / rate.number, rate.number, kept)
    raise Mismatch("its weight decay is not in proportion to the learning rate")


def _shortest(number: float, rate: float, kept: float) -> float:
    """The weight decay with the fewest digits of which a graph has 1 less its product with the rate, rounded."""
    candidates = (float(f"{number:.{digits}g}") for digits in range(1, 9))
    return next((c for c in candidates if np.float32(1 - rate * c) == np.float32(kept)), number)


def _bound(site: Site, builder: Builder, root: ir.Value, found: _Moments) -> Rewrite:
    mean, square = found.mean, found.square
    betas = mean.beta(), square.beta()
    update = _update(site, root, found, betas)
    gradient, penalty = regularized(site, found.gradient, update.parameter)
    if penalty and update.decay:
        raise Mismatch("it has weight decay in the gradient and apart from it")
    gradient, scale = unscaled(site, gradient)
    tensors = [update.parameter, gradient, mean.before, square.before]
    names = ("parameter", "gradient", "mean of the gradients", "mean of their squares")
    require_types(site, root, dict(zip(names, tensors, strict=True)), [uncast(root), mean.value, square.value])

    inputs = [*tensors, _rate(builder, update), _step(site, builder, update.count)]
    if _is_by_difference(site, square):
        # What is infinite becomes NaN there. The operator keeps it, and the parameter would stay as it is.
        before, extents = square.before, site.extents(square.before)
        nothing = builder.op("Sub", [before, before], before.dtype, extents)
        inputs[len(names) - 1] = builder.op("Add", [before, nothing], before.dtype, extents)
    if scale.values or scale.number != 1:
        inputs.append(single_number(builder, scale.values, scale.number))
    new = builder.fused_whole(
        FuseApplyAdamWPass.operator,
        inputs,
        [site.extents(root)] * 3,
        beta1=betas[0],
        beta2=betas[1],
        epsilon=update.epsilon,
        weight_decay=penalty or update.decay,
        decoupled_weight_decay=int(not penalty),
    )
    others = [
        (value, output)
        for average, output in zip((mean, square), new[1:], strict=True)
        for value in results_of(site, average.value, root.dtype)
    ]
    rates = [value for value, _ in update.rate.values]
    corrections = [key for key, _ in update.rate.factors if isinstance(key, Correction)]
    counts = {key.power.count.value for key in corrections} | ({update.count.value} if update.count else set())
    # Where the rate is 0, some ways to write the update divide 0 by 0.
    singles = [*rates, *(value for value, _ in scale.values), *counts]
    return replace(
        builder.rewrite("adam-update", [new[0]], new[0]),
        frontier=(*tensors, *singles),
        others=tuple(others),
        counts=frozenset(counts),
        positive=frozenset(rates),
        elementwise=True,
    )


def _is_by_difference(site: Site, average: _Average) -> bool:
    """Whether a moving average is v + (new - v) share, as Keras and lerp have it, and not (1 - share) v + share new."""
    node = uncast(average.value).producer()
    inputs = [] if node is None else [value for value in node.inputs if value is not None]
    return any(plain(site, value) is average.before for value in inputs) and len(inputs) > 1


def _rate(builder: Builder, update: _Update) -> ir.Value:
    """The learning rate, with the bias corrections that belong to it."""
    if update.count is not None:
        return single_number(builder, update.rate.values, update.rate.number)
    double = ir.DataType.DOUBLE
    result = builder.constant(np.asarray(update.rate.number), double)
    for key, exponent in sorted(update.rate.factors, key=lambda factor: (factor[1], str(factor[0]))):
        own = _correction(builder, key) if isinstance(key, Correction) else builder.cast(_as_value(key), double)
        own = builder.reshape(own, [])
        if abs(exponent) == 0.5:
            own = builder.op("Sqrt", [own], double, [])
        result = builder.op("Mul" if exponent > 0 else "Div", [result, own], double, [])
    return builder.cast(result, ir.DataType.FLOAT)


def _as_value(key: Key) -> ir.Value:
    assert isinstance(key, ir.Value)
    return key


def _correction(builder: Builder, key: Correction) -> ir.Value:
    """1 less a power of a beta, as float64."""
    double, count, base = ir.DataType.DOUBLE, key.power.count, key.power.base
    meant = round(base, _DECIMALS)
    if base == float(np.float32(meant)):
        base = meant
    done = builder.reshape(builder.cast(count.value, double), [])
    steps = builder.op("Add", [done, builder.constant(np.asarray(count.more), double)], double, [])
    power = builder.op("Pow", [builder.constant(np.asarray(base), double), steps], double, [])
    return builder.op("Sub", [builder.constant(np.asarray(1.0), double), power], double, [])


def _step(site: Site, builder: Builder, count: Count | None) -> ir.Value:
    """The number of steps that were done before, as int64; so many that corrections are 1 where there is no count.

    Raises:
        Mismatch: the graph does not prove it an integer.
    """
    if count is None:
        return builder.constant(np.asarray(_MANY), ir.DataType.INT64)
    value = count.value
    if is_float(value):
        # As in torch: a state that each step increments by 1.
        counted = [use.node.outputs[0] for use in value.uses() if use.node.op_type == "Add" and not use.node.domain]
        counted = [new for one in counted for new in site.equal(one) if new.is_graph_output()]
        counted = [new for new in counted if count_of(site, new) == count]
        if value.producer() is not None or not counted:
            raise Mismatch("what it counts steps by is not known to be a whole number")
    elif value.dtype not in (ir.DataType.INT32, ir.DataType.INT64):
        raise Mismatch(f"what it counts steps by is {type_name(value)}")
    return builder.reshape(builder.cast(value, ir.DataType.INT64), [])
