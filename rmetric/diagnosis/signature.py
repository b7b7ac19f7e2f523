"""A signature: the text of a known fault and its meaning; and the causes that have none."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from msgspec import Meta, Struct, convert

from rmetric._util.lazy import read_yaml

_LIBRARY_FOLDER = Path(__file__).with_name("library")
#: Texts of a signature's fields, and how their values in YAML are checked.
Text = Annotated[str, Meta(min_length=1)]
Id = Annotated[str, Meta(pattern="^[a-z][a-z0-9_]*$")]
#: Lower case without digits, three characters and more.
Gate = Annotated[str, Meta(pattern=r"^[\x00-/:-@\[-\x7f]{3,}$")]
#: Field -> the words that it accepts, each with its meaning.
CHOICES: dict[str, dict[str, str]] = read_yaml(_LIBRARY_FOLDER / "vocabulary.yaml")
if TYPE_CHECKING:  # for msgspec the choices themselves
    Role = str
    Actor = str
    Level = str
    Trait = str
else:
    Role, Actor = Literal[tuple(CHOICES["role"])], Literal[tuple(CHOICES["actor"])]
    Level, Trait = Literal[tuple(CHOICES["levels"])], Literal[tuple(CHOICES["traits"])]


class Signature(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A known fault.

    Attributes:
        id: words joined by underscores: "cuda_out_of_memory".
        family: the class of causes it belongs to: "out of memory".
        title: what happened, in a short sentence for people.
        role: of vocabulary.yaml, as actor, levels and traits.
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
        traits: those of its family among them.
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
FINISHED_EARLY = "rank_finished_early"
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
    causes = convert(read_yaml(_LIBRARY_FOLDER / "inferred.yaml"), list[InferredCause])
    return {cause.id: cause for cause in causes}
