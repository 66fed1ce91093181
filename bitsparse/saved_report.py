"""What autograd keeps for backward, as figures and as tables: the result of :func:`bitsparse.profile_saved`."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import torch

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

Kind = Literal["saved", "compressed", "parameter", "buffer", "input"]

_KEPT_ANYWAY = ("parameter", "buffer", "input")
_WIDTH = 120  # where the output is no terminal, whose width would be known
_NOTHING = "–"


def require_rich(argument: str) -> None:
    """Raise ImportError when the tables can't be drawn, before any work is done for them."""
    try:
        import rich  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"{argument}: expected the package rich, which draws the tables, to be installed, got none. Install it "
            "(python -m pip install rich), or use the figures without tables: profile_saved(..., print_table=False)"
        ) from error


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class SavedTensor:
    """One tensor that autograd saved and still held when the forward pass was over.

    Attributes:
        module: path of the module on whose behalf it was saved, as in ``model.named_modules()``; "" is the model itself,
            "(loss)" the function `loss`.
        node: name of the autograd node that holds it; None when the node can't be reached from the outputs.
        kind: "saved" or "compressed", which autograd alone keeps alive; "parameter", "buffer" or "input", whose memory
            the caller keeps anyway.
        shape: of the saved tensor. A compressed one knows only how many elements it stands for: (numel,).
        dtype: of the saved tensor, or of the one that a compressed one stands for.
        device: where it is.
        nbytes: bytes of memory that this tensor keeps alive and no earlier entry of the report does: all of its
            storage, which is more than its elements when it is a slice; 0 when `shared_with` is given. For a
            compressed one its payload, as ``memory_stats()["payload_bytes"]`` counts it.
        dense_nbytes: the same, with a compressed tensor counted as the one that it stands for.
        shared_with: the module at which this memory is counted already, or None.
    """

    module: str
    node: str | None
    kind: Kind
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    nbytes: int
    dense_nbytes: int
    shared_with: str | None = None

    @property
    def kept_anyway(self) -> bool:
        return self.kind in _KEPT_ANYWAY


@dataclass
class SavedBytes:
    """A sum over saved tensors, in bytes.

    Attributes:
        tensors: how many were saved; those that share memory with others count too, those kept anyway don't.
        saved: what autograd keeps alive, compressed tensors with their payload.
        compressed: the part of `saved` that is payload.
        dense: `saved`, if the compressed tensors were kept as they are.
        kept_anyway: parameters, buffers and inputs that were saved too; not part of `saved`.
    """

    tensors: int = 0
    saved: int = 0
    compressed: int = 0
    dense: int = 0
    kept_anyway: int = 0

    def add(self, tensor: SavedTensor) -> None:
        if tensor.kept_anyway:
            self.kept_anyway += tensor.nbytes
            return
        self.tensors += 1
        self.saved += tensor.nbytes
        self.dense += tensor.dense_nbytes
        if tensor.kind == "compressed":
            self.compressed += tensor.nbytes


def _sum(tensors: Iterable[SavedTensor]) -> SavedBytes:
    total = SavedBytes()
    for tensor in tensors:
        total.add(tensor)
    return total


class _Printable:
    """Shown by ``print`` and by rich, which asks for __rich__ and fits its result to the terminal."""

    def __rich__(self) -> RenderableType:
        raise NotImplementedError

    def __str__(self) -> str:
        require_rich(type(self).__name__)
        from rich.console import Console

        text = io.StringIO()
        Console(file=text, width=_WIDTH, color_system=None).print(self)
        return text.getvalue().rstrip("\n")

    def print(self) -> None:
        """Prints the tables to standard output.

        Raises:
            ImportError: the package rich is not installed.
        """
        require_rich(f"{type(self).__name__}.print")
        from rich.console import Console

        console = Console()
        if not console.is_terminal:
            console = Console(width=_WIDTH)
        console.print(self)


