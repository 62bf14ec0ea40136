# SPDX-License-Identifier: Apache-2.0
"""Figures of a step are read at once, or one step late where a device has a queue; never are any lost."""

import gc
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import ranks_of

from llmb.engine import device, loop
from llmb.engine.data.batches import Figures, MicroBatch, StepData, copy_stream, on_device, rank_data
from llmb.engine.data.build import build_data
from llmb.engine.loop import do_step
from llmb.engine.optimizer import build_optimizer
from llmb.engine.parallel.mesh import Ranks
from llmb.engine.parallel.pipeline import build_passes
from llmb.engine.precision.apply import CAPABILITY, fp8_counts
from llmb.engine.profile import TorchRecorder
from llmb.engine.stages import prepare_stages
from llmb.engine.timing import ExpertLoadCounter, LayerTimes, StepReader
from llmb.engine.watchdog import Progress
from llmb.runs.folder import RunFolder
from llmb.runs.plan import Plan
from llmb.runs.profiling import Profiling
from llmb.runs.steps import read_steps

DATA = StepData(Figures(1024, 1024, 0, 0), [])
MakePlan = Callable[..., Plan]
GPU = torch.device("cuda", 0)
PAUSE_S = 0.2
WRITING_S = 3600.0
"""Of the test's clock: much longer than a step of the smallest model on any machine, however busy."""


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Callable[[str], None]]:
    """Starts this process as the only rank, with a backend."""
    yield lambda backend: dist.init_process_group(backend, rank=0, world_size=1, init_method=f"file://{tmp_path}/store")
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.enable()  # a training switches it off


def reader_of(plan: Plan, ranks: Ranks, *, queues: bool) -> StepReader:
    models = [stage.model for stage in prepare_stages(plan, ranks)]
    reader = StepReader(plan, ranks, ExpertLoadCounter(models, ranks), LayerTimes(models, ranks.device))
    reader.queues = queues
    return reader


def do(reader: StepReader, number: int, loss: float, norm: float = 1.0) -> None:
    reader.begin(number, saving=number == 1)
    reader.end(torch.tensor(loss, dtype=torch.float64), torch.tensor(norm, dtype=torch.float64), DATA)


def read(reader: StepReader, *, all_steps: bool) -> list[int]:
    return [step.step for step, *_ in reader.read(all_steps=all_steps)]


def test_without_a_queue_each_step_is_read_at_once(tiny_plan: MakePlan, group: Callable[[str], None]) -> None:
    group("gloo")
    plan = tiny_plan(scale=1)
    reader = reader_of(plan, ranks_of(plan), queues=False)
    do(reader, 0, 6.0)
    assert read(reader, all_steps=False) == [0]
    do(reader, 1, 5.0, 3.0)
    ((step, memory, _),) = reader.read(all_steps=False)
    assert (step.step, step.loss, step.grad_norm, step.saving) == (1, 5.0, 3.0, True)
    assert step.step_time_s >= step.rank_step_time_s_max > 0
    assert step.peak_memory_bytes == memory.peak_bytes > 0
    assert step.expert_load is None


def test_with_a_queue_steps_are_read_one_late_or_all_where_it_matters(
    tiny_plan: MakePlan, group: Callable[[str], None]
) -> None:
    group("gloo")
    plan = tiny_plan(scale=1)
    reader = reader_of(plan, ranks_of(plan), queues=True)
    found = []
    for number in range(5):
        do(reader, number, 6.0)
        found.append(read(reader, all_steps=number == 2))
    assert found == [[], [0], [1, 2], [], [3]]
    assert read(reader, all_steps=True) == [4]


def test_with_a_queue_a_step_lasts_from_the_end_of_the_one_before(
    tiny_plan: MakePlan, group: Callable[[str], None]
) -> None:
    """And from its own beginning where the queue was empty, as after a checkpoint."""
    group("gloo")
    plan = tiny_plan(scale=1)
    reader = reader_of(plan, ranks_of(plan), queues=True)
    for number in range(3):
        do(reader, number, 6.0)
    first, second, third = reader.pending
    assert (second.began, third.began) == (first.ended, second.ended)
    read(reader, all_steps=True)
    do(reader, 3, 6.0)
    assert reader.pending[0].began is not third.ended
    ((step, *_),) = reader.read(all_steps=True)
    assert step.step_time_s == step.rank_step_time_s_max


