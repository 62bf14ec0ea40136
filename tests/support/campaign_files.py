# SPDX-License-Identifier: Apache-2.0
"""Reads campaign files from text."""

from pathlib import Path

from llmb.campaigns.entry import Entry
from llmb.campaigns.expansion import split_model
from llmb.campaigns.text_file import TextReader
from llmb.campaigns.words import Words
from llmb.campaigns.yaml_file import YamlReader
from llmb.catalogue.load import Catalogue

OPTIONS = ("tp", "pp", "vp", "mbs", "gbs", "steps", "partition", "nodelist", "slurm_arg")


class CampaignFiles:
    """Files below a folder, with a few options."""

    def __init__(self, catalogue: Catalogue, folder: Path) -> None:
        options = {name: name for name in OPTIONS} | {"lr": "peak_lr"}
        self.words = Words(options=options, repeatable={"slurm_arg"}, variables=catalogue.variables)
        self.catalogue = catalogue
        self.folder = folder

    def split(self, name: str) -> tuple[str, str | None]:
        return split_model(self.catalogue, name)

    def text(self, content: str) -> tuple[list[Entry], list[str]]:
        reader = TextReader("jobs.txt", self.words, self.split)
        reader.read(content)
        return reader.entries, reader.problems

    def yaml(self, content: str) -> tuple[list[Entry], list[str]]:
        path = self.folder / "jobs.yaml"
        path.write_text(content)
        reader = YamlReader(path, self.words, self.split)
        reader.read()
        return reader.entries, [problem.removeprefix(f"{self.folder}/") for problem in reader.problems]
