"""What the models of ``python -m benchmarks models`` are made of: feed-forward blocks that can be computed in several ways
with the same weights, layers that can be recomputed, and a loss that never holds all logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.ffn_functions import FFNFunction, dense_ffn

Body = Callable[[Tensor], Tensor]
ChunkGradients = Callable[[Tensor, Tensor, Tensor], "tuple[Tensor, Tensor, Tensor]"]

CHUNK = 4096  # tokens whose logits exist at the same time; no more than the fewest that a slope begins with


@dataclass
class Choice:
    """How a model computes: one object that all of its blocks look at, so that every method has the same weights."""

    ffn: FFNFunction = dense_ffn
    recompute_layers: bool = False


class FFN(nn.Module):
    """Two linear layers with relu² between them. Weights that are kept in float32 are cast to the dtype of the input."""

    def __init__(self, up: nn.Linear, down: nn.Linear, choice: Choice) -> None:
        super().__init__()
        self.up, self.down = up, down
        self._choice = choice

    def pre_activation(self, x: Tensor) -> Tensor:
        return F.linear(x, *(_cast(t, x) for t in (self.up.weight, self.up.bias)))

    def forward(self, x: Tensor) -> Tensor:
        weights = (self.up.weight, self.up.bias, self.down.weight, self.down.bias)
        return self._choice.ffn(x, *(_cast(t, x) for t in weights))


def _cast(weight: Tensor | None, like: Tensor) -> Tensor | None:
    return None if weight is None else weight.to(like.dtype)


def make_recomputable(layer: nn.Module, choice: Choice) -> None:
    """Makes `layer` keep its input only, and run again in backward, whenever the choice says so."""
    forward = layer.forward

    def chosen(*arguments: Any, **named: Any) -> Any:
        if not choice.recompute_layers:
            return forward(*arguments, **named)
        return checkpoint(forward, *arguments, use_reentrant=False, preserve_rng_state=False, **named)

    layer.forward = chosen  # type: ignore[method-assign]


def chunk_gradients(x: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The sum of the cross entropies of some tokens, and its gradients for x and weight."""
    logits = F.linear(x, weight).float()
    log_sum = logits.logsumexp(dim=1, keepdim=True)
    index = targets.unsqueeze(1)
    loss = (log_sum - logits.gather(1, index)).sum()
    gradient = logits.sub_(log_sum).exp_()
    gradient = gradient.scatter_add_(1, index, -torch.ones_like(log_sum)).to(x.dtype)
    return loss, gradient @ weight, gradient.T @ x


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Mean cross entropy of ``x weightᵀ``. Forward computes the gradients too, chunk by chunk."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, gradients: ChunkGradients) -> Tensor:
        total = torch.zeros((), device=x.device)
        grad_x, grad_weight = torch.empty_like(x), torch.zeros_like(weight, dtype=torch.float32)
        for start in range(0, len(x), CHUNK):
            part = slice(start, start + CHUNK)
            loss, grad_x[part], grad = gradients(x[part], weight, targets[part])
            total += loss
            grad_weight += grad
        ctx.save_for_backward(grad_x, grad_weight.to(weight.dtype))
        return total / len(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        grad_x, grad_weight = ctx.saved_tensors
        scale = (grad / len(grad_x)).to(grad_x.dtype)
        return grad_x * scale, grad_weight * scale, None, None


class LanguageModel(nn.Module):
    """An embedding, layers from (batch, length, width) to the same, a last norm and a head."""

    def __init__(
        self, embedding: nn.Embedding, layers: nn.ModuleList, norm: Body, head: nn.Linear, choice: Choice
    ) -> None:
        super().__init__()
        self.embedding, self.layers, self.norm, self.head = embedding, layers, norm, head
        self.choice = choice
        for layer in layers:
            make_recomputable(layer, choice)

    def ffns(self) -> Iterator[FFN]:
        return (module for module in self.modules() if isinstance(module, FFN))

    def body(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)

    def embed(self, tokens: Tensor) -> Tensor:
        return self.embedding(tokens)

    def loss(self, tokens: Tensor, targets: Tensor, body: Body, gradients: ChunkGradients) -> Tensor:
        x = body(tokens).flatten(0, 1)
        return _ChunkedCrossEntropy.apply(x, self.head.weight.to(x.dtype), targets.flatten(), gradients)

    @torch.no_grad()
    def densities(self, tokens: Tensor) -> list[float]:
        """The share of relu(h) that isn't zero, layer by layer."""
        found: list[float] = []

        def count(module: nn.Module, inputs: tuple[Tensor]) -> None:
            h = module.pre_activation(inputs[0])
            found.append(torch.count_nonzero(h > 0).item() / h.numel())

        handles = [ffn.register_forward_pre_hook(count) for ffn in self.ffns()]
        self.body(tokens)
        for handle in handles:
            handle.remove()
        return found
