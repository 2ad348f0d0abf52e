"""Causal language models, dense and of experts, and decoders that classify."""

from __future__ import annotations

import dataclasses
from typing import Any

from real_models.step_cases import (
    BATCH,
    CASES,
    CLASSES,
    DECODER,
    GROUPED,
    PADDED_GPT,
    SPECIAL,
    TEXT,
    TINY,
    TOKENS,
    VOCABULARY,
    add,
    language,
    sentences,
    translations,
)

add(
    "causal language models",
    language,
    {**TEXT, "labels": TOKENS},
    {
        "GPT2LMHeadModel": {"vocab_size": VOCABULARY, "n_positions": 64, "n_embd": 16, "n_layer": 2, "n_head": 2},
        "LlamaForCausalLM": GROUPED,
        "Qwen3ForCausalLM": GROUPED,
        "Gemma2ForCausalLM": GROUPED,
        "Gemma3ForCausalLM": GROUPED,
        "PhiForCausalLM": TINY,
        "MistralForCausalLM": GROUPED,
    },
)

add(
    "causal language models",
    language,
    {**TEXT, "labels": TOKENS},
    {
        "Qwen2ForCausalLM": GROUPED,
        "OPTForCausalLM": {
            "vocab_size": VOCABULARY,
            "hidden_size": 16,
            "ffn_dim": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "max_position_embeddings": 64,
            "word_embed_proj_dim": 16,
        },
        "GPTNeoXForCausalLM": TINY,
        "BloomForCausalLM": {"vocab_size": VOCABULARY, "hidden_size": 16, "n_layer": 2, "n_head": 2},
        "FalconForCausalLM": {**TINY, "new_decoder_architecture": False},
        "OlmoForCausalLM": GROUPED,
    },
)

GPT = {"vocab_size": VOCABULARY, "n_positions": 64, "n_embd": 16, "n_layer": 2, "n_head": 2}

add(
    "causal language models",
    language,
    {**TEXT, "labels": TOKENS},
    {
        "Phi3ForCausalLM": {**TINY, **SPECIAL},
        "StableLmForCausalLM": DECODER,
        "CohereForCausalLM": DECODER,
        "Olmo2ForCausalLM": DECODER,
        "SmolLM3ForCausalLM": {**DECODER, **SPECIAL},
        "GPTNeoForCausalLM": {
            "vocab_size": VOCABULARY,
            "hidden_size": 16,
            "num_layers": 2,
            "num_heads": 2,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 4,
            "max_position_embeddings": 64,
        },
        "GPTJForCausalLM": {**GPT, "rotary_dim": 4},
        "MptForCausalLM": {"vocab_size": VOCABULARY, "d_model": 16, "n_layers": 2, "n_heads": 2, "max_seq_len": 64},
    },
)

add(
    "causal language models",
    language,
    {**TEXT, "labels": TOKENS},
    {"BioGptForCausalLM": {**TINY, "layerdrop": 0.1}},
)

add(
    "causal language models",
    language,
    {**TEXT, "labels": TOKENS},
    {
        "GemmaForCausalLM": GROUPED,
        "Cohere2ForCausalLM": {**DECODER, "sliding_window": 4},
        "GraniteForCausalLM": DECODER,
        "GPTBigCodeForCausalLM": {
            "vocab_size": VOCABULARY,
            "n_positions": 64,
            "n_embd": 16,
            "n_layer": 2,
            "n_head": 2,
        },
        "CodeGenForCausalLM": {
            "vocab_size": VOCABULARY,
            "n_positions": 64,
            "n_ctx": 64,
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "rotary_dim": 4,
        },
        "Starcoder2ForCausalLM": GROUPED,
        "FalconForCausalLM, new decoder": {**TINY, "new_decoder_architecture": True, "num_kv_heads": 1},
        "FalconForCausalLM, alibi": {**TINY, "alibi": True},
        "GlmForCausalLM": {**GROUPED, **SPECIAL, "partial_rotary_factor": 0.5},
        "Glm4ForCausalLM": {**GROUPED, **SPECIAL, "partial_rotary_factor": 0.5},
        "NemotronForCausalLM": {**DECODER, "head_dim": 8},
        "Lfm2ForCausalLM": {**DECODER, "layer_types": ["conv", "full_attention"]},
        "CTRLLMHeadModel": {
            "vocab_size": VOCABULARY,
            "n_positions": 64,
            "n_embd": 16,
            "dff": 24,
            "n_layer": 2,
            "n_head": 2,
        },
        "OpenAIGPTLMHeadModel": {"vocab_size": VOCABULARY, "n_positions": 64, "n_embd": 16, "n_layer": 2, "n_head": 2},
        "ModernBertDecoderForCausalLM": {**TINY, **SPECIAL, "local_attention": 6},
        "Ernie4_5ForCausalLM": GROUPED,
        "RecurrentGemmaForCausalLM": {
            **TINY,
            "num_key_value_heads": 1,
            "lru_width": 16,
            "attention_window_size": 8,
            "block_types": ["recurrent", "attention"],
        },
    },
)

