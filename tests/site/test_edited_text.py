# SPDX-License-Identifier: Apache-2.0
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from llmb.site.edited_text import CannotEdit, with_value, without_value

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
        (("environment", "NCCL_DEBUG"), "WARN", "environment: {}", "environment: {NCCL_DEBUG: WARN}"),
        (("prolog",), ["true"], "prolog:\n- test -w /scratch\n- echo ready  # the last\n", "prolog: ['true']\n"),
        (("container", "image"), "/a", "container:\n", "container: {image: /a}\n"),
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
        (("slurm", "flags", "qos"), "qos: normal, "),
        (("slurm", "flags", "exclude"), ', exclude: "node[007,013]"'),
        (("prolog",), "prolog:\n- test -w /scratch\n- echo ready  # the last\n"),
    ],
)
def test_one_value_goes_and_nothing_else(keys: tuple[str, ...], before: str) -> None:
    assert without_value(FILE, keys) == FILE.replace(before, "")


def test_what_is_empty_goes_too() -> None:
    text = "a: 1\nslurm:\n  flags:\n    qos: x\nb: 2\n"
    assert without_value(text, ("slurm", "flags", "qos")) == "a: 1\nb: 2\n"
    assert without_value("slurm: {flags: {qos: x}}\n", ("slurm", "flags", "qos")).strip() in ("", "{}")


def test_a_key_that_is_not_there_cannot_go() -> None:
    with pytest.raises(KeyError):
        without_value(FILE, ("slurm", "qos"))


def test_a_new_file_begins() -> None:
    assert with_value("", ("slurm", "account"), "me") == "slurm:\n  account: me\n"
    assert with_value("# mine\n", ("a",), 1) == "# mine\na: 1\n"


def test_what_cannot_be_edited_is_left_with_its_line() -> None:
    with pytest.raises(CannotEdit) as error:
        with_value("a: &x {b: 1}\nc: *x\n", ("c", "b"), 2)
    assert error.value.line in (1, 2)


NAMES = st.sampled_from(["account", "partition", "gpu_type", "a-b", "x"])
VALUES = st.one_of(
    st.integers(0, 99), st.booleans(), st.none(), st.text("ab: #{}[]'\"-,\n", max_size=6), st.lists(NAMES, max_size=2)
)
TREES = st.recursive(VALUES, lambda below: st.dictionaries(NAMES, below, max_size=3), max_leaves=8)


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
        edited = with_value(text, keys, value)
    except CannotEdit:
        return
    data = yaml.safe_load(edited)
    for key in keys:
        data = data[key]
    assert data == value
    try:
        again = yaml.safe_load(without_value(edited, keys)) or {}
    except CannotEdit:
        return
    for key in keys[:-1]:
        again = again.get(key, {})
    assert keys[-1] not in again
