"""Further heads of classes whose bodies are known, and further bodies.

To add one, add a line to the table of its family.
"""

from __future__ import annotations

from typing import Any

import torch
from real_models.step_cases import (
    BATCH,
    CLASSES,
    GROUPED,
    IMAGE,
    SPECIAL,
    TEXT,
    TINY,
    TOKENS,
    VOCABULARY,
    WAVES,
    Tensors,
    add,
    classes,
    ids,
    images,
    language,
    padding,
    sentences,
)

PADDED = {**GROUPED, **SPECIAL, "num_labels": CLASSES}
"""Decoders that classify look for the last token that is no padding."""
MIXTURE = {**PADDED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
GPT = {"vocab_size": VOCABULARY, "n_positions": 64, "n_embd": 16, "n_layer": 2, "n_head": 2, **SPECIAL}
LETTERS = {"vocab_size": VOCABULARY, "hidden_size": 16, "n_layer": 2, "n_head": 2, **SPECIAL, "num_labels": CLASSES}
NEO = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_layers": 2,
    "num_heads": 2,
    "attention_types": [[["global", "local"], 1]],
    "max_position_embeddings": 64,
    **SPECIAL,
}
T5 = {
    "vocab_size": VOCABULARY,
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 24,
    "num_layers": 2,
    "num_heads": 2,
    "decoder_start_token_id": 0,
    "num_labels": CLASSES,
}
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

add(
    "decoders that classify",
    sentences,
    {**TEXT, "labels": BATCH},
    {
        "GPT2ForSequenceClassification": {**GPT, "num_labels": CLASSES},
        "LlamaForSequenceClassification": PADDED,
        "Qwen2ForSequenceClassification": PADDED,
        "Qwen3ForSequenceClassification": PADDED,
        "MistralForSequenceClassification": PADDED,
        "Gemma2ForSequenceClassification": PADDED,
        "Phi3ForSequenceClassification": {**TINY, **SPECIAL, "num_labels": CLASSES},
        "OPTForSequenceClassification": {
            "vocab_size": VOCABULARY,
            "hidden_size": 16,
            "word_embed_proj_dim": 16,
            "ffn_dim": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "max_position_embeddings": 64,
            "num_labels": CLASSES,
            **SPECIAL,
        },
        "BloomForSequenceClassification": LETTERS,
        "FalconForSequenceClassification": {
            "vocab_size": VOCABULARY,
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_labels": CLASSES,
            **SPECIAL,
        },
        "GPTNeoForSequenceClassification": {**NEO, "num_labels": CLASSES},
        "GPTNeoXForSequenceClassification": {**TINY, **SPECIAL, "num_labels": CLASSES},
        "Qwen3MoeForSequenceClassification": MIXTURE,
        "GptOssForSequenceClassification": {**PADDED, "num_local_experts": 4, "num_experts_per_tok": 2},
        "ModernBertDecoderForSequenceClassification": {**TINY, **SPECIAL, "num_labels": CLASSES, "local_attention": 6},
        "CTRLForSequenceClassification": {
            "vocab_size": VOCABULARY,
            "n_positions": 64,
            "n_embd": 16,
            "dff": 24,
            "n_layer": 2,
            "n_head": 2,
            "num_labels": CLASSES,
            "pad_token_id": 0,
        },
    },
)


def endings(items: int, length: int) -> Tensors:
    """Return sentences that end with the token by which BART and T5 know the end, as do those of their tokenizers."""
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
        "T5ForSequenceClassification": {**T5, "eos_token_id": 2},
        "MT5ForSequenceClassification": {**T5, "eos_token_id": 2},
    },
)


def tags(items: int, length: int) -> Tensors:
    """Return sentences with a class for each token."""
    mask = padding(items, length)
    labels = torch.randint(0, CLASSES, (items, length)).masked_fill(mask == 0, -100)
    return {"input_ids": ids(items, length), "attention_mask": mask, "labels": labels}


