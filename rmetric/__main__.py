"""`python -m rmetric` is the `rmetric` command: see `rmetric --help`."""

import sys

from rmetric.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
