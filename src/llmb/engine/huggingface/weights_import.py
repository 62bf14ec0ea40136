# SPDX-License-Identifier: Apache-2.0
"""Converts safetensors files to the weights of a checkpoint."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save

from llmb.catalogue.records import Model
from llmb.engine.checkpoint.state import MODEL
from llmb.engine.checkpoint.torch_errors import torch_message
from llmb.engine.checkpoint.writer import Writer
from llmb.engine.huggingface.chunks import CHUNK_BYTES, Chunk, ChunkPlanner, chunks_of
from llmb.engine.huggingface.safetensors_files import SafetensorsFiles, open_files
from llmb.engine.model.decoder import EMBEDDING, build_model
from llmb.errors import EnvironmentProblem, UsageError
from llmb.huggingface.formats import format_of
from llmb.huggingface.tensors import HEAD_WEIGHT, Match, Shape, match_tensors, matrices_of_expert
from llmb.runs.checkpoint import WEIGHTS
from llmb.runs.conversion import Checksums, ImportJob, OnProgress

MOST_PROBLEMS = 20


def parameter_shapes(model: Model) -> dict[str, Shape]:
    """Names and shapes of the full model's parameters, without allocating memory."""
    with torch.device("meta"):
        decoder: nn.Module = build_model(model)
    return {name: tuple(parameter.shape) for name, parameter in decoder.named_parameters()}


class Imported(NamedTuple):
    """Names of tensors that were left out, and the checksums of the files that were written, by name."""

    left_out: tuple[str, ...]
    checksums: Checksums


def import_weights(job: ImportJob, on_progress: OnProgress) -> Imported:
    """Writes the checkpoint's ``weights``, one chunk in memory at a time.

    Raises UsageError, before anything is written, if the files do not hold exactly this model, and while writing if a
    value is not finite.
    """
    source, shapes = Path(job.source), parameter_shapes(job.model)
    with open_files(source, job.files) as files:
        match = match_tensors(shapes, files.stored, format_of(job.model), tied=job.model.tied_embeddings)
        if match.problems:
            raise mismatch(job, match.problems)
        if HEAD_WEIGHT in match.left_out and (differences := list(head_differences(files, match))):
            raise mismatch(job, differences)
        return Imported(match.left_out, _write(job, files, match, shapes, on_progress))


def head_differences(files: SafetensorsFiles, match: Match) -> Iterator[str]:
    """Differences between the stored head of a model with tied embeddings and its embedding."""
    (embedding,) = match.sources[EMBEDDING]
    shape, copied = (files.stored[name].shape for name in (embedding, HEAD_WEIGHT))
    equal = shape == copied and all(
        torch.equal(*(files.rows(name, chunk.first, chunk.end) for name in (embedding, HEAD_WEIGHT)))
        for chunk in chunks_of(embedding, shape, CHUNK_BYTES)
    )
    if not equal:
        yield f"{HEAD_WEIGHT} is not equal to {embedding}, though the model ties them"


def mismatch(job: ImportJob, problems: Sequence[str]) -> UsageError:
    shown = problems[:MOST_PROBLEMS]
    more = len(problems) - len(shown)
    lines = "\n".join([*(f"  - {line}" for line in shown), *([f"  - and {more} more"] if more else [])])
    name = f"{job.model.model} {job.model.size}"
    return UsageError(f"the files do not match the weights of {name}:\n{lines}", where=job.source)


def read_rows(files: SafetensorsFiles, sources: Sequence[str], matrices: int, chunk: Chunk) -> Tensor:
    """Rows of a parameter; ``matrices`` tensors, [outputs, inputs], make a row where experts have their own."""
    if not matrices:
        return files.rows(sources[0], chunk.first, chunk.end)
    return torch.stack(
        [
            torch.stack([files.whole(name).T for name in sources[row * matrices : (row + 1) * matrices]], dim=1)
            for row in range(chunk.first, chunk.end)
        ]
    )


def usage_error(error: BaseException) -> UsageError | None:
    """The error that was raised while torch saved, if a tensor was rejected."""
    causes = [cause for cause, _ in error.failures.values()] if isinstance(error, CheckpointException) else [error]
    return next((cause for cause in causes if isinstance(cause, UsageError)), None)


def _write(
    job: ImportJob, files: SafetensorsFiles, match: Match, shapes: dict[str, Shape], on_progress: OnProgress
) -> Checksums:
    named = {MODEL + name: shape for name, shape in shapes.items()}
    form = format_of(job.model)
    total = sum(4 * torch.Size(shape).numel() for shape in shapes.values())
    done = 0

    def read(chunk: Chunk) -> Tensor:
        nonlocal done
        name = chunk.name.removeprefix(MODEL)
        rows = read_rows(files, match.sources[name], len(matrices_of_expert(name, form)), chunk)
        done += rows.numel() * rows.element_size()
        on_progress(done, total)
        return rows.reshape(-1, *named[chunk.name][1:])

    # One file per chunk: the writer keeps the content of a file in memory until the file is closed. It must not copy
    # ahead, as it does if there is a GPU.
    writer = Writer(Path(job.folder) / WEIGHTS, single_file_per_rank=False, per_thread_copy_ahead=0)
    try:
        save({}, storage_writer=writer, planner=ChunkPlanner(named, read), no_dist=True)
    except (CheckpointException, OSError, SafetensorError) as error:
        if rejected := usage_error(error):
            raise UsageError(rejected.what, where=job.source) from error
        advice = "free some space, or give a folder on another disk"
        raise EnvironmentProblem(f"the weights cannot be written: {torch_message(error)}", do=advice) from error
    return writer.checksums
