"""Loops of every instruction set that this machine has: conversions, functions, and operators at all lengths."""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cpp_ext.single_node import run
from cpp_ext.test_ctc_loss_backward import check, inputs_of
from ctc_samples import Item, batch
from numpy.typing import NDArray
from operators import SAMPLES
from operators.strides import moved

import gradfuse
from gradfuse.custom_ops import OPS

ROOT = Path(__file__).resolve().parents[2]
CPP_EXT = ROOT / "cpp_ext"


def library() -> Any:
    loaded = ctypes.CDLL(gradfuse.get_library_path())
    loaded.gradfuse_describe_simd_targets.restype = ctypes.c_char_p
    loaded.gradfuse_simd_target.restype = ctypes.c_char_p
    loaded.gradfuse_stream_bytes.restype = ctypes.c_int64
    return loaded


TARGETS: list[str] = json.loads(library().gradfuse_describe_simd_targets())


@pytest.fixture(params=TARGETS)
def target(request: pytest.FixtureRequest) -> Iterator[str]:
    """Kernels use one instruction set during a test."""
    before = library().gradfuse_simd_target(None)
    assert library().gradfuse_simd_target(request.param.encode()) == request.param.encode()
    yield request.param
    library().gradfuse_simd_target(before)


STORES = ("around the caches", "into the caches")


@pytest.fixture(params=STORES)
def stores(request: pytest.FixtureRequest) -> Iterator[None]:
    """Kernels write results of any size so."""
    wanted = 0 if request.param == "around the caches" else 2**62
    before = library().gradfuse_stream_bytes(ctypes.c_int64(-1))
    assert library().gradfuse_stream_bytes(ctypes.c_int64(wanted)) == wanted
    yield
    library().gradfuse_stream_bytes(ctypes.c_int64(before))


def test_the_variable_says_from_which_size_on_stores_go_around_the_caches() -> None:
    program = f"import ctypes; x = ctypes.CDLL({gradfuse.get_library_path()!r}).gradfuse_stream_bytes"
    program += "; x.restype = ctypes.c_int64; print(x(ctypes.c_int64(-1)))"
    for given, used in (("12345", 12345), ("many", 32 << 20), ("", 32 << 20)):
        environment = {**os.environ, "GRADFUSE_STREAM_BYTES": given}
        result = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
        assert int(result.stdout) == used


def test_the_widest_is_used_and_the_variable_narrows_it() -> None:
    program = f"import ctypes; x = ctypes.CDLL({gradfuse.get_library_path()!r}).gradfuse_simd_target"
    program += "; x.restype = ctypes.c_char_p; print(x(None).decode(), x(b'other'))"
    widest = TARGETS[-1]
    for wanted, used in ((None, widest), *zip(TARGETS, TARGETS, strict=True)):
        environment = {key: value for key, value in os.environ.items() if key != "GRADFUSE_SIMD_TARGET"}
        environment |= {"GRADFUSE_SIMD_TARGET": wanted} if wanted else {}
        result = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
        assert result.stdout.split() == [used, "None"]


def test_a_name_that_is_no_instruction_set_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import onnxruntime

    monkeypatch.setenv("GRADFUSE_SIMD_TARGET", "fast")
    with pytest.raises(
        gradfuse.GradfuseError, match=r"GRADFUSE_SIMD_TARGET is 'fast'; expected one of scalar"
    ) as caught:
        gradfuse.register(onnxruntime.SessionOptions())
    assert "\n" not in str(caught.value)


Filter = Callable[[str, NDArray[Any], Any], NDArray[Any]]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """cpp_ext/tests/vectors_check.cc, with the address sanitizer, and with Highway where the library has it."""
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        pytest.skip("no C++ compiler")
    program = tmp_path_factory.mktemp("vectors") / "vectors_check"
    options = ["-std=c++17", "-O1", "-fsanitize=address", f"-I{CPP_EXT}", f"-I{CPP_EXT / 'include'}"]
    if len(TARGETS) > 1:
        options += ["-DGRADFUSE_HAVE_HIGHWAY", *(f"-idirafter{folder}" for folder in highway_folders())]
    sources = [CPP_EXT / name for name in ("tests/vectors_check.cc", "kernels/cpu/targets.cc", "kernels/signature.cc")]
    subprocess.run([compiler, *options, *map(str, sources), "-o", str(program)], check=True)
    return program


