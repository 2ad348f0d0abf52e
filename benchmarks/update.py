"""What ApplyAdamW saves of a whole training step.

Two sessions of one fused step take turns: in one AdamW's update is an operator a parameter, in the other nodes.

    python benchmarks/update.py [--only MODEL] [--batch N] [--steps N] [--threads N]
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import torch
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=MODELS, default="gpt")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    measure(MODELS[options.only], options.batch, options.steps, options.threads)


if __name__ == "__main__":
    main()
