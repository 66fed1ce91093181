"""How long leases live: pipeline schedules, exceptions, forks, many steps of changing shapes."""

import random

import pytest
import torch
from support import (
    DEVICES,
    as_leaves,
    assert_same_bits,
    dense_ffn,
    dense_linear,
    ffn_arguments,
    randn,
    run_backward,
)

import bitsparse

pytestmark = pytest.mark.parametrize("device", DEVICES)


class Fails(torch.autograd.Function):
    """The identity, whose backward raises."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        raise RuntimeError("this backward fails")


def pipeline(function, tensors, inputs, in_flight):
    """1F1B as one stage sees it: `in_flight` forwards, then a forward after each backward, oldest first."""
    weights = as_leaves(tensors[1:])
    graphs, outputs = [], []
    for x in inputs:
        if len(graphs) == in_flight:
            graphs.pop(0).sum().backward()
        graphs.append(function(x, *weights))
        outputs.append(graphs[-1].detach())
    while graphs:
        graphs.pop(0).sum().backward()
    return outputs, [w.grad for w in weights]


def test_pipeline_with_four_microbatches_in_flight(device):
    tensors = ffn_arguments(device, torch.bfloat16)
    inputs = [randn(70, 24, seed=100 + i, dtype=torch.bfloat16, device=device, scale=0.5 + i % 3) for i in range(12)]
    expected = pipeline(dense_ffn, tensors, inputs, in_flight=4)
    with bitsparse.Arena(device) as arena:
        for _ in range(3):
            got = pipeline(bitsparse.relu_squared_ffn, tensors, inputs, in_flight=4)
            for results, wanted in zip(got, expected, strict=True):
                for a, b in zip(results, wanted, strict=True):
                    assert_same_bits(a, b)
        stats = arena.memory_stats(synchronize=True)
    assert (stats["in_use"], stats["live_leases"]) == (0, 0)


@pytest.mark.parametrize("failing_layer", range(4))
def test_backward_that_fails_half_way(device, failing_layer):
    w1, w2 = (randn(48, 48, seed=seed, dtype=torch.float32, device=device) for seed in (1, 2))
    x = randn(70, 48, seed=3, dtype=torch.float32, device=device)
    with bitsparse.Arena(device) as arena:

        def step(failing):
            leaf = x.clone().requires_grad_()
            y = leaf
            for layer in range(4):
                y = bitsparse.relu_squared_ffn(y, w1, None, w2)
                y = Fails.apply(y) if layer == failing else y / (1 + y.detach().abs().max())
            y.sum().backward()
            return leaf.grad

        right = step(None)
        with pytest.raises(RuntimeError, match="this backward fails"):
            step(failing_layer)
        stats = arena.memory_stats(synchronize=True)
        assert (stats["in_use"], stats["live_leases"]) == (0, 0)
        assert_same_bits(step(None), right)


def test_forward_that_fails_half_way(device):
    tensors = ffn_arguments(device, torch.bfloat16)
    leaves = as_leaves(tensors)
    with bitsparse.Arena(device) as arena:
        for _ in range(3):
            with pytest.raises(ValueError, match="w1"):
                y = bitsparse.relu_squared_ffn(*leaves)
                bitsparse.relu_squared_ffn(y, leaves[1], None, leaves[3])  # y is too narrow for w1
        y = None
        stats = arena.memory_stats(synchronize=True)
        assert (stats["in_use"], stats["live_leases"]) == (0, 0)
        for a, b in zip(
            run_backward(bitsparse.relu_squared_ffn, tensors)[1], run_backward(dense_ffn, tensors)[1], strict=True
        ):
            assert_same_bits(a, b)


FORK = """
import os, sys, torch, bitsparse
torch.set_num_threads(1)  # a forked process has none of its parent's OpenMP threads
device = sys.argv[1]
def step(device):
    torch.manual_seed(0)
    x, w1, w2 = (torch.randn(shape, device=device, requires_grad=True) for shape in ((70, 24), (132, 24), (24, 132)))
    y = bitsparse.relu_squared_ffn(x, w1, None, w2)
    y.sum().backward()
    return x.grad.cpu()
w = torch.randn(24, 132, device=device, requires_grad=True)
kept = bitsparse.relu_squared_linear(torch.randn(70, 132, device=device), w)  # a lease that both processes have
before = step("cpu")
child = os.fork()
right = True
if child or not torch.cuda.is_available():  # where there are GPUs, PyTorch has no backward in a forked process
    right = torch.equal(step("cpu"), before)
if child == 0:
    if device == "cpu":
        del kept
        right = right and bitsparse.memory_stats("cpu")["live_leases"] == 0
    else:
        try:
            step(device)
            right = False
        except RuntimeError as error:
            right = right and "forked subprocess" in str(error)
    sys.stdout.flush()
    os._exit(0 if right else 1)
assert right
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert bitsparse.memory_stats(device)["live_leases"] == 1
kept.sum().backward()
assert bitsparse.memory_stats(device)["live_leases"] == 0
"""


def test_fork(device, run_python):
    run_python("-c", FORK, device)


def test_ten_thousand_steps_of_changing_shapes(device):
    rng = random.Random(5)
    width = 96
    h = randn(64, width, seed=1, dtype=torch.bfloat16, device=device)
    w = randn(8, width, seed=2, dtype=torch.bfloat16, device=device)
    expected = {n: run_backward(dense_linear, [h[:n], w])[1] for n in range(1, 65)}
    capacities = []
    with bitsparse.Arena(device) as arena:
        for step in range(10_000):
            rows = [rng.randint(1, 64) for _ in range(rng.randint(1, 4))]
            graphs = []
            for n in rows:
                leaves = as_leaves([h[:n], w])
                graphs.append((bitsparse.relu_squared_linear(*leaves), leaves, n))
            rng.shuffle(graphs)
            for y, leaves, n in graphs:
                if rng.random() < 0.9:  # other graphs are dropped
                    y.sum().backward()
                    if step % 100 == 0:
                        for a, b in zip((leaf.grad for leaf in leaves), expected[n], strict=True):
                            assert_same_bits(a, b)
            del graphs, y, leaves
            if step % 1000 == 999:
                stats = arena.memory_stats(synchronize=True)
                assert (stats["in_use"], stats["live_leases"]) == (0, 0)
                capacities.append(stats["capacity"])
    assert stats["leases_total"] > 10_000
    assert max(capacities[1:]) <= capacities[0], capacities
