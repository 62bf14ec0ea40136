# SPDX-License-Identifier: Apache-2.0
"""``llmb parse --compat``: the output and the exit codes of the reference suite's ``parse_train_timing.sh``."""

from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any

from typer.core import TyperCommand

from llmb.cli.parse_progress import reading_progress
from llmb.errors import LlmbError, RunFailed, UsageError
from llmb.logs.files import FoundFiles, find_logs
from llmb.logs.parallel_reader import read_in_parallel, unchanged
from llmb.logs.window_samples import read_samples
from llmb.metrics.window import WINDOW_RULES, check_rule
from llmb.reference_suite.parse_compat import BRIDGE, FORMATS, NEMO, compat_report
from llmb.report.output import print_text

DIRECTORY, WINDOW = Path("experiments"), "35-44"


class CompatFormat(StrEnum):
    TABLE = "table"
    CSV = "csv"
    JSON = "json"


class CompatError(LlmbError):
    """Any error of the reference suite's script (exit code 1)."""

    exit_code = 1

    def __init__(self, error: LlmbError) -> None:
        super().__init__(error.what, where=error.where, choices=error.choices, do=error.do)


class ParseCommand(TyperCommand):
    """Options that cannot be parsed have the exit code of what is called."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # noqa: ANN401 (typer keeps its context type private)
        from llmb.cli.main import PARSER_ERROR

        called_as_reference = not {"--compat", "--compat-bridge"}.isdisjoint(args)
        try:
            return super().parse_args(ctx, args)
        except PARSER_ERROR as error:
            if not called_as_reference:
                raise
            from llmb.cli.usage import usage_error

            raise CompatError(usage_error(error)) from error


def print_as_reference(
    folders: list[Path], window: str | None, form: CompatFormat, workers: int, *, full_names: bool, bridge: bool
) -> None:
    """Raises CompatError if no run is a success, and for every other error."""
    try:
        _print_as_reference(folders, window or WINDOW, form, workers, full_names=full_names, bridge=bridge)
    except LlmbError as error:
        raise CompatError(error) from error


def _print_as_reference(
    folders: list[Path], window: str, form: CompatFormat, workers: int, *, full_names: bool, bridge: bool
) -> None:
    check_rule(window)
    if window in WINDOW_RULES[:-1]:
        raise UsageError(f"--compat takes steps, not the window '{window}'", do=f"give A-B, such as {WINDOW}")
    if len(folders) > 1:
        raise UsageError("--compat takes one folder", do="call it once for each")
    folder = folders[0] if folders else DIRECTORY
    if not folder.is_dir():
        raise UsageError(f"directory '{folder}' not found", do="give the folder that holds logs, or call it beside it")
    found = _regular(find_logs(folder))
    read = read_in_parallel(found, partial(read_samples, rule=window, sample=bridge), unchanged, workers)
    samples = list(reading_progress(read, found))
    report = compat_report(str(folder), window, samples, full_names=full_names, form=BRIDGE if bridge else NEMO)
    print_text(FORMATS[form](report))
    if not report.successes:
        raise RunFailed("no run has the step times of the whole window", where=str(folder))


def _regular(found: FoundFiles) -> FoundFiles:
    """Those that the reference suite's script reads. It follows no links, which may lead to the same file twice."""
    logs = tuple(path for path in found.logs if path.suffix == ".out" and not path.is_symlink())
    return FoundFiles(logs, found.total_bytes, found.refused)
