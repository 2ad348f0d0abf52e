"""Fine-tune a GPT with int4 weights by low-rank adapters, and serve them, all in stock onnxruntime.

Run it with `python samples/lora_int4.py`. PyTorch is not used, and nothing is downloaded: the model is written in ONNX,
and the texts are what Python ships. The sample

1. trains a small GPT, letter by letter, on the reference of the Python language,
2. quantises its weights to 4 bits with onnxruntime's own quantiser,
3. puts adapters beside them with `gradfuse.add_lora`, and trains these alone on Python's source code,
4. saves the adapters for PEFT and for onnxruntime,
5. serves them with `onnxruntime.LoraAdapter`: with the adapter the int4 file gives the trained outputs, and without it
   the original ones.

Ctrl-C ends it with a checkpoint in the folder, from which the same command goes on. The exit status is 1 if the loss on
source code that was left out is above the wanted one, or if outputs disagree.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import logging
import math
import pathlib
import pydoc_data.topics
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
from typing import Any

import click
import numpy as np
import numpy.typing as npt
import onnx
import onnx.parser
import onnxruntime
import running
from onnx import numpy_helper
from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer
from rich.console import Console

import gradfuse

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]

LETTERS = "\n" + "".join(map(chr, range(32, 127)))
PRODUCTS = ("qkv", "proj", "up", "down")
"""The modules with the weights of a block, which get adapters."""

BLOCK = """
    {b}_n1 = LayerNormalization({x}, "{m}.norm1.weight", "{m}.norm1.bias")
    {b}_qkv = MatMul({b}_n1, "{m}.qkv.weight")
    {b}_heads = Reshape({b}_qkv, to_heads)
    {b}_each = Transpose<perm = [2, 0, 3, 1, 4]>({b}_heads)
    {b}_q1, {b}_k1, {b}_v1 = Split<axis = 0, num_outputs = 3>({b}_each)
    {b}_q = Squeeze({b}_q1, first)
    {b}_k = Squeeze({b}_k1, first)
    {b}_v = Squeeze({b}_v1, first)
    {b}_kt = Transpose<perm = [0, 1, 3, 2]>({b}_k)
    {b}_products = MatMul({b}_q, {b}_kt)
    {b}_scores = Mul({b}_products, scale)
    {b}_past = Add({b}_scores, future)
    {b}_probs = Softmax({b}_past)
    {b}_mixed = MatMul({b}_probs, {b}_v)
    {b}_rows = Transpose<perm = [0, 2, 1, 3]>({b}_mixed)
    {b}_joined = Reshape({b}_rows, from_heads)
    {b}_proj = MatMul({b}_joined, "{m}.proj.weight")
    {b}_sum = Add({x}, {b}_proj)
    {b}_n2 = LayerNormalization({b}_sum, "{m}.norm2.weight", "{m}.norm2.bias")
    {b}_up = MatMul({b}_n2, "{m}.up.weight")
    {b}_act = Gelu<approximate = "tanh">({b}_up)
    {b}_down = MatMul({b}_act, "{m}.down.weight")
    {b}_out = Add({b}_sum, {b}_down)
