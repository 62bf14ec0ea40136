# SPDX-License-Identifier: Apache-2.0
"""Weights arrive bit for bit, in bounded pieces; files that do not hold just the model are refused before any write."""

import errno
import json
import math
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from killed_writer import write_or_die, write_or_fail
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict_loader import load
from transformers import AutoModelForCausalLM

from llmb.base.errors import EnvironmentProblem, RunFailed, UsageError
from llmb.engine.checkpoint.load import TensorReader
from llmb.engine.checkpoint.state import MODEL
from llmb.engine.model.decoder import build_model
from llmb.engine.weights import chunk_files, weights_export, weights_import
from llmb.engine.weights.chunk_files import Parameter, WeightFile, chunks_of, write_in_processes
from llmb.engine.weights.weights_export import export_weights, stored_parts
from llmb.engine.weights.weights_import import import_weights, open_files, parameter_shapes
from llmb.runs.checkpoints.checkpoint_files import damaged_files
from llmb.runs.checkpoints.conversion_request import IMPORTED, ExportJob, ImportJob, finished_files
from llmb.runs.huggingface.tensors import format_of

FILE = "model.safetensors"
NAMES = ["llama", "nemotron4", "nemotron4-biased", "llama4", "qwen2", "qwen3", "qwen3-tied", "qwen3-moe", "mixtral"]


def values(model, dtype=torch.float32):
    """Values of every parameter, by the engine's names, that ``dtype`` can hold."""
    generator = torch.Generator().manual_seed(3)
    return {
        name: torch.randn(shape, generator=generator).to(dtype).float()
        for name, shape in parameter_shapes(model).items()
    }


def hugging_face(model, weights, dtype=torch.float32):
    return {
        stored: part.to(dtype)
        for name, tensor in weights.items()
        for stored, part in stored_parts(name, tensor, format_of(model))
    }


def import_here(model, source, folder, on_progress=lambda done, total: None, on_note=lambda text: None, **options):
    folder.mkdir(exist_ok=True)
    job = ImportJob(source=str(source), files=(FILE,), folder=str(folder), model=model, **options)
    return import_weights(job, on_progress, on_note)


def export_here(model, checkpoint, folder, dtype="fp32", largest=10**9, on_progress=lambda done, total: None):
    folder.mkdir()
    job = ExportJob(
        checkpoint=str(checkpoint), folder=str(folder), model=model, dtype=dtype, largest_file_bytes=largest
    )
    with warnings.catch_warnings(action="ignore"):
        export_weights(job, on_progress)


def read_weights(folder, model):
    state = {MODEL + name: torch.empty(shape) for name, shape in parameter_shapes(model).items()}
    with warnings.catch_warnings(action="ignore"):
        load(state, storage_reader=TensorReader(folder / "weights"), no_dist=True)
    return {name.removeprefix(MODEL): tensor for name, tensor in state.items()}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    assert [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)] == []


@given(st.integers(1, 40), st.integers(1, 9), st.integers(1, 200))
def test_chunks_are_whole_rows_that_cover_the_parameter_once(rows, width, largest):
    found = list(chunks_of("a", Parameter((rows, width), torch.float32), largest))
    assert [row for chunk in found for row in range(chunk.first, chunk.end)] == list(range(rows))
    assert all((chunk.end - chunk.first) * width * 4 <= largest or chunk.end == chunk.first + 1 for chunk in found)


