# SPDX-License-Identifier: Apache-2.0
"""Weights of real runs go to transformers and come back; transformers' own come in and train."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from published_models import write_published
from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import load
from torch.nn import functional
from transformers import AutoModelForCausalLM

from llmb.catalogue.catalogue import Catalogue
from llmb.catalogue.records import Model
from llmb.catalogue.resolve import find_model
from llmb.engine.checkpoint.load import TensorReader
from llmb.engine.data.build import build_data
from llmb.engine.model.decoder import build_model
from llmb.engine.model.loss import IGNORED
from llmb.runs.checkpoints.checkpoint import read_checkpoint
from llmb.runs.checkpoints.checkpoint_files import partial_path
from llmb.runs.plan import EnginePlan

Finished = Callable[..., dict[str, Any]]
MakePlan = Callable[..., EnginePlan]

LLMB = [sys.executable, "-m", "llmb.cli.main"]
ENDS_WITHIN_S = 300
LLAMA, NEMOTRON, MAVERICK = "pretrain_llama3.1", "pretrain_nemotron4", "finetune_llama4-maverick"
QWEN, MIXTRAL = "pretrain_qwen3", "pretrain_mixtral"
SAVED = ("--scale", "2", "--steps", "2", "--lr", "0.01", "--warmup-steps", "0", "--save-checkpoint")
LAYOUTS = {
    LLAMA: ("--tp", "2"),
    NEMOTRON: ("--pp", "2"),
    MAVERICK: ("--ep", "2"),
    QWEN: ("--pp", "2"),
    MIXTRAL: ("--ep", "2"),
}
CLASSES = {
    LLAMA: "LlamaForCausalLM",
    NEMOTRON: "NemotronForCausalLM",
    MAVERICK: "Llama4ForCausalLM",
    QWEN: "Qwen3ForCausalLM",
    MIXTRAL: "MixtralForCausalLM",
}


# One is enough for every change: tests/engine exchanges the weights of small models of every form.
OTHERS = [name for name in CLASSES if name != LLAMA]
WORKLOADS = [LLAMA, *(pytest.param(name, marks=pytest.mark.measured) for name in OTHERS)]


def tiny(workload: str) -> Model:
    return find_model(Catalogue(), workload, "tiny")


Call = Callable[..., subprocess.CompletedProcess[str]]
Refused = Callable[..., str]
SlowDisk = Callable[[float], dict[str, str]]


@pytest.fixture(scope="session")
def call(forked_python: str) -> Call:
    """``llmb checkpoint``."""

    def caller(*arguments: object) -> subprocess.CompletedProcess[str]:
        command = [forked_python, *LLMB[1:], "checkpoint", *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    return caller


@pytest.fixture(scope="session")
def done(call: Call) -> Call:
    def caller(*arguments: object) -> subprocess.CompletedProcess[str]:
        result = call(*arguments)
        assert result.returncode == 0, result.stderr
        return result

    return caller


@pytest.fixture(scope="session")
def refused(call: Call) -> Refused:
    def caller(code: int, *arguments: object) -> str:
        result = call(*arguments)
        assert result.returncode == code, result.stderr
        assert "Traceback" not in result.stderr
        assert result.stdout == ""
        return result.stderr

    return caller


def engine_weights(checkpoint: Path) -> dict[str, Tensor]:
    reader = TensorReader(checkpoint / "weights")
    sizes = {name: item.size for name, item in reader.read_metadata().state_dict_metadata.items()}
    state = {name: torch.empty(size) for name, size in sizes.items() if name.startswith("model.")}
    with warnings.catch_warnings(action="ignore"):  # torch says that there is one process only
        load(state, storage_reader=reader, no_dist=True)
    return {name.removeprefix("model."): tensor for name, tensor in state.items()}


@pytest.fixture(scope="module")
def checkpoint(finished: Finished) -> Callable[[str], Path]:
    """Saved by two processes, in another layout for each workload."""
    return lambda workload: Path(finished("-w", workload, *SAVED, *LAYOUTS[workload])["checkpoint"]["path"])


@pytest.mark.parametrize("workload", WORKLOADS)
def test_weights_of_a_run_go_to_transformers_and_come_back(
    workload: str, checkpoint: Callable[[str], Path], tmp_path: Path, done: Call
) -> None:
    saved, out, back = checkpoint(workload), tmp_path / "out", tmp_path / "back"
    assert "exporting: 0.0" in done("export", saved, out, "--max-shard-size", "1MB").stderr
    assert len(list(out.glob("model-*-of-*.safetensors"))) > 2
    ours = engine_weights(saved)
    decoder = build_model(tiny(workload))
    loaded = decoder.load_state_dict(ours, strict=False)
    assert loaded.missing_keys == (["lm_head.weight"] if tiny(workload).tied_embeddings else [])
    assert loaded.unexpected_keys == []
    theirs = AutoModelForCausalLM.from_pretrained(out, attn_implementation="eager")
    assert type(theirs).__name__ == CLASSES[workload]
    assert theirs.dtype == torch.float32
    tokens = torch.randint(0, 1024, (2, 128), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        expected, found = decoder(tokens), theirs(tokens).logits
    assert float(expected.abs().max()) > 0.5
    assert float((expected - found).abs().max()) < 1e-4

    done("import", out, back, "-w", workload, "-s", "tiny")
    again = engine_weights(back)
    assert again.keys() == ours.keys()
    assert [name for name, tensor in ours.items() if not torch.equal(again[name], tensor)] == []
    shown = json.loads(done("show", back, "--json").stdout)
    assert (shown["step"], shown["optimizer_state"], shown["layout"]) == (0, False, None)
    assert shown["imported_from"]["path"] == str(out)
    assert shown["weights_dtypes"] == ["fp32"]
    assert (back / "context" / "config.json").read_bytes() == (out / "config.json").read_bytes()
    files = [path for folder in ("weights", "context") for path in (back / folder).iterdir()]
    assert sorted(shown["files"]) == sorted(str(path.relative_to(back)) for path in files)
    assert sorted(path.name for path in back.iterdir()) == ["checkpoint.json", "context", "weights"]
    assert shown["size_bytes"] == sum(path.stat().st_size for path in files)
    assert "imported from" in done("show", back).stdout


def first_loss(model: torch.nn.Module, plan: EnginePlan) -> float:
    """The loss of the samples of the first step, document by document."""
    layout = plan.recipe.layout
    batch = build_data(plan).micro_batch(range(layout.gbs))
    starts = torch.zeros_like(batch.tokens) if batch.starts is None else batch.starts
    documents: dict[int, list[tuple[Tensor, Tensor]]] = {}
    for tokens, labels, begins in zip(batch.tokens, batch.labels, starts, strict=True):
        for begin, end in pairwise([*torch.unique(begins).tolist(), layout.seq_len]):
            documents.setdefault(end - begin, []).append((tokens[begin:end], labels[begin:end]))
    losses = []
    for equally_long in documents.values():
        tokens, labels = map(torch.stack, zip(*equally_long, strict=True))
        with torch.no_grad():
            logits = model(tokens).logits
        counted = labels != IGNORED
        losses.append(functional.cross_entropy(logits[counted], labels[counted], reduction="none"))
    return float(torch.cat(losses).mean())


@pytest.mark.slow
@pytest.mark.parametrize("workload", [LLAMA, *(pytest.param(name, marks=pytest.mark.measured) for name in OTHERS)])
def test_a_model_of_transformers_trains_on_from_its_own_loss(
    workload: str, finished: Finished, tiny_plan: MakePlan, tmp_path: Path, done: Call
) -> None:
    source, imported = tmp_path / "source", tmp_path / "imported"
    model = write_published(tiny(workload), source)
    assert len(list(source.glob("*.safetensors"))) > 2
    said = done("import", source, imported, "-w", workload, "-s", "tiny").stderr
    assert ("are left out" in said) is (workload == MAVERICK)
    expected = first_loss(model, tiny_plan(workload, scale=1, synthetic=True))
    layouts = {
        LLAMA: [("2", "--tp", "2")],
        NEMOTRON: [("1",)],
        MAVERICK: [("2", "--capacity-factor", "0")],  # transformers drops no token
        QWEN: [("1",), ("2", "--pp", "2")],
        MIXTRAL: [("2", "--ep", "2")],
    }[workload]
    for layout in layouts:
        result = finished(
            "-w", workload, "--scale", *layout, "--load-checkpoint", str(imported), "--steps", "3", "--lr", "0.01"
        )
        steps = [json.loads(line) for line in (Path(result["run_dir"]) / "metrics.jsonl").read_text().splitlines()]
        assert [step["step"] for step in steps] == [0, 1, 2]
        assert steps[0]["loss"] == pytest.approx(expected, abs=2e-6)
        assert steps[2]["loss"] < steps[0]["loss"]


@pytest.fixture(scope="module")
def exported(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory, done: Call) -> Path:
    folder = tmp_path_factory.mktemp("exported") / "model"
    done("export", checkpoint(LLAMA), folder, "--max-shard-size", "1MB")
    return folder


@pytest.fixture
def copy(exported: Path, tmp_path: Path) -> Path:
    """An exported model of the test's own, to be damaged."""
    return shutil.copytree(exported, tmp_path / "copy")


