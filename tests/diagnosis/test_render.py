"""The verdict in plain text: golden for each outcome, and laws that hold for any."""

from __future__ import annotations

from dataclasses import replace
from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmetric.diagnosis.report.render import (
    MOST_LINES,
    WIDTH,
    brief,
    clock,
    excerpt,
    headline,
    verdict,
)
from rmetric.diagnosis.report.result import (
    OUTCOMES,
    Attempt,
    Candidate,
    Diagnosis,
    Evidence,
    Suspect,
)
from rmetric.diagnosis.signature import CHOICES
from tests.diagnosis.diagnoses import THEN, evidence, out_of_memory, suspect

WHOLE = """\
FAILED: A GPU ran out of memory, rank 12 on node-03, at step 431 (train), 2024-05-03 02:14:07
Owner      user: owner of the job's code, settings or data
To do      Lower the micro batch. Look for a batch of unusual length.
Restart    no: an error of the job or of its settings comes again
Confidence 93 % (sure): its exception comes 600 s before the collective timeouts of 63 others
Log        node-03/rank_12.log:8812
           torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB
Where      rank 12 on node-03: the only one that raised an exception
Since      iteration 429, the first that differs from its predecessors
Echo       600 s later on rank 0 and 7 or more others: A collective timed out
Candidates A collective timed out (31 %): 63 ranks say so, but after rank 12 had ended
Note       the clock of node-05 is 3 h ahead of the others: corrected
Input      64 files, 1,234,567 lines, 64 of 64 ranks, 2024-05-03 00:14:07 to 2024-05-03 02:24:17"""

TERMINATED = """\
TERMINATED: The scheduler's time limit was reached, 2024-05-03 02:14:07
Owner      user: owner of the job's code, settings or data
To do      Ask for more time, or start again from the last checkpoint.
Restart    yes: the platform ended the job, not an error
Confidence 95 % (sure)
Log        slurm-77.out:412
           slurmstepd: error: *** JOB 77 ON node-01 CANCELLED DUE TO TIME LIMIT ***
Where      no node stands out"""

UNKNOWN = """\
UNKNOWN: the log ends at step 12 without a word of why, last step 12 (train)
Confidence none: nothing known was found, and no rank differs from the others
Where      no node stands out
Candidates Killed for want of memory on the host (35 %): the log ends in the middle of a line
           The node was lost (20 %)"""


@pytest.mark.parametrize(
    ("diagnosis", "text"),
    [
        (out_of_memory(), WHOLE),
        (
            Diagnosis(
                outcome="terminated", cause="slurm_time_limit", family="time limit", actor="user",
                title="The scheduler's time limit was reached", confidence=0.95, time=THEN,
                to_do=("Ask for more time, or start again from the last checkpoint.",),
                events=(
                    evidence(
                        role="ending", file="slurm-77.out", line=412, who=("slurm-77.out",),
                        text="slurmstepd: error: *** JOB 77 ON node-01 CANCELLED DUE TO "
                        "TIME LIMIT ***",
                    ),
                ),
            ),
            TERMINATED,
        ),
        (
            Diagnosis(
                outcome="unknown", title="the log ends at step 12 without a word of why",
                confidence=0.3, iteration=12, stage="train",
                why="nothing known was found, and no rank differs from the others",
                candidates=(
                    Candidate(cause="oom_kill", title="Killed for want of memory on the host.",
                              confidence=0.35, why="the log ends in the middle of a line"),
                    Candidate(cause="node_failure", title="The node was lost", confidence=0.2,
                              why=""),
                ),
            ),
            UNKNOWN,
        ),
    ],
    ids=["failed", "terminated", "unknown"],
)  # fmt: skip
def test_golden(diagnosis, text):
    assert verdict(diagnosis) == text


def test_the_first_line_says_how_sure_it_is():
    assert headline(out_of_memory()).startswith("FAILED: A GPU")
    assert headline(out_of_memory(confidence=0.6)).startswith("FAILED, probably: A GPU")
    nearest = out_of_memory(cause=None, title="Cause unknown. Closest match: a warning")
    assert headline(nearest).startswith("FAILED: Cause unknown. Closest match: a warning,")
    assert headline(nearest).endswith(", rank 12 on node-03, last step 431 (train), 02:14:07")
    quiet = Diagnosis(outcome="unknown", title="Outcome unknown: the log ends without a fault")
    assert headline(quiet) == "UNKNOWN: the log ends without a fault"
    quiet = Diagnosis(outcome="unknown", title="Cause unknown. Closest match: a warning")
    assert headline(quiet) == "UNKNOWN: Closest match: a warning"
    silent = Diagnosis(outcome="failed", title="rank 5 fell silent", confidence=0.6, iteration=70)
    assert headline(silent) == "FAILED: rank 5 fell silent, last step 70"
    assert "\nConfidence 60 % (likely) that the job failed" in verdict(silent)
    healthy = Diagnosis(outcome="healthy", confidence=0.97, why="all is done")
    assert headline(healthy) == "HEALTHY: no failure found"
    assert verdict(healthy).endswith("97 % (sure) that the job is healthy: all is done")
    unsure = out_of_memory(cause=None, title="")
    assert headline(unsure).startswith("FAILED: the cause is not known, rank 12 on node-03")


