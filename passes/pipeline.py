"""The way of a model through `fuse`: canonical forms of its values, then one pass per fused operator."""

from __future__ import annotations

import importlib
from collections.abc import Collection

import onnx_ir as ir

from gradfuse import custom_ops
from gradfuse.errors import ArgumentError
from gradfuse.passes.rewriting import ForgetPass, FusePass, Policy, Sites

# The squared error goes last: its form, a product with a difference, is the least telling one.
ORDER = ("CrossEntropyLossGrad", "ScaledMaskedSoftmaxBackward", "GroupedBiasAddGrad", "MseLossBackward")


def pass_of(operator: str) -> type[FusePass]:
    """The pass of an operator, from the module of its stem."""
    module = importlib.import_module(f"gradfuse.passes.{custom_ops.OPS[operator].stem}")
    found: type[FusePass] = getattr(module, f"Fuse{operator}Pass")
    return found


def default_pipeline(
    policy: Policy = "profitable", only: Collection[str] | None = None, skip: Collection[str] | None = None
) -> ir.passes.PassManager:
    """The passes that `gradfuse.fuse` runs, in order.

    Args:
        policy: "profitable" leaves alone what would not move fewer bytes; "all" takes every legal match.
        only: names of the operators to fuse; all of them if None.
        skip: names of operators to leave alone.

    Raises:
        ArgumentError: an unknown policy or operator.
    """
    if policy not in ("profitable", "all"):
        raise ArgumentError(f"fuse: policy is {policy!r}; expected 'profitable' or 'all'")
    for argument, names in (("only", only), ("skip", skip)):
        for name in names or ():
            if name not in ORDER:
                raise ArgumentError(f"fuse: {argument} is {name!r}; expected one of {', '.join(ORDER)}")
    sites = Sites()
    chosen = [op for op in ORDER if (not only or op in only) and op not in (skip or ())]
    return ir.passes.PassManager([*(pass_of(op)(policy, sites) for op in chosen), ForgetPass(sites)])
