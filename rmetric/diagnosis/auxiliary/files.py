"""Read the files beside the logs that state where ranks are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rmetric._util.errors import LogError
from rmetric.diagnosis.auxiliary.recorder import Dump, is_dump, read_dump
from rmetric.diagnosis.auxiliary.stacks import Stack, is_stack_dump, read_stacks
from rmetric.diagnosis.reading.lines import unwrapped
from rmetric.diagnosis.reading.source import LogSource

#: Suffixes of files that may be read here though they are no logs.
AUXILIARY_SUFFIXES = (".json", ".pkl", ".pickle")
#: Bytes that are read of stacks, and those by which their kind is recognised.
MAX_BYTES_BESIDE = 1 << 26
SNIFFED = 4096


@dataclass(kw_only=True)
class AuxiliaryFiles:
    """Content of the files beside the logs.

    Attributes:
        notes: files that could not be read.
    """

    dumps: list[Dump] = field(default_factory=list)
    stacks: list[Stack] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def is_auxiliary(head: bytes) -> bool:
    """True for the first bytes of a file that is read here."""
    return is_dump(head) or is_stack_dump(head)


def read_auxiliary(files: Sequence[LogSource]) -> AuxiliaryFiles:
    """Read the files; one that cannot be read becomes a note."""
    found = AuxiliaryFiles()
    for one in files:
        try:
            with one.path.open("rb") as file:
                head = file.read(SNIFFED)
                if is_dump(head):
                    found.dumps.append(read_dump(one.path, one.name))
                    continue
                content = unwrapped(head + file.read(MAX_BYTES_BESIDE - len(head)))
            text = content.decode("utf-8", "replace")
            found.stacks += read_stacks(text, one.name, one.rank, one.node)
        except LogError as error:
            found.notes.append(str(error))
        except OSError as error:
            found.notes.append(f"{one.name}: cannot be read: {error.strerror}")
    return found
