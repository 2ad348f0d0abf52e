"""Exports PyTorch's operators one by one, and compares their gradients with torch.autograd: `make test-op-db`.

Usage, in tests/: python -m op_db.run [--results FILE] [--page FILE] [--seconds N] [OPERATOR ...]

Each sample of an operator becomes a training step, which onnxruntime runs. Each operator runs in a process of its own,
within limits of time and memory. Without names, an interrupted run goes on where it stopped; with names, these
operators run again, and the results of the others stay. Ends with 1 where a gradient is wrong, an error is no line of
gradfuse's, or less than the share below is right.
"""

from __future__ import annotations

import argparse
import copy
import json
import multiprocessing
import resource
import sys
import time
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy.typing as npt
    from op_db.samples import Sample

    from gradfuse import TrainingStep

    Arrays = dict[str, npt.NDArray[Any]]

SECONDS = 300
"""How long a sample may take, on a machine that does other work as well."""

MEMORY = 8 * 2**30
"""How much address space an operator may take, in bytes."""

SHARE = 0.95
"""Which share of the samples must be right."""

ELEMENTS = 2000
"""Of how many elements of the outputs the parts in a gradient are measured at most."""
PARTS = 10**8
"""How many such parts are measured."""

MOVES = 4
"""How many runs are moved."""

RIGHT, REFUSED, WRONG, FAILED = "right", "refused", "wrong", "failed"

Outcome = tuple[str, str]
"""One of the words above, and the reason."""


def main(arguments: list[str]) -> int:
    """Run these operators, or all of them."""
    parser = argparse.ArgumentParser(prog="op_db.run")
    parser.add_argument("names", nargs="*", metavar="OPERATOR")
    parser.add_argument("--results", type=Path, default=Path(__file__).with_name("results.json"))
    parser.add_argument("--page", type=Path, help="write the table of this page")
    parser.add_argument("--seconds", type=int, default=SECONDS, help="how long a sample may take")
    options = parser.parse_args(arguments)
    _warm()
    from op_db.samples import operators

    every = operators()
    unknown = [name for name in options.names if name not in every]
    if unknown:
        print(f"no operator {unknown[0]!r}; expected some of {', '.join(every)}", file=sys.stderr)
        return 2
    unfinished = options.results.with_suffix(".part.json")
    known = unfinished if unfinished.exists() else options.results
    results: dict[str, list[Outcome]] = {}
    if known.exists() and (options.names or known == unfinished):
        results = {name: [(kind, why) for kind, why in found] for name, found in json.loads(known.read_text()).items()}
    for name in options.names or [name for name in every if name not in results]:
        begin = time.perf_counter()
        results[name] = outcomes(name, options.seconds)
        unfinished.write_text(json.dumps(results))
        print(f"{name:48} {time.perf_counter() - begin:5.0f} s  {described(results[name])}", flush=True)
    results = {name: results[name] for name in every if name in results}
    options.results.write_text(json.dumps(results, indent=0) + "\n")
    unfinished.unlink(missing_ok=True)
    if options.page:
        put_table(options.page, results)
    kinds = Counter(kind for found in results.values() for kind, _ in found)
    print(
        f"{kinds[RIGHT]} of {kinds.total()} samples are right, {kinds[REFUSED]} refused, {kinds[WRONG]} wrong, "
        f"{kinds[FAILED]} failed"
    )
    return int(kinds[WRONG] + kinds[FAILED] > 0 or kinds[RIGHT] < SHARE * kinds.total())


def described(found: list[Outcome]) -> str:
    """Return how many samples of an operator are right, and what is said of the others."""
    right = sum(kind == RIGHT for kind, _ in found)
    others = Counter(f"{kind}: {why}" for kind, why in found if kind != RIGHT)
    return "; ".join([f"{right} of {len(found)}", *(f"{count} {text}" for text, count in others.items())])


