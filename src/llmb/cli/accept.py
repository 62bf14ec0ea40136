# SPDX-License-Identifier: Apache-2.0
"""``llmb accept``: checks whether a machine, or each of several nodes, is as fast as it should be."""

import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from llmb.base.errors import EnvironmentProblem, NoVerdict, Regressed, RunFailed, UsageError, check_installed
from llmb.base.options import build, options_of
from llmb.base.shown_text import counted
from llmb.catalogue.catalogue import Catalogue
from llmb.catalogue.records import gpu_type_of
from llmb.catalogue.resolve import CPU, Request
from llmb.cli.common import Json, Junit
from llmb.cli.root import install_here, say, write_named
from llmb.cli.shared_options import selection_options, takes
from llmb.jobs.find_runs import find_all_runs
from llmb.jobs.judge_runs import Against
from llmb.launch.scheduler_lookup import read_cluster_site, read_job_options, scheduler_of
from llmb.launch.site.site import QUERY, this_machine
from llmb.launch.started_ranks import started_rank
from llmb.nodes.acceptance.acceptance import (
    AcceptanceRequest,
    AcceptedNodes,
    Choose,
    Terms,
    acceptance_key,
    do_parts,
    open_acceptance,
)
from llmb.nodes.acceptance.acceptance import accept as accept_place
from llmb.nodes.acceptance.parts import AcceptanceResult, PartsFolder
from llmb.nodes.acceptance.recipe_choice import ChosenRecipe, choose_recipes
from llmb.nodes.bench.bench_job import job_nodes
from llmb.nodes.doctor.rules import parse_checks
from llmb.readers.samples.host import host_name
from llmb.reports.accept_report import accept_cases, accept_table, planned_table
from llmb.reports.junit import write_junit
from llmb.reports.output import print_output
from llmb.runs.record import now
from llmb.verdict.expectations_file import acceptance_sets, find_acceptance_set

app = typer.Typer(add_completion=False, rich_markup_mode="markdown")
ASK_S = 60.0
MINUTES, MINUTES_ON_CPU, MOST_MINUTES = 30.0, 5.0, 10_000
CHOSEN, RECIPE_FLAGS = ("workload", "size", "dtype", "scale"), "-w, -s, --dtype and --scale"
RECIPE = selection_options([options_of(Request)[name] for name in CHOSEN])
_nodes = partial(typer.Option, rich_help_panel="Nodes of a cluster")


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """Options for nodes of a cluster, which are checked instead of this machine."""

    nodes: Annotated[
        int | None, _nodes("-N", "--nodes", min=1, help="Number of usable nodes to check, instead of this machine.")
    ] = None
    partition: Annotated[str | None, _nodes("-p", "--partition", help="Partition. Default: from the settings.")] = None
    account: Annotated[str | None, _nodes("-A", "--account", help="Slurm account. Default: from the settings.")] = None

    @property
    def words(self) -> tuple[str, ...]:
        chosen = {"--partition": self.partition, "--account": self.account}
        return tuple(word for flag, value in chosen.items() if value is not None for word in (flag, value))


@dataclass(frozen=True, slots=True)
class Duration:
    """Options of an acceptance, such as its duration and its checks."""

    minutes: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=MOST_MINUTES,
            help="Repeat runs on this machine only until all parts have taken this many minutes; no effect with"
            " --nodes. Default: 30; 5 on a CPU.",
        ),
    ] = None
    set_name: Annotated[
        str | None,
        typer.Option(
            "--set", metavar="SET", help=f"Train and judge the recipes of this set: {', '.join(acceptance_sets())}."
        ),
    ] = None
    checks: Annotated[
        str | None, typer.Option(metavar="NAME,...", help="Checks or areas to run, as in 'llmb doctor --only'.")
    ] = None
    start_new: Annotated[
        bool, typer.Option("--new", help="Start again instead of resuming an interrupted acceptance.")
    ] = False
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the parts and their durations; run nothing.")] = False


