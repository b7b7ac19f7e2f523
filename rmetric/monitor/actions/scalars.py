"""A record as the named numbers that a dashboard draws."""

from __future__ import annotations

from dataclasses import fields
from math import isnan

from rmetric.metric import RMetric
from rmetric.records import Record

#: Not measured in live training, or no number.
LEFT_OUT = {"step", "time", "events", "failure_rate", "gradient_variance", "loss_drift"}


def scalars(record: Record, metric: RMetric) -> dict[str, float]:
    """Everything that was measured at a step, and what the metric made of it.

    What is there once a layer or a worker is named ``field/layer`` and
    ``field/0``. What was not measured is absent; nan and ±inf stay what they are.
    """
    found: dict[str, float] = {"r_metric": metric.score}
    for name, raw, normalised in zip(
        metric.raw._fields, metric.raw, metric.normalised, strict=True
    ):
        if not isnan(raw):
            found |= {name: raw, f"{name}_normalised": normalised}
    for field in fields(record):
        value = getattr(record, field.name)
        if field.name in LEFT_OUT or value is None:
            continue
        if isinstance(value, dict):
            found |= {f"{field.name}/{key}": number for key, number in value.items()}
        elif isinstance(value, tuple):
            found |= {
                f"{field.name}/{index}": number
                for index, number in enumerate(value)
                if isinstance(number, (int, float))
            }
        else:
            found[field.name] = value
    if record.events is not None:
        found["hardware_events"] = sum(event.is_hardware for event in record.events)
    return found