@dataclass(frozen=True, repr=False)
class SavedReport(_Printable):
    """What autograd kept for the backward of one forward pass. All sizes are exact, in bytes.

    ``print(report)`` shows it as tables, for which the package rich is needed; the figures need nothing.

    Attributes:
        tensors: every saved tensor that was still held at the end of the forward pass, in the order of saving. Those
            without any bytes are left out.
        modules: the modules that were called, path to class name, in the order of their first call.
        loss: name of the function `loss`, or None.
    """

    tensors: tuple[SavedTensor, ...]
    modules: Mapping[str, str]
    loss: str | None = None
    total: SavedBytes = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "total", _sum(self.tensors))

    def by_module(self) -> dict[str, SavedBytes]:
        """Sums by the path of the module that the tensors were saved for, without those of its children."""
        return {path: _sum(tensors) for path, tensors in self._grouped().items()}

    def by_dtype(self) -> dict[torch.dtype, SavedBytes]:
        """Sums by dtype. A compressed tensor counts with the dtype that it stands for."""
        sums: dict[torch.dtype, SavedBytes] = {}
        for tensor in self.tensors:
            sums.setdefault(tensor.dtype, SavedBytes()).add(tensor)
        return sums

    def compare(
        self, other: SavedReport, *, names: tuple[str, str] = ("before", "after"), print_table: bool = True
    ) -> SavedComparison:
        """This report beside another one, such as those of a dense model and of the same one with compressing blocks.

        Modules that were called in both are compared under their path. Where only one model has a module, or calls it,
        its bytes count for the innermost module around it that both have: the layers of a dense block for the block.

        Args:
            other: the report to subtract this one from.
            names: headings for this report and for `other`.
            print_table: print the comparison.

        Raises:
            TypeError, ValueError: an argument is not as above.
            ImportError: with `print_table`, when the package rich is not installed.
        """
        if not isinstance(other, SavedReport):
            raise TypeError(f"other: expected a SavedReport, got {type(other).__name__}")
        if not isinstance(names, tuple) or len(names) != 2 or not all(isinstance(name, str) for name in names):
            raise ValueError(f"names: expected two strings, got {names!r}")
        if print_table:
            require_rich("print_table")
        comparison = SavedComparison(self, other, names)
        if print_table:
            comparison.print()
        return comparison

    def __repr__(self) -> str:
        total = self.total
        return f"SavedReport(tensors={total.tensors}, saved={total.saved}, kept_anyway={total.kept_anyway})"

    def __rich__(self) -> RenderableType:
        from rich.console import Group

        return Group(self._tensor_table(), self._dtype_table())

    def _grouped(self) -> dict[str, list[SavedTensor]]:
        groups: dict[str, list[SavedTensor]] = {path: [] for path in self.modules}
        for tensor in self.tensors:
            groups.setdefault(tensor.module, []).append(tensor)
        return groups

    def _title_of(self, path: str) -> str:
        if path not in self.modules:
            return f"{path} {self.loss or ''}".rstrip()
        return f"{path or '(model)'}  {self.modules[path]}"

    def _tensor_table(self) -> Table:
        table = _table("What autograd keeps for backward", ("Module, node", "Shape", "Dtype"), ("Bytes",), ("Note",))
        for path, tensors in self._grouped().items():
            if not tensors:
                continue
            total = _sum(tensors)
            _row(table, self._title_of(path), "", "", _bytes(total.saved), "", style="bold")
            for tensor in tensors:
                if not tensor.kept_anyway:
                    _row(table, *_cells_of(tensor))
            anyway = _note_of_kept_anyway(tensors)
            if anyway:
                _row(table, "  kept anyway", "", "", f"({_bytes(total.kept_anyway)})", anyway, style="dim")
            table.add_section()
        return table

    def _dtype_table(self) -> Table:
        table = _table("", ("Dtype", "Tensors"), ("Bytes", "Of it compressed", "If kept dense", "Kept anyway"))
        for dtype, sums in self.by_dtype().items():
            _row(table, _name_of(dtype), *_figures(sums))
        table.add_section()
        _row(table, "Total", *_figures(self.total), style="bold")
        return table


