"""opcheck and torch.compile: the operators trace, and compiled training keeps both bits and saving."""

import pytest
import torch
from support import (
    DEVICES,
    TRAINED,
    Residual,
    as_leaves,
    assert_same_bits,
    dense_ffn,
    ffn_arguments,
    losses_of,
    randn,
    run_backward,
    sparse,
)
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import default_partition, min_cut_rematerialization_partition

import bitsparse

pytestmark = pytest.mark.parametrize("device", DEVICES)

NAMES = ("relu_squared_ffn", "relu_ffn", "relu_squared_linear", "relu_linear")


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def operator_arguments(name, device, dtype, bias=True):
    tensors = ffn_arguments(device, dtype, (9,), d_ff=132, bias=bias)
    if name.endswith("linear"):
        tensors = [randn(9, 132, seed=6, dtype=dtype, device=device), *tensors[3:]]
    return tensors


@pytest.mark.parametrize("dtype", TRAINED, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_opcheck_of_the_blocks(device, name, dtype):
    op = getattr(torch.ops.bitsparse, name).default
    for bias in (True, False):
        tensors = operator_arguments(name, device, dtype, bias)
        torch.library.opcheck(op, tuple(as_leaves(tensors)))
        torch.library.opcheck(op, tuple(tensors), {"codec": "raw"})
        torch.library.opcheck(op, tuple(as_leaves(tensors, frozen=(0,))), {"codec": "signless"})


def test_opcheck_of_pack_and_unpack(device):
    t = randn(70, 356, seed=3, dtype=torch.bfloat16, device=device)
    torch.library.opcheck(torch.ops.bitsparse.pack.default, (t,))
    torch.library.opcheck(torch.ops.bitsparse.pack.default, (t, "raw", "positive"))
    packed = torch.ops.bitsparse.pack(t)
    torch.library.opcheck(torch.ops.bitsparse.unpack.default, (packed, [70, 356], torch.bfloat16))


@pytest.mark.parametrize("name", NAMES)
def test_opcheck_with_more_dimensions(device, name):
    op = getattr(torch.ops.bitsparse, name).default
    tensors = operator_arguments(name, device, torch.float32)
    for shape in ((3, 3), (1, 9, 1), (0, 9)):
        first = torch.zeros(*shape, tensors[0].shape[-1], device=device) + 0.5
        torch.library.opcheck(op, (first.requires_grad_(), *as_leaves(tensors[1:])))


def test_opcheck_of_unpack(device):
    t = sparse(3, 2000, density=0.2, seed=1, dtype=torch.bfloat16, device=device)
    packed = bitsparse.compress(t).packed
    torch.library.opcheck(torch.ops.bitsparse.unpack.default, (packed, [3, 2000], torch.bfloat16))


def captured(function, leaves, partition, dynamic):
    """Runs forward and backward compiled, and returns the traced forward and backward graphs and the output."""
    graphs = {"forward": [], "backward": []}

    def compiler(direction):
        def compile_graph(module, inputs):
            graphs[direction].append(module)
            return make_boxed_func(module.forward)

        return compile_graph

    backend = aot_autograd(
        fw_compiler=compiler("forward"), bw_compiler=compiler("backward"), partition_fn=partition
    )  # fmt: skip
    y = torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic)(*leaves)
    y.sum().backward()
    (forward,), (backward,) = graphs["forward"], graphs["backward"]
    return forward, backward, y.detach()


def saved_shapes(graph):
    """Shapes of all that the compiled forward returns: its result and what it saves for backward."""
    (output,) = graph.graph.find_nodes(op="output")
    values = [node.meta["val"] for node in output.args[0] if node is not None]
    return [tuple(int(size) for size in value.shape) for value in values if isinstance(value, torch.Tensor)]


def elements(shape):
    return int(torch.tensor([1, *shape]).prod())


