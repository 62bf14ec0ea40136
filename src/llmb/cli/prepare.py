# SPDX-License-Identifier: Apache-2.0
"""``llmb prepare``: data and weights for fine-tuning, and container images."""

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from getpass import getpass
from pathlib import Path
from typing import Annotated, Any

import typer

from llmb.base.errors import EnvironmentProblem, UsageError, UserInterrupt, unknown
from llmb.base.options import build, options_of
from llmb.catalogue.catalogue import Catalogue
from llmb.catalogue.model_name import model_of, split_model
from llmb.catalogue.resolve import find_workload, is_tiny, sizes_of
from llmb.cli.checkpoint import MaxFileSize, Processes
from llmb.cli.common import CommandGroup, DryRun, Json, Yes
from llmb.cli.progress import ByteProgress, CountProgress
from llmb.cli.root import agree, can_ask, install_here, say, warn
from llmb.cli.shared_options import (
    COMPLETIONS,
    flags_of,
    model_options,
    only_value,
    takes,
    value_options,
    with_excluded,
)
from llmb.jobs.history import open_history
from llmb.jobs.job import Job
from llmb.jobs.submit import submit_task, unanswered_is_explained
from llmb.jobs.task import TaskOrder
from llmb.launch.documents.variables import documented_variables, near_misses, read_preparation_variables
from llmb.launch.scheduler_lookup import read_cluster_site, read_job_options, scheduler_options
from llmb.launch.site.site import Site
from llmb.reports.install_report import (
    access_document,
    access_table,
    checkpoint_document,
    checkpoint_table,
    dataset_document,
    dataset_tables,
    image_document,
    image_text,
    verification_document,
    verification_tables,
)
from llmb.reports.jobs_report import flags_text, queued_document, submit_text
from llmb.reports.output import print_output
from llmb.runs.checkpoints.prepared_data import SPLITS, Split, prepared_folders
from llmb.runs.huggingface.tensors import parse_size
from llmb.setup.install.images import PROGRAMS, SUFFIXES, ImageRequest, import_image
from llmb.setup.install.installation import IMAGES
from llmb.setup.prepare.base_weights import CheckpointRequest, prepare_checkpoint
from llmb.setup.prepare.conversion import default_processes
from llmb.setup.prepare.dataset import DatasetRequest, PreparedDataset, prepare_dataset
from llmb.setup.prepare.hub import (
    NeededRepository,
    RepositoryAccess,
    access_problem,
    check_access,
    lacks_token,
    needed_repositories,
    token_source,
    use_token,
)
from llmb.setup.prepare.preparation_jobs import TOKENS, PrepareChoices, preparation_orders, same_jobs
from llmb.setup.prepare.small_files import SIZE, next_commands, write_small_files
from llmb.setup.prepare.verify import verify_prepared

Workload = Annotated[
    str,
    typer.Option(
        "-w", "--workload", help="Fine-tuning workload; see 'llmb list'.", autocompletion=COMPLETIONS["workload"]
    ),
]
Size = Annotated[str | None, typer.Option("-s", "--size", help="Model size, such as 70b. Default: all except tiny.")]

QUESTION = "Hugging Face token (neither shown nor stored; Enter for none): "
STORED = "the token is used by this command only; 'hf auth login' stores one for all commands"


def access(workload: Workload, size: Size = None, json: Json = False) -> None:
    """Check access to the repositories that fine-tuning downloads from, before anything is downloaded or queued.

    The token is that of HF_TOKEN or of 'hf auth login'. If there is none, the command asks for a token on a terminal,
    and does not store it. The exit code is 3 if a repository cannot be read; the error has the page on which to request
    access. If the hub cannot be reached, there is only a warning.

    Examples:

    - `llmb prepare access -w finetune_llama3`

    - `llmb prepare access -w finetune_llama3 -s 70b --json`
    """
    catalogue = Catalogue()
    found = checked_access(needed_repositories(catalogue, _models(catalogue, workload, size)))
    source = token_source()
    print_output(access_document(found, source) if json else access_table(found))
    for reason in dict.fromkeys(item.reason for item in found if item.state == "not checked"):
        say(f"warning: access was not checked: {reason}")
    if problem := access_problem(found):
        raise problem


