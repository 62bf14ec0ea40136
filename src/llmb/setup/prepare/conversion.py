# SPDX-License-Identifier: Apache-2.0
"""Imports checkpoints of Hugging Face and NeMo, and adapters of peft; exports weights and adapters."""

import json
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from threading import Lock

from llmb import __version__
from llmb.base.errors import EnvironmentProblem, UsageError, itemized, pip_install
from llmb.base.input_files import open_file
from llmb.base.processes import run_talking
from llmb.catalogue.records import Lora, Model
from llmb.readers.samples.host import usable_cores
from llmb.runs.checkpoint_use import base_problem, base_text, check_weights_space
from llmb.runs.checkpoints.checkpoint import (
    CONTEXT,
    RECORD,
    WEIGHTS,
    CheckpointRecord,
    ImportSource,
    SavedCheckpoint,
    damage_error,
    model_differences,
    read_checkpoint,
)
from llmb.runs.checkpoints.checkpoint_files import check_free, damaged_files, file_checksum, flush_file, new_folder
from llmb.runs.checkpoints.conversion_request import (
    FILE_BYTES,
    IMPORTED,
    AdapterExportJob,
    AdapterImportJob,
    AnyJob,
    ConverterMessage,
    ExportJob,
    ImportedWeights,
    ImportJob,
    MergedAdapters,
    OnNote,
    OnProgress,
    error_from,
    finished_files,
)
from llmb.runs.checkpoints.nemo_folder import check_nemo_config, is_nemo_folder, read_nemo_folder
from llmb.runs.checkpoints.origin import WeightsOrigin, identity_of
from llmb.runs.folder import write_atomically
from llmb.runs.huggingface.model_config import ExportDtype, config_differences, config_of, unknown_keys
from llmb.runs.huggingface.model_folder import WeightsFolder, corrupt_files, hub_checksums, read_folder, read_json
from llmb.runs.huggingface.tensors import ADAPTER_CONFIG, ADAPTER_FILE, CONFIG, adapter_problems
from llmb.runs.record import now

