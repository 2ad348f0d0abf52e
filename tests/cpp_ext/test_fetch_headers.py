from __future__ import annotations

import dataclasses
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


@pytest.fixture
def fetch_from(fetcher: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes a release archive the only way to headers: fetch_from("highway", address)."""
    monkeypatch.setattr(fetcher, "own_sources", lambda *_: [])

    def change(name: str, address: str) -> None:
        monkeypatch.setitem(fetcher.HEADERS, name, dataclasses.replace(fetcher.HEADERS[name], archive=address))

    return change


@pytest.mark.parametrize(
    "name, inside, expected",
    [
        ("onnxruntime", ("include/onnxruntime_c_api.h", "lib/libonnxruntime.so"), "onnxruntime_c_api.h"),
        ("highway", ("hwy/highway.h", "hwy/ops/x86_128-inl.h", "docs/highway.md"), "hwy/highway.h"),
    ],
)
def test_release_archive_stands_in_where_apt_has_nothing(
    fetcher: Any,
    fetch_from: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    inside: tuple[str, ...],
    expected: str,
) -> None:
    fetch_from(name, release_archive(tmp_path, *(f"{name}-1.2.3/{path}" for path in inside)))
    destination = tmp_path / "headers"
    for _ in range(2):  # what is there is not fetched again
        assert fetcher.main([name, str(destination)]) == 0
        folder = Path(capsys.readouterr().out.strip())
        assert (folder / expected).is_file()
        fetch_from(name, "file:///nowhere")
    files = {path.relative_to(folder).as_posix() for path in destination.rglob("*") if path.is_file()}
    assert files == {path.removeprefix("include/") for path in inside[:-1]}


def test_without_any_way_the_reasons_are_told_and_nothing_is_left(
    fetcher: Any, fetch_from: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fetch_from("onnxruntime", release_archive(tmp_path, "ort-1.2.3/include/other.h"))
    assert fetcher.main(["onnxruntime", str(tmp_path / "headers")]) == 1
    message = capsys.readouterr().err
    assert "Install libonnxruntime-dev" in message
    assert "no apt source" in message or "no apt-get" in message
    assert "what was unpacked has no onnxruntime_c_api.h" in message
    assert not list(tmp_path.glob("headers*"))
    assert fetcher.main([]) == 2
    assert fetcher.main(["another", str(tmp_path / "headers")]) == 2
