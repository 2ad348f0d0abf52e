"""Gradient graphs of small models and their losses by onnxruntime-training 1.19.2, with PyTorch's gradients.

Usage: .venv-ort-training/bin/python tests/ort_training/gradient_graphs.py FOLDER

Writes FOLDER/CASE.onnx and FOLDER/CASE.npz, in the form of tests/corpus, for each case: most as ORTModule has it
(parameters are inputs, a YieldOp stands where the caller's gradient of the loss comes in), some as `generate_artifacts`
has it, without the accumulation of gradients. `in.<name>` are the inputs, and `out.<name>` is the gradient of a
parameter in float64.
"""

from __future__ import annotations

import dataclasses
import io
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from onnx import helper, numpy_helper
from onnxruntime.capi import _pybind_state as native
from onnxruntime.training import artifacts
from torch import Tensor, nn
from torch.nn import functional as F

Loss = Callable[..., Tensor]
ROWS, CLASSES, TOKENS, VOCABULARY = 6, 5, 4, 7
WEIGHTS = torch.tensor([0.5, 1.0, 2.0, 1.5, 0.7])


class Block(nn.Module):
    future: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention, self.out = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)
        self.wide, self.narrow = nn.Linear(8, 12), nn.Linear(12, 8)
        self.register_buffer("future", torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        rows, count, width = x.shape
        query, key, value = (
            part.view(rows, count, 2, width // 2).transpose(1, 2) for part in self.attention(self.norm(x)).split(8, 2)
        )
        scores = (query @ key.transpose(-1, -2) * 0.5).masked_fill(self.future[:count, :count], float("-inf"))
        x = x + self.out((scores.softmax(-1) @ value).transpose(1, 2).reshape(rows, count, width))
        result: Tensor = x + self.narrow(F.gelu(self.wide(x)))
        return result


class Gpt(nn.Module):
    """What the loss gets are the scores of tokens in rows."""

    def __init__(self, loss: Loss | None = None, layers: int = 1) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(VOCABULARY, 8), nn.Parameter(torch.randn(TOKENS, 8) / 4)
        self.blocks = nn.Sequential(*(Block() for _ in range(layers)))
        self.norm, self.head, self.loss = nn.LayerNorm(8), nn.Linear(8, VOCABULARY, bias=False), loss

    def forward(self, tokens: Tensor, *targets: Tensor) -> Tensor:
        x = self.blocks(self.embedding(tokens) + self.position[: tokens.shape[1]])
        scores = self.head(self.norm(x)).view(-1, VOCABULARY)
        return scores if self.loss is None else self.loss(scores, *(target.view(-1) for target in targets))


class Scores(nn.Module):
    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.first, self.last, self.loss = nn.Linear(6, 8), nn.Linear(8, CLASSES), loss

    def forward(self, x: Tensor, *targets: Tensor) -> Tensor:
        return self.loss(self.last(self.first(x).tanh()), *targets)


class Pairs(nn.Module):
    """CLIP: each of one batch against each of another."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.left, self.right, self.loss = nn.Linear(6, 8), nn.Linear(6, 8), loss

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.left(x) @ self.right(y).t() / 0.7)


class Layers(nn.Module):
    """Layers, and a weighted sum of what they give."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        result: Tensor = (self.layers(x) * weights).sum()
        return result


def one_hot(target: Tensor) -> Tensor:
    return F.one_hot(target, CLASSES).float()


def _mean_of_counted(rows: Tensor, counted: Tensor) -> Tensor:
    return (rows * counted).sum() / counted.sum()


def _smoothed(scores: Tensor, target: Tensor) -> Tensor:
    """Label smoothing with weights of classes and ignored rows, all by hand."""
    smooth = one_hot(target) * 0.9 + 0.1 / CLASSES
    counted = (target != 1).float()
    rows = -(scores.log_softmax(-1) * smooth * WEIGHTS).sum(-1)
    return (rows * counted).sum() / (WEIGHTS[target] * counted).sum()


def _two_one_hots(scores: Tensor, target: Tensor) -> Tensor:
    own = (one_hot(target) * WEIGHTS).sum(-1)
    return -((scores.log_softmax(-1) * one_hot(target)).sum(-1) * own).sum() / own.sum()


def _both_ways(scores: Tensor) -> Tensor:
    target = torch.arange(scores.shape[0])
    return (F.cross_entropy(scores, target) + F.cross_entropy(scores.t(), target)) / 2


@dataclasses.dataclass(frozen=True)
class Case:
    """A model whose output is the loss.

    `internal`: whether the loss is the operator that ORTModule's exporter wrote, which takes the ignored class as an
    input. `labels`: what an exporter calls the rows of a model without a loss, to which onnxblock adds cross entropy.
    """

    module: Callable[[], nn.Module]
    inputs: Sequence[Tensor]
    dynamic: bool = True
    internal: bool = False
    labels: str | None = None


def _tokens(seed: int) -> Tensor:
    return torch.randint(0, VOCABULARY, (3, TOKENS), generator=torch.Generator().manual_seed(seed))


X = torch.randn(ROWS, 6, generator=torch.Generator().manual_seed(0))
Y = torch.randn(ROWS, 6, generator=torch.Generator().manual_seed(1))
IMAGES = torch.randn(3, 2, 6, 6, generator=torch.Generator().manual_seed(4))
TARGET = torch.tensor([0, 4, 2, 1, 3, 3])
VALUES = torch.randn(ROWS, CLASSES, generator=torch.Generator().manual_seed(2))


def _scores(loss: Loss, *targets: Tensor, **options: Any) -> Case:
    return Case(lambda: Scores(loss), (X, *(targets or (TARGET,))), **options)


def _layers(layers: Callable[[], Sequence[nn.Module]], x: Tensor, *sizes: int) -> Case:
    """`sizes`: those of the result."""
    return Case(lambda: Layers(*layers()), (x, torch.randn(sizes, generator=torch.Generator().manual_seed(3))))


CASES = {
    "gpt_rows_of_another_name": Case(lambda: Gpt(layers=2), (_tokens(0),), labels="tokens"),
    "gpt_rows_of_the_same_name": Case(Gpt, (_tokens(0),), labels="batch"),
    "gpt_ignored": Case(lambda: Gpt(lambda z, t: F.cross_entropy(z, t, ignore_index=2)), (_tokens(0), _tokens(1))),
    "gpt_internal": Case(lambda: Gpt(F.cross_entropy), (_tokens(0), _tokens(1)), internal=True),
    "one_hot": _scores(lambda z, t: -(z.log_softmax(-1) * one_hot(t)).sum(-1).mean()),
    "one_hot_fixed": _scores(lambda z, t: -(z.log_softmax(-1) * one_hot(t)).sum(-1).mean(), dynamic=False),
    "log_of_softmax": _scores(lambda z, t: -(z.softmax(-1).log() * one_hot(t)).sum(-1).mean()),
    "gathered": _scores(lambda z, t: -z.log_softmax(-1).gather(1, t.unsqueeze(1)).mean()),
    "two_one_hots": _scores(_two_one_hots),
    "smoothed_weighted_masked": _scores(_smoothed),
    "weighted_internal": _scores(lambda z, t: F.cross_entropy(z, t, WEIGHTS.to(z.dtype)), internal=True),
    "masked_rows": _scores(lambda z, t: _mean_of_counted(F.cross_entropy(z, t, reduction="none"), (t != 0).float())),
    "masked_gather": _scores(
        lambda z, t: _mean_of_counted(
            -z.log_softmax(-1).gather(1, (t * (t != 1).float().long()).unsqueeze(1)).squeeze(1), (t != 1).float()
        ),
        dynamic=False,
    ),
    "clip": Case(lambda: Pairs(_both_ways), (X, Y)),
    "clip_internal": Case(lambda: Pairs(_both_ways), (X, Y), internal=True),
    "clip_fixed": Case(lambda: Pairs(_both_ways), (X, Y), dynamic=False),
    "first_class": Case(
        lambda: Pairs(lambda z: F.cross_entropy(z, torch.zeros(z.shape[0], dtype=torch.long))), (X, Y), dynamic=False
    ),
    "embedding": _layers(lambda: (nn.Embedding(VOCABULARY, 4), nn.Tanh()), _tokens(0), 3, TOKENS, 4),
    "layer_norm": _layers(lambda: (nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh()), X, ROWS, 8),
    "layer_norm_plain": _layers(lambda: (nn.Linear(6, 8), nn.LayerNorm(8, elementwise_affine=False)), X, ROWS, 8),
    "batch_norm": _layers(lambda: (nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3), nn.Tanh()), IMAGES, 3, 3, 6, 6),
    "batch_norm_rows": _layers(lambda: (nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Tanh()), X, ROWS, 4),
    "convolution": _layers(lambda: (nn.Conv2d(2, 3, 3), nn.Tanh(), nn.Conv2d(3, 2, 3, 2, 1)), IMAGES, 3, 2, 2, 2),
    "convolution_depthwise": _layers(
        lambda: (nn.Conv2d(2, 4, 1), nn.Tanh(), nn.Conv2d(4, 4, 3, padding=1, groups=4)), IMAGES, 3, 4, 6, 6
    ),
    "gelu": _layers(lambda: (nn.Linear(6, 4), nn.GELU(), nn.Linear(4, 3)), X, ROWS, 3),
    "gelu_tanh": _layers(lambda: (nn.Linear(6, 4), nn.GELU("tanh"), nn.Linear(4, 3)), X, ROWS, 3),
    "max_pool": _layers(lambda: (nn.Conv2d(2, 3, 1), nn.MaxPool2d(2), nn.Tanh()), IMAGES, 3, 3, 3, 3),
    "max_pool_overlapping": _layers(lambda: (nn.Conv2d(2, 3, 1), nn.MaxPool2d(3, 2, 1)), IMAGES, 3, 3, 3, 3),
    "relu": _layers(lambda: (nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3)), X, ROWS, 3),
    "squared_error": _scores(lambda z, t: ((z - t) ** 2).mean(), VALUES),
    "squared_error_weighted": _scores(lambda z, t, w: ((z - t) ** 2 * w).mean(), VALUES, torch.rand(ROWS, 1)),
}


