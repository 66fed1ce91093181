"""Arenas: statistics, fixed sizes, and which arena a compression goes to."""

import copy
import pickle
import subprocess
import sys
import threading

import pytest
import torch
from support import (
    DEVICES,
    as_leaves,
    assert_same_bits,
    captured,
    dense_ffn,
    dense_linear,
    ffn_arguments,
    randn,
    run_backward,
    sparse,
)

import bitsparse
from bitsparse import _C
from bitsparse.arena import STAT_KEYS
from bitsparse.summary import _readable

on_devices = pytest.mark.parametrize("device", DEVICES)


def block(device, seed=1, tokens=64):
    """A graph that holds one lease: (output, leaves)."""
    leaves = as_leaves(
        [
            randn(tokens, 512, seed=seed, dtype=torch.bfloat16, device=device),
            randn(16, 512, seed=2, dtype=torch.bfloat16, device=device),
        ]
    )
    return bitsparse.relu_squared_linear(*leaves), leaves


def assert_right(graph):
    y, leaves = graph
    y.sum().backward()
    for leaf, grad in zip(leaves, run_backward(dense_linear, leaves)[1], strict=True):
        assert_same_bits(leaf.grad, grad)


@on_devices
def test_statistics_have_the_documented_keys(device):
    arena = bitsparse.Arena(device)
    stats = arena.memory_stats()
    assert set(stats) == set(STAT_KEYS)
    for key, value in stats.items():
        assert isinstance(value, float if key == "payload_ratio" else int), key
        assert value == 0, key
    assert set(bitsparse.memory_stats(device)) == set(STAT_KEYS)
    for key in STAT_KEYS:
        assert f"{key}:" in bitsparse.memory_stats.__doc__


def test_a_device_without_an_arena_has_zeros_and_gets_none(run_python):
    code = (
        "import bitsparse; from bitsparse import _C;"
        "assert not any(bitsparse.memory_stats('cpu').values());"
        "assert not any(bitsparse.memory_stats('cuda').values());"
        "bitsparse.reset_peak_memory_stats('cpu');"
        "assert not _C.has_default_arena('cpu');"
        "arena = _C.default_arena('cpu');"
        "assert _C.has_default_arena('cpu') and arena.device == 'cpu', arena.device"
    )
    run_python("-c", code)


@on_devices
def test_statistics_follow_leases(device):
    arena = bitsparse.Arena(device)
    assert arena.device.type == device
    with arena:
        graphs = [block(device, seed) for seed in range(3)]
    stats = arena.memory_stats(synchronize=True)
    assert (stats["live_leases"], stats["leases_total"], stats["failures"], stats["spilled"]) == (3, 3, 0, 0)
    assert stats["dense_bytes"] == 3 * 64 * 512 * 2
    assert 0 < stats["in_use"] <= stats["high_water"] <= stats["capacity"]
    packed = sum(bitsparse.compress(h.detach(), keep="positive").nbytes for _, (h, _) in graphs)
    assert stats["payload_ratio"] == pytest.approx(packed / stats["dense_bytes"], abs=0.02)
    graphs.pop(1)
    assert arena.memory_stats(synchronize=True)["live_leases"] == 2
    for graph in graphs:
        assert_right(graph)
    del graphs, graph
    after = arena.memory_stats(synchronize=True)
    assert (after["live_leases"], after["in_use"], after["dense_bytes"]) == (0, 0, 0)
    assert after["leases_total"] == 3
    assert after["high_water"] == stats["high_water"]
    arena.reset_peak_memory_stats()
    assert arena.memory_stats(synchronize=True)["high_water"] == 0
    arena.trim()


