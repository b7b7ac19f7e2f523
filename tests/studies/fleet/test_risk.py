"""The evaluation of the risk score on simulated fleets."""

import json
from dataclasses import replace
from functools import cache
from math import isnan, nan
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from rmetric.evaluation import Estimate
from rmetric.telemetry.lines import event_line
from studies.common.csv_rows import read_dicts
from studies.fleet import published
from studies.fleet import risk_tables as estimates
from studies.fleet.__main__ import main
from studies.fleet.gpu_usage import (
    DAY,
    ENDS_OF,
    HOUR,
    MEDIAN_LEAD_HOURS,
    SIGNS_OF,
    UNCORRECTABLE,
    JobConditions,
)
from studies.fleet.predictors import PREDICTORS, signals
from studies.fleet.recorded import evaluate_recorded, stepwise_signals
from studies.fleet.risk_evaluation import (
    AT_FAILURE,
    HORIZONS,
    QUIET,
    EvaluationPlan,
    FailureWindows,
    beginnings,
    evaluate,
    simulate,
)
from studies.fleet.risk_tables import SHARE, tables
from studies.fleet.telemetry_simulation import SLOWDOWN_CELSIUS, failing, healthy

ROOT = Path(__file__).resolve().parents[3]
RESULTS = ROOT / "studies" / "fleet" / "results" / "risk"
PAGE = (ROOT / "docs" / "fleet_risk.md").read_text(encoding="utf-8")
#: With driver reloads and corrected errors; without anything but training.
BUSY = JobConditions(idles_per_day=8.0, weak_share=1.0)
STEADY = JobConditions(
    stops_per_day=0, idles_per_day=0, evaluations_per_day=0, airflow_per_day=0, hot_share=0
)
SHORT = 5 * HOUR
SMALL = EvaluationPlan(gpus=4, days=0.5, contained=3, with_sign=12, without=12)


