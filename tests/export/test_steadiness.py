"""What changes from run to run without being a buffer is refused: in the model it would be a constant."""

from __future__ import annotations

import array as arrays
import collections
import contextvars
import ctypes
import dataclasses
import datetime
import functools
import io
import itertools
import logging
import multiprocessing
import os
import queue
import random
import re
import sqlite3
import threading
import time
import types
import warnings
import weakref
from collections import ChainMap, OrderedDict
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

import gradfuse
from gradfuse import ExportError, TrainingSession, export_training_step
from gradfuse.testing import assert_gradients_close


class Scaled(nn.Module):
    """A layer times what a function gives."""

    def __init__(self, factor: Callable[[], Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 4)
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.factor()  # type: ignore[no-any-return]


def _batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(6, 5), torch.randn(6, 4)


def _export(module: nn.Module, loss: Callable[..., Tensor] = F.mse_loss, **options: Any) -> gradfuse.TrainingStep:
    return export_training_step(module, loss, _batch(), fuse=False, **options)


holder = {"n": 0}
by_numpy, by_python, by_torch = np.random.default_rng(0), random.Random(0), torch.Generator()
counts = itertools.count(1)


def _counted() -> int:
    holder["n"] += 1
    return holder["n"]


class Counting:
    n = 0

    def __call__(self) -> int:
        Counting.n += 1
        return Counting.n


def _closure() -> Callable[[], int]:
    n = 0

    def count() -> int:
        nonlocal n
        n += 1
        return n

    return count


def _with_attribute() -> int:
    _with_attribute.n = getattr(_with_attribute, "n", 0) + 1  # type: ignore[attr-defined]
    return _with_attribute.n  # type: ignore[attr-defined, no-any-return]


def _with_default(kept: list[int] = [0]) -> int:  # noqa: B006
    kept[0] += 1
    return kept[0]


def _yielding() -> Iterator[int]:
    yield from range(1, 1000)


yielding = _yielding()
cycle = itertools.cycle([1.0, 1.0, 1.0, 2.0])
array = np.zeros(1)


def _in_array() -> float:
    array[0] += 1
    return array.item()


last = collections.deque([1.0], maxlen=3)


def _queued() -> float:
    last.append(last[-1] + 1)
    return sum(last)


CHANGING: dict[str, tuple[Callable[[], Any], str]] = {
    "a dictionary": (_counted, r"changes holder\['n'\]"),
    "a class": (Counting(), r"changes Counting\.n"),
    "a closure": (_closure(), "changes n in Python"),
    "a function": (_with_attribute, r"changes _with_attribute\.n"),
    "a default": (_with_default, "changes kept in Python"),
    "a count": (lambda: next(counts), "changes counts"),
    "a queue": (_queued, "changes last"),
    "what yields": (lambda: next(yielding), r"in Scaled\.forward"),
    "a cycle": (lambda: next(cycle), r"in Scaled\.forward"),
    "an array": (_in_array, "changes array in Python"),
    "numpy's generator": (lambda: by_numpy.random() * 10, "draws random numbers by the generator by_numpy in <lambda>"),
    "Python's generator": (lambda: by_python.gauss(0, 5), "draws random numbers by the generator by_python in"),
    "torch's generator": (lambda: torch.rand((), generator=by_torch), r"draws random numbers by .*torch\.Generator in"),
    "in place": (lambda: torch.empty(4).uniform_(generator=by_torch), r"draws random numbers by .*torch\.Generator in"),
    "a permutation": (lambda: torch.randperm(4, generator=by_torch), r"draws random numbers by .*torch\.Generator in"),
    "a clock": (lambda: time.time() % 7, r"asks for the time by time\.time in <lambda>"),
    "a counter of time": (lambda: time.perf_counter() * 50 % 7, r"asks for the time by time\.perf_counter in <lambda>"),
    "the hour": (lambda: 1 + datetime.datetime.now().hour, r"at another time.* asks for the time by datetime\.now in"),
    "the day": (lambda: time.localtime().tm_yday, r"at another time.* asks for the time by time\.localtime in"),
}


@pytest.mark.parametrize("case", CHANGING)
@pytest.mark.sampled(every=2)
def test_what_changes_from_run_to_run_is_refused_with_its_line(case: str) -> None:
    factor, match = CHANGING[case]
    with pytest.raises(ExportError, match=match) as caught:
        _export(Scaled(factor))
    assert "test_steadiness.py:" in str(caught.value)
    assert "\n" not in str(caught.value)


GLOBAL_DRAWS: dict[str, Callable[[], float]] = {
    "gauss": lambda: random.gauss(0, 10),
    "choice": lambda: random.choice([1, 5, 20]),
    "randn": lambda: float(np.random.randn()),
    "numpy's choice": lambda: float(np.random.choice([1.0, 5.0])),
    "an array": lambda: float(np.random.rand(1)[0]),
}


@pytest.mark.parametrize("case", GLOBAL_DRAWS)
def test_draws_of_the_processs_own_generators_are_refused_with_their_line(case: str) -> None:
    with pytest.raises(ExportError, match=r"by numpy or by Python: .* in <lambda> \(test_steadiness.py:\d+\)"):
        _export(Scaled(GLOBAL_DRAWS[case]))


def test_a_step_that_seeds_the_generator_it_draws_by_is_refused() -> None:
    def factor() -> Tensor:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return torch.rand(4)

    with pytest.raises(
        ExportError, match=r"seeds a generator of random numbers, in .*factor \(test_steadiness.py:\d+\)"
    ):
        _export(Scaled(factor))


def test_a_step_that_seeds_the_generator_anew_in_each_call_exports() -> None:
    def factor() -> Tensor:
        torch.manual_seed(torch.seed() % 2**31)
        return torch.rand(4)

    _export(Scaled(factor))


class Stepping(nn.Module):
    """Counts its calls in Python, and multiplies by what a function makes of the count."""

    def __init__(self, factor: Callable[[int], float]) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 4)
        self.factor = factor
        self.n = 0
        self.log: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.n += 1
        self.log.append(self.n)
        return self.layer(x) * self.factor(self.n)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "factor",
    [
        lambda n: min(1.0, n / 100),
        lambda n: 2.0 if n > 1000 else 1.0,
        lambda n: 2.0 if n % 100 == 0 else 1.0,
        lambda n: 0.5 if 100 < n < 200 else 1.0,
    ],
    ids=["warm-up", "a bound", "now and then", "for a while"],
)
def test_a_counter_that_a_number_follows_from_is_refused_however_late_it_does(factor: Callable[[int], float]) -> None:
    module = Stepping(factor)
    with pytest.raises(
        ExportError, match=r"in Stepping\.forward \(test_steadiness.py:\d+\), as it changes Stepping\.n"
    ):
        _export(module)
    assert (module.n, module.log) == (0, [])


