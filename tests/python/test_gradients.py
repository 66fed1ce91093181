"""Outputs and gradients equal those of the dense block, bit for bit."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from support import (
    CODECS,
    DEVICES,
    TRAINED,
    as_leaves,
    assert_same_bits,
    assert_same_training,
    dense_ffn,
    dense_linear,
    dense_relu_ffn,
    dense_relu_linear,
    ffn_arguments,
    randn,
)

import bitsparse

pytestmark = pytest.mark.parametrize("device", DEVICES)

PAIRS = {
    "relu_squared_ffn": (bitsparse.relu_squared_ffn, dense_ffn),
    "relu_ffn": (bitsparse.relu_ffn, dense_relu_ffn),
    "relu_squared_linear": (bitsparse.relu_squared_linear, dense_linear),
    "relu_linear": (bitsparse.relu_linear, dense_relu_linear),
}
TOKENS = [(70,), (2, 35), (2, 5, 7), (1,), (1, 1), (0,), (3, 0), ()]


def arguments_of(name, device, dtype, tokens=(70,), bias=True):
    """Arguments of a function of PAIRS: those of the whole block, or h, w2, b2."""
    x, w1, b1, w2, b2 = ffn_arguments(device, dtype, tokens, bias=bias)
    if name.endswith("ffn"):
        return [x, w1, b1, w2, b2]
    return [randn(*tokens, w2.shape[1], seed=6, dtype=dtype, device=device), w2, b2]


def grad_like(y, seed=7):
    return randn(*y.shape, seed=seed, dtype=y.dtype, device=y.device)


@pytest.mark.parametrize("tokens", TOKENS, ids=str)
@pytest.mark.parametrize("dtype", TRAINED, ids=str)
@pytest.mark.parametrize("name", PAIRS)
def test_every_shape_and_dtype(device, name, dtype, tokens):
    ours, dense = PAIRS[name]
    assert_same_training(ours, dense, arguments_of(name, device, dtype, tokens), grad_like)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("bias", [False, True], ids=["no_bias", "bias"])
@pytest.mark.parametrize("name", PAIRS)
def test_codecs_and_bias(device, name, bias, codec):
    ours, dense = PAIRS[name]
    for dtype in TRAINED:
        assert_same_training(ours, dense, arguments_of(name, device, dtype, bias=bias), grad_like, codec=codec)


@pytest.mark.parametrize("biased", [2, 4])
def test_one_bias_of_two(device, biased):
    tensors = ffn_arguments(device, torch.bfloat16)
    tensors[biased] = None
    assert_same_training(bitsparse.relu_squared_ffn, dense_ffn, tensors, grad_like)


@pytest.mark.parametrize("name", PAIRS)
def test_every_subset_of_frozen_arguments(device, name):
    ours, dense = PAIRS[name]
    tensors = arguments_of(name, device, torch.bfloat16, tokens=(9,))
    indices = range(len(tensors))
    for count in range(len(tensors)):  # all of them frozen has no backward
        for frozen in itertools.combinations(indices, count):
            assert_same_training(ours, dense, tensors, grad_like, frozen=frozen)


def strided(t):
    """The same values at every second place of a larger tensor, starting at an odd element."""
    larger = torch.full((2 * t.numel() + 1,), float("nan"), dtype=t.dtype, device=t.device)
    view = larger[1:].as_strided(t.shape, [2 * stride for stride in t.contiguous().stride()])
    return view.copy_(t)


def transposed(t):
    return t.transpose(-1, -2).contiguous().transpose(-1, -2) if t.dim() > 1 else strided(t)


def shifted(t):
    """The same values, contiguous, at an address that is a multiple of the element size only."""
    larger = torch.empty(t.numel() + 1, dtype=t.dtype, device=t.device)
    return larger[1:].view(t.shape).copy_(t)


@pytest.mark.parametrize("layout", [strided, transposed, shifted])
@pytest.mark.parametrize("dtype", TRAINED, ids=str)
@pytest.mark.parametrize("name", PAIRS)
def test_layout_of_one_argument(device, name, dtype, layout):
    ours, dense = PAIRS[name]
    tensors = arguments_of(name, device, dtype)
    for index in range(len(tensors)):
        changed = list(tensors)
        changed[index] = layout(tensors[index])
        assert_same_bits(changed[index], tensors[index])
        assert_same_training(ours, dense, changed, grad_like)


@pytest.mark.parametrize("layout", [strided, transposed, shifted])
@pytest.mark.parametrize("name", PAIRS)
def test_layout_of_grad_output(device, name, layout):
    ours, dense = PAIRS[name]
    for tokens in ((70,), (2, 35)):
        tensors = arguments_of(name, device, torch.bfloat16, tokens)
        assert_same_training(ours, dense, tensors, lambda y: layout(grad_like(y)))


@pytest.mark.parametrize("dtype", TRAINED, ids=str)
@pytest.mark.parametrize("name", PAIRS)
def test_expanded_grad_output(device, name, dtype):
    """sum().backward() gives a gradient whose strides are all 0; a broadcast row has one stride 0."""
    ours, dense = PAIRS[name]
    for tokens in ((70,), (2, 35), (0,)):
        tensors = arguments_of(name, device, dtype, tokens)
        assert_same_training(ours, dense, tensors)
        assert_same_training(
            ours, dense, tensors, lambda y: grad_like(y[..., :1, :]).expand(y.shape) if y.numel() else y
        )


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")], ids=str)
@pytest.mark.parametrize("dtype", TRAINED, ids=str)
@pytest.mark.parametrize("name", PAIRS)
def test_not_finite(device, name, dtype, value):
    ours, dense = PAIRS[name]
    tensors = arguments_of(name, device, dtype)
    tensors[0][::9, 3] = value
    assert_same_training(ours, dense, tensors, grad_like)
    tensors = arguments_of(name, device, dtype)
    assert_same_training(
        ours, dense, tensors, lambda y: grad_like(y).index_fill_(0, torch.tensor(4, device=y.device), value)
    )


@pytest.mark.parametrize("dtype", TRAINED, ids=str)
@pytest.mark.parametrize("name", ["relu_squared_linear", "relu_linear"])
def test_special_pre_activations(device, name, dtype):
    """Zeros of both signs, subnormals, the largest values and what overflows when squared."""
    ours, dense = PAIRS[name]
    limits = torch.finfo(dtype)
    special = [
        0.0,
        -0.0,
        limits.tiny,
        -limits.tiny,
        limits.smallest_normal / 4,
        limits.max,
        limits.min,
        limits.eps,
        1.0,
    ]
    h = torch.tensor(special, dtype=dtype, device=device).repeat(300).reshape(30, 90)
    w2 = randn(8, 90, seed=1, dtype=dtype, device=device)
    assert_same_training(ours, dense, [h, w2, None], grad_like)


@pytest.mark.parametrize("sign", [1.0, -1.0], ids=["all_kept", "none_kept"])
@pytest.mark.parametrize("dtype", TRAINED, ids=str)
def test_all_or_nothing_is_kept(device, dtype, sign):
    _, w2, b2 = arguments_of("relu_linear", device, dtype)
    h = randn(70, w2.shape[1], seed=8, dtype=dtype, device=device).abs() * sign
    assert_same_training(bitsparse.relu_squared_linear, dense_linear, [h, w2, b2], grad_like)


def test_pre_activation_made_by_another_operation(device):
    """h is the result of an operation that autograd tracks, and is used a second time after the call."""
    x, w1, b1, w2, b2 = ffn_arguments(device, torch.float32)

    def through(function):
        leaves = as_leaves([x, w1, b1, w2, b2])
        h = torch.nn.functional.linear(*leaves[:3])
        y = function(h, *leaves[3:])
        (y.sum() + h.tanh().sum()).backward()
        return y.detach(), [leaf.grad for leaf in leaves]

    got, expected = through(bitsparse.relu_squared_linear), through(dense_linear)
    assert_same_bits(got[0], expected[0])
    for a, b in zip(got[1], expected[1], strict=True):
        assert_same_bits(a, b)


def test_same_tensor_as_two_arguments(device):
    """Tied weights: both gradients arrive in one tensor."""
    w = randn(32, 32, seed=1, dtype=torch.float32, device=device)
    x = randn(11, 32, seed=2, dtype=torch.float32, device=device)

    def tied(function):
        leaves = as_leaves([x, w])
        function(leaves[0], leaves[1], None, leaves[1]).sum().backward()
        return [leaf.grad for leaf in leaves]

    for a, b in zip(tied(bitsparse.relu_squared_ffn), tied(dense_ffn), strict=True):
        assert_same_bits(a, b)


@pytest.mark.parametrize("dtype", TRAINED, ids=str)
def test_large_block(device, dtype):
    """Enough tiles for several threads, and a last tile that is not full."""
    tensors = ffn_arguments(device, dtype, tokens=(3, 257), d_in=64, d_ff=1031, d_out=64)
    assert_same_training(bitsparse.relu_squared_ffn, dense_ffn, tensors, grad_like)


def test_a_dozen_steps_of_training(device):
    """Losses and weights stay equal, so no error hides in the accumulation of small ones."""

    def train(function):
        x, w1, b1, w2, b2 = as_leaves([t.clone() for t in ffn_arguments(device, torch.float32, d_out=24)])
        parameters = [w1, b1, w2, b2]
        optimizer = torch.optim.AdamW(parameters, lr=1e-2)
        losses = []
        for _ in range(12):
            loss = (function(x.detach(), *parameters) - x.detach()).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return [torch.stack(losses), *parameters]

    for got, expected in zip(train(bitsparse.relu_squared_ffn), train(dense_ffn), strict=True):
        assert_same_bits(got, expected)


@pytest.mark.parametrize("dims", [(1, 0, 2), (0, 2, 1), (2, 1, 0)])
@pytest.mark.parametrize("name", ["relu_squared_linear", "relu_linear"])
def test_permuted_pre_activations_of_three_dimensions(device, name, dims):
    """Eager mode folds such an h into one matrix product only if w2 is trainable, and sums b2's gradient in its order."""
    inverse = [dims.index(i) for i in range(3)]
    shape = (5, 4, 256)
    h = randn(*[shape[i] for i in dims], seed=1, dtype=torch.float32, device=device).permute(inverse)
    w2 = randn(64, 256, seed=2, dtype=torch.float32, device=device)
    b2 = randn(64, seed=3, dtype=torch.float32, device=device)

    def dense(h, w2, b2):
        relu = F.relu(h)
        return F.linear(relu.square() if name == "relu_squared_linear" else relu, w2, b2)

    def permuted(y):
        return randn(*[y.shape[i] for i in dims], seed=4, dtype=y.dtype, device=device).permute(inverse)

    for frozen in ((), (1,), (0,)):
        assert_same_training(getattr(bitsparse, name), dense, [h, w2, b2], permuted, frozen=frozen)


def test_bias_that_is_not_contiguous(device):
    x, w1, b1, w2, _ = ffn_arguments(device, torch.float32, (8, 16))
    b2 = randn(2 * w2.shape[0], seed=7, dtype=torch.float32, device=device)[::2]
    assert_same_training(
        bitsparse.relu_squared_ffn,
        dense_ffn,
        [x, w1, b1, w2, b2],
        lambda y: randn(16, 8, y.shape[-1], seed=8, dtype=y.dtype, device=device).transpose(0, 1),
    )


def test_one_token_of_one_inner_feature(device):
    for seed in range(40):
        x, w1 = (randn(1, 9, seed=10 * seed + i, dtype=torch.float32, device=device) for i in (1, 2))
        b1 = randn(1, seed=10 * seed + 3, dtype=torch.float32, device=device)
        w2 = randn(33, 1, seed=10 * seed + 4, dtype=torch.float32, device=device)
        b2 = randn(33, seed=10 * seed + 5, dtype=torch.float32, device=device)
        assert_same_training(bitsparse.relu_squared_ffn, dense_ffn, [x, w1, b1, w2, b2])
