"""The picture of a result of ``python -m benchmarks kernels``: fractions of copy bandwidth over density, and bits an
element of real activations against the order-0 bound."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.bench import CODECS
from benchmarks.results import Result, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_OPERATIONS = {"compress": "compress with relu²", "restore": "restore to relu²", "gradient": "gradient, in place"}
_COLORS = dict(zip(CODECS, ("#6b7a8f", "#d98c2b", "#1f6fb2"), strict=True))
_DTYPE = "bf16"


def _fraction(rows: dict[str, Row], label: str, codec: str, operation: str) -> Row | None:
    return rows.get(f"{_DTYPE}/{label}/{codec}/{operation}/of_copy")


def _labels(rows: dict[str, Row]) -> list[str]:
    """The densities of which everything was measured."""
    labels = dict.fromkeys(name.split("/")[1] for name in rows if name.startswith(f"{_DTYPE}/"))
    return [
        label for label in labels if all(_fraction(rows, label, codec, op) for codec in CODECS for op in _OPERATIONS)
    ]


def _fractions(axes: Axes, rows: dict[str, Row], operation: str) -> None:
    labels = _labels(rows)
    places = range(len(labels))
    for codec, color in _COLORS.items():
        found = [row for label in labels if (row := _fraction(rows, label, codec, operation))]
        axes.plot(places, [row.value for row in found], "o-", color=color, label=codec)
        targets = [row.target for row in found if row.target is not None]
        if codec == "tight" and found and len(targets) == len(found):
            axes.step(places, targets, where="mid", color="black", linestyle=":", label="target")
    axes.axhline(1, color="0.8", zorder=0)
    axes.set_xticks(places, [label.removeprefix("density=") for label in labels])
    axes.set_xlabel("density")
    axes.set_title(_OPERATIONS[operation])
    axes.grid(axis="y", color="0.92")


def _sizes(axes: Axes, rows: dict[str, Row]) -> None:
    layers = [name.split("/")[1] for name in rows if name.startswith("size/") and name.endswith("/bound")]
    width = 0.25
    for index, (codec, color) in enumerate(_COLORS.items()):
        places = [place + (index - 1) * width for place in range(len(layers))]
        axes.bar(places, [rows[f"size/{layer}/{codec}/bits"].value for layer in layers], width, color=color)
    for place, layer in enumerate(layers):
        bound = rows[f"size/{layer}/bound"].value
        label = "order-0 bound" if place == 0 else None
        axes.hlines(bound, place - 0.45, place + 0.45, color="black", label=label)
    axes.set_xticks(range(len(layers)), layers)
    axes.set_ylabel("bits an element")
    axes.set_title("real activations")
    axes.legend(frameon=False)


def draw(result: Result, figure: Figure) -> None:
    rows = {row.name: row for row in result.rows}
    has_sizes = any(name.startswith("size/") for name in rows)
    widths = [1] * len(_OPERATIONS) + [1.3] * has_sizes
    figure.set_size_inches(3.5 * sum(widths), 4)
    panels = figure.subplots(1, len(widths), width_ratios=widths)
    left = panels[: len(_OPERATIONS)]
    for axes, operation in zip(left, _OPERATIONS, strict=True):
        axes.sharey(left[0])
        _fractions(axes, rows, operation)
    left[0].set_ylabel("fraction of copy bandwidth")
    left[0].legend(frameon=False, loc="lower right")
    left[0].set_ylim(min(0.8, left[0].get_ylim()[0]), 1.04)
    if has_sizes:
        _sizes(panels[-1], rows)
    copy = rows.get("copy/gb_per_s")
    figure.suptitle(f"BF16 on {result.place}" + (f", copy at {copy.value:.0f} GB/s" if copy else ""))
