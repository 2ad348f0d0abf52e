"""Classes of more kinds still: hybrids of attention and state spaces, documents, speech, matching of pictures.

To add one, add a line to the table of its family.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from real_models.further_cases import BOXES, DECODER, TRANSLATOR
from real_models.step_cases import (
    BATCH,
    CASES,
    CLASSES,
    GROUPED,
    IMAGE,
    SIZE,
    SPECIAL,
    TEXT,
    TINY,
    TOKENS,
    VOCABULARY,
    WAVES,
    Axes,
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
    speech,
    transformer,
    translations,
)
from real_models.wider_cases import IMAGE_TOKEN, LABELLED, T5, TARGETS, places, shown
from torch import Tensor, nn

EXPERTS = {
    **GROUPED,
    "moe_intermediate_size": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
}
STATES: dict[str, Any] = {"mamba_d_state": 4, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_chunk_size": 4}
add(
    "causal language models",
    language,
    {**TEXT, "labels": TOKENS},
    {
        "PersimmonForCausalLM": TINY,
        "DiffLlamaForCausalLM": DECODER,
        "HeliumForCausalLM": {**GROUPED, **SPECIAL},
        "BitNetForCausalLM": GROUPED,
        "ArceeForCausalLM": GROUPED,
        "ApertusForCausalLM": GROUPED,
        "Exaone4ForCausalLM": {**GROUPED, "sliding_window": 4, "sliding_window_pattern": 2},
        "HunYuanDenseV1ForCausalLM": GROUPED,
        "SeedOssForCausalLM": GROUPED,
        "DogeForCausalLM": DECODER,
        "NanoChatForCausalLM": DECODER,
        "Olmo3ForCausalLM": {**DECODER, "sliding_window": 4},
        "VaultGemmaForCausalLM": GROUPED,
        "BloomForCausalLM, padded": {
            "vocab_size": VOCABULARY,
            "hidden_size": 16,
            "n_layer": 2,
            "n_head": 2,
        },
    },
)
add(
    "mixture of experts",
    language,
    {**TEXT, "labels": TOKENS},
    {
        "Llama4ForCausalLM": {
            **GROUPED,
            "intermediate_size_mlp": 24,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "attention_chunk_size": 64,
        },
        "Glm4MoeForCausalLM": EXPERTS,
        "Dots1ForCausalLM": EXPERTS,
        "GraniteMoeSharedForCausalLM": {
            **DECODER,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 8,
        },
        "FlexOlmoForCausalLM": {**DECODER, **SPECIAL, "num_experts": 4, "num_experts_per_tok": 2},
        "HunYuanMoEV1ForCausalLM": {**GROUPED, "num_experts": 4, "moe_topk": 2},
        "MiniMaxM2ForCausalLM": {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2, "rotary_dim": 2},
        "DbrxForCausalLM": {
            "vocab_size": VOCABULARY,
            "d_model": 16,
            "n_heads": 2,
            "n_layers": 2,
            "max_seq_len": 64,
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
            "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 16},
        },
    },
)
add(
    "state spaces and time series",
    language,
    {**TEXT, "labels": TOKENS},
    {
        "BambaForCausalLM": {
            **DECODER,
            **STATES,
            "mamba_n_heads": 4,
            "mamba_d_head": 8,
            "mamba_n_groups": 1,
            "attn_layer_indices": [1],
        },
        "FalconH1ForCausalLM": {
            **DECODER,
            **STATES,
            "head_dim": 8,
            "mamba_n_heads": 4,
            "mamba_d_head": 8,
            "mamba_d_ssm": 32,
            "mamba_n_groups": 1,
        },
        "GraniteMoeHybridForCausalLM": {
            **DECODER,
            **STATES,
            "mamba_n_heads": 4,
            "mamba_d_head": 8,
            "mamba_n_groups": 1,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 8,
            "layer_types": ["mamba", "attention"],
        },
        "Zamba2ForCausalLM": {
            **DECODER,
            "mamba_d_state": 4,
            "mamba_expand": 2,
            "chunk_size": 4,
            "n_mamba_heads": 4,
            "mamba_ngroups": 1,
            "layers_block_type": ["mamba", "hybrid"],
            "hybrid_layer_ids": [1],
            "num_mem_blocks": 1,
        },
        "JambaForCausalLM": {
            **DECODER,
            "mamba_d_state": 4,
            "mamba_dt_rank": 4,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "use_mamba_kernels": False,
        },
    },
)
add(
    "encoders",
    sentences,
    {**TEXT, "labels": BATCH},
    {
        "TapasForSequenceClassification": {**LABELLED, "type_vocab_sizes": [3, 8, 8, 2, 8, 8, 4]},
        "LukeForSequenceClassification": {**LABELLED, "entity_vocab_size": 8, "entity_emb_size": 8},
        "RoCBertForSequenceClassification": {
            **LABELLED,
            "pronunciation_vocab_size": 8,
            "shape_vocab_size": 8,
            "pronunciation_embed_dim": 8,
            "shape_embed_dim": 8,
        },
        "MraForSequenceClassification": LABELLED,
        "YosoForSequenceClassification": {**LABELLED, "use_expectation": True},
        "PerceiverForSequenceClassification": {
            **LABELLED,
            "num_latents": 4,
            "d_latents": 16,
            "d_model": 16,
            "num_blocks": 1,
            "num_self_attends_per_block": 1,
            "num_self_attention_heads": 2,
            "num_cross_attention_heads": 2,
        },
    },
)
add(
    "encoders",
    lambda items, length: {"input_ids": ids(items, 64), "labels": ids(items, 64)},
    {"input_ids": BATCH, "labels": BATCH},
    {
        "ReformerModelWithLMHead": {
            **TINY,
            "attn_layers": ["local", "lsh"],
            "is_decoder": True,
            "axial_pos_shape": [8, 8],
            "axial_pos_embds_dim": [8, 8],
            "attention_head_size": 8,
            "feed_forward_size": 24,
            "local_attn_chunk_length": 8,
            "lsh_attn_chunk_length": 8,
            "num_buckets": 4,
            "num_hashes": 1,
        }
    },
)
add(
    "documents",
    places,
    {"input_ids": TOKENS, "bbox": TOKENS, "attention_mask": TOKENS, "labels": TOKENS},
    {
        "LiltForTokenClassification": {**LABELLED, "hidden_size": 24, "max_2d_position_embeddings": 64},
    },
)
add(
    "documents",
    lambda items, length: {**places(items, length), "bbox": torch.rand(items, length, 4)},
    {"input_ids": TOKENS, "bbox": TOKENS, "attention_mask": TOKENS, "labels": TOKENS},
    {
        "BrosForTokenClassification": {**LABELLED, "hidden_size": 64, "dim_bbox": 8, "bbox_scale": 1.0},
    },
)
add(
    "sequence to sequence",
    translations,
    TARGETS,
    {
        "BlenderbotSmallForConditionalGeneration": TRANSLATOR,
        "NllbMoeForConditionalGeneration": {
            **TRANSLATOR,
            "num_experts": 4,
            "encoder_sparse_step": 2,
            "decoder_sparse_step": 2,
            "expert_capacity": 8,
        },
        "BigBirdPegasusForConditionalGeneration": {**TRANSLATOR, "attention_type": "original_full"},
    },
)


def gemma_pair(**changed: Any) -> nn.Module:
    from transformers import T5GemmaConfig, T5GemmaForConditionalGeneration

    part = {**GROUPED, **SPECIAL, "sliding_window": 4}
    model: nn.Module = T5GemmaForConditionalGeneration(
        T5GemmaConfig(encoder=part, decoder=part, vocab_size=VOCABULARY, **changed)
    )
    return model


CASES["T5GemmaForConditionalGeneration"] = StepCase("sequence to sequence", gemma_pair, translations, TARGETS)


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
squared(
    "vision",
    "last_hidden_state",
    lambda items, length: {"pixel_values": images(items)},
    PICTURE,
    {
        "DINOv3ViTModel": {**IMAGE, "num_register_tokens": 2},
        "DINOv3ConvNextModel": {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1], "drop_path_rate": 0.1},
        "IJepaModel": IMAGE,
        "Aimv2VisionModel": IMAGE,
        "PixtralVisionModel": IMAGE,
    },
)
add(
    "vision",
    pictures,
    {"pixel_values": BATCH, "labels": BATCH},
    {
        "SiglipForImageClassification": {"vision_config": IMAGE, "num_labels": CLASSES},
        "Data2VecVisionForImageClassification": {**IMAGE, "num_labels": CLASSES},
    },
)
add(
    "vision",
    lambda items, length: {"pixel_values": images(items, 64), "labels": classes(items)},
    {"pixel_values": BATCH, "labels": BATCH},
    {
        "HGNetV2ForImageClassification": {
            "embedding_size": 8,
            "hidden_sizes": [8, 16, 16, 16],
            "stem_channels": [3, 8, 8],
            "stage_in_channels": [8, 8, 16, 16],
            "stage_mid_channels": [8, 8, 8, 8],
            "stage_out_channels": [8, 16, 16, 16],
            "stage_num_blocks": [1, 1, 1, 1],
            "stage_numb_of_layers": [2, 2, 2, 2],
            "num_labels": CLASSES,
        },
        "DonutSwinForImageClassification": {
            "image_size": 64,
            "patch_size": 4,
            "embed_dim": 8,
            "depths": [1, 2],
            "num_heads": [2, 2],
            "window_size": 4,
            "num_labels": CLASSES,
        },
    },
)
squared(
    "vision",
    "last_hidden_state",
    lambda items, length: {"pixel_values_videos": torch.randn(items, 4, 3, 32, 32)},
    {"pixel_values_videos": BATCH},
    {
        "VJEPA2Model": {
            "hidden_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "crop_size": 32,
            "patch_size": 16,
            "frames_per_clip": 4,
            "tubelet_size": 2,
            "pred_hidden_size": 24,
            "pred_num_attention_heads": 2,
            "pred_num_hidden_layers": 1,
            "pred_num_mask_tokens": 2,
        }
    },
)
squared(
    "dense vision",
    "predicted_depth",
    lambda items, length: {"pixel_values": images(items, 64)},
    PICTURE,
    {
        "DepthAnythingForDepthEstimation": lambda **changed: _depth_anything("DepthAnything", **changed),
        "ZoeDepthForDepthEstimation": lambda **changed: _zoe_depth(**changed),
    },
)


def _features() -> Any:
    from transformers import Dinov2Config

    return Dinov2Config(
        **{**IMAGE, "image_size": 64, "patch_size": 16, "num_hidden_layers": 4},
        out_features=["stage1", "stage2", "stage3", "stage4"],
        reshape_hidden_states=False,
    )


def _depth_anything(name: str, **changed: Any) -> nn.Module:
    import transformers

    config = getattr(transformers, f"{name}Config")(
        backbone_config=_features(),
        patch_size=16,
        reassemble_hidden_size=16,
        neck_hidden_sizes=[8, 8, 16, 16],
        fusion_hidden_size=16,
        head_hidden_size=8,
        **changed,
    )
    model: nn.Module = getattr(transformers, f"{name}ForDepthEstimation")(config)
    return model


def _zoe_depth(**changed: Any) -> nn.Module:
    from transformers import BeitConfig, ZoeDepthConfig, ZoeDepthForDepthEstimation

    beit = BeitConfig(
        **{**IMAGE, "image_size": 64, "patch_size": 16, "num_hidden_layers": 4},
        out_features=["stage1", "stage2", "stage3", "stage4"],
        reshape_hidden_states=False,
    )
    model: nn.Module = ZoeDepthForDepthEstimation(
        ZoeDepthConfig(
            backbone_config=beit,
            neck_hidden_sizes=[8, 8, 16, 16],
            fusion_hidden_size=16,
            bottleneck_features=16,
            bin_configurations=[{"n_bins": 8, "min_depth": 0.1, "max_depth": 10.0, "name": "nyu"}],
            num_relative_features=8,
            bin_embedding_dim=8,
            num_attractors=[4, 2, 2, 1],
            patch_transformer_hidden_size=16,
            patch_transformer_intermediate_size=24,
            patch_transformer_num_attention_heads=2,
            **changed,
        )
    )
    return model


squared(
    "dense vision",
    "reconstruction",
    lambda items, length: {"pixel_values": images(items, 32)},
    PICTURE,
    {
        "Swin2SRForImageSuperResolution": {
            "image_size": 32,
            "patch_size": 1,
            "embed_dim": 8,
            "depths": [2, 2],
            "num_heads": [2, 2],
            "window_size": 4,
            "num_feat": 8,
        }
    },
)
SAM = {
    "vision_config": {
        "hidden_size": 16,
        "output_channels": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 64,
        "patch_size": 16,
        "window_size": 2,
        "global_attn_indexes": [1],
        "num_pos_feats": 8,
        "mlp_dim": 24,
    },
    "prompt_encoder_config": {"hidden_size": 16, "image_size": 64, "patch_size": 16, "mask_input_channels": 4},
    "mask_decoder_config": {
        "hidden_size": 16,
        "mlp_dim": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "iou_head_hidden_dim": 16,
    },
}
squared(
    "dense vision",
    "pred_masks",
    lambda items, length: {"pixel_values": images(items, 64), "input_points": 64 * torch.rand(items, 1, 2, 2)},
    {"pixel_values": BATCH, "input_points": BATCH},
    {"SamModel": SAM},
)
add(
    "dense vision",
    lambda items, length: {
        "pixel_values": images(items),
        "prompt_pixel_values": images(items),
        "prompt_masks": images(items),
        "labels": images(items),
    },
    dict.fromkeys(["pixel_values", "prompt_pixel_values", "prompt_masks", "labels"], BATCH),
    {
        "SegGptForImageSegmentation": {
            **IMAGE,
            "image_size": [64, 32],
            "mlp_dim": 24,
            "num_hidden_layers": 6,
            "merge_index": 1,
            "intermediate_hidden_state_indices": [2, 3, 4, 5],
            "pretrain_image_size": 32,
            "decoder_hidden_size": 8,
        }
    },
)


def points(name: str) -> Callable[..., nn.Module]:
    """Return the function that makes a detector of the kin of RT-DETR."""

    def make(**changed: Any) -> nn.Module:
        import transformers

        shape: dict[str, Any] = {
            "num_queries": BOXES,
            "d_model": 16,
            "encoder_hidden_dim": 16,
            "encoder_in_channels": [8, 16, 16],
            "decoder_in_channels": [16, 16, 16],
            "encoder_ffn_dim": 24,
            "decoder_ffn_dim": 24,
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 2,
            "decoder_layers": 2,
            "num_denoising": 0,
            "num_labels": CLASSES,
        }
        resnet = transformers.RTDetrResNetConfig(
            embedding_size=8,
            hidden_sizes=[8, 8, 16, 16],
            depths=[1, 1, 1, 1],
            layer_type="basic",
            out_features=["stage2", "stage3", "stage4"],
        )
        config = getattr(transformers, f"{name}Config")(backbone_config=resnet, **shape, **changed)
        model: nn.Module = getattr(transformers, f"{name}ForObjectDetection")(config)
        return model

    return make


squared(
    "detection",
    "pred_boxes",
    lambda items, length: {"pixel_values": images(items, 64)},
    PICTURE,
    {"RTDetrV2ForObjectDetection": points("RTDetrV2"), "DFineForObjectDetection": points("DFine")},
)
OWL = {
    "text_config": {**TINY, **SPECIAL, "max_position_embeddings": 16},
    "vision_config": IMAGE,
    "projection_dim": 16,
}
squared(
    "detection",
    "logits",
    lambda items, length: {
        "pixel_values": images(items),
        "input_ids": ids(2 * items, 8),
        "attention_mask": torch.ones(2 * items, 8, dtype=torch.long),
    },
    {"pixel_values": BATCH, "input_ids": {0: "2*batch"}, "attention_mask": {0: "2*batch"}},
    {"OwlViTForObjectDetection": OWL, "Owlv2ForObjectDetection": OWL},
)


def grounding(**changed: Any) -> nn.Module:
    from transformers import BertConfig, GroundingDinoConfig, GroundingDinoForObjectDetection, SwinConfig

    swin = SwinConfig(
        image_size=64,
        patch_size=4,
        embed_dim=8,
        depths=[1, 1, 1, 1],
        num_heads=[1, 1, 2, 2],
        window_size=2,
        out_features=["stage2", "stage3", "stage4"],
    )
    model: nn.Module = GroundingDinoForObjectDetection(
        GroundingDinoConfig(
            backbone_config=swin,
            text_config=BertConfig(**TINY),
            d_model=32,
            encoder_layers=1,
            decoder_layers=2,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=24,
            decoder_ffn_dim=24,
            num_queries=BOXES,
            max_text_len=16,
            **changed,
        )
    )
    return model


squared(
    "detection",
    "pred_boxes",
    lambda items, length: {"pixel_values": images(items, 64), "input_ids": ids(items, 8)},
    {"pixel_values": BATCH, "input_ids": BATCH},
    {"GroundingDinoForObjectDetection": grounding},
)
squared(
    "matching of pictures",
    "last_hidden_state",
    lambda items, length: {"pixel_values": images(items, 64)},
    PICTURE,
    {
        "TextNetModel": {
            "stem_out_channels": 8,
            "hidden_sizes": [8, 8, 8, 16, 16],
            "conv_layer_kernel_sizes": [[[3, 3]], [[3, 1]], [[1, 3]], [[3, 3]]],
            "conv_layer_strides": [[2], [2], [2], [2]],
        },
        "VitDetModel": {**IMAGE, "image_size": 64, "pretrain_image_size": 64, "window_size": 4},
    },
)


def text_and_picture(**settings: Any) -> dict[str, Any]:
    return {**settings, "image_token_id": IMAGE_TOKEN, "image_token_index": IMAGE_TOKEN}


add(
    "pictures and text",
    shown,
    {"input_ids": TOKENS, "pixel_values": BATCH, "labels": TOKENS},
    {
        "AyaVisionForConditionalGeneration": text_and_picture(
            vision_config={**IMAGE, "image_size": 64, "model_type": "siglip_vision_model"},
            text_config={**GROUPED, "model_type": "cohere2", "sliding_window": 4},
            downsample_factor=2,
            adapter_layer_norm_eps=1e-6,
        ),
        "VipLlavaForConditionalGeneration": text_and_picture(
            vision_config={**IMAGE, "model_type": "clip_vision_model"},
            text_config={**GROUPED, "model_type": "llama"},
            vision_feature_layers=[-1, -2],
        ),
    },
)
CASES["AyaVisionForConditionalGeneration"] = dataclasses.replace(
    CASES["AyaVisionForConditionalGeneration"],
    batch=lambda items, length: {**shown(items, length), "pixel_values": images(items, 64)},
)
add(
    "pictures and text",
    lambda items, length: {
        **(batch := shown(items, length)),
        "token_type_ids": (batch["input_ids"] == IMAGE_TOKEN).long(),
    },
    {"input_ids": TOKENS, "pixel_values": BATCH, "labels": TOKENS, "token_type_ids": TOKENS},
    {
        "Gemma3ForConditionalGeneration": text_and_picture(
            vision_config={**IMAGE, "model_type": "siglip_vision_model"},
            text_config={**GROUPED, "model_type": "gemma3_text", "sliding_window": 4},
            mm_tokens_per_image=16,
        ),
    },
)
add(
    "pictures and text",
    lambda items, length: {
        **shown(items, length),
        "input_ids": (tokens := torch.cat([torch.full((items, 4), IMAGE_TOKEN), ids(items, length) - 1], 1)),
        "pixel_values": images(items).unsqueeze(1),
        "labels": tokens,
    },
    {"input_ids": TOKENS, "pixel_values": BATCH, "labels": TOKENS},
    {
        "Idefics3ForConditionalGeneration": text_and_picture(
            vision_config=IMAGE, text_config={**GROUPED, "model_type": "llama"}, scale_factor=2
        ),
        "SmolVLMForConditionalGeneration": text_and_picture(
            vision_config=IMAGE, text_config={**GROUPED, "model_type": "llama"}, scale_factor=2
        ),
    },
)
add(
    "pictures and text",
    lambda items, length: {
        **shown(items, length),
        "input_ids": (tokens := torch.cat([torch.full((items, 4), IMAGE_TOKEN), ids(items, length) - 1], 1)),
        "labels": tokens,
    },
    {"input_ids": TOKENS, "pixel_values": BATCH, "labels": TOKENS},
    {
        "InternVLForConditionalGeneration": text_and_picture(
            vision_config={**IMAGE, "image_size": [32, 32], "patch_size": [8, 8]},
            text_config={**GROUPED, "model_type": "qwen2"},
        ),
    },
)


PATCHES = 16
"""How many patches a picture of Qwen has."""


class OneGrid(nn.Module):
    """A model of Qwen for pictures of one size, whose grids are a buffer: they decide how tokens are divided.

    Positions are given, as the model would find them by looking for pictures in the text.
    """

    def __init__(self, model: nn.Module, items: int) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("grids", torch.tensor([[1, 4, 4]]).repeat(items, 1))

    def forward(self, tokens: Tensor, pixel_values: Tensor, labels: Tensor, positions: Tensor, kinds: Tensor) -> Tensor:
        outputs = self.model(
            input_ids=tokens,
            pixel_values=pixel_values,
            image_grid_thw=self.grids,
            labels=labels,
            position_ids=positions,
            mm_token_type_ids=kinds,
        )
        loss: Tensor = outputs.loss
        return loss


def patches(items: int, length: int) -> Tensors:
    """Return text with pictures as Qwen takes them: all patches of a batch in one row."""
    tokens = torch.cat([torch.full((items, 4), IMAGE_TOKEN), torch.randint(3, 30, (items, length))], 1)
    return {
        "input_ids": tokens,
        "pixel_values": torch.randn(PATCHES * items, 3 * 2 * 8 * 8),
        "labels": tokens,
        "position_ids": torch.arange(length + 4).expand(3, items, -1).contiguous(),
        "mm_token_type_ids": (tokens == IMAGE_TOKEN).long(),
        "zero": torch.zeros(()),
    }


ROPE = {"rope_type": "default", "mrope_section": [1, 1, 0], "rope_theta": 10000.0}
for name, eye in {
    "Qwen2VLForConditionalGeneration": {
        "depth": 2,
        "embed_dim": 16,
        "hidden_size": 16,
        "num_heads": 2,
        "mlp_ratio": 2,
        "patch_size": 8,
    },
    "Qwen2_5_VLForConditionalGeneration": {
        "depth": 2,
        "hidden_size": 16,
        "out_hidden_size": 16,
        "intermediate_size": 24,
        "num_heads": 2,
        "patch_size": 8,
        "window_size": 32,
        "fullatt_block_indexes": [1],
    },
    "Qwen3VLForConditionalGeneration": {
        "depth": 2,
        "hidden_size": 16,
        "out_hidden_size": 16,
        "intermediate_size": 24,
        "num_heads": 2,
        "patch_size": 8,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0],
    },
}.items():
    settings = text_and_picture(
        vision_config=eye,
        text_config={**GROUPED, "rope_parameters": ROPE},
        video_token_id=38,
        vision_start_token_id=37,
        vision_end_token_id=36,
    )
    CASES[f"{name}, 3 pictures of one size"] = StepCase(
        "pictures and text",
        lambda name=name, settings=settings, **changed: OneGrid(transformer(name, **settings)(**changed), 3),
        lambda items, length: patches(3, length),
        {
            "input_ids": {1: "length"},
            "labels": {1: "length"},
            "position_ids": {2: "length"},
            "mm_token_type_ids": {1: "length"},
        },
        target="zero",
        loss=torch.sub,
    )
add(
    "pictures and text",
    lambda items, length: {
        **language(items, length),
        "pixel_values": torch.randn(items, 1, 2, 3, 32, 32),
        "aspect_ratio_ids": torch.ones(items, 1, dtype=torch.long),
        "aspect_ratio_mask": torch.ones(items, 1, 2, dtype=torch.long),
        "cross_attention_mask": torch.ones(items, length, 1, 2, dtype=torch.long),
    },
    {
        **TEXT,
        "labels": TOKENS,
        "pixel_values": BATCH,
        "aspect_ratio_ids": BATCH,
        "aspect_ratio_mask": BATCH,
        "cross_attention_mask": TOKENS,
    },
    {
        "MllamaForConditionalGeneration": {
            "vision_config": {
                "hidden_size": 16,
                "intermediate_size": 24,
                "num_hidden_layers": 2,
                "num_global_layers": 1,
                "attention_heads": 2,
                "image_size": 32,
                "patch_size": 8,
                "max_num_tiles": 2,
                "intermediate_layers_indices": [0],
                "vision_output_dim": 32,
                "supported_aspect_ratios": [[1, 1], [1, 2]],
            },
            "text_config": {**GROUPED, **SPECIAL, "cross_attention_layers": [1]},
        }
    },
)
add(
    "documents",
    lambda items, length: {
        "flattened_patches": torch.cat([torch.randint(1, 8, (items, 8, 2)).float(), torch.randn(items, 8, 192)], 2),
        "attention_mask": torch.ones(items, 8),
        "labels": ids(items, length),
    },
    {"flattened_patches": BATCH, "attention_mask": BATCH, "labels": TOKENS},
    {
        "Pix2StructForConditionalGeneration": {
            "vision_config": {
                "hidden_size": 16,
                "patch_embed_hidden_size": 192,
                "d_ff": 24,
                "d_kv": 8,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "seq_len": 16,
            },
            "text_config": {
                "vocab_size": VOCABULARY,
                "hidden_size": 16,
                "d_kv": 8,
                "d_ff": 24,
                "num_layers": 1,
                "num_heads": 2,
                "decoder_start_token_id": 0,
                "pad_token_id": 0,
            },
        }
    },
)
add(
    "documents",
    lambda items, length: {
        "input_ids": ids(items, length),
        "attention_mask": padding(items, length),
        "bbox": torch.rand(items, length, 4),
        "pixel_values": images(items),
        "labels": ids(items, length + 2),
    },
    {
        "input_ids": TOKENS,
        "attention_mask": TOKENS,
        "bbox": TOKENS,
        "pixel_values": BATCH,
        "labels": {0: "batch", 1: "target_length"},
    },
    {
        "UdopForConditionalGeneration": {
            **T5,
            "image_size": 32,
            "patch_size": 8,
            "max_2d_position_embeddings": 64,
            "pad_token_id": 0,
        }
    },
)
add(
    "pictures and text",
    lambda items, length: {**shown(items, length), "image_sizes": torch.tensor([[SIZE, SIZE]]).repeat(items, 1)},
    {"input_ids": TOKENS, "pixel_values": BATCH, "labels": TOKENS, "image_sizes": BATCH},
    {
        "Mistral3ForConditionalGeneration": text_and_picture(
            vision_config={**IMAGE, "model_type": "pixtral", "head_dim": 8},
            text_config={**GROUPED, "model_type": "mistral"},
            spatial_merge_size=1,
        ),
    },
)

# Speech and sound.

squared(
    "speech",
    "audio_values",
    lambda items, length: {"input_values": torch.randn(items, 1, 320)},
    {"input_values": BATCH},
    {
        "EncodecModel": {
            "hidden_size": 16,
            "num_filters": 4,
            "upsampling_ratios": [4, 2],
            "codebook_size": 16,
            "codebook_dim": 16,
            "num_lstm_layers": 1,
            "target_bandwidths": [24.0],
        },
        "MimiModel": {
            **TINY,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "hidden_size": 16,
            "num_filters": 4,
            "upsampling_ratios": [4, 2],
            "codebook_size": 16,
            "codebook_dim": 16,
            "vector_quantization_hidden_dimension": 16,
            "num_quantizers": 2,
            "num_semantic_quantizers": 1,
            "upsample_groups": 16,
        },
        "DacModel": {
            "encoder_hidden_size": 8,
            "downsampling_ratios": [2, 4],
            "decoder_hidden_size": 16,
            "upsampling_ratios": [4, 2],
            "n_codebooks": 2,
            "codebook_size": 16,
            "codebook_dim": 4,
        },
    },
)
add(
    "speech with CTC",
    lambda items, length: {
        "input_features": torch.randn(items, 8 * length, 16),
        "attention_mask": torch.ones(items, 8 * length, dtype=torch.long),
        "labels": ids(items, 3),
    },
    {"input_features": {0: "batch", 1: "frames"}, "attention_mask": {0: "batch", 1: "frames"}, "labels": BATCH},
    {
        "ParakeetForCTC": {
            "vocab_size": VOCABULARY,
            "pad_token_id": 0,
            "encoder_config": {
                "hidden_size": 16,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "intermediate_size": 24,
                "num_mel_bins": 16,
                "subsampling_conv_channels": 8,
                "conv_kernel_size": 3,
            },
        }
    },
)
add(
    "speech with CTC",
    speech,
    {"input_values": TOKENS, "labels": BATCH},
    {"SEWDForCTC": {**WAVES, "squeeze_factor": 2, "position_buckets": 8}},
)
add(
    "speech with CTC",
    speech,
    {"input_values": TOKENS, "labels": BATCH},
    {"Wav2Vec2ForXVector": {**WAVES, "tdnn_dim": [8, 8, 8, 8, 8], "xvector_output_dim": 8, "num_labels": CLASSES}},
)
CASES["Wav2Vec2ForXVector"] = dataclasses.replace(
    CASES["Wav2Vec2ForXVector"],
    family="speech",
    batch=lambda items, length: {"input_values": torch.randn(items, 200 * length), "labels": classes(items)},
)
HEARD = {
    "audio_config": {
        "num_mel_bins": 8,
        "d_model": 16,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "encoder_layers": 2,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 24,
        "max_source_positions": 20,
    },
    "text_config": {**GROUPED, "model_type": "llama"},
}
add(
    "speech",
    lambda items, length: {
        "input_ids": (
            tokens := torch.cat([torch.full((items, 10), IMAGE_TOKEN), torch.randint(3, 38, (items, length))], 1)
        ),
        "attention_mask": torch.ones_like(tokens),
        "input_features": torch.randn(items, 8, 40),
        "feature_attention_mask": torch.ones(items, 40, dtype=torch.long),
        "labels": tokens,
    },
    {
        "input_ids": TOKENS,
        "attention_mask": TOKENS,
        "input_features": BATCH,
        "feature_attention_mask": BATCH,
        "labels": TOKENS,
    },
    {
        "Qwen2AudioForConditionalGeneration": {
            **HEARD,
            "text_config": {**GROUPED, "model_type": "qwen2"},
            "audio_token_index": IMAGE_TOKEN,
        }
    },
)
DRAWN = {"d_model": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "ffn_dim": 24}
add(
    "state spaces and time series",
    lambda items, length: {"past_values": torch.randn(items, 32, 3), "target_values": torch.randn(items, 2)},
    {"past_values": BATCH, "target_values": BATCH},
    {
        "PatchTSTForRegression": {
            **DRAWN,
            "num_input_channels": 3,
            "context_length": 32,
            "patch_length": 8,
            "patch_stride": 8,
            "num_targets": 2,
        },
        "PatchTSMixerForRegression": {
            "num_input_channels": 3,
            "context_length": 32,
            "patch_length": 8,
            "patch_stride": 8,
            "d_model": 16,
            "num_layers": 2,
            "num_targets": 2,
        },
    },
)
add(
    "state spaces and time series",
    lambda items, length: {"past_values": torch.randn(items, 32, 3)},
    {"past_values": BATCH},
    {
        "PatchTSTForPretraining": {
            **DRAWN,
            "num_input_channels": 3,
            "context_length": 32,
            "patch_length": 8,
            "patch_stride": 8,
        },
        "PatchTSMixerForPretraining": {
            "num_input_channels": 3,
            "context_length": 32,
            "patch_length": 8,
            "patch_stride": 8,
            "d_model": 16,
            "num_layers": 2,
        },
    },
)
add(
    "state spaces and time series",
    lambda items, length: {
        "past_values": torch.randn(items, 32),
        "freq": torch.zeros(items, dtype=torch.long),
        "future_values": torch.randn(items, 8),
    },
    {"past_values": BATCH, "freq": BATCH, "future_values": BATCH},
    {
        "TimesFmModelForPrediction": {
            "patch_length": 8,
            "context_length": 32,
            "horizon_length": 8,
            "hidden_size": 16,
            "intermediate_size": 24,
            "head_dim": 8,
            "num_attention_heads": 2,
            "num_hidden_layers": 2,
        }
    },
)
squared(
    "state spaces and time series",
    "action_preds",
    lambda items, length: {
        "states": torch.randn(items, length, 5),
        "actions": torch.randn(items, length, 2),
        "rewards": torch.randn(items, length, 1),
        "returns_to_go": torch.randn(items, length, 1),
        "timesteps": torch.arange(length).repeat(items, 1),
        "attention_mask": torch.ones(items, length),
    },
    dict.fromkeys(["states", "actions", "rewards", "returns_to_go", "timesteps", "attention_mask"], TOKENS),
    {
        "DecisionTransformerModel": {
            "state_dim": 5,
            "act_dim": 2,
            "hidden_size": 16,
            "max_ep_len": 64,
            "n_layer": 2,
            "n_head": 2,
            "n_positions": 64,
        }
    },
)

# What is done in Python for each item of a batch, or each token, needs their number.
for name, axis in {
    "JambaForCausalLM": 1,
    "PixtralVisionModel": 0,
    "TimesFmModelForPrediction": 0,
    "Idefics3ForConditionalGeneration": 0,
    "SmolVLMForConditionalGeneration": 0,
}.items():
    CASES[name] = dataclasses.replace(CASES[name], fixed=(axis,))

# These choose by values what they compute, or have gradients of their own.
for name, why in {
    "Mistral3ForConditionalGeneration": "numbers that it takes out of tensors",
    "ReformerModelWithLMHead": "a backward pass of its own",
    "UdopForConditionalGeneration": "numbers are taken out of tensors",
}.items():
    CASES[name] = dataclasses.replace(CASES[name], refused=why)
