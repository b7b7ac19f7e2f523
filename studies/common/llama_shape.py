"""Shape of the model and the layouts that divide it. Needs no torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from rmetric.guard.layout import Layout


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of the model, all at least 1.

    `heads` (of queries) divide `hidden` into even parts, `kv_heads` divide `heads`; `sequence` is
    the number of tokens that a sample predicts; with `tied` the head is the embedding.
    """

    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    hidden: int = 64
    ffn: int = 172
    vocabulary: int = 256
    sequence: int = 64
    tied: bool = False

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name != "tied" and (type(value) is not int or value < 1):
                raise ValueError(f"{field.name} is {value!r}: it must be an int of at least 1")
        _divides("heads", self.heads, "hidden", self.hidden)
        _divides("kv_heads", self.kv_heads, "heads", self.heads)
        if self.head_size % 2:
            raise ValueError(
                f"hidden / heads is {self.head_size}: it must be even, as rotary positions turn "
                "pairs of entries"
            )

    @property
    def head_size(self) -> int:
        return self.hidden // self.heads

    def as_json(self) -> dict[str, Any]:
        """In the words of `rmetric.guard.planner.model_shape.ModelShape`, which reads it."""
        others = {"head_size": self.head_size, "gated": True, "name": "reference training"}
        return {**asdict(self), **others}


def feed_forward_of(hidden: int, heads: int) -> int:
    """Least width of at least 8/3 of `hidden` that is divisible like the number of heads.

    >>> feed_forward_of(64, 4), feed_forward_of(96, 6)
    (172, 258)
    """
    return heads * -(-8 * hidden // (3 * heads))


def check_layout(shape: Shape, layout: Layout) -> None:
    """Raise ValueError with all problems of this layout."""
    problems = []
    for name, value in (("heads", shape.heads), ("kv_heads", shape.kv_heads), ("ffn", shape.ffn)):
        if value % layout.tensor:
            problems.append(f"tensor is {layout.tensor}, which does not divide {name} = {value}")
    if shape.layers % layout.pipeline:
        problems.append(
            f"pipeline is {layout.pipeline}, which does not divide layers = {shape.layers}"
        )
    if shape.tied and layout.pipeline > 1:
        problems.append("a tied head needs pipeline = 1: its stages do not share weights here")
    if layout.context > 1 or layout.expert > 1:
        problems.append(
            f"context is {layout.context} and expert {layout.expert}: this model knows neither, "
            "both must be 1"
        )
    if problems:
        raise ValueError("; ".join(problems))


def _divides(name: str, value: int, of: str, whole: int) -> None:
    if whole % value:
        raise ValueError(f"{name} is {value}, which does not divide {of} = {whole}")
