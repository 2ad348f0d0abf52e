"""Rules of the project's own operators, which infer their outputs themselves."""

from __future__ import annotations

import onnx_ir as ir

from gradfuse import custom_ops
from gradfuse.custom_ops import functions
from gradfuse.custom_ops.operator import Operator, Tensor
from gradfuse.models.propagation.facts import Operands, Result, Rule, rule


def _rule_of(operator: Operator) -> Rule:
    def inferred(operands: Operands) -> list[Result]:
        dtypes, shapes = operands.facts.dtypes, operands.facts.shapes

        def known(value: ir.Value) -> Tensor:
            sizes = shapes.get(value)
            return Tensor(int(dtypes.get(value, 0)), None if sizes is None else tuple(sizes))

        found = operator.infer(functions.described(operator, operands.node, known))
        return [
            (ir.DataType(one.dtype) if one.dtype else None, None if one.shape is None else [*one.shape], None)
            for one in found
        ]

    return inferred


for _operator in custom_ops.OPS.values():
    rule(_operator.name, domain=custom_ops.DOMAIN)(_rule_of(_operator))
