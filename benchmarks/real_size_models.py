"""The models of real_sizes.py: GPTs of growing size, and real configurations of transformers, with random weights."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn

Made = tuple["nn.Module", Callable[..., "Tensor"], tuple["Tensor", ...], "Tensor"]
"""Module, loss, inputs and targets."""


@dataclasses.dataclass(frozen=True)
class Model:
    """A model that is measured: made when it is needed, as transformers takes seconds to import.

    Attributes:
        make: returns module, loss, inputs and targets.
        batch: what the batch is, in words.
        axis: whether it is a point of the axis of parameters.
        trained: whether it is trained long enough to compare the losses.
    """

    make: Callable[[], Made]
    batch: str
    axis: bool = False
    trained: bool = False


def _gpt(layers: int, width: int, classes: int, batch: int, length: int, z_loss: float = 0.0) -> Made:
    """A decoder with causal attention and an output layer of its own, and maybe a factor of a z-loss."""
    import torch
    import torch.nn.functional as F
    from torch import nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.second_norm = nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

        def forward(self, x: Tensor) -> Tensor:
            heads = width // 64
            q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, heads, 64)).permute(2, 0, 3, 1, 4)
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(mixed.transpose(1, 2).flatten(2))
            return x + self.feed(self.second_norm(x))  # type: ignore[no-any-return]

    class Gpt(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(classes, width)
            self.positions = nn.Parameter(torch.randn(length, width) * 0.02)
            self.blocks = nn.Sequential(*(Block() for _ in range(layers)))
            self.norm = nn.LayerNorm(width)
            self.head = nn.Linear(width, classes, bias=False)

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.norm(self.blocks(self.embed(ids) + self.positions)))  # type: ignore[no-any-return]

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        entropy = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return entropy + z_loss * logits.logsumexp(-1).square().mean() if z_loss else entropy

    ids = torch.randint(0, classes, (batch, length))
    return Gpt(), loss, (ids,), ids.roll(-1, 1)


def _gpt2() -> Made:
    from transformers import GPT2Config, GPT2LMHeadModel

    return _language_model(GPT2LMHeadModel(GPT2Config()))


def _smollm2() -> Made:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "vocab_size": 49152}
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True}
    return _language_model(LlamaForCausalLM(LlamaConfig(**sizes, **heads)))


def _qwen2() -> Made:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    sizes = {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "vocab_size": 151_936}
    heads = {"num_attention_heads": 14, "num_key_value_heads": 2, "tie_word_embeddings": True}
    return _language_model(Qwen2ForCausalLM(Qwen2Config(**sizes, **heads)))


def _language_model(module: Any) -> Made:
    """256 tokens; each position predicts the next."""
    import torch
    import torch.nn.functional as F

    def loss(output: Any, labels: Tensor) -> Tensor:
        return F.cross_entropy(output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    module.config.use_cache = False
    ids = torch.randint(0, module.config.vocab_size, (1, 256))
    return module, loss, (ids,), ids.clone()


def _bert() -> Made:
    import torch
    from transformers import BertConfig, BertForSequenceClassification

    module = BertForSequenceClassification(BertConfig())
    return module, _of_classes, (torch.randint(0, 30_000, (8, 128)),), torch.randint(0, 2, (8,))


def _resnet50() -> Made:
    import torch
    from transformers import ResNetConfig, ResNetForImageClassification

    module = ResNetForImageClassification(ResNetConfig(num_labels=1000))
    return module, _of_classes, (torch.randn(8, 3, 224, 224),), torch.randint(0, 1000, (8,))


def _vit() -> Made:
    import torch
    from transformers import ViTConfig, ViTForImageClassification

    module = ViTForImageClassification(ViTConfig(num_labels=1000))
    return module, _of_classes, (torch.randn(8, 3, 224, 224),), torch.randint(0, 1000, (8,))


def _whisper() -> Made:
    import torch
    import torch.nn.functional as F
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    sizes = {"d_model": 384, "encoder_layers": 4, "decoder_layers": 4, "vocab_size": 51_865}
    heads = {"encoder_attention_heads": 6, "decoder_attention_heads": 6}
    inner = {"encoder_ffn_dim": 1536, "decoder_ffn_dim": 1536, "use_cache": False}
    whisper = WhisperForConditionalGeneration(WhisperConfig(**sizes, **heads, **inner))

    class Whisper(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = whisper

        def forward(self, features: Tensor, ids: Tensor) -> Tensor:
            return self.model(features, decoder_input_ids=ids).logits  # type: ignore[no-any-return]

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    ids = torch.randint(0, 50_000, (2, 65))
    return Whisper(), loss, (torch.randn(2, 80, 3000), ids[:, :-1].clone()), ids[:, 1:].clone()


def _critic() -> Made:
    """DCGAN's critic with the penalty of WGAN-GP: the lengths of its gradients between real and generated images."""
    import torch
    from torch import nn

    def block(inputs: int, outputs: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, outputs, 4, 2, 1), nn.InstanceNorm2d(outputs, affine=True), nn.LeakyReLU(0.2)]

    class Critic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            blocks = block(128, 256) + block(256, 512) + block(512, 1024)
            self.score = nn.Sequential(
                nn.Conv2d(3, 128, 4, 2, 1), nn.LeakyReLU(0.2), *blocks, nn.Conv2d(1024, 1, 4), nn.Flatten(0)
            )

        def forward(self, real: Tensor, generated: Tensor, shares: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            between = (shares * real + (1 - shares) * generated).requires_grad_()
            (gradient,) = torch.autograd.grad(self.score(between).sum(), between, create_graph=True)
            return self.score(real), self.score(generated), gradient.flatten(1).norm(dim=1)

    def loss(output: tuple[Tensor, Tensor, Tensor], wanted: Tensor) -> Tensor:
        real, generated, lengths = output
        return generated.mean() - real.mean() + 10 * (lengths - wanted).square().mean()

    images, shares = torch.randn(2, 16, 3, 64, 64).unbind(), torch.rand(16, 1, 1, 1)
    return Critic(), loss, (*images, shares), torch.ones(16)


def _of_classes(output: Any, labels: Tensor) -> Tensor:
    import torch.nn.functional as F

    return F.cross_entropy(output.logits, labels)


MODELS = {
    "GPT-2 (GPT2LMHeadModel)": Model(_gpt2, "1 x 256", trained=True),
    "SmolLM2-135M (LlamaForCausalLM)": Model(_smollm2, "1 x 256", trained=True),
    "Qwen2.5-0.5B (Qwen2ForCausalLM)": Model(_qwen2, "1 x 256", trained=True),
    "BERT-base (BertForSequenceClassification)": Model(_bert, "8 x 128", trained=True),
    "Whisper-tiny (WhisperForConditionalGeneration)": Model(_whisper, "2 x 30 s, 64 tokens", trained=True),
    "ViT-B/16 (ViTForImageClassification)": Model(_vit, "8 x 224 x 224", trained=True),
    "ResNet-50 (ResNetForImageClassification)": Model(_resnet50, "8 x 224 x 224", trained=True),
    "WGAN-GP critic (DCGAN's)": Model(_critic, "16 x 64 x 64", trained=True),
    **{
        f"GPT, 4 layers of 256, {length:,} tokens": Model(
            functools.partial(_gpt, 4, 256, 8192, 1, length), f"1 x {length:,}"
        )
        for length in (1024, 2048, 4096, 8192)
    },
    "GPT, 4 layers of 256, 128,256 classes": Model(functools.partial(_gpt, 4, 256, 128_256, 4, 256), "4 x 256"),
    "GPT, 4 layers of 256, 128,256 classes, z-loss": Model(
        functools.partial(_gpt, 4, 256, 128_256, 4, 256, z_loss=1e-4), "4 x 256", trained=True
    ),
    **{
        f"GPT, {layers} layers of {width}": Model(
            functools.partial(_gpt, layers, width, 8192, 1, 128), "1 x 128", axis=True
        )
        for layers, width in ((2, 64), (3, 192), (6, 320), (10, 448), (12, 768), (16, 1216), (20, 1408))
    },
}
