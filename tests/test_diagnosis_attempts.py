"""Attempts of a job that were appended to one file."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rmetric.cli.main import main
from rmetric.diagnosis import diagnose
from rmetric.diagnosis.facts.marks import Mark
from rmetric.diagnosis.facts.starts import INTERLEAVED_STEPS, _Window, attempt_starts
from rmetric.diagnosis.ingest import ingest_attempts
from rmetric.diagnosis.job import Job
from rmetric.diagnosis.library import SignatureLibrary
from rmetric.diagnosis.reading import source

START = [
    "+ srun --nodes=2 python train.py --config base.yaml",
    "torch 2.4.0, CUDA 12.1, NCCL 2.20",
    "initializing torch distributed ...",
    "building GPT model ...",
    "> number of parameters on rank 0: 124439808",
    "> building train, validation, and test datasets ...",
]
OOM = [
    "Traceback (most recent call last):",
    '  File "train.py", line 88, in <module>',
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
]
KEY = [
    "Traceback (most recent call last):",
    '  File "train.py", line 31, in load',
    "KeyError: 'optimizer'",
]
RETRY = "WARNING retrying: Connection reset by peer"
DONE = ["Training completed.", "exiting program after 500 iterations"]


def steps(first: int, last: int, minute: int = 0) -> list[str]:
    return [
        f"[2024-04-08 02:{minute % 60:02}:{step % 60:02}] iteration {step}/ 500 | loss 3.{step:03}"
        for step in range(first, last + 1)
    ]


def attempts(tmp_path: Path, *parts: list[str]) -> list[int]:
    """First lines of the attempts in a file of these parts."""
    path = tmp_path / "job.log"
    path.write_text("".join(f"{line}\n" for part in parts for line in part))
    jobs = ingest_attempts([path], SignatureLibrary.shipped())
    return [min(one.head[0].line for one in job.streams.values() if one.head) for job in jobs]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (steps(1, 40), steps(21, 60)),  # from a checkpoint
        (steps(1, 40), steps(1, 60)),  # from the beginning
        ([], steps(1, 60)),  # no step in the first
        (steps(1, 40), []),  # none in the second
        ([], []),
    ],
)
def test_a_second_start_after_a_failure_is_a_second_attempt(tmp_path, first, second):
    before = [*START, *first, *OOM]
    assert attempts(tmp_path, before, START, second, KEY) == [1, len(before) + 1]


def test_a_process_that_was_killed_without_a_word(tmp_path):
    before = [*START, *steps(1, 40)]
    found = attempts(tmp_path, before, START, steps(21, 60), START, steps(41, 70))
    assert found == [1, len(before) + 1, len(before) + len(START) + 41]


def test_a_log_of_steps_alone_that_falls_back_after_a_failure(tmp_path):
    assert attempts(tmp_path, steps(1, 40), OOM, steps(1, 30)) == [1, 44]


def test_a_log_of_steps_alone_that_falls_back_after_a_pause(tmp_path):
    assert attempts(tmp_path, steps(1, 40), steps(21, 30, minute=50)) == [1, 41]


@pytest.mark.parametrize(
    "parts",
    [
        # Counts that start again with each epoch.
        [START, *(["epoch begins", *steps(1, 40, epoch)] for epoch in range(4))],
        # An evaluation that logs a part of the beginning again.
        [START, steps(1, 40), START[5:6], steps(41, 80), START[5:6], steps(81, 120)],
        # A harmless error, and a data set that is built again.
        [
            START,
            steps(1, 40),
            ["WARNING retrying: Connection reset by peer"],
            START[5:],
            steps(41, 90),
        ],
        # Eight ranks that write the same lines, one after the other; one fails before the last.
        [*(START[1:] for _ in range(5)), OOM, *(START[1:] for _ in range(3)), OOM],
        [START, DONE],
        [START[:1]],
        [],
    ],
)
def test_one_attempt(tmp_path, parts):
    if not any(parts):
        parts = [["no line of interest"]]
    assert len(attempts(tmp_path, *parts)) == 1


def test_the_ranks_of_one_attempt_may_start_after_the_first_failure(tmp_path):
    lines = [f"[rank{rank}]: {line}" for rank in range(8) for line in START[1:]]
    lines[20:20] = [f"[rank2]: {line}" for line in OOM]
    assert len(attempts(tmp_path, START[:1], lines)) == 1


def test_a_failure_counts_from_its_own_line_on(tmp_path):
    """The ranks' tracebacks are the last of their streams until the next attempt's lines."""
    launched = [f"==== {line}" for line in START[:4]]
    failed = [f"[rank{rank}]: {line}" for line in KEY for rank in range(2)]
    attempt = [*launched, *failed]
    assert attempts(tmp_path, *[attempt] * 4) == [1 + at * len(attempt) for at in range(4)]


def test_a_rank_that_goes_on_without_a_module_is_no_failed_launcher(tmp_path):
    missing = ["Traceback (most recent call last):", "ModuleNotFoundError: No module named 'fa'"]
    lines = [START[1], *(f"[rank0]: {line}" for line in missing), "falling back to torch", START[0]]
    assert attempts(tmp_path, lines, START[2:], steps(1, 40), DONE) == [1]


@pytest.mark.parametrize("block", [200, 1000, 1 << 20])
def test_an_attempt_reads_as_in_a_file_of_its_own(tmp_path, monkeypatch, block):
    """Wherever the blocks of the file end, and whether a pass expects its start or not."""
    monkeypatch.setattr(source, "BLOCK", block)
    parts = [
        [*START, *steps(1, 40), *OOM],
        [*START, *steps(21, 60), *KEY],
        [*START[1:], *steps(41, 50, 30), *KEY],  # of which the first pass does not expect it
        [*START, *steps(51, 70), *DONE],
    ]
    path, library = tmp_path / "job.log", SignatureLibrary.shipped()
    path.write_text("".join(f"{line}\n" for part in parts for line in part))
    jobs = ingest_attempts([tmp_path], library)
    assert len(jobs) == len(parts)
    for job, lines in zip(jobs, parts, strict=True):
        path.write_text("".join(f"{line}\n" for line in lines))
        (alone,) = ingest_attempts([tmp_path], library)
        assert _content(job) == _content(alone)


def _content(job: Job) -> dict[str, object]:
    """All but where it stands."""
    return {
        "events": Counter({one.template: one.count for one in job.events}),
        "matches": {key: one.count for key, one in job.matches.items()},
        "texts": {
            name: [
                (entry.text, entry.time, entry.step, entry.stage)
                for entry in [*one.head, *one.tail]
            ]
            for name, one in job.streams.items()
        },
        "steps": {name: (one.steps, one.longest_pause) for name, one in job.streams.items()},
        "stages": [stage for stage, _ in job.stages],
        "succeeded": job.succeeded and job.succeeded.text,
    }


def test_the_first_lines_of_a_log_may_recur_with_every_step(tmp_path):
    """A pass expects a start there at first; the next reads the file as one attempt."""
    banner = ["==== memory of the job ====", "allocated: 12 GiB", "reserved: 20 GiB"]
    lines = [line for step in steps(1, 300) for line in (*banner, step)]
    path = tmp_path / "job.log"
    path.write_text("\n".join(lines) + "\n")
    (job,) = ingest_attempts([path], SignatureLibrary.shipped())
    (stream,) = job.streams.values()
    assert (stream.entries, stream.steps) == (len(lines), 300)


def test_a_launcher_without_prefix_begins_the_attempt_of_ranks_with_prefixes(tmp_path):
    def attempt(minute: int) -> list[str]:
        ranks = [f"{rank}: {START[2]}" for rank in range(4)]
        zero = [f"0: {line}" for line in [*START[3:], *steps(1, 20, minute)]]
        return [f"==== restart {minute} on node01 ====", *ranks, *zero]

    ended = "slurmstepd: error: *** STEP 77.0 ON node01 CANCELLED AT 2024-05-01T20:40:00 ***"
    first = [*attempt(0), ended]
    assert attempts(tmp_path, first, attempt(30)) == [1, len(first) + 1]


@pytest.mark.parametrize(
    "head", ["Feb 18 08:5{}:53 gpu-092 kernel: [98868{}.848837] ", "[98{}{}.848837] "]
)
def test_a_kernel_log_that_repeats_itself_is_of_one_attempt(tmp_path, head):
    usual = [
        'audit: type=1400 audit(1736): apparmor="STATUS"',
        "systemd-journald[812]: Time jumped backwards, rotating.",
        "EXT4-fs (nvme0n1p2): mounted filesystem with ordered data mode",
        "nvidia-nvswitch0: open (major=510)",
    ]
    xid = "NVRM: Xid (PCI:0000:68:00): 79, pid=213345, name=python, GPU has fallen off the bus."
    said = [head.format(at, 10 + at) + line for at, line in enumerate([*usual, xid, *usual])]
    assert attempts(tmp_path, said) == [1]


def test_the_last_attempt_is_diagnosed_and_the_others_are_listed(tmp_path, capsys):
    path = tmp_path / "job.log"
    whole = [*START, *steps(1, 40), *OOM, *START, *steps(21, 40), *OOM, *START, *KEY]
    path.write_text("\n".join(whole) + "\n")
    found = diagnose(path)
    assert found.attempt == 3
    assert [one.outcome for one in found.attempts] == ["failed"] * 3
    assert [one.last_step for one in found.attempts] == [40, 40, None]
    assert [one.line for one in found.attempts] == [1, 50, 79]
    assert found.attempts[0].cause == found.attempts[1].cause == "cuda_out_of_memory"
    assert found.cause == found.attempts[2].cause != "cuda_out_of_memory"
    assert found.events[0].line > 79
    assert "3 of 3, the last is diagnosed; others: 2 x " in found.summary

    second = diagnose(path, attempt=2)
    assert second.cause == "cuda_out_of_memory"
    assert "2 of 3 attempts ended with it" in second.why
    assert diagnose(path, attempt=-2) == second

    assert main(["diagnose", str(path), "--attempt", "4"]) == 2
    assert "attempt is 4: these logs have 3; 1 to 3 or -3 to -1 is accepted" in (
        capsys.readouterr().err
    )


def test_a_job_that_succeeded_at_last_is_healthy(tmp_path):
    path = tmp_path / "job.log"
    path.write_text("\n".join([*START, *steps(1, 9), *OOM, *START, *steps(1, 500), *DONE]) + "\n")
    assert diagnose(path).outcome == "healthy"
    assert diagnose(path, attempt=1).outcome == "failed"


def test_the_attempts_of_torchelastic_stand_in_folders(tmp_path):
    for attempt, end in enumerate([OOM, KEY]):
        for rank in range(2):
            path = tmp_path / f"attempt_{attempt}" / str(rank) / "stderr.log"
            path.parent.mkdir(parents=True)
            path.write_text("\n".join([*START, *steps(1, 20), *end]) + "\n")
    found = diagnose(tmp_path)
    assert len(found.attempts) == 2
    assert found.cause != found.attempts[0].cause == "cuda_out_of_memory"
    assert found.job["files"] == 2


def test_a_file_of_no_attempt_may_have_any_number_in_its_name(tmp_path):
    for attempt, end in enumerate([OOM, KEY], 1):
        path = tmp_path / f"attempt-{attempt}" / "gpt7b-worker-0.log"
        path.parent.mkdir()
        lines = [f"2024-05-0{attempt} 10:00:{at:02} {line}" for at, line in enumerate(steps(1, 40))]
        path.write_text("\n".join([*START, *lines, *end]) + "\n")
    (tmp_path / "events-gpt7b.txt").write_text("2024-05-01T09:59:00Z Normal Scheduled pod/a\n")
    found = diagnose(tmp_path)
    assert len(found.attempts) == 2
    assert found.cause != found.attempts[0].cause == "cuda_out_of_memory"


def test_the_files_of_the_ranks_are_aligned(tmp_path):
    for rank in range(4):
        lines = [*START, *steps(1, 40), *OOM, *START, *steps(1, 20 + (rank != 2)), *KEY]
        (tmp_path / f"rank_{rank}.log").write_text("\n".join(lines) + "\n")
    # A rank of which the first attempt was written elsewhere.
    (tmp_path / "rank_4.log").write_text("\n".join([*START, *steps(1, 21), *KEY]) + "\n")
    first, last = ingest_attempts([tmp_path], SignatureLibrary.shipped())
    assert len(first.files) == 4
    assert len(last.files) == 5


marks = st.lists(
    st.tuples(st.integers(0, 12), st.integers(0, 3), st.integers(0, 2), st.booleans()), max_size=60
)


@given(marks)
@settings(deadline=None)
def test_starts_are_lines_of_marks_in_order(entries):
    found, line, made, ends = [], 0, 0, 0
    for template, more_steps, more_ends, ended in entries:
        line, made, ends = line + 1, made + more_steps, ends + more_ends
        found.append(Mark(line, template, made, ends, ended))
    starts = [one.line for one in attempt_starts(found)]
    assert starts == sorted(set(starts))
    assert set(starts) <= {mark.line for mark in found[1:]}


@given(st.integers(1, 12), st.integers(2, 30), st.integers(1, 9))
@settings(deadline=None)
def test_a_beginning_that_is_repeated_whole_is_found_each_time(ranks, times, made):
    """Of at least three entries, each written by as many ranks."""
    found: list[Mark] = []
    expected = []
    for attempt in range(times):
        expected.append(len(found) + 1)
        for template in range(3):
            for _ in range(ranks):
                found.append(Mark(len(found) + 1, template, made * attempt * 3, attempt, True))
    assert [one.line for one in attempt_starts(found)] == expected[1:]


def test_ranks_that_begin_behind_another_ones_failure_begin_no_attempt():
    """Each writes its beginning once, and the second attempt writes all of them again."""
    ranks = [(template, rank) for rank in range(6) for template in range(3)]
    again = [(line, *one) for line, one in enumerate([*ranks, *ranks], 1)]
    found = [Mark(line, template, 0, (line > 9) + (line > 18), True, rank)
             for line, template, rank in again]  # fmt: skip
    assert [one.line for one in attempt_starts(found)] == [19]


@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.integers(0, 1), st.sampled_from([0, 0, 0, 1])),
        min_size=1,
        max_size=40,
    ),
    st.data(),
)
def test_the_window_counts_what_its_marks_are(entries, data):
    """Its counts, kept while it moves, are those of its marks themselves."""
    marks, steps, ends = list[Mark](), 0, 0
    for line, (template, step, end) in enumerate(entries, 1):
        steps, ends = steps + step * INTERLEAVED_STEPS, ends + end
        marks.append(Mark(line, template, steps, ends))
    window = _Window(marks)
    for at in range(len(marks)):
        if data.draw(st.booleans()):
            window.move(at)
            assert window.counts == Counter(one.template for one in window.marks)


def test_ranks_that_begin_one_after_another_are_one_attempt(tmp_path):
    """Each logs an error of its start that it outlives."""
    error = "ERROR cannot import fused kernels: libcudnn.so.9: cannot open shared object file"
    start = [f"[rank{rank}]: {line}" for rank in range(4) for line in (*START, error)]
    assert attempts(tmp_path, start, steps(1, 60)) == [1]


def test_processes_that_begin_at_the_same_second_are_one_attempt(tmp_path):
    lines = [
        f"[2024-04-08 02:00:00,{ms}] {line}"
        for ms in (554, 129, 803)
        for line in (*START, "collect2: error: ld returned 1 exit status")
    ]
    assert attempts(tmp_path, lines, steps(1, 60, minute=1)) == [1]


def test_a_start_that_fails_at_once_and_again_minutes_later_is_two_attempts(tmp_path):
    def start(minute):
        return [f"[2024-04-08 02:{minute:02}:00,554] {line}" for line in (*START, *KEY)]

    assert len(attempts(tmp_path, start(1), start(4))) == 2


def of_files(tmp_path, files):
    for name, lines in files.items():
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines))
    return diagnose(tmp_path)


def test_attempts_in_files_of_their_own(tmp_path):
    """Slurm names the files of each start by the number of its job."""
    files = {
        f"{kind}_{number}_{at}.log": [
            f"[2024-04-08 0{at}:00:00] {kind} of the job begins",
            *START[1:4],
            *(steps_at(at) if kind == "out" else []),
            *([f"[2024-04-08 0{at}:30:00] ends", *end] if kind == "err" else []),
        ]
        for at, (number, end) in enumerate([(41700, OOM), (41710, OOM), (41733, KEY)], start=1)
        for kind in ("out", "err")
    }
    found = of_files(tmp_path, files)
    assert len(found.attempts) == 3
    assert "KeyError" in found.title


def test_a_start_that_fails_before_its_program_begins_is_an_attempt_too(tmp_path):
    refused = [
        "slurmstepd: error: pyxis: container start failed with error code: 1",
        "slurmstepd: error: *** STEP 7.0 ON node1 CANCELLED AT 2024-04-08T02:00:00 ***",
    ]
    files = {
        f"log-gpt_7_{at}.out": [*START, *steps_at(at), *OOM] if at != 2 else refused
        for at in (1, 2, 3)
    }
    found = of_files(tmp_path, files)
    assert [one.last_step for one in found.attempts] == [39, None, 39]


def test_a_date_and_a_time_in_the_names_are_one_number(tmp_path):
    names = ["run_20240611_0914.log", "run_20240611_1102.log", "run_20240612_0807.log"]
    files = {
        name: [*START, *[line.replace("04-08", f"04-{8 + at:02d}") for line in steps_at(1)], *OOM]
        for at, name in enumerate(names)
    }
    assert len(of_files(tmp_path, files).attempts) == 3


def test_dates_of_two_scales_are_in_order_within_a_year_only(tmp_path):
    """Two nodes of one attempt, of which one alone states the year."""
    files = {
        f"b{node}.log": [
            *START[:2],
            *(line.replace("[2024-", "[") if node == 17 else line for line in steps_at(1)),
        ]
        for node in (17, 18)
    }
    assert len(of_files(tmp_path, files).attempts) <= 1


def test_a_scripts_own_line_that_an_attempt_failed_begins_none(tmp_path):
    log = [*START, *steps_at(1), *OOM, "[run.sh] try 2 failed like try 1, giving up", "rc=1"]
    assert len(of_files(tmp_path, {"loop.log": log}).attempts) <= 1


def test_a_scripts_own_line_begins_an_attempt_once(tmp_path):
    """Whether the program's first lines recur or not."""
    log = []
    for at in (1, 2, 3):
        log += [f"[Tue Mar 18 1{at}:45:11 UTC 2025] ===== run.sh: try {at} of 3 =====", *START[:2]]
        log += [f"trainer {at} of another kind {'x' * at}", *steps_at(at), *OOM]
    found = of_files(tmp_path, {"loop.log": log})
    assert [one.last_step for one in found.attempts] == [39, 39, 39]


