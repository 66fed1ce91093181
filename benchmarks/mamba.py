"""What a Mamba-2 layer does between its two projections, for machines without mamba_ssm's kernels: as those do, it keeps
the projected input and computes the rest again in backward, and what it needs meanwhile does not grow with the batch.

Two operators that compilers of a whole model don't look into, so that what is compiled in here (on a GPU), once for all
layers, batches and methods, takes a few sequences at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SEQUENCES = 2  # at a time
_NUMBERS = count()
_PARTS: WeakValueDictionary[int, Part] = WeakValueDictionary()  # by the number that operators take

Gradients = tuple[Tensor, list[Tensor]]


class Part(nn.Module):
    """The layer's parameters, and how a few sequences go through it."""

    def __init__(self, mixer: Any) -> None:
        super().__init__()
        self.mixer = mixer
        kept = (mixer.conv1d, mixer.norm)
        tensors = {mixer.dt_bias, mixer.A_log, mixer.D}
        tensors |= {p for module in kept if isinstance(module, nn.Module) for p in module.parameters()}
        self.names = [name for name, p in self.named_parameters() if p in tensors]
        compiled = mixer.dt_bias.is_cuda
        self.output = _compiled_output if compiled else _output
        self.gradients = _compiled_gradients if compiled else _gradients
        self.number = next(_NUMBERS)
        _PARTS[self.number] = self

    @property
    def tensors(self) -> list[Tensor]:
        parameters = dict(self.named_parameters())
        return [parameters[name] for name in self.names]

    def forward(self, projected: Tensor) -> Tensor:
        """(batch, length, gate | x b c | dt) to (batch, length, inner)."""
        mixer = self.mixer
        batch, length, _ = projected.shape
        inner, state = mixer.intermediate_size, mixer.n_groups * mixer.ssm_state_size
        gate, mixed, dt = projected.split([inner, inner + 2 * state, mixer.num_heads], dim=-1)
        mixed = mixer.act(mixer.conv1d(mixed.transpose(1, 2))[..., :length].transpose(1, 2))
        x, b, c = mixed.split([inner, state, state], dim=-1)
        x = x.reshape(batch, length, mixer.num_heads, mixer.head_dim)
        b, c = (t.reshape(batch, length, mixer.n_groups, mixer.ssm_state_size) for t in (b, c))
        dt = F.softplus(dt.float() + mixer.dt_bias.float())
        y = chunked_scan(x, dt, -mixer.A_log.float().exp(), b, c, mixer.chunk_size)
        y = y + mixer.D.to(x.dtype)[:, None] * x
        return mixer.norm(y.reshape(batch, length, inner), gate).to(projected.dtype)


def forward_of(mixer: Any) -> Callable[..., Tensor]:
    """To take the place of `mixer.forward`."""
    part = Part(mixer)

    def forward(hidden_states: Tensor, *_: object, **__: object) -> Tensor:
        return mixer.out_proj(_mamba(mixer.in_proj(hidden_states), part.tensors, part.number))

    return forward


def _output(part: Part, projected: Tensor, tensors: Sequence[Tensor]) -> Tensor:
    return torch.func.functional_call(part, dict(zip(part.names, tensors, strict=True)), (projected,))


def _gradients(part: Part, grad: Tensor, projected: Tensor, tensors: list[Tensor]) -> Gradients:
    return torch.func.vjp(lambda p, t: _output(part, p, t), projected, tensors)[1](grad)


_compiled_output = torch.compile(_output, dynamic=False)
_compiled_gradients = torch.compile(_gradients, dynamic=False)


