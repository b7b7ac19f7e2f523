"""The parts that `python -m studies.gpu` runs, but the twins: one a process.

The cost of the monitor is that of benchmarks/overhead.py: in each turn a model with and one
without it take a step, in alternating order, and the ratio of the two times is kept.
"""

from __future__ import annotations

import gc
import json
import os
import platform
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
from torch.profiler import profile

from benchmarks import overhead, rescue_snapshots
from benchmarks.overhead import WARM_UP, Trained
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
from studies.common.command import command_parser

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

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")

Wrapper = Callable[[torch.nn.Module], Any]


def same(model: torch.nn.Module) -> torch.nn.Module:
    return model


def shape_of(name: str) -> tuple[int, int]:
    """Sequences and tokens of a step."""
    return SHAPES_ON_GPU.get(name, overhead.MODELS[name][1]) if ON_GPU else SHAPE_ON_CPU


@contextmanager
def training(
    name: str, *, watched: bool, steps: int = WARM_UP, wrap: Wrapper = same,
    shape: tuple[int, int] | None = None,
) -> Iterator[tuple[Trained, Callable[[int], torch.Tensor]]]:  # fmt: skip
    """A model of `benchmarks.overhead` after `steps`, maybe with the monitor; tokens of a turn."""
    build, shape = overhead.MODELS[name][0], shape or shape_of(name)
    torch.manual_seed(0)
    with DEVICE:
        model = wrap(build().to(torch.bfloat16 if ON_GPU else torch.float32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=ON_GPU)
    inner: Any = getattr(model, "module", model)
    vocabulary = int(inner.config.vocab_size)

    def tokens(turn: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(turn)
        return torch.randint(0, vocabulary, shape, generator=generator).to(DEVICE)

    with tempfile.TemporaryDirectory() as folder:
        variant = overhead.ours_and_clip if watched else overhead.clip_alone
        loop = variant(model, optimizer, Path(folder))
        for turn in range(steps):
            loop.step(tokens(turn))
        yield loop, tokens
        if loop.monitor is not None:
            loop.monitor.close()


def emptied() -> int:
    """Free what ended trainings held, which refer to themselves; bytes of GPU memory in use."""
    gc.collect()
    if ON_GPU:
        torch.cuda.empty_cache()
    return torch.cuda.memory_allocated() if ON_GPU else 0


def measure_overhead(*, tiny: bool) -> dict[str, Any]:
    """Ratio of the step times with and without the monitor, paired by turn."""
    models = SMALL if tiny else LARGE
    return {"models": {name: paired(name, turns) for name, turns in models.items()}}


def paired(
    name: str, turns: int, wrap: Wrapper = same, shape: tuple[int, int] | None = None
) -> dict[str, Any]:
    """Steps in turn with and without the monitor: their times, and whether the weights agree."""
    make = partial(training, name, wrap=wrap, shape=shape)
    memory = [emptied()]
    with make(watched=False) as (plain, tokens):
        memory.append(torch.cuda.memory_allocated() if ON_GPU else 0)
        with make(watched=True) as (watched, _):
            memory.append(torch.cuda.memory_allocated() if ON_GPU else 0)
            peaks = {False: 0, True: 0}
            for turn in range(WARM_UP, WARM_UP + turns):
                for loop in (plain, watched) if turn % 2 == 0 else (watched, plain):
                    peak = most_bytes(partial(loop.step, tokens(turn)))
                    peaks[loop is watched] = max(peaks[loop is watched], peak)
            weights = zip(plain.model.parameters(), watched.model.parameters(), strict=True)
            equal = all(torch.equal(local(a), local(b)) for a, b in weights)
            assert watched.monitor is not None
            problem = watched.monitor.problem
    before, after = (loop.seconds[WARM_UP:] for loop in (plain, watched))
    ratios = sorted(b / a for a, b in zip(before, after, strict=True))
    low, _, high = quantiles(ratios, n=4)
    return {
        "parameters": sum(p.numel() for p in plain.model.parameters()),
        "batch": list(shape or shape_of(name)),
        "turns": turns,
        "step_seconds_without": median(before),
        "step_seconds_with": median(after),
        "ratio": median(ratios),
        "ratio_quartiles": [low, high],
        "seconds_in_monitor_calls": median(watched.own[WARM_UP:]),
        "weights_equal_bit_for_bit": equal,
        "bytes_kept": [memory[1] - memory[0], memory[2] - memory[1]] if ON_GPU else None,
        "bytes_more_during_a_step": [peaks[False], peaks[True]] if ON_GPU else None,
        "problem": problem,
    }


def most_bytes(step: Callable[[], Any]) -> int:
    """Bytes of the GPU's memory that `step` takes at most, over what was in use; 0 without one."""
    if not ON_GPU:
        step()
        return 0
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    step()
    return torch.cuda.max_memory_allocated() - held


def measure_equal(*, tiny: bool) -> dict[str, Any]:
    """Whether the weights after some steps are those of another training with the same data."""
    name = next(iter(SMALL if tiny else LARGE))
    default, deterministic = (compared(name, deterministic=how) for how in (False, True))
    return {"model": name, "steps": COMPARED, "default": default, "deterministic": deterministic}


def compared(
    name: str, *, deterministic: bool, wrap: Wrapper = same, shape: tuple[int, int] | None = None
) -> dict[str, Any]:
    """Two trainings without the monitor and one with it: whose weights are equal bit for bit."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # else cuBLAS refuses
    torch.use_deterministic_algorithms(deterministic)
    digests = []  # sums of the bits of each weight tensor
    whole = {2: torch.int16, 4: torch.int32}
    try:
        for watched in (False, False, True):
            emptied()
            torch._dynamo.reset()
            make = training(name, watched=watched, steps=COMPARED, wrap=wrap, shape=shape)
            with make as (loop, _):
                digests.append([
                    int(local(p).view(whole[p.element_size()]).sum(dtype=torch.int64))
                    for p in loop.model.parameters()
                ])  # fmt: skip
    finally:
        torch.use_deterministic_algorithms(False)
    first = digests[0]
    again, monitored = (
        sum(a != b for a, b in zip(first, other, strict=True)) for other in digests[1:]
    )
    return {
        "without_twice": not again,
        "with_and_without": not monitored,
        "tensors_that_differ_without": again,
        "tensors_that_differ_with": monitored,
    }


def measure_trace(*, tiny: bool) -> dict[str, Any]:
    """Host waits in a profiler trace of some steps, with and without the monitor."""
    models = SMALL if tiny else LARGE
    return {"steps": TRACED, "models": {name: waits_of(name) for name in models}}


def waits_of(name: str) -> dict[str, Any]:
    """Number of each of `WAITS`, which some steps have."""
    found: dict[str, dict[str, int]] = {}
    for label, watched in (("without", False), ("with", True)):
        with training(name, watched=watched) as (loop, tokens):
            batches = [tokens(turn) for turn in range(TRACED)]
            with profile() as profiler:
                for batch in batches:
                    loop.step(batch)
        names = Counter(event.name for event in profiler.events())
        found[label] = {
            wait: sum(number for name, number in names.items() if name.startswith(wait))
            for wait in WAITS
        }
        del loop
        emptied()
    more = {wait: found["with"][wait] - found["without"][wait] for wait in WAITS}
    return {**found, "more_with_the_monitor": {wait: n for wait, n in more.items() if n}}


def measure_snapshots(*, tiny: bool) -> dict[str, Any]:
    """Cost of the rescue's snapshots to a step, for each of `SNAPSHOTS`."""
    models = {"tiny": SNAPSHOTS_ON_CPU} if tiny else SNAPSHOTS
    found = dict[str, Any]()
    for name, options in models.items():
        emptied()
        found[name] = rescue_snapshots.measure(rescue_snapshots.arguments(options.split()))
        print_now(found)
    return {"models": found}


def print_now(found: Any) -> None:
    """Print what was measured so far: it is kept if the part's time ends."""
    print(json.dumps(found, default=str), flush=True)


def measure_checkpoints(
    *, tiny: bool, saves: int = SAVES, asynchronous: bool = True
) -> dict[str, Any]:
    """Saves of the guard's checkpoints with AdamW's states, in the background or waited for."""
    name = "5M" if tiny else "qwen2.5-3B"
    costs = list[dict[str, Any]]()
    free = shutil.disk_usage(tempfile.gettempdir()).free
    with tempfile.TemporaryDirectory() as folder, training(name, watched=False) as (loop, tokens):
        batch = tokens(0)
        state = {"training": ModelState(loop.model, loop.optimizer)}
        saving = Checkpoints(
            Path(folder) / "checkpoints", keep=1, fingerprint=name, asynchronous=asynchronous
        )
        own = psutil.Process().memory_info
        before_all = own().rss
        for step in range(1, saves + 1):
            alone = loop.seconds[-WARM_UP:]
            loop.seconds.clear()
            saving.begin(step, state)
            while (outcome := saving.poll()) is None:
                loop.step(batch)
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
                    "step_seconds_beside": median(loop.seconds) if loop.seconds else None,
                    "steps_beside": len(loop.seconds),
                    "bytes_more_of_host_memory": own().rss - before_all,
                }
            )
            print_now(costs)
            for _ in range(WARM_UP):
                loop.step(batch)
    return {"model": name, "free_bytes": free, "saves": costs}


