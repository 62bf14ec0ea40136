# SPDX-License-Identifier: Apache-2.0
"""Makes real runs slow, without any hook in the product: a start file of Python patches the engine in the workers.

``llmb run`` is started with the variables of ``slowed`` on top of its own. On Linux, with the interpreter or with the
fork server's stand-in for it.
"""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

FOLDER = Path(__file__).with_name("slowed")


@dataclass(frozen=True, slots=True)
class Slow:
    """What is slow, on one rank or on all. A delay is ``ms``, plus ``pct`` percent of what it delays.

    step: every step takes longer. pace: steps last ``ms`` on the average, if they need no more: one that was held up is
    followed by shorter ones, so that all runs last the same on a busy machine, too.
    compute: the layers take longer, by ``ms`` a step, as on a slow GPU. loader: a step's data take longer to prepare.
    copy: so does each micro-batch's copy to the device. between: the host pauses after every layer.
    disk: every save takes longer. link: no more than ``bytes_per_s`` a connection. sampled: a step lasts until its node
    was sampled another time, however late that is on a busy machine.
    """

    what: Literal["step", "pace", "compute", "loader", "copy", "between", "disk", "link", "sampled"]
    ms: float = 0
    pct: float = 0
    rank: int | None = None
    bytes_per_s: int = 0


def slowed(*what: Slow) -> dict[str, str]:
    """Variables of a run in which all of this is slow; without any, those of an ordinary run."""
    paths = [str(FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths), "LLMB_TEST_SLOWED": json.dumps([asdict(item) for item in what])}
