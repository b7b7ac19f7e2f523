"""The parts that `python -m studies.gpu` runs, but the twins: one a process.

The cost of the monitor is that of benchmarks/overhead.py: in each turn a model with and one
without it take a step, in alternating order, and the ratio of the two times is kept.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import psutil
import torch
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from benchmarks import overhead, rescue_snapshots
from rmetric.guard.checkpoints import Checkpoints, SavedCheckpoint
from rmetric.guard.training_state import ModelState
from rmetric.logs import write_atomically
from rmetric.monitor import Monitor
from rmetric.monitor.gradients import local
from rmetric.rescue import Rescue
from rmetric.telemetry.nvml_library import NvmlLibrary
from rmetric.telemetry.reading import Reading
from rmetric.telemetry.risk import RiskConfig
from rmetric.telemetry.sources import GpuWatch

#: Turns of each model, and steps of a trace; the small form is for a CPU.
LARGE = {"qwen2.5-3B": 24, "100M": 60}
SMALL = {"5M": 6}
SHAPE_ON_CPU = (1, 32)  # sequences and tokens of a step
SHAPES_ON_GPU = {"100M": (64, 512)}  # with fewer tokens the GPU would wait for the host
SHAPE_WRAPPED = 16, 512
SAVES = 2  # of a checkpoint; the first one makes room in host memory
TRACED, COMPARED = 5, 4  # steps
#: Names of a trace behind which the host waits for the device, or copies from it.
WAITS = (
    "cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize",
    "Memcpy DtoH", "aten::_local_scalar_dense", "aten::item", "aten::nonzero",
)  # fmt: skip


#: Options of `benchmarks.rescue_snapshots`. Three snapshots of 3 billion weights take 55 GB.
SNAPSHOTS = {
    "100M": "--rounds 4 --warm-up 5",
    "3B": "--rounds 3 --warm-up 3 --far 20 --dtype bfloat16 --width 2560 --layers 39",
}
SNAPSHOTS_ON_CPU = "--rounds 2 --warm-up 1 --width 64 --layers 2 --rows 2 --tokens 16"

Wrapper = Callable[[torch.nn.Module], Any]


def device_of() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def same(model: torch.nn.Module) -> torch.nn.Module:
    return model


def make(name: str, folder: Path, *, watched: bool, wrap: Wrapper = same) -> overhead.Trained:
    """A model of `benchmarks.overhead` that clips its gradients, with or without the monitor."""
    build, _ = overhead.MODELS[name]
    device = device_of()
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with device:
        model = wrap(build().to(dtype))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=device.type == "cuda")
    variant = overhead.ours_and_clip if watched else overhead.clip_alone
    return variant(model, optimizer, folder)


def shape_of(name: str) -> tuple[int, int]:
    """Sequences and tokens of a step."""
    if device_of().type != "cuda":
        return SHAPE_ON_CPU
    return SHAPES_ON_GPU.get(name, overhead.MODELS[name][1])


def tokens_of(shape: tuple[int, int], vocabulary: int, turn: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(turn)
    return torch.randint(0, vocabulary, shape, generator=generator).to(device_of())


def measure_overhead(*, tiny: bool) -> dict[str, Any]:
    """Ratio of the step times with and without the monitor, paired by turn."""
    models = SMALL if tiny else LARGE
    return {"models": {name: paired(name, turns) for name, turns in models.items()}}


def paired(
    name: str, turns: int, wrap: Wrapper = same, shape: tuple[int, int] | None = None
) -> dict[str, Any]:
    """Steps in turn with and without the monitor: their times, and whether the weights agree."""
    shape = shape or shape_of(name)
    gc.collect()
    if on_gpu := device_of().type == "cuda":
        torch.cuda.empty_cache()
    with tempfile.TemporaryDirectory() as folder:
        plain, kept_without = warmed(name, shape, Path(folder), watched=False, wrap=wrap)
        watched, kept_with = warmed(name, shape, Path(folder), watched=True, wrap=wrap)
        peaks = {False: 0, True: 0}
        for turn in range(overhead.WARM_UP, overhead.WARM_UP + turns):
            tokens = tokens_of(shape, vocabulary_of(plain), turn)
            order = [plain, watched] if turn % 2 == 0 else [watched, plain]
            for one in order:
                peak = most_bytes(partial(one.step, tokens))
                peaks[one is watched] = max(peaks[one is watched], peak)
        weights = zip(plain.model.parameters(), watched.model.parameters(), strict=True)
        equal = all(torch.equal(local(a), local(b)) for a, b in weights)
        monitor = watched.monitor
        assert monitor is not None
        problem = monitor.problem
        monitor.close()
    before, after = (one.seconds[overhead.WARM_UP :] for one in (plain, watched))
    ratios = sorted(b / a for a, b in zip(before, after, strict=True))
    low, _, high = quantiles(ratios, n=4)
    number = sum(p.numel() for p in plain.model.parameters())
    return {
        "parameters": number,
        "batch": list(shape),
        "turns": turns,
        "step_seconds_without": median(before),
        "step_seconds_with": median(after),
        "ratio": median(ratios),
        "ratio_quartiles": [low, high],
        "seconds_in_monitor_calls": median(watched.own[overhead.WARM_UP :]),
        "weights_equal_bit_for_bit": equal,
        "bytes_kept": [kept_without, kept_with] if on_gpu else None,
        "bytes_more_during_a_step": [peaks[False], peaks[True]] if on_gpu else None,
        "problem": problem,
    }


def warmed(
    name: str, shape: tuple[int, int], folder: Path, *, watched: bool, wrap: Wrapper
) -> tuple[overhead.Trained, int]:
    """A model that has made some steps, and the bytes of the GPU's memory that it keeps."""
    before = bytes_in_use()
    one = make(name, folder, watched=watched, wrap=wrap)
    for turn in range(overhead.WARM_UP):
        one.step(tokens_of(shape, vocabulary_of(one), turn))
    return one, bytes_in_use() - before


