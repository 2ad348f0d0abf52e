"""Trains models of other people's libraries, and compares with torch: `make test-models`.

Usage, in tests/: python -m real_models.run [CASE ...]

Each case runs in a process of its own. Prints a table, and ends with 1 where a case fails.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

SECONDS = 300
"""How long a case may take."""


def main(names: list[str]) -> int:
    """Run the cases of these names, or all of them."""
    from real_models.model_cases import CASES

    unknown = [name for name in names if name not in CASES]
    if unknown:
        print(f"no case {unknown[0]!r}; expected some of {', '.join(CASES)}", file=sys.stderr)
        return 2
    failed = 0
    for name in names or CASES:
        begin = time.perf_counter()
        command = [sys.executable, "-m", "real_models.run", "--one", name]
        try:
            result = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
            lines = (result.stdout if result.returncode == 0 else result.stderr).strip().splitlines()
            outcome = lines[-1] if lines else f"ended with {result.returncode}"
            good = result.returncode == 0
        except subprocess.TimeoutExpired:
            good, outcome = False, f"took longer than {SECONDS} s"
        failed += not good
        print(f"{name:20} {'ok' if good else 'FAILED':7} {time.perf_counter() - begin:5.0f} s  {outcome}", flush=True)
    return min(failed, 1)


def one(name: str) -> str:
    """Run a case, and return what was compared.

    Raises:
        AssertionError: a gradient is not torch's, or training does not lower the loss.
    """
    import numpy as np
    import torch
    from real_models.model_cases import CASES

    from gradfuse import TrainingSession
    from gradfuse.testing import assert_gradients_close

    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "model.onnx", Path(folder) / "step.onnx"
        case = CASES[name](source)
        frozen = [word for name in case.frozen for word in ("--frozen", name)]
        _training_step(source, target, "--loss", case.loss, *frozen)
        session = TrainingSession(target)
        loss = session.step(dict(case.batch), case.targets)
        found = dict(session.gradients)
        native_loss, native = case.gradients(torch.float32)
        exact_loss, exact = case.gradients(torch.float64)
        assert abs(loss - exact_loss) <= 2 * abs(native_loss - exact_loss) + 1e-5 * abs(exact_loss), (loss, exact_loss)
        unknown = sorted(set(found) - set(exact))
        assert not unknown, f"gradients of {', '.join(unknown)}"
        for parameter, gradient in found.items():
            largest = float(np.abs(exact[parameter]).max())
            terms = 64 * max(largest, 1e-3)
            assert_gradients_close(
                gradient, native[parameter].astype(np.float32), exact[parameter], np.dtype(np.float32), terms=terms
            )
        _training_step(source, target, "--loss", case.loss, *frozen, "--optimizer", "adam", "--lr", "1e-2")
        session = TrainingSession(target)
        losses = [session.step(dict(case.batch), case.targets) for _ in range(20)]
        assert losses[-1] < 0.9 * losses[0], losses
    return f"{len(found)} gradients as torch's; loss {losses[0]:.3f} -> {losses[-1]:.3f} in {len(losses)} steps"


def _training_step(*arguments: object) -> None:
    """Run the command line."""
    command = [sys.executable, "-m", "gradfuse", "training-step", *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr.strip()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        print(one(sys.argv[2]))
    else:
        sys.exit(main(sys.argv[1:]))
