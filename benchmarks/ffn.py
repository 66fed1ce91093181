"""Forward and backward of a stack of residual feed-forward blocks: dense eager, bitsparse with each codec, activation
checkpointing around each block, saved tensors offloaded to the host, and torch.compile of the dense and of the bitsparse
stack; on a GPU bitsparse's last codec with fused matrix products, too.

All use the same weights and data in the same run. Before anything is timed, outputs and all gradients are compared with
dense eager's, bit for bit (torch.compile and fused products may round differently: the largest difference is reported).
Step times are taken in turns. Memory is what a step has allocated above what is resident without it: weights, their
gradients, input and its gradient, the gradient of the output. An arena's whole capacity counts, headroom included.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

import bitsparse
from benchmarks import data, results, timing
from benchmarks.ffn_functions import FFNFunction, bitsparse_ffn, checkpointed_ffn, dense_ffn, normalize
from benchmarks.options import Reporting, add_device, check_densities, chosen_device, noted_arguments, parser_of

Forward = Callable[[Tensor, Sequence[Sequence[Tensor]]], Tensor]


@dataclass(frozen=True)
class Shape:
    tokens: int
    width: int
    inner: int
    layers: int

    @classmethod
    def parse(cls, text: str) -> Shape:
        numbers = text.split("x")
        if len(numbers) != 4 or not all(number.isdecimal() and int(number) > 0 for number in numbers):
            raise argparse.ArgumentTypeError(f"expected TOKENSxWIDTHxINNERxLAYERS, got {text!r}")
        return cls(*map(int, numbers))

    def __str__(self) -> str:
        return f"{self.tokens}x{self.width}x{self.inner}x{self.layers}"


CUDA_SHAPES = (Shape(16384, 4096, 21504, 4), Shape(65536, 768, 3072, 12))  # Nemotron-H-8B's, modded-nanogpt's
# Step time of bitsparse-tight over torch.compile's dense stack, up to density 0.25; peak at density 0.1.
LEAD_SECONDS = 0.2  # of untimed steps before each timed one
MOST_TIME = {CUDA_SHAPES[0]: 1.00, CUDA_SHAPES[1]: 1.03}
MOST_PEAK = {CUDA_SHAPES[0]: 2450 << 20, CUDA_SHAPES[1]: 3400 << 20}
CPU_SHAPES = (Shape(512, 64, 256, 2),)
QUICK_SHAPES = {"cuda": (Shape(2048, 512, 2048, 2),), "cpu": (Shape(128, 32, 256, 2),)}


@dataclass
class Problem:
    """Weights and data. The first bias sets the density: x is normalised, so x W1ᵀ is about standard normal."""

    x: Tensor
    grad: Tensor
    layers: list[list[Tensor]]

    @classmethod
    def make(cls, shape: Shape, density: float, dtype: torch.dtype, device: torch.device) -> Problem:
        generator = torch.Generator(device).manual_seed(0)

        def normal(*size: int, scale: float = 1.0) -> Tensor:
            return torch.randn(size, generator=generator, device=device).mul_(scale).to(dtype)

        layers = []
        for _ in range(shape.layers):
            w1 = normal(shape.inner, shape.width, scale=shape.width**-0.5)
            b1 = torch.full((shape.inner,), data.bias_for(density), dtype=dtype, device=device)
            layers.append([w1, b1, normal(shape.width, shape.inner, scale=shape.inner**-0.5)])
        x, grad = normal(shape.tokens, shape.width), normal(shape.tokens, shape.width)
        return cls(*_as_leaves(x, grad, layers))

    @property
    def leaves(self) -> list[Tensor]:
        return [self.x, *(weight for layer in self.layers for weight in layer)]

    def clear(self) -> None:
        for leaf in self.leaves:
            leaf.grad = None

    def kept(self) -> float:
        """Share of relu(h) that isn't zero, in the first layer."""
        with torch.no_grad():
            h = F.linear(normalize(self.x), *self.layers[0][:2])
            return torch.count_nonzero(h > 0).item() / h.numel()


