"""A GPT of modded-nanogpt's size and the text that it is trained on, for ``python -m benchmarks models``.

Norms without weights, rotary positions, normed queries and keys, causal attention, a feed-forward block with relu² and
without biases, an untied head. Weights are float32 and cast to the activations' dtype where they are used. Left out:
value embeddings, skip connections, soft-capped logits, attention over documents.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.ffn_functions import normalize
from benchmarks.models_parts import FFN, Choice, LanguageModel
from examples.text_data import load_text


@dataclass(frozen=True)
class Size:
    layers: int
    width: int
    heads: int
    vocabulary: int


NANOGPT = Size(layers=12, width=768, heads=6, vocabulary=50304)
TINY = Size(layers=2, width=64, heads=2, vocabulary=512)


class CastLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


class Attention(nn.Module):
    def __init__(self, size: Size, length: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.heads = size.heads
        self.qkv = CastLinear(size.width, 3 * size.width, bias=False)
        self.out = CastLinear(size.width, size.width, bias=False)
        head_width = size.width // size.heads
        frequencies = 10_000.0 ** -(torch.arange(0, head_width, 2) / head_width)
        angles = torch.outer(torch.arange(length), frequencies)
        self.register_buffer("cos", angles.cos().to(dtype), persistent=False)
        self.register_buffer("sin", angles.sin().to(dtype), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        q, k = _rotate(normalize(q), self.cos, self.sin), _rotate(normalize(k), self.cos, self.sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, size: Size, length: int, dtype: torch.dtype, choice: Choice) -> None:
        super().__init__()
        self.attention = Attention(size, length, dtype)
        up = nn.Linear(size.width, 4 * size.width, bias=False)
        self.ffn = FFN(up, nn.Linear(4 * size.width, size.width, bias=False), choice)
        nn.init.zeros_(self.attention.out.weight)
        nn.init.zeros_(self.ffn.down.weight)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(normalize(x))
        return x + self.ffn(normalize(x))


class GPT(LanguageModel):
    """For sequences of `length` tokens; activations are of `dtype`."""

    def __init__(self, size: Size, length: int, dtype: torch.dtype) -> None:
        choice = Choice()
        blocks = nn.ModuleList(Block(size, length, dtype, choice) for _ in range(size.layers))
        embedding = nn.Embedding(size.vocabulary, size.width)
        super().__init__(embedding, blocks, normalize, nn.Linear(size.width, size.vocabulary, bias=False), choice)
        self._dtype = dtype
        nn.init.zeros_(self.head.weight)

    def embed(self, tokens: Tensor) -> Tensor:
        return normalize(self.embedding(tokens).to(self._dtype))

    def optimizers(self, fused: bool) -> list[torch.optim.Optimizer]:
        """Muon for the matrices of the layers; it takes nothing else. AdamW for embedding and head."""
        rest = [self.embedding.weight, self.head.weight]
        return [
            torch.optim.Muon(self.layers.parameters(), lr=0.02, weight_decay=0.0),
            torch.optim.AdamW(rest, lr=2e-3, betas=(0.9, 0.95), weight_decay=0.0, fused=fused),
        ]


_PIECE = re.compile(rb" ?\w+|\s+|[^\w\s]")


def tokenize(text: bytes, vocabulary: int) -> Tensor:
    """Words with the blank before them, runs of white space, and single other characters: the most frequent ones are
    tokens, the others are spelt in bytes, which are the first 256 tokens. No byte pair encoding has to be learnt, and the
    whole vocabulary is in use."""
    pieces = _PIECE.findall(text)
    common = Counter(piece for piece in pieces if len(piece) > 1).most_common(vocabulary - 256)
    numbers = {piece: 256 + index for index, (piece, _) in enumerate(common)}
    tokens: list[int] = []
    for piece in pieces:
        number = numbers.get(piece)
        if number is None:
            tokens.extend(piece)
        else:
            tokens.append(number)
    return torch.tensor(tokens, dtype=torch.int32)


def load_tokens(source: Path | None, vocabulary: int, most_bytes: int) -> tuple[Tensor, str]:
    """The tokens of the text that the training example uses, and where it came from."""
    text, words = load_text(None if source is None else str(source), least=1 << 16)
    text = text[:most_bytes]
    tokens = tokenize(text.numpy().tobytes(), vocabulary)
    return tokens, f"{words}; {len(tokens)} tokens of the first {len(text) / 2**20:.1f} MiB"
