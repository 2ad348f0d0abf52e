"""The memory of training adapters beside that of training everything, in stock onnxruntime.

The GPT of samples/lora_int4.py is made with random weights. Its training step with AdamW is built and saved in one
process, and trained from the file in another for three steps. The growth of that process's peak resident memory is
taken, from after a tiny model was trained there, so that what is imported does not count.

    python benchmarks/lora_memory.py [--width N] [--blocks N] [--batch N] [--out FILE.md]
"""

from __future__ import annotations

import argparse
import pathlib
import resource
import subprocess
import sys
import tempfile

import numpy as np
import onnxruntime

import gradfuse

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "samples"))
import lora_int4

KINDS = {
    "full": "all weights, float32",
    "lora": "adapters beside float32 weights",
    "lora_int4": "adapters beside int4 weights",
}
HEADS, CONTEXT, RANK, STEPS = 8, 64, 8, 3


def peak_mib() -> float:
    """The largest resident memory of this process so far. It is the kernel's own figure, which exec resets."""
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def build(kind: str, width: int, blocks: int, path: str) -> None:
    model = lora_int4.gpt(width, HEADS, blocks, CONTEXT, seed=0)
    trainable = None
    if kind == "lora_int4":
        model = lora_int4.in_int4(model)
    if kind != "full":
        model = gradfuse.add_lora(model, lora_int4.PRODUCTS, RANK, 2 * RANK)
        trainable = ["*.lora_*"]
    optimizer = gradfuse.optimizers.AdamW(lr=1e-4)
    gradfuse.build_training_step(model, "cross_entropy", trainable=trainable, optimizer=optimizer).save(path)


def train(path: str, batch: int) -> None:
    """Print how many numbers train, and the growth of the peak in MiB."""
    letters = np.random.default_rng(0).integers(0, len(lora_int4.LETTERS), (batch, CONTEXT))
    with tempfile.TemporaryDirectory() as folder:
        tiny = str(pathlib.Path(folder) / "tiny.onnx")
        build("lora_int4", 8 * HEADS, 1, tiny)
        gradfuse.TrainingSession(tiny).step(letters, letters.ravel())
    before = peak_mib()
    session = gradfuse.TrainingSession(path)
    for _ in range(STEPS):
        session.step(letters, letters.ravel())
    growth = peak_mib() - before
    # Reads the file once more.
    count = sum(array.size for array in session.training_step.parameters.values())
    print(count, growth)


def measured(kind: str, width: int, blocks: int, batch: int) -> tuple[int, float, float]:
    """Numbers that train, growth of the peak in MiB, and MiB of the file."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "step.onnx"
        shared = [sys.executable, __file__, "--width", str(width), "--blocks", str(blocks), "--batch", str(batch)]
        subprocess.run([*shared, "--build", kind, str(path)], check=True)
        done = subprocess.run([*shared, "--train", str(path)], check=True, stdout=subprocess.PIPE, text=True)
        count, growth = done.stdout.split()
        return int(count), float(growth), path.stat().st_size / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--build", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--train", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.build:
        build(options.build[0], options.width, options.blocks, options.build[1])
        return
    if options.train:
        train(options.train, options.batch)
        return
    lines = [
        f"GPT of width {options.width} with {options.blocks} blocks, batch {options.batch} x {CONTEXT} letters, AdamW,",
        f"rank {RANK}, onnxruntime {onnxruntime.__version__}, on the CPU.",
        "",
        "| what trains | numbers that train | growth of the peak, MiB | file of the step, MiB |",
        "|---|---:|---:|---:|",
    ]
    for kind, shown in KINDS.items():
        count, growth, size = measured(kind, options.width, options.blocks, options.batch)
        lines.append(f"| {shown} | {count:,} | {growth:.0f} | {size:.0f} |")
    text = "\n".join(lines) + "\n"
    print(text, end="")
    if options.out is not None:
        options.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
