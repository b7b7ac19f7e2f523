"""Oddities of logs: each costs itself at most, in replay, in watch and in calibrate."""

from __future__ import annotations

import contextlib
import cProfile
import importlib
import json
import time
from math import inf, nan

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rmetric import Record, RMetricConfig, Run
from rmetric._util.strict_json import parse_line
from rmetric.cli.main import main
from rmetric.diagnosis.decide import gathered
from rmetric.diagnosis.ingest import ingest
from rmetric.diagnosis.library import SignatureLibrary
from rmetric.logs import read_log as read_own
from rmetric.logs import run_lines, start_line
from rmetric.readers import LogError, open_log, read_log, step_forms
from rmetric.readers.assembler import Assembler
from rmetric.readers.source import Source
from rmetric.replay.follow import Follower
from tests.readers.test_formats import noted, only, read, write

#: As Python, C and C++ print them.
PRINTED = {
    "nan": nan, "-nan": nan, "NaN": nan, "NAN": nan, "nan(ind)": nan, "-nan(ind)": nan,
    "-nan(snan)": nan, "nan(0x8000000000000)": nan, "1.#QNAN": nan, "-1.#IND": nan,
    "1.#SNAN0": nan, "inf": inf, "+inf": inf, "-inf": -inf, "Infinity": inf, "-Infinity": -inf,
    "INF": inf, "1.#INF": inf, "-1.#INF00e+000": -inf, "1.#J": inf,
}  # fmt: skip
START = start_line({}, "run", RMetricConfig(), "FULL_METRIC").decode()
#: A line of each format with a step and a loss, and what stands before the lines.
FORMS = {
    "flat": ("", '{{"step": {0}, "loss": {1}}}\n'),
    "nested": ("", '{{"step": {0}, "train": {{"loss": {1}}}, "by_layer": [1.5, {1}]}}\n'),
    "own": (START, '{{"event": "METRICS", "step": {0}, "training_loss": {1}}}\n'),
    "mlperf": ("", ':::MLLOG {{"key": "train_loss", "value": {1}, "metadata": {{"step": {0}}}}}\n'),
    "fairseq": ("", 'train_inner | {{"epoch": 1, "loss": {1}, "num_updates": "{0}"}}\n'),
    "csv": ("step,loss,note\n", '{0},{1},"a, b"\n'),
    "nanogpt": ("", "iter {0}: loss {1}, time 20ms\n"),
    "text": ("", "step={0} loss={1}\n"),
}


def log_of(form: str, losses: list[object], first: int = 1) -> str:
    head, line = FORMS[form]
    return head + "".join(line.format(step, loss) for step, loss in enumerate(losses, first))


def followed(path) -> list[Record]:
    found: list[Record] = []
    Follower(path, lambda _, record: found.append(record), str, stop_after=0.0).run()
    return found


def losses_of(records) -> list[str]:
    return [repr(record.training_loss) for record in records]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("printed", PRINTED)
def test_nan_and_infinities_are_numbers_however_they_are_printed(tmp_path, form, printed):
    for losses in ([3.0, 2.5, 2.25, printed, 2.0], [3.0, 2.5, 2.25, printed]):
        path = write(tmp_path, "log", log_of(form, losses))
        numbers = [repr(PRINTED.get(loss, loss)) for loss in losses]
        assert losses_of(only(read_log(path).runs).records) == numbers
        assert losses_of(record for _, record in open_log(path)) == numbers


@pytest.mark.parametrize("printed", PRINTED)
def test_documents_with_nan_as_it_is_printed_are_read(tmp_path, printed):
    for text in (
        '{"log_history": [{"step": 1, "loss": 3.0}, {"step": 2, "loss": %s}]}',
        '{"train_loss": [3.0, %s]}',
        "[3.0, %s]",
        'seed,train_loss\n1,"[3.0, %s]"\n',
        "[[0, 3.0], [1, %s]]",
    ):
        run = only(read(tmp_path, text % printed))
        assert losses_of(run.records) == ["3.0", repr(PRINTED[printed])]


