# SPDX-License-Identifier: Apache-2.0
"""What is compared: an engine, a one-GPU proxy from the catalogue, a dtype. Pure."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from benchmarks.engine.groups import Group, Variant
from benchmarks.engine.published import Target, as_published, find_target
from llmb.catalogue.catalogue import Catalogue
from llmb.catalogue.records import Dtype, Recipe
from llmb.catalogue.resolve import Request
from llmb.jobs.local_run import recipe_for
from llmb.launch.site.site import Machine

GPU_MODELS = {
    "8b": ("pretrain_llama3.1", "8b"),
    "15b": ("pretrain_nemotron4", "15b"),
    "70b": ("pretrain_llama3.1", "70b"),
    "405b": ("pretrain_llama3.1", "405b"),
    "340b": ("pretrain_nemotron4", "340b"),
    "maverick": ("finetune_llama4-maverick", "400b"),
}
TINY_MODELS = {
    "llama3.1": ("pretrain_llama3.1", "tiny"),
    "nemotron4": ("pretrain_nemotron4", "tiny"),
    "maverick": ("finetune_llama4-maverick", "tiny"),
}


@dataclass(frozen=True, slots=True)
class Subject:
    """A model in a dtype, the same for all engines. The recipe counts FLOPs as the document of ``target`` does."""

    name: str
    recipe: Recipe
    target: Target | None

    @property
    def label(self) -> str:
        return f"{self.name} {self.recipe.dtype}"


@dataclass(frozen=True, slots=True)
class Case:
    """One process: an engine trains a subject, in round ``round`` (from 0)."""

    engine: str
    subject: Subject
    round: int = 0
    group: str = ""
    variant: str | None = None
    settings: Variant = field(default_factory=Variant)

    @property
    def key(self) -> tuple[object, ...]:
        """Two groups with the same case run it once."""
        return self.engine, self.variant, self.subject.label, self.subject.recipe.layout.ga, self.round

    @property
    def name(self) -> str:
        return f"{self.engine} {self.variant}" if self.variant else self.engine

    @property
    def label(self) -> str:
        number = f", round {self.round + 1}" if self.round else ""
        return f"{self.name} {self.subject.label}, {self.subject.recipe.layout.ga} micro-batches{number}"


def find_subject(
    catalogue: Catalogue,
    name: str,
    dtype: Dtype,
    machine: Machine,
    *,
    gpu_type: str | None,
    tiny: bool,
    micro_batches: int | None,
) -> Subject:
    """``micro_batches`` per step, None for the recipe's number.

    Raises UsageError if the catalogue has no proxy of that name for the GPU type.
    """
    workload, size = (TINY_MODELS if tiny else GPU_MODELS)[name]
    request = Request(workload=workload, size=size, dtype=dtype, gpu_type=gpu_type, scale=1)
    # Sequences are one document each: not every engine packs.
    recipe = recipe_for(catalogue, request, machine).model_copy(update={"packing": None})
    if micro_batches is not None:
        layout = recipe.layout.model_copy(update={"gbs": recipe.layout.mbs * micro_batches})
        recipe = recipe.model_copy(update={"layout": layout})
    target = find_target(catalogue, workload, size, dtype)
    return Subject(name, as_published(recipe, target), target)


def plan_cases(
    groups: Sequence[Group], variants: dict[str, Variant], subject_of: Callable[[str, Dtype, int], Subject]
) -> Iterator[Case]:
    """In the order of ``groups``. ``subject_of`` gets a model's name, a dtype and the micro-batches per step."""
    for group in groups:
        settings = variants[group.variant] if group.variant else Variant()
        for model in group.models:
            for dtype in group.dtypes:
                subject = subject_of(model, dtype, group.micro_batches)
                for engine in group.engines:
                    yield Case(engine, subject, group.round, group.name, group.variant, settings)
