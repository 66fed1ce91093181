"""The kernels against a copy of the same run, in groups:

  bf16, fp16, fp32  compress fused with relu², restore to relu², gradient in place, through the arena; each codec
  fp8               the same for FP8 e4m3fn and e5m2
  relu              the same for plain ReLU
  edge              unaligned and odd-length tensors against aligned ones
  size              bits an element of real activations against the order-0 bound
  small             what a call costs, 64 KiB to 16 MiB
  peers             eager and compiled PyTorch, PyTorch bitmasks
  nvcomp            nvCOMP Cascaded, Bitcomp, ANS, where it is installed
  general           pack and unpack of signed values: the operators, and their kernel alone
  fp8_general       the same for FP8
  launches          launches an operation, small tensors

A measurement's bytes are those it needs, each input and output once. Bytes over time, divided by the bandwidth of
torch's copy_, measured before and after each group, is its fraction. Every result is compared bit for bit with
PyTorch's, over poisoned memory, before it is timed.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable, Sequence

import torch

from benchmarks import edge, fused, packing, peers, results, size, small
from benchmarks.bench import SETS, Bench
from benchmarks.options import Reporting, check_densities, chosen_device, noted_arguments, parser_of

DEFAULT_SHAPE = (16384, 21504)
QUICK_ROWS = 256
MOST_MEMORY = 40  # GiB

# In this order: those with torch.profiler last, as it may slow down what follows it.
GROUPS: dict[str, Callable[[Bench], None]] = {
    "bf16": fused.measure_bf16,
    "fp16": fused.measure_fp16,
    "fp32": fused.measure_fp32,
    "fp8": fused.measure_fp8,
    "relu": fused.measure_relu,
    "edge": edge.measure,
    "size": size.measure,
    "small": small.measure_times,
    "peers": peers.measure,
    "nvcomp": peers.measure_nvcomp_cases,
    "general": packing.measure_general,
    "fp8_general": packing.measure_fp8,
    "launches": small.measure_launches,
}
_WITHOUT_COPY = ("edge", "size", "small", "launches")


def _groups(text: str) -> list[str]:
    names = text.split(",")
    unknown = [name for name in names if name not in GROUPS]
    if unknown:
        raise argparse.ArgumentTypeError(f"expected some of {','.join(GROUPS)}, got {unknown[0]!r}")
    return names


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("kernels", __doc__)
    parser.add_argument("--only", type=_groups, default=list(GROUPS), metavar="GROUPS", help="such as bf16,small")
    parser.add_argument("--rows", type=int, help=f"of the tensors (default {DEFAULT_SHAPE[0]}, --quick: {QUICK_ROWS})")
    parser.add_argument("--columns", type=int, default=DEFAULT_SHAPE[1], help="(default %(default)s)")
    parser.add_argument("--densities", type=float, nargs="+", help="(default: each group's own, --quick: 0.2)")
    parser.add_argument("--rounds", type=int, help=f"of {SETS} runs each (default 10, --quick: 2)")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N, or cpu to see that the command works")
    return parser


def _note_memory(bench: Bench) -> None:
    """That it fits beside other work is a requirement."""
    gib = torch.cuda.max_memory_reserved(bench.device) / 2**30
    bench.result.add("peak_memory", gib, "GiB", bench.target(MOST_MEMORY), "<=")


def _run_group(bench: Bench, name: str) -> None:
    start = time.perf_counter()
    if name not in _WITHOUT_COPY:
        bench.time_copy()
    GROUPS[name](bench)
    if name not in _WITHOUT_COPY:
        bench.time_copy()
    gc.collect()
    if bench.on_gpu:
        torch.cuda.empty_cache()
    print(f"kernels: {name} took {time.perf_counter() - start:.1f} s", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = _parser()
    options = parser.parse_args(arguments)
    shape = (options.rows or (QUICK_ROWS if options.quick else DEFAULT_SHAPE[0]), options.columns)
    rounds = options.rounds or (2 if options.quick else 10)
    if min(*shape, rounds) < 1:
        parser.error("--rows, --columns, --rounds: expected at least 1")
    check_densities(parser, options.densities or ())
    device = chosen_device(parser, options.device)
    result = results.describe("kernels", str(device), noted_arguments(arguments), options.commit)
    bench = Bench(
        shape=shape,
        device=device,
        rounds=rounds,
        targets=device.type == "cuda" and shape == DEFAULT_SHAPE,
        result=result,
        densities=options.densities,
        quick=options.quick,
        compiled=not options.no_compile,
    )
    result.add("rows", shape[0], "rows of each tensor")
    result.add("columns", shape[1], "elements of a row")
    with torch.no_grad(), Reporting(result, options.json) as reporting:
        for name in GROUPS:
            if name in options.only:
                with reporting.part(name):
                    _run_group(bench, name)
        bench.finish()
        if bench.on_gpu:
            _note_memory(bench)
    return reporting.exit_code


if __name__ == "__main__":
    sys.exit(main())
