"""Graphs of gradients and updates to write otherwise, by the operator that they are about."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest.mock import patch

import numpy as np
import onnx
import onnx_ir as ir
from producers import COMMITTED

import gradfuse
from gradfuse.checking.reference import ReferenceSession
from gradfuse.passes.matching import attention

Array = np.ndarray[Any, Any]

CORPUS = {
    "CrossEntropyLossGrad": (
        *("torch_export_fb/ce_mean_f32", "torch_makefx/ce_mean_smooth", "tf2onnx/one_hot", "tf2onnx/gather_nd"),
        *("torch_makefx/ce_mean_weight_ignore_inductor", "torch_export_fb/ce_none_weighted"),
    ),
    "MseLossBackward": (
        *("torch_export_fb/mse_handwritten_pow_dyn", "tf2onnx/squared_error", "jax_layers/squared_error"),
        *("onnx_ad/mse_handwritten_square", "torch_export_fb/mse_sum_f32"),
    ),
    "ScaledMaskedSoftmaxBackward": (
        *("torch_aot/attn_nomask", "torch_export_fb/attn_mulmask", "tf2onnx/attention"),
        *("torch_export_fb/attn_additive_f32", "torch_makefx/attn_maskedfill_f32_noopt"),
    ),
    "GroupedBiasAddGrad": (
        *("torch_export_fb/gba_2d_ends_cmp_dyn", "torch_export_fb/gba_2d_static_split", "torch_export_fb/gba_3d_gh"),
        "jax2onnx_gemmfix/gba_3d_keep",
    ),
    "LayerNormBackward": (
        *("torch_layers/layer_norm.core", "tf2onnx/layer_norm", "jax_layers/layer_norm", "jax_layers/rms_norm"),
        "torch_layers/layer_norm_plain.make_fx",
    ),
    "BatchNormBackward": ("tf2onnx/batch_norm", "jax_layers/batch_norm", "jax_layers/batch_norm_images"),
    "GeluBackward": ("torch_layers/gelu.core", "torch_layers/gelu_tanh.core", "jax_layers/gelu"),
    "EmbeddingDenseBackward": (
        *("torch_layers/embedding.core", "jax_layers/embedding", "jax_layers/embedding_one_hot"),
        *("tf2onnx/embedding", "torch_export_fb/gba_2d_index"),
    ),
    "ThresholdBackward": ("torch_layers/relu.core", "torch_layers/relu.joint"),
    "ApplyAdamW": (*("torch_layers/adam.foreach", "torch_layers/adamw.single", "jax_layers/adam", "jax_layers/adamw"),),
    "ApplySgd": (
        *("torch_layers/sgd.foreach", "torch_layers/sgd_nesterov.single", "tf2onnx/momentum", "jax_layers/momentum"),
    ),
}
"""Graphs of tests/corpus that hold an operator."""

ATTENTION = """
    attention (float[2,2,5,4] q, float[2,2,6,4] k, float[2,2,6,4] v MASK) => (float[2,2,5,4] y) {
        kt = Transpose<perm = [0, 1, 3, 2]>(k)  products = MatMul(q, kt)
        half = Constant<value_float = 0.5>()  scores = Mul(products, half)
        MASKED
        p = Softmax<axis = -1>(masked)  y = MatMul(p, v)
    }"""
_FILLED = """
        zero = Constant<value_float = 0.0>()  least = Constant<value_float = -1e38>()
        shown = Greater(mask, zero)  masked = Where(shown, scores, least)"""
_LSTM_STEP = """
    row{t} = Gather<axis = 0>(x, at{t})  own{t} = MatMul(row{t}, w)  old{t} = MatMul(h{t}, r)
    gates{t} = Add(own{t}, old{t})
    i{t}, f{t}, o{t}, u{t} = Split<axis = 1, num_outputs = 4>(gates{t})
    is{t} = Sigmoid(i{t})  fs{t} = Sigmoid(f{t})  os{t} = Sigmoid(o{t})  ut{t} = Tanh(u{t})
    kept{t} = Mul(fs{t}, c{t})  new{t} = Mul(is{t}, ut{t})  c{n} = Add(kept{t}, new{t})
    shown{t} = Tanh(c{n})  h{n} = Mul(os{t}, shown{t})"""
_GRU_STEP = """
    row{t} = Gather<axis = 0>(x, at{t})  own{t} = MatMul(row{t}, w)  old{t} = MatMul(h{t}, r)
    zx{t}, rx{t}, nx{t} = Split<axis = 1, num_outputs = 3>(own{t})
    zh{t}, rh{t}, nh{t} = Split<axis = 1, num_outputs = 3>(old{t})
    zsum{t} = Add(zx{t}, zh{t})  z{t} = Sigmoid(zsum{t})  rsum{t} = Add(rx{t}, rh{t})  reset{t} = Sigmoid(rsum{t})
    part{t} = Mul(reset{t}, nh{t})  nsum{t} = Add(nx{t}, part{t})  n{t} = Tanh(nsum{t})
    less{t} = Sub(h{t}, n{t})  moved{t} = Mul(z{t}, less{t})  h{n} = Add(n{t}, moved{t})"""
_CTC_STEP = """
    one{t} = Pad(a{t}, by_one, low)  two{t} = Pad(a{t}, by_two, low)  skips{t} = Add(two{t}, closed)
    all{t} = Concat<axis = 0>(a{t}, one{t}, skips{t})
    ways{t} = ReduceLogSumExp<keepdims = 1>(all{t}, first)
    e{t} = Gather<axis = 0>(emitted, at{t})  e2{t} = Unsqueeze(e{t}, first)  a{n} = Add(ways{t}, e2{t})"""
_STEPS = 4


def _unrolled(step: str) -> str:
    places = " ".join(f"at{t} = Constant<value_int = {t}>()" for t in range(_STEPS))
    return places + " ".join(step.format(t=t, n=t + 1) for t in range(_STEPS))


FORWARD = {
    "ConvolutionBackward": (
        """f (float[2,2,5,5] x, float[4,2,3,3] w) => (float[2,4,3,3] y) {
            c = Conv<strides = [2, 2], pads = [1, 1, 1, 1]>(x, w)  y = Tanh(c) }""",
        """f (float[2,4,6] x, float[4,2,3] w, float[4] b) => (float[2,4,4] y) {
            y = Conv<group = 2>(x, w, b) }""",
        """f (float[2,3,4,4] x, float[5,3,1,1] w) => (float[2,5,4,4] y) {
            c = Conv(x, w)  s = Sigmoid(c)  y = Mul(c, s) }""",
    ),
    "MaxPoolBackward": (
        """f (float[2,2,6,6] x) => (float[2,2,3,3] y) {
            t = Tanh(x)  m = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(t)  y = Tanh(m) }""",
        """f (float[2,3,8] x) => (float[2,3,4] y) {
            y = MaxPool<kernel_shape = [3], strides = [2], pads = [1, 0]>(x) }""",
    ),
    "LayerNormBackward": (
        "f (float[3,5] x, float[5] w, float[5] b) => (float[3,5] y) { y = LayerNormalization<axis = -1>(x, w, b) }",
    ),
    "ThresholdBackward": ("f (float[3,5] x, float[5,4] w) => (float[3,4] y) { p = MatMul(x, w)  y = Relu(p) }",),
    "ScaledDotProductAttentionBackward": (
        ATTENTION.replace("MASKED", "masked = Identity(scores)").replace("MASK", ""),
        ATTENTION.replace("MASKED", "masked = Add(scores, mask)").replace("MASK", ", float[5,6] mask"),
        ATTENTION.replace("MASKED", _FILLED).replace("MASK", ", float[5,6] mask"),
    ),
    "LstmRecurrenceBackward": (
        f"""f (float[{_STEPS},2,4] x, float[4,12] w, float[3,12] r, float[2,3] h0, float[2,3] c0) => (float[2,3] y) {{
            {_unrolled(_LSTM_STEP)} y = Identity(h{_STEPS}) }}""",
    ),
    "GruRecurrenceBackward": (
        f"""f (float[{_STEPS},2,4] x, float[4,9] w, float[3,9] r, float[2,3] h0) => (float[2,3] y) {{
            {_unrolled(_GRU_STEP)} y = Identity(h{_STEPS}) }}""",
    ),
    "CtcLossBackward": (
        f"""f (float[4,4] x) => (float[1] y) {{
            logp = LogSoftmax<axis = 1>(x)  labels = Constant<value_ints = [0, 1, 0, 2, 0]>()
            emitted = Gather<axis = 1>(logp, labels)
            a0 = Constant<value = float[1,5] {{0, -1e30, -1e30, -1e30, -1e30}}>()  low = Constant<value_float = -1e30>()
            closed = Constant<value = float[1,5] {{-1e30, -1e30, -1e30, 0, -1e30}}>()
            by_one = Constant<value_ints = [0, 1, 0, -1]>()  by_two = Constant<value_ints = [0, 2, 0, -2]>()
            first = Constant<value_ints = [0]>()  second = Constant<value_ints = [1]>()
            three = Constant<value_ints = [3]>()  five = Constant<value_ints = [5]>()
            {_unrolled(_CTC_STEP)}
            ends = Slice(a{_STEPS}, three, five, second)  chance = ReduceLogSumExp<keepdims = 0>(ends, second)
            y = Neg(chance) }}""",
    ),
}
"""Forward models that `gradfuse.differentiate` adds the gradients of their inputs to."""

KINDS = tuple(dict.fromkeys([*CORPUS, *FORWARD]))
"""The operators."""
UNFUSED = ("LstmRecurrenceBackward", "GruRecurrenceBackward", "CtcLossBackward")
"""Those that no rule looks for."""


@dataclass(frozen=True)
class Sample:
    """A graph that holds an operator.

    Attributes:
        name: where it comes from.
        exact: its outputs in float64: those of its producer, or of itself with float64 for float32.
        count: how often the operator is fused in it.
    """

    name: str
    model: onnx.ModelProto
    feeds: dict[str, Array]
    exact: dict[str, Array]
    count: int


def as_small_as_it_is(kind: str) -> AbstractContextManager[Any]:
    """Lets attention of the size of the samples be fused, where it is what they are about."""
    return patch.object(attention, "FEWEST_SCORES", 0) if kind.startswith("ScaledDot") else nullcontext()


@cache
def samples(kind: str) -> list[Sample]:
    """The graphs that hold an operator."""
    found = []
    for name in CORPUS.get(kind, ()):
        path = COMMITTED / f"{name}.onnx"
        with np.load(path.with_suffix(".npz")) as file:
            feeds, exact = (
                {key.removeprefix(start): file[key] for key in file.files if key.startswith(start)}
                for start in ("in.", "out.")
            )
        # Some producers gave results in float32.
        is_exact = any(array.dtype == np.float64 for array in exact.values())
        found.append(_sample(kind, name, onnx.load(path), feeds, exact if is_exact else None))
    for number, text in enumerate(FORWARD.get(kind, ())):
        forward = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 18]> {text}')
        # A gradient of a mask needs that of the scores, which attention in one operator does not give.
        names = [value.name for value in forward.graph.input if value.name != "mask"]
        model = gradfuse.differentiate(forward, names, seeds={"y": "seed"})
        found.append(_sample(kind, f"differentiated {number}", model, _random(model), None))
    return found


def _sample(
    kind: str, name: str, model: onnx.ModelProto, feeds: dict[str, Array], exact: dict[str, Array] | None
) -> Sample:
    if exact is None:
        exact = ReferenceSession(ir.from_proto(model), name).run(feeds)
    if kind in UNFUSED:
        return Sample(name, model, feeds, exact, 0)
    with as_small_as_it_is(kind):
        report = gradfuse.fuse(model, policy="all", bodies=False).report
    return Sample(name, model, feeds, exact, sum(fusion.op == kind for fusion in report.fusions))


def _random(model: onnx.ModelProto) -> dict[str, Array]:
    rng = np.random.default_rng(0)
    shapes = {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in model.graph.input}
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
