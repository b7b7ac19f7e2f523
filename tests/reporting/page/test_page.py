"""What stands on a run's page and on the index, as an HTML parser reads it."""

from __future__ import annotations

import base64
import hashlib
import re
from math import inf, nan
from pathlib import Path

import numpy as np
import pytest

from rmetric import Record, Run, Truth
from rmetric.detectors import DETECTORS, Entry
from rmetric.evaluation import judge_run
from rmetric.metric import Components
from rmetric.replay.scored_run import score_run
from rmetric.reporting.page import index_of, trace_of_r_metric, trace_with_reasons
from rmetric.reporting.page.columns import charts_of
from rmetric.reporting.page.render import drawn
from rmetric.reporting.page.sentences import summarise
from rmetric.reporting.page.series import Charts, Panel, Series
from rmetric.reporting.replay_report import INDEX_COLUMNS
from tests.reporting.page.pages import HOSTILE, TEXTS, Found, eventful_run, hostile_run, page

PAGE = Path(__file__).parents[3] / "rmetric" / "reporting" / "page"


class Judging:
    """A detector with all that a calibrated one may report."""

    def __init__(self) -> None:
        self.score, self.alarm, self.reason, self.verdict = nan, False, "", "healthy"
        self.evidence: dict[str, float] = {}
        self.contributions = None

    def update(self, record: Record) -> Judging:
        self.score = 0.1 * record.step
        self.alarm = self.score > 1
        self.reason = f"the loss, at step {record.step}" if self.alarm else ""
        self.verdict = ("recovering spike", "failure under way")[record.step > 14]
        self.evidence = {"the loss": self.score} | ({HOSTILE: 0.5} if record.step > 5 else {})
        self.contributions = Components(nan, 0.2, self.score)
        return self


@pytest.fixture
def judging(monkeypatch):
    entry = Entry(title="Judging", kind="baseline", make=lambda generator: Judging())
    monkeypatch.setitem(DETECTORS, "judging", entry)
    return "judging"


def flat_run(**truth) -> Run:
    records = [Record(step=s, training_loss=2.0, gradient_norm=1.0) for s in range(1, 21)]
    return Run(id="flat", records=records, truth=Truth(**truth) if truth else None)


def test_nothing_in_a_log_becomes_markup():
    found, plain = Found(page(hostile_run())), Found(page(eventful_run()))
    # Beside those of a harmless page it may have the one that folds a configuration away.
    assert set(found.tags) - {"details", "summary"} <= set(plain.tags)
    assert found.tags.count("script") == plain.tags.count("script") == 3
    assert found.tags.count("img") == 0
    assert not [name for _, name, _ in found.attributes if name.startswith("on")]
    assert HOSTILE in found.text
    assert "{{ 7 * 7 }}" in found.text
    assert "onerror='window.hacked = 1'" in found.text


def test_a_detector_s_words_are_text_too(judging):
    html = page(flat_run(), judging)
    assert HOSTILE not in html
    labels = [curve["label"] for panel in Found(html).data["panels"] for curve in panel["series"]]
    assert HOSTILE in labels


def test_control_characters_are_replaced_and_long_texts_cut():
    records = [Record(step=1, training_loss=nan)]
    html = page(Run(id="x" * 10**6, records=records, notes=["\x00\x1b"]))
    assert len(html) < 150_000
    assert "(1,000,000 letters in all)" in html
    assert not re.search(r"[\x00-\x08\x0b-\x1f]", html)


def test_the_index_holds_hostile_names_and_reasons_as_text():
    rows = [
        row(id=HOSTILE, outcome=TEXTS[2], source=TEXTS[1]),
        row(problem=TEXTS[1], source=HOSTILE),
    ]
    found = Found(index_of(rows))
    assert found.tags.count("script") == 1
    assert found.tags.count("img") == 0
    assert not [name for _, name, _ in found.attributes if name.startswith("on")]
    assert HOSTILE in found.text


