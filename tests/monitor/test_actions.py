"""Each action does what it says, and whatever becomes of it the training goes on."""

import json
import logging
import math
import socket
import threading
import time
import types

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedulers

from rmetric._util.webhook import FORMS, _request, checked_url
from rmetric.logs import read_log
from rmetric.monitor import Monitor
from rmetric.monitor.actions import (
    CutLearningRate,
    EmergencyCheckpoint,
    SkipStep,
    Stop,
    TensorBoard,
    WandB,
    Webhook,
)
from rmetric.monitor.actions.dashboards import Dashboard
from tests.monitor.training import (
    alert,
    backward_passes,
    batches,
    entries,
    make_model,
    nan_at,
    same_weights,
    squared_error,
    times,
    train,
    watched,
    weights,
)
from tests.monitor.webhook_server import WebhookServer

SECRET = "T0PSECRET"


class TestSkipStep:
    @pytest.mark.parametrize("spoil", [nan_at(12), times(1e6, 12, 13)])
    def test_a_skipped_step_is_as_if_the_optimiser_had_not_been_called(self, spoil):
        skipped, refused = make_model(), make_model()
        train(skipped, watched(SkipStep()), spoil=spoil)
        train(refused, watched(), spoil=spoil, ask=True)
        assert same_weights(skipped, refused)
        spoilt = make_model()
        train(spoilt, watched(), spoil=spoil)
        assert not same_weights(skipped, spoilt)

    def test_after_the_limit_it_skips_no_more_and_says_so_once(self, caplog):
        model = make_model()
        seen = []
        train(model, watched(SkipStep(limit=3)), spoil=nan_at(*range(12, 15)))
        assert all(w.isfinite().all() for w in weights(model))
        assert "skipped" not in caplog.text
        skips = SkipStep(limit=3)
        train(model, watched(skips, seen.append), spoil=nan_at(*range(12, 31)))
        assert not any(w.isfinite().all() for w in weights(model))
        assert [alert.step for alert in seen] == [12]
        assert caplog.text.count("3 steps in a row were skipped") == 1
        model = make_model()  # a good step in between begins the count again
        train(model, watched(SkipStep(limit=2)), spoil=nan_at(10, 11, 13, 14, 16, 17))
        assert all(w.isfinite().all() for w in weights(model))

    @pytest.mark.parametrize("known", ["passed", "held by the optimiser's wrapper", "unknown"])
    def test_a_scaler_that_overflows_at_the_first_steps_still_finds_its_scale(self, known):
        now, taken, models = [0], ([], []), (make_model(), make_model())
        for steps, model in zip(taken, models, strict=True):
            torch.manual_seed(7)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
            monitor = None
            if steps is taken[1]:
                wrapped = types.SimpleNamespace(optimizer=optimizer, scaler=scaler)
                make = watched(SkipStep(), **({"scaler": scaler} if known == "passed" else {}))
                monitor = make(model, wrapped if "wrapper" in known else optimizer)
                assert (monitor.scaler is scaler) == (known != "unknown")
            optimizer.register_step_post_hook(lambda *_, steps=steps: steps.append(now[0]))
            for now[0], [batch] in enumerate(batches(40), start=1):
                optimizer.zero_grad()
                with torch.autocast("cpu", torch.float16):
                    loss = squared_error(model, batch)
                scaler.scale(loss).backward()
                if monitor:
                    monitor.check_before_step(loss)
                scaler.step(optimizer)
                scaler.update()
        assert monitor.scaler is scaler
        assert 2 <= taken[0][0] <= 24
        assert taken[1] == taken[0]
        assert same_weights(*models)

    def test_an_alarm_about_a_step_that_was_taken_leaves_no_good_one_out(self):
        model = make_model()
        taken = []
        for action in (SkipStep(), SkipStep(on={"calibrated"})):
            monitor = watched(action)(model, torch.optim.AdamW(model.parameters()))
            taken.append([])
            for step, loss in backward_passes(model, 6, monitor.optimizer):
                if step == 4:  # as the detector's alarm on the step before
                    monitor._delivery.deliver(alert(step=3, source="calibrated"))
                monitor.check_before_step(loss)
                before = weights(model)
                monitor.optimizer.step()
                moved = not all(map(torch.equal, before, weights(model)))
                taken[-1].append(moved)
            monitor.close()
        assert taken == [[True] * 6, [True] * 3 + [False] + [True] * 2]


