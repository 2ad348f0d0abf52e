"""Says what the exceptions of torch mean to a user: what is wrong, where in the code, and what to do.

Torch writes for its own developers: settings of its logs, graphs, frames of its C++ library. This module imports torch.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import re
import sysconfig
import warnings
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch.export import ExportedProgram
from torch.fx import Node

import gradfuse
from gradfuse.errors import ExportError, cut, one_line
from gradfuse.export import _torch_private as private
from gradfuse.export.reporting import WHO

if TYPE_CHECKING:
    from gradfuse.export.dynamic_shapes import DynamicShapes
    from gradfuse.export.torch_step import TorchStep

_PACKAGES = tuple(os.path.dirname(str(package.__file__)) + os.sep for package in (torch, gradfuse))
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
"""Where the part of a text begins that helps nobody who uses torch."""

_CONSTANT = re.compile(
    r"marked L\['(inputs|targets)'\]\[(\d+)\]\.size\(\)\[(\d+)\] as dynamic but your code specialized it to be a "
    r"constant \((\d+)\)"
)
_AXIS = re.compile(r"L\['(inputs|targets)'\]\[(\d+)\]\.size\(\)\[(\d+)\]")
_RUNNERS = tuple(os.path.join(os.path.dirname(__file__), name) for name in ("torch_step.py", "evaluation.py"))
"""The modules that call the user's code."""


def reason(error: BaseException) -> str:
    """Return what torch says is wrong, in one line, and where the user's code is that it is about."""
    text = str(error)
    found = _NOTES.search(text)
    kept = cut(text[: found.start()]) if found is not None else ""
    return f"{(kept or one_line(error)).rstrip(' .;:')}{_in(place(error))}"


def place(error: BaseException) -> str | None:
    """Return where the user's code is that an exception came from: its last frame that is of no library of ours."""
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
                found = text_of(code, traceback.tb_lineno)
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


def text_of(code: CodeType, line: int) -> str:
    """Return how a place in code is written in messages."""
    # Python 3.10 has none.
    name = getattr(code, "co_qualname", code.co_name)
    return f"{name} ({os.path.basename(code.co_filename)}:{line})"


class Sizes:
    """Notes where code makes a size that may vary a constant, for messages.

    Attributes:
        places: the places, in the order in which they were met.
    """

    def __init__(self) -> None:
        self.places: list[str] = []

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        def note() -> None:
            where = _current_place()
            if where is not None:
                self.places.append(where)

        with private.when_a_size_becomes_constant(note):
            yield

    def explain(self, step: TorchStep, error: BaseException) -> str | None:
        """Return which axis of the batch cannot vary, and why; None if that is not what an exception is about."""
        found = _CONSTANT.search(str(error))
        if found is None:
            return None
        return self._text(_names(step, found[1])[int(found[2])], int(found[3]), int(found[4]))

    def explain_constants(self, step: TorchStep, program: ExportedProgram, shapes: DynamicShapes) -> str | None:
        """Return which axis of the batch has one size in a traced program although it may vary; None: none has."""
        values = {node.name: node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"}
        given = list(program.graph_signature.user_inputs)
        tensors = given[len(step.state) : len(step.state) + len(step.batch)]
        for name, placeholder in zip(step.batch, tensors, strict=True):
            for axis in shapes.names.get(name, {}):
                size = values[placeholder].shape[axis]
                if isinstance(size, int) and (name, axis) not in shapes.automatic:
                    return self._text(name, axis, size)
        for source, filename, line, function in private.sizes_that_stay(program):
            found = _AXIS.search(source)
            if found is not None and is_users(filename):
                name, axis = _names(step, found[1])[int(found[2])], int(found[3])
                self.places.insert(0, f"{function} ({os.path.basename(filename)}:{line})")
                return self._text(name, axis, step.batch[name].shape[axis])
        return None

    def _text(self, name: str, axis: int, size: int) -> str:
        why = f", by {self.places[0]}" if self.places else ""
        return (
            f"axis {axis} of {name!r} has size {size} in all of the traced step{why}, and cannot vary as "
            "dynamic_shapes says; expected code for any size, or this axis static"
        )


def _names(step: TorchStep, which: str) -> tuple[str, ...]:
    return step.input_names if which == "inputs" else step.target_names


def warn_of_multiples(step: TorchStep, program: ExportedProgram) -> None:
    """Tell the user which axes were taken to be multiples of a number, as they are in the batch."""
    for source, number, filename, line, function in private.assumed_multiples(program):
        found = _AXIS.search(source)
        if found is None or not is_users(filename):
            continue
        name = _names(step, found[1])[int(found[2])]
        warnings.warn(
            f"{WHO}: axis {found[3]} of {name!r} is taken to be a multiple of {number}, as in this "
            f"batch, since {function} ({os.path.basename(filename)}:{line}) asks for it; pad other batches to one",
            stacklevel=5,
        )


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
            self.place = _current_place()
        return func(*args, **(kwargs or {}))


def untranslated(step: TorchStep, program: ExportedProgram, operator: str) -> str:
    """Return what to say of an operator of a program that has no translation."""
    nodes = [node for node in program.graph.nodes if node.op == "call_function"]
    if any(_is_complex(node) for node in nodes if str(node.target) == operator):
        return (
            f"{operator}{_called(step, operator)} has no ONNX translation for complex numbers; expected real ones, or "
            "products, quotients and sums"
        )
    return f"{operator}{_called(step, operator)} has no ONNX translation; expected other operators that compute it"


def _is_complex(node: Node) -> bool:
    return any(
        isinstance(value := one.meta.get("val"), torch.Tensor) and value.is_complex()
        for one in (node, *node.all_input_nodes)
    )


def _called(step: TorchStep, operator: str) -> str:
    """Return where the user's code calls an operator, for messages; nothing if the backward pass alone does."""
    watching = _Watching(operator)
    # The run itself has been judged before.
    with contextlib.suppress(ExportError), watching:
        step.run()
    return f"{_in(watching.place)}," if watching.place is not None else ""


def _current_place() -> str | None:
    """Return where the user's code is that is run by a step; None if it is the exporter that runs."""
    where: str | None = None
    frame: FrameType | None = inspect.currentframe()
    while frame is not None:
        filename = frame.f_code.co_filename
        if where is None and is_users(filename):
            where = text_of(frame.f_code, frame.f_lineno)
        if filename in _RUNNERS:
            return where
        frame = frame.f_back
    return None


def _in(where: str | None) -> str:
    return "" if where is None else f", in {where}"
