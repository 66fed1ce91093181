"""What the arena's bookkeeping costs, and its warm-up.

Kernels and host: the operators through an arena that has settled, against the same kernels into contiguous memory that is
at hand (relu, in place, tight, density 0.2). Host times are of 64 KiB tensors while as many leases are alive as a model
of 12 layers has, or 48: what a call takes to return, the end of its lease included; added: the difference.

Warm-up: training steps of a 12-layer GPT (forward and backward, random tokens, no optimizer) in new arenas, with PyTorch's
cache emptied before: one with default settings, which waits and grows, against one with worst_case, which does neither.
Steps follow one another without a synchronisation; the device's time line says how long each took.
"""

from __future__ import annotations

import gc
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

import bitsparse
from benchmarks import data, gpt, results, timing
from benchmarks.ffn_functions import bitsparse_ffn
from benchmarks.fused import settle
from benchmarks.models_parts import chunk_gradients
from benchmarks.options import Reporting, chosen_device, noted_arguments, parser_of
from benchmarks.timing import Run

MOST_HOST_US = 2.0
MOST_KERNEL = 1.03  # of the time without an arena
MOST_WARM_UP = 1.05
MOST_CAPACITY = 1.3  # of the payload
SHAPE, QUICK_SHAPE = (16384, 21504), (256, 2048)
LIVE = (12, 48)
SETS = 3
STEPS = 5  # the first two are warm-up

_ops = torch.ops.bitsparse
_ACTIVATION, _CODEC = "relu", "tight"  # relu in place can be done again and again


class Inputs:
    """Tensors that arena and contiguous kernels work on, each with memory for its contiguous form."""

    def __init__(self, shape: tuple[int, ...], device: torch.device, sets: int) -> None:
        self.h = [data.pre_activations(shape, 0.2, torch.bfloat16, device, seed) for seed in range(sets)]
        self.grad = [data.pre_activations(shape, 0.5, torch.bfloat16, device, 9 + seed) for seed in range(sets)]
        size = int(1.03 * self.h[0].nbytes) + (1 << 16)
        self.store = [torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(sets)]

    def contiguous(self, operation: str, tensors: Sequence[Tensor]) -> list[Run]:
        return [
            partial(_ops._contiguous.default, t, store, operation, _ACTIVATION, _CODEC)
            for t, store in zip(tensors, self.store, strict=True)
        ]

    def runs(self, leases: Sequence[Tensor]) -> dict[str, tuple[list[Run], list[Run]]]:
        """By operation: through the arena, and without. `leases` are of these tensors."""
        compress = [partial(_ops._compress_activation_.default, h, _ACTIVATION, _CODEC) for h in self.h]
        gradient = [
            partial(_ops._activation_gradient_.default, grad, lease, _ACTIVATION)
            for grad, lease in zip(self.grad, leases, strict=True)
        ]
        return {
            "compress": (compress, self.contiguous("compress", self.h)),
            "gradient": (gradient, self.contiguous("gradient", self.grad)),
        }

    def restores(self, leases: Sequence[Tensor]) -> tuple[list[Run], list[Run]]:
        size = list(self.h[0].shape)
        restore = [partial(_ops._restore_activation.default, t, size, torch.bfloat16, _ACTIVATION) for t in leases]
        out = [torch.empty_like(h) for h in self.h]
        return restore, self.contiguous("restore", out)


def _lease(h: Tensor) -> Tensor:
    return _ops._compress_activation_.default(h, _ACTIVATION, _CODEC)


def measure_kernels(result: results.Result, device: torch.device, quick: bool, rounds: int) -> None:
    print("arena: kernels", flush=True)
    inputs = Inputs(QUICK_SHAPE if quick else SHAPE, device, SETS)
    with bitsparse.Arena(device) as arena:
        settle(arena, [partial(_lease, h) for h in inputs.h])
        leases = [_lease(h) for h in inputs.h]
        runs = inputs.runs(leases)
        compress = runs.pop("compress")
        runs["restore"] = inputs.restores(leases)
        for run in inputs.contiguous("compress", inputs.h):  # for what reads it
            run()
        _note_kernels(result, runs, device, quick, rounds)
        del leases, runs
        settle(arena, compress[0])
        _note_kernels(result, {"compress": compress}, device, quick, rounds)