def test_where_is_named_by_the_suspects_else_by_who_logged_it_first():
    def at(**changes):
        return headline(out_of_memory(iteration=None, stage="", time=None, **changes))

    assert at().endswith(", rank 12 on node-03")
    assert at(nodes=(suspect(12, None),)).endswith(", rank 12")
    assert at(nodes=tuple(suspect(rank, None) for rank in range(3))).endswith(
        ", rank 0 and rank 1 and 1 more"
    )
    node = suspect(name="node gpu-07", rank=None, node="gpu-07")
    assert at(nodes=(node,)).endswith(", node gpu-07")
    assert at(nodes=(), events=(evidence(who=("rank 3", "rank 4")),)).endswith(", rank 3 first")
    assert at(nodes=(), events=(evidence(who=("train.log",)),)).endswith("memory")
    assert at(nodes=(), events=(evidence(role="ending", who=("rank 0",)),)).endswith("memory")


def test_of_a_traceback_the_first_exception_is_shown_with_its_message():
    trace = (
        "Traceback (most recent call last):\n"
        '  File "train.py", line 7, in <module>\n'
        "    load()\n"
        "RuntimeError: Error(s) in loading state_dict for GPT:\n"
        "\tsize mismatch for wte.weight\n"
        "\nDuring handling of the above exception, another exception occurred:\n\n"
        "Traceback (most recent call last):\n"
        '  File "train.py", line 9, in <module>\n'
        "ValueError: cleaning up failed\n"
    )
    assert excerpt(evidence(text=trace)) == (
        "RuntimeError: Error(s) in loading state_dict for GPT: size mismatch for wte.weight"
    )
    cut = 'Traceback (most recent call last):\n  File "a.py", line 7'
    assert excerpt(evidence(text=cut)) == " ".join(cut.split())


LONG = "/opt/conda/lib/python3.11/site-packages/torch/distributed/" * 5


@pytest.mark.parametrize(
    ("text", "point", "kept"),
    [
        (f"{LONG}elastic.py:{61}: error code is 507035, the kernel failed", "error code is 507035",
         "error code is 507035, the kernel failed"),
        (f"RuntimeError: [{LONG}pair.cc:553] Connection closed by peer. {'See. ' * 80}",
         "Connection closed by peer", "RuntimeError: […/pair.cc:553] Connection closed by peer."),
        ("Traceback (most recent call last):\n"
         + f'  File "{LONG}a.py", line 7, in f\n    g()\n' * 9
         + f"torch.OutOfMemoryError: CUDA out of memory. Tried 2 GiB. {'See. ' * 80}",
         "", "torch.OutOfMemoryError: CUDA out of memory. Tried 2 GiB."),
        (f"step 7 | {'seen: 1 | ' * 30}grad norm: nan | {'skipped: 0 | ' * 30}", "grad norm: nan",
         "grad norm: nan"),
        ("Traceback (most recent call last):\nKeyError: 'a'\n\nDuring handling of the above "
         "exception, another exception occurred:\n\nTraceback (most recent call last):\n"
         '  File "a.py", line 7, in f\nOSError: Unable to load vocabulary', "Unable to load voc",
         "OSError: Unable to load vocabulary"),
        (f"Fatal Python error: Segmentation fault\n\nStack (most recent call first):\n"
         f'  File "{LONG}a.py", line 7 in f', "Fatal Python error: Segmentation fault",
         "Fatal Python error: Segmentation fault"),
    ],
    ids=["path before it", "path in it", "traceback", "middle of a line", "second exception",
         "no traceback"],
)  # fmt: skip
def test_the_point_of_what_was_logged_is_in_the_verdict(text, point, kept):
    event = evidence(text=text, point=point, file=f"{LONG}rank_12.log")
    lines = verdict(out_of_memory(events=(event,))).split("\n")
    at = next(number for number, line in enumerate(lines) if line.startswith("Log"))
    assert lines[at].endswith("/rank_12.log:8812")
    assert kept in " ".join(line[9:] for line in lines[at + 1 : at + 3])
    assert "File" not in lines[at + 1]


