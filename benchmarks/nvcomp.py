"""nvCOMP's Python API on torch tensors, where the package nvidia-nvcomp-cu13 (or -cu12) is installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

ALGORITHMS: dict[str, dict[str, Any]] = {
    "cascaded": {"algorithm": "Cascaded", "data_type": "<u2"},
    "bitcomp": {"algorithm": "Bitcomp", "data_type": "<u2", "algorithm_type": 0},
    "bitcomp-sparse": {"algorithm": "Bitcomp", "data_type": "<u2", "algorithm_type": 1},
    "ans": {"algorithm": "ANS", "data_type": "|u1"},
}


def installed() -> bool:
    try:
        return importlib.util.find_spec("nvidia.nvcomp") is not None
    except ModuleNotFoundError:  # no package of NVIDIA's at all
        return False


class _Memory:
    """What nvCOMP wants of an allocator's result: an address, and that deleting frees."""

    def __init__(self, nbytes: int, _stream: object) -> None:
        self._tensor = torch.empty(max(nbytes, 1), dtype=torch.uint8, device="cuda")
        self.ptr = self._tensor.data_ptr()


@contextmanager
def session(device: torch.device) -> Iterator[None]:
    """A stream that both libraries work on, and nvCOMP's memory from PyTorch's allocator."""
    from nvidia import nvcomp

    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    nvcomp.set_device_allocator(_Memory)
    try:
        with torch.cuda.stream(stream):
            yield
        stream.synchronize()
    finally:
        nvcomp.set_device_allocator(None)


class Codec:
    """Of the current stream."""

    def __init__(self, device: torch.device, **options: Any) -> None:
        from nvidia import nvcomp

        self._api = nvcomp
        self._stream = torch.cuda.current_stream(device).cuda_stream
        self._codec = nvcomp.Codec(device_id=device.index or 0, cuda_stream=self._stream, **options)

    def encode(self, t: Tensor) -> Any:
        """An nvcomp.Array; its buffer_size is what the data takes."""
        return self._codec.encode(self._api.as_array(t.view(torch.uint8), cuda_stream=self._stream))

    def decode(self, encoded: Any, like: Tensor) -> Tensor:
        return torch.from_dlpack(self._codec.decode(encoded, "|u1")).view(like.dtype)