BYTES = {"fp32": 4, "bf16": 2}
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
MOST_PROCESSES = 8
NEEDED = ("torch", "safetensors")
GB = 10**9
CONTEXT_FILES = (
    CONFIG,
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
"""Files of a Hugging Face model, other than weights, that a checkpoint keeps."""


@dataclass(frozen=True, slots=True)
class ImportRequest:
    """An import into the new checkpoint ``target`` of ``model``, which ``workload`` trains."""

    source: Path
    target: Path
    workload: str
    model: Model
    processes: int
    largest_file_bytes: int = FILE_BYTES


def default_processes() -> int:
    """Return the number of this process's cores, but at most ``MOST_PROCESSES``."""
    return min(usable_cores(), MOST_PROCESSES)


def verify_saved(checkpoint: SavedCheckpoint, on_note: OnNote) -> None:
    """Verify the checksum of every file of a checkpoint. Raise UsageError if a file is damaged."""
    checksums = checkpoint.record.crc32
    began = time.monotonic()
    if damaged := list(damaged_files(checkpoint.path, checksums, threads=os.cpu_count() or 1)):
        raise damage_error(checkpoint.path, damaged)
    on_note(f"{checkpoint.path} is verified: {len(checksums)} files in {time.monotonic() - began:.3f} s")


def export_checkpoint(
    path: Path,
    target: Path,
    dtype: ExportDtype,
    largest_file_bytes: int,
    on_progress: OnProgress,
    on_note: OnNote,
    *,
    verify: bool,
    merged: MergedAdapters | None = None,
) -> None:
    """Write a checkpoint's weights, with ``merged`` adapters, as a Hugging Face model to ``target``.

    Raise UsageError or EnvironmentProblem.
    """
    checkpoint, target = read_checkpoint(path), target.absolute()
    model = checkpoint.record.model
    config_of(model, dtype)  # rejects a model that Hugging Face does not have, before any work
    check_converter()
    check_free(target)
    check_weights_space(model, BYTES[dtype], target)
    if verify:
        verify_saved(checkpoint, on_note)
    with new_folder(target) as folder:
        job = ExportJob(
            checkpoint=str(checkpoint.path),
            folder=str(folder),
            model=model,
            dtype=dtype,
            largest_file_bytes=largest_file_bytes,
            merged=merged,
        )
        run_converter(job, on_progress, on_note)
        add_context(checkpoint.path / CONTEXT, folder)


def add_context(context: Path, folder: Path) -> None:
    """Copy the checkpoint's ``CONTEXT_FILES`` to the exported model, but only token IDs from its configuration."""
    copy_context(context, folder, CONTEXT_FILES[1:])
    if (context / CONFIG).is_file():
        before, config = (json.loads((place / CONFIG).read_bytes()) for place in (context, folder))
        config |= {name: before[name] for name in TOKENS if name in before}
        write_atomically(folder / CONFIG, json.dumps(config, indent=2) + "\n")


def copy_context(source: Path, target: Path, names: Sequence[str]) -> None:
    """Copy the files in ``names`` that exist; raise OSError if that fails."""
    for name in names:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
            flush_file(target / name)


def import_checkpoint(request: ImportRequest, on_progress: OnProgress, on_note: OnNote) -> None:
    """Create a weights-only checkpoint from another program's; resume a killed import.

    Raise UsageError, EnvironmentProblem or errors of ``run_converter``.
    """
    source, target = read_source(request.source, request.model), request.target.absolute()
    check_converter()
    # Raises UsageError for an unreadable file that would only be copied in the end, after hours for a large model.
    for path in (source.context / name for name in CONTEXT_FILES):
        if path.is_file():
            open_file(path).close()
    with new_folder(target, finished_files) as folder:
        if source.format == "huggingface" and not finished_files(folder):
            check_content(source, request.processes, on_progress, on_note)
        job = ImportJob(
            format=source.format,
            source=str(source.path),
            files=source.files,
            documents=source.documents,
            folder=str(folder),
            model=request.model,
            largest_file_bytes=request.largest_file_bytes,
            processes=request.processes,
        )
        imported = run_converter(job, on_progress, on_note)
        assert imported, "an import that did not fail has a result"
        context = write_context(source, request.model, imported, folder / CONTEXT)
        origin = ImportSource(format=source.format, path=str(source.path), files=source.files)
        record = imported_record(request.workload, request.model, origin, folder, imported.checksums, context)
        record = record.model_copy(update={"weights_dtypes": imported.dtypes})
        write_atomically(folder / RECORD, record.model_dump_json(indent=2) + "\n")
        shutil.rmtree(folder / IMPORTED)


def read_source(path: Path, model: Model) -> WeightsFolder:
    """Open a Hugging Face model or a NeMo 2 checkpoint of ``model``. Raise UsageError for anything else."""
    if is_nemo_folder(path):
        folder = read_nemo_folder(path)
        check_nemo_config(folder, model)
    else:
        folder = read_folder(path)
        # Raises UsageError if the configuration is of another model, or may be, because it has unknown keys.
        name, where = f"{model.model} {model.size}", str(folder.path / CONFIG)
        if differences := list(config_differences(model, folder.config)):
            what = f"the configuration is not that of {name}:{itemized(differences)}"
            raise UsageError(what, where=where, do="pass another folder, or this model's -w and -s; see 'llmb list'")
        if unknown := list(unknown_keys(model, folder.config)):
            what = f"the configuration has keys that may change the model:{itemized(unknown)}"
            raise UsageError(what, where=where, do=f"remove these keys if the model is {name} even without them")
    return folder


def check_content(source: WeightsFolder, threads: int, on_progress: OnProgress, on_note: OnNote) -> None:
    """Raise UsageError with files that differ from the hub's saved checksums, OSError if a file is unreadable."""
    checksums = hub_checksums(source.path, source.files)
    if not checksums:
        return
    total, read_bytes, lock = sum((source.path / name).stat().st_size for name in checksums), 0, Lock()

    def count(size: int) -> None:
        nonlocal read_bytes
        with lock:
            read_bytes += size
            on_progress(read_bytes, total)

    on_note(f"verifying the hub's checksums of {len(checksums)} files, {total / GB:.3g} GB")
    if corrupt := corrupt_files(source.path, checksums, threads, count):
        what = f"these files are corrupt; their SHA-256 differs from that of the hub:{itemized(corrupt)}"
        do = "remove these files and the files they link to, then download the model again"
        raise UsageError(what, where=str(source.path), do=do)


def write_context(source: WeightsFolder, model: Model, imported: ImportedWeights, target: Path) -> dict[str, str]:
    """Copy the files needed to tokenize and export again; create a missing configuration. Return checksums by name."""
    target.mkdir(exist_ok=True)
    for leftover in target.iterdir():  # by an import that was killed here
        leftover.unlink()
    copy_context(source.context, target, CONTEXT_FILES)
    if not (target / CONFIG).is_file():
        dtype: ExportDtype = "bf16" if imported.dtypes == ("bf16",) else "fp32"
        write_atomically(target / CONFIG, json.dumps(config_of(model, dtype), indent=2) + "\n")
    return {path.name: file_checksum(path) for path in sorted(target.iterdir())}


def imported_record(
    workload: str,
    model: Model,
    source: ImportSource,
    folder: Path,
    weights: Mapping[str, str],
    context: Mapping[str, str],
) -> CheckpointRecord:
    """Return the record of the new checkpoint in ``folder``; ``weights`` and ``context`` are checksums by file name."""
    below = {WEIGHTS: weights, CONTEXT: context}
    checksums = {f"{part}/{name}": value for part, files in below.items() for name, value in sorted(files.items())}
    return CheckpointRecord(
        llmb_version=__version__,
        saved_at=now(),
        workload=workload,
        size=model.size,
        dtype=None,
        model=model,
        layout=None,
        training=None,
        seed=None,
        step=0,
        consumed_samples=0,
        optimizer_state=False,
        imported_from=source,
        files={name: (folder / name).stat().st_size for name in checksums},
        crc32=checksums,
    )


def check_converter() -> None:
    """Raise EnvironmentProblem if a package that the converting program needs is not installed."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        what = f"converting weights needs {' and '.join(missing)}, which this Python does not have"
        raise EnvironmentProblem(what, do=pip_install("engine"))


def run_converter(job: AnyJob, on_progress: OnProgress, on_note: OnNote) -> ImportedWeights | None:
    """Run ``job`` in the converting program; return an import's result, else None.

    Raise its error, RunFailed or UserInterrupt.
    """
    last = ConverterMessage()

    def follow(line: bytes) -> None:
        nonlocal last
        message = ConverterMessage.model_validate_json(line)
        if message.progress:
            on_progress(*message.progress)
        if message.note:
            on_note(message.note)
        if message.error or message.imported:
            last = message

    # Conversion uses host memory only: without this, it would occupy a GPU.
    variables = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    advice = "the same command resumes" if isinstance(job, ImportJob) else "nothing was kept"
    ended = run_talking(("-P", "-m", "llmb.engine.weights.convert", job.model_dump_json()), variables, follow, advice)
    if last.error:
        raise error_from(last.error)
    if ended.code:
        raise ended.failure("the program that converts weights")
    return last.imported


@dataclass(frozen=True, slots=True)
class AdapterImport:
    """An import into the new checkpoint ``target`` of adapters for the weights in the checkpoint ``base``."""

    source: Path
    target: Path
    base: Path
    workload: str
    model: Model


def export_adapters(checkpoint: SavedCheckpoint, lora: Lora, target: Path, on_note: OnNote, *, verify: bool) -> None:
    """Write a checkpoint's adapters in peft's format to ``target``; raise errors as ``export_checkpoint`` does."""
    target, base = target.absolute(), checkpoint.record.base
    check_converter()
    check_free(target)
    if verify:
        verify_saved(checkpoint, on_note)
    with new_folder(target) as folder:
        job = AdapterExportJob(
            checkpoint=str(checkpoint.path),
            folder=str(folder),
            model=checkpoint.record.model,
            lora=lora,
            base=base.name if base else None,
        )
        run_converter(job, lambda _done, _total: None, on_note)


def base_and_adapters(
    checkpoint: SavedCheckpoint, explicit: Path | None, on_note: OnNote, *, verify: bool
) -> tuple[Path, MergedAdapters]:
    """Return the path of the adapters' base (see ``base_of``), and the adapters to merge into the base."""
    base, lora = base_of(checkpoint, explicit), checkpoint.record.lora
    assert lora, "the checkpoint contains adapters"
    if verify:
        verify_saved(checkpoint, on_note)
    return base.path, MergedAdapters(checkpoint=str(checkpoint.path), lora=lora)


def base_of(checkpoint: SavedCheckpoint, explicit: Path | None) -> SavedCheckpoint:
    """Find the base of adapters at ``explicit``, or where it was during training.

    Raise UsageError if missing or different.
    """
    recorded = checkpoint.record.base
    path = explicit or (Path(recorded.path) if recorded and recorded.path else None)
    if recorded is None or recorded.path is None or path is None:
        text = base_text(recorded) if recorded else "unknown weights"
        what, do = f"these adapters belong to {text}, which are not in a checkpoint", "omit --merge and --base"
        raise UsageError(what, where=str(checkpoint.path), do=do)
    base = read_checkpoint(path)
    check_base(base, checkpoint.record.model)
    origin = origin_of(base, recorded.name)
    if problem := base_problem(recorded, origin):
        raise UsageError(problem, where=str(checkpoint.path), do="pass the adapters' base with --base")
    return base


def import_adapters(request: AdapterImport, on_note: OnNote) -> None:
    """Create a checkpoint of adapters from peft's format.

    Raise UsageError for unsupported adapters, and errors as ``import_checkpoint`` does.
    """
    source, target, base = request.source.absolute(), request.target.absolute(), read_checkpoint(request.base)
    config = read_json(source / ADAPTER_CONFIG)
    if problems := list(adapter_problems(config)):
        raise UsageError(f"these adapters are unsupported:{itemized(problems)}", where=str(source / ADAPTER_CONFIG))
    if not (source / ADAPTER_FILE).is_file():
        raise UsageError(f"the folder has no '{ADAPTER_FILE}'", where=str(source), do="save it as safetensors")
    check_base(base, request.model)
    check_converter()
    check_free(target)
    job = AdapterImportJob(
        source=str(source),
        folder="",
        model=request.model,
        rank=config["r"],
        alpha=config["lora_alpha"],
        dropout=config.get("lora_dropout") or 0.0,
    )
    with new_folder(target) as folder:
        imported = run_converter(job.model_copy(update={"folder": str(folder)}), lambda _done, _total: None, on_note)
        assert imported, "an import that did not fail has a result"
        name = config.get("base_model_name_or_path") or base.path.name
        record = adapter_record(request, source, folder, imported, origin_of(base, name))
        write_atomically(folder / RECORD, record.model_dump_json(indent=2) + "\n")


def origin_of(base: SavedCheckpoint, name: str | None) -> WeightsOrigin:
    return WeightsOrigin(kind="checkpoint", path=str(base.path), name=name, identity=identity_of(base.record.crc32))


def check_base(base: SavedCheckpoint, model: Model) -> None:
    """Raise UsageError if ``base`` does not contain all weights of ``model``."""
    if base.record.lora:
        raise UsageError("the base contains only adapters", where=str(base.path), do="pass a --base with all weights")
    if differences := list(model_differences(model, base.record.model)):
        what = f"the base is not {model.model} {model.size}:{itemized(differences)}"
        raise UsageError(what, where=str(base.path), do="pass the adapters' --base; to import, also their -w and -s")


def adapter_record(
    request: AdapterImport, source: Path, folder: Path, imported: ImportedWeights, base: WeightsOrigin
) -> CheckpointRecord:
    origin = ImportSource(format="huggingface", path=str(source), files=(ADAPTER_FILE,))
    record = imported_record(request.workload, request.model, origin, folder, imported.checksums, context={})
    return record.model_copy(update={"lora": imported.lora, "base": base})
