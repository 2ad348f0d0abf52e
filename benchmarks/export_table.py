"""Which models export as training steps, with which axes dynamic, and how exact their gradients are.

    python benchmarks/export_table.py [--page FILE]

The models are those of tests/support/training_models.py. Each is exported with one batch and run with larger ones,
with the library and without; errors are the largest of all its gradients against PyTorch in float64. Of a single batch
their ratio says little: the medians over several are given.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

from training_models import MODELS, Arrays, Model, autograd, run

from gradfuse import ExportError, export_training_step

BATCHES = 9

HEAD = """\
| model | dynamic axes | fused operators | PyTorch's error | with the library | without |
|---|---|---|---|---|---|
"""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--page", type=Path, help="put the table into this page, between its marks")
    options = parser.parse_args(arguments)
    print(HEAD, end="")
    lines = []
    for line in rows():
        print(line, end="", flush=True)
        lines.append(line)
    if options.page:
        before, begin, rest = options.page.read_text().partition("<!-- measured -->\n")
        _, end, after = rest.partition("<!-- end -->")
        options.page.write_text(f"{before}{begin}{HEAD}{''.join(lines)}{end}{after}")


def rows() -> Iterator[str]:
    """The lines of the table, one a model."""
    for name, model in MODELS.items():
        try:
            yield f"| {name} | {' | '.join(_row(model))} |\n"
        except ExportError as error:
            yield f"| {name} | not exported: {error} | | | | |\n"


def _row(model: Model) -> Iterator[str]:
    torch.manual_seed(0)
    module = model.module()
    step = export_training_step(module, model.loss, model.batch(2, 6), dynamic_shapes=model.dynamic_shapes)
    yield ", ".join(dict.fromkeys(name for axes in model.dynamic for name in axes.values()))
    fused = Counter(node.op_type for node in step.model.graph.node if node.domain == "aclnn")
    yield ", ".join(name if count == 1 else f"{count} {name}" for name, count in sorted(fused.items()))

    errors: dict[str, list[float]] = {"PyTorch": [], "library": [], "bodies": []}
    for _ in range(BATCHES):
        batch = model.batch(3, 9)
        exact = autograd(module, model.loss, batch, torch.float64, step)
        errors["PyTorch"].append(_error(autograd(module, model.loss, batch, torch.float32, step), exact))
        for kind, kernels in (("library", True), ("bodies", False)):
            errors[kind].append(_error(run(step, batch, kernels=kernels), exact) / errors["PyTorch"][-1])
    yield f"{np.median(errors['PyTorch']):.1e}"
    for kind in ("library", "bodies"):
        yield f"{np.median(errors[kind]):.2f} x"


def _error(results: Arrays, exact: Arrays) -> float:
    return max(float(np.abs(results[name] - exact[name]).max()) for name in exact if name.endswith(".grad"))


if __name__ == "__main__":
    main()
