# SPDX-License-Identifier: Apache-2.0
"""What a machine has decides what is run by default, and whether a run fits. Machines are given."""

from collections.abc import Callable
from pathlib import Path

import pytest

from llmb.base.errors import EnvironmentProblem, UsageError
from llmb.catalogue.catalogue import Catalogue
from llmb.catalogue.records import gpu_type_of
from llmb.catalogue.resolve import Overrides, Request, resolve
from llmb.jobs.local_run import recipe_for
from llmb.launch.local import THREADS, local_command, local_variables
from llmb.launch.local_spec import local_spec
from llmb.launch.programs.engine.program import SHIPPED, check_memory, memory_warnings
from llmb.launch.site.site import Machine, check_machine, this_machine
from llmb.prediction.memory import clearly_fits, estimate
from llmb.runs.choices import Choices
from llmb.runs.folder import RunFolder
from llmb.runs.plan import EnginePlan, Plan, make_plan

CATALOGUE = Catalogue()
LAPTOP = Machine(gpu_names=(), cores=8)
H100_NODE = Machine(gpu_names=("NVIDIA H100 80GB HBM3",) * 8, cores=112)
A100 = Machine(gpu_names=("NVIDIA A100-SXM4-80GB",), cores=16)


def tiny(**fields: object) -> Request:
    return Request(workload="pretrain_llama3.1", size="tiny", **fields)


def large(**fields: object) -> Request:
    return Request(workload="pretrain_llama3.1", size="8b", **fields)


@pytest.mark.parametrize(
    ("name", "gpu_type"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA GB300", "gb300"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H100 NVL", "h100-nvl"),
        ("NVIDIA H200 NVL", "h200-nvl"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A100-SXM4-40GB", None),
    ],
)
def test_only_the_very_variant_has_the_catalogue_peak(name: str, gpu_type: str | None) -> None:
    assert gpu_type_of(name, CATALOGUE.gpus.values()) == gpu_type


def test_a_machine_without_gpus_trains_tiny_models_on_its_cores() -> None:
    recipe = recipe_for(CATALOGUE, tiny(), LAPTOP)
    assert (recipe.gpu_type, recipe.scale, recipe.dtype) == ("cpu", 2, "fp32")
    assert recipe_for(CATALOGUE, tiny(), Machine(gpu_names=(), cores=1)).scale == 1
    with pytest.raises(UsageError, match="has no layout for cpu"):
        recipe_for(CATALOGUE, large(gpu_type="cpu"), LAPTOP)


def test_a_gpu_node_uses_all_its_gpus_unless_asked_for_fewer() -> None:
    assert recipe_for(CATALOGUE, large(), H100_NODE).title() == "pretrain_llama3.1 8b bf16 on 8 x h100"
    assert recipe_for(CATALOGUE, tiny(gpu_type="cpu"), H100_NODE).gpu_type == "cpu"
    asked = recipe_for(CATALOGUE, large(scale=1), H100_NODE)
    assert (asked.proxy, asked.layout.layers) == (True, 10)


def test_an_unknown_gpu_has_no_peak_of_another() -> None:
    recipe = recipe_for(CATALOGUE, large(gpu_type="h100", scale=1), A100)
    assert recipe.peak_tflops is None and "A100" in "".join(recipe.decisions)
    assert recipe_for(CATALOGUE, tiny(), Machine(("L40S",) * 3, cores=8)).title().endswith("tiny bf16 on 2 x h100")
    experts = Request(workload="pretrain_qwen3", size="tiny-moe")
    assert recipe_for(CATALOGUE, experts, Machine(("L40S",) * 3, cores=8)).scale == 2


def test_too_few_gpus_are_said_before_anything_starts() -> None:
    recipe = recipe_for(CATALOGUE, large(scale=1, gpu_type="h100"), LAPTOP)
    plan = make_plan(recipe, Choices(), device="cuda")
    with pytest.raises(EnvironmentProblem, match="requires 1 visible GPU, but this machine has none"):
        check_machine(plan, LAPTOP)
    check_machine(plan, H100_NODE)


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        (None, ("NVIDIA H100", "NVIDIA H200")),
        ("0", ("NVIDIA H100",)),
        ("1", ("NVIDIA H200",)),
        (" 1, 0", ("NVIDIA H200", "NVIDIA H100")),
        ("GPU-3abc", ("NVIDIA H100",)),
        ("", ()),
        ("-1", ()),
        ("1,-1,0", ("NVIDIA H200",)),
        ("0,7", ("NVIDIA H100",)),
    ],
)
def test_gpus_are_those_the_driver_lists_and_the_user_leaves_visible(
    program: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch, visible: str | None, names: tuple[str, ...]
) -> None:
    """The driver cannot be had without a GPU; a program of its name answers for it. A GPU machine asks the real one."""
    program("nvidia-smi", "echo 'NVIDIA H100'\necho 'NVIDIA H200'")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert this_machine().gpu_names == names


