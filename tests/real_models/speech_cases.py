"""Models of speech, those with CTC among them."""

from __future__ import annotations

import dataclasses

import torch
from real_models.step_cases import (
    BATCH,
    CASES,
    CLASSES,
    GROUPED,
    IMAGE_TOKEN,
    SPECIAL,
    TINY,
    TOKENS,
    TRANSLATOR,
    VOCABULARY,
    Tensors,
    add,
    classes,
    ids,
    speech,
    squared,
)

WAVES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "conv_dim": (8, 8, 8),
    "conv_stride": (5, 4, 2),
    "conv_kernel": (10, 4, 2),
    "num_feat_extract_layers": 3,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
}

add(
    "speech",
    lambda items, length: {"input_values": torch.randn(items, 100 * length), "labels": classes(items)},
    {"input_values": TOKENS, "labels": BATCH},
    {"Wav2Vec2ForSequenceClassification": {**WAVES, "classifier_proj_size": 8, "num_labels": CLASSES}},
)

add(
    "speech",
    lambda items, length: {"input_values": torch.randn(items, 40, 16), "labels": classes(items)},
    {"input_values": BATCH, "labels": BATCH},
    {
        "ASTForAudioClassification": {
            **TINY,
            "max_length": 40,
            "num_mel_bins": 16,
            "patch_size": 8,
            "frequency_stride": 8,
            "time_stride": 8,
            "num_labels": CLASSES,
        }
    },
)

add(
    "speech",
    lambda items, length: {"input_features": torch.randn(items, 4 * length, 8), "labels": ids(items, length)},
    {"input_features": {0: "batch", 1: "frames"}, "labels": TOKENS},
    {
        "Speech2TextForConditionalGeneration": {
            **TRANSLATOR,
            "input_feat_per_channel": 8,
            "conv_channels": 16,
            "max_source_positions": 64,
            "max_target_positions": 64,
        }
    },
)

SPOKEN = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "encoder_layers": 1,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_layers": 1,
    "decoder_attention_heads": 2,
    "decoder_ffn_dim": 24,
    "conv_dim": (8, 8, 8),
    "conv_stride": (5, 4, 2),
    "conv_kernel": (10, 4, 2),
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
    "num_mel_bins": 8,
    "speech_decoder_prenet_units": 16,
    "speech_decoder_postnet_units": 16,
    "speaker_embedding_dim": 8,
    "decoder_start_token_id": 1,
    **SPECIAL,
}

add(
    "speech",
    lambda items, length: {"input_values": torch.randn(items, 100 * length), "labels": ids(items, length)},
    {"input_values": {0: "batch", 1: "samples"}, "labels": TOKENS},
    {"SpeechT5ForSpeechToText": SPOKEN},
)

add(
    "speech",
    lambda items, length: {
        "input_ids": ids(items, length),
        "labels": torch.randn(items, 2 * length, 8),
        "speaker_embeddings": torch.randn(items, 8),
    },
    {"input_ids": TOKENS, "labels": {0: "batch", 1: "frames"}, "speaker_embeddings": BATCH},
    {"SpeechT5ForTextToSpeech": {**SPOKEN, "use_guided_attention_loss": False}},
)

add(
    "speech",
    lambda items, length: {"input_values": torch.randn(items, 400 * length), "labels": ids(items, length)},
    {"input_values": {0: "batch", 1: "samples"}, "labels": TOKENS},
    {
        "MoonshineForConditionalGeneration": {
            "vocab_size": VOCABULARY,
            "hidden_size": 16,
            "intermediate_size": 24,
            "encoder_num_hidden_layers": 1,
            "decoder_num_hidden_layers": 1,
            "encoder_num_attention_heads": 2,
            "decoder_num_attention_heads": 2,
            "max_position_embeddings": 64,
            "decoder_start_token_id": 1,
            **SPECIAL,
        }
    },
)

squared(
    "speech",
    "pooler_output",
    lambda items, length: {"input_features": torch.randn(items, 1, 32, 16)},
    {"input_features": BATCH},
    {
        "ClapAudioModel": {
            "spec_size": 64,
            "num_mel_bins": 16,
            "patch_embeds_hidden_size": 8,
            "hidden_size": 16,
            "depths": [1, 1],
            "num_attention_heads": [2, 2],
            "window_size": 4,
        }
    },
)

# Speech and sound.

