"""The expressions of Pointwise: what they say, as text and as a program.

    program   := statement { ";" statement } [ ";" ]
    statement := name "=" term
    term      := number | name | Operator "(" [ term { "," term } ] ")"
    name      := [a-z][a-z0-9_]*
    number    := [-]digits[.digits][e[+-]digits]

x0 to x7 are the inputs, y0 to y2 the outputs, and other names intermediate values. A name is assigned once, before it
is read. Operators are ONNX's, and take numbers or truth values as :data:`SIGNATURES` says. ``Kept()`` is true where
the dropout of the node keeps the element.

    >>> program = parse("t = Sigmoid(x0); y0 = Mul(Mul(x0,t),x1); y1 = t")
    >>> program.text()
    't = Sigmoid(x0); y0 = Mul(Mul(x0, t), x1); y1 = t'
    >>> program.inputs, program.outputs
    (('x0', 'x1'), ('y0', 'y1'))
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from decimal import Decimal
from functools import lru_cache
from typing import NamedTuple, TypeAlias

import numpy as np

from gradfuse.errors import ArgumentError

INPUTS = tuple(f"x{index}" for index in range(8))
OUTPUTS = tuple(f"y{index}" for index in range(3))
MOST_OPERATORS = 64
MOST_LIVE = 16
"""Results of operators that may have readers to come at once; outputs are read at the end."""

NUMBER, TRUTH = "a number", "a truth value"
KEPT = "Kept"


class Signature(NamedTuple):
    """What an operator takes and gives, each NUMBER or TRUTH."""

    arguments: tuple[str, ...]
    result: str


SIGNATURES: dict[str, Signature] = {
    **dict.fromkeys(
        ("Abs", "Neg", "Reciprocal", "Sqrt", "Exp", "Log", "Erf", "Tanh", "Sigmoid", "Relu"),
        Signature((NUMBER,), NUMBER),
    ),
    **dict.fromkeys(("Add", "Sub", "Mul", "Div", "Max", "Min"), Signature((NUMBER, NUMBER), NUMBER)),
    **dict.fromkeys(("Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual"), Signature((NUMBER, NUMBER), TRUTH)),
    "Not": Signature((TRUTH,), TRUTH),
    **dict.fromkeys(("And", "Or"), Signature((TRUTH, TRUTH), TRUTH)),
    "Where": Signature((TRUTH, NUMBER, NUMBER), NUMBER),
    KEPT: Signature((), TRUTH),
}
"""Every operator."""


class ExpressionError(ArgumentError):
    """A text or program that is no expression of Pointwise.

    Attributes:
        got, wanted: what is wrong, and what would not be.
    """

    def __init__(self, got: str, wanted: str) -> None:
        super().__init__(f"expression is {got}; expected {wanted}")
        self.got = got
        self.wanted = wanted


@dataclass(frozen=True)
class Number:
    """A number of float32; a value that is none is rounded to the nearest."""

    value: float

    def __post_init__(self) -> None:
        with np.errstate(over="ignore"):
            rounded = float(np.float32(self.value))
        if not math.isfinite(rounded):
            raise ExpressionError(f"'{self.value}'", "a finite number of float32")
        object.__setattr__(self, "value", rounded)

    # 0.0 and -0.0 are equal, and different numbers.
    def __eq__(self, other: object) -> bool:
        return isinstance(other, Number) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))

    def __str__(self) -> str:
        return str(np.float32(self.value))


@dataclass(frozen=True)
class Name:
    """The value of an input or of a statement before."""

    name: str

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Apply:
    """An operator of terms."""

    operator: str
    arguments: tuple[Term, ...] = ()

    def __str__(self) -> str:
        return f"{self.operator}({', '.join(map(str, self.arguments))})"


Term: TypeAlias = Number | Name | Apply


@dataclass(frozen=True)
class Statement:
    """Gives a name to the value of a term."""

    name: str
    term: Term

    def __str__(self) -> str:
        return f"{self.name} = {self.term}"


Operand: TypeAlias = Number | str | int
"""What an instruction takes: a number, an input by its name, or the result of an instruction by its index."""


class Instruction(NamedTuple):
    """One operator of an expression."""

    operator: str
    operands: tuple[Operand, ...]


@dataclass(frozen=True)
class Program:
    """An expression that keeps to the rules.

    Attributes:
        statements: in order.
        instructions: the operators in the order in which they are computed: arguments first, from left to right.
        results: output -> what it is.

    Raises:
        ExpressionError: a name, an operator or its arguments break a rule, or the program is too large.
    """

    statements: tuple[Statement, ...]
    instructions: tuple[Instruction, ...] = field(init=False, repr=False, compare=False)
    results: dict[str, Operand] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        flat = _Flattening()
        for statement in self.statements:
            flat.assign(statement)
        flat.finish(self.text())
        object.__setattr__(self, "instructions", tuple(flat.instructions))
        object.__setattr__(self, "results", flat.results)
        live = self.most_live
        if live > MOST_LIVE:
            raise ExpressionError(f"of {live} values at once", f"at most {MOST_LIVE}")

    def text(self) -> str:
        """The expression in canonical form: one space after each comma and semicolon and around each equals sign."""
        return "; ".join(map(str, self.statements))

    @property
    def inputs(self) -> tuple[str, ...]:
        """The inputs that it reads, x0 to x7."""
        read = {
            *(one for _, operands in self.instructions for one in operands if isinstance(one, str)),
            *(one for one in self.results.values() if isinstance(one, str)),
        }
        return tuple(name for name in INPUTS if name in read)

    @property
    def outputs(self) -> tuple[str, ...]:
        """The outputs that it assigns, y0 to y2."""
        return tuple(name for name in OUTPUTS if name in self.results)

    @property
    def draws(self) -> bool:
        """Whether it has Kept()."""
        return any(operator == KEPT for operator, _ in self.instructions)

    @property
    def most_live(self) -> int:
        """How many results of operators have readers to come, at most."""
        last = list(range(len(self.instructions)))
        for index, (_, operands) in enumerate(self.instructions):
            for operand in operands:
                if isinstance(operand, int):
                    last[operand] = index
        for result in self.results.values():
            if isinstance(result, int):
                last[result] = len(last)
        # The result of an operator may take the place of an argument that it is the last to read.
        return max(
            (1 + sum(last[before] > index for before in range(index)) for index in range(len(last))),
            default=0,
        )


class _Flattening:
    """The instructions of statements, and the check of the rules."""

    def __init__(self) -> None:
        self.instructions: list[Instruction] = []
        self.results: dict[str, Operand] = {}
        self._values: dict[str, tuple[Operand, str]] = {name: (name, NUMBER) for name in INPUTS}
        self._unread: dict[str, Statement] = {}
        self._operators = 0

    def assign(self, statement: Statement) -> None:
        name = statement.name
        if not _NAME.fullmatch(name):
            raise ExpressionError(_quoted(name), "a name of lower-case letters, digits and _")
        if name in INPUTS:
            raise ExpressionError(_quoted(statement), f"an assignment to another name, as {name} is an input")
        if name in self._values:
            raise ExpressionError(_quoted(statement), f"one assignment to {name}")
        value, kind = self._values[name] = self._value(statement.term)
        if name not in OUTPUTS:
            self._unread[name] = statement
            return
        if kind != NUMBER:
            raise ExpressionError(_quoted(statement), f"a number for the output {name}")
        self.results[name] = value

    def finish(self, text: str) -> None:
        if OUTPUTS[0] not in self.results:
            raise ExpressionError(_quoted(text), f"an assignment to {OUTPUTS[0]}")
        for name, statement in self._unread.items():
            raise ExpressionError(_quoted(statement), f"a reader of {name}")

    def _value(self, term: Term) -> tuple[Operand, str]:
        if isinstance(term, Number):
            return term, NUMBER
        if isinstance(term, Name):
            if term.name not in self._values:
                raise ExpressionError(_quoted(term), "a name that is assigned before it is read")
            self._unread.pop(term.name, None)
            return self._values[term.name]
        if term.operator not in SIGNATURES:
            raise ExpressionError(_quoted(term.operator), "an operator of Pointwise")
        kinds, result = SIGNATURES[term.operator]
        if len(term.arguments) != len(kinds):
            raise ExpressionError(_quoted(term), f"{len(kinds)} argument{'' if len(kinds) == 1 else 's'}")
        self._operators += 1
        if self._operators > MOST_OPERATORS:
            raise _too_many()
        operands = []
        for argument, wanted in zip(term.arguments, kinds, strict=True):
            operand, kind = self._value(argument)
            if kind != wanted:
                raise ExpressionError(_quoted(argument), f"{wanted} as argument of {term.operator}")
            operands.append(operand)
        self.instructions.append(Instruction(term.operator, tuple(operands)))
        return len(self.instructions) - 1, result


@lru_cache(1024)
def parse(text: str) -> Program:
    """Read an expression.

    Raises:
        ExpressionError: it is none, or breaks a rule of its names, operators or size.
    """
    return Program(tuple(_Parser(text).statements()))


_NAME = re.compile(r"[a-z][a-z0-9_]*")
_TOKEN = re.compile(
    r"[ \t\r\n]*(?:(?P<name>[a-z][a-z0-9_]*)|(?P<operator>[A-Z][A-Za-z]*)"
    r"|(?P<number>-?[0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?)|(?P<sign>[=;,()])|(?P<other>[^ \t\r\n])|(?P<end>$))"
)


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = ((found.lastgroup or "", found[found.lastgroup or ""]) for found in _TOKEN.finditer(text))
        self._depth = 0
        self._next()

    def statements(self) -> Iterator[Statement]:
        while True:
            name = self._take("name", "a name and '='")
            self._sign("=")
            yield Statement(name, self._term())
            if self._kind == "end":
                return
            self._sign(";", "';'")
            if self._kind == "end":
                return

    def _term(self) -> Term:
        kind, token = self._kind, self._token
        if kind not in ("name", "number", "operator"):
            raise self._error("a number, a name or an operator")
        self._next()
        if kind == "name":
            return Name(token)
        if kind == "number":
            return Number(_float32(token))
        # Deeper terms have more operators than are allowed.
        self._depth += 1
        if self._depth > MOST_OPERATORS:
            raise _too_many()
        self._sign("(")
        arguments = []
        while self._token != ")":
            arguments.append(self._term())
            if self._token != ")":
                self._sign(",", "',' or ')'")
                if self._token == ")":
                    raise self._error("a number, a name or an operator")
        self._next()
        self._depth -= 1
        return Apply(token, tuple(arguments))

    def _next(self) -> None:
        self._kind, self._token = next(self._tokens)

    def _take(self, kind: str, wanted: str) -> str:
        token = self._token
        if self._kind != kind:
            raise self._error(wanted)
        self._next()
        return token

    def _sign(self, sign: str, wanted: str = "") -> None:
        if self._token != sign:
            raise self._error(wanted or f"'{sign}'")
        self._next()

    def _error(self, wanted: str) -> ExpressionError:
        if self._kind == "end":
            return ExpressionError(_quoted(self._text), f"{wanted} at its end")
        return ExpressionError(_quoted(self._token), f"{wanted} there")


def _float32(text: str) -> float:
    """The number of float32 that is nearest to a decimal one; refuses those that are beyond the largest."""
    wide = float(text)
    if wide != 0 and math.isfinite(wide):
        # Rounding twice could go the wrong way from the middle of two numbers: the first time, go to an odd one.
        exact, rounded = Decimal(text), Decimal(wide)
        if exact != rounded and not int(np.float64(wide).view(np.int64)) % 2:
            wide = math.nextafter(wide, math.inf if exact > rounded else -math.inf)
    with np.errstate(over="ignore"):
        near = float(np.float32(wide))
    if not math.isfinite(near):
        raise ExpressionError(_quoted(text), "a number of float32")
    return near


def _too_many() -> ExpressionError:
    return ExpressionError(f"of more than {MOST_OPERATORS} operators", f"at most {MOST_OPERATORS}")


def _quoted(piece: object) -> str:
    text = str(piece)
    return f"'{text[:_LONGEST]}...'" if len(text) > _LONGEST else f"'{text}'"


_LONGEST = 64
