"""The command `gradfuse`.

Exit codes: 0 done, also when there was nothing to fuse; 2 bad input or usage; 3 a check failed; 4 gradfuse itself
failed: a bug, whose traceback `-v` shows, or a process of its own that does not start or ends early.

Results go to standard output, errors to standard error in one line. An output file is written whole or not at all, and
never in the place of a file of the input, a folder, a pipe or a device.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import io
import json
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeGuard

import click
from rich.console import Console
from rich.text import Text

from gradfuse import __version__
from gradfuse.errors import CheckError, GradfuseError, WorkerError, listed, one_line
from gradfuse.models import files
from gradfuse.models.memory import collection_paused
from gradfuse.terminal import busy

if TYPE_CHECKING:
    import onnx.defs
    import onnx_ir as ir

    from gradfuse.optimizers import OptimizerOptions
    from gradfuse.passes.report import ExporterBug, Report

EXIT_BAD_INPUT = 2
EXIT_CHECK_FAILED = 3
EXIT_BUG = 4

_MOST_NAMES = 20
"""How many parameters are named at the end of a command."""
_OPTIMIZER_NAMES = ("SGD", "Adam", "AdamW", "Adam8bit", "AdamW8bit", "RMSprop", "Adagrad", "Adadelta", "Adamax")
_OPTIMIZERS = {name.lower(): name for name in _OPTIMIZER_NAMES}
"""The names of `--optimizer` -> those of gradfuse.optimizers, which is imported later."""
_BATCH_AXIS = "INPUT=AXIS"
_OUTPUT_ERRORS = (errno.EPIPE, errno.ENOSPC, errno.EIO)


@dataclasses.dataclass
class _State:
    """What holds for a run of the command line."""

    verbose: bool = False


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit the process with its code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # Names and paths may hold what the terminal's encoding lacks.
            stream.reconfigure(errors="backslashreplace")
    code = run(arguments)
    try:
        sys.stdout.flush()
    except OSError as error:
        code = _broken_output(error)
    sys.exit(code)


def run(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    state = _State()
    # Logs of libraries are not our output; without a handler they would be printed.
    logging.getLogger("onnx_ir").addHandler(logging.NullHandler())
    try:
        result = commands.main(arguments, prog_name="gradfuse", standalone_mode=False, obj=state)
        return result if isinstance(result, int) else 0
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
        return 0
    except click.ClickException as error:
        return _fail(error.format_message(), EXIT_BAD_INPUT)
    except click.Abort:
        return _fail("interrupted", EXIT_BAD_INPUT)
    except CheckError as error:
        return _fail(str(error), EXIT_CHECK_FAILED)
    except WorkerError as error:
        return _fail(str(error), EXIT_BUG)
    except GradfuseError as error:
        return _fail(str(error), EXIT_BAD_INPUT)
    except MemoryError as error:
        return _fail(f"out of memory: {error}" if str(error) else "out of memory", EXIT_BAD_INPUT)
    except Exception as error:
        if _is_of_output(error):
            return _broken_output(error)
        # Any other exception is a bug.
        if state.verbose:
            traceback.print_exc()
        what = f"{type(error).__name__}: {error}"
        hint = "" if state.verbose else "; -v shows where"
        return _fail(f"a bug in gradfuse, please report it with the model: {what[:400]}{hint}", EXIT_BUG)


def _is_of_output(error: Exception) -> TypeGuard[OSError]:
    """Whether writing to standard output failed, as when the reader of a pipe has gone or the disk is full."""
    return isinstance(error, OSError) and error.filename is None and error.errno in _OUTPUT_ERRORS


def _broken_output(error: OSError) -> int:
    # What is left in the buffer cannot be written when the process ends either.
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if error.errno == errno.EPIPE:
        return EXIT_BAD_INPUT  # Its reader has seen enough.
    return _fail(f"cannot write to standard output: {error.strerror}", EXIT_BAD_INPUT)


def _note_verbose(context: click.Context, _: click.Parameter, value: bool) -> bool:
    if context.obj is not None:
        context.obj.verbose = value
    return value


_verbose = click.option(
    "-v", "--verbose", is_flag=True, expose_value=False, callback=_note_verbose, help="Show the traceback of a bug."
)
_no_defaults = click.option(
    "--no-defaults", is_flag=True, help="Write values to a .safetensors beside the step, not as defaults of inputs."
)
_force = click.option("--force", is_flag=True, help="Overwrite an OUT.onnx.data that is not OUT.onnx's own.")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, package_name="gradfuse")
def commands() -> None:
    """Fuse decomposed training backward subgraphs in ONNX models into single operators."""


@commands.command()
@click.argument("source", metavar="IN.onnx")
@click.argument("target", metavar="[OUT.onnx]", required=False)
@click.option("--only", multiple=True, metavar="OP", help="Fuse this operator; may be repeated.")
@click.option("--skip", multiple=True, metavar="OP", help="Do not fuse this operator; may be repeated.")
@click.option(
    "--policy",
    type=click.Choice(["profitable", "all"]),
    default="profitable",
    show_default=True,
    help="profitable never adds memory traffic; all takes every legal match.",
)
@click.option("--pointwise", is_flag=True, help="Fuse chains of elementwise nodes, too.")
@click.option(
    "--check", "runs", type=click.IntRange(min=0), default=0, metavar="K", help="Compare IN and OUT in K runs."
)
@click.option("--no-bodies", is_flag=True, help="Leave out the function bodies: OUT then needs gradfuse's library.")
@click.option("--report", "report_path", metavar="R.json", help="Write what was done as JSON.")
@click.option("--in-place", is_flag=True, help="Overwrite IN.onnx.")
@_force
@click.option(
    "-v",
    "--verbose",
    is_flag=True,
    callback=_note_verbose,
    help="List the nodes that each fused node replaces, and show the traceback of a bug.",
)
def fuse(
    source: str,
    target: str | None,
    only: tuple[str, ...],
    skip: tuple[str, ...],
    policy: Literal["profitable", "all"],
    pointwise: bool,
    runs: int,
    no_bodies: bool,
    report_path: str | None,
    in_place: bool,
    force: bool,
    verbose: bool,
) -> None:
    """Fuse IN.onnx and write the result to OUT.onnx."""
    target = _target(source, target, in_place)
    if report_path is not None:
        _require_report_path(report_path, source, target)
    from gradfuse import fusion
    from gradfuse.models import reading
    from gradfuse.models.tensors import copy_model

    with collection_paused():
        with busy("reading"):
            loaded = reading.load(source)
            inputs = _inputs(loaded.ir, source, target, in_place, report_path)
            # An onnx_ir model, so that external data stays in its files; a copy only if the original is needed.
            fused = dataclasses.replace(loaded, ir=copy_model(loaded.ir) if runs else loaded.ir, source=target)
        with busy("fusing") as progress:
            chosen = (list(only) or None, list(skip) or None, policy)
            fused, report = fusion.fuse_loaded(
                fused, *chosen, pointwise=pointwise, bodies=not no_bodies, progress=progress
            )
        document: dict[str, Any] = {"gradfuse": __version__, "in": source, "out": target, **report.to_dict()}
        if runs:
            document["check"] = _checked(loaded, fused, runs)
        with busy("writing"):
            _write(fused.ir, report, source, target, in_place, inputs, force)
    if report_path is not None:
        files.write_file(report_path, (json.dumps(document, indent=2) + "\n").encode(), inputs)
    _print_report(report, verbose)
    if runs:
        click.echo(f"checked: {document['check']['summary']}")


@commands.command()
@click.argument("source", metavar="IN.onnx")
@click.option("--json", "as_json", is_flag=True, help="Print the explanation as JSON.")
@_verbose
def explain(source: str, as_json: bool) -> None:
    """Name each backward region of IN.onnx and what fuse would do with it, or why not."""
    from gradfuse import explaining
    from gradfuse.models import reading

    with busy("reading"):
        loaded = reading.load(source)
    with busy("explaining"):
        explanation = explaining.explain(loaded)
    if as_json:
        click.echo(json.dumps({"gradfuse": __version__, "in": source, **explanation.to_dict()}, indent=2))
        return
    _print_heading(explanation.heading)
    for region in explanation.regions:
        _print_region(str(region))
    _print_warnings(explanation.warnings)


@commands.command()
@click.argument("source", metavar="IN.onnx")
@click.argument("target", metavar="OUT.onnx", required=False)
@click.option("--in-place", is_flag=True, help="Overwrite IN.onnx.")
@_force
@_verbose
def expand(source: str, target: str | None, in_place: bool, force: bool) -> None:
    """Put standard operators back in the place of the fused ones."""
    target = _target(source, target, in_place)
    from gradfuse.custom_ops import functions
    from gradfuse.fusion import expand as expand_model
    from gradfuse.models import reading, writing

    with busy("reading"):
        loaded = reading.load(source)
    inputs = _inputs(loaded.ir, source, target, in_place)
    count = sum(1 for _ in functions.aclnn_nodes(loaded.ir))
    with busy("expanding"):
        expanded = expand_model(loaded.ir)
    with busy("writing"):
        references_hold = _same_folder(source, target)
        writing.save(expanded, target, keep_references=references_hold, inputs=inputs, force=force)
    click.echo(f"expanded {count} nodes" if count else "nothing to expand: no node is a fused operator")


@commands.command("to-stock")
@click.argument("artifacts", metavar="ARTIFACTS_DIR")
@click.argument("target", metavar="OUT.onnx")
@click.option("--checkpoint", metavar="FILE", help="Begin at this checkpoint instead of ARTIFACTS_DIR's own.")
@click.option("--no-fuse", is_flag=True, help="Leave the step unfused.")
@_no_defaults
@_force
@_verbose
def to_stock(
    artifacts: str, target: str, checkpoint: str | None, no_fuse: bool, no_defaults: bool, force: bool
) -> None:
    """Turn artifacts of onnxruntime-training into a training step for stock onnxruntime."""
    files.require_regular(target, "the training step")
    from gradfuse.ort_training import to_stock as conversion

    with busy("converting"):
        step = conversion.to_stock(artifacts, checkpoint, fuse=not no_fuse)
    with busy("writing"):
        inputs = conversion.files_of(artifacts, checkpoint)
        step.save(target, defaults=not no_defaults, inputs=inputs, force=force)
    if step.report is not None:
        _print_report(step.report, verbose=False)
    if step.recomputation is not None:
        click.echo(str(step.recomputation))
    click.echo(f"parameters {listed(step.parameters, quoted=False, most=_MOST_NAMES)}")
    click.echo(f"inputs {', '.join(step.input_names)}; targets {', '.join(step.target_names) or 'none'}")


class _CheckingCommand(click.Command):
    """A command whose option --check takes a batch, where an .npz file follows it."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As click's, which would take whatever follows an option that may have a value."""
        joined: list[str] = []
        for arg in args:
            if joined and joined[-1] == "--check=" and arg.endswith(".npz"):
                joined[-1] += arg
            else:
                joined.append("--check=" if arg == "--check" else arg)
        return super().parse_args(ctx, joined)


