"""What the planner reads and prints: model files, arguments of the engines, `rmetric plan`."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.planner import measure_survivors, survivor_table
from rmetric.cli.main import main
from rmetric.guard.layout import Layout
from rmetric.guard.planner import BatchSpec, PlanOptions, plan
from rmetric.guard.planner.cluster import GPUS, Cluster, place, reach
from rmetric.guard.planner.costs import activation_bytes, estimate, memory, step_flops
from rmetric.guard.planner.model_shape import ModelShape
from rmetric.guard.planner.problem import ENGINES
from rmetric.guard.planner.search import problem_of

ROOT = Path(__file__).resolve().parents[3]
LLAMA = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "vocab_size": 128256, "max_position_embeddings": 8192, "tie_word_embeddings": False,
    "_name_or_path": "Llama-3-8B",
}  # fmt: skip
#: As NVIDIA's example trains the 345 million parameters of GPT-2 (medium).
MEGATRON = {
    "--num-layers": "24", "--hidden-size": "1024", "--num-attention-heads": "16",
    "--seq-length": "1024", "--max-position-embeddings": "1024", "--vocab-size": "50257",
}  # fmt: skip


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    return path


def test_a_hugging_face_config(config):
    shape = ModelShape.from_json(config)
    assert shape.parameters == 8_030_261_248
    assert shape.name == "Llama-3-8B"
    assert shape.sequence == 8192
    assert shape.assumed == ("sequence: 8192, the longest that the config allows",)
    shorter = ModelShape.from_json(config, sequence=2048)
    assert shorter.sequence == 2048
    assert not shorter.assumed
    other = ModelShape.from_json({**LLAMA, "model_type": "new"}, sequence=1)
    assert other.assumed[0].startswith("model type 'new' is not known: read as of the Llama type")


def test_a_model_file_beside_us_has_the_name_of_its_folder(tmp_path, monkeypatch):
    (tmp_path / "tiny-llama").mkdir()
    monkeypatch.chdir(tmp_path / "tiny-llama")
    Path("config.json").write_text(json.dumps({**LLAMA, "_name_or_path": None}))
    assert ModelShape.from_json(Path("config.json")).name == "tiny-llama"


def test_megatron_arguments_are_read():
    shape = ModelShape.from_json(MEGATRON)
    assert shape.parameters == 354_823_168  # of GPT-2 medium, 50257 tokens and 1024 positions
    assert (shape.gated, shape.tied, shape.biases, shape.dropout) == (False, True, True, True)
    grouped = ModelShape.from_json(
        {
            **MEGATRON, "swiglu": True, "group_query_attention": True, "num_query_groups": 4,
            "untie_embeddings_and_output_weights": True, "add_bias_linear": False,
            "position_embedding_type": "rope", "num_experts": 8, "moe_router_topk": 2,
        }
    )  # fmt: skip
    assert (grouped.kv_heads, grouped.gated, grouped.tied, grouped.positions) == (4, True, False, 0)
    assert grouped.ffn == grouped.expert_ffn == 2688  # 8/3 h, down to a multiple of 64
    assert (grouped.experts, grouped.experts_per_token) == (8, 2)


DEEPSEEK = {
    "n_routed_experts": 4, "moe_intermediate_size": 32, "num_experts_per_tok": 2,
    "first_k_dense_replace": 1, "kv_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 20,
}  # fmt: skip
FAMILIES = {
    "llama": {}, "mistral": {}, "gemma": {}, "qwen2": {}, "qwen3": {},
    "mixtral": {"num_local_experts": 4},
    "qwen2_moe": {"num_experts": 4, "moe_intermediate_size": 32, "mlp_only_layers": [0],
                  "shared_expert_intermediate_size": 48},
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 32, "num_experts_per_tok": 2},
    "deepseek_v2": {**DEEPSEEK, "n_shared_experts": 2, "q_lora_rank": None},
    "deepseek_v3": {**DEEPSEEK, "n_shared_experts": 1, "q_lora_rank": 40, "n_group": 1,
                    "topk_group": 1},
    "gpt2": {}, "gpt_neox": {},
}  # fmt: skip


#: Types whose heads need not come to the hidden size.
OWN_HEAD_SIZE = ("llama", "mistral", "qwen3", "gemma", "qwen3_moe")


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_parameters_are_those_that_transformers_makes(kind, tied):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    sizes = {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "vocab_size": 101,
        "num_attention_heads": 4, "max_position_embeddings": 32,
    }  # fmt: skip
    if kind != "gpt_neox":
        sizes |= {"num_key_value_heads": 2, "head_dim": 24 if kind in OWN_HEAD_SIZE else 16}
    if kind == "gpt2":
        sizes = {"n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 101, "n_positions": 32}
    given = {**sizes, **FAMILIES[kind], "tie_word_embeddings": tied}
    given |= {"bos_token_id": 1, "eos_token_id": 2}
    made = transformers.AutoConfig.for_model(kind, **given)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(made)
    shape = ModelShape.from_json(json.loads(made.to_json_string()), sequence=32)
    assert shape.parameters == sum(each.numel() for each in model.parameters())


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({}, "no number of layers"),
        ({**LLAMA, "num_hidden_layers": 0}, "'num_hidden_layers': found 0"),
        ({**LLAMA, "hidden_size": -1}, "'hidden_size': found -1; a whole number is accepted"),
        ({**LLAMA, "vocab_size": None}, "no 'vocab_size'"),
        ({**LLAMA, "num_key_value_heads": 5}, "kv_heads is 5: it must divide the 32 heads"),
        ({**LLAMA, "kv_lora_rank": 512}, "no 'qk_rope_head_dim'"),
        ({**LLAMA, "kv_lora_rank": "x"}, "'qk_rope_head_dim'"),
        ({**LLAMA, "ssm_cfg": {"a": 1}}, "'ssm_cfg': state-space layers"),
        ({**LLAMA, "num_local_experts": 4}, "no 'num_experts_per_tok'"),
        ({**LLAMA, "num_local_experts": 4, "mlp_only_layers": [3]}, "only the first layers"),
        ({**LLAMA, "num_local_experts": 4, "mlp_only_layers": 3}, "'mlp_only_layers': 3"),
        ({**LLAMA, "max_position_embeddings": None}, "--sequence is needed"),
        ({**LLAMA, "tie_word_embeddings": "false"}, "found 'false'; true or false is accepted"),
        ({**LLAMA, "model_type": "gpt2", "resid_pdrop": "x"}, "'resid_pdrop': found 'x'"),
        ({**MEGATRON, "hidden_dropout": [1]}, "'hidden_dropout': found [1]; a number"),
        ({**MEGATRON, "swiglu": 1}, "'swiglu': found 1; true or false is accepted"),
        ({"layers": 2, "heads": 2, "hidden": 8, "assumed": 3}, "'assumed': found 3"),
        ({"layers": 2, "heads": 2, "hidden": 8, "colour": 1}, "unknown keys: colour"),
        ({"layers": 2, "heads": 2, "hidden": 8}, "missing: ffn, vocabulary, sequence"),
        ({**MEGATRON, "moe_layer_freq": [0, 1]}, "'moe_layer_freq' other than 1"),
        ({**MEGATRON, "multi_latent_attention": True}, "latent attention in Megatron's arguments"),
    ],
)
def test_a_model_file_that_cannot_be_used(entry, words, tmp_path):
    path = tmp_path / "model.json"
    path.write_text(json.dumps(entry))
    with pytest.raises(ValueError, match=re.escape(words)) as caught:
        ModelShape.from_json(path)
    assert str(path) in str(caught.value)


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
    **DEEPSEEK_V3, "model_type": "deepseek_v2", "hidden_size": 2048, "intermediate_size": 10944,
    "moe_intermediate_size": 1408, "num_hidden_layers": 27, "num_attention_heads": 16,
    "num_key_value_heads": 16, "n_routed_experts": 64, "n_shared_experts": 2,
    "num_experts_per_tok": 6, "first_k_dense_replace": 1, "q_lora_rank": None,
    "vocab_size": 102400, "num_nextn_predict_layers": 0,
}  # fmt: skip
MIXTRAL = {
    **LLAMA, "model_type": "mixtral", "vocab_size": 32000, "max_position_embeddings": 32768,
    "num_local_experts": 8, "num_experts_per_tok": 2, "_name_or_path": None,
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


LLAMA_70B = {
    **LLAMA, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
    "num_attention_heads": 64,
}  # fmt: skip


@pytest.mark.parametrize("engine", ["megatron", "torchtitan"])
@pytest.mark.parametrize("sequence", [2048, 4096])
@pytest.mark.parametrize(
    "config", [MIXTRAL, QWEN3_MOE, DEEPSEEK_V2_LITE, LLAMA, LLAMA_70B],
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
    for config in (MIXTRAL, LLAMA):
        model = ModelShape.from_json(config, sequence=32768)
        best = plan(model, Cluster.of([8] * 8, "h100"), BatchSpec(samples=128)).best
        assert best.layout.context > 1
        assert best.step.context > 0


def test_few_tokens_of_an_expert_wait_for_its_weights():
    """128 experts: at 512 tokens each has 32, and the GPU's memory sets the pace."""

    def waiting(config, sequence, **sizes):
        layout = Layout(**sizes)
        model = ModelShape.from_json(config, sequence=sequence)
        step = estimate(model, layout, ENGINES["megatron"], GPUS["h100"], reach((8,), layout))
        return step.weights / step.seconds

    assert waiting(QWEN3_MOE, 512) > 0.3
    assert waiting(QWEN3_MOE, 512, expert=8, data=8) < 0.1  # tokens of 8 GPUs meet at an expert
    assert waiting(LLAMA, 4096) == 0
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


