# SPDX-License-Identifier: Apache-2.0
"""Starting ranks on this machine with torch.distributed.run."""


def torchrun_here(ranks: int) -> tuple[str, ...]:
    """Words after the interpreter.

    Without an address it would look up the name of this machine, which can take seconds where no server knows it.
    """
    return ("-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={ranks}")
