# SPDX-License-Identifier: Apache-2.0
"""What is saved in one layout is read in any other, tensor by tensor; what is no tensor is not read at all."""

import io
import json
import os
import pickle
import pickletools
import warnings
from pathlib import Path

import pytest
import torch
from tests.support.save_checkpoint import TENSORS
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, MetadataIndex
from torch.distributed.checkpoint.state_dict_saver import save

from llmb.engine.checkpoint.load import MetadataUnpickler, TensorReader, read_state
from llmb.engine.checkpoint.save import Staging, Writer, cannot_save, causes

WORKER = Path(__file__).parent / "checkpoint_worker.py"
OF_PYTHONS = sorted((Path(__file__).parents[1] / "data" / "checkpoints").iterdir())


@pytest.mark.slow
def test_every_layout_reads_what_another_wrote(models, run_ranks, tmp_path):
    """Three ranks cut no dimension of these models evenly."""
    names = ("llama", "nemotron4", "llama4", "qwen3-tied", "mixtral")
    records = [models[name].model_copy(update={"layers": 2}).model_dump(mode="json") for name in names]
    (tmp_path / "models.json").write_text(json.dumps(records))
    assert all("wrong: []" in printed for printed in run_ranks(WORKER, 4, "save", tmp_path, 2, 2))
    for dp, tp in ((1, 1), (3, 1), (1, 2)):
        assert all("wrong: []" in printed for printed in run_ranks(WORKER, dp * tp, "load", tmp_path, dp, tp))


def save_here(state, folder):
    with warnings.catch_warnings(action="ignore"):  # torch says that there is one process only
        save(state, storage_writer=Writer(folder), no_dist=True)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_what_is_staged_does_not_change_and_the_next_save_reuses_its_memory(device, needs):
    needs("gpu", device == "cpu" or torch.cuda.is_available(), "no CUDA device is visible to torch")
    staging, buffer = Staging(), torch.arange(12.0, device=device)
    state = {"part of a buffer": buffer[4:8], "transposed": buffer.view(3, 4).t(), "none": buffer[:0]}
    staged = staging.copy(state, buffer.device)
    places = {name: tensor.data_ptr() for name, tensor in staged.items()}
    buffer.zero_()
    assert staged["part of a buffer"].tolist() == [4, 5, 6, 7]
    assert staged["transposed"].is_contiguous() and staged["transposed"][:, 0].tolist() == [0, 1, 2, 3]
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in staged.values())
    assert {tensor.is_pinned() for tensor in staged.values() if len(tensor)} == {device == "cuda"}
    again = staging.copy(state, buffer.device)
    assert {name: tensor.data_ptr() for name, tensor in again.items()} == places
    assert not again["part of a buffer"].any()


def test_metadata_of_tensors_is_read(tmp_path):
    save_here({"a": torch.ones(3, 4), "random.cpu": torch.get_rng_state(), "step": torch.tensor(2.0)}, tmp_path)
    found = TensorReader(tmp_path).read_metadata().state_dict_metadata
    assert found["a"].size == (3, 4)
    assert set(found) == {"a", "random.cpu", "step"}


@pytest.mark.parametrize("folder", OF_PYTHONS, ids=lambda folder: folder.name)
def test_every_python_reads_what_any_other_saved(folder):
    read = {name: torch.zeros_like(values) for name, values in TENSORS.items()}
    with warnings.catch_warnings(action="ignore"):  # torch says that there is one process only
        read_state(TensorReader(folder), [read], {})
    assert all(torch.equal(read[name], values) for name, values in TENSORS.items())


def test_saved_metadata_names_no_path(tmp_path):
    save_here({"a": torch.ones(3, 4)}, tmp_path)
    words = [word for _, word, _ in pickletools.genops((tmp_path / ".metadata").read_bytes()) if isinstance(word, str)]
    assert not [word for word in words if "pathlib" in word or str(tmp_path) in word]


def test_objects_are_refused_because_torch_would_unpickle_them(tmp_path):
    save_here({"a": torch.ones(3), "extra": {"anything": "else"}}, tmp_path)
    with pytest.raises(ValueError, match="BytesStorageMetadata, which no checkpoint of llmb contains"):
        TensorReader(tmp_path).read_metadata()


class Attribute:
    """What is saved of an attribute as Python 3.11.2 saves a member of an enum."""

    def __init__(self, owner, name):
        self.owner, self.name = owner, name

    def __reduce__(self):
        return getattr, (self.owner, self.name)


def test_members_of_enums_are_read_as_any_version_of_python_saves_them():
    member = _MEM_FORMAT_ENCODING.TORCH_PRESERVE_FORMAT
    for saved in (member, Attribute(_MEM_FORMAT_ENCODING, member.name)):
        assert MetadataUnpickler(io.BytesIO(pickle.dumps(saved))).load() is member


def test_other_attributes_are_refused():
    saved = pickle.dumps(Attribute(Path, "home"))
    with pytest.raises(ValueError, match="which no checkpoint of llmb contains"):
        MetadataUnpickler(io.BytesIO(saved)).load()
    saved = pickle.dumps(Attribute(MetadataIndex, "__init__"))
    with pytest.raises(ValueError, match=r"takes __init__ from .*, which is not an enum"):
        MetadataUnpickler(io.BytesIO(saved)).load()


class Malicious:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_metadata_that_would_run_something_runs_nothing(tmp_path):
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Malicious(str(tmp_path / "ran"))))
    with pytest.raises(ValueError, match="mkdir, which no checkpoint of llmb contains"):
        TensorReader(tmp_path).read_metadata()
    assert not (tmp_path / "ran").exists()


def test_metadata_that_is_something_else_is_refused(tmp_path):
    (tmp_path / ".metadata").write_bytes(pickle.dumps({"state": 1}))
    with pytest.raises(ValueError, match="contains no metadata"):
        TensorReader(tmp_path).read_metadata()


def test_the_system_says_why_a_file_cannot_be_written():
    try:
        try:
            raise OSError(28, "No space left on device")
        except OSError:
            raise RuntimeError("unexpected pos 704 vs 598")  # noqa: B904 (as torch does)
    except RuntimeError as error:
        (cause,) = causes(error)
    problem = cannot_save("step=3", cause)
    assert "No space left on device" in str(problem)
    assert "--checkpoint-dir" in str(problem)
