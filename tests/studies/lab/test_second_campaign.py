"""The second set: every axis trains and repeats, design and archives are what was sealed."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the laboratory trains with torch")
pytest.importorskip("transformers", reason="the laboratory's models are those of transformers")

from rmetric.readers.archive import read_runs, run_to_line  # noqa: E402
from studies.fault_lab import __main__ as run_fault_lab  # noqa: E402
from studies.fault_lab import second_campaign  # noqa: E402
from studies.fault_lab.branches import new_training, take_step, train_seed  # noqa: E402
from studies.fault_lab.campaign import by_seed, describe  # noqa: E402
from studies.fault_lab.corpus import corpus  # noqa: E402
from studies.fault_lab.design import DESIGN, campaign  # noqa: E402
from studies.fault_lab.faults import FAULTS  # noqa: E402
from studies.fault_lab.models import ARCHITECTURES, FlatModel  # noqa: E402
from studies.fault_lab.optimizers import Weights, muon, orthogonal, sgd  # noqa: E402
from studies.fault_lab.outcome import Definitions  # noqa: E402
from studies.fault_lab.spec import AXES, LabSpec, config_of, entries_of  # noqa: E402
from studies.fault_lab.training import schedule  # noqa: E402
from tests.studies.lab.training import branch, control  # noqa: E402

ROOT = Path(__file__).resolve().parents[3]
LOGS = ROOT / "studies/fault_lab/data"
CHANGES = [
    {"size": "small"},
    {"context": 128},
    {"optimizer": "muon"},
    {"optimizer": "sgd", "peak_rate": 0.1},
    {"restarts": 2},
    {"text": "documentation"},
]


# -- the axes


@pytest.mark.parametrize("changes", CHANGES, ids=str)
def test_each_axis_trains_and_gives_the_same_bytes_again(changes):
    base = replace(control(steps=60), **changes)
    specs = [base, branch(base, "INFINITE_GRADIENT", onset=58)]
    first, again = ([run_to_line(run) for run in train_seed(specs)] for _ in range(2))
    assert first == again
    run = next(train_seed([base]))
    assert run.records[-1].training_loss < run.records[0].training_loss - 0.5
    assert [record.learning_rate for record in run.records] == [
        float(f"{base.peak_rate * schedule(step, 60, base.restarts):.6g}") for step in range(1, 61)
    ]
    named = {name: value for name, value in changes.items() if name in AXES}
    assert named.items() <= run.config.items()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("optimizer", ["muon", "sgd"])
def test_every_optimiser_trains_every_architecture(architecture, optimizer):
    rate = {"muon": 4e-3, "sgd": 0.1}[optimizer]
    spec = replace(control(architecture, steps=60), optimizer=optimizer, peak_rate=rate)
    training = new_training(spec)
    losses = [take_step(training).training_loss for _ in range(25)]
    assert np.mean(losses[-5:]) < losses[0] - 0.5


@pytest.mark.parametrize("optimizer", ["muon", "sgd"])
def test_a_branch_under_another_optimiser_leaves_its_twins_exact_state(optimizer):
    base = replace(control("mixtral"), optimizer=optimizer)
    twin, same = train_seed([base, branch(base, "GRADIENT_SCALE", severity=1.0)])
    assert same.records == twin.records


@pytest.mark.parametrize(
    ("size", "millions"), [("tiny", "0.16"), ("small", "0.46"), ("large", "1.95")]
)
def test_the_sizes_are_those_of_the_page(size, millions):
    for architecture in ARCHITECTURES:
        number = len(FlatModel(architecture, 0, size).weights_N) / 1e6
        assert number == pytest.approx(float(millions), abs=0.011)


def test_muon_is_that_of_torch():
    """Theirs iterates in bfloat16, so its directions agree to a few percent."""
    theirs = getattr(torch.optim, "Muon", None)
    if theirs is None:
        pytest.skip("this torch has no Muon")
    generator = torch.Generator().manual_seed(0)
    for shape in ((24, 40), (40, 24)):
        start, *gradients = torch.randn(4, *shape, generator=generator)
        plain = start.clone().requires_grad_()
        optimizer = theirs(
            [plain], lr=0.01, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw"
        )
        ours = start.clone()
        first, second_moment = torch.zeros(2, *shape)
        for gradient in gradients:
            plain.grad = gradient.clone()
            optimizer.step()
            muon(Weights(ours, first, second_moment, gradient, torch.ones(shape)), 0.01)
        moved = torch.linalg.norm(plain.detach() - start)
        assert torch.linalg.norm(ours - plain.detach()) < 0.02 * moved


def test_a_stack_of_experts_is_orthogonalised_one_by_one():
    stack = torch.randn(3, 8, 5, generator=torch.Generator().manual_seed(0))
    for expert, alone in zip(orthogonal(stack), map(orthogonal, stack), strict=True):
        assert torch.allclose(expert, alone, atol=1e-5)
    sizes = torch.linalg.svdvals(orthogonal(stack))
    assert 0.5 < float(sizes.min()) < float(sizes.max()) < 1.3


def test_sgd_is_that_of_torch():
    start, *gradients = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    plain = start.clone().requires_grad_()
    optimizer = torch.optim.SGD([plain], lr=0.3, momentum=0.9, weight_decay=1e-4)
    ours = start.clone()
    first, second_moment = torch.zeros(2, 50)
    for gradient in gradients:
        plain.grad = gradient.clone()
        optimizer.step()
        sgd(Weights(ours, first, second_moment, gradient, torch.ones(50)), 0.3)
    assert torch.allclose(ours, plain.detach(), atol=1e-6)


def test_a_restart_is_a_jump_to_the_peak():
    rates = [schedule(step, 400, restarts=2) for step in range(1, 401)]
    peaks = [step for step, rate in enumerate(rates, start=1) if rate == 1.0]
    assert peaks == [40, 160, 280]
    assert rates[158] == pytest.approx(0.1, abs=1e-3)
    assert rates[-1] == pytest.approx(0.1)


def test_a_longer_context_can_be_doubled_as_planned():
    base = replace(control(steps=4), context=128)
    _, longer = train_seed([base, branch(base, "SEQUENCE_LENGTH", severity=2.0, onset=3)])
    assert len(longer.records) == 4
    training = new_training(base)
    assert training.batch(1, training.settings(1)).tokens_WBT.shape == (4, 2, 128)


def test_the_documentation_is_english_and_shifts_to_sources():
    text = corpus("documentation")
    assert b"The standard type hierarchy" in text.home.tobytes() + text.held_out.tobytes()
    assert b"def " in text.other[:100_000].tobytes()


@pytest.mark.parametrize("name", ["SECOND_MOMENT_ZEROED", "BETA_FAULT"])
@pytest.mark.parametrize("optimizer", ["muon", "sgd"])
def test_a_fault_of_second_moments_needs_adamw(name, optimizer):
    base = replace(control(), optimizer=optimizer)
    with pytest.raises(ValueError, match=f"{name} acts on adamw only, not on {optimizer}"):
        branch(base, name)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"size": "huge"}, "unknown size 'huge': known are tiny, small, large"),
        ({"optimizer": "lion"}, "unknown optimizer 'lion': known are adamw, muon, sgd"),
        ({"context": 1}, "context is 1"),
        ({"restarts": -1}, "restarts is -1"),
        ({"restarts": 2, "total_steps": 42}, "restarts is 2"),
    ],
)
def test_an_axis_that_makes_no_sense_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        LabSpec(**dict(run_id="x", seed=1, architecture="llama", text="generated") | changes)


def test_the_first_sets_runs_are_described_as_before():
    spec = campaign()[0]
    assert not set(AXES) & set(entries_of(spec))
    assert not set(AXES) & set(config_of(spec, ""))
    assert entries_of(replace(spec, restarts=1)) == entries_of(spec) | {"restarts": 1}


# -- the design


def test_the_second_set_has_every_fault_in_both_parts():
    specs = second_campaign.second_campaign()
    assert len({spec.run_id for spec in specs}) == len(specs)
    for part, (num_controls, num_faults, num_benign) in second_campaign.PARTS.items():
        runs = [spec for spec in specs if spec.split == part]
        assert sum(spec.fault is None for spec in runs) == num_controls
        cells = Counter(spec.fault for spec in runs if spec.fault)
        assert set(cells) == set(DESIGN)
        for name, number in cells.items():
            assert number == (num_benign if FAULTS[name].benign else num_faults)
        mild = {(s.fault, s.severity) for s in runs} & {
            (name, float(FAULTS[name].severities[0])) for name in DESIGN
        }
        assert len(mild) > 20
    parts = Counter(spec.split for spec in specs)
    assert parts["sealed2"] > 1.4 * parts["training2"]


def test_the_second_sets_controls_cover_the_axes():
    controls = [spec for spec in second_campaign.second_campaign() if spec.fault is None]
    assert min(spec.seed for spec in controls) == 1000
    assert len({spec.seed for spec in controls}) == len(controls)
    sealed = [spec for spec in controls if spec.split == "sealed2"]
    assert len(sealed) >= 30
    for part in ("training2", "sealed2"):
        runs = [spec for spec in controls if spec.split == part]
        assert sum(spec.restarts > 0 for spec in runs) >= len(runs) / 5
        assert {spec.optimizer for spec in runs} == {"adamw", "muon", "sgd"}
        assert {spec.size for spec in runs} == {"tiny", "small", "large"}
        assert {spec.context for spec in runs} == {48, 96, 128}
        assert {spec.total_steps for spec in runs} == {400, 800, 1500}
        assert {spec.text for spec in runs} == {"documentation", "generated"}
        assert {spec.architecture for spec in runs} == set(ARCHITECTURES)


def test_a_branch_of_the_second_set_is_its_control_but_for_the_fault():
    for base, *branches in by_seed(second_campaign.second_campaign()):
        assert base.fault is None
        for spec in branches:
            only = ("run_id", "fault", "severity", "onset_step", "duration_steps")
            assert replace(spec, **{name: getattr(base, name) for name in only}) == base
            assert 0.4 * base.total_steps <= spec.onset_step <= 0.7 * base.total_steps


# -- the seal, the command and the archives


def test_the_design_is_the_sealed_one_and_the_archives_are_of_it():
    sealed = json.loads(second_campaign.SEAL.read_bytes())
    specs = second_campaign.second_campaign()
    second_campaign.check_seal(specs, Definitions())
    assert sealed["runs"] == Counter(spec.split for spec in specs)
    manifest = json.loads((LOGS / "manifest.json").read_bytes())["second"]
    assert manifest["specs_sha256"] == sealed["specs_sha256"]
    assert manifest["definitions"] == sealed["definitions"]
    assert {name.split(".")[0]: e["runs"] for name, e in manifest["archives"].items()} == (
        sealed["runs"]
    )
    for name, entry in manifest["archives"].items():
        assert hashlib.sha256((LOGS / name).read_bytes()).hexdigest() == entry["sha256"]
        ids = [spec.run_id for spec in specs if f"{spec.split}.tar.xz" == name]
        assert [run.id for run in read_runs(LOGS / name)] == ids


def few_runs() -> list[LabSpec]:
    base = replace(control(steps=12, seed=1000), split="training2", optimizer="sgd")
    specs = [base, branch(base, "INFINITE_GRADIENT", onset=5)]
    return [*specs, replace(base, run_id="seed1001", seed=1001, split="sealed2")]


def test_the_command_trains_packs_and_counts_what_is_sealed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(second_campaign, "second_campaign", few_runs)
    monkeypatch.setattr(second_campaign, "SEAL", tmp_path / "seal.json")
    archives = tmp_path / "archives"
    places = ["--out", str(tmp_path / "runs"), "--archives", str(archives)]
    options = ["--set", "second", "--jobs", "1", *places]
    assert run_fault_lab.main(options) == 1
    assert "seal.json is missing" in capsys.readouterr().err
    (tmp_path / "seal.json").write_text(json.dumps(describe(few_runs(), Definitions())))
    archives.mkdir()
    (archives / "manifest.json").write_text('{"runs": 524, "archives": {"test.tar.xz": {}}}')
    for _ in range(2):  # the second time nothing is trained
        assert run_fault_lab.main(options) == 0
        said = capsys.readouterr().out
        assert "training2: 1 control not failed, 1 fault failed" in said
        assert "sealed2: 1 control not failed" in said
    manifest = json.loads((archives / "manifest.json").read_bytes())
    assert manifest["runs"] == 524
    assert manifest["archives"] == {"test.tar.xz": {}}
    assert set(manifest["second"]["archives"]) == {"training2.tar.xz", "sealed2.tar.xz"}
    assert manifest["second"]["specs_sha256"] == describe(few_runs(), Definitions())["specs_sha256"]
    monkeypatch.setattr(second_campaign, "second_campaign", lambda: few_runs()[:2])
    assert run_fault_lab.main(options) == 1
    assert "is of another specs_sha256" in capsys.readouterr().err


def test_the_first_sets_command_keeps_the_second_sets_entry(tmp_path):
    archives = tmp_path / "archives"
    archives.mkdir()
    (archives / "manifest.json").write_text('{"runs": 1, "second": {"runs": 297}}')
    options = ["--seeds", "1", "--steps", "6", "--corpus", "generated", "--jobs", "1"]
    options += ["--only", "INFINITE_GRADIENT", "--out", str(tmp_path / "runs")]
    assert run_fault_lab.main([*options, "--archives", str(archives)]) == 0
    manifest = json.loads((archives / "manifest.json").read_bytes())
    assert manifest["second"] == {"runs": 297}
    assert manifest["runs"] == 2


@pytest.mark.parametrize("option", [["--seeds", "3"], ["--only", "LR_SPIKE"], ["--steps", "9"]])
def test_the_second_sets_design_cannot_be_changed_by_options(option, capsys):
    assert run_fault_lab.main(["--set", "second", *option]) == 2
    assert f"{option[0]} is of the first set" in capsys.readouterr().err
