"""Decisions of a rescue reach the other actions: webhooks, dashboards, Prometheus, own ones."""

import json
import urllib.request
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from rmetric.monitor import Alert, Monitor
from rmetric.monitor.actions import Action, Callback, Prometheus, TensorBoard, WandB, Webhook
from rmetric.reporting.replay_report import replay_logs
from rmetric.rescue import Rescue
from tests.monitor.test_actions import StandInRun
from tests.monitor.training import alert
from tests.monitor.training import entries as entries_of
from tests.monitor.webhook_server import WebhookServer
from tests.reporting.page.pages import Found
from tests.rescue.trainings import NANS, SMALL, make_model
from tests.rescue.trainings import train as of_rescue

STEPS = 30
ENTRY = {"step": 713, "to": 690, "action": "go_back", "repeated": 23,
         "reason": "went back from 713 to 690 because the loss rose; 23 steps; try 2"}  # fmt: skip


def train(*others, rescue=None, log=None):
    """Steps 23 to 26 have a loss that is nan: three are left out, the fourth goes back to 20."""
    rescue = rescue or Rescue(SMALL)
    outcome = of_rescue(rescue, others=others, log=log, nans=NANS, steps=STEPS, run_id="tiny")
    assert outcome["problem"] == ""
    assert outcome["usable"]
    return rescue, outcome["weights"]


class Decided(Action):
    def __init__(self, *, fails=False, **settings):
        super().__init__(**settings)
        self.entries, self.fails = [], fails

    def decided(self, entry, monitor):
        self.entries.append((monitor.run_id, dict(entry)))
        if self.fails:
            raise OSError("the pager is gone")


def test_the_log_has_each_step_once_and_each_decision_as_its_page_and_the_actions_that_ask(
    tmp_path,
):
    before, named, other = Decided(), Decided(on={"rescue"}), Decided(on={"non_finite"})
    log, plain, alerts, entries = tmp_path / "run.jsonl", [], [], []
    own = plain.append, Callback(alerts.append, decided=entries.append)
    rescue, _ = train(before, named, other, *own, log=log)
    schema = Path(__file__).parents[2] / "docs/log_format.schema.json"
    validator = Draft202012Validator(json.loads(schema.read_text()))
    for line in entries_of(log):
        validator.validate(line)
    logged = entries_of(log, "RESCUE")
    assert {entry.pop("event") for entry in logged} == {"RESCUE"}
    assert [e["action"] for e in logged] == ["leave_out"] * 3 + ["go_back"]
    assert logged == rescue.decisions == entries
    assert [entry["step"] for entry in entries_of(log, "METRICS")] == [*range(1, STEPS + 1)]
    left = entries_of(tmp_path / "run.jsonl.abandoned", "METRICS")
    assert [entry["step"] for entry in left] == [*range(20, 26)]
    assert before.entries == named.entries == [("tiny", entry) for entry in logged]
    assert other.entries == []
    assert plain
    assert all(isinstance(alert, Alert) for alert in plain + alerts)
    replay_logs([log], tmp_path / "out", most_plots=0)
    found = Found((tmp_path / "out" / "tiny" / "report.html").read_text())
    assert all(entry["reason"] in found.text for entry in rescue.decisions)
    assert "Went back once, 3 steps left out" in found.text
    marked = [
        (line["step"], line["label"]) for line in found.data["lines"] if line["kind"] == "decision"
    ]
    assert marked == [*((step, "left out") for step in (23, 24, 25)), (26, "went back to 20")]


def test_an_action_that_fails_on_a_decision_is_switched_off_and_the_training_goes_on(caplog):
    failing, after = Decided(fails=True), Decided()
    rescue, weights = train(failing, after)
    assert len(failing.entries) == 1
    assert len(after.entries) == len(rescue.decisions) == 4
    assert caplog.text.count("the pager is gone") == 1
    assert weights == train()[1]


class TestWebhook:
    def test_a_decision_is_posted_beside_the_alerts(self):
        with WebhookServer() as server:
            rescue, _ = train(Webhook(server.url, title="run", on={"rescue"}))
            texts = server.texts(2)
        # The second and third step that are left out fall within a minute of the first.
        first, last = rescue.decisions[0], rescue.decisions[-1]
        assert texts == [
            f"run: step 23: rescue: {first['reason']}",
            f"run: step 26: rescue: {last['reason']}",
        ]
        assert "went back from 26 to 20" in texts[1]

    def test_the_first_rank_alone_posts(self, monkeypatch):
        monkeypatch.setattr("rmetric.monitor.actions.exports.rank", lambda: 1)
        with WebhookServer() as server:
            webhook = Webhook(server.url)
            webhook(alert(), None)
            webhook.decided(ENTRY, None)
            webhook.close()
            assert server.messages == []


