"""The report of `rmetric doctor`."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest

from rmetric._util import __version__
from rmetric.cli import doctor
from rmetric.cli.main import main


def torch_of(gpus: int, cuda: str | None = "12.8") -> SimpleNamespace:
    """As much of torch as the report reads."""
    return SimpleNamespace(
        version=SimpleNamespace(cuda=cuda, hip=None),
        cuda=SimpleNamespace(
            device_count=lambda: gpus,
            get_device_name=lambda gpu: "H100",
            nccl=SimpleNamespace(version=lambda: (2, 27, 3)),
        ),
        distributed=SimpleNamespace(is_nccl_available=lambda: True),
    )


@pytest.fixture
def examined(monkeypatch):
    monkeypatch.setattr(doctor, "DRIVER_SECONDS", 0.2)

    def examine(torch):
        monkeypatch.setattr(doctor, "import_module", lambda name: torch)
        return doctor.examine()

    return examine


def test_the_report_has_versions_extras_and_permissions(capsys, monkeypatch):
    monkeypatch.setattr(doctor, "DRIVER_SECONDS", 0.2)
    found_module = doctor.find_spec
    monkeypatch.setattr(
        doctor, "find_spec", lambda name: None if name == "psutil" else found_module(name)
    )
    code = main(["doctor", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert (code == 0) == (found["problems"] == [])
    assert found["rmetric"]["version"] == __version__
    assert found["packages"]["numpy"] == np.__version__
    assert found["extras"]["guard"] == "lacks psutil"
    assert found["permissions"].keys() >= {"kernel log", "shared memory"}
    main(["doctor"])
    lines = capsys.readouterr().out.splitlines()
    assert f"rmetric      version {__version__}" in lines
    assert "extras       guard lacks psutil" in lines


def test_a_torch_that_sees_no_gpu_it_is_built_for_is_a_problem(examined, capsys):
    assert examined(torch_of(gpus=0))["problems"] == [
        "torch is built for CUDA 12.8 and sees no GPU"
    ]
    assert main(["doctor"]) == 1
    assert "problems     torch is built for CUDA 12.8 and sees no GPU" in capsys.readouterr().out
    assert examined(torch_of(gpus=0, cuda=None))["problems"] == []
    found = examined(torch_of(gpus=2))
    assert found["problems"] == []
    assert found["torch"] == {
        "built for": "CUDA 12.8", "GPUs": "2 H100", "backends": "nccl", "NCCL": "2.27.3"
    }  # fmt: skip


def test_a_torch_that_cannot_be_imported_is_a_problem(examined):
    [problem] = examined(None)["problems"]
    assert problem.startswith("torch cannot be imported: AttributeError")
