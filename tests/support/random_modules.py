"""Writes PyTorch modules as people do: layers, views, in-place writes, buffers, sizes that Python reads, branches.

:func:`drawn` writes a module, its loss, an optimizer and which axes are dynamic from a seed, as Python's source. A
module is a chain of pieces, each of which takes and gives a tensor `h` of shape (batch, length, WIDTH). Pieces can be
left out, to reduce failures (fuzzing_modules.py).
"""

from __future__ import annotations

import itertools
import linecache
import random
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

WIDTH = 4
BATCH, LENGTH = 3, 6
WORDS = 7
"""Integer inputs are below this."""

_SIZE = "<<h.shape[1]|h.shape[1]|h.size(1)|len(h[0])|h.shape[0]|x.shape[1]>>"
"""What `$S` stands for: sizes as Python reads them."""

_ACTIVATION = (
    "<<torch.tanh(h)|torch.sigmoid(h)|F.relu(h)|F.gelu(h)|F.gelu(h, approximate='tanh')|F.silu(h)|F.softplus(h)"
    "|F.softplus(h, beta=2, threshold=1)|F.leaky_relu(h, 0.3)|F.elu(h, 0.7)|F.hardswish(h)|F.mish(h)|F.logsigmoid(h)"
    "|F.selu(h)|F.celu(h, 0.8)|F.softsign(h)|F.hardtanh(h, -0.8, 0.9)|F.relu6(h)|F.tanhshrink(h)|F.softshrink(h, 0.2)"
    "|F.hardshrink(h, 0.3)|F.threshold(h, 0.1, 0.25)|h.abs()|torch.sin(h)|(-h * h).exp()|(h * h + 1).sqrt()"
    "|(h * h + 0.5).rsqrt()|torch.log1p(h * h)|torch.atan(h)|torch.erf(h)|torch.expm1(h * 0.5)|h.square() - h|h ** 3"
    "|1 / (h * h + 1)|h.sinh()|torch.asinh(h)|(h * h + 1) ** 0.3|torch.cos(h) * h|h.clamp(-0.5, 1)|h.clamp(min=-0.25)"
    "|F.glu(torch.cat([h, h * h], -1))|h.sign() * h.square()|torch.logaddexp(h, h * 0 + 0.5)"
    "|torch.hypot(h, h.new_ones(()))|torch.atan2(h, h * h + 1)|torch.lerp(h, h * h, 0.3)"
    "|torch.addcmul(h, h, h, value=0.2)|h.exp().log1p()|h.nan_to_num()|torch.special.expit(h)|h.fmod(0.75)"
    "|h.remainder(0.75)|h - h.round().detach()|h.frac()|torch.xlogy(h * h, h * h + 1)>>"
)
"""What `$A` stands for."""

