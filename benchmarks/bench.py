"""What the groups of ``python -m benchmarks kernels`` share: one run's settings, its copy, and rows from times."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from benchmarks import data, results, timing
from benchmarks.timing import Run, Timing
from bitsparse.nn import CODECS

SETS = 3  # of inputs, taking turns: none finds its data in the cache
DENSITIES = (0.05, 0.1, 0.2, 0.5)
FEW_DENSITIES = (0.05, 0.2, 0.5)


@dataclass
class Measurement:
    name: str
    needed_bytes: float
    timing: Timing
    target: float | None = None


@dataclass
class Bench:
    """One run of the command. Targets hold on a GPU, at the default size only."""

    shape: tuple[int, int]
    device: torch.device
    rounds: int
    targets: bool
    result: results.Result
    densities: Sequence[float] | None = None  # in place of each group's own
    quick: bool = False
    compiled: bool = True
    measured: list[Measurement] = field(default_factory=list)
    copies: list[float] = field(default_factory=list)  # ms
    copy_bytes: int = 0

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def numel(self) -> int:
        return self.shape[0] * self.shape[1]

    def chosen(self, densities: Sequence[float]) -> Sequence[float]:
        return self.densities or ((0.2,) if self.quick else densities)

    def time(self, runs: Sequence[Run], prepare: Run | None = None, rounds: int | None = None) -> Timing:
        return timing.time_sets(runs, self.device, rounds or self.rounds, prepare=prepare)

    def target(self, value: float | None) -> float | None:
        return value if self.targets else None

    def note(self, name: str, needed_bytes: float, measured: Timing, target: float | None = None) -> None:
        self.measured.append(Measurement(name, needed_bytes, measured, self.target(target)))

    def note_exact(self, name: str, exact: bool) -> None:
        self.result.add(f"{name}/exact", int(exact), "1 = to the last bit", 1)

    def note_bits(self, name: str, nbytes: float) -> None:
        self.result.add(f"{name}/bits_per_element", 8 * nbytes / self.numel, "bits")

    def note_kept(self, name: str, kept: float) -> None:
        self.result.add(f"{name}/kept", kept, "share of elements")

    def time_copy(self) -> None:
        """The yardstick: torch's copy_ of a BF16 tensor of this run's shape, before and after each group."""
        sources = [data.pre_activations(self.shape, 0.5, torch.bfloat16, self.device, seed) for seed in range(SETS)]
        out = torch.empty_like(sources[0])
        self.copy_bytes = 2 * out.nbytes
        self.copies += self.time([partial(out.copy_, source) for source in sources]).samples

    def finish(self) -> None:
        """Turns times into rows, now that the copy is known."""
        if not self.copies:
            return
        add = self.result.add
        copy = self.copy_bytes / statistics.median(self.copies) / 1e6
        times = Timing(self.copies)
        add("copy/ms", times.median, "ms, a BF16 tensor")
        add("copy/gb_per_s", copy, "GB/s, read and written")
        add("copy/gb_per_s_p10", self.copy_bytes / times.percentile(90) / 1e6, "GB/s")
        add("copy/gb_per_s_p90", self.copy_bytes / times.percentile(10) / 1e6, "GB/s")
        for m in self.measured:
            ms = m.timing.median
            self.result.add_times(f"{m.name}/ms", m.timing)
            add(f"{m.name}/gb_per_s", m.needed_bytes / ms / 1e6, "GB/s")
            add(f"{m.name}/of_copy", m.needed_bytes / ms / 1e6 / copy, "fraction of copy bandwidth", m.target)


def by_codec(name: str) -> Iterator[tuple[str, str]]:
    """Each codec, and `name` with it."""
    return ((codec, f"{name}/{codec}") for codec in CODECS)
