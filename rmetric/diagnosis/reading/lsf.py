"""Move the reports of LSF, which bsub writes above a job's output when it has ended, below it."""

from __future__ import annotations

import re

_BEGINS = b"Sender: LSF System"
_ENDS = b"The output (if any)"
#: What a report tells of the end; the rest are settings and no entries of the job.
_TELLS = re.compile(rb"TERM_|Exited |Successfully completed|.*\bkilled\b")
#: Lines of a file in which the first report must begin, and lines of a report.
_FIRST = 5
_LONGEST = 200


class LsfReports:
    """Reorders the lines of a file, block by block.

    Attributes:
        pieces: (number in the new order, number in the file) of the first line of each piece that
            was moved, both from 1; empty without a report.
    """

    def __init__(self) -> None:
        self.pieces: list[tuple[int, int]] = []
        self._number = 0
        self._written = 0
        self._report: list[bytes] = []
        self._at = 0
        self._inside = False
        self._seeks: bool | None = None

    def moved(self, lines: list[bytes]) -> list[bytes]:
        """The lines of the next block that can be written, each report behind its output."""
        if self._seeks is None:
            self._seeks = any(line.startswith(_BEGINS) for line in lines[:_FIRST])
        if not self._seeks:
            return lines
        out: list[bytes] = []
        for line in lines:
            self._number += 1
            if line.startswith(_BEGINS):
                out += self.rest()
                self._at, self._inside = self._number, True
            if self._inside:
                self._report.append(line)
                self._inside = not line.startswith(_ENDS) and len(self._report) < _LONGEST
                if not self._inside:
                    self.pieces.append((self._written + 1, self._number + 1))
            else:
                self._written += 1
                out.append(line)
        return out

    def rest(self) -> list[bytes]:
        """The last report."""
        report, self._report = self._report, []
        if report:
            self.pieces.append((self._written + 1, self._at))
            self._written += len(report)
        return [line if _TELLS.match(line) else b"" for line in report]
