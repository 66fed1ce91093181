"""How long something takes.

A GPU is timed with events, back to back over several sets of inputs, so that no run finds its data in the cache; the
queue is filled behind a sleeping kernel, so that the host's latency is not part of it. A CPU is timed with the host's
clock, the things to compare taking turns.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Run = Callable[[], object]

_CYCLES_PER_SECOND = 2e9  # of torch.cuda._sleep, at most
_FILL_SECONDS = 2e-3  # for the host to queue a round of large kernels

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@dataclass(frozen=True)
class Timing:
    """Milliseconds of each run."""

    samples: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    def percentile(self, percent: int) -> float:
        ordered = sorted(self.samples)
        return ordered[round((len(ordered) - 1) * percent / 100)]


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _cuda_round(
    runs: Sequence[Run], fill_seconds: float = _FILL_SECONDS, untimed: Sequence[int] | None = None
) -> list[float]:
    """`untimed`: how often each runs before it is timed."""
    times = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in runs]
    torch.cuda._sleep(int(fill_seconds * _CYCLES_PER_SECOND))
    for (start, end), run, before in zip(times, runs, untimed or [0] * len(runs), strict=True):
        for _ in range(before):
            run()
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in times]


def _host_round(runs: Sequence[Run]) -> list[float]:
    samples = []
    for run in runs:
        start = time.perf_counter()
        run()
        samples.append(1e3 * (time.perf_counter() - start))
    return samples


def time_sets(
    runs: Sequence[Run], device: torch.device, rounds: int, warm_up: int = 2, prepare: Run | None = None
) -> Timing:
    """`runs` do the same with different data; each round takes them all, after `prepare`, which is not timed."""
    samples: list[float] = []
    for number in range(warm_up + rounds):
        if prepare is not None:
            prepare()
        measured = _cuda_round(runs) if device.type == "cuda" else _host_round(runs)
        if number >= warm_up:
            samples += measured
    return Timing(samples)


def time_in_turns(
    functions: Mapping[str, Sequence[Run]],
    device: torch.device,
    rounds: int,
    warm_up: int = 1,
    prepare: Run | None = None,
    lead_seconds: float = 0.0,
) -> dict[str, Timing]:
    """All functions in each round, one after the other, so that a slow moment of the machine meets all of them. Each has
    one run or several that do the same with different data, which take turns too. Before each round `prepare`, which is
    not timed. `lead_seconds`: on a GPU each timed run follows untimed ones of the same for that long, at least one, and
    each round takes the functions in another order, as the clock that power and heat allow is that of the time before: a
    function would else be faster for coming after one that takes it easy."""
    samples: dict[str, list[float]] = {name: [] for name in functions}
    last: dict[str, float] = {}
    for number in range(warm_up + rounds):
        if prepare is not None:
            prepare()
        names, untimed = list(functions), None
        if lead_seconds:
            random.Random(number).shuffle(names)
            untimed = [max(1, math.ceil(1e3 * lead_seconds / last.get(name, math.inf))) for name in names]
        turn = [functions[name][number % len(functions[name])] for name in names]
        measured = _cuda_round(turn, untimed=untimed) if device.type == "cuda" else _host_round(turn)
        last = dict(zip(names, measured, strict=True))
        if number >= warm_up:
            for name, sample in last.items():
                samples[name].append(sample)
    return {name: Timing(values) for name, values in samples.items()}


def time_small(run: Run, device: torch.device, rounds: int, calls: int = 32) -> tuple[Timing, Timing | None]:
    """Of one call, in ms: what the host takes to queue it, and what the device takes when calls are queued back to back
    (None on a CPU, where the first is all)."""

    def queue() -> float:
        start = time.perf_counter()
        for _ in range(calls):
            run()
        return time.perf_counter() - start

    for _ in range(3):
        seconds = queue()
        synchronize(device)
    host, on_device = [], []
    for _ in range(rounds):
        if device.type == "cuda":
            on_device += _cuda_round([lambda: host.append(queue())], fill_seconds=1e-3 + 3 * seconds)
        else:
            host.append(queue())
    per_call = Timing([1e3 * value / calls for value in host])
    return per_call, Timing([value / calls for value in on_device]) if on_device else None


def same_bits(got: Tensor, expected: Tensor) -> bool:
    if (got.dtype, got.shape) != (expected.dtype, expected.shape):
        return False
    view = _BITS[got.element_size()]
    return torch.equal(got.detach().contiguous().view(view), expected.detach().contiguous().view(view))


def poison(like: Tensor) -> None:
    """The next allocation of this size finds 0xA5 in every byte, as the allocator reuses what was freed last."""
    torch.empty(like.numel() * like.element_size(), dtype=torch.uint8, device=like.device).fill_(0xA5)
