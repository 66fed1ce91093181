"""The ways in which autograd uses and drops what a block has saved."""

import random
import threading
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from support import (
    DEVICES,
    TRAINED,
    as_leaves,
    assert_same_bits,
    assert_same_training,
    dense_ffn,
    dense_linear,
    dense_relu_ffn,
    ffn_arguments,
    randn,
    run_backward,
)
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import bitsparse

pytestmark = pytest.mark.parametrize("device", DEVICES)


def as_is(x):
    return x


def stats(device):
    return bitsparse.memory_stats(device, synchronize=True)


def test_no_gradient_needed_means_nothing_is_compressed(device):
    tensors = ffn_arguments(device, torch.bfloat16)
    expected = dense_ffn(*tensors)
    run_backward(bitsparse.relu_squared_ffn, tensors)  # so that there is an arena whose counters could move
    before = stats(device)
    leaves = as_leaves(tensors)
    with torch.no_grad():
        results = [bitsparse.relu_squared_ffn(*leaves)]
    with torch.inference_mode():
        results.append(bitsparse.relu_squared_ffn(*leaves))
        results.append(bitsparse.relu_squared_ffn(*[t.clone() for t in tensors]))
    results.append(bitsparse.relu_squared_ffn(*tensors))
    h = randn(10, 356, seed=9, dtype=torch.bfloat16, device=device)
    bitsparse.relu_squared_linear(h, tensors[3])
    with torch.no_grad():
        bitsparse.relu_squared_linear(h.requires_grad_(), tensors[3])
    for result in results:
        assert not result.requires_grad
        assert_same_bits(result, expected)
    after = stats(device)
    assert after["leases_total"] == before["leases_total"]
    assert (after["in_use"], after["live_leases"]) == (0, 0)


def test_h_is_not_modified_without_gradients(device):
    h = randn(10, 356, seed=9, dtype=torch.bfloat16, device=device)
    w2 = randn(4, 356, seed=3, dtype=torch.bfloat16, device=device)
    copy = h.clone()
    assert_same_bits(bitsparse.relu_squared_linear(h, w2), dense_linear(copy, w2))
    assert_same_bits(h, copy)


def test_only_the_last_bias_needs_a_gradient(device):
    """Nothing of the activation is needed for it, so nothing is kept."""
    tensors = ffn_arguments(device, torch.float32)
    before = stats(device)["leases_total"]
    assert_same_training(bitsparse.relu_squared_ffn, dense_ffn, tensors, frozen=(0, 1, 2, 3))
    assert stats(device)["leases_total"] == before


def test_a_lease_lives_as_long_as_its_graph(device):
    leaves = as_leaves(ffn_arguments(device, torch.bfloat16))
    start = stats(device)
    y = bitsparse.relu_squared_ffn(*leaves)
    during = stats(device)
    assert during["live_leases"] == start["live_leases"] + 1
    assert during["in_use"] > start["in_use"]
    assert during["dense_bytes"] - start["dense_bytes"] == 70 * 356 * 2
    y.sum().backward()
    assert stats(device)["live_leases"] == start["live_leases"]
    assert stats(device)["in_use"] == start["in_use"]


def test_dropped_graph_returns_its_space(device):
    leaves = as_leaves(ffn_arguments(device, torch.bfloat16))
    for _ in range(5):
        y = bitsparse.relu_squared_ffn(*leaves)
        assert stats(device)["live_leases"] == 1
        del y
        assert (stats(device)["live_leases"], stats(device)["in_use"]) == (0, 0)


@pytest.mark.parametrize("dtype", TRAINED, ids=str)
def test_retain_graph(device, dtype):
    tensors = ffn_arguments(device, dtype)

    def twice(function):
        leaves = as_leaves(tensors)
        y = function(*leaves)
        first = torch.autograd.grad(y, leaves, torch.ones_like(y), retain_graph=True)
        second = torch.autograd.grad(y, leaves, torch.full_like(y, 0.5))
        return [*first, *second]

    for got, expected in zip(twice(bitsparse.relu_squared_ffn), twice(dense_ffn), strict=True):
        assert_same_bits(got, expected)


def test_backward_twice_without_retain_graph_is_an_error(device):
    y = bitsparse.relu_squared_ffn(*as_leaves(ffn_arguments(device, torch.float32))).sum()
    y.backward()
    with pytest.raises(RuntimeError, match="second time"):
        y.backward()


def test_one_gradient_at_a_time(device):
    """Each call asks for one gradient only; together they are the same as all at once."""
    tensors = ffn_arguments(device, torch.bfloat16)
    _, expected = run_backward(dense_ffn, tensors)
    leaves = as_leaves(tensors)
    y = bitsparse.relu_squared_ffn(*leaves)
    for leaf, grad in zip(leaves, expected, strict=True):
        (got,) = torch.autograd.grad(y.sum(), leaf, retain_graph=True)
        assert_same_bits(got, grad)


