# SPDX-License-Identifier: Apache-2.0
import json
import os
import string
from pathlib import Path

import pytest
from campaign_files import OPTIONS, CampaignFiles
from hypothesis import given, settings
from hypothesis import strategies as st

from llmb.base.errors import UsageError
from llmb.catalogue.catalogue import Catalogue
from llmb.jobs.campaigns.campaign import new_campaign
from llmb.jobs.campaigns.campaign_files import read_campaign_file
from llmb.jobs.campaigns.expansion import Entry, expand

MODELS = ("pretrain_llama3.1_8b", "pretrain_nemotron4_340b", "finetune_llama4-maverick_400b", "finetune_llama3_70b")


def problem_text(entry: Entry) -> tuple[object, ...]:
    selection = entry.selection
    named = (selection.workloads, selection.sizes, selection.dtypes, selection.scales)
    return (*named, dict(entry.options), entry.repeats, entry.profile)


def test_a_line_is_a_job(files: CampaignFiles) -> None:
    entries, problems = files.text("""\
# a comment, and a blank line

pretrain_llama3.1 8b bf16 8
finetune_llama4-maverick 400b bf16,fp8 256 repeats=3 tp=8 lr=1e-4 profile=true   # behind a job
pretrain_nemotron4_340b fp8 256,512 partition="a b,c" NODELIST=node[1-2] env.NCCL_DEBUG=INFO max_steps=20
  finetune_llama3 70b all all
""")
    assert problems == []
    assert [problem_text(entry) for entry in entries] == [
        (("pretrain_llama3.1",), ("8b",), ("bf16",), (8,), {}, 1, False),
        (
            ("finetune_llama4-maverick",),
            ("400b",),
            ("bf16", "fp8"),
            (256,),
            {"tp": ("8",), "peak_lr": ("1e-4",)},
            3,
            True,
        ),
        (
            ("pretrain_nemotron4",),
            ("340b",),
            ("fp8",),
            (256, 512),
            {"partition": ("a b,c",), "nodelist": ("node[1-2]",), "steps": ("20",)},
            1,
            False,
        ),
        (("finetune_llama3",), ("70b",), (), (), {}, 1, False),
    ]
    assert entries[2].variables == {"NCCL_DEBUG": "INFO"}
    assert entries[3].selection.everything
    assert [entry.where for entry in entries] == ["jobs.txt:3", "jobs.txt:4", "jobs.txt:5", "jobs.txt:6"]


def test_headers_and_tuples_of_the_reference_suite(files: CampaignFiles) -> None:
    entries, problems = files.text("""\
finetune_llama4-maverick_400b:
('bf16', [256], 3)

(["fp8", 'bf16'], [256], 1, True)  # a blank line ends nothing
pretrain_nemotron4_340b:    # names with dots and hyphens are headers too
(fp8, 512)
""")
    assert problems == []
    maverick, nemotron = (("finetune_llama4-maverick",), ("400b",)), (("pretrain_nemotron4",), ("340b",))
    assert [problem_text(entry) for entry in entries] == [
        (*maverick, ("bf16",), (256,), {}, 3, False),
        (*maverick, ("fp8", "bf16"), (256,), {}, 1, True),
        (*nemotron, ("fp8",), (512,), {}, 1, False),
    ]


def test_everything_wrong_with_a_text_is_told_with_its_place(files: CampaignFiles) -> None:
    entries, problems = files.text("""\
('fp8', [8], 1)
pretrain_llama3.1 8b bf16
pretrain_llama3.1 8b bf16 8x tpp=2 repeats=0
pretrain_lama3.1 8b bf16 8
nemotron_340b:
('fp8', [8], 1)
finetune_llama3_70b:
('fp8', [8], 1
('fp8', [8, 1)
('fp8', [8], 1) and more
('fp8', [8, [9]], 1)
('fp8',)
('fp8', [], 1)
pretrain_llama3.1 8b bf16 8 tp=2 stray
pretrain_llama3.1 8b bf16 8 partition="open
pretrain_llama3.1 8b , 8
""")
    workloads = (
        "valid: finetune_llama3, finetune_llama4-maverick, pretrain_deepseek-v3, pretrain_gpt_oss, pretrain_kimi-k2, "
        "pretrain_llama3.1, pretrain_mixtral, pretrain_nemotron3, pretrain_nemotron4, pretrain_qwen3, sft_llama3"
    )
    assert [problem.removeprefix("jobs.txt:") for problem in problems] == [
        "1:1: there is no header 'WORKLOAD_SIZE:' above this tuple",
        "2:1: a job is 'WORKLOAD SIZE DTYPE SCALE [KEY=VALUE ...]', but this has 3 words",
        "3:27: scales is '8x'; it must be a whole number of at least 1",
        "3:30: unknown key 'tpp'; did you mean 'tp'?; use an option of 'llmb submit --help-all', or env.NAME",
        "3:36: repeats is '0'; it must be a whole number of at least 1",
        f"4:1: unknown workload 'pretrain_lama3.1'; did you mean 'pretrain_llama3.1'?; {workloads}",
        f"5:1: unknown workload 'nemotron_340b'; {workloads}",
        "8:1: the tuple is not closed, or is followed by other text",
        "9:15: this is not a tuple; a quote, a bracket or a comma may be missing",
        "10:1: the tuple is not closed, or is followed by other text",
        "11:9: an item must be a value or a list of values",
        "12:1: a tuple is (dtypes, scales, repeats, profile); this one has 1 item",
        "13:1: scales is empty",
        "14:34: 'stray' has no '='; after the scale come KEY=VALUE pairs",
        "15:39: unclosed quote",
        "16:22: dtypes is empty",
    ]
    assert [entry.where for entry in entries] == ["jobs.txt:3", "jobs.txt:16"]


