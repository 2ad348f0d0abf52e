"""Models that peft has put adapters into, of which the adapters alone train.

To add one, add a line to `ADAPTED`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from real_models.step_cases import (
    CASES,
    CLASSES,
    GROUPED,
    TEXT,
    TINY,
    TOKENS,
    VOCABULARY,
    Axes,
    StepCase,
    Tensors,
    language,
    sentences,
    transformer,
)
from torch import nn

GPT2 = {"vocab_size": VOCABULARY, "n_positions": 64, "n_embd": 16, "n_layer": 2, "n_head": 2}
WORDS: tuple[Callable[[int, int], Tensors], Axes] = (language, {**TEXT, "labels": TOKENS})
SENTENCES: tuple[Callable[[int, int], Tensors], Axes] = (sentences, {**TEXT, "labels": {0: "batch"}})


def low_rank(**settings: Any) -> Any:
    """Return settings of peft, with adapters that are no zeros, so that all of them have gradients."""
    import peft

    return peft.LoraConfig(r=2, lora_alpha=4, init_lora_weights=False, **settings)


def adapted(name: str, settings: Mapping[str, Any], adapters: Mapping[str, Any]) -> Callable[..., nn.Module]:
    """Return the function that makes a class of transformers and puts adapters into it."""

    def make(**changed: Any) -> nn.Module:
        import peft

        base: Any = transformer(name, **settings)(**changed)
        checkpointing = adapters.get("checkpointing", False)
        if checkpointing:
            base.gradient_checkpointing_enable()
            base.enable_input_require_grads()
        config = low_rank(**{key: value for key, value in adapters.items() if key != "checkpointing"})
        model: nn.Module = peft.get_peft_model(base, config)
        return model

    return make


ADAPTED: dict[str, tuple[Mapping[str, Any], tuple[Callable[[int, int], Tensors], Axes], Mapping[str, Any]]] = {
    "LlamaForCausalLM, LoRA": (GROUPED, WORDS, {"target_modules": ["q_proj", "v_proj"]}),
    "LlamaForCausalLM, LoRA and gradient checkpointing": (
        GROUPED,
        WORDS,
        {"target_modules": ["q_proj"], "checkpointing": True},
    ),
    "LlamaForCausalLM, DoRA": (GROUPED, WORDS, {"target_modules": ["q_proj", "v_proj"], "use_dora": True}),
    "GPT2LMHeadModel, LoRA with dropout": (
        GPT2,
        WORDS,
        {"target_modules": ["c_attn", "c_proj"], "lora_dropout": 0.1, "fan_in_fan_out": True},
    ),
    "BertForSequenceClassification, LoRA and a new head": (
        {**TINY, "num_labels": CLASSES},
        SENTENCES,
        {"target_modules": "all-linear", "use_rslora": True, "modules_to_save": ["classifier"]},
    ),
}
for _name, (_settings, (_batch, _axes), _adapters) in ADAPTED.items():
    CASES[_name] = StepCase("adapters of peft", adapted(_name, _settings, _adapters), _batch, _axes)
