"""The report about the installation."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import re
from pathlib import Path

import pytest

import gradfuse
from gradfuse import library

ROOT = Path(__file__).parents[2]
SOURCES = [
    path
    for folder in ("cpp_ext/capi", "cpp_ext/include", "cpp_ext/kernels", "cpp_ext/ort", "plugin")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in (".cc", ".cu", ".h", ".py") and path.name != "environment.py"
]
VARIABLES = {name for path in SOURCES for name in re.findall(r'"(GRADFUSE_[A-Z_]+)"', path.read_text("utf-8"))}


def test_it_is_data_for_json() -> None:
    facts = gradfuse.info()
    assert json.loads(json.dumps(facts)) == facts


def test_it_tells_the_versions_that_are_installed() -> None:
    facts = gradfuse.info()
    assert facts["gradfuse"] == gradfuse.__version__
    assert platform.python_version() in facts["python"]
    for name in ("onnx", "onnx-ir", "onnxruntime", "torch"):
        assert facts["packages"][name] == importlib.metadata.version(name)


def test_the_library_loads() -> None:
    facts = gradfuse.info()["library"]
    assert facts.pop("simd") in ("scalar", "avx2", "avx512", "avx512_bf16", "neon")
    assert facts == {"path": gradfuse.get_library_path(), "loads": True, "error": None}


def test_a_missing_library_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradfuse, "__path__", [str(tmp_path)])
    expected = {"path": None, "loads": False, "error": "not installed", "simd": None}
    assert gradfuse.info()["library"] == expected


def test_a_broken_library_is_told_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "lib" / library.LIBRARY_NAME
    broken.parent.mkdir()
    broken.write_text("no library")
    monkeypatch.setattr(gradfuse, "__path__", [str(tmp_path)])
    facts = gradfuse.info()["library"]
    assert facts["path"] == str(broken) and not facts["loads"]
    assert facts["error"] and "\n" not in facts["error"]


def test_the_processor_is_described() -> None:
    cpu = gradfuse.info()["cpu"]
    assert cpu["model"] and 1 <= cpu["usable"] <= cpu["cores"]


def test_every_variable_that_gradfuse_reads_is_shown_and_documented(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(VARIABLES) > 1
    documented = "".join(path.read_text("utf-8") for path in (ROOT / "docs").glob("*.md"))
    for name in VARIABLES:
        monkeypatch.setenv(name, "some value")
        assert gradfuse.info()["variables"][name] == "some value"
        assert f"`{name}`" in documented
