"""Products of matrices."""

from __future__ import annotations

import math
import string
from collections.abc import Iterator

import numpy as np
import onnx_ir as ir

from gradfuse.differentiation.rules import Call, Gradient, gradient, summed_at_run_time
from gradfuse.differentiation.tensors import Tensor
from gradfuse.models.propagation import broadcast, letter_sizes

_MANY_ROWS = 1024
"""Measured, see docs/performance.md: from here on a transposition takes less than what it saves."""


@gradient("MatMul")
def matmul(call: Call) -> Iterator[Gradient]:
    a, b, dy = call.x[0], call.x[1], call.dy[0]
    assert a is not None and b is not None and dy is not None
    rank_a, rank_b = call.rank(a), call.rank(b)
    if rank_a == 1 and rank_b == 1:
        yield lambda: dy * b
        yield lambda: dy * a
        return
    # A vector is a matrix of one row or one column.
    wide_a = a if rank_a > 1 else a.unsqueeze(0)
    wide_b = b if rank_b > 1 else b.unsqueeze(1)
    wide_dy = dy.unsqueeze(-2) if rank_a == 1 else dy.unsqueeze(-1) if rank_b == 1 else dy

    def by_a() -> Tensor:
        product = wide_dy.matmul(_transposed(wide_b, max(rank_b, 2)))
        return _summed(call, product, a, rank_a, 0, max(rank_b, 2))

    def by_b() -> Tensor:
        if rank_b <= 2 < rank_a:
            # One product of matrices in the place of a batch of them that is summed.
            rows = wide_a.reshape([-1, 0]) if rank_a == 2 else _rows(wide_a)
            columns = _rows(wide_dy)
            product = _of_weight(call, rows, columns)
            return product.like(b) if rank_b == 1 else product
        if rank_a == rank_b == 2:
            return _of_weight(call, wide_a, wide_dy)
        product = _transposed(wide_a, max(rank_a, 2)).matmul(wide_dy)
        return _summed(call, product, b, rank_b, 1, max(rank_a, 2))

    yield by_a
    yield by_b


def _of_weight(call: Call, rows: Tensor, columns: Tensor) -> Tensor:
    """The gradient of a matrix that is multiplied with rows: rows^T columns.

    Of a transposed matrix, as exporters write linear layers, it is (columns^T rows)^T: the gradient through the
    transposition is then a product as it is. With many rows onnxruntime is faster the first way.
    """
    b = call.x[1]
    assert b is not None
    producer = b.value.producer()
    counts = call.dims(call.y[0])[:-1]
    known = [count for count in counts if isinstance(count, int)]
    is_short = len(known) == len(counts) and math.prod(known) < _MANY_ROWS
    if producer is not None and producer.op_type == "Transpose" and not producer.domain and is_short:
        return _transposed(_transposed(columns, 2).matmul(rows), 2)
    return _transposed(rows, 2).matmul(columns)


def _transposed(tensor: Tensor, rank: int) -> Tensor:
    return tensor.transpose([*range(rank - 2), rank - 1, rank - 2])


def _rows(tensor: Tensor) -> Tensor:
    """The tensor as a matrix, with all dimensions but the last joined."""
    tape = tensor.tape
    # Without elements a -1 would not be determined.
    count = tensor.op("Shape", end=-1).op("ReduceProd", keepdims=1)
    return tensor.reshape(tape.concat([count, tensor.size(-1)]))


def _summed(call: Call, product: Tensor, to: Tensor, rank: int, index: int, other_rank: int) -> Tensor:
    """Sum over the batch axes in which an operand was broadcast; a vector loses the axis that it was given."""
    if rank == 1:
        product = product.squeeze(-2 if index == 0 else -1)
        extra = max(other_rank - 2, 0)
        return product.sum(list(range(extra)), keepdims=False)
    batch = max(rank, other_rank) - 2
    if not batch:
        return product
    dims = call.dims(to)[:-2]
    other = call.x[1 - index]
    assert other is not None
    others = call.dims(other)[:-2] if call.rank(other) > 2 else ()
    extra = batch - len(dims)
    axes = list(range(extra))
    for axis in range(len(dims)):
        k = axis + extra - (batch - len(others))
        size = others[k] if k >= 0 else 1
        if dims[axis] == 1 and size != 1:
            axes.append(extra + axis)
        elif not isinstance(dims[axis], int) and (dims[axis] is None or dims[axis] != size) and size != 1:
            return summed_at_run_time(product, to, product)
    if not axes:
        return product
    if len(axes) == extra:
        return product.sum(axes, keepdims=False)
    return product.sum(axes).squeeze(*range(extra))


@gradient("Gemm")
def gemm(call: Call) -> Iterator[Gradient]:
    """alpha op(A) op(B) + beta C."""
    a, b, dy = call.x[0], call.x[1], call.dy[0]
    assert a is not None and b is not None and dy is not None
    alpha, beta = call.attribute("alpha", 1.0), call.attribute("beta", 1.0)
    trans_a, trans_b = call.attribute("transA", 0), call.attribute("transB", 0)

    def product(left: Tensor, right: Tensor, trans_left: int, trans_right: int) -> Tensor:
        if alpha == 1 and not trans_left and not trans_right:
            return left.matmul(right)
        return left.op("Gemm", right, alpha=alpha, transA=trans_left, transB=trans_right)

    yield lambda: product(b, dy, trans_b, 1) if trans_a else product(dy, b, 0, 1 - trans_b)
    yield lambda: product(dy, a, 1, trans_a) if trans_b else product(a, dy, 1 - trans_a, 0)
    c = call.input(2)
    if c is not None:
        yield lambda: call.summed_to(dy * beta, c, call.y[0])


