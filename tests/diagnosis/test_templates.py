"""From lines to events: masks, cached facts, Drain."""

from __future__ import annotations

import re
from collections import Counter

import pytest
import regex
from drain3.drain import Drain
from hypothesis import given, settings
from hypothesis import strategies as st

from rmetric.diagnosis.facts.statements import STATEMENTS, may_state
from rmetric.diagnosis.forms import MOST_HEADS, Heads, StepPlace, TimePlace, same_places
from rmetric.diagnosis.library import SignatureLibrary
from rmetric.diagnosis.library.load import any_digits
from rmetric.diagnosis.reading.prefixes import PrefixParser
from rmetric.diagnosis.reading.text import WordIndex, runs_of
from rmetric.diagnosis.templates import (
    LONGEST_KEY,
    MASKS,
    MAX_TEMPLATE,
    OTHERS,
    BoundedCache,
    Events,
    LineAnalyser,
    masked,
    plain_numbers,
)
from rmetric.readers.step_forms import StepMatch, match_step
from studies.diagnosis_benchmark.corpus import corpus

NUMBERS = re.compile(r"[0-9]+")
LIBRARY = SignatureLibrary.shipped()
FACTS = LineAnalyser(LIBRARY).facts


def template(line: str) -> str:
    return masked(plain_numbers(line.encode()).decode())


def with_numbers(line: str, numbers: list[int]) -> str:
    """The line with other numbers, in turn."""
    given = iter(numbers * len(line))
    return NUMBERS.sub(lambda _: str(next(given)), line)


SOME = st.lists(st.integers(0, 10**12), min_size=1, max_size=6)
#: Text as logs have it: words, numbers, and the marks that masks are about.
LINES = st.lists(
    st.one_of(
        st.sampled_from(
            ["loss", "0x7f", "ab12", "/data/x", "1.5e-3", "10.0.0.1:29500", "[1, 2]", "rank 3"]
        ),
        st.text("abf01279 .:-/[]()=,%xe", min_size=1, max_size=8),
    ),
    min_size=1,
    max_size=8,
).map(" ".join)


def step_of(line: bytes) -> StepMatch | None:
    return match_step(line.decode())


@pytest.mark.parametrize("name", MASKS)
def test_each_mask_masks_its_example(name: str) -> None:
    line, expected = MASKS[name]["example"]
    assert f"<{name}>" in expected
    assert template(line) == expected


@given(LINES, SOME)
def test_digits_do_not_matter_to_a_template(line: str, numbers: list[int]) -> None:
    assert template(with_numbers(line, numbers)) == template(line)
    found = template(line * 20)
    assert not NUMBERS.search(found)
    assert len(found) <= MAX_TEMPLATE


def test_the_cache_is_bounded_and_keeps_no_long_key() -> None:
    cache: BoundedCache[int] = BoundedCache(10)
    cache.put(b"x" * (LONGEST_KEY + 1), 1)
    assert len(cache) == 0
    for at in range(100):
        cache.put(b"%d" % at, at)
        assert cache[b"%d" % at] == at
        assert len(cache) <= 10


def test_classes_and_first_words_are_kept_apart() -> None:
    events = Events()
    numbers = {
        events.number("disk is full on node"),
        events.number("disk is full on node", "error"),
        events.number("disk is full on node", "no_space"),
        events.number("quota is full on node"),
    }
    assert numbers == {0, 1, 2, 3}


def test_beyond_the_most_all_is_one() -> None:
    events = Events(max_events=5)
    numbers = [events.number(f"{letter * 3} says {letter}") for letter in "abcdefghij"]
    assert numbers == [0, 1, 2, 3, 4, 5, 5, 5, 5, 5]
    assert events.template(5) == OTHERS
    assert events.full == 5
    assert events.number("aaa says a") == events.number("aaa says b") == 0
    assert events.template(0) == "aaa says <*>"


def test_like_is_word_for_word() -> None:
    events = Events()
    event = events.number("saved <PATH> in <N> seconds")
    assert events.like("saved <PATH> in <N> seconds") == event
    assert events.like("saved <*> in <N> seconds") == event
    assert events.like("saved <PATH> in no seconds") is None
    assert events.like("lost <PATH> in <N> seconds") is None


@settings(max_examples=50)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=200))
def test_counts_are_those_of_plain_drain3(which: list[int]) -> None:
    """On lines of clear templates, seen once each by us and every time by drain3."""
    forms = [f"{word} module loads part {{}} of shard {word}" for word in "abcdefghij"]
    lines = [forms[number].format(at) for at, number in enumerate(which)]
    drain, events = Drain(depth=5, sim_th=0.6), Events()
    theirs = Counter(
        drain.add_log_message(f"class: {template(line)}")[0].cluster_id for line in lines
    )
    ours = Counter(events.number(template(line)) for line in lines)
    assert sorted(theirs.values()) == sorted(ours.values())


@pytest.mark.parametrize(
    "form",
    [
        "[2024-01-01 00:00:01] iteration {:8d}/ 5000 | consumed samples: {} | loss 1.5",
        '{{"step": {}, "loss": {}.0}}',
        " 10%|xx   | {}/400 [00:{:02d}<01:20,  3.5it/s]",
        "Epoch [3/10], Step [{}/267] loss {}",
        "global_step={} of 7 hosts, {} tokens",
        "Epoch [{}/10], Step [{}/100] loss 1",
    ],
)
@given(st.lists(st.integers(1, 10**6), min_size=2, max_size=5))
def test_steps_are_those_of_the_slow_way(form: str, steps: list[int]) -> None:
    lines = [form.format(step, at) for at, step in enumerate(steps)]
    place = StepPlace(lines[0].encode(), step_of)
    assert [place.find(line.encode()) for line in lines] == [match_step(line) for line in lines]


