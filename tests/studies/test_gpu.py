"""The driver of the measurements on a GPU: a part that fails does not end the others."""

import json
import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from studies.case_study.settings import parse_arguments, settings_of
from studies.gpu.__main__ import (
    FEWEST_STEPS,
    MOST_STEPS,
    ROOT,
    SET_UP,
    Part,
    main,
    part_of,
    run_part,
    steps_that_fit,
)
from tests.telemetry.fake_nvml import build, environment_of


def python(code: str, result: str = "x.json") -> Part:
    return Part(["-c", code], result)


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("open({!r}, 'w').write('[1]')", {"measured": [1]}),
        ("raise SystemExit('no memory')",
         {"problem": "exit status 1", "last_lines": ["no memory"]}),
        ("print('nothing')",
         {"problem": "x.json was not written", "last_lines": ["nothing"]}),
    ],
)  # fmt: skip
def test_a_part_gives_its_result_or_its_last_lines(tmp_path, code, found):
    done = run_part(python(code.format(str(tmp_path / "x.json"))), tmp_path, 60.0)
    assert done.pop("seconds") >= 0
    assert done == found


def test_a_part_that_hangs_is_ended(tmp_path):
    done = run_part(python("import time; print('begun', flush=True); time.sleep(600)"), tmp_path, 3)
    assert done["problem"] == "not done after 3 s"


@given(st.floats(1, 1e5), st.floats(1e-4, 100))
def test_the_steps_of_the_twins_are_bounded_and_fit_where_they_can(seconds, a_step):
    steps = steps_that_fit(seconds, a_step)
    assert FEWEST_STEPS <= steps <= MOST_STEPS
    assert steps == FEWEST_STEPS or 2.4 * steps * a_step <= seconds - SET_UP


def test_the_twins_are_those_of_a_t4_and_of_newer_gpus(tmp_path):
    later = {"tiny": False, "steps": 200, "of_twins": ["--onset", "40"]}
    new, old = (part_of(f"twins_{kind}", tmp_path, **later) for kind in ("bf16", "fp16"))
    assert {"--random-weights", "--float16", "--lora"} <= set(old.command)
    assert "--float16" not in new.command
    for part in (new, old):
        assert part.command[-2:] == ["--onset", "40"]
        arguments = parse_arguments(list(part.command[1:]), None)
        assert settings_of(arguments).random_weights


def test_results_are_kept_beside_parts_that_failed(tmp_path, monkeypatch):
    def part(name, out, **options):
        return python("open('x.json')" if name == "good" else "raise SystemExit(3)")

    monkeypatch.setattr("studies.gpu.__main__.part_of", part)
    monkeypatch.setattr("studies.gpu.__main__.SHARES", {"good": 0.1, "bad": 0.1})
    monkeypatch.setattr(sys, "argv", ["gpu"])
    (tmp_path / "results.json").write_text('{"before": {"seconds": 1, "measured": 2}}')
    assert main(["--out", str(tmp_path), "--tiny", "--parts", "bad"]) == 1
    kept = json.loads((tmp_path / "results.json").read_text())
    assert kept["before"]["measured"] == 2
    assert kept["bad"]["problem"] == "exit status 3"
    with pytest.raises(SystemExit):
        main(["--out", str(tmp_path), "--parts", "other"])


@pytest.mark.parametrize("part", ["wrapped", "checkpoints", "rescued", "snapshots"])
def test_a_part_is_measured_in_small_on_a_processor(tmp_path, part):
    done = run_part(part_of(part, tmp_path, tiny=True, steps=FEWEST_STEPS), tmp_path, 600.0)
    assert "problem" not in done, done
    measured = done["measured"]
    if part == "wrapped":
        assert set(measured["wrapped"]) == {"ddp", "fsdp", "compiled"}
        for name, of in measured["wrapped"].items():
            assert of["problem"] is None, name
            assert of["equal"]["without_twice"], name
            assert of["equal"]["with_and_without"], name
    elif part == "checkpoints":
        assert len(measured["saves"]) == 2
        for of in measured["saves"]:
            assert of["bytes"] > 3 * 4 * 5e6, "weights and both moments"
            assert 0 < of["durable_seconds"] <= of["good_seconds"]
    elif part == "snapshots":
        assert measured["models"]["tiny"]["snapshots_kept"] == 5
        assert measured["models"]["tiny"]["median_snapshot_seconds"] > 0
    else:
        assert [d["action"] for d in measured["decisions"]] == ["go_back", "go_back"]
        loss = {key: measured[key]["held_out_loss"] for key in ("noise_alone", "rescued")}
        assert loss["rescued"] < loss["noise_alone"]


def test_verdicts_on_an_idle_and_a_working_gpu(tmp_path):
    part = part_of("nvml", tmp_path, tiny=True, steps=FEWEST_STEPS)
    around = os.environ | environment_of(build(tmp_path), [], 1)
    subprocess.run([sys.executable, *part.command], cwd=ROOT, env=around, check=True, timeout=60)
    measured = json.loads((tmp_path / part.result).read_text())
    assert measured["cost"]["cpu_seconds"] > 0
    for state in ("idle", "busy"):
        assert measured[state]["verdicts"]["0"]["level"] == "healthy"
        assert measured[state]["readings"]["0"]["fields"]["power_limit_watts"] == 700.0
        assert "retired_pages" in measured[state]["readings"]["0"]["not_answered"]
