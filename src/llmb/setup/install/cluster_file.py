# SPDX-License-Identifier: Apache-2.0
"""Reads and writes the cluster_config.yaml of an installation, and files of answers."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from llmb.base.errors import UsageError, see
from llmb.base.secrets import holds_secret
from llmb.base.trust import check_owner
from llmb.catalogue.data_files import CatalogueError, read_data, read_file, schema_problems
from llmb.launch.scheduler_lookup import UNNAMED, all_schedulers, cluster_schema, find_scheduler
from llmb.launch.scheduler_port import NONE
from llmb.launch.site.cluster_config import read_cluster_config, read_cluster_file
from llmb.launch.site.settings_edit import migrate
from llmb.runs.folder import CLUSTER_CONFIG, write_atomically, writing
from llmb.runs.record import LOCAL
from llmb.setup.install.answers import Answers, answers_schema
from llmb.setup.install.install_state import Journal, put_file
from llmb.setup.install.python_environment import python_of

ADVICE = f"{see('install')}; 'llmb install --record FILE' writes such a file"
ANSWERS_HEAD = "# Answers for 'llmb install --config FILE'; no secrets.\n"
NEW_KEYS = frozenset(("venv_type", "install_path", "slurm", "install_method", "selected_workloads", "environment_vars"))
"""Keys that exist only in a headless file of the reference suite's installer."""
OLD_KEYS = {"slurm_info": "slurm", "env_vars": "environment_vars"}
IGNORED_KEYS = frozenset(("workload_selection_mode", "dev_mode"))
SAME_KEYS = ("gpu_type", "node_architecture", "image_folder")


def read_answers(path: Path, say: Callable[[str], None]) -> Answers:
    """Read a file of answers, also the reference suite's headless file.

    Raise UsageError if it is unusable or another user's.
    """
    check_owner(path)
    try:
        data = read_data(path)
        if not isinstance(data, dict) or not (NEW_KEYS | {*OLD_KEYS}) & {*data}:
            return read_file(path, answers_schema(), foreign=True)
        answers = _headless_answers(path, data, say)
        say(
            f"{path} is a headless file of the reference suite's installer; 'llmb install --record FILE' saves its "
            "answers in llmb's format"
        )
        return answers_schema().model_validate(answers)
    except ValidationError as error:
        problems = tuple(schema_problems(path, error))
    except CatalogueError as error:
        problems = error.problems
    raise UsageError("\n  ".join(("the file of answers cannot be used:", *problems)), do=ADVICE)


def write_answers(path: Path, answers: Answers) -> None:
    """Write the answers to a file that only this user can read. Raise EnvironmentProblem if that fails."""
    text = ANSWERS_HEAD + yaml.safe_dump(answers.document(), sort_keys=False, allow_unicode=True)
    put_file(path, text, mode=0o600, do="pass another file with --record")


def _headless_answers(path: Path, data: Mapping[str, Any], say: Callable[[str], None]) -> dict[str, Any]:
    if old := [f"{name} (now {new})" for name, new in OLD_KEYS.items() if name in data]:
        raise UsageError(f"the file has old keys: {', '.join(old)}", where=str(path), do="rename these keys")
    slurm = data.get("slurm") or {}
    if not isinstance(slurm, dict):
        raise UsageError("slurm must map keys to values", where=str(path), do="indent its keys, without dashes")
    keys = NEW_KEYS | IGNORED_KEYS | {*SAME_KEYS}
    if others := [str(key) for key in data if key not in keys]:
        raise UsageError(f"the file has unknown keys: {', '.join(others)}", where=str(path), choices=sorted(keys))
    variables = _headless_variables(path, data.get("environment_vars") or {}, say)
    values: dict[str, Any] = {name: data.get(name) for name in SAME_KEYS}
    values |= {"path": data.get("install_path"), "environment": data.get("venv_type"), "variables": variables}
    values |= {"workloads": data.get("selected_workloads") or [], "scheduler": "slurm" if slurm else None}
    values |= {"prepare": {"slurm": "job", "local": "here"}.get(str(data.get("install_method")))}
    values |= {name: slurm.get(name) for name in ("account", "gpu_partition", "cpu_partition")}
    if "gpu_partition_gres" in slurm:
        gres = slurm["gpu_partition_gres"]
        values |= {"gpus_per_node": gres, "gpu_request": "none" if gres is None else "gpus-per-node"}
    return {name: value for name, value in values.items() if value is not None}


