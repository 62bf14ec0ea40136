# SPDX-License-Identifier: Apache-2.0
"""Counts the fullest rank of every published layout, and writes docs/reference/published-layouts.md.

What was counted is kept in build/published, one file for each rank, so that an interrupted run goes on; remove the
folder after a change of the engine. Layouts that differ in the number of data-parallel replicas alone are counted at
their smallest scale, where a rank has the largest shards.
"""

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

from pydantic import ValidationError

from llmb.catalogue.catalogue import Catalogue
from llmb.catalogue.records import Layout, Recipe, Record
from llmb.catalogue.resolve import CPU, Request, resolve
from llmb.catalogue.schema import LayoutTable, WorkloadFile
from llmb.launch.programs.engine.program import count_rank
from llmb.prediction.memory import estimate
from llmb.runs.choices import Choices
from llmb.runs.plan import EnginePlan, make_plan
from llmb.runs.rank_account import GIB, MARGIN_GIB, OWNERS, AccountJob, MemoryUse, RankAccount, countable, fullest_ranks

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reference" / "published-layouts.md"
KEPT = ROOT / "build" / "published"
MEASURED = "../explanation/engine-speed.md#ranks-of-published-layouts"
HEADER = "<!-- Written by 'make published', which takes an hour; changes made here are lost. -->"


class PublishedLayout(NamedTuple):
    """Recipes of one layout, from the fewest GPUs to the most, and for each GPU type that it is for.

    plan: that of the fewest GPUs. capacity_gib: of the GPU type with the least memory.
    """

    plan: EnginePlan
    scales: tuple[int, ...]
    gpu_types: tuple[str, ...]
    capacity_gib: float
    recipes: tuple[Recipe, ...]

    @property
    def layout(self) -> Layout:
        return self.plan.recipe.layout

    @property
    def jobs(self) -> list[AccountJob]:
        """The ranks among which the fullest is."""
        plan, _ = countable(self.plan)
        return [AccountJob(plan=plan, rank=rank) for rank in fullest_ranks(self.layout)]

    @property
    def name(self) -> str:
        """Also that of its row."""
        recipe = self.plan.recipe
        layers = f" {recipe.layout.layers} layers" if recipe.proxy else ""
        return f"{recipe.workload} {recipe.size}{layers} {recipe.dtype} {'/'.join(self.gpu_types)} {self.scales[0]}"


class Counted(Record):
    """One rank in a file: what was asked for, and what it takes."""

    job: AccountJob
    account: RankAccount


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", default=[], help="count layouts whose name has this; write no page")
    parser.add_argument("--kept", action="store_true", help="count nothing; the page has only what is kept")
    parser.add_argument("--list", action="store_true", help="list the names of all layouts and count nothing")
    options = parser.parse_args()
    layouts = published_layouts(Catalogue())
    chosen = [each for each in layouts if not options.only or any(part in each.name for part in options.only)]
    if options.list:
        sys.stdout.writelines(f"{each.name}\n" for each in chosen)
        return
    if options.kept:
        chosen = [each for each in chosen if all(map(partial(kept_account, each), each.jobs))]
    accounts = count_all(chosen)
    if not options.only:
        rest = [each for each in layouts if each not in chosen]
        PAGE.write_text(page(list(zip(chosen, accounts, strict=True)), rest))


def published_layouts(catalogue: Catalogue) -> list[PublishedLayout]:
    """Every distinct layout of the catalogue that a document publishes."""
    found: dict[str, list[EnginePlan]] = {}
    for plan in (make_plan(recipe, Choices(), device="cuda") for recipe in published_recipes(catalogue)):
        found.setdefault(_same(plan), []).append(plan)
    return [_layout(catalogue, plans) for plans in found.values()]


def published_recipes(catalogue: Catalogue) -> Iterator[Recipe]:
    for workload in catalogue.workloads.values():
        for table in workload.layouts:
            if table.document in catalogue.published:  # one of the reference suite
                yield from _recipes(catalogue, workload, table)


def _recipes(catalogue: Catalogue, workload: WorkloadFile, table: LayoutTable) -> Iterator[Recipe]:
    request = partial(Request, workload=workload.workload, size=table.size, release=table.release)
    for dtype in table.dtypes:
        for gpu_type in table.gpu_types:
            for row in table.rows if gpu_type != CPU else ():
                yield resolve(catalogue, request(dtype=dtype, gpu_type=gpu_type, scale=row.gpus))


def _same(plan: EnginePlan) -> str:
    """All that decides what a rank takes but the number of replicas, and whether there are several."""
    recipe = plan.recipe
    engine = plan.model_dump_json(exclude={"recipe", "steps", "window", "checkpoint_interval"})
    sizes = recipe.layout.model_dump_json(exclude={"gpus", "gbs"})
    return f"{recipe.workload} {recipe.size} {recipe.dtype} {sizes} {recipe.layout.ga} {recipe.model} {engine}"


