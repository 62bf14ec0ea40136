"""Downloads from a hub that a local server plays: files, refusals, the cache, and the token's secrecy."""

import os
import shutil
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from fake_hub import SHA, FakeHub, serving

from llmb.base.errors import EnvironmentProblem, InfrastructureError, LlmbError, UsageError, UserInterrupt
from llmb.runs.checkpoints.prepared_data import PreparedFolders
from llmb.setup.prepare.hub import MODEL_FILES, Hub, fetch_model, hub_cache

TOKEN = "hf_" + "x" * 34
OTHER = "hf_" + "y" * 34
FILES = {
    "config.json": b"{}",
    "tokenizer.json": b'{"a": 1}',
    "model.safetensors": b"w" * 5000,
    "pytorch_model.bin": b"pickled",
    "original/model.safetensors": b"again",
}
NEEDED = ("config.json", "*.safetensors")


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The user's own token and cache are not for tests; the library reads most variables when it is imported."""
    from huggingface_hub import constants

    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HOME", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


@pytest.fixture
def server() -> Iterator[FakeHub]:
    repositories = {"org/name": FILES, "datasets/org/rows": {"plain_text/train-00000-of-00001.parquet": b"rows"}}
    with serving(FakeHub(repositories, tokens=(TOKEN, OTHER))) as hub:
        yield hub


class Client:
    """A hub whose progress is kept."""

    def __init__(self, server: FakeHub, folder: Path) -> None:
        self.progress: list[tuple[int, int]] = []
        self.hub = Hub(folder, endpoint=server.url)

    def fetch(self, name: str = "org/name") -> Path:
        return self.hub.fetch(name, "model", MODEL_FILES, NEEDED, self.count)

    def count(self, done: int, total: int) -> None:
        self.progress.append((done, total))

    def refused(self, kind: type[LlmbError], name: str = "org/name") -> LlmbError:
        with pytest.raises(kind) as error:
            self.fetch(name)
        assert TOKEN not in error.value.text()
        return error.value


@pytest.fixture
def client(server: FakeHub, tmp_path: Path) -> Client:
    return Client(server, tmp_path / "hub")