def test_layers_are_timed_in_the_first_micro_batch_only(tiny_plan: MakePlan, group: Callable[[str], None]) -> None:
    group("gloo")
    plan = tiny_plan(scale=1, overrides={"gbs": 2, "layers": 2, "seq_len": 16})
    ranks = ranks_of(plan)
    stages = prepare_stages(plan, ranks)
    models = [stage.model for stage in stages]
    reader = StepReader(plan, ranks, ExpertLoadCounter(models, ranks), LayerTimes(models, ranks.device))
    optimizers = [build_optimizer(stage, plan.recipe.training) for stage in stages]
    passes, source = build_passes(stages, plan, ranks), rank_data(build_data(plan), plan, ranks, varlen=False)
    for number in range(2):
        reader.begin(number, saving=False)
        reader.end(*do_step(number, plan, passes, optimizers, source, ranks))
        assert [len(spans) for spans in reader.layers.spans] == [2]
        (pending,) = reader.pending
        ((first, second),) = pending.layers
        layers_s = first[1].seconds_since(first[0]) + second[1].seconds_since(second[0])
        ((step, _, (own,)),) = reader.read(all_steps=False)
        assert step.layer_s_median == own.layer_s == pytest.approx(layers_s / 2)
        assert own.input_s == pending.wait_s
        (copied, *_) = (ended.seconds_since(began) for began, ended in pending.copies)
        assert own.copy_s >= copied > 0
        lasted_s = second[1].seconds_since(pending.began)
        others_s = lasted_s - layers_s - pending.wait_s - copied
        assert step.outside_layers_s == own.wait_s == pytest.approx(others_s, abs=1e-6)


def test_what_happens_between_two_steps_is_a_pause(tiny_plan: MakePlan, group: Callable[[str], None]) -> None:
    group("gloo")
    plan = tiny_plan(scale=1)
    reader = reader_of(plan, ranks_of(plan), queues=False)
    pauses = []
    for number in range(3):
        do(reader, number, 6.0)
        ((step, *_),) = reader.read(all_steps=False)
        pauses.append(step.pause_s)
        time.sleep(PAUSE_S * number)
    assert pauses[0] == 0
    assert pauses[2] >= PAUSE_S > 0


