"""Create a virtual environment with pip in it, also where the distribution split ensurepip or pip off Python.

Usage: python3 tools/create_venv.py FOLDER
"""

from __future__ import annotations

import glob
import os
import shutil
import subprocess
import sys
import tempfile
import venv

DEBIAN_PIP_WHEELS = "usr/share/python-wheels/pip-*.whl"


def run(*command: str, cwd: str | None = None) -> bool:
    return subprocess.run(command, cwd=cwd, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == 0


def has_pip(python: str) -> bool:
    return run(python, "-m", "pip", "--version")


def with_ensurepip(python: str) -> bool:
    return run(python, "-m", "ensurepip", "--upgrade", "--default-pip")


def with_own_pip(python: str) -> bool:
    """The pip of the Python that runs this, from 22.3 on, can install into another environment."""
    return run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "pip")


def with_pip_wheel(python: str, root: str = "/") -> bool:
    """A pip wheel can run from where it is, and install itself."""
    wheels = sorted(glob.glob(os.path.join(root, DEBIAN_PIP_WHEELS)))
    return bool(wheels) and run(python, os.path.join(wheels[-1], "pip"), "install", "--quiet", "--no-index", wheels[-1])


def with_debian_package(python: str) -> bool:
    """Unpack the distribution's pip wheel with private apt state: no root is needed, and nothing is installed."""
    if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
        return False
    with tempfile.TemporaryDirectory(prefix="gradfuse-pip-") as work:
        for name in ("lists/partial", "cache/archives/partial", "root"):
            os.makedirs(os.path.join(work, name))
        with open(os.path.join(work, "apt.conf"), "w", encoding="utf-8") as settings:
            settings.write(f'Dir::State::lists "{work}/lists";\nDir::Cache "{work}/cache";\n')
            settings.write('APT::Sandbox::User "";\nAcquire::Languages "none";\n#clear APT::Update::Post-Invoke;\n')
        apt = ("apt-get", "-q", "-c", os.path.join(work, "apt.conf"))
        if not (run(*apt, "update") and run(*apt, "download", "python3-pip-whl", cwd=work)):
            return False
        packages = glob.glob(os.path.join(work, "*.deb"))
        root = os.path.join(work, "root")
        return bool(packages) and run("dpkg-deb", "-x", packages[0], root) and with_pip_wheel(python, root)


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    if sys.version_info < (3, 11):
        print(f"Python is {sys.version.split()[0]}; expected 3.11 or newer (make PYTHON=python3.12)", file=sys.stderr)
        return 1
    folder = arguments[0]
    python = os.path.join(folder, "bin", "python")
    if os.path.exists(python) and has_pip(python):
        return 0
    venv.create(folder, clear=True, symlinks=True, with_pip=False)
    for way in (with_ensurepip, with_own_pip, with_pip_wheel, with_debian_package):
        if way(python) and has_pip(python):
            return 0
    shutil.rmtree(folder, ignore_errors=True)
    print("no pip was found for the virtual environment: install the package python3-venv", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
