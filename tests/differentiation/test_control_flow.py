"""Gradients of Loop and Scan against torch.autograd in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
import torch
from autograd import model_of, numbers, require_torchs, shaped
from torch import Tensor

from gradfuse import ModelError, TrainingSession, build_training_step, differentiate
from gradfuse.testing import assert_gradients_close

pytestmark = pytest.mark.usefixtures("inference_in_process")


@pytest.mark.parametrize("direction", [0, 1])
@pytest.mark.parametrize("out_direction", [0, 1])
@pytest.mark.parametrize("axis, out_axis", [(0, 0), (1, -1)])
def test_scans_of_all_directions_and_axes(direction: int, out_direction: int, axis: int, out_axis: int) -> None:
    model = model_of(
        "float[3] s, float[T, U] x, float[3, 3] w",
        f"""last, seen = Scan <
            num_scan_inputs = 1, scan_input_axes = [{axis}], scan_output_axes = [{out_axis}],
            scan_input_directions = [{direction}], scan_output_directions = [{out_direction}],
            body = step (float[3] before, float[3] now) => (float[3] after, float[3] out) {{
                product = MatMul(before, w)
                total = Add(product, now)
                after = Tanh(total)
                out = Mul(after, now)
            }}
        > (s, x)
        flat = Reshape(seen, minus)
        y = Concat <axis = 0> (last, flat)""",
        output="float[R] y",
        constants="int64[1] minus = {-1}",
    )
    feeds = {"s": numbers(3), "x": numbers(*((4, 3) if axis == 0 else (3, 4)), seed=1), "w": numbers(3, 3, seed=2)}

    def by_torch(s: Tensor, x: Tensor, w: Tensor) -> Tensor:
        seen = []
        turns = range(4)
        for t in reversed(turns) if direction else turns:
            now = x.select(axis, t)
            s = (s @ w + now).tanh()
            seen.append(s * now)
        return torch.cat([s, torch.stack(seen[::-1] if out_direction else seen, out_axis).flatten()])

    require_torchs(model, feeds, by_torch, ["s", "x", "w"])


@pytest.mark.parametrize("operator", ["Loop", "Scan"])
def test_the_gradient_of_a_carried_matrix_is_read_by_that_of_a_weight(operator: str) -> None:
    """onnxruntime does not run a body whose output is a copy of what a product reads, if the product is added to."""
    turn = "product = MatMul(now, w) total = Add(product, before) after = Tanh(total)"
    scan = f"""y = Scan <num_scan_inputs = 1, body =
        step (float[2, 3] before, float[2, 3] now) => (float[2, 3] after) {{ {turn} }}> (s, x)"""
    loop = f"""y = Loop <body = step (int64 k, bool go, float[2, 3] before) => (bool on, float[2, 3] after) {{
        now = Gather(x, k)
        {turn}
        on = Identity(go)
    }}> (count, yes, s)"""
    model = model_of(
        "float[2, 3] s, float[4, 2, 3] x, float[3, 3] w",
        {"Loop": loop, "Scan": scan}[operator],
        output="float[2, 3] y",
        constants="int64 count = {4}, bool yes = {1}",
    )

    def by_torch(s: Tensor, x: Tensor, w: Tensor) -> Tensor:
        for now in x:
            s = (now @ w + s).tanh()
        return s

    feeds = {"s": numbers(2, 3), "x": numbers(4, 2, 3, seed=1), "w": numbers(3, 3, seed=2)}
    for names in (["w"], ["s", "x", "w"]):
        require_torchs(model, feeds, by_torch, names)


def test_a_scan_whose_gradient_reads_nothing_of_its_turns() -> None:
    model = model_of(
        "float[2] s, float[T, 2] x",
        """y = Scan <num_scan_inputs = 1, body = step (float[2] before, float[2] now) => (float[2] after) {
            half = Constant <value_float = 0.5> ()
            kept = Mul(before, half)
            after = Add(kept, now)
        }> (s, x)""",
        output="float[2] y",
    )

    def by_torch(s: Tensor, x: Tensor) -> Tensor:
        for now in x:
            s = s * 0.5 + now
        return s

    feeds = {"s": numbers(2), "x": numbers(3, 2, seed=1)}
    require_torchs(model, feeds, by_torch, ["s"])
    require_torchs(model, feeds, by_torch, ["x"])


def test_a_scan_that_ignores_or_passes_on_what_it_carries() -> None:
    """One carried value is passed on, one is replaced, one is an integer that the others depend on."""
    model = model_of(
        "float[2] a, float[2] b, float[T, 2] x",
        """count = Constant <value_int = 1> ()
        first, second, third, seen = Scan <num_scan_inputs = 1, body = step
            (float[2] p, float[2] q, int64 k, float[2] now) => (float[2] same, float[2] r, int64 next, float[2] out) {
                same = Identity(p)
                one = Constant <value_int = 1> ()
                next = Add(k, one)
                scale = Cast <to = 1> (k)
                scaled = Mul(now, scale)
                r = Mul(scaled, p)
                out = Add(r, q)
            }
        > (a, b, count, x)
        last = Unsqueeze(second, zero)
        y = Concat <axis = 0> (last, seen)""",
        output="float[R, 2] y",
        constants="int64[1] zero = {0}",
    )

    def by_torch(a: Tensor, b: Tensor, x: Tensor) -> Tensor:
        seen = []
        for k, now in enumerate(x):
            before, b = b, now * (k + 1) * a
            seen.append(b + before)
        return torch.stack([b, *seen])

    feeds = dict(zip("abx", shaped((2,), (2,), (4, 2)).values(), strict=True))
    require_torchs(model, feeds, by_torch, ["a", "b", "x"])
    require_torchs(model, feeds, by_torch, ["x"])


LOOP = """last, other, seen = Loop (limit, {condition}, a, b) <
    body = turn (int64 k, bool go, float{shape} p, float{shape} q)
        => (bool more, float{shape} r, float{shape} s, float{shape} out) {{
        scale = Cast <to = 1> (k)
        product = MatMul(p, w)
        shifted = Add(product, scale)
        r = Sin(shifted)
        s = Mul(q, p)
        total = ReduceSum <keepdims = 0> (r)
        more = Less(total, bound)
        out = Identity(s)
    }}
