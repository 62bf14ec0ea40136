# SPDX-License-Identifier: Apache-2.0
"""``llmb submit``, ``llmb bulk`` and ``llmb launch``: queue jobs, or run a campaign here without a scheduler."""

import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from llmb.base.errors import UsageError, itemized
from llmb.base.options import options_of
from llmb.base.shown_text import counted, listed
from llmb.catalogue.catalogue import Catalogue
from llmb.catalogue.model_name import split_model
from llmb.catalogue.resolve import find_workload
from llmb.cli.common import DryRun, Force, Json, Junit, Yes
from llmb.cli.progress import JobProgress
from llmb.cli.root import agree, can_ask, context_here, install_here, say, warn
from llmb.cli.run import run_or_print
from llmb.cli.runs import print_result
from llmb.cli.shared_options import excluded_here, flags_of, selection_options, takes, value_options, with_excluded
from llmb.jobs.campaigns.campaign import Campaign, CampaignJob, total_gpu_hours
from llmb.jobs.campaigns.campaign_files import read_campaign_file
from llmb.jobs.campaigns.expansion import MOST_RECIPES, Entry, Selection, campaign_keys
from llmb.jobs.campaigns.here import campaign_here, is_local
from llmb.jobs.campaigns.proposal import (
    CampaignContext,
    Proposal,
    RequestedJobs,
    SubmissionOutcome,
    from_command_line,
    job_options,
    job_request,
    propose,
    queue,
    queue_one,
    selection_of,
    single_model,
)
from llmb.jobs.wait import Watch, wait_for_one
from llmb.launch.documents.variables import documented_variables, near_misses, read_launch
from llmb.launch.programs.conclude import read_ended_run
from llmb.launch.programs.engine.program import check_memory, memory_warnings
from llmb.launch.scheduler_lookup import read_cluster_site
from llmb.nodes.doctor.checked_nodes import OPTION
from llmb.reports.formats import number
from llmb.reports.jobs_report import (
    campaign_document,
    campaign_table,
    flags_text,
    queued_document,
    script_document,
    submit_text,
)
from llmb.reports.junit import campaign_cases, write_junit
from llmb.reports.output import print_output
from llmb.reports.plan_report import start_lines
from llmb.runs.folder import RunFolder
from llmb.runs.plan import scale_warnings
from llmb.runs.record import LOCAL

REPEATS = replace(options_of(Entry)["repeats"], annotation=int | None, default=None)
"""Without this option, the repeats in the file apply, or 1 without a file."""
_SELECTION = (*options_of(Selection).values(), REPEATS)
SELECTION = value_options(_SELECTION)
"""The options that select recipes, and the number of repeats."""
NAMED_SELECTION = selection_options(_SELECTION)
"""``SELECTION`` with workload and size that may also be positional."""
JOB = value_options([option for name, option in job_options().items() if name not in options_of(Selection)])
"""The options of one job, except the options that name its recipe."""


@dataclass(frozen=True, slots=True)
class Queueing:
    """Confirmation and output options of a command that queues jobs."""

    dry_run: DryRun = False
    yes: Yes = False
    json: Json = False


@dataclass(frozen=True, slots=True)
class Again:
    """Options that decide whether an earlier campaign is resumed."""

    resume: Annotated[
        bool, typer.Option("--resume", help="On a cluster, resume the newest unfinished campaign from the same source.")
    ] = False
    start_new: Annotated[bool, typer.Option("--new", help="Queue or run all jobs again, in a new campaign.")] = False


@dataclass(frozen=True, slots=True)
class OneJob:
    """Options that apply only if a single job is queued."""

    wait: Annotated[bool, typer.Option("--wait", help="Follow the job to its end, and print the result.")] = False
    force: Force = False


