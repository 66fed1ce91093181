"""What only a GPU can show: no synchronisation, graph capture, streams, sizes beyond 32 bits, a full arena."""

import gc

import pytest
import torch
from support import (
    Residual,
    as_leaves,
    assert_same_bits,
    bits,
    captured,
    dense_ffn,
    dense_linear,
    ffn_arguments,
    losses_of,
    randn,
    run_backward,
    sparse,
)

import bitsparse

pytestmark = pytest.mark.cuda


@pytest.fixture
def no_synchronisation():
    """Lets PyTorch raise an error whenever the host waits for the device; on only inside `with`."""

    class Forbidden:
        def __enter__(self):
            torch.cuda.set_sync_debug_mode("error")

        def __exit__(self, *_):
            torch.cuda.set_sync_debug_mode("default")

    yield Forbidden()
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", ["relu_squared_ffn", "relu_ffn", "relu_squared_linear", "relu_linear"])
def test_no_synchronisation_in_training(no_synchronisation, name):
    tensors = ffn_arguments("cuda", torch.bfloat16, tokens=(512,))
    if name.endswith("linear"):
        tensors = [randn(512, 356, seed=6, dtype=torch.bfloat16, device="cuda"), *tensors[3:]]
    function = getattr(bitsparse, name)
    grad = torch.ones_like(function(*tensors))

    def step():
        leaves = as_leaves(tensors)
        for y in [function(*leaves) for _ in range(3)]:
            y.backward(grad)

    for _ in range(6):
        step()
    waits = bitsparse.memory_stats("cuda", synchronize=True)["waits"]
    with no_synchronisation:
        for _ in range(10):
            step()
            bitsparse.memory_stats("cuda")
    assert bitsparse.memory_stats("cuda", synchronize=True)["waits"] == waits


def test_no_synchronisation_in_the_first_step_of_a_worst_case_arena(no_synchronisation):
    tensors = ffn_arguments("cuda", torch.bfloat16, tokens=(512,))
    expected = run_backward(dense_ffn, tensors)
    arena = bitsparse.Arena("cuda", worst_case=True)
    grad = torch.ones_like(expected[0])
    torch.cuda.synchronize()
    with arena, no_synchronisation:
        got = run_backward(bitsparse.relu_squared_ffn, tensors, grad)
    assert_same_bits(got[0], expected[0])
    assert arena.memory_stats(synchronize=True)["waits"] == 0


def test_steady_state_neither_waits_nor_grows():
    tensors = ffn_arguments("cuda", torch.bfloat16, tokens=(4096,))
    arena = bitsparse.Arena("cuda")

    def step():
        leaves = as_leaves(tensors)
        ys = [bitsparse.relu_squared_ffn(*leaves) for _ in range(6)]
        torch.stack(ys).sum().backward()

    with arena:
        for _ in range(6):
            step()
        before = arena.memory_stats(synchronize=True)
        for _ in range(20):
            step()
        after = arena.memory_stats(synchronize=True)
    assert (after["waits"], after["growths"]) == (before["waits"], before["growths"])
    assert after["capacity"] <= 2 * after["high_water"] + (8 << 20)
    assert after["in_use"] == 0


def test_results_do_not_depend_on_where_blobs_are():
    """Atomics place the tiles in another order every time; restored bits are the same."""
    h = randn(2048, 1000, seed=1, dtype=torch.bfloat16, device="cuda")
    w2 = randn(32, 1000, seed=2, dtype=torch.bfloat16, device="cuda")
    expected = run_backward(dense_linear, [h, w2])[1]
    for _ in range(20):
        for a, b in zip(run_backward(bitsparse.relu_squared_linear, [h, w2])[1], expected, strict=True):
            assert_same_bits(a, b)


def static_copies(tensors):
    return [t.clone().requires_grad_() for t in tensors]


