#!/usr/bin/env python3
"""One entry for everything that is done with this source tree; needs Python 3.10 and its standard library.

The first command prepares .venv (pinned in requirements-dev.txt), a CUDA toolkit where there is none (from PyPI, also
into .venv), and the build; later ones find them ready.
"""

from __future__ import annotations

import sys

if sys.version_info < (3, 10):  # noqa: UP036 (any Python can start this)
    sys.exit("bitsparse: Python 3.10 or newer is needed, this is " + sys.version.split()[0])

import argparse
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sysconfig
import xml.etree.ElementTree as xml
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent
VENV = Path(os.environ.get("BITSPARSE_VENV") or ROOT / ".venv")
REQUIREMENTS = ROOT / "requirements-dev.txt"

LAYOUT = """\
settings, in the environment:
  BITSPARSE_PYTHON        an interpreter to use as it is, instead of .venv (--no-venv: the running one)
  BITSPARSE_VENV          where the virtual environment is (default .venv)
  BITSPARSE_CUDA_TOOLKIT  auto, system, pypi or none (a CPU-only build); see scripts/cuda_toolkit.py
  TORCH_CUDA_ARCH_LIST    GPUs to compile for, such as "8.0 9.0" (default 9.0; 8.0 to 12.0 are known to compile)
  MAX_JOBS, CXX, CUDACXX, CMAKE_ARGS

where things go:
  .venv/                  the virtual environment
  build/cmake-*/          objects, the test program, configure.log, ctest.xml, pytest.xml
  bitsparse/              beside the Python sources: _C.*.so, lib/, include/, share/cmake/ (not in git)
  dist/                   wheels
  out/                    what examples and benchmarks write
"""


def say(text: str) -> None:
    print(f"bitsparse: {text}", flush=True)


def run(command: Sequence[str | Path], *, environment: dict[str, str] | None = None, check: bool = True) -> int:
    """Run a command in the source folder; without success end with one line, unless `check` is off."""
    words = [str(word) for word in command]
    say(f"$ {shlex.join(words)}")
    code = subprocess.run(words, cwd=ROOT, env=environment).returncode
    if code and check:
        raise SystemExit(f"bitsparse: {Path(words[0]).name} ended with {code}")
    return code


# First half, in any Python: what the second half needs ---------------------------------------------------------------


def missing_system_packages(tests: bool) -> list[str]:
    """Debian's names of what pip can't bring."""
    missing = []
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        missing.append("g++")
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        missing.append("python3-dev")
    if not (VENV / "bin" / "pip").exists():
        try:
            import ensurepip  # noqa: F401
        except ImportError:
            missing.append("python3-venv")
    if tests:
        probe = [compiler or "c++", "-E", "-x", "c++", "-include", "gtest/gtest.h", "/dev/null"]
        if compiler is None or subprocess.run(probe, capture_output=True).returncode:
            missing.append("libgtest-dev")
    return missing


def ensure_system_packages(tests: bool) -> None:
    missing = missing_system_packages(tests)
    if not missing:
        return
    install = ["apt-get", "install", "-y", "--no-install-recommends", *missing]
    if os.geteuid() or not shutil.which("apt-get"):
        raise SystemExit(f"bitsparse: missing {', '.join(missing)} (Debian's names): run sudo {shlex.join(install)}")
    say(f"installing Debian packages: {', '.join(missing)}")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    if run(install, environment=environment, check=False):
        run(["apt-get", "update"], environment=environment)
        run(install, environment=environment)


def ensure_venv() -> Path:
    """The interpreter of a virtual environment that holds the pinned requirements."""
    python, stamp_file = VENV / "bin" / "python", VENV / "bitsparse-requirements"
    stamp = hashlib.sha256(REQUIREMENTS.read_bytes()).hexdigest()
    if python.exists() and stamp_file.exists() and stamp_file.read_text() == stamp:
        return python
    say(f"preparing {VENV} from {REQUIREMENTS.name} (torch and its CUDA libraries: 5 GB, some minutes)")
    if not (VENV / "bin" / "pip").exists():
        run([sys.executable, "-m", "venv", "--clear", VENV])
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install"]
    run([*pip, *([] if sys.stdout.isatty() else ["--quiet"]), "-r", REQUIREMENTS])
    stamp_file.write_text(stamp)
    return python


# Second half, in the interpreter that everything is built for --------------------------------------------------------


def build_environment() -> dict[str, str]:
    import cuda_toolkit

    environment = os.environ | cuda_toolkit.environment()
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment.get('PATH', '')}"
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), environment.get("PYTHONPATH")]))
    return environment


