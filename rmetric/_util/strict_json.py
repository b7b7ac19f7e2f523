"""Values as strict JSON holds them, and what is accepted when they are read back.

nan and the infinities are the strings "NaN", "Infinity" and "-Infinity"; null reads as absent. A
reader takes one value and raises ValueError, to which `field` adds the key.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from math import inf, isfinite, nan
from typing import Any, TypeVar

import orjson

T = TypeVar("T")

_NON_FINITE = {"NaN": nan, "Infinity": inf, "-Infinity": -inf}
#: As Python, C and C++ print them: nan, -nan(ind), +inf, 1.#QNAN, -1.#INF00e+000, ...
_PRINTED = (
    r"(?<![\w.])(?:([-+]?)(inf(?:inity)?|1\.#(?:INF|J)\w*(?:[-+]\d+)?)"
    r"|[-+]?(?:nan(?:\(\w*\))?|1\.#\w+(?:[-+]\d+)?))(?![\w.])"
)
_PRINTED_NUMBER = re.compile(_PRINTED, re.IGNORECASE)
#: The same outside of strings; the end of a string may be cut off.
_PRINTED_IN_JSON = re.compile(rf'"(?:[^"\\]|\\.)*"?|{_PRINTED}', re.IGNORECASE | re.DOTALL)


def encode_number(value: float) -> float | str:
    """A float as strict JSON can hold it."""
    if isfinite(value):
        return float(value)
    return "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"


def encode(value: Any) -> Any:
    """`value` with every float in it, however deep, as strict JSON can hold it."""
    if isinstance(value, float):
        return encode_number(value)
    if isinstance(value, dict):
        return {key: encode(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [encode(inner) for inner in value]
    return value


def encode_line(entry: dict[str, Any]) -> bytes:
    """One line of a log, with its line end."""
    try:
        return orjson.dumps(entry, option=orjson.OPT_APPEND_NEWLINE)
    except TypeError:  # a lone surrogate, or an integer beyond 64 bits
        return json.dumps(encode(entry)).encode() + b"\n"


def parse_line(line: bytes) -> Any:
    """One line as JSON; nan and inf, which many loggers write without quotes, are accepted."""
    try:
        return orjson.loads(line)
    except orjson.JSONDecodeError:
        pass
    try:
        return loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{why_not_read(error)}: {shown(line)}") from None


def why_not_read(error: Exception) -> str:
    """Why a text is not valid, from the exception that `json` raised.

    >>> why_not_read(RecursionError())
    'nested too deeply'
    """
    if isinstance(error, RecursionError):
        return "nested too deeply"
    unread = isinstance(error, (json.JSONDecodeError, UnicodeError))
    return "not JSON" if unread else "a number has thousands of digits"


def loads(text: str, decode: Callable[[str], Any] = json.loads) -> Any:
    """`text` as JSON in which nan and the infinities stand as any program prints them.

    >>> loads('{"loss": [-nan(ind), inf, 1.#QNAN], "note": "nan"}')
    {'loss': [nan, inf, nan], 'note': 'nan'}
    """
    try:
        return decode(text)
    except ValueError:
        plain = _PRINTED_IN_JSON.sub(_as_json, text)
        if plain == text:
            raise
        return decode(plain)


def plain_non_finite(text: str) -> str:
    """`text` with nan and the infinities as Python's `float` takes them.

    >>> plain_non_finite("loss -nan(ind), norm 1.#INF")
    'loss NaN, norm Infinity'
    """
    return _PRINTED_NUMBER.sub(_as_json, text) if "#" in text or "(" in text else text


def _as_json(found: re.Match[str]) -> str:
    if found[0].startswith('"'):
        return found[0]
    return "NaN" if not found[2] else "-Infinity" if found[1] == "-" else "Infinity"


def field(entry: dict[str, Any], key: str, read: Callable[[Any], T]) -> T | None:
    """Result of `read` for ``entry[key]``, None if absent or null; its ValueError names the key."""
    value = entry.get(key)
    if value is None:
        return None
    try:
        return read(value)
    except ValueError as error:
        raise ValueError(f"{key!r}: {error}") from None


def decode_number(value: Any) -> float | None:
    """The float that a log holds; None for not logged."""
    return None if value is None else number(value)


def number(value: Any) -> float:
    if isinstance(value, str) and value in _NON_FINITE:
        return _NON_FINITE[value]
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            pass
    raise _found(value, "a number, null, 'NaN' or '±Infinity'")


def whole_number(value: Any) -> int:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    # What is beyond 64 bits no array of steps can hold.
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63:
        return value
    raise _found(value, "a whole number below 2^63")


def shown(value: Any) -> str:
    """`value` for a message, cut to a length that a line can hold."""
    whole = repr(value.decode("utf-8", "replace").strip() if isinstance(value, bytes) else value)
    return whole if len(whole) <= 60 else f"{whole[:57]}..."


def refused(content: Any, error: Exception) -> str:
    """The error of msgspec, with the value at the place that it names."""
    for key, at in re.findall(r"\.(\w+)|\[(\d+)\]", str(error).partition("`$")[2]):
        content = content[key] if key else content[int(at)]  # keys of a mapping have no place
    return f"{error}: found {shown(content)}"


def _found(value: Any, accepted: str) -> ValueError:
    return ValueError(f"found {shown(value)}; {accepted} is accepted")


def _reader(kind: type[T], accepted: str) -> Callable[[Any], T]:
    def read(value: Any) -> T:
        if isinstance(value, kind):
            return value
        raise _found(value, accepted)

    return read


text = _reader(str, "a string")
flag = _reader(bool, "true or false")
items: Callable[[Any], list[Any]] = _reader(list, "a list")
mapping: Callable[[Any], dict[str, Any]] = _reader(dict, "a JSON object")