>
flat = Reshape(seen, minus)
y = Concat <axis = 0> (last, other, flat)"""


@pytest.mark.parametrize("shape", ["[2]", "[n]", "[]"])
@pytest.mark.parametrize("limit, bound", [(5, 100.0), (5, 0.1), (0, 100.0), (1, 100.0)])
@pytest.mark.parametrize("condition", ["yes", ""])
def test_loops_with_a_count_and_a_condition(shape: str, limit: int, bound: float, condition: str) -> None:
    model = model_of(
        "float[2] a, float[2] b, float[2, 2] w, int64 limit, float bound, bool yes",
        LOOP.format(shape=shape if shape != "[]" else "", condition=condition),
        output="float[R] y",
        constants="int64[1] minus = {-1}",
    )
    if shape == "[]":
        for value in [*model.graph.node[0].attribute[0].g.input, *model.graph.node[0].attribute[0].g.output]:
            if value.name in "pqrs" or value.name == "out":
                value.type.tensor_type.ClearField("shape")

    def by_torch(a: Tensor, b: Tensor, w: Tensor, limit: Any, bound: Tensor, yes: Any) -> Tensor:
        seen = [a[:0]]
        for k in range(int(limit)):
            r = (a @ w + k).sin()
            a, b = r, b * a
            seen.append(b)
            if not r.sum() < bound:
                break
        return torch.cat([a, b, *seen]) + 0 * w.sum()

    feeds = dict(zip(("a", "b", "w"), shaped((2,), (2,), (2, 2)).values(), strict=True))
    given = {"limit": np.array(limit), "bound": np.array(bound, np.float32), "yes": np.array(True)}
    require_torchs(model, {**feeds, **given}, by_torch, ["a", "b", "w"] if limit else ["a", "b"])


@pytest.mark.parametrize("declared", [True, False])
def test_a_loop_whose_carried_value_grows(declared: bool) -> None:
    model = model_of(
        "float[N] a, float[1] b, int64 limit",
        """y = Loop (limit, , a) <
            body = turn (int64 k, bool go, float[n] p) => (bool more, float[m] q) {
                square = Mul(p, p)
                scaled = Mul(square, b)
                q = Concat <axis = 0> (p, scaled, b)
                more = Identity(go)
            }
        >""",
        output="float[R] y",
    )
    if not declared:
        body = model.graph.node[0].attribute[0].g
        for value in (body.input[2], body.output[1]):
            value.type.tensor_type.ClearField("shape")

    def by_torch(a: Tensor, b: Tensor, limit: Any) -> Tensor:
        for _ in range(int(limit)):
            a = torch.cat([a, a * a * b, b])
        return a

    require_torchs(model, {"a": numbers(2), "b": numbers(1), "limit": np.array(2)}, by_torch, ["a", "b"])


def test_loops_within_loops_and_branches() -> None:
    model = model_of(
        "float[2] a, float[2] b, int64 limit, bool taken",
        """y = If (taken) <
            then_branch = one () => (float[2] t) {
                t = Loop (limit, , a) <body = outer (int64 k, bool go, float[2] p) => (bool more, float[2] q) {
                    more = Identity(go)
                    q = Loop (limit, , p) <body = inner (int64 j, bool go_on, float[2] u) => (bool on, float[2] z) {
                        on = Identity(go_on)
                        w = Mul(u, b)
                        z = Sub(w, p)
                    }>
                }>
            },
            else_branch = two () => (float[2] e) { e = Mul(a, b) }
        >""",
        output="float[2] y",
    )

    def by_torch(a: Tensor, b: Tensor, limit: Any, taken: Any) -> Tensor:
        if not taken:
            return a * b
        for _ in range(int(limit)):
            u = a
            for _ in range(int(limit)):
                u = u * b - a
            a = u
        return a

    for taken in (True, False):
        feeds = {**shaped((2,), (2,)), "limit": np.array(3), "taken": np.array(taken)}
        require_torchs(model, feeds, by_torch, ["a", "b"])


@pytest.mark.parametrize(
    "body, message",
    [
        (
            "n = RandomNormalLike(p) u = RandomUniformLike(p) r = Mul(p, n) q = Mul(r, u)",
            "RandomNormalLike .*draws numbers within Loop.* Without a gradient too: RandomUniformLike",
        ),
        ("n, i, j, k = Unique(p) q = Mul(p, n)", "Unique .*no gradient rule for this operator"),
    ],
)
def test_bodies_that_are_refused(body: str, message: str) -> None:
    model = model_of(
        "float[2] a, int64 limit",
        f"""y = Loop (limit, , a) <body = turn (int64 k0, bool go, float[2] p) => (bool more, float[2] q) {{
            more = Identity(go)
            {body}
        }}>""",
        output="float[2] y",
    )
    with pytest.raises(ModelError, match=message) as error:
        differentiate(model, ["a"], seeds={"y": "v"})
    assert "\n" not in str(error.value)


def test_a_carried_integer_that_a_rounded_float_becomes_is_refused() -> None:
    """The next turn reads it as a float again: there the gradient would be lost."""
    model = model_of(
        "float[2] a, int8[2] i, int64 limit",
        """last, y = Loop (limit, , i, a) <
            body = turn (int64 k, bool go, int8[2] n, float[2] p) => (bool more, int8[2] m, float[2] q) {
                more = Identity(go)
                scale = Constant <value_float = 0.5> ()
                zero = Constant <value = int8 {0}> ()
                wide = DequantizeLinear(n, scale, zero)
                q = Add(p, wide)
                m = QuantizeLinear(p, scale, zero)
            }
        >""",
        output="float[2] y",
    )
    with pytest.raises(ModelError, match=r"QuantizeLinear .*rounding"):
        differentiate(model, ["a"], seeds={"y": "v"})


def test_a_loop_that_carries_a_sequence_is_refused() -> None:
    model = model_of(
        "float[2] a, int64 limit",
        """empty = SequenceEmpty <dtype = 1> ()
        last, all = Loop (limit, , a, empty) <
            body = turn (int64 k, bool go, float[2] p, seq(float[2]) s) => (bool more, float[2] q, seq(float[2]) r) {
                more = Identity(go)
                q = Mul(p, p)
                r = SequenceInsert(s, q)
            }
        >
        y = Identity(last)""",
        output="float[2] y",
    )
    with pytest.raises(ModelError, match="'s', which it carries along, is no tensor"):
        differentiate(model, ["a"], seeds={"y": "v"})


def test_a_model_with_a_loop_is_valid() -> None:
    model = model_of(
        "float[2] a, int64 limit",
        """y = Loop (limit, , a) <body = turn (int64 k, bool go, float[2] p) => (bool more, float[2] q) {
            more = Identity(go)
            q = Mul(p, p)
        }>""",
        output="float[2] y",
    )
    onnx.checker.check_model(differentiate(model, ["a"], seeds={"y": "v"}), full_check=True)


@pytest.mark.parametrize("trained", [True, False])
def test_operators_within_a_body_are_replaced_only_on_the_way(trained: bool) -> None:
    """An RNN with a clip, which no gradient goes through, is no error in a loop, and stays what it is."""
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 18]>
        g (float[T, N, 2] x, int64 n, float[T, N, 3] state) => (float[T, N, 3] y)
            <float[1, 3, 2] w = {1, 2, 3, 4, 5, 6}, float[1, 3, 3] r = {1, 0, 0, 0, 1, 0, 0, 0, 1},
             float[3] k = {1, 2, 3}> {
            last = Loop <body = body (int64 turn, bool more, float[T, N, 3] s) => (bool on, float[T, N, 3] t) {
                on = Identity(more)
                all = RNN <hidden_size = 3, clip = 2.0> (x, w, r)
                axis = Constant <value_ints = [1]> ()
                flat = Squeeze(all, axis)
                scaled = Mul(s, k)
                t = Add(scaled, flat)
            }> (n, , state)
            y = Tanh(last)
        }"""
    )
    if trained:
        with pytest.raises(ModelError, match=r"RNN .*it has a clip; expected none"):
            differentiate(model, ["w"], seeds={"y": "v"})
        return
    found = differentiate(model, ["k"], seeds={"y": "v"})
    loops = [node for node in found.graph.node if node.op_type == "Loop"]
    assert [node.op_type for node in loops[0].attribute[0].g.node].count("RNN") == 1