@pytest.mark.parametrize("arena_options", [None, {"worst_case": True}], ids=["default", "worst_case"])
def test_graph_capture_and_replay(arena_options):
    """Forward and backward in one CUDA graph; every replay trains on other data."""
    tensors = ffn_arguments("cuda", torch.bfloat16, tokens=(300,))
    leaves = static_copies(tensors)
    grad = randn(300, 20, seed=3, dtype=torch.bfloat16, device="cuda")
    arena = bitsparse.Arena("cuda", **(arena_options or {}))

    def step():
        y = bitsparse.relu_squared_ffn(*leaves)
        return y, torch.autograd.grad(y, leaves, grad)

    with arena:
        graph, (y, grads) = captured(step, warm_ups=3)
    for seed in range(10):
        x = randn(300, 24, seed=20 + seed, dtype=torch.bfloat16, device="cuda", scale=1.0 + seed)
        with torch.no_grad():
            leaves[0].copy_(x)
        graph.replay()
        expected = run_backward(dense_ffn, [x, *tensors[1:]], grad)
        assert_same_bits(y.detach(), expected[0], f"replay {seed}")
        for a, b in zip(grads, expected[1], strict=True):
            assert_same_bits(a, b, f"replay {seed}")
    del graph, y, grads
    gc.collect()
    assert arena.memory_stats(synchronize=True)["live_leases"] == 0


@pytest.mark.parametrize("arena_options", [{}, {"capacity": 256 << 20}], ids=["automatic", "fixed"])
def test_capture_of_many_leases(arena_options):
    """More than PyTorch's pool has streams, one of which is capturing; of an arena that has not been used before."""
    layers = 70
    h = randn(64, 256, seed=1, dtype=torch.bfloat16, device="cuda")
    w2 = randn(16, 256, seed=2, dtype=torch.bfloat16, device="cuda")
    leaves = [static_copies([h, w2]) for _ in range(layers)]
    expected = run_backward(dense_linear, [h, w2])

    def step():
        outputs = [bitsparse.relu_squared_linear(*each) for each in leaves]
        return [torch.autograd.grad(y.sum(), each) for y, each in zip(outputs, leaves, strict=True)]

    with bitsparse.Arena("cuda", **arena_options):
        graph, grads = captured(step, warm_ups=0)
    for _ in range(2):
        graph.replay()
    for layer, each in enumerate(grads):
        for a, b in zip(each, expected[1], strict=True):
            assert_same_bits(a, b, f"layer {layer}")


def test_graph_replays_between_eager_steps():
    """An eager step between replays takes nothing that the graph writes to, and the other way round."""
    tensors = ffn_arguments("cuda", torch.bfloat16, tokens=(300,))
    leaves = static_copies(tensors)
    expected = run_backward(dense_ffn, tensors)
    for _ in range(3):
        torch.autograd.grad(bitsparse.relu_squared_ffn(*leaves).sum(), leaves)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        grads = torch.autograd.grad(bitsparse.relu_squared_ffn(*leaves).sum(), leaves)
    for _ in range(5):
        held = as_leaves(tensors)
        y = bitsparse.relu_squared_ffn(*held)
        graph.replay()
        for a, b in zip(grads, expected[1], strict=True):
            assert_same_bits(a, b, "replay")
        y.sum().backward()
        for leaf, b in zip(held, expected[1], strict=True):
            assert_same_bits(leaf.grad, b, "eager")
    del y, graph, grads


def test_make_graphed_callables():
    torch.manual_seed(1)
    module = bitsparse.nn.ReLUSquaredFFN(64, device="cuda", dtype=torch.bfloat16)
    parameters = [p.detach().clone() for p in module.parameters()]
    sample = torch.randn(128, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    graphed = torch.cuda.make_graphed_callables(module, (sample,))
    for seed in range(5):
        x = randn(128, 64, seed=seed, dtype=torch.bfloat16, device="cuda")
        expected = run_backward(dense_ffn, [x, *parameters])
        leaf = x.clone().requires_grad_()
        module.zero_grad()
        y = graphed(leaf)
        y.sum().backward()
        assert_same_bits(y.detach(), expected[0])
        for got, grad in zip([leaf, *module.parameters()], expected[1], strict=True):
            assert_same_bits(got.grad, grad)
    del graphed, y
    module.zero_grad()


def test_streams_side_by_side():
    """Blocks on several streams, with work of different length before them, share an arena."""
    tensors = ffn_arguments("cuda", torch.bfloat16, tokens=(2000,))
    inputs = [randn(2000, 24, seed=40 + i, dtype=torch.bfloat16, device="cuda") for i in range(4)]
    expected = [run_backward(dense_ffn, [x, *tensors[1:]]) for x in inputs]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in inputs]
    for _ in range(5):
        results = []
        for index, (x, stream) in enumerate(zip(inputs, streams, strict=True)):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(200_000 * (index % 3))
                results.append(run_backward(bitsparse.relu_squared_ffn, [x, *tensors[1:]]))
        torch.cuda.synchronize()
        for got, wanted in zip(results, expected, strict=True):
            assert_same_bits(got[0], wanted[0])
            for a, b in zip(got[1], wanted[1], strict=True):
                assert_same_bits(a, b)


