"""Importing, version checks, and the command that says what is usable."""

import json
import re
from pathlib import Path

import pytest
import torch

import bitsparse
from bitsparse import _C, _load, info


def test_import_creates_no_cuda_context(run_python):
    code = (
        "import torch, bitsparse; bitsparse.memory_stats(); bitsparse.memory_stats('cuda'); bitsparse.memory_stats(0);"
        "bitsparse.reset_peak_memory_stats(); bitsparse.nn.ReLUSquaredFFN(8)(torch.ones(1, 8)).sum().backward();"
        "print(torch.cuda.is_initialized())"
    )
    assert run_python("-c", code).strip() == "False"


def test_everything_exported_is_there_and_documented():
    for name in bitsparse.__all__:
        value = getattr(bitsparse, name)
        assert isinstance(value, str) or value.__doc__, name


def test_versions():
    assert bitsparse.__version__ == _C.version() == _C.build_info()["version"]
    assert torch.__version__.startswith(_C.build_info()["torch"].split("+")[0].rsplit(".", 1)[0])


def test_cmake_package_is_where_it_says():
    assert (Path(bitsparse.cmake_prefix_path) / "bitsparse" / "bitsparseConfig.cmake").is_file()


@pytest.mark.parametrize("running", ["2.11.0", "2.11.1+cu130", "2.11.0a0+git123"])
def test_torch_that_fits(running):
    _load.check_torch_version("2.11.0", running)


@pytest.mark.parametrize("running", ["2.12.0", "2.1.1", "3.11.0", "2.10.0+cpu"])
def test_torch_that_does_not_fit(running):
    with pytest.raises(
        ImportError, match=f"built with torch 2.11.0, but torch {re.escape(running)} is running.*pip install"
    ):
        _load.check_torch_version("2.11.0", running)


def test_missing_library_is_one_actionable_message(run_python, tmp_path):
    """A copy of the package without its compiled part."""
    package = tmp_path / "bitsparse"
    package.mkdir()
    for source in Path(bitsparse.__file__).parent.glob("*.py"):
        (package / source.name).write_bytes(source.read_bytes())
    code = "import bitsparse"
    with pytest.raises(AssertionError, match=r"ImportError: bitsparse's compiled module is missing.*pip install"):
        run_python("-c", code, path=tmp_path, cwd=tmp_path)
    (package / "_C.so").write_bytes(b"not a library")
    with pytest.raises(
        AssertionError, match=r"ImportError: bitsparse's compiled library does not load with torch.*pip install"
    ):
        run_python("-c", code, path=tmp_path, cwd=tmp_path)
    with pytest.raises(AssertionError, match=r"bitsparse is not usable: .*pip install"):
        run_python("-m", "bitsparse.info", path=tmp_path, cwd=tmp_path)


def test_info_prints_versions_and_what_is_usable(run_python):
    lines = dict(re.split(r":\s+", line, maxsplit=1) for line in run_python("-m", "bitsparse.info").splitlines())
    assert lines["bitsparse"].startswith(bitsparse.__version__)
    assert lines["torch"] == f"built with {_C.build_info()['torch']}, running {torch.__version__}"
    assert lines["CUDA"].endswith(f"torch runs {torch.version.cuda or 'none'}")
    assert lines["CPU tensors"].startswith("usable")
    usable = torch.cuda.is_available() and _C.build_info()["cuda"] is not None
    assert re.match("usable$" if usable else "not usable: .+", lines["CUDA tensors"])


def test_info_as_json(run_python):
    content = json.loads(run_python("-m", "bitsparse.info", "--json"))
    assert content["bitsparse"] == bitsparse.__version__
    assert content["build"] == _C.build_info()
    assert content["usable"]["cpu"] is True
    assert content["usable"]["cuda"] == ("cuda" not in content["reasons"])


@pytest.mark.parametrize(
    ("architectures", "capability", "runs"),
    [
        (["sm_90"], (9, 0), True),
        (["sm_80"], (8, 9), True),
        (["sm_89"], (8, 0), False),
        (["sm_90"], (10, 0), False),
        (["sm_90", "compute_90"], (12, 0), True),
        (["compute_90"], (8, 0), False),
        (["sm_90a"], (9, 0), True),
        (["sm_90a", "compute_90a"], (10, 0), False),
        (["sm_80", "sm_120"], (12, 1), True),
        ([], (9, 0), False),
    ],
)
def test_which_gpus_compiled_code_runs_on(architectures, capability, runs):
    assert info.runs_on(architectures, capability) is runs


def test_what_is_said_of_gpus():
    content = info.collect()
    gpu = {"name": "A GPU", "memory_bytes": 80 << 30, "usable": True, "fused_products": False}
    content["gpus"] = [
        {**gpu, "device": "cuda:0", "architecture": "sm_80"},
        {**gpu, "device": "cuda:1", "architecture": "sm_90", "fused_products": True},
        {**gpu, "device": "cuda:2", "architecture": "sm_75", "usable": False},
    ]
    lines = dict(re.split(r":\s+", line, maxsplit=1) for line in info._describe(content).splitlines())
    assert lines["cuda:0"] == "A GPU, sm_80, 80 GiB"
    assert lines["cuda:1"] == "A GPU, sm_90, 80 GiB, fused products"
    assert lines["cuda:2"] == "A GPU, sm_75, 80 GiB, not usable"


def test_reason_why_cuda_is_not_usable(monkeypatch):
    build = {"cuda": "13.0", "architectures": ["sm_90"]}
    gpu = {"architecture": "sm_80", "usable": False}
    assert "built without CUDA" in info._cuda_problem({**build, "cuda": None}, [gpu], None)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert info._cuda_problem(build, [], None) == "torch sees no GPU (no NVIDIA driver was found)"
    assert "compiled for sm_90, but the GPU is sm_80" in info._cuda_problem(build, [gpu], "580.1")
    assert info._cuda_problem(build, [{**gpu, "usable": True}], "580.1") is None
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert "built with CUDA 13.0, but torch runs CUDA 12.8" in info._cuda_problem(build, [gpu], "580.1")
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "CPU-only" in info._cuda_problem(build, [], None)
