# SPDX-License-Identifier: Apache-2.0
"""Arguments of torchtitan as kept in golden/, below the options of ``llmb run`` that make them (``make golden`` writes
them anew), and what is refused."""

import json
import os
import shlex
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from llmb.base.errors import EnvironmentProblem, UsageError
from llmb.catalogue.catalogue import Catalogue
from llmb.catalogue.records import Model
from llmb.catalogue.resolve import Request, find_model, resolve
from llmb.catalogue.throughput import parameter_count
from llmb.cli.main import app
from llmb.launch.programs.torchtitan.arguments import check_versions, titan_plan
from llmb.launch.programs.torchtitan.models import model_problems, titan_model
from llmb.prediction.prediction import TORCHTITAN, predicted_step
from llmb.runs.choices import Choices
from llmb.runs.plan import make_plan

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
import json, sys, torch
from dataclasses import asdict
from importlib import import_module
from torchtitan.config import ConfigManager
from torchtitan.distributed.pipeline_parallel import generate_llm_fqn_per_model_part
from torchtitan.models import deepseek_v3, gpt_oss, llama3, qwen3
lines, described = json.load(sys.stdin)
read = {name: ConfigManager().parse_args(line).to_dict() for name, line in lines.items()}
families = {"llama3": llama3.llama3_args, "qwen3": qwen3.qwen3_args}
families |= {"gpt_oss": gpt_oss.gptoss_configs, "deepseek_v3": deepseek_v3.deepseekv3_args}
models = {f"{name} {size}": asdict(one) for name, sizes in families.items() for size, one in sizes.items()}
split = [generate_llm_fqn_per_model_part(*sizes) for sizes in ((64, 126, 1, 1), (8, 61, 1, 2))]
stages = [[sum(name.startswith("layers") for name in part) for part in parts] for parts in split]
def parameters(family, arguments, values, rope_scaling, experts):
    module = import_module(f"torchtitan.models.{family}.model.args")
    parts = {"rope_scaling_args": module.RoPEScalingArgs(**rope_scaling)} if rope_scaling else {}
    parts |= {"moe_args": module.MoEArgs(**experts)} if experts else {}
    model = getattr(module, arguments)(**{**values, "max_seq_len": 4096}, **parts)
    model.moe_impl = "standard"
    with torch.device("meta"):
        built = import_module(f"torchtitan.models.{family}").get_train_spec().model_cls(model)
    return sum(each.numel() for each in built.parameters())
