"""Under autocast the blocks do what F.linear does: same dtypes, same bits."""

import pytest
import torch
from support import (
    DEVICES,
    assert_same_bits,
    dense_ffn,
    dense_linear,
    dense_relu_ffn,
    dense_relu_linear,
    ffn_arguments,
    randn,
    run_backward,
)

import bitsparse

PAIRS = [
    (bitsparse.relu_squared_ffn, dense_ffn),
    (bitsparse.relu_ffn, dense_relu_ffn),
    (bitsparse.relu_squared_linear, dense_linear),
    (bitsparse.relu_linear, dense_relu_linear),
]
pytestmark = pytest.mark.parametrize("device", DEVICES)


def under(function, device, dtype, enabled=True):
    def run(*leaves):
        with torch.autocast(device, dtype, enabled=enabled):
            return function(*leaves)

    return run


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("ours", "dense"), PAIRS, ids=lambda f: f.__name__)
def test_float32_arguments(device, ours, dense, low):
    x, w1, b1, w2, b2 = ffn_arguments(device, torch.float32)
    tensors = [x, w1, b1, w2, b2]
    if ours.__name__.endswith("linear"):  # h is cast first, as F.linear casts its input
        tensors = [randn(70, 356, seed=6, dtype=torch.float32, device=device), w2, b2]
        expected = run_backward(under(lambda h, *rest: dense(h.to(low), *rest), device, low), tensors)
    else:
        expected = run_backward(under(dense, device, low), tensors)
    got = run_backward(under(ours, device, low), tensors)
    assert got[0].dtype == low
    assert_same_bits(got[0], expected[0])
    for index, (a, b) in enumerate(zip(got[1], expected[1], strict=True)):
        assert a.dtype == torch.float32
        assert_same_bits(a, b, f"gradient of argument {index}")


def test_mixed_arguments(device):
    """FP32 weights with an input that is in low precision already: an error outside of autocast, cast under it."""
    x, *weights = ffn_arguments(device, torch.float32)
    tensors = [x.bfloat16(), *weights]
    with pytest.raises(RuntimeError):
        dense_ffn(*tensors)
    with pytest.raises((RuntimeError, TypeError), match="dtype"):
        bitsparse.relu_squared_ffn(*tensors)
    expected = run_backward(under(dense_ffn, device, torch.bfloat16), tensors)
    got = run_backward(under(bitsparse.relu_squared_ffn, device, torch.bfloat16), tensors)
    assert_same_bits(got[0], expected[0])
    for a, b in zip(got[1], expected[1], strict=True):
        assert_same_bits(a, b)


def test_disabled(device):
    tensors = ffn_arguments(device, torch.float32)
    got = under(bitsparse.relu_squared_ffn, device, torch.bfloat16, enabled=False)(*tensors)
    assert_same_bits(got, dense_ffn(*tensors))


def test_without_gradients(device):
    tensors = ffn_arguments(device, torch.float32)
    with torch.no_grad(), torch.autocast(device, torch.bfloat16):
        assert_same_bits(bitsparse.relu_squared_ffn(*tensors), dense_ffn(*tensors))


def test_the_kept_activation_is_in_low_precision(device):
    x, w1, b1, w2, b2 = (t.requires_grad_() for t in ffn_arguments(device, torch.float32))
    with torch.autocast(device, torch.bfloat16):
        y = bitsparse.relu_squared_ffn(x, w1, b1, w2, b2)
    assert bitsparse.memory_stats(device, synchronize=True)["dense_bytes"] == 70 * 356 * 2
    y.sum().backward()
