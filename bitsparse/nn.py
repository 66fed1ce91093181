"""Modules that replace a dense feed-forward block."""

from __future__ import annotations

import numbers
from collections.abc import Mapping

import torch
from torch import Tensor

from bitsparse.functional import check_bool, relu_ffn, relu_squared_ffn

CODECS = ("raw", "signless", "tight")


def _size(name: str, value: int) -> int:
    if not isinstance(value, numbers.Integral) or isinstance(value, bool):
        raise TypeError(f"bitsparse: expected {name} to be an int, got {type(value).__name__}")
    if value < 1:
        raise ValueError(f"bitsparse: expected {name} to be at least 1, got {value}")
    return int(value)


class _FFN(torch.nn.Module):
    fused = False  # of modules that were stored before there was this

    def __init__(
        self,
        d_model: int,
        d_ff: int | None = None,
        bias: bool = True,
        codec: str = "tight",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        fused: bool = False,
    ) -> None:
        super().__init__()
        check_bool("bitsparse", "bias", bias)
        check_bool("bitsparse", "fused", fused)
        if codec not in CODECS:
            raise ValueError(f"bitsparse: expected codec to be 'raw', 'signless' or 'tight', got {codec!r}")
        self.d_model = _size("d_model", d_model)
        self.d_ff = 4 * d_model if d_ff is None else _size("d_ff", d_ff)
        self.codec, self.fused = codec, fused
        self.fc = torch.nn.Linear(self.d_model, self.d_ff, bias=bias, device=device, dtype=dtype)
        self.proj = torch.nn.Linear(self.d_ff, self.d_model, bias=bias, device=device, dtype=dtype)

    # Another layer's forward would not run: an adapter, for one, would silently do nothing.
    def _check_layer(self, name: str, value: object) -> None:
        if name not in ("fc", "proj"):
            return
        linear, kind = torch.nn.Linear, type(value)
        if not issubclass(kind, linear) or (kind.forward, kind.__call__) != (linear.forward, linear.__call__):
            raise TypeError(
                f"bitsparse: {type(self).__name__}: expected {name} to be a torch.nn.Linear, whose weight and bias are "
                f"all that is used, got {kind.__name__}"
            )

    def __setattr__(self, name: str, value: object) -> None:
        self._check_layer(name, value)
        super().__setattr__(name, value)

    def add_module(self, name: str, module: torch.nn.Module | None) -> None:
        self._check_layer(name, module)
        super().add_module(name, module)

    def _check(self, x: Tensor) -> None:
        if not isinstance(x, Tensor):
            raise TypeError(f"bitsparse: {type(self).__name__}: expected x to be a tensor, got {type(x).__name__}")
        if x.dim() and x.shape[-1] != self.d_model:
            raise ValueError(
                f"bitsparse: {type(self).__name__}: expected x to have shape (*, {self.d_model}), got {list(x.shape)}"
            )

    def _weights(self) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
        return self.fc.weight, self.fc.bias, self.proj.weight, self.proj.bias

    def extra_repr(self) -> str:
        return f"d_model={self.d_model}, d_ff={self.d_ff}, codec={self.codec!r}, fused={self.fused}"


class ReLUSquaredFFN(_FFN):
    """``proj(relu(fc(x))²)`` with ``relu(fc(x))`` kept compressed for backward: :func:`bitsparse.relu_squared_ffn`.

    The parameters are ``fc.weight`` (d_ff, d_model), ``fc.bias``, ``proj.weight`` (d_model, d_ff) and ``proj.bias``,
    laid out and initialised like two ``torch.nn.Linear`` made in this order: from the same state of the random number
    generator they get the same bits. A dense block's weights load with :func:`load_dense_state_dict`.

    ``fc`` and ``proj`` hold parameters only. Their ``forward`` is not called, so hooks on them do not run (nor what hooks
    do: pruning and the older weight_norm and spectral_norm; parametrizations work), and layers with another ``forward``,
    such as adapters, are refused in their place.

    Args:
        d_model: width of the input and the output.
        d_ff: width inside; 4 * d_model when None.
        bias: whether both layers have a bias.
        codec: "raw", "signless" or "tight".
        device, dtype: of the parameters, as for ``torch.nn.Linear``.
        fused: as for :func:`bitsparse.relu_squared_ffn`; not exact.
    """

    def forward(self, x: Tensor) -> Tensor:
        self._check(x)
        return relu_squared_ffn(x, *self._weights(), codec=self.codec, fused=self.fused)


