# SPDX-License-Identifier: Apache-2.0
"""Images: imported, mended and removed with an installation; programs stand for Enroot and Apptainer."""

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
import yaml

from llmb.base.errors import EnvironmentProblem, UsageError
from llmb.base.parent_death import has_ended
from llmb.catalogue.catalogue import Catalogue
from llmb.cli import install
from llmb.setup.install import images
from llmb.setup.install.answers import Answers
from llmb.setup.install.images import (
    ImageRequest,
    ImportedImage,
    RegistryImage,
    image_path,
    image_source,
    import_image,
    source_problem,
)
from llmb.setup.install.installation import undo
from llmb.setup.install.installing import Installed, install_all

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
    with pytest.raises(UsageError, match="not the name of an image"):
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
    with pytest.raises(EnvironmentProblem, match=f"(?s)but the nodes are {other}.*push the image to a registry"):
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
        with pytest.raises(UsageError, match="cannot run a file of this type"):
            imported(tmp_path / name, runtime)
    small.write_bytes(b"")
    with pytest.raises(UsageError, match="is empty"):
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
        "import sys; from pathlib import Path; from llmb.setup.install.images import ImageRequest, import_image\n"
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


Run = Callable[..., Installed]


@pytest.fixture
def small_image(tmp_path: Path) -> Path:
    path = tmp_path / "small"
    path.write_bytes(small_images.squashfs_bytes())
    return path


@pytest.fixture
def run(tmp_path: Path, small_python: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    for name in ("LLMB_INSTALL", "STAGE_PATH"):
        monkeypatch.delenv(name, raising=False)
    catalogue = Catalogue()

    def call(root: Path = tmp_path / "root", image: str = "nvcr.io/nvidia/nemo:1", **more: str) -> Installed:
        answers = Answers(
            path=str(root),
            workloads=("pretrain_llama3.1",),
            scheduler="local",
            gpu_type="cpu",
            environment="existing",
            python=str(small_python),
            container_runtime="pyxis",
            image=image,
            prepare="no",
            **more,
        )
        return install_all(root, answers, catalogue, install._import_image, lambda text: None)

    return call


def state_of_image(done: Installed) -> str:
    return next(item.state for item in done.results if item.name == "image")


def test_the_image_is_imported_once_and_jobs_start_its_file(
    run: Run, program: Callable[[str, str], None], small_image: Path, tmp_path: Path
) -> None:
    program("enroot", small_images.tool_script(small_image, tmp_path / "calls"))
    image, root = tmp_path / "root" / "images" / "nvidia+nemo+1.sqsh", tmp_path / "root"
    assert state_of_image(run()) == "done"
    settings = yaml.safe_load((root / "cluster_config.yaml").read_text())
    assert settings["container"] == {"runtime": "pyxis", "image": str(image)}
    assert state_of_image(run()) == "kept"
    image.unlink()
    assert state_of_image(run()) == "done"
    assert image.read_bytes() == small_image.read_bytes()
    assert state_of_image(run(image="nvcr.io/nvidia/nemo:2")) == "done"
    assert image.with_name("nvidia+nemo+2.sqsh").exists()
    root.rename(tmp_path / "moved")
    assert state_of_image(run(tmp_path / "moved", image="nvcr.io/nvidia/nemo:2")) == "done"
    assert len((tmp_path / "calls").read_text().splitlines()) == 3, "the image that was moved is taken"
    assert undo(tmp_path / "moved", print, results=False).remaining == ()
    assert not (tmp_path / "moved").exists()


def test_without_enroot_it_stops_there_and_resumes_with_the_file(
    run: Run, small_image: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(images.PROGRAMS, "pyxis", "no-enroot")
    with pytest.raises(EnvironmentProblem, match="image: there is no no-enroot") as caught:
        run()
    folder = tmp_path / "root" / "images"
    assert (
        f"srun --ntasks=1 --time=60 llmb prepare image nvcr.io/nvidia/nemo:1 --runtime pyxis --folder {folder}"
        in str(caught.value.do)
    )
    small_image.rename(folder / "nvidia+nemo+1.sqsh")
    run()
    assert undo(tmp_path / "root", print, results=False).remaining == ()


def test_an_image_that_was_there_before_is_not_removed(run: Run, small_image: Path, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    small_image.rename(shared / "nvidia+nemo+1.sqsh")
    run(image_folder=str(shared))
    undo(tmp_path / "root", print, results=False)
    assert (shared / "nvidia+nemo+1.sqsh").exists()


def test_a_removal_takes_what_a_killed_import_left(
    run: Run, program: Callable[[str, str], None], tmp_path: Path
) -> None:
    program("enroot", "exit 1")
    with pytest.raises(EnvironmentProblem, match="exit code 1"):
        run()
    (tmp_path / "root" / "images" / ".0a1b2c3d.nvidia+nemo+1.sqsh").touch()
    assert undo(tmp_path / "root", print, results=False).remaining == ()
    assert not (tmp_path / "root").exists()
