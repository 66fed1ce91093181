"""Where the C++ side of an installed bitsparse is."""

from pathlib import Path

# For CMake projects: cmake -DCMAKE_PREFIX_PATH="$(python -c 'import bitsparse; print(bitsparse.cmake_prefix_path)')"
cmake_prefix_path: str = str(Path(__file__).resolve().parent / "share" / "cmake")
