"""`python -m rmetric` is the `rmetric` command: see `rmetric --help`."""

import sys

from rmetric._util.errors import ends_at_once


def main() -> int:
    with ends_at_once():
        from rmetric.cli.main import main as run
    return run()


if __name__ == "__main__":
    sys.exit(main())
