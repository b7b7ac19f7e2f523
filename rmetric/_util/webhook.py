"""Post JSON to a URL that is a secret, which no error and no message contains.

What is posted has the form that the URL's host takes, see `FORMS`. ``FORM+https://...`` chooses
one for another host, such as a relay.
"""

from __future__ import annotations

import html
import json
import socket
import time
import urllib.error
import urllib.request
from base64 import b64encode
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple
from urllib.parse import SplitResult, parse_qs, unquote_to_bytes, urlsplit

from rmetric._util import __version__
from rmetric._util.background import Background
from rmetric._util.strict_json import encode

Message = Mapping[str, Any]


class Form(NamedTuple):
    """Hosts of a service; its body of a text, a message and a key; the URL's name of that key."""

    hosts: tuple[str, ...]
    body: Callable[[str, Message, str], dict[str, Any]]
    key: str = ""


#: Slack's incoming webhooks, Discord's, PagerDuty's Events API v2, the message as it is. Discord
#: refuses longer contents and calls whom the text names; PagerDuty cuts longer summaries.
FORMS = {
    "slack": Form(("hooks.slack.com", "hooks.slack-gov.com"),
                  lambda text, *_: {"text": html.escape(text, quote=False)}),
    "discord": Form(("discord.com", "discordapp.com"),
                    lambda text, *_: {"content": text[:2000], "allowed_mentions": {"parse": []}}),
    "pagerduty": Form(("events.pagerduty.com", "events.eu.pagerduty.com"), lambda text, _, key: {
        "routing_key": key, "event_action": "trigger", "payload": {
            "summary": text[:1024], "source": socket.gethostname(), "severity": "error"},
    }, "routing_key"),
    "plain": Form((), lambda _, message, *__: dict(message)),
}  # fmt: skip


class WebhookSender:
    """Posts JSON to a URL from a thread of its own, so that the caller never waits for it.

    Args:
        url: http or https. One that cannot be posted to raises ValueError, which has its `name`.
        report: called with why a message was not taken, in words for "the webhook ...".
        timeout: seconds, above 0, for one of the `tries`, at least 1; their pauses double.
        pause: seconds before the second try.
        waiting: messages that may wait to be sent.
        form: where neither the URL nor its host has one; of `FORMS`.
    """

    def __init__(
        self,
        url: str,
        name: str,
        report: Callable[[str], object],
        *,
        timeout: float = 5.0,
        tries: int = 1,
        pause: float = 1.0,
        waiting: int = 100,
        form: str = "plain",
    ) -> None:
        self._url, self._report, self._form = checked_url(url, name), report, form
        self._timeout, self._tries, self._pause = timeout, tries, pause
        self._background = Background(size=waiting)

    def post(self, message: Message) -> None:
        """Send a message when those before are sent."""
        if not self._background.submit(lambda: self._deliver(message)):
            self._report("does not keep up")

    def close(self) -> bool:
        """Wait as long as one message may take; False if some are still not sent."""
        pauses = self._pause * 2**self._tries if self._tries > 1 else 0.0
        return self._background.close(self._tries * self._timeout + pauses)

    def _deliver(self, message: Message) -> None:
        problem = ""
        for before in range(self._tries):
            if before:
                time.sleep(self._pause * 2 ** (before - 1))
            problem = post(self._url, message, self._timeout, self._form)
            if not problem:
                return
        self._report(problem if self._tries == 1 else f"{problem}, {self._tries} times")


def checked_url(url: str, name: str) -> str:
    """`url`, if it can be posted to. Raises ValueError with `name` and not the URL."""
    try:
        form, bare = _form_of(url, "plain")
        parts = urlsplit(bare)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("must begin with http:// or https:// and name a host")
        if (key := FORMS[form].key) and not _key_of(parts, form):
            raise ValueError(f"must end with ?{key}=..., which {form} takes")
        if not url.isprintable() or " " in url or not f"{parts.path}{parts.query}".isascii():
            raise ValueError("holds a blank, a line end or another character not allowed in a URL")
        if not _holds(lambda: parts.port != 0):
            raise ValueError("has a port outside 1 to 65535")
        if not _holds(lambda: bool(str(parts.hostname).encode("idna"))):
            raise ValueError("has an invalid host name")
    except ValueError as error:
        raise ValueError(f"{name} {error}") from None
    return url


def _holds(condition: Callable[[], bool]) -> bool:
    """Whether it holds; one that raises, with words that may hold the URL, does not."""
    try:
        return condition()
    except ValueError:
        return False


def _form_of(url: str, form: str) -> tuple[str, str]:
    """Name of the form of a URL, else `form`, and the URL without that name."""
    named, plus, rest = url.partition("+")
    if plus and named in FORMS:
        return named, rest
    host = f".{urlsplit(url).hostname}"
    fits = (name for name, known in FORMS.items() for at in known.hosts if host.endswith(f".{at}"))
    return next(fits, form), url


def _key_of(parts: SplitResult, form: str) -> str:
    return parse_qs(parts.query).get(FORMS[form].key, [""])[0]


def _request(url: str, message: Message, form: str) -> urllib.request.Request:
    """The post; a user and password in the URL become its header, as curl does it."""
    name, url = _form_of(url, form)
    # Some services refuse the default name of urllib.
    headers = {"Content-Type": "application/json", "User-Agent": f"rmetric/{__version__}"}
    parts = urlsplit(url)
    body = FORMS[name].body(str(message.get("text")), message, _key_of(parts, name))
    if FORMS[name].key:
        url = parts._replace(query="").geturl()
    user, at, host = parts.netloc.rpartition("@")
    if at:
        headers["Authorization"] = f"Basic {b64encode(unquote_to_bytes(user)).decode()}"
        url = urlsplit(url)._replace(netloc=host).geturl()
    return urllib.request.Request(url, json.dumps(encode(body)).encode(), headers)


def post(url: str, message: Message, timeout: float, form: str = "plain") -> str:
    """Post `message` once, waiting `timeout` seconds at most; `form` as of `WebhookSender`.

    Returns "" where it was taken, else what happened, in words for "the webhook ...".
    """
    try:
        opener = urllib.request.build_opener(_NoRedirect)
        with opener.open(_request(url, message, form), timeout=timeout):
            return ""
    except urllib.error.HTTPError as error:
        return f"answered {error.code}"
    except Exception as error:  # only what cannot hold the address is reported
        reason = getattr(error, "reason", None)
        kind = type(reason if isinstance(reason, Exception) else error).__name__
        return f"could not be reached ({kind})"


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirected post would arrive without its text."""

    def redirect_request(self, *_: Any) -> None:
        return None
