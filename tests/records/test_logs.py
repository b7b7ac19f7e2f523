import json
import subprocess
import sys
from dataclasses import replace
from math import inf
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmetric import Record, RMetric, RMetricConfig, Run, Truth
from rmetric.log_entries import OUTCOMES
from rmetric.logs import LogError, log_path, metrics_line, read_lines, read_log, run_lines
from rmetric.metric import MODES
from tests.detectors.streams import CONFIGS, ODDITIES, TAME, WILD, streams

STEPS = st.integers(1, 5000)
TRUTHS = st.builds(
    Truth, fault=st.sampled_from(["NONE", "LR_SPIKE", "DATA_DOMAIN_SHIFT"]),
    severity=st.none() | st.floats(allow_nan=False), benign=st.booleans(),
    applicable=st.booleans(), onset_step=st.none() | STEPS, duration_steps=st.none() | STEPS,
    outcome=st.sampled_from(OUTCOMES), failure_kind=st.none() | st.text(),
    failure_step=st.none() | STEPS,
)  # fmt: skip


@st.composite
def runs(draw):
    records = draw(streams(values=TAME | WILD, max_size=12))
    for record in records:
        for name in ("training_loss", "learning_rate", "update_norm", "parameter_norm"):
            setattr(record, name, draw(st.none() | st.floats() | ODDITIES))
        record.worker_gradient_cosines = draw(st.none() | st.tuples(st.floats(), st.floats()))
        record.non_finite_gradients = draw(st.none() | st.integers(0, 2**63 - 1))
        record.layer_gradient_norms = draw(st.none() | st.dictionaries(st.text(), st.floats()))
        record.attention_logit_max = draw(st.none() | st.floats())
        record.planned_events = draw(st.none() | st.tuples(st.text()))
        record.loss_scale = draw(st.none() | st.floats() | ODDITIES)
        record.skipped = draw(st.none() | st.booleans())
    config = {
        "model_type": "Mistral-7B",
        "clip": draw(st.floats()),
        "seed": draw(st.integers(0, 2**64 - 1)),
    }
    return Run(id="run_7", records=records, config=config, truth=draw(st.none() | TRUTHS))


def strict(line):
    """`line` by the letter of the standard, which knows no NaN."""

    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(line, parse_constant=refuse)


@given(runs(), CONFIGS, st.sampled_from(list(MODES)))
def test_what_is_written_is_read_back(run, config, mode):
    back = read_lines(log_path_of(run), run_lines(run, config, mode))
    logged = [strict(line) for line in run_lines(run, config, mode)]
    stated = [entry["r_metric"] for entry in logged if entry["event"] == "METRICS"]
    assert [record.stated_score for record in back.records] == stated
    measured = [replace(record, stated_score=None) for record in back.records]
    assert repr(measured) == repr(run.records)  # nan equals itself in words only
    assert back.truth == run.truth
    assert back.id == run.id
    assert run.config.keys() <= back.config.keys()
    assert back.notes == (
        [] if run.truth else ["the log has no final line: how the run ended is unknown"]
    )


@given(runs(), CONFIGS, st.sampled_from(list(MODES)))
def test_a_replay_gives_exactly_the_logged_scores(run, config, mode):
    lines = list(run_lines(run, config, mode))
    logged = [entry["r_metric"] for entry in map(strict, lines) if entry["event"] == "METRICS"]
    back = read_lines(log_path_of(run), lines)
    metric = RMetric(RMetricConfig(**back.config["metric_settings"]))
    assert [metric.update(record).score for record in back.records] == logged


@given(runs(), CONFIGS)
def test_a_log_written_twice_is_the_same_log(run, config):
    first = list(run_lines(run, config))
    back = read_lines(log_path_of(run), first)
    assert list(run_lines(back, config)) == first


def log_path_of(run):
    return log_path(Path("somewhere"), run.id)


def test_statements_that_the_metric_did_not_use_are_not_kept():
    record = Record(step=1, validation_loss=3.0, loss_drift=9.0, gradient_variance=2.0)
    entry = strict(metrics_line(record, RMetric().update(record)))
    assert "delta_l" not in entry  # undefined at the first evaluation, and not 9
    assert entry["delta_l_source"] == "validation_loss"
    assert (entry["sigma_sq"], entry["sigma_sq_source"]) == (2.0, "logged")


def test_a_line_says_nothing_of_a_signal_that_its_record_says_nothing_of():
    metric = RMetric()
    metric.update(Record(step=1, loss_drift=1.0))
    metric.update(Record(step=2, loss_drift=3.0))
    record = Record(step=3, training_loss=2.0)
    entry = strict(metrics_line(record, metric.update(record)))
    assert "delta_l" not in entry
    assert "delta_l_source" not in entry
    assert entry["r_metric"] == 0.70


