# SPDX-License-Identifier: Apache-2.0
"""What the microbenchmarks time is what they say: the right product, whole sequences, real copies."""

import time

import pytest
import torch

from llmb.engine.precision.scaling import FORMATS, GRADIENT, INPUT, WEIGHT
from llmb.nodes.bench.protocol import PASSES, AttentionCase, Case, CaseList, CopyCase, LaunchCase, ProductCase
from llmb.nodes.bench.worker import measure_device as timing
from llmb.nodes.bench.worker import measure_device as worker_run
from llmb.nodes.bench.worker.measure_device import (
    DTYPES,
    MANY,
    AttentionChoices,
    PreparedCall,
    add_many,
    copy,
    free_bytes,
    last_part,
    needed_bytes,
    product,
    run_job,
    timed,
)

CPU = torch.device("cpu")
M, K, N = 48, 32, 64
SIZES = {"forward": ((M, K), (N, K)), "input_gradient": ((M, N), (N, K)), "weight_gradient": ((M, N), (M, K))}
SUMS = {"forward": "mk,nk->mn", "input_gradient": "mn,nk->mk", "weight_gradient": "mn,mk->nk"}
FP8_SIZES = {"forward": ((M, K), (N, K)), "input_gradient": ((M, N), (K, N)), "weight_gradient": ((N, M), (K, M))}
FP8_SUMS = {"forward": "mk,nk->mn", "input_gradient": "mn,kn->mk", "weight_gradient": "nm,km->nk"}
FP8_OPERANDS = {"forward": (INPUT, WEIGHT), "input_gradient": (GRADIENT, WEIGHT), "weight_gradient": (GRADIENT, INPUT)}
ATTENTION = AttentionCase(
    batch=2, heads=4, kv_heads=2, seq_len=32, head_dim=16, dtype="fp32", direction="forward", backend="auto"
)


def job(*works, **values):
    return CaseList(
        device="cpu", cases=tuple(Case(name=f"case {n}", work=work) for n, work in enumerate(works)), **values
    )


@pytest.mark.parametrize("training_pass", PASSES)
@pytest.mark.parametrize(("dtype", "close"), [("fp32", 1e-5), ("bf16", 2e-2), ("fp16", 2e-3)])
def test_a_pass_multiplies_what_it_says(dtype, close, training_pass) -> None:
    torch.manual_seed(7)
    result = product(ProductCase(m=M, k=K, n=N, dtype=dtype, training_pass=training_pass), CPU)()
    torch.manual_seed(7)
    operands = [torch.randn(*size, dtype=DTYPES[dtype]).double() for size in SIZES[training_pass]]
    expected = torch.einsum(SUMS[training_pass], *operands)
    assert result.dtype is DTYPES[dtype]
    torch.testing.assert_close(result.double(), expected, rtol=close, atol=close * float(expected.abs().max()))


@pytest.mark.parametrize("training_pass", PASSES)
def test_an_fp8_product_is_the_engines_of_its_formats(training_pass) -> None:
    torch.manual_seed(7)
    result = product(ProductCase(m=M, k=K, n=N, dtype="fp8", training_pass=training_pass), CPU)()
    torch.manual_seed(7)
    operands = [
        torch.randn(*size, dtype=torch.bfloat16).to(FORMATS[which]).double()
        for size, which in zip(FP8_SIZES[training_pass], FP8_OPERANDS[training_pass], strict=True)
    ]
    expected = torch.einsum(FP8_SUMS[training_pass], *operands)
    torch.testing.assert_close(result.double(), expected, rtol=1e-2, atol=1e-2)


def attention_parts(case):
    """Query, key, value and the result's gradient, as the case draws them."""
    torch.manual_seed(7)
    counts = (case.heads, case.kv_heads, case.kv_heads, case.heads)
    return [torch.randn(case.batch, case.seq_len, count, case.head_dim) for count in counts]


def plain_attention(query, key, value):
    """Causal, with repeated heads, written out."""
    group = query.shape[2] // key.shape[2]
    query, key, value = (part.double() for part in (query, key, value))
    key, value = (part.repeat_interleave(group, 2) for part in (key, value))
    scores = torch.einsum("bqhd,bkhd->bhqk", query, key) / query.shape[-1] ** 0.5
    ahead = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return torch.einsum("bhqk,bkhd->bqhd", scores.masked_fill(ahead, -torch.inf).softmax(-1), value)


