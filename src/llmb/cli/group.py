# SPDX-License-Identifier: Apache-2.0
"""A group of commands that reports an unknown one like every other error."""

from typing import Any

from typer.core import TyperGroup


class Group(TyperGroup):
    """Raises UsageError with the closest command."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:  # noqa: ANN401
        commands = self.list_commands(ctx)
        if args and args[0] not in commands and not args[0].startswith("-") and not ctx.resilient_parsing:
            from llmb.cli.usage import unknown_command

            raise unknown_command(args[0], commands, ctx.command_path)
        return super().resolve_command(ctx, args)