def make_schedulers():
    half = lambda step: 1.0 / (1 + step)  # noqa: E731
    return {
        "LambdaLR": lambda o: schedulers.LambdaLR(o, half),
        "StepLR": lambda o: schedulers.StepLR(o, 7),
        "ExponentialLR": lambda o: schedulers.ExponentialLR(o, 0.9),
        "CosineAnnealingLR": lambda o: schedulers.CosineAnnealingLR(o, 40),
        "CosineAnnealingWarmRestarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 8),
        "LinearLR": lambda o: schedulers.LinearLR(o, 0.1, total_iters=15),
        "PolynomialLR": lambda o: schedulers.PolynomialLR(o, 40),
        "OneCycleLR": lambda o: schedulers.OneCycleLR(o, 0.1, total_steps=40),
        "CyclicLR": lambda o: schedulers.CyclicLR(o, 0.01, 0.1, 5, cycle_momentum=False),
        "ReduceLROnPlateau": lambda o: schedulers.ReduceLROnPlateau(o, patience=3),
        "SequentialLR": lambda o: schedulers.SequentialLR(
            o, [schedulers.LinearLR(o, 0.1, total_iters=5), schedulers.LambdaLR(o, half)], [18]
        ),
        "ChainedScheduler": lambda o: schedulers.ChainedScheduler(
            [schedulers.LinearLR(o, 0.1, total_iters=15), schedulers.ExponentialLR(o, 0.9)]
        ),
    }


def optimiser(rates=(0.02,)):
    groups = [{"params": [nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates]
    return torch.optim.AdamW(groups)


class TestCutLearningRate:
    @pytest.mark.parametrize("name", make_schedulers())
    @pytest.mark.parametrize("cut_at", [3, 17])
    def test_the_whole_schedule_ahead_is_lower_by_the_factor(self, name, cut_at):
        rates = []
        for cutting in (False, True):
            optimizer = optimiser((0.02, 0.3))
            scheduler = make_schedulers()[name](optimizer)
            monitor = Monitor(make_model(), optimizer)
            action = CutLearningRate(0.25, scheduler=scheduler)
            seen = []
            for step in range(1, 36):
                if cutting and step == cut_at:
                    action(alert(), monitor)
                seen.append([group["lr"] for group in optimizer.param_groups])
                optimizer.step()
                scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))
            rates.append(torch.tensor(seen))
        usual, cut = rates
        torch.testing.assert_close(cut[: cut_at - 1], usual[: cut_at - 1])
        torch.testing.assert_close(cut[cut_at - 1 :], 0.25 * usual[cut_at - 1 :])

    def test_no_rate_is_cut_below_the_floor_nor_raised_to_it(self):
        optimizer = optimiser((0.02, 0.004, 0.001, 0.0))
        CutLearningRate(0.1, floor=0.003)(alert(), Monitor(make_model(), optimizer))
        rates = [group["lr"] for group in optimizer.param_groups]
        assert rates == pytest.approx([0.003, 0.003, 0.001, 0.0])

    def test_it_waits_before_it_cuts_again(self):
        optimizer = optimiser()
        monitor = Monitor(make_model(), optimizer)
        action = CutLearningRate(0.5, wait=5)
        rates = []
        for monitor.step in range(1, 13):
            action(alert(monitor.step), monitor)
            rates.append(optimizer.param_groups[0]["lr"])
        assert rates == [0.01] * 5 + [0.005] * 5 + [0.0025] * 2

    def test_a_rate_that_is_a_tensor_is_cut_in_its_place(self):
        rate = torch.tensor(0.02)
        optimizer = torch.optim.Adam([nn.Parameter(torch.zeros(1))], lr=rate)
        held = optimizer.param_groups[0]["lr"]
        CutLearningRate(0.5)(alert(), Monitor(make_model(), optimizer))
        assert held.item() == pytest.approx(0.01)
        assert optimizer.param_groups[0]["lr"] is held

    def test_an_alarm_goes_on_after_the_cut(self, tmp_path):
        """A change that was announced would end it, and the detector would learn anew."""
        log = tmp_path / "run.jsonl"
        rising = lambda step, loss: loss * (1.3 ** max(0, step - 40))  # noqa: E731
        cut = CutLearningRate(on={"calibrated"}, factor=0.9)
        train(make_model(), watched(cut, log=log), spoil=rising, steps=60)
        metrics = entries(log, "METRICS")
        [at] = [entry["step"] for entry in metrics if "actions" in entry]
        assert at < 55
        assert all(entry["alerts"]["calibrated"] for entry in metrics[at - 2 :])

    @pytest.mark.parametrize("passed", [False, True])
    def test_a_scheduler_that_takes_the_cut_back_is_reported_once(self, passed, caplog):
        optimizer = optimiser()
        scheduler = schedulers.LambdaLR(optimizer, lambda step: 0.97**step)
        action = CutLearningRate(0.5, scheduler=scheduler if passed else None)
        monitor = Monitor(make_model(), optimizer, actions=[action])
        for step in range(1, 31):
            monitor.check_before_step(1.0, gradient_norm=math.nan if step == 12 else 1.0)
            optimizer.step()
            scheduler.step()
        monitor.close()
        reports = [m for m in caplog.messages if "a scheduler has undone the cut" in m]
        assert len(reports) == (0 if passed else 1)
        if not passed:
            assert "at step 14" in reports[0]
            assert "CutLearningRate(scheduler=...)" in reports[0]

    def test_the_scheduler_inside_a_trainers_wrapper_is_scaled(self):
        optimizer = optimiser()
        scheduler = schedulers.LambdaLR(optimizer, lambda step: 1.0)
        monitor = Monitor(make_model(), optimizer)
        monitor.schedulers = [types.SimpleNamespace(scheduler=scheduler)]
        CutLearningRate(0.5)(alert(), monitor)
        optimizer.step()
        scheduler.step()
        assert optimizer.param_groups[0]["lr"] == 0.01

    @pytest.mark.parametrize(
        "settings",
        [{"factor": 0.0}, {"factor": 1.0}, {"factor": "0.5"}, {"floor": -1.0}, {"wait": 0},
         {"on": 5}, {"on": "non_finite"}, {"on": ["nonfinite"]}],
        ids=str,
    )  # fmt: skip
    def test_bad_arguments_are_named(self, settings):
        [(name, value)] = settings.items()
        value = value[0] if isinstance(value, list) else value
        with pytest.raises(ValueError, match=f"{name} (is|has) {value!r}"):
            CutLearningRate(**settings)


