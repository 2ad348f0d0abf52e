"""Architectures of torchvision, as small as their arguments allow."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from real_models.step_cases import BATCH, CASES, CLASSES, StepCase, classes, images, load_torchvision
from torch import nn


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

VIDEO_PATCHES: Mapping[str, Any] = {
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
            **VIDEO_PATCHES,
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
