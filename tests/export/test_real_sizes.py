"""What an export takes: its memory beside PyTorch's, how it says how far it is, and how to ask for less."""

from __future__ import annotations

import errno
import itertools
import re
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import onnx_ir as ir
import pytest
import torch
import torch.nn.functional as F
from mutated_steps import mutants
from torch import nn

import gradfuse
from gradfuse.export import reporting, verifying
from gradfuse.export.torch_step import TorchStep, undisturbed
from gradfuse.models import memory, spilling
from gradfuse.testing import assert_gradients_close

Batch = tuple[torch.Tensor, torch.Tensor]


def _small() -> tuple[nn.Module, Batch]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 5))
    return module, (torch.randn(8, 6), torch.randint(0, 5, (8,)))


_TRAINS = """
import sys, torch, torch.nn.functional as F, gradfuse
from gradfuse.models import memory
torch.manual_seed(0)
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(30_000, 1024)
        self.first = torch.nn.Linear(1024, 8192)
        self.second = torch.nn.Linear(8192, 1024)
        self.head = torch.nn.Linear(1024, 10)
    def forward(self, ids):
        return self.head(self.second(self.first(self.embed(ids)).relu()).mean(1))
net, ids, labels = Net(), torch.randint(0, 30_000, (2, 16)), torch.randint(0, 10, (2,))
optimizer = torch.optim.AdamW(net.parameters())
if sys.argv[1] == "export":
    gradfuse.export_training_step(net, F.cross_entropy, (ids, labels), optimizer)
else:
    for _ in range(2):
        optimizer.zero_grad()
        F.cross_entropy(net(ids), labels).backward()
        optimizer.step()
print(memory.most_resident())
"""


@pytest.mark.long
def test_an_export_takes_no_more_than_one_and_a_half_times_the_memory_of_training() -> None:
    def peak(way: str) -> int:
        done = subprocess.run([sys.executable, "-c", _TRAINS, way], capture_output=True, text=True, check=True)
        return int(done.stdout.splitlines()[-1])

    assert peak("export") <= 1.5 * peak("train")


class _Spills(spilling.Shelf):
    """A shelf that takes all there is, and counts."""

    made: ClassVar[list[_Spills]] = []

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []
        self.made.append(self)

    def limit(self, room: int) -> None:
        assert room >= 0
        self.room = 0

    def spill(self, array: Any) -> Any:
        self.shapes.append(array.shape)
        return super().spill(array)


@pytest.fixture
def spills(monkeypatch: pytest.MonkeyPatch) -> list[_Spills]:
    monkeypatch.setattr(spilling, "Shelf", _Spills)
    monkeypatch.setattr(spilling, "SMALLEST", 1)
    monkeypatch.setattr(_Spills, "made", [])
    return _Spills.made


