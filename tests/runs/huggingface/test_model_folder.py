# SPDX-License-Identifier: Apache-2.0
"""Which folders are taken for models of Hugging Face's."""

import json
from pathlib import Path

import pytest

from llmb.base.errors import UsageError
from llmb.runs.huggingface.model_folder import read_folder


def make(folder: Path, *files: str, index: dict[str, object] | None = None) -> Path:
    for name in files:
        (folder / name).write_text("{}")
    if index is not None:
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def test_one_file_or_those_of_the_index_are_found(tmp_path: Path) -> None:
    assert read_folder(make(tmp_path, "config.json", "model.safetensors")).files == ("model.safetensors",)
    (tmp_path / "model.safetensors").unlink()  # with both, transformers reads this one, and other programs the index
    index = {"weight_map": {"a": "y.safetensors", "b": "x.safetensors", "c": "x.safetensors"}}
    found = read_folder(make(tmp_path, "x.safetensors", "y.safetensors", "pytorch_model.bin", index=index))
    assert found.files == ("x.safetensors", "y.safetensors")


def test_pickles_are_refused_with_the_reason_and_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="can run any code") as caught:
        read_folder(make(tmp_path, "config.json", "pytorch_model-00001-of-00002.bin"))
    assert "pytorch_model-00001-of-00002.bin" in str(caught.value)
    assert "save_pretrained" in str(caught.value)


@pytest.mark.parametrize(
    ("files", "index", "said"),
    [
        (["config.json"], None, "has no 'model.safetensors.index.json' or"),
        (["model.safetensors"], None, "has no 'config.json'"),
        (["config.json"], {"weight_map": {"a": "x.safetensors"}}, "x.safetensors is missing"),
        (["config.json"], {"weight_map": {"a": "../x.safetensors"}}, "not a .safetensors file in the same folder"),
        (["config.json", "x.bin"], {"weight_map": {"a": "x.bin"}}, "not a .safetensors file in the same folder"),
        (["config.json"], {"weight_map": {}}, "lists no tensors"),
        (["config.json"], {}, "lists no tensors"),
        (["config.json", "model.safetensors"], {"weight_map": {"a": "x.safetensors"}}, "programs differ in which"),
        (["config.json", "model.safetensors", "adapter_config.json"], None, "holds an adapter"),
    ],
)
def test_folders_that_are_not_whole_are_refused(
    tmp_path: Path, files: list[str], index: dict[str, object] | None, said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        read_folder(make(tmp_path, *files, index=index))


@pytest.mark.parametrize("content", ["", "[1]", "{", "\x80", "[" * 100_000])
def test_a_configuration_that_is_none_is_refused(tmp_path: Path, content: str) -> None:
    make(tmp_path, "model.safetensors")
    (tmp_path / "config.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(UsageError, match=r"config\.json"):
        read_folder(tmp_path)


def test_what_is_no_folder_is_said(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such folder"):
        read_folder(tmp_path / "meta-llama" / "Llama-3.1-8B")
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="it is a file"):
        read_folder(tmp_path / "file")
