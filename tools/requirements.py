"""Print what has to be installed to develop gradfuse, as pyproject.toml names it: its dependencies and its extras'.

Usage: python3 tools/requirements.py
"""

from __future__ import annotations

import pathlib

import tomllib


def requirements(pyproject: pathlib.Path) -> list[str]:
    """Return the requirements of a project and of all its extras, without the project itself."""
    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    return sorted({name for group in groups for name in group if not name.startswith(project["name"])})


if __name__ == "__main__":
    print(*requirements(pathlib.Path(__file__).parents[1] / "pyproject.toml"))