add(
    "causal language models",
    language,
    {**TEXT, "labels": TOKENS},
    {
        "XGLMForCausalLM": {
            "vocab_size": VOCABULARY,
            "d_model": 16,
            "ffn_dim": 24,
            "num_layers": 2,
            "attention_heads": 2,
            "max_position_embeddings": 64,
            "layerdrop": 0.1,
        }
    },
)

add(
    "causal language models",
    language,
    {**TEXT, "labels": TOKENS},
    {
        "Gemma3nForCausalLM": {
            **GROUPED,
            "hidden_size_per_layer_input": 4,
            "vocab_size_per_layer_input": VOCABULARY,
            "intermediate_size": [24, 24],
            "laurel_rank": 4,
            "altup_num_inputs": 2,
            "num_kv_shared_layers": 0,
            "layer_types": ["sliding_attention", "full_attention"],
            "activation_sparsity_pattern": [0.5, 0.0],
            "sliding_window": 4,
        }
    },
)

LATENT = {
    **TINY,
    "num_key_value_heads": 2,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
}

SLIDING = {**GROUPED, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}

add(
    "causal language models",
    language,
    {**TEXT, "labels": TOKENS},
    {
        "MiniCPM3ForCausalLM": LATENT,
        "YoutuForCausalLM": LATENT,
        "TrOCRForCausalLM": {
            "vocab_size": VOCABULARY,
            "d_model": 16,
            "decoder_layers": 2,
            "decoder_attention_heads": 2,
            "decoder_ffn_dim": 24,
            "max_position_embeddings": 64,
            **SPECIAL,
        },
        "OlmoHybridForCausalLM": {
            **GROUPED,
            **SPECIAL,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "layer_types": ["linear_attention", "full_attention"],
        },
        "BertGenerationDecoder": {**TINY, "is_decoder": True},
        "Lfm3ForCausalLM": {**SLIDING, **SPECIAL, "layer_types": ["conv", "sliding_attention"], "conv_L_cache": 3},
        "HrmTextForCausalLM": {**GROUPED, "num_layers_per_stack": 1, "num_hidden_layers": 12},
    },
)

add(
    "causal language models",
    language,
    {**TEXT, "labels": TOKENS},
    {
        "PersimmonForCausalLM": TINY,
        "DiffLlamaForCausalLM": DECODER,
        "HeliumForCausalLM": {**GROUPED, **SPECIAL},
        "BitNetForCausalLM": GROUPED,
        "ArceeForCausalLM": GROUPED,
        "ApertusForCausalLM": GROUPED,
        "Exaone4ForCausalLM": {**GROUPED, "sliding_window": 4, "sliding_window_pattern": 2},
        "HunYuanDenseV1ForCausalLM": GROUPED,
        "SeedOssForCausalLM": GROUPED,
        "DogeForCausalLM": DECODER,
        "NanoChatForCausalLM": DECODER,
        "Olmo3ForCausalLM": {**DECODER, "sliding_window": 4},
        "VaultGemmaForCausalLM": GROUPED,
        "BloomForCausalLM, padded": {
            "vocab_size": VOCABULARY,
            "hidden_size": 16,
            "n_layer": 2,
            "n_head": 2,
        },
    },
)