def export(case: Case, module: nn.Module) -> onnx.ModelProto:
    names = [f"input_{k}" for k in range(len(case.inputs))]
    axes = {name: {0: "batch"} for name in names} | ({} if case.labels is None else {"output": {0: case.labels}})
    buffer: Any = io.BytesIO()
    torch.onnx.export(
        module,
        tuple(case.inputs),
        buffer,
        dynamo=False,
        opset_version=17,
        training=torch.onnx.TrainingMode.TRAINING,
        do_constant_folding=False,
        input_names=names,
        output_names=["output"],
        dynamic_axes=axes if case.dynamic else {},
    )
    model = onnx.load_from_string(buffer.getvalue())
    for node in list(model.graph.node):
        # The gradient builder reads outputs that the exporter leaves out.
        if node.op_type == "LayerNormalization":
            node.output.extend([f"{node.output[0]}_mean", f"{node.output[0]}_deviation"])
        elif node.op_type == "SoftmaxCrossEntropyLoss":
            node.output.append(f"{node.output[0]}_log_prob")
            if case.internal:
                _make_internal(model, node)
    return model


def _make_internal(model: onnx.ModelProto, node: onnx.NodeProto) -> None:
    ignored = next(attribute for attribute in node.attribute if attribute.name == "ignore_index")
    constant = helper.make_node("Constant", [], [f"{node.output[0]}_ignored"])
    constant.attribute.append(helper.make_attribute("value", numpy_helper.from_array(np.asarray(ignored.i))))
    node.attribute.remove(ignored)
    node.input.extend([""] * (3 - len(node.input)) + [constant.output[0]])
    node.op_type, node.domain = "SoftmaxCrossEntropyLossInternal", "com.microsoft"
    model.graph.node.insert(0, constant)
    if not any(entry.domain == node.domain for entry in model.opset_import):
        model.opset_import.append(helper.make_opsetid(node.domain, 1))


