# SPDX-License-Identifier: Apache-2.0
"""One node of a check of several: ``python -m llmb.health.node_task FOLDER NODE`` writes its report into the folder.

It waits for no other node, and knows none.
"""

import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from llmb.errors import LlmbError
from llmb.health.checks.clock import read_shared_clock
from llmb.health.kept_checks import CheckFolder
from llmb.health.node import check_node, check_request
from llmb.health.records import NodeReport
from llmb.health.snapshots import settings_here
from llmb.runs.folder import write_atomically
from llmb.runs.record import now


def checked(folder: CheckFolder, node: str, environ: Mapping[str, str]) -> NodeReport:
    """Raises UsageError, OSError and BrokenRecord."""
    install, request = Path(environ["LLMB_INSTALL"]), folder.read_request()
    if request.settings:
        read = settings_here(install, environ)
        write_atomically(folder.settings(node), read.model_dump_json(indent=2) + "\n")
        return NodeReport(node=node, checked_at=now(), status="pass", checks=())
    report = check_node(check_request(install, request, environ))
    clock: dict[str, float] = {}
    with suppress(OSError):  # a folder that cannot be written takes no report either, which says so
        ahead_s, unsure_s = read_shared_clock(folder.path, f".clock-{node}")
        clock = {"clock_ahead_s": ahead_s, "clock_uncertainty_s": unsure_s}
    return report.model_copy(update={"node": node, **clock})


def main(path: str, node: str) -> int:
    folder = CheckFolder(Path(path))
    try:
        report = checked(folder, node, os.environ)
        write_atomically(folder.report(node), report.model_dump_json(indent=2) + "\n")
    except LlmbError as error:
        sys.stderr.write(f"{error.what}\n")
        return error.exit_code
    except OSError as error:
        sys.stderr.write(f"{error.filename or path}: {error.strerror}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2]))
