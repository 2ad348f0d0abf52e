"""Models of other people's libraries, tiny and with random weights: each a function that writes one as an ONNX file.

To add one, write a function and decorate it with `case`.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import onnx
import torch
from torch import Tensor, nn

Array: TypeAlias = npt.NDArray[Any]


@dataclasses.dataclass(frozen=True)
class Trained:
    """A model in a file, and what its training is compared with.

    Attributes:
        batch: input -> array.
        targets: what the loss compares the output with.
        loss: the name of the loss, for the command line.
        gradients: the loss and the gradients, by the name of the initializer, in a floating-point type.
        frozen: initializers that are no parameters, such as float buffers.
        checked: whether some gradients have nothing to be compared with but differences of the loss.
        rate: the learning rate of Adam at which training lowers the loss.
    """

    batch: Mapping[str, Array]
    targets: Array
    loss: str
    gradients: Callable[[torch.dtype], tuple[float, Mapping[str, Array]]]
    frozen: tuple[str, ...] = ()
    checked: bool = False
    rate: str = "1e-2"


Case: TypeAlias = "Callable[[Path], Trained]"

CASES: dict[str, Case] = {}

TENSORFLOW = os.environ.get("GRADFUSE_TENSORFLOW", ".venv-models/tensorflow/bin/python")
"""The interpreter of an environment with TensorFlow and tf2onnx, which want other versions than all else."""


def case(function: Case) -> Case:
    """Put a case into the table, under the name of its function."""
    CASES[function.__name__.replace("_", "-")] = function
    return function


class _Logits(nn.Module):
    """A model of transformers or timm as a function from tensors to its logits, classes second."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        result = self.model(x)
        logits: Tensor = result if isinstance(result, Tensor) else result.logits
        return logits.movedim(-1, 1)


def _exported(path: Path, module: nn.Module, x: Tensor, targets: Tensor) -> Trained:
    """Write a module with the plain exporter of torch; its parameters keep their names."""
    module = _Logits(module).eval()
    torch.onnx.export(
        module,
        (x,),
        path,
        dynamo=True,
        optimize=False,
        input_names=["x"],
        dynamic_shapes=({0: torch.export.Dim.DYNAMIC},),
    )

    def gradients(dtype: torch.dtype) -> tuple[float, Mapping[str, Array]]:
        copy = module.to(dtype)
        copy.zero_grad()
        loss = nn.functional.cross_entropy(copy(x.to(dtype) if x.is_floating_point() else x), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        # A weight that is shared has several names, of which the file has one.
        named: dict[torch.nn.Parameter, str] = {}
        for name, p in copy.named_parameters(remove_duplicate=False):
            if p not in named or name in written:
                named[p] = name
        return loss.item(), {name: p.grad.numpy().copy() for p, name in named.items() if p.grad is not None}

    # Statistics of batch normalisation are no parameters anyway.
    written = {value.name for value in onnx.load(path, load_external_data=False).graph.initializer}
    buffers = [n for n, b in module.named_buffers() if b.is_floating_point() and n in written and "running_" not in n]
    return Trained({"x": x.numpy()}, targets.numpy(), "cross_entropy", gradients, tuple(buffers))


@case
def gpt2(path: Path) -> Trained:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=50, n_positions=16, n_embd=16, n_layer=2, n_head=2, use_cache=False)
    ids = torch.randint(0, 50, (3, 9))
    return _exported(path, GPT2LMHeadModel(config), ids[:, :-1], ids[:, 1:])


@case
def llama(path: Path) -> Trained:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16,
        use_cache=False,
    )
    ids = torch.randint(0, 50, (3, 9))
    return _exported(path, LlamaForCausalLM(config), ids[:, :-1], ids[:, 1:])


@case
def bert(path: Path) -> Trained:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=16,
        num_labels=5,
    )
    return _exported(path, BertForSequenceClassification(config), torch.randint(0, 50, (3, 8)), torch.tensor([0, 4, 2]))


