"""Inputs: pre-activations of a given density, and real ones."""

from __future__ import annotations

from pathlib import Path
from statistics import NormalDist

import torch
from torch import Tensor

REAL = Path(__file__).resolve().parents[1] / "tests" / "data" / "activations.safetensors"

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def bias_for(density: float) -> float:
    """What to add to standard normal numbers so that this share of them is positive."""
    return NormalDist().inv_cdf(density)


def pre_activations(
    shape: tuple[int, ...], density: float, dtype: torch.dtype, device: torch.device, seed: int
) -> Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    values = torch.randn(shape, generator=generator, device=device)
    return values.add_(bias_for(density)).to(dtype)


def real_pre_activations(shape: tuple[int, ...], device: torch.device, start: int = 0) -> Tensor:
    """BF16 pre-activations of a trained model (tests/data/README.md), repeated; `start`: the first element of them."""
    from safetensors.torch import load_file

    once = torch.cat([t.flatten() for t in load_file(REAL).values()]).roll(-start).to(device)
    count = torch.Size(shape).numel()
    return once.repeat(-(-count // once.numel()))[:count].view(shape)
