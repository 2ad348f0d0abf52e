"""Gradient graphs of layers, and updates of optimizers, as PyTorch writes them, with its results in float64.

    .venv/bin/python tests/corpus/torch_layers.py FOLDER

Writes FOLDER/CASE.SPELLING.onnx and FOLDER/CASE.SPELLING.npz in the form of tests/corpus: by make_fx, by make_fx with
core ATen operators, by AOTAutograd's joint graph, and for optimizers with and without `foreach`. It needs nothing of
gradfuse. torch.onnx has no operators for the gradients of convolutions, and writes a batch normalisation
that trains as one that does not, so no case has these.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import onnx
import torch
from torch import Tensor, nn
from torch._decomp import core_aten_decompositions
from torch._functorch.aot_autograd import aot_export_module
from torch.fx.experimental.proxy_tensor import make_fx
from torch.optim import adam, adamw, sgd

Function = Callable[..., Any]
LAYERS: dict[str, tuple[Callable[[], list[nn.Module]], tuple[int, ...]]] = {
    "layer_norm": (lambda: [nn.Linear(8, 4), nn.LayerNorm(4), nn.Tanh()], (6, 8)),
    "layer_norm_plain": (lambda: [nn.Linear(8, 4), nn.LayerNorm(4, elementwise_affine=False)], (2, 3, 8)),
    "group_norm": (lambda: [nn.Linear(8, 36), nn.Unflatten(1, (4, 3, 3)), nn.GroupNorm(2, 4), nn.Tanh()], (3, 8)),
    "max_pool": (lambda: [nn.Linear(8, 50), nn.Unflatten(1, (2, 5, 5)), nn.MaxPool2d(3, 2, 1), nn.Tanh()], (3, 8)),
    "gelu": (lambda: [nn.Linear(8, 4), nn.GELU(), nn.Linear(4, 3)], (6, 8)),
    "gelu_tanh": (lambda: [nn.Linear(8, 4), nn.GELU("tanh"), nn.Linear(4, 3)], (6, 8)),
    "embedding": (lambda: [nn.Embedding(7, 4), nn.Tanh()], ()),
    "relu": (lambda: [nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 3)], (6, 8)),
}


class Weighted(nn.Module):
    """Layers, and a weighted sum of what they give."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor, weights: Tensor) -> tuple[Tensor]:
        return ((self.layers(x) * weights).sum(),)


class Traced(nn.Module):
    def __init__(self, traced: nn.Module) -> None:
        super().__init__()
        self.traced = traced

    def forward(self, *inputs: Tensor) -> Any:
        return self.traced(*inputs)


def _gradients(module: Weighted) -> tuple[Function, list[Tensor]]:
    """The loss and its gradients as a function of parameters and inputs; and the parameters."""
    names = [name for name, _ in module.named_parameters()]

    def step(*values: Tensor) -> tuple[Tensor, ...]:
        def loss(parameters: dict[str, Tensor]) -> Tensor:
            found: tuple[Tensor] = torch.func.functional_call(module, parameters, values[len(names) :])
            return found[0]

        given = dict(zip(names, values[: len(names)], strict=True))
        gradients, value = torch.func.grad_and_value(loss)(given)
        return value, *(gradients[name] for name in names)

    return step, [parameter.detach() for parameter in module.parameters()]


def _of_layers() -> Iterator[tuple[str, nn.Module, list[Tensor], Function]]:
    for name, (layers, sizes) in LAYERS.items():
        module = Weighted(layers()).train()
        x = torch.randn(sizes) if sizes else torch.tensor([[1, 2, 2], [0, 6, 1]])
        inputs = [x, torch.randn_like(module.layers(x))]
        step, parameters = _gradients(module)
        values = [*parameters, *inputs]
        for spelling, table in (("make_fx", None), ("core", dict(core_aten_decompositions()))):
            yield f"{name}.{spelling}", make_fx(step, decomposition_table=table)(*values), values, step
        joint, _ = aot_export_module(module, tuple(inputs), trace_joint=True, output_loss_index=0)
        assert isinstance(joint, nn.Module)
        yield f"{name}.joint", joint, values, step


