"""What the long samples share: a progress bar, a plot of the losses, and checkpoints to resume from.

Ctrl-C, or SIGTERM as schedulers send it, ends a sample after the current step, with a checkpoint. The same command
continues from there, with the numbers of a run that never stopped. So does a sample that was killed, from a checkpoint
of the last ten seconds: a thread writes it while training goes on.
"""

from __future__ import annotations

import contextlib
import pathlib
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

import gradfuse

SECONDS_BETWEEN_CHECKPOINTS = 10.0
INTERRUPTED = 130
"""The exit status of a program that Ctrl-C ends."""


class Training:
    """The remaining steps of a training run.

    The step number must determine what a step does: its batch and its learning rate.

    Args:
        session: what is trained.
        count: the number of all steps, including those of earlier runs.
        console: where to show what happens; there is a bar only if it is a terminal.
        checkpoint: the file to go on from, and to write.
        options: what decides the numbers; a checkpoint of a run with others is refused.
        what: the name to show.
    """

    def __init__(
        self,
        session: gradfuse.TrainingSession,
        count: int,
        console: Console,
        checkpoint: pathlib.Path,
        options: Mapping[str, Any],
        what: str = "training",
    ) -> None:
        self.losses: list[float] = []
        """The loss of each step, with those of earlier runs; the loop appends to it."""
        self._session, self._count, self._console, self._what = session, count, console, what
        self._checkpoint, self._options = checkpoint, dict(options)
        if checkpoint.exists():
            try:
                kept = session.load(checkpoint)
            except gradfuse.GradfuseError as error:
                console.print(f"{error}; delete the file, or choose another")
                sys.exit(2)
            if kept.get("options") != self._options:
                console.print(f"{checkpoint} is of a run with other options; delete the file, or choose another")
                sys.exit(2)
            self.losses = kept["losses"]
            console.print(f"{what}: going on after {session.step_count} steps")

    def __iter__(self) -> Iterator[int]:
        """The numbers of the steps to do; the program ends here if a signal asks for it."""
        columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        loss = TextColumn("{task.fields[loss]}")
        bar = Progress(TextColumn(self._what), *columns, loss, console=self._console, transient=True)
        bar.disable = not self._console.is_terminal
        with bar, stopping() as signals:
            task = bar.add_task(self._what, total=self._count, completed=len(self.losses), loss="")
            saved = time.monotonic()
            for index in range(self._session.step_count, self._count):
                yield index
                bar.update(task, advance=1, loss=f"loss {self.losses[-1]:.4f}")
                if signals:
                    break
                if time.monotonic() - saved > SECONDS_BETWEEN_CHECKPOINTS:
                    self.save(wait=False)
                    saved = time.monotonic()
        self._session.wait()
        if signals:
            self.save()
            done = self._session.step_count
            self._console.print(
                f"{self._what}: stopped after {done} of {self._count} steps, {self._checkpoint} is written"
            )
            self._console.print("run the same command again to go on")
            sys.exit(INTERRUPTED)

    def save(self, *, wait: bool = True) -> None:
        """Write the checkpoint."""
        self._checkpoint.parent.mkdir(parents=True, exist_ok=True)
        self._session.save(self._checkpoint, wait=wait, extra={"options": self._options, "losses": self.losses})

    def forget(self) -> None:
        """Remove the checkpoint after the end of training."""
        self._checkpoint.unlink(missing_ok=True)


@contextlib.contextmanager
def stopping() -> Iterator[list[int]]:
    """Collect the signals that ask the program to end, Ctrl-C and SIGTERM; a second Ctrl-C ends it at once."""
    received: list[int] = []

    def receive(number: int, _: FrameType | None) -> None:
        if received and number == signal.SIGINT:
            raise KeyboardInterrupt
        received.append(number)

    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    handlers = {number: signal.signal(number, receive) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def plot(losses: Sequence[float], width: int = 64, height: int = 10) -> str:
    """Draw losses as lines of text; if there are more than columns, average neighbours."""
    columns = np.array(
        [part.mean() for part in np.array_split(np.asarray(losses, np.float64), min(width, len(losses)))]
    )
    finite = columns[np.isfinite(columns)]
    if not finite.size:
        return "no finite loss to plot"
    low, high = float(finite.min()), float(finite.max())
    scale = (height - 1) / (high - low) if high > low else 0.0
    rows = np.where(np.isfinite(columns), np.nan_to_num((high - columns) * scale), -1).round().astype(int)
    labels = [f"{high:.4g}", *[""] * (height - 2), f"{low:.4g}"]
    margin = max(map(len, labels))
    lines = [
        f"{label:>{margin}} |" + "".join("*" if place == row else " " for place in rows).rstrip()
        for row, label in enumerate(labels)
    ]
    axis = f"{'':{margin}} +{'-' * len(columns)}"
    steps = f"{'loss':>{margin}}  1{len(losses):>{max(1, len(columns) - 1)}} steps"
    return "\n".join([*lines, axis, steps])
