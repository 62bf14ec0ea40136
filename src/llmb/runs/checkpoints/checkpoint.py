# SPDX-License-Identifier: Apache-2.0
"""A checkpoint on disk, written to a hidden folder that is renamed once its record, the last file, is written."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from llmb.base.errors import UsageError, itemized
from llmb.base.input_files import MOST_JSON_BYTES, read_regular
from llmb.base.record import first_problem
from llmb.base.trust import check_links
from llmb.catalogue.records import Dtype, Layout, Lora, Model, Record, Training
from llmb.runs.checkpoints.checkpoint_files import PARTIAL, Verification
from llmb.runs.checkpoints.origin import Origin, WeightsOrigin
from llmb.runs.checkpoints.prepared_data import PackedDataset

# The first pattern that matches decides; each is a file that its format requires.
SIGNS = (
    ("context/model.yaml", "it looks like a NeMo 2 checkpoint"),
    ("context/io.json", "it looks like a NeMo 2 checkpoint"),
    ("model_config.yaml", "it looks like a NeMo 1 checkpoint"),
    ("run_config.yaml", "it looks like a Megatron-Bridge checkpoint"),
    ("latest_checkpointed_iteration.txt", "it looks like a folder of Megatron checkpoints"),
    ("common.pt", "it looks like a Megatron-Core distributed checkpoint"),
    ("weights/common.pt", "it looks like a NeMo 2 checkpoint"),
    ("*/model_optim_rng.pt", "it looks like a Megatron-LM checkpoint"),
    ("*.safetensors", "it looks like a Hugging Face model"),
    ("pytorch_model*.bin", "it looks like a Hugging Face model"),
    ("consolidated.*.pth", "it looks like the original weights of a Llama model"),
    (".metadata", "it looks like a checkpoint of torch.distributed.checkpoint by another program"),
    ("weights/.metadata", "it looks like a checkpoint of torch.distributed.checkpoint by another program"),
    ("*.pt", "it looks like files of torch.save"),
    ("*.pth", "it looks like files of torch.save"),
)


@dataclass(frozen=True, slots=True)
class Description:
    """The description of a path in messages; ``checkpoints`` are llmb's checkpoints nearby, if any."""

    what: str
    checkpoints: tuple[str, ...] = ()


def describe_folder(path: Path) -> Description:
    """Describe ``path``, which is not a checkpoint, and list llmb's checkpoints in or above it."""
    if not path.is_dir():
        return Description("it is a file")
    if (path.parent / RECORD).is_file():
        return Description("it is a folder inside a checkpoint", (str(path.parent),))
    inside = [*path.glob(f"*/{RECORD}"), *path.glob(f"checkpoints/*/{RECORD}")]
    names = [str(record.parent.relative_to(path)) for record in inside if not record.parent.name.startswith(".")]
    if names:
        return Description("it is a folder with checkpoints", tuple(sorted(names, key=lambda name: (len(name), name))))
    for pattern, what in SIGNS:
        if next(path.glob(pattern), None):
            return Description(what)
    return Description("it is an empty folder" if not any(path.iterdir()) else "it has no 'checkpoint.json'")


RECORD = "checkpoint.json"
WEIGHTS = "weights"
CONTEXT = "context"
"""Folder with the configuration and tokenizer of imported weights."""
NOT_ARCHITECTURE = ("model", "size", "source", "init_std", "max_seq_len")
"""Fields of a model that may differ between checkpoint and run."""


SourceFormat = Literal["huggingface", "nemo"]
StoredDtype = Literal["bf16", "fp16", "fp32"]
"""Dtype of weights in a checkpoint: imports of whole models keep the source's; all else is saved in fp32."""


class ImportSource(Record):
    """The source of imported weights."""

    format: SourceFormat
    path: str
    files: tuple[str, ...]


