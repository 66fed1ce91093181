"""The kernels of a block, through the arena: compress fused with the activation, restore to the activation, gradient in
place.

A measurement's bytes are those it needs, each once: dense inputs and outputs, and the payload. Plain ReLU's gradient
needs only to know which elements are kept: of the payload, at most one bit an element counts.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

import bitsparse
from benchmarks import data, timing
from benchmarks.bench import DENSITIES, FEW_DENSITIES, SETS, Bench, by_codec
from benchmarks.timing import Run, poison, same_bits

ops = torch.ops.bitsparse

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu_squared": lambda h: F.relu(h).square(), "relu": F.relu}

_BF16 = {"compress": 0.93, "restore": 0.90, "gradient": 0.95}
_SPARSE_RESTORE = 0.88  # at densities up to 0.1
_OTHERS = 0.88
_NARROW_OR_WIDE = ("fp32", *data.FP8_DTYPES)
_FP16_MARGIN = 0.02


@dataclass(frozen=True)
class Case:
    dtype: str
    density: float | None  # None: real pre-activations
    activation: str = "relu_squared"

    @property
    def name(self) -> str:
        prefix = "" if self.activation == "relu_squared" else f"{self.activation}/"
        return f"{prefix}{self.dtype}/density={'real' if self.density is None else f'{self.density:g}'}"

    def target(self, operation: str) -> float:
        """Fraction of copy that an operation is to reach."""
        if self.dtype in _NARROW_OR_WIDE or self.activation != "relu_squared":
            return _OTHERS
        sparse = operation == "restore" and (self.density or 1) <= 0.1
        target = _SPARSE_RESTORE if sparse else _BF16[operation]
        return round(target - (_FP16_MARGIN if self.dtype == "fp16" else 0), 2)


@dataclass
class Inputs:
    """`fresh` stays as it is; `grad` is multiplied in place, so it is made anew from `fresh` before each round: values
    neither decay to zero nor grow."""

    h: list[Tensor]
    fresh: Tensor
    grad: list[Tensor]

    @classmethod
    def make(cls, bench: Bench, case: Case) -> Inputs:
        shape, device = bench.shape, bench.device
        if case.density is None:
            h = [data.real_pre_activations(shape, device, 1 + 4999 * seed) for seed in range(SETS)]
        else:
            dtype = data.ALL_DTYPES[case.dtype]
            h = [data.pre_activations(shape, case.density, dtype, device, seed) for seed in range(SETS)]
        fresh = data.pre_activations(shape, 0.5, h[0].dtype, device, SETS)  # standard normal
        return cls(h, fresh, [torch.empty_like(fresh) for _ in h])

    def refresh(self) -> None:
        for grad in self.grad:
            grad.copy_(self.fresh)

    def kept(self) -> float:
        return statistics.mean(torch.count_nonzero(t.float() > 0).item() / t.numel() for t in self.h)


def saturated(values: Tensor, dtype: torch.dtype) -> Tensor:
    """What an 8-bit result is: float arithmetic, rounded once. These inputs have no NaNs."""
    largest = torch.finfo(dtype).max
    return values.clamp_(-largest, largest).to(dtype)


def eager_activation(activation: str, h: Tensor) -> Tensor:
    if h.itemsize == 1:
        return saturated(ACTIVATIONS[activation](h.float()), h.dtype)
    return ACTIVATIONS[activation](h)


def eager_gradient(activation: str, h: Tensor, grad: Tensor) -> Tensor:
    if h.itemsize == 1:
        return saturated(eager_gradient(activation, h.float(), grad.float()), h.dtype)
    leaf = h.detach().requires_grad_()
    with torch.enable_grad():
        return torch.autograd.grad(ACTIVATIONS[activation](leaf), leaf, grad)[0]


def compress(h: Tensor, activation: str, codec: str) -> None:
    """With the end of the lease, which enqueues the release of its pages."""
    ops._compress_activation.default(h, activation, codec)


def settle(arena: bitsparse.Arena, runs: Sequence[Run]) -> None:
    """Lets the arena grow to what it needs and settle there."""
    for _ in range(8):
        before = arena.memory_stats(synchronize=True)
        for run in runs:
            run()
        after = arena.memory_stats(synchronize=True)
        if all(before[key] == after[key] for key in ("waits", "growths", "capacity")):
            return


def check_exact(bench: Bench, arena: bitsparse.Arena, inputs: Inputs, activation: str, codec: str, name: str) -> float:
    """Checks all three kernels on the first set; returns the payload's bytes."""
    h, grad = inputs.h[0], inputs.fresh.clone()
    expected = eager_activation(activation, h)
    poison(h)
    activated, lease = ops._compress_activation.default(h, activation, codec)
    bench.note_exact(f"{name}/compress", same_bits(activated, expected))
    del activated
    poison(h)
    restored = ops._restore_activation.default(lease, list(h.shape), h.dtype, activation)
    bench.note_exact(f"{name}/restore", same_bits(restored, expected))
    del restored, expected
    ops._activation_gradient_.default(grad, lease, activation)
    bench.note_exact(f"{name}/gradient", same_bits(grad, eager_gradient(activation, h, inputs.fresh)))
    return float(arena.memory_stats(synchronize=True)["payload_bytes"])


