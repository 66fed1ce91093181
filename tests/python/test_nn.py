"""The modules: parameters like those of two nn.Linear, and loading of dense blocks."""

import copy

import pytest
import torch
import torch.nn.functional as F
from support import CODECS, DEVICES, assert_same_bits, dense_ffn, dense_relu_ffn
from torch import nn

import bitsparse
from bitsparse.nn import ReLUFFN, ReLUSquaredFFN, load_dense_state_dict

MODULES = {ReLUSquaredFFN: dense_ffn, ReLUFFN: dense_relu_ffn}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", MODULES, ids=lambda kind: kind.__name__)
def test_same_parameters_and_results_as_two_linear(kind, bias, dtype, device):
    options = {"bias": bias, "device": device, "dtype": dtype}
    torch.manual_seed(5)
    fc, proj = nn.Linear(24, 96, **options), nn.Linear(96, 24, **options)
    torch.manual_seed(5)
    module = kind(24, **options)
    for name, dense in (("fc", fc), ("proj", proj)):
        for parameter, expected in dense.named_parameters():
            assert_same_bits(module.get_parameter(f"{name}.{parameter}"), expected, f"{name}.{parameter}")
    expected_names = {f"{a}.{b}" for a in ("fc", "proj") for b in (("weight", "bias") if bias else ("weight",))}
    assert set(module.state_dict()) == expected_names
    x = torch.randn(3, 7, 24, device=device).to(dtype or torch.float32)
    assert_same_bits(module(x), MODULES[kind](x, fc.weight, fc.bias, proj.weight, proj.bias))
    module(x).sum().backward()
    assert all(parameter.grad is not None for parameter in module.parameters())


def test_arguments_and_repr():
    assert ReLUSquaredFFN(8).d_ff == 32
    module = ReLUSquaredFFN(8, 20, bias=False, codec="raw")
    assert module.fc.weight.shape == (20, 8)
    assert module.proj.weight.shape == (8, 20)
    assert "d_model=8, d_ff=20, codec='raw'" in repr(module)
    with pytest.raises(ValueError, match=r"expected codec to be 'raw', 'signless' or 'tight', got 'zip'"):
        ReLUSquaredFFN(8, codec="zip")


def test_load_from_the_module_itself():
    module = ReLUSquaredFFN(8, bias=False)
    fc, proj = module.fc.weight.detach().clone(), module.proj.weight.detach().clone()
    load_dense_state_dict(module, {"fc.weight": module.proj.weight.t(), "proj.weight": module.fc.weight.t()})
    assert_same_bits(module.fc.weight, proj.t())
    assert_same_bits(module.proj.weight, fc.t())


def test_parameters_that_cannot_be_loaded():
    state = {"fc.weight": torch.ones(8, 8), "proj.weight": torch.ones(8, 8)}

    def module():
        return ReLUSquaredFFN(8, 8, bias=False)

    tied, overlapping, computed = module(), module(), module()
    tied.proj.weight = tied.fc.weight
    overlapping.proj.weight = torch.nn.Parameter(torch.zeros(15).as_strided((8, 8), (1, 1)))
    torch.nn.utils.parametrizations.weight_norm(computed.fc)
    for wrong, message in (
        (tied, "expected proj.weight to be a parameter of its own, got one that is shared"),
        (overlapping, "expected proj.weight to be a tensor that can be written to, got overlapping memory"),
        (computed, "expected fc.weight to be a parameter, got one that is computed from others"),
    ):
        before = wrong.fc.weight.detach().clone()
        with pytest.raises(ValueError, match=message):
            load_dense_state_dict(wrong, state)
        assert_same_bits(wrong.fc.weight, before)


