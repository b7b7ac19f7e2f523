"""The training that `benchmarks/restart_peers.py` strikes: one job for every launcher.

    torchrun ... benchmarks/restart_worker.py --folder RUN [options of studies.tiny_llama]
    python benchmarks/restart_worker.py torchft --folder RUN --replica 0 --steps 100

The first is the reference training; it notes the time of each step and beats for ft_launcher.
The second is the same model under torchft, one replica group a process.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def note(folder: Path, rank: int, step: int, **more: Any) -> None:
    line = {"time": time.time(), "step": step, "pid": os.getpid(), **more}
    with open(folder / f"steps-{rank}.jsonl", "a") as file:
        file.write(json.dumps(line) + "\n")


def reference() -> int:
    from studies.tiny_llama import loop
    from studies.tiny_llama.__main__ import main

    client = None
    if "FT_RANK_MONITOR_IPC_SOCKET" in os.environ:
        from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient

        client = RankMonitorClient()
        client.init_workload_monitoring()

    class Noted(loop.ReferenceTraining):
        def run(self) -> None:
            if "RMETRIC_LAUNCH" not in os.environ:
                # Other launchers wait 30 s for ranks that handle TERM, as the guard does.
                self.guard._requests.close()
            super().run()

        def step(self, step: int) -> Any:
            totals = super().step(step)
            note(self.settings.folder.path, self.rank, step)
            if client is not None:
                client.send_heartbeat()
            return totals

    loop.ReferenceTraining = Noted  # type: ignore[misc]
    return main()


def replica(arguments: list[str]) -> int:
    import argparse

    import torch
    from torch.distributed import TCPStore
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    from studies.common.llama import Llama, initialise
    from studies.common.llama_shape import Shape

    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--replica", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--sleep", type=float, default=0.05)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    shape = Shape(layers=2, hidden=64)
    model = Llama(shape)
    initialise(model, shape, 0)
    bare = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=False)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        bare.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
        min_replica_size=1,
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": bare.state_dict()},
        replica_id=f"replica-{options.replica}-",
        timeout=timedelta(seconds=10),
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        hostname="127.0.0.1",
    )
    parallel, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, bare)
    generator = torch.Generator().manual_seed(options.replica)
    while manager.current_step() < options.steps:
        tokens = torch.randint(shape.vocabulary, (6, shape.sequence + 1), generator=generator)
        optimizer.zero_grad()
        logits = parallel(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        note(
            options.folder, options.replica, manager.current_step(),
            replicas=manager.num_participants(),
        )  # fmt: skip
        time.sleep(options.sleep)
    manager.shutdown(wait=False)
    os._exit(0)  # its servers have threads of their own


if __name__ == "__main__":
    if sys.argv[1:2] == ["torchft"]:
        sys.exit(replica(sys.argv[2:]))
    sys.exit(reference())
