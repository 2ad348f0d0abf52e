"""Shape inference in a process of its own: a model may end that process, and nothing else may go wrong unnoticed."""

from __future__ import annotations

import multiprocessing.spawn
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import onnx
import onnx.parser
import pytest

from gradfuse import cli
from gradfuse.errors import WorkerError
from gradfuse.models import inference, inference_worker

HEADER = '<ir_version: 10, opset_import: ["": 20]>\n'
# A convolution's kernel is larger than its input: onnx infers a negative size, and a Slice of it ends the process.
ABORTS = """m (float[1,1,2,2] x, float[1,1,5,5] w) => (float[a,b,c,d] r) {
  y = Conv(x, w)
  start = Constant<value_ints=[0]>()  end = Constant<value_ints=[1]>()  axis = Constant<value_ints=[2]>()
  z = Slice(y, start, end, axis)  r = Relu(z)
}"""
POSIX = pytest.mark.skipif(sys.platform == "win32", reason="needs fork and signals")


def _relu(size: int) -> onnx.ModelProto:
    return onnx.parser.parse_model(
        HEADER + f"m (float[n,{size}] x) => (float[n,{size}] o) {{ y = Relu(x)  o = Neg(y) }}"
    )


def _size(model: onnx.ModelProto | None) -> int:
    assert model is not None
    return int(model.graph.value_info[0].type.tensor_type.shape.dim[1].dim_value)


def _worker() -> subprocess.Popen[bytes]:
    assert inference._workers._worker is not None
    return inference._workers._worker._process


@pytest.fixture
def _no_worker() -> Iterator[None]:
    inference._workers.stop()
    yield
    inference._workers.stop()


def test_one_worker_serves_all_models() -> None:
    assert _size(inference.infer(_relu(3))) == 3
    first = _worker().pid
    assert _size(inference.infer(_relu(4))) == 4
    assert _worker().pid == first != os.getpid()


def test_operators_of_gradfuse_have_shapes_in_the_worker() -> None:
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 20, "aclnn": 1]>
    m (float[2,3] g, float[2,3] x, float[2,3] t) => (o) { y = aclnn.MseLossBackward(g, x, t)  o = Neg(y) }""")
    assert _size(inference.infer(model)) == 3


LONG_VECTORS = """m (int64[3] sizes, float[2,3] x) => (float[a,b] r) {
  first = Constant<value_int=0>()  last = Constant<value_int=3000000>()  one = Constant<value_int=1>()
  v0 = Range(first, last, one)
  %s
  rows = Shape(x)  r = Expand(x, rows)  big = Cast<to=1>(v20)  many = Reshape(big, sizes)
  s = Shape(big)  back = Reshape(many, s)
}"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.usefixtures("_no_worker")
def test_arithmetic_on_a_long_vector_takes_no_memory_to_infer() -> None:
    # The hash that dropout draws by is such arithmetic, on as many elements as are dropped.
    chain = "  ".join(f"v{k + 1} = Mul(v{k}, one)" for k in range(20))
    model = onnx.parser.parse_model(HEADER + LONG_VECTORS % chain)
    inferred = inference.infer(model)
    assert inferred is not None
    found = {info.name: info for info in (*inferred.graph.input, *inferred.graph.output, *inferred.graph.value_info)}
    sizes = {name: [dim.dim_value for dim in info.type.tensor_type.shape.dim] for name, info in found.items()}
    # What is known of sizes by their values alone is found as well.
    assert sizes["v20"] == [3_000_000] and sizes["r"] == [2, 3] and sizes["back"] == [3_000_000]
    status = Path(f"/proc/{_worker().pid}/status").read_text().split()
    assert int(status[status.index("VmHWM:") + 1]) < 200 * 1024


def test_a_model_that_makes_onnx_abort_has_no_shapes_and_the_next_one_has() -> None:
    hostile = onnx.parser.parse_model(HEADER + ABORTS)
    for size in (3, 4):
        assert inference.infer(hostile) is None
        assert _size(inference.infer(_relu(size))) == size


def test_an_error_of_onnx_leaves_the_worker_alive() -> None:
    inference.infer(_relu(3))
    first = _worker().pid
    assert inference.ask(b"no model", False, True) is None
    assert _worker().pid == first and _size(inference.infer(_relu(4))) == 4


@POSIX
def test_a_worker_that_is_killed_between_models_is_replaced() -> None:
    inference.infer(_relu(3))
    process = _worker()
    os.kill(process.pid, signal.SIGKILL)
    process.wait(10)
    assert _size(inference.infer(_relu(4))) == 4
    assert _worker().pid != process.pid


@POSIX
def test_a_model_whose_worker_is_killed_gets_another_one() -> None:
    inference.infer(_relu(3))
    process = _worker()
    os.kill(process.pid, signal.SIGSTOP)
    killer = threading.Timer(1, process.kill)
    killer.start()
    assert _size(inference.infer(_relu(4))) == 4
    killer.join()