def settings_of(engine, layout, recompute=False, *, layers=32, **options):
    """An engine's settings for a layout of the Llama above, of a number of layers."""
    model = ModelShape.from_json({**LLAMA, "num_hidden_layers": layers})
    batch, options = BatchSpec(samples=layout.global_batch), PlanOptions(**options)
    problem = problem_of(model, Cluster.of([8]), batch, engine, options)
    return problem.engine.settings(problem, layout, recompute)


def test_megatron_is_given():
    layout = Layout(tensor=4, pipeline=2, context=2, data=2, micro_batch=2, accumulation=8)
    cut = settings_of("megatron", layout, recompute=True)
    assert " ".join(cut.values) == (
        "--tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 "
        "--context-parallel-size 2 --expert-model-parallel-size 1 "
        "--micro-batch-size 2 --global-batch-size 32 --sequence-parallel "
        "--use-distributed-optimizer --dist-ckpt-optim-fully-reshardable "
        "--ckpt-format torch_dist "
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    )
    assert cut.text.endswith("\n  before Blackwell: export CUDA_DEVICE_MAX_CONNECTIONS=1")
    whole = settings_of("megatron", Layout(), shard_optimiser=False).values
    assert " ".join(whole) == (
        "--tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 "
        "--context-parallel-size 1 --expert-model-parallel-size 1 "
        "--micro-batch-size 1 --global-batch-size 1 --ckpt-format torch_dist"
    )
    uneven = settings_of("megatron", Layout(pipeline=3), layers=7).values
    assert uneven[-2:] == ["--pipeline-model-parallel-layout", "Ettt|tt|ttL"]