def test_gradient_accumulation(device):
    tensors = ffn_arguments(device, torch.bfloat16)

    def accumulate(function):
        leaves = as_leaves(tensors)
        for scale in (1.0, 0.5, 2.0):
            (function(*leaves) * scale).sum().backward()
        return [leaf.grad for leaf in leaves]

    for got, expected in zip(accumulate(bitsparse.relu_squared_ffn), accumulate(dense_ffn), strict=True):
        assert_same_bits(got, expected)


def test_block_used_twice_in_one_graph(device):
    tensors = ffn_arguments(device, torch.float32, d_out=24)

    def nested(function):
        leaves = as_leaves(tensors)
        function(function(*leaves), *leaves[1:]).sum().backward()
        return [leaf.grad for leaf in leaves]

    for got, expected in zip(nested(bitsparse.relu_squared_ffn), nested(dense_ffn), strict=True):
        assert_same_bits(got, expected)


@pytest.mark.parametrize("name", ["relu_squared_ffn", "relu_ffn", "relu_squared_linear", "relu_linear"])
def test_double_backward_is_a_clear_error(device, name):
    tensors = ffn_arguments(device, torch.float32, d_in=356)
    leaves = as_leaves(tensors if name.endswith("ffn") else [tensors[0], tensors[3], tensors[4]])
    y = getattr(bitsparse, name)(*leaves)
    (grad,) = torch.autograd.grad(y.square().sum(), leaves[0], create_graph=True)
    with pytest.raises(RuntimeError, match=r"(?i)bitsparse.*(double backward|second derivative|differentiat\w+ twice)"):
        grad.sum().backward()


def hessian(f, t):
    return torch.autograd.functional.hessian(lambda x: f(x, *t[1:]).sum(), t[0])


def product_with_a_vector(f, t):
    return torch.autograd.functional.hvp(lambda x: f(x, *t[1:]).sum(), t[0], torch.ones_like(t[0]))


def penalty_on(first, second):
    """The gradient of tensor `first`'s gradient with respect to tensor `second` alone."""

    def penalty(f, t):
        leaves = [each.detach().requires_grad_(i in (first, second)) for i, each in enumerate(t)]
        (g,) = torch.autograd.grad(f(*leaves).sum(), leaves[first], create_graph=True)
        return torch.autograd.grad(g.square().sum(), leaves[second], allow_unused=True)

    return penalty


SECOND_DERIVATIVES = {"hessian": hessian, "hvp": product_with_a_vector}
SECOND_DERIVATIVES |= {
    f"{a} by {b}": penalty_on(i, j)
    for i, a in enumerate(("x", "w1", "b1", "w2"))
    for j, b in enumerate(("x", "w1", "b1", "w2"))
    if not i == j == 3  # the output is linear in w2
}


@pytest.mark.parametrize("way", SECOND_DERIVATIVES)
def test_second_derivatives_by_any_way_are_errors(device, way):
    """Also where autograd visits only what leads to the inputs it was asked for."""
    tensors = ffn_arguments(device, torch.float32, tokens=(5,), d_in=4, d_ff=8, d_out=3)
    with pytest.raises(NotImplementedError, match="double backward is not supported"):
        SECOND_DERIVATIVES[way](bitsparse.relu_squared_ffn, tensors)


def test_the_gradient_of_plain_relu_is_constant_in_x(device):
    x, w1, _, w2, _ = ffn_arguments(device, torch.float32)
    x.requires_grad_()
    (force,) = torch.autograd.grad(bitsparse.relu_ffn(x, w1, None, w2).sum(), x, create_graph=True)
    assert not force.requires_grad


def test_data_of_weights_set_after_forward(device):
    """Backward is that of the weights that forward used, as in eager mode."""
    tensors = ffn_arguments(device, torch.float32)
    gradients = []
    for function in (dense_ffn, bitsparse.relu_squared_ffn):
        leaves = as_leaves([t.clone() for t in tensors])
        y = function(*leaves)
        for leaf in leaves[1:]:
            leaf.data = torch.zeros_like(leaf)
        gradients.append(torch.autograd.grad(y.sum(), leaves))
    for got, expected in zip(*reversed(gradients), strict=True):
        assert_same_bits(got, expected)


