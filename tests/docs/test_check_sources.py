# SPDX-License-Identifier: Apache-2.0
"""scripts/check_sources.py, on a small repository."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import check_sources
import pytest
import yaml

MODEL = """
class Base:
    norm: str = "RMSNorm"
    act: Callable = F.silu
    freq: list = field(default_factory=lambda: [0, 1] * 24)

class Llama(Base, Other):
    num_layers: int = 32
    kv_channels: Optional[int] = None

def recipe():
    peft.dim = 16
    return run.Config(Optimizer, lr=3e-4)
"""
ITEMS = [
    {"item": "layers", "in": "nemo:model.py", "field": "Llama.num_layers", "llmb": "recipe.model.layers"},
    {"item": "norm", "in": "nemo:model.py", "field": ["{config}.norm", "{config}.act"],
     "words": {"RMSNorm, F.silu": "rmsnorm"}, "llmb": "recipe.model.norm"},
    {"item": "head", "in": "nemo:model.py", "field": "Llama.kv_channels",
     "quotient": ["recipe.model.hidden_size", "recipe.model.attention_heads"], "llmb": "recipe.model.head_dim"},
    {"item": "made", "in": "nemo:model.py", "field": "Llama.freq", "is": "[0, 1] * 24"},
    {"item": "rank", "in": "nemo:model.py", "assigned": "recipe:peft.dim", "is": 16},
    {"item": "rate", "in": "nemo:model.py", "argument": "recipe:Optimizer.lr", "llmb": "recipe.training.peak_lr"},
    {"item": "vocabulary", "stated": 128255, "source": "somewhere", "padded": True, "llmb": "recipe.model.vocab_size"},
    {"item": "nvls", "in": "nemo:run.sh", "text": r"NVLS=(\d)", "llmb": "job.variables.NCCL_NVLS_ENABLE.value"},
    {"item": "buffer", "in": "nemo:run.yaml", "key": "timing.buffer", "llmb": "recipe.document.averaged_steps"},
]  # fmt: skip


Check = Callable[..., tuple[int, list[str]]]


@pytest.fixture
def checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Check:
    """Exit status of the script for some items of 8b on eight GPUs, the rows of its table, and its last line."""
    folder = tmp_path / "checkouts" / "NeMo"
    folder.mkdir(parents=True)
    (folder / "model.py").write_text(MODEL)
    (folder / "run.sh").write_text("export NVLS=0\n")
    (folder / "run.yaml").write_text("timing: {buffer: 1}\n")
    author = ("-c", "user.name=a", "-c", "user.email=a@b")
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "one"], ["tag", "v1"]):
        subprocess.run(["git", *author, *words], cwd=folder, check=True)
    recipe = {"workload": "pretrain_llama3.1", "size": "8b", "release": "25.04", "gpu_type": "h100", "dtype": "bf16"}
    sources = tmp_path / "sources.yaml"
    monkeypatch.setattr(sys, "argv", ["check_sources.py", str(folder.parent), "--sources", str(sources)])

    def check(*items: dict[str, object], different: dict[str, str] | None = None) -> tuple[int, list[str]]:
        entry = {
            "recipe": {**recipe, "scale": 8}, "revisions": {"nemo": "v1"}, "readings": ["all"],
            "names": {"config": "Llama"}, "different": different or {},
        }  # fmt: skip
        document = {"repositories": {"nemo": "NeMo"}, "readings": {"all": items}, "recipes": [entry]}
        sources.write_text(yaml.safe_dump(document))
        with pytest.raises(SystemExit) as end:
            check_sources.main()
        heading, _, _, _, *rows, _, last = capsys.readouterr().out.splitlines()
        assert heading == "## pretrain_llama3.1 8b, 25.04"
        return int(end.value.code or 0), [*rows, last]

    return check


def test_every_kind_of_reading_finds_its_value(checked: Check) -> None:
    status, lines = checked(*ITEMS)
    assert status == 0
    assert lines[0] == "| layers | 32 | 32 | equal | NeMo v1 model.py |"
    assert lines[-1] == "9 items: 9 equal, 0 different and named, 0 wrong"


WRONG: list[tuple[dict[str, object], str]] = [
    ({"field": "Llama.kv_channels"}, "None there, 32 here | NeMo v1 model.py"),
    ({"field": "Llama.unknown"}, "None there, 32 here"),
    ({"field": "Unknown.num_layers"}, "no class Unknown"),
    ({"field": [], "assigned": "recipe:peft.alpha"}, "no peft.alpha in recipe"),
    ({"field": [], "assigned": "nothing:peft.dim"}, "no function nothing"),
    ({"in": "nemo:other.py"}, "fatal: path 'other.py' does not exist in 'v1'"),
    ({"in": "nemo:run.yaml", "field": [], "key": "timing.none"}, "no key timing.none"),
    ({"field": [], "text": "layers = ([0-9]+)"}, "no text matches layers = ([0-9]+)"),
]


def test_what_differs_or_cannot_be_read_is_named(checked: Check) -> None:
    items = [{**ITEMS[0], **change, "item": f"item{number}"} for number, (change, _) in enumerate(WRONG)]
    status, lines = checked(*items)
    assert (status, len(lines)) == (1, len(WRONG) + 1)
    for number, (line, (_, words)) in enumerate(zip(lines, WRONG, strict=False)):
        assert line.startswith(f"| item{number} |")
        assert f"| {words}" in line
    assert lines[-1] == "8 items: 0 equal, 0 different and named, 8 wrong"


def test_a_difference_may_be_named_only_while_there_is_one(checked: Check) -> None:
    differs = {**ITEMS[0], "field": "Llama.kv_channels"}
    assert checked(differs, different={"layers": "why"})[0] == 0
    status, lines = checked(ITEMS[0], different={"layers": "why", "depth": "why"})
    assert status == 1
    assert lines[0].startswith("| layers | 32 | 32 | named as different, but both are 32 |")
    assert lines[1].startswith("| depth |  |  | named as different, but not compared |")


def test_every_item_of_the_published_runs_is_of_the_catalogue() -> None:
    sources = check_sources.read_sources(check_sources.SOURCES)
    for entry in sources.recipes:
        ours = check_sources.our_values(entry)
        assert all(
            check_sources.shown(check_sources.ours_of(item, ours)) for item in check_sources.readings(sources, entry)
        )
