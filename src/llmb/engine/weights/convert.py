# SPDX-License-Identifier: Apache-2.0
"""The program that converts weights: ``python -m llmb.engine.weights.convert JOB``. Job and output lines are JSON."""

import sys
import warnings

from llmb.base.errors import LlmbError
from llmb.engine.torch_names import ENGINE, WEIGHTS, check_names
from llmb.runs.checkpoints.conversion_request import (
    AdapterExportJob,
    AdapterImportJob,
    AnyJob,
    ConverterMessage,
    ExportJob,
    error_record,
    parse_job,
)


def say(message: ConverterMessage) -> None:
    sys.stdout.write(message.model_dump_json(exclude_none=True) + "\n")
    sys.stdout.flush()


def report_progress(done: int, total: int) -> None:
    say(ConverterMessage(progress=(done, total)))


def convert(job: AnyJob) -> None:
    check_names((*ENGINE, *WEIGHTS))
    # Only now: they cannot be imported without those names.
    from llmb.engine.weights.weights_export import export_adapters, export_weights, import_adapters
    from llmb.engine.weights.weights_import import import_weights

    if isinstance(job, ExportJob):
        export_weights(job, report_progress)
    elif isinstance(job, AdapterExportJob):
        export_adapters(job)
    elif isinstance(job, AdapterImportJob):
        say(ConverterMessage(imported=import_adapters(job)))
    else:
        say(ConverterMessage(imported=import_weights(job, report_progress, note)))


def note(text: str) -> None:
    say(ConverterMessage(note=text))


def main() -> int:
    try:
        # torch warns about a single process, which is intended.
        with warnings.catch_warnings(action="ignore"):
            convert(parse_job(sys.argv[1]))
    except LlmbError as error:
        say(ConverterMessage(error=error_record(error)))
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
