"""What a bug report needs to know about the machine and the installation; only the standard library is imported."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import platform
import sys
from typing import Any

from gradfuse.library import find_library

_PACKAGES = (
    "numpy",
    "ml_dtypes",
    "onnx",
    "onnx-ir",
    "onnxscript",
    "onnxruntime",
    "onnxruntime-gpu",
    "onnxruntime-training",
    "onnxruntime-training-cpu",
    "safetensors",
    "torch",
)
_CPU_FLAGS = (
    "sse4_2",
    "avx",
    "avx2",
    "fma",
    "f16c",
    "avx512f",
    "avx512_bf16",
    "avx512_fp16",
    "amx_bf16",
    "asimd",
    "sve",
)
_VARIABLES = (
    "OMP_NUM_THREADS",
    "CUDA_VISIBLE_DEVICES",
    "GRADFUSE_DEVICE",
    "GRADFUSE_NUM_THREADS",
    "GRADFUSE_SIMD_TARGET",
    "GRADFUSE_STREAM_BYTES",
)


def info() -> dict[str, Any]:
    """Return versions, library, processor and threads, as data for JSON.

    Keys: gradfuse (version), python, platform, packages (name -> version, of those installed), library (path, loads,
    error, simd: the instruction set that its kernels use), cpu (model, cores, usable, flags), variables (of the
    environment, where set).
    """
    from gradfuse import __version__

    return {
        "gradfuse": __version__,
        "python": f"{platform.python_implementation()} {platform.python_version()} ({sys.executable})",
        "platform": platform.platform(),
        "packages": _packages(),
        "library": _library(),
        "cpu": _cpu(),
        "variables": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
    }


def _packages() -> dict[str, str]:
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _library() -> dict[str, Any]:
    path = find_library()
    if path is None:
        return {"path": None, "loads": False, "error": "not installed", "simd": None}
    try:
        target = ctypes.CDLL(path).gradfuse_simd_target
    except (OSError, AttributeError) as error:
        return {"path": path, "loads": False, "error": " ".join(str(error).split()), "simd": None}
    target.restype = ctypes.c_char_p
    return {"path": path, "loads": True, "error": None, "simd": target(None).decode()}


def _cpu() -> dict[str, Any]:
    fields: dict[str, str] = {}
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                key, _, value = line.partition(":")
                fields.setdefault(key.strip(), value.strip())
    except OSError:
        pass
    flags = set(fields.get("flags", fields.get("Features", "")).split())
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "model": fields.get("model name") or platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "usable": usable,
        "flags": [flag for flag in _CPU_FLAGS if flag in flags],
    }
