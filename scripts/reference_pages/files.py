# SPDX-License-Identifier: Apache-2.0
"""docs/reference/files.md: the run folder, what its files and the JSON documents hold, and the exit codes."""

import inspect
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import yaml
from pydantic import BaseModel

from llmb import errors
from llmb.campaigns.campaign import Campaign, CampaignJob
from llmb.catalogue.load import Catalogue
from llmb.catalogue.records import Recipe
from llmb.jobs.job import Job
from llmb.jobs.task import TaskRecord
from llmb.jobspec.node_setup import Binding, ContainerSettings
from llmb.jobspec.spec import JobSpec
from llmb.prepare.sample_files import SampleFiles
from llmb.prepared.packed_dataset import PackedDataset
from llmb.resources.machine import MachineEvent, MachineReport, Unread
from llmb.resources.records import HostUse, NodeOtherWork, OtherWork, ResourceUse
from llmb.resources.sample import CounterReading, HostSample, Sample, SamplerStart
from llmb.runs.experiment import experiment_name
from llmb.runs.folder import RunFolder
from llmb.runs.network import NetworkUse
from llmb.runs.plan import EnginePlan, Plan
from llmb.runs.record import JobEnd, RunRecord, SubmittedJob
from llmb.runs.steps import MOST_VALUES, RankTimes, Step
from llmb.schedulers.lookup import cluster_schema
from llmb.schedulers.slurm.settings import PartitionSettings, SlurmSettings
from llmb.site.cluster_config import InstallSettings
from llmb.traces.nccl_network import NodesNetwork
from reference_pages.json_samples import json_documents, sample_line, sample_plan, sample_recipe
from reference_pages.json_types import Schema, members_of, types_text
from reference_pages.markdown import page, table, type_text
from reference_pages.schemas import schemas

FIELDS = Path(__file__).with_name("fields.yaml")

FILES = (
    "log",
    "steps",
    "record",
    "rank_times",
    "expert_load",
    "environment",
    "stall",
    "batch_script",
    "batch_output",
    "job",
    "job_spec",
    "job_end",
    "imported",
    "checkpoint_times",
    "torch_profile",
    "nsys_profile",
    "nccl_trace",
    "nccl_network",
    "nccl_inspector",
    "nccl_ras",
    "breakdown",
    "resources",
)
INTRO = """Names of numbers carry the unit. What is not known is null, never 0.

[Run folder](#run-folder), [log line](#log-line), [metrics.jsonl](#metricsjsonl),
[rank_times.jsonl](#rank_timesjsonl), [resources](#resources),
[run.json](#runjson),
[job.json](#jobjson), [job_spec.json](#job_specjson), [job_end.json](#job_endjson), [campaigns](#campaigns),
[cluster_config.yaml](#cluster_configyaml),
[JSON of `llmb run`](#json-of-llmb-run), [of several runs](#json-of-llmb-run---repeats),
[of `metrics`](#json-of-llmb-metrics), [of `show`](#json-of-llmb-show),
[of `submit`](#json-of-llmb-submit), [of a campaign](#json-of-llmb-bulk), [of a job](#json-of-a-job),
[of `runs`](#json-of-llmb-runs), [of `jobs list`](#json-of-llmb-jobs-list), [of `jobs show`](#json-of-llmb-jobs-show),
[of `jobs nodes`](#json-of-llmb-jobs-nodes), [of `list`](#json-of-llmb-list),
[of `parse`](#json-of-llmb-parse), [of `watch`](#json-of-llmb-watch), [of `judge`](#json-of-llmb-judge),
[of `compare`](#json-of-llmb-compare), [of `bisect`](#json-of-llmb-bisect-next), [of `trace`](#json-of-llmb-trace),
[of `nccl`](#json-of-llmb-nccl), [of `bench`](#json-of-llmb-bench), [of `bench list`](#json-of-llmb-bench-list),
[of `bench gpus`](#json-of-llmb-bench-gpus),
[of `bench collectives --pairwise`](#json-of-llmb-bench-collectives---pairwise),
[samples.json](#samplesjson), [packed datasets](#packed-datasets),
[of `checkpoint show`](#json-of-llmb-checkpoint-show), [of `prepare access`](#json-of-llmb-prepare-access),
[of `prepare dataset`](#json-of-llmb-prepare-dataset), [of `prepare image`](#json-of-llmb-prepare-image),
[of `prepare verify`](#json-of-llmb-prepare-verify),
[of `install`](#json-of-llmb-install),
[exit codes](#exit-codes)."""

