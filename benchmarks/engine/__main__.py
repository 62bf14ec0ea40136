# SPDX-License-Identifier: Apache-2.0
"""``python -m benchmarks.engine``: checks that requirements are installed before importing any of them."""

import argparse
import sys
from pathlib import Path

from benchmarks.engine.wheels import prepare

MISSING = 3


def main() -> None:
    early = argparse.ArgumentParser(add_help=False)
    early.add_argument("--wheels", type=Path)
    missing = prepare(early.parse_known_args()[0].wheels)
    if missing:
        sys.stderr.write(missing)
        sys.exit(MISSING)
    from benchmarks.engine.compare import main as compare  # only now are its imports known to be installed

    sys.exit(compare(sys.argv[1:]))


if __name__ == "__main__":
    main()