PIECES: dict[str, tuple[str, str]] = {
    # Layers
    "linear": ("self.l$k = nn.Linear($D, $D<<|, bias=False>>)", "h = self.l$k(h)"),
    "activation": ("", "h = $A"),
    "second activation": ("", "h = $A"),
    "PReLU": ("self.l$k = nn.PReLU(<<1|$D>>)", "h = self.l$k(h.transpose(1, 2)).transpose(1, 2)"),
    "layer norm": (
        "self.l$k = nn.<<LayerNorm($D)|LayerNorm($D, elementwise_affine=False)|RMSNorm($D)|LayerNorm($D, eps=0.1)>>",
        "h = self.l$k(h)",
    ),
    "batch norm": (
        "self.l$k = nn.BatchNorm1d($D<<|, momentum=0.3|, affine=False|, track_running_stats=False|, eps=0.1>>)",
        "h = self.l$k(h.transpose(1, 2)).transpose(1, 2)",
    ),
    "batch norm in eval mode": (
        "self.l$k = nn.BatchNorm1d($D).eval()",
        "h = self.l$k.eval()(h.transpose(1, 2)).transpose(1, 2)",
    ),
    "batch norm twice": (
        "self.l$k = nn.BatchNorm1d($D)",
        "h = self.l$k(h.transpose(1, 2)).transpose(1, 2) + self.l$k((h * 0.5 + 1).transpose(1, 2)).transpose(1, 2)",
    ),
    "batch norm function": (
        "self.register_buffer('m$k', torch.zeros($D))\nself.register_buffer('v$k', torch.ones($D))",
        "h = F.batch_norm(h.reshape(-1, $D), self.m$k, self.v$k, training=True, momentum=0.2).reshape(h.shape)",
    ),
    "group norm": ("self.l$k = nn.GroupNorm(<<1|2|4>>, $D)", "h = self.l$k(h.transpose(1, 2)).transpose(1, 2)"),
    "instance norm": (
        "self.l$k = nn.InstanceNorm1d($D<<|, affine=True|, track_running_stats=True>>)",
        "h = self.l$k(h.transpose(1, 2)).transpose(1, 2)",
    ),
    "normalize": ("", "h = F.normalize(h, p=<<1|2|3>>, dim=<<-1|1>>, eps=1e-3)"),
    "softmax": ("", "h = h * F.<<softmax|log_softmax|softmin>>(h, <<1|2|-1|0>>)"),
    "convolution": (
        "self.l$k = nn.Conv1d($D, $D, 3, <<padding=1|padding=2, dilation=2|padding=1, groups=2|padding=1, groups=$D"
        "|padding='same', bias=False|padding=1, padding_mode='circular'|padding=1, padding_mode='replicate'>>)",
        "h = self.l$k(h.transpose(1, 2)).transpose(1, 2)",
    ),
    "convolution of pictures": (
        "self.l$k = nn.Conv2d(1, <<1|2>>, (3, 1), padding=(1, 0))",
        "h = self.l$k(h[:, None]).mean(1)",
    ),
    "strided convolution": (
        "self.l$k = nn.Conv1d($D, $D, 3, stride=2, padding=1)\nself.u$k = nn.ConvTranspose1d($D, $D, 2, stride=2)",
        "h = h + self.u$k(self.l$k(h.transpose(1, 2))).transpose(1, 2)[:, :h.shape[1]]",
    ),
    "recurrence": (
        "self.l$k = nn.<<LSTM|GRU|RNN>>($D, $D, batch_first=True<<||, num_layers=2|, bias=False>>)",
        "h = self.l$k(h)[0]",
    ),
    "both ways": ("self.l$k = nn.<<LSTM|GRU>>($D, 2, batch_first=True, bidirectional=True)", "h = self.l$k(h)[0]"),
    "last state": ("self.l$k = nn.GRU($D, $D, batch_first=True)", "h = h + self.l$k(h)[1].transpose(0, 1)"),
    "cell": (
        "self.l$k = nn.<<GRUCell|RNNCell>>($D, $D)",
        "s = h[:, 0]\nfor _ in range(2):\n    s = self.l$k(h[:, -1], s)\nh = h + s[:, None]",
    ),
    "attention layer": (
        "self.l$k = nn.MultiheadAttention($D, 2, batch_first=True)",
        "h = h + self.l$k(h, h, h<<|, need_weights=False>>)[0]",
    ),
    "encoder layer": (
        "self.l$k = nn.TransformerEncoderLayer($D, 2, 6, dropout=0.0, batch_first=True<<|, norm_first=True>>)",
        "h = self.l$k(h)",
    ),
    "bilinear": ("self.l$k = nn.Bilinear($D, $D, $D)", "h = self.l$k(h, h.flip(1))"),
    "attention": (
        "self.l$k = nn.Linear($D, 3 * $D)",
        "q, p, v = self.l$k(h).<<chunk(3, -1)|split($D, -1)|unflatten(-1, (3, $D)).unbind(2)>>\n"
        "h = F.scaled_dot_product_attention(q, p, v<<|, is_causal=True|, scale=0.3|, scale=2 / h.shape[1]>>)",
    ),
    "masked attention": (
        "",
        "s = h @ h.transpose(1, 2) / <<h.shape[-1] ** 0.5|math.sqrt(h.shape[1])|2>>\nb = "
        "<<torch.ones(h.shape[1], h.shape[1]).tril()|torch.ones(h.shape[1], h.shape[1]).tril(1)"
        "|(torch.arange(h.shape[1])[:, None] >= torch.arange(h.shape[1]))>>\nh = h + s.masked_fill(b == 0, <<-1e9"
        "|float('-inf')|torch.finfo(s.dtype).min>>).softmax(-1) @ h",
    ),
    "attention with padding": (
        "",
        "h = h + F.scaled_dot_product_attention(h, h, h, attn_mask=m[:, None] | m[:, :1, None])",
    ),
    "weight norm": (
        "self.l$k = nn.utils.parametrizations.<<weight_norm|weight_norm|orthogonal>>(nn.Linear($D, $D))",
        "h = self.l$k(h)",
    ),
    "spectral norm": ("self.l$k = nn.utils.parametrizations.spectral_norm(nn.Linear($D, $D))", "h = self.l$k(h)"),
    "dropout that drops nothing": (
        "self.l$k = nn.Dropout(<<0.0|0.4>>)",
        "h = F.dropout(h, 0.5, training=<<False|not self.training>>)",
    ),
    "drawn mask": (
        "self.register_buffer('drawn$k', torch.ones($D))\nself.replays = False",
        "d = self.drawn$k.clone() if self.replays else F.dropout(torch.ones($D), 0.5)\nself.drawn$k.copy_(d)\n"
        "h = h * d",
    ),
    "checkpoint": (
        "self.l$k = nn.Linear($D, $D)",
        "h = torch.utils.checkpoint.checkpoint(lambda t: torch.tanh(self.l$k(t)), h, use_reentrant=False)",
    ),
    # Pooling and resizing
    "pool": (
        "",
        "h = F.<<max_pool1d(h.transpose(1, 2), 3, 1, 1)|avg_pool1d(h.transpose(1, 2), 3, 1, 1)"
        "|avg_pool1d(h.transpose(1, 2), 3, 1, 1, count_include_pad=False)|max_pool1d(h.transpose(1, 2), 5, 1, 2)"
        "|lp_pool1d(h.transpose(1, 2).square() + 0.1, 2, 1)>>.transpose(1, 2)",
    ),
    "pool by a size": (
        "",
        "p = F.<<max_pool1d|avg_pool1d>>(h.transpose(1, 2), <<h.shape[1] // 2|h.shape[1] // 3, 1|h.shape[1]"
        "|2, h.shape[1] // 3>>)\nh = h + p.mean(-1)[:, None]",
    ),
    "adaptive pool": (
        "self.l$k = nn.Adaptive<<Avg|Max>>Pool1d(<<1|2|3>>)",
        "h = h + self.l$k(h.transpose(1, 2)).mean(-1)[:, None]",
    ),
    "interpolate": (
        "",
        "u = F.interpolate(h.transpose(1, 2), <<scale_factor=2|size=2 * h.shape[1]|size=8|scale_factor=1.5>><<"
        "|, mode='linear'|, mode='linear', align_corners=True>>)\nh = h + u.mean(-1)[:, None]",
    ),
    "windows": (
        "",
        "h = h + <<h.unfold(1, h.shape[1] // 3, 1)|h.unfold(1, 3, 1)|h.unfold(1, 2, 2)|h.unfold(1, h.shape[1] - 2, 1)"
        "|h.unfold(1, 2, h.shape[1] // 3)>>.<<mean(-1)|amax(-1)|square().sum(-1)>>.mean(1, keepdim=True)",
    ),
    "columns": ("", "u = F.unfold(h[:, None], (<<2|h.shape[1] // 2>>, 2))\nh = h * u.mean((1, 2))[:, None, None]"),
    "pad": (
        "",
        "p = F.pad(h, (0, 0, <<1, 1|2, 0|0, h.shape[1] // 2|h.shape[1] % 4, 0>>)<<|, mode='replicate'|, mode='reflect'"
        "|, value=0.5>>)\nh = h + p.<<mean(1, keepdim=True)|cumsum(1)[:, :h.shape[1]]>>",
    ),
    # Sizes that Python reads
    "scale by a size": ("", "h = h * <<$S ** -0.5|(2 / $S)|($S // 2)|math.sqrt($S)|math.log($S + 1)>>"),
    "argument by a size": (
        "",
        "h = <<F.layer_norm(h, ($D,), eps=$S / 60)|h.clamp(-2 / $S, $S / 8)|F.leaky_relu(h, 1 / $S)"
        "|F.huber_loss(h, h.detach() * 0, reduction='none', delta=$S / 12)|F.elu(h, $S / 5)|F.softplus(h, beta=$S / 4)"
        "|h / (h.std((1, 2), keepdim=True, correction=$S // 3) + 1)|torch.add(h, h * h, alpha=1 / $S)"
        "|F.threshold(h, 1 / $S, 0.25)|h ** ($S // 2)|F.hardtanh(h, -1 / $S, 1)|h.addcmul(h, h, value=1 / $S)"
        "|torch.lerp(h, h * h, 1 / $S)|F.normalize(h, dim=-1, eps=$S / 10)|h.masked_fill(h > 0.5, 1 / $S)"
        "|torch.where(h > 0.1, h, 1 / $S)|h.roll($S // 2, 1)|h.round(decimals=$S // 4) - h>>",
    ),
    "positions": (
        "self.p$k = nn.Parameter(torch.zeros(16, $D))",
        "h = h + self.p$k[<<:h.shape[1]|torch.arange(h.shape[1])|1 : h.shape[1] + 1>>]",
    ),
    "numbers by a size": (
        "",
        "h = h * torch.<<linspace(0, 1, h.shape[1])|arange(h.shape[1])|ones(h.shape[1])|full((h.shape[1],), 0.7)"
        "|arange(0, 2 * h.shape[1], 2)|arange(h.shape[1], 0, -1)|eye(h.shape[1])[0]>>[:, None]",
    ),
    "matrix by a size": (
        "",
        "h = <<torch.eye(h.shape[1])|torch.ones(h.shape[1], h.shape[1]).triu(<<|-1|h.shape[1] // 2>>)>> @ h * 0.5",
    ),
    "branch on a size": (
        "",
        "if h.shape[1] <<> 4|% 2 == 0|== 6|>= 12>>:\n    h = h * 0.5\nelse:\n    h = torch.tanh(h)",
    ),
    "loop over a size": (
        "",
        "t = 0\nfor c in range(h.shape[2]):\n    t = t + h[:, :, c] * (c + 1)\nh = h + t[..., None] * 0.1",
    ),
    "loop over the length": ("", "t = 0\nfor c in range(h.shape[1]):\n    t = t * 0.5 + h[:, c]\nh = h + t[:, None]"),
    "half of it": (
        "",
        "n = h.shape[1] // 2\nh = torch.cat([h[:, :n], <<h[:, n:] * 2|h[:, n:].flip(1)"
        "|torch.zeros_like(h[:, n:])>>], 1)",
    ),
    "smaller of sizes": ("", "n = min(h.shape[1], <<5|9>>)\nh = h + h[:, :n].mean(1, keepdim=True)"),
    "chunks": (
        "",
        "a, b = <<h.chunk(2, 1)|h.tensor_split(2, 1)|h.split([2, h.shape[1] - 2], 1)>>\n"
        "h = h + (a.mean(1) * b.mean(1))[:, None]",
    ),
    "reshape": (
        "",
        "s = h.shape\nh = <<torch.tanh(h.reshape(-1, $D)).reshape(s)|h.flatten(1).mul(0.5).view(s)"
        "|h.view(s[0], -1, 2, 2).transpose(2, 3).reshape(s)|h.reshape(s[0] * s[1], $D).softmax(0).view(s[0], s[1], $D)"
        "|h.reshape(s[0], -1).cumsum(1).unflatten(1, (s[1], $D)) / 9"
        "|h.transpose(0, 1).reshape(s[1], -1).view(s[1], s[0], $D).transpose(0, 1)>>",
    ),
    "product of sizes": (
        "",
        "h = h / <<(h.numel() / h.shape[0])|(h.numel() ** 0.5)|math.prod(h.shape[1:])|(h.shape[0] * h.shape[1])>> * 3",
    ),
    "size as a tensor": (
        "",
        "n = <<torch.tensor(h.shape[1])|torch.tensor([h.shape[1]], dtype=h.dtype)|torch.full((), h.shape[1])>>\n"
        "h = h / (n + 1) * 4",
    ),
    "size kept in the module": ("self.n$k = 0", "self.n$k = h.shape[1]\nh = h * (2 / self.n$k)"),
    # Views
    "view": (
        "",
        "h = <<h.permute(2, 0, 1).permute(1, 2, 0)|h.transpose(0, 1).contiguous().transpose(0, 1) * 2"
        "|h.movedim(1, 0).movedim(0, 1)|h + h[:, -1:]|h + h[:, :1].expand_as(h)"
        "|h + h[..., None, :].expand(-1, -1, 3, -1).mean(2)|h.flip(1)|h.flip(-1) + h|h.roll(1, 1)"
        "|h.roll((1, 2), (0, 2))|h.unsqueeze(1).squeeze(1)"
        "|h.swapaxes(0, 2).mT.swapaxes(0, 1).transpose(0, 1).transpose(0, 2).mT.mT.reshape(h.shape)"
        "|h.narrow(2, 1, 2).repeat(1, 1, 2)|h[..., [2, 0, 1, 3]]|h[..., torch.tensor([3, 3, 0, 1])]"
        "|h[:, torch.arange(h.shape[1] - 1, -1, -1)]|torch.stack([h[..., ::2], h[..., 1::2]], -1).flatten(2)"
        "|h.unbind(2)[1][..., None] + h|h.tile(1, 1, 2)[..., 1:5]|h.rot90(2, (1, 2))"
        "|h.repeat_interleave(2, 2)[..., ::2]|h.repeat_interleave(2, 1)[:, ::2]"
        "|h.index_select(2, torch.tensor([1, 0, 3, 2]))|h[:, ::2].mean(1, True) + h|h.select(2, 0)[..., None] * h"
        "|torch.cat([h[:, 1:], h[:, :1]], 1)"
        "|h.view(h.shape[0], h.shape[1], 2, 2).diagonal(dim1=2, dim2=3).repeat(1, 1, 2)|h.expand(2, -1, -1, -1).sum(0)"
        "|torch.broadcast_to(h[:, :1], h.shape) * h|h.reshape(h.shape[0], 1, -1)[:, 0].view_as(h)|h.mT.mT"
        "|h.as_strided(h.shape, h.stride()) * 2|h.hsplit(2)[0].mean(1, True) + h"
        "|h.view(h.shape[0], -1)[:, ::3].mean(1)[:, None, None] + h>>",
    ),
    "diagonal": (
        "",
        "g = h @ h.mT\nh = h + <<g.diagonal(dim1=1, dim2=2)[..., None]|torch.diag_embed(h[:, 0]).sum(1, True)"
        "|g.diagonal(1, 1, 2).mean(1)[:, None, None]|torch.diagonal(g, 0, 1, 2).sum(-1)[:, None, None] / 9>>",
    ),
    "triangle": ("", "g = (h @ h.mT).<<tril()|triu(1)|tril(-1)|triu(h.shape[1] // 2)>>\nh = h + g @ h * 0.1"),
    "strides": (
        "",
        "s = h.contiguous().as_strided((h.shape[0], h.shape[1], 2), (h.shape[1] * $D, $D, 2), 1)\n"
        "h = h + s.sum(-1, keepdim=True)",
    ),
    # Writes in place
    "write": (
        "",
        "h = h.clone()\n<<h[:, 0] = 0|h[:, ::2] += 1|h[..., 0] = h[..., 1] * 2|h[:, 1:] *= 0.5|h.mul_(2)"
        "|h.add_(h.detach())|h.clamp_(-1, 1)|h[:, -1].zero_()|h[..., 2:].copy_(h[..., :2].detach())"
        "|h.transpose(1, 2)[..., 0].fill_(0.3)|h[0] = h[1]|h[:, 0, 0] = h.mean()|h[h > 0.5] = 0.1"
        "|h.masked_fill_(h < -0.2, 0.1)|h.relu_()|h.tanh_()|F.relu(h, inplace=True)|h.view(-1)[::2].mul_(3)"
        "|h[:, :, 1].sigmoid_()|h.index_add_(2, torch.tensor([0, 0]), h[..., 2:] * 0.5)"
        "|h.index_fill_(2, torch.tensor([1]), 0.2)|h.sub_(h.mean(1, keepdim=True))"
        "|h.index_copy_(2, torch.tensor([2]), h[..., :1] * 2)"
        "|h.scatter_(2, torch.zeros_like(h[..., :1], dtype=torch.long), 0.4)|h.div_(2).exp_()|h[:, 0].add_(h[:, 1])"
        "|h[..., None][..., 0] += 2|h.squeeze()[..., 0].zero_()|h[:, h.shape[1] // 2 :] = 0"
        "|h.unsqueeze_(0).squeeze_(0)|h.transpose_(1, 2).mul_(0.5).transpose_(1, 2)|h.diagonal(0, 1, 2).zero_()"
        "|h.narrow(1, 0, 2).add_(1)|h[..., -1:] -= h[..., :1]|h.cumsum_(1)|h.copy_(h.flip(1))|h.lerp_(h * h, 0.5)"
        "|h.addcmul_(h, h, value=0.1)|h.pow_(2)|h.unbind(2)[1].add_(0.5)|h.chunk(2, -1)[1].neg_()"
        "|h[:, 1, 1:3] = 0.7>>",
    ),
    "write to a view": (
        "",
        "h = h.clone()\nv = h<<[:, 1:]|.transpose(0, 1)|.view(-1, $D)|[..., 0]|[0]|.unflatten(2, (2, 2))[:, :, 1]"
        "|.permute(2, 0, 1)[1:]>>\n<<v.mul_(0.5)|v.add_(1)|v[0] = 0.2|v += v.detach() * 0.1|v.tanh_()"
        "|v[-1:].zero_()>>\n<<h = h * 1|h = h + v.sum() * 0.01|v = v + 1>>",
    ),
    "write between uses": (
        "",
        "a = h * 2\nb = a.sigmoid()\na<<.add_(1)|[:, 0] = 0|.zero_()|[..., 1:].mul_(2)>>\nh = h + a * b.detach()",
    ),
    "filled buffer": (
        "",
        "o = <<torch.zeros_like(h)|torch.empty_like(h).fill_(0.1)|h.new_zeros(h.shape)"
        "|torch.zeros(h.shape[0], h.shape[1], $D)>>\no[:, <<1:|::2|: h.shape[1] - 1>>] = h[:, <<1:|::2"
        "|: h.shape[1] - 1>>] * 2\nh = h + o",
    ),
    "filled by a loop": (
        "",
        "o = torch.zeros_like(h)\nfor c in range($D):\n    o[..., c] = h[..., c] * (c + 1) + o[..., c - 1]\n"
        "h = o * 0.3",
    ),
    # Buffers
    "counter": (
        "self.register_buffer('n$k', torch.zeros(<<(), dtype=torch.long|()|1, dtype=torch.long>>))",
        "<<self.n$k.add_(1)|self.n$k += 1|self.n$k = self.n$k + 1|self.n$k.copy_(self.n$k + 1)>>\nh = h * "
        "<<(1 + self.n$k % 2)|torch.clamp(self.n$k / 2, max=1.0)|(0.5 ** self.n$k)|(self.n$k > 1)>>",
    ),
    "running mean": (
        "self.register_buffer('r$k', torch.ones($D)<<|, persistent=False>>)",
        "s = h.<<detach().mean((0, 1))|mean((0, 1)).detach()>>\n<<self.r$k.lerp_(s, 0.1)"
        "|self.r$k = 0.9 * self.r$k + 0.1 * s|self.r$k.mul_(0.9).add_(s, alpha=0.1)|self.r$k.copy_(s)"
        "|self.r$k[1:] = s[1:]|self.r$k.data.copy_(0.5 * s)|self.r$k += s>>\nh = h - self.r$k * 0.5",
    ),
    "running mean under no_grad": (
        "self.register_buffer('r$k', torch.ones($D))",
        "with torch.no_grad():\n    self.r$k.mul_(0.9).add_(h.mean((0, 1)), alpha=0.1)\nh = h * self.r$k",
    ),
    "queue": (
        "self.register_buffer('q$k', torch.zeros(3, $D))",
        "<<self.q$k = torch.cat([h.detach().mean((0, 1))[None], self.q$k[:-1]])|self.q$k.copy_(self.q$k.roll(1, 0))"
        "|self.q$k[0] = h.detach().amax((0, 1))>>\nh = h + <<self.q$k.sum(0)|(h @ self.q$k.t()) @ self.q$k>>",
    ),
    "pointer": (
        "self.register_buffer('q$k', torch.zeros(3, $D))\n"
        "self.register_buffer('n$k', torch.zeros(1, dtype=torch.long))",
        "self.q$k[self.n$k] = h.detach().mean((0, 1))[None]\nself.n$k.copy_((self.n$k + 1) % 3)\n"
        "h = h + self.q$k.mean(0)",
    ),
    "moving weights": (
        "self.w$k = nn.Parameter(torch.zeros($D, $D))\nself.register_buffer('e$k', torch.zeros($D, $D))",
        "<<self.e$k.mul_(0.5).add_(self.w$k.detach(), alpha=0.5)|self.e$k.lerp_(self.w$k.data, 0.5)>>\n"
        "h = h @ self.w$k + h @ self.e$k",
    ),
    "view of a buffer": (
        "self.register_buffer('a$k', torch.arange(8.0) / 8)\nself.register_buffer('b$k', self.a$k<<[2:6]|[:4]"
        "|.view(2, 4)[1]|[::2]>>)",
        "h = h * self.b$k<<\nself.a$k.mul_(0.5)|\nself.b$k.add_(0.25)||\nself.a$k[3] = h.detach().mean()>>\n"
        "h = h + self.a$k[<<:4|4:>>]",
    ),
    "buffer over a parameter": (
        "self.w$k = nn.Parameter(torch.zeros($D))\nself.register_buffer('b$k', self.w$k.<<data|detach()|data[1:2]>>)",
        "h = h * self.w$k + self.b$k",
    ),
    "constant buffer": (
        "self.register_buffer('c$k', <<torch.tensor([1.0, -0.5, 0.25, 2.0])|torch.tensor([1, 0, 1, 1])"
        "|torch.tensor([True, False, True, True])|torch.tensor(0.5)>>)",
        "h = h * self.c$k",
    ),
    "attribute": ("self.c$k = torch.tensor([1.0, -0.5, 0.25, 2.0])\nself.f$k = 0.75", "h = h * self.c$k + self.f$k"),
    "counter in Python": ("self.i$k = 0", "self.i$k += 1\nh = h * <<self.i$k|min(1.0, self.i$k / 10)>>"),
    # Parameters
    "tied": (
        "self.a$k = nn.Linear($D, $D)\nself.b$k = nn.Linear($D, $D)\nself.b$k.weight = self.a$k.weight",
        "h = self.b$k(torch.tanh(self.a$k(h)))",
    ),
    "transposed": (
        "self.w$k = nn.Parameter(torch.zeros($D, $D))",
        "h = <<h @ self.w$k @ self.w$k.t()|F.linear(h @ self.w$k, self.w$k)|h @ self.w$k.T.contiguous().softmax(0)>>",
    ),
    "cut parameter": (
        "self.w$k = nn.Parameter(torch.zeros(3 * $D, $D))",
        "a, b, c = <<self.w$k.chunk(3)|self.w$k.split($D)|self.w$k.view(3, $D, $D)"
        "|(self.w$k[:$D], self.w$k[$D : 2 * $D], self.w$k[2 * $D :])>>\nh = torch.tanh(h @ a) @ b + h @ c",
    ),
    "number that trains": (
        "self.w$k = nn.Parameter(torch.zeros(<<()|1|1, 1|1, 1, $D>>))",
        "h = h * <<self.w$k|self.w$k.exp()|torch.sigmoid(self.w$k)|(1 + self.w$k)>>",
    ),
    "frozen": ("self.l$k = nn.Linear($D, $D)\nself.l$k.<<weight|bias>>.requires_grad_(False)", "h = self.l$k(h)"),
    "unused parameter": ("self.u$k = nn.Parameter(torch.zeros(3))", "h = h * 1"),
    "list of parameters": (
        "self.w$k = nn.ParameterList([nn.Parameter(torch.zeros($D)) for _ in range(3)])",
        "for w in self.w$k:\n    h = torch.tanh(h * w)",
    ),
    "called twice": ("self.l$k = nn.Linear($D, $D)", "h = self.l$k(torch.tanh(self.l$k(h)))"),
    "parameter that overlaps": (
        "w$k = torch.zeros(2 * $D)\nself.a$k = nn.Parameter(w$k[:$D])\nself.b$k = nn.Parameter(w$k[<<$D:"
        "|2 : $D + 2>>])",
        "h = h * self.a$k + self.b$k",
    ),
    # Where gradients end
    "detached": (
        "",
        "h = <<h - h.mean(1, keepdim=True).detach()|h.detach() + h * 0.5|h + (h.round() - h).detach()"
        "|h / (h.detach().abs().amax() + 1)|h * h.data>>",
    ),
    "no_grad": (
        "self.l$k = nn.Linear($D, $D)",
        "with torch.no_grad():\n    t = <<self.l$k(h)|h.softmax(-1)|h.std()|(h > 0).to(h.dtype)>>\nh = self.l$k(h) + t",
    ),
    "enable_grad": (
        "",
        "with torch.no_grad():\n    t = h * 2\n    with torch.enable_grad():\n        u = h.sin()\nh = u + t",
    ),
    "decorated": ("", "@torch.no_grad()\ndef scale(t):\n    return t.abs().mean() + 1\nh = h / scale(h)"),
    "own function": (
        "",
        "class Own(torch.autograd.Function):\n    @staticmethod\n    def forward(ctx, t):\n"
        "        ctx.save_for_backward(t)\n        return t * t.sigmoid()\n    @staticmethod\n"
        "    def backward(ctx, g):\n        t, = ctx.saved_tensors\n        s = t.sigmoid()\n        return g * "
        "<<(s + t * s * (1 - s))|(s + t * s * (1 - s))|(s + t * s * (1 - s)) * -1>>\nh = Own.apply(h)",
    ),
    # Integers
    "embedding": (
        "self.l$k = nn.Embedding($W, $D<<|, padding_idx=0|, scale_grad_by_freq=True>>)",
        "h = h + self.l$k(i)",
    ),
    "embedding bag": ("self.l$k = nn.EmbeddingBag($W, $D, mode='<<sum|mean|max>>')", "h = h + self.l$k(i)[:, None]"),
    "gather": (
        "",
        "h = h + <<h.gather(2, (i % $D)[..., None])|torch.take_along_dim(h, (i % $D)[..., None], 2)"
        "|h.gather(1, (i % 2)[..., None].expand_as(h))|h.gather(2, (i[..., None] + torch.arange($D)) % $D)>>",
    ),
    "scatter": (
        "",
        "h = h + torch.zeros_like(h).<<scatter_add(1, (i % 2)[..., None].expand_as(h), h)"
        "|scatter(2, (i % $D)[..., None], h[..., :1])"
        "|index_put((torch.arange(h.shape[0])[:, None], i % 2), h, accumulate=True)"
        "|index_add(0, torch.zeros_like(i[:, 0]), h)|scatter_reduce(1, (i % 2)[..., None].expand_as(h), h, '<<sum|amax"
        "|mean>>')>>",
    ),
    "one_hot": ("self.w$k = nn.Parameter(torch.zeros($W, $D))", "h = h + F.one_hot(i, $W).to(h.dtype) @ self.w$k"),
    "indexed": (
        "self.w$k = nn.Parameter(torch.zeros($W, $D))",
        "h = h + self.w$k[<<i|i.clamp(max=3)|(i + 1) % $W|i - $W|i.flip(1)|torch.where(m, i, 0)>>]",
    ),
    "items of a batch": ("", "h = h + h[torch.arange(h.shape[0]), i[:, 0] % 2][:, None]"),
    "counts": (
        "self.w$k = nn.Parameter(torch.zeros($D))",
        "c = <<(i == 1).sum(1)|i.cumsum(1)[:, -1]|m.sum(1)|(i > 2).long().sum(1)|m.long().cumsum(1)[:, -1]>>\n"
        "h = h * (c[:, None, None] + 1) * self.w$k",
    ),
    "buckets": (
        "self.w$k = nn.Parameter(torch.zeros(4, $D))",
        "h = h + self.w$k[torch.bucketize(h.detach()[..., 0], torch.tensor([-0.5, 0.0, 0.5]))]",
    ),
    "mean by a mask": ("", "h = h + (h * m[..., None]).sum(1, keepdim=True) / m.sum(1).clamp(min=1)[:, None, None]"),
    "lookup by a size": (
        "self.l$k = nn.Embedding(16, $D)",
        "h = h + self.l$k(<<torch.arange(h.shape[1])|torch.tensor(h.shape[1])"
        "|torch.arange(h.shape[1], device=h.device).flip(0)[None]>>)",
    ),
    # Types
    "half": ("", "h = (h.to(torch.<<float16|bfloat16>>) * 1.5).to(h.dtype)"),
    "double": ("", "h = torch.tanh(h.double() * 0.3).to(h.dtype)"),
    "truth": (
        "",
        "h = h * <<(h > 0)|(h > 0).to(h.dtype)|((h > 0) & (h < 1))|~(h < -0.2)|(h.abs() > 0.1).int()"
        "|torch.isfinite(h)>>",
    ),
    "whole numbers": (
        "",
        "h = h * <<(i[..., None] % 3)|i[..., None].to(torch.int32)|torch.arange($D)|(i // 2)[..., None]"
        "|i.to(h.dtype)[..., None].sqrt()|(i[..., None].bitwise_and(1))>> * 0.5",
    ),
    "complex": (
        "",
        "c = torch.view_as_complex(h.reshape(*h.shape[:-1], 2, 2))\n"
        "h = torch.view_as_real(c * torch.polar(torch.ones(()), torch.tensor(0.5))).flatten(-2)",
    ),
    # By data
    "where": (
        "",
        "h = <<torch.where(h > 0, h, h * 0.3)|torch.where(m[..., None], h, 0)"
        "|torch.where(h.detach() > h.mean(), h, torch.zeros(()))|h.where(h < 0.5, h * h)"
        "|torch.where(i[..., None] > 2, h, -h)>>",
    ),
    "extremes": (
        "",
        "h = h + <<h.max(1, keepdim=True).values|h.amin((1, 2), keepdim=True)|h.amax(-1, keepdim=True)"
        "|torch.maximum(h, h.flip(1))|h.min(2, keepdim=True)[0]|h.max()|h.cummax(1).values"
        "|h.median(2, keepdim=True).values|h.kthvalue(2, 2, keepdim=True).values|torch.minimum(h, h * h)"
        "|torch.fmax(h, h.flip(2))|h.aminmax(dim=1, keepdim=True)[0]|h.quantile(0.3, 2, keepdim=True)>>",
    ),
    "sort": (
        "",
        "h = <<h.sort(2).values|h.sort(1, descending=True)[0]|h.topk(2, 2).values.repeat(1, 1, 2)"
        "|h + h.topk(2, 1)[0].sum(1, True)|h.gather(2, h.detach().argsort(2))|h.gather(1, h.argmax(1, True)) + h"
        "|h.msort()>>",
    ),
    "filled": (
        "",
        "h = h.masked_fill(<<m[..., None]|h > 0.5|(i == 2)[..., None]|torch.arange(h.shape[1])[:, None] > 2>>, <<0|0.5"
        "|-1>>)",
    ),
    # Reductions and products
    "reduction": (
        "",
        "h = h + h.<<logsumexp(1, keepdim=True)|var(2, keepdim=True)|std((0, 1), keepdim=True, correction=0)"
        "|norm(dim=-1, keepdim=True)|cumsum(1) * 0.2|mean()|sum((1, 2), keepdim=True) / 9|prod(2, keepdim=True)"
        "|mean((0, 1))|cumprod(2)|norm(p=1, dim=1, keepdim=True) / 5|logcumsumexp(1)"
        "|square().mean(-1, keepdim=True).rsqrt().clamp(max=2)|diff(dim=1).mean(1, True)|nansum(2, keepdim=True)"
        "|var(1, unbiased=False, keepdim=True)|renorm(2, 0, 1.0)|trapezoid(dim=1)[:, None]"
        "|flatten().dot(h.flatten()) / 99|abs().sum(1, True).log()|softmax(1).mul(h).sum(1, True)>>",
    ),
    "product": (
        "self.w$k = nn.Parameter(torch.zeros($D, $D))",
        "h = <<torch.einsum('btd,de->bte', h, self.w$k)|torch.einsum('btd,bsd->bts', h, h) @ h / 5|h @ self.w$k"
        "|torch.bmm(h, self.w$k.expand(h.shape[0], -1, -1))|torch.tensordot(h, self.w$k, 1)"
        "|torch.einsum('...d,ed->...e', h, self.w$k)"
        "|torch.baddbmm(h, h, self.w$k.expand(h.shape[0], -1, -1), beta=0.5)|torch.addmm(h[0], h[0], self.w$k) + h"
        "|h + (h * (h @ self.w$k)).sum(-1, True)|torch.kron(self.w$k[:1, :2], self.w$k[1:2, :2]) * h"
        "|torch.mv(self.w$k, self.w$k[0]) * h>>",
    ),
    "distance": (
        "self.w$k = nn.Parameter(torch.zeros(5, $D))",
        "h = h + <<torch.cdist(h, self.w$k.expand(h.shape[0], -1, -1)).mean(-1, True)"
        "|F.cosine_similarity(h[:, :, None], self.w$k, dim=-1).sum(-1, True)"
        "|F.pairwise_distance(h, self.w$k[0])[..., None]>>",
    ),
    "second input": (
        "",
        "h = <<h + z|h * z|torch.cat([h, z], -1)[..., ::2]|torch.where(z > 0, h, z)|(h @ z.mT) @ z / 5"
        "|h + z.mean(1, keepdim=True)|h + z[:, : h.shape[1]]>>",
    ),
    "several results": (
        "self.l$k = nn.Linear($D, 2 * $D)",
        "a, b = self.l$k(h).chunk(2, dim=-1)\nh = {'a': torch.tanh(a), 'b': torch.sigmoid(b)}\nh = h['a'] * h['b']",
    ),
    "closure": (
        "self.l$k = nn.ModuleDict({'a': nn.Linear($D, $D), 'b': nn.Linear($D, $D)})",
        "h = sum(layer(h) for layer in self.l$k.values())",
    ),
}

