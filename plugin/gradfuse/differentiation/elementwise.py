"""Operators that act on elements: arithmetic, functions of one number, activations, selection."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping

import onnx_ir as ir

from gradfuse.custom_ops.elementwise import MAX_RANK
from gradfuse.differentiation.rules import FLOATS, FUSES, Call, Gradient, gradient, no_gradient, refuse
from gradfuse.differentiation.tensors import Tape, Tensor, normal_density

_KERNEL_TYPES = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)

no_gradient(
    *("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "And", "Or", "Not", "Xor", "IsNaN", "IsInf"),
    *("BitShift", "BitwiseAnd", "BitwiseNot", "BitwiseOr", "BitwiseXor"),
    *("Ceil", "Floor", "Round", "Sign", "Hardmax"),
    *("EyeLike", "RandomNormalLike", "RandomUniformLike", "Bernoulli", "Multinomial"),
)
refuse(
    *("DynamicQuantizeLinear", "QLinearMatMul", "QLinearConv"),
    why="rounding to integers has no derivative",
)
refuse(
    "QuantizeLinear",
    why="rounding to integers has no derivative (build_training_step has straight_through for pairs)",
)


# Arithmetic


@gradient("Add", broadcasts=True)
def add(call: Call) -> Iterator[Gradient]:
    _, _, dy = call.pair()
    yield dy
    yield dy


@gradient("Sub", broadcasts=True)
def sub(call: Call) -> Iterator[Gradient]:
    _, _, dy = call.pair()
    yield dy
    yield lambda: -dy


@gradient("Mul", broadcasts=True)
def mul(call: Call) -> Iterator[Gradient]:
    a, b, dy = call.pair()
    yield lambda: dy * b
    yield lambda: dy * a


@gradient("Div", broadcasts=True)
def div(call: Call) -> Iterator[Gradient]:
    _, b, dy = call.pair()
    yield lambda: dy / b
    yield lambda: -dy * call.y[0] / b


@gradient("Pow", broadcasts=True)
def pow_(call: Call) -> Iterator[Gradient]:
    """As torch: the derivative by the base is 0 for an exponent of 0, that by the exponent 0 for a base of 0."""
    base, exponent, dy = call.pair()
    constant = call.constant(1)

    def by_base() -> Tensor:
        if constant is not None and constant.size == 1:
            number = float(constant.reshape(()))
            if number == 2:
                return dy * base * 2
            if number == 0:
                return base.zeros() * dy
            return dy * number * base.op("Pow", number - 1)
        power = exponent.cast(base.dtype)
        slope = power * base.op("Pow", power - 1)
        return dy * power.equals(0).op("Not").where(slope, 0.0)

    def by_exponent() -> Tensor:
        result = call.y[0]
        logarithm = base.equals(0).op("Not").where(base, 1.0).log()
        return (dy * result * logarithm).cast(exponent.dtype)

    yield by_base
    yield by_exponent


@gradient("Mod", broadcasts=True)
def mod(call: Call) -> Iterator[Gradient]:
    """a - b floor(a / b), and with fmod a - b trunc(a / b)."""
    a, b, dy = call.pair()
    yield dy

    def by_divisor() -> Tensor:
        quotient = a / b
        if call.attribute("fmod", 0):
            return -dy * quotient.sign() * quotient.op("Abs").op("Floor")
        return -dy * quotient.op("Floor")

    yield by_divisor


@gradient("Sum", broadcasts=True)
def sum_(call: Call) -> Iterator[Gradient]:
    for _ in call.x:
        yield call.dy[0]


@gradient("Mean", broadcasts=True)
def mean(call: Call) -> Iterator[Gradient]:
    dy = call.dy[0]
    assert dy is not None
    for _ in call.x:
        yield dy * (1 / len(call.x))


@gradient("Max", "Min", broadcasts=True)
def extreme(call: Call) -> Iterator[Gradient]:
    """Operands that are equal share the gradient, as in torch.maximum."""
    dy, y = call.dy[0], call.y[0]
    assert dy is not None
    if len(call.x) == 1:
        yield dy
        return
    if len(call.x) == 2:
        # As PyTorch has it, with NaN too. The result is not compared: a runtime may have rounded it, and not these.
        first, second = call.x
        assert first is not None and second is not None
        comparison = "Less" if call.node.op_type == "Max" else "Greater"
        zero, shared = call.tape.constant(0.0, dy.dtype), first.equals(second).where(dy * 0.5, dy)
        yield lambda: first.op(comparison, second).where(zero, shared)
        yield lambda: second.op(comparison, first).where(zero, shared)
        return
    hits = [x.equals(y).cast(dy.dtype) for x in call.x if x is not None]
    share = dy / call.tape.op("Sum", *hits)
    for hit in hits:
        yield share * hit


# Functions of one number: (call, x, y) -> dy/dx

_Slope = Callable[[Call, Tensor, Tensor], Tensor]

_SLOPES: Mapping[str, _Slope] = {
    "Neg": lambda call, x, y: -x.ones(),
    "Abs": lambda call, x, y: x.sign(),
    "Exp": lambda call, x, y: y,
    "Log": lambda call, x, y: 1 / x,
    "Sqrt": lambda call, x, y: 0.5 / y,
    "Reciprocal": lambda call, x, y: -(y * y),
    "Sin": lambda call, x, y: x.op("Cos"),
    "Cos": lambda call, x, y: -x.op("Sin"),
    "Tan": lambda call, x, y: y * y + 1,
    "Asin": lambda call, x, y: 1 / (1 - x * x).sqrt(),
    "Acos": lambda call, x, y: -1 / (1 - x * x).sqrt(),
    "Atan": lambda call, x, y: 1 / (x * x + 1),
    "Sinh": lambda call, x, y: x.op("Cosh"),
    "Cosh": lambda call, x, y: x.op("Sinh"),
    "Tanh": lambda call, x, y: 1 - y * y,
    "Asinh": lambda call, x, y: 1 / (x * x + 1).sqrt(),
    "Acosh": lambda call, x, y: 1 / (x * x - 1).sqrt(),
    "Atanh": lambda call, x, y: 1 / (1 - x * x),
    "Erf": lambda call, x, y: (-(x * x)).exp() * (2 / math.sqrt(math.pi)),
    "Sigmoid": lambda call, x, y: y * (1 - y),
    "Softplus": lambda call, x, y: x.sigmoid(),
    "Softsign": lambda call, x, y: 1 / (x.op("Abs") + 1) ** 2,
}


def _by_slope(call: Call) -> Iterator[Gradient]:
    x, dy = call.operands()
    yield dy * _SLOPES[call.node.op_type](call, x, call.y[0])


gradient(*(name for name in _SLOPES if name != "Neg"))(_by_slope)


@gradient("Neg")
def neg(call: Call) -> Iterator[Gradient]:
    dy = call.dy[0]
    assert dy is not None
    yield -dy


# Activations with a kink: 0 at the kink itself, as in torch


@gradient("Relu")
def relu(call: Call) -> Iterator[Gradient]:
    """As `aten::threshold_backward`, which lets the gradient through where the result is NaN."""
    dy = _dy(call)
    if _has_operator(call, (*_KERNEL_TYPES, ir.DataType.DOUBLE)):
        yield dy.op("ThresholdBackward", call.y[0], domain="aclnn")
        return
    yield call.y[0].op("LessOrEqual", 0.0).where(dy.tape.constant(0.0, dy.dtype), dy)


@gradient("LeakyRelu")
def leaky_relu(call: Call) -> Iterator[Gradient]:
    yield _where(call, _x(call) > 0, call.attribute("alpha", 0.01))


@gradient("ThresholdedRelu")
def thresholded_relu(call: Call) -> Iterator[Gradient]:
    yield _where(call, _x(call) > call.attribute("alpha", 1.0))


@gradient("PRelu", broadcasts=True)
def prelu(call: Call) -> Iterator[Gradient]:
    x, slope, dy = call.pair()
    positive = x > 0
    yield lambda: positive.where(dy, dy * slope)
    yield lambda: positive.where(dy.tape.constant(0.0, dy.dtype), dy * x)


@gradient("Elu")
def elu(call: Call) -> Iterator[Gradient]:
    x, dy = _x(call), _dy(call)
    alpha = call.attribute("alpha", 1.0)
    yield (x > 0).where(dy, dy * alpha * x.op("Min", 0.0).exp())


@gradient("Celu")
def celu(call: Call) -> Iterator[Gradient]:
    x, dy = _x(call), _dy(call)
    yield (x > 0).where(dy, dy * (x.op("Min", 0.0) / call.attribute("alpha", 1.0)).exp())


@gradient("Selu")
def selu(call: Call) -> Iterator[Gradient]:
    x, dy = _x(call), _dy(call)
    alpha = call.attribute("alpha", 1.67326319217681884765625)
    scaled = dy * call.attribute("gamma", 1.05070102214813232421875)
    yield (x > 0).where(scaled, scaled * alpha * x.op("Min", 0.0).exp())


@gradient("HardSigmoid")
def hard_sigmoid(call: Call) -> Iterator[Gradient]:
    y, alpha = call.y[0], call.attribute("alpha", 0.2)
    inside = (y > 0).op("And", y < 1)
    yield (_dy(call) * alpha).masked(inside)


@gradient("HardSwish")
def hard_swish(call: Call) -> Iterator[Gradient]:
    """x clip(x / 6 + 1 / 2, 0, 1)."""
    x, dy = _x(call), _dy(call)
    middle = (x > -3.0).op("And", x < 3.0)
    yield middle.where(dy * (x * (1 / 3) + 0.5), (dy).masked(x.op("GreaterOrEqual", 3.0)))


@gradient("Shrink")
def shrink(call: Call) -> Iterator[Gradient]:
    bound = call.attribute("lambd", 0.5)
    yield _dy(call).masked(_x(call).op("Abs") > bound)


@gradient("Gelu")
def gelu(call: Call) -> Iterator[Gradient]:
    yield gelu_gradient(call, _x(call), _dy(call), call.attribute("approximate", "none"))


def gelu_gradient(call: Call, x: Tensor, dy: Tensor, approximate: str) -> Tensor:
    """Return dy times the derivative of the Gaussian error linear unit at x, which has the shape of the output."""
    if _has_operator(call, _KERNEL_TYPES):
        return dy.op("GeluBackward", x, domain="aclnn", approximate=approximate)
    if approximate == "tanh":
        return dy * _tanh_gelu_slope(x)
    cumulative = ((x * (1 / math.sqrt(2))).op("Erf") + 1) * 0.5
    return dy * (cumulative + x * normal_density(x))


def _has_operator(call: Call, dtypes: Collection[ir.DataType]) -> bool:
    """Whether an elementwise operator of the domain `aclnn` may stand in a gradient, and takes these tensors."""
    shape = call.y[0].value.shape
    fits = shape is not None and len(shape) <= MAX_RANK and call.y[0].dtype in dtypes
    return bool(call.node.meta.get(FUSES)) and fits


def _tanh_gelu_slope(x: Tensor) -> Tensor:
    """The derivative of 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))."""
    scale = math.sqrt(2 / math.pi)
    t = ((x + x * x * x * 0.044715) * scale).tanh()
    inner = (x * x * (3 * 0.044715) + 1) * scale
    return (t + 1) * 0.5 + x * 0.5 * (1 - t * t) * inner


@gradient("Mish")
def mish(call: Call) -> Iterator[Gradient]:
    """x tanh(softplus(x)), whose tangent is s / (s + 2) for s = e (e + 2) and e = exp(x): 1 from x = 20 on."""
    x, dy = _x(call), _dy(call)
    e = x.op("Min", 20.0).exp()
    s = e * (e + 2)
    yield dy * (s / (s + 2) + x * e * (e + 1) * 4 / ((s + 2) * (s + 2)))


@gradient("Swish")
def swish(call: Call) -> Iterator[Gradient]:
    """x sigmoid(alpha x)."""
    x, dy = _x(call), _dy(call)
    alpha = call.attribute("alpha", 1.0)
    s = (x * alpha).sigmoid()
    yield dy * (s + x * alpha * s * (1 - s))


@gradient("Clip")
def clip(call: Call) -> Iterator[Gradient]:
    """As torch.clamp: 1 at the bounds themselves, too. Bounds get the gradient where the input lies beyond them."""
    x, dy = _x(call), _dy(call)
    low, high = call.input(1), call.input(2)
    if low is None and high is None:
        yield dy
        return
    # What is between the bounds, and they themselves, stay what they are.
    yield lambda: dy.masked(x.equals(call.y[0]))

    def by_low() -> Tensor | None:
        if low is None:
            return None
        below = x < low
        beyond = below if high is None else below.op("And", (low > high).op("Not"))
        return dy.masked(beyond).sum(None, keepdims=False)

    def by_high() -> Tensor | None:
        if high is None:
            return None
        raised = x if low is None else x.op("Max", low)
        return dy.masked(raised > high).sum(None, keepdims=False)

    yield by_low
    yield by_high


# Types, selection, randomness


def _scales_of_blocks(node: ir.Node) -> list[str]:
    """Return the names of the tensors that are scales of blocks, in the graph of a node."""
    others = [node] if node.graph is None else list(node.graph)
    blocked = (
        n for n in others if n.op_type == node.op_type and not n.domain and n.attributes.get_int("block_size", 0) > 0
    )
    scales = (n.inputs[1] for n in blocked)
    return list(dict.fromkeys(str(one.name) for one in scales if one is not None and one.producer() is None))


@gradient("DequantizeLinear", limits="scales of one element, or of one for each index along an axis")
def dequantize_linear(call: Call) -> Iterator[Gradient]:
    """(x - zero_point) scale."""
    scale, dy, zero_point = call.x[1], _dy(call), call.input(2)
    assert scale is not None
    x, scale_rank, rank = _x(call), call.rank(scale), call.rank(_x(call))
    yield None

    def by_scale() -> Tensor:
        if call.attribute("block_size", 0):
            trained = _scales_of_blocks(call.node)
            why = f", and its scales are parameters; expected frozen={trained}" if trained else "; expected none"
            raise call.error(f"it has a block_size{why}")
        axis = call.attribute("axis", 1) % max(rank, 1)
        column = [1 if k != axis else -1 for k in range(rank)] if scale_rank else []
        steps = x.cast(dy.dtype)
        if zero_point is not None:
            steps = steps - zero_point.cast(dy.dtype).reshape(column)
        others = [k for k in range(rank) if not scale_rank or k != axis]
        return (dy * steps).sum(others, keepdims=False).cast(scale.dtype).like(scale)

    yield by_scale
    yield None


@gradient("Range", fixed=[1])
def range_(call: Call) -> Iterator[Gradient]:
    """start + k delta for k = 0, 1, ..."""
    dy = _dy(call)
    yield lambda: dy.sum(None, keepdims=False)
    yield None

    def by_delta() -> Tensor:
        count = dy.op("Size")
        steps = call.tape.op("Range", call.tape.constant(0), count, call.tape.constant(1))
        return (dy * steps.cast(dy.dtype)).sum(None, keepdims=False)

    yield by_delta


@gradient("Identity")
def identity(call: Call) -> Iterator[Gradient]:
    yield call.dy[0]


@gradient("Cast", "CastLike", fixed=[1])
def cast(call: Call) -> Iterator[Gradient]:
    x = _x(call)
    yield _dy(call).cast(x.dtype) if x.dtype in FLOATS else None


@gradient("Where", broadcasts=True)
def where(call: Call) -> Iterator[Gradient]:
    condition, dy = _x(call), _dy(call)
    zero = call.tape.constant(0.0, dy.dtype)
    yield None
    yield lambda: condition.where(dy, zero)
    yield lambda: condition.where(zero, dy)


@gradient("Dropout", fixed=[1])
def dropout(call: Call) -> Iterator[Gradient]:
    """The identity, unless its input `training_mode` is true: then it keeps its mask and divides by 1 - ratio."""
    dy, training = _dy(call), call.input(2)
    known = call.constant(2)
    if training is None or (known is not None and not known):
        yield dy
        return
    kept = mask_of(call.node, call.tape)
    ratio = call.input(1)
    share: Tensor | float = 0.5 if ratio is None else ratio.cast(dy.dtype)
    scaled = dy.masked(kept) / (1 - share)
    yield scaled if known is not None else training.where(scaled, dy)


def mask_of(node: ir.Node, tape: Tape) -> Tensor:
    """The mask of a Dropout node, which gets that output if it has none."""
    if len(node.outputs) < 2:
        node.resize_outputs(2)
    mask = node.outputs[1]
    if not mask.name:
        mask.name = f"{node.outputs[0].name}.mask"
    mask.dtype = ir.DataType.BOOL
    mask.shape = node.outputs[0].shape
    return tape.of(mask)


def _x(call: Call) -> Tensor:
    x = call.x[0]
    assert x is not None
    return x


def _dy(call: Call) -> Tensor:
    dy = call.dy[0]
    assert dy is not None
    return dy


def _where(call: Call, positive: Tensor, slope: float = 0.0) -> Tensor:
    dy = _dy(call)
    if not slope:
        return dy.masked(positive)
    return positive.where(dy, dy * slope)
