# SPDX-License-Identifier: Apache-2.0
"""The training loop."""

import gc
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, nullcontext, suppress
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from llmb.catalogue.records import Convention, Training
from llmb.catalogue.throughput import throughput
from llmb.engine.attention_backend import attention_kernel, choose_attention
from llmb.engine.checkpoint.load import load_checkpoint, load_weights, verify_checkpoint
from llmb.engine.checkpoint.save import Saver
from llmb.engine.data.batches import Loader, MicroBatch, StepData, StepSource, on_device, rank_data, rank_samples
from llmb.engine.data.build import build_data, check_dataset
from llmb.engine.device import Memory, exact_fp32, leave_free
from llmb.engine.environment import describe_environment, device_memory, gpus_after
from llmb.engine.kernel_check import compare_kernels, refuse_wrong
from llmb.engine.optimizer import AdamW, build_optimizer, clip_gradients, learning_rate
from llmb.engine.parallel.context_parallel import rank_positions
from llmb.engine.parallel.exchange import Stages, await_updates, reduce_partial_gradient
from llmb.engine.parallel.mesh import Ranks, limit_collectives
from llmb.engine.parallel.pipeline import Passes, build_passes
from llmb.engine.parallel.symmetric_memory import prepare_fused_products
from llmb.engine.precision.apply import fp8_counts, fp8_step
from llmb.engine.profile import StepProfiler
from llmb.engine.stages import prepare_stages, trained_parameters
from llmb.engine.timing import CompleteStep, ExpertLoadCounter, LayerTimes, StepReader
from llmb.engine.transformations import token_keys, with_varying_segments
from llmb.engine.watchdog import Progress
from llmb.readers.logs.step_line import format_invalid_line, format_step_line
from llmb.runs.attention_choice import fp8_product
from llmb.runs.checkpoint_use import check_weights, loads_weights
from llmb.runs.checkpoints.checkpoint import CheckpointTime, add_checkpoint_time
from llmb.runs.environment import Environment
from llmb.runs.folder import RunFolder, write_atomically
from llmb.runs.plan import EnginePlan, Plan
from llmb.runs.rank_account import GIB
from llmb.runs.rank_times import RankTimesFile
from llmb.runs.steps import Step, step_to_json


class Reporter:
    """Prints and writes each step as soon as its values are read."""

    def __init__(self, folder: RunFolder, plan: Plan) -> None:
        self.plan = plan
        # The file of a restarted run has its earlier steps.
        self.stream = folder.steps.open("a", buffering=1)
        ranks = plan.processes
        self.rank_times = RankTimesFile(folder.rank_times, plan.last_step + 1, ranks) if ranks > 1 else None

    def close(self) -> None:
        self.stream.close()
        if self.rank_times:
            self.rank_times.close()

    def report(self, known: CompleteStep) -> None:
        step = known.step
        if step.loss is None:
            # Not the line of a step, so that no program takes it for one.
            sys.stdout.write(
                f"{self.plan.recipe.pretended_text}: step {step.step} computed in {step.step_time_s:.4g} s, "
                f"peak memory {step.peak_memory_bytes / GIB:.4g} GiB\n"
            )
        else:
            self._print(step, step.loss, known.memory)
        sys.stdout.flush()
        self.stream.write(step_to_json(step) + "\n")
        if self.rank_times:
            self.rank_times.add(step.step, known.ranks)

    def _print(self, step: Step, loss: float, memory: Memory) -> None:
        recipe = self.plan.recipe
        tflops = throughput(recipe, step.step_time_s).tflops_per_gpu[Convention.FULL]
        line = format_step_line(
            step=step.step,
            steps=self.plan.last_step + 1,
            lr=step.lr,
            global_batch_size=recipe.layout.gbs,
            peak_memory_bytes=memory.peak_bytes,
            memory_allocated_bytes=memory.allocated_bytes,
            loss=loss,
            step_time_s=step.step_time_s,
            tflops_per_gpu=tflops,
            consumed_samples=self.plan.samples_before(step.step + 1),
        )
        sys.stdout.write(line + "\n")
        if not step.finite:
            sys.stdout.write(format_invalid_line(step.values_text()) + "\n")


STEPS_BETWEEN_COLLECTIONS = 100


