"""Compares a model with PyTorch at other sizes than those of the batch. This module imports torch."""

from __future__ import annotations

import contextlib
import functools
import itertools
import warnings
from collections.abc import Collection, Mapping, Sequence

import onnx_ir as ir

from gradfuse.errors import ExportError, GradfuseError
from gradfuse.export import explaining, steadiness
from gradfuse.export.dynamic_shapes import DynamicShapes
from gradfuse.export.observing import Sturdy
from gradfuse.export.other_sizes import Axis, OtherSizes, drawn
from gradfuse.export.recording import Call, Recorded
from gradfuse.export.reporting import WHO, refusal
from gradfuse.export.torch_step import TorchStep, undisturbed
from gradfuse.export.verifying import Opened, Truth, has_onnxruntime
from gradfuse.models.arrays import Arrays
from gradfuse.training import batch_checks
from gradfuse.training.batch_checks import SizeCheck, SizeOf, Term

_OF_SHAPES = frozenset(
    """
    view _unsafe_view reshape _reshape_alias expand slice select narrow as_strided arange full zeros ones empty rand
    randn new_zeros new_ones new_empty new_full repeat split split_with_sizes unsqueeze squeeze permute linspace index
    empty_strided clone copy_ detach
    """.split()
)
"""Operators whose results naturally depend on sizes."""
_DRAWN = 3
"""How many batches are drawn if one that repeats the given one has equal numbers."""
_OF_NUMBERS = frozenset("mul div add sub rsub pow clamp fill_".split())
"""Operators that take numbers as they take tensors."""


def compare(
    truth: Truth,
    model: ir.Model,
    opened: Opened,
    others: Sequence[OtherSizes],
    shapes: DynamicShapes,
    which: str,
) -> None:
    """Compare every output of a model with PyTorch's where each axis that may vary has another size.

    All axes change at once, and those alone that a module does not let change with others.

    Args:
        truth: what PyTorch computes at the sizes of the batch.
        model: the model.
        opened: it, in onnxruntime.
        others: the sizes.
        shapes: the dynamic dimensions.
        which: what to call the model in messages.

    Raises:
        ExportError: the model differs, or PyTorch itself does not run at any other size of an axis.
    """
    if not has_onnxruntime():
        return
    compared: set[str] = set()
    failures: dict[str, tuple[OtherSizes, Exception]] = {}
    for sizes in others:
        if compared.issuperset(sizes.names) and not sizes.besides:
            continue
        found = _run(truth, sizes)
        if isinstance(found, Exception):
            # PyTorch may ask for what it was traced with.
            for name in () if sizes.beyond else sizes.names:
                failures[name] = sizes, found
            continue
        step, own = found
        try:
            _judge(truth, step, own, model, opened, which)
        except ExportError as error:
            tied = _tied(step)
            if tied is not None:
                # What repeats a batch may have equal numbers where no other batch has.
                drawn = _on_drawn(truth, step, model, opened, which)
                if isinstance(drawn, tuple):
                    raise _refused(truth.step, sizes, *drawn) from error
                if drawn:
                    compared.update(sizes.names)
                    continue
                places, numbers = _named(sizes)
                text = f"{places} with size {numbers}: {str(error).removeprefix(f'{WHO}: ')}; {tied}"
                warnings.warn(f"{WHO}: {text}", stacklevel=4)
                continue
            alone = _alone(truth, model, opened, others, which) if len(sizes.names) > 1 else None
            raise _refused(truth.step, *(alone or (sizes, step, error))) from error
        compared.update(sizes.names)
    for name, (sizes, failure) in failures.items():
        if name not in compared:
            named = isinstance(failure, ExportError)
            why = failure if named else f"the module fails: {explaining.reason(failure)}"
            raise _refused(truth.step, sizes, None, why) from failure
    given = {str(value.name) for value in model.graph.inputs}
    axes = {name: one for name, one in shapes.names.items() if name in given}
    for label in dict.fromkeys(label for one in axes.values() for label in one.values()):
        if label not in compared:
            alike = [(name, axis) for name, one in axes.items() for axis in one if one[axis] == label]
            _warn_of(truth.step, alike, shapes)