def run_campaign(
    context: CampaignContext, requested: RequestedJobs, queueing: Queueing, again: Again, junit: Path | None = None
) -> None:
    """Show a campaign and, unless it is a dry run, ask for confirmation and queue its jobs."""
    proposal = propose(context, requested, resume=again.resume, start_new=again.start_new)
    say(*_left_open(context, requested, proposal), *_without_figure(proposal))
    if proposal.left_out:
        sys.stderr.write(f"left out:{itemized(proposal.left_out)}\n")
    warn(job.order.missing.warning for job in proposal.jobs if job.order.missing)
    orders = [job.order for job in proposal.jobs]
    warn(line for order in orders for line in order.scheduler.warnings(order.sample()))
    warn(line for order in orders for line in memory_warnings(order.plan))
    if queueing.dry_run:
        write_junit(junit, "bulk", lambda: campaign_cases(proposal.campaign, proposal.left_out))
        if proposal.queued:
            say(f"{_queued_before(proposal.queued)}; --new queues them again")
        _print(proposal.campaign, proposal, json=queueing.json)
        return
    if proposal.queued:
        do = f"add --new to queue them again; 'llmb jobs list --campaign {proposal.queued.campaign}' shows them"
        raise UsageError(_queued_before(proposal.queued), do=do)
    _confirm_campaign(proposal, yes=queueing.yes)
    outcome = queue(context, proposal, say, _show_job, start_new=again.start_new)
    write_junit(junit, "bulk", lambda: campaign_cases(outcome.campaign, proposal.left_out))
    if queueing.json:
        _print(outcome.campaign, proposal, json=True)
    campaign = outcome.campaign
    left_out = len(proposal.left_out)
    refused = sum(job.state == "refused" for job in campaign.jobs)
    counts = [f"{sum(job.state == 'submitted' for job in campaign.jobs)} of {len(campaign.jobs)} jobs are queued"]
    counts += [f"{refused} rejected"] if refused else []
    counts += [f"recipes were skipped for {counted(left_out, 'reason')}"] if left_out else []
    say(f"campaign {campaign.campaign}: {', '.join(counts)}")
    _raise_refusals(outcome)


def _queued_before(campaign: Campaign) -> str:
    return f"all {len(campaign.jobs)} jobs were already queued by campaign {campaign.campaign} of {campaign.created_at}"


def _left_open(context: CampaignContext, requested: RequestedJobs, proposal: Proposal) -> list[str]:
    """Return a line with the defaults for values that neither request nor cluster settings specify, or no line."""
    found = {choice.name: choice.text() for job in proposal.jobs for choice in job.recipe.unspecified}
    if context.gpu_type(requested.values) is None and not all(entry.selection.gpu_type for entry in requested.entries):
        types = ", ".join(dict.fromkeys(job.recipe.gpu_type for job in proposal.jobs))
        found["GPU type"] = f"GPU type {types} (--gpu-type, or gpu_type in cluster_config.yaml, selects another)"
    return [f"not specified: {'; '.join(found.values())}"] if found else []


def _without_figure(proposal: Proposal) -> Iterator[str]:
    without = [recipe for job in proposal.jobs if not (recipe := job.recipe).figure]
    if without:
        of = f"{len(without)} of {len(proposal.jobs)} jobs"
        texts = (f"{one.workload} {one.size} {one.dtype.value} on {one.scale} {one.gpu_type}" for one in without)
        named = listed(dict.fromkeys(texts), MOST_RECIPES)
        do = "judge them with 'llmb judge LABEL --against BASELINE' or 'llmb judge LABEL --expect FILE'"
        yield f"without a published figure: {of} ({named}); {do}"


def _print(campaign: Campaign, proposal: Proposal, *, json: bool) -> None:
    print_output(campaign_document(campaign, proposal.jobs) if json else campaign_table(proposal.jobs))


def _confirm_campaign(proposal: Proposal, *, yes: bool) -> None:
    name, remaining, count = proposal.campaign.campaign, proposal.remaining, len(proposal.jobs)
    if proposal.resumed:
        sys.stderr.write(f"campaign {name} is resumed: {count - len(remaining)} of {count} are queued\n")
    what = f"{counted(len(remaining), 'job')}, {number(total_gpu_hours(remaining))} GPU-hours at most"
    if yes:
        sys.stderr.write(f"campaign {name}: {what}\n")
        return
    if can_ask():
        print_output(campaign_table(remaining))
    agree(f"Queue {what}?", default=False, do="add --yes, or --dry-run to see the jobs")


