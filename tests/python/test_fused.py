"""The block with fused matrix products. Where there are no kernels for it: the dense block's bits. Where there are: with
whole numbers, of which all sums are exact, the dense block's bits too."""

import weakref
from contextlib import nullcontext

import pytest
import torch
from support import (
    CODECS,
    DEVICES,
    TRAINED,
    assert_same_bits,
    assert_same_training,
    captured,
    dense_ffn,
    dense_relu_ffn,
    ffn_arguments,
    run_backward,
)
from torch.utils.checkpoint import checkpoint

import bitsparse

PAGE = 512 << 10
BLOCKS = [(bitsparse.relu_squared_ffn, dense_ffn), (bitsparse.relu_ffn, dense_relu_ffn)]
# Tokens, d_in, d_ff: a short and a long inner dimension of the products, for which there are kernels of their own.
SHAPES = [(512, 256, 768), (256, 2048, 512)]
hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="GPU test: needs compute capability 9.0",
)


def whole_numbers(tokens, d_in, d_ff, bias=True, negative=0, dtype=torch.bfloat16):
    """Arguments so small that float32 holds every sum of the block and of its backward. Rows at the start have no
    positive pre-activation if `negative` is as large as it gets."""
    generator = torch.Generator().manual_seed(1)

    def make(low, high, *shape):
        return torch.randint(low, high + 1, shape, generator=generator)

    def few(*shape):
        return make(-1, 1, *shape) * (torch.rand(shape, generator=generator) < 24 / shape[-1])

    b1 = make(-3 - negative, -negative, d_ff) if bias else None
    arguments = make(-1, 1, *tokens, d_in), few(d_ff, d_in), b1, few(d_in, d_ff), make(-2, 2, d_in) if bias else None
    return [None if t is None else t.to("cuda", dtype) for t in arguments]


def signs_like(y):
    return torch.randint(-1, 2, y.shape, generator=torch.Generator().manual_seed(2)).to(y)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TRAINED)