def names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_what_is_needed_and_nothing_else_is_downloaded_once(client: Client, server: FakeHub) -> None:
    folder = client.fetch()
    assert names(folder) == {"config.json", "tokenizer.json", "model.safetensors"}
    assert (folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert folder.is_relative_to(client.hub.folder)
    total = sum(len(FILES[name]) for name in names(folder))
    assert client.progress[-1] == (total, total), client.progress
    (folder / "model.safetensors").unlink()  # as after a kill between two files
    server.requests.clear()
    assert client.fetch() == folder
    assert not [path for method, path in server.requests if method == "GET" and "/resolve/" in path]
    server.requests.clear()
    shutil.rmtree(folder.parents[1] / "blobs")
    client.fetch()
    assert (folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]


def test_a_dataset_has_the_commit_as_its_revision(client: Client) -> None:
    patterns = ("plain_text/train-*.parquet",)
    folder = client.hub.fetch("org/rows", "dataset", patterns, patterns, client.count)
    assert folder.name == SHA
    assert names(folder) == {"plain_text/train-00000-of-00001.parquet"}


@pytest.mark.parametrize(
    ("token", "what", "do"),
    [
        (None, "org/name is gated, but there is no token", "request access at https://huggingface.co/org/name"),
        (None, "org/name is gated, but there is no token", "HF_TOKEN"),
        (TOKEN, "the account of the token has no access", "https://huggingface.co/org/name"),
        ("hf_" + "z" * 34, "the hub rejects the token", ""),
        (TOKEN + "\u2026", "the token has invalid characters", ""),
    ],
)
def test_a_gated_model_is_refused_with_what_is_missing(
    client: Client, server: FakeHub, monkeypatch: pytest.MonkeyPatch, token: str | None, what: str, do: str
) -> None:
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    server.gated, server.members = ("org/name",), (OTHER,)
    client.hub = replace(client.hub, page="https://huggingface.co/org/name")
    error = client.refused(EnvironmentProblem)
    assert what in error.what
    assert do in str(error.do)


def test_a_gated_model_with_access(client: Client, server: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    server.gated, server.members = ("org/name",), (TOKEN,)
    folder = client.fetch()
    assert names(folder)
    written = [path.read_bytes() for path in client.hub.folder.rglob("*") if path.is_file()]
    assert not any(TOKEN.encode() in content for content in written)


def test_a_repository_that_does_not_exist_or_lacks_the_files(client: Client, server: FakeHub) -> None:
    server.repositories["org/empty"] = {"README.md": b""}
    assert "the hub has no org/absent" in client.refused(UsageError, "org/absent").what
    error = client.refused(UsageError, "org/empty")
    assert error.what.startswith("org/empty has no config.json and no *.safetensors on the hub")


def test_an_interrupt_ends_a_download(client: Client) -> None:
    def interrupt(*_: int) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(UserInterrupt, match="interrupted by SIGTERM"):
        client.hub.fetch("org/name", "model", MODEL_FILES, NEEDED, interrupt)


def test_a_rate_limit_is_explained_and_a_download_goes_on(client: Client, server: FakeHub) -> None:
    server.scripted = {"/api/models": [(429, {"Retry-After": "7"})]}
    error = client.refused(InfrastructureError)
    assert error.what == "the hub limits the rate of requests"
    assert "with a token the limit is higher" in str(error.do)
    server.scripted = {"/resolve/": [(429, {"Retry-After": "0"})]}
    assert names(client.fetch()) == {"config.json", "tokenizer.json", "model.safetensors"}


def test_without_a_network_an_earlier_download_is_used_or_another_way_advised(client: Client) -> None:
    folder = client.fetch()
    client.hub = replace(client.hub, endpoint="http://127.0.0.1:9")
    assert client.fetch() == folder
    (folder / "config.json").unlink()
    assert "--source" in str(client.refused(LlmbError).do), "an older library takes it for complete"
    shutil.rmtree(client.hub.folder)
    error = client.refused(EnvironmentProblem)
    assert "the hub cannot be reached" in error.what
    assert "--source" in str(error.do)


def test_offline_mode_uses_an_earlier_download_or_says_so(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants
    from huggingface_hub.utils import _http

    folder = client.fetch()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    _http.close_session()
    try:
        assert client.fetch() == folder
        shutil.rmtree(client.hub.folder)
        error = client.refused(EnvironmentProblem)
    finally:
        _http.close_session()
    assert error.what == "HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set"


def test_a_folder_that_cannot_be_written(client: Client) -> None:
    client.hub.folder.write_text("a file")
    error = client.refused(EnvironmentProblem)
    assert "cannot write" in error.what


@pytest.mark.parametrize(
    ("variables", "expected"),
    [({}, "own"), ({"HF_HOME": "/a"}, "/a/hub"), ({"HF_HOME": "/a", "HF_HUB_CACHE": "/b"}, "/b")],
)
def test_the_cache_is_where_the_user_says(
    variables: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert hub_cache(Path("own")) == Path(expected)


def test_a_model_that_is_not_on_the_hub_is_not_looked_for(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="llmb/llama3-tiny is not on the Hugging Face hub"):
        fetch_model("llmb/llama3-tiny", None, PreparedFolders(tmp_path), lambda *_: None)


def test_nothing_that_trains_imports_what_contacts_a_hub() -> None:
    root = Path(__file__).parents[3] / "src" / "llmb"
    importing = [
        str(path.relative_to(root))
        for path in root.rglob("*.py")
        if any(name in path.read_text() for name in ("huggingface_hub", "prepare.hub ", "prepare import hub"))
    ]
    assert importing
    before_a_run = ("setup/", "cli/prepare.py", "cli/install.py", "reports/install_report.py")
    assert all(name.startswith(before_a_run) for name in importing)
    assert "setup/prepare/hub.py" in importing
