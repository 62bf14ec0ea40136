# SPDX-License-Identifier: Apache-2.0
"""Models small enough for a test, in which every special feature of their architecture acts within 96 tokens."""

import json
import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from llmb.catalogue.catalogue import Catalogue
from llmb.catalogue.records import ChunkedAttention, MixtureOfExperts, Model, RopeScaling
from llmb.engine.model.decoder import Decoder, build_model
from llmb.runs.plan import Plan

HERE = Path(__file__).parent
LLAMA = Model(
    model="llama",
    size="test",
    norm="rmsnorm",
    mlp="swiglu",
    layers=4,
    hidden_size=128,
    ffn_hidden_size=256,
    attention_heads=8,
    kv_heads=4,
    head_dim=16,
    vocab_size=512,
    max_seq_len=512,
    norm_eps=1e-5,
    rope_theta=10000.0,
    init_std=0.02,
    source="made for tests",
)
NEMOTRON4 = LLAMA.model_copy(
    update={"norm": "layernorm1p", "mlp": "squared-relu", "rotary_fraction": 0.5, "ffn_hidden_size": 320}
)
MODELS = {
    "llama": LLAMA,
    # Wavelengths run from 6 to 20 000 positions: kept below 64, blended up to 256, divided above.
    "llama-scaled": LLAMA.model_copy(
        update={
            "rope_scaling": RopeScaling(
                factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=256
            )
        }
    ),
    "nemotron4": NEMOTRON4,
    "llama4": LLAMA.model_copy(
        update={
            "rotary_pairs": "interleaved",
            "moe": MixtureOfExperts(
                router="sigmoid-scaled-inputs",
                experts=8,
                top_k=1,
                ffn_hidden_size=96,
                shared_ffn_hidden_size=96,
                interleave=2,
            ),
            "chunked_attention": ChunkedAttention(chunk_size=32, global_every=4, floor_scale=16, attn_scale=0.1),
        }
    ),
    "qwen2": LLAMA.model_copy(update={"qkv_bias": True}),
    "llama-biased": LLAMA.model_copy(update={"qkv_bias": True, "attention_output_bias": True, "mlp_bias": True}),
    "nemotron4-biased": NEMOTRON4.model_copy(
        update={"qkv_bias": True, "attention_output_bias": True, "mlp_bias": True}
    ),
    "qwen3": LLAMA.model_copy(update={"qk_norm": "rmsnorm", "norm_eps": 1e-6}),
    "qwen3-tied": LLAMA.model_copy(update={"qk_norm": "rmsnorm", "norm_eps": 1e-6, "tied_embeddings": True}),
    "mixtral": LLAMA.model_copy(
        update={
            "moe": MixtureOfExperts(
                router="softmax-weighted-outputs", experts=8, top_k=2, ffn_hidden_size=96, interleave=1
            ),
            "ffn_hidden_size": 96,
        }
    ),
    "qwen3-moe": LLAMA.model_copy(
        update={
            "qk_norm": "rmsnorm",
            "norm_eps": 1e-6,
            "moe": MixtureOfExperts(
                router="softmax-weighted-outputs", experts=24, top_k=8, ffn_hidden_size=48, interleave=1
            ),
        }
    ),
}
FAMILIES = ("llama3.1", "llama3", "nemotron4", "llama4-maverick", "qwen3", "mixtral")


for family, size in (*((family, "tiny") for family in FAMILIES), ("qwen3", "tiny-moe")):
    MODELS[f"{family} {size}"] = Catalogue().models[(family, size)]


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Threads of several test processes on few cores wait for each other by spinning, which doubled the time."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def models() -> dict[str, Model]:
    return MODELS


@pytest.fixture(scope="session")
def randomised() -> Callable[[Model], Decoder]:
    """Builds a model whose every parameter, norms included, is far enough from its neutral value to matter."""

    def build(model: Model) -> Decoder:
        decoder = build_model(model)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for name, parameter in decoder.named_parameters():
                values = torch.randn(parameter.shape, generator=generator)
                centre = 1.0 if name.endswith("norm.weight") and model.norm == "rmsnorm" else 0.0
                parameter.copy_(centre + values * (0.2 if parameter.ndim == 1 else 0.1))
        return decoder

    return build


@pytest.fixture(scope="session")
def run_ranks(forked_python: str) -> Callable[..., list[str]]:
    """Runs a script once for every rank, which it is given last, and returns what each printed; or from one rank on."""

    def run(script: Path, ranks: int, *arguments: object, first: int = 0, limit_s: int = 600) -> list[str]:
        path = os.pathsep.join(filter(None, [str(HERE.parent / "support"), os.environ.get("PYTHONPATH")]))
        workers = [
            subprocess.Popen(
                [forked_python, script, *map(str, arguments), str(rank)],
                env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(first, ranks)
        ]
        try:
            outputs = [worker.communicate(timeout=limit_s) for worker in workers]
        finally:
            for worker in workers:
                worker.kill()
        for worker, (_, complaints) in zip(workers, outputs, strict=True):
            assert worker.returncode == 0, complaints
        return [printed for printed, _ in outputs]

    return run


@pytest.fixture(scope="session")
def references(run_ranks: Callable[..., list[str]], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The file with what a script beside this one finds that trains a plan on one process; it trains each plan once."""
    folder, made = tmp_path_factory.mktemp("references"), dict[str, Path]()

    def reference(script: str, plan: dict[str, Any], *arguments: object) -> Path:
        key = json.dumps([script, plan, *arguments])
        if key not in made:
            made[key] = folder / f"{len(made)}.pt"
            (folder / "plan.json").write_text(json.dumps(plan))
            run_ranks(HERE / script, 1, folder / "plan.json", made[key], *arguments)
        return made[key]

    return reference


@pytest.fixture(scope="session")
def distances(
    run_ranks: Callable[..., list[str]], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[dict[str, Any], Path], dict[str, float]]:
    """How far what a plan's ranks find lies from a reference, by name.

    Ranks are started for each plan: the threads of a group wake a hundred times a second for as long as their process
    lives, which held up later ones.
    """

    def found(plan: dict[str, Any], reference: Path) -> dict[str, float]:
        folder = tmp_path_factory.mktemp("case")
        (folder / "case.json").write_text(json.dumps({"plan": plan, "reference": str(reference)}))
        return json.loads(run_ranks(HERE / "layout_worker.py", plan["recipe"]["layout"]["gpus"], folder)[0])

    return found


@pytest.fixture(scope="session")
def train_plans(
    run_ranks: Callable[..., list[str]], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., list[dict[str, Any]]]:
    """What ``training_worker.py`` finds of plans that are for the same number of ranks."""

    def train(
        plans: Sequence[Plan], backend: str = "aot_eager", *, late: bool = False, operators: bool = False
    ) -> list[dict[str, Any]]:
        folder, ranks = tmp_path_factory.mktemp("trained"), plans[0].recipe.layout.gpus
        (folder / "plans.json").write_text(json.dumps([plan.model_dump(mode="json") for plan in plans]))
        run_ranks(
            HERE / "training_worker.py",
            ranks,
            folder,
            ranks,
            backend,
            ("late" if late else "soon") + " fused" * operators,
        )
        return [torch.load(folder / f"{number}.pt", weights_only=True) for number in range(len(plans))]

    return train