@on_devices
def test_innermost_arena_is_used(device):
    outer, inner = bitsparse.Arena(device), bitsparse.Arena(device)
    default = bitsparse.memory_stats(device)["leases_total"]
    graphs = []
    with outer:
        graphs.append(block(device))
        with inner:
            graphs.append(block(device))
            with inner:
                graphs.append(block(device))
        graphs.append(block(device))
    counts = [arena.memory_stats(synchronize=True)["live_leases"] for arena in (outer, inner)]
    assert counts == [2, 2]
    assert bitsparse.memory_stats(device)["leases_total"] == default
    graphs.append(block(device))
    assert bitsparse.memory_stats(device)["leases_total"] == default + 1
    for graph in graphs:
        assert_right(graph)


@on_devices
def test_leases_outlive_their_arena(device):
    arena = bitsparse.Arena(device)
    with arena:
        graph = block(device)
    del arena
    for seed in range(5):
        assert_right(block(device, seed))
    assert_right(graph)


@on_devices
def test_with_affects_this_thread_only(device):
    arena = bitsparse.Arena(device)
    graphs = []
    with arena:
        thread = threading.Thread(target=lambda: graphs.append(block(device)))
        thread.start()
        thread.join()
    assert arena.memory_stats()["leases_total"] == 0
    assert_right(graphs.pop())


@on_devices
def test_leaving_by_an_exception(device):
    arena = bitsparse.Arena(device)
    with pytest.raises(KeyError), arena:
        raise KeyError
    assert_right(block(device))
    assert arena.memory_stats()["leases_total"] == 0


def used_by_a_block(arena):
    before = arena.memory_stats()["leases_total"]
    block("cpu")
    return arena.memory_stats()["leases_total"] > before


def test_leaving_arenas_in_another_order():
    """As generators do that are suspended inside of ``with``."""

    def suspended(arena):
        with arena:
            yield

    first, second = bitsparse.Arena("cpu"), bitsparse.Arena("cpu")
    generators = [suspended(first), suspended(second)]
    for each in generators:
        next(each)
    generators[0].close()
    assert (used_by_a_block(first), used_by_a_block(second)) == (False, True)
    generators[1].close()
    assert (used_by_a_block(first), used_by_a_block(second)) == (False, False)
    with pytest.raises(RuntimeError, match=r"expected an arena that this thread has entered and not left"):
        first.__exit__(None, None, None)


def test_fixed_capacity_that_is_too_small():
    """An error that names bytes and setting; no state is lost and the arena goes on working."""
    arena = bitsparse.Arena("cpu", capacity=40_000)
    with arena:
        kept = block("cpu")
        with pytest.raises(bitsparse.OutOfArenaMemory, match=r"needs \d+ bytes.* 40000 .*capacity") as caught:
            block("cpu", tokens=640)
        assert isinstance(caught.value, torch.OutOfMemoryError)
        assert not str(caught.value).startswith("bitsparse.OutOfArenaMemory")
        stats = arena.memory_stats()
        assert (stats["capacity"], stats["failures"], stats["live_leases"]) == (40_000, 1, 1)
        assert_right(kept)
        del kept, caught
        assert_right(block("cpu"))
    assert arena.memory_stats()["in_use"] == 0


def test_error_keeps_the_inputs_and_gradients_intact():
    tensors = ffn_arguments("cpu", torch.float32)
    copies = [t.clone() for t in tensors]
    with bitsparse.Arena("cpu", capacity=0), pytest.raises(bitsparse.OutOfArenaMemory):
        bitsparse.relu_squared_ffn(*as_leaves(tensors))
    for t, expected in zip(tensors, copies, strict=True):
        assert_same_bits(t, expected)
    got, expected = run_backward(bitsparse.relu_squared_ffn, tensors), run_backward(dense_ffn, tensors)
    assert_same_bits(got[0], expected[0])