def test_damage_is_told_and_nothing_is_left(copy: Path, tmp_path: Path, refused: Refused) -> None:
    broken = copy / "model-00002-of-00005.safetensors"
    broken.write_bytes(broken.read_bytes()[:-1])
    said = refused(2, "import", copy, tmp_path / "new" / "back", "-w", LLAMA, "-s", "tiny")
    assert f"{broken.name} is not a complete safetensors file" in said
    assert not list((tmp_path / "new").iterdir())
    broken.unlink()
    assert f"{broken.name} is missing" in refused(2, "import", copy, tmp_path / "back", "-w", LLAMA, "-s", "tiny")


def test_another_architecture_and_tied_embeddings_are_refused(copy: Path, tmp_path: Path, refused: Refused) -> None:
    said = refused(2, "import", copy, tmp_path / "back", "-w", NEMOTRON, "-s", "tiny")
    assert "model_type is llama; nemotron4 tiny is nemotron" in said
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True, "rope_theta": 10000}))
    said = refused(2, "import", copy, tmp_path / "back", "-w", LLAMA, "-s", "tiny")
    assert "rope_theta is 10000; in llama3.1 tiny it is 500000" in said
    assert "tie_word_embeddings is True; in llama3.1 tiny it is False" in said
    assert not (tmp_path / "back").exists()


