# SPDX-License-Identifier: Apache-2.0
"""Whole conversions of adapters: to peft's format and back, and the base that they are merged into."""

from dataclasses import dataclass
from pathlib import Path

from llmb.catalogue.records import Lora, Model
from llmb.checkpoints.checkpoint import (
    RECORD,
    CheckpointRecord,
    ImportSource,
    SavedCheckpoint,
    model_differences,
    read_checkpoint,
)
from llmb.checkpoints.conversion import AdapterExportJob, AdapterImportJob, ImportedWeights, MergedAdapters, OnNote
from llmb.checkpoints.new_folder import check_free, new_folder
from llmb.checkpoints.origin import WeightsOrigin, identity_of
from llmb.errors import UsageError, itemized
from llmb.huggingface.adapter import ADAPTER_CONFIG, ADAPTER_FILE, adapter_problems
from llmb.huggingface.folder import read_json
from llmb.runs.folder import write_atomically
from llmb.runs.initial_weights import base_problem, base_text
from llmb.weights.conversion import check_converter, imported_record, run_converter, verify_saved


@dataclass(frozen=True, slots=True)
class AdapterImport:
    """``target`` is the new checkpoint, of adapters of the weights in the checkpoint ``base``."""

    source: Path
    target: Path
    base: Path
    workload: str
    model: Model


def export_adapters(checkpoint: SavedCheckpoint, lora: Lora, target: Path, on_note: OnNote, *, verify: bool) -> None:
    """Writes the adapters in ``checkpoint`` in peft's format into the new folder ``target``. Raises UsageError."""
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
    checkpoint: SavedCheckpoint, given: Path | None, on_note: OnNote, *, verify: bool
) -> tuple[Path, MergedAdapters]:
    """The base of adapters, see ``base_of``, and what is merged into it."""
    base, lora = base_of(checkpoint, given), checkpoint.record.lora
    assert lora, "the checkpoint contains adapters"
    if verify:
        verify_saved(checkpoint, on_note)
    return base.path, MergedAdapters(checkpoint=str(checkpoint.path), lora=lora)


def base_of(checkpoint: SavedCheckpoint, given: Path | None) -> SavedCheckpoint:
    """The base of the adapters in ``checkpoint``: at ``given``, or where it was when they were trained.

    Raises UsageError if it is not there, or if it is another one.
    """
    recorded = checkpoint.record.base
    path = given or (Path(recorded.path) if recorded and recorded.path else None)
    if recorded is None or recorded.path is None or path is None:
        text = base_text(recorded) if recorded else "weights that are not known"
        raise UsageError(f"these adapters belong to {text}, which are in no checkpoint", where=str(checkpoint.path))
    base = read_checkpoint(path)
    check_base(base, checkpoint.record.model)
    found = origin_of(base, recorded.name)
    if problem := base_problem(recorded, found):
        raise UsageError(problem, where=str(checkpoint.path), do="give their base with --base")
    return base


def import_adapters(request: AdapterImport, on_note: OnNote) -> None:
    """Makes a new checkpoint of adapters from a folder in peft's format.

    Raises UsageError if the folder holds something else, or adapters that the engine cannot express.
    """
    source, target, base = request.source.absolute(), request.target.absolute(), read_checkpoint(request.base)
    config = read_json(source / ADAPTER_CONFIG)
    if problems := list(adapter_problems(config)):
        raise UsageError(f"these adapters are unsupported:{itemized(problems)}", where=str(source / ADAPTER_CONFIG))
    if not (source / ADAPTER_FILE).is_file():
        raise UsageError(f"the folder has no '{ADAPTER_FILE}'", where=str(source))
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
    """Raises UsageError if ``base`` does not contain all weights of ``model``."""
    if base.record.lora:
        raise UsageError("the base contains only adapters", where=str(base.path), do="give a checkpoint of weights")
    if differences := list(model_differences(model, base.record.model)):
        raise UsageError(
            f"the base is another model than {model.model} {model.size}:{itemized(differences)}", where=str(base.path)
        )


def adapter_record(
    request: AdapterImport, source: Path, folder: Path, imported: ImportedWeights, base: WeightsOrigin
) -> CheckpointRecord:
    origin = ImportSource(format="huggingface", path=str(source), files=(ADAPTER_FILE,))
    record = imported_record(request.workload, request.model, origin, folder, imported.checksums, context={})
    return record.model_copy(update={"lora": imported.lora, "base": base})
