"""The single pass over a file: most lines are counted by their form only.

A block of lines is looked up by their keys, which are the lines without digits (`_take`). Lines of
a form that needs no action are appended to the pending entries of their stream, which `_settle`
counts at the end of the block. Of the others, `_look` records the steps; those that may be of an
entry of several lines, or match a signature, take the way of each by itself (entries.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rmetric.diagnosis.entries import EntryPass
from rmetric.diagnosis.file_lines import DIGITS
from rmetric.diagnosis.log_stream import LogLineForm, LogStream
from rmetric.diagnosis.part import Part, part_of
from rmetric.diagnosis.reading.joining import MAX_TEXT

#: Bytes of a line that are read, at its beginning and at its end.
HALF_LINE = MAX_TEXT


class FilePass(EntryPass):
    """Reads one file to the `Part` of each attempt in it."""

    def read(self) -> Part:
        """Read the whole file as one attempt."""
        (part,) = self.read_attempts()
        return part

    def read_attempts(
        self,
        on_progress: Callable[[int], None] | None = None,
        starts: Sequence[int] = (),
    ) -> list[Part]:
        """Read the whole file.

        Args:
            on_progress: receives the number of bytes of each block.
            starts: first lines of the later attempts, as `starts_of(self.marks)` finds them.
        """
        found = list[Part]()
        for lines in self.source.chunks():
            if on_progress is not None:
                on_progress(sum(map(len, lines)) + len(lines))
            lines = _shortened(lines)
            keys = b"\n".join(lines).translate(None, DIGITS).split(b"\n") if lines else []
            before, begin = self.number + 1, 0
            for at in [at - before for at in starts if 0 <= at - before < len(lines)]:
                self._take(lines[begin:at], keys[begin:at])
                begin = at
                found.append(self._finish())
                self._begin_attempt()
            self._take(lines[begin:], keys[begin:])
        return [*found, self._finish()]

    def _finish(self) -> Part:
        for stream in self.streams.values():
            if stream.open is not None:
                self._close(stream)
            self._settle(stream)
        return part_of(self)

    def _take(self, lines: list[bytes], keys: list[bytes]) -> None:
        """Read the next lines; their keys are they without their digits."""
        if not lines:
            return
        known, own, number = self.forms.get, self.own, self.number + 1
        self.lines, forms = lines, list(map(known, keys))
        self.block_forms = forms
        for at, form in enumerate(forms):
            if form is None:
                form = forms[at] = known(keys[at]) or self._form(lines[at], keys[at])
            stream, heads, start = own, form.heads, 0
            if heads is not None:
                line = lines[at]
                for start in heads.lengths:
                    found = heads.known.get(line[:start])
                    if found is not None:
                        stream = found
                        break
                else:
                    stream, start = self._stream(line, form)
            if (
                form.plain
                and not stream.slow
                and ((stays := form.stays) is None or stream.stage in stays)
            ):
                if form.marked:
                    self._mark(number + at, form, stream)
                stream.templates.append(form.template)
                stream.places.append(at)
            elif not form.blank:  # which changes nothing
                self._look(at, form, stream, start)
        # Those that end last come first: so few entries are the last of their template for now.
        pending = [stream for stream in self.streams.values() if stream.places]
        for stream in sorted(pending, key=lambda one: self._line(one.places[-1]), reverse=True):
            self._settle(stream)
        self.number += len(lines)
        self.line_before = lines[-1]

    def _look(self, at: int, form: LogLineForm, stream: LogStream, start: int) -> None:
        """Take a line that needs more than to be counted."""
        number, line = self.number + at + 1, self.lines[at]
        if form.slow or stream.slow or (form.stays is not None and stream.stage not in form.stays):
            self._slow(number, line, form, stream, start)
            return
        if form.told:
            self._tell(number, line[start or self.prefixes.start(line) :], stream, form.facts)
        if form.marked:
            self._mark(number, form, stream)
        step = form.step.find(line) if form.step is not None else None
        if step is not None:
            self._record_step(stream, number, line, form, step)
        stream.templates.append(form.template)
        stream.places.append(at)
        if step is not None:
            stream.shown = len(stream.templates)

    def _mark(self, number: int, form: LogLineForm, stream: LogStream) -> None:
        form.marked = self.marks.add(number, form.template, stream.number)


def _shortened(lines: list[bytes]) -> list[bytes]:
    """Leave out the middle of long lines."""
    if max(map(len, lines), default=0) <= 2 * HALF_LINE:
        return lines
    return [
        line if len(line) <= 2 * HALF_LINE else line[:HALF_LINE] + b" ... " + line[-HALF_LINE:]
        for line in lines
    ]
