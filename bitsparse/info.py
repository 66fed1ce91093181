"""``python -m bitsparse.info``: which versions are in use, which devices are usable and, where one is not, why."""

from __future__ import annotations

import argparse
import json
import platform
import re
import sys
from pathlib import Path
from typing import Any

import torch

import bitsparse
from bitsparse._load import _C


def runs_on(architectures: list[str], capability: tuple[int, int]) -> bool:
    """Whether code compiled for `architectures` runs on a GPU of this compute capability.

    Machine code ("sm_90") runs on the same major version with an equal or higher minor one, PTX ("compute_90") on
    everything at or above its own version; a letter ("sm_90a") ties either to that very capability.
    """
    gpu = capability[0] * 10 + capability[1]
    for architecture in architectures:
        parsed = re.fullmatch(r"(sm|compute)_(\d+)([af]?)", architecture)
        if parsed is None:
            continue
        target = int(parsed[2])
        if parsed[3]:
            runs = gpu == target
        elif parsed[1] == "sm":
            runs = gpu // 10 == target // 10 and gpu >= target
        else:
            runs = gpu >= target
        if runs:
            return True
    return False


def _driver() -> str | None:
    """Version of NVIDIA's kernel driver, from the file it publishes; needs no CUDA context."""
    try:
        first_line = Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
    except (OSError, IndexError):
        return None
    found = re.search(r"\b\d{3}\.\d+(\.\d+)?\b", first_line)
    return found[0] if found else None


def _gpus(architectures: list[str]) -> list[dict[str, Any]]:
    gpus = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(index)
        capability = (properties.major, properties.minor)
        gpus.append(
            {
                "device": f"cuda:{index}",
                "name": properties.name,
                "architecture": f"sm_{capability[0]}{capability[1]}",
                "memory_bytes": properties.total_memory,
                "usable": runs_on(architectures, capability),
                "fused_products": capability == (9, 0),  # whose kernels every CUDA build has
            }
        )
    return gpus


def _cuda_problem(build: dict[str, Any], gpus: list[dict[str, Any]], driver: str | None) -> str | None:
    """Why CUDA tensors can't be used, or None when they can."""
    if build["cuda"] is None:
        return "this bitsparse was built without CUDA; rebuild it where nvcc is found"
    if torch.version.cuda is None:
        return "the installed torch is a CPU-only build"
    if build["cuda"].split(".")[0] != torch.version.cuda.split(".")[0]:
        return f"built with CUDA {build['cuda']}, but torch runs CUDA {torch.version.cuda}; rebuild with this torch"
    if not gpus:
        seen = f"driver {driver}" if driver else "no NVIDIA driver was found"
        return f"torch sees no GPU ({seen})"
    if not any(gpu["usable"] for gpu in gpus):
        found = ", ".join(sorted({gpu["architecture"] for gpu in gpus}))
        compiled = ", ".join(build["architectures"])
        return f"compiled for {compiled}, but the GPU is {found}; rebuild for it (TORCH_CUDA_ARCH_LIST)"
    return None


def collect() -> dict[str, Any]:
    """Everything the command prints, as a dictionary that JSON can hold."""
    build = dict(_C.build_info())
    gpus = _gpus(build["architectures"])
    driver = _driver()
    problem = _cuda_problem(build, gpus, driver)
    return {
        "bitsparse": bitsparse.__version__,
        "location": str(Path(bitsparse.__file__).parent),
        "python": platform.python_version(),
        "build": build,
        "run": {
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "driver": driver,
            "threads": torch.get_num_threads(),
        },
        "gpus": gpus,
        "usable": {"cpu": True, "cuda": problem is None},
        "reasons": {} if problem is None else {"cuda": problem},
    }


def _describe(info: dict[str, Any]) -> str:
    build, run = info["build"], info["run"]
    rows = [
        ("bitsparse", f"{info['bitsparse']} ({info['location']})"),
        ("python", info["python"]),
        ("torch", f"built with {build['torch']}, running {run['torch']}"),
        ("CUDA", f"built with {build['cuda'] or 'none'}, torch runs {run['cuda'] or 'none'}"),
        ("compiled for", ", ".join(build["architectures"]) or "no GPU architecture"),
        ("compiler", build["compiler"]),
        ("driver", run["driver"] or "none found"),
    ]
    for gpu in info["gpus"]:
        note = ", not usable" if not gpu["usable"] else ", fused products" if gpu["fused_products"] else ""
        rows.append(
            (gpu["device"], f"{gpu['name']}, {gpu['architecture']}, {gpu['memory_bytes'] / 2**30:.0f} GiB{note}")
        )
    rows.append(("CPU tensors", f"usable, {run['threads']} threads"))
    reason = info["reasons"].get("cuda")
    rows.append(("CUDA tensors", "usable" if reason is None else f"not usable: {reason}"))
    return "\n".join(f"{name + ':':<14} {value}" for name, value in rows)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bitsparse.info", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON instead of lines")
    info = collect()
    print(json.dumps(info, indent=2) if parser.parse_args(arguments).json else _describe(info))
    return 0


if __name__ == "__main__":
    sys.exit(main())
