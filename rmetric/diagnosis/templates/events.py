"""Group masked texts into events with Drain (drain3, in memory; no state is loaded)."""

from __future__ import annotations

from drain3.drain import Drain, LogCluster

#: Events of a job at most; texts that fit none of them are of the event `OTHERS`.
MAX_JOB_EVENTS = 5000
OTHERS = "<others>"
#: A word that differs among the texts of an event.
ANY = "<*>"


class Events:
    """Groups texts to events.

    A text keeps the event that Drain gave it first. Texts of different classes never share one,
    nor do texts that differ in their first word. L4 states no settings of Drain (arXiv
    2503.20263, section 4.1); these are ours.

    Attributes:
        full: number of texts that fit none of `max_events` events.
    """

    def __init__(self, max_events: int = MAX_JOB_EVENTS) -> None:
        self._drain = Drain(
            depth=5, sim_th=0.6, max_children=200, param_str=ANY, parametrize_numeric_tokens=False
        )
        self._max = max_events
        self._number_of: dict[tuple[str, str], int] = {}
        #: by number, and number by cluster of Drain; None is that of `OTHERS`
        self._clusters: list[int | None] = []
        self._of_cluster: dict[int | None, int] = {}
        self.full = 0

    def __len__(self) -> int:
        return len(self._clusters)

    def number(self, text: str, cls: str = "") -> int:
        """The event of a masked text; numbers count from 0."""
        number = self._number_of.get((cls, text))
        if number is None:
            cluster, tokens = None, _tokens(text, cls)
            room = len(self) < self._max or self._search(tokens) is not None
            if text != OTHERS and room:
                cluster = self._drain.add_log_message(" ".join(tokens))[0].cluster_id
            else:
                self.full += 1
            number = self._of_cluster.setdefault(cluster, len(self))
            self._clusters += [cluster] * (number == len(self))
            self._number_of[cls, text] = number
        return number

    def template(self, number: int) -> str:
        """The words that all texts of an event share, <*> for those that differ."""
        cluster = self._clusters[number]
        if cluster is None:
            return OTHERS
        return " ".join(self._drain.id_to_cluster[cluster].log_template_tokens[1:])

    def like(self, text: str, cls: str = "") -> int | None:
        """The event with the same words but for <*> in either; None without one.

        Stricter than `number`, which would take "saved <PATH>" and "lost <PATH>" for one.
        """
        tokens = _tokens(text, cls)
        known, found = self._number_of.get((cls, text)), self._search(tokens)
        if known is not None or found is None:
            return known
        pairs = zip(tokens, found.log_template_tokens, strict=True)
        same = all(one == other or ANY in (one, other) for one, other in pairs)
        return self._of_cluster[found.cluster_id] if same else None

    def _search(self, tokens: list[str]) -> LogCluster | None:
        return self._drain.tree_search(self._drain.root_node, tokens, self._drain.sim_th, False)


def _tokens(text: str, cls: str) -> list[str]:
    # A class is one token, whatever it is called.
    return ["class:" + cls.replace(" ", "_"), *text.split()]
