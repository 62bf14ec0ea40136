# SPDX-License-Identifier: Apache-2.0
"""How a job asks for its GPUs: by the cluster's settings, unless the user's own flags do. Pure."""

from llmb.errors import UsageError
from llmb.jobspec.options import Flags
from llmb.jobspec.placement import Placement
from llmb.schedulers.slurm.flags import GPU_FLAGS, LEFT_OUT, asked
from llmb.schedulers.slurm.settings import SlurmSettings


def gpu_request(settings: SlurmSettings, placement: Placement, chosen: Flags) -> Flags:
    """The GPU flags of a job with ``chosen`` flags. Raises UsageError for fewer GPUs than the job has processes."""
    own = {name: chosen[name] for name in GPU_FLAGS if name in chosen}
    given = asked(own)
    counts = [count for name, value in given.items() for count in _gpus(name, value or "")]
    wanted = placement.processes_per_node
    if counts and min(counts) < wanted:
        flags = " ".join(f"{name}={value}" for name, value in given.items())
        do = "request more GPUs, or give a smaller --gpus-per-node"
        raise UsageError(f"{flags} is less than the job's {wanted} GPUs per node", do=do)
    if counts or LEFT_OUT in own.values():
        return given
    default = _default(settings, placement.processes_per_node)
    return {**given, **default, **_both(given.get("gres"), default.get("gres"))}


def _default(settings: SlurmSettings, count: int) -> Flags:
    if settings.gpu_request == "none":
        return {}
    kind = f"{settings.gres_type}:" if settings.gres_type else ""
    if settings.gpu_request == "gres":
        return {"gres": f"gpu:{kind}{count}"}
    return {"gpus-per-node": f"{kind}{count}"}


def _both(other: str | None, gpus: str | None) -> Flags:
    """Generic resources besides GPUs, and the GPUs."""
    return {"gres": f"{other},{gpus}"} if other and gpus else {}


def _gpus(name: str, value: str) -> list[int]:
    """The numbers of GPUs in a flag's value, such as ``h100:8`` or, of ``gres``, ``gpu:h100:8,nvme``."""
    items = value.split(",") if name == "gres" else [f"gpu:{value}"]
    parts = [item.split("(")[0].split(":") for item in items]
    return [int(last) if (last := part[-1]).isdecimal() else 1 for part in parts if part[0] == "gpu"]
