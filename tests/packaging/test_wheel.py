"""What a wheel and a source archive hold."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import gradfuse

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[2]
HEADERS = ROOT / "cpp_ext" / "capi" / "include"


def build(kind: str, folder: Path) -> Path:
    """Build a wheel or sdist with the project's own backend; object files of an earlier build are used again."""
    code = f"import sys, scikit_build_core.build as backend; backend.build_{kind}(sys.argv[1], {{}})"
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    result = subprocess.run(
        [sys.executable, "-c", code, str(folder)],
        cwd=ROOT,
        env={**os.environ, "PATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert result.returncode == 0, result.stdout[-4000:]
    (built,) = folder.iterdir()
    return built


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", tmp_path_factory.mktemp("wheel"))


def test_one_wheel_serves_every_python(wheel: Path) -> None:
    assert re.fullmatch(rf"gradfuse-{re.escape(gradfuse.__version__)}-py3-none-linux_\w+\.whl", wheel.name)


def test_the_only_top_level_name_is_gradfuse(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {"gradfuse", f"gradfuse-{gradfuse.__version__}.dist-info"}


def test_every_source_file_of_the_package_is_in_it(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    folders = {"plugin/gradfuse": "gradfuse", "custom_ops": "gradfuse/custom_ops", "passes": "gradfuse/passes"}
    for folder, target in folders.items():
        for path in (ROOT / folder).rglob("*.py"):
            assert f"{target}/{path.relative_to(ROOT / folder)}" in names
    assert "gradfuse/py.typed" in names
    assert any(name.endswith("/LICENSE") for name in names)


def test_packages_are_real_files_and_the_libraries_are_the_only_binaries(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    for entry in archive.infolist():
        # The high half of the attributes is the Unix mode; 0o120000 is a link.
        assert (entry.external_attr >> 16) & 0o170000 in (0, 0o100000), entry.filename
    others = {n for n in archive.namelist() if not n.endswith((".py", ".typed")) and ".dist-info/" not in n}
    headers = {f"gradfuse/include/{path.relative_to(HEADERS)}" for path in HEADERS.rglob("*.h")}
    assert others == headers | {
        "gradfuse/lib/libgradfuse.so",
        "gradfuse/lib/libgradfuse_aclnn.so",
        "gradfuse/lib/pkgconfig/gradfuse_aclnn.pc",
        "gradfuse/lib/cmake/gradfuse_aclnn/gradfuse_aclnnConfig.cmake",
    }


def test_metadata_names_no_onnxruntime_and_no_torch_as_needed(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
    lines = archive.read(name).decode().splitlines()
    needed = [line for line in lines if line.startswith("Requires-Dist:") and "extra ==" not in line]
    assert needed and not [line for line in needed if re.search("torch|onnxruntime|onnxscript", line)]
    assert "License-Expression: Apache-2.0" in lines


INSTALLED = """
import sys
# Without the finder of an editable install, which would come first.
sys.meta_path = [finder for finder in sys.meta_path if "editable" not in type(finder).__module__.lower()]
sys.path.insert(0, sys.argv[1])
import ctypes, gradfuse, gradfuse.custom_ops, gradfuse.passes
assert gradfuse.__file__.startswith(sys.argv[1]) and gradfuse.get_library_path().startswith(sys.argv[1])
ctypes.CDLL(gradfuse.get_library_path()).RegisterCustomOps
assert gradfuse.get_aclnn_library_path().startswith(sys.argv[1]) and gradfuse.get_include().startswith(sys.argv[1])
assert ctypes.CDLL(gradfuse.get_aclnn_library_path()).aclInit(None) == 0
"""


def test_the_installed_wheel_works(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    subprocess.run([sys.executable, "-c", INSTALLED, str(tmp_path)], check=True, cwd=tmp_path)


def test_the_source_archive_holds_what_a_build_needs(tmp_path: Path) -> None:
    (tmp_path / "built").mkdir()
    with tarfile.open(build("sdist", tmp_path / "built")) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
        archive.extractall(tmp_path)
    (source,) = tmp_path.glob("gradfuse-*")
    for name in ("CMakeLists.txt", "pyproject.toml", "LICENSE", "README.md", "cpp_ext/tools/fetch_headers.py"):
        assert (source / name).is_file()
    for folder in ("", "passes", "custom_ops", "torch"):
        for path in (ROOT / "plugin" / "gradfuse" / folder).glob("*.py"):
            assert (source / "plugin" / "gradfuse" / folder / path.name).is_file()
    assert any(name.startswith("cpp_ext/kernels/") for name in names)
    assert not [name for name in names if name.startswith((".ci", ".venv", "build/", "dist/")) or name.endswith(".so")]