def test_hooks_that_change_layouts(device):
    """A transposed weight comes back row-major."""

    def copy(t):
        return torch.empty(t.size(), dtype=t.dtype, device=t.device).copy_(t)

    x, w1, b1, w2, b2 = ffn_arguments(device, torch.float32, d_ff=16, d_out=8)

    def wrapped(function):
        def call(*leaves):
            with torch.autograd.graph.saved_tensors_hooks(copy, as_is):
                return function(*leaves)

        return call

    tensors = [x, w1, b1, w2.t().contiguous().t(), b2]
    assert_same_training(wrapped(bitsparse.relu_squared_ffn), wrapped(dense_ffn), tensors)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_last_weights_may_change_where_only_they_are_trained(device, compiled):
    """Their gradient does not depend on their values. Whole numbers: compiled code may add up in another order."""
    x, w1, b1, w2, b2 = (t.detach().mul(2).round() for t in ffn_arguments(device, torch.float32))
    ours = bitsparse.relu_squared_ffn
    if compiled:
        torch._dynamo.reset()
        ours = torch.compile(ours, fullgraph=True, backend="aot_eager")
    gradients = []
    for function in (dense_ffn, ours):
        leaf = w2.clone().requires_grad_()
        y = function(x, w1, b1, leaf, b2)
        with torch.no_grad():
            leaf.mul_(3)
        gradients += torch.autograd.grad(y.sum(), leaf)
    assert_same_bits(gradients[1], gradients[0])


class NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y):
        return y.clone()

    @staticmethod
    def backward(ctx, grad):
        return None


def test_no_gradient_arrives(device):
    def wrapped(function):
        return lambda *leaves: NoGradient.apply(function(*leaves))

    tensors = ffn_arguments(device, torch.float32)
    _, gradients = run_backward(wrapped(bitsparse.relu_squared_ffn), tensors)
    assert gradients == run_backward(wrapped(dense_ffn), tensors)[1] == [None] * 5


def spread_over_tokens(h):
    return h[:1].expand(70, -1)


def spread_over_features(h):
    return h[:, :1].expand(-1, 356)


def every_other_column(h):
    return torch.cat([h, h], 1)[:, ::2]


def column_major(h):
    return h.t().contiguous().t()


def every_other_row_of_columns(h):
    return torch.cat([h, h]).t().contiguous()[:, ::2].t()


def overlapping(h):
    return h.as_strided((70, 356), (1, 1))


def one_token_of_columns(h):
    return h.t().contiguous().t()[:1]


def one_feature_of_columns(h):
    return h.as_strided((70, 1), (2, 5))


LAYOUTS = [as_is, spread_over_tokens, spread_over_features, every_other_column, column_major]
LAYOUTS += [every_other_row_of_columns, overlapping, one_token_of_columns, one_feature_of_columns]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
def test_layouts_of_the_pre_activation(device, layout):
    for dtype in TRAINED:
        h = layout(randn(70, 356, seed=1, dtype=dtype, device=device))
        w2 = randn(20, 2 * h.shape[1], seed=2, dtype=dtype, device=device)[:, ::2]
        assert_same_training(bitsparse.relu_squared_linear, dense_linear, [h, w2])
        strides = [run_backward(f, [h, w2])[1] for f in (bitsparse.relu_squared_linear, dense_linear)]
        assert [g.stride() for g in strides[0]] == [g.stride() for g in strides[1]]


MATMULS = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
COMPRESS = [torch.ops.bitsparse._compress_activation_.default, torch.ops.bitsparse._compress_activation.default]


@pytest.mark.parametrize("kept", [MATMULS, COMPRESS, MATMULS + COMPRESS], ids=["matmuls", "compress", "both"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
def test_selective_activation_checkpointing(device, kept, bias):
    """What the policy keeps is read again in backward, so it must not have been overwritten meanwhile."""
    context = partial(create_selective_checkpoint_contexts, kept)

    def wrapped(function):
        def twice(x, *weights):
            return function(function(x, *weights), *weights)

        return lambda *leaves: checkpoint(twice, *leaves, use_reentrant=False, context_fn=context)

    tensors = ffn_arguments(device, torch.bfloat16, d_in=24, d_out=24, bias=bias)
    assert_same_training(wrapped(bitsparse.relu_squared_ffn), wrapped(dense_ffn), tensors)
    assert_same_training(wrapped(bitsparse.relu_ffn), wrapped(dense_relu_ffn), tensors)


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["not_reentrant", "reentrant"])
def test_activation_checkpointing(device, use_reentrant):
    tensors = ffn_arguments(device, torch.bfloat16)

    def wrapped(function):
        return lambda *leaves: checkpoint(function, *leaves, use_reentrant=use_reentrant)

    assert_same_training(wrapped(bitsparse.relu_squared_ffn), wrapped(dense_ffn), tensors)
    leaves = as_leaves(tensors)
    y = wrapped(bitsparse.relu_squared_ffn)(*leaves)
    assert stats(device)["live_leases"] == 0  # nothing is kept until backward recomputes
    y.sum().backward()


def test_saved_tensor_hooks_that_keep_the_tensors(device):
    tensors = ffn_arguments(device, torch.bfloat16)

    def hooked(*leaves):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (t,), lambda held: held[0]):
            return bitsparse.relu_squared_ffn(*leaves)

    assert_same_training(hooked, dense_ffn, tensors)


