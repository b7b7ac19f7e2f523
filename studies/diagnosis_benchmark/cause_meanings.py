"""Causes of the library that mean a class of a label or a kind of injected fault.

Written from the meanings of the words alone (`CAUSES`, the titles of the signatures, the
variants of the injected faults), before any diagnosis of a written job had been looked at, and not
changed after that except for names that the library changes or adds, and one entry of `KINDS`: the
injected "out of range" is a token beyond the vocabulary, so the signature of that is right.

An entry is a family of the library ("NVLink"), a part of it by a pattern of ids
("network/ib_*"), or either at one stage of the diagnosis ("hang@load data"). A hang is an answer to
"one rank does not come out of reading its data" only if the diagnosis has that stage too.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from fnmatch import fnmatchcase
from typing import NamedTuple

from rmetric.diagnosis.library import SignatureLibrary
from rmetric.diagnosis.signature import inferred_causes

#: Class -> (group, meaning).
CAUSES: dict[str, tuple[str, str]] = {
    "hang_data": ("hang", "one rank does not come out of reading its data"),
    "hang_collective": ("hang", "a collective does not end; the log does not hold why"),
    "hang_checkpoint": ("hang", "one rank does not come out of checkpoint I/O"),
    "hang_stopped": ("hang", "one process stands still: stopped, or it does nothing any more"),
    "collective_mismatch": ("hang", "ranks call different collectives, or one calls none"),
    "gpu_lost": ("gpu", "a GPU has fallen off the bus"),
    "gpu_memory_error": ("gpu", "uncorrectable or contained ECC error of a GPU's memory"),
    "gpu_nvlink": ("gpu", "an NVLink or NVSwitch error"),
    "network_link": ("network", "an InfiniBand or Ethernet port or its path fails"),
    "network_npu": ("network", "the network of an Ascend NPU fails (error cqe)"),
    "peer_lost": ("network", "a rank lost another one; the log does not hold why"),
    "cuda_oom": ("memory", "GPU memory is exhausted"),
    "host_oom": ("memory", "the host's memory is exhausted; the kernel kills a process"),
    "disk_full": ("storage", "no space left on a device"),
    "quota": ("storage", "a disk quota is exceeded"),
    "permission": ("storage", "access to a file is denied"),
    "checkpoint_corrupt": ("storage", "a checkpoint cannot be read, it is damaged or incomplete"),
    "file_missing": ("data", "a file of data does not exist"),
    "data_corrupt": ("data", "a file of data is damaged"),
    "rendezvous": ("launch", "ranks do not meet: some do not join in time"),
    "dns": ("launch", "the name of a host cannot be resolved"),
    "port_in_use": ("launch", "the address of the store is already in use"),
    "version_mismatch": ("launch", "versions of libraries, driver or code do not fit together"),
    "container_mount": ("launch", "a container cannot be made or a mount in it fails"),
    "mpi_without_pmi": ("launch", "Open MPI was built without the PMI that srun offers"),
    "nan_loss": ("numerics", "a loss or gradient is not finite"),
    "shape_mismatch": ("code", "shapes of tensors or of a checkpoint do not fit"),
    "exception": ("code", "a program error in Python on one rank"),
    "segfault": ("code", "a process ends by SIGSEGV"),
    "gpu_program": ("code", "a kernel on the GPU faults: an illegal address, a device-side assert"),
    "file_server": ("storage", "a mounted network file system does not answer or has gone"),
    "object_store": ("storage", "an object store refuses, throttles or does not answer"),
    "configuration": ("launch", "an argument or a setting is refused"),
    "node_failed": ("network", "a node fails or restarts; the log does not hold why"),
    "killed": ("outside", "a process is killed; the log does not hold by whom or why"),
    "time_limit": ("outside", "the scheduler's time limit ends a job that went well"),
    "cancelled": ("outside", "a person ends a job that went well"),
    "preempted": ("outside", "the scheduler preempts a job that went well"),
    "none": ("none", "nothing failed"),
}


def _of(family: str, ids: str) -> tuple[str, ...]:
    """The entries of a family for some patterns of ids."""
    return tuple(f"{family}/{pattern}" for pattern in ids.split())


#: Timeouts of collectives: a rank did not take part. The last three were added by the library after
#: the first look at the sealed jobs, which stays as it was.
_WAITED = _of(
    "collective communication",
    "*timeout *timed_out *stalled nccl_lagging_rank collective_not_entered nccl_heartbeat_monitor "
    "monitored_barrier_failed",
)
#: Lost connections: a rank is gone.
_LOST = _of(
    "collective communication",
    "*_lost *_gone *_closed *_reset horovod_shut_down nccl_failed_or_timed_out nccl_gives_up "
    "distributed_backend_error mpi_fatal_error",
)
#: Written class -> entries that mean it.
CLASSES: dict[str, tuple[str, ...]] = {
    "hang_data": ("hang@load data", "silent rank@load data", "data loading/dataloader_timeout"),
    "hang_collective": ("hang", "silent rank", *_WAITED),
    "hang_checkpoint": ("hang@checkpoint", "silent rank@checkpoint"),
    "hang_stopped": ("hang", "silent rank"),
    "collective_mismatch": (
        "collective mismatch",
        "uneven work",
        *_of(
            "collective communication",
            "nccl_lagging_rank collective_not_entered monitored_barrier_failed horovod_stalled",
        ),
    ),
    "gpu_lost": ("GPU hardware",),
    "gpu_memory_error": ("GPU memory error",),
    "gpu_nvlink": ("NVLink",),
    "network_link": _of(
        "network", "ib_* ethernet_* no_route_between_nodes libfabric_error ucx_error"
    ),
    "network_npu": ("network/hccl_*",),
    "peer_lost": ("silent rank", *_LOST),
    "cuda_oom": ("out of GPU memory",),
    "host_oom": ("oom killer", "host out of memory"),
    "disk_full": ("disk full",),
    "quota": ("quota",),
    "permission": ("permission",),
    "checkpoint_corrupt": ("checkpoint/checkpoint_corrupt", "checkpoint/checkpoint_missing"),
    "file_missing": ("file not found/file_not_found", "data loading/dataset_not_found"),
    "data_corrupt": ("data loading/data_file_corrupt",),
    "rendezvous": (
        "rendezvous",
        *_of("collective communication", "store_timeout *_store_* hccl_socket_timeout"),
        "network/gloo_connect_failed",
    ),
    "dns": ("network/name_not_resolved", "network/rendezvous_name_unknown"),
    "port_in_use": ("port in use",),
    "version_mismatch": ("version mismatch", "installation"),
    "container_mount": ("launcher/container_*",),
    "mpi_without_pmi": ("launcher/mpi_launch_failed", "configuration/mpi_without_pmi"),
    "nan_loss": ("nan loss", "numerics/loss_scale_at_minimum"),
    "shape_mismatch": ("shape mismatch", "checkpoint/checkpoint_incompatible"),
    "exception": ("exception", "assertion", "runtime error", "division by zero"),
    "segfault": ("segmentation fault",),
    "gpu_program": ("GPU program",),
    "file_server": _of(
        "storage",
        "network_file_system_trouble nfs_stale_handle input_output_error file_server_failed",
    ),
    "object_store": (
        "network/object_store_failed",
        "file not found/object_not_found",
        "hub download/hub_rate_limit",
    ),
    "configuration": ("configuration",),
    "node_failed": ("node failure", "host hardware"),
    "killed": ("killed", "data loading/dataloader_worker_killed"),
    "time_limit": ("time limit",),
    "cancelled": ("cancelled",),
    "preempted": ("preempted",),
    "none": (),
}
#: Group of classes -> further families that are of it, beside those of its classes.
GROUPS: dict[str, tuple[str, ...]] = {
    "hang": ("hang", "silent rank", "data loading/dataloader_timeout"),
    "gpu": ("GPU not available",),
    "network": ("network", "collective communication", "node failure"),
    "memory": ("killed", "shared memory"),
    "storage": ("storage", "checkpoint"),
    "data": ("data loading", "file not found", "hub download"),
    "launch": ("launcher", "configuration", "missing module"),
    "numerics": ("numerics",),
    "code": (
        "native crash", "GPU program", "device mismatch", "data type mismatch", "compilation",
        "tokenizer",
    ),
    "outside": (),
    "none": (),
}  # fmt: skip
#: Answers that say only that something failed. They count as if no cause were named.
NO_CAUSE = (
    "error line",
    *_of("exception", "python_traceback system_exit"),
    *_of(
        "launcher",
        "*_child_failed torchrun_first_failure launcher_ends_the_others slurm_task_failed "
        "slurm_step_torn_down slurmctld_job_failed batch_exit_code mpi_aborted subprocess_failed "
        "managed_replica_failed sagemaker_job_failed paddle_launch_failed ray_actor_died "
        "engine_core_failed pod_restarts",
    ),
)
#: Kind of injected fault -> entries that mean one of its variants.
KINDS: dict[str, tuple[str, ...]] = {
    "exception": (
        "exception", "assertion", "runtime error", "shape mismatch", "storage", "checkpoint",
        "tokenizer/token_out_of_vocabulary",
    ),
    "hang": ("hang", "silent rank", "collective mismatch", *_WAITED),
    "memory": ("host out of memory",),
    "slow": ("time limit",),
    "kill": ("killed", "silent rank"),
    "network": ("network", "silent rank", *_LOST, *_WAITED),
    "data": ("nan loss", "numerics", "data loading"),
    "environment": (
        "configuration", "rendezvous", "version mismatch", "installation", "file not found",
        "data loading/dataset_not_found", "network/gloo_connect_failed",
    ),
    "process": (
        "segmentation fault", "native crash", "shared memory/bus_error", "killed", "silent rank",
        "uneven work",
    ),
    "storage": ("storage", "disk full", "file not found", "data loading", "checkpoint"),
    "skew": ("shape mismatch", "collective mismatch", "configuration", "uneven work"),
    "deadlock": ("hang", "silent rank", "collective mismatch", "file not found", *_WAITED),
    "limits": ("resource limit", "storage/too_many_open_files", "exception/recursion_limit"),
    "numerics": ("nan loss", "numerics"),
}  # fmt: skip


class Named(NamedTuple):
    """A cause that an answer names, at the stage that it states."""

    cause: str | None
    family: str
    stage: str = ""

    def means(self, entries: Collection[str]) -> bool:
        """True if one of the entries matches."""
        return any(self._is(entry) for entry in entries)

    def _is(self, entry: str) -> bool:
        entry, _, stage = entry.partition("@")
        return (
            self.cause is not None
            and _is_named(self.cause, self.family, entry)
            and stage in ("", self.stage)
        )


def verdict(answer: Named, classes: Collection[str]) -> str:
    """How right a named cause is, where these `CLASSES` are: right, partly, unknown or wrong."""
    if answer.cause is None:
        return "unknown"
    if any(answer.means(CLASSES[name]) for name in classes):
        return "right"
    if answer.means(NO_CAUSE):
        return "unknown"
    groups = {CAUSES[name][0] for name in classes}
    near = (CLASSES[name] for name, (group, _) in CAUSES.items() if group in groups)
    if any(answer.means(GROUPS[group]) for group in groups) or any(map(answer.means, near)):
        return "partly"
    return "wrong"


def _is_named(cause: str, family: str, entry: str) -> bool:
    """True if an entry, "family" or "family/pattern of ids", means a cause of a family."""
    of, _, pattern = entry.partition("/")
    return of == family and (not pattern or fnmatchcase(cause, pattern))


def family_of(cause: str, library: SignatureLibrary) -> str:
    """The family of a signature, or of a cause without one."""
    families = {entry.id: entry.family for entry in inferred_causes().values()}
    return families.get(cause) or library[cause].family


#: Class of the published crash logs -> family of our library: one that is near is wrong.
FAMILIES: dict[str, str] = {
    "assertion": "assertion",
    "runtime_error": "runtime error",
    "cuda_oom": "out of GPU memory",
    "cuda_runtime": "GPU program",
    "device_mismatch": "device mismatch",
    "div_zero": "division by zero",
    "file_not_found": "file not found",
    "missing_module": "missing module",
    "nan_loss": "nan loss",
    "nccl": "collective communication",
    "oom_killer": "oom killer",
    "permission": "permission",
    "ram_oom": "host out of memory",
    "segfault": "segmentation fault",
    "traceback": "exception",
}

#: How a published stage begins -> our stages that mean it. A job iterates while it evaluates or
#: saves between two steps.
STAGES: dict[str, tuple[str, ...]] = {
    "launch": ("launch",),
    "initialis": ("initialise",),
    "initializ": ("initialise",),
    "data loading": ("load data",),
    "load data": ("load data",),
    "compil": ("compile",),
    "iterat": ("train", "evaluate", "checkpoint"),
    "train": ("train",),
    "evaluat": ("evaluate",),
    "checkpoint": ("checkpoint",),
    "tear": ("tear-down",),
}

_RANK = re.compile(r"\b(?:rank|device)[-_ ]?(\d+)$")


def class_is_right(cause_class: str, family: str) -> bool:
    """Return True if the family corresponds to the published class."""
    return FAMILIES.get(cause_class) == family


def stages_of(published: str) -> tuple[str, ...]:
    """Our stages that a published one means; () for none, which is not scored."""
    words = published.lower()
    return next((stages for start, stages in STAGES.items() if words.startswith(start)), ())


def faulty_rank(published: str) -> int | None:
    """The faulty rank or device that a manifest names; None for words about anything else.

    >>> faulty_rank("w_1 device-1"), faulty_rank("this node")
    (1, None)
    """
    found = _RANK.search(published.strip().lower())
    return int(found[1]) if found else None
