"""Arenas: the memory that compressed activations live in, and what it is used for."""

from __future__ import annotations

import numbers
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

import torch

from bitsparse._load import _C

_ERROR_PREFIX = "bitsparse.OutOfArenaMemory: "

# The keys of memory_stats(); payload_ratio is a float, all others are integers.
STAT_KEYS = (
    "capacity",
    "in_use",
    "high_water",
    "spilled",
    "live_leases",
    "dense_bytes",
    "payload_bytes",
    "payload_ratio",
    "waits",
    "growths",
    "failures",
    "leases_total",
)


_MOST_BYTES = 2**63 - 1
_KINDS = {numbers.Integral: "an int", numbers.Real: "a number", bool: "a bool"}


class OutOfArenaMemory(torch.OutOfMemoryError):
    """An arena had no room for a compressed activation and could not grow.

    The message names the bytes that were needed and the setting to change. Raised by the functions and modules of this
    package; from inside ``backward()`` or a compiled function the same condition arrives as its base class,
    ``torch.OutOfMemoryError``, with the same message behind the words "bitsparse.OutOfArenaMemory: ".
    """


@contextmanager
def typed_errors() -> Iterator[None]:
    """Re-raises the library's out-of-memory error, which C++ can throw only as its base class, as OutOfArenaMemory."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        message = str(error)
        if not message.startswith(_ERROR_PREFIX):
            raise
        raise OutOfArenaMemory(message.removeprefix(_ERROR_PREFIX)) from error


def _device(device: torch.device | str | int) -> torch.device:
    message = f"bitsparse: expected device to be 'cpu', 'cuda' or 'cuda:N', got {device!r}"
    try:
        resolved = torch.device(device)
    except (TypeError, RuntimeError) as error:
        raise (TypeError if isinstance(error, TypeError) else ValueError)(message) from error
    negative = resolved.index is not None and resolved.index < 0  # what PyTorch makes of very large ones
    if negative or resolved.type not in ("cpu", "cuda"):
        raise ValueError(message)
    return resolved


def _device_name(device: torch.device | str | int | None) -> str:
    """The device as C++ wants it: "cpu", or "cuda:N" with its index. Initialises CUDA only to resolve a bare "cuda"."""
    if device is None:
        return f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_initialized() else "cpu"
    resolved = _device(device)
    if resolved.type == "cuda" and resolved.index is None:
        return f"cuda:{torch.cuda.current_device()}"
    return "cpu" if resolved.type == "cpu" else str(resolved)


class Arena:
    """Memory of one device that holds compressed activations.

    Every device has a default arena, made on first use and sized automatically: it grows during warm-up and then
    settles at the measured high-water mark with headroom. Make one by hand to set its size, or to account for a part of
    a model apart from the rest:

        arena = bitsparse.Arena("cuda", density_bound=0.25)
        with arena:
            loss = model(batch)         # compressed activations of this thread go to `arena`
        loss.backward()                 # they are found where they are; the `with` need not span backward

    Sizes are in bytes. The memory comes from PyTorch's allocator and returns to it when the arena and everything that
    was compressed into it are gone. Arenas can be used from several threads; ``with`` affects the calling thread only.
    Blocks may be nested, the innermost arena of a tensor's device is the one that is used: a generator or coroutine that
    is suspended inside of ``with`` leaves its arena in use for whatever runs meanwhile.

    Args:
        device: "cpu", "cuda" (the current CUDA device) or "cuda:N"; None is the current CUDA device if CUDA is in use
            in this process and else "cpu".
        capacity: fixed size in bytes; the arena never grows.
        density_bound: at most this share of any tensor is expected to be non-zero, in (0, 1].
        worst_case: room for every live tensor whatever its values, so that the host never waits, not even in warm-up.
        spill_bytes: the most pinned host memory to use when the arena is full (CUDA). When that is full too,
            compressing fails with OutOfArenaMemory.

    At most one of capacity, density_bound and worst_case may be given. On CPU only capacity has an effect: memory is
    allocated as it is needed, at its exact size.

    Raises:
        TypeError, ValueError, RuntimeError: a setting of the wrong type, contradicting settings or an unusable device;
            the message names the argument.
    """

    def __init__(
        self,
        device: torch.device | str | int | None = None,
        *,
        capacity: int | None = None,
        density_bound: float | None = None,
        worst_case: bool = False,
        spill_bytes: int | None = None,
    ) -> None:
        settings = {
            "capacity": capacity,
            "density_bound": density_bound,
            "worst_case": worst_case,
            "spill_bytes": spill_bytes,
        }
        for name, value in settings.items():
            kind = {"density_bound": numbers.Real, "worst_case": bool}.get(name, numbers.Integral)
            if value is not None and (not isinstance(value, kind) or isinstance(value, bool) != (kind is bool)):
                raise TypeError(f"bitsparse: Arena: expected {name} to be {_KINDS[kind]}, got {type(value).__name__}")
            if kind is numbers.Integral and value is not None and abs(int(value)) > _MOST_BYTES:
                raise ValueError(f"bitsparse: Arena: expected {name} to be at most {_MOST_BYTES} bytes, got {value}")
        if density_bound is not None and not 0 < density_bound <= 1:
            raise ValueError(f"bitsparse: Arena: expected density_bound in (0, 1], got {density_bound}")
        self._settings = {name: value for name, value in settings.items() if value is not None and value is not False}
        with typed_errors():
            self._arena = _C.Arena(_device_name(device), **self._settings)

    @property
    def device(self) -> torch.device:
        return torch.device(self._arena.device)

    def __enter__(self) -> Arena:
        self._arena.use()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._arena.unuse()

    def memory_stats(self, synchronize: bool = False) -> dict[str, int | float]:
        """This arena's figures, as :func:`bitsparse.memory_stats` describes them."""
        with typed_errors():
            return self._arena.memory_stats(synchronize)

    def reset_peak_memory_stats(self) -> None:
        """Makes the present use the new high-water mark."""
        self._arena.reset_peak_memory_stats()

    def trim(self) -> None:
        """Returns memory above the high-water mark, and its headroom, to PyTorch's allocator. The mark is that of the steps
        since the last call, so that an arena can follow densities that fall: call it after steps like those to come.
        Waits for the device; does nothing while compressed activations are alive, so call it between steps."""
        self._arena.trim()

    def __repr__(self) -> str:
        settings = "".join(f", {name}={value}" for name, value in self._settings.items())
        return f"bitsparse.Arena({str(self.device)!r}{settings})"