class _Mixed(nn.Module):
    """Saves tensors that lie in other orders, twice, as views of parameters, and whole numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3)
        self.norm = nn.BatchNorm2d(6)
        self.embed = nn.Embedding(7, 12)
        self.qkv = nn.Linear(12, 36)
        self.out = nn.Linear(12, 4)

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        pooled = F.max_pool2d(self.norm(self.conv(x)).relu(), 2).permute(0, 2, 3, 1).flatten(1, 2)
        rows = torch.cat([pooled @ self.out.weight[:, :6].T @ self.out.weight, self.embed(ids)], 1)
        q, k, v = self.qkv(rows).unflatten(-1, (3, 2, 6)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2)).mean(1).expand(2, -1, -1).sum(0)  # type: ignore[no-any-return]


def _mixed() -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    return _Mixed(), ((torch.randn(3, 3, 6, 6), torch.randint(0, 7, (3, 4))), torch.randint(0, 4, (3,)))


def test_runs_in_float64_give_the_same_with_tensors_in_files(spills: list[_Spills]) -> None:
    module, (inputs, targets) = _mixed()
    step = TorchStep.of(module, F.cross_entropy, (inputs, targets), lambda names: None, None)
    with undisturbed(step):
        before = verifying.truth_of(step, step.run())
        with spilling.shelf() as shelf:
            shelf.limit(0)
            after = verifying.truth_of(step, step.run())
        assert len(spills[0].shapes) > 10
    assert before.exact is not None and after.exact is not None
    for name, one in before.exact.items():
        np.testing.assert_array_equal(one, after.exact[name])


def test_an_export_with_tensors_in_files_leaves_none(
    spills: list[_Spills], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    module, batch = _mixed()
    optimizer = torch.optim.AdamW(module.parameters())
    step = gradfuse.export_training_step(module, F.cross_entropy, batch, optimizer)
    assert len(spills[0].shapes) > 40
    assert not list(tmp_path.rglob("gradfuse-*"))
    session = gradfuse.TrainingSession(step)
    inputs, targets = batch
    optimizer.zero_grad()
    loss = F.cross_entropy(module(*inputs), targets)
    got = session.step(tuple(one.numpy() for one in inputs), targets.numpy())
    native = loss.detach().numpy()
    assert_gradients_close(np.array(got, np.float32), native, native.astype(np.float64), np.float32)


@pytest.mark.parametrize("fails_after", [0, 20])
def test_without_a_disk_all_stays_in_memory(
    fails_after: int, spills: list[_Spills], monkeypatch: pytest.MonkeyPatch
) -> None:
    write = spilling.Shelf._write
    written = itertools.count()

    def full(self: spilling.Shelf, place: int, array: Any) -> None:
        if next(written) >= fails_after:
            write(self, place, array.reshape(-1)[:1])
            raise OSError(errno.ENOSPC, "No space left on device")
        write(self, place, array)

    monkeypatch.setattr(spilling.Shelf, "_write", full)
    module, batch = _mixed()
    gradfuse.export_training_step(module, F.cross_entropy, batch)
    assert next(written) == fails_after + 1


def test_transforms_of_functions_run_in_memory(spills: list[_Spills]) -> None:
    """torch.func refuses where tensors that autograd saves go elsewhere."""

    class Squares(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            slopes = torch.func.vmap(torch.func.grad(lambda row: row.sin().sum()))(x)
            return self.linear(slopes).square()  # type: ignore[no-any-return]

    torch.manual_seed(0)
    module = Squares()
    step = TorchStep.of(module, F.mse_loss, (torch.randn(3, 4), torch.randn(3, 4)), lambda names: None, None)
    with undisturbed(step), spilling.shelf() as shelf:
        shelf.limit(0)
        assert verifying.truth_of(step, step.run()).exact is not None


def test_long_parts_tell_how_far_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reporting, "_TELL_EVERY", 0.0)
    told: list[tuple[str, int, int]] = []
    module, batch = _small()
    gradfuse.export_training_step(
        module,
        F.cross_entropy,
        batch,
        torch.optim.AdamW(module.parameters()),
        progress=lambda *one: told.append(one),
    )
    assert [done for _, done, _ in told] == sorted(done for _, done, _ in told)
    shares: dict[str, list[int]] = {}
    for text, _, _ in told:
        found = re.fullmatch(r"(.*), (\d+)%", text)
        if found is not None:
            shares.setdefault(found[1], []).append(int(found[2]))
    assert {"running the step in float64", "comparing the update with PyTorch"} <= shares.keys()
    assert all(0 <= share <= 100 for part in shares.values() for share in part)


def test_quick_leaves_out_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> None:
        raise AssertionError("it ran in float64")

    monkeypatch.setattr(verifying, "ReferenceSession", never)
    monkeypatch.setattr(verifying, "_widen", never)
    module, batch = _small()
    optimizer = torch.optim.AdamW(module.parameters())
    step = gradfuse.export_training_step(module, F.cross_entropy, batch, optimizer, verify="quick")
    assert step.evaluation_model is not None
    module.train()
    session = gradfuse.TrainingSession(step)
    assert session.step(batch[0].numpy(), batch[1].numpy()) > 0


def test_quick_sees_an_error_of_a_hundredth() -> None:
    module, batch = _small()
    model = gradfuse.export_training_step(module, F.cross_entropy, batch, fuse=False, verify="quick").model
    step = TorchStep.of(module, F.cross_entropy, batch, lambda names: None, None).with_dropout_seed()
    with undisturbed(step):
        truth = verifying.truth_of(step, step.run(), in_float64=False)
        truth.compare(ir.from_proto(model), "exported")
        wrong = [mutant for mutant in mutants(model) if mutant.kind == "one percent"]
        assert len(wrong) == 4
        for mutant in wrong:
            with pytest.raises(gradfuse.ExportError, match=re.escape(repr(mutant.place))):
                truth.compare(ir.from_proto(mutant.model), "exported")


def test_where_memory_will_not_do_a_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "resident", lambda: 2**30)
    most = itertools.cycle((2**30, 3 * 2**30))
    monkeypatch.setattr(memory, "most_resident", lambda: next(most))
    monkeypatch.setattr(memory, "available", lambda: 3 * 2**30)
    module, batch = _small()
    line = (
        r"^export_training_step: a run in float64 takes about 4\.0 GiB of memory, of which 3\.0 GiB are free; expected "
        r"as much, a smaller batch, or verify='quick', which compares without float64 and takes about 2\.0 GiB$"
    )
    with pytest.warns(UserWarning, match=line) as found:
        gradfuse.export_training_step(module, F.cross_entropy, batch, evaluation=False)
    assert found[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gradfuse.export_training_step(module, F.cross_entropy, batch, evaluation=False, verify="quick")
    monkeypatch.setattr(memory, "available", lambda: 4 * 2**30)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gradfuse.export_training_step(module, F.cross_entropy, batch, evaluation=False)
    # What the process has taken at most may have been for something else.
    monkeypatch.setattr(memory, "most_resident", lambda: 9 * 2**30)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gradfuse.export_training_step(module, F.cross_entropy, batch, evaluation=False)


def test_another_word_is_refused() -> None:
    module, batch = _small()
    with pytest.raises(gradfuse.ExportError, match=r"verify is 'none'; expected 'full' or 'quick'$"):
        gradfuse.export_training_step(module, F.cross_entropy, batch, verify="none")  # type: ignore[arg-type]