def _models(catalogue: Catalogue, name: str, size: str | None) -> list[tuple[str, str]]:
    workload, own_size = split_model(catalogue, name)
    if size or own_size:
        return [model_of(catalogue, name, size)]
    found = find_workload(catalogue, workload)
    return [(workload, size) for size in found.sources if not is_tiny(size)] or [(workload, sizes_of(found)[0])]


def checked_access(repositories: Sequence[NeededRepository]) -> Sequence[RepositoryAccess]:
    """Return the access to each repository; if a token is missing or rejected, ask for one on a terminal and retry."""
    found = check_access(repositories)
    problem = access_problem(found)
    if problem is None or not lacks_token(found) or not can_ask():
        return found
    say(problem.what)
    sys.stderr.flush()
    token = ""
    with suppress(EOFError):
        token = getpass(QUESTION).strip()
    if not token:
        return found
    use_token(token)
    say(STORED)
    return check_access(repositories)


NOT_OF_PREPARATION = {"nodes", "retries", "start", "segment", "signal_before", "vboost", "cpu_binding", "numa_binding"}
"""Options of the scheduler that do not apply to preparations."""
PREPARE_CHOICES = options_of(PrepareChoices)
HELP = {
    "time_limit": "Time limit as minutes, hh:mm:ss or d-hh:mm:ss. Default: as in the settings, else 55 minutes.",
    "gpus_per_node": "Number of GPUs to request. Default: none.",
}
USABLE = {name: item for name, item in scheduler_options().items() if name not in NOT_OF_PREPARATION}
JOB_OPTIONS = {name: replace(item, help=HELP.get(name, item.help)) for name, item in USABLE.items()}
SUBMIT_OPTIONS = value_options({**PREPARE_CHOICES, **JOB_OPTIONS}.values(), envvar=False)
Runtime = Annotated[
    str | None,
    typer.Option(
        metavar="pyxis|apptainer",
        help="Container runtime. Default: from cluster_config.yaml, else according to SOURCE or to what is installed.",
    ),
]
app = typer.Typer(cls=CommandGroup, add_completion=False, rich_markup_mode="markdown", no_args_is_help=True)


@takes(SUBMIT_OPTIONS)
def submit(
    values: dict[str, Any],
    ctx: typer.Context,
    workload_argument: Annotated[str | None, typer.Argument(metavar="WORKLOAD", help="The same as --workload.")] = None,
    workload: Annotated[str | None, typer.Option("-w", "--workload", help="Workload; see 'llmb list'.")] = None,
    size: Annotated[
        str | None, typer.Option("-s", "--size", help="Model size. Default: $MODEL_SIZE, else the only documented one.")
    ] = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    json: Json = False,
) -> None:
    """Queue two jobs of one node each: one prepares the dataset, one the checkpoint.

    The command reads the variables of the reference documents' download script: HF_TOKEN, GPU_TYPE, SBATCH_ACCOUNT,
    SBATCH_PARTITION, SBATCH_GPUS_PER_NODE, TIME_LIMIT, SKIP_DATASET_DOWNLOAD and SKIP_IMPORT_CHECKPOINT. To resume a
    job that ran out of time, submit it again.

    A token is passed to the job in its environment, and never written to a file, script or command line.

    Examples:

    - `HF_TOKEN=... llmb prepare submit -w finetune_llama3 -s 70b`

    - `SKIP_IMPORT_CHECKPOINT=true TIME_LIMIT=01:30:00 llmb prepare submit finetune_llama4-maverick --dry-run`
    """
    catalogue, environ = Catalogue(), os.environ
    warn(near_misses(documented_variables(), environ))
    name = only_value("workload", workload_argument, workload)
    if name is None:
        raise UsageError("the workload is not specified", do="add --workload; see 'llmb list'")
    given = with_excluded(flags_of(ctx, values))
    given |= {"size": size} if size else {}
    orders = _orders(catalogue, name.lower(), values, given, environ)
    scripts = [order.script() for order in orders]
    if dry_run:
        jobs = [{**_identity(order), "script": text} for order, text in zip(orders, scripts, strict=True)]
        print_output({"jobs": jobs} if json else "\n".join(scripts))
        return
    _confirm(orders, yes=yes)
    queued = _queued(orders, environ)
    print_output(queued_document(queued) if json else submit_text(queued))


