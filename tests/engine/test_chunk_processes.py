# SPDX-License-Identifier: Apache-2.0
"""Processes that write files report what they finished; one that dies is named, and the others finish their file."""

import pytest
from killed_writer import write_or_die, write_or_fail

from llmb.errors import RunFailed
from llmb.weights.worker.chunk_files import WeightFile, write_in_processes


def files(*names):
    return [WeightFile(name, (), 10) for name in names]


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_every_file_is_written_once_and_its_bytes_are_counted(processes):
    names, finished, counted = [str(number) for number in range(7)], [], []
    write_in_processes(write_or_die, files(*names), processes, finished.append, counted.append)
    assert sorted(file.name for file in finished) == names
    assert counted == [10] * 7


@pytest.mark.slow
@pytest.mark.parametrize(
    ("write", "ending"), [(write_or_die, "was killed by signal 9"), (write_or_fail, "ended with exit code 1")]
)
def test_a_process_that_dies_is_named_with_its_file(write, ending):
    finished = []
    with pytest.raises(RunFailed, match=f"^the process that was writing fatal {ending}") as caught:
        write_in_processes(write, files("first", "fatal", *"abcdefgh"), 2, finished.append, lambda _: None)
    assert "run the same command again" in caught.value.do
    assert "fatal" not in [file.name for file in finished]
