"""A table that can be printed or written as Markdown, and cells from a result's rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.table import Table as RichTable
from rich.text import Text

from benchmarks.results import Result

NOTHING = "–"


@dataclass
class Table:
    title: str
    headings: Sequence[str]
    lines: list[Sequence[str]] = field(default_factory=list)
    texts: int = 1  # leading columns that are text; the others are numbers

    def as_rich(self) -> RichTable:
        table = RichTable(title=self.title, title_justify="left")
        for index, heading in enumerate(self.headings):
            table.add_column(heading, justify="left" if index < self.texts else "right")
        for line in self.lines:
            table.add_row(*map(Text, line))
        return table

    def as_markdown(self) -> str:
        marks = ["---" if index < self.texts else "---:" for index in range(len(self.headings))]
        lines = [self.headings, marks, *self.lines]
        return f"{self.title}\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines)


class Cells:
    """Values by row name as texts; those short of their target are marked."""

    def __init__(self, result: Result) -> None:
        self._rows = {row.name: row for row in result.rows}

    def __contains__(self, name: str) -> bool:
        return name in self._rows

    def __call__(self, name: str, digits: int, scale: float = 1.0) -> str:
        row = self._rows.get(name)
        if row is None:
            return NOTHING
        return f"{row.value * scale:.{digits}f}" + (" ✗" if row.falls_short else "")

    def pair(self, name: str) -> str:
        return f"{self(name + '/ms', 3)} ({self(name + '/of_copy', 2)})" if name + "/ms" in self._rows else NOTHING

    def several(self, names: Sequence[str], digits: int) -> str:
        """Side by side in one cell."""
        if not any(name in self._rows for name in names):
            return NOTHING
        return " / ".join(self(name, digits) for name in names)

    def groups(self, depth: int, last: str) -> list[str]:
        """The names' first `depth` parts, in the order of the rows, of names that end in `last`."""
        names = (name.split("/") for name in self._rows)
        return list(dict.fromkeys("/".join(parts[:depth]) for parts in names if "/".join(parts[depth:]) == last))
