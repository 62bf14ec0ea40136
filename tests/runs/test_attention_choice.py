# SPDX-License-Identifier: Apache-2.0
"""Which attention backend is taken of those that were tried."""

from collections.abc import Callable

import pytest

from llmb.base.errors import UsageError
from llmb.runs.attention_choice import AttentionBackend, Trial, problem_text, select, try_backends
from llmb.runs.plan import Plan

MILLISECONDS: dict[AttentionBackend, float] = {
    "varlen": 1.0,
    "flash": 3.0,
    "flash3": 2.5,
    "flash4": 1.5,
    "cudnn": 2.0,
    "efficient": 5.0,
    "math": 90.0,
}
FUSED = ["flash", "flash3", "flash4", "cudnn", "efficient"]


def attempts(*unable: AttentionBackend) -> Callable[[AttentionBackend, bool], list[Trial]]:
    def attempt(backend: AttentionBackend, timed: bool) -> list[Trial]:
        if backend in unable:
            return [Trial(backend=backend, problem=f"{backend} is too old")]
        return [Trial(backend=backend, milliseconds=MILLISECONDS[backend] if timed else None)]

    return attempt


@pytest.mark.parametrize(
    ("unable", "taken", "tried", "why"),
    [
        ((), "flash4", FUSED, "the fastest of 5 that were timed"),
        (("flash4",), "cudnn", FUSED, "the fastest of 4 that were timed"),
        (("flash4", "cudnn"), "flash3", FUSED, "the fastest of 3 that were timed"),
        (("flash4", "cudnn", "flash3"), "flash", FUSED, "the fastest of 2 that were timed"),
        (("flash4", "cudnn", "flash3", "flash"), "efficient", FUSED, "the only fused one that can be used"),
        (
            ("flash4", "cudnn", "flash3", "flash", "efficient"),
            "math",
            [*FUSED, "math"],
            "the only one that computes this run's attention",
        ),
    ],
)
def test_auto_takes_the_quickest_fused_backend_of_a_gpu(
    unable: tuple[AttentionBackend, ...], taken: str, tried: list[str], why: str
) -> None:
    report = select("auto", try_backends("auto", "cuda", attempts(*unable)))
    assert (report.backend, report.why) == (taken, why)
    assert [trial.backend for trial in report.trials] == tried
    assert [trial.backend for trial in report.trials if trial.problem] == [name for name in tried if name in unable]


def test_auto_times_nothing_on_a_cpu() -> None:
    report = select("auto", try_backends("auto", "cpu", attempts()))
    assert (report.backend, report.why) == ("flash", "the first fused one")
    assert report.trials == (Trial(backend="flash"),)
    assert select("auto", try_backends("auto", "cpu", attempts("flash"))).backend == "math"


def test_deterministic_runs_take_the_first_backend_with_a_deterministic_backward_pass_untimed() -> None:
    trials = try_backends("auto", "cuda", attempts("flash", "flash3", "flash4"), deterministic=True)
    assert [(trial.backend, trial.milliseconds) for trial in trials if not trial.problem] == [("efficient", None)]
    assert "cudnn" not in {trial.backend for trial in trials}
    unable = attempts("flash", "flash3", "flash4", "efficient")
    assert select("auto", try_backends("auto", "cuda", unable, deterministic=True)).backend == "math"


def test_what_is_asked_for_is_taken_or_refused_with_the_reason() -> None:
    trials = try_backends("efficient", "cuda", attempts("flash"))
    assert trials == [Trial(backend="efficient")]
    assert select("efficient", trials).why == "chosen"
    with pytest.raises(UsageError, match=r"(?s)attention backend cudnn cannot compute.*cudnn: cudnn is too old"):
        select("cudnn", try_backends("cudnn", "cuda", attempts("cudnn")))


def test_repeated_heads_are_taken_where_they_are_faster() -> None:
    trials = [Trial(backend="cudnn", milliseconds=3.0), Trial(backend="cudnn", repeats_heads=True, milliseconds=2.0)]
    report = select("auto", [Trial(backend="flash", milliseconds=4.0), *trials])
    assert (report.backend, report.repeats_heads) == ("cudnn", True)
    assert report.why == "the fastest of 2 that were timed; with grouped heads it takes 3 ms instead of 2 ms"
    assert not select("auto", trials[:1]).repeats_heads


def test_the_problem_is_what_torch_warns_of_the_backend_that_was_tried() -> None:
    warnings = [
        "Flash attention kernel not used because: (Triggered internally at sdp_utils.cpp:1.)",
        "Flash attention has been runtime disabled. (Triggered internally at sdp_utils.cpp:2.)",
        "cuDNN attention kernel not used because: (Triggered internally at sdp_utils.cpp:3.)",
        "head_dim should be no more than 128 (Triggered internally at sdp_utils.cpp:4.)",
        "head_dim should be no more than 128 (Triggered internally at sdp_utils.cpp:4.)",
    ]
    assert problem_text("No available kernel.", warnings) == "head_dim should be no more than 128"
    assert problem_text("out of memory\nat ...", warnings[:3]) == "out of memory"


@pytest.mark.parametrize("choice", ["flash3", "flash4", "cudnn", "efficient"])
def test_what_needs_a_gpu_is_refused_on_a_cpu(tiny_plan: Callable[..., Plan], choice: str) -> None:
    with pytest.raises(
        UsageError, match=f"--attention-backend {choice} needs a GPU; valid on a CPU: auto, varlen, flash, math"
    ):
        tiny_plan(attention_backend=choice)
    assert tiny_plan(attention_backend="math").attention_backend == "math"


def test_varlen_is_refused_without_documents(tiny_plan: Callable[..., Plan]) -> None:
    with pytest.raises(UsageError, match="--attention-backend varlen is for sequences packed from documents"):
        tiny_plan(attention_backend="varlen")
    assert tiny_plan(attention_backend="varlen", document_tokens=40).attention_backend == "varlen"


def test_a_cpu_computes_documents_without_masks_if_it_can() -> None:
    report = select("auto", try_backends("auto", "cpu", attempts(), packed=True))
    assert (report.backend, report.why) == ("varlen", "varlen skips pairs of tokens of different documents")
    assert [trial.backend for trial in report.trials] == ["varlen"]
    compiled = select("auto", try_backends("auto", "cpu", attempts("varlen"), packed=True))
    assert (compiled.backend, [trial.backend for trial in compiled.trials]) == ("flash", ["varlen", "flash"])


def test_a_gpu_times_documents_without_masks_beside_the_others() -> None:
    report = select("auto", try_backends("auto", "cuda", attempts("flash"), packed=True))
    assert [trial.backend for trial in report.trials] == ["varlen", *FUSED]
    assert (report.backend, report.why) == ("varlen", "the fastest of 5 that were timed")