def test_the_times_of_a_launcher_may_lack_the_year(tmp_path):
    files = {
        f"slurm-{number}.out": [
            f"+ srun torchrun --rdzv_id {number} -m train",
            f"W04{10 + at:02d} 08:00:04.6 1182 torch/run.py:803] Setting OMP_NUM_THREADS",
            *[line.replace("04-08 08", f"04-{10 + at:02d} 08") for line in steps_at(8)],
            *OOM,
        ]
        for at, number in enumerate([90288, 90311])
    }
    assert len(of_files(tmp_path, files).attempts) == 2


def steps_at(hour):
    return [f"[2024-04-08 0{hour}:10:{s:02}] iteration {s}/ 500 | loss 3.1" for s in range(1, 40)]


def test_a_log_that_is_rotated_is_one_attempt(tmp_path):
    files = {"train.1.log": [*START, *steps_at(1)], "train.2.log": steps_at(2)}
    assert len(of_files(tmp_path, files).attempts) <= 1


def test_ranks_with_files_of_their_own_are_one_attempt(tmp_path):
    files = {
        f"host-0-{rank}.log": [*START, f"[2024-04-08 02:00:0{rank}] ValueError: shape", *KEY]
        for rank in range(4)
    }
    assert len(of_files(tmp_path, files).attempts) <= 1


