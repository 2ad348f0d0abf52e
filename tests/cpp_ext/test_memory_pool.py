"""The library's memory pool, by itself and in onnxruntime's sessions."""

from __future__ import annotations

import ctypes
import gc
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from packaging.version import Version

import gradfuse

CPP_EXT = Path(__file__).resolve().parents[2] / "cpp_ext"
TESTS = Path(__file__).resolve().parents[1]
MIB = 2**20
pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux") or Version(onnxruntime.__version__) < Version("1.23"),
    reason="sessions take the pool on Linux, with onnxruntime 1.23 or newer",
)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        pytest.skip("no C++ compiler")
    path = tmp_path_factory.mktemp("memory_pool") / "check"
    options = ["-std=c++17", "-O1", "-fsanitize=address,undefined", "-pthread", f"-I{CPP_EXT}"]
    sources = [str(CPP_EXT / "tests" / "memory_pool_check.cc"), str(CPP_EXT / "ort" / "memory_pool.cc")]
    subprocess.run([compiler, *options, *sources, "-o", str(path)], check=True)
    return path


@pytest.mark.parametrize("seed", range(2))
def test_values_are_alone_and_memory_is_bounded(program: Path, seed: int) -> None:
    done = subprocess.run([program, str(seed)], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def used_and_held(*, trim: bool = False) -> tuple[int, int]:
    """How many bytes values have in the pool, and how many the pool holds."""
    used, held = ctypes.c_uint64(), ctypes.c_uint64()
    library = ctypes.CDLL(gradfuse.get_library_path())
    library.gradfuse_memory_pool(int(trim), ctypes.byref(used), ctypes.byref(held))
    return used.value, held.value


def opened(nodes: list[Any], inputs: list[Any], output: list[Any], *weights: Any, pool: bool = True) -> Any:
    """A session of a graph with one output."""
    graph = helper.make_graph(nodes, "g", inputs, output, weights)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("aclnn", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    options = onnxruntime.SessionOptions()
    options.enable_mem_pattern = False
    if pool:
        options.add_session_config_entry("gradfuse.memory_pool", "1")
    gradfuse.register(options)
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def exp_of_product(*, pool: bool) -> Any:
    """A session of y = exp(x w)."""
    weight = numpy_helper.from_array(np.full((1024, 1024), 1e-3, np.float32), "w")
    nodes = [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Exp", ["h"], ["y"])]
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 1024]) for name in "xy")
    return opened(nodes, [x], [y], weight, pool=pool)


def run(session: Any, rows: int) -> Any:
    x = onnxruntime.OrtValue.ortvalue_from_numpy(np.ones((rows, 1024), np.float32))
    return session.run_with_ort_values(None, {"x": x})[0]


def test_values_of_sessions_that_ask_are_in_the_pool() -> None:
    before = used_and_held()[0]
    expected = run(exp_of_product(pool=False), 512).numpy()
    assert used_and_held()[0] == before
    session = exp_of_product(pool=True)
    assert used_and_held()[0] == before  # The weight is elsewhere.
    result = run(session, 512)
    assert used_and_held()[0] == before + 2 * MIB
    del session
    np.testing.assert_array_equal(result.numpy(), expected)
    del result
    assert used_and_held()[0] == before


def test_sessions_take_what_others_have_left() -> None:
    first, second = exp_of_product(pool=True), exp_of_product(pool=True)
    trimmed = used_and_held(trim=True)[1]
    run(first, 8192)
    held = used_and_held()[1]
    assert held >= trimmed + 32 * MIB
    run(second, 8192)
    assert used_and_held()[1] == held
    assert used_and_held(trim=True)[1] == trimmed


def loss_of_a_head(*, pool: bool) -> float:
    """What a kernel gives that keeps logits of 16 MiB for itself; its inputs and results take a quarter of one."""
    rows, classes, features = 512, 8192, 8
    nodes = [helper.make_node("LinearCrossEntropy", ["x", "w", "t"], ["y", "dx", "dw", "db", "z"], domain="aclnn")]
    nodes[0].attribute.append(helper.make_attribute("output_mask", [1, 1, 0, 0, 0]))
    weight = numpy_helper.from_array(np.full((classes, features), 1e-3, np.float32), "w")
    x, t, y = (
        helper.make_tensor_value_info(name, type_, shape)
        for name, type_, shape in (("x", 1, [rows, features]), ("t", TensorProto.INT64, [rows]), ("y", 1, []))
    )
    session = opened(nodes, [x, t], [y], weight, pool=pool)
    return float(session.run(None, {"x": np.ones((rows, features), np.float32), "t": np.arange(rows)})[0])


