# SPDX-License-Identifier: Apache-2.0
"""The options that say what a job runs in, and with what."""

import re
from functools import partial
from typing import Annotated

import typer

from llmb.errors import UsageError
from llmb.jobspec.options import FrameworkName, FrameworkOptions

_framework = partial(typer.Option, rich_help_panel="Container and framework")
_NAME = re.compile(r"[a-z][a-z0-9_]*", re.ASCII)


def framework_options(
    *,
    framework: Annotated[
        FrameworkName | None,
        _framework("--framework", help="Train with this framework in its own container. Default: llmb's engine."),
    ] = None,
    image: Annotated[
        str | None, _framework("--image", help="Container image. Default: of cluster_config.yaml, or the framework's.")
    ] = None,
    mounts: Annotated[
        str | None, _framework("--mounts", help="More folders to mount in the container, with commas between them.")
    ] = None,
    framework_arg: Annotated[
        list[str] | None,
        _framework("--framework-arg", metavar="NAME=VALUE", help="Argument of the framework's script. Repeatable."),
    ] = None,
) -> FrameworkOptions:
    """Raises UsageError for an argument that is none, and for text that does not print."""
    arguments: dict[str, str] = {}
    problems = [f"{text!r} holds a character that does not print" for text in (image, mounts) if not _prints(text)]
    for text in framework_arg or ():
        name, equals, value = text.partition("=")
        name = name.lstrip("-").replace("-", "_")
        if not equals or not _NAME.fullmatch(name) or not _prints(value):
            problems.append(f"--framework-arg is {text!r}; write NAME=VALUE")
        elif name in arguments:
            problems.append(f"--framework-arg gives '{name}' twice")
        arguments[name] = value
    if problems:
        raise UsageError("\n".join(problems))
    listed = tuple(mount.strip() for mount in (mounts or "").split(",") if mount.strip())
    return FrameworkOptions(framework=framework, image=image, mounts=listed, arguments=arguments)


def _prints(text: str | None) -> bool:
    return text is None or text.isprintable()