"""
GPT = """<ir_version: 10, opset_import: ["": 20]>
gpt (int64[N, {context}] letters) => (float[M, {vocabulary}] logits)
    <int64[5] to_heads = {{0, {context}, 3, {heads}, {head}}}, int64[3] from_heads = {{0, {context}, {width}}},
     int64[1] first = {{0}}, int64[2] square = {{{context}, {context}}}, int64 one = {{1}},
     int64[2] flat = {{-1, {width}}}, float scale = {{{scale}}}> {{
    embedded = Gather("embed.weight", letters)
    x = Add(embedded, "positions.weight")
    all = ConstantOfShape<value = float[1] {{-10000.0}}>(square)
    future = Trilu<upper = 1>(all, one)
    {blocks}
    normed = LayerNormalization({last}, "norm.weight", "norm.bias")
    rows = Reshape(normed, flat)
    logits = MatMul(rows, "head.weight")
}}"""


def gpt(width: int, heads: int, blocks: int, context: int, seed: int) -> onnx.ModelProto:
    """A GPT with random weights: letters (N, context) to logits (N * context, len(LETTERS)) of the next ones."""
    names = [f"blocks.{index}" for index in range(blocks)]
    inputs = ["x", *(f"block{index}_out" for index in range(blocks))]
    text = GPT.format(
        context=context,
        vocabulary=len(LETTERS),
        width=width,
        heads=heads,
        head=width // heads,
        scale=(width // heads) ** -0.5,
        blocks="".join(BLOCK.format(m=name, b=f"block{k}", x=inputs[k]) for k, name in enumerate(names)),
        last=inputs[-1],
    )
    model = onnx.parser.parse_model(text)
    shapes = {"embed.weight": (len(LETTERS), width), "positions.weight": (context, width)}
    for name in names:
        sizes = {
            "qkv": (width, 3 * width),
            "proj": (width, width),
            "up": (width, 4 * width),
            "down": (4 * width, width),
        }
        shapes |= {f"{name}.{product}.weight": sizes[product] for product in PRODUCTS}
    shapes["head.weight"] = (width, len(LETTERS))
    rng = np.random.default_rng(seed)
    tensors = {name: rng.normal(0, 0.02, shape) for name, shape in shapes.items()}
    for name in ("norm", *(f"{block}.norm{k}" for block in names for k in (1, 2))):
        tensors |= {f"{name}.weight": np.ones(width), f"{name}.bias": np.zeros(width)}
    model.graph.initializer.extend(numpy_helper.from_array(a.astype(np.float32), n) for n, a in tensors.items())
    return model


def with_weights(model: onnx.ModelProto, weights: dict[str, Floats]) -> onnx.ModelProto:
    """Return the model with other values for its initializers."""
    result = onnx.ModelProto()
    result.CopyFrom(model)
    for tensor in result.graph.initializer:
        if tensor.name in weights:
            tensor.CopyFrom(numpy_helper.from_array(weights[tensor.name], tensor.name))
    return result


def in_int4(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with its products' weights in 4 bits, in blocks of 32, each with a scale."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    logging.disable(logging.INFO)
    quantizer = MatMulNBitsQuantizer(copy, block_size=32, is_symmetric=True)
    quantizer.process()
    logging.disable(logging.NOTSET)
    quantised: onnx.ModelProto = quantizer.model.model
    return quantised


def letters_of(text: str) -> Ints:
    places = {letter: place for place, letter in enumerate(LETTERS)}
    return np.array([places[letter] for letter in text if letter in places], dtype=np.int64)


def texts() -> tuple[Ints, Ints]:
    """The reference of the language, and source code of the standard library."""
    modules = (argparse, ast, inspect, logging, pathlib, shutil, subprocess, tempfile, textwrap)
    return letters_of("\n\n".join(pydoc_data.topics.topics.values())), letters_of(
        "\n\n".join(inspect.getsource(module) for module in modules)
    )


def pieces(text: Ints, starts: Ints, context: int) -> tuple[Ints, Ints]:
    """Pieces (N, context) of a text, and the letters that follow, in one row."""
    places = starts[:, None] + np.arange(context)
    return text[places], text[places + 1].ravel()


def mean_loss(logits: Floats, following: Ints) -> float:
    rows = logits.astype(np.float64)
    rows -= rows.max(-1, keepdims=True)
    log_probs = rows - np.log(np.exp(rows).sum(-1, keepdims=True))
    return float(-log_probs[np.arange(len(following)), following].mean())


def session_of(path: pathlib.Path) -> Any:
    options = onnxruntime.SessionOptions()
    # It says of every adapter that its input has a default value.
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


@click.command(context_settings={"show_default": True})
@click.option("--folder", default="build/samples", type=click.Path(file_okay=False, path_type=pathlib.Path))
@click.option("--width", default=96, type=click.IntRange(1), help="Width of the model, a multiple of the heads.")
@click.option("--heads", default=4, type=click.IntRange(1), help="Heads of attention.")
@click.option("--blocks", default=2, type=click.IntRange(1), help="Blocks of the model.")
@click.option("--context", default=64, type=click.IntRange(2), help="Letters in a piece.")
@click.option("--batch-size", default=16, type=click.IntRange(2), help="Pieces of text in a step.")
@click.option("--base-steps", default=250, type=click.IntRange(1), help="Steps of training of the base model.")
@click.option("--steps", default=150, type=click.IntRange(1), help="Steps of training of the adapters.")
@click.option("--rank", default=8, type=click.IntRange(1), help="Rank of the adapters.")
@click.option("--alpha", default=16.0, help="Adapters are scaled by alpha / rank.")
@click.option("--seed", default=0, help="Seed of everything that is drawn.")
@click.option("--wanted", default=0.15, help="By how much the loss on source code is to fall, at least.")
def main(
    folder: pathlib.Path,
    width: int,
    heads: int,
    blocks: int,
    context: int,
    batch_size: int,
    base_steps: int,
    steps: int,
    rank: int,
    alpha: float,
    seed: int,
    wanted: float,
) -> None:
    """Fine-tune an int4 GPT on source code; exit 1 if the loss falls too little, or what is served differs."""
    console = Console(soft_wrap=not sys.stdout.isatty(), highlight=False)
    folder.mkdir(parents=True, exist_ok=True)
    reference, code = texts()
    code, left_out = np.split(code, [len(code) * 9 // 10])
    letters, following = pieces(left_out, np.linspace(0, len(left_out) - context - 1, 64, dtype=np.int64), context)

    sizes = {"width": width, "heads": heads, "blocks": blocks, "context": context, "batch": batch_size, "seed": seed}

    def train(
        session: gradfuse.TrainingSession, text: Ints, count: int, rate: float, what: str, **options: float
    ) -> running.Training:
        checkpoint = folder / f"lora_int4_{what.split()[-1]}.safetensors"
        run = running.Training(session, count, console, checkpoint, sizes | options | {"steps": count}, what)
        start = time.perf_counter()
        for index in run:
            rng = np.random.default_rng((seed, index))
            session.learning_rate = rate * min(1.0, 10 * (index + 1) / count) * (1 - index / count)
            run.losses.append(session.step(*pieces(text, rng.integers(0, len(text) - context, batch_size), context)))
        console.print(f"{what}: {count} steps in {time.perf_counter() - start:.1f} s")
        console.print(running.plot(run.losses))
        return run

    model = gpt(width, heads, blocks, context, seed)
    step = gradfuse.build_training_step(model, "cross_entropy", optimizer=gradfuse.optimizers.AdamW(lr=1e-3))
    session = gradfuse.TrainingSession(step)
    base_run = train(session, reference, base_steps, 4e-3, "training the base model")
    # Where the adapters are interrupted, the model is not trained again.
    base_run.save()
    model = with_weights(model, session.state_dict())
    base = folder / "gpt_int4.onnx"
    onnx.save(in_int4(model), base)
    console.print(f"weights in 4 bits: {len(model.SerializeToString())} bytes become {base.stat().st_size}")

    # The weights keep their names, blocks.0.qkv.weight_Q4, from which the adapters get those that PEFT expects.
    adapted = gradfuse.add_lora(base, PRODUCTS, rank, alpha, seed=seed)
    step = gradfuse.build_training_step(
        adapted, "cross_entropy", trainable=["*.lora_*"], optimizer=gradfuse.optimizers.AdamW(lr=1e-3)
    )
    count = sum(array.size for array in step.parameters.values())
    total = sum(math.prod(tensor.dims) for tensor in model.graph.initializer)
    console.print(f"{count} numbers of adapters are trained beside {total} that stay")
    session = gradfuse.TrainingSession(step)
    before = mean_loss(session.evaluate(letters), following)
    run = train(session, code, steps, 1e-2, "training the adapters", base=base_steps, rank=rank, alpha=alpha)
    trained = session.evaluate(letters)
    after = mean_loss(trained, following)
    console.print(f"loss on source code that was left out: {before:.4f} before, {after:.4f} after")

    gradfuse.save_adapter(session, folder / "source_code_peft")
    gradfuse.save_adapter(session, folder / "source_code.onnx_adapter")
    served_path = folder / "gpt_int4_served.onnx"
    onnx.save(gradfuse.add_lora_inputs(base, PRODUCTS), served_path)
    served, adapter, active = session_of(served_path), onnxruntime.LoraAdapter(), onnxruntime.RunOptions()
    adapter.Load(str(folder / "source_code.onnx_adapter"))
    active.add_active_adapter(adapter)
    (with_adapter,) = served.run(None, {"letters": letters}, active)
    (without,) = served.run(None, {"letters": letters})
    (of_base,) = session_of(base).run(None, {"letters": letters})
    console.print(f"served with the adapter, the loss is {mean_loss(with_adapter, following):.4f}")
    difference = float(np.abs(with_adapter - trained).max() / np.abs(trained).max())
    console.print(f"outputs differ from the trained model's by at most {difference:.1e} of the largest")
    for each in (base_run, run):
        each.forget()
    same = np.array_equal(without, of_base)
    console.print(f"without the adapter, outputs {'are' if same else 'are not'} those of the int4 model")
    if before - after < wanted or difference > 1e-4 or not same:
        console.print(f"expected a loss that falls by {wanted:.2f}, and equal outputs")
        sys.exit(1)


if __name__ == "__main__":
    main()
