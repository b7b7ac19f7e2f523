"""Entry readers that the files of one process share for their caches."""

from __future__ import annotations

from collections.abc import Callable

from rmetric.diagnosis.library import SignatureLibrary
from rmetric.diagnosis.patterns.stages import Stages
from rmetric.diagnosis.patterns.steps import StepMatch, match_step, may_state_step
from rmetric.diagnosis.signature import Signature
from rmetric.diagnosis.templates.facts import FactsOf
from rmetric.diagnosis.templates.recent_cache import RecentCache

Matches = list[tuple[Signature, dict[str, str]]]


class Tools:
    """Entry readers with caches, shared by the files that one process reads."""

    def __init__(
        self, library: SignatureLibrary, read_step: Callable[[str], StepMatch | None] = match_step
    ) -> None:
        self.library, self.match_step = library, read_step
        self.facts = FactsOf(library, Stages(), may_state_step)
        self._found: RecentCache[Matches] = RecentCache(2048)

    def find(self, text: str, level: str) -> Matches:
        key = f"{level}\n{text}".encode()
        found = self._found.get(key)
        if found is None:
            found = self.library.find(text, level)
            self._found.put(key, found)
        return found
