"""Encoders of text: classes of texts and tokens, answers to questions, choices, values."""

from __future__ import annotations

import dataclasses

import torch
from real_models.step_cases import (
    BATCH,
    CASES,
    CLASSES,
    CLASSIFYING_T5,
    GROUPED,
    LABELLED,
    PADDED_GPT,
    SPECIAL,
    TEXT,
    TINY,
    TOKENS,
    VOCABULARY,
    Tensors,
    add,
    ids,
    language,
    padding,
    sentences,
)

add(
    "encoders",
    sentences,
    {**TEXT, "labels": BATCH},
    {
        "BertForSequenceClassification": {**TINY, "num_labels": CLASSES},
        "DistilBertForSequenceClassification": {
            "vocab_size": VOCABULARY,
            "dim": 16,
            "hidden_dim": 24,
            "n_layers": 2,
            "n_heads": 2,
            "max_position_embeddings": 64,
            "num_labels": CLASSES,
        },
        "RobertaForSequenceClassification": {**TINY, "num_labels": CLASSES},
        "ElectraForSequenceClassification": {**TINY, "embedding_size": 12, "num_labels": CLASSES},
        "DebertaV2ForSequenceClassification": {
            **TINY,
            "num_labels": CLASSES,
            "relative_attention": True,
            "pos_att_type": ["p2c", "c2p"],
            "position_buckets": 8,
            "norm_rel_ebd": "layer_norm",
            "share_att_key": True,
            "position_biased_input": False,
        },
        "MobileBertForSequenceClassification": {
            **TINY,
            "embedding_size": 16,
            "intra_bottleneck_size": 8,
            "true_hidden_size": 8,
            "num_labels": CLASSES,
        },
        "ModernBertForSequenceClassification": {**TINY, **SPECIAL, "num_labels": CLASSES, "local_attention": 6},
    },
)

add(
    "encoders",
    language,
    {**TEXT, "labels": TOKENS},
    {"BertForMaskedLM": TINY, "XLMRobertaForMaskedLM": TINY, "AlbertForMaskedLM": {**TINY, "embedding_size": 12}},
)

add(
    "encoders",
    sentences,
    {**TEXT, "labels": BATCH},
    {"MPNetForSequenceClassification": {**TINY, "num_labels": CLASSES}},
)

add(
    "encoders",
    language,
    {**TEXT, "labels": TOKENS},
    {
        "RoFormerForMaskedLM": {**TINY, "embedding_size": 16},
        "ConvBertForMaskedLM": {**TINY, "embedding_size": 16, "conv_kernel_size": 3},
    },
)

add(
    "encoders",
    # Its Fourier transforms export for one size.
    lambda items, length: {"input_ids": ids(3, 8), "labels": ids(3, 8)},
    {},
    {"FNetForMaskedLM, one size": TINY},
)


def words(items: int, length: int) -> Tensors:
    """Return what names are found by: a class for each token."""
    mask = padding(items, length)
    labels = torch.randint(0, CLASSES, (items, length)).masked_fill(mask == 0, -100)
    return {"input_ids": ids(items, length), "attention_mask": mask, "labels": labels}