@pytest.mark.parametrize("html", [page(eventful_run()), index_of([])], ids=["run", "index"])
def test_a_page_loads_nothing_and_allows_its_own_scripts_alone(html):
    found = Found(html)
    outside = {"src", "srcset", "data", "action", "ping", "poster", "background"}
    assert not [a for a in found.attributes if a[1] in outside]
    links = [value for _, name, value in found.attributes if name == "href"]
    assert all(not re.match(r"\w+:|//", link) for link in links if link != "data:,")
    styles = "".join(found.styles)
    assert "url(" not in styles
    assert "@import" not in styles
    policy = found.values("meta", "content")[0]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    running = [text for text in found.scripts if not text.startswith("{")]
    for text in running + found.styles:
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy


def test_the_embedded_library_is_the_one_that_its_readme_names():
    for file, digest in re.findall(r"^\| (\S+) \|.*\| (\w{64}) \|$", (PAGE / "vendor" / "README.md")
                                   .read_text(), re.MULTILINE):  # fmt: skip
        assert hashlib.sha256((PAGE / "vendor" / file).read_bytes()).hexdigest() == digest
    assert "MIT License" in (PAGE / "vendor" / "LICENSE-uPlot").read_text()
    assert "uPlot" in page(flat_run())


# What it says


def test_the_top_says_what_the_detectors_say_and_what_happened(judging):
    found = Found(page(eventful_run(), judging))
    for words in (
        "R-Metric, as published", "A false alarm:", "The rule as published counts it as a hit",
        "Judging", "First alarm at step 11: recovering spike", "the loss, at step 11",
        "Failed at step 360", "Fault: LR_SPIKE", "Kind of failure: diverged",
    ):  # fmt: skip
        assert words in found.text, words


@pytest.mark.parametrize(
    ("truth", "judgement", "tone"),
    [
        ({"onset_step": 5, "failure_step": 18}, "7 steps before the fail", "good"),
        ({"onset_step": 15, "failure_step": 18}, "4 steps before the fault", "bad"),
        ({"onset_step": 3, "failure_step": 9}, "Too late", "bad"),
        ({"onset_step": 3}, "In time: after the onset of the fault.", "good"),
        ({"onset_step": 3, "outcome": "absorbed"}, "did not fail, it absorbed the fault", "bad"),
        ({"outcome": "healthy"}, "A false alarm: the run did not fail.", "bad"),
        ({}, "", "plain"),
    ],
)
def test_an_alarm_at_step_11_is_judged_by_the_causal_rule(judging, truth, judgement, tone):
    run = flat_run(**{"outcome": "failed"} | truth if truth else {})
    summary = summarise(run, trace_with_reasons(judging, run))
    assert judgement in summary.judgement
    assert bool(summary.judgement) == bool(judgement)
    assert summary.tone == tone


@pytest.mark.parametrize(("outcome", "tone"), [("failed", "bad"), ("healthy", "good")])
def test_silence_is_judged_too(outcome, tone):
    run = flat_run(outcome=outcome)
    summary = summarise(run, trace_with_reasons("never", run))
    assert (summary.headline, summary.tone, summary.alarmed) == ("No alarm", tone, False)


def test_an_alarm_that_is_judged_anew_is_listed_again_but_is_one_alarm(judging):
    run = flat_run()
    trace = trace_with_reasons(judging, run)
    assert [(alarm.step, alarm.verdict) for alarm in trace.began] == [
        (11, "recovering spike"),
        (15, "failure under way"),
    ]
    assert "1 alarm; in alarm at 10 of 20 records." in summarise(run, trace).details


def spiked_run() -> Run:
    """A spike of the loss that comes back, then nan to the end, logged every step."""
    losses = [2.0] * 60 + [6.0] * 5 + [2.0] * 20 + [nan] * 15
    records = [Record(step=s, training_loss=x) for s, x in enumerate(losses, start=1)]
    return Run(id="spiked", records=records)


