"""Replay training logs that exist already: `rmetric replay`, from a clone of the repository.

Reads our own logs and the authors', Hugging Face trainer_state.json, and any CSV or
JSONL with a step and a loss; files, folders, globs, .gz too. Without a PATH it reads the folder
logs_FULL_METRIC. The first 20 runs are drawn. See docs/replay.md.
"""

from __future__ import annotations

import argparse

from studies.common.command import ends_at_once, exit_with

with ends_at_once():
    from rmetric.cli import replay


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog=replay.EXAMPLES.replace("rmetric replay", "python replay_and_analyze_logs.py"),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    replay.add_arguments(parser, num_plots=20, folder="logs_FULL_METRIC")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    return replay.run(parse_arguments(arguments))


if __name__ == "__main__":
    exit_with(main)