LOSSES: dict[str, tuple[str, str]] = {
    "mse": ("like", "F.mse_loss(o, y<<|, reduction='sum'>>)"),
    "l1": ("like", "F.l1_loss(o, y)"),
    "smooth l1": ("like", "F.smooth_l1_loss(o, y, beta=<<0.5|1.0|0.0>>)"),
    "huber": ("like", "F.huber_loss(o, y, delta=<<0.3|1.0>>)"),
    "cross entropy": (
        "class",
        "F.cross_entropy(o.<<transpose(1, 2), y|flatten(0, 1), y.flatten()>><<||, label_smoothing=0.1"
        "|, reduction='sum'|, ignore_index=2|, weight=torch.tensor([1.0, 0.5, 2.0, 0.25])>>)",
    ),
    "cross entropy of items": ("item class", "F.cross_entropy(o.mean(1), y<<|, label_smoothing=0.2>>)"),
    "cross entropy of probabilities": ("like", "F.cross_entropy(o.flatten(0, 1), y.softmax(-1).flatten(0, 1))"),
    "nll": ("class", "F.nll_loss(o.log_softmax(-1).transpose(1, 2), y<<|, reduction='mean'|, ignore_index=1>>)"),
    "bce": (
        "bit",
        "F.binary_cross_entropy_with_logits(o, y<<|, pos_weight=torch.tensor([1.0, 2.0, 0.5, 3.0])"
        "|, reduction='sum'>>)",
    ),
    "bce of probabilities": ("bit", "F.binary_cross_entropy(torch.sigmoid(o), y)"),
    "kl": (
        "like",
        "F.kl_div(o.log_softmax(-1), y.log_softmax(-1), log_target=True, reduction='<<batchmean|sum|mean>>')",
    ),
    "gaussian": ("like", "F.gaussian_nll_loss(o, y, o.square() + 0.5<<|, full=True>>)"),
    "poisson": ("bit", "F.poisson_nll_loss(o, y<<|, log_input=False, eps=2>>)"),
    "cosine": ("like", "(1 - F.cosine_similarity(o, y, dim=-1)).mean()"),
    "soft margin": ("bit", "F.soft_margin_loss(o, y * 2 - 1)"),
    "hinge": ("bit", "F.hinge_embedding_loss(o, y * 2 - 1)"),
    "multi label": ("bit", "F.multilabel_soft_margin_loss(o.flatten(0, 1), y.flatten(0, 1))"),
    "multi margin": ("item class", "F.multi_margin_loss(o.mean(1), y)"),
    "triplet": ("like", "F.triplet_margin_loss(o.flatten(0, 1), y.flatten(0, 1), o.flip(1).flatten(0, 1))"),
    "by hand": (
        "like",
        "<<((o - y) ** 2).sum() / y.shape[0]|(o - y).abs().mean(1).max()|((o - y) ** 2).mean((1, 2)).sqrt().sum()"
        "|(o * y).sum(-1).sigmoid().log().neg().mean()|torch.log(torch.cosh(o - y)).mean()>>",
    ),
    "masked": ("like", "((o - y).square() * (y > 0)).sum() / (y > 0).sum().clamp(min=1)"),
}

