"""The base installation is light, an extra is a range, and exact versions stand in one file."""

import re
import subprocess
import sys
from itertools import chain
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from rmetric._util import lazy

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
#: What requirements.txt must have, whatever the base installation has.
EVERYTHING = {
    *("numpy", "pandas", "scipy", "scikit-learn", "matplotlib", "seaborn", "graphviz"),
    *("torch", "transformers", "datasets", "nvidia-ml-py", "tqdm"),
}


def requirements(lines):
    return {entry.name: entry for entry in map(Requirement, lines)}


def of_file(name):
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    return requirements(line for line in lines if line and line[0] not in "#-")


def given():
    """Every requirement of the project, by name; the base and the extras agree on a range."""
    found = {}
    for line in chain(PROJECT["dependencies"], *EXTRAS.values()):
        entry = Requirement(line)
        if entry.name != "rmetric":
            first = found.setdefault(entry.name, entry)
            assert first.specifier == entry.specifier, entry
    return found


def is_exact(entry):
    return any(specifier.operator == "==" for specifier in entry.specifier)


def test_exact_versions_stand_in_the_constraints_alone():
    assert [str(entry) for entry in given().values() if is_exact(entry)] == []
    assert [str(entry) for entry in of_file("requirements.txt").values() if is_exact(entry)] == []
    constraints = of_file("constraints.txt")
    assert all(is_exact(entry) for entry in constraints.values())
    for name, entry in constraints.items():
        [exact] = entry.specifier
        assert exact.version in given()[name].specifier, entry


def test_requirements_have_everything_with_the_projects_ranges_and_the_constraints():
    everything = of_file("requirements.txt")
    assert everything.keys() >= EVERYTHING
    assert everything.keys() >= requirements(PROJECT["dependencies"]).keys()
    for name, entry in everything.items():
        assert entry.specifier == given()[name].specifier, entry
    assert "\n-c constraints.txt\n" in (ROOT / "requirements.txt").read_text(encoding="utf-8")
    assert '"--constraint", "constraints.txt"' in (ROOT / "tasks.py").read_text(encoding="utf-8")


def test_an_installed_torch_and_transformers_may_stay():
    live = requirements(EXTRAS["live"])
    for version in ("2.6.0", "2.13.0", "2.15.0"):
        assert version in live["torch"].specifier
    for version in ("4.50.0", "4.57.6", "5.23.0"):
        assert version in live["transformers"].specifier


#: Module -> its package, where the names differ.
PACKAGES = {"sklearn": "scikit-learn", "pynvml": "nvidia-ml-py", "yaml": "pyyaml"}


@pytest.mark.parametrize("extra", lazy.EXTRAS)
def test_an_extra_has_the_packages_that_its_hint_promises(extra):
    offered = requirements(EXTRAS[extra]).keys()
    for module in lazy.EXTRAS[extra].split():
        assert PACKAGES.get(module, module.replace("_", "-")) in offered
        assert lazy.install_hint(f"{module}.part") == f'pip install "rmetric[{extra}]"'
    assert lazy.install_hint("numpy") == ""


#: Left out of the base installation, and an object that needs it -> the extra that is named.
WITHOUT = {
    "pandas": ("from rmetric.records import records_to_frame as f; f([])", "study"),
    "scipy": ("from rmetric._util.lazy import needed as f; f('scipy.stats')", "study"),
    "matplotlib": ("from rmetric.reporting import replay_logs as f; f([], None)", "plot"),
    "sklearn": ("from rmetric._util.lazy import needed as f; f('sklearn.ensemble')", "diagnosis"),
    "dtaidistance": ("from rmetric import diagnose; diagnose('here')", "diagnosis"),
    "torch": ("import rmetric; rmetric.Monitor", "live"),
}


@pytest.mark.parametrize("missing", WITHOUT)
def test_what_needs_an_extra_names_it(missing):
    statement, extra = WITHOUT[missing]
    code = f"import sys\nsys.modules[{missing!r}] = None\n{statement}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert re.search(
        rf'{missing}(, which)? is not installed: pip install "rmetric\[{extra}\]"', last
    ), last
