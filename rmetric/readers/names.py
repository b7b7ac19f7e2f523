"""Names that training programs give to what they log: the one table of all readers.

A column's name is compared in lower case with every separator as ``_``. The first of these is
taken: a name of the list `Target.accepted`, in its order; a name of the same meaning, whatever
folder it is in (``optim/grad_norm``, ``norm/grad``); for losses, a single column that is called a
loss. A name has the meaning if it has the words of `Target.core` and no word beyond
`Target.neutral`. An unknown word makes it another quantity (a layer's norm, a part of the loss, a
percentile, a count), so such a name is offered to the user and not taken.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cached_property, lru_cache


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_EVALUATION_WORDS = _words("val valid validation validate eval evaluation evaluating dev holdout")
_OTHER_WORDS = _words("test aux auxiliary z balance balancing router kl reg")
#: A single column with one of these is called a loss and is a part of it, a statistic of it or a
#: setting; it is not taken.
_NO_LOSS = _words(
    "pg policy value vf critic actor entropy reward advantage surrogate clip clipped clipfrac lb"
    " mtp moe regularization penalty teacher distill commitment box cls scale scaler scaling num"
    " downstream soft count counts weight weights coef coefficient ratio frac fraction mask spike"
    " spikes std stdev var variance min max minimum maximum best lowest highest previous target"
    " time seconds ms ppl perplexity vs delta diff ema grad ntokens tokens p25 p50 p75 p90 p95 p99"
)

#: Folders and qualifiers that leave a quantity what it is.
_PLACES = _words(
    "train metrics metric learning learner stats stat statistics scalars scalar monitor monitoring"
    " log logs logging summary performance perf main run history trainer health debug"
)
_OPTIMISER = _words("optim optimizer optimiser optimization opt actor model policy")
_WHOLE = _words("global total overall")
_AVERAGE = _words("avg average mean reduced")
_STEP_WORDS = _words("step batch iter iteration current last samples")
_LOSS = _PLACES | _WHOLE | _AVERAGE | _STEP_WORDS | _words("lm ce language out sft gpt actor")
_NORM = _PLACES | _OPTIMISER | _WHOLE | _AVERAGE | _STEP_WORDS | frozenset(["l2", "norm"])
#: A norm before clipping is preferred to any other.
_UNCLIPPED = frozenset(["unclipped", "raw"])


@dataclass(frozen=True)
class Target:
    """A quantity that the readers look for.

    Attributes:
        field: of `Record`; None for what is not measured (the run's name).
        accepted: column names, the clearest first, separated by blanks.
        fits: True for the words of a column of other name that may be it.
        only_beside: targets of which one must be found by name too, or be mapped. Their names
            state what this one's, which has other meanings, does not.
        core: words that a name of this meaning has, as `meaning` returns them, by alternatives.
        neutral: words that it may have besides.
        preferred: names with one of these go before the list.
    """

    field: str | None
    accepted: str
    fits: Callable[[set[str]], bool] = lambda words: False
    only_beside: Collection[str] = ()
    core: Collection[frozenset[str]] = ()
    neutral: Collection[str] = ()
    preferred: Collection[str] = ()

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(self.accepted.split())

    def means(self, column: str) -> bool:
        """True for a column of this meaning, in whatever folder and order of words."""
        words = meaning(column)
        return any(core <= words and words - core <= self._neutral for core in self.core)

    def is_preferred(self, column: str) -> bool:
        """True for a column of this meaning that goes before the names of the list."""
        return not meaning(column).isdisjoint(self.preferred) and self.means(column)

    @cached_property
    def _neutral(self) -> frozenset[str]:
        return frozenset(self.neutral)


def _any_of(*alternatives: str) -> tuple[frozenset[str], ...]:
    return tuple(frozenset(words.split()) for words in alternatives)


_BESIDE_LAMBDA = ("r_metric", "sigma_sq", "delta_l")
#: What ``--map TARGET=COLUMN`` accepts on its left.
TARGETS: dict[str, Target] = {
    "step": Target(
        "step",
        "step global_step_max_steps global_step train_step train_global_step training_step"
        " trainer_global_step global_steps iteration iteration_step train_iteration iter"
        " num_updates train_num_updates current_steps num_iterations n_iter update batch _step"
        " epoch steps iterations iters time_total_timesteps total_timesteps num_timesteps"
        " total_steps episode",
        core=_any_of("step", "iteration", "iter"),
        neutral=_PLACES | _words("global optim optimizer current"),
    ),
    "loss": Target(
        "training_loss",
        "loss train_loss training_loss loss_train train_loss_step train_batch_loss batch_loss"
        " reduced_train_loss lm_loss train_lm_loss loss_train_total train_cross_entropy_loss"
        " train_ce_loss ce_loss cross_entropy loss_metrics_global_avg_loss loss_current"
        " train_loss_epoch train_losses training_losses losses loss_history",
        fits=lambda words: "loss" in words and not words & (_EVALUATION_WORDS | _OTHER_WORDS),
        core=_any_of("loss", "xent", "xent loss"),
        neutral=_LOSS,
    ),
    "eval_loss": Target(
        "validation_loss",
        "validation_loss val_loss eval_loss valid_loss dev_loss loss_validation loss_val"
        " loss_eval loss_valid lm_loss_validation val_loss_epoch eval_macro_loss val_losses"
        " validation_losses eval_losses valid_losses dev_losses",
        fits=lambda words: (
            "loss" in words and bool(words & _EVALUATION_WORDS) and not words & _OTHER_WORDS
        ),
        core=_any_of("loss eval", "xent eval", "xent loss eval"),
        neutral=_LOSS,
    ),
    "grad_norm": Target(
        "gradient_norm",
        "grad_norm gradient_norm train_grad_norm train_gradient_norm global_grad_norm"
        " total_grad_norm grad_norm_total grad_norm_global optim_total_grad_norm gnorm"
        " train_gnorm l2_norm_grad_global grad_norms gradient_norms",
        core=_any_of("grad norm", "gnorm", "l2 grad"),
        neutral=_NORM | _UNCLIPPED,
        preferred=_UNCLIPPED,
    ),
    "learning_rate": Target(
        "learning_rate",
        "learning_rate lr train_learning_rate train_lr lr_0 train_lr_0 learning_rates lrs",
        core=_any_of("lr"),
        neutral=_PLACES | _OPTIMISER | _STEP_WORDS
        | _words("adam adamw w decoupled sgd group group0 0 pg pg1"),
    ),
    "update_norm": Target(
        "update_norm",
        "update_norm train_update_norm",
        core=_any_of("update norm", "l2 update"),
        neutral=_NORM,
    ),
    "parameter_norm": Target(
        "parameter_norm",
        "parameter_norm param_norm weight_norm params_norm",
        core=_any_of("param norm", "l2 param"),
        neutral=_NORM,
    ),
    "time": Target(
        "time",
        "time_seconds elapsed_seconds elapsed wallclock wall_clock_time _runtime runtime"
        " total_time_seconds train_total_time_seconds",
    ),
    "loss_scale": Target("loss_scale", "loss_scale grad_scale train_loss_scale scaler_scale"),
    "skipped": Target("skipped", "skipped skipped_step step_skipped train_skipped overflow"),
    "sigma_sq": Target(
        "gradient_variance", "sigma_sq sigma_squared gradient_variance worker_gradient_variance"
    ),
    "delta_l": Target("loss_drift", "delta_l loss_drift"),
    # In many programs it is the weight of a penalty.
    "lambda": Target(
        "failure_rate", "lambda failure_rate hardware_failure_rate", only_beside=_BESIDE_LAMBDA
    ),
    "r_metric": Target("stated_score", "r_metric rmetric r_metric_score"),
    "sigma_sq_norm": Target(
        "gradient_variance_normalised", "sigma_sq_norm sigma_sq_normalised sigma_sq_normalized"
    ),
    "delta_l_norm": Target(
        "loss_drift_normalised", "delta_l_norm delta_l_normalised delta_l_normalized"
    ),
    "lambda_norm": Target(
        "failure_rate_normalised",
        "lambda_norm lambda_normalised lambda_normalized",
        only_beside=_BESIDE_LAMBDA,
    ),
    "reward": Target(
        "reward",
        "reward train_reward critic_score_mean critic_rewards_mean mean_reward reward_mean"
        " train_reward_mean train_mean_reward avg_reward average_reward rollout_ep_rew_mean"
        " ep_rew_mean episode_reward_mean ep_reward_mean objective_scores objective_rlhf_reward"
        " env_reward_mean ppo_mean_scores charts_episodic_return episodic_return episode_return"
        " rewards_mean reward_mean_raw reward_raw_mean raw_reward_mean raw_reward reward_raw"
        " rollout_return_history rollout_return mean_return total_reward episode_reward",
        core=_any_of("reward", "reward mean", "reward avg"),
        neutral=_PLACES | _words("raw norm normalised normalized"),
    ),
    "reward_spread": Target(
        "reward_spread",
        "reward_std train_reward_std rewards_std env_reward_std reward_std_mean critic_score_std",
        core=_any_of("reward std"),
        neutral=_PLACES | _AVERAGE,
    ),
    "kl": Target(
        "kl",
        "kl train_kl actor_kl_loss kl_mean mean_kl kl_div actor_ppo_kl approx_kl train_approx_kl"
        " losses_approx_kl policy_approxkl_avg ppo_policy_approxkl approxkl kl_loss",
        core=_any_of("kl", "kl mean", "approx kl", "kl divergence"),
        neutral=_PLACES | _words("actor loss losses"),
    ),
    "answer_kl": Target("answer_kl", "objective_kl ppo_mean_kl"),
    "entropy": Target(
        "entropy",
        "entropy train_entropy actor_entropy actor_entropy_loss objective_entropy"
        " policy_entropy_avg ppo_policy_entropy losses_entropy train_entropy_loss entropy_loss"
        " mean_entropy entropy_mean",
        core=_any_of("entropy"),
        neutral=_PLACES | _AVERAGE | _words("actor policy objective loss losses"),
    ),
    "response_length": Target(
        "response_length",
        "completion_length train_completion_length completions_mean_length"
        " train_completions_mean_length response_length_mean response_length"
        " train_response_length mean_response_length tokens_mean_len_responses"
        " mean_gen_tokens_per_sample generation_length avg_response_length",
        core=_any_of("completion length", "response length", "completions length mean"),
        neutral=_PLACES | _AVERAGE,
    ),
    "clip_fraction": Target(
        "clip_fraction",
        "clip_ratio train_clip_ratio clip_ratio_region_mean train_clip_ratio_region_mean"
        " actor_pg_clipfrac clip_fraction train_clip_fraction clipfrac policy_clipfrac_avg"
        " losses_clipfrac ppo_policy_clipfrac",
    ),
    "equal_rewards": Target(
        "equal_rewards", "frac_reward_zero_std train_frac_reward_zero_std frac_zero_std"
    ),
    "preference_accuracy": Target(
        "preference_accuracy", "rewards_accuracies train_rewards_accuracies"
    ),
    "device_memory": Target(
        "device",
        "memory_gi_b memory_max_reserved_gi_b memory_max_active_gi_b memory_device_mem_reserved_gib"
        " memory_max_mem_allocated_gib memory_current_allocated_mem memory_current_reserved_mem"
        " memory_peak_reserved_mem perf_max_memory_reserved_gb perf_max_memory_allocated_gb"
        " gpu_memory_gpu_reserved_mem_gi_b gpu_memory_gpu_active_mem_gi_b"
        " system_gpu_reserved_mem_gi_b system_gpu_active_mem_gi_b system_peak_gpu_memory_mb"
        " mem_allocated_bytes mem_reserved_bytes system_gpu_0_memory_allocated_bytes"
        " system_gpu_0_memory_usage_megabytes gpu_memory_gb gpu_memory_mb gpu_mem_gb gpu_mem_mb"
        " gpu_memory_allocated_gb memory"
        " device_stats_monitor_on_train_batch_end_allocated_bytes_all_current",
    ),
    "host_memory": Target(
        "host",
        "perf_cpu_memory_used_gb system_system_memory_usage_megabytes system_proc_memory_rss_mb"
        " cpu_memory_gb cpu_memory_mb host_memory_gb host_memory_mb ram_gb ram_mb rss_gb rss_mb",
    ),
    "device_memory_percent": Target(
        "device_percent",
        "memory_max_reserved memory_max_active gpu_memory_gpu_reserved_mem system_gpu_reserved_mem"
        " system_gpu_0_memory_allocated system_gpu_0_memory_usage_percentage",
    ),
    "host_memory_percent": Target(
        "host_percent",
        "system_memory_percent system_memory system_system_memory_usage_percentage"
        " device_stats_monitor_on_train_batch_end_cpu_vm_percent",
    ),
    "data_wait": Target(
        "data_wait_seconds",
        "data_time train_data_time data_wait_seconds time_metrics_data_loading_s"
        " data_loading_time data_load_time time_data_loading_s time_data_loading_ms",
    ),
    # `time` of mmcv, which elsewhere is a time of the day.
    "time_beside_wait": Target("step_seconds", "time", only_beside=("data_wait",)),
    "step_time": Target(
        "step_seconds",
        "time_metrics_end_to_end_s step_time step_time_seconds step_seconds iter_time time_step_s"
        " time_step_ms time_per_step seconds_per_step sec_per_step s_per_step time_per_iteration"
        " seconds_per_iteration seconds_per_iter sec_per_iter s_per_iter s_it timing_s_step"
        " train_speed_s_it",
        core=_any_of("step time", "iter time", "iteration time", "step timing", "seconds step per"),
        neutral=_PLACES | _words("s sec seconds ms in per total elapsed timing"),
    ),
    "steps_per_second": Target(
        "step_seconds",
        "steps_per_second train_steps_per_second steps_per_sec iterations_per_second"
        " iterations_per_sec iter_per_second iter_per_sec iters_per_sec it_per_sec it_s"
        " batches_per_second batches_per_sec throughput_batches_per_sec train_speed_iter_s",
    ),
    "tokens_per_second": Target(
        "tokens",
        "tokens_per_second tokens_per_sec tokens_s tok_per_sec tps wps tgs speed_wps"
        " throughput_tps throughput_tokens_per_sec throughput_tokens_per_second perf_throughput",
        core=_any_of("tokens second per", "tokens sec per", "tok sec per"),
        neutral=_PLACES | _words("throughput device gpu global total"),
    ),
    "samples_per_second": Target(
        "samples",
        "samples_per_second samples_per_sec samples_s train_samples_per_second examples_per_second"
        " examples_per_sec images_per_second images_per_sec img_per_sec img_sec_core time_fps"
        " throughput_samples_per_sec",
        core=_any_of("samples second per", "samples sec per"),
        neutral=_PLACES | _words("throughput device gpu global total"),
    ),
    "run": Target(None, "run_id run_name run experiment_id experiment_name"),
}  # fmt: skip

#: What lines of text call it, the clearest first; the names of `TARGETS` come after.
PRINTED = {
    "step": "global_step global_steps current_steps num_updates optimizer_step completed_step"
    " train_step training_step step total_iteration iteration train_iter iter it steps update"
    " batch",
    "loss": "loss train_loss training_loss loss_train lm_loss total_loss loss_total avg_loss"
    " average_loss mean_loss running_loss step_loss batch_loss smooth_loss avr_loss gpt_loss",
    "eval_loss": "val_loss eval_loss valid_loss validation_loss validate_loss avg_val_loss",
    "grad_norm": "grad_norm gnorm gradient_norm global_grad_norm global_norm total_norm grad gn"
    " grdn norm actor_grad_norm",
    "learning_rate": "lr learning_rate",
    "loss_scale": "loss_scale loss_scaler scale",
    "parameter_norm": "param_norm params_norm parameter_norm weight_norm",
    "update_norm": "update_norm",
}


@lru_cache(maxsize=1 << 17)
def plain_name(column: str) -> str:
    """A column's name in lower case, its separators as ``_``.

    >>> plain_name("train/gradNorm")
    'train_grad_norm'
    """
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", column.strip())
    return re.sub(r"[^a-z0-9]+", "_", spaced.lower()).rstrip("_")


#: Units at the end of plain names, in bytes or seconds; `mem` is Composer's.
_UNIT_FACTORS = {
    "gi_b": 2.0**30, "gib": 2.0**30, "gb": 1e9, "mb": 1e6, "megabytes": 1e6, "mem": 1e9, "ms": 1e-3,
}  # fmt: skip


@lru_cache(maxsize=256)
def unit(column: str) -> float:
    """Bytes, or seconds, that 1 in a column of memory or time stands for, by its name.

    >>> unit("memory(GiB)"), unit("time/data_loading_ms"), unit("mem-reserved-bytes")
    (1073741824.0, 0.001, 1.0)
    """
    words = plain_name(column).split("_")
    if words == ["memory"]:  # of mmcv
        return 2.0**20
    return _UNIT_FACTORS.get("_".join(words[-2:]), _UNIT_FACTORS.get(words[-1], 1.0))


_LOSS_WORD = r"(?:cross_?ent(?:ropy)?|crossentropy|xent)"
#: Words of several parts, and those of one meaning.
_COMPOUNDS = (
    (re.compile(r"(?<![a-z])" + _LOSS_WORD + r"(?![a-z])"), "xent"),
    (re.compile(r"(?<![a-z])(?:un_?clipped|(?:before|pre)_?clip(?:ping|ped)?)(?![a-z])"),
     "unclipped"),
    (re.compile(r"(?<![a-z])learning_?rate(?![a-z])"), "lr"),
    (re.compile(r"(?<![a-z])(grad|gradient|weight|param|parameter|update)norm(?![a-z])"),
     r"\1_norm"),
    (re.compile(r"(?<![a-z0-9])2_0(?=_norm)"), "l2"),
)  # fmt: skip
#: Names of arrays, in the plural.
_PLURAL = {"losses": "loss", "norms": "norm", "lrs": "lr"}
_SAME = {
    **dict.fromkeys(("gradient", "gradients", "grads"), "grad"),
    **dict.fromkeys(("parameter", "parameters", "params", "weight", "weights"), "param"),
    **dict.fromkeys(("training", "trainer"), "train"),
    **dict.fromkeys(_EVALUATION_WORDS, "eval"),
    "updates": "update",
    "rewards": "reward",
}


@lru_cache(maxsize=1 << 17)
def meaning(column: str) -> frozenset[str]:
    """The words of a column's name, one word for each meaning.

    >>> sorted(meaning("Training/GradientNorm")), sorted(meaning("metrics/eval/CrossEntropy"))
    (['grad', 'norm', 'train'], ['eval', 'metrics', 'xent'])
    """
    name = plain_name(column)
    for pattern, word in _COMPOUNDS:
        name = pattern.sub(word, name)
    # Only at the end: `losses/ce` is one of several.
    before, _, last = name.rpartition("_")
    name = f"{before}_{_PLURAL.get(last, last)}"
    return frozenset(_SAME.get(word, word) for word in name.split("_") if word)


def is_loss(column: str) -> bool:
    """True for a name that means a loss, of the training or of an evaluation."""
    return TARGETS["loss"].means(column) or TARGETS["eval_loss"].means(column)


#: Words of a column that is called a loss and is a statistic or a setting of it, or belongs to
#: reinforcement learning.
_NO_PART = (_NO_LOSS | _words("test running smoothed")) - _words("box cls mask mtp moe commitment")


def loss_part(column: str) -> str | None:
    """The name of one of several losses, as in `Record.loss_parts`; None for another column.

    >>> loss_part("train/box_loss"), loss_part("val/box_loss"), loss_part("Gen Loss")
    ('box_loss', 'validation box_loss', 'gen_loss')
    """
    words = plain_name(column).split("_")
    if not {"loss", "losses"} & set(words) or not _NO_PART.isdisjoint(words):
        return None
    own = "_".join(word for word in words if word not in _EVALUATION_WORDS | {"train", "training"})
    return own if _EVALUATION_WORDS.isdisjoint(words) else f"validation {own}"


def is_part_of_loss(column: str) -> bool:
    """True if the words of a column that is called a loss make it something else."""
    return not _NO_LOSS.isdisjoint(plain_name(column).split("_"))