def test_torchtitan_is_given():
    layout = Layout(tensor=2, pipeline=2, data=4, replicas=2, micro_batch=2, accumulation=4)
    settings = settings_of("torchtitan", layout, recompute=True)
    assert settings.values == {
        "training": {"local_batch_size": 8, "global_batch_size": 32, "seq_len": 8192},
        "parallelism": {
            "data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 2,
            "tensor_parallel_degree": 2, "pipeline_parallel_degree": 2,
            "context_parallel_degree": 1, "expert_parallel_degree": 1,
            "pipeline_parallel_schedule": "1F1B", "pipeline_parallel_microbatch_size": 2,
            "pipeline_parallel_first_stage_less_layers": 0,
            "pipeline_parallel_last_stage_less_layers": 0,
        },
        "activation_checkpoint": {"mode": "full"},
    }  # fmt: skip
    lines = settings.text.splitlines()
    assert lines[:2] == ["  torchtitan 0.3:", "    --training.local_batch_size 8 \\"]
    assert lines[-1] == "    activation-checkpoint:full"
    assert settings.values["training"]["global_batch_size"] % (8 * layout.data) == 0
    # Without a pipeline the engine accumulates by itself.
    unpiped = settings_of("torchtitan", Layout(data=4, micro_batch=2, accumulation=4))
    assert unpiped.values["training"]["local_batch_size"] == 2


