# SPDX-License-Identifier: Apache-2.0
"""A data file that is wrong is refused with file and line."""

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from llmb.catalogue.catalogue import Catalogue
from llmb.catalogue.data_files import CatalogueError
from llmb.catalogue.resolve import Request, resolve

LLAMA = "workloads/pretrain_llama3.1.yaml"


def spoil(path: Path, old: str, new: str) -> int:
    """Replaces the first ``old`` and tells its line."""
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    return text[: text.index(old)].count("\n") + 1


def read_whole(catalogue: Catalogue, part: str) -> None:
    """Every file of the part: a mapping may read each when it is asked for."""
    found = getattr(catalogue, part)
    _ = dict(found) if isinstance(found, Mapping) else found


@pytest.mark.parametrize(
    ("file", "old", "new", "part", "said"),
    [
        (LLAMA, "dp: 4, mbs: 1, gbs: 128, ga: 32", "dp: 2, mbs: 1, gbs: 128, ga: 32", "workloads", "prints DP 2"),
        (LLAMA, "gbs: 256, ga: 32", "gbs: 256, ga: 16", "workloads", "prints GA 16"),
        (
            LLAMA,
            "layers: 80, tp: 4",
            "layers: 81, tp: 4",
            "workloads",
            "number of layers 81 is not divisible by PP x VP",
        ),
        (LLAMA, "layers: 30, tp: 8", "layers: 32, tp: 8", "workloads", "layers 34 (embedding and loss counted)"),
        (LLAMA, "gpus: 16, layers: 32", "gpus: 16, layer: 32", "workloads", "layer"),
        (LLAMA, "document: llama3.1-24.11\n", "document: nowhere\n", "workloads", "unknown document 'nowhere'"),
        (LLAMA, "workload: pretrain_llama3.1", "workload: pretrain_llama", "workloads", "like the name of its file"),
        (LLAMA, "model: llama3.1", "model: llama9", "workloads", "there is no model 'llama9'"),
        ("models/llama3.1.yaml", "model: llama3.1", "model: llama", "models", "like the name of its file"),
        (LLAMA, "peak_lr: 3.0e-4, min_lr: 3.0e-5", "peak_lr: fast, min_lr: 3.0e-5", "workloads", "peak_lr"),
        ("hardware.yaml", "memory_gb: 80", "memory_gb: lots", "gpus", "memory_gb"),
        ("hardware.yaml", 'tdp_w: "dgxc', 'tdp: "dgxc', "gpus", "no source for tdp_w"),
        ("hardware.yaml", "borrows: [h100]", "borrows: [h1000]", "gpus", "not a GPU type"),
        (LLAMA, "    gpu_types: [h100]\n", "", "workloads", "gpu_types or gpus_with is required"),
        ("models/llama3.1.yaml", "8b: {layers: 32", "8b: {layers: many", "models", "layers"),
        ("expectations/llama3.1-25.04.yaml", "step_time_s: 12.27", "step_time_s: fast", "figures", "step_time_s"),
        ("documents.yaml", 'release: "25.04"', "release: [25.04", "documents", "not valid YAML"),
    ],
)
def test_a_wrong_file_is_refused_with_its_line(
    data_copy: Path, file: str, old: str, new: str, part: str, said: str
) -> None:
    path = data_copy / file
    line = spoil(path, old, new)
    with pytest.raises(CatalogueError) as caught:
        read_whole(Catalogue(data_copy), part)
    first = caught.value.problems[0]
    assert said in first
    place = first.removeprefix(f"{path}:").split(":")[0]
    assert abs(int(place) - line) <= 20  # an error of a whole record names where the record begins
    if said[0].isdigit() or said.startswith("prints"):
        assert int(place) == line


def test_all_problems_of_a_file_are_reported_together(data_copy: Path) -> None:
    path = data_copy / LLAMA
    spoil(path, "dp: 4, mbs: 1, gbs: 128", "dp: 5, mbs: 1, gbs: 128")
    spoil(path, "layers: 80, tp: 4", "layers: 81, tp: 4")
    with pytest.raises(CatalogueError) as caught:
        read_whole(Catalogue(data_copy), "workloads")
    assert len(caught.value.problems) >= 2


def test_one_recipe_reads_the_files_of_its_workload_and_model_alone(data_copy: Path) -> None:
    for other in ("workloads/pretrain_nemotron4.yaml", "models/nemotron4.yaml"):
        (data_copy / other).write_text("not: what it should be")
    request = Request(workload="pretrain_llama3.1", size="8b", scale=8)
    assert resolve(Catalogue(data_copy), request) == resolve(Catalogue(), request)
    with pytest.raises(CatalogueError, match="nemotron4"):
        read_whole(Catalogue(data_copy), "workloads")


@pytest.mark.parametrize("remove", [lambda root: (root / "hardware.yaml").unlink()])
def test_a_missing_file_is_an_error_not_an_empty_catalogue(data_copy: Path, remove: Callable[[Path], None]) -> None:
    remove(data_copy)
    with pytest.raises(CatalogueError, match="no such file"):
        _ = Catalogue(data_copy).gpus