def test_words_in_strings_and_what_is_no_number_stay_what_they_are():
    assert parse_line(b'{"a": "nan, inf", "b\\"": [nan]}')['b"'] != [None]
    assert parse_line(b'{"a": "nan, \\"inf", "b": inf}') == {"a": 'nan, "inf', "b": inf}
    for line in (b'{"a": nano}', b'{"a": nan', b'{"a": nan.5}', b'{"a": 1.#}', b'{"a": "nan}'):
        with pytest.raises(ValueError, match="not JSON"):
            parse_line(line)


def healthy(form: str = "flat", last: int = 60, first: int = 1) -> str:
    return log_of(form, [round(3.0 - s / 100 + 0.01 * (s % 3), 3) for s in range(last)], first)


def test_an_error_of_a_reader_names_its_file_and_costs_no_other(tmp_path, capsys, monkeypatch):
    take = Assembler.take

    def take_or_fail(self, row):
        return {}["absent"] if row.cells.get("loss") == 6.5 else take(self, row)

    monkeypatch.setattr(Assembler, "take", take_or_fail)
    write(tmp_path, "a.jsonl", '{"step": 1, "train": {"loss": 2.0}, "loss": 6.5}\n')
    write(tmp_path, "b.jsonl", healthy("nested"))
    message = "a.jsonl: cannot be read: an error of the reader (KeyError: 'absent')"
    for command in ("replay", "calibrate"):
        code = main([command, str(tmp_path), "--out", str(tmp_path / f"{command}.d")])
        printed = capsys.readouterr()
        assert message in printed.err, command
        assert code == 1, command
    assert (tmp_path / "replay.d" / "b" / "summary.json").exists()
    assert (tmp_path / "calibrate.d").is_file()
    assert main(["watch", str(tmp_path / "a.jsonl"), "--stop-after", "0"]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("where", ["rmetric.reporting.replay_report.score_run",
                                   "rmetric.cli.calibrate.watch"])  # fmt: skip
def test_an_error_after_reading_names_its_file_and_costs_no_other(
    tmp_path, capsys, monkeypatch, where
):
    module, name = where.rsplit(".", 1)
    whole = getattr(importlib.import_module(module), name)

    def failing(run, *rest):
        return whole(run, *rest) if run.id != "a" else {}["absent"]

    monkeypatch.setattr(where, failing)
    for name in ("a.jsonl", "b.jsonl"):
        write(tmp_path, name, healthy())
    command = "replay" if "replay" in where else "calibrate"
    assert main([command, str(tmp_path), "--out", str(tmp_path / "out.d")]) == 1
    printed = capsys.readouterr()
    assert "a.jsonl: cannot be " in printed.err
    assert "KeyError" in printed.err
    assert "b.jsonl" not in printed.err


def left_out(tmp_path, capsys, form: str, at: int, bad: str) -> str:
    """Why watch leaves out a bad line, which costs neither the others nor the alarm."""
    head, line = FORMS[form]
    before, after = log_of(form, [2.0] * at), log_of(form, [2.0] * 40, at + 2).removeprefix(head)
    path = write(tmp_path, "run", before + bad + after + line.format(at + 42, 90.0) * 2)
    code = main(["watch", str(path), "--stop-after", "0", "--detector", "loss_ewma"])
    printed = capsys.readouterr()
    assert code == 0, printed.err
    assert f"ALARM run: step {at + 42}: " in printed.out
    number = at + 1 + head.count("\n")
    message = f"{path}: a line could not be read and was left out, line {number}: "
    assert message in printed.err
    return printed.err.partition(message)[2]


@pytest.mark.parametrize(
    ("form", "step", "loss"),
    [
        ("flat", 30, '"oops"'), ("flat", 30, "[" * 50_000), ("flat", 30, "[" * 900 + "]" * 900),
        ("flat", "300.5", 2.0), ("flat", "9" * 5000, 2.0), ("own", 30, "true"),
        ("own", "1e30", 2.0), ("csv", 30, "5 %"), ("csv", "9" * 25, 2.0),
        ("nanogpt", "9" * 25, 2.0),
    ],
)  # fmt: skip
@pytest.mark.parametrize("at", [0, 30])
def test_watch_leaves_out_a_bad_line_and_reports_it_at_once(tmp_path, capsys, form, step, loss, at):
    assert left_out(tmp_path, capsys, form, at, FORMS[form][1].format(step, loss))


@pytest.mark.parametrize("form", ["flat", "own", "csv", "nanogpt", "text"])
def test_watch_leaves_out_a_line_of_any_length_without_loading_it(
    tmp_path, capsys, monkeypatch, form
):
    monkeypatch.setitem(Source.__init__.__kwdefaults__, "longest_line", 1 << 19)
    why = left_out(tmp_path, capsys, form, 30, "x" * (1 << 20) + "\n")
    assert why.startswith("the line is longer than 524,288 bytes")


CRASH = [
    "Traceback (most recent call last):",
    '  File "train.py", line 7, in <module>, step, loss',
    "",
    "torch.OutOfMemoryError: CUDA out of memory, tried to allocate",
]
HEADS = {"flat": [], "csv": ["step,loss"], "own": [START.strip()]}


def entries(form: str, first: int, last: int) -> list[str]:
    if form == "own":
        records = [Record(step=step, training_loss=2.0) for step in range(1, last + 1)]
        lines = b"".join(run_lines(Run(id="run", records=records), RMetricConfig()))
        return lines.decode().splitlines()[first:]
    line = "{0},{1}" if form == "csv" else FORMS[form][1].strip()
    return [line.format(step, 2.0 + 0.01 * (step % 3)) for step in range(first, last + 1)]


@pytest.mark.parametrize("form", HEADS)
def test_a_crash_and_lines_in_one_another_cost_themselves_alone(tmp_path, form):
    broken = entries(form, 51, 51)[0][:12] + "\x1b[31m, " + entries(form, 61, 61)[0]
    written = [*HEADS[form], *entries(form, 1, 50), broken, *entries(form, 53, 60), *CRASH]
    run = only(read(tmp_path, "\n".join(written) + "\n"))
    assert [r.step for r in run.records] == [*range(1, 51), *range(53, 61)]
    first = len(HEADS[form]) + 51
    assert noted(run, f"4 lines could not be read and were left out, the first is line {first}: ")
    assert not any("\x1b" in note for note in run.notes)


@pytest.mark.parametrize("form", HEADS)
def test_a_log_whose_lines_are_mostly_bad_is_refused(tmp_path, form):
    half = [*HEADS[form], *entries(form, 1, 5), *["oh, no"] * 4, *entries(form, 6, 9)]
    assert len(only(read(tmp_path, "\n".join(half))).records) == 9
    more = [*HEADS[form], *entries(form, 1, 4), *["oh, no"] * 8, *entries(form, 5, 6)]
    with pytest.raises(LogError, match=r"8 of \d+ lines could not be read, half are allowed; the "):
        read(tmp_path, "\n".join(more))


def test_what_a_crash_prints_at_the_end_does_not_count_against_the_log(tmp_path):
    run = only(read(tmp_path, "\n".join([*entries("flat", 1, 5), *["  File x"] * 90, ""])))
    assert len(run.records) == 5
    assert noted(run, "90 lines could not be read and were left out, the first is line 6: ")


def test_the_study_s_own_reader_stays_strict(tmp_path):
    lines = [*HEADS["own"], *entries("own", 1, 3), "Traceback", *entries("own", 4, 4), ""]
    with pytest.raises(LogError, match="line 5: not JSON"):
        read_own(write(tmp_path, "run.jsonl", "\n".join(lines)))


def test_watch_says_at_the_end_how_many_lines_it_left_out(tmp_path, capsys):
    failing = [FORMS["flat"][1].strip().format(step, 9.0) for step in (61, 62)]
    lines = [*entries("flat", 1, 40), "loading", *entries("flat", 41, 60), *failing, *CRASH, ""]
    path = write(tmp_path, "run.jsonl", "\n".join(lines))
    assert main(["watch", str(path), "--stop-after", "0", "--detector", "loss_ewma"]) == 0
    found = capsys.readouterr()
    assert "ALARM run: step 61: " in found.out
    assert "run.jsonl: a line could not be read and was left out, line 41: " in found.err
    assert "run.jsonl: 4 lines could not be read and were left out, the first is" in found.err


STRAY = {
    "in a text": ('{0},{1},"a, b', True),
    "in a number": ('{0},"{1},a', False),
    "before a number": ('"{0},{1},a', False),
    "twice": ('{0},{1},"a"b"\n{0},"{1},a', False),
    "within a cell": ('{0},{1},5" disk', True),
}


@pytest.mark.parametrize("name", STRAY)
@pytest.mark.parametrize("at", [0, 20, 59, 60])
def test_a_stray_quote_costs_its_line_at_most(tmp_path, name, at):
    line, readable = STRAY[name]
    before, after = log_of("csv", [2.0] * at), log_of("csv", [2.0] * (60 - at), at + 2)
    after = after.removeprefix(FORMS["csv"][0])
    path = write(tmp_path, "log", before + line.format(at + 1, 2.5) + "\n" + after)
    if readable:
        assert [r.step for r in only(read_log(path).runs).records] == list(range(1, 62))
    else:
        where = at + 2 if "\n" not in line else at + 3
        with pytest.raises(LogError, match=f"line {where}: "):
            read_log(path)
    found = [record.step for record in followed(path)]
    assert found == [s for s in range(1, 62) if s != at + 1 or "\n" in line or readable]


def test_quoted_cells_of_several_lines_stay_whole(tmp_path):
    text = (
        'step,loss,note\n1,3.0,"one,\n2,two ""so""\n\nthree, 4,"\n2,2.5,"5, 6\n7"\n'
        '"3","2.25","a ""b"", c"\n4,2.0,"\n5,1.9,"",\n"\n5,1.75,\n'
    )
    assert [r.step for r in only(read(tmp_path, text)).records] == [1, 2, 3, 4, 5]
    lists = 'seed,train_loss\n1,"[3.0, 2.5,\n 2.0]"\n2,"[1, 2,\n3, 4]"\n'
    assert [len(run.records) for run in read(tmp_path, lists)] == [3, 4]


DEEP = "[" * 50_000
ODDITIES: dict[str, bytes] = {
    "nothing": b"",
    "blank lines": b"\n \n\t\n\xc2\xa0\n",
    "zero bytes": b"\0" * 5000 + b"\n",
    "zero bytes without an end": b"\0" * 300,
    "a mark of the byte order": b"\xef\xbb\xbf\n",
    "no UTF-8": b"\xff\xfe\x80 \xc3(\n",
    "control characters": b"\x1b[31m\x07\x1e\x1c\x85\x0c\x0b\n",
    "line ends": b"\r\r\n\n\r",
    "a crash": b'Traceback (most recent call last):\n  File "train.py"\nValueError: bad, "loss"\n',
    "a sign after a tab": b"loss 2.5\n\t= 3\n",
    "a sign after a no-break space": "loss 2.5\n\u00a0= 3\n".encode(),
    "braces": b"{\n}\n{{{{\n}}}}\n{]\n[\n",
    "an open brace": b'{"a":\n',
    "half a line": b'{"step": 31, "lo\n',
    "half a row": b"31\n",
    "quotes": b'"\n',
    "a quote in a row": b'"31,"2.0,"\n',
    "nested": f'{{"loss": {DEEP}\n{DEEP}\n'.encode(),
    "nested objects": b'{"a":' * 20_000 + b"\n",
    "a long line": b"x" * 300_000 + b"\n",
    "a long line of words": b"loss = " * 9_000 + b"\n",
    "signs": b"=::=,;|[]()<>-- /%#@\n" * 5,
    "other digits": "step ٣ loss ٣.٥ loss=²\n".encode(),
    "surrogates": b'{"a": "\\ud800", "\\udfff": 1}\n',
    "a huge number": b"9" * 5_000 + b"\n",
    "no object": b'null\n[]\n"a"\n1\n',
    "words with commas": b"one, two, three\nfour, five\n",
}  # fmt: skip
WRONG_CELLS = ("oops", "true", "[1]", "{", "#N/A", "5 %", '"1,234.5"', "1e", "--1", "0x1F", "٣x")


@st.composite
def odd_logs(draw):
    """Form, losses, place of the oddity, and what stands there."""
    form = draw(st.sampled_from(sorted(FORMS.keys() - {"mlperf", "fairseq"})))
    losses = [round(3.0 - s / 80 + 0.01 * (s % 3), 3) for s in range(80)]
    if draw(st.booleans()):
        onset = draw(st.integers(20, 78))
        losses[onset:] = [round(9.0 + s, 1) for s in range(80 - onset)]
    at = draw(st.integers(10, 79))  # the format is recognised before
    line = FORMS[form][1]
    odd = draw(
        st.sampled_from(sorted(ODDITIES.values()))
        | st.sampled_from(sorted(PRINTED)).map(lambda loss: line.format(at, loss).encode())
        | st.sampled_from(WRONG_CELLS).map(lambda loss: line.format(at, loss).encode())
        | st.sampled_from(WRONG_CELLS).map(lambda step: line.format(step, 2.0).encode())
        | st.binary(max_size=40).map(lambda data: data + b"\n")
    )
    return form, losses, at, odd


@settings(deadline=None, max_examples=150)
@given(odd_logs())
def test_losses_on_both_sides_of_an_oddity_arrive(tmp_path_factory, log):
    form, losses, at, odd = log
    head = FORMS[form][0]
    before = log_of(form, losses[:at])
    after = log_of(form, losses[at:], at + 1).removeprefix(head)
    path = write(tmp_path_factory.mktemp("odd"), "log", before.encode() + odd + after.encode())
    wanted = list(enumerate(losses, 1))
    found = [(r.step, r.training_loss) for r in followed(path)]
    assert [pair for pair in found if pair in wanted] == wanted
    try:
        runs = read_log(path).runs
    except LogError as error:  # a replay refuses a wrong value with its line
        lines = before.count("\n"), odd.count(b"\n") + odd.count(b"\r") + 1
        if error.line is None or not lines[0] < error.line <= sum(lines):
            raise
    else:
        found = [(r.step, r.training_loss) for run in runs for r in run.records]
        assert [pair for pair in found if pair in wanted] == wanted


def test_odd_logs_cost_no_other_and_end_no_command(tmp_path, capsys):
    folder = tmp_path / "logs"
    folder.mkdir()
    for n, odd in enumerate([*ODDITIES.values(), *map(str.encode, WRONG_CELLS)]):
        for form in ("flat", "csv", "text"):
            text = healthy(form, 30).encode()
            write(folder, f"{n}_{form}", text + odd + healthy(form, 30, 31).encode())
        write(folder, f"{n}_alone.jsonl", odd)
    write(folder, "z.jsonl", healthy())
    assert main(["replay", str(folder), "--plots", "none", "--out", str(tmp_path / "out")]) == 1
    assert (tmp_path / "out" / "z" / "summary.json").exists()
    assert "reader (" not in capsys.readouterr().err
    assert main(["calibrate", str(folder), "--out", str(tmp_path / "t.json")]) == 1
    assert (tmp_path / "t.json").exists()
    assert "cannot be used" not in capsys.readouterr().err


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", [1, 4096, 1 << 19])
@pytest.mark.parametrize("where", ["begin", "middle", "end", "line"])
def test_zero_bytes_are_left_out_and_counted_wherever_they_are(tmp_path, form, size, where):
    text, zeros = healthy(form).encode(), b"\0" * size
    lines = text.splitlines(keepends=True)
    data = {
        "begin": zeros + text,
        "middle": b"".join([*lines[:20], zeros, *lines[20:]]),
        "end": text + zeros,
        "line": b"".join([*lines[:20], zeros + b"\n", *lines[20:]]),
    }[where]
    path = write(tmp_path, "log", data)
    run = only(read_log(path).runs)
    assert run.records == only(read(tmp_path, text)).records
    assert noted(run, f"{size} zero bytes between the lines were left out")
    assert [record.step for record in followed(path)] == [record.step for record in run.records]


@pytest.mark.parametrize("form", ["flat", "nested", "own"])
@pytest.mark.parametrize("size", [1 << 16, 1 << 18, 3 << 20])
def test_the_first_of_json_lines_may_be_long(tmp_path, form, size):
    text = healthy(form)
    first = {"event": "EXPERIMENT_START"} if form == "own" else {"step": 0}
    long = json.dumps(first | {"config": {"x": "y" * size}}) + "\n"
    path = write(tmp_path, "log", long + text.removeprefix(START))
    assert only(read_log(path).runs).records == only(read(tmp_path, text)).records
    assert [record.step for record in followed(path)] == list(range(1, 61))


#: What a line is made of, again and again; behind each beginning.
UNITS = [
    "{", '{"a":', ":", "a ", "a.", "[", "]", "(", ")", "=", "a=", "1", "1.", "1,", "0 ", "1:", "-",
    "_", "/", "a/", "a", "'", '"', '"a": ', "|", " | ", "<", ">", "%", "#", "\t", " ", "\\", "x1",
    "A", "loss ", "loss=", "step 1 ", "rank", "error", "Error: ", "[rank0]: ", "12:00:01 ", ", ",
    "a-", "10.0.0.1 ", "a@b", "{}", "[]", "()", "1/1 [", "=[", "job id", "1e", "nan", "nan(", "1.#",
]  # fmt: skip
BEGINNINGS = {
    "diagnose": ("", "ERROR: ", "[rank3]: ", "step 1 loss ", "2024-05-03 12:00:01 "),
    "replay": (
        "", "step=1 loss=2.0 ", "step:5/10 loss:2.0 ", "Step 1 | loss:2.0 ", "iter 1: loss 2.0, ",
        " iteration 1/ 2 | lm loss: 2.0 | ", "| epoch 1:  1 / 2 loss=2.0, ",
        "{'loss': 1, 'epoch': 1, ", ':::MLLOG {"key": "loss", ', '{"step": 1, "loss": 2.0, ',
        "step,loss\n1,2.0,", "step 1 | loss: 2.0 | ", "step     loss\n1     2.0 ",
    ),
    "replay --map": ("", "ce=2.0 "),
}  # fmt: skip


@pytest.fixture(scope="module")
def library():
    return SignatureLibrary.shipped()


def seconds(path, command, library, line: str, number: int = 2) -> float:
    """Processor time of reading a log of a few such lines."""
    path.write_text("".join(f"{line}{end}\n" for end in "abcd"[:number]))
    began = time.process_time()
    if command == "diagnose":
        gathered(ingest([path], library, cores=1), library).diagnosis()
    else:
        with contextlib.suppress(LogError):
            read_log(path, {"loss": "ce"} if "map" in command else {})
    return time.process_time() - began


@pytest.mark.parametrize(
    ("command", "beginning"), [(c, b) for c, all in BEGINNINGS.items() for b in all]
)
def test_reading_takes_time_linear_in_the_length_of_a_line(tmp_path, library, command, beginning):
    def takes_too_long(unit: str) -> bool:
        lines = [beginning + (unit * size)[:size] for size in (1_500, 6_000)]
        # A quadratic pattern takes sixteen times as long, and here a fifth of a second.
        once, more = (seconds(tmp_path / "log", command, library, line) for line in lines)
        return more > max(0.1, 8 * once)

    # A busy machine may slow one turn; a slow pattern is slow in every one.
    slow = [unit for unit in UNITS if all(takes_too_long(unit) for _ in range(3))]
    assert not slow


@pytest.mark.parametrize("count", [18, 36, 2_000])
def test_numbers_before_a_bar_do_not_double_the_time(count):
    began = time.process_time()
    assert step_forms.match_step(f"{'1' * count} x 5/10 [00:01<00:01]") is None
    assert time.process_time() - began < 0.3


#: What each of many ranks logs at the end of its steps.
LAST_WORDS = {
    "watchdog": "[Rank {0}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=12, "
    "OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600010 milliseconds before timing out.",
    "error": "ERROR ValueError: bad shard {0}",
    "gpu": "kernel: NVRM: Xid (PCI:0000:3b:00): 79, pid={0}, GPU has fallen off the bus.",
    "memory": "RuntimeError: CUDA error: uncorrectable ECC error encountered",
    "connection": "[Rank {0}] NCCL WARN Call to recv from 10.0.0.{0}<2000> failed : Connection "
    "reset by peer",
    "planned end": "INFO Training completed\n2024-05-06 10:00:09 [Rank {0}] NCCL WARN Call to recv "
    "from 10.0.0.{0}<2000> failed : Connection reset by peer",
    "lost node": "Warning NodeNotReady pod/train-{0} Node is not ready",
}


class Counted(dict):
    """Counts the values that it hands out."""

    handed_out = 0

    def values(self):
        self.handed_out += len(self)
        return super().values()


@pytest.mark.parametrize("words", LAST_WORDS.values(), ids=LAST_WORDS)
@pytest.mark.parametrize("silent", [False, True], ids=["all step", "half step"])
def test_the_work_of_a_diagnosis_grows_with_the_ranks_and_not_with_their_square(
    tmp_path, library, words, silent
):
    calls = []
    for number in (100, 400):
        for rank in range(number):
            progress = [f"INFO step {at} loss 2.5" for at in range(0 if silent and rank % 2 else 5)]
            lines = enumerate([*progress, words.format(rank)])
            text = "".join(f"2024-05-06 10:00:0{at} {line}\n" for at, line in lines)
            write(tmp_path, f"rank_{rank}.log", text)
        job, profile = ingest([tmp_path], library), cProfile.Profile()
        job.matches, job.streams = Counted(job.matches), Counted(job.streams)
        weighed = profile.runcall(gathered, job, library)
        profile.runcall(weighed.diagnosis)
        handed_out = job.matches.handed_out + job.streams.handed_out
        calls.append(sum(entry.callcount for entry in profile.getstats()) + handed_out)
    assert calls[1] < 6 * calls[0]  # 16 times where each is compared with each


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"step": 61, "loss": 2, "x": ' + "9" * 5_000 + "}", "a number has thousands of digits"),
        ("[" * 50_000, "nested too deeply"),
        ('{"step": 61, "loss": }', "no JSON object"),
    ],
)
def test_a_line_that_is_left_out_states_its_own_reason(tmp_path, line, problem):
    run = only(read(tmp_path, healthy("flat") + line + "\n" + healthy("flat", 5, 62)))
    assert noted(run, f"line 61: {problem}")


@pytest.mark.parametrize(
    ("first", "problem"),
    [
        ("step,loss," + ",".join(f"k{n}" for n in range(60_000)) + "\n1,2\n", "without an end"),
        (healthy() + json.dumps({f"k{n}": 1 for n in range(100_001)}) + "\n",
         "line 61: 100,001 names that no line before has; the log may have 100,000"),
        ('[{"step": 1, "loss": 2}, ' + "1, " * 50_000 + "1]", "one document of more than"),
    ],
)  # fmt: skip
def test_a_log_beyond_a_bound_is_refused_with_the_bound(tmp_path, monkeypatch, first, problem):
    monkeypatch.setattr("rmetric.readers.source.LONGEST_DOCUMENT", 100_000)
    with pytest.raises(LogError, match=problem):
        read(tmp_path, first)
