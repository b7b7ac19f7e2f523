"""Provenance of results: the commit and the versions of packages."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path

import rmetric


def commit() -> str | None:
    """The commit of the checkout that this code runs from; None where there is none."""
    return _git("rev-parse", "HEAD")


def uncommitted_changes() -> bool | None:
    """True if files of the package or of a study differ from the commit; None without one."""
    code = [":(top,glob)rmetric/**", ":(top,glob)studies/**/*.py"]
    answer = _git("status", "--porcelain", "--untracked-files=no", "--", *code)
    return None if answer is None else bool(answer)


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Versions of rmetric, of Python and of packages."""
    own = {"rmetric": rmetric.__version__, "python": platform.python_version()}
    return own | {name: version(name) for name in packages}


def _git(*arguments: str) -> str | None:
    try:
        answer = subprocess.run(
            ["git", *arguments],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return answer.stdout.strip()
