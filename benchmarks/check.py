"""``python -m benchmarks.check PATH...``: the rows of result files that fall short of their target.

Exit code 0: none do; 1: some do; 2: a file is not a result file, or there is none.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks import results


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "paths", nargs="*", type=Path, default=[Path("docs/results")], help="files or folders (default docs/results)"
    )
    options = parser.parse_args(arguments)
    try:
        files = {path: results.read(path) for path in results.find(options.paths)}
    except results.ResultError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    table = Table(title="rows that fall short of their target", title_justify="left")
    for heading in ("file", "row", "value", "target", "unit"):
        table.add_column(heading, justify="right" if heading in ("value", "target") else "left", overflow="fold")
    for path, result in files.items():
        for row in result.short_rows:
            cells = (path.name, row.name, f"{row.value:.4g}", f"{row.direction} {row.target:g}", row.unit)
            table.add_row(*map(Text, cells))
    rows = [row for result in files.values() for row in result.rows]
    targets = sum(row.target is not None for row in rows)
    if table.row_count:
        Console(width=None if Console().is_terminal else 140).print(table)
        print(f"{table.row_count} of {targets} targets are missed ({len(rows)} rows in {len(files)} files)")
        return 1
    print(f"all {targets} targets are met ({len(rows)} rows in {len(files)} files)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
