"""Models of pictures and text, and of sound and text."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from real_models.step_cases import (
    BATCH,
    CASES,
    CLASSES,
    CONTRASTIVE,
    GROUPED,
    IMAGE,
    IMAGE_TOKEN,
    SIZE,
    SPECIAL,
    TEXT,
    TINY,
    TOKENS,
    VOCABULARY,
    StepCase,
    Tensors,
    add,
    ids,
    images,
    language,
    padding,
    patches,
    transformer,
)
from torch import Tensor, nn


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


def shown(items: int, length: int) -> Tensors:
    """Return text in which 16 tokens stand for the patches of a picture."""
    tokens = torch.cat([torch.full((items, 16), IMAGE_TOKEN), torch.randint(3, 38, (items, length))], 1)
    return {"input_ids": tokens, "pixel_values": images(items), "labels": tokens}


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


def shown_first(items: int, length: int) -> Tensors:
    """Return the same, with the picture as a prefix that all tokens see."""
    batch = shown(items, length)
    return {**batch, "token_type_ids": (batch["input_ids"] != IMAGE_TOKEN).long()}


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

CASES["AyaVisionForConditionalGeneration"] = dataclasses.replace(
    CASES["AyaVisionForConditionalGeneration"],
    batch=lambda items, length: {**shown(items, length), "pixel_values": images(items, 64)},
)

# What is done in Python for each token, or each item of a batch, needs their number.
for name, axis in {
    "LlavaForConditionalGeneration": 0,
    "Idefics3ForConditionalGeneration": 0,
    "SmolVLMForConditionalGeneration": 0,
}.items():
    CASES[name] = dataclasses.replace(CASES[name], fixed=(axis,))

# These choose by values what they compute, or have gradients of their own.
for name, why in {
    "ViltForQuestionAnswering": "numbers that it takes out of tensors",
    "Mistral3ForConditionalGeneration": "numbers that it takes out of tensors",
}.items():
    CASES[name] = dataclasses.replace(CASES[name], refused=why)