def differentiated(model: onnx.ModelProto, trainable: Sequence[str]) -> onnx.ModelProto:
    """The gradient graph as ORTModule has it."""
    builder, configuration = native.OrtModuleGraphBuilder(), native.OrtModuleGraphBuilderConfiguration()
    configuration.initializer_names = [tensor.name for tensor in model.graph.initializer]
    configuration.initializer_names_to_train = trainable
    configuration.input_names_require_grad = []
    configuration.build_gradient_graph = True
    builder.initialize(model.SerializeToString(), configuration)
    builder.build(native.TrainingGraphTransformerConfiguration())
    return onnx.load_from_string(builder.get_gradient_model())


def with_loss(model: onnx.ModelProto, trainable: Sequence[str]) -> onnx.ModelProto:
    """The training model of artifacts with onnxblock's cross entropy, which gives gradients in the place of flags."""
    shapes = {f"{tensor.name}_grad": tensor.dims for tensor in model.graph.initializer}
    with tempfile.TemporaryDirectory() as folder:
        artifacts.generate_artifacts(
            model,
            requires_grad=trainable,
            frozen_params=[tensor.name for tensor in model.graph.initializer if tensor.name not in trainable],
            loss=artifacts.LossType.CrossEntropyLoss,
            artifact_directory=folder,
        )
        model = onnx.load(Path(folder, "training_model.onnx"))
    gradients = {node.output[0]: node.input[1] for node in model.graph.node if node.op_type == "InPlaceAccumulatorV2"}
    for node in [node for node in model.graph.node if node.op_type == "InPlaceAccumulatorV2"]:
        model.graph.node.remove(node)
    for output in [output for output in model.graph.output if output.name in gradients]:
        model.graph.output.remove(output)
    names = [value.name for value in model.graph.input if not value.name.endswith(("buffer", "reset_grad"))]
    inputs = [value for value in model.graph.input if value.name in names]
    del model.graph.input[:]
    model.graph.input.extend(inputs)
    for name in gradients.values():
        model.graph.output.append(helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shapes[name]))
    return model