def _orders(
    catalogue: Catalogue, name: str, values: Mapping[str, Any], given: Mapping[str, Any], environ: Mapping[str, str]
) -> list[TaskOrder]:
    workload, own_size = split_model(catalogue, name)
    known = {**PREPARE_CHOICES, **scheduler_options()}
    reading = read_preparation_variables(documented_variables(), environ, workload, known, given)
    for note in reading.notes:
        say(f"note: {note}")
    found = {**values, **reading.options, **given}
    only = [size for size in find_workload(catalogue, workload).sources if not is_tiny(size)]
    size = found.get("size") or own_size or (only[0] if len(only) == 1 else None)
    workload, size = model_of(catalogue, workload, size)
    site = read_cluster_site(catalogue, install_here(), environ)
    say(*site.notes)
    # The scheduler's options must not read variables that only apply to runs, such as GPUS_PER_NODE.
    runs = {item.name for item in documented_variables() if not item.prepares}
    shell = {name: value for name, value in environ.items() if name not in runs}
    options = read_job_options(site, {name: found.get(name) for name in JOB_OPTIONS}, shell, sys.executable)
    return preparation_orders(catalogue, workload, size, build(PrepareChoices, found), options, site)


def _identity(order: TaskOrder) -> dict[str, Any]:
    task = order.task
    return {
        "workload": task.workload,
        "size": task.size,
        "prepares": task.subject,
        "gpus": task.scale if task.gpus else 0,
    }


def _confirm(orders: list[TaskOrder], *, yes: bool) -> None:
    for order in orders:
        say(f"the job for the {order.task.subject} requests {flags_text(order.sample().flags)}")
    if not all(order.sources for order in orders) and not any(os.environ.get(name) for name in TOKENS):
        say("note: HF_TOKEN is not set; for a gated model, set it, or log in with 'hf auth login' first")
    if yes or not sys.stdin.isatty():
        return
    agree("Queue them?" if len(orders) > 1 else "Queue it?", default=True)


def _queued(orders: list[TaskOrder], environ: Mapping[str, str]) -> list[Job]:
    install = orders[0].site.install
    with open_history(install, say) as store:
        same = same_jobs(store, install, orders)
        for part, job in same.items():
            say(f"the {part} is already being prepared by job {job.job_id}: {job.run_dir}")
        new = [order for order in orders if order.task.subject not in same]
        with unanswered_is_explained():
            return [submit_task(store, order, environ) for order in new]


