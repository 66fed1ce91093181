#!/usr/bin/env python3
"""Finds a CUDA toolkit that fits the installed torch, or takes one from PyPI into the running Python's environment.

    eval "$(.venv/bin/python scripts/cuda_toolkit.py)"

prints `export` lines for CMake and nvcc; nothing where torch is a CPU build. BITSPARSE_CUDA_TOOLKIT chooses:

    auto    (default) a toolkit of torch's CUDA version on this machine, else PyPI's
    system  only one that is on this machine
    pypi    only PyPI's
    none    no toolkit: a CPU-only build

dev.py uses it; setup.py and CMake never install anything.
"""

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

# Left to itself, pip takes a newer nvvm, and ptxas of this nvcc rejects the PTX that it makes.
PYPI_PACKAGES = {
    "13.0": ["cuda-toolkit[nvcc,cccl,cudart]==13.0.2", "nvidia-nvvm==13.0.88", "nvidia-cuda-crt==13.0.88"],
}


def torch_cuda_version() -> str | None:
    """The CUDA version of the installed torch ("13.0"), None for a CPU build; torch itself is not imported."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(f"bitsparse: torch is not installed for {sys.executable}: pip install torch==2.11.0")
    text = (Path(spec.submodule_search_locations[0]) / "version.py").read_text()
    found = re.search(r"^cuda.*=\s*'([\d.]+)'", text, re.MULTILINE)
    return found[1] if found else None


def nvcc_version(nvcc: str | Path) -> str | None:
    try:
        text = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
    except OSError:
        return None
    found = re.search(r"release ([\d.]+)", text)
    return found[1] if found else None


def find_system(cuda: str) -> Path | None:
    """The nvcc of an installed toolkit with the major version of `cuda`."""
    home = os.environ.get("CUDA_HOME")
    candidates = [
        os.environ.get("CUDACXX"),
        home and f"{home}/bin/nvcc",
        shutil.which("nvcc"),
        "/usr/local/cuda/bin/nvcc",
    ]
    for nvcc in filter(None, candidates):
        version = nvcc_version(nvcc)
        if version and version.split(".")[0] == cuda.split(".")[0]:
            return Path(nvcc)
        if version:
            print(f"bitsparse: {nvcc} is CUDA {version}, torch is CUDA {cuda}: not used", file=sys.stderr)
    return None


def install_from_pypi(cuda: str) -> Path:
    """nvcc and headers from PyPI, beside the CUDA libraries that torch brought."""
    packages = PYPI_PACKAGES.get(cuda)
    if packages is None:
        raise SystemExit(
            f"bitsparse: no PyPI toolkit is known for torch's CUDA {cuda}: install CUDA {cuda} and set CUDACXX, "
            f"or set BITSPARSE_CUDA_TOOLKIT=none for a CPU-only build"
        )
    root = Path(sysconfig.get_path("purelib")) / "nvidia" / f"cu{cuda.split('.')[0]}"
    nvcc = root / "bin" / "nvcc"
    if not (root / "lib64").is_symlink() or not nvcc.exists():
        print(f"bitsparse: installing a CUDA {cuda} toolkit from PyPI into {root}", file=sys.stderr)
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages]
        if subprocess.run(pip, stdout=sys.stderr).returncode:
            raise SystemExit(
                f"bitsparse: {shlex.join(pip[3:])} failed; BITSPARSE_CUDA_TOOLKIT=none builds without CUDA"
            )
        # The wheels hold libX.so.N only, and no lib64: what linkers and CMake look for.
        for library in (root / "lib").glob("lib*.so.*"):
            link = library.with_name(library.name.split(".so.")[0] + ".so")
            if not link.exists():
                link.symlink_to(library.name)
        if not (root / "lib64").exists():
            (root / "lib64").symlink_to("lib")
    return nvcc


def environment(choice: str | None = None) -> dict[str, str]:
    """The variables that make CMake, FindCUDA and nvcc use the chosen toolkit."""
    choice = choice or os.environ.get("BITSPARSE_CUDA_TOOLKIT") or "auto"
    if choice not in ("auto", "system", "pypi", "none"):
        raise SystemExit(f"bitsparse: BITSPARSE_CUDA_TOOLKIT is {choice!r}: expected auto, system, pypi or none")
    cuda = torch_cuda_version()
    if cuda is None or choice == "none":
        return {"BITSPARSE_CUDA": "OFF"}
    nvcc = find_system(cuda) if choice in ("auto", "system") else None
    if nvcc is None and choice == "system":
        raise SystemExit(f"bitsparse: no CUDA {cuda.split('.')[0]} toolkit on this machine (torch is CUDA {cuda})")
    if nvcc is not None:
        return {"CUDACXX": str(nvcc)}
    root = install_from_pypi(cuda).parent.parent
    return {
        "CUDACXX": str(root / "bin" / "nvcc"),
        "CUDA_HOME": str(root),
        "CUDA_PATH": str(root),
        "CUDAToolkit_ROOT": str(root),
        "CUDA_TOOLKIT_ROOT_DIR": str(root),
    }


if __name__ == "__main__":
    for name, value in environment().items():
        print(f"export {name}={shlex.quote(value)}")
