"""Prefixes of launchers, learnt for a file."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmetric.diagnosis.reading.prefixes import COUNTED as COUNTED_FORMS
from rmetric.diagnosis.reading.prefixes import CUT, NO_PREFIX, Prefix, PrefixParser
from rmetric.diagnosis.reading.timestamps import NO_YEAR

#: Every form, as its launcher writes it for a rank: its template, and the fields it states.
RANK = st.integers(0, 4095)
HOST = st.sampled_from(["node-07", "gpu041", "r6i4n5", "10.0.0.2", "ip-10-0-0-1.ec2.internal"])
WRITTEN = {
    "torch": ("[rank{rank}]: ", "rank"),
    "torchrun": ("[default{local_rank}]:", "local_rank"),
    "mpirun": ("[1,{rank}]<stderr>:", "rank"),
    "sagemaker": ("[1,mpirank:{rank},algo-{local_rank}]<stderr>:", "rank node"),
    "loki": ('{{app="fit", pod="{node}", stream="stderr"}} ', "node"),
    "ray": ("(RayTrainWorker pid={pid}, ip={node}) ", "pid node"),
    "kubectl": ("[pod/job-{node}/pytorch] ", "node"),
    "nccl": ("{node}:{pid}:22055 [{local_rank}] ", "node pid device"),
    "ucx": ("[{node}:{pid}:0]  ", "node pid"),
    "grep": ("logs/worker_{rank}.log-11454-", ""),
    "open_mpi": ("[{node}:{pid}] ", "node pid"),
}
COUNTED = {
    "srun": ("{rank:4d}: ", "rank task"),
    "bracket": ("[{rank}]: ", "rank"),
    "word": ("Rank {rank}: ", "rank"),
    "stern": ("fit-worker-{rank} main ", "node"),
    "node_rank": ("[{node}:{local_rank}] ", "node local_rank"),
    "host": ("{node}: ", "node"),
    "pals": ("{node} {rank}: ", "node rank"),
}


def written(form: str, rank: int, host: str = "") -> tuple[str, Prefix]:
    """The prefix of a form, and who says so."""
    node = "10.0.0.9" if form == "ray" else host or f"gpu{rank // 8:03d}"
    fields = dict(rank=rank, task=rank, local_rank=rank % 8, pid=rank, node=node)
    fields["device"] = rank % 8
    if form == "sagemaker":
        fields["node"] = f"algo-{rank % 8}"
    if form == "stern":
        fields["node"] = f"fit-worker-{rank}"
    template, names = {**WRITTEN, **COUNTED}[form]
    if form == "kubectl":
        fields["node"], template = f"job-{node}", template.replace("job-", "")
    who = Prefix(kinds=(form,), **{name: fields[name] for name in names.split()})
    return template.format(**fields), who


#: How a text begins: two of the forms need the beginning of their library.
OPENINGS = {"nccl": "NCCL INFO ", "open_mpi": "*** "}
TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\n\r"), max_size=30).map(
    lambda text: "said " + text
)


def test_every_form_is_tried_here():
    # "labelled" is that of srun, before a rank.
    assert {"labelled", *WRITTEN, *COUNTED} == {*CUT, *COUNTED_FORMS}


@pytest.mark.parametrize("form", list(WRITTEN))
@given(rank=RANK, host=HOST, text=TEXT)
def test_a_prefix_split_off_and_put_back_gives_the_line(form, rank, host, text):
    prefix, expected = written(form, rank, host)
    text = OPENINGS.get(form, "") + text
    who, start = PrefixParser().split((prefix + text).encode())
    assert who == expected
    assert start == len(prefix)


@pytest.mark.parametrize("form", list(COUNTED))
@given(rank=st.integers(0, 15), text=TEXT)
def test_a_counted_form_counts_where_the_lines_agree(form, rank, text):
    prefix, expected = written(form, rank)
    file = [f"{written(form, at % 16)[0]}step {at} said".encode() for at in range(64)]
    line = (prefix + text).encode()
    learnt = PrefixParser.learn([*file, line])
    assert learnt.counted == {form}
    assert learnt.split(line) == (expected, len(prefix))
    assert PrefixParser.learn([b"said", b"more", line]).split(line) == (NO_PREFIX, 0)


@given(st.sampled_from(list(COUNTED)), st.sampled_from(list(WRITTEN)), HOST)
def test_prefixes_stack(outer, inner, host):
    text = OPENINGS.get(inner, "") + "said"
    lines = [
        f"{written(outer, at % 16)[0]}{written(inner, at % 16, host)[0]}{text}".encode()
        for at in range(64)
    ]
    learnt = PrefixParser.learn(lines)
    who, start = learnt.split(lines[5])
    assert who.kinds == (outer, inner)
    assert lines[5][start:] == text.encode()


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


LEFT_IN = {
    b"[E ProcessGroupNCCL.cpp:828] [Rank 3] Watchdog caught": {"rank": 3},
    b"[2024-07-03 19:15:16,379] [INFO] [logging.py:60:log_dist] [Rank 0] step": {"rank": 0},
    b"2024-05-03 12:00:01,123 INFO [rank: 7] Seed set": {"rank": 7},
    b"[rank2]:[E1012 12:00:01.1 Process.cpp:616] [PG ID 0 PG GUID 0 Rank 2] Timeout": {"rank": 2},
    b"[rank29]:[E118 22:31:01.6 Process.cpp:15] [PG ID 9 PG GUID 177(TENSOR) Rank 1] x": {
        "rank": 29
    },
    b"[INFO] HCCL(69395,python3):2024-04-07-18:35:53.134.675 [op_base.cc:314]": {"pid": 69395},
    b"the message [Rank 3] stands too late": {},
    b"[Rank -1] nobody": {},
}


@pytest.mark.parametrize("line", list(LEFT_IN))
def test_who_says_it_behind_time_and_level(line):
    who, start = PrefixParser().split(line)
    assert who == Prefix(kinds=who.kinds, **LEFT_IN[line])
    assert start == (line.index(b":") + 1 if line.startswith(b"[rank") else 0)


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
    for prefixes in (PrefixParser(), PrefixParser(COUNTED_FORMS)):
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