OPTIMIZERS = (
    "",
    "",
    "",
    "torch.optim.SGD(parameters, lr=0.0078125)",
    "torch.optim.SGD(parameters, lr=0.0078125, momentum=0.5"
    "<<|, nesterov=True|, weight_decay=0.125|, dampening=0.25|, maximize=True>>)",
    "torch.optim.Adam(parameters, lr=0.015625, eps=0.125<<|, weight_decay=0.125|, betas=(0.5, 0.75)>>)",
    "torch.optim.AdamW(parameters, lr=0.015625, eps=0.125<<|, weight_decay=0.25>>)",
)

_INPUTS = {"z": "float", "i": "word", "m": "mask"}
_ASKS = {name: re.compile(rf"(?<![\w.'])\b{name}\b(?!\s*=[^=])") for name in _INPUTS}
_PIECES_AT_MOST = 5


@dataclass(frozen=True)
class Drawn:
    """A module and how it is to be exported; all that is random in it follows from the seed.

    Attributes:
        pieces: the names of the pieces that the module has.
        source: what defines `Model`, `loss` and `optimizer`.
        inputs: the kinds of the inputs: float, word (integers below WORDS) or mask.
        targets: the kinds of the targets.
        dynamic: which of the axes "batch" and "length" may vary.
        options: further arguments of the export.
        drawn_pieces: how many pieces there were to leave out from.
        parts: the modules that it consists of, side by side, if it is made of several.
        ends: the lines of the source at which their classes end.
    """

    seed: int
    pieces: tuple[str, ...]
    source: str
    inputs: tuple[str, ...]
    targets: tuple[str, ...]
    dynamic: frozenset[str]
    options: tuple[tuple[str, Any], ...]
    drawn_pieces: int
    has_optimizer: bool
    parts: tuple[Drawn, ...] = ()
    ends: tuple[int, ...] = ()

    def namespace(self) -> dict[str, Any]:
        """Execute the source; tracebacks and `inspect` find its lines."""
        name = f"/modules/module_{self.seed}.py"
        linecache.cache[name] = (len(self.source), None, self.source.splitlines(True), name)
        space: dict[str, Any] = {"__name__": f"module_{self.seed}", "__file__": name}
        exec(compile(self.source, name, "exec"), space)
        return space

    @property
    def rounds_to(self) -> float:
        """The spacing at 1 of the coarsest type in it."""
        is_narrow = "float16" in self.source or "autocast" in dict(self.options)
        return 2.0**-7 if "bfloat16" in self.source else 2.0**-10 if is_narrow else 2.0**-23


