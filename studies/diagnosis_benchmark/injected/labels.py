"""Which lines indicate the failure: plain rules, since rank and moment of the fault are known.

Roles, as in the labels of the real logs:

- cause: the faulty rank's own exception or abort where the fault makes it raise one, and what
  torch warns of there; its slow times and warnings of slow steps; a nan that it says; that it
  finished where it was to end before the others.
- echo: the exceptions of the other ranks, torch's warnings about lost connections, waits of the
  others that a slow rank makes long, launcher lines about ranks that ended after the faulty one.
- symptom: launcher lines about the faulty rank or the job's end, its "training failed", steps
  that a slow rank makes long, losses and norms that are no numbers or exploded, a message of
  another size that a rank gets where one runs other code and, where neither the faulty rank nor
  a launcher says anything of it, the first kind of echo.
- context: frames of tracebacks and stacks that belong to those, headers and rulers.

Only lines after the onset count. Harmless noise has no label.
"""

from __future__ import annotations

import re
import statistics
from collections import defaultdict
from typing import Any

from studies.diagnosis_benchmark.injected.launchers import WrittenLine
from studies.diagnosis_benchmark.injected.plan import Plan
from studies.diagnosis_benchmark.injected.variants import variant_of
from studies.diagnosis_benchmark.injected.world import RunRecord

#: Kinds whose faulty rank says itself what is wrong with it.
SPEAKING = ("exception", "data", "memory", "environment", "network")
#: A line counts from here before the onset: it may be received a moment before it is told.
SLACK_SECONDS = 0.02
#: A part of a step is slow from here on, in milliseconds.
SLOW_MS = 100.0
#: A whole step is long from so many times the usual on.
LONGER = 4.0

#: torch's prefix of an uncaught exception's lines, or of its loggers' lines.
TAG = re.compile(r"^(?:\[rank\d+\]: ?)?(?:[VIWEC]\d{4} [\d:.]+ \d+ \S+:\d+\] ?)?")
HEADER = re.compile(r"Traceback \(most recent call last\):$")
EXCEPTION = re.compile(r"^(?:[\w.]+\.)?\w*(?:Error|error|Exception|Interrupt|BadGzipFile)\b(?::|$)")
CHAINED = re.compile(r"^(During handling of|The above exception was)")
LOST = re.compile(
    r"^\[(?:rank\d+\]:\[)?[WE]\d+ .*\[c10d\]|^\[(?:rank\d+\]:\[)?[WE]\d+ .*(?:ocket|TCPStore|gloo)"
)
#: A mismatch of collectives is an exception in a thread of gloo's, which nobody catches.
ABORTED = re.compile(r"^(terminate called|  what\(\):)")
#: The C library's and faulthandler's last words.
CRASHED = re.compile(
    r"^(Fatal Python error: |(free|malloc|realloc)\w*\(\): |double free|munmap_chunk|corrupted )"
)
BESIDE = re.compile(r"^(Extension modules: |Exception in thread )")
REST_OF_MESSAGE = (" ", "frame #", "Exception raised")
FINISHED = re.compile(r"training finished after \d+ steps")
BUILT = re.compile(r"model built: \d+ parameters")
NATIVE = re.compile(r"^(frame #\d+: |Exception raised from |<omitting python frames>)")
STACK = re.compile(r"^(Current thread|Thread|Stack) .*most recent call first")
FAILED = re.compile(r"training failed at step")
TIMES = re.compile(
    r"time \(ms\) of step .*data ([\d.]+) \| forward-backward ([\d.]+) \| all-reduce ([\d.]+)"
)
STEP_TIME = re.compile(r"step \d+ \|.* \| ([\d.]+) s$|elapsed time per iteration \(ms\): ([\d.]+)")
WARNED = re.compile(r"took [\d.]+ s before the all-reduce")
#: Loss and norm of the gradients, as a line of a step or of an evaluation says them.
NUMBER = re.compile(r"\b(loss|grad[ _]norm)\W{1,4}(nan\b|inf\b|\d[\d.]*(?:e[+-]?\d+)?)", re.I)
#: From here on they have exploded; the usual ones are below 10.
EXPLODED = {"loss": 100.0, "norm": 1000.0}


