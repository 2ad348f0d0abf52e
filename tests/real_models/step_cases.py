"""Classes of transformers and timm in train mode, tiny and with random weights, each with its own loss.

The classes are as users have them: default dropout, attention and caches, and labels among the inputs where the class
computes a loss of its own. To add one, add a line to the table of its family.
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


def own_loss(loss: Tensor) -> Tensor:
    """The loss of a step whose module returns the loss."""
    return loss


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

add(
    "causal language models",
    language,
    {**TEXT, "labels": TOKENS},
    {
        "GPT2LMHeadModel": {"vocab_size": VOCABULARY, "n_positions": 64, "n_embd": 16, "n_layer": 2, "n_head": 2},
        "LlamaForCausalLM": GROUPED,
        "Qwen3ForCausalLM": GROUPED,
        "Gemma2ForCausalLM": GROUPED,
        "Gemma3ForCausalLM": GROUPED,
        "PhiForCausalLM": TINY,
        "MistralForCausalLM": GROUPED,
    },
)
add(
    "mixture of experts",
    language,
    {**TEXT, "labels": TOKENS},
    {"MixtralForCausalLM": {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}},
)
add(
    "encoders",
    sentences,
    {**TEXT, "labels": BATCH},
    {
        "BertForSequenceClassification": {**TINY, "num_labels": CLASSES},
        "DistilBertForSequenceClassification": {
            "vocab_size": VOCABULARY,
            "dim": 16,
            "hidden_dim": 24,
            "n_layers": 2,
            "n_heads": 2,
            "max_position_embeddings": 64,
            "num_labels": CLASSES,
        },
        "RobertaForSequenceClassification": {**TINY, "num_labels": CLASSES},
        "ElectraForSequenceClassification": {**TINY, "embedding_size": 12, "num_labels": CLASSES},
        "DebertaV2ForSequenceClassification": {
            **TINY,
            "num_labels": CLASSES,
            "relative_attention": True,
            "pos_att_type": ["p2c", "c2p"],
            "position_buckets": 8,
            "norm_rel_ebd": "layer_norm",
            "share_att_key": True,
            "position_biased_input": False,
        },
        "MobileBertForSequenceClassification": {
            **TINY,
            "embedding_size": 16,
            "intra_bottleneck_size": 8,
            "true_hidden_size": 8,
            "num_labels": CLASSES,
        },
        "ModernBertForSequenceClassification": {**TINY, **SPECIAL, "num_labels": CLASSES, "local_attention": 6},
    },
)
add(
    "sequence to sequence",
    translations,
    {**TEXT, "labels": {0: "batch", 1: "target_length"}},
    {
        "T5ForConditionalGeneration": {
            "vocab_size": VOCABULARY,
            "d_model": 16,
            "d_kv": 8,
            "d_ff": 24,
            "num_layers": 2,
            "num_heads": 2,
            "decoder_start_token_id": 0,
        },
        "BartForConditionalGeneration": {
            "vocab_size": VOCABULARY,
            "d_model": 16,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 2,
            "encoder_ffn_dim": 24,
            "decoder_ffn_dim": 24,
            "max_position_embeddings": 64,
            **SPECIAL,
        },
    },
)
add(
    "sequence to sequence",
    lambda items, length: {"input_features": torch.randn(items, 8, 40), "labels": ids(items, length)},
    {"input_features": BATCH, "labels": TOKENS},
    {
        "WhisperForConditionalGeneration": {
            "vocab_size": VOCABULARY,
            "num_mel_bins": 8,
            "d_model": 16,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 2,
            "encoder_ffn_dim": 24,
            "decoder_ffn_dim": 24,
            "max_source_positions": 20,
            "max_target_positions": 64,
            "decoder_start_token_id": 1,
            **SPECIAL,
        }
    },
)
WAVES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "conv_dim": (8, 8, 8),
    "conv_stride": (5, 4, 2),
    "conv_kernel": (10, 4, 2),
    "num_feat_extract_layers": 3,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
}
add(
    "speech with CTC",
    speech,
    {"input_values": TOKENS, "labels": BATCH},
    {"Wav2Vec2ForCTC": WAVES, "WavLMForCTC": WAVES, "HubertForCTC": WAVES},
)
IMAGE = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": SIZE,
    "patch_size": 8,
}
add(
    "vision",
    pictures,
    {"pixel_values": BATCH, "labels": BATCH},
    {
        "ViTForImageClassification": {**IMAGE, "num_labels": CLASSES},
        "SwinForImageClassification": {
            "image_size": SIZE,
            "patch_size": 2,
            "embed_dim": 8,
            "depths": [2, 2],
            "num_heads": [2, 2],
            "window_size": 4,
            "num_labels": CLASSES,
        },
        "ConvNextForImageClassification": {
            "depths": [1, 1, 2, 1],
            "hidden_sizes": [8, 8, 16, 16],
            "drop_path_rate": 0.1,
            "num_labels": CLASSES,
        },
    },
)
CONTRASTIVE = {"text_config": {**TINY, **SPECIAL}, "vision_config": IMAGE, "projection_dim": 12}
add(
    "vision",
    lambda items, length: {
        "input_ids": torch.cat([ids(items, length - 1), torch.full((items, 1), 2)], 1),
        "pixel_values": images(items),
        "attention_mask": padding(items, length),
    },
    {**TEXT, "pixel_values": BATCH},
    {"CLIPModel": CONTRASTIVE},
    settings={"return_loss": True},
)
add(
    "vision",
    lambda items, length: {"input_ids": ids(items, 16), "pixel_values": images(items)},
    {"input_ids": BATCH, "pixel_values": BATCH},
    {"SiglipModel": {"text_config": {**TINY, "max_position_embeddings": 16}, "vision_config": IMAGE}},
    settings={"return_loss": True},
)
add(
    "vision",
    lambda items, length: {"pixel_values": images(items), "labels": torch.randint(0, CLASSES, (items, SIZE, SIZE))},
    {"pixel_values": BATCH, "labels": BATCH},
    {
        "SegformerForSemanticSegmentation": {
            "depths": [1, 1, 1, 1],
            "hidden_sizes": [8, 8, 16, 16],
            "num_attention_heads": [1, 1, 2, 2],
            "decoder_hidden_size": 16,
            "num_labels": CLASSES,
        }
    },
)


def _detr(**changed: Any) -> nn.Module:
    from transformers import DetrConfig, DetrForObjectDetection, ResNetConfig

    backbone = ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 8, 16, 16], depths=[1, 1, 1, 1], layer_type="basic", out_features=["stage4"]
    )
    model: nn.Module = DetrForObjectDetection(
        DetrConfig(
            use_timm_backbone=False,
            use_pretrained_backbone=False,
            backbone=None,
            backbone_config=backbone,
            num_queries=4,
            d_model=16,
            encoder_layers=1,
            decoder_layers=1,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=24,
            decoder_ffn_dim=24,
            num_labels=CLASSES,
            **changed,
        )
    )
    return _Logits(model)


class _Logits(nn.Module):
    """A model whose own loss cannot be in a graph, as it matches boxes by scipy: the classes of its queries."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: Tensor) -> Tensor:
        logits: Tensor = self.model(pixel_values).logits
        return logits.movedim(-1, 1)


