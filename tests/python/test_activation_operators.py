"""The operators between a block and its lease: every bit pattern through compress, restore and gradient."""

import pytest
import torch
import torch.nn.functional as F
from support import CODECS, DEVICES, TRAINED, assert_same_bits, randn
from test_codec import every_pattern

import bitsparse

pytestmark = pytest.mark.parametrize("device", DEVICES)
ops = torch.ops.bitsparse

ACTIVATIONS = {"relu": F.relu, "relu_squared": lambda h: F.relu(h).square()}


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", TRAINED, ids=str)
def test_every_bit_pattern(device, dtype, activation, codec):
    """relu, its square, and the gradient have the bits that PyTorch's own operators give.

    With one exception: PyTorch's vectorised relu lets -0.0 through, a lease gives it back as +0.
    """
    h = every_pattern(dtype)
    h = torch.cat([h, h[torch.randperm(len(h), generator=torch.Generator().manual_seed(1))]]).to(device)
    copy = h.clone()
    leaf = h.clone().requires_grad_()
    expected = ACTIVATIONS[activation](leaf)
    grad = randn(*h.shape, seed=2, dtype=dtype, device=device)
    (expected_grad,) = torch.autograd.grad(expected, leaf, grad)

    a, lease = ops._compress_activation(h, activation, codec)
    assert_same_bits(h, copy, "h after compress")
    assert_same_bits(a, expected.detach(), "activation")
    positive = torch.where(expected.detach() == 0, torch.zeros_like(h), expected.detach())
    assert_same_bits(ops._restore_activation(lease, list(h.shape), dtype, activation), positive, "restored")
    ops._activation_gradient_(grad, lease, activation)
    assert_same_bits(grad, expected_grad, "gradient")


AROUND = 7.0


def placed(t, offset):
    """Memory that is `AROUND` but for `t` in it, and the view that is `t`."""
    memory = torch.full((len(t) + 32,), AROUND, dtype=t.dtype, device=t.device)
    view = memory[offset : offset + len(t)]
    view.copy_(t)
    return memory, view