def measure_nvml(*, tiny: bool) -> dict[str, Any]:
    """NVML's answers, the time of one, and the verdicts on idle and working GPUs."""
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
    values = {
        name: sorted(value) if isinstance(value, frozenset) else value
        for name, value in asdict(reading).items()
    }
    return {
        "fields": {name: value for name, value in values.items() if value is not None},
        "not_answered": sorted(name for name, value in values.items() if value is None),
    }


def multiply() -> Callable[[], None]:
    """Products of large matrices, as many as a GPU finishes in some tenths of a second."""
    size, times, dtype = (8192, 100, torch.bfloat16) if ON_GPU else (256, 10, torch.float32)
    matrix = torch.ones(size, size, device=DEVICE, dtype=dtype)

    def work() -> None:
        for _ in range(times):
            torch.mm(matrix, matrix)
        overhead.synchronize(DEVICE)

    return work


def cost_of_reading() -> dict[str, float]:
    """Median seconds and CPU seconds of one reading of the first GPU, of 50."""
    import pynvml

    library = NvmlLibrary(pynvml)
    gpu = library.find(None)[0]
    library.read(gpu, 0.0)  # opens what the later ones use
    wall, own = [], []
    for _ in range(50):
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
    if ON_GPU:
        wrappers["cuda_graphs"] = partial(torch.compile, mode="reduce-overhead")
    name, turns = next(reversed((SMALL if tiny else LARGE).items()))
    backend = "nccl" if ON_GPU else "gloo"
    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{folder}/store"
        torch.distributed.init_process_group(backend, init_method=store, rank=0, world_size=1)
        try:
            models = {key: with_and_without(name, turns, wrap) for key, wrap in wrappers.items()}
        finally:
            torch.distributed.destroy_process_group()
    return {"backend": backend, "model": name, "turns": turns, "wrapped": models}


