# SPDX-License-Identifier: Apache-2.0
"""The ranks of a node: what they are told, and that one that fails ends the others."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from llmb.launch.ranks import LOOPBACK, MOST_FILES, STORE, variables, words
from llmb.readers.samples.host import host_name, usable_cores
from llmb.runs.failure import first_failure

Started = Callable[..., "subprocess.Popen[str]"]
WAITS = f'exec {sys.executable} -c "import signal; signal.pause()"'


@pytest.fixture
def started(tmp_path: Path) -> Started:
    """Ranks that run a shell script, in ``tmp_path``, where each leaves a file once it runs."""

    def start(script: str, ranks: int = 2, prefix: Sequence[str] = ()) -> "subprocess.Popen[str]":
        os.mkfifo(tmp_path / "begun")
        text = f"echo $RANK $$ >begun; {script}"
        command = [*prefix, sys.executable, *words(1, ranks), "sh", "-c", text]
        return subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, env=environ(tmp_path))

    return start


def environ(folder: Path) -> dict[str, str]:
    return {**os.environ, "TMPDIR": str(folder)}


def begun(folder: Path, ranks: int = 2) -> dict[int, int]:
    """Process ids by rank, once all run."""
    found: dict[int, int] = {}
    while len(found) < ranks:
        with (folder / "begun").open() as told:
            found |= {int(rank): int(pid) for rank, pid in (line.split() for line in told)}
    return found


def test_ranks_that_end_well_end_the_launcher_well_and_their_store_is_gone(started: Started, tmp_path: Path) -> None:
    launcher = started('stat -c "%a" "$(dirname $LLMB_STORE)" >mode$RANK')
    begun(tmp_path)
    assert launcher.communicate() == (None, "")
    assert launcher.returncode == 0
    assert [(tmp_path / f"mode{rank}").read_text() for rank in (0, 1)] == ["700\n", "700\n"]
    assert not list(tmp_path.glob("llmb-ranks-*"))


def test_the_next_launcher_removes_the_store_of_one_that_was_killed(started: Started, tmp_path: Path) -> None:
    killed = started(WAITS)
    ranks = begun(tmp_path)
    killed.kill()
    killed.wait()
    for pid in ranks.values():
        os.kill(pid, signal.SIGKILL)
    (left,) = tmp_path.glob("llmb-ranks-*")
    os.utime(left, (0, 0))  # a new one may not be locked yet
    (tmp_path / "begun").unlink()
    launcher = started("true")
    begun(tmp_path)
    assert launcher.communicate() == (None, "")
    assert not list(tmp_path.glob("llmb-ranks-*"))
    killed.communicate()


def test_ranks_may_open_as_many_files_as_sockets_need_and_share_the_cores_to_compile(
    started: Started, tmp_path: Path
) -> None:
    prefix = ["sh", "-c", 'ulimit -S -n 512; exec "$@"', "sh"]
    launcher = started(
        'echo "$(ulimit -S -n) $(ulimit -H -n) $TORCHINDUCTOR_COMPILE_THREADS" >told$RANK', prefix=prefix
    )
    begun(tmp_path)
    assert launcher.communicate() == (None, "")
    soft, hard, threads = map(int, (tmp_path / "told1").read_text().split())
    assert soft == min(hard, MOST_FILES) > 512
    assert threads == max(1, usable_cores() // 2)


def test_a_rank_that_fails_ends_the_others_and_is_named(started: Started, tmp_path: Path) -> None:
    # Not before all have begun: the launcher may end a rank that has not said so yet, and its line would be waited for.
    launcher = started(f'[ "$RANK" = 0 ] || {{ until [ -e fail ]; do sleep 0.05; done; exit 3; }}; {WAITS}')
    begun(tmp_path)
    (tmp_path / "fail").touch()
    _, talk = launcher.communicate()
    assert launcher.returncode == 1
    assert talk == f"llmb: rank 1 on {host_name()} ended with exit code 3\n"
    assert first_failure(talk) == f"rank 1 on {host_name()} ended with exit code 3"


@pytest.mark.parametrize("stopped", [False, True])
def test_a_killed_rank_ends_even_those_that_are_stopped(started: Started, tmp_path: Path, *, stopped: bool) -> None:
    launcher = started(WAITS)
    pids = begun(tmp_path)
    if stopped:
        os.kill(pids[1], signal.SIGSTOP)
    os.kill(pids[0], signal.SIGKILL)
    _, talk = launcher.communicate()
    assert launcher.returncode == 1
    assert talk == f"llmb: rank 0 on {host_name()} was killed by signal 9 (SIGKILL)\n"


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_launcher_ends_all(started: Started, tmp_path: Path, how: signal.Signals) -> None:
    launcher = started(WAITS, ranks=3)
    pids = begun(tmp_path, ranks=3)
    launcher.send_signal(how)
    assert launcher.communicate() == (None, "")
    assert launcher.returncode == 128 + how
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids.values())


def test_a_command_that_does_not_exist_is_named(tmp_path: Path) -> None:
    command = [sys.executable, *words(1, 2), "/nonexistent/python"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environ(tmp_path))
    assert done.returncode == 1
    assert first_failure(done.stderr) == (
        f"setup on {host_name()} failed: the ranks could not be started: "
        "[Errno 2] No such file or directory: '/nonexistent/python'"
    )


def test_libraries_of_one_node_stay_on_loopback_unless_told_otherwise() -> None:
    found = variables(1, 4, 3, "/tmp/x/store", {"MASTER_ADDR": "10.0.0.7", "A": "b"})
    assert int(found.pop("TORCHINDUCTOR_COMPILE_THREADS")) >= 1
    assert found == {
        "A": "b",
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "3",
        "LOCAL_WORLD_SIZE": "4",
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        STORE: "/tmp/x/store",
        "GLOO_SOCKET_IFNAME": LOOPBACK,
        "NCCL_SOCKET_IFNAME": f"={LOOPBACK}",
    }
    assert variables(1, 4, 3, "", {"NCCL_SOCKET_IFNAME": "eth1"})["NCCL_SOCKET_IFNAME"] == "eth1"


def test_nodes_number_their_ranks_one_after_the_other() -> None:
    given = {"SLURM_NODEID": "2", "MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "23456"}
    found = variables(3, 8, 5, "", given)
    assert (found["RANK"], found["WORLD_SIZE"], found["LOCAL_RANK"]) == ("21", "24", "5")
    assert found["MASTER_ADDR"] == "10.0.0.7"
    assert not {STORE, "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"} & set(found)
