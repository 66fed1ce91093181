"""The one shape of a result file: where, with what and by which command it was measured, and rows of values.

    {"name", "gpu", "cpu": {"model", "threads"}, "torch", "cuda", "bitsparse", "commit", "command",
     "rows": [{"name", "value", "unit", "target", "direction"}, ...]}

gpu and cuda are null where no GPU took part. target and direction (">=" or "<=") come together or not at all.
"""

from __future__ import annotations

import json
import math
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # it needs torch, which reading results does not
    from benchmarks.timing import Timing

ROOT = Path(__file__).resolve().parents[1]

_TEXTS = ("name", "torch", "bitsparse", "commit", "command")
_DIRECTIONS = (">=", "<=")


class ResultError(ValueError):
    """A result file does not have the shape that this module describes."""


@dataclass(frozen=True)
class Row:
    name: str
    value: float
    unit: str
    target: float | None = None
    direction: str | None = None

    @property
    def falls_short(self) -> bool:
        if self.target is None:
            return False
        return self.value < self.target if self.direction == ">=" else self.value > self.target


@dataclass
class Result:
    name: str
    gpu: str | None
    cpu: dict[str, Any]
    torch: str
    cuda: str | None
    bitsparse: str
    commit: str
    command: str
    rows: list[Row] = field(default_factory=list)

    def add(self, name: str, value: float, unit: str, target: float | None = None, direction: str = ">=") -> None:
        self.rows.append(Row(name, value, unit, target, None if target is None else direction))

    def add_times(self, name: str, times: Timing, unit: str = "ms") -> None:
        """Median, 10th and 90th percentile."""
        self.add(name, times.median, unit)
        for percent in (10, 90):
            self.add(f"{name}_p{percent}", times.percentile(percent), "ms")

    @property
    def place(self) -> str:
        """What it was measured on."""
        return self.gpu or str(self.cpu["model"])

    @property
    def short_rows(self) -> list[Row]:
        return [row for row in self.rows if row.falls_short]

    def values(self) -> dict[str, float]:
        return {row.name: row.value for row in self.rows}


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _expect(holds: bool, where: str, expected: str, got: object) -> None:
    if not holds:
        raise ResultError(f"{where}: expected {expected}, got {got!r}")


def _row(content: object, where: str) -> Row:
    _expect(isinstance(content, dict), where, "an object", content)
    assert isinstance(content, dict)
    for key in ("name", "unit"):
        value = content.get(key)
        _expect(isinstance(value, str) and value != "", f"{where}: {key}", "a text", value)
    where = f"{where} ({content['name']})"
    _expect(_is_number(content.get("value")), f"{where}: value", "a finite number", content.get("value"))
    _expect(("target" in content) == ("direction" in content), where, "target and direction together", sorted(content))
    if "target" in content:
        _expect(_is_number(content["target"]), f"{where}: target", "a finite number", content["target"])
        _expect(content["direction"] in _DIRECTIONS, f"{where}: direction", "one of >= and <=", content["direction"])
    unknown = sorted(set(content) - {"name", "value", "unit", "target", "direction"})
    _expect(not unknown, where, "no other keys", unknown)
    return Row(**content)


def validate(content: object) -> Result:
    """The result that decoded JSON stands for; ResultError says what is wrong with it. More keys at the top are fine."""
    _expect(isinstance(content, dict), "result", "an object", content)
    assert isinstance(content, dict)
    for key in _TEXTS:
        value = content.get(key)
        _expect(isinstance(value, str) and value != "", key, "a text", value)
    for key in ("gpu", "cuda"):
        _expect(key in content, key, "a text or null", "nothing")
        value = content[key]
        _expect(value is None or (isinstance(value, str) and value != ""), key, "a text or null", value)
    cpu = content.get("cpu")
    _expect(isinstance(cpu, dict) and set(cpu) == {"model", "threads"}, "cpu", "an object of model and threads", cpu)
    _expect(isinstance(cpu["model"], str) and cpu["model"] != "", "cpu: model", "a text", cpu["model"])
    threads = cpu["threads"]
    _expect(type(threads) is int and threads >= 1, "cpu: threads", "an integer from 1", threads)
    rows = content.get("rows")
    _expect(isinstance(rows, list) and rows != [], "rows", "a list of rows", rows)
    parsed = [_row(row, f"rows[{index}]") for index, row in enumerate(rows)]
    names = [row.name for row in parsed]
    twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    _expect(not twice, "rows", "names that occur once", twice)
    return Result(**{key: content[key] for key in (*_TEXTS, "gpu", "cpu", "cuda")}, rows=parsed)


def read(path: Path) -> Result:
    try:
        return validate(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, not the shape
        raise ResultError(f"{path}: {error}") from error


def write(path: Path, result: Result) -> None:
    """One row a line, so that two versions of a file compare well. Checks before it writes."""
    content = {key: value for key, value in vars(result).items() if key != "rows"}
    rows = [{key: value for key, value in vars(row).items() if value is not None} for row in result.rows]
    validate({**content, "rows": rows})
    head = "".join(f" {json.dumps(key)}: {json.dumps(value, ensure_ascii=False)},\n" for key, value in content.items())
    body = ",\n".join(f"  {json.dumps(row, ensure_ascii=False)}" for row in rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{{\n{head} "rows": [\n{body}\n ]\n}}\n', encoding="utf-8")


def find(paths: Sequence[Path]) -> list[Path]:
    """The result files among files and folders (their *.json); ResultError for what is not there or holds none."""
    files: list[Path] = []
    for path in paths:
        found = sorted(path.glob("*.json")) if path.is_dir() else [path] if path.is_file() else []
        if not found:
            raise ResultError(f"{path}: {'no *.json in this folder' if path.is_dir() else 'no such file or folder'}")
        files += found
    return files


def _git(*arguments: str) -> str | None:
    try:
        run = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return run.stdout.strip()


def current_commit(cuda: bool) -> str:
    """Of the source tree; "-modified" behind it when the sources of what is measured differ from it."""
    head = _git("rev-parse", "HEAD")
    if head is None:
        return "unknown"
    sources = ("bitsparse", "csrc", "benchmarks", "kernels" if cuda else "kernels/include")
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", *sources)
    return head + ("-modified" if changed else "")


def cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")


def describe(name: str, device: str, arguments: Sequence[str], commit: str | None = None) -> Result:
    """A result without rows for a measurement on `device` in this process."""
    import torch

    import bitsparse

    cuda = torch.device(device).type == "cuda"
    return Result(
        name=name,
        gpu=torch.cuda.get_device_name(device) if cuda else None,
        cpu={"model": cpu_model(), "threads": torch.get_num_threads()},
        torch=torch.__version__,
        cuda=torch.version.cuda if cuda else None,
        bitsparse=bitsparse.__version__,
        commit=commit or current_commit(cuda),
        command=shlex.join(["python", "-m", "benchmarks", name, *arguments]),
    )
