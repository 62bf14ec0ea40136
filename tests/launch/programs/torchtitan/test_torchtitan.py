# SPDX-License-Identifier: Apache-2.0
"""Arguments of torchtitan as kept in golden/, below the options of ``llmb run`` that make them (``make golden`` writes
them anew), and what is refused."""

import json
import os
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from llmb.base.errors import EnvironmentProblem, UsageError
from llmb.catalogue.catalogue import Catalogue
from llmb.catalogue.resolve import find_model
from llmb.cli.main import app
from llmb.launch.programs.torchtitan.arguments import check_versions, titan_model

HERE = Path(__file__).parent
KEPT = sorted((HERE / "golden").glob("*.txt"))
REFUSED = [line.split(" => ") for line in (HERE / "refused.txt").read_text().splitlines()]


def asked(command: str, options: str, *more: str) -> Result:
    words = [command, *shlex.split(options), "--framework", "torchtitan", "--dry-run", *more]
    return CliRunner().invoke(app, words, env={"LLMB_INSTALL": "/lustre/bench", "COLUMNS": "400"})


@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.stem)
def test_arguments_are_as_kept(path: Path) -> None:
    options, *kept = path.read_text().splitlines()
    plan = json.loads(asked("run", options, "--json").stdout)
    place = plan["command"].index("llmb.launch.programs.torchtitan.titan_worker")
    arguments = [word.replace(plan["command"][place + 1], "RUN") for word in plan["command"][place + 2 :]]
    if os.environ.get("LLMB_GOLDEN"):
        path.write_text("\n".join([options, *arguments]) + "\n")
        kept = arguments
    assert arguments == kept, "read the difference, then 'make golden'"
    assert plan["same_run"].count("--framework-arg") == options.count("--framework-arg")
    assert (plan["plan"]["keep_logits"], plan["plan"]["recipe"]["training"]["grad_reduce_dtype"]) == (True, "fp32")


CHECK = """
import json, sys
from dataclasses import asdict
from torchtitan.config import ConfigManager
from torchtitan.distributed.pipeline_parallel import generate_llm_fqn_per_model_part
from torchtitan.models import llama3, qwen3
read = {name: ConfigManager().parse_args(line).to_dict() for name, line in json.load(sys.stdin).items()}
models = {**llama3.llama3_args, **{f"q{name}": one for name, one in qwen3.qwen3_args.items()}}
models = {name: asdict(one) for name, one in models.items()}
parts = generate_llm_fqn_per_model_part(64, 126, 1, 1)
json.dump([read, models, [sum(name.startswith("layers") for name in part) for part in parts]], sys.stdout)
"""


@pytest.mark.skipif(find_spec("torchtitan") is None, reason="torchtitan is not installed: llmb[torchtitan]")
@pytest.mark.slow
def test_torchtitan_takes_the_kept_arguments_and_has_the_same_models() -> None:
    lines = json.dumps({path.stem: path.read_text().splitlines()[1:] for path in KEPT})
    done = subprocess.run([sys.executable, "-P", "-c", CHECK], input=lines, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    read, models, stages = json.loads(done.stdout)
    assert len(read) == 12
    largest = read["llama-405b-fp8-512-h100"]
    assert largest["model"]["converters"] == ["quantize.linear.float8"]
    assert (largest["compile"]["enable"], largest["training"]["global_batch_size"]) == (True, 256)
    assert read["qwen3-8b-bf16-8-b200-async-tp"]["parallelism"]["enable_async_tensor_parallel"] is True
    assert stages == [1, *[2] * 62, 1]
    for workload, size, own in (
        *(("pretrain_llama3.1", size, size.upper()) for size in ("8b", "70b", "405b")),
        *(("pretrain_qwen3", size, f"q{size.upper()}") for size in ("0.6b", "8b")),
        ("pretrain_qwen3", "30b", "q30B-A3B"),
        ("pretrain_qwen3", "235b", "q235B-A22B"),
    ):
        model, theirs = find_model(Catalogue(), workload, size), models[own]
        ours = titan_model(model, model.layers)
        differ = {name for name, value in ours.values.items() if theirs[name] != value}
        # Its 235B has the base of a later release of the weights; llmb passes the catalogue's.
        assert differ <= {"max_seq_len", "multiple_of", "ffn_dim_multiplier", "rope_theta"}, own
        assert (ours.experts or {}).items() <= (theirs.get("moe_args") or {}).items()
        if ours.rope_scaling:
            assert theirs["rope_scaling_args"] == ours.rope_scaling
            assert [rounded_ffn(values) for values in (theirs, ours.values)] == [model.ffn_hidden_size] * 2


def rounded_ffn(values: dict[str, float]) -> int:
    """Round the size as torchtitan's FeedForward does."""
    size = int((values["ffn_dim_multiplier"] or 1) * int(8 * values["dim"] / 3))
    return int(values["multiple_of"] * -(-size // values["multiple_of"]))


@pytest.mark.parametrize(("options", "why"), REFUSED)
def test_what_it_cannot_do_is_refused_by_name(options: str, why: str) -> None:
    for command in ("run", "submit"):
        error = asked(command, options).exception
        assert isinstance(error, UsageError)
        assert why in error.what


@pytest.mark.parametrize(
    ("titan", "torch", "why"),
    [
        (None, "2.13.0", "requires torchtitan, which"),
        ("0.3.0", "2.13.0+cpu", "torchtitan 0.3.0 is not supported, only 0.2.2"),
        ("0.2.2", "2.14.1+cu130", r"not tested with torch 2.14.1\+cu130, only with 2.13"),
    ],
)
def test_other_versions_are_refused_by_name(titan: str | None, torch: str, why: str) -> None:
    check_versions("0.2.2", "2.13.1+cu130")
    with pytest.raises(EnvironmentProblem, match=why):
        check_versions(titan, torch)
