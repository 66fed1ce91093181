"""The compressed activation is the only wide thing that a block keeps for backward."""

import pytest
import torch
import torch.nn.functional as F
from support import DEVICES, as_leaves, dense_ffn, dense_linear, ffn_arguments, randn

import bitsparse
from bitsparse import _load

TOKENS, D, D_FF = 512, 64, 1024
WIDE = TOKENS * D_FF  # more elements than any weight has

on_devices = pytest.mark.parametrize("device", DEVICES)


def saved_by(function, tensors):
    """What autograd saves: every tensor, without storages that arguments have."""
    saved = []

    def keep(t):
        saved.append(t)
        return t

    leaves = as_leaves(tensors)
    # These hooks look and keep. Under hooks that may copy, the blocks would save a packed tensor instead of a lease.
    bitsparse._C.set_hooks_keep_tensors(lambda: True)
    try:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            y = function(*leaves)
    finally:
        bitsparse._C.set_hooks_keep_tensors(_load.hooks_keep_tensors)
    given = {t.untyped_storage().data_ptr() for t in leaves if t is not None}
    return y, [t for t in saved if t.untyped_storage().data_ptr() not in given]


def arguments(device, dtype=torch.bfloat16):
    return ffn_arguments(device, dtype, (TOKENS,), d_in=D, d_ff=D_FF, d_out=D)


@on_devices
def test_the_dense_block_keeps_two_wide_tensors(device):
    """So that the other tests here measure what they mean to."""
    _, saved = saved_by(dense_ffn, arguments(device))
    wide = {t.untyped_storage().data_ptr() for t in saved if t.numel() >= WIDE}
    assert len(wide) == 2


@on_devices
@pytest.mark.parametrize("name", ["relu_squared_ffn", "relu_ffn", "relu_squared_linear", "relu_linear"])
def test_autograd_saves_a_handle_and_nothing_wide(device, name):
    x, w1, b1, w2, b2 = arguments(device)
    h = F.linear(x, w1, b1)
    tensors = [x, w1, b1, w2, b2] if name.endswith("ffn") else [h, w2, b2]
    before = bitsparse.memory_stats(device, synchronize=True)["in_use"]
    y, saved = saved_by(getattr(bitsparse, name), tensors)
    assert sum(t.untyped_storage().nbytes() for t in saved) <= 1024, [tuple(t.shape) for t in saved]
    in_use = bitsparse.memory_stats(device, synchronize=True)["in_use"] - before
    packed = bitsparse.compress(h, keep="positive").nbytes
    assert packed - 1024 <= in_use <= packed + (256 << 10 if device == "cuda" else 1024), "whole pages on CUDA"
    y.sum().backward()


@on_devices
def test_under_hooks_a_packed_tensor_is_saved(device):
    x, w1, b1, w2, b2 = arguments(device)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = bitsparse.relu_squared_ffn(*as_leaves([x, w1, b1, w2, b2]))
    packed = bitsparse.compress(F.linear(x, w1, b1).relu(), keep="positive").packed
    assert any(t.dtype == torch.uint8 and torch.equal(t, packed) for t in saved)
    assert bitsparse.memory_stats(device)["live_leases"] == 0
    y.sum().backward()


@on_devices
def test_pre_activation_is_not_kept_by_the_linear_form(device):
    """Once the caller lets go of h, nothing holds its memory."""
    _, _, _, w2, _ = arguments(device)
    h = randn(TOKENS, D_FF, seed=1, dtype=torch.bfloat16, device=device)
    for function, held in ((dense_linear, True), (bitsparse.relu_squared_linear, False)):
        source = h.clone().requires_grad_()
        wide = source * 1.0
        y, saved = saved_by(lambda t, w, f=function: f(t, w), [wide.detach(), w2])
        assert any(t.numel() >= WIDE for t in saved) is held
        del y


def net_allocated(function):
    """Bytes of CPU memory that PyTorch's allocator handed out and did not get back during a call."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True, acc_events=True) as profile:
        result = function()
    return sum(event.self_cpu_memory_usage for event in profile.events()), result


def test_memory_left_allocated_on_cpu():
    """Counted at the allocator, which no saved-tensor hook can influence."""
    leaves = as_leaves(arguments("cpu"))
    output = TOKENS * D * 2
    dense_bytes, y = net_allocated(lambda: dense_ffn(*leaves))
    assert dense_bytes >= output + 2 * WIDE * 2
    del y
    bytes_left, y = net_allocated(lambda: bitsparse.relu_squared_ffn(*leaves))
    in_use = bitsparse.memory_stats("cpu")["in_use"]
    assert 0 < in_use < 0.6 * 2 * WIDE
    assert bytes_left <= output + in_use + 4096
    y.sum().backward()


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["relu_squared_ffn", "relu_ffn"])
def test_memory_left_allocated_on_cuda(name):
    # No biases: PyTorch's sum over tokens, which gives b1's gradient, takes a buffer of two wide tensors for itself.
    tensors = ffn_arguments("cuda", torch.bfloat16, (8192,), d_in=256, d_ff=4096, d_out=256, bias=False)
    leaves = as_leaves(tensors)
    function = getattr(bitsparse, name)
    arena = bitsparse.Arena("cuda", capacity=128 << 20)
    with arena:
        for _ in range(3):
            function(*leaves).sum().backward()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        y = function(*leaves)
        torch.cuda.synchronize()
        output, wide = y.numel() * 2, 8192 * 4096 * 2
        assert torch.cuda.memory_allocated() - before <= output + (1 << 20)
        assert arena.memory_stats(synchronize=True)["in_use"] < 0.6 * wide
        grad = torch.ones_like(y)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        y.backward(grad)
        torch.cuda.synchronize()
        # One wide tensor at a time, beside the gradients of the weights and of x and GEMM workspaces.
        assert torch.cuda.max_memory_allocated() - before < 1.6 * wide
    del y


@pytest.mark.cuda
def test_deep_model_fits_in_less_memory_than_dense():
    """Twelve blocks in a row: what is added to the peak by depth is the compressed size, not the dense one."""

    def peak(function):
        leaves = as_leaves(ffn_arguments("cuda", torch.bfloat16, (8192,), d_in=256, d_ff=2048, d_out=256, bias=False))
        with bitsparse.Arena("cuda") as arena:
            for _ in range(3):  # the arena settles
                torch.cuda.reset_peak_memory_stats()
                start = torch.cuda.memory_allocated() - arena.memory_stats(synchronize=True)["capacity"]
                y = leaves[0]
                for _ in range(12):
                    y = y + function(F.rms_norm(y, (256,)), *leaves[1:])
                y.sum().backward()
                torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - start

    assert peak(bitsparse.relu_squared_ffn) < 0.6 * peak(dense_ffn)


def test_a_long_graph_is_dropped_without_recursion():
    """On a CPU only: what is seen is the graph."""
    w1, w2 = (randn(*size, seed=1, dtype=torch.float32, device="cpu").requires_grad_() for size in ((8, 4), (4, 8)))
    y = torch.ones(2, 4)
    for _ in range(10_000):
        y = 0.1 * y + 0.01 * bitsparse.relu_squared_ffn(y, w1, None, w2)
    del y
    assert bitsparse.memory_stats("cpu")["live_leases"] == 0