@pytest.mark.slow
def test_an_imported_checkpoint_has_checksums_that_show_damage(
    exported: Path, tmp_path: Path, done: Call, refused: Refused
) -> None:
    imported = tmp_path / "imported"
    done("import", exported, imported, "-w", LLAMA, "-s", "tiny")
    assert "is verified: " in done("show", imported, "--verify").stderr
    damaged = max((imported / "weights").glob("*.distcp"), key=lambda path: path.stat().st_size)
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    said = f"weights/{damaged.name} has the checksum"
    assert said in refused(2, "show", imported, "--verify")
    assert said in refused(2, "export", imported, tmp_path / "out")
    done("export", imported, tmp_path / "out", "--no-verify-checkpoint")


def test_a_target_that_is_taken_stays_as_it_is(
    exported: Path, checkpoint: Callable[[str], Path], refused: Refused
) -> None:
    before = sorted(exported.iterdir())
    assert "already exists" in refused(2, "export", checkpoint(LLAMA), exported)
    assert "already exists" in refused(2, "import", exported, exported, "-w", LLAMA, "-s", "tiny")
    assert sorted(exported.iterdir()) == before


@pytest.mark.slow
def test_a_checkpoint_that_should_hold_optimizer_state_and_does_not_is_an_error(
    exported: Path, start: Callable[..., Any], forked_python: str, tmp_path: Path, done: Call
) -> None:
    imported = tmp_path / "imported"
    done("import", exported, imported, "-w", LLAMA, "-s", "tiny")
    record = json.loads((imported / "checkpoint.json").read_text())
    (imported / "checkpoint.json").write_text(json.dumps(record | {"optimizer_state": True}))
    run = start("-w", LLAMA, "--scale", "1", "--load-checkpoint", str(imported), python=forked_python)
    _, talk = run.process.communicate(timeout=ENDS_WITHIN_S)
    assert run.process.returncode == 4
    assert "rank 0" in talk
    assert "the checkpoint lacks optimizer.embed_tokens.weight.exp_avg and 116 more" in talk


