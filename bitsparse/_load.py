"""Loads the compiled module and turns every way in which that can fail into one message that says what to do."""

import torch  # before _C: libbitsparse finds torch's libraries among those already loaded

_REBUILD = "To rebuild it for the running torch, run in bitsparse's source folder: python -m pip install --no-build-isolation -e ."


def _release(version: str) -> tuple[str, ...]:
    """The part of a torch version that its C++ ABI follows: "2.11.0+cu130" gives ("2", "11")."""
    return tuple(version.split("+")[0].split(".")[:2])


def check_torch_version(built: str, running: str) -> None:
    """Raise ImportError when a library built for torch `built` can't be trusted under torch `running`."""
    if _release(built) != _release(running):
        raise ImportError(f"bitsparse was built with torch {built}, but torch {running} is running. {_REBUILD}")


try:
    import bitsparse._C as _C
except ModuleNotFoundError as error:
    if error.name != "bitsparse._C":
        raise
    raise ImportError(
        f"bitsparse's compiled module (bitsparse/_C) is missing or is for another Python. {_REBUILD}"
    ) from None
except ImportError as error:
    raise ImportError(
        f"bitsparse's compiled library does not load under torch {torch.__version__} "
        f"(CUDA {torch.version.cuda or 'none'}), so it was probably built with another one: {error}. {_REBUILD}"
    ) from error

check_torch_version(_C.build_info()["torch"], torch.__version__)

__all__ = ["_C", "check_torch_version"]