def train(plan: EnginePlan, folder: RunFolder, ranks: Ranks, progress: Progress) -> None:
    """Train for ``plan.steps`` steps, or until a loss or gradient norm is not finite."""
    exact_fp32()
    leave_free(plan.free_sms, ranks.device)
    check_dataset(plan, ranks)
    check_weights(plan)
    environment = describe_environment(ranks)
    record_environment(folder, ranks, environment)
    prepare_fused_products(plan, ranks)
    torch.manual_seed(plan.seed)  # not for data and initial weights, which have their own generators
    stages = prepare_stages(plan, ranks)
    models = [stage.model for stage in stages]
    attention = choose_attention(models, plan, ranks)
    product = fp8_product(plan.device, emulate=plan.emulate_fp8) if plan.fp8_recipe else None
    chosen = environment.model_copy(
        update={
            "attention": attention,
            "fp8_product": product,
            "compute_path": plan.compute_path,
            "kernels": compare_kernels(plan, ranks),
        }
    )
    record_environment(folder, ranks, chosen)
    refuse_wrong(chosen.kernels or (), chosen.ptxas)
    optimizers = [build_optimizer(stage, plan.recipe.training) for stage in stages]
    passes = build_passes(stages, plan, ranks)
    source = rank_data(build_data(plan), plan, ranks, varlen=attention.backend == "varlen")
    load_start(plan, folder, stages, optimizers, ranks, progress)
    load = ExpertLoadCounter(models, ranks)
    reader = StepReader(plan, ranks, load, LayerTimes(models, ranks.device))
    saver = Saver(plan, folder, ranks, stages, optimizers)
    profiler, memory = StepProfiler(plan, folder, ranks, progress), None
    with ExitStack() as stack:
        stack.enter_context(attention_kernel(attention.backend))
        loader = stack.enter_context(Loader(source, plan.first_step, plan.last_step))
        reporter = stack.enter_context(closing(Reporter(folder, plan))) if ranks.is_first else None
        for number in range(plan.first_step, plan.last_step + 1):
            collect_garbage(number)
            with profiler.step(number):
                reader.begin(number, saving=saver.busy)
                done = do_step(number, plan, passes, optimizers, loader, ranks)
                reader.end(*done, fp8_counts(plan, models, ranks))
                steps = list(reader.read(all_steps=pauses_after(plan, number)))
            memory = device_memory(ranks) if number == plan.first_step else memory
            spoiled = report_sound(steps, reporter)
            progress.enter("checkpoint", number)
            if spoiled:
                break
            saver.after_step(number)
            progress.enter("step", number + 1)
        gpus = gpus_after(ranks, memory)
        for stage in stages:
            await_updates(stage.buckets)
        saver.finish()
    profiler.close()
    if gpus:
        with suppress(OSError):  # the run is complete, and must not fail for this
            record_environment(folder, ranks, chosen.model_copy(update=gpus))
    # No steps if the previous attempt completed all.
    if ranks.is_first and not ranks.alone and plan.recipe.model.moe and plan.steps:
        load.write(folder.expert_load)


def load_start(
    plan: EnginePlan, folder: RunFolder, stages: Stages, optimizers: Sequence[AdamW], ranks: Ranks, progress: Progress
) -> None:
    """Load the weights that the plan starts with, then the checkpoint to resume from, if any. A collective."""
    if not ranks.alone:
        limit_collectives(plan)

    def load(path: Path, read: Callable[[], CheckpointTime]) -> None:
        verified = verify_checkpoint(
            path, ranks, lambda: progress.enter("start", plan.first_step), wanted=plan.verify_checkpoint
        )
        took = read()
        if ranks.is_first:
            add_checkpoint_time(folder.checkpoint_times, took.model_copy(update=verified.model_dump()))

    if plan.weights and loads_weights(plan):
        weights = Path(plan.weights.path)
        load(weights, lambda: load_weights(weights, stages, ranks))
    if plan.start:
        path, complete = Path(plan.start.path), plan.start.optimizer_state
        load(path, lambda: load_checkpoint(path, stages, optimizers, ranks, with_optimizer=complete))