@pytest.mark.parametrize(
    "form",
    [
        "[2024-04-08 02:{:02d}:{:02d},{:03d}] step",
        "2: 2024-04-08T02:{:02d}:{:02d}.{:06d}+05:30 step",
        "2024-04-08-02:{:02d}:{:02d}.{:03d}.469 step",
        "2024-04-08T02:{:02d}:{:02d}.{:03d}000045Z step",
        "May  3 12:{:02d}:{:02d} gpu{} step",
        "[ {}{}.{:06d}] step",
        "16907{:02d}0{:02d}.{} step",
        '{{"time": 16907{:02d}0{:02d}.{:03d}596, "event": "x"}}',
        '{{"said": "' + "a" * 173 + '", "time": 16907{:02d}0{:02d}.{:03d}596}}',
        '{{"time": 16907{:02d}0{:02d}.715{:03d}, "event": "x"}}',
        '{{"time_ms": 16907{:02d}0{:02d}7{:03d}, "event": "x"}}',
        "05/03/2024 12:{:02d}:{:02d} PM step {}",
        "no time {} {} {}",
    ],
)
@given(st.lists(st.tuples(*[st.integers(0, 59)] * 2, st.integers(0, 999)), min_size=1))
def test_times_are_those_of_the_slow_way(form: str, times: list[tuple[int, int, int]]) -> None:
    lines = [form.format(*each).encode() for each in times]
    prefixes = PrefixParser.learn(lines * 3)
    place = TimePlace(lines[0], prefixes)
    assert [place.time(line) for line in lines] == [prefixes.time(line) for line in lines]


def test_prefixes_that_are_too_many_are_not_kept() -> None:
    lines = [f"{at // 60:06d}:{at % 60:02d}> rank 3 said".encode() for at in range(3 * MOST_HEADS)]
    heads = Heads(same_places(lines[0], [(13, 15)], 16))
    heads.learn(lines[0], 3)
    for line in lines:
        heads.find(line)
        assert len(heads.known) <= MOST_HEADS
    assert heads.lengths == ()


@given(st.lists(st.text("abc+ ", min_size=1, max_size=6)), st.text("abc+ ", max_size=40))
def test_it_finds_the_literals_that_occur_and_no_others(literals: list[str], line: str) -> None:
    index = WordIndex((literal.encode(), at) for at, literal in enumerate(literals))
    expected = [at for at, literal in enumerate(literals) if literal in line]
    assert sorted(index.items(line.encode())) == expected
    assert sorted(index.items(line.encode(), runs_of(line.encode()))) == expected


@given(st.data(), SOME)
def test_the_looser_form_matches_what_the_pattern_matches(
    data: st.DataObject, few: list[int]
) -> None:
    """The law that makes it sound: never quiet about a line that a signature matches."""
    signature = data.draw(st.sampled_from(sorted(LIBRARY, key=lambda signature: signature.id)))
    example = with_numbers(data.draw(st.sampled_from(signature.matches)), few)
    for pattern in signature.patterns:
        if regex.search(pattern, example, regex.MULTILINE):
            assert regex.search(any_digits(pattern), NUMBERS.sub("", example), regex.MULTILINE)


def test_a_statement_may_match_what_it_matches() -> None:
    lines = {line for job in corpus() for text in job.files.values() for line in text.split("\n")}
    found = [(claim, line) for claim in STATEMENTS for line in lines if claim.pattern.search(line)]
    assert len(found) > 100
    for claim, line in found:
        bare = NUMBERS.sub("", line)
        assert claim in may_state(bare, bare.lower().encode())


@given(LINES, SOME)
def test_digits_do_not_matter(line: str, numbers: list[int]) -> None:
    assert LineAnalyser(LIBRARY).facts(with_numbers(line, numbers).encode()) == FACTS(line.encode())


def test_a_line_that_no_signature_can_match_is_quiet() -> None:
    assert FACTS(b"[INFO] ring of 5 bytes in 5.0 us, via NET/IB/0").quiet
    assert not FACTS(b"NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus").quiet


def test_structured_lines_are_classed_by_their_key() -> None:
    start, stop = (
        FACTS(b':::MLLOG {"time_ms": 1, "key": "%s", "value": null}' % key)
        for key in (b"run_start", b"run_stop")
    )
    assert start.cls != stop.cls


def test_an_exception_is_seen_wherever_it_stands() -> None:
    for line in (b"ValueError: bad", b"junk File torch.cuda.OutOfMemoryError: out of memory"):
        assert FACTS(line).exception


@pytest.mark.parametrize(
    ("line", "level"),
    [
        ("I0909 11:58:44.151896    1256 xla_bridge.py:689] Unable to initialize backend", "info"),
        ("E0612 05:33:34.893694    1054 rendezvous.cc:100] waiting", "error"),
        ("[rank0]:[W520 07:02:58.112233445 ProcessGroupNCCL.cpp:4561] using GPU 0", "warning"),
        ("I20240501-12:00:00.123456 41 api.cc:7] ready", "info"),
        ("W0000 of the model", ""),
    ],
)
def test_the_level_of_a_form_is_that_of_its_lines(line, level):
    """Forms have 0 for every number, whose digits the level's letter stands before."""
    assert FACTS(line.encode()).level == level