def test_the_launchers_line_that_it_restarts_its_ranks_begins_an_attempt_in_every_file(tmp_path):
    """Also in a file whose lines do not recur: another node's, where only errors were logged."""
    restart = (
        "I0408 02:10:00.446975 90110 torch/distributed/elastic/agent/server/api.py:883] [default]"
        " Worker group FAILED. 1/1 attempts left; will restart worker group"
    )
    files = {
        "node-0.log": [*START, *steps(1, 40), *OOM, restart, *START, *steps(21, 40, 20), "the end"],
        "node-1.log": ["up", "[rank8]: ValueError: one", restart, *OOM],
    }
    for name, lines in files.items():
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines))
    jobs = ingest_attempts([tmp_path], SignatureLibrary.shipped())
    assert [job.files for job in jobs] == [
        {"node-0.log": 50, "node-1.log": 3},
        {"node-0.log": 27, "node-1.log": 3},
    ]
    assert diagnose(tmp_path).cause == "cuda_out_of_memory"


def test_containers_of_pods_of_which_one_was_made_anew(tmp_path: Path) -> None:
    """As the kubelet names their files; the new pod's count of restarts begins again."""
    pods = ["0c8f2d0e-1c38-4f15-8d5c-0a1e3f0b7c11", "7be5a1b4-90cf-4a86-bd0d-6bd1d4d2b1f7"]
    new = "e4c1b6d2-0f7d-4f2a-9c9a-52f7a6bd9e03"
    for worker, pod in enumerate(pods):
        for start, end in enumerate((OOM, KEY, OOM)):
            uid, number = (new, start - 1) if worker and start else (pod, start)
            folder = tmp_path / f"llm_fit-worker-{worker}_{uid}" / "pytorch"
            folder.mkdir(parents=True, exist_ok=True)
            log = [f"start {worker} of 2", "building the model", "reading the data"]
            log += [f"step {at} loss 2.1" for at in range(20)]
            lines = [
                f"2025-05-06T0{2 + start}:{at:02}:00.12Z stdout F {line}"
                for at, line in enumerate([*log, *(end if worker == 0 else ["bye"])])
            ]
            (folder / f"{number}.log").write_text("\n".join(lines) + "\n")
    found = diagnose(tmp_path)
    causes = ["cuda_out_of_memory", "key_error", "cuda_out_of_memory"]
    assert [one.cause for one in found.attempts] == causes


