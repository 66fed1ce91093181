"""The picture of a result of ``python -m benchmarks models``: for each model, peak memory and step time over tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.results import Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_GIB = 2**30
_COLORS = {
    "dense": "#a9b2bd",
    "checkpoint": "#c9a227",
    "checkpoint-layers": "#d98c2b",
    "bitsparse": "#8fb8dc",
    "bitsparse-raw": "#9fd3b0",
    "dense-compiled": "#4a5463",
    "bitsparse-compiled": "#1f6fb2",
    "bitsparse-fused-compiled": "#7a3fa0",
    "bitsparse-raw-compiled": "#2e8b57",
}


def _points(result: Result, model: str, method: str, what: str) -> list[tuple[int, float]]:
    """(tokens, value), by tokens."""
    found = []
    for row in result.rows:
        parts = row.name.split("/")
        if len(parts) == 4 and parts[0] == model and parts[2:] == [method, what]:
            found.append((int(parts[1].removeprefix("tokens=")), row.value))
    return sorted(found)


def _lines(axes: Axes, result: Result, model: str, what: str, scale: float) -> None:
    counts: set[int] = set()
    for method, color in _COLORS.items():
        points = _points(result, model, method, what)
        if points:
            tokens, values = zip(*points, strict=True)
            axes.plot(tokens, [value * scale for value in values], "o-", color=color, label=method)
            counts |= set(tokens)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted(counts), [f"{n // 1024}k" if n % 1024 == 0 else str(n) for n in sorted(counts)])
    axes.minorticks_off()
    axes.set_xlabel("tokens a step")
    axes.grid(axis="y", color="0.92")


def draw(result: Result, figure: Figure) -> None:
    models = list(dict.fromkeys(row.name.split("/")[0] for row in result.rows if row.name.endswith("/parameters")))
    figure.set_size_inches(10, 3.6 * len(models))
    for (left, right), model in zip(figure.subplots(len(models), 2, squeeze=False), models, strict=True):
        _lines(left, result, model, "peak_bytes", 1 / _GIB)
        left.set_ylim(bottom=0)
        left.set_ylabel("GiB, peak of a training step")
        _lines(right, result, model, "step_of_compiled", 1)
        right.set_ylabel("step time over dense-compiled's")
        for axes in (left, right):
            axes.set_title(model)
        left.legend(frameon=False)
    figure.suptitle(f"Training steps on {result.place}")