@pytest.mark.parametrize(
    ("action", "room"),
    [
        ("import", 10_000),
        *(
            pytest.param(*case, marks=pytest.mark.measured)
            for case in (("export", -10_000), ("export", 10_000), ("import", -10_000))
        ),
    ],
)
@pytest.mark.slow
def test_a_full_disk_is_said_and_nothing_is_left(
    action: str,
    room: int,
    checkpoint: Callable[[str], Path],
    exported: Path,
    tmp_path: Path,
    small_disk: Callable[[str], list[str]],
) -> None:
    """With ``room`` beside the weights, the files' own overhead fills the disk when it is above zero.

    What an import has finished is kept, for the same command to resume with.
    """
    weights = json.loads((exported / "model.safetensors.index.json").read_text())["metadata"]["total_size"]
    one_by_one = ("-w", LLAMA, "-s", "tiny", "--processes", "1")
    arguments = {
        "export": [checkpoint(LLAMA), tmp_path / "disk" / "new", "--max-shard-size", "100KB"],
        "import": [exported, tmp_path / "disk" / "new", *one_by_one, "--max-file-size", "1MB"],
    }[action]
    command = [*small_disk(str(weights + room)), *LLMB, "checkpoint", action, *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=ENDS_WITHIN_S)
    assert result.returncode == 3
    assert "Traceback" not in result.stderr
    said = "the weights need about 0.00" if room < 0 else "No space left on device"
    assert said in result.stderr
    left = list((tmp_path / "kept").iterdir())
    if action == "import" and room > 0:
        assert left == [partial_path(tmp_path / "kept" / "new")]
        assert "run the same command again: finished files are kept" in result.stderr
    else:
        assert not left


SLOW_DISK = "import os, time\nusual = os.fsync\nos.fsync = lambda file: (time.sleep({seconds}), usual(file))[1]\n"


@pytest.fixture
def slow_disk(tmp_path_factory: pytest.TempPathFactory) -> SlowDisk:
    """Variables of a command whose every file takes some seconds more to be flushed: it does not end unobserved."""

    def variables(seconds: float) -> dict[str, str]:
        folder = tmp_path_factory.mktemp("slow_disk")
        (folder / "sitecustomize.py").write_text(SLOW_DISK.format(seconds=seconds))
        paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}

    return variables


def begin_export(checkpoint: Path, target: Path, environ: dict[str, str]) -> tuple["subprocess.Popen[str]", Path]:
    """An export that has begun, and the folder that it fills; its program still loads torch."""
    command = [*LLMB, "checkpoint", "export", str(checkpoint), str(target)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environ)
    end = time.monotonic() + ENDS_WITHIN_S
    while time.monotonic() < end:
        if partial_path(target).exists():
            return process, partial_path(target)
        time.sleep(0.001)
    raise AssertionError("the export did not begin")


def converters(partial: Path) -> list[int]:
    """Process ids of the programs that fill ``partial``."""
    found = []
    for proc in Path("/proc").iterdir():
        try:
            if proc.name.isdigit() and str(partial) in (proc / "cmdline").read_text():
                found.append(int(proc.name))
        except OSError:
            continue  # it ended while we looked
    return found


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.measured)])
def test_an_export_that_is_interrupted_leaves_nothing(
    number: signal.Signals, checkpoint: Callable[[str], Path], tmp_path: Path, slow_disk: SlowDisk
) -> None:
    process, partial = begin_export(checkpoint(LLAMA), tmp_path / "out", slow_disk(ENDS_WITHIN_S))
    while not converters(partial):
        assert process.poll() is None
    process.send_signal(number)
    _, talk = process.communicate(timeout=ENDS_WITHIN_S)
    assert process.returncode == 130
    assert f"interrupted by {number.name}" in talk
    assert not list(tmp_path.iterdir())
    assert not converters(partial)


