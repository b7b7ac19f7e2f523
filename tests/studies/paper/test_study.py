"""The study: its matrix, its folders, and that no way of stopping it changes a byte."""

import hashlib
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import joblib
import pytest

import run_modern_experiments
import simulator
from rmetric.logs import read_log, run_lines
from rmetric.metric import MODES, RMetricConfig
from rmetric.simulation import ARCHITECTURES, FAULTS, simulate, study
from tests.studies.paper import small_study

ROOT = Path(__file__).resolve().parents[3]
KINDS = list(small_study.NUMBER)
#: Of the 15 logs `*_r00.jsonl` of the emergent study, in the order of their names.
EMERGENT_SHA256 = "0948b02eed49e53b6ab8e21a3b7edf2819411cac24d62da42d2afe5d679b3b3b"


@pytest.fixture(scope="module")
def uninterrupted_of(tmp_path_factory) -> dict[str, dict[str, bytes]]:
    """The logs of a small study of each kind, made at one go."""
    whole = {}
    for kind in KINDS:
        out = tmp_path_factory.mktemp(kind)
        small_study.run_kind(kind, out)
        whole[kind] = small_study.contents(out)
    return whole


def test_the_emergent_recipe_is_the_published_matrix():
    specs = study.emergent_specs()
    assert len(specs) * len(study.RECIPES["emergent"].modes) == 720
    assert len({spec.experiment_id for spec in specs}) == 180
    cells = Counter((spec.architecture, spec.fault) for spec in specs)
    assert set(cells) == {(a, f) for a in ARCHITECTURES for f in study.EMERGENT_FAULTS}
    assert set(cells.values()) == {12}
    assert {(s.num_workers, s.total_steps, s.evaluate_every, s.onset_step) for s in specs} == {
        (8, 5000, 100, 2500)
    }


def test_the_stress_recipe_has_every_fault_at_every_severity_and_random_onsets():
    specs = study.stress_specs()
    assert len({spec.experiment_id for spec in specs}) == len(specs)
    for name, kind in FAULTS.items():
        severities = {spec.severity for spec in specs if spec.fault == name}
        assert severities == set(kind.stress_severities or kind.severities)
    onsets = [spec.onset_step for spec in specs]
    assert len(set(onsets)) > 300
    assert 600 <= min(onsets) <= max(onsets) <= 1400
    assert onsets != [spec.onset_step for spec in study.stress_specs(seed=1)]


def test_a_dask_cluster_changes_no_byte(uninterrupted_of, tmp_path):
    distributed = pytest.importorskip("dask.distributed")
    cluster = distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, dashboard_address=None, host="127.0.0.1"
    )
    with cluster, distributed.Client(cluster) as client:
        backend = joblib.parallel_config(backend="dask", client=client)
        small_study.run(tmp_path, num_processes=-1, backend=backend)
        assert len(client.scheduler_info()["workers"]) == 2
    assert small_study.contents(tmp_path) == uninterrupted_of["emergent"]


@pytest.mark.parametrize("kind", KINDS)
def test_killed_at_any_moment_and_started_again_it_ends_with_the_same_bytes(
    start, kind, uninterrupted_of, tmp_path
):
    uninterrupted = uninterrupted_of[kind]
    command = [sys.executable, "-m", "tests.studies.paper.small_study", kind, str(tmp_path)]
    for seen in (1, 7, 15):
        process = start(command, cwd=ROOT, stderr=subprocess.PIPE)
        deadline = time.monotonic() + 60
        while len(list(tmp_path.rglob("*.jsonl"))) < seen:
            assert process.poll() is None, process.stderr.read().decode()
            assert time.monotonic() < deadline
            time.sleep(0.005)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for name, log in small_study.contents(tmp_path).items():
            assert log == uninterrupted[name]  # no half log under a final name
    assert len(small_study.contents(tmp_path)) < len(uninterrupted)
    small_study.run_kind(kind, tmp_path, processes=2)  # their number changes no byte either
    assert small_study.contents(tmp_path) == uninterrupted
    assert all(part.name.startswith(".") for part in tmp_path.rglob("*.part"))
    for part in tmp_path.rglob("*.part"):
        os.utime(part, (0, 0))  # as the next start finds them a while later
    small_study.run_kind(kind, tmp_path)
    assert not list(tmp_path.rglob("*.part"))


