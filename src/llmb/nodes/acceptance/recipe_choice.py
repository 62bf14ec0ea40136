# SPDX-License-Identifier: Apache-2.0
"""Chooses the recipes that an acceptance trains on the available GPUs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from llmb.base.errors import UsageError
from llmb.catalogue.catalogue import Catalogue
from llmb.catalogue.records import Recipe
from llmb.catalogue.resolve import CPU, Request, gpu_types_of, listed_scales, releases_of, resolve, sizes_of
from llmb.prediction.prediction import LLMB, predicted_step
from llmb.runs.choices import Choices
from llmb.runs.plan import make_plan
from llmb.verdict.expectations_file import AcceptanceSet

TINY = ("pretrain_llama3.1", "tiny")
PROXY = ("pretrain_llama3.1", "8b")
DTYPES = ("bf16", "fp8")
PRETRAINING = "pretrain_"
"""Prefix of pretraining workloads, which do not need prepared data and weights, unlike fine-tuning."""
START_S, TINY_S = 90.0, 15.0
"""Estimated seconds from the start of a run to its first step, and seconds of a whole run of a tiny model."""


@dataclass(frozen=True, slots=True)
class ChosenRecipe:
    """A model at a scale in one or more dtypes. If a value is empty or None, ``llmb run`` uses its default."""

    workload: str
    size: str
    dtypes: tuple[str, ...] = ()
    scale: int | None = None
    gpu_type: str | None = None
    has_figure: bool = False
    run_s: float = TINY_S
    """The expected total seconds for one run in each dtype."""

    def arguments(self) -> list[str]:
        words = ["-w", self.workload, "-s", self.size]
        words += ["--dtype", ",".join(self.dtypes)] if self.dtypes else []
        words += ["--scale", str(self.scale)] if self.scale else []
        return words + (["--gpu-type", self.gpu_type] if self.gpu_type else [])


def choose_recipes(
    catalogue: Catalogue, wanted: Request | None, accepted: AcceptanceSet | None, gpu_type: str | None, gpus: int
) -> list[ChosenRecipe]:
    """Return the recipes of the acceptance set, or else the ``wanted`` recipe. With neither, return a tiny model for a
    CPU or an unknown GPU, or else the recipe with the largest published scale up to ``gpus``, or a proxy on one GPU.

    Raises UsageError if a recipe does not exist or needs more GPUs, or if the set is for another GPU type.
    """
    if accepted:
        return list(_of_set(catalogue, accepted, gpu_type, gpus))
    if wanted:
        scale = wanted.scale or (gpus if gpu_type else None)
        if scale and scale > gpus:
            what = f"--scale is {scale}, but the number of available {'cores' if gpu_type == CPU else 'GPUs'} is {gpus}"
            raise UsageError(what, do="pass a smaller --scale")
        request = replace(wanted, gpu_type=gpu_type or wanted.gpu_type, scale=scale)
        return [_chosen(catalogue, request, [wanted.dtype] if wanted.dtype else [])]
    if gpu_type in (None, CPU):
        return [ChosenRecipe(*TINY, scale=1 << min(gpus, 8).bit_length() - 1 if gpu_type is None and gpus else None)]
    whole = [_chosen(catalogue, request, DTYPES) for request in _whole_models(catalogue, str(gpu_type), gpus)]
    if not whole:
        return [_chosen(catalogue, Request(workload=PROXY[0], size=PROXY[1], scale=1, gpu_type=gpu_type), DTYPES)]
    return [max(whole, key=lambda one: (one.scale or 0, one.has_figure, -one.run_s))]


def _whole_models(catalogue: Catalogue, gpu_type: str, gpus: int) -> Iterator[Request]:
    for name, workload in catalogue.workloads.items():
        for size in sizes_of(workload) if name.startswith(PRETRAINING) else ():
            request = Request(workload=name, size=size, gpu_type=gpu_type)
            if gpu_type not in gpu_types_of(workload, size) or not releases_of(workload, size):
                continue
            scales = listed_scales(catalogue, request).get(DTYPES[0])
            fitting = [scale for scale in scales.full if scale <= gpus] if scales else []
            if fitting and resolve(catalogue, replace(request, scale=max(fitting))).document:
                yield replace(request, scale=max(fitting))


def _of_set(catalogue: Catalogue, accepted: AcceptanceSet, gpu_type: str | None, gpus: int) -> Iterator[ChosenRecipe]:
    if gpu_type != accepted.gpu_type:
        what = f"acceptance set {accepted.name} is for {accepted.gpu_type}, but the GPU type is {gpu_type or 'unknown'}"
        raise UsageError(what, do="pass another --set, or omit it")
    most = max(recipe.scale for recipe in accepted.recipes)
    if most > gpus:
        what = f"acceptance set {accepted.name} requires {most} GPUs, but the number of available GPUs is {gpus}"
        raise UsageError(what, do="pass another --set, or omit it")
    for key in dict.fromkeys((one.workload, one.size, one.scale) for one in accepted.recipes):
        dtypes = [one.dtype.value for one in accepted.recipes if (one.workload, one.size, one.scale) == key]
        request = Request(workload=key[0], size=key[1], scale=key[2], gpu_type=gpu_type)
        yield _chosen(catalogue, request, dtypes)


def _chosen(catalogue: Catalogue, request: Request, dtypes: Sequence[str]) -> ChosenRecipe:
    recipes = list(_resolved(catalogue, request, dtypes)) or [resolve(catalogue, request)]
    return ChosenRecipe(
        request.workload,
        request.size,
        tuple(recipe.dtype.value for recipe in recipes) if dtypes else (),
        recipes[0].scale,
        recipes[0].gpu_type,
        has_figure=any(recipe.figure for recipe in recipes),
        run_s=sum(_run_s(catalogue, recipe) for recipe in recipes),
    )


def _resolved(catalogue: Catalogue, request: Request, dtypes: Sequence[str]) -> Iterator[Recipe]:
    for dtype in dtypes:
        try:
            recipe = resolve(catalogue, replace(request, dtype=dtype))
            if recipe.peak_tflops or len(dtypes) == 1:
                yield recipe
        except UsageError:
            if len(dtypes) == 1:
                raise


def _run_s(catalogue: Catalogue, recipe: Recipe) -> float:
    if recipe.gpu_type == CPU or recipe.size == TINY[1]:
        return TINY_S
    plan = make_plan(recipe, Choices(), device="cuda")
    step = recipe.figure or predicted_step(catalogue, plan, LLMB)
    return START_S + plan.steps * (step.step_time_s if step else 0)