LINEAR_ATTENTION: dict[str, Any] = {
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
        "Qwen3_5ForCausalLM": {**GROUPED, **LINEAR_ATTENTION},
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

add(
    "mixture of experts",
    language,
    {**TEXT, "labels": TOKENS},
    {"MixtralForCausalLM": {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}},
)

add(
    "mixture of experts",
    language,
    {**TEXT, "labels": TOKENS},
    {
        "Qwen2MoeForCausalLM": {
            **GROUPED,
            "moe_intermediate_size": 8,
            "shared_expert_intermediate_size": 8,
            "num_experts": 4,
        }
    },
)

add(
    "mixture of experts",
    language,
    {**TEXT, "labels": TOKENS},
    {
        "Qwen3MoeForCausalLM": {**GROUPED, "moe_intermediate_size": 8, "num_experts": 4, "num_experts_per_tok": 2},
        "OlmoeForCausalLM": {**DECODER, "num_experts": 4, "num_experts_per_tok": 2},
        "GraniteMoeForCausalLM": {**DECODER, "num_local_experts": 4, "num_experts_per_tok": 2},
        "DeepseekV3ForCausalLM": {
            **TINY,
            "moe_intermediate_size": 8,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "q_lora_rank": 8,
            "kv_lora_rank": 8,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 4,
            "v_head_dim": 4,
        },
    },
)

SPARSE = {
    "vocab_size": VOCABULARY,
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 24,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_sparse_encoder_layers": 1,
    "num_sparse_decoder_layers": 1,
    "num_heads": 2,
    "num_experts": 4,
    "decoder_start_token_id": 0,
}

add(
    "mixture of experts",
    translations,
    {**TEXT, "labels": {0: "batch", 1: "target_length"}},
    {"SwitchTransformersForConditionalGeneration": SPARSE},
)

add(
    "mixture of experts",
    language,
    {**TEXT, "labels": TOKENS},
    {
        "GptOssForCausalLM": {
            **GROUPED,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 4,
        },
        "PhimoeForCausalLM": {**DECODER, "num_local_experts": 4, "num_experts_per_tok": 2},
        "JetMoeForCausalLM": {
            **TINY,
            "num_key_value_heads": 2,
            "kv_channels": 8,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
        "DeepseekV2ForCausalLM": {
            **TINY,
            "moe_intermediate_size": 8,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "first_k_dense_replace": 1,
            "q_lora_rank": 8,
            "kv_lora_rank": 8,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 4,
            "v_head_dim": 4,
        },
        "Ernie4_5_MoeForCausalLM": {
            **GROUPED,
            "moe_intermediate_size": 8,
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_num_shared_experts": 1,
        },
    },
)

add(
    "mixture of experts",
    language,
    {**TEXT, "labels": TOKENS},
    {
        "MiniMaxForCausalLM": {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2, "block_size": 4},
        "Qwen3NextForCausalLM": {
            **GROUPED,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 8,
            "shared_expert_intermediate_size": 8,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "layer_types": ["linear_attention", "full_attention"],
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

EXPERTS = {**SLIDING, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}

add(
    "mixture of experts",
    language,
    {**TEXT, "labels": TOKENS},
    {
        "AfmoeForCausalLM": {**ROUTED, "num_dense_layers": 1, "num_shared_experts": 1, "sliding_window": 4},
        "ExaoneMoeForCausalLM": {**ROUTED, "sliding_window": 4, "sliding_window_pattern": 2},
        "Glm4MoeLiteForCausalLM": {**ROUTED, **LATENT},
        "SolarOpenForCausalLM": ROUTED,
        "HYV3ForCausalLM": ROUTED,
        "Mistral4ForCausalLM": {**ROUTED, **LATENT},
        "MiMoV2FlashForCausalLM": {
            **ROUTED,
            **SLIDING,
            "head_dim": 8,
            "v_head_dim": 4,
            "n_group": 1,
            "mlp_layer_types": ["dense", "sparse"],
        },
        "Cohere2MoeForCausalLM": {**SLIDING, **SPECIAL, "num_experts": 4, "num_experts_per_tok": 2},
        "NemotronHForCausalLM": {
            **GROUPED,
            **SPECIAL,
            "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
            "ssm_state_size": 4,
            "mamba_num_heads": 4,
            "mamba_head_dim": 8,
            "n_groups": 2,
            "chunk_size": 4,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 8,
            "moe_shared_expert_intermediate_size": 8,
        },
        "ZayaForCausalLM": {
            **GROUPED,
            **SPECIAL,
            "moe_intermediate_size": 8,
            "num_experts": 4,
            "num_experts_per_tok": 1,
            "router_hidden_size": 8,
            "layer_types": ["hybrid", "hybrid"],
        },
        "LagunaForCausalLM": {**EXPERTS, "shared_expert_intermediate_size": 8},
        "FlintForCausalLM": {**EXPERTS, "shared_expert_intermediate_size": 8, "mlp_only_layers": [0]},
        "MellumForCausalLM": {**EXPERTS, "num_local_experts": 4},
    },
)

INDEXED = {
    **ROUTED,
    **LATENT,
    "mlp_layer_types": ["dense", "sparse"],
    "index_topk": 4,
    "index_head_dim": 8,
    "index_n_heads": 2,
}

add(
    "mixture of experts",
    language,
    {**TEXT, "labels": TOKENS},
    {"DeepseekV32ForCausalLM": INDEXED, "GlmMoeDsaForCausalLM": {**INDEXED, "n_group": 1}},
    refused="topk chooses between equal numbers",
)

add(
    "mixture of experts",
    language,
    {**TEXT, "labels": TOKENS},
    {
        "LongcatFlashForCausalLM": {
            **LATENT,
            "num_layers": 1,
            "ffn_hidden_size": 24,
            "moe_topk": 2,
            "n_routed_experts": 4,
            "zero_expert_num": 2,
            "expert_ffn_hidden_size": 8,
            "head_dim": 4,
        }
    },
    refused="LongcatFlashExperts.forward",
)

GROUPED_EXPERTS = {
    **GROUPED,
    "moe_intermediate_size": 8,
    "n_routed_experts": 4,
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
        "Llama4ForCausalLM": {
            **GROUPED,
            "intermediate_size_mlp": 24,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "attention_chunk_size": 64,
        },
        "Glm4MoeForCausalLM": GROUPED_EXPERTS,
        "Dots1ForCausalLM": GROUPED_EXPERTS,
        "GraniteMoeSharedForCausalLM": {
            **DECODER,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 8,
        },
        "FlexOlmoForCausalLM": {**DECODER, **SPECIAL, "num_experts": 4, "num_experts_per_tok": 2},
        "HunYuanMoEV1ForCausalLM": {**GROUPED, "num_experts": 4, "moe_topk": 2},
        "MiniMaxM2ForCausalLM": {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2, "rotary_dim": 2},
        "DbrxForCausalLM": {
            "vocab_size": VOCABULARY,
            "d_model": 16,
            "n_heads": 2,
            "n_layers": 2,
            "max_seq_len": 64,
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
            "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 16},
        },
    },
)

add(
    "mixture of experts",
    language,
    {**TEXT, "labels": TOKENS},
    {
        "Lfm2MoeForCausalLM": {**ROUTED, "layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    },
)

PADDED = {**GROUPED, **SPECIAL, "num_labels": CLASSES}
"""Decoders that classify look for the last token that is no padding."""

MIXTURE = {**PADDED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}

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

add(
    "decoders that classify",
    sentences,
    {**TEXT, "labels": BATCH},
    {
        "GPT2ForSequenceClassification": {**PADDED_GPT, "num_labels": CLASSES},
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

# What is done in Python for each token, or each item of a batch, needs their number.
for name, axis in {
    "RecurrentGemmaForCausalLM": 1,
    "MiniMaxForCausalLM": 1,
}.items():
    CASES[name] = dataclasses.replace(CASES[name], fixed=(axis,))

# These choose by values what they compute, or have gradients of their own.
for name, why in {
    "Gemma3nForCausalLM": "expected changes of buffers and frozen parameters only",
    # Its router's weights begin at zero.
    "AfmoeForCausalLM": "topk chooses between equal numbers",
}.items():
    CASES[name] = dataclasses.replace(CASES[name], refused=why)
