"""Layers that read packed sequences train as PyTorch's, for any lengths, and refuse the lengths that it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from like_torch import assert_like_torch, trains_like_torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence, unpack_sequence

from gradfuse import ExportError, ModelError, TrainingSession, export_training_step

DYNAMIC = (({0: "batch", 1: "length"}, {0: "batch"}), {0: "batch"})
EVERY_LENGTH = [3, 7, 5, 1], [8, 1, 4, 4, 2, 6], [4, 2]


def batch(lengths: list[int], steps: int) -> Any:
    generator = torch.Generator().manual_seed(steps)
    words = torch.randint(0, 20, (len(lengths), steps), generator=generator)
    return (words, torch.tensor(lengths)), torch.randint(0, 3, (len(lengths),), generator=generator)


class Classifier(nn.Module):
    """Means over the steps of each text and its last states, from a layer that reads packed sequences."""

    def __init__(self, kind: Any = nn.LSTM, both: bool = True, is_sorted: bool = False, **settings: Any) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 4)
        self.layer = kind(4, 6, batch_first=True, bidirectional=both, **settings)
        self.out = nn.Linear((settings.get("proj_size", 0) or 6) * (1 + both), 3)
        self.is_sorted = is_sorted

    def forward(self, words: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.words(words), lengths, batch_first=True, enforce_sorted=self.is_sorted)
        results, last = self.layer(packed)
        last = last[0] if isinstance(last, tuple) else last
        padded, counts = pad_packed_sequence(results, batch_first=True)
        means = padded.sum(1) / counts[:, None] + padded.mean(1)  # The second is over the longest of the batch.
        return self.out(means + last[-self.layer.bidirectional - 1 :].transpose(0, 1).flatten(1))  # type: ignore[no-any-return]


def made(module: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    for parameter in module.parameters():
        nn.init.uniform_(parameter, -0.5, 0.5)
    return module


@pytest.mark.parametrize(
    "settings",
    [{}, {"both": False}, {"kind": nn.GRU, "num_layers": 2}, {"kind": nn.GRU, "both": False}, {"is_sorted": True}],
    ids=str,
)
@pytest.mark.sampled(every=5)
def test_layers_train_as_in_pytorch(settings: dict[str, Any]) -> None:
    lengths = [sorted(one, reverse=settings.get("is_sorted", False)) for one in EVERY_LENGTH]
    # In the second the sequences are shorter than their padding.
    batches = [batch(one, steps) for one, steps in zip(lengths, (7, 9, 4), strict=True)]
    trains_like_torch(lambda: made(Classifier(**settings)), F.cross_entropy, batches, dynamic_shapes=DYNAMIC)


def test_a_step_takes_lengths_in_any_order_also_where_pytorch_asks_for_sorted_ones() -> None:
    module, steps = Classifier(nn.GRU, both=False, is_sorted=True), 7
    step = export_training_step(made(module), F.cross_entropy, batch([7, 5, 3, 1], steps), fuse=False)
    with pytest.raises(RuntimeError, match="must be sorted in decreasing order"):
        module(*batch([3, 7, 5, 1], steps)[0])
    module.is_sorted = False
    assert_like_torch(step, module, F.cross_entropy, batch([3, 7, 5, 1], steps))


@pytest.mark.long
@pytest.mark.parametrize("settings", [{"kind": nn.RNN}, {"proj_size": 5}], ids=str)
def test_layers_that_are_traced_step_by_step(settings: dict[str, Any]) -> None:
    batches = [batch(one, 7) for one in ([3, 7, 5, 1], [3, 6, 5, 2])]
    trains_like_torch(lambda: made(Classifier(**settings)), F.cross_entropy, batches)


class Captions(nn.Module):
    """A loss over the rows of packed sequences, as of captions."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.layer, self.out = nn.Embedding(20, 4), nn.LSTM(4, 6, batch_first=True), nn.Linear(6, 20)

    def forward(self, words: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.words(words), lengths, batch_first=True)
        return F.cross_entropy(self.out(self.layer(packed)[0].data), pack_padded_sequence(words, lengths, True)[0])


