# SPDX-License-Identifier: Apache-2.0
"""The resources in the result of a run, from the files of its folder."""

from dataclasses import replace
from pathlib import Path

from fake_steps import FIRST_STEP_S, steps_of
from recorded_runs import gpu_record, write_run

from llmb.base.missing import Missing
from llmb.launch.programs.conclude import finish_run
from llmb.launch.programs.port import End
from llmb.readers.samples.sample_records import GpuSamples, HostSample, Sample, SampledGpu, SamplerStart, to_line
from llmb.runs.environment import GpuState
from llmb.runs.folder import RunFolder
from llmb.runs.profiling import Profile
from llmb.runs.record import RunRecord
from llmb.runs.result import Result
from llmb.runs.steps import Step, step_to_json

STEPS = steps_of([10.0] * 50, gpu_record().plan)


def put_samples(folder: RunFolder, node: str = "node1", gpus: int = 8) -> None:
    """A sample a second of GPUs that draw 500 W each, for the 500 s that the steps take."""
    ids = tuple(SampledGpu(index=index, uuid=f"GPU-{index}") for index in range(gpus))
    items = [Sample(time_s=FIRST_STEP_S + time, host=HostSample(), gpus=busy(gpus)) for time in range(501)]
    start = SamplerStart(node=node, cores=64, interval_s=1.0, gpus=ids)
    folder.resources.mkdir(parents=True, exist_ok=True)
    folder.resources_of(node).write_bytes(b"".join(map(to_line, (start, *items))))


def busy(gpus: int) -> GpuSamples:
    return GpuSamples(power_w=(500.0,) * gpus, sm_clock_mhz=(1755.0,) * gpus, throttle_reasons=((),) * gpus)


def result(folder: RunFolder, record: RunRecord, steps: list[Step] = STEPS) -> Result:
    folder.steps.write_text("".join(f"{step_to_json(step)}\n" for step in steps))
    return finish_run(folder, record, End(0))


def test_the_energy_of_a_token(tmp_path: Path) -> None:
    record = gpu_record()
    folder = RunFolder(write_run(tmp_path, record, [10.0] * 50))
    put_samples(folder)
    found = result(folder, record)
    assert found.resources
    layout = record.plan.recipe.layout
    window_s = 100
    assert found.resources.energy_j == 8 * 500 * window_s
    assert found.resources.energy_j_per_token == 8 * 500 * window_s / (10 * layout.gbs * layout.seq_len)
    assert found.tokens_per_s and found.resources.total_power_w_mean
    per_token = found.resources.total_power_w_mean / found.tokens_per_s
    assert abs(found.resources.energy_j_per_token / per_token - 1) < 1e-9


def test_profiled_steps_do_not_count(tmp_path: Path) -> None:
    record = gpu_record()
    profile = Profile(profiler="torch", first_step=40, stop_step=41, ranks=(0,))
    record = record.model_copy(update={"plan": record.plan.model_copy(update={"profile": profile})})
    folder = RunFolder(write_run(tmp_path, record, [10.0] * 50))
    put_samples(folder)
    found = result(folder, record, [replace(step, profiled=step.step == 40) for step in STEPS])
    assert found.resources and found.resources.energy_j == 8 * 500 * 90


def test_only_the_gpus_that_train_count(tmp_path: Path) -> None:
    record = gpu_record()
    assert record.environment
    own = tuple(GpuState(node="node1", index=index, uuid=f"GPU-{index}") for index in (2, 3))
    record = record.model_copy(update={"environment": record.environment.model_copy(update={"gpus": own})})
    folder = RunFolder(write_run(tmp_path, record, [10.0] * 50))
    put_samples(folder)
    found = result(folder, record).resources
    assert found and [gpu.index for gpu in found.gpus or ()] == [2, 3]


def test_why_there_are_none(tmp_path: Path) -> None:
    record = gpu_record()
    folder = RunFolder(write_run(tmp_path, record, [10.0] * 50))
    assert result(folder, record).resources == Missing("the run folder has no samples")
    without = gpu_record(resources=False)
    assert result(folder, without).resources == Missing("the run was not sampled")
    failed = RunFolder(write_run(tmp_path, record, [10.0] * 49, exit_code=1))
    assert result(failed, record, STEPS[:49]).resources == Missing("the run was not successful")
    folder.resources_of("node1").mkdir(parents=True)
    assert result(folder, record).resources == Missing(
        "the samples cannot be read: it is a directory, not a regular file"
    )
