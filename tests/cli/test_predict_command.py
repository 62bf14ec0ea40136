# SPDX-License-Identifier: Apache-2.0
"""llmb predict, as a user and as a script call it."""

import csv
import io
import json
from pathlib import Path

import pytest
from called_here import Run
from recorded_runs import gpu_record, times_around, write_run
from tests.prediction.test_trace_calibration import trace

from llmb.nodes.bench.measurements import Measurement, MeasurementFile, write_measurements

ASKED = ("predict", "-w", "pretrain_llama3.1", "-s", "70b", "--gpu-type", "h100", "--scale", "64")
OWN = """\
- gpu_type: mine
  name: A GPU of mine
  peak_tflops: {bf16: 500}
  memory_gb: 80
  memory_bandwidth_tb_s: 2
  nvlink_gb_s: 600
  nvlink_domain_gpus: 8
  network_gb_s: 25
  gpus_per_node: 8
  device_names: ["Mine*"]
  borrows: [h100]
  sources: {peak_tflops: me, memory_gb: me, memory_bandwidth_tb_s: me, nvlink_gb_s: me, network_gb_s: me}
"""


def test_a_prediction_says_why_and_how_sure_it_is(llmb: Run) -> None:
    document = json.loads(llmb(*ASKED, "--json").stdout)
    low, high = document["ci95_s"]
    assert low < document["step_time_s"] < high
    assert sum(document["breakdown_s"].values()) == pytest.approx(document["step_time_s"])
    assert document["published"][0]["step_time_s"] == 14.66
    assert document["step_time_s"] == pytest.approx(14.66, rel=0.05)
    tokens = 128 * 8192 / document["step_time_s"]
    assert document["tokens_per_s"] == pytest.approx(tokens)
    assert document["memory"]["fits"] is True
    assert 50 < document["mfu_pct"]["causal"] < document["mfu_pct"]["full"] < 60
    assert document["calibration"].startswith("none")
    assert document["unvalidated"] == []
    assert document["software"] == "documents"
    assert json.loads(llmb(*ASKED, "--communication", "plain", "--json").stdout)["software"] == "llmb"
    assert document["errors"]["model"]["rows"] == 70


def test_imbalance_scales_what_experts_compute_and_exchange(llmb: Run) -> None:
    """On the fullest rank only routed products, their activations and the exchange of tokens take longer."""
    asked = ("predict", "-w", "pretrain_qwen3", "-s", "30b", "--gpu-type", "h100", "--scale", "16", "--dtype", "bf16")
    even, uneven = (json.loads(llmb(*asked, *more, "--json").stdout) for more in ((), ("--imbalance", "1.3")))
    parts, longer = even["breakdown_s"], uneven["breakdown_s"]
    assert (even["imbalance"], uneven["imbalance"]) == (None, 1.3)
    assert longer["messages of experts"] == pytest.approx(1.3 * parts["messages of experts"], rel=0.02)
    assert longer["products of experts"] == pytest.approx(1.3 * parts["products of experts"], rel=0.02)
    assert longer["products bf16"] == parts["products bf16"]
    assert longer["attention"] == parts["attention"]
    assert uneven["memory"]["peak_gib"] > even["memory"]["peak_gib"]
    assert "imbalance" in llmb(*asked, "--imbalance", "1.3").stdout
    for options, problem in (
        ((*PLAN, "--tokens", "inf"), "must be finite"),
        ((*ASKED, "--gpu-mtbf-h", "inf"), "must be finite"),
        ((*ASKED, "--imbalance", "1.3"), "--imbalance is for experts that are distributed over ranks"),
        ((*asked, "--imbalance", "17"), "one of 16 ranks has at most 16 times the mean"),
        ((*asked, "--imbalance", "2", "--force-load-balancing"), "here every expert computes the same number of rows"),
    ):
        done = llmb(*options, code=2)
        assert problem in done.stderr