@on_devices
@pytest.mark.parametrize("options", [{"density_bound": 1.0}, {"worst_case": True}, {"capacity": 64 << 20}], ids=str)
def test_ways_to_size_an_arena(device, options):
    arena = bitsparse.Arena(device, **options)
    with arena:
        for seed in range(8):
            graphs = [block(device, seed + i) for i in range(3)]
            while graphs:
                assert_right(graphs.pop(0))
    stats = arena.memory_stats(synchronize=True)
    assert (stats["in_use"], stats["failures"], stats["leases_total"]) == (0, 0, 24)
    if "worst_case" in options:
        assert stats["waits"] == 0
    if "capacity" in options:
        assert stats["growths"] <= 1
    assert next(iter(options)) in repr(arena)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"capacity": -1}, "expected capacity >= 0 bytes, got -1"),
        ({"density_bound": 0.0}, r"expected density_bound in \(0, 1\], got 0"),
        ({"density_bound": 1.5}, r"expected density_bound in \(0, 1\], got 1.5"),
        ({"capacity": 2**63}, f"expected capacity to be at most {2**63 - 1} bytes, got {2**63}"),
        ({"spill_bytes": 2**64}, f"expected spill_bytes to be at most {2**63 - 1} bytes, got {2**64}"),
        ({"density_bound": 10**400}, r"expected density_bound in \(0, 1\], got 1000"),
        ({"density_bound": float("nan")}, r"expected density_bound in \(0, 1\], got nan"),
        ({"capacity": 1, "worst_case": True}, "expected at most one of capacity, density_bound and worst_case, got 2"),
    ],
)
def test_settings_that_are_wrong(options, message):
    with pytest.raises(ValueError, match=message):
        bitsparse.Arena("cpu", **options)


@pytest.mark.parametrize("device", ["meta", "mps"])
def test_devices_that_are_not_supported(device):
    with pytest.raises((ValueError, RuntimeError), match="expected device to be"):
        bitsparse.Arena(device)


@pytest.mark.skipif(_C.build_info()["cuda"] is not None, reason="built with CUDA")
def test_build_without_cuda_says_so():
    with pytest.raises(ValueError, match=r"expected device to be cpu, got cuda:0.*no CUDA code"):
        bitsparse.Arena("cuda:0")


def test_arenas_are_not_copied():
    arena = bitsparse.Arena("cpu")
    for attempt in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError):
            attempt(arena)


@on_devices
def test_compress_takes_nothing_from_the_arena(device):
    before = bitsparse.memory_stats(device, synchronize=True)
    packed = bitsparse.compress(sparse(10_000, density=0.2, seed=1, dtype=torch.float32, device=device))
    packed.decompress()
    after = bitsparse.memory_stats(device, synchronize=True)
    assert (after["live_leases"], after["leases_total"]) == (before["live_leases"], before["leases_total"])


@pytest.mark.cuda
@pytest.mark.parametrize("options", [{}, {"worst_case": True}], ids=str)
def test_graph_whose_leases_follow_one_another(options):
    """Two microbatches in one CUDA graph, which share slots; every replay finds other densities."""
    arena = bitsparse.Arena("cuda", **options)
    w = randn(32, 1024, seed=2, dtype=torch.bfloat16, device="cuda").requires_grad_()
    inputs = [torch.zeros(512, 1024, dtype=torch.bfloat16, device="cuda", requires_grad=True) for _ in range(2)]

    def microbatches():
        return [torch.autograd.grad(bitsparse.relu_squared_linear(h, w).sum(), [h, w]) for h in inputs]

    def set_inputs(step):
        with torch.no_grad():
            for i, h in enumerate(inputs):
                density = (0.02, 0.9, 0.3, 0.0, 1.0)[(step + 2 * i) % 5]
                h.copy_(sparse(512, 1024, density=density, seed=step + i, dtype=torch.bfloat16).abs())

    with arena:
        set_inputs(4)
        graph, results = captured(microbatches, warm_ups=3)
    for step in range(100):
        set_inputs(step)
        graph.replay()
        for h, grads in zip(inputs, results, strict=True):
            for got, expected in zip(grads, run_backward(dense_linear, [h, w])[1], strict=True):
                assert_same_bits(got, expected, f"replay {step}")
    stats = arena.memory_stats(synchronize=True)
    assert (stats["live_leases"], stats["in_use"], stats["failures"]) == (0, 0, 0)


