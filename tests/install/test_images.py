# SPDX-License-Identifier: Apache-2.0
"""Programs stand for Enroot and Apptainer; the images are real where it counts."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import killed_import
import pytest
import small_images

from llmb.errors import EnvironmentProblem, RunFailed, UsageError
from llmb.install import images
from llmb.install.images import ImageRequest, ImportedImage, import_image, read_checksum, sha256_of
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
    program: Callable[[str, str], None], imported: Import, small: Path, calls: Path
) -> None:
    small.write_bytes(small_images.sif_bytes())
    program("apptainer", small_images.tool_script(small, calls))
    found = imported("dockerd://llmb:0.1", "apptainer")
    assert found.path.name == "llmb+0.1.sif"
    assert calls.read_text().endswith("docker-daemon://llmb:0.1\n")


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
    mine.write_bytes(b"")
    with pytest.raises(UsageError, match="it is empty"):
        imported(mine)


def test_a_whole_file_without_a_checksum_gets_one(imported: Import, small: Path, tmp_path: Path) -> None:
    target = tmp_path / "images" / "nvidia+nemo+26.04.01.sqsh"
    target.parent.mkdir()
    shutil.copy(small, target)
    found = imported()  # without any enroot
    assert not found.made
    assert read_checksum(target) == found.sha256 == sha256_of(small)


def test_verify_finds_what_sizes_do_not_show(enroot: Callable[..., None], imported: Import, small: Path) -> None:
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


def test_a_tool_that_ends_well_without_an_image_is_not_believed(
    enroot: Callable[..., None], imported: Import, tmp_path: Path
) -> None:
    empty = tmp_path / "empty"
    empty.touch()
    enroot(image=empty)
    with pytest.raises(EnvironmentProblem, match="left no image"):
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


def test_a_disk_that_fills_leaves_nothing(tmp_path: Path, small_disk: Callable[[str], list[str]]) -> None:
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
    pattern = ".a+1.sqsh.importing.*/a+1.sqsh"
    while not (parts := [*(tmp_path / "images").glob(pattern)]) or parts[0].stat().st_size < 2**17:
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "images" / "a+1.sqsh").exists()
    program("enroot", f"{script} -comp gzip")
    found = imported("a:1")
    assert left_in(found.path.parent) == ["a+1.sqsh", "a+1.sqsh.sha256"]


def test_a_silent_tool_is_reported_to_be_at_work(
    enroot: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tool is silent until that is reported, for a minute at most: this process may be paused meanwhile."""
    monkeypatch.setattr(images, "PROGRESS_S", 0.0)
    enroot(end=f"for _ in $(seq 600); do [ -e {tmp_path}/said ] && break; sleep 0.1; done")
    said: list[str] = []

    def say(text: str) -> None:
        said.append(text)
        if text.startswith("still importing: 0.0 GB"):
            (tmp_path / "said").touch()

    assert import_image(ImageRequest(source=NAME, folder=tmp_path / "images", runtime="pyxis"), say).made
    assert (tmp_path / "said").exists(), said


@pytest.mark.usefixtures("interrupts")
def test_an_interrupt_ends_the_tool_and_leaves_nothing(enroot: Callable[..., None], tmp_path: Path) -> None:
    enroot(end=f"echo $$ > {tmp_path}/pid; exec sleep 600")
    command = [sys.executable, "-c", CALL, NAME, str(tmp_path / "images")]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    while not (tmp_path / "pid").exists() or not (pid := (tmp_path / "pid").read_text().strip()):
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    assert "interrupted by SIGINT; the same command imports the image again" in process.communicate()[1]
    assert left_in(tmp_path / "images") == []
    assert has_ended(int(pid))


def test_a_file_is_known_by_its_name(imported: Import, small: Path, tmp_path: Path) -> None:
    other = small.rename(tmp_path / "llmb.squashfs")
    assert imported(other).path.name == "llmb.sqsh"
    (tmp_path / "a.sif").write_bytes(bytes(5000))
    with pytest.raises(UsageError, match="does not start such a file"):
        imported(tmp_path / "a.sif")


def test_two_at_once_make_one_import(
    enroot: Callable[..., None], imported: Import, calls: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(images, "LOCK_PATIENCE_S", 0.1)
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


def test_another_users_image_is_taken_where_nothing_can_be_written(
    imported: Import, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "images" / "nvidia+nemo+26.04.01.sqsh"
    target.parent.mkdir()
    shutil.copy(small, target)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert imported().sha256 is None
    assert left_in(target.parent) == [target.name]