LABELLED = {**TINY, "num_labels": CLASSES}
DEBERTA = {
    **LABELLED,
    "relative_attention": True,
    "pos_att_type": ["p2c", "c2p"],
    "position_buckets": 8,
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
    "position_biased_input": False,
}
add(
    "classes of tokens",
    tags,
    {**TEXT, "labels": TOKENS},
    {
        "RobertaForTokenClassification": LABELLED,
        "XLMRobertaForTokenClassification": LABELLED,
        "DebertaV2ForTokenClassification": DEBERTA,
        "ElectraForTokenClassification": {**LABELLED, "embedding_size": 12},
        "ModernBertForTokenClassification": {**LABELLED, **SPECIAL, "local_attention": 6},
        "GPT2ForTokenClassification": {**GPT, "num_labels": CLASSES},
        "BigBirdForTokenClassification": {
            **LABELLED,
            "block_size": 2,
            "num_random_blocks": 1,
            "attention_type": "original_full",
        },
    },
)


def answers(items: int, length: int) -> Tensors:
    """Return questions with the places where their answers begin and end."""
    return {
        "input_ids": ids(items, length),
        "attention_mask": padding(items, length),
        "start_positions": torch.randint(0, length - 3, (items,)),
        "end_positions": torch.randint(0, length - 3, (items,)),
    }


add(
    "answers to questions",
    answers,
    {**TEXT, "start_positions": BATCH, "end_positions": BATCH},
    {
        "BertForQuestionAnswering": TINY,
        "T5ForQuestionAnswering": {**T5, "num_labels": 2},
    },
)


def choices(items: int, length: int) -> Tensors:
    """Return three endings of each sentence, one of which is right."""
    tokens = ids(3 * items, length).view(items, 3, length)
    mask = padding(3 * items, length).view(items, 3, length)
    return {"input_ids": tokens, "attention_mask": mask, "labels": torch.randint(0, 3, (items,))}


CHOICES = {0: "batch", 2: "length"}
add(
    "one of several",
    choices,
    {"input_ids": CHOICES, "attention_mask": CHOICES, "labels": BATCH},
    {
        "RobertaForMultipleChoice": TINY,
    },
)


STATES: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
add(
    "causal language models",
    language,
    {**TEXT, "labels": TOKENS},
    {
        "Qwen3_5ForCausalLM": {**GROUPED, **STATES},
        "Gemma4ForCausalLM": {
            **GROUPED,
            "global_head_dim": 4,
            "hidden_size_per_layer_input": 4,
            "vocab_size_per_layer_input": VOCABULARY,
            "num_kv_shared_layers": 0,
            "sliding_window": 4,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    },
)
ROUTED = {
    **GROUPED,
    "moe_intermediate_size": 8,
    "n_routed_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
}
add(
    "mixture of experts",
    language,
    {**TEXT, "labels": TOKENS},
    {
        "Lfm2MoeForCausalLM": {**ROUTED, "layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
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


def sounds(items: int, length: int) -> Tensors:
    samples = torch.randn(items, 100 * length)
    lengths = 100 * (length - torch.arange(items) % 3)
    return {
        "input_values": samples,
        "attention_mask": (torch.arange(100 * length) < lengths.unsqueeze(1)).long(),
        "labels": classes(items),
    }


HEARD = {**WAVES, "num_labels": CLASSES, "classifier_proj_size": 8, "tdnn_dim": [8] * 5, "xvector_output_dim": 8}
add(
    "speech",
    sounds,
    {"input_values": TOKENS, "attention_mask": TOKENS, "labels": BATCH},
    {
        "HubertForSequenceClassification": HEARD,
    },
)
add(
    "speech",
    lambda items, length: {"input_features": torch.randn(items, 8, 40), "labels": classes(items)},
    {"input_features": BATCH, "labels": BATCH},
    {
        "WhisperForAudioClassification": {
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
            "num_labels": CLASSES,
            "classifier_proj_size": 8,
            **SPECIAL,
        }
    },
)
