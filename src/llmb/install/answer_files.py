# SPDX-License-Identifier: Apache-2.0
"""Files of answers: of this installer, and the headless file of the reference suite's."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from llmb.catalogue.data_files import CatalogueError, read_data, read_file, schema_problems
from llmb.doc_pages import see
from llmb.errors import UsageError
from llmb.install.answers import NONE, Answers
from llmb.runs.folder import cannot_write
from llmb.secrets import holds_secret
from llmb.trust import check_owner

ADVICE = f"{see('install-on-a-cluster')}; 'llmb install --record FILE' writes such a file"
OF_REFERENCE = frozenset(
    ("venv_type", "install_path", "slurm", "install_method", "selected_workloads", "environment_vars")
)
"""Keys that only the reference suite's file has."""
OLD_NAMES = {"slurm_info": "slurm", "env_vars": "environment_vars"}
IGNORED = frozenset(("workload_selection_mode", "dev_mode"))
SAME = ("gpu_type", "node_architecture", "image_folder")
HEAD = "# Answers for 'llmb install --config FILE'; no secrets.\n"


def read_answers(path: Path, say: Callable[[str], None]) -> Answers:
    """The answers of a file of either form. Raises UsageError with all that is wrong in it, and for another user's."""
    check_owner(path)
    try:
        found = read_data(path)
        data = found if isinstance(found, dict) else {}  # the schema reports what is not a mapping
        if OF_REFERENCE & {*data} or {*OLD_NAMES} & {*data}:
            return _of_reference(path, data, say)
        return read_file(path, Answers, foreign=True)
    except CatalogueError as error:
        lines = "\n".join(f"  {problem}" for problem in error.problems)
        raise UsageError(f"the file of answers cannot be used:\n{lines}", do=ADVICE) from error


def write_answers(path: Path, answers: Answers) -> None:
    """Writes them so that only their user can read them. Raises EnvironmentProblem."""
    text = HEAD + yaml.safe_dump(answers.document(), sort_keys=False, allow_unicode=True)
    temporary = path.with_name(f".{path.name}.installing")
    try:
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
        temporary.replace(path)
    except OSError as error:
        raise cannot_write(path, error) from error


def _of_reference(path: Path, data: Mapping[str, Any], say: Callable[[str], None]) -> Answers:
    """Raises CatalogueError, UsageError."""
    if old := [f"{name} (now {new})" for name, new in OLD_NAMES.items() if name in data]:
        raise UsageError(f"old keys: {', '.join(old)}", where=str(path), do="rename them")
    slurm = data.get("slurm") or {}
    if not isinstance(slurm, dict):
        raise UsageError("slurm must be a mapping", where=str(path))
    known = OF_REFERENCE | IGNORED | {*SAME}
    if others := [str(key) for key in data if key not in known]:
        raise UsageError(f"unknown keys: {', '.join(others)}", where=str(path), choices=sorted(known))
    variables = _variables(path, data.get("environment_vars") or {}, say)
    found: dict[str, Any] = {name: data.get(name) for name in SAME}
    found |= {"path": data.get("install_path"), "environment": data.get("venv_type"), "variables": variables}
    found |= {"workloads": data.get("selected_workloads") or [], "scheduler": "slurm" if slurm else None}
    found |= {"prepare": {"slurm": "job", "local": "here"}.get(str(data.get("install_method")))}
    found |= {name: slurm.get(name) for name in ("account", "gpu_partition", "cpu_partition")}
    if "gpu_partition_gres" in slurm:
        gres = slurm["gpu_partition_gres"]
        found |= {"gpus_per_node": gres, "gpu_request": NONE if gres is None else "gpus-per-node"}
    say(
        f"{path} is a headless file of the reference suite's installer; 'llmb install --record FILE' writes its answers"
    )
    try:
        return Answers.model_validate({name: value for name, value in found.items() if value is not None})
    except ValidationError as error:
        raise CatalogueError(schema_problems(path, error)) from error


def _variables(path: Path, given: object, say: Callable[[str], None]) -> dict[str, str]:
    """Without secrets, which are named."""
    if not isinstance(given, dict) or any(value is None for value in given.values()):
        raise UsageError("environment_vars must be a mapping of names to values", where=str(path))
    texts = {str(name): str(value) for name, value in given.items()}
    secrets = [name for name, value in texts.items() if holds_secret(name, value)]
    for name in secrets:
        say(f"warning: {name} in {path} is left out: it is a secret; set it in the environment")
    return {name: value for name, value in texts.items() if name not in secrets}
