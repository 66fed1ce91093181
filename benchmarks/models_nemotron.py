"""Nemotron-H by Hugging Face's classes, for ``python -m benchmarks models``: real layer shapes, few layers, random weights,
its MLPs computed by `FFN` over the same parameters, and densities like those of the activations in tests/data."""

from __future__ import annotations

import importlib.util
import os

import torch
from torch import Tensor, nn

from benchmarks import data
from benchmarks import mamba as mamba_layer
from benchmarks.models_parts import FFN, Choice, LanguageModel

# How Nemotron-H-8B begins ("M": Mamba, "-": MLP, "*": attention); the whole is 24 M, 24 -, 4 *.
PATTERN = "M-M-M-M*-"
MAMBA = {
    "fused": "mamba_ssm's kernels",
    "chunked": "benchmarks/mamba.py, recomputed in backward",
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
                layer.mixer.forward = mamba_layer.forward_of(layer.mixer)
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