def test_the_event_of_the_cause_is_quoted():
    first = evidence(signature="task_failed", text="a task failed", file="a.log", line=1)
    diagnosis = out_of_memory(events=(first, evidence(time=None, line=7), evidence()))
    assert "Log        node-03/rank_12.log:8812\n" in verdict(diagnosis)


def test_a_long_title_loses_what_explains_it_and_when_gets_a_line():
    title = "A kernel failed on a device, most often an address out of range or a fault of the chip"
    shown = verdict(out_of_memory(title=title, confidence=0.6)).split("\n")
    assert shown[0] == (
        "FAILED, probably: A kernel failed on a device, rank 12 on node-03, at step 431 (train), "
        "2024-05-03 02:14:07"
    )
    assert shown[1].startswith("Owner")
    title = "An operation of a library no longer has, or does not have yet, the argument it needs"
    shown = verdict(out_of_memory(title=title)).split("\n")
    assert shown[0] == f"FAILED: {title.removesuffix(' needs')}…, rank 12 on node-03"
    assert shown[1] == "When       at step 431 (train), 2024-05-03 02:14:07"


def test_a_candidate_that_came_after_is_marked_so():
    after = Candidate(cause="slurm_cancelled", title="The job was cancelled", confidence=0.7,
                      why="follows rank_fell_silent")  # fmt: skip
    other = Candidate(cause="port_in_use", title="The port is in use", confidence=0.4,
                      why="follows slurm_cancelled")  # fmt: skip
    shown = verdict(
        out_of_memory(
            cause="rank_fell_silent", title="rank 3 fell silent", confidence=0.7,
            candidates=(after, other),
        )
    )  # fmt: skip
    assert "The job was cancelled (70 %): later, likely a consequence\n" in shown
    assert "The port is in use (40 %): later than: The job was cancelled\n" in shown


def test_a_time_that_is_none_is_still_shown():
    assert clock(4821.55) == "4821.6 s on its own clock"
    # No difference is shown of times on two scales.
    assert "\nEcho       later on rank 0" in verdict(out_of_memory(time=4821.5))
    # No year: as written, in January too.
    assert clock(63072000.0 + 3 * 86400 + 61.5) == "01-04 00:01:01"
    assert clock(1e30) == "time 1e+30 s"
    assert clock(nan) == "time nan s"
    assert clock(inf) == "time inf s"


def test_where_there_is_too_much_what_to_do_gives_way_last():
    long = out_of_memory(
        to_do=("Do this and that. " * 15,), why="why and why " * 20,
        nodes=tuple(suspect(rank) for rank in range(8)),
        candidates=out_of_memory().candidates * 6, notes=out_of_memory().notes * 9,
    )  # fmt: skip
    lines = verdict(long).split("\n")
    labels = [line[:11].strip() for line in lines[1:] if line[:11].strip()]
    assert labels == ["When", "Owner", "To do", "Confidence", "Log", "Where", "Since", "Candidates",
                      "Note", "Input"]  # fmt: skip
    assert len(lines) == MOST_LINES
    assert sum(line.startswith("To do") for line in lines) == 1
    assert lines[3:6] == [lines[3], *(f"{'':11}{line[11:]}" for line in lines[4:6])]
    assert "(and 7 more)" in verdict(long)


texts = st.text(max_size=400)
evidences = st.builds(
    Evidence, why=texts, text=texts, file=texts, who=st.lists(texts, max_size=8).map(tuple)
)
suspects = st.builds(Suspect, name=texts, node=st.none() | texts, why=texts)
candidates = st.builds(Candidate, cause=texts, title=texts, confidence=st.floats(0, 1), why=texts)
diagnoses = st.builds(
    Diagnosis, outcome=st.sampled_from(sorted(OUTCOMES)), cause=st.none() | texts, title=texts,
    actor=st.sampled_from([None, *CHOICES["actor"]]) | texts,
    confidence=st.floats(0, 1), why=texts, stage=texts, iteration=..., since=..., time=...,
    to_do=st.lists(texts, max_size=4).map(tuple),
    events=st.lists(evidences, max_size=4).map(tuple),
    nodes=st.lists(suspects, max_size=8).map(tuple),
    candidates=st.lists(candidates, max_size=6).map(tuple),
    notes=st.lists(texts, max_size=6).map(tuple),
    job=st.fixed_dictionaries({}, optional=dict(
        files=st.integers(0, 10**9), lines=st.integers(0, 10**12),
        world_size=st.none() | st.integers(1, 10**6), ranks_heard=st.integers(0, 10**6),
        first_time=st.none() | st.floats(), last_time=st.none() | st.floats(),
    )),
)  # fmt: skip


