# SPDX-License-Identifier: Apache-2.0
"""``llmb``, and ``python -m llmb``."""

import atexit
import gc
import os
import signal
from typing import NoReturn

MANY_OBJECTS = 200_000
"""Threshold of garbage collection: looking for garbage in modules and records is a tenth of a short command's time."""


def main() -> NoReturn:
    gc.set_threshold(MANY_OBJECTS)  # before the imports, which make most of them
    atexit.register(gc.freeze)  # the interpreter looks for garbage before it ends, a fifth of a short command
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a shell in the background ignores it
        signal.signal(signal.SIGINT, _end_at_once)
    from llmb.cli.main import main as run_command

    run_command()


def _end_at_once(*_: object) -> NoReturn:
    """Exit at once: there is nothing to clean up yet, and an exception in an import would print a traceback."""
    os.write(2, b"llmb: error: interrupted\n")
    os._exit(130)


if __name__ == "__main__":
    main()
