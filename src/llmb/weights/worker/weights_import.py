# SPDX-License-Identifier: Apache-2.0
"""Converts safetensors files, or a checkpoint of NeMo, to the weights of a checkpoint, in the dtypes that they have."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path

import torch
from torch import Tensor, nn

from llmb.catalogue.records import Model
from llmb.checkpoints.conversion import ImportedWeights, ImportJob, OnNote, OnProgress
from llmb.engine.model.decoder import EMBEDDING, build_model
from llmb.errors import UsageError, itemized
from llmb.huggingface.formats import WeightsFormat, format_of
from llmb.huggingface.tensors import HEAD_WEIGHT, Match, Shape, match_tensors, matrices_of_expert
from llmb.weights.worker.chunk_files import CHUNK_BYTES, Chunk, ChunkSource, Parameter, chunks_of, write_checkpoint
from llmb.weights.worker.nemo_parameters import open_nemo
from llmb.weights.worker.safetensors_files import DTYPES, SafetensorsFiles, open_files


def parameter_shapes(model: Model) -> dict[str, Shape]:
    """Names and shapes of the full model's parameters, without allocating memory."""
    with torch.device("meta"):
        decoder: nn.Module = build_model(model)
    return {name: tuple(parameter.shape) for name, parameter in decoder.named_parameters()}


@dataclass(frozen=True, slots=True)
class HuggingFaceParameters:
    """The parameters of a model in safetensors files, read chunk by chunk."""

    files: SafetensorsFiles
    sources: dict[str, tuple[str, ...]]
    """The stored tensors of each parameter."""
    form: WeightsFormat
    parameters: dict[str, Parameter]

    def read(self, chunk: Chunk) -> Tensor:
        """Rows of a parameter, in its own dtype."""
        matrices = len(matrices_of_expert(chunk.name, self.form))
        rows = read_rows(self.files, self.sources[chunk.name], matrices, chunk)
        parameter = self.parameters[chunk.name]
        return rows.to(parameter.dtype).reshape(-1, *parameter.shape[1:])


def import_weights(job: ImportJob, on_progress: OnProgress, on_note: OnNote) -> ImportedWeights:
    """Writes the checkpoint's ``weights``, each process with one chunk in memory at a time.

    Raises UsageError, before anything is written, if the files do not hold exactly this model, and while writing if a
    value is not finite.
    """
    if job.format == "nemo":
        nemo, left_out = open_nemo(Path(job.source), job.model, parameter_shapes(job.model))
        return _written(job, nemo, left_out, on_progress, on_note)
    shapes, form = parameter_shapes(job.model), format_of(job.model)
    files = open_files(Path(job.source), job.files)
    match = match_tensors(shapes, files.stored, form, tied=job.model.tied_embeddings)
    if match.problems:
        raise mismatch(job, match.problems)
    if HEAD_WEIGHT in match.left_out and (differences := list(head_differences(files, match))):
        raise mismatch(job, differences)
    parameters = {name: Parameter(shape, stored_dtype(files, match.sources[name])) for name, shape in shapes.items()}
    source = HuggingFaceParameters(files, match.sources, form, parameters)
    return _written(job, source, match.left_out, on_progress, on_note)


def _written(
    job: ImportJob, source: ChunkSource, left_out: Sequence[str], on_progress: OnProgress, on_note: OnNote
) -> ImportedWeights:
    imported = write_checkpoint(job, source, on_progress, on_note)
    if left_out:
        some = ", ".join(left_out[:3]) + (", ..." if len(left_out) > 3 else "")
        on_note(f"{len(left_out)} tensors that the model does not have are left out: {some}")
    return imported


def stored_dtype(files: SafetensorsFiles, sources: Sequence[str]) -> torch.dtype:
    """That of the tensors that a parameter is made of, or one that can hold all their values."""
    return reduce(torch.promote_types, {DTYPES[files.stored[name].dtype] for name in sources})


def head_differences(files: SafetensorsFiles, match: Match) -> Iterator[str]:
    """Differences between the stored head of a model with tied embeddings and its embedding."""
    (embedding,) = match.sources[EMBEDDING]
    shape, copied = (files.stored[name].shape for name in (embedding, HEAD_WEIGHT))
    equal = shape == copied and all(
        torch.equal(*(files.rows(name, chunk.first, chunk.end).float() for name in (embedding, HEAD_WEIGHT)))
        for chunk in chunks_of(embedding, Parameter(shape, torch.float32), CHUNK_BYTES)
    )
    if not equal:
        yield f"{HEAD_WEIGHT} is not equal to {embedding}, though the model ties them"


def mismatch(job: ImportJob, problems: Sequence[str]) -> UsageError:
    name = f"{job.model.model} {job.model.size}"
    return UsageError(f"the files do not match the weights of {name}:{itemized(problems)}", where=job.source)


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