class TestWebhook:
    def test_an_alert_arrives_as_slack_wants_it(self):
        with WebhookServer() as server:
            webhook = Webhook(f"{server.url}/services/{SECRET}", title="run <7>")
            train(make_model(), watched(webhook), spoil=nan_at(12))
            (text,) = server.texts(1)
            path, content_type, body = server.messages[0]
        assert path == f"/services/{SECRET}"
        assert content_type == "application/json"
        assert list(body) == ["text"]
        assert text.startswith("run &lt;7&gt;: step 12, rank 0: non_finite: loss is nan")

    def test_each_service_gets_its_own_form(self):
        summary = {"summary": "run <7>: x", "source": socket.gethostname(), "severity": "error"}
        with WebhookServer() as server:
            for form in ("slack", "discord", "pagerduty"):
                query = "?routing_key=R" * (form == "pagerduty")
                webhook = Webhook(f"{form}+{server.url}/hook{query}", title="run <7>")
                webhook._send("x", "a", "a")
                webhook.close()
        assert [path for path, _, _ in server.messages] == ["/hook"] * 3
        assert [body for _, _, body in server.messages] == [
            {"text": "run &lt;7&gt;: x"},
            {"content": "run <7>: x", "allowed_mentions": {"parse": []}},
            {"routing_key": "R", "event_action": "trigger", "payload": summary},
        ]

    def test_the_host_decides_the_form_and_pagerduty_needs_its_key(self):
        hosts = {
            "https://hooks.slack.com/services/T/B/x": "slack",
            "https://ptb.discord.com/api/webhooks/1/x": "discord",
            "https://notdiscord.com/discord+x": "plain",
            "https://events.eu.pagerduty.com/v2/enqueue?routing_key=R": "pagerduty",
        }
        for url, form in hosts.items():
            message = {"text": "a < b", "step": 7}
            sent = json.loads(_request(checked_url(url, "--webhook"), message, "plain").data)
            assert sent == FORMS[form].body("a < b", message, "R"), url
        with pytest.raises(ValueError, match=r"must end with \?routing_key=\.\.\.") as refused:
            checked_url("https://events.pagerduty.com/v2/enqueue?SECRET", "--webhook")
        assert "SECRET" not in str(refused.value)

    def test_what_was_held_back_is_reported_by_the_next_message(self, monkeypatch):
        now = [0.0]
        monkeypatch.setattr("rmetric.monitor.actions.exports.time.monotonic", lambda: now[0])
        with WebhookServer() as server:
            webhook = Webhook(server.url, min_interval=60.0, title="run")
            for now[0], source in [(0, "a"), (1, "a"), (2, "b"), (59, "a"), (61, "a"), (200, "a")]:
                webhook(alert(source=source), None)
            monkeypatch.undo()
            webhook.close()
            texts = server.texts(4)
        endings = [text.split("nan")[1] for text in texts]
        assert endings == ["", "", " (2 more alerts of a since the last message)", ""]

    def test_a_server_that_hangs_holds_up_nobody(self, caplog):
        with WebhookServer(hangs=True) as server:
            webhook = Webhook(server.url, min_interval=0.0, timeout=0.5)
            began = time.monotonic()
            for step in range(100):
                webhook(alert(step), None)
            assert time.monotonic() - began < 20.0
            webhook.close()
            assert time.monotonic() - began < 20.0
        assert "does not keep up" in caplog.text
        assert "were not posted" in caplog.text

    @pytest.mark.parametrize("status", [500, 404, 302])
    def test_an_answer_that_is_no_yes_is_reported_and_training_goes_on(self, status, caplog):
        model, unwatched = make_model(), make_model()
        with WebhookServer(status=status) as server:
            webhook = Webhook(f"{server.url}/{SECRET}")
            train(model, watched(webhook, SkipStep()), spoil=nan_at(12))
            train(unwatched, watched(SkipStep()), spoil=nan_at(12))
            assert len(server.messages) == 1
        assert f"answered {status}" in caplog.text
        assert same_weights(model, unwatched)
        assert SECRET not in caplog.text

    @pytest.mark.parametrize("url", ["https:///", "file:///", "hooks.example/", "http://[", ""])
    def test_a_bad_address_is_refused_without_being_printed(self, url):
        with pytest.raises(ValueError, match="webhook's url") as refused:
            Webhook(url and url + SECRET)
        assert SECRET not in str(refused.value)

    def test_a_server_that_is_not_there_is_reported_without_its_address(self, monkeypatch, caplog):
        caplog.set_level(logging.DEBUG)
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            address = f"http://127.0.0.1:{unused.getsockname()[1]}/{SECRET}"
        monkeypatch.setenv("RMETRIC_TEST_WEBHOOK", address)
        webhook = Webhook(variable="RMETRIC_TEST_WEBHOOK", timeout=0.5)
        monitor = train(make_model(), watched(webhook), spoil=nan_at(12))
        assert "could not be reached (ConnectionRefusedError)" in caplog.text
        assert SECRET not in caplog.text + repr(webhook) + str(webhook) + str(monitor.problem)

    def test_the_name_of_a_variable_that_is_not_set_is_named(self, monkeypatch):
        monkeypatch.delenv("RMETRIC_TEST_WEBHOOK", raising=False)
        with pytest.raises(ValueError, match="RMETRIC_TEST_WEBHOOK"):
            Webhook(variable="RMETRIC_TEST_WEBHOOK")
        with pytest.raises(ValueError, match="one of the two"):
            Webhook()


