"""How the modules of the package import each other, and what they import from outside."""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

import gradfuse

PACKAGE = Path(gradfuse.__file__).parent


def modules() -> dict[str, Path]:
    """Name -> file of every module; `passes` and `custom_ops` are links."""
    found = {}
    for path in [*PACKAGE.rglob("*.py"), *(PACKAGE / "passes").rglob("*.py"), *(PACKAGE / "custom_ops").rglob("*.py")]:
        parts = ("gradfuse", *path.relative_to(PACKAGE).with_suffix("").parts)
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield what runs when a module is imported: neither the bodies of functions nor what is for type checkers."""
    for node in body:
        yield node
        match node:
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                yield from statements(node.orelse)
            case ast.If() | ast.For() | ast.While():
                yield from statements([*node.body, *node.orelse])
            case ast.With() | ast.ClassDef():
                yield from statements(node.body)
            case ast.Try():
                handlers = [one for handler in node.handlers for one in handler.body]
                yield from statements([*node.body, *handlers, *node.orelse, *node.finalbody])


def imports(path: Path, known: dict[str, Path], nodes: Iterable[ast.AST] | None = None) -> set[str]:
    """The modules of the package that a module imports; of a package, its submodules rather than itself."""
    found = set()
    for node in statements(ast.parse(path.read_text()).body) if nodes is None else nodes:
        match node:
            case ast.Import(names=aliases):
                found |= {alias.name for alias in aliases}
            case ast.ImportFrom(level=0, module=str(module), names=aliases):
                names = [f"{module}.{alias.name}" for alias in aliases]
                found |= {name if name in known else module for name in names}
            case ast.ImportFrom():
                pytest.fail(f"{path}:{node.lineno}: expected an absolute import")
    return found & set(known)


ORDER = (
    "errors deferred runtime testing library environment _torch_private custom_ops models checking passes "
    "dynamic_batch fusion explaining terminal training distributed optimizers losses differentiation torch export lora "
    "ort_training cli __main__"
).split()
"""The parts of the package. Each imports itself and earlier ones alone, wherever the import stands."""


def test_every_import_leads_down() -> None:
    known = modules()
    upwards = []
    for name, path in known.items():
        if name == "gradfuse":
            continue
        tree = ast.parse(path.read_text())
        for_types = {
            inner
            for node in ast.walk(tree)
            if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
            for inner in ast.walk(node)
        }
        at = ORDER.index(name.split(".")[1])
        for imported in imports(path, known, (node for node in ast.walk(tree) if node not in for_types)) - {"gradfuse"}:
            if ORDER.index(imported.split(".")[1]) > at:
                upwards.append(f"{name} imports {imported}")
    assert not upwards


def test_no_module_imports_itself_by_way_of_others() -> None:
    known = modules()
    graph = {name: imports(path, known) - {name} for name, path in known.items()}
    assert {"gradfuse.passes.pipeline", "gradfuse.custom_ops.functions", "gradfuse.export.tracing"} <= set(graph)
    assert "gradfuse.passes.pipeline" in graph["gradfuse.fusion"]
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail(f"modules import each other in a circle: {' <- '.join(error.args[1])}")


@pytest.mark.parametrize("package", ["training", "models", "checking"])
def test_torch_is_not_imported_by(package: str) -> None:
    names = [name for name in modules() if name.startswith(f"gradfuse.{package}.")]
    code = f"import sys, {', '.join(names)}\nprint('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert len(names) > 2 and result.stdout == "False\n"