def vocabulary_of(one: overhead.Trained) -> int:
    return int(getattr(one.model, "module", one.model).config.vocab_size)


def bytes_in_use() -> int:
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0


def most_bytes(step: Callable[[], Any]) -> int:
    """Bytes of the GPU's memory that `step` takes at most, over what was in use; 0 without one."""
    if not torch.cuda.is_available():
        step()
        return 0
    torch.cuda.reset_peak_memory_stats()
    held = bytes_in_use()
    step()
    return torch.cuda.max_memory_allocated() - held


def measure_equal(*, tiny: bool) -> dict[str, Any]:
    """Whether the weights after some steps are those of another training with the same data.

    Without deterministic algorithms two trainings without the monitor may differ too.
    """
    name = next(iter(SMALL if tiny else LARGE))
    return {
        "model": name,
        "steps": COMPARED,
        "default": compared(name, shape_of(name), deterministic=False),
        "deterministic": compared(name, shape_of(name), deterministic=True),
    }


def compared(
    name: str, shape: tuple[int, int], *, deterministic: bool, wrap: Wrapper = same
) -> dict[str, Any]:
    """Two trainings without the monitor and one with it: whose weights are equal bit for bit."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # else cuBLAS refuses
    torch.use_deterministic_algorithms(deterministic)
    try:
        without, again, watched = (
            digests_after_training(name, shape, watched=watched, wrap=wrap)
            for watched in (False, False, True)
        )
    finally:
        torch.use_deterministic_algorithms(False)
    return {
        "without_twice": without == again,
        "with_and_without": without == watched,
        "tensors_that_differ_without": differing(without, again),
        "tensors_that_differ_with": differing(without, watched),
    }


def differing(one: list[int], other: list[int]) -> int:
    return sum(a != b for a, b in zip(one, other, strict=True))


def digests_after_training(
    name: str, shape: tuple[int, int], *, watched: bool, wrap: Wrapper
) -> list[int]:
    """Sums of the bits of each weight tensor."""
    gc.collect()
    torch._dynamo.reset()
    with tempfile.TemporaryDirectory() as folder:
        one = make(name, Path(folder), watched=watched, wrap=wrap)
        for turn in range(COMPARED):
            one.step(tokens_of(shape, vocabulary_of(one), turn))
        if one.monitor is not None:
            one.monitor.close()
        whole = {2: torch.int16, 4: torch.int32}
        return [
            int(local(p).view(whole[p.element_size()]).sum(dtype=torch.int64))
            for p in one.model.parameters()
        ]


def measure_trace(*, tiny: bool) -> dict[str, Any]:
    """Host waits in a profiler trace of some steps, with and without the monitor."""
    models = SMALL if tiny else LARGE
    return {"steps": TRACED, "models": {name: waits_of(name) for name in models}}


def waits_of(name: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for label, watched in (("without", False), ("with", True)):
        with tempfile.TemporaryDirectory() as folder:
            one = make(name, Path(folder), watched=watched)
            for turn in range(overhead.WARM_UP):
                one.step(tokens_of(shape_of(name), vocabulary_of(one), turn))
            batches = [
                tokens_of(shape_of(name), vocabulary_of(one), turn) for turn in range(TRACED)
            ]
            found[label] = traced(one, batches)
            if one.monitor is not None:
                one.monitor.close()
            del one
            gc.collect()
    more = {key: found["with"].get(key, 0) - found["without"].get(key, 0) for key in found["with"]}
    return found | {"more_with_the_monitor": {key: n for key, n in more.items() if n}}


def traced(one: overhead.Trained, batches: list[torch.Tensor]) -> dict[str, int]:
    """Number of each of `WAITS` in a step for each of `batches`."""
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiler:
        for tokens in batches:
            one.step(tokens)
    names = Counter(event.name for event in profiler.events())
    return {
        wait: sum(number for name, number in names.items() if name.startswith(wait))
        for wait in WAITS
    }


def measure_snapshots(*, tiny: bool) -> dict[str, Any]:
    """Cost of the rescue's snapshots to a step, for each of `SNAPSHOTS`."""
    models = {"tiny": SNAPSHOTS_ON_CPU} if tiny else SNAPSHOTS
    found = dict[str, Any]()
    for name, options in models.items():
        gc.collect()  # the trainings before refer to themselves
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        found[name] = rescue_snapshots.measure(rescue_snapshots.arguments(options.split()))
        tell(found)
    return {"models": found}