def checks_of(
    truth: Truth,
    model: ir.Model,
    opened: Opened,
    sizes: explaining.Sizes,
    assumed: explaining.Assumed,
    shapes: DynamicShapes,
    which: str,
) -> list[SizeCheck]:
    """Return what must hold of sizes for a model to be right, and warn the user of it.

    The model is tried where it may be right although something does not hold, and at sizes of 1 and 0: PyTorch's export
    takes every size that varies to be at least 2, whatever the code does at smaller ones.

    Args:
        truth: what PyTorch computes at the sizes of the batch.
        model: the model.
        opened: it, in onnxruntime.
        sizes: tells the user what was assumed.
        assumed: what that was.
        shapes: the dynamic dimensions.
        which: what to call the model in messages.
    """

    @functools.cache
    def is_right(dimension: str, size: int) -> bool:
        return has_onnxruntime() and bool(_is_right(truth, model, opened, {dimension: size}, shapes, which))

    found = list(assumed.checks)
    for one in assumed.uncertain:
        if not all(is_right(one.dimension, size) for size in one.unlike):
            sizes.tell(one.text)
            found += [] if one.check is None else [one.check]
    axes = _varied(model, shapes)
    always_filled = batch_checks.filled_dimensions(model) if axes else ()
    empty = [label for label in axes if label not in always_filled and is_right(label, 0)]
    found += [explaining.filled(axes[label][:1]) for label in axes if label not in empty]
    for pair in itertools.combinations(empty, 2):
        if not _is_right(truth, model, opened, dict.fromkeys(pair, 0), shapes, which):
            found.append(explaining.filled([axes[label][0] for label in pair]))
    for label, alike in axes.items():
        is_excluded = not has_onnxruntime() or any(_excludes_one(check.condition, alike) for check in found)
        # Where PyTorch fails, numbers are no harm.
        if not is_excluded and _is_right(truth, model, opened, {label: 1}, shapes, which) is False:
            found.append(explaining.not_single(alike[0]))
    return found


def _excludes_one(term: Term | SizeOf | float, axes: Collection[Axis]) -> bool:
    """Whether a condition bounds the size of one of some axes from 2 on, or further."""
    if not isinstance(term, Term):
        return False
    if term.op_type == "And":
        return any(_excludes_one(operand, axes) for operand in term.operands)
    first, *others = term.operands
    is_size = isinstance(first, SizeOf) and (first.name, first.axis) in axes
    return term.op_type == "GreaterOrEqual" and is_size and all(isinstance(one, int) and one > 1 for one in others)


def _varied(model: ir.Model, shapes: DynamicShapes) -> dict[str, list[Axis]]:
    """Return the dimensions that vary in a model, by name, and the axes of its inputs that have them."""
    found: dict[str, list[Axis]] = {}
    for value in model.graph.inputs:
        for axis, label in shapes.names.get(str(value.name), {}).items():
            if value.shape is not None and not isinstance(value.shape[axis], int):
                found.setdefault(label, []).append((str(value.name), axis))
    return found


def _is_right(
    truth: Truth, model: ir.Model, opened: Opened, changed: Mapping[str, int], shapes: DynamicShapes, which: str
) -> bool | None:
    """Whether a model gives what PyTorch gives where dimensions have other sizes, and the others those of the batch.

    None: PyTorch fails there.
    """
    axes = {
        (name, axis): changed[label]
        for name, one in shapes.names.items()
        for axis, label in one.items()
        if label in changed
    }
    found = _run(truth, OtherSizes(tuple(changed), axes))
    if isinstance(found, Exception):
        return None
    try:
        _judge(truth, *found, model, opened, which)
    except GradfuseError:
        return False
    return True


def _run(truth: Truth, sizes: OtherSizes) -> tuple[TorchStep, Arrays] | Exception:
    """Return a step of other sizes, and what PyTorch gives for it; or why it gives nothing."""
    failure: Exception | None = None
    for step in sizes.steps(truth.step):
        try:
            with Sturdy() if min(sizes.sizes.values(), default=0) <= 1 else contextlib.nullcontext():
                return step, truth.run(step, lambda tensor: tensor)
        except Exception as error:
            # A user's module may raise anything.
            failure = failure or error
    assert failure is not None
    return failure


