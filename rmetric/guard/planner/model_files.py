"""Shapes from files: a Hugging Face config.json, Megatron arguments, or our own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from rmetric._util.strict_json import shown, why_not_read
from rmetric.guard.planner.model_shape import ModelShape

#: What each model type is where its config does not say, as transformers has it.
LLAMA: dict[str, Any] = {"gated": True}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "mistral": LLAMA,
    "mixtral": LLAMA,
    "qwen2": {**LLAMA, "qkv_bias": True},
    "qwen2_moe": {**LLAMA, "qkv_bias": True},
    "qwen3": {**LLAMA, "qk_norm": True},
    "qwen3_moe": {**LLAMA, "qk_norm": True},
    "deepseek_v2": LLAMA,
    "deepseek_v3": LLAMA,
    "gemma": {**LLAMA, "tied": True},
    "gpt2": {"gated": False, "tied": True, "biases": True},
    "gpt_neox": {"gated": False, "biases": True},
}
#: Keys of architectures that these formulas do not count.
NOT_COUNTED = {
    "block_configs": "layers that differ",
    "ssm_cfg": "state-space layers",
    "linear_num_value_heads": "linear attention",
    "encoder_layers": "an encoder",
}


def read_shape(source: Path | str | Mapping[str, Any], *, sequence: int | None) -> ModelShape:
    """See `ModelShape.from_json`."""
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
        shape = replace(
            shape, name=path.absolute().parent.name if path.stem == "config" else path.stem
        )
    return shape


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
    known = {field.name for field in fields(ModelShape)}
    if unknown := sorted(set(entry) - known):
        raise ValueError(f"unknown keys: {', '.join(unknown)}")
    heads, hidden = _number(entry, "heads"), _number(entry, "hidden")
    given = {"kv_heads": heads, "head_size": hidden // heads, **entry}
    assumed = given.get("assumed", [])
    if not isinstance(assumed, list) or not all(isinstance(each, str) for each in assumed):
        raise ValueError(f"'assumed': found {shown(assumed)}; a list of sentences is accepted")
    given["assumed"] = tuple(assumed)
    given["name"] = _name(entry, "name")
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
    given = dict(FAMILIES.get(kind, LLAMA))
    heads = _number(entry, "num_attention_heads", "n_head")
    hidden = _number(entry, "hidden_size", "n_embd")
    kv_heads = _number(entry, "num_key_value_heads", default=heads)
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
    head_size = _number(entry, "head_dim", default=hidden // heads)
    if entry.get("kv_lora_rank"):
        kv_heads = heads
        rotary = _number(entry, "qk_rope_head_dim")
        head_size = _number(entry, "qk_nope_head_dim") + rotary
        given |= {
            "kv_lora_rank": _number(entry, "kv_lora_rank"),
            "q_lora_rank": _number(entry, "q_lora_rank", default=0),
            "rope_head_size": rotary,
            "value_head_size": _number(entry, "v_head_dim"),
        }
    if entry.get("num_nextn_predict_layers"):
        assumed.append("layers that predict further tokens (num_nextn_predict_layers): none")
    return ModelShape(
        layers=_number(entry, "num_hidden_layers", "n_layer"),
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_size=head_size,
        ffn=_number(entry, "intermediate_size", "n_inner", default=4 * hidden),
        vocabulary=_number(entry, "vocab_size"),
        sequence=sequence,
        name=_name(entry, "_name_or_path"),
        assumed=tuple(assumed),
        **given,
    )


def _hugging_face_experts(entry: dict[str, Any]) -> dict[str, int]:
    experts = _number(entry, "num_local_experts", "num_experts", "n_routed_experts", default=0)
    if not experts:
        return {}
    for key in ("decoder_sparse_step", "moe_layer_freq"):
        if entry.get(key, 1) != 1:
            raise ValueError(f"{key!r} above 1: layers that differ cannot be counted")
    dense = entry.get("mlp_only_layers") or []
    if not isinstance(dense, list) or any(each not in dense for each in range(len(dense))):
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
    biases = _flag(entry, "add_bias_linear", not _flag(entry, "disable_bias_linear", False))
    learned = entry.get("position_embedding_type", "learned_absolute") == "learned_absolute"
    experts = _number(entry, "num_experts", default=0)
    if entry.get("moe_layer_freq", 1) != 1:
        raise ValueError("'moe_layer_freq' other than 1: layers that differ cannot be counted")
    given: dict[str, Any] = {}
    if experts:
        given = {
            "experts": experts,
            "experts_per_token": _number(entry, "moe_router_topk", default=2),
            "expert_ffn": _number(entry, "moe_ffn_hidden_size", default=ffn),
            "shared_expert_ffn": _number(entry, "moe_shared_expert_intermediate_size", default=0),
            "shared_expert_gate": _flag(entry, "moe_shared_expert_gate", False),
        }
    head_size = _number(entry, "kv_channels", default=hidden // heads)
    if _flag(entry, "multi_latent_attention", False):
        rotary = _number(entry, "qk_pos_emb_head_dim", default=64)
        head_size, grouped = _number(entry, "qk_head_dim", default=128) + rotary, False
        given |= {
            "kv_lora_rank": _number(entry, "kv_lora_rank", default=32),
            "q_lora_rank": _number(entry, "q_lora_rank", default=0),
            "rope_head_size": rotary,
            "value_head_size": _number(entry, "v_head_dim", default=128),
        }
    return ModelShape(
        layers=_number(entry, "num_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=groups if grouped else heads,
        head_size=head_size,
        ffn=ffn,
        vocabulary=_number(entry, "vocab_size", "padded_vocab_size"),
        sequence=_number(entry, "seq_length", "encoder_seq_length")
        if sequence is None
        else sequence,
        gated=gated,
        tied=not _flag(entry, "untie_embeddings_and_output_weights", False),
        biases=biases,
        qkv_bias=_flag(entry, "add_qkv_bias", False),
        qk_norm=_flag(entry, "qk_layernorm", False),
        dropout=_has_dropout(entry, "hidden_dropout"),
        positions=_number(entry, "max_position_embeddings") if learned else 0,
        name=_name(entry, "name"),
        **given,
    )


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


def _name(entry: dict[str, Any], key: str) -> str:
    name = entry.get(key)
    return name if isinstance(name, str) and name else "model"
