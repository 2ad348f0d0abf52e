"""Finding the compiled library, and registering it."""

from __future__ import annotations

from pathlib import Path

import onnxruntime
import pytest
from small_models import cross_entropy

import gradfuse
from gradfuse import library


def test_path_is_an_existing_file() -> None:
    path = Path(gradfuse.get_library_path())
    assert path.is_absolute() and path.is_file() and path.name == library.LIBRARY_NAME


def test_names_of_the_execution_provider() -> None:
    assert gradfuse.get_ep_names() == [gradfuse.get_ep_name()] == ["GradfuseCudaExecutionProvider"]


def test_register_makes_the_operators_known() -> None:
    model = gradfuse.fuse(cross_entropy(), bodies=False).model
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    content = model.SerializeToString()
    with pytest.raises(Exception, match="CrossEntropyLossGrad"):
        onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    gradfuse.register(options)
    onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])


def test_every_folder_of_the_package_is_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # As in an editable install, where the built files are not beside the sources.
    built = tmp_path / "built" / "lib" / library.LIBRARY_NAME
    built.parent.mkdir(parents=True)
    built.touch()
    monkeypatch.setattr(gradfuse, "__path__", [str(tmp_path / "sources"), str(tmp_path / "built")])
    assert gradfuse.get_library_path() == str(built)


def test_missing_library_is_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradfuse, "__path__", [str(tmp_path)])
    with pytest.raises(gradfuse.GradfuseError, match=r"^libgradfuse\.so is not in .*; expected an installation .*$"):
        gradfuse.register(onnxruntime.SessionOptions())


def test_the_c_api_is_found_or_missed_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (Path(gradfuse.get_include()) / "acl" / "acl.h").is_file()
    assert Path(gradfuse.get_aclnn_library_path()).name == library.ACLNN_LIBRARY_NAME
    monkeypatch.setattr(gradfuse, "__path__", [str(tmp_path)])
    names = {gradfuse.get_include: "include", gradfuse.get_aclnn_library_path: r"libgradfuse_aclnn\.so"}
    for function, name in names.items():
        with pytest.raises(gradfuse.GradfuseError, match=rf"^{name} is not in .*; expected an installation .*$"):
            function()


def test_library_that_onnxruntime_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "lib" / library.LIBRARY_NAME
    broken.parent.mkdir()
    broken.write_text("no library")
    monkeypatch.setattr(gradfuse, "__path__", [str(tmp_path)])
    with pytest.raises(gradfuse.GradfuseError, match=r"^register: onnxruntime refuses [^\n]*$"):
        gradfuse.register(onnxruntime.SessionOptions())


def test_register_takes_session_options_only() -> None:
    with pytest.raises(gradfuse.ArgumentError, match=r"session_options is str; expected onnxruntime\.SessionOptions"):
        gradfuse.register("options")