def drawn(seed: int, without: Collection[int] = (), plain: Collection[str] = ()) -> Drawn:
    """Write a module.

    Args:
        seed: what determines it.
        without: which of its pieces to leave out.
        plain: what to take from it besides: "optimizer", "batch" and "length" (the dynamic axes), "options".
    """
    rng = random.Random(seed)
    names = rng.choices(list(PIECES), k=rng.choices(range(1, _PIECES_AT_MOST + 1), [2, 4, 4, 2, 1])[0])
    rates = rng.random() < 0.3
    init: list[str] = []
    body: list[str] = []
    for k, name in enumerate(names):
        own = random.Random(f"{seed}/{k}")
        first, second = (_written(text, k, own) for text in PIECES[name])
        calm = own.random() < (0.7 if rates else 0.3)
        if k in without:
            continue
        init += first.splitlines()
        body += [*second.splitlines(), *(["h = torch.tanh(h)"] if calm else [])]
    text = "\n".join(body)
    asked = [name for name in _INPUTS if _ASKS[name].search(text)]
    kind, formula = rng.choice(list(LOSSES.values()))
    formula = _written(formula, 0, rng)
    optimizer = _written(rng.choice(OPTIMIZERS), 0, rng)
    dynamic = frozenset(axis for axis, p in (("batch", 0.7), ("length", 0.6)) if rng.random() < p)
    options: dict[str, Any] = {"fuse": rng.random() < 0.6, "evaluation": False}
    if optimizer and rng.random() < 0.2:
        options["evaluation"] = True
    if optimizer and rng.random() < 0.1:
        options["max_grad_norm"] = 0.5
    # onnxruntime computes nothing in bfloat16 on a CPU.
    if rng.random() < 0.03 and "bfloat16" not in text:
        options["autocast"] = torch.float16
    if "optimizer" in plain:
        optimizer = ""
    if "options" in plain or not optimizer:
        options = {"fuse": options["fuse"], "evaluation": False}
    source = "\n".join([*_IMPORTS, *_class("Model", init, asked, body), *_loss(formula), *_optimizer(optimizer)])
    return Drawn(
        seed,
        tuple(name for k, name in enumerate(names) if k not in without),
        source,
        ("first", *(_INPUTS[name] for name in asked)),
        (kind,),
        dynamic - frozenset(plain),
        tuple(options.items()),
        len(names),
        bool(optimizer),
    )


