"""A detector of your own, judged beside one of the registry on simulated runs."""

from math import nan

import rmetric


class AboveBest:
    """Alarms where the training loss is more than `margin` nats above its lowest value so far."""

    def __init__(self, margin=0.5):
        self.margin, self.best = margin, nan
        self.score, self.alarm, self.reason = nan, False, ""

    def update(self, record):
        loss = record.training_loss
        if loss is not None:
            self.best = loss if loss < self.best or self.best != self.best else self.best
            self.score = loss - self.best
            # A comparison with nan is False: a loss that is no number is an alarm, too.
            self.alarm = not self.score <= self.margin
            self.reason = f"loss {loss:.2f}, lowest {self.best:.2f}" if self.alarm else ""
        return self


specs = [
    rmetric.RunSpec(
        experiment_id=f"{fault}_{seed}", architecture="Llama-3-8B", fault=fault, seed=seed,
        evaluate_every=10,
    )
    for fault in ("NONE", "LR_SPIKE")
    for seed in range(4)
]  # fmt: skip
runs = rmetric.simulate(specs)
for detector in (AboveBest, "calibrated", "loss_z_score"):
    scores = rmetric.evaluate(runs, detector, protocol="causal")
    name = detector if isinstance(detector, str) else detector.__name__
    print(f"{name:13} F1 {scores.f1.point:.2f}, {scores.false_alarms} false alarms")
