# SPDX-License-Identifier: Apache-2.0
"""A group of commands that reports an unknown one like every other error, and whose help is all there is."""

from typing import Any

from typer.core import TyperGroup


class CommandGroup(TyperGroup):
    """Raises UsageError with the closest command. ``--help-all`` is ``--help``: a group has few options."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # noqa: ANN401
        return super().parse_args(ctx, ["--help", *args[1:]] if args[:1] == ["--help-all"] else args)

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:  # noqa: ANN401
        commands = self.list_commands(ctx)
        if args and args[0] not in commands and not args[0].startswith("-") and not ctx.resilient_parsing:
            from llmb.cli.usage import unknown_command

            raise unknown_command(args[0], commands, ctx.command_path)
        return super().resolve_command(ctx, args)