def assert_holds(memory, offset, t, what):
    assert_same_bits(memory, placed(t, offset)[0], f"{what}, {len(t)} elements from {offset} on")


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", TRAINED, ids=str)
def test_any_alignment(device, dtype, codec):
    """Tensors that begin anywhere between two multiples of 16 bytes and end anywhere in a block: results as elsewhere,
    and what lies around them is left alone."""
    tile = 8192 // dtype.itemsize
    for numel in (1, tile, tile + 3, 2 * tile + 907):
        h, grad = randn(2, numel, seed=numel, dtype=dtype, device=device)
        expected = F.relu(h).square()
        leaf = h.clone().requires_grad_()
        (expected_grad,) = torch.autograd.grad(F.relu(leaf).square(), leaf, grad)
        for offset in range(16 // dtype.itemsize):
            memory, view = placed(h, offset)
            a, lease = ops._compress_activation(view, "relu_squared", codec)
            assert_same_bits(a, expected, f"activation of {numel} elements from {offset} on")
            assert_holds(memory, offset, h, "what is compressed")
            memory, view = placed(grad, offset)
            ops._activation_gradient_(view, lease, "relu_squared")
            assert_holds(memory, offset, expected_grad, "gradient")
            memory, view = placed(h, offset)
            lease = ops._compress_activation_(view, "relu_squared", codec)
            assert_holds(memory, offset, expected, "activation in place")
            assert_same_bits(ops._restore_activation(lease, [numel], dtype, "relu_squared"), expected, "restored")


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", TRAINED, ids=str)
def test_gradient_of_relu(device, dtype, codec):
    """Of every form that a block's mask has, none included, with NaNs in both."""
    numel = 3 * 8192 // dtype.itemsize + 77
    for density in (0.0, 0.02, 0.3, 0.7, 0.99, 1.0):
        generator = torch.Generator().manual_seed(int(100 * density))
        h = torch.randn(numel, generator=generator).abs()
        h = torch.where(torch.rand(numel, generator=generator) < density, h + 0.01, -h)
        h[5::999] = torch.nan
        h = h.to(device, dtype).requires_grad_()
        grad = randn(numel, seed=1, dtype=dtype, device=device)
        grad[::7] = torch.nan
        (expected,) = torch.autograd.grad(F.relu(h), h, grad)
        lease = ops._compress_activation_(h.detach(), "relu", codec)
        for offset in (0, 3):
            memory, view = placed(grad, offset)
            ops._activation_gradient_(view, lease, "relu")
            assert_holds(memory, offset, expected, f"density {density}")


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_in_place_form(device, activation):
    h = randn(40, 300, seed=1, dtype=torch.bfloat16, device=device)
    expected = ACTIVATIONS[activation](h)
    lease = ops._compress_activation_(h, activation, "tight")
    assert_same_bits(h, expected)
    assert_same_bits(ops._restore_activation(lease, [40, 300], torch.bfloat16, activation), expected)


def test_a_lease_is_read_as_often_as_wanted(device):
    h = randn(40, 300, seed=1, dtype=torch.bfloat16, device=device)
    a, lease = ops._compress_activation(h, "relu_squared", "tight")
    assert (lease.dtype, lease.dim(), lease.device) == (torch.uint8, 1, h.device)
    for _ in range(3):
        assert_same_bits(ops._restore_activation(lease, [40, 300], torch.bfloat16, "relu_squared"), a)
    assert bitsparse.memory_stats(device, synchronize=True)["live_leases"] == 1
    view = lease[:1]
    del lease
    assert bitsparse.memory_stats(device, synchronize=True)["live_leases"] == 1, "a view keeps the storage alive"
    del view
    assert bitsparse.memory_stats(device, synchronize=True)["live_leases"] == 0


def test_a_copy_of_a_lease_is_refused(device):
    _, lease = ops._compress_activation(randn(4, 5, seed=1, dtype=torch.float32, device=device), "relu", "tight")
    for wrong in (lease.clone(), torch.zeros(16, dtype=torch.uint8, device=device), torch.zeros(3, device=device)):
        with pytest.raises(RuntimeError, match="lease"):
            ops._restore_activation(wrong, [4, 5], torch.float32, "relu")
        with pytest.raises(RuntimeError, match="lease"):
            ops._activation_gradient_(torch.ones(4, 5, device=device), wrong, "relu")


def test_a_lease_is_read_only_as_what_it_is(device):
    _, lease = ops._compress_activation(randn(4, 5, seed=1, dtype=torch.float32, device=device), "relu", "tight")
    with pytest.raises(RuntimeError, match=r"20.*21|21.*20"):
        ops._restore_activation(lease, [3, 7], torch.float32, "relu")
    holds = "the lease holds 20 elements of Float on .*, but"
    with pytest.raises(RuntimeError, match=f"{holds} 20 of BFloat16"):
        ops._restore_activation(lease, [4, 5], torch.bfloat16, "relu")
    with pytest.raises(RuntimeError, match=f"{holds} 20 of BFloat16"):
        ops._activation_gradient_(torch.ones(4, 5, device=device, dtype=torch.bfloat16), lease, "relu")
    with pytest.raises(RuntimeError, match=f"{holds} 24 of Float"):
        ops._activation_gradient_(torch.ones(4, 6, device=device), lease, "relu")
    with pytest.raises(
        (RuntimeError, ValueError), match=r"expected activation to be 'relu' or 'relu_squared', got 'gelu'"
    ):
        ops._restore_activation(lease, [4, 5], torch.float32, "gelu")


def test_products_that_do_not_fit(device):
    x, w = torch.randn(8, 6, device=device), torch.randn(4, 6, device=device)
    for bad_x, bad_w, bias in ((x, w.t(), None), (x[0], w, None), (x, w, torch.randn(3, device=device))):
        with pytest.raises(ValueError, match=r"expected (matrices x and w|bias)"):
            ops._linear_compress(bad_x, bad_w, bias, "relu", "tight")
    _, lease = ops._linear_compress(x, w, None, "relu", "tight")
    with pytest.raises(ValueError, match="expected matrices grad and w"):
        ops._linear_gradient(x, w, lease, "relu")
    with pytest.raises(RuntimeError, match="the lease holds 32 elements"):
        ops._linear_gradient(x[:4], w.t(), lease, "relu")