def build(options: argparse.Namespace) -> tuple[Path, dict[str, str]]:
    import cmake_build

    environment = build_environment()
    definitions = {"BITSPARSE_TESTS": "ON" if options.command in TESTING else "OFF"}
    if options.prebuilt:
        definitions["BITSPARSE_PREBUILT"] = str(options.prebuilt.resolve())
    elif options.command not in TESTING and (cmake_build.default_build_dir() / "bitsparse_tests").exists():
        definitions["BITSPARSE_TESTS"] = "ON"  # keep what is there, rather than reconfigure at each change of command
    build_dir = cmake_build.build_package(ROOT / "bitsparse", definitions=definitions, environment=environment)
    return build_dir, environment


@dataclass
class Counts:
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    gpu_skipped: int = 0

    @classmethod
    def read(cls, junit: Path, exit_code: int) -> Counts:
        """Counts of a JUnit file; a skipped test is a GPU test when its name or reason says so."""
        counts = cls()
        cases = list(xml.parse(junit).iter("testcase")) if junit.exists() else []
        for case in cases:
            if case.find("failure") is not None or case.find("error") is not None:
                counts.failed += 1
            elif (skipped := case.find("skipped")) is not None:
                counts.skipped += 1
                texts = [case.get("name"), case.get("classname"), skipped.get("message"), *case.itertext()]
                counts.gpu_skipped += bool(re.search("gpu|cuda", " ".join(filter(None, texts)), re.IGNORECASE))
            else:
                counts.passed += 1
        if exit_code and not counts.failed:
            counts.failed = 1  # the runner itself
        return counts

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))

    def __str__(self) -> str:
        return f"{self.passed} passed, {self.failed} failed, {self.skipped} skipped"


def test(options: argparse.Namespace) -> None:
    import cmake_build

    build_dir, environment = build(options)
    environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that spin starve the tests beside them
    # Tests compare runs bit by bit: math libraries must not use fewer threads, and so sum in another order, when it is busy.
    environment.setdefault("OMP_DYNAMIC", "FALSE")
    environment.setdefault("MKL_DYNAMIC", "FALSE")
    if options.command == "test-gpu":
        environment["BITSPARSE_REQUIRE_GPU"] = "1"
    junit = {name: build_dir / f"{name}.xml" for name in ("ctest", "pytest")}
    for path in junit.values():
        path.unlink(missing_ok=True)
    jobs = "1" if options.command == "test-gpu" else str(cmake_build.jobs())
    ctest = [cmake_build.find_tool("ctest"), "--test-dir", build_dir, "--output-on-failure", "-j", jobs]
    pytest = [sys.executable, "-m", "pytest", f"--junitxml={junit['pytest']}", *options.arguments]
    results = {
        "ctest": run([*ctest, "--output-junit", junit["ctest"]], environment=environment, check=False),
        "pytest": run(pytest, environment=environment, check=False),
    }
    counts = {name: Counts.read(junit[name], code) for name, code in results.items()}
    total = counts["ctest"] + counts["pytest"]
    say(f"reports: {junit['ctest']}, {junit['pytest']}")
    for name, count in counts.items():
        say(f"{name}: {count}")
    if options.command == "test":
        say(f"{total.gpu_skipped} GPU tests skipped (python3 dev.py test-gpu runs them on a GPU machine)")
    print(f"tests: {total}", flush=True)
    if total.failed:
        raise SystemExit(1)


def test_gpu(options: argparse.Namespace) -> None:
    probe = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    if subprocess.run([sys.executable, "-c", probe]).returncode:
        raise SystemExit(f"bitsparse: test-gpu needs a GPU, but torch of {sys.executable} sees none")
    test(options)


def demo(options: argparse.Namespace) -> None:
    _, environment = build(options)
    run([sys.executable, "examples/train_gpt.py", *options.arguments], environment=environment)


def bench(options: argparse.Namespace) -> None:
    _, environment = build(options)
    run([sys.executable, "-m", "benchmarks", *options.arguments], environment=environment)


def example_cpp(options: argparse.Namespace) -> None:
    """Against the installed package, as any other CMake project would."""
    import cmake_build

    _, environment = build(options)
    cmake, folder = cmake_build.find_tool("cmake"), ROOT / "build" / "example-cpp"
    configure = [cmake, "-S", "examples/cpp", "-B", folder, "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release"]
    configure += [f"-DCMAKE_PREFIX_PATH={ROOT / 'bitsparse'}", f"-DPython_EXECUTABLE={sys.executable}"]
    configure += [f"-DCMAKE_MAKE_PROGRAM={cmake_build.find_tool('ninja')}"]
    run(configure, environment=environment)
    run([cmake, "--build", folder], environment=environment)
    run([folder / "char_model", *options.arguments], environment=environment)


