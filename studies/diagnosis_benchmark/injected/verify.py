"""Verify that a planned fault occurred on the planned rank and in the planned way."""

from __future__ import annotations

import re
import signal
import statistics
from typing import Any

from studies.diagnosis_benchmark.injected.labels import EXCEPTION, FINISHED, TAG
from studies.diagnosis_benchmark.injected.plan import Plan
from studies.diagnosis_benchmark.injected.variants import VARIANTS, variant_of
from studies.diagnosis_benchmark.injected.world import RunRecord

#: A slow rank's own part of a step takes at least so many times its usual.
SLOWER = 5.0
#: Ends of a process that come before the others', by their exit codes.
ENDS_FIRST = {one.name for one in (*VARIANTS["process"], *VARIANTS["limits"])
              if one.code is not None}  # fmt: skip


class NotHappened(Exception):
    """The fault did not come to pass as planned; the job is no evidence."""


def verify(plan: Plan, record: RunRecord) -> dict[str, Any]:
    """How it was seen that the plan came true; raises NotHappened with what was found instead."""
    if not plan.faulty:
        bad = {rank: code for rank, (code, _) in record.exits.items() if code}
        return _require(not bad, "all ranks ended with code 0", f"exit codes {bad}", exit_code=0)
    if record.onset is None:
        raise NotHappened(f"rank {plan.rank} did not reach {plan.stage}, step {plan.step}")
    assert plan.rank is not None
    code, when = record.exits[plan.rank]
    found = {"exit_code": code, "exit_time": when, "onset": record.onset}
    judge = {"slow": _slow, "hang": _hang, "deadlock": _hang, "kill": _ended}.get(
        plan.kind, _raised
    )
    if plan.variant in ENDS_FIRST:
        judge = _ended
    return judge(plan, record, code, found)


def _require(true: bool, how: str, instead: str, **found: Any) -> dict[str, Any]:
    if not true:
        raise NotHappened(f"expected: {how}; found: {instead}")
    return {"how": how, **found}


def _ended(plan: Plan, record: RunRecord, code: int, found: dict[str, Any]) -> dict[str, Any]:
    killed = plan.kind == "kill"
    wanted = -signal.SIGKILL if killed else variant_of(plan.kind, plan.variant).code
    alone = found["exit_time"] <= min(when for _, when in record.exits.values())
    others = killed or any(one for rank, (one, _) in record.exits.items() if rank != plan.rank)
    return _require(
        code == wanted and alone and others, f"exit code {wanted} before any other, who then fail",
        f"code {code}, first to end: {alone}, others failed: {others}", **found,
    )  # fmt: skip


def _hang(plan: Plan, record: RunRecord, code: int, found: dict[str, Any]) -> dict[str, Any]:
    variant, said = variant_of(plan.kind, plan.variant), exceptions(record, None)
    stuck = plan.rank in record.ended
    own = any(re.search(variant.says, one) for one in exceptions(record, plan.rank))
    fine = bool(said) and (stuck or variant.meets) and (own or not variant.says)
    return _require(fine, "others failed in a collective while the rank was stuck or in another",
                    f"code {code}, exceptions {said[:2]}", said=said[:1], **found)  # fmt: skip


def _slow(plan: Plan, record: RunRecord, code: int, found: dict[str, Any]) -> dict[str, Any]:
    assert plan.step is not None
    before = [own for step, own in record.own_seconds if step < plan.step]
    after = [own for step, own in record.own_seconds if step >= plan.step]
    ratio = statistics.median(after) / statistics.median(before) if before and after else 0.0
    # It may finish, run out of its time, or be so slow that the others' collectives time out.
    return _require(
        ratio >= SLOWER, f"its own part of a step took {SLOWER} times as long or more",
        f"ratio {ratio:.1f}, code {code}, ended by {record.by}", ratio=round(ratio, 1), **found,
    )  # fmt: skip


def _raised(plan: Plan, record: RunRecord, code: int, found: dict[str, Any]) -> dict[str, Any]:
    variant = variant_of(plan.kind, plan.variant)
    # Numbers that are wrong everywhere: the launcher may end the faulty rank before it speaks.
    all_say = plan.kind == "numerics"
    pattern, said = variant.says, exceptions(record, None if all_say else plan.rank)
    if not pattern:
        bad = any(one for one, _ in record.exits.values())
        # The launcher may end it before it is gone.
        done = plan.variant != "fewer steps" or any(
            line.rank == plan.rank and FINISHED.search(line.text) for line in record.lines
        )
        return _require(
            bad and done, "the job failed", f"code {code}, as wanted: {done}",
            said=said[:1], **found,
        )  # fmt: skip
    how = "an" if all_say else "exit code 1 after an"
    fine = (code == 1 or all_say) and any(re.search(pattern, one) for one in said)
    return _require(fine, f"{how} exception that matches {pattern!r}",
                    f"code {code}, exceptions {said}", said=said[-1:], **found)  # fmt: skip


def exceptions(record: RunRecord, rank: int | None) -> list[str]:
    """The exception lines after the onset, of one rank or of all."""
    since = record.onset["time"] - 0.02 if record.onset else 0.0
    texts = [
        TAG.sub("", line.text)
        for line in record.lines
        if line.time >= since and line.rank is not None and rank in (None, line.rank)
    ]
    return [text for text in texts if EXCEPTION.match(text) and "ConnectionRefused" not in text]