@case
def resnet(path: Path) -> Trained:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[2, 2], layer_type="basic", num_labels=5)
    return _exported(path, ResNetForImageClassification(config), torch.randn(3, 3, 32, 32), torch.tensor([0, 4, 2]))


@case
def timm_resnet(path: Path) -> Trained:
    """With bottlenecks, groups and squeeze-and-excitation; its batch norms stay as they are."""
    from real_models.step_cases import timm_model

    model = timm_model("seresnext26d_32x4d", layers=[1, 1, 1, 1], channels=(16, 16, 32, 32), stem_width=8)
    return _exported(path, model(), torch.randn(3, 3, 32, 32), torch.tensor([0, 4, 2]))


@case
def vit(path: Path) -> Trained:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        image_size=16,
        patch_size=8,
        num_labels=5,
    )
    return _exported(path, ViTForImageClassification(config), torch.randn(3, 3, 16, 16), torch.tensor([0, 4, 2]))


@case
def scikit_learn_mlp(path: Path) -> Trained:
    """A regressor that scikit-learn has fitted, written by skl2onnx."""
    from skl2onnx import to_onnx
    from sklearn.neural_network import MLPRegressor

    rng = np.random.default_rng(0)
    x = rng.standard_normal((64, 4)).astype(np.float32)
    y = np.sin(x.sum(1, keepdims=True)).astype(np.float32)
    fitted = MLPRegressor(hidden_layer_sizes=(8, 6), max_iter=20, random_state=0).fit(x, y[:, 0])
    model = to_onnx(fitted, x[:1])
    path.write_bytes(model.SerializeToString())

    def gradients(dtype: torch.dtype) -> tuple[float, Mapping[str, Array]]:
        pairs = zip(fitted.coefs_, fitted.intercepts_, strict=True)
        # The file has the weights in float32.
        layers = [[torch.tensor(one.astype(np.float32)).to(dtype).requires_grad_() for one in pair] for pair in pairs]
        h = torch.tensor(x).to(dtype)
        for k, (weight, bias) in enumerate(layers):
            h = h @ weight + bias
            h = h.relu() if k < len(layers) - 1 else h
        loss = nn.functional.mse_loss(h, torch.tensor(y).to(dtype))
        loss.backward()  # type: ignore[no-untyped-call]
        found: dict[str, Array] = {}
        for k, (weight, bias) in enumerate(layers):
            assert weight.grad is not None and bias.grad is not None
            suffix = str(k) if k else ""
            found |= {f"coefficient{suffix}": weight.grad.numpy(), f"intercepts{suffix}": bias.grad[None].numpy()}
        return loss.item(), found

    (name,) = [value.name for value in model.graph.input]
    return Trained({name: x}, y, "mse", gradients)


def _by_keras(name: str, path: Path) -> Trained:
    """A network of Keras, which tf2onnx writes where TensorFlow is; the gradients are TensorFlow's."""
    found = path.with_suffix(".npz")
    script = Path(__file__).with_name("keras_models.py")
    subprocess.run([TENSORFLOW, script, name, path, found], check=True, capture_output=True)
    arrays = dict(np.load(found))

    def gradients(dtype: torch.dtype) -> tuple[float, Mapping[str, Array]]:
        prefix = f"{str(dtype).removeprefix('torch.')}/"
        named = {key.removeprefix(prefix): array for key, array in arrays.items() if key.startswith(prefix)}
        return float(named.pop("loss")), named

    (x,) = (value.name for value in onnx.load(path).graph.input)
    # What tf2onnx has packed or folded has no counterpart: `check` compares its gradients with differences.
    return Trained({x: arrays["x"]}, arrays["targets"], "cross_entropy", gradients, checked=True, rate="5e-2")


for _name in ("images", "lstm", "gru", "attention"):
    CASES[f"keras-{_name}"] = functools.partial(_by_keras, _name)
