"""Map the columns of a foreign log to step, loss, gradient norm and other targets.

`names` has the table of names and meanings. Notes list what was taken, what could have been, and
the columns that were not used.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import lru_cache

from rmetric.readers.names import TARGETS, is_part_of_loss, loss_part, meaning, plain_name

#: Beside the step column: read where that is blank (an evaluation's own counter).
_EVALUATION_STEPS = ("val_step", "eval_step", "validation_step")
_LOSSES = ("loss", "eval_loss")
#: Values that another program computed: λ, σ², ΔL, n of each, and R.
STATED = (
    "sigma_sq", "delta_l", "lambda", "r_metric", "sigma_sq_norm", "delta_l_norm", "lambda_norm",
)  # fmt: skip
#: What reinforcement learning logs, see `Record.policy`.
POLICY = (
    "reward", "reward_spread", "kl", "answer_kl", "entropy", "response_length", "clip_fraction",
    "equal_rewards", "preference_accuracy",
)  # fmt: skip
#: See `Record.memory`; and the targets whose columns' names state a unit.
MEMORY = ("device_memory", "host_memory", "device_memory_percent", "host_memory_percent")
WITH_UNIT = ("device_memory", "host_memory", "data_wait", "time_beside_wait", "step_time")
#: Speed of the training: a cell without a number is not an error.
SPEED = ("step_time", "steps_per_second", "tokens_per_second", "samples_per_second")


@dataclass(kw_only=True)
class Columns:
    """The columns taken from one log.

    Attributes:
        by_target: target -> column.
        other_steps: columns read where the step is blank.
        notes: what was guessed, in sentences.
        parts: column of one of several losses -> its name, where no whole is logged.
        by_meaning: targets whose column is on no list of names, or a step that is an epoch. Such a
            column is given up where a cell of it holds no number, or a fraction of a step.
        of_header: each row has all columns, so a cell that is absent is blank.
        changed: other columns were chosen since the `Assembler` looked.
    """

    by_target: dict[str, str]
    other_steps: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    parts: dict[str, str] = field(default_factory=dict)
    by_meaning: set[str] = field(default_factory=set)
    of_header: bool = False
    changed: bool = True

    @property
    def has_loss(self) -> bool:
        return any(target in self.by_target for target in _LOSSES)

    @property
    def has_statement(self) -> bool:
        """True if R, σ² or ΔL is stated: a run without a loss can be replayed from these."""
        return any(target in self.by_target for target in STATED)

    @property
    def is_judged(self) -> bool:
        """True with a loss, or with a reward: reinforcement learning may log no loss."""
        return self.has_loss or "reward" in self.by_target


def named_by_target() -> Columns:
    """For rows whose cells stand under the names of `TARGETS` already."""
    return Columns(by_target={target: target for target in TARGETS})


@lru_cache(maxsize=256)
def columns_among(names: tuple[str, ...], targets: tuple[str, ...]) -> dict[str, str]:
    """Targets, such as `POLICY` -> the one of `names` that is called so, for those that are."""
    found = {target: _found(target, names)[0] for target in targets}
    return {target: column for target, column in found.items() if column is not None}


def find_column(names: Iterable[str], column: str) -> str | None:
    """The one of `names` that --map means: itself, or the same path with other separators.

    Raises ValueError if several have that path.

    >>> find_column(["step", "train/loss"], "train.loss")
    'train/loss'
    """
    names = list(names)
    if column in names:
        return column
    same = [name for name in names if _path(name) == _path(column)]
    if len(same) > 1:
        raise ValueError(f"{column!r} is {_shown(same)}: write one of these")
    return same[0] if same else None


def _path(column: str) -> list[str]:
    return [part for part in re.split(r"[/.]", column) if part]


def find_mapped(names: Collection[str], mapping: Mapping[str, str]) -> dict[str, str]:
    """`mapping` with the columns as the log writes them; as they are given if not there."""
    found = {}
    for target, column in mapping.items():
        try:
            found[target] = find_column(names, column) or column
        except ValueError as error:
            raise ValueError(f"--map {target}={column}: {error}") from None
    return found


def check_mapping(names: Collection[str], mapping: Mapping[str, str]) -> None:
    """Raise ValueError for a mapped column that is not among `names`."""
    for target, column in find_mapped(names, mapping).items():
        if column not in names:
            near = get_close_matches(column, names, n=1, cutoff=0.7)
            meant = f"; is {near[0]!r} meant?" if near else ""
            raise ValueError(f"--map {target}={column}: no such column{meant}; {listed(names)}")


def choose_columns(
    names: Sequence[str], mapping: Mapping[str, str], *, more_may_come: bool = False
) -> Columns:
    """The columns to read among `names`; `mapping` (target -> column) goes first.

    Where `more_may_come`, the names are those of a log's beginning; `add_columns` takes the
    others.

    Raises ValueError for a mapped column that is not there and cannot come.
    """
    if not more_may_come:
        check_mapping(names, mapping)
    columns = Columns(by_target=find_mapped(names, mapping))
    taken = set(columns.by_target.values())
    for name in TARGETS:
        if name not in columns.by_target and _is_meant(name, columns):
            guess = _guess(name, [column for column in names if column not in taken], columns)
            if guess is not None:
                taken.add(guess)
    if "step" not in mapping and plain_name(columns.by_target.get("step", "")) == "epoch":
        columns.by_meaning.add("step")
    columns.other_steps = [
        n for n in names if plain_name(n) in _EVALUATION_STEPS and n not in taken
    ]
    if not columns.has_loss and "step" in columns.by_target:
        _choose_parts(columns, names)
    guessed = [f"{c!r} as {t}" for t, c in columns.by_target.items() if t not in mapping]
    if guessed:
        columns.notes.insert(0, f"columns guessed by name: {', '.join(guessed)}")
    if plain_name(columns.by_target.get("step", "")) == "_step":
        columns.notes.append("'_step' counts calls of the logger and may not be the training step")
    return columns


def _choose_parts(columns: Columns, names: Sequence[str]) -> None:
    parts = _parts_among(names)
    if len({part for part in parts.values() if not part.startswith("validation ")}) < 2:
        return
    columns.parts = parts
    columns.notes.append(
        f"no loss of the whole is logged, each part is judged: {_shown(list(parts))}"
    )
    step = columns.by_target.get("step", "")
    if plain_name(step) == "batch" and "epoch" in map(plain_name, names):
        del columns.by_target["step"]
        columns.notes.append(f"{step!r} begins again with each epoch: rows are counted")


def _parts_among(names: Iterable[str]) -> dict[str, str]:
    return {column: part for column in names if (part := loss_part(column)) is not None}


def add_columns(columns: Columns, names: Sequence[str]) -> None:
    """Look among `names`, which turn up in the middle of a log, for what is not chosen yet."""
    columns.changed = True
    columns.by_target.update(find_mapped(names, columns.by_target))
    for name, target in TARGETS.items():
        free = [c for c in names if c not in columns.by_target.values()]
        known = [c for c in free if plain_name(c) in target.names]
        if name in columns.by_target:
            columns.notes += _could_be(known, name)
            continue
        if name in ("step", "run") or not _is_meant(name, columns):
            continue
        if (guess := _guess(name, free, columns, quiet=True)) is not None:
            columns.notes.append(f"column guessed by name, later in the log: {guess!r} as {name}")
    if columns.has_loss:
        columns.parts = {}
    elif columns.parts:
        columns.parts |= _parts_among(names)


def _is_meant(name: str, columns: Columns) -> bool:
    beside = TARGETS[name].only_beside
    return not beside or any(other in columns.by_target for other in beside)


def _could_be(others: Sequence[str], name: str) -> list[str]:
    """A note on other columns of a target; none for a second counter or clock."""
    if others and name in (*_LOSSES, "grad_norm"):
        return [f"{_shown(others)} could be {name} too: --map {name}=... says so"]
    return []


def _guess(name: str, free: Sequence[str], columns: Columns, *, quiet: bool = False) -> str | None:
    """Choose a column among the `free` ones for the target `name`, and note what is not certain."""
    found, notes, by_meaning = _found(name, free)
    if not quiet:
        columns.notes += notes
    if found is not None:
        columns.by_target[name] = found
        if by_meaning:
            columns.by_meaning.add(name)
    return found


def _found(name: str, free: Sequence[str]) -> tuple[str | None, list[str], bool]:
    """A column for the target `name`, notes, and True if it is on no list of names."""
    target = TARGETS[name]

    def rank(column: str) -> tuple[bool, int]:
        return not target.is_preferred(column), len(plain_name(column).split("_"))

    by_plain_name: dict[str, str] = {}
    for column in free:
        by_plain_name.setdefault(plain_name(column), column)
    known = [by_plain_name[n] for n in target.names if n in by_plain_name]
    meant = [c for c in by_plain_name.values() if c not in known and target.means(c)]
    # The fewest words are the whole and not a part of it.
    meant.sort(key=rank)
    by_meaning = bool(meant) and (target.is_preferred(meant[0]) or not known)
    if by_meaning:
        fitting = [c for c in meant if rank(c) == rank(meant[0])]
        best, *others = *meant[:1], *known, *meant[1:]
    elif known:
        fitting, (best, *others) = [], known
    else:
        fitting = [c for c in free if target.fits(set(plain_name(c).split("_")))]
        if not fitting or (len(fitting) == 1 and is_part_of_loss(fitting[0])):
            return None, [], False
        best, others, by_meaning = fitting[0], [], True
    if len(fitting) > 1:
        none = f"none was taken, --map {name}=... says which"
        return None, [f"{_shown(fitting)} could each be {name}: {none}"], False
    return best, _could_be(others, name), by_meaning


#: What is suggested where nothing was taken, by a word of `meaning` that points to it.
_POINTS_TO = {
    "loss": ("loss", "xent", "nll", "ce"),
    "eval_loss": ("loss", "xent", "nll", "ce"),
    "grad_norm": ("grad", "gnorm", "gradnorm"),
    "learning_rate": ("lr",),
}


def suggestions(columns: Columns, names: Iterable[str]) -> dict[str, str]:
    """Target that has no column -> the unused column that is nearest to it, for --map.

    >>> suggestions(Columns(by_target={"step": "step"}), ["step", "actor/pg_loss", "foo/grad_norm"])
    {'loss': 'actor/pg_loss', 'grad_norm': 'foo/grad_norm'}
    """
    free = _unused(columns, names)
    found: dict[str, str] = {}
    for name, pointers in _POINTS_TO.items():
        if name in columns.by_target or (columns.parts and name in _LOSSES):
            continue
        pointed = []
        for column in free:
            words = meaning(column)
            is_other_loss = name in _LOSSES and ("eval" in words) != (name == "eval_loss")
            is_no_norm = name == "grad_norm" and words.isdisjoint(("norm", "gnorm", "gradnorm"))
            if column not in found.values() and not words.isdisjoint(pointers):
                pointed += [] if is_other_loss or is_no_norm else [column]
        if pointed:
            found[name] = min(pointed, key=lambda c: (len(plain_name(c).split("_")), c))
    return found


def unused_notes(columns: Columns, names: Iterable[str]) -> list[str]:
    """Sentences on the columns that were not used, with the --map that would read them."""
    names = list(names)
    unused = _unused(columns, names)
    notes = []
    if unused and (meant := suggestions(columns, names)):
        maps = " ".join(f"--map {target}={column}" for target, column in meant.items())
        notes.append(f"nothing was read as {', '.join(meant)}; it may be meant: {maps}")
    return [*notes, f"columns not used: {_shown(unused)}"] if unused else []


def _unused(columns: Columns, names: Iterable[str]) -> list[str]:
    used = {*columns.by_target.values(), *columns.other_steps, *columns.parts}
    return [name for name in names if name not in used]


def listed(names: Collection[str]) -> str:
    """The columns of a file, for a message."""
    return f"the columns are {_shown(list(names))}"


def _shown(names: Sequence[str], most: int = 12) -> str:
    shown = ", ".join(repr(name) for name in names[:most])
    return shown + (f" and {len(names) - most} more" if len(names) > most else "")