@pytest.mark.parametrize("direction", ["forward", "backward", "both"])
def test_attention_is_causal_with_grouped_heads(direction) -> None:
    case = ATTENTION.model_copy(update={"direction": direction})
    choices = AttentionChoices(CPU, job(case))
    choices.prepare(case)  # tries backends, which draws numbers
    torch.manual_seed(7)
    prepared = choices.prepare(case)
    with prepared.context:
        results = prepared.call()
    *inputs, gradient = attention_parts(case)
    leaves = [part.requires_grad_() for part in inputs]
    seen = plain_attention(*leaves)
    expected = [seen] if direction == "forward" else torch.autograd.grad(seen, leaves, gradient.double())
    assert prepared.backend == "flash"
    found = [results] if direction == "forward" else results
    for result, other in zip(found, expected, strict=True):
        torch.testing.assert_close(result.double(), other.double(), rtol=1e-4, atol=1e-4)


def test_a_backward_pass_can_be_repeated() -> None:
    case = ATTENTION.model_copy(update={"direction": "backward", "backend": "math"})
    prepared = AttentionChoices(CPU, job(case)).prepare(case)
    assert timed(prepared, CPU, job(case, least_repeats=4, most_repeats=4), None).repeats == 4


def test_the_same_shape_is_tried_once() -> None:
    choices = AttentionChoices(CPU, job(ATTENTION))
    for direction in ("forward", "backward", "both"):
        choices.prepare(ATTENTION.model_copy(update={"direction": direction}))
    assert len(choices.chosen) == 1


def test_a_copy_copies_all_bytes() -> None:
    call = copy(CopyCase(size_bytes=1000), CPU).call
    target = call()
    (source,) = (cell.cell_contents for cell in call.__closure__ if cell.cell_contents is not target)
    assert target.data_ptr() != source.data_ptr() and torch.equal(target, source) and target.numel() == 1000


def test_a_launch_is_one_of_many_additions() -> None:
    value = torch.zeros(1)
    add_many(value)
    assert value.item() == MANY


def test_the_last_third_counts() -> None:
    assert last_part([9.0, 1.0, 1.0, 1.0], 2) == ([4.5, 0.5, 0.5, 0.5], 8)
    assert last_part([1.0] * 9, 10) == ([0.1] * 3, 30)
    assert last_part([5.0], 1) == ([5.0], 1)


def test_what_is_sustained_takes_as_long_as_asked(monkeypatch) -> None:
    """On a clock of the test: each call takes 10 ms, and a chunk has as many as fill its time."""
    now = [0.0]
    calls = []

    def call():
        calls.append(now[0])
        now[0] += 0.01

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    found = timed(PreparedCall(call), CPU, job(), sustained_s=3.0)
    assert found.seconds == pytest.approx(0.01)
    assert now[0] >= 3.0
    per_chunk = round(timing.CHUNK_S / 0.01)
    assert found.repeats % per_chunk == 0 and found.repeats == pytest.approx(100, abs=2 * per_chunk)


def test_a_burst_is_the_median_after_warm_ups() -> None:
    times = iter([100.0, 3.0, 1.0, 2.0])
    warm = []
    call = PreparedCall(lambda: warm.append(next(times) if not warm else None), seconds=lambda: next(times))
    found = timed(call, CPU,
                  job(warm_ups=1, least_repeats=3, most_repeats=3), None)  # fmt: skip
    assert (found.seconds, found.fastest, found.slowest, found.repeats) == (2.0, 1.0, 3.0, 3)
    assert warm == [100.0]


def test_a_shape_without_memory_is_named_and_the_others_are_measured(monkeypatch) -> None:
    monkeypatch.setattr("llmb.nodes.bench.worker.measure_device.free_bytes", lambda: 10**6)
    small, large = CopyCase(size_bytes=1000), CopyCase(size_bytes=10**6)
    said = []
    found = run_job(job(large, small), said.append)
    assert [timing.out_of_memory for timing in found.timings] == [True, False]
    assert found.timings[0].reason == "it needs 0.002 GB, but only 0.001 GB of memory are free"
    assert found.timings[1].seconds > 0
    assert [(line.name, line.number, line.total) for line in said] == [("case 0", 0, 2), ("case 1", 1, 2)]


def test_torchs_own_lack_of_memory_is_told_from_other_errors(monkeypatch) -> None:
    monkeypatch.setattr("llmb.nodes.bench.worker.measure_device.free_bytes", lambda: None)
    huge = CopyCase(size_bytes=2**60)
    odd = ATTENTION.model_copy(update={"backend": "cudnn"})
    found = run_job(job(huge, odd), lambda line: None).timings
    assert [timing.out_of_memory for timing in found] == [True, False]
    assert "memory" in found[0].reason and found[1].reason