@pytest.mark.parametrize("zone", [0, 2])
def test_folders_of_the_schedulers_jobs_are_attempts(tmp_path: Path, zone: int) -> None:
    """Only the last made steps, after which alone they would not be known to begin alike."""
    ends = (["OSError: [Errno 98] Address already in use"], KEY, OOM)
    for start, end in enumerate(ends):
        job, hour = 3301877 + 11 * start, 12 + start
        begin = ["backend up", "reading the configuration", "sharding the model", "resuming"]
        begin += ["making the optimizer", "making the schedule", "opening the shards", "ready"]
        log = [*begin, *(f"step {at} loss 2.1" for at in range(20 if start == 2 else 0))]
        log = log if start else ["no port"]
        cancelled = (
            f"slurmstepd: error: *** STEP {job}.0 ON n1 CANCELLED AT 2025-04-02T{hour + zone}:"
            f"{len(log) + 1:02}:50 ***"
        )
        for node in (1, 2):
            wrapper = f"wrapper: SLURM_JOB_ID={job} node=n{node}"
            lines = [wrapper, *log, *end] if node == 1 else [wrapper, *log]
            minutes = [min(at, len(log) + 1) for at in range(len(lines))]
            stamped = [
                f"[2025-04-02T{hour}:{at:02}:00.2Z] {line}"
                for at, line in zip(minutes, lines, strict=True)
            ]
            path = tmp_path / f"run_{job}" / f"n{node}.out"
            path.parent.mkdir(exist_ok=True)
            path.write_text("\n".join([*stamped, *([cancelled] if node == 2 else [])]) + "\n")
    found = diagnose(tmp_path)
    assert len(found.attempts) == 3
    assert found.cause == "cuda_out_of_memory"


