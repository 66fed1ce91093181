"""Bits an element of real activations, layer by layer, against what order-0 coding could reach.

The bound treats elements as independent: the entropy of "is it kept" plus, for the share that is kept, the entropy of
the values' bit patterns, both counted in that layer. A packed tensor counts without its 64-byte header.
"""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks import data
from benchmarks.bench import Bench, by_codec
from benchmarks.fused import ops
from benchmarks.timing import same_bits

_HEADER_BYTES = 64
_MOST = 1.15  # tight, of the bound


def entropy(counts: Tensor) -> float:
    """Bits a symbol, of symbols that occur so often."""
    shares = counts[counts > 0].double() / counts.sum()
    return -(shares * shares.log2()).sum().item()


def order_0_bound(relu: Tensor) -> dict[str, float]:
    kept = relu[relu != 0].view(torch.int16)
    density = kept.numel() / relu.numel()
    mask = entropy(torch.tensor([kept.numel(), relu.numel() - kept.numel()]))
    values = entropy(kept.unique(return_counts=True)[1])
    return {"density": density, "mask_entropy": mask, "value_entropy": values, "bound": mask + density * values}


def measure(bench: Bench) -> None:
    units = {"density": "share of elements", "mask_entropy": "bits an element", "value_entropy": "bits a kept value"}
    for layer, h in data.real_layers().items():
        h = h.to(bench.device)
        relu = torch.relu(h)
        bound = order_0_bound(relu)
        for what, value in bound.items():
            bench.result.add(f"size/{layer}/{what}", value, units.get(what, "bits an element"))
        for codec, name in by_codec(f"size/{layer}"):
            packed = ops.pack.default(h, codec, "positive")
            unpacked = ops.unpack.default(packed, list(h.shape), h.dtype)
            bench.note_exact(name, same_bits(unpacked, relu))
            bits = 8 * (packed.nbytes - _HEADER_BYTES) / h.numel()
            target = _MOST if codec == "tight" else None  # on any device: both write the same bytes
            bench.result.add(f"{name}/bits", bits, "bits an element")
            bench.result.add(f"{name}/of_bound", bits / bound["bound"], "of the order-0 bound", target, "<=")
