# SPDX-License-Identifier: Apache-2.0
"""``llmb parse`` as its users call it."""

import csv
import gzip
import io
import json
import math
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from called_here import call_llmb
from process_sessions import members
from step_lines import step_line

REFERENCE_COLUMNS = (
    "filename,status,time_mean_seconds,time_std_dev_seconds,tflops_per_gpu_mean,tflops_per_gpu_std_dev,max_iteration"
)
OWN_COLUMNS = (
    "reason,window_first,window_last,steps,time_median_seconds,time_cv,time_ci95_low_seconds,time_ci95_high_seconds,"
    "loss_first,loss_last,weights,data,run,workload,size,dtype,gpu_type,gpus,layout,program,nodes,date,mfu_pct,"
    "mfu_convention,tokens_per_s_per_gpu,figures,label,path"
)
GROUP_COLUMNS = (
    "workload,size,dtype,gpu_type,gpus,layout,program,identity,runs,time_median_seconds,time_mean_seconds,"
    "time_std_dev_seconds,spread_pct,mfu_pct,mfu_convention,differs"
)
SCALING_COLUMNS = (
    "recipe,gpu_type,program,scaling,gpus,layout,gbs,runs,time_median_seconds,efficiency_pct,days_per_1t_tokens,"
    "published_seconds,published_efficiency_pct,published_days_per_1t_tokens,published_source"
)


def log_text(steps=50, upto=None, *, loss=12.5, tflops=600.0, gbs=8):
    numbers = range(steps if upto is None else upto + 1)
    told = {"loss": loss, "tflops_per_gpu": tflops, "global_batch_size": gbs}
    return "".join(step_line(n, steps, step_time_s=2.5 + n % 2 / 10, **told) for n in numbers)


@pytest.fixture
def results(tmp_path):
    """One file of each status."""
    folder = tmp_path / "experiments"
    folder.mkdir()
    (folder / "log-good.out").write_text(log_text())
    (folder / "log-long.out").write_text(log_text(1000, tflops=None))
    (folder / "log-died.out").write_text(log_text(upto=20) + "RuntimeError: [red]lost[/red]\n")
    (folder / "log-nan.out").write_text(log_text(loss=math.nan))
    (folder / "log-empty.out").touch()
    (folder / "sbatch_good.out").touch()
    (folder / "link.out").symlink_to("nowhere")
    return folder


parse = partial(call_llmb, "parse")


def parse_json(*arguments):
    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(parse(*arguments, "--format", "json").stdout, parse_constant=refuse)


def parse_csv(*arguments):
    return list(csv.reader(io.StringIO(parse(*arguments, "--format", "csv").stdout)))


def test_json_accounts_for_every_file_and_is_null_where_nothing_is_known(results):
    document = parse_json(results)
    assert document["analysis"] == {"directories": [str(results)], "window_rule": "reference", "files": 7}
    assert {found["filename"]: found["status"] for found in document["results"]} == {
        "good": "success",
        "long": "success",
        "died": "incomplete",
        "nan": "invalid",
        "empty": "no_data",
        "sbatch_good": "not_training_log",
        "link": "unreadable",
    }
    assert document["summary"] == {
        "success": 2,
        "too_few_steps": 0,
        "resumed": 0,
        "incomplete": 1,
        "no_data": 1,
        "invalid": 1,
        "profiled": 0,
        "traced": 0,
        "not_training_log": 1,
        "unreadable": 1,
        "files": 7,
    }
    assert [found["path"] for found in document["results"]] == sorted(str(path) for path in results.iterdir())
    assert all(found["reason"] for found in document["results"])
    found = {file["filename"]: file for file in document["results"]}
    good = found["good"]
    assert good["window"] == {"first": 35, "last": 44, "rule": "reference"}
    assert (good["steps"], good["attempts"], good["max_iteration"]) == (50, 1, 49)
    assert set(good["step_time_s"]) == {"mean", "median", "std", "cv", "ci95", "min", "max"}
    assert good["step_time_s"]["mean"] == pytest.approx(2.55)
    assert good["step_time_s"]["std"] == pytest.approx(0.0527046)
    low, high = good["step_time_s"]["ci95"]
    assert (low + high) / 2 == pytest.approx(2.55)
    assert high - low == pytest.approx(0.0560046)  # less than of independent steps, because every second one is slow
    assert good["tflops_per_gpu"]["mean"] == 600.0
    assert good["loss"] == {"first": 12.5, "last": 12.5}
    assert found["long"]["tflops_per_gpu"] is None
    assert found["nan"]["loss"] is None
    assert found["nan"]["step_time_s"] is None
    assert [found["link"][key] for key in ("window", "steps", "attempts", "max_iteration")] == [None] * 4


