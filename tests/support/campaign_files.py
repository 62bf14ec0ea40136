# SPDX-License-Identifier: Apache-2.0
"""Reads campaign files from text."""

from pathlib import Path

from llmb.catalogue.catalogue import Catalogue
from llmb.catalogue.model_name import split_model
from llmb.jobs.campaigns.campaign_files import TextReader, YamlReader
from llmb.jobs.campaigns.expansion import Entry, campaign_keys
from llmb.jobs.campaigns.proposal import job_options
from llmb.launch.documents.variables import documented_variables

OPTIONS = ("tp", "pp", "vp", "mbs", "gbs", "steps", "partition", "nodelist", "slurm_arg")


class CampaignFiles:
    """Files below a folder, with a few options."""

    def __init__(self, catalogue: Catalogue, folder: Path) -> None:
        options = [job_options()[name] for name in (*OPTIONS, "peak_lr")]
        self.keys = campaign_keys(options, documented_variables())
        self.catalogue = catalogue
        self.folder = folder

    def split(self, name: str) -> tuple[str, str | None]:
        return split_model(self.catalogue, name)

    def text(self, content: str) -> tuple[list[Entry], list[str]]:
        reader = TextReader("jobs.txt", self.keys, self.split)
        reader.read(content)
        return reader.entries, reader.problems

    def yaml(self, content: str) -> tuple[list[Entry], list[str]]:
        path = self.folder / "jobs.yaml"
        path.write_text(content)
        reader = YamlReader(path, self.keys, self.split)
        reader.read()
        return reader.entries, [problem.removeprefix(f"{self.folder}/") for problem in reader.problems]
