"""A full arena at every level: room, spill, loss. Results equal the dense ones bit for bit, or the failure is seen.

Small enough to run under ``compute-sanitizer --tool memcheck``: nothing may be written out of bounds at any level.
"""

import gc
import random
import re
from dataclasses import dataclass

import pytest
import torch
from support import assert_same_bits, bits, dense_linear, randn, run_backward
from torch import Tensor

import bitsparse

pytestmark = pytest.mark.cuda

PAGE = 512 << 10
ROWS, WIDTH = 512, 4096  # a layer: 4 MiB dense, so some six pages when every element is kept, one at 2 %
LOSS = r"was full: a lease of \d+ bytes dense needed \d+ bytes; the arena's capacity is {} bytes and {} bytes of spill"


@dataclass
class Layer:
    """A pre-activation, and what dense training makes of it: output, gradients of h and w2."""

    h: Tensor
    w2: Tensor
    expected: list[Tensor]


def layer(density: float, seed: int = 1) -> Layer:
    """Exactly the given share of elements is kept, spread evenly over the tensor."""
    h = randn(ROWS, WIDTH, seed=seed, dtype=torch.bfloat16, device="cuda").abs_().clamp_(min=1e-3)
    rank = torch.rand(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed + 1)).to("cuda")
    h[rank >= density] *= -1
    w2 = randn(8, WIDTH, seed=3, dtype=torch.bfloat16, device="cuda")
    y, gradients = run_backward(dense_linear, [h, w2])
    return Layer(h, w2, [y, *gradients])


