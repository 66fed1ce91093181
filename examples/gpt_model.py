"""A GPT with squared-ReLU feed-forward blocks, rotary positions, RMSNorm and causal attention."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Size:
    layers: int
    width: int
    heads: int
    length: int  # tokens of a sequence
    batch: int  # sequences of a step


SIZES = {
    "tiny": Size(layers=2, width=64, heads=2, length=128, batch=4),
    "small": Size(layers=4, width=192, heads=3, length=256, batch=4),
    "nanogpt": Size(layers=12, width=768, heads=6, length=1024, batch=16),
}


class DenseFFN(nn.Module):
    """What bitsparse.nn.ReLUSquaredFFN replaces. Same parameters under the same names."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc = nn.Linear(width, 4 * width)
        self.proj = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        a = F.relu(self.fc(x))
        with torch.autocast(x.device.type, enabled=False):  # which would square, and keep, in float32 on CUDA
            a = a.square()
        return self.proj(a)


def _rotary_angles(length: int, head_width: int) -> tuple[Tensor, Tensor]:
    frequencies = 10_000.0 ** -(torch.arange(0, head_width, 2) / head_width)
    angles = torch.outer(torch.arange(length), frequencies)
    return angles.cos(), angles.sin()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1).type_as(x)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(_rotate(q, cos, sin), _rotate(k, cos, sin), v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, size: Size, make_ffn: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(size.width, eps=1e-6)
        self.attention = Attention(size.width, size.heads)
        self.ffn_norm = nn.RMSNorm(size.width, eps=1e-6)
        self.ffn = make_ffn(size.width)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.ffn(self.ffn_norm(x))


class GPT(nn.Module):
    """Returns the mean cross entropy. `make_ffn(width)` makes the feed-forward blocks: the only thing that differs."""

    def __init__(self, size: Size, vocabulary: int, make_ffn: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, size.width)
        self.blocks = nn.ModuleList(Block(size, make_ffn) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.width, eps=1e-6)
        self.head = nn.Linear(size.width, vocabulary, bias=False)
        cos, sin = _rotary_angles(size.length, size.width // size.heads)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        nn.init.normal_(self.embedding.weight, std=0.02)
        for block in self.blocks:
            nn.init.zeros_(block.attention.out.weight)
            nn.init.zeros_(block.ffn.proj.weight)
            nn.init.zeros_(block.ffn.proj.bias)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]])
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
