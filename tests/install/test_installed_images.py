# SPDX-License-Identifier: Apache-2.0
"""The image of an installation: imported with it, mended with it, removed with it."""

from collections.abc import Callable
from pathlib import Path

import pytest
import small_images
import yaml

from llmb.catalogue.load import Catalogue
from llmb.cli import install
from llmb.errors import EnvironmentProblem
from llmb.install import images
from llmb.install.answers import Answers
from llmb.install.installation import undo
from llmb.install.installing import Installed, install_all

Run = Callable[..., Installed]


@pytest.fixture
def small(tmp_path: Path) -> Path:
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
    run: Run, program: Callable[[str, str], None], small: Path, tmp_path: Path
) -> None:
    program("enroot", small_images.tool_script(small, tmp_path / "calls"))
    image, root = tmp_path / "root" / "images" / "nvidia+nemo+1.sqsh", tmp_path / "root"
    assert state_of_image(run()) == "done"
    settings = yaml.safe_load((root / "cluster_config.yaml").read_text())
    assert settings["container"] == {"runtime": "pyxis", "image": str(image)}
    assert state_of_image(run()) == "kept"
    image.unlink()
    assert state_of_image(run()) == "done"
    assert image.read_bytes() == small.read_bytes()
    assert state_of_image(run(image="nvcr.io/nvidia/nemo:2")) == "done"
    assert image.with_name("nvidia+nemo+2.sqsh").exists()
    root.rename(tmp_path / "moved")
    assert state_of_image(run(tmp_path / "moved", image="nvcr.io/nvidia/nemo:2")) == "done"
    assert len((tmp_path / "calls").read_text().splitlines()) == 3, "the image that was moved is taken"
    assert undo(tmp_path / "moved", print, results=False).kept == ()
    assert not (tmp_path / "moved").exists()


def test_without_enroot_it_stops_there_and_resumes_with_the_file(
    run: Run, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(images.PROGRAMS, "pyxis", "no-enroot")
    with pytest.raises(EnvironmentProblem, match="image: there is no no-enroot") as caught:
        run()
    folder = tmp_path / "root" / "images"
    assert (
        f"srun --ntasks=1 --time=60 llmb prepare image nvcr.io/nvidia/nemo:1 --runtime pyxis --folder {folder}"
        in str(caught.value.do)
    )
    small.rename(folder / "nvidia+nemo+1.sqsh")
    run()
    assert undo(tmp_path / "root", print, results=False).kept == ()


def test_an_image_that_was_there_before_is_not_removed(run: Run, small: Path, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    small.rename(shared / "nvidia+nemo+1.sqsh")
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
    assert undo(tmp_path / "root", print, results=False).kept == ()
    assert not (tmp_path / "root").exists()
