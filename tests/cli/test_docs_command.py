# SPDX-License-Identifier: Apache-2.0
"""``llmb docs``: pages, what is in them, and schemas of stored files."""

import json
import re
import subprocess
from pathlib import Path

import pytest
from called_here import Run

from llmb.base.errors import see
from llmb.cli.docs import FOLDER, STORED, doc_pages, search_pages
from llmb.reports.output import print_markdown

ROOT = Path(__file__).resolve().parents[2]


def test_every_page_is_listed_once_by_a_name_of_its_own(llmb: Run) -> None:
    files = {path.stem for path in (ROOT / "docs").rglob("*.md")} - {"README"}
    pages = json.loads(llmb("docs", "--json").stdout)["pages"]
    assert sorted(page["name"] for page in pages) == sorted(files)
    assert all(page["title"] for page in pages)


def test_a_page_is_printed_as_its_file_into_a_pipe(llmb: Run) -> None:
    assert llmb("docs", "judge-a-run").stdout == (ROOT / "docs" / "how-to" / "judge-a-run.md").read_text()
    assert llmb("docs", "docs/how-to/judge-a-run.md").stdout == llmb("docs", "judge-a-run").stdout
    path = llmb("docs", "judge-a-run", "--path").stdout.strip()
    assert Path(path).samefile(ROOT / "docs" / "how-to" / "judge-a-run.md")


@pytest.mark.parametrize("name", STORED)
def test_the_schema_of_a_stored_file_is_printed(name: str, llmb: Run) -> None:
    schema = json.loads(llmb("docs", "schema", name).stdout)
    assert {"properties", "anyOf", "$ref"} & set(schema)


def test_a_schema_has_every_key_of_the_file_and_what_fields_mean(llmb: Run) -> None:
    (run,) = (ROOT / "tests" / "data" / "root").glob("workloads/*/experiments/*_gpus2_*/*/*/run.json")
    keys = json.loads(llmb("docs", "schema", "run.json").stdout)["properties"]
    assert set(json.loads(run.read_text())) <= set(keys)
    assert keys["run_id"]["description"].startswith("The run's own")
    assert keys["vboost_reason"] == {
        "anyOf": [{"type": "string"}, {"type": "null"}], "description": "Why vboost is unknown."
    }  # fmt: skip


def test_a_misspelled_schema_is_an_error_with_the_nearest_name(llmb: Run) -> None:
    assert "did you mean 'run.json'?" in llmb("docs", "schema", "runs.json", code=2).stderr
    assert "'schema' requires one stored file" in llmb("docs", "schema", code=2).stderr


def test_a_misspelled_page_is_an_error_with_the_nearest_name(llmb: Run) -> None:
    assert "did you mean 'judge-a-run'?" in llmb("docs", "juge-a-run", code=2).stderr


def test_advice_names_pages_that_exist() -> None:
    names = {page.name for page in doc_pages()}
    calls = subprocess.run(
        ["grep", "-rhoE", r"\bsee\(['\"][a-z0-9-]+", str(ROOT / "src")], capture_output=True, text=True, check=True
    ).stdout
    named = {call.split("(")[1].strip("'\"") for call in calls.split()}
    assert named
    assert named <= names
    assert see("files") == "see 'llmb docs files'"


@pytest.mark.parametrize(
    ("words", "page"),
    [
        ("published figure verdict", "judge-a-run"),
        ("Why slow", "find-out-why-a-run-is-slow"),
        ("import Hugging Face weights", "exchange-weights-with-hugging-face"),
        ("run many recipes", "run-many-recipes"),
        ("Megatron logs", "read-logs"),
        ("check nodes", "check-nodes"),
    ],
)
def test_pages_that_have_the_words_in_their_title_come_first(words: str, page: str) -> None:
    assert page in [found.name for found, _ in search_pages(words)[:2]]


def test_a_search_lists_pages_that_have_all_words_with_their_headings(llmb: Run) -> None:
    lines = llmb("docs", "--find", "find slow nodes").stdout.splitlines()
    assert any(line.split() == ["follow-jobs", "Follow", "jobs", "Find", "slow", "nodes"] for line in lines)
    assert llmb("docs", "--find", "find", "slow", "nodes").stdout.splitlines() == lines, "without quotes, too"
    assert json.loads(llmb("docs", "--find", "MFU formula", "--json").stdout)["pages"][0]["name"] == "flops-and-mfu"
    assert "contains all the words 'nodes xyzzy'" in llmb("docs", "--find", "nodes xyzzy", code=2).stderr


def test_every_page_has_its_title_and_is_listed_once() -> None:
    listed = [str(page.path.relative_to(FOLDER)) for page in doc_pages()]
    assert sorted(listed) == sorted(str(path.relative_to(FOLDER)) for path in FOLDER.rglob("*/*.md"))
    assert not [page.title for page in doc_pages() if page.title.startswith("<") or page.title == page.name]


def test_on_a_terminal_links_are_commands_and_code_is_whole(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code = f"llmb run {'--option value ' * 8}".rstrip()
    monkeypatch.setenv("COLUMNS", "60")
    link = "See [the guide](../how-to/judge-a-run.md#exit)."
    print_markdown(f"<!-- made -->\n# Page\n\n{link}\n\n```sh\n{code}\n```\nEnd.\n")
    printed = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    assert "the guide (llmb docs judge-a-run)" in printed and "made" not in printed
    assert code in [line.rstrip() for line in printed.splitlines()]
