"""Functions of Python's numbers that code calls with sizes, as in `int(windows.shape[0] / (height / 7))`.

Python makes a number of its own of a dynamic size there, which would be a constant of the traced program: `int`,
`float`, `math.sqrt`, `[length] * items`. Where tracing finds that, the step is traced once more with such calls
rewritten, so that they take sizes; and numbers in tensors, as in `int(self.pointer)`. This module imports torch.
"""

from __future__ import annotations

import builtins
import contextlib
import dataclasses
import math
import re
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from types import CodeType
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from gradfuse import _torch_private as private
from gradfuse.export import explaining, rewriting
from gradfuse.export.chosen import Some, holds_some, tensor_of
from gradfuse.export.functions import around, functions_of, is_within
from gradfuse.export.rewriting import CannotSelectError
from gradfuse.export.torch_step import TorchStep
from gradfuse.export.traced_functions import Range

_Result = TypeVar("_Result")

_ROUNDS = 8
"""How often a step is traced at most, to find all functions that call such functions."""


@dataclasses.dataclass
class SizeNumbers:
    """The functions of a step whose calls take sizes.

    Attributes:
        codes: the code of each -> the code that replaces it.
        lines: the code of each -> the lines that are rewritten.
    """

    codes: dict[CodeType, CodeType] = dataclasses.field(default_factory=dict)
    lines: dict[CodeType, frozenset[int]] = dataclasses.field(default_factory=dict)

    def traced(self, step: TorchStep, sizes: explaining.Sizes, trace: Callable[[], _Result]) -> _Result:
        """Trace a step, again with more functions rewritten as long as a size becomes a constant in others."""
        for _ in range(_ROUNDS):
            known = len(sizes.lines)
            try:
                with self.installed(step):
                    result = trace()
            except (Exception, CannotSelectError) as error:
                # torch.export has no common base class for what it refuses.
                if not self._include(step, [*sizes.lines[known:], *explaining.lines_of(error)]):
                    raise
            else:
                if not self._include(step, sizes.lines[known:]):
                    return result
        with self.installed(step):
            return trace()

    @contextlib.contextmanager
    def installed(self, step: TorchStep) -> Iterator[None]:
        """Let the functions call what takes sizes."""
        functions = functions_of(self.codes, step)
        changed = [(one, code) for code in self.codes for one in functions[id(code)]]
        namespaces = [function.__globals__ for function, _ in changed]
        try:
            with called_in(namespaces):
                for function, code in changed:
                    function.__code__ = self.codes[code]
                yield
        finally:
            for function, code in changed:
                function.__code__ = code

    def _include(self, step: TorchStep, places: Sequence[tuple[CodeType, int]]) -> bool:
        """Rewrite the calls in lines of functions, which may be rewritten ones; return whether there are new ones."""
        found = False
        calls = [(self._original(code), line) for code, line in places]
        calls = [(old, line) for old, line in calls if line not in self.lines.get(old, ())]
        calls = [(old, line) for old, line in calls if _LINE.search(explaining.line_of(old, line))]
        outer = around([old for old, _ in calls], step)
        # That of a factory made its functions before, and that of a call makes them again.
        calls += [(outer[id(old)], line) for old, line in calls if id(old) in outer]
        functions = functions_of([old for old, _ in calls], step)
        for old, line in calls:
            lines = self.lines.get(old, frozenset())
            if line in lines or not functions[id(old)]:
                continue
            try:
                self.codes[old] = rewriting.with_numbers(old, lines | {line}, NAMES)
            except rewriting.CannotRewriteError:
                continue
            self.lines[old] = lines | {line}
            found = True
        return found

    def _original(self, code: CodeType) -> CodeType:
        """Return the code that was replaced by one, or by that around it; if none was, itself."""
        return next((old for old, new in self.codes.items() if is_within(code, new)), code)


@contextlib.contextmanager
def called_in(namespaces: Sequence[dict[str, Any]]) -> Iterator[None]:
    """Let rewritten functions with these globals call what takes sizes."""
    with contextlib.ExitStack() as installed:
        for namespace in namespaces:
            if rewriting.NUMBERS not in namespace:
                namespace[rewriting.NUMBERS] = Numbers
                installed.callback(namespace.pop, rewriting.NUMBERS)
        yield


@dataclasses.dataclass(frozen=True)
class _Repeated:
    """A list of one element as often as a size says, as an argument of a call that is rewritten."""

    element: Any
    count: Any