class LateReader(StepReader):
    """Reads as with a queue, without one."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.queues = True


@pytest.mark.parametrize("peak_lr", [1e-3, 1e38])
def test_late_figures_are_all_reported_and_stop_a_spoiled_run(
    tiny_plan: MakePlan,
    group: Callable[[str], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    peak_lr: float,
) -> None:
    monkeypatch.setattr(loop, "StepReader", LateReader)
    group("gloo")
    plan = tiny_plan(scale=1, steps=9, peak_lr=peak_lr, checkpoint_interval=4, overrides={"gbs": 1, "layers": 1})
    folder = RunFolder(tmp_path / "experiment" / "run")
    folder.path.mkdir(parents=True)
    loop.train(plan, folder, ranks_of(plan), Progress(0))
    steps = read_steps(folder.steps)
    assert [step.step for step in steps] == list(range(len(steps)))
    assert capsys.readouterr().out.count("Training epoch 0, iteration ") == len(steps)
    saved = sorted(path.name for path in folder.checkpoints.glob("*")) if folder.checkpoints.exists() else []
    if peak_lr < 1:
        assert (len(steps), len(saved)) == (9, 3)
    else:
        assert [step.finite for step in steps] == [True] * (len(steps) - 1) + [False]
        assert 1 < len(steps) <= 4
        assert saved == []


def test_writing_a_profile_is_no_part_of_the_step_after_it(
    tiny_plan: MakePlan, group: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(_recorder: TorchRecorder) -> None:
        phases.append(progress.position.phase)
        late_s.append(WRITING_S)

    progress, phases, late_s, clock = Progress(0), [], [], time.perf_counter

    monkeypatch.setattr(time, "perf_counter", lambda: clock() + sum(late_s))
    monkeypatch.setattr(loop, "StepReader", LateReader)
    monkeypatch.setattr(TorchRecorder, "start", lambda _recorder: None)
    monkeypatch.setattr(TorchRecorder, "stop", stop)
    group("gloo")
    profiling = Profiling(profile=True, profile_start_step=2, profile_stop_step=4)
    plan = tiny_plan(scale=1, steps=6, profiling=profiling, overrides={"gbs": 1, "layers": 1, "seq_len": 16})
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    loop.train(plan, folder, ranks_of(plan), progress)
    steps = read_steps(folder.steps)
    assert phases == ["profile"], "which may take longer than a step before the run is taken to stand still"
    assert [step.step for step in steps if step.profiled] == [2, 3]
    assert steps[4].step_time_s < WRITING_S


def batches(count: int, made: list[int]) -> Iterator[MicroBatch]:
    for number in range(count):
        made.append(number)
        yield MicroBatch(
            torch.full((1, 4), number), torch.full((1, 4), number + 1), None if number % 2 else torch.ones(4)
        )


def test_on_a_cpu_batches_are_made_when_they_are_needed() -> None:
    made: list[int] = []
    taken = on_device(batches(3, made), torch.device("cpu"), [])
    assert made == []
    assert [(int(batch.tokens[0, 0]), list(made)) for batch in taken] == [(0, [0]), (1, [0, 1]), (2, [0, 1, 2])]


@pytest.mark.gpu
@pytest.mark.parametrize("count", [0, 1, 4])
def test_on_a_gpu_batches_are_made_and_copied_one_ahead(needs: Callable[..., None], count: int) -> None:
    needs("gpu", torch.cuda.is_available(), "no CUDA device is visible to torch")
    made: list[int] = []
    for number, batch in enumerate(on_device(batches(count, made), GPU, [])):
        assert len(made) == min(number + 2, count)
        assert batch.tokens.device == batch.labels.device == GPU
        assert batch.tokens.tolist() == [[number] * 4]
        assert batch.labels.tolist() == [[number + 1] * 4]
        assert (batch.starts is None) == bool(number % 2)


def test_all_steps_copy_their_batches_on_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "Stream", made.append)
    copy_stream.cache_clear()
    assert [copy_stream(GPU), copy_stream(torch.device("cuda", 0))] == [None, None]
    assert made == [GPU]
    copy_stream.cache_clear()


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
@pytest.mark.parametrize(("dtype", "document_tokens"), [("bf16", None), ("bf16", 50), ("fp8", None)])
def test_on_a_gpu_the_host_never_waits_within_a_step(
    needs: Callable[..., None],
    tiny_plan: MakePlan,
    group: Callable[[str], None],
    dtype: str,
    document_tokens: int | None,
) -> None:
    needs("gpu", torch.cuda.is_available(), "no CUDA device is visible to torch")
    group("nccl")
    emulated = dtype == "fp8" and torch.cuda.get_device_capability(GPU) < CAPABILITY
    plan = tiny_plan(scale=1, dtype=dtype, document_tokens=document_tokens, emulate_fp8=emulated)
    ranks = ranks_of(plan, 0, GPU)
    stages = prepare_stages(plan, ranks)
    optimizers = [build_optimizer(stage, plan.recipe.training) for stage in stages]
    passes = build_passes(stages, plan, ranks)
    source = rank_data(build_data(plan), plan, ranks, varlen=False)
    models = [stage.model for stage in stages]
    reader = StepReader(plan, ranks, ExpertLoadCounter(models, ranks), LayerTimes(models, GPU))
    losses = []
    for number in range(4):
        # The first step makes what is kept, such as the optimizer's state.
        torch.cuda.set_sync_debug_mode("error" if number else "default")
        reader.begin(number, saving=False)
        reader.end(*do_step(number, plan, passes, optimizers, source, ranks), fp8_counts(plan, models, ranks))
        torch.cuda.set_sync_debug_mode("default")
        losses += [step.loss for step, *_ in reader.read(all_steps=number == 3)]
    assert len(losses) == 4
    assert losses[-1] < losses[0]


def test_the_peak_of_memory_is_never_below_what_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux counts the two separately."""
    monkeypatch.setattr(device.resource, "getrusage", lambda _who: SimpleNamespace(ru_maxrss=0))
    used = device.memory(torch.device("cpu"))
    assert used.peak_bytes >= used.allocated_bytes > 1
