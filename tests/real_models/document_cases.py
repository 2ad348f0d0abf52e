"""Models of documents: words with their places on a page, and pictures of pages."""

from __future__ import annotations

import dataclasses

import torch
from real_models.step_cases import (
    BATCH,
    CASES,
    CLASSES,
    LABELLED,
    T5,
    TOKENS,
    VOCABULARY,
    Tensors,
    add,
    ids,
    images,
    padding,
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

# These choose by values what they compute, or have gradients of their own.
for name, why in {
    "UdopForConditionalGeneration": "numbers are taken out of tensors",
}.items():
    CASES[name] = dataclasses.replace(CASES[name], refused=why)
