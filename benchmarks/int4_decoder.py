"""Write a decoder of Qwen3's shape in int4 with random weights, tensor by tensor: it is never in memory as a whole.

By default it has the sizes of Qwen3-1.7B: rotary embeddings, RMS norms, also of queries and keys, and grouped queries.
Products are MatMulNBits of 4 bits, in blocks of 32 with a float32 scale each, and the embedding is float16. The head is
the product of the embedding's shape, in int4 as well.

    python benchmarks/int4_decoder.py OUT.onnx [--layers N] [--hidden N] ...
"""

from __future__ import annotations

import argparse
import pathlib
from typing import BinaryIO

import numpy as np
import onnx
import onnx.parser
from onnx import TensorProto

BLOCK = 32
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The modules of a layer that adapters are put beside."""

_ROWS = 4096
"""How many rows of a tensor are drawn at once."""
_LAYER = """
    {b}_n1 = RMSNormalization<epsilon = 1e-6>({x}, "{m}.input_layernorm.weight")
    {q_proj}
    {k_proj}
    {v_proj}
    {b}_q_heads = Reshape({b}_q_proj, query_heads)
    {b}_k_heads = Reshape({b}_k_proj, key_heads)
    {b}_v_heads = Reshape({b}_v_proj, key_heads)
    {b}_q_norm = RMSNormalization<epsilon = 1e-6>({b}_q_heads, "{m}.self_attn.q_norm.weight")
    {b}_k_norm = RMSNormalization<epsilon = 1e-6>({b}_k_heads, "{m}.self_attn.k_norm.weight")
    {b}_q_rows = Transpose<perm = [0, 2, 1, 3]>({b}_q_norm)
    {b}_k_rows = Transpose<perm = [0, 2, 1, 3]>({b}_k_norm)
    {b}_v_rows = Transpose<perm = [0, 2, 1, 3]>({b}_v_heads)
    {b}_q1, {b}_q2 = Split<axis = 3, num_outputs = 2>({b}_q_rows)
    {b}_k1, {b}_k2 = Split<axis = 3, num_outputs = 2>({b}_k_rows)
    {b}_q_minus = Neg({b}_q2)
    {b}_k_minus = Neg({b}_k2)
    {b}_q_turned = Concat<axis = 3>({b}_q_minus, {b}_q1)
    {b}_k_turned = Concat<axis = 3>({b}_k_minus, {b}_k1)
    {b}_q_cos = Mul({b}_q_rows, cosines)
    {b}_q_sin = Mul({b}_q_turned, sines)
    {b}_q = Add({b}_q_cos, {b}_q_sin)
    {b}_k_cos = Mul({b}_k_rows, cosines)
    {b}_k_sin = Mul({b}_k_turned, sines)
    {b}_k = Add({b}_k_cos, {b}_k_sin)
    {b}_q_groups = Reshape({b}_q, groups)
    {b}_k_groups = Unsqueeze({b}_k, second)
    {b}_v_groups = Unsqueeze({b}_v_rows, second)
    {b}_kt = Transpose<perm = [0, 1, 2, 4, 3]>({b}_k_groups)
    {b}_products = MatMul({b}_q_groups, {b}_kt)
    {b}_scores = Mul({b}_products, scale)
    {b}_past = Add({b}_scores, future)
    {b}_probs = Softmax({b}_past)
    {b}_mixed = MatMul({b}_probs, {b}_v_groups)
    {b}_heads = Reshape({b}_mixed, all_heads)
    {b}_rows = Transpose<perm = [0, 2, 1, 3]>({b}_heads)
    {b}_joined = Reshape({b}_rows, joined)
    {o_proj}
    {b}_sum = Add({x}, {b}_o_proj)
    {b}_n2 = RMSNormalization<epsilon = 1e-6>({b}_sum, "{m}.post_attention_layernorm.weight")
    {gate_proj}
    {up_proj}
    {b}_sigmoid = Sigmoid({b}_gate_proj)
    {b}_silu = Mul({b}_gate_proj, {b}_sigmoid)
    {b}_gated = Mul({b}_silu, {b}_up_proj)
    {down_proj}
    {b}_out = Add({b}_sum, {b}_down_proj)