RUN_FOLDER = """Results are kept below `$LLMB_INSTALL` or `$STAGE_PATH`; without them below the nearest
folder, at or above the current one, that holds a `cluster_config.yaml`; else below `~/.llmb`.

```text
workloads/<workload>/experiments/<experiment>/<experiment>_<seconds>/<experiment>/
  {log:<24} all that the workers wrote, with one line a step
  {steps:<24} every step in full precision
  {steps_of_attempt:<24} of a run that was started again: the steps that an attempt had behind it
  {record:<24} everything that decided the run, and its result
  {rank_times:<24} with several ranks: how long each one computed in each step
  {expert_load:<24} of a model with experts: each one's share of its layer's tokens, by layer
  {batch_script:<24} of a submitted run: its batch script
  {batch_output:<24} likewise: output of the script and the scheduler
  {job:<24} the job's handle
  {job_spec:<24} the full specification of the job, as it was submitted
  {job_end:<24} of a submitted run: how its script ended
  {imported:<24} of a run that `llmb import` added: the archive and the job that it is from
  {checkpoint_times:<24} what saves and loads of checkpoints took: `kind`, `step`, `start_s`, `duration_s`, `ranks`
  {torch_profile:<24} of a profiled run: traces of the PyTorch profiler, one a rank
  {nsys_profile:<24} or reports of Nsight Systems, one a rank
  {breakdown:<24} where the time of one profiled step went
  {nccl_trace:<24} with --nccl-trace: NCCL's log, one a rank, and where in it steps begin
  {nccl_network:<24} of a run on several nodes over NCCL: what NCCL said of the network to a rank of each
  {nccl_inspector:<24} where NCCL's Inspector is loaded: the collectives that each process completed
  {nccl_ras:<24} of a hung run: what NCCL said of it
  {resources:<24} samples of GPUs, CPU and memory, `<node>.jsonl` for each node
```

`<seconds>` is the start in Unix time; of runs that start in the same second, the second one has `-2` behind it, and so
on. `<experiment>` carries the configuration, for example
`{experiment}`. After the batch sizes it has the
GPU type, and then only what differs from the recipe: `_seq4096`, `_recompute-full`, `_megatron_bridge` and the like, or
a digest where that is long (`_set-`, and `_args-` for arguments of a framework). Commands group runs by their records,
not by these names. While a run lasts, `{environment}` holds what moves into
`{record}` at its end, and workers that end a hung run leave `{stall}`. `{record}` is replaced
atomically: a reader sees the old content or the new."""

LOG_LINE = """One line a step; here it is broken for the page:

```text
{line}
```

Steps count from 0, and the number after the slash is that of the last one. `TFLOPS_per_GPU` is in the `full`
convention; memory is that of rank 0, in bytes. A loss that is not finite is `nan`, and the line
`llmb: the run is invalid: ...` follows it. `train_step_timing in s` never has an exponent, because scripts that read
such logs do not read it."""

STEPS = """One JSON object per line, written as the step ends. JSON has no NaN: such a value is null, and `not_finite`
then maps its name to `nan`, `inf` or `-inf`."""

RANK_TIMES = """With several ranks, one JSON object per line. A line is of one step, unless a run has more than
{most:,} values, steps times ranks: then it is of as many as keep the file below that."""