@pytest.mark.parametrize("kind", KINDS)
def test_a_write_that_fails_keeps_what_is_finished(
    kind, uninterrupted_of, tmp_path, capsys, monkeypatch
):
    """The limit on file size stands in for a full disk: writing really fails."""
    uninterrupted = uninterrupted_of[kind]
    sizes = [len(log) for log in uninterrupted.values()]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    recipe = study.Recipe(
        specs=lambda seed: small_study.specs(), modes=small_study.MODES, out=tmp_path
    )
    monkeypatch.setitem(study.RECIPES, "emergent", recipe)
    monkeypatch.setattr(study, "BATCH", 2)
    argv = ["--recipe", kind, "--out", str(tmp_path), "--jobs", "1"]
    argv += ["--limit", str(small_study.NUMBER[kind])]
    resource.setrlimit(resource.RLIMIT_FSIZE, (sorted(sizes)[-3], hard))
    try:
        assert run_modern_experiments.main(argv) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "File too large" in capsys.readouterr().err
    kept = small_study.contents(tmp_path)
    assert all(log == uninterrupted[name] for name, log in kept.items())
    assert not list(tmp_path.rglob("*.part"))
    assert run_modern_experiments.main(argv) == 0
    assert small_study.contents(tmp_path) == uninterrupted


@pytest.mark.parametrize("kind", KINDS)
def test_interrupted_it_says_how_to_go_on_and_exits_130(start, kind, tmp_path):
    command = [sys.executable, "run_modern_experiments.py", "--recipe", kind]
    command += ["--out", str(tmp_path)]
    process = start(command, cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.PIPE)
    errors = b""
    while b"run" not in errors:  # the progress bar stands: the study is under way
        errors += process.stderr.read(1)
    process.send_signal(signal.SIGINT)
    errors += process.communicate(timeout=60)[1]
    assert process.returncode == 130
    assert b"start the same command again" in errors
    assert b"Traceback" not in errors


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_log_is_made_again_and_a_strangers_is_refused(kind, uninterrupted_of, tmp_path):
    small_study.run_kind(kind, tmp_path)
    cut = sorted((tmp_path / "logs_FULL_METRIC").iterdir())[3]
    for end in (-40, -1, 300, 0):
        cut.write_bytes(cut.read_bytes()[:end])
        small_study.run_kind(kind, tmp_path)
        assert small_study.contents(tmp_path) == uninterrupted_of[kind]
    foreign = re.sub(rb'"seed":\d', b'"seed":9', cut.read_bytes())
    (sorted((tmp_path / "logs_FULL_METRIC").iterdir())[0]).unlink()
    for content in (foreign, bytes(9000), b"my notes"):
        cut.write_bytes(content)
        before = small_study.contents(tmp_path)
        with pytest.raises(study.StudyError, match=rf"{cut.name} is the log of another run"):
            small_study.run_kind(kind, tmp_path)
        assert small_study.contents(tmp_path) == before


