"""Fine-tune low-rank adapters where the data are, with Flower: clients train in stock onnxruntime, without PyTorch.

Run it with `python samples/flower_lora.py`, after `pip install flwr`. It is a Flower app, and starts what it needs on
this machine: a SuperLink, a SuperNode for each client, and the run. Nothing is downloaded, and telemetry is off.

The base is a classifier of handwritten digits (scikit-learn's 8 x 8 pixels), which every client has. Each client has
digits in negative, some classes more often than others, and in different numbers. In each round the clients train
adapters on their own digits, and Flower averages them, weighted by the number of digits (FedAvg). Only adapters travel:
1,320 of the model's 9,610 numbers. At the end the server writes them for `onnxruntime.LoraAdapter`.

Then this process repeats each round. The exit status is 1 if the adapters differ by more than rounding, or if
the accuracy on negatives that no client has is below the wanted one.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from typing import Any

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")

import click
import numpy as np
import numpy.typing as npt
import onnx
import onnx.parser
import onnxruntime
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from onnx import numpy_helper
from sklearn.datasets import load_digits

import gradfuse

Floats = npt.NDArray[np.float32]
Arrays = dict[str, npt.NDArray[Any]]

CLIENTS, STEPS, TESTED = 3, 200, 360
PROJECT = """
[project]
name = "flower-lora"
version = "1.0.0"
description = "Federated low-rank adapters"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "gradfuse"

[tool.flwr.app.components]
serverapp = "flower_lora:server"
clientapp = "flower_lora:client"

[tool.flwr.app.config]
folder = ""
rounds = 0
"""
server = ServerApp()
client = ClientApp()


def digits() -> tuple[Floats, npt.NDArray[np.int64]]:
    """Pixels (N, 64) from 0 to 1 and labels (N), in random order."""
    data, order = load_digits(), np.random.default_rng(0).permutation(1797)
    return (data.data[order] / 16).astype(np.float32), data.target[order].astype(np.int64)


def rows_of(part: int) -> npt.NDArray[np.int64]:
    """Which digits a client has: those of its classes, and a few of all others."""
    _, labels = digits()
    rng, rows = np.random.default_rng(part), np.arange(TESTED, 1797)
    own = labels[rows] % CLIENTS == part
    return rows[rng.random(len(rows)) < np.where(own, 0.9 - 0.2 * part, 0.15)]


def base_model() -> onnx.ModelProto:
    """A classifier that is trained on digits as they are."""
    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["": 20]>
        digits (float[N, 64] pixels) => (float[N, 10] logits) {
            hidden = Gemm(pixels, "first.weight", "first.bias")
            active = Relu(hidden)
            logits = Gemm(active, "last.weight", "last.bias")
        }
    """)
    rng = np.random.default_rng(0)
    shapes = {"first.weight": (64, 128), "first.bias": (128,), "last.weight": (128, 10), "last.bias": (10,)}
    for name, shape in shapes.items():
        weight = rng.normal(0, 64**-0.5, shape) if len(shape) == 2 else np.zeros(shape)
        model.graph.initializer.append(numpy_helper.from_array(weight.astype(np.float32), name))
    step = gradfuse.build_training_step(model, "cross_entropy", optimizer=gradfuse.optimizers.AdamW(lr=2e-3))
    session, (pixels, labels) = gradfuse.TrainingSession(step), digits()
    for _ in range(300):
        rows = rng.integers(TESTED, 1797, 64)
        session.step(pixels[rows], labels[rows])
    for tensor in model.graph.initializer:
        tensor.CopyFrom(numpy_helper.from_array(session.state_dict()[tensor.name], tensor.name))
    return model


def kept_adapters(path: pathlib.Path) -> Arrays:
    with np.load(path) as file:
        return {name: file[name] for name in file}


def adapters(session: gradfuse.TrainingSession) -> Arrays:
    """The tensors that clients and server exchange."""
    return {name: array for name, array in session.state_dict().items() if ".lora_" in name}


