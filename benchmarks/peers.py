"""The same tensors by other means, in the same run: BF16 at density 0.2, and real activations.

eager, compiled: relu(h)² and its gradient, which keep everything. mask: a byte an element, and boolean indexing.
bitmask: the same with eight elements to a byte. nvcomp-*: NVIDIA's general compressors on the bytes of relu(h). A
measurement's bytes are those that are needed, as for bitsparse: the dense tensors and what is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import nvcomp, timing
from benchmarks.bench import Bench
from benchmarks.fused import Case, Inputs
from benchmarks.timing import poison, same_bits

_SLOW_ROUNDS = 3  # of what takes many times longer than bitsparse

Kept = tuple[Tensor, ...]


def pack_mask(x: Tensor) -> Kept:
    mask = x != 0
    return mask, x[mask]


def unpack_mask(mask: Tensor, values: Tensor) -> Tensor:
    out = values.new_zeros(mask.shape)
    out[mask] = values
    return out


def _bit_values(device: torch.device) -> Tensor:
    return 2 ** torch.arange(8, dtype=torch.uint8, device=device)


def pack_bitmask(x: Tensor) -> Kept:
    """Of a flat tensor."""
    mask = x != 0
    padding = -mask.numel() % 8
    padded = F.pad(mask, (0, padding)) if padding else mask
    bits = (padded.view(-1, 8) * _bit_values(x.device)).sum(-1, dtype=torch.uint8)
    return bits, x[mask]


def unpack_bitmask(numel: int, bits: Tensor, values: Tensor) -> Tensor:
    mask = (bits.unsqueeze(-1) & _bit_values(bits.device)) != 0
    return unpack_mask(mask.flatten()[:numel], values)


def relu_squared(h: Tensor) -> Tensor:
    return F.relu(h).square()


def gradient(h: Tensor, grad: Tensor) -> Tensor:
    return grad * (2 * F.relu(h))


def measure_eager(bench: Bench, name: str, inputs: Inputs) -> None:
    """With the backward of autograd: two kernels forward, several backward."""
    dense = inputs.h[0].nbytes
    bench.note(f"{name}/compress", 2 * dense, bench.time([partial(relu_squared, t) for t in inputs.h]))
    leaves = [t.detach().requires_grad_() for t in inputs.h]
    with torch.enable_grad():
        outputs = [relu_squared(leaf) for leaf in leaves]
    backwards = [
        partial(torch.autograd.grad, output, leaf, inputs.fresh, retain_graph=True)
        for output, leaf in zip(outputs, leaves, strict=True)
    ]
    bench.note(f"{name}/gradient", 3 * dense, bench.time(backwards))


def measure_compiled(bench: Bench, name: str, inputs: Inputs) -> None:
    """torch.compile of the formulas: one kernel each."""
    dense = inputs.h[0].nbytes
    forward = torch.compile(relu_squared, fullgraph=True, dynamic=False)
    backward = torch.compile(gradient, fullgraph=True, dynamic=False)
    same = same_bits(forward(inputs.h[0]), relu_squared(inputs.h[0]))
    bench.result.add(f"{name}/same_bits", int(same), "1 = as eager, to the last bit")
    bench.note(f"{name}/compress", 2 * dense, bench.time([partial(forward, t) for t in inputs.h]))
    backwards = [partial(backward, t, inputs.fresh) for t in inputs.h]
    bench.note(f"{name}/gradient", 3 * dense, bench.time(backwards))


def measure_mask(
    bench: Bench, name: str, relu: list[Tensor], pack: Callable[[Tensor], Kept], unpack: Callable[..., Tensor]
) -> None:
    kept = [pack(t) for t in relu]
    size = sum(t.nbytes for t in kept[0])
    bench.note_exact(name, same_bits(unpack(*kept[0]), relu[0]))
    bench.note_bits(name, size)
    needed = relu[0].nbytes + size
    bench.note(f"{name}/compress", needed, bench.time([partial(pack, t) for t in relu], rounds=_SLOW_ROUNDS))
    bench.note(f"{name}/restore", needed, bench.time([partial(unpack, *k) for k in kept], rounds=_SLOW_ROUNDS))


def measure_nvcomp(bench: Bench, base: str, relu: list[Tensor]) -> None:
    """Times include the memory that its Python API allocates, here from PyTorch's allocator."""
    with nvcomp.session(bench.device):
        for algorithm, options in nvcomp.ALGORITHMS.items():
            name = f"{base}/nvcomp-{algorithm}"
            codec = nvcomp.Codec(bench.device, **options)
            encoded = [codec.encode(t) for t in relu]
            poison(relu[0])
            bench.note_exact(name, same_bits(codec.decode(encoded[0], relu[0]), relu[0]))
            size = encoded[0].buffer_size
            bench.note_bits(name, size)
            encodes = bench.time([partial(codec.encode, t) for t in relu], rounds=_SLOW_ROUNDS)
            bench.note(f"{name}/compress", relu[0].nbytes + size, encodes)
            decodes = [partial(codec.decode, e, t) for e, t in zip(encoded, relu, strict=True)]
            bench.note(f"{name}/restore", relu[0].nbytes + size, bench.time(decodes, rounds=_SLOW_ROUNDS))


def _cases(bench: Bench) -> Iterator[tuple[str, Inputs]]:
    for case in (Case("bf16", 0.2), Case("bf16", None)):
        name = f"peers/{case.name.removeprefix('bf16/')}"
        print(f"kernels: {name}", flush=True)
        yield name, Inputs.make(bench, case)


def measure(bench: Bench) -> None:
    for base, inputs in _cases(bench):
        bench.note_kept(base, inputs.kept())
        measure_eager(bench, f"{base}/eager", inputs)
        if bench.compiled:
            measure_compiled(bench, f"{base}/compiled", inputs)
        relu = [F.relu(t).flatten() for t in inputs.h]
        del inputs
        measure_mask(bench, f"{base}/mask", relu, pack_mask, unpack_mask)
        measure_mask(bench, f"{base}/bitmask", relu, pack_bitmask, partial(unpack_bitmask, bench.numel))
        timing.synchronize(bench.device)


def measure_nvcomp_cases(bench: Bench) -> None:
    """A group of its own: whatever another library does must not cost the rest."""
    installed = bench.on_gpu and nvcomp.installed()
    bench.result.add("peers/nvcomp_installed", int(installed), "1 = nvidia.nvcomp is there and was measured")
    if not installed:
        print("kernels: nvCOMP (nvidia.nvcomp) is not installed or there is no GPU: not measured", flush=True)
        return
    for base, inputs in _cases(bench):
        relu = [F.relu(t).flatten() for t in inputs.h]
        del inputs
        measure_nvcomp(bench, base, relu)
