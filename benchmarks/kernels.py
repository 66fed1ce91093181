"""The kernels behind the blocks, through the arena, against a copy of the same run.

A measurement's bytes are those it needs: each input and output once, dense ones and the compressed payload. Bytes over
time, divided by the bandwidth of torch's copy_ measured before and after each group of the same run, is its fraction.
Every result is compared bit for bit with PyTorch's eager one, over poisoned memory, before it is timed.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

import bitsparse
from benchmarks import data, results, timing
from benchmarks.options import Reporting, chosen_device, noted_arguments, parser_of
from benchmarks.timing import Timing, poison, same_bits

CODECS = ("raw", "signless", "tight")
SETS = 3  # of inputs, taking turns
TARGETS = {"compress": 0.85, "restore": 0.80, "gradient": 0.85}  # BF16, density 0.2, at the default size
DEFAULT_SHAPE = (16384, 21504)
SMALL_KIB = (64, 256, 1024, 4096, 16384)

_ops = torch.ops.bitsparse
_ACTIVATION = "relu_squared"


@dataclass
class Measurement:
    name: str
    needed_bytes: float
    timing: Timing
    target: float | None = None


@dataclass
class Bench:
    """One run of the command."""

    shape: tuple[int, int]
    device: torch.device
    rounds: int
    targets: bool
    result: results.Result
    measured: list[Measurement] = field(default_factory=list)
    copies: list[float] = field(default_factory=list)  # GB/s

    def time(self, runs: Sequence[Callable[[], object]], prepare: Callable[[], object] | None = None) -> Timing:
        return timing.time_sets(runs, self.device, self.rounds, prepare=prepare)

    def note(self, name: str, needed_bytes: float, measured: Timing, target: float | None = None) -> None:
        self.measured.append(Measurement(name, needed_bytes, measured, target if self.targets else None))

    def note_exact(self, name: str, exact: bool) -> None:
        self.result.add(f"{name}/exact", int(exact), "1 = to the last bit", 1)

    def copy(self, sources: Sequence[Tensor]) -> None:
        out = torch.empty_like(sources[0])
        measured = self.time([partial(out.copy_, source) for source in sources])
        self.copies += [2 * out.nbytes / ms / 1e6 for ms in measured.samples]

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        """Turns times into rows, now that the copy is known."""
        if not self.copies:
            return
        copy = statistics.median(self.copies)
        ordered = sorted(self.copies)
        add = self.result.add
        add("copy/gb_per_s", copy, "GB/s, read and written")
        add("copy/gb_per_s_p10", ordered[len(ordered) // 10], "GB/s")
        add("copy/gb_per_s_p90", ordered[len(ordered) * 9 // 10], "GB/s")
        for m in self.measured:
            ms = m.timing.median
            add(f"{m.name}/ms", ms, "ms")
            add(f"{m.name}/ms_p10", m.timing.percentile(10), "ms")
            add(f"{m.name}/ms_p90", m.timing.percentile(90), "ms")
            add(f"{m.name}/gb_per_s", m.needed_bytes / ms / 1e6, "GB/s")
            add(f"{m.name}/of_copy", m.needed_bytes / ms / 1e6 / copy, "fraction of copy bandwidth", m.target)


@dataclass
class Inputs:
    """`fresh` stays as it is; `grad` is multiplied in place, so it is made anew from `fresh` before each round: values
    neither decay to zero nor grow."""

    h: list[Tensor]
    fresh: Tensor
    grad: list[Tensor]

    def refresh(self) -> None:
        for grad in self.grad:
            grad.copy_(self.fresh)


def eager_gradient(h: Tensor, grad: Tensor) -> Tensor:
    leaf = h.detach().requires_grad_()
    with torch.enable_grad():
        return torch.autograd.grad(F.relu(leaf).square(), leaf, grad)[0]


def make_inputs(bench: Bench, dtype: str, density: float | None) -> Inputs:
    """`density` None: real pre-activations."""
    if density is None:
        h = [data.real_pre_activations(bench.shape, bench.device, 1 + 4999 * seed) for seed in range(SETS)]
    else:
        h = [data.pre_activations(bench.shape, density, data.DTYPES[dtype], bench.device, seed) for seed in range(SETS)]
    fresh = data.pre_activations(bench.shape, 0.5, h[0].dtype, bench.device, SETS)  # standard normal
    return Inputs(h, fresh, [torch.empty_like(fresh) for _ in h])


def compress(h: Tensor, codec: str) -> None:
    """With the end of the lease, which enqueues the release of its pages."""
    _ops._compress_activation.default(h, _ACTIVATION, codec)


def settle(arena: bitsparse.Arena, runs: Sequence[Callable[[], object]]) -> None:
    """Lets the arena grow to what it needs and settle there."""
    for _ in range(8):
        before = arena.memory_stats(synchronize=True)
        for run in runs:
            run()
        after = arena.memory_stats(synchronize=True)
        if all(before[key] == after[key] for key in ("waits", "growths", "capacity")):
            return


def check_exact(bench: Bench, arena: bitsparse.Arena, inputs: Inputs, codec: str, name: str) -> float:
    """Checks all three kernels on the first set; returns the payload's bytes."""
    h, grad = inputs.h[0], inputs.fresh.clone()
    expected = F.relu(h).square()
    poison(h)
    activation, lease = _ops._compress_activation.default(h, _ACTIVATION, codec)
    bench.note_exact(f"{name}/compress", same_bits(activation, expected))
    del activation
    poison(h)
    restored = _ops._restore_activation.default(lease, list(h.shape), h.dtype, _ACTIVATION)
    bench.note_exact(f"{name}/restore", same_bits(restored, expected))
    del restored, expected
    _ops._activation_gradient_.default(grad, lease, _ACTIVATION)
    bench.note_exact(f"{name}/gradient", same_bits(grad, eager_gradient(h, inputs.fresh)))
    return float(arena.memory_stats(synchronize=True)["payload_bytes"])