def train_locally(step: pathlib.Path, part: int, given: Arrays) -> tuple[Arrays, float, int]:
    """What a client does in a round: the adapters that it has trained, the last loss, and how many digits it has."""
    options = onnxruntime.SessionOptions()
    # Clients share this machine's cores, and one thread adds up in one order.
    options.intra_op_num_threads = 1
    gradfuse.register(options)
    session, (pixels, labels), rows = gradfuse.TrainingSession(step, session_options=options), digits(), rows_of(part)
    session.load_state_dict(given, strict=False)
    rng, loss = np.random.default_rng(part), 0.0
    for _ in range(STEPS):
        batch = rng.choice(rows, 64)
        loss = session.step(1 - pixels[batch], labels[batch])
    return adapters(session), loss, len(rows)


def accuracy(folder: pathlib.Path, given: Arrays) -> float:
    """On negatives that no client has."""
    session, (pixels, labels) = gradfuse.TrainingSession(folder / "step.onnx"), digits()
    session.load_state_dict(given, strict=False)
    return float((session.evaluate(1 - pixels[:TESTED]).argmax(1) == labels[:TESTED]).mean())


@client.train()  # type: ignore[untyped-decorator]
def train(message: Message, context: Context) -> Message:
    given = message.content["arrays"]
    arrays = {name: array.numpy() for name, array in given.items()}
    folder, part = pathlib.Path(str(context.run_config["folder"])), int(context.node_config["part"])
    trained, loss, count = train_locally(folder / "step.onnx", part, arrays)
    metrics = MetricRecord({"loss": loss, "num-examples": count})
    return Message(RecordDict({"arrays": _record(trained), "metrics": metrics}), reply_to=message)


@server.main()  # type: ignore[untyped-decorator]
def serve(grid: Grid, context: Context) -> None:
    folder, rounds = pathlib.Path(str(context.run_config["folder"])), int(context.run_config["rounds"])
    session = gradfuse.TrainingSession(folder / "step.onnx")
    strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=CLIENTS, min_available_nodes=CLIENTS)

    def keep(number: int, arrays: ArrayRecord) -> None:
        np.savez(folder / f"round{number}.npz", **{name: array.numpy() for name, array in arrays.items()})

    first = _record(adapters(session))
    result = strategy.start(grid=grid, initial_arrays=first, num_rounds=rounds, evaluate_fn=keep)
    session.load_state_dict({name: array.numpy() for name, array in result.arrays.items()}, strict=False)
    gradfuse.save_adapter(session, folder / "federated.onnx_adapter")


def _record(arrays: Arrays) -> ArrayRecord:
    return ArrayRecord({name: Array(array) for name, array in arrays.items()})


def federate(folder: pathlib.Path, rounds: int) -> str:
    """Start SuperLink, SuperNodes and the run, and wait for its end; return what went wrong."""
    app = folder / "app"
    app.mkdir()
    (app / "pyproject.toml").write_text(PROJECT, encoding="utf-8")
    shutil.copy(__file__, app / "flower_lora.py")
    ports, programs = [free_port() for _ in range(CLIENTS + 1)], pathlib.Path(sys.executable).parent
    link = f"127.0.0.1:{ports[0]}"
    (folder / "config.toml").write_text(
        f'[superlink]\ndefault = "here"\n[superlink.here]\naddress = "{link}"\ninsecure = true\n', encoding="utf-8"
    )
    path = f"{programs}{os.pathsep}{os.environ.get('PATH', '')}"
    environment = {**os.environ, "PATH": path, "FLWR_HOME": str(folder), "OMP_NUM_THREADS": "1"}
    nothing = "--disable-runtime-dependency-installation"
    commands = [["flower-superlink", "--insecure", "--port", str(ports[0]), nothing]]
    commands += [
        ["flower-supernode", "--insecure", "--superlink", link, "--port", str(port), "--node-config", f"part={part}"]
        for part, port in enumerate(ports[1:])
    ]
    started: list[subprocess.Popen[bytes]] = []
    with open(folder / "log", "wb") as log:
        try:
            for command in commands:
                program = [str(programs / command[0]), *command[1:]]
                started.append(subprocess.Popen(program, stdout=log, stderr=log, env=environment, cwd=folder))
                wait_for(ports[0], started[0])
            config = f'folder="{folder}" rounds={rounds}'
            run = [str(programs / "flwr"), "run", str(app), "here", "--stream", "--run-config", config]
            with contextlib.suppress(subprocess.TimeoutExpired):
                subprocess.run(run, stdout=log, stderr=log, env=environment, cwd=folder, timeout=1200, check=False)
        finally:
            for process in started:
                process.terminate()
            for process in started:
                process.wait()
    if (folder / "federated.onnx_adapter").exists():
        return ""
    return (folder / "log").read_text(encoding="utf-8", errors="replace")[-3000:]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    while process.poll() is None:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)