class TestDashboards:
    def test_w_and_b_counts_executed_steps_which_never_go_back(self):
        run = StandInRun()
        rescue, _ = train(WandB(run, on={"rescue"}))
        assert run.metrics["rmetric/*"] == "rmetric/executed_step"
        steps = [row["rmetric/executed_step"] for row in run.rows]
        assert all(a <= b for a, b in pairwise(steps))
        drawn = [row for row in run.rows if "rmetric/step" in row]
        executed = [row["rmetric/executed_step"] for row in drawn]
        assert all(a < b for a, b in pairwise(executed))
        assert [row["rmetric/step"] for row in drawn][-10:] == [*range(21, 31)]
        counts = {k: v for row in run.rows for k, v in row.items() if "rescue_decisions" in k}
        assert counts == {
            "rmetric/rescue_decisions/leave_out": 3,
            "rmetric/rescue_decisions/go_back": 1,
        }
        assert [text for _, text in run.alerts] == [
            f"step {e['step']}: rescue: {e['reason']}" for e in rescue.decisions
        ]

    def test_tensorboard_has_the_decisions_as_texts_and_counters(self, tmp_path):
        pytest.importorskip("tensorboard", reason="tensorboard is not installed")
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        rescue, _ = train(TensorBoard(tmp_path))
        board = EventAccumulator(str(tmp_path), size_guidance={"scalars": 0, "tensors": 0})
        board.Reload()
        texts = board.Tensors("rmetric/rescue/text_summary")
        shown = [text.tensor_proto.string_val[0].decode() for text in texts]
        assert shown == [f"step {e['step']}: rescue: {e['reason']}" for e in rescue.decisions]
        counted = board.Scalars("rmetric/rescue_decisions/leave_out")
        assert [event.value for event in counted] == [1, 2, 3]
        [back] = board.Scalars("rmetric/rescue_decisions/go_back")
        assert all(a <= b for a, b in pairwise([*(e.step for e in counted), back.step]))
        executed = board.Scalars("rmetric/executed_step")
        assert executed[-1].step == STEPS
        assert all(a.value < b.value for a, b in pairwise(executed))


def samples(text):
    from prometheus_client.parser import text_string_to_metric_families

    return {
        (sample.name, *(v for k, v in sorted(sample.labels.items()) if k != "run")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


class TestPrometheus:
    @pytest.fixture(autouse=True)
    def _installed(self):
        pytest.importorskip("prometheus_client", reason="prometheus-client is not installed")

    def test_a_file_has_the_gauges_of_the_last_record_and_the_counters(self, tmp_path):
        path = tmp_path / "rmetric.prom"
        counted = []
        rescue, weights = train(Prometheus(textfile=path), counted.append)
        found = samples(path.read_text())
        assert found["rmetric_step",] == STEPS
        assert found["rmetric_loss",] > 0
        assert found["rmetric_gradient_norm",] > 0
        assert ("rmetric_r_metric",) in found
        assert found["rmetric_detector_score", "calibrated"] >= 0
        assert found["rmetric_detector_level", "calibrated"] in (0, 1, 2)
        by_source = Counter(alert.source for alert in counted)
        assert {k[1]: v for k, v in found.items() if k[0] == "rmetric_alerts_total"} == by_source
        assert found["rmetric_rescue_decisions_total", "leave_out"] == 3
        assert found["rmetric_rescue_decisions_total", "go_back"] == 1
        assert found["rmetric_steps_repeated_total",] == 6 == rescue.decisions[-1]["repeated"]
        assert 'run="tiny"' in path.read_text()
        assert weights == train()[1]

    def test_the_first_rank_alone_exports(self, tmp_path, monkeypatch):
        monkeypatch.setattr("rmetric.monitor.actions.exports.rank", lambda: 1)
        path = tmp_path / "rmetric.prom"
        train(Prometheus(textfile=path))
        assert not path.exists()

    def test_a_server_answers_during_the_training_and_frees_its_port_after_it(self, caplog):
        action = Prometheus(port=0)
        answers = []

        def ask(entry):
            with urllib.request.urlopen(f"http://127.0.0.1:{action.port}/metrics") as answer:
                answers.append(answer.read().decode())

        train(action, Callback(lambda alert: None, decided=ask))
        assert samples(answers[-1])["rmetric_rescue_decisions_total", "go_back"] == 1
        again = Prometheus(port=action.port)
        monitor = Monitor(make_model(), None, actions=[again])
        assert again.port == action.port
        Monitor(make_model(), None, actions=[Prometheus(port=again.port)]).close()
        assert f"127.0.0.1, port {again.port}" in caplog.text
        monitor.close()

    @pytest.mark.parametrize(
        ("settings", "named"),
        [
            ({}, "port or textfile"),
            ({"port": 70000}, "port is 70000"),
            ({"port": True}, "port is True"),
            ({"textfile": "rmetric.txt"}, "rmetric.txt"),
        ],
        ids=str,
    )
    def test_bad_arguments_are_named(self, settings, named):
        with pytest.raises(ValueError, match=named):
            Prometheus(**settings)

    def test_the_package_is_named_where_it_is_missing(self, monkeypatch):
        monkeypatch.setitem(__import__("sys").modules, "prometheus_client", None)
        with pytest.raises(ImportError, match="needs the Python package prometheus-client"):
            Prometheus(port=0)