def _existing_default_arena(device: torch.device | str | int | None) -> _C.Arena | None:
    if device is not None and _device(device).type == "cuda" and not torch.cuda.is_initialized():
        return None  # without CUDA there can be no arena, and asking must not start it
    name = _device_name(device)
    return _C.default_arena(name) if _C.has_default_arena(name) else None


def memory_stats(device: torch.device | str | int | None = None, synchronize: bool = False) -> dict[str, int | float]:
    """Figures of a device's default arena; all zero, and nothing is created, when it has none yet.

    Without `synchronize` this neither waits for the device nor slows it, and the figures follow the work that the
    device has finished. With it, the device is synchronised first and the figures are exact.

    Returns a dictionary; sizes in bytes:
        capacity: what the arena holds of the device's memory
        in_use: what live compressed activations occupy of it
        high_water: the most that was in use since the last :func:`reset_peak_memory_stats`
        spilled: the part of in_use that lies in pinned host memory because the arena was full
        live_leases: compressed activations that are alive
        dense_bytes: what those whose size is known would take uncompressed
        payload_bytes: what they really take, without what whole pages round it up to
        payload_ratio: payload_bytes / dense_bytes
        waits: times that the host had to wait for the device to learn a size; stays constant after warm-up
        growths: times that the arena grew
        failures: compressions that found no room
        leases_total: compressed activations made since the arena was created

    Args:
        device: None is the current CUDA device if CUDA is in use in this process and else "cpu".
        synchronize: wait for the device first.

    Raises:
        OutOfArenaMemory: with `synchronize`, when a compressed activation was lost because there was no room for it.
    """
    if not isinstance(synchronize, bool):
        raise TypeError(f"bitsparse: memory_stats: expected synchronize to be a bool, got {type(synchronize).__name__}")
    arena = _existing_default_arena(device)
    if arena is None:
        return {key: 0.0 if key == "payload_ratio" else 0 for key in STAT_KEYS}
    with typed_errors():
        return arena.memory_stats(synchronize)


def reset_peak_memory_stats(device: torch.device | str | int | None = None) -> None:
    """Makes the present use of a device's default arena its new high-water mark. Does nothing where it has none."""
    arena = _existing_default_arena(device)
    if arena is not None:
        arena.reset_peak_memory_stats()
