"""Nemotron-H by Hugging Face's classes, for ``python -m benchmarks models``: real layer shapes, few layers, random weights,
its MLPs computed by `FFN` over the same parameters, and densities like those of the activations in tests/data."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks import data
from benchmarks.models_parts import FFN, Choice, LanguageModel

# How Nemotron-H-8B begins ("M": Mamba, "-": MLP, "*": attention); the whole is 24 M, 24 -, 4 *.
PATTERN = "M-M-M-M*-"
MAMBA = {
    "fused": "mamba_ssm's kernels",
    "chunked": "chunked_scan of benchmarks/models_nemotron.py, recomputed in backward",
    "reference": "transformers' reference path",
}
# Of Nemotron-H-8B, apart from the vocabulary, which is cut like the depth.
SHAPES = {
    "vocab_size": 16384,
    "hidden_size": 4096,
    "intermediate_size": 21504,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "ssm_state_size": 128,
    "n_groups": 8,
    "chunk_size": 128,
}
QUICK_SHAPES = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 640,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "mamba_num_heads": 8,
    "mamba_head_dim": 32,
    "ssm_state_size": 16,
    "n_groups": 2,
    "chunk_size": 32,
}


class Missing(Exception):
    """There is no Nemotron-H on this machine; says why."""


def fastest_mamba() -> str:
    installed = all(importlib.util.find_spec(name) for name in ("mamba_ssm", "causal_conv1d"))
    return "fused" if installed else "chunked"


def is_mlp(module: nn.Module) -> bool:
    return all(isinstance(getattr(module, name, None), nn.Linear) for name in ("up_proj", "down_proj"))


def swap_mlps(layers: nn.ModuleList, choice: Choice) -> None:
    """Puts an FFN over the same two linear layers in place of every MLP."""
    for layer in layers:
        if is_mlp(layer.mixer):
            layer.mixer = FFN(layer.mixer.up_proj, layer.mixer.down_proj, choice)


@torch.no_grad()
def set_densities(model: LanguageModel, tokens: Tensor, densities: list[float]) -> None:
    """Shifts the first bias of each MLP so that the given share of what it sees is positive, in one forward. It is not
    trained, as the model has none."""
    wanted = iter(densities)

    def shift(module: nn.Module, inputs: tuple[Tensor]) -> None:
        h = module.pre_activation(inputs[0]).flatten()
        sample = h[:: max(1, len(h) // 1_000_003)].float()  # odd: of all columns
        rank = max(1, round(len(sample) * (1 - next(wanted))))
        module.up.bias.sub_(sample.kthvalue(rank).values).requires_grad_(False)

    handles = [ffn.register_forward_pre_hook(shift) for ffn in model.ffns()]
    model.body(tokens)
    for handle in handles:
        handle.remove()


def real_densities(count: int) -> list[float]:
    """Of the layers in tests/data, repeated to `count`."""
    found = [torch.count_nonzero(h > 0).item() / h.numel() for h in data.real_layers().values()]
    return [found[index % len(found)] for index in range(count)]


def make(pattern: str, mamba: str, quick: bool, device: torch.device, dtype: torch.dtype) -> tuple[LanguageModel, bool]:
    """The model, and whether its output after the swap of the MLPs was Hugging Face's to the last bit."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # kernels are not to be looked for in the network
    try:
        from transformers import NemotronHConfig, NemotronHForCausalLM
    except ImportError as error:
        raise Missing(str(error).splitlines()[0]) from error
    config = NemotronHConfig(
        **(QUICK_SHAPES if quick else SHAPES),
        hybrid_override_pattern=pattern,
        mlp_hidden_act="relu2",
        mlp_bias=True,  # Nemotron-H has none: here it sets the density
        use_mamba_kernels=mamba == "fused",
        use_cache=False,
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    with device:
        network = NemotronHForCausalLM(config)
    network = network.to(device, dtype).train()
    base, choice = network.base_model, Choice()
    if mamba == "chunked":
        for layer in base.layers:
            if hasattr(layer.mixer, "A_log"):
                layer.mixer.forward = _chunked_forward(layer.mixer)
    tokens = torch.arange(2 * 4 * config.chunk_size, device=device).view(2, -1) % config.vocab_size
    head = network.get_output_embeddings()
    model = LanguageModel(base.get_input_embeddings(), base.layers, base.norm_f, head, choice)
    with torch.no_grad():
        before = model.body(tokens)
        swap_mlps(base.layers, choice)
        equal = torch.equal(model.body(tokens), before)
    set_densities(model, tokens, real_densities(pattern.count("-")))
    return model, equal


def optimizers(model: LanguageModel, fused: bool) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW(model.parameters(), lr=1e-5, betas=(0.9, 0.95), weight_decay=0.0, fused=fused)]


def _chunked_forward(mixer: Any) -> Any:
    def forward(hidden_states: Tensor, *_: object, **__: object) -> Tensor:
        projected = mixer.in_proj(hidden_states)
        # Recomputed in backward from the projection, as mamba_ssm's kernels do.
        y = checkpoint(_scan_part, mixer, projected, use_reentrant=False, preserve_rng_state=False)
        return mixer.out_proj(y)

    return forward


def _scan_part(mixer: Any, projected: Tensor) -> Tensor:
    """What a Mamba-2 layer does between its two projections."""
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
