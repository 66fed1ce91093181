"""pack and unpack, the operators behind bitsparse.compress, for any tensor: as a whole, and their kernel alone.

The operators have to know the exact size on the host: they synchronise and put blobs in order, and that is part of
`pack` and `unpack`. `pack_kernel` and `unpack_kernel` are the durations of the compress and the restore kernel in them
(GPU only). A measurement's bytes are those of the dense tensor and of the packed one without its header.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

import bitsparse
from benchmarks import data, device_events
from benchmarks.bench import FEW_DENSITIES, SETS, Bench, by_codec
from benchmarks.fused import ops
from benchmarks.timing import Run, poison, same_bits

_TARGET = 0.88  # of the kernels alone
_OPERATOR_ROUNDS = 4  # enough for what has no target
_HEADER_BYTES = 64


@dataclass(frozen=True)
class Case:
    dtype: str
    keep: str
    density: float

    @property
    def name(self) -> str:
        return f"general/{self.dtype}/{self.keep}/density={self.density:g}"

    def tensors(self, bench: Bench) -> list[Tensor]:
        """keep "nonzero": kept values of both signs. keep "positive": pre-activations, of which relu lets some through."""
        make = data.signed_activations if self.keep == "nonzero" else data.pre_activations
        dtype = data.ALL_DTYPES[self.dtype]
        return [make(bench.shape, self.density, dtype, bench.device, seed) for seed in range(SETS)]

    def expected(self, t: Tensor) -> Tensor:
        if self.keep == "nonzero":
            return t
        values = t.float()
        return torch.where(values > 0, values, 0.0).to(t.dtype)  # relu on a CPU lets -0.0 through


def measure_case(bench: Bench, case: Case) -> None:
    print(f"kernels: {case.name}", flush=True)
    tensors = case.tensors(bench)
    size, dtype, dense = list(bench.shape), tensors[0].dtype, tensors[0].nbytes
    expected = case.expected(tensors[0])
    jobs: dict[str, list[Run]] = {}
    needed: dict[str, int] = {}
    for codec, name in by_codec(case.name):
        packed = [ops.pack.default(t, codec, case.keep) for t in tensors]
        poison(expected)
        bench.note_exact(name, same_bits(ops.unpack.default(packed[0], size, dtype, True), expected))
        payload = packed[0].nbytes - _HEADER_BYTES
        bench.note_bits(name, payload)
        jobs[f"{name}/pack"] = [partial(ops.pack.default, t, codec, case.keep) for t in tensors]
        jobs[f"{name}/unpack"] = [partial(ops.unpack.default, p, size, dtype, True) for p in packed]
        needed |= {f"{name}/pack": dense + payload, f"{name}/unpack": dense + payload}
        if codec == "tight":
            bench.note_kept(case.name, bitsparse.CompressedTensor(packed[0], bench.shape).density)
    for name, runs in jobs.items():
        bench.note(name, needed[name], bench.time(runs, rounds=min(_OPERATOR_ROUNDS, bench.rounds)))
    if bench.on_gpu:
        for name, measured in device_events.kernel_times(jobs, bench.rounds).items():
            bench.note(f"{name}_kernel", needed[name], measured, _TARGET)


def measure_general(bench: Bench) -> None:
    for density in bench.chosen(FEW_DENSITIES):
        measure_case(bench, Case("bf16", "nonzero", density))


def measure_fp8(bench: Bench) -> None:
    for dtype in data.FP8_DTYPES:
        for keep in ("positive", "nonzero"):
            for density in bench.chosen(FEW_DENSITIES):
                measure_case(bench, Case(dtype, keep, density))
