"""What ApplyAdamW saves of a whole training step, and how long updates take by themselves.

Two sessions of one fused step take turns: in one AdamW's update is an operator a parameter, in the other nodes.

    python benchmarks/update.py [--only MODEL] [--batch N] [--steps N] [--threads N]

With --alone the updates of some parameters take turns, all in place: by ApplyAdamW and ApplyAdamW8bit in
onnxruntime, and by PyTorch's AdamW with `fused=True`.

    python benchmarks/update.py --alone [--elements N] [--parameters N] [--steps N] [--threads N]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import torch
from onnx import helper
from step_models import MODELS, Model

import gradfuse
from gradfuse.custom_ops.functions import every_node

WARM_UP = 3
BETAS = {"operator": (0.9, 0.999), "nodes": (0.9, 0.999 + 1e-9)}
"""A beta with more than seven decimals keeps the update's nodes."""


def session_options(threads: int) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    # Idle threads of one session must not take the cores from the other.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    gradfuse.register(options)
    return options


def measure(model: Model, count: int, steps: int, threads: int) -> None:
    sessions, sizes = {}, {}
    inputs, targets = model.batch(count)
    for name, betas in BETAS.items():
        torch.manual_seed(0)
        module = model.module()
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, betas=betas)
        step = gradfuse.export_training_step(module, model.loss, (inputs, targets), optimizer, evaluation=False)
        sizes[name] = len(list(every_node(ir.from_proto(step.model).graph)))
        sessions[name] = gradfuse.TrainingSession(step, session_options=session_options(threads))
    batch = [tensor.numpy() for tensor in (*inputs, *targets)]
    times: dict[str, list[float]] = {name: [] for name in sessions}
    for turn in range(WARM_UP + steps):
        # Whichever comes second finds the caches as the first left them.
        for name in sorted(sessions, reverse=bool(turn % 2)):
            start = time.perf_counter()
            sessions[name].step(*batch)
            if turn >= WARM_UP:
                times[name].append(1e3 * (time.perf_counter() - start))
    gains = np.array(times["nodes"]) / np.array(times["operator"])
    low, median, high = np.quantile(gains, (0.25, 0.5, 0.75))
    print(f"{model.title}, batch {count}, {steps} steps, {threads} threads")
    for name, found in times.items():
        print(f"  update by {name}: {sizes[name]} nodes, {min(found):.1f} ms, median {statistics.median(found):.1f}")
    least = min(times["nodes"]) / min(times["operator"])
    print(f"  gain {median:.2f} ({low:.2f} to {high:.2f}), of the least times {least:.2f}")


def updates(op: str, elements: int, count: int, threads: int) -> Callable[[], object]:
    """Run an operator on some parameters, whose memory the results take."""
    blocks = -(-elements // 256)
    codes, scales = np.zeros(elements, np.uint8), np.zeros(blocks, np.float32)
    state: dict[str, Any] = {name: np.zeros(elements, np.float32) for name in ("exp_avg", "exp_avg_sq")}
    if op == "ApplyAdamW8bit":
        state = dict.fromkeys(("exp_avg", "exp_avg_sq"), codes) | dict.fromkeys(
            ("exp_avg_scale", "exp_avg_sq_scale"), scales
        )
    numbers = np.random.default_rng(0)
    scalars = {"learning_rate": np.array(1e-3, np.float32), "step": np.array(3)}
    nodes, values = [], dict[str, Any](scalars)
    places: dict[str, str] = {}
    for index in range(count):
        own = {name: numbers.standard_normal(elements).astype(np.float32) for name in ("parameter", "gradient")} | state
        values |= {f"{name}.{index}": array for name, array in own.items()}
        changed = [name for name in own if name != "gradient"]
        places |= {f"new.{name}.{index}": f"{name}.{index}" for name in changed}
        given = [*(f"{name}.{index}" for name in own), *scalars]
        nodes.append(helper.make_node(op, given, [f"new.{name}.{index}" for name in changed], domain="aclnn"))

    def info(name: str, array: Any) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)

    inputs = [info(name, array) for name, array in values.items()]
    outputs = [info(name, values[place]) for name, place in places.items()]
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("aclnn", 1)]
    model = helper.make_model(helper.make_graph(nodes, op, inputs, outputs), opset_imports=imports, ir_version=8)
    session = onnxruntime.InferenceSession(model.SerializeToString(), session_options(threads))
    bound = {name: onnxruntime.OrtValue.ortvalue_from_numpy(array) for name, array in values.items()}
    binding = session.io_binding()
    for name, value in bound.items():
        binding.bind_ortvalue_input(name, value)
    for name, place in places.items():
        binding.bind_ortvalue_output(name, bound[place])
    return lambda: session.run_with_iobinding(binding)


def measure_alone(elements: int, count: int, steps: int, threads: int) -> None:
    torch.set_num_threads(threads)
    leaves = [torch.randn(elements).requires_grad_() for _ in range(count)]
    for leaf in leaves:
        leaf.grad = torch.randn(elements)
    calls: dict[str, Callable[[], object]] = {"torch, fused": torch.optim.AdamW(leaves, fused=True).step}
    calls |= {op: updates(op, elements, count, threads) for op in ("ApplyAdamW", "ApplyAdamW8bit")}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(WARM_UP + steps):
        for name in sorted(calls, reverse=bool(turn % 2)):
            start = time.perf_counter()
            calls[name]()
            if turn >= WARM_UP:
                times[name].append(1e3 * (time.perf_counter() - start))
    print(f"{count} parameters of {elements} elements, {steps} updates, {threads} threads")
    for name, found in times.items():
        ratios = np.array(found) / np.array(times["ApplyAdamW"])
        low, median, high = np.quantile(ratios, (0.25, 0.5, 0.75))
        least = min(found) / min(times["ApplyAdamW"])
        print(f"  {name}: {min(found):.2f} ms, median {statistics.median(found):.2f}; of ApplyAdamW's time ", end="")
        print(f"{median:.2f} ({low:.2f} to {high:.2f}), of the least times {least:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=MODELS, default="gpt")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--alone", action="store_true")
    parser.add_argument("--elements", type=int, default=1 << 20)
    parser.add_argument("--parameters", type=int, default=16)
    options = parser.parse_args()
    if options.alone:
        measure_alone(options.elements, options.parameters, options.steps, options.threads)
        return
    measure(MODELS[options.only], options.batch, options.steps, options.threads)


if __name__ == "__main__":
    main()
