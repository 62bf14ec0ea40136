# SPDX-License-Identifier: Apache-2.0
"""Results as JUnit XML, read back by a reader that is not ours."""

from collections.abc import Callable
from pathlib import Path

import pytest
from job_rows import job_row
from junitparser import Error, Failure, JUnitXml, Skipped
from timed_runs import noisy_times, write_run
from typer.testing import CliRunner

from llmb.base.errors import LlmbError, Regressed
from llmb.cli.main import app
from llmb.nodes.doctor.check_records import Check, NodeReport, NotChecked
from llmb.reports.junit import JunitCase, job_cases, junit_text, node_cases, write_junit
from llmb.runs.plan import Plan

ROOT = Path(__file__).parents[1] / "data" / "root"
Read = Callable[[Path], dict[str, tuple[type | None, str]]]


@pytest.fixture
def read() -> Read:
    """Outcome and text of each test by its name; the counts of the file have to be those of its tests."""

    def reader(path: Path) -> dict[str, tuple[type | None, str]]:
        xml = JUnitXml.fromfile(str(path))
        (suite,) = xml
        told = xml.tests, xml.failures, xml.errors, xml.skipped
        xml.update_statistics()
        assert told == (xml.tests, xml.failures, xml.errors, xml.skipped)
        cases = {case.name: case for case in suite}
        return {
            name: (type(case.result[0]), case.result[0].message) if case.result else (None, case.system_out or "")
            for name, case in cases.items()
        }

    return reader


def test_what_was_not_checked_is_skipped_with_its_reason(read: Read, tmp_path: Path) -> None:
    checks = (
        Check(name="gpu_count", status="pass", value=8),
        Check(name="cpu_governor", status="warn", value="powersave", advice="set performance"),
        Check(name="gpu_ecc", status="fail", value="3 errors", advice="drain it"),
    )
    missing = (NotChecked(name="network_rdma", reason="no card"),)
    answer = Check(name="nodes_answer", status="warn", value="not checked: it was busy", advice="later")
    node = NodeReport(node="n1.site", checked_at="", status="fail", checks=checks, not_checked=missing)
    busy = NodeReport(node="n2", checked_at="", status="warn", checks=(answer,))
    write_junit(tmp_path / "nodes.xml", "doctor", lambda: node_cases([node, busy]))
    assert read(tmp_path / "nodes.xml") == {
        "n1.site: gpu_count": (None, "8"),
        "n1.site: cpu_governor": (None, "warning: powersave; set performance"),
        "n1.site: gpu_ecc": (Failure, "3 errors; drain it"),
        "n1.site: network_rdma": (Skipped, "no card"),
        "n2: nodes_answer": (Skipped, "not checked: it was busy; later"),
    }


def test_jobs_that_did_not_succeed_do_not_pass(read: Read, tmp_path: Path) -> None:
    jobs = (
        job_row("a", status="success", started_s=10.0, ended_s=12.5),
        job_row("b", status="failed", reason="rank 3 left"),
        job_row("c", status="invalid", reason="a loss of nan"),
        job_row("d", status="queued"),
    )
    write_junit(tmp_path / "jobs.xml", "jobs", lambda: job_cases(jobs))
    found = list(read(tmp_path / "jobs.xml").values())
    assert [outcome for outcome, _ in found] == [None, Failure, Error, Error]
    assert [text for _, text in found][1:3] == ["failed: rank 3 left", "invalid: a loss of nan"]
    assert 'time="2.500"' in (tmp_path / "jobs.xml").read_text()


def test_text_that_xml_cannot_have_is_shown(read: Read, tmp_path: Path) -> None:
    odd = 'a<b>&"\x1b[31m\x00\ud800\uffff]]>'
    (tmp_path / "odd.xml").write_text(junit_text("judge", [JunitCase(odd, odd, "failure", odd)]))
    ((name, (_, text)),) = read(tmp_path / "odd.xml").items()
    assert name == f"{text}: {text}"
    assert text == 'a<b>&"�[31m���]]>'


def test_verdicts_and_rows_are_those_of_the_documents(
    read: Read, tmp_path: Path, tiny_plan: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLMB_INSTALL", str(tmp_path))
    means = {("before", "fp32"): 2.0, ("before", "bf16"): 1.0, ("after", "fp32"): 2.0, ("after", "bf16"): 1.05}
    for number, ((folder, dtype), mean_s) in enumerate(means.items()):
        for repeat in range(3):
            plan, seed = tiny_plan(dtype=dtype), 10 * number + repeat
            write_run(tmp_path / folder, plan, noisy_times(mean_s, 0.003, plan.steps, seed=seed), number=seed)
    write_run(tmp_path / "after", tiny_plan(), [2.0, 2.0], number=90, failed="out of memory")
    before, after = str(tmp_path / "before"), str(tmp_path / "after")
    assert called("compare", before, after, junit=tmp_path / "rows.xml").exit_code == Regressed.exit_code
    assert [outcome for outcome, _ in read(tmp_path / "rows.xml").values()] == [None, Failure, Skipped]
    (left_out,) = [text for name, (_, text) in read(tmp_path / "rows.xml").items() if name.startswith("left out after")]
    assert "out of memory" in left_out
    assert called("judge", after, "--against", before, junit=tmp_path / "judged.xml").exit_code == Regressed.exit_code
    found = read(tmp_path / "judged.xml")
    assert sorted(outcome.__name__ if outcome else "pass" for outcome, _ in found.values())[:1] == ["Failure"]
    assert all("% slower than the baseline" in text for outcome, text in found.values() if outcome is Failure)


def called(*words: str, junit: Path) -> LlmbError:
    with pytest.raises(LlmbError) as raised:
        CliRunner().invoke(app, [*words, "--junit", str(junit)], catch_exceptions=False)
    return raised.value


def test_a_file_that_cannot_be_written_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMB_INSTALL", str(ROOT))
    done = CliRunner().invoke(app, ["judge", str(ROOT), "--junit", str(tmp_path)])
    assert "cannot write the JUnit file: it exists and is not a regular file" in str(done.exception)
    assert "set --junit to a file" in str(done.exception)