_IMPORTS = (
    "import math",
    "import torch",
    "import torch.nn.functional as F",
    "import torch.utils.checkpoint",
    "from torch import nn",
)


def _class(name: str, init: Collection[str], asked: Collection[str], body: Collection[str]) -> list[str]:
    return [
        "",
        "",
        f"class {name}(nn.Module):",
        "    def __init__(self):",
        "        super().__init__()",
        f"        self.first = nn.Linear(3, {WIDTH})",
        *(f"        {line}" for line in init),
        "",
        f"    def forward(self, {', '.join(['x', *asked])}):",
        "        h = self.first(x)",
        *(f"        {line}" for line in body),
        "        return h",
    ]


def _loss(formula: str, name: str = "loss") -> list[str]:
    return ["", "", f"def {name}(o, y):", f"    return {formula}"]


def _optimizer(written: str) -> list[str]:
    return ["", "", "def optimizer(parameters):", f"    return {written or None}", ""]


def side_by_side(parts: Sequence[Drawn], like: Drawn) -> Drawn:
    """Return one module with all of some, which read the same inputs; the losses are added up.

    Optimizer, options and dynamic axes are those of another module.
    """
    lines, ends = list(_IMPORTS), []
    for k, part in enumerate(parts):
        own, _, rest = part.source.partition("\n\n\ndef loss")
        formula = rest.partition("return ")[2].partition("\n\n\ndef optimizer")[0]
        lines += own.partition("from torch import nn")[2].replace("class Model", f"class Part{k}").split("\n")[1:]
        lines += _loss(formula, f"loss{k}")
        ends.append(len(lines))
    kinds = [kind for kind in ("float", "word", "mask") if any(kind in part.inputs for part in parts)]
    names = {kind: name for name, kind in _INPUTS.items()}
    calls = [
        f"self.parts[{k}]({', '.join(['x', *(names[kind] for kind in part.inputs[1:])])})"
        for k, part in enumerate(parts)
    ]
    losses = " + ".join(f"loss{k}(o[{k}], y[{k}])" for k in range(len(parts)))
    lines += [
        "",
        "",
        "class Model(nn.Module):",
        "    def __init__(self):",
        "        super().__init__()",
        f"        self.parts = nn.ModuleList([{', '.join(f'Part{k}()' for k in range(len(parts)))}])",
        "",
        f"    def forward(self, {', '.join(['x', *(names[kind] for kind in kinds)])}):",
        f"        return {', '.join(calls)},",
        "",
        "",
        "def loss(o, *y):",
        f"    return {losses}",
    ]
    lines += like.source.partition("\n\n\ndef optimizer")[2].join(["\n\ndef optimizer", ""]).split("\n")
    return Drawn(
        parts[0].seed,
        tuple(name for part in parts for name in part.pieces),
        "\n".join(lines),
        ("first", *kinds),
        tuple(kind for part in parts for kind in part.targets),
        like.dynamic,
        like.options,
        0,
        like.has_optimizer,
        tuple(parts),
        tuple(ends),
    )


