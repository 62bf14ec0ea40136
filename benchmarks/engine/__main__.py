# SPDX-License-Identifier: Apache-2.0
"""``python -m benchmarks.engine``: finds the packages that it needs before importing any of them."""

import argparse
import sys
from pathlib import Path

from benchmarks.engine.wheels import BadWheelError, prepare

MISSING = 3


def main() -> None:
    early = argparse.ArgumentParser(prog="python -m benchmarks.engine", usage="%(prog)s [options]", add_help=False)
    early.add_argument("--wheels", type=Path)
    early.add_argument("--check", action="store_true")
    given = early.parse_known_args()[0]
    if given.wheels and not given.wheels.is_dir():
        early.error(f"--wheels {given.wheels}: no such folder")
    try:
        found = prepare(given.wheels)
    except BadWheelError as error:
        early.error(f"--wheels: {error}; copy it again")
    sys.stderr.write(found.lines())
    if problem := found.problem():
        sys.stderr.write(problem)
        sys.exit(MISSING)
    if given.check:
        sys.exit(0)
    from benchmarks.engine.compare import main as compare  # only now are its imports known to be installed

    sys.exit(compare(sys.argv[1:]))


if __name__ == "__main__":
    main()
