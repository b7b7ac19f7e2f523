"""How large the job is and which rank sits on which node, as its logs say."""

from __future__ import annotations

from rmetric.diagnosis.reading.prefixes import Who


def may_tell(form: bytes) -> bool:
    """Whether a line may say something about the world, by the line in lower case without digits.

    Quick, and the same whatever its digits are: call `World.take` for such lines only.
    """
    raise NotImplementedError


class World:
    """What the lines said so far about the size and the layout of the job.

    Attributes:
        node_of_rank: rank -> node.
        nodes: names of the nodes in the order of their numbers, where a list was given.
    """

    node_of_rank: dict[int, str]
    nodes: list[str]

    def take(self, text: str, who: Who, stream: str) -> None:
        """A line (not a joined entry) without its prefix.

        Args:
            who: as `Prefixes.split` gives it.
            stream: name of who speaks; a file where nothing says more.
        """
        raise NotImplementedError

    def place(self, who: Who) -> tuple[int | None, str | None]:
        """Global rank and node of a speaker, as far as known by now."""
        raise NotImplementedError

    def rank_of(self, stream: str) -> int | None:
        """The rank that a stream without prefixes says it is ("global rank 3"), if only one."""
        raise NotImplementedError

    @property
    def size(self) -> int | None:
        """Number of ranks."""
        raise NotImplementedError

    def merge(self, other: World) -> None:
        """Add what another saw, of other files of the same job."""
        raise NotImplementedError

    def notes(self) -> list[str]:
        """Statements that contradict each other: two jobs in one folder, perhaps."""
        raise NotImplementedError