def _written(template: str, k: int, rng: random.Random) -> str:
    """Return a template with one of `<<a|b>>` in each place, innermost first, and its numbers."""
    template = template.replace("$A", _ACTIVATION).replace("$S", _SIZE)
    while "<<" in template:
        template = re.sub(
            r"<<(?!<)((?:(?!<<|>>).)*)>>", lambda m: rng.choice(_alternatives(m[1])), template, flags=re.S
        )
    return template.replace("$k", str(k)).replace("$D", str(WIDTH)).replace("$W", str(WORDS))


def _alternatives(text: str) -> list[str]:
    """Split at the bars that stand for no operator of Python: those have spaces around them."""
    return re.split(r"(?<! )\||\|(?! )", text)


def batches(drawn: Drawn) -> Iterator[tuple[tuple[Tensor, ...], tuple[Tensor, ...]]]:
    """Yield batches: the one to export with, another of its sizes, and some of other sizes where those may vary."""
    sizes = [(BATCH, LENGTH), (BATCH, LENGTH)]
    rng = random.Random(f"{drawn.seed}/sizes")
    for batch, length in ((2, 5), (4, 12), (rng.choice([1, 5, 6]), rng.choice([3, 4, 7, 8, 9, 13]))):
        sizes.append((batch if "batch" in drawn.dynamic else BATCH, length if "length" in drawn.dynamic else LENGTH))
    for (batch, length), number in zip(sizes, itertools.count(), strict=False):
        generator = torch.Generator().manual_seed(drawn.seed * 16 + number)
        inputs = tuple(_tensor(kind, batch, length, generator) for kind in drawn.inputs)
        yield inputs, tuple(_tensor(kind, batch, length, generator) for kind in drawn.targets)


def _tensor(kind: str, batch: int, length: int, generator: torch.Generator) -> Tensor:
    shape = (batch, length)
    match kind:
        case "first":
            return torch.randn(*shape, 3, generator=generator)
        case "float" | "like":
            return torch.randn(*shape, WIDTH, generator=generator)
        case "word":
            return torch.randint(0, WORDS, shape, generator=generator)
        case "mask":
            return torch.rand(shape, generator=generator) < 0.7
        case "class":
            return torch.randint(0, WIDTH, shape, generator=generator)
        case "item class":
            return torch.randint(0, WIDTH, (batch,), generator=generator)
        case _:
            return (torch.rand(*shape, WIDTH, generator=generator) < 0.5).to(torch.float32)


def filled(module: nn.Module, seed: int) -> None:
    """Give the parameters of a module random nonzero values."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5 + 0.1)