def pages_of(layers: list[Layer]) -> list[int]:
    """What each of them takes, alone."""
    pages = []
    for each in layers:
        arena = bitsparse.Arena("cuda", worst_case=True)
        with arena:
            y = bitsparse.relu_squared_linear(each.h.clone().requires_grad_(), each.w2)
        pages.append(arena.memory_stats(synchronize=True)["in_use"] // PAGE)
        del y
    return pages


@dataclass
class Step:
    error: str | None  # of OutOfArenaMemory
    stats: dict  # while all leases were alive; empty if there was an error before
    inexact: int  # results that are not the dense ones


def check_exact_or_nan(got: Tensor | None, expected: Tensor, what: str) -> bool:
    """True: bit for bit. A gradient of h is so element by element; the others are sums, in which one NaN is enough."""
    if got is None:
        return False
    same = bits(got) == bits(expected)
    if bool(same.all()):
        return True
    assert bool(got.isnan().any()), f"{what}: {int((~same).sum())} elements differ and none is NaN"
    if what.endswith("h"):
        assert bool((same | got.isnan()).all()), f"{what}: elements that are neither exact nor NaN"
    return False


def train(arena: bitsparse.Arena, layers: list[Layer], look: bool = True) -> Step:
    """One step: all forwards, then all backwards. `look`: between the two ask for exact figures."""
    leaves = [(each.h.clone().requires_grad_(), each.w2.clone().requires_grad_()) for each in layers]
    outputs, error, stats = [], None, {}
    try:
        with arena:
            for h, w2 in leaves:
                outputs.append(bitsparse.relu_squared_linear(h, w2))
        if look:
            stats = arena.memory_stats(synchronize=True)
        for y in reversed(outputs):
            y.sum().backward()
        arena.memory_stats(synchronize=True)
    except torch.OutOfMemoryError as caught:
        error = str(caught)
    gc.collect()  # an error holds frames, and their leases
    inexact = 0
    for number, (each, (h, w2)) in enumerate(zip(layers, leaves, strict=True)):
        y = outputs[number].detach() if number < len(outputs) else None
        for what, got, expected in zip(("y", "h", "w2"), (y, h.grad, w2.grad), each.expected, strict=True):
            inexact += not check_exact_or_nan(got, expected, f"layer {number}: {what}")
    return Step(error, stats, inexact)


def assert_exact(step: Step) -> None:
    assert step.error is None, step.error
    assert step.inexact == 0, step


def assert_loud(step: Step, capacity: int, spill: int, setting: str) -> None:
    assert step.error is not None, f"no error, {step}"
    assert re.search(LOSS.format(capacity, spill), step.error), step.error
    assert setting in step.error, step.error


def assert_nothing_is_left(arena: bitsparse.Arena) -> None:
    gc.collect()  # errors hold frames, and these tensors
    stats = arena.memory_stats(synchronize=True)
    assert [stats[key] for key in ("in_use", "spilled", "live_leases")] == [0, 0, 0], stats


@pytest.mark.parametrize("spill", ["no spill", "spill one page short", "just enough spill", "more spill than needed"])
@pytest.mark.parametrize("capacity", ["nothing", "one page", "one page short", "exactly enough"])
def test_fixed_capacities(capacity, spill):
    layers = [layer(density, seed) for seed, density in enumerate((0.02, 0.3, 1.0))]
    needed = sum(pages_of(layers))
    assert needed >= 8, "the cases below would be the same"
    pages = {"nothing": 0, "one page": 1, "one page short": needed - 1, "exactly enough": needed}[capacity]
    missing = needed - pages
    spill_pages = {
        "no spill": 0,
        "spill one page short": max(0, missing - 1),
        "just enough spill": missing,
        "more spill than needed": missing + 5,
    }[spill]
    arena = bitsparse.Arena("cuda", capacity=pages * PAGE, spill_bytes=spill_pages * PAGE)
    for round in range(3):  # a failure leaves the arena as it was
        step = train(arena, layers)
        if spill_pages >= missing:
            assert_exact(step)
            stats = step.stats
            assert (stats["in_use"], stats["capacity"]) == (needed * PAGE, pages * PAGE), stats
            if round == 0:  # later, a lease may begin before device pages of the last step are back
                assert stats["spilled"] == missing * PAGE, stats
            assert stats["spilled"] >= missing * PAGE, stats
        else:
            assert_loud(step, pages * PAGE, spill_pages * PAGE, "Raise Arena(capacity=...)")
        assert_nothing_is_left(arena)
    failures = arena.memory_stats()["failures"]
    assert (failures >= 3) == (spill_pages < missing), failures
    if pages + spill_pages >= 1:
        assert_exact(train(arena, layers[:1]))
    assert_nothing_is_left(arena)


@pytest.mark.parametrize("capacity_pages", [0, 1, 4])
def test_outputs_are_nan_where_the_host_cannot_know(capacity_pages):
    """The whole step is enqueued before the device gets to it: no call can fail, so gradients must be NaN."""
    layers = [layer(1.0, seed) for seed in range(2)]
    arena = bitsparse.Arena("cuda", capacity=capacity_pages * PAGE, spill_bytes=0)
    with arena:  # the arena exists, so that nothing waits from here on
        bitsparse.relu_squared_linear(layers[0].h[:0].clone().requires_grad_(), layers[0].w2)
    leaves = [(each.h.clone().requires_grad_(), each.w2.clone().requires_grad_()) for each in layers]
    torch.cuda.synchronize()
    torch.cuda._sleep(400_000_000)
    with arena:
        outputs = [bitsparse.relu_squared_linear(h, w2) for h, w2 in leaves]
    for y in reversed(outputs):
        y.sum().backward()
    assert arena.memory_stats()["failures"] == 0, "the device was faster than the host: sleep longer"
    with pytest.raises(bitsparse.OutOfArenaMemory, match=LOSS.format(capacity_pages * PAGE, 0)):
        arena.memory_stats(synchronize=True)
    for number, (each, y, (h, w2)) in enumerate(zip(layers, outputs, leaves, strict=True)):
        assert_same_bits(y.detach(), each.expected[0], f"layer {number}: the forward pass needs no arena")
        assert not check_exact_or_nan(h.grad, each.expected[1], f"layer {number}: h"), "more room than was given"
        assert not check_exact_or_nan(w2.grad, each.expected[2], f"layer {number}: w2")
    del outputs, y
    assert_nothing_is_left(arena)
    assert arena.memory_stats()["failures"] == 2, "one for each lease"


def settled(layers: list[Layer], **options: object) -> bitsparse.Arena:
    """An arena that has seen enough steps of these layers to be in steady state."""
    arena = bitsparse.Arena("cuda", **options)
    for _ in range(3):
        assert_exact(train(arena, layers, look=False))
    return arena


@pytest.mark.parametrize("jumping", ["one layer", "all layers"])
def test_density_jumps_in_one_step(jumping):
    """From 2 % to 100 %, in an arena that sizes itself: what its headroom lacks is in the spill region, once."""
    sparse = [layer(0.02, seed) for seed in range(6)]
    dense = [layer(1.0, seed) for seed in range(6)]
    jumped = [*sparse[:3], dense[3], *sparse[4:]] if jumping == "one layer" else dense
    before, after = sum(pages_of(sparse)), sum(pages_of(jumped))
    arena = settled(sparse)
    capacity = arena.memory_stats(synchronize=True)["capacity"]
    assert capacity < after * PAGE, "nothing would overflow"
    assert capacity <= (1.15 * before + 1) * PAGE, "the arena is as large as the sparse steps need"
    step = train(arena, jumped)
    assert_exact(step)
    assert step.stats["in_use"] == after * PAGE, step.stats
    assert step.stats["spilled"] > 0, step.stats
    for _ in range(2):  # it follows
        step = train(arena, jumped)
        assert_exact(step)
    assert step.stats["spilled"] == 0, step.stats
    assert step.stats["capacity"] >= after * PAGE, step.stats
    assert_exact(train(arena, sparse))
    assert_nothing_is_left(arena)
    assert arena.memory_stats()["failures"] == 0


@pytest.mark.parametrize("spill_pages", [0, 2])
def test_density_jumps_beyond_the_spill_region(spill_pages):
    """Seen at once; what is lost counts as needed, so that the step succeeds when it is done again."""
    sparse = [layer(0.02, seed) for seed in range(4)]
    jumped = [*sparse[:1], *(layer(1.0, seed) for seed in (1, 2)), *sparse[3:]]
    arena = settled(sparse, spill_bytes=spill_pages * PAGE)
    failed = train(arena, jumped)
    assert_loud(failed, arena.memory_stats()["capacity"], spill_pages * PAGE, "Raise Arena(spill_bytes=...)")
    errors = [failed.error]
    while len(errors) < 4 and errors[-1] is not None:
        errors.append(train(arena, jumped).error)
    assert errors[-1] is None, errors
    step = train(arena, jumped)
    assert_exact(step)
    assert step.stats["spilled"] == 0, step.stats
    assert_nothing_is_left(arena)


@dataclass
class Captured:
    """Forward and backward of some layers in one CUDA graph, whose inputs can be set."""

    graph: torch.cuda.CUDAGraph
    leaves: list[tuple[Tensor, Tensor]]
    outputs: list[Tensor]
    gradients: list[tuple[Tensor, Tensor]]

    def replay(self, layers: list[Layer]) -> None:
        with torch.no_grad():
            for (h, _), each in zip(self.leaves, layers, strict=True):
                h.copy_(each.h)
            for gradients in self.gradients:
                for gradient in gradients:
                    gradient.fill_(-7)
        self.graph.replay()

    def inexact(self, layers: list[Layer]) -> int:
        count = 0
        for number, (each, y, grads) in enumerate(zip(layers, self.outputs, self.gradients, strict=True)):
            for what, got, expected in zip(("y", "h", "w2"), (y.detach(), *grads), each.expected, strict=True):
                count += not check_exact_or_nan(got, expected, f"layer {number}: {what}")
        return count


def capture(arena: bitsparse.Arena, layers: list[Layer], keep: bool) -> Captured:
    """`keep`: leases outlive the backward pass, so that statistics count them between replays."""
    leaves = [(each.h.clone().requires_grad_(), each.w2.clone().requires_grad_()) for each in layers]
    graph = torch.cuda.CUDAGraph()
    with arena, torch.cuda.graph(graph):
        outputs = [bitsparse.relu_squared_linear(h, w2) for h, w2 in leaves]
        gradients = [
            torch.autograd.grad(y.sum(), list(pair), retain_graph=keep)
            for y, pair in reversed(list(zip(outputs, leaves, strict=True)))
        ]
    return Captured(graph, leaves, outputs, gradients[::-1])


@pytest.mark.parametrize("keep", [False, True], ids=["released in the graph", "alive between replays"])
def test_density_jumps_in_a_graph_replay(keep):
    sparse = [layer(0.02, seed) for seed in range(4)]
    dense = [layer(1.0, seed) for seed in range(4)]
    needed = sum(pages_of(dense))
    arena = settled(sparse)
    captured = capture(arena, sparse, keep)
    replays = [sparse, dense, sparse, [*sparse[:2], dense[2], *sparse[3:]], dense, dense, sparse]
    spilled = []
    for number, layers in enumerate(replays):
        captured.replay(layers)
        stats = arena.memory_stats(synchronize=True)
        assert captured.inexact(layers) == 0, f"replay {number}"
        spilled.append(stats["spilled"])
    stats = arena.memory_stats(synchronize=True)
    assert stats["capacity"] < needed * PAGE, "nothing would overflow"
    assert stats["failures"] == 0
    assert spilled[0] == 0
    assert (spilled[1] > 0) == keep, f"statistics count what has an owner: {spilled}"
    del captured
    torch.cuda.synchronize()
    assert_nothing_is_left(arena)


def test_graph_replays_that_find_no_room():
    """Each replay is exact or fails loudly, and one that fits is exact whatever the one before was."""
    sparse = [layer(0.02, seed) for seed in range(2)]
    dense = [layer(1.0, seed) for seed in range(2)]
    capacity = sum(pages_of(dense)) * PAGE - PAGE
    arena = bitsparse.Arena("cuda", capacity=capacity, spill_bytes=0)
    assert_exact(train(arena, sparse))
    captured = capture(arena, sparse, keep=False)
    for number in range(9):
        layers = (sparse, [dense[0], sparse[1]], dense)[number % 3]
        captured.replay(layers)
        if layers is dense:
            with pytest.raises(bitsparse.OutOfArenaMemory, match=LOSS.format(capacity, 0)):
                arena.memory_stats(synchronize=True)
            assert captured.inexact(layers) > 0, f"replay {number}: nothing was lost"
        else:
            arena.memory_stats(synchronize=True)
            assert captured.inexact(layers) == 0, f"replay {number}"
    del captured
    torch.cuda.synchronize()
    assert_nothing_is_left(arena)


@pytest.mark.parametrize("activation", ["relu", "relu_squared"])
def test_a_lost_tile_makes_its_gradient_nan(activation):
    ops, each = torch.ops.bitsparse, layer(1.0)
    arena = bitsparse.Arena("cuda", capacity=PAGE, spill_bytes=0)
    with arena:
        ops._compress_activation_.default(each.h[:1].clone(), activation, "tight")  # the first use takes its time
        torch.cuda._sleep(4_000_000_000)  # the device is two seconds behind: the host can't know yet
        lease = ops._compress_activation_.default(each.h.clone(), activation, "tight")
        grad = torch.ones_like(each.h)
        ops._activation_gradient_.default(grad, lease, activation)
    tiles = grad.view(-1, 4096)  # elements
    lost = tiles.isnan().all(dim=1)
    assert 0 < lost.sum() < len(tiles)
    expected = torch.ones_like(each.h) if activation == "relu" else 2 * each.h
    assert torch.equal(tiles[~lost], expected.view(-1, 4096)[~lost])
    with pytest.raises(bitsparse.OutOfArenaMemory, match=LOSS.format(PAGE, 0)):
        arena.memory_stats(synchronize=True)


def test_an_arena_that_cannot_be_had_is_an_error_every_time():
    sparse = layer(0.02)
    arena = bitsparse.Arena("cuda", capacity=1 << 42)
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError), arena:
            bitsparse.relu_squared_linear(sparse.h.clone().requires_grad_(), sparse.w2)
    assert arena.memory_stats()["capacity"] == 0
    assert_exact(train(bitsparse.Arena("cuda"), [sparse]))


