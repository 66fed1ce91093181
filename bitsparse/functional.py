"""Feed-forward blocks that keep their wide activation compressed between forward and backward.

All functions run on the device of their arguments (CPU, or CUDA on the current stream, without synchronising the host)
and support autograd, ``torch.compile(fullgraph=True)``, autocast and activation checkpointing. Where no gradient is
needed (``torch.no_grad()``, ``torch.inference_mode()``, nothing that requires one) nothing is compressed. Results and
gradients equal those of the dense formula bit for bit, in eager mode on the same device, unless `fused` allows other
rounding. A second derivative is not available and raises an error.

Squared ReLU is from "Primer: Searching for Efficient Transformers for Language Modeling", So et al. 2021.
"""

import re

import torch
from torch import Tensor

from bitsparse.arena import typed_errors

# How PyTorch says that an argument can't be converted to what an operator takes.
_WRONG_TYPE = re.compile(
    r"bitsparse::(\w+)\(\) Expected a value of type '(.+?)' for argument '(\w+)' but instead .*'(\w+)'"
)


def _call(op: torch._ops.OpOverload, *args: object) -> Tensor:
    if torch.compiler.is_compiling():  # the tracer wants the operator alone
        return op(*args)
    try:
        with typed_errors():
            return op(*args)
    except RuntimeError as error:
        found = _WRONG_TYPE.match(str(error).splitlines()[0])
        if not found:
            raise
        name, expected, argument, got = found.groups()
        raise TypeError(f"bitsparse::{name}: expected {argument} to be {expected}, got {got}") from None


def check_bool(where: str, name: str, value: object) -> None:
    """For arguments that dispatchers or modules would take for one."""
    if not isinstance(value, bool):
        raise TypeError(f"{where}: expected {name} to be a bool, got {type(value).__name__}")


def relu_squared_ffn(
    x: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    b2: Tensor | None = None,
    *,
    codec: str = "tight",
    fused: bool = False,
) -> Tensor:
    """``relu(x W1ᵀ + b1)² W2ᵀ + b2``, saving ``relu(...)`` compressed.

    Bit-identical to ``F.linear(F.relu(F.linear(x, w1, b1)).square(), w2, b2)``, outputs and gradients, unless `fused`.

    Args:
        x: (..., d_in), any number of leading dimensions, zero tokens included. BF16, FP16 or FP32; need not be
            contiguous.
        w1: (d_ff, d_in), dtype and device of x, as are all following tensors.
        b1: (d_ff,) or None.
        w2: (d_out, d_ff).
        b2: (d_out,) or None.
        codec: "raw" (values as they are), "signless" (sign bit dropped) or "tight" (only the bits that a block of 1024
            elements needs). All are lossless.
        fused: matrix products of bitsparse's own may take cuBLAS's place: one for ``x W1ᵀ + b1`` that compresses as it
            goes and saves a pass over the wide activation and, if d_out is at least 2048, one for the gradient of that.
            Sums are float32, rounded once, but need not be added up in cuBLAS's order: results are as good as dense ones
            and may differ from them in rounding. There are kernels for BF16 on GPUs of compute capability 9.0, where the
            number of tokens and d_ff are multiples of 256, d_in (for the second: d_out) is at least 256 and a multiple
            of 64, and x, w1 and w2 are contiguous. Elsewhere, and under saved-tensor hooks that copy and dispatch modes,
            it makes no difference. Profilers show ``linear_compress`` among the NVTX ranges, and kernels with
            ``LinearCompress`` in their names.

    Returns:
        (..., d_out). Under autocast the arguments are cast as ``F.linear`` does.

    Raises:
        TypeError: an argument's dtype is not as above.
        ValueError: an argument's device, shape or layout, or `codec`, is not as above. All messages name the argument,
            what was expected and what came.
        bitsparse.OutOfArenaMemory: the arena is full and can't grow.
    """
    check_bool("bitsparse::relu_squared_ffn", "fused", fused)
    return _call(torch.ops.bitsparse.relu_squared_ffn.default, x, w1, b1, w2, b2, codec, fused)


def relu_ffn(
    x: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    b2: Tensor | None = None,
    *,
    codec: str = "tight",
    fused: bool = False,
) -> Tensor:
    """``relu(x W1ᵀ + b1) W2ᵀ + b2``: as :func:`relu_squared_ffn`, with plain ReLU.

    Bit-identical to ``F.linear(F.relu(F.linear(x, w1, b1)), w2, b2)``, outputs and gradients, unless `fused`.
    """
    check_bool("bitsparse::relu_ffn", "fused", fused)
    return _call(torch.ops.bitsparse.relu_ffn.default, x, w1, b1, w2, b2, codec, fused)


def relu_squared_linear(h: Tensor, w2: Tensor, b2: Tensor | None = None, *, codec: str = "tight") -> Tensor:
    """``relu(h)² W2ᵀ + b2`` from the pre-activation, for models that compute ``h`` themselves.

    Bit-identical to ``F.linear(F.relu(h).square(), w2, b2)``, outputs and gradients. `h` is not modified; this function
    does not keep it, so that it is freed as soon as the caller and whatever made it let go of it.

    Args:
        h: (..., d_ff), any number of leading dimensions. BF16, FP16 or FP32; need not be contiguous.
        w2: (d_out, d_ff), dtype and device of h, as is b2.
        b2: (d_out,) or None.
        codec: as for :func:`relu_squared_ffn`.

    Returns:
        (..., d_out). Under autocast the arguments, h included, are cast as ``F.linear`` does.

    Raises:
        TypeError, ValueError, bitsparse.OutOfArenaMemory: as for :func:`relu_squared_ffn`.
    """
    return _call(torch.ops.bitsparse.relu_squared_linear.default, h, w2, b2, codec)


def relu_linear(h: Tensor, w2: Tensor, b2: Tensor | None = None, *, codec: str = "tight") -> Tensor:
    """``relu(h) W2ᵀ + b2``: as :func:`relu_squared_linear`, with plain ReLU.

    Bit-identical to ``F.linear(F.relu(h), w2, b2)``, outputs and gradients, with one exception: PyTorch's relu on CPU
    lets -0.0 through, and backward has +0 in its place. A sum over several tokens doesn't show that; a zero in the
    gradient of `w2` for a single token may have the other sign.
    """
    return _call(torch.ops.bitsparse.relu_linear.default, h, w2, b2, codec)