def _plain(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Always of one type, and never requiring gradients: the compiler makes other code for others."""
    return [t.detach() for t in tensors]


@torch.library.custom_op("bitsparse_benchmarks::mamba", mutates_args=())
def _mamba(projected: Tensor, tensors: list[Tensor], number: int) -> Tensor:
    part, tensors = _PARTS[number], _plain(tensors)
    y = projected.new_empty(*projected.shape[:-1], part.mixer.intermediate_size)
    for p, place in zip(projected.detach().split(SEQUENCES), y.split(SEQUENCES), strict=True):
        place.copy_(part.output(part, p, tensors))
    return y


@_mamba.register_fake
def _(projected: Tensor, tensors: list[Tensor], number: int) -> Tensor:
    return projected.new_empty(*projected.shape[:-1], _PARTS[number].mixer.intermediate_size)


@torch.library.custom_op("bitsparse_benchmarks::mamba_backward", mutates_args=())
def _mamba_backward(grad: Tensor, projected: Tensor, tensors: list[Tensor], number: int) -> list[Tensor]:
    part, tensors = _PARTS[number], _plain(tensors)
    found, sums = torch.empty_like(projected), [torch.zeros_like(t) for t in tensors]
    parts = (t.split(SEQUENCES) for t in (grad, projected.detach(), found))
    for g, p, place in zip(*parts, strict=True):
        grad_projected, grads = part.gradients(part, g, p, tensors)
        place.copy_(grad_projected)
        for total, one in zip(sums, grads, strict=True):
            total += one
    return [found, *sums]


@_mamba_backward.register_fake
def _(grad: Tensor, projected: Tensor, tensors: list[Tensor], number: int) -> list[Tensor]:
    return [torch.empty_like(projected), *map(torch.empty_like, tensors)]


def _setup_context(ctx: Any, inputs: tuple[Tensor, list[Tensor], int], output: Tensor) -> None:
    projected, tensors, ctx.number = inputs
    ctx.save_for_backward(projected, *tensors)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, list[Tensor], None]:
    projected, *tensors = ctx.saved_tensors
    grad_projected, *grads = _mamba_backward(grad.contiguous(), projected, tensors, ctx.number)
    return grad_projected, grads, None


_mamba.register_autograd(_backward, setup_context=_setup_context)


def chunked_scan(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, chunk: int) -> Tensor:
    """The state-space recurrence ``s = exp(dt a) s + dt x bᵀ``, ``y = s c`` of Mamba-2 by matrix products: within chunks
    directly, between chunks by their last states. `chunk` divides the length.

    Args:
        x: (batch, length, heads, p); dt: (batch, length, heads) float32; a: (heads,) float32, negative;
        b, c: (batch, length, groups, n), each for heads / groups consecutive heads.
    """
    batch, length, heads, p = x.shape
    groups, n, chunks, dtype = b.shape[2], b.shape[3], length // chunk, x.dtype
    grouped = (batch, chunks, chunk, groups, heads // groups)
    b, c = (t.view(batch, chunks, chunk, groups, n) for t in (b, c))
    x = (x * dt.to(dtype)[..., None]).view(*grouped, p)
    log = (dt * a).view(grouped).cumsum(2)  # of the decay since the chunk began
    # Within a chunk: i reads what j <= i wrote.
    steps = log.permute(0, 1, 3, 4, 2)
    later = torch.ones(chunk, chunk, dtype=torch.bool, device=x.device).tril()
    decay = (steps[..., :, None] - steps[..., None, :]).masked_fill(~later, -torch.inf).exp().to(dtype)
    weights = torch.einsum("zcign,zcjgn->zcgij", c, b).unsqueeze(3) * decay
    y = torch.einsum("zcgrij,zcjgrp->zcigrp", weights, x)
    # The state that each chunk adds, then the sum of what all earlier ones left.
    to_end = (log[:, :, -1:] - log).exp().to(dtype)
    added = torch.einsum("zcjgrp,zcjgn->zcgrpn", x * to_end[..., None], b)
    total = log[:, :, -1].permute(0, 2, 3, 1).cumsum(-1)  # of the decay since the sequence began, at ends of chunks
    begin = F.pad(total[..., :-1], (1, 0))
    earlier = torch.ones(chunks, chunks, dtype=torch.bool, device=x.device).tril(-1)
    between = (begin[..., :, None] - total[..., None, :]).masked_fill(~earlier, -torch.inf).exp().to(dtype)
    states = torch.einsum("zgrek,zkgrpn->zegrpn", between, added)
    y = y + torch.einsum("zcign,zcgrpn->zcigrp", c, states) * log.exp().to(dtype)[..., None]
    return y.reshape(batch, length, heads, p)