@app.command()
@takes(RECIPE, ClusterOptions, Duration)
def accept(
    chosen: dict[str, Any], cluster: ClusterOptions, duration: Duration, junit: Junit = None, json: Json = False
) -> None:
    """Check whether this machine, or each of several nodes, is as fast as it should be: all checks in one command.

    The command checks the node, measures its parts, and trains a recipe that fits its GPUs in bf16 and fp8 (a tiny
    recipe on a CPU or GPUs of an unknown type). The step time is compared with the published figure, or else the
    prediction, and with the previous acceptance. With --nodes, each node of a cluster is tested alone, then nodes in
    pairs; the fit nodes then train together. The result is a sentence, a table, a page, and an archive to send.
    The same command resumes an interrupted acceptance.

    Exit codes: 0 as fast as it should be, 4 a check fails or a device is slow, 5 slower, 6 not settled, or there is
    nothing to compare with.

    Examples:

    - `llmb accept`

    - `llmb accept --dry-run`

    - `llmb accept --minutes 60 --junit acceptance.xml`

    - `llmb accept -w pretrain_nemotron4 -s 15b --scale 16 --nodes 2 --partition batch`

    - `llmb accept --set h100-node`
    """
    place, choose, terms = _asked(chosen, cluster, duration)
    if duration.dry_run:
        _print_planned(place, choose, terms, json=json)
        return
    result = accepted(place, choose, terms, _relay)
    write_junit(junit, "accept", lambda: accept_cases(result))
    print_output(result.model_dump(mode="json") if json else accept_table(result))
    raise_unless_accepted(result)


def _asked(chosen: dict[str, Any], cluster: ClusterOptions, duration: Duration) -> tuple[AcceptedNodes, Choose, Terms]:
    catalogue, install = Catalogue(), install_here()
    one_set = find_acceptance_set(duration.set_name) if duration.set_name else None
    if one_set and any(chosen.values()):
        raise UsageError("--set selects its own recipes", do=f"omit {RECIPE_FLAGS}, or omit --set")
    if started_rank(os.environ):
        raise UsageError("RANK and WORLD_SIZE are set, but an acceptance starts its own ranks", do="unset both")
    parse_checks([duration.checks or ""])
    if not cluster.nodes and (flags := " and ".join(cluster.words[::2])):
        raise UsageError(f"{flags} cannot be used without --nodes", do=f"add --nodes N, or omit {flags}")
    place = _nodes_of_cluster(catalogue, install, cluster) if cluster.nodes else _this_machine(catalogue)
    wanted = _wanted(chosen)

    def choose(gpus: int) -> list[ChosenRecipe]:
        return choose_recipes(catalogue, wanted, one_set, place.gpu_type, gpus)

    minutes = duration.minutes if duration.minutes is not None else _minutes(place)
    terms = Terms(minutes=minutes, set_name=duration.set_name, checks=duration.checks, start_new=duration.start_new)
    return place, choose, terms


def _relay(line: str) -> None:
    sys.stderr.write(f"{line}\n")


def _wanted(chosen: dict[str, Any]) -> Request | None:
    if not any(chosen.values()):
        return None
    if not (chosen["workload"] and chosen["size"]):
        raise UsageError("a recipe requires a workload and a size", do=f"pass -w and -s, or omit {RECIPE_FLAGS}")
    return build(Request, chosen)


def _minutes(place: AcceptedNodes) -> float:
    return MINUTES_ON_CPU if place.gpu_type == CPU and not place.nodes else MINUTES


def _this_machine(catalogue: Catalogue) -> AcceptedNodes:
    machine = this_machine()
    names, host = machine.gpu_names, host_name()
    if not names and shutil.which(QUERY[0]) and "CUDA_VISIBLE_DEVICES" not in os.environ:
        what = f"{QUERY[0]} is installed but shows no GPU"
        raise EnvironmentProblem(what, do="run 'llmb doctor', or set CUDA_VISIBLE_DEVICES=-1 to test only the CPU")
    if not names:
        return AcceptedNodes(
            subject=f"{host} ({machine.cores} CPU cores)", host=host, gpu_type=CPU, per_node=machine.cores
        )
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    visible = tuple(listed.split(","))[: len(names)] if listed else tuple(map(str, range(len(names))))
    gpu_type = gpu_type_of(names[0], catalogue.gpus.values())
    subject = f"{host} ({len(names)} x {names[0]})"
    return AcceptedNodes(subject=subject, host=host, gpu_type=gpu_type, per_node=len(names), visible=visible)


