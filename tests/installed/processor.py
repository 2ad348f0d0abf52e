"""Which loops the kernels must have here, by what the operating system says of the processor."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import pytest

# What a processor must have for each set of loops beyond the scalar ones, as Linux calls it.
FLAGS = {
    "avx2": "avx2 fma bmi1 bmi2 f16c",
    "avx512": "avx512f avx512cd avx512vl avx512dq avx512bw",
    "avx512_bf16": "avx512_bf16 avx512vbmi avx512_vbmi2 avx512_vnni avx512_bitalg avx512_vpopcntdq "
    "gfni vaes vpclmulqdq",
}


def expected_loops() -> list[str]:
    """The loops that a library has to offer, from the scalar ones to the widest that the processor runs.

    GRADFUSE_PROCESSOR names the processor of an emulator.
    """
    if os.environ.get("GRADFUSE_PROCESSOR", platform.machine()).lower() in ("aarch64", "arm64"):
        return ["scalar", "neon"]
    information = Path("/proc/cpuinfo")
    if not information.exists():
        pytest.skip("the system does not say what its processor has")
    line = next(line for line in information.read_text().splitlines() if line.startswith("flags"))
    present, found = set(line.split()), ["scalar"]
    for name, flags in FLAGS.items():
        if not set(flags.split()) <= present:
            break
        found.append(name)
    return found