class Changed(nn.Module):
    """Rows that are changed between two layers, states that are given, and padding to a length that is given."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.first, self.second = nn.Embedding(20, 4), nn.GRU(4, 6), nn.LSTM(6, 3)

    def forward(self, words: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.words(words).mT.permute(2, 0, 1), lengths.cpu(), enforce_sorted=False)
        results, last = self.first(packed)
        changed = PackedSequence(torch.tanh(results.data), *results[1:])
        states = last[..., :3] * 2, torch.ones(1, len(lengths), 3)
        padded, _ = pad_packed_sequence(self.second(changed, states)[0], False, -1.0, words.shape[1])
        return padded.amax(0)


class Written(Classifier):
    """Rows, and a sequence whose rows are packed already, that are written into."""

    def forward(self, words: Tensor, lengths: Tensor) -> Tensor:
        vectors = self.words(words) * 1.0
        packed = pack_padded_sequence(vectors, lengths, batch_first=True, enforce_sorted=False)
        vectors.mul_(2.0)
        results, _ = self.layer(packed)
        results.data[:, 0] = 0.5
        return self.out(pad_packed_sequence(results, batch_first=True)[0].mean(1))  # type: ignore[no-any-return]


class Counted(Classifier):
    """Steps of the longest sequence, as the batch sizes count them."""

    def forward(self, words: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.words(words), lengths, batch_first=True, enforce_sorted=False)
        _, (last, _) = self.layer(packed)
        return self.out(last.transpose(0, 1).flatten(1) / len(packed.batch_sizes))  # type: ignore[no-any-return]


class Looped(Classifier):
    """Means over the rows of each step."""

    def forward(self, words: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.words(words), lengths, batch_first=True, enforce_sorted=False)
        means = [packed.data[:count].mean() for count in packed.batch_sizes]
        return self.out(torch.stack(means).sum().expand(len(words), 12))  # type: ignore[no-any-return]


class OneByOne(Classifier):
    """Sequences that are taken out one by one."""

    def forward(self, words: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.words(words), [7, 6, 3, 1], batch_first=True, enforce_sorted=False)
        return self.out(torch.stack([one.mean(0) for one in unpack_sequence(self.layer(packed)[0])]))  # type: ignore[no-any-return]


@pytest.mark.long
def test_rows_are_read_and_changed() -> None:
    batches = [batch(sorted(one, reverse=True), steps) for one, steps in zip(EVERY_LENGTH, (7, 9, 4), strict=True)]
    trains_like_torch(lambda: made(Captions()), lambda value, _: value, batches, dynamic_shapes=DYNAMIC)
    batches = [batch(one, steps) for one, steps in zip(EVERY_LENGTH, (7, 9, 4), strict=True)]
    trains_like_torch(lambda: made(Changed()), F.cross_entropy, batches, dynamic_shapes=DYNAMIC)
    trains_like_torch(lambda: made(Written()), F.cross_entropy, batches, dynamic_shapes=DYNAMIC)
    trains_like_torch(lambda: made(OneByOne()), F.cross_entropy, [batch([3, 7, 5, 1], 7)] * 2)


class Measurements(nn.Module):
    """Numbers that are not there after the end of each sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out = nn.GRU(2, 4, batch_first=True, bidirectional=True), nn.Linear(8, 3)

    def forward(self, words: Tensor, lengths: Tensor) -> Tensor:
        steps = torch.arange(words.shape[1])
        numbers = torch.where(steps < lengths[:, None], (words / 20).to(self.out.weight.dtype), torch.nan)
        packed = pack_padded_sequence(torch.stack([numbers, numbers.cos()], 2), lengths, True, enforce_sorted=False)
        return self.out(pad_packed_sequence(self.layer(packed)[0], batch_first=True)[0].sum(1))  # type: ignore[no-any-return]


@pytest.mark.long
def test_what_lies_after_the_end_of_a_sequence_is_never_read() -> None:
    batches = [batch(one, steps) for one, steps in zip(EVERY_LENGTH, (7, 9, 4), strict=True)]
    trains_like_torch(lambda: made(Measurements()), F.cross_entropy, batches, dynamic_shapes=DYNAMIC)


def test_steps_are_counted_and_a_loop_over_them_is_refused() -> None:
    # In the second batch no sequence is as long as the padding.
    batches = [batch(one, 7) for one in ([3, 7, 5, 1], [3, 5, 5, 2])]
    trains_like_torch(lambda: made(Counted()), F.cross_entropy, batches)
    with pytest.raises(ExportError, match="by numbers that it takes out of tensors"):
        export_training_step(made(Looped()), F.cross_entropy, batches[0])


def test_rows_that_nothing_reads_are_not_selected() -> None:
    step = export_training_step(made(Classifier()), F.cross_entropy, batch([3, 7, 5, 1], 7))
    assert not {node.op_type for node in step.model.graph.node} & {"NonZero", "Compress", "ScatterND"}


def test_lengths_that_pytorch_refuses_are_refused() -> None:
    module = made(Classifier())
    session = TrainingSession(export_training_step(module, F.cross_entropy, batch([3, 7, 5, 1], 7)))
    for lengths in ([0, 7, 5, 1], [8, 7, 5, 1], [-1, 7, 5, 1]):
        inputs, target = batch(lengths, 7)
        with pytest.raises((RuntimeError, ValueError)):
            module(*inputs)
        with pytest.raises(ModelError, match=r"out of (range|data bounds)"):
            session.step(inputs, target)


@pytest.mark.long
def test_the_evaluation_model_reads_them_too() -> None:
    module = made(Classifier())
    given = batch([3, 7, 5, 1], 7)
    step = export_training_step(module, F.cross_entropy, given, dynamic_shapes=DYNAMIC, evaluation=True)
    inputs, _ = batch([8, 1, 4, 4, 2, 6], 9)
    torch.testing.assert_close(
        torch.from_numpy(TrainingSession(step).evaluate(inputs)), module(*inputs), rtol=0, atol=1e-6
    )