def _raise_refusals(outcome: SubmissionOutcome) -> None:
    if outcome.refusals:
        jobs = outcome.campaign.jobs
        refused = sum(job.state == "refused" for job in jobs)
        reasons = itemized(error.what for error in outcome.refusals)
        do = "correct the cause and repeat the command unchanged, without --new: it submits only these jobs"
        raise UsageError(f"{refused} of {len(jobs)} jobs could not be queued:{reasons}", do=do)


def _show_job(campaign: Campaign, job: CampaignJob) -> None:
    count = len(campaign.jobs)
    number = int(job.key.rpartition("-")[2])
    what = f"job {job.job_id}  {job.folder}" if job.state == "submitted" else f"rejected: {job.reason}"
    sys.stderr.write(f"{number:>{len(str(count))}}/{count}  {what}\n")


app = typer.Typer(add_completion=False, rich_markup_mode="markdown")
COMMAND_LINE = "the command line"


@app.command()
@takes(NAMED_SELECTION, JOB, Queueing, OneJob, Again)
def submit(
    selecting: dict[str, Any],
    values: dict[str, Any],
    queueing: Queueing,
    one: OneJob,
    again: Again,
    ctx: typer.Context,
    file: Annotated[
        Path | None,
        typer.Option("-f", "--file", metavar="FILE", help="Queue the jobs of this file, like `llmb bulk FILE`."),
    ] = None,
) -> None:
    """Queue runs on a cluster, with the same options as `llmb run`.

    One recipe is one job; `--dry-run` prints its batch script. Lists separated by commas, --max-scale and similar
    options, and --repeats define a campaign: all combinations, the largest first. By default, it has all workloads,
    sizes, dtypes and scales of the cluster's GPU type. A campaign is shown and must be confirmed. If the client is
    killed, the same command resumes it, and no job is queued twice. With `--profile`, each recipe of a campaign has an
    additional, profiled run.

    Every plan is checked before submission, including its memory. A single job that does not fit on a GPU is rejected
    unless `--force` is set; for a campaign, only a warning is printed. The run folder is created immediately, with the
    batch script and, later, the results. Options override the shell's variables (SBATCH_ACCOUNT, SBATCH_PARTITION,
    TIME_LIMIT, GPUS_PER_NODE, ADDITIONAL_SLURM_PARAMS), which override cluster_config.yaml in $LLMB_INSTALL, which
    overrides the recipe's defaults.

    Examples:

    - `llmb submit -w pretrain_llama3.1 -s 405b --scale 576 --release 24.11 --dry-run`

    - `llmb submit -w pretrain_nemotron4 -s 340b --scale 2048 --account research --partition batch`

    - `llmb submit -w pretrain_llama3.1 -s 8b --scale 16 --wait --slurm-arg comment=weekly --env NCCL_DEBUG=INFO`

    - `llmb submit -w pretrain_llama3.1 -s 405b --scale 576 --exclude unfit`

    - `llmb submit -w pretrain_llama3.1,pretrain_nemotron4 --dtype bf16,fp8 --max-scale 512 --repeats 3`
    """
    selection, given = selection_of(selecting), flags_of(ctx, values)
    values = with_excluded(values)
    if file and not one.wait:
        _queue_file(file, selecting, values, given, queueing, again)
        return
    repeats = 1 if selecting["repeats"] is None else selecting["repeats"]
    model = None if file else single_model(Catalogue(), selection, repeats)
    if model:
        values |= {"workload": model[0], "size": model[1], "gpu_type": selection.gpu_type, "release": selection.release}
        values |= {"dtype": next(iter(selection.dtypes), None), "scale": next(iter(selection.scales), None)}
        submit_one(values, queueing, one)
        return
    if one.wait:
        do = "omit --wait, or pass -w and -s without --file, lists, --repeats and limits such as --max-scale"
        raise UsageError("--wait follows a single job, but this is a campaign", do=do)
    profile = bool(values.get("profile"))
    campaign = RequestedJobs(
        source=COMMAND_LINE,
        entries=[Entry(where=COMMAND_LINE, selection=selection, repeats=repeats, add_profile=profile)],
        values={**values, "profile": False},
        explicit={name: values[name] for name in given if name != "profile"},
    )
    _make_campaign(context_here(dry_run=queueing.dry_run), campaign, queueing, again)