def put_table(page: Path, results: dict[str, list[Outcome]]) -> None:
    """Put a line an operator, and their sum, into a page."""
    before, begin, rest = page.read_text().partition("<!-- measured -->\n")
    _, end, after = rest.partition("<!-- end -->")
    kinds = Counter(kind for found in results.values() for kind, _ in found)
    whole = sum(all(kind == RIGHT for kind, _ in found) for found in results.values())
    share = 100 * kinds[RIGHT] / kinds.total()
    text = (
        f"Of {kinds.total():,} samples of {len(results)} operators, {kinds[RIGHT]:,} ({share:.1f} %) are right, "
        f"{kinds[REFUSED]:,} refused and {kinds[WRONG] + kinds[FAILED]:,} wrong. {whole} operators are right "
        "throughout.\n\n"
        "| operator | right | refused because |\n|---|---:|---|\n"
    )
    for name, found in results.items():
        right = sum(kind == RIGHT for kind, _ in found)
        reasons = "<br>".join(dict.fromkeys(_cell(why) for kind, why in found if kind != RIGHT))
        text += f"| `{name}` | {right} of {len(found)} | {reasons} |\n"
    page.write_text(f"{before}{begin}{text}{end}{after}")


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def outcomes(name: str, seconds: float) -> list[Outcome]:
    """Return what came of each sample of an operator. A process that dies or takes too long costs one sample."""
    from op_db import samples

    found: list[Outcome] = []
    while len(found) < samples.SAMPLES:
        here, there = multiprocessing.Pipe(duplex=False)
        process = multiprocessing.get_context("fork").Process(target=_run, args=(name, len(found), there))
        process.start()
        there.close()
        try:
            while here.poll(seconds):
                outcome = here.recv()
                if outcome is None:
                    process.join()
                    return found
                found.append(outcome)
            found.append((FAILED, f"took longer than {seconds:.0f} s"))
        except EOFError:
            process.join()
            found.append((FAILED, f"its process ended with {process.exitcode}"))
        finally:
            process.kill()
            process.join()
    return found


def _warm() -> None:
    """Import what exports need, ahead of the processes of the operators."""
    import onnxruntime
    import torch
    import torch.testing._internal.common_methods_invocations

    from gradfuse import _torch_private  # noqa: F401
    from gradfuse.export import branches, evaluation, onnx_model, tracing, verifying  # noqa: F401

    torch.set_num_threads(1)
    onnxruntime.set_default_logger_severity(4)


def _run(name: str, begin: int, pipe: Connection) -> None:
    import warnings

    from op_db.samples import operators, samples_of

    from gradfuse import _torch_private as private

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    warnings.simplefilter("ignore")
    with private.translations_read_once(), private.operators_collected_once():
        for number, sample in enumerate(samples_of(operators()[name])):
            if number >= begin:
                pipe.send(outcome(sample))
    pipe.send(None)


def outcome(sample: Sample) -> Outcome:
    """Export the step of a sample, and compare it with PyTorch."""
    from op_db.samples import loss

    from gradfuse import ExportError, export_training_step

    try:
        step = export_training_step(sample.module, loss, (sample.inputs, sample.weights), evaluation=False)
    except ExportError as error:
        text = str(error).removeprefix("export_training_step: ")
        return (FAILED if "mistake in gradfuse" in text or "\n" in text else REFUSED), text
    except Exception as error:
        return FAILED, f"{type(error).__name__}: {error}"
    try:
        compare(step, sample)
    except AssertionError as error:
        return WRONG, str(error)
    except Exception as error:
        return FAILED, f"{type(error).__name__}: {error}"
    return RIGHT, ""


def compare(step: TrainingStep, sample: Sample) -> None:
    """Compare loss, gradients and buffers of a step with PyTorch's.

    Raises:
        AssertionError: one differs.
    """
    import numpy as np
    import torch
    from op_db.samples import loss
    from training_models import autograd

    from gradfuse.testing import assert_gradients_close

    batch = sample.inputs, sample.weights
    found = results(step, sample)
    native = autograd(sample.module, loss, batch, torch.float32, step)
    exact = autograd(sample.module, loss, batch, torch.float64, step)
    added: dict[str, Arrays] = {}
    for name, array in found.items():
        if array.dtype.kind != "f":
            assert np.array_equal(array, native[name]), f"{name} is {array}; expected {native[name]}"
            continue
        wanted = exact.get(name, np.zeros(array.shape)).astype(np.float64)
        own = native.get(name, np.zeros_like(array))
        try:
            assert_gradients_close(array, own, wanted, own.dtype)
        except AssertionError:
            added = added or {"": terms(step, sample, exact)}
            try:
                assert_gradients_close(array, own, wanted, own.dtype, terms=added[""].get(name))
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from None


