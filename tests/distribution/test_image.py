# SPDX-License-Identifier: Apache-2.0
"""The image of the Containerfile, built for real on a base without torch, and what its programs do."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from shutil import which

import pytest

ROOT = Path(__file__).resolve().parents[2]
MIRROR = "http://deb.debian.org/debian"
BASE_PACKAGES = "python3,python3-venv,ca-certificates"
LIBRARIES = ("torch==2.13.0", "numpy", "setuptools>=77", "wheel")
COMMIT = "c" * 40

pytestmark = pytest.mark.measured  # minutes of building what only a change of the Containerfile can break


class Buildah:
    """Images in a folder of their own; nothing of them is left on the machine."""

    def __init__(self, folder: Path) -> None:
        self.options = ["--storage-driver", "vfs", "--root", str(folder / "root"), "--runroot", str(folder / "run")]
        self.environ = {**os.environ, "BUILDAH_ISOLATION": "chroot", "TMPDIR": str(folder)}

    def __call__(self, *arguments: str) -> str:
        command = ["buildah", *self.options, *arguments]
        done = subprocess.run(command, env=self.environ, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-4000:] + done.stdout[-2000:]
        return done.stdout.strip()


@pytest.fixture(scope="module")
def buildah(tmp_path_factory: pytest.TempPathFactory, needs: Callable[[str, bool, str], None]) -> Iterator[Buildah]:
    present = all(which(name, path=f"{os.environ['PATH']}:/usr/sbin") for name in ("buildah", "debootstrap"))
    why = "buildah and debootstrap, run by root, build images: apt-get install buildah debootstrap"
    needs("image", present and os.geteuid() == 0, why)
    folder = tmp_path_factory.mktemp("buildah")
    yield Buildah(folder)
    subprocess.run(["rm", "-rf", str(folder)], check=True)


@pytest.fixture(scope="module")
def base(buildah: Buildah, tmp_path_factory: pytest.TempPathFactory, needs: Callable[[str, bool, str], None]) -> str:
    """A small Debian with Python and nothing else, since no registry is asked for one."""
    tree = tmp_path_factory.mktemp("debian") / "tree"
    command = ["debootstrap", "--variant=minbase", f"--include={BASE_PACKAGES}", "bookworm", str(tree), MIRROR]
    environ = {**os.environ, "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    needs("image", done.returncode == 0, f"debootstrap makes the base from {MIRROR}: {done.stdout[-300:]}")
    try:
        container = buildah("from", "scratch")
        buildah("add", container, str(tree), "/")
        buildah("commit", "--rm", container, "localhost/base")
        buildah("run", buildah("from", "localhost/base"), "--", "true")
    except AssertionError as error:
        needs("image", False, f"buildah has to be allowed to run programs in an image: {str(error)[-300:]}")
    subprocess.run(["rm", "-rf", str(tree)], check=True)
    return "localhost/base"


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the image gets from pip, for the Python of Debian 12."""
    folder = tmp_path_factory.mktemp("wheels")
    pip = [sys.executable, "-m", "pip", "download", "-q", "-d", str(folder), "--only-binary=:all:"]
    subprocess.run([*pip, "--python-version", "3.11", *LIBRARIES, *requirements()], check=True)
    return folder


def requirements() -> list[str]:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    found = [*project["dependencies"], *extras["weights"], *extras["prepare"], *extras["resources"]]
    return [item for item in found if not item.startswith("llmb")]


@pytest.fixture(scope="module")
def image(buildah: Buildah, base: str, wheels: Path) -> Iterator[str]:
    """A container of the built image."""
    arguments = {
        "BASE": base,
        "TORCH": LIBRARIES[0],
        "PIP_OPTIONS": "--no-index --find-links /wheels",
        "DEBIAN_PACKAGES": "",
        "LLMB_COMMIT": COMMIT,
    }
    given = [word for name, value in arguments.items() for word in ("--build-arg", f"{name}={value}")]
    buildah("bud", "-q", "-f", "Containerfile", "-t", "localhost/llmb", "-v", f"{wheels}:/wheels:ro", *given, str(ROOT))
    yield buildah("from", "localhost/llmb")


def test_the_image_has_llmb_with_its_commit_and_pages(buildah: Buildah, image: str) -> None:
    assert buildah("run", image, "--", "llmb", "--version") == f"llmb 0.1.0 (commit {COMMIT[:12]})"
    assert buildah("run", image, "--", "llmb", "docs", "glossary").startswith("# ")
    assert buildah("run", image, "--", "sh", "-c", "ls -A /opt") == "llmb"
    buildah("run", image, "--", "python3", "-c", "import pynvml")


def test_the_image_trains_in_two_processes(buildah: Buildah, image: str) -> None:
    line = "run -w pretrain_llama3.1 -s tiny --gpu-type cpu --scale 2 --steps 3 --window 1-2 --seq-len 32"
    assert "step time" in buildah("run", "--env", "LLMB_INSTALL=/tmp/root", image, "--", "llmb", *line.split())