def submit_one(values: Mapping[str, Any], queueing: Queueing, one: OneJob) -> None:
    """Show one job and, unless it is a dry run, confirm and queue it; with --wait, follow it and print its result."""
    context = context_here(dry_run=queueing.dry_run)
    if context.site.config.scheduler == LOCAL:
        raise UsageError(
            "the settings have 'scheduler: local', which queues no jobs", do="use 'llmb run' to train on this machine"
        )
    request = job_request(context.site, values, context.environ)
    order = context.order(request)
    say(*start_lines(order.plan))
    warnings = [
        *scale_warnings(order.plan, loads=request.choices.load_checkpoint is not None),
        *order.scheduler.warnings(order.sample()),
        *([order.missing.warning] if order.missing else []),
    ]
    warn(warnings)
    flags = order.sample().flags
    absent = [f"no {name}" for name in ("account", "partition") if name not in flags]
    say(f"the job requests {', '.join([flags_text(flags), *absent])}")
    if queueing.dry_run:
        warn(memory_warnings(order.plan))
        script = order.script()
        print_output(script_document(order, script) if queueing.json else script)
        return
    check_memory(order.plan, say, force=one.force)
    if not queueing.yes and sys.stdin.isatty():
        agree("Queue it?", default=True)
    queued = queue_one(context, order, say)
    if one.wait:
        sys.stderr.write(submit_text([queued]))
        with JobProgress(order.plan.steps, order.plan.first_step) as progress:
            ended = wait_for_one(context.install, queued, context.environ, say, Watch(progress.job, progress.step))
        print_result(read_ended_run(RunFolder(Path(ended.run_dir))), json=queueing.json)
    else:
        document = {"origin": order.plan.origin.document(), **queued_document([queued])}
        print_output(document if queueing.json else submit_text([queued]))


OPTIONS = value_options(
    (option for name, option in job_options().items() if name not in ("workload", "size")), envvar=False
)


@app.command()
@takes(OPTIONS, Queueing, OneJob)
def launch(
    values: dict[str, Any],
    queueing: Queueing,
    one: OneJob,
    workload: Annotated[str, typer.Argument(help="Workload; see 'llmb list'.")],
    ctx: typer.Context,
    size: Annotated[
        str | None,
        typer.Option(
            "-s",
            "--model-size",
            "--size",
            help="Model size. Default: the one in WORKLOAD (as in pretrain_llama3.1_8b), else $MODEL_SIZE, else the"
            " document's.",
        ),
    ] = None,
) -> None:
    """Queue the run that the environment variables of the reference documents describe.

    `llmb docs environment` lists the variables, such as JOB_TOTAL_GPUS, MODEL_SIZE, DTYPE, GPU_TYPE, MAX_STEPS and TP.
    A variable that is invalid or does not apply to the workload is an error; a name that looks misspelled is reported.
    Options override variables, and variables override cluster_config.yaml.

    Examples:

    - `JOB_TOTAL_GPUS=8 MODEL_SIZE=8b DTYPE=bf16 llmb launch pretrain_llama3.1 --dry-run`

    - `ENABLE_PROFILE=true JOB_TOTAL_GPUS=256 GPU_TYPE=h100 llmb launch finetune_llama4-maverick --yes`
    """
    catalogue = Catalogue()
    for warning in near_misses(documented_variables(), os.environ):
        sys.stderr.write(f"llmb: warning: {warning}\n")
    given = with_excluded(flags_of(ctx, values))
    given |= {"size": size} if size else {}
    launched = read_launch(catalogue, job_options(), os.environ, workload, values, given)
    for note in launched.notes:
        sys.stderr.write(f"llmb: note: {note}\n")
    _check_gpu_type(catalogue, launched.values)
    submit_one(launched.values, queueing, one)


def _check_gpu_type(catalogue: Catalogue, values: Mapping[str, Any]) -> None:
    """Raise UsageError if no GPU type is specified for fine-tuning, whose documents require one."""
    workload = find_workload(catalogue, str(values["workload"]))
    if workload.task == "pretrain" or values.get("gpu_type"):
        return
    if read_cluster_site(catalogue, install_here(), os.environ).config.gpu_type is None:
        do = "add --gpu-type, or set GPU_TYPE or cluster_config.yaml's gpu_type"
        raise UsageError(f"the GPU type of {workload.workload} is not specified", choices=catalogue.gpus, do=do)


