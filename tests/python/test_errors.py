"""What a caller can get wrong: the error names the operator, the argument, what was expected and what came."""

import re

import pytest
import torch
from support import DEVICES, STORED, ffn_arguments, randn

import bitsparse

pytestmark = pytest.mark.parametrize("device", DEVICES)

NAMES = ("relu_squared_ffn", "relu_ffn", "relu_squared_linear", "relu_linear")
ARGUMENTS = {"ffn": ["x", "w1", "b1", "w2", "b2"], "linear": ["h", "w2", "b2"]}
SHAPES = {"x": (70, 24), "w1": (356, 24), "b1": (356,), "w2": (20, 356), "b2": (20,), "h": (70, 356)}


def call(name, device, dtype=torch.float32, **changed):
    """Calls a function with good arguments but for those given."""
    tensors = dict(zip(("x", "w1", "b1", "w2", "b2"), ffn_arguments(device, dtype), strict=True))
    tensors["h"] = randn(70, 356, seed=6, dtype=dtype, device=device)
    names = ARGUMENTS[name.rsplit("_", 1)[1]]
    options = {"codec": changed.pop("codec")} if "codec" in changed else {}
    return getattr(bitsparse, name)(*[changed.get(key, tensors[key]) for key in names], **options)


def arguments_of(name):
    return ARGUMENTS[name.rsplit("_", 1)[1]]


def zeros(*shape, device, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype, device=device)


@pytest.mark.parametrize("name", NAMES)
def test_first_argument_of_another_dtype(device, name):
    first = arguments_of(name)[0]
    for dtype, printed in [(torch.float64, "Double"), (torch.int32, "Int"), (torch.float8_e5m2, "Float8_e5m2")]:
        message = (
            f"bitsparse::{name}: expected {first} to have dtype bfloat16, float16 or float32, got {printed}"
        )  # fmt: skip
        with pytest.raises(TypeError, match=re.escape(message)):
            call(name, device, **{first: zeros(*SHAPES[first], device=device, dtype=dtype)})


@pytest.mark.parametrize("name", NAMES)
def test_other_argument_of_another_dtype(device, name):
    first, *others = arguments_of(name)
    for other in others:
        message = f"bitsparse::{name}: expected {other} to have the dtype of {first} (Float), got BFloat16"
        with pytest.raises(TypeError, match=re.escape(message)):
            call(name, device, **{other: zeros(*SHAPES[other], device=device, dtype=torch.bfloat16)})


@pytest.mark.parametrize("name", NAMES)
def test_argument_on_another_device(device, name):
    first, *others = arguments_of(name)
    elsewhere = "cpu" if device == "cuda" else "meta"
    for other in others:
        message = f"expected {other} to be on the device of {first} \\({device}(:0)?\\), got {elsewhere}"
        with pytest.raises((ValueError, RuntimeError), match=message):
            call(name, device, **{other: zeros(*SHAPES[other], device=elsewhere)})


@pytest.mark.parametrize("name", NAMES)
def test_wrong_shapes(device, name):
    first = arguments_of(name)[0]
    wrong = {
        "w1": [((356, 25), "shape (*, 24), got [356, 25]"), ((24,), "2 dimensions, got shape [24]")],
        "b1": [((355,), "shape (356), got [355]"), ((1, 356), "1 dimension, got shape [1, 356]")],
        "w2": [((20, 355), "shape (*, 356), got [20, 355]"), ((1, 20, 356), "2 dimensions, got shape [1, 20, 356]")],
        "b2": [((21,), "shape (20), got [21]"), ((), "1 dimension, got shape []")],
        first: [((), "at least 1 dimension, got a scalar")],
    }
    for argument in arguments_of(name):
        for shape, expected in wrong[argument]:
            message = f"bitsparse::{name}: expected {argument} to have {expected}"
            with pytest.raises(ValueError, match=re.escape(message)):
                call(name, device, **{argument: zeros(*shape, device=device)})


@pytest.mark.parametrize("name", NAMES)
def test_first_argument_that_is_too_wide(device, name):
    first, second = arguments_of(name)[:2]
    width = SHAPES[first][1]
    message = f"expected {second} to have shape (*, {width + 1}), got"
    with pytest.raises(ValueError, match=re.escape(message)):
        call(name, device, **{first: zeros(70, width + 1, device=device)})


@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_unknown_codec(device, name, needs_grad):
    first = arguments_of(name)[0]
    value = zeros(*SHAPES[first], device=device).requires_grad_(needs_grad)
    for codec in ("zip", "", "Tight"):
        message = f"expected codec to be 'raw', 'signless' or 'tight', got '{codec}'"
        with pytest.raises(ValueError, match=message):
            call(name, device, codec=codec, **{first: value})


@pytest.mark.parametrize("name", NAMES)
def test_layout_that_is_not_strided(device, name):
    first = arguments_of(name)[0]
    with pytest.raises((ValueError, RuntimeError, NotImplementedError)):
        call(name, device, **{first: zeros(*SHAPES[first], device=device).to_sparse()})


@pytest.mark.parametrize("name", NAMES)
def test_argument_of_another_type(device, name):
    for argument in arguments_of(name):
        with pytest.raises(TypeError, match=rf"bitsparse::{name}: expected {argument} to be \S+, got str$"):
            call(name, device, **{argument: "text"})
    with pytest.raises(TypeError, match=rf"bitsparse::{name}: expected codec to be str, got NoneType$"):
        call(name, device, codec=None)


