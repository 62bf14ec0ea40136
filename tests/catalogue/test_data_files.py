# SPDX-License-Identifier: Apache-2.0
"""YAML that others wrote: any of it is read or refused with its line, in bounded time and memory."""

import itertools
import os
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from llmb.base.errors import LlmbError
from llmb.catalogue.data_files import MOST_LEVELS, MOST_PROBLEMS, CatalogueError, check_yaml, read_file
from llmb.catalogue.records import Record
from llmb.launch.scheduler_lookup import cluster_schema
from llmb.launch.site.cluster_config import read_cluster_file

LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 9)}]\n" for level in range(1, 9)
)


class Anything(Record, extra="allow"):
    pass


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: 1\nb: " + "[" * 100_000, ":2: not valid YAML: "),  # PyYAML from 6.0.4 on has a limit of its own
        ("a: " + "{b: " * 100_000, ":1: not valid YAML: more than 50 nested levels"),
        ("- " * 100_000, ":1: not valid YAML: more than 50 nested levels"),
        (LAUGHS, "not valid YAML: more than 200,000 values"),
        ("a: &a [1, *a]\n", ":1: not valid YAML: alias 'a' without an anchor before it"),
        ("a: 1\nb: !!int ''\n", ":2: not valid YAML: a tag, which is unsupported"),
        ("a: !!bool x\n", ":1: not valid YAML: a tag"),
        ("a: !!python/object/apply:os.system [ls]\n", ":1: not valid YAML: a tag"),
        ("a: 2024-99-99\n", "not valid YAML: month must be in"),
        ("a: \xff\n".encode("latin-1"), "not valid YAML"),
        ("x" * 5_000_000, "larger than 4 MiB"),
    ],
    ids=itertools.count(),
)
def test_what_cannot_be_loaded_is_refused_with_its_line(tmp_path: Path, text: str | bytes, says: str) -> None:
    path = tmp_path / "file.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(CatalogueError) as raised:
        read_file(path, Anything, foreign=True)
    assert says in str(raised.value)
    assert str(path) in str(raised.value)


def test_aliases_and_some_nesting_are_accepted(tmp_path: Path) -> None:
    path = tmp_path / "file.yaml"
    path.write_text(
        f"a: &a {{x: 1}}\nb: {{<<: *a, y: !!str 2}}\nc: {'[' * (MOST_LEVELS - 1)}{']' * (MOST_LEVELS - 1)}\n"
    )
    assert read_file(path, Anything, foreign=True).model_extra["b"] == {"x": 1, "y": "2"}


def test_many_problems_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "file.yaml"
    path.write_text("".join(f"key{number}: 1\n" for number in range(3000)))
    with pytest.raises(CatalogueError) as raised:
        read_file(path, Record, foreign=True)
    assert len(raised.value.problems) == MOST_PROBLEMS + 1
    assert raised.value.problems[-1] == f"{path}: 2,950 more problems"


@given(st.text() | st.text("[]{}:,-&*!<>|?#'\"% \nab01"))
def test_any_text_is_checked_or_refused(text: str) -> None:
    try:
        check_yaml(text)
        yaml.safe_load(text)
    except (yaml.YAMLError, ValueError):
        pass


@pytest.mark.parametrize(
    "content",
    [b"gpu_type: h\xe9\n", b"\xff\xfe\x00", b"[" * 100_000, b"- 1\n", b"environment: 3\n"],
    ids=itertools.count(),
)
def test_a_cluster_configuration_that_cannot_be_read_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "cluster_config.yaml").write_bytes(content)
    with pytest.raises(LlmbError, match=r"cluster_config\.yaml"):
        read_cluster_file(tmp_path / "cluster_config.yaml", cluster_schema())


def test_a_cluster_configuration_that_is_no_file_does_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "cluster_config.yaml")
    with pytest.raises(LlmbError, match="is a pipe"):
        read_cluster_file(tmp_path / "cluster_config.yaml", cluster_schema())
