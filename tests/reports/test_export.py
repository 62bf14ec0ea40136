# SPDX-License-Identifier: Apache-2.0
"""``llmb export``: each form is read back by the reader that its users have."""

import csv
import json
import math
import os
import re
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pandas
import pytest
from called_here import Run
from fake_steps import steps_of
from prometheus_client import parser
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from pyarrow import parquet
from recorded_runs import gpu_record, times_around
from recorded_runs import write_run as write_gpu_run
from step_lines import step_line
from timed_runs import write_run

from llmb.base.shown_text import csv_value
from llmb.launch.programs.conclude import finish_run
from llmb.launch.programs.port import End
from llmb.reports.export_tables import PREFIX, RESULTS, STEPS
from llmb.runs.folder import RunFolder
from llmb.runs.plan import Plan
from llmb.runs.record import read_record
from llmb.runs.steps import ExpertLoad, Fp8Counts, step_to_json

HOSTILE = 'week "47"\\,\n<b>'


@pytest.fixture
def install(tmp_path: Path) -> Path:
    return tmp_path / "root"


@pytest.fixture
def folders(tmp_path: Path, tiny_plan: Callable[..., Plan]) -> list[Path]:
    """A success, one with a hostile label that failed, one with a loss that is NaN, and one with a published figure."""
    root = tmp_path / "root"
    good = write_run(root, tiny_plan(), [2.0 + step / 1000 for step in range(50)], number=0)
    failed = write_run(root, tiny_plan(), [2.0, 2.1], number=1, label=HOSTILE, failed="out of memory,\n=1+1")
    spoiled = write_run(root, tiny_plan(dtype="bf16"), [1.5] * 50, number=2)
    *steps, last = steps_of([1.5] * 10, read_record(spoiled).plan)
    load, counts = ExpertLoad(max_over_mean=1.5, idle_experts=2), Fp8Counts(saturated_tensors=3, not_finite_tensors=1)
    steps.append(replace(last, loss=math.nan, updated=False, expert_load=load, fp8=counts))
    spoiled.steps.write_text("".join(f"{step_to_json(step)}\n" for step in steps))
    began = read_record(spoiled).model_copy(update={"status": "running", "result": None})
    finish_run(spoiled, began, End(0))
    published = write_gpu_run(root / "workloads" / "w" / "experiments" / "e", gpu_record(), times_around(12.3))
    return [good.path, failed.path, spoiled.path, published]


def documents(llmb: Run, folders: list[Path]) -> dict[str, dict[str, Any]]:
    """What ``llmb result --json`` prints of each run, by its id."""
    found = [json.loads(llmb("result", str(folder), "--json").stdout) for folder in folders]
    return {document["id"]: document for document in found}


def expected_result(document: dict[str, Any]) -> dict[str, Any]:
    """Columns that are in the document, by another way than that of the code."""
    times = document["step_time_s"] or {}
    record = json.loads(Path(document["run_dir"], "run.json").read_text())
    layout = record["plan"]["recipe"]["layout"]
    return {
        "run": document["id"],
        "label": document["label"],
        **{name: document["recipe"][name] for name in ("workload", "size", "dtype", "gpu_type", "scale")},
        **{name: document[name] for name in ("status", "reason", "steps")},
        **{name: layout[name] for name in ("gpus", "tp", "mbs", "gbs", "seq_len")},
        "step_time_mean_s": times.get("mean"),
        "step_time_ci95_high_s": (times.get("ci95") or [None, None])[1],
        "step_time_count": times.get("count"),
        "tokens_per_s_per_gpu": document["tokens_per_s_per_gpu"],
        "mfu_pct_published": (document["mfu_pct"] or {}).get("published"),
        "tflops_per_gpu_full": (document["tflops_per_gpu"] or {}).get("full"),
        "loss_last": (document["loss"] or {}).get("last"),
        "verdict": document["verdict"] and document["verdict"]["verdict"],
        "published_step_time_s": next((item["step_time_s"] for item in document["expectations"]), None),
        "window_first": document["window"]["first"],
        "peak_memory_gib": document["peak_memory_gib"],
    }


def without_nan(value: Any) -> Any:
    """pandas has one value for what is not known and for what is no number."""
    return None if isinstance(value, float) and math.isnan(value) else value


