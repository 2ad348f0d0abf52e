"""Models that classify pictures, and bodies of such models."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from real_models.step_cases import (
    BATCH,
    CASES,
    CLASSES,
    CONTRASTIVE,
    IMAGE,
    PICTURE,
    SIZE,
    TEXT,
    TINY,
    StepCase,
    Tensors,
    add,
    classes,
    ids,
    images,
    padding,
    pictures,
    squared,
)
from torch import Tensor, nn

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


class _Logits(nn.Module):
    """A model whose own loss cannot be in a graph, as it matches boxes by scipy: the classes of its queries."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: Tensor) -> Tensor:
        logits: Tensor = self.model(pixel_values).logits
        return logits.movedim(-1, 1)


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


CASES["DetrForObjectDetection"] = StepCase(
    "vision",
    _detr,
    lambda items, length: {"pixel_values": images(items, 64), "labels": torch.randint(0, CLASSES, (items, 4))},
    {"pixel_values": BATCH, "labels": BATCH},
    target="labels",
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


def hidden_patches(items: int, length: int) -> Tensors:
    patches = (images(1).shape[-1] // IMAGE["patch_size"]) ** 2
    hidden = torch.arange(patches).expand(items, -1) % 3 == torch.arange(items).unsqueeze(1) % 3
    return {"pixel_values": images(items), "bool_masked_pos": hidden}


add(
    "vision",
    hidden_patches,
    {"pixel_values": BATCH, "bool_masked_pos": BATCH},
    {
        "ViTForMaskedImageModeling": {**IMAGE, "encoder_stride": IMAGE["patch_size"]},
    },
)

CASES["ImageGPTForImageClassification"] = StepCase(
    "vision",
    CASES["ImageGPTForImageClassification"].model,
    lambda items, length: {"input_ids": torch.randint(0, 16, (items, 48)), "labels": classes(items)},
    {"input_ids": BATCH, "labels": BATCH},
)

# What is done in Python for each token, or each item of a batch, needs their number.
for name, axis in {
    "PixtralVisionModel": 0,
}.items():
    CASES[name] = dataclasses.replace(CASES[name], fixed=(axis,))
