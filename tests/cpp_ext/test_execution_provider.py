"""The execution provider in plain onnxruntime, on virtual GPUs whose memory the host cannot touch.

The virtual GPUs are those of cpp_ext/tests/simt/virtual_gpu.cc. They run the CUDA kernels, and the provider's own code
but for its calls into CUDA.
"""

from __future__ import annotations

import ctypes
import gc
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import small_models
import torch
from backends import ONNX_TYPES
from cpp_ext.single_node import CUDA_SIMT, library_of, read_by_host
from long_tests import mostly_long
from onnx import TensorProto, helper
from operators import SAMPLES, Sample

import gradfuse
from gradfuse.custom_ops import DOMAIN, OPS, VERSION

CPP_EXT = Path(__file__).resolve().parents[2] / "cpp_ext"
NAME = gradfuse.get_ep_name()
NVIDIA = 0x10DE
FLOAT = TensorProto.FLOAT


class Counts(ctypes.Structure):
    """What a virtual GPU has done, as in virtual_gpu.h."""

    _fields_ = [
        (name, ctypes.c_int64)
        for name in ("host_to_device", "device_to_host", "device_to_device", "kernels", "blocks", "streams", "events")
    ]


@pytest.fixture(scope="module")
def library() -> str:
    """The library with the virtual GPUs."""
    return library_of(CUDA_SIMT)


@pytest.fixture(scope="module")
def gpus(library: str) -> Iterator[list[Any]]:
    """The devices of the provider, while its library is registered."""
    ort.register_execution_provider_library(NAME, library)
    yield [device for device in ort.get_ep_devices() if device.ep_name == NAME]
    gc.collect()
    ort.unregister_execution_provider_library(NAME)


class Watch:
    """Counts what a virtual GPU does from now on."""

    def __init__(self, library: str, gpu: int = 0) -> None:
        self.library, self.gpu = ctypes.CDLL(library), gpu
        self.start = self.total()

    def total(self) -> dict[str, int]:
        counts = Counts()
        self.library.gradfuse_virtual_gpu_counts(self.gpu, ctypes.byref(counts))
        return {name: getattr(counts, name) for name, *_ in Counts._fields_}

    def __call__(self) -> dict[str, int]:
        return {name: count - self.start[name] for name, count in self.total().items()}

    def copies(self) -> tuple[int, int, int]:
        """From host to device, from device to host, and between devices."""
        now = self()
        return now["host_to_device"], now["device_to_host"], now["device_to_device"]


def options_for(gpu: Any, **settings: str) -> ort.SessionOptions:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.add_provider_for_devices([gpu], settings)
    return options


def session_of(model: onnx.ModelProto, options: ort.SessionOptions) -> ort.InferenceSession:
    # By default onnxruntime prints why a provider fails, and goes on without it.
    return ort.InferenceSession(model.SerializeToString(), options, enable_fallback=0)


def model_of(
    nodes: list[onnx.NodeProto],
    inputs: Mapping[str, tuple[int, Sequence[int | None]]],
    outputs: Sequence[str],
    constants: Mapping[str, np.ndarray[Any, Any]] | None = None,
) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info(name, *given) for name, given in inputs.items()],
        [helper.make_tensor_value_info(name, FLOAT, None) for name in outputs],
        [onnx.numpy_helper.from_array(array, name) for name, array in (constants or {}).items()],
    )
    imports = [helper.make_opsetid("", 17), helper.make_opsetid(DOMAIN, VERSION)]
    return helper.make_model(graph, opset_imports=imports, ir_version=9)


def mse(*names: str, reduction: int = 1) -> onnx.NodeProto:
    *inputs, output = names
    return helper.make_node("MseLossBackward", inputs, [output], output, domain=DOMAIN, reduction=reduction)


NARROW = (torch.float16, torch.bfloat16, torch.uint8)
"""Types that few operators of onnxruntime have."""


