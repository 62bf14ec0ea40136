# SPDX-License-Identifier: Apache-2.0
"""Runs that are known by their logs alone: which are repeats, which are comparable, and which cannot be true."""

import json
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from called_here import call_llmb
from step_lines import step_line

NAME = "log-acct.pretrain_llama3.1_8b_bf16_gpus8_tp1_pp1_cp2_vp1_mbs1_gbs128_{}_0.out"
START = datetime(2026, 4, 28, 14, 23)
SXM = "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-1)\n"
ARGUMENTS = (
    "  tensor_model_parallel_size ...................... 4\n  global_batch_size ............................... {gbs}\n"
    "  hidden_size ..................................... {hidden}\n"
    "  seed ............................................ {seed}\n"
    "  save ............................................ /ckpt/{seed}\n"
)


def write(path: Path, *, s: float = 12.3, gbs: int = 128, head: str = "", tflops: float | None = None) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    told: dict[str, Any] = {"global_batch_size": gbs, "tflops_per_gpu": tflops}
    lines = (step_line(n, step_time_s=s + n % 3 / 50, loss=11 - n / 50, **told) for n in range(50))
    path.write_text(head + "".join(lines))
    return path


def call(*words: object) -> tuple[dict[str, Any], int]:
    done = call_llmb(*words, "--json")
    return done.document, done.returncode


@pytest.fixture(autouse=True)
def install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LLMB_INSTALL", str(tmp_path))


def test_logs_with_equal_arguments_are_repeats_whatever_they_are_called(tmp_path: Path) -> None:
    for side, s in {"a": 12.3, "b": 11.3}.items():
        for seed, name in enumerate(("monday.out", "tuesday.out", "x/run.out")):
            write(tmp_path / side / name, s=s + seed / 100, head=ARGUMENTS.format(gbs=128, hidden=4096, seed=seed))
    (row,) = call("compare", tmp_path / "a", tmp_path / "b")[0]["rows"]
    assert (row["n_before"], row["n_after"], row["verdict"]) == (3, 3, "improved")
    found, code = call("judge", tmp_path / "b", "--against", tmp_path / "a")
    (judged,) = found["judged"]
    assert (len(judged["runs"]), judged["reference"]["runs"], judged["verdict"], code) == (3, 3, "improved", 0)
    (group,) = call("parse", tmp_path / "a", "--group")[0]["groups"]
    assert len(group["runs"]) == 3


def test_logs_with_other_arguments_are_none(tmp_path: Path) -> None:
    for number, hidden in enumerate((4096, 4096, 8192)):
        write(
            tmp_path / "a" / f"run{number}.out",
            s=12 + number / 100,
            head=ARGUMENTS.format(gbs=128, hidden=hidden, seed=1),
        )
    groups = call("parse", tmp_path / "a", "--group")[0]["groups"]
    assert sorted(len(group["runs"]) for group in groups) == [1, 2]


def test_of_logs_that_tell_nothing_those_called_alike_are_repeats(tmp_path: Path) -> None:
    for number in range(3):
        write(tmp_path / "a" / f"before{number}.out", s=12.3 + number / 100)
        write(tmp_path / "a" / f"other-{number}.out", s=7 + number / 100)
        write(tmp_path / "b" / f"after{number}.out", s=11.3 + number / 100)
    assert [len(one["runs"]) for one in call("parse", tmp_path / "a", "--group")[0]["groups"]] == [3, 3]
    for number in range(3):
        (tmp_path / "a" / f"other-{number}.out").unlink()
    (row,) = call("compare", tmp_path / "a", tmp_path / "b")[0]["rows"]
    assert (row["n_before"], row["n_after"], row["verdict"]) == (3, 3, "improved")
    (judged,) = call("judge", tmp_path / "b", "--against", tmp_path / "a")[0]["judged"]
    assert (judged["verdict"], judged["soft"], len(judged["runs"])) == ("improved", True, 3)


def test_logs_of_other_batches_are_not_comparable(tmp_path: Path) -> None:
    for number in range(3):
        write(tmp_path / "a" / f"before{number}.out", s=12.3 + number / 100)
        write(tmp_path / "b" / f"after{number}.out", s=6.2 + number / 100, gbs=64)
    found, code = call("compare", tmp_path / "a", tmp_path / "b")
    assert (found["rows"], found["verdict"], code) == ([], "not comparable", 6)
    assert {"key": "layout.gbs", "before": 128, "after": 64} in found["unmatched"][0]["differs"]
    found, code = call("judge", tmp_path / "b", "--against", tmp_path / "a")
    (judged,) = found["judged"]
    assert (judged["verdict"], code) == ("not comparable", 6)
    assert judged["reason"].startswith("global batch size differs")


