# SPDX-License-Identifier: Apache-2.0
"""Imports an image in processes that are killed before each change of a file in turn, and then again.

Arguments: a folder, and the programs' folder. Prints how many changes one import makes, and what differs in the end.
"""

import json
import os
import sys
from pathlib import Path

from killed_installer import differences

from llmb.install.images import ImageRequest, import_image


def main() -> None:
    os.fsync = lambda descriptor: None  # a kill loses nothing that the kernel holds
    force = sys.argv[2:] == ["force"]

    def work(root: Path) -> None:
        request = ImageRequest(source="nvcr.io/nvidia/nemo:1", folder=root / "images", runtime="pyxis")
        import_image(request, lambda text: None)

    def again(root: Path) -> None:
        request = ImageRequest(source="nvcr.io/nvidia/nemo:1", folder=root / "images", runtime="pyxis", force=True)
        import_image(request, lambda text: None)

    begin = work if force else lambda root: None
    changes, different = differences(again if force else work, Path(sys.argv[1]), begin)
    print(json.dumps({"changes": changes, "different": different}))


if __name__ == "__main__":
    main()