def between_plain_nodes(op: str, sample: Sample) -> onnx.ModelProto:
    """A model in which plain nodes make each input of an operator, and take its outputs."""
    nodes, given, infos = [], [], {}
    for parameter, tensor in zip(OPS[op].inputs, sample.inputs, strict=False):
        name = parameter.name if tensor is not None else ""
        given.append(name)
        if tensor is None:
            continue
        dtype, source = ONNX_TYPES[tensor.dtype], f"plain_{name}"
        if tensor.dtype in NARROW:
            nodes.append(helper.make_node("Cast", [source], [name], to=dtype))
            dtype = FLOAT
        else:
            nodes.append(helper.make_node("Not" if tensor.dtype == torch.bool else "Neg", [source], [name]))
        infos[source] = (dtype, [None] * tensor.dim())
    outputs = [output.name for output in OPS[op].outputs]
    node = helper.make_node(op, given, outputs, name="ours", domain=DOMAIN, **sample.attributes)
    casts = [helper.make_node("Cast", [name], [f"plain_{name}"], to=TensorProto.DOUBLE) for name in outputs]
    model = model_of([*nodes, node, *casts], infos, [f"plain_{name}" for name in outputs])
    for output in model.graph.output:
        output.type.tensor_type.elem_type = TensorProto.DOUBLE
    return model


def feeds_of(op: str, sample: Sample) -> dict[str, Any]:
    feeds = {}
    for parameter, tensor in zip(OPS[op].inputs, sample.inputs, strict=False):
        if tensor is None:
            continue
        if tensor.dtype in NARROW:
            source = tensor.float()
        else:
            source = ~tensor if tensor.dtype == torch.bool else -tensor
        feeds[f"plain_{parameter.name}"] = source.numpy()
    return feeds


@pytest.mark.parametrize(
    "op, dtype",
    mostly_long(
        [(op, dtype) for op in OPS for dtype in SAMPLES[op].dtypes], [(op, SAMPLES[op].dtypes[-1]) for op in OPS]
    ),
    ids=lambda value: str(value).removeprefix("torch."),
)
def test_results_are_right_between_plain_nodes(op: str, dtype: torch.dtype, gpus: list[Any], library: str) -> None:
    """Several sizes in one session: every input crosses to the GPU once, and every output back once."""
    first = SAMPLES[op].sized(6, dtype)
    session = session_of(between_plain_nodes(op, first), options_for(gpus[0]))
    for size in (6, 300, 7):
        sample = SAMPLES[op].sized(size, dtype)
        watch = Watch(library)
        outputs = session.run(None, feeds_of(op, sample))
        given = sum(value is not None for value in sample.inputs)
        assert watch.copies() == (given - len(read_by_host(op)), sum(output.size > 0 for output in outputs), 0)
        assert watch()["kernels"] > 0
        # Some operators give numbers in the type that they compute in.
        own = [other.dtype for other in SAMPLES[op].expected(sample, dtype)]
        got = [torch.from_numpy(output).to(type_) for output, type_ in zip(outputs, own, strict=True)]
        SAMPLES[op].assert_close(got, sample, dtype)


def test_neighbours_hand_over_on_the_gpu(gpus: list[Any], library: str) -> None:
    nodes = [mse("g", "s", "t", "first", reduction=0), mse("first", "s", "t", "second", reduction=0)]
    nodes.append(helper.make_node("Neg", ["second"], ["out"]))
    session = session_of(model_of(nodes, dict.fromkeys("gst", (FLOAT, [8])), ["out"]), options_for(gpus[0]))
    g, s, t = np.random.default_rng(0).standard_normal((3, 8)).astype(np.float32)
    watch = Watch(library)
    (out,) = session.run(None, {"g": g, "s": s, "t": t})
    np.testing.assert_allclose(out, -4 * g * (s - t) ** 2, rtol=1e-6)
    assert watch.copies() == (3, 1, 0)


def test_constants_cross_once_for_all_runs(gpus: list[Any], library: str) -> None:
    t = np.arange(8, dtype=np.float32)
    model = model_of([mse("g", "s", "t", "out", reduction=0)], dict.fromkeys("gs", (FLOAT, [8])), ["out"], {"t": t})
    watch = Watch(library)
    session = session_of(model, options_for(gpus[0]))
    assert watch.copies() == (1, 0, 0)
    for turn in range(1, 4):
        (out,) = session.run(None, {"g": t, "s": 3 * t})
        np.testing.assert_array_equal(out, 4 * t * t)
        assert watch.copies() == (1 + 2 * turn, turn, 0)