def tell(found: Any) -> None:
    """Print what was measured so far: it is kept if the part's time ends."""
    print(json.dumps(found, default=str), flush=True)


def measure_checkpoints(*, tiny: bool) -> dict[str, Any]:
    """Saves of the guard's checkpoints with AdamW's states, in the background."""
    return saved(tiny=tiny, saves=SAVES, asynchronous=True)


def measure_checkpoints_waiting(*, tiny: bool) -> dict[str, Any]:
    """A save for which the training waits."""
    return saved(tiny=tiny, saves=1, asynchronous=False)


def saved(*, tiny: bool, saves: int, asynchronous: bool) -> dict[str, Any]:
    """Seconds of each save and of the steps before and beside it; bytes of host memory."""
    name = "5M" if tiny else "qwen2.5-3B"
    costs = list[dict[str, Any]]()
    free = shutil.disk_usage(tempfile.gettempdir()).free
    with tempfile.TemporaryDirectory() as folder:
        one = make(name, Path(folder), watched=False)
        tokens = tokens_of(shape_of(name), vocabulary_of(one), 0)
        state = {"training": ModelState(one.model, one.optimizer)}
        target = Path(folder) / "checkpoints"
        saving = Checkpoints(target, keep=1, fingerprint=name, asynchronous=asynchronous)
        for _ in range(overhead.WARM_UP):
            one.step(tokens)
        own = psutil.Process().memory_info
        before_all = own().rss
        for step in range(1, saves + 1):
            alone = one.seconds[-overhead.WARM_UP :]
            one.seconds.clear()
            saving.begin(step, state)
            while (outcome := saving.poll()) is None:
                one.step(tokens)
            if not isinstance(outcome, SavedCheckpoint):
                costs.append({"problem": str(outcome)})
                break
            files = [file for file in outcome.path.rglob("*") if file.is_file()]
            costs.append(
                {
                    "bytes": sum(file.stat().st_size for file in files),
                    "blocking_seconds": outcome.blocking_seconds,
                    "durable_seconds": outcome.durable_seconds,
                    "good_seconds": outcome.seconds,
                    "step_seconds_before": median(alone),
                    "step_seconds_beside": median(one.seconds) if one.seconds else None,
                    "steps_beside": len(one.seconds),
                    "bytes_more_of_host_memory": own().rss - before_all,
                }
            )
            tell(costs)
            for _ in range(overhead.WARM_UP):
                one.step(tokens)
    return {"model": name, "free_bytes": free, "saves": costs}