def test_an_alarm_has_its_end_and_why_and_a_lasting_one_has_none():
    run = spiked_run()
    trace = trace_with_reasons("calibrated", run)
    alarms = [(alarm.step, alarm.until, alarm.ended) for alarm in trace.began]
    assert alarms == [(63, 66, ""), (67, 69, "the loss came back to 2"), (86, None, "")]
    summary = summarise(run, trace)
    assert "too early to tell" in summary.headline
    assert summary.details[:2] == [
        "Judged recovering spike from step 67.", "Over at step 70: the loss came back to 2.",
    ]  # fmt: skip
    published = trace_of_r_metric(score_run(eventful_run()))
    for alarm in published.began:
        last = len(published.steps) if alarm.until is None else alarm.until
        assert published.alarms[alarm.position : last].all()
        assert last == len(published.steps) or not published.alarms[last]


def test_the_calibrated_detector_stands_first_and_the_published_metric_has_a_caution():
    html = page(spiked_run(), "calibrated")
    cards = re.findall(r'class="saying[^>]* data-detector="(\w+)"', html)
    assert cards == ["calibrated", "r_metric"]
    assert html.count("so its alarm does not count for the verdict") == 1
    text = Found(html).text
    caution = "so its alarm does not count for the verdict"
    assert text.index("too early to tell") < text.index(caution)
    data = Found(html).data
    kinds = {line["label"]: line["kind"] for line in data["lines"]}
    assert kinds["first alarm: Calibrated detector"] == "alarm"
    tones = {panel["name"]: panel["tone"] for panel in data["panels"]}
    assert {name for name, tone in tones.items() if tone == "alert"} == {
        "score_calibrated", "evidence_calibrated"
    }  # fmt: skip


def test_a_score_of_nan_does_not_flatten_the_rest():
    data = Found(page(spiked_run(), "calibrated")).data
    panels = {panel["name"]: panel for panel in data["panels"]}
    for name in ("score_calibrated", "evidence_calibrated"):
        assert panels[name]["cap"] == 5
    assert max(panels["score_calibrated"]["series"][0]["y"]) == 100  # as it is to be read
    assert panels["loss"]["cap"] is None


def test_the_page_shows_how_to_make_it_again():
    found = Found(page(eventful_run(), command="python replay.py 'a b.csv' --map loss=x"))
    assert "python replay.py 'a b.csv' --map loss=x" in found.text
    assert "ab" * 32 in found.text
    assert "logs/eventful.jsonl" in found.text


# What it draws


def test_every_signal_has_its_curve_and_its_values(judging):
    run = eventful_run()
    data = Found(page(run, judging)).data
    panels = {panel["name"]: panel for panel in data["panels"]}
    assert set(panels) == {
        "loss", "gradient_norm", "workers", "score_judging", "evidence_judging",
        "contributions_judging", "r_metric", "normalised", "raw_gradient_variance",
        "raw_loss_drift",
    }  # fmt: skip
    training, validation = panels["loss"]["series"]
    assert training["x"] == list(range(1, 401))
    assert training["marks"] == {"nan": [395], "inf": [397]}
    assert training["y"][394] is training["y"][396] is None
    assert training["y"][0] == pytest.approx(run.records[0].training_loss, rel=1e-5)
    assert validation["x"] == list(range(10, 401, 10))
    assert len(panels["workers"]["series"]) == 3
    assert panels["r_metric"]["threshold"] == 0.57
    r = panels["contributions_judging"]["series"][0]["y"]
    assert r[9] == pytest.approx(0.45 * 0.2 + 0.70 * 1.0)
    scored = score_run(run)
    assert panels["r_metric"]["series"][0]["y"] == pytest.approx(
        [score.score for score in scored.scores], rel=1e-5
    )
    assert [(line["kind"], line["x"]) for line in data["lines"]] == [
        ("event", 321), ("onset", 200), ("failure", 360),
        ("published-alarm", trace_of_r_metric(scored).alarm_steps[0]), ("own-alarm", 11),
    ]  # fmt: skip


