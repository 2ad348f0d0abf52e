"""Rules of ONNX's operators."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from gradfuse.models.propagation.elements import (
    BOOL,
    COMPARED,
    COMPUTED,
    INT64,
    MOST_ELEMENTS,
    OF_ONE,
    Elements,
    added,
    as_sizes,
    caster,
    chosen,
    elementwise,
    multiplied,
    objects,
)
from gradfuse.models.propagation.facts import Operands, Result, length_of, rule
from gradfuse.models.propagation.sizes import (
    Size,
    Sizes,
    Unknown,
    broadcast,
    letter_sizes,
    normal_axis,
    product_of,
    quotient_of,
)

_PARTS = 3
"""What a loop begins with, and what is before and after an iteration."""
_WHOLE = 2**31 - 1
"""An end of a slice that is no smaller means all of it."""


@rule(
    *("Abs", "Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "BitwiseNot", "Ceil", "Celu", "Clip", "Cos", "Cosh"),
    *("CumSum", "Elu", "Erf", "Exp", "Floor", "Gelu", "HardSigmoid", "HardSwish", "Hardmax", "Identity", "LRN"),
    *("LeakyRelu", "Log", "LogSoftmax", "LpNormalization", "MeanVarianceNormalization", "Mish", "Neg", "Not"),
    *("Reciprocal", "Relu", "ReverseSequence", "Round", "Scatter", "ScatterElements", "ScatterND", "Selu", "Shrink"),
    *("Sigmoid", "Sign", "Sin", "Sinh", "Softmax", "Softplus", "Softsign", "Sqrt", "Tan", "Tanh", "ThresholdedRelu"),
    *("Trilu", "InstanceNormalization", "GroupNormalization", "RMSNormalization", "Swish"),
)
def _like_first(operands: Operands) -> list[Result]:
    function = OF_ONE.get(operands.node.op_type)
    elements = None if function is None else elementwise(function, operands.elements(0))
    return [(operands.dtype(), [*operands.sizes()], elements)]


@rule("IsNaN", "IsInf")
def _tests(operands: Operands) -> list[Result]:
    return [(BOOL, [*operands.sizes()], None)]


@rule("Dropout")
def _dropout(operands: Operands) -> list[Result]:
    return [(operands.dtype(), [*operands.sizes()], None), (BOOL, [*operands.sizes()], None)]


@rule("BatchNormalization")
def _batch_normalization(operands: Operands) -> list[Result]:
    found: list[Result] = [(operands.dtype(), [*operands.sizes()], None)]
    return found + [(operands.dtype(3), [*operands.sizes(3)], None) for _ in operands.node.outputs[1:3]]


@rule("LayerNormalization")
def _layer_normalization(operands: Operands) -> list[Result]:
    sizes = operands.sizes()
    axis = normal_axis(operands.attribute("axis", -1), len(sizes))
    kept = [*sizes[:axis], *[1] * (len(sizes) - axis)]
    stash = ir.DataType(operands.attribute("stash_type", 1))
    return [(operands.dtype(), [*sizes], None), (stash, kept, None), (stash, [*kept], None)]


@rule("Cast")
def _cast(operands: Operands) -> list[Result]:
    dtype = ir.DataType(operands.attribute("to"))
    return [(dtype, [*operands.sizes()], elementwise(caster(dtype), operands.elements(0)))]


@rule("CastLike")
def _cast_like(operands: Operands) -> list[Result]:
    dtype = operands.dtype(1)
    elements = None if dtype is None else elementwise(caster(dtype), operands.elements(0))
    return [(dtype, [*operands.sizes()], elements)]


@rule(*COMPUTED, "Pow", "Mean", "BitShift", "BitwiseAnd", "BitwiseOr", "BitwiseXor", "PRelu")
def _arithmetic(operands: Operands) -> list[Result]:
    count = len(operands.node.inputs)
    sizes = broadcast(*(operands.sizes(k) for k in range(count)))
    function, given = COMPUTED.get(operands.node.op_type), operands.all_elements()
    elements = None
    if function is not None and given and not operands.attribute("fmod", 0):
        elements = given[0]
        for other in given[1:]:
            elements = None if elements is None else elementwise(function, elements, other)
    return [(operands.dtype(), sizes, elements)]


@rule(*COMPARED)
def _comparison(operands: Operands) -> list[Result]:
    sizes = broadcast(operands.sizes(0), operands.sizes(1))
    function = COMPARED[operands.node.op_type]
    return [(BOOL, sizes, elementwise(function, operands.elements(0), operands.elements(1)))]


@rule("Where")
def _where(operands: Operands) -> list[Result]:
    sizes = broadcast(*(operands.sizes(k) for k in range(3)))
    elements = elementwise(chosen, *(operands.elements(k) for k in range(3)))
    return [(operands.dtype(1), sizes, elements)]


@rule("Constant")
def _constant(operands: Operands) -> list[Result]:
    array: npt.NDArray[Any] | None = None
    for name, attribute in operands.node.attributes.items():
        if attribute.is_ref():
            raise Unknown
        if name == "value":
            tensor = attribute.as_tensor()
            if tensor.size > MOST_ELEMENTS or tensor.dtype == ir.DataType.STRING:
                return [(tensor.dtype, list(tensor.shape.numpy()), None)]
            return [(tensor.dtype, list(tensor.shape.numpy()), objects(tensor.numpy()))]
        if name in ("value_int", "value_ints"):
            array = np.asarray(attribute.value, np.int64)
        elif name in ("value_float", "value_floats"):
            array = np.asarray(attribute.value, np.float32)
    if array is None:
        raise Unknown
    return [(ir.DataType.from_numpy(array.dtype), list(array.shape), objects(array))]


@rule("ConstantOfShape")
def _constant_of_shape(operands: Operands) -> list[Result]:
    given = operands.node.attributes.get("value")
    number = np.zeros((), np.float32) if given is None else given.as_tensor().numpy().reshape(())
    dtype = ir.DataType.FLOAT if given is None else given.as_tensor().dtype
    elements = operands.elements(0)
    sizes: Sizes = as_sizes(elements) if elements is not None else [None] * length_of(operands, 0)
    known = [size for size in sizes if isinstance(size, int)]
    filled = None
    if len(known) == len(sizes) and math.prod(known) <= MOST_ELEMENTS:
        filled = objects(np.full(known, number))
    return [(dtype, sizes, filled)]


@rule("Shape")
def _shape(operands: Operands) -> list[Result]:
    sizes = operands.sizes()
    part = sizes[slice(operands.attribute("start", 0), operands.attribute("end"))]
    elements = np.empty(len(part), object)
    elements[:] = part
    return [(INT64, [len(part)], elements)]


@rule("Size")
def _size_of(operands: Operands) -> list[Result]:
    elements = np.empty((), object)
    elements[()] = product_of(operands.sizes())
    return [(INT64, [], elements)]


@rule("Range")
def _range(operands: Operands) -> list[Result]:
    try:
        numbers = [operands.facts.constant(operands.value(k)) for k in range(3)]
        if any(number is None or number.dtype.kind not in "iu" for number in numbers):
            raise Unknown
        array = np.arange(*(int(n.reshape(())) for n in numbers if n is not None), dtype=np.int64)
    except (Unknown, ZeroDivisionError):
        first, last, step = (operands.elements(k) for k in range(3))
        # From 0 on in ones there are as many as the end says.
        ends = all(e is not None and e.size == 1 for e in (first, last, step))
        counts = ends and first is not None and step is not None and first.flat[0] == 0 and step.flat[0] == 1
        name = last.flat[0] if counts and last is not None else None
        return [(operands.dtype(), [name if isinstance(name, str) else None], None)]
    return [(operands.dtype(), [array.size], objects(array) if array.size <= MOST_ELEMENTS else None)]


@rule("Reshape")
def _reshape(operands: Operands) -> list[Result]:
    elements = operands.elements(1)
    if elements is None:
        return [(operands.dtype(), [None] * length_of(operands, 1), None)]
    whole: Sizes | None = None
    value = operands.value(0)
    if value is not None:
        whole = operands.facts.shapes.get(value)
    keeps = not operands.attribute("allowzero", 0)
    sizes: list[Any] = []
    for axis, size in enumerate(elements.ravel()):
        if keeps and size == 0 and not isinstance(size, str):
            size = whole[axis] if whole is not None and axis < len(whole) else None
        sizes.append(size)
    missing = [axis for axis, size in enumerate(sizes) if isinstance(size, (int, np.integer)) and size < 0]
    unknown = [axis for axis, size in enumerate(sizes) if size is None]
    for axis in missing:
        others = sizes[:axis] + sizes[axis + 1 :]
        sizes[axis] = None if whole is None or unknown else quotient_of(whole, others)
    if not missing and len(unknown) == 1 and whole is not None:
        axis = unknown[0]
        sizes[axis] = quotient_of(whole, sizes[:axis] + sizes[axis + 1 :])
    return [(operands.dtype(), sizes, _moved(operands, sizes))]


def _moved(operands: Operands, sizes: Sequence[Any]) -> Elements | None:
    """The elements of the first input in another shape."""
    elements = operands.elements(0)
    known = [size for size in sizes if isinstance(size, int)]
    if elements is None or len(known) < len(sizes) or math.prod(known) != elements.size:
        return None
    return elements.reshape(known)


@rule("Flatten")
def _flatten(operands: Operands) -> list[Result]:
    sizes, axis = operands.sizes(), operands.attribute("axis", 1)
    axis = axis + len(sizes) if axis < 0 else axis
    return [(operands.dtype(), [product_of(sizes[:axis]), product_of(sizes[axis:])], None)]


@rule("Unsqueeze")
def _unsqueeze(operands: Operands) -> list[Result]:
    sizes, axes = [*operands.sizes()], operands.axes()
    if axes is None:
        raise Unknown
    rank = len(sizes) + len(axes)
    for axis in sorted(normal_axis(axis, rank) for axis in axes):
        sizes.insert(axis, 1)
    return [(operands.dtype(), sizes, _moved(operands, sizes))]


@rule("Squeeze")
def _squeeze(operands: Operands) -> list[Result]:
    sizes, axes = operands.sizes(), operands.axes()
    if axes is None:
        if any(not isinstance(size, int) for size in sizes):
            raise Unknown
        axes = [axis for axis, size in enumerate(sizes) if size == 1]
    gone = {normal_axis(axis, len(sizes)) for axis in axes}
    kept = [size for axis, size in enumerate(sizes) if axis not in gone]
    return [(operands.dtype(), kept, _moved(operands, kept))]


@rule("Transpose")
def _transpose(operands: Operands) -> list[Result]:
    sizes = operands.sizes()
    perm = operands.attribute("perm", list(range(len(sizes) - 1, -1, -1)))
    if sorted(perm) != list(range(len(sizes))):
        raise Unknown
    elements = operands.elements(0)
    return [(operands.dtype(), [sizes[axis] for axis in perm], None if elements is None else elements.transpose(perm))]


@rule("Expand")
def _expand(operands: Operands) -> list[Result]:
    elements = operands.elements(1)
    wanted = as_sizes(elements) if elements is not None else [None] * length_of(operands, 1)
    sizes = broadcast(operands.sizes(), wanted)
    known = [size for size in sizes if isinstance(size, int)]
    given = operands.elements(0)
    if given is None or len(known) < len(sizes) or math.prod(known) > MOST_ELEMENTS:
        return [(operands.dtype(), sizes, None)]
    return [(operands.dtype(), sizes, np.broadcast_to(given, known))]


@rule("Tile")
def _tile(operands: Operands) -> list[Result]:
    elements, sizes = operands.elements(1), operands.sizes()
    if elements is None or elements.size != len(sizes):
        return [(operands.dtype(), [None] * len(sizes), None)]
    return [(operands.dtype(), [multiplied(a, b) for a, b in zip(sizes, elements, strict=True)], None)]


@rule("Concat")
def concat(operands: Operands) -> list[Result]:
    shapes = [operands.sizes(k) for k in range(len(operands.node.inputs))]
    axis = normal_axis(operands.attribute("axis"), len(shapes[0]))
    sizes = [*shapes[0]]
    for shape in shapes[1:]:
        if len(shape) != len(sizes):
            raise Unknown
        for k, size in enumerate(shape):
            if k == axis:
                sizes[k] = added(sizes[k], size)
            elif not isinstance(sizes[k], int) and size is not None:
                # They are equal: a number says most.
                sizes[k] = size if isinstance(size, int) or sizes[k] is None else sizes[k]
    given = operands.all_elements()
    if given is None and len(sizes) == 1:
        given = [_padded(operands, k, shape) for k, shape in enumerate(shapes)]
        given = None if any(one is None for one in given) else given
    return [(operands.dtype(), sizes, None if given is None else np.concatenate(given, axis))]


def _padded(operands: Operands, index: int, shape: Sizes) -> Any:
    """The elements of a short vector, unknown ones where nothing is known of it."""
    elements = operands.elements(index)
    length = shape[0]
    if elements is None and isinstance(length, int) and length <= MOST_ELEMENTS:
        elements = np.full(length, None, object)
    return elements


@rule("Split")
def split(operands: Operands) -> list[Result]:
    sizes, count = operands.sizes(), len(operands.node.outputs)
    axis = normal_axis(operands.attribute("axis", 0), len(sizes))
    given, whole = operands.attribute("split"), sizes[axis]
    parts: Sizes
    if given is None and operands.value(1) is not None:
        elements = operands.elements(1)
        parts = [None] * count if elements is None else as_sizes(elements)
    elif given is not None:
        parts = [*given]
    elif isinstance(whole, int):
        each = -(-whole // count)
        parts = [*[each] * (count - 1), whole - each * (count - 1)]
    else:
        parts = [None] * count
    if len(parts) != count:
        raise Unknown
    results: list[Result] = []
    elements, begin = operands.elements(0), 0
    for part in parts:
        piece = None
        if elements is not None and isinstance(part, int) and isinstance(begin, int):
            piece = elements.take(range(begin, begin + part), axis)
        begin = added(begin, part)
        results.append((operands.dtype(), [*sizes[:axis], part, *sizes[axis + 1 :]], piece))
    return results


@rule("Slice")
def _slice(operands: Operands) -> list[Result]:
    sizes, rank = [*operands.sizes()], len(operands.sizes())
    named = operands.attribute("starts")
    if named is not None:
        starts: list[Any] = [*named]
        ends: list[Any] = [*operands.attribute("ends")]
        axes = operands.attribute("axes", list(range(len(starts))))
        steps: list[Any] = [1] * len(starts)
    else:
        given = [operands.elements(k) for k in (1, 2)]
        count = length_of(operands, 1)
        starts, ends = ([None] * count if one is None else [*one.ravel()] for one in given)
        axes = list(range(count)) if operands.value(3) is None else operands.ints(3)
        steps_given = operands.elements(4)
        steps = [1] * count if operands.value(4) is None else [None] * count
        steps = steps if steps_given is None else [*steps_given.ravel()]
    cuts = [slice(None)] * rank
    exact = True
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        axis = normal_axis(axis, rank)
        whole = sizes[axis]
        numbers = all(isinstance(n, (int, np.integer)) for n in (start, end, step))
        if isinstance(whole, int) and numbers and step:
            first, last = int(start), int(end)
            if step < 0 and last < -whole:
                cut = slice(first, None, int(step))
            else:
                cut = slice(first, last, int(step))
            cuts[axis] = cut
            sizes[axis] = len(range(whole)[cut])
        elif start == 0 and step == 1 and (end == whole or (isinstance(end, (int, np.integer)) and end >= _WHOLE)):
            exact = exact and whole is not None
            sizes[axis] = whole
        else:
            sizes[axis], exact = None, False
    elements = operands.elements(0)
    return [(operands.dtype(), sizes, elements[tuple(cuts)] if elements is not None and exact else None)]


@rule("Gather")
def _gather(operands: Operands) -> list[Result]:
    sizes, indices = operands.sizes(0), operands.sizes(1)
    axis = normal_axis(operands.attribute("axis", 0), len(sizes))
    elements, places = operands.elements(0), operands.facts.constant(operands.value(1))
    taken = None
    if elements is not None and places is not None and elements.shape[axis]:
        inside = (places >= -elements.shape[axis]) & (places < elements.shape[axis])
        taken = np.asarray(elements.take(places, axis), object) if inside.all() else None
        if taken is not None and taken.ndim == 0:
            taken = taken.reshape(())
    return [(operands.dtype(), [*sizes[:axis], *indices, *sizes[axis + 1 :]], taken)]


@rule("GatherElements")
def _gather_elements(operands: Operands) -> list[Result]:
    return [(operands.dtype(), [*operands.sizes(1)], None)]


@rule("GatherND")
def _gather_nd(operands: Operands) -> list[Result]:
    sizes, indices = operands.sizes(0), operands.sizes(1)
    last = indices[-1] if indices else None
    if not isinstance(last, int):
        raise Unknown
    return [(operands.dtype(), [*indices[:-1], *sizes[operands.attribute("batch_dims", 0) + last :]], None)]


@rule("MatMul")
def matmul(operands: Operands) -> list[Result]:
    a, b = operands.sizes(0), operands.sizes(1)
    if not a or not b:
        raise Unknown
    rows, columns = a[-2:-1], b[-1:] if len(b) > 1 else []
    return [(operands.dtype(), [*broadcast(a[:-2], b[:-2]), *rows, *columns], None)]


@rule("Gemm")
def _gemm(operands: Operands) -> list[Result]:
    a, b = operands.sizes(0), operands.sizes(1)
    if len(a) != 2 or len(b) != 2:
        raise Unknown
    rows = a[1 if operands.attribute("transA", 0) else 0]
    columns = b[0 if operands.attribute("transB", 0) else 1]
    return [(operands.dtype(), [rows, columns], None)]


@rule("Einsum")
def _einsum(operands: Operands) -> list[Result]:
    left, arrow, output = operands.attribute("equation").replace(" ", "").partition("->")
    terms = left.split(",")
    if not arrow:
        letters = sorted(set(left) - set(",."))
        output = ("..." if "..." in left else "") + "".join(c for c in letters if left.count(c) == 1)
    shapes = [letter_sizes(term, operands.sizes(k)) for k, term in enumerate(terms)]
    batch = broadcast(*(batch for batch, _ in shapes))
    found: Sizes = []
    for letter in output.replace("...", "."):
        if letter == ".":
            found += batch
        else:
            found += broadcast(*([sizes[letter]] for _, sizes in shapes if letter in sizes))
    return [(operands.dtype(), found, None)]


@rule(*(f"Reduce{name}" for name in ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "Sum")))
@rule("ReduceSumSquare")
def reduce(operands: Operands) -> list[Result]:
    keeps = operands.attribute("keepdims", 1)
    value = operands.value(0)
    sizes = None if value is None else operands.facts.shapes.get(value)
    if operands.attribute("axes") is None and operands.value(1) is not None and operands.elements(1) is None:
        if not keeps or sizes is None:
            raise Unknown
        return [(operands.dtype(), [None] * len(sizes), None)]
    axes = operands.axes()
    if not axes:
        if operands.attribute("noop_with_empty_axes", 0):
            return [(operands.dtype(), [*operands.sizes()], None)]
        if not keeps:
            return [(operands.dtype(), [], _reduced(operands))]
        axes = list(range(len(operands.sizes())))
    sizes = operands.sizes()
    gone = {normal_axis(axis, len(sizes)) for axis in axes}
    kept = [1 if axis in gone else size for axis, size in enumerate(sizes) if keeps or axis not in gone]
    return [(operands.dtype(), kept, _reduced(operands, kept) if len(gone) == len(sizes) else None)]


def _reduced(operands: Operands, sizes: Sequence[Size] = ()) -> Elements | None:
    """The product, sum or extreme of all elements of the first input."""
    kind = {"Prod": "Mul", "Sum": "Add", "Max": "Max", "Min": "Min"}.get(operands.node.op_type[len("Reduce") :])
    elements = operands.elements(0)
    if kind is None or elements is None or not elements.size:
        return None
    first, *rest = elements.flat
    for other in rest:
        first = COMPUTED[kind](first, other)
    found = np.empty((), object)
    found[()] = first
    return found.reshape([1] * len(sizes))


@rule("ArgMax", "ArgMin")
def _arg_extreme(operands: Operands) -> list[Result]:
    sizes, keeps = operands.sizes(), operands.attribute("keepdims", 1)
    axis = normal_axis(operands.attribute("axis", 0), len(sizes))
    return [(INT64, [*sizes[:axis], *([1] if keeps else []), *sizes[axis + 1 :]], None)]


@rule("TopK")
def _top_k(operands: Operands) -> list[Result]:
    sizes = operands.sizes()
    axis = normal_axis(operands.attribute("axis", -1), len(sizes))
    count = operands.attribute("k")
    if count is None:
        elements = operands.elements(1)
        count = None if elements is None or elements.size != 1 else elements.flat[0]
    kept = [*sizes[:axis], count, *sizes[axis + 1 :]]
    return [(operands.dtype(), kept, None), (INT64, [*kept], None)]


@rule("NonZero")
def _non_zero(operands: Operands) -> list[Result]:
    constant = operands.facts.constant(operands.value(0))
    if constant is not None and constant.ndim:
        places = np.stack(np.nonzero(constant)).astype(np.int64)
        return [(INT64, list(places.shape), objects(places))]
    return [(INT64, [max(len(operands.sizes()), 1), None], None)]


@rule("OneHot")
def _one_hot(operands: Operands) -> list[Result]:
    sizes, depth = operands.sizes(), operands.elements(1)
    axis = operands.attribute("axis", -1)
    axis = axis + len(sizes) + 1 if axis < 0 else axis
    count: Any = None if depth is None or depth.size != 1 else depth.flat[0]
    return [(operands.dtype(2), [*sizes[:axis], count, *sizes[axis:]], None)]


@rule("Pad")
def _pad(operands: Operands) -> list[Result]:
    sizes, given = operands.sizes(), operands.attribute("pads")
    if given is None:
        elements = operands.elements(1)
        given = None if elements is None else [*elements.ravel()]
    axes = list(range(len(sizes)))
    if operands.value(3) is not None:
        axes = [normal_axis(axis, len(sizes)) for axis in operands.ints(3)]
    if given is None or len(given) != 2 * len(axes):
        return [(operands.dtype(), [None] * len(sizes), None)]
    found = [*sizes]
    for k, axis in enumerate(axes):
        found[axis] = added(found[axis], added(given[k], given[k + len(axes)]))
    return [(operands.dtype(), found, None)]


@rule("If")
def _if(operands: Operands) -> list[Result]:
    """What both branches agree on, or the one that is known to be taken."""
    branches = [operands.node.attributes[name].as_graph() for name in ("then_branch", "else_branch")]
    condition = operands.facts.constant(operands.value(0))
    if condition is not None:
        branches = branches[:1] if condition.reshape(()) else branches[1:]
    facts, found = operands.facts, []
    for outputs in zip(*(branch.outputs for branch in branches), strict=True):
        shapes = [facts.shapes.get(value) for value in outputs]
        known = [shape for shape in shapes if shape is not None]
        sizes: Sizes | None = None
        if len(known) == len(shapes) and len({len(shape) for shape in known}) == 1:
            sizes = [dims[0] if len(set(dims)) == 1 else None for dims in zip(*known, strict=True)]
        elements = facts.elements.get(outputs[0]) if len(branches) == 1 else None
        found.append((facts.dtypes.get(outputs[0]), sizes, elements))
    return found


@rule("Loop", "Scan")
def repeated(operands: Operands) -> list[Result]:
    """What a body carries has the sizes that it begins with, as far as no iteration changes them; slices get an
    axis."""
    facts, node = operands.facts, operands.node
    body = node.attributes["body"].as_graph()
    scans = node.op_type == "Scan"
    first, ahead = (0, 0) if scans else (2, 1)
    sliced = operands.attribute("num_scan_inputs", 0)
    carried = len(body.inputs) - first - sliced
    found: list[Result] = []
    for k in range(carried):
        start, before, after = operands.value(first + k), body.inputs[first + k], body.outputs[ahead + k]
        values = [value for value in (start, before, after) if value is not None]
        shapes = [facts.shapes[value] for value in values if value in facts.shapes]
        sizes: Sizes | None = None
        if len(shapes) == len(values) == _PARTS and len({len(shape) for shape in shapes}) == 1:
            sizes = [same[0] if len(set(same)) == 1 else None for same in zip(*shapes, strict=True)]
        found.append((facts.dtypes.get(after) or operands.dtype(first + k), sizes, None))
    turns: Size = None
    if scans and sliced:
        axes = operands.attribute("scan_input_axes", [0] * sliced)
        given = operands.value(carried)
        if given in facts.shapes:
            turns = facts.shapes[given][normal_axis(axes[0], len(facts.shapes[given]))]
    for k, value in enumerate(body.outputs[ahead + carried :]):
        shape = facts.shapes.get(value)
        axis = operands.attribute("scan_output_axes", [])[k : k + 1] or [0]
        if shape is not None:
            at = normal_axis(axis[0], len(shape) + 1)
            shape = [*shape[:at], turns, *shape[at:]]
        found.append((facts.dtypes.get(value), shape, None))
    return found