def _headless_variables(path: Path, variables: object, say: Callable[[str], None]) -> dict[str, str]:
    if not isinstance(variables, dict) or any(value is None for value in variables.values()):
        raise UsageError("environment_vars must map names to values other than null", where=str(path))
    texts = {str(name): str(value) for name, value in variables.items()}
    secrets = [name for name, value in texts.items() if holds_secret(name, value)]
    for name in secrets:
        say(f"warning: {name} in {path} is skipped: it is a secret; set it in the environment")
    return {name: value for name, value in texts.items() if name not in secrets}


HEAD = """\
# Written by 'llmb install' from its answers. Change what you like: a changed file is kept.
# All keys: the page "Files, JSON and exit codes" of llmb's documentation.
"""
COMMENTS = {
    "gpu_type": "for commands without --gpu-type",
    "python": "on the nodes; it has llmb and torch",
    "fabric": "network between nodes; see the catalogue's fabrics",
    "environment": "variables of every job; no secrets",
    "container": "what the workers run in",
    "reference_suite": "the documents' own software, by workload",
}
"""Comments by key of the file; each scheduler supplies the comments of its section."""
Section = Mapping[str, Any]


def settings(
    answers: Answers, root: Path, image: str | None, suite_environments: Mapping[str, str] | None = None
) -> Section:
    """Return the content of cluster_config.yaml, without empty values."""
    scheduler = find_scheduler(answers.scheduler or LOCAL)
    section = {
        "scheduler": scheduler.name if scheduler.name not in (LOCAL, UNNAMED) else None,
        "gpu_type": answers.gpu_type,
        "python": str(python_of(answers, root)),
        "fabric": answers.fabric,
        "environment": dict(answers.variables),
        scheduler.name: scheduler.section(answers, answers.gpus_per_node),
        "container": {"runtime": answers.container_runtime, "image": image} if image else {},
        "reference_suite": {"environments": dict(suite_environments)} if suite_environments else {},
    }
    return {key: value for key, value in section.items() if value not in (None, NONE, {})}


def answers_in(root: Path) -> Answers:
    """Return the answers in cluster_config.yaml, if it exists in ``root``. Raise UsageError if the file is invalid."""
    if not (root / CLUSTER_CONFIG).exists():
        return answers_schema()()
    config = read_cluster_config(root, cluster_schema())
    sections = config.model_dump(mode="json")
    values: dict[str, Any] = {}
    for scheduler in all_schedulers():
        if answers := scheduler.answers_in(sections.get(scheduler.name) or {}):
            values |= {"scheduler": scheduler.name, **answers}
    if config.scheduler:
        values["scheduler"] = config.scheduler
    install = config.install
    values |= {"gpu_type": config.gpu_type, "fabric": config.fabric, "node_architecture": install.node_architecture}
    values |= {"environment": install.environment, "image_folder": install.image_folder}
    if config.container.image:
        values |= {"container_runtime": config.container.runtime, "image": config.container.image}
    return answers_schema().model_validate({name: value for name, value in values.items() if value is not None})


def file_text(section: Section) -> str:
    """Format the content of cluster_config.yaml, with comments."""
    comments = dict(COMMENTS)
    for scheduler in all_schedulers():
        comments[scheduler.name] = "what jobs ask for"
        comments |= {f"{scheduler.name}.{key}": text for key, text in scheduler.comments.items()}
    return HEAD + "".join(f"{line}\n" for line in _lines(section, "", comments))