@gradient("AffineGrid")
def affine_grid(call: Call) -> Iterator[Gradient]:
    """Each matrix is multiplied with the coordinates of the grid, which the operator itself gives for a unit matrix."""
    theta, size, dy = call.x[0], call.x[1], call.dy[0]
    assert theta is not None and size is not None and dy is not None
    tape = call.tape
    known = [call.dims(theta)[1], call.rank(call.y[0]) - 2 if call.y[0].value.shape is not None else None]
    axes = next((count for count in known if isinstance(count, int)), None)
    if axes is None:
        raise call.error("the size of its matrices is unknown; expected a model with shapes")
    one = tape.concat([tape.ints(1), size.slice(tape.ints(1), tape.ints(axes + 2), tape.ints(0))])
    unit = tape.constant(np.eye(axes, axes + 1)[None], dy.dtype)
    options = {"align_corners": call.attribute("align_corners", 0)}
    grid = unit.op("AffineGrid", one, **options).reshape([-1, axes])
    last = grid.slice(tape.ints(0), tape.ints(1), tape.ints(1)).ones()
    coordinates = tape.op("Concat", grid, last, axis=1)
    rows = dy.reshape(tape.concat([dy.size(0), tape.op("Shape", grid)]))
    yield rows.transpose([0, 2, 1]).matmul(coordinates)
    yield None


@gradient("Einsum", limits="... ahead of the letters of a term, and in the output")
def einsum(call: Call) -> Iterator[Gradient]:
    """Each operand's gradient is the product of the output's gradient and the other operands.

    A letter that a term has twice is another one there, and a unit matrix has both: the gradient lies on the diagonal.
    """
    equation = call.attribute("equation").replace(" ", "")
    dy = call.dy[0]
    assert dy is not None
    left, arrow, output = equation.partition("->")
    terms = left.split(",")
    if not arrow:
        letters = sorted(set(left) - set(",."))
        output = ("..." if "..." in left else "") + "".join(c for c in letters if left.count(c) == 1)
    sizes = [letter_sizes(term, call.dims(x)) for x, term in zip(call.x, terms, strict=True) if x is not None]
    for index, written in enumerate(terms):
        others = [k for k in range(len(terms)) if k != index]
        term, diagonals = _with_own_letters(written, set(equation))
        given = ",".join([output, *(terms[k] for k in others), *("".join(pair) for pair in diagonals)])
        x = call.x[index]
        if index not in call.needed or x is None:
            yield None
            continue
        batched = "..." in given or "..." in term
        if batched and not (output.startswith("...") and (term.startswith("...") or "..." not in term)):
            raise call.error(f"equation is {equation!r}; expected ... ahead of the letters, and in the output")
        own = [letter for letter in term if letter != "."]
        lost = [letter for letter in own if letter not in given]
        kept = "".join(letter for letter in own if letter not in lost)
        units = [_unit_matrix(x, _axis_of(letter, term)) for _, letter in diagonals]
        operands = [*(call.x[k] for k in others), *units]
        found = call.tape.op("Einsum", dy, *operands, equation=f"{given}->{'...' if batched else ''}{kept}")
        batch = broadcast(*(batch for batch, _ in sizes)) if batched else []
        if batched and "..." not in term:
            found, batch = found.sum(list(range(len(batch))), keepdims=False), []
        # What was summed over has the same gradient throughout.
        found = found.unsqueeze(*(_axis_of(letter, term) for letter in lost))
        paired = {letter for pair in diagonals for letter in pair}
        dims = [*batch]
        for letter in own:
            everywhere = range(len(terms)) if letter in output or letter in paired else others
            name = next((first for first, second in diagonals if second == letter), letter)
            known = [[sizes[k][1][name]] for k in everywhere if name in sizes[k][1]]
            dims += [1] if letter in lost else broadcast(*known)
        found.value.shape = ir.Shape(dims)
        yield _fitted(call, found, x)


def _fitted(call: Call, gradient: Tensor, x: Tensor) -> Tensor:
    """Bring a gradient of known rank to the shape of an operand; axes of size 1 of either are broadcast."""
    dims, own = [d if isinstance(d, int) else d.value for d in gradient.value.shape or ()], call.dims(x)
    narrow = dims[len(dims) - len(own) :]
    if any(
        size != 1 and wide != size and (wide == 1 or not isinstance(wide, int))
        for wide, size in zip(narrow, own, strict=True)
    ):
        gradient = gradient.expand(call.shape(x))
        gradient.value.shape = ir.Shape(broadcast(dims, list(own)))
    return call.summed_to(gradient, x, gradient)


def _with_own_letters(term: str, taken: set[str]) -> tuple[str, list[tuple[str, str]]]:
    """Return a term whose letters differ, and the pairs of letters that stand for one of the old term."""
    free = (letter for letter in string.ascii_letters if letter not in taken)
    letters: list[str] = []
    pairs = []
    for letter in term:
        if letter != "." and letter in letters:
            pairs.append((letter, next(free)))
            letter = pairs[-1][1]
        letters.append(letter)
    return "".join(letters), pairs


def _unit_matrix(x: Tensor, axis: int) -> Tensor:
    """Return the unit matrix of the size of an axis."""
    tape = x.tape
    places = tape.op("Range", tape.constant(0), x.size(axis).squeeze(0), tape.constant(1))
    return places.unsqueeze(0).equals(places.unsqueeze(1)).cast(x.dtype)


def _axis_of(letter: str, term: str) -> int:
    """The axis of a letter of a term, from behind where `...` is ahead of it."""
    ahead, _, behind = term.partition("...")
    return ahead.index(letter) if letter in ahead else behind.index(letter) - len(behind)