add(
    "encoders",
    words,
    {**TEXT, "labels": TOKENS},
    {
        "BertForTokenClassification": {**TINY, "num_labels": CLASSES},
        "SqueezeBertForTokenClassification": {**TINY, "embedding_size": 16, "num_labels": CLASSES},
        "DebertaForTokenClassification": {
            **TINY,
            "num_labels": CLASSES,
            "relative_attention": True,
            "pos_att_type": ["p2c", "c2p"],
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
    "encoders",
    answers,
    {**TEXT, "start_positions": BATCH, "end_positions": BATCH},
    {
        "DistilBertForQuestionAnswering": {
            "vocab_size": VOCABULARY,
            "dim": 16,
            "hidden_dim": 24,
            "n_layers": 2,
            "n_heads": 2,
            "max_position_embeddings": 64,
        }
    },
)


def several(items: int, length: int) -> Tensors:
    """Return what has any number of labels."""
    labels = (torch.rand(items, CLASSES) < 0.5).float()
    return {"input_ids": ids(items, length), "attention_mask": padding(items, length), "labels": labels}


add(
    "encoders",
    several,
    {**TEXT, "labels": BATCH},
    {
        "BertForSequenceClassification, several labels": {
            **TINY,
            "num_labels": CLASSES,
            "problem_type": "multi_label_classification",
        }
    },
)

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

add(
    "encoders",
    language,
    {**TEXT, "labels": TOKENS},
    {
        "JinaEmbeddingsV3ForMaskedLM": TINY,
        "NomicBertForMaskedLM": TINY,
        "GteForMaskedLM": {**TINY, **SPECIAL},
        "EsmcForMaskedLM": {
            **TINY,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "mask_token_id": 5,
            "pad_token_id": 0,
        },
    },
)

add(
    "encoders",
    answers,
    {**TEXT, "start_positions": BATCH, "end_positions": BATCH},
    {"SplinterForQuestionAnswering": {**TINY, "question_token_id": 4}},
)


def marked(items: int, length: int) -> Tensors:
    """Return the words of a page with the path of each through its elements, and a class for each."""
    return {
        "input_ids": ids(items, length),
        "xpath_tags_seq": torch.randint(0, 8, (items, length, 4)),
        "xpath_subs_seq": torch.randint(0, 8, (items, length, 4)),
        "attention_mask": padding(items, length),
        "labels": torch.randint(0, CLASSES, (items, length)),
    }


add(
    "encoders",
    marked,
    {**TEXT, "xpath_tags_seq": TOKENS, "xpath_subs_seq": TOKENS, "labels": TOKENS},
    {
        "MarkupLMForTokenClassification": {
            **TINY,
            "num_labels": CLASSES,
            "max_depth": 4,
            "max_xpath_tag_unit_embeddings": 8,
            "max_xpath_subs_unit_embeddings": 8,
            "tag_pad_id": 7,
            "subs_pad_id": 7,
            "xpath_unit_hidden_size": 4,
        }
    },
)

add(
    "encoders",
    sentences,
    {**TEXT, "labels": BATCH},
    {
        "TapasForSequenceClassification": {**LABELLED, "type_vocab_sizes": [3, 8, 8, 2, 8, 8, 4]},
        "LukeForSequenceClassification": {**LABELLED, "entity_vocab_size": 8, "entity_emb_size": 8},
        "RoCBertForSequenceClassification": {
            **LABELLED,
            "pronunciation_vocab_size": 8,
            "shape_vocab_size": 8,
            "pronunciation_embed_dim": 8,
            "shape_embed_dim": 8,
        },
        "MraForSequenceClassification": LABELLED,
        "YosoForSequenceClassification": {**LABELLED, "use_expectation": True},
        "PerceiverForSequenceClassification": {
            **LABELLED,
            "num_latents": 4,
            "d_latents": 16,
            "d_model": 16,
            "num_blocks": 1,
            "num_self_attends_per_block": 1,
            "num_self_attention_heads": 2,
            "num_cross_attention_heads": 2,
        },
    },
)

add(
    "encoders",
    lambda items, length: {"input_ids": ids(items, 64), "labels": ids(items, 64)},
    {"input_ids": BATCH, "labels": BATCH},
    {
        "ReformerModelWithLMHead": {
            **TINY,
            "attn_layers": ["local", "lsh"],
            "is_decoder": True,
            "axial_pos_shape": [8, 8],
            "axial_pos_embds_dim": [8, 8],
            "attention_head_size": 8,
            "feed_forward_size": 24,
            "local_attn_chunk_length": 8,
            "lsh_attn_chunk_length": 8,
            "num_buckets": 4,
            "num_hashes": 1,
        }
    },
)


def tags(items: int, length: int) -> Tensors:
    """Return sentences with a class for each token."""
    mask = padding(items, length)
    labels = torch.randint(0, CLASSES, (items, length)).masked_fill(mask == 0, -100)
    return {"input_ids": ids(items, length), "attention_mask": mask, "labels": labels}


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
        "GPT2ForTokenClassification": {**PADDED_GPT, "num_labels": CLASSES},
        "BigBirdForTokenClassification": {
            **LABELLED,
            "block_size": 2,
            "num_random_blocks": 1,
            "attention_type": "original_full",
        },
    },
)

add(
    "answers to questions",
    answers,
    {**TEXT, "start_positions": BATCH, "end_positions": BATCH},
    {
        "BertForQuestionAnswering": TINY,
        "T5ForQuestionAnswering": {**CLASSIFYING_T5, "num_labels": 2},
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


def numbers(items: int, length: int) -> Tensors:
    """Return what a number is predicted from."""
    return {"input_ids": ids(items, length), "attention_mask": padding(items, length), "labels": torch.randn(items)}


add(
    "regression",
    numbers,
    {**TEXT, "labels": BATCH},
    {
        "RobertaForSequenceClassification, a number": {**TINY, "num_labels": 1},
        "XLNetForSequenceClassification, a number": {
            "vocab_size": VOCABULARY,
            "d_model": 16,
            "n_layer": 2,
            "n_head": 2,
            "d_inner": 24,
            "num_labels": 1,
        },
    },
)

add(
    "regression",
    lambda items, length: {"past_values": torch.randn(items, 32, 3), "future_values": torch.randn(items, 8, 3)},
    {"past_values": BATCH, "future_values": BATCH},
    {
        "PatchTSTForPrediction": {
            "num_input_channels": 3,
            "context_length": 32,
            "prediction_length": 8,
            "patch_length": 8,
            "patch_stride": 8,
            "d_model": 16,
            "ffn_dim": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "loss": "mse",
        },
        "PatchTSMixerForPrediction": {
            "num_input_channels": 3,
            "context_length": 32,
            "prediction_length": 8,
            "patch_length": 8,
            "patch_stride": 8,
            "d_model": 16,
            "num_layers": 2,
        },
    },
)

# What is done in Python for each token, or each item of a batch, needs their number.
for name, axis in {
    "FunnelForSequenceClassification": 1,
}.items():
    CASES[name] = dataclasses.replace(CASES[name], fixed=(axis,))

# These choose by values what they compute, or have gradients of their own.
for name, why in {
    "IBertForSequenceClassification": "the value of a tensor",
    "LongformerForSequenceClassification": "numbers that it takes out of tensors",
    "ReformerModelWithLMHead": "a backward pass of its own",
}.items():
    CASES[name] = dataclasses.replace(CASES[name], refused=why)