@pytest.mark.parametrize(("kind", "other"), [KINDS, KINDS[::-1]])
def test_two_studies_do_not_share_a_folder(kind, other, tmp_path, capsys):
    argv = ["--out", str(tmp_path), "--jobs", "1", "--recipe"]
    assert run_modern_experiments.main([*argv, other, "--limit", "1"]) == 0
    before = small_study.contents(tmp_path)
    assert run_modern_experiments.main([*argv, kind, "--limit", "1"]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert f"{len(before)} logs in {tmp_path / 'logs_FULL_METRIC'}" in error
    assert "of another study" in error
    assert Path(next(iter(before))).name in error
    assert small_study.contents(tmp_path) == before


def test_the_emergent_study_writes_the_bytes_that_it_always_wrote():
    """Where this fails on purpose, SIMULATOR_VERSION goes up and the digest is taken anew."""
    runs = simulate([spec for spec in study.emergent_specs() if spec.repetition == 0])
    digest = hashlib.sha256()
    for run in sorted(runs, key=lambda run: run.id):
        digest.update(b"".join(run_lines(run, RMetricConfig.simulation())))
    assert digest.hexdigest() == EMERGENT_SHA256


def test_the_script_runs_for_real_and_says_what_it_left(tmp_path, capsys):
    argv = ["--recipe", "emergent", "--out", str(tmp_path), "--limit", "2", "--jobs", "1"]
    assert run_modern_experiments.main(argv) == 0
    assert "2 runs, 8 logs" in capsys.readouterr().out
    assert {p.name for p in tmp_path.iterdir()} == {f"logs_{mode}" for mode in MODES}
    assert run_modern_experiments.main(argv) == 0
    assert "(2 were there)" in capsys.readouterr().out
    assert run_modern_experiments.main([*argv, "--seed", "5"]) == 1
    assert "another run" in capsys.readouterr().err


def test_an_out_that_cannot_be_written_is_named(tmp_path, capsys):
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    for kind in KINDS:
        argv = ["--recipe", kind, "--out", str(blocked), "--limit", "1"]
        assert run_modern_experiments.main(argv) == 1
        assert str(blocked) in capsys.readouterr().err
    assert simulator.main(["--out", str(blocked / "below"), "--steps", "20"]) == 1
    assert str(blocked) in capsys.readouterr().err


SPIKE = "--architecture Llama-3-8B --fault LR_SPIKE --severity 25 --seed 7 --steps 1000"
CORRUPT = (
    "--dynamics published --fault DATA_CORRUPTION --seed 7 --onset 300 --steps 400"
    " --eval-every 10 --workers 4"
)


@pytest.mark.parametrize(
    ("options", "printed", "other"),
    [
        (SPIKE, ["at step {}"], ["--onset", "300"]),
        (CORRUPT, ["the crash is scripted", "scripted crash at step {}"], ["--mode", "SIGMA_ONLY"]),
    ],
)
def test_simulator_writes_one_log_and_says_what_happened(options, printed, other, tmp_path, capsys):
    argv = [*options.split(), "--out", str(tmp_path)]
    assert simulator.main(argv) == 0
    shown = capsys.readouterr().out
    [path] = tmp_path.iterdir()
    truth = read_log(path).truth
    assert truth.failed
    for words in (*printed, str(path)):
        assert words.format(truth.failure_step) in shown
    before = path.read_bytes()
    assert simulator.main(argv) == 0
    assert path.read_bytes() == before
    assert simulator.main([*argv, *other]) == 1
    assert "is the log of another run" in capsys.readouterr().err
    assert path.read_bytes() == before


ONSET, SCRIPTED = "from 1 to total_steps (5000)", "--dynamics published"
NAMES = "known are Llama-3-8B, Mistral-7B, GPT-4-MoE"


REFUSED = {
    run_modern_experiments: [
        ("--jobs 0", "argument --jobs: '0'"),
        ("--seed -1", "--seed is -1: it must be at least 0"),
        ("--recipe soup", "invalid choice: 'soup'"),
        ("--limit 0", "--limit is 0: at least 1"),
        ("--backend dask", "--backend dask and --scheduler ADDRESS go together"),
        ("--backend dask --scheduler tcp://127.0.0.1:1", "is not for --recipe published"),
    ],
    simulator: [
        (f"{SCRIPTED} --severity 3", "--severity is not for --dynamics published"),
        (f"{SCRIPTED} --fault BAD_BATCH", "known are LR_SPIKE, DATA_CORRUPTION"),
        (f"{SCRIPTED} --seed -1", "seed is -1: it must be at least 0"),
        *((f"{which} --onset 6000", ONSET) for which in ("", SCRIPTED)),
        *((f"{which} --architecture BERT", NAMES) for which in ("", SCRIPTED)),
        *((f"{which} --id ../../escape", "cannot name a file") for which in ("", SCRIPTED)),
        ("--fault FIRE", "known are NONE, EXPERT_FAILURE"),
        ("--severity nan", "severity of LR_SPIKE is nan"),
    ],
}


@pytest.mark.parametrize(
    ("script", "argv", "message"), [(script, *row) for script in REFUSED for row in REFUSED[script]]
)
def test_a_script_refuses_what_cannot_be(script, argv, message, tmp_path, capsys):
    with pytest.raises(SystemExit) as exit_:
        script.main([*argv.split(), "--out", str(tmp_path)])
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
