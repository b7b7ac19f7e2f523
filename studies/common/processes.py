"""`map` in worker processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

Result = TypeVar("Result")


def mapped(
    function: Callable[..., Result], *arguments: Iterable[Any], processes: int
) -> list[Result]:
    """The results in the order of the arguments, as `map` has them."""
    from joblib import Parallel

    from rmetric._util.workers import delayed

    return list(Parallel(n_jobs=processes)(map(delayed(function), *arguments)))