def _batch(check: str | None) -> bool | dict[str, Any]:
    """Return whether --check asks for a check, or the batch for it."""
    if not check:
        return check is not None
    import numpy as np

    try:
        with np.load(check, allow_pickle=False) as arrays:
            return dict(arrays)
    except Exception as error:
        # numpy raises many kinds of errors for a file that is not an archive of arrays.
        raise click.UsageError(f"--check is {check!r}: {one_line(error)}; expected what numpy.savez wrote") from error


@commands.command("training-step", cls=_CheckingCommand)
@click.argument("source", metavar="IN.onnx")
@click.argument("target", metavar="STEP.onnx")
@click.option(
    "--loss",
    metavar="NAME|LOSS.onnx",
    help="cross_entropy, mse, ..., or a model (outputs, targets) -> scalar; else the model's own scalar output.",
)
@click.option("--optimizer", type=click.Choice([*_OPTIMIZERS]), help="Without one, STEP outputs gradients.")
@click.option("--lr", type=float, help="The learning rate.")
@click.option("--momentum", type=float, help="The momentum of sgd or rmsprop.")
@click.option("--weight-decay", type=float, help="As in torch.optim.")
@click.option("--trainable", multiple=True, metavar="PATTERN", help="Train these initializers only; may be repeated.")
@click.option("--frozen", multiple=True, metavar="PATTERN", help="Do not train these initializers; may be repeated.")
@click.option(
    "--tie", multiple=True, metavar="NAME=OTHER", help="Train a copy NAME as one with OTHER; may be repeated."
)
@click.option("--lora", multiple=True, metavar="PATTERN", help="Train low-rank adapters of these; may be repeated.")
@click.option("--lora-rank", type=int, help="The rank of the adapters; 8 by default.")
@click.option("--lora-alpha", type=float, help="Adapters are scaled by alpha / rank; 8 by default.")
@click.option("--train-batch-norm", is_flag=True, help="Use the batch's statistics, and update the running ones.")
@click.option("--max-grad-norm", type=float, help="Clip the gradients' norm.")
@click.option("--accumulate", type=click.IntRange(min=1), default=1, help="Average gradients over this many calls.")
@click.option("--grad-scaler", type=float, metavar="SCALE", help="Scale the loss by SCALE at first, as torch.amp does.")
@click.option("--ema", type=float, metavar="DECAY", help="Average the parameters: average * DECAY + new * (1 - DECAY).")
@click.option("--run-time", multiple=True, metavar="NAME", help="Make weight_decay, ... an input; may be repeated.")
@click.option(
    "--frozen-inputs", is_flag=True, help="Make weights that do not train inputs, so that you can replace them."
)
@click.option(
    "--check", metavar="[BATCH.npz]", help="Compare derivatives with finite differences, on random inputs or BATCH."
)
@click.option(
    "--memory-budget",
    metavar="SIZE",
    help="Recompute activations to take no more memory: 512MiB, or 0.5 of all.",
)
@click.option(
    "--size", multiple=True, metavar="DIM=N", help="A dimension's size, for --memory-budget; may be repeated."
)
@click.option("--no-fuse", is_flag=True, help="Leave the step unfused.")
@click.option("--straight-through", is_flag=True, help="Let gradients pass QuantizeLinear and DequantizeLinear.")
@click.option("--dynamic-batch", is_flag=True, help="Make a fixed batch dynamic.")
@click.option(
    "--batch-axis", multiple=True, metavar=_BATCH_AXIS, help="The axis of the batch, 0 by default; may be repeated."
)
@click.option("--no-float64", is_flag=True, help="Compute the update in float32 alone, as for WebGPU; with --no-fuse.")
@_no_defaults
@_force
@_verbose
def training_step(
    source: str,
    target: str,
    loss: str | None,
    optimizer: str | None,
    trainable: tuple[str, ...],
    frozen: tuple[str, ...],
    tie: tuple[str, ...],
    lora: tuple[str, ...],
    lora_rank: int | None,
    lora_alpha: float | None,
    train_batch_norm: bool,
    straight_through: bool,
    dynamic_batch: bool,
    batch_axis: tuple[str, ...],
    max_grad_norm: float | None,
    accumulate: int,
    grad_scaler: float | None,
    ema: float | None,
    run_time: tuple[str, ...],
    frozen_inputs: bool,
    check: str | None,
    memory_budget: str | None,
    size: tuple[str, ...],
    no_fuse: bool,
    no_float64: bool,
    no_defaults: bool,
    force: bool,
    **options: float | None,
) -> None:
    """Make a training step from a forward model, without PyTorch."""
    files.require_regular(target, "the training step")
    chosen, batch = _optimizer(optimizer, options), _batch(check)
    pairs = [one.partition("=") for one in tie]
    if not all(name and other for name, _, other in pairs):
        wrong = next(one for one, (name, _, other) in zip(tie, pairs, strict=True) if not name or not other)
        raise click.UsageError(f"--tie is {wrong!r}; expected NAME=OTHER")
    sizes = dict(one.rpartition("=")[::2] for one in size)
    if not all(name and number.isdecimal() and int(number) for name, number in sizes.items()):
        raise click.UsageError(f"--size is {size[0] if len(size) == 1 else list(size)!r}; expected DIM=N")
    if sizes and memory_budget is None:
        raise click.UsageError("--size is given without --memory-budget; expected both or neither")
    if batch_axis and not dynamic_batch:
        raise click.UsageError("--batch-axis is given without --dynamic-batch; expected both or neither")
    axes = _axes("--batch-axis", batch_axis)
    if no_float64 and not no_fuse:
        raise click.UsageError("--no-float64 is given without --no-fuse; expected both or neither")
    if not lora and (lora_rank is not None or lora_alpha is not None):
        raise click.UsageError(f"--lora-{'alpha' if lora_rank is None else 'rank'} is given without --lora")
    from gradfuse import optimizers
    from gradfuse.differentiation.training import build_training_step
    from gradfuse.lora.adding import with_adapters
    from gradfuse.models import reading
    from gradfuse.models.tensors import data_files

    with busy("reading"):
        loaded = reading.load(source)
        inputs = [*data_files(loaded.ir), source, *([loss] if loss is not None and loss.endswith(".onnx") else [])]
        files.require_other(target, inputs, "the training step")
    if lora:
        rank = 8 if lora_rank is None else lora_rank
        adapters = with_adapters(loaded.ir, lora, rank, 8 if lora_alpha is None else lora_alpha)
        trainable = (*adapters, *trainable)
    with busy("differentiating"), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        step = build_training_step(
            loaded,
            loss,
            trainable=trainable or None,
            frozen=frozen or None,
            tie={name: other for name, _, other in pairs},
            optimizer=chosen,
            train_batch_norm=train_batch_norm,
            max_grad_norm=max_grad_norm,
            accumulate=accumulate,
            grad_scaler=None if grad_scaler is None else optimizers.GradScaler(init_scale=grad_scaler),
            average=None if ema is None else optimizers.EMA(decay=ema),
            run_time=run_time,
            frozen_inputs=frozen_inputs,
            fuse=not no_fuse,
            check=batch,
            float64=not no_float64,
            straight_through=straight_through,
            dynamic_batch=dynamic_batch and (axes or True),
            memory_budget=memory_budget,
            memory_sizes={name: int(number) for name, number in sizes.items()},
        )
    with busy("writing"):
        step.save(target, defaults=not no_defaults, inputs=inputs, force=force)
    for warning in caught:
        click.echo(f"warning: {warning.message}", err=True)
    if step.report is not None:
        _print_report(step.report, verbose=False)
    click.echo(f"parameters {listed(step.parameters, quoted=False, most=_MOST_NAMES)}")
    click.echo(f"inputs {', '.join(step.input_names)}; targets {', '.join(step.target_names) or 'none'}")