def _nodes_of_cluster(catalogue: Catalogue, install: Path, cluster: ClusterOptions) -> AcceptedNodes:
    site = read_cluster_site(catalogue, install, os.environ)
    scheduler = scheduler_of(site)
    given = {"partition": cluster.partition, "account": cluster.account, "nodes": cluster.nodes}
    options = read_job_options(site, given, os.environ, sys.executable)
    nodes = job_nodes(catalogue, site, options, "auto", None)
    states = scheduler.nodes(None, scheduler.defaults(site, options).partition, ASK_S)
    usable = [name for name, state in states.items() if state.usable]
    if len(usable) < (wanted := cluster.nodes or 0):
        problems = "; ".join(f"{name}: {state.problem}" for name, state in states.items() if not state.usable)
        what = f"--nodes is {wanted}, but only {len(usable)} of {len(states)} nodes can be used"
        do = f"pass --nodes {len(usable)}, or another --partition" if usable else "try again when nodes are available"
        raise UsageError(f"{what}: {problems}" if problems else what, do=do)
    per_node = nodes.placement.processes_per_node
    return AcceptedNodes(
        subject=f"{wanted} nodes of {per_node} x {nodes.gpu_type}",
        host=str(site.install),
        gpu_type=nodes.gpu_type,
        per_node=per_node,
        nodes=tuple(usable[:wanted]),
        scheduler_words=cluster.words,
    )


def _print_planned(place: AcceptedNodes, choose: Choose, terms: Terms, *, json: bool) -> None:
    parts = PartsFolder(None, install_here(), sys.stderr.write, say)
    request = AcceptanceRequest(started_at=now(), label="accept-TIME", key="", nodes=place.nodes)
    do_parts(parts, request, place, choose, terms)
    if json:
        rows = [{"name": one.name, "command": one.command, "seconds": one.seconds} for one in parts.planned]
        print_output({"subject": place.subject, "minutes": terms.minutes, "parts": rows})
    else:
        print_output(planned_table(parts.planned, 0 if place.nodes else terms.minutes))


def accepted(place: AcceptedNodes, choose: Choose, terms: Terms, on_message: Callable[[str], None]) -> AcceptanceResult:
    """Run the remaining parts of an acceptance, and write its files."""
    check_installed("the page", "jinja2", "matplotlib", extra="report")  # now, not after all parts
    install = install_here()
    key = acceptance_key(place, choose(place.gpus), terms)
    folder, request = open_acceptance(install, key, place.nodes, start_new=terms.start_new)
    if done := len(list(folder.glob("*.json"))) - 1:
        on_message(f"resuming {folder.name}, which has the results of {counted(done, 'part')}; --new starts again")
    parts = PartsFolder(folder, install, lambda line: on_message(line.rstrip("\n")), on_message)
    return accept_place(parts, request, place, choose, terms, partial(_write_page, install))


def _write_page(install: Path, result: AcceptanceResult, labels: Sequence[str]) -> None:
    from llmb.reports.page.contents import gather  # takes longer to load than the help of every command may take
    from llmb.reports.page.render import page_html, public_text

    found = find_all_runs(labels, install, say)
    if result.page and found.runs:
        contents = replace(gather(found, Against(), install, say), acceptance=accept_table(result))
        write_named(Path(result.page), page_html(contents, public_text(found.runs, install)), "LLMB_INSTALL")


def accept_with(
    on_message: Callable[[str], None], minutes: float | None, nodes: int | None, checks: str | None, *, start_new: bool
) -> AcceptanceResult:
    """Run an acceptance from Python; raise the command's errors, except errors for a verdict."""
    duration = Duration(minutes=minutes, checks=checks, start_new=start_new)
    return accepted(*_asked(dict.fromkeys(CHOSEN), ClusterOptions(nodes=nodes), duration), on_message)


def raise_unless_accepted(result: AcceptanceResult) -> None:
    """Raise the error with the exit code of the verdict, unless the nodes are accepted."""
    errors = {"fail": RunFailed, "regressed": Regressed, "inconclusive": NoVerdict}
    if result.verdict in errors:
        raise errors[result.verdict](result.verdict)
