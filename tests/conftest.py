"""Settings of every test run."""

from __future__ import annotations

import gc
import os
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from command_runs import Run, runner

# Tests already run in one process per core; onnxruntime's threads are set where they are tested.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Under continuous integration the same examples run every time; elsewhere new ones are found. No test is timed.
hypothesis.settings.register_profile(
    "gradfuse", deadline=None, derandomize=os.environ.get("CI") == "true", print_blob=True
)
hypothesis.settings.load_profile("gradfuse")


CASES = {"module_seeds": 60, "model_seeds": 100}
"""How many random modules, and how many random models, the suite has."""
LONG_CASES = 300
"""How many of each it has with the long tests."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--random-cases", type=int, help="of modules and of models in tests/properties, none of them long")
    parser.addoption("--part", metavar="K/N", help="run one of N parts of the tests that are chosen, by K modulo N")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Divide the seeds of random cases."""
    for name in {"module_seeds", "model_seeds"}.intersection(metafunc.fixturenames):
        chosen = metafunc.config.getoption("--random-cases")
        quick, count = (CASES[name], LONG_CASES) if chosen is None else (chosen, chosen)
        parts = [range(first, min(first + 10, count)) for first in range(0, count, 10)]
        cases = [pytest.param(part, marks=pytest.mark.long if part.start >= quick else ()) for part in parts]
        metafunc.parametrize(name, cases, ids=[f"{part.start}-{part.stop - 1}" for part in parts])


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Make most of the parameters of sampled tests long tests, ahead of the choice by markers; keep a part of all."""
    counts: Counter[tuple[Path, str]] = Counter()
    for item in items:
        sampled = item.get_closest_marker("sampled")
        if sampled is None:
            continue
        test = item.path, item.nodeid.partition("[")[0]
        if counts[test] % sampled.kwargs["every"]:
            item.add_marker(pytest.mark.long)
        counts[test] += 1
    if (part := config.getoption("--part")) is not None:
        number, of = map(int, part.split("/"))
        left = [item for item in items if zlib.crc32(item.nodeid.encode()) % of != number % of]
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if zlib.crc32(item.nodeid.encode()) % of == number % of]


def pytest_collection_finish() -> None:
    """Exclude imported objects, which stay, from garbage collection, and make it rarer."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


@pytest.fixture
def inference_in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Infer shapes in this process, which saves starting another.

    For models on which onnx's inference is known not to abort.
    """
    from gradfuse.models import inference, inference_worker

    monkeypatch.setattr(inference, "ask", inference_worker.infer)


@pytest.fixture(scope="session", autouse=True)
def _idle_threads_sleep() -> Iterator[None]:
    """By default onnxruntime's threads wait in a loop, which takes longer than what small models compute."""
    import onnxruntime

    entry = "session.intra_op.allow_spinning"
    original = onnxruntime.InferenceSession.__init__

    def opened(self: Any, model: Any, sess_options: Any = None, *args: Any, **kwargs: Any) -> None:
        options = onnxruntime.SessionOptions() if sess_options is None else sess_options
        try:
            options.get_session_config_entry(entry)
        except RuntimeError:  # not set
            options.add_session_config_entry(entry, "0")
        original(self, model, options, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(onnxruntime.InferenceSession, "__init__", opened)
        yield


@pytest.fixture(scope="session", autouse=True)
def _translations_are_collected_once() -> Iterator[None]:
    """torch.onnx.export reads the sources of all its translations in each call, which takes a quarter of the time."""
    from gradfuse import _torch_private as private

    with private.translations_read_once():
        yield


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Run:
    """Run the command in this process: exit code, standard output, standard error."""
    return runner(capfd)
