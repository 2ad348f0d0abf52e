"""A section for each operator of docs/operators.md: its inputs, attributes, outputs and types."""

from __future__ import annotations

import textwrap

from gradfuse import custom_ops
from gradfuse.custom_ops import Operator


def reference() -> str:
    """A section for each operator."""
    return "\n\n".join(_section(operator) for operator in custom_ops.OPS.values())


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
