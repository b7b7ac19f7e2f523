"""A log that grows is followed; the `rmetric` command; alarms, webhook, exit codes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from base64 import b64encode
from math import inf
from pathlib import Path

import orjson
import pytest

from rmetric._util.webhook import WebhookSender, checked_url, post
from rmetric.cli.main import main
from rmetric.detectors import Always, make_detector
from rmetric.detectors.calibrated.thresholds import default_thresholds, thresholds_to_json
from rmetric.logs import LogError
from rmetric.records import Record
from rmetric.replay.follow import Follower
from rmetric.replay.watch import FAILING, MOST_RUNS, Watch
from tests.cli.test_exit_codes import code_of
from tests.monitor.webhook_server import WebhookServer

HEALTHY = [3.0 + 0.01 * (s % 5) for s in range(40)]


def line(step: int, loss: float) -> bytes:
    return orjson.dumps({"step": step, "loss": 2.0, "val_loss": loss}) + b"\n"


def log_of(losses, first: int = 1) -> bytes:
    return b"".join(line(first + n, loss) for n, loss in enumerate(losses))


#: Lines as torchtitan traces them; the first may have neither step nor value.
STARTED = '{"log_type_name": "started", "event_name": null}\n'


def long_form(step: int, loss: float) -> str:
    rows = [("null", 12.5), ('"grad_norm"', 1.0), ('"loss_metrics/global_avg_loss"', loss)]
    own = '{{"event_name": {}, "value": {}, "step": {}}}\n'
    return "".join(own.format(*row, step) for row in rows)


class Followed:
    """A follower in a thread, and what it handed on and reported."""

    def __init__(self, path: Path, **options) -> None:
        self.steps: list[int] = []
        self.messages: list[str] = []
        self.error: Exception | None = None
        options = dict(poll=0.01, settle=0.05, stop_after=20.0) | options
        self.follower = Follower(path, self._take, self.messages.append, **options)
        self._thread = threading.Thread(target=self._run)

    def _take(self, id: str, record: Record) -> None:
        self.steps.append(record.step)

    def _run(self) -> None:
        try:
            self.follower.run()
        except LogError as error:
            self.error = error

    def wait_for(self, condition, seconds: float = 10.0) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, (self.steps, self.messages, self.error)
            time.sleep(0.005)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self.follower.stop()
        self._thread.join(10)


def append(path: Path, data: bytes) -> None:
    with open(path, "ab") as file:
        file.write(data)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.jsonl"


def test_a_growing_log_is_handed_on_line_by_line_and_half_a_line_is_waited_for(path):
    path.write_bytes(log_of([3.0, 2.9]))
    with Followed(path) as followed:
        followed.wait_for(lambda: followed.steps == [1, 2])
        whole = line(3, 2.8)
        append(path, whole[:9])
        time.sleep(0.2)
        assert followed.steps == [1, 2]
        append(path, whole[9:])
        followed.wait_for(lambda: followed.steps == [1, 2, 3])


@pytest.mark.parametrize(
    ("first", "second", "steps"),
    [
        ("step,loss\n1,3.0\n", "2,2.5\n", [1]),
        ("iter 1: loss 3.0, time 20ms\n", "iter 2: loss 2.5, time 20ms\n", [1]),
        ('{"event":"METRICS","step":1}\n', '{"event":"METRICS","step":2}\n', [1]),
        (long_form(1, 3.0), long_form(2, 2.5), [1]),
        # A file that does not show yet what it is, is looked at again.
        ("loading the data\n", "iter 1: loss 3.0, time 20ms\niter 2: loss 2.9, time 20ms\n", []),
        (STARTED, long_form(1, 3.0) + long_form(2, 2.9), []),
    ],
)
def test_every_format_of_lines_is_followed(path, first, second, steps):
    path.write_text(first)
    with Followed(path) as followed:
        time.sleep(0.1)
        followed.wait_for(lambda: followed.steps == steps)
        append(path, second.encode())
        followed.wait_for(lambda: followed.steps == [1, 2])


def test_a_file_that_is_not_there_yet_is_waited_for(path):
    with Followed(path, wait=inf) as followed:
        followed.wait_for(lambda: followed.messages)
        path.touch()
        time.sleep(0.05)
        append(path, line(1, 3.0))
        followed.wait_for(lambda: followed.steps == [1])
    with Followed(path.with_name("never.jsonl")) as followed:
        followed.wait_for(lambda: followed.error)
        assert "no such file (--wait SECONDS waits for it)" in str(followed.error)


@pytest.mark.parametrize("how", ["truncated", "replaced", "moved away"])
def test_a_log_that_is_rotated_is_reported_and_begun_again(path, tmp_path, how):
    path.write_bytes(log_of([3.0, 2.9, 2.8]))
    with Followed(path) as followed:
        followed.wait_for(lambda: len(followed.steps) == 3)
        if how == "truncated":
            os.truncate(path, 0)
            followed.wait_for(lambda: followed.messages)
            append(path, line(7, 3.0))
        elif how == "replaced":
            other = tmp_path / "other"
            other.write_bytes(line(7, 3.0))
            other.replace(path)
        else:
            path.rename(tmp_path / "run.jsonl.1")
            append(tmp_path / "run.jsonl.1", line(4, 2.7))
            time.sleep(0.1)
            path.write_bytes(line(7, 3.0))
        followed.wait_for(lambda: followed.steps[-1] == 7)
        assert any("read again" in words for words in followed.messages)
        assert followed.steps == [1, 2, 3, *([4] if how == "moved away" else []), 7]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b'{"log_history": [{"step": 1, "loss": 3.0}]}\n', "nothing to follow"),
        (b"\x1f\x8b\x08\0", "compressed: it cannot be followed"),
        (b"key,value,step\nloss,3.0,1\n", "a table is read as a whole, JSONL can be followed"),
    ],
)
def test_what_cannot_be_followed_is_one_error(path, content, problem):
    path.write_bytes(content)
    with Followed(path) as followed:
        followed.wait_for(lambda: followed.error)
    assert problem in str(followed.error)


def test_runs_are_watched_apart_and_no_more_than_a_bounded_number():
    alarms = []
    watch = Watch(Always, alarms.append)
    for n in range(MOST_RUNS + 10):
        for step in (1, 2):
            watch.take(f"run{n}", Record(step=step, training_loss=1.0))
    assert watch.num_alarms == len(alarms) == MOST_RUNS + 10, "an alarm that goes on is one"
    assert len(watch._detectors) == MOST_RUNS


def test_an_alarm_is_raised_once_however_often_its_log_is_begun_again():
    """As a rescue does that goes back: it cuts the log behind the step."""
    alarms = []
    watch = Watch(Always, alarms.append)
    for last in (5, 5, 5, 7):
        watch.begin_again()
        for step in range(last, 8):
            watch.take("a", Record(step=step, training_loss=2.0))
    assert [event.step for event in alarms] == [5, 7]
    assert (watch.num_alarms, watch.num_again) == (4, 2)


def test_a_webhook_is_tried_again():
    problems = []
    with WebhookServer(status=500) as server:
        hook = WebhookSender(server.url + "/secret", "url", problems.append, tries=3, pause=0.01)
        hook.post({"text": "x", "score": float("nan")})
        hook.close()
        assert [body for _, _, body in server.messages] == [{"text": "x", "score": "NaN"}] * 3
    assert len(problems) == 1
    assert "answered 500, 3 times" in problems[0]
    assert "secret" not in problems[0]


#: URLs that no post can reach.
NEVER = [
    "http://host:99999/x", "http://host:http/x", "http://host/a b", " http://host/x",
    "http://host/x\r\nA: b", "http://ho\tst/x", "http://host/\u00e4", "http://a..b/x", "http:///x",
    "http://[::1/x", "",
]  # fmt: skip


def test_a_user_and_password_in_a_url_are_sent_as_its_header():
    with WebhookServer() as server:
        url = server.url.replace("//", "//me:p%40ss@", 1) + "/hook"
        assert post(checked_url(url, "--webhook"), {}, 5.0) == ""
        assert server.messages == [("/hook", "application/json", {})]
        assert server.authorizations == ["Basic " + b64encode(b"me:p@ss").decode()]


@pytest.mark.parametrize("url", NEVER)
def test_a_url_that_can_never_work_is_in_no_message(url):
    with pytest.raises(ValueError, match=r"^name ") as caught:
        checked_url(url, "name")
    assert not url.strip() or url.strip() not in str(caught.value)


def test_help_is_quick_and_loads_nothing_heavy():
    code = "import sys; from rmetric.__main__ import main\n"
    code += "sys.argv[1:] = ['--help']\ntry: main()\n"
    code += "except SystemExit: print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "watch" in done.stdout
    loaded = set(done.stdout.split("\n")[-2].split())
    assert loaded.isdisjoint({"torch", "numpy", "msgspec", "scipy"})


def watch(*arguments: object) -> int:
    return main(["watch", *map(str, arguments), "--detector", "loss_z_score"])


def test_watch_alarms_with_the_reason_posts_it_and_ends_with_3(path, capsys):
    path.write_bytes(log_of([*HEALTHY, 9.0, 9.0, 3.0]))
    with WebhookServer() as server:
        code = watch(
            path, "--exit-on-alarm", "--stop-after", 5, "--webhook", server.url, "--from-start"
        )
        assert code == 3
        ((_, kind, body),) = server.messages
    assert kind == "application/json"
    assert (body["run"], body["step"], body["detector"]) == ("run", 41, "loss_z_score")
    printed = capsys.readouterr()
    assert printed.out.startswith("ALARM run: step 41: ")
    assert body["reason"] in printed.out
    assert body["reason"]


def test_watch_ends_with_0_when_the_log_no_longer_grows(path, capsys):
    path.write_bytes(log_of(HEALTHY))
    assert watch(path, "--stop-after", 0) == 0
    first, last = capsys.readouterr().err.splitlines()
    assert first == (
        f"{path}: JSONL (one object a line); columns guessed by name: 'step' as step, 'loss' as "
        "loss, 'val_loss' as eval_loss; 40 records so far; watched by loss_z_score"
    )
    assert last == f"{path}: 40 records, 0 alarms (loss_z_score)"


@pytest.mark.parametrize(
    ("arguments", "code", "problem"),
    [
        (["absent.jsonl"], 1, "no such file"),
        (["x", "--webhook", "ftp://x"], 2, "http:// or https://"),
        (["x", "--webhook", "http://a..b/x"], 2, "an invalid host name"),
        (["x", "--stop-after", "-1"], 2, "a number of seconds"),
        (["x", "--map", "los=x"], 2, "TARGET one of"),
    ],
)
def test_a_wrong_command_line_is_one_error(arguments, code, problem, capsys):
    assert code_of("rmetric watch", *arguments, "--detector", "loss_z_score") == code
    assert problem in capsys.readouterr().err


def test_an_option_that_would_be_passed_over_is_an_error(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.csv").write_text("step,loss\n1,2.0\n")
    stated = thresholds_to_json(default_thresholds())
    (tmp_path / "t.json").write_text(json.dumps(stated))
    assert main(["watch", "a.csv", "--detector", "loss_ewma", "--thresholds", "t.json"]) == 2
    assert "loss_ewma has no such file" in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"a.csv", "t.json"}


class Scripted:
    """A detector whose verdict is the record's: the loss states which."""

    VERDICTS = ("", "failure under way", "recovering spike")

    def __init__(self) -> None:
        self.score, self.verdict = 0.0, ""

    def update(self, record: Record) -> Scripted:
        self.score = record.validation_loss
        self.verdict = self.VERDICTS[int(self.score)]
        return self

    @property
    def alarm(self) -> bool:
        return self.score > 0

    @property
    def reason(self) -> str:
        return f"{self.verdict}: a loss" if self.alarm else ""