@pytest.mark.parametrize("restarts", [1, 2])
def test_the_launchers_of_all_nodes_restart_together(tmp_path: Path, restarts: int) -> None:
    """One log of four nodes' launchers, each of which states that its ranks failed."""
    restart = (
        "I0408 02:10:00.446975 90110 torch/distributed/elastic/agent/server/api.py:883] [default]"
        " Worker group FAILED. 1/1 attempts left; will restart worker group"
    )
    failed = "E0408 02:10:00.1 90110 torch/distributed/elastic/multiprocessing/api.py:874] failed"
    lines = [f"{node}: step {at} loss 2.1" for at in range(30) for node in range(4)]
    for _ in range(restarts):
        for node in range(4):
            lines += [f"{node}: {OOM[0]}", f"{node}: {failed} (exitcode: 1)"]
            lines += [f"{node}: {restart}"]
        lines += [f"{node}: step {at} loss 2.1" for at in range(9) for node in range(4)]
    (tmp_path / "job.log").write_text("\n".join([*lines, f"2: {OOM[0]}"]) + "\n")
    assert len(diagnose([tmp_path]).attempts) == 1 + restarts


def test_ray_train_starts_its_workers_again(tmp_path: Path) -> None:
    """Its first start begins no second attempt."""
    lines = ["Job 'raysubmit_a' submitted successfully"]
    for attempt, (pid, first) in enumerate(((398, 0), (519, 40))):
        lines += [f"(TorchTrainer pid={pid}) Started distributed worker processes: "]
        lines += [
            f"(TorchTrainer pid={pid}) - (node_id=ee{rank}, ip=10.0.0.1, pid={pid + rank}) "
            f"world_rank={rank}, local_rank={rank}, node_rank=0"
            for rank in range(4)
        ]
        lines += [
            f"(RayTrainWorker pid={pid}) step {at} loss 2.1" for at in range(first, first + 50)
        ]
        lines += [f"(RayTrainWorker pid={pid}) {line}" for line in (OOM if attempt else KEY)]
    (tmp_path / "job.log").write_text("\n".join(lines) + "\n")
    found = diagnose([tmp_path])
    assert [one.cause for one in found.attempts] == ["key_error", "cuda_out_of_memory"]