def _judge(truth: Truth, step: TorchStep, own: Arrays, model: ir.Model, opened: Opened, which: str) -> None:
    try:
        truth.without_roundings(step, own).compare(model, which, opened)
    except ExportError:
        full = Truth.of(step, own, truth.run, truth.free, in_float64=truth.exact is not None)
        full.compare(model, which, opened)
        full.compare_in_float64(model, which)


def _tied(step: TorchStep) -> str | None:
    """Return what to say of a step whose results follow from a choice among equal numbers; None if they do not."""
    with undisturbed(step):
        return steadiness.tied(step)


def _on_drawn(
    truth: Truth, step: TorchStep, model: ir.Model, opened: Opened, which: str
) -> tuple[TorchStep, ExportError] | bool:
    """Compare a model on batches of a step's sizes without equal numbers.

    Returns:
        A step at which the model differs, and how; else whether any such batch was found.
    """
    for seed in range(_DRAWN):
        other = drawn(step, seed)
        try:
            own = truth.run(other, lambda tensor: tensor)
        except Exception:
            # A user's module may raise anything.
            continue
        try:
            _judge(truth, other, own, model, opened, which)
        except ExportError as error:
            if _tied(other) is None:
                return other, error
            continue
        return True
    return False


def _alone(
    truth: Truth, model: ir.Model, opened: Opened, others: Sequence[OtherSizes], which: str
) -> tuple[OtherSizes, TorchStep, ExportError] | None:
    """Return the first dimension that alone makes the model differ."""
    for sizes in others:
        if len(sizes.names) > 1 or isinstance(found := _run(truth, sizes), Exception):
            continue
        try:
            _judge(truth, *found, model, opened, which)
        except ExportError as error:
            return sizes, found[0], error
    return None


def _named(sizes: OtherSizes) -> tuple[str, str]:
    """Return the axes that vary, and their sizes."""
    axes = " and ".join(f"axis {axis} of {name!r}" for name, axis in sizes.sizes)
    return axes, ", ".join(str(size) for size in dict.fromkeys(sizes.sizes.values()))


def _refused(before: TorchStep, sizes: OtherSizes, step: TorchStep | None, error: object) -> ExportError:
    text = str(error).removeprefix(f"{WHO}: ")
    call = _other_call(before, step) if step is not None else None
    why = f", where {call.name.partition('.')[2] or call.name} takes other numbers" if call is not None else ""
    where = f", in {call.place}" if call is not None and call.place is not None else ""
    axes, numbers = _named(sizes)
    return refusal(
        f"{axes} cannot vary as dynamic_shapes says: with size {numbers}, {text}{why}{where}; expected code for any "
        "size, or this axis static"
    )


def _other_call(before: TorchStep, step: TorchStep) -> Call | None:
    """Return the first operator that gets other numbers at other sizes, and does not do so by its nature."""
    recorded = Recorded(), Recorded()
    for one, calls in zip((before, step), recorded, strict=True):
        # The runs themselves have been judged before.
        with contextlib.suppress(ExportError), undisturbed(one), calls:
            one.run()
    found: Call | None = None
    for a, b in zip(recorded[0].calls, recorded[1].calls, strict=False):
        if a.name != b.name:
            return found or b
        kind = a.name.split(".")[1] if "." in a.name else a.name
        if a.numbers != b.numbers and kind not in _OF_SHAPES and b.place is not None:
            if kind not in _OF_NUMBERS:
                return b
            found = found or b
    return found


def _warn_of(step: TorchStep, axes: Sequence[Axis], shapes: DynamicShapes) -> None:
    """Warn the user that the axes of a dimension were compared only at the size of the batch."""
    if not shapes.automatic.issuperset(axes):
        name, axis = axes[0]
        warnings.warn(
            f"{WHO}: axis {axis} of {name!r} was compared with PyTorch at size {step.batch[name].shape[axis]} alone, "
            "as no other was found that the traced step takes",
            stacklevel=4,
        )