@pytest.mark.parametrize("name", NAMES)
def test_names_and_shapes_are_those_of_the_built_model(models, name):
    built = {path: tuple(parameter.shape) for path, parameter in build_model(models[name]).named_parameters()}
    assert parameter_shapes(models[name]) == built


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, torch.bfloat16) for name in NAMES), ("llama", torch.float32), ("llama", torch.float16)]
)
def test_weights_of_every_dtype_are_kept_in_it_and_load_as_the_same_fp32_values(
    models, name, dtype, tmp_path, monkeypatch
):
    monkeypatch.setattr(chunk_files, "CHUNK_BYTES", 60_000)
    expected, told, notes = values(models[name], dtype), [], []
    save_file(hugging_face(models[name], expected, dtype), tmp_path / FILE)
    imported = import_here(
        models[name], tmp_path, tmp_path, lambda *bytes_: told.append(bytes_), notes.append, largest_file_bytes=100_000
    )
    assert notes == []
    assert imported.dtypes == ({torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype],)
    stored = TensorReader(tmp_path / "weights").read_metadata().state_dict_metadata
    assert {item.properties.dtype for item in stored.values()} == {dtype}
    assert_same(read_weights(tmp_path, models[name]), expected)
    total = sum(dtype.itemsize * tensor.numel() for tensor in expected.values())
    files = list((tmp_path / "weights").glob("*.distcp"))
    assert len(files) > total // 100_000
    assert total <= sum(file.stat().st_size for file in files) < 1.1 * total + 4000 * len(expected)
    assert told[-1] == (total, total)
    assert told == sorted(told)


@pytest.mark.parametrize("name", NAMES)
def test_bf16_rounds_each_weight_to_the_nearest(models, name, tmp_path, monkeypatch):
    """Metadata of the checkpoint are read once, whatever the number of files."""
    expected = values(models[name])
    save_file(hugging_face(models[name], expected), tmp_path / FILE)
    import_here(models[name], tmp_path, tmp_path)
    reads, real = [], TensorReader.read_metadata
    monkeypatch.setattr(TensorReader, "read_metadata", lambda self: reads.append(1) or real(self))
    export_here(models[name], tmp_path, tmp_path / "out", dtype="bf16", largest=100_000)
    assert reads == [1]
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    found = {}
    for file in set(index["weight_map"].values()):
        found |= load_file(tmp_path / "out" / file)
    assert index["weight_map"].keys() == found.keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in found.values())
    assert_same(found, hugging_face(models[name], expected, torch.bfloat16))


@pytest.mark.parametrize("name", ["qwen2", "qwen3-tied", "qwen3-moe", "mixtral", "llama-biased", "nemotron4-biased"])
def test_what_is_exported_computes_the_same_in_transformers(models, name, tmp_path, randomised):
    ours = randomised(models[name])
    weights = {name: parameter.detach() for name, parameter in ours.named_parameters()}
    save_file(hugging_face(models[name], weights), tmp_path / FILE)
    import_here(models[name], tmp_path, tmp_path)
    export_here(models[name], tmp_path, tmp_path / "out")
    theirs, report = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokens = torch.arange(24).view(2, 12)
    assert torch.allclose(ours(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-4)


def test_a_head_beside_a_tied_embedding_is_left_out_only_where_it_is_equal(models, tmp_path):
    model = models["qwen3-tied"]
    expected = values(model)
    tensors = hugging_face(model, expected)
    assert "lm_head.weight" not in tensors
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / FILE)
    notes = []
    import_here(model, tmp_path, tmp_path / "same", on_note=notes.append)
    assert "tensors that the model does not have are skipped: lm_head.weight" in notes
    assert_same(read_weights(tmp_path / "same", model), expected)
    tensors["lm_head.weight"][-1, -1] += 1
    save_file(tensors, tmp_path / FILE)
    assert_refused(model, tmp_path, "lm_head.weight is not equal to model.embed_tokens.weight")


def test_one_file_needs_no_index(models, tmp_path):
    expected, told = values(models["llama"]), []
    save_file(hugging_face(models["llama"], expected), tmp_path / FILE)
    import_here(models["llama"], tmp_path, tmp_path)
    export_here(models["llama"], tmp_path, tmp_path / "out", on_progress=lambda *bytes_: told.append(bytes_))
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["config.json", FILE]
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()} == {0o644}
    assert_same(load_file(tmp_path / "out" / FILE), hugging_face(models["llama"], expected))
    total = sum(tensor.nbytes for tensor in expected.values())
    assert told == [(0, total), (total, total)]