class CheckpointRecord(Record):
    """The content of ``checkpoint.json``. For imported weights, fields that only a run has are None, 0 or False."""

    schema_version: Literal[1] = 1
    llmb_version: str
    saved_at: str
    workload: str
    size: str
    dtype: Dtype | None
    model: Model
    layout: Layout | None
    training: Training | None
    seed: int | None
    step: int
    """Number of completed steps."""
    consumed_samples: int
    optimizer_state: bool = True
    imported_from: ImportSource | None = None
    weights_dtypes: tuple[StoredDtype, ...] = ("fp32",)
    """All dtypes in which weights are stored; weights are always loaded in fp32."""
    dataset: PackedDataset | None = None
    """The dataset that the model was trained on; None for synthetic tokens and imported weights."""
    lora: Lora | None = None
    """The adapters that the checkpoint contains instead of all weights; None if it contains all weights."""
    base: WeightsOrigin | None = None
    """The frozen weights of ``lora``; None without adapters."""
    origin: Origin | None = None
    """Origin of the weights and data of the run that saved the checkpoint; None if imported, or if not recorded."""
    files: dict[str, int]
    crc32: dict[str, str]
    """CRC-32 of each file, as eight hexadecimal digits."""


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """A complete checkpoint and its folder."""

    path: Path
    record: CheckpointRecord

    @property
    def size_bytes(self) -> int:
        return sum(self.record.files.values())


def checkpoint_name(step: int, consumed_samples: int) -> str:
    return f"step={step}-consumed_samples={consumed_samples}"


def read_checkpoint(path: Path) -> SavedCheckpoint:
    """Return the checkpoint at ``path``, the folder above ``weights``. Raise UsageError if it cannot be used."""
    try:
        record = read_checkpoint_record(path)
        missing = list(_damage(path, record))
    except OSError as error:
        raise UsageError(f"the checkpoint cannot be read: {error.strerror}", where=str(error.filename)) from error
    if missing:
        what = f"the checkpoint is incomplete:{itemized(missing)}"
        raise UsageError(what, where=str(path), do="use another checkpoint")
    return SavedCheckpoint(path.absolute(), record)


def damage_error(path: Path, damaged: Sequence[str]) -> UsageError:
    """Return the error for files of the checkpoint at ``path`` that are unreadable or have changed since the save."""
    return UsageError(f"the checkpoint is damaged:{itemized(damaged)}", where=str(path), do="use another checkpoint")


def saved_checkpoints(folder: Path) -> list[SavedCheckpoint]:
    """Return the complete checkpoints in ``folder``, sorted by step."""
    checkpoints = []
    for path in folder.glob(f"*/{RECORD}"):
        if not path.parent.name.startswith("."):
            try:
                checkpoints.append(read_checkpoint(path.parent))
            except UsageError:
                continue
    return sorted(checkpoints, key=lambda checkpoint: checkpoint.record.step)


def model_differences(ours: Model, theirs: Model) -> Iterator[str]:
    """Yield the differences that prevent loading the weights of one model into the other, field by field."""
    mine, other = (model.model_dump(exclude=set(NOT_ARCHITECTURE)) for model in (ours, theirs))
    for name, value in mine.items():
        if value != other[name]:
            yield f"{name} is {other[name]} in the checkpoint and {value} in this run"


def dataset_problem(ours: PackedDataset | None, theirs: PackedDataset | None) -> str | None:
    """Return why a run on ``ours`` cannot resume from a checkpoint trained on ``theirs``; None if it can."""
    if (ours and ours.crc32) == (theirs and theirs.crc32):
        return None
    ours_text, theirs_text = (data.identity if data else "synthetic tokens" for data in (ours, theirs))
    return f"the checkpoint was trained on {theirs_text}, but this run trains on {ours_text}"


