"""Further architectures of timm, one or two of a family, as small as their arguments allow.

To add one, add a line to the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from real_models.step_cases import BATCH, CASES, StepCase, classes, images, timm_model

SMALL: Mapping[str, Mapping[str, Any]] = {
    "efficientvit_b0": {},
    "efficientvim_m1": {},
    "fastvit_t8": {"layers": (1, 1, 1, 1), "embed_dims": (8, 8, 16, 16)},
    "hiera_tiny_224": {"img_size": (64, 64), "stages": (1, 1, 1, 1), "embed_dim": 16, "num_heads": 1},
    "samvit_base_patch16": {
        "img_size": 64,
        "embed_dim": 16,
        "depth": 2,
        "num_heads": 2,
        "window_size": 3,
        "global_attn_indexes": (1,),
        "neck_chans": 16,
    },
    "sequencer2d_s": {
        "layers": (1, 1),
        "embed_dims": (16, 16),
        "hidden_sizes": (8, 8),
        "patch_sizes": (7, 2),
        "mlp_ratios": (2, 2),
    },
    "swinv2_cr_tiny_224": {"img_size": 64, "window_size": 4, "embed_dim": 16, "depths": (1, 2), "num_heads": (2, 2)},
    "vit_relpos_small_patch16_224": {"img_size": 64, "depth": 2, "embed_dim": 16, "num_heads": 2},
    "tiny_vit_5m_224": {},
    "volo_d1_224": {"img_size": 64},
    "naflexvit_base_patch16_gap": {"depth": 2, "embed_dim": 16, "num_heads": 2},
    "davit_tiny": {"depths": (1, 1), "embed_dims": (16, 16), "num_heads": (2, 2)},
}
for name, settings in SMALL.items():
    CASES[f"timm {name}"] = StepCase(
        "timm",
        timm_model(name, **settings),
        lambda items, length: {"x": images(items, 64), "labels": classes(items)},
        {"x": BATCH, "labels": BATCH},
        target="labels",
    )