def assert_refused(model, folder, *said):
    with pytest.raises(UsageError) as caught:
        import_here(model, folder, folder)
    for text in said:
        assert text in str(caught.value)
    assert not (folder / "weights").exists()


def test_files_that_hold_something_else_are_refused_with_all_reasons(models, tmp_path):
    tensors = hugging_face(models["llama"], values(models["llama"]))
    del tensors["model.layers.2.self_attn.q_proj.weight"]
    tensors["model.norm.weight"] = torch.ones(7)
    tensors["model.layers.0.self_attn.q_proj.bias"] = torch.ones(7)
    save_file(tensors, tmp_path / FILE)
    assert_refused(
        models["llama"],
        tmp_path,
        "model.layers.2.self_attn.q_proj.weight is missing",
        "model.norm.weight has the shape [7]; the model has [128]",
        "model.layers.0.self_attn.q_proj.bias is not a tensor of this model",
    )


@pytest.mark.parametrize(
    ("value", "dtype"), [(math.nan, torch.float32), (math.inf, torch.bfloat16), (-math.inf, torch.float16)]
)
def test_a_value_that_is_not_finite_is_refused_with_its_tensor(models, tmp_path, value, dtype):
    tensors = hugging_face(models["mixtral"], values(models["mixtral"], dtype), dtype)
    name = next(name for name in reversed(tensors) if name.endswith("experts.1.w2.weight"))
    tensors[name][-1, -1] = value
    save_file(tensors, tmp_path / FILE)
    with pytest.raises(UsageError, match=rf"^{name} in model\.safetensors has values that are not finite") as caught:
        import_here(models["mixtral"], tmp_path, tmp_path)
    assert caught.value.where == str(tmp_path)


def test_a_value_that_bf16_cannot_hold_is_not_exported(models, tmp_path):
    tensors = hugging_face(models["llama"], values(models["llama"]))
    tensors["model.norm.weight"][3] = torch.finfo(torch.float32).max
    save_file(tensors, tmp_path / FILE)
    import_here(models["llama"], tmp_path, tmp_path)
    with pytest.raises(UsageError, match=r"^norm\.weight has values that are not finite in bf16"):
        export_here(models["llama"], tmp_path, tmp_path / "bf16", dtype="bf16")
    export_here(models["llama"], tmp_path, tmp_path / "fp32")


def test_a_long_list_of_reasons_is_cut_short(models, tmp_path):
    save_file({"model.norm.weight": torch.ones(128)}, tmp_path / FILE)
    assert_refused(models["llama"], tmp_path, "model.embed_tokens.weight is missing", "and 18 more")


@pytest.mark.parametrize("keep", [0, 5, 1000, -1])
def test_a_file_that_was_cut_off_is_refused(models, tmp_path, keep):
    save_file(hugging_face(models["llama"], values(models["llama"])), tmp_path / FILE)
    content = (tmp_path / FILE).read_bytes()
    (tmp_path / FILE).write_bytes(content[:keep])
    assert_refused(models["llama"], tmp_path, "not a complete safetensors file", "download or copy the file again")


def test_a_pickle_with_the_name_of_a_safetensors_file_is_not_read(models, tmp_path):
    torch.save(values(models["llama"]), tmp_path / FILE)
    assert_refused(models["llama"], tmp_path, "not a complete safetensors file")


def test_a_tensor_in_two_files_is_refused(tmp_path):
    for name in ("a.safetensors", "b.safetensors"):
        save_file({"x": torch.ones(2)}, tmp_path / name)
    with pytest.raises(UsageError, match=r"x is in two files: a\.safetensors and b\.safetensors"):
        open_files(tmp_path, ["a.safetensors", "b.safetensors"])


@pytest.fixture
def saved(models, tmp_path):
    save_file(hugging_face(models["llama"], values(models["llama"])), tmp_path / FILE)
    import_here(models["llama"], tmp_path, tmp_path)
    return tmp_path


