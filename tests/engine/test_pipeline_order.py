# SPDX-License-Identifier: Apache-2.0
"""Where parameters stay whole through a step, a pipeline gathers each stage once, whatever torch's order says."""

from torch.distributed.pipelining.schedules import _Action

from llmb.engine.parallel.pipeline import gathered_once


def test_each_stage_is_gathered_once_and_dropped_at_the_end() -> None:
    order = (
        "0UNSHARD 2UNSHARD 0F0 0RESHARD 4UNSHARD 2F0 4F0 4B0 2B0 4RESHARD 0UNSHARD 0B0 0REDUCE_GRAD 0RESHARD 2RESHARD"
    )
    kept = gathered_once([_Action.from_str(action) for action in order.split()])
    assert " ".join(map(str, kept)) == (
        "0UNSHARD 2UNSHARD 0F0 4UNSHARD 2F0 4F0 4B0 2B0 0B0 0REDUCE_GRAD 0RESHARD 4RESHARD 2RESHARD"
    )