def test_what_measured_is_described() -> None:
    device = run_job(job(LaunchCase(way="host")), lambda line: None).device
    assert device.torch == torch.__version__ and device.cpu_threads == torch.get_num_threads()
    assert device.device and (device.cuda, device.nccl, device.device_memory_gib) == (None, None, None)


def test_memory_is_what_the_kernel_or_the_container_leaves(tmp_path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  9 kB\nMemAvailable:       2000 kB\n")
    group = tmp_path / "cgroup"
    assert free_bytes(meminfo, group) == 2_048_000
    group.mkdir()
    (group / "memory.current").write_text("4000\n")
    for limit, free in (("max", 2_048_000), ("5000", 1000)):
        (group / "memory.max").write_text(f"{limit}\n")
        assert free_bytes(meminfo, group) == free
    assert free_bytes(tmp_path / "none", tmp_path / "none") is None


def test_the_memory_a_product_needs_is_at_least_that_of_its_matrices() -> None:
    for dtype, size in worker_run.BYTES.items():
        case = ProductCase(m=M, k=K, n=N, dtype=dtype, training_pass="forward")
        assert needed_bytes(case) == size * (M * K + N * K + M * N)


@pytest.mark.gpu
class TestOnAGpu:
    """The paths of CUDA, on whatever device there is."""

    @pytest.fixture(autouse=True)
    def device(self, needs) -> None:
        needs("gpu", torch.cuda.is_available(), "no CUDA device")

    @pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32", "fp8"])
    def test_products_in_every_dtype(self, dtype) -> None:
        if dtype == "fp8" and torch.cuda.get_device_capability() < (8, 9):
            pytest.skip("this GPU has no FP8")
        works = [ProductCase(m=256, k=512, n=1024, dtype=dtype, training_pass=one) for one in PASSES]
        found = run_job(CaseList(device="cuda", cases=tuple(Case(name="one", work=work) for work in works)), print)
        assert [timing.reason for timing in found.timings] == [None] * 3
        assert all(0 < timing.fastest <= timing.seconds <= timing.slowest for timing in found.timings)
        assert found.device.device == torch.cuda.get_device_name()

    @pytest.mark.parametrize("direction", ["forward", "backward", "both"])
    def test_attention_has_the_fastest_backend(self, direction) -> None:
        case = ATTENTION.model_copy(update={"direction": direction, "dtype": "bf16", "seq_len": 512, "head_dim": 64})
        (timing_,) = run_job(CaseList(device="cuda", cases=(Case(name="one", work=case),)), print).timings
        assert timing_.seconds > 0 and timing_.backend in ("flash", "cudnn", "efficient")

    def test_transfers_both_ways(self) -> None:
        from llmb.nodes.bench.device_bench import transfer_cases

        cases = tuple(asked.case for asked in transfer_cases((2**20,)))
        found = run_job(CaseList(device="cuda", cases=cases), print).timings
        assert len(found) == 4 and all(timing_.seconds > 0 for timing_ in found)

    def test_launches_every_way(self) -> None:
        from llmb.nodes.bench.device_bench import launch_cases

        cases = tuple(asked.case for asked in launch_cases("cuda"))
        found = run_job(CaseList(device="cuda", cases=cases), print).timings
        assert [timing_.reason for timing_ in found] == [None] * 4
        host, _device, graph, round_trip = (timing_.seconds for timing_ in found)
        assert graph < round_trip and host < 1e-3

    def test_what_is_sustained_is_one_call(self) -> None:
        work = ProductCase(m=2048, k=2048, n=2048, dtype="bf16", training_pass="forward")
        burst, long = (Case(name="one", work=work, sustained_s=seconds) for seconds in (None, 1.0))
        found = run_job(CaseList(device="cuda", cases=(burst, long)), print).timings
        assert found[1].repeats > found[0].repeats
        assert found[0].seconds / 5 < found[1].seconds < 5 * found[0].seconds

    def test_a_shape_without_memory_is_named(self) -> None:
        huge, small = CopyCase(size_bytes=2**42), CopyCase(size_bytes=2**20)
        cases = (Case(name="huge", work=huge), Case(name="small", work=small))
        found = run_job(CaseList(device="cuda", cases=cases), print).timings
        assert found[0].out_of_memory and found[1].seconds > 0