RESOURCES = """`resources/<node>.jsonl` has one JSON object per line: what a sampler of the node finds when it starts,
then its samples. A run that was started again has those of its later samplers behind them. While a run lasts,
`<node>.settings.json` beside it has the settings of the node, which move into run.json. See
[resources seen while running](../explanation/resources.md)."""

PLAN = """`plan` of a run of the engine; another program's ends with `nccl_trace`:"""

JOB = """Written as soon as the scheduler has taken the run. Runs of an array have one each, in folders whose names end
in `.<index>`; the folder without an index holds their common batch script."""

JOB_SPEC = """Written before the scheduler is asked; a job that is submitted again is made from it. Each run of an
array has one, with its own `array_index`."""

JOB_END = """Written by the batch script whatever ended it, but for the loss of its node. Where the workers failed, the
exit code is theirs."""

TASK = """Of a job that trains nothing, in place of run.json, beside job.json, job_spec.json, job_end.json, the batch
script and `log-<name>.out`: of `llmb prepare submit` in `workloads/<workload>/preparations/<name>_<seconds>/<name>/`,
of `llmb bench` in `.llmb/bench_jobs/<name>_<seconds>/<name>/`, of `llmb doctor` in
`.llmb/health/<time>/.jobs/<node>/doctor/`."""

SAMPLES = """In `checkpoint_and_dataset/datasets/<dataset>/` of a workload, beside a `.jsonl` for each split. A line
holds `input`, the prompt, and `output`, the answer; of the test split also `original_answers`, all that count as
right. `.jsonl.idx.npy` holds the position of every line's end (int64), `.jsonl.idx.info` a pickled dictionary with
`newline_int` and `version`: the index that NeMo reads. samples.json is written last."""

PACKED = """In `packed/<tokenizer>/<split>_<seq_len>/` below the samples; a slash in the name of the tokenizer
becomes `--`. A pack is a sequence of at most `seq_len` places that is filled with whole documents, one for each
sample. A document of n + 1 tokens takes n places: its first n tokens are inputs, each with the token after it as its
label. Places that no document takes are padding, at the end of a pack. The arrays are numpy files that can be mapped
into memory:

| file | type | content |
| --- | --- | --- |
| `tokens.npy` | uint32 [tokens] | all documents one after the other, those of a pack next to each other |
| `answers.npy` | bool [tokens] | whether the loss counts the token as a label: answer and end of sequence |
| `documents.npy` | int64 [documents + 1] | the first token of each document, and the end of the last |
| `packs.npy` | int64 [packs + 1] | the first document of each pack, and the end of the last |

`dataset.json` is written last, and the folder takes its name when all is on disk:"""

JOB_ROW = """What the commands of `llmb jobs` say of each job; `jobs show` has [more](#json-of-llmb-jobs-show).
The states and their transitions: [states of jobs](../explanation/job-states.md)."""

CLUSTER_CONFIG = """In `$LLMB_INSTALL`; every key may be left out. See
[how to describe a cluster](../how-to/describe-a-cluster.md).
`~/.config/llmb/config.yaml` may hold a user's own `gpu_type`, `python` and `slurm`, which are above it, and
`install_root`, the root of installation where nothing else names one. Both are read with `llmb config show`."""

CAMPAIGN = """`.llmb/campaigns/<campaign>.json` below `$LLMB_INSTALL` holds every job of a campaign and how far it has
come. It is replaced atomically before and after each submission. A client that finds a campaign unfinished continues
it ([how to run many recipes](../how-to/run-many-recipes.md)); one that is finished is kept as a record."""

ERRORS = """An error is written to stderr as `llmb: error: <what>`, followed by `where:`, `valid:` and `do:` as far as
they apply; if the result is printed as JSON, the error is one JSON document on stderr: `error` with `what`, `where`,
`valid`, `do` and `exit_code`. `llmb parse` ends with 4 where no log is of a successful run, whatever the result of the
others."""


