"""Explains torch's exceptions to a user: what is wrong, where in the code, and what to do.

Torch's messages are for its own developers: log settings, graphs, frames of its C++ library. This module imports torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import dis
import functools
import inspect
import itertools
import linecache
import os
import re
import sysconfig
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import BuiltinFunctionType, CodeType, FrameType, MethodType
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch.export import ExportedProgram
from torch.fx import Node
from torch.overrides import TorchFunctionMode

from gradfuse import _torch_private as private
from gradfuse.errors import ExportError, cut, one_line
from gradfuse.export.reporting import WHO
from gradfuse.export.size_terms import term_of
from gradfuse.training.batch_checks import SizeCheck, SizeOf, Term

if TYPE_CHECKING:
    from gradfuse.export.dynamic_shapes import DynamicShapes
    from gradfuse.export.other_sizes import OtherSizes
    from gradfuse.export.torch_step import TorchStep

_PACKAGES = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(os.path.dirname(__file__)) + os.sep)
_STANDARD_LIBRARY = sysconfig.get_paths()["stdlib"] + os.sep
_INSTALLED = f"site-packages{os.sep}"
_TOOLS = frozenset(
    ("sympy", "mpmath", "functorch", "torchgen", "numpy", "onnx", "onnx_ir", "onnxscript", "onnxruntime")
)
"""What torch and gradfuse are made with; of other installed packages, such as those of models, lines are named."""

_NOTES = re.compile(
    r"""
    For\ more\ information | For\ extended\ logs | If\ you\ suspect | \(unhinted: | \(Size-like\ symbols: | Caused\ by:
    | Hint:\ enable\ anomaly | Exception\ raised\ from | Suggested\ fixes | The\ following\ call\ raised
    | The\ error\ above\ occurred | User\ Stack | C\+\+\ stack | Traceback\ \(most | \bgraph\(\): | def\ forward\(
    | To\ fix\ the\ error,\ insert | Please\ convert\ all\ Tensors | (?:from\ user\ code:) | Set\ TORCHDYNAMO_VERBOSE
    """,
    re.VERBOSE,
)
"""Where the part of a message begins that does not help users."""

_UNBACKED = "Pending unbacked symbols"
_UNHASHABLE = "unhashable type: non-nested SymInt"
_WITHOUT_DATA = "The tensor has a non-zero number of elements, but its data is not allocated yet"
"""How torch's messages about data-dependent sizes begin."""
_UNSEEN = "We found a fake tensor in the exported program constant's list"
"""How torch's message about what it has not traced begins."""

_CONSTANT = re.compile(
    r"marked L\['(inputs|targets)'\]\[(\d+)\]\.size\(\)\[(\d+)\] as dynamic but your code specialized it to be a "
    r"constant \((\d+)\)"
)
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (.+)')
_AXIS = re.compile(r"L\['(inputs|targets)'\]\[(\d+)\]\.size\(\)\[(\d+)\]")
_SQUEEZES = [getattr(torch.ops.aten.squeeze, overload) for overload in ("default", "dim", "dims")]
_SLICES = ("_compute_slice_index", "slice_forward")
_SLICING = (*_SLICES, "split")
"""Functions of torch whose conditions on sizes are attributed to the code that calls them."""
_VERIFYING = ("_verify_batch_size", "_verify_spatial_size")
"""Functions of torch that raise where a normalization is of one value."""
_OPERATORS = os.path.join("torch", "_ops.py")
"""Where operators in C++ are called, which ask for remainders of sizes to compute something else, or to raise."""
_RUNNERS = tuple(os.path.join(os.path.dirname(__file__), name) for name in ("torch_step.py", "evaluation.py"))
"""The modules that call the user's code."""
_COMPARED = os.path.join(os.path.dirname(__file__), "host_draws.py"), "spans"
"""The function that calls one of the user, to compare it with what stands in its place."""


def reason(error: BaseException) -> str:
    """Return torch's message, in one line, and the place in the user's code that it is about."""
    text = str(error)
    if text.startswith(_UNBACKED):
        where = _in(place(error))
        return f"the values of a tensor decide where something begins or ends{where}; expected shapes to decide that"
    if text == _UNHASHABLE:
        return (
            f"a size that may vary is the key of a dictionary or of functools.lru_cache{_in(place(error))}; expected "
            "what is kept under it to be computed each time, or this axis static"
        )
    if text.startswith(_WITHOUT_DATA):
        return (
            f"numbers are taken out of tensors, as by an index that is a tuple or list of tensors{_in(place(error))}; "
            "expected one tensor of indices for each axis, as of torch.stack"
        )
    if text.startswith(_UNSEEN):
        return (
            f"a tensor is computed where tracing does not follow{_in(place(error))}, as by autograd.grad in a hook of "
            "a tensor, or kept from an earlier call; expected the step to compute all that it uses"
        )
    found = _NOTES.search(text)
    kept = cut(text[: found.start()]) if found is not None else ""
    return f"{(kept or one_line(error)).rstrip(' .;:')}{_in(place(error))}"


def place(error: BaseException) -> str | None:
    """Return the place in the user's code that an exception came from: its last frame outside our libraries."""
    found = _last_line(error)
    return None if found is None else text_of(*found)


def source_line(error: BaseException) -> str:
    """Return the line of the user's code that an exception came from; an empty one if it is not known."""
    return next((line_of(*found) for found in lines_of(error)), "")


def line_of(code: CodeType, line: int) -> str:
    """Return a line of the file of a function."""
    return linecache.getline(code.co_filename, line)


def lines_of(error: BaseException) -> list[tuple[CodeType, int]]:
    """Return the place that an exception came from, as a function and a line; none if it is not known."""
    found = _last_line(error)
    return [] if found is None else [found]


def _last_line(error: BaseException) -> tuple[CodeType, int] | None:
    chain: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in chain:
        chain.append(cause)
        cause = cause.__cause__ or cause.__context__
    for one in chain:
        found = None
        traceback = one.__traceback__
        while traceback is not None:
            code = traceback.tb_frame.f_code
            if is_users(code.co_filename):
                found = code, traceback.tb_lineno
            traceback = traceback.tb_next
        if found is not None:
            return found
    return None


def is_users(filename: str) -> bool:
    """Whether code is neither torch's nor gradfuse's nor of what they are made with; libraries of models are users'."""
    if filename.startswith(_PACKAGES) or filename.startswith("<"):
        return False
    _, installed, inside = filename.rpartition(_INSTALLED)
    if installed:
        return inside.split(os.sep)[0] not in _TOOLS
    return not filename.startswith(_STANDARD_LIBRARY)


def is_raised_by_user(error: BaseException) -> bool:
    """Whether a statement `raise` or `assert` of the user's code raised an error."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    if last is None or not is_users(last.tb_frame.f_code.co_filename):
        return False
    return last.tb_frame.f_code.co_code[last.tb_lasti] == dis.opmap["RAISE_VARARGS"]


def text_of(code: CodeType, line: int) -> str:
    """Return how a place in code is written in messages."""
    # Python 3.10 has none.
    name = getattr(code, "co_qualname", code.co_name)
    return f"{name} ({os.path.basename(code.co_filename)}:{line})"


def of_callable(function: Any) -> str:
    """Return how something that can be called is written in messages: with its place, if it is made of code."""
    code = code_of(function)
    if isinstance(code, CodeType) and is_users(code.co_filename):
        return text_of(code, code.co_firstlineno)
    return str(getattr(function, "__name__", type(function).__name__))


def code_of(function: Any) -> Any:
    """Return the code that something that can be called is made of; if there is none, what is called."""
    while isinstance(function, functools.partial):
        function = function.func
    if not isinstance(function, (MethodType, BuiltinFunctionType)) and not hasattr(
        inspect.unwrap(function), "__code__"
    ):
        function = type(function).__call__
    return getattr(inspect.unwrap(getattr(function, "__func__", function)), "__code__", function)


def is_asked_by_code(condition: private.SizeCondition) -> bool:
    """Whether the user's code decides by a condition on sizes, or calls what does so; else torch asks for itself."""
    if is_users(condition.filename) or condition.function in _SLICING or condition.is_specialised:
        return True
    return condition.filename.endswith(_OPERATORS) and condition.has_remainder


class Sizes:
    """Records where code reads sizes, and turns a dynamic one into a constant, for messages.

    Args:
        general: whether a step may be traced with a longer batch, where code treats lengths like that of the batch as
            multiples of a number.

    Attributes:
        places: where sizes are made constants, in the order in which they were met.
        lines: where they are made constants or decide, as functions and lines.
        made_general: whether a step was traced so.
        others: sizes at which a step is compared with PyTorch, too.
        assumed: what was taken to be so of sizes when the step was traced.
    """

    def __init__(self, *, general: bool = True) -> None:
        self.general = general
        self.made_general = False
        self.others: list[OtherSizes] = []
        self.assumed = Assumed()
        self.places: list[str] = []
        self.lines: list[tuple[CodeType, int]] = []
        # With the location itself, so that no other gets its id.
        self._asked: dict[int, tuple[Any, str]] = {}
        self._told: set[str] = set()
        # By what knows its symbols: a condition that the user's code decides by -> the place; and one at which a
        # function of torch raises -> what it then says.
        self._decided: dict[int, tuple[Any, dict[Any, str], dict[Any, str]]] = {}

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        def note() -> None:
            where = current_line()
            if where is not None:
                self.places.append(text_of(*where))
                self.lines.append(where)

        locations: list[Any] = []

        def note_asked(location: Any) -> None:
            locations.append(location)
            frame = _deciding()
            if frame is not None and is_users(frame.f_code.co_filename):
                private.set_place(location, frame)
            where = current_line()
            if where is not None:
                self._asked[id(location)] = location, text_of(*where)
                self.lines.append(where)

        def note_decided(condition: Any, environment: Any) -> None:
            _, places, raising = self._decided.setdefault(id(environment), (environment, {}, {}))
            frame = _deciding()
            if frame is None:
                return
            if is_users(frame.f_code.co_filename):
                where = None if condition in places else current_line()
                if where is not None:
                    places[condition] = text_of(*where)
            elif frame.f_code.co_name in _VERIFYING and frame.f_back is not None:
                name = frame.f_back.f_code.co_name.replace("_norm", " normalisation")
                raising[condition] = f"{name} of one value per channel, expected more"

        watched = private.when_a_size_becomes_constant(note), private.when_sizes_are_asked_for(note_asked)
        with watched[0], watched[1], private.when_a_condition_is_decided(note_decided), _Failing(locations):
            yield

    def explain(self, step: TorchStep, error: BaseException) -> str | None:
        """Return the axis of the batch that cannot vary, and why; None if an exception is not about that."""
        found = _CONSTANT.search(str(error))
        if found is None:
            return None
        return self._text(_names(step, found[1])[int(found[2])], int(found[3]), int(found[4]))

    def explain_constants(self, step: TorchStep, program: ExportedProgram, shapes: DynamicShapes) -> str | None:
        """Return the dynamic axis of the batch that a traced program made static; None: there is none."""
        values = {node.name: node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"}
        given = list(program.graph_signature.user_inputs)
        tensors = given[len(step.state) : len(step.state) + len(step.batch)]
        for name, placeholder in zip(step.batch, tensors, strict=True):
            for axis in shapes.names.get(name, {}):
                size = values[placeholder].shape[axis]
                if isinstance(size, int) and (name, axis) not in shapes.automatic:
                    return self._text(name, axis, size)
        for source, location, filename, line, function in private.sizes_that_stay(program):
            found = _AXIS.search(source)
            # Torch's own functions ask for what they are given, as the size of a window.
            _, place = self._asked.get(id(location), (None, None))
            if is_users(filename):
                place = f"{function} ({os.path.basename(filename)}:{line})"
            if found is not None and place is not None and function not in _SLICING:
                name, axis = _names(step, found[1])[int(found[2])], int(found[3])
                self.places.insert(0, place)
                return self._text(name, axis, step.batch[name].shape[axis])
        return None

    def of_multiples(self, step: TorchStep, program: ExportedProgram, shapes: DynamicShapes) -> set[str]:
        """Return the names of axes whose sizes code assumes to be multiples of a number, as they are in the batch."""
        found = set()
        for condition, axes in self._conditions(step, program):
            names = {shapes.names.get(name, {}).get(axis) for name, axis in axes.values()}
            name = names.pop()
            if name is not None and not names and _is_of_blocks(step, condition, axes, 1) and _is_rare(condition):
                found.add(name)
        return found

    def is_general(self, step: TorchStep, program: ExportedProgram) -> bool:
        """Whether what tracing a longer batch assumed of sizes also holds in the batch, except for multiples."""
        return not any(
            condition.holds({symbol: step.batch[name].shape[axis] for symbol, (name, axis) in axes.items()})
            is _is_of_blocks(step, condition, axes, 0)
            for condition, axes in self._conditions(step, program)
        )

    def _conditions(
        self, step: TorchStep, program: ExportedProgram
    ) -> Iterator[tuple[private.SizeCondition, dict[str, tuple[str, int]]]]:
        """Yield the conditions on sizes in the user's code, and the axes of their symbols."""
        for condition in private.conditions_on_sizes(program):
            if is_asked_by_code(condition):
                axes = {symbol: _axis(step, source) for symbol, source in condition.sources.items()}
                if None not in axes.values():
                    yield condition, {symbol: axis for symbol, axis in axes.items() if axis is not None}

    def _of_several(self, step: TorchStep, program: ExportedProgram, shapes: DynamicShapes) -> Iterator[Assumption]:
        """Yield that dimensions are at least 2 of which code asks what is so from there on, but not at 1."""
        environment = private.shape_environment(program)
        _, places, _ = self._decided.get(id(environment), (None, {}, {}))
        for expression, place in (places | _squeezed(program)).items():
            axes = _axes_in(step, environment, expression)
            if not axes:
                continue
            condition = private.SizeCondition({}, expression, None, "", 0, "")
            given = {symbol: step.batch[axis[0]].shape[axis[1]] for symbol, axis in axes.items()}
            labels = {symbol: shapes.names.get(axis[0], {}).get(axis[1]) for symbol, axis in axes.items()}
            for label in dict.fromkeys(labels.values()):
                same = [symbol for symbol, one in labels.items() if one == label]
                at = {size: condition.holds(given | dict.fromkeys(same, size)) for size in (1, *_SOME)}
                axis = axes[same[0]]
                if label and at.pop(1) not in at.values() and len({*at.values()}) == 1:
                    assumed = _asked_by(_in_range(axis, _SMALLEST, None), place)
                    yield dataclasses.replace(assumed, dimension=label, unlike=(1,))

    def _raising(self, step: TorchStep, program: ExportedProgram) -> Iterator[SizeCheck]:
        """Yield that conditions at which functions of torch raise do not hold."""
        environment = private.shape_environment(program)
        _, _, raising = self._decided.get(id(environment), (None, {}, {}))
        for expression, wanted in raising.items():
            sizes = {symbol: SizeOf(*axis) for symbol, axis in _axes_in(step, environment, expression).items()}
            term = term_of(expression, sizes) if sizes else None
            if term is not None:
                yield SizeCheck(Term("Not", (term,)), wanted)

    def warn(self, step: TorchStep, program: ExportedProgram, shapes: DynamicShapes) -> Assumed:
        """Return what was assumed of sizes from the batch, because code tests it; warn the user of what is certain."""
        multiples = _multiples(step, program)
        found = list(multiples.values())
        for condition, axes in self._conditions(step, program):
            _, place = self._asked.get(id(condition.location), (None, None))
            if place is None or any((axis, condition.line) in multiples for axis in axes.values()):
                continue
            assumed = _assumed(step, shapes, condition, axes)
            if assumed is not None:
                found.append(_asked_by(assumed, place))
        found += self._of_several(step, program, shapes)
        certain = [one for one in found if not one.unlike]
        for one in certain:
            self.tell(one.text)
        checks = [one.check for one in certain if one.check is not None]
        return Assumed([*checks, *self._raising(step, program)], [one for one in found if one.unlike])

    def tell(self, text: str) -> None:
        """Warn the user of something once."""
        if text not in self._told:
            self._told.add(text)
            warnings.warn(f"{WHO}: {text}", stacklevel=6)

    def _text(self, name: str, axis: int, size: int) -> str:
        why = f", by {self.places[0]}" if self.places else ""
        return (
            f"axis {axis} of {name!r} has size {size} in all of the traced step{why}, and cannot vary as "
            "dynamic_shapes says; expected code for any size, or this axis static"
        )


def _is_of_blocks(
    step: TorchStep, condition: private.SizeCondition, axes: Mapping[str, tuple[str, int]], more: int
) -> bool:
    """Whether a condition on a remainder does not hold for sizes that are larger than those of the batch by `more`."""
    sizes = {symbol: step.batch[name].shape[axis] + more for symbol, (name, axis) in axes.items()}
    return "%" in condition.text(dict.fromkeys(axes, "size")) and not condition.holds(sizes)


def _is_rare(condition: private.SizeCondition) -> bool:
    """Whether a condition holds for fewer than half of all sizes, or for every other one by an equation."""
    sizes = range(_SMALLEST, _NEAR)
    others = len(sizes) - 2 * sum(condition.holds(dict.fromkeys(condition.sources, size)) for size in sizes)
    return others > 0 or (others == 0 and "==" in condition.text(dict.fromkeys(condition.sources, "size")))


@dataclasses.dataclass(frozen=True)
class Assumption:
    """What was assumed of sizes.

    Attributes:
        text: it, in a warning.
        term: it, computed from sizes; None where it is more than arithmetic.
        wanted: it, in the error where it does not hold.
        dimension: the name of a dimension, if it is about one alone.
        unlike: sizes of this at which it does not hold, if a model may be right there all the same.
    """

    text: str
    term: Term | None
    wanted: str
    dimension: str = ""
    unlike: tuple[int, ...] = ()

    @property
    def check(self) -> SizeCheck | None:
        return None if self.term is None else SizeCheck(self.term, self.wanted)


@dataclasses.dataclass(frozen=True)
class Assumed:
    """What was assumed of sizes.

    Attributes:
        checks: what must hold.
        uncertain: what must hold unless a model is right at the sizes that are unlike it.
    """

    checks: Sequence[SizeCheck] = ()
    uncertain: Sequence[Assumption] = ()


def filled(axes: Sequence[tuple[str, int]]) -> SizeCheck:
    """Return that of axes of the batch not all are of size 0, as a model is not right there."""
    sizes = [Term("GreaterOrEqual", (SizeOf(*axis), 1)) for axis in axes]
    term = functools.reduce(lambda left, right: Term("Or", (left, right)), sizes)
    named = " or ".join(f"axis {axis} of {name!r}" for name, axis in axes)
    return SizeCheck(term, f"{named} out of range, expected at least 1")


def not_single(axis: tuple[str, int]) -> SizeCheck:
    """Return that an axis is not of size 1, as a model is not right there."""
    named = f"axis {axis[1]} of {axis[0]!r}"
    return SizeCheck(Term("Not", (Term("Equal", (SizeOf(*axis), 1)),)), f"{named} out of range, expected at least 2")


def _asked_by(assumption: Assumption, place: str) -> Assumption:
    return dataclasses.replace(assumption, text=f"{assumption.text}, as in this batch, since {place} asks for it")


def _assumed(
    step: TorchStep, shapes: DynamicShapes, condition: private.SizeCondition, axes: Mapping[str, tuple[str, int]]
) -> Assumption | None:
    """Return what a condition says about the axes of its symbols; None: nothing."""
    sizes = {symbol: step.batch[name].shape[axis] for symbol, (name, axis) in axes.items()}
    # Axes of one name have one size.
    labels = {symbol: (shapes.names.get(name, {}).get(axis), sizes[symbol]) for symbol, (name, axis) in axes.items()}
    varied = list(dict.fromkeys(labels.values()))

    def holds(values: Sequence[int]) -> bool:
        return condition.holds({symbol: values[varied.index(label)] for symbol, label in labels.items()})

    term = term_of(condition.expression, {symbol: SizeOf(name, axis) for symbol, (name, axis) in axes.items()})
    symbols = [[symbol for symbol, one in labels.items() if one == label] for label in varied]
    if len(varied) > 1:
        some = itertools.product(_SOME, repeat=len(varied))
        if all(map(holds, itertools.chain(some, _special_pairs(condition, symbols)))):
            return None
        written = condition.text({symbol: f"{name}.shape[{axis}]" for symbol, (name, axis) in axes.items()})
        return Assumption(f"{written} is taken to hold", term, f"sizes out of range, expected {written}")
    name, axis = next(iter(axes.values()))
    written = condition.text(dict.fromkeys(axes, "size"))
    if "%" in written and (not holds([varied[0][1]]) or all(holds([size]) for size in (*range(2, _NEAR), *_SOME))):
        # The batch itself is of the other kind, and is compared with PyTorch.
        return None
    found = None if "%" in written else _range(lambda size: holds([size]), varied[0][1])
    if found is not None:
        bounds = range(found[0] or _SMALLEST, (found[1] or _FAR) + 1)
        # As 100, where `size == 100` is asked for.
        if not all(holds([size]) for size in condition.special() if size in bounds):
            found = None
    if found == (None, None):
        return None
    wrong = f"axis {axis} of {name!r} out of range, expected"
    if found is None:
        text, wanted = f"{written} is taken to hold for axis {axis} of {name!r}", f"{wrong} a size for which {written}"
        label, size = varied[0]
        # Code that pads to whole blocks, traced with others, is right for both: what holds for most sizes is uncertain.
        others = (*range(size + 1, size + _NEAR), *range(2, size)) if "%" in written and not _is_rare(condition) else ()
        unlike = tuple(itertools.islice((one for one in others if not holds([one])), _UNLIKE)) if label else ()
        return Assumption(text, term, wanted, label or "", unlike)
    least, most = found
    if condition.function in _SLICES and condition.is_strict:
        # Up to its own end, a slice is all that there is.
        least, most = least and least - 1, most and most + 1
    return _in_range((name, axis), least, most)


def _special_pairs(condition: private.SizeCondition, symbols: Sequence[Sequence[str]]) -> Iterator[list[int]]:
    """Yield sizes of two dimensions and more at which a condition may be otherwise than at others."""
    for index in range(len(symbols)):
        for others in itertools.product(_SOME[:_FEW_SIZES], repeat=len(symbols) - 1):
            sizes = [*others[:index], 0, *others[index:]]
            known = {one: size for group, size in zip(symbols, sizes, strict=True) for one in group if size}
            for size in condition.special(known):
                yield [size if at == index else one for at, one in enumerate(sizes)]


def _in_range(axis: tuple[str, int], least: int | None, most: int | None) -> Assumption:
    size, bounds = SizeOf(*axis), []
    if least:
        bounds.append((f"at least {least}", Term("GreaterOrEqual", (size, least))))
    if most:
        bounds.append((f"at most {most}", Term("LessOrEqual", (size, most))))
    words = " and ".join(text for text, _ in bounds)
    term = functools.reduce(lambda left, right: Term("And", (left, right)), (term for _, term in bounds))
    named = f"axis {axis[1]} of {axis[0]!r}"
    return Assumption(f"{named} is taken to be {words}", term, f"{named} out of range, expected {words}")


def _names(step: TorchStep, which: str) -> tuple[str, ...]:
    return step.input_names if which == "inputs" else step.target_names


def _multiples(step: TorchStep, program: ExportedProgram) -> dict[tuple[tuple[str, int], int], Assumption]:
    """Return what was assumed of axes, to be multiples of a number: by the tensor and axis, and the line."""
    found = {}
    for source, number, filename, line, function in private.assumed_multiples(program):
        axis = _axis(step, source)
        if axis is not None and is_users(filename):
            place = f"{function} ({os.path.basename(filename)}:{line})"
            text = (
                f"axis {axis[1]} of {axis[0]!r} is taken to be a multiple of {number}, as in this batch, since {place} "
                "asks for it; pad other batches to one, or export with a batch that is not one"
            )
            term = Term("Equal", (Term("Mod", (SizeOf(*axis), number)), 0))
            wanted = f"axis {axis[1]} of {axis[0]!r} out of range, expected a multiple of {number}"
            found[axis, line] = Assumption(text, term, wanted)
    return found


def _axes_in(step: TorchStep, environment: Any, expression: Any) -> dict[str, tuple[str, int]]:
    """Return the axes of the batch that the symbols of an expression are the sizes of; none if one is anything else."""
    found: dict[str, tuple[str, int]] = {}
    for symbol in expression.free_symbols:
        sources = private.sources_of(environment, symbol)
        axis = _axis(step, sources[0]) if sources else None
        if axis is None:
            return {}
        found[str(symbol)] = axis
    return found


def _axis(step: TorchStep, source: str) -> tuple[str, int] | None:
    """Return the tensor of the batch and its axis that a source of torch.export names."""
    found = _AXIS.search(source)
    return None if found is None else (_names(step, found[1])[int(found[2])], int(found[3]))


_SMALLEST, _NEAR, _FAR = 2, 64, 2**24
"""torch.export traces sizes from 2 on; conditions are tried for all sizes that are near, and for some far ones."""
_SOME = (2, 3, 5, 8, 64, 513, 4097)
_FEW_SIZES = 4
_UNLIKE = 3
"""At how many sizes for which a condition does not hold a model is tried."""


def _range(holds: Callable[[int], bool], size: int) -> tuple[int | None, int | None] | None:
    """Return the least and the largest size around one for which a condition holds; None: no bound was found.

    Returns:
        None if the condition does not hold in one range alone.
    """
    least, most = size, size
    while least > _SMALLEST and holds(least - 1):
        least -= 1
    while most < size + _NEAR and holds(most + 1):
        most += 1
    if most == size + _NEAR:
        outside = most
        while outside < _FAR and holds(outside):
            most, outside = outside, 2 * outside
        if outside >= _FAR:
            most = _FAR
        while most < _FAR and outside - most > 1:
            middle = (most + outside) // 2
            most, outside = (middle, outside) if holds(middle) else (most, middle)
    others = (*range(_SMALLEST, least - 1), *(range(most + 2, most + _NEAR) if most < _FAR else ()))
    if any(map(holds, others)):
        return None
    return None if least == _SMALLEST else least, None if most == _FAR else most


class _Watching(private.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Note where code calls an operator first.

    Attributes:
        place: where; None if it does not.
    """

    def __init__(self, operator: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.place: str | None = None
        self._operator = operator

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.place is None and str(func) == self._operator:
            self.place = current_place()
        return func(*args, **(kwargs or {}))


class _Failing(TorchFunctionMode):
    """Takes what functions of torch that fail ask of sizes for what the code asks, which may catch the error.

    Args:
        locations: the places at which sizes are asked for, which grow.
    """

    def __init__(self, locations: Sequence[Any]) -> None:
        super().__init__()
        self._locations = locations

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = len(self._locations)
        try:
            return func(*args, **(kwargs or {}))
        except Exception:
            frame: FrameType | None = inspect.currentframe()
            while frame is not None and not is_users(frame.f_code.co_filename):
                frame = frame.f_back
            if frame is not None:
                for location in self._locations[before:]:
                    private.set_place(location, frame)
            raise


class Since(TorchFunctionMode):
    """Records the first call after which something holds.

    Args:
        happened: returns whether it does.

    Attributes:
        place: where that call is, as the end of a clause of a message; nothing if it is not known.
    """

    def __init__(self, happened: Callable[[], bool]) -> None:
        super().__init__()
        self.place = ""
        self._happened = happened

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self.place and self._happened():
            self.place = _in(current_place())
        return result


class _Calls(TorchFunctionMode):
    """Records where code first does something that a traced program cannot represent.

    Attributes:
        found: what it does, with its place, and what it may do instead.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: str | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.found is None:
            texts = _untraceable(func, args, kwargs or {}, result)
            # A step itself takes gradients.
            where = current_place() if texts is not None else None
            if texts is not None and where is not None:
                self.found = f"the step {texts[0]}{_in(where)}; expected {texts[1]}"
        return result


def _untraceable(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> tuple[str, str] | None:
    """Return what a call does that a traced program cannot represent, and what to do instead."""
    name = getattr(func, "__name__", "")
    if name in ("numpy", "__array__"):
        return "takes a tensor to numpy, which would be a constant", "torch's functions"
    if func is F.embedding_bag and inspect.signature(func).bind(*args, **kwargs).arguments.get("scale_grad_by_freq"):
        return (
            "scales gradients of embedding_bag by frequency, for which PyTorch on the CPU counts other rows",
            "F.embedding with scale_grad_by_freq, and a sum or mean of what it gives",
        )
    if name == "one_hot" and (args[1] if len(args) > 1 else kwargs.get("num_classes", -1)) == -1:
        return "counts the classes of one_hot by their values", "its argument num_classes"
    if isinstance(result, torch.Tensor) and result.layout != torch.strided and _is_of_dense(func, args):
        return "makes a sparse tensor", "sums by index_add or scatter_add"
    return None


def _is_of_dense(func: Any, args: Sequence[Any]) -> bool:
    """Whether a function makes a sparse tensor of a dense one."""
    dense = any(isinstance(one, torch.Tensor) and one.layout == torch.strided for one in args)
    return dense and func is not torch.sparse_coo_tensor


def untraceable(step: TorchStep) -> str | None:
    """Return what a step does that a traced program cannot represent, where, and what to do instead; None: unknown."""
    calls = _Calls()
    # The run itself has been judged before.
    with contextlib.suppress(ExportError), calls:
        step.run()
    return calls.found


def untranslated(step: TorchStep, program: ExportedProgram, operator: str) -> str:
    """Return the message about an operator of a program that has no translation."""
    nodes = [node for node in program.graph.nodes if node.op == "call_function"]
    if any(_is_complex(node) for node in nodes if str(node.target) == operator):
        return (
            f"{operator}{called(step, operator)} has no ONNX translation for complex numbers; expected real ones, or "
            "products, quotients and sums"
        )
    return f"{operator}{called(step, operator)} has no ONNX translation; expected other operators that compute it"


def from_a_size(step: TorchStep, program: ExportedProgram, name: str | None) -> str | None:
    """Return the message about a node of a program that takes a number that depends on a size; None: it takes none."""
    node = next((one for one in program.graph.nodes if one.name == name), None)
    for given in () if node is None else node.all_input_nodes:
        value = given.meta.get("val")
        for symbol in private.expression(value).free_symbols if private.is_symbolic(value) else ():
            sources = private.sources_of(private.shape_environment(program), symbol)
            axis = next(filter(None, (_axis(step, source) for source in sources)), None)
            if node is not None and axis is not None:
                where = called(step, str(node.target)) or f"{_in(_place_of(node))},"
                return (
                    f"axis {axis[1]} of {axis[0]!r} cannot vary as dynamic_shapes says: {node.target}{where} takes a "
                    "number that follows from its size, which ONNX has as a constant only; expected code for any size, "
                    "or this axis static"
                )
    return None


def _place_of(node: Node) -> str | None:
    """Return where the user's code makes a node of a traced program."""
    lines = _FRAME.findall(node.meta.get("stack_trace") or "")
    found = [(filename, line, function) for filename, line, function in lines if is_users(filename)]
    if not found:
        return None
    filename, line, function = found[-1]
    return f"{function} ({os.path.basename(filename)}:{line})"


def _squeezed(program: ExportedProgram) -> dict[Any, str]:
    """Return what `squeeze` asks of sizes that may vary: whether they are 1; and where the code does so."""
    import sympy  # type: ignore[import-untyped]

    found: dict[Any, str] = {}
    graphs = [one.graph for one in program.graph_module.modules() if isinstance(one, torch.fx.GraphModule)]
    for node in (node for graph in graphs for node in graph.nodes if node.target in _SQUEEZES):
        shape = getattr(node.args[0].meta.get("val"), "shape", ())
        dims = node.args[1] if len(node.args) > 1 else range(len(shape))
        for dim in ([dims] if isinstance(dims, int) else dims) if shape else ():
            if private.is_symbolic(shape[dim]):
                condition = sympy.Eq(private.expression(shape[dim]), 1)
                found.setdefault(condition, _place_of(node) or "torch.squeeze")
    return found


def _is_complex(node: Node) -> bool:
    return any(
        isinstance(value := one.meta.get("val"), torch.Tensor) and value.is_complex()
        for one in (node, *node.all_input_nodes)
    )


def called(step: TorchStep, operator: str) -> str:
    """Return where the user's code calls an operator, for messages; nothing if the backward pass alone does."""
    watching = _Watching(operator)
    # The run itself has been judged before.
    with contextlib.suppress(ExportError), watching:
        step.run()
    return f"{_in(watching.place)}," if watching.place is not None else ""


def current_place() -> str | None:
    """Return the place in the user's code that a step is running; None if the exporter's own code runs or calls it."""
    found = current_line()
    return None if found is None else text_of(*found)


def current_line() -> tuple[CodeType, int] | None:
    """Return the same place as a function and a line."""
    where: tuple[CodeType, int] | None = None
    frame: FrameType | None = inspect.currentframe()
    while frame is not None:
        filename = frame.f_code.co_filename
        if where is None and is_users(filename):
            where = frame.f_code, frame.f_lineno
        if filename in _RUNNERS:
            return where
        if (filename, frame.f_code.co_name) == _COMPARED:
            return None
        frame = frame.f_back
    return None


_SYMBOLIC = (
    os.path.join(os.path.dirname(torch.__file__), "__init__.py"),
    os.path.join(os.path.dirname(torch.__file__), "fx") + os.sep,
    private.__file__,
    __file__,
)
"""Where symbolic sizes are made numbers and truth values."""
_HELPERS = (
    os.path.join(os.path.dirname(torch.__file__), "_export", "non_strict_utils.py"),
    os.path.join(os.path.dirname(__file__), "size_numbers.py"),
    os.path.join(os.path.dirname(__file__), "built_in.py"),
)
"""What torch.export and gradfuse have in place of `min` and `max`, and gradfuse in place of `int` and the like."""


def _deciding() -> FrameType | None:
    """Return the frame of the code that makes a condition on sizes a truth value, or that calls a helper that does so.

    Helpers are built-in functions, Python's own modules, and tools such as numpy.
    """
    frame: FrameType | None = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith(_SYMBOLIC):
        frame = frame.f_back
    while frame is not None and (filename := frame.f_code.co_filename) not in _RUNNERS and not is_users(filename):
        if filename.startswith(_PACKAGES) and filename not in _HELPERS:
            return frame
        frame = frame.f_back
    return frame


def names_here() -> tuple[str, ...]:
    """Return the names of attributes and globals that the user's function which runs looks up."""
    frame: FrameType | None = inspect.currentframe()
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return () if frame is None else frame.f_code.co_names


def _in(where: str | None) -> str:
    return "" if where is None else f", in {where}"
