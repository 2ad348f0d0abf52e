"""The import package: light to import, and every public name there."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

import gradfuse

HEAVY = ("torch", "onnx", "onnx_ir", "onnxruntime", "onnxscript", "numpy", "ml_dtypes", "click", "rich")


def modules_after(statement: str) -> set[str]:
    code = f"import sys\n{statement}\nprint(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(result.stdout.split())


def test_import_brings_in_nothing_heavy() -> None:
    assert not modules_after("import gradfuse") & set(HEAVY)


def test_library_path_and_info_need_only_the_standard_library() -> None:
    assert not modules_after("import gradfuse; gradfuse.register; gradfuse.info()") & set(HEAVY)


@pytest.mark.parametrize("name", gradfuse.__all__)
def test_public_name_resolves_and_is_listed(name: str) -> None:
    assert getattr(gradfuse, name) is not None
    assert name in dir(gradfuse)


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'gradfuse' has no attribute 'fusee'"):
        _ = gradfuse.fusee


@pytest.mark.parametrize("name", ["ArgumentError", "CheckError", "ExportError", "ModelError"])
def test_every_error_is_a_gradfuse_error(name: str) -> None:
    assert issubclass(getattr(gradfuse, name), gradfuse.GradfuseError)


def test_bad_arguments_are_value_errors() -> None:
    assert issubclass(gradfuse.ArgumentError, ValueError)


@pytest.mark.parametrize("name", ["fuse", "explain", "check", "register", "info"])
def test_no_module_hides_a_function_of_its_name(name: str) -> None:
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(f"gradfuse.{name}")