class TestTensorBoard:
    @pytest.fixture(autouse=True)
    def _installed(self):
        pytest.importorskip("tensorboard", reason="tensorboard is not installed")

    def test_records_and_alerts_can_be_read_back(self, tmp_path):
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        log = tmp_path / "run.jsonl"
        actions = (TensorBoard(tmp_path / "board"), SkipStep())
        monitor = train(make_model(), watched(*actions, log=log), spoil=nan_at(12))
        board = EventAccumulator(str(tmp_path / "board"))
        board.Reload()
        drawn = {e.step: e.value for e in board.Scalars("rmetric/training_loss")}
        logged = {r.step: r.training_loss for r in read_log(log).records}
        assert drawn == pytest.approx(logged, nan_ok=True)
        assert math.isnan(drawn[12])
        layers = [tag for tag in board.Tags()["scalars"] if "layer_gradient_norms/" in tag]
        assert len(layers) == 3
        assert board.Scalars("rmetric/r_metric")[-1].value == pytest.approx(monitor.metric.score)
        (text,) = board.Tensors("rmetric/non_finite/text_summary")
        assert b"non_finite" in text.tensor_proto.string_val[0]


class StandInRun:
    def __init__(self, broken=False):
        self.metrics, self.rows, self.alerts, self.broken = {}, [], [], broken

    def define_metric(self, name, step_metric=None):
        self.metrics[name] = step_metric

    def log(self, row):
        if self.broken:
            raise OSError("the run is finished")
        self.rows.append(row)

    def alert(self, title, text):
        self.alerts.append((title, text))