CASES["DetrForObjectDetection"] = StepCase(
    "vision",
    _detr,
    lambda items, length: {"pixel_values": images(items, 64), "labels": torch.randint(0, CLASSES, (items, 4))},
    {"pixel_values": BATCH, "labels": BATCH},
    target="labels",
)
TIMM: Mapping[str, Mapping[str, Any]] = {
    "resnet18": {"channels": (8, 8, 16, 16)},
    "mobilenetv3_small_050": {},
    "mixer_s32_224": {"img_size": 64, "mlp_ratio": (0.5, 0.5)},
    "convnext_atto": {"dims": (8, 8, 16, 16), "depths": (1, 1, 1, 1), "drop_path_rate": 0.1},
}
for name, settings in TIMM.items():
    CASES[f"timm {name}"] = StepCase(
        "timm",
        timm_model(name, **settings),
        lambda items, length: {"x": images(items, 64), "labels": classes(items)},
        {"x": BATCH, "labels": BATCH},
        target="labels",
    )
add(
    "state spaces and time series",
    # Its scan is a loop over the tokens in Python.
    lambda items, length: {"input_ids": ids(items, 8), "labels": ids(items, 8)},
    {"input_ids": BATCH, "labels": BATCH},
    {"MambaForCausalLM": {"vocab_size": VOCABULARY, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 2}},
)


def series(items: int, length: int) -> Tensors:
    past, future = 16, 4
    return {
        "past_values": torch.rand(items, past) + 1.0,
        "past_time_features": torch.randn(items, past, 2),
        "past_observed_mask": torch.ones(items, past),
        "future_values": torch.rand(items, future) + 1.0,
        "future_time_features": torch.randn(items, future, 2),
    }


add(
    "state spaces and time series",
    series,
    dict.fromkeys(series(1, 1), BATCH),
    {
        "TimeSeriesTransformerForPrediction": {
            "prediction_length": 4,
            "context_length": 9,
            "lags_sequence": [1, 2, 7],
            "num_time_features": 2,
            "d_model": 16,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 2,
            "encoder_ffn_dim": 24,
            "decoder_ffn_dim": 24,
        }
    },
)