def test_kernels_take_memory_from_the_pool() -> None:
    used, trimmed = used_and_held(trim=True)
    loss = loss_of_a_head(pool=True)
    assert loss == pytest.approx(np.log(8192))
    now_used, held = used_and_held()
    assert held >= trimmed + 16 * MIB and now_used == used
    assert loss_of_a_head(pool=False) == loss


def sum_of_copies() -> Any:
    """A session that adds up s times x."""
    nodes = [helper.make_node("Expand", ["x", "s"], ["e"]), helper.make_node("ReduceSum", ["e"], ["y"], keepdims=0)]
    x, s, y = (
        helper.make_tensor_value_info(name, type_, shape)
        for name, type_, shape in (("x", TensorProto.FLOAT, [1]), ("s", TensorProto.INT64, [1]), ("y", 1, []))
    )
    return opened(nodes, [x, s], [y])


def copies_added(session: Any, count: int) -> float:
    return float(session.run(None, {"x": np.ones(1, np.float32), "s": np.array([count])})[0])


def test_a_value_that_no_machine_has_memory_for_is_an_error() -> None:
    session = sum_of_copies()
    with pytest.raises(Exception, match="bad_alloc"):
        copies_added(session, 2**45)
    assert copies_added(session, 2**20) == 2**20


class Hidden(torch.nn.Module):
    """Returns its hidden layer too, which is large."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(64, 2048), torch.nn.Linear(2048, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = torch.tanh(self.first(x))
        return self.last(h), h


def test_training_sessions_return_their_memory() -> None:
    module, x, y = Hidden(), torch.randn(4096, 64), torch.randn(4096, 1)
    step = gradfuse.export_training_step(
        module,
        lambda results, target: (torch.nn.functional.mse_loss(results[0], target), {"h": results[1]}),
        ((x,), (y,)),
        torch.optim.SGD(module.parameters(), lr=0.01),
    )
    trimmed = used_and_held(trim=True)[1]
    session = gradfuse.TrainingSession(step)
    losses = [float(session.step((x.numpy(),), (y.numpy(),))) for _ in range(2)]
    assert losses[1] < losses[0]
    assert used_and_held()[1] >= trimmed + 32 * MIB
    del session
    gc.collect()
    assert used_and_held()[1] == trimmed


_FORKS = """
import ctypes, os, threading
import numpy as np
import gradfuse
from cpp_ext.test_memory_pool import exp_of_product, run, used_and_held

sessions = [exp_of_product(pool=True) for _ in range(2)]
running = True
def work(session):
    while running:
        run(session, 64)
threads = [threading.Thread(target=work, args=(session,)) for session in sessions]
for thread in threads:
    thread.start()
for _ in range(300):
    child = os.fork()
    if not child:
        used_and_held(trim=True)
        os._exit(0)
    os.waitpid(child, 0)
running = False
for thread in threads:
    thread.join()
"""


def test_a_process_may_fork_while_another_thread_runs_a_session() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(str(path) for path in (TESTS, TESTS / "support"))}
    command = [sys.executable, "-W", "ignore", "-c", _FORKS]
    assert subprocess.run(command, timeout=100, env=environment).returncode == 0


_LIMITED = """
import resource
from pathlib import Path
from cpp_ext.test_memory_pool import MIB, copies_added, sum_of_copies, used_and_held

session = sum_of_copies()
copies_added(session, 2**20)
status = Path("/proc/self/status").read_text().splitlines()
mapped = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmSize:"))
resource.setrlimit(resource.RLIMIT_AS, (mapped + 256 * MIB,) * 2)
assert copies_added(session, 2**24) == 2**24
assert used_and_held()[1] >= 64 * MIB
try:
    copies_added(session, 2**28)
except Exception as error:
    assert "bad_alloc" in str(error), error
else:
    raise AssertionError("ran in more memory than the limit")
assert copies_added(session, 2**24) == 2**24
"""


def test_addresses_may_be_limited_later() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(str(path) for path in (TESTS, TESTS / "support"))}
    done = subprocess.run([sys.executable, "-c", _LIMITED], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
