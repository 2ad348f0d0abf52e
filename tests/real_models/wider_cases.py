"""Classes that people are likely to train, of more kinds than those of `step_cases` and `further_cases`.

To add one, add a line to the table of its family.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from real_models.further_cases import (
    BOXES,
    DECODER,
    DETR,
    TRANSLATOR,
    Output,
    backbone,
    box_detector,
)
from real_models.step_cases import (
    BATCH,
    CASES,
    CLASSES,
    CONTRASTIVE,
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
    series,
    speech,
    timm_model,
    transformer,
    translations,
)
from torch import nn

LABELLED = {**TINY, "num_labels": CLASSES}
TARGETS = {**TEXT, "labels": {0: "batch", 1: "target_length"}}
T5 = {
    "vocab_size": VOCABULARY,
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 24,
    "num_layers": 2,
    "num_heads": 2,
    "decoder_start_token_id": 0,
}
add(
    "causal language models",
    language,
    {**TEXT, "labels": TOKENS},
    {
        "GemmaForCausalLM": GROUPED,
        "Cohere2ForCausalLM": {**DECODER, "sliding_window": 4},
        "GraniteForCausalLM": DECODER,
        "GPTBigCodeForCausalLM": {
            "vocab_size": VOCABULARY,
            "n_positions": 64,
            "n_embd": 16,
            "n_layer": 2,
            "n_head": 2,
        },
        "CodeGenForCausalLM": {
            "vocab_size": VOCABULARY,
            "n_positions": 64,
            "n_ctx": 64,
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "rotary_dim": 4,
        },
        "Starcoder2ForCausalLM": GROUPED,
        "FalconForCausalLM, new decoder": {**TINY, "new_decoder_architecture": True, "num_kv_heads": 1},
        "FalconForCausalLM, alibi": {**TINY, "alibi": True},
        "GlmForCausalLM": {**GROUPED, **SPECIAL, "partial_rotary_factor": 0.5},
        "Glm4ForCausalLM": {**GROUPED, **SPECIAL, "partial_rotary_factor": 0.5},
        "NemotronForCausalLM": {**DECODER, "head_dim": 8},
        "Lfm2ForCausalLM": {**DECODER, "layer_types": ["conv", "full_attention"]},
        "CTRLLMHeadModel": {
            "vocab_size": VOCABULARY,
            "n_positions": 64,
            "n_embd": 16,
            "dff": 24,
            "n_layer": 2,
            "n_head": 2,
        },
        "OpenAIGPTLMHeadModel": {"vocab_size": VOCABULARY, "n_positions": 64, "n_embd": 16, "n_layer": 2, "n_head": 2},
        "ModernBertDecoderForCausalLM": {**TINY, **SPECIAL, "local_attention": 6},
        "Ernie4_5ForCausalLM": GROUPED,
        "RecurrentGemmaForCausalLM": {
            **TINY,
            "num_key_value_heads": 1,
            "lru_width": 16,
            "attention_window_size": 8,
            "block_types": ["recurrent", "attention"],
        },
    },
)
add(
    "causal language models",
    language,
    {**TEXT, "labels": TOKENS},
    {
        "XGLMForCausalLM": {
            "vocab_size": VOCABULARY,
            "d_model": 16,
            "ffn_dim": 24,
            "num_layers": 2,
            "attention_heads": 2,
            "max_position_embeddings": 64,
            "layerdrop": 0.1,
        }
    },
)
add(
    "mixture of experts",
    language,
    {**TEXT, "labels": TOKENS},
    {
        "GptOssForCausalLM": {
            **GROUPED,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 4,
        },
        "PhimoeForCausalLM": {**DECODER, "num_local_experts": 4, "num_experts_per_tok": 2},
        "JetMoeForCausalLM": {
            **TINY,
            "num_key_value_heads": 2,
            "kv_channels": 8,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
        "DeepseekV2ForCausalLM": {
            **TINY,
            "moe_intermediate_size": 8,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "first_k_dense_replace": 1,
            "q_lora_rank": 8,
            "kv_lora_rank": 8,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 4,
            "v_head_dim": 4,
        },
        "Ernie4_5_MoeForCausalLM": {
            **GROUPED,
            "moe_intermediate_size": 8,
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_num_shared_experts": 1,
        },
    },
)
LONG = {**TINY, "max_position_embeddings": 128}
add(
    "encoders",
    sentences,
    {**TEXT, "labels": BATCH},
    {
        "Data2VecTextForSequenceClassification": LABELLED,
        "CamembertForSequenceClassification": LABELLED,
        "RemBertForSequenceClassification": {**LABELLED, "input_embedding_size": 12, "output_embedding_size": 12},
        "IBertForSequenceClassification": LABELLED,
        "XmodForSequenceClassification": {**LABELLED, "languages": ["en"], "default_language": "en"},
        "FunnelForSequenceClassification": {
            "vocab_size": VOCABULARY,
            "block_sizes": [1, 1],
            "d_model": 16,
            "n_head": 2,
            "d_head": 8,
            "d_inner": 24,
            "num_labels": CLASSES,
        },
        "XLMForSequenceClassification": {
            "vocab_size": VOCABULARY,
            "emb_dim": 16,
            "n_layers": 2,
            "n_heads": 2,
            "num_labels": CLASSES,
        },
        "LongformerForSequenceClassification": {**LABELLED, "attention_window": 4},
    },
)
add(
    "encoders",
    # It attends in blocks; a block is a whole row of pictures of a sentence.
    lambda items, length: sentences(items, 64),
    {"input_ids": BATCH, "attention_mask": BATCH, "labels": BATCH},
    {
        "BigBirdForSequenceClassification": {
            **LABELLED,
            "max_position_embeddings": 128,
            "block_size": 4,
            "num_random_blocks": 1,
        },
        "CanineForSequenceClassification": {
            **LABELLED,
            "max_position_embeddings": 64,
            "num_hash_buckets": 64,
            "local_transformer_stride": 8,
        },
    },
)
add(
    "encoders",
    language,
    {**TEXT, "labels": TOKENS},
    {
        "NystromformerForMaskedLM": {**TINY, "num_landmarks": 4, "segment_means_seq_len": 4},
        "MegatronBertForMaskedLM": TINY,
        "ErnieForMaskedLM": TINY,
        "EsmForMaskedLM": {**TINY, "pad_token_id": 1, "mask_token_id": 2, "position_embedding_type": "rotary"},
        "FlaubertWithLMHeadModel": {"vocab_size": VOCABULARY, "emb_dim": 16, "n_layers": 2, "n_heads": 2},
        "ModernBertForMaskedLM": {**TINY, **SPECIAL, "local_attention": 6},
        "EuroBertForMaskedLM": {**GROUPED, **SPECIAL, "mask_token_id": 3},
        "DebertaV2ForMaskedLM": {**TINY, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
    },
)
add(
    "encoders",
    lambda items, length: {
        "input_ids": ids(items, length).unsqueeze(1).expand(-1, 3, -1).contiguous(),
        "attention_mask": padding(items, length).unsqueeze(1).expand(-1, 3, -1).contiguous(),
        "labels": torch.randint(0, 3, (items,)),
    },
    {
        "input_ids": {0: "batch", 2: "length"},
        "attention_mask": {0: "batch", 2: "length"},
        "labels": BATCH,
    },
    {"BertForMultipleChoice": TINY},
)


def places(items: int, length: int) -> Tensors:
    """Return words with boxes of a page."""
    corner = torch.randint(0, 30, (items, length, 2))
    mask = padding(items, length)
    return {
        "input_ids": ids(items, length),
        "bbox": torch.cat([corner, corner + 5], -1),
        "attention_mask": mask,
        "labels": torch.randint(0, CLASSES, (items, length)).masked_fill(mask == 0, -100),
    }


add(
    "documents",
    places,
    {"input_ids": TOKENS, "bbox": TOKENS, "attention_mask": TOKENS, "labels": TOKENS},
    {"LayoutLMForTokenClassification": {**LABELLED, "max_2d_position_embeddings": 64}},
)
add(
    "documents",
    lambda items, length: {**places(items, length), "pixel_values": images(items)},
    {"input_ids": TOKENS, "bbox": TOKENS, "attention_mask": TOKENS, "labels": TOKENS, "pixel_values": BATCH},
    {
        "LayoutLMv3ForTokenClassification": {
            **LABELLED,
            "hidden_size": 24,
            "max_2d_position_embeddings": 64,
            "coordinate_size": 4,
            "shape_size": 4,
            "input_size": 32,
            "patch_size": 8,
            "rel_2d_pos_bins": 8,
            "rel_pos_bins": 8,
        }
    },
)
add(
    "sequence to sequence",
    translations,
    TARGETS,
    {
        "MBartForConditionalGeneration": TRANSLATOR,
        "BlenderbotForConditionalGeneration": TRANSLATOR,
        "PLBartForConditionalGeneration": TRANSLATOR,
        "MvpForConditionalGeneration": TRANSLATOR,
        "MT5ForConditionalGeneration": T5,
        "UMT5ForConditionalGeneration": T5,
        "LEDForConditionalGeneration": {
            **TRANSLATOR,
            "attention_window": 4,
            "max_encoder_position_embeddings": 64,
            "max_decoder_position_embeddings": 64,
        },
        "ProphetNetForConditionalGeneration": {
            "vocab_size": VOCABULARY,
            "hidden_size": 16,
            "encoder_ffn_dim": 24,
            "decoder_ffn_dim": 24,
            "num_encoder_layers": 1,
            "num_decoder_layers": 1,
            "num_encoder_attention_heads": 2,
            "num_decoder_attention_heads": 2,
            "max_position_embeddings": 64,
            "decoder_start_token_id": 1,
            **SPECIAL,
        },
    },
)


def encoder_decoder(**changed: Any) -> nn.Module:
    from transformers import BertConfig, EncoderDecoderConfig, EncoderDecoderModel

    config = EncoderDecoderConfig.from_encoder_decoder_configs(BertConfig(**TINY), BertConfig(**TINY), **changed)
    config.decoder_start_token_id, config.pad_token_id = 1, 0
    model: nn.Module = EncoderDecoderModel(config)
    return model


CASES["EncoderDecoderModel"] = StepCase("sequence to sequence", encoder_decoder, translations, TARGETS)
add(
    "speech with CTC",
    speech,
    {"input_values": TOKENS, "labels": BATCH},
    {
        "UniSpeechForCTC": WAVES,
        "UniSpeechSatForCTC": WAVES,
        "Data2VecAudioForCTC": WAVES,
        "SEWForCTC": {**WAVES, "squeeze_factor": 2},
        "Wav2Vec2ConformerForCTC": {**WAVES, "conv_depthwise_kernel_size": 3},
    },
)
add(
    "speech with CTC",
    lambda items, length: {
        "input_features": torch.randn(items, 4 * length, 8),
        "attention_mask": torch.ones(items, 4 * length, dtype=torch.long),
        "labels": ids(items, 3),
    },
    {"input_features": {0: "batch", 1: "frames"}, "attention_mask": {0: "batch", 1: "frames"}, "labels": BATCH},
    {
        "Wav2Vec2BertForCTC": {
            "vocab_size": VOCABULARY,
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 24,
            "feature_projection_input_dim": 8,
            "conv_depthwise_kernel_size": 3,
        }
    },
)
SPOKEN = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "encoder_layers": 1,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_layers": 1,
    "decoder_attention_heads": 2,
    "decoder_ffn_dim": 24,
    "conv_dim": (8, 8, 8),
    "conv_stride": (5, 4, 2),
    "conv_kernel": (10, 4, 2),
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
    "num_mel_bins": 8,
    "speech_decoder_prenet_units": 16,
    "speech_decoder_postnet_units": 16,
    "speaker_embedding_dim": 8,
    "decoder_start_token_id": 1,
    **SPECIAL,
}
add(
    "speech",
    lambda items, length: {"input_values": torch.randn(items, 100 * length), "labels": ids(items, length)},
    {"input_values": {0: "batch", 1: "samples"}, "labels": TOKENS},
    {"SpeechT5ForSpeechToText": SPOKEN},
)
add(
    "speech",
    lambda items, length: {
        "input_ids": ids(items, length),
        "labels": torch.randn(items, 2 * length, 8),
        "speaker_embeddings": torch.randn(items, 8),
    },
    {"input_ids": TOKENS, "labels": {0: "batch", 1: "frames"}, "speaker_embeddings": BATCH},
    {"SpeechT5ForTextToSpeech": {**SPOKEN, "use_guided_attention_loss": False}},
)
add(
    "speech",
    lambda items, length: {"input_values": torch.randn(items, 400 * length), "labels": ids(items, length)},
    {"input_values": {0: "batch", 1: "samples"}, "labels": TOKENS},
    {
        "MoonshineForConditionalGeneration": {
            "vocab_size": VOCABULARY,
            "hidden_size": 16,
            "intermediate_size": 24,
            "encoder_num_hidden_layers": 1,
            "decoder_num_hidden_layers": 1,
            "encoder_num_attention_heads": 2,
            "decoder_num_attention_heads": 2,
            "max_position_embeddings": 64,
            "decoder_start_token_id": 1,
            **SPECIAL,
        }
    },
)
LAYERED = {**IMAGE, "num_hidden_layers": 4, "num_labels": CLASSES}
add(
    "vision",
    pictures,
    {"pixel_values": BATCH, "labels": BATCH},
    {
        "Dinov2WithRegistersForImageClassification": {**IMAGE, "num_register_tokens": 2, "num_labels": CLASSES},
        "ViTMSNForImageClassification": {**IMAGE, "num_labels": CLASSES},
        "CvtForImageClassification": {
            "embed_dim": [8, 8, 16],
            "num_heads": [1, 1, 2],
            "depth": [1, 2, 3],
            "num_labels": CLASSES,
        },
        "FocalNetForImageClassification": {
            "image_size": 32,
            "patch_size": 2,
            "embed_dim": 8,
            "hidden_sizes": [8, 16],
            "depths": [1, 1],
            "focal_levels": [2, 2],
            "focal_windows": [3, 3],
            "num_labels": CLASSES,
        },
        "HieraForImageClassification": {
            "image_size": [32, 32],
            "embed_dim": 8,
            "depths": [1, 1],
            "num_heads": [1, 2],
            "patch_size": [7, 7],
            "patch_stride": [4, 4],
            "patch_padding": [3, 3],
            "query_stride": [2, 2],
            "masked_unit_size": [4, 4],
            "num_query_pool": 1,
            "num_labels": CLASSES,
        },
        "ImageGPTForImageClassification": {
            "vocab_size": 17,
            "n_positions": 64,
            "n_embd": 16,
            "n_layer": 2,
            "n_head": 2,
            "num_labels": CLASSES,
        },
    },
)
CASES["ImageGPTForImageClassification"] = StepCase(
    "vision",
    CASES["ImageGPTForImageClassification"].model,
    lambda items, length: {"input_ids": torch.randint(0, 16, (items, 48)), "labels": classes(items)},
    {"input_ids": BATCH, "labels": BATCH},
)
add(
    "vision",
    lambda items, length: {"pixel_values": images(items, 64), "labels": classes(items)},
    {"pixel_values": BATCH, "labels": BATCH},
    {
        "MobileNetV1ForImageClassification": {"depth_multiplier": 0.25, "min_depth": 4, "num_labels": CLASSES},
        "MobileNetV2ForImageClassification": {"depth_multiplier": 0.25, "num_labels": CLASSES},
        "EfficientNetForImageClassification": {
            "image_size": 64,
            "width_coefficient": 0.25,
            "depth_coefficient": 0.25,
            "hidden_dim": 320,
            "num_labels": CLASSES,
        },
        "BitForImageClassification": {
            "embedding_size": 8,
            "hidden_sizes": [8, 16, 16, 16],
            "depths": [1, 1, 1, 1],
            "num_groups": 2,
            "num_labels": CLASSES,
        },
        "SwiftFormerForImageClassification": {
            "image_size": 64,
            "depths": [1, 1, 1, 1],
            "embed_dims": [8, 8, 16, 16],
            "num_labels": CLASSES,
        },
        "MobileViTV2ForImageClassification": {
            "image_size": 64,
            "width_multiplier": 0.25,
            "n_attn_blocks": [1, 1, 1],
            "num_labels": CLASSES,
        },
        "PvtForImageClassification": {
            "image_size": 64,
            "depths": [1, 1, 1, 1],
            "hidden_sizes": [8, 8, 16, 16],
            "num_attention_heads": [1, 1, 2, 2],
            "num_labels": CLASSES,
        },
    },
)
add(
    "vision",
    lambda items, length: {"pixel_values": torch.randn(items, 4, 3, 32, 32), "labels": classes(items)},
    {"pixel_values": BATCH, "labels": BATCH},
    {
        "VideoMAEForVideoClassification": {**IMAGE, "num_frames": 4, "tubelet_size": 2, "num_labels": CLASSES},
        "TimesformerForVideoClassification": {**IMAGE, "num_frames": 4, "num_labels": CLASSES},
        "VivitForVideoClassification": {**IMAGE, "num_frames": 4, "tubelet_size": [2, 8, 8], "num_labels": CLASSES},
    },
)


def depths(items: int, length: int) -> Tensors:
    return {"pixel_values": images(items, 64), "depth": torch.rand(items, 64, 64)}


def segments(items: int, length: int) -> Tensors:
    return {"pixel_values": images(items), "labels": torch.randint(0, CLASSES, (items, 32, 32))}


DPT = {
    **IMAGE,
    "num_hidden_layers": 4,
    "backbone_out_indices": [0, 1, 2, 3],
    "neck_hidden_sizes": [8, 8, 16, 16],
    "fusion_hidden_size": 16,
    "reassemble_factors": [4, 2, 1, 0.5],
}
add(
    "dense vision",
    segments,
    {"pixel_values": BATCH, "labels": BATCH},
    {
        "DPTForSemanticSegmentation": {**DPT, "num_labels": CLASSES, "is_hybrid": False},
        "BeitForSemanticSegmentation": {
            **IMAGE,
            "num_hidden_layers": 4,
            "out_indices": [1, 2, 3, 4],
            "pool_scales": [1, 2],
            "num_labels": CLASSES,
            "auxiliary_channels": 8,
        },
        "MobileNetV2ForSemanticSegmentation": {"depth_multiplier": 0.25, "num_labels": CLASSES},
    },
)
for name, settings in {
    "DPTForDepthEstimation": {**DPT, "image_size": 64, "patch_size": 16, "is_hybrid": False},
    "GLPNForDepthEstimation": {
        "depths": [1, 1, 1, 1],
        "hidden_sizes": [8, 8, 16, 16],
        "num_attention_heads": [1, 1, 2, 2],
        "decoder_hidden_size": 8,
    },
}.items():
    CASES[name] = StepCase(
        "dense vision",
        lambda name=name, settings=settings, **changed: Output(
            transformer(name, **settings)(**changed), "predicted_depth"
        ),
        depths,
        {"pixel_values": BATCH, "depth": BATCH},
        target="depth",
        loss=F.l1_loss,
    )


def upernet(**changed: Any) -> nn.Module:
    from transformers import SwinConfig, UperNetConfig, UperNetForSemanticSegmentation

    swin = SwinConfig(
        image_size=32,
        patch_size=2,
        embed_dim=8,
        depths=[1, 1, 1, 1],
        num_heads=[1, 1, 2, 2],
        window_size=2,
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )
    model: nn.Module = UperNetForSemanticSegmentation(
        UperNetConfig(
            backbone_config=swin,
            hidden_size=16,
            pool_scales=[1, 2],
            auxiliary_channels=8,
            auxiliary_in_channels=32,
            num_labels=CLASSES,
            **changed,
        )
    )
    return model


CASES["UperNetForSemanticSegmentation"] = StepCase(
    "dense vision", upernet, segments, {"pixel_values": BATCH, "labels": BATCH}
)


def mask_former(name: str) -> Callable[..., nn.Module]:
    def make(**changed: Any) -> nn.Module:
        import transformers

        features = ["stage1", "stage2", "stage3", "stage4"]
        if name == "Mask2Former":
            swin = transformers.SwinConfig(
                image_size=64,
                patch_size=4,
                embed_dim=8,
                depths=[1, 1, 1, 1],
                num_heads=[1, 1, 2, 2],
                window_size=2,
                out_features=features,
            )
            config = transformers.Mask2FormerConfig(
                backbone_config=swin,
                feature_size=32,
                mask_feature_size=32,
                hidden_dim=32,
                encoder_feedforward_dim=24,
                encoder_layers=1,
                decoder_layers=2,
                num_attention_heads=2,
                dim_feedforward=24,
                num_queries=BOXES,
                num_labels=CLASSES,
                **changed,
            )
            return Output(transformers.Mask2FormerForUniversalSegmentation(config), "masks_queries_logits")
        resnet = transformers.ResNetConfig(
            embedding_size=8,
            hidden_sizes=[8, 8, 16, 16],
            depths=[1, 1, 1, 1],
            layer_type="basic",
            out_features=features,
        )
        detr = transformers.DetrConfig(
            **{key: value for key, value in DETR.items() if key != "num_labels"}, backbone_config=backbone()
        )
        config = transformers.MaskFormerConfig(
            backbone_config=resnet,
            decoder_config=detr,
            fpn_feature_size=32,
            mask_feature_size=32,
            num_labels=CLASSES,
            **changed,
        )
        return Output(transformers.MaskFormerForInstanceSegmentation(config), "masks_queries_logits")

    return make


for name, kind in {
    "Mask2FormerForUniversalSegmentation": "Mask2Former",
    "MaskFormerForInstanceSegmentation": "MaskFormer",
}.items():
    CASES[name] = StepCase(
        "dense vision",
        mask_former(kind),
        lambda items, length: {"pixel_values": images(items, 64), "masks": torch.rand(items, BOXES, 16, 16)},
        {"pixel_values": BATCH, "masks": BATCH},
        target="masks",
        loss=F.binary_cross_entropy_with_logits,
    )


def rt_detr(**changed: Any) -> nn.Module:
    from transformers import RTDetrConfig, RTDetrForObjectDetection, RTDetrResNetConfig

    resnet = RTDetrResNetConfig(
        embedding_size=8,
        hidden_sizes=[8, 8, 16, 16],
        depths=[1, 1, 1, 1],
        layer_type="basic",
        out_features=["stage2", "stage3", "stage4"],
    )
    config = RTDetrConfig(
        backbone_config=resnet,
        num_queries=BOXES,
        d_model=16,
        encoder_hidden_dim=16,
        encoder_in_channels=[8, 16, 16],
        decoder_in_channels=[16, 16, 16],
        encoder_ffn_dim=24,
        decoder_ffn_dim=24,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        decoder_layers=1,
        num_denoising=0,
        num_labels=CLASSES,
        **changed,
    )
    return Output(RTDetrForObjectDetection(config), "pred_boxes")


for name, make in {
    "TableTransformerForObjectDetection": box_detector("TableTransformerForObjectDetection", **DETR),
    "DabDetrForObjectDetection": box_detector(
        "DabDetrForObjectDetection", **{key: value for key, value in DETR.items() if key != "d_model"}, hidden_size=16
    ),
    "RTDetrForObjectDetection": rt_detr,
}.items():
    CASES[name] = StepCase(
        "detection",
        make,
        lambda items, length: {"pixel_values": images(items, 64), "boxes": torch.rand(items, BOXES, 4)},
        {"pixel_values": BATCH, "boxes": BATCH},
        target="boxes",
        loss=F.mse_loss,
    )


def captions(items: int, length: int) -> Tensors:
    mask = padding(items, length)
    tokens = ids(items, length)
    return {
        "pixel_values": images(items),
        "input_ids": tokens,
        "attention_mask": mask,
        "labels": tokens.masked_fill(mask == 0, -100),
    }


CAPTIONS = {"pixel_values": BATCH, "input_ids": TOKENS, "attention_mask": TOKENS, "labels": TOKENS}
add(
    "pictures and text",
    captions,
    CAPTIONS,
    {
        "BlipForConditionalGeneration": {
            "text_config": {**TINY, **SPECIAL, "encoder_hidden_size": 16, "sep_token_id": 2},
            "vision_config": IMAGE,
            "projection_dim": 12,
            "image_text_hidden_size": 12,
        },
        "GitForCausalLM": {**TINY, **SPECIAL, "vision_config": IMAGE},
    },
)
add(
    "pictures and text",
    lambda items, length: {
        "input_ids": ids(items, length),
        "attention_mask": padding(items, length),
        "pixel_values": images(items),
        "labels": torch.rand(items, CLASSES),
    },
    {**TEXT, "pixel_values": BATCH, "labels": BATCH},
    {"ViltForQuestionAnswering": {**TINY, "image_size": 32, "patch_size": 8, "num_labels": CLASSES}},
)
add(
    "pictures and text",
    lambda items, length: {
        "input_ids": torch.cat([ids(items, length - 1), torch.full((items, 1), 2)], 1),
        "pixel_values": images(items),
        "attention_mask": padding(items, length),
    },
    {**TEXT, "pixel_values": BATCH},
    {
        "ChineseCLIPModel": CONTRASTIVE,
        "AltCLIPModel": {**CONTRASTIVE, "text_config": {**TINY, **SPECIAL, "project_dim": 12}},
        "CLIPSegModel": CONTRASTIVE,
    },
    settings={"return_loss": True},
)


def seeing_and_telling(**changed: Any) -> nn.Module:
    from transformers import GPT2Config, VisionEncoderDecoderConfig, VisionEncoderDecoderModel, ViTConfig

    told = GPT2Config(
        vocab_size=VOCABULARY, n_positions=64, n_embd=16, n_layer=2, n_head=2, add_cross_attention=True, is_decoder=True
    )
    config = VisionEncoderDecoderConfig.from_encoder_decoder_configs(ViTConfig(**IMAGE), told, **changed)
    config.decoder_start_token_id, config.pad_token_id = 1, 0
    model: nn.Module = VisionEncoderDecoderModel(config)
    return model


CASES["VisionEncoderDecoderModel"] = StepCase(
    "pictures and text",
    seeing_and_telling,
    lambda items, length: {"pixel_values": images(items), "labels": ids(items, length)},
    {"pixel_values": BATCH, "labels": TOKENS},
)
IMAGE_TOKEN = 39


def shown(items: int, length: int) -> Tensors:
    """Return text in which 16 tokens stand for the patches of a picture."""
    tokens = torch.cat([torch.full((items, 16), IMAGE_TOKEN), torch.randint(3, 38, (items, length))], 1)
    return {"input_ids": tokens, "pixel_values": images(items), "labels": tokens}


def shown_first(items: int, length: int) -> Tensors:
    """Return the same, with the picture as a prefix that all tokens see."""
    batch = shown(items, length)
    return {**batch, "token_type_ids": (batch["input_ids"] != IMAGE_TOKEN).long()}


LLAVA = {
    "vision_config": {**IMAGE, "model_type": "clip_vision_model"},
    "text_config": {**GROUPED, "model_type": "llama"},
    "image_token_index": IMAGE_TOKEN,
    "image_token_id": IMAGE_TOKEN,
}
add(
    "pictures and text",
    shown,
    {"input_ids": TOKENS, "pixel_values": BATCH, "labels": TOKENS},
    {"LlavaForConditionalGeneration": {**LLAVA, "image_seq_length": 16}},
)
add(
    "pictures and text",
    shown_first,
    {"input_ids": TOKENS, "pixel_values": BATCH, "labels": TOKENS, "token_type_ids": TOKENS},
    {
        "PaliGemmaForConditionalGeneration": {
            "vision_config": {**IMAGE, "model_type": "siglip_vision_model", "projection_dim": 16},
            "text_config": {**GROUPED, "model_type": "gemma"},
            "projection_dim": 16,
            "image_token_index": IMAGE_TOKEN,
            "image_token_id": IMAGE_TOKEN,
        },
    },
)
AHEAD = {
    "prediction_length": 4,
    "context_length": 9,
    "lags_sequence": [1, 2, 7],
    "num_time_features": 2,
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
}
add(
    "state spaces and time series",
    series,
    dict.fromkeys(series(1, 1), BATCH),
    {
        "AutoformerForPrediction": {**AHEAD, "label_length": 4, "moving_average": 3},
        "InformerForPrediction": AHEAD,
    },
)
add(
    "state spaces and time series",
    lambda items, length: {"past_values": torch.randn(items, 32, 3), "target_values": classes(items)},
    {"past_values": BATCH, "target_values": BATCH},
    {
        "PatchTSTForClassification": {
            "num_input_channels": 3,
            "context_length": 32,
            "patch_length": 8,
            "patch_stride": 8,
            "d_model": 16,
            "ffn_dim": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_targets": CLASSES,
            "use_cls_token": True,
        }
    },
)
add(
    "state spaces and time series",
    lambda items, length: {"input_ids": ids(items, 8), "labels": ids(items, 8)},
    {"input_ids": BATCH, "labels": BATCH},
    {
        "FalconMambaForCausalLM": {
            "vocab_size": VOCABULARY,
            "hidden_size": 16,
            "state_size": 4,
            "num_hidden_layers": 2,
        },
    },
)
WIDER_TIMM: Mapping[str, Mapping[str, Any]] = {
    "efficientnet_b0": {},
    "swinv2_tiny_window8_256": {
        "img_size": 64,
        "window_size": 4,
        "embed_dim": 8,
        "depths": (1, 2),
        "num_heads": (2, 2),
    },
    "maxvit_rmlp_pico_rw_256": {"img_size": 64, "embed_dim": (32, 32, 32, 32), "depths": (1, 1, 1, 1)},
    "coatnet_rmlp_nano_rw_224": {"img_size": 64, "embed_dim": (32, 32, 32, 32), "depths": (1, 1, 1, 1)},
    "seresnext26d_32x4d": {"layers": (1, 1, 1, 1), "cardinality": 4},
    "mobilenetv4_conv_small_050": {},
    "regnety_002": {},
    "deit3_small_patch16_224": {"img_size": 64, "depth": 2, "embed_dim": 16, "num_heads": 2, "drop_path_rate": 0.1},
    "eva02_tiny_patch14_224": {"img_size": 64, "patch_size": 16, "depth": 2, "embed_dim": 24, "num_heads": 2},
    "beit_base_patch16_224": {"img_size": 64, "depth": 2, "embed_dim": 16, "num_heads": 2, "drop_path_rate": 0.1},
    "cait_xxs24_224": {"img_size": 64, "depth": 2, "embed_dim": 16, "num_heads": 2},
    "poolformer_s12": {},
    "repvgg_a0": {},
    "mobileone_s0": {},
    "xcit_nano_12_p16_224": {"img_size": 64, "depth": 2, "embed_dim": 16, "num_heads": 2},
    "nf_resnet26": {},
}
for name, given in WIDER_TIMM.items():
    CASES[f"timm {name}"] = StepCase(
        "timm",
        timm_model(name, **given),
        lambda items, length: {"x": images(items, 64), "labels": classes(items)},
        {"x": BATCH, "labels": BATCH},
        target="labels",
    )
CASES["timm inception_v3"] = StepCase(
    "timm",
    timm_model("inception_v3"),
    lambda items, length: {"x": images(items, 96), "labels": classes(items)},
    {"x": BATCH, "labels": BATCH},
    target="labels",
)

add(
    "mixture of experts",
    language,
    {**TEXT, "labels": TOKENS},
    {
        "MiniMaxForCausalLM": {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2, "block_size": 4},
        "Qwen3NextForCausalLM": {
            **GROUPED,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 8,
            "shared_expert_intermediate_size": 8,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "layer_types": ["linear_attention", "full_attention"],
        },
    },
)
add(
    "causal language models",
    language,
    {**TEXT, "labels": TOKENS},
    {
        "Gemma3nForCausalLM": {
            **GROUPED,
            "hidden_size_per_layer_input": 4,
            "vocab_size_per_layer_input": VOCABULARY,
            "intermediate_size": [24, 24],
            "laurel_rank": 4,
            "altup_num_inputs": 2,
            "num_kv_shared_layers": 0,
            "layer_types": ["sliding_attention", "full_attention"],
            "activation_sparsity_pattern": [0.5, 0.0],
            "sliding_window": 4,
        }
    },
)

# What is done in Python for each token, or each item of a batch, needs their number.
for name, axis in {
    "RecurrentGemmaForCausalLM": 1,
    "FunnelForSequenceClassification": 1,
    "LlavaForConditionalGeneration": 0,
    "MiniMaxForCausalLM": 1,
}.items():
    CASES[name] = dataclasses.replace(CASES[name], fixed=(axis,))

# These choose by values what they compute.
for name, why in {
    "IBertForSequenceClassification": "the value of a tensor",
    "LongformerForSequenceClassification": "numbers that it takes out of tensors",
    "LEDForConditionalGeneration": "numbers that it takes out of tensors",
    "ViltForQuestionAnswering": "numbers that it takes out of tensors",
    "AutoformerForPrediction": "AutoformerAttention.forward",
    "Gemma3nForCausalLM": "expected changes of buffers only",
}.items():
    CASES[name] = dataclasses.replace(CASES[name], refused=why)
