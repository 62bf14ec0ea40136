# SPDX-License-Identifier: Apache-2.0
"""The scales at which the documents save and load checkpoints, and runs at others. Pure."""

from collections.abc import Iterator

from llmb.runs.plan import Plan


def scale_warnings(plan: Plan, *, loads: bool | None = None) -> Iterator[str]:
    """``loads`` is given for a plan of a program whose checkpoints llmb does not read."""
    published, scale = plan.recipe.checkpoint, plan.recipe.scale
    if published is None:
        return
    where = f"{published.source} line {published.line}"
    if plan.save_checkpoint and published.save_scales:
        least, most = published.save_scales
        if not least <= scale <= most:
            yield f"checkpoints are published as saved by {least} to {most} GPUs, not by {scale} ({where})"
    resumes = plan.start is not None if loads is None else loads
    smallest = published.min_load_scale
    if resumes and smallest and scale < smallest:
        yield f"checkpoints are published as loaded by {smallest} GPUs or more, not by {scale} ({where})"