def test_spill_warns_once_and_says_what_to_do(capfd):
    dense = [layer(1.0)]
    arena = bitsparse.Arena("cuda", capacity=PAGE, spill_bytes=16 * PAGE)
    for _ in range(3):
        assert_exact(train(arena, dense))
    assert capfd.readouterr().err.count("is in pinned host memory") == 1


@pytest.mark.parametrize("kind", ["fixed", "automatic"])
def test_a_thousand_replays_of_changing_densities(kind, capfd):
    """Those that fit and those that spill in any order, each compared on the device; a fixed arena has eager steps in
    between, which would make an automatic one grow."""
    layers = [layer(density, seed) for seed, density in enumerate((0.0, 0.02, 0.1, 0.3, 0.9, 1.0))]
    pages = dict(zip(map(id, layers), pages_of(layers), strict=True))
    at_first = [layers[1]] * 4
    options = {"capacity": 10 * PAGE, "spill_bytes": 64 * PAGE} if kind == "fixed" else {}
    arena = settled(at_first, **options)
    captured = capture(arena, at_first, keep=False)
    wrong = torch.zeros(1, dtype=torch.int64, device="cuda")
    rng, needed = random.Random(1), []
    for number in range(1000):
        chosen = [rng.choice(layers) for _ in range(4)]
        needed.append(sum(pages[id(each)] for each in chosen) * PAGE)
        captured.replay(chosen)
        for each, y, gradients in zip(chosen, captured.outputs, captured.gradients, strict=True):
            for got, expected in zip((y.detach(), *gradients), each.expected, strict=True):
                wrong += (bits(got) != bits(expected)).any()
        if kind == "fixed" and number % 50 == 49:
            assert_exact(train(arena, chosen[:2], look=False))
    assert wrong.item() == 0, f"{wrong.item()} results of 12 000 are not exact"
    stats = arena.memory_stats(synchronize=True)
    assert stats["failures"] == 0
    spilling = sum(size > stats["capacity"] for size in needed)
    assert spilling >= 50, f"{spilling} replays spilled: capacity {stats['capacity']}"
    if kind == "fixed":
        assert spilling <= 950, f"{1000 - spilling} replays fitted"
    assert capfd.readouterr().err.count("is in pinned host memory") == 1
    del captured
    torch.cuda.synchronize()
    assert_nothing_is_left(arena)


def test_growth_that_pytorch_refuses_goes_to_the_spill_region():
    each = layer(1.0)
    h = each.h.clone()
    arena = bitsparse.Arena("cuda")
    with arena:  # the arena exists, and is as small as it gets
        torch.ops.bitsparse._compress_activation_.default(each.h[:1].clone(), "relu", "tight")
    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties("cuda").total_memory
    filler = []
    try:
        torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / total)
        with pytest.raises(torch.OutOfMemoryError):
            while True:
                filler.append(torch.empty(4 * PAGE, dtype=torch.uint8, device="cuda"))
        with arena:
            lease = torch.ops.bitsparse._compress_activation_.default(h, "relu", "tight")
        stats = arena.memory_stats(synchronize=True)
    finally:
        filler.clear()
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert stats["failures"] == 0, stats
    assert stats["spilled"] > 0, stats
    assert stats["in_use"] <= stats["capacity"] + stats["spilled"], stats
    restored = torch.ops.bitsparse._restore_activation.default(lease, list(h.shape), h.dtype, "relu")
    assert_same_bits(restored, each.h)
    del lease
    assert_nothing_is_left(arena)