@given(diagnoses)
def test_any_diagnosis_fits_on_a_screen_with_the_line_of_the_log_and_who_acts(diagnosis):
    known = replace(diagnosis, events=(evidence(), *diagnosis.events), actor="hardware")
    for result in (diagnosis, known):
        lines = (shown := verdict(result)).split("\n")
        assert len(lines) <= MOST_LINES
        assert all(len(line) <= WIDTH and line.isprintable() for line in lines)
        assert lines[0].startswith(diagnosis.outcome.upper())
    assert "Log        node-03/rank_12.log:8812\n" in shown
    assert "Owner      hardware" in shown


@given(st.text(alphabet="ab .;,é", max_size=200), st.integers(5, 60))
def test_prose_is_cut_at_its_end(text, most):
    short = brief(text, most)
    assert len(short) <= most
    assert text.startswith(short.removesuffix("…").rstrip())


@given(st.text(alphabet="ab /", max_size=60), st.text(alphabet="xyz", min_size=1, max_size=20),
       st.text(alphabet="ab /", max_size=60), st.integers(22, 60))  # fmt: skip
def test_a_point_that_fits_is_kept(before, point, after, most):
    line = "[E407 12:00:01.5 Watch.cpp:61] [Rank 3] timed out at 600 s"
    assert brief(line, 32, point="timed out") == "…[Rank 3] timed out at 600 s"
    short = brief(f"{before}{point}{after}", most, point=point)
    assert len(short) <= most
    assert point in short


@given(st.integers(20, 120))
def test_a_headline_keeps_its_cause_however_long_a_nodes_name_is(length):
    node = suspect(node="a" * length, name=f"node {'a' * length}", rank=None)
    title = "The training hung after step 1210 and was ended 40 min later"
    assert title[:12] in headline(out_of_memory(title=title, nodes=(node,)))


# advice on the next start

FAILED = Diagnosis(
    outcome="failed", cause="some_error", actor="framework", confidence=0.7, iteration=40
)


def attempt(number, cause="some_error", step=40):
    return Attempt(
        number=number, file="a.log", line=1, first_time=None, last_time=None, last_step=step,
        outcome="failed", cause=cause, title="", confidence=0.7,
    )  # fmt: skip


SUSPECTS = tuple(
    Suspect(name=f"node {node}", rank=None, node=node, score=score, why="")
    for node, score in (("n1", 0.9), ("n2", 0.85), ("n3", 0.3))
)


@pytest.mark.parametrize(
    ("changes", "action", "nodes"),
    [
        ({}, "restart", ()),
        ({"actor": "user"}, "stop", ()),
        ({"actor": "platform", "family": "disk full"}, "stop", ()),
        ({"actor": "platform", "iteration": None}, "restart", ()),
        ({"attempts": (attempt(1), attempt(2))}, "stop", ()),
        ({"attempts": (attempt(1), attempt(2, step=41))}, "stop", ()),
        ({"attempts": (attempt(1, step=None), attempt(2, step=None))}, "stop", ()),
        ({"attempts": (attempt(1), attempt(2, step=None))}, "restart", ()),
        ({"attempts": (attempt(1), attempt(2, step=80))}, "restart", ()),
        ({"attempts": (attempt(1, cause="another"), attempt(2))}, "restart", ()),
        ({"actor": "hardware"}, "restart", ()),
        ({"actor": "hardware", "nodes": SUSPECTS[:1]}, "restart_without", ("n1",)),
        ({"actor": "hardware", "nodes": SUSPECTS}, "restart_without", ("n1", "n2")),
        ({"outcome": "terminated", "actor": "platform"}, "restart", ()),
        ({"outcome": "terminated", "actor": "user", "family": "cancelled"}, "stop", ()),
    ],
)
def test_the_advice_follows_from_the_diagnosis(changes, action, nodes):
    advice = replace(FAILED, **changes).restart
    assert (advice.action, advice.nodes, advice.confidence) == (action, nodes, 0.7)
    assert ("--exclude=" + ",".join(nodes) in advice.text) == bool(nodes)
    assert replace(FAILED, **changes).as_json()["restart"]["action"] == action


def test_without_a_cause_there_is_no_advice():
    diagnosis = Diagnosis(outcome="failed")
    assert diagnosis.restart is None
    assert diagnosis.as_json()["restart"] is None
    assert "Restart" not in diagnosis.summary
