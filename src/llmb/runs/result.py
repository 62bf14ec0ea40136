# SPDX-License-Identifier: Apache-2.0
"""The result of a run: its status with a reason, and its figures. Pure."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from llmb.catalogue.records import Packing, Record, Window
from llmb.metrics.parameters import parameter_count, trainable_parameters
from llmb.metrics.statistics import Statistics
from llmb.metrics.throughput import throughput
from llmb.resources.records import OtherWork, ResourceUse
from llmb.runs.attention import AttentionBackend, Fp8Product
from llmb.runs.checkpoint_report import CheckpointReport
from llmb.runs.choices import Fp8Recipe
from llmb.runs.plan import Plan
from llmb.runs.profile_report import ProfileReport
from llmb.runs.steps import Counters, Step
from llmb.verdict.records import Verdict

Status = Literal["queued", "running", "success", "failed", "invalid"]
NOT_SUCCESSFUL = "the run was not successful"
"""Why a run has no step time."""


@dataclass(frozen=True, slots=True)
class ExpertLoadReport:
    """Means over the steps of the window."""

    max_over_mean: float
    idle_experts: float
    forced: bool
    """Tokens were routed evenly, independent of the routers."""
    capacity_factor: float | None = None
    """None if no token was dropped."""
    dropped_pct: float = 0.0
    """Share of the tokens that chose an expert which were beyond its capacity."""


@dataclass(frozen=True, slots=True)
class Fp8Report:
    """The FP8 computation; figures are means over the steps of the window."""

    recipe: Fp8Recipe
    emulated: bool
    saturated_tensors: float
    not_finite_tensors: float
    product: Fp8Product | None = None
    """None for a run that ended before it was chosen."""


class Loss(Record):
    """Losses of the first and the last step."""

    first: float
    last: float


class Parameters(Record):
    """Numbers of parameters; ``active`` counts only the experts that a token passes."""

    total: int
    active: int
    trainable: int


class Result(Record):
    """Status, reason and figures of a run; unavailable figures are None. The keys are a contract."""

    status: Status
    reason: str | None
    steps: int
    step_time_s: Statistics | None
    loss: Loss | None
    peak_memory_gib: float | None
    step_time_reason: str | None = None
    """The reason if ``step_time_s`` is None."""
    window: Window | None = None
    """The steps of the statistics, if that became known after the run; None for the window of the plan."""
    measurement_reason: str | None = None
    """Why the figures are not a measurement; None if they are, or if there are none."""
    checkpoint: CheckpointReport | None = None
    profile: ProfileReport | None = None
    expert_load: ExpertLoadReport | None = None
    counters: Counters | None = None
    attention_backend: AttentionBackend | None = None
    fp8: Fp8Report | None = None
    tokens_per_s: float | None = None
    tokens_per_s_per_gpu: float | None = None
    real_tokens_per_s: float | None = None
    """Without padding; the same as ``tokens_per_s`` if sequences are not packed."""
    packing: Packing | None = None
    """Statistics of the sequences, of the steps of the window if they have them; None if they are not packed."""
    parameters: Parameters | None = None
    """None without figures."""
    tflops_per_gpu: dict[str, float | None] | None = None
    """By convention, as are ``mfu_pct`` and ``flops_per_sequence``."""
    mfu_pct: dict[str, float | None] | None = None
    days_per_1t_tokens: float | None = None
    flops_per_sequence: dict[str, float | None] | None = None
    peak_tflops: float | None = None
    reasons: dict[str, str] | None = None
    """Reasons for figures that are None, by name."""
    verdict: Verdict | None = None
    """Against the published figure; None if there is none, and until a run is concluded."""
    verdict_reason: str | None = None
    """Why ``verdict`` is None."""
    note: str | None = None
    """What came after the last step of a success: an error, a signal, the time limit; else None."""
    resources: ResourceUse | None = None
    """Use of resources in the steps of the window."""
    resources_reason: str | None = None
    """Why ``resources`` is None."""
    other_work: OtherWork | None = None
    """Around the window; its ``disturbing`` makes a verdict soft."""
    other_work_reason: str | None = None
    """Why ``other_work`` is None."""

    def document(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return self.model_dump(mode="json")


def figures_of(plan: Plan, step_time_s: float, packing: Packing | None = None) -> dict[str, Any]:
    """Throughput and parameters as fields of a result, which has the step time with its spread.

    ``packing`` has the statistics of the sequences that were trained, if the steps have them.
    """
    measured = throughput(plan.recipe, step_time_s, lora=plan.lora, packing=packing)
    return {
        **{name: value for name, value in asdict(measured).items() if name != "step_time_s"},
        "packing": packing or plan.recipe.packing,
        "parameters": parameters_of(plan),
    }


def parameters_of(plan: Plan) -> Parameters:
    total, active = parameter_count(plan.recipe.model)
    return Parameters(total=total, active=active, trainable=trainable_parameters(plan.recipe.model, plan.lora))


def measured_packing(plan: Plan, steps: Sequence[Step]) -> Packing | None:
    """Mean statistics of the sequences of ``steps``; None if they have none."""
    squares = [step.sum_of_squares for step in steps if step.sum_of_squares is not None]
    if not steps or len(squares) < len(steps):
        return None
    sequences = len(steps) * plan.recipe.layout.gbs
    chunked = [
        whole if step.chunked_sum_of_squares is None else step.chunked_sum_of_squares
        for step, whole in zip(steps, squares, strict=True)
    ]
    return Packing(
        tokens=sum(step.tokens for step in steps) / sequences,
        sum_of_squares=sum(squares) / sequences,
        chunked_sum_of_squares=sum(chunked) / sequences if chunked != squares else None,
        source="mean of the window's steps",
    )


def no_measurement(plan: Plan, began: int | None = None) -> str | None:
    """Why figures of the window do not tell how fast the run is; None if they do.

    ``began`` is the first step of the attempt that trained the window, if not that of the run.
    """
    if plan.window.first > (plan.first_step if began is None else began):
        return None
    if began is not None and began > plan.first_step:
        return "the window includes the first step of an attempt, which includes warm-up"
    if plan.steps > 1:
        return "the window includes the first step, which includes warm-up"
    resumed = "; it shows that the checkpoint loads" if plan.start else ""
    return f"the only step is the first one, which includes warm-up{resumed}"