def produce(name: str, folder: Path) -> None:
    case = CASES[name]
    torch.manual_seed(0)
    module = case.module().train()
    model = export(case, module)
    trainable = [name for name, _ in module.named_parameters() if any(t.name == name for t in model.graph.initializer)]
    state = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    feeds = {f"input_{k}": tensor.numpy() for k, tensor in enumerate(case.inputs)}
    target: Tensor | None = None
    if case.labels is None:
        model = differentiated(model, trainable)
    else:
        model = with_loss(model, trainable)
        target = _tokens(1).flatten()
        feeds["labels"] = target.numpy()
    feeds |= {value.name: state[value.name] for value in model.graph.input if value.name in state}
    exact = module.double()
    loss = exact(*(tensor.double() if tensor.is_floating_point() else tensor for tensor in case.inputs))
    if target is not None:
        loss = F.cross_entropy(loss, target)
    gradients = torch.autograd.grad(loss, [dict(exact.named_parameters())[name] for name in trainable])
    arrays = {f"in.{name}": array for name, array in feeds.items()}
    arrays |= {f"out.{name}_grad": grad.numpy() for name, grad in zip(trainable, gradients, strict=True)}
    onnx.save(model, folder / f"{name}.onnx")
    np.savez_compressed(folder / f"{name}.npz", allow_pickle=False, **arrays)


def main(folder: str, *names: str) -> None:
    warnings.simplefilter("ignore")
    onnxruntime.set_default_logger_severity(4)
    Path(folder).mkdir(exist_ok=True)
    for name in names or CASES:
        produce(name, Path(folder))


if __name__ == "__main__":
    main(*sys.argv[1:])
