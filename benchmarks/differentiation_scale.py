"""How long gradients of large models take: `make bench-differentiation` puts the table into docs/onnx-training.md.

    python benchmarks/differentiation_scale.py [--nodes 1000,10000] [--page FILE]

Models are a chain of elementwise operators, of which every tenth has a parameter, and residual blocks of two linear
layers with three parameters in five nodes. Each is built in memory in a process of its own, where the clock runs in the
call alone, from a ModelProto to the result.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

import gradfuse

WIDTH = 8
BEGIN, END = "<!-- large -->\n", "<!-- end of large -->"


def chain(nodes: int) -> Iterator[tuple[list[onnx.NodeProto], dict[str, tuple[int, ...]]]]:
    """Yield nodes from `x` on, and the shapes of their parameters; the last is the result."""
    operators, last = ("Tanh", "Sigmoid", "Exp", "Neg", "Relu"), "x"
    for k in range(nodes):
        weights: dict[str, tuple[int, ...]] = {f"w{k}": (WIDTH,)} if k % 10 == 9 else {}
        operator = "Mul" if weights else operators[k % len(operators)]
        yield [helper.make_node(operator, [last, *weights], [f"v{k}"], name=f"n{k}")], weights
        last = f"v{k}"


def residual_blocks(nodes: int) -> Iterator[tuple[list[onnx.NodeProto], dict[str, tuple[int, ...]]]]:
    """As `chain`."""
    last = "x"
    for k in range(nodes // 5):
        first, bias, second = (f"{k}.{name}" for name in ("first", "bias", "second"))
        a, b, c, d, e = (f"{k}/{name}" for name in "abcde")
        steps = (
            ("MatMul", [last, first], a),
            ("Add", [a, bias], b),
            ("Relu", [b], c),
            ("MatMul", [c, second], d),
            ("Add", [last, d], e),
        )
        weights: dict[str, tuple[int, ...]] = {first: (WIDTH, WIDTH), bias: (WIDTH,), second: (WIDTH, WIDTH)}
        yield [helper.make_node(kind, inputs, [output], name=output) for kind, inputs, output in steps], weights
        last = e


KINDS = {"chain": chain, "residual blocks": residual_blocks}


def model_of(kind: str, nodes: int) -> onnx.ModelProto:
    """Return a model with a scalar result; values have no types, as those of some exporters."""
    body, initializers, rng = [], [], np.random.default_rng(0)
    for made, weights in KINDS[kind](nodes):
        body += made
        for name, shape in weights.items():
            initializers.append(numpy_helper.from_array(0.01 * rng.standard_normal(shape).astype(np.float32), name))
    body.append(helper.make_node("ReduceMean", [body[-1].output[0]], ["loss"], name="loss", keepdims=0))
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", WIDTH])
    loss = helper.make_tensor_value_info("loss", TensorProto.FLOAT, [])
    graph = helper.make_graph(body, "large", [x], [loss], initializers)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def differentiated(model: onnx.ModelProto) -> onnx.ModelProto:
    found: onnx.ModelProto = gradfuse.differentiate(model, [tensor.name for tensor in model.graph.initializer])
    return found


def step_of(model: onnx.ModelProto, **options: Any) -> onnx.ModelProto:
    return gradfuse.build_training_step(model, None, optimizer=gradfuse.optimizers.AdamW(lr=1e-3), **options).model


WAYS: dict[str, Callable[[onnx.ModelProto], onnx.ModelProto]] = {
    "differentiate": differentiated,
    "build_training_step, fuse=False": lambda model: step_of(model, fuse=False),
    "build_training_step": step_of,
}


def measured(kind: str, nodes: int, way: str) -> str:
    """Return the seconds, those of the processor in this process, and how many nodes come of it."""
    model = model_of(kind, nodes)
    # Imports, and the worker that infers shapes.
    WAYS[way](model_of(kind, 50))
    begin, used = time.perf_counter(), time.process_time()
    result = WAYS[way](model)
    used, seconds = time.process_time() - used, time.perf_counter() - begin
    return f"{seconds:.1f} s | {used:.1f} s | {len(result.graph.node):,}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--nodes", default="10000,100000", help="sizes, by commas")
    parser.add_argument("--page", type=Path, help="put the table into this page, between its marks")
    parser.add_argument("--one", nargs=3, metavar=("KIND", "NODES", "WAY"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        kind, nodes, way = options.one
        print(measured(kind, int(nodes), way))
        return
    table = "| model | nodes | way | time | of that, this process on the CPU | nodes of the result |\n"
    table += "|---|---:|---|---:|---:|---:|\n"
    print(table, end="")
    for kind in KINDS:
        for nodes in map(int, options.nodes.split(",")):
            for way in WAYS:
                command = [sys.executable, __file__, "--one", kind, str(nodes), way]
                result = subprocess.run(command, check=False, capture_output=True, text=True)
                if result.returncode != 0:
                    sys.exit(result.stderr)
                line = f"| {kind} | {nodes:,} | {way} | {result.stdout.strip()} |\n"
                print(line, end="", flush=True)
                table += line
    if options.page:
        before, begin, rest = options.page.read_text().partition(BEGIN)
        _, end, after = rest.partition(END)
        options.page.write_text(f"{before}{begin}{table}{end}{after}")


if __name__ == "__main__":
    main()
