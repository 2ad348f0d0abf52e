from __future__ import annotations

import importlib.util
import sys
import tarfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "cpp_ext" / "tools" / "fetch_headers.py"


@pytest.fixture(scope="module")
def fetcher() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fetch_headers", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["fetch_headers"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def release_archive(folder: Path, *names: str) -> str:
    """A gzipped tar file of empty files, as a URL."""
    path = folder / "release.tgz"
    with tarfile.open(path, "w:gz") as archive:
        for name in names:
            archive.addfile(tarfile.TarInfo(name))
    return path.as_uri()


def test_sources_in_both_formats(fetcher: Any, tmp_path: Path) -> None:
    etc = tmp_path / "apt"
    (etc / "sources.list.d").mkdir(parents=True)
    (etc / "sources.list").write_text(
        "# deb http://commented/debian stable main\n"
        "deb [arch=amd64 signed-by=/keys/a.gpg] http://one/debian stable main contrib  # trailing\n"
        "deb-src http://sources/debian stable main\n"
        "deb http://security/debian stable-security main\n"
        "deb http://other/linux stable extras\n"
    )
    (etc / "sources.list.d" / "two.sources").write_text(
        "Types: deb deb-src\nURIs: http://two/debian http://three/debian\nSuites: stable stable-updates\n"
        "Components: main\nSigned-By: /keys/b.gpg\n\n"
        "Types: deb\nURIs: http://off/debian\nSuites: stable\nComponents: main\nEnabled: no\n\n"
        "Types: deb\nURIs: http://inline/debian\nSuites: stable\nComponents: main\n"
        "Signed-By:\n -----BEGIN PGP PUBLIC KEY BLOCK-----\n .\n AAAA\n -----END PGP PUBLIC KEY BLOCK-----\n"
    )
    (etc / "sources.list.d" / "ignored.list.bak").write_text("deb http://ignored/debian stable main\n")
    sources = fetcher.own_sources(tmp_path, etc)
    assert [source.uri for source in sources] == [
        "http://one/debian",
        "http://two/debian",
        "http://three/debian",
        "http://inline/debian",
    ]
    assert sources[0].line("forky", "main") == "deb [signed-by=/keys/a.gpg] http://one/debian forky main"
    assert sources[1].options == {"signed-by": "/keys/b.gpg"}
    key = Path(sources[3].options["signed-by"]).read_text()
    assert key == "-----BEGIN PGP PUBLIC KEY BLOCK-----\n\nAAAA\n-----END PGP PUBLIC KEY BLOCK-----\n"


def test_release_archive_stands_in_where_apt_has_nothing(
    fetcher: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = release_archive(tmp_path, "ort-1.2.3/include/onnxruntime_c_api.h", "ort-1.2.3/lib/libonnxruntime.so")
    monkeypatch.setattr(fetcher, "own_sources", lambda *_: [])
    monkeypatch.setattr(fetcher.from_release, "__defaults__", (address,))
    destination = tmp_path / "headers"
    assert fetcher.fetch(destination) == destination / "include"
    assert [path.name for path in destination.rglob("*") if path.is_file()] == ["onnxruntime_c_api.h"]
    monkeypatch.setattr(fetcher.from_release, "__defaults__", ("file:///nowhere",))
    assert fetcher.fetch(destination) == destination / "include"  # what is there is not fetched again


def test_without_any_way_the_reasons_are_told_and_nothing_is_left(
    fetcher: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fetcher, "own_sources", lambda *_: [])
    address = release_archive(tmp_path, "ort-1.2.3/include/other.h")
    monkeypatch.setattr(fetcher.from_release, "__defaults__", (address,))
    assert fetcher.main([str(tmp_path / "headers")]) == 1
    message = capsys.readouterr().err
    assert "Install libonnxruntime-dev" in message
    assert "no apt source" in message or "no apt-get" in message
    assert "what was unpacked has no onnxruntime_c_api.h" in message
    assert not list(tmp_path.glob("headers*"))
    assert fetcher.main([]) == 2