def test_weights_in_a_branch_keep_their_names_in_the_model_that_was_given() -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 18]>
        g (float[N, 2] a, bool wide) => (float[N, 2] y) {
            y = If (wide) <
                then_branch = yes () => (float[N, 2] p) <float[2] scale = {2, 3}> { p = Mul(a, scale) },
                else_branch = no () => (float[N, 2] q) { q = Tanh(a) }
            >
        }"""
    )
    before = model.SerializeToString()
    feeds = {"a": numbers(3, 2), "wide": np.array(True)}

    def by_torch(a: Tensor, wide: Tensor) -> Tensor:
        return torch.where(wide, a * torch.tensor([2.0, 3.0], dtype=a.dtype), torch.tanh(a))

    for wide in (True, False):
        require_torchs(model, {**feeds, "wide": np.array(wide)}, by_torch, ["a"])
    assert model.SerializeToString() == before


@pytest.mark.parametrize("turns", [0, 3])
def test_a_loop_whose_shapes_are_not_declared_has_those_that_it_begins_with(turns: int) -> None:
    """A loss needs the rank of what it gives."""
    float_ = onnx.helper.make_tensor_type_proto(onnx.TensorProto.FLOAT, None)
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 18]> g (float[n, 2] x) => (float[p, q] y)
        <float[2, 2] w = {0.5, -0.3, 0.2, 0.7}, int64 t = {3}> {
            h, s = Loop (t, , x) <body = b (int64 i, bool c, float[2] v) => (bool d, float[2] u, float[2] o) {
                d = Identity (c) m = MatMul (v, w) u = Tanh (m) o = ReduceMax <keepdims = 0> (u)
            }>
            f = ReduceSum <keepdims = 0> (s) y = Mul (h, f)
        }"""
    )
    model.graph.initializer[1].CopyFrom(onnx.numpy_helper.from_array(np.array(turns), "t"))
    body = model.graph.node[0].attribute[0].g
    for value in (body.input[2], *body.output[1:]):
        value.type.CopyFrom(float_)
    model.graph.output[0].type.CopyFrom(float_)
    x = np.random.default_rng(0).uniform(-1, 1, (3, 2)).astype(np.float32)
    session = TrainingSession(build_training_step(model, "mse", trainable=["w"], check=False))
    session.step(x, np.ones((3, 2), np.float32))

    def gradient(dtype: torch.dtype) -> torch.Tensor:
        leaf = torch.tensor([[0.5, -0.3], [0.2, 0.7]], dtype=dtype, requires_grad=True)
        h, total = torch.tensor(x, dtype=dtype) + 0 * leaf.sum(), torch.zeros((), dtype=dtype)
        for _ in range(turns):
            h = torch.tanh(h @ leaf)
            total = total + h.amax()
        (h * total - 1).square().mean().backward()  # type: ignore[no-untyped-call]
        assert leaf.grad is not None
        return leaf.grad

    native, exact = gradient(torch.float32), gradient(torch.float64)
    assert_gradients_close(session.gradients["w"], native, exact, torch.float32, terms=16 * float(exact.abs().max()))
