"""Products of matrices."""

from __future__ import annotations

from collections.abc import Iterator

from gradfuse.differentiation.rules import Call, Gradient, gradient, summed_at_run_time
from gradfuse.differentiation.tensors import Tensor


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
            product = _transposed(rows, 2).matmul(columns)
            return product.like(b) if rank_b == 1 else product
        product = _transposed(wide_a, max(rank_a, 2)).matmul(wide_dy)
        return _summed(call, product, b, rank_b, 1, max(rank_a, 2))

    yield by_a
    yield by_b


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


@gradient("Einsum", limits="no term has a letter twice")
def einsum(call: Call) -> Iterator[Gradient]:
    """Each operand's gradient is the product of the output's gradient and the other operands."""
    equation = call.attribute("equation").replace(" ", "")
    dy = call.dy[0]
    assert dy is not None
    left, arrow, output = equation.partition("->")
    terms = left.split(",")
    if not arrow:
        letters = sorted(set(left) - set(",."))
        output = ("..." if "..." in left else "") + "".join(c for c in letters if left.count(c) == 1)
    if any(term.count(letter) > 1 for term in (*terms, output) for letter in term if letter != "."):
        raise call.error(f"equation is {equation!r}; expected no letter twice in one term")
    for index, term in enumerate(terms):
        others = [k for k in range(len(terms)) if k != index]
        given = ",".join([output, *(terms[k] for k in others)])
        if index in call.needed and ("..." in given) != ("..." in term):
            raise call.error(f"equation is {equation!r}; expected ... in all terms or in none")
        lost = [letter for letter in term if letter not in given]
        x = call.x[index]
        if index not in call.needed or x is None:
            yield None
            continue
        kept = "".join(letter for letter in term if letter not in lost)
        found = call.tape.op("Einsum", dy, *(call.x[k] for k in others), equation=f"{given}->{kept}")
        if lost:
            # It was summed over: each of its elements has the same gradient.
            found = found.unsqueeze(*(_axis_of(letter, term) for letter in lost)).expand(call.shape(x))
        yield found if "..." not in term else call.summed_to(found, x, call.y[0])


def _axis_of(letter: str, term: str) -> int:
    """The axis of a letter of a term, from behind where `...` is ahead of it."""
    ahead, _, behind = term.partition("...")
    return ahead.index(letter) if letter in ahead else behind.index(letter) - len(behind)
