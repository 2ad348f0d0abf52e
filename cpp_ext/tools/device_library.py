"""Builds the CUDA kernels for tests and measurements, with nothing but a compiler: `device_library.py VARIANT`.

Variants:
    cuda              kernels for the GPU of this machine (nvcc), behind the C functions of tests/device/device_api.h
                      and the C API of capi/
    cuda-ort          kernels for the GPU of this machine, as the library that onnxruntime loads
    simt              kernels on the host machine of tests/simt, behind those of device_api.h
    simt-sanitized    the same as in cuda on that machine, with the address and undefined-behaviour sanitizers
    simt-ort          kernels on the host machine, as custom operators for onnxruntime's CPU provider, and with the
                      execution provider for two virtual GPUs (tests/simt/virtual_gpu.cc)
    thread-sanitized  the C API on the CPU with the thread sanitizer

Prints the path of the library. What was built is kept under build/device/ until a source or an option changes.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CPP_EXT = Path(__file__).resolve().parents[1]
BUILD = CPP_EXT.parent / "build" / "device"
VARIANTS = ("cuda", "cuda-ort", "simt", "simt-sanitized", "simt-ort", "thread-sanitized")
REPLACED = ("devices.cc", "cuda_gpu.cc")  # by sources of tests/simt
_STANDARD = (
    "algorithm cmath cstdint cstring functional limits memory mutex optional string type_traits utility vector".split()
)
SANITIZERS = {
    "simt-sanitized": ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
    "thread-sanitized": ["-fsanitize=thread"],
}


class BuildError(Exception):
    """The library cannot be built here; the text says why."""


def build(variant: str, arch: str = "native") -> Path:
    """Build a variant of the library, if it is not there yet, and return its path.

    Args:
        variant: one of VARIANTS.
        arch: for "cuda" and "cuda-ort", what nvcc is to build for: "native" is the GPU of this machine.

    Raises:
        BuildError: a compiler is missing, or fails.
    """
    if variant not in VARIANTS:
        raise BuildError(f"variant is {variant!r}; expected one of {', '.join(VARIANTS)}")
    sources = _sources(variant)
    command = _command(variant, arch)
    library = BUILD / variant / _digest(sources, command) / f"libgradfuse_{variant.replace('-', '_')}.so"
    with _lock(BUILD / variant):
        if library.is_file():
            return library
        for old in library.parent.parent.iterdir():
            if old.is_dir():
                shutil.rmtree(old)
        library.parent.mkdir(parents=True)
        compiling = _with_standard_headers(command, library.parent)
        _link(variant, command, [_compile(compiling, source, library.parent) for source in sources], library)
    return library


def _sources(variant: str) -> list[Path]:
    tests = CPP_EXT / "tests"
    checks = _files("kernels/*.cc")
    if variant == "thread-sanitized":
        return [*checks, *_capi()]
    kernels = [*checks, *_files("kernels/cuda/*.cu")]
    adapter = _files("ort/**/*.cc")
    device_api = [tests / "device/device_api.cc", CPP_EXT / "ort/describe.cc"]
    if variant == "cuda":
        api = [*_capi(), *_files("capi/cuda_*.cc")]
        return [*kernels, *device_api, tests / "device/cuda_memory.cc", *api]
    if variant == "cuda-ort":
        return [*kernels, *_files("kernels/cpu/*.cc"), *adapter]
    kernels = [path for path in kernels if path.name != "fault.cu"]
    if variant == "simt-ort":
        adapter = [path for path in adapter if path.name not in REPLACED]
        machine = [tests / "simt" / name for name in ("simt.cc", "devices.cc", "virtual_gpu.cc")]
        # Settings, and what only onnxruntime's CPU provider runs.
        names = ("targets.cc", "streaming.cc", "scratch.cc", "embedding_dense_backward_add.cc")
        on_host = [CPP_EXT / "kernels/cpu" / name for name in names]
        return [*kernels, *machine, *on_host, *adapter]
    kernels += [tests / "simt/simt.cc", *device_api, tests / "device/simt_memory.cc"]
    if variant == "simt":
        return kernels
    return [*kernels, *_capi(), CPP_EXT / "capi/cuda_faults.cc", tests / "simt/capi_device.cc"]


def _files(pattern: str) -> list[Path]:
    return sorted(CPP_EXT.glob(pattern))


def _capi() -> list[Path]:
    """The C API on the CPU, but for what its kernels share with others."""
    api = [path for path in _files("capi/*.cc") if not path.name.startswith("cuda_")]
    return [*api, *_files("kernels/cpu/*.cc")]


def _command(variant: str, arch: str) -> list[str]:
    includes = [f"-I{CPP_EXT}", f"-I{CPP_EXT / 'include'}", f"-I{CPP_EXT / 'capi/include'}"]
    if variant in ("cuda", "cuda-ort"):
        warnings = ["-diag-suppress", "2810", "-Xcompiler", "-fPIC,-Wall,-Wextra"]
        options = ["-std=c++17", "-O3", f"-arch={arch}", "--expt-relaxed-constexpr", "-lineinfo", *warnings]
        options.append("-DGRADFUSE_HAVE_CUDA")
        if variant == "cuda-ort":
            options += _adapter_options()
        return [_compiler("nvcc", "NVCC"), *options, *includes]
    options = ["-std=c++17", "-O1", "-fPIC", "-Wall", "-Wextra", "-Wno-unknown-pragmas"]
    if variant != "thread-sanitized":
        options.append("-DGRADFUSE_SIMT")
    if variant in SANITIZERS:
        options += ["-g1", *SANITIZERS[variant]]
        if variant == "simt-sanitized":
            options.append("-DGRADFUSE_HAVE_CUDA")
    if variant == "simt-ort":
        options += _adapter_options()
    return [_compiler("c++", "CXX"), *options, *includes]


def _adapter_options() -> list[str]:
    """What only the adapter to onnxruntime needs: its headers, and the version that the Python package has."""
    package = (CPP_EXT.parent / "plugin" / "gradfuse" / "__init__.py").read_text(encoding="utf-8")
    (version,) = re.findall(r'^__version__ = (".*")$', package, re.MULTILINE)
    return ["-isystem", str(onnxruntime_headers()), f"-DGRADFUSE_VERSION={version}"]


def _compiler(name: str, variable: str) -> str:
    path = shutil.which(os.environ.get(variable, name))
    if path is None:
        raise BuildError(f"{name} is not on the PATH; expected it there, or its path in {variable}")
    return path


def onnxruntime_headers() -> Path:
    """Where CMake found the headers of onnxruntime, or what the variable GRADFUSE_ORT_INCLUDE_DIR says."""
    given = os.environ.get("GRADFUSE_ORT_INCLUDE_DIR")
    if given:
        return Path(given)
    for cache in sorted(CPP_EXT.parent.glob("build/*/CMakeCache.txt")):
        found = re.search(r"^GRADFUSE_ORT_INCLUDE_DIR:PATH=(.+)$", cache.read_text(encoding="utf-8"), re.MULTILINE)
        if found and Path(found[1]).is_dir():
            return Path(found[1])
    folder = BUILD / "headers"
    script = CPP_EXT / "tools" / "fetch_headers.py"
    result = subprocess.run(
        [sys.executable, script, "onnxruntime", folder], capture_output=True, text=True, check=False
    )
    if result.returncode != 0:
        raise BuildError(f"no headers of onnxruntime: {result.stderr.strip()}")
    return Path(result.stdout.strip())


def _digest(sources: list[Path], command: list[str]) -> str:
    digest = hashlib.sha256("\0".join(command).encode())
    headers = (path for path in sorted(CPP_EXT.rglob("*")) if path.suffix in {".h", ".cuh"})
    for path in [*sources, *headers]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def _with_standard_headers(command: list[str], folder: Path) -> list[str]:
    """Return a command that compiles with the headers that most sources read, once for all: that takes a quarter."""
    if Path(command[0]).name == "nvcc":
        return command
    header = folder / "standard.h"
    header.write_text("".join(f"#include <{name}>\n" for name in _STANDARD), encoding="utf-8")
    # clang reads the header itself.
    _run([*command, "-x", "c++-header", str(header), "-o", f"{header}.gch"])
    return [*command, "-include", str(header)]


def _compile(command: list[str], source: Path, folder: Path) -> Path:
    # Two sources of an op differ in their folders only.
    target = folder / f"{source.parent.name}_{source.name}.o"
    options = ["-x", "c++"] if source.suffix == ".cu" and Path(command[0]).name != "nvcc" else []
    if any(option.startswith("-fsanitize") for option in command) and source in _capi():
        options.append("-O0")  # little work, and half the time to compile
    _run([*command, *options, "-c", str(source), "-o", str(target)])
    return target


def _link(variant: str, command: list[str], objects: list[Path], library: Path) -> None:
    if variant == "cuda":
        options = ["-cudart", "static"]
    elif variant == "cuda-ort":
        options = ["-cudart", "static", "-Xlinker", f"--version-script={CPP_EXT / 'exports.map'}"]
    elif variant == "simt-ort":
        options = ["-Wl,--no-undefined", f"-Wl,--version-script={CPP_EXT / 'tests/simt/exports.map'}"]
    else:
        options = ["-Wl,--no-undefined"] if variant == "simt" else []
    unfinished = library.with_suffix(".unfinished")
    _run([*command, "-shared", *map(str, objects), *options, "-o", str(unfinished)])
    unfinished.replace(library)


def _run(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise BuildError(f"{' '.join(command)}\n{result.stderr}")


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Test processes side by side build a library once."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def main() -> int:
    if len(sys.argv) not in (2, 3):
        print(__doc__, file=sys.stderr)
        return 2
    try:
        print(build(*sys.argv[1:]))
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
