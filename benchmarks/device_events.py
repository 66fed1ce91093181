"""What the device did meanwhile, from torch.profiler: single kernels' durations, and how many launches there were.

Groups that use this come last in a run: launching may cost the host more once the profiler was on.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.timing import Run, Timing

OURS = "compress_kernel|restore_kernel"


@dataclass(frozen=True)
class Event:
    name: str
    start: float  # µs
    ms: float


def recorded(work: Run) -> list[Event]:
    """Kernels, copies and memsets of `work`, in the order of their start."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        work()
        torch.cuda.synchronize()
    events = [
        Event(event.name, event.time_range.start, event.time_range.elapsed_us() / 1e3)
        for event in profiler.events()
        # Names have a parameter list, "Memset (Device)" included; the profiler's own overhead has none.
        if event.device_type == DeviceType.CUDA and "(" in event.name
    ]
    return sorted(events, key=lambda event: event.start)


def assign(names: Sequence[str | None], events: Sequence[Event]) -> dict[str, Timing]:
    """Durations by name, of events that belong to the names one by one; None: to nobody."""
    if len(events) != len(names):
        raise RuntimeError(f"profiler: expected {len(names)} kernels, got {[event.name for event in events]}")
    samples: dict[str, list[float]] = {}
    for name, event in zip(names, events, strict=True):
        if name is not None:
            samples.setdefault(name, []).append(event.ms)
    return {name: Timing(values) for name, values in samples.items()}


def kernel_times(jobs: Mapping[str, Sequence[Run]], rounds: int) -> dict[str, Timing]:
    """Of the one compress or restore kernel that each run launches among other things. A job's runs do the same with
    different data and take turns; its first round is for warming up."""
    schedule = [
        (name if number else None, run) for name, runs in jobs.items() for number in range(1 + rounds) for run in runs
    ]

    def work() -> None:
        for _, run in schedule:
            run()

    ours = [event for event in recorded(work) if re.search(OURS, event.name)]
    return assign([name for name, _ in schedule], ours)
