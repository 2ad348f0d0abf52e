#!/usr/bin/env python3
"""Puts headers that the build needs into a folder, for machines that have none installed.

Usage: fetch_headers.py onnxruntime|highway DESTINATION

No package on PyPI ships these headers. On Debian and Ubuntu they come from the distribution's package: apt unpacks it
with settings of its own, so that it needs no root and changes nothing outside DESTINATION. Elsewhere they come from the
project's release archive, whose hash is pinned here.

Prints the folder to include headers from. Only the standard library is used: CMake runs this before anything is
installed.
"""

from __future__ import annotations

import hashlib
import io
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
from dataclasses import dataclass
from pathlib import Path

# Newest first: older releases of a distribution lack a package, or have one that is too old.
SUITES = {"debian": ("forky", "sid", "trixie"), "ubuntu": ("resolute", "questing", "plucky")}
APT_SETTINGS = """
Dir::State "{work}";
Dir::State::status "{work}/status";
Dir::Cache "{work}";
Dir::Etc::sourcelist "/dev/null";
Dir::Etc::sourceparts "{work}/sources";
Dir::Etc::preferences "/dev/null";
Dir::Etc::preferencesparts "/dev/null";
APT::Sandbox::User "";
Acquire::Languages "none";
Acquire::Retries "2";
// A container's hooks clean the system's own caches after an update, which a user may not.
#clear APT::Update::Pre-Invoke;
#clear APT::Update::Post-Invoke;
#clear APT::Update::Post-Invoke-Success;
"""


class FetchError(Exception):
    """One way of getting the headers failed."""


@dataclass(frozen=True)
class Headers:
    """Headers that can be fetched.

    Attributes:
        header: the path of one of them, as it is included.
        archive: address of a release archive that holds them.
        sha256: the archive's hash.
        folder: the name of the folder in the archive that holds them.
        package: the package of Debian and Ubuntu that holds them.
    """

    header: str
    archive: str
    sha256: str
    folder: str
    package: str


HEADERS = {
    "onnxruntime": Headers(
        header="onnxruntime_c_api.h",
        archive="https://github.com/microsoft/onnxruntime/releases/download/v1.23.2/onnxruntime-linux-x64-1.23.2.tgz",
        sha256="1fa4dcaef22f6f7d5cd81b28c2800414350c10116f5fdd46a2160082551c5f9b",
        folder="include",
        package="libonnxruntime-dev",
    ),
    "highway": Headers(
        header="hwy/highway.h",
        archive="https://github.com/google/highway/archive/refs/tags/1.3.0.tar.gz",
        sha256="07b3c1ba2c1096878a85a31a5b9b3757427af963b1141ca904db2f9f4afe0bc2",
        folder="hwy",
        package="libhwy-dev",
    ),
}


def from_archive(headers: Headers, destination: Path) -> None:
    """Unpacks the headers of the release archive."""
    with urllib.request.urlopen(headers.archive, timeout=20) as response:
        content = response.read()
    found = hashlib.sha256(content).hexdigest()
    if found != headers.sha256:
        raise FetchError(f"{headers.archive} has the SHA-256 {found}; expected {headers.sha256}")
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", lambda member, _: member)
        archive.extractall(destination, [member for member in archive if f"/{headers.folder}/" in member.name])


def from_apt(headers: Headers, destination: Path) -> None:
    """Unpacks the distribution's package, of the newest suite that the machine's own mirrors have it in."""
    if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
        raise FetchError("this machine has no apt-get")
    try:
        release = platform.freedesktop_os_release()
    except OSError:
        release = {}
    family = [release.get("ID", ""), *release.get("ID_LIKE", "").split()]
    suites = next((SUITES[name] for name in family if name in SUITES), ())
    reasons = [] if suites else ["no apt source of a known distribution was found"]
    for suite in suites:
        with tempfile.TemporaryDirectory(prefix="gradfuse-apt-") as work:
            try:
                write_sources(Path("/etc/apt"), release.get("VERSION_CODENAME", ""), suite, Path(work, "sources"))
                unpack_package(headers.package, Path(work), destination)
                return
            except (FetchError, OSError) as error:
                reasons.append(f"{suite}: {error}")
    raise FetchError("; ".join(reasons))


