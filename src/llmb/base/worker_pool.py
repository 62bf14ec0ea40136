# SPDX-License-Identifier: Apache-2.0
"""Processes of this program that share work, and end with it.

They are forked from a server that has no threads: this process may have some, as for a progress bar.
"""

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from threading import Thread
from types import ModuleType
from typing import TypeVar

_CONTEXT = multiprocessing.get_context("forkserver")
_SAFE_PATH = "PYTHONSAFEPATH"
Done = TypeVar("Done")


@contextmanager
def start_tasks(tasks: Sequence[Callable[[], Done]], workers: int) -> Iterator[list[Future[Done]]]:
    """The tasks, which have to be picklable, in order. A result raises BrokenProcessPool if a worker was killed."""
    with _without_foreign_code():  # also where the pool is made, which begins a process to track its resources
        pool = ProcessPoolExecutor(workers, _CONTEXT, initializer=_begin_worker)
    try:
        with _without_foreign_code():
            futures = [pool.submit(task) for task in tasks]
        yield futures
    except (KeyboardInterrupt, GeneratorExit):
        for worker in multiprocessing.active_children():
            worker.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def _without_foreign_code() -> Iterator[None]:
    """Workers that start run neither a ``types.py`` of the working folder, which ``python -c`` finds first, nor again
    the script that calls this program."""
    main, given = sys.modules["__main__"], os.environ.get(_SAFE_PATH)
    sys.modules["__main__"], os.environ[_SAFE_PATH] = ModuleType("__main__"), "1"
    try:
        yield
    finally:
        sys.modules["__main__"] = main
        if given is None:
            del os.environ[_SAFE_PATH]
        else:
            os.environ[_SAFE_PATH] = given


def _begin_worker() -> None:
    """It ends quietly on an interrupt, and when this process is killed, whose next task it would wait for."""
    Thread(target=_end_with_parent, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent, "a worker has one"
    parent.join()
    os._exit(1)