@commands.command("make-batch-dynamic")
@click.argument("source", metavar="IN.onnx")
@click.argument("target", metavar="OUT.onnx")
@click.option(
    "--axis", multiple=True, metavar=_BATCH_AXIS, help="The axis of the batch, 0 by default; may be repeated."
)
@_force
@_verbose
def make_batch_dynamic(source: str, target: str, axis: tuple[str, ...], force: bool) -> None:
    """Make the fixed batch of a model dynamic."""
    target, axes = _target(source, target, in_place=None), _axes("--axis", axis)
    from gradfuse.dynamic_batch.freeing import with_dynamic_batch
    from gradfuse.models import reading, writing

    with busy("reading"):
        loaded = reading.load(source)
    inputs = _inputs(loaded.ir, source, target, in_place=False)
    loaded = with_dynamic_batch(loaded, "make_batch_dynamic", axes)
    with busy("writing"):
        references_hold = _same_folder(source, target)
        writing.save(loaded.ir, target, keep_references=references_hold, inputs=inputs, force=force)
    for kind, values in (("inputs", loaded.ir.graph.inputs), ("outputs", loaded.ir.graph.outputs)):
        click.echo(f"{kind} {', '.join(f'{value.name} {value.shape}' for value in values)}")


def _axes(option: str, given: Iterable[str]) -> dict[str, int | None]:
    """Return input -> axis of the batch, of texts INPUT=AXIS."""
    found: dict[str, int | None] = {}
    for one in given:
        name, _, axis = one.rpartition("=")
        if not name or not (axis == "none" or axis.removeprefix("-").isdecimal()):
            raise click.UsageError(f"{option} is {one!r}; expected {_BATCH_AXIS}, with a number or none")
        found[name] = None if axis == "none" else int(axis)
    return found


