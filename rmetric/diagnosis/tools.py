"""What reads the entries of any file."""

from __future__ import annotations

from collections.abc import Callable

from rmetric.diagnosis.library import Library
from rmetric.diagnosis.patterns.stages import Stages
from rmetric.diagnosis.patterns.steps import Told, may_tell, told
from rmetric.diagnosis.signature import Signature
from rmetric.diagnosis.templates.facts import FactsOf
from rmetric.diagnosis.templates.remembered import Remembered

Matches = list[tuple[Signature, dict[str, str]]]


class Tools:
    """What reads entries; shared by the files that one process reads, for what it remembers."""

    def __init__(self, library: Library, read_step: Callable[[str], Told | None] = told) -> None:
        self.library, self.told = library, read_step
        self.facts = FactsOf(library, Stages(), may_tell)
        self._found: Remembered[Matches] = Remembered(2048)

    def find(self, text: str, level: str) -> Matches:
        key = f"{level}\n{text}".encode()
        found = self._found.get(key)
        if found is None:
            found = self.library.find(text, level)
            self._found.put(key, found)
        return found
