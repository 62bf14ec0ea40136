# SPDX-License-Identifier: Apache-2.0
"""Installs in processes that are killed before each change of a file in turn, and then again.

Arguments: a folder, a program that stands for the Python of the installation, how many changes lie between two kills,
and the names of cases. Prints one JSON document: how many changes one installation makes, and the trees that differ in
the end, by the number of the change before which the first process was killed.
"""

import hashlib
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from llmb.catalogue.catalogue import Catalogue
from llmb.setup.install.answers import Answers
from llmb.setup.install.installation import complete_removal, undo
from llmb.setup.install.installing import install_all

CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.chmod", "os.link", "os.symlink")
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
Work = Callable[[Path], None]


def is_change(event: str, arguments: tuple[object, ...], below: str) -> bool:
    if event == "open":
        path, _, flags = arguments
        return isinstance(flags, int) and bool(flags & WRITES) and str(path).startswith(below)
    return event in (*CHANGES, "subprocess.Popen", "shutil.rmtree")


def in_a_process(work: Work, root: Path, killed_before: int | None) -> tuple[bool, int]:
    """Whether it was killed, and how many changes it made."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        count = 0

        def watch(event: str, arguments: tuple[object, ...]) -> None:
            nonlocal count
            if is_change(event, arguments, str(root.parent)):
                if count == killed_before:
                    os.kill(os.getpid(), signal.SIGKILL)
                count += 1

        sys.addaudithook(watch)
        work(root)
        os.write(writing, count.to_bytes(4, "big"))
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as stream:
        told = stream.read()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status in (0, -signal.SIGKILL), status
    return status != 0, int.from_bytes(told, "big")


def tree(folder: Path) -> dict[str, str]:
    """Each path with what it is."""
    found = {}
    for path in sorted(folder.rglob("*")):
        content = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder"
        found[str(path.relative_to(folder))] = f"{oct(path.stat().st_mode)} {content}"
    return found


def differences(work: Work, folder: Path, prepare: Work, distance: int) -> tuple[int, dict[int, list[str]]]:
    """``work`` is killed before changes, then done again; ``prepare`` makes what it begins with."""
    place = folder / "place"

    def begin() -> Path:
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        prepare(place / "root")
        return place / "root"

    _, changes = in_a_process(work, begin(), None)
    wanted, different = tree(place), {}
    for number in range(0, changes, distance):
        root = begin()
        killed, _ = in_a_process(work, root, number)
        assert killed, f"it ended before change {number}"
        in_a_process(work, root, None)
        if (found := tree(place)) != wanted:
            odd = {*found.items()} ^ {*wanted.items()}
            different[number] = sorted({path for path, _ in odd})
    return changes, different


def main() -> None:
    os.fsync = lambda descriptor: None  # a kill loses nothing that the kernel holds
    folder, python, distance = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    catalogue = Catalogue()

    def install(root: Path, workloads: tuple[str, ...] = ("pretrain_llama3.1", "finetune_llama3")) -> None:
        answers = Answers(
            path=str(root),
            workloads=workloads,
            scheduler="local",
            gpu_type="cpu",
            environment="existing",
            python=python,
            prepare="no",
        )
        install_all(root, answers, catalogue, None, lambda text: None)

    def extend(root: Path) -> None:
        install(root, ("pretrain_llama3.1", "finetune_llama3", "pretrain_nemotron4"))

    def remove(root: Path) -> None:
        if not complete_removal(root) and root.exists():
            undo(root, lambda text: None, results=False)

    cases: dict[str, tuple[Work, Work]] = {
        "install": (install, lambda root: None),
        "install in a folder that exists": (install, lambda root: (root.mkdir(), (root / "own").touch())[0]),
        "extend": (extend, install),
        "remove": (remove, install),
    }
    results = {
        name: differences(work, folder, prepare, distance)
        for name, (work, prepare) in cases.items()
        if name in sys.argv[4:]
    }
    json.dump({name: {"changes": count, "different": found} for name, (count, found) in results.items()}, sys.stdout)


if __name__ == "__main__":
    main()