def pauses_after(plan: EnginePlan, number: int) -> bool:
    """Return True if values must be read before training continues: at the end, before checkpoints, or after a
    profile."""
    profile_ends = plan.profile is not None and number == plan.profile.stop_step - 1
    return number == plan.last_step or plan.saves_after(number) or profile_ends


def record_environment(folder: RunFolder, ranks: Ranks, environment: Environment) -> None:
    if ranks.is_first:
        write_atomically(folder.environment, environment.model_dump_json(indent=2) + "\n")


def add_gradients(passes: Passes, plan: EnginePlan, data: StepData, number: int, ranks: Ranks) -> Tensor | None:
    """Accumulate and reduce the gradients of a step; return this rank's loss, or None if it has none."""
    layout = plan.recipe.layout
    count: Tensor | float = layout.mbs * layout.seq_len / layout.cp
    if data.batches[0].starts is not None:
        # Created on the device, and kept there: a copy from or to the host would wait for all queued work.
        labels = torch.full((), data.figures.counted_labels, dtype=torch.float64, device=ranks.device)
        dist.all_reduce(labels, group=ranks.mesh.get_group("dp"))
        count = (labels / (layout.ga * layout.dp * layout.cp)).float()
    batches = on_device(data.batches, ranks.device, data.copies)
    if reduction := passes.stages[0].reduction:
        reduction.begin_step(layout.ga)
    with fp8_step(passes.stages, number) if plan.fp8_recipe else nullcontext():
        if plan.compiled:
            batches = with_varying_segments(batches)
        loss = passes.add_gradients(with_token_keys(batches, passes.stages, plan, number, ranks), count)
    reduce_gradients(passes.stages)
    return loss


def reduce_gradients(stages: Stages) -> None:
    """Finish reducing gradients over all ranks with the same parameters, after the passes of a step."""
    for gradients in (each for stage in stages for each in stage.gradient_sums):
        gradients.give()
    if reduction := stages[0].reduction:
        reduction.finish()
    for parameter in trained_parameters(stage.model for stage in stages):
        reduce_partial_gradient(parameter)


def with_token_keys(
    batches: Iterable[MicroBatch], stages: Stages, plan: EnginePlan, number: int, ranks: Ranks
) -> Iterator[MicroBatch]:
    """Yield a step's micro-batches; before each, set the keys of its tokens for the dropout of adapters, if any."""
    layout = plan.recipe.layout
    keys = token_keys(stages[0].model) if plan.lora else None
    if keys is None:
        yield from batches
        return
    positions = rank_positions(layout.seq_len, ranks.cp_rank, layout.cp, ranks.device)
    for batch, samples in zip(batches, rank_samples(layout, plan.samples_before(number), ranks.dp_rank), strict=True):
        keys.set(samples, positions, layout.seq_len)
        yield batch


def update(stages: Stages, optimizers: Sequence[AdamW], training: Training, number: int) -> Tensor:
    """Clip gradients, update parameters, start to gather them and free gradients; return the norm before clipping."""
    norm = clip_gradients(optimizers, training.clip_grad)
    for stage, optimizer in zip(stages, optimizers, strict=True):
        optimizer.lr = learning_rate(training, number)
        optimizer.step()
        optimizer.zero_grad()
        for bucket in stage.buckets:
            bucket.begin_gather()
    return norm


def do_step(
    number: int, plan: EnginePlan, passes: Passes, optimizers: Sequence[AdamW], source: StepSource, ranks: Ranks
) -> tuple[Tensor | None, Tensor, StepData]:
    """Run a step without waiting for the device; return this rank's loss, if any, the gradient norm and data."""
    data = source.step(number)
    loss = add_gradients(passes, plan, data, number, ranks)
    return loss, update(passes.stages, optimizers, plan.recipe.training, number), data


def report_sound(steps: Sequence[CompleteStep], reporter: Reporter | None) -> bool:
    """Report steps up to the first with a non-finite value; return True if there is one."""
    for one in steps:
        if reporter:
            reporter.report(one)
        if not one.step.finite:
            return True
    return False


def collect_garbage(number: int) -> None:
    """Collect garbage only at every hundredth step, on all ranks together: a pause of one rank stalls the others."""
    gc.disable()
    if number % STEPS_BETWEEN_COLLECTIONS == 0:
        gc.collect()
