"""Timestamp, text and level of a line."""

from __future__ import annotations

import re
import time
from datetime import datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmetric.diagnosis.reading import line_heads
from rmetric.diagnosis.reading.prefixes import COUNTED, PrefixParser
from rmetric.diagnosis.reading.text import clean, kind_of, level
from rmetric.diagnosis.reading.timestamps import parse, stated

EXAMPLES = [
    (row["pattern"], *each) for row in line_heads()["times"] for each in row["examples"].items()
]


@pytest.mark.parametrize(("pattern", "line", "stands_for"), EXAMPLES)
def test_an_example_is_of_its_row_and_states_this_time(pattern, line, stands_for):
    """In UTC, or in seconds since 1970 or since a machine's start."""
    if isinstance(stands_for, datetime):
        stands_for = stands_for.replace(tzinfo=timezone.utc).timestamp()
    match = stated(line)
    assert match.re.pattern == pattern
    assert parse(line) == (pytest.approx(stands_for, abs=1e-6), match.end())


MOMENTS = st.datetimes(datetime(2001, 9, 10), datetime(2033, 1, 1), timezones=st.just(timezone.utc))
#: Behind each form, the part of a second that it states.
FORMS = {
    "%Y-%m-%dT%H:%M:%S.{micro}Z said": 6,
    "%Y-%m-%d %H:%M:%S,{milli} - trainer - INFO - said": 3,
    "[%Y-%m-%d %H:%M:%S,{milli}] [WARNING] [launch.py:3] said": 3,
    "[%Y/%m/%d %H:%M:%S] said": 0,
    "%Y%m%d %H:%M:%S said": 0,
    "[INFO] HCCL(69395,python3):%Y-%m-%d-%H:%M:%S.{milli}.{rest} [op_base.cc:314]": 6,
    "[INFO|trainer.py:910] %Y-%m-%d %H:%M:%S,{milli} >> said": 3,
    "[NeMo W %Y-%m-%d %H:%M:%S nemo_logging:349] said": 0,
    "kern  :warn  : %Y-%m-%dT%H:%M:%S,{micro}+00:00 NVRM: Xid": 6,
    "[%b %d %Y %H:%M:%S] [INFO] [tid 1803] said": 0,
    "[%a %b %d %H:%M:%S %Y] NVRM: Xid": 0,
    "%a %b %d %I:%M:%S %p UTC %Y said": 0,
    "%d/%b/%Y:%H:%M:%S +0000 said": 0,
    "%m/%d/%Y %I:%M:%S %p - INFO - said": 0,
    "[%m/%d/%y %H:%M:%S] INFO said": 0,
    "STARTING TIMING RUN AT %Y-%m-%d %I:%M:%S %p": 0,
    "slurmstepd: error: *** JOB 9 ON node07 CANCELLED AT %Y-%m-%dT%H:%M:%S ***": 0,
    '{{"level": "info", "timestamp": "%Y-%m-%dT%H:%M:%S.{micro}Z"}}': 6,
    'time="%Y-%m-%dT%H:%M:%SZ" level=info': 0,
    "WARNING:root:%Y-%m-%d %H:%M:%S said": 0,
    "  time      : %Y-%m-%d_%H:%M:%S": 0,
    "%d.%m.%Y %H:%M:%S rank0 INFO said": 0,
}


def formatted(form: str, moment: datetime) -> str:
    micro = f"{moment.microsecond:06d}"
    return moment.strftime(form).format(micro=micro, milli=micro[:3], rest=micro[3:])


