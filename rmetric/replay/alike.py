"""JSON lines that are alike, decoded many at a time, straight into what a record needs.

A training log says the same keys line after line. msgspec then reads a block of
lines into structs of the few numbers that are wanted, at about the cost that
orjson has for making dictionaries. Three ways, the first that holds is taken:

1. Every line that has a training loss has as many keys as the file's first lines
   have, so that no new column can hide among them: only what is wanted is decoded.
2. Lines differ, and every key is a known one: all of them are decoded.
3. Something is new, of another type, nan, or no JSON: line by line, elsewhere.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from rmetric.records import Record
from rmetric.replay.assembler import RunState
from rmetric.replay.columns import TARGETS, Columns

_KEY = b'":'
#: What msgspec does not take in the name of a field.
_NOT_IN_NAMES = re.compile(r'["\\\x00-\x1f]')
_FAR = 2**63
_EXAMPLES = 100

OneByOne = Callable[[int, bytes], Iterable[tuple[str, Record]]]


class Decoders:
    """How the lines of one log are decoded while its columns stay what they are.

    Args:
        columns: which to read as what.
        entries: objects from the log's beginning.
        names: of all keys met so far; those of the `entries` where left out.

    Attributes:
        usable: whether the log is of the plain kind that this is for: one run,
            nothing nested, a step and a training loss.
    """

    def __init__(
        self,
        columns: Columns,
        entries: Sequence[Mapping[str, Any]],
        names: Iterable[str] | None = None,
    ) -> None:
        self.examples = list(entries[:_EXAMPLES])
        known = list(names if names is not None else dict.fromkeys(n for e in entries for n in e))
        chosen = {str(TARGETS[t].field): c for t, c in columns.by_target.items() if t != "run"}
        self.usable = (
            "run" not in columns.by_target
            and not columns.other_steps
            and {"step", "training_loss"} <= chosen.keys()
            and set(chosen.values()) <= set(known)
            and len(set(chosen.values())) == len(chosen)
            and not any(_NOT_IN_NAMES.search(name) for name in known)
            and not any(isinstance(value, dict) for e in self.examples for value in e.values())
        )
        if not self.usable:
            return
        loss = chosen["training_loss"]
        sizes = Counter(_num_keys(e) for e in self.examples if e.get(loss) is not None)
        self._num_keys = sizes.most_common(1)[0][0] if sizes else 0
        self._lean = _decoder(chosen, None)
        self._strict = _decoder(chosen, [n for n in known if n not in chosen.values()])

    def records(
        self, number: int, chunk: bytes, state: RunState, one_by_one: OneByOne
    ) -> Iterator[tuple[str, Record]]:
        """The records of a block of lines, `number` the first; what differs goes `one_by_one`."""
        structs = self._alike(chunk)
        if structs is not None:
            yield from _records(number, chunk, structs, state, one_by_one)
            return
        decode = self._strict.decode
        for at, line in enumerate(chunk.split(b"\n"), start=number):
            try:
                structs = [decode(line)]
            except (msgspec.MsgspecError, UnicodeDecodeError):
                yield from one_by_one(at, line)
            else:
                yield from _records(at, line, structs, state, one_by_one)

    def _alike(self, chunk: bytes) -> list[Any] | None:
        """The lines as structs; None where they must be looked at one by one."""
        try:
            structs = self._lean.decode_lines(chunk)
            if self._holds_nothing_new(chunk, structs):
                return structs
            return self._strict.decode_lines(chunk)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return None

    def _holds_nothing_new(self, chunk: bytes, structs: list[Any]) -> bool:
        num_keys = chunk.count(_KEY)
        if num_keys == len(structs) * self._num_keys:
            odd = []
        else:
            odd = [i for i, s in enumerate(structs) if s.training_loss is None]
            if len(odd) * 4 > len(structs):
                return False
            lines = [line for line in chunk.split(b"\n") if line.strip()]
            num_keys -= sum(lines[i].count(_KEY) for i in odd)
        last = chunk.rstrip().rpartition(b"\n")[2]
        return num_keys == (len(structs) - len(odd)) * self._num_keys and self._is_known(last)

    def _is_known(self, line: bytes) -> bool:
        """Whether the line has no key that is new: one that replaced another is in the last."""
        try:
            self._strict.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return False
        return True


def _records(
    number: int, chunk: bytes, structs: list[Any], state: RunState, one_by_one: OneByOne
) -> Iterator[tuple[str, Record]]:
    """`structs` as records; those that are not simply the next step go `one_by_one`."""
    lines: list[tuple[int, bytes]] = []
    pending, last, id = state.pending, state.last, state.run.id
    if state.early is None:
        last = _FAR
    quick = 0
    for i, s in enumerate(structs):
        step, loss = s.step, s.training_loss
        if last is not None and last < step < _FAR and loss is not None:
            if pending is not None:
                yield id, pending
            skipped = s.skipped
            last = step
            quick += 1
            pending = Record(
                step,
                s.time,
                loss,
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
                None if skipped is None else skipped != 0,
            )
            continue
        if not lines:
            split = enumerate(chunk.split(b"\n"), start=number)
            lines = [(at, line) for at, line in split if line.strip()]
        state.pending = pending
        if last != _FAR:
            state.last = last
        yield from one_by_one(*lines[i])
        pending, id = state.pending, state.run.id
        last = _FAR if state.early is None else state.last
    state.pending = pending
    if last != _FAR:
        state.last = last
    state.rows += quick


def _decoder(chosen: Mapping[str, str], others: Sequence[str] | None) -> msgspec.json.Decoder[Any]:
    """Of lines with the `chosen` columns (field -> key).

    Without `others`, keys that are not chosen are passed over; with them, a key
    that is in neither is an error, and so is a nested object, which holds keys.
    """
    optional = {t.field for t in TARGETS.values()} - {None, "step"}
    fields: list[Any] = [("step", int)]
    # A field that the log has no key for gets one that no log has.
    keys = {"step": chosen["step"]}
    for name in sorted(str(name) for name in optional):
        kind: Any = bool | int | None if name == "skipped" else float | None
        fields.append((name, kind, None))
        keys[name] = chosen.get(name, f"(no column) {name}")
    for i, other in enumerate(others or []):
        fields.append((f"other{i}", None | bool | int | float | str | list, None))
        keys[f"other{i}"] = other
    struct = msgspec.defstruct(
        "Line", fields, rename=keys, forbid_unknown_fields=others is not None, gc=False
    )
    return msgspec.json.Decoder(struct)


def _num_keys(entry: Mapping[str, Any]) -> int:
    """How often `_KEY` stands in the line: a text may hold it too."""
    return msgspec.json.encode(entry).count(_KEY)
