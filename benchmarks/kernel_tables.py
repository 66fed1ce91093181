"""The tables of ``python -m benchmarks kernels``. Three numbers in a cell are those of raw / signless / tight."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.results import Result
from benchmarks.table import NOTHING, Cells, Table

_CODECS = ("raw", "signless", "tight")
_OPERATIONS = ("compress", "restore", "gradient")


def _by_codec(cell: Cells, group: str, what: str, digits: int = 2) -> str:
    return cell.several([f"{group}/{codec}/{what}" for codec in _CODECS], digits)


def _density(cell: Cells, group: str) -> str:
    label = group.rsplit("density=", 1)[1]
    return f"{label} ({cell(f'{group}/kept', 2)})" if label == "real" else label


def _fused(cell: Cells) -> Table:
    size = f"{cell('rows', 0)} × {cell('columns', 0)}, copy at {cell('copy/gb_per_s', 0)} GB/s"
    title = f"Kernels of the blocks, {size}: fraction of copy, raw / signless / tight"
    table = Table(title, ("activation", "dtype", "density", "bits/element", *_OPERATIONS), texts=3)
    for depth, activation in ((2, "relu²"), (3, "relu")):
        for group in cell.groups(depth, "tight/compress/of_copy"):
            if depth == 3 and not group.startswith("relu/"):
                continue
            fractions = [_by_codec(cell, group, f"{operation}/of_copy") for operation in _OPERATIONS]
            bits = _by_codec(cell, group, "bits_per_element")
            table.lines.append((activation, group.split("/")[-2], _density(cell, group), bits, *fractions))
    return table


def _times(cell: Cells) -> Table:
    """Of few rows: a GPU's milliseconds follow from its copy and the fractions."""
    title = "Kernels of the blocks, relu², tight: ms"
    if "copy/ms" in cell:
        title += f"; a copy of the BF16 tensor takes {cell('copy/ms', 3)}"
    table = Table(title, ("dtype", "density", *_OPERATIONS), texts=2)
    for group in cell.groups(2, "tight/compress/ms"):
        if group.startswith("bf16/") or group.endswith("=0.2"):
            times = [cell(f"{group}/tight/{operation}/ms", 3) for operation in _OPERATIONS]
            table.lines.append((group.split("/")[0], _density(cell, group), *times))
    return table


def _general(cell: Cells) -> Table:
    title = "Any tensor: fraction of copy of the kernel alone, and ms of the operator, raw / signless / tight"
    headings = ("dtype", "keep", "density", "bits/element", "pack kernel", "unpack kernel", "pack", "unpack")
    table = Table(title, headings, texts=3)
    for group in cell.groups(4, "tight/pack/ms"):
        _, dtype, keep, _ = group.split("/")
        numbers = [_by_codec(cell, group, f"{operation}_kernel/of_copy") for operation in ("pack", "unpack")]
        numbers += [_by_codec(cell, group, f"{operation}/ms", 3) for operation in ("pack", "unpack")]
        bits = _by_codec(cell, group, "bits_per_element")
        table.lines.append((dtype, keep, _density(cell, group), bits, *numbers))
    return table


def _edge(cell: Cells) -> Table:
    table = Table(
        "A slice at an odd element, of odd length (BF16, density 0.2, tight): ms (of the aligned time)",
        ("", *_OPERATIONS),
    )
    if "edge/compress/ms" in cell:
        table.lines.append(("aligned", *(cell(f"edge/{name}/aligned_ms", 3) for name in _OPERATIONS)))
        odd = [f"{cell(f'edge/{name}/ms', 3)} ({cell(f'edge/{name}/of_aligned', 3)})" for name in _OPERATIONS]
        table.lines.append(("odd", *odd))
    return table


def _size(cell: Cells) -> Table:
    title = "Size on real activations: bits an element; the bound is mask entropy + density × value entropy"
    headings = ("layer", "density", "mask entropy", "value entropy", "bound", *_CODECS, "tight/bound")
    table = Table(title, headings)
    for group in cell.groups(2, "bound"):
        layer = group.split("/")[1]
        entropies = [cell(f"{group}/{what}", 3) for what in ("density", "mask_entropy", "value_entropy", "bound")]
        bits = [cell(f"{group}/{codec}/bits", 3) for codec in _CODECS]
        table.lines.append((layer, *entropies, *bits, cell(f"{group}/tight/of_bound", 3)))
    return table


def _small(cell: Cells) -> Table:
    names = ("copy", "relu_squared", *_OPERATIONS)
    title = "Small tensors (BF16, density 0.2, tight): µs a call, host / device, and launches a call"
    counted = ("compress", "release", "restore", "gradient")
    table = Table(title, ("size", *names, f"launches: {', '.join(counted)}"))
    groups = cell.groups(2, "compress/host_us") or cell.groups(2, "compress/launches")
    for group in groups:
        times = [cell.several([f"{group}/{name}/host_us", f"{group}/{name}/device_us"], 1) for name in names]
        launches = cell.several([f"{group}/{name}/launches" for name in counted], 0)
        table.lines.append((group.split("/")[1].replace("_", " "), *times, launches))
    return table


def _peer_lines(cell: Cells, case: str) -> list[Sequence[str]]:
    density = case.split("/")[1]
    ours = [(f"bitsparse {codec}", f"bf16/{density}/{codec}") for codec in _CODECS]
    theirs = [(group.split("/")[2], group) for group in cell.groups(3, "compress/ms") if group.startswith(f"{case}/")]
    label = _density(cell, case)
    return [
        (label, name, cell(f"{group}/bits_per_element", 2), *(cell.pair(f"{group}/{what}") for what in _OPERATIONS))
        for name, group in [*ours, *theirs]
        if f"{group}/compress/ms" in cell
    ]


def _peers(cell: Cells) -> Table:
    title = "By other means, BF16, the same run: ms (fraction of copy)"
    if "peers/nvcomp_installed" in cell and cell("peers/nvcomp_installed", 0) == "0":
        title += "; nvCOMP was not installed"
    table = Table(title, ("density", "what", "bits/element", *_OPERATIONS), texts=2)
    for case in dict.fromkeys(group.rsplit("/", 1)[0] for group in cell.groups(3, "compress/ms")):
        if case.startswith("peers/"):
            table.lines += _peer_lines(cell, case)
    if "copy/ms" in cell and table.lines:
        table.lines.insert(0, (NOTHING, "copy", "16.00", cell("copy/ms", 3) + " (1.00)", NOTHING, NOTHING))
    return table


def kernel_tables(result: Result) -> list[Table]:
    cell = Cells(result)
    return [make(cell) for make in (_fused, _times, _general, _edge, _size, _small, _peers)]
