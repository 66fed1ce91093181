"""pack and unpack on the CPU against torch's copy_ of the same dense bytes, taking turns, with all threads.

The score is the copy's time over the codec's: 1 is as fast as a memcpy into memory that is there already. Results are
compared bit for bit before anything is timed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import data, results, timing
from benchmarks.bench import CODECS
from benchmarks.options import Reporting, check_densities, noted_arguments, parser_of

SETS = 2  # of inputs, taking turns
TARGETS = {"raw": 0.5, "tight": 0.25}  # of a memcpy
QUIET = 0.5  # load average above which other work disturbs

_ops = torch.ops.bitsparse


def measure(result: results.Result, elements: int, density: float, rounds: int, targets: bool) -> None:
    device = torch.device("cpu")
    print(f"cpu: density {density:g}", flush=True)
    label = f"bf16/density={density:g}"
    inputs = [F.relu(data.pre_activations((elements,), density, torch.bfloat16, device, seed)) for seed in range(SETS)]
    out = torch.empty_like(inputs[0])
    functions: dict[str, list[timing.Run]] = {"memcpy": [partial(out.copy_, t) for t in inputs]}
    functions["clone"] = [partial(torch.clone, t) for t in inputs]
    packed: dict[str, list[Tensor]] = {}
    for codec in CODECS:
        packed[codec] = [_ops.pack.default(t, codec) for t in inputs]
        unpacked = (_ops.unpack.default(p, [elements], torch.bfloat16) for p in packed[codec])
        exact = all(timing.same_bits(a, b) for a, b in zip(unpacked, inputs, strict=True))
        result.add(f"{label}/{codec}/exact", int(exact), "1 = to the last bit", 1)
        result.add(f"{label}/{codec}/bits_per_element", 8 * packed[codec][0].nbytes / elements, "bits")
        functions[f"{codec}/pack"] = [partial(_ops.pack.default, t, codec) for t in inputs]
        functions[f"{codec}/unpack"] = [
            partial(_ops.unpack.default, p, [elements], torch.bfloat16) for p in packed[codec]
        ]
    times = timing.time_in_turns(functions, device, rounds, warm_up=SETS)
    memcpy = times["memcpy"].median
    for name, measured in times.items():
        result.add_times(f"{label}/{name}/ms", measured)
        if name != "memcpy":
            target = TARGETS.get(name.partition("/")[0]) if targets else None
            result.add(f"{label}/{name}/of_memcpy", memcpy / measured.median, "time of a memcpy over its time", target)


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = parser_of("cpu", __doc__)
    parser.add_argument("--elements", type=int, help="of each tensor (default 64 Mi, --quick: 1 Mi)")
    parser.add_argument("--densities", type=float, nargs="+", default=[0.05, 0.2, 0.5], help="(default 0.05 0.2 0.5)")
    parser.add_argument("--rounds", type=int, help="(default 15, --quick: 4)")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="(default: one a core, here %(default)s)")
    options = parser.parse_args(arguments)
    elements = options.elements or (1 << 20 if options.quick else 64 << 20)
    rounds = options.rounds or (4 if options.quick else 15)
    if min(elements, rounds, options.threads) < 1:
        parser.error("--elements, --rounds, --threads: expected at least 1")
    check_densities(parser, options.densities)
    torch.set_num_threads(options.threads)
    result = results.describe("cpu", "cpu", noted_arguments(arguments), options.commit)
    load = os.getloadavg()[0]
    if load > QUIET:
        print(f"cpu: load average {load:.1f}: other work runs on this machine and disturbs what follows", flush=True)
    result.add("elements", elements, "elements of each tensor")
    result.add("load_average", load, "runnable tasks in the minute before")
    with torch.no_grad(), Reporting(result, options.json) as reporting:
        for density in options.densities:
            measure(result, elements, density, rounds, targets=not options.quick)
    return reporting.exit_code


if __name__ == "__main__":
    sys.exit(main())