def highway_folders() -> list[str]:
    """Where CMake found Highway when it built the library."""
    caches = sorted((ROOT / "build").glob("*/CMakeCache.txt"))
    given = [os.environ[name] for name in ("GRADFUSE_HIGHWAY_INCLUDE_DIR",) if name in os.environ]
    found = [
        re.search(r"^GRADFUSE_HIGHWAY_INCLUDE_DIR:PATH=(/.+)$", cache.read_text(), re.MULTILINE) for cache in caches
    ]
    return given + [match[1] for match in found if match]


@pytest.fixture
def through(compiled: Path, target: str) -> Filter:
    """Gives what a function of vectors makes of an array, in pieces of all lengths and alignments."""

    def run_filter(function: str, numbers: NDArray[Any], result: Any) -> NDArray[Any]:
        environment = {**os.environ, "GRADFUSE_SIMD_TARGET": target}
        done = subprocess.run([compiled, function], input=numbers.tobytes(), stdout=subprocess.PIPE, env=environment)
        assert done.returncode == 0
        return np.frombuffer(done.stdout, result)

    return run_filter


def float_bits() -> NDArray[np.uint32]:
    """Floats of all kinds: at and beside every tie of the two 16-bit formats, and more in between."""
    bits = [np.arange(0, 2**32, 9973)]
    for step, tie in ((13, 0x1000), (16, 0x8000)):
        bits += [(np.arange(2 ** (32 - step)) << step) + tie + beside for beside in (-1, 0, 1)]
    return np.concatenate(bits).astype(np.uint32)


@pytest.mark.long
def test_16_bit_numbers_convert_exactly_and_round_to_nearest_even(through: Filter) -> None:
    every = np.arange(65536, dtype=np.uint16)
    half = every.view(np.float16)
    nan = np.isnan(half)
    wide = through("half_to_float", every, np.uint32)
    np.testing.assert_array_equal(wide[~nan], half.astype(np.float32).view(np.uint32)[~nan])
    np.testing.assert_array_equal(through("float_to_half", wide, np.uint16), np.where(nan, every | 0x200, every))
    wide = through("bfloat16_to_float", every, np.uint32)
    np.testing.assert_array_equal(wide, every.astype(np.uint32) << 16)

    bits = float_bits()
    numbers = bits.view(np.float32)
    nan = np.isnan(numbers)
    with np.errstate(over="ignore"):
        rounded = numbers.astype(np.float16).view(np.uint16)
    kept = (bits >> 16) & 0x8000 | 0x7E00 | (bits >> 13) & 0x3FF  # made quiet, with what fits of its payload
    np.testing.assert_array_equal(through("float_to_half", bits, np.uint16), np.where(nan, kept, rounded))
    rounded = torch.from_numpy(numbers).bfloat16().view(torch.int16).numpy().view(np.uint16)
    kept = bits >> 16 | 0x40
    np.testing.assert_array_equal(through("float_to_bfloat16", bits, np.uint16), np.where(nan, kept, rounded))


def worst_ulp(actual: NDArray[Any], exact: NDArray[Any], zero_below: float = 0.0) -> float:
    """Units in the last place between results and exact ones; what is not finite must be equal, and smaller ones 0."""
    with np.errstate(over="ignore"):
        rounded = exact.astype(actual.dtype)
    zero = (exact < zero_below) & (actual == 0)
    finite = np.isfinite(rounded) & ~zero
    np.testing.assert_array_equal(actual[~np.isfinite(rounded)], rounded[~np.isfinite(rounded)])
    error = np.abs(actual[finite].astype(exact.dtype) - exact[finite])
    return float((error / np.spacing(np.abs(rounded[finite])).astype(exact.dtype)).max())


@pytest.mark.parametrize(("real", "bound"), ((np.float32, 1.4), (np.float64, 1.2)))
def test_functions_are_within_their_bounds(through: Filter, real: Any, bound: float) -> None:
    name, wider = ("float", np.float64) if real is np.float32 else ("double", np.longdouble)
    limits, generator = np.finfo(real), np.random.default_rng(0)
    lowest, highest = np.log(limits.smallest_subnormal) - 2, np.log(limits.max) + 1
    special = [0.0, -0.0, np.nan, np.inf, -np.inf, -1e30, 1e30, np.log(limits.tiny)]
    x = np.concatenate([generator.uniform(lowest, highest, 200_000), generator.uniform(-1, 1, 50_000), special])
    x = x.astype(real)
    with np.errstate(over="ignore"):
        worst = worst_ulp(through(f"exp_{name}", x, real), np.exp(x.astype(wider)), zero_below=2 * limits.tiny)
    assert worst <= bound
    x = np.concatenate([generator.uniform(1, 3, 100_000), 1 + np.geomspace(limits.eps, 1e-3, 1000)]).astype(real)
    assert worst_ulp(through(f"log_up_to_3_{name}", x, real), np.log(x.astype(wider))) < 1
    assert worst_ulp(through(f"reciprocal_{name}", x, real), np.reciprocal(x.astype(wider))) < 1


