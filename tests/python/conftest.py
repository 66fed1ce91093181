"""Markers, machines without a GPU, and a check after every test that no compressed activation is left."""

import gc
import os
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest
import torch

import bitsparse
from bitsparse import info

_PASSED = pytest.StashKey[bool]()


def _gpu_problem() -> str | None:
    """Why the GPU tests can't run here."""
    return info.collect()["reasons"].get("cuda")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "cuda: needs a GPU and a build with CUDA")
    config.addinivalue_line("markers", "slow: takes long or needs much memory")


def pytest_sessionstart(session: pytest.Session) -> None:
    problem = _gpu_problem()
    if problem and os.environ.get("BITSPARSE_REQUIRE_GPU") == "1":
        pytest.exit(f"BITSPARSE_REQUIRE_GPU=1, but GPU tests can't run: {problem}", returncode=1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    problem = _gpu_problem()
    for item in items:
        if problem and item.get_closest_marker("cuda"):
            item.add_marker(pytest.mark.skip(reason=f"GPU test: {problem}"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    outcomes = {
        outcome: sum("cuda" in report.keywords for report in terminalreporter.getreports(outcome))
        for outcome in ("passed", "failed", "skipped")
    }
    counts = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.items())
    terminalreporter.write_line(f"GPU tests: {counts}" + (f" ({_gpu_problem()})" if outcomes["skipped"] else ""))


def _live_leases() -> dict[str, float]:
    """Compressed activations that are alive, by device; those in garbage don't count."""
    devices = ["cpu", "cuda"] if torch.cuda.is_initialized() else ["cpu"]

    def count() -> dict[str, float]:
        return {device: bitsparse.memory_stats(device, synchronize=True)["live_leases"] for device in devices}

    counts = count()
    if any(counts.values()):
        sys.last_type = sys.last_value = sys.last_traceback = None  # a failed test's traceback holds its tensors
        gc.collect()
        counts = count()
    return counts


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, object, object]:
    report = yield
    if call.when == "call":
        item.stash[_PASSED] = call.excinfo is None
    return report


@pytest.fixture(autouse=True)
def no_lease_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    before = _live_leases()
    yield
    if request.node.stash.get(_PASSED, False):
        after = _live_leases()
        assert all(count == before.get(device, 0) for device, count in after.items()), (
            f"live leases after the test: {after}"
        )


@pytest.fixture
def run_python() -> Callable[..., str]:
    """Runs a new interpreter, with the package that is tested here on its path, and returns what it printed; fails when
    it fails."""

    def run(*arguments: str, path: Path = Path(bitsparse.__file__).parents[1], cwd: Path | None = None) -> str:
        paths = filter(None, [str(path), os.environ.get("PYTHONPATH")])
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
        command = [sys.executable, *arguments]
        result = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=cwd, env=environment)
        assert result.returncode == 0, f"exit code {result.returncode}:\n{result.stdout}\n{result.stderr}"
        return result.stdout

    return run