def restore_runs(leases: Sequence[Tensor], like: Tensor, activation: str) -> list[Run]:
    size = list(like.shape)
    return [partial(ops._restore_activation.default, lease, size, like.dtype, activation) for lease in leases]


def gradient_runs(grads: Sequence[Tensor], leases: Sequence[Tensor], activation: str) -> list[Run]:
    pairs = zip(grads, leases, strict=True)
    return [partial(ops._activation_gradient_.default, grad, lease, activation) for grad, lease in pairs]


def measure_codec(bench: Bench, case: Case, inputs: Inputs, codec: str, name: str) -> None:
    h, dense, activation = inputs.h, inputs.h[0].nbytes, case.activation
    add = bench.result.add
    # A new arena: what it learned of denser tensors must not serve here, nor of sparser ones.
    arena = bitsparse.Arena(bench.device)
    with arena:
        runs = [partial(compress, t, activation, codec) for t in h]
        settle(arena, runs)
        payload = check_exact(bench, arena, inputs, activation, codec, name)
        bench.note_bits(name, payload)

        before = arena.memory_stats(synchronize=True)
        bench.note(f"{name}/compress", 2 * dense + payload, bench.time(runs), case.target("compress"))
        after = arena.memory_stats(synchronize=True)
        add(f"{name}/waits", after["waits"] - before["waits"], "times the host waited, timed runs", 0, "<=")
        add(f"{name}/spilled", after["spilled"], "bytes in host memory", 0, "<=")

        leases = [ops._compress_activation.default(t, activation, codec)[1] for t in h]
        restores = bench.time(restore_runs(leases, h[0], activation))
        bench.note(f"{name}/restore", dense + payload, restores, case.target("restore"))
        gradients = bench.time(gradient_runs(inputs.grad, leases, activation), prepare=inputs.refresh)
        read = min(payload, bench.numel / 8) if activation == "relu" else payload
        bench.note(f"{name}/gradient", 2 * dense + read, gradients, case.target("gradient"))
        timing.synchronize(bench.device)


def measure_case(bench: Bench, case: Case) -> None:
    print(f"kernels: {case.name}", flush=True)
    inputs = Inputs.make(bench, case)
    bench.note_kept(case.name, inputs.kept())
    for codec, name in by_codec(case.name):
        measure_codec(bench, case, inputs, codec, name)


def measure_bf16(bench: Bench) -> None:
    for density in (*bench.chosen(DENSITIES), None):
        measure_case(bench, Case("bf16", density))


def measure_fp16(bench: Bench) -> None:
    for density in bench.chosen(DENSITIES):
        measure_case(bench, Case("fp16", density))


def measure_fp32(bench: Bench) -> None:
    for density in bench.chosen(DENSITIES):
        measure_case(bench, Case("fp32", density))


def measure_fp8(bench: Bench) -> None:
    for dtype in data.FP8_DTYPES:
        for density in bench.chosen(FEW_DENSITIES):
            measure_case(bench, Case(dtype, density))


def measure_relu(bench: Bench) -> None:
    for density in bench.chosen(FEW_DENSITIES):
        measure_case(bench, Case("bf16", density, "relu"))
    for dtype in ("fp16", "fp32"):
        measure_case(bench, Case(dtype, 0.2, "relu"))
