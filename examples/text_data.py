"""Real text as bytes: any file or folder, by default the source files of the running Python's standard library."""

import sysconfig
from pathlib import Path

import torch
from torch import Tensor

VOCABULARY = 256
_MAX_BYTES = 64 << 20


def _files(root: Path) -> list[Path]:
    if root.is_file():
        return [root]
    skipped = {"site-packages", "dist-packages", "__pycache__"}
    files = (path for path in root.rglob("*") if skipped.isdisjoint(path.parts) and path.is_file())
    return sorted(files)


def load_text(source: str | None, least: int) -> tuple[Tensor, str]:
    """All files under `source`, in order of their names, as one run of bytes; also says in words what was read.

    Files that hold a zero byte are no text and are left out. Stops after 64 MiB. Raises SystemExit when there are fewer
    than `least` bytes.
    """
    root = Path(source) if source else Path(sysconfig.get_paths()["stdlib"])
    if not root.exists():
        raise SystemExit(f"--data: {root} does not exist")
    text = bytearray()
    count = 0
    for path in _files(root):
        if source is None and path.suffix != ".py":
            continue
        content = path.read_bytes()
        if content and 0 not in content:
            text += content
            count += 1
        if len(text) >= _MAX_BYTES:
            del text[_MAX_BYTES:]
            break
    if len(text) < least:
        raise SystemExit(f"--data: expected at least {least} bytes of text, found {len(text)} under {root}")
    return torch.frombuffer(text, dtype=torch.uint8), f"{len(text) / 2**20:.1f} MiB of text, {count} files under {root}"


class Batches:
    """Random windows of a text: (inputs, targets), each (batch, length), targets one byte ahead. The last 5% are held
    out for validation."""

    def __init__(self, text: Tensor, batch: int, length: int, seed: int, device: torch.device) -> None:
        held_out = max(len(text) // 20, length + 1)
        self._parts = {"train": text[:-held_out], "validation": text[-held_out:]}
        self._generators = {name: torch.Generator().manual_seed(seed) for name in self._parts}
        self._batch, self._length, self._device = batch, length, device

    def next(self, part: str = "train") -> tuple[Tensor, Tensor]:
        text = self._parts[part]
        starts = torch.randint(len(text) - self._length, (self._batch,), generator=self._generators[part])
        windows = torch.stack([text[start : start + self._length + 1] for start in starts.tolist()])
        windows = windows.to(self._device, torch.int64)
        return windows[:, :-1], windows[:, 1:]
