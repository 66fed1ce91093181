"""Options and the ending that all measurements share."""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.console import Console

from benchmarks import results, tables


def parser_of(name: str, description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks {name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="small sizes, few repeats: shows that it runs, no more")
    parser.add_argument(
        "--json", type=Path, default=Path(f"out/bench/{name}.json"), metavar="PATH", help="where the result file goes"
    )
    parser.add_argument("--commit", help="what to note as the measured commit (default: git's)")
    return parser


def add_device(parser: argparse.ArgumentParser) -> None:
    """--device, a GPU if there is one."""
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default, help="cpu, cuda or cuda:N (default here: %(default)s)")


def check_densities(parser: argparse.ArgumentParser, densities: Sequence[float]) -> None:
    """Ends the program if some are no densities."""
    if not all(0 < density < 1 for density in densities):
        parser.error("--densities: expected shares between 0 and 1")


def chosen_device(parser: argparse.ArgumentParser, name: str) -> torch.device:
    """The device that --device names, made current if it is a GPU; ends the program if it can't be used."""
    device = torch.device(name)
    if device.type != "cuda":
        return device
    if not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no GPU; python -m bitsparse.info says more")
    torch.cuda.set_device(device.index or 0)
    return torch.device("cuda", torch.cuda.current_device())


def noted_arguments(arguments: Sequence[str]) -> list[str]:
    """Without those that say where the result goes and what it is called."""
    kept: list[str] = []
    words = iter(arguments)
    for word in words:
        if word in ("--json", "--commit"):
            next(words, None)
        elif not word.startswith(("--json=", "--commit=")):
            kept.append(word)
    return kept


class Reporting:
    """Prints and writes a result when the block in it ends. Also when a measurement in it failed or was stopped: what was
    measured is not lost, and exit_code is 1, as it is when some result was not exact. A failure inside of `part` ends
    that part only."""

    def __init__(self, result: results.Result, path: Path) -> None:
        self._result = result
        self._path = path
        self._failed: list[str] = []
        self.exit_code = 0

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            traceback.print_exception(error)
            self._failed.append(name)

    def __enter__(self) -> Reporting:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        stopped = error is not None and not isinstance(error, Exception)  # by a signal
        if error is not None:
            if not stopped:
                traceback.print_exception(error)
            self._failed.append("the rest")
        inexact = any(row.name.endswith("/exact") and row.falls_short for row in self._result.rows)
        self.exit_code = int(inexact or bool(self._failed))
        if self._result.rows:
            self._report()
        if self._failed:
            what = ", ".join(self._failed)
            why = "stopped early" if stopped else "a measurement failed, see above"
            print(f"{why}: the result is not complete ({what})", file=sys.stderr)
        return not stopped

    def _report(self) -> None:
        result = self._result
        console = Console(width=None if Console().is_terminal else 140)
        for table in tables.tables_of(result):
            console.print(table.as_rich())
        results.write(self._path, result)
        targets = sum(row.target is not None for row in result.rows)
        for row in result.short_rows:
            print(f"short of its target: {row.name} {row.value:.4g} {row.unit}, target {row.direction} {row.target:g}")
        print(f"{len(result.rows)} rows, {targets} targets, {len(result.short_rows)} missed")
        print(f"wrote {self._path}")
