# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C and its like leave nothing behind, whenever they come."""

import os
import signal

import pytest
import typer

from llmb.cli.main import was_interrupted
from llmb.processes.signals import Interrupted, signals_as_exceptions


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_comes_while_a_process_is_started_waits_until_it_can_be_ended(number: signal.Signals) -> None:
    handler = signal.getsignal(number)
    started = False
    with pytest.raises(Interrupted, match=number.name), signals_as_exceptions() as signals:
        os.kill(os.getpid(), number)
        started = True
        signals.let_through()
    assert started
    assert signal.getsignal(number) is handler


def test_a_signal_that_comes_later_is_raised_at_once() -> None:
    with pytest.raises(Interrupted, match="SIGTERM"), signals_as_exceptions() as signals:
        signals.let_through()
        os.kill(os.getpid(), signal.SIGTERM)
        pytest.fail("the signal was held back")


@pytest.mark.parametrize(("error", "interrupted"), [(KeyboardInterrupt(), True), (typer.Exit(1), False)])
def test_ctrl_c_is_told_from_other_ends_of_a_command(error: BaseException, interrupted: bool) -> None:
    app = typer.Typer(pretty_exceptions_enable=False)

    @app.command()
    def command() -> None:
        raise error

    with pytest.raises(SystemExit) as end:
        app([])
    assert end.value.code in (1, 130)
    assert was_interrupted(end.value) is interrupted