def rng(*seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


@cache
def history(cause: str, with_sign: bool, seed: int):
    job = BUSY
    return failing(rng(seed), gpu=0, cause=cause, with_sign=with_sign, job=job, before=SHORT)


@cache
def small():
    return evaluate(SMALL)


def test_the_same_seed_gives_the_same_bytes_whatever_the_other_strata():
    first, again = (simulate(SMALL, JobConditions(), "with_sign", 3) for _ in range(2))
    for name, column in first.columns.items():
        assert column.tobytes() == again.columns[name].tobytes()
    assert (first.xids, first.failure) == (again.xids, again.failure)
    other = simulate(replace(SMALL, gpus=9, contained=1), JobConditions(), "with_sign", 3)
    assert other.columns["power_watts"].tobytes() == first.columns["power_watts"].tobytes()


def test_the_number_of_processes_changes_nothing():
    few = EvaluationPlan(gpus=2, days=0.2, contained=1, with_sign=2, without=2)
    one, two = (evaluate(few, num_processes=number) for number in (1, 2))
    assert one.keys() == two.keys()
    assert all(rows.equals(two[which]) for which, rows in one.items())


@pytest.mark.parametrize("cause", published.OF_A_GPU)
@pytest.mark.parametrize("seed", range(4))
def test_a_failure_happens_and_nothing_shows_before_one_without_a_sign(cause, seed):
    seen = history(cause, False, seed)
    failure, at = seen.failure, seen.failure.reading
    assert failure.cause == cause
    assert failure.end in ENDS_OF[cause]
    assert not failure.sign
    before = {name: column[:at] for name, column in seen.columns.items()}
    assert not before["ecc_uncorrected_errors"].any()
    assert not before["nvlink_crc_errors"].any()
    assert not before["row_remap_pending"].any()
    assert before["temperature_celsius"].max() <= SLOWDOWN_CELSIUS
    assert not seen.throttles["hardware_slowdown"][:at].any()
    new = {number for time, number in seen.xids if time >= seen.times[at]} - {13, 31, 43}
    if failure.end == "silent":
        assert not new
        assert (seen.columns["utilisation_percent"][at:] == 100).all()
    else:
        assert new == {int(failure.end)}
        assert seen.lost[at:].all() == (failure.end == "79")
        assert (seen.columns["utilisation_percent"][at:] == 0).all()
        rose = np.diff(seen.columns["ecc_uncorrected_errors_lifetime"])[at - 1] > 0
        assert rose == (failure.end in UNCORRECTABLE)


def found_sign(sign: str, job: JobConditions = STEADY, earliest: int = 360):
    """A history with that sign, which begins within it."""
    cause = next(cause for cause, mixture in SIGNS_OF.items() if sign in mixture)
    for seed in range(100):
        seen = failing(rng(seed), gpu=0, cause=cause, with_sign=True, job=job, before=SHORT)
        if seen.failure.sign == sign and earliest < seen.failure.sign_reading < 1740:
            return seen
    raise AssertionError(f"no history of 100 has {sign}")


@pytest.mark.parametrize("sign", MEDIAN_LEAD_HOURS)
def test_a_sign_begins_where_it_says_and_not_before(sign):
    seen = found_sign(sign)
    begun, at = seen.failure.sign_reading, seen.failure.reading
    celsius = seen.columns["temperature_celsius"]
    trace = {
        "corrected": np.diff(seen.columns["ecc_corrected_errors_lifetime"], prepend=0) > 0,
        "contained": seen.columns["row_remap_pending"],
        "link": np.diff(seen.columns["nvlink_crc_errors"], prepend=0) > 0,
        "heat": celsius > celsius[:begun].max(),
        "clocks": seen.columns["sm_clock_mhz"] < 0.9 * seen.columns["sm_clock_mhz"].max(),
    }[sign]
    assert trace[begun:at].any()
    assert not trace[:begun].any()


def test_published_numbers_are_what_they_are_stated_to_be():
    assert published.NUM_INTERRUPTIONS == 419
    assert published.NUM_OF_A_GPU == 148 + 72 + 19 + 17 + 6
    assert published.GPU_DAYS == 884_736
    assert f"{published.STOPS_PER_DAY:.1f} a day" in PAGE
    sample = (RESULTS / "risk_sample.md").read_text(encoding="utf-8")
    assert f"{published.HOURS_BETWEEN_MEMORY_ERRORS:,.0f} h" in sample
    readings = published.GPU_DAYS * 8640 / 1e9
    assert f"{readings:.1f} billion readings" in PAGE
    for mixtures in (SIGNS_OF, ENDS_OF):
        assert set(mixtures) == set(published.OF_A_GPU)
        assert all(sum(mixture.values()) == pytest.approx(1) for mixture in mixtures.values())


def test_a_healthy_day_has_what_healthy_days_have():
    days = [
        healthy(rng(5, i), gpu=i, days=2, job=JobConditions(idles_per_day=1)) for i in range(12)
    ]
    assert all(day.failure is None and not day.lost.any() for day in days)
    joined = {n: np.concatenate([d.columns[n] for d in days]) for n in days[0].columns}
    assert joined["temperature_celsius"].max() <= SLOWDOWN_CELSIUS
    assert joined["temperature_celsius"].min() > 15
    assert (joined["utilisation_percent"] == 0).mean() > 0.02
    assert np.median(joined["utilisation_percent"]) > 90
    assert any(day.reloaded.any() and not day.available.all() for day in days)
    assert {number for day in days for _, number in day.xids} <= {13, 31, 43}
    assert any(day.xids for day in days)
    assert not joined["ecc_uncorrected_errors"].any()


@pytest.mark.parametrize(("seed", "cause"), [*enumerate(published.OF_A_GPU)])
def test_vectorised_signals_are_those_of_the_guard_one_reading_at_a_time(cause, seed):
    seen = history(cause, True, seed)
    times, stepwise = stepwise_signals(seen.events())
    found = signals(seen)
    whole = np.searchsorted(seen.times, times)
    for name in ("risk", "coded", "temperature"):
        known = ~np.isnan(stepwise[name])
        np.testing.assert_allclose(stepwise[name][known], found[name][whole[known]], atol=1e-9)
        assert known.sum() == seen.available.sum() == (~np.isnan(found[name])).sum()
    at = seen.times[seen.failure.reading]
    for predictor in PREDICTORS:
        theirs = beginnings(times[predictor.alarms(stepwise)])
        ours = beginnings(seen.times[predictor.alarms(found)])
        assert theirs[theirs <= at].tolist() == ours[ours <= at].tolist(), predictor.name
    assert stepwise["rules"].any() == (seen.failure.end != "silent")


TIMES = np.arange(0.0, 2 * DAY, 10.0)
AT = 1.5 * DAY


@pytest.mark.parametrize(
    ("when", "lead", "late", "num_false"),
    [
        (AT - 2 * HOUR, nan, False, 1),  # before the horizon
        (AT - HOUR, HOUR, False, 0),
        (AT - 60, 60.0, False, 0),  # just enough lead
        (AT - 50, nan, True, 0),  # too late to save
        (AT, nan, True, 0),
        (AT + 300, nan, True, 0),
        (AT + 310, nan, False, 1),
    ],
)
def test_when_an_alarm_is_right_late_or_false(when, lead, late, num_false):
    judged = FailureWindows(TIMES, (AT,), HOUR).judge(round(when, -1) == TIMES)
    assert judged.leads == pytest.approx((lead,), nan_ok=True)
    assert judged.at_failure == (late,)
    assert judged.num_false == num_false


any_alarms = st.lists(st.integers(0, TIMES.size - 1), max_size=30).map(
    lambda at: np.isin(np.arange(TIMES.size), at)
)


@given(any_alarms)
def test_every_incident_is_right_late_or_false_and_nothing_twice(alarms):
    judged = FailureWindows(TIMES, (AT,), DAY).judge(alarms)
    begun = beginnings(TIMES[alarms])
    near = ((begun >= AT - DAY) & (begun <= AT + AT_FAILURE)).sum()
    assert judged.num_false + near == begun.size
    assert (np.diff(begun) > QUIET).all()
    assert not (judged.at_failure[0] and not isnan(judged.leads[0]))


@pytest.mark.parametrize("count", [0, 1, 7, 250])
def test_the_interval_of_a_rate_is_the_one_that_the_tails_give(count):
    rate = estimates.poisson(count, 10.0)
    assert stats.poisson.cdf(count, 10 * rate.high) == pytest.approx(0.025)
    if count:
        assert stats.poisson.sf(count - 1, 10 * rate.low) == pytest.approx(0.025)


shares = st.floats(0, 1)
bounded = st.tuples(shares, shares, shares).map(sorted).map(lambda b: Estimate(b[1], b[0], b[2]))


@given(bounded, bounded, shares, st.floats(0, 30))
def test_weighted_sums_lie_between_their_parts_and_false_alarms_lower_precision(
    first, other, share, more
):
    mixed = estimates.weighted([(share, first), (1 - share, other)])
    assert mixed.low <= mixed.point + 1e-12 <= mixed.high + 2e-12
    assert mixed.high - mixed.low <= max(first.high - first.low, other.high - other.low) + 1e-9
    assert estimates.weighted([(1.0, first), (0.0, other)]) == pytest.approx(first)
    before = estimates.precision(first, other)
    after = estimates.precision(first, Estimate(*(bound + more for bound in other)))
    assert isnan(before.point) or after.point <= before.point
    assert isnan(before.point) or before.low <= before.point <= before.high


def test_the_anchors_are_where_they_must_be():
    strata = small()
    assert estimates.recall(strata, SHARE, "24 h", "never").point == 0
    assert estimates.false_alarms(strata, "24 h", "never").point == 0
    assert estimates.false_alarms(strata, "24 h", "never").high > 0
    assert estimates.recall(strata, SHARE, "1 h", "hourly").point == 1
    assert estimates.false_alarms(strata, "24 h", "hourly").point == pytest.approx(24, rel=0.01)
    assert estimates.firing(strata, "24 h", "always").point == 1
    assert strata["with_sign", "24 h", "always"].leads.isna().all()


def test_the_command_writes_the_same_bytes_twice(tmp_path, capsys):
    sizes = ["--gpus", "3", "--days", "0.3", "--failures", "6", "--contained", "2"]
    made = []
    for name in ("one", "two"):
        assert main(["risk", "--out", str(tmp_path / name), "--jobs", "1", *sizes]) == 0
        made.append({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()})
    first, second = made
    assert first == second
    assert {"risk.png", "risk.pdf", "provenance.json", "risk_24h.csv", "risk_24h.md"} <= set(first)
    assert json.loads(first["provenance.json"])["plan"]["with_sign"] == 6
    assert "Upper bound for predictors" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ("risk --gpus 0", "gpus is 0: it must be at least 1"),
        ("risk --days -1", "days is -1.0"),
        ("risk --failures many", "--failures is 'many': a number"),
        ("risk --recorded nowhere.jsonl --failures x", "nowhere.jsonl"),
        ("cost --replications 1", "--replications is 1: it must be at least 2"),
    ],
)
def test_bad_arguments_are_one_clear_error(arguments, problem, capsys, tmp_path):
    assert main([*arguments.split(), "--out", str(tmp_path)]) == 2
    assert problem in capsys.readouterr().err


