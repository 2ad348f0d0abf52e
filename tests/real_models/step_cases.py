"""How classes of transformers, timm and torchvision are trained in train mode, tiny and with random weights.

The classes are as users have them: default dropout, attention and caches, and labels among the inputs where the class
computes a loss of its own. They are in tables by family, in the modules beside this one: to add a class, add a line to
the table of its family.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Tensors: TypeAlias = Mapping[str, Tensor]

Axes: TypeAlias = Mapping[str, Mapping[int, str]]

VOCABULARY, CLASSES, SIZE, CHANNELS = 40, 5, 32, 3


class WithLoss(nn.Module):
    """A model of transformers as a function from tensors to the loss that it computes itself."""

    def __init__(self, model: nn.Module, names: tuple[str, ...], **settings: Any) -> None:
        super().__init__()
        self.model = model
        self.names = names
        self.settings = settings

    def forward(self, *tensors: Tensor) -> Tensor:
        outputs = self.model(**dict(zip(self.names, tensors, strict=True)), **self.settings)
        loss: Tensor = outputs.loss
        return loss


def own_loss(loss: Tensor) -> Tensor:
    """The loss of a step whose module returns the loss."""
    return loss


@dataclasses.dataclass(frozen=True)
class StepCase:
    """A class, and how it is trained.

    Attributes:
        family: what kind of model it is.
        model: returns the model, given settings that are to be changed.
        batch: (items, length) -> the tensors of a batch by name, in the order of the arguments.
        axes: which axes vary, by name.
        settings: further arguments of every call.
        target: the tensor that the loss compares the output with; None where the model has its own loss.
        loss: that loss.
        change: settings of the configuration that a user changes where the class is refused as it is.
        fixed: axes that a user makes static where the class is refused with all of `axes`: 0 items, 1 tokens.
        refused: a part of the error where the class is refused even so; None: it must not be.
    """

    family: str
    model: Callable[..., nn.Module]
    batch: Callable[[int, int], Tensors]
    axes: Axes
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    target: str | None = None
    loss: Callable[..., Tensor] = F.cross_entropy
    change: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    fixed: tuple[int, ...] = ()
    refused: str | None = None

    def module(self, changed: bool = False) -> tuple[nn.Module, Callable[..., Tensor]]:
        """Return the module and the loss of a step."""
        model = self.model(**(self.change if changed else {})).train()
        if self.target is not None:
            return model, self.loss
        return WithLoss(model, tuple(self.batch(2, 8)), **self.settings), own_loss

    def tensors(self, items: int, length: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Return a batch as `export_training_step` takes it."""
        batch = self.batch(items, length)
        targets = () if self.target is None else (batch[self.target],)
        return tuple(tensor for name, tensor in batch.items() if name != self.target), targets

    def dynamic_shapes(self, changed: bool = False) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Return the axes that vary as `export_training_step` takes them."""
        fixed = self.fixed if changed else ()
        axes = {
            name: {axis: dim for axis, dim in self.axes.get(name, {}).items() if axis not in fixed}
            for name in self.batch(2, 8)
        }
        inputs = tuple(one for name, one in axes.items() if name != self.target)
        return inputs, () if self.target is None else (axes[self.target],)


CASES: dict[str, StepCase] = {}


def transformer(name: str, **settings: Any) -> Callable[..., nn.Module]:
    """Return the function that makes a class of transformers with these settings of its configuration.

    What follows a comma in the name says how the class is used.
    """

    def make(**changed: Any) -> nn.Module:
        import transformers

        cls = getattr(transformers, name.partition(",")[0])
        model: nn.Module = cls(cls.config_class(**{**settings, **changed}))
        return model

    return make


def load_torchvision() -> None:
    """Make torchvision and timm importable."""
    # The wheel of torchvision on PyPI is for CUDA. None of its operators is needed, but their schemas are.
    library = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
    for operator in ("nms", "qnms"):
        schema = f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        library.define(schema)  # type: ignore[no-untyped-call]
    sys.path.append(str(Path(sys.prefix) / "timm"))
    import torchvision  # noqa: F401


def timm_model(name: str, **settings: Any) -> Callable[..., nn.Module]:
    """Return the function that makes a model of timm."""

    def make(**changed: Any) -> nn.Module:
        load_torchvision()
        import timm

        model: nn.Module = timm.create_model(name, num_classes=CLASSES, **settings, **changed)
        return model

    return make


# Batches.


def ids(items: int, length: int) -> Tensor:
    return torch.randint(3, VOCABULARY, (items, length))


def classes(items: int) -> Tensor:
    return torch.randint(0, CLASSES, (items,))


def images(items: int, size: int = SIZE) -> Tensor:
    return torch.randn(items, CHANNELS, size, size)


def padding(items: int, length: int) -> Tensor:
    """Return an attention mask: the last items are shorter."""
    lengths = (length - torch.arange(items) % 3).clamp(min=1)
    return (torch.arange(length) < lengths.unsqueeze(1)).long()


def language(items: int, length: int) -> Tensors:
    """Return what a causal or masked language model is trained on."""
    tokens, mask = ids(items, length), padding(items, length)
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}


def sentences(items: int, length: int) -> Tensors:
    return {"input_ids": ids(items, length), "attention_mask": padding(items, length), "labels": classes(items)}


def translations(items: int, length: int) -> Tensors:
    return {
        "input_ids": ids(items, length),
        "attention_mask": padding(items, length),
        "labels": ids(items, length + 2),
    }


def pictures(items: int, length: int) -> Tensors:
    return {"pixel_values": images(items), "labels": classes(items)}


def speech(items: int, length: int) -> Tensors:
    return {"input_values": torch.randn(items, 100 * length), "labels": ids(items, 3)}


TOKENS = {0: "batch", 1: "length"}

TEXT = {"input_ids": TOKENS, "attention_mask": TOKENS}

BATCH = {0: "batch"}


def add(family: str, batch: Callable[[int, int], Tensors], axes: Axes, models: Mapping[str, Any], **rest: Any) -> None:
    """Put classes with the same kind of batch into the table: name -> settings of the configuration."""
    for name, settings in models.items():
        CASES[name] = StepCase(family, transformer(name, **settings), batch, axes, **rest)


TINY = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}

GROUPED = {**TINY, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4}

SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

IMAGE = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": SIZE,
    "patch_size": 8,
}

CONTRASTIVE = {"text_config": {**TINY, **SPECIAL}, "vision_config": IMAGE, "projection_dim": 12}

DECODER = {**TINY, "num_key_value_heads": 2}

TRANSLATOR = {
    "vocab_size": VOCABULARY,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "max_position_embeddings": 64,
    "decoder_start_token_id": 1,
    **SPECIAL,
}


def backbone() -> object:
    from transformers import ResNetConfig

    return ResNetConfig(
        embedding_size=8,
        hidden_sizes=[8, 8, 16, 16],
        depths=[1, 1, 1, 1],
        layer_type="basic",
        out_features=["stage3", "stage4"],
    )


LABELLED = {**TINY, "num_labels": CLASSES}

T5 = {
    "vocab_size": VOCABULARY,
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 24,
    "num_layers": 2,
    "num_heads": 2,
    "decoder_start_token_id": 0,
}

IMAGE_TOKEN = 39


class Squared(nn.Module):
    """A model without a loss of its own: the mean square of one of its outputs is to shrink."""

    def __init__(self, model: nn.Module, names: tuple[str, ...], output: str) -> None:
        super().__init__()
        self.model = model
        self.names = names
        self.output = output

    def forward(self, *tensors: Tensor) -> Tensor:
        outputs = self.model(**dict(zip(self.names, tensors, strict=True)))
        loss: Tensor = getattr(outputs, self.output).pow(2).mean()
        return loss


def squared(
    family: str,
    output: str,
    batch: Callable[[int, int], Tensors],
    axes: Axes,
    models: Mapping[str, Callable[..., nn.Module] | Mapping[str, Any]],
) -> None:
    """Put classes into the table that have no loss that can be in a graph."""
    for name, model in models.items():
        make = model if callable(model) else transformer(name, **model)

        def whole(make: Callable[..., nn.Module] = make, **changed: Any) -> nn.Module:
            return Squared(make(**changed), tuple(batch(2, 8)), output)

        CASES[name] = StepCase(
            family,
            whole,
            lambda items, length: {**batch(items, length), "zero": torch.zeros(())},
            axes,
            target="zero",
            loss=torch.sub,
        )


PICTURE = {"pixel_values": BATCH}

QWEN_PATCHES = 16
"""How many patches a picture of Qwen has."""


def patches(items: int, length: int) -> Tensors:
    """Return text with pictures as Qwen takes them: all patches of a batch in one row."""
    tokens = torch.cat([torch.full((items, 4), IMAGE_TOKEN), torch.randint(3, 30, (items, length))], 1)
    return {
        "input_ids": tokens,
        "pixel_values": torch.randn(QWEN_PATCHES * items, 3 * 2 * 8 * 8),
        "labels": tokens,
        "position_ids": torch.arange(length + 4).expand(3, items, -1).contiguous(),
        "mm_token_type_ids": (tokens == IMAGE_TOKEN).long(),
        "zero": torch.zeros(()),
    }


PADDED_GPT = {"vocab_size": VOCABULARY, "n_positions": 64, "n_embd": 16, "n_layer": 2, "n_head": 2, **SPECIAL}

CLASSIFYING_T5 = {**T5, "num_labels": CLASSES}
