"""A small Llama: RMSNorm before each block, rotary positions, grouped queries, SwiGLU.

Written to be cut up. Any run of its layers is a module of its own whose parameters keep
their names in the whole model, so a pipeline's stages and one process's model write the
same checkpoint; and no layer asks how many heads there are before it is called, so a
tensor-parallel rank may hold only some of them.

Shapes: B samples, S positions, V vocabulary, D hidden, N heads, K key and value heads,
H a head's size, F the feed-forward's size.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn
from torch.nn import functional

from studies.common.llama_shape import Shape

WEIGHTS_DEVIATION = 0.02
ROTARY_BASE = 10_000.0
NORM_EPSILON = 1e-5


class Attention(nn.Module):
    """Causal attention in which N heads of queries share K heads of keys and values."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_size = shape.head_size
        keys = shape.kv_heads * shape.head_size
        self.q = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.k = nn.Linear(shape.hidden, keys, bias=False)
        self.v = nn.Linear(shape.hidden, keys, bias=False)
        self.o = nn.Linear(shape.hidden, shape.hidden, bias=False)

    def forward(self, x_BSD: Tensor, rotary_SH: tuple[Tensor, Tensor]) -> Tensor:
        q_BNSH, k_BKSH, v_BKSH = (
            self._heads(project(x_BSD)) for project in (self.q, self.k, self.v)
        )
        mixed_BNSH = functional.scaled_dot_product_attention(
            rotated(q_BNSH, *rotary_SH),
            rotated(k_BKSH, *rotary_SH),
            v_BKSH,
            is_causal=True,
            enable_gqa=True,
        )
        out: Tensor = self.o(mixed_BNSH.transpose(1, 2).flatten(2))
        return out

    def _heads(self, projected: Tensor) -> Tensor:
        return projected.unflatten(2, (-1, self.head_size)).transpose(1, 2)


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.hidden, shape.ffn, bias=False)
        self.up = nn.Linear(shape.hidden, shape.ffn, bias=False)
        self.down = nn.Linear(shape.ffn, shape.hidden, bias=False)

    def forward(self, x_BSD: Tensor) -> Tensor:
        out: Tensor = self.down(functional.silu(self.gate(x_BSD)) * self.up(x_BSD))
        return out


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.hidden, eps=NORM_EPSILON)
        self.attention = Attention(shape)
        self.feed_forward_norm = nn.RMSNorm(shape.hidden, eps=NORM_EPSILON)
        self.feed_forward = FeedForward(shape)

    def forward(self, x_BSD: Tensor, rotary_SH: tuple[Tensor, Tensor]) -> Tensor:
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD), rotary_SH)
        out: Tensor = x_BSD + self.feed_forward(self.feed_forward_norm(x_BSD))
        return out


class Llama(nn.Module):
    """Layers of one pipeline stage (from 0, of `stages`); with a single stage the whole model.

    The first stage takes tokens, shape (B, S); the last one gives logits, shape (B, S, V);
    between them go hidden states, shape (B, S, D).
    """

    def __init__(self, shape: Shape, stage: int = 0, stages: int = 1) -> None:
        super().__init__()
        each = shape.layers // stages
        first, last = stage == 0, stage == stages - 1
        self.embedding = nn.Embedding(shape.vocabulary, shape.hidden) if first else None
        self.layers = nn.ModuleDict(
            {str(number): Layer(shape) for number in range(stage * each, (stage + 1) * each)}
        )
        self.norm = nn.RMSNorm(shape.hidden, eps=NORM_EPSILON) if last else None
        self.head = nn.Linear(shape.hidden, shape.vocabulary, bias=False) if last else None
        self.tied = shape.tied
        self.tie()
        for name, table in zip(("cosine", "sine"), rotary_tables(shape), strict=True):
            self.register_buffer(name, table, persistent=False)

    def tie(self) -> None:
        """Let the head be the embedding, if it is to be: again after either was replaced."""
        if self.tied and self.head is not None and self.embedding is not None:
            self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        for layer in self.layers.values():
            x = layer(x, (self.cosine, self.sine))
        if self.norm is not None and self.head is not None:
            x = self.head(self.norm(x))
        return x


def rotary_tables(shape: Shape) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the angles, each of shape (S, H)."""
    halves = torch.arange(0, shape.head_size, 2, dtype=torch.float64) / shape.head_size
    positions = torch.arange(shape.sequence, dtype=torch.float64)
    angles = torch.outer(positions, ROTARY_BASE**-halves).repeat(1, 2)
    return angles.cos().to(torch.get_default_dtype()), angles.sin().to(torch.get_default_dtype())


def rotated(x: Tensor, cosine_SH: Tensor, sine_SH: Tensor) -> Tensor:
    """`x`, shape (B, heads, S, H), with each pair of its entries turned by its position."""
    low, high = x.chunk(2, dim=-1)
    return x * cosine_SH + torch.cat((-high, low), dim=-1) * sine_SH


@torch.no_grad()
def initialise(model: Llama, shape: Shape, seed: int) -> None:
    """Fill each parameter from the seed and its own name: a stage gets what the whole would."""
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            parameter.fill_(1.0)
            continue
        # What adds to the residual stream is smaller, the more layers add to it (GPT-2).
        adds = name.endswith(("attention.o.weight", "feed_forward.down.weight"))
        deviation = WEIGHTS_DEVIATION / (2 * shape.layers) ** 0.5 if adds else WEIGHTS_DEVIATION
        digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
        parameter.copy_(drawn * deviation)
