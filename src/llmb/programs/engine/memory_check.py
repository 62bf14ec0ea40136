# SPDX-License-Identifier: Apache-2.0
"""Whether a run fits its GPUs, before it starts or is queued: by the estimate and, if that is close, by the account."""

from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from importlib.util import find_spec

from llmb.errors import EnvironmentProblem, RunFailed, UsageError
from llmb.predict.memory import clearly_fits, estimate, estimate_here
from llmb.predict.search import remedies
from llmb.processes.families import run_talking
from llmb.runs.plan import EnginePlan, Plan
from llmb.runs.rank_account import GIB, PROGRAM, SURE_MARGIN_GIB, AccountJob, MemoryUse, RankAccount, countable
from llmb.scratch import scratch_folder

VARIABLES = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
"""Nothing is computed, on no device."""


def check_memory(plan: Plan, say: Callable[[str], None], *, force: bool) -> None:
    """Returns at once if the estimate says that the run fits.

    Raises UsageError if its tensors alone, as the account counts them, are more than a GPU has, unless ``force``.
    """
    if (use := estimated(plan)) is None or clearly_fits(use):
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
        changes = [f"{each.options} needs about {each.needed_gib:.1f}" for each in remedies(plan)]
        do = f"{'; '.join([*changes, 'or more GPUs'])}; --force goes on all the same"
        raise UsageError(f"the run does not fit: {memory_text(exact)}", do=do)
    say(memory_text(exact) if exact.fits else f"warning: {memory_text(exact)}: it may not fit")


def estimated(plan: Plan) -> MemoryUse | None:
    """``estimate_here`` of the rank that runs alone, if one does."""
    use, rank = estimate_here(plan), plan.recipe.pretended_rank
    if use is None or rank is None:
        return use
    assert isinstance(plan, EnginePlan)
    return estimate(plan, [rank])


def count_ranks(plan: EnginePlan, ranks: Sequence[int], say: Callable[[str], None]) -> MemoryUse:
    """What each of some ranks takes. Raises EnvironmentProblem without torch, and RunFailed."""
    if find_spec("torch") is None:
        raise EnvironmentProblem(
            "the engine counts its memory with torch, which this Python does not have", do="pip install 'llmb[engine]'"
        )
    counted, assumptions = countable(plan)
    found = []
    for number in ranks:
        say(f"counting rank {number} of {plan.recipe.layout.gpus}")
        found.append(count_rank(AccountJob(plan=counted, rank=number)))
    # What is kept for the backward pass is decided by torch's compiler.
    compiler = f"torch {version('torch')} trains it; another version may keep other tensors"
    assumptions = (*assumptions, compiler)
    return MemoryUse(capacity_gib=plan.recipe.gpu_memory_gb, assumptions=assumptions, ranks=tuple(found))


def count_rank(job: AccountJob) -> RankAccount:
    with scratch_folder("llmb-memory-") as folder:
        path = folder / "job.json"
        path.write_text(job.model_dump_json())
        lines: list[bytes] = []
        ended = run_talking(("-P", "-m", PROGRAM, str(path)), VARIABLES, lines.append, "nothing was counted")
    if ended.code or not lines:
        raise ended.failure(f"the program that counts rank {job.rank}")
    return RankAccount.model_validate_json(lines[-1])


def memory_text(use: MemoryUse) -> str:
    """What the fullest rank needs, as a part of a sentence."""
    fullest = use.fullest
    about = "about " if use.method == "estimate" else ""
    return (
        f"rank {fullest.rank} needs {about}{use.needed_gib:.1f} of {use.capacity_gib:g} GiB on stage {fullest.pp_stage}"
    )


def memory_warnings(plan: Plan) -> Iterator[str]:
    """By the estimate alone, for many plans at a time."""
    use = estimated(plan)
    if use is not None and not use.fits:
        yield f"{plan.recipe.title()} may not fit: {memory_text(use)}; 'llmb memory' counts it"
