"""Rules that assign a training stage to a log entry (L4, section 4.4).

Only announcements of work are rules. An error states what failed, not the current stage, so the
stage of a crash is that of the lines before it. `tear-down` is the orderly end only. Settings,
commands and tracebacks name stages without being in them and are skipped.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import NamedTuple

from rmetric.diagnosis.patterns.steps import match_step
from rmetric.diagnosis.reading.word_index import WordIndex


class _Rule(NamedTuple):
    """One way in which an entry states its stage.

    Attributes:
        program: the program or library that writes it.
        gates: literals in lower case and without digits, with | between; a match holds one.
        pattern: sought in the entry in lower case.
    """

    stage: str
    program: str
    gates: str
    pattern: str

    @property
    def literals(self) -> list[str]:
        return [gate.strip() for gate in self.gates.split("|")]


_LOG = ":::ml"  # :::MLLOG and :::MLL
_MLLOG = r'"?key"?: "'

#: The first that matches counts: the more specific stand first. Their tests have an example each.
# fmt: off
RULES: tuple[_Rule, ...] = (
    # MLPerf's log keys
    _Rule("initialise", "MLPerf", _LOG, _MLLOG + r'(init_start|cache_clear|submission_\w+)"'),
    _Rule("load data", "MLPerf", _LOG, _MLLOG + r'(init_stop|run_start)"'),
    _Rule("evaluate", "MLPerf", _LOG, _MLLOG + r'(eval_start"|tracked_stats".*"validation_step)'),
    _Rule("checkpoint", "MLPerf", _LOG, _MLLOG + r'(checkpoint_start|save_checkpoint_start)"'),
    _Rule("tear-down", "MLPerf", _LOG, _MLLOG + r'(run_stop|run_final)"'),
    _Rule("train", "MLPerf", _LOG,
          _MLLOG + r'(block_start|block_stop|epoch_start|epoch_stop|eval_stop|train_loss)"'),

    # the orderly end
    _Rule("tear-down", "any", "train",
          r"\btraining\b[^:=\n]{0,40}\b(is done|done|completed?|finished|has ended|ended)\b"
          r"|\b(finished|completed|done|end of|stopping) (the )?training\b"
          r"(?!,? (model|warm|step|epoch|batch|set|data|iter|loop|sample))"),
    _Rule("tear-down", "Megatron", "exiting program", r"exiting program (at|after) "),
    _Rule("tear-down", "HF Trainer", "train_runtime|train metrics",
          r"['\"]train_runtime['\"]:|\*{3,} train metrics"),
    _Rule("tear-down", "Lightning", "stopped|tear", r"trainer\.fit` stopped|trainer tearing down"),
    _Rule("tear-down", "torch", "destroy",
          r"\b(calling|before|call) destroy_process_group|destroying (the )?process group"),
    _Rule("tear-down", "NCCL", "destroy|finalize", r"nccl info .*\b(destroy|finalize)\b.*"),
    _Rule("tear-down", "wandb", "wandb:", r"wandb: (waiting for .* to finish|synced|run history:)"),

    # checkpoints
    _Rule("checkpoint", "Megatron, DeepSpeed, NeMo", "sav|storing|stored|wrote|writing",
          r"\b(saving|saved|storing|stored|wrote|writing)\b[^=\n]{0,40}\b(checkpoints?|ckpts?)\b"),
    _Rule("checkpoint", "any", "checkpoint|ckpt",
          r"\bcheckpoint (of step \d+ )?(saved|written|save (started|done|finished))"
          r"|\bsave[- ]checkpoint\b.*\b(start|begin|done|took|time)"
          r"|\b(async|asynchronous) (save|checkpoint)\b.*\b(start|begin|finish|schedul)"),
    _Rule("checkpoint", "Hugging Face", "saved in|saving model|saving adapter|saving the",
          r"\b(configuration|model weights|tokenizer config file|special tokens file|state)\b"
          r"[^=\n]{0,20}\bsaved in\b|\bsaving (model|adapter|the (model|weights))\b"),
    _Rule("checkpoint", "DeepSpeed", "[torch] sav", r"\[torch\] sav(ing|ed)\b"),

    # evaluation
    _Rule("evaluate", "HF Trainer", "running eval|running pred|running valid|eval_loss",
          r"\*{3,} ?running (evaluation|prediction|validation)|['\"]eval_loss['\"]:"),
    _Rule("evaluate", "Lightning", "sanity check|validation|testing dataloader|validat",
          r"\bsanity check(ing)?\b|\bvalidation( dataloader \d+)?: +\d+%|\bvalidating: +\d+%"
          r"|\btesting dataloader \d+:"),
    _Rule("evaluate", "Megatron", "validation|test loss|evaluat",
          r"\b(validation|test) loss at |^\s*evaluating (on|iter)\b|\bevaluat(ing|ion) .*\biter"),
    _Rule("evaluate", "any", "eval|validat",
          r"\b(start(ing|ed)?|begin(ning)?|running|run|entering) (the )?"
          r"(evaluation|validation|eval)\b"
          r"|\b(evaluation|validation) (at (step|iteration|epoch) \d+ )?(starts?|begins?|started)\b"
          r"|^\W*(evaluating|validating)\b|\b(eval(uation)?|validation|val)[ _]loss ?[:=] ?[\d.n]"),

    # compilation
    _Rule("compile", "Megatron", "compiling|with compil|finished compil|fused kernel compilation",
          r"^\W*compiling\b|\bcompiling (and|dataset|the|module|function|model|graph|train)\b"
          r"|\b(done with|finished) compil|\bfused kernel compilation\b"),
    _Rule("initialise", "torch extensions", "time to load", r"\btime to load \w+ op\b"),
    _Rule("compile", "torch extensions", "extension|ninja",
          r"\b(building|loading) extension module\b|emitting ninja build file|^ninja: "
          r"|\btorch_extensions\b.*\b(root|cache)|\bdetected cuda files, patching ldflags\b"),
    _Rule("compile", "torch.compile", "dynamo|inductor|autotune|torch.compile",
          r"\btorch(\._|/_)(dynamo|inductor)|\btorchdynamo\b|\bautotune \w+\(|\bmax[-_]autotune:"
          r"|\bcompiling\b.*\btorch\.compile\b|\btorch\.compile\b.*\b(start|begin|took|done)"),
    _Rule("compile", "JAX/XLA",
          "xla compilation|tracing|jaxpr|compiling|slow compile|compile_or_get",
          r"\b(finished|started) (xla compilation|tracing|jaxpr)|\bcompiling (jit|pjit|module)\w*"
          r"|\bvery slow compile\b|\bcompile_or_get_cached\b"),
    _Rule("compile", "MindSpore", "start compil|end compil|begin compil|compile graph|graph compil",
          r"\b(start|end|begin) compil|\bcompile graph\b|\bgraph compil(e|ation|ing)\b"),

    # data
    _Rule("load data", "Megatron", "dataset|data index|index map|documents",
          r"\b(building|creating|loading|finished creating|reading|preparing|generating|"
          r"downloading and preparing|initiali[sz]ing) [^=\n]{0,40}\bdata ?sets?\b"
          r"|\bdoc(ument)?-idx\b.*\b(mapping|load)|\bloading (doc|sample|shuffle)-idx"
          r"|\bnumber of documents:"),
    _Rule("load data", "datasets", "split|cached|tokeniz|resolving data|map|download",
          r"\bgenerating \w+ split|\bcached processed dataset|\brunning tokenizer\b"
          r"|\bresolving data files\b|^\W*map( \(num_proc=\d+\))?: +\d+%|\btokenizing\b[^=\n]*\d+%"
          r"|\bdownloading (data|builder|readme|metadata)\b"),
    _Rule("load data", "COCO", "annotations|index",
          r"\bloading annotations into memory\b|^\W*(creating index\.\.\.|index created)"),
    _Rule("load data", "any", "data",
          r"\b(loading|load|reading|building|creating|preparing|setting up|initiali[sz]ing|"
          r"constructing) (the |training |train |validation |eval )*"
          r"(data\b(?![_./=-])|data ?(loader|iterator|module|pipeline)s?\b)"),
    _Rule("load data", "any", "shard|batch",
          r"\b(reading|fetching|opening|downloading|waiting for) (the |next |data |training )*"
          r"(shards?|(mini-?)?batch(es)?)\b"),

    # the start of training
    _Rule("train", "HF Trainer, Megatron, any", "train",
          r"\*{3,} ?running training|^\W*training \.\.\.|\[before the start of training step\]"
          r"|\b(start(ing|ed)?|begin(ning)?|entering|launching) (the )?(main )?train(ing)?"
          r"\b(?! (script|data|process|job|run id|worker))"),
    _Rule("train", "HF Trainer, TRL", "loss", r"^\W*['\"](train_)?loss['\"]: ?['\"]?-?[\d.]"),
    _Rule("train", "MindSpore, any", "epoch", r"^\W*(start(ing)? )?epoch[:= ] ?\[?\d+"),

    # start-up
    _Rule("initialise", "NCCL, RCCL", "nccl info|nccl version",
          r"\bnccl info (bootstrap|net/|channel|ring|trees?\b|connected|comm\b.*\binit|"
          r"setting affinity|using (network|internal|non-device)|ncclcomminitrank|threadthreshold"
          r"|\d+ coll|cudadriverversion|p2p|dmabuf|nccl_\w+ set)|\b[nr]ccl version"),
    _Rule("initialise", "torch.distributed", "init|world|store|process group",
          r"\binit_process_group\b(?!.*\bdestroy)|\b(initiali[sz](ing|ed)|init) "
          r"(the )?(torch[. ])?distributed\b|\badded key: store_based_barrier|"
          r"\brendezvous complete for|\bdistributed init \(rank|\bprocess group initiali[sz]ed"
          r"|\b(initiali[sz]ing|creating|initiali[sz]ed) (the )?process group"),
    _Rule("initialise", "Megatron", "initializ|initialis|random seeds|building|number of",
          r"\binitiali[sz](ing|ed) (tensor|pipeline|data|expert|context|model|sequence)"
          r"[- a-z]*parallel|\bsetting random seeds\b|^\W*building \w+ model\b"
          r"|\bnumber of (trainable )?parameters\b|\bbuilding (the )?model\b"),
    _Rule("initialise", "DeepSpeed", "deepspeed|torchbackend|zero",
          r"\bdeepspeed info:|\binitiali[sz]ing torchbackend\b|\bcreating .{0,20}zero\b"
          r"|\bdeepspeedengine configuration|\bdeepspeed .*\boptimizer\b|\bsetting ds_accelerator"),
    _Rule("initialise", "Hugging Face", "loading|instantiat|weights of",
          r"\bloading (configuration|weights) file|\bloading file .*(token|vocab|merges)"
          r"|\bloading checkpoint shards|\ball model checkpoint weights|\bsome weights of"
          r"|\bloading (pretrained |the )?(model|tokenizer|weights)\b(?!=)"),
    _Rule("initialise", "Lightning", "gpu available|local_rank|global_rank|distributed_backend",
          r"\bgpu available: |\blocal_rank: \d+ - cuda_visible|\binitiali[sz]ing distributed: "
          r"|\bdistributed_backend="),
    _Rule("initialise", "any, restoring", "checkpoint|ckpt|resum|restor",
          r"\b(loading|loaded|restoring|restored|resuming|resumed|successfully loaded)\b"
          r"[^=\n]{0,40}\b(checkpoints?|ckpts?|training from)\b"),
    _Rule("initialise", "JAX", "jax|pjrt|backend|xla",
          r"\bjax distributed|\bjax\.distributed|\bpjrt\b|\b(un)?able to initialize backend"
          r"|\bxla_bridge|\bjax (process|version|devices)"),
    _Rule("initialise", "Ascend", "hccl|hccp|mindspore|rank table",
          r"\bhccl?comm?init|\b(init|initiali[sz]e|create) (hccl|hccp)\b|\bhccl\b.*\binit\b"
          r"|\bhcom_init|\brank ?table file"),

    # the launcher
    _Rule("launch", "torchrun",
          "omp_num|elastic_operator|rendezvous|starting worker|torch.distributed.",
          r"\bomp_num_threads\b.*\b(for each process|default)|\bstarting elastic_operator\b"
          r"|\brendezvous'ing worker group|\bstarting workers? (for|group)|\bstarting a rendezvous"
          r"|\btorch\.distributed\.(run|launch) is deprecated|\bmodule torch\.distributed\.launch"),
    _Rule("launch", "DeepSpeed", "runner.py|launch.py|world info",
          r"\brunner\.py.*\b(cmd =|multinode|using ip)|\blaunch\.py.*\b(world info|nnodes|dist_)"
          r"|\bworld info dict"),
    _Rule("launch", "Slurm", "srun|sbatch|batch job|salloc|slurm_job|slurm_nodelist|slurm_nnodes",
          r"^srun: (job \d+ (step creation|queued|has been)|launching|using)"
          r"|\bsubmitted batch job\b"
          r"|^salloc: |^\++ (srun|sbatch)\b|\bslurm_(job_?id|nodelist|nnodes)\b ?[=:]"),
    _Rule("launch", "MPI, shells", "+ ",
          r"^\++ (mpirun|mpiexec|torchrun|deepspeed|accelerate|docker|enroot|python\d?|export|bash|"
          r"singularity|apptainer)\b"),
    _Rule("launch", "containers", "dlpal|pulling|container",
          r":::dlpal\b|\bpulling (image|from)\b|\bstarting container\b"
          r"|^=+ (container|nvidia|pytorch|==)"),
)
# fmt: on

#: Entries that name stages without being in one.
_NONE = re.compile(
    r"traceback \(most recent|^\s*file \"|\b(error|exception)\b[:\]]|\bfailed\b|\bno module named\b"
)

#: The end of a checkpoint, behind which the training goes on.
_SAVED = re.compile(
    _MLLOG + r'(checkpoint_stop|save_checkpoint_stop)"'
    r"|\b(saved(?! in)|wrote|stored)\b[^=\n/]{0,40}\b(checkpoints?|ckpts?)\b"
    r"|(?<!zero )\bcheckpoint (of step \d+ )?(saved|written)\b"
    r"|\bcheckpoint \S+ is ready now"
)

_WORKING = ("train", "evaluate", "checkpoint", "tear-down")
_START = ("initialise", "load data", "compile")


_RULES = [(re.compile(rule.pattern), rule.stage) for rule in RULES]
_GATES = WordIndex(
    (gate.encode(), number) for number, rule in enumerate(RULES) for gate in rule.literals
)
#: What a rank says before it reads data or a checkpoint and does not come back.
_WAITS_IN = (
    (
        "checkpoint",
        re.compile(r"(?i)check-?point|ckpt|\bsav(?:e|ing)\b|state[_ ]dict|write_(?:data|files)"),
    ),
    (
        "load data",
        re.compile(
            r"(?i)\bshards?\b|\bdata\.py\b|\w+_iterator\b|data_?loader|data_?set|fetch|download"
            r"|mini-?batch|next[ _]batch"
            r"|\b(?:s3|gs|gcs|az|hdfs)://|\bcorpus\b|\bmemmap\b|\bread(?:ing)? samples?\b"
            r"|\.(?:tar|mds|arrow|parquet|jsonl|tfrecord|np[yz]|bin|zst)\b"
        ),
    ),
)


def stated_stage(text: str, rules: Sequence[int] | None = None, *, may_step: bool = True) -> str:
    """The stage that an entry states, of `job.STAGES`; "" where it states none.

    Args:
        text: of the entry.
        rules: those that may match (`possible_rules`), where they are known.
        may_step: it may state a step.

    >>> stated_stage("> building train, validation, and test datasets ...")
    'load data'
    >>> stated_stage("RuntimeError: CUDA error: an illegal memory access")
    ''
    """
    text = text[:500]
    lower = text.lower()
    found = _ruled(lower, possible_rules(lower.encode()) if rules is None else rules)
    if not found and may_step and _LOG not in lower and match_step(text):
        found = "train"
    return "" if found and _NONE.search(lower) else found


def awaited(text: str) -> str:
    """The stage, "load data" or "checkpoint", for which an entry or a stack waits; "" for none.

    >>> awaited("fetching shard 17")
    'load data'
    """
    return next((stage for stage, words in _WAITS_IN if words.search(text)), "")


def stage_of_wait(text: str) -> str:
    """The stage at which a rank waits whose last entry or stack this is; "" for none."""
    return awaited(text) or stated_stage(text)


def _ruled(lower: str, rules: Sequence[int]) -> str:
    for number in rules:
        pattern, stage = _RULES[number]
        if pattern.search(lower):
            return stage
    return ""


def possible_rules(form: bytes, words: Collection[bytes] | None = None) -> Sequence[int]:
    """Places in `RULES` of those that may match an entry, whatever its digits are.

    Args:
        form: an entry in lower case; its digits may be left out.
        words: the runs of the form (`runs_of`), where they are known.
    """
    return sorted(set(_GATES.items(form, words)))


def ends_checkpoint(text: str) -> bool:
    """Return True for an entry that states that a checkpoint is complete.

    >>> ends_checkpoint("successfully saved checkpoint from iteration 900 to /ckpt")
    True
    """
    return _SAVED.search(text[:500].lower()) is not None


def next_stage(now: str, stated: str) -> str:
    """The stage after an entry that states `stated`, "" for none.

    A job that works does not go back to its start by the lines of a start: communicators are
    made and kernels compiled when they are first needed, data is read again. Only a launch
    begins anew.

    >>> next_stage("train", "initialise"), next_stage("train", "launch")
    ('train', 'launch')
    """
    return now if not stated or (now in _WORKING and stated in _START) else stated
