# SPDX-License-Identifier: Apache-2.0
"""Programs stand for Enroot and Apptainer; the images are real where it counts."""

import fcntl
import json
import os
import pty
import shutil
import signal
import socket
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import killed_import
import pytest
import small_images

from llmb.errors import EnvironmentProblem, RunFailed, UsageError
from llmb.install import image_claim, image_tools
from llmb.install.image_files import checksum_file, lock_file, partial_prefix, read_checksum, sha256_of
from llmb.install.images import ImageRequest, ImportedImage, import_image
from llmb.runs.parent_death import has_ended

NAME = "nvcr.io/nvidia/nemo:26.04.01"
Import = Callable[..., ImportedImage]
CALL = """
import sys
from pathlib import Path
from llmb.install.images import ImageRequest, import_image
import_image(ImageRequest(source=sys.argv[1], folder=Path(sys.argv[2]), runtime="pyxis"), print)
"""


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "small"
    path.write_bytes(small_images.squashfs_bytes())
    return path


@pytest.fixture
def calls(tmp_path: Path) -> Path:
    return tmp_path / "calls"


@pytest.fixture
def enroot(program: Callable[[str, str], None], small: Path, calls: Path) -> Callable[..., None]:
    """Puts a program that stands for enroot; ``end`` is what it does before the image is written."""
    return lambda end="", image=small: program("enroot", small_images.tool_script(image, calls, end=end))


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def imported(tmp_path: Path, said: list[str]) -> Import:
    def run(source: str | Path = NAME, runtime: str = "pyxis", **more: object) -> ImportedImage:
        request = ImageRequest(source=str(source), folder=tmp_path / "images", runtime=runtime, **more)
        return import_image(request, said.append)

    return run


def left_in(folder: Path) -> list[str]:
    """All but the lock."""
    return sorted(path.name for path in folder.iterdir() if not path.name.endswith(".lock"))


def test_an_image_is_imported_once(enroot: Callable[..., None], imported: Import, small: Path, calls: Path) -> None:
    enroot()
    first = imported()
    assert first.made
    assert first.path.name == "nvidia+nemo+26.04.01.sqsh"
    assert first.path.read_bytes() == small.read_bytes()
    assert first.sha256 == sha256_of(small) == read_checksum(first.path)
    assert left_in(first.path.parent) == [first.path.name, f"{first.path.name}.sha256"]
    again = imported()
    assert not again.made
    assert again.sha256 == first.sha256
    (call,) = calls.read_text().splitlines()
    assert call.startswith("import --output ")
    assert call.endswith(f"/{first.path.name} docker://nvcr.io#nvidia/nemo:26.04.01")
    assert imported(force=True).made
    assert len(calls.read_text().splitlines()) == 2


def test_enroot_is_told_the_architecture_of_the_nodes(
    enroot: Callable[..., None], imported: Import, calls: Path
) -> None:
    other = "x86_64" if os.uname().machine == "aarch64" else "aarch64"
    enroot()
    imported(architecture=other)
    imported(architecture=os.uname().machine, force=True)
    first, second = calls.read_text().splitlines()
    assert f"--arch {other}" in first
    assert "--arch" not in second


def test_apptainer_builds_a_sif(
    program: Callable[[str, str], None], imported: Import, small: Path, calls: Path, tmp_path: Path
) -> None:
    small.write_bytes(small_images.sif_bytes())
    program("apptainer", small_images.tool_script(small, calls))
    found = imported("dockerd://llmb:0.1", "apptainer")
    assert found.path.name == "llmb+0.1.sif"
    assert calls.read_text().endswith("docker-daemon://llmb:0.1\n")
    (tmp_path / "oci-layout").write_text("{}")
    subprocess.run(["tar", "-C", tmp_path, "-cf", tmp_path / "llmb.tar", "oci-layout"], check=True)
    assert imported(tmp_path / "llmb.tar", "apptainer").path.name == "llmb.sif"
    assert calls.read_text().endswith(f"oci-archive:{tmp_path / 'llmb.tar'}\n")
    with pytest.raises(UsageError, match="pyxis does not start OCI archive files"):
        imported(tmp_path / "llmb.tar", "pyxis")