def test_the_other_nodes_stay_on_the_cpu(gpus: list[Any]) -> None:
    """Of a fused model, function bodies and all, only the fused nodes are taken."""
    model = gradfuse.fuse(small_models.attention()).model
    options = options_for(gpus[0])
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    session = session_of(model, options)
    assigned = [
        (part.ep_name, node.op_type)
        for part in session.get_provider_graph_assignment_info()
        for node in part.get_nodes()
    ]
    assert [op for name, op in assigned if name == NAME] == ["ScaledMaskedSoftmaxBackward"]
    assert {name for name, _ in assigned} == {NAME, "CPUExecutionProvider"}
    rng = np.random.default_rng(0)
    scores, grad = rng.standard_normal((2, 2, 3, 6, 6)).astype(np.float32)
    feeds = {"scores": scores, "mask": rng.random((2, 1, 6, 6)) < 0.4, "grad": grad}
    plain = ort.InferenceSession(small_models.attention().SerializeToString(), providers=["CPUExecutionProvider"])
    for got, want in zip(session.run(None, feeds), plain.run(None, feeds), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_nodes_in_branches_run_on_the_gpu(gpus: list[Any], library: str) -> None:
    def branch(name: str, reduction: int) -> onnx.GraphProto:
        node = mse("g", "s", "t", name, reduction=reduction)
        return helper.make_graph([node], name, [], [helper.make_tensor_value_info(name, FLOAT, None)])

    node = helper.make_node("If", ["summed"], ["out"], then_branch=branch("then", 2), else_branch=branch("else", 1))
    inputs = {"summed": (TensorProto.BOOL, []), **dict.fromkeys("gst", (FLOAT, [8]))}
    session = session_of(model_of([node], inputs, ["out"]), options_for(gpus[0]))
    x = np.arange(8, dtype=np.float32)
    watch = Watch(library)
    for summed in (True, False):
        (out,) = session.run(None, {"summed": np.array(summed), "g": x, "s": x, "t": 0 * x})
        np.testing.assert_array_equal(out, 2 * x * x if summed else x * x / 4)
    assert watch()["kernels"] == 2


def test_two_sessions_on_two_gpus_at_once(gpus: list[Any], library: str) -> None:
    model = model_of([mse("g", "s", "t", "out", reduction=0)], dict.fromkeys("gst", (FLOAT, [None])), ["out"])
    watches = [Watch(library, 0), Watch(library, 1)]
    sessions = [session_of(model, options_for(gpu)) for gpu in gpus]

    def work(turn: int) -> None:
        g, s, t = np.random.default_rng(turn).standard_normal((3, 50 + turn)).astype(np.float32)
        (out,) = sessions[turn % 2].run(None, {"g": g, "s": s, "t": t})
        np.testing.assert_array_equal(out, 2 * (s - t) * g)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(40)))
    assert [watch()["kernels"] for watch in watches] == [20, 20]
    assert [watch.copies() for watch in watches] == [(60, 20, 0)] * 2


def test_all_that_was_taken_is_given_back(gpus: list[Any], library: str) -> None:
    op = "CrossEntropyLossGrad"
    sample = SAMPLES[op].sized(20, torch.float32)
    model = between_plain_nodes(op, sample)
    gc.collect()
    session_of(model, options_for(gpus[0])).run(None, feeds_of(op, sample))
    gc.collect()
    watch = Watch(library)
    for _ in range(3):
        session = session_of(model, options_for(gpus[0]))
        for size in (20, 30, 10):
            session.run(None, feeds_of(op, SAMPLES[op].sized(size, torch.float32)))
        assert watch()["streams"] > 0
        del session
    gc.collect()
    after = watch()
    assert (after["blocks"], after["streams"], after["events"]) == (0, 0, 0)


