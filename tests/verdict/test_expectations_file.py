# SPDX-License-Identifier: Apache-2.0
"""The user's file of expected step times."""

from pathlib import Path

import pytest

from llmb.base.errors import UsageError
from llmb.base.missing import Missing
from llmb.verdict.expectations_file import ExpectationEntry, Expectations, read_expectations

FILE = """\
tolerance_pct: 2
expectations:
- {workload: pretrain_llama3.1, size: 8b, scale: 8, step_time_s: 12.4}
- workload: pretrain_llama3.1
  size: 8b
  dtype: fp8
  scale: 8
  layout: {tp: 2}
  step_time_s: 9.4
  step_time_s_ci95: [9.3, 9.5]
  tolerance_pct: 4
  window: 35-44
  source: acceptance of May
  note: after the new firmware
  conditions: {software.driver: 580.1, compiled: yes, lora: null}
"""
BF16 = {"workload": "pretrain_llama3.1", "size": "8b", "dtype": "bf16", "layout.gpus": "8", "layout.tp": "1"}


def expectations(tmp_path: Path, text: str = FILE) -> Expectations:
    path = tmp_path / "expected.yaml"
    path.write_text(text)
    return read_expectations(path)


def test_the_entry_that_names_most_of_a_run_is_its(tmp_path: Path) -> None:
    file = expectations(tmp_path)
    first, second = file.entries
    assert file.entry_for(BF16) == first
    assert file.entry_for(BF16 | {"dtype": "fp8", "layout.tp": "2"}) == second
    assert file.entry_for(BF16 | {"dtype": "fp8"}) == first
    assert file.entry_for({"layout.tp": "2", "dtype": "fp8"}) == second


def test_an_entry_without_a_source_is_named(tmp_path: Path) -> None:
    file = expectations(tmp_path)
    assert file.without_source == (f"{file.path}:3",)


def test_a_run_without_an_entry_hears_of_the_nearest(tmp_path: Path) -> None:
    file = expectations(tmp_path)
    found = file.entry_for(BF16 | {"size": "70b"})
    assert found == Missing(f"no entry of {file.path} fits; {file.path}:3 is for size 8b, not 70b")
    assert expectations(tmp_path, "expectations: []").entry_for(BF16) == Missing(f"{file.path} has no entries")


def test_entries_that_name_as_much_decide_nothing(tmp_path: Path) -> None:
    file = expectations(tmp_path)
    assert file.entry_for({}) == Missing(f"several entries fit: {file.path}:3, {file.path}:4")


def test_a_tolerance_is_the_entrys_or_the_files_or_the_default(tmp_path: Path) -> None:
    file = expectations(tmp_path)
    first, second = file.entries
    assert file.tolerance_of(second) == (4.0, f"{file.path}:4")
    assert file.tolerance_of(first) == (2.0, f"{file.path}: tolerance_pct")
    plain = expectations(tmp_path, FILE.partition("\n")[2])
    assert plain.tolerance_of(plain.entries[0]).source.startswith("if the file has none")