@pytest.mark.parametrize("name", [table.name for table in tables(small())])
def test_the_page_shows_or_links_the_tables_of_the_results(name):
    table = (RESULTS / f"{name}.md").read_text(encoding="utf-8")
    shown = f"<!-- begin table {name} -->\n\n{table}\n<!-- end -->" in PAGE
    assert shown or f"/{name}.md)" in PAGE


def test_the_results_are_those_of_the_plan_and_stay_below_the_bound():
    plan = json.loads((RESULTS / "provenance.json").read_text(encoding="utf-8"))["plan"]
    assert EvaluationPlan(**plan) == EvaluationPlan()
    bounds, day = (read_dicts(RESULTS / f"risk_{name}.csv") for name in ("bound", "24h"))
    bound = {row["GPU failures with a sign (%)"]: row for row in bounds}
    most = float(bound[f"{100 * SHARE:g}"]["Most GPU failures announced (%)"])
    by_name = {row["Predictor"]: row for row in day}
    for title in ("Rules alone", "Score at 0.95 with rules", "Any uncorrectable ECC error"):
        assert float(by_name[title]["GPU failures announced (%)"]) <= most
    assert by_name["Score as described, 0.95"]["GPU failures announced (%)"] == "0"


@pytest.fixture(scope="module")
def recording(tmp_path_factory):
    """Two GPUs of which one fails, as the telemetry command would have written them."""
    folder = tmp_path_factory.mktemp("recording")
    failed = found_sign("contained", JobConditions())
    calm = healthy(rng(21), gpu=1, days=0.05, job=JobConditions())
    lines = [event_line(event, "a") for of_gpu in (failed, calm) for event in of_gpu.events()]
    (folder / "readings.jsonl").write_bytes(b"".join(lines))
    at = float(failed.times[failed.failure.reading])
    failures = json.dumps({"node": "a", "gpu": 0, "time": at})
    (folder / "failures.jsonl").write_text(failures + "\n", encoding="utf-8")
    return folder, failed


