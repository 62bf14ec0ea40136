# SPDX-License-Identifier: Apache-2.0
"""Reads the configuration of a run without a record from its log's beginning and path; ``release`` is the reference
suite's.
"""

import hashlib
import re
from collections.abc import Mapping
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from llmb.catalogue.records import MIG, gpu_type_of
from llmb.readers.logs.formats.format import Value
from llmb.readers.logs.formats.torchtitan import MESH, layout_of

if TYPE_CHECKING:
    from llmb.catalogue.published import Document
    from llmb.catalogue.records import Gpu

_ARGUMENTS = {
    b"world_size": "gpus",
    b"tensor_model_parallel_size": "tp",
    b"pipeline_model_parallel_size": "pp",
    b"virtual_pipeline_model_parallel_size": "vp",
    b"context_parallel_size": "cp",
    b"expert_model_parallel_size": "ep",
    b"expert_tensor_parallel_size": "etp",
    b"micro_batch_size": "mbs",
    b"global_batch_size": "gbs",
    b"seq_length": "seq_len",
    b"num_layers": "layers",
}
"""The layout's names of arguments that Megatron and derived programs print when a run starts."""
_ARGUMENT = re.compile(rb"(?<!\w)(\w{1,40}) ?(?:[:=]|\.{2,60}) ?(\d{1,9})(?=[\s,|}]|\Z)")
_FP8 = re.compile(rb"(?<!\w)fp8 ?(?:[:=]|\.{2,60}) ?['\"]?(?:e4m3|hybrid)(?!\w)")
_MXFP8 = re.compile(rb"(?<!\w)fp8_recipe ?(?:[:=]|\.{2,60}) ?['\"]?mxfp8(?!\w)")
_ARGUMENTS_SIGN, _PARAMETER_SIGN, _GPU_SIGN = b"parallel_size", b"Config param ", b"NVIDIA "
"""Strings in every log that the patterns may match; searching for a string takes a tenth of the time."""
_PARAMETER = re.compile(rb"Config param (model_name|max_target_length): (\S{1,80})")
_GPU = re.compile(
    rb"\bNVIDIA (?P<chip>G?[ABHL]\d{2,3}S?)"
    rb"(?:[ -](?:PCI[eE]|NVL\d{0,2}|SXM\d?|CNX|\d{2,3}GB|HBM\d\w?|MIG [\w.+]{1,20})){0,5}(?!\w)"
)
"""Matches the name of a GPU, as the driver and CUDA print it."""
_SLICES = re.compile(rb"[\r\n] {1,9}MIG {1,9}[\w.+]{1,20} {1,9}Device {1,9}\d")
"""Matches a MIG device in the output of ``nvidia-smi -L``."""

_EXPERIMENT = re.compile(
    r"(?<![a-z])(?P<workload>(?:pretrain|finetune|sft|lora)_[a-z][a-z0-9.-]*?(?:_[a-z0-9][a-z0-9.-]*?)*?)"
    r"_(?P<size>\d+(?:\.\d+)?[bmt](?:[-_]?a\d+b)?|\d+x\d+b|e\d+|v\d(?:_flash)?|k\d|nano|super|ultra|lightning)"
    r"(?=_|\.out|$)"
)
"""Some of Megatron-Bridge's names have a version or a word instead of a size."""
_DTYPE = re.compile(r"_(bf16|fp8|fp32|nvfp4|mxfp8)(?:_(cs|ds|mx|sc|ss))?(?=_|\.|$)")
_SCALINGS = {"cs": "current", "ds": "delayed"}
_SCALE = re.compile(r"_(?:bf16|fp8|fp32|nvfp4|mxfp8)(?:_(?:cs|ds|mx|sc|ss))?_(?:gpus)?(\d{1,6})(?=_|\.|$)")
_NAMED_SIZE = re.compile(r"_(gpus|etp|tp|pp|vp|cp|ep|mbs|gbs|seq|layers)(\d{1,7}|None)(?=_|\.|$)")
_SIZE_NAMED = re.compile(r"_(\d{1,7})(mbs|gbs|nodes)(?=_|\.|$)")
_NAMED_GPU = re.compile(
    r"_(vr200|gb300|gb200|b300|b200|h200|h200-nvl|h100|h100-nvl|h100-pcie|a100|mi300x|mi325x|mi355x)(?=_|\.|$)"
)
_FOLDERS_ABOVE = 3
_RESULTS = re.compile(
    r"/results/(?P<release>\d\d\.\d\d)[^/]*/(?P<dtype>bf16|fp8)/(?P<size>\d+[bm])/(?P<gpus>\d{1,6})"
    r"/log-nemo_(?P<model>[^/]+?)_(?P=size)_(?P=gpus)_\d+\.out(?:\.gz)?\Z"
)
"""The path of a log of releases up to 25.03: ``results/24.11/bf16/405b/576/log-nemo_llama3.1_405b_576_933609.out``."""
_BARE = re.compile(r"_(?:bf16|fp8)_\d{1,6}(?=_(?:nsys|nccltrace)(?:_|\.|$)|_\d+(?:_\d+)?(?:\.|$)|\.|$)")
"""The end of a name in release 25.04, which has a number of GPUs but no layout."""
BARE_RELEASE = "25.04"
_FACT = re.compile(rb"(?<![\w/.-])([A-Za-z_]\w{1,40})\"? ?(?:[:=]|\.{2,60}) ?\"?([\w.+-]{1,60})(?=[\s,|}\")]|\Z)")
"""An argument of any program, as printed before the first step."""
_OF_ONE_RUN = re.compile(
    rb"seed|rank|port|pid|host|addr|path|dir|file|url|uuid|save|load|log|wandb|tensorboard|time|date|job|run|exp_|elapsed"
    rb"|took",
    re.IGNORECASE,
)
"""Occurs in the names of arguments whose values differ between repeats of a run."""
ARGUMENTS = "arguments.digest"
"""Key of a digest of the arguments that were printed before the first step."""
INFERRED_RELEASE = "release.inferred"
"""Key that is true if the release was inferred from the form of the experiment's name."""