def measure_nvml(*, tiny: bool) -> dict[str, Any]:
    """What NVML answers here, what an answer costs, and the verdicts on GPUs that idle and work."""
    seconds, interval = (1.0, 0.1) if tiny else (10.0, 1.0)
    with GpuWatch(config=RiskConfig(interval=interval)) as watch:
        if not watch.hardware.ready():
            return {"problem": watch.hardware.problem}
        idle = judged(watch, seconds, lambda: time.sleep(interval / 4))
        busy = judged(watch, seconds, multiply())
    return {"cost": cost_of_reading(), "idle": idle, "busy": busy}


def judged(watch: GpuWatch, seconds: float, work: Callable[[], Any]) -> dict[str, Any]:
    """Changed verdicts while `work` runs for so long; each GPU's last verdict and reading."""
    end = time.monotonic() + seconds
    changed = []
    while time.monotonic() < end:
        work()
        changed += [verdict.as_json() for verdict in watch.poll()]
    return {
        "changed": changed,
        "verdicts": {key: verdict.as_json() for key, verdict in watch.verdicts().items()},
        "readings": {key: answered(reading) for key, reading in watch.readings().items()},
    }


def answered(reading: Reading) -> dict[str, Any]:
    """The fields that NVML answered, and the names of those that it did not."""
    values = asdict(reading)
    return {
        "fields": {
            name: sorted(value) if isinstance(value, frozenset) else value
            for name, value in values.items()
            if value is not None
        },
        "not_answered": sorted(name for name, value in values.items() if value is None),
    }


def multiply() -> Callable[[], None]:
    """Products of large matrices, as many as a GPU finishes in some tenths of a second."""
    device = device_of()
    size, times = (8192, 100) if device.type == "cuda" else (256, 10)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    matrix = torch.ones(size, size, device=device, dtype=dtype)

    def work() -> None:
        for _ in range(times):
            torch.mm(matrix, matrix)
        overhead.synchronize(device)

    return work


def cost_of_reading(readings: int = 50) -> dict[str, float]:
    """Median seconds and CPU seconds of one reading of the first GPU."""
    import pynvml

    library = NvmlLibrary(pynvml)
    gpu = library.find(None)[0]
    library.read(gpu, 0.0)  # opens what the later ones use
    wall, own = [], []
    for _ in range(readings):
        began, began_own = time.perf_counter(), time.thread_time()
        library.read(gpu, 0.0)
        wall.append(time.perf_counter() - began)
        own.append(time.thread_time() - began_own)
    library.close()
    return {"seconds": median(wall), "cpu_seconds": median(own)}


def measure_wrapped(*, tiny: bool) -> dict[str, Any]:
    """Whether weights stay equal with the monitor under DDP, FSDP2, torch.compile, CUDA graphs."""
    wrappers: dict[str, Wrapper] = {"ddp": DistributedDataParallel, "fsdp": sharded}
    compiler = {"backend": "aot_eager"} if tiny else {}  # inductor needs a C++ compiler on a CPU
    wrappers["compiled"] = partial(torch.compile, **compiler)
    if device_of().type == "cuda":
        wrappers["cuda_graphs"] = partial(torch.compile, mode="reduce-overhead")
    name, turns = next(reversed((SMALL if tiny else LARGE).items()))
    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{folder}/store"
        backend = "nccl" if device_of().type == "cuda" else "gloo"
        torch.distributed.init_process_group(backend, init_method=store, rank=0, world_size=1)
        try:
            models = {key: with_and_without(name, turns, wrap) for key, wrap in wrappers.items()}
        finally:
            torch.distributed.destroy_process_group()
    return {"backend": backend, "model": name, "turns": turns, "wrapped": models}


def sharded(model: torch.nn.Module) -> torch.nn.Module:
    """The model under FSDP2, with itself as the only unit."""
    fully_shard(model, mesh=init_device_mesh(device_of().type, (1,)))
    return model


