"""A checkpoint as one file of tensors and plain values, whole or absent."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rmetric._util.durable import durable_file

logger = logging.getLogger("rmetric")

FORMAT = "rmetric emergency checkpoint, 1"
POINTER = "last_good"

PLAIN = (type(None), bool, int, float, str, bytes)


def plain(value: Any, where: str = "", copies: dict[Any, Tensor] | None = None) -> Any:
    """A copy of `value` on the host that a `weights_only` load accepts.

    Tensors that share their memory share it in the copy. Raises TypeError, with
    the place, for what is neither a tensor nor plain.
    """
    copies = {} if copies is None else copies
    if isinstance(value, Tensor):
        tensor = value.detach()
        key = (tensor.data_ptr(), tensor.device, tensor.dtype, tensor.shape, tensor.stride())
        if key not in copies or not tensor.numel():
            copies[key] = tensor.to("cpu", copy=True)
        return copies[key]
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    if type(value) in PLAIN:
        return value
    if isinstance(value, Mapping):
        return {
            plain(key, f"a key of {where}"): plain(inner, f"{where}[{key!r}]", copies)
            for key, inner in value.items()
        }
    if isinstance(value, (list, tuple)):
        inner = [plain(one, f"{where}[{i}]", copies) for i, one in enumerate(value)]
        return tuple(inner) if isinstance(value, tuple) else inner
    raise TypeError(f"{where or 'the value'} is a {type(value).__name__}, not a plain value")


def plain_states(
    states: Mapping[str, Callable[[], Any] | None], left_out: dict[str, str]
) -> dict[str, Any]:
    """State of each part by its name, as plain values; None for a part that is None.

    A part without such a state is None in the result, and `left_out` receives its name and why:
    the weights are worth saving without it.
    """
    found: dict[str, Any] = {}
    for name, state in states.items():
        try:
            found[name] = None if state is None else plain(state(), name)
        except Exception as error:
            found[name], left_out[name] = None, str(error)
    return found


def checkpoint_content(
    model: nn.Module, step: int, random: Any, left_out: Mapping[str, str], **more: Any
) -> dict[str, Any]:
    """What `restore` takes; names in the log what is left out."""
    for name, why in left_out.items():
        logger.error("rmetric: the checkpoint of step %d is without %s: %s", step, name, why)
    return {
        "format": FORMAT,
        "step": step,
        "alert": None,
        "suspect": None,
        "model": plain(bare(model).state_dict(), "model"),
        "random": plain(random, "random"),
        "left_out": dict(left_out),
    } | more


def write_whole(path: Path, content: Any) -> None:
    """Write a file that is on the disk, whole, before it has its name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with durable_file(path) as file:
        if isinstance(content, bytes):
            file.write(content)
        else:
            torch.save(content, file)


def random_state(devices: set[torch.device]) -> dict[str, Any]:
    """The state of every generator that a training draws from, on the host and on `devices`."""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),  # noqa: NPY002 (the one that training code draws from)
        "torch": torch.get_rng_state(),
        "cuda": {str(device): torch.cuda.get_rng_state(device) for device in devices},
    }


def set_random_state(state: Mapping[str, Any]) -> None:
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))  # noqa: NPY002
    torch.set_rng_state(state["torch"])
    for device, of_device in state["cuda"].items():
        if torch.cuda.is_available() and torch.device(device).index < torch.cuda.device_count():
            torch.cuda.set_rng_state(of_device, device)


def bare(model: nn.Module) -> nn.Module:
    """The model itself, without what DistributedDataParallel or torch.compile put around it."""
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model


def restore(
    path: Path | str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    scheduler: Any = None,
    scaler: Any = None,
    monitor: Any = None,
) -> dict[str, Any]:
    """Restore a checkpoint of `EmergencyCheckpoint` in place.

    The state is that after step ``step``; the next batch is that of the step after it.
    The generators of random numbers are set last: bring the data to their place before.

    Args:
        path: a checkpoint, or the folder, whose last good one is taken.
        model: receives the weights; of the same shape, wrapped or not.
        optimizer: restored, as are the next three; None is left out.
        scheduler: the learning-rate scheduler.
        scaler: the GradScaler.
        monitor: the `Monitor`.

    Returns:
        ``step``, ``alert`` (as a mapping), ``extra`` (what `extra_state` gave;
        None without it), ``suspect`` (``since`` and ``reason`` of the alarm during which it
        was saved; None for a clean one) and ``left_out`` (name of a part -> why it was not
        saved).

    Raises:
        ValueError: no such checkpoint, a file of something else, or of another model.
    """
    found = last_good(Path(path)) if Path(path).is_dir() else Path(path)
    if found is None or not found.is_file():
        raise ValueError(f"{path} is no checkpoint, nor a folder whose {POINTER!r} names one")
    path = found
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ValueError(f"{path} cannot be read as a checkpoint: {error}") from None
    if not isinstance(saved, dict) or saved.get("format") != FORMAT:
        raise ValueError(f"{path} is no checkpoint of rmetric's EmergencyCheckpoint")
    parts = {"optimizer": optimizer, "scheduler": scheduler, "scaler": scaler, "monitor": monitor}
    for name, part in parts.items():
        if part is not None and saved.get(name) is None:
            why = saved["left_out"].get(name, "there was none")
            raise ValueError(f"{path} holds no {name}: {why}")
    try:
        bare(model).load_state_dict(saved["model"])
    except RuntimeError as error:
        raise ValueError(f"{path} does not fit this model: {error}") from None
    for name, part in parts.items():
        if part is not None:
            part.load_state_dict(saved[name])
    set_random_state(saved["random"])
    return {key: saved.get(key) for key in ("step", "alert", "extra", "suspect", "left_out")}


def last_good(folder: Path) -> Path | None:
    """The newest whole checkpoint of a folder; None where there is none."""
    pointer = folder / POINTER
    path = folder / pointer.read_text().strip() if pointer.is_file() else None
    return path if path is not None and path.is_file() else None