def test_a_checkpoint_of_another_model_than_its_record_says_is_refused(models, saved):
    wider = models["llama"].model_copy(update={"vocab_size": 600, "layers": 5})
    with pytest.raises(UsageError) as caught:
        export_here(wider, saved, saved / "out")
    assert "embed_tokens.weight has the shape [512, 128]; its model has [600, 128]" in str(caught.value)
    assert "layers.4.mlp.up_proj.weight is missing" in str(caught.value)
    assert not list((saved / "out").iterdir())


@pytest.mark.parametrize("damage", [b"", b"not a pickle"])
def test_metadata_that_cannot_be_read_is_said(models, saved, damage):
    (saved / "weights" / ".metadata").write_bytes(damage)
    with pytest.raises(UsageError, match="metadata cannot be read"):
        export_here(models["llama"], saved, saved / "out")


def test_weights_that_cannot_be_read_are_said(models, saved):
    largest = max((saved / "weights").glob("*.distcp"), key=lambda path: path.stat().st_size)
    largest.write_bytes(bytes(largest.stat().st_size))
    with pytest.raises(UsageError, match="the checkpoint cannot be read: "):
        export_here(models["llama"], saved, saved / "out")


def test_a_folder_that_takes_no_files_is_said(models, saved):
    with pytest.raises(EnvironmentProblem, match=r"model\.safetensors cannot be written"):
        weights_export.write_file(Path(saved / "nowhere" / FILE), {"a": torch.ones(2)})
    job = ImportJob(source=str(saved), files=(FILE,), folder=str(saved / FILE), model=models["llama"])
    with pytest.raises(EnvironmentProblem, match="weights cannot be written"):
        import_weights(job, lambda done, total: None, lambda text: None)


LARGEST = 100_000
"""Bytes in a file: the small model has more than twenty."""


@pytest.fixture
def source(models, tmp_path):
    folder = tmp_path / "source"
    folder.mkdir()
    save_file(hugging_face(models["llama"], values(models["llama"])), folder / FILE)
    (folder / "config.json").write_text("{}")
    return folder


def import_small(models, source, folder, notes, **options):
    options = {"largest_file_bytes": LARGEST, "documents": ("config.json",), **options}
    return import_here(models["llama"], source, folder, on_note=notes.append, **options)


def break_off(models, source, folder, monkeypatch, after):
    """An import that fails when ``after`` files are written."""
    writer, left = chunk_files.FileWriter, iter(range(after))

    class Failing(writer):
        def __call__(self, file):
            if next(left, None) is None:
                raise OSError(errno.ENOSPC, "No space left on device")
            return writer.__call__(self, file)

    with monkeypatch.context() as patch:
        patch.setattr(chunk_files, "FileWriter", Failing)
        with pytest.raises(EnvironmentProblem, match="No space left on device") as caught:
            import_small(models, source, folder, [])
    assert "finished files are kept" in caught.value.do


def times(folder):
    return {path.name: path.stat().st_mtime_ns for path in (folder / "weights").glob("*.distcp")}


def test_an_import_resumes_with_the_files_that_are_missing(models, source, tmp_path, monkeypatch):
    whole = import_small(models, source, tmp_path / "whole", [])
    broken, notes, told = tmp_path / "broken", [], []
    break_off(models, source, broken, monkeypatch, after=5)
    before = times(broken)
    assert len(before) == 5
    (broken / IMPORTED / ".__0_9.distcp.1").write_text('{"name": "__0_9')  # torn by a kill
    (broken / "weights" / "__0_9.distcp").write_bytes(b"a part")
    (broken / "weights" / "__0_2.distcp").write_bytes(b"cut off")
    job = {"largest_file_bytes": LARGEST, "documents": ("config.json",)}
    again = import_here(models["llama"], source, broken, lambda *bytes_: told.append(bytes_), notes.append, **job)
    assert notes == [f"resuming: 4 of {len(times(broken))} files already finished"]
    assert told[0][0] > LARGEST
    assert told[-1][0] == told[-1][1]
    kept = {name for name, time in times(broken).items() if before.get(name) == time}
    assert kept == {f"__0_{number}.distcp" for number in (0, 1, 3, 4)}
    assert again == whole
    assert not list(damaged_files(broken / "weights", again.checksums, threads=1))
    assert_same(read_weights(broken, models["llama"]), values(models["llama"]))