def _as_leaves(x: Tensor, grad: Tensor, layers: list[list[Tensor]]) -> tuple[Tensor, Tensor, list[list[Tensor]]]:
    return x.requires_grad_(), grad, [[weight.requires_grad_() for weight in layer] for layer in layers]


def stack(ffn: FFNFunction) -> Forward:
    def forward(x: Tensor, layers: Sequence[Sequence[Tensor]]) -> Tensor:
        for layer in layers:
            x = x + ffn(normalize(x), *layer)
        return x

    return forward


@dataclass
class Method:
    name: str
    forward: Forward
    exact: bool = True
    arena: bitsparse.Arena | None = None
    offload: bool = False

    def scope(self) -> AbstractContextManager[object]:
        if self.offload:
            return torch.autograd.graph.save_on_cpu(pin_memory=True)
        return self.arena or nullcontext()

    def output(self, problem: Problem) -> Tensor:
        with self.scope():
            return self.forward(problem.x, problem.layers)

    def step(self, problem: Problem) -> None:
        problem.clear()
        self.output(problem).backward(problem.grad)

    def results(self, problem: Problem) -> list[Tensor]:
        """The output and all gradients."""
        problem.clear()
        y = self.output(problem)
        y.backward(problem.grad)
        found = [y.detach(), *(leaf.grad for leaf in problem.leaves if leaf.grad is not None)]
        problem.clear()
        return found

    def arena_stats(self) -> dict[str, int | float]:
        return self.arena.memory_stats(synchronize=True) if self.arena else {"capacity": 0, "in_use": 0, "waits": 0}


@dataclass
class Memory:
    saved: int | None = None
    peak: int | None = None


