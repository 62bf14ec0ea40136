# SPDX-License-Identifier: Apache-2.0
"""``llmb report``: its figures are those of other commands, and it tells nothing that it should not."""

import json
import re
from collections.abc import Callable, Mapping
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest
from called_here import Run
from recorded_runs import gpu_record, times_around, write_run

from llmb.base.errors import UsageError
from llmb.cli.share import format_of
from llmb.reports.page.charts import BLUE, Line, series_chart
from llmb.reports.page.render import public_text
from llmb.runs.folder import RunFolder
from llmb.runs.plan import PredictedStep
from llmb.runs.rank_times import RankTime, RankTimesFile

HOSTILE = '</script><script>alert(1)</script><img src=x onerror="alert(1)">\x1b[2J\u202e'
LOGS = Path(__file__).parents[1] / "readers" / "logs" / "samples"
SECRET = "hf_M4RKabcdefghijklmnopqrst"
Rows = list[list[str]]


class Tables(HTMLParser):
    """The rows of each table by its id, and all tags."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)
        tables = re.findall(r'<table id="([^"]*)"(.*?)</table>', page, re.DOTALL)
        self.rows: dict[str, Rows] = {name: [cells(row) for row in text.split("<tr")[1:]] for name, text in tables}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def cells(row: str) -> list[str]:
    found = re.findall(r"<t[hd]\b[^>]*>(.*?)</t[hd]>", row, re.DOTALL)
    return [unescape(re.sub("<[^>]*>", "", cell)).strip() for cell in found]


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An install root with no runs yet."""
    monkeypatch.setenv("LLMB_INSTALL", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def page(llmb: Run, root: Path) -> Callable[..., str]:
    """What the command writes."""

    def make(*words: str) -> str:
        llmb("report", *words, "-o", "page.html", code=0)
        return (root / "page.html").read_text()

    return make


def runs_below(root: Path) -> Path:
    return root / "workloads" / "pretrain_llama3.1" / "experiments" / "e"


def only(tables: Mapping[str, Rows], begins: str, ends: str) -> Rows:
    """The one table with a name like that."""
    (found,) = [rows for name, rows in tables.items() if name.startswith(begins) and name.endswith(ends)]
    return found


def test_addresses_are_the_same_on_a_page_with_other_runs(root: Path, page: Callable[..., str]) -> None:
    write_run(runs_below(root), gpu_record(), times_around(12.0))
    second = write_run(runs_below(root), gpu_record(scale=16), times_around(9.0))
    alone, both = Tables(page(str(second))).rows, Tables(page()).rows
    (name,) = [name for name in alone if name.startswith("step-times-")]
    assert both[name] == alone[name]


@pytest.mark.parametrize(("mean_s", "drawn"), [(12.5, ""), (20.0, ", not drawn")])
def test_the_published_and_the_predicted_step_time_are_lines_of_their_own(
    root: Path, page: Callable[..., str], mean_s: float, drawn: str
) -> None:
    record = gpu_record()
    predicted = PredictedStep(step_time_s=12.9, ci95_s=(12.4, 13.4), breakdown_s={})
    plan = record.plan.model_copy(update={"predicted": predicted})
    write_run(runs_below(root), record.model_copy(update={"plan": plan}), times_around(mean_s))
    html = page()
    expected = record.plan.recipe.expectations[0]
    assert f"published{drawn}: {expected.step_time_s:.4g} s, {expected.source} line {expected.line}" in html
    assert f"predicted{drawn}: 12.9 s, by llmb before the run, from 12.4 to 13.4 s" in html
    for name in ("published", "predicted"):
        assert (f">{name}</text>" in html) == (not drawn)


def test_figures_are_those_of_the_result(root: Path, page: Callable[..., str], llmb: Run) -> None:
    path = write_run(runs_below(root), gpu_record(), times_around(12.345))
    tables = Tables(page(str(path))).rows
    result = llmb("result", str(path), "--json").document
    shown = {row[0]: row[1] for row in only(tables, "", "-table-1")}
    assert float(shown["step time s, mean"]) == pytest.approx(result["step_time_s"]["mean"], rel=1e-3)
    assert float(shown["MFU %, full attention"]) == pytest.approx(result["mfu_pct"]["full"], rel=1e-3)
    steps = [row for row in only(tables, "step-times-", "-data")[1:] if "window" in row[2]]
    assert [int(row[0]) for row in steps] == list(range(result["window"]["first"], result["window"]["last"] + 1))
    mean = sum(float(row[1]) for row in steps) / len(steps)
    assert mean == pytest.approx(result["step_time_s"]["mean"], rel=1e-5)


def labeled_runs(root: Path, before_s: tuple[float, ...], after_s: tuple[float, ...]) -> None:
    for label, means_s in (("before", before_s), ("after", after_s)):
        for mean_s in means_s:
            write_run(runs_below(root), gpu_record().model_copy(update={"label": label}), times_around(mean_s))


def drawings(html: str, *names: str) -> list[str]:
    return [re.findall(rf'<figure id="{name}-.*?</svg>', html, re.DOTALL)[0] for name in names]


def test_a_comparison_begins_with_the_verdict_of_judge_and_draws_both_sides(
    root: Path, page: Callable[..., str], llmb: Run
) -> None:
    labeled_runs(root, (12.0, 12.01, 12.02), (13.0, 13.01, 13.02))
    words = ("after", "--against", "before")
    html, judged = page(*words), llmb("judge", *words, "--json").document
    assert judged["verdict"] == "regressed"
    assert html.count(judged["sentence"]) >= 2
    assert "▼ 1 regressed" in html
    markdown = llmb("report", *words, "--format", "md").stdout
    assert judged["sentence"] in markdown.replace("\\", "")
    assert f"| {judged['delta_pct']:+.1f} |" in markdown
    head, row, _ = Tables(html).rows["verdicts-table"]
    shown = dict(zip(head, row, strict=True))
    assert [shown["now s"], shown["reference s"], shown["change %"]] == ["13.01", "12.01", "+8.3"]
    plan = gpu_record().plan.recipe.layout
    per_gpu = plan.gbs * plan.seq_len / 13.01 / plan.gpus
    assert float(shown["tokens/s per GPU"].replace(",", "")) == pytest.approx(per_gpu, rel=1e-4)
    (bar,) = re.findall(r'<svg class="bar regressed".*?</svg>', html, re.DOTALL)
    assert re.search(r'<rect x="0" width="8\.3\d+"', bar)
    assert bar.count("<path") == 2, "the interval, and 0"
    for drawn in drawings(html, "history", "step-times", "loss"):
        assert "var(--blue)" in drawn
        assert "var(--orange)" in drawn
    assert "3 of the baseline are orange, 3 that are judged blue" in html


def test_the_command_is_what_the_verdict_asks_for(root: Path, page: Callable[..., str]) -> None:
    labeled_runs(root, (12.0, 12.1), (12.2, 12.25))
    html = page("after", "--against", "before")
    assert "; 3 more runs would settle it" in html
    before, after = re.findall(r"next: <code>(.*?)</code>", html)
    assert before.endswith("--label before --repeats 2")
    assert after.endswith("--label after")
    labeled_runs(root, (13.0,), (14.0,))
    html = page("after", "--against", "before")
    assert "more than 40 more runs would be needed" in html
    assert re.findall(r"next: <code>(.*?)</code>", html)[0].endswith(" --against before --explain")


def test_both_logs_are_of_what_is_stated(root: Path, page: Callable[..., str]) -> None:
    log = (LOGS / "torchtitan.log").read_text()
    (root / "before.log").write_text(log)
    (root / "after.log").write_text(log.replace("loss: 11.9", "loss: 11.8"))
    words = ("after.log", "--against", "before.log")
    assert "after.log --workload WORKLOAD --size SIZE --dtype DTYPE" in page("after.log")
    assert "arguments in the log differs" in page(*words)
    html = page(*words, "-w", "pretrain_llama3.1", "-s", "8b", "--dtype", "bf16")
    assert "as fast as the baseline" in html
    assert "differs" not in html.partition('id="log"')[0]


def test_the_page_is_opened_in_a_browser(root: Path, llmb: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "no run has ended" in llmb("report", "--open", code=2).stderr
    assert not (root / "report.html").exists()
    write_run(runs_below(root), gpu_record(), times_around(12.0))
    for name in ("report.html", "none"):
        monkeypatch.setattr("webbrowser.open", lambda address, name=name: address.endswith(f"/{name}"))
        assert ("no browser was found here; open" in llmb("report", "--open", code=0).stderr) == (name == "none")
    assert "not Markdown" in llmb("report", "--open", "--format", "md", code=2).stderr


def test_nothing_is_drawn_below_0_nor_an_interval_that_is_not_known(root: Path, page: Callable[..., str]) -> None:
    for _ in range(2):
        write_run(runs_below(root), gpu_record(), [9.0] * 40 + [90.0] * 10)
    html = page()
    assert "too few steps" in str(only(Tables(html).rows, "history-", "-data"))
    assert not [one for one in drawings(html, "history", "step-times") if re.search(r">[-\u2212][\d.]+</text>", one)]


def test_every_run_is_in_the_page_and_failures_have_a_command(root: Path, page: Callable[..., str]) -> None:
    write_run(runs_below(root), gpu_record(), times_around(12.0))
    write_run(runs_below(root), gpu_record(), times_around(12.0)[:7], exit_code=1)
    html = page()
    success, failed = sorted(Tables(html).rows["runs-table"][1:], key=lambda row: row[3], reverse=True)
    assert (success[3], failed[3]) == ("success", "failed")
    assert f"llmb jobs log {failed[0]} --tail 40" in html
    assert "7 of 50 steps" in html


def test_runs_of_development_versions_are_left_out_together(root: Path, page: Callable[..., str]) -> None:
    write_run(runs_below(root), gpu_record(), times_around(12.0))
    for _ in range(2):
        record = RunFolder(write_run(runs_below(root), gpu_record(), times_around(12.0))).record
        record.write_text(record.read_text().replace('"schema_version": 3', '"schema_version": 2', 1))
    html = page()
    assert "<b>2 runs</b> left out: cannot be read: its schema is not that of this llmb" in html
    assert html.count("left out:") == 1


def test_the_page_asks_for_nothing_and_is_well_formed(root: Path, page: Callable[..., str]) -> None:
    write_run(runs_below(root), gpu_record(), times_around(12.0))
    html = page()
    tags = Tables(html).tags
    assert not [value for _, values in tags for name, value in values.items() if name == "src"]
    links = [str(values.get("href")) for _, values in tags if "href" in values]
    assert all(link.startswith("#") for link in links)
    ids = [values["id"] for _, values in tags if values.get("id")]
    assert len(ids) == len(set(ids))
    assert {link[1:] for link in links} <= set(ids)
    assert not re.search(r"url\((?!#)|@import", html)
    assert len(html.encode()) < 400_000


def test_hostile_text_stays_text(root: Path, page: Callable[..., str]) -> None:
    path = write_run(runs_below(root), gpu_record(), times_around(12.0))
    record = RunFolder(path).record
    document = json.loads(record.read_text())
    document["label"] = document["environment"]["torch"] = HOSTILE
    document["variables"] = {"NCCL_X": HOSTILE, "NCCL_Y": SECRET}
    record.write_text(json.dumps(document))
    html = page()
    tags = Tables(html).tags
    assert sum(tag == "script" for tag, _ in tags) == 1
    assert "img" not in {tag for tag, _ in tags}
    assert not any(name.startswith("on") for _, values in tags for name in values)
    assert "\x1b" not in html
    assert "\u202e" not in html
    assert SECRET not in html
    assert "alert(1)" in html  # as text


def test_names_of_users_hosts_and_homes_are_left_out(
    root: Path, page: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOGNAME", "mustermann")
    record = gpu_record(nodes=("cl7-node19",)).model_copy(update={"label": "of-mustermann"})
    path = write_run(runs_below(root), record, times_around(12.0))
    file = RunFolder(path).record
    document = json.loads(file.read_text())
    document["command"] = ["/home/erika/venv/bin/python", "/scratch/mustermann/x", str(root / "script")]
    file.write_text(json.dumps(document))
    html = page()
    assert not [name for name in ("erika", "cl7-node19", "/mustermann", str(root)) if name in html]
    assert "~/venv/bin/python" in html
    full = page("--full")
    assert "/home/erika/venv/bin/python" in full
    assert "cl7-node19" in full
    monkeypatch.setenv("HOME", "/root")
    assert public_text([], Path("/cluster"))("data/root/log, /root/log") == "data/root/log, ~/log"


def test_the_name_of_an_axis_is_inside_of_the_plot_whose_ticks_are_longer_in_its_own_size() -> None:
    times = Line("step", BLUE, ((0, 0.67), (1, 0.42), (2, 0.37)))
    svg = series_chart("steps", [times], ("step", "s"), window=(1.5, 2.5), level=0.37).svg()
    assert float(re.findall(r'x="([\d.]+)"[^>]*>s</text>', svg)[0]) > 10  # its letters are that high


def test_the_network_is_shown_without_the_names_of_its_nodes(root: Path, page: Callable[..., str]) -> None:
    words = "".join(
        f"cl7-node{node}:41:42 [0] NCCL INFO {text}\n"
        for node in (19, 20)
        for text in ("Using network Socket", "Channel 00/0 : 0[0] -> 8[0] [send] via NET/Socket/0")
    )
    record = gpu_record(scale=16, nodes=("cl7-node19.example.org", "cl7-node20.example.org"))
    write_run(runs_below(root), record, times_around(12.0), files={"nccl_network/rank-0.log": words})
    html = page()
    assert "NCCL used TCP sockets on host-" in html
    assert ["fabric", "TCP sockets"] in [row[:2] for rows in Tables(html).rows.values() for row in rows]
    assert "cl7-node" not in html
    assert "NCCL used TCP sockets on cl7-node19 and cl7-node20" in page("--full")


def test_plots_of_several_recipes_have_the_figures_of_the_runs(root: Path, page: Callable[..., str], llmb: Run) -> None:
    paths = [write_run(runs_below(root), gpu_record(scale=scale), times_around(12.0 + scale)) for scale in (8, 16)]
    tables = Tables(page()).rows
    results = [llmb("result", str(path), "--json").document for path in paths]
    per_gpu = [result["tokens_per_s_per_gpu"] for result in results]
    rows = tables["scaling-1-data"][1:]
    assert [row[0] for row in rows] == ["8", "16"]
    assert float(rows[1][2]) == pytest.approx(100 * per_gpu[1] / per_gpu[0], abs=0.06)
    known = [result["expectations"][0] for result in results]
    published = [one["tokens_per_s"] / scale for one, scale in zip(known, (8, 16), strict=True)]
    assert [float(row[4].replace(",", "")) for row in rows] == pytest.approx(published, rel=1e-3)
    sources = [f"published: {one['source']} line {one['line']}" for one in known]
    assert [source for source, row in zip(sources, rows, strict=True) if source not in row[7]] == []
    deltas = sorted(float(row[4]) for row in tables["verdicts-table"][1:] if len(row) > 4)
    assert deltas == pytest.approx(sorted(result["verdict"]["delta_pct"] for result in results), abs=0.051)


def test_a_slow_rank_of_thousands_is_first_of_the_ranks(root: Path, page: Callable[..., str]) -> None:
    record = gpu_record(size="405b", scale=2304, release="24.11", nodes=[f"n{place}" for place in range(288)])
    folder = RunFolder(write_run(runs_below(root), record, times_around(12.0)))
    file = RankTimesFile(folder.rank_times, steps=50, ranks=2304)
    for step in range(50):
        file.add(
            step, [RankTime(0, 0, 1e-3 * (1.05 if rank == 1234 else 1 + rank % 7 / 1000), 0) for rank in range(2304)]
        )
    file.close()
    html = page()
    head, first, *rest = only(Tables(html).rows, "ranks-", "-data")
    assert head == ["rank", "input", "copies", "compute", "other waits", "slowest in % of steps"]
    assert first[:3] + first[4:] == ["1234", "0", "0", "0", "100"]
    layout = record.plan.recipe.layout
    assert float(first[3]) == pytest.approx((1.05 - 1.003) * layout.layers / layout.pp * layout.ga, rel=1e-3)
    assert len(rest) == 99
    assert "rank 1234 is 4.686 % beyond it in a typical step" in html
    assert "a row: the slowest of 36 ranks" in html
    assert html.count("<image ") == 1
    assert len(html.encode()) < 400_000


def test_times_of_other_ranks_are_not_drawn(root: Path, page: Callable[..., str]) -> None:
    folder = RunFolder(write_run(runs_below(root), gpu_record(), times_around(12.0)))
    assert "<b>No ranks</b>: the times of single ranks were not recorded" in page()
    two = '{"first_step":0,"last_step":0,"input_us":[0,0],"copy_us":[0,0],"layer_us":[1.0,2.0],"wait_us":[0,0]}'
    folder.rank_times.write_text(two + "\n")
    assert "<b>No ranks</b>: the recorded times do not match the run&#39;s 8 ranks" in page()
    folder.rank_times.write_text('{"first_step":0,"last_step":0,"layer_us":[NaN]}\n{}')
    assert "<b>No ranks</b>: the times of its ranks cannot be read" in page()


@pytest.mark.parametrize(("form", "first"), [("svg", b"<svg "), ("png", b"\x89PNG")])
def test_a_plot_is_a_picture(root: Path, form: str, first: bytes, llmb: Run) -> None:
    write_run(runs_below(root), gpu_record(), times_around(12.0))
    llmb("report", "--plot", "step-times", "--format", form, code=0)
    assert (root / f"step-times.{form}").read_bytes().startswith(first)
    assert "step-times-pretrain-" in llmb("report", "--plot", "step-time", "--format", form, code=2).stderr


def test_a_step_in_the_history_is_named_with_what_changed(root: Path, page: Callable[..., str]) -> None:
    for number in range(16):
        record = gpu_record()
        assert record.environment
        driver = "580.1" if number >= 8 else "570.2"
        environment = record.environment.model_copy(update={"driver": driver, "nccl": f"2.2{number // 12}"})
        spread_s = 0.02 * (-1) ** number
        times_s = times_around(12.0 + spread_s + 0.6 * (number >= 8))
        write_run(runs_below(root), record.model_copy(update={"environment": environment}), times_s)
    html = page()
    rows = only(Tables(html).rows, "history-", "-data")[1:]
    assert [(place, row[4:]) for place, row in enumerate(rows) if any(row[4:])] == [
        (8, ["driver 570.2 to 580.1", "▼ 5.0 % slower"]),
        (12, ["nccl 2.20 to 2.21", ""]),
    ]
    step = f"▼ 5.0 % slower from run {rows[8][0]} on, driver 570.2 to 580.1; without a step: nccl 2.20 to 2.21"
    assert step in html


def test_the_report_that_the_documentation_links_is_one_small_file() -> None:
    text = (Path(__file__).parents[2] / "docs" / "gallery.html").read_text()
    assert len(text.encode()) < 400_000
    found = Tables(text)
    assert not [value for _, values in found.tags for name, value in values.items() if name == "src"]
    statuses = [row[3] for row in found.rows["runs-table"][1:]]
    assert {"success", "invalid"} <= set(statuses)
    for name in ("history-", "scaling-", "ranks-", "breakdown-"):
        assert any(table.startswith(name) for table in found.rows), f"there is no {name}"


def test_an_inconclusive_run_is_repeated_with_its_own_settings(root: Path, page: Callable[..., str]) -> None:
    record = gpu_record(dtype="fp8", scale=16, nodes=("node1", "node2"), seed=7, attention_backend="cudnn")
    shown = page(str(write_run(runs_below(root), record, times_around(9.0, 2.0))))
    (command,) = re.findall(r"next: <code>(.*)</code>", shown)
    assert re.fullmatch(
        r"llmb run --workload pretrain_llama3\.1 --size 8b --dtype fp8 --scale 16 --gpu-type h100 --release \S+"
        r" --seed 7 --attention-backend cudnn --repeats \d+",
        command,
    )


def test_the_name_of_the_file_decides_the_format() -> None:
    assert [format_of(None, each) for each in (None, Path("x.PDF"), Path("page"))] == ["html", "pdf", "html"]
    with pytest.raises(UsageError, match="--format is md, but --output ends in"):
        format_of("md", Path("x.pdf"))