def test_a_recorded_history_is_judged_as_the_simulated_one(recording):
    folder, failed = recording
    table = evaluate_recorded(folder / "readings.jsonl", folder / "failures.jsonl")
    shown = {(row[0], row[1]): row for row in table.rows}
    assert len(shown) == len(HORIZONS) * len(PREDICTORS)
    found, at = signals(failed), float(failed.times[failed.failure.reading])
    for label, horizon in HORIZONS.items():
        for predictor in PREDICTORS:
            expected = FailureWindows(failed.times, (at,), horizon).judge(predictor.alarms(found))
            announced = shown[label, predictor.title][2].point
            assert announced == 100 * (not isnan(expected.leads[0])), (label, predictor.title)
    assert shown["24 h", "Rules alone"][2].point == 100
    assert table.title == "readings.jsonl: 2 GPUs, 1 failures"


def test_files_that_are_not_there_are_named(recording, capsys):
    readings = ["risk", "--recorded", str(recording[0] / "readings.jsonl")]
    assert main(readings) == 2
    assert capsys.readouterr().err.startswith("error: --recorded needs --failures FILE")
    assert main([*readings, "--failures", "no/where"]) == 2
    assert capsys.readouterr().err == "error: no/where: No such file or directory\n"


@pytest.mark.parametrize(
    ("readings", "failures", "problem"),
    [
        ("", "", "found no readings"),
        ("no json\n", "", "readings.jsonl, line 1"),
        (None, '{"gpu": 0}\n', "failures.jsonl, line 1: a failure has gpu and time"),
        (None, '{"gpu": 7, "node": "b", "time": 5}', "GPU 7 on node b failed, but"),
        (
            '{"event": "READING", "gpu": 0, "time": 9}\n{"event": "READING", "gpu": 0, "time": 1}',
            "",
            "readings.jsonl, line 2: time 1.0 comes after 9.0",
        ),
    ],
)
def test_a_bad_recording_is_one_clear_error(tmp_path, readings, failures, problem):
    path = tmp_path / "readings.jsonl"
    good = "".join(f'{{"event": "READING", "gpu": 0, "time": {t}}}\n' for t in (1, 11, 21))
    path.write_text(good if readings is None else readings, encoding="utf-8")
    (tmp_path / "failures.jsonl").write_text(failures, encoding="utf-8")
    with pytest.raises(ValueError) as error:  # noqa: PT011
        evaluate_recorded(path, tmp_path / "failures.jsonl")
    assert problem in str(error.value)
