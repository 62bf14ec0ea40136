# SPDX-License-Identifier: Apache-2.0
"""Jobs of Megatron-Bridge on a real Slurm, with a container runtime that prints the framework's log lines."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from slurm_client import Client, ended, run_out_of_time, wait_until

from llmb.jobs.history import open_history
from llmb.runs.folder import RunFolder
from llmb.runs.plan import EnginePlan
from llmb.runs.record import read_record

pytestmark = [pytest.mark.slurm, pytest.mark.slow]
SETTINGS = """\
gpu_type: h100
slurm: {partition: gpu}
container: {runtime: apptainer, image: nemo.sif}
"""
# As Megatron-Bridge logs an iteration (tests/readers/logs/test_megatron.py); every task begins, the first one logs.
RUNTIME = r"""#!/bin/bash
[ "$SLURM_PROCID" = 0 ] || exit 0
for n in $(seq 1 "$BRIDGE_STEPS"); do
    printf ' [2026-01-01 00:00:00.000000] iteration %8d/%8d | consumed samples: %12d |' "$n" 20 "$((n * 32))"
    printf ' elapsed time per iteration (ms): 10000.0 | learning rate: 1.000000E-05 | global batch size:    32 |'
    printf ' lm loss: %d.5E+00 | grad norm: 1.0 | number of skipped iterations:   0 |' "$((9 - n / 4))"
    printf ' number of nan iterations:   0 |\n'
done
sleep "$BRIDGE_SLEEP"
exit "$BRIDGE_EXIT"
"""
BRIDGE = ("-w", "finetune_llama3", "-s", "70b", "--scale", "8", "--steps", "20", "--framework", "megatron_bridge")


@pytest.fixture
def bridge(shell: Client, tmp_path: Path) -> Client:
    """A cluster whose container runtime stands in for the framework."""
    (shell.install / "cluster_config.yaml").write_text(SETTINGS)
    runtime = tmp_path / "bin" / "apptainer"
    runtime.parent.mkdir()
    runtime.write_text(RUNTIME)
    runtime.chmod(0o755)
    return shell


@pytest.fixture
def pretended(bridge: Client, tmp_path: Path) -> Callable[..., dict[str, str]]:
    """Variables by which the framework does so many steps, then sleeps, then ends."""

    def variables(steps: int, sleep_s: int = 0, code: int = 0) -> dict[str, str]:
        path = f"{tmp_path / 'bin'}:{bridge.cluster.environ['PATH']}"
        return {"PATH": path, "BRIDGE_STEPS": str(steps), "BRIDGE_SLEEP": str(sleep_s), "BRIDGE_EXIT": str(code)}

    return variables


def test_submit_waits_for_it_and_prints_its_result(bridge: Client, pretended: Callable[..., dict[str, str]]) -> None:
    result = bridge.json("submit", *BRIDGE, "--wait", **pretended(20))
    assert (result["status"], result["steps"], result["step_time_s"]["mean"]) == ("success", 20, 10.0)
    assert result["tokens_per_s_per_gpu"] == pytest.approx(32 * 4096 / 10 / 8)
    assert result["machine"]["state"] == "unknown", "nothing happened, and no GPU is here to tell"
    assert result["machine"]["unread"][0]["what"] == "counters of the GPUs"
    folder = RunFolder(Path(result["run_dir"]))
    record = read_record(folder)
    assert record.program == "megatron_bridge"
    assert not isinstance(record.plan, EnginePlan)
    kept = json.loads(folder.record.read_text())
    assert not {"attention_backend", "keep_logits", "compiled", "recompute", "parallelism"} & set(kept["plan"])
    assert bridge.json("result", str(folder.path)) == result
    (row,) = bridge.json("jobs", "list")["jobs"]
    assert (row["status"], row["step_time_s"]) == ("success", 10.0)


@pytest.mark.measured
def test_a_time_limit_says_how_far_its_log_came(bridge: Client, pretended: Callable[..., dict[str, str]]) -> None:
    """Both jobs at once: Slurm looks for such jobs twice a minute."""
    queued = [bridge.json("submit", *BRIDGE, **pretended(steps, sleep_s=300))["jobs"][0] for steps in (20, 7)]
    for one, steps in zip(queued, (20, 7), strict=True):
        log = RunFolder(Path(one["run_dir"])).log
        wait_until(
            lambda log=log, steps=steps: log.exists() and f"iteration {steps:8d}/" in log.read_text(),
            f"{steps} steps in {log}",
        )
    run_out_of_time(bridge.cluster, *(one["job_id"] for one in queued))
    with open_history(bridge.install, lambda _: None) as store:
        keys = {row.job_id: row.key for row in store.jobs()}
        through, half = (ended(store, bridge, keys[one["job_id"]]) for one in queued)
    assert (through.state, through.status) == ("TIMEOUT", "success")
    assert read_record(RunFolder(Path(through.run_dir))).status == "success"
    assert (half.state, half.status) == ("TIMEOUT", "failed")
    assert str(half.reason).endswith("after 7 of 20 steps")
    record = read_record(RunFolder(Path(half.run_dir)))
    assert record.status == "failed" and "died after step 7 of 20" in str(record.reason)


def test_an_end_of_its_own_is_judged_by_its_log(bridge: Client, pretended: Callable[..., dict[str, str]]) -> None:
    bridge.run("submit", *BRIDGE, "--wait", code=4, **pretended(5, code=3))
    (row,) = bridge.json("jobs", "list")["jobs"]
    assert (row["state"], row["status"], row["exit_code"]) == ("FAILED", "failed", 3)
    assert row["reason"].startswith("died after step 5 of 20")
