# SPDX-License-Identifier: Apache-2.0
"""Programs stand for Enroot and Apptainer."""

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import small_images

from llmb.errors import EnvironmentProblem, UsageError
from llmb.install.images import (
    ImageRequest,
    ImportedImage,
    RegistryImage,
    image_path,
    image_source,
    import_image,
    source_problem,
)
from llmb.runs.parent_death import has_ended

NAME = "nvcr.io/nvidia/nemo:26.04.01"
NEMO = "nvcr.io#nvidia/nemo:26.04.01"
DIGEST = "0" * 64
Import = Callable[..., ImportedImage]


@pytest.mark.parametrize(
    ("text", "name", "enroot", "apptainer"),
    [
        (NAME, "nvidia+nemo+26.04.01", NEMO, NAME),
        (f"docker://{NEMO}", "nvidia+nemo+26.04.01", NEMO, NAME),
        ("docker://python", "python+latest", "python:latest", "python:latest"),
        ("nvidia/cuda:13", "nvidia+cuda+13", "nvidia/cuda:13", "nvidia/cuda:13"),
        ("localhost:5000/a/b:1", "a+b+1", "localhost:5000#a/b:1", "localhost:5000/a/b:1"),
        ("dockerd://llmb:0.1", "llmb+0.1", "dockerd://llmb:0.1", "docker-daemon://llmb:0.1"),
        ("dockerd://a.io/b:1", "a.io+b+1", "dockerd://a.io/b:1", "docker-daemon://a.io/b:1"),
        (f"a.io/b@sha256:{DIGEST}", f"b+sha256-{DIGEST}", f"a.io#b:sha256:{DIGEST}", f"a.io/b@sha256:{DIGEST}"),
    ],
)
def test_names_of_an_image(text: str, name: str, enroot: str, apptainer: str) -> None:
    """What a program gets begins with docker:// unless another scheme is given here."""
    source = image_source(text)
    assert isinstance(source, RegistryImage)
    assert image_path(text, Path("/i"), "pyxis") == Path(f"/i/{name}.sqsh")
    assert image_path(text, Path("/i"), "apptainer") == Path(f"/i/{name}.sif")
    expected = [found if "://" in found else f"docker://{found}" for found in (enroot, apptainer)]
    assert [source.for_enroot, source.for_apptainer] == expected


@pytest.mark.parametrize(
    "text",
    ["docker://me:geheim@nvcr.io#nvidia/nemo:1", "oras://ghcr.io/a/b:1", "a/b:", "a b", "", "x:1 --output /etc/passwd"],
)
def test_what_names_no_image(text: str) -> None:
    with pytest.raises(UsageError, match="names no image"):
        image_source(text)
    assert source_problem(text)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "small.sqsh"
    path.write_bytes(small_images.squashfs_bytes())
    return path


@pytest.fixture
def calls(tmp_path: Path) -> Path:
    return tmp_path / "calls"


@pytest.fixture
def enroot(program: Callable[[str, str], None], small: Path, calls: Path) -> Callable[..., None]:
    """Puts a program that stands for enroot; ``end`` is what it does before the image is written."""
    return lambda end="": program("enroot", small_images.tool_script(small, calls, end=end))


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def imported(tmp_path: Path, said: list[str]) -> Import:
    def run(source: str | Path = NAME, runtime: str = "pyxis", **more: object) -> ImportedImage:
        request = ImageRequest(source=str(source), folder=tmp_path / "images", runtime=runtime, **more)
        return import_image(request, said.append)

    return run


def test_an_image_is_imported_once(
    enroot: Callable[..., None], imported: Import, small: Path, calls: Path, said: list[str]
) -> None:
    enroot()
    first = imported()
    assert first.made and first.path.name == "nvidia+nemo+26.04.01.sqsh"
    assert first.path.read_bytes() == small.read_bytes()
    assert [*first.path.parent.iterdir()] == [first.path]
    assert not imported().made
    (call,) = calls.read_text().splitlines()
    assert call.startswith("import --output ") and call.endswith(f"{first.path.name} docker://{NEMO}")
    assert shlex.split(said[0]) == ["enroot", *call.split()]
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
    with pytest.raises(EnvironmentProblem, match=f"and the nodes are {other}"):
        imported("dockerd://llmb:0.1", architecture=other)


@pytest.mark.parametrize("source", ["dockerd://llmb:0.1", "llmb.tar"])
def test_apptainer_builds_a_sif(
    program: Callable[[str, str], None], imported: Import, small: Path, calls: Path, tmp_path: Path, source: str
) -> None:
    program("apptainer", small_images.tool_script(small, calls))
    (tmp_path / "llmb.tar").write_text("layers")
    is_file = source.endswith(".tar")
    found = imported(tmp_path / source if is_file else source, "apptainer")
    assert found.path == tmp_path / "images" / ("llmb.sif" if is_file else "llmb+0.1.sif")
    origin = f"docker-archive:{tmp_path}/llmb.tar" if is_file else "docker-daemon://llmb:0.1"
    assert calls.read_text().endswith(f"{origin}\n")


def test_a_file_that_the_runtime_starts_is_taken_where_it_lies(imported: Import, small: Path, tmp_path: Path) -> None:
    assert imported(small, force=True) == ImportedImage(path=small, bytes=small.stat().st_size, made=False)
    for runtime, name in (("apptainer", "small.sqsh"), ("pyxis", "llmb.tar")):
        (tmp_path / "llmb.tar").write_text("layers")
        with pytest.raises(UsageError, match="does not start such a file"):
            imported(tmp_path / name, runtime)
    small.write_bytes(b"")
    with pytest.raises(UsageError, match="it is empty"):
        imported(small)


@pytest.mark.parametrize(
    ("end", "words"),
    [('echo part > "$out"; exit 1', "failed with exit code 1"), ("exit 0", "left no image"), ("kill $$", "signal 15")],
)
def test_a_tool_that_fails_leaves_nothing(
    enroot: Callable[..., None], imported: Import, tmp_path: Path, end: str, words: str
) -> None:
    enroot(end=end)
    with pytest.raises(EnvironmentProblem, match=words):
        imported()
    assert [*(tmp_path / "images").iterdir()] == []


def test_without_the_tool_it_says_where_to_go(
    imported: Import, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    with pytest.raises(EnvironmentProblem, match="there is no enroot on this machine") as caught:
        imported()
    assert f"srun --ntasks=1 --time=60 llmb prepare image {NAME} --runtime pyxis" in str(caught.value.do)


@pytest.mark.usefixtures("interrupts")
def test_an_interrupt_ends_the_tool_and_leaves_nothing(enroot: Callable[..., None], tmp_path: Path) -> None:
    enroot(end=f"echo $$ > {tmp_path}/pid; exec sleep 600")
    code = (
        "import sys; from pathlib import Path; from llmb.install.images import ImageRequest, import_image\n"
        "import_image(ImageRequest(source=sys.argv[1], folder=Path(sys.argv[2]), runtime='pyxis'), print)"
    )
    command = [sys.executable, "-c", code, NAME, str(tmp_path / "images")]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    while not (tmp_path / "pid").exists() or not (pid := (tmp_path / "pid").read_text().strip()):
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    assert "interrupted by SIGINT; the same command imports the image again" in process.communicate()[1]
    assert [*(tmp_path / "images").iterdir()] == []
    assert has_ended(int(pid))