def test_an_entry_is_a_reference(tmp_path: Path) -> None:
    file = expectations(tmp_path)
    entry = file.entries[1]
    reference = entry.reference
    assert (reference.kind, reference.step_time_s, reference.step_time_s_ci95) == ("expectation", 9.4, (9.3, 9.5))
    assert (reference.window_text, reference.source) == ("35-44", f"{file.path}:4: acceptance of May")
    assert entry.values == {
        "workload": "pretrain_llama3.1",
        "size": "8b",
        "dtype": "fp8",
        "layout.gpus": "8",
        "layout.tp": "2",
        "software.driver": "580.1",
        "compiled": "yes",
        "window": "35-44",
    }


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("step_time: 12", "3: expectations.0.step_time: unknown key"),
        ("step_time_s: 0", "3: expectations.0.step_time_s: Input should be greater than 0"),
        ("step_time_s: 1, layout: {dp: 2}", "3: expectations.0.layout.dp: unknown key"),
        ("step_time_s: 1, window: soon", "3: expectations.0.window: Value error, 'soon' is not a window"),
        ("step_time_s: 1, window: auto", "3: expectations.0.window: Value error, 'auto' depends on the run"),
        ("step_time_s: 1, conditions: [a]", "3: expectations.0.conditions: it must be a mapping"),
        ("step_time_s: 1, dtype: int4", "3: expectations.0.dtype: Input should be 'fp32', 'bf16', 'fp8', 'mxfp8' or"),
        (
            "step_time_s: 12.4, step_time_s_ci95: [12300, 12500]",
            "3: expectations.0: Value error, step_time_s is outside",
        ),
        ("step_time_s: 1, step_time_s_ci95: 2", "3: expectations.0.step_time_s_ci95: it must be a list: "),
        ("step_time_s: x", "3: expectations.0.step_time_s: it must be a number"),
        ("step_time_s: 1, scale: 1.5", "3: expectations.0.scale: it must be a whole number"),
        ("step_time_s: 1, size: [8b]", "3: expectations.0.size: it must be text"),
        ("step_time_s: 1, step_time_s: 2", "3: duplicate key 'step_time_s'"),
        ("size: 8b", "3: expectations.0.step_time_s: it is missing"),
        ("step_time_s: [1", "not valid YAML"),
    ],
)
def test_what_is_wrong_has_its_line(tmp_path: Path, line: str, problem: str) -> None:
    with pytest.raises(UsageError) as caught:
        expectations(tmp_path, f"tolerance_pct: 2\nexpectations:\n- {{{line}}}\n")
    assert problem in caught.value.what
    assert "expected.yaml" in caught.value.what


def test_one_entry_without_a_list_is_told_what_is_expected(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="1: expectations: it must be a list: lines that begin with '- '"):
        expectations(tmp_path, "expectations: 12.3\n")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"(?s)no such file.*pass an existing YAML file, or seconds"):
        read_expectations(tmp_path / "none.yaml")


def test_an_entry_for_everything_fits_everything(tmp_path: Path) -> None:
    file = expectations(tmp_path, "expectations:\n- {step_time_s: 1.5}\n")
    assert isinstance(file.entry_for(BF16), ExpectationEntry)
    assert isinstance(file.entry_for({}), ExpectationEntry)


NODE = "workload: pretrain_llama3.1, size: 8b, gpu_type: h100, scale: 8"


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        (
            [f"{NODE}, dtype: bf16, step_time_s: 0.85"],
            r"yaml:2: step_time_s 0.85 would be 7,937 TFLOPS per GPU; the dense bf16 peak of h100 is 989",
        ),
        (
            [f"{NODE}, dtype: bf16, step_time_s: 12.4", f"{NODE}, dtype: fp8, step_time_s: 94.0"],
            r"yaml:3: step_time_s of fp8 is 7.6 times that of bf16 \(.*yaml:2\)",
        ),
        (
            [
                f"{NODE}, dtype: fp8, step_time_s: 94.0, layout: {{gbs: 2048}}",
                f"{NODE}, dtype: bf16, step_time_s: 12.4",
            ],
            None,
        ),
        ([f"{NODE}, dtype: bf16, step_time_s: 12.4", f"{NODE}, dtype: fp8, step_time_s: 9.4"], None),
        (["workload: other, size: 8b, gpu_type: h100, scale: 8, dtype: bf16, step_time_s: 0.01"], None),
        ([f"{NODE}, step_time_s: 0.01"], None),
    ],
)
def test_step_times_that_no_gpu_can_reach_are_refused(tmp_path: Path, entries: list[str], said: str | None) -> None:
    text = "expectations:\n" + "".join(f"- {{{entry}}}\n" for entry in entries)
    if said is None:
        assert len(expectations(tmp_path, text).entries) == len(entries)
        return
    with pytest.raises(UsageError, match=said):
        expectations(tmp_path, text)
