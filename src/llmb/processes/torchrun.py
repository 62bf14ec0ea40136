# SPDX-License-Identifier: Apache-2.0
"""Starting ranks on this machine with torch.distributed.run."""


def torchrun_here(ranks: int) -> tuple[str, ...]:
    """Words after the interpreter. It would look this machine's name up, which containers and laptops may not know."""
    return ("-m", "torch.distributed.run", "--standalone", "--local-addr=localhost", f"--nproc-per-node={ranks}")