def measure_codec(bench: Bench, inputs: Inputs, codec: str, name: str, targets: dict[str, float]) -> None:
    """The three kernels of a block, in an arena that sizes itself."""
    h, dense = inputs.h, inputs.h[0].nbytes
    arena = bitsparse.Arena(
        bench.device
    )  # a new one: what it learned of denser tensors must not serve here, nor sparser
    with arena:
        runs = [partial(compress, t, codec) for t in h]
        settle(arena, runs)
        payload = check_exact(bench, arena, inputs, codec, name)
        bench.result.add(f"{name}/bytes_per_element", payload / h[0].numel(), "bytes")
        bench.result.add(f"{name}/bits_per_element", 8 * payload / h[0].numel(), "bits")

        before = arena.memory_stats(synchronize=True)
        bench.note(f"{name}/compress", 2 * dense + payload, bench.time(runs), targets.get("compress"))
        after = arena.memory_stats(synchronize=True)
        bench.result.add(
            f"{name}/waits", after["waits"] - before["waits"], "times the host waited, timed runs", 0, "<="
        )
        bench.result.add(f"{name}/spilled", after["spilled"], "bytes in host memory", 0, "<=")

        leases = [_ops._compress_activation.default(t, _ACTIVATION, codec)[1] for t in h]
        size, dtype = list(h[0].shape), h[0].dtype
        restores = [partial(_ops._restore_activation.default, lease, size, dtype, _ACTIVATION) for lease in leases]
        bench.note(f"{name}/restore", dense + payload, bench.time(restores), targets.get("restore"))
        gradients = [
            partial(_ops._activation_gradient_.default, grad, lease, _ACTIVATION)
            for grad, lease in zip(inputs.grad, leases, strict=True)
        ]
        measured = bench.time(gradients, prepare=inputs.refresh)
        bench.note(f"{name}/gradient", 2 * dense + payload, measured, targets.get("gradient"))
        timing.synchronize(bench.device)


def measure_packing(bench: Bench, inputs: Inputs, codec: str, name: str) -> None:
    """The operators behind bitsparse.compress, for any tensor. They synchronise, and that is part of the time."""
    relu = [F.relu(t) for t in inputs.h]
    dense, size, dtype = relu[0].nbytes, list(relu[0].shape), relu[0].dtype
    packed = [_ops.pack.default(t, codec) for t in relu]
    poison(relu[0])
    bench.note_exact(f"{name}/unpack", same_bits(_ops.unpack.default(packed[0], size, dtype, True), relu[0]))
    needed = dense + packed[0].nbytes
    bench.result.add(f"{name}/packed_bits_per_element", 8 * packed[0].nbytes / relu[0].numel(), "bits")
    bench.note(f"{name}/pack", needed, bench.time([partial(_ops.pack.default, t, codec) for t in relu]))
    unpacks = [partial(_ops.unpack.default, t, size, dtype, True) for t in packed]
    bench.note(f"{name}/unpack", needed, bench.time(unpacks))