@dataclass(frozen=True, repr=False)
class SavedComparison(_Printable):
    """Two reports, module by module. ``print(comparison)`` shows it as a table, for which the package rich is needed.

    Attributes:
        before, after: the reports.
        names: what they are called in the table.
    """

    before: SavedReport
    after: SavedReport
    names: tuple[str, str] = ("before", "after")

    def by_module(self) -> dict[str, tuple[SavedBytes, SavedBytes]]:
        """Sums before and after by path, for the modules that both models called; see :meth:`SavedReport.compare`."""
        common = set(self.before.modules) & set(self.after.modules)
        before, after = _rolled_up(self.before, common), _rolled_up(self.after, common)
        return {path: (before.get(path, SavedBytes()), after.get(path, SavedBytes())) for path in before | after}

    @property
    def difference(self) -> int:
        """Bytes that autograd keeps more after than before; negative when they are fewer."""
        return self.after.total.saved - self.before.total.saved

    def __repr__(self) -> str:
        return f"SavedComparison(before={self.before!r}, after={self.after!r}, difference={self.difference})"

    def __rich__(self) -> RenderableType:
        table = _table("What autograd keeps for backward, bytes", ("Module",), (*self.names, "Difference", "Ratio"))
        for path, (before, after) in self.by_module().items():
            if before.saved or after.saved:
                _row(table, path or "(model)", *_side_by_side(before.saved, after.saved))
        table.add_section()
        before, after = self.before.total, self.after.total
        _row(table, "Total", *_side_by_side(before.saved, after.saved), style="bold")
        if before.compressed or after.compressed:
            _row(table, "  of it compressed", *_side_by_side(before.compressed, after.compressed))
            _row(table, "  if that were dense", *_side_by_side(before.dense, after.dense))
        _row(table, "Kept anyway", *_side_by_side(before.kept_anyway, after.kept_anyway), style="dim")
        return table


def _rolled_up(report: SavedReport, common: set[str]) -> dict[str, SavedBytes]:
    sums = {path: SavedBytes() for path in report.modules if path in common}
    for tensor in report.tensors:
        path = tensor.module
        while path in report.modules and path not in common and path:
            path = path.rpartition(".")[0]
        sums.setdefault(path, SavedBytes()).add(tensor)
    return sums


def _table(title: str, texts: Iterable[str], numbers: Iterable[str], notes: Iterable[str] = ()) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(title), title_justify="left")
    for heading in texts:  # names may be folded, figures never: they are to be exact
        table.add_column(Text(heading), overflow="fold")
    for heading in numbers:
        table.add_column(Text(heading), justify="right", no_wrap=True)
    for heading in notes:
        table.add_column(Text(heading), overflow="fold")
    return table


def _row(table: Table, *cells: str, style: str = "") -> None:
    from rich.text import Text

    table.add_row(*map(Text, cells), style=style)  # as text: a name may look like markup


def _bytes(size: int) -> str:
    return f"{size:,}"


def _figures(sums: SavedBytes) -> tuple[str, ...]:
    sizes = (sums.saved, sums.compressed, sums.dense, sums.kept_anyway)
    return str(sums.tensors), *map(_bytes, sizes)


def _side_by_side(before: int, after: int) -> tuple[str, ...]:
    ratio = f"{after / before:.3f}" if before else _NOTHING
    return _bytes(before), _bytes(after), f"{after - before:+,}", ratio


def _cells_of(tensor: SavedTensor) -> tuple[str, ...]:
    shape = " × ".join(map(str, tensor.shape)) or "scalar"
    note = ""
    if tensor.shared_with is not None:
        note = f"counted at {tensor.shared_with or '(model)'}"
    elif tensor.kind == "compressed":
        note = f"compressed from {_bytes(tensor.dense_nbytes)}"
    return f"  {tensor.node or _NOTHING}", shape, _name_of(tensor.dtype), _bytes(tensor.nbytes), note


def _note_of_kept_anyway(tensors: Iterable[SavedTensor]) -> str:
    """How many of each kind, those counted elsewhere included: "2 parameters, 1 input"."""
    counts = dict.fromkeys(_KEPT_ANYWAY, 0)
    for tensor in tensors:
        if tensor.kept_anyway:
            counts[tensor.kind] += 1
    return ", ".join(f"{count} {kind}{'s' if count > 1 else ''}" for kind, count in counts.items() if count)