@click.command(context_settings={"show_default": True})
@click.option("--rounds", default=3, type=click.IntRange(1), help="Rounds of training and averaging.")
@click.option("--wanted", default=0.85, type=click.FloatRange(0, 1), help="Wanted accuracy on negatives.")
@click.option("--keep", type=click.Path(file_okay=False, path_type=pathlib.Path), help="Folder for the adapter.")
def main(rounds: int, wanted: float, keep: pathlib.Path | None) -> None:
    """Train adapters on clients of Flower; exit 1 below the wanted accuracy."""
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        base = base_model()
        model = gradfuse.add_lora(base, ["*.weight"], rank=4, alpha=8)
        optimizer = gradfuse.optimizers.AdamW(lr=3e-2)
        step = gradfuse.build_training_step(model, "cross_entropy", trainable=["*.lora_*"], optimizer=optimizer)
        step.save(folder / "step.onnx")
        failure = federate(folder, rounds)
        if failure:
            print(failure)
            sys.exit(1)
        averaged = [kept_adapters(folder / f"round{number}.npz") for number in range(rounds + 1)]
        apart = 0.0
        for given, found in itertools.pairwise(averaged):
            results = [train_locally(folder / "step.onnx", part, given) for part in range(CLIENTS)]
            total = sum(count for _, _, count in results)
            for name, array in found.items():
                mean = np.asarray(sum(count / total * trained[name] for trained, _, count in results))
                apart = max(apart, float(np.abs(array - mean).max()))
        before, found = accuracy(folder, averaged[0]), averaged[-1]
        after, as_served = accuracy(folder, found), served(base, folder / "federated.onnx_adapter")
        if keep is not None:
            keep.mkdir(parents=True, exist_ok=True)
            shutil.copy(folder / "federated.onnx_adapter", keep)
    counts = ", ".join(str(len(rows_of(part))) for part in range(CLIENTS))
    print(f"{CLIENTS} clients with {counts} digits, {rounds} rounds: accuracy on negatives {before:.1%} -> {after:.1%}")
    print(f"served by onnxruntime.LoraAdapter {as_served:.1%}; a round differs from one process by {apart:.1e} at most")
    if apart > 1e-4 or after < wanted or abs(after - as_served) > 0.01:
        sys.exit(1)


def served(base: onnx.ModelProto, path: pathlib.Path) -> float:
    """The accuracy that onnxruntime serves the adapter with, beside the base model."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    model = gradfuse.add_lora_inputs(base, ["*.weight"]).SerializeToString()
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    adapter, run = onnxruntime.LoraAdapter(), onnxruntime.RunOptions()
    adapter.Load(str(path))
    run.add_active_adapter(adapter)
    pixels, labels = digits()
    (logits,) = session.run(None, {"pixels": 1 - pixels[:TESTED]}, run)
    return float((logits.argmax(1) == labels[:TESTED]).mean())


if __name__ == "__main__":
    main()