def measure_dense(bench: Bench, inputs: Inputs, name: str) -> None:
    """Eager PyTorch's kernels for the same, by the bytes that one fused kernel would need."""
    dense = inputs.h[0].nbytes
    relu_squared = [lambda t=t: F.relu(t).square() for t in inputs.h]
    bench.note(f"{name}/compress", 2 * dense, bench.time(relu_squared))
    leaves = [t.detach().requires_grad_() for t in inputs.h]
    with torch.enable_grad():
        outputs = [F.relu(leaf).square() for leaf in leaves]
    backwards = [
        partial(torch.autograd.grad, output, leaf, inputs.fresh, retain_graph=True)
        for output, leaf in zip(outputs, leaves, strict=True)
    ]
    bench.note(f"{name}/gradient", 3 * dense, bench.time(backwards))


def measure_group(bench: Bench, dtype: str, density: float | None) -> None:
    label = "real" if density is None else f"{density:g}"
    print(f"kernels: {dtype}, density {label}", flush=True)
    inputs = make_inputs(bench, dtype, density)
    bench.copy(inputs.h)
    kept = statistics.mean(torch.count_nonzero(t > 0).item() / t.numel() for t in inputs.h)
    bench.result.add(f"{dtype}/density={label}/kept", kept, "share of elements")
    targets = TARGETS if dtype == "bf16" and density == 0.2 else {}
    measure_dense(bench, inputs, f"{dtype}/density={label}/dense")
    for codec in CODECS:
        name = f"{dtype}/density={label}/{codec}"
        measure_codec(bench, inputs, codec, name, targets)
        if dtype == "bf16":
            measure_packing(bench, inputs, codec, name)
    bench.copy(inputs.h)


def measure_small(bench: Bench, kib: int) -> None:
    """What a call costs where the data is small: BF16, density 0.2, tight."""
    print(f"kernels: {kib} KiB", flush=True)
    h = data.pre_activations((kib * 512,), 0.2, torch.bfloat16, bench.device, kib)
    grad, out = torch.randn_like(h), torch.empty_like(h)
    arena = bitsparse.Arena(bench.device)
    with arena:
        settle(arena, [partial(compress, h, "tight")])
        lease = _ops._compress_activation.default(h, _ACTIVATION, "tight")[1]
        # 2 relu(h) is 1 or 0, so that multiplying in place again and again changes nothing.
        halves = _ops._compress_activation.default(torch.where(h > 0, 0.5, h), _ACTIVATION, "tight")[1]
        runs: dict[str, Callable[[], object]] = {
            "copy": partial(out.copy_, h),
            "relu_squared": lambda: F.relu(h).square(),
            "compress": partial(compress, h, "tight"),
            "restore": partial(_ops._restore_activation.default, lease, list(h.shape), h.dtype, _ACTIVATION),
            "gradient": partial(_ops._activation_gradient_.default, grad, halves, _ACTIVATION),
        }
        for name, run in runs.items():
            host, on_device = timing.time_small(run, bench.device, bench.rounds)
            bench.result.add(f"small/{kib}_KiB/{name}/host_us", 1e3 * host.median, "µs a call")
            if on_device is not None:
                bench.result.add(f"small/{kib}_KiB/{name}/device_us", 1e3 * on_device.median, "µs a call")


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = parser_of("kernels", __doc__)
    parser.add_argument("--rows", type=int, help=f"of the tensors (default {DEFAULT_SHAPE[0]}, --quick: 1024)")
    parser.add_argument("--columns", type=int, default=DEFAULT_SHAPE[1], help="(default %(default)s)")
    parser.add_argument("--rounds", type=int, help=f"of {SETS} runs each (default 10, --quick: 3)")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N, or cpu to see that the command works")
    options = parser.parse_args(arguments)
    rows = options.rows or (1024 if options.quick else DEFAULT_SHAPE[0])
    rounds = options.rounds or (3 if options.quick else 10)
    if min(rows, options.columns, rounds) < 1:
        parser.error("--rows, --columns, --rounds: expected at least 1")
    device = chosen_device(parser, options.device)
    shape = (rows, options.columns)
    result = results.describe("kernels", str(device), noted_arguments(arguments), options.commit)
    bench = Bench(shape, device, rounds, device.type == "cuda" and shape == DEFAULT_SHAPE, result)
    result.add("rows", rows, "rows of each tensor")
    result.add("columns", options.columns, "elements of a row")
    densities: list[float | None] = [0.2, None] if options.quick else [0.05, 0.1, 0.2, 0.5, None]
    with torch.no_grad(), Reporting(result, options.json) as reporting, bench:
        for density in densities:
            measure_group(bench, "bf16", density)
        for dtype in ("fp16", "fp32"):
            measure_group(bench, dtype, 0.2)
        for kib in SMALL_KIB[:2] if options.quick else SMALL_KIB:
            measure_small(bench, kib)
    return reporting.exit_code


if __name__ == "__main__":
    sys.exit(main())
