# SPDX-License-Identifier: Apache-2.0
"""What writes files reports those it finished; a process that dies or fails ends the others after their file.

``test_weights_conversion.py`` has processes that finish theirs.
"""

import pytest
from killed_writer import write_or_die, write_or_fail

from llmb.errors import RunFailed
from llmb.weights.worker.chunk_files import WeightFile, write_in_processes


def files(*names):
    return [WeightFile(name, (), 10) for name in names]


def test_every_file_is_written_once_and_its_bytes_are_counted():
    names, finished, counted = [str(number) for number in range(7)], [], []
    write_in_processes(write_or_die, files(*names), 1, finished.append, counted.append)
    assert sorted(file.name for file in finished) == names
    assert counted == [10] * 7


@pytest.mark.slow
@pytest.mark.parametrize(
    ("write", "kind", "text"),
    [
        (write_or_die, RunFailed, "a process that was writing weights was killed"),
        # Conversions whose processes reject a value are tested for every change.
        pytest.param(write_or_fail, KeyError, "fatal", marks=pytest.mark.measured),
    ],
)
def test_the_first_error_is_raised_and_its_file_is_not_finished(write, kind, text):
    finished = []
    with pytest.raises(kind, match=text):
        write_in_processes(write, files("first", "fatal", *"abcdefgh"), 2, finished.append, lambda _: None)
    assert "fatal" not in [file.name for file in finished]
