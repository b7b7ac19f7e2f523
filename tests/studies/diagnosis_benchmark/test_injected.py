"""Injected faults: small worlds that really fail as their plan says."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from studies.diagnosis_benchmark.injected.__main__ import main
from studies.diagnosis_benchmark.injected.plan import KINDS, SIBLINGS, SPLIT, SPLITS, Plan, plans
from studies.diagnosis_benchmark.injected.variants import VARIANTS

pytest.importorskip("torch")
if not Path("/proc/self/fd").exists():
    pytest.skip("needs Linux' /proc", allow_module_level=True)

#: Makes the jobs of a small plan that are named on the command line, then interrupts the first
#: and makes what is missing; in a process of its own, for forks of pytest's would carry its
#: threads along.
MAKE = """
import sys
from pathlib import Path
from studies.diagnosis_benchmark.injected.generate import generate
from studies.diagnosis_benchmark.injected.plan import plans
out, wanted = Path(sys.argv[1]), sys.argv[2:]
planned = plans(jobs=64, ranks=(4, 4)) + plans(jobs=64, ranks=(4, 4), splits=("blind",))
jobs = [one for one in planned if f"{one.split}/{one.name}" in wanted]
first = generate(jobs, out)
plan = jobs[0]
(out / plan.split / plan.name / "manifest.json").unlink()
(out / plan.split / f".{plan.name}.partial" / "logs").mkdir(parents=True)
print(first, generate(jobs, out))
"""
SMALL = plans(jobs=64, ranks=(4, 4)) + plans(jobs=64, ranks=(4, 4), splits=("blind",))


def key(plan: Plan) -> str:
    return f"{plan.split}/{plan.name}"


def first_of(kind: str, variant: str = "") -> Plan:
    return next(one for one in SMALL if one.kind == kind and variant in ("", one.variant))


QUICK = [
    first_of("healthy"), first_of("exception"), first_of("kill"), first_of("data"),
    first_of("memory"), first_of("network"), first_of("environment", "wrong version"),
    first_of("hang", "other order"), first_of("process", "bus error"),
    first_of("storage", "bad disk"), first_of("skew", "frozen layer"),
    first_of("limits", "threads"),
    # Checked before it is reduced, so that no launcher ends the rank before it speaks.
    next(one for one in SMALL
         if one.variant == "infinite gradient" and one.settings.gradient_check),
]  # fmt: skip
#: Exit codes of the faulty rank that are not 1; SIGABRT ends a process in which gloo meets a
#: collective of another size.
CODES = {"kill": {-9}, "hang": {-6}, "process": {-7}, "skew": {1, -6, -15}}


def make(out: Path, wanted: list[Plan]) -> str:
    command = [sys.executable, "-c", MAKE, str(out), *map(key, wanted)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("injected")
    (out / "said.txt").write_text(make(out, QUICK))
    return out


def manifest(out: Path, plan: Plan) -> dict[str, Any]:
    return json.loads((out / key(plan) / "manifest.json").read_text())


def labelled(out: Path, plan: Plan, role: str) -> list[str]:
    folder = out / key(plan) / "logs"
    return [
        (folder / one["file"]).read_text().split("\n")[one["line"] - 1]
        for one in manifest(out, plan)["labels"]
        if one["role"] == role
    ]


def test_the_split_is_the_draw_that_it_says_it_is() -> None:
    order = np.random.default_rng(6).permutation(SPLIT["kinds"]).tolist()
    assert SPLIT["development"] == sorted(order[:4])
    assert SPLIT["test"] == sorted(order[4:])
    assert sorted(VARIANTS) == KINDS == sorted(SPLIT["kinds"] + SPLIT["blind"])
    assert all(len(VARIANTS[kind]) >= 3 for kind in SPLIT["blind"])


@given(st.integers(0, 2**20), st.integers(8, 80))
@settings(max_examples=20, deadline=None)
def test_plans_follow_from_the_seed_and_keep_the_splits_apart(seed: int, jobs: int) -> None:
    made = plans(jobs=jobs, seed=seed, splits=SPLITS)
    assert fingerprints(made) == fingerprints(plans(jobs=jobs, seed=seed, splits=SPLITS))
    judged = [one for one in made if one.part == "judged"]
    assert len(judged) == jobs
    assert {one.split for one in made if one.settings.addresses} == {"blind"}
    for one in made:
        assert 16 <= one.settings.world_size <= 64
        if one.faulty:
            assert one.kind in SPLIT[one.split]
            assert one.rank is not None
            assert 0 < one.rank < one.settings.world_size
            assert one.step is None or 0 < one.step <= one.settings.steps
    groups = {(one.split, one.group) for one in made}
    for split, group in groups:
        siblings = [one for one in made if (one.split, one.group) == (split, group)]
        assert sum(one.part == "sibling" for one in siblings) == SIBLINGS
        assert len({one.settings for one in siblings}) == 1


def fingerprints(of: list[Plan]) -> list[str]:
    return [one.fingerprint() for one in of]


def test_plans_of_the_first_splits_stay_as_they_were() -> None:
    """Jobs that were made before a setting was added are known again."""
    whole = "".join(fingerprints(plans(jobs=240)))
    assert hashlib.sha256(whole.encode()).hexdigest()[:16] == "c88ed5ec31626aa5"
    assert "addresses" not in plans(jobs=8)[0].as_json()["settings"]


@pytest.mark.parametrize(
    ("splits", "number", "kinds"),
    [(SPLITS[:2], 240, SPLIT["kinds"]), (("blind",), 96, SPLIT["blind"])],
)
def test_all_variants_are_planned_and_one_job_of_four_is_healthy(
    splits: tuple[str, ...], number: int, kinds: list[str]
) -> None:
    judged = [one for one in plans(jobs=number, splits=splits) if one.part == "judged"]
    faulty = [one for one in judged if one.faulty]
    assert len(faulty) == 0.75 * number
    variants = {variant.name for kind in kinds for variant in VARIANTS[kind]}
    assert {one.variant for one in faulty} == variants
    sizes = [one.settings.world_size for one in judged]
    assert 0.4 < sum(size == 16 for size in sizes) / len(sizes) < 0.6
    assert sum(size > 32 for size in sizes) / len(sizes) < 0.2
    if splits == ("blind",):
        for kind in kinds:
            assert len({one.group for one in faulty if one.kind == kind}) >= 5
        for settings_ in {one.settings for one in judged}:
            of_nodes = {settings_.address(rank) for rank in range(settings_.world_size)}
            assert len(of_nodes) == settings_.nodes
            assert settings_.address(0) == "127.0.0.10"


BOUND = """
import sys
from pathlib import Path
import torch.distributed as dist
from torch.distributed import ProcessGroupGloo, distributed_c10d
from studies.diagnosis_benchmark.injected.trainer import bound_to
with bound_to(sys.argv[1]):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
assert distributed_c10d.ProcessGroupGloo is ProcessGroupGloo
print(Path("/proc/net/tcp").read_text())
"""


def test_gloo_listens_at_the_address_of_its_node() -> None:
    command = [sys.executable, "-c", BOUND, "127.0.0.217"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    # Little endian, as the kernel writes it; 0A is a socket that listens.
    assert re.search(r": D900007F:[0-9A-F]{4} 00000000:0000 0A", done.stdout)


@pytest.mark.parametrize("plan", QUICK, ids=lambda plan: plan.kind)
def test_what_was_planned_has_happened(made: Path, plan: Plan) -> None:
    found = manifest(made, plan)
    assert found["fingerprint"] == plan.fingerprint()
    assert (found["kind"], found["rank"], found["step"]) == (plan.kind, plan.rank, plan.step)
    codes = {int(rank): code for rank, (code, _) in found["exits"].items()}
    assert len(codes) == 4
    if not plan.faulty:
        assert found["outcome"] == "healthy"
        assert set(codes.values()) == {0}
        assert found["labels"] == []
        return
    assert found["outcome"] == "failed"
    assert plan.rank is not None
    assert codes[plan.rank] in CODES.get(plan.kind, {1})
    assert found["labels"]


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("exception", ("Error",)),
        ("data", ("checksum", "gzip", "EOFError", "nan")),
        ("memory", ("memory", "MemoryError")),
        ("environment", ("2.4.1 is required",)),
        ("network", ("Connection", "recv", "send")),
        ("hang", ("collective mismatch", "terminate called")),
        ("storage", ("Input/output error",)),
        ("limits", ("can't start new thread",)),
        ("numerics", ("norm of the local gradients is inf",)),
    ],
)
def test_the_faulty_rank_says_what_is_labelled_as_the_cause(
    made: Path, kind: str, said: tuple[str, ...]
) -> None:
    plan = next(one for one in QUICK if one.kind == kind)
    causes = labelled(made, plan, "cause")
    assert causes
    assert any(word in line for line in causes for word in said)
    assert not set(causes) & set(labelled(made, plan, "echo"))


@pytest.mark.parametrize(
    ("kind", "silent", "said"),
    [("kill", True, "(gloo|Connection)"), ("skew", False, "Received data size doesn't match")],
)
def test_where_the_faulty_rank_does_not_say_it_other_lines_are_labelled(
    made: Path, kind: str, silent: bool, said: str
) -> None:
    plan = next(plan for plan in QUICK if plan.kind == kind)
    causes = labelled(made, plan, "cause")
    assert not (silent and causes)
    others = labelled(made, plan, "symptom") + labelled(made, plan, "echo")
    assert any(re.search(said, line) for line in causes + others)


def test_who_crashes_in_native_code_says_no_more_than_the_interpreter(made: Path) -> None:
    plan = first_of("process", "bus error")
    said = ["Fatal Python error: Bus error"] if plan.settings.crash_stacks else []
    assert [line[line.find("Fatal") :] for line in labelled(made, plan, "cause")] == said
    assert any("run" in line for line in labelled(made, plan, "context")) or not said


def test_ranks_say_the_address_of_their_node_where_it_has_one(made: Path) -> None:
    for plan, address in ((first_of("storage", "bad disk"), " (127.0.0.10)"), (QUICK[1], "")):
        logs = (made / key(plan) / "logs").rglob("*.*")
        text = "".join(path.read_text() for path in logs if path.is_file())
        assert text.count(f"starting on node-00{address} pid") == 4


def test_nothing_is_left_behind(made: Path) -> None:
    names = {path.name for path in made.glob("*/*")}
    assert names == {plan.name for plan in QUICK}
    time.sleep(0.2)
    left = []
    for one in Path("/proc").iterdir():
        try:
            words = (one / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if str(made).encode() in words:
            left.append(one.name)
    assert left == []


def test_a_job_that_is_done_is_not_run_again_and_an_interrupted_one_is(made: Path) -> None:
    said = (made / "said.txt").read_text()
    assert f"{{'there': 0, 'made': {len(QUICK)}, 'failed': 0}}" in said
    assert f"{{'there': {len(QUICK) - 1}, 'made': 1, 'failed': 0}}" in said
    assert not list(made.glob("*/.*"))


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--kinds", "typhoon"], "typhoon"),
        (["--ranks", "2-4"], "at least 3 ranks"),
        (["--ranks", "many"], "no range"),
        (["--split", "both"], "invalid choice"),
    ],
)
def test_wrong_arguments_are_named(
    arguments: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["--out", str(tmp_path), *arguments])
    assert told in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_every_variant_that_is_a_change_of_state_has_its_method() -> None:
    from studies.diagnosis_benchmark.injected.faults import Change, method_of

    changes = {
        method_of(variant.name)
        for variants in VARIANTS.values()
        for variant in variants
        if not (variant.outside or variant.environment)
    }
    assert changes == {name for name in vars(Change) if not name.startswith("_")}


@pytest.mark.slow
def test_every_variant_happens(tmp_path: Path) -> None:
    wanted = [
        first_of(kind, variant.name) for kind, variants in VARIANTS.items() for variant in variants
    ]
    make(tmp_path, wanted)
    for plan in wanted:
        found = manifest(tmp_path, plan)
        assert found["variant"] == plan.variant
        if plan.kind == "slow":
            assert found["verified"]["ratio"] >= 5


@pytest.mark.slow
def test_an_interrupted_run_leaves_no_process(start, tmp_path: Path) -> None:
    command = [sys.executable, "-c", MAKE, str(tmp_path), *map(key, SMALL)]
    running = start(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not list(tmp_path.glob("*/.*.partial/logs/*")):
        time.sleep(0.05)
        assert running.poll() is None
    running.kill()
    running.wait()
    time.sleep(0.5)
    commands = [path.read_bytes() for path in _cmdlines()]
    assert not [one for one in commands if str(tmp_path).encode() in one.split(b"\0")]


def _cmdlines() -> list[Path]:
    return [one / "cmdline" for one in Path("/proc").iterdir() if (one / "cmdline").exists()]
