"""What the names of files say about who wrote them."""

from __future__ import annotations

from collections.abc import Sequence


def who_wrote(names: Sequence[str]) -> list[tuple[int | None, str | None]]:
    """Rank and node of each file, by its name and folders.

    A number counts as a rank only where the files of the set have it in the same place and no
    two of one folder share it.
    """
    raise NotImplementedError