def test_csv_parquet_and_json_lines_are_what_the_commands_show(llmb: Run, folders: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = llmb("export", "--format", "csv,parquet", "--format", "jsonl", "-o", str(out))
    assert done.returncode == 0, done.stderr
    written = {Path(line).name for line in done.stdout.splitlines()}
    assert written == {f"{table}.{form}" for table in ("results", "steps") for form in ("csv", "parquet", "jsonl")}
    assert {path.name for path in out.iterdir()} == written
    shown = documents(llmb, folders)
    recorded = [
        {**json.loads(line), "run": name}
        for name, document in shown.items()
        for line in Path(document["run_dir"], "metrics.jsonl").read_text().splitlines()
    ]
    for read in (
        lambda name: pandas.read_csv(out / f"{name}.csv").to_dict("records"),
        lambda name: parquet.read_table(out / f"{name}.parquet").to_pylist(),
        lambda name: [json.loads(line) for line in (out / f"{name}.jsonl").read_text().splitlines()],
    ):
        results = {row["run"]: row for row in read("results")}
        assert results.keys() == shown.keys()
        for run, row in results.items():
            wanted = expected_result(shown[run])
            assert {name: without_nan(row[name]) for name in wanted} == wanted
        steps = {(row["run"], row["step"]): row for row in read("steps")}
        assert len(steps) == len(recorded) == 50 + 2 + 10 + 50
        for step in recorded:
            row = steps[step["run"], step["step"]]
            plain = {name: value for name, value in step.items() if name not in ("not_finite", "expert_load", "fp8")}
            assert {name: without_nan(row[name]) for name in plain} == plain
            window = shown[step["run"]]["window"]
            assert row["in_window"] == (window["first"] <= step["step"] <= window["last"])
    last = parquet.read_table(out / "steps.parquet").to_pylist()[-51]
    assert math.isnan(last["loss"]) and not last["updated"], "it is NaN, and not unknown"
    assert (last["expert_load_max_over_mean"], last["fp8_saturated_tensors"], last["host_ahead_s"]) == (1.5, 3, None)
    kinds = parquet.read_schema(out / "results.parquet")
    assert str(kinds.field("step_time_mean_s").type) == "double" and kinds.names == [
        column.header for column in RESULTS
    ]
    assert parquet.read_schema(out / "steps.parquet").names == [column.header for column in STEPS]


def test_text_is_no_formula_in_any_csv(llmb: Run, tmp_path: Path) -> None:
    """As a label of a run and as the name of a log; numbers stay numbers."""
    label = "=1+1"
    found = write_gpu_run(tmp_path / "root" / "workloads" / "w" / "experiments" / "e", gpu_record(), times_around(12.3))
    record = json.loads((found / "run.json").read_text())
    (found / "run.json").write_text(json.dumps(record | {"label": label}))
    log = tmp_path / "logs" / "=cmd.out"
    log.parent.mkdir()
    log.write_text("".join(step_line(step) for step in range(50)))
    assert llmb("export", str(found), "--format", "csv", "-o", "out").returncode == 0
    (row,) = csv.DictReader(StringIO((tmp_path / "out" / "results.csv").read_text()))
    assert row["label"] == "'=1+1"
    assert float(row["step_time_mean_s"]) == pytest.approx(12.3)
    (parsed,) = csv.DictReader(StringIO(llmb("parse", str(log.parent), "--format", "csv").stdout))
    assert parsed["filename"].startswith("'=cmd")
    for command in (("compare", str(found), str(log.parent)), ("parse", str(log.parent), "--group")):
        text = llmb(*command, "--format", "csv").stdout
        assert text
        assert not re.search(r"(?m)(^|,)\"?=", text), text


@pytest.mark.parametrize(
    ("value", "written"),
    [
        *((value, value) for value in (-1.5, -3, None, True, float("-inf"))),
        *((text, text) for text in ("-1.5", "+2e-3", "-inf", "-", "a=b", "", "x\ny")),
        *((text, f"'{text}") for text in ("=1+1", "+cmd|x", "-2+3", "@SUM(1)", "\t=1", " =1", "\uff1d1")),
        ("\x1b[2J=1", "\\x1b[2J=1"),
        ("\r=1", "\\x0d=1"),
    ],
)
def test_a_value_for_a_csv_file(value: object, written: object) -> None:
    assert csv_value(value) == written


def test_metrics_are_read_as_openmetrics_and_by_prometheus(llmb: Run, folders: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert llmb("export", "--format", "openmetrics", "-o", str(out)).returncode == 0
    text = (out / "llmb.prom").read_text()
    shown = documents(llmb, folders)
    for read in (text_string_to_metric_families, parser.text_string_to_metric_families):
        families = {family.name: family for family in read(text)}
        assert {family.type for family in families.values()} == {"gauge"}
        runs = {sample.labels["run"]: sample.labels for sample in families[f"{PREFIX}run"].samples}
        assert {run: labels["status"] for run, labels in runs.items()} == {
            run: document["status"] for run, document in shown.items()
        }
        assert [labels["label"] for labels in runs.values() if "label" in labels] == [HOSTILE]
        means = {sample.labels["run"]: sample.value for sample in families[f"{PREFIX}step_time_mean_s"].samples}
        assert means == {run: one["step_time_s"]["mean"] for run, one in shown.items() if one["step_time_s"]}
        assert all(sample.timestamp is None for family in families.values() for sample in family.samples)


def test_tensorboard_loads_every_number_of_a_step(llmb: Run, folders: list[Path], tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    out = tmp_path / "out"
    for _ in range(2):  # the second one replaces the first
        llmb("export", *map(str, folders[:2]), "--format", "tensorboard", "-o", str(out), code=0)
    run = json.loads(llmb("result", str(folders[0]), "--json").stdout)["id"]
    loaded = EventAccumulator(str(out / "tensorboard" / run))
    loaded.Reload()
    recorded = [json.loads(line) for line in (folders[0] / "metrics.jsonl").read_text().splitlines()]
    numbers = {name for name, value in recorded[0].items() if isinstance(value, int | float)} - {"step"}
    assert set(loaded.Tags()["scalars"]) == numbers
    for name in ("loss", "step_time_s", "peak_memory_bytes"):
        scalars = loaded.Scalars(name)
        assert [(one.step, one.wall_time) for one in scalars] == [(one["step"], one["ended_s"]) for one in recorded]
        assert [one.value for one in scalars] == pytest.approx([one[name] for one in recorded], rel=2**-23)
    assert len(list((out / "tensorboard").iterdir())) == 2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of MLflow's own use of SQLAlchemy
def test_mlflow_reads_series_settings_and_verdicts(llmb: Run, folders: list[Path], tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow", reason="pip install -e '.[mlflow]'")
    out = tmp_path / "out"
    out.mkdir()
    (out / "mlflow.db").write_text("of an earlier export")
    done = llmb("export", "--format", "mlflow", "-o", str(out))
    assert done.returncode == 0, done.stderr
    assert [path.name for path in out.iterdir()] == ["mlflow.db"]
    client = mlflow.tracking.MlflowClient(tracking_uri=f"sqlite:///{out / 'mlflow.db'}")
    (experiment,) = (one for one in client.search_experiments() if one.name == "llmb")
    found = {run.data.tags["run"]: run for run in client.search_runs([experiment.experiment_id])}
    shown = documents(llmb, folders)
    assert found.keys() == shown.keys()
    for name, run in found.items():
        wanted = expected_result(shown[name])
        assert (run.data.tags["status"], run.data.tags.get("verdict")) == (wanted["status"], wanted["verdict"])
        assert run.info.status == ("FINISHED" if wanted["status"] == "success" else "FAILED")
        assert run.data.params["layout.gbs"] == str(wanted["gbs"])
        assert run.data.metrics.get("step_time_mean_s") == wanted["step_time_mean_s"]
        steps = [json.loads(line) for line in Path(shown[name]["run_dir"], "metrics.jsonl").read_text().splitlines()]
        series = {one.step: one for one in client.get_metric_history(run.info.run_id, "loss")}
        assert {step: one.timestamp for step, one in series.items()} == {
            step["step"]: round(1000 * step["ended_s"]) for step in steps
        }
        assert {step["step"]: without_nan(series[step["step"]].value) for step in steps} == {
            step["step"]: step["loss"] for step in steps
        }
    assert [run.data.tags["label"] for run in found.values() if "label" in run.data.tags] == [HOSTILE]


def wandb_records(path: Path) -> Iterator[Any]:
    """What the file has, which is a log of LevelDB: blocks of 32 KiB, in them fragments that have a header."""
    from wandb.proto.wandb_internal_pb2 import Record

    raw, place, held = path.read_bytes(), 7, b""
    while place < len(raw):
        if 32768 - place % 32768 < 7:  # no header fits
            place += 32768 - place % 32768
            continue
        size, kind = struct.unpack("<HB", raw[place + 4 : place + 7])
        held += raw[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # all of a record, or the last of it
            yield Record.FromString(held)
            held = b""


@pytest.mark.slow
def test_wandb_has_series_settings_and_verdicts(llmb: Run, folders: list[Path], tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="not part of the extra test, because of its 62 MB: pip install wandb")
    command = [sys.executable, "-m", "llmb", "export", str(folders[0]), str(folders[3]), "--format", "wandb", "-o", "o"]
    key = "0123456789abcdef" * 3
    environ = {**os.environ, "WANDB_API_KEY": key, "WANDB_MODE": "online", "LLMB_INSTALL": str(tmp_path / "root")}
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path, env=environ)
    shown = documents(llmb, folders)
    files = {path.stem.removeprefix("run-"): path for path in map(tmp_path.joinpath, done.stdout.splitlines())}
    assert files.keys() == {run for run in shown if shown[run]["run_dir"] in (str(folders[0]), str(folders[3]))}
    for run, path in files.items():
        assert key.encode() not in path.read_bytes()
        records = list(wandb_records(path))
        (begun,) = (record.run for record in records if record.WhichOneof("record_type") == "run")
        assert (begun.run_id, begun.project) == (run, "llmb")
        config = {item.key: json.loads(item.value_json) for item in begun.config.update}
        assert config["layout.gbs"] == expected_result(shown[run])["gbs"]
        assert set(begun.tags) == {"success", *([shown[run]["verdict"]["verdict"]] if shown[run]["verdict"] else [])}
        rows = [
            {
                item.nested_key[0] if item.nested_key else item.key: json.loads(item.value_json)
                for item in record.history.item
            }
            for record in records
            if record.WhichOneof("record_type") == "history"
        ]
        steps = [json.loads(line) for line in Path(shown[run]["run_dir"], "metrics.jsonl").read_text().splitlines()]
        assert [(row["_step"], row["loss"], row["_timestamp"]) for row in rows] == [
            (step["step"], step["loss"], step["ended_s"]) for step in steps
        ]
        final = {}
        for record in records:
            if record.WhichOneof("record_type") == "summary":
                for item in record.summary.update:
                    final[item.nested_key[0] if item.nested_key else item.key] = json.loads(item.value_json)
        assert final["step_time_mean_s"] == shown[run]["step_time_s"]["mean"]


def test_what_cannot_be_exported_is_named(llmb: Run, folders: list[Path], tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    wrong = llmb("export", "--format", "xls", "-o", out)
    assert wrong.returncode == 2 and "unknown format 'xls'" in wrong.stderr and "parquet" in wrong.stderr
    assert llmb("export", "no-such-label", "-o", out).returncode == 2
    (tmp_path / "file").write_text("")
    full = llmb("export", "latest", "-o", str(tmp_path / "file"))
    assert full.returncode == 3 and "cannot write" in full.stderr and "complete" not in full.stderr
    (tmp_path / "half" / "steps.csv").mkdir(parents=True)
    half = llmb("export", "latest", "-o", str(tmp_path / "half"))
    assert half.returncode == 3 and "steps.csv" in half.stderr and "these are complete: results.csv" in half.stderr
    assert llmb("export", "-o", out, LLMB_INSTALL=str(tmp_path / "empty")).returncode == 2
    assert not Path(out).exists()


def test_a_missing_library_is_named_before_anything_is_written(folders: list[Path], tmp_path: Path) -> None:
    """In an interpreter that does not find it."""
    code = (
        "import sys; from importlib.machinery import PathFinder\n"
        "find = PathFinder.find_spec.__func__\n"
        "class Hidden(PathFinder):\n"
        "    @classmethod\n"
        "    def find_spec(cls, name, *rest): return None if name == 'pyarrow' else find(cls, name, *rest)\n"
        "sys.meta_path = [Hidden if one is PathFinder else one for one in sys.meta_path]\n"
        "from llmb.cli.main import app, exit_code_of\n"
        f"sys.exit(exit_code_of(app, ['export', {str(folders[0])!r}, '--format', 'csv,parquet', '-o', 'out']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 3 and "are not installed: pyarrow" in done.stderr and "[export]" in done.stderr
    assert not (tmp_path / "out").exists()
    assert RunFolder(folders[0]).record.exists()
