"""A small GPT whose feed-forward blocks can be computed dense or compressed, at densities that tests set."""

from collections.abc import Callable, Sequence
from statistics import NormalDist

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bitsparse


def _normalize(x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor, ffn: Callable[..., Tensor]) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(_normalize(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + ffn(_normalize(x), self.up.weight, self.up.bias, self.down.weight, self.down.bias)


class SmallGPT(nn.Module):
    """Set `ffn` to a function of x, w1, b1, w2, b2."""

    VOCABULARY = 256

    def __init__(self, layers: int = 12, width: int = 512, heads: int = 8) -> None:
        super().__init__()
        self.ffn: Callable[..., Tensor] = bitsparse.relu_squared_ffn
        self.embedding = nn.Embedding(self.VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.head = nn.Linear(width, self.VOCABULARY, bias=False)

    @torch.no_grad()
    def set_densities(self, densities: Sequence[float]) -> None:
        """Shares of positive pre-activations, block by block: their inputs are normed, so these are near normal."""
        for block, density in zip(self.blocks, densities, strict=True):
            deviation = block.up.weight.float().square().sum(1).mean().sqrt().item()
            block.up.bias.fill_(deviation * NormalDist().inv_cdf(density))

    def forward(self, tokens: Tensor) -> Tensor:
        """The loss of predicting each next token."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.ffn)
        logits = self.head(_normalize(x))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def tokens(sequences: int, length: int, device: str, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(SmallGPT.VOCABULARY, (sequences, length), generator=generator).to(device)