"""
_MODEL = """<ir_version: 10, opset_import: ["": 23, "com.microsoft": 1]>
decoder (int64[{batch}, {length}] tokens) => (float[{rows}, {vocabulary}] logits)
    <int64[4] query_heads = {{0, {length}, {heads}, {head}}}, int64[4] key_heads = {{0, {length}, {kv_heads}, {head}}},
     int64[5] groups = {{0, {kv_heads}, {shared}, {length}, {head}}},
     int64[4] all_heads = {{0, {heads}, {length}, {head}}},
     int64[3] joined = {{0, {length}, {attention}}}, int64[1] second = {{2}}, int64[2] square = {{{length}, {length}}},
     int64 one = {{1}}, int64[2] flat = {{-1, {hidden}}}, float scale = {{{scale}}}> {{
    embedded = Gather("model.embed_tokens.weight", tokens)
    x = Cast<to = 1>(embedded)
    all = ConstantOfShape<value = float[1] {{-10000.0}}>(square)
    future = Trilu<upper = 1>(all, one)
    {layers}
    normed = RMSNormalization<epsilon = 1e-6>({last}, "model.norm.weight")
    head_rows = Reshape(normed, flat)
    {lm_head}
}}"""


class _Data:
    """The file of external data, in the order in which tensors are added."""

    def __init__(self, model: onnx.ModelProto, file: BinaryIO, name: str, seed: int) -> None:
        self._model, self._file, self._name = model, file, name
        self._rng = np.random.default_rng(seed)

    def add(self, name: str, shape: tuple[int, ...], kind: str) -> None:
        """Write a tensor of random numbers: "nibbles", "scales", "embedding" or, of ones, "norm"."""
        tensor = self._model.graph.initializer.add(name=name, dims=shape, data_location=TensorProto.EXTERNAL)
        tensor.data_type = {"nibbles": TensorProto.UINT8, "embedding": TensorProto.FLOAT16}.get(kind, TensorProto.FLOAT)
        self._file.write(bytes(-self._file.tell() % 4096))
        begin = self._file.tell()
        for first in range(0, shape[0], _ROWS):
            self._file.write(self._drawn((min(_ROWS, shape[0] - first), *shape[1:]), kind).tobytes())
        places = {"location": self._name, "offset": begin, "length": self._file.tell() - begin}
        for key, value in places.items():
            tensor.external_data.add(key=key, value=str(value))

    def _drawn(self, shape: tuple[int, ...], kind: str) -> np.ndarray:
        if kind == "nibbles":
            return self._rng.integers(0, 256, shape, np.uint8)
        if kind == "norm":
            return np.ones(shape, np.float32)
        drawn = self._rng.standard_normal(shape, np.float32) * 0.02
        return drawn.astype(np.float16) if kind == "embedding" else np.abs(drawn) / 4


def write(
    path: pathlib.Path,
    *,
    layers: int = 28,
    hidden: int = 2048,
    heads: int = 16,
    kv_heads: int = 8,
    head: int = 128,
    intermediate: int = 6144,
    vocabulary: int = 151936,
    length: int = 64,
    batch: int = 1,
    seed: int = 0,
) -> None:
    """Write the model, tokens (batch, length) to logits (batch * length, vocabulary), and its data beside it.

    A batch of 0 stands for any.
    """
    attention = heads * head
    sizes = {
        "q_proj": (hidden, attention),
        "k_proj": (hidden, kv_heads * head),
        "v_proj": (hidden, kv_heads * head),
        "o_proj": (attention, hidden),
        "gate_proj": (hidden, intermediate),
        "up_proj": (hidden, intermediate),
        "down_proj": (intermediate, hidden),
    }
    sources = dict.fromkeys(("q_proj", "k_proj", "v_proj"), "n1")
    sources |= {"o_proj": "joined", "gate_proj": "n2", "up_proj": "n2", "down_proj": "gated"}
    names = {module: f"{'self_attn' if module[0] in 'qkvo' else 'mlp'}.{module}" for module in sizes}

    def product(result: str, source: str, weight: str, columns: int, rows: int) -> str:
        return (
            f"{result} = com.microsoft.MatMulNBits<K = {columns}, N = {rows}, bits = 4, block_size = {BLOCK}>"
            f'({source}, "{weight}.weight_Q4", "{weight}.weight_scales")'
        )

    def layer(index: int) -> str:
        b, m = f"layer{index}", f"model.layers.{index}"
        products = {
            module: product(f"{b}_{module}", f"{b}_{sources[module]}", f"{m}.{names[module]}", *sizes[module])
            for module in TARGETS
        }
        return _LAYER.format(b=b, m=m, x=f"layer{index - 1}_out" if index else "x", **products)

    text = _MODEL.format(
        length=length,
        batch=batch or "N",
        rows=batch * length or "M",
        vocabulary=vocabulary,
        heads=heads,
        kv_heads=kv_heads,
        shared=heads // kv_heads,
        head=head,
        attention=attention,
        hidden=hidden,
        scale=head**-0.5,
        layers="".join(map(layer, range(layers))),
        last=f"layer{layers - 1}_out" if layers else "x",
        lm_head=product("logits", "head_rows", "lm_head", hidden, vocabulary),
    )
    model = onnx.parser.parse_model(text)
    angles = np.arange(length)[:, None] * 1e6 ** -(np.arange(0, head, 2) / head)
    angles = np.concatenate([angles, angles], axis=1)
    for name, array in (("cosines", np.cos(angles)), ("sines", np.sin(angles))):
        model.graph.initializer.append(onnx.numpy_helper.from_array(array.astype(np.float32), name))

    with open(f"{path}.data", "wb") as file:
        data = _Data(model, file, f"{path.name}.data", seed)

        def add_product(module: str, columns: int, rows: int) -> None:
            data.add(f"{module}.weight_Q4", (rows, columns // BLOCK, BLOCK // 2), "nibbles")
            data.add(f"{module}.weight_scales", (rows * columns // BLOCK,), "scales")

        data.add("model.embed_tokens.weight", (vocabulary, hidden), "embedding")
        for index in range(layers):
            layer_name = f"model.layers.{index}"
            for module, (columns, rows) in sizes.items():
                add_product(f"{layer_name}.{names[module]}", columns, rows)
            for norm, size in (
                ("input_layernorm", hidden),
                ("post_attention_layernorm", hidden),
                ("self_attn.q_norm", head),
                ("self_attn.k_norm", head),
            ):
                data.add(f"{layer_name}.{norm}.weight", (size,), "norm")
        data.add("model.norm.weight", (hidden,), "norm")
        add_product("lm_head", hidden, vocabulary)
    onnx.save(model, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=pathlib.Path)
    sizes: dict[str, int] = write.__kwdefaults__ or {}
    for name, default in sizes.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    options = vars(parser.parse_args())
    write(options.pop("path"), **options)


if __name__ == "__main__":
    main()
