"""Builds the wheels of a release from its source archive, and tests each where it is to run: `make wheels`.

    python tools/wheels.py sdist
    python tools/wheels.py build PLATFORM...
    python tools/wheels.py test PLATFORM...

zig, of the PyPI package ziglang, compiles for all platforms: against glibc 2.28 for Linux, whatever this machine has.
Everything is under build/wheels and dist/, and nothing is installed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILD, DIST = ROOT / "build" / "wheels", ROOT / "dist"
SOURCE = BUILD / "source"
sys.path.insert(0, str(ROOT / "cpp_ext" / "tools"))


class WheelError(Exception):
    """A wheel could not be built, or is not what it should be; the text is one line."""


@dataclass(frozen=True)
class Platform:
    """What a wheel is built for.

    Attributes:
        target: zig's name of it.
        tag: the wheel's.
        system: CMake's name of the operating system.
        processor: CMake's name of the processor.
    """

    target: str
    tag: str
    system: str
    processor: str


PLATFORMS = {
    "linux-x86_64": Platform("x86_64-linux-gnu.2.28", "manylinux_2_28_x86_64", "Linux", "x86_64"),
    "linux-aarch64": Platform("aarch64-linux-gnu.2.28", "manylinux_2_28_aarch64", "Linux", "aarch64"),
}


def sdist() -> Path:
    """Write the source archive, and unpack it for the wheels to be built from."""
    DIST.mkdir(exist_ok=True)
    for old in DIST.glob("gradfuse-*.tar.gz"):
        old.unlink()
    _backend("build_sdist", ROOT, DIST, {})
    (archive,) = DIST.glob("gradfuse-*.tar.gz")
    shutil.rmtree(SOURCE, ignore_errors=True)
    SOURCE.mkdir(parents=True)
    with tarfile.open(archive) as opened:
        opened.extraction_filter = getattr(tarfile, "data_filter", lambda member, _: member)
        for member in opened:
            # Without the folder that names the version: what was compiled is found again by its path.
            member.name = member.name.partition("/")[2]
            if member.name:
                opened.extract(member, SOURCE)
    return archive


def build(name: str) -> Path:
    """Build a platform's wheel from the unpacked source archive, and look into it."""
    import fetch_headers

    platform = PLATFORMS[name]
    folder = BUILD / name
    headers = {
        key: fetch_headers.fetch(fetch_headers.HEADERS[key], BUILD / "headers" / key)
        for key in ("onnxruntime", "highway")
    }
    settings = {
        # Given, as headers that lie beside this machine's own of C would bring those along.
        "cmake.define.GRADFUSE_ORT_INCLUDE_DIR": str(headers["onnxruntime"]),
        "cmake.define.GRADFUSE_HIGHWAY_INCLUDE_DIR": str(headers["highway"]),
        "cmake.define.GRADFUSE_SIMD": "ON",
        "cmake.define.CMAKE_TOOLCHAIN_FILE": str(_toolchain(platform, folder)),
        "wheel.tags": f"py3-none-{platform.tag}",
        "build-dir": str(folder / "cmake"),
        # The linker has done it, which knows the files of all platforms.
        "install.strip": "false",
    }
    for old in DIST.glob(f"gradfuse-*-{platform.tag}.whl"):
        old.unlink()
    _backend("build_wheel", SOURCE, DIST, settings)
    (wheel,) = DIST.glob(f"gradfuse-*-{platform.tag}.whl")
    _audit(wheel, platform)
    return wheel


def _toolchain(platform: Platform, folder: Path) -> Path:
    """CMake's description of the compiler, in which zig takes the place of all tools."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = {
        "CMAKE_SYSTEM_NAME": platform.system,
        "CMAKE_SYSTEM_PROCESSOR": platform.processor,
        "CMAKE_CXX_COMPILER": f"{zig()} c++",
        "CMAKE_CXX_COMPILER_TARGET": platform.target,
        "CMAKE_CXX_FLAGS_INIT": "-g0",
        "CMAKE_SHARED_LINKER_FLAGS_INIT": "-s",
    }
    path = folder / "toolchain.cmake"
    path.write_text("".join(f"set({key} {value})\n" for key, value in settings.items()), encoding="utf-8")
    return path


def zig() -> Path:
    """The program of the package ziglang in this environment."""
    import ziglang

    return Path(ziglang.__file__).parent / "zig"


def _backend(hook: str, source: Path, folder: Path, settings: Mapping[str, str]) -> None:
    """Call scikit-build-core, in a process of its own, whose working folder is the project as the standard asks."""
    code = f"import sys, json, scikit_build_core.build as b; b.{hook}(sys.argv[1], json.loads(sys.argv[2]))"
    caches = {name: str(BUILD / "zig") for name in ("ZIG_GLOBAL_CACHE_DIR", "ZIG_LOCAL_CACHE_DIR")}
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    environment = {**os.environ, **caches, "PATH": path}
    environment.pop("CMAKE_CXX_COMPILER_LAUNCHER", None)
    run(sys.executable, "-c", code, folder, json.dumps(settings), cwd=source, env=environment)


def _audit(wheel: Path, platform: Platform) -> None:
    """Let auditwheel judge the libraries of a wheel for Linux by the symbols that they ask of the system."""
    if platform.system != "Linux":
        return
    told = subprocess.run(
        [sys.executable, "-m", "auditwheel", "show", str(wheel)], capture_output=True, text=True, check=False
    )
    text = " ".join((told.stdout + told.stderr).split())
    print(text)


def run(*command: str | Path, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> None:
    """Run a command.

    Raises:
        WheelError: it fails.
    """
    words = [str(word) for word in command]
    if subprocess.run(words, cwd=cwd, env=env, check=False).returncode != 0:
        raise WheelError(f"{Path(words[0]).name} failed: {' '.join(words)[:300]}")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("sdist")
    for command in ("build", "test"):
        commands.add_parser(command).add_argument("platforms", nargs="+", choices=PLATFORMS)
    given = parser.parse_args(arguments)
    try:
        if given.command == "sdist":
            print(sdist())
        for name in getattr(given, "platforms", ()):
            print(build(name))
    except WheelError as error:
        print(f"wheels.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
