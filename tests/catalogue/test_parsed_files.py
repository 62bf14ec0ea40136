# SPDX-License-Identifier: Apache-2.0
"""The cache of parsed data files holds exactly what parsing gives, or nothing."""

import json
from datetime import date
from pathlib import Path

import pytest
import yaml

from llmb.catalogue.load import DATA
from llmb.catalogue.parsed_files import cache_folder, parsed


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "llmb"


def refuse(text: bytes) -> object:
    raise AssertionError(f"parsed again: {text!r}")


@pytest.mark.parametrize("path", sorted(DATA.rglob("*.yaml")), ids=lambda path: str(path.relative_to(DATA)))
def test_every_data_file_is_parsed_once(cache: Path, path: Path) -> None:
    text = path.read_bytes()
    first = parsed(path, text, yaml.safe_load)
    assert first == yaml.safe_load(text)
    assert parsed(path, text, refuse) == first


def test_a_changed_file_is_parsed_again_and_replaces_what_was_kept(cache: Path) -> None:
    path = Path("data/file.yaml")
    assert parsed(path, b"a: 1", yaml.safe_load) == {"a": 1}
    assert parsed(path, b"a: 2", yaml.safe_load) == {"a": 2}
    assert [json.loads(kept.read_bytes()) for kept in cache.iterdir()] == [{"a": 2}]


@pytest.mark.parametrize("damage", [b"", b'{"a"', b"\xff\xfe"])
def test_a_damaged_cache_is_repaired(cache: Path, damage: bytes) -> None:
    path = Path("data/file.yaml")
    parsed(path, b"a: 1", yaml.safe_load)
    (kept,) = cache.iterdir()
    kept.write_bytes(damage)
    assert parsed(path, b"a: 1", yaml.safe_load) == {"a": 1}
    assert parsed(path, b"a: 1", refuse) == {"a": 1}


@pytest.mark.parametrize("data", [{1: "a"}, {"day": date(2026, 1, 1)}, {("a", "b"): "c"}, {"pair": (1, 2)}], ids=str)
def test_what_json_cannot_hold_is_not_kept(cache: Path, data: object) -> None:
    for _ in range(2):
        assert parsed(Path("data/file.yaml"), b"text", lambda _text: data) is data


def test_a_cache_that_cannot_be_written_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert parsed(Path("data/file.yaml"), b"a: 1", yaml.safe_load) == {"a": 1}


def test_without_a_home_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.delenv("HOME")
    assert cache_folder() is None
    assert parsed(Path("data/file.yaml"), b"a: 1", yaml.safe_load) == {"a": 1}