@pytest.mark.parametrize("ours, dense", BLOCKS)
@pytest.mark.parametrize("tokens", [(70,), (3, 5), (1,), (0,)])
def test_without_kernels_it_is_the_dense_block(ours, dense, tokens, dtype, device):
    for bias in (True, False):
        assert_same_training(ours, dense, ffn_arguments(device, dtype, tokens, bias=bias), signs_like, fused=True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("frozen", [(0,), (1, 2), (0, 1, 2), (3, 4), (0, 1, 2, 3), (0, 2, 3)])
def test_frozen_arguments(frozen, device):
    arguments = ffn_arguments(device, torch.float32)
    assert_same_training(bitsparse.relu_squared_ffn, dense_ffn, arguments, signs_like, frozen, fused=True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tokens", [(70,), (2, 35)])
def test_strided_arguments(tokens, device):
    x, w1, b1, w2, b2 = ffn_arguments(device, torch.bfloat16, tokens)

    def turned(t):
        return t.transpose(-1, -2).contiguous().transpose(-1, -2)

    def spread(t):
        return torch.stack((t, t), -1)[..., 0]

    for arguments in (
        [turned(x), w1, b1, w2, b2],
        [x, turned(w1), b1, w2, b2],
        [x, w1, b1, turned(w2), b2],
        [x, w1, spread(b1), w2, b2],
        [x, w1, b1, w2, spread(b2)],
        [x, w1, b1[:1].expand_as(b1), w2, b2],
    ):
        assert_same_training(bitsparse.relu_squared_ffn, dense_ffn, arguments, signs_like, fused=True)


@pytest.mark.parametrize("d_in, d_ff", [(1, 100), (24, 1), (1, 1)])
def test_sizes_of_one(d_in, d_ff):
    """Their layouts are ambiguous, and choose the matrix products of eager mode."""
    for tokens in (1, 3):
        arguments = ffn_arguments("cpu", torch.float32, (tokens,), d_in, d_ff, 64)
        arguments[2].fill_(3)
        assert_same_training(bitsparse.relu_squared_ffn, dense_ffn, arguments, torch.Tensor.detach, fused=True)


def test_tensors_in_several_places():
    """Their gradients are added up in the order of the dense block's."""
    x, w1, b1, *_ = ffn_arguments("cpu", torch.float32, d_in=32, d_ff=32)
    gradients = []
    for function in (dense_ffn, lambda *arguments: bitsparse.relu_squared_ffn(*arguments, fused=True)):
        leaves = [t.clone().requires_grad_() for t in (x, w1, b1)]
        y = function(function(leaves[0], leaves[1], leaves[2], leaves[1], leaves[2]), *leaves[1:], *leaves[1:])
        gradients.append(torch.autograd.grad((y + leaves[2]).square().sum(), leaves))
    assert all(map(torch.equal, *gradients))


def test_gradients_of_constant_gradients():
    """Plain relu's gradient for x is constant in x, and with w2 frozen depends on w1 alone."""
    results = []
    for function in (dense_relu_ffn, lambda *arguments: bitsparse.relu_ffn(*arguments, fused=True)):
        x, w1, b1, w2, b2 = ffn_arguments("cpu", torch.float32)
        x.requires_grad_(), w1.requires_grad_()
        (gradient,) = torch.autograd.grad(function(x, w1, b1, w2, b2).sum(), x, create_graph=True)
        results.append(torch.autograd.grad(gradient.square().sum() + 0.5 * w1.sum(), w1)[0])
    assert_same_bits(results[1], results[0])


def test_only_what_is_needed_is_kept():
    x, w1, b1, w2, b2 = ffn_arguments("cpu", torch.float32)
    x = x.clone()
    y = bitsparse.relu_squared_ffn(x, w1, b1.requires_grad_(), w2, b2, fused=True)
    seen = weakref.ref(x)
    del x
    assert seen() is None  # w1 needs no gradient
    y.sum().backward()


def test_weights_may_change():
    """As in the dense block: `.data` changes nothing, and what backward does not need may be overwritten."""
    for change in (lambda x, w1: setattr(w1, "data", torch.zeros_like(w1)), lambda x, w1: w1.zero_()):
        gradients = []
        for function in (dense_ffn, lambda *arguments: bitsparse.relu_squared_ffn(*arguments, fused=True)):
            x, w1, b1, w2, b2 = ffn_arguments("cpu", torch.float32)
            w1.requires_grad_()
            y = function(x, w1, b1, w2, b2)
            with torch.no_grad():
                change(x, w1)
            gradients.append(torch.autograd.grad(y.square().sum(), w1)[0])
        assert_same_bits(gradients[1], gradients[0])


def test_double_backward_is_a_clear_error():
    leaves = [t.requires_grad_() for t in ffn_arguments("cpu", torch.float32)]
    y = bitsparse.relu_squared_ffn(*leaves, fused=True)
    for gradient in torch.autograd.grad(y.square().sum(), leaves[:4], create_graph=True):
        for leaf in leaves[:4]:
            with pytest.raises(NotImplementedError, match="double backward is not supported"):
                torch.autograd.grad(gradient.sum(), leaf, retain_graph=True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("wrap", ["compiled", "checkpointed", "saved on the host"])
def test_around_the_block(wrap, device):
    def ours(*arguments):
        if wrap == "checkpointed":
            return checkpoint(fused, *arguments, use_reentrant=False)
        with torch.autograd.graph.save_on_cpu() if wrap == "saved on the host" else nullcontext():
            return function(*arguments)

    def fused(*arguments):
        return bitsparse.relu_squared_ffn(*arguments, fused=True)

    torch._dynamo.reset()
    function = torch.compile(fused, fullgraph=True, backend="aot_eager") if wrap == "compiled" else fused
    assert_same_training(ours, dense_ffn, ffn_arguments(device, torch.float32, (2, 35)), signs_like)


def test_module():
    block = bitsparse.nn.ReLUSquaredFFN(24, 96, fused=True)
    assert "fused=True" in repr(block)
    x = torch.randn(5, 24)
    assert torch.equal(block(x), dense_ffn(x, block.fc.weight, block.fc.bias, block.proj.weight, block.proj.bias))
    with pytest.raises(TypeError, match="expected fused to be a bool, got int"):
        bitsparse.nn.ReLUSquaredFFN(24, fused=1)
    for value in ("yes", 1, None):
        with pytest.raises(TypeError, match=f"expected fused to be a bool, got {type(value).__name__}"):
            bitsparse.relu_squared_ffn(x, block.fc.weight, None, block.proj.weight, fused=value)
    del block.__dict__["fused"]  # as stored before there was this option
    assert not block.fused and "fused=False" in repr(block)


@pytest.mark.cuda
@hopper
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("tokens, d_in, d_ff", SHAPES)
@pytest.mark.parametrize("ours, dense", BLOCKS)
@pytest.mark.parametrize("bias", [True, False])
def test_whole_numbers(ours, dense, tokens, d_in, d_ff, codec, bias):
    arguments = whole_numbers((tokens,), d_in, d_ff, bias)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        assert_same_training(ours, dense, arguments, signs_like, codec=codec, fused=True)
    kernels = {event.name for event in profile.events() if "linear_kernel" in event.name}
    assert any("LinearCompress" in name for name in kernels), kernels
    assert any("LinearGradient" in name for name in kernels) == (d_in >= 2048), kernels


@pytest.mark.cuda
@hopper
def test_more_dimensions_and_nothing_kept():
    arguments = whole_numbers((2, 4, 64), 256, 512)
    assert_same_training(bitsparse.relu_squared_ffn, dense_ffn, arguments, signs_like, fused=True)
    arguments = whole_numbers((256,), 256, 512, negative=300)
    assert_same_training(bitsparse.relu_squared_ffn, dense_ffn, arguments, signs_like, fused=True)


@pytest.mark.cuda
@hopper
def test_compiled():
    ours = torch.compile(bitsparse.relu_squared_ffn, fullgraph=True)
    arguments = whole_numbers((512,), 256, 768)
    assert_same_training(ours, dense_ffn, arguments, signs_like, fused=True)


@pytest.mark.cuda
@hopper
def test_rounding_is_that_of_any_product():
    """Of normal numbers: as near to the exact results as the dense block is."""
    x, w1, b1, w2, b2 = ffn_arguments("cuda", torch.bfloat16, (1024,), 768, 1536, 768)
    exact, exact_gradients = run_backward(dense_ffn, [t.double() for t in (x, w1, b1, w2, b2)], signs_like)
    errors = []
    for function, options in ((dense_ffn, {}), (bitsparse.relu_squared_ffn, {"fused": True})):
        y, gradients = run_backward(function, [x, w1, b1, w2, b2], signs_like, **options)
        pairs = zip([y, *gradients], [exact, *exact_gradients], strict=True)
        errors.append([((a.double() - b).norm() / b.norm()).item() for a, b in pairs])
    for ours, dense in zip(errors[1], errors[0], strict=True):
        assert ours < 1.05 * dense + 1e-6, (ours, dense)


@pytest.mark.cuda
@hopper
@pytest.mark.parametrize("spill_pages", [0, 64])
def test_full_arena(spill_pages):
    """Spilled: exact. Lost: seen, by NaN where the host can't know yet, and then by an error."""
    arguments = whole_numbers((2048,), 2048, 2048)
    expected, gradients = run_backward(dense_ffn, arguments, signs_like)
    signs = signs_like(expected)
    run_backward(bitsparse.relu_squared_ffn, arguments, signs, fused=True)  # the first use takes its time
    arena = bitsparse.Arena("cuda", capacity=PAGE, spill_bytes=spill_pages * PAGE)
    with arena:
        torch.cuda._sleep(4_000_000_000)  # the device is two seconds behind, as this host may be busy
        y, got = run_backward(bitsparse.relu_squared_ffn, arguments, signs, fused=True)
        torch.cuda.synchronize()
        assert torch.equal(y, expected)
        if spill_pages:
            assert all(map(torch.equal, got, gradients))
        else:
            assert all(g.isnan().any() for g in (got[0], got[1], got[3]))
            with pytest.raises(bitsparse.OutOfArenaMemory, match="was full"):
                bitsparse.relu_squared_ffn(arguments[0].requires_grad_(), *arguments[1:], fused=True)


@pytest.mark.cuda
@hopper
def test_graph_capture_and_replay():
    arguments = whole_numbers((512,), 256, 768)
    expected, gradients = run_backward(dense_ffn, arguments, signs_like)
    leaves = [t.detach().clone().requires_grad_() for t in arguments]
    signs = signs_like(expected)
    arena = bitsparse.Arena("cuda", worst_case=True)
    with arena:

        def step():
            y = bitsparse.relu_squared_ffn(*leaves, fused=True)
            return [y.detach(), *torch.autograd.grad(y, leaves, signs)]

        graph, results = captured(step, warm_ups=1)
        for _ in range(3):
            for t in results:
                t.fill_(7)
            graph.replay()
            assert all(map(torch.equal, results, [expected, *gradients]))
    del results, graph