def test_space_is_not_reused_before_it_was_read():
    """A slow backward on one stream; the lease's owner is gone on the host long before the device reads it."""
    tensors = ffn_arguments("cuda", torch.bfloat16, tokens=(2000,))
    expected = run_backward(dense_ffn, tensors)
    others = [randn(2000, 24, seed=60 + i, dtype=torch.bfloat16, device="cuda", scale=3.0) for i in range(8)]
    slow, fast = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with bitsparse.Arena("cuda"):
        for _ in range(3):
            with torch.cuda.stream(slow):
                leaves = as_leaves(tensors)
                y = bitsparse.relu_squared_ffn(*leaves)
                torch.cuda._sleep(20_000_000)
                y.sum().backward()
                del y
            with torch.cuda.stream(fast):
                for x in others:
                    run_backward(bitsparse.relu_squared_ffn, [x, *tensors[1:]])
            torch.cuda.synchronize()
            for leaf, grad in zip(leaves, expected[1], strict=True):
                assert_same_bits(leaf.grad, grad)


def test_forward_and_backward_on_different_streams():
    tensors = ffn_arguments("cuda", torch.bfloat16, tokens=(2000,))
    expected = run_backward(dense_ffn, tensors)
    torch.cuda.synchronize()
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    for _ in range(5):
        leaves = as_leaves(tensors)
        with torch.cuda.stream(first):
            torch.cuda._sleep(2_000_000)
            y = bitsparse.relu_squared_ffn(*leaves).sum()
        second.wait_stream(first)
        with torch.cuda.stream(second):
            y.backward()
        torch.cuda.synchronize()
        for leaf, grad in zip(leaves, expected[1], strict=True):
            assert_same_bits(leaf.grad, grad)
    del y


def test_full_arena_spills():
    """What does not fit goes to pinned host memory, and results stay exact."""
    tensors = ffn_arguments("cuda", torch.bfloat16, tokens=(8192,), d_ff=1024)
    expected = run_backward(dense_ffn, tensors)
    arena = bitsparse.Arena("cuda", capacity=1 << 20)
    with arena:
        for _ in range(3):
            leaves = as_leaves(tensors)
            y = bitsparse.relu_squared_ffn(*leaves)
            stats = arena.memory_stats(synchronize=True)
            assert 0 < stats["spilled"] < stats["in_use"]
            assert (stats["capacity"], stats["failures"]) == (1 << 20, 0)
            y.sum().backward()
            assert_same_bits(y.detach(), expected[0])
            for leaf, grad in zip(leaves, expected[1], strict=True):
                assert_same_bits(leaf.grad, grad)
        del y
        assert arena.memory_stats(synchronize=True)["in_use"] == 0


def test_full_arena_without_spill_is_never_silent():
    """An error, at the latest when the host looks; gradients that are out by then are NaN, not wrong numbers."""
    tensors = ffn_arguments("cuda", torch.bfloat16, tokens=(8192,), d_ff=1024)
    expected = run_backward(dense_ffn, tensors)
    leaves = as_leaves(tensors)
    arena = bitsparse.Arena("cuda", capacity=1 << 20, spill_bytes=0)
    with pytest.raises(torch.OutOfMemoryError, match=r"\d+ bytes.*capacity"), arena:
        bitsparse.relu_squared_ffn(*leaves).sum().backward()
        arena.memory_stats(synchronize=True)
    for index in (1, 3):  # w1 and w2: their gradients need the activation
        grad = leaves[index].grad
        assert grad is None or bool(grad.isnan().any()), f"gradient {index} is silently wrong"
    assert arena.memory_stats()["failures"] > 0
    got = run_backward(bitsparse.relu_squared_ffn, tensors)  # outside, all is as ever
    for a, b in zip(got[1], expected[1], strict=True):
        assert_same_bits(a, b)


def test_several_devices():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    for device in ("cuda:1", "cuda:0"):  # the current device stays 0
        tensors = ffn_arguments(device, torch.bfloat16)
        expected, got = run_backward(dense_ffn, tensors), run_backward(bitsparse.relu_squared_ffn, tensors)
        assert_same_bits(got[0], expected[0])
        for a, b in zip(got[1], expected[1], strict=True):
            assert_same_bits(a, b)
        packed = bitsparse.compress(tensors[0])
        assert packed.device == torch.device(device)
        assert_same_bits(packed.decompress(), tensors[0])
    assert bitsparse.memory_stats("cuda:1", synchronize=True)["leases_total"] > 0


