"""Lossless sparse storage of ReLU activations for training with PyTorch.

A feed-forward block ``y = relu(x W1ᵀ + b1)² W2ᵀ + b2`` makes autograd keep a wide activation that is mostly zeros. The
functions and modules here keep a lossless compressed form of it and rebuild the exact bits in backward: outputs and
gradients equal those of the dense block bit for bit.

    import bitsparse

    ffn = bitsparse.nn.ReLUSquaredFFN(768)                  # in place of Linear, relu, square, Linear
    y = bitsparse.relu_squared_ffn(x, w1, b1, w2, b2)       # the same as a function
    packed = bitsparse.compress(tensor)                     # any tensor; packed.decompress() gives it back
    bitsparse.memory_stats()                                # what the compressed activations occupy

Importing this package creates no CUDA context.
"""

from bitsparse import nn
from bitsparse._load import _C
from bitsparse.arena import Arena, OutOfArenaMemory, memory_stats, reset_peak_memory_stats
from bitsparse.compressed import CompressedTensor, FormatError, compress
from bitsparse.functional import relu_ffn, relu_linear, relu_squared_ffn, relu_squared_linear
from bitsparse.profile import profile_saved
from bitsparse.summary import memory_summary
from bitsparse.utils import cmake_prefix_path

__version__: str = _C.version()

__all__ = [
    "Arena",
    "CompressedTensor",
    "FormatError",
    "OutOfArenaMemory",
    "__version__",
    "cmake_prefix_path",
    "compress",
    "memory_stats",
    "memory_summary",
    "nn",
    "profile_saved",
    "relu_ffn",
    "relu_linear",
    "relu_squared_ffn",
    "relu_squared_linear",
    "reset_peak_memory_stats",
]