LATE: dict[str, Callable[[Any], float]] = {
    "a list": lambda module: 2.0 if len(module.log) > 200 else 1.0,
    "a number of numpy": lambda module: 2.0 if module.count > 200 else 1.0,
    "a tensor": lambda module: 2.0 if module.steps.item() > 200 else 1.0,
    "what is made in the first call": lambda module: 2.0 if module.calls > 200 else 1.0,
}


class Late(nn.Module):
    """Counts in several ways, of which a factor follows from one."""

    def __init__(self, factor: Callable[[Any], float]) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 4)
        self.factor = factor
        self.log: list[float] = []
        self.count = np.float32(0)
        self.steps = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        self.log.append(0.5)
        self.count = self.count + np.float32(1)
        self.steps = self.steps + 1
        self.calls = getattr(self, "calls", 0) + 1
        return self.layer(x) * self.factor(self)  # type: ignore[no-any-return]


@pytest.mark.parametrize("case", LATE)
def test_what_follows_late_from_something_else_that_counts_is_refused(case: str) -> None:
    module = Late(LATE[case])
    with pytest.raises(
        ExportError, match=r"in later calls, in Late\.forward \(test_steadiness.py:\d+\), as it changes"
    ):
        _export(module)
    assert not module.log and not hasattr(module, "calls")
    assert module.count == module.steps.item() == 0


