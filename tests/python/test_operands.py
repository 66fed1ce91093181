"""The matrix products and sums that a block runs have the operands of the dense block's: sizes, strides, dtypes, alignment.

On a GPU these choose the kernel, and with it the rounding, so that equal values on a CPU don't show what equal operands
do. The order of calls is not compared.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import dense_ffn, dense_linear
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import bitsparse

BATCH, LENGTH, WIDTH, D_FF, D_OUT = 3, 8, 32, 48, 40  # all different, so that a size tells which
ALIGNED = 64  # bytes, as allocators on CPU give
aten = torch.ops.aten
PRODUCTS = {aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.addmv, aten.mv, aten.dot}

Call = tuple[Any, ...]


def describe(value: object) -> object:
    if not isinstance(value, Tensor):
        return value if isinstance(value, (int, float)) else None
    return value.dtype, tuple(value.shape), value.stride(), value.storage_offset() * value.element_size() % ALIGNED


class Recorder(TorchDispatchMode):
    """What is multiplied and summed below autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (aten.linear.default, aten.matmul.default):  # whole, where they are called below autograd
            with self:
                return func.decompose(*args, **(kwargs or {}))
        if func.overloadpacket in PRODUCTS:
            self.calls.append((str(func), *map(describe, args)))
        elif func.overloadpacket is aten.sum:  # keepdim or not: the same kernel with the same operand
            self.calls.append(("sum", describe(args[0]), tuple(args[1])))
        return func(*args, **(kwargs or {}))


def identity(t: Tensor) -> Tensor:
    return t


def transposed(t: Tensor) -> Tensor:
    return t.transpose(0, 1).contiguous().transpose(0, 1)


def last_first(t: Tensor) -> Tensor:
    return t.movedim(-1, 0).contiguous().movedim(0, -1)


def rows_apart(t: Tensor) -> Tensor:
    wide = torch.zeros(*t.shape[:-1], t.shape[-1] + 8, dtype=t.dtype)
    wide[..., : t.shape[-1]] = t
    return wide[..., : t.shape[-1]]


def at_an_offset(t: Tensor) -> Tensor:
    return torch.cat([torch.zeros(3, dtype=t.dtype), t.flatten()])[3:].view(t.shape)


def every_other_column(t: Tensor) -> Tensor:
    return t.repeat_interleave(2, -1)[..., ::2]


def one_for_all(t: Tensor) -> Tensor:
    return t[:1].expand_as(t)


def one_number(t: Tensor) -> Tensor:
    return torch.ones((), dtype=t.dtype).expand_as(t)


LAYOUTS = [
    identity,
    transposed,
    last_first,
    rows_apart,
    at_an_offset,
    every_other_column,
    one_for_all,
    one_number,
]

SHAPES = [(BATCH, LENGTH), (BATCH * LENGTH,), (1, LENGTH), (BATCH, 1), (1, 1), (1,), (BATCH, 2, LENGTH)]


def calls_of(
    block: Callable[..., Tensor], inputs: list[Tensor | None], give: Callable[[Tensor], Tensor], residual: bool
) -> list[Call]:
    """Of forward and backward, sorted. `residual`: as in a Transformer, where the gradient that reaches the block also
    goes around it."""
    generator = torch.Generator().manual_seed(1)
    leaves = [None if t is None else t.detach().requires_grad_() for t in inputs]
    with Recorder() as recorder:
        y = block(*leaves)
        grad = give(torch.randn(y.shape, generator=generator).to(y.dtype))
        if residual:
            assert leaves[0] is not None
            y = y + leaves[0][..., : y.shape[-1]]
        y.backward(grad)
    return sorted(recorder.calls, key=repr)


def make_inputs(shape: tuple[int, ...], b1: bool, b2: bool, dtype: torch.dtype) -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).to(dtype)

    return [
        normal(*shape, WIDTH),
        normal(D_FF, WIDTH),
        normal(D_FF) if b1 else None,
        normal(D_OUT, D_FF),
        normal(D_OUT) if b2 else None,
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("biases", [(True, True), (True, False), (False, True), (False, False)], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("give", LAYOUTS, ids=lambda f: f.__name__)
def test_layouts_of_the_gradient(give, shape, biases, dtype):
    inputs = make_inputs(shape, *biases, dtype)
    expected = calls_of(dense_ffn, inputs, give, residual=False)
    assert any(call[0] == "aten.mm.default" for call in expected)
    assert calls_of(bitsparse.relu_squared_ffn, inputs, give, residual=False) == expected


@pytest.mark.parametrize("biases", [(True, True), (False, False)], ids=str)
@pytest.mark.parametrize("give", LAYOUTS, ids=lambda f: f.__name__)
def test_residual_connection(give, biases):
    inputs = make_inputs((BATCH, LENGTH), *biases, torch.bfloat16)
    generator = torch.Generator().manual_seed(2)
    inputs[3] = torch.randn(WIDTH, D_FF, generator=generator).to(torch.bfloat16)
    inputs[4] = torch.randn(WIDTH, generator=generator).to(torch.bfloat16) if biases[1] else None
    expected = calls_of(dense_ffn, inputs, give, residual=True)
    assert calls_of(bitsparse.relu_squared_ffn, inputs, give, residual=True) == expected


@pytest.mark.parametrize("which", [0, 1, 3], ids=["x", "w1", "w2"])
@pytest.mark.parametrize("give", [t for t in LAYOUTS if t not in (one_for_all, one_number)], ids=lambda f: f.__name__)
def test_layouts_of_the_arguments(give, which):
    inputs = make_inputs((BATCH, LENGTH), True, True, torch.bfloat16)
    argument = inputs[which]
    assert argument is not None
    inputs[which] = give(argument)
    expected = calls_of(dense_ffn, inputs, identity, residual=False)
    assert calls_of(bitsparse.relu_squared_ffn, inputs, identity, residual=False) == expected


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("give_h", [t for t in LAYOUTS if t not in (one_for_all, one_number)], ids=lambda f: f.__name__)
@pytest.mark.parametrize("give", [identity, transposed, last_first, one_number], ids=lambda f: f.__name__)
def test_linear(give, give_h, shape, bias):
    _, _, _, w2, b2 = make_inputs(shape, True, bias, torch.bfloat16)
    h = give_h(torch.randn(*shape, D_FF, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16))
    expected = calls_of(dense_linear, [h, w2, b2], give, residual=False)
    assert calls_of(bitsparse.relu_squared_linear, [h, w2, b2], give, residual=False) == expected
