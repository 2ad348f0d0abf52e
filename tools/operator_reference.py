"""A section for each operator of docs/operators.md: its inputs, attributes, outputs and types."""

from __future__ import annotations

import textwrap

from gradfuse import custom_ops
from gradfuse.custom_ops import Operator
from gradfuse.custom_ops.operator import DESCRIBED, Value


def reference() -> str:
    """A section for each operator."""
    return "\n\n".join(_section(operator) for operator in custom_ops.OPS.values())


def _section(operator: Operator) -> str:
    rows = [
        *(("input", i.name, i.type + (", optional" if i.optional else ""), i.doc) for i in operator.inputs),
        *(("attribute", a.name, _default(a.default), a.doc) for a in operator.attributes),
        *(("output", o.name, o.type, o.doc) for o in operator.outputs),
    ]
    table = "\n".join(f"| {kind} | `{name}` | {type_} | {_line(doc)} |" for kind, name, type_, doc in rows)
    types = "; ".join(
        f"{name}: {DESCRIBED.get(name) or ', '.join(map(_short, names))}"
        for name, names in operator.constraints.items()
    )
    head = "| | name | type | |\n|---|---|---|---|"
    doc = textwrap.fill(_line(operator.doc), 120, break_on_hyphens=False)
    return f"### {operator.name}\n\n{doc}\n\n{head}\n{table}\n\nTypes: {types}."


def _default(value: Value) -> str:
    if isinstance(value, tuple):
        return f"ints = `[{', '.join(map(str, value))}]`"
    return f"{type(value).__name__} = `{value!r}`"


def _short(type_string: str) -> str:
    return type_string.removeprefix("tensor(").removesuffix(")")


def _line(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
