"""Whether two checkouts do the same: what they fuse, the models they write, and the numbers of training steps.

    .venv/bin/python tests/support/compare_trees.py OLD NEW [--only PATTERN] [--every N]

OLD and NEW are folders of checkouts with their .venv. Both fuse all graphs of tests/corpus and tests/findings with each
policy, and export the steps below, which run a few times. Graphs, modules and data are those of the checkout that this
file is in. Each difference is printed: of reports (what matched, where, and what was refused why), of the bytes of
models, of errors, and of the bits of losses and parameters. The exit status is 1 where there is one.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import fnmatch
import hashlib
import json
import logging
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from torch import nn

import gradfuse

HERE = Path(__file__).resolve()
TESTS = HERE.parents[1]
POLICIES = ("all", "profitable")
UPDATES = 3
SHOWN = 12
"""Lines of a difference that are printed."""

Case = Callable[[], dict[str, Any]]
"""Returns what a checkout makes of a graph or a module, as data for JSON; a model is under "model"."""


def cases() -> dict[str, Case]:
    found: dict[str, Case] = {}
    for folder in ("corpus", "findings"):
        for path in sorted((TESTS / folder).rglob("*.onnx")):
            for policy in POLICIES:
                name = f"{path.relative_to(TESTS).with_suffix('')} ({policy})"
                found[name] = partial(fused, path, policy)
    return found | {f"step/{name}": partial(stepped, name) for name in STEPS}


def fused(path: Path, policy: Any) -> dict[str, Any]:
    result = gradfuse.fuse(path, policy=policy)
    return {"report": result.report.to_dict(), "model": result.model}


def stepped(name: str) -> dict[str, Any]:
    torch.manual_seed(0)
    module, loss, inputs, targets, *rest = STEPS[name]()
    optimizer, options = (*rest, torch.optim.SGD(module.parameters(), 0.1))[0], dict(*rest[1:])
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        step = gradfuse.export_training_step(module, loss, (inputs, targets), optimizer, **options)
    session = gradfuse.TrainingSession(step)
    batch = tuple(tuple(tensor.detach().numpy() for tensor in part) for part in (inputs, targets))
    losses = [np.asarray(session.step(*batch)) for _ in range(UPDATES)]
    numbers = {f"loss {k}": value for k, value in enumerate(losses)} | dict(session.state_dict())
    return {
        "report": step.report and step.report.to_dict(),
        "model": step.model,
        "warnings": sorted(str(one.message) for one in warned if "gradfuse" in str(one.message)),
        "evaluation": hashlib.sha256(_bytes(step.evaluation_model)).hexdigest(),
        "numbers": {key: [np.asarray(value).tobytes().hex(), _norm(value)] for key, value in numbers.items()},
    }


def _norm(value: Any) -> float:
    return float(np.linalg.norm(np.asarray(value, np.float64)))


def _bytes(model: onnx.ModelProto | None) -> bytes:
    return b"" if model is None else model.SerializeToString(deterministic=True)


# The steps: a module, a loss, inputs and targets, an optimizer if not SGD, and options of the export.


def _classes(count: int, most: int) -> Any:
    return torch.randint(0, most, (count,))


def _perceptron() -> Any:
    module = nn.Sequential(nn.Linear(6, 9), nn.GELU(), nn.LayerNorm(9), nn.Linear(9, 5))
    dynamic = (({0: "batch"},), ({0: "batch"},))
    adam = torch.optim.AdamW(module.parameters(), 0.01)
    return module, nn.CrossEntropyLoss(), (torch.randn(8, 6),), (_classes(8, 5),), adam, {"dynamic_shapes": dynamic}


def _accumulated() -> Any:
    module = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 1))
    momentum = torch.optim.SGD(module.parameters(), 0.1, momentum=0.9, nesterov=True)
    return module, nn.MSELoss(), (torch.randn(8, 6),), (torch.randn(8, 1),), momentum, {"accumulate": 2}


def _convolutions() -> Any:
    blocks = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)]
    module = nn.Sequential(*blocks, nn.Conv2d(8, 8, 3, groups=8), nn.Flatten(), nn.Linear(32, 4))
    return module, nn.CrossEntropyLoss(label_smoothing=0.1), (torch.randn(4, 3, 8, 8),), (_classes(4, 4),)


def _recurrent(kind: str) -> Any:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = getattr(nn, kind)(5, 7, 2, batch_first=True, bidirectional=True)
            self.head = nn.Linear(14, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scores: torch.Tensor = self.head(self.layer(x)[0][:, -1])
            return scores

    return Last(), nn.CrossEntropyLoss(), (torch.randn(4, 6, 5),), (_classes(4, 3),)


def _transformer(dropout: float = 0.0, **options: Any) -> Any:
    class Letters(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(11, 16, padding_idx=0)
            self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout, "gelu", batch_first=True)
            self.head = nn.Linear(16, 11)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
            hidden = self.layer(self.embedding(ids), src_mask=mask, is_causal=True)
            scores: torch.Tensor = self.head(hidden).flatten(0, 1)
            return scores

    module = Letters()
    ids = torch.randint(1, 11, (3, 8))
    adam = torch.optim.Adam(module.parameters(), 0.01)
    return module, nn.CrossEntropyLoss(ignore_index=0), (ids,), (_classes(24, 11),), adam, options


def _root_mean_square() -> Any:
    module = nn.Sequential(nn.Linear(6, 8), nn.RMSNorm(8), nn.SiLU(), nn.GroupNorm(2, 8), nn.Linear(8, 2))
    return module, nn.HuberLoss(), (torch.randn(8, 6),), (torch.randn(8, 2),)


def _speech() -> Any:
    module = nn.Sequential(nn.Linear(4, 6), nn.LogSoftmax(-1))

    def loss(scores: torch.Tensor, labels: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        steps = torch.full_like(lengths, scores.shape[0])
        return nn.functional.ctc_loss(scores, labels, steps, lengths, zero_infinity=True)

    labels = torch.randint(1, 6, (2, 3))
    return module, loss, (torch.randn(9, 2, 4),), (labels, torch.tensor([3, 2]))


def _half() -> Any:
    module = nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 4)).half()
    return module, nn.CrossEntropyLoss(), (torch.randn(8, 6).half(),), (_classes(8, 4),)


def _penalty() -> Any:
    class Penalised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(3, 8), nn.Softplus(), nn.Linear(8, 1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.requires_grad_()
            energy = self.net(x)
            (force,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
            return torch.cat([energy, force], 1)

    return Penalised(), nn.MSELoss(), (torch.randn(6, 3),), (torch.randn(6, 4),)


def _clipped() -> Any:
    module = nn.Sequential(nn.ConvTranspose1d(2, 4, 3, stride=2), nn.Softmax(1), nn.AvgPool1d(3), nn.Flatten())
    adam = torch.optim.AdamW(module.parameters(), 0.01, amsgrad=True)
    return module, nn.L1Loss(), (torch.randn(2, 2, 7),), (torch.randn(2, 20),), adam, {"max_grad_norm": 1.0}


STEPS: dict[str, Callable[[], Any]] = {
    "perceptron": _perceptron,
    "accumulated": _accumulated,
    "convolutions": _convolutions,
    "lstm": lambda: _recurrent("LSTM"),
    "gru": lambda: _recurrent("GRU"),
    "transformer": _transformer,
    "transformer with dropout": lambda: _transformer(0.1),
    "transformer, unfused": lambda: _transformer(fuse=False),
    "root mean square": _root_mean_square,
    "speech": _speech,
    "half": _half,
    "penalty": _penalty,
    "clipped": _clipped,
}


def record(folder: Path, chosen: list[str]) -> None:
    """Write what this process's checkout makes of some cases to a folder: its data, and its models."""

    logging.disable()
    everything = cases()
    for index, name in enumerate(chosen):
        try:
            data = everything[name]()
        except gradfuse.GradfuseError as error:
            data = {"error": str(error)}
        if "model" in data:
            (folder / f"{index}.onnx").write_bytes(_bytes(data["model"]))
            data["model"] = hashlib.sha256(_bytes(data["model"])).hexdigest()
        (folder / f"{index}.json").write_text(json.dumps(data, indent=1, sort_keys=True, default=str))
        print(f"\r{index + 1}/{len(chosen)}", end="", file=sys.stderr)
    print(file=sys.stderr)


