"""Loads the compiled module and turns every way in which that can fail into one message that says what to do."""

import sys
from typing import NoReturn

import torch  # before _C: libbitsparse finds torch's libraries among those already loaded

_REBUILD = "To rebuild it, run in bitsparse's source folder: python -m pip install --no-build-isolation -e ."


def _fail(problem: str, cause: BaseException | None = None) -> NoReturn:
    message = f"{problem}. {_REBUILD}"
    if "bitsparse.info" in sys.orig_argv:  # python -m bitsparse.info: this is the answer to the question
        sys.exit(f"bitsparse is not usable: {message}")
    raise ImportError(message) from cause


def _release(version: str) -> list[str]:
    """The part of a torch version that its C++ ABI follows: "2.11.0+cu130" gives 2 and 11."""
    return version.split("+")[0].split(".")[:2]


def check_torch_version(built: str, running: str) -> None:
    """Raise ImportError when a library built for torch `built` can't be trusted under torch `running`."""
    if _release(built) != _release(running):
        _fail(f"bitsparse was built with torch {built}, but torch {running} is running")


try:
    import bitsparse._C as _C
except ModuleNotFoundError as error:
    if error.name != "bitsparse._C":
        raise
    _fail(f"bitsparse's compiled module is missing, or is for another Python than {sys.version.split()[0]}")
except ImportError as error:
    _fail(
        f"bitsparse's compiled library does not load with torch {torch.__version__} "
        f"(CUDA {torch.version.cuda or 'none'}), so it was probably built with another torch: {error}",
        error,
    )

check_torch_version(_C.build_info()["torch"], torch.__version__)


def hooks_keep_tensors() -> bool:
    """Do the active saved-tensor hooks hold on to what they are given? Activation checkpointing's do, or they drop it."""
    try:
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    except AttributeError:  # another version of torch: take it that they copy
        return False
    return hooks is not None and getattr(hooks[0], "__module__", None) == "torch.utils.checkpoint"


_C.set_hooks_keep_tensors(hooks_keep_tensors)

__all__ = ["_C", "check_torch_version"]