@pytest.mark.parametrize("activation", ["relu", "relu_squared"])
def test_kernels_without_an_arena(activation):
    """The yardstick of the benchmarks does what the arena's operators do."""
    op = torch.ops.bitsparse._contiguous.default
    h, grad = (randn(300, 356, seed=seed, dtype=torch.bfloat16, device="cuda") for seed in (1, 2))
    expected, lease = torch.ops.bitsparse._compress_activation.default(h, activation, "tight")
    expected_grad = grad.clone()
    torch.ops.bitsparse._activation_gradient_.default(expected_grad, lease, activation)
    store = torch.zeros(2 * h.nbytes, dtype=torch.uint8, device="cuda")
    for _ in range(3):
        activated, restored, got = h.clone(), torch.full_like(h, -7), grad.clone()
        op(activated, store, "compress", activation, "tight")
        op(restored, store, "restore", activation, "tight")
        op(got, store, "gradient", activation, "tight")
        assert_same_bits(activated, expected)
        assert_same_bits(restored, expected)
        assert_same_bits(got, expected_grad)
    with pytest.raises(ValueError, match=r"expected store to be \d+ bytes"):
        op(h, store[:1000], "compress", activation, "tight")
    with pytest.raises(ValueError, match="expected operation to be"):
        op(h, store, "pack", activation, "tight")


