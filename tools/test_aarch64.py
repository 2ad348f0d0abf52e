"""Runs the tests of the kernels on an emulated AArch64, whose loops are those of NEON: `make test-aarch64`.

    python tools/test_aarch64.py [ARGUMENTS OF PYTEST]

Debian's packages qemu-user and g++-aarch64-linux-gnu emulate it and compile for it. A Python of that processor, with
what the tests import, is unpacked under build/ from Debian's packages and from wheels, and nothing is installed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pip

from gradfuse.custom_ops import OPS

ROOT = Path(__file__).resolve().parents[1]
LIBRARIES, BUILD = ROOT / "build" / "aarch64", ROOT / "build" / "aarch64-emulated"
SYSTEM, SITE = BUILD / "system", BUILD / "site"
TOOLS = {"qemu-aarch64": "qemu-user", "aarch64-linux-gnu-g++": "g++-aarch64-linux-gnu", "apt-get": "apt"}
EMULATOR = ["qemu-aarch64", "-cpu", "cortex-a76", "-L", str(SYSTEM)]
# PyTorch 2.13 for this processor asks for CUDA, and onnxruntime 1.31 does not start in qemu 7. These versions run.
PINNED = (
    "torch==2.7.1",
    "onnxruntime==1.22.1",
    "onnxscript==0.7.2",
    "onnx-ir==1.1.0",
    "ml_dtypes",
    "click",
    "rich",
    "hypothesis",
    "pytest",
)
TESTS = ("simd", "kernels", *(operator.stem for operator in OPS.values()))
# Not in the emulation: the kernels of CUDA, and what starts another Python.
LEFT_OUT = "not simt and not variable"
# A compiler for programs that start in the emulator; the address sanitizer does not.
COMPILER = """#!/usr/bin/env bash
options=()
while [ $# -gt 0 ]; do
    case $1 in
        -fsanitize=address) ;;
        -o) program=$2; shift ;;
        *) options+=("$1") ;;
    esac
    shift
done
aarch64-linux-gnu-g++ "${options[@]}" -static -o "$program.aarch64" || exit
printf '#!/bin/sh\\nexec qemu-aarch64 -cpu cortex-a76 %s "$@"\\n' "$program.aarch64" > "$program"
chmod +x "$program"
"""


def main() -> int:
    missing = [package for tool, package in TOOLS.items() if shutil.which(tool) is None]
    if missing:
        print(f"not found: the packages {' '.join(missing)} of Debian", file=sys.stderr)
        return 1
    python = unpack_python()
    unpack_wheels(python)
    compile_libraries()
    paths = os.pathsep.join(map(str, (BUILD / "plugin", SITE, ROOT / "tests", ROOT)))
    variables = {"PYTHONPATH": paths, "CXX": str(BUILD / "c++"), "PYTHONDONTWRITEBYTECODE": "1"}
    settings = [word for name, value in variables.items() for word in ("-E", f"{name}={value}")]
    tests = [f"tests/cpp_ext/test_{name}.py" for name in TESTS]
    pytest = ["-m", "pytest", "-p", "no:cacheprovider", "-o", "addopts=", "-q", "-k", LEFT_OUT, *tests, *sys.argv[1:]]
    return subprocess.run([*EMULATOR, *settings, str(python), *pytest], cwd=ROOT).returncode


def unpack_python() -> Path:
    """Debian's Python of that processor and all that it needs, by an apt of its own that knows no installed package."""
    apt = BUILD / "apt"
    if not SYSTEM.is_dir():
        for folder in ("lists/partial", "archives/partial"):
            (apt / folder).mkdir(parents=True, exist_ok=True)
        (apt / "status").touch()
        options = {
            "APT::Architecture": "arm64",
            "APT::Architectures": "arm64",
            "Dir::State": apt,
            "Dir::State::status": apt / "status",
            "Dir::Cache": apt,
            "Debug::NoLocking": "1",
        }
        get = ["apt-get", "-qq", *(word for name, value in options.items() for word in ("-o", f"{name}={value}"))]
        run(*get, "update")
        run(*get, "--yes", "--no-install-recommends", "--download-only", "install", "python3", "libstdc++6", "libgomp1")
        unpacked = BUILD / "unpacked"
        for package in sorted((apt / "archives").glob("*.deb")):
            run("dpkg-deb", "--extract", package, unpacked)
        unpacked.rename(SYSTEM)
    return (SYSTEM / "usr" / "bin" / "python3").resolve()


def unpack_wheels(python: Path) -> None:
    if SITE.is_dir():
        return
    unpacked = BUILD / "wheels"
    # Emulated, as what pip picks depends on the processor that it runs on.
    here = Path(pip.__file__).parent
    run(*EMULATOR, python, here, "--quiet", "--disable-pip-version-check", "install", "--target", unpacked, *PINNED)
    unpacked.rename(SITE)


def compile_libraries() -> None:
    """The libraries of this source, and beside them the Python package, as if built there."""
    cross = {"SYSTEM_NAME": "Linux", "SYSTEM_PROCESSOR": "aarch64", "CXX_COMPILER": "aarch64-linux-gnu-g++"}
    settings = [f"-DCMAKE_{name}={value}" for name, value in cross.items()]
    settings += [f"-DPython3_EXECUTABLE={sys.executable}", "-DGRADFUSE_SIMD=ON"]
    run("cmake", "-G", "Ninja", "-S", ROOT, "-B", LIBRARIES, *settings)
    run("cmake", "--build", LIBRARIES)
    package = BUILD / "plugin" / "gradfuse"
    shutil.rmtree(package, ignore_errors=True)
    shutil.copytree(ROOT / "plugin" / "gradfuse", package, ignore=shutil.ignore_patterns("lib", "__pycache__"))
    (package / "lib").mkdir()
    for library in LIBRARIES.glob("libgradfuse*.so"):
        shutil.copy(library, package / "lib")
    compiler = BUILD / "c++"
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)


def run(*command: str | Path) -> None:
    subprocess.run([str(word) for word in command], check=True)


if __name__ == "__main__":
    sys.exit(main())
