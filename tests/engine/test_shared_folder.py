# SPDX-License-Identifier: Apache-2.0
"""A folder that a node cannot save to is noticed before the first step, on all ranks."""

from collections.abc import Callable
from pathlib import Path

import pytest

from llmb.runs.plan import Plan

WORKER = Path(__file__).parent / "shared_folder_worker.py"


@pytest.mark.parametrize(
    ("folders", "said"),
    [
        (("saved", "saved"), ""),
        (("saved", "other"), "checkpoints cannot be saved: .probe-rank1 of another node is not visible on"),
        (("saved", "file/saved"), "checkpoints cannot be saved: rank 1 on"),
    ],
)
def test_every_node_has_to_reach_the_same_folder(
    tmp_path: Path,
    tiny_plan: Callable[..., Plan],
    run_ranks: Callable[..., list[str]],
    folders: tuple[str, str],
    said: str,
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "plan.json").write_text(tiny_plan(save_checkpoint=True).model_dump_json())
    places = [tmp_path / name for name in folders]
    one, other = run_ranks(WORKER, 2, tmp_path, ",".join(map(str, places)))
    assert one.partition("\n  where")[0] == other.partition("\n  where")[0]
    assert (said in one) if said else one == ""
    assert not [path for place in places if place.is_dir() for path in place.iterdir()]
