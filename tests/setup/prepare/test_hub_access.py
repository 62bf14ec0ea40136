# SPDX-License-Identifier: Apache-2.0
"""Access to gated repositories, asked of a hub that a local server plays, and the tokens that are sent."""

import json
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_hub import FakeHub, serving
from typer.testing import CliRunner

from llmb.base.errors import EnvironmentProblem, UsageError
from llmb.catalogue.catalogue import Catalogue
from llmb.cli.prepare import app
from llmb.setup.install.answers import Answers
from llmb.setup.install.installation import check_hub, hub_repositories
from llmb.setup.prepare.hub import access_problem, check_access, needed_repositories, token_source, use_token

TOKEN, OTHER, UNKNOWN = ("hf_" + letter * 34 for letter in "xyz")
MODEL, SQUAD = "meta-llama/Meta-Llama-3-70B", "rajpurkar/squad"
PAGE = f"https://huggingface.co/{MODEL}"


@pytest.fixture(autouse=True)
def _no_token(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The library reads most variables when it is imported."""
    from huggingface_hub import constants

    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    from huggingface_hub import constants

    repositories: dict[str, dict[str, bytes]] = {MODEL: {}, f"datasets/{SQUAD}": {}}
    with serving(FakeHub(repositories, gated=(MODEL,), members=(TOKEN,), tokens=(TOKEN, OTHER))) as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        yield server


def states(endpoint: str | None = None) -> dict[str, str]:
    needed = needed_repositories(Catalogue(), [("finetune_llama3", "70b")])
    return {item.repository.name: item.state for item in check_access(needed, endpoint)}


def call(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["access", "-w", "finetune_llama3", *arguments])


@pytest.mark.parametrize(
    ("token", "there", "state"),
    [(None, True, "no token"), (TOKEN, True, "granted"), (OTHER, True, "not granted"), (TOKEN, False, "not found")],
)
def test_a_gated_repository(
    hub: FakeHub, token: str | None, there: bool, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    if not there:
        del hub.repositories[MODEL]
    assert states() == {MODEL: state, SQUAD: "granted"}
    asked = [path for _, path in hub.requests if "meta-llama" in path or "squad" in path]
    assert len(asked) == 2 and all(path.endswith("/auth-check") for path in asked), "one small request for each"


def test_a_token_that_is_rejected(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", UNKNOWN)
    assert set(states().values()) == {"token rejected"}
    done = call()
    assert isinstance(done.exception, EnvironmentProblem)
    assert "rejects the token" in done.exception.what
    assert UNKNOWN not in done.output + done.exception.text()


def test_the_token_of_the_file_is_sent(hub: FakeHub, tmp_path: Path) -> None:
    assert token_source() is None
    (tmp_path / "token").write_text(TOKEN)
    assert token_source() == "token file"
    assert states()[MODEL] == "granted"


def test_a_hub_that_fails_or_is_not_reached_is_a_warning(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    hub.scripted = {"auth-check": [(503, {}), (429, {"Retry-After": "60"})]}
    assert set(states().values()) == {"not checked"}
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    done = call("--json")
    assert done.exit_code == 0, done.exception
    assert "warning: access was not checked: the hub cannot be reached" in done.stderr
    assert json.loads(done.stdout)["granted"] is False


def test_the_command_names_the_page_and_its_document_says_who_needs_what(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", OTHER)
    done = call("--json")
    assert isinstance(done.exception, EnvironmentProblem)
    assert done.exception.exit_code == 3
    assert f"request access at {PAGE}" in str(done.exception.do)
    document = json.loads(done.stdout)
    assert (document["token"], document["granted"]) == ("environment", False)
    model, data = document["repositories"]
    assert (model["name"], model["state"], model["page"]) == (MODEL, "not granted", PAGE)
    assert (model["needed_for"], data["needed_for"]) == (
        ["weights of finetune_llama3 70b"],
        ["data of finetune_llama3 70b"],
    )
    assert data["page"] == f"https://huggingface.co/datasets/{SQUAD}"
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    done = call()
    assert done.exit_code == 0, done.exception
    assert "granted" in done.stdout and PAGE in done.stdout


def test_a_workload_is_named_in_one_word_and_has_something_to_download(hub: FakeHub) -> None:
    done = CliRunner().invoke(app, ["access", "-w", "finetune_llama3_tiny", "--json"])
    (data,) = json.loads(done.stdout)["repositories"]
    assert (data["name"], data["needed_for"]) == (SQUAD, ["data of finetune_llama3 tiny"])
    done = CliRunner().invoke(app, ["access", "-w", "pretrain_llama3.1"])
    assert isinstance(done.exception, UsageError)
    assert "does not fine-tune, so it needs no prepared weights or data" in done.exception.what


def test_nobody_is_asked_without_a_terminal(hub: FakeHub) -> None:
    done = call("-s", "70b")
    assert isinstance(done.exception, EnvironmentProblem)
    assert done.exception.what == f"{MODEL} is gated, but there is no token"
    assert "hf auth login" in str(done.exception.do)


def test_a_repository_of_several_sizes_is_asked_for_once() -> None:
    models = [("finetune_llama3", "70b"), ("finetune_llama4-maverick", "400b"), ("finetune_llama3", "tiny")]
    needed = needed_repositories(Catalogue(), models)
    assert [item.kind for item in needed] == ["model", "dataset", "model"]
    assert len(needed[1].needed_for) == 3
    assert needed_repositories(Catalogue(), models, weights=False)[0].name == SQUAD
    assert needed_repositories(Catalogue(), models, weights=False, data=False) == ()
    assert access_problem([]) is None


@pytest.mark.parametrize("text", ["", "  ", "hf_a b", "hf_\u2026", "hf_\x1b[A"])
def test_what_is_no_token_is_not_used_and_not_repeated(text: str) -> None:
    with pytest.raises(UsageError) as error:
        use_token(text)
    assert not text.strip() or text not in error.value.text()
    assert "HF_TOKEN" not in os.environ


def test_an_installation_checks_before_it_prepares(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = Answers(workloads=("finetune_llama3",), prepare="here")
    needed = hub_repositories(Catalogue(), answers)
    with pytest.raises(EnvironmentProblem, match="there is no token"):
        check_hub(needed)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert check_hub(needed) == f"granted: {MODEL}, {SQUAD}"
    hub.scripted = {"auth-check": [(503, {})]}
    assert check_hub(needed) == f"not checked: the hub answered 503 for {MODEL}"
    monkeypatch.setattr("llmb.setup.install.installation.can_check", lambda: False)
    assert f"{sys.executable} -m pip install " in check_hub(needed)
    local = {"checkpoint_source": "/model", "dataset_source": "/data"}
    assert hub_repositories(Catalogue(), answers.model_copy(update=local)) == ()
    assert hub_repositories(Catalogue(), answers.model_copy(update={"prepare": "no"})) == ()


def test_a_terminal_is_asked_for_a_token_that_is_neither_shown_nor_stored(hub: FakeHub, tmp_path: Path) -> None:
    done, shown = typed(TOKEN, hub.url, tmp_path)
    assert done == 0, shown
    assert "neither shown nor stored" in shown
    assert "'hf auth login' stores one" in shown
    assert TOKEN not in shown
    assert [path for path in tmp_path.rglob("*") if path.is_file() and TOKEN.encode() in path.read_bytes()] == []


def typed(token: str, url: str, home: Path) -> tuple[int, str]:
    """The exit code of the command in a terminal where a token is typed, and what is seen there."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    command = ["setsid", "--ctty", "--wait", sys.executable, "-m", "llmb", "prepare", "access", "-w", "finetune_llama3"]
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        command, env={**kept, "HOME": str(home), "HF_ENDPOINT": url}, stdin=theirs, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    shown = b""
    try:
        while part := os.read(ours, 4096):
            shown += part
            if shown.endswith(b"Enter for none): "):
                os.write(ours, f"{token}\n".encode())
    except OSError:
        pass  # how Linux tells that the terminal has no other end
    os.close(ours)
    return process.wait(), shown.decode()
