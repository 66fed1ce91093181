"""Any tensor, compressed without loss."""

from __future__ import annotations

import ctypes
import math
import struct
import zlib
from typing import NamedTuple

import torch
from torch import Tensor

from bitsparse.arena import typed_errors

# What follows mirrors the packed header of kernels/include/bitsparse/format.h, where the numbers are explained.
_MAGIC = b"BSPT"
_FORMAT_VERSION = 3
_HEADER = struct.Struct("<4sHBBBBHIQQQQQQ")
_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2)
_CODECS = ("raw", "signless", "tight")
_KEEPS = ("positive", "nonzero")

_PICKLE_VERSION = 1  # of the arguments of _rebuild


@torch.library.register_fake("bitsparse::pack")
def _pack_without_data(t: Tensor, codec: str = "tight", keep: str = "nonzero") -> Tensor:
    """For tracing: only the data tells the size."""
    return t.new_empty(torch.library.get_ctx().new_dynamic_size(), dtype=torch.uint8)


class FormatError(ValueError):
    """The header or the checksum of stored bytes is not right, or a version wrote them that this one does not read. What
    only decompressing finds is a RuntimeError."""


class _Header(NamedTuple):
    magic: bytes
    version: int
    dtype: int
    codec: int
    keep: int
    geometry: int
    blocks_per_tile: int
    block_elements: int
    numel: int
    tiles: int
    payload_bytes: int
    kept: int
    reserved_0: int
    reserved_1: int


def _check_plain(name: str, t: object) -> None:
    """Only a tensor with memory of its own can be read: no wrapper subclass, fake, functional or batched tensor."""
    if not isinstance(t, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(t).__name__}")
    plain = type(t) in (Tensor, torch.nn.Parameter) and t.layout == torch.strided
    if not plain or torch._is_functional_tensor(t) or torch._C._functorch.is_functorch_wrapped_tensor(t):
        raise TypeError(f"{name}: expected a plain strided tensor, got {type(t).__name__} ({t.layout}) in this context")


def _host_bytes(t: Tensor) -> ctypes.Array:
    """The memory of a contiguous CPU byte tensor as a buffer; valid while the tensor is."""
    return (ctypes.c_ubyte * t.numel()).from_address(t.data_ptr()) if t.numel() else (ctypes.c_ubyte * 0)()