@pytest.mark.slow
def test_an_export_that_is_killed_leaves_nothing_that_looks_finished(
    checkpoint: Callable[[str], Path], tmp_path: Path, done: Call, slow_disk: SlowDisk
) -> None:
    target = tmp_path / "out"
    process, partial = begin_export(checkpoint(LLAMA), target, slow_disk(ENDS_WITHIN_S))
    process.kill()
    process.communicate()
    quiet, end = 0, time.monotonic() + ENDS_WITHIN_S
    while quiet < 10 and time.monotonic() < end:  # one that was forked just before is seen only when it begins
        quiet = 0 if converters(partial) else quiet + 1
        time.sleep(0.05)
    assert quiet == 10
    assert list(tmp_path.iterdir()) == [partial]
    assert partial.name.startswith(".")
    assert partial.name.endswith(partial_path(target).suffix)
    done("export", checkpoint(LLAMA), target)
    assert list(tmp_path.iterdir()) == [target]
    assert sorted(path.name for path in target.iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize("processes", ["1", "2"])
@pytest.mark.measured
def test_an_import_that_is_killed_resumes_and_gives_the_same_files(
    processes: str, exported: Path, tmp_path: Path, done: Call, slow_disk: SlowDisk
) -> None:
    target, options = tmp_path / "new", ("-w", LLAMA, "-s", "tiny", "--max-file-size", "60KB", "--processes", processes)
    finished = partial_path(target) / "imported"
    command = [*LLMB, "checkpoint", "import", str(exported), str(target), *options]
    process = subprocess.Popen(command, env=slow_disk(0.1))  # twice for each of dozens of files
    while len([*finished.glob("*.distcp")]) < 3:
        assert process.poll() is None
        time.sleep(0.001)
    started = processes_below(process.pid)
    process.kill()
    process.wait()
    end = time.monotonic() + ENDS_WITHIN_S
    while any(is_running(pid) for pid in started) and time.monotonic() < end:
        time.sleep(0.05)
    assert len(started) >= int(processes)
    assert not [pid for pid in started if is_running(pid)]
    assert list(tmp_path.iterdir()) == [partial_path(target)]
    assert "resuming: " in done("import", exported, target, *options).stderr
    done("import", exported, tmp_path / "whole", *options)
    records = [json.loads((path / "checkpoint.json").read_text()) for path in (target, tmp_path / "whole")]
    assert records[0]["crc32"] == records[1]["crc32"]
    assert len(records[0]["crc32"]) > 30
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "whole"]
    done("show", target, "--verify")


def processes_below(pid: int) -> list[int]:
    children = [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]
    return [*children, *(other for child in children for other in processes_below(child))]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/statm").read_text().split()[1] != "0"
    except OSError:
        return False


def test_a_converter_that_is_killed_is_an_error(
    checkpoint: Callable[[str], Path], tmp_path: Path, slow_disk: SlowDisk
) -> None:
    process, partial = begin_export(checkpoint(LLAMA), tmp_path / "out", slow_disk(ENDS_WITHIN_S))
    while not converters(partial):
        assert process.poll() is None
    for pid in converters(partial):
        os.kill(pid, signal.SIGKILL)
    _, talk = process.communicate(timeout=ENDS_WITHIN_S)
    assert process.returncode == 4
    assert "was killed by signal 9" in talk
    assert not list(tmp_path.iterdir())


def test_what_runs_save_says_where_it_is_from(checkpoint: Callable[[str], Path], done: Call) -> None:
    record = read_checkpoint(checkpoint(LLAMA)).record
    assert (record.optimizer_state, record.imported_from) == (True, None)
    shown = done("show", checkpoint(LLAMA)).stdout
    assert "2 processes, TP 2, PP 1" in shown
    assert re.search("optimizer state +yes", shown)