@commands.command("add-lora-inputs")
@click.argument("source", metavar="IN.onnx")
@click.argument("target", metavar="OUT.onnx")
@click.option("--lora", multiple=True, required=True, metavar="PATTERN", help="As of training-step; may be repeated.")
@_force
@_verbose
def add_lora_inputs(source: str, target: str, lora: tuple[str, ...], force: bool) -> None:
    """Give a forward model optional inputs, which onnxruntime's adapters set."""
    target = _target(source, target, in_place=None)
    from gradfuse.lora.adding import with_adapter_inputs
    from gradfuse.models import reading, writing

    with busy("reading"):
        loaded = reading.load(source)
    inputs = _inputs(loaded.ir, source, target, in_place=False)
    added = with_adapter_inputs(loaded.ir, lora)
    with busy("writing"):
        references_hold = _same_folder(source, target)
        writing.save(loaded.ir, target, keep_references=references_hold, inputs=inputs, force=force)
    click.echo(f"inputs {', '.join(added)}")


@commands.command("save-adapter")
@click.argument("source", metavar="STEP.onnx")
@click.argument("target", metavar="OUT")
@click.option("--checkpoint", metavar="FILE", help="What TrainingSession.save wrote; by default STEP's own values.")
@click.option("--within", metavar="NAME", help="The name of PEFT's module in the exported one; by default the whole.")
@_verbose
def save_adapter(source: str, target: str, checkpoint: str | None, within: str | None) -> None:
    """Write trained adapters: OUT.onnx_adapter for onnxruntime, or else a folder for PEFT."""
    files.require_other(target, [source] if checkpoint is None else [source, checkpoint], "the adapter")
    from gradfuse.lora.saving import save_adapter as save
    from gradfuse.training.session import TrainingSession

    with busy("reading"):
        session = TrainingSession(source)
        if checkpoint is not None:
            session.load(checkpoint)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        save(session, target, within=within)
    for warning in caught:
        click.echo(f"warning: {warning.message}", err=True)


