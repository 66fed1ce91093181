"""The result of the comparison as tables, a picture and a JSON file."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from measure import Probe
from rich.console import Console
from rich.table import Table

_MIB = 2**20
_WARM_UP = 3  # steps that do not count for the time


@dataclass
class Series:
    """What was seen of one model."""

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    validation: float = 0.0
    kept_bytes: int = 0
    peak_bytes: int | None = None  # on CUDA: most that a step had allocated above weights and optimiser state

    def step_ms(self) -> float:
        return 1e3 * median(self.seconds[_WARM_UP:] or self.seconds)


@dataclass
class Result:
    dense: Series
    sparse: Series
    probes: list[Probe]
    losses_equal: bool
    weights_equal: bool
    arena_capacity: int
    description: str


def print_tables(console: Console, result: Result) -> None:
    dense, sparse = result.dense, result.sparse
    table = Table(title="ReLU² GPT, dense against bitsparse", title_justify="left")
    for name in ("", "dense", "bitsparse", "bitsparse / dense"):
        table.add_column(name, justify="left" if not name else "right")

    def row(name: str, values: tuple[float, float], digits: int, note: str | None = None) -> None:
        ratio = f"{values[1] / values[0]:.3f}" if values[0] else "-"
        table.add_row(name, *(f"{value:.{digits}f}" for value in values), ratio if note is None else note)

    equal = "equal to the last bit" if result.losses_equal else "[red]NOT EQUAL[/red]"
    row("training loss, last step", (dense.losses[-1], sparse.losses[-1]), 6, equal)
    same = "equal to the last bit" if dense.validation == sparse.validation else "[red]NOT EQUAL[/red]"
    row("validation loss", (dense.validation, sparse.validation), 6, same)
    weights = "equal to the last bit" if result.weights_equal else "[red]NOT EQUAL[/red]"
    table.add_row("weights after training", "", "", weights)
    row("FFN activations kept, MiB", (dense.kept_bytes / _MIB, sparse.kept_bytes / _MIB), 2)
    table.add_row("reserved by the arena, MiB", "-", f"{result.arena_capacity / _MIB:.2f}", "")
    if dense.peak_bytes is not None and sparse.peak_bytes is not None:
        row("peak of a step on the GPU, MiB", (dense.peak_bytes / _MIB, sparse.peak_bytes / _MIB), 1)
    row("step time, median ms", (dense.step_ms(), sparse.step_ms()), 1)
    console.print(table)

    first, last = result.probes[0], result.probes[-1]
    dense_bits = 8 * dense.kept_bytes / last.elements
    table = Table(
        title=f"relu(h) by layer; the dense model keeps {dense_bits:.0f} bits an element", title_justify="left"
    )
    headings = (f"{name}\nstep {p.step}" for p in (first, last) for name in ("density", "bits per element"))
    for name in ("layer", *headings):
        table.add_column(name, justify="right")
    for layer in range(len(last.density)):
        cells = [f"{p.density[layer]:.3f} {p.bits[layer]:.2f}".split() for p in (first, last)]
        table.add_row(str(layer), *cells[0], *cells[1])
    console.print(table)


def write_picture(path: Path, result: Result) -> None:
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, (losses, density, memory) = plt.subplots(1, 3, figsize=(16, 4.5), layout="constrained")
    figure.suptitle(result.description)
    steps = range(1, len(result.dense.losses) + 1)
    losses.plot(steps, result.dense.losses, color="tab:blue", linewidth=4, alpha=0.4, label="dense")
    losses.plot(steps, result.sparse.losses, color="black", linewidth=1, linestyle="--", label="bitsparse")
    equal = "equal to the last bit" if result.losses_equal else "NOT EQUAL"
    losses.set(title=f"training loss ({equal})", xlabel="step", ylabel="nats per byte")
    losses.legend()

    layers = len(result.probes[-1].density)
    colors = plt.get_cmap("viridis")
    for layer in range(layers):
        values = [probe.density[layer] for probe in result.probes]
        color = colors(layer / max(layers - 1, 1))
        density.plot([probe.step for probe in result.probes], values, color=color, label=f"layer {layer}")
    density.set(title="density of relu(h)", xlabel="step", ylabel="share of non-zero elements", ylim=(0, None))
    density.legend(ncols=2 if layers > 6 else 1)

    bars = {"dense": result.dense.kept_bytes, "bitsparse": result.sparse.kept_bytes}
    drawn = memory.bar(list(bars), [value / _MIB for value in bars.values()], color=["tab:blue", "tab:green"])
    memory.bar_label(drawn, fmt="%.1f MiB")
    memory.set(title="wide FFN activations kept for backward", ylabel="MiB")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _commit() -> str | None:
    """Of the source tree this runs in, if it is one."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "unknown"
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")


def write_json(path: Path, result: Result, device: torch.device) -> None:
    cuda = device.type == "cuda"
    rows: list[dict[str, Any]] = []

    def add(name: str, value: float | bool | None, unit: str) -> None:
        if value is not None:
            rows.append({"name": name, "value": value, "unit": unit})

    for name, series in (("dense", result.dense), ("bitsparse", result.sparse)):
        add(f"{name}/training_loss", series.losses[-1], "nats per byte")
        add(f"{name}/validation_loss", series.validation, "nats per byte")
        add(f"{name}/ffn_activations_kept", series.kept_bytes, "bytes")
        add(f"{name}/step_peak", series.peak_bytes, "bytes")
        add(f"{name}/step_time", series.step_ms(), "ms")
    add("bitsparse/arena_capacity", result.arena_capacity, "bytes")
    add("losses_equal", int(result.losses_equal), "1 = to the last bit, in all steps")
    add("weights_equal", int(result.weights_equal), "1 = to the last bit")
    last = result.probes[-1]
    for layer, (density, bits) in enumerate(zip(last.density, last.bits, strict=True)):
        add(f"layer_{layer}/density", density, "share of elements")
        add(f"layer_{layer}/bits", bits, "bits per element")
    content = {
        "gpu" if cuda else "cpu": torch.cuda.get_device_name(device) if cuda else _processor(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda if cuda else None,
        "commit": _commit(),
        "command": shlex.join(["python", *sys.argv]),
        "rows": rows,
        "curves": {
            "losses": {"dense": result.dense.losses, "bitsparse": result.sparse.losses},
            "probes": [vars(probe) for probe in result.probes],
        },
    }
    path.write_text(json.dumps(content, indent=1) + "\n")
