"""Trains models of other people's libraries, and compares with torch: `make test-models`.

Usage, in tests/: python -m real_models.run [--page FILE] [--jobs N] [--seconds N] [CASE ...]

There are two kinds of cases: those of `model_cases` begin at an ONNX file, and those of `step_cases` and the other
`*_cases` at a module, by `export_training_step`. Each runs in a process of its own, within limits of time and memory.
Prints the result of each, and ends with 1 if a case does worse than it should. With --page, the lines of the modules
that were run go into the table of a page of the documentation; they have times where each case had a core of its own.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from real_models.step_cases import StepCase

    from gradfuse import TrainingStep

SECONDS = 900
"""How long a case may take, on a machine that does other work as well."""

MEMORY = 12 * 2**30
"""How much address space a case may take, in bytes."""

ITEMS, LENGTH = 3, 8
"""The batch that a step is exported with."""
OTHER_ITEMS, OTHER_LENGTH = 5, 11
"""The batch that it is compared on, besides."""
TIMED_STEPS = 20

AS_IS, CHANGED, REFUSED = "as it is", "changed", "refused"

TIMES = 4
"""How many columns of the table, the last ones, are times."""

HEAD = """\
| class | family | exported | error | fused operators | nodes | export | plain step | fused step | in PyTorch |
|---|---|---|---|---|---|---|---|---|---|
"""


@dataclasses.dataclass(frozen=True)
class Result:
    """What came of a case.

    Attributes:
        good: whether that is at least what the case says.
        text: one line.
        row: the cells of the table's line after the name, for a module.
    """

    good: bool
    text: str
    row: tuple[str, ...] = ()


def main(arguments: list[str]) -> int:
    """Run the cases of these names, or all of them."""
    parser = argparse.ArgumentParser(prog="real_models.run")
    parser.add_argument("names", nargs="*", metavar="CASE")
    parser.add_argument("--page", type=Path, help="put the lines of modules into the table of this page")
    cores = sorted(os.sched_getaffinity(0))
    parser.add_argument(
        "--jobs",
        type=int,
        default=len(cores),
        help="how many cases run at a time, each on a core of its own (default: as many as cores); with more, no times",
    )
    parser.add_argument("--seconds", type=int, default=SECONDS, help="how long a case may take")
    options = parser.parse_args(arguments)
    from real_models import model_cases

    steps = step_cases()
    known = [*model_cases.CASES, *steps]
    unknown = [name for name in options.names if name not in known]
    if unknown:
        print(f"no case {unknown[0]!r}; expected some of {', '.join(known)}", file=sys.stderr)
        return 2

    def timed(name: str) -> tuple[Result, float]:
        begin = time.perf_counter()
        limit = options.seconds
        result = step_result(name, steps[name], limit) if name in steps else file_result(name, limit)
        return result, time.perf_counter() - begin

    free: SimpleQueue[set[int]] = SimpleQueue()
    for number in range(options.jobs):
        free.put({cores[number]} if options.jobs <= len(cores) else set(cores))
    failed = 0
    # Processes run on the core of the thread that starts them.
    with ThreadPoolExecutor(options.jobs, initializer=lambda: os.sched_setaffinity(0, free.get())) as pool:
        running = {pool.submit(timed, name): name for name in options.names or known}
        for future in as_completed(running):
            name, (result, seconds) = running[future], future.result()
            if name in steps and options.page:
                row = result.row if options.jobs <= len(cores) else (*result.row[:-TIMES], *[""] * TIMES)
                put_row(options.page, name, row, list(steps))
            failed += not result.good
            print(f"{name:36} {'ok' if result.good else 'FAILED':7} {seconds:5.0f} s  {result.text}", flush=True)
    return min(failed, 1)


def step_cases() -> dict[str, StepCase]:
    """Return the cases that begin at a module."""
    from real_models import (  # noqa: F401
        adapter_cases,
        dense_vision_cases,
        document_cases,
        encoder_cases,
        language_cases,
        multimodal_cases,
        series_cases,
        speech_cases,
        timm_cases,
        torchvision_cases,
        translation_cases,
        vision_cases,
    )
    from real_models.step_cases import CASES

    return CASES


def put_row(page: Path, name: str, row: tuple[str, ...], order: list[str]) -> None:
    """Put the line of a class into the table of a page, and count; the other lines stay."""
    before, begin, rest = page.read_text().partition("<!-- measured -->\n")
    table, end, after = rest.partition("<!-- end -->")
    lines = {cells[1].strip(): line for line in table.splitlines() if len(cells := line.split("|")) > 1}
    lines[name] = f"| {name} | {' | '.join(row)} |"
    kept = [lines[one] for one in order if one in lines]
    how = Counter(line.split("|")[3].split()[0].rstrip(":") for line in kept)
    counts = (
        f"Of {len(kept)} classes, {how['as']} export as they are, {how['with']} with a change of their settings or a "
        f"static axis, and {how['refused']} not.\n\n"
    )
    rows = "".join(f"{line}\n" for line in kept)
    page.write_text(f"{before}{begin}{counts}{HEAD}{rows}{end}{after}")


def file_result(name: str, seconds: int) -> Result:
    """Run a case of `model_cases`, within a number of seconds."""
    code, output, errors = _own_process(seconds, "--one", name)
    lines = (output if code == 0 else errors).strip().splitlines()
    return Result(code == 0, lines[-1] if lines else f"ended with {code}")


def step_result(name: str, case: StepCase, seconds: int) -> Result:
    """Run a case that begins at a module, as it is and, if that is refused, changed: each within a number of
    seconds."""
    found = _step_outcome(name, seconds, changed=False)
    how, error = AS_IS, found.get("error")
    if error is not None and (case.change or case.fixed):
        found = _step_outcome(name, seconds, changed=True)
        how = CHANGED
    if "error" in found:
        how, error = REFUSED, found["error"]
    wanted = REFUSED if case.refused is not None else CHANGED if case.change or case.fixed else AS_IS
    order = (AS_IS, CHANGED, REFUSED)
    good = order.index(how) <= order.index(wanted) and (how != REFUSED or str(case.refused) in str(error))
    if how == REFUSED:
        return Result(good, f"refused: {error}", (case.family, f"refused: {_cell(str(error))}", *[""] * (3 + TIMES)))
    change = ", ".join(
        [f"{setting}={value}" for setting, value in case.change.items()]
        + [f"axis {axis} static" for axis in case.fixed]
    )
    exported = how if how == AS_IS else f"with {change}; else: {_cell(str(error))}"
    row = (
        case.family,
        exported,
        f"{found['error_of_bound']:.2f} of its bound",
        ", ".join(one if count == 1 else f"{count} {one}" for one, count in sorted(found["fused"].items())),
        str(found["nodes"]),
        f"{found['seconds']:.0f} s",
        *(f"{found[one]:.1f} ms" for one in ("plain_ms", "step_ms", "torch_ms")),
    )
    return Result(good and found["error_of_bound"] <= 1, "; ".join(row[1:]), row)


def _step_outcome(name: str, seconds: int, *, changed: bool) -> dict[str, Any]:
    code, output, errors = _own_process(seconds, "--step", name, *(["--changed"] if changed else []))
    lines = output.strip().splitlines()
    if code == 0 and lines:
        found: dict[str, Any] = json.loads(lines[-1])
        return found
    last = (errors.strip().splitlines() or [f"ended with {code}"])[-1]
    return {"error": f"unexpected: {last}"}


def _own_process(seconds: int, *arguments: str) -> tuple[int, str, str]:
    """Run this module with these arguments, within the limits; return its status and what it wrote."""
    command = [sys.executable, "-m", "real_models.run", *arguments]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=seconds, preexec_fn=_limited)
    except subprocess.TimeoutExpired:
        return 1, "", f"took longer than {seconds} s"
    return result.returncode, result.stdout, result.stderr


def _limited() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def step(name: str, *, changed: bool) -> dict[str, Any]:
    """Export the step of a class, and return what is measured of it, or the error."""
    import torch

    from gradfuse import ExportError, export_training_step

    torch.set_num_threads(1)
    torch.manual_seed(0)
    case = step_cases()[name]
    module, loss = case.module(changed)
    shapes = case.dynamic_shapes(changed)
    begin = time.perf_counter()
    try:
        exported = export_training_step(module, loss, case.tensors(ITEMS, LENGTH), dynamic_shapes=shapes)
    except ExportError as error:
        return {"error": str(error)}
    seconds = time.perf_counter() - begin
    fixed = case.fixed if changed else ()
    other = (ITEMS if 0 in fixed else OTHER_ITEMS), (LENGTH if 1 in fixed else OTHER_LENGTH)
    nodes = exported.model.graph.node
    return {
        "seconds": seconds,
        "nodes": len(nodes),
        "fused": Counter(node.op_type for node in nodes if node.domain == "aclnn"),
        **measured(exported, module, loss, case.tensors(*other)),
    }


def measured(exported: TrainingStep, module: Any, loss: Any, batch: Any) -> dict[str, float]:
    """Compare a step with torch on a batch of another size, and time it with the library, without it, and in torch.

    The error of an output is given in units of 16 times torch's own error + 64 eps max|exact| + 8 eps G, where exact is
    torch's float64 run and G the largest output; of all outputs, the largest counts. What is over that is given in
    units that have 4 times what runs differ by whose results are moved by roundings: as the exporter judges, for
    activations that lie within rounding of a kink.
    """
    import numpy as np
    import onnxruntime
    import torch
    from training_models import autograd

    from gradfuse import library

    def made(registered: bool) -> onnxruntime.InferenceSession:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        if registered:
            library.register(options)
        return onnxruntime.InferenceSession(exported.model.SerializeToString(), options)

    session, plain = made(True), made(False)
    tensors = dict(zip(exported.input_names + exported.target_names, batch[0] + batch[1], strict=True))
    feeds = exported.parameters | exported.buffers | {one: tensor.numpy() for one, tensor in tensors.items()}
    names = [output.name for output in session.get_outputs()]
    results = dict(zip(names, session.run(names, feeds), strict=True))
    native = autograd(module, loss, batch, torch.float32, exported)
    try:
        exact = autograd(module, loss, batch, torch.float64, exported)
    except RuntimeError:
        # PyTorch's grouped products have no float64.
        exact = native
    eps = float(np.finfo(np.float32).eps)
    largest = max(float(np.abs(one).max(initial=0)) for one in exact.values())
    moved: list[dict[str, Any]] = []
    worst = 0.0
    for one, array in results.items():
        wanted = exact.get(one, np.zeros(array.shape))
        own = np.abs(native[one] - wanted).max(initial=0) if one in native else 0.0
        bound = 16 * own + 64 * eps * np.abs(wanted).max(initial=0) + 8 * eps * largest
        error = float(np.abs(array - wanted).max(initial=0))
        if error > bound and one in exact:
            moved = moved or [_moved(exported, module, loss, batch, exact is not native, seed) for seed in range(16)]
            bound += 4 * max(np.abs(run[one] - wanted).max(initial=0) for run in moved)
        worst = max(worst, error / bound)

    def native_step() -> None:
        module.zero_grad()
        loss(module(*batch[0]), *batch[1]).backward()

    runs = {"plain_ms": plain, "step_ms": session}
    steps = {name: functools.partial(one.run, names, feeds) for name, one in runs.items()}
    return {"error_of_bound": float(worst), **_milliseconds({**steps, "torch_ms": native_step})}


def _moved(exported: TrainingStep, module: Any, loss: Any, batch: Any, wide: bool, seed: int) -> dict[str, Any]:
    """Return torch's results of a step in float64, or float32, with those of arithmetic moved by up to 64 roundings."""
    import torch
    from training_models import autograd

    from gradfuse.checking import bounds
    from gradfuse.export.rounding import Rounding

    with Rounding(bounds.ROUNDINGS_OF_KERNELS * torch.finfo(torch.float32).eps, seed):
        found: dict[str, Any] = autograd(module, loss, batch, torch.float64 if wide else torch.float32, exported)
    return found


