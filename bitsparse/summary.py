"""An arena's figures as a table for people."""

from __future__ import annotations

import torch

from bitsparse.arena import Arena, _device_name, memory_stats

_WIDTH = 64
# Key of memory_stats(), what it says. None: a line across.
_ROWS: tuple[tuple[str, str] | None, ...] = (
    ("capacity", "Capacity"),
    ("in_use", "In use"),
    ("high_water", "High water"),
    ("spilled", "Spilled to host memory"),
    None,
    ("dense_bytes", "Live activations, dense"),
    ("payload_bytes", "Live activations, compressed"),
    ("payload_ratio", "Compressed / dense"),
    None,
    ("live_leases", "Live leases"),
    ("leases_total", "Leases since the start"),
    ("waits", "Waits of the host"),
    ("growths", "Growths"),
    ("failures", "Leases that found no room"),
)
_BYTES = {"capacity", "in_use", "high_water", "spilled", "dense_bytes", "payload_bytes"}


def _readable(size: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if abs(size) < 10 * 1024:
            return f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def _value(key: str, value: float) -> str:
    if key in _BYTES:
        return _readable(value)
    return f"{value:.3f}" if key == "payload_ratio" else f"{value:,}"


def memory_summary(of: Arena | torch.device | str | int | None = None, synchronize: bool = False) -> str:
    """The figures of :func:`bitsparse.memory_stats` as a table to print, like ``torch.cuda.memory_summary``.

    Args:
        of: an arena, or a device: its default arena. None: as in :func:`bitsparse.memory_stats`.
        synchronize: wait for the device first; the figures are exact then.

    Raises:
        OutOfArenaMemory: with `synchronize`, when a compressed activation was lost because there was no room for it.
    """
    stats = of.memory_stats(synchronize) if isinstance(of, Arena) else memory_stats(of, synchronize)
    name = repr(of) if isinstance(of, Arena) else f"default arena of {_device_name(None) if of is None else of}"
    line = "|" + "-" * _WIDTH + "|"
    rows = [f"| {name:{_WIDTH - 2}.{_WIDTH - 2}} |", line]
    for row in _ROWS:
        if row is None:
            rows.append(line)
        else:
            key, label = row
            rows.append(f"| {label:34} | {_value(key, stats[key]):>{_WIDTH - 39}} |")
    frame = "|" + "=" * _WIDTH + "|"
    return "\n".join([frame, *rows, frame])