def _note_kernels(
    result: results.Result,
    runs: dict[str, tuple[list[Run], list[Run]]],
    device: torch.device,
    quick: bool,
    rounds: int,
) -> None:
    for operation, (through_arena, contiguous) in runs.items():
        both = {"arena": through_arena, "contiguous": contiguous}
        times = timing.time_in_turns(both, device, rounds * SETS, warm_up=2 * SETS)
        for name, measured in times.items():
            result.add_times(f"kernels/{operation}/{name}_ms", measured)
        ratio = times["arena"].median / times["contiguous"].median
        target = None if quick else MOST_KERNEL
        result.add(f"kernels/{operation}/of_contiguous", ratio, "of the time without an arena", target, "<=")


def measure_host(result: results.Result, device: torch.device, quick: bool, rounds: int) -> None:
    print("arena: host", flush=True)
    for live in LIVE:
        inputs = Inputs((1 << 15,), device, 1)
        others = [data.pre_activations((1 << 15,), 0.2, torch.bfloat16, device, seed) for seed in range(live - 1)]
        with bitsparse.Arena(device) as arena:
            settle(arena, [lambda others=others: [_lease(h) for h in others]])
            held = [_lease(h) for h in others]
            leases = [_lease(inputs.h[0])]
            for operation, (through_arena, contiguous) in inputs.runs(leases).items():
                settle(arena, through_arena)
                name = f"host/{live}_live/{operation}"
                # In turns, so that a slow moment of the machine meets both.
                samples: dict[str, list[float]] = {"arena": [], "contiguous": []}
                for _ in range(rounds):
                    for kind, run in (("arena", through_arena[0]), ("contiguous", contiguous[0])):
                        samples[kind].append(1e3 * timing.time_small(run, device, rounds=3)[0].median)
                medians = {kind: statistics.median(values) for kind, values in samples.items()}
                for kind, value in medians.items():
                    result.add(f"{name}/{kind}_us", value, "µs a call")
                added = medians["arena"] - medians["contiguous"]
                result.add(f"{name}/added_us", added, "µs a call", None if quick else MOST_HOST_US, "<=")
            del held, leases


class WarmUp:
    """Steps of one model in arenas of their own."""

    def __init__(self, device: torch.device, quick: bool) -> None:
        self.device = device
        size, length = (gpt.TINY, 64) if quick else (gpt.NANOGPT, 512)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        torch.manual_seed(0)
        self.model = gpt.GPT(size, length, dtype).to(device)
        self.model.choice.ffn = bitsparse_ffn(_CODEC)
        for parameter in self.model.parameters():
            if not parameter.any():  # layers that are to begin as the identity
                torch.nn.init.normal_(parameter, std=0.02)
        shape = (2 if quick else 128, length)  # 65 536 tokens
        self.tokens = torch.randint(size.vocabulary, shape, device=device)
        self.targets = torch.randint(size.vocabulary, shape, device=device)

    def step(self, arena: bitsparse.Arena, look: Callable[[], None] = lambda: None) -> Tensor:
        with arena:
            loss = self.model.loss(self.tokens, self.targets, self.model.body, chunk_gradients)
        look()
        loss.backward()
        self.model.zero_grad()
        return loss.detach()

    def tidy(self) -> None:
        gc.collect()
        timing.synchronize(self.device)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def times(self, arena: bitsparse.Arena) -> tuple[list[float], list[dict[str, int | float]], Tensor]:
        """Milliseconds of each step, statistics after it (as far as the host knows then), losses."""
        cuda = self.device.type == "cuda"
        marks: list[torch.cuda.Event | float] = []

        def mark() -> None:
            if cuda:
                event = torch.cuda.Event(enable_timing=True)
                event.record()
                marks.append(event)
            else:
                marks.append(1e3 * time.perf_counter())

        stats, losses = [], []
        mark()
        for _ in range(STEPS):
            losses.append(self.step(arena))
            mark()
            stats.append(arena.memory_stats())
        timing.synchronize(self.device)
        pairs = itertools.pairwise(marks)
        return [a.elapsed_time(b) if cuda else b - a for a, b in pairs], stats, torch.stack(losses)


