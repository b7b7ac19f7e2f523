"""The verdict on a run of reinforcement learning: by its reward and its policy, not by its loss."""

from __future__ import annotations

from collections.abc import Sequence

from rmetric._util.printed import counted
from rmetric.detectors.policy_collapse import RULES, PolicyCollapse
from rmetric.evaluation.verdict_words import RunVerdict, levels
from rmetric.records import Record


def judge_policy(records: Sequence[Record], alarms: Sequence[int] = ()) -> RunVerdict | None:
    """The verdict by the reward and what is logged beside it; None for a log without a reward.

    Args:
        records: of one run, in the order of the log.
        alarms: first step of each alarm of a detector, rising.
    """
    policy = PolicyCollapse()
    for record in records:
        policy.update(record)
    rewards = [r.policy["reward"] for r in records if r.policy and "reward" in r.policy]
    if not rewards:
        return None
    course = levels("reward", rewards[0], rewards[-1])
    if policy.findings:
        worst, *others = policy.findings
        return RunVerdict(
            kind=worst.kind,
            text=worst.title,
            loss="reward",
            advice=RULES[worst.kind].advice.format(step=f"{worst.since:,}"),
            detail="; ".join([worst.levels, course, *(other.words for other in others)]),
            onset_step=worst.since,
            before=worst.before,
            after=worst.after,
            alarm_step=next((step for step in alarms if step >= worst.since), None),
            num_events=len(policy.findings),
        )
    if not policy.is_known:
        what = f"{counted(len(rewards), 'record')} with a reward"
        return RunVerdict.of("few", what=what, loss="reward")
    text = "HEALTHY: no collapse of the reward seen"
    return RunVerdict(kind="healthy", text=text, loss="reward", detail=course, advice="nothing")
