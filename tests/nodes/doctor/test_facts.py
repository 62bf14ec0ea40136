# SPDX-License-Identifier: Apache-2.0
"""What a node is expected to have, who expects it, and the newest measurements that are kept of it."""

from pathlib import Path
from typing import Any

import pytest

from llmb.base.errors import UsageError
from llmb.catalogue.catalogue import Catalogue
from llmb.launch.scheduler_lookup import read_cluster_site
from llmb.launch.site.site import Site
from llmb.nodes.bench.measurements import (
    Measurement,
    MeasurementFile,
    bench_folder,
    read_measurements,
    write_measurements,
)
from llmb.nodes.doctor.facts import run_places, target_of

CATALOGUE = Catalogue()
PARTITIONS = """gpu_type: h100
slurm:
  partition: main
  gpus_per_node: 8
  partitions:
    main: {gpu_type: h100}
    new: {gpu_type: gb200, gpus_per_node: 4}
    odd: {gpus_per_node: 6}
"""
IN_CONFIG = "cluster_config.yaml"


def site(install: Path, config: str = "", **shell: str) -> Site:
    if config:
        (install / IN_CONFIG).write_text(config)
    return read_cluster_site(CATALOGUE, install, shell)


@pytest.mark.parametrize(
    ("config", "gpu_type", "gpus", "expected"),
    [
        ("", None, None, (None, None, None, None)),
        ("", "H100", None, ("h100", "--gpu-type", 8, "nodes of h100")),
        ("", None, 3, (None, None, 3, "--gpus")),
        ("", "gb200", 2, ("gb200", "--gpu-type", 2, "--gpus")),
        ("", "cpu", None, (None, "--gpu-type", 0, "--gpu-type")),
        ("gpu_type: cpu", None, None, (None, IN_CONFIG, 0, IN_CONFIG)),
        ("gpu_type: b200", None, None, ("b200", IN_CONFIG, 8, "nodes of b200")),
        ("gpu_type: b200\nslurm: {gpus_per_node: 4}", None, None, ("b200", IN_CONFIG, 4, IN_CONFIG)),
        ("gpu_type: b200\nslurm: {gpus_per_node: 4}", None, 1, ("b200", IN_CONFIG, 1, "--gpus")),
        (PARTITIONS, None, None, ("h100", IN_CONFIG, 8, IN_CONFIG)),
    ],
)
def test_who_expects_which_gpus(
    tmp_path: Path, config: str, gpu_type: str | None, gpus: int | None, expected: tuple[object, ...]
) -> None:
    found = target_of(CATALOGUE, site(tmp_path, config), gpu_type, gpus)
    assert (found.gpu and found.gpu.gpu_type, found.gpu_type_by, found.gpus, found.gpus_by) == expected
    assert found.needs_gpus == bool(expected[2])
    assert found.cluster == ("slurm" in config)  # llmb install writes the file of a single machine, too


@pytest.mark.parametrize(
    ("partition", "expected"), [("new", ("gb200", 4)), ("odd", ("h100", 6)), ("main", ("h100", 8))]
)
def test_within_a_job_its_partition_says_what_its_nodes_have(
    tmp_path: Path, partition: str, expected: tuple[str, int]
) -> None:
    found = target_of(CATALOGUE, site(tmp_path, PARTITIONS, SLURM_JOB_PARTITION=partition))
    assert found.gpu
    assert (found.gpu.gpu_type, found.gpus) == expected


def test_a_partition_without_the_gpu_type_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="partition new has gb200"):
        target_of(CATALOGUE, site(tmp_path, PARTITIONS, SLURM_JOB_PARTITION="new"), "h100")


@pytest.mark.parametrize(
    ("config", "variables", "place", "folder"),
    [
        ("", {}, "images", "{install}/images"),
        ("install: {image_folder: /shared/images}", {}, "images", "/shared/images"),
        ("container: {runtime: pyxis, image: /shared/llmb.sqsh}", {}, "images", "/shared"),
        ("container: {runtime: pyxis, image: nvcr.io#nvidia/nemo}", {}, "images", "{install}/images"),
        ("", {}, "checkpoints", "{install}/workloads"),
        ("", {"CHECKPOINT_DIR": "/scratch/ckpt"}, "checkpoints", "/scratch/ckpt"),
        ("", {}, "temp", "/tmp"),
        ("", {"TMPDIR": "/local"}, "temp", "/local"),
    ],
)
def test_places_are_those_that_runs_use(
    tmp_path: Path, config: str, variables: dict[str, str], place: str, folder: str
) -> None:
    found = run_places(site(tmp_path, config), variables)
    assert next(iter(found)) == "install"
    assert str(found[place]) == folder.format(install=tmp_path)


WHEN = "2026-11-22T10:00:00+00:00"


def file(node: str = "node-1", at: str = WHEN, seconds: float = 1.0, **fields: Any) -> MeasurementFile:
    row = Measurement(benchmark="gemm", case="qkv", node=node, device="a CPU", time_s=seconds, repetitions=3)
    own = {"node": node, "measured_at": at, "command": ("llmb",), "software": {"torch": "2"}, "measurements": (row,)}
    return MeasurementFile(**own, **fields)


def test_the_newest_and_the_one_before_are_kept(tmp_path: Path) -> None:
    assert read_measurements(tmp_path) == []
    written = [file(seconds=float(number)) for number in range(1, 5)]
    (path,) = {write_measurements(tmp_path, one) for one in written}
    assert path.parent == tmp_path / ".llmb" / "bench" / "node-1"
    assert read_measurements(tmp_path) == written[-2:], "of the same second, in the order they were written in"
    other = file(recipe="another")
    write_measurements(tmp_path, other)
    assert len(read_measurements(tmp_path)) == 3, "of another recipe"


def test_they_are_read_in_order_of_time_and_by_node(tmp_path: Path) -> None:
    late, early = file(at="2026-11-22T12:00:00+00:00"), file("node-2", at="2026-11-22T12:30:00+02:00")
    for one in (late, early):
        write_measurements(tmp_path, one)
    assert read_measurements(tmp_path) == [early, late]
    assert read_measurements(tmp_path, "node-2") == [early]


def test_a_nodes_name_never_leads_elsewhere(tmp_path: Path) -> None:
    path = write_measurements(tmp_path, file("../../etc"))
    assert path.parent.parent == bench_folder(tmp_path)
    assert read_measurements(tmp_path, "../../etc") == [file("../../etc")]


def test_a_file_of_something_else_or_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    path = write_measurements(tmp_path, file())
    untimed = [file(at=at).model_dump_json().encode() for at in ("yesterday", "2026-11-22T10:00:00")]
    for content in (b"{}", b"\xff\xfe", *untimed):
        path.write_bytes(content)
        with pytest.raises(UsageError, match="not a file of measurements") as error:
            read_measurements(tmp_path)
        assert error.value.where == str(path)
    path.unlink()
    path.mkdir()
    with pytest.raises(UsageError, match="cannot be read") as error:
        read_measurements(tmp_path)
    assert error.value.where == str(path)
