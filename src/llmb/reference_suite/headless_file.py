# SPDX-License-Identifier: Apache-2.0
"""The file by which the reference suite's installer works without a terminal."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from llmb.errors import UsageError
from llmb.secrets import holds_secret

OWN_KEYS = frozenset(("venv_type", "install_path", "slurm", "install_method", "selected_workloads", "environment_vars"))
"""Keys that only this file has."""
OLD_NAMES = {"slurm_info": "slurm", "env_vars": "environment_vars"}
IGNORED = frozenset(("workload_selection_mode", "dev_mode"))
SAME = ("gpu_type", "node_architecture", "image_folder")


def is_headless_file(data: Mapping[str, Any]) -> bool:
    return bool((OWN_KEYS | {*OLD_NAMES}) & {*data})


def headless_answers(path: Path, data: Mapping[str, Any], say: Callable[[str], None]) -> dict[str, Any]:
    """The answers of ``llmb install``, by name, that the file ``path`` with ``data`` gives. Raises UsageError."""
    if old := [f"{name} (now {new})" for name, new in OLD_NAMES.items() if name in data]:
        raise UsageError(f"old keys: {', '.join(old)}", where=str(path), do="rename them")
    slurm = data.get("slurm") or {}
    if not isinstance(slurm, dict):
        raise UsageError("slurm must be a mapping", where=str(path))
    known = OWN_KEYS | IGNORED | {*SAME}
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
        found |= {"gpus_per_node": gres, "gpu_request": "none" if gres is None else "gpus-per-node"}
    return {name: value for name, value in found.items() if value is not None}


def _variables(path: Path, given: object, say: Callable[[str], None]) -> dict[str, str]:
    """Without secrets, which are named."""
    if not isinstance(given, dict) or any(value is None for value in given.values()):
        raise UsageError("environment_vars must be a mapping of names to values", where=str(path))
    texts = {str(name): str(value) for name, value in given.items()}
    secrets = [name for name, value in texts.items() if holds_secret(name, value)]
    for name in secrets:
        say(f"warning: {name} in {path} is left out: it is a secret; set it in the environment")
    return {name: value for name, value in texts.items() if name not in secrets}
