"""Models from sequences to sequences."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from real_models.step_cases import (
    BATCH,
    CASES,
    CLASSES,
    CLASSIFYING_T5,
    GROUPED,
    SPECIAL,
    T5,
    TEXT,
    TINY,
    TOKENS,
    TRANSLATOR,
    VOCABULARY,
    StepCase,
    Tensors,
    add,
    ids,
    sentences,
    translations,
)
from torch import nn

add(
    "sequence to sequence",
    translations,
    {**TEXT, "labels": {0: "batch", 1: "target_length"}},
    {
        "T5ForConditionalGeneration": {
            "vocab_size": VOCABULARY,
            "d_model": 16,
            "d_kv": 8,
            "d_ff": 24,
            "num_layers": 2,
            "num_heads": 2,
            "decoder_start_token_id": 0,
        },
        "BartForConditionalGeneration": {
            "vocab_size": VOCABULARY,
            "d_model": 16,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 2,
            "encoder_ffn_dim": 24,
            "decoder_ffn_dim": 24,
            "max_position_embeddings": 64,
            **SPECIAL,
        },
    },
)

add(
    "sequence to sequence",
    lambda items, length: {"input_features": torch.randn(items, 8, 40), "labels": ids(items, length)},
    {"input_features": BATCH, "labels": TOKENS},
    {
        "WhisperForConditionalGeneration": {
            "vocab_size": VOCABULARY,
            "num_mel_bins": 8,
            "d_model": 16,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 2,
            "encoder_ffn_dim": 24,
            "decoder_ffn_dim": 24,
            "max_source_positions": 20,
            "max_target_positions": 64,
            "decoder_start_token_id": 1,
            **SPECIAL,
        }
    },
)

add(
    "sequence to sequence",
    translations,
    {**TEXT, "labels": {0: "batch", 1: "target_length"}},
    {
        "MarianMTModel": {
            "vocab_size": VOCABULARY,
            "d_model": 16,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 2,
            "encoder_ffn_dim": 24,
            "decoder_ffn_dim": 24,
            "max_position_embeddings": 64,
            "decoder_start_token_id": 1,
            **SPECIAL,
        }
    },
)

add(
    "sequence to sequence",
    translations,
    {**TEXT, "labels": {0: "batch", 1: "target_length"}},
    {
        "PegasusForConditionalGeneration": TRANSLATOR,
    },
)

add(
    "sequence to sequence",
    # It attends in blocks of 4 tokens.
    lambda items, length: translations(items, (length + 3) // 4 * 4),
    {**TEXT, "labels": {0: "batch", 1: "target_length"}},
    {
        "LongT5ForConditionalGeneration": {
            "vocab_size": VOCABULARY,
            "d_model": 16,
            "d_kv": 8,
            "d_ff": 24,
            "num_layers": 2,
            "num_heads": 2,
            "decoder_start_token_id": 0,
            "local_radius": 3,
        },
    },
)

add(
    "sequence to sequence",
    translations,
    {**TEXT, "labels": {0: "batch", 1: "target_length"}},
    {"M2M100ForConditionalGeneration": TRANSLATOR},
)

TARGETS = {**TEXT, "labels": {0: "batch", 1: "target_length"}}

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

BART = {
    "vocab_size": VOCABULARY,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "max_position_embeddings": 64,
    "num_labels": CLASSES,
    "decoder_start_token_id": 1,
    **SPECIAL,
}


def endings(items: int, length: int) -> Tensors:
    """Return sentences that end with the token by which BART and T5 know the end, as their tokenizers write them."""
    batch = dict(sentences(items, length))
    last = batch["attention_mask"].sum(1) - 1
    tokens = batch["input_ids"]
    tokens[torch.arange(items), last] = SPECIAL["eos_token_id"]
    return {**batch, "input_ids": tokens}


add(
    "sequence to sequence",
    endings,
    {**TEXT, "labels": BATCH},
    {
        "BartForSequenceClassification": BART,
        "MBartForSequenceClassification": BART,
        "PLBartForSequenceClassification": BART,
        "T5ForSequenceClassification": {**CLASSIFYING_T5, "eos_token_id": 2},
        "MT5ForSequenceClassification": {**CLASSIFYING_T5, "eos_token_id": 2},
    },
)

# These choose by values what they compute, or have gradients of their own.
for name, why in {
    "LEDForConditionalGeneration": "numbers that it takes out of tensors",
}.items():
    CASES[name] = dataclasses.replace(CASES[name], refused=why)
