"""Rules of what graphs compute of the size of the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir

from gradfuse.dynamic_batch.analysis import SIZED, Call, Counts, rule
from gradfuse.dynamic_batch.layouts import Multiple, Product

_REAL = frozenset({ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.INT32, ir.DataType.INT64})


class _Unclear(Exception):
    """What comes out is neither a multiple of the batch nor the same for all batches."""


def _array(call: Call, index: int) -> Counts:
    """The elements of an input in its shape."""
    value = call.value(index)
    assert value is not None
    found = call.known.counts.get(value)
    if found is None:
        found = call.known.facts.elements.get(value)
    if found is not None:
        return found
    sizes = [size for size in call.sizes(index) if isinstance(size, int)]
    if len(sizes) < call.rank(index):
        call.refuse("computes with the size of the batch")
    return np.full(sizes, None, object)


def _give(call: Call, array: Any, output: int = 0) -> None:
    if not isinstance(array, np.ndarray):
        # numpy must not look into an element.
        found = np.empty(len(array) if isinstance(array, list) else (), object)
        found[...] = array
        array = found
    call.give_counts(array, output)


@rule("Shape")
def _shape(call: Call) -> None:
    layout = call.layout(0)
    if layout is None:
        return  # Of a vector of sizes, whose length is the same for all batches.
    elements: list[Any] = [*call.sizes()]
    elements[layout.axis] = Multiple(layout.per_row)
    _give(call, elements[slice(call.attribute("start", 0), call.attribute("end"))])


@rule("Size")
def _size(call: Call) -> None:
    layout = call.layout(0)
    if layout is not None:
        others = [size for axis, size in enumerate(call.sizes()) if axis != layout.axis]
        _give(call, Multiple(layout.per_row * Product.of(others)))


@rule("Identity", "Floor", "Ceil", "Round", table=SIZED)
def _same(call: Call) -> None:
    _give(call, _array(call, 0))


@rule("Cast", table=SIZED)
def _cast(call: Call) -> None:
    if ir.DataType(call.attribute("to")) not in _REAL:
        call.refuse("casts the size of the batch to a type that may not hold it")
    _give(call, _array(call, 0))


@rule("Unsqueeze", "Squeeze", "Reshape", table=SIZED)
def _moved(call: Call) -> None:
    sizes = call.result_sizes()
    if not all(isinstance(size, int) for size in sizes):
        call.refuse("computes with the size of the batch")
    _give(call, _array(call, 0).reshape([size for size in sizes if isinstance(size, int)]))


@rule("Concat", table=SIZED)
def _concat(call: Call) -> None:
    _give(call, np.concatenate([_array(call, index) for index in range(len(call.node.inputs))], call.axis(None)))


@rule("Gather", table=SIZED)
def _gather(call: Call) -> None:
    places = call.constant(1)
    if places is None:
        call.refuse("computes with the size of the batch")
    _give(call, _array(call, 0).take(places, call.axis()))


@rule("Slice", table=SIZED)
def _slice(call: Call) -> None:
    array = _array(call, 0)
    starts, ends = call.ints(1, "starts") or [], call.ints(2, "ends") or []
    axes = call.ints(3, "axes") or list(range(len(starts)))
    steps = call.ints(4, "steps") or [1] * len(starts)
    cuts = [slice(None)] * array.ndim
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        cuts[axis] = slice(start, None if step < 0 and end < -array.shape[axis] else end, step)
    _give(call, array[tuple(cuts)])


@rule("Split", table=SIZED)
def _split(call: Call) -> None:
    array, axis, begin = _array(call, 0), call.axis(), 0
    for output in range(len(call.node.outputs)):
        size = call.result_sizes(output)[axis]
        if not isinstance(size, int):
            call.refuse("computes with the size of the batch")
        _give(call, array.take(range(begin, begin + size), axis), output)
        begin += size


@rule("ReduceProd", table=SIZED)
def _product(call: Call) -> None:
    array = _array(call, 0)
    axes = call.ints(1, "axes")
    if array.ndim != 1 or axes not in (None, [0], [-1]):
        call.refuse("computes with the size of the batch")
    found: Any = 1
    for element in array:
        found = _of_numbers(call, _multiplied, found, element)
    _give(call, [found] if call.attribute("keepdims", 1) else found)


def _multiplied(a: Any, b: Any) -> Any:
    if isinstance(a, Multiple) and isinstance(b, Multiple):
        raise _Unclear
    first, second = (a, b) if isinstance(a, Multiple) else (b, a)
    if not isinstance(first, Multiple):
        return None if a is None or b is None or isinstance(a, str) or isinstance(b, str) else a * b
    if isinstance(second, str):
        return Multiple(first.factor * Product.of([second]))
    if second is None or second < 0 or second != int(second):
        raise _Unclear
    return Multiple(first.factor * Product(int(second))) if second else 0


def _divided(a: Any, b: Any) -> Any:
    above = a.factor if isinstance(a, Multiple) else None
    below = b.factor if isinstance(b, Multiple) else None
    if above is not None and below is not None:
        found = above.over(below)
        if found is None or found.names:
            raise _Unclear
        return found.number
    if above is None or b is None or (isinstance(b, float) and b != int(b)):
        raise _Unclear
    found = above.over(Product.of([b if isinstance(b, str) else int(b)]))
    if found is None:
        raise _Unclear
    return Multiple(found)


def _added(a: Any, b: Any) -> Any:
    if isinstance(a, Multiple) and isinstance(b, Multiple) and a.factor.names == b.factor.names:
        return Multiple(Product(a.factor.number + b.factor.number, a.factor.names))
    if a == 0 or b == 0:
        return b if a == 0 else a
    raise _Unclear


def _subtracted(a: Any, b: Any) -> Any:
    if b == 0 or a == b:
        return a if b == 0 else 0
    raise _Unclear


def _equal(a: Any, b: Any) -> Any:
    other = b if isinstance(a, Multiple) else a
    if a == b:
        return True
    if isinstance(other, (int, np.integer)) and other <= 0:
        return False
    raise _Unclear


def _largest(a: Any, b: Any) -> Any:
    first, second = (a, b) if isinstance(a, Multiple) else (b, a)
    # A batch has at least one row.
    if a == b or (isinstance(second, (int, np.integer)) and second <= 1):
        return first
    raise _Unclear


def _remainder(a: Any, b: Any) -> Any:
    if isinstance(a, Multiple) and isinstance(b, int) and b > 0 and a.factor.number % b == 0:
        return 0
    raise _Unclear


def _of_numbers(call: Call, function: Callable[[Any, Any], Any], a: Any, b: Any) -> Any:
    try:
        return function(a, b)
    except _Unclear:
        call.refuse("computes with the size of the batch")


@rule("Add", "Div", "Equal", "Max", "Mod", "Mul", "Sub", table=SIZED)
def _arithmetic(call: Call) -> None:
    function = {
        "Add": _added,
        "Div": _divided,
        "Equal": _equal,
        "Max": _largest,
        "Mod": _remainder,
        "Mul": _multiplied,
        "Sub": _subtracted,
    }[call.node.op_type]

    def of_elements(a: Any, b: Any) -> Any:
        return _of_numbers(call, function, a, b) if isinstance(a, Multiple) or isinstance(b, Multiple) else None

    if len(call.node.inputs) != 2:
        call.refuse("computes with the size of the batch")
    found = np.asarray(np.frompyfunc(of_elements, 2, 1)(_array(call, 0), _array(call, 1)), object)
    known = call.known.facts.elements.get(call.node.outputs[0])
    if known is not None:
        # What is no multiple of the batch is the same for all batches.
        known = known.reshape(found.shape)
        kept = np.frompyfunc(lambda new, old: old if new is None else new, 2, 1)
        found = np.asarray(kept(found, known), object)
    _give(call, found)


@rule("Where", table=SIZED)
def _where(call: Call) -> None:
    arrays = np.broadcast_arrays(*(_array(call, index) for index in range(3)))

    def chosen(condition: Any, a: Any, b: Any) -> Any:
        if condition is None or isinstance(condition, (str, Multiple)):
            if a != b:
                call.refuse("computes with the size of the batch")
            return a
        return a if condition else b

    _give(call, np.asarray(np.frompyfunc(chosen, 3, 1)(*arrays), object))


@rule("Range")
def _range(call: Call) -> None:
    call.refuse("numbers the rows of the batch")