YAML = """\
defaults:
  env: {NCCL_DEBUG: INFO, LEVEL: 1}
  repeats: 2
  params: {mbs: 1}
sweep: {tp: [1, 2]}
finetune_llama4-maverick_400b:
  defaults: {env: {LEVEL: 2}}
  dtypes: [fp8, bf16]
  scales: 256
  tasks:
    - repeats: 1
      add_profile: true
      overrides: {env: {LEVEL: 3}, params: {tp: 8}, slurm_arg: [comment=x, wckey=y]}
    - dtypes: bf16
      sweep: {gbs: [32, 64]}
pretrain_llama3.1_8b: {max_scale: 16, proxy: false}
overrides: {partition: batch}
"""


def test_layers_of_a_yaml_file(files: CampaignFiles, catalogue: Catalogue) -> None:
    entries, problems = files.yaml(YAML)
    assert problems == []
    first, second, third = entries
    assert problem_text(first) == (
        ("finetune_llama4-maverick",),
        ("400b",),
        ("fp8", "bf16"),
        (256,),
        {"mbs": ("1",), "tp": ("8",), "slurm_arg": ("comment=x", "wckey=y"), "partition": ("batch",)},
        1,
        False,
    )
    assert first.add_profile
    assert first.variables == {"NCCL_DEBUG": "INFO", "LEVEL": "3"}
    assert second.options == {"mbs": ("1",), "tp": ("1", "2"), "gbs": ("32", "64"), "partition": ("batch",)}
    assert (second.repeats, second.selection.dtypes, second.variables["LEVEL"]) == (2, ("bf16",), "2")
    assert (third.selection.max_scale, third.variables["LEVEL"]) == (16, "1")
    assert [entry.where.rpartition(":")[2] for entry in entries] == ["11", "14", "16"]
    # One run and one profile of two dtypes; 2 x 2 x 2 of one; 2 dtypes x 2 scales x 2 x 2.
    assert len(expand(catalogue, entries, "h100").jobs) == 4 + 8 + 16


def test_everything_wrong_with_a_yaml_file_is_told_with_its_place(files: CampaignFiles) -> None:
    _, problems = files.yaml("""\
defaults: {repeats: none}
pretrain_llama3.1_8b:
  scales: [8, x]
  overrides: {tpp: 1}
pretrain_llama3.1_9b: {scales: 8}
pretrain_nemotron4_15b: {scales: 16}
pretrain_nemotron4_15b: {scales: 32, proxy: perhaps}
""")
    assert problems == [
        "jobs.yaml:7: duplicate key 'pretrain_nemotron4_15b'",
        "jobs.yaml:1: defaults.repeats: repeats is 'none'; it must be a whole number of at least 1",
        "jobs.yaml:3: pretrain_llama3.1_8b.scales: scales is 'x'; it must be a whole number of at least 1",
        "jobs.yaml:4: pretrain_llama3.1_8b.overrides.tpp: unknown key 'tpp'; did you mean 'tp'?;"
        " use an option of 'llmb submit --help-all', or env.NAME",
        "jobs.yaml:5: unknown pretrain_llama3.1 size '9b'; did you mean '8b'?; valid: 8b, 70b, 405b, tiny",
        "jobs.yaml:7: pretrain_nemotron4_15b.proxy: proxy is 'perhaps'; it must be true or false",
    ]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("pretrain_llama3.1_8b: {scale: [1}\n", "jobs.yaml:1: not valid YAML"),
        ("- pretrain_llama3.1_8b\n", "jobs.yaml:1: it must be a mapping"),
        ("pretrain_llama3.1_8b: {profle: true}\n", "jobs.yaml:1: pretrain_llama3.1_8b.profle: unknown key"),
        (
            "pretrain_llama3.1_8b: {tasks: [{sweep: {tp: {a: 1}}}]}\n",
            "jobs.yaml:1: pretrain_llama3.1_8b.tasks.0.sweep.tp",
        ),
    ],
)
def test_a_yaml_file_that_is_none(files: CampaignFiles, content: str, words: str) -> None:
    _, problems = files.yaml(content)
    assert any(problem.startswith(words) for problem in problems), problems


