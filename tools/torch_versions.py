"""Tests the export of training steps with other versions of PyTorch: `make test-torch-versions`.

    python tools/torch_versions.py VERSION...

PyPI has most versions for x86-64 with CUDA only: 0.5 to 0.9 gigabytes each, linked to CUDA. They compute on the
CPU as well once those libraries load, so this puts empty ones beside them, whose functions all fail. All else comes
from the environment that runs this.
"""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
import venv
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / ".venv-torch"
TESTS = (
    "plugin/test_torch_private",
    "export/test_translation",
    "export/test_decomposing",
    "export/test_watching",
    "export/test_dropout",
    "export/test_export_training_step",
    "export/test_own_gradients",
    "export/test_checkpoints",
    "export/test_explaining",
    "export/test_empty_axes",
)
OF_CUDA = re.compile(r"(__)?(cu|nccl|nvml|nvrtc|nvshmem)")
NO_DEVICE = 100
"""cudaErrorNoDevice."""


def environment(version: str) -> Path:
    """The Python of an environment with that PyTorch, beside the packages of this one."""
    folder = FOLDER / version
    python = folder / "bin" / "python"
    if (folder / ".installed").exists():
        return python
    venv.create(folder, clear=True, symlinks=True)
    own, theirs = sysconfig.get_path("purelib"), sysconfig.get_path("purelib", vars={"base": str(folder)})
    Path(theirs, "beside.pth").write_text(f"import site; site.addsitedir({own!r})\n", encoding="utf-8")
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--python", str(python)]
    subprocess.run([*command, "install", "--no-deps", "--no-cache-dir", f"torch=={version}"], check=True)
    stand_in(Path(theirs, "torch", "lib"))
    (folder / ".installed").touch()
    return python


def stand_in(folder: Path) -> None:
    """Write the libraries that those in a folder are linked to and that this machine does not have."""
    libraries = sorted(path for path in folder.glob("lib*.so*") if path.is_file())
    needed = {name for path in libraries for name in re.findall(r"NEEDED.*\[(.*)\]", _said("readelf", "-dW", path))}
    known = _said("/sbin/ldconfig", "-p") + " ".join(path.name for path in libraries)
    versions: defaultdict[str, set[str]] = defaultdict(set)
    functions: defaultdict[str, set[str]] = defaultdict(set)
    defined = {name for path in libraries for name in re.findall(r" [TDBRVWi] ([^\s@]+)", _said("nm", "-D", path))}
    for path in libraries:
        for file, version in _needed_versions(path):
            versions[file].add(version)
        for name in re.findall(r" U (\S+)$", _said("nm", "-D", path), re.MULTILINE):
            function, _, version = name.partition("@")
            if version or (function not in defined and OF_CUDA.match(function)):
                functions[version.lstrip("@")].add(function)
    missing = [name for name in sorted(needed) if name not in known and not name.startswith("ld-linux")]
    for name in missing:
        found = {version: functions[version] for version in sorted(versions[name])}
        # Whose those are is not said: the first library has them.
        _write(folder / name, found, functions[""] if name == missing[0] else set())


def _needed_versions(library: Path) -> Iterator[tuple[str, str]]:
    """The versions of symbols that a library asks for, each with the file that has to have it."""
    file = ""
    for line in _said("readelf", "-VW", library).splitlines():
        if found := re.search(r"File: (\S+)", line):
            file = found[1]
        elif file and (found := re.search(r"Name: (\S+) +Flags: \S+ +Version", line)):
            yield file, found[1]


def _write(library: Path, functions: dict[str, set[str]], more: set[str]) -> None:
    """Compile a library of functions that say that there is no device, by the versions of their symbols, or without."""
    names = sorted(more.union(*functions.values()))
    # The library's constructors call the functions that begin with underscores.
    code = "".join(f"long {name}(void) {{ return {0 if name.startswith('__') else NO_DEVICE}; }}\n" for name in names)
    script = library.with_suffix(".map")
    script.write_text(
        "".join(f"{version} {{ {''.join(f'{name};' for name in group)} }};\n" for version, group in functions.items())
    )
    command = ["cc", "-w", "-fno-builtin", "-shared", "-fPIC", "-x", "c", "-", "-o", str(library)]
    command += [f"-Wl,-soname,{library.name}", *([f"-Wl,--version-script={script}"] if functions else [])]
    subprocess.run(command, input=code, text=True, check=True)
    script.unlink()


def _said(*command: str | Path) -> str:
    return subprocess.run([str(word) for word in command], capture_output=True, text=True, check=True).stdout


def main(versions: Sequence[str]) -> int:
    if not versions:
        print(__doc__, file=sys.stderr)
        return 2
    failed = []
    for version in versions:
        python = environment(version)
        told = "import torch; print('PyTorch', torch.__version__)"
        tests = [f"tests/{name}.py" for name in TESTS]
        for options in (["-c", told], ["-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]):
            if subprocess.run([str(python), *options], cwd=ROOT, check=False).returncode != 0:
                failed.append(version)
                break
    if failed:
        print(f"torch_versions.py: not passed with PyTorch {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
