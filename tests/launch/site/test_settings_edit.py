# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from llmb.base.errors import UsageError
from llmb.launch.site.settings_edit import REMOVED, edited_text, with_value

PATH = Path("cluster_config.yaml")

FILE = """\
# The cluster of the third floor.
gpu_type: h100   # all nodes
slurm:           # asked for at every job
  account: research
  # ask Anna before you change it
  flags: {qos: normal, exclude: "node[007,013]"}
  partition: batch

# What NCCL needs
environment: {}
prolog:
- test -w /scratch
- echo ready  # the last
container:
"""


@pytest.mark.parametrize(
    ("keys", "value", "before", "after"),
    [
        (("gpu_type",), "b200", "gpu_type: h100 ", "gpu_type: b200 "),
        (("slurm", "account"), "physics", "account: research", "account: physics"),
        (("slurm", "flags", "qos"), "high", "qos: normal", "qos: high"),
        (("slurm", "flags", "nice"), "3", '[007,013]"}', "[007,013]\", nice: '3'}"),
        (("slurm", "retries"), 2, "partition: batch\n", "partition: batch\n  retries: 2\n"),
        (("environment", "NCCL_DEBUG"), "WARN", "environment: {}", "environment:\n  NCCL_DEBUG: WARN"),
        (("prolog",), ["true"], "prolog:\n- test -w /scratch\n- echo ready  # the last\n", "prolog: ['true']\n"),
        (("container", "image"), "/a", "container:\n", "container:\n  image: /a\n"),
        (("vboost",), 1, "container:\n", "container:\nvboost: 1\n"),
        (
            ("workloads", "w", "environment", "A"),
            "b",
            "container:\n",
            "container:\nworkloads:\n  w:\n    environment:\n      A: b\n",
        ),
    ],
)
def test_one_value_changes_and_nothing_else(keys: tuple[str, ...], value: object, before: str, after: str) -> None:
    assert with_value(FILE, keys, value) == FILE.replace(before, after)


@pytest.mark.parametrize(
    ("keys", "before"),
    [
        (("gpu_type",), "gpu_type: h100   # all nodes\n"),
        (("slurm", "partition"), "  partition: batch\n"),
        (("slurm", "account"), "  account: research\n"),
        (("slurm", "flags", "qos"), "qos: normal, "),
        (("slurm", "flags", "exclude"), ', exclude: "node[007,013]"'),
        (("prolog",), "prolog:\n- test -w /scratch\n- echo ready  # the last\n"),
    ],
)
def test_one_value_goes_and_nothing_else(keys: tuple[str, ...], before: str) -> None:
    assert with_value(FILE, keys, REMOVED) == FILE.replace(before, "")


def test_what_is_empty_goes_too() -> None:
    text = "a: 1\nslurm:\n  flags:\n    qos: x\nb: 2\n"
    assert with_value(text, ("slurm", "flags", "qos"), REMOVED) == "a: 1\nb: 2\n"
    assert with_value("slurm: {flags: {qos: x}}\n", ("slurm", "flags", "qos"), REMOVED).strip() in ("", "{}")


def test_a_key_that_is_not_there_cannot_go() -> None:
    with pytest.raises(KeyError):
        with_value(FILE, ("slurm", "qos"), REMOVED)


def test_a_new_file_begins() -> None:
    assert with_value("", ("slurm", "account"), "me") == "slurm:\n  account: me\n"
    assert with_value("# mine\n", ("a",), 1) == "# mine\na: 1\n"


@pytest.mark.parametrize("keys", [("slurm", "l"), ("slurm", "account"), ("slurm", "flags", "qos"), ("gpu_type",)])
def test_comments_of_what_follows_stay(keys: tuple[str, ...]) -> None:
    text = """\
gpu_type: h100 # x
# second
slurm: # asked
    # the account
    account: a
    # ask
    flags:
        qos: b
    # after flags
    l:
        - x # xx
    # after l

# N
b: 2
"""
    gone = {"l": "    l:\n        - x # xx\n", "account": "    account: a\n", "qos": "    flags:\n        qos: b\n"}
    assert with_value(text, keys, REMOVED) == text.replace(gone.get(keys[-1], "gpu_type: h100 # x\n"), "")


def test_what_cannot_be_edited_is_left() -> None:
    with pytest.raises(UsageError, match=r"c\.b is written in this file in a form"):
        edited_text(PATH, "a: &x {b: 1}\nc: *x\n", ("c", "b"), 2)


NAMES = st.sampled_from(["account", "partition", "gpu_type", "a-b", "x"])
VALUES = st.one_of(
    st.integers(0, 99), st.booleans(), st.none(), st.text("ab: #{}[]'\"-,\n", max_size=6), st.lists(NAMES, max_size=2)
)
TREES = st.recursive(VALUES, lambda below: st.dictionaries(NAMES, below, max_size=3), max_leaves=8)


@pytest.mark.slow
@given(
    tree=st.dictionaries(NAMES, TREES, max_size=4),
    flow=st.sampled_from([True, False, None]),
    keys=st.lists(NAMES, min_size=1, max_size=3),
    value=VALUES,
)
def test_any_file_says_afterwards_what_is_wanted_or_is_refused(
    tree: dict[str, object], flow: bool | None, keys: list[str], value: object
) -> None:
    text = yaml.safe_dump(tree, default_flow_style=flow, sort_keys=False)
    try:
        edited = edited_text(PATH, text, keys, value)
    except UsageError:
        return
    data = yaml.safe_load(edited)
    for key in keys:
        data = data[key]
    assert data == value
    try:
        again = yaml.safe_load(edited_text(PATH, edited, keys)) or {}
    except UsageError:
        return
    for key in keys[:-1]:
        again = again.get(key, {})
    assert keys[-1] not in again
