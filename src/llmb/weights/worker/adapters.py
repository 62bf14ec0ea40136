# SPDX-License-Identifier: Apache-2.0
"""Exchanges adapters with peft: as files that it reads, and from those that it wrote."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint.state_dict_saver import save

from llmb.catalogue.records import Lora
from llmb.checkpoints.checkpoint import WEIGHTS
from llmb.checkpoints.conversion import (
    AdapterExportJob,
    AdapterImportJob,
    ImportedWeights,
)
from llmb.engine.checkpoint.state import MODEL
from llmb.engine.checkpoint.writer import Writer
from llmb.errors import UsageError, itemized
from llmb.huggingface.adapter import (
    ADAPTER_CONFIG,
    ADAPTER_FILE,
    adapted_layers,
    adapter_config,
    adapter_shapes,
    own_names,
    peft_layers,
    peft_tensor,
    targets_of,
)
from llmb.huggingface.formats import format_of
from llmb.huggingface.tensors import Shape
from llmb.runs.folder import write_atomically
from llmb.weights.worker.safetensors_files import not_finite
from llmb.weights.worker.weights_export import LowRank, read_adapters, write_file
from llmb.weights.worker.weights_import import parameter_shapes


def export_adapters(job: AdapterExportJob) -> None:
    """Writes ``adapter_config.json`` and the safetensors file that peft reads to the job's folder."""
    folder, shapes = Path(job.folder), parameter_shapes(job.model)
    found = read_adapters(Path(job.checkpoint), shapes, job.lora)
    if spoiled := next((layer for layer, part in found.items() if any(map(not_finite, part))), None):
        raise UsageError(f"the adapter of {spoiled} has values that are not finite", where=job.checkpoint)
    names = peft_layers(found, format_of(job.model))
    # A shared A is written for each of its layers: a safetensors file has no references.
    tensors = {
        peft_tensor(names[layer], matrix): values.clone()
        for layer, adapter in found.items()
        for matrix, values in zip("AB", adapter, strict=True)
    }
    write_file(folder / ADAPTER_FILE, tensors)
    config = adapter_config(job.lora, job.model, job.base)
    write_atomically(folder / ADAPTER_CONFIG, json.dumps(config, indent=2) + "\n")


def import_adapters(job: AdapterImportJob) -> ImportedWeights:
    """Writes the checkpoint's ``weights`` from peft's file; the targets follow from the layers that it holds.

    Raises UsageError if it does not hold adapters of rank ``job.rank`` for one kind of targets in all blocks.
    """
    path, shapes = Path(job.source) / ADAPTER_FILE, parameter_shapes(job.model)
    try:
        stored = load_file(path)
    except (SafetensorError, OSError) as error:
        raise UsageError(f"{path.name} is not a complete safetensors file: {error}", where=str(path)) from error
    lora, adapters = read_peft(stored, shapes, job)
    state: dict[str, Tensor] = {}
    for layer, adapter in adapters.items():
        for matrix, name in own_names(layer, lora).items():
            state[MODEL + name] = adapter.a if matrix == "A" else adapter.b
    writer = Writer(Path(job.folder) / WEIGHTS)
    save(state, storage_writer=writer, no_dist=True)
    return ImportedWeights(checksums=writer.checksums, dtypes=("fp32",), lora=lora)


def read_peft(
    stored: Mapping[str, Tensor], shapes: Mapping[str, Shape], job: AdapterImportJob
) -> tuple[Lora, dict[str, LowRank]]:
    """The adapters among peft's tensors, fp32, and what they are. Raises UsageError."""
    names = peft_layers(adapted_layers(shapes, "all-linear"), format_of(job.model))
    ours = {theirs: layer for layer, theirs in names.items()}
    found: dict[str, dict[str, Tensor]] = {}
    for name, values in stored.items():
        theirs, _, matrix = name.removesuffix(".weight").rpartition(".lora_")
        if theirs not in ours or matrix not in ("A", "B"):
            raise UsageError(f"{name} is not an adapter of a layer of {job.model.model} {job.model.size}")
        found.setdefault(ours[theirs], {})[matrix] = values.float()
    if problems := list(shape_problems(found, shapes, job.rank)):
        raise UsageError(
            f"the adapters do not fit {job.model.model} {job.model.size}:{itemized(problems)}", where=job.source
        )
    adapters = {layer: LowRank(parts["A"], parts["B"]) for layer, parts in sorted(found.items())}
    targets = targets_of({layer.rpartition(".")[2] for layer in found}, shared=has_shared_inputs(adapters))
    if targets is None or set(adapted_layers(shapes, targets)) != set(found):
        kinds = ", ".join(sorted({layer.rpartition(".")[2] for layer in found}))
        raise UsageError(
            f"these are adapters of {kinds}, in {len(found)} layers; supported are those of q_proj and v_proj, "
            "also with k_proj, also with o_proj, or of all linear layers, in every block",
            where=job.source,
        )
    return Lora(rank=job.rank, alpha=job.alpha, dropout=job.dropout, targets=targets), adapters


def shape_problems(found: Mapping[str, Mapping[str, Tensor]], shapes: Mapping[str, Shape], rank: int) -> Iterator[str]:
    for layer, parts in found.items():
        for matrix, shape in adapter_shapes(shapes[f"{layer}.weight"], rank).items():
            if matrix not in parts:
                yield f"{layer} has no lora_{matrix}"
            elif tuple(parts[matrix].shape) != shape:
                yield f"lora_{matrix} of {layer} has the shape {list(parts[matrix].shape)}, not {list(shape)}"
            elif not_finite(parts[matrix]):
                yield f"lora_{matrix} of {layer} has values that are not finite"


def has_shared_inputs(adapters: Mapping[str, LowRank]) -> bool:
    """Whether the adapters of each block have equal A, as those of a fused projection do."""
    first: dict[str, Tensor] = {}
    return all(
        torch.equal(first.setdefault(layer.rpartition(".")[0], adapter.a), adapter.a)
        for layer, adapter in adapters.items()
    )