class Numbers:
    """What rewritten functions call."""

    @staticmethod
    def call(function: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a function, or what takes sizes in its place."""
        if function in _OF_ONE and len(args) == 1 and isinstance(args[0], Tensor):
            args = (args[0].item(),)
        if function is torch.from_numpy and isinstance(args[0], Tensor):
            # See `_arange`.
            return args[0]
        if function is builtins.len and isinstance(args[0], Tensor) and args[0].dim():
            # In packages other than those of module and loss.
            return args[0].shape[0]
        depends = any(map(_depends, (*args, *kwargs.values())))
        instead = _INSTEAD.get(function) if depends and isinstance(function, Hashable) else None
        if instead is not None:
            return instead(*args, **kwargs)
        return function(*map(_listed, args), **{name: _listed(value) for name, value in kwargs.items()})

    @staticmethod
    def times(left: Any, right: Any) -> Any:
        """Multiply a list and a number."""
        for listed, count in ((left, right), (right, left)):
            if type(listed) is list and len(listed) == 1 and isinstance(count, torch.SymInt):
                return _Repeated(listed[0], count)
        return left * right


def _listed(value: Any) -> Any:
    """Return the list that a repeated element stands for, which makes a constant of the size."""
    return [value.element] * value.count if isinstance(value, _Repeated) else value


def _depends(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_depends, value))
    return isinstance(value, (_Repeated, Range, Some)) or private.is_symbolic(value)


def _int(value: Any) -> Any:
    if not isinstance(value, torch.SymFloat):
        return value if isinstance(value, torch.SymInt) else int(value)
    if not private.known_true(value >= 0):
        return math.trunc(value)
    whole = _whole(value)
    return math.floor(value) if whole is None else whole


def _whole(value: torch.SymFloat) -> torch.SymInt | None:
    """Return the integer part of a number that is not below 0 as a quotient of sizes; None: floats may be rounded."""
    import sympy  # type: ignore[import-untyped]

    quotient, _ = _as_quotient(private.expression(value))
    if quotient is None:
        return None
    numerator, divisor = sympy.fraction(sympy.together(quotient))
    if not divisor.is_Integer or not all(one.is_integer for one in numerator.free_symbols):
        return None
    return private.whole_part(value, sympy.expand(numerator), divisor)


def _as_quotient(expression: Any) -> tuple[Any, bool]:
    """Return an expression of floats as one of fractions, and whether floats are exact; None: they may round it up.

    A quotient of exact numbers, divided again or not, is rounded to no integer that it is not.
    """
    import sympy

    if expression.is_Integer or expression.is_Symbol:
        return expression, True
    if expression.is_Float:
        fraction = sympy.Rational(*float(expression).as_integer_ratio())
        return (fraction, True) if fraction.q <= _EXACT_FRACTION else (None, False)
    parts, exact = zip(*map(_as_quotient, expression.args), strict=True) if expression.args else ((None,), (False,))
    name = type(expression).__name__
    if None in parts:
        return None, False
    if name == "ToFloat":
        return parts[0], exact[0]
    if name in ("FloatTrueDiv", "IntTrueDiv") and exact[1]:
        of_two = parts[1].is_Rational and parts[1] > 0 and not (parts[1].p & (parts[1].p - 1))
        return parts[0] / parts[1], exact[0] and of_two
    if all(exact) and (expression.is_Add or expression.is_Mul):
        return expression.func(*parts), True
    return None, False


_EXACT_FRACTION = 1 << 16


def _of(function: Callable[[Tensor], Tensor]) -> Callable[[Any], Tensor]:
    """Return a function of Python's numbers as one of tensors, whose results count as numbers in arithmetic."""
    return lambda value: function(torch.scalar_tensor(value, dtype=torch.float64))


def _tensor(values: Any, **settings: Any) -> Tensor:
    """Make a tensor of a list."""
    if isinstance(values, Range):
        return values.places().to(**settings)
    if holds_some(values):
        return tensor_of(values, **settings)
    if not isinstance(values, _Repeated):
        return torch.tensor(values, **settings)
    one = torch.tensor(values.element, **settings)
    return one.expand(values.count, *one.shape).clone()


def _of_type(dtype: torch.dtype | None) -> Callable[..., Tensor]:
    """Return what makes a tensor of a type, of a list or of a shape."""

    def make(*values: Any) -> Tensor:
        wanted = dtype or torch.get_default_dtype()
        if len(values) == 1 and isinstance(values[0], (list, tuple, Range, _Repeated)):
            return _tensor(values[0], dtype=wanted)
        return torch.empty(values, dtype=wanted)

    return make


def _range(*bounds: Any) -> Any:
    return Range(*bounds) if len(bounds) == 1 else range(*bounds)


def _arange(*bounds: Any, **settings: Any) -> Any:
    """Return numpy's numbers as a tensor, if they are of its default types."""
    if settings:
        return np.arange(*bounds, **settings)
    whole = all(isinstance(one, (int, torch.SymInt)) for one in bounds)
    return torch.arange(*bounds, dtype=torch.int64 if whole else torch.float64)


def _linspace(start: Any, stop: Any, num: Any = 50, **settings: Any) -> Any:
    """Likewise."""
    if settings:
        return np.linspace(start, stop, num, **settings)
    return torch.linspace(start, stop, num, dtype=torch.float64)


def _cat(tensors: Any, dim: int = 0) -> Tensor:
    """Join tensors, or one as often as a size says."""
    if not isinstance(tensors, _Repeated):
        return torch.cat(tensors, dim)
    one = tensors.element
    return one.repeat(*(tensors.count if axis == dim % one.dim() else 1 for axis in range(one.dim())))  # type: ignore[no-any-return]


def _stack(tensors: Any, dim: int = 0) -> Tensor:
    """Likewise along a new axis."""
    if not isinstance(tensors, _Repeated):
        return torch.stack(tensors, dim)
    return _cat(_Repeated(tensors.element.unsqueeze(dim), tensors.count), dim)


_UNARY: Mapping[str, Callable[[Tensor], Tensor]] = {
    name: getattr(torch, of_torch)
    for name, of_torch in {
        **dict.fromkeys(("arcsin", "asin"), "asin"),
        **dict.fromkeys(("arccos", "acos"), "acos"),
        **dict.fromkeys(("arctan", "atan"), "atan"),
        **{
            name: name
            for name in "log log2 log10 log1p exp exp2 expm1 sin cos tan sinh cosh tanh erf erfc lgamma".split()
        },
        "fabs": "abs",
        "radians": "deg2rad",
        "degrees": "rad2deg",
    }.items()
}
"""Functions of math and numpy of one number -> those of torch."""

_OF_ONE = (
    *(int, float, math.sqrt, math.ceil, math.floor, math.trunc),
    *(getattr(math, name) for name in _UNARY if hasattr(math, name)),
)
"""Functions of one number, which may be in a tensor."""


def _log(value: Any, base: Any = math.e) -> Tensor:
    logarithm = _of(torch.log)
    return logarithm(value) if base == math.e else logarithm(value) / logarithm(base)


def _of_two(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Any, Any], Tensor]:
    """Return a function of two of Python's numbers, likewise."""
    return lambda a, b: function(*(torch.scalar_tensor(one, dtype=torch.float64) for one in (a, b)))


