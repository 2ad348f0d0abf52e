"""Write the inputs, outputs, attributes and types of every operator into docs/operators.md.

Usage: python tools/operator_reference.py
"""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

from gradfuse import custom_ops
from gradfuse.custom_ops import Operator

PAGE = Path(__file__).parents[1] / "docs" / "operators.md"
_GENERATED = re.compile(r"(?<=<!-- operators: reference -->\n).*?(?=<!-- operators: end -->)", re.DOTALL)


def reference() -> str:
    """A section for each operator."""
    return "\n\n".join(_section(operator) for operator in custom_ops.OPS.values())


def updated(page: str) -> str:
    """The page with the present operators between its markers."""
    return _GENERATED.sub(lambda _: f"{reference()}\n", page)


def _section(operator: Operator) -> str:
    rows = [
        *(("input", i.name, i.type + (", optional" if i.optional else ""), i.doc) for i in operator.inputs),
        *(("attribute", a.name, f"{type(a.default).__name__} = `{a.default!r}`", a.doc) for a in operator.attributes),
        *(("output", o.name, "T", o.doc) for o in operator.outputs),
    ]
    table = "\n".join(f"| {kind} | `{name}` | {type_} | {_line(doc)} |" for kind, name, type_, doc in rows)
    types = "; ".join(f"{name}: {', '.join(map(_short, names))}" for name, names in operator.constraints.items())
    head = "| | name | type | |\n|---|---|---|---|"
    doc = textwrap.fill(_line(operator.doc), 120, break_on_hyphens=False)
    return f"### {operator.name}\n\n{doc}\n\n{head}\n{table}\n\nTypes: {types}."


def _short(type_string: str) -> str:
    return type_string.removeprefix("tensor(").removesuffix(")")


def _line(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