def test_a_rank_that_was_told_to_end_begins_again(tmp_path: Path) -> None:
    told = "FatalError: `Termination signal` is detected by the operating system."
    parts = ["store connected", "group_nccl options", "device found", "cuDNN found", "rank known"]
    begin = [f"I0520 14:0{{at}}:17.1 tcp_utils.cc:130] {part}" for part in parts]
    lines = [line.format(at=at) for at in range(3) for line in [*begin, told]]
    (tmp_path / "workerlog.2").write_text("\n".join(lines) + "\n")
    assert len(ingest_attempts([tmp_path], SignatureLibrary.shipped())) == 3


def test_what_a_scheduler_logged_at_the_end_of_an_earlier_attempt_is_of_that(
    tmp_path: Path,
) -> None:
    begin = [
        "+ srun python train.py",
        "torch 2.4.0, NCCL 2.20",
        "building GPT model ...",
        "loading",
    ]
    first = [f"2025-02-03 21:{at:02d}:00 step {at} loss 2.1" for at in range(4, 58)]
    last = [f"2025-02-03 22:{at:02d}:00 step {at} loss 2.1" for at in range(36, 50)]
    rank = [f"2025-02-03 21:03:{at:02d} {line}" for at, line in enumerate(begin)] + first
    rank += ["2025-02-03 21:57:02 RuntimeError: NCCL error: unhandled system error"]
    rank += [f"2025-02-03 22:35:{at:02d} {line}" for at, line in enumerate(begin)] + last
    (tmp_path / "task_0.log").write_text("\n".join([*rank, *OOM]) + "\n")
    scheduler = [
        "slurmstepd: error: *** STEP 55.0 ON gh-1 CANCELLED AT 2025-02-03T21:57:05 ***",
        "[sbatch] srun exit 134, scontrol requeue 55",
        "srun: error: gh-1: task 0: Exited with exit code 1",
    ]
    (tmp_path / "slurm-55.out").write_text("\n".join(scheduler) + "\n")
    found = diagnose([tmp_path])
    assert found.cause == "cuda_out_of_memory"
    assert not any(one.cause == "slurm_cancelled" for one in found.candidates)