def files_page(catalogue: Catalogue) -> str:
    plan, recipe = sample_plan(catalogue), sample_recipe(catalogue)
    meanings = yaml.safe_load(FIELDS.read_text())
    record = {**members_of(RunRecord), "plan": Plan}
    records = {"record": record, "plan": annotations(EnginePlan), "recipe": annotations(Recipe)}
    documents = json_documents(catalogue, plan, recipe)
    frozen = schemas(documents)
    return page(
        "# Files, JSON and exit codes",
        INTRO,
        page("## Run folder", run_folder(plan)),
        page("## Log line", LOG_LINE.format(line=sample_line(recipe).replace(" | ", "\n  | "))),
        page("## metrics.jsonl", STEPS, typed_table({item.name: item.type for item in fields(Step)}, meanings["step"])),
        page(
            "## rank_times.jsonl",
            RANK_TIMES.format(most=MOST_VALUES),
            typed_table({item.name: item.type for item in fields(RankTimes)}, meanings["rank_times"]),
        ),
        *resources(meanings),
        page("## run.json", typed_table(records["record"], meanings["record"])),
        page(PLAN, typed_table(records["plan"], meanings["run_plan"])),
        page("`plan.recipe`:", typed_table(records["recipe"], meanings["recipe"])),
        page("## job.json", JOB, typed_table(annotations(SubmittedJob), meanings["job"])),
        page("## job_spec.json", JOB_SPEC, typed_table(annotations(JobSpec), meanings["job_spec"])),
        page("## job_end.json", JOB_END, typed_table(annotations(JobEnd), meanings["job_end"])),
        page("## task.json", TASK, typed_table(annotations(TaskRecord), meanings["task"])),
        *campaign_file(meanings),
        page("## samples.json", SAMPLES, typed_table(annotations(SampleFiles), meanings["samples"])),
        page("## Packed datasets", PACKED, typed_table(annotations(PackedDataset), meanings["packed"])),
        page("## JSON of a job", JOB_ROW, typed_table(job_row(), meanings["job_row"])),
        *cluster_config(meanings),
        *(
            page(f"## JSON of llmb {name}", key_table(item, meanings[name], frozen.get(name)))
            for name, item in documents.items()
        ),
        page("## Exit codes", exit_codes(), ERRORS),
    )


def campaign_file(meanings: Mapping[str, Mapping[str, str]]) -> Iterator[str]:
    yield page("## Campaigns", CAMPAIGN, typed_table(annotations(Campaign), meanings["campaign"]))
    yield page("`jobs[]`:", typed_table(annotations(CampaignJob), meanings["campaign_job"]))


def resources(meanings: Mapping[str, Mapping[str, str]]) -> Iterator[str]:
    yield page("## Resources", RESOURCES)
    lines = {
        "sampler_start": SamplerStart,
        "sample": Sample,
        "host_sample": HostSample,
        "counter_reading": CounterReading,
    }
    titles = (
        "The first line of a sampler:",
        "A sample:",
        "`host`:",
        "Counters, before the first sample and after the last:",
    )
    for title, (name, kind) in zip(titles, lines.items(), strict=True):
        yield page(title, typed_table({item.name: item.type for item in fields(kind)}, meanings[name]))
    yield page("`resources` of a result:", typed_table(annotations(ResourceUse), meanings["resource_use"]))
    yield page("`resources.hosts[]`:", typed_table(annotations(HostUse), meanings["host_use"]))
    yield page(
        "## Other work", "`other_work` of a result:", typed_table(annotations(OtherWork), meanings["other_work"])
    )
    yield page("`other_work.nodes[]`:", typed_table(annotations(NodeOtherWork), meanings["node_other_work"]))
    yield page("## Machine", "`machine` of a result:", typed_table(annotations(MachineReport), meanings["machine"]))
    yield page("`machine.events[]`:", typed_table(annotations(MachineEvent), meanings["machine_event"]))
    yield page("`machine.unread[]`:", typed_table(annotations(Unread), meanings["machine_unread"]))
    yield page("## Network", "`network` of a result:", typed_table(annotations(NetworkUse), meanings["network"]))
    yield page("`network.nodes[]`:", typed_table(annotations(NodesNetwork), meanings["nodes_network"]))