@pytest.mark.parametrize(
    "partition", [default_partition, min_cut_rematerialization_partition], ids=lambda f: f.__name__
)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_compiled_graph_saves_the_lease_and_nothing_wide(device, dynamic, partition):
    tokens, d_ff = 512, 1024
    tensors = ffn_arguments(device, torch.float32, (tokens,), d_in=64, d_ff=d_ff, d_out=64)

    dense = captured(dense_ffn, as_leaves(tensors), partition, dynamic)
    assert max(map(elements, saved_shapes(dense[0]))) == tokens * d_ff, "the dense block saves the wide activation"

    leaves = as_leaves(tensors)
    forward, backward, y = captured(bitsparse.relu_squared_ffn, leaves, partition, dynamic)
    shapes = saved_shapes(forward)
    assert max(map(elements, shapes)) < tokens * d_ff, shapes
    handles = [
        value
        for value in (node.meta["val"] for node in backward.graph.find_nodes(op="placeholder"))
        if isinstance(value, torch.Tensor) and value.dtype == torch.uint8  # a lease is a handle of a few bytes
    ]
    assert len(handles) == 1
    assert handles[0].numel() <= 1024
    calls = {str(node.target) for node in backward.graph.nodes if "bitsparse" in str(node.target)}
    assert calls, "backward rebuilds the activation from the lease"

    expected, grads = run_backward(dense_ffn, tensors)
    assert_same_bits(y, expected)
    for leaf, grad in zip(leaves, grads, strict=True):
        assert_same_bits(leaf.grad, grad)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", NAMES)
def test_traced_blocks_are_exact(device, name, dynamic):
    function = getattr(bitsparse, name)
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for tokens in (9, 33) if dynamic else (9,):
        for dtype in (torch.bfloat16, torch.float32):
            tensors = operator_arguments(name, device, dtype)
            tensors[0] = randn(tokens, tensors[0].shape[-1], seed=tokens, dtype=dtype, device=device)
            # A contiguous grad_output: tracing makes an expanded one contiguous, and then the GEMMs round differently.
            expected, expected_grads = run_backward(function, tensors, torch.ones_like)
            got, grads = run_backward(compiled, tensors, torch.ones_like)
            assert_same_bits(got, expected)
            for a, b in zip(grads, expected_grads, strict=True):
                assert_same_bits(a, b)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_inductor_trains_with_the_same_losses(device, dynamic):
    """Inductor may order the sums around the blocks differently, so this compares losses, not bits."""
    torch.manual_seed(1)
    eager = Residual(lambda: bitsparse.nn.ReLUSquaredFFN(32)).to(device)
    compiled = Residual(lambda: bitsparse.nn.ReLUSquaredFFN(32)).to(device)
    compiled.load_state_dict(eager.state_dict())
    lengths = (40, 56, 24, 40, 72) if dynamic else (40,) * 5
    batches = [randn(n, 32, seed=n + i, dtype=torch.float32, device=device) for i, n in enumerate(lengths)]
    expected = losses_of(eager, eager, batches)
    got = losses_of(compiled, torch.compile(compiled, fullgraph=True, dynamic=dynamic), batches)
    assert expected[-1] != expected[0]
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=0.0)


def test_compiled_without_gradients_compresses_nothing(device):
    tensors = ffn_arguments(device, torch.float32)
    compiled = torch.compile(bitsparse.relu_squared_ffn, backend="aot_eager", fullgraph=True)
    run_backward(bitsparse.relu_squared_ffn, tensors)
    before = bitsparse.memory_stats(device)["leases_total"]
    with torch.no_grad():
        assert_same_bits(compiled(*tensors), dense_ffn(*tensors))
    assert bitsparse.memory_stats(device)["leases_total"] == before


def test_compiled_code_overwrites_the_pre_activation(device):
    """The compiler gets the operator that works in place, so that it needs no second wide tensor."""
    programs = []

    def keep_program(graph, _):
        programs.append(graph.print_readable(print_output=False))
        return make_boxed_func(graph.forward)

    compiled = torch.compile(bitsparse.relu_squared_ffn, backend=aot_autograd(fw_compiler=keep_program), fullgraph=True)
    run_backward(compiled, ffn_arguments(device, torch.float32))
    assert "_compress_activation_.default" in programs[0]


def test_compiled_under_autocast(device):
    tensors = ffn_arguments(device, torch.float32)

    def block(*leaves):
        with torch.autocast(device, torch.bfloat16):
            return bitsparse.relu_squared_ffn(*leaves)

    expected, expected_grads = run_backward(block, tensors)
    got, grads = run_backward(torch.compile(block, backend="aot_eager", fullgraph=True), tensors)
    assert_same_bits(got, expected)
    for a, b in zip(grads, expected_grads, strict=True):
        assert_same_bits(a, b)


def test_error_under_compile_names_the_argument(device):
    tensors = ffn_arguments(device, torch.float32)
    tensors[3] = tensors[3][:, :-1]
    compiled = torch.compile(bitsparse.relu_squared_ffn, backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match=r"w2"):
        compiled(*tensors)
