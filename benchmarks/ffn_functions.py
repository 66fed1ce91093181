"""The feed-forward block of the benchmarks, computed in several ways from the same weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import bitsparse

FFNFunction = Callable[..., Tensor]  # of x, w1, b1, w2 and, where there is one, b2


def normalize(x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],))


def dense_ffn(x: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None = None) -> Tensor:
    return F.linear(F.relu(F.linear(x, w1, b1)).square(), w2, b2)


def checkpointed_ffn(x: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None = None) -> Tensor:
    return checkpoint(dense_ffn, x, w1, b1, w2, b2, use_reentrant=False, preserve_rng_state=False)


@cache  # code that torch.compile made for one is good for the next
def bitsparse_ffn(codec: str, fused: bool = False) -> FFNFunction:
    def ffn(x: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None = None) -> Tensor:
        return bitsparse.relu_squared_ffn(x, w1, b1, w2, b2, codec=codec, fused=fused)

    return ffn