def sharded(model: torch.nn.Module) -> torch.nn.Module:
    fully_shard(model, mesh=init_device_mesh(DEVICE.type, (1,)))
    return model


def with_and_without(name: str, turns: int, wrap: Wrapper) -> dict[str, Any]:
    """`paired` on a wrapped model; an error of one wrapper does not end the others."""
    shape = SHAPE_WRAPPED if ON_GPU else SHAPE_ON_CPU
    try:
        equal = compared(name, deterministic=True, wrap=wrap, shape=shape)
        return {"equal": equal, **paired(name, turns, wrap, shape)}
    except Exception as error:
        return {"problem": f"{type(error).__name__}: {error}"[:2000]}


def measure_rescued(*, tiny: bool) -> dict[str, Any]:
    """A training that gets noise for data, with and without `Rescue`, beside its twin."""
    name, steps = ("5M", 160) if tiny else ("100M", 300)
    noise, rescue = range(steps // 2, steps // 2 + steps // 16), Rescue()
    return {
        "model": name,
        "steps": steps,
        "noise_in_steps": [noise[0] + 1, noise[-1] + 1],
        "undisturbed": rescued_training(name, steps, noise=range(0), rescue=None),
        "noise_alone": rescued_training(name, steps, noise=noise, rescue=None),
        "rescued": rescued_training(name, steps, noise=noise, rescue=rescue),
        "decisions": rescue.decisions,
        "problem": rescue.problem or None,
    }


def rescued_training(
    name: str, steps: int, *, noise: range, rescue: Rescue | None
) -> dict[str, Any]:
    """Train on sequences that count upwards in strides; noise in the batches of `noise`."""
    build, shape = overhead.MODELS[name]
    shape = shape if ON_GPU else SHAPE_ON_CPU
    torch.manual_seed(0)
    with DEVICE:
        model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = [counting(shape, step, model.config.vocab_size, step in noise) for step in range(steps)]
    held_out = counting(shape, steps, model.config.vocab_size, False).to(DEVICE)
    loop = enumerate(data, 1) if rescue is None else rescue.steps(data, steps)
    with tempfile.TemporaryDirectory() as folder:
        actions = [] if rescue is None else [rescue]
        monitor = Monitor(model, optimizer, log=Path(folder) / "run.jsonl", actions=actions)
        overhead.synchronize(DEVICE)
        began, taken = time.perf_counter(), 0
        for _, batch in loop:
            tokens = batch.to(DEVICE)
            with torch.autocast(DEVICE.type, torch.bfloat16, enabled=ON_GPU):
                loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            monitor.check_before_step(loss)
            optimizer.step()
            optimizer.zero_grad()
            taken += 1
        overhead.synchronize(DEVICE)
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
    from benchmarks.report import processor

    gpu = None
    if ON_GPU:
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
    "checkpoints_waiting": partial(measure_checkpoints, saves=1, asynchronous=False),
    "rescued": measure_rescued,
}


def main(argv: list[str] | None = None) -> int:
    parser = command_parser("gpu.measure", __doc__)
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
