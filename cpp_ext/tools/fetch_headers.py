#!/usr/bin/env python3
"""Puts headers that the build needs into a folder, for machines that have none installed.

Usage: fetch_headers.py onnxruntime|highway DESTINATION

No wheel ships `onnxruntime_c_api.h` or Highway. This script unpacks the distribution's own package, libonnxruntime-dev
or libhwy-dev, with private apt state, so it needs no root and changes nothing outside DESTINATION; mirrors, proxies and
keys are those that the machine is set up with. Where no apt source has the package, it takes the project's release
archive. Prints the folder to include headers from. Only the standard library is used: CMake runs this before anything
is installed.
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

# Newest first, after what the machine itself runs: older releases of a distribution lack a package or have an old one.
SUITES = {"debian": ("forky", "sid", "trixie"), "ubuntu": ("resolute", "questing", "plucky")}
COMPONENTS = {"debian": "main", "ubuntu": "main universe"}


class FetchError(Exception):
    """One way of getting the headers failed."""


@dataclass(frozen=True)
class Headers:
    """Headers that can be fetched.

    Attributes:
        header: the path of one of them, as it is included.
        package: the package of Debian and Ubuntu that holds them.
        archive: address of a release archive that holds them.
        folder: where they are in the archive, below its own top folder.
    """

    header: str
    package: str
    archive: str
    folder: str


_GITHUB = "https://github.com"
HEADERS = {
    "onnxruntime": Headers(
        header="onnxruntime_c_api.h",
        package="libonnxruntime-dev",
        archive=f"{_GITHUB}/microsoft/onnxruntime/releases/download/v1.23.2/onnxruntime-linux-x64-1.23.2.tgz",
        folder="include",
    ),
    "highway": Headers(
        header="hwy/highway.h",
        package="libhwy-dev",
        archive=f"{_GITHUB}/google/highway/releases/download/1.3.0/highway-1.3.0.tar.gz",
        folder="hwy",
    ),
}


@dataclass(frozen=True)
class Source:
    """One apt repository: its address, and the options (such as signed-by) that it is trusted with."""

    uri: str
    suite: str
    options: dict[str, str] = field(default_factory=dict)

    def line(self, suite: str, components: str) -> str:
        options = " ".join(f"{key}={value}" for key, value in self.options.items())
        return f"deb {f'[{options}] ' if options else ''}{self.uri} {suite} {components}"


def os_release() -> dict[str, str]:
    """The fields of /etc/os-release that are set."""
    try:
        lines = Path("/etc/os-release").read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    return {key: value.strip().strip('"') for key, _, value in (line.partition("=") for line in lines) if value}


def parse_list(text: str) -> Iterator[Source]:
    """Sources of a one-line-style file (sources.list)."""
    for line in text.splitlines():
        words = line.split("#", 1)[0].strip()
        if not words.startswith("deb "):
            continue
        words = words[4:].strip()
        options: dict[str, str] = {}
        if words.startswith("["):
            inside, _, words = words[1:].partition("]")
            options = dict(option.split("=", 1) for option in inside.split() if "=" in option)
        options.pop("arch", None)
        uri, suite, *components = words.split()
        if "main" in components:
            yield Source(uri, suite, options)


def parse_deb822(text: str, folder: Path) -> Iterator[Source]:
    """Sources of a deb822-style file (*.sources); a key given inside the file is written into `folder`."""
    for number, stanza in enumerate(text.replace("\r", "").split("\n\n")):
        fields: dict[str, str] = {}
        name = ""
        for line in stanza.splitlines():
            if line.startswith("#"):
                continue
            if line[:1].isspace():
                fields[name] = fields.get(name, "") + "\n" + line.strip()
            else:
                name, _, value = line.partition(":")
                name = name.lower()
                fields[name] = value.strip()
        if "deb" not in fields.get("types", "").split() or fields.get("enabled", "yes").lower() in ("no", "false", "0"):
            continue
        if "main" not in fields.get("components", "").split():
            continue
        options = {key: fields[key] for key in ("signed-by", "trusted") if fields.get(key)}
        if "BEGIN PGP" in options.get("signed-by", ""):
            key = folder / f"source-{number}.asc"
            lines = options["signed-by"].strip().splitlines()
            key.write_text("\n".join("" if line == "." else line for line in lines) + "\n", encoding="utf-8")
            options["signed-by"] = str(key)
        for uri in fields.get("uris", "").split():
            for suite in fields.get("suites", "").split():
                yield Source(uri, suite, options)


def own_sources(folder: Path, etc: Path = Path("/etc/apt")) -> list[Source]:
    """The machine's own apt sources of its own distribution, without repeats."""
    codename = os_release().get("VERSION_CODENAME", "")
    found: dict[str, Source] = {}
    files = [etc / "sources.list", *sorted((etc / "sources.list.d").glob("*"))]
    for file in files:
        if not file.is_file() or file.suffix not in (".list", ".sources"):
            continue
        text = file.read_text(encoding="utf-8", errors="replace")
        for source in parse_list(text) if file.suffix == ".list" else parse_deb822(text, folder):
            if source.suite in (codename, "stable", "testing", "unstable", "sid"):
                found.setdefault(source.uri, source)
    return list(found.values())