context = contextvars.ContextVar("context", default=0)
places = {"of the thread": threading.local(), "a namespace": types.SimpleNamespace(), "weak": WeakKeyDictionary()}
kept: dict[str, Any] = {"a tuple": (0, "x"), "a text": "", "a frozen set": frozenset(), "a fraction": Fraction(0)}
held = {
    "a set": set[int](),
    "an array": arrays.array("l", [0]),
    "a number of C": ctypes.c_int(0),
    "tensor": torch.ones(1),
}


def _counted_in(place: Any) -> int:
    place.n = getattr(place, "n", 0) + 1
    return place.n  # type: ignore[no-any-return]


def _counted_weakly() -> int:
    weak: Any = places["weak"]
    weak[Counting] = weak.get(Counting, 0) + 1
    return weak[Counting]  # type: ignore[no-any-return]


def _counted_in_context() -> int:
    context.set(context.get() + 1)
    return context.get()


def _replaced(case: str) -> int:
    value = kept[case]
    if case == "a tuple":
        kept[case] = (value[0] + 1, "x")
        return kept[case][0]  # type: ignore[no-any-return]
    if case == "a fraction":
        kept[case] = value + 1
        return int(kept[case])
    kept[case] = value + "x" if case == "a text" else value | {len(value)}
    return len(kept[case])


def _written(case: str) -> int:
    value: Any = held[case]
    if case == "a set":
        value.add(len(value))
        return len(value)
    if case == "an array":
        value[0] += 1
        return value[0]  # type: ignore[no-any-return]
    if case == "a number of C":
        value.value += 1
        return value.value  # type: ignore[no-any-return]
    return _counted_in(value)


@dataclasses.dataclass(frozen=True)
class Frozen:
    n: int = 0


class Structure(ctypes.Structure):
    _fields_ = (("n", ctypes.c_int64), ("x", ctypes.c_double))


def _numbers() -> Iterator[int]:
    n = 0
    while True:
        n += 1
        yield n


iterators: dict[str, Iterator[Any]] = {
    "a generator": _numbers(),
    "pairs": zip(itertools.count(1), itertools.repeat(1.0)),
    "tensors": iter(torch.arange(1, 800)),
    "values": iter({n: n + 1 for n in range(800)}.values()),
}
memory: dict[str, Any] = {
    "numbers": np.zeros(3, np.float32),
    "structures": np.zeros(2, [("n", np.int16), ("x", np.float64)]),
    "C": Structure(),
    "bytes": memoryview(bytearray(16)).cast("q"),
}
frozen = [Frozen()]
files: dict[str, Any] = {"text": io.StringIO("x" * 1000), "bytes": io.BytesIO(b"x" * 1000)}
tables: dict[str, Any] = {"chained": ChainMap({"n": 0}), "a queue": queue.Queue[int](), "weak": WeakSet[Any]()}
alive: list[Any] = []


def _taken(case: str) -> int:
    found = next(iterators[case])
    return int(found[0] if isinstance(found, tuple) else found)


def _in_memory(case: str) -> int:
    numbers = memory[case]
    if case == "C":
        numbers.n += 1
        return numbers.n  # type: ignore[no-any-return]
    part = numbers["n"] if case == "structures" else numbers
    part[1] += 1
    return int(part[1])


def _held(case: str) -> int:
    table = tables[case]
    if case == "chained":
        table["n"] += 1
        return table["n"]  # type: ignore[no-any-return]
    if case == "a queue":
        table.put(1)
        return table.qsize()  # type: ignore[no-any-return]
    alive.append(Frozen(len(alive)))
    table.add(alive[-1])
    return len(table)


def _read_on(case: str) -> int:
    files[case].read(1)
    return files[case].tell()  # type: ignore[no-any-return]


def _in_a_module() -> int:
    module: Any = itertools
    module.counted = getattr(module, "counted", 0) + 1
    return module.counted  # type: ignore[no-any-return]


def _in_the_environment() -> int:
    os.environ["COUNTED"] = str(int(os.environ.get("COUNTED", "0")) + 1)
    return int(os.environ["COUNTED"])


def _as_another_object() -> int:
    frozen[0] = dataclasses.replace(frozen[0], n=frozen[0].n + 1)
    return frozen[0].n