@pytest.mark.slow
@pytest.mark.parametrize("log2", [31, 32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_more_elements_than_32_bits_can_count(log2, dtype):
    numel = (1 << log2) + 12_345
    bytes_of = {1: torch.uint8, 2: torch.int16}[dtype.itemsize]
    t = torch.zeros(numel, dtype=bytes_of, device="cuda")
    piece = sparse(1 << 22, density=0.3, seed=1, dtype=torch.float32, device="cuda").to(dtype).view(bytes_of)
    for start in (0, (1 << 30) - 99, (1 << 31) - 5_000_000, (1 << log2) - 5_000_000, numel - len(piece)):
        t[start : start + len(piece)] = piece
    packed = bitsparse.compress(t.view(dtype))
    assert packed.numel == numel
    assert torch.equal(packed.decompress().view(bytes_of), t)


@pytest.mark.slow
@pytest.mark.parametrize("bias", [False, True], ids=["no_bias", "bias"])
def test_steps_of_a_large_stack(bias):
    """Layers of Nemotron-H-8B's size, one step after another in one arena: the first, with a new shape, and steady ones."""
    width, d_ff, generator = 4096, 21504, torch.Generator("cuda").manual_seed(1)

    def normal(*shape, scale=1.0):
        return (torch.randn(shape, generator=generator, device="cuda") * scale).to(torch.bfloat16)

    layers = []
    for shift in (0.77, 1.17, 0.92, 0.39):  # densities 0.22, 0.12, 0.18, 0.35
        w1, w2 = normal(d_ff, width, scale=width**-0.5), normal(width, d_ff, scale=d_ff**-0.5)
        b1 = normal(d_ff, scale=0.1) - shift if bias else None
        layers.append([w1, b1, w2, normal(width) if bias else None])
    leaves = [t.requires_grad_() for layer in layers for t in layer if t is not None]

    def step(block, seed):
        generator.manual_seed(seed)
        x, grad = normal(4, 2048, width), normal(4, 2048, width)
        y = x.requires_grad_()
        for layer in layers:
            y = y + block(torch.nn.functional.rms_norm(y, (width,)), *layer)
        y.backward(grad)
        found = {"y": y.detach(), "x": x.grad} | {f"leaf {i}": t.grad for i, t in enumerate(leaves)}
        for t in leaves:
            t.grad = None
        return found

    with bitsparse.Arena("cuda") as arena:
        for seed in range(5):
            expected = step(dense_ffn, seed)
            for name, got in step(bitsparse.relu_squared_ffn, seed).items():
                assert torch.equal(bits(got), bits(expected[name])), f"step {seed}: {name}"
    assert arena.memory_stats()["failures"] == 0


@pytest.mark.slow
def test_training_with_more_than_two_to_the_31_elements():
    tokens, d_ff = (1 << 20) + 3, 2056
    h = torch.randn(tokens, d_ff, device="cuda", dtype=torch.bfloat16)
    assert h.numel() > 1 << 31
    w2 = randn(8, d_ff, seed=2, dtype=torch.bfloat16, device="cuda")
    expected = run_backward(dense_linear, [h, w2])
    got = run_backward(bitsparse.relu_squared_linear, [h, w2])
    assert_same_bits(got[0], expected[0])
    assert torch.equal(bits(got[1][0]), bits(expected[1][0]))
    assert_same_bits(got[1][1], expected[1][1])


@pytest.mark.slow
def test_cuda_graphs_of_inductor():
    """mode="reduce-overhead" splits its graphs around the operators that touch the arena."""
    torch.manual_seed(1)
    eager = Residual(lambda: bitsparse.nn.ReLUSquaredFFN(64)).cuda()
    compiled = Residual(lambda: bitsparse.nn.ReLUSquaredFFN(64)).cuda()
    compiled.load_state_dict(eager.state_dict())
    batches = [randn(64, 64, seed=i, dtype=torch.float32, device="cuda") for i in range(8)]
    expected = losses_of(eager, eager, batches)
    with torch._inductor.config.patch(force_disable_caches=True):  # cached code hides what is tested
        got = losses_of(compiled, torch.compile(compiled, mode="reduce-overhead"), batches)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=0.0)
    torch._dynamo.reset()


@pytest.mark.slow
def test_cuda_graphs_of_inductor_change_no_bit():
    """The code that inductor makes, with CUDA graphs around the arena's operators and without: equal losses and weights
    after steps whose data and densities change, and graphs were recorded indeed."""
    from torch._dynamo.utils import counters
    from torch._inductor import cudagraph_trees

    batches = [randn(64, 64, seed=i, dtype=torch.float32, device="cuda") for i in range(12)]
    arena = bitsparse.Arena("cuda")
    options = {"force_disable_caches": True}  # cached code hides what is tested
    if hasattr(torch._inductor.config, "deterministic"):
        options["deterministic"] = True  # not sums in whatever order was the fastest while the code was tuned
    results = {}
    for mode in ("default", "reduce-overhead"):
        torch._dynamo.reset()
        counters.clear()
        torch.manual_seed(1)
        model = Residual(lambda: bitsparse.nn.ReLUSquaredFFN(64)).cuda()
        with torch._inductor.config.patch(options), arena:
            losses = losses_of(model, torch.compile(model, mode=mode, fullgraph=True), batches)
        results[mode] = [losses, *(p.detach() for p in model.parameters())]
    assert counters["inductor"]["cudagraph_partitions"] >= 4, counters["inductor"]  # around two blocks, both ways
    manager = cudagraph_trees.get_manager(torch.cuda.current_device(), create_if_none_exists=False)
    assert manager is not None and manager.new_graph_id().id >= 4, "no graphs were recorded"
    for number, (a, b) in enumerate(zip(*results.values(), strict=True)):
        assert_same_bits(b, a, "losses" if number == 0 else f"parameter {number - 1}")
    assert len(set(results["default"][0].tolist())) == len(batches), "training does something"
    stats = arena.memory_stats(synchronize=True)
    assert (stats["live_leases"], stats["in_use"], stats["failures"]) == (0, 0, 0)
    assert stats["leases_total"] >= 2 * 2 * len(batches), "two blocks, two ways to run"
    del manager
    torch._dynamo.reset()


@pytest.mark.slow
def test_cuda_graphs_of_inductor_against_eager_blocks():
    """Nothing for the compiler to fuse: outputs and gradients of graphed blocks are those of eager dense ones."""
    tensors = ffn_arguments("cuda", torch.bfloat16, tokens=(256,), d_in=64, d_ff=256, d_out=64, bias=False)
    compiled = torch.compile(bitsparse.relu_squared_ffn, mode="reduce-overhead", fullgraph=True)
    with torch._inductor.config.patch(force_disable_caches=True):
        for step in range(6):
            x = randn(256, 64, seed=step, dtype=torch.bfloat16, device="cuda", scale=1.0 + step)
            grad = randn(256, 64, seed=50 + step, dtype=torch.bfloat16, device="cuda")
            expected = run_backward(dense_ffn, [x, *tensors[1:]], grad)
            torch.compiler.cudagraph_mark_step_begin()
            got = run_backward(compiled, [x, *tensors[1:]], grad)
            assert_same_bits(got[0], expected[0], f"step {step}: output")
            for index, (a, b) in enumerate(zip(got[1], expected[1], strict=True)):
                assert_same_bits(a, b, f"step {step}: gradient of argument {index}")
    torch._dynamo.reset()