def test_times_with_a_zone_among_those_without_do_not_make_attempts_overlap(tmp_path: Path) -> None:
    for number, hour in enumerate((20, 21)):
        lines = [
            f"+ echo 'restart count {number}'",
            f"2025-05-30T{hour}:44:02+09:00",
            "+ srun torchrun pretrain.py",
            *[f"2025-05-30 {hour}:{at} step {at} loss 2.1" for at in range(45, 60)],
            *OOM,
        ]
        (tmp_path / f"fit-77-r{number}.out").write_text("\n".join(lines) + "\n")
    assert len(ingest_attempts([tmp_path], SignatureLibrary.shipped())) == 2


@pytest.mark.parametrize("fails", [True, False])
def test_a_head_of_two_lines_begins_an_attempt_that_fails_at_once(tmp_path, fails):
    """A script's last lines, such as the time, are no attempt."""
    head = ["=== 2025-03-14T0{}:02:10+00:00 job 77 restart={} ===", "MASTER_ADDR=gn1 PORT=29500"]
    begin = ["model has 7 layers", "loads the data", "begins"]
    steps = [f"step {at} loss 2.1" for at in range(40)]
    lost = "kernel: NVRM: Xid (PCI:0000:81:00): 79, pid=4, name=python, GPU has fallen off the bus."
    mount = "slurmstepd: error: pyxis:     enroot-mount: failed to mount: /a at /b: No such file"
    second = [head[0].format(2, 1), head[1], *([mount] if fails else [])]
    lines = [head[0].format(1, 0), head[1], *begin, *steps, lost, *second]
    (tmp_path / "job.log").write_text("\n".join(lines) + "\n")
    found = diagnose([tmp_path])
    assert len(found.attempts) == (2 if fails else 0)
    assert found.cause == ("container_start_failed" if fails else "xid_79_fallen_off_the_bus")


