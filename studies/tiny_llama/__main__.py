"""`torchrun ... -m studies.tiny_llama`: see `--help`."""

from __future__ import annotations

import json
import os
import time

from rmetric._util.errors import WRONG, exit_with, fail
from studies.tiny_llama.settings import parser, settings_of, shape_of


def main(arguments: list[str] | None = None) -> int:
    """Returns 0, also after a requested stop; 2 for a wrong command line."""
    options = parser().parse_args(arguments)
    try:
        if options.model_json:
            print(json.dumps(shape_of(options).as_json()))
            return 0
        settings = settings_of(options, int(os.environ.get("WORLD_SIZE", "1")))
        from studies.tiny_llama.loop import device_of, train

        device = device_of(options.device)
    except ValueError as error:
        if os.environ.get("RANK", "0") == "0":
            return fail(error)
        time.sleep(1.0)  # torchrun ends all ranks at the first exit: let rank 0 print first
        return WRONG
    train(settings, device)
    return 0


if __name__ == "__main__":
    exit_with(main)
