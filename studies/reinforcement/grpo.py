"""GRPO at tiny size: a recurrent policy learns from a reward that checks its answers, with faults.

A prompt names a class of tokens (its second token modulo 4); the reward is the share of the
answer's tokens in that class, and 0 for an answer that does not end. Groups of eight answers, the
advantage within a group, a KL penalty to the first policy (Shao et al. 2024, DeepSeekMath, section
4.1; one update a batch, so the ratio is 1 and nothing is clipped).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import log_softmax, softmax

VOCABULARY, CLASSES, LONGEST, END, PROMPT = 17, 4, 24, 0, 3
PROMPTS, GROUP, RATE, KL_WEIGHT = 8, 8, 1e-2, 0.2
#: Fault -> the verdicts that are right for it; each begins at its onset and stays.
FAULTS: dict[str, tuple[str, ...]] = {
    "none": ("healthy",),
    "rate times 30": ("reward_collapsed", "kl_ran_away", "entropy_collapsed"),
    "reward always 0": ("reward_collapsed", "no_advantage"),
    "reward for length": ("length_ran_away",),
    "entropy is punished": ("entropy_collapsed", "kl_ran_away", "reward_collapsed"),
    "advantage with the wrong sign": ("reward_collapsed", "kl_ran_away"),
}


class Policy(nn.Module):
    """Logits of the next token, shape (answers, tokens, vocabulary)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 32)
        self.recurrent = nn.GRU(32, 64, batch_first=True)
        self.head = nn.Linear(64, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.recurrent(self.embed(tokens))[0])

    @torch.no_grad()
    def answer(self, prompts: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Sampled answers after the prompts, and which of their tokens count."""
        hidden, new, tokens, counts = None, prompts, [], []
        alive = torch.ones(len(prompts), dtype=torch.bool)
        for _ in range(LONGEST):
            out, hidden = self.recurrent(self.embed(new), hidden)
            chances = softmax(self.head(out[:, -1]), -1)
            new = torch.multinomial(chances, 1, generator=generator) * alive[:, None]
            tokens.append(new)
            counts.append(alive)
            alive = alive & (new[:, 0] != END)
        return torch.cat(tokens, 1), torch.stack(counts, 1)


def reward_of(prompts: Tensor, answers: Tensor, counts: Tensor) -> Tensor:
    right = (answers % CLASSES == prompts[:, 1:2] % CLASSES) & (answers != END) & counts
    ended = (answers == END).any(1)
    return ended * right.sum(1) / (counts.sum(1) - 1).clamp(min=1)


def train(seed: int, fault: str = "none", *, steps: int = 160, onset: int = 80) -> list[Any]:
    """Train and return what TRL's trainer would log, one dict a step."""
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        policy, reference = Policy(), Policy()
    reference.load_state_dict(policy.state_dict())
    optimizer = torch.optim.Adam(policy.parameters(), lr=RATE)
    logged = []
    for step in range(1, steps + 1):
        active = fault if step >= onset else "none"
        optimizer.param_groups[0]["lr"] = RATE * (30 if active == "rate times 30" else 1)
        prompts = torch.randint(1, VOCABULARY, (PROMPTS, PROMPT), generator=generator)
        prompts = prompts.repeat_interleave(GROUP, 0)
        answers, counts = policy.answer(prompts, generator)
        reward, length = reward_of(prompts, answers, counts), counts.sum(1)
        if active == "reward always 0":
            reward = torch.zeros_like(reward)
        if active == "reward for length":
            reward = reward + 2 * length / LONGEST
        groups = reward.view(PROMPTS, GROUP)
        spread = groups.std(1, keepdim=True)
        advantage = ((groups - groups.mean(1, keepdim=True)) / (spread + 1e-4)).view(-1, 1)
        if active == "advantage with the wrong sign":
            advantage = -advantage
        tokens = torch.cat([prompts, answers], 1)
        chances = log_softmax(policy(tokens)[:, PROMPT - 1 : -1], -1)
        own = chances.gather(-1, answers[..., None])[..., 0]
        with torch.no_grad():
            first = log_softmax(reference(tokens)[:, PROMPT - 1 : -1], -1)
            first = first.gather(-1, answers[..., None])[..., 0]
        gap = torch.where(counts, first - own, 0.0)
        kl = gap.exp() - gap - 1
        entropy = -(chances.exp() * chances.clamp(min=-30)).sum(-1)

        def mean(values: Tensor, counts: Tensor = counts) -> Tensor:
            return (values * counts).sum() / counts.sum()

        loss = mean(-(own - own.detach()).exp() * advantage + KL_WEIGHT * kl)
        if active == "entropy is punished":
            loss = loss + 0.3 * mean(entropy)
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        numbers = {
            "loss": loss, "grad_norm": norm, "reward": reward.mean(), "reward_std": spread.mean(),
            "frac_reward_zero_std": (spread < 1e-6).float().mean(), "kl": mean(kl),
            "entropy": mean(entropy), "completions/mean_length": length.float().mean(),
        }  # fmt: skip
        logged.append({"step": step} | {name: value.item() for name, value in numbers.items()})
    return logged
