"""Shape of a transformer and its parameter counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from rmetric._util.strict_json import shown


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A decoder-only transformer.

    Attributes:
        layers, hidden, heads, vocabulary: at least 1.
        kv_heads: heads of keys and values; a divisor of `heads`.
        head_size: of one head of queries and keys; `hidden / heads` by default.
        value_head_size: of one head of values; 0: as `head_size`.
        kv_lora_rank: width of the latent of keys and values in multi-head latent attention
            (DeepSeek); 0: keys and values are projected from the hidden state.
        q_lora_rank: the same of the queries; 0: they are projected from the hidden state.
        rope_head_size: with latent attention, rotary part of `head_size`, one for all heads.
        ffn: width of the feed-forward part (of a dense layer).
        sequence: tokens of one sample.
        gated: three matrices in the feed-forward part (SwiGLU) and not two.
        tied: the output matrix is the embedding.
        biases: every linear layer has one, and norms have two vectors (GPT).
        qkv_bias: only queries, keys and values have one (Qwen 2).
        qk_norm: queries and keys are normalised a head (Qwen 3).
        dropout: masks of dropout are kept for the backward pass.
        positions: learned position embeddings; 0 for rotary ones.
        experts: of a mixture-of-experts layer; 0 for a dense model.
        experts_per_token: of those, how many each token visits.
        expert_ffn: width of one expert.
        shared_expert_ffn: width of the expert that all tokens visit.
        shared_expert_gate: that expert has a gate (Qwen 2).
        dense_layers: the first layers that have no experts.
        name: for people.
        assumed: what a file did not say, in sentences.
    """

    layers: int
    hidden: int
    heads: int
    ffn: int
    vocabulary: int
    sequence: int
    kv_heads: int
    head_size: int
    gated: bool = True
    tied: bool = False
    biases: bool = False
    qkv_bias: bool = False
    value_head_size: int = 0
    kv_lora_rank: int = 0
    q_lora_rank: int = 0
    rope_head_size: int = 0
    qk_norm: bool = False
    dropout: bool = False
    positions: int = 0
    experts: int = 0
    experts_per_token: int = 0
    expert_ffn: int = 0
    shared_expert_ffn: int = 0
    shared_expert_gate: bool = True
    dense_layers: int = 0
    name: str = "model"
    assumed: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            least = 1 if field.default is MISSING else 0  # what a model need not have may be 0
            if field.type == "int" and (type(value) is not int or not least <= value < 2**63):
                raise ValueError(
                    f"{field.name} is {shown(value)}: it must be a whole number of at least "
                    f"{least}, below 2^63"
                )
            if field.type == "bool" and type(value) is not bool:
                raise ValueError(f"{field.name} is {value!r}: it must be true or false")
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads is {self.kv_heads}: it must divide the {self.heads} heads")
        if self.experts and not (0 < self.experts_per_token <= self.experts and self.expert_ffn):
            raise ValueError(
                f"{self.experts} experts need experts_per_token from 1 to {self.experts} "
                f"(found {self.experts_per_token}) and expert_ffn (found {self.expert_ffn})"
            )
        self._check_latent()
        if self.dense_layers > self.layers:
            raise ValueError(f"dense_layers is {self.dense_layers} of {self.layers} layers")

    def _check_latent(self) -> None:
        latent = (self.q_lora_rank, self.rope_head_size)
        if not self.kv_lora_rank:
            if any(latent):
                raise ValueError(
                    f"q_lora_rank and rope_head_size are {latent}: latent attention needs "
                    "kv_lora_rank"
                )
            return
        if self.kv_heads != self.heads:
            raise ValueError(
                f"kv_heads is {self.kv_heads}: latent attention has as many as {self.heads} heads"
            )
        if not self.rope_head_size < self.head_size:
            raise ValueError(
                f"rope_head_size is {self.rope_head_size}: it must be below head_size, "
                f"{self.head_size}"
            )

    @classmethod
    def gpt(
        cls, *, layers: int, hidden: int, heads: int, vocabulary: int, sequence: int, **others: Any
    ) -> ModelShape:
        """Shape of GPT-2 and GPT-3: biases, dropout, learned positions, tied output."""
        given: dict[str, Any] = {
            "layers": layers, "hidden": hidden, "heads": heads, "vocabulary": vocabulary,
            "sequence": sequence, "kv_heads": heads, "head_size": hidden // heads,
            "ffn": 4 * hidden, "gated": False, "tied": True, "biases": True, "dropout": True,
            "positions": sequence,
        }  # fmt: skip
        return cls(**given | others)

    @classmethod
    def from_json(
        cls, source: Path | str | Mapping[str, Any], *, sequence: int | None = None
    ) -> ModelShape:
        """Read a file or a mapping: a Hugging Face config.json, Megatron arguments, or our own.

        `sequence` (tokens) replaces that of the source. Raises ValueError that names the file,
        the key, the value found and those accepted.
        """
        from rmetric.guard.planner.model_files import read_shape

        return read_shape(source, sequence=sequence)

    def as_json(self) -> dict[str, Any]:
        """JSON object that `from_json` reads."""
        return {**asdict(self), "assumed": list(self.assumed)}

    @property
    def expert_layers(self) -> int:
        return self.layers - self.dense_layers if self.experts else 0

    @cached_property
    def norm_parameters(self) -> int:
        return self.hidden * (2 if self.biases else 1)

    @cached_property
    def query_width(self) -> int:
        """Width of the queries of all heads."""
        return self.heads * self.head_size

    @cached_property
    def key_width(self) -> int:
        """Width of the keys of all heads of keys."""
        return self.kv_heads * self.head_size

    @cached_property
    def value_width(self) -> int:
        """Width of the values of all heads of values."""
        return self.kv_heads * (self.value_head_size or self.head_size)

    @cached_property
    def attention_output(self) -> int:
        """Width of the attention's output before its projection."""
        return self.heads * (self.value_head_size or self.head_size)

    @cached_property
    def attention_matrices(self) -> int:
        """Parameters of the matrices of one layer's attention, without biases."""
        out = self.attention_output * self.hidden
        if not self.kv_lora_rank:
            return self.hidden * (self.query_width + self.key_width + self.value_width) + out
        up = (self.key_width - self.kv_heads * self.rope_head_size) + self.value_width
        queries = self.query_width * (self.q_lora_rank or self.hidden)
        return self.latent_projections + queries + self.kv_lora_rank * up + out

    @cached_property
    def latent_projections(self) -> int:
        """Parameters of the projections to the latents, which every GPU of a tensor group has."""
        if not self.kv_lora_rank:
            return 0
        return self.hidden * (self.q_lora_rank + self.kv_lora_rank + self.rope_head_size)

    @cached_property
    def attention_parameters(self) -> int:
        """Attention parameters of one layer: queries, keys, values, projection; no norms."""
        inner = self.query_width + self.key_width + self.value_width
        bias = inner * (self.biases or self.qkv_bias) + self.hidden * self.biases
        return self.attention_matrices + bias

    @cached_property
    def layer_norms(self) -> int:
        """Parameters of the norms of one layer, which every GPU of a tensor group has."""
        latent = self.q_lora_rank + self.kv_lora_rank
        return 2 * self.norm_parameters + 2 * self.head_size * self.qk_norm + latent

    @cached_property
    def dense_ffn_parameters(self) -> int:
        return self._ffn_parameters(self.ffn)

    @cached_property
    def experts_parameters(self) -> int:
        """Parameters of all experts of one layer."""
        return self.experts * self._ffn_parameters(self.expert_ffn)

    @cached_property
    def shared_expert_parameters(self) -> int:
        """Parameters of the shared expert, with its gate."""
        if not self.shared_expert_ffn:
            return 0
        return self._ffn_parameters(self.shared_expert_ffn) + self.hidden * self.shared_expert_gate

    @cached_property
    def router_parameters(self) -> int:
        return self.hidden * self.experts

    @cached_property
    def parameters(self) -> int:
        """All of them, without the padding that an engine adds to the vocabulary."""
        every_layer = self.attention_parameters + self.layer_norms
        expert_layer = (
            self.experts_parameters + self.shared_expert_parameters + self.router_parameters
        )
        return (
            self.layers * every_layer
            + (self.layers - self.expert_layers) * self.dense_ffn_parameters
            + self.expert_layers * expert_layer
            + self.vocabulary * self.hidden * (1 if self.tied else 2)
            + self.positions * self.hidden
            + self.norm_parameters
        )

    @cached_property
    def active_parameters(self) -> int:
        """Parameters that one token uses: all but those of the experts that it does not visit."""
        unused = self.experts - self.experts_per_token
        return self.parameters - self.expert_layers * unused * self._ffn_parameters(self.expert_ffn)

    def _ffn_parameters(self, width: int) -> int:
        matrices = 3 if self.gated else 2
        bias = (width * (matrices - 1) + self.hidden) * self.biases
        return matrices * self.hidden * width + bias