def cluster_config(meanings: Mapping[str, Mapping[str, str]]) -> Iterator[str]:
    parts: dict[str, type[BaseModel]] = {
        "cluster": cluster_schema(),
        "slurm": SlurmSettings,
        "partition": PartitionSettings,
        "container": ContainerSettings,
        "binding": Binding,
        "install": InstallSettings,
    }
    titles = {"cluster": "", "partition": "`slurm.partitions.<name>`, each as in `slurm` where it is left out:"}
    yield page("## cluster_config.yaml", CLUSTER_CONFIG)
    for name, record in parts.items():
        title = titles.get(name, f"`{name}`:")
        yield page(title, typed_table(annotations(record), meanings[f"{name}_config"]))


def run_folder(plan: Plan) -> str:
    folder = RunFolder(Path("<experiment>"))
    files = {name: getattr(folder, name).name for name in FILES}
    attempt = folder.steps_of_attempt(1).name.replace("1", "<n>")
    return RUN_FOLDER.format(experiment=experiment_name(plan), steps_of_attempt=attempt, **files)


def job_row() -> dict[str, Any]:
    kinds = get_type_hints(Job)
    return {item.name: kinds[item.name] for item in fields(Job)} | {"name": str, "id": str}


def annotations(model: type[BaseModel]) -> dict[str, Any]:
    return {name: field.annotation for name, field in model.model_fields.items()}


def typed_table(kinds: Mapping[str, Any], meanings: Mapping[str, str]) -> str:
    check_complete(kinds, meanings)
    rows = [[f"`{key}`", type_text(kind), meanings[key]] for key, kind in kinds.items()]
    return table(["key", "type", "meaning"], rows)


def key_table(document: Mapping[str, Any], meanings: Mapping[str, str], schema: Schema | None) -> str:
    """With types if the document has a schema."""
    paths = list(key_paths(document, meanings))
    check_complete(paths, meanings)
    if schema is None:
        return table(["key", "meaning"], [[f"`{path}`", meanings[path]] for path in paths])
    rows = [[f"`{path}`", types_text(schema[path]), meanings[path]] for path in paths]
    return table(["key", "type", "meaning"], rows)


def check_complete(keys: Iterable[str], meanings: Mapping[str, str]) -> None:
    """Ends the program where a key has no meaning or a meaning no key."""
    if wrong := set(keys) ^ set(meanings):
        sys.exit(f"{FIELDS.name} and the code differ in: {', '.join(sorted(wrong))}")


def key_paths(document: Mapping[str, Any], meanings: Mapping[str, str], above: str = "") -> Iterator[str]:
    """Dotted keys; what is below a key that has a meaning of its own is left out."""
    for key, value in document.items():
        path = above + key
        if path in meanings:
            yield path
        elif isinstance(value, dict):
            yield from key_paths(value, meanings, f"{path}.")
        elif isinstance(value, list | tuple) and value and isinstance(value[0], dict):
            yield from key_paths(value[0], meanings, f"{path}[].")
        else:
            yield path


def exit_codes() -> str:
    members = (item for _, item in inspect.getmembers(errors, inspect.isclass))
    classes = [item for item in members if issubclass(item, errors.LlmbError) and item is not errors.LlmbError]
    rows = [(item.exit_code, (item.__doc__ or "").split(" (exit code")[0] + ".") for item in classes]
    return table(["code", "meaning"], sorted([(0, "Done."), *rows]))