@pytest.mark.cuda
def test_capacity_after_the_first_step_is_what_is_used():
    """Leases that have ended don't hold pages beside those of live ones, and later steps neither grow nor wait."""
    arena = bitsparse.Arena("cuda")
    seen = []
    with arena:
        for step in range(20):
            graphs = [block("cuda", seed, tokens=4096) for seed in range(4)]
            if step in (0, 19):
                seen.append(arena.memory_stats(synchronize=True)["in_use"])
            while graphs:
                assert_right(graphs.pop())
            if step == 2:
                settled = arena.memory_stats(synchronize=True)
    stats = arena.memory_stats(synchronize=True)
    assert seen[0] == seen[1] == stats["high_water"]
    assert seen[0] <= stats["capacity"] <= 1.3 * seen[0]
    assert [stats[k] for k in ("capacity", "waits", "growths")] == [
        settled[k] for k in ("capacity", "waits", "growths")
    ]
    assert (stats["in_use"], stats["spilled"], stats["failures"]) == (0, 0, 0)


EXIT_WITH_LIVE_LEASES = """
import sys, torch, bitsparse
device = sys.argv[1]
w1, w2 = torch.randn(132, 24, device=device).requires_grad_(), torch.randn(24, 132, device=device).requires_grad_()
kept = [bitsparse.relu_squared_ffn(torch.randn(70, 24, device=device), w1, None, w2) for _ in range(3)]
assert bitsparse.memory_stats(device)["live_leases"] == 3
del kept[1]
"""


@on_devices
def test_interpreter_exit_with_live_leases(device):
    run = subprocess.run([sys.executable, "-c", EXIT_WITH_LIVE_LEASES, device], capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (0, "")


@pytest.mark.parametrize("device", DEVICES)
def test_summary_shows_every_figure(device):
    arena = bitsparse.Arena(device)
    with arena:
        t = sparse(300, 1024, density=0.2, seed=11, dtype=torch.bfloat16, device=device).requires_grad_()
        y = bitsparse.relu_squared_linear(t, randn(8, 1024, seed=12, dtype=torch.bfloat16, device=device))
    stats, text = arena.memory_stats(synchronize=True), bitsparse.memory_summary(arena, synchronize=True)
    del y
    lines = text.splitlines()
    assert len({len(line) for line in lines}) == 1, "a frame of one width"
    assert repr(arena)[:40] in text
    assert sum(line.count("|") == 3 for line in lines) == len(STAT_KEYS)
    assert f" {stats['payload_ratio']:.3f} |" in text
    assert "600 KiB" in text, "300 * 1024 * 2 bytes dense"
    assert "default arena of cpu" in bitsparse.memory_summary("cpu")
    assert f"default arena of {'cuda:0' if torch.cuda.is_initialized() else 'cpu'}" in bitsparse.memory_summary()


def test_summary_has_readable_sizes():
    assert [_readable(x) for x in (0, 10239, 10240, 5 << 20, 3 << 30, 50 << 30)] == [
        "0 B", "10239 B", "10 KiB", "5120 KiB", "3072 MiB", "50.0 GiB",
    ]  # fmt: skip


def test_devices_that_are_none():
    functions = (bitsparse.Arena, bitsparse.memory_stats, bitsparse.reset_peak_memory_stats, bitsparse.memory_summary)
    for function in functions:
        with pytest.raises(ValueError, match="expected device to be 'cpu', 'cuda' or 'cuda:N', got 'meta'"):
            function("meta")
        with pytest.raises(ValueError, match="expected device to be 'cpu', 'cuda' or 'cuda:N', got 'gpu'"):
            function("gpu")
        with pytest.raises(ValueError, match="expected device to be"):
            function("cuda:99999")  # PyTorch makes it a negative index
        with pytest.raises(TypeError, match=r"expected device to be 'cpu', 'cuda' or 'cuda:N', got 3\.5"):
            function(3.5)