def differences(index: int, old: Path, new: Path) -> Iterator[str]:
    """The lines in which two folders differ in a case."""
    texts = [(folder / f"{index}.json").read_text() for folder in (old, new)]
    if texts[0] == texts[1]:
        return
    data = [json.loads(text) for text in texts]
    before, after = data
    numbers = [one.pop("numbers", {}) for one in data]
    for key in sorted(numbers[0].keys() | numbers[1].keys()):
        pair = [found.get(key) for found in numbers]
        if pair[0] != pair[1]:
            yield f"{key}: of norm {' against '.join(str(one and one[1]) for one in pair)}"
    if before.pop("model", "") != after.pop("model", ""):
        yield from _lines("model", _text(old / f"{index}.onnx"), _text(new / f"{index}.onnx"))
    yield from _lines("data", json.dumps(before, indent=1, sort_keys=True), json.dumps(after, indent=1, sort_keys=True))


def _lines(what: str, before: str, after: str) -> Iterator[str]:
    found = difflib.unified_diff(before.splitlines(), after.splitlines(), n=0, lineterm="")
    changed = [line for line in found if not line.startswith(("---", "+++", "@@"))]
    yield from (f"{what} {line.strip()}" for line in changed[:SHOWN])
    if len(changed) > SHOWN:
        yield f"{what}: {len(changed) - SHOWN} more lines"


def _text(path: Path) -> str:
    if not path.exists():
        return ""
    model = onnx.load(path)
    with contextlib.suppress(Exception):
        return str(onnx.printer.to_text(model))
    return str(model)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--only", default="*", metavar="PATTERN", help="cases, as in 'step/*' or 'corpus/ort_*'")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="each Nth of the graphs, and all steps")
    options = parser.parse_args()
    names = [name for name in cases() if fnmatch.fnmatch(name, options.only)]
    graphs = [name for name in names if not name.startswith("step/")]
    chosen = [*graphs[:: options.every], *(name for name in names if name.startswith("step/"))]
    with tempfile.TemporaryDirectory() as folder:
        folders = [Path(folder) / side for side in ("old", "new")]
        for tree, own in zip((options.old, options.new), folders, strict=True):
            own.mkdir()
            code = f"import sys; sys.path.insert(0, {str(HERE.parent)!r})\nimport compare_trees\n"
            code += f"compare_trees.record(compare_trees.Path({str(own)!r}), {chosen!r})"
            python = (tree / ".venv" / "bin" / "python").absolute()
            print(f"{tree}:", file=sys.stderr)
            subprocess.run([python, "-c", code], check=True, cwd=tree)
        different = 0
        for index, name in enumerate(chosen):
            lines = list(differences(index, *folders))
            different += bool(lines)
            for line in lines:
                print(f"{name}: {line}")
    print(f"{different} of {len(chosen)} cases differ")
    return int(different > 0)


if __name__ == "__main__":
    sys.exit(main())