@torch.no_grad()
def _decorated() -> int:
    holder["decorated"] = holder.get("decorated", 0) + 1
    return holder["decorated"]


logger: Any = logging.getLogger("of a module")
shared_by_processes = multiprocessing.Value("i", 0)


def _at_a_logger() -> int:
    logger.calls = getattr(logger, "calls", 0) + 1
    return int(logger.calls)


def _of_processes() -> int:
    shared_by_processes.value += 1
    return int(shared_by_processes.value)


def _under_a_text() -> int:
    name = "made_by_a_text"
    globals()[name] = globals().get(name, 0) + 1
    return int(globals()[name])


HIDDEN: dict[str, Callable[[], int]] = {
    "a logger": _at_a_logger,
    "of processes": _of_processes,
    "a text": _under_a_text,
    **{case: functools.partial(_taken, case) for case in iterators},
    **{f"{case} in memory": functools.partial(_in_memory, case) for case in memory},
    **{f"a table, {case}": functools.partial(_held, case) for case in tables},
    **{f"a file of {case}": functools.partial(_read_on, case) for case in files},
    "a library": _in_a_module,
    "the environment": _in_the_environment,
    "another object": _as_another_object,
    "decorated": _decorated,
    "thread": lambda: _counted_in(places["of the thread"]),
    "namespace": lambda: _counted_in(places["a namespace"]),
    "weak": _counted_weakly,
    "context": _counted_in_context,
    **{case: functools.partial(_replaced, case) for case in kept},
    **{case: functools.partial(_written, case) for case in held},
}


@pytest.mark.parametrize("case", HIDDEN)
@pytest.mark.sampled(every=4)
def test_a_count_in_any_place_is_refused_however_late_a_number_follows_from_it(case: str) -> None:
    with pytest.raises(ExportError, match=r"in later calls, in Scaled\.forward .*, as it changes"):
        _export(Scaled(lambda: 2.0 if HIDDEN[case]() > 700 else 1.0))
    assert HIDDEN[case]() == 1


without_default: contextvars.ContextVar[int] = contextvars.ContextVar("without_default")


def test_variables_of_the_context_are_seen_and_unset_again() -> None:
    def counted() -> int:
        without_default.set(without_default.get(0) + 1)
        return without_default.get()

    _export(Scaled(lambda: 1.0 + 0 * counted()))
    assert without_default.get(None) is None
    with pytest.raises(ExportError, match=r"in later calls, as it changes without_default in Python"):
        _export(Scaled(lambda: 2.0 if counted() > 700 else 1.0))
    assert without_default.get(None) is None


def _in_a_file(folder: Path) -> int:
    path = folder / "count"
    count = int(path.read_text()) + 1 if path.exists() else 1
    path.write_text(str(count))
    return count


def _in_names(folder: Path) -> int:
    (folder / str(len(os.listdir(folder)))).touch()
    return len(os.listdir(folder))


def _in_a_queue(waiting: Any) -> int:
    waiting.put(None)
    return int(waiting.qsize())


def _in_a_database(connection: sqlite3.Connection) -> int:
    connection.execute("insert into calls values (1)")
    return int(connection.execute("select count(*) from calls").fetchone()[0])


OUTSIDE: dict[str, tuple[Callable[[Any], int], str]] = {
    "file": (_in_a_file, r"the file \S*count in .*_in_a_file \(test_steadiness\.py:\d+\)"),
    "names": (_in_names, r"the file \S+ in .*_in_names \(test_steadiness\.py:\d+\)"),
    "queue": (_in_a_queue, r"SimpleQueue\.put in .*_in_a_queue \(test_steadiness\.py:\d+\)"),
    "database": (_in_a_database, r"Connection\.execute in .*_in_a_database \(test_steadiness\.py:\d+\)"),
}


