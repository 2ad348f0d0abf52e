"""Gradients of ONNX models by gradfuse and by onnx-ad 0.3.0, side by side: what is right, and what it takes.

    make bench-onnx-ad

Both differentiate onnx's own node tests, which are compared with differences as in tests/differentiation, and the
models of tests/support/training_models.py, forward by plain torch.onnx.export with the loss inside. For onnx-ad their
batch is fixed, functions are expanded, shapes are inferred and parameters are inputs, as it needs them.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx.inliner
import onnxruntime
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "differentiation"))

import node_tests
from training_models import MODELS, Model

import gradfuse
from gradfuse import library

test_node_tests: Any = importlib.import_module("test_node_tests")

Array = npt.NDArray[Any]

HEAD = """\
| | gradfuse | gradfuse, `fuse=False` | onnx-ad 0.3.0 |
|---|---|---|---|
"""
ITEMS, LENGTH = 32, 16
TIMED_STEPS = 15
MODELS_COMPARED = ("ResNet", "ConvNeXt", "ViT", "GPT, scaled_dot_product_attention", "T5")
RIGHT = 1e-3
"""A gradient is right within this share of the largest element."""


def onnx_ad() -> Any:
    """The package, which `make bench-onnx-ad` alone installs."""
    return importlib.import_module("onnx_ad")


class WithLoss(torch.nn.Module):
    """A model with its loss inside."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model.module().eval()
        # torch.onnx.export drops the smoothing of labels.
        self.loss: Callable[..., torch.Tensor] = (
            F.cross_entropy if isinstance(model.loss, torch.nn.CrossEntropyLoss) else model.loss
        )

    def forward(self, inputs: tuple[torch.Tensor, ...], targets: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return self.loss(self.model(*inputs), *targets)


def of_case(case: node_tests.Case, seeds: Mapping[str, Array], by_onnx: bool) -> tuple[dict[str, Array], list[str]]:
    """As `node_tests.by_gradfuse`; its seeds and gradients have one axis more."""
    wrt = [name for name in case.wrt if name not in case.fixed]
    model = with_constants(case)
    derived = onnx_ad().reverse(model, inputs=wrt, outputs=list(seeds), layout="onnx")
    feeds = dict(case.feeds) | {f"adj_{name}": seed[..., None] for name, seed in seeds.items()}
    found = node_tests.run(derived, {value.name: feeds[value.name] for value in derived.graph.input}, by_onnx=by_onnx)
    return {name: found[f"adj_{name}"][..., 0] for name in wrt}, list(case.fixed)


def with_constants(case: node_tests.Case) -> onnx.ModelProto:
    """Return the model of a case with its integers as constants: axes, pads and shapes, as models have them."""
    model = onnx.ModelProto()
    model.CopyFrom(case.model)
    given = [value for value in case.model.graph.input if case.feeds[value.name].dtype.kind in "iu"]
    kept = [value for value in case.model.graph.input if value not in given]
    del model.graph.input[:]
    model.graph.input.extend(kept)
    arrays = [onnx.numpy_helper.from_array(case.feeds[value.name], value.name) for value in given]
    model.graph.initializer.extend(arrays)
    return onnx.shape_inference.infer_shapes(model)


def node_test_counts(derived: node_tests.Derived) -> Counter[str]:
    """Return how many cases agree, are wrong or are not differentiated."""
    outcomes: Counter[str] = Counter()
    for name, case in node_tests.cases().items():
        if case.op_type in test_node_tests.RANDOM or name in test_node_tests.NOT_COMPARED:
            continue
        given = case.moved() if name in test_node_tests.MOVED else case
        try:
            node_tests.compare(given, derived)
            outcomes["right"] += 1
        except AssertionError:
            outcomes["wrong"] += 1
        except Exception:  # what each raises for what it does not take, or onnxruntime for what it cannot run
            outcomes["not differentiated, or does not run"] += 1
    return outcomes


def exported(module: WithLoss, batch: Any) -> onnx.ModelProto:
    """Return the model with the loss inside, with fixed sizes, without functions and with shapes."""
    program = torch.onnx.export(module, batch, dynamo=True, optimize=False, verbose=False)
    assert program is not None
    return onnx.shape_inference.infer_shapes(onnx.inliner.inline_local_functions(program.model_proto))


def with_parameters_as_inputs(model: onnx.ModelProto, names: Sequence[str]) -> onnx.ModelProto:
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    kept = [one for one in model.graph.initializer if one.name not in names]
    for one in model.graph.initializer:
        if one.name in names:
            changed.graph.input.append(onnx.helper.make_tensor_value_info(one.name, one.data_type, one.dims))
    del changed.graph.initializer[:]
    changed.graph.initializer.extend(kept)
    return changed


def milliseconds(model: onnx.ModelProto, feeds: Mapping[str, Array]) -> tuple[float, dict[str, Array]]:
    """Return the least time of a run in one thread, and the outputs."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    library.register(options)
    session = onnxruntime.InferenceSession(model.SerializeToString(), options)
    given = {value.name: feeds[value.name] for value in session.get_inputs()}
    names = [value.name for value in session.get_outputs()]
    times = []
    for _ in range(TIMED_STEPS):
        begin = time.perf_counter()
        results = session.run(names, given)
        times.append(time.perf_counter() - begin)
    return min(times) * 1e3, dict(zip(names, results, strict=True))


def model_rows() -> Iterator[str]:
    """Yield a row for each model: whether gradients are torch's, time to differentiate, time of a step, nodes."""
    for name in MODELS_COMPARED:
        model = MODELS[name]
        torch.manual_seed(0)
        module = WithLoss(model)
        batch = model.batch(ITEMS, LENGTH)
        forward = exported(module, batch)
        module.zero_grad()
        module(*batch).backward()
        exact = {n: p.grad.numpy() for n, p in module.named_parameters() if p.grad is not None}
        initializers = {one.name: onnx.numpy_helper.to_array(one) for one in forward.graph.initializer}
        parameters = [one for one in exact if one in initializers]
        tensors = [tensor.numpy() for part in batch for tensor in part]
        inputs = [value.name for value in forward.graph.input]
        feeds = initializers | dict(zip(inputs, tensors, strict=True))
        (loss,) = (value.name for value in forward.graph.output)
        feeds |= {f"adj_{loss}": np.ones(1, np.float32)}

        builds = {
            "{}.grad": [functools.partial(by_gradfuse, forward, parameters, fuse) for fuse in (True, False)],
            "adj_{}": [functools.partial(by_onnx_ad, forward, parameters, loss)],
        }
        cells = [measured(build, form, feeds, exact, parameters) for form, some in builds.items() for build in some]
        yield f"| {name} | {' | '.join(cells)} |\n"


def by_gradfuse(forward: onnx.ModelProto, parameters: list[str], fuse: bool) -> onnx.ModelProto:
    return gradfuse.build_training_step(forward, None, trainable=parameters, fuse=fuse).model


def by_onnx_ad(forward: onnx.ModelProto, parameters: list[str], loss: str) -> onnx.ModelProto:
    given = with_parameters_as_inputs(forward, parameters)
    derived: onnx.ModelProto = onnx_ad().reverse(given, inputs=parameters, outputs=[loss], layout="onnx")
    return derived


def measured(
    build: Callable[[], onnx.ModelProto],
    form: str,
    feeds: Mapping[str, Array],
    exact: Mapping[str, Array],
    names: Sequence[str],
) -> str:
    """Return what it takes to build a model and to run it, and whether its gradients are wrong."""
    begin = time.perf_counter()
    try:
        model = build()
        seconds = time.perf_counter() - begin
        step, results = milliseconds(model, feeds)
    except Exception as error:  # as above
        text = " ".join(str(error).split()) or type(error).__name__
        return f"error: {text[:100].replace('|', ' ')}"
    largest = max(float(np.abs(gradient).max()) for gradient in exact.values())
    gradients = {name: np.asarray(results[form.format(name)]) for name in names}
    errors = [np.abs(g.reshape(exact[n].shape) - exact[n]).max() for n, g in gradients.items()]
    right = "" if max(errors) <= RIGHT * largest else "wrong; "
    return f"{right}{seconds:.1f} s, {step:.1f} ms, {len(model.graph.node)} nodes"


def rows() -> Iterator[str]:
    both = [node_test_counts(node_tests.by_gradfuse), node_test_counts(of_case)]
    for outcome in ("right", "wrong", "not differentiated, or does not run"):
        yield f"| node tests: {outcome} | {both[0][outcome]} | the same | {both[1][outcome]} |\n"
    yield from model_rows()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--page", type=Path, help="put the table into this page, between its marks")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    print(HEAD, end="")
    lines = []
    for line in rows():
        print(line, end="", flush=True)
        lines.append(line)
    if options.page:
        before, begin, rest = options.page.read_text().partition("<!-- onnx-ad -->\n")
        _, end, after = rest.partition("<!-- end of onnx-ad -->")
        options.page.write_text(f"{before}{begin}{HEAD}{''.join(lines)}{end}{after}")


if __name__ == "__main__":
    main()
