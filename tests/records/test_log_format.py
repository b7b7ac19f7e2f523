"""The schema in docs/ is what the library writes, and the page beside it names every field."""

import json
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from rmetric import HardwareEvent, Record, RMetricConfig, Run, Truth
from rmetric.log_entries import NORMALISED_KEYS, SIGNAL_KEYS
from rmetric.logs import read_log, run_lines
from rmetric.metric import MODES, VARIANTS
from tests.detectors.streams import CONFIGS
from tests.records.test_logs import METRICS, START, SUCCESS, runs, strict

ROOT = Path(__file__).resolve().parents[2]
SCHEMA = json.loads((ROOT / "docs/log_format.schema.json").read_text())
PAGE = (ROOT / "docs/log_format.md").read_text()
VALIDATOR = Draft202012Validator(SCHEMA)

#: Type of a field of `Record` -> a value.
VALUES = {
    "float": 0.5,
    "int": 3,
    "bool": False,
    "tuple[float, ...]": (0.9, -0.1),
    "tuple[str, ...]": ("learning_rate",),
    "dict[str, float]": {"host": 1e9},
    "tuple[HardwareEvent, ...]": (HardwareEvent(1.0, "xid_79", 0),),
}
#: What the metric states in its own words.
OF_THE_METRIC = {"stated_score", *SIGNAL_KEYS, *NORMALISED_KEYS}
FIELDS = [each for each in fields(Record) if each.name not in OF_THE_METRIC]
FULL = {each.name: VALUES[str(each.type).removesuffix(" | None")] for each in FIELDS}
EVERYTHING = Run(
    id="everything",
    records=[
        Record(**FULL | {"step": step, "time": 5.0 * step, "validation_loss": 3.0 + step})
        for step in (1, 2)
    ],
    truth=Truth(fault="LR_SPIKE", onset_step=2, outcome="failed", failure_step=2),
)
LINES = [strict(line) for line in run_lines(EVERYTHING, RMetricConfig())]


def blocks_of_the_page():
    return [
        json.loads(line)
        for block in PAGE.split("```json\n")[1:]
        for line in block.partition("```")[0].splitlines()
    ]


def test_the_schema_is_a_schema():
    Draft202012Validator.check_schema(SCHEMA)


@given(runs(), CONFIGS, st.sampled_from(list(MODES)))
def test_whatever_is_written_has_the_form(run, config, mode):
    for line in run_lines(run, config, mode):
        VALIDATOR.validate(strict(line))


@pytest.mark.parametrize("lines", [LINES, blocks_of_the_page()], ids=["everything", "page"])
def test_full_lines_have_the_form(lines):
    assert len(lines) > 4
    for line in lines:
        VALIDATOR.validate(line)


PUBLISHED = {"step": 500, "event": "METRICS", "sigma_sq_norm": 0.5, "r_metric": 0.2}
WEIGHTED = {"r_metric_weights": {"w1_lambda": 0.0, "w2_sigma_sq": 0.5, "w3_delta_l": 0.78}}


@pytest.mark.parametrize(
    "line",
    [
        START,
        METRICS,
        SUCCESS,
        json.dumps({"event": "EXPERIMENT_START", "config": WEIGHTED}),
        *(json.dumps(PUBLISHED | {"alerts": a}) for a in ({}, {"r_metric": 400, "grad_norm": 0})),
        *(json.dumps(PUBLISHED | {"alerts": {"r_metric": a}}) for a in (None, 0, True)),
        json.dumps(PUBLISHED | {"sigma_sq_source": "logged_normalised"}),
    ],
)
def test_the_sparser_published_form_is_allowed(line):
    VALIDATOR.validate(strict(line))


@pytest.mark.parametrize("path", sorted(ROOT.glob("logs_FULL_METRIC/*_rep1.jsonl")), ids=str)
def test_the_sample_logs_have_the_form_and_are_read(path):
    lines = path.read_bytes().splitlines()
    for line in lines:
        VALIDATOR.validate(strict(line))
    run = read_log(path)
    assert run.notes == []
    assert len(run.records) == sum(b'"METRICS"' in line for line in lines)


@pytest.mark.parametrize("name", ["metrics", "metric_settings", "hardware_event", "ground_truth"])
def test_the_schema_has_no_field_that_is_never_written(name):
    metrics, start, end = LINES[-2], LINES[0], LINES[-1]
    written = {
        "metrics": metrics,
        # The variant stands only where it is not the paper's.
        "metric_settings": start["config"]["metric_settings"] | {"variant": "paper"},
        "hardware_event": metrics["hardware_events"][0],
        "ground_truth": end["ground_truth"],
    }[name]
    assert set(SCHEMA["$defs"][name]["properties"]) == set(written)


def test_the_schema_knows_every_variant_of_the_metric():
    stated = SCHEMA["$defs"]["metric_settings"]["properties"]["variant"]["enum"]
    assert stated == list(VARIANTS)


def test_the_page_names_every_field_and_every_word():
    for name, value in walk(SCHEMA["$defs"]):
        for word in (name, *value.get("enum", ()), value.get("const", name)):
            assert word == 1 or f"{word}`" in PAGE or f'"{word}"' in PAGE, word


def walk(node):
    """Every property below `node`, with its name."""
    if isinstance(node, dict):
        for name, value in node.get("properties", {}).items():
            yield name, value
        for value in node.values():
            yield from walk(value)


@pytest.mark.parametrize(
    "change",
    [
        {"surprise": 1},
        {"event": "METRIC"},
        {"step": 1.5},
        {"step": None},
        {"training_loss": "nan"},
        {"training_loss": None},
        {"worker_gradient_norms": [1.0, None]},
        {"hardware_events": [{"kind": "xid"}]},
        {"hardware_events": [{"time_seconds": 1.0, "kind": "xid", "severity": 3}]},
        {"sigma_sq_source": "guessed"},
        {"lambda_norm": 1.5},
        {"r_metric": -0.1},
        {"alerts": {"r_metric": "yes"}},
        {"alerts": {"r_metric": -1}},
        {"alerts": {"r_metric": 1.5}},
    ],
)
def test_a_line_of_another_form_is_refused(change):
    metrics = LINES[-2]
    assert metrics["event"] == "METRICS"
    assert VALIDATOR.is_valid(metrics)
    assert not VALIDATOR.is_valid(metrics | change)
