# SPDX-License-Identifier: Apache-2.0
"""cluster_config.yaml as an installation writes it, and a file that was there before."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from llmb.errors import UsageError
from llmb.install.answers import Answers, answers_schema
from llmb.install.environment import python_of
from llmb.install.state import Journal
from llmb.runs.folder import CLUSTER_CONFIG, write_atomically, writing
from llmb.schedulers.installer import NONE
from llmb.schedulers.lookup import LOCAL, UNNAMED, all_schedulers, cluster_schema, find_scheduler
from llmb.site.cluster_config import read_cluster_config, read_cluster_file
from llmb.site.settings_edit import migrate

HEAD = """\
# Written by 'llmb install' from its answers. Change what you like: a changed file is kept.
# All keys: the page "Files, JSON and exit codes" of llmb's documentation.
"""
COMMENTS = {
    "gpu_type": "if a command names none",
    "python": "on the nodes; it has llmb and torch",
    "fabric": "network between nodes; see the catalogue's fabrics",
    "environment": "variables of every job; no secrets",
    "container": "what the workers run in",
    "reference_suite": "the documents' own software, by workload",
}
"""By key of the file; a scheduler has those of its own section."""
Section = Mapping[str, Any]


def settings(
    answers: Answers, root: Path, image: str | None, suite_environments: Mapping[str, str] | None = None
) -> Section:
    """The content of the file; what has no value is left out. Pure."""
    scheduler = find_scheduler(answers.scheduler or LOCAL)
    found = {
        "scheduler": scheduler.name if scheduler.name not in (LOCAL, UNNAMED) else None,
        "gpu_type": answers.gpu_type,
        "python": str(python_of(answers, root)),
        "fabric": answers.fabric,
        "environment": dict(answers.variables),
        scheduler.name: scheduler.section(answers, answers.gpus_per_node),
        "container": {"runtime": answers.container_runtime, "image": image} if image else {},
        "reference_suite": {"environments": dict(suite_environments)} if suite_environments else {},
    }
    return {key: value for key, value in found.items() if value not in (None, NONE, {})}


def answers_in(root: Path) -> Answers:
    """The answers that a cluster_config.yaml below ``root`` gives. Raises UsageError if it cannot be used."""
    if not (root / CLUSTER_CONFIG).exists():
        return answers_schema()()
    config = read_cluster_config(root, cluster_schema())
    sections = config.model_dump(mode="json")
    found: dict[str, Any] = {}
    for scheduler in all_schedulers():
        if given := scheduler.answers_in(sections.get(scheduler.name) or {}):
            found |= {"scheduler": scheduler.name, **given}
    if config.scheduler:
        found["scheduler"] = config.scheduler
    own = config.install
    found |= {"gpu_type": config.gpu_type, "fabric": config.fabric, "node_architecture": own.node_architecture}
    found |= {"environment": own.environment, "image_folder": own.image_folder}
    if config.container.image:
        found |= {"container_runtime": config.container.runtime, "image": config.container.image}
    return answers_schema().model_validate({name: value for name, value in found.items() if value is not None})


def file_text(found: Section) -> str:
    """The file, with comments. Pure."""
    comments = dict(COMMENTS)
    for scheduler in all_schedulers():
        comments[scheduler.name] = "what jobs ask for"
        comments |= {f"{scheduler.name}.{key}": text for key, text in scheduler.comments.items()}
    return HEAD + "".join(f"{line}\n" for line in _lines(found, "", comments))


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


def is_settled(journal: Journal, found: Section) -> bool:
    """Whether nothing is to be done: the file says what is wanted, or its user changed what was written."""
    path = journal.root / CLUSTER_CONFIG
    if not path.exists():
        return False
    if journal.made(CLUSTER_CONFIG):
        return not journal.is_own(CLUSTER_CONFIG) or path.read_text() == file_text(found)
    return not changes(journal.root, found)


def changes(root: Path, found: Section) -> list[str]:
    """In words, what the file there says otherwise."""
    there = read_cluster_config(root, cluster_schema()).model_dump(mode="json")
    return [f"{name} is {has!r}, not {value!r}" for name, has, value in _differences(there, found)]


def _differences(there: Section, wanted: Section, above: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Each key that is wanted with another value than it has there: key, value there, value wanted."""
    for key, value in wanted.items():
        has = there.get(key)
        if isinstance(value, dict):
            yield from _differences(has if isinstance(has, dict) else {}, value, f"{above}{key}.")
        elif has != value:
            yield f"{above}{key}", has, value


def check_settings(journal: Journal, found: Section) -> None:
    """Raises UsageError if a file that was there before says something else."""
    path = journal.root / CLUSTER_CONFIG
    if not path.exists() or journal.made(CLUSTER_CONFIG):
        return
    there = yaml.safe_load(path.read_bytes()) or {}
    if odd := changes(journal.root, {key: value for key, value in found.items() if key in there}):
        lines = "\n".join(f"  {line}" for line in odd)
        do = "change it, give other answers, or add --keep-settings, which keeps it as it is"
        raise UsageError(f"{CLUSTER_CONFIG} is there, and not from this installer:\n{lines}", where=str(path), do=do)


def kept_changes(journal: Journal, found: Section) -> list[str]:
    """In words, what the user changed in the file that was written."""
    if not journal.made(CLUSTER_CONFIG) or journal.is_own(CLUSTER_CONFIG):
        return []
    return changes(journal.root, found) if (journal.root / CLUSTER_CONFIG).exists() else []


def write_settings(journal: Journal, found: Section, *, keep: bool) -> str:
    """Writes the file, or completes one that it did not write; returns what was done, in words.

    Raises UsageError if such a file says something else; with ``keep`` it is left as it is.
    """
    path = journal.root / CLUSTER_CONFIG
    if not path.exists() or journal.is_own(CLUSTER_CONFIG):
        journal.file(CLUSTER_CONFIG, file_text(found))
        return f"{CLUSTER_CONFIG} written"
    if keep:
        return f"{CLUSTER_CONFIG} is kept as it is"
    file = read_cluster_file(path, cluster_schema())
    if file.form:  # what llmb adds would make a mixture of it
        migrate(file)
    with writing(path):
        text = path.read_text()
    check_settings(journal, found)
    there = yaml.safe_load(text) or {}
    new = {key: value for key, value in found.items() if key not in there}
    added = file_text(new).removeprefix(HEAD)
    start = text if text.endswith("\n") or not text else f"{text}\n"
    with writing(path):
        write_atomically(path, f"{start}\n# Added by 'llmb install':\n{added}")
    return f"{', '.join(new)} added to {CLUSTER_CONFIG}"