def _lines(section: Section, above: str, comments: Mapping[str, str], indent: str = "") -> Iterator[str]:
    for key, value in section.items():
        comment = f"  # {comments[above + key]}" if above + key in comments else ""
        if isinstance(value, dict):
            yield f"{indent}{_scalar(key)}:{comment}"
            yield from _lines(value, f"{above}{key}.", comments, indent + "  ")
        else:
            yield f"{indent}{_scalar(key)}: {_scalar(value)}{comment}"


def _scalar(value: object) -> str:
    text = yaml.safe_dump([value], default_flow_style=True, width=1 << 20, allow_unicode=True)
    return text.strip()[1:-1]


def is_settled(journal: Journal, section: Section) -> bool:
    """Return True if nothing is left to do: cluster_config.yaml is as requested, or the user has changed it."""
    path = journal.root / CLUSTER_CONFIG
    if not path.exists():
        return False
    if journal.entry(CLUSTER_CONFIG):
        return not journal.is_unchanged(CLUSTER_CONFIG) or path.read_text() == file_text(section)
    return not changes(journal.root, section)


def changes(root: Path, section: Section) -> list[str]:
    """Describe how the existing cluster_config.yaml differs from ``section``."""
    there = read_cluster_config(root, cluster_schema()).model_dump(mode="json")
    return [f"{name} is {has!r}, not {value!r}" for name, has, value in _differences(there, section)]


def _differences(there: Section, section: Section, above: str = "") -> Iterator[tuple[str, Any, Any]]:
    for key, value in section.items():
        has = there.get(key)
        if isinstance(value, dict):
            yield from _differences(has if isinstance(has, dict) else {}, value, f"{above}{key}.")
        elif has != value:
            yield f"{above}{key}", has, value


def check_settings(journal: Journal, section: Section) -> None:
    """Raise UsageError if a cluster_config.yaml from before the installation has different settings."""
    path = journal.root / CLUSTER_CONFIG
    if not path.exists() or journal.entry(CLUSTER_CONFIG):
        return
    there = yaml.safe_load(path.read_bytes()) or {}
    if odd := changes(journal.root, {key: value for key, value in section.items() if key in there}):
        lines = "\n".join(f"  {line}" for line in odd)
        do = "change the file or the answers, or add --keep-settings to keep the file as it is"
        raise UsageError(f"{CLUSTER_CONFIG} contradicts the answers:\n{lines}", where=str(path), do=do)


def user_changes(journal: Journal, section: Section) -> list[str]:
    """Describe how cluster_config.yaml differs from ``section`` if the user changed it after the installer wrote it."""
    if not journal.entry(CLUSTER_CONFIG) or journal.is_unchanged(CLUSTER_CONFIG):
        return []
    return changes(journal.root, section) if (journal.root / CLUSTER_CONFIG).exists() else []


def write_settings(journal: Journal, section: Section, *, keep: bool) -> str:
    """Write or complete cluster_config.yaml, or ``keep`` the user's; return the change as text.

    Raise UsageError or EnvironmentProblem.
    """
    path = journal.root / CLUSTER_CONFIG
    if not path.exists() or journal.is_unchanged(CLUSTER_CONFIG):
        journal.file(CLUSTER_CONFIG, file_text(section))
        return f"{CLUSTER_CONFIG} written"
    if keep:
        return f"{CLUSTER_CONFIG} is kept as it is"
    file = read_cluster_file(path, cluster_schema())
    if file.form:  # otherwise it would mix both forms
        migrate(file)
    with writing(path):
        text = path.read_text()
    check_settings(journal, section)
    there = yaml.safe_load(text) or {}
    new = {key: value for key, value in section.items() if key not in there}
    added = file_text(new).removeprefix(HEAD)
    start = text if text.endswith("\n") or not text else f"{text}\n"
    with writing(path):
        write_atomically(path, f"{start}\n# Added by 'llmb install':\n{added}")
    return f"{', '.join(new)} added to {CLUSTER_CONFIG}"