@pytest.mark.parametrize("activation", ["relu", "relu_squared"])
def test_saved_tensor_hooks_that_copy(device, activation):
    """save_on_cpu brings back copies, which no lease survives: a self-contained tensor is saved instead."""
    tensors = ffn_arguments(device, torch.bfloat16)
    tensors[0][3, :] = float("nan")
    ours = getattr(bitsparse, f"{activation}_ffn")

    def hooked(function):
        def call(*leaves):
            with torch.autograd.graph.save_on_cpu():
                return function(*leaves)

        return call

    def dense(x, w1, b1, w2, b2):
        relu = F.linear(x, w1, b1).relu()
        return F.linear(relu.square() if activation == "relu_squared" else relu, w2, b2)

    assert_same_training(hooked(ours), hooked(dense), tensors)
    assert stats(device)["live_leases"] == 0


def test_leases_released_in_random_order(device):
    """Several microbatches in flight, of different sizes; some run backward, some are dropped; the rest stay right."""
    generator = random.Random(1)
    w2 = randn(16, 300, seed=1, dtype=torch.bfloat16, device=device)
    expected, graphs = {}, {}
    for index in range(24):
        h = randn(generator.randrange(1, 90), 300, seed=100 + index, dtype=torch.bfloat16, device=device)
        expected[index] = run_backward(dense_linear, [h, w2])[1]
        leaves = as_leaves([h, w2])
        graphs[index] = (bitsparse.relu_squared_linear(*leaves), leaves)
        if index % 4 == 3:  # new leases take the place of old ones
            for done in generator.sample(sorted(graphs), 2):
                finish(graphs.pop(done), expected[done], drop=generator.random() < 0.3)
    order = sorted(graphs)
    generator.shuffle(order)
    for left, index in zip(range(len(order), 0, -1), order, strict=True):
        assert stats(device)["live_leases"] == left
        finish(graphs.pop(index), expected[index], drop=generator.random() < 0.3)
    assert (stats(device)["live_leases"], stats(device)["in_use"]) == (0, 0)


def finish(graph, expected, drop):
    y, leaves = graph
    if drop:
        return
    y.sum().backward()
    for leaf, grad in zip(leaves, expected, strict=True):
        assert_same_bits(leaf.grad, grad)


def test_first_in_first_out(device):
    """The order of pipeline schedules: the oldest lease ends first while new ones are made."""
    w2 = randn(16, 300, seed=1, dtype=torch.bfloat16, device=device)
    queue = []
    for step in range(40):
        h = randn(64, 300, seed=step, dtype=torch.bfloat16, device=device)
        leaves = as_leaves([h, w2])
        queue.append(((bitsparse.relu_squared_linear(*leaves), leaves), run_backward(dense_linear, [h, w2])[1]))
        if len(queue) > 4:
            finish(*queue.pop(0), drop=False)
    queue.clear()
    assert stats(device)["in_use"] == 0


def test_changed_in_place_before_backward_is_an_error(device):
    """As everywhere in autograd: a saved tensor that was modified is noticed."""
    leaves = as_leaves(ffn_arguments(device, torch.float32))
    y = bitsparse.relu_squared_ffn(*leaves)
    with torch.no_grad():
        leaves[3].add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_threads(device):
    """Forward and backward in several threads at once, in the default arena and in arenas of their own."""
    tensors = ffn_arguments(device, torch.bfloat16, tokens=(200,))
    w = tensors[1:]
    inputs = [randn(200, 24, seed=50 + i, dtype=torch.bfloat16, device=device) for i in range(6)]
    expected = [run_backward(dense_ffn, [x, *w]) for x in inputs]
    failures = []

    def work(index):
        try:
            for _ in range(10):
                got = run_backward(bitsparse.relu_squared_ffn, [inputs[index], *w])
                assert_same_bits(got[0], expected[index][0])
                for a, b in zip(got[1], expected[index][1], strict=True):
                    assert_same_bits(a, b)
        except BaseException as error:
            failures.append(error)

    def work_in_arena(index):
        with bitsparse.Arena(device):
            work(index)

    targets = [work if index % 2 else work_in_arena for index in range(len(inputs))]
    threads = [threading.Thread(target=target, args=(i,)) for i, target in enumerate(targets)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


def test_forward_and_backward_in_different_threads(device):
    tensors = ffn_arguments(device, torch.bfloat16)
    _, expected = run_backward(dense_ffn, tensors)
    leaves = as_leaves(tensors)
    y = bitsparse.relu_squared_ffn(*leaves).sum()
    thread = threading.Thread(target=y.backward)
    thread.start()
    thread.join()
    for leaf, grad in zip(leaves, expected, strict=True):
        assert_same_bits(leaf.grad, grad)
