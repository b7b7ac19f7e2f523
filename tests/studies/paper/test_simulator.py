"""The figure of docs/simulator.md, from fewer and shorter runs than the real one."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from rmetric.reporting.style import TEXT_WIDTH

SCRIPT = Path(__file__).resolve().parents[3] / "docs" / "make_simulator_figure.py"


@pytest.fixture(scope="module")
def script():
    specification = importlib.util.spec_from_file_location("make_simulator_figure", SCRIPT)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    module.REPETITIONS, module.ONSET, module.STEPS = 1, 150, 300
    module.MULTIPLES, module.WORKERS, module.SETTLED = (1, 40), (2, 32), 100
    return module


def test_the_script_draws_the_figure(script, tmp_path):
    assert script.main(["--out", str(tmp_path / "new")]) == 0
    with Image.open(tmp_path / "new" / "simulator.png") as image:
        assert image.width == pytest.approx(300 * TEXT_WIDTH, abs=1)
        assert "Software" not in image.info


@given(st.floats(0.1, 1000), st.floats(0.05, 2))
def test_the_fit_finds_the_power_it_is_shown(script, coefficient, exponent):
    tokens = np.geomspace(1e6, 1e10, 50)
    found = script.power_law(tokens, coefficient / tokens**exponent)
    assert found == pytest.approx((coefficient, exponent), rel=1e-6)
