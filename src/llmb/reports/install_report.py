# SPDX-License-Identifier: Apache-2.0
"""Installations, images, settings, checked files, access, prepared data and checkpoints, as tables and JSON."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from llmb.base.shown_text import printable
from llmb.catalogue.user_files import UserFile
from llmb.jobs.settings_in_effect import Setting, SettingsInEffect
from llmb.launch.documents.launch_scripts import CheckedFile
from llmb.reports.formats import formatted, number, unknown, whole
from llmb.reports.recipe_report import lora_text
from llmb.reports.table import Column, Table, facts_table, fields_of, numbers, rows_table, table_of, texts
from llmb.runs.checkpoint_use import base_text
from llmb.runs.checkpoints.checkpoint import SavedCheckpoint
from llmb.setup.install.answers import OPTIONS, Answers
from llmb.setup.install.images import ImportedImage
from llmb.setup.install.installing import StepResult
from llmb.setup.install.python_environment import python_of
from llmb.setup.prepare.dataset import PackedFolder, PreparedDataset
from llmb.setup.prepare.hub import RepositoryAccess, TokenSource
from llmb.setup.prepare.verify import Item, Verification

STATES = {"done": "done", "kept": "done before", "open": "to do"}
GB = 10**9


def install_document(
    answers: Answers,
    root: Path,
    results: Sequence[StepResult],
    jobs: Sequence[Mapping[str, Any]],
    commands: Sequence[tuple[str, str]],
) -> dict[str, Any]:
    """Return the JSON of ``llmb install``; its keys are a contract."""
    return {
        "status": "planned" if any(item.state == "open" for item in results) else "installed",
        "path": root,
        "python": python_of(answers, root),
        "workloads": answers.workloads,
        "steps": results,
        "jobs": jobs,
        "next": [command for _, command in commands],
    }


def answers_table(answers: Answers) -> Table:
    """Return a table of the answers that are not open, with their options."""
    columns: list[Column[tuple[str, Any]]] = [
        Column("option", lambda row: OPTIONS[row[0]].spelled if row[0] in OPTIONS else row[0]),
        Column("value", "1", _answer_text),
    ]
    return table_of("Answers", answers.document().items(), columns)


def _answer_text(value: Any) -> str:  # noqa: ANN401 (of any option)
    if isinstance(value, dict):
        return printable(" ".join(f"{key}={item}" for key, item in value.items()))
    return printable(", ".join(value) if isinstance(value, list) else value)


def steps_table(root: Path, results: Sequence[StepResult]) -> Table:
    planned = any(item.state == "open" for item in results)
    columns: list[Column[StepResult]] = [
        *texts("step: name"),
        Column("state", "state", STATES.__getitem__),
        Column("result", lambda item: "" if item.state == "kept" else item.text),
    ]
    return table_of(f"{'Would install' if planned else 'Installed'} in {root}", results, columns)


def image_document(found: ImportedImage, runtime: str) -> dict[str, Any]:
    """Return the JSON of ``llmb prepare image``; its keys are a contract."""
    return {**asdict(found), "runtime": runtime}


def image_text(found: ImportedImage, runtime: str) -> str:
    return (
        f"image   {printable(str(found.path))}\nsize    {found.bytes / GB:.3f} GB\n"
        f"\n# in cluster_config.yaml:\ncontainer:\n  runtime: {runtime}\n  image: {printable(str(found.path))}\n"
    )


SOURCES = {
    "option": "option",
    "shell": "shell",
    "user": "user default",
    "cluster": "",
    "catalogue": "catalogue,",
    "llmb": "llmb's",
}


def settings_document(found: SettingsInEffect) -> dict[str, Any]:
    """Return the JSON of ``llmb config show``; its keys are a contract."""
    files = [fields_of(one, "path", "reference_form: form.title", "not_taken: left_out") for one in found.files]
    return {"install_root": found.install_root, "files": files, **fields_of(found, "settings", "variables")}


def checked_document(
    checkout: Path | None, found: Sequence[CheckedFile], folder: Path | None, own: Sequence[UserFile]
) -> dict[str, Any]:
    """Return the JSON of ``llmb config check``; its keys are a contract. Without a checkout, ``files`` is
    empty and other values about it are null; without a user's catalogue, ``catalogue`` is null."""
    return {
        "path": checkout,
        "as_released": all(item.state == "as released" for item in found) if found else None,
        "tag": found[0].script.tag if found else None,
        "files": [fields_of(one, "script.release", "script.workload", "file", "state", "differs") for one in found],
        "catalogue": folder and {"path": folder, "files": [one._asdict() for one in own]},
    }