def test_meshes_of_fsdp():
    sharded = settings_of("fsdp", Layout(data=6)).values
    assert (sharded["mesh_shape"], sharded["mesh_dim_names"]) == ((6,), ("dp_shard",))
    text = settings_of("fsdp", Layout(data=6, replicas=2)).text
    assert """("cuda", (2, 3), mesh_dim_names=('dp_replicate', 'dp_shard'))""" in text


def test_torchrun_is_given_what_each_node_has():
    launches = place(Cluster.of([4, 3]), Layout(tensor=2, data=3)).launches()
    visible = "CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES="
    assert [str(each) for each in launches] == [
        f"{visible}0,1,2,3 torchrun --nnodes=2 --nproc-per-node=4 --node-rank=0 "
        "--master-addr=node0 --master-port=29500",
        f"{visible}0,1 torchrun --nnodes=2 --nproc-per-node=2 --node-rank=1 "
        "--master-addr=node0 --master-port=29500",
    ]
    alone = place(Cluster.of([4]), Layout(tensor=2)).launches()
    assert str(alone[0]) == f"{visible}0,1 torchrun --nnodes=1 --nproc-per-node=2 --standalone"


#: What the command below printed; a change of it is to be looked at.
PRINTED = Path(__file__).with_name("printed_plan.txt")


def run(config, *arguments):
    return main(["plan", "--model", str(config), *arguments])


def test_a_plan_is_printed(config, capsys):
    options = ("--gpus", "7", "--gpu", "h100", "--batch", "1024")
    assert run(config, *options, "--current", "tensor=2,data=4", "--alternatives", "1") == 0
    assert capsys.readouterr().out == PRINTED.read_text()


