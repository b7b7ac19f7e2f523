"""Fast path for JSON lines with equal keys: msgspec decodes a block of lines at a time.

A training log says the same keys line after line. msgspec then reads a block of
lines into structs of the few numbers that are wanted, at about the cost that
orjson has for making dictionaries. Three ways, the first that holds is taken:

1. The lines have as many keys as the file's first lines lead to expect (by the colons),
   those without a training loss apart, so that no new column hides in them: only what
   is wanted is decoded.
2. Lines differ, and every key is a known one: all of them are decoded.
3. Something is new, of another type, nan, or no JSON: line by line, elsewhere.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import islice
from operator import lt
from typing import Any

import msgspec
import numpy as np

from rmetric.log_entries import NOT_DECODED, WholeNumber
from rmetric.readers.assembler import Batches, RunState
from rmetric.readers.columns import MEMORY, POLICY, STATED, TARGETS, WITH_UNIT, Columns
from rmetric.readers.thinning import PASSED_OVER, Thinning
from rmetric.records import Record

_OTHERS = {*STATED, *POLICY, *MEMORY, *WITH_UNIT}
_FIELDS = [str(t.field) for name, t in TARGETS.items() if t.field and name not in _OTHERS]
_MEASURED = [field for field in _FIELDS if field != "step"]
#: What msgspec does not take in the name of a field.
_NOT_IN_NAMES = re.compile(r'["\\\x00-\x1f\ud800-\udfff]')
_EXAMPLES = 1000

OneByOne = Callable[[int, list[bytes]], Batches]


class Decoders:
    """Decoders of one log, valid while its columns do not change.

    Args:
        columns: which to read as what.
        entries: objects from the log's beginning.
        names: of all keys met so far; those of the `entries` where left out.

    Attributes:
        usable: whether the log is of the plain kind that this is for: one run,
            nothing nested, a step and a training loss, and nothing of the metric stated.
    """

    def __init__(
        self,
        columns: Columns,
        entries: Sequence[Mapping[str, Any]],
        names: Iterable[str] | None = None,
    ) -> None:
        self.examples = _examples(entries, columns.by_target.get("loss"))
        known = list(names if names is not None else names_in(self.examples))
        chosen = {str(TARGETS[t].field): c for t, c in columns.by_target.items() if t != "run"}
        self.usable = (
            "run" not in columns.by_target
            and not _OTHERS & columns.by_target.keys()
            and not columns.other_steps
            and {"step", "training_loss"} <= chosen.keys()
            and set(chosen.values()) <= set(known)
            and len(set(chosen.values())) == len(chosen)
            and not any(_NOT_IN_NAMES.search(name) for name in known)
            and not any(dict in map(type, e.values()) for e in self.examples)
        )
        if not self.usable:
            return
        loss = chosen["training_loss"]
        self._with_loss = next((e for e in self.examples if e.get(loss) is not None), {})
        self._size = _usual_size(e for e in self.examples if e.get(loss) is not None)
        self._size_of_odd = _usual_size(e for e in self.examples if e.get(loss) is None)
        self._lean = _decoder(chosen, known, only=True)
        self._strict = _decoder(chosen, known, only=False)

    def read(self, number: int, chunk: bytes, state: RunState, one_by_one: OneByOne) -> Batches:
        """The records of a block of lines, `number` the first; what differs goes one by one."""
        state.losses.with_loss = state.losses.with_loss or self._with_loss
        alike = self._alike(chunk)
        if alike is not None:
            yield from _taken(*alike, state, _Slowly(number, chunk, one_by_one))
            return
        decode = self._strict.decode
        for at, line in enumerate(chunk.split(b"\n"), start=number):
            try:
                structs = [decode(line)]
            except NOT_DECODED:
                yield from one_by_one(at, [line])
            else:
                yield from _taken(structs, _odd(structs), state, _Slowly(at, line, one_by_one))

    def _alike(self, chunk: bytes) -> tuple[list[Any], list[int]] | None:
        """The lines as structs, and which hold no training loss; None where all go one by one."""
        try:
            structs = self._lean.decode_lines(chunk)
            odd = _odd(structs)
            expected = (len(structs) - len(odd)) * self._size + len(odd) * self._size_of_odd
            if _size(chunk) != expected:
                structs = self._strict.decode_lines(chunk)
            else:  # A new key in place of a known one shows in the last line.
                self._strict.decode(chunk[chunk.rfind(b"\n", 0, len(chunk) - 1) + 1 :])
        except NOT_DECODED:
            return None
        return structs, odd


def _examples(entries: Sequence[Mapping[str, Any]], loss: str | None) -> list[Mapping[str, Any]]:
    """The first objects, and the first of those without a training loss, which may come late."""
    late = (e for e in islice(entries, _EXAMPLES, None) if loss is None or e.get(loss) is None)
    return [*entries[:_EXAMPLES], *islice(late, _EXAMPLES)]


def _odd(structs: list[Any]) -> list[int]:
    return [i for i, s in enumerate(structs) if s.training_loss is None]


class _Slowly:
    """The lines of a chunk that are not blank, to be read one by one."""

    def __init__(self, number: int, chunk: bytes, one_by_one: OneByOne) -> None:
        self._number, self._chunk, self._one_by_one = number, chunk, one_by_one

    @cached_property
    def _lines(self) -> list[tuple[int, bytes]]:
        lines = enumerate(self._chunk.split(b"\n"), start=self._number)
        return [(at, line) for at, line in lines if line.strip()]

    def read(self, index: int) -> Batches:
        at, line = self._lines[index]
        return self._one_by_one(at, [line])


def _taken(structs: list[Any], odd: list[int], state: RunState, slowly: _Slowly) -> Batches:
    """`structs` as records: many at a time where each is simply the next step."""
    breaks: Sequence[int] = odd
    steps = [s.step for s in structs]
    for i in reversed(odd):
        del steps[i]
    if not all(map(lt, steps, islice(steps, 1, None))):
        breaks = range(len(structs))
    begin = 0
    for stop in (*breaks, len(structs)):
        while begin < stop and (state.early is None or structs[begin].step <= (state.last or 0)):
            yield from _one(structs[begin], state)
            begin += 1
        if begin < stop:
            yield state.run.id, _next_steps(structs[begin:stop], state)
        if stop < len(structs):
            if structs[stop].training_loss is None and state.losses.are_due:
                yield from slowly.read(stop)
            else:
                yield from _one(structs[stop], state)
        begin = stop + 1


def _one(struct: Any, state: RunState) -> Batches:
    state.losses.update(logged=struct.training_loss is not None)
    values = {name: getattr(struct, name) for name in _MEASURED}
    complete = state.measured(
        struct.step, {name: value for name, value in values.items() if value is not None}
    )
    if complete is not None:
        yield complete


def _next_steps(structs: list[Any], state: RunState) -> list[Record]:
    """The records of lines that each are a step above the one before; the last is held back."""
    if state.thinning is None:
        records = _built(structs)
    else:
        records = _built_where_wanted(structs, state, state.thinning)
    if state.pending is not None:
        records.insert(0, state.pending)
    state.pending = records.pop()
    state.last = state.pending.step
    state.rows += len(structs)
    state.leave_out_held()
    state.losses.update(logged=True)
    return records


def _built_where_wanted(structs: list[Any], state: RunState, thinning: Thinning) -> list[Record]:
    """The records, `PASSED_OVER` in place of the ordinary ones that are not kept."""
    skip = int(state.pending is not None)
    wanted = {i for i, s in enumerate(structs) if s.validation_loss is not None or s.skipped}
    wanted.update(thinning.wanted(state.run.id, skip, len(structs)))
    wanted.add(len(structs) - 1)
    places = sorted(wanted)
    records = [PASSED_OVER] * len(structs)
    for place, record in zip(places, _built([structs[i] for i in places]), strict=True):
        records[place] = record
    return records


def _built(structs: list[Any]) -> list[Record]:
    return [
        Record(
            s.step,
            s.time,
            s.training_loss,
            s.validation_loss,
            s.gradient_norm,
            None,
            s.learning_rate,
            s.update_norm,
            s.parameter_norm,
            None,
            None,
            None,
            None,
            None,
            None,
            None,
            None,
            s.loss_scale,
            s.skipped,
        )
        for s in structs
    ]


def _decoder(
    chosen: Mapping[str, str], known: Sequence[str], *, only: bool
) -> msgspec.json.Decoder[Any]:
    """Of lines with the `chosen` columns (field -> key) among the `known` keys.

    Where `only` they are wanted, other keys are passed over. Else a key that is not
    known is an error, and so is a nested object, which holds keys.
    """
    # In the order of the lines: the decoder looks for the next key first.
    by_key = {key: name for name, key in chosen.items()}
    keys = {by_key.get(key, f"other{i}"): key for i, key in enumerate(known)}
    if only:
        keys = {name: key for name, key in keys.items() if name in chosen}
    # A field that the log has no key for gets one that no log has.
    keys |= {name: f"(no column) {name}" for name in _FIELDS if name not in keys}
    kinds = {name: _kind(name) for name in keys}
    fields = [(n, kind) if n == "step" else (n, kind, None) for n, kind in kinds.items()]
    struct = msgspec.defstruct(
        "Line", fields, rename=keys, forbid_unknown_fields=not only, gc=False, kw_only=True
    )
    return msgspec.json.Decoder(struct)


def _kind(name: str) -> Any:
    if name == "step":
        return WholeNumber
    if name == "skipped":
        return bool | None
    return None | bool | int | float | str | list if name.startswith("other") else float | None


def names_in(entries: Iterable[Mapping[str, Any]]) -> dict[str, None]:
    """Every key of the objects, in the order in which they first come."""
    names: dict[str, None] = {}
    for entry in entries:
        if not entry.keys() <= names.keys():
            names |= dict.fromkeys(entry)
    return names


def _size(lines: bytes) -> int:
    """Number of colons of a line: one a key, and those inside of texts."""
    return int(np.count_nonzero(np.frombuffer(lines, np.uint8) == ord(":")))


def _usual_size(entries: Iterable[Mapping[str, Any]]) -> int:
    sizes = Counter(_size(msgspec.json.encode(entry)) for entry in entries)
    return sizes.most_common(1)[0][0] if sizes else 0