def terms(step: TrainingStep, sample: Sample, exact: Arrays) -> Arrays:
    """Return how large the terms are whose sums the loss and the gradients are, by their names.

    They are the elements of the outputs times their weights, the parts that each of these has in a gradient, what each
    parameter has in an element, and what runs of PyTorch in float64 change whose parameters, inputs and results of
    arithmetic are moved by a rounding, in units of that.
    """
    import numpy as np
    import torch
    from op_db.samples import loss
    from training_models import autograd

    from gradfuse import _torch_private as private
    from gradfuse.export.dropout import SeededDropout
    from gradfuse.export.rounding import Rounding
    from gradfuse.training.step import DROPOUT_SEED

    norms = "native_batch_norm_backward native_layer_norm_backward native_group_norm_backward batch_norm_backward"
    composed = private.known_decompositions([getattr(torch.ops.aten, name).default for name in norms.split()])

    class Moving(Rounding):  # type: ignore[no-untyped-call]
        """Moves what gradients of normalisation consist of too: what is left of them may be nothing but rounding."""

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func not in composed:
                return super().__torch_dispatch__(func, types, args, kwargs)
            with self:
                return composed[func](*args, **(kwargs or {}))

    eps = float(np.finfo(np.float32).eps)
    largest: Arrays = {name: np.zeros(array.shape) for name, array in exact.items()}
    for seed in range(MOVES):
        moved_module = copy.deepcopy(sample.module).double()
        with Moving(eps, seed) as rounding, torch.no_grad():
            for parameter in moved_module.parameters():
                parameter.copy_(rounding.moved(parameter))
            inputs = tuple(rounding.moved(one.double() if one.is_floating_point() else one) for one in sample.inputs)
            with torch.enable_grad():
                moved = autograd(moved_module, loss, (inputs, sample.weights), torch.float64, step)
        for name, array in exact.items():
            change = np.nan_to_num(np.abs(moved[name].astype(np.float64) - array)) / eps
            largest[name] = np.maximum(largest[name], change.max(initial=0))
    module = copy.deepcopy(sample.module).double()
    given = [one.double() if one.is_floating_point() else one for one in sample.inputs]
    seed_of_draws = step.buffers.get(DROPOUT_SEED)
    with SeededDropout(None if seed_of_draws is None else torch.from_numpy(seed_of_draws)):
        outputs = module(*given)
    elements = torch.cat([(one * weight).flatten() for one, weight in zip(outputs, sample.weights, strict=True)])
    largest["loss"] = np.maximum(largest["loss"], elements.detach().abs().nan_to_num().sum().numpy())
    parameters = dict(module.named_parameters())
    within = 0.0
    count = min(ELEMENTS, PARTS // max(sum(one.numel() for one in parameters.values()), 1))
    for element in elements[:count]:
        parts = torch.autograd.grad(element, list(parameters.values()), retain_graph=True, allow_unused=True)
        for name, part in zip(parameters, parts, strict=True):
            if part is not None and f"{name}.grad" in largest:
                sizes = part.abs().nan_to_num()
                largest[f"{name}.grad"] = largest[f"{name}.grad"] + sizes.numpy(force=True)
                within += float((sizes * parameters[name].detach().abs().nan_to_num()).sum())
    largest["loss"] = np.maximum(largest["loss"], within)
    return largest


def results(step: TrainingStep, sample: Sample) -> Arrays:
    """Return the outputs of a step by their names, with gradfuse's library, on one thread."""
    import onnxruntime

    from gradfuse import library

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    library.register(options)
    session = onnxruntime.InferenceSession(step.model.SerializeToString(), options)
    tensors = dict(zip(step.input_names + step.target_names, sample.inputs + sample.weights, strict=True))
    values = step.parameters | step.buffers | {name: tensor.numpy() for name, tensor in tensors.items()}
    feeds: Any = {value.name: values[value.name] for value in session.get_inputs()}
    names = [value.name for value in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds), strict=True))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