class ReLUFFN(_FFN):
    """``proj(relu(fc(x)))``: :class:`ReLUSquaredFFN` with plain ReLU."""

    def forward(self, x: Tensor) -> Tensor:
        self._check(x)
        return relu_ffn(x, *self._weights(), codec=self.codec, fused=self.fused)


# Names that dense blocks give their first and second layer.
_LAYER_NAMES = (
    ("fc", "proj"),
    ("c_fc", "c_proj"),
    ("up_proj", "down_proj"),
    ("up", "down"),
    ("fc1", "fc2"),
    ("w1", "w2"),
    ("wi", "wo"),
    ("fc_in", "fc_out"),
    ("linear1", "linear2"),
    ("dense_h_to_4h", "dense_4h_to_h"),
)


def _numbered_layers(keys: set[str]) -> list[tuple[str, str]]:
    """The layers of an nn.Sequential: its two children that have parameters, in order."""
    numbers = sorted({key.split(".")[0] for key in keys if key.split(".")[0].isdecimal()}, key=int)
    return [(numbers[0], numbers[1])] if len(numbers) == 2 else []


def _find_layers(keys: set[str], where: str) -> tuple[dict[str, str], set[str]]:
    """Maps this module's parameter names to keys; also returns the keys that were not used."""
    found: list[dict[str, str]] = []
    for first, second in (*_LAYER_NAMES, *_numbered_layers(keys)):
        names = {
            "fc.weight": f"{first}.weight",
            "fc.bias": f"{first}.bias",
            "proj.weight": f"{second}.weight",
            "proj.bias": f"{second}.bias",
        }
        if {names["fc.weight"], names["proj.weight"]} <= keys:
            found.append(names)
    if {"w1", "w2"} <= keys:  # parameters of the block itself rather than of two layers
        found.append({"fc.weight": "w1", "fc.bias": "b1", "proj.weight": "w2", "proj.bias": "b2"})
    present = ", ".join(sorted(keys)) or "nothing"
    if not found:
        known = ", ".join(f"{a}/{b}" for a, b in (*_LAYER_NAMES, ("0", "2"), ("0", "3")))
        raise KeyError(
            f"state_dict: expected the weights of two layers{where}, named like one of {known}; got {present}"
        )
    if len(found) > 1:
        pairs = " and ".join(f"{names['fc.weight']} with {names['proj.weight']}" for names in found)
        raise KeyError(f"state_dict: expected one pair of layers{where}, got {pairs}; pass a narrower prefix")
    names = {name: key for name, key in found[0].items() if key in keys}
    return names, keys - set(names.values())


def _check_dense(what: str, t: Tensor) -> None:
    if t.is_meta:
        raise ValueError(f"{what}: expected a tensor with data, got one on the meta device")
    if t.is_quantized or t.layout != torch.strided:
        got = "a quantized one" if t.is_quantized else f"layout {t.layout}"
        raise ValueError(f"{what}: expected a dense tensor, got {got}")


