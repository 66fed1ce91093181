"""Configures, builds and installs the CMake project into a folder; shared by setup.py and dev.py."""

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# What CMake would remember from an earlier configuration although it changed since.
_REMEMBERED = ("CXX", "CUDACXX", "CUDAToolkit_ROOT", "CXXFLAGS", "TORCH_CUDA_ARCH_LIST", "CMAKE_PREFIX_PATH")


def default_build_dir() -> Path:
    """One build tree for each kind of Python, so that wheels, editable installs and tests share their objects."""
    return ROOT / "build" / f"cmake-{sys.implementation.cache_tag}"


def jobs() -> int:
    """Compile jobs: MAX_JOBS, else one a core as far as memory allows (a torch-heavy unit takes about 2 GiB)."""
    if wanted := os.environ.get("MAX_JOBS"):
        return int(wanted)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min(len(os.sched_getaffinity(0)), memory // (2 << 30)))


def find_tool(name: str) -> str:
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise SystemExit(f"bitsparse: {name} was not found: {sys.executable} -m pip install {name}")
    return found


def configure(build_dir: Path, definitions: Mapping[str, str], environment: Mapping[str, str]) -> None:
    """Run CMake, unless it already ran with the same settings. All output goes to a log; problems to one line."""
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        raise SystemExit(f"bitsparse: torch is not installed for {sys.executable}: pip install torch==2.11.0")
    torch_version = Path(torch.origin).with_name("version.py")
    settings = [f"-D{name}={value}" for name, value in definitions.items()]
    settings += os.environ.get("CMAKE_ARGS", "").split()
    remembered = [f"{name}={environment.get(name, '')}" for name in _REMEMBERED]
    stamp_text = "\n".join([*settings, *remembered, str(torch_version), torch_version.read_text()])
    stamp, stamp_file = hashlib.sha256(stamp_text.encode()).hexdigest(), build_dir / "configured"
    if stamp_file.exists() and stamp_file.read_text() == stamp:
        return
    build_dir.mkdir(parents=True, exist_ok=True)
    stamp_file.unlink(missing_ok=True)
    # Forget what was found, keep the objects (cmake --fresh would delete them): ninja knows which are out of date.
    (build_dir / "CMakeCache.txt").unlink(missing_ok=True)
    for found in (build_dir / "CMakeFiles").glob("[0-9]*"):
        shutil.rmtree(found)
    log = build_dir / "configure.log"
    print(f"bitsparse: configuring in {build_dir} (log: {log.name})", flush=True)
    command = [find_tool("cmake"), "-S", str(ROOT), "-B", str(build_dir), "-G", "Ninja", *settings]
    command.append(f"-DCMAKE_MAKE_PROGRAM={find_tool('ninja')}")
    result = subprocess.run(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    log.write_text(result.stdout)
    messages = [line.strip().removeprefix("-- ") for line in result.stdout.splitlines()]
    ours = [line for line in messages if line.startswith("bitsparse: ")]
    if result.returncode:
        # On failure our message comes last. Without one, the end of the log has to do.
        if not ours:
            print(*messages[-20:], sep="\n", file=sys.stderr)
        raise SystemExit(ours[-1] if ours else f"bitsparse: CMake failed, see {log}")
    print(*ours, sep="\n", flush=True)
    stamp_file.write_text(stamp)


def build(build_dir: Path, environment: Mapping[str, str], targets: Sequence[str] = ()) -> None:
    command = [find_tool("cmake"), "--build", str(build_dir), "-j", str(jobs())]
    command += ["--target", *targets] if targets else []
    print(f"bitsparse: building with {jobs()} jobs", flush=True)
    if subprocess.run(command, env=environment).returncode:
        raise SystemExit("bitsparse: the build failed, see the compiler's messages above")


def install(build_dir: Path, prefix: Path, environment: Mapping[str, str]) -> None:
    """Put the library, the Python module, headers and the CMake package into a package folder."""
    for old in [*prefix.glob("_C.*.so"), prefix / "lib", prefix / "include", prefix / "share"]:
        shutil.rmtree(old) if old.is_dir() else old.unlink(missing_ok=True)
    for component in ("Unspecified", "python"):
        command = [find_tool("cmake"), "--install", str(build_dir), "--prefix", str(prefix), "--component", component]
        if subprocess.run(command, env=environment, stdout=subprocess.DEVNULL).returncode:
            raise SystemExit(f"bitsparse: installing into {prefix} failed, see the message above")
    print(f"bitsparse: installed into {prefix}", flush=True)


def build_package(
    prefix: Path,
    *,
    definitions: Mapping[str, str] | None = None,
    environment: Mapping[str, str] | None = None,
    build_dir: Path | None = None,
) -> Path:
    """Build for the running Python and install into `prefix`; returns the build folder."""
    build_dir = build_dir or Path(os.environ.get("BITSPARSE_BUILD_DIR") or default_build_dir())
    environment = dict(os.environ if environment is None else environment)
    defaults = {
        "CMAKE_BUILD_TYPE": "Release",
        "CMAKE_INSTALL_LIBDIR": "lib",
        "Python_EXECUTABLE": sys.executable,
        "BITSPARSE_PYTHON": "ON",
        "BITSPARSE_TESTS": "OFF",
        "BITSPARSE_CUDA": environment.get("BITSPARSE_CUDA", "AUTO"),
    }
    configure(build_dir, defaults | dict(definitions or {}), environment)
    build(build_dir, environment)
    install(build_dir, prefix, environment)
    return build_dir
