"""Markers, machines without a GPU, and a check after every test that no compressed activation is left."""

import gc
import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import torch

import bitsparse
from bitsparse import info


def _gpu_problem() -> str | None:
    """Why the GPU tests can't run here."""
    return info.collect()["reasons"].get("cuda")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "cuda: needs a GPU and a build with CUDA")
    config.addinivalue_line("markers", "slow: takes long or needs much memory")
    config.addinivalue_line("markers", "keeps_leases: may leave compressed activations behind")


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
    devices = ["cpu", "cuda"] if torch.cuda.is_initialized() else ["cpu"]
    return {device: bitsparse.memory_stats(device, synchronize=True)["live_leases"] for device in devices}


@pytest.fixture(autouse=True)
def no_lease_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if request.node.get_closest_marker("keeps_leases") is None:
        gc.collect()
        assert all(count == 0 for count in _live_leases().values()), f"live leases after the test: {_live_leases()}"


@pytest.fixture
def run_python() -> Callable[..., str]:
    """Runs a new interpreter and returns what it printed; fails when it fails."""

    def run(*arguments: str, **options: object) -> str:
        result = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=600, **options)
        assert result.returncode == 0, f"exit code {result.returncode}:\n{result.stdout}\n{result.stderr}"
        return result.stdout

    return run
