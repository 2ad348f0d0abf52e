"""Which operators can be differentiated, and how."""

from __future__ import annotations

import dataclasses
from typing import Any

import onnx

from gradfuse.differentiation.expansion import expansions
from gradfuse.differentiation.rules import table
from gradfuse.differentiation.straight_through import DOMAIN as PAIRS

_NOT_BY_BODY = frozenset({"SequenceMap"})
"""Operators whose function body has a node without a rule."""

_CONVERTED = {"Scatter": "ScatterElements", "Upsample": "Resize"}
"""Operators of older opsets, and what a model is converted to have in their place."""


@dataclasses.dataclass(frozen=True)
class Differentiable:
    """An operator through which gradients go.

    Attributes:
        domain: its domain; "" for ONNX's own.
        name: its name.
        by: "rule", or "body": by the operators of which ONNX defines it, "expansion": by
            those that gradfuse writes in its place, or "conversion", to a newer operator.
        limits: what is not supported; empty: everything is.
    """

    domain: str
    name: str
    by: str
    limits: str

    def __str__(self) -> str:
        operator = f"{self.domain}::{self.name}" if self.domain else self.name
        return f"{operator:32} {self.by}" + (f": {self.limits}" if self.limits else "")


def differentiable() -> list[Differentiable]:
    """Return the operators that can be differentiated, sorted by domain and name.

    Operators that carry no gradient, such as comparisons, and those that are refused, such as QuantizeLinear, are not
    among them.
    """
    rules = table()
    found = [
        Differentiable(domain, name, "rule", entry.limits)
        for (domain, name), entry in rules.items()
        if entry.rule is not None and domain != PAIRS and not (not domain and name in _CONVERTED)
    ]
    found.append(Differentiable("", "If", "rule", "branches without random numbers"))
    found += [Differentiable("", name, "rule", "tensors, and no random numbers") for name in ("Loop", "Scan")]
    for (domain, name), (_, limits) in expansions().items():
        found.append(Differentiable(domain, name, "expansion", limits))
    for name, newer in _CONVERTED.items():
        found.append(Differentiable("", name, "conversion", rules["", newer].limits))
    schema: Any
    for schema in onnx.defs.get_all_schemas():
        has_body = schema.has_function or schema.has_context_dependent_function
        known = ("", schema.name) in rules or schema.name in _NOT_BY_BODY
        if not schema.domain and has_body and not known and _carries_floats(schema):
            found.append(Differentiable("", schema.name, "body", ""))
    return sorted(found, key=lambda one: (one.domain, one.name))


def _carries_floats(schema: onnx.defs.OpSchema) -> bool:
    inputs, outputs = (
        any("tensor(float)" in value.types for value in values) for values in (schema.inputs, schema.outputs)
    )
    return inputs and outputs