def test_a_plan_as_json(config, capsys):
    assert run(config, "--nodes", "a:8,b:7", "--batch", "64", "--engine", "fsdp", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    best = found["plan"]["best"]
    assert Layout.from_json(best["layout"]).global_batch == 64
    assert found["parameters"] == 8_030_261_248
    assert found["settings"]["fsdp"]["accumulation"] == best["layout"]["accumulation"]
    assert {node for node, _ in best["ranks"] + best["idle"]} == {"a", "b"}
    assert run(config, "--gpus", "7", "--batch", "1024", "--json") == 0
    assert json.loads(capsys.readouterr().out)["nearest_batch"]["layout"]["accumulation"] == 341


def test_a_gpu_that_is_dropped_is_not_started_on(config, capsys):
    arguments = ("--nodes", "8,8,8", "--without", "node1:3", "--without", "node2")
    loose = ("--gpu", "h100", "--batch", "1024", "--allow-batch-change")
    assert run(config, *arguments, *loose) == 0
    printed = capsys.readouterr().out
    assert "15 GPUs (8 + 7)" in printed
    assert "CUDA_VISIBLE_DEVICES=0,1,2,4,5,6 torchrun" in printed
    assert "node2" not in printed


def test_nothing_fits(config, capsys):
    assert run(config, "--gpus", "7", "--gpu-memory", "40", "--batch", "1024") == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "Nothing fits. Binding constraint: memory: the smallest layout (TP4 x PP1 x D" in printed
    assert "--uneven-stages: TP1 x PP7 x DP1, batch 1024 = 1 x 1024 x 1 fits" in printed
    assert run(config, "--gpus", "0", "--batch", "8") == 1
    assert "no GPU is left" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--gpus", "8", "--batch", "0"], "the batch is 0"),
        (["--nodes", "a:4,a:4", "--batch", "8"], "two nodes have one name"),
        (["--gpus", "8", "--batch", "8", "--gpu-memory", "0"], "memory is 0"),
        (["--gpus", "9" * 12, "--batch", "8"], "more than 65,536 GPUs"),
        (["--gpus", "8", "--batch", "8", "--without", "b"], "--without: no node 'b'"),
        (["--gpus", "8", "--batch", "8", "--without", "node0:8"], "not [8]"),
        (["--gpus", "8", "--batch", "9" * 400], "999...: a whole number from 0 is accepted, below"),
        (["--nodes", "8,x", "--batch", "8"], "8,7,8 or a:8,b:7"),
        (["--gpus", "8", "--batch", "8", "--current", "2,1"], "NAME=N"),
        (["--gpus", "8", "--batch", "8", "--without", "node0:"], "as in node1:3,5"),
        (["--gpus", "8", "--batch", "8", "--tensor", "0"], "whole numbers from 1"),
        (["--gpus", "8", "--nodes", "8", "--batch", "8"], "not allowed with"),
    ],
)
def test_a_wrong_question(config, refused, arguments, words):
    assert words in refused("plan", "--model", config, *arguments)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot be read (No such file or directory)"),
        ("{", "not JSON"),
        ('{"layers": %s}' % ("9" * 5_000), "a number has thousands of digits"),
        ("\xff", "not JSON"),
        ("3", "found 3; a JSON object is accepted"),
    ],
)
def test_an_unreadable_model_file(tmp_path, refused, content, words):
    path = tmp_path / "model.json"
    if content is not None:
        path.write_text(content, encoding="latin-1")
    error = refused("plan", "--model", path, "--gpus", "8", "--batch", "8")
    assert error == f"error: {path}: {words}\n"


def test_the_page_says_what_was_measured():
    page = (ROOT / "docs" / "planner.md").read_text()
    results = json.loads((ROOT / "results" / "benchmarks" / "planner.json").read_text())
    measured = results["measured"]
    for run_ in measured["runs"]:
        row = (
            f"| {run_['billions']:g} billion | {run_['gpus']} | {run_['layout']} | "
            f"{run_['published']} | {run_['estimated']:.0f} | {run_['ratio']:.2f} |"
        )
        assert row in page, row
    survivors = measure_survivors()
    assert survivor_table(survivors) in page
    lost_of_8 = next(row for row in survivors if (row["gpus"], row["batch"]) == (8, 1024))
    steps = [f"{lost_of_8[name]['step']:.2f}" for name in ("uneven", "changed", "even")]
    findings = " ".join((ROOT / "docs/findings.md").read_text().split())
    assert "a step takes {} or {} times as long instead of {}".format(*steps) in findings
    for engine in ("megatron", "torchtitan", "fsdp"):
        kept = measured[f"{engine}_70B_1023_gpus_ms"]
        may_change = measured[f"{engine}_70B_1023_gpus_batch_may_change_ms"]
        assert f"| {engine} | {kept:.0f} ms | {may_change:.0f} ms |" in page
