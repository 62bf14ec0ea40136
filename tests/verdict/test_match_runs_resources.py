# SPDX-License-Identifier: Apache-2.0
"""Clocks and power that changed between two groups of runs."""

from pathlib import Path

from recorded_runs import gpu_record, write_run

from llmb.jobs.read_run import read_folder, recorded_run
from llmb.readers.samples.sample_records import ResourceUse
from llmb.runs.analyzed_run import AnalyzedRun
from llmb.runs.conditions import Difference
from llmb.runs.folder import RunFolder
from llmb.runs.record import read_record, write_record
from llmb.verdict.compare_runs import resource_differences


def sampled(root: Path, clock_mhz: float | None, power_w: float | None) -> AnalyzedRun:
    folder = RunFolder(write_run(root, gpu_record(), [2.0] * 50))
    record = read_record(folder)
    assert record.result
    names = dict.fromkeys(ResourceUse.model_fields)
    known = {"samples": 1, "sm_clock_mhz_mean": clock_mhz, "power_w_mean": power_w, "hosts": (), "reasons": {}}
    result = record.result.model_copy(update={"resources": ResourceUse.model_validate({**names, **known})})
    write_record(folder, record.model_copy(update={"result": result}))
    return recorded_run(read_folder(folder))


def test_a_clock_that_fell_is_listed_and_power_that_hardly_changed_is_not(tmp_path: Path) -> None:
    before = [sampled(tmp_path, clock, 650.0) for clock in (1750.0, 1760.0)]
    after = [sampled(tmp_path, 1600.4, 655.0), sampled(tmp_path, None, None)]
    expected = Difference(key="resources.sm_clock_mhz_mean", before=1755, after=1600)
    assert list(resource_differences(before, after)) == [expected]
    assert list(resource_differences(before, before)) == []


def test_runs_that_were_not_sampled_tell_nothing(tmp_path: Path) -> None:
    without = recorded_run(read_folder(RunFolder(write_run(tmp_path, gpu_record(), [2.0] * 50))))
    assert list(resource_differences([without], [sampled(tmp_path, 1500.0, 500.0)])) == []