def _milliseconds(functions: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Return the median times of calls, which take turns, so that all meet the same machine."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(TIMED_STEPS):
        for name, function in functions.items():
            begin = time.perf_counter()
            function()
            times[name].append(time.perf_counter() - begin)
    return {name: statistics.median(taken) * 1e3 for name, taken in times.items()}


def one(name: str) -> str:
    """Run a case of `model_cases`, and return what was compared.

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
        check = ["--check"] if case.checked else []
        _training_step(source, target, "--loss", case.loss, *frozen, *check)
        session = TrainingSession(target)
        loss = session.step(dict(case.batch), case.targets)
        found = dict(session.gradients)
        native_loss, native = case.gradients(torch.float32)
        exact_loss, exact = case.gradients(torch.float64)
        assert abs(loss - exact_loss) <= 2 * abs(native_loss - exact_loss) + 1e-5 * abs(exact_loss), (loss, exact_loss)
        unknown, missing = sorted(set(found) - set(exact)), sorted(set(exact) - set(found))
        assert case.checked or not unknown, f"gradients of {', '.join(unknown)}"
        assert not missing, f"no gradients of {', '.join(missing)}"
        for parameter, gradient in found.items():
            if parameter in unknown:
                continue
            largest = float(np.abs(exact[parameter]).max())
            terms = 64 * max(largest, 1e-3)
            assert_gradients_close(
                gradient, native[parameter].astype(np.float32), exact[parameter], np.dtype(np.float32), terms=terms
            )
        _training_step(source, target, "--loss", case.loss, *frozen, "--optimizer", "adam", "--lr", case.rate)
        session = TrainingSession(target)
        losses = [session.step(dict(case.batch), case.targets) for _ in range(20)]
        assert losses[-1] < 0.9 * losses[0], losses
    compared = f"{len(found) - len(unknown)} gradients as the framework's"
    if unknown:
        compared += f", {len(unknown)} as differences say"
    return f"{compared}; loss {losses[0]:.3f} -> {losses[-1]:.3f} in {len(losses)} steps"


def _training_step(*arguments: object) -> None:
    """Run the command line."""
    command = [sys.executable, "-m", "gradfuse", "training-step", *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr.strip()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        print(one(sys.argv[2]))
    elif sys.argv[1:2] == ["--step"]:
        print(json.dumps(step(sys.argv[2], changed="--changed" in sys.argv)))
    else:
        sys.exit(main(sys.argv[1:]))