@pytest.mark.parametrize("case", OUTSIDE)
def test_what_is_counted_outside_of_python_is_told_with_its_line(case: str, tmp_path: Path) -> None:
    count, where = OUTSIDE[case]
    connection = sqlite3.connect(":memory:")
    connection.execute("create table calls (number int)")
    of = {"queue": queue.SimpleQueue(), "database": connection}.get(case, tmp_path)
    with pytest.warns(UserWarning, match=rf"^export_training_step: the step asks for what may be another .*: {where}"):
        _export(Scaled(lambda: 2.0 if count(of) > 700 else 1.0))
    with pytest.raises(ExportError, match="computes something else each time"):
        _export(Scaled(lambda: 1.0 + count(of) / 100))
    connection.close()


def test_what_is_only_written_or_stays_as_it_is_does_not_matter(tmp_path: Path) -> None:
    path, made, pattern, lock = tmp_path / "log", tmp_path / "made" / "factor", re.compile("a+"), threading.Lock()
    (tmp_path / "setting").write_text("2.0")

    def factor() -> float:
        with open(path, "a") as log:
            log.write("called")
        if not made.exists():
            made.parent.mkdir(exist_ok=True)
            made.write_text("1.5")
        with lock:
            return float((tmp_path / "setting").read_text()) * float(made.read_text()) * bool(pattern.match("aa"))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _export(Scaled(factor))


class Moody(nn.Module):
    """A layer times what follows from the calls before."""

    def __init__(self, factor: Callable[[Any, Tensor], float]) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 4)
        self.factor = factor
        self.moods = ["new", "warm", "ready", "steady"]
        self.last: Any = None

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.factor(self, x)  # type: ignore[no-any-return]


class Steady(Moody):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 3


def _steadier(module: Any, _: Tensor) -> float:
    module.moods = [*module.moods[1:], "steady"]
    return 2.0 if module.moods[0] == "steady" else 1.0


def _of_another_class(module: Any, _: Tensor) -> float:
    module.__class__ = Steady
    return 1.0


def _while_the_batch_lives(module: Any, x: Tensor) -> float:
    factor = 2.0 if module.last is not None and module.last() is not None else 1.0
    module.last = weakref.ref(x)
    return factor


def _seldom(module: Any, _: Tensor) -> float:
    return 2.0 if by_python.random() < 0.001 else 1.0


first_of: dict[str, Tensor] = {}


@functools.lru_cache
def _scale_of_the_first() -> float:
    return first_of["x"].abs().mean().item()


def _kept_by_a_function(module: Any, x: Tensor) -> float:
    first_of["x"] = x.detach()
    return _scale_of_the_first()


@pytest.mark.parametrize(
    ("factor", "match"),
    [
        (_steadier, r"each time that it runs, in Moody\.forward .*changes Moody\.moods"),
        (_of_another_class, r"each time that it runs, .*changes the class of Moody"),
        (_while_the_batch_lives, r"each time that it runs, in Moody\.forward .*changes Moody\.last"),
        (_seldom, r"same numbers in each call, as it draws random numbers by the generator by_python in _seldom"),
        (_kept_by_a_function, r"keeps something of an earlier call, in .*changes .*the results of _scale_of_the_first"),
    ],
)
def test_what_changes_by_other_things_than_counts_is_refused(
    factor: Callable[[Any, Tensor], float], match: str
) -> None:
    module = Moody(factor)
    with pytest.raises(ExportError, match=match):
        _export(module)
    assert type(module) is Moody and module.moods[0] == "new" and module.last is None


def test_a_counter_that_only_counts_is_none_of_the_steps_business() -> None:
    module = Stepping(lambda n: 1.0)
    module.n, module.log = 3, [1, 2, 3]
    log = module.log
    _export(module)
    assert module.n == 3
    assert module.log is log and log == [1, 2, 3]


