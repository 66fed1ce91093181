"""Builds the wheel or the editable install with CMake. Downloads nothing; everything else is in pyproject.toml.

Environment: CMAKE_ARGS (more -D settings), TORCH_CUDA_ARCH_LIST (such as "8.0 9.0"), BITSPARSE_CUDA (AUTO, ON, OFF),
BITSPARSE_BUILD_DIR, MAX_JOBS, CXX, CUDACXX.
"""

import re
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "scripts"))
import cmake_build  # noqa: E402


class CMakeBuild(build_ext):
    """The one extension is whatever CMake installs: _C, libbitsparse, headers and the CMake package."""

    def run(self) -> None:
        editable = self.editable_mode or self.inplace
        prefix = ROOT / "bitsparse" if editable else Path(self.build_lib).resolve() / "bitsparse"
        cmake_build.build_package(prefix, definitions={"BITSPARSE_RELOCATABLE": "OFF" if editable else "ON"})

    def get_outputs(self) -> list[str]:
        return []

    def get_output_mapping(self) -> dict[str, str]:
        return {}


setup(
    version=re.search(r"project\(bitsparse VERSION ([\d.]+)", (ROOT / "CMakeLists.txt").read_text())[1],
    ext_modules=[Extension("bitsparse._C", sources=[])],
    cmdclass={"build_ext": CMakeBuild},
)