def write_sources(etc: Path, codename: str, suite: str, folder: Path) -> None:
    """Writes the machine's own apt sources with another suite, and all else as it is: mirrors, keys, components."""
    folder.mkdir()
    own = re.compile(rf"(?<![^\s])({re.escape(codename) or 'stable'}|stable|testing|unstable|sid)(?![^\s])")
    for file in (etc / "sources.list", *sorted((etc / "sources.list.d").glob("*"))):
        if file.is_file() and file.suffix in (".list", ".sources"):
            changed, count = own.subn(suite, file.read_text(encoding="utf-8", errors="replace"))
            if count:
                (folder / file.name).write_text(changed, encoding="utf-8")
    if not any(folder.iterdir()):
        raise FetchError("no apt source of a known distribution was found")


def unpack_package(package: str, work: Path, destination: Path) -> None:
    """Downloads a package from the sources in work/sources and unpacks it into `destination`."""
    for name in ("lists/partial", "archives/partial", "download"):
        (work / name).mkdir(parents=True)
    (work / "status").touch()
    (work / "apt.conf").write_text(APT_SETTINGS.format(work=work), encoding="utf-8")
    apt = ("apt-get", "-q", "-c", str(work / "apt.conf"))
    # A source that fails here may be one that does not matter.
    failure = error_of(*apt, "update", cwd=work)
    failure = error_of(*apt, "download", package, cwd=work / "download") and (failure or f"there is no {package}")
    packages = list((work / "download").glob("*.deb"))
    failure = failure or error_of("dpkg-deb", "-x", *map(str, packages), str(destination), cwd=work)
    if failure:
        raise FetchError(failure)


def error_of(*command: str, cwd: Path) -> str:
    """Runs a command. Returns the last line that it says if it fails, else nothing."""
    result = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    if result.returncode == 0:
        return ""
    lines = (result.stderr or result.stdout).strip().splitlines() or [f"exit status {result.returncode}"]
    return f"{command[0]}: {lines[-1]}"


def find_header(headers: Headers, folder: Path) -> Path | None:
    """The folder below `folder` that headers are included from."""
    found = sorted(folder.rglob(headers.header))
    return found[0].parents[headers.header.count("/")] if found else None


def fetch(headers: Headers, destination: Path) -> Path:
    """The folder of the headers under `destination`, filled first if it has none.

    Raises:
        FetchError: no way led to the headers; the message gives the reason of each.
    """
    present = find_header(headers, destination)
    if present is not None:
        return present
    reasons = []
    for way in (from_apt, from_archive):
        # Filled beside its place and moved there whole: an interrupted run leaves nothing that looks complete.
        partial = destination.with_name(destination.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        try:
            way(headers, partial)
            if find_header(headers, partial) is None:
                raise FetchError(f"what was unpacked has no {headers.header}")
            shutil.rmtree(destination, ignore_errors=True)
            os.replace(partial, destination)
            break
        except (FetchError, OSError, tarfile.TarError) as error:
            reasons.append(f"{way.__name__.replace('_', ' ')}: {error}")
            shutil.rmtree(partial, ignore_errors=True)
    present = find_header(headers, destination)
    if present is None:
        raise FetchError(f"no {headers.header} was found. Install {headers.package}. Tried " + "; ".join(reasons))
    return present


def main(arguments: list[str]) -> int:
    if len(arguments) != 2 or arguments[0] not in HEADERS:
        print(f"usage: fetch_headers.py {'|'.join(HEADERS)} DESTINATION", file=sys.stderr)
        return 2
    try:
        print(fetch(HEADERS[arguments[0]], Path(arguments[1]).resolve()))
    except FetchError as error:
        print(f"fetch_headers.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