def measure_warm_up(result: results.Result, device: torch.device, quick: bool, rounds: int) -> None:
    print("arena: warm-up", flush=True)
    warm_up = WarmUp(device, quick)
    warm_up.times(bitsparse.Arena(device, worst_case=True))  # what happens once in a process
    kinds = {"default": {}, "worst_case": {"worst_case": True}}
    times: dict[str, list[list[float]]] = {kind: [] for kind in kinds}
    losses: list[Tensor] = []
    ratio = 0.0
    waits: list[list[int | float]] = []
    for number in range(rounds):
        for kind in list(kinds) if number % 2 else list(kinds)[::-1]:
            warm_up.tidy()
            arena = bitsparse.Arena(device, **kinds[kind])
            measured, stats, loss = warm_up.times(arena)
            times[kind].append(measured)
            losses.append(loss)
            if kind == "default":
                waits.append([one["waits"] for one in stats])
                payload: list[int | float] = []
                warm_up.step(arena, lambda a=arena, p=payload: p.append(a.memory_stats(True)["payload_bytes"]))
                ratio = max(ratio, max(one["capacity"] for one in stats[1:]) / payload[0])
            del arena
    _note_warm_up(result, times, on_gpu=device.type == "cuda" and not quick)
    result.add("warm_up/waits", max(w[-1] for w in waits), "times the host waited, all steps")
    later = max(w[-1] - w[1] for w in waits)
    result.add("warm_up/later_waits", later, "times the host waited, from the third step on", 0, "<=")
    target = MOST_CAPACITY if device.type == "cuda" and not quick else None
    result.add("warm_up/capacity_of_payload", ratio, "most from the second step on", target, "<=")
    equal = all(torch.equal(loss, losses[0]) for loss in losses)
    result.add("warm_up/losses/exact", int(equal), "1 = equal in all arenas, to the last bit", 1)


def _note_warm_up(result: results.Result, times: dict[str, list[list[float]]], on_gpu: bool) -> None:
    for kind, measured in times.items():
        for step in range(STEPS):
            result.add_times(f"warm_up/{kind}/step{step + 1}_ms", timing.Timing([one[step] for one in measured]))
    target = MOST_WARM_UP if on_gpu else None
    parts: dict[str, slice] = {"step1": slice(0, 1), "step2": slice(1, 2), "both_steps": slice(0, 2)}
    for part, steps in parts.items():
        medians = [statistics.median(sum(one[steps]) for one in times[kind]) for kind in ("default", "worst_case")]
        result.add(f"warm_up/{part}/of_worst_case", medians[0] / medians[1], "of a worst_case arena's", target, "<=")
    steady = statistics.median(sum(one[2:]) for one in times["default"])
    other = statistics.median(sum(one[2:]) for one in times["worst_case"])
    result.add("warm_up/later_steps/of_worst_case", steady / other, "of a worst_case arena's")


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = parser_of("arena", __doc__)
    parser.add_argument("--rounds", type=int, help="(default 10, --quick: 2)")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N, or cpu to see that the command works")
    options = parser.parse_args(arguments)
    rounds = options.rounds or (2 if options.quick else 10)
    if rounds < 1:
        parser.error("--rounds: expected at least 1")
    device = chosen_device(parser, options.device)
    result = results.describe("arena", str(device), noted_arguments(arguments), options.commit)
    with Reporting(result, options.json) as reporting:
        if device.type == "cuda":
            with reporting.part("kernels"), torch.no_grad():
                measure_kernels(result, device, options.quick, rounds)
            with reporting.part("host"), torch.no_grad():
                measure_host(result, device, options.quick, rounds)
        else:
            print("arena: kernels and host are compared on a GPU only", flush=True)
        with reporting.part("warm-up"):
            measure_warm_up(result, device, options.quick, rounds)
    return reporting.exit_code


if __name__ == "__main__":
    sys.exit(main())
