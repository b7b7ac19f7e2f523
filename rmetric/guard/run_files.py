"""Typed decoding of the small JSON files of a run folder. No torch here.

Another program, or a user by hand, may write anything into them: a file of other types than
expected is one `ValueError` that names what was found.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from rmetric._util.durable import no_follow

T = TypeVar("T")

#: Greatest size of a small file, bytes.
MOST_BYTES = 1 << 20
#: Greatest number that is exact as a float, too.
MOST = 2**53
#: Seconds since the epoch at the end of the year 9999.
LAST_TIME = 253_402_300_799.0

Count = Annotated[int, msgspec.Meta(ge=0, le=MOST)]
Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=LAST_TIME)]


class AnsweredFile(msgspec.Struct, frozen=True, kw_only=True):
    """Last answered request; `step` is None for a withdrawn one."""

    number: Count
    step: Count | None = None


def decode_file(path: Path, kind: type[T]) -> T | None:
    """Content of a file as `kind`; None if the file is missing.

    Raises:
        ValueError: the content is not of this kind.
        OSError: the file cannot be read.
    """
    try:
        with open(path, "rb", opener=no_follow) as file:
            data = file.read(MOST_BYTES + 1)
    except FileNotFoundError:
        return None
    if len(data) > MOST_BYTES:
        raise ValueError(f"it has more than {MOST_BYTES} bytes")
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(str(error) or type(error).__name__) from None


def converted(entry: Any, kind: type[T]) -> T:
    """A decoded JSON value as `kind`. Raises ValueError if it is of another."""
    try:
        return msgspec.convert(entry, type=kind)
    except (msgspec.MsgspecError, RecursionError, OverflowError) as error:
        raise ValueError(str(error) or type(error).__name__) from None
