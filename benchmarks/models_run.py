"""Training steps of one model by several methods, with the same weights and optimizers: what ``python -m benchmarks
models`` measures, model by model."""

from __future__ import annotations

import gc
import math
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import bitsparse
from benchmarks import timing
from benchmarks.ffn_functions import FFNFunction, bitsparse_ffn, checkpointed_ffn, dense_ffn
from benchmarks.models_parts import Body, ChunkGradients, LanguageModel, chunk_gradients
from benchmarks.results import Result

GIB = 2**30
WARM_UP = 4  # steps: arenas settle in the second one, the allocator's cache after it
BATCHES = 4  # that take turns
CHECKED_STEPS = 6  # whose losses are compared
PROBE_STEPS = 3
LEAD_SECONDS = 0.2  # of untimed steps before each timed one
PROBES = 5  # at most, for one cap

Batch = tuple[Tensor, Tensor]  # tokens and targets, each (sequences, length)


class Stopped(BaseException):
    """SIGTERM, or the time limit is over: ends the command, not only a part of it."""


@dataclass
class Clock:
    """Of the whole command."""

    minutes: float
    start: float = field(default_factory=time.monotonic)

    def left(self) -> float:
        """Seconds."""
        return 60 * self.minutes - (time.monotonic() - self.start)

    def check(self) -> None:
        if self.left() < 0:
            raise Stopped(f"the limit of {self.minutes:g} minutes is over")


@dataclass
class Method:
    name: str
    ffn: FFNFunction
    recompute_layers: bool = False
    compiled: bool = False
    uses_arena: bool = False
    arena: bitsparse.Arena | None = None

    def stats(self) -> dict[str, int | float]:
        return self.arena.memory_stats(synchronize=True) if self.arena else {"capacity": 0, "spilled": 0, "waits": 0}


def methods_of(compiled: bool, codecs: Sequence[str]) -> list[Method]:
    dense = Method("dense", dense_ffn)
    names = {codec: "bitsparse" if codec == "tight" else f"bitsparse-{codec}" for codec in codecs}
    ours = [Method(name, bitsparse_ffn(codec), uses_arena=True) for codec, name in names.items()]
    eager = [
        dense,
        Method("checkpoint", checkpointed_ffn),
        Method("checkpoint-layers", dense_ffn, recompute_layers=True),
        *ours,
    ]
    fused = Method("bitsparse-fused", bitsparse_ffn("tight", fused=True), uses_arena=True)
    others = [replace(method, name=f"{method.name}-compiled", compiled=True) for method in (dense, *ours, fused)]
    return eager + others if compiled else eager


def is_judged(method: str) -> bool:
    """Compared with torch.compile's dense block, compiled too."""
    return method.startswith("bitsparse") and method.endswith("-compiled")


