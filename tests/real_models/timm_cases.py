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
    "legacy_seresnet18": {},
    "resnetv2_18": {"layers": (1, 1, 1, 1), "channels": (8, 8, 16, 16)},
    "res2net50d": {"layers": (1, 1, 1, 1)},
    "skresnet18": {"layers": (1, 1, 1, 1)},
    "rexnet_100": {"width_mult": 0.5},
    "repghostnet_050": {},
    "hgnetv2_b0": {},
    "mambaout_femto": {"depths": (1, 1, 1, 1), "dims": (8, 16, 16, 16)},
    "efficientformerv2_s0": {"depths": (1, 1, 1, 1), "embed_dims": (8, 8, 16, 16), "num_vit": 1, "img_size": 64},
    "efficientvit_m0": {"img_size": 64, "depth": (1, 1, 1)},
    "fasternet_t0": {"depths": (1, 1, 1, 1), "embed_dim": 16},
    "gcvit_xxtiny": {"img_size": 64},
    "inception_next_atto": {"depths": (1, 1, 1, 1), "dims": (8, 16, 16, 32)},
    "iformer_t": {},
    "lcnetv2_small": {},
    "mvitv2_tiny": {"img_size": 64},
    "nest_tiny": {"img_size": 64},
    "pit_ti_distilled_224": {"img_size": 64, "base_dims": (8, 8, 8), "depth": (1, 1, 1), "heads": (2, 2, 2)},
    "repvit_m1": {},
    "shvit_s1": {"embed_dim": (16, 16, 16), "depth": (1, 1, 1), "partial_dim": (8, 8, 8)},
    "starnet_s1": {"depths": (1, 1, 1, 1), "base_dim": 8},
    "swiftformer_xs": {},
    "tnt_s_patch16_224": {"img_size": 64, "depth": 1, "embed_dim": 16, "num_heads_outer": 2},
    "tresnet_m": {"layers": (1, 1, 1, 1), "width_factor": 0.25},
    "twins_svt_small": {
        "img_size": 64,
        "embed_dims": (16, 16),
        "depths": (2, 2),
        "num_heads": (2, 2),
        "mlp_ratios": (2, 2),
        "sr_ratios": (2, 1),
        "wss": (4, 4),
    },
    "visformer_tiny": {"img_size": 64, "embed_dim": 32, "depth": (1, 1, 1), "num_heads": 2},
    "lowformer_b0": {},
    "dpn48b": {},
    "ese_vovnet19b_slim_dw": {},
    "convit_tiny": {"img_size": 64, "depth": 2, "embed_dim": 16, "num_heads": 2, "local_up_to_layer": 1},
    "coat_lite_tiny": {"img_size": 64},
    "cs3darknet_s": {},
    "botnet26t_256": {"img_size": 64},
    "lambda_resnet26t": {"img_size": 64},
    "gmlp_ti16_224": {"img_size": 64},
    "resmlp_12_224": {"img_size": 64},
    "vit_small_patch16_rope_224": {"img_size": 64, "depth": 2, "embed_dim": 16, "num_heads": 2},
    "csatv2": {},
    "hardcorenas_a": {},
}
for name, settings in SMALL.items():
    CASES[f"timm {name}"] = StepCase(
        "timm",
        timm_model(name, **settings),
        lambda items, length: {"x": images(items, 64), "labels": classes(items)},
        {"x": BATCH, "labels": BATCH},
        target="labels",
    )
