"""Post JSON to a URL that is a secret: it stands in no error and no message. No torch here."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from rmetric._util.strict_json import encode


def checked_url(url: str, name: str) -> str:
    """`url`, if it can be posted to. Raises ValueError that says `name` and not the URL."""
    try:
        parts = urlsplit(url)
        fine = parts.scheme in ("http", "https") and bool(parts.hostname)
    except ValueError:
        fine = False
    if not fine:
        raise ValueError(f"{name} must begin with http:// or https:// and name a host")
    return url


def post(url: str, message: Mapping[str, Any], timeout: float) -> str:
    """Post `message` once, waiting `timeout` seconds at most.

    Returns "" where it was taken, else what happened, in words for "the webhook ...".
    """
    request = urllib.request.Request(
        url,
        data=json.dumps(encode(message)).encode(),
        headers={"Content-Type": "application/json"},
    )
    try:
        with urllib.request.build_opener(_NoRedirect).open(request, timeout=timeout):
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