def _read_header(packed: Tensor) -> _Header:
    """Checks everything that the header says about itself; the blobs behind it are the decoder's to check."""
    _check_plain("packed", packed)
    if packed.dtype != torch.uint8 or packed.dim() != 1 or packed.device.type == "meta":
        raise FormatError(
            f"packed: expected a 1-dimensional uint8 tensor with data, got {packed.dtype} of shape "
            f"{tuple(packed.shape)} on {packed.device}"
        )
    if packed.numel() < _HEADER.size:
        raise FormatError(f"packed: expected at least {_HEADER.size} bytes, got {packed.numel()}")
    start = packed[: _HEADER.size].cpu().contiguous()
    header = _Header(*_HEADER.unpack_from(_host_bytes(start)))
    if header.magic != _MAGIC:
        raise FormatError(f"packed: expected the mark {_MAGIC!r} at the start, got {header.magic!r}")
    if header.version != _FORMAT_VERSION:
        advice = "; a newer bitsparse may read it" if header.version > _FORMAT_VERSION else ""
        raise FormatError(f"packed: expected format version {_FORMAT_VERSION}, got {header.version}{advice}")
    for field, value, names in (
        ("dtype", header.dtype, _DTYPES),
        ("codec", header.codec, _CODECS),
        ("keep", header.keep, _KEEPS),
    ):
        if value >= len(names):
            raise FormatError(f"packed: expected {field} below {len(names)}, got {value}")
    table_end = -(-(_HEADER.size + 8 * header.tiles) // 16) * 16
    if packed.numel() != table_end + header.payload_bytes:
        raise FormatError(f"packed: expected {table_end + header.payload_bytes} bytes, got {packed.numel()}")
    if header.kept > header.numel:
        raise FormatError(f"packed: expected at most {header.numel} kept elements, got {header.kept}")
    return header


def _checksum(packed: Tensor, shape: tuple[int, ...]) -> int:
    """CRC-32 of the shape and the bytes."""
    host = packed.cpu().contiguous()
    return zlib.crc32(_host_bytes(host), zlib.crc32(repr(shape).encode()))


class CompressedTensor:
    """A tensor in compressed form, made by :func:`compress`. Immutable; holds no reference to the tensor it came from.

    It can be pickled, copied, and stored with ``torch.save`` and ``torch.load``, which accepts it with its default
    ``weights_only=True`` once this package is imported. A checksum is stored along and verified on loading; damaged
    data raises :class:`FormatError`. The bytes are the same on CPU and CUDA, so that what one device compressed another
    decompresses.

    Args:
        packed: the bytes, a 1-dimensional uint8 tensor as ``torch.ops.bitsparse.pack`` returns it. Not copied. The
            header is read here, which synchronises with a CUDA device; the rest is checked when it is decompressed.
        shape: of the tensor that the bytes stand for.

    Raises:
        FormatError: the header is not one that this version reads, or contradicts `shape` or the number of bytes.
    """

    __slots__ = ("_header", "_packed", "_shape", "_validated")

    def __init__(self, packed: Tensor, shape: tuple[int, ...] | torch.Size) -> None:
        self._header = _read_header(packed)
        self._packed = packed.contiguous()
        self._shape = torch.Size(shape)
        self._validated = False  # until an encoder of this process or a successful decompress vouches for the bytes
        if min(self._shape, default=0) < 0 or math.prod(self._shape) != self._header.numel:
            raise FormatError(f"shape: expected {self._header.numel} elements, got shape {tuple(self._shape)}")

    @property
    def shape(self) -> torch.Size:
        return self._shape

    @property
    def dtype(self) -> torch.dtype:
        return _DTYPES[self._header.dtype]

    @property
    def device(self) -> torch.device:
        return self._packed.device

    @property
    def codec(self) -> str:
        return _CODECS[self._header.codec]

    @property
    def keep(self) -> str:
        return _KEEPS[self._header.keep]

    @property
    def numel(self) -> int:
        """Number of elements of the tensor that this stands for."""
        return self._header.numel

    @property
    def nbytes(self) -> int:
        """Bytes of the compressed form, all of its headers included."""
        return self._packed.numel()

    @property
    def dense_nbytes(self) -> int:
        """Bytes of the tensor that this stands for."""
        return self.numel * self.dtype.itemsize

    @property
    def density(self) -> float:
        """Share of the elements that are stored (keep="nonzero": those with a bit set); 0 if there are none."""
        return self._header.kept / self.numel if self.numel else 0.0

    @property
    def packed(self) -> Tensor:
        """The bytes. Do not modify them."""
        return self._packed

    def decompress(self) -> Tensor:
        """A new contiguous tensor on the same device, equal to the original bit for bit.

        Runs on the current stream. Bytes that did not come from an encoder of this process are validated: those that are
        no valid encoding raise RuntimeError and never touch other memory; on CUDA that happens once, on the host. Bytes
        that damage turned into another valid encoding are found by the checksum of pickle and ``torch.save`` only.
        """
        t = torch.ops.bitsparse.unpack(self._packed, list(self._shape), self.dtype, self._validated)
        self._validated = True
        return t

    def to(self, device: torch.device | str | int) -> CompressedTensor:
        """The same bytes on another device; this object itself when it is there already."""
        packed = self._packed.to(device)
        return self if packed is self._packed else self._with_bytes(packed)

    def _with_bytes(self, packed: Tensor) -> CompressedTensor:
        other = CompressedTensor(packed, self._shape)
        other._validated = self._validated
        return other

    def cpu(self) -> CompressedTensor:
        return self.to("cpu")

    def cuda(self, device: torch.device | str | int | None = None) -> CompressedTensor:
        return self.to("cuda" if device is None else device)

    def __repr__(self) -> str:
        return (
            f"CompressedTensor(shape={tuple(self._shape)}, dtype={self.dtype}, device={str(self.device)!r}, "
            f"codec={self.codec!r}, density={self.density:.4f}, nbytes={self.nbytes})"
        )

    def __copy__(self) -> CompressedTensor:
        return self  # immutable

    def __deepcopy__(self, memo: dict[int, object]) -> CompressedTensor:
        return self._with_bytes(self._packed.clone())

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        shape, packed = tuple(self._shape), self._packed
        if packed.untyped_storage().nbytes() > packed.nbytes:
            packed = packed.clone()  # torch stores whole storages
        return _rebuild, (_PICKLE_VERSION, packed, shape, _checksum(packed, shape))


def _rebuild(version: int, *state: object) -> CompressedTensor:
    if version != _PICKLE_VERSION:
        raise FormatError(
            f"CompressedTensor: expected stored version {_PICKLE_VERSION}, got {version!r}; "
            "a newer bitsparse may read it"
        )
    try:
        packed, shape, checksum = state
        shape = tuple(int(size) for size in shape)
        usable = isinstance(packed, Tensor) and packed.dtype == torch.uint8 and packed.device.type != "meta"
    except (TypeError, ValueError):
        usable = False
    if not usable:
        raise FormatError("CompressedTensor: expected stored bytes, shape and checksum, got something else")
    got = _checksum(packed, shape)
    if got != checksum:
        raise FormatError(f"CompressedTensor: the stored data is damaged: expected checksum {checksum}, got {got}")
    return CompressedTensor(packed, shape)


torch.serialization.add_safe_globals([_rebuild])


def compress(t: Tensor, codec: str = "tight", keep: str = "nonzero") -> CompressedTensor:
    """Compress any tensor without loss. Worth it for one with many zeros; never larger than the dense form by more than
    1% and a small constant.

    Args:
        t: a strided tensor of BF16, FP16, FP32, FP8 e4m3fn or FP8 e5m2, of any shape, contiguous or not, on CPU or CUDA.
            Not modified, and autograd does not see this.
        codec: how values are stored: "raw" (as they are), "signless" (without the sign bit in blocks that need none),
            "tight" (only the bits that a block of 1024 elements, in FP8 2048, needs).
        keep: "nonzero" restores every bit, signs and -0.0 included. "positive" keeps what relu lets through, values
            above zero and NaNs, and restores everything else as +0.

    Returns:
        A CompressedTensor on the same device. Its exact size becomes known on the device, so that compressing a CUDA
        tensor synchronises the current stream once or twice.

    Raises:
        TypeError, ValueError: an argument is not as above; the message names it, what was expected and what came.
    """
    _check_plain("t", t)
    if t.device.type == "meta":
        raise ValueError(f"t: expected a tensor with data, got one of shape {tuple(t.shape)} on meta")
    for name, value in (("codec", codec), ("keep", keep)):
        if not isinstance(value, str):
            raise TypeError(f"{name}: expected a str, got {type(value).__name__}")
    with typed_errors():
        packed = torch.ops.bitsparse.pack(t.detach(), codec, keep)
    result = CompressedTensor(packed, t.shape)
    result._validated = True
    return result
