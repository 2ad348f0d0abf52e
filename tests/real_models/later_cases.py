"""Further architectures of transformers, and those of torchvision.

To add one, add a line to the table of its family.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from real_models.head_cases import answers
from real_models.latest_cases import squared
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
    StepCase,
    Tensors,
    add,
    classes,
    ids,
    images,
    language,
    load_torchvision,
    padding,
)
from torch import nn

LATENT = {
    **TINY,
    "num_key_value_heads": 2,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
}
SLIDING = {**GROUPED, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
add(
    "causal language models",
    language,
    {**TEXT, "labels": TOKENS},
    {
        "MiniCPM3ForCausalLM": LATENT,
        "YoutuForCausalLM": LATENT,
        "TrOCRForCausalLM": {
            "vocab_size": VOCABULARY,
            "d_model": 16,
            "decoder_layers": 2,
            "decoder_attention_heads": 2,
            "decoder_ffn_dim": 24,
            "max_position_embeddings": 64,
            **SPECIAL,
        },
        "OlmoHybridForCausalLM": {
            **GROUPED,
            **SPECIAL,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "layer_types": ["linear_attention", "full_attention"],
        },
        "BertGenerationDecoder": {**TINY, "is_decoder": True},
        "Lfm3ForCausalLM": {**SLIDING, **SPECIAL, "layer_types": ["conv", "sliding_attention"], "conv_L_cache": 3},
        "HrmTextForCausalLM": {**GROUPED, "num_layers_per_stack": 1, "num_hidden_layers": 12},
    },
)
ROUTED = {
    **GROUPED,
    "moe_intermediate_size": 8,
    "n_routed_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
}
EXPERTS = {**SLIDING, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
add(
    "mixture of experts",
    language,
    {**TEXT, "labels": TOKENS},
    {
        "AfmoeForCausalLM": {**ROUTED, "num_dense_layers": 1, "num_shared_experts": 1, "sliding_window": 4},
        "ExaoneMoeForCausalLM": {**ROUTED, "sliding_window": 4, "sliding_window_pattern": 2},
        "Glm4MoeLiteForCausalLM": {**ROUTED, **LATENT},
        "SolarOpenForCausalLM": ROUTED,
        "HYV3ForCausalLM": ROUTED,
        "Mistral4ForCausalLM": {**ROUTED, **LATENT},
        "MiMoV2FlashForCausalLM": {
            **ROUTED,
            **SLIDING,
            "head_dim": 8,
            "v_head_dim": 4,
            "n_group": 1,
            "mlp_layer_types": ["dense", "sparse"],
        },
        "Cohere2MoeForCausalLM": {**SLIDING, **SPECIAL, "num_experts": 4, "num_experts_per_tok": 2},
        "NemotronHForCausalLM": {
            **GROUPED,
            **SPECIAL,
            "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
            "ssm_state_size": 4,
            "mamba_num_heads": 4,
            "mamba_head_dim": 8,
            "n_groups": 2,
            "chunk_size": 4,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 8,
            "moe_shared_expert_intermediate_size": 8,
        },
        "ZayaForCausalLM": {
            **GROUPED,
            **SPECIAL,
            "moe_intermediate_size": 8,
            "num_experts": 4,
            "num_experts_per_tok": 1,
            "router_hidden_size": 8,
            "layer_types": ["hybrid", "hybrid"],
        },
        "LagunaForCausalLM": {**EXPERTS, "shared_expert_intermediate_size": 8},
        "FlintForCausalLM": {**EXPERTS, "shared_expert_intermediate_size": 8, "mlp_only_layers": [0]},
        "MellumForCausalLM": {**EXPERTS, "num_local_experts": 4},
    },
)
INDEXED = {
    **ROUTED,
    **LATENT,
    "mlp_layer_types": ["dense", "sparse"],
    "index_topk": 4,
    "index_head_dim": 8,
    "index_n_heads": 2,
}
add(
    "mixture of experts",
    language,
    {**TEXT, "labels": TOKENS},
    {"DeepseekV32ForCausalLM": INDEXED, "GlmMoeDsaForCausalLM": {**INDEXED, "n_group": 1}},
    refused="topk chooses between equal numbers",
)
add(
    "mixture of experts",
    language,
    {**TEXT, "labels": TOKENS},
    {
        "LongcatFlashForCausalLM": {
            **LATENT,
            "num_layers": 1,
            "ffn_hidden_size": 24,
            "moe_topk": 2,
            "n_routed_experts": 4,
            "zero_expert_num": 2,
            "expert_ffn_hidden_size": 8,
            "head_dim": 4,
        }
    },
    refused="LongcatFlashExperts.forward",
)
add(
    "encoders",
    language,
    {**TEXT, "labels": TOKENS},
    {
        "JinaEmbeddingsV3ForMaskedLM": TINY,
        "NomicBertForMaskedLM": TINY,
        "GteForMaskedLM": {**TINY, **SPECIAL},
        "EsmcForMaskedLM": {
            **TINY,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "mask_token_id": 5,
            "pad_token_id": 0,
        },
    },
)
add(
    "encoders",
    answers,
    {**TEXT, "start_positions": BATCH, "end_positions": BATCH},
    {"SplinterForQuestionAnswering": {**TINY, "question_token_id": 4}},
)


def marked(items: int, length: int) -> Tensors:
    """Return the words of a page with the path of each through its elements, and a class for each."""
    return {
        "input_ids": ids(items, length),
        "xpath_tags_seq": torch.randint(0, 8, (items, length, 4)),
        "xpath_subs_seq": torch.randint(0, 8, (items, length, 4)),
        "attention_mask": padding(items, length),
        "labels": torch.randint(0, CLASSES, (items, length)),
    }


add(
    "encoders",
    marked,
    {**TEXT, "xpath_tags_seq": TOKENS, "xpath_subs_seq": TOKENS, "labels": TOKENS},
    {
        "MarkupLMForTokenClassification": {
            **TINY,
            "num_labels": CLASSES,
            "max_depth": 4,
            "max_xpath_tag_unit_embeddings": 8,
            "max_xpath_subs_unit_embeddings": 8,
            "tag_pad_id": 7,
            "subs_pad_id": 7,
            "xpath_unit_hidden_size": 4,
        }
    },
)
squared(
    "vision",
    "last_hidden_state",
    lambda items, length: {"pixel_values": images(items)},
    {"pixel_values": BATCH},
    {"MLCDVisionModel": IMAGE, "PixioModel": IMAGE},
)
squared(
    "vision",
    "masks_queries_logits",
    lambda items, length: {"pixel_values": images(items)},
    {"pixel_values": BATCH},
    {
        "EomtForUniversalSegmentation": {
            **IMAGE,
            "num_blocks": 1,
            "num_queries": 4,
            "num_labels": CLASSES,
            "mlp_ratio": 2,
        }
    },
)
squared(
    "speech",
    "pooler_output",
    lambda items, length: {"input_features": torch.randn(items, 1, 32, 16)},
    {"input_features": BATCH},
    {
        "ClapAudioModel": {
            "spec_size": 64,
            "num_mel_bins": 16,
            "patch_embeds_hidden_size": 8,
            "hidden_size": 16,
            "depths": [1, 1],
            "num_attention_heads": [2, 2],
            "window_size": 4,
        }
    },
)


def torchvision_model(module: str, name: str, **settings: Any) -> Callable[..., nn.Module]:
    """Return the function that makes a model of a module of torchvision, which lies beside timm."""

    def make(**changed: Any) -> nn.Module:
        load_torchvision()
        owner = importlib.import_module(f"torchvision.models.{module}")
        given = {
            key: [getattr(owner, one[0])(*one[1:]) if isinstance(one, tuple) else one for one in value]
            if isinstance(value, list)
            else value
            for key, value in settings.items()
        }
        model: nn.Module = getattr(owner, name)(**given, **changed, num_classes=CLASSES)
        return model

    return make


def frames(items: int) -> torch.Tensor:
    return torch.randn(items, 3, 4, 16, 16)


def seen(make: Callable[..., nn.Module], pixels: Callable[[int], torch.Tensor]) -> StepCase:
    """Return the case of a model that classifies pictures or videos."""
    return StepCase(
        "torchvision",
        make,
        lambda items, length: {"x": pixels(items), "labels": classes(items)},
        {"x": BATCH, "labels": BATCH},
        target="labels",
    )


def large(items: int) -> torch.Tensor:
    return images(items, 64)


BLOCKS = [
    ("MSBlockConfig", 1, 8, 16, [3, 3, 3], [3, 3, 3], [1, 1, 1], [1, 2, 2]),
    ("MSBlockConfig", 2, 16, 16, [3, 3, 3], [3, 3, 3], [1, 2, 2], [1, 2, 2]),
]
PATCHES: Mapping[str, Any] = {
    "patch_embed_kernel": (3, 3, 3),
    "patch_embed_stride": (2, 2, 2),
    "patch_embed_padding": (1, 1, 1),
}
CASES |= {
    "torchvision squeezenet1_1": seen(torchvision_model("squeezenet", "squeezenet1_1"), large),
    "torchvision shufflenet_v2_x0_5": seen(torchvision_model("shufflenetv2", "shufflenet_v2_x0_5"), large),
    "torchvision MaxVit": seen(
        torchvision_model(
            "maxvit",
            "MaxVit",
            input_size=(64, 64),
            stem_channels=8,
            partition_size=4,
            block_channels=[8, 16],
            block_layers=[1, 1],
            head_dim=8,
            stochastic_depth_prob=0.2,
        ),
        large,
    ),
    "torchvision MViT": seen(
        torchvision_model(
            "video.mvit",
            "MViT",
            spatial_size=(16, 16),
            temporal_size=4,
            block_setting=BLOCKS,
            residual_pool=True,
            residual_with_cls_embed=False,
            rel_pos_embed=True,
            proj_after_attn=True,
            **PATCHES,
        ),
        frames,
    ),
    "torchvision SwinTransformer3d": seen(
        torchvision_model(
            "video.swin_transformer",
            "SwinTransformer3d",
            patch_size=[2, 4, 4],
            embed_dim=8,
            depths=[1, 2],
            num_heads=[2, 2],
            window_size=[2, 4, 4],
        ),
        frames,
    ),
}