def test_bound_values_stay_on_the_gpu(gpus: list[Any], library: str) -> None:
    model = model_of([mse("g", "s", "t", "out", reduction=0)], dict.fromkeys("gst", (FLOAT, [8])), ["out"])
    for number, gpu in enumerate(gpus):
        session = session_of(model, options_for(gpu))
        x = np.arange(8, dtype=np.float32)
        values = {name: ort.OrtValue.ortvalue_from_numpy(x + i, "gpu", number, NVIDIA) for i, name in enumerate("gst")}
        out = ort.OrtValue.ortvalue_from_shape_and_type([8], np.float32, "gpu", number, NVIDIA)
        binding = session.io_binding()
        for name, value in values.items():
            binding.bind_ortvalue_input(name, value)
        binding.bind_ortvalue_output("out", out)
        watch = Watch(library, number)
        session.run_with_iobinding(binding)
        assert watch.copies() == (0, 0, 0)
        np.testing.assert_array_equal(out.numpy(), -2 * x)
        assert watch.copies() == (0, 1, 0)


def test_copies_on_a_stream_of_the_user(gpus: list[Any], library: str) -> None:
    stream = gpus[1].create_sync_stream()
    x = np.arange(1000, dtype=np.float32)
    here, back = (ort.OrtValue.ortvalue_from_numpy(values) for values in (x, 0 * x))
    there, beside = (ort.OrtValue.ortvalue_from_shape_and_type([1000], np.float32, "gpu", 1, NVIDIA) for _ in range(2))
    watch = Watch(library, 1)
    for source, target in ((here, there), (there, beside), (beside, back)):
        ort.copy_tensors([source], [target], stream)
    del stream
    np.testing.assert_array_equal(back.numpy(), x)
    ort.copy_tensors([beside], [there], None)
    np.testing.assert_array_equal(there.numpy(), x)
    assert watch.copies() == (1, 2, 2)


def test_bad_values_are_told_by_the_next_run(gpus: list[Any]) -> None:
    node = helper.make_node("GroupedBiasAddGrad", ["y", "ends"], ["out"], "sum", domain=DOMAIN)
    inputs = {"y": (FLOAT, [4, 2]), "ends": (TensorProto.INT64, [2])}
    session = session_of(model_of([node], inputs, ["out"]), options_for(gpus[0]))
    y = np.ones((4, 2), np.float32)
    session.run(None, {"y": y, "ends": np.array([3, 9])})
    with pytest.raises(Exception, match=r"\(node 'sum'\): group_idx is out of range in an earlier run; expected"):
        session.run(None, {"y": y, "ends": np.array([3, 4])})
    (out,) = session.run(None, {"y": y, "ends": np.array([3, 4])})
    np.testing.assert_array_equal(out, [[3, 3], [1, 1]])


def test_types_that_no_kernel_takes_are_refused(gpus: list[Any]) -> None:
    inputs = dict.fromkeys("gst", (TensorProto.DOUBLE, [8]))
    with pytest.raises(Exception, match=r"MseLossBackward") as caught:
        session_of(model_of([mse("g", "s", "t", "out")], inputs, ["out"]), options_for(gpus[0]))
    assert "tensor(double)" in str(caught.value)


@pytest.mark.parametrize(
    "setting, message",
    [
        ({"speed": "full"}, f"{NAME}: option speed is full; expected no option: the provider has none"),
        ({"cuda_device": "0"}, f"{NAME}: option cuda_device is 0; expected 1, the number of the chosen device"),
    ],
)
def test_options_are_refused(setting: dict[str, str], message: str, gpus: list[Any]) -> None:
    model = model_of([mse("g", "s", "t", "out")], dict.fromkeys("gst", (FLOAT, [8])), ["out"])
    with pytest.raises(Exception, match=NAME) as caught:
        session_of(model, options_for(gpus[1], **setting))
    assert str(caught.value).strip().endswith(message)


def test_a_session_has_one_device(gpus: list[Any]) -> None:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    with pytest.raises(Exception, match="device"):
        options.add_provider_for_devices(gpus, {})
        session_of(model_of([mse("g", "s", "t", "out")], dict.fromkeys("gst", (FLOAT, [8])), ["out"]), options)


