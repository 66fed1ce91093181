"""Results as tables, for the terminal and for docs/benchmarks.md, where everything between two marks is written by

python -m benchmarks tables [--check]
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import results
from benchmarks.kernel_tables import kernel_tables
from benchmarks.results import ROOT, Result
from benchmarks.table import NOTHING, Cells, Table

BEGIN, END = "<!-- tables: begin -->", "<!-- tables: end -->"
_MIB = 2**20


def _cpu_tables(result: Result) -> list[Table]:
    cell = Cells(result)
    title = f"CPU, {cell('elements', 0)} BF16 elements: ms (memcpy's time over its time)"
    table = Table(title, ("density", "codec", "bits/element", "memcpy", "clone", "pack", "unpack"), texts=2)
    for group in cell.groups(3, "pack/ms"):
        base, codec = group.rsplit("/", 1)
        names = (f"{base}/clone", f"{group}/pack", f"{group}/unpack")
        times = [f"{cell(f'{name}/ms', 1)} ({cell(f'{name}/of_memcpy', 2)})" for name in names]
        bits, memcpy = cell(f"{group}/bits_per_element", 2), cell(f"{base}/memcpy/ms", 1)
        table.lines.append((base.split("=")[1], codec, bits, memcpy, *times))
    return [table]


def _ffn_tables(result: Result) -> list[Table]:
    cell, values = Cells(result), result.values()
    tables = []
    for group in cell.groups(2, "kept"):
        shape, density = group.split("/")
        sizes = " × ".join(re.findall(r"\d+", shape))
        title = f"Blocks: tokens × width × inner width × layers = {sizes}, {density.replace('=', ' ')} "
        title += f"(measured {cell(group + '/kept', 3)})"
        headings = ("method", "step ms", "of dense", "saved MiB", "of dense", "peak MiB", "of dense", "results")
        table = Table(title, headings)
        for method in cell.groups(3, "step_ms"):
            if not method.startswith(group + "/"):
                continue
            line = [method.split("/")[2], cell(f"{method}/step_ms", 2), cell(f"{method}/step_of_dense", 3)]
            for what in ("saved", "peak"):
                line += [cell(f"{method}/{what}_bytes", 1, 1 / _MIB), cell(f"{method}/{what}_of_dense", 3)]
            if f"{method}/exact" in values:
                equal = "equal" if values[f"{method}/exact"] == 1 else "NOT EQUAL ✗"
            else:
                equal = f"differ by {values[f'{method}/largest_difference']:.1e}"
            table.lines.append((*line, equal))
        tables.append(table)
    return tables


_GIB = 2**30


def _models_tables(result: Result) -> list[Table]:
    cell = Cells(result)
    models = cell.groups(1, "parameters")
    return [table(cell, model) for model in models for table in (_model_steps, _model_memory)]


def _model_steps(cell: Cells, model: str) -> Table:
    title = f"{model}: training steps, {cell(f'{model}/parameters', 1, 1e-6)} million weights, "
    title += f"mean density {cell(f'{model}/density/mean', 3)}"
    table = Table(title, ("tokens a step", "method", "step ms", "of compiled", "tokens/s", "peak GiB"), texts=2)
    for row in cell.groups(3, "step_ms"):
        name, tokens, method = row.split("/")
        if name == model:
            times = (cell(f"{row}/step_ms", 2), cell(f"{row}/step_of_compiled", 3), cell(f"{row}/tokens_per_s", 0))
            table.lines.append((tokens.split("=")[1], method, *times, cell(f"{row}/peak_bytes", 2, 1 / _GIB)))
    return table


def _model_memory(cell: Cells, model: str) -> Table:
    methods = list(dict.fromkeys(row.split("/")[2] for row in cell.groups(3, "step_ms") if row.startswith(f"{model}/")))
    fits = [cap for what in ("tokens", "tokens_extrapolated") for cap in cell.groups(3, what)]
    caps = sorted({int(cap.split("=")[1]) for cap in fits if cap.startswith(f"{model}/")})
    headings = ("method", "KiB a token", "of compiled", *(f"tokens in {cap} GiB" for cap in caps), "losses")
    table = Table(f"{model}: memory by tokens, largest step under a cap (≈: extrapolated)", headings)
    for method in methods:
        row = f"{model}/{method}"
        memory = (cell(f"{row}/per_token_bytes", 1, 1 / 1024), cell(f"{row}/per_token_of_compiled", 3))
        table.lines.append(
            (method, *memory, *(_most_tokens(cell, f"{row}/cap={cap}") for cap in caps), _losses(cell, row))
        )
    return table


def _most_tokens(cell: Cells, row: str) -> str:
    tried, line = f"{row}/tokens", f"{row}/tokens_extrapolated"
    return f"≈ {cell(line, 0)}" if line in cell else cell(tried, 0)


def _losses(cell: Cells, row: str) -> str:
    if f"{row}/exact" in cell:
        return "equal" if cell(f"{row}/exact", 0) == "1" else "NOT EQUAL ✗"
    for name, words in {"again": "to itself", "of_compiled": "to dense-compiled's"}.items():
        if (name := f"{row}/loss_{name}") in cell:
            return f"differ by {cell(name, 6)} {words}"
    return NOTHING


def _products_tables(result: Result) -> list[Table]:
    cell = Cells(result)
    headings = (
        "tokens × depth × width",
        "density",
        "operation",
        "product ms",
        "kernel after it",
        "fused",
        "of that",
        "equal",
    )
    table = Table("Matrix products with the codec in their epilogue", headings, texts=3)
    for group in cell.groups(3, "fused_of_after"):
        shape, density, operation = group.split("/")
        times = [cell(f"{group}/{method}/ms", 3) for method in ("product", "after", "fused")]
        ratios = (cell(f"{group}/fused_of_after", 3), cell(f"{group}/equal", 6))
        table.lines.append((shape.replace("x", " × "), density.split("=")[1], operation, *times, *ratios))
    return [table]


def _other_tables(result: Result) -> list[Table]:
    table = Table(result.name, ("row", "value", "target", "unit"))
    for row in result.rows:
        target = "" if row.target is None else f"{row.direction} {row.target:g}"
        table.lines.append((row.name, f"{row.value:.6g}" + (" ✗" if row.falls_short else ""), target, row.unit))
    return [table]


# "block": ffn under its former name.
_MAKERS = {
    "kernels": kernel_tables,
    "cpu": _cpu_tables,
    "ffn": _ffn_tables,
    "block": _ffn_tables,
    "models": _models_tables,
    "products": _products_tables,
}


def tables_of(result: Result) -> list[Table]:
    return [table for table in _MAKERS.get(result.name, _other_tables)(result) if table.lines]


def _short_table(all_results: dict[Path, Result]) -> str:
    table = Table("Rows that fall short of their target:", ("file", "row", "value", "target"), texts=2)
    for path, result in all_results.items():
        for row in result.short_rows:
            table.lines.append((path.name, row.name, f"{row.value:.4g}", f"{row.direction} {row.target:g}"))
    targets = sum(row.target is not None for result in all_results.values() for row in result.rows)
    return table.as_markdown() if table.lines else f"No row falls short of its target ({targets} targets)."


def section(folder: Path) -> str:
    """What stands between the marks."""
    all_results = {path: results.read(path) for path in results.find([folder])}
    parts = [_short_table(all_results)]
    for path, result in all_results.items():
        cuda = f", CUDA {result.cuda}" if result.cuda else ""
        place = result.gpu or f"{result.cpu['model']}, {result.cpu['threads']} threads"
        parts.append(f"### {path.name}: {place}")
        parts.append(
            f"torch {result.torch}{cuda}, bitsparse {result.bitsparse} at {result.commit[:12]}; `{result.command}`"
        )
        parts += [table.as_markdown() for table in tables_of(result)]
    return "\n\n".join(parts)


def replace_section(document: str, text: str) -> str:
    pattern = re.compile(f"{re.escape(BEGIN)}.*{re.escape(END)}", re.DOTALL)
    replaced, count = pattern.subn(lambda _: f"{BEGIN}\n\n{text}\n\n{END}", document)
    if count != 1:
        raise results.ResultError(f"expected the marks {BEGIN} and {END} once in the document")
    return replaced


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks tables", description="Write the tables of a document from result files."
    )
    parser.add_argument("--results", type=Path, default=ROOT / "docs" / "results", metavar="FOLDER")
    parser.add_argument("--document", type=Path, default=ROOT / "docs" / "benchmarks.md", metavar="FILE")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit code 1 if the document is out of date"
    )
    options = parser.parse_args(arguments)
    try:
        old = options.document.read_text(encoding="utf-8")
        new = replace_section(old, section(options.results))
    except (OSError, results.ResultError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.check:
        print(f"{options.document}: {'up to date' if old == new else 'out of date: python -m benchmarks tables'}")
        return int(old != new)
    options.document.write_text(new, encoding="utf-8")
    print(f"wrote the tables of {options.document}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
