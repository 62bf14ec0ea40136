# SPDX-License-Identifier: Apache-2.0
"""Found by every interpreter that has this folder on PYTHONPATH: see ``pretended_gpus``."""

import os
import sys

if {"LLMB_TEST_PRETENDED", "RANK"} <= os.environ.keys() and "llmb.engine.worker" in sys.orig_argv:
    import pretended_torch
    import torch

    # Each rank has a GPU of its own, by a number that others take from there.
    pretended_torch.GPU = torch.device("cuda", int(os.environ["LOCAL_RANK"]))

    from pretended_worker import pretend

    pretend()
