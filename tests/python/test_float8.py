"""Activations of 8-bit floats: results are those of float arithmetic, rounded once and saturating, in every bit."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import CODECS, DEVICES, FLOAT8, assert_same_bits
from test_codec import every_pattern
from torch import Tensor

import bitsparse

ops = torch.ops.bitsparse

pytestmark = [
    pytest.mark.parametrize("device", DEVICES),
    pytest.mark.parametrize("dtype", FLOAT8, ids=str),
    pytest.mark.parametrize("codec", CODECS),
]

ACTIVATIONS = ("relu", "relu_squared")


def rounded(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Float values to 8 bits as training casts do it: saturating, and one NaN."""
    largest = torch.finfo(dtype).max
    result = values.clamp(-largest, largest).to(dtype).view(torch.uint8)
    return torch.where(values.isnan(), 0x7F, result).view(dtype)


def is_kept(h: Tensor) -> Tensor:
    return (h.float() > 0) | h.float().isnan()


def kept_bits(t: Tensor, h: Tensor) -> Tensor:
    return torch.where(is_kept(h), t.view(torch.uint8), 0).view(t.dtype)


def expected_activation(h: Tensor, activation: str) -> Tensor:
    if activation == "relu":
        return kept_bits(h, h)
    return rounded(F.relu(h.float()).square(), h.dtype)


def expected_gradient(h: Tensor, grad: Tensor, activation: str) -> Tensor:
    if activation == "relu_squared":
        grad = rounded(grad.float() * 2 * F.relu(h.float()), grad.dtype)
    return kept_bits(grad, h)


def placed(t: Tensor, device: str, offset: int = 0) -> Tensor:
    """On a device, `offset` bytes after a multiple of 16."""
    memory = torch.full((t.numel() + offset,), 0x5A, dtype=torch.uint8, device=device)
    view = memory[offset:].view(t.dtype).view(t.shape)
    return view.copy_(t)


def check(h: Tensor, grad: Tensor, device: str, activation: str, codec: str, offset: int = 0) -> None:
    """Compress, restore and gradient of the CPU tensors `h` and `grad` on a device."""
    there = placed(h, device, offset)
    copy = there.clone()
    a, lease = ops._compress_activation(there, activation, codec)
    assert_same_bits(there, copy, "h after compress")
    expected = expected_activation(h, activation)
    assert_same_bits(a.cpu(), expected, "activation")
    restored = ops._restore_activation(lease, list(h.shape), h.dtype, activation)
    assert_same_bits(restored.cpu(), expected, "restored")
    relu = ops._restore_activation(lease, list(h.shape), h.dtype, "relu")
    assert_same_bits(relu.cpu(), expected_activation(h, "relu"), "relu restored")
    for at in {0, offset}:
        g = placed(grad, device, at)
        ops._activation_gradient_(g, lease, activation)
        assert_same_bits(g.cpu(), expected_gradient(h, grad, activation), "gradient")
    assert_same_bits(ops._restore_activation(lease, list(h.shape), h.dtype, activation), restored, "restored again")
    in_place = placed(h, device, offset)
    lease = ops._compress_activation_(in_place, activation, codec)
    assert_same_bits(in_place.cpu(), expected, "activation in place")
    assert_same_bits(ops._restore_activation(lease, list(h.shape), h.dtype, activation).cpu(), expected)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_pair_of_patterns(device, dtype, codec, activation):
    """All pre-activations with all gradients; in order, where blocks hold few values, and shuffled."""
    patterns = every_pattern(dtype).view(torch.uint8)
    h, grad = patterns.repeat_interleave(256), patterns.repeat(256)
    order = torch.randperm(len(h), generator=torch.Generator().manual_seed(1))
    for index in (torch.arange(len(h)), order):
        check(h[index].view(dtype), grad[index].view(dtype), device, activation, codec)


