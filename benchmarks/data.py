"""Inputs: pre-activations of a given density, signed values, and real pre-activations."""

from __future__ import annotations

from pathlib import Path
from statistics import NormalDist

import torch
import torch.nn.functional as F
from torch import Tensor

REAL = Path(__file__).resolve().parents[1] / "tests" / "data" / "activations.safetensors"

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
FP8_DTYPES = {"e4m3fn": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
ALL_DTYPES = DTYPES | FP8_DTYPES


def bias_for(density: float) -> float:
    """What to add to standard normal numbers so that this share of them is positive."""
    return NormalDist().inv_cdf(density)


def scale_of(dtype: torch.dtype) -> float:
    """FP8 values are scaled into the dtype's range, as training does: the largest is 16 standard deviations."""
    return torch.finfo(dtype).max / 16 if dtype.itemsize == 1 else 1.0


def _normal(shape: tuple[int, ...], density: float, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    values = torch.randn(shape, generator=generator, device=generator.device)
    return values.add_(bias_for(density)).mul_(scale_of(dtype))


def pre_activations(
    shape: tuple[int, ...], density: float, dtype: torch.dtype, device: torch.device, seed: int
) -> Tensor:
    return _normal(shape, density, dtype, torch.Generator(device).manual_seed(seed)).to(dtype)


def signed_activations(
    shape: tuple[int, ...], density: float, dtype: torch.dtype, device: torch.device, seed: int
) -> Tensor:
    """relu of pre-activations, each kept value with a random sign; the others are +0."""
    generator = torch.Generator(device).manual_seed(seed)
    values = F.relu(_normal(shape, density, dtype, generator))
    negative = torch.randint(2, shape, generator=generator, device=device, dtype=torch.bool).logical_and_(values > 0)
    return torch.where(negative, -values, values).to(dtype)


def real_layers() -> dict[str, Tensor]:
    """BF16 pre-activations of four layers of a trained model (tests/data/README.md)."""
    from safetensors.torch import load_file

    layers = load_file(REAL)
    return {name: layers[name] for name in sorted(layers, key=lambda name: int(name.removeprefix("layer")))}


def real_pre_activations(shape: tuple[int, ...], device: torch.device, start: int = 0) -> Tensor:
    """All layers' real pre-activations, repeated; `start`: the first element of them."""
    once = torch.cat([t.flatten() for t in real_layers().values()]).roll(-start).to(device)
    count = torch.Size(shape).numel()
    return once.repeat(-(-count // once.numel()))[:count].view(shape)