class Snapshot:
    """Weights and optimizer states, kept on the host."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        pinned = tensors[0].is_cuda
        self._copies = [torch.empty_like(t, device="cpu", pin_memory=pinned).copy_(t) for t in tensors]

    @torch.no_grad()
    def restore(self) -> None:
        for tensor, copy in zip(self._tensors, self._copies, strict=True):
            tensor.copy_(copy)


class Trainer:
    """A model, its optimizers and batches. Every method trains the same weights."""

    def __init__(
        self,
        model: LanguageModel,
        optimizers: Sequence[torch.optim.Optimizer],
        make_batch: Callable[[int, int], Batch],
        fullgraph: bool = True,
    ) -> None:
        self.model, self.optimizers, self.make_batch = model, optimizers, make_batch
        self.device = next(model.parameters()).device
        gc.collect()  # of the model before
        torch._dynamo.reset()
        self._compiled_body: Body = torch.compile(model.body, fullgraph=fullgraph)
        self._compiled_chunk: ChunkGradients = torch.compile(chunk_gradients, fullgraph=True)
        self._snapshot: Snapshot | None = None

    def batches(self, tokens: int) -> list[Batch]:
        return [self.make_batch(tokens, seed) for seed in range(BATCHES)]

    def forward(self, method: Method, batch: Batch) -> Tensor:
        choice = self.model.choice
        choice.ffn, choice.recompute_layers = method.ffn, method.recompute_layers
        tokens, targets = batch
        body, chunk = self.model.body, chunk_gradients
        if method.compiled:
            body, chunk = self._compiled_body, self._chunk
            torch._dynamo.maybe_mark_dynamic(tokens, 0)  # one compilation for all numbers of sequences
        with method.arena or nullcontext():
            return self.model.loss(tokens, targets, body, chunk)

    def _chunk(self, x: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        for t in (x, targets):
            torch._dynamo.maybe_mark_dynamic(t, 0)  # the last chunk is shorter
        return self._compiled_chunk(x, weight, targets)

    def update(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def step(self, method: Method, batch: Batch) -> Tensor:
        loss = self.forward(method, batch)
        loss.backward()
        self.update()
        return loss.detach()

    def gradients(self, method: Method, batch: Batch) -> Tensor:
        """Checksums, in the order of the parameters; none is updated."""
        self.forward(method, batch).backward()
        found = checksums([p.grad for p in self.model.parameters() if p.grad is not None])
        self.model.zero_grad()
        return found

    def run(self, method: Method, batches: Sequence[Batch], steps: int) -> Tensor:
        return torch.stack([self.step(method, batches[index % len(batches)]) for index in range(steps)])

    def clear(self) -> None:
        """After a step that may have broken off."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def keep(self, slower: float) -> None:
        """Keeps what there is now for `restore`, and divides learning rates, so that measured steps change little."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] /= slower
        states = (
            value for optimizer in self.optimizers for state in optimizer.state.values() for value in state.values()
        )
        tensors = [t for t in states if isinstance(t, Tensor)]
        self._snapshot = Snapshot([*(p.detach() for p in self.model.parameters()), *tensors])

    def restore(self) -> None:
        assert self._snapshot is not None
        self._snapshot.restore()

    def weights(self) -> Tensor:
        """Checksums."""
        return checksums([p.detach() for p in self.model.parameters()])


def checksums(tensors: Sequence[Tensor]) -> Tensor:
    """One of each tensor's bits."""
    views = {4: torch.int32, 2: torch.int16}
    return torch.stack([t.view(views[t.element_size()]).sum(dtype=torch.int64) for t in tensors])


@contextmanager
def deterministic() -> Iterator[None]:
    """With every operator's deterministic algorithm, and attention by matrix products: with `warn_only`, without which
    cumsum raises, backward of the fused kernels adds up dQ in any order all the same (on an H200 PyTorch takes cuDNN's)."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        with warnings.catch_warnings(), sdpa_kernel(SDPBackend.MATH):
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = filled
        torch.use_deterministic_algorithms(False)


@dataclass
class Memory:
    """Bytes allocated at most, weights and optimizer states included, other methods' arenas not."""

    step: int
    forward_backward: int


