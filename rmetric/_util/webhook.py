"""Post JSON to a URL that is a secret: it stands in no error and no message. No torch here."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from base64 import b64encode
from collections.abc import Mapping
from typing import Any
from urllib.parse import SplitResult, unquote_to_bytes, urlsplit

from rmetric._util.strict_json import encode


def checked_url(url: str, name: str) -> str:
    """`url`, if it can be posted to. Raises ValueError that says `name` and not the URL."""
    try:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("must begin with http:// or https:// and name a host")
        if not url.isprintable() or " " in url or not f"{parts.path}{parts.query}".isascii():
            raise ValueError("holds a blank, a line end or another letter that no URL may have")
        if _port_of(parts) == 0:
            raise ValueError("has a port that is none of 1 to 65535")
        _host_of(parts)
    except ValueError as error:
        raise ValueError(f"{name} {error}") from None
    return url


def _port_of(parts: SplitResult) -> int | None:
    try:
        return parts.port
    except ValueError:
        return 0


def _host_of(parts: SplitResult) -> bytes:
    try:
        return str(parts.hostname).encode("idna")
    except UnicodeError:
        raise ValueError("has a host that is no name") from None


def _request(url: str, message: Mapping[str, Any]) -> urllib.request.Request:
    """The post; a user and password in the URL become its header, as curl does it."""
    headers, parts = {"Content-Type": "application/json"}, urlsplit(url)
    user, at, host = parts.netloc.rpartition("@")
    if at:
        headers["Authorization"] = f"Basic {b64encode(unquote_to_bytes(user)).decode()}"
        url = parts._replace(netloc=host).geturl()
    return urllib.request.Request(url, json.dumps(encode(message)).encode(), headers)


def post(url: str, message: Mapping[str, Any], timeout: float) -> str:
    """Post `message` once, waiting `timeout` seconds at most.

    Returns "" where it was taken, else what happened, in words for "the webhook ...".
    """
    try:
        opener = urllib.request.build_opener(_NoRedirect)
        with opener.open(_request(url, message), timeout=timeout):
            return ""
    except urllib.error.HTTPError as error:
        return f"answered {error.code}"
    except Exception as error:  # of which only what cannot hold the address is told
        reason = getattr(error, "reason", None)
        kind = type(reason if isinstance(reason, Exception) else error).__name__
        return f"could not be reached ({kind})"


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirected post would arrive without its text."""

    def redirect_request(self, *_: Any) -> None:
        return None
