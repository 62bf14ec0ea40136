# SPDX-License-Identifier: Apache-2.0
"""Lines about checkpoints: ours, and those of the recipe documents."""

from checkpoint_lines import find_loads, find_saves
from hypothesis import given
from hypothesis import strategies as st

from llmb.logs.step_line import LoadLine, SaveLine, format_load_line, format_save_line

PUBLISHED_SAVE = (
    b"[NeMo I 2025-04-11 14:48:45 nemo_logging:393] Global Checkpoint Save : Rank: 0 : Iteration: 50"
    b" : Start time: 1744408121.151s : Save duration: 4.389s"
)
PUBLISHED_LOAD = (
    b"[NeMo I 2025-04-11 14:46:18 nemo_logging:393] Global Checkpoint Load : Rank : 0"
    b" : Start time : 1744407969.270s : Time spent in load_checkpoint: 9.712s"
)
counts = st.integers(min_value=0, max_value=10**8)
seconds = st.integers(min_value=0, max_value=10**13).map(lambda milliseconds: milliseconds / 1000)


def test_the_published_lines_are_read():
    text = PUBLISHED_LOAD + b"\nsomething else\n" + PUBLISHED_SAVE + b"\n"
    assert list(find_saves(text)) == [SaveLine(0, 50, 1744408121.151, 4.389)]
    assert list(find_loads(text)) == [LoadLine(0, 1744407969.27, 9.712)]


def test_our_lines_have_the_published_wording():
    assert PUBLISHED_SAVE.decode().endswith("] " + format_save_line(SaveLine(0, 50, 1744408121.151, 4.389)))
    assert PUBLISHED_LOAD.decode().endswith("] " + format_load_line(LoadLine(0, 1744407969.27, 9.712)))


@given(st.builds(SaveLine, counts, counts, seconds, seconds), st.builds(LoadLine, counts, seconds, seconds))
def test_what_is_written_is_read(save, load):
    text = f"0: {format_save_line(save)}\n{format_load_line(load)}\r\n".encode()
    assert list(find_saves(text)) == [save]
    assert list(find_loads(text)) == [load]
