"""A training of two ranks that its rescue holds, for `rmetric supervise` and torchrun.

    python held_training.py [--bad-launches N]

A fault that stays, from step 22 on, is put in place of the calibrated detector's evidence. It is
there in the first `--bad-launches` launches of the run folder.
"""

import argparse
import os

import torch.distributed as dist

from rmetric.guard.run_folder import LAUNCH_VARIABLE, RunFolder
from rmetric.rescue import Rescue
from tests.rescue.test_action import ALWAYS, lasting
from tests.rescue.trainings import train


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--bad-launches", type=int, default=1)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    folder, rank = RunFolder.of_environment(), dist.get_rank()
    launch = int(os.environ[LAUNCH_VARIABLE].rpartition("-")[2])
    folder.beat(rank, 0, "starting")

    def at(executed, step, model, optimizer):
        folder.beat(rank, step)

    rescue = Rescue(ALWAYS, on_hold="exit")
    evidence = lasting if launch <= options.bad_launches else lambda detector, step: None
    outcome = train(rescue, kind="ddp", rank=rank, evidence_of=evidence, at=at)
    folder.beat(rank, outcome["taken"][-1], "finished")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
