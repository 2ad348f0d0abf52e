"""Time and memory that grow with the depth of a model as its nodes do: 200 layers whose sizes are dynamic."""

from __future__ import annotations

import time
from collections import Counter

import numpy as np
import onnx
import onnx.parser
import pytest

from gradfuse import build_training_step, explain, fuse

WIDTH, HEADS = 8, 2
SECONDS = 60
"""Of CPU time, at most; it is half of that if each layer takes as long as the others, on a machine of usual speed."""
GROWTH = 1.6
"""How much longer a layer may take among four times as many, on whatever machine; with the square it is four times."""

LAYER = """
    q{k} = MatMul(x{k}, wq{k})
    v{k} = MatMul(x{k}, wv{k})
    shape{k} = Shape(x{k})
    batch{k} = Gather <axis = 0> (shape{k}, first)
    steps{k} = Gather <axis = 0> (shape{k}, second)
    heads{k} = Concat <axis = 0> (batch{k}, steps{k}, split)
    whole{k} = Concat <axis = 0> (batch{k}, steps{k}, joined)
    qr{k} = Reshape(q{k}, heads{k})
    vr{k} = Reshape(v{k}, heads{k})
    qt{k} = Transpose <perm = [0, 2, 1, 3]> (qr{k})
    kt{k} = Transpose <perm = [0, 2, 3, 1]> (qr{k})
    vt{k} = Transpose <perm = [0, 2, 1, 3]> (vr{k})
    dots{k} = MatMul(qt{k}, kt{k})
    scaled{k} = Mul(dots{k}, scale)
    part{k} = Slice(mask, zero, steps{k}, axis)
    causal{k} = Slice(part{k}, zero, steps{k}, other_axis)
    scores{k} = Where(causal{k}, scaled{k}, least)
    weights{k} = Softmax <axis = -1> (scores{k})
    mixed{k} = MatMul(weights{k}, vt{k})
    back{k} = Transpose <perm = [0, 2, 1, 3]> (mixed{k})
    flat{k} = Reshape(back{k}, whole{k})
    all{k} = Slice(flat{k}, zero, many, second)
    sum{k} = Add(x{k}, all{k})
    x{n} = LayerNormalization <axis = -1> (sum{k}, gain)
"""
"""A layer of attention with a causal mask that is cut to size, and a slice of all steps, as exporters write them."""


def attention(layers: int) -> onnx.ModelProto:
    body = "".join(LAYER.format(k=k, n=k + 1) for k in range(layers))
    weights = ", ".join(f"float[{WIDTH}, {WIDTH}] w{role}{k}" for k in range(layers) for role in "qv")
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 18]>
        g (float[batch, time, {WIDTH}] x0) => (float[b, t, {WIDTH}] x{layers})
        <int64[1] first = {{0}}, int64[1] second = {{1}}, int64[2] split = {{{HEADS}, {WIDTH // HEADS}}},
         int64[1] joined = {{{WIDTH}}}, int64[1] zero = {{0}}, int64[1] axis = {{2}}, int64[1] other_axis = {{3}},
         int64[1] many = {{9223372036854775807}},
         float scale = {{0.5}}, float least = {{-3.4e38}}, float[{WIDTH}] gain = {{{", ".join(["1"] * WIDTH)}}},
         bool[1, 1, 16, 16] mask, {weights}> {{ {body} }}"""
    )
    arrays = {"mask": np.tril(np.ones((1, 1, 16, 16), bool))}
    rng = np.random.default_rng(0)
    names = [f"w{role}{k}" for k in range(layers) for role in "qv"]
    arrays |= {name: rng.standard_normal((WIDTH, WIDTH)).astype(np.float32) / 4 for name in names}
    kept = [one for one in model.graph.initializer if one.name not in arrays]
    del model.graph.initializer[:]
    model.graph.initializer.extend([*kept, *(onnx.numpy_helper.from_array(a, name) for name, a in arrays.items())])
    return model


def test_sizes_that_derive_from_one_another_are_computed_once() -> None:
    """What is added to a slice of itself has a size of two sizes: walked anew, they would double with each layer."""
    layer = (
        "s{k} = Slice(x{k}, zero, many, axis)  a{k} = Add(x{k}, s{k})  m{k} = MatMul(a{k}, w)  x{n} = Softmax(m{k}) "
    )
    body = "".join(layer.format(k=k, n=k + 1) for k in range(24))
    model = onnx.parser.parse_model(
        f"""<ir_version: 9, opset_import: ["": 18]> g (float[B, T, 2] x0) => (float[B, T2, 2] x24)
        <int64[1] zero = {{0}}, int64[1] many = {{100}}, int64[1] axis = {{1}}, float[2, 2] w = {{1, 2, -1, 0.5}}>
        {{ {body} }}"""
    )
    begin = time.process_time()
    step = build_training_step(model, "mse")
    assert time.process_time() - begin < SECONDS
    assert step.report is not None and len(step.report.fusions) >= 24


@pytest.mark.long
def test_200_layers_are_built_fused_and_explained() -> None:
    seconds = {}
    for layers in (50, 200):
        begin = time.process_time()
        plain = build_training_step(attention(layers), "mse", fuse=False).model
        fused = fuse(plain)
        explain(plain)
        seconds[layers] = time.process_time() - begin
    assert seconds[200] < 4 * GROWTH * seconds[50], seconds
    assert seconds[200] < SECONDS, seconds
    counts = Counter(fusion.op for fusion in fused.report.fusions)
    assert counts["LayerNormBackward"] >= 199 and counts["ScaledMaskedSoftmaxBackward"] == 200
