# SPDX-License-Identifier: Apache-2.0
"""The program that each rank runs: ``python -m llmb.engine.worker RUN_FOLDER``."""

import os
import sys
import traceback
from pathlib import Path

from llmb.base.errors import LlmbError
from llmb.base.parent_death import end_with_parent
from llmb.engine.nccl_request import ask_for_nccl_log, ask_for_topology, keep_network_lines
from llmb.engine.parallel.mesh import join_ranks, leave_ranks
from llmb.engine.torch_names import ENGINE, check_names
from llmb.engine.watchdog import Progress, start_watchdog
from llmb.readers.samples.host import host_name
from llmb.readers.samples.sampler import start_sampler
from llmb.runs.failure import failure_line
from llmb.runs.folder import RunFolder
from llmb.runs.record import attempt_plan, read_record


def work(folder: RunFolder) -> None:
    check_names(ENGINE)
    # Only now: they cannot be imported without those names.
    from llmb.engine.device import be_deterministic
    from llmb.engine.loop import train
    from llmb.engine.parallel.alone import pretend_others

    plan = attempt_plan(read_record(folder))
    if plan.profile is None or plan.profile.profiler != "nsys":  # nsys may start ranks from a thread that ends
        end_with_parent()
    if plan.deterministic:
        be_deterministic()
    progress = Progress(plan.first_step)
    start_watchdog(plan, folder, progress)
    own_log = ask_for_nccl_log(plan, folder)
    ask_for_topology(plan, folder)
    sampler, node = None, host_name()
    if plan.resource_interval_s is not None and os.environ.get("LOCAL_RANK", "0") == "0":
        sampler = start_sampler(folder.resources_of(node), node, plan.resource_interval_s, plan.device)
    ranks = join_ranks(plan, folder.path) if plan.recipe.pretended_rank is None else pretend_others(plan)
    train(plan, folder, ranks, progress)
    if sampler:  # takes a last sample; if training fails, it ends with this process
        sampler.end()
    keep_network_lines(own_log, folder)
    progress.enter("end", plan.last_step)
    leave_ranks()


def main() -> None:
    """Run the worker, then skip the interpreter's shutdown, in which torch's threads can abort a successful run."""
    exit_code = 1
    try:
        work(RunFolder(Path(sys.argv[1])))
        exit_code = 0
    except Exception as error:  # noqa: BLE001 (top level of the process: any error ends this rank)
        if isinstance(error, LlmbError):  # its text says what to do; a traceback would not help
            sys.stderr.write(f"{error.text()}\n")
        else:
            traceback.print_exc()
        sys.stderr.write(failure_line(int(os.environ.get("RANK", "0")), host_name(), error) + "\n")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


if __name__ == "__main__":
    main()