def configuration_of(head: bytes, path: Path | None, first_step: int = -1) -> dict[str, Value]:
    """Return the configuration of a run whose log begins with ``head``; ``first_step`` is its first step line's
    position, or -1.
    """
    header = head[:first_step] if first_step >= 0 else head
    from_head = _from_head(head) | (sizes_in(header) or sizes_in(head))
    values = {**(_from_path(path.absolute()) if path else {}), **from_head}
    if "workload" not in values and any(key.startswith("layout.") for key in from_head):
        facts = sorted({pair for pair in _FACT.findall(header) if not _OF_ONE_RUN.search(pair[0])})
        values[ARGUMENTS] = hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
    return values


def sizes_in(text: bytes) -> dict[str, int]:
    """Return the sizes of the layout in ``text``, from Megatron's arguments or torchtitan's header."""
    values: dict[str, int] = {}
    if _ARGUMENTS_SIGN in text:
        for name, value in _ARGUMENT.findall(text):
            if name in _ARGUMENTS:
                values.setdefault(f"layout.{_ARGUMENTS[name]}", int(value))
    if MESH in text:
        values |= {f"layout.{name}": size for name, size in layout_of(text).items()}
    return values


def _from_head(head: bytes) -> dict[str, Value]:
    values: dict[str, Value] = {}
    for name, value in _PARAMETER.findall(head) if _PARAMETER_SIGN in head else ():
        if name == b"model_name":
            values["workload"] = value.decode("utf-8", "replace")
        elif value.isdigit():
            values["layout.seq_len"] = int(value)
    if _ARGUMENTS_SIGN in head and _FP8.search(head):
        values["dtype"] = "mxfp8" if _MXFP8.search(head) else "fp8"
    gpus = {gpu[0]: gpu for gpu in _GPU.finditer(head)} if _GPU_SIGN in head else {}
    if kinds := {kind for gpu in gpus.values() if (kind := _gpu_type(gpu, head))}:
        values["gpu_type"] = " and ".join(sorted(kinds))
    return values


def _gpu_type(gpu: "re.Match[bytes]", head: bytes) -> str | None:
    gpus, name, chip = _gpus(), gpu[0].decode(), gpu["chip"].decode()
    name += MIG.rstrip() if _SLICES.search(head) else ""
    is_bare = name.endswith(f" {chip}") and chip.lower() in gpus
    return gpu_type_of(name, gpus.values()) or (None if is_bare else name)


@cache
def _gpus() -> "Mapping[str, Gpu]":
    from llmb.catalogue.catalogue import Catalogue  # takes longer to load than to read a hundred logs

    return Catalogue().gpus


@lru_cache(maxsize=1)
def _from_path(path: Path) -> Mapping[str, Value]:
    if "/results/" in (text := str(path)) and (match := _RESULTS.search(text)):
        groups = match.groupdict()
        values: dict[str, Value] = {key: groups[key] for key in ("size", "dtype", "release")}
        return {"workload": f"pretrain_{groups['model']}", "layout.gpus": int(groups["gpus"]), **values}
    for name in path.parts[: -2 - _FOLDERS_ABOVE : -1]:
        if values := experiment_configuration(name):
            return values
    return {}


def document_of_log(path: Path) -> "Document | None":
    """Return the reference document that a log's path identifies; None if none or several match."""
    values = _from_path(path.absolute())
    return _document(f"{values['workload']}_{values['size']}", str(values.get("release", ""))) if values else None


@cache
def _document(experiment: str, release: str) -> "Document | None":
    from llmb.catalogue.catalogue import Catalogue  # takes longer to load than to read a hundred logs

    fitting = [
        one
        for one in Catalogue().documents.values()
        if any(f"{experiment}_".startswith(f"{begin}_") for begin in one.experiments)
        and (one.release == release or (not release and one.release > BARE_RELEASE))
    ]
    return fitting[0] if len(fitting) == 1 else None


def experiment_configuration(name: str) -> dict[str, Value]:
    """Parse a name such as ``pretrain_llama3.1_8b_bf16_gpus8_tp1_pp1_cp2_vp1_mbs1_gbs128``; return {} for others."""
    experiment = _EXPERIMENT.search(name)
    if not experiment:
        return {}
    values: dict[str, Value] = {"workload": experiment["workload"], "size": experiment["size"]}
    rest = name[experiment.end() :]
    if _BARE.match(rest):
        values |= {"release": BARE_RELEASE, INFERRED_RELEASE: True}
    if dtype := _DTYPE.search(rest):
        values["dtype"] = "mxfp8" if dtype[2] == "mx" else dtype[1]
        if dtype[2] in _SCALINGS:
            values["fp8_recipe"] = _SCALINGS[dtype[2]]
    if gpu := _NAMED_GPU.search(rest):
        values["gpu_type"] = gpu[1]
    if scale := _SCALE.search(rest):
        values["layout.gpus"] = int(scale[1])
    for key, value in _NAMED_SIZE.findall(rest):
        values[f"layout.{'seq_len' if key == 'seq' else key}"] = 1 if value == "None" else int(value)
    for value, key in _SIZE_NAMED.findall(rest):
        values["nodes" if key == "nodes" else f"layout.{key}"] = int(value)
    return values