json.dump([read, models, stages, {name: parameters(*one) for name, one in described.items()}], sys.stdout)
"""


@pytest.mark.skipif(find_spec("torchtitan") is None, reason="torchtitan is not installed: llmb[torchtitan]")
@pytest.mark.slow
def test_torchtitan_takes_the_kept_arguments_and_has_the_same_models() -> None:
    lines = {path.stem: path.read_text().splitlines()[1:] for path in KEPT}
    every = {f"{one.model} {one.size}": one for one in Catalogue().models.values() if not list(model_problems(one))}
    described = {name: titan_model(one, one.layers) for name, one in every.items()}
    text = json.dumps([lines, described])
    done = subprocess.run([sys.executable, "-P", "-c", CHECK], input=text, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    read, models, stages, parameters = json.loads(done.stdout)
    assert {"llama3.1 8b", "qwen3 tiny-moe", "gpt_oss 120b", "deepseek-v3 16b", "kimi-k2 1t"} <= parameters.keys()
    for name, model in every.items():
        assert parameters[name] == parameter_count(model)[0] - selection_biases(model), name
    assert len(read) == 19
    largest = read["llama-405b-fp8-512-h100"]
    assert largest["model"]["converters"] == ["quantize.linear.float8"]
    assert (largest["compile"]["enable"], largest["training"]["global_batch_size"]) == (True, 256)
    assert read["qwen3-8b-bf16-8-b200-async-tp"]["parallelism"]["enable_async_tensor_parallel"] is True
    assert stages == [[1, *[2] * 62, 1], [7, *[8] * 6, 6]]
    assert read["deepseek-671b-bf16-512-h100"]["parallelism"]["pipeline_parallel_layers_per_stage"] == 8
    assert read["gpt-oss-120b-bf16-64-gb200-tp-even"]["debug"]["moe_force_load_balance"] is True
    for workload, size, own in (
        *(("pretrain_llama3.1", size, f"llama3 {size.upper()}") for size in ("8b", "70b", "405b")),
        *(("pretrain_qwen3", size, f"qwen3 {size.upper()}") for size in ("0.6b", "8b")),
        ("pretrain_qwen3", "30b", "qwen3 30B-A3B"),
        ("pretrain_qwen3", "235b", "qwen3 235B-A22B"),
        *(("pretrain_gpt_oss", size, f"gpt_oss {size}") for size in ("20b", "120b")),
        *(("pretrain_deepseek-v3", size, f"deepseek_v3 {size.upper()}") for size in ("16b", "671b")),
    ):
        model, theirs = find_model(Catalogue(), workload, size), models[own]
        ours = titan_model(model, model.layers)
        differ = {name for name, value in ours.values.items() if theirs[name] != value}
        assert differ <= DIFFERENT.get(ours.family, set()) | {"max_seq_len"}, own
        assert (ours.experts or {}).items() <= (theirs.get("moe_args") or {}).items(), own
        if ours.experts:
            untold = {name: value for name, value in theirs["moe_args"].items() if name not in ours.experts}
            assert untold.keys() <= MOE_DEFAULTS.keys(), own
            assert untold.items() <= MOE_DEFAULTS.items(), own
        if ours.rope_scaling:
            assert theirs["rope_scaling_args"] == ours.rope_scaling
            assert [rounded_ffn(values) for values in (theirs, ours.values)] == [model.ffn_hidden_size] * 2


def selection_biases(model: Model) -> int:
    """Count the biases of the router's selection, which are buffers of torchtitan's model."""
    if model.moe is None or model.other_parts is None or model.other_parts.router_groups is None:
        return 0
    return model.moe.experts * sum(map(model.is_moe_layer, range(model.layers)))


# Its Qwen3 235B has the base of a later release of the weights, and its DeepSeek-V3 0.70 and another epsilon than the
# file of the weights; llmb passes the catalogue's.
DIFFERENT = {
    "llama3": {"multiple_of", "ffn_dim_multiplier"},
    "qwen3": {"rope_theta"},
    "deepseek_v3": {"norm_eps", "mscale"},
}
MOE_DEFAULTS = {
    "num_expert_groups": None,
    "num_limited_groups": None,
    "gate_bias": False,
    "load_balance_coeff": 1e-3,
    "use_grouped_mm": True,
    "_debug_force_load_balance": False,
}
"""Arguments of experts that llmb does not pass, or the worker alone."""


def rounded_ffn(values: dict[str, float]) -> int:
    """Round the size as torchtitan's FeedForward does."""
    size = int((values["ffn_dim_multiplier"] or 1) * int(8 * values["dim"] / 3))
    return int(values["multiple_of"] * -(-size // values["multiple_of"]))


def changed(workload: str, size: str, path: str, value: object) -> Model:
    """Return the model of a size with another value of a field, or of a field of one."""
    document = find_model(Catalogue(), workload, size).model_dump()
    *above, name = path.split(".")
    part = document
    for each in above:
        part = part[each]
    part[name] = value
    return Model.model_validate(document)


@pytest.mark.parametrize(
    ("workload", "path", "value", "why"),
    [
        ("pretrain_gpt_oss", "other_parts.sliding_window.every", 3, "a window in other layers"),
        ("pretrain_gpt_oss", "other_parts.sliding_window", None, "no sliding window"),
        ("pretrain_gpt_oss", "other_parts.expert_biases", False, "no expert biases"),
        ("pretrain_gpt_oss", "other_parts.multi_token_layers", 1, "multi token layers"),
        ("pretrain_gpt_oss", "other_parts.yarn.mscale", 0.5, "other scaled attention"),
        ("pretrain_gpt_oss", "attention_output_bias", False, "other biases"),
        ("pretrain_gpt_oss", "moe.shared_ffn_hidden_size", 64, "other experts"),
        ("pretrain_gpt_oss", "moe", None, "no experts"),
        ("pretrain_deepseek-v3", "kv_heads", 4, "fewer KV heads than heads"),
        ("pretrain_deepseek-v3", "moe.shared_ffn_hidden_size", 96, "other experts"),
        ("pretrain_deepseek-v3", "moe.router", "softmax-weighted-outputs", "other experts"),
        ("pretrain_deepseek-v3", "qkv_bias", True, "biases"),
        ("pretrain_deepseek-v3", "other_parts.latent_experts", 32, "latent experts"),
        ("pretrain_deepseek-v3", "tied_embeddings", True, "tied to the head"),
    ],
)
def test_each_part_that_a_family_lacks_or_needs_is_named(workload: str, path: str, value: object, why: str) -> None:
    assert not list(model_problems(find_model(Catalogue(), workload, "tiny")))
    (problem,) = model_problems(changed(workload, "tiny", path, value))
    assert why in problem


def test_a_model_is_trained_without_multi_token_prediction_and_the_record_says_so() -> None:
    request = Request(workload="pretrain_deepseek-v3", size="671b", gpu_type="b200", scale=256)
    published = resolve(Catalogue(), request)
    assert published.expectations
    recipe = resolve(Catalogue(), replace(request, dtype="bf16"))
    plan = titan_plan(Catalogue(), recipe.model_copy(update={"expectations": published.expectations}), Choices())
    assert plan.recipe.model == changed("pretrain_deepseek-v3", "671b", "other_parts.multi_token_layers", 0)
    why = "torchtitan 0.2.2 has no multi-token prediction: pretrain_deepseek-v3 671b is trained without it"
    assert why in plan.recipe.decisions
    assert (plan.recipe.expectations, plan.recipe.expectations_reason) == ((), why)
    assert plan.predicted
    with_it = make_plan(recipe, Choices(), device="cuda", trains=False)
    longer = predicted_step(Catalogue(), with_it, TORCHTITAN)
    assert longer
    assert plan.predicted.step_time_s < longer.step_time_s


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
        ("0.2.2", "2.14.1+cu130", r"not been tested with torch 2.14.1\+cu130, only with 2.13"),
    ],
)
def test_other_versions_are_refused_by_name(titan: str | None, torch: str, why: str) -> None:
    check_versions("0.2.2", "2.13.1+cu130")
    with pytest.raises(EnvironmentProblem, match=why):
        check_versions(titan, torch)
