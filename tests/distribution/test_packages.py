# SPDX-License-Identifier: Apache-2.0
"""What is built from a checkout works outside of it: the source distribution, the wheel, and their programs."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
AUTHOR = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main", "-c", "commit.gpgsign=false")
BUILD = "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"

pytestmark = pytest.mark.slow


def built(kind: str, source: Path, folder: Path) -> Path:
    """By setuptools as pip calls it, without an environment of its own."""
    command = [sys.executable, "-c", BUILD, f"build_{kind}", str(folder)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return folder / done.stdout.splitlines()[-1]


def git(folder: Path, *words: str) -> str:
    done = subprocess.run(["git", "-C", str(folder), *AUTHOR, *words], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project's files as one commit."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("src", "docs"):
        ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", ".gitignore"):
        shutil.copy(ROOT / name, folder)
    git(folder, "init", "-q")
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "All")
    return folder


@pytest.fixture(scope="module")
def sdist(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built("sdist", checkout, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the source distribution, which has no git."""
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(["tar", "-xf", sdist, "-C", folder], check=True)
    (source,) = folder.iterdir()
    return built("wheel", source, folder)


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs' folder of an environment with the wheel; the libraries that it needs are this environment's."""
    folder = tmp_path_factory.mktemp("installed") / "an environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (site,) = folder.glob("lib/python3*/site-packages")
    # What a .pth file names is searched, but files .pth in it are not read: an editable llmb stays out.
    (site / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "install", "-q"]
    subprocess.run([*pip, "--no-deps", "--no-index", "--no-compile", wheel], check=True)
    return folder / "bin"


def said(program: Path, *arguments: str, root: Path) -> str:
    environ = {name: value for name, value in os.environ.items() if name not in ("LLMB_INSTALL", "PYTHONPATH")}
    environ["LLMB_INSTALL"] = str(root)
    done = subprocess.run([program, *arguments], cwd="/", env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_sdist_and_wheel_hold_all_that_is_needed_and_no_links(sdist: Path, wheel: Path, checkout: Path) -> None:
    with tarfile.open(sdist) as archive:
        assert [member.name for member in archive if member.issym() or member.islnk()] == []
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    for folder, prefix in ((checkout / "src", ""), (checkout / "docs", "llmb/docs/")):
        files = [
            file for file in folder.rglob("*") if file.is_file() and file.suffix in (".py", ".yaml", ".md", ".typed")
        ]
        missing = {f"{prefix}{file.relative_to(folder)}" for file in files} - names
        assert not missing


def test_the_wheel_knows_its_commit(installed: Path, checkout: Path, tmp_path: Path) -> None:
    version = said(installed / "llmb", "--version", root=tmp_path)
    assert version == f"llmb 0.1.0 (commit {git(checkout, 'rev-parse', 'HEAD')[:12]})\n"
    assert said(installed / "llmb-run", "--version", root=tmp_path) == version
    assert said(installed / "python", "-m", "llmb", "--version", root=tmp_path) == version


def test_a_build_of_changed_files_says_so(checkout: Path, tmp_path: Path) -> None:
    changed = shutil.copytree(checkout, tmp_path / "changed", symlinks=True)
    with (changed / "src" / "llmb" / "__init__.py").open("a") as file:
        file.write("# changed\n")
    with zipfile.ZipFile(built("wheel", changed, tmp_path)) as archive:
        recorded = archive.read("llmb/commit.txt").decode().strip()
    assert recorded == f"{git(checkout, 'rev-parse', 'HEAD')}-modified"


def test_the_documentation_comes_along(installed: Path, tmp_path: Path) -> None:
    page = said(installed / "llmb", "docs", "run-on-slurm", root=tmp_path)
    assert page == (ROOT / "docs" / "how-to" / "run-on-slurm.md").read_text()


def test_the_installed_program_has_its_data(installed: Path, tmp_path: Path) -> None:
    line = "run -w pretrain_llama3.1 -s 405b --gpu-type h100 --scale 512 --dry-run --json"
    assert json.loads(said(installed / "llmb", *line.split(), root=tmp_path))["plan"]["recipe"]["scale"] == 512


@pytest.mark.measured
def test_the_installed_program_trains(installed: Path, tmp_path: Path) -> None:
    line = "run -w pretrain_llama3.1 -s tiny --gpu-type cpu --scale 1 --steps 3 --window 1-2 --seq-len 32 --json"
    document = json.loads(said(installed / "llmb", *line.split(), root=tmp_path))
    assert document["status"] == "success"
    record = json.loads((Path(document["run_dir"]) / "run.json").read_text())
    assert record["llmb_commit"]
