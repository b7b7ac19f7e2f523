"""Prefixes of launchers, learnt for a file."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmetric.diagnosis.reading import line_heads
from rmetric.diagnosis.reading.prefixes import COUNTED, CUT, NO_PREFIX, Prefix, PrefixParser
from rmetric.diagnosis.reading.timestamps import NO_YEAR

ROWS = {row["name"]: row for table in ("cut", "counted", "stated") for row in line_heads()[table]}
EXAMPLES = [(form, *example) for form, row in ROWS.items() for example in row["examples"].items()]


@pytest.mark.parametrize(("form", "line", "states"), EXAMPLES)
def test_an_example_states_what_its_row_says(form, line, states):
    who, start = PrefixParser(COUNTED.keys() & {form}).split(line.encode())
    found = vars(who) | {"kinds": list(who.kinds), "text": line[start:]}
    assert found == vars(NO_PREFIX) | {"kinds": [form], "text": line} | states


HOST = st.sampled_from(["node-07", "gpu041", "r6i4n5", "10.0.0.2", "ip-10-0-0-1.ec2.internal"])
#: Forms whose node may be any host; of the others it is a pod or an address.
OF_HOSTS = {"loki", "kubectl", "nccl", "ucx", "open_mpi"}


def written(form: str, rank: int, host: str = "") -> tuple[str, str, Prefix]:
    """The first example of a form, as another rank writes it: prefix, text and writer."""
    line = next(iter(ROWS[form]["examples"]))
    match = re.match(ROWS[form]["pattern"], line)
    prefix, fields = match[0], {}
    for name in reversed(match.re.groupindex):
        number = rank if name in ("rank", "task", "pid") else rank % 8
        node = (form in OF_HOSTS and host) or re.sub(r"\d+$", str(rank // 8), match[name])
        fields[name] = node if name == "node" else number
        prefix = f"{prefix[: match.start(name)]}{fields[name]}{prefix[match.end(name) :]}"
    if "task" in fields:
        fields["rank"] = rank
    return prefix, line[match.end() :], Prefix(kinds=(form,), **fields)


RANK = st.integers(0, 4095)
TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\n\r"), max_size=30)
#: "labelled" is that of srun, before a rank.
ALONE = [form for form in CUT if form != "labelled"]


@pytest.mark.parametrize("form", ALONE)
@given(rank=RANK, host=HOST, more=TEXT)
def test_a_prefix_split_off_and_put_back_gives_the_line(form, rank, host, more):
    prefix, text, expected = written(form, rank, host)
    assert PrefixParser().split((prefix + text + more).encode()) == (expected, len(prefix))


@pytest.mark.parametrize("form", COUNTED)
@given(rank=st.integers(0, 15), more=TEXT)
def test_a_counted_form_counts_where_the_lines_agree(form, rank, more):
    prefix, text, expected = written(form, rank)
    file = [f"{written(form, at % 16)[0]}step {at} said".encode() for at in range(64)]
    line = (prefix + text + more).encode()
    learnt = PrefixParser.learn([*file, line])
    assert learnt.counted == {form}
    assert learnt.split(line) == (expected, len(prefix))
    assert PrefixParser.learn([b"said", b"more", line]).split(line) == (NO_PREFIX, 0)


@given(st.sampled_from(list(COUNTED)), st.sampled_from(ALONE), HOST)
def test_prefixes_stack(outer, inner, host):
    pairs = [(written(outer, at % 16)[0], *written(inner, at % 16, host)[:2]) for at in range(64)]
    lines = ["".join(pair).encode() for pair in pairs]
    who, start = PrefixParser.learn(lines).split(lines[5])
    assert who.kinds == (outer, inner)
    assert lines[5][start:].decode() == pairs[5][2]


def test_a_role_called_rank_states_the_rank_within_the_node():
    """As torchtitan starts torchrun: --role rank --tee 3."""
    lines = [b"[rank3]:[rank11]:[W] slow", b"[rank3]:[titan] step 1", b"[rank2]:[titan] step 1"]
    parser = PrefixParser.learn(lines)
    found = [parser.split(line)[0] for line in lines]
    assert [(prefix.local_rank, prefix.rank) for prefix in found] == [(3, 11), (3, None), (2, None)]
    frame = b'[rank3]:  File "a.py", line 3, in read'  # nothing but the indent stands before it
    assert frame[parser.split(frame)[1] :].startswith(b"  File")
    labelled = PrefixParser.learn([b"1: " + line for line in lines])
    who = labelled.split(b"1: [rank3]:Fatal Python error: Aborted")[0]
    assert (who.task, who.local_rank, who.rank) == (1, 3, None)
    megatron = b"[rank3]:  [2026-11-26 23:08:22] iteration       22/      30"
    assert megatron[parser.split(megatron)[1] :].startswith(b" [2026")
    of_first_node = PrefixParser.learn([b"[rank3]:[rank3]:[W] slow", *lines[1:]])
    assert of_first_node.split(lines[1])[0].rank == 3


PROSE = [
    [b"1: open the file", b"2: read it", b"3: close it", b"then go on", b"and so on"],
    [b"Epoch 1: loss 3", b"Epoch 2: loss 2", b"Epoch 3: loss 1"] * 5,
    [b"INFO: begin", b"WARNING: low", b"ERROR: none"] * 20,
    [b"[1] A paper", b"[2] A book", b"text", b"text", b"text", b"text"],
    [b"train.py:12: UserWarning: no", b"  warnings.warn("] * 10,
    [b"[train.py:12] begin", b"[train.py:40] end"] * 20,
    [b"12:30:01 begin", b"12:30:02 end"] * 20,
    [b"Rank 3: of the list"],
    [b"the message [Rank 3] stands too late"],
    [b"[Rank -1] nobody"],
    [b'{"message": "lost \\"rank\\": 3"}', b'{"local_rank": 3}', b'{"peer": {"rank": 3}}'],
    [b"step 7: waits for rank=31 state=sync"],
    [b"I1125 23:%02d:01.2 begin" % (at % 60) for at in range(90)],
    [b"gpt-2 step %d of 9" % at for at in range(30)],
    [b"pre-layer-1 norm %d" % at for at in range(30)]
    + [b"pre-layer-1 bias 3"] * 30
    + [b"pre-layer-1 scale 3"] * 30,
    [b""],
    [],
]


@pytest.mark.parametrize("lines", PROSE)
def test_prose_has_no_prefixes(lines):
    learnt = PrefixParser.learn(lines)
    assert learnt.counted == set()
    assert all(learnt.split(line) == (NO_PREFIX, 0) for line in lines)


STAMPED = {
    b"May  3 12:00:00 gpu-07 kernel: said": ({"node": "gpu-07"}, b"kernel: said"),
    b"2024-05-03T12:00:00.25Z stdout F [rank3]: said": ({"rank": 3}, b"said"),
    b"2024-05-03T12:00:00.25Z stderr F said": ({}, b"said"),
    b"2024-05-03T12:00:00.25Z [pod/w-1/c] said": ({"node": "w-1"}, b"said"),
    b"2024-05-03T12:00:00.25+00:00 gpu-07 kernel: said": ({"node": "gpu-07"}, b"kernel: said"),
    b"[1714737600.25] [gpu-07:25:0]   ucc said": ({"node": "gpu-07", "pid": 25}, b"ucc said"),
    b"[rank3]: 2024-05-03 12:00:00,25 said": ({"rank": 3}, b"2024-05-03 12:00:00,25 said"),
}


@pytest.mark.parametrize("line", list(STAMPED))
def test_a_time_may_stand_before_the_prefix(line):
    fields, text = STAMPED[line]
    prefixes = PrefixParser()
    who, start = prefixes.split(line)
    assert (who, line[start:]) == (Prefix(kinds=who.kinds, **fields), text)
    dated = NO_YEAR[0] + 123 * 86400 + 12 * 3600
    assert prefixes.time(line) == (dated if line.startswith(b"May") else 1714737600.25)
    assert (who is NO_PREFIX) == (not fields)


def test_memory_is_bounded(monkeypatch):
    monkeypatch.setattr("rmetric.diagnosis.reading.prefixes._REMEMBERED", 10)
    prefixes = PrefixParser()
    for pid in range(1000):
        assert prefixes.split(b"host1:%d:5 [0] NCCL INFO" % pid)[0].pid == pid
        assert len(prefixes._known) <= 11


@given(st.binary(max_size=200))
def test_any_line_can_be_split(line):
    line = line.replace(b"\n", b"")
    for prefixes in (PrefixParser(), PrefixParser(COUNTED)):
        who, start = prefixes.split(line)
        assert 0 <= start <= len(line)
        prefixes.time(line)
        assert who is prefixes.split(line)[0]
        assert prefixes.split(b"2024-05-03 12:00:00 INFO said")[0] is NO_PREFIX


def test_tasks_that_launch_ranks_are_no_ranks():
    tasks = [b"%d: [default%d]: said" % (at % 2, at % 4) for at in range(40)]
    who, start = PrefixParser.learn(tasks).split(b"1: [default3]: said")
    assert (who.task, who.local_rank, who.rank, start) == (1, 3, None, len(b"1: [default3]: "))
    command = [b"+ srun -l torchrun --nproc_per_node=8 train.py"] + [b"0: a", b"1: b"] * 20
    assert PrefixParser.learn(command).split(b"1: said")[0] == Prefix(kinds=("srun",), task=1)
    # The rank is known better inside.
    ranks = [b"%d: [rank%d]: said" % (at % 2, at % 8) for at in range(40)]
    assert PrefixParser.learn(ranks).split(b"1: [rank6]: x")[0].rank == 6