@contextmanager
def counted_storages(problem: Problem) -> Iterator[dict[int, int]]:
    """Bytes of every storage that autograd saves inside, without those of the problem itself."""
    given = {t.untyped_storage().data_ptr() for t in problem.leaves}
    saved: dict[int, int] = {}

    def keep(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in given:
            saved[storage.data_ptr()] = storage.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        yield saved


def measure_memory(method: Method, problem: Problem, resident: int) -> Memory:
    """`resident`: allocated before the method, and the arena it may have, existed."""
    device = problem.x.device
    resident += sum(leaf.grad.nbytes for leaf in problem.leaves if leaf.grad is not None)  # of the warm-up
    gc.collect()
    if device.type != "cuda":
        if not method.exact or method.offload or method.forward is CHECKPOINTED:
            return Memory()  # saves by other ways than autograd's hooks
        used = method.arena_stats()["in_use"]
        with counted_storages(problem) as storages:
            y = method.output(problem)
        saved = sum(storages.values()) + int(method.arena_stats()["in_use"] - used)
        y.backward(problem.grad)
        problem.clear()
        return Memory(saved=saved)
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    y = method.output(problem)
    stats = method.arena_stats()
    # Without the output, which somebody needs anyway; of the arena, what is in use.
    saved = torch.cuda.memory_allocated(device) - resident - y.nbytes - int(stats["capacity"] - stats["in_use"])
    y.backward(problem.grad)
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - resident
    problem.clear()
    return Memory(saved, peak)


def largest_difference(got: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Over all tensors, relative to the largest value of each."""
    pairs = zip(got, expected, strict=True)
    return max(((a.float() - b.float()).abs().max() / b.float().abs().max()).item() for a, b in pairs)


CHECKPOINTED = stack(checkpointed_ffn)


@dataclass
class Bench:
    device: torch.device
    dtype: torch.dtype
    codecs: Sequence[str]
    compiled: bool
    rounds: int
    result: results.Result
    offload: bool
    warm_up: int = 3
    compilers: dict[tuple[Shape, str], Forward] = field(default_factory=dict)
    offloaded: set[Shape] = field(default_factory=set)

    def methods(self, shape: Shape) -> Iterator[Method]:
        """Each is made when it is its turn, so that the memory of its arena counts as its own."""
        yield Method("dense", stack(dense_ffn))
        for codec in self.codecs:
            yield Method(f"bitsparse-{codec}", stack(bitsparse_ffn(codec)), arena=bitsparse.Arena(self.device))
        fused, last = bitsparse_ffn(self.codecs[-1], fused=True), f"bitsparse-{self.codecs[-1]}-fused"
        if self.device.type == "cuda":
            yield Method(last, stack(fused), exact=False, arena=bitsparse.Arena(self.device))
        yield Method("checkpoint", CHECKPOINTED)
        # Slow, and the same at all densities.
        if self.offload and self.device.type == "cuda" and shape not in self.offloaded:
            self.offloaded.add(shape)
            yield Method("offload", stack(dense_ffn), offload=True)
        if self.compiled:
            yield Method("dense-compiled", self.compile(shape, "dense", dense_ffn), exact=False)
            for codec in self.codecs:
                forward = self.compile(shape, codec, bitsparse_ffn(codec))
                arena = bitsparse.Arena(self.device)
                yield Method(f"bitsparse-{codec}-compiled", forward, exact=False, arena=arena)
            if self.device.type == "cuda":
                forward = self.compile(shape, last, fused)
                yield Method(f"{last}-compiled", forward, exact=False, arena=bitsparse.Arena(self.device))

    def compile(self, shape: Shape, name: str, ffn: FFNFunction) -> Forward:
        if all(known != shape for known, _ in self.compilers):
            torch._dynamo.reset()  # it compiles few variants of a function, and forgets all others' here
        if (shape, name) not in self.compilers:
            self.compilers[shape, name] = torch.compile(stack(ffn), fullgraph=True, dynamic=False)
        return self.compilers[shape, name]

    def allocated(self) -> int:
        gc.collect()
        timing.synchronize(self.device)
        return torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else 0

    def check(self, name: str, method: Method, problem: Problem, expected: Sequence[Tensor]) -> None:
        got = method.results(problem)
        if method.exact:
            equal = all(timing.same_bits(a, b) for a, b in zip(got, expected, strict=True))
            self.result.add(f"{name}/exact", int(equal), "1 = output and gradients to the last bit", 1)
        else:
            difference = largest_difference(got, expected)
            self.result.add(f"{name}/largest_difference", difference, "of the largest value of output or gradient")

    def measure(self, shape: Shape, density: float) -> None:
        print(f"ffn: {shape}, density {density:g}", flush=True)
        problem = Problem.make(shape, density, self.dtype, self.device)
        prefix = f"{shape}/density={density:g}"
        self.result.add(f"{prefix}/kept", problem.kept(), "share of elements, first layer")
        expected = Method("dense", stack(dense_ffn)).results(problem)
        methods: dict[str, Method] = {}
        resident = self.allocated()
        iterator = self.methods(shape)
        memories: dict[str, Memory] = {}
        while (method := next(iterator, None)) is not None:
            name = f"{prefix}/{method.name}"
            try:
                self.check(name, method, problem, expected)
            except RuntimeError as error:  # a compiler that does not work on this machine must not cost the rest
                if method.exact:
                    raise
                print(f"ffn: {method.name} failed: {str(error).splitlines()[0]}", file=sys.stderr, flush=True)
                continue
            for _ in range(self.warm_up):
                method.step(problem)
            memories[method.name] = measure_memory(method, problem, resident)
            methods[method.name] = method
            resident = self.allocated()
        del expected
        before = {name: method.arena_stats()["waits"] for name, method in methods.items()}
        steps = {name: [lambda method=method: method.step(problem)] for name, method in methods.items()}
        slow = {name: step for name, step in steps.items() if methods[name].offload}
        usual = {name: step for name, step in steps.items() if name not in slow}
        times = timing.time_in_turns(usual, self.device, self.rounds, lead_seconds=LEAD_SECONDS)
        if slow:
            times |= timing.time_in_turns(slow, self.device, 2)
        problem.clear()
        for name, method in methods.items():
            row, memory, dense = f"{prefix}/{name}", memories[name], memories["dense"]
            self.result.add_times(f"{row}/step_ms", times[name], "ms, forward and backward")
            self.result.add(f"{row}/step_of_dense", times[name].median / times["dense"].median, "of dense eager's")
            for what, value, base in (("saved", memory.saved, dense.saved), ("peak", memory.peak, dense.peak)):
                if value is not None and base:
                    self.result.add(f"{row}/{what}_bytes", value, "bytes")
                    self.result.add(f"{row}/{what}_of_dense", value / base, "of dense eager's")
            self.compare(shape, density, row, name, times, memory)
            if method.arena:
                waits = method.arena_stats()["waits"] - before[name]
                self.result.add(f"{row}/waits", waits, "times the host waited, timed steps", 0, "<=")

    def compare(
        self, shape: Shape, density: float, row: str, name: str, times: dict[str, timing.Timing], memory: Memory
    ) -> None:
        """Rows that have targets, for bitsparse with its last codec."""
        if not name.startswith(f"bitsparse-{self.codecs[-1]}") or "dense-compiled" not in times:
            return
        ratio = times[name].median / times["dense-compiled"].median
        time_target = MOST_TIME.get(shape) if density <= 0.25 else None
        self.result.add(f"{row}/step_of_compiled", ratio, "of dense-compiled's", time_target, "<=")
        if memory.peak is not None and density == 0.1 and shape in MOST_PEAK:
            self.result.add(f"{row}/peak", memory.peak, "bytes", MOST_PEAK[shape], "<=")


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = parser_of("ffn", __doc__)
    add_device(parser)
    parser.add_argument("--dtype", choices=data.DTYPES, help="(default bf16, on a CPU fp32)")
    parser.add_argument(
        "--shape", type=Shape.parse, action="append", metavar="TxWxIxL", dest="shapes",
        help=f"tokens x width x inner width x layers, repeatable (default {' '.join(map(str, CUDA_SHAPES))}; "
        f"on a CPU {' '.join(map(str, CPU_SHAPES))})",
    )  # fmt: skip
    parser.add_argument("--densities", type=float, nargs="+", default=[0.1, 0.25, 0.5], help="(default 0.1 0.25 0.5)")
    parser.add_argument("--codecs", nargs="+", choices=bitsparse.nn.CODECS, default=list(bitsparse.nn.CODECS))
    parser.add_argument("--rounds", type=int, help="timed steps of each method (default 10, --quick: 3)")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("--no-offload", action="store_true", help="leave saved tensors on the host out, which is slow")
    options = parser.parse_args(arguments)
    device = chosen_device(parser, options.device)
    rounds = options.rounds or (3 if options.quick else 10)
    if rounds < 1:
        parser.error("--rounds: expected at least 1")
    check_densities(parser, options.densities)
    usual = CUDA_SHAPES if device.type == "cuda" else CPU_SHAPES
    shapes = options.shapes or (QUICK_SHAPES[device.type] if options.quick else usual)
    dtype = data.DTYPES[options.dtype or ("bf16" if device.type == "cuda" else "fp32")]
    result = results.describe("ffn", str(device), noted_arguments(arguments), options.commit)
    bench = Bench(device, dtype, options.codecs, not options.no_compile, rounds, result, not options.no_offload)
    with Reporting(result, options.json) as reporting:
        for shape in shapes:
            for density in options.densities:
                bench.measure(shape, density)
    return reporting.exit_code


if __name__ == "__main__":
    sys.exit(main())