Told = tuple[WrittenLine, str, str]  # a line, its role, and why
NOISE = "could not push telemetry"


def label(plan: Plan, record: RunRecord) -> list[dict[str, Any]]:
    """File, line, role and reason, in the order of file and line; none for a healthy job."""
    if not plan.faulty or record.onset is None:
        return []
    since = record.onset["time"] - SLACK_SECONDS
    spoken: dict[int | None, list[WrittenLine]] = defaultdict(list)
    for line in record.lines:
        if line.time >= since:
            spoken[line.rank].append(line)
    found: dict[tuple[str, int], Told] = {}
    for rank, lines in spoken.items():
        if rank is None:
            told = [(line, *_launcher_role(plan, record, line.text)) for line in lines]
        else:
            told = _of_rank(plan, rank, lines)
            told += _long_steps(record, rank, since) if plan.kind == "slow" else []
        found.update({(line.file, line.number): (line, role, why) for line, role, why in told})
    _first_echo(found)
    return [
        {"file": file, "line": number, "role": role, "reason": why}
        for (file, number), (_, role, why) in sorted(found.items())
    ]


def _of_rank(plan: Plan, rank: int, lines: list[WrittenLine]) -> list[Told]:
    faulty = rank == plan.rank
    says = variant_of(plan.kind, plan.variant).says
    role = "echo", "it ran into it too" if faulty else "exception of a rank that lost another"
    if faulty and (plan.kind in SPEAKING or says):
        role = "cause", "exception of the faulty rank"
    out = _tracebacks(lines, role)
    if plan.kind == "numerics" and not faulty:
        out = [
            (line, "symptom", "what is wrong everywhere")
            if role == "echo" and re.search(says, line.text)
            else (line, role, why)
            for line, role, why in out
        ]
    taken = {(line.file, line.number) for line, _, _ in out}
    stack = False
    for line in lines:
        text = TAG.sub("", line.text)
        stack = bool(STACK.match(text)) or (stack and text.startswith("  "))
        if (line.file, line.number) in taken:
            continue
        if stack:
            out.append((line, "context", "stack of a process that is ended"))
        else:
            out += _of_line(plan, line, text, faulty)
    return out


def _of_line(plan: Plan, line: WrittenLine, text: str, faulty: bool) -> list[Told]:
    """Of a line outside tracebacks and stacks; `text` is without torch's prefix."""
    skewed = "symptom" if plan.kind == "skew" else "echo"
    rules = (
        (FAILED.search(text), "symptom", "echo", "the trainer says that it failed"),
        (LOST.match(line.text), "cause" if plan.kind in SPEAKING else "echo", "echo",
         "torch lost a connection or got none"),
        (ABORTED.match(text), "cause", skewed, "gloo ends the process"),
        (CRASHED.match(text), "cause", "echo", "last words of a crash"),
        (BESIDE.match(text), "context", "context", "beside a stack or traceback"),
        (NATIVE.match(text), "context", "context", "native frames of a warning of torch"),
    )  # fmt: skip
    for found, of_faulty, of_other, why in rules:
        if found:
            return [(line, of_faulty if faulty else of_other, why)]
    if plan.kind in OF_KIND:
        return OF_KIND[plan.kind](line, faulty)
    if faulty and plan.variant in OF_VARIANT:
        pattern, role, why = OF_VARIANT[plan.variant]
        return [(line, role, why)] if pattern.search(text) else []
    return []


def _tracebacks(lines: list[WrittenLine], role: tuple[str, str]) -> list[Told]:
    """Lines of each traceback from header to message, without those of noise."""
    out: list[Told] = []
    inside = message = False
    for place, line in enumerate(lines):
        text = TAG.sub("", line.text)
        if HEADER.search(text):
            inside, message = place == 0 or NOISE not in lines[place - 1].text, False
        elif CHAINED.match(text):
            inside, message = inside or message, False
        elif inside and EXCEPTION.match(text):
            out.append((line, *role))
            inside, message = False, True
            continue
        elif message and (not text.strip() or text.startswith(REST_OF_MESSAGE)):
            out.append((line, "context", "rest of an exception's message"))
            continue
        else:
            message = False
        if inside:
            out.append((line, "context", "frame or header of a traceback"))
    return out