def test_what_the_formats_can_not_hold(device, dtype, codec):
    """By hand: overflow saturates, infinities too; what is too small becomes a zero with a sign; there is one NaN."""
    e4m3 = dtype == torch.float8_e4m3fn
    largest, infinity = (0x7E, 0x7E) if e4m3 else (0x7B, 0x7C)
    smallest, one, nan = 0x01, 0x38 if e4m3 else 0x3C, 0xFF
    h = torch.tensor([largest, infinity, smallest, one, 0, 0x80, one | 0x80, nan, largest, smallest])
    grad = torch.tensor([largest | 0x80, one, smallest | 0x80, one, 0x80, one, nan, 0, smallest, largest])
    a, lease = ops._compress_activation(h.to(torch.uint8).view(dtype).to(device), "relu_squared", codec)
    assert a.view(torch.uint8).tolist() == [largest, largest, 0, one, 0, 0, 0, 0x7F, largest, 0]
    g = grad.to(torch.uint8).view(dtype).to(device)
    ops._activation_gradient_(g, lease, "relu_squared")
    two = one + (8 if e4m3 else 4)
    assert g.view(torch.uint8).tolist()[:8] == [largest | 0x80, largest, 0x80, two, 0, 0, 0, 0x7F]
    assert g.float().tolist()[8:] == [1.75, 1.75], "2 * 1.75 * 2^8 * 2^-9, and 2 * 1.75 * 2^15 * 2^-16"


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_sizes_and_alignments(device, dtype, codec, activation):
    generator = torch.Generator().manual_seed(2)
    for numel in (0, 1, 5, 63, 64, 2047, 2048, 2049, 8191, 8192, 8193, 30_001):
        for offset in (0, 1, 7):
            h, grad = torch.randn(2, numel, generator=generator).mul(20).to(dtype)
            check(h, grad, device, activation, codec, offset)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_densities(device, dtype, codec, activation):
    """From empty blocks to full ones, so that all kinds of masks occur."""
    generator = torch.Generator().manual_seed(3)
    for density in (0.0, 0.001, 0.02, 0.2, 0.4, 0.6, 0.75, 0.9, 0.97, 1.0):
        h = torch.randn(2 * 8192 + 3, generator=generator).abs().mul(20).clamp(min=1).to(dtype)
        h = torch.where(torch.rand(h.shape, generator=generator) < density, h.view(torch.uint8), 0x81).view(dtype)
        grad = torch.randn(h.shape, generator=generator).to(dtype)
        check(h, grad, device, activation, codec)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_strided_tensors(device, dtype, codec, activation):
    generator = torch.Generator().manual_seed(4)
    h, grad = torch.randn(2, 90, 70, generator=generator).to(dtype)
    there, g = h.to(device, copy=True).t(), grad.to(device, copy=True).t()
    a, lease = ops._compress_activation(there, activation, codec)
    assert_same_bits(a.cpu(), expected_activation(h.t().contiguous(), activation))
    ops._activation_gradient_(g, lease, activation)
    expected = expected_gradient(h.t().contiguous(), grad.t().contiguous(), activation)
    assert_same_bits(g.cpu().contiguous(), expected)
    ops._compress_activation_(there, activation, codec)
    assert_same_bits(there.cpu().contiguous(), expected_activation(h.t().contiguous(), activation))


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(
    numel=st.integers(0, 20_000),
    offset=st.integers(0, 15),
    density=st.sampled_from([0.0, 0.01, 0.1, 0.3, 0.6, 0.74, 0.76, 0.95, 1.0]),
    narrow=st.booleans(),
    seed=st.integers(0, 1 << 30),
    activation=st.sampled_from(ACTIVATIONS),
)
def test_any_patterns(device, dtype, codec, numel, offset, density, narrow, seed, activation):
    generator = torch.Generator().manual_seed(seed)
    patterns = torch.randint(1, 16 if narrow else 256, (2, numel), generator=generator).to(torch.uint8)
    patterns[0][torch.rand(numel, generator=generator) >= density] = 0
    check(patterns[0].view(dtype), patterns[1].view(dtype), device, activation, codec, offset)


def test_a_packed_handle(device, dtype, codec):
    """What a saved-tensor hook may keep in place of a lease: relu(h), self-contained."""
    generator = torch.Generator().manual_seed(5)
    h, grad = torch.randn(2, 5000, generator=generator).mul(8).to(dtype)
    packed = bitsparse.compress(h.to(device), codec, "positive").packed
    for activation in ACTIVATIONS:
        restored = ops._restore_activation(packed, [5000], dtype, activation)
        assert_same_bits(restored.cpu(), expected_activation(h, activation))
        g = grad.to(device, copy=True)
        ops._activation_gradient_(g, packed, activation)
        assert_same_bits(g.cpu(), expected_gradient(h, grad, activation))