def test_of_a_nodes_log_the_entries_within_the_last_attempt_explain_it(tmp_path):
    def attempt(hour):
        start = [f"2025-03-04 {hour:02d}:00:{at:02d} {line}" for at, line in enumerate(START)]
        steps = [f"2025-03-04 {hour:02d}:{at:02d}:00 step {at} loss 2.1" for at in range(1, 50)]
        return [
            *start,
            *steps,
            f"2025-03-04 {hour:02d}:50:09 CUDA error: unspecified launch failure",
        ]

    def lost(hour):
        when = f"2025-03-04T{hour:02d}:50:05.000000+00:00 gpu-a kernel: NVRM"
        return f"{when}: Xid (PCI:0000:bb:00): 79, pid=4, name=python, GPU has fallen off the bus."

    (tmp_path / "job.log").write_text("\n".join([*attempt(5), *attempt(7)]) + "\n")
    (tmp_path / "gpu-a.dmesg").write_text("\n".join([lost(5), lost(7)]) + "\n")
    found = diagnose([tmp_path])
    assert len(found.attempts) == 2
    assert (found.cause, found.iteration) == ("xid_79_fallen_off_the_bus", 49)
    assert (found.events[0].file, found.events[0].line) == ("gpu-a.dmesg", 2)
    assert found.stage == "train"


def test_a_log_may_end_with_the_launchers_line_that_it_starts_again(tmp_path):
    error = "[rank1]: KeyError: 'ids'"
    again = "INFO [default] Worker group FAILED. 1/1 attempts left; will restart worker group"
    lines = [*START, *(f"step {at} loss 2.1" for at in range(40)), error, again]
    (tmp_path / "job.log").write_text("\n".join(lines) + "\n")
    found = diagnose([tmp_path])
    assert (found.cause, found.attempts) == ("key_error", ())


def test_errors_without_a_time_are_of_the_attempt_in_which_they_stand(tmp_path):
    """The errors' file has one attempt for all: nothing in it begins anew."""
    begins = "[2022-06-22 20:{}] [INFO] [comm.py:635:init_distributed] attempting to detect MPI"
    start = "[2022-06-22 20:{}] [INFO] [runner.py:457:main] cmd = mpirun -n 16 train.py"
    port = "failed to bind to 0.0.0.0:29500 (errno: 98 - Address already in use)."
    files = {
        "job.err": [
            begins.format("03:30,578"),
            f"[W socket.cpp:401] [c10d] The server socket has {port}",
            begins.format("27:53,840"),
            "OSError: [Errno 122] Disk quota exceeded",
        ],
        "job.out": [
            "=== run 1 of 2 at Wed Jun 22 20:03:15 UTC ===",
            start.format("03:19,000"),
            "=== run 2 of 2 at Wed Jun 22 20:27:38 UTC ===",
            start.format("27:42,533"),
        ],
    }
    found = of_files(tmp_path, files)
    assert len(found.attempts) == 2
    assert found.cause == "quota_exceeded"


def test_a_chain_of_jobs_counts_its_links_not_steps(tmp_path):
    files = {
        f"fit.{number}.out": [
            f"[0{hour}:00:00] job {number} on n1, restart chain step {hour}/6",
            *(f"[2024-04-08 0{hour}:00:0{at}] {line}" for at, line in enumerate(START)),
            *steps_at(hour),
            *OOM,
        ]
        for hour, number in ((2, 4101), (3, 4102), (4, 4105))
    }
    assert len(of_files(tmp_path, files).attempts) == 3