@commands.command("convert-adapter")
@click.argument("source", metavar="IN")
@click.argument("target", metavar="OUT")
@click.option("--base", metavar="MODEL.onnx", help="The model that the adapters are for: gives names, checks sizes.")
@click.option("--within", metavar="NAME", help="The name of PEFT's module in the model; by default the whole.")
@_verbose
def convert_adapter(source: str, target: str, base: str | None, within: str | None) -> None:
    """Convert a PEFT folder to OUT.onnx_adapter for onnxruntime, or such a file to a folder."""
    files.require_other(target, [source] if base is None else [source, base], "the adapter")
    from gradfuse.lora.loading import convert_adapter as convert

    with busy("converting"):
        convert(source, target, base=base, within=within)


def _optimizer(name: str | None, options: Mapping[str, float | None]) -> OptimizerOptions | None:
    given = {key: value for key, value in options.items() if value is not None}
    if name is None:
        if given:
            option = next(iter(given)).replace("_", "-")
            raise click.UsageError(f"--{option} is given without --optimizer; expected both or neither")
        return None
    if name not in ("sgd", "rmsprop") and "momentum" in given:
        raise click.UsageError(f"--momentum is given with --optimizer {name}; expected sgd or rmsprop")
    if name == "sgd" and "lr" not in given:
        raise click.UsageError("--lr is missing; expected a learning rate for sgd")
    from gradfuse import optimizers

    create: Callable[..., OptimizerOptions] = getattr(optimizers, _OPTIMIZERS[name])
    return create(**given)


