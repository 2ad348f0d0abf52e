"""Optimize a training graph of any producer: gradfuse's passes among those of onnx_ir and onnxscript.

Run it with `python samples/optimize_model.py IN.onnx OUT.onnx`, for example on a file of tests/corpus. It is for people
who have a pipeline of their own, as tools like Olive do. For everyone else, `gradfuse fuse` is one command, and also
accepts default opsets before 15. The sample

1. inlines functions, folds constants and merges equal nodes, with the passes of onnx_ir and onnxscript,
2. runs `gradfuse.passes.default_pipeline` as one pass among them, and attaches the function bodies of the operators
   that it inserted, with which the model runs everywhere,
3. removes what is no longer used,
4. compares the result with the original on random inputs, and saves it.

The exit status is 1 if the outputs differ; then nothing is saved.
"""

from __future__ import annotations

import pathlib
import sys

import click
import onnx_ir as ir
from onnx_ir.passes import common
from onnxscript import optimizer

import gradfuse
from gradfuse.custom_ops import functions
from gradfuse.passes import default_pipeline


class FoldConstantsPass(ir.passes.InPlacePass):
    """onnxscript's constant folding, with shape inference."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        result = optimizer.fold_constants_ir(model)
        return ir.passes.PassResult(model, modified=result.modified)


class AttachBodiesPass(ir.passes.InPlacePass):
    """Gives a model the function bodies of gradfuse's operators."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        before = set(model.functions)
        functions.attach(model)
        return ir.passes.PassResult(model, modified=set(model.functions) != before)


def optimize(model: ir.Model, fusing: ir.passes.PassManager) -> ir.Model:
    """Run the whole pipeline on a model, which is changed."""
    pipeline = ir.passes.Sequential(
        common.InlinePass(),
        FoldConstantsPass(),
        common.CommonSubexpressionEliminationPass(),
        fusing,
        common.RemoveUnusedNodesPass(),
        AttachBodiesPass(),
        common.RemoveUnusedOpsetsPass(),
        common.NameFixPass(),
    )
    return pipeline(model).model


@click.command(context_settings={"show_default": True})
@click.argument("source", type=click.Path(exists=True, dir_okay=False, path_type=pathlib.Path))
@click.argument("target", type=click.Path(dir_okay=False, path_type=pathlib.Path))
@click.option("--policy", default="profitable", type=click.Choice(["profitable", "all"]), help="Which matches to take.")
@click.option("--runs", default=3, type=click.IntRange(1), help="Comparisons on random inputs.")
def main(source: pathlib.Path, target: pathlib.Path, policy: str, runs: int) -> None:
    """Optimize the training graph in the file SOURCE, and save it as TARGET if its outputs are the same."""
    model = ir.load(source)
    before = sum(1 for _ in model.graph.all_nodes())
    fusing = default_pipeline("all" if policy == "all" else "profitable")
    model = optimize(model, fusing)
    click.echo(f"{before} nodes before, {sum(1 for _ in model.graph.all_nodes())} after")
    for fusion in fusing.report.fusions:
        click.echo(f"  {fusion.op} replaces {len(fusion.replaced)} nodes [{fusion.rule}]")
    report = gradfuse.check(str(source), model, runs=runs)
    if not report.ok:
        click.echo(f"not saved: {report}")
        sys.exit(1)
    ir.save(model, target)
    click.echo(f"the same outputs in {report.runs} random runs; saved as {target}")


if __name__ == "__main__":
    main()
