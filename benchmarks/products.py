"""The block's matrix products with the codec in their epilogue, against the same product and a kernel after it.

Shapes are tokens x inner dimension of the sums x inner width of the block, BF16, codec tight, with a bias in the first
product. Methods take turns, each in runs of a few calls. `equal`: the share of results that have the bits of the product
and the kernel after it; another order of the sums may round differently.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

import bitsparse
from benchmarks import data, results, timing
from benchmarks.options import Reporting, add_device, check_densities, chosen_device, noted_arguments, parser_of

SHAPES = ((65536, 768, 3072), (16384, 768, 3072), (16384, 4096, 21504))
QUICK_SHAPES = ((256, 256, 512),)
CALLS = 4  # a timed run
LEAD_SECONDS = 0.05  # of untimed runs before each
_ACTIVATION, _CODEC = "relu_squared", "tight"

_ops = torch.ops.bitsparse
Product = Callable[[], Tensor]


def _repeated(product: Product) -> timing.Run:
    def run() -> None:
        for _ in range(CALLS):
            product()

    return run


def _compress_after(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    h = F.linear(x, w, bias)
    _ops._compress_activation_.default(h, _ACTIVATION, _CODEC)
    return h


def _compress_fused(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return _ops._linear_compress.default(x, w, bias, _ACTIVATION, _CODEC)[0]


def _gradient_after(grad: Tensor, w: Tensor, lease: Tensor) -> Tensor:
    product = grad.mm(w)
    _ops._activation_gradient_.default(product, lease, _ACTIVATION)
    return product


def _gradient_fused(grad: Tensor, w: Tensor, lease: Tensor) -> Tensor:
    return _ops._linear_gradient.default(grad, w, lease, _ACTIVATION)


def measure(result: results.Result, shape: Sequence[int], density: float, device: torch.device, rounds: int) -> None:
    tokens, depth, width = shape
    name = f"{tokens}x{depth}x{width}/density={density:g}"
    print(f"products: {name}", flush=True)
    generator = torch.Generator(device).manual_seed(0)

    def normal(*size: int, scale: float = 1.0) -> Tensor:
        return torch.randn(size, generator=generator, device=device).mul_(scale).bfloat16()

    x, w1, grad = normal(tokens, depth), normal(width, depth, scale=depth**-0.5), normal(tokens, depth)
    w2 = normal(depth, width, scale=width**-0.5)
    bias = torch.full((width,), data.bias_for(density), dtype=torch.bfloat16, device=device)
    with bitsparse.Arena(device):
        activation, lease = _ops._linear_compress.default(x, w1, bias, _ACTIVATION, _CODEC)
        restored = _ops._restore_activation.default(lease, activation.shape, activation.dtype, _ACTIVATION)
        exact = timing.same_bits(restored, activation)
        result.add(f"{name}/compress/exact", int(exact), "1 = restored to the last bit", 1)
        del activation, restored
        products: dict[str, Product] = {
            "compress/product": partial(F.linear, x, w1, bias),
            "compress/after": partial(_compress_after, x, w1, bias),
            "compress/fused": partial(_compress_fused, x, w1, bias),
            "gradient/product": partial(grad.mm, w2),
            "gradient/after": partial(_gradient_after, grad, w2, lease),
            "gradient/fused": partial(_gradient_fused, grad, w2, lease),
        }
        for operation in ("compress", "gradient"):
            after, fused = products[f"{operation}/after"](), products[f"{operation}/fused"]()
            equal = (after.view(torch.int16) == fused.view(torch.int16)).double().mean().item()
            result.add(f"{name}/{operation}/equal", equal, "share of results")
        runs = {key: [_repeated(product)] for key, product in products.items()}
        times = timing.time_in_turns(runs, device, rounds, warm_up=2, lead_seconds=LEAD_SECONDS)
    for key, measured in times.items():
        result.add_times(f"{name}/{key}/ms", timing.Timing([sample / CALLS for sample in measured.samples]))
    for operation in ("compress", "gradient"):
        ratio = times[f"{operation}/fused"].median / times[f"{operation}/after"].median
        result.add(f"{name}/{operation}/fused_of_after", ratio, "of the time of product and kernel")


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = parser_of("products", __doc__)
    add_device(parser)
    parser.add_argument("--densities", type=float, nargs="+", default=[0.1, 0.18, 0.25], help="(default 0.1 0.18 0.25)")
    parser.add_argument("--rounds", type=int, help="(default 9, --quick: 2)")
    options = parser.parse_args(arguments)
    device = chosen_device(parser, options.device)
    rounds = options.rounds or (2 if options.quick else 9)
    if rounds < 1:
        parser.error("--rounds: expected at least 1")
    check_densities(parser, options.densities)
    result = results.describe("products", str(device), noted_arguments(arguments), options.commit)
    with torch.no_grad(), Reporting(result, options.json) as reporting:
        for shape in QUICK_SHAPES if options.quick or device.type == "cpu" else SHAPES:
            for density in options.densities:
                measure(result, shape, density, device, rounds)
    return reporting.exit_code


if __name__ == "__main__":
    sys.exit(main())