@pytest.fixture
def scripted(path, monkeypatch):
    """Watch a log of `Scripted` verdicts: some of it there, some added once it is watched."""
    monkeypatch.setattr("rmetric.cli.watch.make_detector", lambda *_, **__: Scripted())

    def call(there, added, *options) -> tuple[int, list[dict]]:
        path.write_bytes(log_of(there))
        timer = threading.Timer(1.6, lambda: append(path, log_of(added, len(there) + 1)))
        with WebhookServer() as server:
            if added:
                timer.start()
            stop_after = "3" if added else "0"
            hook = ["--webhook", server.url]
            code = main(["watch", str(path), "--stop-after", stop_after, *hook, *options])
            timer.cancel()
            return code, [body for _, _, body in server.messages]

    return call


def test_an_alarm_its_change_and_its_end_are_a_line_each_and_only_what_is_urgent_is_posted(
    scripted, capsys
):
    code, posted = scripted([0, 1, 0], [1, 1, 2, 2, 1, 0, 0])
    assert code == 0
    assert capsys.readouterr().out.splitlines() == [
        "ALARM run: step 2: failure under way: a loss (before watching)",
        "ENDED run: step 3: the alarm of step 2 is over (before watching)",
        "ALARM run: step 4: failure under way: a loss",
        "CHANGED run: step 6: recovering spike: a loss (it was: failure under way)",
        "CHANGED run: step 8: failure under way: a loss (it was: recovering spike)",
        "ENDED run: step 9: the alarm of step 4 is over",
    ]
    assert [(body["event"], body["step"]) for body in posted] == [("ALARM", 4), ("CHANGED", 8)]
    assert posted[1]["verdict"] == "failure under way"


