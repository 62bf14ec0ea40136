# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: ANN401 (stand-ins are of any type)
"""Read the recipes of Megatron-Bridge's performance script at each version of the catalogue from a clone of its
repository, and write ``megatron_bridge_recipes.csv`` and ``megatron_bridge_variables.csv``.

The script itself builds each configuration, up to the call that would train. Only the modules that change it are real;
stand-ins replace all others. A cell is empty if these modules leave the setting to a default elsewhere.

    .venv/bin/python scripts/read_bridge_recipes.py CLONE [FOLDER]
"""

import csv
import io
import json
import re
import subprocess
import sys
import tarfile
import tempfile
import types
from collections.abc import Iterator, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from itertools import chain, product
from pathlib import Path
from typing import Any

from yaml import safe_load

DATA = Path(__file__).parents[1] / "src/llmb/catalogue/data"
TREES = ("scripts", "src/megatron/bridge")
GPUS = {"h100": (9, "NVIDIA H100"), "b200": (10, "NVIDIA B200"), "b300": (10, "NVIDIA B300"),
        "gb200": (10, "NVIDIA GB200"), "gb300": (10, "NVIDIA GB300")}  # fmt: skip
DTYPES = {"bf16": "bf16", "fp8": "fp8_cs", "mxfp8": "fp8_mx", "nvfp4": "nvfp4"}
SIZES = {"tp": "tensor_model", "pp": "pipeline_model", "cp": "context", "vp": "virtual_pipeline_model",
         "ep": "expert_model", "etp": "expert_tensor"}  # fmt: skip
BRIDGE = "megatron.bridge"
FAMILIES = ("common", "utils", "deepseek", "kimi", "llama", "qwen", "gpt_oss", "nemotronh")
REAL = (
    f"{BRIDGE}.perf_recipes",
    *(f"{BRIDGE}.recipes.{name}" for name in FAMILIES),
    *(f"{BRIDGE}.{name}" for name in ("training.flex_dispatcher_backend", "training.utils.moe_token", "utils.cuda_g")),
)
"""The beginnings of the names of modules that set a configuration."""
NOT_REAL = f"{BRIDGE}.recipes.qwen_"
STANDING_IN = ("megatron", "torch", "nemo_run", "omegaconf", "transformers", "transformer_engine", "modelopt")
GDR = {"NCCL_NET_GDR_LEVEL": "PHB", "NCCL_NET_GDR_C2C": "1"}
"""The variables that its launcher sets on GB200 (slurm_executor in utils/executors.py)."""
NONE = ("cuda_graph_modules", "cuda_graph_scope")
"""Settings whose default the script asks for."""


class _OfClasses(type):
    """Attributes and members of stand-in classes, such as those of an enumeration."""

    __dataclass_fields__: dict[str, Any] = {}  # noqa: RUF012
    __dataclass_params__ = types.SimpleNamespace(frozen=False)

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return StandIn(name=name)

    def __getitem__(cls, key: Any) -> Any:
        return key if isinstance(key, str) else cls


class StandIn(metaclass=_OfClasses):
    """Any object that is not known: it keeps what is set, and everything else about it is false and unknown, too."""

    def __init__(self, *_: Any, **values: Any) -> None:
        self.__dict__.update(values)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = self.__dict__[name] = None if name in NONE else StandIn()
        return value

    def __call__(self, *_: Any, **values: Any) -> "StandIn":
        return StandIn(**values)

    def __bool__(self) -> bool:
        return False

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __getitem__(self, _: Any) -> "StandIn":
        return StandIn()

    def _is_not(self, _: Any) -> bool:
        return False

    def _combined(self, _: Any) -> "StandIn":
        return StandIn()

    __lt__ = __gt__ = __le__ = __ge__ = __contains__ = _is_not
    __mul__ = __rmul__ = __add__ = __radd__ = __sub__ = __truediv__ = __or__ = __ror__ = _combined


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name == "__all__":
            return ["CommOverlapConfig"]
        if name.startswith("__"):
            raise AttributeError(name)
        value = type(name, (StandIn,), {}) if name[:1].isupper() else StandIn()
        setattr(self, name, value)
        return value