def _layout(catalogue: Catalogue, plans: Sequence[EnginePlan]) -> PublishedLayout:
    smallest = min(plans, key=lambda plan: plan.recipe.scale)
    gpu_types = tuple(dict.fromkeys(plan.recipe.gpu_type for plan in plans))
    return PublishedLayout(
        smallest,
        tuple(sorted({plan.recipe.scale for plan in plans})),
        gpu_types,
        min(catalogue.gpus[name].memory_gb for name in gpu_types),
        tuple(plan.recipe for plan in plans),
    )


def count_all(layouts: Sequence[PublishedLayout]) -> list[list[RankAccount]]:
    """Two ranks at a time."""
    jobs = [(each, job) for each in layouts for job in each.jobs]
    with ProcessPoolExecutor(2) as pool:
        counted = list(pool.map(count_kept, *zip(*jobs, strict=True)))
    return [[account for (of, _), account in zip(jobs, counted, strict=True) if of is layout] for layout in layouts]


def count_kept(layout: PublishedLayout, job: AccountJob) -> RankAccount:
    """From its file, or counted and kept there."""
    if kept := kept_account(layout, job):
        return kept
    sys.stderr.write(f"counting rank {job.rank} of {layout.name}\n")
    account = count_rank(job)
    path = kept_path(layout, job)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(Counted(job=job, account=account).model_dump_json())
    return account


def kept_account(layout: PublishedLayout, job: AccountJob) -> RankAccount | None:
    path = kept_path(layout, job)
    if not path.is_file():
        return None
    try:
        kept = Counted.model_validate_json(path.read_text())
    except ValidationError:
        return None  # kept before an account had all that it has now
    return kept.account if kept.job == job else None


def kept_path(layout: PublishedLayout, job: AccountJob) -> Path:
    return KEPT / f"{layout.name.replace('/', '+').replace(' ', '_')}_rank{job.rank}.json"


def page(counted: Sequence[tuple[PublishedLayout, Sequence[RankAccount]]], rest: Sequence[PublishedLayout]) -> str:
    return f"""{HEADER}

# Published layouts

For anyone who asks whether a layout of the reference suite fits: the memory of its fullest rank, as [`llmb
memory`](../explanation/memory.md) counts it. [Three such
ranks]({MEASURED}) were measured. Layouts that differ only in the number
of replicas share a row, counted for the fewest GPUs, where shards are largest. `GPU has` is nominal and, if a layout is
for several GPU types, that of the smallest.

## Memory

In GiB. `needed` adds {MARGIN_GIB:g} for everything except tensors. `estimate` is the same rank's peak according to
`llmb memory --estimate`.

{table(COLUMNS, [memory_row(*each) for each in counted])}
{uncounted(rest)}
"""


def uncounted(layouts: Sequence[PublishedLayout]) -> str:
    if not layouts:
        return ""
    uses = [estimate(each.plan) for each in layouts]
    rows = [
        [each.name, str(use.fullest.rank), f"{use.fullest.peak_bytes / GIB:.1f}", f"{each.capacity_gib:g}"]
        for each, use in zip(layouts, uses, strict=True)
    ]
    columns = ("not counted yet", "rank", "estimate", "GPU has")
    return f"\nThese have been estimated alone:\n\n{table(columns, rows)}\n"


COLUMNS = (
    *("layout", "GPUs", "TP", "PP", "VP", "CP", "EP", "rank"),
    *OWNERS,
    *("peak", "needed", "GPU has", "fits", "estimate"),
)


def memory_row(layout: PublishedLayout, accounts: Sequence[RankAccount]) -> list[str]:
    use = MemoryUse(capacity_gib=layout.capacity_gib, assumptions=(), ranks=tuple(accounts))
    fullest, sizes = use.fullest, layout.layout
    (estimated,) = estimate(layout.plan, [fullest.rank]).ranks
    scales = f"{layout.scales[0]} to {layout.scales[-1]}" if len(layout.scales) > 1 else str(layout.scales[0])
    gib = [*(fullest.bytes_by_owner[owner] / GIB for owner in OWNERS), fullest.peak_bytes / GIB, use.needed_gib]
    return [
        layout.name,
        scales,
        *map(str, (sizes.tp, sizes.pp, sizes.vp, sizes.cp, sizes.ep, fullest.rank)),
        *(f"{each:.1f}" for each in gib),
        f"{layout.capacity_gib:g}",
        "yes" if use.fits else "no",
        f"{estimated.peak_bytes / GIB:.1f}",
    ]


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [" | ".join(columns), " | ".join("---" for _ in columns), *(" | ".join(row) for row in rows)]
    return "\n".join(f"| {line} |" for line in lines)


if __name__ == "__main__":
    main()
