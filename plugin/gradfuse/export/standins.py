"""Placeholder operators in a translated forward program, until its gradients are written.

The gradients of their ONNX translations would be wrong: `tensor.detach()` stops a gradient; a tensor written under
`torch.no_grad` keeps its gradient; ReLU6 has none at its bounds, nor has `padding_idx` of an embedding; a masked
softmax gives 0 instead of NaN; the largest number in a logarithm of a sum of exponentials has no gradient of its own;
and ONNX has no accurate log(1 + x) for small x. Each placeholder has a gradient rule, and a function that replaces it
afterwards. This module imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import onnx
import onnx_ir as ir
import torch
from torch.export import ExportedProgram

from gradfuse import _torch_private as private
from gradfuse.custom_ops.embedding_dense_backward import MAX_RANK
from gradfuse.differentiation import linear_cross_entropy
from gradfuse.differentiation.rules import Call, Gradient, gradient, no_gradient
from gradfuse.export.decomposing import written
from gradfuse.export.grouped_products import INNER, ROWS
from gradfuse.export.translation import LOCAL_DOMAIN, OPSET_OF_FUNCTIONS

aten = torch.ops.aten

BODIES = {
    "StopGradient": "StopGradient (x) => (y) { y = Identity(x) }",
    "PassGradient": "PassGradient (x, source) => (y) { y = Identity(x) }",
    "Embedding": """
        Embedding <padding_idx: int, scale_grad_by_freq: int> (weight, indices) => (rows) {
            rows = Gather<axis=0>(weight, indices)
        }
    """,
    "HardTanh": "HardTanh (x, low, high) => (y) { y = Clip(x, low, high) }",
    "SafeSoftmax": """
        SafeSoftmax <axis: int> (scores) => (y) {
            number = Constant<value_float=-inf>()
            nothing = CastLike(number, scores)
            first = Constant<value_ints=[0]>()
            place = Constant<value_int: int = @axis>()
            axes = Unsqueeze(place, first)
            largest = ReduceMax<keepdims=1>(scores, axes)
            masked = Equal(largest, nothing)
            share = Softmax<axis: int = @axis>(scores)
            zero_number = Constant<value_float=0.0>()
            zero = CastLike(zero_number, scores)
            y = Where(masked, zero, share)
        }
    """,
    # ReduceLogSumExp takes five times as long in onnxruntime.
    "LogSumExp": """
        LogSumExp <axes: ints> (x) => (y) {
            places = Constant<value_ints: ints = @axes>()
            largest = ReduceMax<keepdims=1>(x, places)
            magnitude = Abs(largest)
            number = Constant<value_float=inf>()
            infinity = CastLike(number, x)
            unbounded = Equal(magnitude, infinity)
            zero_number = Constant<value_float=0.0>()
            zero = CastLike(zero_number, x)
            shift = Where(unbounded, zero, largest)
            difference = Sub(x, shift)
            power = Exp(difference)
            total = ReduceSum<keepdims=1>(power, places)
            logarithm = Log(total)
            y = Add(logarithm, shift)
        }
    """,
    # The rounding of 1 + x to u is undone by x / (u - 1), whose error is small wherever its factor is not.
    "Log1p": """
        Log1p (x) => (y) {
            number = Constant<value_float=1.0>()
            one = CastLike(number, x)
            u = Add(x, one)
            kept = Sub(u, one)
            whole = Equal(kept, x)
            lost = Equal(u, one)
            plain = Or(whole, lost)
            divisor = Where(plain, one, kept)
            quotient = Div(x, divisor)
            ratio = Where(plain, one, quotient)
            logarithm = Log(u)
            product = Mul(logarithm, ratio)
            y = Where(lost, x, product)
        }
    """,
    "Expm1": """
        Expm1 (x) => (y) {
            number = Constant<value_float=1.0>()
            one = CastLike(number, x)
            u = Exp(x)
            less = Sub(u, one)
            logarithm = Log(u)
            whole = Equal(logarithm, x)
            lost = Equal(u, one)
            minus_one = Neg(one)
            gone = Equal(less, minus_one)
            exact = Or(whole, gone)
            plain = Or(exact, lost)
            divisor = Where(plain, one, logarithm)
            quotient = Div(x, divisor)
            ratio = Where(plain, one, quotient)
            product = Mul(less, ratio)
            y = Where(lost, x, product)
        }
    """,
    # Jacobi's method, of one side: in each round half of the columns are paired with the others, and all but the first
    # move on by one place. A column of zeros makes their number even.
    "Rotated": """
        Rotated (matrix) => (u, s, v) {
            first_axis = Constant<value_ints=[0]>()
            row_axis = Constant<value_ints=[-2]>()
            last_axis = Constant<value_ints=[-1]>()
            none = Constant<value_int=0>()
            step = Constant<value_int=1>()
            two = Constant<value_ints=[2]>()
            sweeps = Constant<value_ints=[10]>()
            ahead = Constant<value_ints=[1]>()
            batch = Shape<start=0, end=-2>(matrix)
            rows = Shape<start=-2, end=-1>(matrix)
            columns = Shape<start=-1>(matrix)
            count = Squeeze(columns, first_axis)
            places = Range(none, count, step)
            across = Unsqueeze(places, first_axis)
            down = Unsqueeze(places, last_axis)
            diagonal = Equal(across, down)
            identity = CastLike(diagonal, matrix)
            square = Concat<axis=0>(batch, columns, columns)
            identities = Expand(identity, square)
            tall = Concat<axis=-2>(matrix, identities)
            odd = Mod(columns, two)
            lines = Shape<start=0, end=-1>(tall)
            missing = Concat<axis=0>(lines, odd)
            zero_number = Constant<value_float=0.0>()
            one_number = Constant<value_float=1.0>()
            zero = CastLike(zero_number, matrix)
            one = CastLike(one_number, matrix)
            zeros = Expand(zero, missing)
            table = Concat<axis=-1>(tall, zeros)
            even = Add(columns, odd)
            half = Div(even, two)
            before_half = Sub(half, ahead)
            rounds = Sub(even, ahead)
            all_rounds = Mul(sweeps, rounds)
            trips = Squeeze(all_rounds, first_axis)
            going = Constant<value = bool {1}>()
            rotated = Loop<body = round (int64 index, bool on, double[] held) => (bool still, double[] moved) {
                still = Identity(on)
                left = Slice(held, first_axis, half, last_axis)
                right = Slice(held, last_axis, before_half, last_axis, last_axis)
                a = Slice(left, first_axis, rows, row_axis)
                b = Slice(right, first_axis, rows, row_axis)
                aa = Mul(a, a)
                bb = Mul(b, b)
                ab = Mul(a, b)
                first = ReduceSum<keepdims=1>(aa, row_axis)
                second = ReduceSum<keepdims=1>(bb, row_axis)
                product = ReduceSum<keepdims=1>(ab, row_axis)
                sizes = Mul(first, second)
                rounding = Constant<value = double {4.9e-32}>()
                least = Mul(sizes, rounding)
                squared = Mul(product, product)
                needed = Greater(squared, least)
                divisor = Where(needed, product, one)
                twice = Add(divisor, divisor)
                difference = Sub(second, first)
                zeta = Div(difference, twice)
                positive = GreaterOrEqual(zeta, zero)
                minus_one = Neg(one)
                sign = Where(positive, one, minus_one)
                absolute = Abs(zeta)
                zeta_square = Mul(zeta, zeta)
                under_root = Add(zeta_square, one)
                root = Sqrt(under_root)
                below = Add(absolute, root)
                slope = Div(sign, below)
                tangent = Where(needed, slope, zero)
                tangent_square = Mul(tangent, tangent)
                length_square = Add(tangent_square, one)
                length = Sqrt(length_square)
                cosine = Div(one, length)
                sine = Mul(cosine, tangent)
                left_cosine = Mul(cosine, left)
                right_sine = Mul(sine, right)
                new_left = Sub(left_cosine, right_sine)
                left_sine = Mul(sine, left)
                right_cosine = Mul(cosine, right)
                new_right = Add(left_sine, right_cosine)
                fixed = Slice(new_left, first_axis, ahead, last_axis)
                rest = Slice(new_left, ahead, half, last_axis)
                far = Constant<value_ints=[-9223372036854775807]>()
                back = Slice(new_right, last_axis, far, last_axis, last_axis)
                circle = Concat<axis=-1>(rest, back)
                end = Slice(circle, last_axis, rounds, last_axis)
                others = Slice(circle, first_axis, last_axis, last_axis)
                moved = Concat<axis=-1>(fixed, end, others)
            }>(trips, going, table)
            all_lines = Shape<start=-2, end=-1>(rotated)
            upper = Slice(rotated, first_axis, rows, row_axis)
            lower = Slice(rotated, rows, all_lines, row_axis)
            upper_square = Mul(upper, upper)
            lower_square = Mul(lower, lower)
            sums = ReduceSum<keepdims=1>(upper_square, row_axis)
            parts = ReduceSum<keepdims=1>(lower_square, row_axis)
            lengths = Sqrt(sums)
            half_number = Constant<value_float=0.5>()
            share = CastLike(half_number, matrix)
            real = Greater(parts, share)
            negative = Neg(one)
            ranked = Where(real, lengths, negative)
            kept, order = TopK<axis=-1>(ranked, columns)
            wide = Concat<axis=0>(lines, columns)
            chosen_places = Expand(order, wide)
            chosen = GatherElements<axis=-1>(rotated, chosen_places)
            us = Slice(chosen, first_axis, rows, row_axis)
            v = Slice(chosen, rows, all_lines, row_axis)
            vanished = Equal(kept, zero)
            divisors = Where(vanished, one, kept)
            u = Div(us, divisors)
            s = Squeeze(kept, row_axis)
        }
    """,
    "GroupedRows": ROWS,
    "GroupedInner": INNER,
}
"""The function that replaces each."""

KEPT = (
    aten._safe_softmax.default,
    aten.log1p.default,
    aten.expm1.default,
    aten.hardtanh.default,
    aten.relu6.default,
)
"""Operators that decompositions must leave."""

_SUMMED = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)

_library: Any = torch.library.Library("gradfuse", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("stop_gradient(Tensor input) -> Tensor")
torch.library.register_fake("gradfuse::stop_gradient", lambda input: torch.empty_like(input), lib=_library)
# Decompositions compute what depends on constants of the module alone.
_library.impl("stop_gradient", lambda input: input.clone(), "CompositeExplicitAutograd")

_library.define("pass_gradient(Tensor input, Tensor source) -> Tensor")
torch.library.register_fake("gradfuse::pass_gradient", lambda input, source: torch.empty_like(input), lib=_library)
_library.impl("pass_gradient", lambda input, source: input.clone(), "CompositeExplicitAutograd")

_library.define("rotated(Tensor matrix) -> (Tensor, Tensor, Tensor)")


def _rotated(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    return u, s, v.transpose(-1, -2).contiguous()


def _shapes_of_rotated(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    columns = matrix.shape[-1]
    v = matrix.new_empty([*matrix.shape[:-2], columns, columns])
    return matrix.new_empty(matrix.shape), matrix.new_empty([*matrix.shape[:-2], columns]), v


torch.library.register_fake("gradfuse::rotated", _shapes_of_rotated, lib=_library)
_library.impl("rotated", _rotated, "CompositeExplicitAutograd")

_library.define("log_sum_exp(Tensor input, int[] dim) -> Tensor")
torch.library.register_fake("gradfuse::log_sum_exp", lambda input, dim: input.sum(dim, keepdim=True), lib=_library)
_library.impl("log_sum_exp", lambda input, dim: input.logsumexp(dim, keepdim=True), "CompositeExplicitAutograd")

LOG_SUM_EXP = torch.ops.gradfuse.log_sum_exp.default
"""`logsumexp` of floats over axes from 0 on, which stay as sizes of 1."""
linear_cross_entropy.LOG_SUMS.add((LOCAL_DOMAIN, "LogSumExp"))

ROTATED = torch.ops.gradfuse.rotated.default
"""U, the singular values, the largest first, and V of float64 matrices, (*, M, N) with M >= N > 0."""

STOP_GRADIENT = torch.ops.gradfuse.stop_gradient.default
_PASS_GRADIENT = torch.ops.gradfuse.pass_gradient.default


def keep_stops(program: ExportedProgram) -> None:
    """Mark where `detach` or `no_grad` stops gradients in a traced program: decompositions lose it."""
    written_past = _write_past_gradients(program.graph)
    for module in program.graph_module.modules():
        if not isinstance(module, torch.fx.GraphModule):
            continue
        # Those of a part of the program stay views as well: what is written there has no gradient.
        written_into = written_past if module is program.graph_module else _detached_and_written(module.graph)
        for node in list(module.graph.nodes):
            if node.target is aten.detach.default and node not in written_into:
                node.target = STOP_GRADIENT
            elif node.target is torch.ops.higher_order.wrap_with_set_grad_enabled and not node.args[0]:
                passed = _pass_through(node)
                for result in list(node.users):
                    if passed.get(result.args[1]) is not None:
                        result.replace_all_uses_with(passed[result.args[1]])
                    elif isinstance(result.meta.get("val"), torch.Tensor):
                        _stop_behind(result)
        module.recompile()


def _write_past_gradients(graph: torch.fx.Graph) -> set[torch.fx.Node]:
    """Leave what `x.data.mul_(2)` and the like write into x the gradient that it had, or none.

    Returns the calls of `detach` whose results are written into, and thus stay views.
    """
    found: dict[torch.fx.Node, None] = {}
    # Tensors after such a write -> the tensor that was written into.
    behind: dict[torch.fx.Node, torch.fx.Node] = {}
    for write in list(graph.nodes):
        for target in written(write) if write.op == "call_function" else ():
            detached = _detached(target)
            if detached is None:
                continue
            found[detached] = None
            takes_gradients = any(map(_has_gradient, write.all_input_nodes))
            if not takes_gradients and not _has_gradient(detached.args[0]):  # type: ignore[arg-type]
                continue
            order = {node: index for index, node in enumerate(graph.nodes)}
            memory = private.storage(target.meta["val"])
            for node in list(order)[: order[write]]:
                value = node.meta.get("val")
                later = [user for user in node.users if order[user] > order[write]]
                if not later or not isinstance(value, torch.Tensor) or private.storage(value) != memory:
                    continue
                had_gradient = _has_gradient(node)
                if not had_gradient and (not takes_gradients or _detached(node) is not None):
                    continue
                now = node
                while now in behind and detached.args[0] not in behind:
                    now = behind[now]
                with graph.inserting_after(write):
                    passed = changed = graph.call_function(STOP_GRADIENT, (now,))
                changed.meta = dict(node.meta)
                if had_gradient:
                    with graph.inserting_before(write):
                        source = graph.call_function(aten.clone.default, (node,))
                    with graph.inserting_after(changed):
                        passed = graph.call_function(_PASS_GRADIENT, (changed, source))
                    source.meta, passed.meta = dict(node.meta), dict(node.meta)
                behind[passed] = now
                for user in later:
                    user.replace_input_with(node, passed)
    for detached in found:
        if _has_gradient(detached.args[0]):  # type: ignore[arg-type]
            _stop_readers(detached)
    return set(found)


def _detached_and_written(graph: torch.fx.Graph) -> set[torch.fx.Node]:
    """Return the calls of `detach` whose results are written into."""
    calls = (node for node in graph.nodes if node.op == "call_function")
    detached = (_detached(target) for node in calls for target in written(node))
    return {node for node in detached if node is not None}


def _detached(node: torch.fx.Node) -> torch.fx.Node | None:
    """Return the call of `detach` that gives a tensor, or what it is a view of; None: it is of no such call."""
    while node.op == "call_function" and node.target is not aten.detach.default:
        if not _is_of_memory(node):
            return None
        node = node.args[0]  # type: ignore[assignment]
    return node if node.op == "call_function" else None


def _is_of_memory(node: torch.fx.Node) -> bool:
    """Whether a node is its first argument, written into, or a view of it."""
    first = node.args[0] if node.args else None
    values = (node.meta.get("val"), first.meta.get("val") if isinstance(first, torch.fx.Node) else None)
    tensors = [one for one in values if isinstance(one, torch.Tensor)]
    return len(tensors) == 2 and private.storage(tensors[0]) == private.storage(tensors[1])


def _stop_readers(detached: torch.fx.Node) -> None:
    """Stop the gradient of what reads a view that `detach` gives, or a view of that."""
    for user in list(detached.users):
        if user.op == "call_function" and user.args[0] is detached and _is_of_memory(user):
            _stop_readers(user)
        else:
            with user.graph.inserting_before(user):
                stopped = user.graph.call_function(STOP_GRADIENT, (detached,))
            stopped.meta = dict(detached.meta)
            user.replace_input_with(detached, stopped)


def _pass_through(block: torch.fx.Node) -> dict[Any, torch.fx.Node | None]:
    """Leave what code under `no_grad` writes into the gradients that it had, or none: PyTorch sees no change of it.

    Returns what takes the place of the results that are such a tensor, by index.
    """
    graph = block.graph
    owner: Any = graph.owning_module
    code: torch.fx.Graph = getattr(owner, str(block.args[1].target)).graph  # type: ignore[union-attr]
    given = dict(zip((node for node in code.nodes if node.op == "placeholder"), block.args[2:], strict=True))
    memory = {private.storage(one.meta["val"]) for node in code.nodes for one in written(node)}
    order = {node: index for index, node in enumerate(graph.nodes)}
    takes_gradients = any(isinstance(one, torch.fx.Node) and _has_gradient(one) for one in block.args[2:])
    passed: dict[Any, torch.fx.Node] = {}
    for node in list(order)[: order[block]]:
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or private.storage(value) not in memory:
            continue
        had_gradient = _has_gradient(node)
        if not had_gradient and not takes_gradients:
            continue
        later = [user for user in node.users if order[user] > order[block]]
        with graph.inserting_after(block):
            changed = passed[node] = graph.call_function(STOP_GRADIENT, (node,))
        changed.meta = dict(node.meta)
        if had_gradient:
            with graph.inserting_before(block):
                source = graph.call_function(aten.clone.default, (node,))
            with graph.inserting_after(changed):
                passed[node] = graph.call_function(_PASS_GRADIENT, (changed, source))
            source.meta, passed[node].meta = dict(node.meta), dict(node.meta)
        for user in later:
            user.replace_input_with(node, passed[node])
    results: Any = code.output_node().args[0]
    return {index: passed.get(given.get(_written_into(one))) for index, one in enumerate(results)}


def _written_into(node: torch.fx.Node) -> torch.fx.Node:
    """Return the tensor that a result of code is, if it was written into in place."""
    while private.is_operator(node.target) and private.is_mutable(node.target):
        node = node.args[0]  # type: ignore[assignment]
    return node


def _has_gradient(node: torch.fx.Node) -> bool:
    """Whether a node of a traced program depends on what requires a gradient."""
    pending, seen = [node], {node}
    while pending:
        one = pending.pop()
        value = one.meta.get("val")
        if one.op == "placeholder" and isinstance(value, torch.Tensor) and value.requires_grad:
            return True
        if one.target not in (STOP_GRADIENT, aten.detach.default):
            pending.extend(source for source in one.all_input_nodes if source not in seen)
            seen.update(one.all_input_nodes)
    return False


def _stop_behind(node: torch.fx.Node) -> None:
    users = list(node.users)
    with node.graph.inserting_after(node):
        stopped = node.graph.call_function(STOP_GRADIENT, (node,))
    stopped.meta = dict(node.meta)
    for user in users:
        user.replace_input_with(node, stopped)


def translations() -> dict[Any, Callable[..., Any]]:
    """Return the functions that emit the nodes, by overload, for `custom_translation_table`."""
    from onnxscript import opset18

    op: Any = opset18

    def stop_gradient(input: Any) -> Any:
        return _node("StopGradient", input)

    def pass_gradient(input: Any, source: Any) -> Any:
        return _node("PassGradient", input, source)

    def embedding(
        weight: Any, indices: Any, padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False
    ) -> Any:
        return _node(
            "Embedding", weight, indices, padding_idx=int(padding_idx), scale_grad_by_freq=int(scale_grad_by_freq)
        )

    def safe_softmax(self: Any, dim: int, dtype: int | None = None) -> Any:
        return _node("SafeSoftmax", self if dtype is None else op.Cast(self, to=dtype), axis=dim)

    def log1p(self: Any) -> Any:
        return _node("Log1p", self)

    def expm1(self: Any) -> Any:
        return _node("Expm1", self)

    def hardtanh(self: Any, min_val: float = -1.0, max_val: float = 1.0) -> Any:
        low, high = (
            op.CastLike(op.Constant(value=ir.tensor(float(one), ir.DataType.DOUBLE)), self)
            for one in (min_val, max_val)
        )
        return _node("HardTanh", self, low, high)

    def relu6(self: Any) -> Any:
        return hardtanh(self, 0.0, 6.0)

    def log_sum_exp(input: Any, dim: Sequence[int]) -> Any:
        return _node("LogSumExp", input, axes=list(dim))

    def rotated(matrix: Any) -> Any:
        node = ir.node("Rotated", [matrix], domain=LOCAL_DOMAIN, num_outputs=3)
        private.record_node(node)
        return tuple(node.outputs)

    table: dict[Any, Callable[..., Any]] = {
        STOP_GRADIENT: stop_gradient,
        ROTATED: rotated,
        LOG_SUM_EXP: log_sum_exp,
        aten.log1p.default: log1p,
        aten.expm1.default: expm1,
        aten.hardtanh.default: hardtanh,
        aten.relu6.default: relu6,
        _PASS_GRADIENT: pass_gradient,
        aten.embedding.default: embedding,
        aten._safe_softmax.default: safe_softmax,
        aten._grouped_mm.default: grouped_mm,
    }
    own = torch.ops.transformers
    # It is there once transformers is imported.
    if hasattr(own, "grouped_mm_fallback"):
        table[own.grouped_mm_fallback.default] = grouped_rows
    return table


def grouped_rows(input: Any, weight: Any, offs: Any) -> Any:
    """transformers::grouped_mm_fallback: (S, K) by (G, K, N) is (S, N), with (G) ends in S."""
    return _node("GroupedRows", input, weight, offs)


def grouped_mm(self: Any, mat2: Any, offs: Any = None, bias: Any = None, out_dtype: Any = None) -> Any:
    """aten::_grouped_mm of rows, (S, K) by (G, K, N) with ends of groups; not of columns, nor of batches."""
    if offs is None or bias is not None or len(self.shape) != 2 or len(mat2.shape) != 3:
        shapes = f"{self.shape} by {mat2.shape}, {'without' if offs is None else 'with'} offs"
        raise NotImplementedError(f"grouped_mm of {shapes}; expected (S, K) by (G, K, N), with offs and no bias")
    return grouped_rows(self, mat2, offs)


def _node(name: str, *inputs: Any, **attributes: int | list[int]) -> Any:
    results = private.results_of_translation(1)
    node = ir.node(name, list(inputs), attributes=attributes, domain=LOCAL_DOMAIN, outputs=results)
    private.record_node(node)
    return node.outputs[0]


def put_bodies_in(model: ir.Model) -> None:
    """Give a model the functions of the placeholders in it."""
    used = {node.op_type for node in model.graph.all_nodes() if node.domain == LOCAL_DOMAIN}
    for name in sorted(used):
        text = f'<domain: "{LOCAL_DOMAIN}", opset_import: ["": {OPSET_OF_FUNCTIONS}]>{BODIES[name]}'
        function = ir.serde.deserialize_function(onnx.parser.parse_function(text))
        function.opset_imports[""] = model.opset_imports[""]
        model.functions[function.identifier()] = function
        model.opset_imports[LOCAL_DOMAIN] = 1


no_gradient("StopGradient", "Rotated", domain=LOCAL_DOMAIN)


@gradient("PassGradient", domain=LOCAL_DOMAIN)
def pass_gradient(call: Call) -> Iterator[Gradient]:
    yield None
    yield call.dy[0]


@gradient("SafeSoftmax", domain=LOCAL_DOMAIN)
def safe_softmax(call: Call) -> Iterator[Gradient]:
    dy, y = call.dy[0], call.y[0]
    assert dy is not None
    yield y * (dy - (dy * y).sum([call.attribute("axis", -1) % call.rank(y)]))


@gradient("HardTanh", domain=LOCAL_DOMAIN)
def hardtanh(call: Call) -> Iterator[Gradient]:
    """None at the bounds, unlike that of Clip."""
    dy, y, low, high = call.dy[0], call.y[0], call.x[1], call.x[2]
    assert dy is not None and low is not None and high is not None
    yield dy.masked((y > low).op("And", y < high))


@gradient("LogSumExp", domain=LOCAL_DOMAIN)
def log_sum_exp(call: Call) -> Iterator[Gradient]:
    x, dy = call.operands()
    y = call.y[0]
    assert y is not None
    yield dy * (x - y).exp()


@gradient("Log1p", domain=LOCAL_DOMAIN)
def log1p(call: Call) -> Iterator[Gradient]:
    x, dy = call.operands()
    yield dy / (x + 1)


@gradient("Expm1", domain=LOCAL_DOMAIN)
def expm1(call: Call) -> Iterator[Gradient]:
    x, dy = call.operands()
    yield dy * x.exp()


@gradient("Embedding", domain=LOCAL_DOMAIN)
def embedding(call: Call) -> Iterator[Gradient]:
    """The sum of the gradients of each row's look-ups; none for the row `padding_idx`."""
    weight, indices, dy = call.x[0], call.x[1], call.dy[0]
    assert weight is not None and indices is not None and dy is not None
    padding, by_frequency = call.attribute("padding_idx", -1), call.attribute("scale_grad_by_freq", 0)
    places = indices.cast(ir.DataType.INT64)
    number = weight.value.shape[0] if weight.value.shape is not None else None
    if weight.dtype in _SUMMED and isinstance(number, int) and call.rank(indices) < MAX_RANK:
        yield dy.op(
            "EmbeddingDenseBackward", places, domain="aclnn",
            num_weights=number, padding_idx=padding, scale_grad_by_freq=by_frequency,
        )  # fmt: skip
        return
    tape = call.tape
    places = places.reshape([-1])
    rows = dy.reshape(tape.concat([tape.ints(-1), weight.size(1)]))
    counted = places.equals(tape.constant(padding)).op("Not").unsqueeze(1)
    rows = rows.masked(counted)
    columns = places.unsqueeze(1).expand(rows.shape())
    sums = weight.zeros().op("ScatterElements", columns, rows, axis=0, reduction="add")
    if by_frequency:
        ones = counted.cast(dy.dtype).expand(rows.shape())
        counts = weight.zeros().op("ScatterElements", columns, ones, axis=0, reduction="add")
        sums = sums / counts.op("Max", 1.0)
    yield sums


@gradient("GroupedRows", domain=LOCAL_DOMAIN)
def of_grouped_rows(call: Call) -> Iterator[Gradient]:
    x, weight, ends = call.x
    dy = call.dy[0]
    assert x is not None and weight is not None and dy is not None
    yield lambda: dy.op("GroupedRows", weight.op("Transpose", perm=[0, 2, 1]), ends, domain=LOCAL_DOMAIN)
    yield lambda: x.op("Transpose", perm=[1, 0]).op("GroupedInner", dy, ends, domain=LOCAL_DOMAIN)
