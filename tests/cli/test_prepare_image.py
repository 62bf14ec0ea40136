# SPDX-License-Identifier: Apache-2.0
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import small_images
from typer.testing import CliRunner

from llmb.base.errors import UsageError
from llmb.cli.prepare import app


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    monkeypatch.delenv("STAGE_PATH", raising=False)
    monkeypatch.setenv("LLMB_INSTALL", str(tmp_path / "root"))
    (tmp_path / "root").mkdir()

    def run(*arguments: object) -> str:
        words = ["image", *(str(item) for item in arguments)]
        return str(CliRunner().invoke(app, words, catch_exceptions=False).stdout)

    return run


@pytest.fixture
def image(tmp_path: Path) -> Path:
    path = tmp_path / "llmb.sqsh"
    path.write_bytes(small_images.squashfs_bytes())
    return path


def test_text_and_json_of_an_image(call: Callable[..., str], image: Path) -> None:
    assert f"container:\n  runtime: pyxis\n  image: {image}\n" in call(image)
    document = json.loads(call(image, "--json"))
    assert document == {"path": str(image), "bytes": image.stat().st_size, "made": False, "runtime": "pyxis"}


def test_the_clusters_settings_say_where_and_for_what(
    call: Callable[..., str], program: Callable[[str, str], None], image: Path, tmp_path: Path
) -> None:
    other = "x86_64" if os.uname().machine == "aarch64" else "aarch64"
    settings = {
        "container": {"runtime": "pyxis", "image": "a:1"},
        "install": {"image_folder": str(tmp_path / "shared"), "node_architecture": other},
    }
    (tmp_path / "root" / "cluster_config.yaml").write_text(json.dumps(settings))
    program("enroot", small_images.tool_script(image, tmp_path / "calls"))
    assert json.loads(call("a:1", "--json"))["path"] == str(tmp_path / "shared" / "a+1.sqsh")
    assert f"--arch {other}" in (tmp_path / "calls").read_text()


def test_without_any_of_the_programs_the_runtime_has_to_be_given(
    call: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(UsageError, match="the container runtime is not specified"):
        call("a:1")
    with pytest.raises(UsageError, match="unknown container runtime 'docker'"):
        call("a:1", "--runtime", "docker")
