# SPDX-License-Identifier: Apache-2.0
"""Installations, settings of a cluster, and prepared data and weights, as tables and JSON documents."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from llmb.base.shown_text import printable
from llmb.jobs.settings_in_effect import Setting, SettingsInEffect
from llmb.launch.documents.documented_paths import NemoItem
from llmb.launch.documents.launch_scripts import CheckedFile
from llmb.reports.recipe_report import lora_text
from llmb.reports.table import (
    Column,
    Table,
    facts_table,
    fields_of,
    number,
    number_column,
    result_table,
    rows_table,
    table_of,
    unknown,
    whole,
)
from llmb.runs.checkpoint_use import base_text
from llmb.runs.checkpoints.checkpoint import SavedCheckpoint
from llmb.setup.install.answers import OPTIONS, Answers
from llmb.setup.install.images import ImportedImage
from llmb.setup.install.installation import Removal
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
    """The JSON of ``llmb install``; its keys are a contract."""
    return {
        "status": "planned" if any(item.state == "open" for item in results) else "installed",
        "path": str(root),
        "python": str(python_of(answers, root)),
        "workloads": list(answers.workloads),
        "steps": [asdict(item) for item in results],
        "jobs": [dict(job) for job in jobs],
        "next": [command for _, command in commands],
    }


def removal_document(root: Path, removal: Removal) -> dict[str, Any]:
    """The JSON of ``llmb install --remove``; its keys are a contract."""
    return {"status": "removed", "path": str(root), "removed": list(removal.removed), "kept": list(removal.remaining)}


def removal_plan_document(root: Path, paths: Sequence[str]) -> dict[str, Any]:
    """The JSON of ``llmb install --remove --dry-run``; its keys are a contract."""
    return {"status": "planned", "path": str(root), "would_remove": list(paths)}


def answers_table(answers: Answers) -> Table:
    """Return every answer with its option."""
    table = result_table("Answers", "option", "value")
    for name, value in answers.document().items():
        text = ", ".join(value) if isinstance(value, list) else value
        if isinstance(value, dict):
            text = " ".join(f"{key}={item}" for key, item in value.items())
        table.add_row(OPTIONS[name].spelled if name in OPTIONS else name, printable(text))
    return table


def steps_table(root: Path, results: Sequence[StepResult]) -> Table:
    planned = any(item.state == "open" for item in results)
    columns: list[Column[StepResult]] = [
        Column("step", lambda item: item.name),
        Column("state", lambda item: STATES[item.state]),
        Column("result", lambda item: "" if item.state == "kept" else printable(item.text)),
    ]
    return table_of(f"{'Would install' if planned else 'Installed'} in {root}", results, columns)


def next_text(commands: Sequence[tuple[str, str]]) -> str:
    """Format commands to copy, each below its purpose."""
    return "\n" + "".join(f"# {purpose}:\n{command}\n" for purpose, command in commands)


def removal_table(root: Path, removal: Removal) -> Table:
    rows = [
        *((printable(path), "removed") for path in removal.removed),
        *((printable(path), "kept: changed since, or not empty") for path in removal.remaining),
    ]
    return rows_table(f"Removed from {root}", ("path", "state"), rows)


def image_document(found: ImportedImage, runtime: str) -> dict[str, Any]:
    """The JSON of ``llmb prepare image``; its keys are a contract."""
    return {**asdict(found), "path": str(found.path), "runtime": runtime}


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
    """The JSON of ``llmb config show``; its keys are a contract."""
    return {
        "install_root": asdict(found.install_root),
        "files": [
            {
                "path": str(file.path),
                "reference_form": file.form.title if file.form else None,
                "not_taken": list(file.left_out),
            }
            for file in found.files
        ],
        "settings": [asdict(item) for item in found.settings],
        "variables": [asdict(item) for item in found.variables],
    }


def checked_document(checkout: Path, found: Sequence[CheckedFile]) -> dict[str, Any]:
    """The JSON of ``llmb config check``; its keys are a contract."""
    return {
        "path": str(checkout),
        "as_released": all(item.state == "as released" for item in found),
        "tag": found[0].script.tag,
        "files": [
            {
                **fields_of(one.script, "release", "workload"),
                **fields_of(one, "file", "state"),
                "differs": [*one.differs],
            }
            for one in found
        ],
    }


def checked_table(found: Sequence[CheckedFile]) -> Table:
    """Compare the files of a checkout with their release, and list the differences that llmb relies on."""
    rows = (
        (f"{one.script.workload} {one.script.release}", one.file, one.state, "; ".join(map(printable, one.differs)))
        for one in found
    )
    return rows_table(
        f"Reference suite, beside {found[0].script.tag}", ("recipe", "file", "state", "what differs"), rows
    )


def settings_tables(found: SettingsInEffect, *, defaults: bool) -> Iterator[Table]:
    """Yield the settings; without ``defaults``, built-in defaults are left out."""
    shown = [item for item in found.settings if defaults or item.source != "llmb"]
    yield _table("Settings", "setting", [found.install_root, *shown])
    if found.variables:
        yield _table("Variables of the workers", "variable", found.variables)


def _table(title: str, name: str, settings: "list[Setting] | tuple[Setting, ...]") -> Table:
    columns: list[Column[Setting]] = [
        Column(name, lambda item: item.key),
        Column("value", lambda item: item.value, value_text),
        Column("from", lambda item: f"{SOURCES[item.source]} {_short(item.place)}".strip()),
    ]
    return table_of(title, settings, columns)


def _short(place: str) -> str:
    """Abbreviate the user's home folder as the shell does."""
    home = f"{Path.home()}/"
    return f"~/{place.removeprefix(home)}" if place.startswith(home) else place


