"""Which loops the kernels must have here, by what the operating system says of the processor."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from pathlib import Path

import pytest

# What a processor must have for each set of loops beyond the scalar ones, as Linux calls it.
FLAGS = {
    "avx2": "avx2 fma bmi1 bmi2 f16c",
    "avx512": "avx512f avx512cd avx512vl avx512dq avx512bw",
    "avx512_bf16": "avx512_bf16 avx512vbmi avx512_vbmi2 avx512_vnni avx512_bitalg avx512_vpopcntdq "
    "gfni vaes vpclmulqdq",
}


AVX2_OF_WINDOWS = 40
"""PF_AVX2_INSTRUCTIONS_AVAILABLE of IsProcessorFeaturePresent, which does not say more of what AVX2 comes with."""


def assert_widest_loops(offered: list[str]) -> None:
    """Check the loops that a library offers, from the scalar ones to the widest, against what the processor runs.

    GRADFUSE_PROCESSOR names the processor of an emulator.
    """
    if os.environ.get("GRADFUSE_PROCESSOR", platform.machine()).lower() in ("aarch64", "arm64"):
        assert offered == ["scalar", "neon"], offered
    elif sys.platform == "win32":
        avx2 = bool(ctypes.windll.kernel32.IsProcessorFeaturePresent(AVX2_OF_WINDOWS))
        assert ("avx2" in offered) == avx2, offered
    else:
        expected = _loops_of_linux()
        assert offered == expected, f"{offered}; expected {expected}"


def _loops_of_linux() -> list[str]:
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
