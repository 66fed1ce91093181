"""Tensors of one GPU while another one is current: every operator, and all that arenas do, goes to the tensors' GPU."""

import threading

import pytest
import torch
from support import as_leaves, assert_same_bits, dense_ffn, dense_linear, ffn_arguments, randn, run_backward

import bitsparse

pytestmark = pytest.mark.cuda

ops = torch.ops.bitsparse
OTHER = "cuda:1"


@pytest.fixture(autouse=True)
def two_devices(request):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    torch.cuda.set_device(0)
    allocated = torch.cuda.memory_allocated(0)
    yield
    assert torch.cuda.current_device() == 0, "an operator left another device current"
    if "both_devices" not in request.node.name:
        assert torch.cuda.memory_allocated(0) == allocated, "an operator put something on the current device"


def pre_activation(device: str = OTHER, seed: int = 1) -> torch.Tensor:
    return randn(300, 356, seed=seed, dtype=torch.bfloat16, device=device)


@pytest.mark.parametrize("name", ["relu_squared_ffn", "relu_ffn", "relu_squared_linear", "relu_linear"])
def test_blocks(name):
    def on(device):
        tensors = ffn_arguments(device, torch.bfloat16, tokens=(300,))
        if name.endswith("linear"):
            tensors = [pre_activation(device), *tensors[3:]]
        return run_backward(getattr(bitsparse, name), tensors)

    with torch.cuda.device(1):
        expected = on(OTHER)
    got = on(OTHER)
    assert got[0].device == torch.device(OTHER)
    for a, b in zip([got[0], *got[1]], [expected[0], *expected[1]], strict=True):
        assert_same_bits(a, b)


def test_pack_and_unpack():
    t = pre_activation()
    for keep in ("positive", "nonzero"):
        packed = ops.pack.default(t, "tight", keep)
        assert packed.device == t.device
        got = ops.unpack.default(packed, list(t.shape), t.dtype)
        assert_same_bits(got, torch.relu(t) if keep == "positive" else t)
    with torch.cuda.device(1):
        assert_same_bits(ops.pack.default(t, "tight", "nonzero"), packed)
    compressed = bitsparse.compress(t)
    assert compressed.device == t.device
    assert_same_bits(compressed.decompress(), t)


@pytest.mark.parametrize("activation", ["relu", "relu_squared"])
def test_operators_of_the_arena(activation):
    t, grad = pre_activation(), pre_activation(seed=2)
    relu = torch.relu(t)
    activated = relu if activation == "relu" else relu.square()
    out, lease = ops._compress_activation.default(t, activation, "tight")
    assert (out.device, lease.device) == (t.device, t.device)
    assert_same_bits(out, activated)
    assert_same_bits(ops._restore_activation.default(lease, list(t.shape), t.dtype, activation), activated)
    in_place = t.clone()
    other = ops._compress_activation_.default(in_place, activation, "tight")
    assert_same_bits(in_place, activated)
    for handle in (lease, other):
        got = grad.clone()
        ops._activation_gradient_.default(got, handle, activation)
        slope = torch.where(relu > 0, 1.0 if activation == "relu" else 2 * relu, 0.0).to(t.dtype)
        assert torch.equal(got, torch.where(relu > 0, grad * slope, 0.0).to(t.dtype))


def test_operators_on_transposed_tensors():
    """Copies that the operators make are on the tensors' device too."""
    t = pre_activation().t()
    out, lease = ops._compress_activation.default(t, "relu", "tight")
    assert torch.equal(out, torch.relu(t))
    grad = pre_activation(seed=2).t()
    expected = torch.where(torch.relu(t) > 0, grad, 0.0)
    ops._activation_gradient_.default(grad, lease, "relu")
    assert torch.equal(grad, expected)
    in_place = pre_activation().t()
    ops._compress_activation_.default(in_place, "relu", "tight")
    assert torch.equal(in_place, torch.relu(t))


def test_what_arenas_do():
    for options in ({}, {"worst_case": True}, {"capacity": 1 << 20}, {"density_bound": 0.5}):
        arena = bitsparse.Arena(OTHER, **options)
        for _ in range(3):
            with arena:
                leaves = as_leaves([pre_activation(), randn(8, 356, seed=3, dtype=torch.bfloat16, device=OTHER)])
                y = bitsparse.relu_squared_linear(*leaves)
            stats = arena.memory_stats(synchronize=True)
            assert (stats["live_leases"], stats["failures"]) == (1, 0)
            y.sum().backward()
            for leaf, expected in zip(leaves, run_backward(dense_linear, leaves)[1], strict=True):
                assert_same_bits(leaf.grad, expected)
            del y
            arena.trim()
            arena.reset_peak_memory_stats()
        assert arena.memory_stats(synchronize=True)["in_use"] == 0
        del arena


def test_spill_and_loss():
    h = randn(512, 4096, seed=1, dtype=torch.bfloat16, device=OTHER).abs_()
    w2 = randn(8, 4096, seed=3, dtype=torch.bfloat16, device=OTHER)
    expected = run_backward(dense_linear, [h, w2])
    with bitsparse.Arena(OTHER, capacity=1 << 20, spill_bytes=8 << 20):
        got = run_backward(bitsparse.relu_squared_linear, [h, w2])
    for a, b in zip([got[0], *got[1]], [expected[0], *expected[1]], strict=True):
        assert_same_bits(a, b)
    arena = bitsparse.Arena(OTHER, capacity=1 << 20, spill_bytes=0)
    with pytest.raises(torch.OutOfMemoryError, match=f"the arena of {OTHER} was full"), arena:
        run_backward(bitsparse.relu_squared_linear, [h, w2])
        arena.memory_stats(synchronize=True)


def test_streams_of_both_devices():
    """Steps in turns on side streams of two devices, each read on another stream than it was written on."""
    everything = {device: ffn_arguments(device, torch.bfloat16, tokens=(500,)) for device in ("cuda:0", OTHER)}
    expected = {device: run_backward(dense_ffn, tensors) for device, tensors in everything.items()}
    streams = {device: [torch.cuda.Stream(device) for _ in range(2)] for device in everything}
    for device in everything:
        torch.cuda.synchronize(device)
    for _ in range(10):
        for device, tensors in everything.items():
            first, second = streams[device]
            leaves = as_leaves(tensors)
            with torch.cuda.stream(first):
                y = bitsparse.relu_squared_ffn(*leaves).sum()
            second.wait_stream(first)
            with torch.cuda.stream(second):
                y.backward()
            torch.cuda.synchronize(device)
            for leaf, gradient in zip(leaves, expected[device][1], strict=True):
                assert_same_bits(leaf.grad, gradient)
            del y, leaves, leaf
    everything.clear()
    expected.clear()
    del tensors, gradient


def test_threads_of_both_devices():
    """A thread for each device, neither with the other's current; their arenas know nothing of one another."""
    errors = []

    def work(device):
        try:
            torch.cuda.set_device(0)
            tensors = ffn_arguments(device, torch.bfloat16, tokens=(500,))
            wanted = run_backward(dense_ffn, tensors)
            for _ in range(30):
                got = run_backward(bitsparse.relu_squared_ffn, tensors)
                for a, b in zip([got[0], *got[1]], [wanted[0], *wanted[1]], strict=True):
                    assert_same_bits(a, b)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(device,)) for device in ("cuda:0", OTHER)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
