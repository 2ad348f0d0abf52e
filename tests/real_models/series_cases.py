"""State space models, and models of time series."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from real_models.step_cases import (
    BATCH,
    CASES,
    CLASSES,
    DECODER,
    TEXT,
    TOKENS,
    VOCABULARY,
    Tensors,
    add,
    classes,
    ids,
    language,
    squared,
)

add(
    "state spaces and time series",
    # Its scan is a loop over the tokens in Python.
    lambda items, length: {"input_ids": ids(items, 8), "labels": ids(items, 8)},
    {"input_ids": BATCH, "labels": BATCH},
    {"MambaForCausalLM": {"vocab_size": VOCABULARY, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 2}},
)


def series(items: int, length: int) -> Tensors:
    past, future = 16, 4
    return {
        "past_values": torch.rand(items, past) + 1.0,
        "past_time_features": torch.randn(items, past, 2),
        "past_observed_mask": torch.ones(items, past),
        "future_values": torch.rand(items, future) + 1.0,
        "future_time_features": torch.randn(items, future, 2),
    }


add(
    "state spaces and time series",
    series,
    dict.fromkeys(series(1, 1), BATCH),
    {
        "TimeSeriesTransformerForPrediction": {
            "prediction_length": 4,
            "context_length": 9,
            "lags_sequence": [1, 2, 7],
            "num_time_features": 2,
            "d_model": 16,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 2,
            "encoder_ffn_dim": 24,
            "decoder_ffn_dim": 24,
        }
    },
)

add(
    "state spaces and time series",
    # Its scan is a loop over the tokens in Python.
    lambda items, length: {"input_ids": ids(items, 8), "labels": ids(items, 8)},
    {"input_ids": BATCH, "labels": BATCH},
    {
        "Mamba2ForCausalLM": {
            "vocab_size": VOCABULARY,
            "hidden_size": 16,
            "state_size": 4,
            "num_hidden_layers": 2,
            "num_heads": 4,
            "head_dim": 8,
            "n_groups": 2,
            "chunk_size": 4,
        },
        "RwkvForCausalLM": {
            "vocab_size": VOCABULARY,
            "hidden_size": 16,
            "attention_hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 2,
        },
    },
)

AHEAD = {
    "prediction_length": 4,
    "context_length": 9,
    "lags_sequence": [1, 2, 7],
    "num_time_features": 2,
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
}

add(
    "state spaces and time series",
    series,
    dict.fromkeys(series(1, 1), BATCH),
    {
        "AutoformerForPrediction": {**AHEAD, "label_length": 4, "moving_average": 3},
        "InformerForPrediction": AHEAD,
    },
)

add(
    "state spaces and time series",
    lambda items, length: {"past_values": torch.randn(items, 32, 3), "target_values": classes(items)},
    {"past_values": BATCH, "target_values": BATCH},
    {
        "PatchTSTForClassification": {
            "num_input_channels": 3,
            "context_length": 32,
            "patch_length": 8,
            "patch_stride": 8,
            "d_model": 16,
            "ffn_dim": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_targets": CLASSES,
            "use_cls_token": True,
        }
    },
)

add(
    "state spaces and time series",
    lambda items, length: {"input_ids": ids(items, 8), "labels": ids(items, 8)},
    {"input_ids": BATCH, "labels": BATCH},
    {
        "FalconMambaForCausalLM": {
            "vocab_size": VOCABULARY,
            "hidden_size": 16,
            "state_size": 4,
            "num_hidden_layers": 2,
        },
    },
)

MAMBA: dict[str, Any] = {"mamba_d_state": 4, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_chunk_size": 4}

add(
    "state spaces and time series",
    language,
    {**TEXT, "labels": TOKENS},
    {
        "BambaForCausalLM": {
            **DECODER,
            **MAMBA,
            "mamba_n_heads": 4,
            "mamba_d_head": 8,
            "mamba_n_groups": 1,
            "attn_layer_indices": [1],
        },
        "FalconH1ForCausalLM": {
            **DECODER,
            **MAMBA,
            "head_dim": 8,
            "mamba_n_heads": 4,
            "mamba_d_head": 8,
            "mamba_d_ssm": 32,
            "mamba_n_groups": 1,
        },
        "GraniteMoeHybridForCausalLM": {
            **DECODER,
            **MAMBA,
            "mamba_n_heads": 4,
            "mamba_d_head": 8,
            "mamba_n_groups": 1,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 8,
            "layer_types": ["mamba", "attention"],
        },
        "Zamba2ForCausalLM": {
            **DECODER,
            "mamba_d_state": 4,
            "mamba_expand": 2,
            "chunk_size": 4,
            "n_mamba_heads": 4,
            "mamba_ngroups": 1,
            "layers_block_type": ["mamba", "hybrid"],
            "hybrid_layer_ids": [1],
            "num_mem_blocks": 1,
        },
        "JambaForCausalLM": {
            **DECODER,
            "mamba_d_state": 4,
            "mamba_dt_rank": 4,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "use_mamba_kernels": False,
        },
    },
)

DRAWN = {"d_model": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "ffn_dim": 24}

add(
    "state spaces and time series",
    lambda items, length: {"past_values": torch.randn(items, 32, 3), "target_values": torch.randn(items, 2)},
    {"past_values": BATCH, "target_values": BATCH},
    {
        "PatchTSTForRegression": {
            **DRAWN,
            "num_input_channels": 3,
            "context_length": 32,
            "patch_length": 8,
            "patch_stride": 8,
            "num_targets": 2,
        },
        "PatchTSMixerForRegression": {
            "num_input_channels": 3,
            "context_length": 32,
            "patch_length": 8,
            "patch_stride": 8,
            "d_model": 16,
            "num_layers": 2,
            "num_targets": 2,
        },
    },
)

add(
    "state spaces and time series",
    lambda items, length: {"past_values": torch.randn(items, 32, 3)},
    {"past_values": BATCH},
    {
        "PatchTSTForPretraining": {
            **DRAWN,
            "num_input_channels": 3,
            "context_length": 32,
            "patch_length": 8,
            "patch_stride": 8,
        },
        "PatchTSMixerForPretraining": {
            "num_input_channels": 3,
            "context_length": 32,
            "patch_length": 8,
            "patch_stride": 8,
            "d_model": 16,
            "num_layers": 2,
        },
    },
)

add(
    "state spaces and time series",
    lambda items, length: {
        "past_values": torch.randn(items, 32),
        "freq": torch.zeros(items, dtype=torch.long),
        "future_values": torch.randn(items, 8),
    },
    {"past_values": BATCH, "freq": BATCH, "future_values": BATCH},
    {
        "TimesFmModelForPrediction": {
            "patch_length": 8,
            "context_length": 32,
            "horizon_length": 8,
            "hidden_size": 16,
            "intermediate_size": 24,
            "head_dim": 8,
            "num_attention_heads": 2,
            "num_hidden_layers": 2,
        }
    },
)

squared(
    "state spaces and time series",
    "action_preds",
    lambda items, length: {
        "states": torch.randn(items, length, 5),
        "actions": torch.randn(items, length, 2),
        "rewards": torch.randn(items, length, 1),
        "returns_to_go": torch.randn(items, length, 1),
        "timesteps": torch.arange(length).repeat(items, 1),
        "attention_mask": torch.ones(items, length),
    },
    dict.fromkeys(["states", "actions", "rewards", "returns_to_go", "timesteps", "attention_mask"], TOKENS),
    {
        "DecisionTransformerModel": {
            "state_dim": 5,
            "act_dim": 2,
            "hidden_size": 16,
            "max_ep_len": 64,
            "n_layer": 2,
            "n_head": 2,
            "n_positions": 64,
        }
    },
)

# What is done in Python for each token, or each item of a batch, needs their number.
for name, axis in {
    "JambaForCausalLM": 1,
    "TimesFmModelForPrediction": 0,
}.items():
    CASES[name] = dataclasses.replace(CASES[name], fixed=(axis,))

# These choose by values what they compute, or have gradients of their own.
for name, why in {
    "AutoformerForPrediction": "AutoformerAttention.forward",
}.items():
    CASES[name] = dataclasses.replace(CASES[name], refused=why)
