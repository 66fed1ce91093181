"""What several test files need: the dense block, bit comparison, test data."""

import json
import struct
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

DATA = Path(__file__).parents[1] / "data"
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
CODECS = ("raw", "signless", "tight")
KEEPS = ("positive", "nonzero")
TRAINED = (torch.bfloat16, torch.float16, torch.float32)  # what the blocks take
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
STORED = (*TRAINED, *FLOAT8)  # what compress takes

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def bits(t: Tensor) -> Tensor:
    """The bit patterns of a tensor as integers of the same size."""
    return t.detach().contiguous().view(_BITS[t.element_size()])


def assert_same_bits(got: Tensor | None, expected: Tensor | None, what: str = "result") -> None:
    assert (got is None) == (expected is None), f"{what}: one of two is None"
    if got is None or expected is None:
        return
    assert (got.dtype, got.shape, got.device) == (expected.dtype, expected.shape, expected.device), what
    a, b = bits(got), bits(expected)
    if not torch.equal(a, b):
        wrong = (a != b).flatten().nonzero().flatten()
        i = int(wrong[0])
        a, b = a.flatten(), b.flatten()
        mask = (1 << 8 * got.element_size()) - 1
        values = f"got {int(a[i]) & mask:#x} ({got.flatten()[i].float()}), expected {int(b[i]) & mask:#x}"
        raise AssertionError(f"{what}: {len(wrong)} of {a.numel()} elements differ, first at {i}: {values}")


def dense_ffn(x: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None = None) -> Tensor:
    return F.linear(F.relu(F.linear(x, w1, b1)).square(), w2, b2)


def dense_relu_ffn(x: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None = None) -> Tensor:
    return F.linear(F.relu(F.linear(x, w1, b1)), w2, b2)


def dense_linear(h: Tensor, w2: Tensor, b2: Tensor | None = None) -> Tensor:
    return F.linear(F.relu(h).square(), w2, b2)


def dense_relu_linear(h: Tensor, w2: Tensor, b2: Tensor | None = None) -> Tensor:
    return F.linear(F.relu(h), w2, b2)


def randn(*shape: int, seed: int, dtype: torch.dtype, device: str = "cpu", scale: float = 1.0) -> Tensor:
    """Normal numbers that are the same on every device."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32) * scale
    return values.to(device, dtype)


def sparse(*shape: int, density: float, seed: int, dtype: torch.dtype, device: str = "cpu") -> Tensor:
    """Normal numbers of both signs, of which the given share is not zero."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator)
    values[torch.rand(shape, generator=generator) >= density] = 0.0
    return values.to(dtype).to(device)


def ffn_arguments(
    device: str,
    dtype: torch.dtype,
    tokens: Sequence[int] = (70,),
    d_in: int = 24,
    d_ff: int = 356,
    d_out: int = 20,
    bias: bool = True,
) -> list[Tensor | None]:
    """x, w1, b1, w2, b2. 70 tokens x 356 are several tiles, the last block partly filled."""

    def make(seed: int, *shape: int, scale: float = 1.0) -> Tensor:
        return randn(*shape, seed=seed, dtype=dtype, device=device, scale=scale)

    return [
        make(1, *tokens, d_in),
        make(2, d_ff, d_in, scale=d_in**-0.5),
        make(3, d_ff, scale=0.5) if bias else None,
        make(4, d_out, d_ff, scale=d_ff**-0.5),
        make(5, d_out, scale=0.5) if bias else None,
    ]


def as_leaves(tensors: Sequence[Tensor | None], frozen: Sequence[int] = ()) -> list[Tensor | None]:
    """New leaves over the same memory, strides included. Those at `frozen` need no gradient."""
    return [
        None if t is None else t.detach().requires_grad_(index not in frozen and t.is_floating_point())
        for index, t in enumerate(tensors)
    ]


def run_backward(
    function: Callable[..., Tensor],
    tensors: Sequence[Tensor | None],
    grad_output: Tensor | Callable[[Tensor], Tensor] | None = None,
    frozen: Sequence[int] = (),
    **options: object,
) -> tuple[Tensor, list[Tensor | None]]:
    """Output and gradients. `grad_output`: one, a function of the output that gives one, or None: sum().backward()."""
    leaves = as_leaves(tensors, frozen)
    y = function(*leaves, **options)
    if grad_output is None:
        y.sum().backward()
    else:
        y.backward(grad_output(y) if callable(grad_output) else grad_output)
    return y.detach(), [None if leaf is None else leaf.grad for leaf in leaves]


def assert_same_training(
    ours: Callable[..., Tensor],
    dense: Callable[..., Tensor],
    tensors: Sequence[Tensor | None],
    grad_output: Tensor | Callable[[Tensor], Tensor] | None = None,
    frozen: Sequence[int] = (),
    **options: object,
) -> None:
    """Outputs and all gradients are equal bit for bit, and nothing that was passed in has changed."""
    before = [None if t is None else t.clone() for t in tensors]
    expected, expected_grads = run_backward(dense, tensors, grad_output, frozen)
    got, grads = run_backward(ours, tensors, grad_output, frozen, **options)
    assert_same_bits(got, expected, "output")
    for index, (a, b) in enumerate(zip(grads, expected_grads, strict=True)):
        assert_same_bits(a, b, f"gradient of argument {index}")
    for index, (a, b) in enumerate(zip(tensors, before, strict=True)):
        assert_same_bits(a, b, f"argument {index} after the call")


def captured(step: Callable[[], object], warm_ups: int) -> tuple[torch.cuda.CUDAGraph, object]:
    """A CUDA graph of `step`, after some on another stream, and what its capture returned."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(warm_ups):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    return graph, results


class Residual(torch.nn.Module):
    """Blocks with enough around them for a compiler to have something to fuse."""

    def __init__(self, make):
        super().__init__()
        self.blocks = torch.nn.ModuleList(make() for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = x + block(F.rms_norm(x, (x.shape[-1],)))
        return x.square().mean()


def losses_of(model, forward, batches):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for x in batches:
        loss = forward(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().clone())  # graphs write their outputs again
    return torch.stack(losses)


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """BF16 tensors of a safetensors file, without the package of that name."""
    content = path.read_bytes()
    (length,) = struct.unpack_from("<Q", content)
    entries = json.loads(content[8 : 8 + length])
    tensors = {}
    for name, entry in entries.items():
        if name != "__metadata__":
            assert entry["dtype"] == "BF16", entry
            begin, end = (8 + length + offset for offset in entry["data_offsets"])
            data = torch.frombuffer(bytearray(content[begin:end]), dtype=torch.bfloat16)
            tensors[name] = data.reshape(entry["shape"])
    return tensors