def test_a_log_of_half_the_work_is_not_judged_as_the_recipe(tmp_path: Path) -> None:
    folder = "pretrain_llama3.1_8b_bf16_8"
    write(tmp_path / "half" / folder / "log-a_8_0.out", gbs=64)
    found, code = call("judge", tmp_path / "half", "--gpu-type", "h100")
    (judged,) = found["judged"]
    assert (judged["reference"]["kind"], judged["soft"]) == ("prediction", True), "the published figure is of 128"
    assert "global batch size 64, but 128 in the recipe" in judged["reference"]["source"]
    (parsed,) = call("parse", tmp_path / "half", "--gpu-type", "h100")[0]["results"]
    assert (parsed["layout"], parsed["mfu_pct"]) == ({"gbs": 64}, {})
    write(tmp_path / "eighth" / NAME.format(1), s=1.55, gbs=16)
    found, code = call("judge", tmp_path / "eighth", "--gpu-type", "h100")
    assert (found["judged"][0]["verdict"], code) == ("invalid", 6)


@pytest.mark.parametrize(
    "gpu", ["GPU 0: NVIDIA H20 (UUID: GPU-1)", "NVIDIA GH200 480GB", "NVIDIA H100 80GB HBM3 MIG 3g.40gb"]
)
def test_a_variant_of_a_gpu_has_no_figures_of_another(tmp_path: Path, gpu: str) -> None:
    write(tmp_path / NAME.format(1), head=f"{gpu}\n", tflops=600.0)
    (parsed,) = call("parse", tmp_path)[0]["results"]
    assert (parsed["status"], parsed["mfu_pct"]) == ("success", {})
    assert parsed["gpu_type"] in gpu and parsed["gpu_type"] != "h100"
    found, code = call("judge", tmp_path)
    assert (found["judged"][0]["verdict"], code) == ("not comparable", 6)
    assert "variants such as SXM and PCIe differ" in found["judged"][0]["reason"]
    for command in ("parse", "judge"):
        found, code = call(command, tmp_path, "--gpu-type", "h100")
        assert code == 2 and "h100 was specified" in found["error"]["what"]
        assert parsed["gpu_type"] in found["error"]["what"]


def test_a_log_that_is_too_fast_for_its_gpus_is_invalid_everywhere(tmp_path: Path) -> None:
    slow, fast = (write(tmp_path / name / NAME.format(1), s=s, head=SXM) for name, s in (("a", 12.3), ("b", 1.55)))
    why = "the MFU would be 4"
    (parsed,) = call("parse", fast)[0]["results"]
    assert (parsed["status"], parsed["mfu_pct"], parsed["step_time_s"]) == ("invalid", {}, None)
    assert parsed["reason"].startswith(why)
    for words in (["judge", fast], ["judge", fast, "--against", slow], ["judge", fast, "--window", "20-40"]):
        found, code = call(*words)
        assert (found["judged"][0]["verdict"], code) == ("invalid", 6)
        assert why in found["judged"][0]["reason"]
    found, code = call("compare", slow, fast)
    assert (found["rows"], found["verdict"], code) == ([], "not comparable", 6)
    assert why in found["left_out"][0]["reason"]
    untold = write(tmp_path / "c" / NAME.format(1), s=1.55)
    assert why in call("judge", untold, "--gpu-type", "h100")[0]["judged"][0]["reason"]
    logged = write(tmp_path / "d" / "log-pretrain_own_8b_bf16_gpus8_1_0.out", s=1.55, head=SXM, tflops=1200.0)
    assert call("parse", logged)[0]["results"][0]["reason"].startswith("the MFU would be 121.3 % (logged)")


def test_a_warning_of_a_log_makes_its_verdict_soft(tmp_path: Path) -> None:
    line = (
        " [{at:%Y-%m-%d %H:%M:%S}] iteration {n:8d}/      50 | elapsed time per iteration (ms): {ms} | lm loss: 2.0 |"
        " grad norm: 1.0 | number of skipped iterations:   0 | number of nan iterations:   0 |\n"
    )
    for name, jump in (("a", 0), ("b", 3600)):
        times = (START + timedelta(seconds=12 * n - (jump if n == 40 else 0)) for n in range(1, 51))
        lines = [line.format(at=at, n=n, ms=12000 + n % 3 * 10) for n, at in enumerate(times, 1)]
        (tmp_path / f"{name}.out").write_text("".join(lines))
    why = "the clock of the log's lines goes back in the window"
    (judged,) = call("judge", tmp_path / "b.out", "--against", tmp_path / "a.out")[0]["judged"]
    assert judged["soft"] and why in json.dumps(judged["conditions"])
    (parsed,) = call("parse", tmp_path / "b.out")[0]["results"]
    assert (parsed["status"], parsed["warnings"]) == ("success", [why])
    (row,) = call("compare", tmp_path / "a.out", tmp_path / "b.out")[0]["rows"]
    assert row["soft"] and why in row["reason"]
