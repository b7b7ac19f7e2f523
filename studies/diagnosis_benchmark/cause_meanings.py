"""Causes of the library that mean a class of the written jobs or a kind of injected fault.

Written from the meanings of the words alone (`causes.py`, the titles of the signatures, the
variants of the injected faults), before any diagnosis of a written job had been looked at, and not
changed after that except for names that the library changes or adds, and one entry of `KINDS`: the
injected "out of range" is a token beyond the vocabulary, so the signature of that is right.

An entry is a family of the library ("NVLink"), a part of it by a pattern of ids
("network/ib_*"), or either at one stage of the diagnosis ("hang@load data"). A hang is an answer to
"one rank does not come out of reading its data" only if the diagnosis has that stage too.
"""

from __future__ import annotations

from collections.abc import Collection
from fnmatch import fnmatchcase
from typing import NamedTuple

from rmetric.diagnosis.inferred import inferred_causes
from rmetric.diagnosis.library import SignatureLibrary
from studies.diagnosis_benchmark.causes import CAUSES

#: Timeouts of collectives: a rank did not take part.
_WAITED = (
    "collective communication/*timeout",
    "collective communication/*timed_out",
    "collective communication/*stalled",
    "collective communication/nccl_lagging_rank",
    # Added by the library after the first look at the sealed jobs, which stays as it was.
    "collective communication/collective_not_entered",
    "collective communication/nccl_heartbeat_monitor",
    "collective communication/monitored_barrier_failed",
)
#: Lost connections: a rank is gone.
_LOST = (
    "collective communication/*_lost",
    "collective communication/*_gone",
    "collective communication/*_closed",
    "collective communication/*_reset",
    "collective communication/horovod_shut_down",
    "collective communication/nccl_failed_or_timed_out",
    "collective communication/nccl_gives_up",
    "collective communication/distributed_backend_error",
    "collective communication/mpi_fatal_error",
)
#: Written class (`causes.py`) -> entries that mean it.
CLASSES: dict[str, tuple[str, ...]] = {
    "hang_data": (
        "hang@load data",
        "silent rank@load data",
        "data loading/dataloader_timeout",
    ),
    "hang_collective": ("hang", "silent rank", *_WAITED),
    "hang_checkpoint": ("hang@checkpoint", "silent rank@checkpoint"),
    "hang_stopped": ("hang", "silent rank"),
    "collective_mismatch": (
        "collective mismatch",
        "uneven work",
        "collective communication/nccl_lagging_rank",
        "collective communication/collective_not_entered",
        "collective communication/monitored_barrier_failed",
        "collective communication/horovod_stalled",
    ),
    "gpu_lost": ("GPU hardware",),
    "gpu_memory_error": ("GPU memory error",),
    "gpu_nvlink": ("NVLink",),
    "network_link": (
        "network/ib_*",
        "network/ethernet_*",
        "network/no_route_between_nodes",
        "network/libfabric_error",
        "network/ucx_error",
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
        "collective communication/store_timeout",
        "collective communication/*_store_*",
        "collective communication/hccl_socket_timeout",
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
    "file_server": (
        "storage/network_file_system_trouble",
        "storage/nfs_stale_handle",
        "storage/input_output_error",
        "storage/file_server_failed",
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
        "native crash",
        "GPU program",
        "device mismatch",
        "data type mismatch",
        "compilation",
        "tokenizer",
    ),
    "outside": (),
    "none": (),
}
#: Answers that say only that something failed. They count as if no cause were named.
NO_CAUSE = (
    "error line",
    "exception/python_traceback",
    "exception/system_exit",
    "launcher/*_child_failed",
    "launcher/torchrun_first_failure",
    "launcher/launcher_ends_the_others",
    "launcher/slurm_task_failed",
    "launcher/slurm_step_torn_down",
    "launcher/slurmctld_job_failed",
    "launcher/batch_exit_code",
    "launcher/mpi_aborted",
    "launcher/subprocess_failed",
    "launcher/managed_replica_failed",
    "launcher/sagemaker_job_failed",
    "launcher/paddle_launch_failed",
    "launcher/ray_actor_died",
    "launcher/engine_core_failed",
    "launcher/pod_restarts",
)
#: Kind of injected fault -> entries that mean one of its variants.
KINDS: dict[str, tuple[str, ...]] = {
    "exception": (
        "exception",
        "assertion",
        "runtime error",
        "shape mismatch",
        "storage",
        "checkpoint",
        "tokenizer/token_out_of_vocabulary",
    ),
    "hang": ("hang", "silent rank", "collective mismatch", *_WAITED),
    "memory": ("host out of memory",),
    "slow": ("time limit",),
    "kill": ("killed", "silent rank"),
    "network": ("network", "silent rank", *_LOST, *_WAITED),
    "data": ("nan loss", "numerics", "data loading"),
    "environment": (
        "configuration",
        "rendezvous",
        "version mismatch",
        "installation",
        "file not found",
        "data loading/dataset_not_found",
        "network/gloo_connect_failed",
    ),
    "process": (
        "segmentation fault",
        "native crash",
        "shared memory/bus_error",
        "killed",
        "silent rank",
        "uneven work",
    ),
    "storage": ("storage", "disk full", "file not found", "data loading", "checkpoint"),
    "skew": ("shape mismatch", "collective mismatch", "configuration", "uneven work"),
    "deadlock": ("hang", "silent rank", "collective mismatch", "file not found", *_WAITED),
    "limits": ("resource limit", "storage/too_many_open_files", "exception/recursion_limit"),
    "numerics": ("nan loss", "numerics"),
}


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
    if any(answer.means(CLASSES[one]) for one in classes):
        return "right"
    if answer.means(NO_CAUSE):
        return "unknown"
    groups = {CAUSES[one][0] for one in classes}
    near = (CLASSES[one] for one, (group, _) in CAUSES.items() if group in groups)
    if any(answer.means(GROUPS[one]) for one in groups) or any(map(answer.means, near)):
        return "partly"
    return "wrong"


def _is_named(cause: str, family: str, entry: str) -> bool:
    """True if an entry, "family" or "family/pattern of ids", means a cause of a family."""
    of, _, pattern = entry.partition("/")
    return of == family and (not pattern or fnmatchcase(cause, pattern))


def family_of(cause: str, library: SignatureLibrary) -> str:
    """The family of a signature, or of a cause without one."""
    families = {one.id: one.family for one in inferred_causes().values()}
    return families.get(cause) or library[cause].family