def test_a_driver_that_fails_counts_as_none(program: Callable[[str, str], None]) -> None:
    program("nvidia-smi", "echo 'Failed to initialize NVML'\nexit 9")
    assert this_machine().gpu_names == ()
    assert this_machine().cores >= 1


def variables_of(plan: Plan, cores: int, environ: dict[str, str]) -> dict[str, str]:
    return local_variables(local_spec(plan, Path("/x"), environ, RunFolder(Path("/x/run"))), cores, environ)


def test_workers_share_the_cores_and_what_the_user_has_set_stays(tiny_plan: Callable[..., Plan]) -> None:
    assert variables_of(tiny_plan(scale=2), 8, {})["OMP_NUM_THREADS"] == "4"
    assert variables_of(tiny_plan(scale=8), 2, {})["OMP_NUM_THREADS"] == "1"
    memory = {"MALLOC_TRIM_THRESHOLD_": "1", "MALLOC_MMAP_THRESHOLD_": "1"}
    environ = {"OMP_NUM_THREADS": "3", "GOMP_SPINCOUNT": "1", **memory}
    assert variables_of(tiny_plan(scale=2), 8, environ) == {"PYTHONUNBUFFERED": "1"}


def test_a_gpu_gets_memory_that_does_not_fall_apart_unless_the_user_configured_it() -> None:
    plan = make_plan(recipe_for(CATALOGUE, large(scale=1), H100_NODE), Choices(steps=5), device="cuda")
    chosen = variables_of(plan, 8, {})
    assert chosen["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert "GOMP_SPINCOUNT" not in chosen
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        assert "PYTORCH_ALLOC_CONF" not in variables_of(plan, 8, {name: "max_split_size_mb:512"})


def test_every_variable_is_explained_in_the_docs() -> None:
    page = Path(__file__).parents[3] / "docs" / "explanation" / "engine.md"
    rows = [line.split(" | ") for line in page.read_text().splitlines() if line.startswith("| `")]
    shown = {row[0].strip("| `"): row[1].strip("`") for row in rows}
    assert THREADS in shown
    for variable in SHIPPED:
        assert (variable.why != "", shown[variable.name]) == (True, variable.value)


def test_the_command_names_the_folder_and_nothing_secret(tiny_plan: Callable[..., Plan]) -> None:
    run = RunFolder(Path("/data/with space/run"))
    command = local_command(local_spec(tiny_plan(scale=4), Path("/data"), {}, run), run)
    assert command[1:6] == ("-P", "-m", "llmb.launch.ranks", "1", "4")
    assert command[-1] == "/data/with space/run"


def planned(layers: int = 2, sequences: int = 1, **choices: str) -> EnginePlan:
    """A run of one micro-batch in each step."""
    overrides = Overrides(layers=layers, mbs=sequences, gbs=sequences)
    request = Request(workload="pretrain_llama3.1", size="8b", gpu_type="h100", scale=1, overrides=overrides)
    return make_plan(resolve(Catalogue(), request), Choices(**choices), device="cuda")


def test_a_run_that_fits_is_not_counted() -> None:
    said: list[str] = []
    check_memory(planned(), said.append, force=False)
    assert said == []
    assert list(memory_warnings(planned())) == []


def test_a_run_on_a_cpu_is_not_checked() -> None:
    request = Request(workload="pretrain_llama3.1", size="tiny", gpu_type="cpu")
    plan = make_plan(resolve(Catalogue(), request), Choices(), device="cpu")
    said: list[str] = []
    check_memory(plan, said.append, force=False)
    assert said == []
    assert list(memory_warnings(plan)) == []


def test_a_run_is_forced_without_a_count() -> None:
    said: list[str] = []
    check_memory(planned(24), said.append, force=True)
    assert len(said) == 1
    assert "needs about" in said[0]
    assert "--force" in said[0]
    (warning,) = memory_warnings(planned(24))
    assert "may not fit" in warning


@pytest.mark.slow
@pytest.mark.usefixtures("forked_programs")
def test_a_run_that_does_not_fit_is_refused_once_it_is_counted() -> None:
    """One of few layers and many sequences needs some GiB more than there are, and recomputes them if told to."""
    plan = planned(4, 13)
    use = estimate(plan)
    assert not use.fits
    assert not clearly_fits(use)
    said: list[str] = []
    with pytest.raises(UsageError, match=r"does not fit: rank 0 needs [\d.]+ of 80 GiB on stage 0") as raised:
        check_memory(plan, said.append, force=False)
    assert "--recompute" in str(raised.value.do)
    assert "counting" in said[0]
    check_memory(planned(4, 13, recompute="full"), said.append, force=False)