@pytest.mark.parametrize("form", list(FORMS))
@given(moment=MOMENTS)
def test_a_formatted_time_is_that_time(form, moment):
    text = formatted(form, moment)
    seconds, used = parse(text)
    unit = 10 ** (6 - FORMS[form])
    expected = moment.replace(microsecond=moment.microsecond // unit * unit)
    assert seconds == pytest.approx(expected.timestamp(), abs=1e-6)
    assert 0 < used <= len(text)


@given(MOMENTS, st.integers(-14 * 4, 14 * 4))
def test_zones(moment, quarters):
    zone = timezone(timedelta(minutes=15 * quarters))
    text = moment.replace(microsecond=0).astimezone(zone).isoformat() + " said"
    assert parse(text) == (moment.replace(microsecond=0).timestamp(), len(text) - len(" said"))
    assert parse(text.replace("T", " ")) is not None


@given(MOMENTS)
def test_epochs(moment):
    milliseconds = int(moment.timestamp() * 1000)
    for text in (
        f"[{milliseconds / 1000:.3f}] [gpu:1:0]",
        f"E0000 00:00:{milliseconds / 1000:.3f}000    292 agent.cc:614] Failed",
        f'MLLOG {{"namespace": "", "time_ms": {milliseconds}, "event_type": "x"}}',
    ):
        assert parse(text) == (milliseconds / 1000, re.search(r"\d{10}\S*\d", text).end())


@given(st.integers(0, 10**12))
def test_a_kernels_seconds_since_boot(micro):
    text = f"[{micro // 10**6:5d}.{micro % 10**6:06d}] Out of memory"
    assert parse(text) == (pytest.approx(micro / 1e6), text.index("]"))
    assert parse(f"6,3973,{micro},-;nvidia") == (pytest.approx(micro / 1e6), len(f"6,3973,{micro}"))


@given(st.datetimes(datetime(1972, 1, 1), datetime(1972, 12, 31), timezones=st.just(timezone.utc)))
def test_without_a_year_it_is_one_of_its_own(moment):
    for form in (
        "%b %d %H:%M:%S gpu-07 kernel: x",
        "E%m%d %H:%M:%S.{micro} 12 f.cc:1] x",
        "INFO %m-%d %H:%M:%S x",
    ):
        seconds, _ = parse(formatted(form, moment))
        expected = moment if "micro" in form else moment.replace(microsecond=0)
        assert seconds == pytest.approx(expected.timestamp(), abs=1e-6)


@given(st.text(max_size=200))
def test_any_text_can_be_asked(text):
    found = parse(text)
    assert found is None or 0 < found[1] <= len(text)


LONG = ["[", "1:", "2024-", "[a]", "a:", "(", " ", "1,", "12:00:01 ", "0", "a.", "A", "Error", "=",
        "#1 ", "a ", "2024-05-03 12:00:00 ", "[a] ", "INFO ", "a:1:1 [0] "]  # fmt: skip


@pytest.mark.parametrize("part", LONG)
def test_no_line_takes_long(part):
    text = part * (60_000 // len(part)) + "12:00:01"
    prefixes = PrefixParser(COUNTED)
    began = time.process_time()
    parse(text)
    parse("12:00:01" + text)
    level(text)
    prefixes.split(text.encode())
    prefixes.time(text.encode())
    kind_of(text.encode())
    assert time.process_time() - began < 0.8


@given(st.text(st.characters(codec="utf-8"), max_size=80))
def test_clean_text(text):
    cleaned = clean(text.encode())
    assert not set(cleaned) & ({*map(chr, range(32)), "\x7f"} - {"\t"})
    if text.isprintable():
        assert cleaned == text
    assert clean(cleaned.encode()) == cleaned
    assert clean(cleaned.encode() + "ö".encode("latin-1")) == f"{cleaned}\ufffd"


@given(MOMENTS)
def test_the_month_of_glog_has_one_digit_or_two(moment):
    """PyTorch writes it without a leading zero: [E622 05:06:19.123456789 file.cpp:3]."""
    clock = f"{moment:%H:%M:%S.%f}"
    expected = moment.replace(year=1972).timestamp() if moment.day < 29 else None
    for date in (f"{moment:%m%d}", f"{100 * moment.month + moment.day}"):
        seconds, _ = parse(f"[E{date} {clock}000 ProcessGroupNCCL.cpp:3] said")
        if expected is not None:
            assert seconds == pytest.approx(expected, abs=1e-5)
