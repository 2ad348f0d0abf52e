"""Train a small speech recogniser with the CTC loss in stock onnxruntime.

Run it with `python samples/ctc_speech.py`; it needs `pip install "gradfuse[samples]"`. espeak-ng, which the package
espeakng-loader ships, synthesises the speech: rows of three to six English digits in many voices, speeds and pitches,
with added noise. The recogniser, a convolution and a bidirectional GRU, hears log mel energies and learns the digits of
a row without being told when each is said. The sample

1. exports the training step with AdamW in it; the CTC loss, which no other exporter takes, becomes the operators
   CtcLoss and CtcLossBackward,
2. trains in onnxruntime,
3. decodes rows of digits by voices that were not in the training data, and counts the wrong labels.

Ctrl-C ends it with a checkpoint, from which the same command goes on. The exit status is 1 if the label error rate is
above the wanted one.
"""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import pathlib
import sys
import time
from collections.abc import Iterable, Sequence

import click
import espeakng_loader
import numpy as np
import numpy.typing as npt
import running
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn

import gradfuse

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
BLANK = 0  # and the digit d is the label d + 1
ACCENTS = ("en", "en-us", "en-gb-x-rp", "en-gb-scotland")
VOICES = ("m1", "m2", "m3", "m4", "m6", "f1", "f2", "f4", "Alex", "Annie", "john", "linda", "steph", "paul")
NEW_VOICES = ("m5", "m7", "f3", "f5", "Andrea", "rob")
MEL_BANDS = 32


class Speaker:
    """Speaks by espeak-ng's C interface (speak_lib.h)."""

    SYNCHRONOUS, RATE, PITCH, UTF8 = 2, 1, 3, 1

    def __init__(self) -> None:
        self._espeak = ctypes.CDLL(espeakng_loader.get_library_path())
        data = espeakng_loader.get_data_path().encode()
        self.sample_rate = self._espeak.espeak_Initialize(self.SYNCHRONOUS, 0, data, 0)
        if self.sample_rate <= 0:
            raise RuntimeError("espeak-ng does not start")
        callback_type = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p)
        self._heard: list[npt.NDArray[np.int16]] = []

        def hear(samples: ctypes._Pointer[ctypes.c_short], count: int, _: object) -> int:
            if samples and count > 0:
                self._heard.append(np.ctypeslib.as_array(samples, (count,)).copy())
            return 0

        self._callback = callback_type(hear)
        self._espeak.espeak_SetSynthCallback(self._callback)

    def say(self, text: str, voice: str, words_per_minute: int, pitch: int) -> Floats:
        """Samples between -1 and 1; the pitch is 0 to 100."""
        if self._espeak.espeak_SetVoiceByName(voice.encode()) != 0:
            raise RuntimeError(f"espeak-ng has no voice {voice}")
        self._espeak.espeak_SetParameter(self.RATE, words_per_minute, 0)
        self._espeak.espeak_SetParameter(self.PITCH, pitch, 0)
        content = text.encode()
        self._espeak.espeak_Synth(content, len(content) + 1, 0, 0, 0, self.UTF8, None, None)
        samples: Floats = np.concatenate(self._heard).astype(np.float32) * np.float32(2**-15)
        self._heard.clear()
        return samples


def log_mel(samples: Floats, sample_rate: int, window: float = 0.025, hop: float = 0.01) -> Floats:
    """Log energies (frames, MEL_BANDS) of triangular bands that are equally wide on the mel scale."""
    size, step = round(window * sample_rate), round(hop * sample_rate)
    frames = np.lib.stride_tricks.sliding_window_view(samples, size)[::step] * np.hanning(size)
    power = np.abs(np.fft.rfft(frames)) ** 2
    mel = 2595 * np.log10(1 + np.fft.rfftfreq(size, 1 / sample_rate) / 700)
    width = mel[-1] / (MEL_BANDS + 1)
    centres = width * np.arange(1, MEL_BANDS + 1)
    bands = np.clip(1 - np.abs(mel[:, None] - centres) / width, 0, None)
    energies: Floats = np.log(power @ bands + 1e-3).astype(np.float32)
    return energies