class Adapter(torch.nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def test_layers_whose_forward_would_not_run_are_refused():
    module = ReLUSquaredFFN(8)
    for layer in (Adapter(8, 32), torch.nn.Sequential(module.fc)):
        with pytest.raises(TypeError, match=r"ReLUSquaredFFN: expected fc to be a torch.nn.Linear.*got (Adapter|Seq)"):
            module.fc = layer
        with pytest.raises(TypeError, match=r"ReLUSquaredFFN: expected fc to be a torch.nn.Linear.*got (Adapter|Seq)"):
            module.register_module("fc", layer)
    with pytest.raises(TypeError, match=r"ReLUSquaredFFN: expected proj to be a torch.nn.Linear.*got NoneType"):
        module.proj = None
    with pytest.raises(TypeError, match="expected bias to be a bool, got str"):
        ReLUSquaredFFN(8, bias="no")
    module.fc = torch.nn.Linear(8, 32)
    torch.nn.utils.parametrizations.weight_norm(module.fc)
    x = torch.randn(3, 8)
    assert_same_bits(module(x), module.proj(torch.relu(module.fc(x)).square()))


@pytest.mark.parametrize("codec", CODECS)
def test_copies_and_state_dict(codec):
    module = ReLUSquaredFFN(8, codec=codec)
    other = ReLUSquaredFFN(8, codec=codec)
    other.load_state_dict(module.state_dict())
    x = torch.randn(5, 8)
    assert_same_bits(other(x), module(x))
    assert_same_bits(copy.deepcopy(module)(x), module(x))
    assert copy.deepcopy(module).codec == codec


def layers(first, second, bias=True, prefix="", d_in=8, d_ff=32):
    torch.manual_seed(1)
    fc, proj = nn.Linear(d_in, d_ff, bias=bias), nn.Linear(d_ff, d_in, bias=bias)
    named = {first: fc, second: proj}
    return {
        f"{prefix}{name}.{key}": value for name, layer in named.items() for key, value in layer.state_dict().items()
    }


NAMES = ["0 2", "0 3", "1 4", "fc proj", "c_fc c_proj", "up_proj down_proj", "up down", "fc1 fc2", "w1 w2", "wi wo"]
NAMES += ["fc_in fc_out", "linear1 linear2", "dense_h_to_4h dense_4h_to_h"]


@pytest.mark.parametrize("prefix", ["", "blocks.3.mlp."])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("names", NAMES)
def test_load_dense_state_dict(names, bias, prefix):
    state = layers(*names.split(), bias=bias, prefix=prefix)
    if prefix:
        state |= {"blocks.4.mlp.0.weight": torch.ones(1), "head.weight": torch.ones(1)}  # not under the prefix
    module = ReLUSquaredFFN(8, bias=bias)
    load_dense_state_dict(module, state, prefix)
    expected = layers("fc", "proj", bias=bias)
    for key, value in module.state_dict().items():
        assert_same_bits(value, expected[key], key)


def test_load_from_sequential_gives_the_same_results():
    class Square(nn.Module):
        def forward(self, x):
            return F.relu(x).square()

    dense = nn.Sequential(nn.Linear(8, 32), Square(), nn.Dropout(0.0), nn.Linear(32, 8))
    module = ReLUSquaredFFN(8)
    load_dense_state_dict(module, dense.state_dict())
    x = torch.randn(9, 8)
    assert_same_bits(module(x), dense(x))


def test_load_parameters_without_layers():
    names = {"fc.weight": "w1", "fc.bias": "b1", "proj.weight": "w2", "proj.bias": "b2"}
    expected = layers("fc", "proj")
    module = ReLUFFN(8)
    load_dense_state_dict(module, {names[key]: value for key, value in expected.items()})
    for key, value in module.state_dict().items():
        assert_same_bits(value, expected[key], key)


def test_load_casts_to_the_module():
    module = ReLUSquaredFFN(8, dtype=torch.bfloat16)
    state = layers("0", "2")
    load_dense_state_dict(module, state)
    assert_same_bits(module.fc.weight, state["0.weight"].bfloat16())


@pytest.mark.parametrize(
    ("state", "bias", "error", "message"),
    [
        ({}, True, KeyError, "expected the weights of two layers.*got nothing"),
        (layers("one", "two"), True, KeyError, "expected the weights of two layers.*got one.bias, one.weight"),
        (
            layers("0", "2") | layers("fc", "proj"),
            True,
            KeyError,
            "expected one pair of layers, got .*pass a narrower prefix",
        ),
        (layers("0", "2") | {"5.weight": torch.ones(2)}, True, KeyError, "expected the weights of two layers"),
        (layers("0", "2", bias=False), True, KeyError, "expected a bias for fc.bias.*bias=False"),
        (layers("0", "2"), False, KeyError, "expected no bias.*got 0.bias.*bias=True"),
        (
            layers("up_proj", "down_proj") | {"gate_proj.weight": torch.ones(2)},
            True,
            KeyError,
            "got also gate_proj.weight",
        ),
        (
            layers("0", "2", d_ff=40),
            True,
            ValueError,
            r"0.weight: expected shape \(32, 8\) for fc.weight, got \(40, 8\)",
        ),
        (
            {key: value.T for key, value in layers("c_fc", "c_proj", bias=False).items()},
            False,
            ValueError,
            r"c_fc.weight: expected shape \(32, 8\) for fc.weight, got \(8, 32\); it looks transposed",
        ),
    ],
)
def test_load_errors_change_nothing(state, bias, error, message):
    module = ReLUSquaredFFN(8, bias=bias)
    before = copy.deepcopy(module.state_dict())
    with pytest.raises(error, match=message):
        load_dense_state_dict(module, state)
    for key, value in module.state_dict().items():
        assert_same_bits(value, before[key], key)


def test_load_error_names_the_prefix():
    with pytest.raises(KeyError, match=r"two layers under prefix 'h\.1\.'"):
        load_dense_state_dict(ReLUSquaredFFN(8), layers("0", "2", prefix="h.0."), "h.1.")


def test_values_that_cannot_be_loaded_change_nothing():
    module = bitsparse.nn.ReLUSquaredFFN(8)
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    state = {name: torch.zeros_like(p) for name, p in before.items()}
    load = bitsparse.nn.load_dense_state_dict
    with pytest.raises(ValueError, match=r"proj.bias: expected a tensor with data, got one on the meta device"):
        load(module, {**state, "proj.bias": torch.zeros(8, device="meta")})
    with pytest.raises(TypeError, match=r"fc.bias: expected a real tensor, got torch.complex64"):
        load(module, {**state, "fc.bias": torch.zeros(32, dtype=torch.complex64)})
    with pytest.raises(TypeError, match=r"fc.weight: expected a real tensor, got list"):
        load(module, {**state, "fc.weight": [1.0]})
    with pytest.raises(ValueError, match=r"proj.weight: expected a dense tensor, got layout torch.sparse_coo"):
        load(module, {**state, "proj.weight": torch.zeros(8, 32).to_sparse()})
    with pytest.raises(ValueError, match=r"proj.bias: expected a dense tensor, got a quantized one"):
        load(module, {**state, "proj.bias": torch.quantize_per_tensor(torch.zeros(8), 1.0, 0, torch.qint8)})
    with pytest.raises(TypeError, match=r"state_dict: expected a mapping from names to tensors, got Linear"):
        load(module, torch.nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"module: expected a ReLUSquaredFFN or ReLUFFN, got Linear"):
        load(torch.nn.Linear(2, 2), state)
    assert all(torch.equal(p, before[name]) for name, p in module.named_parameters())
