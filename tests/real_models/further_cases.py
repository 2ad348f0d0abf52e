"""Further classes of the families of `step_cases`, and some that are like none of those.

They are here to find what else stops an export. To add one, add a line to the table of its family.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from real_models.step_cases import (
    BATCH,
    CASES,
    CLASSES,
    GROUPED,
    IMAGE,
    SPECIAL,
    TEXT,
    TINY,
    TOKENS,
    VOCABULARY,
    WAVES,
    StepCase,
    Tensors,
    add,
    classes,
    ids,
    images,
    language,
    padding,
    pictures,
    sentences,
    timm_model,
    transformer,
    translations,
)
from torch import Tensor, nn

add(
    "causal language models",
    language,
    {**TEXT, "labels": TOKENS},
    {
        "Qwen2ForCausalLM": GROUPED,
        "OPTForCausalLM": {
            "vocab_size": VOCABULARY,
            "hidden_size": 16,
            "ffn_dim": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "max_position_embeddings": 64,
            "word_embed_proj_dim": 16,
        },
        "GPTNeoXForCausalLM": TINY,
        "BloomForCausalLM": {"vocab_size": VOCABULARY, "hidden_size": 16, "n_layer": 2, "n_head": 2},
        "FalconForCausalLM": {**TINY, "new_decoder_architecture": False},
        "OlmoForCausalLM": GROUPED,
    },
)
add(
    "mixture of experts",
    language,
    {**TEXT, "labels": TOKENS},
    {
        "Qwen2MoeForCausalLM": {
            **GROUPED,
            "moe_intermediate_size": 8,
            "shared_expert_intermediate_size": 8,
            "num_experts": 4,
        }
    },
)
add(
    "encoders",
    language,
    {**TEXT, "labels": TOKENS},
    {"BertForMaskedLM": TINY, "XLMRobertaForMaskedLM": TINY, "AlbertForMaskedLM": {**TINY, "embedding_size": 12}},
)
add(
    "encoders",
    sentences,
    {**TEXT, "labels": BATCH},
    {"MPNetForSequenceClassification": {**TINY, "num_labels": CLASSES}},
)
add(
    "sequence to sequence",
    translations,
    {**TEXT, "labels": {0: "batch", 1: "target_length"}},
    {
        "MarianMTModel": {
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
    },
)
add(
    "speech",
    lambda items, length: {"input_values": torch.randn(items, 100 * length), "labels": classes(items)},
    {"input_values": TOKENS, "labels": BATCH},
    {"Wav2Vec2ForSequenceClassification": {**WAVES, "classifier_proj_size": 8, "num_labels": CLASSES}},
)
add(
    "vision",
    pictures,
    {"pixel_values": BATCH, "labels": BATCH},
    {
        "DeiTForImageClassification": {**IMAGE, "num_labels": CLASSES},
        "BeitForImageClassification": {**IMAGE, "num_labels": CLASSES},
        "Dinov2ForImageClassification": {**IMAGE, "num_labels": CLASSES},
        "ResNetForImageClassification": {
            "embedding_size": 8,
            "hidden_sizes": [8, 16],
            "depths": [1, 1],
            "layer_type": "basic",
            "num_labels": CLASSES,
        },
    },
)

DECODER = {**TINY, "num_key_value_heads": 2}
GPT = {"vocab_size": VOCABULARY, "n_positions": 64, "n_embd": 16, "n_layer": 2, "n_head": 2}
add(
    "causal language models",
    language,
    {**TEXT, "labels": TOKENS},
    {
        "Phi3ForCausalLM": {**TINY, **SPECIAL},
        "StableLmForCausalLM": DECODER,
        "CohereForCausalLM": DECODER,
        "Olmo2ForCausalLM": DECODER,
        "SmolLM3ForCausalLM": {**DECODER, **SPECIAL},
        "GPTNeoForCausalLM": {
            "vocab_size": VOCABULARY,
            "hidden_size": 16,
            "num_layers": 2,
            "num_heads": 2,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 4,
            "max_position_embeddings": 64,
        },
        "GPTJForCausalLM": {**GPT, "rotary_dim": 4},
        "MptForCausalLM": {"vocab_size": VOCABULARY, "d_model": 16, "n_layers": 2, "n_heads": 2, "max_seq_len": 64},
    },
)
add(
    "causal language models",
    language,
    {**TEXT, "labels": TOKENS},
    {"BioGptForCausalLM": {**TINY, "layerdrop": 0.1}},
)
add(
    "mixture of experts",
    language,
    {**TEXT, "labels": TOKENS},
    {
        "Qwen3MoeForCausalLM": {**GROUPED, "moe_intermediate_size": 8, "num_experts": 4, "num_experts_per_tok": 2},
        "OlmoeForCausalLM": {**DECODER, "num_experts": 4, "num_experts_per_tok": 2},
        "GraniteMoeForCausalLM": {**DECODER, "num_local_experts": 4, "num_experts_per_tok": 2},
        "DeepseekV3ForCausalLM": {
            **TINY,
            "moe_intermediate_size": 8,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "q_lora_rank": 8,
            "kv_lora_rank": 8,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 4,
            "v_head_dim": 4,
        },
    },
)
SPARSE = {
    "vocab_size": VOCABULARY,
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 24,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_sparse_encoder_layers": 1,
    "num_sparse_decoder_layers": 1,
    "num_heads": 2,
    "num_experts": 4,
    "decoder_start_token_id": 0,
}
add(
    "mixture of experts",
    translations,
    {**TEXT, "labels": {0: "batch", 1: "target_length"}},
    {"SwitchTransformersForConditionalGeneration": SPARSE},
)
add(
    "encoders",
    language,
    {**TEXT, "labels": TOKENS},
    {
        "RoFormerForMaskedLM": {**TINY, "embedding_size": 16},
        "ConvBertForMaskedLM": {**TINY, "embedding_size": 16, "conv_kernel_size": 3},
    },
)
add(
    "encoders",
    # Its Fourier transforms export for one size.
    lambda items, length: {"input_ids": ids(3, 8), "labels": ids(3, 8)},
    {},
    {"FNetForMaskedLM, one size": TINY},
)


def words(items: int, length: int) -> Tensors:
    """Return what names are found by: a class for each token."""
    mask = padding(items, length)
    labels = torch.randint(0, CLASSES, (items, length)).masked_fill(mask == 0, -100)
    return {"input_ids": ids(items, length), "attention_mask": mask, "labels": labels}


def answers(items: int, length: int) -> Tensors:
    """Return what answers are found by: where they begin and end."""
    return {
        "input_ids": ids(items, length),
        "attention_mask": padding(items, length),
        "start_positions": torch.randint(0, length, (items,)),
        "end_positions": torch.randint(0, length, (items,)),
    }


def numbers(items: int, length: int) -> Tensors:
    """Return what a number is predicted from."""
    return {"input_ids": ids(items, length), "attention_mask": padding(items, length), "labels": torch.randn(items)}


def several(items: int, length: int) -> Tensors:
    """Return what has any number of labels."""
    labels = (torch.rand(items, CLASSES) < 0.5).float()
    return {"input_ids": ids(items, length), "attention_mask": padding(items, length), "labels": labels}


add(
    "encoders",
    words,
    {**TEXT, "labels": TOKENS},
    {
        "BertForTokenClassification": {**TINY, "num_labels": CLASSES},
        "SqueezeBertForTokenClassification": {**TINY, "embedding_size": 16, "num_labels": CLASSES},
        "DebertaForTokenClassification": {
            **TINY,
            "num_labels": CLASSES,
            "relative_attention": True,
            "pos_att_type": ["p2c", "c2p"],
        },
    },
)
add(
    "encoders",
    answers,
    {**TEXT, "start_positions": BATCH, "end_positions": BATCH},
    {
        "DistilBertForQuestionAnswering": {
            "vocab_size": VOCABULARY,
            "dim": 16,
            "hidden_dim": 24,
            "n_layers": 2,
            "n_heads": 2,
            "max_position_embeddings": 64,
        }
    },
)
add(
    "encoders",
    several,
    {**TEXT, "labels": BATCH},
    {
        "BertForSequenceClassification, several labels": {
            **TINY,
            "num_labels": CLASSES,
            "problem_type": "multi_label_classification",
        }
    },
)
add(
    "regression",
    numbers,
    {**TEXT, "labels": BATCH},
    {
        "RobertaForSequenceClassification, a number": {**TINY, "num_labels": 1},
        "XLNetForSequenceClassification, a number": {
            "vocab_size": VOCABULARY,
            "d_model": 16,
            "n_layer": 2,
            "n_head": 2,
            "d_inner": 24,
            "num_labels": 1,
        },
    },
)
add(
    "regression",
    lambda items, length: {"past_values": torch.randn(items, 32, 3), "future_values": torch.randn(items, 8, 3)},
    {"past_values": BATCH, "future_values": BATCH},
    {
        "PatchTSTForPrediction": {
            "num_input_channels": 3,
            "context_length": 32,
            "prediction_length": 8,
            "patch_length": 8,
            "patch_stride": 8,
            "d_model": 16,
            "ffn_dim": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "loss": "mse",
        },
        "PatchTSMixerForPrediction": {
            "num_input_channels": 3,
            "context_length": 32,
            "prediction_length": 8,
            "patch_length": 8,
            "patch_stride": 8,
            "d_model": 16,
            "num_layers": 2,
        },
    },
)
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
add(
    "sequence to sequence",
    translations,
    {**TEXT, "labels": {0: "batch", 1: "target_length"}},
    {
        "PegasusForConditionalGeneration": TRANSLATOR,
    },
)
add(
    "sequence to sequence",
    # It attends in blocks of 4 tokens.
    lambda items, length: translations(items, (length + 3) // 4 * 4),
    {**TEXT, "labels": {0: "batch", 1: "target_length"}},
    {
        "LongT5ForConditionalGeneration": {
            "vocab_size": VOCABULARY,
            "d_model": 16,
            "d_kv": 8,
            "d_ff": 24,
            "num_layers": 2,
            "num_heads": 2,
            "decoder_start_token_id": 0,
            "local_radius": 3,
        },
    },
)
add(
    "sequence to sequence",
    translations,
    {**TEXT, "labels": {0: "batch", 1: "target_length"}},
    {"M2M100ForConditionalGeneration": TRANSLATOR},
)
add(
    "state spaces and time series",
    # Its scan is a loop over the tokens in Python.
    lambda items, length: {"input_ids": ids(items, 8), "labels": ids(items, 8)},
    {"input_ids": BATCH, "labels": BATCH},
    {
        "Mamba2ForCausalLM": {
            "vocab_size": VOCABULARY,
            "hidden_size": 16,
            "state_size": 4,
            "num_hidden_layers": 2,
            "num_heads": 4,
            "head_dim": 8,
            "n_groups": 2,
            "chunk_size": 4,
        },
        "RwkvForCausalLM": {
            "vocab_size": VOCABULARY,
            "hidden_size": 16,
            "attention_hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 2,
        },
    },
)
add(
    "speech",
    lambda items, length: {"input_values": torch.randn(items, 40, 16), "labels": classes(items)},
    {"input_values": BATCH, "labels": BATCH},
    {
        "ASTForAudioClassification": {
            **TINY,
            "max_length": 40,
            "num_mel_bins": 16,
            "patch_size": 8,
            "frequency_stride": 8,
            "time_stride": 8,
            "num_labels": CLASSES,
        }
    },
)
add(
    "speech",
    lambda items, length: {"input_features": torch.randn(items, 4 * length, 8), "labels": ids(items, length)},
    {"input_features": {0: "batch", 1: "frames"}, "labels": TOKENS},
    {
        "Speech2TextForConditionalGeneration": {
            **TRANSLATOR,
            "input_feat_per_channel": 8,
            "conv_channels": 16,
            "max_source_positions": 64,
            "max_target_positions": 64,
        }
    },
)
STAGES = {"depths": [1, 1, 1, 1], "hidden_sizes": [8, 8, 16, 16], "num_labels": CLASSES}
add(
    "vision",
    lambda items, length: {"pixel_values": images(items, 64), "labels": classes(items)},
    {"pixel_values": BATCH, "labels": BATCH},
    {
        "ConvNextV2ForImageClassification": {**STAGES, "drop_path_rate": 0.1},
        "Swinv2ForImageClassification": {
            "image_size": 64,
            "patch_size": 4,
            "embed_dim": 8,
            "depths": [1, 2],
            "num_heads": [2, 2],
            "window_size": 4,
            "num_labels": CLASSES,
        },
        "RegNetForImageClassification": {**STAGES, "embedding_size": 8, "groups_width": 8},
        "PoolFormerForImageClassification": {**STAGES, "drop_path_rate": 0.1},
        "PvtV2ForImageClassification": {
            "image_size": 64,
            "depths": [1, 1, 1, 1],
            "hidden_sizes": [8, 8, 16, 16],
            "num_attention_heads": [1, 1, 2, 2],
            "num_labels": CLASSES,
        },
        "MobileViTForImageClassification": {
            "image_size": 64,
            "hidden_sizes": [16, 16, 16],
            "neck_hidden_sizes": [8, 8, 16, 16, 16, 16, 24],
            "num_attention_heads": 2,
            "num_labels": CLASSES,
        },
        "LevitForImageClassification": {
            "image_size": 64,
            "hidden_sizes": [16, 32, 32],
            "num_attention_heads": [2, 2, 2],
            "depths": [1, 1, 1],
            "key_dim": [8, 8, 8],
            "num_labels": CLASSES,
        },
    },
)
add(
    "vision",
    lambda items, length: {"pixel_values": images(items)},
    {"pixel_values": BATCH},
    {
        "ViTMAEForPreTraining": {
            **IMAGE,
            "decoder_hidden_size": 16,
            "decoder_num_hidden_layers": 1,
            "decoder_num_attention_heads": 2,
            "decoder_intermediate_size": 24,
        }
    },
)


class Output(nn.Module):
    """A model whose own loss cannot be in a graph, as it matches boxes by scipy: one of its outputs."""

    def __init__(self, model: nn.Module, name: str) -> None:
        super().__init__()
        self.model = model
        self.name = name

    def forward(self, pixel_values: Tensor) -> Tensor:
        output: Tensor = getattr(self.model(pixel_values), self.name)
        return output


def box_detector(name: str, **settings: Any) -> Callable[..., nn.Module]:
    """Return the function that makes a detector, whose boxes are its output."""

    def make(**changed: Any) -> nn.Module:
        own = {"backbone_config": backbone()} if "backbone" in settings else {}
        return Output(transformer(name, **settings, **own)(**changed), "pred_boxes")

    return make


BOXES = 4


def backbone() -> object:
    from transformers import ResNetConfig

    return ResNetConfig(
        embedding_size=8,
        hidden_sizes=[8, 8, 16, 16],
        depths=[1, 1, 1, 1],
        layer_type="basic",
        out_features=["stage3", "stage4"],
    )


DETR = {
    "use_timm_backbone": False,
    "use_pretrained_backbone": False,
    "backbone": None,
    "num_queries": BOXES,
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "num_labels": CLASSES,
}
for name, make in {
    "YolosForObjectDetection": box_detector(
        "YolosForObjectDetection",
        **{**IMAGE, "image_size": [64, 64], "num_detection_tokens": BOXES, "num_labels": CLASSES},
    ),
    "ConditionalDetrForObjectDetection": box_detector("ConditionalDetrForObjectDetection", **DETR),
    "DeformableDetrForObjectDetection": box_detector(
        "DeformableDetrForObjectDetection",
        **{**DETR, "d_model": 32, "decoder_layers": 2},
        num_feature_levels=2,
        encoder_n_points=1,
        decoder_n_points=1,
    ),
}.items():
    CASES[name] = StepCase(
        "detection",
        make,
        lambda items, length: {"pixel_values": images(items, 64), "boxes": torch.rand(items, BOXES, 4)},
        {"pixel_values": BATCH, "boxes": BATCH},
        target="boxes",
        loss=F.mse_loss,
    )
FURTHER_TIMM: Mapping[str, Mapping[str, Any]] = {
    "tinynet_e": {},
    "efficientnet_lite0": {"drop_path_rate": 0.1},
    "vit_tiny_patch16_224": {
        "img_size": 64,
        "patch_size": 8,
        "depth": 2,
        "embed_dim": 16,
        "num_heads": 2,
        "drop_path_rate": 0.1,
    },
    "swin_tiny_patch4_window7_224": {
        "img_size": 64,
        "window_size": 4,
        "embed_dim": 8,
        "depths": (1, 2),
        "num_heads": (2, 2),
    },
    "densenet121": {"growth_rate": 4, "block_config": (2, 2)},
    "regnetx_002": {},
    "levit_128s": {"img_size": 64},
    "mobilevit_xxs": {},
    "resnest14d": {},
    "edgenext_xx_small": {},
    "ghostnet_050": {},
}
for name, settings in FURTHER_TIMM.items():
    CASES[f"timm {name}"] = StepCase(
        "timm",
        timm_model(name, **settings),
        lambda items, length: {"x": images(items, 64), "labels": classes(items)},
        {"x": BATCH, "labels": BATCH},
        target="labels",
    )