def image(
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", help="Image: NAME:TAG in a registry, dockerd://NAME:TAG, or a file.")
    ],
    runtime: Runtime = None,
    folder: Annotated[
        Path | None,
        typer.Option("--folder", help="Shared folder. Default: from the settings, else images in the install root."),
    ] = None,
    architecture: Annotated[
        str | None,
        typer.Option(
            "--architecture",
            metavar="x86_64|aarch64",
            help="Architecture of the nodes. Default: from cluster_config.yaml, else this machine's.",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Import again, and replace the existing file.")] = False,
    json: Json = False,
) -> None:
    """Import a container image as a file for all nodes: squashfs for Pyxis, SIF for Apptainer.

    The import command is printed and run. The file gets its name, such as nvidia+nemo+26.04.01.sqsh, only when it
    is complete; without --force, an existing file is kept.

    Enroot or Apptainer must be installed, with its own credentials for private registries: never put a password in
    SOURCE.

    Examples:

    - `llmb prepare image nvcr.io/nvidia/nemo:26.04.01`

    - `llmb prepare image dockerd://llmb:0.1 --runtime pyxis --folder /shared/images`

    - `llmb prepare image llmb.tar --runtime apptainer`
    """
    root = install_here()
    site = read_cluster_site(Catalogue(), root, os.environ)
    request = ImageRequest(
        source=source,
        folder=(folder or _folder(site, root)).absolute(),
        runtime=runtime or _runtime(site, source),
        architecture=architecture or site.config.install.node_architecture,
        force=force,
    )
    found = import_image(request, say)
    if not found.made:
        say("this image already exists; nothing to do (--force imports it again)")
    print_output(image_document(found, request.runtime) if json else image_text(found, request.runtime))


def _folder(site: Site, root: Path) -> Path:
    named = site.config.install.image_folder
    return Path(named) if named else root / IMAGES


def _runtime(site: Site, source: str) -> str:
    if site.config.container.runtime != "none":
        return site.config.container.runtime
    by_name = [name for name, suffix in SUFFIXES.items() if source.endswith(suffix)]
    here = by_name or [name for name, program in PROGRAMS.items() if shutil.which(program)]
    if len(here) == 1:
        return here[0]
    raise UsageError("the container runtime is not specified", choices=PROGRAMS, do="pass one with --runtime")


@takes(model_options())
def checkpoint(
    model: tuple[str, str],
    source: Annotated[
        Path | None,
        typer.Option(
            "--source",
            metavar="FOLDER",
            help="Folder of a Hugging Face model, or of a NeMo 2 checkpoint. Default: the hub, or its cache.",
        ),
    ] = None,
    processes: Processes = None,
    max_file_size: MaxFileSize = "1GB",
    json: Json = False,
) -> None:
    """Prepare the weights for fine-tuning: a Hugging Face model as a sharded checkpoint, in its own dtype.

    The same command resumes an interrupted preparation, and does nothing if everything is prepared.

    Examples:

    - `llmb prepare checkpoint -w finetune_llama3 -s 70b`

    - `llmb prepare checkpoint -w finetune_llama3 -s tiny --source small/model --processes 1`
    """
    catalogue = Catalogue()
    workload, own_size = model_of(catalogue, *model)
    request = CheckpointRequest(
        workload=workload,
        size=own_size,
        source=source,
        processes=processes or default_processes(),
        largest_file_bytes=parse_size(max_file_size),
    )
    folders = prepared_folders(install_here(), workload)
    with ByteProgress("preparing") as progress:
        prepared = prepare_checkpoint(catalogue, request, folders, progress.bytes, say)
    if not prepared.made:
        say("this checkpoint is already prepared; nothing to do")
    saved = prepared.checkpoint
    print_output({"made": prepared.made, **checkpoint_document(saved)} if json else checkpoint_table(saved))


@takes(model_options())
def verify(
    model: tuple[str, str],
    checksums: Annotated[
        bool, typer.Option("--checksums", help="Read every file and compare its checksum, not only its size.")
    ] = False,
    json: Json = False,
) -> None:
    """Verify that the data and weights for fine-tuning are prepared, and list those that are missing.

    The exit code is 0 if everything is complete. Otherwise it is 3, and the commands that prepare the rest are printed.

    Examples:

    - `llmb prepare verify -w finetune_llama3 -s 70b`

    - `llmb prepare verify -w finetune_llama3 -s 70b --checksums --json`
    """
    catalogue = Catalogue()
    workload, own_size = model_of(catalogue, *model)
    folders = prepared_folders(install_here(), workload)
    with ByteProgress("verifying") if checksums else nullcontext() as progress:
        found = verify_prepared(catalogue, workload, own_size, folders, progress.bytes if progress else None)
    print_output(verification_document(found) if json else verification_tables(found))
    if found.lacking:
        commands = "\n         ".join(dict.fromkeys(item.command or "" for item in found.lacking))
        what = f"{len(found.lacking)} of {len(found.items)} folders are incomplete"
        raise EnvironmentProblem(what, where=str(found.folders.path), do=commands)


@app.callback()
def prepare() -> None:
    """Prepare data and weights for fine-tuning, and container images.

    Examples, the first three with small files that llmb creates:

    - `llmb prepare sample small -w finetune_llama3`

    - `llmb prepare checkpoint finetune_llama3 tiny --source small/model`

    - `llmb prepare dataset finetune_llama3 tiny --source small/squad.jsonl`

    - `llmb prepare verify finetune_llama3 70b`: what is prepared, and the commands for the rest

    - `llmb prepare submit finetune_llama3`: dataset and checkpoint, in jobs on a cluster

    - `llmb prepare image nvcr.io/nvidia/nemo:26.04.01`: an image file for jobs
    """


@takes(model_options())
def dataset(
    model: tuple[str, str],
    source: Annotated[
        Path | None,
        typer.Option(
            "--source", help="File of samples, or folder with files named train, validation and test. Default: the hub."
        ),
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            "--tokenizer",
            help="The file tokenizer.json, or its folder. Default: from the prepared checkpoint, else from the hub.",
        ),
    ] = None,
    seq_len: Annotated[
        list[int] | None,
        typer.Option("--seq-len", min=2, help="Tokens per packed sequence. Repeatable. Default: those of all recipes."),
    ] = None,
    split: Annotated[
        list[str] | None, typer.Option("--split", help="Pack only training, validation or test. Repeatable.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Recreate existing files from --source or the hub.")] = False,
    verify: Annotated[bool, typer.Option("--verify", help="Also verify the checksums of files that exist.")] = False,
    json: Json = False,
) -> None:
    """Prepare SQuAD for fine-tuning: samples in the prompt template, tokenized and packed to the sequence length.

    Only missing files are created, so the same command completes an interrupted preparation. Local samples may be the
    original JSON; JSON lines, parquet or arrow with context, question and answers; or JSON lines with input and output.

    Examples:

    - `llmb prepare dataset finetune_llama3 70b`

    - `llmb prepare dataset -w finetune_llama3 -s tiny --source squad.jsonl --tokenizer model`
    """
    catalogue = Catalogue()
    workload, own_size = model_of(catalogue, *model)
    request = DatasetRequest(
        workload=workload,
        size=own_size,
        source=source,
        tokenizer=tokenizer,
        seq_lens=tuple(seq_len or ()),
        splits=tuple(_split(name) for name in split) if split else SPLITS,
        force=force,
        verify=verify,
    )
    prepared = _prepared(catalogue, request)
    if not prepared.samples_made and not any(packed.made for packed in prepared.packed):
        say("everything is already prepared; nothing to do")
    print_output(dataset_document(prepared) if json else dataset_tables(prepared))


