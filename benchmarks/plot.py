"""A picture of results of ``python -m benchmarks kernels`` or ``models``.

    python -m benchmarks plot docs/results/models_h200.json docs/results/models_h200.png

Of several results of the same kind and place, later ones add the rows that those before them lack.
Needs matplotlib (requirements-dev.txt); measuring does not.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import plot_kernels, plot_models, results
from benchmarks.results import Result

_DRAW = {"kernels": plot_kernels.draw, "models": plot_models.draw}


def draw(result: Result, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(layout="constrained")
    _DRAW[result.name](result, figure)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def together(paths: Sequence[Path]) -> Result:
    found = [results.read(path) for path in paths]
    first = found[0]
    for path, result in zip(paths, found, strict=True):
        if result.name not in _DRAW:
            names = " or ".join(_DRAW)
            raise results.ResultError(f"{path}: expected a result of {names}, got {result.name!r}")
        if (result.name, result.place) != (first.name, first.place):
            raise results.ResultError(
                f"{path}: expected a result of {first.name} on {first.place}, got {result.name} on {result.place}"
            )
        known = {row.name for row in first.rows}
        first.rows += [row for row in result.rows if row.name not in known]
    return first


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks plot", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path, nargs="+", help="result files of kernels, or of models")
    parser.add_argument("picture", type=Path, help="where the picture goes, such as kernels.png")
    options = parser.parse_args(arguments)
    try:
        draw(together(options.results), options.picture)
    except (OSError, ImportError, results.ResultError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"wrote {options.picture}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
