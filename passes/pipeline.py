"""The way of a model through `fuse`: canonical forms of its values, a pass per fused operator, exporter bugs."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Collection

import onnx_ir as ir

from gradfuse import custom_ops
from gradfuse.errors import ArgumentError, GradfuseError
from gradfuse.passes.diagnosis import FindExporterBugsPass, FindUnmatchedPass
from gradfuse.passes.matching import ForgetPass, FusePass, Policy, Sites
from gradfuse.passes.progress import Progress


class Pipeline(ir.passes.PassManager):
    """Passes in order. An error of gradfuse's own is raised as it is, where onnx_ir would put another one around it."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        try:
            return super().call(model)
        except ir.passes.PassError as error:
            cause = error.__cause__
            while cause is not None and not isinstance(cause, GradfuseError):
                cause = cause.__cause__
            if cause is None:
                raise
            raise cause from None


def _passes() -> dict[str, type[FusePass]]:
    """The pass of each operator that has one, from the module of its stem; weak forms last."""
    found: dict[str, type[FusePass]] = {}
    for name, operator in custom_ops.OPS.items():
        module = f"{__package__}.{operator.stem}"
        if importlib.util.find_spec(module) is not None:
            found[name] = getattr(importlib.import_module(module), f"Fuse{name}Pass")
    return dict(sorted(found.items(), key=lambda item: item[1].weak))


def default_pipeline(
    policy: Policy = "profitable",
    only: Collection[str] | None = None,
    skip: Collection[str] | None = None,
    progress: Progress | None = None,
) -> ir.passes.PassManager:
    """The passes that `gradfuse.fuse` runs, in order.

    Args:
        policy: "profitable" leaves alone what would move more bytes or not be faster; "all" takes every legal match.
        only: names of the operators to fuse; all that have rules if None.
        skip: names of operators to leave alone.
        progress: called now and then with what is being done, how many nodes are behind, and how many there are.

    Raises:
        ArgumentError: an unknown policy or operator.
    """
    return _pipeline(policy, only, skip, Sites(progress))


def explaining_pipeline() -> ir.passes.PassManager:
    """The default pipeline and, behind it, the search for regions that no rule proposes: what `explain` runs."""
    sites = Sites()
    *steps, end = _pipeline("profitable", None, None, sites).passes
    return Pipeline([*steps, FindUnmatchedPass(sites), end])


def _pipeline(
    policy: Policy, only: Collection[str] | None, skip: Collection[str] | None, sites: Sites
) -> ir.passes.PassManager:
    if policy not in ("profitable", "all"):
        raise ArgumentError(f"fuse: policy is {policy!r}; expected 'profitable' or 'all'")
    passes = _passes()
    for argument, names in (("only", only), ("skip", skip)):
        for name in names or ():
            if name not in passes:
                raise ArgumentError(f"fuse: {argument} is {name!r}; expected one of {', '.join(passes)}")
    chosen = [step for op, step in passes.items() if (not only or op in only) and op not in (skip or ())]
    return Pipeline([*(step(policy, sites) for step in chosen), FindExporterBugsPass(sites), ForgetPass(sites)])