NAMED = ("partition", "nodelist")
"""Options whose value may have commas; those of others divide values."""
KEYS = [name for name in OPTIONS if name != "slurm_arg"]
VALUE = st.text(string.ascii_letters + string.digits + " _-+.,:;/[]()&|%@$`\\=*?!{}~^<>#", min_size=1, max_size=12)
JOB = st.tuples(
    st.sampled_from(MODELS),
    st.lists(st.sampled_from(["bf16", "fp8"]), min_size=1, max_size=2, unique=True),
    st.lists(st.integers(1, 4096), min_size=1, max_size=3),
    st.integers(1, 9),
    st.booleans(),
    st.dictionaries(st.sampled_from(KEYS), VALUE, max_size=3).map(
        lambda options: {key: text if key in NAMED else text.replace(",", ";") for key, text in options.items()}
    ),
)


@settings(deadline=None)
@given(st.lists(JOB, max_size=5))
def test_what_is_written_is_read(
    files: CampaignFiles, jobs: list[tuple[str, list[str], list[int], int, bool, dict[str, str]]]
) -> None:
    lines, tuples, tasks = [], [], {}
    expected = []
    for model, dtypes, scales, repeats, profile, options in jobs:
        quoted = " ".join(f'{key}="{value}"' for key, value in options.items())
        numbers = ",".join(map(str, scales))
        lines.append(f"{model} {','.join(dtypes)} {numbers} repeats={repeats} profile={profile} {quoted}")
        tuples.append(f"{model}:\n({dtypes}, {scales}, {repeats}, {profile})")
        workload, _, size = model.rpartition("_")
        wanted = ((workload,), (size,), tuple(dtypes), tuple(scales))
        expected.append((*wanted, {key: (value,) for key, value in options.items()}, repeats, profile))
        task = {"dtypes": dtypes, "scales": scales, "repeats": repeats, "profile": profile, "overrides": options}
        tasks.setdefault(model, {"tasks": []})["tasks"].append(task)
    entries, problems = files.text("\n".join(lines))
    assert (problems, [problem_text(entry) for entry in entries]) == ([], expected)
    entries, problems = files.text("\n".join(tuples))
    assert (problems, [problem_text(entry)[:4] for entry in entries]) == ([], [item[:4] for item in expected])
    entries, problems = files.yaml(json.dumps(tasks))
    assert problems == []
    assert sorted(map(repr, map(problem_text, entries))) == sorted(map(repr, expected))


@pytest.mark.parametrize("nested", ["[" * 20_000, "[" * 20_000 + "]" * 20_000, "{a: " * 10_000, "&a [*a, " * 5_000])
def test_a_long_line_takes_no_quadratic_time(files: CampaignFiles, nested: str) -> None:
    """YAML's parser in Python needs minutes for 40 KB of brackets."""
    _, (problem,) = files.text(f"pretrain_llama3.1_8b:\n('fp8', {nested}, 1)")
    assert problem == "jobs.txt:2:1: this tuple has more than 20 lists"
    _, (problem,) = files.text("x" * 100_000)
    assert problem == "jobs.txt:1:1: the line has more than 65,536 characters"


@pytest.mark.parametrize("name", ["jobs.txt", "jobs.yaml"])
def test_what_is_no_text_file_is_named(files: CampaignFiles, tmp_path: Path, name: str) -> None:
    pipe, folder, device = tmp_path / name, tmp_path / f"folder-{name}", tmp_path / f"device-{name}"
    os.mkfifo(pipe)
    folder.mkdir()
    device.symlink_to("/dev/zero")
    for path, what in ((pipe, "is a pipe"), (folder, "is a directory"), (device, "is a device")):
        with pytest.raises(UsageError, match=what) as raised:
            read_campaign_file(path, files.keys, files.split)
        assert raised.value.where == str(path)
    with pytest.raises(UsageError, match="no such file"):
        read_campaign_file(tmp_path / "missing.yaml", files.keys, files.split)
    (tmp_path / "large.txt").write_bytes(b"\n" * 5_000_000)
    with pytest.raises(UsageError, match="larger than 4 MiB"):
        read_campaign_file(tmp_path / "large.txt", files.keys, files.split)


def test_names_of_campaigns_sort_by_time_within_a_second_too() -> None:
    names = [new_campaign("weekly.txt", (), "").campaign for _ in range(50)]
    assert names == sorted(set(names))