def kernels(options: argparse.Namespace) -> None:
    """Compile only, for GPUs that need not be here."""
    import cmake_build

    architectures = ";".join(f"{number}-real" for number in options.arguments or ["80", "90", "100", "120"])
    definitions = {"CMAKE_CUDA_ARCHITECTURES": architectures, "BITSPARSE_CUDA": "ON", "BITSPARSE_TESTS": "OFF"}
    definitions |= {"BITSPARSE_PYTHON": "OFF", "Python_EXECUTABLE": sys.executable}
    environment, folder = build_environment(), ROOT / "build" / "kernels"
    cmake_build.configure(folder, definitions, environment)
    cmake_build.build(folder, environment, ["bitsparse_kernels"])


def wheel(options: argparse.Namespace) -> None:
    environment, check = build_environment(), ROOT / "build" / "wheel-check"
    del environment["PYTHONPATH"]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    shutil.rmtree(ROOT / "dist", ignore_errors=True)
    run([*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", "dist", "."], environment=environment)
    shutil.rmtree(check, ignore_errors=True)
    wheels = list((ROOT / "dist").glob("*.whl"))
    run([*pip, "install", "--quiet", "--no-deps", "--target", check, *wheels], environment=environment)
    # From another folder, so that the package here isn't the one that is found.
    command = [sys.executable, "-P" if sys.version_info >= (3, 11) else "-s", "-m", "bitsparse.info"]
    subprocess.run(command, cwd=check, env=environment | {"PYTHONPATH": str(check)}, check=True)


def source_files() -> list[Path]:
    folders = ["kernels", "csrc", "tests/cpp", "examples/cpp"]
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.*") if path.suffix in SUFFIXES)


def lint(options: argparse.Namespace) -> None:
    import cmake_build

    fix = options.command == "format"
    ruff, clang_format = cmake_build.find_tool("ruff"), cmake_build.find_tool("clang-format")
    codes = [
        run([ruff, "check", *(["--fix"] if fix else []), "."], check=False),
        run([ruff, "format", *([] if fix else ["--check"]), "."], check=False),
    ]
    say(f"{clang_format} on {len(source_files())} files of kernels, csrc, tests/cpp, examples/cpp")
    command = [
        clang_format,
        *(["-i"] if fix else ["--dry-run", "-Werror", "--ferror-limit=1"]),
        *map(str, source_files()),
    ]
    codes.append(subprocess.run(command, cwd=ROOT).returncode)
    if any(codes):
        raise SystemExit("bitsparse: lint failed; python3 dev.py format repairs what tools can repair")
    say("lint passed" if not fix else "formatted")


SUFFIXES = {".h", ".cuh", ".cpp", ".cu"}
TESTING = ("test", "test-gpu")
COMMANDS = {
    "demo": (demo, "train a small ReLU² GPT, dense and bitsparse; arguments go to examples/train_gpt.py"),
    "test": (test, "ctest and pytest; GPU tests are skipped without a GPU; arguments go to pytest"),
    "test-gpu": (test_gpu, "the same where GPU tests must run; fails without a GPU"),
    "build": (build, "build into bitsparse/, so that this folder can be imported"),
    "bench": (bench, "python -m benchmarks; arguments go to it"),
    "example-cpp": (example_cpp, "build examples/cpp against the built package and run it; arguments go to it"),
    "kernels": (kernels, "compile the kernels only, for the given architectures (default 80 90 100 120)"),
    "wheel": (wheel, "build a wheel into dist/, install it aside and ask it for its versions"),
    "lint": (lint, "ruff and clang-format, check only"),
    "format": (lint, "ruff and clang-format, in place"),
}


def main() -> None:
    commands = "\n".join(f"  {name:<22}  {text}" for name, (_, text) in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="python3 dev.py",
        description=__doc__,
        epilog=f"commands:\n{commands}\n\n{LAYOUT}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="python3 dev.py [--no-venv] [--prebuilt LIBRARY] COMMAND [ARGUMENTS]",
    )
    parser.add_argument("--no-venv", action="store_true", help="use the running Python as it is")
    parser.add_argument("--prebuilt", type=Path, metavar="LIBRARY", help="link this libbitsparse.so, build no other")
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help="see below")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGUMENTS", help="passed on")
    words = sys.argv[1:]
    if "--no-venv" in words:  # also after the command
        words = ["--no-venv", *(word for word in words if word != "--no-venv")]
    options = parser.parse_args(words)

    if not options.no_venv:
        python = os.environ.get("BITSPARSE_PYTHON")
        if python is None:
            if options.command not in ("lint", "format"):
                ensure_system_packages(tests=options.command in TESTING)
            python = str(ensure_venv())
        os.execvp(python, [python, str(ROOT / "dev.py"), "--no-venv", *words])

    sys.path.insert(0, str(ROOT / "scripts"))
    function, _ = COMMANDS[options.command]
    try:
        function(options)
    except KeyboardInterrupt:
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