def test_numbers_of_numpy_are_written_as_numbers():
    norms = (np.float64(1.0), np.float64(3.0))
    record = Record(step=1, validation_loss=np.float32(2.5), worker_gradient_norms=norms)
    entry = strict(metrics_line(record, RMetric().update(record)))
    assert (entry["validation_loss"], entry["sigma_sq"]) == (2.5, 1.0)


def test_the_fault_line_stands_where_the_fault_begins():
    truth = Truth(fault="LR_SPIKE", severity=5.0, onset_step=20, duration_steps=3)
    run = Run(id="r", records=[Record(step=s) for s in (10, 20, 30)], truth=truth)
    entries = [strict(line) for line in run_lines(run, RMetricConfig())]
    assert [(e["event"], e.get("step")) for e in entries] == [
        ("EXPERIMENT_START", None),
        ("METRICS", 10),
        ("FAULT_INJECTED", 20),
        ("METRICS", 20),
        ("METRICS", 30),
        ("EXPERIMENT_SUCCESS", 30),
    ]
    assert entries[2]["details"] == "fault LR_SPIKE, severity 5, 3 steps"


@pytest.mark.parametrize(("failure_step", "injected"), [(45, True), (35, False)])
def test_a_fault_is_logged_only_where_the_run_lived_to_see_it(failure_step, injected):
    truth = Truth(fault="LR_SPIKE", onset_step=40, outcome="failed", failure_step=failure_step)
    run = Run(id="r", records=[Record(step=10), Record(step=30)], truth=truth)
    events = [strict(line)["event"] for line in run_lines(run, RMetricConfig())]
    assert ("FAULT_INJECTED" in events) == injected
    assert events[-1] == "EXPERIMENT_FAILURE"


START = b'{"event":"EXPERIMENT_START","config":{"experiment_id":"theirs","num_workers":8}}\n'
METRICS = b'{"step":100,"event":"METRICS","validation_loss":3.5,"delta_l":-0.2,"r_metric":0.1}\n'
SUCCESS = b'{"event":"EXPERIMENT_SUCCESS"}\n'


@pytest.fixture
def written(tmp_path):
    def write(*lines):
        path = tmp_path / "theirs.jsonl"
        path.write_bytes(b"".join(lines))
        return path

    return write


def test_the_sparser_form_of_existing_logs_is_read(written):
    config = (
        b'{"event":"EXPERIMENT_START","config":{"experiment_id":"e1","model_type":"GPT-4-MoE",'
        b'"fault_injection":{"type":"LR_SPIKE","trigger_step":2500,"params":{}}}}\n'
    )
    stated = b'{"step":100,"event":"METRICS","lambda":2.0,"sigma_sq":0.5,"delta_l":-0.1}\n'
    fault = b'{"step":2500,"event":"FAULT_INJECTED","details":"x15"}\n'
    failure = b'{"step":2507,"event":"EXPERIMENT_FAILURE","reason":"loss exploded"}\n'
    run = read_log(written(config, stated, fault, failure))
    assert run.id == "e1"
    assert run.records == [
        Record(step=100, failure_rate=2.0, gradient_variance=0.5, loss_drift=-0.1)
    ]
    assert run.truth == Truth(
        fault="LR_SPIKE", onset_step=2500, outcome="failed", failure_kind="loss exploded",
        failure_step=2507,
    )  # fmt: skip
    assert run.notes == []


@pytest.mark.parametrize(
    ("fault", "outcome"), [("NONE", "healthy"), ("ROUTER_IMBALANCE", "absorbed")]
)
def test_a_success_without_ground_truth_is_healthy_or_absorbed(written, fault, outcome):
    config = {"fault_injection": {"type": fault, "trigger_step": 50}}
    start = json.dumps({"event": "EXPERIMENT_START", "config": config}).encode() + b"\n"
    truth = read_log(written(start, METRICS, SUCCESS)).truth
    assert (truth.fault, truth.outcome) == (fault, outcome)
    assert truth.onset_step == (None if fault == "NONE" else 50)


def test_a_log_without_its_first_line_is_read(written):
    run = read_log(written(METRICS, SUCCESS))
    assert (run.id, run.config, len(run.records)) == ("theirs", {}, 1)
    assert run.truth == Truth()


def test_bare_nan_and_infinity_are_read(written):
    line = b'{"step":5,"event":"METRICS","training_loss":NaN,"validation_loss":-Infinity}\n'
    record = read_log(written(START, line)).records[0]
    assert repr(record.training_loss) == "nan"
    assert record.validation_loss == -inf