def _own_parameters(module: _FFN) -> dict[str, torch.nn.Parameter]:
    """By name; raises for what could not be overwritten."""
    found: dict[str, torch.nn.Parameter] = {}
    for name in ("fc.weight", "fc.bias", "proj.weight", "proj.bias"):
        layer, kind = name.split(".")
        parameter = getattr(getattr(module, layer), kind)
        if parameter is None:
            continue
        if not isinstance(parameter, torch.nn.Parameter):
            raise ValueError(f"module: expected {name} to be a parameter, got one that is computed from others")
        if any(parameter is other for other in found.values()):
            raise ValueError(f"module: expected {name} to be a parameter of its own, got one that is shared")
        _check_dense(f"module's {name}", parameter)
        writable = f"module: expected {name} to be a tensor that can be written to, got"
        if parameter.is_inference():
            raise ValueError(f"{writable} an inference tensor")
        reach = 1 + sum((size - 1) * stride for size, stride in zip(parameter.shape, parameter.stride(), strict=True))
        if reach < parameter.numel():
            raise ValueError(f"{writable} overlapping memory")
        found[name] = parameter
    return found


def load_dense_state_dict(module: ReLUSquaredFFN | ReLUFFN, state_dict: Mapping[str, Tensor], prefix: str = "") -> None:
    """Copies the parameters of a dense block into `module`, whatever the block called its two layers.

    Understood are the names of ``nn.Sequential(Linear, activation, [Dropout,] Linear)`` ("0"/"2", "0"/"3", any two
    numbers), ``fc``/``proj``, ``c_fc``/``c_proj``, ``up_proj``/``down_proj``, ``up``/``down``, ``fc1``/``fc2``,
    ``w1``/``w2`` (layers, or parameters next to ``b1``/``b2``), ``wi``/``wo``, ``fc_in``/``fc_out``,
    ``linear1``/``linear2`` and ``dense_h_to_4h``/``dense_4h_to_h``. Values are cast to the dtype and device of
    `module`. Nothing is changed when an error is raised.

        load_dense_state_dict(block.mlp, checkpoint["model"], prefix="blocks.3.mlp.")

    Args:
        module: the block to fill.
        state_dict: the parameters of the dense block, or of a whole model that contains it.
        prefix: only keys that start with it are looked at, without it. Include the dot.

    Raises:
        TypeError: an argument or a parameter's value is not of the kind above.
        KeyError: no pair of layers, more than one, a bias that one side has and the other lacks, or keys under `prefix`
            that are neither a weight nor a bias of the two layers.
        ValueError: a shape is not what `module` has, there is no data to copy, or none that can be overwritten.
    """
    if not isinstance(module, _FFN):
        raise TypeError(f"module: expected a ReLUSquaredFFN or ReLUFFN, got {type(module).__name__}")
    if not isinstance(prefix, str):
        raise TypeError(f"prefix: expected a string, got {type(prefix).__name__}")
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"state_dict: expected a mapping from names to tensors, got {type(state_dict).__name__}")
    keys = {key.removeprefix(prefix) for key in state_dict if isinstance(key, str) and key.startswith(prefix)}
    where = f" under prefix {prefix!r}" if prefix else ""
    names, unused = _find_layers(keys, where)
    parameters = _own_parameters(module)
    for name in parameters:
        if name not in names:
            raise KeyError(f"state_dict: expected a bias for {name}{where}, got none; make the module with bias=False")
    for name, key in names.items():
        if name not in parameters:
            raise KeyError(f"state_dict: expected no bias{where}, got {prefix + key}; make the module with bias=True")
    if unused:
        raise KeyError(f"state_dict: expected only two layers{where}, got also {', '.join(sorted(unused))}")
    for name, key in names.items():
        value = state_dict[prefix + key]
        if not isinstance(value, Tensor) or value.is_complex():
            kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
            raise TypeError(f"{prefix + key}: expected a real tensor, got {kind}")
        _check_dense(prefix + key, value)
        expected, got = tuple(parameters[name].shape), tuple(state_dict[prefix + key].shape)
        if expected != got:
            hint = "; it looks transposed" if expected == got[::-1] else ""
            raise ValueError(f"{prefix + key}: expected shape {expected} for {name}, got {got}{hint}")
    with torch.no_grad():
        # First to other memory: values may be those of the module itself, or of a kind that can't be copied.
        values = {
            name: torch.empty_like(parameters[name]).copy_(state_dict[prefix + key]) for name, key in names.items()
        }
        for name, value in values.items():
            parameters[name].copy_(value)
