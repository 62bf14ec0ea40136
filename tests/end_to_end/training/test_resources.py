# SPDX-License-Identifier: Apache-2.0
"""Resources sampled beside real runs of a tiny model."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from slowed_runs import Slow, slowed

from llmb.readers.samples.sample_records import ResourceUse
from llmb.readers.samples.samples import read_samples
from llmb.reports.run_report import resource_rows

Start = Callable[..., Any]
LLAMA = ("-w", "pretrain_llama3.1", "--scale", "2")
OFTEN = ("--resource-interval", "0.01", "--window", "4-9")


@pytest.mark.slow
def test_a_run_tells_what_its_window_used(
    start: Start, tmp_path: Path, forked_python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its steps last until they are sampled: on a busy machine the sampler, of the lowest priority, has to wait."""
    for name, value in slowed(Slow("sampled", rank=0)).items():
        monkeypatch.setenv(name, value)
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        run = start(*LLAMA, *OFTEN, "--steps", "10", "--json", python=forked_python)
        out, talk = run.process.communicate()
        busy.kill()
    assert run.process.returncode == 0, talk
    result = json.loads(out)
    assert result["resources_reason"] is None
    assert any("other processes used" in each for each in result["other_work"]["disturbing"]), result["other_work"]
    use = ResourceUse.model_validate(result["resources"])
    (host,) = use.hosts
    assert host.node == os.uname().nodename
    assert host.samples == use.samples > 0
    assert host.cpu_pct_mean is not None and 0 < host.cpu_pct_mean <= 100.1
    assert host.memory_used_gib_max and host.worker_memory_gib_max and host.worker_memory_gib_max > 0.05
    assert use.gpus is None and use.reasons["gpus"] == "the run is on a CPU"
    assert (use.energy_j is None) == ("energy_j" in use.reasons)
    assert next(iter(resource_rows(use)))[0] == "host CPU %"
    (sampled,) = read_samples(Path(result["run_dir"]) / "resources")
    steps = [json.loads(line) for line in (Path(result["run_dir"]) / "metrics.jsonl").read_text().splitlines()]
    began_s, ended_s = steps[4]["ended_s"] - steps[4]["step_time_s"], steps[9]["ended_s"]
    assert ended_s <= sampled.samples[-1].time_s
    inside = [sample for sample in sampled.samples if began_s <= sample.time_s <= ended_s]
    assert 0 < use.samples <= len(inside) < len(sampled.samples)
    ends = [step["ended_s"] for step in steps]
    assert ends == sorted(ends)
    assert run.record()["result"]["resources"] == result["resources"]
    assert not run.samplers()


@pytest.mark.slow
def test_a_run_need_not_be_sampled(start: Start, forked_python: str) -> None:
    run = start(*LLAMA, "--steps", "2", "--no-resources", "--json", python=forked_python)
    out, talk = run.process.communicate()
    assert run.process.returncode == 0, talk
    result = json.loads(out)
    assert (result["resources"], result["resources_reason"]) == (None, "the run was not sampled")
    assert not (Path(result["run_dir"]) / "resources").exists()


@pytest.mark.measured
def test_a_run_whose_samples_cannot_be_written_is_a_success(start: Start, tmp_path: Path) -> None:
    """Another file is where the folder should be: it is put there before the workers have loaded torch."""
    run = start(*LLAMA, "--steps", "5", "--json")
    while not (records := list(tmp_path.rglob("run.json"))):
        assert run.process.poll() is None
    (records[0].parent / "resources").write_text("")
    out, talk = run.process.communicate()
    assert run.process.returncode == 0, talk
    result = json.loads(out)
    assert result["status"] == "success"
    assert result["step_time_s"]["mean"] > 0
    assert result["resources_reason"] == "the run folder has no samples"