def test_tables_fit_a_terminal_and_name_the_largest_cause_first(llmb: Run) -> None:
    text = llmb(*ASKED).stdout
    assert "PREDICTED pretrain_llama3.1 70b" in text and "TP 4, PP 4, VP 5, CP 2" in text
    large = llmb(*ASKED, "--tp", "1", "--pp", "1", "--vp", "1").stdout
    assert large.index("DOES NOT FIT") < large.index("memory GiB") < large.index("step time s")
    causes = text[text.index("cause") :].splitlines()
    assert causes[1].startswith("GEMMs, BF16")
    assert "TP all-gather and reduce-scatter" in "\n".join(causes)
    assert "58.7 of 80  fits: rank 0 of stage 0 needs the most" in text
    assert all(len(line) <= 80 for line in causes)


def test_a_file_gives_a_line_for_each_and_a_bad_one_spoils_no_other(llmb: Run, tmp_path: Path) -> None:
    file = tmp_path / "layouts.csv"
    rows = ["workload,size,gpu_type,scale,tp", "pretrain_llama3.1,70b,h100,64,4", "pretrain_llama3.1,70b,h100,64,3"]
    file.write_text("\n".join([*rows, "pretrain_llama3.1,70b,h100,64,many", "pretrain_llama3.1,,h100,64,4"]))
    found = list(csv.DictReader(io.StringIO(llmb("predict", "--file", str(file)).stdout)))
    alone = json.loads(llmb(*ASKED, "--json").stdout)
    assert float(found[0]["step_time_s"]) == pytest.approx(alone["step_time_s"])
    assert [bool(row["reason"]) for row in found] == [False, True, True, True]
    assert "not divisible by TP 3" in found[1]["reason"]
    assert found[2]["reason"] == "tp is 'many'; it must be a whole number"
    assert found[3]["reason"] == "column size is missing or empty"
    documents = json.loads(llmb("predict", "--file", str(file), "--json").stdout)
    assert [each["line"] for each in documents] == [2, 3, 4, 5]
    file.write_text("\ufeffworkload,size,gpu_type,gbs\npretrain_llama3.1,70b,h100,1,024\npretrain_llama3.1,70b,h100,\n")
    found = list(csv.DictReader(io.StringIO(llmb("predict", "--file", str(file)).stdout)))
    assert [row["reason"] for row in found] == ["the line has more values than there are columns", ""]
    file.write_text("workload,size,tp,tp\npretrain_llama3.1,8b,2,4\n")
    assert "several columns are called tp" in llmb("predict", "--file", str(file)).stderr
    file.write_text("workload,size,gpu_type\npretrain_llama3.1,tiny,cpu\n")
    assert "only steps on GPUs can be predicted, but gpu_type is cpu" in llmb("predict", "--file", str(file)).stdout
    file.write_text("workload,nodes\npretrain_llama3.1,8\n")
    refused = llmb("predict", "--file", str(file))
    assert refused.returncode == 2
    assert "unknown columns: nodes" in refused.stderr
    for more in (("-s", "8b"), ("--calibrate", "latest"), ("--scaling", "weak")):
        refused = llmb("predict", "--file", str(file), *more)
        assert refused.returncode == 2
        assert more[0] in refused.stderr and "cannot be combined with --file" in refused.stderr


def test_what_a_file_says_is_no_formula_and_nothing_that_a_terminal_obeys_in_what_is_printed(
    llmb: Run, tmp_path: Path
) -> None:
    file = tmp_path / "layouts.csv"
    rows = ("=cmd|' /C calc'!A0,70b", "@SUM(1+1),70b", "pretrain_llama3.1,-1.5", "\x1b[2J,70b", "a,b,more")
    file.write_text("\n".join(("workload,size", *rows)))
    done = llmb("predict", "--file", str(file))
    found = list(csv.DictReader(io.StringIO(done.stdout)))
    assert [row["workload"] for row in found] == [
        "'=cmd|' /C calc'!A0",
        "'@SUM(1+1)",
        "pretrain_llama3.1",
        "\\x1b[2J",
        "a",
    ]
    assert found[2]["size"] == "-1.5"
    assert "\x1b" not in done.stdout
    assert "null" not in json.loads(llmb("predict", "--file", str(file), "--json").stdout)[4]