class TestWandB:
    def test_records_and_alerts_go_to_the_run(self):
        run = StandInRun()
        train(make_model(), watched(WandB(run), SkipStep()), spoil=nan_at(12))
        assert run.metrics == {
            "rmetric/step": None,
            "rmetric/executed_step": None,
            "rmetric/*": "rmetric/executed_step",
        }
        assert [row["rmetric/step"] for row in run.rows] == list(range(1, 31))
        assert math.isnan(run.rows[11]["rmetric/training_loss"])
        assert run.rows[0]["rmetric/learning_rate"] == 0.01
        ((title, text),) = run.alerts
        assert title == "rmetric: non_finite"
        assert text.startswith("step 12")

    def test_a_run_that_breaks_is_reported_once(self, caplog):
        monitor = train(make_model(), watched(WandB(StandInRun(broken=True))))
        assert monitor.usable
        assert caplog.text.count("the run is finished") == 1

    def test_an_offline_run_of_the_real_library_takes_it(self, tmp_path, monkeypatch):
        wandb = pytest.importorskip("wandb", reason="wandb is not installed")
        monkeypatch.setenv("WANDB_SILENT", "true")
        with pytest.raises(ValueError, match=r"wandb\.init"):
            WandB()
        run = wandb.init(project="rmetric", mode="offline", dir=str(tmp_path))
        try:
            monitor = train(make_model(), watched(WandB()), steps=12)
            assert run.summary["rmetric/step"] == 12
            loss = run.summary["rmetric/training_loss"]
            assert loss == pytest.approx(monitor.last.training_loss)
        finally:
            run.finish()


class TestTogether:
    def test_all_actions_work_side_by_side(self, tmp_path):
        model = make_model()
        checkpoint = EmergencyCheckpoint(tmp_path)
        calls = []
        with WebhookServer() as server:
            actions = (checkpoint, SkipStep(), CutLearningRate(), Webhook(server.url), calls.append)
            monitor = train(model, watched(*actions), spoil=nan_at(12))
            assert len(server.messages) == 1
        assert monitor.usable
        assert [a.step for a in calls] == [12]
        assert monitor.optimizer.param_groups[0]["lr"] == 0.005
        assert checkpoint.last_good == tmp_path / "step_00000011.pt"
        assert all(w.isfinite().all() for w in weights(model))

    def test_a_second_training_may_use_the_same_actions(self, tmp_path):
        with WebhookServer() as server:
            actions = (Webhook(server.url, min_interval=0.0), EmergencyCheckpoint(tmp_path))
            for _ in range(2):
                train(make_model(), watched(*actions), spoil=nan_at(12))
            assert len(server.messages) >= 2


def test_a_slow_dashboard_costs_its_drawings_and_not_the_log(tmp_path, caplog):
    goes_on = threading.Event()

    class Slow(Dashboard):
        drawn = 0

        def draw(self, values, step, executed):
            goes_on.wait()
            self.drawn += 1

    slow = Slow()
    monitor = Monitor(torch.nn.Linear(2, 1), log=tmp_path / "run.jsonl", actions=[slow])
    for _ in range(1500):
        monitor.check_before_step(1.0, gradient_norm=1.0)
    goes_on.set()
    monitor.close()
    assert monitor.problem is None
    assert len(read_log(tmp_path / "run.jsonl").records) == 1500
    assert sum("does not keep up" in message for message in caplog.messages) == 1
    assert 0 < slow.drawn < 1500


def test_only_an_alert_it_listens_to_ends_the_training():
    monitor = train(make_model(), watched(Stop(on={"r_metric"})), spoil=nan_at(12))
    assert not monitor.should_stop
    assert monitor.step == 30
    assert monitor.protocol.slips == {"never_called"}  # r_metric is not in alert_on
