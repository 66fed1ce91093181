"""Runs each kernel a few times on settled memory, for a profiler to look at. Measures nothing itself.

    ncu --clock-control none --profile-from-start off --kernel-name 'regex:compress_kernel|restore_kernel' \\
        --section SpeedOfLight --section Occupancy --section WarpStateStats \\
        python -m benchmarks profile --codec tight --density 0.2

What is to be profiled lies between cudaProfilerStart and cudaProfilerStop. It is printed in the order of its launches:
compress, restore, gradient, and with --general pack's and unpack's kernel. docs/performance.md says more.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch

import bitsparse
from benchmarks import data, timing
from benchmarks.bench import CODECS
from benchmarks.fused import ACTIVATIONS, compress, gradient_runs, ops, restore_runs, settle
from benchmarks.kernels import DEFAULT_SHAPE, QUICK_ROWS
from benchmarks.options import chosen_device
from benchmarks.timing import Run


@contextmanager
def profiled(device: torch.device) -> Iterator[None]:
    timing.synchronize(device)
    if device.type == "cuda":
        torch.cuda.profiler.start()
    yield
    timing.synchronize(device)
    if device.type == "cuda":
        torch.cuda.profiler.stop()


def run(runs: dict[str, Run], device: torch.device, repeats: int) -> None:
    for work in runs.values():  # what happens at first only
        work()
    with profiled(device):
        for name, work in runs.items():
            print(f"profile: {repeats} times {name}", flush=True)
            for _ in range(repeats):
                work()


def block_kernels(shape: tuple[int, int], device: torch.device, options: argparse.Namespace) -> None:
    activation, codec = options.activation, options.codec
    h = data.pre_activations(shape, options.density, data.ALL_DTYPES[options.dtype], device, 0)
    with bitsparse.Arena(device) as arena:
        compress_run = partial(compress, h, activation, codec)
        settle(arena, [compress_run])
        lease = ops._compress_activation.default(h, activation, codec)[1]
        restore = restore_runs([lease], h, activation)[0]
        fresh, grad = data.pre_activations(shape, 0.5, h.dtype, device, 1), torch.empty_like(h)
        multiply = gradient_runs([grad], [lease], activation)[0]

        def gradient() -> None:
            grad.copy_(fresh)  # not again and again the same, which soon is zero
            multiply()

        run({"compress": compress_run, "restore": restore, "gradient": gradient}, device, options.repeats)


def packing_kernels(shape: tuple[int, int], device: torch.device, options: argparse.Namespace) -> None:
    dtype = data.ALL_DTYPES[options.dtype]
    t = data.signed_activations(shape, options.density, dtype, device, 0)
    pack = partial(ops.pack.default, t, options.codec, "nonzero")
    unpack = partial(ops.unpack.default, pack(), list(shape), dtype, True)
    run({"pack": pack, "unpack": unpack}, device, options.repeats)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks profile", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--codec", choices=CODECS, default="tight")
    parser.add_argument("--density", type=float, default=0.2, help="(default %(default)s)")
    parser.add_argument("--dtype", choices=data.ALL_DTYPES, default="bf16")
    parser.add_argument("--activation", choices=ACTIVATIONS, default="relu_squared")
    parser.add_argument("--general", action="store_true", help="pack and unpack of signed values instead")
    parser.add_argument("--repeats", type=int, default=1, help="of each kernel (default %(default)s)")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N, or cpu to see that the command works")
    parser.add_argument("--quick", action="store_true", help="a small tensor")
    options = parser.parse_args(arguments)
    if not 0 < options.density < 1 or options.repeats < 1:
        parser.error("expected a --density between 0 and 1 and --repeats of at least 1")
    device = chosen_device(parser, options.device)
    shape = (QUICK_ROWS if options.quick else DEFAULT_SHAPE[0], DEFAULT_SHAPE[1])
    with torch.no_grad():
        (packing_kernels if options.general else block_kernels)(shape, device, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