@dataclasses.dataclass(frozen=True)
class Utterance:
    frames: Floats
    labels: Ints


def utterances(speaker: Speaker, count: int, voices: Sequence[str], seed: int) -> list[Utterance]:
    generator = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        digits = generator.integers(0, 10, generator.integers(3, 7))
        text = " ".join(WORDS[digit] for digit in digits)
        voice = f"{generator.choice(ACCENTS)}+{generator.choice(voices)}"
        samples = speaker.say(text, voice, int(generator.integers(140, 200)), int(generator.integers(30, 70)))
        noise = generator.normal(0, 0.01, samples.shape).astype(np.float32)
        found.append(Utterance(log_mel(samples + noise, speaker.sample_rate), digits + 1))
    return found


class Recogniser(nn.Module):
    """Frames (N, L, MEL_BANDS) -> log probabilities (T, N, labels), where T is half of L."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(MEL_BANDS, width, 5, stride=2, padding=2)
        self.gru = nn.GRU(width, width, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * width, 1 + len(WORDS))

    def forward(self, frames: Tensor) -> Tensor:
        states, _ = self.gru(F.relu(self.convolution(frames.transpose(1, 2))).transpose(1, 2))
        log_probs: Tensor = self.head(states).log_softmax(-1).transpose(0, 1)
        return log_probs


def steps_of(frames: int) -> int:
    """How many steps T the convolution makes of a number of frames."""
    return (frames - 1) // 2 + 1


def ctc_loss(log_probs: Tensor, labels: Tensor, input_lengths: Tensor, target_lengths: Tensor) -> Tensor:
    return F.ctc_loss(log_probs, labels, input_lengths, target_lengths, BLANK)


def padded(arrays: Sequence[npt.NDArray[np.generic]], value: float) -> npt.NDArray[np.generic]:
    length = max(len(array) for array in arrays)
    tail = [(0, 0)] * (arrays[0].ndim - 1)
    return np.stack([np.pad(array, [(0, length - len(array)), *tail], constant_values=value) for array in arrays])


@dataclasses.dataclass(frozen=True)
class Scale:
    """Brings the frames of the training data to mean 0 and standard deviation 1."""

    mean: Floats
    deviation: Floats

    @classmethod
    def of(cls, data: Iterable[Utterance]) -> Scale:
        frames = np.concatenate([utterance.frames for utterance in data])
        return cls(frames.mean(0), frames.std(0))

    def batch(self, data: Sequence[Utterance]) -> tuple[Floats, tuple[Ints, Ints, Ints]]:
        """Frames (N, L, MEL_BANDS); labels (N, S), steps (N), numbers of labels (N)."""
        frames = padded([(one.frames - self.mean) / self.deviation for one in data], 0).astype(np.float32)
        labels = padded([one.labels for one in data], BLANK).astype(np.int64)
        steps = np.array([steps_of(len(one.frames)) for one in data])
        return frames, (labels, steps, np.array([len(one.labels) for one in data]))


def decode(log_probs: Floats, steps: int) -> list[int]:
    """The best path, without repetitions and blanks."""
    best = log_probs[:steps].argmax(-1)
    return [int(label) for label, _ in itertools.groupby(best) if label != BLANK]


def edit_distance(one: Sequence[int], other: Sequence[int]) -> int:
    """How many labels have to be inserted, deleted or replaced (Levenshtein)."""
    row = list(range(len(other) + 1))
    for i, a in enumerate(one):
        diagonal, row[0] = row[0], i + 1
        for j, b in enumerate(other):
            diagonal, row[j + 1] = row[j + 1], min(row[j] + 1, row[j + 1] + 1, diagonal + (a != b))
    return row[-1]


@click.command(context_settings={"show_default": True})
@click.option("--utterances", "count", default=600, type=click.IntRange(2), help="Rows of digits to train on.")
@click.option("--test", default=100, type=click.IntRange(1), help="Rows of digits to test on.")
@click.option("--epochs", default=10, type=click.IntRange(1), help="Passes over the training data.")
@click.option("--batch-size", default=16, type=click.IntRange(2), help="Rows in a step.")
@click.option("--width", default=64, type=click.IntRange(1), help="Channels of the convolution, states of the GRU.")
@click.option("--rate", default=3e-3, help="Learning rate of AdamW at first; it falls to zero.")
@click.option("--seed", default=0, help="Seed of everything that is drawn.")
@click.option("--error-rate", default=0.05, type=click.FloatRange(0), help="Wanted label error rate.")
@click.option(
    "--checkpoint",
    default="build/samples/ctc_speech.safetensors",
    type=click.Path(dir_okay=False, path_type=pathlib.Path),
    help="What Ctrl-C leaves, and where the same command goes on.",
)
def main(
    count: int,
    test: int,
    epochs: int,
    batch_size: int,
    width: int,
    rate: float,
    seed: int,
    error_rate: float,
    checkpoint: pathlib.Path,
) -> None:
    """Train a recogniser of spoken digits with the CTC loss; exit 1 above the wanted label error rate."""
    console = Console(soft_wrap=not sys.stdout.isatty(), highlight=False)
    speaker = Speaker()
    training, testing = utterances(speaker, count, VOICES, seed), utterances(speaker, test, NEW_VOICES, seed + 1)
    scale = Scale.of(training)
    seconds = 0.01 * sum(len(utterance.frames) for utterance in training)
    console.print(f"{seconds:.0f} s of synthesised speech to train on, {test} rows of digits by other voices to test")

    torch.manual_seed(seed)
    module = Recogniser(width)
    frames, targets = scale.batch(training[:batch_size])
    start = time.perf_counter()
    with console.status("exporting"):
        step = gradfuse.export_training_step(
            module,
            ctc_loss,
            (torch.from_numpy(frames), tuple(map(torch.from_numpy, targets))),
            torch.optim.AdamW(module.parameters(), lr=rate),
            dynamic_shapes={
                "frames": {0: "batch", 1: "frames"},
                "labels": {0: "batch", 1: "labels"},
                "input_lengths": {0: "batch"},
                "target_lengths": {0: "batch"},
            },
            max_grad_norm=1.0,
        )
    operators = sorted({node.op_type for node in step.model.graph.node if node.domain == "aclnn"})
    console.print(f"exported in {time.perf_counter() - start:.1f} s, with {', '.join(operators)}")

    session = gradfuse.TrainingSession(step)
    options = {"utterances": count, "epochs": epochs, "batch": batch_size, "width": width, "rate": rate, "seed": seed}
    batches = -(-count // batch_size)
    run = running.Training(session, epochs * batches, console, checkpoint, options)
    start = time.perf_counter()
    for index in run:
        epoch, place = divmod(index, batches)
        session.learning_rate = rate * (1 - epoch / epochs)
        order = np.random.default_rng((seed, epoch)).permutation(count)
        rows = order[place * batch_size :][:batch_size]
        run.losses.append(session.step(*scale.batch([training[row] for row in rows])))
    seconds = time.perf_counter() - start
    first, last = np.mean(run.losses[:batches]), np.mean(run.losses[-batches:])
    console.print(f"trained {epochs} epochs in {seconds:.1f} s, loss {first:.4f} in the first, {last:.4f} in the last")
    console.print(running.plot(run.losses))
    run.forget()

    wrong = total = 0
    for index in range(0, test, batch_size):
        some = testing[index : index + batch_size]
        frames, (_, steps, _) = scale.batch(some)
        log_probs = session.evaluate(frames)
        for place, utterance in enumerate(some):
            heard = decode(log_probs[:, place], steps[place])
            wrong += edit_distance(heard, list(utterance.labels))
            total += len(utterance.labels)
            if index + place < 3:
                said, understood = (" ".join(WORDS[label - 1] for label in one) for one in (utterance.labels, heard))
                console.print(f"  said: {said}\n  heard: {understood}")
    reached = wrong / total
    console.print(f"label error rate {reached:.2%} of {total} digits by voices that were not in the training")
    if reached > error_rate:
        console.print(f"label error rate is {reached:.2%}; expected at most {error_rate:.2%}")
        sys.exit(1)


if __name__ == "__main__":
    main()
