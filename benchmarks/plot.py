"""A picture of a result of ``python -m benchmarks kernels`` or ``models``.

    python -m benchmarks plot docs/results/kernels_h200.json docs/results/kernels_h200.png

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


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks plot", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("result", type=Path, help="a result file of kernels or models")
    parser.add_argument("picture", type=Path, help="where the picture goes, such as kernels.png")
    options = parser.parse_args(arguments)
    try:
        result = results.read(options.result)
        if result.name not in _DRAW:
            names = " or ".join(_DRAW)
            raise results.ResultError(f"{options.result}: expected a result of {names}, got {result.name!r}")
        draw(result, options.picture)
    except (OSError, ImportError, results.ResultError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"wrote {options.picture}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
