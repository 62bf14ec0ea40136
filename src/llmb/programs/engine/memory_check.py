# SPDX-License-Identifier: Apache-2.0
"""Whether a run fits its GPUs, before it starts or is queued: by the estimate and, if that is close, by the account."""

from collections.abc import Callable, Iterator
from typing import Any

from llmb.errors import EnvironmentProblem, RunFailed, UsageError
from llmb.predict.memory import clearly_fits, estimate, estimate_here
from llmb.programs.engine.count_ranks import count_ranks
from llmb.runs.plan import EnginePlan, Plan
from llmb.runs.rank_account import GIB, SURE_MARGIN_GIB, MemoryUse

CHANGES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("--recompute selective", {"recompute": "selective"}),
    ("--recompute full", {"recompute": "full"}),
)


def check_memory(plan: Plan, say: Callable[[str], None], *, force: bool) -> None:
    """Returns at once if the estimate says that the run fits.

    Raises UsageError if its tensors alone, as the account counts them, are more than a GPU has, unless ``force``.
    """
    if (use := estimate_here(plan)) is None or clearly_fits(use):
        return
    assert isinstance(plan, EnginePlan)
    text = memory_text(use)
    if force:
        say(f"warning: {text}; it is not counted because of --force")
        return
    say(f"{text}; counting that rank, which takes a minute or more (--force leaves it out)")
    try:
        exact = count_ranks(plan, [use.fullest.rank], say)
    except (EnvironmentProblem, RunFailed) as error:
        say(f"warning: memory was not counted: {error.what}")
        return
    if exact.capacity_gib is not None and exact.fullest.peak_bytes / GIB + SURE_MARGIN_GIB > exact.capacity_gib:
        do = f"{'; '.join([*remedies(plan), 'more --tp, --pp or GPUs'])}; --force goes on all the same"
        raise UsageError(f"the run does not fit: {memory_text(exact)}", do=do)
    say(memory_text(exact) if exact.fits else f"warning: {memory_text(exact)}: it may not fit")


def memory_text(use: MemoryUse) -> str:
    """What the fullest rank needs, as a part of a sentence."""
    fullest = use.fullest
    about = "about " if use.method == "estimate" else ""
    return (
        f"rank {fullest.rank} needs {about}{use.needed_gib:.1f} of {use.capacity_gib:g} GiB on stage {fullest.pp_stage}"
    )


def memory_warnings(plan: Plan) -> Iterator[str]:
    """By the estimate alone, for many plans at a time."""
    use = estimate_here(plan)
    if use is not None and not use.fits:
        yield f"{plan.recipe.title()} may not fit: {memory_text(use)}; 'llmb memory' counts it"


def remedies(plan: EnginePlan) -> Iterator[str]:
    """Options with which the estimate says that the run fits."""
    sharded = plan.parallelism.model_copy(update={"dp_sharding": "full"})
    changes = (*CHANGES, ("--dp-sharding full", {"parallelism": sharded}))
    for option, change in changes:
        use = estimate(plan.model_copy(update=change))
        if use.fits:
            yield f"{option} needs about {use.needed_gib:.1f}"
