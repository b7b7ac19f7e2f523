"""Published models of other architectures: parameters by their config files, and plans of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rmetric.guard.layout import Layout
from rmetric.guard.planner import BatchSpec, plan
from rmetric.guard.planner.cluster import Cluster
from rmetric.guard.planner.costs import activation_bytes, memory, step_flops
from rmetric.guard.planner.model_shape import ModelShape
from rmetric.guard.planner.problem import ENGINES

#: Sizes as the models' published config.json files have them.
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432,
    "moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_attention_heads": 128,
    "num_key_value_heads": 128, "n_routed_experts": 256, "n_shared_experts": 1,
    "num_experts_per_tok": 8, "first_k_dense_replace": 3, "moe_layer_freq": 1,
    "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "vocab_size": 129280, "max_position_embeddings": 163840,
    "num_nextn_predict_layers": 1, "tie_word_embeddings": False, "attention_bias": False,
}  # fmt: skip
DEEPSEEK_V2_LITE = {
    "model_type": "deepseek_v2", "hidden_size": 2048, "intermediate_size": 10944,
    "moe_intermediate_size": 1408, "num_hidden_layers": 27, "num_attention_heads": 16,
    "num_key_value_heads": 16, "n_routed_experts": 64, "n_shared_experts": 2,
    "num_experts_per_tok": 6, "first_k_dense_replace": 1, "moe_layer_freq": 1,
    "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "vocab_size": 102400, "max_position_embeddings": 163840,
    "tie_word_embeddings": False,
}  # fmt: skip
MIXTRAL = {
    "model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "vocab_size": 32000, "max_position_embeddings": 32768, "num_local_experts": 8,
    "num_experts_per_tok": 2, "tie_word_embeddings": False,
}  # fmt: skip
QWEN3_MOE = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144,
    "moe_intermediate_size": 768, "num_hidden_layers": 48, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936,
    "max_position_embeddings": 40960, "num_experts": 128, "num_experts_per_tok": 8,
    "tie_word_embeddings": False,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "parameters", "active"),
    [
        (DEEPSEEK_V3, 671.03, 37.55),
        (DEEPSEEK_V2_LITE, 15.71, 2.66),
        (MIXTRAL, 46.70, 12.88),
        (QWEN3_MOE, 30.53, 3.35),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_parameters_of_mixtures_of_experts(config, parameters, active):
    """Published: 671 and 37, 15.7 and 2.4 without its embeddings, 46.7 and 12.9, 30.5 and 3.3."""
    model = ModelShape.from_json(config)
    assert round(model.parameters / 1e9, 2) == parameters
    assert round(model.active_parameters / 1e9, 2) == active
    assert ModelShape.from_json(model.as_json()) == model


LLAMA_8B = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "vocab_size": 128256, "max_position_embeddings": 8192,
}  # fmt: skip
LLAMA_70B = {
    **LLAMA_8B, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
    "num_attention_heads": 64,
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("engine", ["megatron", "torchtitan"])
@pytest.mark.parametrize("sequence", [2048, 4096])
@pytest.mark.parametrize(
    "config", [MIXTRAL, QWEN3_MOE, DEEPSEEK_V2_LITE, LLAMA_8B, LLAMA_70B],
    ids=["mixtral", "qwen3_moe", "deepseek_v2_lite", "8B", "70B"],
)  # fmt: skip
def test_short_sequences_are_not_cut(config, sequence, engine):
    model = ModelShape.from_json(config, sequence=sequence)
    for nodes in (2, 8):
        for samples in (128, 1024):
            cluster = Cluster.of([8] * nodes, "h100")
            best = plan(model, cluster, BatchSpec(samples=samples), engine=engine).best
            assert best.layout.context == 1, best.layout


def test_long_sequences_are_cut_where_it_counts():
    for config in (MIXTRAL, LLAMA_8B):
        model = ModelShape.from_json(config, sequence=32768)
        best = plan(model, Cluster.of([8] * 8, "h100"), BatchSpec(samples=128)).best
        assert best.layout.context > 1
        assert best.step.context > 0


def test_few_tokens_of_an_expert_wait_for_its_weights():
    """128 experts: at 512 tokens each has 32, and the GPU's memory sets the pace."""
    from rmetric.guard.planner.cluster import GPUS, reach
    from rmetric.guard.planner.costs import estimate

    def waiting(config, sequence, **sizes):
        layout = Layout(**sizes)
        model = ModelShape.from_json(config, sequence=sequence)
        step = estimate(
            model, layout, ENGINES["megatron"], GPUS["h100"], reach((8,), layout)
        )  # fmt: skip
        return step.weights / step.seconds

    assert waiting(QWEN3_MOE, 512) > 0.3
    assert waiting(QWEN3_MOE, 512, expert=8, data=8) < 0.1  # tokens of 8 GPUs meet at an expert
    assert waiting(LLAMA_8B, 4096) == 0
    assert waiting(QWEN3_MOE, 4096, context=4) > waiting(QWEN3_MOE, 4096)


def test_latent_attention_costs_what_its_matrices_do():
    model = ModelShape.from_json(DEEPSEEK_V3, sequence=4096)
    # By hand: queries 1536 x 24576, keys and values 512 x 32768, output 16384 x 7168, latents.
    matrices = 7168 * (1536 + 512 + 64) + 1536 * 24576 + 512 * 32768 + 16384 * 7168
    assert model.attention_matrices == matrices
    scores = 2 * 4096 * (128 * 192 + 128 * 128)
    dense = 2 * matrices + scores + 6 * 7168 * 18432
    mixed = 2 * matrices + scores + 6 * 7168 * 2048 * 9 + 2 * 7168 * 256
    total = 3 * 4096 * (3 * dense + 58 * mixed + 2 * 7168 * 129280)
    assert step_flops(model, 1) == pytest.approx(total)
    kept, _ = activation_bytes(model)
    width = 2 * (2 * 24576 + 2 * 16384 + 2 * (1536 + 512) + 64)
    assert kept == 8 * 7168 + width + 6 * 18432
    # The projections to the latents are on every GPU of a tensor group.
    whole, split = (
        memory(replace(model, vocabulary=1), Layout(tensor=t), ENGINES["megatron"]).weights
        for t in (1, 8)
    )
    latents = 2 * 61 * 7168 * (1536 + 512 + 64)
    assert split - whole / 8 > 7 / 8 * latents
