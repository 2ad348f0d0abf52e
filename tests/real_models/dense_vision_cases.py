"""Models of places in pictures: segments, depths, boxes, points."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from real_models.step_cases import (
    BATCH,
    CASES,
    CLASSES,
    IMAGE,
    PICTURE,
    SPECIAL,
    TINY,
    StepCase,
    Tensors,
    add,
    backbone,
    ids,
    images,
    squared,
    transformer,
)
from torch import Tensor, nn


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


class Output(nn.Module):
    """A model whose own loss cannot be in a graph, as it matches boxes by scipy: one of its outputs."""

    def __init__(self, model: nn.Module, name: str) -> None:
        super().__init__()
        self.model = model
        self.name = name

    def forward(self, pixel_values: Tensor) -> Tensor:
        output: Tensor = getattr(self.model(pixel_values), self.name)
        return output


def depths(items: int, length: int) -> Tensors:
    return {"pixel_values": images(items, 64), "depth": torch.rand(items, 64, 64)}


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

BOXES = 4

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
    "predicted_depth",
    lambda items, length: {"pixel_values": images(items, 64)},
    PICTURE,
    {
        "DepthAnythingForDepthEstimation": lambda **changed: _depth_anything("DepthAnything", **changed),
        "ZoeDepthForDepthEstimation": lambda **changed: _zoe_depth(**changed),
    },
)

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


def box_detector(name: str, **settings: Any) -> Callable[..., nn.Module]:
    """Return the function that makes a detector, whose boxes are its output."""

    def make(**changed: Any) -> nn.Module:
        own = {"backbone_config": backbone()} if "backbone" in settings else {}
        return Output(transformer(name, **settings, **own)(**changed), "pred_boxes")

    return make


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


def points(name: str) -> Callable[..., nn.Module]:
    """Return the function that makes a detector of the RT-DETR family."""

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