def _each(name: str) -> Function:
    """An operator on lists as one on each of their elements: the ONNX exporter has none on lists."""
    plain, in_place = name.removeprefix("_foreach_").rstrip("_"), name.endswith("_")

    def run(xs: Any, *others: Any, **named: Any) -> Any:
        count = len(xs) if isinstance(xs, (list, tuple)) else len(others[0])
        results = []
        for k in range(count):
            x, *rest = (a[k] if isinstance(a, (list, tuple)) else a for a in (xs, *others))
            options = {key: a[k] if isinstance(a, (list, tuple)) else a for key, a in named.items()}
            if plain in ("addcmul", "addcdiv") and len(rest) > 2:
                options["value"] = rest.pop()
            results.append(getattr(torch, plain)(x, *rest, **options))
            if in_place:
                x.copy_(results[-1])
        return None if in_place else results

    return run


def _of_optimizers() -> Iterator[tuple[str, nn.Module, list[Tensor], Function]]:
    state = [torch.randn(4, 3), torch.randn(4, 3), torch.randn(4, 3) / 4, torch.rand(4, 3), torch.tensor(3.0)]
    common: dict[str, Any] = {
        "has_complex": False,
        "fused": False,
        "grad_scale": None,
        "found_inf": None,
        "amsgrad": False,
    }
    common |= {"beta1": 0.9, "beta2": 0.999, "weight_decay": 0.01, "eps": 1e-8, "maximize": False, "capturable": True}
    momentum: dict[str, Any] = {
        "has_sparse_grad": False,
        "fused": False,
        "grad_scale": None,
        "found_inf": None,
        "maximize": False,
    }
    momentum |= {"weight_decay": 0.01, "momentum": 0.9, "lr": 0.1, "dampening": 0.0}

    def moments(update: Function, **options: Any) -> Function:
        def step(*given: Tensor) -> tuple[Tensor, ...]:
            p, g, m, v, t = (value.clone() for value in given)
            update([p], [g], [m], [v], [], [t], lr=torch.tensor(0.01), differentiable=False, **common, **options)
            return p, m, v, t

        return step

    def velocity(**options: Any) -> Function:
        def step(*given: Tensor) -> tuple[Tensor, ...]:
            p, g, b = (value.clone() for value in given)
            sgd.sgd([p], [g], [b], **momentum, **options)
            return p, b

        return step

    for spelling, foreach in (("single", False), ("foreach", True)):
        yield from (
            (f"{name}.{spelling}", make_fx(step)(*values), values, step)
            for name, step, values in (
                ("adam", moments(adam.adam, foreach=foreach, decoupled_weight_decay=False), state),
                ("adamw", moments(adamw.adamw, foreach=foreach), state),
                ("sgd", velocity(foreach=foreach, nesterov=False), state[:3]),
                ("sgd_nesterov", velocity(foreach=foreach, nesterov=True), state[:3]),
            )
        )


def write(name: str, traced: nn.Module, values: list[Tensor], step: Function, folder: Path) -> None:
    program = torch.onnx.export(Traced(traced), tuple(values), dynamo=True, verbose=False)
    assert program is not None
    model = program.model_proto
    # Where each node came from, in the exporter's words, is most of a file.
    graph = model.graph
    for entry in (model, graph, *graph.node, *graph.value_info, *graph.input, *graph.output):
        del entry.metadata_props[:]
    for node in graph.node:
        node.ClearField("doc_string")
    del model.functions[:]
    onnx.save(model, folder / f"{name}.onnx")
    exact = step(*(value.double() if value.is_floating_point() else value for value in values))
    stored = {f"in.{entry.name}": value.numpy() for entry, value in zip(graph.input, values, strict=True)}
    stored |= {f"out.{entry.name}": value.numpy() for entry, value in zip(graph.output, exact, strict=False)}
    np.savez_compressed(folder / f"{name}.npz", allow_pickle=False, **stored)


def main(folder: str) -> None:
    warnings.simplefilter("ignore")
    Path(folder).mkdir(exist_ok=True)
    torch.manual_seed(0)
    for case in _of_layers():
        write(*case, Path(folder))
    with contextlib.ExitStack() as patches:
        for name in dir(torch):
            if name.startswith("_foreach_"):
                patches.enter_context(mock.patch.object(torch, name, _each(name)))
        # So that counts of steps may be tensors on a CPU.
        patches.enter_context(mock.patch.object(torch.compiler, "is_compiling", lambda: True))
        for case in _of_optimizers():
            write(*case, Path(folder))


if __name__ == "__main__":
    main(*sys.argv[1:])
