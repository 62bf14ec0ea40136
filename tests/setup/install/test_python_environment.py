# SPDX-License-Identifier: Apache-2.0
"""The Python environment of an installation: the programs that make it, and a real one."""

import json
import os
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmb.base.errors import EnvironmentProblem
from llmb.setup.install.answers import Answers
from llmb.setup.install.python_environment import EnvironmentRecord, commands, proven

Install = Callable[..., Any]
ROOT = Path(__file__).resolve().parents[3]
NEEDED = (
    *("typer", "rich", "pydantic", "pyyaml", "ruamel_yaml", "scipy"),
    *("pyarrow", "huggingface_hub", "tokenizers", "safetensors"),
)


def record(**changes: str | None) -> EnvironmentRecord:
    given = {"kind": "venv", "made_with": "/usr/bin/python3", "torch": "cu128", "torch_version": None}
    return EnvironmentRecord.model_validate({**given, "package": "llmb[prepare,weights]==0.1.0", **changes})


@pytest.mark.parametrize(
    ("made_of", "lines"),
    [
        (
            record(),
            [
                "/usr/bin/python3 -I -m venv /e",
                "/e/bin/python -I -m pip install --index-url https://download.pytorch.org/whl/cu128 torch>=2.11 numpy",
                "/e/bin/python -I -m pip install llmb[prepare,weights]==0.1.0",
            ],
        ),
        (
            record(kind="uv", made_with="3.12", torch="pypi", torch_version="2.11.0"),
            [
                "uv venv --python 3.12 /e",
                "uv pip install --python /e/bin/python torch==2.11.0 numpy",
                "uv pip install --python /e/bin/python llmb[prepare,weights]==0.1.0",
            ],
        ),
        (
            record(kind="conda", made_with="3.12", torch="none"),
            [
                "conda create --yes --prefix /e python=3.12 pip",
                "/e/bin/python -I -m pip install llmb[prepare,weights]==0.1.0",
            ],
        ),
        (
            record(torch="existing"),
            [
                "/usr/bin/python3 -I -m venv --system-site-packages /e",
                "/e/bin/python -I -m pip install llmb[prepare,weights]==0.1.0",
            ],
        ),
        (
            record(torch="https://wheels.site/simple"),
            [
                "/usr/bin/python3 -I -m venv /e",
                "/e/bin/python -I -m pip install --index-url https://wheels.site/simple torch>=2.11 numpy",
                "/e/bin/python -I -m pip install llmb[prepare,weights]==0.1.0",
            ],
        ),
    ],
)
def test_the_programs_that_make_an_environment(made_of: EnvironmentRecord, lines: list[str]) -> None:
    assert [" ".join(command) for command in commands(made_of, Path("/e"))] == lines


def test_a_torch_for_no_gpu_is_refused_where_gpus_train(small_python: Path) -> None:
    assert proven(small_python, Answers(gpu_type="cpu")).torch == "2.11.0"
    with pytest.raises(EnvironmentProblem, match="built for CPUs only") as caught:
        proven(small_python, Answers(gpu_type="h100"))
    assert "--torch" in str(caught.value.do)


def test_a_python_of_another_llmb_is_refused(small_python: Path) -> None:
    small_python.write_text(small_python.read_text().replace('"llmb": "', '"llmb": "9'))
    with pytest.raises(EnvironmentProblem, match="that Python has llmb 9"):
        proven(small_python, Answers(gpu_type="cpu"))


def test_a_half_made_environment_is_made_again(
    call: Install, program: Callable[[str, str], None], tmp_path: Path, small_python: Path
) -> None:
    """uv is killed in the middle; what it left does not count."""
    root = tmp_path / "root"
    fixed = ("--scheduler", "local", "--gpu-type", "cpu", "-w", "pretrain_qwen3", "--environment", "uv", "--json")
    make = f'mkdir -p "$4/bin"; cp {small_python} "$4/bin/python"; touch "$4/left"'
    program("uv", f'[ "$1" = venv ] || exit 9; {make}; kill -9 $$')
    with pytest.raises(EnvironmentProblem, match=r"step 2 of 4, environment: uv venv --python .* failed"):
        call(root, *fixed)
    assert (root / "environment" / "left").exists()
    program("uv", f'if [ "$1" = venv ]; then [ ! -e "$4" ] || exit 8; {make}; rm "$4/left"; fi')
    found = json.loads(call(root, *fixed).stdout)
    assert found["steps"][1]["state"] == "done"
    assert not (root / "environment" / "left").exists()
    assert json.loads(call(root, *fixed).stdout)["steps"][1]["state"] == "kept"
    other = json.loads(call(root, *fixed, "--torch", "cu126").stdout)
    assert other["steps"][1]["state"] == "done", "made of something else"
    moved = root.rename(tmp_path / "moved")
    again = json.loads(call(moved, "--yes", "--json").stdout)
    assert again["steps"][1]["state"] == "done", "its programs name their old place"
    call(moved, "--remove", "--yes")
    assert not moved.exists()


def stub_wheel(folder: Path, name: str, content: dict[str, str] | None = None) -> None:
    """A distribution of any version that holds nothing of its own."""
    info = f"{name}-99.0.dist-info"
    with zipfile.ZipFile(folder / f"{name}-99.0-py3-none-any.whl", "w") as wheel:
        for path, text in (content or {}).items():
            wheel.writestr(path, text)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 99.0\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")


@pytest.mark.slow
def test_a_real_environment_without_a_network(call: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """llmb itself comes from a wheel of this source; what it needs is seen through a path to this Python's packages."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", wheels]
    subprocess.run([*build, ROOT], check=True, capture_output=True)
    (own,) = wheels.glob("llmb-*.whl")
    for name in NEEDED:
        stub_wheel(wheels, name)
    stub_wheel(wheels, "torch")
    stub_wheel(wheels, "numpy", {"beside.pth": f"{sysconfig.get_path('purelib')}\n"})
    monkeypatch.delenv("PIP_CONSTRAINT", raising=False)  # which may know no stub of version 99
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    root = tmp_path / "a root"
    fixed = ("--scheduler", "local", "--gpu-type", "cpu", "--environment", "venv", "--torch", "pypi")
    call(root, *fixed, "--package", own, "-w", "pretrain_llama3.1")
    python = root / "environment" / "bin" / "python"
    where = [python, "-c", "import llmb; print(llmb.__file__)"]
    seen = subprocess.run(where, capture_output=True, text=True, check=True, cwd="/").stdout
    assert seen.startswith(str(root / "environment"))
    for command in (
        [root / "workloads" / "pretrain_llama3.1" / "launch.sh", "--help"],
        [root / "environment" / "bin" / "llmb", "--version"],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd="/")
        assert done.returncode == 0, (command, done.stderr)
    call(root, "--remove", "--yes")
    assert not root.exists()