def test_what_is_urgent_is_called_as_the_calibrated_detector_calls_it():
    detector = make_detector("calibrated")
    for step in range(90):
        loss = (2.0 if step < 60 else 4.0) + 0.01 * (step % 3)
        detector.update(Record(step=step, training_loss=loss))
    assert (detector.alarm, detector.verdict) == (True, FAILING)


@pytest.mark.parametrize(
    ("there", "options", "code", "steps"),
    [
        ([0, 1, 0], [], 0, []),
        ([0, 1, 0], ["--from-start"], 3, [2]),
        ([0, 1, 1], [], 3, [2]),
    ],
)
def test_an_alarm_from_before_counts_where_it_lasts_or_where_that_is_asked_for(
    scripted, there, options, code, steps
):
    found, posted = scripted(there, [], "--exit-on-alarm", *options)
    assert found == code
    assert [body["step"] for body in posted] == steps


@pytest.mark.parametrize("waiting", [("--wait", "inf", "--stop-after", 0.3), ("--wait", 0.3)])
def test_a_log_that_never_came_was_not_healthy(path, capsys, waiting):
    assert watch(path, *waiting) == 1
    errors = capsys.readouterr().err
    assert "not there yet, waiting for it" in errors
    assert f"error: {path}: it did not appear: nothing was watched" in errors


