"""Post alerts to a chat or a pager."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections import Counter
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from rmetric._util.errors import as_number, require
from rmetric._util.webhook import WebhookSender
from rmetric.monitor.actions.action import RESCUE, Action, decision_words, rank
from rmetric.monitor.alerts import Alert

if TYPE_CHECKING:
    from rmetric.monitor.monitor import Monitor

logger = logging.getLogger("rmetric")


class Webhook(Action):
    """Posts alerts and decisions of a rescue in the form of Slack, Discord or PagerDuty.

    The form is that of the URL's host, else Slack's, ``{"text": ...}``; ``discord+https://...`` or
    ``pagerduty+https://...`` chooses another. PagerDuty's key is the parameter ``routing_key`` of
    the URL.

    It posts from a thread of its own: a server that hangs delays neither the training nor the log.
    Of one source of alerts, and of one kind of decision, at most one message is sent in
    `min_interval`; the next has the number of those held back. The first rank alone posts. The
    address is a secret: it appears in no log, no repr and no exception.

    Its weakness: a message that the server does not take is reported in the log and not sent again;
    alerts held back last appear in no message.

    Args:
        url: http or https.
        variable: name of the environment variable that holds the URL, instead.
        title: what the message begins with; the machine's name by default.
        min_interval: seconds between messages of one source or kind, at least 0.
        timeout: seconds that the server has to answer, and to wait at the end; above 0.
        on: sources of alerts that it reacts to, ``rescue`` for decisions; None for every one.
    """

    notifies = True

    def __init__(
        self,
        url: str | None = None,
        *,
        variable: str | None = None,
        title: str | None = None,
        min_interval: float = 60.0,
        timeout: float = 5.0,
        on: Collection[str] | None = None,
    ) -> None:
        super().__init__(on=on)
        require("min_interval", min_interval, as_number(min_interval) >= 0.0, "at least 0 seconds")
        timely = 0.0 < as_number(timeout) < float("inf")
        require("timeout", timeout, timely, "finite and above 0 seconds")
        if (url is None) == (variable is None):
            raise ValueError("a webhook needs either url or variable, one of the two")
        if variable is not None:
            url = os.environ.get(variable)
            if not url:
                raise ValueError(f"variable is {variable!r}: this environment variable is not set")
        self.title = socket.gethostname() if title is None else title
        self.min_interval = min_interval
        self._sender = WebhookSender(
            url or "", "the webhook's url", _report, timeout=timeout, waiting=20, form="slack"
        )
        self._last_sent: dict[str, float] = {}
        self._held_back: Counter[str] = Counter()

    def __call__(self, alert: Alert, monitor: Monitor) -> None:
        self._send(str(alert), alert.source, f"alerts of {alert.source}")

    def decided(self, entry: Mapping[str, Any], monitor: Monitor) -> None:
        action = entry["action"]
        self._send(decision_words(entry), f"{RESCUE} {action}", f"decisions {action}")

    def _send(self, words: str, kind: str, kinds: str) -> None:
        if rank() != 0:
            return
        now = time.monotonic()
        if now - self._last_sent.get(kind, -float("inf")) < self.min_interval:
            self._held_back[kind] += 1
            return
        self._last_sent[kind] = now
        held_back = self._held_back.pop(kind, 0)
        more = f" ({held_back} more {kinds} since the last message)" if held_back else ""
        self._sender.post({"text": f"{self.title}: {words}{more}"})

    def close(self) -> None:
        if not self._sender.close():
            logger.error("rmetric: the webhook did not answer in time; alerts were not posted")


def _report(problem: str) -> None:
    logger.error("rmetric: the webhook %s; an alert was not posted", problem)