@commands.command()
@click.argument("first", metavar="A.onnx")
@click.argument("second", metavar="B.onnx")
@click.option(
    "--runs", type=click.IntRange(min=1), default=3, show_default=True, help="Number of runs, each on new inputs."
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Equal seeds give equal inputs.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@_verbose
def check(first: str, second: str, runs: int, seed: int, as_json: bool) -> int:
    """Run two models on the same random inputs and compare every output."""
    from gradfuse.checking.check import check as check_models

    with busy("running"):
        report = check_models(first, second, runs, seed=seed)
    click.echo(json.dumps(report.to_dict(), indent=2) if as_json else str(report))
    return 0 if report.ok else EXIT_CHECK_FAILED


@commands.command()
@click.option("--differentiable", is_flag=True, help="List the operators that training-step can differentiate.")
@click.option("--json", "as_json", is_flag=True, help="Print the operators as JSON.")
def ops(differentiable: bool, as_json: bool) -> None:
    """List the fused operators: inputs, outputs, attributes and types."""
    if differentiable:
        from gradfuse.differentiation import coverage

        found = coverage.differentiable()
        if as_json:
            click.echo(json.dumps([dataclasses.asdict(operator) for operator in found], indent=2))
        else:
            for operator in found:
                click.echo(str(operator))
        return
    from gradfuse import custom_ops

    described = [_described(operator.schema) for operator in custom_ops.OPS.values()]
    if as_json:
        click.echo(json.dumps({"domain": custom_ops.DOMAIN, "version": custom_ops.VERSION, "ops": described}, indent=2))
        return
    for op in described:
        _print_heading(f"{custom_ops.DOMAIN}::{op['name']}")
        for kind in ("inputs", "outputs"):
            for value in op[kind]:
                optional = ", optional" if value["optional"] else ""
                click.echo(f"  {kind[:-1]:9} {value['name']:20} {value['type']}{optional}")
        for attribute in op["attributes"]:
            click.echo(f"  attribute {attribute['name']:20} {attribute['type']} = {attribute['default']!r}")
        for variable, types in op["types"].items():
            click.echo(f"  {variable} is one of {', '.join(types)}")


@commands.command()
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
def info(as_json: bool) -> None:
    """Describe the installation and the machine, for bug reports."""
    from gradfuse.environment import info as environment

    facts = environment()
    if as_json:
        click.echo(json.dumps(facts, indent=2))
        return
    for key, value in facts.items():
        if isinstance(value, Mapping):
            click.echo(f"{key}:")
            for name, detail in value.items():
                shown = " ".join(detail) if isinstance(detail, list) else detail
                click.echo(f"  {name}: {shown}")
        else:
            click.echo(f"{key}: {value}")


def _target(source: str, target: str | None, in_place: bool | None) -> str:
    """Return the path to write to; refuse to overwrite the input without --in-place, which is None if there is none."""
    if target is None:
        if not in_place:
            raise click.UsageError("OUT.onnx is missing; expected a path, or --in-place")
        return source
    same = files.same(source, target)
    if same and not in_place:
        wanted = "another" if in_place is None else "another, or --in-place"
        raise click.UsageError(f"OUT.onnx is {target}, the same file as IN.onnx; expected {wanted}")
    if in_place and not same:
        raise click.UsageError(f"OUT.onnx is {target} with --in-place; expected no OUT.onnx")
    files.require_regular(target, "the fused model")
    return target


def _inputs(model: ir.Model, source: str, target: str, in_place: bool, report_path: str | None = None) -> list[str]:
    """Return the files of the input, which must stay as they are, after making sure that none is an output."""
    from gradfuse.models.tensors import data_files

    inputs = data_files(model) + ([] if in_place else [source])
    files.require_other(target, inputs, "the fused model")
    if report_path is not None:
        files.require_other(report_path, inputs, "the report")
    # A model that is overwritten may have its data file written anew.
    return [] if in_place else inputs


def _require_report_path(path: str, source: str, target: str) -> None:

    if any(files.same(path, other) for other in (source, target, files.data_path(target))):
        raise click.UsageError(f"--report is {path}, which is also a model; expected another path")
    if not os.path.isdir(os.path.dirname(os.path.realpath(path))):
        raise click.UsageError(f"--report is {path}; expected a file in a folder that exists")
    files.require_regular(path, "the report")


def _checked(first: Any, second: Any, runs: int) -> dict[str, Any]:
    from gradfuse.checking.check import check as check_models

    with busy("checking"):
        report = check_models(first, second, runs)
    if not report.ok:
        raise CheckError(report.summary(), report)
    return {**report.to_dict(), "summary": report.summary()}


def _same_folder(source: str, target: str) -> bool:
    """Whether external data that the source refers to is beside the target as well."""
    first, second = (os.path.realpath(os.path.dirname(os.path.abspath(path))) for path in (source, target))
    return first == second


def _write(
    model: ir.Model, report: Report, source: str, target: str, in_place: bool, inputs: list[str], force: bool
) -> None:
    from gradfuse.models import writing
    from gradfuse.models.tensors import has_external_data

    if report.fusions or has_external_data(model):
        writing.save(model, target, keep_references=_same_folder(source, target), inputs=inputs, force=force)
    elif not in_place:
        # Nothing was fused, so OUT is a copy, byte for byte.
        with open(source, "rb") as file:
            files.write_file(target, file.read(), inputs)


def _print_report(report: Report, verbose: bool) -> None:
    heading, *lines = report.lines()
    _print_heading(heading)
    for line in lines:
        click.echo(line)
    if verbose:
        for fusion in report.fusions:
            click.echo(f"  {fusion.node} replaces {', '.join(fusion.replaced)}")
    _print_warnings(report.warnings)


def _print_region(text: str) -> None:
    first, *details = text.split("\n")
    op, _, rest = first.partition(" ")
    Console(highlight=False, soft_wrap=True).print(Text.assemble((op, "bold"), " ", rest))
    for line in details:
        click.echo(line)


def _print_warnings(warnings: Iterable[ExporterBug]) -> None:
    for warning in warnings:
        kind, _, rest = str(warning).partition(" ")
        Console(stderr=True, highlight=False, soft_wrap=True).print(Text.assemble((kind, "bold yellow"), " ", rest))


def _described(schema: onnx.defs.OpSchema) -> dict[str, Any]:
    def values(formals: Any) -> list[dict[str, Any]]:
        return [
            {"name": v.name, "type": v.type_str, "optional": v.option.name == "Optional", "description": v.description}
            for v in formals
        ]

    from onnx import helper

    return {
        "name": schema.name,
        "description": schema.doc,
        "inputs": values(schema.inputs),
        "outputs": values(schema.outputs),
        "attributes": [
            {
                "name": attribute.name,
                "type": str(attribute.type).rpartition(".")[2].lower(),
                "default": _text(helper.get_attribute_value(attribute.default_value)),
                "description": attribute.description,
            }
            for attribute in schema.attributes.values()
        ],
        "types": {c.type_param_str: list(c.allowed_type_strs) for c in schema.type_constraints},
    }


def _text(value: Any) -> Any:
    return value.decode() if isinstance(value, bytes) else value


def _print_heading(text: str) -> None:
    # Rich leaves out the style where the output is no terminal.
    Console(highlight=False, soft_wrap=True).print(Text(text, style="bold"))


def _fail(message: str, code: int) -> int:
    Console(stderr=True, highlight=False, soft_wrap=True).print(
        Text.assemble(("gradfuse: ", "bold red"), " ".join(message.split()))
    )
    return code
