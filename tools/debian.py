"""Unpacks packages of Debian or Ubuntu into a folder, by the machine's own apt with settings of its own.

No root is needed, and nothing is installed.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "cpp_ext" / "tools"))
import fetch_headers
from fetch_headers import FetchError

__all__ = ["FetchError", "fetch_headers", "program", "unpack"]


def unpack(
    folder: Path, *packages: str, architecture: str = "", suite: str = "", beside_installed: bool = False
) -> Path:
    """Unpack packages and all that they depend on, if the folder is not there yet, and return the folder.

    Args:
        folder: where to.
        packages: their names.
        architecture: Debian's name of a processor; without it, this machine's.
        suite: of another release than this machine's.
        beside_installed: leave out what is installed on this machine.

    Raises:
        FetchError: apt fails.
    """
    if folder.is_dir():
        return folder
    work = folder.with_name(f"{folder.name}.apt")
    shutil.rmtree(work, ignore_errors=True)
    for name in ("lists/partial", "archives/partial"):
        (work / name).mkdir(parents=True)
    options = {
        "Dir::State::lists": str(work / "lists"),
        "Dir::Cache": str(work),
        "Debug::NoLocking": "1",
        "APT::Sandbox::User": "",
        "Acquire::Languages": "none",
    }
    if not beside_installed:
        (work / "status").touch()
        options["Dir::State::status"] = str(work / "status")
    if architecture:
        options |= {"APT::Architecture": architecture, "APT::Architectures": architecture}
    if suite:
        codename = platform.freedesktop_os_release().get("VERSION_CODENAME", "")
        fetch_headers.write_sources(Path("/etc/apt"), codename, suite, work / "sources")
        options |= {"Dir::Etc::sourcelist": "/dev/null", "Dir::Etc::sourceparts": str(work / "sources")}
    # A container's hooks clean the system's own caches after an update.
    settings = "".join(f'{name} "{value}";\n' for name, value in options.items())
    settings += "".join(
        f"#clear APT::Update::{hook};\n" for hook in ("Pre-Invoke", "Post-Invoke", "Post-Invoke-Success")
    )
    (work / "apt.conf").write_text(settings, encoding="utf-8")
    get = ("apt-get", "-qq", "-c", str(work / "apt.conf"))
    # A source that fails here may be one that does not matter.
    failure = fetch_headers.error_of(*get, "update", cwd=work)
    download = ("--yes", "--no-install-recommends", "--download-only", "install")
    failure = fetch_headers.error_of(*get, *download, *packages, cwd=work) and (failure or f"there is no {packages[0]}")
    if failure:
        raise FetchError(failure)
    for package in sorted((work / "archives").glob("*.deb")):
        subprocess.run(["dpkg-deb", "--extract", str(package), str(work / "unpacked")], check=True)
    (work / "unpacked").rename(folder)
    shutil.rmtree(work)
    return folder


def program(name: str, package: str, folder: Path) -> Path:
    """A program of this machine, or of a package unpacked into a folder."""
    found = shutil.which(name)
    return Path(found) if found else unpack(folder, package, beside_installed=True) / "usr" / "bin" / name