def _slow(line: WrittenLine, faulty: bool) -> list[Told]:
    if faulty and WARNED.search(line.text):
        return [(line, "cause", "the faulty rank warns of its own time")]
    times = TIMES.search(line.text)
    if times is None:
        return []
    data, compute, wait = map(float, times.groups())
    if faulty and data + compute > SLOW_MS:
        return [(line, "cause", "time of the faulty rank's own part")]
    if not faulty and wait > SLOW_MS and data + compute < SLOW_MS:
        return [(line, "echo", "it waits for another")]
    return []


def _exploded(line: WrittenLine, faulty: bool) -> list[Told]:
    for name, value in NUMBER.findall(line.text):
        limit = EXPLODED["norm" if "norm" in name.lower() else "loss"]
        if not float(value) < limit:
            role = "cause" if faulty else "symptom"
            return [(line, role, "a loss or norm that is no number or exploded")]
    return []


OF_KIND = {"slow": _slow, "numerics": _exploded}
#: Of the faulty rank: what a line holds, its role, and why.
OF_VARIANT = {
    "fewer steps": (FINISHED, "cause", "the faulty rank is done before the others"),
    "hidden size": (BUILT, "context", "the model of the faulty rank"),
    "nan": (re.compile(r"\bloss\b\W+nan\b", re.I), "cause", "the faulty rank's loss"),
}


def _long_steps(record: RunRecord, rank: int, since: float) -> list[Told]:
    """Steps that take `LONGER` times what they took before the onset, as the step lines say."""
    before: list[tuple[float, WrittenLine]] = []
    after: list[tuple[float, WrittenLine]] = []
    for line in record.lines:
        told = STEP_TIME.search(line.text) if line.rank == rank else None
        if told:
            seconds = float(told[1]) if told[1] else float(told[2]) / 1000
            (before if line.time < since else after).append((seconds, line))
    if not before:
        return []
    usual = statistics.median(seconds for seconds, _ in before)
    why = f"the step takes {LONGER:.0f} times the usual or more"
    return [(line, "symptom", why) for seconds, line in after if seconds >= LONGER * usual]


def _launcher_role(plan: Plan, record: RunRecord, text: str) -> tuple[str, str]:
    if "CANCELLED" in text or "death signal" in text:
        return "symptom", "the launcher ends the job"
    if "closing signal" in text or "Terminating StepId" in text:
        return "echo", "the launcher ends the ranks that are left"
    tasks = re.search(r"tasks? ([\d,-]+): ", text) or re.search(r"rank\s*: (\d+) \(local", text)
    if tasks is not None:
        ends = [part.partition("-") for part in tasks[1].split(",")]
        if any(int(low) <= (plan.rank or 0) <= int(high or low) for low, _, high in ends):
            return "symptom", "the launcher names the faulty rank's exit"
        return "echo", "the launcher names another rank's exit"
    pid = re.search(r"exitcode.*\(pid: (\d+)\)", text)
    if pid:
        mine = plan.rank is not None and int(pid[1]) == record.pids[plan.rank]
        return ("symptom" if mine else "echo"), "the launcher names a failed process"
    if "ChildFailedError" in text or text.endswith(" FAILED"):
        return "symptom", "the launcher says that the job failed"
    return "context", "part of the launcher's report"


def _first_echo(found: dict[tuple[str, int], Told]) -> None:
    """Label the first kind of echo as symptom where there is no other."""
    if any(role in ("cause", "symptom") for _, role, _ in found.values()):
        return
    echoes = [line for line, role, _ in found.values() if role == "echo"]
    # An exception says more than that there was one.
    echoes = [line for line in echoes if EXCEPTION.match(TAG.sub("", line.text))] or echoes
    if not echoes:
        return
    first = _kind_of(min(echoes, key=lambda line: line.time))
    for line in echoes:
        if _kind_of(line) == first:
            why = "first kind of echo, nothing says more"
            found[line.file, line.number] = line, "symptom", why


def _kind_of(line: WrittenLine) -> str:
    return re.sub(r"\d+", "0", TAG.sub("", line.text))[:140]
