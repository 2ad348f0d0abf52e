"""Pointwise: a chain of elementwise operators in one pass over memory."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from gradfuse.custom_ops import draws
from gradfuse.custom_ops.attention import THRESHOLD_END
from gradfuse.custom_ops.elementwise import MAX_RANK
from gradfuse.custom_ops.operator import (
    FLOAT_TYPES,
    Attribute,
    Call,
    Input,
    Operator,
    Output,
    Shape,
    Tensor,
    TorchOp,
    Variant,
    show,
)
from gradfuse.custom_ops.pointwise_expressions import (
    INPUTS,
    KEPT,
    OUTPUTS,
    ExpressionError,
    Instruction,
    Number,
    Operand,
    Program,
    parse,
)

if TYPE_CHECKING:
    import torch

_DRAWS = ("seed", "drawn")
_ONE = Number(1.0)


def _infer(call: Call) -> list[Tensor]:
    program = _program(call)
    shape = _shape(call)
    dtype = OPERATOR.dtype(call)
    return [Tensor(dtype, shape if name in program.outputs else (0,)) for name in OUTPUTS]


def _program(call: Call) -> Program:
    """The program of a call that has the inputs and attributes which it reads, and no others."""
    expression, threshold = call.attributes["expression"], call.attributes["dropout_threshold"]
    assert isinstance(expression, str) and isinstance(threshold, int)
    try:
        program = parse(expression)
    except ExpressionError as error:
        raise call.error("expression", error.got, error.wanted) from error
    for name in INPUTS:
        if name in program.inputs and name not in call.inputs:
            raise call.error(name, "absent", "a tensor, as expression reads it")
        if name in call.inputs and name not in (INPUTS[0], *program.inputs):
            raise call.error(name, "given", "absent, as expression does not read it")
    if program.draws and "seed" not in call.inputs:
        raise call.error("seed", "absent", "a tensor, as expression has Kept()")
    if not 0 <= threshold < THRESHOLD_END:
        raise call.error("dropout_threshold", threshold, f"0 to {THRESHOLD_END - 1}")
    for name in () if program.draws else _DRAWS:
        if name in call.inputs:
            raise call.error(name, "given", "absent, as expression has no Kept()")
    for name in () if program.draws else ("dropout_threshold", "draw"):
        if call.attributes[name] != 0:
            raise call.error(name, call.attributes[name], "0, as expression has no Kept()")
    return program


def _shape(call: Call) -> Shape:
    """The shape of x0, as far as the inputs that broadcast to it tell it."""
    call.one_element(*_DRAWS)
    whole = call.inputs[INPUTS[0]].shape
    if whole is None:
        return None
    if len(whole) > MAX_RANK:
        raise call.error(INPUTS[0], f"of rank {len(whole)}", f"at most rank {MAX_RANK}")
    found = list(whole)
    for name in INPUTS[1:]:
        shape = (call.inputs[name].shape if name in call.inputs else None) or ()
        fits = len(shape) <= len(found)
        for axis in range(-len(shape), 0) if fits else ():
            dim, known = shape[axis], found[axis]
            if isinstance(dim, int) and dim != 1:
                fits = fits and (dim == known or not isinstance(known, int))
                found[axis] = dim
        if not fits:
            wanted = f"one that broadcasts to {show(whole)}, the shape of {INPUTS[0]}"
            raise call.error(name, f"of shape {show(shape)}", wanted)
    return tuple(found)


def _choices(call: Call) -> Iterable[str]:
    yield _program(call).text()


def _body(variant: Variant) -> str:
    (expression,) = variant.choices
    return _Text(parse(expression), variant).text()


def _spelled(instruction: Instruction) -> Instruction:
    """Return an instruction as a body has it.

    onnxruntime 1.31 makes an invalid model of the product of a Cast that it removes and a Div of 1.
    """
    operator, operands = instruction
    return Instruction("Reciprocal", operands[1:]) if operator == "Div" and operands[0] == _ONE else instruction


class _Text:
    """The body of a program: one node for each operator."""

    def __init__(self, program: Program, variant: Variant) -> None:
        self._program = program
        self._variant = variant
        # What the results of instructions depend on: inputs, and Kept() as an input of the shape of x0.
        self._sources: list[frozenset[str]] = []
        for operator, operands in program.instructions:
            own = {INPUTS[0]} if operator == KEPT else set()
            self._sources.append(frozenset(own).union(*map(self._sources_of, operands)))

    def text(self) -> str:
        program = self._program
        # onnxruntime has no Size of bfloat16, which the draw takes.
        cast = dict.fromkeys(((INPUTS[0],) if program.draws else ()) + program.inputs)
        lines = [f"real_{name} = Cast<to=$real>({name})" for name in cast]
        if program.draws:
            lines.append(draws.hash_kept(f"real_{INPUTS[0]}", self._variant.inputs, self._variant.opset))
        instructions = list(map(_spelled, program.instructions))
        numbers = dict.fromkeys(one for _, operands in instructions for one in operands)
        numbers |= dict.fromkeys(program.results.values())
        self._numbers = {one: f"number_{index}" for index, one in enumerate(numbers) if isinstance(one, Number)}
        lines += [f"{name} = Constant<value_float={number}>()" for number, name in self._numbers.items()]
        for index, (operator, operands) in enumerate(instructions):
            if operator != KEPT:
                lines.append(f"value_{index} = {operator}({', '.join(map(self._named, operands))})")
        lines += [self._output(name) for name in OUTPUTS]
        text = "\n".join(lines)
        shared = {"zero": "Constant<value_ints=[0]>()", "one": "Constant<value_ints=[1]>()", "shape": "Shape(x0)"}
        needed = (f"{name} = {value}\n" for name, value in shared.items() if re.search(rf"\b{name}\b", text))
        return "".join(needed) + text

    def _output(self, name: str) -> str:
        if name not in self._program.results:
            return f"{name}_nothing = ConstantOfShape(zero)\n{name} = CastLike({name}_nothing, x0)"
        operand = self._program.results[name]
        sources, value = self._sources_of(operand), self._named(operand)
        text = ""
        if INPUTS[0] not in sources:
            text, value = f"{name}_whole = Expand({value}, shape)\n", f"{name}_whole"
        if not sources <= {INPUTS[0]}:
            # Fails where an input has made the result larger than x0.
            text, value = f"{text}{name}_like_x0 = Reshape<allowzero=1>({value}, shape)\n", f"{name}_like_x0"
        return f"{text}{name} = CastLike({value}, x0)"

    def _sources_of(self, operand: Operand) -> frozenset[str]:
        if isinstance(operand, int):
            return self._sources[operand]
        return frozenset((operand,) if isinstance(operand, str) else ())

    def _named(self, operand: Operand) -> str:
        if isinstance(operand, Number):
            return self._numbers[operand]
        if isinstance(operand, str):
            return f"real_{operand}"
        return "hash_kept" if self._program.instructions[operand].operator == KEPT else f"value_{operand}"


def _torch_outputs(x0: torch.Tensor, *others: object) -> tuple[torch.Tensor, ...]:
    expression = others[len(INPUTS) - 1 + len(_DRAWS)]
    assert isinstance(expression, str)
    try:
        assigned = parse(expression).outputs
    except ExpressionError:
        assigned = OUTPUTS
    return tuple(x0.new_empty(x0.shape if name in assigned else (0,)) for name in OUTPUTS)


OPERATOR = Operator(
    name="Pointwise",
    stem="pointwise",
    doc=(
        "Elementwise operators in one pass over memory. expression assigns the outputs, as in t = Sigmoid(x0); y0 = "
        "Mul(Mul(x0, t), x1): of inputs, numbers and names assigned before, by ONNX's operators Abs, Neg, Reciprocal, "
        "Sqrt, Exp, Log, Erf, Tanh, Sigmoid, Relu, Add, Sub, Mul, Div, Max and Min, the comparisons Equal, Less, "
        "LessOrEqual, Greater and GreaterOrEqual, Not, And and Or of what these give, Where, and Kept(), which is true "
        "where a dropout keeps the element. Max and Min take two arguments, and are NaN if one is. Computation is in "
        "float32: each operator rounds once, as its own node does, and results are rounded to T at the end."
    ),
    summary="(a chain of elementwise operators, forward or backward)",
    counterpart="a kernel that `torch.compile` makes",
    inputs=(
        Input("x0", "T", "Tensor of the shape of the results, rank 0 to 8."),
        *(
            Input(name, "T", "What expression reads by this name; it broadcasts to the shape of x0.", optional=True)
            for name in INPUTS[1:]
        ),
        Input("seed", "I", "Seed of the dropout, of one element. Needed where expression has Kept().", optional=True),
        Input("drawn", "I", "What is added to draw, of one element. Absent: 0.", optional=True),
    ),
    outputs=(
        Output("y0", "What expression assigns to y0, of the shape of x0.", in_place="x0"),
        *(
            Output(name, f"What expression assigns to {name}, of the shape of x0; (0) if it does not.")
            for name in OUTPUTS[1:]
        ),
    ),
    attributes=(
        Attribute(
            "expression",
            "y0 = x0",
            "Assignments with a semicolon between them, of at most 64 operators, and 16 results of them that are still "
            "to be read at a time. Every name but x0 that is given or assigned is read.",
        ),
        Attribute(
            "dropout_threshold",
            0,
            "Dropout: Kept() is false for elements whose 31 random bits are less, and true for others.",
        ),
        Attribute("draw", 0, "Number of the draw of random bits in a step, as gradfuse's exported steps count them."),
    ),
    constraints={"T": FLOAT_TYPES, "I": ("tensor(int64)",)},
    infer=_infer,
    choices=_choices,
    body=_body,
    torch_op=TorchOp(outputs=_torch_outputs),
)