def value_text(value: Any) -> str:  # noqa: ANN401 (a value of YAML)
    if isinstance(value, bool):
        return str(value).lower()
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


MB = 10**6
IMPORTED = unknown("imported weights")
GIB = 2**30
ITEM_KEYS = ("name", "state", "bytes", "documented_gib", "source", "problem", "command")
METHODS = {True: "checksums verified", False: "sizes compared; --checksums reads the files"}


def access_document(found: Sequence[RepositoryAccess], token: TokenSource | None) -> dict[str, Any]:
    """The JSON of ``llmb prepare access``; its keys are a contract."""
    return {
        "token": token,
        "granted": all(item.state == "granted" for item in found),
        "repositories": [{**asdict(item.repository), "state": item.state, "reason": item.reason} for item in found],
    }


def access_table(found: Sequence[RepositoryAccess]) -> Table:
    columns: list[Column[RepositoryAccess]] = [
        Column("repository", lambda item: item.repository.name),
        Column("for", lambda item: ", ".join(item.repository.needed_for)),
        Column("state", lambda item: item.state),
        Column("page", lambda item: item.repository.page),
    ]
    return table_of("Access to the Hugging Face hub", found, columns)


def dataset_document(prepared: PreparedDataset) -> dict[str, Any]:
    """The JSON of ``llmb prepare dataset``; its keys are a contract."""
    return {
        "path": str(prepared.folder),
        "made": prepared.samples_made,
        **prepared.samples.model_dump(mode="json"),
        "packed": [
            {
                "path": str(packed.path),
                "made": packed.made,
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
        Column("split", lambda packed: packed.record.split),
        number_column("packed to", lambda packed: packed.record.seq_len, str),
        number_column("documents", lambda packed: packed.record.documents, whole),
        number_column("left out", lambda packed: packed.record.left_out, whole),
        number_column("packs", lambda packed: packed.record.packs, whole),
        number_column("full", lambda packed: f"{packed.record.fill:.2%}", str),
        number_column("tokens", lambda packed: packed.record.places, whole),
        number_column("mean squares", lambda packed: f"{packed.record.squares_per_pack:,.0f}", str),
        number_column("MB", lambda packed: f"{sum(packed.record.files.values()) / MB:.1f}", str),
        Column("state", lambda packed: "new" if packed.made else "kept"),
    ]
    table = table_of("Packed", prepared.packed, columns)
    table.caption = "full: share of all places that documents take; mean squares: squared lengths of documents, a pack"
    return [about, table]


def checkpoint_document(checkpoint: SavedCheckpoint) -> dict[str, Any]:
    """The JSON of ``llmb checkpoint show``; its keys are a contract."""
    record = checkpoint.record.model_dump(mode="json")
    return {"path": str(checkpoint.path), "size_bytes": checkpoint.size_bytes, **record}


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
    """The JSON of ``llmb prepare verify``; its keys are a contract."""
    return {
        **fields_of(found, "workload", "size", "checksums", "free_bytes", "needed_bytes"),
        "path": str(found.folders.path),
        "complete": not found.lacking,
        "items": [{"path": str(item.path), **fields_of(item, *ITEM_KEYS)} for item in found.items],
        "nemo": [{"path": str(item.path), **fields_of(item, "name", "state", "problem")} for item in found.nemo],
    }


def verification_tables(found: Verification) -> list[Table]:
    """Return the items, with the problem of each incomplete one and the command that prepares it."""
    columns: list[Column[Item]] = [
        Column("folder", _folder_name),
        Column("state", lambda item: item.state),
        number_column("GiB", lambda item: item.bytes, _gib),
        number_column("documented", lambda item: item.documented_gib, lambda gib: "" if gib is None else f"{gib:g}"),
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
        nemo: list[Column[NemoItem]] = [
            Column("folder", lambda item: item.name),
            Column("state", lambda item: item.state),
            Column("problem", lambda item: item.problem or "", printable),
        ]
        tables.append(table_of("In NeMo's form, for --framework reference_suite", found.nemo, nemo))
    if problems := [item for item in found.items if item.problem]:
        wrong: list[Column[Item]] = [
            Column("folder", _folder_name),
            Column("problem", lambda item: item.problem, printable),
        ]
        tables.append(table_of("Not complete", problems, wrong))
    return tables


def _folder_name(item: Item) -> str:
    """Return the name without the folder of the tokenizer, which is named after the model."""
    return f"packed {item.path.name}" if "/packed/" in item.name else item.name


def _gib(size: int) -> str:
    """Format in GiB with three digits."""
    return f"{size / GIB:,.0f}" if size >= 100 * GIB else f"{size / GIB:.3g}"
