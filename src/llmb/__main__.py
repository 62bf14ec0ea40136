# SPDX-License-Identifier: Apache-2.0
"""``llmb``, and ``python -m llmb``."""

import atexit
import gc
from typing import NoReturn

MANY_OBJECTS = 200_000
"""Modules and records are many objects that stay: to look for garbage among them takes a tenth of a short command."""


def main() -> NoReturn:
    gc.set_threshold(MANY_OBJECTS)  # before the imports, which make most of them
    atexit.register(gc.freeze)  # the interpreter looks for garbage before it ends, a fifth of a short command
    from llmb.cli.main import main as run_command

    run_command()


if __name__ == "__main__":
    main()
