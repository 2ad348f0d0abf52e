"""Memory and time of training steps of models of 1 to 500 million parameters: a part of `make bench-scale`.

    python benchmarks/real_sizes.py [--only MODEL] [--ways export,torch] [--json FILE] [--plot FILE] [--page FILE]

GPTs of growing size, and models that people train, with random weights. Each is exported with AdamW, loaded and trained
by `gradfuse.TrainingSession`, and trained by PyTorch, eagerly and by torch.compile: each way in a process of its own.
Memory is the peak of the resident sizes of that process and its children, imports and all. Seconds are those after the
imports, until the step is ready, or the first step done; those of processor time are of the whole process, as the time
of exports and of torch.compile grows with whatever else the machine does.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn

Row = dict[str, Any]

STEPS = 3
WAYS = {
    "torch": "training by PyTorch",
    "compile": "first step in torch.compile",
    "export": "export_training_step",
    "session": "training by TrainingSession",
}
BEGIN, END = "<!-- real sizes -->\n", "<!-- end of real sizes -->"


@dataclasses.dataclass(frozen=True)
class Model:
    """A model that is measured: made when it is needed, as transformers takes seconds to import.

    Attributes:
        make: returns module, loss, inputs and targets.
        batch: what the batch is, in words.
        axis: whether it is a point of the axis of parameters.
    """

    make: Callable[[], tuple[nn.Module, Callable[..., Tensor], Tensor, Tensor]]
    batch: str
    axis: bool = False


def _gpt(
    layers: int, width: int, classes: int, batch: int, length: int
) -> tuple[nn.Module, Callable[..., Tensor], Tensor, Tensor]:
    """A decoder with causal attention and an output layer of its own."""
    import torch
    import torch.nn.functional as F
    from torch import nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.second_norm = nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

        def forward(self, x: Tensor) -> Tensor:
            heads = width // 64
            q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, heads, 64)).permute(2, 0, 3, 1, 4)
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(mixed.transpose(1, 2).flatten(2))
            return x + self.feed(self.second_norm(x))  # type: ignore[no-any-return]

    class Gpt(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(classes, width)
            self.positions = nn.Parameter(torch.randn(length, width) * 0.02)
            self.blocks = nn.Sequential(*(Block() for _ in range(layers)))
            self.norm = nn.LayerNorm(width)
            self.head = nn.Linear(width, classes, bias=False)

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.norm(self.blocks(self.embed(ids) + self.positions)))  # type: ignore[no-any-return]

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    ids = torch.randint(0, classes, (batch, length))
    return Gpt(), loss, ids, ids.roll(-1, 1)


def _gpt2() -> tuple[nn.Module, Callable[..., Tensor], Tensor, Tensor]:
    import torch
    import torch.nn.functional as F
    from transformers import GPT2Config, GPT2LMHeadModel

    def loss(output: Any, labels: Tensor) -> Tensor:
        return F.cross_entropy(output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    ids = torch.randint(0, 50_000, (1, 256))
    return GPT2LMHeadModel(GPT2Config()), loss, ids, ids.clone()


def _bert() -> tuple[nn.Module, Callable[..., Tensor], Tensor, Tensor]:
    import torch
    from transformers import BertConfig, BertForSequenceClassification

    module = BertForSequenceClassification(BertConfig())
    return module, _of_classes, torch.randint(0, 30_000, (8, 128)), torch.randint(0, 2, (8,))


def _resnet50() -> tuple[nn.Module, Callable[..., Tensor], Tensor, Tensor]:
    import torch
    from transformers import ResNetConfig, ResNetForImageClassification

    module = ResNetForImageClassification(ResNetConfig(num_labels=1000))
    return module, _of_classes, torch.randn(8, 3, 224, 224), torch.randint(0, 1000, (8,))


def _of_classes(output: Any, labels: Tensor) -> Tensor:
    import torch.nn.functional as F

    return F.cross_entropy(output.logits, labels)


MODELS = {
    "GPT-2 (GPT2LMHeadModel)": Model(_gpt2, "1 x 256"),
    "BERT-base (BertForSequenceClassification)": Model(_bert, "8 x 128"),
    "ResNet-50 (ResNetForImageClassification)": Model(_resnet50, "8 x 224 x 224"),
    **{
        f"GPT, 4 layers of 256, {length:,} tokens": Model(
            functools.partial(_gpt, 4, 256, 8192, 1, length), f"1 x {length:,}"
        )
        for length in (1024, 2048, 4096)
    },
    "GPT, 4 layers of 256, 128,256 classes": Model(functools.partial(_gpt, 4, 256, 128_256, 4, 256), "4 x 256"),
    **{
        f"GPT, {layers} layers of {width}": Model(
            functools.partial(_gpt, layers, width, 8192, 1, 128), "1 x 128", axis=True
        )
        for layers, width in ((2, 64), (3, 192), (6, 320), (10, 448), (12, 768), (16, 1216), (20, 1408))
    },
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", action="append", help="models whose names have this in them; may be repeated")
    parser.add_argument("--ways", default=",".join(WAYS), help=f"which of {', '.join(WAYS)}, by commas")
    parser.add_argument(
        "--json", type=Path, help="write what was measured; models that were not stay as they are there"
    )
    parser.add_argument("--plot", type=Path, help="draw memory and time over the parameters")
    parser.add_argument("--page", type=Path, help="put the table into this page, between its marks")
    parser.add_argument("--one", nargs=3, metavar=("MODEL", "WAY", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.one:
        print(json.dumps(_one(*options.one)))
        return
    ways = options.ways.split(",")
    rows: dict[str, Row] = {}
    if options.json and options.json.exists():
        rows = {row["model"]: row for row in json.loads(options.json.read_text())["rows"]}
    for name, model in MODELS.items():
        if options.only and not any(text.lower() in name.lower() for text in options.only):
            continue
        row = rows.setdefault(name, {"model": name, "batch": model.batch, "axis": model.axis, "ways": {}})
        with tempfile.TemporaryDirectory() as folder:
            for way in ways:
                found = _measured(name, way, folder)
                if found is not None:
                    row["parameters"] = found.pop("parameters", row.get("parameters"))
                    row["ways"][way] = found
                    print(f"{name:45} {WAYS[way]:30} {_text(found)}", flush=True)
    kept = [rows[name] for name in MODELS if rows.get(name, {}).get("ways")]
    document: Row = {"cpu": _cpu(), "cores": os.cpu_count(), "rows": kept}
    if options.json:
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    if options.plot:
        plot(document, options.plot)
    if options.page:
        before, begin, rest = options.page.read_text().partition(BEGIN)
        _, end, after = rest.partition(END)
        options.page.write_text(f"{before}{begin}{table(document)}{end}{after}")


def _one(name: str, way: str, folder: str) -> Row:
    """Do it, in this process, and return the seconds that it took, and what else there is to say."""
    import torch

    import gradfuse

    path = os.path.join(folder, "step.onnx")
    torch.manual_seed(0)
    module, loss, inputs, targets = MODELS[name].make()
    count = sum(parameter.numel() for parameter in module.parameters())
    if way == "session":
        del module
        begin = time.perf_counter()
        session = gradfuse.TrainingSession(path)
        ready = time.perf_counter() - begin
        for _ in range(STEPS):
            begin = time.perf_counter()
            session.step(inputs.numpy(), targets.numpy())
        return {"seconds": ready, "step": time.perf_counter() - begin, "parameters": count}
    begin = time.perf_counter()
    if way == "export":
        parts: list[tuple[str, float]] = []

        def note(part: str, done: int, total: int) -> None:
            # Without the share of it that is done.
            name = part.partition(", ")[0]
            if not parts or parts[-1][0] != name:
                parts.append((name, time.perf_counter()))

        optimizer = torch.optim.AdamW(module.parameters())
        step = gradfuse.export_training_step(module, loss, (inputs, targets), optimizer, progress=note)
        row: Row = {"seconds": time.perf_counter() - begin, "parameters": count}
        row["parts"] = {part: round(until - since, 1) for (part, since), (_, until) in itertools.pairwise(parts)}
        step.save(path)
        return row
    called: Any = torch.compile(module) if way == "compile" else module
    optimizer = torch.optim.AdamW(module.parameters(), fused=True)
    first = 0.0
    for _ in range(1 if way == "compile" else STEPS):
        start = time.perf_counter()
        optimizer.zero_grad()
        loss(called(inputs), targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        first = first or time.perf_counter() - begin
    return {"seconds": first, "step": time.perf_counter() - start, "parameters": count}


def _measured(name: str, way: str, folder: str) -> Row | None:
    """Run one way in a process of its own; None for a session without a step."""
    if way == "session" and not os.path.exists(os.path.join(folder, "step.onnx")):
        return None
    command = [sys.executable, __file__, "--one", name, way, folder]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TORCHINDUCTOR_CACHE_DIR": os.path.join(folder, "inductor")}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        with _watched(process.pid) as peaks:
            assert process.stdout is not None
            answer = process.stdout.read()
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = code = os.waitstatus_to_exitcode(status)
    seen: Row = {"peak_mib": round(peaks[0] / 2**20), "cpu_seconds": round(usage.ru_utime + usage.ru_stime, 1)}
    if code:
        return {"failed": f"exit status {code}", **seen}
    row = json.loads(answer.splitlines()[-1])
    return {key: round(value, 2) if isinstance(value, float) else value for key, value in row.items()} | seen


@contextlib.contextmanager
def _watched(root: int) -> Iterator[list[int]]:
    """Note the largest sum of the resident sizes of a process and its descendants."""
    peaks, done = [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.02):
            peaks[0] = max(peaks[0], sum(map(_resident, _tree(root))))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield peaks
    finally:
        done.set()
        thread.join()


def _tree(root: int) -> list[int]:
    """Return a process and its descendants."""
    found = [root]
    for process in found:
        with contextlib.suppress(OSError):
            for thread in os.listdir(f"/proc/{process}/task"):
                found += map(int, Path(f"/proc/{process}/task/{thread}/children").read_text().split())
    return found


def _resident(process: int) -> int:
    with contextlib.suppress(OSError, IndexError):
        return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def table(document: Row) -> str:
    """What was measured, as a table in Markdown."""
    lines = [
        f"{document['cores']} cores ({document['cpu']}):",
        "",
        "| model, batch | parameters | PyTorch: memory | export: memory | of PyTorch's | first step in torch.compile, "
        "of that CPU | export, of that CPU | session: memory | step: PyTorch | step: session |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in document["rows"]:
        ways: dict[str, Row] = row["ways"]
        trained, made = (ways.get(way, {}).get("peak_mib") for way in ("torch", "export"))
        cells = [
            f"{row['model']}, {row['batch']}",
            f"{row['parameters'] / 1e6:,.1f} M",
            _cell(ways, "torch", "peak_mib", "{:,} MiB"),
            _cell(ways, "export", "peak_mib", "{:,} MiB"),
            f"{made / trained:.2f} x" if trained and made else "-",
            f"{_cell(ways, 'compile', 'seconds', '{:.0f} s')}, {_cell(ways, 'compile', 'cpu_seconds', '{:.0f} s')}",
            f"{_cell(ways, 'export', 'seconds', '{:.0f} s')}, {_cell(ways, 'export', 'cpu_seconds', '{:.0f} s')}",
            _cell(ways, "session", "peak_mib", "{:,} MiB"),
            _cell(ways, "torch", "step", "{:.2f} s"),
            _cell(ways, "session", "step", "{:.2f} s"),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cell(ways: dict[str, Row], way: str, key: str, form: str) -> str:
    value = ways.get(way, {}).get(key)
    return "-" if value is None else form.format(value)


def plot(document: Row, path: Path) -> None:
    """Draw memory and time of the GPTs over their parameters."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "gradfuse", "svg.fonttype": "none"})
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(9.5, 4.2), layout="constrained")
    for way, label in WAYS.items():
        rows = [row for row in document["rows"] if row["axis"] and "seconds" in row["ways"].get(way, {})]
        counts = [row["parameters"] / 1e6 for row in rows]
        for axis, key in zip(axes, ("peak_mib", "seconds"), strict=True):
            axis.plot(counts, [row["ways"][way][key] for row in rows], marker="o", markersize=4, label=label)
    for axis, title in zip(axes, ("peak memory (MiB)", "time until ready, or of the first step (s)"), strict=True):
        axis.set(xscale="log", yscale="log", xlabel="parameters (millions)", title=title)
        axis.grid(True, which="both", linewidth=0.3)
    axes[0].legend(fontsize="small")
    figure.savefig(path, metadata={"Date": None})


def _cpu() -> str:
    with open("/proc/cpuinfo") as file:
        return next((line.partition(":")[2].strip() for line in file if line.startswith("model name")), "unknown")


def _text(found: Row) -> str:
    if "failed" in found:
        return f"{found['failed']}, {found['peak_mib']:,} MiB"
    parts = "; ".join(f"{part} {seconds}" for part, seconds in found.get("parts", {}).items() if seconds >= 1)
    step = f", step {found['step'] * 1e3:,.0f} ms" if "step" in found else ""
    return f"{found['seconds']:.1f} s{step}, {found['cpu_seconds']} s of CPU, {found['peak_mib']:,} MiB  {parts}"


if __name__ == "__main__":
    main()
