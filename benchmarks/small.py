"""What a call costs where the data is small: BF16, density 0.2, tight, 64 KiB to 16 MiB, against a copy.

All sizes fit in the cache, so these are costs of calls. Host: what a call takes to return. Device: what calls take that
are queued back to back. Launches: everything that one call puts on the device, copies and memsets included; compress
keeps its lease then, and the end of a lease is counted on its own.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

import bitsparse
from benchmarks import data, device_events, timing
from benchmarks.bench import Bench
from benchmarks.fused import compress, gradient_runs, ops, restore_runs, settle
from benchmarks.timing import Run

KIB = (64, 256, 1024, 4096, 16384)
_ACTIVATION, _CODEC = "relu_squared", "tight"
_CALLS = 8  # whose launches are counted


def _sizes(bench: Bench) -> tuple[int, ...]:
    return KIB[:2] if bench.quick else KIB


def _pre_activation(bench: Bench, kib: int) -> Tensor:
    return data.pre_activations((kib * 512,), 0.2, torch.bfloat16, bench.device, kib)


def _lease(h: Tensor) -> Tensor:
    return ops._compress_activation.default(h, _ACTIVATION, _CODEC)[1]


def _arena_runs(h: Tensor) -> dict[str, Run]:
    # 2 relu(h) is 1 or 0, so that multiplying in place again and again changes nothing.
    halves = _lease(torch.where(h > 0, 0.5, h))
    return {
        "restore": restore_runs([_lease(h)], h, _ACTIVATION)[0],
        "gradient": gradient_runs([torch.randn_like(h)], [halves], _ACTIVATION)[0],
    }


def measure_times(bench: Bench) -> None:
    for kib in _sizes(bench):
        h = _pre_activation(bench, kib)
        with bitsparse.Arena(bench.device) as arena:
            compress_run = partial(compress, h, _ACTIVATION, _CODEC)
            settle(arena, [compress_run])
            runs: dict[str, Run] = {
                "copy": partial(torch.empty_like(h).copy_, h),
                "relu_squared": lambda h=h: F.relu(h).square(),
                "compress": compress_run,
                **_arena_runs(h),
            }
            for name, run in runs.items():
                host, on_device = timing.time_small(run, bench.device, bench.rounds)
                bench.result.add(f"small/{kib}_KiB/{name}/host_us", 1e3 * host.median, "µs a call")
                if on_device is not None:
                    bench.result.add(f"small/{kib}_KiB/{name}/device_us", 1e3 * on_device.median, "µs a call")


def measure_launches(bench: Bench) -> None:
    if not bench.on_gpu:
        print("kernels: launches can be counted on a GPU only", flush=True)
        return
    for kib in _sizes(bench):
        _count_launches(bench, f"small/{kib}_KiB", _pre_activation(bench, kib))


def _count_launches(bench: Bench, name: str, h: Tensor) -> None:
    held: list[Tensor] = []

    def hold() -> None:
        held.extend(_lease(h) for _ in range(_CALLS))

    def hold_and_release() -> None:
        hold()
        held.clear()

    def count(operation: str, calls: Run) -> None:
        launches = len(device_events.recorded(calls)) / _CALLS
        bench.result.add(f"{name}/{operation}/launches", launches, "launches a call", 1, "<=")

    with bitsparse.Arena(bench.device) as arena:
        settle(arena, [hold_and_release])
        count("compress", hold)
        count("release", held.clear)
        for operation, run in _arena_runs(h).items():
            count(operation, lambda run=run: [run() for _ in range(_CALLS)])
