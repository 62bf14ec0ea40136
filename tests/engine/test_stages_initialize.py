# SPDX-License-Identifier: Apache-2.0
"""Initial values: the same however the model is cut, and of the right size."""

import json
from pathlib import Path

import pytest
import torch

from llmb.engine.model import decoder as initialize_module
from llmb.engine.model.decoder import Decoder, build_model
from llmb.engine.parallel.exchange import TrainedStage

WORKER = Path(__file__).parent / "initialize_worker.py"
ARCHITECTURES = ["llama", "nemotron4", "llama4", "qwen3-tied", "mixtral"]


def initialized(model, layers=None, seed=7, **parts):
    decoder = build_model(model) if layers is None else Decoder(model, layers, **parts)
    TrainedStage(decoder).initialize(seed)
    return decoder


@pytest.fixture(params=[2**24, 1000], ids=["one-block", "many-blocks"])
def block_elements(request, monkeypatch):
    monkeypatch.setattr(initialize_module, "BLOCK_ELEMENTS", request.param)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_values_do_not_depend_on_the_layers_that_are_present(name, models, block_elements):
    whole = initialized(models[name]).state_dict()
    torch.manual_seed(99)
    parts = [
        initialized(models[name], [2, 0], embedding=False, head=True),
        initialized(models[name], [3], embedding=True, head=False),
        initialized(models[name], [1], embedding=False, head=False),
    ]
    compared = {n: value for part in parts for n, value in part.state_dict().items()}
    assert compared.keys() == whole.keys()
    assert all(torch.equal(value, whole[n]) for n, value in compared.items())


def test_each_parameter_and_each_seed_has_values_of_its_own(models):
    first, second = (initialized(models["llama4"], seed=seed).state_dict() for seed in (7, 8))
    matrices = {n: value for n, value in first.items() if value.ndim > 1}
    assert len({float(value.flatten()[0]) / float(value.std()) for value in matrices.values()}) == len(matrices)
    assert all(not torch.equal(value, second[n]) for n, value in matrices.items())
    rows = first["layers.1.mlp.experts.down_proj"].flatten(1)
    assert len({tuple(row[:4].tolist()) for row in rows}) == len(rows)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_values_have_the_spread_of_their_role(name, models, block_elements):
    model = models[name]
    for parameter_name, value in initialized(model).state_dict().items():
        if value.ndim == 1:
            neutral = 1.0 if model.norm == "rmsnorm" else 0.0
            assert (value == neutral).all(), parameter_name
            continue
        residual = "o_proj" in parameter_name or "down_proj" in parameter_name
        expected = model.init_std / (8**0.5 if residual else 1)
        # Five standard errors of a sample's standard deviation, and of its mean.
        assert float(value.std()) == pytest.approx(expected, rel=5 / (2 * value.numel()) ** 0.5), parameter_name
        assert abs(float(value.mean())) < 5 * expected / value.numel() ** 0.5, parameter_name


@pytest.mark.parametrize(
    ("backend", "dp", "tp"),
    [
        ("gloo", 1, 1),
        ("gloo", 2, 1),
        # No other process answers here, so that this case also shows that nothing is communicated.
        pytest.param("fake", 2, 2, marks=pytest.mark.slow),
        pytest.param("fake", 3, 1, marks=pytest.mark.slow),
    ],
)
def test_each_rank_gets_its_shard_of_the_unsharded_values(backend, dp, tp, models, run_ranks, tmp_path):
    records = [models[name].model_dump(mode="json") for name in ARCHITECTURES]
    (tmp_path / "models.json").write_text(json.dumps(records))
    first = dp * tp - 2 if backend == "fake" else 0  # whether the others run makes no difference there
    for printed in run_ranks(WORKER, dp * tp, backend, tmp_path, dp, tp, first=first):
        assert "differing: []" in printed