def _hypotenuse(a: Tensor, b: Tensor) -> Tensor:
    return (a * a + b * b).sqrt()


_INSTEAD: Mapping[Any, Callable[..., Any]] = {
    int: _int,
    float: torch.sym_float,
    divmod: lambda a, b: (a // b, a % b),
    np.ceil: math.ceil,
    np.floor: math.floor,
    np.trunc: math.trunc,
    np.prod: math.prod,
    np.minimum: torch.sym_min,
    np.maximum: torch.sym_max,
    **dict.fromkeys((np.round, np.rint, np.around), round),
    **dict.fromkeys((math.sqrt, np.sqrt), lambda value: value**0.5),
    math.isqrt: lambda value: _int(value**0.5),
    **{
        getattr(module, name): _of(function)
        for name, function in _UNARY.items()
        for module in (math, np)
        if hasattr(module, name)
    },
    math.log: _log,
    **dict.fromkeys((math.atan2, np.arctan2), _of_two(torch.atan2)),
    **dict.fromkeys((math.fmod, np.fmod), _of_two(torch.fmod)),
    **dict.fromkeys((math.hypot, np.hypot), _of_two(_hypotenuse)),
    range: _range,
    np.arange: _arange,
    np.linspace: _linspace,
    torch.tensor: _tensor,
    torch.Tensor: _of_type(None),
    torch.FloatTensor: _of_type(torch.float32),
    torch.DoubleTensor: _of_type(torch.float64),
    torch.IntTensor: _of_type(torch.int32),
    torch.LongTensor: _of_type(torch.int64),
    torch.cat: _cat,
    torch.stack: _stack,
}

NAMES = frozenset(one.__name__ for one in (*_OF_ONE, *_INSTEAD)) | {"around", "round", "from_numpy", "len"}
"""The last names of the functions whose calls are rewritten."""

_LINE = re.compile(rf"\b({'|'.join(sorted(NAMES))})\(")