def test_activations_are_within_their_bounds(through: Filter) -> None:
    generator = np.random.default_rng(0)
    special = [0.0, -0.0, np.nan, np.inf, -np.inf, 1e-40, -1e-40, 1e30, -1e30, 9.02, -9.02, -87.0]
    parts = [generator.uniform(-10, 10, 200_000), generator.uniform(-87, 100, 50_000), np.geomspace(1e-30, 1, 50_000)]
    x = np.concatenate([*parts, special]).astype(np.float32)
    wide = x.astype(np.float64)
    with np.errstate(over="ignore"):
        sigmoid = 1 / (1 + np.exp(-wide))
    actual = through("sigmoid_float", x, np.float32)
    low = wide < -87
    assert worst_ulp(actual[~low], sigmoid[~low]) <= 3
    assert np.abs(actual[low]).max() < 2e-38
    assert worst_ulp(through("tanh_float", x, np.float32), np.tanh(wide)) <= 6


def test_functions_of_any_float_are_within_their_bounds(through: Filter) -> None:
    bits = np.arange(0, 2**32, 20011).astype(np.uint32)
    parts = [np.linspace(0.6, 1.6, 50_000), np.linspace(-5, 5, 50_000), np.geomspace(1e-45, 3e38, 50_000)]
    special = [0.0, -0.0, np.nan, np.inf, -np.inf, 1e-45, 1.0, np.finfo(np.float32).tiny, np.finfo(np.float32).max]
    x = np.concatenate([bits.view(np.float32), *parts, special]).astype(np.float32)
    wide = x.astype(np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        assert worst_ulp(through("log_float", x, np.float32), np.log(wide)) < 1
        assert worst_ulp(through("erf_float", x, np.float32), torch.erf(torch.from_numpy(wide)).numpy()) <= 2


def _stores_of(op: str) -> tuple[str, ...]:
    """The ways in which the kernel of an operator stores: one, if its code knows of no other."""
    kernel = CPP_EXT / "kernels/cpu" / f"{OPS[op].stem}.cc"
    return STORES if "stream" in kernel.read_text().lower() else STORES[1:]


@pytest.mark.parametrize("op, stores", [(op, stores) for op in OPS for stores in _stores_of(op)], indirect=["stores"])
@pytest.mark.parametrize(
    "lengths",
    [(*range(1, 18), 31, 33, 64, 65, 2049), pytest.param((*range(18, 36), 63, 2047), marks=pytest.mark.long)],
    ids=["many", "others"],
)
@pytest.mark.usefixtures("target", "stores")
@pytest.mark.sampled(every=3)
def test_operators_at_all_lengths_and_alignments(op: str, lengths: Sequence[int]) -> None:
    for dtype in SAMPLES[op].dtypes:
        for length in lengths:
            for case in SAMPLES[op].all_rows(length, dtype):
                offsets = [(length * k) % 17 for k in (1, 3, 5)]
                inputs = [
                    moved(value, offset) if value is not None and value.dtype == dtype else value
                    for value, offset in zip(case.inputs, cycle(offsets), strict=False)
                ]
                SAMPLES[op].assert_close(run(op, *inputs, **case.attributes), case, dtype)


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
@pytest.mark.usefixtures("target", "stores")
def test_ctc_at_all_numbers_of_classes_and_states(dtype: torch.dtype) -> None:
    # Rows of an odd number of classes begin at all alignments.
    for classes, length in zip(
        (2, 3, 7, 15, 16, 17, 31, 33, 63, 65, 257), (0, 1, 2, 3, 7, 8, 15, 16, 17, 31, 40), strict=True
    ):
        items = [Item(2 * length + 1, length), Item(2 * length, max(0, length - 1))]
        check(*inputs_of(batch(items, steps=2 * length + 2, classes=classes, dtype=dtype)))
