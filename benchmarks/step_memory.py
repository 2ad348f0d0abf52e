"""Prints by how many MiB a process grows while it trains: `step.py` runs it, each variant in a process of its own.

    python benchmarks/step_memory.py step FILE.onnx ARRAYS.npz
    python benchmarks/step_memory.py run FILE.onnx ARRAYS.npz [--no-arena]
    python benchmarks/step_memory.py torch MODEL BATCH OPTIMIZER

From before the session, or the module, is made to the peak of a few steps; "run" begins after it is made. Linux only.
"""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

STEPS = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(dest="kind", required=True)
    for kind, text in (("step", "a saved step, by TrainingSession"), ("run", "the same without its session")):
        step = kinds.add_parser(kind, help=text)
        step.add_argument("file", help="the step")
        step.add_argument("arrays", help="the batch: inputs as 0_0, 0_1, ..., targets as 1_0, ...")
        step.add_argument("--no-arena", action="store_true", help="without onnxruntime's arena")
    torch = kinds.add_parser("torch", help="a model of step_models.py, by PyTorch")
    torch.add_argument("model")
    torch.add_argument("batch", type=int)
    torch.add_argument("optimizer")
    options = parser.parse_args()
    grown = of_torch(options) if options.kind == "torch" else of_step(options)
    print(f"{grown:.1f}")


def of_step(options: argparse.Namespace) -> float:
    import numpy as np
    import onnxruntime

    import gradfuse

    settings = onnxruntime.SessionOptions()
    settings.enable_mem_pattern = settings.enable_mem_reuse = False
    settings.enable_cpu_mem_arena = False
    gradfuse.register(settings)
    with np.load(options.arrays) as stored:
        inputs, targets = (tuple(stored[name] for name in stored.files if name[0] == part) for part in "01")
    make = gradfuse.TrainingSession
    # What making a session imports, where onnx is installed: PyTorch's modules do not count either.
    for name in ("gradfuse.models.reading", "gradfuse.training.in_place"):
        importlib.import_module(name)
    start = resident("VmRSS")
    session = make(options.file, session_options=settings if options.no_arena else None)
    if options.kind == "run":
        start = resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # The peak counts from here.
    for _ in range(STEPS):
        session.step(inputs, targets)
    return resident("VmHWM") - start


def of_torch(options: argparse.Namespace) -> float:
    import torch
    from step_models import MODELS, OPTIMIZERS

    model = MODELS[options.model]
    torch.manual_seed(0)
    inputs, targets = model.batch(options.batch)
    start = resident("VmRSS")
    module = model.module()
    optimizer = OPTIMIZERS[options.optimizer](module.parameters())
    for _ in range(STEPS):
        optimizer.zero_grad()
        model.loss(module(*inputs), *targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return resident("VmHWM") - start


def resident(key: str) -> float:
    """MiB of memory that this process has, or had at most."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{key}:"))


if __name__ == "__main__":
    main()
