"""A signature: the text of a known fault and its meaning; and the causes that have none."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from msgspec import Meta, Struct, convert

from rmetric.diagnosis.reading import read_yaml

#: Relation of a matched entry to the failure.
ROLES = {
    "cause": "states the fault: an exception, an Xid, a kernel's out-of-memory kill",
    "symptom": "states that something failed, whatever the cause: an exit code, a killed process",
    "echo": "logged by ranks that lose another: a collective's timeout, a connection closed by "
    "its peer; the cause is elsewhere, but where nothing else is found it is the best there is",
    "ending": "the job was ended from outside: cancelled, preempted, out of its time",
    "success": "states that the job reached its end as planned",
    "harmless": "looks like a fault and is none; takes the place of every other match",
}

#: Further properties of a signature, or of all of a family (families.yaml).
TRAITS = {
    # of a rank that waits for others, or has lost them
    "connection": "a connection failed; each rank closes its own at the end, others use theirs on",
    "lost connection": "of ranks that had one",
    "meeting": "rendezvous failed: the ranks that joined timed out",
    "waiting": "a rank still waits: nobody does so behind the last step",
    "timeout": "a rank timed out waiting for another one",
    "hearsay": "a timeout that a rank may report second-hand",
    "link down": "a port lost its link, by the kernel",
    "no answer": "what the ranks at both ends of a broken link log",
    # of machines
    "machine broke": "a machine's own record of what ended its processes",
    "broken GPU": "a GPU that the next attempt does not have, if it was not replaced",
    "missing GPU": "what an attempt meets then",
    "breaks the GPU": "no process that uses the GPU outlives it",
    "unspecific": "what a rank's GPU says that does not say why",
    "kernel record": "recorded by a machine's kernel",
    "kernel kill": "the kernel killed a process for want of memory",
    "blocked process": "a process that a kernel finds waiting, which may be no rank's",
    "stopped process": "a process in state T: why others waited until the job was ended",
    "observed": "a tool's look at a machine: no consequence of what came before",
    "write fails": "what a checkpoint meets when it is written",
    # of launchers, schedulers and their reports
    "report": "a process or a program has ended, whatever the cause",
    "task exit": "a scheduler's report of a task that ended with an error",
    "abort": "a process ended by an abort, as a collective's watchdog ends its own",
    "kill": "the record of a kill, with its reason",
    "signalled": "states a signal and no reason; the scheduler's line may come after it",
    "takes down": "what a process logs last",
    "last words": "ends a rank, though of little confidence",
    "before start": "of what cannot begin, whatever the other ranks have begun meanwhile",
    "restarts ranks": "behind it the next attempt begins",
    "starts ranks": "the same, but the first attempt has it too",
    # of the end
    "recorded": "the scheduler's record of a good end",
    "completed": "the program's statement that the training is complete",
    "ends a step": "may end a step of servers, after the training",
    "interrupted": "from the keyboard: after the planned end, a server or a wait",
    "watched": "a script ended a training without progress",
    "time limit": "the time of the job was over",
    # further families
    "checkpoint": "a checkpoint cannot be written or read",
    "hang": "a training stood still",
}


#: Texts of a signature's fields, and how their values in YAML are checked.
Text = Annotated[str, Meta(min_length=1)]
Id = Annotated[str, Meta(pattern="^[a-z][a-z0-9_]*$")]
#: Lower case without digits, three characters and more.
Gate = Annotated[str, Meta(pattern=r"^[\x00-/:-@\[-\x7f]{3,}$")]
#: Field -> the values that are accepted.
CHOICES: dict[str, tuple[str, ...]] = {
    "role": (*ROLES,),
    "actor": ("hardware", "user", "framework", "platform", ""),
    "levels": ("error", "warning", "info", ""),
    "traits": (*TRAITS,),
}
if TYPE_CHECKING:  # for msgspec the choices themselves
    Role = str
    Actor = str
    Level = str
    Trait = str
else:
    Role, Actor, Level, Trait = (Literal[values] for values in CHOICES.values())


class Signature(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A known fault.

    Attributes:
        id: words joined by underscores: "cuda_out_of_memory".
        family: the class of causes it belongs to: "out of memory".
        title: what happened, in a short sentence for people.
        role: of `ROLES`.
        actor: who should act; "" for roles without one (success, harmless).
        patterns: regular expressions, any of which matches within one entry; named groups
            (`rank`, `node`, `xid`, `gpu`, `path`, `signal`, `code`, ...) become `Match.named`,
            and a `rank` or `node` so named is the subject of the entry.
        gates: literals of which each pattern's match contains at least one, in lower case and
            without digits: what is looked for first, in every new kind of line.
        rank: the more specific, the higher: of several that match one entry the highest counts;
            0 is the generic ones (any exception, any line of level ERROR).
        confidence: how sure the diagnosis is if this is all there is, 0 to 1.
        levels: that an entry states, "" for none, of those that it applies to; () for all.
        to_do: what to do, one to three short sentences in the imperative.
        survivable: a training often goes on after it, so it explains a failure only at the end.
        of_two: logged by one of two that do not agree, not always the one at fault.
        traits: of `TRAITS`, those of its family among them.
        taken_back_by: ids that take it back, where the same stream logs them later.
        reason_in: it states no reason; the families of what may state it later.
        usual_stage: in which most faults of its family come.
        source: where it is documented: a page's title or an issue (owner/name#number).
        matches, misses: entries that it must and must not match, which are its tests.
    """

    id: Id
    family: Text
    title: Text
    role: Role
    actor: Actor = ""
    patterns: Annotated[tuple[Text, ...], Meta(min_length=1)]
    gates: Annotated[tuple[Gate, ...], Meta(min_length=1)]
    to_do: tuple[Text, ...] = ()
    levels: tuple[Level, ...] = ()
    rank: int = 50
    confidence: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.9
    survivable: bool = False
    of_two: bool = False
    traits: tuple[Trait, ...] = ()
    taken_back_by: tuple[Id, ...] = ()
    reason_in: tuple[Text, ...] = ()
    usual_stage: str = ""
    source: str = ""
    matches: tuple[Text, ...] = ()
    misses: tuple[Text, ...] = ()


#: Their ids; library/inferred.yaml has the rest.
SILENT = "rank_fell_silent"
FINISHED_ALONE = "rank_finished_early"
SETTINGS_DIFFER = "settings_differ"
NOT_ENTERED = "collective_not_entered"
DIFFERENT = "collectives_differ"
STACK_DIFFERS = "rank_stands_elsewhere"
NOT_FINITE = "loss_not_finite"
HUNG = "training_hung"


class InferredCause(Struct, frozen=True):
    """A cause without a signature: no pattern can match it."""

    id: str
    family: str
    title: str  # with {who} for the suspect and {what} for its deviation
    actor: str
    why: str
    to_do: tuple[str, ...]


@cache
def inferred_causes() -> dict[str, InferredCause]:
    """All of them by id."""
    entries = read_yaml(Path(__file__).with_name("library") / "inferred.yaml")
    return {cause.id: cause for cause in convert(entries, list[InferredCause])}