def test_many_workers_are_three_curves_and_a_nan_among_them_is_seen():
    norms = [tuple(float(i) for i in range(1, 21)), (nan,) + (1.0,) * 19]
    records = [Record(step=s, worker_gradient_norms=n) for s, n in enumerate(norms)]
    data = Found(page(Run(id="x", records=records))).data
    (panel,) = [p for p in data["panels"] if p["name"] == "workers"]
    assert [(curve["label"], curve["y"]) for curve in panel["series"]] == [
        ("smallest", [1, None]), ("median", [10.5, None]), ("greatest", [20, None]),
    ]  # fmt: skip
    assert all(curve["marks"] == {"nan": [1]} for curve in panel["series"])


def test_where_steps_fall_back_the_axis_counts_records_and_says_so():
    steps = [10, 20, 30, 20, 30, 40]
    run = Run(id="x", records=[Record(step=s, training_loss=1.0) for s in steps],
              truth=Truth(onset_step=40, outcome="failed", failure_step=99))  # fmt: skip
    html = page(run)
    data = Found(html).data
    training = data["panels"][0]["series"][0]
    assert training["x"] == [1, 2, 3, 4, 5, 6]
    assert training["steps"] == steps
    assert [line["x"] for line in data["lines"]] == [6, 7]
    assert "the axis counts records" in html
    assert "the axis counts records" not in page(flat_run())


def test_records_of_one_step_lie_within_it_and_none_hides_another():
    steps = [100000, 100001, 100001, 100001, 100002]
    run = Run(id="x", records=[Record(step=s, training_loss=1.0) for s in steps])
    data = Found(page(run)).data
    x = data["panels"][0]["series"][0]["x"]
    assert not data["byRecord"]
    assert np.all(np.diff(x) > 0)
    assert np.floor(x).tolist() == np.round(x).tolist() == steps


@pytest.mark.parametrize(
    "record",
    [
        Record(step=2**62, training_loss=1e300, gradient_norm=-inf),
        Record(step=0),
        Record(step=-5, training_loss=0.0, validation_loss=-1.0),
        Record(step=1, training_loss=nan, worker_gradient_norms=()),
    ],
)
def test_one_odd_record_makes_a_page(record):
    data = Found(page(Run(id="odd", records=[record]))).data
    assert data["range"][0] <= record.step <= data["range"][1]