def test_a_file_is_copied_into_the_folder(imported: Import, tmp_path: Path, needs: Callable[..., None]) -> None:
    needs("squashfs", small_images.has_squashfs(), small_images.HOW_TO_GET)
    mine = small_images.make_squashfs(tmp_path / "mine.sqsh")
    found = imported(mine)
    assert found.path.read_bytes() == mine.read_bytes()
    assert not imported(mine).made
    mine.unlink()
    small_images.make_squashfs(mine, b"y" * 50_000)
    with pytest.raises(UsageError, match="another image of this name"):
        imported(mine)
    assert imported(mine, force=True).sha256 == sha256_of(mine)
    mine.write_bytes(mine.read_bytes()[:200])
    with pytest.raises(UsageError, match="not whole"):
        imported(mine)


@pytest.mark.parametrize("size", [0, 50, 2000])
def test_a_half_written_file_is_never_taken(
    size: int, enroot: Callable[..., None], imported: Import, small: Path, said: list[str], tmp_path: Path
) -> None:
    enroot()
    target = tmp_path / "images" / "nvidia+nemo+26.04.01.sqsh"
    target.parent.mkdir()
    target.write_bytes(small.read_bytes()[:size])
    checksum_file(target).write_text(f"{sha256_of(small)}  {target.name}\n")
    assert imported().made
    assert target.read_bytes() == small.read_bytes()
    assert "it is imported again" in said[0]


def test_a_whole_file_without_a_checksum_gets_one(imported: Import, small: Path, tmp_path: Path) -> None:
    target = tmp_path / "images" / "nvidia+nemo+26.04.01.sqsh"
    target.parent.mkdir()
    shutil.copy(small, target)
    found = imported()  # without any enroot
    assert not found.made
    assert read_checksum(target) == found.sha256 == sha256_of(small)


def test_verify_finds_what_sizes_do_not_show(
    enroot: Callable[..., None], imported: Import, small: Path, said: list[str]
) -> None:
    enroot()
    image = imported().path
    image.write_bytes(image.read_bytes()[:-1] + b"?")
    assert not imported().made
    assert imported(verify=True).made
    assert image.read_bytes() == small.read_bytes()
    assert not imported(verify=True).made


def test_a_tool_that_fails_leaves_nothing(enroot: Callable[..., None], imported: Import, tmp_path: Path) -> None:
    enroot(end='echo part > "$out"; echo "[ERROR] error code: 401 Unauthorized" >&2; exit 1')
    with pytest.raises(EnvironmentProblem, match="401 Unauthorized") as caught:
        imported()
    assert ".credentials" in str(caught.value.do)
    assert left_in(tmp_path / "images") == []
    enroot(end="exit 1")
    with pytest.raises(RunFailed, match="exit code 1"):
        imported()


def test_a_tool_that_ends_well_with_half_an_image_is_not_believed(
    enroot: Callable[..., None], imported: Import, small: Path, tmp_path: Path
) -> None:
    half = tmp_path / "half"
    half.write_bytes(small.read_bytes()[:-1])
    enroot(image=half)
    with pytest.raises(EnvironmentProblem, match="left no whole image"):
        imported()
    assert left_in(tmp_path / "images") == []


