# SPDX-License-Identifier: Apache-2.0
"""What a user asks of the container of a job, and of what runs in it."""

import re
from dataclasses import replace
from functools import partial
from typing import Annotated, Literal

from pydantic import Field

from llmb.catalogue.records import Record
from llmb.errors import UsageError
from llmb.launch.site import Site
from llmb.options.option import Option

FrameworkName = Literal["megatron_bridge"]
_option = partial(Option, panel="Container and framework")


class FrameworkChoices(Record):
    """The options that say what a job runs in, and with what."""

    framework: Annotated[
        FrameworkName | None,
        _option(help="Train with this framework in its own container. Default: llmb's engine."),
    ] = None
    image: Annotated[
        str | None, _option(help="Container image. Default: of cluster_config.yaml, or the framework's.")
    ] = None
    mounts: Annotated[str | None, _option(help="More folders to mount in the container, with commas between them.")] = (
        None
    )
    framework_arg: Annotated[
        tuple[str, ...],
        _option(help="Argument of the framework's script. Repeatable.", metavar="NAME=VALUE", repeatable=True),
    ] = ()


class FrameworkOptions(Record):
    """None is llmb's own engine, in the container of the cluster's settings if they have one."""

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


def framework_options(chosen: FrameworkChoices) -> FrameworkOptions:
    """Raises UsageError for an argument that is none, and for text that does not print."""
    arguments: dict[str, str] = {}
    texts = (text for text in (chosen.image, chosen.mounts) if text)
    problems = [f"{text!r} holds a character that does not print" for text in texts if not text.isprintable()]
    for text in chosen.framework_arg:
        name, equals, value = text.partition("=")
        name = name.lstrip("-").replace("-", "_")
        if not equals or not re.fullmatch(r"[a-z][a-z0-9_]*", name, re.ASCII) or not value.isprintable():
            problems.append(f"--framework-arg is {text!r}; write NAME=VALUE")
        elif name in arguments:
            problems.append(f"--framework-arg gives '{name}' twice")
        arguments[name] = value
    if problems:
        raise UsageError("\n".join(problems))
    mounts = tuple(mount.strip() for mount in (chosen.mounts or "").split(",") if mount.strip())
    return FrameworkOptions(framework=chosen.framework, image=chosen.image, mounts=mounts, arguments=arguments)
