# SPDX-License-Identifier: Apache-2.0
"""Found by every interpreter that has this folder on PYTHONPATH: see ``pretended_gpus``."""

import os
import sys

if {"LLMB_TEST_PRETENDED", "RANK"} <= os.environ.keys() and "llmb.engine.worker" in sys.orig_argv:
    import torch
    from benchmarks.generated_code import pretend as pretended

    # Each rank has a GPU of its own, by a number that others take from there.
    pretended.GPU = torch.device("cuda", int(os.environ["LOCAL_RANK"]))

    from pretended_worker import pretend

    pretend()