class Warming(nn.Module):
    """The advice followed: the counter is a buffer, and torch computes with it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 4)
        self.register_buffer("n", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        n = self.get_buffer("n")
        n.add_(1)
        return self.layer(x) * (n / 100).clamp(max=1.0)  # type: ignore[no-any-return]


def test_the_advice_to_count_in_a_buffer_works() -> None:
    module = Warming()
    session = TrainingSession(_export(module))
    x, y = _batch()
    for _ in range(3):
        session.step(x.numpy(), y.numpy())
        (native,) = torch.autograd.grad(F.mse_loss(module(x), y), [module.layer.weight])
    exact = _double_gradient(module, 3 / 100)
    assert_gradients_close(session.gradients["layer.weight"], native.numpy(), exact, np.float32)


def _double_gradient(module: Warming, factor: float) -> Any:
    x, y = (one.double() for one in _batch())
    weight, bias = (one.detach().double() for one in module.layer.parameters())
    error = (x @ weight.T + bias) * factor - y
    return (2 * factor / error.numel() * error.T @ x).numpy()


class Kept(nn.Module):
    """Keeps what a function makes of its first batch or of its weight."""

    def __init__(self, made: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 4)
        self.made = made
        self.kept: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.kept is None:
            self.kept = self.made(x, self.layer.weight)
        return self.layer(x) * self.kept  # type: ignore[no-any-return]


def test_what_is_made_once_and_does_not_follow_from_the_batch_exports() -> None:
    module = Kept(lambda x, _: torch.ones(1, x.shape[1] - 1).tril(2))
    _export(module)
    assert module.kept is None


@pytest.mark.parametrize(
    "made",
    [
        lambda x, _: x.detach().mean(),
        lambda _, weight: weight.detach().norm(),
        lambda x, _: F.dropout(torch.ones(len(x), 4)),
        lambda *_: torch.rand(4),
    ],
    ids=["of the batch", "of a parameter", "a mask of dropout", "random numbers"],
)
def test_what_is_kept_of_the_first_call_is_refused(made: Callable[[Tensor, Tensor], Tensor]) -> None:
    with pytest.raises(ExportError, match=r"keeps something of an earlier call, in .*, as it changes Kept\.kept"):
        _export(Kept(made))


class Weighing(nn.Module):
    """Weighs its results by the last ones, or by the least of them."""

    def __init__(self, weight: Callable[[list[Tensor]], Any], share: float) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 4)
        self.losses: list[Tensor] = []
        self.weight, self.share = weight, share

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = F.dropout(self.layer(x), self.share)
        self.losses.append(output.detach().square().mean())
        return output * self.weight(self.losses)  # type: ignore[no-any-return]


@pytest.mark.parametrize("share", [0.0, 0.5])
@pytest.mark.parametrize("weight", [lambda losses: losses[-2] / losses[-3] if len(losses) > 2 else 1.0, min])
def test_what_is_kept_of_several_calls_is_refused(weight: Callable[[list[Tensor]], Any], share: float) -> None:
    """As losses are weighed by how each one fell, from the third call on."""
    with pytest.raises(ExportError, match=r"keeps something of an earlier call, in .*, as it changes Weighing\.losses"):
        _export(Weighing(weight, share))


class Reading(nn.Module):
    """A layer times what a function makes of its weight."""

    def __init__(self, factor: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 4)
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.factor(self.layer.weight)  # type: ignore[no-any-return]


def _count_at(weight: Any) -> int:
    weight.n = getattr(weight, "n", 0) + 1
    return weight.n  # type: ignore[no-any-return]


AT_PARAMETERS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a version": (lambda w: 1 + w._version, r"after an update.* as it reads _version in <lambda>"),
    "a first call": (lambda w: 2.0 if w._version == 0 else 1.0, r"after an update.* as it reads _version in <lambda>"),
    "a gradient": (lambda w: 1.0 if w.grad is None else 2.0, r"after an update.* as it reads grad in <lambda>"),
    "an attribute": (_count_at, r"as it changes Reading\.layer\.weight\.n in Python"),
    "an address": (lambda w: 1 + id(w) // 16 % 7919, r"each time that it runs"),
}


@pytest.mark.parametrize("case", AT_PARAMETERS)
def test_what_changes_at_parameters_but_their_numbers_is_refused_with_its_line(case: str) -> None:
    factor, match = AT_PARAMETERS[case]
    module = Reading(factor)
    with pytest.raises(ExportError, match=match) as caught:
        _export(module)
    assert "test_steadiness.py:" in str(caught.value)
    assert not hasattr(module.layer.weight, "n")


class Caching(nn.Module):
    """Keeps the sum of a weight until the weight is written into."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 4)
        self.layer.weight.factor = 3.0  # type: ignore[attr-defined]
        self.kept: Any = (None, None)

    def forward(self, x: Tensor) -> Tensor:
        weight: Any = self.layer.weight
        if self.kept[0] != weight._version:
            self.kept = weight._version, weight.detach().sum()
        factor: float = weight.factor if isinstance(self.layer.weight, nn.Parameter) else 1.0
        return self.layer(x) * factor + self.kept[1]  # type: ignore[no-any-return]


