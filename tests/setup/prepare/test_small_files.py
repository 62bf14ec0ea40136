"""Small data and a small model: complete, the same at every call, and accepted by all that reads them."""

import json
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from llmb.base.errors import UsageError
from llmb.catalogue.catalogue import Catalogue
from llmb.engine.weights.weights_import import parameter_shapes as engine_shapes
from llmb.runs.checkpoints.prepared_data import prepared_folders
from llmb.runs.huggingface.model_config import config_differences
from llmb.runs.huggingface.tensors import StoredTensor, format_of, match_tensors
from llmb.setup.prepare.dataset import DatasetRequest, prepare_dataset
from llmb.setup.prepare.small_files import MODEL, SAMPLES, parameter_shapes, write_small_files
from llmb.setup.prepare.tokenizer import load_tokenizer

WORKLOADS = ("finetune_llama3", "finetune_llama4-maverick")
MODELS = ("llama3", "llama4-maverick")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small") / "files"
    write_small_files(Catalogue(), WORKLOADS[0], "tiny", folder)
    return folder


def test_every_answer_is_in_its_text_where_it_says_and_the_only_one_of_its_question(small: Path) -> None:
    rows = [json.loads(line) for line in (small / SAMPLES).read_text().splitlines()]
    assert len(rows) > 2000
    answers: dict[tuple[str, str], str] = {}
    for row in rows:
        (answer,), (start,) = row["answers"]["text"], row["answers"]["answer_start"]
        assert row["context"][start : start + len(answer)] == answer
        assert answers.setdefault((row["context"], row["question"]), answer) == answer
    assert len({row["id"] for row in rows}) == len(rows)


def test_the_files_are_the_same_at_every_call(small: Path, tmp_path: Path) -> None:
    write_small_files(Catalogue(), WORKLOADS[0], "tiny", tmp_path / "again")
    names = sorted(str(path.relative_to(small)) for path in small.rglob("*") if path.is_file())
    for name in names:
        assert (tmp_path / "again" / name).read_bytes() == (small / name).read_bytes(), name
    assert f"{MODEL}/tokenizer.json" in names


@pytest.mark.parametrize(("workload", "family"), list(zip(WORKLOADS, MODELS, strict=True)))
def test_the_model_can_be_imported(workload: str, family: str, tmp_path: Path) -> None:
    write_small_files(Catalogue(), workload, "tiny", tmp_path / "small")
    folder, model = tmp_path / "small" / MODEL, Catalogue().families[family]["tiny"]
    assert dict(parameter_shapes(model)) == engine_shapes(model)
    assert not list(config_differences(model, json.loads((folder / "config.json").read_text())))
    tensors = load_file(folder / "model.safetensors")
    stored = {name: StoredTensor("model.safetensors", tensor.shape, "F32") for name, tensor in tensors.items()}
    match = match_tensors(engine_shapes(model), stored, format_of(model))
    assert not match.problems
    assert not match.left_out


def test_the_tokenizer_knows_the_words_and_fits_the_model(small: Path) -> None:
    model = Catalogue().families["llama3"]["tiny"]
    loaded = load_tokenizer(small / MODEL / "tokenizer.json", "llmb/llama3-tiny", model.vocab_size)
    assert (loaded.record.bos_id, loaded.record.eos_id) == (0, 1)
    text = "Context: Anna plays the piano. Question: What does Anna play? Answer:"
    encoded = loaded.tokenizer.encode(text, add_special_tokens=False)
    assert loaded.tokenizer.decode(encoded.ids) == text
    assert len(encoded.ids) <= len(text.split()) + 5  # words, and the signs behind them
    assert loaded.space == " "


def test_transformers_reads_the_tokenizer_as_llmb_does(small: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(small / MODEL)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1)
    ids = tokenizer("Anna plays the piano.")["input_ids"]
    loaded = load_tokenizer(small / MODEL / "tokenizer.json", "a/b", 1024)
    assert ids == loaded.tokenizer.encode("Anna plays the piano.", add_special_tokens=False).ids


def test_the_samples_fill_the_packs_of_the_tiny_recipe(small: Path, tmp_path: Path) -> None:
    folders = prepared_folders(tmp_path, WORKLOADS[0])
    request = DatasetRequest(
        workload=WORKLOADS[0], size="tiny", source=small / SAMPLES, tokenizer=small / MODEL, splits=("training",)
    )
    prepared = prepare_dataset(Catalogue(), request, folders, lambda *_: None, lambda _: None)
    (packed,) = prepared.packed
    assert packed.record.seq_len == 128
    assert packed.record.left_out == 0
    assert packed.record.fill >= 0.98


def test_other_sizes_and_an_existing_folder_are_refused(small: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="small files are only available for size tiny"):
        write_small_files(Catalogue(), WORKLOADS[0], "70b", tmp_path / "a")
    with pytest.raises(UsageError, match="already exists"):
        write_small_files(Catalogue(), WORKLOADS[0], "tiny", small)
    with pytest.raises(UsageError, match="does not fine-tune"):
        write_small_files(Catalogue(), "pretrain_llama3.1", "tiny", tmp_path / "a")