def run(*command: str, cwd: Path) -> None:
    result = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    if result.returncode:
        lines = (result.stderr or result.stdout).strip().splitlines() or [f"exit status {result.returncode}"]
        raise FetchError(f"{command[0]}: {lines[-1]}")


def unpack_package(package: str, source_line: str, work: Path, destination: Path) -> None:
    """Downloads `package` from the one repository of `source_line` and unpacks it into `destination`."""
    shutil.rmtree(work, ignore_errors=True)
    for name in ("lists/partial", "cache/archives/partial", "download"):
        (work / name).mkdir(parents=True)
    (work / "sources.list").write_text(source_line + "\n", encoding="utf-8")
    (work / "status").touch()
    settings = {
        "Dir::State": work,
        "Dir::State::lists": work / "lists",
        "Dir::State::status": work / "status",
        "Dir::Cache": work / "cache",
        "Dir::Etc::sourcelist": work / "sources.list",
        "Dir::Etc::sourceparts": "/dev/null",
        "Dir::Etc::preferences": "/dev/null",
        "Dir::Etc::preferencesparts": "/dev/null",
        "APT::Sandbox::User": "",
        "Acquire::Languages": "none",
        "Acquire::Retries": "2",
    }
    lines = [f'{key} "{value}";' for key, value in settings.items()]
    # A container's hooks clean the system's own caches after an update: not wanted here, nor allowed to a user.
    lines += [f"#clear {hook};" for hook in ("APT::Update::Pre-Invoke", "APT::Update::Post-Invoke")]
    lines += ["#clear APT::Update::Post-Invoke-Success;"]
    (work / "apt.conf").write_text("\n".join(lines) + "\n", encoding="utf-8")
    apt = ("apt-get", "-q", "-c", str(work / "apt.conf"))
    run(*apt, "update", cwd=work)
    run(*apt, "download", package, cwd=work / "download")
    packages = list((work / "download").glob("*.deb"))
    if len(packages) != 1:
        raise FetchError(f"apt-get download left {len(packages)} files; expected one package")
    run("dpkg-deb", "-x", str(packages[0]), str(destination), cwd=work)


def from_apt(headers: Headers, destination: Path) -> None:
    """Tries the newest suites on each mirror that the machine's own sources name."""
    if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
        raise FetchError("this machine has no apt-get")
    release = os_release()
    family = [release.get("ID", ""), *release.get("ID_LIKE", "").split()]
    distribution = next((name for name in family if name in SUITES), None)
    with tempfile.TemporaryDirectory(prefix="gradfuse-apt-") as temporary:
        sources = own_sources(Path(temporary))
        if distribution is None or not sources:
            raise FetchError("no apt source of a known distribution was found")
        reasons = []
        for source in sources:
            for suite in SUITES[distribution]:
                try:
                    line = source.line(suite, COMPONENTS[distribution])
                    unpack_package(headers.package, line, Path(temporary) / "work", destination)
                    return
                except (FetchError, OSError) as error:
                    reasons.append(f"{suite}: {error}")
        raise FetchError("; ".join(reasons))


def from_release(headers: Headers, destination: Path) -> None:
    """Unpacks the headers of the project's own release archive."""
    with urllib.request.urlopen(headers.archive, timeout=60) as response:
        data = io.BytesIO(response.read())
    include = Path(headers.folder).parent if "/" in headers.header else Path(headers.folder)
    with tarfile.open(fileobj=data, mode="r:gz") as archive:
        for member in archive:
            _, _, inside = member.name.removeprefix("./").partition("/")
            wanted = member.isfile() and inside.startswith(headers.folder + "/") and ".." not in inside
            content = archive.extractfile(member) if wanted else None
            if content is not None:
                target = destination / "include" / Path(inside).relative_to(include)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(content.read())


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
    for way in (from_apt, from_release):
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