def test_what_is_kept_until_an_update_exports_and_parameters_are_what_they_are_in_python() -> None:
    module = Caching()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    session = TrainingSession(_export(module, optimizer=optimizer))
    x, y = _batch()
    for _ in range(3):
        optimizer.zero_grad()
        loss = F.mse_loss(module(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        assert session.step(x.numpy(), y.numpy()) == pytest.approx(loss.item(), rel=1e-5)


class Remembering(nn.Module):
    """Adds what it gave in the call before, as a recurrent layer does that keeps its state."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 4)
        self.before = torch.zeros(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        result = self.layer(x) + self.before
        self.before = result.detach()
        return result  # type: ignore[no-any-return]


def test_a_state_in_an_attribute_is_refused() -> None:
    with pytest.raises(ExportError, match=r"as it changes Remembering\.before"):
        _export(Remembering())


def test_a_tensor_in_an_attribute_that_is_written_into_is_refused_and_put_back() -> None:
    tensor = torch.ones(1)

    def factor() -> Tensor:
        return tensor.add_(1)

    with pytest.raises(ExportError, match="changes tensor in Python"):
        _export(Scaled(factor))
    assert tensor.item() == 1


def test_a_counter_in_a_loss_function_is_refused() -> None:
    calls = {"n": 0}

    def loss(output: Tensor, y: Tensor) -> Tensor:
        calls["n"] += 1
        return F.mse_loss(output, y) * calls["n"]

    with pytest.raises(ExportError, match=r"in .*loss \(test_steadiness.py:\d+\), as it changes calls\['n'\]"):
        _export(nn.Linear(5, 4), loss)
    assert calls == {"n": 0}


def test_a_counter_in_a_hook_on_a_gradient_is_refused() -> None:
    class Hooked(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            def scaled(gradient: Tensor) -> Tensor:
                holder["n"] += 1
                return gradient * holder["n"]

            result = super().forward(input)
            result.register_hook(scaled)  # type: ignore[no-untyped-call]
            return result

    with pytest.raises(ExportError, match=r"in .*scaled \(test_steadiness.py:\d+\), as it changes holder\['n'\]"):
        _export(Hooked(5, 4))


def test_a_generator_in_a_hook_of_a_module_is_refused() -> None:
    module = nn.Sequential(nn.Linear(5, 4))
    module[0].register_forward_hook(lambda *given: given[2] * by_numpy.random())
    with pytest.raises(ExportError, match="draws random numbers by the generator by_numpy"):
        _export(module)


@functools.lru_cache
def _cached(seed: int) -> float:
    return random.Random(seed).random()


STEADY: dict[str, Callable[[], nn.Module]] = {
    "a cached function": lambda: Scaled(lambda: _cached(3)),
    "a vector that a normalisation changes": lambda: spectral_norm(nn.Linear(5, 4)),
    "one layer twice": lambda: (lambda layer: nn.Sequential(layer, nn.Tanh(), layer))(nn.Linear(5, 5)),
}


@pytest.mark.parametrize("case", STEADY)
@pytest.mark.sampled(every=2)
def test_what_is_the_same_in_each_run_exports(case: str) -> None:
    module = STEADY[case]()
    x, _ = _batch()
    export_training_step(module, lambda output: output.square().mean(), ((x,), ()), fuse=False)


def test_two_exports_in_a_row_are_the_same() -> None:
    module = Stepping(lambda n: 1.0)
    first, second = (_export(module).model.SerializeToString() for _ in range(2))
    assert first == second


def test_the_states_of_generators_are_as_before() -> None:
    state: Any = np.random.get_state()
    before = random.getstate(), state, torch.get_rng_state(), by_python.getstate()

    def drawn() -> Tensor:
        np.random.rand()
        return torch.tensor(random.random())

    with pytest.raises(ExportError):
        _export(Scaled(lambda: drawn() * random.gauss(0, 1) * by_python.random()))
    assert random.getstate() == before[0]
    np.testing.assert_equal(np.random.get_state(), before[1])
    assert torch.equal(torch.get_rng_state(), before[2])
    assert by_python.getstate() == before[3]


class InEvaluation(nn.Module):
    """Counts in evaluation mode alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 4)
        self.n = 0

    def forward(self, x: Tensor) -> Tensor:
        result = self.layer(x)
        if self.training:
            return result  # type: ignore[no-any-return]
        self.n += 1
        return result * self.n  # type: ignore[no-any-return]


def test_a_counter_in_evaluation_mode_is_refused_or_said_to_be_left_out() -> None:
    match = r"something else each time that it runs in eval mode, in InEvaluation\.forward .*changes InEvaluation\.n"
    with pytest.raises(ExportError, match=match):
        _export(InEvaluation(), evaluation=True)
    module = InEvaluation()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step = export_training_step(module, F.mse_loss, _batch(), optimizer, fuse=False)
    assert step.evaluation_model is None
    assert any("each time that it runs in eval mode" in str(one.message) for one in caught)
    assert module.n == 0


class Made(OrderedDict[str, type[nn.Module]]):
    """Gives a new module each time that it is asked for one, as a table of activations does."""

    def __getitem__(self, key: str) -> Any:
        return super().__getitem__(key)()


MADE = Made(tanh=nn.Tanh, none=nn.Identity)


def test_dictionaries_are_read_without_what_they_make_of_it() -> None:
    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.names = nn.Linear(4, 3), ["tanh"]

        def forward(self, x: Tensor) -> Tensor:
            for name in self.names:
                x = MADE[name](self.linear(x))
            return x

    export_training_step(Module(), nn.MSELoss(), (torch.randn(2, 4), torch.randn(2, 3)), evaluation=False)
    assert MADE.get("tanh") is nn.Tanh and dict.__getitem__(MADE, "none") is nn.Identity


def test_numbers_by_a_seed_that_forward_sets_are_the_same_in_each_call() -> None:
    class Seeded(nn.Module):
        def __init__(self, seeds: bool) -> None:
            super().__init__()
            self.linear, self.dropout, self.seeds = nn.Linear(4, 3), nn.Dropout(0.25), seeds

        def forward(self, x: Tensor) -> Tensor:
            if self.seeds:
                np.random.seed(5)
            x = self.dropout(x) if x.shape[0] > 2 else x
            return self.linear(x[:, np.random.permutation(4).tolist()])  # type: ignore[no-any-return]

    batch = torch.randn(2, 4), torch.randn(2, 3)
    module = Seeded(True)
    session = TrainingSession(export_training_step(module, nn.MSELoss(), batch, evaluation=False))
    wanted = float(F.mse_loss(module(batch[0]), batch[1]).detach())
    assert abs(session.step(*batch) - wanted) <= 64 * np.finfo(np.float32).eps * wanted
    more = torch.randn(3, 4), torch.randn(3, 3)
    export_training_step(module, nn.MSELoss(), more, evaluation=False)
    with pytest.raises(ExportError, match="draws random numbers by numpy"):
        export_training_step(Seeded(False), nn.MSELoss(), batch, evaluation=False)


LIMITS, device_module = {"NaN": float("nan")}, torch.get_device_module


class Printing(nn.Module):
    """Prints that it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Any:
        print("run")
        return self.layer(x)


class OfLibraries(Printing):
    """Fills a cache of torch's as well, and reads a number that is none."""

    def forward(self, x: Tensor) -> Any:
        device_module("cpu")
        return super().forward(x) if LIMITS["NaN"] != 0 else x


def test_what_libraries_keep_costs_no_more_runs(capsys: pytest.CaptureFixture[str]) -> None:
    device_module.cache_clear()
    counts = []
    for module in (OfLibraries(), Printing()):
        export_training_step(module, F.mse_loss, (torch.randn(2, 2), torch.randn(2, 2)), verify="quick")
        counts.append(capsys.readouterr().out.count("run\n"))
    assert counts[0] == counts[1] > 0
