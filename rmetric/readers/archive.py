"""Runs as small files: what was measured and how it went, nothing that follows from it.

A run is one line of JSON, a column a signal; a branch holds its records from its onset on, and
gets the earlier ones back from its control. An archive is a tar.xz of such files.
"""

from __future__ import annotations

import io
import lzma
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from rmetric._util.durable import write_atomically
from rmetric._util.errors import LogError
from rmetric._util.strict_json import decode_number, encode, encode_line, parse_line
from rmetric.log_entries import truth_from_json, truth_to_json
from rmetric.records import Record, Run

SUFFIX = ".json"


def run_to_line(run: Run) -> bytes:
    """A run as it is stored; of a branch only what differs from its control."""
    begin = _branch_step(run.config) or 1
    records = [record for record in run.records if record.step >= begin]
    assert run.truth is not None
    stored = {"id": run.id, "config": encode(run.config), "truth": truth_to_json(run.truth)}
    return encode_line(stored | {"columns": _columns(records)})


def run_from_line(line: bytes, control: Run | None = None) -> Run:
    """The whole run in one line; `control` is needed for a branch."""
    stored = parse_line(line)
    run = Run(id=stored["id"], records=_records(stored["columns"]), config=stored["config"])
    run.truth = truth_from_json(stored["truth"])
    begin = _branch_step(run.config)
    if begin is not None:
        if control is None:
            raise ValueError(f"run {run.id}: its control {run.config['branch_of']} is not there")
        run.records = [replace(record) for record in control.records[: begin - 1]] + run.records
    return run


def _branch_step(config: dict[str, Any]) -> int | None:
    return config["fault_injection"]["trigger_step"] if config.get("branch_of") else None


def _columns(records: list[Record]) -> dict[str, Any]:
    """Field -> its values, None where not logged; fields never logged are left out.

    A field of a few records only is a list of [index, value].
    """
    columns: dict[str, Any] = {}
    for entry in fields(Record):
        values = [getattr(record, entry.name) for record in records]
        logged = [[i, encode(v)] for i, v in enumerate(values) if v is not None]
        if len(logged) == len(records):
            columns[entry.name] = [value for _, value in logged]
        elif logged:
            columns[entry.name] = {"sparse": logged}
    return columns


def _records(columns: dict[str, Any]) -> list[Record]:
    records = [Record(step=step) for step in columns["step"]]
    for name, column in columns.items():
        cells = column["sparse"] if isinstance(column, dict) else enumerate(column)
        for index, value in cells:
            setattr(records[index], name, _value(name, value))
    return records


def _value(name: str, value: Any) -> Any:
    if name in ("planned_events", "actions"):
        return tuple(value)
    if isinstance(value, list):
        return tuple(decode_number(entry) for entry in value)
    if isinstance(value, dict):
        return {key: decode_number(entry) for key, entry in value.items()}
    return value if isinstance(value, int) else decode_number(value)


def write_archive(path: Path, lines: Iterable[tuple[str, bytes]]) -> None:
    """A tar.xz of (run id, line), a control before its branches, without times or owners."""
    tar_bytes = io.BytesIO()
    with tarfile.open(fileobj=tar_bytes, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for run_id, line in lines:
            member = tarfile.TarInfo(run_id + SUFFIX)
            member.size = len(line)
            tar.addfile(member, io.BytesIO(line))
    packed = lzma.compress(tar_bytes.getvalue(), preset=9 | lzma.PRESET_EXTREME)
    write_atomically(path, [packed])


def read_lines(path: Path) -> Iterator[tuple[str, bytes]]:
    """(run id, line) of each run of an archive. Raises LogError for another file."""
    try:
        whole = lzma.decompress(path.read_bytes())  # checks the whole file's checksums
        with tarfile.open(fileobj=io.BytesIO(whole)) as tar:
            for member in tar:
                if (file := tar.extractfile(member)) is not None:
                    yield member.name.removesuffix(SUFFIX), file.read()
    except (tarfile.TarError, lzma.LZMAError) as error:
        raise LogError(path, None, f"not a whole archive of runs (tar.xz): {error}") from None


def read_runs(path: Path | str) -> Iterator[Run]:
    """The whole runs of an archive: each control, then its branches with their prefix.

    `config["branch_of"]` names a branch's control, `truth.onset_step` where it left it.
    """
    path = Path(path)
    control: Run | None = None
    for run_id, line in read_lines(path):
        try:
            run = run_from_line(line, control)
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise LogError(path, None, f"{run_id}: {error}") from None
        run.source = path
        if run.config.get("branch_of") is None:
            control = run
        elif control is None or control.id != run.config["branch_of"]:
            raise LogError(path, None, f"{run_id}: its control is not before it")
        yield run
