"""A bar on a terminal that shows how far long work has come."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from gradfuse.passes.progress import Progress

_SHOW_PROGRESS_AFTER_SECONDS = 1.0


@contextlib.contextmanager
def busy(what: str) -> Iterator[Progress]:
    """Show on a terminal that work goes on, and how far it has come, once it takes noticeable time."""
    # The stream of now: libraries' own messages are redirected while they work.
    console = Console(file=sys.stderr)
    bar = Bar(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )
    task = bar.add_task(what, total=None)

    def progress(part: str, done: int, total: int) -> None:
        bar.update(task, description=f"{what}: {part}", completed=done, total=total)

    if not console.is_terminal:
        yield progress
        return
    timer = threading.Timer(_SHOW_PROGRESS_AFTER_SECONDS, bar.start)
    timer.daemon = True
    timer.start()
    try:
        yield progress
    finally:
        timer.cancel()
        timer.join()
        bar.stop()
