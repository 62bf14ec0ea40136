# SPDX-License-Identifier: Apache-2.0
"""What the command line makes of the options that records declare."""

import inspect
import io
import sys
from pathlib import Path
from typing import Annotated

import pytest
import typer
from campaign_files import CampaignFiles
from typer.testing import CliRunner

from llmb.base.errors import UsageError, UserInterrupt
from llmb.base.options import Option, build, convert, options_of
from llmb.catalogue.catalogue import Catalogue
from llmb.catalogue.records import Record
from llmb.catalogue.resolve import Overrides, Request
from llmb.cli import root
from llmb.cli.main import load_command
from llmb.cli.root import agree
from llmb.cli.shared_options import record_options, takes
from llmb.jobs.campaigns.expansion import Selection, campaign_keys
from llmb.jobs.campaigns.proposal import job_options
from llmb.launch.documents.variables import LaunchVariable, VariableUse, documented_variables, read_variables
from llmb.launch.slurm.request import SlurmChoices
from llmb.runs.choices import Choices, Parallelism
from llmb.runs.profiling import Profiling


def test_every_choice_has_an_option() -> None:
    assert {option.field for option in options_of(Choices).values()} == (
        set(Choices.model_fields) - {"parallelism", "profiling"}
    ) | set(Parallelism.model_fields) | set(Profiling.model_fields)
    assert {option.field for option in options_of(Overrides).values()} == set(Overrides.model_fields)


def test_options_make_choices() -> None:
    training_options = record_options(Choices)
    given = {name: item.default for name, item in inspect.signature(training_options).parameters.items()}
    assert set(given) == set(options_of(Choices))
    assert training_options(**given) == Choices()
    changed = training_options(**given | {"seed": 7, "dp_shard_size": 2, "checkpoint_dir": "saved", "profile": True})
    assert changed.seed == 7
    assert changed.profiling == Profiling(profile=True)
    assert changed.parallelism == Parallelism(dp_shard_size=2)
    assert changed.checkpoint_dir == str(Path("saved").absolute())


def test_a_flag_that_negates_sets_false_or_nothing() -> None:
    model = {"workload": "w", "size": "s"}
    assert build(Request, model | {"no_sequence_parallel": True}).overrides == Overrides(sequence_parallel=False)
    assert build(Request, model | {"no_sequence_parallel": False}).overrides == Overrides()


def test_commands_have_the_options_that_are_declared() -> None:
    spelled = {
        name: {text for option in load_command(name).params for text in (*option.opts, *option.secondary_opts)}
        for name in ("run", "submit", "launch")
    }
    declared = {text for option in job_options().values() for pair in option.spellings for text in pair.split("/")}
    selecting = {text for option in options_of(Selection).values() for text in option.spellings}
    chosen = [
        text
        for option in options_of(Request, Choices).values()
        for pair in option.spellings
        for text in pair.split("/")
    ]
    assert set(chosen) <= spelled["run"]
    assert declared | selecting <= spelled["submit"]
    assert declared - {"-w", "--workload"} <= spelled["launch"]


def test_variables_of_options_are_those_of_the_documents() -> None:
    """What ``llmb run`` and ``submit`` read from the shell means the same to ``llmb launch``."""
    variables = {variable.name: variable for variable in documented_variables()}
    for name, option in job_options().items():
        if option.envvar:
            assert name in {use.sets for use in variables[option.envvar].uses}
        for variable in option.set_by:
            assert {use.sets or use.read_for for use in variables[variable].uses} == {name}


def test_the_shell_stands_for_options_of_the_scheduler() -> None:
    named = {use.read_for for variable in documented_variables() for use in variable.uses if use.read_for}
    assert named <= set(options_of(SlurmChoices))


class Added(Record):
    """A record with an option that no code knows of."""

    burst: Annotated[int, Option(help="Bursts.", minimum=2)] = 3


def test_one_declaration_serves_the_command_line_files_and_variables(tmp_path: Path) -> None:
    app, seen = typer.Typer(), []

    @app.command()
    @takes(record_options(Added))
    def command(added: Added) -> None:
        seen.append(added)

    assert CliRunner().invoke(app, ["--burst", "5"]).exit_code == CliRunner().invoke(app, []).exit_code == 0
    assert seen == [Added(burst=5), Added()]
    assert "at least 2" in CliRunner().invoke(app, ["--help"], env={"COLUMNS": "120"}).stdout

    options, files = options_of(Added), CampaignFiles(Catalogue(), tmp_path)
    files.keys = campaign_keys(options.values(), ())
    entries, problems = files.yaml("pretrain_llama3.1_8b: {dtypes: bf16, scales: 8, sweep: {burst: [4, 5]}}\n")
    assert (problems, entries[0].options) == ([], {"burst": ("4", "5")})
    assert [convert(options["burst"], "burst", (text,)) for text in entries[0].options["burst"]] == [4, 5]

    variable = LaunchVariable(name="BURST", meaning="Bursts.", releases=("1",), uses=(VariableUse(sets="burst"),))
    assert read_variables([variable], {"BURST": "7"}, "w", options).options == {"burst": 7}
    with pytest.raises(UsageError, match="BURST is '1'; it must be a whole number of at least 2"):
        read_variables([variable], {"BURST": "1"}, "w", options)


def test_only_the_user_agrees_to_a_campaign(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="there is no terminal to ask on"):
        agree("Queue 2 jobs?", default=False)
    monkeypatch.setattr(root, "can_ask", lambda: True)
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n\n"))
    agree("Queue 2 jobs?", default=False)
    with pytest.raises(UserInterrupt, match="nothing was queued"):
        agree("Queue 2 jobs?", default=False)