def test_a_log_that_is_removed_is_reported_and_is_no_good_end(path, capsys):
    path.write_bytes(log_of(HEALTHY))
    threading.Timer(0.4, path.unlink).start()
    assert watch(path, "--stop-after", 1.5) == 1
    errors = capsys.readouterr().err
    assert errors.count("it was removed or moved; waiting for it to come back") == 1
    assert f"error: {path}: it was removed while it was watched" in errors


def test_a_run_s_name_cannot_write_on_the_terminal(tmp_path, capsys):
    path = tmp_path / "run.csv"
    rows = "".join(
        f"{s},{9.0 if s > 40 else 3 + s % 2 / 9},\x1b[2Jall\u202e well\n" for s in range(43)
    )
    path.write_text("step,val_loss,run_id\n" + rows)
    assert watch(path, "--stop-after", 0, "--exit-on-alarm") == 3
    printed = capsys.readouterr()
    assert printed.out.startswith(r"ALARM run__\x1b[2Jall\u202e well: step 41: ")
    assert (printed.out + printed.err).replace("\n", "").isprintable()


@pytest.fixture
def watching(start, path):
    """Starts a watch that has raised its alarm, by a command that may stand before it."""
    path.write_bytes(log_of(HEALTHY) + line(41, 9.0))

    def begun(*before):
        command = [*before, sys.executable, "-m", "rmetric", "watch", str(path)]
        process = start(
            [*command, "--detector", "loss_z_score"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        assert b"ALARM" in process.stdout.readline()
        return process

    return begun


def test_where_the_shell_has_sigint_ignored_it_ends_by_sigterm(watching):
    process = watching("sh", "-c", 'trap "" INT; exec "$@"', "sh")
    process.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == -signal.SIGTERM


def test_interrupted_it_ends_with_130(watching):
    process = watching()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert b"Traceback" not in errors


def test_the_end_of_an_alarm_has_its_reason_where_the_detector_says_one():
    events = []
    watch = Watch(lambda: make_detector("calibrated"), events.append)
    losses = [2.0 + 0.01 * (step % 3) for step in range(60)] + [4.0] * 4 + [2.0] * 20
    for step, loss in enumerate(losses):
        watch.take("run", Record(step=step, training_loss=loss))
    assert events[0].event == "ALARM"
    assert events[-1].event == "ENDED"
    assert ": the loss came back" in events[-1].words
