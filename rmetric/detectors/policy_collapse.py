"""How reinforcement learning of a language model fails: what its loss does not show.

PPO, GRPO and their kin log a reward, the KL divergence to the reference, the policy's entropy and
the length of its answers beside a loss that shows little. Each rule compares levels of stretches of
the run (`Stretches`), so it needs no scale of the reward and no length of the run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite
from statistics import fmean
from typing import Literal, NamedTuple

from rmetric.detectors.rolling_baseline import LAST, Stretches
from rmetric.records import Record

PolicyKind = Literal[
    "reward_collapsed", "kl_ran_away", "entropy_collapsed", "no_advantage", "length_ran_away",
    "learns_nothing",
]  # fmt: skip

#: A reward has collapsed that lost half of what it had gained, as much of its level, and more than
#: so many times the usual change from one stretch to the next.
_LOST, _FALL_SHARE, _CHANGES = 0.5, 0.15, 4.0
#: KL has run away at so many times its first level, from so many nats on: a token's, an answer's.
_KL_RATIO, _KL_LEAST = 5.0, {"kl": 1.0, "answer_kl": 50.0}
_ENTROPY_RATIO = 0.1
#: Answers are too long from so many times their first length on, or from so many where all are
#: equally long, which is the longest that may be.
_LENGTH_RATIO, _AT_LIMIT = 3.0, 1.25
#: Share of the groups without an advantage; a spread below this share of the highest is none.
_EQUAL, _SPREAD = 0.95, 0.02
#: Nothing is learnt if after so many rewards their level rose by less than this share of the spread
#: within a group, or if all stretches lie within this share of the level.
_ENOUGH, _NO_GAIN, _NO_CHANGE = 100, 0.1, 0.05
#: The same if so many rewards are one number; never of a share of right answers above this one.
_EQUAL_REWARDS, _HIGH = 5, 0.8


@dataclass(frozen=True)
class Finding:
    """A rule that holds at the end of what was logged so far, `since` a step.

    `before` and `after` are the level that is compared and that of the last stretches.
    """

    kind: PolicyKind
    since: int
    before: float
    after: float

    @property
    def title(self) -> str:
        return f"{self.kind.replace('_', ' ').upper()} since step {self.since:,}"

    @property
    def words(self) -> str:
        return self.title.lower().replace("kl ", "KL ")

    @property
    def advice(self) -> str:
        return RULES[self.kind].advice.format(step=f"{self.since:,}")

    @property
    def levels(self) -> str:
        return f"{RULES[self.kind].quantity} {self.before:.3g} -> {self.after:.3g}"


Series = dict[str, Stretches]


def _reward_collapsed(series: Series) -> tuple[float, float] | None:
    reward = series["reward"]
    best, last = reward.best, max(reward.levels[-LAST:])
    fall = best - last
    least = max(_LOST * (best - reward.first), _FALL_SHARE * abs(best), _CHANGES * reward.change)
    return (best, last) if fall > least else None


def _kl_ran_away(series: Series) -> tuple[float, float] | None:
    for name, least in _KL_LEAST.items():
        kl = series[name]
        if kl.is_known and min(kl.levels[-LAST:]) > max(_KL_RATIO * kl.first, least):
            return kl.first, min(kl.levels[-LAST:])
    return None


def _is_at_its_best(reward: Stretches) -> bool:
    """The reward is as high as it was ever, and was lower: the task is learnt."""
    return min(reward.levels[-LAST:]) >= reward.best - reward.change > min(reward.levels)


def _entropy_collapsed(series: Series) -> tuple[float, float] | None:
    entropy = series["entropy"]
    if _is_at_its_best(series["reward"]):
        return None
    first, last = abs(entropy.first), max(map(abs, entropy.levels[-LAST:]))
    return (first, last) if last < _ENTROPY_RATIO * first else None


def _length_ran_away(series: Series) -> tuple[float, float] | None:
    lengths = series["response_length"]
    first, last = lengths.first, min(lengths.levels[-LAST:])
    at_limit = last == max(lengths.levels) and last > _AT_LIMIT * first
    return (first, last) if last > _LENGTH_RATIO * first or at_limit else None


def _no_advantage(series: Series) -> tuple[float, float] | None:
    reward, equal, spread = series["reward"], series["equal_rewards"], series["reward_spread"]
    if _is_at_its_best(reward):
        return None
    if equal.is_known and min(equal.levels[-LAST:]) >= _EQUAL:
        return equal.first, min(equal.levels[-LAST:])
    if spread.is_known and max(spread.levels[-LAST:]) <= _SPREAD * max(spread.levels):
        return max(spread.levels), max(spread.levels[-LAST:])
    return None


def _learns_nothing(series: Series) -> tuple[float, float] | None:
    reward, spread = series["reward"], series["reward_spread"]
    number = len(reward.levels)
    if number >= _EQUAL_REWARDS and len(set(reward.levels)) == 1:
        return reward.levels[0], reward.levels[-1]
    if reward.count < _ENOUGH or _reward_collapsed(series):
        return None
    before, after = fmean(reward.levels[: number // 8]), fmean(reward.levels[-number // 3 :])
    if before > _HIGH and 0 <= min(reward.levels) <= max(reward.levels) <= 1:
        return None  # a share of right answers that was high from the beginning
    flat = max(reward.levels) - min(reward.levels) < _NO_CHANGE * abs(before)
    if spread.is_known:
        # The second is about twice the standard error of the two means.
        flat = flat or after - before < max(_NO_GAIN * fmean(spread.levels), 0.5 * reward.change)
    return (before, after) if flat else None


class Rule(NamedTuple):
    """One way to fail.

    Attributes:
        quantity: whose levels are compared, in words.
        needs: the series that it cannot do without.
        judge: level before and at the end where the rule holds, else None.
        advice: what to do; "{step}" is the first step.
    """

    quantity: str
    needs: tuple[str, ...]
    judge: Callable[[Series], tuple[float, float] | None]
    advice: str


#: The worst first.
RULES: dict[PolicyKind, Rule] = {
    "reward_collapsed": Rule("reward", ("reward",), _reward_collapsed,
        "stop, go back to a checkpoint before step {step}; lower the rate"),
    "kl_ran_away": Rule("KL divergence", (), _kl_ran_away,
        "go back to a checkpoint before step {step}; lower the rate, raise the KL term"),
    "entropy_collapsed": Rule("entropy", ("entropy", "reward"), _entropy_collapsed,
        "go back to a checkpoint before step {step}; lower the rate, add an entropy bonus"),
    "no_advantage": Rule("rewards within a group", ("reward",), _no_advantage,
        "equal rewards teach nothing: check the reward function and the prompts' difficulty"),
    "length_ran_away": Rule("tokens an answer", ("response_length",), _length_ran_away,
        "read some answers of step {step}: a reward may favour length"),
    "learns_nothing": Rule("reward", (), _learns_nothing,
        "check the learning rate, the trained weights and the reward"),
}  # fmt: skip
_NAMES = (
    "reward", "kl", "answer_kl", "entropy", "response_length", "equal_rewards", "reward_spread",
)  # fmt: skip


class PolicyCollapse:
    """Follows what reinforcement learning logs and alarms where a rule holds.

    Attributes:
        findings: rules that hold now, the worst first.
        has_reward: True once a reward was logged.
    """

    def __init__(self) -> None:
        self.findings: list[Finding] = []
        self.has_reward = False
        self._series = {name: Stretches() for name in _NAMES}
        self._since: dict[PolicyKind, int] = {}

    @property
    def is_known(self) -> bool:
        """True once enough was logged to judge the reward."""
        return self._series["reward"].is_known

    @property
    def alarming(self) -> list[Finding]:
        """Without that nothing is learnt, which only the end of a run shows."""
        return [found for found in self.findings if found.kind != "learns_nothing"]

    @property
    def alarm(self) -> bool:
        return bool(self.alarming)

    @property
    def reason(self) -> str:
        reasons = "; ".join(f"{found.words}, {found.levels}" for found in self.alarming)
        return f"{reasons}: {self.alarming[0].advice}" if reasons else ""

    def update(self, record: Record) -> PolicyCollapse:
        """Take the next record; one without a policy's values changes nothing."""
        complete = False
        for name, value in (record.policy or {}).items():
            self.has_reward = self.has_reward or name == "reward"
            if name in self._series and isfinite(value):
                complete = self._series[name].add(record.step, value) or complete
        if complete and self.has_reward:
            self._judge(record.step)
        return self

    def _judge(self, step: int) -> None:
        self.findings = []
        for kind, rule in RULES.items():
            known = all(self._series[name].is_known for name in rule.needs)
            levels = rule.judge(self._series) if known else None
            if levels is None:
                self._since.pop(kind, None)
                continue
            begins = self._series[(*rule.needs, "reward")[0]].begins or [step]
            first = 0 if kind == "learns_nothing" else -min(LAST, len(begins))
            since = self._since.setdefault(kind, begins[first])
            self.findings.append(Finding(kind, since, *levels))