def user_files_table(folder: Path, own: Sequence[UserFile]) -> Table:
    """Return a table of the files in a user's catalogue, with the number of problems in each."""
    states = (f"{len(one.problems)} {'problem' if len(one.problems) == 1 else 'problems'}" for one in own)
    rows = [(one.file, state if one.problems else "valid") for one, state in zip(own, states, strict=True)]
    return rows_table(f"Your catalogue, {folder}", ("file", "state"), rows)


def checked_table(found: Sequence[CheckedFile]) -> Table:
    """Return a table of the files of a checkout, with differences from their release that affect llmb."""
    columns: list[Column[CheckedFile]] = [
        Column("recipe", lambda one: f"{one.script.workload} {one.script.release}"),
        *texts("file", "state"),
        Column("what differs", "differs", "; ".join),
    ]
    return table_of(f"Reference suite, compared with {found[0].script.tag}", found, columns)


def settings_tables(found: SettingsInEffect, *, defaults: bool) -> Iterator[Table]:
    """Yield tables of settings and variables; without ``defaults``, omit built-in defaults."""
    shown = [item for item in found.settings if defaults or item.source != "llmb"]
    yield _table("Settings", "setting", [found.install_root, *shown])
    if found.variables:
        yield _table("Variables of the workers", "variable", found.variables)


def _table(title: str, name: str, settings: "list[Setting] | tuple[Setting, ...]") -> Table:
    columns: list[Column[Setting]] = [
        Column(name, "key"),
        Column("value", "value", value_text),
        Column("from", lambda item: f"{SOURCES[item.source]} {_short(item.place)}".strip()),
    ]
    return table_of(title, settings, columns)


def _short(place: str) -> str:
    home = f"{Path.home()}/"
    return f"~/{place.removeprefix(home)}" if place.startswith(home) else place


def value_text(value: Any) -> str:  # noqa: ANN401 (a value of YAML)
    if isinstance(value, bool):
        return str(value).lower()
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


MB = 10**6
IMPORTED = unknown("imported weights")
GIB = 2**30
ITEM_KEYS = ("path", "name", "state", "bytes", "documented_gib", "source", "problem", "command")
METHODS = {True: "checksums verified", False: "sizes compared; --checksums reads the files"}


def access_document(found: Sequence[RepositoryAccess], token: TokenSource | None) -> dict[str, Any]:
    """Return the JSON of ``llmb prepare access``; its keys are a contract."""
    return {
        "token": token,
        "granted": all(item.state == "granted" for item in found),
        "repositories": [{**asdict(item.repository), **fields_of(item, "state", "reason")} for item in found],
    }


def access_table(found: Sequence[RepositoryAccess]) -> Table:
    needed_for = Column[RepositoryAccess]("for", "repository.needed_for", ", ".join)
    columns = [*texts("repository: repository.name"), needed_for, *texts("state", "page: repository.page")]
    return table_of("Access to the Hugging Face hub", found, columns)


def dataset_document(prepared: PreparedDataset) -> dict[str, Any]:
    """Return the JSON of ``llmb prepare dataset``; its keys are a contract."""
    return {
        **fields_of(prepared, "path: folder", "made: samples_made"),
        **prepared.samples.model_dump(mode="json"),
        "packed": [
            {
                **fields_of(packed, "path", "made"),
                **fields_of(packed.record, "fill", "places_per_pack", "squares_per_pack"),
                **packed.record.model_dump(mode="json"),
            }
            for packed in prepared.packed
        ],
    }


def dataset_tables(prepared: PreparedDataset) -> list[Table]:
    samples = prepared.samples
    counts = ", ".join(f"{count:,} {split}" for split, count in samples.samples.items())
    tokenizers = {packed.record.tokenizer.name: packed.record.tokenizer for packed in prepared.packed}
    facts = [
        ("source", printable(samples.source)),
        ("splits", samples.split_rule),
        ("template", samples.template),
        ("samples", f"{counts}; {samples.without_answer:,} without an answer left out"),
        *(("tokenizer", f"{one.name}, {one.vocab_size:,} tokens, EOS {one.eos_id}") for one in tokenizers.values()),
        ("path", prepared.folder),
    ]
    about = facts_table(f"Dataset: {prepared.folder.name}", facts)
    columns: list[Column[PackedFolder]] = [
        *texts("split: record.split"),
        *numbers("packed to: record.seq_len", form=str),
        *numbers("documents: record.documents", "left out: record.left_out", "packs: record.packs", form=whole),
        *numbers("full: record.fill", form="{:.2%}".format),
        *numbers("tokens: record.places", form=whole),
        *numbers("mean squares: record.squares_per_pack", form="{:,.0f}".format),
        Column("MB", lambda packed: f"{sum(packed.record.files.values()) / MB:.1f}", str, right=True),
        Column("state", lambda packed: "new" if packed.made else "kept"),
    ]
    caption = "full: share of all places that documents take; mean squares: squared lengths of documents, a pack"
    return [about, table_of("Packed", prepared.packed, columns, caption=caption)]


