"""W&B's own run file, written here block by block as its program writes it."""

from __future__ import annotations

import json
import zlib
from math import isnan

import pytest

from rmetric._util.errors import LogError
from rmetric.cli.main import main
from rmetric.readers import find_logs, read_log

BLOCK = 32768


def varint(number: int) -> bytes:
    low = bytearray()
    while number > 127:
        low.append(number & 127 | 128)
        number >>= 7
    return bytes([*low, number])


def field(number: int, data: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(data)) + data


def entry(values: dict, *, nested: bool) -> bytes:
    items = b""
    for name, value in values.items():
        names = name.split("/") if nested else [name]
        key = b"".join(field(2 if nested else 1, part.encode()) for part in names)
        items += field(1, key + field(16, json.dumps(value).encode()))
    step = field(2, varint(1 << 3) + varint(values["_step"]))
    return varint(1 << 3) + varint(values["_step"] + 1) + field(2, items + step)


def in_blocks(messages: list[bytes]) -> bytes:
    file = bytearray(b":W&B\xe1\xbe\x00")
    for message in messages:
        rest, first = message, True
        while rest or first:
            left = BLOCK - len(file) % BLOCK
            if left < 7:
                file += bytes(left)
                left = BLOCK
            part, rest = rest[: left - 7], rest[left - 7 :]
            kind = (1 if not rest else 2) if first else (4 if not rest else 3)
            check = zlib.crc32(bytes([kind]) + part)
            file += check.to_bytes(4, "little") + len(part).to_bytes(2, "little")
            file += bytes([kind]) + part
            first = False
    return bytes(file)


def run_file(count: int = 600, *, nested: bool = False, text: int = 150) -> bytes:
    settings = field(17, field(1, b"abc12345"))
    rows = [
        entry(
            {
                "_step": i,
                "train/loss": float("nan") if i == 7 else 5 - i / count,
                "train/global_step": 10 * i,
                "note": "x" * (70_000 if i == 300 else text),
            }
            | ({"eval/loss": 4.5} if i % 50 == 0 else {}),
            nested=nested,
        )
        for i in range(count)
    ]
    return in_blocks([settings, *rows])


@pytest.mark.parametrize("nested", [False, True])
def test_the_history_is_read_over_the_borders_of_blocks(tmp_path, nested):
    path = tmp_path / "run-abc12345.wandb"
    path.write_bytes(run_file(nested=nested))
    log = read_log(path)
    records = log.run.records
    assert (log.format, log.run.id) == ("W&B run file (.wandb)", "run-abc12345")
    assert [record.step for record in records] == list(range(0, 6000, 10))
    assert isnan(records[7].training_loss)
    assert records[599].training_loss == pytest.approx(5 - 599 / 600)
    assert sum(record.validation_loss == 4.5 for record in records) == 12
    assert not any("could not be read" in note for note in log.run.notes)


def test_a_damaged_block_and_a_cut_end_cost_their_records_alone(tmp_path):
    content = bytearray(run_file())
    content[BLOCK + 500] ^= 255
    path = tmp_path / "run.wandb"
    path.write_bytes(content[:-40])
    run = read_log(path).run
    assert 350 < len(run.records) < 600
    assert any("2 records of the file could not be read" in note for note in run.notes)


@pytest.mark.parametrize(
    "content",
    [b":W&B\xe1\xbe\x00", in_blocks([field(17, b"")]), b":W&B\xe1\xbe\x00" + b"\xff" * 99],
)
def test_a_file_without_a_history_says_in_one_line_what_to_do(tmp_path, capsys, content):
    folder = tmp_path / "wandb" / "offline-run-20261101_101010-abc12345"
    folder.mkdir(parents=True)
    path = folder / "run-abc12345.wandb"
    path.write_bytes(content)
    with pytest.raises(LogError, match="wandb sync"):
        read_log(path)
    assert main(["replay", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "wandb sync" in error
    assert error.count("\n") == 1


def test_in_a_folder_it_comes_after_a_history_and_before_what_was_printed(tmp_path):
    folder = tmp_path / "wandb" / "run-20261101_101010-abc12345"
    (folder / "files").mkdir(parents=True)
    own, printed = folder / "run-abc12345.wandb", folder / "files" / "output.log"
    printed.write_text("step 1 loss 2\n")
    own.write_bytes(b":W&B\xe1\xbe\x00")
    assert find_logs([tmp_path]) == [printed]
    own.write_bytes(run_file(30))
    assert find_logs([tmp_path]) == [own]
    (folder / "files" / "wandb-history.jsonl").write_text('{"_step": 1, "loss": 2}\n')
    assert find_logs([tmp_path]) == [folder / "files" / "wandb-history.jsonl"]


def test_the_link_to_the_latest_run_is_a_folder_of_a_run(tmp_path):
    folder = tmp_path / "run-20261101_101010-abc12345"
    folder.mkdir()
    (folder / "run-abc12345.wandb").write_bytes(run_file(30))
    (tmp_path / "latest-run").symlink_to(folder.name)
    assert find_logs([tmp_path]) == [folder / "run-abc12345.wandb"]
    latest = tmp_path / "latest-run"
    assert find_logs([latest]) == [latest / "run-abc12345.wandb"]