def long_charts(count: int, num_series: int) -> Charts:
    rng = np.random.default_rng(0)
    values = rng.lognormal(size=count)
    values[count // 3] = 1e9
    values[count // 2] = nan
    series = Series(label="s", colour="e1", positions=np.arange(count), values=values)
    alarms = rng.random(count) < 0.5
    panels = [
        Panel(name=f"p{i}", title="p", series=[series], alarms=alarms) for i in range(num_series)
    ]
    return Charts(steps=np.arange(count) * 1000, groups={"long": panels})


@pytest.mark.parametrize("num_series", [12, 300])
def test_a_million_records_stay_below_two_megabytes_and_spikes_survive(monkeypatch, num_series):
    charts = long_charts(1_000_000 if num_series < 50 else 50_000, num_series)
    monkeypatch.setattr("rmetric.reporting.page.charts_of", lambda *given: charts)
    html = page(flat_run())
    assert len(html.encode()) < 2_000_000
    found = Found(html)
    assert "smallest and the greatest" in found.text
    for panel in found.data["panels"]:
        (series,) = panel["series"]
        assert max(y for y in series["y"] if y is not None) == 1e9
        assert len(series["marks"]["nan"]) == 1
        assert len(panel["shaded"]) <= 1000


def test_columns_name_how_many_values_a_point_stands_for():
    assert drawn(long_charts(10_000, 1), 100)["stretch"] == 100
    scored = score_run(flat_run())
    assert drawn(charts_of(scored, [trace_of_r_metric(scored)]), 100)["stretch"] == 1


def row(**known) -> dict:
    default = dict(id="a", folder="a", source="a.csv", format="CSV", num_records=5, max_r=0.5)
    if "problem" in known:
        default = {}
    return dict.fromkeys(INDEX_COLUMNS, "") | default | known


def test_the_index_links_runs_and_shows_why_files_failed():
    rows = [
        row(id="one", folder="one 1", outcome="failed", first_alert_step=30, failure_step=40),
        row(id="two", folder="two", outcome="healthy"),
        row(problem="b.csv, line 2: broken", source="b.csv"),
    ]
    found = Found(index_of(rows))
    links = found.values("a", "href")
    assert links == ["#failed", "one%201/report.html", "two/report.html", "index.csv"]
    assert "b.csv, line 2: broken" in found.text
    assert "R-Metric alarms in 1" in found.text
    assert "calibrated" not in found.text, "no run was shown to it"


def test_the_index_names_the_file_and_keeps_its_path_at_hand():
    rows = [
        row(id="a", source="runs/deep/a b.csv", calibrated_first_alarm_step=3),
        row(id="b", source="b.csv"),
        row(id="c", source="C:\\runs\\c.csv"),
    ]
    html = index_of(rows)
    assert '<td title="runs/deep/a b.csv">a b.csv</td>' in html
    assert "<td>b.csv</td>" in html
    assert '<td title="C:\\runs\\c.csv">c.csv</td>' in html
    assert "Alarmed (calibrated)" in html
    assert "Alarmed (calibrated)" not in index_of([row(id="a")])


def test_an_index_of_thousands_stays_small():
    rows = [row(id=f"run_{i:05}", folder=f"run_{i:05}", source=f"runs/run_{i:05}.csv")
            for i in range(2000)]  # fmt: skip
    assert len(index_of(rows)) < 2_000_000 * 2000 / 7000


def test_the_index_has_the_worst_verdict_first_then_the_names():
    kinds = {"run_10": "spike", "run_9": "spike", "a": "healthy", "z": "diverged", "b": "healthy"}
    rows = [
        row(id=id, folder=id, verdict_kind=kind, verdict=f"{kind.upper()} at 4")
        for id, kind in kinds.items()
    ]
    found = Found(index_of(rows))
    links = found.values("a", "href")
    assert [link.split("/")[0] for link in links[:5]] == ["z", "run_9", "run_10", "a", "b"]
    assert "2 with spikes" in found.text
    assert "A verdict comes from the whole log, afterwards" in found.text


# The verdict beside the alarms and in the chart


def course(*spikes: int) -> Run:
    losses = [3 + 7 * 0.97**i + 0.01 * (i % 3) for i in range(400)]
    for at in spikes:
        losses[at : at + 4] = [9.0 + at / 100] * 4
    records = [Record(step=i, training_loss=x) for i, x in enumerate(losses)]
    return Run(id="course", records=records, source="a.csv")


def lines_of(run: Run, verdict) -> list:
    scored = score_run(run)
    return charts_of(scored, [trace_of_r_metric(scored)], verdict).lines


def test_each_spike_has_a_mark_that_shows_which_it_is():
    run = course(200, 300)
    lines = lines_of(run, judge_run(run.records))
    assert [(line.step, line.tag) for line in lines if line.kind == "event"] == [
        (200, "spike (1 of 2)"),
        (300, "spike (2 of 2, the highest)"),
    ]
    many = course(*range(100, 380, 30))
    tags = [line.tag for line in lines_of(many, judge_run(many.records)) if line.kind == "event"]
    assert tags == ["spike (1 of 10)", "spike (10 of 10, the highest)"]
    once = course(200)
    assert lines_of(once, judge_run(once.records))[0].tag == "spike"


def test_reinforcement_learning_shows_its_reward_first_with_the_onset():
    records = [
        Record(step=s, training_loss=0.01, policy={"reward": 0.7 if s < 60 else 0.02, "kl": 0.01})
        for s in range(1, 101)
    ]
    data = Found(page(Run(id="grpo", records=records))).data
    names = [panel["name"] for panel in data["panels"]]
    assert names[:3] == ["policy_reward", "policy_kl", "loss"]
    (line,) = [line for line in data["lines"] if line["kind"] == "event"]
    assert line["tag"] == "reward collapsed"
    assert line["step"] in range(60, 101)
