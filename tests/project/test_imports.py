import subprocess
import sys

import pytest

HEAVY = ("torch", "matplotlib", "pandas", "sklearn", "seaborn")


def modules_loaded_by(statement):
    code = f"{statement}\nimport sys\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize("module", ["rmetric", "rmetric.logs"])
def test_the_core_loads_nothing_heavy(module):
    loaded = modules_loaded_by(f"import {module}")
    assert module in loaded
    assert loaded.isdisjoint(HEAVY)


@pytest.mark.long
@pytest.mark.parametrize("module", ["rmetric.evaluation", "rmetric.reporting.replay_report"])
def test_pandas_and_seaborn_are_loaded_by_what_needs_them_alone(module):
    assert modules_loaded_by(f"import {module}").isdisjoint({"pandas", "seaborn"})