@pytest.mark.parametrize("operators_first", [True, False])
def test_registering_the_operators_too_does_no_harm(operators_first: bool, gpus: list[Any], library: str) -> None:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    if operators_first:
        options.register_custom_ops_library(library)
    options.add_provider_for_devices([gpus[0]], {})
    if not operators_first:
        options.register_custom_ops_library(library)
    model = model_of([mse("g", "s", "t", "out")], dict.fromkeys("gst", (FLOAT, [8])), ["out"])
    x = np.ones(8, np.float32)
    watch = Watch(library)
    session_of(model, options).run(None, {"g": x, "s": x, "t": x})
    assert watch()["kernels"] == 1


def test_devices_say_what_they_are(gpus: list[Any], library: str) -> None:
    assert [gpu.ep_metadata["cuda_device"] for gpu in gpus] == ["0", "1"]
    for gpu in gpus:
        assert gpu.ep_vendor == "gradfuse"
        assert gpu.ep_metadata["version"] == gradfuse.__version__
        assert gpu.ep_metadata["library_path"] == library
        assert (gpu.device.type, gpu.device.vendor_id) == (ort.OrtHardwareDeviceType.GPU, NVIDIA)
    assert [gpu.device.metadata["pci_bus_id"] for gpu in gpus] == ["0000:01:00.0", "0000:02:00.0"]


def run_python(code: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *arguments]
    environment = {**os.environ, **variables}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


LIST_DEVICES = f"""
import sys, onnxruntime
onnxruntime.register_execution_provider_library({NAME!r}, sys.argv[1])
print(sum(device.ep_name == {NAME!r} for device in onnxruntime.get_ep_devices()))
"""


def test_without_a_gpu_there_is_no_device_and_a_reason(library: str) -> None:
    result = run_python(LIST_DEVICES, library, GRADFUSE_VIRTUAL_GPUS="0")
    assert (result.returncode, result.stdout) == (0, "0\n"), result.stderr
    assert f"{NAME} offers no device: there is no virtual GPU" in result.stderr


def test_the_installed_library_registers_and_says_why_it_has_no_device() -> None:
    result = run_python(LIST_DEVICES, gradfuse.get_library_path())
    assert result.returncode == 0, result.stderr
    if result.stdout == "0\n":
        assert f"{NAME} offers no device: " in result.stderr


def test_the_host_cannot_read_memory_of_a_virtual_gpu(library: str) -> None:
    """Else a plain node that was handed such memory would go unnoticed."""
    code = f"""
import ctypes, sys, numpy, onnxruntime
onnxruntime.register_execution_provider_library({NAME!r}, sys.argv[1])
value = onnxruntime.OrtValue.ortvalue_from_numpy(numpy.ones(4, numpy.float32), "gpu", 0, {NVIDIA})
print(value.numpy().sum(), flush=True)
ctypes.c_float.from_address(value.data_ptr()).value
"""
    result = run_python(code, library)
    assert result.stdout == "4.0\n"
    assert result.returncode == -signal.SIGSEGV


def test_gpus_are_found_by_their_places_on_the_bus(tmp_path: Path) -> None:
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        pytest.skip("no C++ compiler")
    program = tmp_path / "match_check"
    sources = [CPP_EXT / "tests" / "match_check.cc", CPP_EXT / "ort" / "provider" / "match.cc"]
    subprocess.run([compiler, "-std=c++17", f"-I{CPP_EXT}", *map(str, sources), "-o", str(program)], check=True)
    result = subprocess.run([program], check=True, capture_output=True, text=True)
    assert result.stdout.splitlines() == [
        "same order: 0 1",
        "other order: 1 0",
        "other spelling: 0",
        "hidden from CUDA: -1 0",
        "parts of one GPU: 0",
        "one of each, place unknown: 0",
        "two devices, places unknown: -1 -1",
        "no GPU: -1",
        "no device:",
    ]


def test_what_gpu_test_runs_in_onnxruntime_passes(library: str) -> None:
    program = CPP_EXT / "tests" / "device" / "provider_test.py"
    command = [sys.executable, str(program), "--simt", "--only", "GroupedBiasAddGrad"]
    environment = {**os.environ, "GRADFUSE_VIRTUAL_GPUS": "1"}
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert result.returncode == 0, result.stdout + result.stderr
    pattern = rf"onnxruntime {ort.__version__} on virtual GPU of the tests 0: [1-9]\d* passed 0 failed\n"
    assert re.fullmatch(pattern, result.stdout)
