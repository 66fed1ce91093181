"""What the edge path costs: BF16, density 0.2, tight, on a slice that starts at an odd element and has an odd length,
against an aligned tensor of the same data in the same rounds.

compress is the operator that works in place, so that reads and writes are both unaligned; so is gradient. restore
writes to a new, aligned tensor of odd length.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

import bitsparse
from benchmarks import data, timing
from benchmarks.bench import SETS, Bench
from benchmarks.fused import ACTIVATIONS, eager_gradient, gradient_runs, ops, restore_runs, settle
from benchmarks.timing import Run, same_bits

_ACTIVATION, _CODEC = "relu_squared", "tight"
_MOST = 1.02  # of the aligned time


@dataclass
class Layout:
    """Tensors of one alignment that kernels change in place; `refresh` makes their contents anew."""

    tensors: list[Tensor]
    sources: list[Tensor]

    @classmethod
    def aligned(cls, sources: list[Tensor]) -> Layout:
        return cls([torch.empty_like(t) for t in sources], sources)

    @classmethod
    def odd(cls, sources: list[Tensor]) -> Layout:
        count = sources[0].numel()
        length = count - 1 + count % 2
        flat = [torch.empty(1 + length, dtype=t.dtype, device=t.device) for t in sources]
        return cls([t[1:] for t in flat], [t[:length] for t in sources])

    def refresh(self) -> None:
        for tensor, source in zip(self.tensors, self.sources, strict=True):
            tensor.copy_(source)

    def compresses(self) -> list[Run]:
        return [partial(ops._compress_activation_.default, t, _ACTIVATION, _CODEC) for t in self.tensors]

    def leases(self) -> list[Tensor]:
        self.refresh()
        return [run() for run in self.compresses()]


def check_exact(bench: Bench, layout: Layout) -> None:
    source = layout.sources[0]
    lease, tensor = layout.leases()[0], layout.tensors[0]
    expected = ACTIVATIONS[_ACTIVATION](source)
    bench.note_exact("edge/compress", same_bits(tensor, expected))
    timing.poison(source)
    restored = restore_runs([lease], source, _ACTIVATION)[0]()
    bench.note_exact("edge/restore", same_bits(restored, expected))
    tensor.copy_(source)  # as a gradient
    gradient_runs([tensor], [lease], _ACTIVATION)[0]()
    bench.note_exact("edge/gradient", same_bits(tensor, eager_gradient(_ACTIVATION, source, source)))


def measure(bench: Bench) -> None:
    sources = [data.pre_activations((bench.numel,), 0.2, torch.bfloat16, bench.device, seed) for seed in range(SETS)]
    layouts = {"aligned": Layout.aligned(sources), "odd": Layout.odd(sources)}

    def refresh() -> None:
        for layout in layouts.values():
            layout.refresh()

    def compare(operation: str, runs: dict[str, list[Run]], prepare: Run | None) -> None:
        times = timing.time_in_turns(runs, bench.device, SETS * bench.rounds, warm_up=SETS, prepare=prepare)
        name, aligned, odd = f"edge/{operation}", times["aligned"], times["odd"]
        bench.result.add(f"{name}/aligned_ms", aligned.median, "ms")
        bench.result.add_times(f"{name}/ms", odd)
        ratio = odd.median / aligned.median
        bench.result.add(f"{name}/of_aligned", ratio, "of the aligned time", bench.target(_MOST), "<=")

    with bitsparse.Arena(bench.device) as arena:
        settle(arena, [layout.leases for layout in layouts.values()])
        check_exact(bench, layouts["odd"])
        compare("compress", {name: layout.compresses() for name, layout in layouts.items()}, refresh)
        leases = {name: layout.leases() for name, layout in layouts.items()}
        like = {name: layout.tensors[0] for name, layout in layouts.items()}
        compare("restore", {name: restore_runs(leases[name], like[name], _ACTIVATION) for name in layouts}, None)
        gradients = {name: gradient_runs(layout.tensors, leases[name], _ACTIVATION) for name, layout in layouts.items()}
        compare("gradient", gradients, refresh)
        timing.synchronize(bench.device)
