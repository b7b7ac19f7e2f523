"""The public interface: what `import rmetric` and each package offer, and at what cost."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

import rmetric

ROOT = Path(rmetric.__file__).resolve().parents[1]
#: A name here is a promise to users: removing one breaks their code.
PUBLIC = {
    "DETECTORS", "CalibratedDetector", "Guard", "GuardCallback", "HardwareEvent",
    "HuggingFaceCallback", "LightningCallback", "Monitor", "MonitorConfig", "RMetric",
    "RMetricConfig", "Record", "Rescue", "Run", "RunSpec", "Truth", "__version__", "diagnose",
    "evaluate", "make_detector", "read_log", "simulate",
}  # fmt: skip
#: Packages -> objects that a reader of the documents looks for in them.
EXPORTS = {
    "rmetric.detectors": {"CalibratedDetector", "DETECTORS", "Detector", "make_detector"},
    "rmetric.diagnosis": {"Diagnosis", "Pool", "diagnose"},
    "rmetric.evaluation": {"PROTOCOLS", "Scores", "evaluate", "read_study"},
    "rmetric.guard": {"Checkpoints", "Guard", "PolicyConfig", "plan"},
    "rmetric.monitor": {"Alert", "Monitor", "MonitorConfig", "Verdict"},
    "rmetric.readers": {"find_logs", "open_log", "read_log"},
    "rmetric.reporting": {"plot_run", "replay_logs"},
    "rmetric.rescue": {"Rescue", "RescueConfig"},
    "rmetric.signals": {"FailureRate", "GradientVariance", "LossDrift"},
    "rmetric.simulation": {"ARCHITECTURES", "FAULTS", "RunSpec", "simulate"},
    "rmetric.telemetry": {"GpuWatch", "NvmlEvents", "RiskScore"},
}
NEED_TORCH = {"Checkpoints", "Guard", "ModelState", "Monitor", "Rescue"}
HEAVY = {"torch", "pandas", "matplotlib", "sklearn", "seaborn", "scipy", "numpy"}
MOST_SECONDS = 0.150


def get(package: str, name: str) -> object:
    if name in NEED_TORCH or name.endswith("Callback"):
        pytest.importorskip("torch")
    if name.endswith("Callback"):
        pytest.importorskip("lightning" if name.startswith("Lightning") else "transformers")
    return getattr(importlib.import_module(package), name)


def test_the_list_of_public_names():
    assert set(rmetric.__all__) == PUBLIC
    assert set(dir(rmetric)) >= PUBLIC


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_every_public_name_is_there_and_documented(name):
    value = get("rmetric", name)
    if inspect.isclass(value) or inspect.isfunction(value):
        assert value.__name__ == name
        assert inspect.getdoc(value)
    if inspect.isfunction(value):
        text = inspect.getdoc(value)
        for section in ("Args:", "Returns:", "Raises:"):
            assert section in text, f"{name}: {section}"
        for parameter in inspect.signature(value).parameters:
            assert re.search(rf"^    {parameter}: ", text, re.MULTILINE), f"{name}: {parameter}"


@pytest.mark.parametrize("package", sorted(EXPORTS))
def test_each_package_exports_its_objects(package):
    module = importlib.import_module(package)
    assert set(module.__all__) >= EXPORTS[package]
    for name in module.__all__:
        assert get(package, name) is not None
        assert name in dir(module)


@pytest.mark.parametrize("name", sorted(PUBLIC - {"__version__"}))
def test_the_reference_has_every_public_name(name):
    reference = (ROOT / "docs/api.md").read_text(encoding="utf-8")
    assert re.search(rf"\b{name}\b", reference)


def lazy_faces() -> list[Path]:
    paths = sorted((ROOT / "rmetric").rglob("__init__.py"))
    return [path for path in paths if "= lazy(" in path.read_text(encoding="utf-8")]


@pytest.mark.parametrize("path", lazy_faces(), ids=lambda path: path.parent.name)
def test_type_checkers_and_the_interpreter_see_the_same_names(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    [branch] = [node for node in tree.body if isinstance(node, ast.If)]
    assert ast.unparse(branch.test) == "TYPE_CHECKING"
    typed = {
        alias.name: node.module
        for node in branch.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    [table] = [node for node in ast.walk(branch) if isinstance(node, ast.Dict)]
    offered = {
        name: module for module, names in ast.literal_eval(table).items() for name in names.split()
    }
    assert offered == typed
    module = ".".join(path.parent.relative_to(ROOT).parts)
    assert offered.keys() <= set(importlib.import_module(module).__all__)


def test_a_name_that_is_not_offered_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Metric'"):
        rmetric.Metric  # noqa: B018
    assert not hasattr(rmetric, "monitors")


def seconds(code: str) -> float:
    """The median over some fresh processes; the first fills the caches and does not count."""
    measured = []
    for _ in range(6):
        began = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True)
        measured.append(time.perf_counter() - began)
    return statistics.median(measured[1:])


def test_import_is_quick():
    assert seconds("import rmetric") - seconds("pass") < MOST_SECONDS


@pytest.mark.parametrize(
    ("statement", "heavy"),
    [
        ("import rmetric; dir(rmetric)", HEAVY),
        ("import rmetric.logs", HEAVY - {"numpy"}),
        ("import rmetric.evaluation", {"pandas", "seaborn"}),
        ("import rmetric.reporting.replay_report", {"pandas", "seaborn"}),
    ],
)
def test_an_import_loads_nothing_heavy(statement, heavy):
    code = f"{statement}\nimport sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "rmetric" in done.stdout.split()
    assert heavy.isdisjoint(done.stdout.split())


def test_the_version_by_command_and_by_attribute():
    done = subprocess.run(
        [sys.executable, "-m", "rmetric", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"rmetric {rmetric.__version__}\n"


def test_a_detector_by_its_name_or_class_has_the_scores_of_its_traces():
    from rmetric.evaluation import trace_all

    specs = [
        rmetric.RunSpec(experiment_id=f"run_{i}", architecture="Llama-3-8B", total_steps=600,
                        fault=("NONE", "LR_SPIKE")[i % 2], onset_step=300)
        for i in range(4)
    ]  # fmt: skip
    runs = rmetric.simulate(specs)
    by_name = rmetric.evaluate(runs, "calibrated")
    assert by_name == rmetric.evaluate(runs, rmetric.CalibratedDetector)
    assert by_name == rmetric.evaluate(runs, trace_all("calibrated", runs), "causal")
    assert by_name.num_runs == 4