def with_and_without(name: str, turns: int, wrap: Wrapper) -> dict[str, Any]:
    """`paired` on a wrapped model; an error of one wrapper does not end the others."""
    torch._dynamo.reset()
    shape = SHAPE_WRAPPED if device_of().type == "cuda" else SHAPE_ON_CPU
    try:
        return {
            "equal": compared(name, shape, deterministic=True, wrap=wrap),
            **paired(name, turns, wrap, shape),
        }
    except Exception as error:
        return {"problem": f"{type(error).__name__}: {error}"[:2000]}


def measure_rescued(*, tiny: bool) -> dict[str, Any]:
    """A training that gets noise for data, with and without `Rescue`, beside its twin."""
    name, steps = ("5M", 160) if tiny else ("100M", 300)
    undisturbed = rescued_training(name, steps, noise=range(0), rescue=None)
    noise = range(steps // 2, steps // 2 + steps // 16)
    alone = rescued_training(name, steps, noise=noise, rescue=None)
    rescue = Rescue()
    rescued = rescued_training(name, steps, noise=noise, rescue=rescue)
    return {
        "model": name,
        "steps": steps,
        "noise_in_steps": [noise[0] + 1, noise[-1] + 1],
        "undisturbed": undisturbed,
        "noise_alone": alone,
        "rescued": rescued,
        "decisions": rescue.decisions,
        "problem": rescue.problem or None,
    }


def rescued_training(
    name: str, steps: int, *, noise: range, rescue: Rescue | None
) -> dict[str, Any]:
    """Train on sequences that count upwards in strides; noise in the batches of `noise`."""
    build, shape = overhead.MODELS[name]
    device = device_of()
    if device.type == "cpu":
        shape = SHAPE_ON_CPU
    torch.manual_seed(0)
    with device:
        model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = [counting(shape, step, model.config.vocab_size, step in noise) for step in range(steps)]
    held_out = counting(shape, steps, model.config.vocab_size, False).to(device)
    loop = enumerate(data, 1) if rescue is None else rescue.steps(data, steps)
    with tempfile.TemporaryDirectory() as folder:
        actions = [] if rescue is None else [rescue]
        monitor = Monitor(model, optimizer, log=Path(folder) / "run.jsonl", actions=actions)
        overhead.synchronize(device)
        began, taken = time.perf_counter(), 0
        for _, batch in loop:
            tokens = batch.to(device)
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            monitor.check_before_step(loss)
            optimizer.step()
            optimizer.zero_grad()
            taken += 1
        overhead.synchronize(device)
        seconds = time.perf_counter() - began
        problem = monitor.problem
        monitor.close()
    with torch.no_grad():
        final = model(input_ids=held_out, labels=held_out).loss.item()
    return {"held_out_loss": final, "steps_taken": taken, "seconds": seconds, "problem": problem}


def counting(shape: tuple[int, int], number: int, vocabulary: int, noise: bool) -> torch.Tensor:
    """Sequences of t, t + s, t + 2 s ... modulo 64, with t and s at random; or noise."""
    generator = torch.Generator().manual_seed(number)
    if noise:
        return torch.randint(0, vocabulary, shape, generator=generator)
    first = torch.randint(0, 64, (shape[0], 1), generator=generator)
    stride = torch.randint(1, 9, (shape[0], 1), generator=generator)
    return (first + stride * torch.arange(shape[1])) % 64


def about() -> dict[str, Any]:
    """The hardware, the driver and the versions."""
    from benchmarks.report import processor

    gpu = None
    if torch.cuda.is_available():
        import pynvml

        found = torch.cuda.get_device_properties(0)
        pynvml.nvmlInit()
        driver = pynvml.nvmlSystemGetDriverVersion()
        gpu = {"name": found.name, "bytes": found.total_memory, "driver": driver}
    return {
        "gpu": gpu,
        "processor": processor(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


PARTS: dict[str, Callable[..., dict[str, Any]]] = {
    "nvml": measure_nvml,
    "overhead": measure_overhead,
    "equal": measure_equal,
    "trace": measure_trace,
    "wrapped": measure_wrapped,
    "snapshots": measure_snapshots,
    "checkpoints": measure_checkpoints,
    "checkpoints_waiting": measure_checkpoints_waiting,
    "rescued": measure_rescued,
}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m studies.gpu.measure", description=__doc__)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(argv)
    measured = PARTS[options.part](tiny=options.tiny)
    text = json.dumps(about() | measured, indent=2, default=str)
    write_atomically(options.out, [text.encode(), b"\n"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