def test_an_import_of_something_else_starts_again_and_says_why(models, source, tmp_path, monkeypatch):
    broken = tmp_path / "broken"
    for change, options in [
        (lambda: save_file(hugging_face(models["llama"], values(models["llama"])), source / FILE), {}),
        (lambda: (source / "config.json").write_text("[]"), {}),
        (lambda: None, {"largest_file_bytes": 2 * LARGEST}),
    ]:
        break_off(models, source, broken, monkeypatch, after=2)
        change()
        notes = []
        import_small(models, source, broken, notes, **options)
        assert [note[: note.index(":")] for note in notes] == ["starting again from the first file"]
        shutil.rmtree(broken / IMPORTED)
    assert_same(read_weights(broken, models["llama"]), values(models["llama"]))


@pytest.mark.slow
def test_two_processes_write_what_one_does(models, source, tmp_path):
    one, told = import_small(models, source, tmp_path / "one", []), []
    two = import_small(models, source, tmp_path / "two", [], processes=2, on_progress=lambda *each: told.append(each))
    assert one == two
    assert times(tmp_path / "one").keys() == times(tmp_path / "two").keys()
    assert len(told) == 1 + len(times(tmp_path / "two"))
    assert told[-1][0] == told[-1][1] > 0


@pytest.mark.slow
def test_what_a_process_rejects_is_named_and_finished_files_are_kept(models, tmp_path, source):
    tensors = hugging_face(models["llama"], values(models["llama"]))
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = math.nan
    save_file(tensors, source / FILE)
    broken = tmp_path / "broken"
    with pytest.raises(UsageError, match=r"^model\.layers\.1\.mlp\.up_proj\.weight in model\.safetensors has values"):
        import_small(models, source, broken, [], processes=2)
    finished = finished_files(broken)
    save_file(hugging_face(models["llama"], values(models["llama"])), source / FILE)
    notes = []
    assert import_small(models, source, broken, notes) == import_small(models, source, tmp_path / "whole", [])
    assert finished and notes[0].startswith("starting again from the first file: ")


def test_a_file_that_becomes_shorter_while_it_is_read_is_named(models, source, tmp_path, monkeypatch):
    content = (source / FILE).read_bytes()
    opened = weights_import.open_files

    def open_then_cut(folder, names):
        files = opened(folder, names)
        (source / FILE).write_bytes(content[: len(content) // 2])
        return files

    monkeypatch.setattr(weights_import, "open_files", open_then_cut)
    with pytest.raises(UsageError, match=r"^model\.\S+ in model\.safetensors cannot be read"):
        import_small(models, source, tmp_path / "new", [])


def files(*names):
    return [WeightFile(name, (), 10) for name in names]


def test_every_file_is_written_once():
    names = [str(number) for number in range(7)]
    finished = list(write_in_processes(write_or_die, files(*names), 1))
    assert sorted(file.name for file in finished) == names


@pytest.mark.slow
@pytest.mark.parametrize(
    ("write", "kind", "text"),
    [
        (write_or_die, RunFailed, "a process that was writing weights was killed"),
        # Conversions whose processes reject a value are tested for every change.
        pytest.param(write_or_fail, KeyError, "fatal", marks=pytest.mark.measured),
    ],
)
def test_the_first_error_is_raised_and_its_file_is_not_finished(write, kind, text):
    finished = []
    with pytest.raises(kind, match=text):
        finished.extend(write_in_processes(write, files("first", "fatal", *"abcdefgh"), 2))
    assert "fatal" not in [file.name for file in finished]
