"""Gradients of onnxruntime's fused operators, against its own kernels forward and torch.autograd backward."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
import torch
import torch.nn.functional as F
from autograd import numbers, require_torchs
from torch import Tensor

from gradfuse import ModelError, differentiate

pytestmark = pytest.mark.usefixtures("inference_in_process")

B, S, HEADS, SIZE = 2, 4, 2, 4
WIDTH = HEADS * SIZE
SEQUENCES = f"float[B, S, {WIDTH}]"


def microsoft(inputs: str, body: str, output: str = f"B, S, {WIDTH}", constants: str = "") -> onnx.ModelProto:
    """A model with operators of onnxruntime's own."""
    text = f'<ir_version: 10, opset_import: ["": 18, "com.microsoft": 1]> g ({inputs}) => (float[{output}] y)'
    return onnx.parser.parse_model(f"{text} <{constants}> {{ {body} }}" if constants else f"{text} {{ {body} }}")


def in_parts(x: Tensor, size: int) -> Tensor:
    """The last axis as heads of a size."""
    return x.reshape(*x.shape[:-1], -1, size)


def by_head(x: Tensor) -> Tensor:
    return in_parts(x, x.shape[-1] // HEADS).transpose(1, 2)


def attended(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, causal: bool = False, scale: float | None = None
) -> Tensor:
    scores = q @ k.transpose(-1, -2) * (scale or q.shape[-1] ** -0.5)
    scores = scores if bias is None else scores + bias
    if causal:
        scores = scores.masked_fill(~torch.ones_like(scores, dtype=torch.bool).tril(), -torch.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


def filled(mask: Tensor, dtype: torch.dtype) -> Tensor:
    return (1 - mask.to(dtype)) * -10000.0


@pytest.mark.parametrize("mask", ["", "int32[B, S] m", "int32[B, S, S] m", "int32[B] m"])
@pytest.mark.parametrize("options", ["", ", unidirectional = 1", ", scale = 0.3, qkv_hidden_sizes = [8, 8, 4]"])
def test_attention(mask: str, options: str) -> None:
    sizes = [8, 8, 4] if "sizes" in options else [8, 8, 8]
    model = microsoft(
        f"float[B, S, 3] x, float[3, {sum(sizes)}] w, float[{sum(sizes)}] b" + (f", {mask}" if mask else ""),
        f"y = com.microsoft.Attention <num_heads = 2{options}> (x, w, b{', m' if mask else ''})",
        f"B, S, {sizes[2]}",
    )
    feeds: dict[str, Any] = {
        "x": numbers(B, S, 3),
        "w": numbers(3, sum(sizes), seed=1),
        "b": numbers(sum(sizes), seed=2),
    }
    whole = np.array([[1, 1, 1, 0], [1, 1, 0, 0]], np.int32)
    if mask:
        rows = np.repeat(whole[:, None], S, 1)
        feeds["m"] = {"int32[B, S] m": whole, "int32[B, S, S] m": rows}.get(mask, np.array([3, 2], np.int32))

    def by_torch(x: Tensor, w: Tensor, b: Tensor, m: Tensor | None = None) -> Tensor:
        q, k, v = (by_head(part) for part in (x @ w + b).split_with_sizes(sizes, -1))
        bias = None if m is None else filled(torch.tensor(whole), x.dtype)[:, None, None]
        return attended(q, k, v, bias, "uni" in options, 0.3 if "scale" in options else None)

    require_torchs(model, feeds, by_torch, ["x", "w", "b"])


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("mask", [True, False])
@pytest.mark.parametrize("scores", [True, False])
def test_multi_head_attention_between_sequences(bias: bool, mask: bool, scores: bool) -> None:
    """Keys are longer than queries, and values narrower."""
    model = microsoft(
        f"{SEQUENCES} q, float[B, L, {WIDTH}] k, float[B, L, 6] v"
        + (f", float[{2 * WIDTH + 6}] b" if bias else "")
        + (", int32[B, L] m" if mask else "")
        + (f", float[1, {HEADS}, S, L] s" if scores else ""),
        f"y = com.microsoft.MultiHeadAttention <num_heads = {HEADS}>"
        f" (q, k, v, {'b' if bias else ''}, {'m' if mask else ''}, {'s' if scores else ''})",
        "B, S, 6",
    )
    feeds: dict[str, Any] = {
        "q": numbers(B, S, WIDTH),
        "k": numbers(B, 5, WIDTH, seed=1),
        "v": numbers(B, 5, 6, seed=2),
    }
    if bias:
        feeds["b"] = numbers(2 * WIDTH + 6, seed=3)
    if mask:
        feeds["m"] = np.array([[1, 1, 1, 1, 0], [1, 1, 0, 0, 0]], np.int32)
    if scores:
        feeds["s"] = numbers(1, HEADS, S, 5, seed=4)

    def by_torch(q: Tensor, k: Tensor, v: Tensor, **more: Tensor) -> Tensor:
        if bias:
            q, k, v = (
                x + part for x, part in zip((q, k, v), more["b"].split_with_sizes([WIDTH, WIDTH, 6]), strict=True)
            )
        added = filled(more["m"], q.dtype)[:, None, None] if mask else torch.zeros(1, dtype=q.dtype)
        return attended(by_head(q), by_head(k), by_head(v), added + (more["s"] if scores else 0))

    require_torchs(model, feeds, by_torch, [name for name in feeds if name != "m"])


@pytest.mark.parametrize("packed", [3, 2])
def test_multi_head_attention_of_packed_inputs(packed: int) -> None:
    if packed == 3:
        model = microsoft(
            f"float[B, S, {HEADS}, 3, {SIZE}] x", f"y = com.microsoft.MultiHeadAttention <num_heads = {HEADS}> (x)"
        )
        feeds = {"x": numbers(B, S, HEADS, 3, SIZE)}
    else:
        model = microsoft(
            f"{SEQUENCES} q, float[B, L, {HEADS}, 2, {SIZE}] x",
            f"y = com.microsoft.MultiHeadAttention <num_heads = {HEADS}> (q, x)",
        )
        feeds = {"q": numbers(B, S, WIDTH), "x": numbers(B, 5, HEADS, 2, SIZE, seed=1)}

    def by_torch(x: Tensor, q: Tensor | None = None) -> Tensor:
        parts = [part.transpose(1, 2) for part in x.unbind(3)]
        return attended(*([] if q is None else [by_head(q)]), *parts)  # type: ignore[arg-type]

    require_torchs(model, feeds, by_torch, list(feeds), has_kernel=False)


def turned(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Of (batch, positions, heads, size)."""
    size = 2 * cos.shape[-1]
    rest = x[..., size:]
    one, other = (x[..., 0:size:2], x[..., 1:size:2]) if interleaved else x[..., :size].chunk(2, -1)
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    parts = one * cos - other * sin, other * cos + one * sin
    whole = torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)
    return torch.cat([whole, rest], -1)


@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.parametrize("offset", [True, False])
@pytest.mark.parametrize("partial, rank", [(True, 3), (False, 3), (False, 4)])
def test_rotary_embedding(interleaved: int, partial: bool, offset: bool, rank: int) -> None:
    half = 1 if partial else SIZE // 2
    shape = SEQUENCES if rank == 3 else f"float[B, {HEADS}, S, {SIZE}]"
    options = f"interleaved = {interleaved}" + (f", num_heads = {HEADS}, rotary_embedding_dim = 2" if partial else "")
    model = microsoft(
        f"{shape} x, int64[{'1' if offset else 'B, S'}] p, float[8, {half}] cos, float[8, {half}] sin",
        f"y = com.microsoft.RotaryEmbedding <{options}> (x, p, cos, sin)",
        f"B, S, {WIDTH}" if rank == 3 else f"B, {HEADS}, S, {SIZE}",
    )
    feeds: dict[str, Any] = {
        "x": numbers(B, S, WIDTH) if rank == 3 else numbers(B, HEADS, S, SIZE),
        "p": np.array([2]) if offset else np.array([[0, 1, 2, 3], [4, 3, 2, 1]]),
        "cos": numbers(8, half, seed=1),
        "sin": numbers(8, half, seed=2),
    }

    def by_torch(x: Tensor, p: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        positions = p + torch.arange(S).unsqueeze(0) if offset else p
        rows = in_parts(x, SIZE) if rank == 3 else x.transpose(1, 2)
        y = turned(rows, cos[positions], sin[positions], bool(interleaved))
        return y.flatten(2) if rank == 3 else y.transpose(1, 2)

    require_torchs(model, feeds, by_torch, ["x", "cos", "sin"])


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(
    "options",
    ["", "do_rotary = 1, ", "do_rotary = 1, rotary_interleaved = 1, ", "local_window_size = 2, ", "softcap = 1.5, "],
)
@pytest.mark.parametrize("lengths", [(S, S), (S, 1), (2, S - 1)], ids=str)
def test_group_query_attention(packed: bool, options: str, lengths: tuple[int, int]) -> None:
    """Four heads of queries, two of keys and values; no past. A window may have nothing but what is behind the end."""
    rotary = "do_rotary" in options
    inputs = "float[B, S, 128] q" if packed else "float[B, S, 64] q, float[B, S, 32] k, float[B, S, 32] v"
    model = microsoft(
        f"{inputs}, int32[B] n, int32 t" + (", float[8, 8] cos, float[8, 8] sin" if rotary else ""),
        f"y, pk, pv = com.microsoft.GroupQueryAttention <num_heads = 4, {options}kv_num_heads = 2>"
        f" (q, {', ' if packed else 'k, v'}, , , n, t{', cos, sin' if rotary else ''})",
        "B, S, 64",
    )
    feeds: dict[str, Any] = {"q": numbers(B, S, 128 if packed else 64)}
    if not packed:
        feeds |= {"k": numbers(B, S, 32, seed=1), "v": numbers(B, S, 32, seed=2)}
    wrt = list(feeds)
    feeds |= {"n": np.array(lengths, np.int32) - 1, "t": np.array(S, np.int32)}
    if rotary:
        feeds |= {"cos": numbers(8, 8, seed=3), "sin": numbers(8, 8, seed=4)}

    def by_torch(q: Tensor, k: Any = None, v: Any = None, **more: Tensor) -> Any:
        if packed:
            q, k, v = q.split_with_sizes([64, 32, 32], -1)
        q, k, v = (in_parts(x, 16) for x in (q, k, v))
        if rotary:
            tables = more["cos"][:S].unsqueeze(0), more["sin"][:S].unsqueeze(0)
            q, k = (turned(x, *tables, "interleaved" in options) for x in (q, k))
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        scores = q @ k.transpose(-1, -2) * 16**-0.5
        scores = (scores / 1.5).tanh() * 1.5 if "softcap" in options else scores
        allowed = torch.ones(S, S, dtype=torch.bool).tril()
        if "window" in options:
            allowed = allowed & ~torch.ones(S, S, dtype=torch.bool).tril(-2)
        seen = allowed & (torch.arange(S) < torch.tensor(lengths).reshape(B, 1, 1, 1))
        some = seen.any(-1, keepdim=True)
        weights = scores.masked_fill(~(seen | ~some), -torch.inf).softmax(-1).masked_fill(~seen, 0)
        return (weights @ v).transpose(1, 2).flatten(2)

    require_torchs(model, feeds, by_torch, wrt)


@pytest.mark.parametrize("segments, positions", [(True, True), (True, False), (False, False)])
def test_embed_layer_normalization(segments: bool, positions: bool) -> None:
    model = microsoft(
        "int32[B, S] i, float[9, 8] w, float[6, 8] p, float[8] gamma, float[8] beta"
        + (", int32[B, S] s, float[2, 8] e" if segments else "")
        + (", int32[B, S] at" if positions else ""),
        f"""z, m, sum = com.microsoft.EmbedLayerNormalization <epsilon = 0.01>
            (i, {"s" if segments else ""}, w, p, {"e" if segments else ""}, gamma, beta, , {"at" if positions else ""})
        y = Add(z, sum)""",
        "B, S, 8",
    )
    feeds: dict[str, Any] = {
        "i": np.array([[0, 8, 8, 1], [2, 3, 8, 0]], np.int32),
        "w": numbers(9, 8),
        "p": numbers(6, 8, seed=1),
        "gamma": numbers(8, seed=2),
        "beta": numbers(8, seed=3),
    }
    if segments:
        feeds |= {"s": np.array([[0, 0, 1, 1], [0, 1, 1, 1]], np.int32), "e": numbers(2, 8, seed=4)}
    if positions:
        feeds["at"] = np.array([[0, 1, 2, 5], [1, 1, 0, 0]], np.int32)

    def by_torch(i: Tensor, w: Tensor, p: Tensor, gamma: Tensor, beta: Tensor, **more: Tensor) -> Tensor:
        total = w[i] + p[more["at"] if positions else torch.arange(S)]
        total = total + more["e"][more["s"]] if segments else total
        return F.layer_norm(total, (8,), gamma, beta, 0.01) + total

    require_torchs(model, feeds, by_torch, ["w", "p", "gamma", "beta", *(["e"] if segments else [])])


@pytest.mark.parametrize(
    "added, activation, by_torch",
    [
        (True, '"Relu"', torch.relu),
        (False, '"Relu"', torch.relu),
        (False, '"LeakyRelu", activation_params = [0.3]', lambda x: F.leaky_relu(x, 0.3)),
        (False, '"Clip", activation_params = [-0.5, 0.7]', lambda x: x.clamp(-0.5, 0.7)),
        (False, '"HardSigmoid", activation_params = [0.2, 0.6]', lambda x: (0.2 * x + 0.6).clamp(0, 1)),
    ],
)
def test_fused_convolutions(added: bool, activation: str, by_torch: Any) -> None:
    model = microsoft(
        "float[N, 2, 5] x, float[4, 1, 3] w, float[4] b" + (", float[N, 4, 3] z" if added else ""),
        f"y = com.microsoft.FusedConv <activation = {activation}, group = 2, strides = [2], pads = [1, 1]>"
        f" (x, w, b{', z' if added else ''})",
        "N, 4, 3",
    )
    feeds = {"x": numbers(2, 2, 5), "w": numbers(4, 1, 3, seed=1), "b": numbers(4, seed=2)}
    if added:
        feeds["z"] = numbers(2, 4, 3, seed=3)

    def expected(x: Tensor, w: Tensor, b: Tensor, z: Tensor | None = None) -> Any:
        y = F.conv1d(x, w, b, stride=2, padding=1, groups=2)
        return by_torch(y if z is None else y + z)

    require_torchs(model, feeds, expected, list(feeds))


@pytest.mark.parametrize("opset", [23, 24])
@pytest.mark.parametrize("is_causal", [0, 1])
def test_attention_with_past_keys_and_values(opset: int, is_causal: int) -> None:
    """ONNX's own operator: what came before is ahead of the new keys and values, which are results as well."""
    model = onnx.parser.parse_model(f"""
        <ir_version: 11, opset_import: ["": {opset}]>
        attention (
            float[B, 2, S, 4] q, float[B, 2, S, 4] k, float[B, 2, S, 4] v, float[B, 2, P, 4] pk, float[B, 2, P, 4] pv
        ) => (float[B, 2, S, 4] y) {{
            attended, keys, values = Attention <is_causal = {is_causal}> (q, k, v, , pk, pv)
            products = Mul(keys, values)  axes = Constant<value_ints = [2]>()
            sums = ReduceSum(products, axes)
            y = Add(attended, sums)
        }}""")
    feeds = {name: numbers(2, 2, 3, 4, seed=k) for k, name in enumerate("qkv")}
    feeds |= {name: numbers(2, 2, 5, 4, seed=k) for k, name in enumerate(("pk", "pv"), 3)}

    def by_torch(q: Tensor, k: Tensor, v: Tensor, pk: Tensor, pv: Tensor) -> Tensor:
        keys, values = torch.cat([pk, k], 2), torch.cat([pv, v], 2)
        mask = torch.ones(3, 8, dtype=torch.bool).tril(5) if is_causal else None
        return F.scaled_dot_product_attention(q, keys, values, mask) + (keys * values).sum(2, keepdim=True)

    require_torchs(model, feeds, by_torch, ["q", "k", "v", "pk", "pv"])


def test_fused_gemm() -> None:
    model = microsoft(
        "float[N, 3] a, float[4, 3] b, float[4] c",
        'y = com.microsoft.FusedGemm <activation = "LeakyRelu", activation_alpha = 0.2, transB = 1, alpha = 0.5>'
        " (a, b, c)",
        "N, 4",
    )
    feeds = {"a": numbers(2, 3), "b": numbers(4, 3, seed=1), "c": numbers(4, seed=2)}
    require_torchs(model, feeds, lambda a, b, c: F.leaky_relu(0.5 * a @ b.T + c, 0.2), ["a", "b", "c"])


@pytest.mark.parametrize(
    "inputs, body, message",
    [
        (
            f"{SEQUENCES} x, {SEQUENCES} k, float[B, 2, P, 4] p",
            "y = com.microsoft.MultiHeadAttention <num_heads = 2> (x, k, k, , , , p, p)",
            "MultiHeadAttention .*past_key is given; expected that it is not",
        ),
        (
            f"{SEQUENCES} x, float[8, 24] w, int32[K] m",
            "y = com.microsoft.Attention <num_heads = 2> (x, w, , m)",
            r"Attention .*mask_index has shape \[K\]; expected one number a sequence",
        ),
        (
            f"{SEQUENCES} x, int32[B] n, int32 t, float[2] sink",
            "y = com.microsoft.GroupQueryAttention <num_heads = 2, kv_num_heads = 1> (x, , , , , n, t, , , , , sink)",
            "GroupQueryAttention .*head_sink is given",
        ),
        (
            "float[B, 2, 5] x, float[4, 2, 3] w",
            'y = com.microsoft.FusedConv <activation = "Selu"> (x, w)',
            "FusedConv .*activation is 'Selu'; expected Relu",
        ),
        (
            f"{SEQUENCES} x, {SEQUENCES} k",
            "z, pk, pv, y = com.microsoft.MultiHeadAttention <num_heads = 2> (x, k, k)",
            "MultiHeadAttention .*output 3, 'y', is used",
        ),
    ],
)
def test_what_is_refused(inputs: str, body: str, message: str) -> None:
    with pytest.raises(ModelError, match=message) as error:
        differentiate(microsoft(inputs, body), ["x"], seeds={"y": "v"})
    assert "\n" not in str(error.value)
