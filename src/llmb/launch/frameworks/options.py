# SPDX-License-Identifier: Apache-2.0
"""What a user asks of the container of a job, and of what runs in it."""

from dataclasses import replace
from typing import Literal

from pydantic import Field

from llmb.catalogue.records import Record
from llmb.errors import UsageError
from llmb.launch.site import Site

FrameworkName = Literal["megatron_bridge"]


class FrameworkOptions(Record):
    """Null is llmb's own engine, in the container of the cluster's settings if they have one."""

    framework: FrameworkName | None = None
    image: str | None = None
    mounts: tuple[str, ...] = ()
    arguments: dict[str, str] = Field(default_factory=dict)
    """Of the framework's script, by name."""

    def engine_site(self, site: Site) -> Site:
        """The site as the engine's job sees it. Raises UsageError where there is no container to put things in."""
        if self.arguments:
            raise UsageError("--framework-arg is for a framework's script", do="add --framework, or leave it out")
        if not self.image and not self.mounts:
            return site
        container = site.config.container
        if container.runtime == "none":
            do = "set container.runtime in cluster_config.yaml, or leave --image and --mounts out"
            raise UsageError("this cluster's jobs run without a container", do=do)
        chosen = {"image": self.image or container.image, "mounts": (*container.mounts, *self.mounts)}
        return replace(site, config=site.config.model_copy(update={"container": container.model_copy(update=chosen)}))