def read_checkpoint_record(path: Path) -> CheckpointRecord:
    """Read only a checkpoint's record; raise UsageError if it is missing or invalid, OSError if it is unreadable."""
    check_links(path)
    if not path.exists():
        raise UsageError("there is no such checkpoint", where=str(path), do="pass a folder that contains 'weights'")
    if path.name.startswith(".") and path.name.endswith(PARTIAL):
        what = "this checkpoint is incomplete: llmb is still writing it, or ended before it was complete"
        raise UsageError(what, where=str(path), do="wait until it is complete, or use another checkpoint")
    if not (path / RECORD).is_file():
        description = describe_folder(path)
        raise UsageError(
            f"this is not a checkpoint of llmb: {description.what}",
            where=str(path),
            choices=description.checkpoints,
            do="pass a folder saved by 'llmb run --save-checkpoint', the one above 'weights'; "
            "'llmb checkpoint import' imports a Hugging Face model",
        )
    try:
        return CheckpointRecord.model_validate_json(read_regular(path / RECORD, MOST_JSON_BYTES))
    except ValidationError as error:
        problem = ": ".join(filter(None, first_problem(error)))
        raise UsageError(
            f"'{RECORD}' cannot be read by this version of llmb: {problem}",
            where=str(path / RECORD),
            do="load it with the version of llmb that saved it, which the file may name, or use another checkpoint",
        ) from error


def _damage(path: Path, record: CheckpointRecord) -> Iterator[str]:
    if not record.files:
        yield "its record lists no files"
    for name, size in record.files.items():
        file = path / name
        if not file.is_file():
            yield f"{name} is missing"
        elif file.stat().st_size != size:
            yield f"{name} has {file.stat().st_size} of {size} bytes"


class Verified(Record):
    """The verification of a loaded checkpoint's files, and the seconds that it took; both are None for a save."""

    verification: Verification | None = None
    verify_s: float | None = None


class RankTransfer(Record):
    """The bytes that one rank wrote to disk or read, and the seconds that this took."""

    rank: int
    size_bytes: int
    duration_s: float
    blocked_s: float | None = None
    """Seconds that training waited for the copy of an asynchronous save; else None."""


class CheckpointTime(Verified):
    """A save or a load by all ranks. ``start_s`` is in Unix time; ``step`` is None for a load."""

    kind: Literal["save", "load"]
    step: int | None = None
    start_s: float
    duration_s: float
    ranks: tuple[RankTransfer, ...] = ()
    """The transfers in the order of ranks; empty in files of earlier versions."""

    @property
    def size_bytes(self) -> int:
        return sum(each.size_bytes for each in self.ranks)

    @property
    def gb_per_s(self) -> float | None:
        """Return all ranks' bytes divided by the total time, in 10^9 bytes per second; None if unknown."""
        return self.size_bytes / 1e9 / self.duration_s if self.ranks and self.duration_s else None

    @property
    def slowest(self) -> RankTransfer | None:
        return max(self.ranks, key=lambda each: each.duration_s, default=None)


def checkpoint_time(
    kind: Literal["save", "load"], start_s: float, duration_s: float, step: int | None, ranks: Sequence[RankTransfer]
) -> CheckpointTime:
    """Return the record of a save or a load, with start and duration rounded to milliseconds."""
    return CheckpointTime(
        kind=kind, step=step, start_s=round(start_s, 3), duration_s=round(duration_s, 3), ranks=tuple(ranks)
    )


def add_checkpoint_time(path: Path, time: CheckpointTime) -> None:
    """Append ``time`` to the file ``path``. Raise OSError if it cannot be written."""
    with path.open("a") as stream:
        stream.write(time.model_dump_json() + "\n")


def read_checkpoint_times(path: Path) -> list[CheckpointTime]:
    """Return the times, without a truncated last line.

    Raise OSError if unreadable, ValueError if another line is incomplete.
    """
    times = []
    lines = read_regular(path, MOST_JSON_BYTES).splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            times.append(CheckpointTime.model_validate_json(line))
        except ValidationError as error:
            if number < len(lines):
                raise ValueError(f"line {number} is not a complete save or load") from error
    return times
