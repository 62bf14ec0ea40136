"""Packages of the extra 'prepare' are named where they are missing."""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from llmb.base import errors
from llmb.base.errors import EnvironmentProblem
from llmb.catalogue.catalogue import Catalogue
from llmb.runs.checkpoints.prepared_data import PreparedFolders
from llmb.setup.prepare.dataset import DatasetRequest, prepare_dataset
from llmb.setup.prepare.hub import Hub
from llmb.setup.prepare.small_files import write_small_files
from llmb.setup.prepare.training_samples import read_samples

WORKLOAD = "finetune_llama3"


def from_parquet(folder: Path) -> None:
    (folder / "train.parquet").write_bytes(b"PAR1")
    list(read_samples(folder / "train.parquet"))


def a_dataset(folder: Path) -> None:
    request = DatasetRequest(workload=WORKLOAD, size="tiny")
    prepare_dataset(Catalogue(), request, PreparedFolders(folder), lambda *_: None, print)


CALLS: dict[str, Callable[[Path], object]] = {
    "pyarrow": from_parquet,
    "tokenizers": a_dataset,
    "safetensors": lambda folder: write_small_files(Catalogue(), WORKLOAD, "tiny", folder / "small"),
    "huggingface_hub": lambda folder: Hub(folder).fetch("a/b", "model", (), (), lambda *_: None),
}


@pytest.mark.parametrize("package", CALLS)
def test_a_missing_package_is_named(package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "find_spec", lambda name: None if name == package else find_spec(name))
    with pytest.raises(EnvironmentProblem, match=f"needs {package}, which this Python does not have") as error:
        CALLS[package](tmp_path)
    assert "[prepare]" in str(error.value.do)
    assert not (tmp_path / "small").exists()