def slope(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(slope, intercept) of the line with the least squared error."""
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    rise = sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)
    return rise, mean_y - rise * mean_x


def largest_fitting(predicted: int, fits: Callable[[int], bool], probes: int) -> int | None:
    """The largest count that was seen to fit, starting from a prediction and in steps of a few percent, then halving.
    None when none did."""
    low, high, count = 0, math.inf, max(1, predicted)
    for _ in range(probes):
        if fits(count):
            low = count
            count = low + max(1, low // 25) if high == math.inf else (low + int(high)) // 2
        else:
            high = count
            count = (low + count) // 2 if low else count - max(1, count // 8)
        if count <= low or count >= high or count < 1 or (high - low <= max(1, 0.02 * low)):
            break
    return low or None


@dataclass
class Targets:
    per_token: float  # of dense-compiled's
    step: float = 1.0


@dataclass
class ModelBench:
    """Rows of one model, all named ``name/...``."""

    name: str
    trainer: Trainer
    result: Result
    clock: Clock
    save: Callable[[], None]
    length: int  # of a sequence
    rounds: int
    compiled: bool
    codecs: Sequence[str]
    only: Sequence[str] | None  # names of methods
    targets: Targets | None

    def __post_init__(self) -> None:
        self._on_gpu = self.trainer.device.type == "cuda"
        methods = methods_of(self.compiled, self.codecs)
        self._methods = [method for method in methods if self.only is None or method.name in self.only]
        self._memory: dict[str, dict[int, Memory]] = {}
        self._tokens_per_second: dict[str, float] = {}

    def add(self, name: str, value: float, unit: str, target: float | None = None, direction: str = ">=") -> None:
        self.result.add(f"{self.name}/{name}", value, unit, target, direction)

    def say(self, text: str) -> None:
        print(f"models: {self.name}: {text} ({self.clock.left():.0f} s left)", flush=True)

    def try_method(self, method: Method, run: Callable[[], object]) -> bool:
        """A compiler that does not work on this machine, or too little memory, must not cost the other methods."""
        try:
            run()
            return True
        except (RuntimeError, torch._dynamo.exc.TorchDynamoException) as error:
            out_of_memory = isinstance(error, torch.OutOfMemoryError)
            if not method.compiled and not out_of_memory:
                raise
            text = next(iter(str(error).splitlines()), "")
            print(f"models: {self.name}: {method.name} failed: {text}", file=sys.stderr, flush=True)
            if not out_of_memory:
                self._methods.remove(method)
        self.trainer.clear()
        return False

    def fresh_arena(self, method: Method) -> None:
        method.arena = bitsparse.Arena(self.trainer.device) if method.uses_arena else None

    def compile_alike(self, tokens: int) -> None:
        """One step of each compiled method with as many tokens as dense-compiled was trained with: code that is made for
        all numbers of tokens is tuned to the first."""
        batches = self.trainer.batches(tokens)
        for method in [method for method in self._methods if method.compiled]:
            self.clock.check()
            self.fresh_arena(method)
            self.try_method(method, partial(self.trainer.run, method, batches, 1))
            method.arena = None

    # Losses --------------------------------------------------------------------------------------------------------

    def check_losses(self, tokens: int) -> None:
        """Some steps of each method from the same state. Eager ones with deterministic algorithms: the gradients of the
        first step, all losses, and weights after them equal dense's in every bit, and so do those of a second run of
        dense. Compiled ones round differently: how much, and how much two runs of the same compiled code differ."""
        batches = self.trainer.batches(tokens)
        found: dict[str, tuple[Tensor, ...]] = {}

        def run(name: str, method: Method) -> None:
            self.clock.check()
            self.say(f"losses of {name}, {tokens} tokens")
            self.fresh_arena(method)
            self.trainer.restore()
            with nullcontext() if method.compiled else deterministic():
                gradients = () if method.compiled else (self.trainer.gradients(method, batches[0]).cpu(),)
                losses = self.trainer.run(method, batches, CHECKED_STEPS)
            found[name] = losses.cpu(), self.trainer.weights().cpu(), *gradients
            method.arena = None

        def compare(name: str) -> None:
            equal = all(map(torch.equal, found[name], found["dense"]))
            self.add(f"{name}/exact", int(equal), "1 = gradients, losses and weights to the last bit", 1)
            if not equal:
                self._say_what_differs(name, found[name], found["dense"])

        for method in list(self._methods):
            done = self.try_method(method, partial(run, method.name, method))
            if done and method.name == "dense-compiled":
                self.try_method(method, partial(run, "again", method))
            if "dense" not in found:
                continue
            if done and not method.compiled and method.name != "dense":
                compare(method.name)
            if done and method.uses_arena and not method.compiled and "dense-again" not in found:
                self.try_method(self._methods[0], partial(run, "dense-again", self._methods[0]))
                compare("dense-again")
            self.save()
        losses = {name: values for name, (values, *_) in found.items()}
        for name in ("dense", "bitsparse"):
            if name in losses:
                self.add(f"{name}/loss", losses[name][-1].item(), f"nats a token, {CHECKED_STEPS}th step")
        if {"dense", "again", "dense-compiled"} <= losses.keys():
            self._compare_compiled(losses)
        self.trainer.restore()
        self.save()

    def _say_what_differs(self, name: str, got: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
        losses, _, gradients = (a != b for a, b in zip(got, expected, strict=True))
        steps = [str(step) for step in losses.nonzero().flatten().tolist()]
        names = [name for name, parameter in self.trainer.model.named_parameters() if parameter.requires_grad]
        wrong = [names[index] for index in gradients.nonzero().flatten().tolist()]
        self.say(
            f"{name}: other losses in steps {', '.join(steps) or '-'}; gradients of the first that differ: {wrong}"
        )

    def _compare_compiled(self, losses: dict[str, Tensor]) -> None:
        def difference(name: str, of: str) -> float:
            return (losses[name] - losses[of]).abs().max().item()

        again, rounding = difference("again", "dense-compiled"), difference("dense-compiled", "dense")
        self.add("dense-compiled/loss_again", again, "largest difference of losses, the same compiled code run twice")
        self.add("dense-compiled/loss_of_dense", rounding, "largest difference of losses to dense eager's")
        unit = "largest difference of losses to dense-compiled's"
        for method in self._methods:
            if is_judged(method.name) and method.name in losses:
                ours = difference(method.name, "dense-compiled")
                self.add(f"{method.name}/loss_of_compiled", ours, unit, max(again, rounding), "<=")

    # Steps ---------------------------------------------------------------------------------------------------------

    def measure(self, tokens: int) -> None:
        """Memory of each method after its warm-up, then times in turns."""
        self.clock.check()
        self.say(f"{tokens} tokens a step")
        batches = self.trainer.batches(tokens)
        ready: list[Method] = []
        for method in list(self._methods):
            self.clock.check()
            self.fresh_arena(method)
            if self.try_method(method, partial(self._prepare, method, batches, [*ready, method])):
                ready.append(method)
            else:
                method.arena = None
        before = {method.name: method.stats()["waits"] for method in ready}
        steps = {m.name: [partial(self.trainer.step, m, batch) for batch in batches] for m in ready}
        times = timing.time_in_turns(steps, self.trainer.device, self.rounds, lead_seconds=LEAD_SECONDS)
        waits = {method.name: method.stats()["waits"] - before[method.name] for method in ready}
        for method in ready:
            self._add_step(tokens, method, times, waits[method.name])
            method.arena = None
        self.trainer.clear()
        self.save()

    def _prepare(self, method: Method, batches: Sequence[Batch], alive: Sequence[Method]) -> None:
        self.trainer.run(method, batches, WARM_UP)
        if not self._on_gpu:
            return
        torch.cuda.synchronize()
        others = sum(int(other.stats()["capacity"]) for other in alive if other is not method)
        torch.cuda.reset_peak_memory_stats()
        self.trainer.forward(method, batches[0]).backward()
        forward_backward = torch.cuda.max_memory_allocated() - others
        self.trainer.update()
        step = torch.cuda.max_memory_allocated() - others
        tokens = batches[0][0].numel()
        self._memory.setdefault(method.name, {})[tokens] = Memory(step, forward_backward)

    def _add_step(self, tokens: int, method: Method, times: dict[str, timing.Timing], waits: float) -> None:
        row, measured = f"tokens={tokens}/{method.name}", times[method.name]
        self._tokens_per_second[method.name] = tokens / measured.median * 1e3
        unit = "ms, forward, backward and optimizers"
        self.result.add_times(f"{self.name}/{row}/step_ms", measured, unit)
        self.add(f"{row}/tokens_per_s", self._tokens_per_second[method.name], "tokens a second")
        if (memory := self._memory.get(method.name, {}).get(tokens)) is not None:
            self.add(f"{row}/peak_bytes", memory.step, "bytes, weights and optimizer states included")
            self.add(f"{row}/forward_backward_bytes", memory.forward_backward, "bytes, peak before the optimizers")
        if "dense-compiled" in times:
            ratio = measured.median / times["dense-compiled"].median
            target = self.targets.step if self.targets and is_judged(method.name) else None
            self.add(f"{row}/step_of_compiled", ratio, "of dense-compiled's", target, "<=")
        if method.arena:
            self.add(f"{row}/waits", waits, "times the host waited, timed steps", 0, "<=")

    # Memory --------------------------------------------------------------------------------------------------------

    def _line(self, method: str, what: str) -> tuple[float, float] | None:
        """Slope and intercept over the counts from a quarter of the largest on: below, other things than activations
        can make the peak."""
        memories = self._memory.get(method, {})
        most = max(memories, default=0)
        points = [(n, float(getattr(memory, what))) for n, memory in memories.items() if 4 * n >= most]
        return slope(points) if len(points) >= 2 else None

    def add_slopes(self) -> None:
        lines = {name: self._line(name, "forward_backward") for name in self._memory}
        base = lines.get("dense-compiled")
        for name, line in lines.items():
            if line is None:
                continue
            self.add(f"{name}/per_token_bytes", line[0], "bytes a token: slope of forward_backward_bytes")
            if base is not None and base[0] > 0:
                target = self.targets.per_token if self.targets and is_judged(name) else None
                self.add(f"{name}/per_token_of_compiled", line[0] / base[0], "of dense-compiled's", target, "<=")
        self.save()

    def find_caps(self, caps: Sequence[int], seconds: float) -> None:
        """The largest number of tokens of a step under each cap on what PyTorch's allocator takes from the device. Tried
        as long as `seconds` last, smaller caps first; the others are extrapolated from the slope, which knows nothing of
        fragmentation."""
        end = time.monotonic() + seconds
        for gib in caps:
            for method in list(self._methods):
                line = self._line(method.name, "step")
                if line is None or line[0] <= 0:  # --quick: too small to see
                    continue
                predicted = int((gib * GIB - line[1]) / line[0]) // self.length
                rate = self._tokens_per_second[method.name]
                estimate = 2 + 3 * PROBE_STEPS * max(predicted, 1) * self.length / rate
                if time.monotonic() + estimate < min(end, time.monotonic() + self.clock.left()):
                    self._try_cap(gib, method, predicted)
                else:
                    tokens = max(0, predicted) * self.length
                    self.add(f"{method.name}/cap={gib}/tokens_extrapolated", tokens, "tokens, from the slope")
                self.save()

    def _try_cap(self, gib: int, method: Method, predicted: int) -> None:
        self.say(f"{method.name} in {gib} GiB, perhaps {predicted * self.length} tokens")
        total = torch.cuda.get_device_properties(self.trainer.device).total_memory
        if gib * GIB >= total:
            return
        self.trainer.clear()
        torch.cuda.set_per_process_memory_fraction(gib * GIB / total, self.trainer.device)
        try:
            # A few percent below the slope's figure: the allocator's blocks are not packed without gaps.
            most = largest_fitting(int(0.96 * predicted), partial(self._fits, method), PROBES)
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0, self.trainer.device)
            self.trainer.clear()
        self.add(f"{method.name}/cap={gib}/tokens", (most or 0) * self.length, "tokens, tried")

    def _fits(self, method: Method, sequences: int) -> bool:
        """Whether a few steps run, without compressed activations that went to the host's memory."""
        try:
            self._probe(method, sequences)
            fits = True
        except _Spilled:
            fits = False
        except RuntimeError as error:  # compilers may wrap what is an OutOfMemoryError
            if "out of memory" not in str(error).lower():
                raise
            fits = False
        method.arena = None
        self.trainer.clear()
        return fits

    def _probe(self, method: Method, sequences: int) -> None:
        self.clock.check()
        batch = self.trainer.make_batch(sequences * self.length, 0)
        self.fresh_arena(method)
        for _ in range(PROBE_STEPS):
            loss = self.trainer.forward(method, batch)
            if method.stats()["spilled"]:
                raise _Spilled
            loss.backward()
            self.trainer.update()
        torch.cuda.synchronize()


class _Spilled(Exception):
    pass
