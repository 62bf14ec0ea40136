# SPDX-License-Identifier: Apache-2.0
"""Processes of this program that share work, and end with it.

They are copies of a fork server, which has loaded what they need and has no threads. This process may have some, as for
a progress bar, and must not be forked.
"""

import gc
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker
from threading import Thread
from types import ModuleType
from typing import TypeVar

SAFE_PATH = "PYTHONSAFEPATH"
_CONTEXT = multiprocessing.get_context("forkserver")
Done = TypeVar("Done")


def load_for_workers(modules: Sequence[str]) -> None:
    """Begins to load modules for later workers, and returns at once."""
    _CONTEXT.set_forkserver_preload(list(modules))
    with _without_working_folder():
        resource_tracker.ensure_running()  # or the server starts it, which lets interrupts through again
        with _interrupts_held_back():
            forkserver.ensure_running()


@contextmanager
def given_to_workers(tasks: Sequence[Callable[[], Done]], workers: int) -> Iterator[list[Future[Done]]]:
    """The tasks, which have to be picklable, in order. A result raises BrokenProcessPool if a worker was killed."""
    with _without_working_folder():
        pool = ProcessPoolExecutor(workers, _CONTEXT, initializer=_begin_worker, initargs=gc.get_threshold()[:1])
    try:
        with _interrupts_held_back(), _without_working_folder(), _without_main_module():
            futures = [pool.submit(task) for task in tasks]
        yield futures
    except (KeyboardInterrupt, GeneratorExit):
        for worker in multiprocessing.active_children():
            worker.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """The server and its workers start with interrupts ignored: one could hit them in the middle of an import."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _without_working_folder() -> Iterator[None]:
    """For the fork server and what tracks its resources: ``python -c`` finds a ``types.py`` in this folder first."""
    given = os.environ.get(SAFE_PATH)
    os.environ[SAFE_PATH] = "1"
    try:
        yield
    finally:
        if given is None:
            del os.environ[SAFE_PATH]
        else:
            os.environ[SAFE_PATH] = given


@contextmanager
def _without_main_module() -> Iterator[None]:
    """Each worker would load the program that was called, whose commands take longer to load than many tasks."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _begin_worker(garbage_threshold: int) -> None:
    """It looks for garbage as seldom as this process. It ends quietly on an interrupt, and when this process is killed,
    whose next task it would wait for."""
    Thread(target=_end_with_parent, daemon=True).start()
    gc.set_threshold(garbage_threshold)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent, "a worker has one"
    parent.join()
    os._exit(1)
