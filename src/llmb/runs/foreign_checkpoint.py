# SPDX-License-Identifier: Apache-2.0
"""Describes a folder that is not a checkpoint of llmb."""

from dataclasses import dataclass
from pathlib import Path

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
    """For messages. ``checkpoints`` are those of llmb nearby, which may have been meant."""

    what: str
    checkpoints: tuple[str, ...] = ()


def describe_folder(path: Path, record: str) -> Description:
    """Describes ``path``, and lists the checkpoints of llmb, which have a ``record``, in or above it."""
    if not path.is_dir():
        return Description("it is a file")
    if (path.parent / record).is_file():
        return Description("it is the inside of a checkpoint", (str(path.parent),))
    inside = [*path.glob(f"*/{record}"), *path.glob(f"checkpoints/*/{record}")]
    named = [str(found.parent.relative_to(path)) for found in inside if not found.parent.name.startswith(".")]
    if named:
        return Description("it is a folder that holds some", tuple(sorted(named, key=lambda name: (len(name), name))))
    for pattern, what in SIGNS:
        if next(path.glob(pattern), None):
            return Description(what)
    return Description("it is an empty folder" if not any(path.iterdir()) else "nothing in it looks like one")