class Finder(MetaPathFinder, Loader):
    """Finds the real modules below ``root``, and stand-ins for the others."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def find_spec(self, fullname: str, *_: Any) -> ModuleSpec | None:
        if fullname.startswith(REAL) and not fullname.startswith(NOT_REAL):
            place = self.root.joinpath("src", *fullname.split("."))
            if (package := place / "__init__.py").exists():
                return spec_from_file_location(fullname, package, submodule_search_locations=[str(place)])
            if (module := place.with_suffix(".py")).exists():
                return spec_from_file_location(fullname, module)
        stands_in = fullname.split(".")[0] in STANDING_IN
        return ModuleSpec(fullname, self, is_package=True) if stands_in else None

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__path__ = []


def listed(root: Path, recipe: str, task: str) -> Iterator[tuple[str, str, str, int | None]]:
    """Yield the family, GPU type, dtype and number of GPUs of each recipe; until v0.5 names have no number."""
    workloads = sorted(root.glob("scripts/performance/configs/*/*_workload_base_configs.py"))
    for gpu, (dtype, theirs) in product(GPUS, DTYPES.items()):
        name = re.compile(f"^{recipe}_{task}_config_{gpu}_{theirs}(_v[12])? = ", re.MULTILINE | re.IGNORECASE)
        yield from ((path.parent.name, gpu, dtype, None) for path in workloads if name.search(path.read_text()))
        flat = re.compile(rf"^def {recipe}_{task}_(\d+)gpu_{gpu}_{theirs.replace('_', '')}_config\(", re.MULTILINE)
        for path in sorted(root.glob(f"src/megatron/bridge/perf_recipes/*/{gpu}/*.py")):
            yield from ((path.parts[-3], gpu, dtype, int(gpus)) for gpus in flat.findall(path.read_text()))


class Script:
    """The performance script below ``root``."""

    def __init__(self, root: Path) -> None:
        sys.meta_path.insert(0, Finder(root))
        sys.path.insert(0, str(root / "scripts/performance"))
        self.trained: list[Any] = []
        import_module(f"{BRIDGE}.training.pretrain").pretrain = lambda config, **_: self.trained.append(config)  # type: ignore[attr-defined]
        self.script, self.utils = import_module("run_script"), import_module("utils.utils")
        self.is_flat = hasattr(self.utils, "flat_perf_recipe_names")
        """True if recipes are functions, which also set their variables, since v0.6."""
        self.device: tuple[int, str] = GPUS["h100"]
        import_module("torch").cuda.get_device_properties = self._device

    def _device(self, _: int) -> types.SimpleNamespace:
        return types.SimpleNamespace(major=self.device[0], name=self.device[1])

    def usual_gpus(self, family: str, recipe: str, task: str, gpu: str, dtype: str) -> int:
        """Return the number of GPUs of the recipe that trains on any number without a recipe of its own."""
        variant = {} if self.is_flat else {"config_variant": "v2"}
        return int(self.utils.get_workload_base_config(family, recipe, gpu, dtype, task, **variant).num_gpus)

    def configuration(self, **arguments: str | int) -> Any:
        """Return what the script would train with."""
        return self.configured([*chain.from_iterable((f"--{name}", str(value)) for name, value in arguments.items())])

    def configured(self, words: Sequence[str]) -> Any:
        self.device = GPUS[words[words.index("--gpu") + 1]]
        sys.argv = ["run_script.py", *words]
        self.script.main()
        return self.trained.pop()

    def variables(self, family: str, recipe: str, task: str, gpu: str, dtype: str) -> dict[str, str]:
        """Return the variables that its launcher sets in the container, but for those of an online hub."""
        executors, plugins = import_module("utils.executors"), import_module("perf_plugins")
        own: dict[str, str] = getattr(executors, "PERF_ENV_VARS", None) or executors.OFFLINE_BENCHMARK_ENV_VARS
        variables = {name: value for name, value in own.items() if name != "HF_HUB_OFFLINE"}
        variables |= GDR if gpu == "gb200" else {}
        if self.is_flat:
            return variables
        of = {"model_family_name": family, "model_recipe_name": recipe, "train_task": task, "gpu": gpu}
        sizes = {f"{size}_size": None for size in ("tp", "pp", "cp", "ep")}
        given = {"compute_dtype": dtype, "config_variant": "v2", "moe_a2a_overlap": None, "enable_manual_gc": False}
        plugins.PerfEnvPlugin(**of, **sizes, **given).setup(StandIn(), types.SimpleNamespace(env_vars=variables))
        return variables


def cells(configuration: Any) -> dict[str, Any]:
    """Return a configuration as cells of the file."""
    model, train, ddp = configuration.model, configuration.train, configuration.ddp
    sizes = {name: getattr(model, f"{theirs}_parallel_size") for name, theirs in SIZES.items()}
    values = {
        "seq": model.seq_length,
        "gbs": train.global_batch_size,
        "mbs": train.micro_batch_size,
        **sizes,
        "fsdp": ddp.use_megatron_fsdp or None,
        "cuda_graphs": _graphs(model),
        "recompute": _recompute(model),
        "dispatcher": _dispatcher(model),
        "expert_rows": {True: "even", False: "as routed"}.get(model.moe_router_force_load_balancing),
    }  # fmt: skip
    return {name: "" if isinstance(value, StandIn) or value is None else value for name, value in values.items()}


def _dispatcher(model: Any) -> str | None:
    if isinstance(model.moe_router_force_load_balancing, StandIn):
        return None  # a model without experts, too, has a default
    kind = model.moe_token_dispatcher_type
    return str(model.moe_flex_dispatcher_backend if kind == "flex" else kind)


def _graphs(model: Any) -> str | None:
    parts = [str(getattr(part, "name", part)) for part in model.cuda_graph_modules or model.cuda_graph_scope or ()]
    if model.cuda_graph_impl == "full_iteration":
        return "full iteration"
    if model.cuda_graph_impl == "none" and "full_iteration" not in parts:
        return "none"
    return " ".join(parts) if model.cuda_graph_impl == "transformer_engine" else None


def _recompute(model: Any) -> str | None:
    granularity, modules = model.recompute_granularity, model.recompute_modules
    if granularity == "full" and isinstance(model.recompute_num_layers, int):
        return f"{model.recompute_num_layers} layers"
    if granularity == "selective" and isinstance(modules, list):
        return " ".join(modules) or "none"
    return "none" if granularity is None else None


def rows_of(root: Path, version: str, models: Sequence[tuple[str, str]]) -> Iterator[dict[str, Any]]:
    """Yield the rows of a version for the recipes and tasks of ``models``; print those that the script ends on."""
    script = Script(root)
    for recipe, ours in models:
        task = {"lora": "peft"}.get(ours, ours) if script.is_flat else ours
        for family, gpu, dtype, gpus in listed(root, recipe, task):
            try:
                usual = script.usual_gpus(family, recipe, task, gpu, DTYPES[dtype])
                names = {"model_family_name": family, "model_recipe_name": recipe, "task": task, "gpu": gpu}
                made = script.configuration(**names, compute_dtype=DTYPES[dtype], num_gpus=gpus or usual)
                variables = script.variables(family, recipe, task, gpu, DTYPES[dtype])
            except (ValueError, AssertionError, AttributeError, TypeError, SystemExit) as error:
                print(f"{version} {recipe} {task} {gpu} {dtype} {gpus}: {error!r}", file=sys.stderr)
                continue
            place = {"version": version, "recipe": recipe, "task": ours, "gpu": gpu, "dtype": dtype}
            scale = {"gpus": gpus or usual, "usual": int(gpus in (None, usual))}
            yield {**place, **scale, **cells(made), "variables": variables}


def main() -> None:
    if sys.argv[1] == "--version":
        for row in rows_of(Path(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4])):
            print(json.dumps(row))
        return
    tables = safe_load((DATA / "megatron_bridge.yaml").read_text())
    models = {(model["experiment"].removeprefix(f"{model['task']}_"), model["task"]) for model in tables["models"]}
    versions = tables["versions"].values()
    rows = [row for version in versions for row in read_version(sys.argv[1], version, sorted(models))]
    sets = list(dict.fromkeys(tuple(sorted(row["variables"].items())) for row in rows))
    for row in rows:
        row["variables"] = sets.index(tuple(sorted(row["variables"].items())))
    pairs = ({"set": number, "name": name, "value": value} for number, each in enumerate(sets) for name, value in each)
    folder = Path(sys.argv[2]) if len(sys.argv) > 2 else DATA
    write(folder / "megatron_bridge_recipes.csv", rows)
    write(folder / "megatron_bridge_variables.csv", list(pairs))


def write(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    with path.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def read_version(clone: str, version: str, models: Sequence[tuple[str, str]]) -> list[dict[str, Any]]:
    """Return the rows of a version, read by a process of its own: the modules of versions have the same names."""
    archive = ["git", "-C", clone, "archive", version, *TREES]
    packed = subprocess.run(archive, capture_output=True, check=True).stdout
    with tempfile.TemporaryDirectory() as folder, tarfile.open(fileobj=io.BytesIO(packed)) as files:
        files.extractall(folder, filter="data")
        command = [sys.executable, __file__, "--version", folder, version, json.dumps(models)]
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"version"')]


if __name__ == "__main__":
    main()
