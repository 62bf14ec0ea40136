# SPDX-License-Identifier: Apache-2.0
"""One import of an image at a time, also where the file system keeps the locks of each host apart, as Lustre may."""

import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread

from llmb.errors import EnvironmentProblem
from llmb.install.image_files import leftovers, lock_file, partial_prefix
from llmb.jobs.locks import file_lock
from llmb.runs.folder import cannot_write

PATIENCE_S = 2.0
BEAT = "beat"
BEAT_S = 5.0
WATCH_S = 16.0
"""So long a beat of another host is waited for; a file that is opened is as it is on the server."""


@contextmanager
def claimed(image: Path, say: Callable[[str], None]) -> Iterator[Path]:
    """A new folder beside ``image`` for what becomes it, removed in the end, as are those of imports that were killed.

    Raises EnvironmentProblem if another process imports this image.
    """
    with file_lock(lock_file(image), PATIENCE_S, "importing this image"):
        for left in leftovers(image):
            _check_dead(left, image, say)
            shutil.rmtree(left, ignore_errors=True)  # what a killed tool left running may still write there
        folder = image.with_name(f"{partial_prefix(image)}{socket.gethostname()}.{os.getpid()}")
        try:
            folder.mkdir()
            with _beating(folder / BEAT):
                yield folder
        except OSError as error:
            raise cannot_write(folder, error) from error
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _check_dead(left: Path, image: Path, say: Callable[[str], None]) -> None:
    """Waits for a beat of an import on another host. On this one the lock proves that it has ended."""
    host = left.name.removeprefix(partial_prefix(image)).rpartition(".")[0]
    if host == socket.gethostname():
        return
    say(f"an import on {host} has left {left.name}; looking for {WATCH_S:.0f} s whether it is still at work")
    before, end = _beat(left), time.monotonic() + WATCH_S
    ended = False
    while not ended:
        time.sleep(min(1.0, WATCH_S / 4))
        ended = time.monotonic() >= end  # before the last look: a process that was paused looks once more
        if _beat(left) != before:
            do = "wait until it has ended, then repeat the command: it takes the file that is there then"
            raise EnvironmentProblem(f"{host} is importing this image", where=str(image), do=do)


def _beat(folder: Path) -> str | None:
    try:
        return (folder / BEAT).read_text()
    except OSError:
        return None


@contextmanager
def _beating(path: Path) -> Iterator[None]:
    """Writes another number into a file again and again, which ends with this process."""
    path.write_text("0")
    ended = Event()

    def beat() -> None:
        number = 0
        while not ended.wait(BEAT_S):
            number += 1
            try:
                path.write_text(str(number))
            except OSError:
                continue  # a full disk is reported by what fills it

    thread = Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
