# SPDX-License-Identifier: Apache-2.0
"""Files of answers: of this installer, and the headless file of the reference suite's."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from llmb.catalogue.data_files import CatalogueError, read_data, read_file, schema_problems
from llmb.errors import UsageError, see
from llmb.install.answers import Answers, answers_schema
from llmb.install.state import put_file
from llmb.secrets import holds_secret
from llmb.trust import check_owner

ADVICE = f"{see('install-on-a-cluster')}; 'llmb install --record FILE' writes such a file"
HEAD = "# Answers for 'llmb install --config FILE'; no secrets.\n"
OWN_KEYS = frozenset(("venv_type", "install_path", "slurm", "install_method", "selected_workloads", "environment_vars"))
"""Keys that only this file has."""
OLD_KEYS = {"slurm_info": "slurm", "env_vars": "environment_vars"}
IGNORED_KEYS = frozenset(("workload_selection_mode", "dev_mode"))
SAME_KEYS = ("gpu_type", "node_architecture", "image_folder")


def read_answers(path: Path, say: Callable[[str], None]) -> Answers:
    """The answers of a file of either form. Raises UsageError with all that is wrong in it, and for another user's."""
    check_owner(path)
    try:
        data = read_data(path)
        if not isinstance(data, dict) or not _is_headless(data):
            return read_file(path, answers_schema(), foreign=True)
        found = _headless_answers(path, data, say)
        say(
            f"{path} is a headless file of the reference suite's installer; 'llmb install --record FILE' writes its "
            "answers"
        )
        return answers_schema().model_validate(found)
    except ValidationError as error:
        problems = tuple(schema_problems(path, error))
    except CatalogueError as error:
        problems = error.problems
    lines = "\n".join(f"  {problem}" for problem in problems)
    raise UsageError(f"the file of answers cannot be used:\n{lines}", do=ADVICE)


def write_answers(path: Path, answers: Answers) -> None:
    """Writes them so that only their user can read them. Raises EnvironmentProblem."""
    put_file(path, HEAD + yaml.safe_dump(answers.document(), sort_keys=False, allow_unicode=True), mode=0o600)


def _is_headless(data: Mapping[str, Any]) -> bool:
    """Whether it is the file by which the reference suite's installer works without a terminal."""
    return bool((OWN_KEYS | {*OLD_KEYS}) & {*data})


def _headless_answers(path: Path, data: Mapping[str, Any], say: Callable[[str], None]) -> dict[str, Any]:
    """The answers of ``llmb install``, by name, that the file ``path`` with ``data`` gives. Raises UsageError."""
    if old := [f"{name} (now {new})" for name, new in OLD_KEYS.items() if name in data]:
        raise UsageError(f"old keys: {', '.join(old)}", where=str(path), do="rename them")
    slurm = data.get("slurm") or {}
    if not isinstance(slurm, dict):
        raise UsageError("slurm must be a mapping", where=str(path))
    known = OWN_KEYS | IGNORED_KEYS | {*SAME_KEYS}
    if others := [str(key) for key in data if key not in known]:
        raise UsageError(f"unknown keys: {', '.join(others)}", where=str(path), choices=sorted(known))
    variables = _headless_variables(path, data.get("environment_vars") or {}, say)
    found: dict[str, Any] = {name: data.get(name) for name in SAME_KEYS}
    found |= {"path": data.get("install_path"), "environment": data.get("venv_type"), "variables": variables}
    found |= {"workloads": data.get("selected_workloads") or [], "scheduler": "slurm" if slurm else None}
    found |= {"prepare": {"slurm": "job", "local": "here"}.get(str(data.get("install_method")))}
    found |= {name: slurm.get(name) for name in ("account", "gpu_partition", "cpu_partition")}
    if "gpu_partition_gres" in slurm:
        gres = slurm["gpu_partition_gres"]
        found |= {"gpus_per_node": gres, "gpu_request": "none" if gres is None else "gpus-per-node"}
    return {name: value for name, value in found.items() if value is not None}


def _headless_variables(path: Path, given: object, say: Callable[[str], None]) -> dict[str, str]:
    """Without secrets, which are named."""
    if not isinstance(given, dict) or any(value is None for value in given.values()):
        raise UsageError("environment_vars must be a mapping of names to values", where=str(path))
    texts = {str(name): str(value) for name, value in given.items()}
    secrets = [name for name, value in texts.items() if holds_secret(name, value)]
    for name in secrets:
        say(f"warning: {name} in {path} is left out: it is a secret; set it in the environment")
    return {name: value for name, value in texts.items() if name not in secrets}
