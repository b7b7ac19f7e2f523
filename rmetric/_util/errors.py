"""The error of a log that cannot be read."""

from __future__ import annotations

from pathlib import Path


class LogError(ValueError):
    """A log that cannot be read; says which file, which line and what was found."""

    def __init__(self, path: Path | str, line: int | None, problem: str) -> None:
        self.path, self.line, self.problem = Path(path), line, problem
        where = f"{path}, line {line}" if line else f"{path}"
        super().__init__(f"{where}: {problem}")