def test_blank_lines_and_a_byte_order_mark_are_no_obstacle(written):
    run = read_log(written(b"\xef\xbb\xbf" + START, b"\n", METRICS, b"  \n", SUCCESS))
    assert len(run.records) == 1
    assert run.id == "theirs"


@pytest.mark.parametrize("cut", [1, 10, len(METRICS) - 2])
def test_a_cut_last_line_is_left_out_and_noted(written, cut):
    run = read_log(written(START, METRICS, METRICS[:cut]))
    assert len(run.records) == 1
    assert run.notes[0] == "line 3 is cut off and was left out"
    assert run.truth is None


def metrics(**fields):
    return json.dumps({"event": "METRICS", **fields}).encode() + b"\n"


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b"step 100 loss 3.5\n", "not JSON: 'step 100 loss 3.5'"),
        (b"\x89PNG\r\n", "not JSON"),
        (b"[" * 100_000 + b"\n", "nested too deeply"),
        (b"[1, 2]\n", "found [1, 2]; a JSON object is accepted"),
        (metrics(), "'step' is missing"),
        (metrics(step=True), "'step': found True; a whole number below 2^63 is accepted"),
        (metrics(step=1.5), "'step': found 1.5; a whole number"),
        (metrics(step=1, training_loss="low"), "'training_loss': found 'low'; a number, null"),
        (metrics(step=1, training_loss=10**400), "'training_loss': found 10000"),
        (metrics(step=1, worker_gradient_norms="1.0"), "'worker_gradient_norms': found '1.0'"),
        (metrics(step=1, worker_gradient_norms=[1.0, None]), "found None; a number"),
        (metrics(step=1, hardware_events=["xid"]), "'hardware_events': found 'xid'; a JSON object"),
        (metrics(step=1, hardware_events=[{"kind": "xid"}]), "an event has time_seconds and kind"),
        (metrics(step=1, hardware_events=[{"time_seconds": 1, "kind": "xid", "worker": "a"}]),
         "'worker': found 'a'; a whole number"),
        (b'{"event":"EXPERIMENT_START","config":[1]}\n', "'config': found [1]; a JSON object"),
        (b'{"event":"EXPERIMENT_START","config":{"fault_injection":{"type":7}}}\n',
         "'type': found 7; a string"),
        (b'{"event":"FAULT_INJECTED","step":"soon"}\n', "'step': found 'soon'; a whole number"),
        (b'{"event":"EXPERIMENT_SUCCESS","ground_truth":1}\n', "'ground_truth': found 1"),
        (b'{"event":"EXPERIMENT_SUCCESS","ground_truth":{"benign":"no"}}\n',
         "'benign': found 'no'; true or false"),
        (b'{"event":"EXPERIMENT_SUCCESS","ground_truth":{"outcome":"fine"}}\n',
         "'outcome': found 'fine'; known are healthy, absorbed, not_applicable, failed"),
    ],
)  # fmt: skip
def test_a_line_that_cannot_be_read_is_named(written, line, problem):
    path = written(START, METRICS, line, METRICS)
    with pytest.raises(LogError) as refusal:
        read_log(path)
    assert str(refusal.value).startswith(f"{path}, line 3: ")
    assert problem in str(refusal.value)
    assert (refusal.value.path, refusal.value.line) == (path, 3)
    assert len(str(refusal.value)) < len(str(path)) + 200


def test_a_binary_file_is_no_log_even_without_a_line_end(written):
    with pytest.raises(LogError, match="line 1: not JSON"):
        read_log(written(b"\x7fELF\x02\x01\x01" + bytes(100)))


def test_whole_floats_are_whole_numbers(written):
    run = read_log(written(START, metrics(step=100.0)))
    assert repr(run.records[0].step) == "100"


@pytest.mark.parametrize("name", ["", ".", "..", "../up", "a/b", "a\\b", "C:x", "nul\0", ".hidden"])
def test_an_id_that_could_leave_the_folder_names_no_log(tmp_path, name):
    with pytest.raises(ValueError, match="cannot name a file"):
        log_path(tmp_path, name)


def test_a_writer_that_is_killed_leaves_no_file_under_the_final_name(tmp_path):
    code = """
import os, signal, sys
from pathlib import Path
from rmetric.logs import write_atomically

def lines():
    for _ in range(100_000):
        yield b"x" * 100
    os.kill(os.getpid(), signal.SIGKILL)

write_atomically(Path(sys.argv[1]), lines())
"""
    path = tmp_path / "run.jsonl"
    done = subprocess.run([sys.executable, "-c", code, path], check=False)
    assert done.returncode == -9
    assert not path.exists()
    assert [left.suffix for left in tmp_path.iterdir()] == [".part"]