def test_csv_has_the_reference_columns_first_and_one_shape(results):
    rows = parse_csv(results)
    assert ",".join(rows[0]) == f"{REFERENCE_COLUMNS},{OWN_COLUMNS}"
    assert {len(row) for row in rows} == {35}
    assert len(rows) == 8
    found = {row[0]: dict(zip(rows[0], row, strict=True)) for row in rows[1:]}
    assert float(found["good"]["time_mean_seconds"]) == pytest.approx(2.55)
    assert (found["good"]["window_first"], found["good"]["window_last"], found["good"]["steps"]) == ("35", "44", "50")
    assert found["long"]["tflops_per_gpu_mean"] == ""
    assert found["died"]["time_mean_seconds"] == ""
    assert found["died"]["max_iteration"] == "20"


def test_the_table_fits_100_columns_and_ends_with_the_counts(results):
    lines = parse(results).stdout.splitlines()
    assert max(map(len, lines)) <= 100
    assert "2 success, 1 incomplete, 1 no_data, 1 invalid, 1 not_training_log, 1 unreadable (7 files)" in lines[-2]
    assert lines[-1] == "--wide also lists files that are not training logs"
    assert "sbatch_good" not in "\n".join(lines)
    assert "sbatch_good" in parse(results, "--wide").stdout
    text = "\n".join(lines)
    assert "RuntimeError: [red]lost[/red]" in " ".join(text.split()), "a log's text is no markup"


def test_a_long_name_is_not_cut(tmp_path):
    name = "pretrain_llama3.1_405b_fp8_gpus576_tp8_pp8_cp2_vp8_mbs1_gbs252_" + "x" * 100
    (tmp_path / f"log-{name}.out").write_text(log_text())
    assert any(line.startswith(name + " ") for line in parse(tmp_path, "--wide").stdout.splitlines())


SHORT_NAMES = {
    "log-pretrain_llama3.1_8b_bf16_gpus8.out": "pretrain_llama3.1_8b_bf16_gpus8",
    "log-my.acct_1.pretrain_llama3.1_8b_bf16_8_123_0.out": "pretrain_llama3.1_8b_bf16_8_123",
    "log-acct.lora_llama3_70b_fp8_gpus8_123_1.out": "lora_llama3_70b_fp8_gpus8_123_1",
    "log-acct.pretrain_x_1b_bf16_gpus8_7_0.out.gz": "pretrain_x_1b_bf16_gpus8_7",
    "log-nemo_llama3.1_8b_8_77.out": "nemo_llama3.1_8b_8_77",
    "slurm-12.out": "slurm-12",
}


def test_short_names(tmp_path):
    for name in SHORT_NAMES:
        text = log_text().encode()
        (tmp_path / name).write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    document = parse_json(tmp_path)
    assert {Path(one["path"]).name: one["filename"] for one in document["results"]} == SHORT_NAMES
    assert document["summary"]["success"] == len(SHORT_NAMES)
    assert {one["filename"] for one in parse_json(tmp_path, "--full-names")["results"]} == SHORT_NAMES.keys()


