"""Shape of a transformer, its parameter counts, and the files that it is read from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from rmetric._util.printed import printable
from rmetric._util.strict_json import shown, why_not_read


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A decoder-only transformer.

    Attributes:
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
        expert_ffn: width of one expert.
        shared_expert_ffn: width of the expert that all tokens visit.
        shared_expert_gate: that expert has a gate (Qwen 2).
        dense_layers: the first layers that have no experts.
        assumed: what a file did not state, in sentences.
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
        heads, latent = self.heads, (self.q_lora_rank, self.rope_head_size)
        if heads % self.kv_heads:
            raise ValueError(f"kv_heads is {self.kv_heads}: it must divide the {heads} heads")
        if self.experts and not (0 < self.experts_per_token <= self.experts and self.expert_ffn):
            raise ValueError(
                f"{self.experts} experts need experts_per_token from 1 to {self.experts} "
                f"(found {self.experts_per_token}) and expert_ffn (found {self.expert_ffn})"
            )
        if self.dense_layers > self.layers:
            raise ValueError(f"dense_layers is {self.dense_layers} of {self.layers} layers")
        if not self.kv_lora_rank and any(latent):
            raise ValueError(
                f"q_lora_rank and rope_head_size are {latent}: latent attention needs kv_lora_rank"
            )
        if self.kv_lora_rank and self.kv_heads != heads:
            raise ValueError(
                f"kv_heads is {self.kv_heads}: latent attention has as many as {heads} heads"
            )
        if self.kv_lora_rank and self.rope_head_size >= self.head_size:
            raise ValueError(
                f"rope_head_size is {self.rope_head_size}: it must be below head_size, "
                f"{self.head_size}"
            )

    @classmethod
    def from_json(
        cls, source: Path | str | Mapping[str, Any], *, sequence: int | None = None
    ) -> ModelShape:
        """Read a file or a mapping: a Hugging Face config.json, Megatron arguments, or our own.

        `sequence` (tokens) replaces that of the source. Raises ValueError that names the file,
        the key, the value found and those accepted.
        """
        where, entry = "model", source
        if not isinstance(source, Mapping):
            where, entry = str(source), _read(Path(source))
        if not isinstance(entry, Mapping):
            raise ValueError(f"{where}: found {shown(entry)}; a JSON object is accepted")
        try:
            shape = _shape(dict(entry), sequence)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        if shape.name == "model" and not isinstance(source, Mapping):
            path = Path(source)
            name = path.absolute().parent.name if path.stem == "config" else path.stem
            shape = replace(shape, name=name)
        return shape

    def as_json(self) -> dict[str, Any]:
        """JSON object that `from_json` reads."""
        return {**asdict(self), "assumed": list(self.assumed)}

    def __str__(self) -> str:
        active = f" ({self.active_parameters / 1e9:.2f} active)" if self.experts else ""
        return (
            f"{printable(self.name)}: {self.parameters / 1e9:.2f} billion parameters{active}, "
            f"sequence {self.sequence:,}"
        )

    def layers_of_stage(self, stages: int, stage: int) -> tuple[int, int]:
        """Dense layers and layers with experts of a stage; the first stages may have one more."""
        each, over = divmod(self.layers, stages)
        begin = stage * each + min(stage, over)
        end = begin + each + (stage < over)
        first = self.dense_layers if self.experts else self.layers
        dense = max(0, min(end, first) - begin)
        return dense, end - begin - dense

    @property
    def expert_layers(self) -> int:
        return self.layers - self.dense_layers if self.experts else 0

    @property
    def norm_parameters(self) -> int:
        return self.hidden * (2 if self.biases else 1)

    # Widths over all heads.

    @cached_property
    def query_width(self) -> int:
        return self.heads * self.head_size

    @cached_property
    def key_width(self) -> int:
        return self.kv_heads * self.head_size

    @cached_property
    def value_width(self) -> int:
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
        expert_layer = self.experts_parameters + self.router_parameters
        expert_layer += self.shared_expert_parameters
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


#: What each model type is where its config does not state it, as transformers has it.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "mixtral": {},
    "qwen2": {"qkv_bias": True},
    "qwen2_moe": {"qkv_bias": True},
    "qwen3": {"qk_norm": True},
    "qwen3_moe": {"qk_norm": True},
    "deepseek_v2": {},
    "deepseek_v3": {},
    "gemma": {"tied": True},
    "gpt2": {"gated": False, "tied": True, "biases": True},
    "gpt_neox": {"gated": False, "biases": True},
}
#: Keys of architectures that these formulas do not count.
NOT_COUNTED = {
    "block_configs": "layers that differ",
    "ssm_cfg": "state-space layers",
    "linear_num_value_heads": "linear attention",
    "encoder_layers": "an encoder",
    "multi_latent_attention": "latent attention in Megatron's arguments",
}


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: {why_not_read(error)}") from None


def _shape(entry: dict[str, Any], sequence: int | None) -> ModelShape:
    entry = {key.lstrip("-").replace("-", "_"): value for key, value in entry.items()}
    for key, what in NOT_COUNTED.items():
        if entry.get(key):
            raise ValueError(f"{key!r}: {what} cannot be counted by these formulas")
    if "layers" in entry and "heads" in entry:
        return _own(entry, sequence)
    if "num_hidden_layers" in entry or "n_layer" in entry:
        return _hugging_face(entry, sequence)
    if "num_layers" in entry:
        return _megatron(entry, sequence)
    raise ValueError(
        "no number of layers: 'num_hidden_layers' or 'n_layer' (Hugging Face), 'num_layers' "
        "(Megatron) or 'layers' (our own) is needed"
    )


def _own(entry: dict[str, Any], sequence: int | None) -> ModelShape:
    if unknown := sorted(set(entry) - {field.name for field in fields(ModelShape)}):
        raise ValueError(f"unknown keys: {', '.join(unknown)}")
    heads, hidden = _number(entry, "heads"), _number(entry, "hidden")
    given = {"kv_heads": heads, "head_size": hidden // heads, **entry}
    assumed = given.get("assumed", [])
    if not isinstance(assumed, list) or not all(isinstance(text, str) for text in assumed):
        raise ValueError(f"'assumed': found {shown(assumed)}; a list of sentences is accepted")
    given["assumed"] = tuple(assumed)
    given["name"] = str(entry.get("name") or "model")
    if sequence is not None:
        given["sequence"] = sequence
    needed = ("layers", "hidden", "ffn", "vocabulary", "sequence")
    if missing := [name for name in needed if name not in given]:
        raise ValueError(f"missing: {', '.join(missing)}")
    return ModelShape(**given)


def _hugging_face(entry: dict[str, Any], sequence: int | None) -> ModelShape:
    kind = str(entry.get("model_type", "none given"))
    assumed = []
    if kind not in FAMILIES:
        assumed.append(
            f"model type {kind!r} is not known: read as of the Llama type; "
            f"known are {', '.join(FAMILIES)}"
        )
    given = dict(FAMILIES.get(kind, {}))
    heads = _number(entry, "num_attention_heads", "n_head")
    hidden = _number(entry, "hidden_size", "n_embd")
    positions = _number(entry, "max_position_embeddings", "n_positions", default=0)
    if sequence is None:
        if not positions:
            raise ValueError("no 'max_position_embeddings' or 'n_positions': --sequence is needed")
        sequence = positions
        assumed.append(f"sequence: {positions}, the longest that the config allows")
    given["tied"] = _flag(entry, "tie_word_embeddings", given.get("tied", False))
    given["qkv_bias"] = _flag(entry, "qkv_bias", given.get("qkv_bias", False))
    if kind == "gpt2":
        given |= {"positions": positions, "dropout": _has_dropout(entry, "resid_pdrop")}
    given |= _hugging_face_experts(entry)
    given["kv_heads"] = _number(entry, "num_key_value_heads", default=heads)
    given["head_size"] = _number(entry, "head_dim", default=hidden // heads)
    if entry.get("kv_lora_rank"):
        rotary = _number(entry, "qk_rope_head_dim")
        given |= {
            "kv_heads": heads,
            "head_size": _number(entry, "qk_nope_head_dim") + rotary,
            "kv_lora_rank": _number(entry, "kv_lora_rank"),
            "q_lora_rank": _number(entry, "q_lora_rank", default=0),
            "rope_head_size": rotary,
            "value_head_size": _number(entry, "v_head_dim"),
        }
    if entry.get("num_nextn_predict_layers"):
        assumed.append("layers that predict further tokens (num_nextn_predict_layers): none")
    return ModelShape(
        layers=_number(entry, "num_hidden_layers", "n_layer"), hidden=hidden, heads=heads,
        ffn=_number(entry, "intermediate_size", "n_inner", default=4 * hidden),
        vocabulary=_number(entry, "vocab_size"), sequence=sequence,
        name=str(entry.get("_name_or_path") or "model"), assumed=tuple(assumed), **given,
    )  # fmt: skip


def _hugging_face_experts(entry: dict[str, Any]) -> dict[str, int]:
    experts = _number(entry, "num_local_experts", "num_experts", "n_routed_experts", default=0)
    if not experts:
        return {}
    for key in ("decoder_sparse_step", "moe_layer_freq"):
        if entry.get(key, 1) != 1:
            raise ValueError(f"{key!r} above 1: layers that differ cannot be counted")
    dense = entry.get("mlp_only_layers") or []
    if not isinstance(dense, list) or any(layer not in dense for layer in range(len(dense))):
        raise ValueError(f"'mlp_only_layers': {shown(dense)}; only the first layers may be dense")
    width = _number(entry, "intermediate_size")
    expert_ffn = _number(entry, "moe_intermediate_size", default=width)
    # DeepSeek counts its shared experts in widths of a routed one, and gives them no gate.
    shared = _number(entry, "n_shared_experts", default=0) * expert_ffn
    return {
        "experts": experts,
        "experts_per_token": _number(entry, "num_experts_per_tok"),
        "expert_ffn": expert_ffn,
        "shared_expert_ffn": _number(entry, "shared_expert_intermediate_size", default=shared),
        "shared_expert_gate": not shared,
        "dense_layers": len(dense) or _number(entry, "first_k_dense_replace", default=0),
    }


def _megatron(entry: dict[str, Any], sequence: int | None) -> ModelShape:
    """Arguments as Megatron-LM names them, with its defaults where they are left out."""
    heads, hidden = _number(entry, "num_attention_heads"), _number(entry, "hidden_size")
    gated = _flag(entry, "swiglu", False)
    groups = _number(entry, "num_query_groups", default=1)
    grouped = _flag(entry, "group_query_attention", groups > 1)
    ffn = int(8 * hidden / 3 / 64) * 64 if gated else 4 * hidden
    ffn = _number(entry, "ffn_hidden_size", default=ffn)
    learned = entry.get("position_embedding_type", "learned_absolute") == "learned_absolute"
    if entry.get("moe_layer_freq", 1) != 1:
        raise ValueError("'moe_layer_freq' other than 1: layers that differ cannot be counted")
    given: dict[str, Any] = {
        "kv_heads": groups if grouped else heads,
        "head_size": _number(entry, "kv_channels", default=hidden // heads),
    }
    if experts := _number(entry, "num_experts", default=0):
        given |= {
            "experts": experts,
            "experts_per_token": _number(entry, "moe_router_topk", default=2),
            "expert_ffn": _number(entry, "moe_ffn_hidden_size", default=ffn),
            "shared_expert_ffn": _number(entry, "moe_shared_expert_intermediate_size", default=0),
            "shared_expert_gate": _flag(entry, "moe_shared_expert_gate", False),
        }
    return ModelShape(
        layers=_number(entry, "num_layers"), hidden=hidden, heads=heads, ffn=ffn, gated=gated,
        vocabulary=_number(entry, "vocab_size", "padded_vocab_size"),
        sequence=sequence or _number(entry, "seq_length", "encoder_seq_length"),
        tied=not _flag(entry, "untie_embeddings_and_output_weights", False),
        biases=_flag(entry, "add_bias_linear", not _flag(entry, "disable_bias_linear", False)),
        qkv_bias=_flag(entry, "add_qkv_bias", False),
        qk_norm=_flag(entry, "qk_layernorm", False),
        dropout=_has_dropout(entry, "hidden_dropout"),
        positions=_number(entry, "max_position_embeddings") if learned else 0,
        name=str(entry.get("name") or "model"), **given,
    )  # fmt: skip


def _number(entry: dict[str, Any], *keys: str, default: int | None = None) -> int:
    """Value of the first of `keys` that exists, a whole number from 0."""
    for key in keys:
        value = entry.get(key)
        if value is None:
            continue
        if isinstance(value, str) and value.isdecimal():
            value = int(value)
        if type(value) is not int or value < 0:
            raise ValueError(f"{key!r}: found {shown(value)}; a whole number is accepted")
        if value == 0 and default != 0:
            raise ValueError(f"{key!r}: found 0; a whole number of at least 1 is accepted")
        return value
    if default is None:
        raise ValueError(f"no {' or '.join(map(repr, keys))}")
    return default


def _flag(entry: dict[str, Any], key: str, default: bool) -> bool:
    value = entry.get(key)
    if value is not None and type(value) is not bool:
        raise ValueError(f"{key!r}: found {shown(value)}; true or false is accepted")
    return default if value is None else value


def _has_dropout(entry: dict[str, Any], key: str) -> bool:
    """True if the share at `key`, 0.1 by default, is above 0."""
    value = entry.get(key)
    try:
        return value is None or float(value) > 0
    except (TypeError, ValueError):
        raise ValueError(f"{key!r}: found {shown(value)}; a number is accepted") from None
