# SPDX-License-Identifier: Apache-2.0
"""The worker, on a disk that takes SLOWER_S seconds longer for every checkpoint."""

import os
import time
from typing import Any

from torch.distributed.checkpoint.state_dict_saver import save

from llmb.engine.checkpoint import save as save_module
from llmb.engine.worker import main


def slow_save(*arguments: Any, **options: Any) -> Any:
    time.sleep(float(os.environ["SLOWER_S"]))
    return save(*arguments, **options)


save_module.save = slow_save
main()