@POSIX
def test_an_inference_that_does_not_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    inference.infer(_relu(3))
    process = _worker()
    monkeypatch.setattr(inference, "SECONDS", 1)
    os.kill(process.pid, signal.SIGSTOP)
    assert inference.infer(_relu(4)) is None
    assert process.poll() is not None
    monkeypatch.undo()
    assert _size(inference.infer(_relu(4))) == 4


READY = "import sys, os; sys.stdout.buffer.write({ready!r}); sys.stdout.flush(); "
BROKEN = {
    "ends at its start with exit code 3: no onnx": "import sys; print('no onnx', file=sys.stderr); sys.exit(3)",
    "ends with exit code 1": READY + "sys.stdin.buffer.read(9); sys.exit(1)",
    "gives an answer that makes no sense": READY
    + "sys.stdin.buffer.read(9); print('hello ' * 99, flush=True); sys.stdin.buffer.read()",
    "does not start in 2 s": "import time; time.sleep(100)",
}


@pytest.mark.usefixtures("_no_worker")
@pytest.mark.parametrize("what", BROKEN)
def test_a_worker_that_fails_is_no_fault_of_the_model(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "worker.py"
    script.write_text(BROKEN[what].format(ready=inference_worker.READY))
    monkeypatch.setattr(inference_worker, "__file__", str(script))
    if what.startswith("does not start"):
        monkeypatch.setattr(inference, "SECONDS", 2)
    with pytest.raises(WorkerError) as error:
        inference.infer(_relu(3))
    assert str(error.value) == f"shape inference: the worker process {what}"
    # An operator whose sizes only onnx knows.
    text = HEADER + "m (float[n,3] x) => (float[n,3] o) { y = GlobalAveragePool(x)  o = Neg(y) }"
    onnx.save(onnx.parser.parse_model(text.replace("[n,3]", "[n,3,4]")), tmp_path / "in.onnx")
    capfd.readouterr()
    assert cli.run(["fuse", str(tmp_path / "in.onnx"), str(tmp_path / "out.onnx")]) == cli.EXIT_BUG
    assert capfd.readouterr().err == f"gradfuse: {error.value}\n"
    assert not (tmp_path / "out.onnx").exists()
    monkeypatch.undo()
    assert _size(inference.infer(_relu(4))) == 4


@pytest.mark.usefixtures("_no_worker")
def test_an_interpreter_that_is_not_there_is_no_fault_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    for executable, reason in ((None, "sys.executable is not known"), ("/no/such/python", "No such file")):
        monkeypatch.setattr(multiprocessing.spawn, "get_executable", lambda found=executable: found)
        with pytest.raises(WorkerError, match=f"cannot be started: .*{reason}"):
            inference.infer(_relu(3))


@pytest.mark.usefixtures("_no_worker")
def test_a_frozen_application_does_not_start_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a process was started"))
    assert _size(inference.infer(_relu(3))) == 3


@pytest.mark.usefixtures("_no_worker")
def test_what_the_interpreter_prints_at_its_start_is_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('welcome')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert _size(inference.infer(_relu(3))) == 3


def test_threads_take_turns() -> None:
    models = [_relu(size) for size in range(1, 30)]
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(lambda model: _size(inference.infer(model)), models)) == list(range(1, 30))


def _run(script: str) -> str:
    source = Path(__file__)
    imports = f"import os, sys\nsys.path.insert(0, {str(source.parent)!r})\nimport {source.stem} as t\n"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", imports + script], env=environment, text=True, stdout=subprocess.PIPE, timeout=300
    )
    assert done.returncode == 0, script
    return done.stdout


FORK = """
assert t._size(t.inference.infer(t._relu(3))) == 3
own = t._worker().pid
child = os.fork()
if child == 0:
    assert t.inference._workers._worker is None
    ok = t._size(t.inference.infer(t._relu(4))) == 4 and t._worker().pid != own
    t.inference._workers.stop()
    os._exit(0 if ok else 1)
assert os.waitpid(child, 0)[1] == 0
assert t._size(t.inference.infer(t._relu(5))) == 5 and t._worker().pid == own
"""
DAEMON = """
import multiprocessing
def work(): sys.exit(0 if t._size(t.inference.infer(t._relu(4))) == 4 else 1)
process = multiprocessing.get_context("fork").Process(target=work, daemon=True)
process.start(); process.join(100)
assert process.exitcode == 0
"""
CLOSED = """
for number in (0, 1, 2): os.close(number)
assert t._size(t.inference.infer(t._relu(3))) == 3
"""


@POSIX
@pytest.mark.parametrize("script", [FORK, DAEMON, CLOSED], ids=["fork", "daemon", "closed"])
def test_it_works_in_a_process_of_any_kind(script: str) -> None:
    _run(script)


@POSIX
@pytest.mark.parametrize("end", ["sys.exit()", "os._exit(0)"])
def test_the_worker_ends_with_its_process(end: str) -> None:
    pid = int(_run(f"t.inference.infer(t._relu(3))\nprint(t._worker().pid, flush=True)\n{end}"))
    limit = time.monotonic() + 60
    while time.monotonic() < limit:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    raise AssertionError("the worker is still there")