def test_without_the_tool_it_says_where_to_go(
    imported: Import, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    with pytest.raises(EnvironmentProblem, match="there is no enroot on this machine") as caught:
        imported()
    assert f"srun --ntasks=1 --time=60 llmb prepare image {NAME} --runtime pyxis" in str(caught.value.do)


def test_too_little_space_is_found_before(
    enroot: Callable[..., None], imported: Import, calls: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    enroot()
    usage = shutil.disk_usage("/")._replace(free=10**8)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(EnvironmentProblem, match=r"needs about 1 GB; the disk has 0\.1 GB free"):
        imported()
    assert not calls.exists()


def test_a_disk_that_fills_leaves_nothing(
    tmp_path: Path, small_disk: Callable[[str], list[str]], needs: Callable[..., None]
) -> None:
    """The space is there before, and taken by others meanwhile."""
    source = tmp_path / "large.sqsh"
    source.write_bytes(small_images.squashfs_bytes(bytes(3 * 2**20)))
    call = (
        "import sys; from pathlib import Path; from llmb.install import images\n"
        "images.check_room = lambda *_: None\n"
        "request = images.ImageRequest(source=sys.argv[1], folder=Path(sys.argv[2]), runtime='pyxis')\n"
        "try: images.import_image(request, print)\n"
        "except images.EnvironmentProblem as error: sys.exit(error.text())"
    )
    command = [*small_disk("2m"), sys.executable, "-c", call, str(source), str(tmp_path / "disk" / "images")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "No space left on device" in done.stderr
    assert "Traceback" not in done.stderr
    assert left_in(tmp_path / "kept" / "images") == []


@pytest.mark.slow
@pytest.mark.parametrize("case", ["new", "force"])
def test_killed_before_any_change_and_repeated_it_ends_the_same(
    case: str, enroot: Callable[..., None], tmp_path: Path
) -> None:
    enroot()
    work = tmp_path / "work"
    work.mkdir()
    command = [sys.executable, killed_import.__file__, str(work), case]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["different"] == {}
    assert found["changes"] >= 8


def test_killed_while_mksquashfs_writes(
    program: Callable[[str, str], None], imported: Import, tmp_path: Path, needs: Callable[..., None]
) -> None:
    """The tool ends with its caller; what it wrote is no image, and is gone after the next import."""
    needs("squashfs", small_images.has_squashfs(), small_images.HOW_TO_GET)
    (tmp_path / "content").mkdir()
    (tmp_path / "content" / "file").write_bytes(os.urandom(2**22))
    script = f'while [ "$1" != --output ]; do shift; done; exec mksquashfs {tmp_path}/content "$2" -quiet -no-progress'
    program("enroot", f"{script} -comp gzip -throttle 90")
    command = [sys.executable, "-c", CALL, "a:1", str(tmp_path / "images")]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    pattern = f"{partial_prefix(Path('a+1.sqsh'))}*/a+1.sqsh"
    while not (parts := [*(tmp_path / "images").glob(pattern)]) or parts[0].stat().st_size < 2**17:
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "images" / "a+1.sqsh").exists()
    program("enroot", f"{script} -comp gzip")
    found = imported("a:1")
    assert left_in(found.path.parent) == ["a+1.sqsh", "a+1.sqsh.sha256"]


def test_the_tool_draws_its_progress_on_a_terminal_as_wide_as_the_users(
    enroot: Callable[..., None], tmp_path: Path
) -> None:
    enroot(end='test -t 2 && echo "on a terminal of $(stty size <&2)" >&2')
    reading, writing = pty.openpty()
    fcntl.ioctl(writing, termios.TIOCSWINSZ, struct.pack("4H", 24, 71, 0, 0))
    command = [sys.executable, "-c", CALL, NAME, str(tmp_path / "images")]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=writing)
    os.close(writing)
    shown = b""
    with suppress(OSError):  # nobody has the other end any more; one read may return a part of what was written
        while block := os.read(reading, 4096):
            shown += block
    os.close(reading)
    assert process.wait() == 0
    assert b"on a terminal of 24 71\r\n" in shown


def test_a_silent_tool_is_reported_to_be_at_work(
    enroot: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tool is silent until that is reported, for a minute at most: this process may be paused meanwhile."""
    monkeypatch.setattr(image_tools, "SILENT_S", 0.0)
    enroot(end=f"for _ in $(seq 600); do [ -e {tmp_path}/said ] && break; sleep 0.1; done")
    said: list[str] = []

    def say(text: str) -> None:
        said.append(text)
        if text.startswith("still importing: 0.0 GB"):
            (tmp_path / "said").touch()

    assert import_image(ImageRequest(source=NAME, folder=tmp_path / "images", runtime="pyxis"), say).made
    assert (tmp_path / "said").exists(), said


@pytest.mark.usefixtures("interrupts")
def test_an_interrupt_ends_the_tool_and_leaves_nothing(
    enroot: Callable[..., None], calls: Path, tmp_path: Path
) -> None:
    enroot(end=f"echo $$ > {tmp_path}/pid; exec sleep 600")
    command = [sys.executable, "-c", CALL, NAME, str(tmp_path / "images")]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    while not (tmp_path / "pid").exists() or not (pid := (tmp_path / "pid").read_text().strip()):
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    assert "interrupted by SIGINT; the same command imports the image again" in process.communicate()[1]
    assert left_in(tmp_path / "images") == []
    assert has_ended(int(pid))


def test_a_file_is_known_by_its_content(imported: Import, small: Path, tmp_path: Path) -> None:
    other = small.rename(tmp_path / "llmb.squashfs")
    assert imported(other).path.name == "llmb.sqsh"
    (tmp_path / "a.sqsh").write_bytes(bytes(5000))
    with pytest.raises(UsageError, match="half-written"):
        imported(tmp_path / "a.sqsh")


def test_two_at_once_make_one_import(
    enroot: Callable[..., None], imported: Import, calls: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_claim, "PATIENCE_S", 0.1)
    enroot(end=f"while [ ! -e {tmp_path}/go ]; do sleep 0.02; done")
    first = subprocess.Popen([sys.executable, "-c", CALL, NAME, str(tmp_path / "images")], stderr=subprocess.DEVNULL)
    while not calls.exists():
        time.sleep(0.02)
    with pytest.raises(EnvironmentProblem, match="another process has been importing this image"):
        imported()
    (tmp_path / "go").touch()
    assert first.wait() == 0
    assert not imported().made
    assert len(calls.read_text().splitlines()) == 1


def test_an_import_on_another_host_is_left_alone_while_it_beats(
    enroot: Callable[..., None],
    imported: Import,
    calls: Path,
    said: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where the file system keeps locks of each host apart."""
    monkeypatch.setattr(image_claim, "WATCH_S", 0.4)
    enroot()
    target = tmp_path / "images" / "nvidia+nemo+26.04.01.sqsh"
    other = target.with_name(f"{partial_prefix(target)}node7.cluster.123")
    other.mkdir(parents=True)
    beats = iter("0123456789")
    monkeypatch.setattr(image_claim, "_beat", lambda folder: next(beats))
    with pytest.raises(EnvironmentProblem, match=r"node7\.cluster is importing this image"):
        imported()
    assert other.exists()
    assert not calls.exists()
    monkeypatch.setattr(image_claim, "_beat", lambda folder: None)
    assert imported().made
    assert any("node7.cluster" in text for text in said)
    assert not other.exists()


def test_a_process_that_was_paused_looks_for_a_beat_once_more(
    imported: Import, enroot: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time is over when it goes on, and the other import may have gone on as well."""
    target = tmp_path / "images" / "nvidia+nemo+26.04.01.sqsh"
    target.with_name(f"{partial_prefix(target)}node7.cluster.123").mkdir(parents=True)
    enroot()
    clock, beats = iter((0.0, 1000.0)), iter("01")
    monkeypatch.setattr(image_claim, "time", SimpleNamespace(monotonic=lambda: next(clock), sleep=lambda _: None))
    monkeypatch.setattr(image_claim, "_beat", lambda folder: next(beats))
    with pytest.raises(EnvironmentProblem, match=r"node7\.cluster is importing this image"):
        imported()


def test_what_this_host_left_is_removed_at_once(enroot: Callable[..., None], imported: Import, tmp_path: Path) -> None:
    enroot()
    target = tmp_path / "images" / "nvidia+nemo+26.04.01.sqsh"
    left = target.with_name(f"{partial_prefix(target)}{socket.gethostname()}.1")
    left.mkdir(parents=True)
    (left / target.name).write_bytes(b"part")
    imported()
    assert not left.exists()


def test_an_import_beats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_claim, "BEAT_S", 0.01)
    with image_claim.claimed(tmp_path / "a.sqsh", print) as work:
        first = (work / image_claim.BEAT).read_text()
        while (work / image_claim.BEAT).read_text() in ("", first):
            time.sleep(0.01)
    assert left_in(tmp_path) == []
    assert lock_file(tmp_path / "a.sqsh").exists()


def test_another_users_image_is_taken_where_nothing_can_be_written(
    imported: Import, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "images" / "nvidia+nemo+26.04.01.sqsh"
    target.parent.mkdir()
    shutil.copy(small, target)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert imported().sha256 is None
    assert left_in(target.parent) == [target.name]
