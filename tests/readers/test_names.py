"""Names that training programs give to their columns, and names that must not be mistaken."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmetric.readers import LogError, UnknownFormat
from rmetric.readers.columns import Columns, choose_columns, find_column, suggestions
from rmetric.readers.names import TARGETS, meaning, plain_name
from tests.readers import test_formats as formats
from tests.readers.test_formats import lines, only

#: Program -> the columns that it logs together, and which of them is what. Columns named None
#: must not be taken for any of the targets below.
PROGRAMS: dict[str, tuple[dict[str, str], str]] = {
    "stable-baselines3, csv": (
        {"step": "time/total_timesteps", "loss": "train/loss",
         "learning_rate": "train/learning_rate"},
        "time/iterations;time/fps;train/n_updates;train/value_loss;rollout/ep_len_mean",
    ),
    # program: ({target: column}, other columns separated by ";")
    "Hugging Face Trainer": (
        {"loss": "loss", "grad_norm": "grad_norm", "learning_rate": "learning_rate",
         "eval_loss": "eval_loss", "step": "step"},
        "epoch;eval_runtime;eval_samples_per_second;total_flos",
    ),
    "Hugging Face Trainer on W&B": (
        {"loss": "train/loss", "grad_norm": "train/grad_norm", "eval_loss": "eval/loss",
         "learning_rate": "train/learning_rate", "step": "train/global_step"},
        "train/epoch;_step;eval/runtime;eval/samples_per_second",
    ),
    "TRL SFT": (
        {"loss": "loss", "grad_norm": "grad_norm", "learning_rate": "learning_rate",
         "step": "step"},
        "num_tokens;mean_token_accuracy;entropy;aux_loss",
    ),
    "TRL DPO": (
        {"loss": "loss", "grad_norm": "grad_norm", "step": "step"},
        "rewards/chosen;rewards/margins;logps/rejected;nll_loss;logits/chosen",
    ),
    "Axolotl": (
        {"loss": "train/loss", "eval_loss": "eval/loss", "grad_norm": "train/grad_norm"},
        "train/ppl;eval/ppl;train/tokens_per_second_per_gpu;train/memory/max_active (GiB)",
    ),
    "LLaMA-Factory": (
        {"step": "current_steps", "loss": "loss", "learning_rate": "lr", "eval_loss": "eval_loss"},
        "total_steps;epoch;percentage;elapsed_time;remaining_time;throughput;total_tokens",
    ),
    "ms-swift": (
        {"step": "global_step/max_steps", "loss": "loss", "grad_norm": "grad_norm",
         "learning_rate": "learning_rate", "eval_loss": "eval_loss"},
        "token_acc;memory(GiB);train_speed(iter/s);epoch;percentage;eval_token_acc",
    ),
    "torchtitan": (
        {"loss": "loss_metrics/global_avg_loss", "grad_norm": "grad_norm", "learning_rate": "lr",
         "eval_loss": "validation_metrics/loss"},
        "loss_metrics/global_max_loss;throughput(tps);tflops;mfu(%);time_metrics/data_loading(s)"
        ";time_metrics/end_to_end(s);memory/max_active(GiB);memory/num_ooms",
    ),
    "OLMo": (
        {"loss": "train/CrossEntropyLoss", "grad_norm": "optim/total_grad_norm",
         "learning_rate": "optim/learning_rate_group0"},
        "train/Perplexity;optim/learning_rate_group1;optim/clipping_rate"
        ";grad/transformer.wte.weight.norm;param/transformer.wte.weight.norm"
        ";throughput/device/tokens_per_second;optim/total_param_norm_max",
    ),
    "OLMo-core": (
        {"loss": "train/CE loss", "grad_norm": "optim/total grad norm",
         "learning_rate": "optim/LR (group 0)"},
        "train/PPL;train/Z loss;train/load balancing loss;train/router Z loss;optim/LR (group 1)"
        ";throughput/device/TPS;eval/downstream/hellaswag (soft loss v2);optim/step skipped",
    ),
    "verl RL with a total": (
        {"loss": "actor/loss", "grad_norm": "actor/grad_norm", "learning_rate": "actor/lr",
         "step": "training/global_step"},
        "actor/pg_loss;actor/kl_loss;actor/entropy_loss;critic/vf_loss;critic/grad_norm;critic/lr"
        ";actor/pg_clipfrac;perf/throughput;response_length/mean;training/epoch",
    ),
    "verl SFT": (
        {"loss": "train/loss", "grad_norm": "train/grad_norm", "eval_loss": "val/loss"},
        "train/lr(1e-3);train/time(s)",
    ),
    "NeMo": (
        {"loss": "reduced_train_loss", "grad_norm": "grad_norm", "learning_rate": "lr",
         "eval_loss": "val_loss", "step": "global_step"},
        "consumed_samples;train_step_timing in s;epoch",
    ),
    "Megatron-LM": (
        {"loss": "lm loss", "grad_norm": "grad-norm", "learning_rate": "learning-rate",
         "eval_loss": "lm loss validation", "parameter_norm": "params-norm",
         "loss_scale": "loss-scale"},
        "lm loss vs samples;grad-norm vs samples;learning-rate vs samples;lm loss validation ppl"
        ";lm loss validation vs samples;load_balancing_loss;mtp_1 loss;batch-size;iteration-time",
    ),
    "Megatron-DeepSpeed": (
        {"loss": "lm-loss-training/lm loss", "grad_norm": "grad-norm/grad-norm",
         "learning_rate": "learning-rate/learning-rate",
         "eval_loss": "lm-loss-validation/lm loss validation"},
        "lm-loss-training/lm loss vs tokens;grad-norm/grad-norm vs tokens;num-zeros/num-zeros"
        ";lm-loss-validation/lm loss validation ppl;iteration-time/samples per second",
    ),
    "GPT-NeoX": (
        {"loss": "train/lm_loss", "eval_loss": "validation/lm_loss",
         "learning_rate": "train/learning_rate"},
        "test/lm_loss;runtime/samples_per_sec;runtime/iteration_time;validation/lm_loss_ppl",
    ),
    "DeepSpeed": (
        {"loss": "Train/Samples/train_loss", "learning_rate": "Train/Samples/lr"},
        "Train/Samples/elapsed_time_ms_forward",
    ),
    "Lightning": (
        {"loss": "train_loss_step", "eval_loss": "val_loss", "learning_rate": "lr-AdamW/pg1",
         "grad_norm": "grad_2.0_norm_total", "step": "step"},
        "train_loss_epoch;grad_2.0_norm/model.embed.weight;lr-AdamW/pg2;epoch",
    ),
    "Composer": (
        {"loss": "loss/train/total", "eval_loss": "metrics/eval/LanguageCrossEntropy",
         "grad_norm": "l2_norm/grad/global", "learning_rate": "lr-DecoupledAdamW/group0"},
        "metrics/train/LanguagePerplexity;l2_norm/grad/model.transformer.wte.weight"
        ";l2_norm/moment/model.transformer.wte.weight;throughput/tokens_per_sec;time/token",
    ),
    "fairseq": (
        {"loss": "train_loss", "grad_norm": "train_gnorm", "learning_rate": "train_lr",
         "eval_loss": "valid_loss", "step": "train_num_updates"},
        "train_nll_loss;train_ppl;train_wps;train_ups;train_clip;valid_nll_loss;valid_best_loss"
        ";valid_num_updates",
    ),
    "nanoGPT": (
        {"step": "iter", "loss": "train/loss", "eval_loss": "val/loss", "learning_rate": "lr"},
        "mfu",
    ),
    "levanter": (
        {"loss": "train/loss", "eval_loss": "eval/loss", "grad_norm": "grad/norm/total",
         "learning_rate": "optim/learning_rate", "parameter_norm": "params/norm/total",
         "update_norm": "updates/norm/total", "step": "global_step"},
        "eval/c4/loss;eval/pile/loss;grad/norm/transformer.layers.0.mlp;throughput/tokens_per_second"
        ";params/norm/embeddings;train/z_loss",
    ),
    "MaxText": (
        {"loss": "learning/loss", "grad_norm": "learning/raw_grad_norm",
         "learning_rate": "learning/current_learning_rate", "eval_loss": "eval/avg_loss",
         "parameter_norm": "learning/param_norm"},
        "learning/grad_norm;learning/moe_lb_loss;learning/mtp_loss;learning/total_weights"
        ";perf/step_time_seconds;perf/per_device_tokens_per_sec;eval/total_loss_weights",
    ),
    "nanotron": (
        {"loss": "lm_loss", "grad_norm": "grad_norm", "learning_rate": "lr",
         "step": "iteration_step"},
        "tokens_per_sec;consumed_tokens;elapsed_time_per_iteration_ms;model_tflops_per_gpu",
    ),
    "lingua": (
        {"loss": "loss/out", "grad_norm": "optim/grad_norm", "learning_rate": "optim/lr",
         "step": "global_step"},
        "acc_step;speed/wps;speed/FLOPS;memory/max_active_pct",
    ),
    "fairseq2": (
        {"loss": "Loss (ce)", "grad_norm": "Gradient Norm", "learning_rate": "Learning Rate"},
        "Elements per Second;Loss (nll) min",
    ),
    "torchtune": (
        {"loss": "loss", "grad_norm": "grad_norm", "learning_rate": "lr", "eval_loss": "val_loss"},
        "tokens_per_second_per_gpu;peak_memory_active",
    ),
    "T5X": (
        {"loss": "train/cross_ent_loss", "grad_norm": "train/grad_norm",
         "learning_rate": "train/learning_rate"},
        "train/z_loss;train/cross_ent_loss_per_all_target_tokens;timing/seconds_per_step",
    ),
    "big_vision": (
        {"loss": "training_loss", "grad_norm": "l2_grads", "parameter_norm": "l2_params",
         "update_norm": "l2_updates"},
        "img/sec/core;epoch;uptime",
    ),
    "detectron2": (
        {"loss": "total_loss", "learning_rate": "lr", "step": "iteration"},
        "loss_cls;loss_box_reg;loss_rpn_cls;data_time;eta_seconds",
    ),
    "NeMo-RL": (
        {"loss": "train/loss", "grad_norm": "train/grad_norm", "learning_rate": "train/lr",
         "eval_loss": "validation/val_loss"},
        "train/kl_penalty;train/probs_ratio;train/reward;timing/train/total_step_time",
    ),
    "own loop, before and after clipping": (
        {"loss": "loss", "grad_norm": "grad_norm_before_clip", "step": "step"},
        "grad_norm_after_clip;grad_norm_before_clip_p90;grad_norm_before_clip_max;gradient_clip",
    ),
}  # fmt: skip
COMPARED = (
    "step", "loss", "eval_loss", "grad_norm", "learning_rate", "parameter_norm", "update_norm",
    "loss_scale",
)  # fmt: skip


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("backwards", [False, True])
def test_what_programs_log_is_recognised(program, backwards):
    expected, others = PROGRAMS[program]
    names = [*expected.values(), *others.split(";")]
    found = choose_columns(names[::-1] if backwards else names, {}).by_target
    compared = {target: column for target, column in found.items() if target in COMPARED}
    if "step" not in expected:  # an epoch or W&B's counter will do
        compared.pop("step", None)
    assert compared == expected


FOLDERS = ("", "train/", "metrics/", "optim/", "actor/", "training/", "trainer/", "model/",
           "metrics.train.", "Train ", "stats/optimizer/")  # fmt: skip


GRADIENT_NORMS = (
    "grad_norm", "gradient_norm", "gradNorm", "norm/grad", "global_grad_norm", "Gradient Norm",
    "total_gradient_norm", "grad-norm", "gnorm", "grads_norm", "grad_norm/total", "gradnorm",
    "grad_l2_norm", "grad_norm_before_clipping", "grad_norm_unclipped",
)  # fmt: skip


@pytest.mark.parametrize("name", GRADIENT_NORMS)
def test_a_gradient_norm_is_one_in_any_folder(name):
    for folder in FOLDERS:
        columns = choose_columns(["step", "loss", f"{folder}{name}"], {}).by_target
        assert columns.get("grad_norm") == f"{folder}{name}"


#: Target -> what stands beside it, folders, and names of other things: a clipped one, a part, a
#: statistic, a setting.
OTHERS = {
    "grad_norm": ("loss", FOLDERS, (
        "grad_norm_clipped", "grad_norm_max", "grad_norm_min", "grad_norm_p99", "grad_norm_std",
        "grad_norm_var", "grad_norm/layers.0.attn", "layers.3/grad_norm", "critic_grad_norm",
        "grad_norm_clip", "max_grad_norm", "clip_grad_norm", "grad_norm_threshold",
        "grad_norm_count", "num_grad_norm_spikes", "grad_norm_ratio", "grad_norm_ema",
        "embedding_grad_norm", "lm_head/grad_norm", "grad_norm_after_clip", "post_clip_grad_norm",
        "grad_norm_rank3", "grad_norm vs samples", "grad_scale", "grad_accum_steps", "batch_norm",
        "norm", "rms_norm", "grad_norm_limit", "grad_norm_3", "weight_norm/grad_ratio",
        "grad_norm_router")),
    "loss": ("accuracy", ("", "train/", "actor/", "metrics/", "stats."), (
        "pg_loss", "policy_loss", "value_loss", "vf_loss", "entropy_loss", "kl_loss", "aux_loss",
        "z_loss", "moe_lb_loss", "load_balancing_loss", "mtp_loss", "loss_scale", "loss_std",
        "loss_max", "max_loss", "best_loss", "loss_p95", "loss_spike_count", "num_loss_tokens",
        "loss_mask_ratio", "loss_weight", "loss_ema_diff", "router_z_loss", "test_loss",
        "loss_var", "critic/loss", "clip_loss_frac", "entropy", "ppl")),
    "learning_rate": ("loss", ("",), (
        "min_lr", "max_lr", "base_lr", "lr_scale", "lr_decay_rate", "lr_mult", "critic/lr",
        "train/lr(1e-3)", "initial_lr", "lr_warmup_steps", "dropout_rate", "optim/clipping_rate",
        "learning_rate_ratio", "lr vs samples")),
    "eval_loss": ("loss", ("",), (
        "eval_best_loss", "best_val_loss", "lowest_val_loss", "val_loss_std", "eval/aux_loss",
        "eval_loss_min", "val_policy_loss")),
}  # fmt: skip


@pytest.mark.parametrize(("target", "name"), [(t, n) for t in OTHERS for n in OTHERS[t][2]])
def test_what_is_called_alike_and_is_another_thing_is_not_taken(target, name):
    beside, folders, _ = OTHERS[target]
    for folder in folders:
        columns = choose_columns(["step", beside, f"{folder}{name}"], {})
        assert target not in columns.by_target
        assert target != "loss" or not columns.has_loss


@pytest.mark.parametrize(
    ("target", "first", "second"),
    [
        ("eval_loss", "eval_c4_loss", "eval_pile_loss"),
        ("grad_norm", "actor/grad_norm", "model/grad_norm"),
    ],
)
def test_of_two_columns_that_fit_alike_none_is_taken(target, first, second):
    columns = choose_columns(["step", "loss", first, second], {})
    assert target not in columns.by_target
    assert f"{first!r}, {second!r} could each be {target}" in " ".join(columns.notes)


def test_of_evaluation_losses_of_several_data_sets_the_one_of_all_is_taken():
    columns = choose_columns(["step", "loss", "eval/c4/loss", "eval/loss", "eval/pile/loss"], {})
    assert columns.by_target["eval_loss"] == "eval/loss"


@given(st.lists(st.text("abgnorm_/.0", min_size=1, max_size=12), max_size=8, unique=True),
       st.randoms())  # fmt: skip
def test_no_column_is_taken_twice_and_the_order_does_not_matter(names, random):
    names = [*names, "loss", "optim/grad_norm"]
    found = choose_columns(names, {}).by_target
    assert len(set(found.values())) == len(found)
    random.shuffle(names)
    again = choose_columns(names, {}).by_target
    assert {t: found.get(t) for t in COMPARED} == {t: again.get(t) for t in COMPARED}


def test_names_and_words_that_mean_something_are_written_as_they_are_compared():
    for target in TARGETS.values():
        for name in target.names:
            assert plain_name(name) == name
        for core in target.core:
            assert core == frozenset().union(*(meaning(word) for word in core))


def read(tmp_path, entries, **mapping):
    return only(formats.read(tmp_path, lines(entries), "log.jsonl", **mapping))


@pytest.mark.parametrize("column", ["a.b.ce", "a/b/ce", "a.b/ce"])
@pytest.mark.parametrize("nested", [True, False])
def test_a_map_takes_nested_and_dotted_names(tmp_path, column, nested):
    entries = [
        {"step": n, "a": {"b": {"ce": 2.0 + n}}} if nested else {"step": n, "a.b.ce": 2.0 + n}
        for n in range(3)
    ]
    run = read(tmp_path, entries, loss=column)
    assert [record.training_loss for record in run.records] == [2.0, 3.0, 4.0]


def test_a_map_of_two_columns_with_one_path_or_of_none_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"'a.b' is 'a/b', 'a//b': write one of these"):
        find_column(["a/b", "a//b"], "a.b")
    assert find_column(["a/b", "a.b"], "a.b") == "a.b"
    with pytest.raises(LogError, match=r"no such column; is 'train/loss' meant\?"):
        read(tmp_path, [{"step": 1, "train/loss": 2.0}], loss="train/los")


def test_unused_columns_are_listed_with_the_map_that_would_read_them(tmp_path):
    entry = {"step": 1, "loss": 2.0, "grad_norm_clipped": 1.0, "x": 1, "mfu": 9.0}
    notes = read(tmp_path, [entry]).notes
    assert (
        "nothing was read as grad_norm; it may be meant: --map grad_norm=grad_norm_clipped" in notes
    )
    assert "columns not used: 'grad_norm_clipped', 'x', 'mfu'" in notes
    table = "step,loss,grad_norm_clipped,x,mfu\n1,2.0,1.0,1,9\n"
    assert set(notes[-2:]) <= set(only(formats.read(tmp_path, table, "t.csv")).notes)


def test_a_map_that_is_suggested_works(tmp_path):
    entries = [{"step": n, "actor/pg_loss": 2.0, "foo/grad_norm": 1.0} for n in range(3)]
    with pytest.raises(UnknownFormat, match=r"--map loss=actor/pg_loss says which"):
        read(tmp_path, entries)
    maps = suggestions(Columns(by_target={"step": "step"}), entries[0])
    assert maps == {"loss": "actor/pg_loss", "grad_norm": "foo/grad_norm"}
    assert read(tmp_path, entries, **maps).records[0].gradient_norm == 1.0


@pytest.mark.parametrize("cell", ["high", [1e-3, 1e-4]])
def test_a_column_taken_by_its_meaning_that_holds_no_numbers_costs_nothing(tmp_path, cell):
    entries = [{"step": n, "loss": 2.0, "optim/lr": cell} for n in range(3)]
    run = read(tmp_path, entries)
    assert [record.training_loss for record in run.records] == [2.0, 2.0, 2.0]
    (note,) = (note for note in run.notes if "is not read" in note)
    assert note.startswith("'optim/lr' is not read as learning_rate: line 1 has ")
    with pytest.raises(LogError, match="a number, nan, inf or a blank"):
        read(tmp_path, entries, learning_rate="optim/lr")