def test_names_that_would_collide_are_told_apart(tmp_path):
    files = [
        "exp/exp_100/exp/log-exp.out",
        "exp/exp_200/exp/log-exp.out",
        "a/log-same.out",
        "b/log-same.out",
        "log-twin.out",
        "twin_0.out",
        "log-odd.out",
        "deep/log-odd.out",
    ]
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(log_text())
    found = {
        str(Path(file["path"]).relative_to(tmp_path)): file["filename"] for file in parse_json(tmp_path)["results"]
    }
    assert [found[file] for file in files] == [
        "exp_100",
        "exp_200",
        "a/same",
        "b/same",
        "log-twin.out",
        "twin_0.out",
        "log-odd.out",
        "deep/log-odd.out",
    ]


def test_a_name_made_of_a_folder_does_not_hide_a_file_of_that_name(tmp_path):
    for file in ("exp_1/log-exp.out", "exp_2/log-exp.out", "log-exp_1.out"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(log_text())
    names = [file["filename"] for file in parse_json(tmp_path)["results"]]
    assert len(set(names)) == 3


def test_odd_names_survive(tmp_path):
    names = {'a,b "c"', "line\nbreak", "tab\t\x1b[31m", "\u00fc\u2713", "[red]x[bold]", "bad\udcff"}
    for name in names:
        (tmp_path / f"{name}.out").write_text(log_text())
    shown = {name.replace("\udcff", "\\udcff") for name in names}  # which is no UTF-8
    assert {one["filename"] for one in parse_json(tmp_path)["results"]} == shown
    assert {row[0] for row in parse_csv(tmp_path)[1:]} == {name.replace("\x1b", "\\x1b") for name in shown}
    table = parse(tmp_path)
    assert (table.returncode, "\x1b" in table.stdout, "bad\\udcff" in table.stdout) == (0, False, True)


def test_one_file_of_any_name(tmp_path):
    path = tmp_path / "sbatch_log.txt"
    path.write_text(log_text(2))
    (found,) = parse_json(path)["results"]
    assert (found["status"], found["window"]["last"]) == ("success", 1)
    assert [found["step_time_s"][key] for key in ("std", "cv", "ci95")] == [None] * 3


def test_the_window_is_the_users(results):
    (good,) = (found for found in parse_json(results, "--window", "11-44")["results"] if found["filename"] == "good")
    assert good["window"] == {"first": 11, "last": 44, "rule": "11-44"}
    result = parse(results, "--window", "44-11")
    assert result.returncode == 2
    assert result.stdout == ""


def test_the_default_is_experiments_else_the_install_folder_else_here(results, tmp_path, monkeypatch):
    install = tmp_path / "install"
    monkeypatch.setenv("LLMB_INSTALL", str(install))
    monkeypatch.delenv("STAGE_PATH", raising=False)
    monkeypatch.chdir(results.parent)
    (results.parent / "log-outside.out").write_text(log_text())
    assert parse_json()["analysis"] == {"directories": ["experiments"], "window_rule": "reference", "files": 7}
    monkeypatch.chdir(results)
    assert parse_json()["analysis"] == {"directories": ["."], "window_rule": "reference", "files": 7}
    assert {file["path"] for file in parse_json()["results"]} == {path.name for path in results.iterdir()}
    (install / "workloads").mkdir(parents=True)
    (install / "workloads" / "log-run.out").write_text(log_text())
    assert parse_json()["analysis"]["directories"] == [str(install / "workloads")]


def test_several_folders_and_files_each_file_once(results, tmp_path):
    other = tmp_path / "others" / "deep"
    other.mkdir(parents=True)
    (other / "log-good.out").write_text(log_text())
    file = tmp_path / "plain.txt"
    file.write_text(log_text())
    document = parse_json(results, tmp_path / "others", file, other, results / "log-good.out")
    assert document["analysis"]["directories"] == [
        str(path) for path in (results, tmp_path / "others", file, other, results / "log-good.out")
    ]
    assert document["summary"]["files"] == 7 + 2
    names = {found["path"]: found["filename"] for found in document["results"]}
    assert names[str(other / "log-good.out")] == "others/deep/log-good.out"
    assert names[str(results / "log-good.out")] == "experiments/log-good.out"
    assert names[str(file)] == "plain.txt"
    assert parse(results, tmp_path / "nowhere").returncode == 2


def test_ids_do_not_depend_on_how_a_log_is_named_in_the_command(results, monkeypatch):
    monkeypatch.chdir(results)
    by_folder = {found["filename"]: found["run"] for found in parse_json(results)["results"]}
    (by_name,) = parse_json("log-good.out")["results"]
    assert by_name["run"] == by_folder["good"]
    assert len(set(by_folder.values())) == len(by_folder)


def test_the_wide_table_has_every_column(results):
    header = parse(results, "--wide").stdout.splitlines()[1]
    columns = ("file", "run", "workload", "size", "dtype", "date (UTC)", "window", "time (s)", "median (s)", "std (s)")
    assert all(name in header for name in (*columns, "CV (%)", "ci95 (s)", "TFLOPS/GPU", "MFU (%)", "figures"))


def test_what_is_unusual_in_the_window_is_noted(tmp_path):
    text = log_text(200).splitlines()
    text[150] = text[150].replace("s: 2.500", "s: 9.500")
    (tmp_path / "log-outlier.out").write_text("\n".join(text) + "\n")
    (tmp_path / "log-calm.out").write_text(log_text(200))
    calm, outlier = parse_json(tmp_path)["results"]
    assert [(one["step"], round(one["excess_s"])) for one in outlier["anomalies"]["outliers"]] == [(150, 7)]
    assert calm["anomalies"]["outliers"] == [] and calm["anomalies"]["period_steps"] is None
    notes = [line for line in parse(tmp_path).stdout.splitlines() if "1 outlier (step 150: +" in line]
    assert len(notes) == 1 and notes[0].startswith(outlier["run"])
    assert "1 outlier (step 150: +" in parse(tmp_path, "--wide").stdout


@pytest.fixture
def scales(tmp_path):
    """Repeats of a published recipe at two scales, and a run that died."""
    for gpus, jobs in ((8, (11, 12, 13)), (128, (21,))):
        for job in jobs:
            name = f"log-acct.pretrain_llama3.1_8b_bf16_gpus{gpus}_tp1_pp1_cp2_vp1_mbs1_gbs{16 * gpus}_{job}_0.out"
            (tmp_path / name).write_text(log_text(gbs=16 * gpus).replace(": 2.", f": 12.{job}"))
    (tmp_path / "log-acct.pretrain_llama3.1_8b_bf16_gpus8_14_0.out").write_text(log_text(upto=20))
    return tmp_path


def test_what_a_log_is_of_is_taken_from_its_name(scales):
    found = {one["filename"].rpartition("_")[2]: one for one in parse_json(scales)["results"]}
    keys = ("workload", "size", "dtype", "gpus", "program", "format", "layout_source", "date_source", "figures")
    assert [found["21"][key] for key in keys] == [
        *("pretrain_llama3.1", "8b", "bf16", 128),
        *("nemo2", "nemo2", "log", "file", "rounded"),
    ]
    assert found["21"]["layout"]["gbs"] == 2048
    assert found["21"]["mfu_pct"] == {}, "the GPU type is not known"
    assert found["11"]["identity"] == found["12"]["identity"] != found["21"]["identity"]
    (header, *rows) = parse(scales).stdout.splitlines()[1:6]
    assert header.split()[:4] == ["run", "recipe", "GPUs", "layout"]
    assert rows[0].startswith("job 21  pretrain_llama3.1 8b bf16   128  cp2 mbs1 gbs2048")


def test_the_gpu_type_gives_an_mfu(scales):
    found = {one["filename"].rpartition("_")[2]: one for one in parse_json(scales, "--gpu-type", "h100")["results"]}
    assert found["11"]["mfu_pct"]["published"] == pytest.approx(63, abs=1)
    assert "MFU: FLOPs counted by the convention published" in parse(scales, "--gpu-type", "h100").stdout
    assert parse(scales, "--gpu-type", "h1000").returncode == 2


def test_repeats_together(scales):
    document = parse_json(scales, "--group")
    small, large = document["groups"]
    assert (len(small["runs"]), len(large["runs"])) == (3, 1)
    assert small["median_s"] == sorted(small["run_means_s"])[1]
    assert document["scaling"] is None and len(document["results"]) == 5
    text = parse(scales, "--group").stdout
    assert "pretrain_llama3.1 8b bf16     8  cp2 mbs1 gbs128" in text
    assert "left out: 1 of 5 files, without success; omit --group to list them" in text
    rows = list(csv.DictReader(io.StringIO(parse(scales, "--group", "--format", "csv").stdout)))
    assert ",".join(rows[0]) == GROUP_COLUMNS
    assert [row["runs"] for row in rows] == ["3", "1"]
    assert {row["workload"] for row in rows} == {"pretrain_llama3.1"}


def test_the_mfu_of_repeats_is_that_of_their_median(scales):
    next(scales.glob("*_13_0.out")).unlink()
    document = parse_json(scales, "--group", "--gpu-type", "h100")
    group, run = document["groups"][0], document["results"][0]
    work = run["mfu_pct"]["published"] * run["step_time_s"]["mean"]
    assert group["mfu_pct"] * group["median_s"] == pytest.approx(work) and len(group["runs"]) == 2
    assert group["mfu_convention"] == "published"
    assert "MFU: FLOPs counted by the convention published" in parse(scales, "--group", "--gpu-type", "h100").stdout


def test_scaling_beside_the_published_figures(scales):
    (scaling,) = parse_json(scales, "--scaling", "--gpu-type", "h100")["scaling"]
    assert scaling["scaling"] == "weak"
    assert [(one["gpus"], len(one["runs"]), one["published_s"]) for one in scaling["scales"]] == [
        (8, 3, 12.27),
        (16, 0, 12.3),
        (32, 0, 12.32),
        (64, 0, 12.33),
        (128, 1, 12.33),
    ]
    lines = parse(scales, "--scaling", "--gpu-type", "h100").stdout.splitlines()
    assert lines[0] == "pretrain_llama3.1 8b bf16 on h100, weak scaling, window reference"
    assert max(map(len, lines[:8])) <= 100
    rows = list(csv.DictReader(io.StringIO(parse(scales, "--scaling", "--format", "csv").stdout)))
    assert ",".join(rows[0]) == SCALING_COLUMNS
    assert [(row["gpus"], row["runs"]) for row in rows] == [("8", "3"), ("128", "1")]
    assert parse(scales, "--scaling", "--group").returncode == 2


def test_tables_of_groups_without_a_success(tmp_path):
    (tmp_path / "log-died.out").write_text(log_text(upto=3))
    for option, text in (("--group", "left out: 1 of 1 files"), ("--scaling", "no log reports both its recipe")):
        result = parse(tmp_path, option)
        assert result.returncode == 4
        assert text in result.stdout


def test_exit_codes(results):
    assert parse(results).returncode == 0
    for name in ("log-good.out", "log-long.out"):
        (results / name).unlink()
    result = parse(results, "--format", "csv")
    assert result.returncode == 4
    assert len(result.stdout.splitlines()) == 6, "the result is printed all the same"
    for path in results.iterdir():
        path.unlink()
    assert parse(results).returncode == 2
    assert parse(results / "nowhere").returncode == 2
    for words in (["--format", "xml"], ["--jobs", "0"], ["--nonsense"]):
        assert parse(results, *words).returncode == 2


@pytest.mark.slow
def test_several_processes_give_the_same_answer(tmp_path):
    for number in range(600):
        text = log_text(3, upto=number % 3)
        (tmp_path / f"log-run_{number:03}.out").write_text(text * (1 + number % 5))
    together = parse_json(tmp_path, "--jobs", "3")
    assert together == parse_json(tmp_path, "--jobs", "1")
    assert (together["summary"]["success"], together["summary"]["incomplete"]) == (200, 400)


ENDS_WITHIN_S = 600


@pytest.mark.usefixtures("interrupts")
@pytest.mark.parametrize("killed", [False, True])
def test_an_interrupt_and_a_kill_end_all_processes_quietly(tmp_path, killed):
    for number in range(2):  # files of holes: large to read, but no space on the disk
        with (tmp_path / f"{number}.out").open("wb") as file:
            file.truncate(200 << 30)
    command = [sys.executable, "-m", "llmb.cli.main", "parse", str(tmp_path), "--jobs", "2"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
    deadline = time.monotonic() + ENDS_WITHIN_S
    while len(_readers(process.pid, tmp_path)) < 2:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    if killed:
        process.kill()
    else:
        os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=ENDS_WITHIN_S)
    assert (process.returncode, out) == (-signal.SIGKILL if killed else 130, b"")
    assert b"Traceback" not in err
    while members(process.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert members(process.pid) == []


def _readers(leader, folder):
    """Processes of a session that have opened a file of ``folder``."""
    found = []
    for entry in members(leader):
        try:
            opened = [handle.readlink() for handle in (entry.parent / "fd").iterdir()]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if any(path.parent == folder for path in opened):
            found.append(entry)
    return found


def test_a_damaged_record_is_reported(tmp_path):
    folder = tmp_path / "pretrain_x_1" / "pretrain_x"
    folder.mkdir(parents=True)
    (folder / "log-pretrain_x.out").write_text(log_text())
    before = parse_json(tmp_path)["results"][0]
    (folder / "run.json").write_text("[1")
    result = parse(tmp_path)
    assert result.stderr.startswith("llmb: run ")
    assert "its record is ignored: it is damaged: " in result.stderr
    after = parse_json(tmp_path)["results"][0]
    assert after["step_time_s"] == before["step_time_s"]
    assert after["run"] != before["run"], "it has the id that other commands know"
    assert f"run {after['run']}: " in result.stderr


def test_what_was_not_read_is_named(results, tmp_path):
    for name in ("a.log", "b.log"):
        (results / name).write_text(log_text())
    assert "2 *.log files not read" in parse(results).stderr
    (tmp_path / "alone").mkdir()
    (tmp_path / "alone" / "a.log").write_text(log_text())
    assert "no '*.out' file" in (refused := parse(tmp_path / "alone")).stderr
    assert "1 *.log file not read" in refused.stderr
    (tmp_path / "notes").write_text("root:x:0:0\n")
    unknown = parse(tmp_path / "notes")
    assert (unknown.returncode, unknown.stdout) == (4, "")
    assert "no known format" in unknown.stderr
    assert "torchtitan" in unknown.stderr


def test_a_log_that_tells_its_nodes_alone_asks_for_the_gpu_type(tmp_path):
    name = "log-acct.pretrain_llama3.1_8b_bf16_1nodes_tp1_pp1_cp2_vp1_mbs1_gbs128_7_0.out"
    (tmp_path / name).write_text(log_text(gbs=128).replace(": 2.", ": 12."))
    note = "GPUs of 1 of these logs: only the nodes are reported; add --gpu-type"
    assert note in parse(tmp_path).stdout
    assert note not in parse(tmp_path, "--gpu-type", "h100").stdout
    (found,) = parse_json(tmp_path, "--gpu-type", "h100")["results"]
    assert (found["gpus"], found["nodes"], "published" in found["mfu_pct"]) == (8, 1, True)