@pytest.mark.parametrize("name", NAMES)
def test_argument_of_another_kind(device, name):
    for argument in arguments_of(name):
        if argument.startswith(("x", "h", "w")):
            with pytest.raises((TypeError, ValueError, NotImplementedError), match=argument):
                call(name, device, **{argument: zeros(*SHAPES[argument], device=device).to_sparse()})
            with pytest.raises(TypeError, match=rf"bitsparse::{name}: expected {argument} to be a tensor, got None$"):
                call(name, device, **{argument: None})
    first = arguments_of(name)[0]
    nested = torch.nested.nested_tensor([torch.zeros(2, 3), torch.zeros(4, 3)], device=device)
    with pytest.raises(ValueError, match=rf"bitsparse::{name}: expected {first} to be a strided tensor, got a nested"):
        call(name, device, **{first: nested})


@pytest.mark.parametrize("module", [bitsparse.nn.ReLUSquaredFFN, bitsparse.nn.ReLUFFN])
def test_modules(device, module):
    for sizes, name in (((-4,), "d_model"), ((0,), "d_model"), ((64, -4), "d_ff")):
        with pytest.raises(ValueError, match=f"expected {name} to be at least 1, got {sizes[-1]}"):
            module(*sizes, device=device)
    with pytest.raises(TypeError, match="expected d_model to be an int, got float"):
        module(64.0, device=device)
    ffn = module(16, device=device)
    for wrong in (None, [1.0], "text"):
        with pytest.raises(
            TypeError, match=f"{module.__name__}: expected x to be a tensor, got {type(wrong).__name__}"
        ):
            ffn(wrong)
    message = rf"{module.__name__}: expected x to have shape \(\*, 16\), got \[3, 17\]"
    for x in (torch.zeros(3, 17, device=device), torch.zeros(3, 17, device=device, requires_grad=True)):
        with pytest.raises(ValueError, match=message):
            ffn(x)


def test_arena_settings(device):
    for settings, message in (
        ({"capacity": "1G"}, "expected capacity to be an int, got str"),
        ({"capacity": 5.5}, "expected capacity to be an int, got float"),
        ({"capacity": True}, "expected capacity to be an int, got bool"),
        ({"density_bound": "0.5"}, "expected density_bound to be a number, got str"),
        ({"worst_case": 1}, "expected worst_case to be a bool, got int"),
        ({"spill_bytes": [1]}, "expected spill_bytes to be an int, got list"),
    ):
        with pytest.raises(TypeError, match=message):
            bitsparse.Arena(device, **settings)


def test_compress(device):
    for dtype in (torch.float64, torch.int32, torch.bool, torch.complex64):
        message = "expected t to have dtype bfloat16, float16, float32, float8_e4m3fn or float8_e5m2, got"
        with pytest.raises(TypeError, match=message):
            bitsparse.compress(zeros(5, device=device, dtype=dtype))
    for codec in ("zip", ""):
        with pytest.raises(ValueError, match=f"expected codec to be 'raw', 'signless' or 'tight', got '{codec}'"):
            bitsparse.compress(zeros(5, device=device), codec)
    with pytest.raises(ValueError, match="expected keep to be 'positive' or 'nonzero', got 'all'"):
        bitsparse.compress(zeros(5, device=device), keep="all")
    with pytest.raises(TypeError, match=r"t: expected a plain strided tensor, got Tensor \(torch.sparse_coo\)"):
        bitsparse.compress(zeros(5, device=device).to_sparse())
    with pytest.raises(ValueError, match=r"t: expected a tensor with data, got one of shape \(5,\) on meta"):
        bitsparse.compress(torch.zeros(5, device="meta"))
    with pytest.raises(TypeError, match="codec: expected a str, got NoneType"):
        bitsparse.compress(zeros(5, device=device), None)
    with pytest.raises(TypeError, match="keep: expected a str, got int"):
        bitsparse.compress(zeros(5, device=device), keep=1)


@pytest.mark.parametrize("dtype", STORED, ids=str)
def test_unpack_as_something_else(device, dtype):
    packed = bitsparse.compress(torch.ones(6, device=device).to(dtype)).packed
    other = torch.float32 if dtype != torch.float32 else torch.bfloat16
    unpack = torch.ops.bitsparse.unpack
    with pytest.raises((ValueError, TypeError, RuntimeError), match="dtype"):
        unpack(packed, [6], other)
    for size in ([7], [2, 2], [-6], [0]):
        with pytest.raises((ValueError, RuntimeError), match=r"size|elements"):
            unpack(packed, size, dtype)
    with pytest.raises((ValueError, TypeError, RuntimeError), match="packed"):
        unpack(packed.to(torch.int32), [6], dtype)
    with pytest.raises((ValueError, TypeError, RuntimeError), match="packed"):
        unpack(packed[None], [6], dtype)


def test_copies_of_a_lease(device):
    """A copy of a lease holds nothing; that is said, never guessed."""
    ops = torch.ops.bitsparse
    h = randn(70, 356, seed=6, dtype=torch.float32, device=device)
    _, lease = ops._compress_activation(h, "relu", "tight")
    assert torch.equal(ops._restore_activation(lease.view(4, 4), [70, 356], torch.float32, "relu"), h.relu())
    with pytest.raises(RuntimeError, match=r"lease.*got a copy of it"):
        ops._restore_activation(lease.clone(), [70, 356], torch.float32, "relu")
    with pytest.raises(RuntimeError, match=r"lease.*got a copy of it"):
        ops._activation_gradient_(h.clone(), lease.clone(), "relu")
    with pytest.raises(RuntimeError, match=r"the lease holds 24920 elements of Float.*but 12 of"):
        ops._restore_activation(lease, [3, 4], torch.float32, "relu")


def test_nothing_is_left_behind_by_an_error(device):
    before = bitsparse.memory_stats(device, synchronize=True)
    with pytest.raises(ValueError):
        call("relu_squared_ffn", device, codec="zip")
    assert bitsparse.memory_stats(device, synchronize=True) == before
