"""How the build gets onnxruntime's headers, and what it says where it cannot."""

from __future__ import annotations

import dataclasses
import hashlib
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


ONE_LINE = """\
# deb http://commented/debian {suite} main
deb [arch=amd64 signed-by=/keys/a.gpg] http://one/{name}/debian {suite} main contrib  # trailing
deb http://security/debian bookworm-security main
deb http://other/linux nodistro main
"""
DEB822 = """\
Types: deb deb-src
URIs: http://two/debian http://three/debian/{name}
Suites: {suite} bookworm-updates
Components: main
Signed-By:
 -----BEGIN PGP PUBLIC KEY BLOCK-----
 .
 AAAA
 -----END PGP PUBLIC KEY BLOCK-----

Types: deb
URIs: http://off/debian
Suites: {suite}
Components: main
Enabled: no
"""


@pytest.mark.parametrize("name", ["bookworm", "stable", "testing", "sid"])
def test_sources_in_both_formats_keep_all_but_their_suite(fetcher: Any, tmp_path: Path, name: str) -> None:
    etc, written = tmp_path / "apt", tmp_path / "written"
    parts = etc / "sources.list.d"
    parts.mkdir(parents=True)
    (etc / "sources.list").write_text(ONE_LINE.format(suite=name, name=name))
    (parts / "two.sources").write_text(DEB822.format(suite=name, name=name))
    (parts / "other.list").write_text("deb http://other/linux cloud-sdk-bookworm main\n")
    (parts / "ignored.list.bak").write_text(f"deb http://ignored/debian {name} main\n")
    fetcher.write_sources(etc, "bookworm", "forky", written)
    assert {path.name: path.read_text() for path in written.iterdir()} == {
        "sources.list": ONE_LINE.format(suite="forky", name=name),
        "two.sources": DEB822.format(suite="forky", name=name),
    }


def test_without_sources_of_the_distribution_apt_is_not_asked(fetcher: Any, tmp_path: Path) -> None:
    with pytest.raises(fetcher.FetchError, match="no apt source of a known distribution"):
        fetcher.write_sources(tmp_path / "nowhere", "bookworm", "forky", tmp_path / "written")


@pytest.fixture
def fetch_from(fetcher: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes a release archive the only way to headers: fetch_from("highway", address)."""
    monkeypatch.setattr(fetcher, "SUITES", {})

    def change(name: str, address: str, sha256: str | None = None) -> None:
        path = Path(address.removeprefix("file://"))
        if sha256 is None:
            sha256 = hashlib.sha256(path.read_bytes() if path.is_file() else b"").hexdigest()
        headers = dataclasses.replace(fetcher.HEADERS[name], archive=address, sha256=sha256)
        monkeypatch.setitem(fetcher.HEADERS, name, headers)

    return change


@pytest.mark.parametrize(
    "name, inside, expected",
    [
        ("onnxruntime", ("include/onnxruntime_c_api.h", "lib/libonnxruntime.so"), "onnxruntime_c_api.h"),
        ("highway", ("hwy/highway.h", "hwy/ops/x86_128-inl.h", "docs/highway.md"), "hwy/highway.h"),
    ],
)
def test_release_archive_needs_no_apt(
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


def test_an_archive_with_another_hash_is_not_unpacked(
    fetcher: Any, fetch_from: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fetch_from("highway", release_archive(tmp_path, "highway-1.2.3/hwy/highway.h"), sha256="0" * 64)
    assert fetcher.main(["highway", str(tmp_path / "headers")]) == 1
    assert f"expected {'0' * 64}" in capsys.readouterr().err
    assert not list(tmp_path.glob("headers*"))


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