def test_hardware_of_ones_own_is_checked(llmb: Run, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    asked = ("predict", "-w", "pretrain_llama3.1", "-s", "8b", "--scale", "8", "--gpu-type", "mine")
    file.write_text(OWN)
    document = json.loads(llmb(*asked, "--hardware", str(file), "--json").stdout)
    assert document["recipe"]["gpu_type"] == "mine"
    assert "this GPU type" in " ".join(document["unvalidated"])
    for good, bad, named in (
        ("memory_bandwidth_tb_s: 2\n", "memory_bandwidth_tb_s: 3350\n", "memory_bandwidth_tb_s"),
        ("bf16: 500", "bf16: -500", "peak_tflops.bf16"),
        ("bf16: 500", "bf16: true", "peak_tflops.bf16"),
        ("bf16: 500", "bf16: 0.5", "peak_tflops.bf16"),
        ("memory_gb: 80", "memory_gb: 81559", "memory_gb"),
        ("network_gb_s: 25\n", "network_gb_s: 400\n", "network_gb_s"),
        ("  nvlink_gb_s: 600\n", "", "nvlink_gb_s"),
        ("network_gb_s: me}", "}", "no source for network_gb_s"),
    ):
        file.write_text(OWN.replace(good, bad))
        refused = llmb(*asked, "--hardware", str(file))
        assert refused.returncode == 2
        assert named in refused.stderr
        assert str(file) in refused.stderr
    file.write_text(OWN.replace("  network_gb_s: 25\n", "").replace(", network_gb_s: me", ""))
    assert llmb(*asked, "--hardware", str(file)).returncode == 0
    refused = llmb(*asked[:-4], "--scale", "16", "--gpu-type", "mine", "--hardware", str(file))
    assert "16 GPUs need a network, but the network_gb_s of mine is unknown" in refused.stderr


def test_a_cpu_is_not_predicted(llmb: Run) -> None:
    refused = llmb("predict", "pretrain_llama3.1", "tiny", "--gpu-type", "cpu")
    assert refused.returncode == 2
    assert "only steps on GPUs can be predicted" in refused.stderr


def test_a_run_of_ones_own_calibrates(llmb: Run, tmp_path: Path) -> None:
    write_run(tmp_path / "workloads" / "w" / "experiments" / "e", gpu_record(scale=8), times_around(13.0))
    asked = ("predict", "-w", "pretrain_llama3.1", "-s", "8b", "--gpu-type", "h100", "--scale", "128", "--json")
    usual, calibrated = (json.loads(llmb(*asked, *more).stdout) for more in ((), ("--calibrate", "latest")))
    measured = json.loads(llmb(*asked[:-3], "--scale", "8", "--calibrate", "latest", "--json").stdout)
    assert measured["step_time_s"] == pytest.approx(13.0, rel=0.01)
    assert calibrated["error_pct"] < usual["error_pct"]
    assert "took 13" in calibrated["calibration"]
    refused = llmb(*asked, "--dtype", "fp8", "--calibrate", "latest")
    assert "has dtype bf16, but the prediction is for fp8" in refused.stderr


def test_a_file_or_a_folder_of_microbenchmarks_calibrates(llmb: Run, tmp_path: Path) -> None:
    row = {"benchmark": "memory", "case": "copy", "size_bytes": 2**31, "node": "n", "device": "NVIDIA H100 80GB HBM3"}
    copied = Measurement.model_validate({**row, "time_s": 1.0, "repetitions": 3, "bandwidth_gb_per_s": 1000.0})
    now = "2026-11-20T10:00:00+00:00"
    measured = MeasurementFile(node="n", measured_at=now, command=("llmb",), software={}, measurements=(copied,))
    path = write_measurements(tmp_path, measured)
    usual, *calibrated = (
        json.loads(llmb(*ASKED, *more, "--json").stdout)
        for more in ((), ("--calibrate", str(path)), ("--calibrate", str(path.parent)))
    )
    for each in calibrated:
        assert each["calibration"] == "llmb bench on n: memory at 1 TB/s; the rest as in published steps"
        assert each["step_time_s"] > 1.05 * usual["step_time_s"]
        assert each["error_pct"] > usual["error_pct"]
    assert llmb(*PLAN, "--top", "1", "--calibrate", str(path)).returncode == 0
    refused = llmb(*ASKED[:-4], "--gpu-type", "b200", "--scale", "64", "--calibrate", str(path))
    assert "measured NVIDIA H100 80GB HBM3, but the prediction is for b200" in refused.stderr


def test_a_trace_of_a_run_replaces_terms_of_its_own_layout(llmb: Run, tmp_path: Path) -> None:
    run = write_run(tmp_path / "workloads" / "w" / "experiments" / "e", gpu_record(scale=8), times_around(13.0))
    (run / "torch_profile").mkdir()
    trace(run / "torch_profile" / "rank-0.json", {"nvjet_hsh_256x128": 9.0}, ranks=8)
    asked = ("predict", "-w", "pretrain_llama3.1", "-s", "8b", "--gpu-type", "h100", "--scale", "8")
    usual = json.loads(llmb(*asked, "--json").stdout)
    document = json.loads(llmb(*asked, "--calibrate", str(run / "torch_profile"), "--json").stdout)
    assert document["calibration"].endswith(" %); the rest as predicted")
    replaced = {name for name, factor in document["calibration_factors"].items() if name in usual["breakdown_s"]}
    assert replaced == {"products bf16", "outputs of products"}
    assert sum(document["breakdown_s"][name] for name in replaced) == pytest.approx(9)
    refused = llmb(*asked, "--tp", "2", "--calibrate", str(run / "torch_profile" / "rank-0.json"))
    assert "trace rank-0.json was recorded with tp 1, but the prediction is for 2" in refused.stderr
    assert "measurements of 'llmb bench', a trace\n" in llmb(*asked, "--calibrate", str(tmp_path / "none")).stderr
    refused = llmb(*PLAN, "--calibrate", str(run / "torch_profile"))
    assert "a trace calibrates only the layout that it was recorded with" in refused.stderr


PLAN = ("plan", "-w", "pretrain_llama3.1", "-s", "8b", "--gpu-type", "h100", "--scale", "8")


def test_a_plan_lists_layouts_and_writes_a_campaign_that_bulk_takes(llmb: Run, tmp_path: Path) -> None:
    file = tmp_path / "layouts.txt"
    done = llmb(*PLAN, "--top", "3", "--price", "2", "-o", str(file), "--json")
    document = json.loads(done.stdout)
    assert [each["gpus"] for each in document["layouts"]] == [8, 8, 8]
    assert document["layouts"][0]["step_time_s"] <= document["recipe_layout"]["step_time_s"]
    first = document["layouts"][0]
    per_token = 2 * 8 * first["step_time_s"] / 3600 / (128 * 8192)
    assert first["price_per_1t_tokens"] == first["training"]["price"] == pytest.approx(per_token * 1e12)
    assert first["beyond_nvlink"] == []
    assert document["searched"] > 1000
    jobs = llmb("bulk", str(file), "--dry-run", "--gpu-type", "h100", "--account", "a", "--partition", "p", "--json")
    assert jobs.returncode == 0, jobs.stderr
    planned = json.loads(jobs.stdout)["jobs"]
    assert len(planned) == 9


def test_the_cost_of_a_training_and_messages_beyond_nvlink_are_shown(llmb: Run) -> None:
    moe = ("-w", "pretrain_qwen3", "-s", "30b", "--dtype", "bf16", "--gpu-type", "h100", "--scale", "16")
    document = json.loads(llmb("predict", *moe, "--tokens", "15e12", "--price", "2", "--json").stdout)
    (crossing,) = document["beyond_nvlink"]
    assert (crossing["group"], crossing["gpus"], crossing["nvlink_domain_gpus"]) == ("EP", 16, 8)
    assert 0 < crossing["added_s"] < document["breakdown_s"]["messages of experts"]
    cost = document["training"]
    assert cost["gpu_hours"] == pytest.approx(15e12 / document["tokens_per_s"] / 3600 * 16)
    assert cost["price"] == pytest.approx(2 * cost["gpu_hours"])
    assert cost["energy_mwh_at_most"] == pytest.approx(document["energy_j_per_token_at_most"] * 15e12 / 3.6e9)
    text = " ".join(llmb("predict", *moe, "--tokens", "15e12", "--price", "2").stdout.split())
    assert f"EP beyond NVLink {1000 * crossing['added_s']:+,.0f} ms" in text
    assert "price per 15T tokens" in text and "MWh per 15T tokens" in text
    unpriced = llmb("plan", *moe, "--top", "2", "--ep", "16", "--tokens", "15e12").stdout
    assert "training on 15T tokens" in unpriced and "price" not in unpriced.partition("training on")[2]
    planned = llmb("plan", *moe, "--top", "2", "--ep", "16", "--price", "2").stdout
    assert "EP over 16 GPUs spans 2 NVLink domains of 8, which adds to the step: +" in planned
    assert "not searched: TP above 8, offloading to the CPU" in planned
    assert "PREDICTED training on 1T tokens" in planned and "price: 2 per GPU hour" in planned


def test_a_plan_compares_the_first_with_the_recipe(llmb: Run) -> None:
    text = llmb(*PLAN, "--top", "2").stdout
    assert "PREDICTED layouts of pretrain_llama3.1 8b bf16 on 8 x h100" in text
    assert "The first layout compared with the recipe's" in text
    assert all(len(line) <= 80 for line in text.splitlines() if line.startswith((" ", "cause", "recipe")))


def test_sizes_are_constraints_and_the_recipe_stays_itself(llmb: Run) -> None:
    asked = ("plan", "pretrain_llama3.1", "70b", "--scale", "64", "--gpu-type", "h100", "--tp", "4", "--top", "3")
    document = json.loads(llmb(*asked, "--json").stdout)
    assert [each["tp"] for each in document["layouts"]] == [4, 4, 4]
    assert document["recipe_layout"]["tp"] == 4
    assert document["constraints"] == {"tp": 4}
    assert document["tied"] == 3
    assert 0 < document["better_than_recipe_pct"] < document["error_pct"]
    text = llmb(*asked).stdout
    assert "on 64 x h100, --tp 4" in text
    assert "none is distinguishably faster than the recipe: 2.6 % of ±4 %" in text
    assert "1 to 3 are a tie" in text
    slower = llmb(*asked, "--recompute", "full").stdout
    assert "none is faster than the recipe: the first is" in slower
    refused = llmb(*asked, "--no-sequence-parallel")
    assert refused.returncode == 2
    assert "needs sequence parallelism" in refused.stderr


def test_a_plan_needs_no_valid_layout_to_start_from(llmb: Run) -> None:
    asked = ("plan", "pretrain_llama3.1", "405b", "--scale", "72", "--gpu-type", "gb200", "--gbs", "252")
    document = json.loads(llmb(*asked, "--top", "2", "--json").stdout)
    assert len(document["layouts"]) == 2
    assert document["recipe_layout"] is None
    assert document["recipe_left_out"].startswith("number of GPUs 72 is not divisible by TP x PP x CP")
    text = llmb(*asked, "--top", "2").stdout
    assert "the layout of the recipe is left out: number of GPUs 72 is not divisible" in text
    refused = llmb(*asked, "--tp", "7")
    assert refused.returncode == 2
    assert "no layout fits: of 672 ways 672 do not divide; the layout of the recipe is left out: " in refused.stderr


def test_the_layers_of_a_proxy_are_named_for_the_whole_model(llmb: Run) -> None:
    asked = ("plan", "pretrain_llama3.1", "405b", "--scale", "32", "--gpu-type", "h100", "--top", "1", "--tp", "8")
    assert "for the whole model, add --layers 126" in llmb(*asked).stdout
    whole = llmb(
        *asked[:3], "--scale", "128", "--gpu-type", "gb200", "--layers", "126", "--gbs", "64", "--tp", "8"
    ).stdout
    assert "PREDICTED layouts of pretrain_llama3.1 405b bf16 on 128 x gb200" in whole
    assert "proxy" not in whole


def test_a_recipe_that_does_not_fit_is_marked_and_one_that_was_changed_is_none(llmb: Run) -> None:
    text = llmb(*PLAN, "--top", "1", "--gbs", "64", "--max-memory-gib", "60").stdout
    (own,) = (line for line in text.splitlines() if line.startswith("adapted "))
    assert own.endswith("65/80 does not fit")
    assert "adapted: changed by options: gbs 128 -> 64" in text
    assert "than the recipe" not in text


def test_what_was_searched_for_is_shown_even_if_the_campaign_cannot_be_written(llmb: Run) -> None:
    done = llmb(*PLAN, "--top", "1", "-o", "/dev/full")
    assert done.returncode == 3
    assert "PREDICTED layouts" in done.stdout