def _prepared(catalogue: Catalogue, request: DatasetRequest) -> PreparedDataset:
    folders = prepared_folders(install_here(), request.workload)
    try:
        with CountProgress() as progress:
            return prepare_dataset(catalogue, request, folders, progress.count, say)
    except KeyboardInterrupt as signal:
        raise UserInterrupt("interrupted; complete files are kept, and the same command creates the rest") from signal


def sample(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="New folder for the files.")],
    workload: Workload,
    size: Annotated[str, typer.Option("-s", "--size", help="Model size; tiny is the only one with such files.")] = SIZE,
    json: Json = False,
) -> None:
    """Create small data and a small model to try fine-tuning without network or GPU, in a few seconds.

    The command writes `squad.jsonl`, questions about short texts in SQuAD's format, and `model`, a Hugging Face model
    with random weights and a tokenizer trained on these texts. Every call creates the same files.

    Example:

    - `llmb prepare sample small -w finetune_llama3`
    """
    catalogue = Catalogue()
    workload, own_size = model_of(catalogue, workload, size)
    write_small_files(catalogue, workload, own_size, folder)
    commands = next_commands(workload, own_size, folder)
    print_output(
        {"path": str(folder.absolute()), "next": list(commands)}
        if json
        else "".join(f"{command}\n" for command in ("# next:", *commands))
    )


def _split(name: str) -> Split:
    for split in SPLITS:
        if split == name:
            return split
    raise unknown("split", name, SPLITS)


for command in (sample, access, checkpoint, dataset, verify, image, submit):  # in the order of their use
    app.command()(command)