def checkpoint_document(checkpoint: SavedCheckpoint) -> dict[str, Any]:
    """Return the JSON of ``llmb checkpoint show``; its keys are a contract."""
    return {**fields_of(checkpoint, "path", "size_bytes"), **checkpoint.record.model_dump(mode="json")}


def checkpoint_table(checkpoint: SavedCheckpoint) -> Table:
    record = checkpoint.record
    layout, model, origin = record.layout, record.model, record.origin
    sizes = f"TP {layout.tp}, PP {layout.pp}, CP {layout.cp}, EP {layout.ep}, DP {layout.dp}" if layout else IMPORTED
    adapters = record.lora if record.base else None
    facts = [
        ("workload", f"{record.workload} {record.size}"),
        ("model", f"{model.model}, {model.layers} layers, vocabulary {model.vocab_size}"),
        ("contains", adapters and f"adapters only: {lora_text(adapters)}"),
        ("base", base_text(record.base) if adapters and record.base else None),
        ("weights", origin and f"{origin.weights.text}, before the first step"),
        ("data", origin and origin.data.text),
        ("step", f"{record.step}, {record.consumed_samples:,} samples consumed"),
        ("dtype of the weights", ", ".join(record.weights_dtypes)),
        ("optimizer state", "yes" if record.optimizer_state else "no: training begins with a new one"),
        ("dtype of the run", record.dtype or IMPORTED),
        ("saved by", f"{layout.gpus} processes, {sizes}" if layout else sizes),
        ("seed", IMPORTED if record.seed is None else record.seed),
        ("imported from", record.imported_from and record.imported_from.path),
        ("saved at", f"{record.saved_at}, llmb {record.llmb_version}"),
        ("size", f"{number(checkpoint.size_bytes / 1e9)} GB in {len(record.files)} files"),
        ("checksums", "CRC-32 of every file"),
        ("path", checkpoint.path),
    ]
    return facts_table(f"Checkpoint: {checkpoint.path.name}", facts)


def verification_document(found: Verification) -> dict[str, Any]:
    """Return the JSON of ``llmb prepare verify``; its keys are a contract."""
    return {
        **fields_of(found, "workload", "size", "checksums", "free_bytes", "needed_bytes", "folders.path"),
        "complete": not found.lacking,
        "items": [fields_of(item, *ITEM_KEYS) for item in found.items],
        "nemo": [fields_of(item, "path", "name", "state", "problem") for item in found.nemo],
    }


def verification_tables(found: Verification) -> list[Table]:
    """Return tables of the items, the storage, files for the reference suite, and the problems of incomplete items."""
    folder = Column("folder", _folder_name)
    columns: list[Column[Item]] = [
        folder,
        *texts("state"),
        *numbers("GiB: bytes", form=_gib),
        *numbers("documented: documented_gib", form=formatted("{:g}")),
    ]
    table = table_of(f"Prepared: {found.workload} {found.size}", found.items, columns)
    needed = f"about {_gib(found.needed_bytes)} GiB for the checkpoint; a download takes as much again"
    sources = [item for item in found.items if item.source and "/packed/" not in item.name]
    facts = [
        ("path", found.folders.path),
        *((item.name.partition("/")[0], f"from {printable(item.source)}") for item in sources),
        ("verified by", METHODS[found.checksums]),
        ("free", f"{_gib(found.free_bytes)} GiB"),
        ("needed", needed if found.needed_bytes else None),
    ]
    about = facts_table("Storage", facts)
    tables = [table, about]
    if found.nemo:
        nemo = texts("folder: name", "state", "problem")
        tables.append(table_of("In NeMo's form, for --framework reference_suite", found.nemo, nemo))
    if problems := [item for item in found.items if item.problem]:
        tables.append(table_of("Not complete", problems, [folder, *texts("problem")]))
    return tables


def _folder_name(item: Item) -> str:
    """Return an item's name; for a packed dataset, without the tokenizer's folder, which is named after the model."""
    return f"packed {item.path.name}" if "/packed/" in item.name else item.name


def _gib(size: int) -> str:
    return f"{size / GIB:,.0f}" if size >= 100 * GIB else f"{size / GIB:.3g}"