squared(
    "speech",
    "audio_values",
    lambda items, length: {"input_values": torch.randn(items, 1, 320)},
    {"input_values": BATCH},
    {
        "EncodecModel": {
            "hidden_size": 16,
            "num_filters": 4,
            "upsampling_ratios": [4, 2],
            "codebook_size": 16,
            "codebook_dim": 16,
            "num_lstm_layers": 1,
            "target_bandwidths": [24.0],
        },
        "MimiModel": {
            **TINY,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "hidden_size": 16,
            "num_filters": 4,
            "upsampling_ratios": [4, 2],
            "codebook_size": 16,
            "codebook_dim": 16,
            "vector_quantization_hidden_dimension": 16,
            "num_quantizers": 2,
            "num_semantic_quantizers": 1,
            "upsample_groups": 16,
        },
        "DacModel": {
            "encoder_hidden_size": 8,
            "downsampling_ratios": [2, 4],
            "decoder_hidden_size": 16,
            "upsampling_ratios": [4, 2],
            "n_codebooks": 2,
            "codebook_size": 16,
            "codebook_dim": 4,
        },
    },
)

AUDIO_AND_TEXT = {
    "audio_config": {
        "num_mel_bins": 8,
        "d_model": 16,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "encoder_layers": 2,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 24,
        "max_source_positions": 20,
    },
    "text_config": {**GROUPED, "model_type": "llama"},
}

add(
    "speech",
    lambda items, length: {
        "input_ids": (
            tokens := torch.cat([torch.full((items, 10), IMAGE_TOKEN), torch.randint(3, 38, (items, length))], 1)
        ),
        "attention_mask": torch.ones_like(tokens),
        "input_features": torch.randn(items, 8, 40),
        "feature_attention_mask": torch.ones(items, 40, dtype=torch.long),
        "labels": tokens,
    },
    {
        "input_ids": TOKENS,
        "attention_mask": TOKENS,
        "input_features": BATCH,
        "feature_attention_mask": BATCH,
        "labels": TOKENS,
    },
    {
        "Qwen2AudioForConditionalGeneration": {
            **AUDIO_AND_TEXT,
            "text_config": {**GROUPED, "model_type": "qwen2"},
            "audio_token_index": IMAGE_TOKEN,
        }
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


CLASSIFIED = {**WAVES, "num_labels": CLASSES, "classifier_proj_size": 8, "tdnn_dim": [8] * 5, "xvector_output_dim": 8}

add(
    "speech",
    sounds,
    {"input_values": TOKENS, "attention_mask": TOKENS, "labels": BATCH},
    {
        "HubertForSequenceClassification": CLASSIFIED,
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

add(
    "speech with CTC",
    speech,
    {"input_values": TOKENS, "labels": BATCH},
    {"Wav2Vec2ForCTC": WAVES, "WavLMForCTC": WAVES, "HubertForCTC": WAVES},
)

add(
    "speech with CTC",
    speech,
    {"input_values": TOKENS, "labels": BATCH},
    {
        "UniSpeechForCTC": WAVES,
        "UniSpeechSatForCTC": WAVES,
        "Data2VecAudioForCTC": WAVES,
        "SEWForCTC": {**WAVES, "squeeze_factor": 2},
        "Wav2Vec2ConformerForCTC": {**WAVES, "conv_depthwise_kernel_size": 3},
    },
)

add(
    "speech with CTC",
    lambda items, length: {
        "input_features": torch.randn(items, 4 * length, 8),
        "attention_mask": torch.ones(items, 4 * length, dtype=torch.long),
        "labels": ids(items, 3),
    },
    {"input_features": {0: "batch", 1: "frames"}, "attention_mask": {0: "batch", 1: "frames"}, "labels": BATCH},
    {
        "Wav2Vec2BertForCTC": {
            "vocab_size": VOCABULARY,
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 24,
            "feature_projection_input_dim": 8,
            "conv_depthwise_kernel_size": 3,
        }
    },
)

add(
    "speech with CTC",
    lambda items, length: {
        "input_features": torch.randn(items, 8 * length, 16),
        "attention_mask": torch.ones(items, 8 * length, dtype=torch.long),
        "labels": ids(items, 3),
    },
    {"input_features": {0: "batch", 1: "frames"}, "attention_mask": {0: "batch", 1: "frames"}, "labels": BATCH},
    {
        "ParakeetForCTC": {
            "vocab_size": VOCABULARY,
            "pad_token_id": 0,
            "encoder_config": {
                "hidden_size": 16,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "intermediate_size": 24,
                "num_mel_bins": 16,
                "subsampling_conv_channels": 8,
                "conv_kernel_size": 3,
            },
        }
    },
)

add(
    "speech with CTC",
    speech,
    {"input_values": TOKENS, "labels": BATCH},
    {"SEWDForCTC": {**WAVES, "squeeze_factor": 2, "position_buckets": 8}},
)

add(
    "speech with CTC",
    speech,
    {"input_values": TOKENS, "labels": BATCH},
    {"Wav2Vec2ForXVector": {**WAVES, "tdnn_dim": [8, 8, 8, 8, 8], "xvector_output_dim": 8, "num_labels": CLASSES}},
)

CASES["Wav2Vec2ForXVector"] = dataclasses.replace(
    CASES["Wav2Vec2ForXVector"],
    family="speech",
    batch=lambda items, length: {"input_values": torch.randn(items, 200 * length), "labels": classes(items)},
)