@app.command()
@takes(SELECTION, JOB, Queueing, Again)
def bulk(
    selecting: dict[str, Any],
    values: dict[str, Any],
    queueing: Queueing,
    again: Again,
    file: Annotated[Path, typer.Argument(help="File of jobs: text, or YAML if the name ends with .yaml or .yml.")],
    ctx: typer.Context,
    junit: Junit = None,
) -> None:
    """Queue the jobs of a file on a cluster, the largest first; without a scheduler, run them here in turn.

    The campaign is shown and must be confirmed. If the client is killed, the same command resumes it, and no job is
    queued twice. Options override those of the file; options that select recipes restrict the file's jobs. `llmb docs
    run-many-recipes` describes the format of files.

    Examples:

    - `llmb bulk weekly.txt --dry-run`

    - `llmb bulk sweep.yaml --yes --partition batch --repeats 3`

    - `llmb bulk sweep.yaml --dtype fp8 --max-scale 256 --resume`
    """
    _queue_file(file, selecting, with_excluded(values), flags_of(ctx, values), queueing, again, junit)


def _queue_file(
    file: Path,
    selecting: Mapping[str, Any],
    values: Mapping[str, Any],
    given: Iterable[str],
    queueing: Queueing,
    again: Again,
    junit: Path | None = None,
) -> None:
    context = context_here(dry_run=queueing.dry_run)
    requested = jobs_of_file(file, selecting, values, given)
    _make_campaign(context, requested, queueing, again, junit)


def _make_campaign(
    context: CampaignContext, requested: RequestedJobs, queueing: Queueing, again: Again, junit: Path | None = None
) -> None:
    if is_local(context):
        _run_here(context, requested, queueing, again, junit)
    else:
        run_campaign(context, requested, queueing, again, junit)


def _run_here(
    context: CampaignContext, requested: RequestedJobs, queueing: Queueing, again: Again, junit: Path | None
) -> None:
    """Run a campaign on this machine, one run after another; the same command resumes it."""
    found = campaign_here(context, requested)
    labels = list(dict.fromkeys(str(local.label) for local in found.runs))
    if found.left_out:
        sys.stderr.write(f"left out:{itemized(found.left_out)}\n")
    count = counted(sum(found.repeats), "run")
    say(f"{count} on this machine, one after another; the label is {listed(labels, MOST_RECIPES)}")
    if not queueing.dry_run and not queueing.yes and can_ask():
        agree("Run them?", default=True)
    run_or_print(
        found.runs,
        found.repeats,
        dry_run=queueing.dry_run,
        start_new=again.start_new,
        json=queueing.json,
        junit=junit,
        left_out=found.left_out,
    )


def jobs_of_file(
    file: Path, selecting: Mapping[str, Any], values: Mapping[str, Any], given: Iterable[str]
) -> RequestedJobs:
    """Return the jobs of a campaign file for the selected recipes; ``given`` names the options on the command line."""
    catalogue, selection = Catalogue(), selection_of(selecting)
    keys = campaign_keys(job_options().values(), documented_variables())
    found = read_campaign_file(file, keys, lambda name: split_model(catalogue, name))
    own = {name: values[name] for name in given}
    profile = bool(own.pop("profile", False))
    return RequestedJobs(
        source=str(file.absolute()),
        entries=_avoiding(from_command_line(found.entries, selection, selecting["repeats"], profile=profile)),
        problems=found.problems,
        values={**values, "profile": False},
        explicit=own,
        within=selection,
    )


def _avoiding(entries: Sequence[Entry]) -> list[Entry]:
    texts = {text for entry in entries for text in entry.options.get(OPTION, ())}
    nodes = {text: excluded_here(text) for text in sorted(texts)}
    found = []
    for entry in entries:
        lists = tuple(nodes[text] for text in entry.options.get(OPTION, ()) if nodes[text])
        others = {name: values for name, values in entry.options.items() if name != OPTION}
        found.append(replace(entry, options={**others, **({OPTION: lists} if lists else {})}))
    return found
